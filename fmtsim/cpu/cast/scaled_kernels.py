# SPDX-License-Identifier: Apache-2.0
"""Kernels of scaled casts on float32: largest magnitudes of blocks, their scales, and elements as values or codes.

``scaled.py`` runs them for block formats whose elements saturate, rounded to nearest even, stochastically or by table.
A group of blocks side by side takes all three steps while it is in the first-level cache. Every kernel casts groups
``start ... stop - 1`` and returns the first that it cannot take, or ``stop``: blocks with NaN, Inf or scales at
float32's limits are left to the torch engine.

Loops of constant 16 lanes, and long flat ones, are what the compiler vectorises. Blocks of one column (those down the
columns of a row-major matrix) have a scale for each neighbour, so that their loops run along a row as well.
"""

from typing import NamedTuple

import numpy as np
from numpy import float32, int32, int64, uint64

from fmtsim.cpu.cast.codes import code_of_number, code_of_value
from fmtsim.cpu.cast.elements import limited, magic_addition, nearest_magic, stochastic_steps
from fmtsim.cpu.cast.grid import fill_words
from fmtsim.cpu.runtime.jit import bits32, borrowing, device, float32_of, kernel, max32, min32, prefetch
from fmtsim.cpu.runtime.strips import fence, put, repeat, strip_amaxes
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.element import FloatFormat, IntFormat

FLOOR, CEIL, RCEIL, EVEN, AMAX = range(5)
RECIPROCAL, ENCODE, TWO_LEVEL = range(3)
_RULES = {"floor": FLOOR, "ceil": CEIL, "rceil": RCEIL, "even": EVEN, "amax": AMAX}
_ARITHMETIC = {"reciprocal": RECIPROCAL, "encode": ENCODE}

FLT_MAX = np.float32(3.4028234663852886e38)
_ONE = float32(1)


class ScaleParameters(NamedTuple):
    """How kernels make a scale of a block's largest magnitude.

    Attributes:
        rule, arithmetic: The numbers above of a format's scale rule, and of the order of operations of a real scale.
        max, reciprocal_max: The element's largest value m, and RN32(1 / m).
        max_exponent, mantissa_bits: Of the element.
        plain: The scale is stored in float32, so that it is not rounded.
        encode_scale, decode_scale: Those of the whole tensor in a two-level format, else 1.
    """

    rule: int
    arithmetic: int
    max: np.float32
    reciprocal_max: np.float32
    max_exponent: int
    mantissa_bits: int
    plain: bool
    encode_scale: np.float32
    decode_scale: np.float32


def with_tensor_scale(p: ScaleParameters, fmt: BlockFormat, tensor_amax: float) -> ScaleParameters:
    """Return the parameters of a two-level format for a tensor of that largest finite magnitude."""
    with np.errstate(all="ignore"):
        amax = min(np.float32(tensor_amax), FLT_MAX)
        quotient = np.float32(np.float32(fmt.scale.max) * p.max) / amax if amax > 0 else _ONE
        encode_scale = min(quotient, FLT_MAX) if quotient > 0 else _ONE
        return p._replace(encode_scale=encode_scale, decode_scale=_ONE / encode_scale)


def scale_parameters(fmt: BlockFormat) -> ScaleParameters:
    """Return the parameters of a block format, without those of a tensor."""
    with np.errstate(over="ignore"):
        largest = np.float32(fmt.element.max)
    return ScaleParameters(
        rule=_RULES[fmt.scale_rule],
        arithmetic=TWO_LEVEL if fmt.tensor_scale else _ARITHMETIC["encode" if fmt.power_of_two else fmt.arithmetic],
        max=largest,
        reciprocal_max=np.float32(1.0 / float(largest if fmt.tensor_scale else fmt.element.max)),  # of RN32(m), or of m
        max_exponent=fmt.element.max_exponent,
        mantissa_bits=fmt.element.mantissa_bits if isinstance(fmt.element, FloatFormat | IntFormat) else 0,
        plain=fmt.scale.name == "fp32",
        encode_scale=_ONE,
        decode_scale=_ONE,
    )


