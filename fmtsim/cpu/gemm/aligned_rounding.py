# SPDX-License-Identifier: Apache-2.0
"""Fused products of any datapath that float64 lanes can hold: every rounding, accumulator and exponent.

A block runs in two steps. First the aligned terms are added: toward zero and down as in aligned_truncate.py, nearest by
adding and taking away the constant M at every product. (With the operand enlarged by ``1 + eps`` a product that was
halfway lies beyond the middle, so that ties round away from zero.) Then the sums are rounded to the accumulator by
accumulate.round_lanes. Nothing overflows float64 on the way, and an accumulator that has become Inf stays so.
"""

from typing import NamedTuple

import numpy as np

from fmtsim.cpu.gemm.accumulate import FIELD, STOCHASTIC, Grid, end_block, round_lanes
from fmtsim.cpu.gemm.aligned_truncate import draw_words, negatives_of, place_of
from fmtsim.cpu.gemm.operands import pitch_of
from fmtsim.cpu.runtime.jit import device, subroutine
from fmtsim.cpu.runtime.simd import (
    LANES,
    NEAREST_EVEN,
    TOWARD_ZERO,
    and_,
    as_f64,
    as_i64,
    broadcast,
    broadcast_halves,
    fabs,
    fadd,
    fma,
    fsub,
    high_words,
    iadd,
    join_words,
    load,
    lshr,
    set_rounding,
    sext32,
    shl,
    smax,
    splat,
    store,
    where_equal,
    where_less,
    zext64,
)

TRUNCATE, FLOOR, NEAREST = 0, 1, 2  # how terms are rounded; the enlarged operand turns NEAREST into away from zero


class Unit(NamedTuple):
    """A datapath as numbers."""

    terms: int  # TRUNCATE, FLOOR or NEAREST
    fraction_bits: int
    lowest: np.int32  # bound of the alignment exponent
    mode: int  # code of rounding to the accumulator
    grid: Grid  # of the accumulator
    factor: np.float64  # 1 + eps, or 1


@device
def constant_of(c, e, unit):  # type: ignore[no-untyped-def]
    """Return the upper words of M = 1.5 * 2^(E - F + 52); E is the largest of e, the addend's and the lower bound."""
    zero = splat(np.float64(0))
    # 1. the addend's exponent field, 0 where it is zero
    addend_field = smax(and_(as_i64(c), splat(np.int64(FIELD))), splat(unit.grid.lowest))
    addend_field = high_words(where_equal(c, zero, zero, as_f64(addend_field)))
    # 2. E as an exponent field: the products' exponent within the unit's bound, or the addend's
    e = smax(e, splat(unit.lowest))
    field = smax(shl(iadd(e, splat(np.int32(1023))), splat(np.int32(20))), addend_field)
    # 3. times 2^(52 - F), and the half that keeps sums in M's binade
    return iadd(field, splat(np.int32(((52 - unit.fraction_bits) << 20) | (1 << 19))))


@device
def _exponents(a, b, p, first, block):  # type: ignore[no-untyped-def]
    largest = splat(np.int16(-32768))
    for j in range(block):
        e = iadd(load(b.exponents, first + j * LANES), broadcast_halves(a.exponents, p + j))
        largest = smax(largest, e)
    return sext32(largest)


@device
def _negatives(a, b, c, x, y, words, unit):  # type: ignore[no-untyped-def]
    """Count the negative terms where they are truncated; floors need no count."""
    if unit.terms != TRUNCATE:
        return splat(np.int32(0))
    count = negatives_of(a.signs, b.signs, x, y, a.top.size, words)
    c = fadd(c, splat(np.float64(0)))  # -0, which is not a negative term, becomes +0
    return iadd(count, lshr(high_words(c), splat(np.int32(31))))


