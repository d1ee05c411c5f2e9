# SPDX-License-Identifier: Apache-2.0
"""audit: recompute operators of a trace that a GPU left, each from its recorded inputs, and compare bits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmtsim.gemm.products.matmul import linear, mm
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.lab.analysis.fingerprint import Fingerprints
from fmtsim.lab.analysis.trace import CALL, Operation, Trace, read_call
from fmtsim.machine.simulate import RECORDED, TARGETS, simulate
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, first_line
from fmtsim.support.executors import AnyExecutor, open_tasks
from fmtsim.support.progress import make_progress

_ATEN = torch.ops.aten
_HEADS = 4  # heads of attention that are recomputed
_APART = 1_000_003  # seeds of operators


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedLayer:
    """Say how one layer's operators compare."""

    layer: str
    direction: str  # of the pass
    operators: int = 0  # how many were recomputed with the GPU's bits
    elements: int = 0  # how many were compared
    different: int = 0  # of other bits; a whole tensor counts where its stored bits are not those of its hash
    unchecked: tuple[str, ...] = ()  # operators whose bits are not known, by name
    first: str = ""  # the first operator that differs, empty where none does


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Audit(table.Result):
    """Hold the layers of an audited trace, in order."""

    layers: tuple[AuditedLayer, ...]  # one for each layer and pass
    target: str  # the GPU whose bits the trace was held to
    device: str  # device, versions: what the trace says of where it was recorded
    versions: tuple[tuple[str, str], ...]
    rows: int  # of each product that were recomputed, at most

    @property
    def equal(self) -> bool:
        """Whether no element differs."""
        return not any(layer.different for layer in self.layers)

    def _content(self) -> Iterable[table.Rows | str]:
        columns = [
            table.Column("layer", lambda x: x.layer or "(model)"), table.Column("pass", "direction"),
            table.Column("operators", "operators", ">,"), table.Column("elements", "elements", ">,"),
            table.Column("different", "different", ">,"), table.Column("first", "first"),
            table.Column("not known", lambda x: ", ".join(dict.fromkeys(x.unchecked))),
        ]  # fmt: skip
        yield table.table_of(columns, self.layers, filled=True)
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        yield f"recorded on {self.device} ({versions}), held to {self.target}, {self.rows} rows of each product"
        version = dict(self.versions).get("torch")
        if version != RECORDED:
            yield f"torch {version} may order sums otherwise than torch {RECORDED}, whose bits were recorded"
        bad = [x for x in self.layers if x.different]
        yield f"bits differ in {len(bad)} of {len(self.layers)} layers and passes" if bad else "all compared bits agree"


def audit(
    trace: Trace, *, target: str | None = None, rows: int = 32, seed: int = 0, progress: bool | None = None,
    executor: AnyExecutor = None,
) -> Audit:  # fmt: skip
    """Recompute operators of a trace with a GPU's bits, each from its recorded arguments, so that errors do not add up.

    Of matrix products randomly chosen rows are recomputed, in the order of the whole product's plan; of attention some
    heads; all else whole, but what draws random numbers, of which a trace has no seed. Stored tensors are held to their
    hashes, too.

    Args:
        trace: Of level ``"aten"`` with ``tensors=True``.
        target: ``"h200"`` or ``"h100"``; None reads it from the trace's device.
        rows: Rows of each product, at most.
        seed: Which rows.
        progress, executor: As in ``fmtsim.search``; tasks are operators.

    Raises:
        ArgumentError: The trace stored no arguments, or its device is not a target.
        DataError: What it stored of an operator is damaged.
    """
    if rows < 1:
        raise ArgumentError(f"rows={rows} is not possible; choose 1 or more")
    if not any(heading == CALL for one in trace.operations for heading, _ in one.facts):
        raise ArgumentError(
            "the trace holds no operators' arguments; record it with fmtsim trace --level aten --tensors all"
        )
    name = target or next((name for name in TARGETS if name in trace.device.lower()), None)
    if name is None:
        raise ArgumentError(f"the trace is of {trace.device!r}, which is no target; pass target='h200' or 'h100'")
    # 1. Recompute the operators whose arguments were stored, each in a task of its own.
    called = ((one, dict(one.facts).get(CALL)) for one in trace.operations)
    calls = [(one, call, trace.tensors.get(one.index, {})) for one, call in called if call is not None]
    with make_progress(progress, verb="audit") as show, open_tasks((name, rows, seed, trace.batch), executor) as tasks:
        show.stage("operators", len(calls))
        results = {call[0].index: result for call, result in tasks.each_done(_audit_operator, calls, show)}
    # 2. Add up by layer and pass: operators, elements, how many differ, what is not known, the first that differs.
    layers: dict[tuple[str, str], list[Any]] = {}
    for one, _, _ in calls:
        counts = layers.setdefault((one.layer, one.direction), [0, 0, 0, [], ""])
        compared, different, known = results[one.index]
        operator = one.operation.removeprefix("aten::")
        counts[0] += known
        counts[1] += compared
        counts[2] += different
        counts[3] += [] if known or different else [operator]
        counts[4] = counts[4] or (operator if different else "")
    audited = tuple(
        AuditedLayer(layer=layer, direction=direction, operators=n, elements=compared, different=different,
                     unchecked=tuple(unknown), first=first)
        for (layer, direction), (n, compared, different, unknown, first) in layers.items()
    )  # fmt: skip
    return Audit(layers=audited, target=name, device=trace.device, versions=trace.versions, rows=rows)


