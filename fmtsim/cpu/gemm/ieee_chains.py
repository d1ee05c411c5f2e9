# SPDX-License-Identifier: Apache-2.0
"""IEEE chains, one fused multiply-add a product; and the tiles of 64 columns in which chains of any unit run."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from fmtsim.cpu.gemm.accumulate import (
    Order,
    Sums,
    add_on_stack,
    begin_output,
    end_block,
    grid_of,
    promotion_of,
    reduce_parts,
    reduction_of,
)
from fmtsim.cpu.gemm.operand_reads import gather_panel, read_array
from fmtsim.cpu.gemm.panels import Slabs, chain_scales, slabs_of, stacked
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import kernel, overload
from fmtsim.cpu.runtime.kernel_numbers import number
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import COLUMNS, LANES, PARTS, broadcast, fma, load, store
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.schedule import adds_in_order

RUN_BYTES = 32 << 10  # of a panel, between two visits of a running sum: they stay in the first-level cache
_ROW_BYTES = 8 << 20  # converted rows that are kept at a time
_ROWS = 512
_NO_FLOATS = np.zeros(0, np.float32)
Scales = tuple[Tensor | None, Tensor | None]


# Tiles.


class Tile(NamedTuple):
    """Some rows of a product, padded with zeros to whole fours, and 64 columns of it."""

    rows: np.ndarray  # float32 or float64 [height][K], flat
    panel: np.ndarray  # [K][64], flat
    height: int
    row: slice  # of the result
    column: slice

    def part_of(self, sums: np.ndarray) -> np.ndarray:
        """Return the part of a tile's sums [height][64] that lies in the result."""
        return sums.reshape(self.height, COLUMNS)[
            : self.row.stop - self.row.start, : self.column.stop - self.column.start
        ]


