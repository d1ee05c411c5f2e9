# SPDX-License-Identifier: Apache-2.0
"""Sums of aligned products: by one fused multiply-add each (the perturbed floor), and in float64 lanes.

A unit truncates every product p to a multiple of the grid u = 2^(E - F) and adds exactly. With round-toward-zero set, a
running sum that carries M = 1.5 * 2^(E - F + bits) has the grid u itself, so adding p to it is a floor, and

    trunc(p / u) = floor(p (1 + eps) / u) + [p < 0]     for 0 < eps < min(2^-W, 2^-(F + 2)), W the bits of p

for p > 0 the enlargement never reaches the next grid point; for p < 0 it lies strictly below trunc(p). ``1 + eps`` is
folded into the first operand; one xor and one population count a block count the negative products. The same holds for
the addend.

The kernels here need truncated terms, and a tile of operands in which no sum leaves the normal range of the
accumulator, to which sums are truncated or rounded to nearest even or stochastically.

Float64 lanes hold the rest: every rounding, accumulator and exponent. A block runs in two steps. First the aligned
terms are added: toward zero and down as above, nearest by adding and taking away the constant M at every product. (With
the operand enlarged by ``1 + eps`` a product that was halfway lies beyond the middle, so that ties round away from
zero.) Then the sums are rounded to the accumulator by accumulate.round_lanes. Nothing overflows float64 on the way, and
an accumulator that has become Inf stays so.
"""

from typing import NamedTuple

import numpy as np
from numba import types

from fmtsim.cpu.cast.grid import fill64
from fmtsim.cpu.gemm.accumulate import FIELD, STOCHASTIC, Grid, end_block, round_lanes
from fmtsim.cpu.gemm.operand_layouts import GROUP, TOP_BYTE, pitch_of
from fmtsim.cpu.runtime.jit import device, overload, subroutine
from fmtsim.cpu.runtime.simd import (
    COLUMNS,
    LANES,
    NEAREST_EVEN,
    PARTS,
    TOWARD_ZERO,
    and_,
    as_f32,
    as_f64,
    as_i32,
    as_i64,
    broadcast,
    broadcast_bytes,
    broadcast_halves,
    bytes_shifted20,
    bytes_shifted23,
    fabs,
    fadd,
    fma,
    fsub,
    high_words,
    iadd,
    join_words,
    load,
    lshr,
    or_,
    popcount,
    set_rounding,
    sext32,
    shl,
    smax,
    smin,
    splat,
    store,
    umax,
    where_equal,
    where_less,
    woven_high_words,
    woven_join_words,
    xor,
    zext64,
)


class Draw(NamedTuple):
    """Where stochastic rounding takes its words: key, first block and row of a tile, and the product's size."""

    key: tuple[np.uint32, np.uint32, np.uint32, np.uint32]
    bits: int
    block: int
    row: int
    rows: int
    columns: int


@device
def negatives_of(signs_a, signs_b, a, b, step, words):  # type: ignore[no-untyped-def]
    """Count the negative products of a block in each column."""
    count = popcount(xor(broadcast(signs_a, a), load(signs_b, b)))
    for w in range(1, words):
        count = iadd(count, popcount(xor(broadcast(signs_a, a + w * step), load(signs_b, b + w * COLUMNS))))
    return count


@device
def start64(c, e8, negatives, base, shift, eps, woven):  # type: ignore[no-untyped-def]
    """Return M + the count of negatives + the truncated addend; ``base`` is the exponent field of byte 0.

    ``woven`` says that bytes and counts are in the order of ``weave``.
    """
    high = woven_high_words(c) if woven else high_words(c)
    count = iadd(negatives, lshr(high, splat(np.int32(31))))
    # bytes below 128 are those of zeros: no product, so the addend decides
    field = iadd(bytes_shifted20(smin(e8, splat(np.int8(0)))), splat(np.int32(base)))
    # E is the addend's exponent where that is larger; the shift makes it that of M
    field = iadd(smax(field, and_(high, splat(np.int32(0x7FF00000)))), splat(np.int32(shift)))
    return fma(c, eps, woven_join_words(count, field) if woven else join_words(count, field))


