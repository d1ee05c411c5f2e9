"""Fast kernels for block formats on float32: rounding to nearest even of grids that saturate.

A group of blocks goes through three phases while it is in the first-level cache: largest magnitudes, scales, elements.
Loops over constant 16 lanes become single vector instructions. Blocks with NaN, Inf or scales at float32's limits are
left to the general kernel: the fast one stops in front of their group and says where.
"""

from typing import NamedTuple

import numpy as np
from numpy import float32, float64, int32, int64

from fmtsim.cpu.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.scalar import nearest_bits, nearest_magic
from fmtsim.cpu.scales import AMAX, CEIL, DIVIDE, ENCODE, EVEN, FLT_MAX, RCEIL, TWO_LEVEL

_MAGNITUDE = int32(0x7FFFFFFF)
_EXPONENT = int32(0x7F800000)
_MANTISSA = int32(0x007FFFFF)
_NORMAL = int32(0x00800000)
_INF = int32(0x7F800000)
_ONE = float32(1)
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
def _row_amax(row):
    """Return the largest magnitude of a row as float32 bits (NaN and Inf are the largest)."""
    size = row.size
    amax = int32(0)
    if size == 16:
        for j in range(16):
            amax = max(amax, bits32(row[j]) & _MAGNITUDE)
    elif size == 32:
        for j in range(32):
            amax = max(amax, bits32(row[j]) & _MAGNITUDE)
    else:
        for j in range(size):
            amax = max(amax, bits32(row[j]) & _MAGNITUDE)
    return amax


@device
def _amax_phase(x, r0, r1, k0, k1, inner, amaxes):
    for r in range(r0, r1):
        b = 0
        for k in range(k0, k1, inner):
            amaxes[b] = max(amaxes[b], _row_amax(x[r, k : min(k + inner, k1)]))
            b += 1


@device
def _binary_scales(amaxes, exponents, count, g, p, layout):
    """Turn amax bits into exponents; return how many blocks the fast kernel cannot take."""
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
        exponents[b] = exponent
    return refused


@device
def _real_scales(amaxes, scales, factors, count, p, sg):
    """Turn amax bits into scales and factors (divisors under DIVIDE); return how many blocks hold NaN or Inf."""
    refused = int32(0)
    step = float32(p.encode_scale * p.reciprocal_max)
    for b in range(count):
        refused += int32(amaxes[b] >= _INF)
        a = float32_of(min(amaxes[b], int32(_INF - int32(1))))
        if p.arithmetic == TWO_LEVEL:
            scale = min(float32(a * step), FLT_MAX)
        elif p.arithmetic == ENCODE:
            scale = float32(_ONE / min(float32(p.max / a), FLT_MAX))
        else:
            scale = min(max(float32(a / p.max), _FLT_MIN), FLT_MAX)
        if p.arithmetic != TWO_LEVEL and a == float32(0):
            scale = _ONE
        if not p.plain:
            scale = nearest_bits(scale, sg) if sg.by_bits else nearest_magic(scale, sg)
        scales[b] = scale
        factor = float32(scale * p.decode_scale)
        factor = FLT_MAX if factor == float32(0) else min(float32(_ONE / factor), FLT_MAX)
        if p.arithmetic == DIVIDE:
            factor = scale if scale > float32(0) else _FLT_MIN
        elif p.arithmetic == ENCODE and p.plain:
            factor = _ONE if a == float32(0) else min(float32(p.max / a), FLT_MAX)
        factors[b] = factor
    return refused


@device
def _saturated(value, min_binade, limit_positive, limit_negative, g):
    """Round a finite float32 to nearest even on a grid whose binades start at ``min_binade``, saturating."""
    bits = bits32(value)
    magnitude = bits & _MAGNITUDE
    sign = bits ^ magnitude
    binade = min(max(magnitude & _EXPONENT, min_binade), g.top_binade)
    magic = float32_of(int32(binade + g.magic_shift))
    rounded = float32(float32(float32_of(magnitude) + magic) - magic)
    rounded = min(rounded, limit_positive if sign == int32(0) else limit_negative)
    if rounded == float32(0):
        sign = sign & g.zero_sign
    return float32_of(bits32(rounded) | sign)


@device
def _binary_row(x, y, exponent, g):
    shift = int32(exponent << int32(23))
    min_binade = int32(g.min_binade + shift)
    positive = float32_of(int32(bits32(g.max) + shift))
    negative = float32_of(int32(bits32(g.max_negative) + shift)) if g.max_negative > float32(0) else float32(0)
    size = x.size
    for i in range(0, size - 15, 16):
        xs, ys = x[i : i + 16], y[i : i + 16]
        for j in range(16):
            ys[j] = _saturated(xs[j], min_binade, positive, negative, g)
    for i in range(size - size % 16, size):
        y[i] = _saturated(x[i], min_binade, positive, negative, g)


@device
def _real_row(x, y, scale, factor, p, g):
    size = x.size
    for i in range(0, size - 15, 16):
        xs, ys = x[i : i + 16], y[i : i + 16]
        for j in range(16):
            ys[j] = _real_value(xs[j], scale, factor, p, g)
    for i in range(size - size % 16, size):
        y[i] = _real_value(x[i], scale, factor, p, g)


@device
def _real_value(value, scale, factor, p, g):
    scaled = float32(value / factor) if p.arithmetic == DIVIDE else float32(value * factor)
    code_value = _saturated(scaled, g.min_binade, g.max, g.max_negative, g)
    return float32(float32(code_value * scale) * p.decode_scale)


@kernel
def quantize_groups(x, y, g, p, sg, layout, start, stop):
    """Quantise the groups ``start ... stop - 1`` of matrix x into y; return the first group not done, or stop."""
    rows, columns = x.shape
    width = layout.inner * layout.group
    across = (columns + width - 1) // width
    amaxes = np.empty(layout.group, np.int32)
    exponents = np.empty(layout.group, np.int32)
    scales = np.empty(layout.group, np.float32)
    factors = np.empty(layout.group, np.float32)
    for group in range(start, stop):
        r0, k0 = (group // across) * layout.outer, (group % across) * width
        r1, k1 = min(r0 + layout.outer, rows), min(k0 + width, columns)
        count = (k1 - k0 + layout.inner - 1) // layout.inner
        amaxes[:] = max(layout.preset, int32(0))
        if layout.preset < int32(0):
            _amax_phase(x, r0, r1, k0, k1, layout.inner, amaxes)
        if p.rule == AMAX:
            if _real_scales(amaxes, scales, factors, count, p, sg):
                return int64(group)
            for r in range(r0, r1):
                for b in range(count):
                    k = k0 + b * layout.inner
                    k2 = min(k + layout.inner, k1)
                    _real_row(x[r, k:k2], y[r, k:k2], scales[b], factors[b], p, g)
        else:
            if _binary_scales(amaxes, exponents, count, g, p, layout):
                return int64(group)
            for r in range(r0, r1):
                for b in range(count):
                    k = k0 + b * layout.inner
                    k2 = min(k + layout.inner, k1)
                    _binary_row(x[r, k:k2], y[r, k:k2], exponents[b], g)
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
