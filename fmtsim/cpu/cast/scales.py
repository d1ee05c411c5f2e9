# SPDX-License-Identifier: Apache-2.0
"""Largest magnitudes of blocks and the scales that a format makes of them: steps 1 and 2 of scaled_kernels.py."""

from typing import NamedTuple

import numpy as np
from numpy import float32, int32, uint64

from fmtsim.cpu.cast.elements import limited, magic_addition, nearest_magic
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, max32, min32
from fmtsim.cpu.runtime.strips import repeat, strip_amaxes
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import FloatFormat, IntFormat

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
        arithmetic=TWO_LEVEL if fmt.tensor_scale else _ARITHMETIC[fmt.arithmetic],
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
    """

    outer: int
    inner: int
    group: int
    lowest: np.int32
    highest: np.int32
    preset: np.int32


@device
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


@device
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
            exponent += int32(1)
        if p.rule != RCEIL:
            exponent -= int32(p.max_exponent)
        # 3. zeros are zeros under any scale; NaN, Inf, subnormal numbers and extreme scales are refused
        exponent = int32(0) if amaxes[b] == int32(0) else exponent
        strange = amaxes[b] >= _INF or (bits < _NORMAL and amaxes[b] != int32(0))
        refused += int32(strange or exponent < layout.lowest or exponent > layout.highest)
        shifts[b] = int32(exponent << int32(23))
    return refused


@device
def real_scales(amaxes, scales, factors, count, p, sg):
    """Turn amax bits into scales and factors; return how many blocks hold NaN or Inf."""
    refused = int32(0)
    step = float32(p.encode_scale * p.reciprocal_max)
    for b in range(count):
        refused += int32(amaxes[b] >= _INF)
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


@device
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


@device
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


@device
def largest_magnitudes(x, columns, r0, r1, k0, size, layout, amaxes, strips):
    """Write the largest magnitudes of a group's blocks, as bits; the preset one where all blocks share it.

    x is flat, with ``columns`` a row; ``strips`` is room for one number a strip of 16 elements.
    """
    amaxes[:] = max(layout.preset, int32(0))
    if layout.preset < int32(0):
        for r in range(r0, r1):
            _raise_amaxes(x, r * columns + k0, size, layout.inner, amaxes, strips)
