# SPDX-License-Identifier: Apache-2.0
"""Explanations of a result: units, orders, roundings and libraries' choices that a product may have had."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.explanation import MmExplanation, explained
from fmtsim.gemm.products.operand_scales import unit_scales
from fmtsim.gemm.products.operands import operand_format
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.products.resolver import call_name, check_plan, recorded_calls
from fmtsim.gemm.targets.target import get_target, list_targets
from fmtsim.gemm.units.unit import get_unit, list_units
from fmtsim.rounding.modes import RoundingName
from fmtsim.spec.call import LARGE_BLOCKS, SCALE_KINDS, UNIT_SCALES, GemmCall, OperandFormat, Operands, Operation
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import Epilogue, GemmPlan
from fmtsim.spec.schedule import same_order
from fmtsim.support.errors import FmtsimError
from fmtsim.support.table import jsonable

SPLITS = (*range(2, 17), 18, 20, 24, 32, 48, 64, 96, 128)  # parts that libraries and kernels ask for
LANES = (32, 64, 128, 256)  # threads that share a sum
TILES = (128, 64, 32, 256, 512, 16, 8)  # widths of K tiles that libraries use, likely ones first
STRIDES = (1, 2, 4)  # consecutive products of a thread's sum, where threads share a sum
SLICE = 4  # slices of K are multiples of this many products
PARTS = 128
PROMOTIONS = (128, 64, 256, 512, 32)


def orders(k: int, arithmetic: Datapath, *, thorough: bool = False) -> Iterator[GemmPlan]:
    """Yield the orders of K products that nothing seen narrows down, one chain first; some may be equal.

    Args:
        thorough: Also yield every way to deal tiles and to cut slices in up to ``PARTS`` parts.
    """
    yield from (plan for plan in unsplit(k, arithmetic) if plan.k_tile is None or plan.k_tile < k)
    yield from (GemmPlan(promote_every=every) for every in PROMOTIONS if every < k)
    if arithmetic.block == 1:  # threads of a CUDA core kernel
        for width in (width for width in LANES if width < k):
            for stride in STRIDES:
                for how in ("tree", "serial"):
                    yield GemmPlan(k_tile=stride * width, lanes=width, lane_reduce=how)  # type: ignore[arg-type]
    runs = set()
    for parts, tile in ((parts, tile) for parts in SPLITS for tile in TILES if tile * (parts - 1) < k):
        plan = GemmPlan(k_tile=tile, split=parts, residue_first=k % tile > 0)
        if tile in TILES[:-1] and (parts <= 8 or not parts % 4):
            yield replace(plan, owner="interleaved", residue_first=False)
        run = (
            -(-(k // tile) // parts) * tile if k % tile == 0 and tile % (arithmetic.block or k) == 0 else (parts, tile)
        )
        if run in runs:
            continue
        runs.add(run)
        yield from (plan, *([replace(plan, residue_first=False)] if k % tile else []))
        yield from ([replace(plan, reduce="pairwise")] if parts > 2 else [])
    for parts in SPLITS:  # slices, whose starts are aligned
        for length in sorted({-(-k // parts // step) * step for step in (SLICE, 8, 32, 64)}):
            if 0 < length < k and length % TILES[-1]:
                yield GemmPlan(k_tile=32, part_k=length, split=-(-k // length), residue_first=True)
    if thorough:
        whole, last = (0, k), LastPart(0, k, k)
        yield from dealt(k, whole, last, None)
        yield from in_pairs(k, whole, None)
        yield from interleaved(k, whole, None)
        yield from promoted(k, whole, last, None)
        yield from (plan for plan in slices(k, whole, last, None, TILES) if plan.split <= PARTS)


def widths(k: int, arithmetic: Datapath) -> list[int | None]:
    """Return the lengths of an instruction along K that a unit may be used with; None is its own."""
    return [None, *(width for width in (8, 4) if width < (arithmetic.block or k))]


def unsplit(k: int, arithmetic: Datapath) -> Iterator[GemmPlan]:
    """Yield one chain, with each instruction length and with a shorter first tile."""
    for width in widths(k, arithmetic):
        yield GemmPlan(instruction_k=width)
        for tile in sorted(TILES):
            if k % tile and arithmetic.block != 1:  # blocks of one product are the same in all tiles
                yield GemmPlan(k_tile=tile, residue_first=True, instruction_k=width)


class LastPart(NamedTuple):
    """Where the last part begins, where parts follow each other: in (low, high], or beyond the last unit."""

    low: int
    high: int
    unit: int

    def has(self, start: int) -> bool:
        """Return True if the last part may begin at ``start``."""
        return self.low < start <= self.high or start > self.unit


def promoted(k: int, first: tuple[int, int], last: LastPart, width: int | None) -> Iterator[GemmPlan]:
    """Yield chains that are promoted every so many products, whole and dealt in parts."""
    for every in PROMOTIONS:
        if not first[0] < every <= first[1]:
            continue
        yield GemmPlan(promote_every=every, instruction_k=width)
        for tile in TILES:
            for parts, share, _ in _deals(k, tile):
                if last.has((parts - 1) * share * tile):
                    yield GemmPlan(k_tile=tile, split=parts, promote_every=every, instruction_k=width)


def dealt(k: int, first: tuple[int, int], last: LastPart, width: int | None) -> Iterator[GemmPlan]:
    """Yield runs of whole tiles that are added one after another."""
    for tile in TILES:
        for parts, share, residue in _deals(k, tile):
            missing = tile - residue if residue else 0
            end, start = share * tile - missing, (parts - 1) * share * tile - missing
            if first[0] < end <= first[1] and last.has(start):
                yield GemmPlan(k_tile=tile, split=parts, residue_first=residue > 0, instruction_k=width)


def in_pairs(k: int, first: tuple[int, int], width: int | None) -> Iterator[GemmPlan]:
    """Yield parts that are added pairwise."""
    for tile in TILES:
        for parts, share, residue in _deals(k, tile):
            if first[0] < share * tile <= first[1] and not residue and parts > 2:
                yield GemmPlan(k_tile=tile, split=parts, instruction_k=width, reduce="pairwise")


def _deals(k: int, tile: int) -> Iterator[tuple[int, int, int]]:
    """Yield (parts, tiles of a part, residue that comes first or 0) for every way to deal tiles, fewest parts first."""
    tiles = -(-k // tile)
    for share in range(-(-tiles // 2), 0, -1):
        parts = -(-tiles // share)
        if parts <= PARTS:
            yield parts, share, 0
            if k % tile:
                yield parts, share, k % tile


def slices(
    k: int, first: tuple[int, int], last: LastPart, width: int | None, tiles: tuple[int, ...]
) -> Iterator[GemmPlan]:
    """Yield slices of K, each with a residue of its own."""
    low, high = first
    for length in range(low // SLICE * SLICE + SLICE, min(high, k - 1) + 1, SLICE):
        parts = -(-k // length)
        if not last.has((parts - 1) * length):
            continue
        residues = set()
        for tile in sorted(tiles):
            key = (length % tile, (k % length) % tile)
            if key not in residues:
                residues.add(key)
                yield GemmPlan(k_tile=tile, part_k=length, split=parts, residue_first=True, instruction_k=width)


def interleaved(k: int, first: tuple[int, int], width: int | None) -> Iterator[GemmPlan]:
    """Yield parts that take tiles in turn."""
    for tile in TILES:
        if first[0] < tile <= first[1]:
            for parts in range(2, min(PARTS, -(-k // tile)) + 1):
                for reduce in ("serial", "pairwise") if parts > 2 else ("serial",):
                    yield GemmPlan(k_tile=tile, split=parts, owner="interleaved", instruction_k=width,
                                   reduce=reduce)  # type: ignore[arg-type]  # fmt: skip


TF32_ROUNDINGS: tuple[RoundingName, ...] = ("nearest_even", "toward_zero", "nearest_away")
EPILOGUES: tuple[Epilogue, ...] = ("scale", "row_column", "column_row")
NARROW = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Observed(NamedTuple):
    """A product that ran somewhere.

    a, b: [M, K] and [N, K], as values.
    y: [M, N], what came out.
    bias: [N], or None.
    row, column: Scales of the epilogue, of one element or of M and N; None without.
    block_a, block_b: Block scales, [M, blocks] and [N, blocks]; None without.
    kind: Kind of the scales.
    layouts: Of a and b, as a library sees them.
    """

    a: Tensor
    b: Tensor
    y: Tensor
    bias: Tensor | None = None
    row: Tensor | None = None
    column: Tensor | None = None
    block_a: Tensor | None = None
    block_b: Tensor | None = None
    kind: Any = "none"
    layouts: tuple[Any, Any] = ("row", "row")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]

    def part(self, rows: Tensor, columns: Tensor) -> "Observed":
        """Return the product of some rows of a with some of b."""
        row, column = (
            x if x is None or x.numel() == 1 else x.reshape(-1)[at]
            for x, at in ((self.row, rows), (self.column, columns))
        )
        block_a, block_b, bias = (
            None if x is None else rows_at(x, at)
            for x, at in ((self.block_a, rows), (self.block_b, columns), (self.bias, columns))
        )
        y = rows_at(rows_at(self.y, rows).t().contiguous(), columns).t().contiguous()
        a, b = rows_at(self.a, rows), rows_at(self.b, columns)
        return self._replace(a=a, b=b, y=y, bias=bias, row=row, column=column, block_a=block_a, block_b=block_b)


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """Return some rows; torch indexes FP8 as bytes alone."""
    return x.view(torch.uint8)[at].view(x.dtype) if x.dtype.itemsize == 1 else x[at].contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """One explanation of a result: what multiplied, in which order it added, and what it did with the sum.

    Args:
        units: Names of the units with this arithmetic.
        books: GPUs whose library chooses this order for the call, with the evidence for it.
        call: The call as ``explain_mm`` shows it.
        spec: Arithmetic, accumulation order and formats.
        tf32: How float32 operands become TF32; ``""`` where they do not, or already are.
        through: Dtype of 16 bits that results were rounded to before they were stored in float32; None without.
        equal_plans: Other plans by which this unit adds K in the same order.
    """

    units: tuple[str, ...]
    books: tuple[str, ...]
    call: GemmCall
    spec: GemmSpec
    tf32: str = ""
    through: torch.dtype | None = None
    equal_plans: tuple[GemmPlan, ...] = ()

    @property
    def plan(self) -> GemmPlan:
        """The accumulation order, as ``plan=`` of the products takes it."""
        return self.spec.plan

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of ``fmtsim.mm``, or ``scaled_mm``, that give these bits; operands in float32 are TF32 already."""
        options = {"target": self.units[0], "plan": self.plan, "out_dtype": self.through or self.call.out}
        options |= {} if self.spec.accumulate == "fp32" else {"accumulate": self.spec.accumulate}
        return options | ({"allow": "tf32"} if self.spec.a.name == "tf32" else {})

    @property
    def rounds_parts(self) -> bool:
        """Whether sums of parts of K are rounded, or added to a bias, before they are added to each other."""
        return self.plan.partial is not None or self.plan.reduce == "in_place"

    @property
    def cuts(self) -> tuple[Any, ...]:
        """How the plan cuts K."""
        plan = self.plan
        return plan.k_tile, plan.split, plan.part_k, plan.owner, plan.residue_first, plan.promote_every

    def explain(self) -> MmExplanation:
        """Return the explanation in words."""
        return explained(self.call, self.spec)

    @property
    def order(self) -> str:
        """The accumulation order in words; parts of K that are added in order are promoted chains as well."""
        plans = self.plan, *self.equal_plans
        named = {plan.promote_every is None: plan for plan in reversed(plans)}
        named.pop(self.plan.promote_every is None)
        others = [explained(self.call, replace(self.spec, plan=plan)).order for plan in named.values()]
        return "; the same as ".join([self.explain().order, *others])

    @property
    def epilogue(self) -> str:
        """In words what happens to operands before, and to the sum after."""
        text = dict(self.explain().rows)["epilogue"]
        sums = "" if self.spec.accumulate == "fp32" else f"{self.spec.accumulate} sums, "
        tf32 = f"operands to TF32 {self.tf32.replace('_', ' ')}, " if self.tf32 else ""
        through = "" if self.through is None else f"through {dtype_name(self.through)}, "
        return f"{tf32}{sums}{through}{text}"

    def facts(self) -> dict[str, Any]:
        """Return the explanation as JSON types."""
        plan = {field.name: getattr(self.plan, field.name) for field in fields(self.plan)
                if getattr(self.plan, field.name) != field.default}  # fmt: skip
        words = {"order": self.order, "epilogue": self.epilogue}
        return {"units": list(self.units), "books": list(self.books), "plan": jsonable(plan)} | words

    def multiply(self, product: Observed) -> Tensor:
        """Return what this explanation makes of the operands of a product."""
        a, b = product.a, product.b
        if self.tf32:
            a, b = (quantize(x, "tf32", rounding=self.tf32, out_dtype=x.dtype) for x in (a, b))  # type: ignore[arg-type]
        scale_a, scale_b = product.block_a, product.block_b
        if product.kind in UNIT_SCALES:
            scale_a, scale_b = unit_scales(scale_a, scale_b, a, b, self.spec.text)
        dtype = self.through or product.y.dtype
        operands = Operands(a, b, product.bias, product.row, product.column, scale_a, scale_b)
        y = run_gemm(operands, self.spec, dtype, validated=True, bare=True)
        return y.to(product.y.dtype)  # wider, which is exact

    def differs(self, product: Observed) -> Tensor:
        """Return [M, N], True where the bits of a product are not this explanation's."""
        code = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[product.y.itemsize]
        return self.multiply(product).view(code) != product.y.view(code)

    def equals(self, other: "Accumulation") -> bool:
        """Return True if two explanations give the same bits for all operands of this K."""
        alike: Any = {"tf32": other.tf32, "through": other.through}
        if self.spec.datapath != other.spec.datapath or (self.tf32, self.through) != (*alike.values(),):
            return False
        names = ("partial", "round_trip", "epilogue", "bias_after_rounding", "scaled_promotion", "successive_scales")
        return all(getattr(self.plan, x) == getattr(other.plan, x) for x in names) and same_order(
            self.call.k, self.spec.datapath, self.plan, other.plan
        )


