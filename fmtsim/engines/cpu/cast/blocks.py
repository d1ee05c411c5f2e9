# SPDX-License-Identifier: Apache-2.0
"""Fast kernels for block formats on float32: grids that saturate, rounded to nearest even or stochastically.

A group of blocks goes through three phases while it is in the first-level cache: largest magnitudes, scales, elements.
Loops of constant 16 lanes, and long flat ones, are what the compiler vectorises. Blocks with NaN, Inf or scales at
float32's limits are left to the torch engine: the kernel stops in front of their group and says where.
"""

import numpy as np
from numpy import float32, int32, int64, uint64

from fmtsim.engines.cpu.cast.phases import (
    AMAX,
    binary_scales,
    bounds,
    largest_magnitudes,
    per_lane,
    powers,
    real_scales,
    saturated,
)
from fmtsim.engines.cpu.cast.scalar import stochastic_deep
from fmtsim.engines.cpu.cast.words import fill_words
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel, prefetch

_MAGNITUDE = int32(0x7FFFFFFF)
_INF = int32(0x7F800000)


@device
def _times_power(limit, shift):
    """Multiply the bits of a limit by a power of two given as exponent bits; the product is normal, or zero."""
    return limit if limit == int32(0) else int32(limit + shift)


@device
def binary_value(value, shift, g):
    """Quantise one element under the scale whose exponent bits are given."""
    limit, negative = _times_power(g.limit, shift), _times_power(g.limit_negative, shift)
    return saturated(value, int32(g.min_binade + shift), limit, negative, g)


@device
def real_value(value, scale, factor, p, g):
    """Quantise one element under a real scale."""
    code_value = saturated(float32(value * factor), g.min_binade, g.limit, g.limit_negative, g)
    return float32(float32(code_value * scale) * p.decode_scale)


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
            y[k] = binary_value(x[k], shift, g)
    width = 16 if inner % 16 == 0 else inner
    for i in range(16 * strips, x.size):
        y[i] = binary_value(x[i], shifts[i // width], g)


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
            y[k] = real_value(x[k], scale, factor, p, g)
    width = 16 if inner % 16 == 0 else inner
    for i in range(16 * strips, x.size):
        y[i] = real_value(x[i], scales[i // width], factors[i // width], p, g)


@kernel
def quantize_binary(x, y, g, p, layout, start, stop):
    """Quantise groups ``start ... stop - 1`` under power-of-two scales; return the first one not done, or stop."""
    inner = layout.inner
    ahead = inner * layout.group  # elements to the next group, asked for while this one is rounded
    strips = max(ahead // 16 + 1, layout.group)
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(strips, np.int32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        count = (k1 - k0 + inner - 1) // inner
        largest_magnitudes(x, r0, r1, k0, k1, layout, amaxes)
        if binary_scales(amaxes, shifts, count, p, layout):
            return int64(group)
        per_lane(shifts, inner, k1 - k0)
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
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        count = (k1 - k0 + inner - 1) // inner
        largest_magnitudes(x, r0, r1, k0, k1, layout, amaxes)
        if real_scales(amaxes, scales, factors, count, p, sg):
            return int64(group)
        per_lane(scales, inner, k1 - k0)
        per_lane(factors, inner, k1 - k0)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            _real_row(xs, ys, inner, ahead, scales, factors, p, g)
    return int64(stop)


@device
def stochastic_block(x, y, first, last, words, scale, decode_scale, factor, g):
    """Quantise elements ``first ... last - 1`` of a row; ``words`` holds the random words of the whole row.

    A product with a power of two that underflows has no bit within 2**-32 of the last place: it rounds to zero.
    """
    xs, ys, ws = x[first:last], y[first:last], words[first:last]
    for i in range(xs.size):
        value = stochastic_deep(float32(xs[i] * factor), ws[i], g)
        ys[i] = float32(float32(value * scale) * decode_scale)


@kernel
def quantize_stochastic(x, y, g, p, sg, w, layout, start, stop):
    """Quantise groups stochastically under scales of either kind; return the first group not done, or stop."""
    inner, columns = layout.inner, x.shape[1]
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    scales, factors = np.empty(layout.group, np.float32), np.empty(layout.group, np.float32)
    buffer = np.empty(inner * layout.group + 128, np.uint32)
    for group in range(start, stop):
        r0, r1, c0, c1 = bounds(group, x.shape, layout)
        count = (c1 - c0 + inner - 1) // inner
        largest_magnitudes(x, r0, r1, c0, c1, layout, amaxes)
        if p.rule == AMAX:
            if real_scales(amaxes, scales, factors, count, p, sg):
                return int64(group)
        else:
            if binary_scales(amaxes, shifts, count, p, layout):
                return int64(group)
            powers(shifts, scales, factors, count)
        for r in range(r0, r1):
            fill_words(r * columns + c0, c1 - c0, w, buffer)
            row_words = buffer[(r * columns + c0) & 63 :]
            xs, ys = x[r, c0:c1], y[r, c0:c1]
            for b in range(count):
                last = min((b + 1) * inner, c1 - c0)
                stochastic_block(xs, ys, b * inner, last, row_words, scales[b], p.decode_scale, factors[b], g)
    return int64(stop)


@kernel
def finite_amax(x):
    """Return the largest finite magnitude of float32 x, and whether it holds NaN or Inf."""
    top = int32(0)
    for i in range(x.size):
        top = max(top, bits32(x[i]) & _MAGNITUDE)
    if top < _INF:
        return float32_of(top), False
    top = int32(0)
    for i in range(x.size):  # seldom: look again, at finite elements alone
        bits = bits32(x[i]) & _MAGNITUDE
        top = max(top, bits if bits < _INF else int32(0))
    return float32_of(top), True