def _audit_operator(
    how: tuple[str, int, int, int], recorded: tuple[Operation, str, dict[str, Tensor]]
) -> tuple[int, int, bool]:
    """Return the elements of an operator that were compared and that differ, and whether it was computed anew."""
    (target, rows, seed, batch), (one, call, stored) = how, recorded
    generator = torch.Generator().manual_seed(seed + _APART * one.index)  # whatever runs in this process before
    try:
        # 1. Hold what was stored to the hashes.
        damaged = 0  # elements of stored outputs whose bits are not those of their hashes
        for bits in one.outputs:
            prints = Fingerprints()
            prints.batch = batch
            place = prints.add(stored[bits.name]) if bits.name in stored else None
            if place is not None and prints.finish()[place[0]].hash != bits.hash:
                damaged += stored[bits.name].numel()
        # 2. Of sound outputs, the operator itself.
        result = None if damaged else _recompute(one, call, stored, target, rows, generator)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, FmtsimError):
            raise
        raise DataError(
            f"operation {one.index} of the trace, {one.operation}, cannot be made again from what is stored "
            f"({type(error).__name__}: {first_line(error)}); trace again"
        ) from error
    return (damaged, damaged, False) if result is None else (*result, True)


def _recompute(
    one: Operation, call: str, stored: dict[str, Tensor], target: str, rows: int, generator: torch.Generator
) -> tuple[int, int] | None:
    """Return how many elements were compared and how many differ; None where the GPU's bits are not known."""
    overload, args, kwargs = read_call(call, stored)
    outputs: list[Any] = [stored.get(bits.name) for bits in one.outputs]
    packet = getattr(_ATEN, one.operation.removeprefix("aten::"), None)
    if packet is None or not one.operation.startswith("aten::"):
        return None
    # 1. Pairs of tensors, computed and recorded: of a product some rows, of attention some heads, of others all.
    run = simulate(target=target)
    pairs: list[tuple[Any, Any]] | None
    if one.operation in ("aten::mm", "aten::addmm") and not kwargs and args[-1].is_floating_point():
        pairs = _product_rows(args, outputs, target, torch.randperm(len(args[-2]), generator=generator)[:rows])
    else:
        calls = [(args, kwargs, outputs)]
        if "_scaled_dot_product_" in one.operation:
            if "_backward" not in one.operation:  # the memory-efficient kernel stores longer rows of logsumexps
                outputs = outputs[: 1 if "efficient" in one.operation else 2]
            calls = list(_attention_heads("_backward" in one.operation, args, kwargs, outputs, generator))
        function, pairs = getattr(packet, overload or "default"), []
        if torch.Tag.nondeterministic_seeded in function.tags and "_scaled_dot_product_" not in one.operation:
            return None  # a trace holds no seed of the numbers that were drawn
        try:
            with run:
                for arguments, options, results in calls:
                    y = function(*arguments, **options)
                    pairs += zip(y if isinstance(y, list | tuple) else [y], results, strict=False)
        except NotImplementedError:  # an operator that only GPUs have
            return None
    if pairs is None or run.unknown or run.guess or run.nondeterministic:
        return None
    # 2. Compare bits; where shapes or dtypes differ, all elements do.
    compared = different = 0
    for x, y in pairs:
        if isinstance(x, Tensor) and y is not None:
            compared += y.numel()
            if x.shape != y.shape or x.dtype != y.dtype:
                different += y.numel()
                continue
            a, b = (t.contiguous().view(-1).view(torch.uint8).view(t.numel(), t.element_size()) for t in (x, y))
            different += int((a != b).any(1).sum())
    return compared, different


def _product_rows(args: list[Any], outputs: list[Any], target: str, rows: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Return rows of a product by the whole product's plan, and the recorded ones; None where the plan is a guess."""
    bias, a, b = (None, *args) if len(args) == 2 else args
    if bias is not None and bias.ndim != 1:
        return None
    # The plan is that of the whole product, resolved from shapes and layouts without numbers.
    verb = mm if bias is None else linear
    operands = (a, b) if bias is None else (a, b.t(), bias)
    shapes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in operands]
    try:
        with seen_calls() as calls:
            verb(*shapes, target=target, strict=True)
        (spec,) = calls.values()
    except ArgumentError:
        return None
    return [(verb(a[rows], *operands[1:], target=target, plan=spec.plan), outputs[0][rows])]


def _attention_heads(
    backward: bool, args: list[Any], kwargs: dict[str, Any], outputs: list[Any], generator: torch.Generator
) -> Iterator[tuple[list[Any], dict[str, Any], list[Any]]]:
    """Return an attention's calls, forward or backward, for some heads of keys and the heads of queries they serve."""
    q, k = args[1:3] if backward else args[:2]
    batch, heads, key_heads = len(q), q.shape[1], k.shape[1]
    group = heads // key_heads
    for place in torch.randperm(batch * key_heads, generator=generator)[: -(-_HEADS // group)].tolist():
        # Dimension 1 of each tensor is of heads, of queries or of keys and values.
        i, head = divmod(place, key_heads)
        slices = {heads: slice(head * group, (head + 1) * group), key_heads: slice(head, head + 1)}

        def part(x: Any, i: int = i, slices: dict[int, slice] = slices) -> Any:
            if not isinstance(x, Tensor) or x.ndim < 3:
                return x
            return x[slice(i, i + 1) if len(x) == batch else slice(None), slices.get(x.shape[1], slice(None))]

        yield [part(x) for x in args], {name: part(x) for name, x in kwargs.items()}, [part(x) for x in outputs]
