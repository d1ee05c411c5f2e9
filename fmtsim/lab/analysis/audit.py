# SPDX-License-Identifier: Apache-2.0
"""audit: recompute operators of a trace that a GPU left, each from its recorded inputs, and compare bits."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fmtsim
from fmtsim.gemm.products.matmul import linear, mm
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.lab.analysis.fingerprint import Fingerprints
from fmtsim.lab.analysis.trace import CALL, GIVEN, Operation, Trace, call_arguments, read_call, written_by
from fmtsim.machine.simulate import RECORDED, TARGETS, simulate
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, first_line
from fmtsim.support.executors import AnyExecutor, open_tasks
from fmtsim.support.progress import make_progress

_ATEN = torch.ops.aten
_HEADS = 4  # heads of attention that are recomputed
_APART = 1_000_003  # seeds of operators
_SHOWN = 20  # broken links in a text
_VERSIONS = {"fmtsim": fmtsim.__version__, "torch": RECORDED, "cuda": "13.0", "cudnn": "91900"}  # of the record
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    links: int  # tensors that operators read, and that were held to what was written before
    broken: tuple[str, ...]  # of these, what else was read; operations that are missing or in another order

    @property
    def equal(self) -> bool:
        """Whether no element differs, and every operator read what was written before it, or given."""
        return not self.broken and not any(layer.different for layer in self.layers)

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
        if self.target not in self.device.lower():
            yield f"{self.device} is not {self.target}, whose bits were recorded"
        for name, version in self.versions:
            if version != (expected := _VERSIONS[name]):
                may = "record operators otherwise" if name == "fmtsim" else "order sums otherwise"
                yield f"{name} {version} may {may} than {name} {expected}, " + (
                    "which audits" if name == "fmtsim" else "whose bits were recorded"
                )
        yield from self.broken[:_SHOWN]
        yield (
            f"{self.links:,} tensors that operators read were written before, or given"
            if self.links
            else (
                "recorded without links between operators: what is cut or reordered shows by operations' numbers alone"
            )
        )
        bad = [x for x in self.layers if x.different]
        yield f"bits differ in {len(bad)} of {len(self.layers)} layers and passes" if bad else "all compared bits agree"
        if self.broken:
            yield f"{len(self.broken)} operations or tensors are not what they were when the trace was recorded"


def audit(
    trace: Trace, *, target: str | None = None, rows: int = 32, seed: int = 0, progress: bool | None = None,
    executor: AnyExecutor = None,
) -> Audit:  # fmt: skip
    """Recompute operators of a trace with a GPU's bits, each from its recorded arguments, so that errors do not add up.

    Of matrix products randomly chosen rows are recomputed, in the order of the whole product's plan; of attention some
    heads; all else whole, but what draws random numbers, of which a trace has no seed. Stored tensors are held to their
    hashes, and what an operator read to what the operators before it wrote to the same memory, in their order: an
    operator that is missing, exchanged, or was fed another tensor is named.

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
    links, broken = _follow(trace)
    return Audit(
        layers=audited, target=name, device=trace.device, versions=trace.versions, rows=rows, links=links,
        broken=tuple(broken),
    )  # fmt: skip