@device
def finish64(s, mask):  # type: ignore[no-untyped-def]
    """Take M away, which shares the binade of s, and truncate to the accumulator's bits."""
    constant = or_(and_(as_i64(s), splat(np.int64(-1 << 52))), splat(np.int64(1 << 51)))
    return as_f64(and_(as_i64(fsub(s, as_f64(constant))), splat(mask)))


@device
def place_of(index, pitch, rows):  # type: ignore[no-untyped-def]
    """Return the place of block ``index`` of row 0 in the layout of the first operand, and the step between rows."""
    group = max(pitch, GROUP)
    slot = index * pitch
    return slot // group * rows * group + slot % group, group


@device
def _larger(largest, e, exponents, at):  # type: ignore[no-untyped-def]
    """Return the larger of bytes and of a row's exponent at ``at`` plus those of the columns, lane by lane."""
    return umax(largest, iadd(e, broadcast_bytes(exponents, at)))


@overload
def _end64(s, mask, rounding, words, at):  # type: ignore[no-untyped-def]
    """Take M away and round to the accumulator's bits, which ``mask`` keeps: toward zero, or as ``rounding`` says."""
    if isinstance(rounding, types.NoneType):
        return lambda s, mask, rounding, words, at: finish64(s, mask)

    def end(s, mask, rounding, words, at):  # type: ignore[no-untyped-def]
        bits = as_i64(finish64(s, np.int64(-1)))
        if rounding.draws:
            added = zext64(lshr(load(words, at), splat(rounding.right_shift)))
            added = shl(added, splat(rounding.left_shift))
        else:  # half a place, less one where the last bit is even
            odd = and_(lshr(bits, splat(rounding.dropped)), splat(np.int64(1)))
            added = iadd(odd, splat((np.int64(1) << (rounding.dropped - 1)) - 1))
        return as_f64(and_(iadd(bits, added), splat(mask)))

    return end


@overload
def _draw(rounding, draw, index, rows, column, words):  # type: ignore[no-untyped-def]
    """Write the words of a block where ``rounding`` takes any."""
    if isinstance(rounding, types.NoneType):
        return lambda rounding, draw, index, rows, column, words: None

    def draws(rounding, draw, index, rows, column, words):  # type: ignore[no-untyped-def]
        if rounding.draws:
            draw_words(draw, index, rows, column, words)

    return draws


class Nearby(NamedTuple):
    """How float64 sums are rounded up or down to an accumulator, in a range where all are its normal numbers.

    To nearest even, or stochastically, where the upper bits of a word are added to the bits that are dropped.
    """

    draws: bool
    dropped: np.int64  # bits of a float64 that the accumulator lacks
    right_shift: np.int32  # shifts of a word, after which its random bits lie where the dropped ones begin
    left_shift: np.int64


@subroutine
def draw_words(draw, index, rows, column, words):  # type: ignore[no-untyped-def]
    """Write the random words of 64 outputs of all rows in block ``index`` to words [rows][64]; 128 more are scratch."""
    o0, o1, k0, k1 = draw.key
    beyond = rows * COLUMNS
    for m in range(rows):
        place = ((draw.block + index) * draw.rows + draw.row + m) * draw.columns + column
        if place & 63 == 0:
            fill64(words, m * COLUMNS, place >> 6, o0, o1, k0, k1)
        else:
            fill64(words, beyond, place >> 6, o0, o1, k0, k1)
            fill64(words, beyond + COLUMNS, (place >> 6) + 1, o0, o1, k0, k1)
            for n in range(0, COLUMNS, LANES):
                store(words, m * COLUMNS + n, load(words, beyond + (place & 63) + n))


