# SPDX-License-Identifier: Apache-2.0
"""Fused products of units that add groups of products exactly and scale each group (Blackwell's 4-bit formats).

A group's sum is exact in float32; times its two scales it is one term, truncated by the perturbed floor of
aligned_truncate.py. Its sign is the sum's, so the count of negative terms needs no masks.
"""

import math
from dataclasses import dataclass

import numpy as np

from fmtsim.cpu.gemm.accumulate import end_block
from fmtsim.cpu.gemm.aligned_rounding import constant_of, round_rows
from fmtsim.cpu.gemm.aligned_truncate import place_of
from fmtsim.cpu.gemm.operands import EMPTY, Source, pitch_of
from fmtsim.cpu.gemm.packing import HAS_INF, HAS_NAN, TINY64
from fmtsim.cpu.runtime.jit import device, subroutine
from fmtsim.cpu.runtime.simd import (
    LANES,
    NEAREST_EVEN,
    TOWARD_ZERO,
    as_f64,
    as_i32,
    as_i64,
    broadcast,
    fadd,
    fma,
    fmul,
    fsub,
    high_words,
    iadd,
    join_words,
    load,
    lshr,
    set_rounding,
    smax,
    splat,
    store,
    to_f64,
    zext64,
)
from fmtsim.spec.datapath import Datapath


@dataclass(frozen=True, slots=True)
class Groups:
    """How the kernel runs a unit with groups: products of a group, and 1 + eps."""

    size: int
    factor: np.float64


def groups_of(unit: Datapath, a: Source, b: Source) -> Groups | None:
    """Return how the kernel runs a unit on these operands; None where its sums are not exact."""
    if unit.group == 1 or unit.scale is None or unit.fraction_bits is None or unit.term_rounding != "toward_zero":
        return None
    own = unit.scale.mantissa_bits + 1
    bits = a.bits + b.bits - 2 * own
    above = a.top + b.top - 2 * unit.scale.max_exponent + 2 + math.ceil(math.log2(unit.group))
    width = above - (a.emin + b.emin - bits + 2)
    head = above + 2
    eps = max(width + 2 * own, unit.fraction_bits + head, unit.accumulator.mantissa_bits + 2) + 1
    room = unit.fraction_bits + head + math.ceil(math.log2((unit.block or 1) // unit.group + 1))
    fits = width <= 24 and room <= 51 and own + eps <= 53 and not unit.signed_zero
    return Groups(unit.group, np.float64(1 + 2.0**-eps)) if fits else None


def group_scales(
    source: Source, slots: np.ndarray, size: int, factor: np.float64, padded: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scales of each group times a factor, float64 [groups, rows], their exponents, int32, and marks [rows].

    Zero scales are TINY; groups without products have exponent EMPTY. Rows are padded with zeros.
    """
    first = slots.reshape(-1, size)[:, 0]
    scales = np.zeros((first.size, padded), np.float64)
    scales[:, : source.scales.shape[0]] = source.scales[:, np.maximum(first, 0) // source.every].T
    marks = np.where(np.isnan(scales).any(0), HAS_NAN, np.where(np.isinf(scales).any(0), HAS_INF, 0)).astype(np.int32)
    finite = np.where(np.isfinite(scales), scales, 0.0)
    exponents = np.maximum(np.frexp(finite)[1] - 1, source.scale_emin).astype(np.int32)
    exponents[finite == 0] = source.scale_emin
    exponents[first < 0] = EMPTY
    return np.where(finite == 0, TINY64, finite * factor), exponents, marks


@device
def _add_groups(a, b, p, m, first, group, size, count, s, c):  # type: ignore[no-untyped-def]
    """Add the cut terms of a block to s; return the sum and how many terms and addends are negative."""
    positive_zero = splat(np.float64(0))  # added, it leaves -0, which is not a negative term, no sign
    negatives = lshr(high_words(fadd(c, positive_zero)), splat(np.int32(31)))
    rows = a.rows
    for g in range(count):
        total = splat(np.float32(0))
        for j in range(g * size, (g + 1) * size):
            total = fma(broadcast(a.values, p + j), load(b.values, first + j * LANES), total)
        negatives = iadd(negatives, lshr(as_i32(total), splat(np.int32(31))))
        scaled = fmul(to_f64(total), load(b.scales, (group + g) * LANES))
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
    raw, buffer = np.empty(rows * LANES, np.float64), np.empty(2 * LANES, np.uint32)
    eps = splat(factor)
    for index in range(order.ends.size):
        first, group = index * pitch * LANES, index * pitch // size
        place, step = place_of(index, pitch, rows)
        set_rounding(TOWARD_ZERO)
        for m in range(rows):
            c, e = load(acc, m * LANES), splat(np.int32(EMPTY))
            for g in range(group, group + count):
                e = smax(e, iadd(load(b.exponents, g * LANES), broadcast(a.exponents, g * rows + m)))
            constant = join_words(splat(np.int32(0)), constant_of(c, e, unit))
            s = _add_groups(a, b, place + m * step, m, first, group, size, count, fma(c, eps, constant), c)
            store(raw, m * LANES, fsub(s, constant))
        set_rounding(NEAREST_EVEN)
        round_rows(raw, index, acc, unit, draw, column, buffer)
        if order.ends[index]:
            end_block(acc, order, index, rows, sums)
