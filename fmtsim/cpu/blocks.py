"""Fast kernels for block formats on float32: grids that saturate, rounded to nearest even or stochastically.

A group of blocks goes through three phases while it is in the first-level cache: largest magnitudes, scales, elements.
Loops of constant 16 lanes, and long flat ones, are what the compiler vectorises. Blocks with NaN, Inf or scales at
float32's limits are left to the general kernel: the fast one stops in front of their group and says where.
"""

from typing import NamedTuple

import numpy as np
from numpy import float32, float64, int32, int64, uint64

from fmtsim.cpu.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.philox import fill64
from fmtsim.cpu.scalar import nearest_magic, stochastic_deep
from fmtsim.cpu.scales import AMAX, CEIL, ENCODE, EVEN, FLT_MAX, RCEIL, TWO_LEVEL

_MAGNITUDE = int32(0x7FFFFFFF)
_EXPONENT = int32(0x7F800000)
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
            scales[b] = nearest_magic(scales[b], sg)
    for b in range(count):
        product = float32(scales[b] * p.decode_scale)
        factor = FLT_MAX if product == float32(0) else min(float32(_ONE / product), FLT_MAX)
        if p.arithmetic == ENCODE and p.plain:
            factor = _ONE if factors[b] == float32(0) else min(float32(p.max / factors[b]), FLT_MAX)
        factors[b] = factor
    return refused


@device
def _saturated(value, min_binade, highest, lowest, g):
    """Round a finite float32 to nearest even on the grid whose smallest binade is given, saturating."""
    bits = bits32(value)
    magnitude = bits & _MAGNITUDE
    binade = min(max(magnitude & _EXPONENT, min_binade), g.top_binade)
    magic = float32_of(int32(binade + g.magic_shift))
    rounded = float32(float32(float32_of(magnitude) + magic) - magic)
    signed = float32(float32_of(bits32(rounded) | (bits ^ magnitude)) + g.zero)
    return max(min(signed, highest), lowest)


@device
def _times_power(limit, shift):
    """Multiply a limit by a power of two given as exponent bits; the product is a normal number, or zero."""
    return limit if limit == float32(0) else float32_of(int32(bits32(limit) + shift))


@device
def _binary_block(x, y, first, last, shift, g):
    """Quantise elements ``first ... last - 1`` of a row under a power-of-two scale."""
    min_binade = int32(g.min_binade + shift)
    highest, lowest = _times_power(g.highest, shift), _times_power(g.lowest, shift)
    lanes = (last - first) // 16
    for lane in range(lanes):
        base = uint64(first + 16 * lane)
        for j in range(16):
            k = base + uint64(j)
            y[k] = _saturated(x[k], min_binade, highest, lowest, g)
    for i in range(first + 16 * lanes, last):
        y[i] = _saturated(x[i], min_binade, highest, lowest, g)


@device
def _real_block(x, y, first, last, scale, factor, p, g):
    """Quantise elements ``first ... last - 1`` of a row under a real scale."""
    lanes = (last - first) // 16
    for lane in range(lanes):
        base = uint64(first + 16 * lane)
        for j in range(16):
            k = base + uint64(j)
            value = _saturated(float32(x[k] * factor), g.min_binade, g.highest, g.lowest, g)
            y[k] = float32(float32(value * scale) * p.decode_scale)
    for i in range(first + 16 * lanes, last):
        value = _saturated(float32(x[i] * factor), g.min_binade, g.highest, g.lowest, g)
        y[i] = float32(float32(value * scale) * p.decode_scale)


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
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    for group in range(start, stop):
        r0, r1, k0, k1 = _bounds(group, x.shape, layout)
        count = (k1 - k0 + inner - 1) // inner
        _amaxes(x, r0, r1, k0, k1, layout, amaxes)
        if _binary_scales(amaxes, shifts, count, g, p, layout):
            return int64(group)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            for b in range(count):
                _binary_block(xs, ys, b * inner, min((b + 1) * inner, k1 - k0), shifts[b], g)
    return int64(stop)


@kernel
def quantize_real(x, y, g, p, sg, layout, start, stop):
    """Quantise groups ``start ... stop - 1`` under real scales; return the first one not done, or stop."""
    inner = layout.inner
    amaxes = np.empty(layout.group, np.int32)
    scales, factors = np.empty(layout.group, np.float32), np.empty(layout.group, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = _bounds(group, x.shape, layout)
        count = (k1 - k0 + inner - 1) // inner
        _amaxes(x, r0, r1, k0, k1, layout, amaxes)
        if _real_scales(amaxes, scales, factors, count, p, sg):
            return int64(group)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            for b in range(count):
                last = min((b + 1) * inner, k1 - k0)
                _real_block(xs, ys, b * inner, last, scales[b], factors[b], p, g)
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
def finite_amax(x):
    """Return the largest finite magnitude of float32 x, and whether it holds NaN and Inf."""
    amax = int32(0)
    top = int32(0)
    for i in range(x.size):
        magnitude = bits32(x[i]) & _MAGNITUDE
        top = max(top, magnitude)
        amax = max(amax, magnitude if magnitude < _INF else int32(0))
    return float64(float32_of(amax)), top > _INF, top >= _INF


@kernel
def finite_amax_double(x):
    """Return the largest finite magnitude of float64 x, and whether it holds NaN and Inf."""
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
