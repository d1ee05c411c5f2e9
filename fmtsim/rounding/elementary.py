# SPDX-License-Identifier: Apache-2.0
"""The natural logarithm and the exponential as fixed sequences of IEEE double operations.

Libraries of different machines return different last bits for ``log`` and ``exp``; LogFMT tiles need the same bits
everywhere. Both functions here use binary64 additions, subtractions, multiplications, divisions, comparisons and exact
scalings by powers of two, in the order of the numbered steps, every result rounded to nearest even and nothing fused
(no FMA contraction, no fast-math). An engine that follows the steps gets these bits; the constants are its constants.
"""

import math

from fmtsim.support.errors import ArgumentError, shown

SQRT_HALF = 0.7071067811865476
"""The double nearest to ``sqrt(1/2)``: where a significand is doubled, so that it lies around 1."""

LN2_HI = 0.6931471805598903
"""``ln 2`` cut to 42 binary places: its product with an integer below 2**11 in magnitude is exact."""

LN2_LO = 5.497923018708371e-14
"""The double nearest to ``ln 2 - LN2_HI``."""

INV_LN2 = 1.4426950408889634
"""The double nearest to ``1 / ln 2``."""

ROUND_TO_INTEGER = 6755399441055744.0
"""``1.5 * 2**52``: adding and subtracting it rounds a double below 2**51 to the nearest even integer."""

LN_COEFFICIENTS = tuple(2.0 / (2 * i + 1) for i in range(10, 0, -1))
"""``2/21, 2/19, ..., 2/5, 2/3``: the series of ``2 atanh(s) - 2 s`` in ``s*s``, highest power first. With
``s*s <= 0.0295`` the first term left out is below 2**-60 of the result."""

EXP_COEFFICIENTS = tuple(1.0 / math.factorial(i) for i in range(13, 1, -1))
"""``1/13!, 1/12!, ..., 1/3!, 1/2!``: the Taylor series of ``(exp(r) - 1 - r) / r**2``, highest power first. With
``|r| <= 0.3466`` the first term left out is below 2**-57."""

EXP_OVERFLOW = 709.782712893384
"""The largest double whose exponential is finite."""

EXP_UNDERFLOW = -745.1332191019411
"""The smallest double whose exponential is not rounded to zero."""


def ln(x: float) -> float:
    """Return the natural logarithm of a positive finite double, within 1 unit in the last place.

    1. ``m, k = frexp(x)``, so that ``x = m * 2**k`` and ``1/2 <= m < 1``.
    2. If ``m < SQRT_HALF``: ``m = m + m`` and ``k = k - 1``.
    3. ``f = m - 1`` (exact).
    4. ``s = f / (2 + f)``.
    5. ``z = s * s``.
    6. ``p = c[0]``, then ``p = p * z + c[i]`` for i = 1 ... 9, with ``c = LN_COEFFICIENTS``.
    7. ``p = p * z``; now ``ln m = 2 s + s p``, and ``2 s = f - s f``.
    8. ``t = s * (f - p)``.
    9. ``t = t - k * LN2_LO``.
    10. ``t = f - t``.
    11. The result is ``k * LN2_HI + t``.

    Raises:
        ArgumentError: x is not a positive finite number.
    """
    if not 0.0 < x < math.inf:
        raise ArgumentError(f"ln of {shown(x)} is not defined here; pass a positive finite number")
    m, k = math.frexp(x)
    if m < SQRT_HALF:
        m = m + m
        k = k - 1
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = LN_COEFFICIENTS[0]
    for coefficient in LN_COEFFICIENTS[1:]:
        p = p * z + coefficient
    p = p * z
    t = s * (f - p)
    t = t - float(k) * LN2_LO
    t = f - t
    return float(k) * LN2_HI + t


def exp(x: float) -> float:
    """Return the exponential of a double, within 1 unit in the last place; NaN stays NaN.

    1. Above ``EXP_OVERFLOW`` the result is Inf, below ``EXP_UNDERFLOW`` it is 0.
    2. ``n = x * INV_LN2``, then ``n = n + ROUND_TO_INTEGER``, then ``n = n - ROUND_TO_INTEGER``.
    3. ``r = x - n * LN2_HI`` (exact).
    4. ``r = r - n * LN2_LO``.
    5. ``p = c[0]``, then ``p = p * r + c[i]`` for i = 1 ... 11, with ``c = EXP_COEFFICIENTS``.
    6. ``p = (r * r) * p``.
    7. ``p = r + p``.
    8. ``p = 1 + p``.
    9. The result is ``p * 2**n`` rounded once: exact where it is normal, so for the logarithm of every float32.
    """
    if x != x:
        return math.nan
    if x > EXP_OVERFLOW:
        return math.inf
    if x < EXP_UNDERFLOW:
        return 0.0
    n = x * INV_LN2
    n = n + ROUND_TO_INTEGER
    n = n - ROUND_TO_INTEGER
    r = x - n * LN2_HI
    r = r - n * LN2_LO
    p = EXP_COEFFICIENTS[0]
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    p = r * r * p
    p = r + p
    p = 1.0 + p
    return math.ldexp(p, int(n))
