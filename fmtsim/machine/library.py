# SPDX-License-Identifier: Apache-2.0
"""CUDA's float32 library functions as PyTorch's kernels call them: without fast math, products contracted to fma.

Each is the sequence of float32 operations, fused multiply-adds and calls of the special-function unit that nvcc 13.0
emits for ``-arch=sm_90``. A NaN result is 0x7FFFFFFF. On an H200 none of 2^32 results differs (docs/evidence.md).
"""

from collections.abc import Callable

import numpy as np
from numpy import float32, float64, int32, int64, uint32, uint64

from fmtsim.cpu.runtime.jit import bits32, device, float32_of, fma32, subroutine
from fmtsim.machine import mufu

_MAGNITUDE, _SIGN, _INF = int32(0x7FFFFFFF), int32(-0x80000000), int32(0x7F800000)
_HALF, _ONE, _ZERO = float32(0.5), float32(1.0), float32(0.0)


def _f32(*bits: int) -> tuple[float32, ...]:
    """Return float32 numbers of bit patterns."""
    return tuple(np.array(bits, np.uint32).view(np.float32))


_LOG2E, _LOG2E_LOW, _LN2, _ULP23 = _f32(0x3FB8AA3B, 0x32A57060, 0x3F317218, 0x34000000)
_EXP_SCALE = _f32(0x3BBB989D)[0]  # 1 / (252 ln 2)
# Polynomials, highest power first.
_LOG = _f32(0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78, 0xBF000000)
_LOG2 = _f32(
    0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4, 0xBE763C8B, 0x3E93BF99, 0xBEB8AA49, 0x3EF6384A,
    0xBF38AA3B,
)  # fmt: skip
_LOG1P = _f32(
    0xBD39BF78, 0x3DD80012, 0xBE0778E0, 0x3E146475, 0xBE2A68DD, 0x3E4CAF9E, 0xBE800042, 0x3EAAAAE6, 0xBF000000
)
_TANH = _f32(0x3C80F082, 0xBD563CAE, 0x3E085941, 0xBEAAA9ED, 0x00000000)
_ERF_LARGE = _f32(0x38EB4C3A, 0xBAAE005B, 0x3C09919F, 0xBD24D99A, 0x3E235519, 0x3F69B4F9, 0x3F210A14)
_ERF_SMALL = _f32(0x38B1E96A, 0xBA574D20, 0x3BAAD5EA, 0xBCDC1BE7, 0x3DE718AF, 0xBEC093AC, 0x3E0375D3)
_EXPM1 = _f32(0x3AB5EBE6, 0x3C095663, 0x3D2AABE3, 0x3E2AA9F6, 0x3EFFFFFE)
_POW_LOG = _f32(0x3A2C32E4, 0x3B52E7DB, 0x3C93BB73, 0x3DF6384F)
_POW_EXP = _f32(0x391FCB8E, 0x3AAF85ED, 0x3C1D9856, 0x3D6357BB, 0x3E75FDEC, 0x3F317218, 0x3F800000)
_POW_LOG2E_LOW = _f32(0x32A55E34)[0]
_TANH_SCALE, _TANH_LARGE, _TANH_ONE, _ERF_SPLIT = _f32(0x4038AA3B, 0x3F19999A, 0x41102CB4, 0x3F8060FE)
_LN2_HIGH, _LN2_LOW, _EXPM1_SMALL = _f32(0x3F317200, 0x35BFBE8E, 0x3ED1EB85)
_TWO_OVER_PI, _SLOW_REDUCTION = _f32(0x3F22F983, 0x47CE4780)
_PI_HALVES = _f32(0xBFC90FDA, 0xB3A22168, 0xA7C234C5)  # -pi/2 in three parts
_SINE = _f32(0xB94D4153, 0x3C0885E4, 0xBE2AAAA8)
_COSINE = _f32(0x37CBAC00, 0xBAB607ED, 0x3D2AAABB, 0xBEFFFFFF)
_TWO_OVER_PI_WORDS = np.array(
    [0x3C439041, 0xDB629599, 0xF534DDC0, 0xFC2757D1, 0x4E441529, 0xA2F9836E], np.uint64
)  # 192 bits, lowest first
_PI_HALF_2_64 = float64(np.uint64(0x3BF921FB54442D19).view(np.float64))  # pi / 2 * 2^-64
_SQRT_HALF, _SQRT_2_OVER_PI, _GELU_CUBE = _f32(0x3F3504F3, 0x3F4C422A, 0x3D372713)
_LOG10_2 = _f32(0x3EDE5BD9)[0]


@device
def _canonical(y):
    """Return y, and 0x7FFFFFFF for any NaN."""
    return y if y == y else float32_of(mufu.NAN)


