"""Matrix products of fused units on the CPU: which kernel takes which tile, and the threads."""

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fmtsim.cpu import pool
from fmtsim.cpu.floor import floor32, floor64
from fmtsim.cpu.groups import Groups, group_scales, grouped, groups_of
from fmtsim.cpu.operands import (
    EMPTY,
    TOP_BYTE,
    Grouped,
    Panel,
    Rows,
    Source,
    is_fixed,
    pitch_of,
    source_of,
    without_scales,
)
from fmtsim.cpu.packing import HAS_INF, HAS_NAN, pack_panel, pack_rows
from fmtsim.cpu.remaining import Remaining
from fmtsim.cpu.scratch import scratch
from fmtsim.cpu.simd import LANES
from fmtsim.cpu.slabs import Slab, Slabs, slabs_of
from fmtsim.cpu.sums import MODES, Grid, Reduction, Sums, grid_of, reduce_parts
from fmtsim.cpu.wide import CUT, FLOOR, NEAREST, Draw, Unit, wide
from fmtsim.cpu.words import key_words
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.datapath import FP32, Datapath
from fmtsim.gemm.plan import GemmPlan
from fmtsim.gemm.serialization import GemmSpec
from fmtsim.ops import RandomKey

_ROW_BYTES = 24 << 20  # packed rows that are kept at a time
_NO_FLOATS = np.zeros(0, np.float32)
Scales = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Fast:
    """How the floor kernels run a unit: as float32 or float64 sums, and their constants."""

    kernel: Callable
    dtype: type
    factor: np.floating
    mask: np.integer
    floor_byte: np.int8  # byte that an empty block counts as


def fast_path(unit: Datapath, a: Source, b: Source, limits: tuple[int, int]) -> Fast | None:
    """Return how the floor kernels run a unit on these operands; None where they cannot."""
    f, block, kept = unit.fraction_bits, unit.block, unit.accumulator.mantissa_bits
    if unit.term_rounding != "toward_zero" or unit.rounding.mode != "toward_zero" or f is None or block is None:
        return None
    eps = max(a.bits + b.bits, f + 2, kept + 1) + 1
    room = f + _head(unit) + math.ceil(math.log2(block + 1))
    span = a.top + b.top - a.emin - b.emin
    inside = is_fixed(a) and is_fixed(b) and a.emin + b.emin >= limits[0] and a.top + b.top <= limits[1]
    if room <= 22 and a.bits + eps <= 24 and kept <= 20 and inside and span < 80 - f:
        return Fast(floor32, np.float32, np.float32(1 + 2.0**-eps), np.int32(-1 << (23 - kept)), np.int8(-2 - span))
    if room <= 51 and a.bits + eps <= 53:
        return Fast(floor64, np.float64, np.float64(1 + 2.0**-eps), np.int64(-1 << (52 - kept)), np.int8(0))
    return None


def _head(unit: Datapath) -> int:
    """Return the bits of a term above its exponent: significands of two factors, or of four, each below 2."""
    return 2 if unit.scale is None else 4


def wide_unit(unit: Datapath, a: Source, b: Source) -> Unit | None:
    """Return a datapath as the wide kernel takes it; None where float64 lanes cannot hold it."""
    f, kept = unit.fraction_bits, unit.accumulator.mantissa_bits
    if f is None or unit.block is None or unit.group > 1 or unit.signed_zero:
        return None
    terms = {"toward_zero": CUT, "down": FLOOR}.get(unit.term_rounding, NEAREST)
    enlarged = unit.term_rounding in ("toward_zero", "nearest_away")
    eps = max(a.bits + b.bits, f + 3, kept + 2) + 1 if enlarged else 0
    if f + _head(unit) + math.ceil(math.log2(unit.block + 1)) > 51 or a.bits + eps > 53 or a.bits + b.bits > 53:
        return None
    return _numbers(unit, terms, np.float64(1 + 2.0**-eps if enlarged else 1))