@device
def _floors(a, b, index, acc, block, unit, out):  # type: ignore[no-untyped-def]
    """Write the sums of block ``index``, terms truncated or floored, to out [rows][64]."""
    words, rows, eps, none = (block + 31) // 32, a.top.size, splat(unit.factor), splat(np.int32(0))
    first, y = index * pitch_of(block) * LANES, index * words * LANES
    place, step = place_of(index, pitch_of(block), rows)
    for m in range(0, rows, 2):
        p, x = place + m * step, index * words * rows + m
        q = p + step
        c0, c1 = load(acc, m * LANES), load(acc, (m + 1) * LANES)
        # 1. M, plus the count of negative terms in its low word, plus the floor of the addend
        h0 = constant_of(c0, _exponents(a, b, p, first, block), unit)
        h1 = constant_of(c1, _exponents(a, b, q, first, block), unit)
        s0 = fma(c0, eps, join_words(_negatives(a, b, c0, x, y, words, unit), h0))
        s1 = fma(c1, eps, join_words(_negatives(a, b, c1, x + 1, y, words, unit), h1))
        # 2. floors of the products, one fused multiply-add each
        for j in range(block):
            v = load(b.values, first + j * LANES)
            s0 = fma(broadcast(a.values, p + j), v, s0)
            s1 = fma(broadcast(a.values, q + j), v, s1)
        # 3. M away: exact
        store(out, m * LANES, fsub(s0, join_words(none, h0)))
        store(out, (m + 1) * LANES, fsub(s1, join_words(none, h1)))


@device
def _nearests(a, b, index, acc, block, unit, out):  # type: ignore[no-untyped-def]
    """Write the sums of block ``index``, each term rounded to nearest, to out [rows][64]."""
    rows, eps = a.top.size, splat(unit.factor)
    first = index * pitch_of(block) * LANES
    place, step = place_of(index, pitch_of(block), rows)
    for m in range(rows):
        p = place + m * step
        c = load(acc, m * LANES)
        # 1. M, of which adding and taking away rounds to the grid: first the addend
        constant = join_words(splat(np.int32(0)), constant_of(c, _exponents(a, b, p, first, block), unit))
        s = fsub(fma(c, eps, constant), constant)
        # 2. then every product, one fused multiply-add each
        for j in range(block):
            v = load(b.values, first + j * LANES)
            s = fadd(s, fsub(fma(broadcast(a.values, p + j), v, constant), constant))
        store(out, m * LANES, s)


@device
def words_of(rows, unit):  # type: ignore[no-untyped-def]
    """Return a buffer for the random words of a block's outputs."""
    return np.empty((rows + 2) * LANES if unit.mode == STOCHASTIC else 0, np.int32)


@device
def round_rows(sums, index, acc, unit, draw, column, drawn):  # type: ignore[no-untyped-def]
    """Round the sums of all rows to the accumulator; Inf stays Inf. ``drawn`` is a buffer of ``words_of``."""
    words, infinity, rows = splat(np.int64(0)), splat(np.float64(np.inf)), sums.size // LANES
    if unit.mode == STOCHASTIC:
        draw_words(draw, index, rows, column, drawn)
    for m in range(rows):
        if unit.mode == STOCHASTIC:
            words = zext64(lshr(load(drawn, m * LANES), splat(np.int32(32 - draw.bits))))
        c = load(acc, m * LANES)
        rounded = round_lanes(load(sums, m * LANES), unit.mode, unit.grid, words, draw.bits)
        store(acc, m * LANES, where_less(fabs(c), infinity, rounded, c))


@subroutine
def round_blocks(a, b, order, sums, acc, block, unit, draw, column):  # type: ignore[no-untyped-def]
    """Run the blocks of a slab for all rows of a and the 64 columns of b.

    a, b: Rows and Panel with float64 values and exponents in 16 bits. acc: float64 [rows][64], the running chains.
    ``column`` is the product's column of lane 0.
    """
    rows = a.top.size
    raw, drawn = np.empty(rows * LANES, np.float64), words_of(rows, unit)
    for index in range(order.ends.size):
        if unit.terms == NEAREST:
            _nearests(a, b, index, acc, block, unit, raw)
        else:
            set_rounding(TOWARD_ZERO)
            _floors(a, b, index, acc, block, unit, raw)
            set_rounding(NEAREST_EVEN)
        round_rows(raw, index, acc, unit, draw, column, drawn)
        if order.ends[index]:
            end_block(acc, order, index, rows, sums)