_MAGNITUDE = int32(0x7FFFFFFF)
_MANTISSA = int32(0x007FFFFF)
_NORMAL = int32(0x00800000)
_INF = int32(0x7F800000)
_ONE_BITS = int32(0x3F800000)
_FLT_MIN = np.float32(1.1754943508222875e-38)


class Layout(NamedTuple):
    """Blocks of a matrix and the range of power-of-two scales within which float32 arithmetic is exact.

    Attributes:
        outer, inner: Rows and columns of a block.
        group: Blocks side by side that go through the phases together.
        lowest, highest: Smallest and largest exponent of a scale that the fast kernel takes.
        preset: Bits of an amax that all blocks share, or -1.
        streams: Values go past the caches; every group then begins at a cache line.
    """

    outer: int
    inner: int
    group: int
    lowest: np.int32
    highest: np.int32
    preset: np.int32
    streams: bool


@borrowing
def _raise_amaxes(x, first, size, inner, amaxes, strips):
    """Raise ``amaxes`` to the largest magnitudes of blocks of a row, as float32 bits (NaN and Inf are the largest)."""
    start = uint64(first)
    if inner == 1:
        for i in range(size):
            amaxes[i] = max32(amaxes[i], bits32(x[start + uint64(i)]) & _MAGNITUDE)
        return
    whole = size // inner
    if inner % 16 == 0:
        # 1. those of strips of 16 lanes, 16 strips at a time
        count, each = size // 16, inner // 16
        for strip in range(0, count - 15, 16):
            strip_amaxes(x, first + 16 * strip, strips, strip)
        for strip in range(count - count % 16, count):
            base, amax = start + uint64(16 * strip), int32(0)
            for j in range(16):
                amax = max32(amax, bits32(x[base + uint64(j)]) & _MAGNITUDE)
            strips[strip] = amax
        # 2. of blocks
        if each == 1:
            for b in range(whole):
                amaxes[b] = max32(amaxes[b], strips[b])
        else:
            for b in range(whole):
                amax = amaxes[b]
                for j in range(each):
                    amax = max32(amax, strips[uint64(b * each + j)])
                amaxes[b] = amax
    else:
        for b in range(whole):
            base, amax = start + uint64(b * inner), int32(0)
            for j in range(inner):
                amax = max32(amax, bits32(x[base + uint64(j)]) & _MAGNITUDE)
            amaxes[b] = max32(amaxes[b], amax)
    for i in range(whole * inner, size):  # the last block may be short
        amaxes[whole] = max32(amaxes[whole], bits32(x[start + uint64(i)]) & _MAGNITUDE)


@borrowing
def binary_scales(amaxes, shifts, count, p, layout):
    """Turn amax bits into scale exponents, as exponent bits; return how many blocks the fast kernel cannot take."""
    refused = int32(0)
    for b in range(count):
        bits = amaxes[b]
        # 1. what the exponent is taken from: amax / m, or amax plus half a last place of the element
        if p.rule == RCEIL:
            bits = bits32(float32(float32_of(bits) * p.reciprocal_max))
        elif p.rule == EVEN:
            bits += int32(1) << int32(22 - p.mantissa_bits)
        # 2. its floor, or its ceiling where a mantissa bit is set, less the element's exponent (amax / m has lost it)
        exponent = int32((bits >> int32(23)) - int32(127))
        if (p.rule == RCEIL or p.rule == CEIL) and bits & _MANTISSA:
            exponent = int32(exponent + int32(1))
        if p.rule != RCEIL:
            exponent = int32(exponent - int32(p.max_exponent))
        # 3. zeros are zeros under any scale; NaN, Inf, subnormal numbers and extreme scales are refused
        exponent = int32(0) if amaxes[b] == int32(0) else exponent
        strange = amaxes[b] >= _INF or (bits < _NORMAL and amaxes[b] != int32(0))
        refused = int32(refused + int32(strange or exponent < layout.lowest or exponent > layout.highest))
        shifts[b] = int32(exponent << int32(23))
    return refused