def each_tile(
    a: Tensor, b: Tensor, dtype: type, compute: Callable[[Tile], None], weight: float = 1 / 16,
    slots: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Call ``compute`` for every tile of ``a b^T``, on the threads of the pool, with the operands as ``dtype``.

    ``weight`` is the cost of a product, in elements of a cast; ``slots`` permutes the products, and -1 is a
    product of zeros.
    """
    (m, k), n = a.shape, b.shape[0]
    (a_array, a_table), (b_array, b_table) = read_array(a, wide=True), read_array(b, wide=True)
    order, panels, threads = np.arange(k, dtype=np.int32), -(-n // COLUMNS), pool.get_num_threads()
    step = min(_ROW_BYTES // (k * np.dtype(dtype).itemsize), _ROWS, -(-m * min(panels, threads) // threads))
    step = max(-(-step // 4) * 4, 4)

    def tiles(start: int, stop: int) -> None:
        height = min(step, -(-m // 4) * 4)
        rows, panel = scratch("rows", height * k, dtype), scratch("panel", k * COLUMNS, dtype)
        for index in range(start, stop):
            first, column = index // panels * step, index % panels * COLUMNS
            row = slice(first, min(first + step, m))
            if index == start or column == 0:
                convert_rows(a_array[row], a_table, rows)
            convert_panel(b_array[column : column + COLUMNS], b_table, order, panel)
            padded = -(-(row.stop - first) // 4) * 4
            columns = slice(column, min(column + COLUMNS, n))
            tile = Tile(rows[: padded * k], panel, padded, row, columns)
            compute(tile if slots is None else _in_slots(tile, slots))

    pool.run(tiles, -(-m // step) * panels, 1, int(step * COLUMNS * k * weight))


def _in_slots(tile: Tile, slots: np.ndarray) -> Tile:
    """Return a tile with its products in the order of ``slots``."""
    rows, panel = tile.rows.reshape(tile.height, -1), tile.panel.reshape(-1, COLUMNS)
    zeros, places = np.flatnonzero(slots < 0), np.maximum(slots, 0)
    kind = rows.dtype.type
    rows_in_slots = scratch("rows in slots", tile.height * slots.size, kind).reshape(-1, slots.size)
    panel_in_slots = scratch("panel in slots", slots.size * COLUMNS, kind).reshape(-1, COLUMNS)
    np.take(rows, places, 1, rows_in_slots, "clip")  # the other modes need a copy
    np.take(panel, places, 0, panel_in_slots, "clip")
    rows_in_slots[:, zeros], panel_in_slots[zeros] = 0, 0
    return tile._replace(rows=rows_in_slots.reshape(-1), panel=panel_in_slots.reshape(-1))


@kernel
def convert_rows(source, table, out):  # type: ignore[no-untyped-def]
    """Write rows [R, K] to out, flat, and zeros behind them."""
    rows, k = source.shape
    for row in range(rows):
        line = out[row * k : (row + 1) * k]
        for i in range(k):
            line[i] = number(source[row, i], table)
    out[rows * k :] = 0


@kernel
def convert_panel(source, table, order, out):  # type: ignore[no-untyped-def]
    """Write at most 64 rows [R, K] to out [K][64], flat, transposed; columns without a row are zeros."""
    gather_panel(source, table, 0, order, 1, out)


# Chains of any unit, accumulated, promoted and reduced in the order of a plan.


class Chains(NamedTuple):
    """A product whose blocks follow each other through running sums."""

    spec: GemmSpec
    order: Order
    parts: int  # to be reduced
    slots: int  # sums in memory until then
    c: np.ndarray | None
    scales: tuple[np.ndarray, np.ndarray]  # of the chains: float32 [chains, M] and [chains, N], or empty
    out: np.ndarray


Step = Callable[[Tile, np.ndarray, Order, Sums], None]


def run_chains(
    a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, out: Tensor, dtype: type, step: Callable,
    weight: float = 1 / 16,
) -> None:  # fmt: skip
    """Write a product to out: ``step(slabs)`` returns the function that adds a tile's blocks to its running sums."""
    slabs = slabs_of(a.shape[1], spec.datapath, spec.plan)
    addend = None if c is None else c.detach().numpy()
    order = slabs.whole.order
    chains = Chains(spec, order, slabs.parts, slabs.parts, addend, chain_scales(scales, slabs, spec.plan), out.numpy())
    add = step(slabs)
    each_tile(a, b, dtype, lambda tile: _tile(chains, tile, add), weight)


def _tile(chains: Chains, tile: Tile, add: Step) -> None:
    size = tile.height * COLUMNS
    acc = scratch("chains", size, tile.rows.dtype.type)
    total, parts = scratch("totals", size, np.float64), scratch("parts", chains.slots * size, np.float64)
    acc[:], total[:] = 0, 0
    promotion = promotion_of(chains.spec)
    reduction = reduction_of(chains.spec.plan, chains.out.dtype == np.float64)
    addend = None if chains.c is None else chains.c[tile.row, tile.column]
    if addend is not None and not reduction.in_place:
        tile.part_of(total if promotion.active else acc)[:] = addend
    row_scales, column_scales = (
        _padded(scales, place, width)
        for scales, place, width in zip(chains.scales, (tile.row, tile.column), (tile.height, COLUMNS), strict=True)
    )
    add(tile, acc, chains.order, Sums(total, parts, promotion, row_scales, column_scales))
    if reduction.in_place:
        begin_output(total, tile.part_of(total), addend)
    reduce_parts(parts, chains.parts, tile.height, reduction, total)
    chains.out[tile.row, tile.column] = tile.part_of(total)


def _padded(scales: np.ndarray, place: slice, width: int) -> np.ndarray:
    """Return the scales [chains, .] of a tile, flat, with zeros up to its width."""
    if not scales.size:
        return _NO_FLOATS
    padded = np.zeros((len(scales), width), np.float32)
    padded[:, : place.stop - place.start] = scales[:, place]
    return padded.reshape(-1)


# IEEE 754 chains.


def covers(spec: GemmSpec) -> bool:
    """Return True if a product is chains of fused multiply-adds in float32 or float64."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.block != 1 or unit.fraction_bits is not None or not unit.signed_zero:
        return False
    if unit.rounding.mode != "nearest_even" or unit.scale is not None or unit.paired:
        return False
    kind = grid_of(unit.accumulator).kind
    ieee = unit.accumulator.max == (FP32.max if kind == 32 else np.finfo(np.float64).max)
    lanes = torch.float32 if kind == 32 else torch.float64
    return bool(kind and ieee and is_representable(spec.a, lanes) and is_representable(spec.b, lanes))


def gemm(a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, _: RandomKey, out: Tensor) -> None:
    """Write the product of a unit that ``covers`` to out; the arguments are those of the engine's ``gemm``.

    NaN and Inf go through the multiply-adds as IEEE 754 says; NaN has any payload.
    """
    assert isinstance(spec.datapath, Datapath)
    dtype = np.float64 if grid_of(spec.datapath.accumulator).kind == 64 else np.float32
    length = RUN_BYTES // (COLUMNS * np.dtype(dtype).itemsize)
    if not adds_in_order(spec.plan):  # sums are added on a stack: lanes, and folded parts
        stack = stacked(a.shape[1], spec.datapath, spec.plan)
        stack_runs = _runs(np.arange(stack.slots.size), stack.order.ends, stack.additions, length)
        addend = None if c is None else c.detach().numpy()
        chains = Chains(spec, stack.order, 1, stack.depth, addend, (_NO_FLOATS, _NO_FLOATS), out.numpy())

        def add(tile: Tile, acc: np.ndarray, order: Order, sums: Sums) -> None:
            multiply_add(tile.rows, tile.panel, stack_runs, order, sums, acc)

        each_tile(a, b, dtype, lambda tile: _tile(chains, tile, add), slots=stack.slots)
        return

    def step(slabs: Slabs) -> Step:
        whole = slabs.whole
        runs = _runs(whole.slots, whole.order.ends, np.zeros_like(whole.slots), length)
        return lambda tile, acc, order, sums: multiply_add(tile.rows, tile.panel, runs, order, sums, acc)

    run_chains(a, b, c, scales, spec, out, dtype, step)


def _runs(slots: np.ndarray, ends: np.ndarray, additions: np.ndarray, length: int) -> np.ndarray:
    """Return runs of adjacent slots in which no chain ends: first slot, end, the last slot's block and additions."""
    breaks = np.flatnonzero((np.diff(slots) != 1) | (ends[:-1] != 0)) + 1
    first = np.union1d(breaks, np.arange(0, slots.size, length))
    last = np.append(first[1:], slots.size) - 1
    return np.stack([slots[first], slots[last] + 1, last, additions[last]], 1).astype(np.int64)


@kernel
def multiply_add(rows, panel, runs, order, sums, acc):  # type: ignore[no-untyped-def]
    """Add the products of all runs to the running sums acc [height][64], of the operands' type."""
    height = acc.size // COLUMNS
    for run in range(len(runs)):
        # 1. a run of products
        _multiply_run(rows, panel, runs[run, 0], runs[run, 1], acc)
        # 2. what follows the run: the end of a chain or part, or sums on the stack
        if order.ends[runs[run, 2]]:
            end_block(acc, order, runs[run, 2], height, sums)
        if runs[run, 3]:
            add_on_stack(sums.parts, order.parts[runs[run, 2]], runs[run, 3], acc)


@overload
def _multiply_run(rows, panel, start, stop, acc):  # type: ignore[no-untyped-def]
    """Add products start ... stop - 1, one fused multiply-add each: as many rows at a time as registers hold."""

    def two_rows(rows, panel, start, stop, acc):  # type: ignore[no-untyped-def]
        k = panel.size // COLUMNS
        for part in range(acc.size // COLUMNS // 2 * PARTS):
            m, n = part // PARTS * 2, part % PARTS * LANES
            p, at = m * k, m * COLUMNS + n
            s0, s1 = load(acc, at), load(acc, at + COLUMNS)
            for i in range(start, stop):
                v = load(panel, i * COLUMNS + n)
                s0 = fma(broadcast(rows, p + i), v, s0)
                s1 = fma(broadcast(rows, p + k + i), v, s1)
            store(acc, at, s0)
            store(acc, at + COLUMNS, s1)

    def four_rows(rows, panel, start, stop, acc):  # type: ignore[no-untyped-def]
        k = panel.size // COLUMNS
        for part in range(acc.size // COLUMNS // 4 * PARTS):
            m, n = part // PARTS * 4, part % PARTS * LANES
            p, at = m * k, m * COLUMNS + n
            s0, s1 = load(acc, at), load(acc, at + COLUMNS)
            s2, s3 = load(acc, at + 2 * COLUMNS), load(acc, at + 3 * COLUMNS)
            for i in range(start, stop):
                v = load(panel, i * COLUMNS + n)
                s0 = fma(broadcast(rows, p + i), v, s0)
                s1 = fma(broadcast(rows, p + k + i), v, s1)
                s2 = fma(broadcast(rows, p + 2 * k + i), v, s2)
                s3 = fma(broadcast(rows, p + 3 * k + i), v, s3)
            store(acc, at, s0)
            store(acc, at + COLUMNS, s1)
            store(acc, at + 2 * COLUMNS, s2)
            store(acc, at + 3 * COLUMNS, s3)

    return four_rows if acc.dtype == types.float32 else two_rows
