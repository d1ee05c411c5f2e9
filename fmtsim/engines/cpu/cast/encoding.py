# SPDX-License-Identifier: Apache-2.0
"""Fast kernels for the codes and scales of block formats on float32: as blocks.py, but elements end as codes.

A row of a group is first rounded into values, which stay in the first-level cache, and these then become codes, a loop
each that the compiler vectorises. What the kernels cannot take they leave as those of blocks.py do.
"""

import numpy as np
from numpy import float32, int32, int64, uint64

from fmtsim.engines.cpu.cast.blocks import stochastic_block
from fmtsim.engines.cpu.cast.codes import code_of_value
from fmtsim.engines.cpu.cast.lookup import found_code
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
from fmtsim.engines.cpu.cast.words import fill_words
from fmtsim.engines.cpu.runtime.jit import device, float32_of, kernel, prefetch

_ONE = float32(1)
_SCALE_OF_ZEROS = int32(0x00400000)  # 2**-127: the lowest power of two


@device
def _buffers(layout):
    """Return room for largest magnitudes, exponents, scales and factors of a group; factors for strips of 16, too."""
    strips = max(layout.inner * layout.group // 16 + 1, layout.group)
    integers = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    return *integers, np.empty(layout.group, np.float32), np.empty(strips, np.float32)


@device
def _scale(x, steps, r0, r1, k0, k1, p, sg, layout, buffers):
    """Find scales and factors of a group, and write the scales; return how many blocks must be left."""
    amaxes, shifts, scales, factors = buffers
    count = (k1 - k0 + layout.inner - 1) // layout.inner
    largest_magnitudes(x, r0, r1, k0, k1, layout, amaxes)
    if p.rule == AMAX:
        refused = real_scales(amaxes, scales, factors, count, p, sg)
    else:
        refused = binary_scales(amaxes, shifts, count, p, layout)
        powers(shifts, scales, factors, count)
        for b in range(count):
            scales[b] = float32_of(_SCALE_OF_ZEROS) if amaxes[b] == int32(0) else scales[b]
    row, first = r0 // layout.outer, k0 // layout.inner
    for b in range(count):
        steps[row, first + b] = scales[b]
    return refused


@device
def _scaled_row(x, y, inner, ahead, factors):
    """Multiply a row by its factors; ``ahead`` elements on, the next group is asked for."""
    strips = x.size // 16 if inner % 16 == 0 else 0
    for strip in range(strips):
        prefetch(x, 16 * strip + ahead)
        base = uint64(16 * strip)
        factor = factors[strip]
        for j in range(16):
            y[base + uint64(j)] = float32(x[base + uint64(j)] * factor)
    width = 16 if inner % 16 == 0 else inner
    for i in range(16 * strips, x.size):
        y[i] = float32(x[i] * factors[i // width])


@kernel
def encode_nearest(x, codes, steps, g, c, p, sg, layout, start, stop):
    """Encode groups ``start ... stop - 1``, rounding to nearest even; return the first one not done, or stop."""
    ahead = layout.inner * layout.group
    buffers, values = _buffers(layout), np.empty(ahead, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _scale(x, steps, r0, r1, k0, k1, p, sg, layout, buffers):
            return int64(group)
        per_lane(buffers[3], layout.inner, k1 - k0)
        for r in range(r0, r1):
            row, result = values[: k1 - k0], codes[r, k0:k1]
            _scaled_row(x[r, k0:k1], row, layout.inner, ahead, buffers[3])
            for i in range(row.size):
                value = saturated(row[i], g.min_binade, g.limit, g.limit_negative, g)
                result[i] = code_of_value(value, c)
    return int64(stop)


@kernel
def encode_tabled(x, codes, steps, words, p, sg, layout, start, stop):
    """Encode groups ``start ... stop - 1`` by a table of codes; return the first one not done, or stop."""
    ahead = layout.inner * layout.group
    buffers, values = _buffers(layout), np.empty(ahead, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _scale(x, steps, r0, r1, k0, k1, p, sg, layout, buffers):
            return int64(group)
        per_lane(buffers[3], layout.inner, k1 - k0)
        for r in range(r0, r1):
            row, result = values[: k1 - k0], codes[r, k0:k1]
            _scaled_row(x[r, k0:k1], row, layout.inner, ahead, buffers[3])
            for i in range(row.size):
                result[i] = found_code(row[i], words)
    return int64(stop)


@kernel
def encode_stochastic(x, codes, steps, g, c, p, sg, w, layout, start, stop):
    """Encode groups ``start ... stop - 1`` stochastically; return the first one not done, or stop."""
    inner, size = layout.inner, layout.inner * layout.group
    buffers, values = _buffers(layout), np.empty(size, np.float32)
    buffer = np.empty(size + 128, np.uint32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _scale(x, steps, r0, r1, k0, k1, p, sg, layout, buffers):
            return int64(group)
        for r in range(r0, r1):
            fill_words(r * x.shape[1] + k0, k1 - k0, w, buffer)
            row_words = buffer[(r * x.shape[1] + k0) & 63 :]
            row, result = values[: k1 - k0], codes[r, k0:k1]
            for b in range((row.size + inner - 1) // inner):
                last = min((b + 1) * inner, row.size)
                stochastic_block(x[r, k0:k1], row, b * inner, last, row_words, _ONE, _ONE, buffers[3][b], g)
            for i in range(row.size):
                result[i] = code_of_value(row[i], c)
    return int64(stop)
