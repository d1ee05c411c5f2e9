# SPDX-License-Identifier: Apache-2.0
"""CDNA2, CDNA3 and Intel's dot products (docs/matmul.md, section 3): 64 columns, plain loops over float32 tiles.

All numbers of a two-stage unit are integers times a power of two that float64 holds exactly: products of float32
numbers have 48 bits, sums as many as ``covers`` allows, and scaling by a power of two changes no digit.
"""

import numpy as np
import torch
from torch import Tensor

from fmtsim.cpu.gemm.accumulate import end_block
from fmtsim.cpu.gemm.ieee_chains import Scales, Step, run_chains
from fmtsim.cpu.gemm.operand_layouts import pitch_of
from fmtsim.cpu.gemm.panels import Slabs
from fmtsim.cpu.runtime.jit import bits32, device, float64_of, fma32, kernel
from fmtsim.cpu.runtime.simd import COLUMNS
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, FmaDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec

_ZERO = -126  # the exponent of a zero product and of a zero addend
_NOTHING = -1024  # exponent of a zero: products with one stay below every other
_NORMAL = np.float32(FP32.min_normal)
_LIFT = np.float32(2.0**32)  # of both factors
_LIFTED = np.float32(2.0**64), np.float32(2.0**64 * FP32.min_normal)  # of a sum, and the smallest normal number then


def covers(spec: GemmSpec) -> bool:
    """Return True if float64 holds the sums of a two-stage unit, and float32 its operands or another unit's."""
    unit = spec.datapath
    if not is_representable(spec.a, torch.float32) or not is_representable(spec.b, torch.float32):
        return False
    if isinstance(unit, TwoStageDatapath):
        return max(unit.fraction_bits, unit.sum_bits) + 4 + unit.block.bit_length() <= 53
    return isinstance(unit, PairwiseDatapath | FmaDatapath)


def gemm(a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, _: RandomKey, out: Tensor) -> None:
    """Write the product of a unit that ``covers`` to out; the arguments are those of the engine's ``gemm``."""
    unit = spec.datapath
    assert isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    lowest, smallest = (spec.a.min_exponent, spec.b.min_exponent), (spec.a.min_normal, spec.b.min_normal)

    def step(slabs: Slabs) -> Step:
        slots, block = slabs.whole.slots, slabs.block
        if isinstance(unit, TwoStageDatapath):
            bits = unit.fraction_bits, unit.sum_bits
            return lambda tile, acc, order, sums: two_stage(
                tile.rows, tile.panel, slots, block, order, sums, acc, lowest, bits, unit.parity
            )
        if isinstance(unit, FmaDatapath):
            size = unit.block, unit.parity
            return lambda tile, acc, order, sums: multiply_add_pairs(
                tile.rows, tile.panel, slots, block, size, order, sums, acc
            )
        return lambda tile, acc, order, sums: pairwise(
            tile.rows, tile.panel, slots, block, unit.block, order, sums, acc, smallest
        )

    run_chains(a, b, c, scales, spec, out, np.float32, step)


@device
def _exponents(numbers, lowest):  # type: ignore[no-untyped-def]
    """Return the exponents of float32 numbers, as int32; zeros have _NOTHING."""
    result = np.empty(numbers.size, np.int32)
    for i in range(numbers.size):
        x = abs(numbers[i])
        e = (bits32(x) >> 23) - 127 if x >= _NORMAL else (bits32(np.float32(x * np.float32(2.0**64))) >> 23) - 191
        result[i] = max(e, lowest) if x != 0 else _NOTHING
    return result


@device
def _power(e):  # type: ignore[no-untyped-def]
    """Return 2^e as float64."""
    return float64_of(np.int64(e + 1023) << 52)


@kernel
def two_stage(rows, panel, slots, block, order, sums, acc, lowest, bits, parity):  # type: ignore[no-untyped-def]
    """Run all blocks of a tile through a two-stage unit: acc float32 [height][64], the running chains."""
    height, k, pitch = acc.size // COLUMNS, panel.size // COLUMNS, pitch_of(block)
    ea, eb = _exponents(rows, lowest[0]), _exponents(panel, lowest[1])
    # one row a half: largest exponent, sum; and what is not finite
    tops, totals, special = np.empty((2, COLUMNS), np.int32), np.empty((2, COLUMNS)), np.empty(COLUMNS)
    limit = np.inf if parity else 2.0**128
    for index in range(order.ends.size):
        here = slots[index * pitch : index * pitch + block]
        for m in range(height):
            # 1. the largest exponent of the products of each parity, or of all
            tops[:], totals[:], special[:] = -2048, 0, 0
            for j in range(block):
                if here[j] >= 0:
                    _raise(tops[j & 1 if parity else 0], ea[m * k + here[j]], eb[here[j] * COLUMNS :])
            if not parity or block == 1 or here[1] < 0:
                tops[1] = tops[0]
            # 2. products truncated to the grid of that exponent, added exactly
            for j in range(block):
                if here[j] >= 0:
                    half = j & 1 if parity else 0
                    x, column = np.float64(rows[m * k + here[j]]), panel[here[j] * COLUMNS :]
                    _cut(totals[half], special, x, column, tops[half], bits[0], limit)
            # 3. both sums and the addend on one grid, rounded to float32
            _with_addend(acc[m * COLUMNS : (m + 1) * COLUMNS], tops, totals, special, bits, parity)
        if order.ends[index]:
            end_block(acc, order, index, height, sums)


@device
def _raise(top, e, column):  # type: ignore[no-untyped-def]
    for n in range(COLUMNS):
        both = e + column[n]
        top[n] = max(top[n], both if both > -700 else np.int32(_ZERO))


