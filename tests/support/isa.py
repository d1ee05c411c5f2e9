# SPDX-License-Identifier: Apache-2.0
"""Dot products as instruction manuals define them, one number after another; nothing is shared with the package.

A finite number is a sign and a magnitude, an integer in units of 2^-320, of which every number here is a multiple.
Sources: Arm ARM DDI 0487 M.a.a, J1.3 (FP8Unpack, FP8DotAddFP, FPRoundBase); Intel SDM, volume 2 (VDPBF16PS, TDPBF16PS,
TDPFP16PS).
"""

import math
from fractions import Fraction

PLACE = 320
INF, NAN = math.inf, math.nan
FIELDS = {"e4m3": (4, 3), "e5m2": (5, 2), "fp16": (5, 10), "bf16": (8, 7), "fp32": (8, 23)}
SMALLEST_NORMAL = 1 << (PLACE - 126)
Number = tuple[bool, int | float]  # sign, magnitude: units, INF or NAN


def read(code: int, fmt: str) -> Number:
    """Return the number of a code: exponent 0 is subnormal, all ones are Inf and NaN (E4M3: one NaN, no Inf)."""
    exponent_bits, mantissa_bits = FIELDS[fmt]
    negative, field = bool(code >> (exponent_bits + mantissa_bits)), (code >> mantissa_bits) % (1 << exponent_bits)
    mantissa, top, bias = code % (1 << mantissa_bits), (1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1
    if fmt == "e4m3" and (field, mantissa) == (top, 7):
        return negative, NAN
    if fmt != "e4m3" and field == top:
        return negative, NAN if mantissa else INF
    significand = mantissa + ((1 << mantissa_bits) if field else 0)
    return negative, significand << (PLACE + max(field, 1) - bias - mantissa_bits)


def value(x: Number) -> float:
    """Return a number as a float that holds it exactly."""
    size = x[1] if isinstance(x[1], float) else float(Fraction(x[1], 1 << PLACE))
    return math.copysign(size, -1 if x[0] else 1)


def nearest(n: int, bits: int, lowest: int) -> int:
    """Round a magnitude to ``bits`` significant bits, to nearest even, last places not below 2^lowest units."""
    place = max(n.bit_length() - bits, lowest)
    if place <= 0:
        return n
    whole, part = divmod(n, 1 << place)
    half = 1 << (place - 1)
    return (whole + (part > half or (part == half and whole % 2 == 1))) << place


def arm_dot(
    addend: Number, first: list[Number], second: list[Number], sums: str, lscale: int = 0, osm: bool = False
) -> Number:
    """Return ``addend + 2^-lscale (a1 b1 + a2 b2 + ...)`` rounded once to ``sums``, fp32 or fp16."""
    exponent_bits, mantissa_bits = FIELDS[sums]
    pairs = list(zip(first, second, strict=True))
    # 1. NaN, and what gives one: zero times Inf, Inf minus Inf
    if any(x[1] != x[1] for x in (addend, *first, *second)):
        return False, NAN
    if any(INF in (x[1], y[1]) and 0 in (x[1], y[1]) for x, y in pairs):
        return False, NAN
    infinite = {x[0] ^ y[0] for x, y in pairs if INF in (x[1], y[1])} | ({addend[0]} if addend[1] == INF else set())
    if infinite:
        return (infinite.pop(), INF) if len(infinite) == 1 else (False, NAN)
    # 2. zeros of one sign; every other zero sum is +0
    if addend[1] == 0 and all(0 in (x[1], y[1]) and x[0] ^ y[0] == addend[0] for x, y in pairs):
        return addend[0], 0
    # 3. the exact sum, in units of 2^-(2 * PLACE + lscale)
    products = sum((-1 if x[0] ^ y[0] else 1) * x[1] * y[1] for x, y in pairs)
    total = products + ((-1 if addend[0] else 1) * addend[1] << (PLACE + lscale))
    if total == 0:
        return False, 0
    # 4. one rounding to nearest even; beyond the largest number Inf, or with OSM the largest number
    bias = (1 << (exponent_bits - 1)) - 1
    n = nearest(abs(total), mantissa_bits + 1, 2 * PLACE + lscale + 1 - bias - mantissa_bits)
    largest = ((2 << mantissa_bits) - 1) << (2 * PLACE + lscale + bias - mantissa_bits)
    if n > largest:
        return total < 0, (largest >> (PLACE + lscale) if osm else INF)
    return total < 0, n >> (PLACE + lscale)


def without_subnormal(x: Number) -> Number:
    """Return a zero of its sign for a subnormal float32 number (DAZ)."""
    return (x[0], 0) if x[1] < SMALLEST_NORMAL else x


def fused(x: Number, y: Number, z: Number, subnormal_first: bool = False) -> Number:
    """Return float32 ``x y + z``, rounded to nearest even, with DAZ and FTZ.

    A result is tiny where 24 bits and unbounded exponents leave it below 2^-126 (SDM volume 1, 4.9.1.5). With
    ``subnormal_first`` it is what float32's subnormal numbers leave there, which is wrong.
    """
    x, y, z = (without_subnormal(n) for n in (x, y, z))
    sign = x[0] ^ y[0]
    # 1. NaN and Inf
    if any(n[1] != n[1] for n in (x, y, z)) or (INF in (x[1], y[1]) and 0 in (x[1], y[1])):
        return False, NAN
    infinite = ({sign} if INF in (x[1], y[1]) else set()) | ({z[0]} if z[1] == INF else set())
    if infinite:
        return (infinite.pop(), INF) if len(infinite) == 1 else (False, NAN)
    # 2. the exact sum; one that is zero is -0 where both terms are negative
    total = (-1 if sign else 1) * x[1] * y[1] + ((-1 if z[0] else 1) * z[1] << PLACE)
    if total == 0:
        return sign and z[0], 0
    # 3. 24 bits, tiny numbers become zeros, large ones Inf
    n = nearest(abs(total), 24, 2 * PLACE - 149 if subnormal_first else 0) >> PLACE
    if n < SMALLEST_NORMAL:
        return total < 0, 0
    return total < 0, INF if n >= 1 << (PLACE + 128) else n


def vdp(c: Number, a: list[Number], b: list[Number], odd_first: bool = True, **wrong: bool) -> Number:
    """Return what VDPBF16PS and VDPPHPS add to c, a pair of products an instruction."""
    a, b = ([*x, *[(False, 0)] * (len(x) % 2)] for x in (a, b))
    for i in range(0, len(a), 2):
        for k in (i + 1, i) if odd_first else (i, i + 1):
            c = fused(a[k], b[k], c, **wrong)
    return c


def tdp(c: Number, a: list[Number], b: list[Number]) -> Number:
    """Return what TDPBF16PS and TDPFP16PS add to c, 32 products an instruction, those behind the last being zeros."""
    one = read(0x3F800000, "fp32")
    a, b = ([*x, *[(False, 0)] * (-len(x) % 32)] for x in (a, b))
    for i in range(0, len(a), 32):
        sums = [(False, 0), (False, 0)]
        for k in range(32):
            sums[k % 2] = fused(a[i + k], b[i + k], sums[k % 2])
        c = fused(c, one, fused(sums[0], one, sums[1]))
    return c
