# SPDX-License-Identifier: Apache-2.0
"""Codebooks, logarithmic formats and half-offset integers by a lookup of a float32 number's leading bits.

A rounding that draws nothing never falls: sorted from -NaN to NaN, numbers have codes that change at single points. Of
the numbers that share their leading 16 bits nearly always at most one such point parts two codes; a word for each
such bucket names both, and where the first one ends. The words are found with the torch engine, so they are right for
every format and rounding that they serve; where a bucket has three codes there is no table.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy import uint32

from fmtsim.engines import torch_engine
from fmtsim.engines.cpu.runtime.jit import bits32, device, kernel
from fmtsim.formats.spec import ElementFormat, Overflow
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec

_BUCKETS = 1 << 16
_LAST = 0xFFFF  # the last place of a bucket


@lru_cache(maxsize=32)
def table_of(fmt: ElementFormat, rounding: Rounding, overflow: Overflow) -> np.ndarray | None:
    """Return the words, uint32 [65536]: last place of the first code, first code, second code; None if they do not do.

    Bits 16 to 31 hold the place, bits 0 to 7 and 8 to 15 the codes. A bucket's index is its numbers' leading 16 bits.
    """
    if fmt.bits > 8 or rounding.mode == "stochastic":
        return None
    spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow)

    def codes(numbers: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(numbers.astype(np.uint32).view(np.float32))
        return torch_engine.encode(x, spec, None).codes.numpy()

    bases = np.arange(_BUCKETS, dtype=np.int64) << 16
    first, second = codes(bases), codes(bases + _LAST)
    below, above = np.zeros(_BUCKETS, np.int64), np.full(_BUCKETS, _LAST)  # places of the first and the second code
    mixed = np.flatnonzero(first != second)
    for _ in range(16):
        middle = (below[mixed] + above[mixed]) >> 1
        early = codes(bases[mixed] + middle) == first[mixed]
        below[mixed] = np.where(early, middle, below[mixed])
        above[mixed] = np.where(early, above[mixed], middle)
    if (codes(bases[mixed] + above[mixed]) != second[mixed]).any():
        return None
    below[first == second] = _LAST
    return (below << 16 | second.astype(np.int64) << 8 | first).astype(np.uint32)


@device
def found_code(x, words):
    """Return the code of a float32 number."""
    bits = uint32(bits32(x))
    word = words[bits >> uint32(16)]
    late = uint32((bits & uint32(_LAST)) > (word >> uint32(16)))
    return (word >> uint32(late << uint32(3))) & uint32(0xFF)


@kernel
def look_up(x, codes, words):
    """Write the codes of float32 numbers."""
    for i in range(x.size):
        codes[i] = found_code(x[i], words)


@kernel
def look_up_values(x, y, words, values):
    """Write the values that float32 numbers round to; ``values`` are those of all codes."""
    for i in range(x.size):
        y[i] = values[found_code(x[i], words)]
