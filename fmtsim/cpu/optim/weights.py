# SPDX-License-Identifier: Apache-2.0
"""Steps of weights that are codes: bytes with a scale a row, rounded stochastically, and logarithms under Madam.

The definitions are fmtsim/optim/codec.py and rules.py; the bits are the same. Bytes become float32 before a step and
bytes again after it; logarithms are moved in one pass.
"""

import numpy as np
import torch
from numpy import float32, int8, int32, int64, uint64

from fmtsim.cpu.cast.words import fill64, key_words
from fmtsim.cpu.optim.moments import arrays_of, count_infinite, dropped, in_lanes, is_infinite
from fmtsim.cpu.runtime import simd
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.formats.spec import IntFormat, LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.optimizer import Numbers, StateFormat

_MAGNITUDE, _LEAST = int32(0x7FFFFFFF), float32(1e-12)
_ONE_ON, _MOST = float32(2.0**32), float32(512.0)


def takes_bytes(fmt: StateFormat) -> bool:
    """Return True if kernels serve weights of a format: bytes, 32 random bits, scales of rows that are inverted."""
    element = fmt.format
    whole = isinstance(element, IntFormat) and element.bits == 8 and element.signed and not element.half_offset
    if not whole or not isinstance(element, IntFormat) or element.fraction_bits:
        return False
    return fmt.block == (1, None) and fmt.rule == "inverse" and fmt.rounding == Rounding(mode="stochastic")


def decode_bytes(codes: torch.Tensor, scales: torch.Tensor, row: int) -> torch.Tensor:
    """Return the float32 values of codes (uint8) with a scale for each row, flat."""
    out = torch.empty(codes.numel(), dtype=torch.float32)
    arguments = (*arrays_of([codes.view(torch.int8), scales, out]), row)
    run(lambda start, stop: _decode(*arguments, start, stop), scales.numel(), 1, row)
    return out


def encode_bytes(
    x: torch.Tensor,
    fmt: StateFormat,
    row: int,
    key: RandomKey,
    codes: torch.Tensor,
    scales: torch.Tensor,
    to: torch.Tensor,
) -> None:
    """Write codes and scales of float32 numbers, and what these decode to."""
    assert isinstance(fmt.format, IntFormat)  # takes_bytes() asked
    ends = fmt.format.min_code, fmt.format.max_code, np.float32(fmt.least)
    arguments = (*arrays_of([x, codes.view(torch.int8), scales, to]), row, *ends, *key_words(key))
    run(lambda start, stop: _encode(*arguments, start, stop), scales.numel(), 1, row)


@kernel
def _decode(codes, scales, out, row, start, stop):
    for r in range(start, stop):
        for i in range(r * row, (r + 1) * row):
            out[i] = float32(codes[i]) * scales[r]


@kernel
def _encode(x, codes, scales, out, row, lowest, highest, least, o0, o1, k0, k1, start, stop):
    words = np.empty(64, np.uint32)
    for r in range(start, stop):
        first, end = r * row, (r + 1) * row
        top = bits32(least)
        for i in range(first, end):
            top = max(top, bits32(x[i]) & _MAGNITUDE)
        scale = float32_of(top) / float32(highest)
        inverse = float32(1.0) / (_LEAST if scale < _LEAST else scale)
        scales[r] = scale
        for block in range(first >> 6, (end + 63) >> 6):
            fill64(words, 0, block, o0, o1, k0, k1)
            for i in range(max(first, block * 64), min(end, block * 64 + 64)):
                code = _code(x[i] * inverse, words[i - block * 64], lowest, highest)
                codes[i] = code
                out[i] = float32(code) * scale


@device
def _code(y, word, lowest, highest):
    """Return the code of a number: down, or up where the random word and what lies behind the point reach 1."""
    size = min(abs(y), _MOST) if y == y else _MOST
    whole = int32(size)
    part = int64((size - float32(whole)) * _ONE_ON)
    number = int64(whole) + ((part + int64(uint64(word))) >> int64(32))
    number = -number if y < float32(0.0) else number
    return int8(min(max(number, int64(lowest)), int64(highest)))


BITS = 16  # of a logarithm


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
    octave = np.zeros(fmt.gamma, np.float32)
    octave[: fmt.max_code + 1] = fmt.magnitudes[: fmt.gamma]
    how = octave.view(np.int32), np.array(numbers, np.float32), fmt.gamma, fmt.gamma.bit_length() - 1, float(scale)
    tensors = parameter, gradient, second, codes
    return in_lanes(tensors, lambda arrays, *ends: _logarithms(*arrays, *how, rounded, zeroing, *ends))


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
