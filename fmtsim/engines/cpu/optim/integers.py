# SPDX-License-Identifier: Apache-2.0
"""Weights that are kept as bytes with a scale a row, rounded stochastically: into float32 before a step, and back.

The definition is fmtsim/optim/codec.py; the bits are the same.
"""

import numpy as np
import torch
from numpy import float32, int8, int32, int64, uint64

from fmtsim.engines.cpu.cast.words import fill64, key_words
from fmtsim.engines.cpu.optim.moments import arrays_of
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.engines.cpu.runtime.pool import run
from fmtsim.formats.spec import IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.optimizer import StateFormat

_MAGNITUDE, _INFINITY, _LEAST = int32(0x7FFFFFFF), int32(0x7F800000), float32(1e-12)
_ONE_ON, _MOST = float32(2.0**32), float32(512.0)


def takes(fmt: StateFormat) -> bool:
    """Say whether weights are kept so: whole bytes, 32 random bits, scales of rows that are inverted."""
    element = fmt.format
    whole = isinstance(element, IntFormat) and element.bits == 8 and element.signed and not element.half_offset
    if not whole or not isinstance(element, IntFormat) or element.fraction_bits:
        return False
    return fmt.block == (1, None) and fmt.rule == "inverse" and fmt.rounding == Rounding(mode="stochastic")


def decoded(codes: torch.Tensor, scales: torch.Tensor, row: int) -> torch.Tensor:
    """Return the float32 values of codes (uint8) with a scale for each row, flat."""
    out = torch.empty(codes.numel(), dtype=torch.float32)
    given = (*arrays_of([codes.view(torch.int8), scales, out]), row)
    run(lambda start, stop: _decode(*given, start, stop), scales.numel(), 1, row)
    return out


def encode(
    x: torch.Tensor,
    fmt: StateFormat,
    row: int,
    key: RandomKey,
    codes: torch.Tensor,
    scales: torch.Tensor,
    to: torch.Tensor,
) -> None:
    """Write codes and scales of float32 numbers, and what these decode to."""
    assert isinstance(fmt.format, IntFormat)  # takes() asked
    ends = fmt.format.min_code, fmt.format.max_code, np.float32(fmt.least)
    given = (*arrays_of([x, codes.view(torch.int8), scales, to]), row, *ends, *key_words(key))
    run(lambda start, stop: _encode(*given, start, stop), scales.numel(), 1, row)


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
