# SPDX-License-Identifier: Apache-2.0
"""Float64 tensors as exact real numbers: into them, out of them, float32 arithmetic inside them, and ln and exp.

Every float32 number is normal in float64, so a float32 operation is the float64 one followed by ``round32``: products
of two are exact, and quotients have more than twice the precision, so the second rounding changes nothing. Subnormal
float32 numbers are taken apart as integers: a process that flushes them to zero gets the same bits (but for scales of
blocks, which are operations of float32: fmtsim/scaling/scales.py).
"""

import torch

from fmtsim.rounding.elementary import (
    EXP_COEFFICIENTS,
    EXP_OVERFLOW,
    EXP_UNDERFLOW,
    INV_LN2,
    LN2_HI,
    LN2_LO,
    LN_COEFFICIENTS,
    ROUND_TO_INTEGER,
    SQRT_HALF,
)
from fmtsim.support.float64 import float64
from fmtsim.support.float64 import from_bits as float64_of
from fmtsim.torch_engine import floats
from fmtsim.torch_engine.floats import FP64, LAYOUTS, NEAREST, bits_of, from_bits

FLT_MIN = 2.0**-126

_STEPS = 2.0**149  # float32 subnormals are multiples of 2**-149
_TINY = 2.0**-900
_NAN32 = 0x7FC00000
_NAN64 = 0x7FF8000000000000


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return float16, bfloat16, float32 or float64 elements as float64, exactly; NaN stays some NaN."""
    if x.dtype in (torch.float64, torch.float16):
        return float64(x)
    x = x.to(torch.float32)
    magnitude = bits_of(x) & 0x7FFFFFFF
    wide = float64(x)
    tiny = torch.copysign(magnitude.to(torch.float64) * (1 / _STEPS), wide)
    return torch.where(magnitude < 1 << 23, tiny, wide)


def narrow(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 elements once, to nearest even; beyond the range is Inf, every NaN the canonical one."""
    if dtype == torch.float64:
        return float64_of(torch.where(torch.isnan(y), _NAN64, bits_of(y)))
    if dtype == torch.float32:
        bits = bits_of(y.to(torch.float32))
        sign = (bits_of(y) >> 63).to(torch.int32) << 31
        magnitude = y.abs()
        steps = torch.round(magnitude.clamp(max=FLT_MIN) * _STEPS).to(torch.int32)
        bits = torch.where(magnitude < FLT_MIN, steps | sign, bits)
        return torch.where(torch.isnan(y), _NAN32, bits).view(torch.float32)
    return from_bits(floats.convert(bits_of(y), FP64, LAYOUTS[dtype], NEAREST, "ieee"), dtype)


def round32(y: torch.Tensor) -> torch.Tensor:
    """Round float64 elements to float32 values, kept in float64."""
    return widen(narrow(y, torch.float32))


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """Return the float64 quotient of tensors or numbers, one of which is a tensor, correctly rounded.

    torch multiplies by a reciprocal where the numerator is a Python number, or the denominator one on CUDA; tensors on
    both sides are divided as IEEE 754 says.
    """
    if isinstance(a, float):
        assert not isinstance(b, float)
        return torch.div(torch.full_like(b, a), b)
    return torch.div(a, torch.full_like(a, b) if isinstance(b, float) else b)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return ``2**exponent`` in float64 for integers between -1022 and 1023."""
    return float64_of((exponent.to(torch.int64) + 1023) << 52)


def product(value: torch.Tensor, scale: torch.Tensor, significant_bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value * scale`` rounded once to a dtype.

    Args:
        value: float64.
        scale: Float32 values in float64, broadcastable.
        significant_bits: How many a value may have. Up to 29 the float64 product is exact; above that it is rounded to
            odd, which keeps the rounding to a narrower dtype right.
        dtype: The dtype of the result.
    """
    if significant_bits <= 29 or dtype == torch.float64:
        return narrow(value * scale, dtype)
    high = float64_of(bits_of(value) & -(1 << 26))
    low = torch.where(high == value, 0.0, value - high)  # Inf has no low part
    a, b = high * scale, low * scale  # 27 + 24 and 26 + 24 bits: exact
    return narrow(torch.where(b == 0, a, add_to_odd(a, b)), dtype)  # a alone keeps -0


def add_to_odd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x + y`` in float64, rounded to odd: an inexact sum has its lowest bit set."""
    # 1. the rounded sum and its exact error (Knuth's TwoSum)
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    # 2. an inexact even sum moves to its odd neighbour, on the side of the exact sum
    bits = bits_of(total)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error.abs() > 0) & ((bits & 1) == 0)  # the error of Inf is NaN
    return float64_of(torch.where(inexact, bits + toward, bits))


def tiny_kept(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return ``x / 2**exponent`` in float64, exact but for magnitudes below 2**-900, which become that.

    Comparisons with float32 values and their midpoints cannot tell the difference; a result of zero would be one.
    """
    wide = widen(x)
    scaled = wide * power_of_two(-exponent)
    smallest = torch.copysign(torch.full_like(scaled, _TINY), wide)
    return torch.where((wide != 0) & (scaled.abs() < _TINY), smallest, scaled)


# The logarithm and the exponential of fmtsim/rounding/elementary.py, step by step the same.


def ln(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive, finite, normal float64 elements; others give some number."""
    # 1. x = 2**k * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    bits = x.view(torch.int64)
    k = (bits >> 52) - 1022
    m = float64_of((bits & ((1 << 52) - 1)) | (1022 << 52))
    low = m < SQRT_HALF
    m = torch.where(low, m + m, m)
    power = float64(k - low.to(torch.int64))
    f = m - 1.0
    # 2. a polynomial of z = (f / (2 + f))**2
    s = divide(f, f + 2.0)
    z = s * s
    p = torch.full_like(z, LN_COEFFICIENTS[0])
    for coefficient in LN_COEFFICIENTS[1:]:
        p = p * z
        p = p + coefficient
    p = p * z
    # 3. ln(1 + f) + k ln 2, smallest terms first
    t = s * (f - p)
    t = t - power * LN2_LO
    t = f - t
    return power * LN2_HI + t


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return the exponential of float64 elements; NaN stays NaN, beyond the range it is Inf or 0."""
    nan, over, under = torch.isnan(x), x > EXP_OVERFLOW, x < EXP_UNDERFLOW
    safe = torch.where(nan | over | under, 0.0, x)
    # 1. x = n ln 2 + r
    n = safe * INV_LN2
    n = n + ROUND_TO_INTEGER
    n = n - ROUND_TO_INTEGER
    r = safe - n * LN2_HI
    r = r - n * LN2_LO
    # 2. a polynomial of r
    p = torch.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r
        p = p + coefficient
    p = r * r * p
    p = r + p
    p = 1.0 + p
    # 3. times 2**n in two factors, the first product exact: 2**n itself may lie outside the normal range
    exponent = n.to(torch.int64)
    half = exponent >> 1
    result = p * power_of_two(half) * power_of_two(exponent - half)
    result = torch.where(over, float("inf"), torch.where(under, 0.0, result))
    return torch.where(nan, x, result)
