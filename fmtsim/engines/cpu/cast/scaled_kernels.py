# SPDX-License-Identifier: Apache-2.0
"""Kernels of scaled casts on float32: largest magnitudes of blocks, their scales, and elements as values or codes.

``scaled.py`` runs them for block formats whose elements saturate, rounded to nearest even, stochastically or by table.
A group of blocks side by side takes all three steps while it is in the first-level cache. Every kernel casts groups
``start ... stop - 1`` and returns the first that it cannot take, or ``stop``: blocks with NaN, Inf or scales at
float32's limits are left to the torch engine.

Loops of constant 16 lanes, and long flat ones, are what the compiler vectorises. Blocks of one column (those down the
columns of a row-major matrix) have a scale for each neighbour, so that their loops run along a row as well.
"""

import numpy as np
from numpy import float32, int32, int64, uint64

from fmtsim.engines.cpu.cast.codes import code_of_number, code_of_value
from fmtsim.engines.cpu.cast.elements import stochastic_deep
from fmtsim.engines.cpu.cast.scales import (
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
def _room(layout):
    """Return room for amaxes, exponents, scales and factors of a group: one a block, or one a strip of 16 elements."""
    strips = max(layout.inner * layout.group // 16 + 1, layout.group)
    exponents = np.empty(layout.group, np.int32), np.empty(strips, np.int32)
    return *exponents, np.empty(strips, np.float32), np.empty(strips, np.float32)


@device
def _any_scales(x, r0, r1, k0, k1, p, sg, layout, room):
    """Write scales and factors of a group's blocks under a rule of either kind; return how many must be left."""
    amaxes, shifts, scales, factors = room
    count = (k1 - k0 + layout.inner - 1) // layout.inner
    largest_magnitudes(x, r0, r1, k0, k1, layout, amaxes)
    if p.rule == AMAX:
        return real_scales(amaxes, scales, factors, count, p, sg)
    refused = binary_scales(amaxes, shifts, count, p, layout)
    powers(shifts, scales, factors, count)
    return refused


# Elements as values.


@device
def _binary_value(value, shift, g):
    """Quantise one element under the scale whose exponent bits are given: the grid moves, the element stays."""
    # A limit times a power of two is normal, or zero.
    limit = g.limit if g.limit == int32(0) else int32(g.limit + shift)
    negative = g.limit_negative if g.limit_negative == int32(0) else int32(g.limit_negative + shift)
    return saturated(value, int32(g.min_binade + shift), limit, negative, g)


@device
def _real_value(value, scale, factor, p, g):
    """Quantise one element under a real scale."""
    code_value = saturated(float32(value * factor), g.min_binade, g.limit, g.limit_negative, g)
    return float32(float32(code_value * scale) * p.decode_scale)


@device
def _binary_row(x, y, inner, ahead, shifts, g):
    """Quantise a row under power-of-two scales; the group ``ahead`` elements further is prefetched."""
    if inner == 1:
        for i in range(x.size):
            y[i] = _binary_value(x[i], shifts[i], g)
        return
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
    if inner == 1:
        for i in range(x.size):
            y[i] = _real_value(x[i], scales[i], factors[i], p, g)
        return
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
def _stochastic_row(x, y, inner, words, scales, factors, decode_scale, g):
    """Quantise a row stochastically with its random words.

    A product with a power of two that underflows has no bit within 2**-32 of the last place: it rounds to zero.
    """
    if inner == 1:
        for i in range(x.size):
            value = stochastic_deep(float32(x[i] * factors[i]), words[i], g)
            y[i] = float32(float32(value * scales[i]) * decode_scale)
        return
    for b in range((x.size + inner - 1) // inner):
        first, last = b * inner, min((b + 1) * inner, x.size)
        xs, ys, ws = x[first:last], y[first:last], words[first:last]
        scale, factor = scales[b], factors[b]
        for i in range(xs.size):
            value = stochastic_deep(float32(xs[i] * factor), ws[i], g)
            ys[i] = float32(float32(value * scale) * decode_scale)


# Binary and real scales have a kernel each: to nearest, a power of two moves the grid instead of the element, which
# saves the two products of a real scale.


@kernel
def quantize_binary(x, y, g, p, layout, start, stop):
    """Quantise groups of blocks to nearest even under power-of-two scales."""
    inner, ahead = layout.inner, layout.inner * layout.group
    amaxes, shifts, _, _ = _room(layout)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        # 1. statistic
        largest_magnitudes(x, r0, r1, k0, k1, layout, amaxes)
        # 2. scale
        if binary_scales(amaxes, shifts, (k1 - k0 + inner - 1) // inner, p, layout):
            return int64(group)
        per_lane(shifts, inner, k1 - k0)
        # 3. element
        for r in range(r0, r1):
            _binary_row(x[r, k0:k1], y[r, k0:k1], inner, ahead, shifts, g)
    return int64(stop)


@kernel
def quantize_real(x, y, g, p, sg, layout, start, stop):
    """Quantise groups of blocks to nearest even under real scales."""
    inner, ahead = layout.inner, layout.inner * layout.group
    amaxes, _, scales, factors = _room(layout)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        largest_magnitudes(x, r0, r1, k0, k1, layout, amaxes)
        if real_scales(amaxes, scales, factors, (k1 - k0 + inner - 1) // inner, p, sg):
            return int64(group)
        per_lane(scales, inner, k1 - k0)
        per_lane(factors, inner, k1 - k0)
        for r in range(r0, r1):
            _real_row(x[r, k0:k1], y[r, k0:k1], inner, ahead, scales, factors, p, g)
    return int64(stop)


@kernel
def quantize_stochastic(x, y, g, p, sg, w, layout, start, stop):
    """Quantise groups of blocks stochastically under scales of either kind."""
    inner, columns = layout.inner, x.shape[1]
    room, buffer = _room(layout), np.empty(inner * layout.group + 128, np.uint32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _any_scales(x, r0, r1, k0, k1, p, sg, layout, room):
            return int64(group)
        for r in range(r0, r1):
            fill_words(r * columns + k0, k1 - k0, w, buffer)
            words = buffer[(r * columns + k0) & 63 :]
            _stochastic_row(x[r, k0:k1], y[r, k0:k1], inner, words, room[2], room[3], p.decode_scale, g)
    return int64(stop)


# Elements as codes. A row of a group is first rounded into values, which stay in the first-level cache; these then
# become codes, a loop each that the compiler vectorises.


@device
def _stored_scales(x, steps, r0, r1, k0, k1, p, sg, layout, room):
    """Do what ``_any_scales`` does, and write the scales to ``steps``."""
    amaxes, _, scales, _ = room
    refused = _any_scales(x, r0, r1, k0, k1, p, sg, layout, room)
    row, first = r0 // layout.outer, k0 // layout.inner
    for b in range((k1 - k0 + layout.inner - 1) // layout.inner):
        is_lowest = p.rule != AMAX and amaxes[b] == int32(0)
        steps[row, first + b] = float32_of(_SCALE_OF_ZEROS) if is_lowest else scales[b]
    return refused


@device
def _scaled_row(x, y, inner, ahead, factors):
    """Multiply a row by its factors; the group ``ahead`` elements further is prefetched."""
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
    """Encode groups of blocks, rounding to nearest even."""
    inner, ahead = layout.inner, layout.inner * layout.group
    room, values = _room(layout), np.empty(ahead, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _stored_scales(x, steps, r0, r1, k0, k1, p, sg, layout, room):
            return int64(group)
        per_lane(room[3], inner, k1 - k0)
        for r in range(r0, r1):
            row, result = values[: k1 - k0], codes[r, k0:k1]
            _scaled_row(x[r, k0:k1], row, inner, ahead, room[3])
            for i in range(row.size):
                result[i] = code_of_value(saturated(row[i], g.min_binade, g.limit, g.limit_negative, g), c)
    return int64(stop)


@kernel
def encode_tabled(x, codes, steps, table, p, sg, layout, start, stop):
    """Encode groups of blocks by a table of codes."""
    inner, ahead = layout.inner, layout.inner * layout.group
    room, values = _room(layout), np.empty(ahead, np.float32)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _stored_scales(x, steps, r0, r1, k0, k1, p, sg, layout, room):
            return int64(group)
        per_lane(room[3], inner, k1 - k0)
        for r in range(r0, r1):
            row, result = values[: k1 - k0], codes[r, k0:k1]
            _scaled_row(x[r, k0:k1], row, inner, ahead, room[3])
            for i in range(row.size):
                result[i] = code_of_number(row[i], table)
    return int64(stop)


@kernel
def encode_stochastic(x, codes, steps, g, c, p, sg, w, layout, start, stop):
    """Encode groups of blocks, rounding stochastically."""
    inner, size = layout.inner, layout.inner * layout.group
    room, values, buffer = _room(layout), np.empty(size, np.float32), np.empty(size + 128, np.uint32)
    ones = np.full(layout.group, _ONE)
    for group in range(start, stop):
        r0, r1, k0, k1 = bounds(group, x.shape, layout)
        if _stored_scales(x, steps, r0, r1, k0, k1, p, sg, layout, room):
            return int64(group)
        for r in range(r0, r1):
            fill_words(r * x.shape[1] + k0, k1 - k0, w, buffer)
            words = buffer[(r * x.shape[1] + k0) & 63 :]
            row, result = values[: k1 - k0], codes[r, k0:k1]
            _stochastic_row(x[r, k0:k1], row, inner, words, ones, room[3], _ONE, g)
            for i in range(row.size):
                result[i] = code_of_value(row[i], c)
    return int64(stop)