def cost(arithmetic: Arithmetic) -> int:
    """Return how much longer an engine takes than for a tensor core: exact sums of several products are slow."""
    if isinstance(arithmetic, Datapath):
        return 400 if arithmetic.fraction_bits is None and arithmetic.block != 1 else 1
    return 1 if isinstance(arithmetic, IntegerDatapath) else 10


def candidates(product: Observed, target: Any = None, *, thorough: bool = False) -> list[Accumulation]:
    """Return every explanation that fmtsim has for a product, the libraries' choices first.

    Args:
        product: What ran.
        target: A GPU with its library, or a unit: only what it computes. None is all of them.
        thorough: Try every way to cut K.
    """
    units = [name for name in list_units() if target is None or target == name]
    libraries = [name for name in list_targets() if target is None or target == name]
    if libraries and not units:
        units = sorted({unit for _, _, unit in get_target(libraries[0]).units})
    table: dict[Any, Accumulation] = {}
    # None, and the narrow dtypes whose values all results in float32 are.
    dtypes: tuple[torch.dtype | None, ...] = (None,)
    if product.y.dtype == torch.float32 and bool(product.y.isfinite().all()):
        dtypes = (None, *(dtype for dtype in NARROW if torch.equal(product.y.to(dtype).float(), product.y)))
    chosen = (*_books(product, libraries), *_orders(product, units, thorough))
    for explanation in (replace(x, through=dtype) for x in chosen for dtype in dtypes):
        key = explanation.spec, explanation.tf32, explanation.through
        before = table.get(key)
        if before is not None:
            explanation = merge(before, explanation)
        table[key] = explanation
    return list(table.values())