@subroutine
def truncate64(  # type: ignore[no-untyped-def]
    a, b, order, sums, acc, block, factor, fraction_bits, mask, floor_byte, rounding, draw, column, buffer
):
    """Run the blocks of a slab through float64 sums, for all rows of a and the 64 columns of b.

    a, b: Rows and Panel with byte exponents and float64 values. acc: float64 [rows][64], the running chains. ``factor``
    is 1 + eps; ``mask`` keeps the accumulator's bits of a float64; ``floor_byte`` is 0. ``rounding`` is None where sums
    are truncated, else a Nearby, which takes ``draw``, the product's column of lane 0 and memory for words, 64 a row
    and 128.
    """
    words, pitch, rows = (block + 31) // 32, pitch_of(block), a.top.size
    eps = splat(factor)
    shift = np.int32(((52 - fraction_bits) << 20) | (1 << 19))
    base = b.top - np.int32(2 * TOP_BYTE) + np.int32(1023)
    set_rounding(TOWARD_ZERO)
    for index in range(order.ends.size):
        begin = index * pitch * COLUMNS
        place, step = place_of(index, pitch, rows)
        _draw(rounding, draw, index, rows, column, buffer)
        e0, e1 = splat(floor_byte), splat(floor_byte)
        for j in range(block):
            e = load(b.exponents, begin + j * COLUMNS)
            e0 = _larger(e0, e, a.exponents, place + j)
            e1 = _larger(e1, e, a.exponents, place + step + j)
        for part in range(rows // 2 * PARTS):
            # two rows of a vector of columns, and those that are next
            m, n = part // PARTS * 2, part % PARTS * LANES
            p, x, y = place + m * step, index * words * rows + m, index * words * COLUMNS + n
            q, first, at = p + step, begin + n, m * COLUMNS + n
            after = place + min((part + 1) // PARTS * 2, rows - 2) * step
            first_after = begin + (part + 1) % PARTS * LANES
            # 1. M of the largest product exponents, the count of negative products, and the truncated addend
            n0 = negatives_of(a.signs, b.signs, x, y, rows, words)
            n1 = negatives_of(a.signs, b.signs, x + 1, y, rows, words)
            s0 = start64(load(acc, at), e0, n0, (a.top[m] + base) << np.int32(20), shift, eps, True)
            s1 = start64(load(acc, at + COLUMNS), e1, n1, (a.top[m + 1] + base) << np.int32(20), shift, eps, True)
            e0, e1 = splat(floor_byte), splat(floor_byte)
            for j in range(block):
                # 2. floors of the products, one fused multiply-add each
                v = load(b.values, first + j * COLUMNS)
                s0 = fma(broadcast(a.values, p + j), v, s0)
                s1 = fma(broadcast(a.values, q + j), v, s1)
                # 3. beside them, in other units of the processor, the largest product exponents of those that are next,
                # as bytes below the largest of both operands
                e = load(b.exponents, first_after + j * COLUMNS)
                e0 = _larger(e0, e, a.exponents, after + j)
                e1 = _larger(e1, e, a.exponents, after + step + j)
            # 4. M away, and the accumulator's rounding
            store(acc, at, _end64(s0, mask, rounding, buffer, at))
            store(acc, at + COLUMNS, _end64(s1, mask, rounding, buffer, at + COLUMNS))
        if order.ends[index]:
            set_rounding(NEAREST_EVEN)
            end_block(acc, order, index, rows, sums)
            set_rounding(TOWARD_ZERO)
    set_rounding(NEAREST_EVEN)


@device
def _start32(c, e8, negatives, base, shift, eps):  # type: ignore[no-untyped-def]
    bits = as_i32(c)
    count = iadd(negatives, lshr(bits, splat(np.int32(31))))
    field = iadd(bytes_shifted23(e8), splat(np.int32(base)))
    field = iadd(smax(field, and_(bits, splat(np.int32(0x7F800000)))), splat(np.int32(shift)))
    return fma(c, eps, as_f32(iadd(field, count)))


@device
def _finish32(s, mask):  # type: ignore[no-untyped-def]
    constant = or_(and_(as_i32(s), splat(np.int32(-1 << 23))), splat(np.int32(1 << 22)))
    return as_f32(and_(as_i32(fsub(s, as_f32(constant))), splat(mask)))


@subroutine
def truncate32(a, b, order, sums, acc, block, factor, fraction_bits, mask, floor_byte):  # type: ignore[no-untyped-def]
    """Run the blocks of a slab through float32 sums: truncate64 for 8-bit inputs and short fractions, twice as fast.

    ``floor_byte`` is the byte of the smallest product exponent, which an empty block counts as: sums are multiples of
    its grid, so none is truncated, and products with TINY stay below it.
    """
    words, pitch, rows = (block + 31) // 32, pitch_of(block), a.top.size
    eps = splat(factor)
    shift = np.int32(((23 - fraction_bits) << 23) | (1 << 22))
    base = b.top - np.int32(2 * TOP_BYTE) + np.int32(127)
    nothing = splat(floor_byte)
    set_rounding(TOWARD_ZERO)
    for index in range(order.ends.size):
        begin = index * pitch * COLUMNS
        place, step = place_of(index, pitch, rows)
        e0 = e1 = e2 = e3 = nothing
        for j in range(block):
            e = load(b.exponents, begin + j * COLUMNS)
            e0 = _larger(e0, e, a.exponents, place + j)
            e1 = _larger(e1, e, a.exponents, place + step + j)
            e2 = _larger(e2, e, a.exponents, place + 2 * step + j)
            e3 = _larger(e3, e, a.exponents, place + 3 * step + j)
        for part in range(rows // 4 * PARTS):
            # four rows of a vector of columns, and those that are next
            m, n = part // PARTS * 4, part % PARTS * LANES
            p, x, y = place + m * step, index * words * rows + m, index * words * COLUMNS + n
            q, r, t = p + step, p + 2 * step, p + 3 * step
            first, at = begin + n, m * COLUMNS + n
            after = place + min((part + 1) // PARTS * 4, rows - 4) * step
            first_after = begin + (part + 1) % PARTS * LANES
            # 1. M of the largest product exponents, the count of negative products, and the truncated addend
            n0 = negatives_of(a.signs, b.signs, x, y, rows, words)
            s0 = _start32(load(acc, at), e0, n0, (a.top[m] + base) << np.int32(23), shift, eps)
            n1 = negatives_of(a.signs, b.signs, x + 1, y, rows, words)
            s1 = _start32(load(acc, at + COLUMNS), e1, n1, (a.top[m + 1] + base) << np.int32(23), shift, eps)
            n2 = negatives_of(a.signs, b.signs, x + 2, y, rows, words)
            s2 = _start32(load(acc, at + 2 * COLUMNS), e2, n2, (a.top[m + 2] + base) << np.int32(23), shift, eps)
            n3 = negatives_of(a.signs, b.signs, x + 3, y, rows, words)
            s3 = _start32(load(acc, at + 3 * COLUMNS), e3, n3, (a.top[m + 3] + base) << np.int32(23), shift, eps)
            e0 = e1 = e2 = e3 = nothing
            for j in range(block):
                # 2. floors of the products, one fused multiply-add each
                v = load(b.values, first + j * COLUMNS)
                s0 = fma(broadcast(a.values, p + j), v, s0)
                s1 = fma(broadcast(a.values, q + j), v, s1)
                s2 = fma(broadcast(a.values, r + j), v, s2)
                s3 = fma(broadcast(a.values, t + j), v, s3)
                # 3. beside them the largest product exponents of those that are next
                e = load(b.exponents, first_after + j * COLUMNS)
                e0 = _larger(e0, e, a.exponents, after + j)
                e1 = _larger(e1, e, a.exponents, after + step + j)
                e2 = _larger(e2, e, a.exponents, after + 2 * step + j)
                e3 = _larger(e3, e, a.exponents, after + 3 * step + j)
            # 4. M away, truncated to the accumulator's bits
            store(acc, at, _finish32(s0, mask))
            store(acc, at + COLUMNS, _finish32(s1, mask))
            store(acc, at + 2 * COLUMNS, _finish32(s2, mask))
            store(acc, at + 3 * COLUMNS, _finish32(s3, mask))
        if order.ends[index]:
            set_rounding(NEAREST_EVEN)
            end_block(acc, order, index, rows, sums)
            set_rounding(TOWARD_ZERO)
    set_rounding(NEAREST_EVEN)


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
        e = iadd(load(b.exponents, first + j * COLUMNS), broadcast_halves(a.exponents, p + j))
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
    place, step = place_of(index, pitch_of(block), rows)
    for part in range(rows // 2 * PARTS):
        m, n = part // PARTS * 2, part % PARTS * LANES
        p, x, y = place + m * step, index * words * rows + m, index * words * COLUMNS + n
        q, first, at = p + step, index * pitch_of(block) * COLUMNS + n, m * COLUMNS + n
        c0, c1 = load(acc, at), load(acc, at + COLUMNS)
        # 1. M, plus the count of negative terms in its low word, plus the floor of the addend
        h0 = constant_of(c0, _exponents(a, b, p, first, block), unit)
        h1 = constant_of(c1, _exponents(a, b, q, first, block), unit)
        s0 = fma(c0, eps, join_words(_negatives(a, b, c0, x, y, words, unit), h0))
        s1 = fma(c1, eps, join_words(_negatives(a, b, c1, x + 1, y, words, unit), h1))
        # 2. floors of the products, one fused multiply-add each
        for j in range(block):
            v = load(b.values, first + j * COLUMNS)
            s0 = fma(broadcast(a.values, p + j), v, s0)
            s1 = fma(broadcast(a.values, q + j), v, s1)
        # 3. M away: exact
        store(out, at, fsub(s0, join_words(none, h0)))
        store(out, at + COLUMNS, fsub(s1, join_words(none, h1)))


@device
def _nearests(a, b, index, acc, block, unit, out):  # type: ignore[no-untyped-def]
    """Write the sums of block ``index``, each term rounded to nearest, to out [rows][64]."""
    rows, eps = a.top.size, splat(unit.factor)
    place, step = place_of(index, pitch_of(block), rows)
    for at in range(0, rows * COLUMNS, LANES):
        p, first = place + at // COLUMNS * step, index * pitch_of(block) * COLUMNS + at % COLUMNS
        c = load(acc, at)
        # 1. M, of which adding and taking away rounds to the grid: first the addend
        constant = join_words(splat(np.int32(0)), constant_of(c, _exponents(a, b, p, first, block), unit))
        s = fsub(fma(c, eps, constant), constant)
        # 2. then every product, one fused multiply-add each
        for j in range(block):
            v = load(b.values, first + j * COLUMNS)
            s = fadd(s, fsub(fma(broadcast(a.values, p + j), v, constant), constant))
        store(out, at, s)


@device
def words_of(rows, unit):  # type: ignore[no-untyped-def]
    """Return a buffer for the random words of a block's outputs."""
    return np.empty((rows + 2) * COLUMNS if unit.mode == STOCHASTIC else 0, np.int32)


@device
def round_rows(sums, index, acc, unit, draw, column, drawn):  # type: ignore[no-untyped-def]
    """Round the sums of all rows to the accumulator; Inf stays Inf. ``drawn`` is a buffer of ``words_of``."""
    words, infinity = splat(np.int64(0)), splat(np.float64(np.inf))
    if unit.mode == STOCHASTIC:
        draw_words(draw, index, sums.size // COLUMNS, column, drawn)
    for at in range(0, sums.size, LANES):
        if unit.mode == STOCHASTIC:
            words = zext64(lshr(load(drawn, at), splat(np.int32(32 - draw.bits))))
        c = load(acc, at)
        rounded = round_lanes(load(sums, at), unit.mode, unit.grid, words, draw.bits)
        store(acc, at, where_less(fabs(c), infinity, rounded, c))


@subroutine
def round_blocks(a, b, order, sums, acc, block, unit, draw, column):  # type: ignore[no-untyped-def]
    """Run the blocks of a slab for all rows of a and the 64 columns of b.

    a, b: Rows and Panel with float64 values and exponents in 16 bits. acc: float64 [rows][64], the running chains.
    ``column`` is the product's column of lane 0.
    """
    rows = a.top.size
    raw, drawn = np.empty(rows * COLUMNS, np.float64), words_of(rows, unit)
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