@borrowing
def real_scales(amaxes, scales, factors, count, p, sg):
    """Turn amax bits into scales and factors; return how many blocks hold NaN or Inf."""
    refused = int32(0)
    step = float32(p.encode_scale * p.reciprocal_max)
    for b in range(count):
        refused = int32(refused + int32(amaxes[b] >= _INF))
        amax = float32_of(min32(amaxes[b], int32(_INF - int32(1))))
        factors[b] = amax
        # 1. the scale as a real number, each operation rounded to float32
        if p.arithmetic == TWO_LEVEL:
            scale = min(float32(amax * step), FLT_MAX)
        elif p.arithmetic == ENCODE:
            scale = float32(_ONE / min(float32(p.max / amax), FLT_MAX))
        else:
            scale = min(max(float32(amax / p.max), _FLT_MIN), FLT_MAX)
        scales[b] = _ONE if p.arithmetic != TWO_LEVEL and amax == float32(0) else scale
    # 2. rounded to the format that stores it
    if not p.plain:
        for b in range(count):
            scales[b] = nearest_magic(scales[b], sg, False)
    # 3. the factor that elements are multiplied with: the reciprocal of the stored scale, or the exact m / amax
    for b in range(count):
        product = float32(scales[b] * p.decode_scale)
        factor = FLT_MAX if product == float32(0) else min(float32(_ONE / product), FLT_MAX)
        if p.arithmetic == ENCODE and p.plain:
            factor = _ONE if factors[b] == float32(0) else min(float32(p.max / factors[b]), FLT_MAX)
        factors[b] = factor
    return refused


@borrowing
def powers(shifts, scales, factors, count):
    """Turn exponent bits of power-of-two scales into the scales and their reciprocals."""
    for b in range(count):
        scales[b] = float32_of(int32(shifts[b] + _ONE_BITS))
        factors[b] = float32_of(int32(_ONE_BITS - shifts[b]))


@device
def saturated(value, min_binade, limit, limit_negative, g):
    """Round a finite float32 to nearest even on the grid whose smallest binade is given, saturating at the limits."""
    bits = bits32(value)
    rounded = magic_addition(limited(bits, limit, limit_negative), min_binade, g.magic_shift)
    return float32(float32_of(bits32(rounded) | (bits & ~_MAGNITUDE)) + g.zero)


@borrowing
def per_lane(values, lanes, inner):
    """Repeat a value a block to one a column of the group; lanes that are fewer than these serve one block."""
    if inner >= lanes.size:
        lanes[:] = values[0]
        return
    count, each = lanes.size // inner, inner // 16
    if inner % 16:
        for b in range(count):
            for j in range(inner):
                lanes[uint64(b * inner + j)] = values[b]
    elif each == 1:
        for b in range(count):
            repeat(values[uint64(b)], lanes, 16 * b)
    else:
        for b in range(count):
            for strip in range(each):
                repeat(values[uint64(b)], lanes, 16 * (b * each + strip))


