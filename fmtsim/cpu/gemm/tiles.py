# SPDX-License-Identifier: Apache-2.0
"""Tiles of a product: rows, groups of panels, slabs of K, the share of each thread; and batches of small products."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fmtsim.cpu.gemm.accumulate import Order, Promotion, Reduction, begin_output, reduce_parts
from fmtsim.cpu.gemm.aligned import TRUNCATE, Draw, Unit
from fmtsim.cpu.gemm.operand_layouts import (
    EMPTY,
    GROUP,
    HAS_INF,
    TOP_BYTE,
    Grouped,
    Rows,
    Source,
    pack_rows,
    without_scales,
)
from fmtsim.cpu.gemm.panels import (
    Buffers,
    Constants,
    Grouping,
    Slab,
    Slabs,
    State,
    block_scaled_panels,
    buffers_of,
    round_panels,
    rows_of,
    truncate_panels,
)
from fmtsim.cpu.gemm.scaled_groups import Groups, exponent_bytes, group_scales
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, kernel, subroutine
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import COLUMNS, PACKED

_SMALL_STATE = 4 << 20  # bytes of the sums of a product that is small: as many as a second-level cache may hold
_SLOTS = 2048  # of a small product
_WORK = 1 << 22  # its multiply-adds: above, the call of a product by itself costs little, and threads share panels
_MANY = 4  # products for each thread, with which threads are busy whatever the products' size
DONE, LEFT, NONFINITE = 0, 1, 2  # what has become of a product; the last has NaN or Inf among its operands


class Work(NamedTuple):
    """Where a thread computes a product."""

    rows: Rows
    low: np.ndarray  # int32 [rows]: the smallest exponents
    marks: np.ndarray  # int32 [rows]: NaN and Inf
    raw: np.ndarray  # float32 [rows][slots]
    scales: np.ndarray  # empty
    state: State
    buffers: Buffers
    done: np.ndarray  # bool [panels]


class Sequence(NamedTuple):
    """The order of the products along K, all of it in one slab."""

    slots: np.ndarray
    order: Order
    block: int
    parts: int
    reduction: Reduction


def is_small(count: int, m: int, n: int, k: int, slabs: Slabs) -> bool:
    """Return True if the kernels here take so many products [M, N] of K terms."""
    state = 8 * COLUMNS * -(-n // COLUMNS) * (m + 3) * (slabs.parts + 2)
    light = m * n * k <= _WORK or count >= _MANY * pool.get_num_threads()
    return state <= _SMALL_STATE and slabs.whole.slots.size <= _SLOTS and light


# Compiled into the kernels below: to call the kernels as they are would compile each of them by itself as well.
_pack_rows = subroutine(pack_rows.py_func)  # type: ignore[attr-defined]
_truncate_panels = subroutine(truncate_panels.py_func)  # type: ignore[attr-defined]
_round_panels = subroutine(round_panels.py_func)  # type: ignore[attr-defined]
_reduce_parts = subroutine(reduce_parts.py_func)  # type: ignore[attr-defined]


@subroutine
def _product_of(source, i):  # type: ignore[no-untyped-def]
    """Return the operand of product i."""
    return Source(
        source.array[i], source.table, source.emin, source.top, source.bits, source.scales, source.every,
        source.scale_emin,
    )  # fmt: skip


@subroutine
def _pack(source, sequence, given, factor, narrow, work):  # type: ignore[no-untyped-def]
    """Begin a product: clear its sums and pack the rows of a; return whether they fit and their smallest exponent."""
    work.state.acc[:], work.state.total[:], work.state.marks[:], work.marks[:] = 0, 0, 0, 0
    work.state.lowest[:], work.state.highest[:] = -EMPTY, EMPTY
    fits = _pack_rows(
        source, 0, work.low.size, sequence.slots, sequence.block, given, factor, narrow, work.raw, work.scales,
        work.rows, work.low, work.marks,
    )  # fmt: skip
    low = np.int64(work.low[0])
    for row in range(1, work.low.size):
        low = min(low, np.int64(work.low[row]))
    return fits, low


@subroutine
def _begin(c, work):  # type: ignore[no-untyped-def]
    """Write an addend [M, N] where sums begin, and its exponents where those of carried sums are noted."""
    for p in range(work.done.size):
        lowest, highest, first = np.int64(-EMPTY), np.int64(EMPTY), p * COLUMNS
        for row in range(c.shape[0]):
            for column in range(min(COLUMNS, c.shape[1] - first)):
                number = c[row, first + column] + np.float32(0)  # -0 would count as a negative term
                place = row * COLUMNS + column
                if work.state.promotion.active:
                    work.state.total[p, place] = number
                else:
                    work.state.acc[p, place] = number
                magnitude = bits32(number) & np.int32(0x7FFFFFFF)
                if magnitude:
                    exponent = np.int64(magnitude >> np.int32(23)) - 127
                    lowest, highest = min(lowest, exponent), max(highest, exponent)
        work.state.lowest[p], work.state.highest[p] = lowest, highest
        if highest > 127:  # NaN or Inf, which no other operand may have
            work.state.marks[p, 0] |= HAS_INF


@subroutine
def _write(work, sequence, out):  # type: ignore[no-untyped-def]
    """Reduce the parts of a product and write it to out, unless it is NONFINITE; return what it is."""
    marks = np.int32(0)
    for row in range(work.marks.size):
        marks |= work.marks[row]
    done = True
    for p in range(work.done.size):
        done &= work.done[p]
        for column in range(COLUMNS):
            marks |= work.state.marks[p, column]
    if marks or not done:
        return NONFINITE if marks else LEFT
    how = sequence.reduction
    for p in range(work.done.size):
        total = work.state.parts[p]
        if sequence.parts > 1 or how.in_place or how.partial:
            total = work.state.total[p]  # cleared where its last part ended: parts are added in place to zeros
            _reduce_parts(work.state.parts[p], sequence.parts, work.low.size, how, total)
        first = p * COLUMNS
        for row in range(out.shape[0]):
            for column in range(min(COLUMNS, out.shape[1] - first)):
                out[row, first + column] = total[row * COLUMNS + column]
    return DONE


@device
def _draw_of(draw, keys, i):  # type: ignore[no-untyped-def]
    key = keys[i, 0], keys[i, 1], keys[i, 2], keys[i, 3]
    return Draw(key, draw.bits, draw.block, draw.row, draw.rows, draw.columns)


@kernel
def truncate_batch(a, b, c, sequence, how, draw, keys, work, out, outcome):  # type: ignore[no-untyped-def]
    """Write products of a batch by the truncating kernel; ``outcome`` (int8 [products]) says which are DONE.

    a: Source whose array is [products, M, K]; b: likewise [products, N, K]; c: float32 [products, M, N] or empty; out:
    [products, M, N]. ``how``: Constants.
    A product is LEFT where they exclude its exponents. ``keys`` (uint32 [products, 4]) are their own.
    """
    for i in range(outcome.size):
        fits, low = _pack(_product_of(a, i), sequence, how.tops[0], how.factor, True, work)
        if fits:
            if c.size:
                _begin(c[i], work)
            _truncate_panels(
                work.rows, low, _product_of(b, i), 0, 0, work.done.size, sequence.slots, sequence.order, how,
                _draw_of(draw, keys, i), work.state, work.buffers, work.done,
            )  # fmt: skip
            outcome[i] = _write(work, sequence, out[i])


@kernel
def round_batch(a, b, c, sequence, unit, draw, keys, work, out, outcome):  # type: ignore[no-untyped-def]
    """Write those that are LEFT by the rounding kernel; arguments are those of ``truncate_batch``."""
    for i in range(outcome.size):
        if outcome[i] != LEFT:
            continue
        _, low = _pack(_product_of(a, i), sequence, EMPTY, unit.factor, False, work)
        work.done[:] = False
        if c.size:
            _begin(c[i], work)
        _round_panels(
            work.rows, low, _product_of(b, i), 0, 0, work.done.size, sequence.slots, sequence.order,
            unit.terms == TRUNCATE, sequence.block, unit, _draw_of(draw, keys, i), work.state, work.buffers, work.done,
        )  # fmt: skip
        work.done[:] = True
        outcome[i] = _write(work, sequence, out[i])


def run_batch(
    a: Source, b: Source, c: np.ndarray, slabs: Slabs, fast: Constants | None, unit: Unit, promotion: Promotion,
    reduction: Reduction, draw: Draw, keys: np.ndarray, out: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Write the products of a batch to out [products, M, N]; return which are DONE, bool [products].

    Args:
        a: Its array is [products, M, K].
        b: [products, N, K].
        c: float32 [products, M, N], where sums begin, or empty.
        slabs: The order of a product that ``is_small``.
        fast, unit, promotion, reduction, draw: As in Job.
        keys: uint32 [products, 4], the words of each product's key.
        out: float32 or float64.
    """
    count, m, n = out.shape
    sequence = Sequence(slabs.whole.slots, slabs.whole.order, slabs.block, slabs.parts, reduction)
    outcome = np.full(count, LEFT, np.int8)

    def task(start: int, stop: int) -> None:
        part = slice(start, stop)
        rows, columns = a._replace(array=np.ascontiguousarray(a.array[part])), b._replace(array=b.array[part])
        for run, how in ((truncate_batch, fast), (round_batch, unit)):
            if how is not None and (outcome[part] == LEFT).any():
                work = _work(m, n, sequence, how, promotion)
                addend = c[part] if c.size else c
                run(rows, columns, addend, sequence, how, draw, keys[part], work, out[part], outcome[part])

    pool.run(task, count, 1, m * -(-n // COLUMNS) * COLUMNS * sequence.slots.size >> 4)
    return outcome == DONE


def _work(m: int, n: int, sequence: Sequence, how: Constants | Unit, promotion: Promotion) -> Work:
    """Return this thread's memory for a product [M, N]."""
    rows, panels, slots = -(-m // 4) * 4, -(-n // COLUMNS), sequence.slots.size
    narrow = isinstance(how, Constants)
    dtype = np.float32 if isinstance(how, Constants) and how.mask.itemsize == 4 else np.float64
    words = sequence.order.ends.size * ((sequence.block + 31) // 32)
    size, sums, none = (slots + GROUP) * rows, rows * COLUMNS, np.zeros((panels, 0), np.float32)
    return Work(
        rows=rows_of("narrow", slots, words, rows, dtype),
        low=np.empty(rows, np.int32),
        marks=np.empty(rows, np.int32),
        raw=scratch("rows raw", size, np.float32),
        scales=np.zeros(0, np.float32),
        state=State(
            scratch("chains", panels * sums, dtype).reshape(panels, sums),
            scratch("totals", panels * sums, np.float64).reshape(panels, sums),
            scratch("parts", panels * sums * sequence.parts, np.float64).reshape(panels, -1),
            np.empty((panels, COLUMNS), np.int32),
            np.empty(panels, np.int64),
            np.empty(panels, np.int64),
            none[0],
            none,
            promotion,
        ),
        buffers=buffers_of(slots, words, dtype, np.int8 if narrow else np.int16, drawing_rows=rows if narrow else 0),
        done=np.empty(panels, np.bool_),
    )


_STATE = 20 << 20  # bytes of sums that are kept from slab to slab
_ROWS = 512
_SLAB = 1 << 19  # numbers of rows and a panel that are one slab: 1 MB of float64
Task = Callable[[int, int], None]
Share = Callable[[Task, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """All that the tasks of one product share."""

    a: Source
    b: Source
    k: int
    slabs: Slabs
    fast: Constants | None
    unit: Unit
    groups: Groups | None
    tops: tuple[int, int] | None  # of groups that ``grouped_integers`` takes: the largest exponents of their scales
    promotion: Promotion
    scales: tuple[np.ndarray, np.ndarray]  # float32 [chains, M] and [chains, N], or empty
    reduction: Reduction
    draw: Draw
    out: np.ndarray
    c: np.ndarray | None
    row_marks: np.ndarray  # int32: rows and columns with NaN and Inf
    column_marks: np.ndarray

    @property
    def draws(self) -> bool:
        """Whether the truncating kernel draws."""
        return self.fast is not None and self.fast.rounding is not None and self.fast.rounding.draws

    @property
    def single(self) -> bool:
        """Whether chains run in float32."""
        return self.fast is not None and self.fast.mask.itemsize == 4


def run_tiles(job: Job) -> None:
    """Compute a product: by rows and groups of panels, threads sharing the panels, or the rows where panels are few."""
    m, n = job.out.shape
    panels, threads = -(-n // COLUMNS), pool.threads_for(m * n * job.k >> 4)
    row_bytes = 8 * COLUMNS * (job.slabs.parts + 2)  # bytes of state for a row of a panel
    rows = min(_ROWS, max(_STATE // (row_bytes * 4) // 4 * 4, 32))
    group = max(_STATE // (row_bytes * rows), 1)
    if panels < threads:
        rows = min(rows, max(-(-m // threads // 4) * 4, 4))

        def share(start: int, stop: int) -> None:
            for first in range(start * rows, min(stop * rows, m), rows):
                Tile(job, first, min(rows, m - first), 0, panels, _alone).run()

        pool.run(share, -(-m // rows), 1, rows * n * job.k >> 4)
        return
    together = _alone if threads == 1 else _together
    for first in range(0, m, rows):
        for panel in range(0, panels, group):
            Tile(job, first, min(rows, m - first), panel, min(group, panels - panel), together).run()


def _alone(task: Task, count: int, weight: int) -> None:
    task(0, count)


def _together(task: Task, count: int, weight: int) -> None:
    pool.run(task, count, 1, weight)


class Tile:
    """Some rows by a group of panels, slab after slab.

    ``share(task, count, weight)`` runs ``task(start, stop)`` over ``range(count)``, alone or on several threads.
    """

    def __init__(self, job: Job, first: int, count: int, base: int, panels: int, share: Share) -> None:
        self.job, self.first, self.count, self.base, self.panels, self.share = job, first, count, base, panels, share
        self.padded = -(-count // 4) * 4
        self.weight = count * COLUMNS * min(job.k, 256) >> 4
        self.marks = np.zeros(self.padded, np.int32)
        whole = count == len(job.a.array) and job.a.array.flags.c_contiguous
        self.source = job.a if whole else job.a.part(first, count)
        self.state = self._state()

    def run(self) -> None:
        """Compute the tile and write it."""
        job = self.job
        small = (self.padded + COLUMNS) * job.slabs.whole.slots.size <= _SLAB
        for slab in (job.slabs.whole,) if small else job.slabs.slabs:
            done = np.zeros(self.panels, np.bool_)
            if job.groups is not None:
                self._over_panels(self._block_scaled(slab, job.groups))
                continue
            fast = None if job.fast is None else self._truncate(slab, job.fast, done)
            if fast is not None:
                self._over_panels(fast)
            if not done.all():
                self._over_panels(self._round(slab, done))
        self._over_panels(self._write)
        rows = slice(self.first, self.first + self.count)
        job.row_marks[rows] |= self.marks[: self.count]

    def _over_panels(self, task: Task) -> None:
        self.share(task, self.panels, self.weight)

    def _state(self) -> State:
        job, panels, size = self.job, self.panels, self.padded * COLUMNS
        dtype = np.float32 if job.single else np.float64
        acc = scratch("chains", panels * size, dtype).reshape(panels, size)
        total = scratch("totals", panels * size, np.float64).reshape(panels, size)
        parts = scratch("parts", panels * size * job.slabs.parts, np.float64).reshape(panels, -1)
        acc[:] = 0
        if job.promotion.active:
            total[:] = 0
        if job.c is not None and not job.reduction.in_place:
            for p in range(panels):
                self._tile((total if job.promotion.active else acc)[p], p)[:] = job.c[self._place(p)]
        row_scales, column_scales = job.scales
        rows = np.zeros((len(row_scales), self.padded), np.float32)
        columns = np.zeros((panels, len(row_scales), COLUMNS), np.float32)
        if row_scales.size:
            rows[:, : self.count] = row_scales[:, self.first : self.first + self.count]
            for p in range(panels):
                panel_scales = column_scales[:, self._place(p)[1]]
                columns[p, :, : panel_scales.shape[1]] = panel_scales
        return State(
            acc, total, parts, np.zeros((panels, COLUMNS), np.int32), np.full(panels, -EMPTY, np.int64),
            np.full(panels, EMPTY, np.int64), rows.reshape(-1), columns.reshape(panels, -1), job.promotion,
        )  # fmt: skip

    def _pack(
        self, slab: Slab, name: str, dtype: type, factor: np.floating, given: int, *, narrow: bool
    ) -> tuple[Rows, int] | None:
        """Return the rows of a slab and their smallest exponent; None where bytes cannot hold the exponents."""
        block, count = self.job.slabs.block, self.padded
        size = (slab.slots.size + GROUP) * count  # whole vectors
        rows = rows_of(name, slab.slots.size, slab.order.ends.size * ((block + 31) // 32), count, dtype)
        low = np.empty(count, np.int32)
        source = self.source if self.job.groups is None else without_scales(self.source)
        raw = scratch("rows raw", size, np.float32)
        scales = scratch("rows scales", size if source.scales.size else 0, np.float32)
        fits: list[bool] = []

        def part(start: int, stop: int) -> None:
            packed = pack_rows(
                source, start, stop, slab.slots, block, given, factor, narrow, raw, scales, rows, low, self.marks
            )
            fits.append(packed)

        self.share(part, count, slab.slots.size)
        return (rows, int(low.min())) if all(fits) else None

    def _truncate(self, slab: Slab, how: Constants, done: np.ndarray) -> Task | None:
        dtype = np.float32 if self.job.single else np.float64
        packed = self._pack(slab, "narrow", dtype, how.factor, how.tops[0], narrow=True)
        if packed is None:
            return None
        rows, low = packed
        job, draw = self.job, self.job.draw._replace(block=slab.first, row=self.first)

        def task(start: int, stop: int) -> None:
            truncate_panels(
                rows, low, job.b, self.base, start, stop, slab.slots, slab.order, how, draw, self.state,
                self._buffers(slab, dtype, np.int8), done,
            )  # fmt: skip

        return task

    def _round(self, slab: Slab, done: np.ndarray) -> Task:
        packed = self._pack(slab, "wide", np.float64, self.job.unit.factor, EMPTY, narrow=False)
        assert packed is not None  # 16 bits hold every exponent
        rows, low = packed
        job, draw = self.job, self.job.draw._replace(block=slab.first, row=self.first)

        def task(start: int, stop: int) -> None:
            round_panels(
                rows, low, job.b, self.base, start, stop, slab.slots, slab.order, job.unit.terms == TRUNCATE,
                job.slabs.block, job.unit, draw, self.state, self._buffers(slab, np.float64, np.int16), done,
            )  # fmt: skip

        return task

    def _block_scaled(self, slab: Slab, groups: Groups) -> Task:
        job, panels, tops = self.job, self.panels, self.job.tops
        dtype: type = np.float32
        numbers, factor = (1.0, 1.0), groups.factor
        if tops is not None and groups.numbers is not None:
            dtype = np.int32
            numbers, factor = groups.numbers, factor / math.prod(groups.numbers)
        packed = self._pack(slab, "wide", dtype, np.float64(numbers[0]), EMPTY, narrow=False)
        assert packed is not None
        scales, exponents, seen = group_scales(self.source, slab.slots, groups.size, factor, self.padded)
        self.marks |= seen
        if tops is not None:
            exponents = exponent_bytes(exponents, tops[0]) * np.int32(0x01010101)
        a = Grouped(packed[0].values, scales.reshape(-1), exponents.reshape(-1), self.padded)
        columns = job.b.part(self.base * COLUMNS, panels * COLUMNS)
        scales, exponents, seen = group_scales(columns, slab.slots, groups.size, np.float64(1), panels * COLUMNS)
        np.bitwise_or(self.state.marks, seen.reshape(panels, COLUMNS), out=self.state.marks)
        if tops is not None:  # in the order of pack_bytes
            exponents = exponent_bytes(exponents, tops[1]).astype(np.int8)
            exponents = exponents.reshape(-1, panels, COLUMNS)[:, :, PACKED].reshape(-1, panels * COLUMNS)
        by_panel = [
            np.ascontiguousarray(x.reshape(-1, panels, COLUMNS).swapaxes(0, 1)).reshape(panels, -1)
            for x in (scales, exponents)
        ]
        base = np.int32(sum(tops or ()) - 2 * TOP_BYTE)
        how = Grouping(job.slabs.block, groups.size, groups.factor, np.float64(numbers[1]), base, groups.mask, job.unit)
        draw = job.draw._replace(block=slab.first, row=self.first)

        def task(start: int, stop: int) -> None:
            block_scaled_panels(
                a, by_panel[0], by_panel[1], without_scales(job.b), self.base, start, stop, slab.slots, slab.order,
                how, draw, self.state, self._buffers(slab, dtype, np.int16),
            )  # fmt: skip

        return task

    def _buffers(self, slab: Slab, dtype: type, exponents: type) -> Buffers:
        words = slab.order.ends.size * ((self.job.slabs.block + 31) // 32)
        scaled = self.job.b.scales.size > 0 and self.job.groups is None
        drawing_rows = self.padded if self.job.draws else 0
        return buffers_of(slab.slots.size, words, dtype, exponents, scaled=scaled, drawing_rows=drawing_rows)

    def _write(self, start: int, stop: int) -> None:
        job = self.job
        for p in range(start, stop):
            total, place = self.state.total[p], self._place(p)
            if job.slabs.parts == 1 and not job.reduction.in_place and not job.reduction.partial:
                total = self.state.parts[p]  # one part, not rounded, is the result
            else:
                if job.reduction.in_place:
                    begin_output(total, self._tile(total, p), None if job.c is None else job.c[place])
                reduce_parts(self.state.parts[p], job.slabs.parts, self.padded, job.reduction, total)
            job.out[place] = self._tile(total, p)
            columns = slice((self.base + p) * COLUMNS, (self.base + p + 1) * COLUMNS)
            job.column_marks[columns] |= self.state.marks[p]

    def _place(self, p: int) -> tuple[slice, slice]:
        first = (self.base + p) * COLUMNS
        columns = slice(first, min(first + COLUMNS, self.job.out.shape[1]))
        return slice(self.first, self.first + self.count), columns

    def _tile(self, numbers: np.ndarray, p: int) -> np.ndarray:
        columns = self._place(p)[1]
        return numbers.reshape(self.padded, COLUMNS)[: self.count, : columns.stop - columns.start]