@device
def _horner(coefficients, x):
    """Return a polynomial, one fused multiply-add a step."""
    y = coefficients[0]
    for i in range(1, len(coefficients)):
        y = fma32(y, x, coefficients[i])
    return y


@device
def ex2(x):
    """Return ex2.approx.f32: results below 2^-126 are numbers, by the square of the half argument's result."""
    if x < float32(-126.0):
        y = mufu.ex2(x * _HALF)
        return y * y
    return mufu.ex2(x)


@device
def rsqrt(x):
    """Return rsqrt.approx.f32 (rsqrtf): subnormal arguments are scaled by 2^24."""
    if abs(x) < float32(2.0**-126):
        return _canonical(mufu.rsqrt(x * float32(2.0**24)) * float32(4096.0))
    return mufu.rsqrt(x)


@device
def _exp_parts(x):
    """Return ex2 of a fraction and a power of two, whose product is e^x."""
    # 1. n = floor of x log2 e + 126 by a saturating product: 252 steps between 2^-126 and 2^126
    share = min(max(fma32(x, _EXP_SCALE, _HALF), _ZERO), _ONE)
    n = int32(np.floor(float64(share) * 252.0)) + int32(1) if share == share else int32(1)
    # 2. the rest of x log2 e, in two fused steps
    whole = float32(n - int32(127))
    y = fma32(x, _LOG2E_LOW, fma32(x, _LOG2E, -whole))
    return mufu.ex2(y), float32_of(n << int32(23))


@device
def exp(x):
    """Return expf(x)."""
    fraction, power = _exp_parts(x)
    return _canonical(fraction * power)


@device
def exp2(x):
    """Return exp2f(x)."""
    return _canonical(ex2(x))


@device
def _log_parts(x, offset):
    """Return (scaled x, its exponent plus that of the scaling, its significand less 1), for logf and log2f."""
    subnormal = x < float32(2.0**-126)
    scaled = x * float32(2.0**23) if subnormal else x
    bits = bits32(scaled)
    exponent_bits = (bits - offset) & int32(-0x800000)
    exponent = fma32(float32(exponent_bits), _ULP23, float32(-23.0) if subnormal else _ZERO)
    return scaled, exponent, float32_of(bits - exponent_bits) - _ONE


@device
def _log_special(x, scaled, y):
    """Return y, or the logarithm of a number that is 0, negative, Inf or NaN."""
    if uint32(bits32(scaled)) >= uint32(0x7F800000):
        y = fma32(scaled, float32_of(_INF), float32_of(_INF))
    return float32_of(_SIGN | _INF) if x == _ZERO else _canonical(y)


@device
def _natural_log(x):
    scaled, exponent, m = _log_parts(x, int32(0x3F2AAAAB))
    return scaled, fma32(exponent, _LN2, fma32(m * _horner(_LOG, m), m, m))


@device
def log(x):
    """Return logf(x)."""
    scaled, y = _natural_log(x)
    return _log_special(x, scaled, y)


@device
def log10(x):
    """Return log10f(x)."""
    scaled, y = _natural_log(x)
    if uint32(bits32(scaled)) >= uint32(0x7F800000):
        y = fma32(scaled, float32_of(_INF), float32_of(_INF))
    return float32_of(_SIGN | _INF) if x == _ZERO else _canonical(y * _LOG10_2)


@device
def log2(x):
    """Return log2f(x)."""
    scaled, exponent, m = _log_parts(x, int32(0x3F3504F3))
    tail = m * (m * _horner(_LOG2, m))
    return _log_special(x, scaled, exponent + fma32(m, _LOG2E, tail))


@device
def _add_one_toward_zero(x):
    """Return x + 1, rounded toward zero."""
    total = x + _ONE
    # the error of the nearest sum, exactly (Knuth's TwoSum)
    x_part = total - _ONE
    error = (x - x_part) + (_ONE - (total - x_part))
    if (total > _ZERO and error < _ZERO) or (total < _ZERO and error > _ZERO):
        return float32_of(bits32(total) - int32(1))
    return total