class _Memory:
    """The words of storages that a trace's operators wrote or read, and which operation wrote to each one last."""

    def __init__(self) -> None:
        self._bytes: dict[int, tuple[Tensor, Tensor]] = {}  # and a byte of ones for each that is known
        self.writers: dict[int, int] = {}

    def words(self, place: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tensor's words, those of its place, and there ones in the bits of words that are known."""
        (number, offset, _), size = place["storage"], x.element_size()
        # 1. A storage grows to the last word that was asked for; 2. where a stride is 0 one index has all numbers.
        last = offset + sum((n - 1) * stride for n, stride in zip(x.shape, place["stride"], strict=True))
        missing = -(-(last + 1) * size // 8) * 8 - len(self._bytes.get(number, ((), ()))[0])
        if missing > 0:
            old = self._bytes.get(number, (torch.empty(0, dtype=torch.uint8),) * 2)
            both = tuple(torch.cat([y, y.new_zeros(missing)]) for y in old)
            self._bytes[number] = both[0], both[1]
        for dim, stride in enumerate(place["stride"]):
            x = x if stride else x.narrow(dim, 0, 1)
        data, known = (y.view(_WORDS[size]).as_strided(x.shape, place["stride"], offset) for y in self._bytes[number])
        return x.contiguous().view(_WORDS[size]), data, known

    def write(self, place: dict[str, Any], x: Tensor) -> None:
        """Put a tensor into its place."""
        words, data, known = self.words(place, x)
        data.copy_(words)
        known.copy_(~torch.zeros_like(known))

    def forget(self, number: int) -> None:
        """Know nothing of a storage."""
        self._bytes.pop(number, None)


def _follow(trace: Trace) -> tuple[int, list[str]]:
    """Return how many tensors operators read that were written before or given, and what else they read, by name."""
    calls = {one.index: json.loads(text) for one in trace.operations for name, text in one.facts if name == CALL}
    reads = {i: [x for x in call_arguments(call) if x.get("storage")] for i, call in calls.items()}
    last = {x["storage"][0]: i for i, places in reads.items() for x in places}  # operation that reads a storage last
    memory, ended, links, broken = _Memory(), set[int](), 0, list[str]()
    if trace.recorded not in (0, len(trace.operations)):
        broken.append(f"{len(trace.operations):,} of {trace.recorded:,} recorded operations are in the trace")
    for place, one in enumerate(trace.operations):
        what, stored = f"operation {one.index}, {one}", trace.tensors.get(one.index, {})
        # 1. Operations are numbered as they ended.
        if one.index != place and one.index - 1 not in ended:
            broken.append(f"{what}: operation {one.index - 1} does not stand before it")
        # 2. What it read is what was there, as the operation wrote it that wrote to that storage last.
        for x in reads.get(one.index, ()):
            (number, _, writer), value = x["storage"], stored[x["tensor"]]
            if writer not in calls and (writer in ended or writer == GIVEN) and number not in memory.writers:
                memory.writers[number] = writer  # of an operator whose call could not be stored, all that is read
            if memory.writers.get(number) != writer:
                broken.append(
                    f"{what}: operation {writer}, which wrote its {x['tensor']}, did not write it last before"
                )
            elif value.numel() and value.element_size() in _WORDS:
                words, data, known = memory.words(x, value)
                links += 1
                if bool(((words != data) & (~known == 0)).any()):
                    by = "was given before" if writer == GIVEN else f"operation {writer} wrote"
                    broken.append(f"{what}: its {x['tensor']} is not what {by}")
                else:
                    memory.write(x, value)
        # 3. What it writes; of an argument that it changes and does not return nothing is known.
        for x in calls.get(one.index, {}).get("writes", ()):
            number, y = x["storage"][0], stored.get(x["tensor"])
            memory.writers[number] = one.index
            if y is None or y.element_size() not in _WORDS or last.get(number, -1) <= one.index:
                memory.forget(number)
            elif y.numel():
                memory.write(x, y)
        ended.add(one.index)
        for x in reads.get(one.index, ()):
            if last[x["storage"][0]] == one.index:
                memory.forget(x["storage"][0])
    return links, broken


def _audit_operator(
    how: tuple[str, int, int, int], recorded: tuple[Operation, str, dict[str, Tensor]]
) -> tuple[int, int, bool]:
    """Return the elements of an operator that were compared and that differ, and whether it was computed anew."""
    (target, rows, seed, batch), (one, call, stored) = how, recorded
    generator = torch.Generator().manual_seed(seed + _APART * one.index)  # whatever runs in this process before
    try:
        # 1. Hold what was stored to the hashes: outputs, and arguments where all have bits.
        named, damaged = [(bits, bits.name) for bits in one.outputs], 0  # elements of tensors with other hashes
        arguments = [x["tensor"] for x in call_arguments(json.loads(call))]
        named += zip(one.inputs, arguments, strict=True) if len(arguments) == len(one.inputs) else ()
        for bits, name in named:
            prints = Fingerprints()
            prints.batch = batch
            place = prints.add(stored[name]) if name in stored else None
            if place is not None and prints.finish()[place[0]].hash != bits.hash:
                damaged += stored[name].numel()
        # 2. Of sound tensors, the operator itself.
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
    if "empty" in one.operation:
        return 0, 0  # memory as it was there
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
        if written_by(function, args, kwargs):  # the trace's own tensors stay as they are
            calls = tree_map_only(Tensor, Tensor.clone, calls)
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
    verb: Any = mm if bias is None else linear
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
