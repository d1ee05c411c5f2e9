# SPDX-License-Identifier: Apache-2.0
"""The special-function unit of Hopper (MUFU): ex2, lg2, rcp, rsqrt, sqrt, sin, cos and tanh, bit for bit.

The unit interpolates: a segment's three coefficients and the low bits x of the argument give c0 + c1 x + c2 x^2 in
fixed point. c0 has 26 bits, c1 16 and c2 10 (tanh: 14); the square drops the partial products of its lower columns.
Structure: Oberman and Siu, "A high-performance area-efficient multifunction interpolator" (ARITH 2005). The
coefficients in ``support/mufu.csv`` are not published: they are the only integers for which no result of an H200
(tanh: H100) differs (``tests/machine/test_machine.py``; all 2^32 arguments: docs/evidence.md).
"""

import numpy as np
from numpy import float32, float64, int32, int64

from fmtsim.cpu.runtime.jit import bits32, device, float32_of
from fmtsim.support.mufu_tables import coefficients

NAN, INFINITY = int32(0x7FFFFFFF), int32(0x7F800000)  # the one NaN that the unit returns
SIGN, FRACTION, ONE = int32(-0x80000000), int32(0x7FFFFF), int32(0x3F800000)
TURNS = float64(float32(0.15915493667125702))  # sin and cos: 1 / (2 pi), multiplied in front of the unit


# Log2 of c0, c1 and c2 in units of 2^-18 of the last place of a result in [1, 2), and what every segment adds: a result
# is the sum's integer part.
_SCALES = {
    "ex2": (16, 3, 3, 48912), "rcp": (16, 2, 3, 16184), "rsq0": (16, 2, 4, 65532), "rsq1": (16, 2, 4, 65532),
    "sqrt0": (16, 1, 2, 65534), "sqrt1": (16, 2, 2, 65532), "lg2": (15, 3, 4, 6696), "sin": (16, 4, 4, 0),
    "tanh": (17, 0, 2, 0),
}  # fmt: skip
_INTEGERS = coefficients()
# float64 [segments, 3] of each function: exact integers, whose sums stay below 2^53
_TABLES = {
    name: (np.array(_INTEGERS[name]) * np.array([1 << c0, 1 << c1, 1 << c2]) + [bias, 0, 0]).astype(np.float64)
    for name, (c0, c1, c2, bias) in _SCALES.items()
}
_EX2, _RCP, _LG2, _SIN, _TANH = (_TABLES[name] for name in ("ex2", "rcp", "lg2", "sin", "tanh"))
_RSQ = np.concatenate([_TABLES["rsq0"], _TABLES["rsq1"]])  # arguments in [1, 2), then in [2, 4)
_SQRT = np.concatenate([_TABLES["sqrt0"], _TABLES["sqrt1"]])
# tanh: the low bits that a segment leaves in each binade from 2^-8 to 4, and the binade's first segment
_TANH_LOW = np.array([23, 23, 23, 22, 22, 21, 21, 21, 20, 19, 20], np.int32)
_TANH_FIRST = np.cumsum(np.append(0, 1 << (23 - _TANH_LOW[:-1]))).astype(np.int32)


@device
def _truncated_square(x):
    """Return x^2 / 2^19 of 17 bits, without the partial products of columns below 2^19."""
    square = int32(0)
    for i in range(10, 17):
        # bit i times the bits j of [18 - i, i), twice, and bit i times itself
        partial = ((x & int32((1 << i) - 1)) >> int32(18 - i)) + int32(1 << (2 * i - 19))
        square += partial * ((x >> int32(i)) & int32(1))
    return square


@device
def _interpolate(table, segment, x):
    """Return c0 + c1 x + c2 x^2 of a segment, for the 17 low bits x of an argument, in the units of ``_Scale``."""
    total = table[segment, 0] + table[segment, 1] * float64(x) + table[segment, 2] * float64(_truncated_square(x))
    return int64(total)