@device
def log1p(x):
    """Return log1pf(x)."""
    bits = bits32(x)
    # 1. 1 + x = 2^e (1 + m): e from the truncated sum; 2. m = x 2^-e + (2^-e - 1), where 2^-e - 1 is one fma
    exponent_bits = (bits32(_add_one_toward_zero(x)) - int32(0x3F400000)) & int32(-0x800000)
    scaled = float32_of(bits - exponent_bits)
    m = fma32(float32(0.25), float32_of(int32(0x40800000) - exponent_bits), float32(-1.0)) + scaled
    exponent = float32(exponent_bits) * _ULP23
    y = fma32(exponent, _LN2, fma32(m * _horner(_LOG1P, m), m, m))
    # 3. arguments from Inf on, and negative ones (as unsigned bits)
    if uint32(bits) >= uint32(0x7F800000):
        if bits >= int32(-0x407FFFFF):  # Inf, NaN, and -1 and above only up to -0
            y = fma32(x, float32_of(_INF), float32_of(_INF))
        if x == _ZERO:
            y = float32_of(_SIGN)
    return _canonical(y)


@device
def tanh(x):
    """Return tanhf(x)."""
    magnitude = abs(x)
    if magnitude >= _TANH_LARGE:
        # 1 - 2 / (e^2|x| + 1); 1 above 9.01
        y = fma32(mufu.rcp(mufu.ex2(magnitude * _TANH_SCALE) + _ONE), float32(-2.0), _ONE)
        y = _ONE if magnitude >= _TANH_ONE else y
        return float32_of((bits32(y) & _MAGNITUDE) | (bits32(x) & _SIGN))
    return _canonical(fma32(_horner(_TANH, x * x), x, x))


@device
def erf(x):
    """Return erff(x)."""
    magnitude = abs(x)
    if magnitude >= _ERF_SPLIT:
        y = _ONE - mufu.ex2(fma32(_horner(_ERF_LARGE, magnitude), -magnitude, -magnitude))
        return float32_of((bits32(y) & _MAGNITUDE) | (bits32(x) & _SIGN))
    return _canonical(fma32(_horner(_ERF_SMALL, x * x), x, x))


@device
def expm1(x):
    """Return expm1f(x)."""
    # 1. x = n ln 2 + r; below 0.41 n = 0
    n = np.rint(x * _LOG2E)
    n = _ZERO if abs(x) < _EXPM1_SMALL else n
    r = fma32(-n, _LN2_LOW, fma32(-n, _LN2_HIGH, x))
    # 2. e^r - 1; 3. times 2^n, plus 2^n - 1: 2^128 in two steps
    largest = n == float32(128.0)
    n = n - _ONE if largest else n
    tail = fma32(r * _horner(_EXPM1, r), r, r)
    power = ex2(n)
    y = fma32(tail, power, power - _ONE)
    y = y + y if largest else y
    y = float32_of(_INF) if n > float32(128.0) else y
    y = float32(-1.0) if n < float32(-25.0) else y
    return _canonical(x + x if x == _ZERO else y)


@subroutine
def _reduce_slowly(x):
    """Return (quadrant, rest) of a finite x of at least 105615: Payne and Hanek's reduction by 192 bits of 2 / pi."""
    bits = bits32(x)
    exponent = int32((bits >> int32(23)) & int32(255)) - int32(128)
    significand = uint64(uint32(bits << int32(8)) | uint32(0x80000000))
    # 1. 24 bits times 192 bits
    words = np.zeros(7, np.uint64)
    carry = uint64(0)
    for i in range(6):
        carry = _TWO_OVER_PI_WORDS[i] * significand + (carry >> uint64(32))
        words[i] = carry & uint64(0xFFFFFFFF)
    words[6] = carry >> uint64(32)
    # 2. the 64 bits below the units of 4 quadrants
    index, shift = exponent >> int32(5), uint64(exponent & int32(31))
    high, low = words[6 - index], words[5 - index]
    if shift:
        high = ((high << shift) & uint64(0xFFFFFFFF)) + (low >> (uint64(32) - shift))
        low = ((low << shift) & uint64(0xFFFFFFFF)) + (words[4 - index] >> (uint64(32) - shift))
    fraction = ((((high << uint64(2)) & uint64(0xFFFFFFFF)) | (low >> uint64(30))) << uint64(32)) | (
        (low << uint64(2)) & uint64(0xFFFFFFFF)
    )
    # 3. the nearest quadrant; the rest is signed
    upper = int32(fraction >> uint64(63))
    quadrant = int32(high >> uint64(30)) + upper
    negative = (bits < int32(0)) != (upper != 0)
    magnitude = int64(~fraction) if upper else int64(fraction)
    rest = float32(float64(magnitude) * _PI_HALF_2_64)
    return (-quadrant if bits < int32(0) else quadrant), (-rest if negative else rest)