def merge(first: Accumulation, second: Accumulation) -> Accumulation:
    """Return one explanation for two with the same bits."""
    both: dict[str, Any] = {
        name: (*getattr(first, name), *getattr(second, name)) for name in ("units", "books", "equal_plans")
    }
    if first.plan != second.plan:
        both["equal_plans"] = (*both["equal_plans"], second.plan)
    both = {name: tuple(dict.fromkeys(values)) for name, values in both.items()}
    return replace(first, **both)


class Reading(NamedTuple):
    """Formats in which a unit may have taken the operands, and how float32 became TF32."""

    formats: tuple[OperandFormat, OperandFormat]
    tf32: str = ""


def _readings(product: Observed) -> Iterator[Reading]:
    formats = operand_format("a", product.a), operand_format("b", product.b)
    yield Reading(formats)
    if formats[0].name == formats[1].name == "fp32":
        tf32: Any = get_format("tf32")
        low_bits = any(bool((x.contiguous().view(torch.int32) & 0x1FFF).any()) for x in (product.a, product.b))
        for rounding in TF32_ROUNDINGS if low_bits else ("",):
            yield Reading((tf32, tf32), rounding)


def _call(product: Observed, reading: Reading, **facts: Any) -> GemmCall:
    m, n, k = product.sizes
    a, b = reading.formats
    scaled = product.kind != "none"
    operation: Operation = "scaled_mm" if scaled else "linear" if product.bias is not None else "mm"
    operation = "int_mm" if call_name(a) == "int8" else operation
    facts = {"a_layout": product.layouts[0], "b_layout": product.layouts[1]} | facts
    return GemmCall(operation=operation, m=m, n=n, k=k, a=call_name(a), b=call_name(b), formats=(a, b),
                    out=product.y.dtype, scaling=product.kind, bias=product.bias is not None, **facts)  # fmt: skip


