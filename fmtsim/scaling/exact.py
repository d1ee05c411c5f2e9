# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic of the scaling oracle, and its roundings to binary32."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from fmtsim.formats.block import FP32, BlockFormat
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.oracle import Real, floor_log2, power_of_two, round_value

FLT_MAX = Fraction((1 << 24) - 1) * power_of_two(104)
FLT_MIN = power_of_two(-126)
INFINITE = power_of_two(1024)  # in a quotient with a float32 number: 0, or more than FLT_MAX, once that is rounded


def ceil_log2(x: Fraction) -> int:
    """Return the exponent of the power of two that is not below x."""
    e = floor_log2(x)
    return e if x == power_of_two(e) else e + 1


def rounded(x: Real, fmt: FloatFormat) -> float:
    """Round to nearest even, by IEEE 754's rule beyond the largest number."""
    return round_value(x, fmt, "nearest_even", "ieee")


def rn32(x: Fraction) -> Fraction:
    """Round to binary32 a number that stays within its range."""
    return Fraction(rounded(x, FP32))


def rn32_or_infinite(x: Fraction) -> Fraction:
    """Round a positive number to binary32; beyond its range it is ``INFINITE``."""
    value = rounded(x, FP32)
    return Fraction(value) if math.isfinite(value) else INFINITE


def clamped32(x: Fraction) -> Fraction:
    """Return ``min(RN32(x), FLT_MAX)`` of a number that is not negative."""
    return rn32(x) if x <= FLT_MAX else FLT_MAX


def times(x: float, factor: Fraction, fmt: FloatFormat) -> float:
    """Return ``x * factor`` rounded once; the factor is finite and not negative, Inf times 0 is NaN."""
    if math.isinf(x) and factor == 0:
        return math.nan
    if x == 0 or not math.isfinite(x):
        return x
    return rounded(Fraction(x) * factor, fmt) if factor else math.copysign(0.0, x)


def operated32(operation: Callable[[Any, Any], Any], a: float, b: float) -> float:
    """Return the result of an arithmetic operation of floats rounded to binary32; the sign of a zero is lost."""
    if math.isfinite(a) and math.isfinite(b):
        return rounded(operation(Fraction(a), Fraction(b)), FP32)
    return float(operation(a, b))


def scale_value(x: Fraction, fmt: BlockFormat) -> Fraction:
    """Round to the format that stores a format's scales."""
    return Fraction(round_value(x, fmt.scale, "nearest_even", "saturate"))


def reciprocal(scale: Fraction) -> Fraction:
    """Return ``min(RN32(1 / scale), FLT_MAX)``."""
    return clamped32(1 / scale) if scale else FLT_MAX
