# SPDX-License-Identifier: Apache-2.0
"""Fused products of units that add groups of products exactly and scale each group (Blackwell's 4-bit formats).

A group's sum is exact in float32; times its two scales it is one term, truncated by the perturbed floor of
aligned.py. Its sign is the sum's, so the count of negative terms needs no masks.
"""

import math
from dataclasses import dataclass

import numpy as np

from fmtsim.cpu.gemm.accumulate import end_block
from fmtsim.cpu.gemm.aligned import constant_of, finish64, place_of, round_rows, start64, words_of
from fmtsim.cpu.gemm.operand_layouts import EMPTY, HAS_INF, HAS_NAN, TINY64, TOP_BYTE, Source, limits_of, pitch_of
from fmtsim.cpu.runtime.jit import device, subroutine
from fmtsim.cpu.runtime.simd import (
    COLUMNS,
    LANES,
    NEAREST_EVEN,
    PARTS,
    TOWARD_ZERO,
    add_products,
    as_f64,
    as_i32,
    as_i64,
    broadcast,
    broadcast_bytes,
    fadd,
    fma,
    fmul,
    fsub,
    high_words,
    iadd,
    int_to_f64,
    join_words,
    load,
    lshr,
    set_rounding,
    smax,
    splat,
    store,
    to_f64,
    umax,
    zext64,
)
from fmtsim.spec.datapath import Datapath


@dataclass(frozen=True, slots=True)
class Groups:
    """How the kernels run a unit with groups.

    ``size`` products make a group, ``factor`` is 1 + eps. The rest is for ``grouped_integers``: ``mask`` keeps the
    accumulator's bits of a float64, and 0 says that sums are not truncated to it; times ``numbers`` those of both
    operands are integers of 16 bits, or are not where None; ``limits`` are the exponents that it allows.
    """

    size: int
    factor: np.float64
    mask: np.int64
    numbers: tuple[float, float] | None
    limits: tuple[int, int]

    def tops(self, a: Source, b: Source) -> tuple[int, int] | None:
        """Return the largest exponents of both operands' scales where ``grouped_integers`` takes them, else None."""
        if self.mask == 0 or self.numbers is None:
            return None
        x, y = _exponent_range(a), _exponent_range(b)
        narrow = x[1] - x[0] <= TOP_BYTE // 2 and y[1] - y[0] <= TOP_BYTE // 2
        inside = x[0] + y[0] >= self.limits[0] and x[1] + y[1] <= self.limits[1]
        return (x[1], y[1]) if narrow and inside else None


