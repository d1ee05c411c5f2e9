# SPDX-License-Identifier: Apache-2.0
"""Exact fused products by one fused multiply-add each: the perturbed floor.

A unit truncates every product p to a multiple of the grid u = 2^(E - F) and adds exactly. With round-toward-zero set, a
running sum that carries M = 1.5 * 2^(E - F + bits) has the grid u itself, so adding p to it is a floor, and

    trunc(p / u) = floor(p (1 + eps) / u) + [p < 0]     for 0 < eps < min(2^-W, 2^-(F + 2)), W the bits of p

for p > 0 the enlargement never reaches the next grid point; for p < 0 it lies strictly below trunc(p). ``1 + eps`` is
folded into the first operand; one xor and one population count a block count the negative products. The same holds for
the addend.

The kernels here need truncated terms, and a tile of operands in which no sum leaves the normal range of the
accumulator, to which sums are truncated or rounded to nearest even or stochastically; aligned_rounding.py takes the
rest.
"""

from typing import NamedTuple

import numpy as np
from numba import types

from fmtsim.cpu.cast.words import fill64
from fmtsim.cpu.gemm.accumulate import end_block
from fmtsim.cpu.gemm.operands import TOP_BYTE, pitch_of
from fmtsim.cpu.runtime.jit import device, overload, subroutine
from fmtsim.cpu.runtime.packed import bytes_shifted20, bytes_shifted23
from fmtsim.cpu.runtime.simd import (
    LANES,
    NEAREST_EVEN,
    TOWARD_ZERO,
    and_,
    as_f32,
    as_f64,
    as_i32,
    as_i64,
    broadcast,
    broadcast_bytes,
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
    shl,
    smax,
    smin,
    splat,
    store,
    umax,
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
        count = iadd(count, popcount(xor(broadcast(signs_a, a + w * step), load(signs_b, b + w * LANES))))
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
    group = max(pitch, LANES)
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
    beyond = rows * LANES
    for m in range(rows):
        place = ((draw.block + index) * draw.rows + draw.row + m) * draw.columns + column
        if place & 63 == 0:
            fill64(words, m * LANES, place >> 6, o0, o1, k0, k1)
        else:
            fill64(words, beyond, place >> 6, o0, o1, k0, k1)
            fill64(words, beyond + LANES, (place >> 6) + 1, o0, o1, k0, k1)
            store(words, m * LANES, load(words, beyond + (place & 63)))


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
        first, y = index * pitch * LANES, index * words * LANES
        place, step = place_of(index, pitch, rows)
        _draw(rounding, draw, index, rows, column, buffer)
        e0, e1 = splat(floor_byte), splat(floor_byte)
        for j in range(block):
            e = load(b.exponents, first + j * LANES)
            e0 = _larger(e0, e, a.exponents, place + j)
            e1 = _larger(e1, e, a.exponents, place + step + j)
        for m in range(0, rows, 2):
            p, x = place + m * step, index * words * rows + m
            q, after = p + step, place + min(m + 2, rows - 2) * step
            # 1. M of the largest product exponents, the count of negative products, and the truncated addend
            n0 = negatives_of(a.signs, b.signs, x, y, rows, words)
            n1 = negatives_of(a.signs, b.signs, x + 1, y, rows, words)
            s0 = start64(load(acc, m * LANES), e0, n0, (a.top[m] + base) << np.int32(20), shift, eps, True)
            s1 = start64(load(acc, (m + 1) * LANES), e1, n1, (a.top[m + 1] + base) << np.int32(20), shift, eps, True)
            e0, e1 = splat(floor_byte), splat(floor_byte)
            for j in range(block):
                # 2. floors of the products, one fused multiply-add each
                v = load(b.values, first + j * LANES)
                s0 = fma(broadcast(a.values, p + j), v, s0)
                s1 = fma(broadcast(a.values, q + j), v, s1)
                # 3. beside them, in other units of the processor, the largest product exponents of the next two rows,
                # as bytes below the largest of both operands
                e = load(b.exponents, first + j * LANES)
                e0 = _larger(e0, e, a.exponents, after + j)
                e1 = _larger(e1, e, a.exponents, after + step + j)
            # 4. M away, and the accumulator's rounding
            store(acc, m * LANES, _end64(s0, mask, rounding, buffer, m * LANES))
            store(acc, (m + 1) * LANES, _end64(s1, mask, rounding, buffer, (m + 1) * LANES))
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
        first, y = index * pitch * LANES, index * words * LANES
        place, step = place_of(index, pitch, rows)
        e0 = e1 = e2 = e3 = nothing
        for j in range(block):
            e = load(b.exponents, first + j * LANES)
            e0 = _larger(e0, e, a.exponents, place + j)
            e1 = _larger(e1, e, a.exponents, place + step + j)
            e2 = _larger(e2, e, a.exponents, place + 2 * step + j)
            e3 = _larger(e3, e, a.exponents, place + 3 * step + j)
        for m in range(0, rows, 4):
            p, x = place + m * step, index * words * rows + m
            q, r, t = p + step, p + 2 * step, p + 3 * step
            after = place + min(m + 4, rows - 4) * step
            # 1. M of the largest product exponents, the count of negative products, and the truncated addend
            n0 = negatives_of(a.signs, b.signs, x, y, rows, words)
            s0 = _start32(load(acc, m * LANES), e0, n0, (a.top[m] + base) << np.int32(23), shift, eps)
            n1 = negatives_of(a.signs, b.signs, x + 1, y, rows, words)
            s1 = _start32(load(acc, (m + 1) * LANES), e1, n1, (a.top[m + 1] + base) << np.int32(23), shift, eps)
            n2 = negatives_of(a.signs, b.signs, x + 2, y, rows, words)
            s2 = _start32(load(acc, (m + 2) * LANES), e2, n2, (a.top[m + 2] + base) << np.int32(23), shift, eps)
            n3 = negatives_of(a.signs, b.signs, x + 3, y, rows, words)
            s3 = _start32(load(acc, (m + 3) * LANES), e3, n3, (a.top[m + 3] + base) << np.int32(23), shift, eps)
            e0 = e1 = e2 = e3 = nothing
            for j in range(block):
                # 2. floors of the products, one fused multiply-add each
                v = load(b.values, first + j * LANES)
                s0 = fma(broadcast(a.values, p + j), v, s0)
                s1 = fma(broadcast(a.values, q + j), v, s1)
                s2 = fma(broadcast(a.values, r + j), v, s2)
                s3 = fma(broadcast(a.values, t + j), v, s3)
                # 3. beside them the largest product exponents of the next four rows
                e = load(b.exponents, first + j * LANES)
                e0 = _larger(e0, e, a.exponents, after + j)
                e1 = _larger(e1, e, a.exponents, after + step + j)
                e2 = _larger(e2, e, a.exponents, after + 2 * step + j)
                e3 = _larger(e3, e, a.exponents, after + 3 * step + j)
            # 4. M away, truncated to the accumulator's bits
            store(acc, m * LANES, _finish32(s0, mask))
            store(acc, (m + 1) * LANES, _finish32(s1, mask))
            store(acc, (m + 2) * LANES, _finish32(s2, mask))
            store(acc, (m + 3) * LANES, _finish32(s3, mask))
        if order.ends[index]:
            set_rounding(NEAREST_EVEN)
            end_block(acc, order, index, rows, sums)
            set_rounding(TOWARD_ZERO)
    set_rounding(NEAREST_EVEN)
