# SPDX-License-Identifier: Apache-2.0
"""Multiply a slab of K by a group of panels: pack 64 columns, add their products to the sums, take the next panel."""

from typing import NamedTuple

import numpy as np
from numba import types

from fmtsim.cpu.gemm.accumulate import Promotion, Sums
from fmtsim.cpu.gemm.aligned_rounding import Unit, round_blocks
from fmtsim.cpu.gemm.aligned_truncate import Nearby, truncate32, truncate64
from fmtsim.cpu.gemm.block_scaled import grouped, grouped_integers
from fmtsim.cpu.gemm.operands import EMPTY, TOP_BYTE, Grouped, Panel, Rows
from fmtsim.cpu.gemm.packing import pack_panel
from fmtsim.cpu.runtime.jit import device, kernel, overload
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import LANES


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
        scratch("panel numbers", slots * LANES, np.float32),
        scratch("panel scales", slots * LANES if scaled else 0, np.float32),
        scratch("panel values", slots * LANES, dtype),
        scratch("panel exponents", slots * LANES, exponents),
        scratch("panel signs", words * LANES, np.int32),
        scratch("panel words", (drawing_rows + 2) * LANES if drawing_rows else 0, np.int32),
    )


def rows_of(name: str, slots: int, words: int, count: int, dtype: type) -> Rows:
    """Return this thread's buffers for ``count`` rows of ``slots`` slots, padded to whole vectors."""
    size = (slots + LANES) * count
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
        first, marks = (base + p) * LANES, state.marks[p]
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
        first, marks = (base + p) * LANES, state.marks[p]
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
        first, marks = (base + p) * LANES, state.marks[p]
        pack_panel(
            source, first, slots, how.block, EMPTY, how.number, False, buffers.raw, buffers.scales, buffers.values,
            buffers.exponents, buffers.signs, marks,
        )  # fmt: skip
        b = Grouped(buffers.values, scales[p], exponents[p], LANES)
        sums = Sums(state.total[p], state.parts[p], state.promotion, state.row_scales, state.column_scales[p])
        _add_groups(a, b, order, sums, state.acc[p], how, draw, first)
