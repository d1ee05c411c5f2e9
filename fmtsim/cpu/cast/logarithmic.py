# SPDX-License-Identifier: Apache-2.0
"""LogFMT tiles (docs/semantics.md, section 8): a tile's values are a table, in which its elements are looked up.

Float32 numbers become float64 and back by integers where they are subnormal, as in the torch engine: a process that
flushes those to zero gets the same bits. The logarithm and the exponential are ``fmtsim.rounding.elementary`` over
arrays, step by step the same.
"""

import math

import numpy as np
import torch
from numpy import float32, float64, int32, int64

from fmtsim import torch_engine
from fmtsim.cpu.cast.codes import store
from fmtsim.cpu.cast.grid import integers_of
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, bits64, device, float32_of, float64_of, kernel
from fmtsim.cpu.runtime.pool import array_of, run
from fmtsim.formats.block import LogTileFormat
from fmtsim.formats.packing import code_dtype
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
from fmtsim.scaling.blocks import blocks_of
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

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


_MAGNITUDE, _INF, _NORMAL = int32(0x7FFFFFFF), int32(0x7F800000), int32(0x00800000)
_OCTAVES = 32 * 0.6931471805599453  # the double nearest to 32 ln 2: a tile spans at most 2**32
_STEPS, _STEP, _FLT_MIN, _INTEGER = 2.0**149, 2.0**-149, 2.0**-126, 2.0**52
_WORK = 16  # of an element, in those of plain casts


