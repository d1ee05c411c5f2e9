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
    begin_output,
    end_block,
    grid_of,
    promotion_of,
    reduce_parts,
    reduction_of,
)
from fmtsim.cpu.gemm.operands import number, read_array
from fmtsim.cpu.gemm.slabs import Slabs, chain_scales, slabs_of
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import kernel, overload
from fmtsim.cpu.runtime.scratch import scratch
from fmtsim.cpu.runtime.simd import LANES, broadcast, fma, load, store
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec

RUN_BYTES = 32 << 10  # of a panel, between two visits of a running sum: they stay in the first-level cache
_ROW_BYTES = 8 << 20  # converted rows that are kept at a time
_ROWS = 512
_GATHERED = 32
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
        """Return what the result has of a tile's sums [height][64]."""
        return sums.reshape(self.height, LANES)[
            : self.row.stop - self.row.start, : self.column.stop - self.column.start
        ]


def each_tile(a: Tensor, b: Tensor, dtype: type, compute: Callable[[Tile], None], weight: float = 1 / 16) -> None:
    """Call ``compute`` for every tile of ``a b^T``, on the threads of the pool, with the operands as ``dtype``.

    ``weight`` is the cost of a product, in elements of a cast.
    """
    (m, k), n = a.shape, b.shape[0]
    (left, left_table), (right, right_table) = read_array(a, wide=True), read_array(b, wide=True)
    panels, threads = -(-n // LANES), pool.get_num_threads()
    step = min(_ROW_BYTES // (k * np.dtype(dtype).itemsize), _ROWS, -(-m * min(panels, threads) // threads))
    step = max(-(-step // 4) * 4, 4)

    def tiles(start: int, stop: int) -> None:
        height = min(step, -(-m // 4) * 4)
        rows, panel = scratch("rows", height * k, dtype), scratch("panel", k * LANES, dtype)
        for index in range(start, stop):
            first, column = index // panels * step, index % panels * LANES
            row = slice(first, min(first + step, m))
            if index == start or column == 0:
                convert_rows(left[row], left_table, rows)
            convert_panel(right[column : column + LANES], right_table, panel)
            padded = -(-(row.stop - first) // 4) * 4
            compute(Tile(rows[: padded * k], panel, padded, row, slice(column, min(column + LANES, n))))

    pool.run(tiles, -(-m // step) * panels, 1, int(step * LANES * k * weight))


def lane(raw, like, table):  # type: ignore[no-untyped-def]
    """Return a raw number (operands.number, or an integer, or a float64) as a number of the type of ``like``."""
    raise NotImplementedError


@overload(lane)
def _lane_of(raw, like, table):  # type: ignore[no-untyped-def]
    kind = np.float64 if like == types.float64 else np.float32
    if raw in (types.float64, types.int8):
        return lambda raw, like, table: kind(raw)
    return lambda raw, like, table: kind(number(raw, table))


@kernel
def convert_rows(source, table, out):  # type: ignore[no-untyped-def]
    """Write rows [R, K] to out, flat, and zeros behind them."""
    rows, k = source.shape
    for row in range(rows):
        line = out[row * k : (row + 1) * k]
        for i in range(k):
            line[i] = lane(source[row, i], out[0], table)
    out[rows * k :] = 0


@kernel
def convert_panel(source, table, out):  # type: ignore[no-untyped-def]
    """Write at most 64 rows [R, K] to out [K][64], flat, transposed; columns without a row are zeros."""
    rows, k = source.shape
    if rows < LANES:
        out[:] = 0
    if source.strides[0] < source.strides[1]:
        for i in range(k):
            line = out[i * LANES : i * LANES + rows]
            for row in range(rows):
                line[row] = lane(source[row, i], out[0], table)
        return
    for start in range(0, k, _GATHERED):
        stop = min(start + _GATHERED, k)
        for row in range(rows):
            column = out[start * LANES + row :]
            for i in range(stop - start):
                column[i * LANES] = lane(source[row, start + i], out[0], table)


# Chains of any unit: what a plan does with them.


class Chains(NamedTuple):
    """A product whose blocks follow each other through running sums."""

    spec: GemmSpec
    slabs: Slabs
    c: np.ndarray | None
    scales: tuple[np.ndarray, np.ndarray]  # of the chains: float32 [chains, M] and [chains, N], or empty
    out: np.ndarray


Step = Callable[[Tile, np.ndarray, Order, Sums], None]


def run_chains(
    a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, out: Tensor, dtype: type, step: Callable,
    weight: float = 1 / 16,
) -> None:  # fmt: skip
    """Write a product to out: ``step(slabs)`` returns what adds the blocks of a tile to its running sums of dtype."""
    slabs = slabs_of(a.shape[1], spec.datapath, spec.plan)
    given = None if c is None else c.detach().numpy()
    chains = Chains(spec, slabs, given, chain_scales(scales, slabs, spec.plan), out.numpy())
    add = step(slabs)
    each_tile(a, b, dtype, lambda tile: _tile(chains, tile, add), weight)


def _tile(chains: Chains, tile: Tile, add: Step) -> None:
    size, order, count = tile.height * LANES, chains.slabs.whole.order, chains.slabs.parts
    acc = scratch("chains", size, tile.rows.dtype.type)
    total, parts = scratch("totals", size, np.float64), scratch("parts", count * size, np.float64)
    acc[:], total[:] = 0, 0
    promotion = promotion_of(chains.spec)
    reduction = reduction_of(chains.spec.plan, chains.out.dtype == np.float64)
    given = None if chains.c is None else chains.c[tile.row, tile.column]
    if given is not None and not reduction.in_place:
        tile.part_of(total if promotion.active else acc)[:] = given
    row_scales, column_scales = (
        _padded(scales, place, width)
        for scales, place, width in zip(chains.scales, (tile.row, tile.column), (tile.height, LANES), strict=True)
    )
    add(tile, acc, order, Sums(total, parts, promotion, row_scales, column_scales))
    if reduction.in_place:
        begin_output(total, tile.part_of(total), given)
    reduce_parts(parts, count, tile.height, reduction, total)
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
    """Say whether a product is chains of fused multiply-adds in float32 or float64."""
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

    def step(slabs: Slabs) -> Step:
        runs = _runs(slabs.whole.slots, slabs.whole.order.ends, RUN_BYTES // (LANES * np.dtype(dtype).itemsize))
        return lambda tile, acc, order, sums: multiply_add(tile.rows, tile.panel, runs, order, sums, acc)

    run_chains(a, b, c, scales, spec, out, dtype, step)


def _runs(slots: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """Return runs of neighbours along K in which no chain ends: first, behind the last, and the last one's block."""
    breaks = np.flatnonzero((np.diff(slots) != 1) | (ends[:-1] != 0)) + 1
    first = np.union1d(breaks, np.arange(0, slots.size, length))
    last = np.append(first[1:], slots.size) - 1
    return np.stack([slots[first], slots[last] + 1, last], 1).astype(np.int64)


@kernel
def multiply_add(rows, panel, runs, order, sums, acc):  # type: ignore[no-untyped-def]
    """Add the products of all runs to the running sums acc [height][64], of the operands' type."""
    height, k = acc.size // LANES, panel.size // LANES
    for run in range(len(runs)):
        for m in range(0, height, 2):
            p, q = m * k, (m + 1) * k
            s0, s1 = load(acc, m * LANES), load(acc, (m + 1) * LANES)
            for i in range(runs[run, 0], runs[run, 1]):
                v = load(panel, i * LANES)
                s0 = fma(broadcast(rows, p + i), v, s0)
                s1 = fma(broadcast(rows, q + i), v, s1)
            store(acc, m * LANES, s0)
            store(acc, (m + 1) * LANES, s1)
        if order.ends[runs[run, 2]]:
            end_block(acc, order, runs[run, 2], height, sums)