def _books(product: Observed, libraries: Iterable[str]) -> Iterator[Accumulation]:
    """Yield what libraries choose for the call, in the layouts of the operands or in others."""
    swap: Any = {"row": "column", "column": "row"}
    (a, b), readings = product.layouts, [x for x in _readings(product) if x.tf32 in ("", "nearest_even")]
    layouts = ((a, b), (swap[a], b), (a, swap[b]), (swap[a], swap[b]))
    sums = {torch.float16: ("fp32", "fp16"), torch.int32: ("int32",), torch.float64: ("fp64",)}
    asked = product._replace(kind="tensor") if product.kind == "none" and product.a.dtype in FP8 else product
    with recorded_calls():  # without warnings of guesses
        for name, reading, (a, b) in itertools.product(libraries, readings, layouts):
            how = "" if (a, b) == layouts[0] else f", a {a}-major, b {b}-major"
            for accumulate in sums.get(product.y.dtype, ("fp32",)):
                call = _call(asked, reading, accumulate=accumulate, a_layout=a, b_layout=b)
                for one in (call, replace(call, fast_accum=False)) if call.operation == "scaled_mm" else (call,):
                    try:
                        spec = get_target(name).resolve(one.facts())
                    except FmtsimError:
                        continue  # the library does not take the call
                    yield Accumulation(
                        units=(spec.unit or "",), books=(f"{name} ({spec.basis}{how})",),
                        call=replace(one, target=spec.unit),
                        spec=replace(spec, plan=replace(spec.plan, source="", verified=False)),
                        tf32="" if is_scalar(spec.datapath) else reading.tf32,
                    )  # fmt: skip


