# SPDX-License-Identifier: Apache-2.0
"""What the operands of a model do to a loss: run a model again and again on one batch, and switch its operands.

Every product gets its result as it is without rounding. What each operand would have added to it, its error, is
computed beside it, and meets the gradients that pass by.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.arguments import takes
from fmtsim.gemm.layers.linear import autocast_to
from fmtsim.gemm.layers.watch import Watcher
from fmtsim.lab.analysis.operand_sites import LinearSite, Site
from fmtsim.ptq.calibrate import call
from fmtsim.support.dispatch import without_own_modes
from fmtsim.support.errors import ArgumentError, shown

_PARTS: Final = 16
Key = tuple[Site, str]
Forward = Literal["plain", "shifted", "tangent", "finite"]
Backward = Literal["first", "score", "inject", "loss"]


@dataclass(slots=True, eq=False)
class _Node:
    """Hold one call of a product in the pass that rounds nothing, and which of its inputs have gradients."""

    inputs: tuple[Any, ...]
    learns: tuple[bool, ...]
    errors: dict[str, Tensor]
    g: Tensor | None = None


class Probe(Watcher):
    """Look at the products of a model while it runs.

    Args:
        sites: Where operands are rounded.
        samples: Rows of the batch: the leading size of results is divided among them.
        seed: Of the signs.

    Attributes:
        first: ``<g, e>`` of each forward operand, g being the gradient where nothing is rounded.
        second: ``<g' - g, s e>``, g' being the gradient where the errors were added with signs s.
        score: Sum of ``<g, e>^2`` over rows of the batch, in backward passes from a random direction of the outputs.
        local: Squared norm of the error of the weight's gradient, of operands that change that alone.
        flowing: The same of all gradients, of operands that change those of inputs.
        injected: The operand whose error backward passes of kind ``"inject"`` add.
        broken: Operands whose rounding gives NaN or Inf.
        rerouted: Names of products that a pass called with other shapes than the first one.
        infinite: The first product that gets or makes NaN or Inf.
    """

    def __init__(self, sites: Sequence[Site], samples: int, seed: int) -> None:
        self._sites: dict[Any, Site] = {site.plain: site for site in sites}  # type: ignore[attr-defined]
        self._samples, self._seed, self._step = samples, seed, 0.0
        self._forward: Forward = "plain"
        self._backward: Backward = "first"
        self._nodes: dict[tuple[Site, int], _Node] = {}
        self._counts: defaultdict[Site, int] = defaultdict(int)
        self._weights: dict[tuple[Site, str, int], Tensor] = {}
        self.first: defaultdict[Key, float] = defaultdict(float)
        self.second: defaultdict[Key, float] = defaultdict(float)
        self.score: defaultdict[Key, float] = defaultdict(float)
        self.local: defaultdict[Key, float] = defaultdict(float)
        self.flowing: defaultdict[Key, float] = defaultdict(float)
        self.injected: Key | None = None
        self.broken: set[Key] = set()
        self.rerouted: set[str] = set()
        self.infinite = ""

    @property
    def ran(self) -> set[Site]:
        """The products that the pass without rounding ran."""
        return {site for site, _ in self._nodes}

    def begin(self, kind: Forward, step: float = 0.0) -> None:
        """Say what the next forward pass is: ``step`` is how far parameters were moved for ``"tangent"``."""
        self._forward, self._step = kind, step
        self._counts.clear()

    def backward(self, loss: Tensor, kind: Backward, *, again: bool = False) -> None:
        """Run a backward pass of some kind, whose graph may be needed again."""
        self._backward = kind
        loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        for (site, operand, _), error in self._weights.items():
            self.local[site, operand] += _square(error)
        self._weights.clear()

    def signs(self, site: Site, operand: str) -> Tensor:
        """Return +1 or -1 for each row of the batch, float32, the same in every call."""
        use = (*site.forward, *site.backward).index(operand)
        source = torch.Generator().manual_seed(self._seed + 64 * site.seed + use)
        return torch.randint(0, 2, (self._samples,), generator=source).mul_(2).sub_(1).float()

    def layer(self, run: Any, layer: Any, x: Tensor, w: Tensor) -> Tensor:
        """Look at a layer's product."""
        site = self._sites.get(layer)
        return run(x, w) if site is None else self._look(site, (autocast_to(x, x), autocast_to(w, x)), run, 2)  # type: ignore[no-any-return]

    def attention(self, run: Any, call: Any, *inputs: Any) -> Tensor:
        """Look at attention."""
        with without_own_modes():
            return self._look(self._sites[call], inputs, run, 3)

    def _look(self, site: Site, inputs: tuple[Any, ...], run: Any, count: int) -> Tensor:
        if self._forward == "finite":
            return self._search(site, inputs, run)
        node = self._node(site, inputs)
        if node is None:
            return run(*inputs)  # type: ignore[no-any-return]
        if self._forward == "tangent":
            self._meet_tangent(site, node, inputs)
            return run(*inputs)  # type: ignore[no-any-return]
        seen = _Receive.apply(partial(self._inject, site, node), *inputs[:count])  # type: ignore[no-untyped-call]
        y = run(*seen, *inputs[count:])
        shift = None
        if self._forward == "shifted":
            shift = sum((self._signed(site, name, error) for name, error in node.errors.items()), torch.zeros(()))
        anchor = torch.zeros((), requires_grad=True)  # results have gradients where no weight learns
        return _Emit.apply(partial(self._meet, site, node), y, shift, anchor)  # type: ignore[no-any-return, no-untyped-call]

    def _node(self, site: Site, inputs: tuple[Any, ...]) -> _Node | None:
        index = self._counts[site]
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing runs it again
            if index > 1:
                raise ArgumentError(
                    f"layer {site.name!r} runs {index} times under activation checkpointing, and attribute cannot "
                    "tell its calls apart; switch checkpointing off"
                )
            index = 0
        else:
            self._counts[site] += 1
        if self._forward == "plain":
            saved = tuple(t.detach() if isinstance(t, Tensor) else t for t in inputs)
            learns = tuple(isinstance(t, Tensor) and t.requires_grad for t in inputs)
            node = self._nodes.setdefault((site, index), _Node(saved, learns, {}))
            node.learns = learns  # where it runs again for the backward pass, the first run had no gradients
            if not node.errors:
                node.errors = {name: e for name, e in site.errors(saved).items() if self._sound(site, name, e)}
            return node
        earlier = self._nodes.get((site, index))
        if earlier is None or earlier.inputs[0].shape != inputs[0].shape:
            self.rerouted.add(site.name)
            return None
        return earlier

    def _sound(self, site: Site, operand: str, error: Tensor) -> bool:
        if bool(torch.isfinite(error).all()):
            return True
        self.broken.add((site, operand))
        return False

    def _search(self, site: Site, inputs: tuple[Any, ...], run: Any) -> Tensor:
        y: Tensor = run(*inputs)
        for what, t in (*zip(("input", "weight"), inputs, strict=False), ("result", y)):
            if not self.infinite and not bool(torch.isfinite(t).all()):
                self.infinite = f"the {what} of {site.name}"
        return y

    def _signed(self, site: Site, operand: str, error: Tensor) -> Tensor:
        signs = self.signs(site, operand).to(error)
        rows = _by_row(error, self._samples)
        return (rows * signs[: len(rows), None]).reshape(error.shape)

    def _meet(self, site: Site, node: _Node, g: Tensor) -> None:
        """Multiply the gradient of a result with the errors of the operands."""
        if self._backward == "inject":
            return
        if self._backward == "first":
            node.g = g.detach()
            self._meet_local(site, node)
        for operand, error in node.errors.items():
            key, product = (site, operand), g.to(error.dtype) * error
            if self._backward == "score":
                met = _by_row(product, _pieces(error, self._samples)).sum(-1).double()
                self.score[key] += met.square().sum().item()
                continue
            sums = _by_row(product, self._samples).sum(-1).double().cpu()
            signed = (sums * self.signs(site, operand)[: len(sums)]).sum().item()
            self.second[key] += signed if self._backward == "loss" else -signed
            if self._backward == "first":
                self.first[key] += sums.sum().item()

    def _meet_local(self, site: Site, node: _Node) -> None:
        assert node.g is not None
        if not isinstance(site, LinearSite) or not node.learns[1]:
            return
        w = node.inputs[1]
        for operand, errors in site.gradient_errors(node.inputs, node.g, site.local).items():
            if not self._sound(site, operand, errors[1]):
                continue
            if self._counts[site] == 1:
                self.local[site, operand] += _square(errors[1])
                continue
            key = site, operand, w.data_ptr()
            self._weights[key] = errors[1] + self._weights[key] if key in self._weights else errors[1]

    def _inject(self, site: Site, node: _Node, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs with the errors of operands added."""
        if self._backward != "inject" or self.injected is None or self.injected[0] is not site or node.g is None:
            return grads
        changed, operand = list(grads), self.injected[1]
        for place, error in site.gradient_errors(node.inputs, node.g, (operand,))[operand].items():
            grad = changed[place]
            if grad is not None and self._sound(site, operand, error):
                changed[place] = grad + error.to(grad.dtype)
        return tuple(changed)

    def _meet_tangent(self, site: Site, node: _Node, inputs: tuple[Any, ...]) -> None:
        """Multiply the errors of gradients with how far the inputs moved: the squares of rows add up."""
        flows = tuple(name for name in site.backward if name not in site.local)
        if node.g is None or not any(node.learns[i] for name in flows for i in site.differs(name)):
            return
        for operand, errors in site.gradient_errors(node.inputs, node.g, flows).items():
            met: Any = 0.0
            for place, error in errors.items():
                moved = inputs[place].to(error.dtype) - node.inputs[place].to(error.dtype)
                met = met + _by_row(moved * error, _pieces(error, self._samples)).sum(-1).double() / self._step
            if self._sound(site, operand, met):
                self.flowing[site, operand] += met.square().sum().item()


class _Receive(torch.autograd.Function):
    """Return the inputs, and let ``change`` replace their gradients."""

    @staticmethod
    def forward(ctx: Any, change: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.change = change
        seen = tuple(t.view_as(t) for t in inputs)
        ctx.mark_non_differentiable(*(s for s, t in zip(seen, inputs, strict=True) if not t.requires_grad))
        return seen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.change(grads)


class _Emit(torch.autograd.Function):
    """Add ``shift`` to a result, and pass the result's gradient to ``see``."""

    @staticmethod
    def forward(ctx: Any, see: Any, y: Tensor, shift: Tensor | None, anchor: Tensor) -> Tensor:
        ctx.see = see
        return y.view_as(y) if shift is None else y + shift.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.see(g)
        return None, g, None, None


def _by_row(t: Tensor, samples: int) -> Tensor:
    """Return a tensor as a matrix with a row for each of the batch, or with one where its size does not fit."""
    fits = t.dim() > 1 and math.prod(t.shape[:-1]) % samples == 0
    return t.reshape(samples if fits else 1, -1)


def _pieces(t: Tensor, samples: int) -> int:
    """Return into how many parts a tensor is cut: rows of the batch, or more of their positions until there are 16."""
    rows = math.prod(t.shape[:-1])
    if rows % samples:
        return samples
    return next((n for n in range(samples, rows + 1, samples) if n >= _PARTS and rows % n == 0), rows)


def _square(t: Tensor) -> float:
    return t.float().square().sum().item()


class Runs:
    """Run a model on one batch, from the same random state each time; arguments are those of ``attribute``.

    Attributes:
        parameters: Those whose gradients count.
        forwards, backwards: Passes so far.
        why_no_kl: Why there are no logits, empty where there are some.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Any, logits: Any) -> None:
        self.model, self._batch, self._loss, self._logits = model, batch, loss, logits
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        if not any(p.requires_grad for p in parameters):  # a model that is used, not trained
            model.requires_grad_()
        self.parameters = [p for p in parameters if p.requires_grad]
        self.forwards = self.backwards = 0
        self.why_no_kl = ""
        self._devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return loss and logits of a forward pass."""
        self.forwards += 1
        with torch.random.fork_rng(self._devices):
            output = call(self.model, self._batch, kind="batch")
            return self._loss_of(output), self._logits_of(output)

    def measure(self, reference: Tensor | None) -> tuple[float, float | None]:
        """Return the loss, and the KL from a reference, of a pass without gradients."""
        with torch.no_grad():
            loss, logits = self.forward()
            return loss.item(), None if reference is None or logits is None else kl_of(logits, reference).item()

    def backward(self, probe: Probe, loss: Tensor, kind: Backward, *, again: bool = False) -> list[Tensor | None]:
        """Return the gradients of the parameters, float32 or wider."""
        self.backwards += 1
        for p in self.model.parameters():
            p.grad = None
        probe.backward(loss, kind, again=again)
        return [None if p.grad is None else _dense(p.grad) for p in self.parameters]

    @property
    def samples(self) -> int:
        """Rows of the batch: the first size of its first tensor."""
        batch = self._batch
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            raise ArgumentError(
                f"batch={shown(batch)} is not a batch; pass a tensor, a tuple of arguments or a dict of keywords"
            )
        values = batch.values() if isinstance(batch, Mapping) else batch
        tensors = [values] if isinstance(values, Tensor) else [t for t in values if isinstance(t, Tensor)]
        return next((t.shape[0] for t in tensors if t.dim() and t.shape[0]), 1)

    def _loss_of(self, output: Any) -> Tensor:
        if self._loss is None:
            loss = output if isinstance(output, Tensor) else _field(output, "loss")
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ArgumentError(
                    f"the model returned {_described(output)}, in which there is no loss; "
                    "pass loss=lambda output: ..., a number that gradients go through"
                )
        elif takes(self._loss, output):
            loss = self._loss(output)
        else:
            loss = self._loss(output, self._batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
            raise ArgumentError(
                f"loss= returned {_described(loss)}; return a tensor with one number that gradients go through"
            )
        return loss.reshape(())

    def _logits_of(self, output: Any) -> Tensor | None:
        logits = _field(output, "logits") if self._logits is None else self._logits(output)
        usable = isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() > 1 and logits.shape[-1] > 1
        if usable and (logits.requires_grad or not torch.is_grad_enabled()):
            return logits  # type: ignore[no-any-return]
        if self._logits is not None:
            raise ArgumentError(
                f"logits= returned {_described(logits)}; return [..., classes], two or more, that gradients go through"
            )
        self.why_no_kl = (
            f"no KL: the model returns {_described(output)}, and whether that holds logits cannot be told; "
            "pass logits=lambda output: ..."
        )
        return None


def kl_of(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the mean over positions of ``KL(softmax(reference) || softmax(logits))`` in nats."""
    p, q = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (reference, logits))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def _dense(grad: Tensor) -> Tensor:
    dense = grad.to_dense() if grad.layout != torch.strided else grad
    return dense.clone() if dense.dtype == torch.float64 else dense.float()


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
