# SPDX-License-Identifier: Apache-2.0
"""The logarithm and the exponential of ``fmtsim.rounding.elementary`` over arrays, step by step the same."""

import math

import torch
from numpy import float64, int64

from fmtsim.cpu.runtime.jit import bits64, device, float64_of, kernel
from fmtsim.cpu.runtime.pool import run
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

_FRACTION, _HALF = int64((1 << 52) - 1), int64(1022 << 52)
_INFINITY = math.inf


def ln(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive, finite, normal float64 elements; others give some number."""
    return _over(_ln, x)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return the exponential of float64 elements; NaN stays NaN, beyond the range it is Inf or 0."""
    return _over(_exp, x)


def _over(function, x):
    source = x.contiguous()
    out = torch.empty_like(source)
    x_flat, y_flat = source.view(-1).numpy(), out.view(-1).numpy()
    run(lambda start, stop: function(x_flat, y_flat, start, stop), x_flat.size, 64)
    return out


@kernel
def _ln(x, out, start, stop):
    for i in range(start, stop):
        out[i] = logarithm(x[i])


@kernel
def _exp(x, out, start, stop):
    for i in range(start, stop):
        out[i] = exponential(x[i])


@device
def logarithm(x):
    """Return the natural logarithm of a positive, finite, normal float64."""
    # 1. x = 2**k * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    bits = bits64(x)
    m = float64_of((bits & _FRACTION) | _HALF)
    low = m < SQRT_HALF
    m = m + m if low else m
    k = float64((bits >> int64(52)) - int64(1022) - int64(low))
    f = m - 1.0
    # 2. a polynomial of z = (f / (2 + f))**2
    s = f / (f + 2.0)
    z = s * s
    p = LN_COEFFICIENTS[0]
    for i in range(1, len(LN_COEFFICIENTS)):
        p = p * z + LN_COEFFICIENTS[i]
    p = p * z
    # 3. ln(1 + f) + k ln 2, smallest terms first
    t = s * (f - p)
    t = t - k * LN2_LO
    t = f - t
    return k * LN2_HI + t


@device
def exponential(y):
    """Return the exponential of a float64."""
    over, under, nan = y > EXP_OVERFLOW, y < EXP_UNDERFLOW, y != y
    safe = 0.0 if over or under or nan else y
    # 1. y = n ln 2 + r
    n = safe * INV_LN2
    n = n + ROUND_TO_INTEGER
    n = n - ROUND_TO_INTEGER
    r = safe - n * LN2_HI
    r = r - n * LN2_LO
    # 2. a polynomial of r
    p = EXP_COEFFICIENTS[0]
    for i in range(1, len(EXP_COEFFICIENTS)):
        p = p * r + EXP_COEFFICIENTS[i]
    p = r * r * p
    p = r + p
    p = 1.0 + p
    # 3. times 2**n in two factors: it may itself lie outside the normal range
    exponent = int64(n)
    half = exponent >> int64(1)
    result = p * _power_of_two(half) * _power_of_two(exponent - half)
    result = _INFINITY if over else 0.0 if under else result
    return y if nan else result


@device
def _power_of_two(exponent):
    return float64_of((exponent + int64(1023)) << int64(52))
