# SPDX-License-Identifier: Apache-2.0
"""Fast kernels for blocks of one column: those of a row-major matrix whose products sum over its rows.

They are as those of blocks.py, but neighbours have a scale each, so that every loop runs along a row.
"""

import numpy as np
from numpy import float32, int32, int64

from fmtsim.engines.cpu.cast.blocks import binary_value, real_value
from fmtsim.engines.cpu.cast.phases import AMAX, binary_scales, bounds, powers, real_scales
from fmtsim.engines.cpu.cast.scalar import stochastic_deep
from fmtsim.engines.cpu.cast.words import fill_words
from fmtsim.engines.cpu.runtime.jit import bits32, device, kernel

_MAGNITUDE = int32(0x7FFFFFFF)


@device
def _amaxes(x, r0, r1, k0, k1, amaxes):
    """Write the largest magnitudes of columns, as float32 bits (NaN and Inf are the largest)."""
    amaxes[:] = int32(0)
    for r in range(r0, r1):
        row = x[r, k0:k1]
        for i in range(row.size):
            amaxes[i] = max(amaxes[i], bits32(row[i]) & _MAGNITUDE)


@kernel
def quantize_binary(x, y, g, p, layout, start, stop):
    """Quantise groups ``start ... stop - 1`` under power-of-two scales; return the first one not done, or stop."""
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        _amaxes(x, r0, r1, k0, k1, amaxes)
        if binary_scales(amaxes, shifts, k1 - k0, p, layout):
            return int64(group)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            for i in range(xs.size):
                ys[i] = binary_value(xs[i], shifts[i], g)
    return int64(stop)


@kernel
def quantize_real(x, y, g, p, sg, layout, start, stop):
    """Quantise groups ``start ... stop - 1`` under real scales; return the first one not done, or stop."""
    amaxes = np.empty(layout.group, np.int32)
    scales, factors = np.empty(layout.group, np.float32), np.empty(layout.group, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        _amaxes(x, r0, r1, k0, k1, amaxes)
        if real_scales(amaxes, scales, factors, k1 - k0, p, sg):
            return int64(group)
        for r in range(r0, r1):
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            for i in range(xs.size):
                ys[i] = real_value(xs[i], scales[i], factors[i], p, g)
    return int64(stop)


@kernel
def quantize_stochastic(x, y, g, p, sg, w, layout, start, stop):
    """Quantise groups stochastically under scales of either kind; return the first group not done, or stop."""
    amaxes, shifts = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    scales, factors = np.empty(layout.group, np.float32), np.empty(layout.group, np.float32)
    buffer = np.empty(layout.group + 128, np.uint32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        count = k1 - k0
        _amaxes(x, r0, r1, k0, k1, amaxes)
        if p.rule == AMAX:
            if real_scales(amaxes, scales, factors, count, p, sg):
                return int64(group)
        else:
            if binary_scales(amaxes, shifts, count, p, layout):
                return int64(group)
            powers(shifts, scales, factors, count)
        for r in range(r0, r1):
            fill_words(r * x.shape[1] + k0, count, w, buffer)
            words = buffer[(r * x.shape[1] + k0) & 63 :]
            xs, ys = x[r, k0:k1], y[r, k0:k1]
            for i in range(xs.size):
                value = stochastic_deep(float32(xs[i] * factors[i]), words[i], g)
                ys[i] = float32(float32(value * scales[i]) * p.decode_scale)
    return int64(stop)