def _orders(product: Observed, units: Iterable[str], thorough: bool) -> Iterator[Accumulation]:
    """Yield all orders on all arithmetics that take the operands."""
    extent = SCALE_KINDS.get(product.kind)
    scale = None if extent is None else extent.unit_scale
    for reading in _readings(product):
        arithmetics: dict[tuple[Arithmetic, str], list[str]] = {}
        for name in units:
            for mode in get_unit(name).modes:
                any_format = mode.inputs is None and call_name(reading.formats[0]) == "tf32"
                if mode.takes(*reading.formats) and mode.scale == scale and not any_format:
                    arithmetics.setdefault((mode.datapath, mode.accumulate), []).append(name)
        for (path, accumulate), names in arithmetics.items():
            if (accumulate == "int32") != (product.y.dtype == torch.int32):
                continue
            call = _call(product, reading, target=names[0], accumulate=accumulate)
            for plan in _plans(product, call, path, thorough):
                spec = GemmSpec(datapath=path, plan=plan, a=reading.formats[0], b=reading.formats[1], unit=names[0],
                                accumulate=accumulate)  # fmt: skip
                yield Accumulation(units=tuple(names), books=(), call=call, spec=spec, tf32=reading.tf32)


def _plans(product: Observed, call: GemmCall, path: Arithmetic, thorough: bool) -> Iterator[GemmPlan]:
    """Yield orders that a unit can follow, with every way to round on the way and after it."""
    single = isinstance(path, IntegerDatapath) or cost(path) > 100
    wide = call.accumulate == "fp64" and call.a != "fp64"
    lengths = path if isinstance(path, Datapath) else Datapath()
    basic = iter([GemmPlan()]) if single or wide else orders(call.k, lengths, thorough=thorough)
    # The order in which the two scales of the epilogue multiply matters where one is no power of two.
    scales = [x for x in (product.row, product.column) if x is not None]
    rounded = any(bool((torch.frexp(x.double())[0].abs() != 0.5).any()) for x in scales)
    rules = EPILOGUES if rounded else EPILOGUES[:1]
    for order in basic:
        plain = (order.owner, order.reduce, order.part_k) == ("contiguous", "serial", None)
        if not isinstance(path, Datapath) and not plain:
            continue
        if product.kind in LARGE_BLOCKS:
            if order.promote_every is not None:
                continue
            scaled = replace(order, promote_every=128, scaled_promotion=True)
            plans = [scaled, replace(scaled, successive_scales=True)]
        elif not isinstance(path, Datapath):
            plans = [replace(order, epilogue=rule) for rule in rules]
        else:
            plans = [replace(x, epilogue=rule) for x in variants(replace(call, scaling="none"), order) for rule in rules
                     if not x.round_trip or call.accumulate == "fp16" or plain]  # fmt: skip
        for plan in plans:
            if _fits(path, plan, call):
                yield plan


