"""Fast kernels for block formats on float32: grids that saturate, rounded to nearest even or stochastically.

A group of blocks goes through three phases while it is in the first-level cache: largest magnitudes, scales, elements.
Loops of constant 16 lanes, and long flat ones, are what the compiler vectorises. Blocks with NaN, Inf or scales at
float32's limits are left to the general kernel: the fast one stops in front of their group and says where.
"""

from typing import NamedTuple

import numpy as np
from numpy import float32, float64, int32, int64, uint64

from fmtsim.cpu.jit import bits32, device, float32_of, kernel, prefetch
from fmtsim.cpu.philox import fill64
from fmtsim.cpu.scalar import limited, magic_addition, nearest_magic, stochastic_deep
from fmtsim.cpu.scales import AMAX, CEIL, ENCODE, EVEN, FLT_MAX, RCEIL, TWO_LEVEL

_MAGNITUDE = int32(0x7FFFFFFF)
_MANTISSA = int32(0x007FFFFF)
_NORMAL = int32(0x00800000)
_INF = int32(0x7F800000)
_ONE = float32(1)
_ONE_BITS = int32(0x3F800000)
_FLT_MIN = np.float32(1.1754943508222875e-38)


class Layout(NamedTuple):
    """Blocks of a matrix and the range of power-of-two scales within which float32 arithmetic is exact.

    Attributes:
        outer, inner: Rows and columns of a block.
        group: Blocks side by side that go through the phases together.
        lowest, highest: Smallest and largest exponent of a scale that the fast kernel takes.
        preset: Bits of an amax that all blocks share, or -1.
    """

    outer: int
    inner: int
    group: int
    lowest: np.int32
    highest: np.int32
    preset: np.int32


