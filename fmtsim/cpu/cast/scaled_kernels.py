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

from fmtsim.cpu.cast.codes import code_of_number, code_of_value
from fmtsim.cpu.cast.elements import stochastic_steps
from fmtsim.cpu.cast.scales import (
    AMAX,
    binary_scales,
    bounds,
    largest_magnitudes,
    per_lane,
    powers,
    real_scales,
    saturated,
)
from fmtsim.cpu.cast.words import fill_words
from fmtsim.cpu.runtime.jit import device, float32_of, kernel, prefetch

_ONE = float32(1)
_WIDEST = 512  # columns
_SCALE_OF_ZEROS = int32(0x00400000)  # 2**-127: the lowest power of two


@device
def _room(layout):
    """Return room for amaxes, exponents, scales and factors of a group's blocks, and for amaxes of strips of 16."""
    exponents = np.empty(layout.group, np.int32), np.empty(layout.group, np.int32)
    reals = np.empty(layout.group, np.float32), np.empty(layout.group, np.float32)
    return *exponents, *reals, np.empty(layout.inner * layout.group // 16 + 1, np.int32)


@device
def _lanes(layout):
    """Return how many columns of a group have a number of their own: one block of many columns needs few."""
    return layout.inner * layout.group if layout.group > 1 else min(layout.inner, _WIDEST)


@device
def _any_scales(x, columns, r0, r1, k0, size, p, sg, layout, room):
    """Write scales and factors of a group's blocks under a rule of either kind; return how many must be left."""
    amaxes, shifts, scales, factors, strips = room
    count = (size + layout.inner - 1) // layout.inner
    largest_magnitudes(x, columns, r0, r1, k0, size, layout, amaxes, strips)
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


# Rows of groups are places of flat arrays: slices of numba's arrays are counted references, an atomic operation each.


@device
def _prefetch(x, first, size, layout):
    """Prefetch the cache lines that lie a group behind these elements."""
    for i in range(first, first + size, 16):
        prefetch(x, i + layout.inner * layout.group)


@device
def _binary_row(x, y, first, size, shifts, g, layout):
    """Quantise ``size`` elements from ``first`` on under the exponents of ``shifts``: an element's, or of all."""
    for start in range(0, size, shifts.size):
        base, count = uint64(first + start), min(shifts.size, size - start)
        _prefetch(x, first + start, count, layout)
        for i in range(count):
            y[base + uint64(i)] = _binary_value(x[base + uint64(i)], shifts[i], g)


@device
def _real_row(x, y, first, size, scales, factors, p, g, layout):
    """Quantise elements under real scales, like ``_binary_row``."""
    for start in range(0, size, scales.size):
        base, count = uint64(first + start), min(scales.size, size - start)
        _prefetch(x, first + start, count, layout)
        for i in range(count):
            y[base + uint64(i)] = _real_value(x[base + uint64(i)], scales[i], factors[i], p, g)


@device
def _stochastic_row(x, y, first, to, size, words, scales, factors, decode_scale, g, layout):
    """Quantise elements stochastically to ``to`` and on, like ``_binary_row``; ``fill_words`` laid the words.

    A product with a power of two that underflows has no bit within 2**-32 of the last place: it rounds to zero.
    """
    for start in range(0, size, scales.size):
        base, count = uint64(first + start), min(scales.size, size - start)
        target, word = uint64(to + start), uint64((first & 63) + start)
        _prefetch(x, first + start, count, layout)
        for i in range(count):
            j = uint64(i)
            value = stochastic_steps(float32(x[base + j] * factors[j]), words[word + j], g, False)
            y[target + j] = float32(float32(value * scales[j]) * decode_scale)


# Binary and real scales have a kernel each: to nearest, a power of two moves the grid instead of the element, which
# saves the two products of a real scale.


@kernel
def quantize_binary(x, y, g, p, layout, start, stop):
    """Quantise groups of blocks to nearest even under power-of-two scales."""
    flat, values, columns = x.reshape(-1), y.reshape(-1), x.shape[1]
    amaxes, shifts, _, _, strips = _room(layout)
    lanes = np.empty(_lanes(layout), np.int32)
    for group in range(start, stop):
        r0, r1, k0, size = bounds(group, x.shape, layout)
        # 1. statistic
        largest_magnitudes(flat, columns, r0, r1, k0, size, layout, amaxes, strips)
        # 2. scale
        if binary_scales(amaxes, shifts, (size + layout.inner - 1) // layout.inner, p, layout):
            stop = group
            break
        per_lane(shifts, lanes, layout.inner)
        # 3. element
        for r in range(r0, r1):
            _binary_row(flat, values, r * columns + k0, size, lanes, g, layout)
    return int64(stop)


@kernel
def quantize_real(x, y, g, p, sg, layout, start, stop):
    """Quantise groups of blocks to nearest even under real scales."""
    flat, values, columns = x.reshape(-1), y.reshape(-1), x.shape[1]
    amaxes, _, scales, factors, strips = _room(layout)
    scale_lanes, factor_lanes = np.empty(_lanes(layout), np.float32), np.empty(_lanes(layout), np.float32)
    for group in range(start, stop):
        r0, r1, k0, size = bounds(group, x.shape, layout)
        largest_magnitudes(flat, columns, r0, r1, k0, size, layout, amaxes, strips)
        if real_scales(amaxes, scales, factors, (size + layout.inner - 1) // layout.inner, p, sg):
            stop = group
            break
        per_lane(scales, scale_lanes, layout.inner)
        per_lane(factors, factor_lanes, layout.inner)
        for r in range(r0, r1):
            _real_row(flat, values, r * columns + k0, size, scale_lanes, factor_lanes, p, g, layout)
    return int64(stop)


@kernel
def quantize_stochastic(x, y, g, p, sg, w, layout, start, stop):
    """Quantise groups of blocks stochastically under scales of either kind."""
    flat, values, columns = x.reshape(-1), y.reshape(-1), x.shape[1]
    room, words = _room(layout), np.empty(layout.inner * layout.group + 128, np.uint32)
    scales, factors = np.empty(_lanes(layout), np.float32), np.empty(_lanes(layout), np.float32)
    for group in range(start, stop):
        r0, r1, k0, size = bounds(group, x.shape, layout)
        if _any_scales(flat, columns, r0, r1, k0, size, p, sg, layout, room):
            stop = group
            break
        per_lane(room[2], scales, layout.inner)
        per_lane(room[3], factors, layout.inner)
        for r in range(r0, r1):
            at = r * columns + k0
            fill_words(at, size, w, words)
            _stochastic_row(flat, values, at, at, size, words, scales, factors, p.decode_scale, g, layout)
    return int64(stop)


# Elements as codes. A row of a group is first rounded into values, which stay in the first-level cache; these then
# become codes, a loop each that the compiler vectorises.


@device
def _begin_group(x, shape, steps, group, p, sg, layout, room, factors):
    """Write the scales of a group's blocks to ``steps`` and a factor for each column to ``factors``.

    Return the bounds of the group and how many of its blocks must be left.
    """
    amaxes, _, scales, block_factors, _ = room
    r0, r1, k0, size = bounds(group, shape, layout)
    refused = _any_scales(x, shape[1], r0, r1, k0, size, p, sg, layout, room)
    row, first = r0 // layout.outer, k0 // layout.inner
    for b in range((size + layout.inner - 1) // layout.inner):
        is_lowest = p.rule != AMAX and amaxes[b] == int32(0)
        steps[row, first + b] = float32_of(_SCALE_OF_ZEROS) if is_lowest else scales[b]
    per_lane(block_factors, factors, layout.inner)
    return r0, r1, k0, size, refused


@device
def _scaled_row(x, y, first, size, factors, layout):
    """Multiply elements from ``first`` on by their factors: an element's, or that of all."""
    for start in range(0, size, factors.size):
        base, to, count = uint64(first + start), uint64(start), min(factors.size, size - start)
        _prefetch(x, first + start, count, layout)
        for i in range(count):
            y[to + uint64(i)] = float32(x[base + uint64(i)] * factors[i])


def _encoder(code_of):  # type: ignore[no-untyped-def]
    """Return a kernel that encodes groups of blocks; ``code_of(element, how)`` takes elements times their factors."""

    @kernel
    def encode(x, codes, steps, how, p, sg, layout, start, stop):  # type: ignore[no-untyped-def]
        flat, columns, values = x.reshape(-1), x.shape[1], np.empty(layout.inner * layout.group, np.float32)
        room, factors = _room(layout), np.empty(_lanes(layout), np.float32)
        for group in range(start, stop):
            r0, r1, k0, size, refused = _begin_group(flat, x.shape, steps, group, p, sg, layout, room, factors)
            if refused:
                return int64(group)
            for r in range(r0, r1):
                result = codes[r, k0 : k0 + size]
                _scaled_row(flat, values, r * columns + k0, size, factors, layout)
                for i in range(size):
                    result[i] = code_of(values[i], how)
        return int64(stop)

    return encode


@device
def _nearest_code(element, how):
    g, c = how
    return code_of_value(saturated(element, g.min_binade, g.limit, g.limit_negative, g), c)


encode_nearest, encode_tabled = _encoder(_nearest_code), _encoder(code_of_number)


@kernel
def encode_stochastic(x, codes, steps, g, c, p, sg, w, layout, start, stop):
    """Encode groups of blocks, rounding stochastically."""
    flat, columns, values = x.reshape(-1), x.shape[1], np.empty(layout.inner * layout.group, np.float32)
    room, words = _room(layout), np.empty(layout.inner * layout.group + 128, np.uint32)
    ones, factors = np.full(_lanes(layout), _ONE), np.empty(_lanes(layout), np.float32)
    for group in range(start, stop):
        r0, r1, k0, size, refused = _begin_group(flat, x.shape, steps, group, p, sg, layout, room, factors)
        if refused:
            return int64(group)
        for r in range(r0, r1):
            at, result = r * columns + k0, codes[r, k0 : k0 + size]
            fill_words(at, size, w, words)
            _stochastic_row(flat, values, at, 0, size, words, ones, factors, _ONE, g, layout)
            for i in range(size):
                result[i] = code_of_value(values[i], c)
    return int64(stop)
