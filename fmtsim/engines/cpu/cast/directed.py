# SPDX-License-Identifier: Apache-2.0
"""Fast kernel for the deterministic roundings but nearest even, on float32: they differ in what is added before a cut.

With the dropped bits of the significand below the last place, adding nothing, half a place, half a place less one, or a
place less one, and cutting, rounds toward zero, to nearest away, to nearest toward zero, and away from zero.
"""

from typing import NamedTuple

import numpy as np
from numpy import int32, uint32

from fmtsim.engines.cpu.cast.scalar import finish, limited, place_steps, unpack
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.rounding.modes import Mode

_INF = int32(0x7F800000)
_MAGNITUDE = int32(0x7FFFFFFF)


class Direction(NamedTuple):
    """What to add to the dropped bits: halves, minus ``less``, or all ones for either sign; ``jam`` for to_odd."""

    halves: np.int32
    less: np.int32
    positive: np.int32
    negative: np.int32
    jam: np.int32


def direction_of(mode: Mode) -> Direction:
    """Return the addends of a rounding mode."""
    halves = mode in ("nearest_away", "nearest_toward_zero")
    flags = halves, mode == "nearest_toward_zero", mode == "up", mode == "down", mode == "to_odd"
    return Direction(*(np.int32(flag) for flag in flags))


@device
def _cut(significand, drop, positive, d):
    """Return the significand in units of the last place, ``drop`` bits (1 to 25) above its own."""
    ones = int32((int32(1) << drop) - int32(1))
    addend = d.halves * (int32(1) << int32(drop - int32(1))) - d.less + ones * (d.positive if positive else d.negative)
    steps = int32(uint32(int32(significand + addend)) >> uint32(drop))
    return steps | (d.jam & int32((significand & ones) != int32(0)))


@kernel
def directed_flat(x, y, g, d):
    """Quantise float32 x into float32 y."""
    for i in range(x.size):
        bits = bits32(x[i])
        magnitude = limited(bits, g.limit, g.limit_negative)
        positive = bits >= int32(0)
        if g.by_bits:
            rounded = float32_of(int32(_cut(magnitude, g.drop, positive, d) << g.drop))
        else:
            exponent, significand, drop = unpack(magnitude, g)
            steps = _cut(significand, min(drop, int32(25)), positive, d)
            rounded = place_steps(steps, exponent, drop)
        if g.special and (bits & _MAGNITUDE) == _INF:
            rounded = np.float32(np.inf)  # the limits hold finite numbers back, not Inf
        y[i] = finish(rounded, bits, g, True)