@device
def _raise_amaxes(x, inner, amaxes):
    """Raise ``amaxes`` to the largest magnitudes of a row's blocks, as float32 bits (NaN and Inf are the largest)."""
    if inner == 16:
        for b in range(x.size // 16):
            base = uint64(16 * b)
            amax = int32(0)
            for j in range(16):
                amax = max(amax, bits32(x[base + uint64(j)]) & _MAGNITUDE)
            amaxes[b] = max(amaxes[b], amax)
    else:
        for b in range(x.size // inner):
            block = x[b * inner : b * inner + inner]
            amax = int32(0)
            for j in range(inner):
                amax = max(amax, bits32(block[j]) & _MAGNITUDE)
            amaxes[b] = max(amaxes[b], amax)
    for i in range(x.size - x.size % inner, x.size):  # the last block may be short
        amaxes[x.size // inner] = max(amaxes[x.size // inner], bits32(x[i]) & _MAGNITUDE)


@device
def _binary_scales(amaxes, shifts, count, g, p, layout):
    """Turn amax bits into scale exponents, as exponent bits; return how many blocks the fast kernel cannot take."""
    refused = int32(0)
    for b in range(count):
        bits = amaxes[b]
        if p.rule == RCEIL:
            bits = bits32(float32(float32_of(bits) * p.reciprocal_max))
        elif p.rule == EVEN:
            bits += int32(1) << int32(22 - p.mantissa_bits)
        exponent = int32((bits >> int32(23)) - int32(127))
        if (p.rule == RCEIL or p.rule == CEIL) and bits & _MANTISSA:
            exponent += int32(1)
        if p.rule != RCEIL:
            exponent -= int32(p.max_exponent)
        exponent = int32(0) if amaxes[b] == int32(0) else exponent  # zeros are zeros under any scale
        strange = amaxes[b] >= _INF or (bits < _NORMAL and amaxes[b] != int32(0))
        refused += int32(strange or exponent < layout.lowest or exponent > layout.highest)
        shifts[b] = int32(exponent << int32(23))
    return refused


@device
def _real_scales(amaxes, scales, factors, count, p, sg):
    """Turn amax bits into scales and factors; return how many blocks hold NaN or Inf."""
    refused = int32(0)
    step = float32(p.encode_scale * p.reciprocal_max)
    for b in range(count):
        refused += int32(amaxes[b] >= _INF)
        amax = float32_of(min(amaxes[b], int32(_INF - int32(1))))
        factors[b] = amax
        if p.arithmetic == TWO_LEVEL:
            scale = min(float32(amax * step), FLT_MAX)
        elif p.arithmetic == ENCODE:
            scale = float32(_ONE / min(float32(p.max / amax), FLT_MAX))
        else:
            scale = min(max(float32(amax / p.max), _FLT_MIN), FLT_MAX)
        scales[b] = _ONE if p.arithmetic != TWO_LEVEL and amax == float32(0) else scale
    if not p.plain:
        for b in range(count):
            scales[b] = nearest_magic(scales[b], sg, False)
    for b in range(count):
        product = float32(scales[b] * p.decode_scale)
        factor = FLT_MAX if product == float32(0) else min(float32(_ONE / product), FLT_MAX)
        if p.arithmetic == ENCODE and p.plain:
            factor = _ONE if factors[b] == float32(0) else min(float32(p.max / factors[b]), FLT_MAX)
        factors[b] = factor
    return refused


@device
def _saturated(value, min_binade, limit, limit_negative, g):
    """Round a finite float32 to nearest even on the grid whose smallest binade is given, saturating at the limits."""
    bits = bits32(value)
    rounded = magic_addition(limited(bits, limit, limit_negative), min_binade, g.magic_shift)
    return float32(float32_of(bits32(rounded) | (bits & ~_MAGNITUDE)) + g.zero)


@device
def _times_power(limit, shift):
    """Multiply the bits of a limit by a power of two given as exponent bits; the product is normal, or zero."""
    return limit if limit == int32(0) else int32(limit + shift)


@device
def _binary_value(value, shift, g):
    """Quantise one element under the scale whose exponent bits are given."""
    limit, negative = _times_power(g.limit, shift), _times_power(g.limit_negative, shift)
    return _saturated(value, int32(g.min_binade + shift), limit, negative, g)


@device
def _real_value(value, scale, factor, p, g):
    """Quantise one element under a real scale."""
    code_value = _saturated(float32(value * factor), g.min_binade, g.limit, g.limit_negative, g)
    return float32(float32(code_value * scale) * p.decode_scale)


@device
def _per_lane(values, inner, size):
    """Repeat, in place, a value a block to one a strip, the last first: strips are 16 lanes, or a whole odd block."""
    strips = inner // 16
    if inner % 16 == 0 and strips > 1:
        for strip in range((size + 15) // 16 - 1, -1, -1):
            values[strip] = values[strip // strips]


@device
def _binary_row(x, y, inner, ahead, shifts, g):
    """Quantise a row under power-of-two scales; ``ahead`` elements on, the next group is asked for."""
    strips = x.size // 16 if inner % 16 == 0 else 0
    for strip in range(strips):
        prefetch(x, 16 * strip + ahead)
        base = uint64(16 * strip)
        shift = shifts[strip]
        for j in range(16):
            k = base + uint64(j)
            y[k] = _binary_value(x[k], shift, g)
    width = 16 if inner % 16 == 0 else inner
    for i in range(16 * strips, x.size):
        y[i] = _binary_value(x[i], shifts[i // width], g)


@device
def _real_row(x, y, inner, ahead, scales, factors, p, g):
    """Quantise a row under real scales, like ``_binary_row``."""
    strips = x.size // 16 if inner % 16 == 0 else 0
    for strip in range(strips):
        prefetch(x, 16 * strip + ahead)
        base = uint64(16 * strip)
        scale, factor = scales[strip], factors[strip]
        for j in range(16):
            k = base + uint64(j)
            y[k] = _real_value(x[k], scale, factor, p, g)
    width = 16 if inner % 16 == 0 else inner
    for i in range(16 * strips, x.size):
        y[i] = _real_value(x[i], scales[i // width], factors[i // width], p, g)


@device
def _bounds(group, shape, layout):
    """Return the rows and columns of a group of blocks."""
    width = layout.inner * layout.group
    across = (shape[1] + width - 1) // width
    r0, k0 = (group // across) * layout.outer, (group % across) * width
    return r0, min(r0 + layout.outer, shape[0]), k0, min(k0 + width, shape[1])


@device
def _amaxes(x, r0, r1, k0, k1, layout, amaxes):
    amaxes[:] = max(layout.preset, int32(0))
    if layout.preset < int32(0):
        for r in range(r0, r1):
            _raise_amaxes(x[r, k0:k1], layout.inner, amaxes)


@kernel
def quantize_binary(x, y, g, p, layout, start, stop):
    """Quantise groups ``start ... stop - 1`` under power-of-two scales; return the first one not done, or stop."""
    inner = layout.inner
    ahead = inner * layout.group  # elements to the next group, asked for while this one is rounded
    strips = max(ahead // 16 + 1, layout.group)
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(strips, np.int32)
    for group in range(start, stop):
        r0, r1, k0, k1 = _bounds(group, x.shape, layout)
        count = (k1 - k0 + inner - 1) // inner
        _amaxes(x, r0, r1, k0, k1, layout, amaxes)
        if _binary_scales(amaxes, shifts, count, g, p, layout):
            return int64(group)
        _per_lane(shifts, inner, k1 - k0)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            _binary_row(xs, ys, inner, ahead, shifts, g)
    return int64(stop)


@kernel
def quantize_real(x, y, g, p, sg, layout, start, stop):
    """Quantise groups ``start ... stop - 1`` under real scales; return the first one not done, or stop."""
    inner = layout.inner
    ahead = inner * layout.group  # elements to the next group, asked for while this one is rounded
    strips = max(ahead // 16 + 1, layout.group)
    amaxes = np.empty(layout.group, np.int32)
    scales, factors = np.empty(strips, np.float32), np.empty(strips, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = _bounds(group, x.shape, layout)
        count = (k1 - k0 + inner - 1) // inner
        _amaxes(x, r0, r1, k0, k1, layout, amaxes)
        if _real_scales(amaxes, scales, factors, count, p, sg):
            return int64(group)
        _per_lane(scales, inner, k1 - k0)
        _per_lane(factors, inner, k1 - k0)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            _real_row(xs, ys, inner, ahead, scales, factors, p, g)
    return int64(stop)


@device
def _powers(shifts, scales, factors, count):
    """Turn exponent bits of power-of-two scales into the scales and their reciprocals."""
    for b in range(count):
        scales[b] = float32_of(int32(shifts[b] + _ONE_BITS))
        factors[b] = float32_of(int32(_ONE_BITS - shifts[b]))


@device
def _stochastic_block(x, y, first, last, words, scale, factor, p, g):
    """Quantise elements ``first ... last - 1`` of a row; ``words`` holds the random words of the whole row.

    A product with a power of two that underflows has no bit within 2**-32 of the last place: it rounds to zero.
    """
    xs, ys, ws = x[first:last], y[first:last], words[first:last]
    for i in range(xs.size):
        value = stochastic_deep(float32(xs[i] * factor), ws[i], g)
        ys[i] = float32(float32(value * scale) * p.decode_scale)


@kernel
def quantize_stochastic(x, y, g, p, sg, layout, o0, o1, k0, k1, start, stop):
    """Quantise groups stochastically under scales of either kind; return the first group not done, or stop."""
    inner, columns = layout.inner, x.shape[1]
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    scales, factors = np.empty(layout.group, np.float32), np.empty(layout.group, np.float32)
    words = np.empty(inner * layout.group + 128, np.uint32)
    for group in range(start, stop):
        r0, r1, c0, c1 = _bounds(group, x.shape, layout)
        count = (c1 - c0 + inner - 1) // inner
        _amaxes(x, r0, r1, c0, c1, layout, amaxes)
        if p.rule == AMAX:
            if _real_scales(amaxes, scales, factors, count, p, sg):
                return int64(group)
        else:
            if _binary_scales(amaxes, shifts, count, g, p, layout):
                return int64(group)
            _powers(shifts, scales, factors, count)
        for r in range(r0, r1):
            first = r * columns + c0
            for block in range(first >> 6, (first + c1 - c0 + 63) >> 6):
                place = 64 * (block - (first >> 6))
                fill64(words[place : place + 64], block, o0, o1, k0, k1)
            row_words = words[first & 63 :]
            xs, ys = x[r, c0:c1], y[r, c0:c1]
            for b in range(count):
                last = min((b + 1) * inner, c1 - c0)
                _stochastic_block(xs, ys, b * inner, last, row_words, scales[b], factors[b], p, g)
    return int64(stop)


@kernel
def largest_bits(x):
    """Return the bits of the largest magnitude of float32 x; NaN is larger than Inf."""
    top = int32(0)
    for i in range(x.size):
        top = max(top, bits32(x[i]) & _MAGNITUDE)
    return top


def finite_amax(x: np.ndarray) -> tuple[float, bool, bool]:
    """Return the largest finite magnitude of float32 x, and whether it holds NaN, and NaN or Inf."""
    top = int32(largest_bits(x))
    if top < _INF:
        return float(top.view(np.float32)), False, False
    return finite_amax_double(x)  # seldom: look again, at finite elements alone


@kernel
def finite_amax_double(x):
    """Return the largest finite magnitude of x, and whether it holds NaN, and NaN or Inf."""
    amax = float64(0)
    has_nan = has_inf = False
    for i in range(x.size):
        magnitude = abs(x[i])
        if magnitude < np.inf:
            amax = max(amax, magnitude)
        elif magnitude != magnitude:
            has_nan = True
        else:
            has_inf = True
    return amax, has_nan, has_nan or has_inf