@device
def _compose(sign, significand, exponent):
    """Return significand * 2^(exponent - 23) as float32; below 2^-126 a zero, above the largest number Inf."""
    bits = ((exponent + int32(126)) << int32(23)) + significand  # the significand's top bit adds 1 to the exponent
    bits = int32(0) if exponent < int32(-126) else bits
    bits = INFINITY if exponent > int32(127) else bits
    return float32_of(bits | sign)


@device
def _truncate(sign, magnitude, exponent):
    """Return an integer * 2^exponent as float32, cut off to 24 bits."""
    if magnitude == int64(0):
        return float32_of(sign)
    # 1. float64 has 53 bits for magnitudes below 2^44: exact; 2. keep the 24 upper bits of its significand
    wide = float64(magnitude)
    y = float32(wide)
    if float64(y) > wide:
        y = float32_of(bits32(y) - int32(1))
    return _compose(sign, (bits32(y) & FRACTION) | int32(0x800000), (bits32(y) >> int32(23)) - int32(127) + exponent)


@device
def ex2(x):
    """Return ex2.approx.ftz.f32: 2^x."""
    bits = bits32(x)
    magnitude = bits & int32(0x7FFFFFFF)
    if magnitude > INFINITY:
        return float32_of(NAN)
    negative = bits < int32(0)
    # 1. cut |x| off to a multiple of 2^-23: integer and fraction
    fixed = int64(min(float64(float32_of(magnitude)), float64(512.0)) * float64(8388608.0))
    integer, fraction = int32(fixed >> int64(23)), int32(fixed) & FRACTION
    # 2. negative: the fraction's one's complement, one octave lower
    if negative:
        if fraction != int32(0):
            integer, fraction = -integer - int32(1), FRACTION - fraction
        else:
            return _compose(int32(0), int32(0x800000), -integer)
    # 3. interpolate 2^fraction, cut off to 24 bits
    total = _interpolate(_EX2, fraction >> int32(17), fraction & int32(0x1FFFF))
    return _compose(int32(0), int32(total >> int64(18)), integer)


@device
def rcp(x):
    """Return rcp.approx.ftz.f32: 1 / x."""
    bits = bits32(x)
    sign, magnitude = bits & SIGN, bits & int32(0x7FFFFFFF)
    if magnitude > INFINITY:
        return float32_of(NAN)
    if magnitude < int32(0x800000):  # zeros and subnormal numbers
        return float32_of(sign | INFINITY)
    exponent, fraction = (magnitude >> int32(23)) - int32(127), magnitude & FRACTION
    if magnitude == INFINITY:
        return float32_of(sign)
    if fraction == int32(0):
        return _compose(sign, int32(0x800000), -exponent)
    # the segment is the upper 7 bits; 16 bits stay, the top ones of 17
    total = _interpolate(_RCP, fraction >> int32(16), (fraction & int32(0xFFFF)) << int32(1))
    return _compose(sign, int32(total >> int64(18)), -exponent - int32(1))


@device
def rsqrt(x):
    """Return rsqrt.approx.ftz.f32: 1 / sqrt(x)."""
    bits = bits32(x)
    magnitude = bits & int32(0x7FFFFFFF)
    if magnitude < int32(0x800000):
        return float32_of((bits & SIGN) | INFINITY)
    if bits < int32(0) or magnitude > INFINITY:
        return float32_of(NAN)
    if magnitude == INFINITY:
        return float32(0.0)
    exponent, fraction = (magnitude >> int32(23)) - int32(127), magnitude & FRACTION
    odd = exponent & int32(1)
    half = (exponent - odd) >> int32(1)
    if fraction == int32(0) and odd == int32(0):
        return _compose(int32(0), int32(0x800000), -half)
    total = _interpolate(_RSQ, (fraction >> int32(17)) + (odd << int32(6)), fraction & int32(0x1FFFF))
    return _compose(int32(0), int32(total >> int64(18)), -half - int32(1))


