# SPDX-License-Identifier: Apache-2.0
"""The logarithm and the exponential of ``fmtsim.rounding.elementary`` over arrays, step by step the same."""

import math

import numpy as np
import torch
from numpy import float32, float64, int32, int64

from fmtsim.engines.cpu.optim.moments import arrays_of, count_infinite, dropped, is_infinite, put_back
from fmtsim.engines.cpu.runtime import simd
from fmtsim.engines.cpu.runtime.jit import bits64, device, float64_of, kernel
from fmtsim.engines.cpu.runtime.pool import run
from fmtsim.formats.spec import LogFormat
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
from fmtsim.spec.optimizer import Numbers

BITS = 16


def step_logarithms(
    rounded: bool,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    second: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    fmt: LogFormat,
    numbers: Numbers,
    zeroing: bool,
) -> int:
    """Do a step of Madam on weights that are kept as logarithms, in place; return what ``step_codes`` returns.

    Args:
        rounded: Directions are rounded to integers.
        parameter, gradient, second: float32, contiguous: where the weights' values go, the gradient, the moment.
        codes, scale: Of the weights, int16 and float32 [1].
        fmt: Theirs, of 16 bits.
        numbers, zeroing: As of ``step_codes``.
    """
    arrays = arrays_of([parameter, gradient, second, codes])
    octave = np.zeros(fmt.gamma, np.float32)
    octave[: fmt.max_code + 1] = fmt.magnitudes[: fmt.gamma]
    rest = octave.view(np.int32), np.array(numbers, np.float32), fmt.gamma, fmt.gamma.bit_length() - 1, float(scale)
    whole = arrays[0].size // simd.LANES * simd.LANES
    counts: list[int] = []

    def part(of: list[np.ndarray], start: int, stop: int) -> None:
        counts.append(_logarithms(*of, *rest, rounded, zeroing, start, stop))

    run(lambda start, stop: part(arrays, start, stop), whole, simd.LANES)
    if whole < arrays[0].size:
        last = [np.zeros(simd.LANES, array.dtype) for array in arrays]
        for padded, array in zip(last, arrays, strict=True):
            padded[: array.size - whole] = array[whole:]
        part(last, 0, simd.LANES)
        put_back(last, arrays, whole)
    return sum(counts)


@kernel
def _logarithms(p, g, v, codes, octave, numbers, gamma, shift, scale, rounded, zeroing, start, stop):
    bad = 0
    bound, top = numbers[10], simd.splat(int32(0x7FFF))
    rate, most = simd.splat(float32(numbers[9] * float32(gamma))), simd.splat(float32(65536.0))
    for i in range(start, stop, simd.LANES):
        y = simd.load(g, i)
        infinite = is_infinite(y)
        bad += simd.largest(infinite) and count_infinite(g, i, simd.LANES)
        square = simd.fmul(simd.fmul(y, simd.splat(numbers[6])), y)
        v_new = simd.fadd(simd.fmul(simd.load(v, i), simd.splat(numbers[5])), square)
        n = simd.fdiv(y, simd.sqrt(simd.fdiv(v_new, simd.splat(numbers[7]))))
        n = _within(simd.where_equal(n, n, n, simd.splat(float32(0.0))), simd.splat(bound))
        n = simd.rint(n) if rounded else n
        code = simd.sext32(simd.load(codes, i))
        size, negative = simd.and_(code, top), simd.ashr(code, simd.splat(int32(31)))
        falls = simd.fmul(n, rate)
        falls = simd.as_f32(simd.xor(simd.as_i32(falls), simd.shl(negative, simd.splat(int32(31)))))
        size = simd.isub(size, simd.to_i32(_within(simd.rint(falls), most)))
        size = simd.smin(simd.smax(size, simd.splat(int32(0))), top)
        simd.store(codes, i, simd.trunc16(simd.or_(size, simd.shl(negative, simd.splat(int32(15))))))
        bits = simd.gather(octave, simd.and_(size, simd.splat(int32(gamma - 1))))
        bits = simd.iadd(bits, simd.shl(simd.lshr(size, simd.splat(int32(shift))), simd.splat(int32(23))))
        bits = simd.or_(bits, simd.shl(negative, simd.splat(int32(31))))
        simd.store(p, i, simd.fmul(simd.as_f32(bits), simd.splat(float32(scale))))
        simd.store(v, i, dropped(infinite, v_new, zeroing))
    return bad


@device
def _within(x, bound):
    """Return numbers moved into what lies between two bounds of one magnitude; no NaN."""
    low = simd.fsub(simd.splat(float32(0.0)), bound)
    return simd.where_less(x, low, low, simd.where_less(bound, x, bound, x))


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
    given, made = source.view(-1).numpy(), out.view(-1).numpy()
    run(lambda start, stop: function(given, made, start, stop), given.size, 64)
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
    bits = bits64(x)
    m = float64_of((bits & _FRACTION) | _HALF)
    low = m < SQRT_HALF
    m = m + m if low else m
    k = float64((bits >> int64(52)) - int64(1022) - int64(low))
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = LN_COEFFICIENTS[0]
    p = p * z + LN_COEFFICIENTS[1]
    p = p * z + LN_COEFFICIENTS[2]
    p = p * z + LN_COEFFICIENTS[3]
    p = p * z + LN_COEFFICIENTS[4]
    p = p * z + LN_COEFFICIENTS[5]
    p = p * z + LN_COEFFICIENTS[6]
    p = p * z + LN_COEFFICIENTS[7]
    p = p * z + LN_COEFFICIENTS[8]
    p = p * z + LN_COEFFICIENTS[9]
    p = p * z
    t = s * (f - p)
    t = t - k * LN2_LO
    t = f - t
    return k * LN2_HI + t


@device
def exponential(y):
    """Return the exponential of a float64."""
    over, under, nan = y > EXP_OVERFLOW, y < EXP_UNDERFLOW, y != y
    safe = 0.0 if over or under or nan else y
    n = safe * INV_LN2
    n = n + ROUND_TO_INTEGER
    n = n - ROUND_TO_INTEGER
    r = safe - n * LN2_HI
    r = r - n * LN2_LO
    p = EXP_COEFFICIENTS[0]
    p = p * r + EXP_COEFFICIENTS[1]
    p = p * r + EXP_COEFFICIENTS[2]
    p = p * r + EXP_COEFFICIENTS[3]
    p = p * r + EXP_COEFFICIENTS[4]
    p = p * r + EXP_COEFFICIENTS[5]
    p = p * r + EXP_COEFFICIENTS[6]
    p = p * r + EXP_COEFFICIENTS[7]
    p = p * r + EXP_COEFFICIENTS[8]
    p = p * r + EXP_COEFFICIENTS[9]
    p = p * r + EXP_COEFFICIENTS[10]
    p = p * r + EXP_COEFFICIENTS[11]
    p = r * r * p
    p = r + p
    p = 1.0 + p
    exponent = int64(n)
    half = exponent >> int64(1)
    result = p * _power_of_two(half) * _power_of_two(exponent - half)
    result = _INFINITY if over else 0.0 if under else result
    return y if nan else result


@device
def _power_of_two(exponent):
    return float64_of((exponent + int64(1023)) << int64(52))
