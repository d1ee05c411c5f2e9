# SPDX-License-Identifier: Apache-2.0
"""What the operands of a model do to a loss: run a model again and again on one batch, and switch its operands.

Every product gets its result as it is without rounding. What each operand would have added to it, its error, is
computed beside it, and meets the gradients that pass by.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS, Gemm, LinearConfig, operand_product
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import FORWARD, Layer
from fmtsim.gemm.layers.watch import Watcher, watching
from fmtsim.nn.conversion import settings
from fmtsim.nn.flash import Inputs
from fmtsim.nn.modules import EmulatedModule, Emulation
from fmtsim.nn.multihead_attention import Attended
from fmtsim.nn.raw_matmuls import ParameterProduct
from fmtsim.nn.sdpa import AttentionCall, run_attention
from fmtsim.recipes.attention_config import BACKWARD
from fmtsim.spec.quantizer import Clamp, Hadamard, Quantizer, Sparsity
from fmtsim.support.dispatch import autocast_dtype, without_own_modes
from fmtsim.support.errors import ArgumentError

_MADE_OF = {"w_d": "w_f", "x_w": "x_f", "g_w": "g_d"}  # what an operand with source "forward" is, or is made of
_REUSED = ("forward", "requantised")
ALL: Final = "all of the forward pass"  # in place of an operand's name
BEFORE: Final = "operands of "  # likewise, and a product's name


class Site:
    """One product of a model, forward and backward, with the operands that it rounds.

    Nothing is rounded until ``install`` says what; the arithmetic is float32 (float64 for float64 tensors), on no
    machine, and every stochastic rounding has a key of its own that is the same in each call. A product that a machine
    multiplies, or that is rounded, is an operand of its own name (``fprop dgrad wgrad``): the product of the rounded
    operands there, against their product in float32.

    Attributes:
        name: As in statistics: the module's name, and the part's where it has several products.
        module: The module's name.
        formats: What each operand that is rounded becomes, in words.
        forward: Operands that change the result, in their order.
        backward: Operands that change gradients alone.
        local: Those of them that change the gradient of the weight and nothing else.
        seed: Of its random numbers.
        expected: Whether a batch that does not run it is worth a note: Parameters may never be multiplied with.
    """

    def __init__(self, name: str, module: str, formats: Mapping[str, Any], forward: Any, seed: int) -> None:
        self.name, self.module, self.seed = name or "(model)", module, seed
        self.formats = {operand: str(what) for operand, what in formats.items()}
        self.forward = tuple(operand for operand in formats if operand in forward)
        self.backward = tuple(operand for operand in formats if operand not in forward)
        self.local: tuple[str, ...] = ()
        self.expected = True

    @property
    def whole(self) -> str:
        """What the forward pass is with all that rounds: its product on a machine, or its operands alone."""
        return "fprop" if "fprop" in self.forward else ALL

    def install(self, operand: str | None) -> None:
        """Round one operand in the model from now on, none (None), or ``ALL``."""
        raise NotImplementedError

    def run(self, operand: str | None, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the product of some inputs with one operand rounded, or none."""
        raise NotImplementedError

    def differs(self, operand: str) -> tuple[int, ...]:
        """Return which of the inputs' gradients an operand of the backward pass changes."""
        raise NotImplementedError

    @torch.no_grad()
    def errors(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return what rounding each operand of the forward pass alone adds to the result."""
        if not self.forward:
            return {}
        before = {base: self.run(base, inputs) for base in {before_of(operand) for operand in self.forward}}
        return {
            operand: (self.run(operand, inputs) - before[before_of(operand)]).to(inputs[0].dtype)
            for operand in self.forward
        }

    def gradient_errors(
        self, inputs: tuple[Tensor, ...], g: Tensor, operands: tuple[str, ...]
    ) -> dict[str, dict[int, Tensor]]:
        """Return what rounding operands of the backward pass alone adds to the gradients, by place of the input."""
        errors: dict[str, dict[int, Tensor]] = {}
        for operand in operands:
            places = self.differs(operand)
            rounded, plain = (self._gradients(which, inputs, g, places) for which in (operand, before_of(operand)))
            errors[operand] = {i: a - b for i, a, b in zip(places, rounded, plain, strict=True)}
        return errors

    @torch.enable_grad()
    def _gradients(
        self, operand: str | None, inputs: tuple[Tensor, ...], g: Tensor, places: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        leaves = list(inputs)
        for i in places:
            leaves[i] = _to_float(inputs[i]).detach().requires_grad_()
        y = self.run(operand, tuple(leaves))
        return torch.autograd.grad(y, [leaves[i] for i in places], g.to(y.dtype))


class LinearSite(Site):
    """A product of a layer with a weight."""

    def __init__(self, how: Emulation, module: str, part: str, seed: int, *, fresh: bool) -> None:
        self._how, self._part = how, part
        kinds = [kind for kind in how.products if kind.split(" ")[0] == part]
        original = how.products[next(kind for kind in kinds if kind.endswith("frozen"))]
        config = how.config
        if fresh:
            # 1. Scales without a history are those of the tensors themselves.
            def immediate(q: Quantizer) -> Quantizer:
                delayed = q.scaling is not None and q.scaling.history is not None
                return replace(q, scaling=replace(q.scaling, history=None, empty="one")) if delayed else q  # type: ignore[type-var]

            gemms = {name: getattr(config, name) for name in PRODUCTS}
            gemms = {name: replace(gemm, a=immediate(gemm.a), b=immediate(gemm.b)) for name, gemm in gemms.items()}
            config = replace(config, **gemms)
        # 2. Operands that are rounded or otherwise changed from high precision.
        quantizers = {name: _quantizer(config, name) for name in OPERANDS}
        quantizers = {
            name: q for name, q in quantizers.items()
            if q.format is not None or q.then is not None or any(isinstance(t, Clamp | Sparsity) for t in q.transforms)
        }  # fmt: skip
        machines = {name: machine for name in PRODUCTS if (machine := getattr(config, name).machine)}
        name, formats = ".".join(filter(None, (module, part))), {**quantizers, **machines}
        super().__init__(name, module, formats, (*FORWARD, "fprop"), seed)
        self.local = tuple(name for name in self.backward if name in ("g_w", "x_w", "wgrad"))
        # 3. A layer for each operand that may be rounded alone, for all of the forward pass, and for none; for a
        #    product on its machine one with its operands rounded, and one for those operands without the machine.
        self._kinds, self._layers = kinds, dict[str | None, Layer]()
        rounded = {name: {one for one in quantizers if operand_product(one) == name} for name in PRODUCTS}
        for operand in (None, ALL, *quantizers, *machines, *map(before_of, machines)):
            product = "fprop" if operand == ALL else str(operand).removeprefix(BEFORE)
            on = rounded.get(product, {operand})
            layer = Layer(_round_alone(config, on, operand), seed, {} if fresh else original.state)
            layer.sized, layer.rows = original.sized, original.rows  # so that calls are padded alike
            self._layers[operand] = layer

    @property
    def plain(self) -> Layer:
        """What runs where nothing is rounded."""
        return self._layers[None]

    def install(self, operand: str | None) -> None:
        """Round one operand in the model from now on, none (None), or ``ALL``."""
        layer = self._layers[operand]
        self._how.products = {**self._how.products, **dict.fromkeys(self._kinds, layer)}
        self._how.config = layer.config

    def run(self, operand: str | None, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return ``x w^T``; on a machine of tensors in the dtype of the pass, else of float32 or wider."""
        narrow = min((t.dtype for t in inputs), key=lambda dtype: dtype.itemsize)
        x, w = (t.to(narrow) if operand in PRODUCTS else _to_float(t) for t in inputs)
        with watching(None):  # the probe itself does not look
            return run_layer(x, w, None, self._layers[operand])

    def differs(self, operand: str) -> tuple[int, ...]:
        """Return 0 for x, 1 for w."""
        return (1,) if operand in self.local else (0,)


class AttentionSite(Site):
    """The products of an attention without weights. An operand that the forward pass made has no row of its own."""

    def __init__(self, attended: Attended, seed: int) -> None:
        self._attended, config = attended, attended.call.config
        quantizers = {name: q for name, q in config.operands.items() if q.format is not None or q.then is not None}
        super().__init__(attended.name, attended.name, quantizers, "qkvp", seed)
        rounded: dict[str | None, tuple[str, ...]] = {None: (), ALL: self.forward}
        rounded |= {name: (name,) for name in quantizers}
        self._calls: dict[str | None, AttentionCall] = {}
        for operand, names in rounded.items():
            # All others keep their rotations; the arithmetic is float32, on no machine.
            qs: Any = {name: (q if name in names else _without_rounding(q)) for name, q in config.operands.items()}
            sides = {product: [name for name in qs if name.startswith(f"{product}.")] for product in BACKWARD}
            gemms: Any = {product: Gemm(a=qs[a], b=qs[b]) for product, (a, b) in sides.items()}
            alone = replace(config, target=None, q=qs["q"], k=qs["k"], v=qs["v"], p=qs["p"], **gemms)
            self._calls[operand] = AttentionCall(alone, seed)
        self.plain = AttentionCall(self._calls[None].config, seed)  # by which a probe finds the site

    def install(self, operand: str | None) -> None:
        """Round one operand in the model from now on, none (None), or ``ALL``."""
        self._attended.call = self.plain if operand is None else self._calls[operand]

    def run(self, operand: str | None, inputs: tuple[Any, ...]) -> Tensor:
        """Return the attention of q, k and v, followed by mask, hides and factor."""
        q, k, v, *more = inputs
        with watching(None):
            return run_attention(Inputs(_to_float(q), _to_float(k), _to_float(v), *more), self._calls[operand])

    def differs(self, operand: str) -> tuple[int, ...]:
        """Return the places of q, k and v."""
        return (0, 1, 2)


def list_sites(model: nn.Module, seed: int, *, fresh: bool) -> list[Site]:
    """Return the places of a converted model where operands are rounded, in the order of its modules.

    Args:
        model: Converted; none of its operands is rounded from now on.
        seed: Of stochastic roundings.
        fresh: The model was converted just now: delayed scales have no history and become those of the tensor itself.
    """
    sites: list[Site] = []
    for module in model.modules():
        if isinstance(module, EmulatedModule) and (how := module.emulation) is not None:
            parts = dict.fromkeys(kind.split(" ")[0] for kind in how.products)
            for part in parts:
                sites.append(LinearSite(how, how.name, part, seed + len(sites), fresh=fresh))
                sites[-1].expected = len(parts) == 1 and not isinstance(module, ParameterProduct)
        if (attended := settings(module, "attention")) is not None:
            sites.append(AttentionSite(attended, seed + len(sites)))
    for site in sites:
        site.install(None)
    return [site for site in sites if site.formats]


def before_of(operand: str) -> str | None:
    """Return what an operand's rounding is added to: nothing, or for a product on a machine its rounded operands."""
    return None if operand not in PRODUCTS else ALL if operand == "fprop" else BEFORE + operand


def _round_alone(config: LinearConfig, operands: Collection[Any], machine: str | None = None) -> LinearConfig:
    """Return a layer that rounds some operands alone, in float32 but for the product ``machine``; rotations stay."""
    # An operand that is made of one of another product brings the quantiser of that.
    reused = (name for name in operands if name in _MADE_OF and config.operands[name].source in _REUSED)
    on = {*operands, *(_MADE_OF[name] for name in reused)}
    gemms: dict[str, Any] = {}
    for product in PRODUCTS:
        gemm, names = getattr(config, product), [name for name in OPERANDS if operand_product(name) == product]
        makers = [config.operands.get(_MADE_OF.get(name, "")) for name in names]
        pairs = zip(names, (gemm.a, gemm.b), makers, strict=True)
        a, b = (q if name in on else _without_rounding(q, forward) for name, q, forward in pairs)
        gemms[product] = replace(gemm, a=a, b=b) if product == machine else Gemm(a=a, b=b)
    return replace(config, **gemms)


def _without_rounding(q: Quantizer, forward: Quantizer | None = None) -> Quantizer:
    """Return a quantiser that rotates as another does, or as that of the forward pass does, and rounds nothing."""
    rotations = tuple(replace(t, rounded=None) for t in q.transforms if isinstance(t, Hadamard))
    # What the forward pass made is worth reusing where it is rotated, else it is the original.
    rotated = forward is None or any(isinstance(t, Hadamard) for t in forward.transforms)
    reused = q.source in _REUSED and rotated
    if q.source == "forward":
        return q if reused else Quantizer()
    return Quantizer(transforms=rotations, source=q.source if reused else "original")


def _quantizer(config: LinearConfig, operand: str) -> Quantizer:
    """Return what rounds an operand: the quantiser of the forward pass where that made it."""
    q = config.operands[operand]
    derived = q.source == "forward" or (q.source == "requantised" and q.format is None)
    return _quantizer(config, _MADE_OF[operand]) if derived else q


def _to_float(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


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
        # Calls that share a weight: the square of the sum of their errors.
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
        if site is None:
            return run(x, w)  # type: ignore[no-any-return]
        dtype = autocast_dtype(x.device.type)  # of products under autocast
        inputs = tuple(t if dtype is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, w))
        return self._look(site, inputs, run, 2)

    def attention(self, run: Any, call: Any, *inputs: Any) -> Tensor:
        """Look at attention."""
        with without_own_modes():  # their rules are for operations of the model
            return self._look(self._sites[call], inputs, run, 3)

    def _look(self, site: Site, inputs: tuple[Any, ...], run: Any, count: int) -> Tensor:
        if self._forward == "finite":  # nothing is measured: find the first that is not
            y: Tensor = run(*inputs)
            for what, t in (*zip(("input", "weight"), inputs, strict=False), ("result", y)):
                if not self.infinite and not bool(torch.isfinite(t).all()):
                    self.infinite = f"the {what} of {site.name}"
            return y
        node = self._node(site, inputs)
        if node is None:
            return run(*inputs)  # type: ignore[no-any-return]
        if self._forward == "tangent":
            self._weigh_tangent(site, node, inputs)
            return run(*inputs)  # type: ignore[no-any-return]
        seen = _Receive.apply(partial(self._inject, site, node), *inputs[:count])  # type: ignore[no-untyped-call]
        y = run(*seen, *inputs[count:])
        shift: Tensor | None = None
        if self._forward == "shifted":
            # The errors of all operands at once, each row of the batch with a random sign.
            shift = torch.zeros(())
            for name, error in node.errors.items():
                rows, signs = _by_row(error, self._samples), self.signs(site, name).to(error)
                shift = shift + (rows * signs[: len(rows), None]).reshape(error.shape)
        anchor = torch.zeros((), requires_grad=True)  # results have gradients where no weight learns
        return _Emit.apply(partial(self._weigh, site, node), y, shift, anchor)  # type: ignore[no-any-return, no-untyped-call]

    def _node(self, site: Site, inputs: tuple[Any, ...]) -> _Node | None:
        # 1. The number of the call tells which of a site's calls this is.
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
        # 2. The pass without rounding keeps inputs and errors of each call; the others look them up.
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
            self.rerouted.add(site.name)  # rounding changed which rows an expert gets
            return None
        return earlier

    def _sound(self, site: Site, operand: str, error: Tensor) -> bool:
        if bool(torch.isfinite(error).all()):
            return True
        self.broken.add((site, operand))
        return False

    def _weigh(self, site: Site, node: _Node, g: Tensor) -> None:
        """Multiply the gradient of a result with the errors of the operands."""
        if self._backward == "inject":
            return
        # 1. The first backward pass keeps the gradient. Operands that change the weight's gradient alone are done with:
        #    the square of that error, or where calls share a weight of the sum of their errors.
        if self._backward == "first":
            node.g = g.detach()
            local = site.local if isinstance(site, LinearSite) and node.learns[1] else ()
            for operand, errors in site.gradient_errors(node.inputs, node.g, local).items():
                if not self._sound(site, operand, errors[1]):
                    continue
                if self._counts[site] == 1:
                    self.local[site, operand] += _square(errors[1])
                    continue
                weight = site, operand, node.inputs[1].data_ptr()
                self._weights[weight] = errors[1] + self._weights.get(weight, 0.0)
        # 2. Operands of the forward pass: <g, e>, the rows apart.
        for operand, error in node.errors.items():
            key, product = (site, operand), g.to(error.dtype) * error
            if self._backward == "score":
                met = _by_row(product, _pieces(error, self._samples)).sum(-1).double()
                self.score[key] += met.square().sum().item()
                continue
            sums = _by_row(product, self._samples).sum(-1).double().cpu()
            # g' - g: the pass with the errors added comes last, and adds what the first one has subtracted.
            signed = (sums * self.signs(site, operand)[: len(sums)]).sum().item()
            self.second[key] += signed if self._backward == "loss" else -signed
            if self._backward == "first":
                self.first[key] += sums.sum().item()

    def _inject(self, site: Site, node: _Node, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs with the errors of operands added."""
        if self._backward != "inject" or self.injected is None or self.injected[0] is not site or node.g is None:
            return grads
        # The error at the gradient of the pass without rounding: what flows here now has errors from above.
        changed, operand = list(grads), self.injected[1]
        for place, error in site.gradient_errors(node.inputs, node.g, (operand,))[operand].items():
            grad = changed[place]
            if grad is not None and self._sound(site, operand, error):
                changed[place] = grad + error.to(grad.dtype)
        return tuple(changed)

    def _weigh_tangent(self, site: Site, node: _Node, inputs: tuple[Any, ...]) -> None:
        """Multiply the errors of gradients with how far the inputs moved: the squares of rows add up."""
        flows = tuple(name for name in site.backward if name not in site.local)
        if node.g is None or not any(node.learns[i] for name in flows for i in site.differs(name)):
            return
        for operand, errors in site.gradient_errors(node.inputs, node.g, flows).items():
            met: Any = 0.0  # <A^T v, e>, by rows of the batch or shorter pieces of it
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
