# SPDX-License-Identifier: Apache-2.0
"""Tiles of a fused product: rows, groups of panels, slabs of K, and the share of each thread."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fmtsim.cpu.gemm.accumulate import Promotion, Reduction, begin_output, reduce_parts
from fmtsim.cpu.gemm.aligned_rounding import TRUNCATE, Unit
from fmtsim.cpu.gemm.aligned_truncate import Draw
from fmtsim.cpu.gemm.block_scaled import Groups, exponent_bytes, group_scales
from fmtsim.cpu.gemm.operands import EMPTY, TOP_BYTE, Grouped, Rows, Source, without_scales
from fmtsim.cpu.gemm.packing import pack_rows
from fmtsim.cpu.gemm.panels import (
    Buffers,
    Constants,
    Grouping,
    State,
    block_scaled_panels,
    buffers_of,
    round_panels,
    rows_of,
    truncate_panels,
)
from fmtsim.cpu.gemm.slabs import Slab, Slabs
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import LANES

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
    panels, threads = -(-n // LANES), pool.threads_for(m * n * job.k >> 4)
    row_bytes = 8 * LANES * (job.slabs.parts + 2)  # bytes of state for a row of a panel
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
        self.weight = count * LANES * min(job.k, 256) >> 4
        self.marks = np.zeros(self.padded, np.int32)
        whole = count == len(job.a.array) and job.a.array.flags.c_contiguous
        self.source = job.a if whole else job.a.part(first, count)
        self.state = self._state()

    def run(self) -> None:
        """Compute the tile and write it."""
        job = self.job
        small = (self.padded + LANES) * job.slabs.whole.slots.size <= _SLAB
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
        job, panels, size = self.job, self.panels, self.padded * LANES
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
        columns = np.zeros((panels, len(row_scales), LANES), np.float32)
        if row_scales.size:
            rows[:, : self.count] = row_scales[:, self.first : self.first + self.count]
            for p in range(panels):
                panel_scales = column_scales[:, self._place(p)[1]]
                columns[p, :, : panel_scales.shape[1]] = panel_scales
        return State(
            acc, total, parts, np.zeros((panels, LANES), np.int32), np.full(panels, -EMPTY, np.int64),
            np.full(panels, EMPTY, np.int64), rows.reshape(-1), columns.reshape(panels, -1), job.promotion,
        )  # fmt: skip

    def _pack(
        self, slab: Slab, name: str, dtype: type, factor: np.floating, given: int, *, narrow: bool
    ) -> tuple[Rows, int] | None:
        """Return the rows of a slab and their smallest exponent; None where bytes cannot hold the exponents."""
        block, count = self.job.slabs.block, self.padded
        size = (slab.slots.size + LANES) * count  # whole vectors
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
        columns = job.b.part(self.base * LANES, panels * LANES)
        scales, exponents, seen = group_scales(columns, slab.slots, groups.size, np.float64(1), panels * LANES)
        np.bitwise_or(self.state.marks, seen.reshape(panels, LANES), out=self.state.marks)
        if tops is not None:  # in the order of pack_bytes
            exponents = exponent_bytes(exponents, tops[1]).astype(np.int8)
            exponents = exponents.reshape(-1, panels, 4, LANES // 4).swapaxes(2, 3).reshape(-1, panels * LANES)
        by_panel = [
            np.ascontiguousarray(x.reshape(-1, panels, LANES).swapaxes(0, 1)).reshape(panels, -1)
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
            columns = slice((self.base + p) * LANES, (self.base + p + 1) * LANES)
            job.column_marks[columns] |= self.state.marks[p]

    def _place(self, p: int) -> tuple[slice, slice]:
        first = (self.base + p) * LANES
        columns = slice(first, min(first + LANES, self.job.out.shape[1]))
        return slice(self.first, self.first + self.count), columns

    def _tile(self, numbers: np.ndarray, p: int) -> np.ndarray:
        columns = self._place(p)[1]
        return numbers.reshape(self.padded, LANES)[: self.count, : columns.stop - columns.start]
