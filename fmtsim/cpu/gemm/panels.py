# SPDX-License-Identifier: Apache-2.0
"""Slabs and panels: the order of products as arrays in slabs that fit a cache, and a slab times a group of panels.

For a panel, 64 columns are packed and their products added to the sums; then the next panel is taken.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain as joined
from typing import Any, NamedTuple

import numpy as np
from numba import types
from torch import Tensor

from fmtsim.cpu.gemm.accumulate import CHAIN_END, PART_END, Order, Promotion, Sums
from fmtsim.cpu.gemm.aligned import Nearby, Unit, round_blocks, truncate32, truncate64
from fmtsim.cpu.gemm.operand_layouts import EMPTY, GROUP, TOP_BYTE, Grouped, Panel, Rows, pack_panel, pitch_of
from fmtsim.cpu.gemm.scaled_groups import grouped, grouped_integers
from fmtsim.cpu.runtime.jit import device, kernel, overload
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import COLUMNS
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import ZERO, combination, schedule

_NONE = np.zeros(0, np.float32)
SLOTS = 512  # of a slab, unless one block is longer: rows and a panel then stay in a second-level cache


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Some of the blocks of a product, in order.

    ``slots`` (int32) holds the index along K of every slot, -1 where a block is filled up; ``first`` is the number of
    the slab's first block.
    """

    slots: np.ndarray
    order: Order
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """A product: its slabs, all of it in one, the slots of a block, how many parts, and where chains begin along K."""

    slabs: tuple[Slab, ...]
    whole: Slab
    block: int
    parts: int
    starts: np.ndarray


def slabs_of(k: int, unit: Arithmetic, plan: GemmPlan, limit: int = SLOTS) -> Slabs:
    """Return the slabs of a product of K terms, of at most ``limit`` slots unless one block is longer.

    They are cached for all plans that differ in what follows the sums alone, and all units with the same blocks.
    """
    if isinstance(unit, Datapath):
        unit = _blocks_of(unit.block, unit.group, unit.promote_every, unit.paired)
    plain: dict[str, Any] = {"partial": None, "round_trip": False, "reduce": "serial", "bias_after_rounding": False}
    return _slabs_of(k, unit, replace(plan, **plain, epilogue="scale", source="", verified=False), limit)


@lru_cache(maxsize=64)
def _blocks_of(block: int | None, group: int, promote_every: int | None, paired: bool) -> Datapath:
    return Datapath(block=block, group=group, promote_every=promote_every, paired=paired)