@device
def bounds(group, shape, layout):
    """Return the rows of a group of blocks, its first column and its columns."""
    width = layout.inner * layout.group
    across = (shape[1] + width - 1) // width
    r0, k0 = (group // across) * layout.outer, (group % across) * width
    return r0, min(r0 + layout.outer, shape[0]), k0, min(width, shape[1] - k0)


@borrowing
def largest_magnitudes(x, columns, r0, r1, k0, size, layout, amaxes, strips):
    """Write the largest magnitudes of a group's blocks, as bits; the preset one where all blocks share it.

    x is flat, with ``columns`` a row; ``strips`` is room for one number a strip of 16 elements.
    """
    amaxes[:] = max(layout.preset, int32(0))
    if layout.preset < int32(0):
        for r in range(r0, r1):
            _raise_amaxes(x, r * columns + k0, size, layout.inner, amaxes, strips)


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


@borrowing
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


@borrowing
def _prefetch(x, first, size, layout):
    """Prefetch the cache lines that lie a group behind these elements."""
    for i in range(first, first + size, 16):
        prefetch(x, i + layout.inner * layout.group)


@borrowing
def _put_values(buffer, y, first, count, layout):
    """Copy values to y[first] and on, in cache lines as far as those are whole."""
    for i in range(0, count - 15, 16):
        put(buffer, i, y, first + i, layout.streams)
    for i in range(count - count % 16, count):
        y[uint64(first) + uint64(i)] = buffer[uint64(i)]


@borrowing
def _binary_row(x, y, first, size, shifts, g, layout, buffer):
    """Quantise ``size`` elements from ``first`` on under the exponents of ``shifts``: an element's, or of all."""
    for start in range(0, size, shifts.size):
        base, count = uint64(first + start), min(shifts.size, size - start)
        _prefetch(x, first + start, count, layout)
        for i in range(count):
            buffer[uint64(i)] = _binary_value(x[base + uint64(i)], shifts[i], g)
        _put_values(buffer, y, first + start, count, layout)


@borrowing
def _real_row(x, y, first, size, scales, factors, p, g, layout, buffer):
    """Quantise elements under real scales, like ``_binary_row``."""
    for start in range(0, size, scales.size):
        base, count = uint64(first + start), min(scales.size, size - start)
        _prefetch(x, first + start, count, layout)
        for i in range(count):
            buffer[uint64(i)] = _real_value(x[base + uint64(i)], scales[i], factors[i], p, g)
        _put_values(buffer, y, first + start, count, layout)


@borrowing
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
    lanes, buffer = np.empty(_lanes(layout), np.int32), np.empty(_lanes(layout), np.float32)
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
            _binary_row(flat, values, r * columns + k0, size, lanes, g, layout, buffer)
    fence()
    return int64(stop)


@kernel
def quantize_real(x, y, g, p, sg, layout, start, stop):
    """Quantise groups of blocks to nearest even under real scales."""
    flat, values, columns = x.reshape(-1), y.reshape(-1), x.shape[1]
    amaxes, _, scales, factors, strips = _room(layout)
    scale_lanes, factor_lanes = np.empty(_lanes(layout), np.float32), np.empty(_lanes(layout), np.float32)
    buffer = np.empty(_lanes(layout), np.float32)
    for group in range(start, stop):
        r0, r1, k0, size = bounds(group, x.shape, layout)
        largest_magnitudes(flat, columns, r0, r1, k0, size, layout, amaxes, strips)
        if real_scales(amaxes, scales, factors, (size + layout.inner - 1) // layout.inner, p, sg):
            stop = group
            break
        per_lane(scales, scale_lanes, layout.inner)
        per_lane(factors, factor_lanes, layout.inner)
        for r in range(r0, r1):
            _real_row(flat, values, r * columns + k0, size, scale_lanes, factor_lanes, p, g, layout, buffer)
    fence()
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


@borrowing
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


@borrowing
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
        flat, result, columns = x.reshape(-1), codes.reshape(-1), x.shape[1]
        values = np.empty(layout.inner * layout.group, np.float32)
        room, factors = _room(layout), np.empty(_lanes(layout), np.float32)
        for group in range(start, stop):
            r0, r1, k0, size, refused = _begin_group(flat, x.shape, steps, group, p, sg, layout, room, factors)
            if refused:
                return int64(group)
            for r in range(r0, r1):
                at = uint64(r * columns + k0)
                _scaled_row(flat, values, r * columns + k0, size, factors, layout)
                for i in range(size):
                    result[at + uint64(i)] = code_of(values[i], how)
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
    flat, result, columns = x.reshape(-1), codes.reshape(-1), x.shape[1]
    values = np.empty(layout.inner * layout.group, np.float32)
    room, words = _room(layout), np.empty(layout.inner * layout.group + 128, np.uint32)
    ones, factors = np.full(_lanes(layout), _ONE), np.empty(_lanes(layout), np.float32)
    for group in range(start, stop):
        r0, r1, k0, size, refused = _begin_group(flat, x.shape, steps, group, p, sg, layout, room, factors)
        if refused:
            return int64(group)
        for r in range(r0, r1):
            at = r * columns + k0
            fill_words(at, size, w, words)
            _stochastic_row(flat, values, at, 0, size, words, ones, factors, _ONE, g, layout)
            for i in range(size):
                result[uint64(at) + uint64(i)] = code_of_value(values[i], c)
    return int64(stop)
