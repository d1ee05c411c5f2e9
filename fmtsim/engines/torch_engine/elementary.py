# SPDX-License-Identifier: Apache-2.0
"""The logarithm and the exponential of ``fmtsim.rounding.elementary`` on tensors, step by step the same."""

import torch

from fmtsim.engines.torch_engine.reals import divide, power_of_two
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
from fmtsim.support.float64 import float64, from_bits


def ln(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive, finite, normal float64 elements; others give some number."""
    bits = x.view(torch.int64)
    k = (bits >> 52) - 1022
    m = from_bits((bits & ((1 << 52) - 1)) | (1022 << 52))
    low = m < SQRT_HALF
    m = torch.where(low, m + m, m)
    power = float64(k - low.to(torch.int64))
    f = m - 1.0
    s = divide(f, f + 2.0)
    z = s * s
    p = torch.full_like(z, LN_COEFFICIENTS[0])
    for coefficient in LN_COEFFICIENTS[1:]:
        p = p * z
        p = p + coefficient
    p = p * z
    t = s * (f - p)
    t = t - power * LN2_LO
    t = f - t
    return power * LN2_HI + t


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return the exponential of float64 elements; NaN stays NaN, beyond the range it is Inf or 0."""
    nan, over, under = torch.isnan(x), x > EXP_OVERFLOW, x < EXP_UNDERFLOW
    safe = torch.where(nan | over | under, 0.0, x)
    n = safe * INV_LN2
    n = n + ROUND_TO_INTEGER
    n = n - ROUND_TO_INTEGER
    r = safe - n * LN2_HI
    r = r - n * LN2_LO
    p = torch.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r
        p = p + coefficient
    p = r * r * p
    p = r + p
    p = 1.0 + p
    exponent = n.to(torch.int64)
    half = exponent >> 1  # 2**exponent itself may lie outside the normal range; the first product is exact
    result = p * power_of_two(half) * power_of_two(exponent - half)
    result = torch.where(over, float("inf"), torch.where(under, 0.0, result))
    return torch.where(nan, x, result)