@device
def _cut(total, special, x, column, top, fraction_bits, limit):  # type: ignore[no-untyped-def]
    """Add x times a column, truncated, to the totals, and what counts as Inf or NaN to ``special``."""
    for n in range(COLUMNS):
        p = x * np.float64(column[n])
        total[n] += np.trunc(p * _power(fraction_bits - top[n]))
        special[n] += 0.0 if abs(p) < limit else p * np.inf


@device
def _with_addend(acc, tops, totals, special, bits, parity):  # type: ignore[no-untyped-def]
    """Add the sum of the products to 64 running sums (step 2) and round to float32 (step 3)."""
    fraction_bits, sum_bits = bits
    of_c = _exponents(acc, np.int32(_ZERO))
    for n in range(COLUMNS):
        c, top = np.float64(acc[n]), max(tops[0, n], tops[1, n])
        # 1. both sums on the grid of the larger exponent
        total = np.floor(totals[0, n] * _power(tops[0, n] - top)) + np.floor(totals[1, n] * _power(tops[1, n] - top))
        c_exponent = max(of_c[n], np.int32(_ZERO))
        e = max(top, c_exponent)
        # 2. addend and products on the grid of the larger of their exponents
        addend = np.floor(c * _power(fraction_bits - e))
        if parity and c_exponent < e - fraction_bits - 1:
            addend = 0.0
        products = np.floor(total * _power(top - e + sum_bits - fraction_bits))
        # 3. one rounding; NaN and Inf of any product decide
        y = np.float32(products * _power(e - sum_bits) + addend * _power(e - fraction_bits))
        nonfinite = special[n] + (0.0 if abs(c) < np.inf else c)
        acc[n] = np.float32(nonfinite) if nonfinite != 0 else y + np.float32(0)  # NaN is not 0; -0 becomes +0


@device
def _without(x, smallest):  # type: ignore[no-untyped-def]
    """Return an operand, +0 if it is subnormal."""
    return x if abs(x) >= smallest or not abs(x) > 0 else np.float32(0)


@device
def _flushed(x):  # type: ignore[no-untyped-def]
    """Return a result, zero of its sign if it is subnormal."""
    return np.float32(0) * x if abs(x) < _NORMAL else x


@kernel
def pairwise(rows, panel, slots, block, length, order, sums, acc, smallest):  # type: ignore[no-untyped-def]
    """Run all blocks of a tile through a pairwise unit that adds ``length`` products; see two_stage."""
    height, k, pitch = acc.size // COLUMNS, panel.size // COLUMNS, pitch_of(block)
    level = np.empty((length, COLUMNS), np.float32)
    least_a, least_b = np.float32(smallest[0]), np.float32(smallest[1])
    for index in range(order.ends.size):
        here = slots[index * pitch : index * pitch + block]
        for m in range(height):
            level[:] = 0
            for j in range(block):
                if here[j] >= 0:
                    x = _without(rows[m * k + here[j]], least_a)
                    _multiply(level[j], x, panel[here[j] * COLUMNS :], least_b)
            # sums of neighbours, level by level, each flushed
            count = length
            while count > 1:
                count //= 2
                for j in range(count):
                    _add(level[j], level[2 * j], level[2 * j + 1])
            for n in range(COLUMNS):
                acc[m * COLUMNS + n] = _flushed(_without(acc[m * COLUMNS + n], _NORMAL) + level[0, n])
        if order.ends[index]:
            end_block(acc, order, index, height, sums)


@device
def _multiply(out, x, column, least):  # type: ignore[no-untyped-def]
    for n in range(COLUMNS):
        out[n] = _flushed(x * _without(column[n], least))


@device
def _add(out, x, y):  # type: ignore[no-untyped-def]
    for n in range(COLUMNS):
        out[n] = _flushed(x[n] + y[n])


@kernel
def multiply_add_pairs(rows, panel, slots, block, unit, order, sums, acc):  # type: ignore[no-untyped-def]
    """Run all blocks of a tile through an FmaDatapath of ``unit = (block, parity)``; see two_stage."""
    height, k, pitch = acc.size // COLUMNS, panel.size // COLUMNS, pitch_of(block)
    nothing, halves = np.zeros(COLUMNS, np.float32), np.empty((2, COLUMNS), np.float32)
    for numbers in (rows, panel, acc):
        for i in range(numbers.size):
            numbers[i] = _flushed(numbers[i])
    for index in range(order.ends.size):
        here = slots[index * pitch : index * pitch + block]
        for m in range(height):
            running = acc[m * COLUMNS : (m + 1) * COLUMNS]
            halves[:] = 0
            # 1. products in pairs, the odd one first; those that a block lacks are +0 times +0
            for i in range(unit[0]):
                j = i ^ 1
                slot = here[j] if j < block else -1
                x = rows[m * k + slot] if slot >= 0 else np.float32(0)
                column = panel[slot * COLUMNS : (slot + 1) * COLUMNS] if slot >= 0 else nothing
                _multiply_add(halves[j & 1] if unit[1] else running, x, column)
            # 2. the sums of even and odd products, and that to the running sum
            if unit[1]:
                _add(halves[0], halves[0], halves[1])
                _add(running, running, halves[0])
        if order.ends[index]:
            end_block(acc, order, index, height, sums)


@device
def _multiply_add(sums, x, column):  # type: ignore[no-untyped-def]
    """Add x times a column to 64 sums, each rounded once; one that 24 bits leave below 2^-126 becomes zero."""
    for n in range(COLUMNS):
        y = fma32(x, column[n], sums[n])
        # 2^64 times as large it is rounded to 24 bits as if exponents had no lower bound; Inf and NaN are not tiny
        lifted = fma32(x * _LIFT, column[n] * _LIFT, sums[n] * _LIFTED[0])
        sums[n] = y * np.float32(0) if abs(lifted) < _LIFTED[1] else y