@device
def sqrt(x):
    """Return sqrt.approx.ftz.f32."""
    bits = bits32(x)
    magnitude = bits & int32(0x7FFFFFFF)
    if magnitude < int32(0x800000):
        return float32_of(bits & SIGN)
    if bits < int32(0) or magnitude > INFINITY:
        return float32_of(NAN)
    if magnitude == INFINITY:
        return x
    exponent, fraction = (magnitude >> int32(23)) - int32(127), magnitude & FRACTION
    odd = exponent & int32(1)
    if fraction == int32(0) and odd == int32(0):
        return _compose(int32(0), int32(0x800000), exponent >> int32(1))
    total = _interpolate(_SQRT, (fraction >> int32(17)) + (odd << int32(6)), fraction & int32(0x1FFFF))
    return _compose(int32(0), int32(total >> int64(18)), (exponent - odd) >> int32(1))


@device
def lg2(x):
    """Return lg2.approx.ftz.f32: the logarithm to base 2, of 36 fraction bits before it is cut off."""
    bits = bits32(x)
    magnitude = bits & int32(0x7FFFFFFF)
    if magnitude < int32(0x800000):
        return float32_of(SIGN | INFINITY)
    if bits < int32(0) or magnitude > INFINITY:
        return float32_of(NAN)
    if magnitude == INFINITY or bits == ONE:
        return x if magnitude == INFINITY else float32(0.0)
    exponent, fraction = (magnitude >> int32(23)) - int32(127), magnitude & FRACTION
    total = _interpolate(_LG2, fraction >> int32(17), fraction & int32(0x1FFFF))
    fixed = (int64(exponent) << int64(36)) + (total >> int64(5))
    # a negative logarithm: the one's complement
    return _truncate(int32(0), fixed, int32(-36)) if fixed >= int64(0) else _truncate(SIGN, ~fixed, int32(-36))


@device
def _sine_of_turns(sign, turns, quadrants):
    """Return the sine of turns (of the product with ``TURNS``) moved by so many quadrants, with a sign."""
    # 1. cut off to 25 fraction bits: 2 of the quadrant, 23 within it
    fixed = int64((turns - np.floor(turns)) * float64(33554432.0))
    quadrant, fraction = int32(fixed >> int64(23)) + quadrants, int32(fixed) & FRACTION
    # 2. odd quadrants fall: the one's complement; the lower half plane is negative
    if quadrant & int32(1):
        fraction = FRACTION - fraction
    if quadrant & int32(2):
        sign ^= SIGN
    # 3. a fixed-point sine of 37 fraction bits, cut off to 24 bits
    total = _interpolate(_SIN, fraction >> int32(17), fraction & int32(0x1FFFF))
    return _truncate(sign, total >> int64(4), int32(-37))


@device
def _turns(x):
    """Return |x| / (2 pi), rounded to float32 toward zero."""
    exact = np.abs(float64(x)) * TURNS
    turns = float32(exact)
    return float64(float32_of(bits32(turns) - int32(1)) if float64(turns) > exact else turns)


@device
def sin(x):
    """Return sin.approx.ftz.f32."""
    bits = bits32(x)
    if (bits & INFINITY) == INFINITY:
        return float32_of(NAN)
    return _sine_of_turns(bits & SIGN, _turns(x), int32(0))


@device
def cos(x):
    """Return cos.approx.ftz.f32."""
    if (bits32(x) & INFINITY) == INFINITY:
        return float32_of(NAN)
    return _sine_of_turns(int32(0), _turns(x), int32(1))


@device
def tanh(x):
    """Return tanh.approx.f32, of 41 fraction bits before it is cut off; subnormal numbers are not flushed."""
    bits = bits32(x)
    sign, magnitude = bits & SIGN, bits & int32(0x7FFFFFFF)
    if magnitude > INFINITY:
        return float32_of(NAN)
    # 1. below 2^-8 the argument, from 8 on 1
    if magnitude < int32(0x3B800000):
        return x
    if magnitude >= int32(0x41000000):
        return float32_of(sign | ONE)
    # 2. the segment is the upper bits of the fraction; of the low ones the top 17 count
    binade, fraction = (magnitude >> int32(23)) - int32(119), magnitude & FRACTION
    low = _TANH_LOW[binade]
    rest = (fraction & ((int32(1) << low) - int32(1))) >> (low - int32(17))
    return _truncate(sign, _interpolate(_TANH, _TANH_FIRST[binade] + (fraction >> low), rest), int32(-41))