@lru_cache(maxsize=1 << 14)
def _fits(path: Arithmetic, plan: GemmPlan, call: GemmCall) -> bool:
    try:
        check_plan(path, plan, call)
    except FmtsimError:
        return False
    return True


def is_scalar(arithmetic: Arithmetic) -> bool:
    """Return True if a unit is a chain of fused multiply-adds, which reads float32 operands unrounded."""
    return isinstance(arithmetic, Datapath) and arithmetic.block == 1 and arithmetic.fraction_bits is None


def variants(call: GemmCall, plan: GemmPlan) -> Iterable[GemmPlan]:
    """Return a plan with every way to round partial sums, add a bias and apply scales that a library may have."""
    plans = [plan]
    half: Any = get_format(call.out) if call.out in NARROW else None
    # A plan in place says where the bias goes, and without one it is like any other where results are float32.
    in_place = plan.split > 1 and plan.reduce == "serial" and (half is not None or call.bias)
    if plan.split > 1 and half is not None:
        partial = [replace(plan, partial=half, round_trip=True), replace(plan, partial=half)]
        plans = [*partial, plan] if call.accumulate == "fp16" else [plan, *reversed(partial)]
    if call.bias and half is not None:
        plans += [replace(x, bias_after_rounding=True) for x in plans]
    if in_place and call.scaling == "none":
        plans.append(replace(plan, reduce="in_place", partial=half))
    if call.scaling == "row":
        plans = [replace(x, epilogue=rule) for x in plans for rule in ("column_row", "row_column")]
    return plans