def _numbers(unit: Datapath, terms: int, factor: np.floating) -> Unit:
    assert unit.fraction_bits is not None
    lowest = -360 if unit.min_exponent is None else max(unit.min_exponent, -360)
    mode, grid = MODES[unit.rounding.mode], grid_of(unit.accumulator)
    return Unit(terms, unit.fraction_bits, np.int32(lowest), mode, grid, np.float64(factor))


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """All that the tasks of one product share."""

    a: Source
    b: Source
    k: int
    slabs: Slabs
    fast: Fast | None
    unit: Unit
    groups: Groups | None
    promote: bool
    promotion: Grid
    scales: tuple[np.ndarray, np.ndarray]  # float32 [chains, M] and [chains, N], or empty
    reduction: Reduction
    draw: Draw
    out: np.ndarray
    c: np.ndarray | None
    limits: tuple[int, int]  # smallest and largest product exponent that the floor kernels take
    row_marks: np.ndarray  # int32: rows and columns with NaN and Inf
    column_marks: np.ndarray

    def given(self, narrow: bool, source: Source) -> int:
        """Return the exponent that bytes count from, or EMPTY where each row and panel has its own."""
        return source.top if narrow and self.fast is not None and self.fast.kernel is floor32 else EMPTY


class Chunk:
    """Some rows of the first operand, packed slab by slab, as bytes or halves when first asked for."""

    def __init__(self, job: Job, first: int, count: int) -> None:
        self.job, self.first, self.count = job, first, count
        self.padded = -(-count // 4) * 4
        self.marks = np.zeros(self.padded, np.int32)
        self._packed: dict[tuple[int, bool], tuple[Rows, int, int] | None] = {}
        self._lock = threading.Lock()

    def rows(self, number: int, narrow: bool) -> tuple[Rows, int, int] | None:
        """Return the rows of a slab, their largest and smallest exponent; None where bytes cannot hold them."""
        with self._lock:
            key = (number, narrow)
            if key not in self._packed:
                self._packed[key] = self._pack(number, narrow)
            return self._packed[key]

    def _pack(self, number: int, narrow: bool) -> tuple[Rows, int, int] | None:
        slab = self.job.slabs.slabs[number]
        job, count, block = self.job, self.padded, self.job.slabs.block
        words = slab.order.ends.size * ((block + 31) // 32)
        dtype, factor = (job.fast.dtype, job.fast.factor) if narrow and job.fast else (np.float64, job.unit.factor)
        source = job.a.part(self.first, self.count)
        if job.groups is not None:
            dtype, factor, source = np.float32, np.float64(1), without_scales(source)
        size = (slab.slots.size + LANES) * count  # whole vectors
        top, low = np.empty(count, np.int32), np.empty(count, np.int32)
        name = f"rows {number} {narrow}"
        rows = Rows(
            scratch(f"{name} values", size, dtype),
            scratch(f"{name} exponents", size, np.int32),
            scratch(f"{name} signs", words * count, np.int32),
            top,
        )
        given = job.given(narrow, job.a)
        fits = pack_rows(source, slab.slots, block, given, factor, narrow, rows, low, self.marks)
        return (rows, int(top.max()), int(low.min())) if fits else None


class Worker:
    """Buffers of one thread, and what it does with a panel of 64 columns."""

    def __init__(self, job: Job, chunk: Chunk) -> None:
        self.job, self.chunk = job, chunk
        slots = max((slab.slots.size for slab in job.slabs.slabs), default=0)
        words = slots // pitch_of(job.slabs.block) * ((job.slabs.block + 31) // 32)
        size = chunk.padded * LANES
        self.raw = scratch("panel numbers", slots * LANES, np.float32)
        self.scales = scratch(
            "panel scales", slots * LANES if job.b.scales.size and job.groups is None else 0, np.float32
        )
        self.values = scratch("panel values", slots * LANES, np.float64)
        self.bytes = scratch("panel bytes", slots * LANES, np.int8)
        self.halves = scratch("panel halves", slots * LANES, np.int16)
        self.signs = scratch("panel signs", words * LANES, np.int32)
        self.acc, self.total = scratch("chains", size, np.float64), scratch("totals", size, np.float64)
        self.parts = scratch("parts", job.slabs.parts * size, np.float64)

    def run(self, panel: int) -> None:
        """Compute the columns of a panel for the rows of the chunk and write them to the result."""
        job = self.job
        marks = np.zeros(LANES, np.int32)
        single = job.fast is not None and job.fast.kernel is floor32
        acc = self.acc.view(np.float32)[: self.acc.size] if single else self.acc
        acc[:], self.total[:] = 0, 0
        if job.c is not None:
            self._tile(self.total if job.promote else acc, panel)[:] = job.c[self._rows(), self._columns(panel)]
        sums, self.lowest = self._sums(panel), -EMPTY
        for number, slab in enumerate(job.slabs.slabs):
            if job.groups is not None:
                self._run_groups(panel, number, slab, acc, sums, marks, job.groups)
            elif job.fast is None or not self._run_fast(panel, number, slab, acc, sums, marks):
                self._run_wide(panel, number, slab, acc, sums, marks)
        reduce_parts(self.parts, job.slabs.parts, self.chunk.padded, job.reduction, self.total)
        job.out[self._rows(), self._columns(panel)] = self._tile(self.total, panel)
        job.column_marks[panel * LANES : (panel + 1) * LANES] |= marks
        job.row_marks[self._rows()] |= self.chunk.marks[: self.chunk.count]

    def _run_fast(self, panel: int, number: int, slab: Slab, acc: np.ndarray, sums: Sums, marks: np.ndarray) -> bool:
        """Run a slab through the floor kernel, unless its exponents lie too far apart or too near to the limits."""
        job, fast = self.job, self.job.fast
        assert fast is not None
        packed = self.chunk.rows(number, narrow=True)
        if packed is None:
            return False
        rows, top_a, low_a = packed
        values = self.values.view(fast.dtype)
        top_b, low_b = self._pack(panel, slab, values, self.bytes, marks, narrow=True)
        if top_b - low_b > TOP_BYTE // 2:
            return False
        smallest, largest = low_a + low_b, top_a + top_b
        if smallest < job.limits[0] or largest > job.limits[1] or largest - 2 * TOP_BYTE > self.lowest:
            return False
        self.lowest = min(self.lowest, smallest)
        b = Panel(values, self.bytes, self.signs, np.int32(top_b))
        fast.kernel(
            rows, b, slab.order, sums, acc, job.slabs.block, fast.factor, job.unit.fraction_bits, fast.mask,
            fast.floor_byte,
        )  # fmt: skip
        return True

    def _run_wide(self, panel: int, number: int, slab: Slab, acc: np.ndarray, sums: Sums, marks: np.ndarray) -> None:
        packed = self.chunk.rows(number, narrow=False)
        assert packed is not None  # halves hold every exponent
        _, low_b = self._pack(panel, slab, self.values, self.halves, marks, narrow=False)
        self.lowest = min(self.lowest, packed[2] + low_b)
        b = Panel(self.values, self.halves, self.signs, np.int32(0))
        draw = self._draw(panel, slab)
        wide(packed[0], b, slab.order, sums, acc, self.job.slabs.block, self.job.unit, draw)

    def _run_groups(
        self, panel: int, number: int, slab: Slab, acc: np.ndarray, sums: Sums, marks: np.ndarray, groups: Groups
    ) -> None:
        job, chunk, rows = self.job, self.chunk, self._rows()
        packed = chunk.rows(number, narrow=False)
        assert packed is not None
        own, other = job.a.part(rows.start, chunk.count), job.b.part(panel * LANES, LANES)
        scales, exponents, seen = group_scales(own, slab.slots, groups.size, groups.factor, chunk.padded)
        chunk.marks |= seen
        a = Grouped(packed[0].values, scales.reshape(-1), exponents.reshape(-1), chunk.padded)
        values = self.values.view(np.float32)[: slab.slots.size * LANES]
        pack_panel(
            without_scales(other), 0, slab.slots, job.slabs.block, EMPTY, False, self.raw, self.scales, values,
            self.halves, self.signs, marks,
        )  # fmt: skip
        scales, exponents, seen = group_scales(other, slab.slots, groups.size, np.float64(1), LANES)
        marks |= seen
        b = Grouped(values, scales.reshape(-1), exponents.reshape(-1), LANES)
        grouped(
            a, b, slab.order, sums, acc, job.slabs.block, groups.size, groups.factor, job.unit, self._draw(panel, slab)
        )

    def _draw(self, panel: int, slab: Slab) -> Draw:
        return self.job.draw._replace(block=slab.first, row=self.chunk.first, column=panel * LANES)

    def _pack(
        self, panel: int, slab: Slab, values: np.ndarray, exponents: np.ndarray, marks: np.ndarray, *, narrow: bool
    ) -> tuple[int, int]:
        job = self.job
        given, tiny = job.given(narrow, job.b), job.unit.terms == CUT
        return pack_panel(
            job.b, panel * LANES, slab.slots, job.slabs.block, given, tiny, self.raw, self.scales, values, exponents,
            self.signs, marks,
        )  # fmt: skip

    def _sums(self, panel: int) -> Sums:
        job, rows, columns = self.job, self._rows(), self._columns(panel)
        row_scales, column_scales = job.scales
        if row_scales.size:  # padded to whole rows and lanes
            padded = np.zeros((2, len(row_scales), max(self.chunk.padded, LANES)), np.float32)
            padded[0, :, : rows.stop - rows.start] = row_scales[:, rows]
            padded[1, :, : columns.stop - columns.start] = column_scales[:, columns]
            row_scales = np.ascontiguousarray(padded[0, :, : self.chunk.padded]).reshape(-1)
            column_scales = np.ascontiguousarray(padded[1, :, :LANES]).reshape(-1)
        return Sums(self.total, self.parts, job.promote, row_scales, column_scales, job.promotion)

    def _rows(self) -> slice:
        return slice(self.chunk.first, self.chunk.first + self.chunk.count)

    def _columns(self, panel: int) -> slice:
        return slice(panel * LANES, min((panel + 1) * LANES, self.job.out.shape[1]))

    def _tile(self, numbers: np.ndarray, panel: int) -> np.ndarray:
        columns = self._columns(panel)
        return numbers.reshape(self.chunk.padded, LANES)[: self.chunk.count, : columns.stop - columns.start]


def run_fused(job: Job) -> None:
    """Compute a product: chunks of rows one after the other, panels of columns by threads, or the reverse."""
    m, n = job.out.shape
    slots = sum(slab.slots.size for slab in job.slabs.slabs)
    panels, threads = -(-n // LANES), pool.get_num_threads()
    step = max(min(_ROW_BYTES // (12 * slots), 512) // 4 * 4, 32)
    if panels < threads:  # few columns: threads share the rows
        step = min(step, max(-(-m // threads // 4) * 4, 4))

        def chunks(start: int, stop: int) -> None:
            for first in range(start * step, min(stop * step, m), step):
                _run_panels(job, Chunk(job, first, min(step, m - first)), 0, panels)

        pool.run(chunks, -(-m // step), 1, step * n * job.k >> 4)
        return
    for first in range(0, m, step):
        chunk = Chunk(job, first, min(step, m - first))
        task = functools.partial(_run_panels, job, chunk)
        pool.run(task, panels, 1, chunk.count * LANES * job.k >> 4)


def _run_panels(job: Job, chunk: Chunk, start: int, stop: int) -> None:
    worker = Worker(job, chunk)
    for panel in range(start, stop):
        worker.run(panel)


def fused(a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, key: RandomKey, out: Tensor) -> None:
    """Write the product of a fused unit to out, as docs/matmul.md says; the arguments are those of ``gemm``."""
    unit, plan = spec.datapath, spec.plan
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    x, y = source_of(a, spec.a, unit, scales[0]), source_of(b, spec.b, unit, scales[1])
    k = a.shape[1]
    slabs = slabs_of(k, unit, plan)
    groups = groups_of(unit, x, y)
    lanes = wide_unit(unit, x, y) if groups is None else _numbers(unit, CUT, groups.factor)
    chains = _promotion_scales(scales, slabs, plan)
    draw = Draw(key_words(key), unit.rounding.bits, 0, 0, 0, *out.shape)
    promote = plan.promote_every is not None or unit.promote_every is not None
    promotion = grid_of(FP32 if plan.promote_every is not None else unit.promotion or unit.accumulator)
    remaining = Remaining(a, b, c, scales, chains, spec, slabs, (promote, promotion), _reduction(plan, out), draw, out)
    if lanes is None:
        remaining.run(np.arange(out.shape[0]), np.arange(out.shape[1]))
        return
    job = Job(
        a=x,
        b=y,
        k=k,
        slabs=slabs,
        fast=fast_path(unit, x, y, _limits(unit, k)) if c is None and groups is None else None,
        unit=lanes,
        groups=groups,
        promote=promote,
        promotion=promotion,
        scales=chains,
        reduction=_reduction(plan, out),
        draw=draw,
        out=out.numpy(),
        c=None if c is None else c.numpy(),
        limits=_limits(unit, k),
        row_marks=np.zeros(out.shape[0], np.int32),
        column_marks=np.zeros(-(-out.shape[1] // LANES) * LANES, np.int32),
    )
    run_fused(job)
    if c is not None:
        job.row_marks[~np.isfinite(job.c).all(1)] |= HAS_INF
    _mend(job, remaining)


def _mend(job: Job, remaining: Remaining) -> None:
    """Compute what has NaN or Inf among its operands: NaN is the whole row's or column's, the rest one by one."""
    rows, columns = job.row_marks, job.column_marks[: job.out.shape[1]]
    infinite = [np.flatnonzero(marks == HAS_INF) for marks in (rows, columns)]
    remaining.run(infinite[0], np.arange(columns.size))
    remaining.run(np.arange(rows.size), infinite[1])
    job.out[(rows & HAS_NAN) != 0] = np.nan
    job.out[:, (columns & HAS_NAN) != 0] = np.nan


def _limits(unit: Datapath, k: int) -> tuple[int, int]:
    """Return the smallest and largest product exponent for which no sum leaves the accumulator's normal range."""
    fmt = unit.accumulator
    lowest = fmt.min_exponent - fmt.mantissa_bits + (unit.fraction_bits or 0)
    lowest = lowest if unit.min_exponent is None else max(lowest, unit.min_exponent)
    return lowest, fmt.max_exponent - 1 - _head(unit) - k.bit_length()


def _reduction(plan: GemmPlan, out: Tensor) -> Reduction:
    partial = plan.partial or FP32
    return Reduction(
        out.dtype == torch.float64,
        plan.reduce == "pairwise",
        plan.partial is not None,
        plan.round_trip,
        grid_of(partial),
    )


def _promotion_scales(scales: Scales, slabs: Slabs, plan: GemmPlan) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of every chain, [chains, M] and [chains, N], where a plan multiplies chains by scales."""
    if not plan.scaled_promotion:
        return _NO_FLOATS, _NO_FLOATS
    assert scales[0] is not None and scales[1] is not None and plan.promote_every is not None
    place = slabs.starts // plan.promote_every
    return scales[0].numpy().T[place], scales[1].numpy().T[place]