def groups_of(unit: Datapath, a: Source, b: Source, k: int) -> Groups | None:
    """Return the constants of the kernels for a unit and operands; None where sums are not exact."""
    if unit.group == 1 or unit.scale is None or unit.fraction_bits is None or unit.term_rounding != "toward_zero":
        return None
    scale_bits, acc = unit.scale.mantissa_bits + 1, unit.accumulator
    bits = a.bits + b.bits - 2 * scale_bits
    above = a.top + b.top - 2 * unit.scale.max_exponent + 2 + math.ceil(math.log2(unit.group))
    width = above - (a.emin + b.emin - bits + 2)
    head = above + 2
    eps = max(width + 2 * scale_bits, unit.fraction_bits + head, acc.mantissa_bits + 2) + 1
    room = unit.fraction_bits + head + math.ceil(math.log2((unit.block or 1) // unit.group + 1))
    if width > 24 or room > 51 or scale_bits + eps > 53 or unit.signed_zero:
        return None
    behind = [x.bits - scale_bits - 1 - x.emin for x in (a, b)]  # bits behind the point
    short = all(x.top - unit.scale.max_exponent + 1 + n <= 15 for x, n in zip((a, b), behind, strict=True))
    mask = np.int64(-1 << (52 - acc.mantissa_bits) if unit.rounding.mode == "toward_zero" else 0)
    return Groups(
        size=unit.group,
        factor=np.float64(1 + 2.0**-eps),
        mask=mask,
        numbers=(2.0 ** behind[0], 2.0 ** behind[1]) if short and unit.group % 2 == 0 else None,
        limits=limits_of(unit, head, k),
    )


def _exponent_range(source: Source) -> tuple[int, int]:
    """Return the smallest and largest exponent of an operand's scales; those of zeros are the smallest of a scale."""
    scales = source.scales[np.isfinite(source.scales)]
    ends = np.frexp(np.array([scales.min(), scales.max()]) if scales.size else np.zeros(2))
    least, most = (max(int(e) - 1, source.scale_emin) if x else source.scale_emin for x, e in zip(*ends, strict=True))
    return least, most


def exponent_bytes(exponents: np.ndarray, top: int) -> np.ndarray:
    """Return exponents of groups as bytes in int32, the largest as TOP_BYTE; groups without products have 0."""
    return np.where(exponents == EMPTY, 0, exponents + np.int32(TOP_BYTE - top))


def group_scales(
    source: Source, slots: np.ndarray, size: int, factor: np.float64, padded: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scales of each group times a factor, float64 [groups, rows], their exponents, int32, and marks [rows].

    Zero scales are TINY; groups without products have exponent EMPTY. Rows are padded with zeros.
    """
    first = slots.reshape(-1, size)[:, 0]
    scales = np.zeros((first.size, padded), np.float32)
    scales[:, : source.scales.shape[0]] = source.scales[:, np.maximum(first, 0) // source.every].T
    marks = np.zeros(padded, np.int32)
    if not np.isfinite(scales).all():
        marks |= np.where(np.isnan(scales).any(0), HAS_NAN, np.where(np.isinf(scales).any(0), HAS_INF, 0))
        scales[~np.isfinite(scales)] = 0
    exponents = np.frexp(scales)[1]
    np.maximum(exponents - 1, source.scale_emin, out=exponents)
    wide = np.multiply(scales, factor, dtype=np.float64)
    zeros = scales == 0
    if zeros.any():
        exponents[zeros] = source.scale_emin
        wide[zeros] = TINY64
    exponents[first < 0] = EMPTY
    return wide, exponents, marks


@device
def _add_groups(a, b, p, m, first, group, size, count, s, c):  # type: ignore[no-untyped-def]
    """Add the truncated terms of a block to s; return the sum and how many terms and addends are negative."""
    positive_zero = splat(np.float64(0))  # added, it leaves -0, which is not a negative term, no sign
    negatives = lshr(high_words(fadd(c, positive_zero)), splat(np.int32(31)))
    rows = a.rows
    for g in range(count):
        # 1. the exact sum of a group; 2. times its scales it is one term, floored onto M
        total = splat(np.float32(0))
        for j in range(g * size, (g + 1) * size):
            total = fma(broadcast(a.values, p + j), load(b.values, first + j * COLUMNS), total)
        negatives = iadd(negatives, lshr(as_i32(total), splat(np.int32(31))))
        scaled = fmul(to_f64(total), load(b.scales, (group + g) * COLUMNS + first % COLUMNS))
        s = fma(scaled, broadcast(a.scales, (group + g) * rows + m), s)
    return as_f64(iadd(as_i64(s), zext64(negatives)))


@subroutine
def grouped(a, b, order, sums, acc, block, size, factor, unit, draw, column):  # type: ignore[no-untyped-def]
    """Run the blocks of a slab for all rows of a and the 64 columns of b.

    a, b: Grouped, float32 values in the layouts of operands.py, scales and exponents [group][row or column].
    acc: float64 [rows][64], the running chains. ``size`` products make a group, ``factor`` is 1 + eps,
    ``column`` the product's column of lane 0.
    """
    rows, pitch, count = a.rows, pitch_of(block), block // size
    raw, drawn = np.empty(rows * COLUMNS, np.float64), words_of(rows, unit)
    eps = splat(factor)
    for index in range(order.ends.size):
        group = index * pitch // size
        place, step = place_of(index, pitch, rows)
        set_rounding(TOWARD_ZERO)
        for at in range(0, rows * COLUMNS, LANES):
            m, n = at // COLUMNS, at % COLUMNS
            first = index * pitch * COLUMNS + n
            # 1. M of the largest exponent of a group's two scales, or of the addend
            c, e = load(acc, at), splat(np.int32(EMPTY))
            for g in range(group, group + count):
                e = smax(e, iadd(load(b.exponents, g * COLUMNS + n), broadcast(a.exponents, g * rows + m)))
            constant = join_words(splat(np.int32(0)), constant_of(c, e, unit))
            # 2. floors of addend and groups, and the count of negative ones
            s = _add_groups(a, b, place + m * step, m, first, group, size, count, fma(c, eps, constant), c)
            store(raw, at, fsub(s, constant))
        set_rounding(NEAREST_EVEN)
        round_rows(raw, index, acc, unit, draw, column, drawn)
        if order.ends[index]:
            end_block(acc, order, index, rows, sums)


@subroutine
def grouped_integers(a, b, order, sums, acc, block, size, factor, base, fraction_bits, mask):  # type: ignore[no-untyped-def]
    """Compute ``grouped`` where products are integers and sums are truncated, in half the time.

    a, b: Grouped, int32 values that hold two slots each, at the even one; exponents are bytes, four times in an int32
    for a and as pack_bytes orders them for b. ``base`` is the exponent of a term whose two bytes are 0, ``mask`` keeps
    the accumulator's bits of a float64.
    """
    rows, pitch, count, zero = a.rows, pitch_of(block), block // size, splat(np.int32(0))
    totals = np.empty(2 * count * LANES, np.int32)
    eps, sign, base = splat(factor), splat(np.int32(31)), np.int32(base + 1023) << np.int32(20)
    shift = np.int32(((52 - fraction_bits) << 20) | (1 << 19))
    set_rounding(TOWARD_ZERO)
    for index in range(order.ends.size):
        group = index * pitch // size
        place, step = place_of(index, pitch, rows)
        for part in range(rows // 2 * PARTS):
            m, n = part // PARTS * 2, part % PARTS * LANES
            first, here = index * pitch * COLUMNS + n, m * COLUMNS + n
            p, at = place + m * step, group * rows + m
            # 1. by groups: the exponent of the scales, the exact sum of products of integers, its sign
            e0, n0 = splat(np.int8(0)), zero
            e1, n1 = e0, n0
            for g in range(count):
                e = load(b.exponents, (group + g) * COLUMNS + n)
                e0 = umax(e0, iadd(e, broadcast_bytes(a.exponents, at + g * rows)))
                e1 = umax(e1, iadd(e, broadcast_bytes(a.exponents, at + g * rows + 1)))
                t0, t1 = zero, zero
                for j in range(g * size, (g + 1) * size, 2):
                    v = load(b.values, first + j * COLUMNS)
                    t0 = add_products(t0, v, broadcast(a.values, p + j))
                    t1 = add_products(t1, v, broadcast(a.values, p + step + j))
                n0, n1 = iadd(n0, lshr(t0, sign)), iadd(n1, lshr(t1, sign))
                store(totals, 2 * g * LANES, t0)
                store(totals, (2 * g + 1) * LANES, t1)
            # 2. M, the count of negative terms, and the truncated addend
            s0 = start64(load(acc, here), e0, n0, base, shift, eps, False)
            s1 = start64(load(acc, here + COLUMNS), e1, n1, base, shift, eps, False)
            for g in range(count):
                # 3. sums times scales, floored onto M
                w = load(b.scales, (group + g) * COLUMNS + n)
                t0, t1 = load(totals, 2 * g * LANES), load(totals, (2 * g + 1) * LANES)
                s0 = fma(fmul(int_to_f64(t0), w), broadcast(a.scales, at + g * rows), s0)
                s1 = fma(fmul(int_to_f64(t1), w), broadcast(a.scales, at + g * rows + 1), s1)
            # 4. M away, truncated to the accumulator's bits
            store(acc, here, finish64(s0, mask))
            store(acc, here + COLUMNS, finish64(s1, mask))
        if order.ends[index]:
            set_rounding(NEAREST_EVEN)
            end_block(acc, order, index, rows, sums)
            set_rounding(TOWARD_ZERO)
    set_rounding(NEAREST_EVEN)
