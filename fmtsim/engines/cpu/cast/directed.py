# SPDX-License-Identifier: Apache-2.0
"""Fast kernel for the deterministic roundings but nearest even, on float32: they differ in what is added before a cut.

A mode moves a magnitude from a threshold on (``Rule.threshold``). With the dropped bits of the significand below the
last place, adding nothing, half a place less one, half a place, or a place less one, and cutting, moves it never, above
the half, from the half on, and always.
"""

from typing import NamedTuple

import numpy as np
from numpy import int32, uint32

from fmtsim.engines.cpu.cast.scalar import finish, limited, place_steps, unpack
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.rounding.modes import RULES, Mode

_INF = int32(0x7F800000)
_MAGNITUDE = int32(0x7FFFFFFF)


class Direction(NamedTuple):
    """The thresholds of a mode, which are 2 bits each, for either sign; bit 0 of a field is for even, bit 1 for odd.

    The addend is ``high`` times half a place plus ``low`` times half a place less one.
    """

    high_positive: np.int32
    low_positive: np.int32
    high_negative: np.int32
    low_negative: np.int32


def direction_of(mode: Mode) -> Direction:
    """Return the addends of a rounding mode."""
    rule, fields = RULES[mode], []
    for negative in (False, True):
        even, odd = rule.threshold(False, negative), rule.threshold(True, negative)
        fields += [even >> 1 | odd >> 1 << 1, even & 1 | (odd & 1) << 1]
    return Direction(*map(np.int32, fields))


@device
def _cut(significand, drop, positive, d):
    """Return the significand in units of the last place, ``drop`` bits (1 to 25) above its own."""
    odd = int32(significand >> drop) & int32(1)
    high = int32((d.high_positive if positive else d.high_negative) >> odd) & int32(1)
    low = int32((d.low_positive if positive else d.low_negative) >> odd) & int32(1)
    half = int32(int32(1) << int32(drop - int32(1)))
    addend = int32(half & int32(-high)) + int32(int32(half - int32(1)) & int32(-low))
    return int32(uint32(int32(significand + addend)) >> uint32(drop))


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