@lru_cache(maxsize=64)
def _slabs_of(k: int, unit: Arithmetic, plan: GemmPlan, limit: int) -> Slabs:
    parts = schedule(k, unit, plan)
    blocks = [block for part in parts for chain in part for block in chain.blocks]
    lengths = np.fromiter(map(len, blocks), np.int64, len(blocks))
    length = int(lengths.max(initial=1))
    if isinstance(unit, Datapath):
        length = -(-length // unit.group) * unit.group  # whole groups
    pitch = pitch_of(length)
    # 1. the indices of every block, filled up
    slots = np.full((len(blocks), pitch), -1, np.int32)
    slots[np.arange(pitch) < lengths[:, None]] = np.fromiter(joined.from_iterable(blocks), np.int32, lengths.sum())
    # 2. the part and the chain of every block, and where both end
    counts = [len(chain.blocks) for part in parts for chain in part]
    owners = np.repeat(np.array([p for p, part in enumerate(parts) for _ in part], np.int32), counts)
    chains = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.array([chain.start for part in parts for chain in part], np.int64)
    ends = np.zeros(len(blocks), np.int8)
    ends[np.cumsum(counts, dtype=np.int64) - 1] = CHAIN_END
    ends[np.cumsum([sum(len(chain.blocks) for chain in part) for part in parts], dtype=np.int64) - 1] = PART_END
    step = max(limit // pitch, 1)

    def cut(start: int, stop: int) -> Slab:
        order = Order(ends[start:stop], owners[start:stop], chains[start:stop])
        return Slab(slots[start:stop].reshape(-1), order, start)

    cuts = tuple(cut(i, i + step) for i in range(0, len(blocks), step))
    return Slabs(cuts, cut(0, len(blocks)), length, len(parts), starts)


class Stacked(NamedTuple):
    """Sums of single products that are added on a stack, whose slots are the parts of ``order``.

    ``slots`` (int64) holds the index along K of every product, -1 for a sum without products; ``additions`` (int64)
    says behind each how many times the two sums on top are added.
    """

    slots: np.ndarray
    order: Order
    additions: np.ndarray
    depth: int


@lru_cache(maxsize=32)
def stacked(k: int, unit: Arithmetic, plan: GemmPlan) -> Stacked:
    """Return the products of K terms in the order in which a ``combination`` needs their sums."""
    sums, waiting, deepest = schedule(k, unit, plan), 0, 0
    slots: list[int] = []
    ends: list[int] = []
    parts: list[int] = []
    additions: list[int] = []
    for number, follow in combination(k, plan):
        chains = [[-1]] if number == ZERO else [[i for (i,) in chain.blocks] for chain in sums[number]]
        for chain in chains:
            slots += chain
            ends += [*[0] * (len(chain) - 1), CHAIN_END]
        ends[-1] = PART_END
        deepest = max(deepest, waiting)
        parts += [waiting] * (len(slots) - len(parts))
        additions += [*[0] * (len(slots) - len(additions) - 1), follow]
        waiting += 1 - follow
    order = Order(np.array(ends, np.int8), np.array(parts, np.int32), np.zeros(len(slots), np.int32))
    return Stacked(np.array(slots, np.int64), order, np.array(additions, np.int64), deepest + 1)


def chain_scales(
    scales: tuple[Tensor | None, Tensor | None], slabs: Slabs, plan: GemmPlan
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of every chain, [chains, M] and [chains, N], where a plan multiplies chains by scales.

    They are empty where it does not; scales that are absent are ones, and empty as well.
    """
    if not plan.scaled_promotion or plan.promote_every is None or scales[0] is None or scales[1] is None:
        return _NONE, _NONE
    place = slabs.starts // plan.promote_every
    return scales[0].detach().numpy().T[place], scales[1].detach().numpy().T[place]


class State(NamedTuple):
    """The running sums of some rows and a group of panels, from slab to slab; the first axis is the panel."""

    acc: np.ndarray  # float64 or float32 [panels][rows * 64]: running chains
    total: np.ndarray  # float64 [panels][rows * 64]: outer sums of running parts
    parts: np.ndarray  # float64 [panels][parts * rows * 64]
    marks: np.ndarray  # int32 [panels][64]: columns with NaN and Inf
    lowest: np.ndarray  # int64 [panels]: the smallest product exponent so far
    highest: np.ndarray  # int64 [panels]: the largest among slabs that the truncating kernel did not take
    row_scales: np.ndarray  # float32 [chains * rows] of scaled promotion, else empty
    column_scales: np.ndarray  # float32 [panels][chains * 64]
    promotion: Promotion


class Buffers(NamedTuple):
    """The buffers in which a thread packs a panel."""

    raw: np.ndarray  # float32 [slots][64]
    scales: np.ndarray  # float32 [slots][64], empty without scales
    values: np.ndarray  # float64 or float32 [slots][64]
    exponents: np.ndarray  # int8 or int16 [slots][64]
    signs: np.ndarray  # int32 [block][word][64]
    words: np.ndarray  # int32 [rows + 2][64] where a truncating kernel draws, else empty


def buffers_of(
    slots: int, words: int, dtype: type, exponents: type, *, scaled: bool = False, drawing_rows: int = 0
) -> Buffers:
    """Return this thread's buffers for a panel of ``slots`` slots, ``words`` words of signs, and rows that draw."""
    return Buffers(
        scratch("panel numbers", slots * COLUMNS, np.float32),
        scratch("panel scales", slots * COLUMNS if scaled else 0, np.float32),
        scratch("panel values", slots * COLUMNS, dtype),
        scratch("panel exponents", slots * COLUMNS, exponents),
        scratch("panel signs", words * COLUMNS, np.int32),
        scratch("panel words", (drawing_rows + 2) * COLUMNS if drawing_rows else 0, np.int32),
    )


def rows_of(name: str, slots: int, words: int, count: int, dtype: type) -> Rows:
    """Return this thread's buffers for ``count`` rows of ``slots`` slots, padded to whole vectors."""
    size = (slots + GROUP) * count
    return Rows(
        scratch(f"{name} values", size, dtype),
        scratch(f"{name} exponents", size, np.int32),
        scratch(f"{name} signs", words * count, np.int32),
        np.empty(count, np.int32),
    )


class Constants(NamedTuple):
    """The constants of a truncating kernel, and the product exponents for which it is exact."""

    block: int
    factor: np.floating
    fraction_bits: int
    mask: np.integer
    floor_byte: np.int8
    tops: tuple[int, int]  # exponents that bytes of both operands count from, or EMPTY
    smallest: int
    largest: int
    rounding: Nearby | None = None  # of float64 sums; None truncates


@overload
def _truncate(acc, a, b, order, sums, how, draw, column, words):  # type: ignore[no-untyped-def]
    """Run the truncating kernel whose sums have acc's dtype."""
    if acc.dtype == types.float32:
        return lambda acc, a, b, order, sums, how, draw, column, words: truncate32(
            a, b, order, sums, acc, how.block, how.factor, how.fraction_bits, how.mask, how.floor_byte
        )
    return lambda acc, a, b, order, sums, how, draw, column, words: truncate64(
        a, b, order, sums, acc, how.block, how.factor, how.fraction_bits, how.mask, how.floor_byte, how.rounding,
        draw, column, words,
    )  # fmt: skip


@device
def _largest(numbers):  # type: ignore[no-untyped-def]
    """Return the largest of an int32 array, without the iterator that ``max`` of numba compiles."""
    largest = np.int64(numbers[0])
    for number in numbers:
        largest = max(largest, np.int64(number))
    return largest


@kernel
def truncate_panels(a, low, source, base, start, stop, slots, order, how, draw, state, buffers, done):  # type: ignore[no-untyped-def]
    """Run a slab through panels start ... stop - 1 of a group that begins at panel ``base`` of the product.

    a: Rows with byte exponents, ``low`` the smallest of them. ``done`` (bool [panels]) says where the exponents of a
    panel allowed it; the others are left as they were. ``draw`` says where stochastic rounding takes its words.
    """
    top_a = _largest(a.top)
    for p in range(start, stop):
        first, marks = (base + p) * COLUMNS, state.marks[p]
        top, least = pack_panel(
            source, first, slots, how.block, how.tops[1], 1.0, True, buffers.raw, buffers.scales, buffers.values,
            buffers.exponents, buffers.signs, marks,
        )  # fmt: skip
        smallest, largest = low + least, top_a + top
        done[p] = not (
            top - least > TOP_BYTE // 2
            or smallest < how.smallest
            or max(largest, state.highest[p]) > how.largest  # what is carried along may be Inf, or near it
            or largest - 2 * TOP_BYTE > state.lowest[p]
        )
        if done[p]:
            state.lowest[p] = min(state.lowest[p], smallest)
            b = Panel(buffers.values, buffers.exponents, buffers.signs, np.int32(top))
            sums = Sums(state.total[p], state.parts[p], state.promotion, state.row_scales, state.column_scales[p])
            _truncate(state.acc[p], a, b, order, sums, how, draw, first, buffers.words)


@kernel
def round_panels(a, low, source, base, start, stop, slots, order, tiny, block, unit, draw, state, buffers, done):  # type: ignore[no-untyped-def]
    """Run a slab through the rounding kernel, for those panels that are not done."""
    top_a = _largest(a.top)
    for p in range(start, stop):
        if done[p]:
            continue
        first, marks = (base + p) * COLUMNS, state.marks[p]
        top, least = pack_panel(
            source, first, slots, block, EMPTY, 1.0, tiny, buffers.raw, buffers.scales, buffers.values,
            buffers.exponents, buffers.signs, marks,
        )  # fmt: skip
        state.lowest[p] = min(state.lowest[p], low + least)
        state.highest[p] = max(state.highest[p], top_a + top)
        b = Panel(buffers.values, buffers.exponents, buffers.signs, np.int32(0))
        sums = Sums(state.total[p], state.parts[p], state.promotion, state.row_scales, state.column_scales[p])
        round_blocks(a, b, order, sums, state.acc[p], block, unit, draw, first)


@overload
def _add_groups(a, b, order, sums, acc, how, draw, column):  # type: ignore[no-untyped-def]
    """Run the kernel of grouped products for the dtype of the values."""
    if a.types[0].dtype == types.int32:
        return lambda a, b, order, sums, acc, how, draw, column: grouped_integers(
            a, b, order, sums, acc, how.block, how.size, how.factor, how.base, how.unit.fraction_bits, how.mask
        )
    return lambda a, b, order, sums, acc, how, draw, column: grouped(
        a, b, order, sums, acc, how.block, how.size, how.factor, how.unit, draw, column
    )


class Grouping(NamedTuple):
    """The constants of the kernels of grouped products, which block_scaled.py explains."""

    block: int
    size: int
    factor: np.float64
    number: np.float64  # by which numbers of the second operand are multiplied
    base: np.int32
    mask: np.int64
    unit: Unit


@kernel
def block_scaled_panels(a, scales, exponents, source, base, start, stop, slots, order, how, draw, state, buffers):  # type: ignore[no-untyped-def]
    """Run a slab through the kernel of grouped products.

    a: Grouped; ``scales`` float64 and ``exponents`` [panels][groups * 64] are those of the columns, ``how`` a Grouping.
    """
    for p in range(start, stop):
        first, marks = (base + p) * COLUMNS, state.marks[p]
        pack_panel(
            source, first, slots, how.block, EMPTY, how.number, False, buffers.raw, buffers.scales, buffers.values,
            buffers.exponents, buffers.signs, marks,
        )  # fmt: skip
        b = Grouped(buffers.values, scales[p], exponents[p], COLUMNS)
        sums = Sums(state.total[p], state.parts[p], state.promotion, state.row_scales, state.column_scales[p])
        _add_groups(a, b, order, sums, state.acc[p], how, draw, first)