def covers(spec: CastSpec) -> bool:
    """Return True if kernels round as a cast asks."""
    mode = spec.rounding.mode
    return mode == "nearest_even" or (mode == "stochastic" and spec.rounding.variant == "a")


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x, not float64, into out."""
    decode(encode(x, spec, random), spec, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return codes, steps (as scales) and lowest logarithms (as offsets) of x, not float64."""
    fmt = spec.format
    assert isinstance(fmt, LogTileFormat)
    if not x.numel():
        return torch_engine.encode(x, spec, random)
    blocks = blocks_of(tuple(x.shape), spec.dim, fmt.block)
    folded = blocks.fold(x).float().contiguous()
    codes = folded.new_empty(folded.shape, dtype=code_dtype(fmt.bits))
    low, step = folded.new_empty(len(folded)), folded.new_empty(len(folded))
    words, bits = torch.zeros((1, 0), dtype=torch.int64, device="cpu"), 0
    if spec.rounding.mode == "stochastic":
        words, bits = integers_of(spec.rounding, random, x.shape).view(x.shape), spec.rounding.bits
        words = blocks.fold(words).contiguous()
    arrays = [array_of(t) for t in (folded, words, codes, low, step)]
    pool.run(lambda *ends: _encode(*arrays, fmt.bits, bits, *ends), len(folded), 1, _WORK * folded.shape[1])
    return EncodedParts(blocks.unfold(codes).contiguous(), blocks.per_block(step), None, blocks.per_block(low))


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out, each rounded once to its dtype."""
    if not out.numel():
        return
    fmt = spec.format
    assert isinstance(fmt, LogTileFormat) and parts.scales is not None and parts.offsets is not None
    blocks = blocks_of(tuple(out.shape), spec.dim, fmt.block)
    codes = blocks.fold(parts.codes).contiguous()
    values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    tiles = (parts.offsets.reshape(-1).contiguous(), parts.scales.reshape(-1).contiguous())
    arrays = [array_of(t) for t in (codes, *tiles, values)]
    pool.run(lambda *ends: _decode(*arrays, fmt.bits, *ends), len(codes), 1, _WORK * codes.shape[1])
    store(blocks.unfold(values), out)


@device
def _wide(magnitude):
    """Return the float64 of the bits of a float32 magnitude."""
    return float64(magnitude) * _STEP if magnitude < _NORMAL else float64(float32_of(magnitude))


@device
def _rounded(y):
    """Round a float64 from 0 to a float32 number, kept in float64."""
    return ((y * _STEPS + _INTEGER) - _INTEGER) * _STEP if y < _FLT_MIN else float64(float32(y))


@device
def _narrow(y):
    """Return the float32 of a float64 magnitude that is one, or NaN."""
    return float32_of(int32(y * _STEPS)) if y < _FLT_MIN else float32(y)


@device
def _range(line, most):
    """Return low and step of a tile, whether all is zero or not finite, and whether there is a NaN."""
    top, near, nan = int32(0), _INF, False
    for i in range(line.size):
        magnitude = bits32(line[i]) & _MAGNITUDE
        top = max(top, magnitude if magnitude < _INF else int32(0))
        near = min(near, magnitude if magnitude > int32(0) else _INF)
        nan |= magnitude > _INF
    # 1. the logarithms of the largest magnitude and of the smallest one that is not zero, 32 octaves apart at most
    if top == int32(0):
        return 0.0, 0.0, True, nan
    high = logarithm(_wide(top))
    lowest = max(logarithm(_wide(near)), high - _OCTAVES)
    # 2. the lowest logarithm and the step, both float32
    sign = -1.0 if lowest < 0.0 else 1.0
    low = sign * _rounded(abs(lowest))
    return low, _rounded(max(high - low, 0.0) / float64(most - 1)), False, nan


@kernel
def _encode(x, words, codes, lows, steps, bits, random_bits, start, stop):
    count = 1 << (bits - 1)
    table, firsts = np.zeros(count, np.float64), np.zeros(count, np.int64)
    for tile in range(start, stop):
        line, line_codes = x[tile], codes[tile]
        low, step, empty, nan = _range(line, count - 1)
        lows[tile], steps[tile] = np.nan if nan else low, step
        if empty:
            for i in range(line.size):
                bits_of = bits32(line[i])
                line_codes[i] = count if bits_of < int32(0) and (bits_of & _MAGNITUDE) <= _INF else 0
            continue
        # 1. the tile's values, and the first code of each: equal values have the lowest one
        for r in range(1, count):
            table[r] = _rounded(exponential(low + step * float64(r - 1)))
        for r in range(1, count):
            firsts[r] = firsts[r - 1] if table[r] == table[r - 1] else r
        for i in range(line.size):
            sign, magnitude = bits32(line[i]) < int32(0), bits32(line[i]) & _MAGNITUDE
            y = table[count - 1] if magnitude >= _INF else min(_wide(magnitude), table[count - 1])
            # 2. binary search for the largest value that is not above y
            rank, half = 0, count >> 1
            while half:
                rank += half if table[rank + half] <= y else 0
                half >>= 1
            # 3. that value or the next one
            lower, upper = table[rank], table[min(rank + 1, count - 1)]
            if random_bits:
                up = _drawn(y, lower, upper, random_bits, words[tile, i])
            else:
                middle = (lower + upper) * 0.5
                up = y > middle or (y == middle and firsts[rank] & 1 == 1)
            # 4. its first code, and the sign
            rank = firsts[min(rank + int64(up and y != lower), count - 1)]
            line_codes[i] = rank | (count if sign and magnitude <= _INF else 0)


@device
def _drawn(y, lower, upper, random_bits, word):
    """Return True if a number between two values moves up with this random word."""
    t = (y - lower) / (upper - lower)
    t = t if t - t == 0.0 else 0.0
    return int64(np.floor(t * float64(1 << random_bits))) + word >= 1 << random_bits


@kernel
def _decode(codes, lows, steps, values, bits, start, stop):
    count = 1 << (bits - 1)
    for tile in range(start, stop):
        low, step = float64(lows[tile]), float64(steps[tile])
        line, line_values = codes[tile], values[tile]
        for i in range(line.size):
            code = int64(line[i])
            rank = code & (count - 1)
            value = _narrow(_rounded(exponential(low + step * float64(rank - 1))))
            value = float32(0) if rank == 0 and low == low else value
            line_values[i] = -value if code & count and value == value else value
