# SPDX-License-Identifier: Apache-2.0
"""Why a trainer and a rollout engine disagree about log-probabilities: products that they add in different orders."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.gemm.model_calls import OUTPUTS
from fmtsim.gemm.products.matmul import linear
from fmtsim.gemm.targets.doubts import without_doubts
from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.analysis.invariance import (
    Band,
    Model,
    check_rows,
    differences,
    equal_layers,
    join_bands,
    list_products,
    operand_formats,
    same_bits,
    size_bands,
)
from fmtsim.lab.analysis.one_step import unchanged
from fmtsim.lab.analysis.perplexity import read_labels, read_logits
from fmtsim.lab.analysis.shadow import call_with_gradient
from fmtsim.nn.convert import convert
from fmtsim.nn.coverage import together
from fmtsim.nn.state import is_converted
from fmtsim.ptq.calibrate import call, check_model, evaluating
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, shown

DECODE = range(1, 257)
_VERB = "explain_mismatch"
_RUNS = {name: OUTPUTS[name] for name in ("bf16", "fp16")}  # with a batch
_PROBES = 4  # random signs of the tokens, over which squared gradients are averaged
_MACS = 1 << 26  # multiply-adds of a layer for which two orders are compared
_SAME = {True: "yes", False: "no", None: "not known"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductMismatch:
    """Compare the orders in which the two engines add one product."""

    layer: str  # name of the layers, or their outputs and inputs
    trainer: Band  # the trainer's M: call, plan, evidence
    rollout: Band  # neighbouring M of the rollout with one order
    same: bool | None  # whether a row has the same bits in both; None where an order is a guess
    estimate: float | None  # estimate, rounding: as ``explain_mismatch`` says, in nats; None without a batch
    rounding: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMismatch:
    """Compare the whole model at M of the rollout that have one set of orders; what needs a batch is None without."""

    rows: tuple[int, ...]  # the M
    same: bool | None  # same, estimate, rounding: as in ProductMismatch, of all products together
    estimate: float | None = None
    rounding: float | None = None
    rms: float | None = None  # measured, in nats: of the differences of the text's own log-probabilities
    largest: float | None = None  # of any word at any position; NaN where one is NaN
    kl: float | None = None  # mean of KL(rollout || trainer) over positions
    different: int | None = None  # how many logits have other bits
    logits: int | None = None  # of so many


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Mismatch(table.Result):
    """Hold what ``explain_mismatch`` found; ``print`` shows tables, notebooks HTML."""

    trainer: str  # trainer, rollout: names of the targets
    rollout: str
    products: tuple[ProductMismatch, ...]  # each product at each M of the rollout where its order changes
    counts: tuple[RolloutMismatch, ...]  # the M of the rollout in groups, in each of which every product has one order

    @property
    def same(self) -> bool | None:
        """Whether a row has the same bits in both engines, whatever the rollout's M; None where that is not known."""
        return _all(x.same for x in self.counts)

    def _content(self) -> Iterator[table.Rows | str]:
        yield table.table_of(_PRODUCTS, self.products, filled=True)
        yield table.table_of(_COUNTS, self.counts, filled=True)
        layers = [_all(x.same for x in self.products if x.layer == y) for y in {x.layer: 0 for x in self.products}]
        words = ((True, "have equal bits"), (False, "differ at some M"), (None, "are not known"))
        total = ", ".join(f"{layers.count(key)} {text}" for key, text in words if key in layers)
        sides = f"trainer {self.trainer} ({self.products[0].trainer}), rollout {self.rollout}"
        yield f"{sides}: {len(layers)} products, {total}"
        if self.counts[0].rms is None:
            yield "pass a module and a batch for the difference of log-probabilities, estimated and measured"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        products = [
            {"layer": x.layer, "operands": operand_formats(x.trainer.call), "trainer": x.trainer.to_dict(),
             "rollout": x.rollout.to_dict(), "same": x.same, "estimate": x.estimate, "rounding": x.rounding}
            for x in self.products
        ]  # fmt: skip
        sides = {"trainer": self.trainer, "rollout": self.rollout, "same": self.same}
        return sides | {"products": products, "counts": table.jsonable(self.counts)}