@device
def _sine(x, quadrants):
    """Return sinf(x + quadrants pi / 2)."""
    if abs(x) < _SLOW_REDUCTION:
        quadrant = int32(np.rint(x * _TWO_OVER_PI))
        n = float32(quadrant)
        rest = fma32(n, _PI_HALVES[2], fma32(n, _PI_HALVES[1], fma32(n, _PI_HALVES[0], x)))
    elif (bits32(x) & _INF) == _INF:
        return float32_of(mufu.NAN)
    else:
        quadrant, rest = _reduce_slowly(x)
    quadrant += quadrants
    square = rest * rest
    if quadrant & int32(1):
        polynomial, base = _horner(_COSINE, square), _ONE
    else:
        polynomial, base = _horner(_SINE, square), rest
    y = fma32(polynomial, fma32(square, base, _ZERO), base)
    return fma32(y, float32(-1.0), _ZERO) if quadrant & int32(2) else y


@device
def sin(x):
    """Return sinf(x)."""
    return _sine(x, int32(0))


@device
def cos(x):
    """Return cosf(x)."""
    return _sine(x, int32(1))


@device
def sqrt(x):
    """Return sqrtf(x): correctly rounded."""
    return _canonical(np.sqrt(x))


@device
def reciprocal(x):
    """Return 1 / x: correctly rounded."""
    return _canonical(_ONE / x)


@device
def pow(x, y):
    """Return powf(x, y)."""
    magnitude = abs(x)
    # 1. log2 |x| = e + log2(1 + m) in two parts: atanh's series of u = 2 m / (2 + m)
    subnormal = magnitude < float32(2.0**-126)
    bits = bits32(magnitude * float32(2.0**24) if subnormal else magnitude)
    exponent_bits = (bits - int32(0x3F3504F3)) & int32(-0x800000)
    exponent = fma32(float32(exponent_bits), _ULP23, float32(-24.0) if subnormal else _ZERO)
    significand = float32_of(bits - exponent_bits)
    m = significand - _ONE
    inverse = mufu.rcp(significand + _ONE)
    u = (m + m) * inverse
    square = u * u
    difference = m - u
    u_low = inverse * fma32(-u, m, difference + difference)
    series = _horner(_POW_LOG, square) * square
    high = fma32(u, _LOG2E, exponent)
    low = fma32(u_low, _LOG2E, fma32(u, _LOG2E, exponent - high))
    low = fma32(u, _POW_LOG2E_LOW, low)
    low = fma32(series, u, fma32(series * float32(3.0), u_low, low))
    log_high = high + low
    log_low = low + -(log_high + -high)
    # 2. y log2 |x| in two parts; 3. 2^ of it: integer and fraction
    product = log_high * y
    product_low = fma32(log_low, y, fma32(log_high, y, -product))
    n = np.rint(product)
    power = _horner(_POW_EXP, product_low + (product - n))
    below = int32(0) if n > _ZERO else int32(-2097152000)
    steps = int32(n) if abs(n) < float32(1024.0) else int32(0)
    z = power * float32_of(below + int32(2130706432)) * float32_of((steps << int32(23)) - below)
    if abs(product) > float32(152.0):
        z = _ZERO if product < _ZERO else float32_of(_INF)
    # 4. special arguments
    if x == _ONE or y == _ZERO:
        return _ONE
    if x != x or y != y:
        return float32_of(mufu.NAN)
    half = np.trunc(y * _HALF)
    odd = abs(y - (half + half)) == _ONE
    if x == _ZERO or magnitude == float32_of(_INF):
        special = bits32(x + x)
        special = special ^ _INF if y < _ZERO else special
        return float32_of(special if odd else special & _MAGNITUDE)
    if x == float32(-1.0) and abs(y) == float32_of(_INF):
        return _ONE
    if x < _ZERO:
        z = -z if odd else z
        return float32_of(mufu.NAN) if np.floor(y) != y else _canonical(z)
    return _canonical(z)


@device
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    fraction, power = _exp_parts(-x)
    return _canonical(_ONE / fma32(fraction, power, _ONE))


@device
def silu(x):
    """Return x / (1 + e^-x)."""
    fraction, power = _exp_parts(-x)
    return _canonical(x / fma32(fraction, power, _ONE))


@device
def gelu(x):
    """Return x / 2 (1 + erf(x / sqrt 2))."""
    return _canonical(x * _HALF * (_ONE + erf(x * _SQRT_HALF)))


@device
def gelu_tanh(x):
    """Return gelu by tanh."""
    inner = fma32(x * x * x, _GELU_CUBE, x) * _SQRT_2_OVER_PI
    return _canonical(x * _HALF * (tanh(inner) + _ONE))


_UNARY = (exp, exp2, expm1, log, log2, log10, log1p, tanh, erf, sin, cos, rsqrt, sqrt, reciprocal, sigmoid, silu, gelu)
UNARY: dict[str, Callable] = {function.__name__: function for function in (*_UNARY, gelu_tanh)}