def _order(band: Band) -> str:
    plan = band.found.plan
    return f"{band.found.unit}, split {plan.split}, tile {plan.k_tile or 'none'}, {band.found.basis}"


_PRODUCTS = (
    table.Column("layer", "layer"), table.Column("operands", lambda x: operand_formats(x.trainer.call)),
    table.Column("rollout", lambda x: str(x.rollout)), table.Column("same bits", lambda x: _SAME[x.same]),
    table.Column("trainer's order", lambda x: _order(x.trainer)),
    table.Column("rollout's order", lambda x: _order(x.rollout)),
    table.Column("what differs", lambda x: "" if x.same else differences(x.trainer, x.rollout)),
    table.Column("estimate", "estimate", ">.2g"), table.Column("rounding", "rounding", ">.2g"),
)  # fmt: skip
_COUNTS = (
    table.Column("rollout's M", lambda x: together(list(map(str, x.rows)))),
    table.Column("same bits", lambda x: _SAME[x.same]),
    *(table.Column(name, name, ">.2g") for name in ("estimate", "rounding", "rms", "largest", "kl")),
    table.Column("different", "different", ">,"), table.Column("logits", "logits", ">,"),
)  # fmt: skip


def explain_mismatch(
    model: Model, batch: Any = None, *, trainer: Any, rollout: Any, trainer_tokens: int = 8192,
    prefill: int = 512, decode: Iterable[int] = DECODE, dtype: str = "bf16",
) -> Mismatch:  # fmt: skip
    """Explain why a trainer and a rollout engine give a token different log-probabilities: other orders of sums.

    A library chooses the order of a product by its GPU and by M, the rows of the whole call: batch times length in a
    trainer, the prompt's tokens in prefill, the number of sequences in decode. Without a batch nothing is multiplied.

    With one, both engines are emulated on all its tokens: linear layers in the orders of calls with the stated M (one M
    of the rollout throughout, keys and values included), everything else as torch computes it here, alike in both.
    Two figures say what root mean square of the differences of tokens' log-probabilities to expect. Each propagates
    noise of a layer's output by the gradients of these log-probabilities with respect to it (autograd in ``dtype``,
    squared and summed; errors of elements and of products count as independent). ``estimate`` takes the difference that
    two orders make of the layer's own inputs (of its first rows where it is large); it is of first order, and too low
    where few elements differ, because a gradient does not see later roundings that fall otherwise. ``rounding`` takes
    two roundings to ``dtype``, ulp^2 / 12 each, which deep models come to; operators between layers round, too, and are
    not in it. A plan that is a guess counts as it is.

    Args:
        model: As in ``batch_invariance``, before ``convert``; with a batch a module that returns logits.
        batch: Token numbers [rows, tokens], or a dict with ``input_ids``, for a copy of the model in ``dtype``. Each
            set of orders that the rollout's M have takes a pass of emulation: choose few in ``decode``.
        trainer, rollout: GPUs with their libraries, by name, or plan files.
        trainer_tokens: M in the trainer.
        prefill, decode: M in the rollout: of the prompt, and of steps that follow.
        dtype: Operands, as in ``batch_invariance``; with a batch ``"bf16"`` or ``"fp16"``.

    Raises:
        ArgumentError: No such target or model, no linear layer, M that are no numbers, a batch that does not run.

    >>> same = {"trainer_tokens": 64, "prefill": 64, "decode": [64]}
    >>> explain_mismatch([(4096, 4096, False)], trainer="h200", rollout="h200", **same).same
    True
    """
    asked = {"trainer_tokens": [trainer_tokens], "prefill": [prefill], "decode": decode}
    m, *rollouts = (check_rows(_VERB, name, value) for name, value in asked.items())
    rows = sorted({*rollouts[0], *rollouts[1]})
    targets = get_target(trainer), get_target(rollout)
    net: Any = model  # a module where there is a batch
    if isinstance(net, nn.Module) and is_converted(net):
        raise ArgumentError(f"{_VERB} got a converted model; pass it as it was before convert (fmtsim.revert)")
    labels = None  # the tokens of a batch
    if batch is not None:
        check_model(_VERB, net)
        if dtype not in _RUNS:
            choice = " or ".join(_RUNS)
            raise ArgumentError(f"{_VERB} got dtype={shown(dtype)} with a batch; choose {choice}, or no batch")
        labels = read_labels(batch, 0)
        if not bool((labels[:, 1:] >= 0).any()):
            raise ArgumentError(
                f"{_VERB}: the batch has no token to predict; pass rows of 2 tokens or more, not masked"
            )
    sides = [list_products(_VERB, model, target, [dtype], ["forward"]) for target in targets]
    pairs = {
        a.layer: (next(size_bands(a, m)), list(join_bands(size_bands(b, rows)))) for a, b in zip(*sides, strict=True)
    }
    noise: dict[tuple[str, int], float] = {} if labels is None else _noise(net, batch, labels, dtype, pairs)
    estimated = noise.get if labels is not None else lambda key, absent: None
    products = tuple(
        ProductMismatch(layer=layer, trainer=one, rollout=band, same=_same(one, band),
                        estimate=estimated((layer, band.first), 0.0), rounding=estimated((layer, 0), 0.0))
        for layer, (one, bands) in pairs.items() for band in bands
    )  # fmt: skip
    groups: dict[tuple[int, ...], list[int]] = {}
    for count in rows:
        at = [x.rollout for x in products if x.rollout.first <= count <= x.rollout.last]
        groups.setdefault(tuple(x.first if x.group is None else -1 - x.group for x in at), []).append(count)
    logits = None if labels is None else _logits(net, batch, labels, dtype, targets[0], m[0])
    counts = []
    for first, *others in groups.values():
        at_first = [x for x in products if x.rollout.first <= first <= x.rollout.last]
        same, more = _all(x.same for x in at_first), dict[str, Any]()
        if labels is not None and logits is not None:
            more = _difference(logits, _logits(net, batch, labels, dtype, targets[1], first), labels)
            more["estimate"] = math.hypot(*(x.estimate or 0.0 for x in at_first))
            more["rounding"] = 0.0 if same else math.hypot(*(x.rounding or 0.0 for x in at_first))
        counts.append(RolloutMismatch(rows=(first, *others), same=same, **more))
    return Mismatch(trainer=targets[0].name, rollout=targets[1].name, products=products, counts=tuple(counts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _AtRows(Target):
    """Choose units and orders as a target does for calls of ``rows`` rows, however many there are."""

    target: Target  # which may be of a class with choices of its own
    rows: int

    def resolve(self, call: GemmCall, *, strict: bool = False) -> GemmSpec:
        """Return what the target has for that M."""
        return self.target.resolve(replace(call, m=self.rows), strict=strict)


@lru_cache(maxsize=64)
def _at_rows(target: Target, rows: int) -> _AtRows:
    return _AtRows(target=target, rows=rows, **{field.name: getattr(target, field.name) for field in fields(Target)})


def _all(answers: Iterable[bool | None]) -> bool | None:
    """Return False where one answer is, else None where one is, else True."""
    distinct = set(answers)
    return False if False in distinct else None if None in distinct else True


def _same(trainer: Band, rollout: Band) -> bool | None:
    if rollout.first == rollout.last and trainer.call == rollout.call:
        return True  # one library, one call: a guess is the same for both
    return None if None in (trainer.group, rollout.group) else same_bits(trainer.call, trainer.found, rollout.found)


def _logits(model: nn.Module, batch: Any, labels: Tensor, dtype: str, target: Target, rows: int) -> Tensor:
    """Return the logits [rows, tokens, vocabulary] of a copy whose linear layers are summed as in calls of some M."""
    names = {name for alike in equal_layers(model).values() for name in alike}
    machine: dict[str, Any] = {"format": dtype, "target": _at_rows(target, rows), "native": False}

    def change(model_copy: nn.Module) -> None:
        convert(model_copy.to(_RUNS[dtype]), **machine, filter_fn=lambda module, name: name in names)

    with unchanged(model, change) as model_copy, evaluating(model_copy), torch.no_grad(), without_doubts():
        return read_logits(call(model_copy, batch, kind="batch"), labels)


def _difference(trainer: Tensor, rollout: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the measured fields of a RolloutMismatch."""
    p, q = (x.double().log_softmax(-1) for x in (trainer, rollout))
    delta = torch.where(p == q, 0.0, q - p)  # two words at -inf agree
    rms, kl = _next_tokens(delta, labels).square().mean().sqrt(), (q.exp() * delta).sum(-1).mean()
    numbers = {"rms": rms.item(), "largest": delta.abs().max().item(), "kl": kl.item()}
    return {**numbers, "different": compare(rollout, trainer).mismatches, "logits": p.numel()}


def _next_tokens(x: Tensor, labels: Tensor) -> Tensor:
    """Return the numbers of the tokens that follow, those that count, of numbers of the whole vocabulary."""
    following = labels[:, 1:]
    return x[:, :-1].gather(-1, following.clamp(min=0)[..., None])[..., 0][following >= 0]


def _noise(
    model: nn.Module, batch: Any, labels: Tensor, dtype: str, pairs: dict[str, tuple[Band, list[Band]]]
) -> dict[tuple[str, int], float]:
    """Return each layer's estimates by the first M of bands that differ, and its rounding by M = 0."""
    squares: dict[tuple[str, int], float] = {}

    def watch(layer: str, module: Any, args: Any, y: Tensor) -> None:
        x, w = args[0].detach().flatten(0, -2), module.weight.detach()
        w = w if isinstance(module, nn.Linear) else w.t()  # Conv1D of transformers has [inputs, outputs]
        x, bias = x[: max(1, _MACS // w.numel())], None if module.bias is None else module.bias.detach()

        def result(band: Band) -> Tensor:
            target = _at_rows(get_target(band.call.target), band.first)
            return linear(x, w, bias, target=target, native=False).double()

        trainer, rollout = pairs[layer]
        bands = [band for band in rollout if not _same(trainer, band)]
        reference = [result(trainer)] if bands else []
        noise = {band.first: (result(band) - reference[0]).square().mean().item() for band in bands}
        ulp = torch.exp2(y.detach().double().frexp().exponent - 1.0) * torch.finfo(y.dtype).eps
        noise[0] = torch.where(y == 0, 0.0, ulp).square().mean().item() / 6

        def add(g: Tensor) -> None:
            for first, square in noise.items():
                total = squares.get((layer, first), 0.0)
                squares[layer, first] = total + square * g.double().square().sum().item()

        call_with_gradient(y, add)

    def change(model_copy: nn.Module) -> None:
        model_copy.to(_RUNS[dtype]).requires_grad_(True)
        for layer, names in equal_layers(model_copy).items():
            for name in names:
                model_copy.get_submodule(name).register_forward_hook(partial(watch, layer))

    with unchanged(model, change) as model_copy, evaluating(model_copy), torch.enable_grad(), without_doubts():
        logits = read_logits(call(model_copy, batch, kind="batch"), labels)
        tokens = _next_tokens(logits.float().log_softmax(-1), labels)
        generator = torch.Generator().manual_seed(0)
        for _ in range(_PROBES):
            signs = torch.randint(0, 2, tokens.shape, generator=generator).to(tokens) * 2 - 1
            torch.autograd.backward(tokens, signs, retain_graph=True)
    return {key: math.sqrt(square / (_PROBES * tokens.numel())) for key, square in squares.items()}
