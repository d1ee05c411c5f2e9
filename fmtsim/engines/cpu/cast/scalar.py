# SPDX-License-Identifier: Apache-2.0
"""Fast kernels for element formats on float32: rounding to nearest even and stochastic rounding of any grid.

A *grid* is what float formats and integers share: magnitudes ``n * 2**q`` with ``q`` constant below some exponent.
Two tricks serve all of them. The *magic addition* rounds ``|x|`` by adding and subtracting ``2**(23 - M)`` times its
binade, so that the addition itself drops the bits (float32 arithmetic rounds to nearest even):

    |x| = 1.mmm|rrrr * 2**e        magic = 2**(e + 23 - M)        |x| + magic = 2**(...) * 1.0...0mmm   (rrrr rounded)

The *bit addition* adds half a last place to the bits of ``|x|`` and cuts the rest; it serves formats whose exponents
reach float32's own limits, where the magic number would overflow, and formats without a mantissa or subnormals.
"""

from typing import NamedTuple

import numpy as np
from numpy import float32, int32, uint32

from fmtsim.engines.cpu.cast.words import fill_words
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel, prefetch
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


_EXPONENT = int32(0x7F800000)
_CHUNK = 256  # elements


@device
def limited(bits, limit, limit_negative):
    """Return the bits of a magnitude, at most the limit of its sign; saturating before rounding loses nothing.

    The largest value is on the grid: what lies above it rounds to it or beyond, whatever the random word.
    """
    return min(bits & _MAGNITUDE, limit if bits >= int32(0) else limit_negative)


@device
def finish(rounded, bits, g, special):
    """Apply special overflow, the sign, the rule for zeros and NaN to a rounded magnitude; return the value."""
    if special and rounded > g.over_above:
        rounded = g.over_value
    value = float32(float32_of(bits32(rounded) | (bits & g.sign)) + g.zero)
    spoiled = (bits & _MAGNITUDE) > _INF or (special and rounded != rounded)
    return g.nan_value if spoiled else value


@device
def magic_addition(magnitude, min_binade, magic_shift):
    """Round the bits of a magnitude to nearest even by magic addition; its binade plus the shift stays finite."""
    magic = float32_of(int32(max(magnitude & _EXPONENT, min_binade) + magic_shift))
    return float32(float32(float32_of(magnitude) + magic) - magic)


@device
def nearest_magic(x, g, special):
    """Round float32 x to nearest even by magic addition; ``special`` says whether overflow is not saturation."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    return finish(magic_addition(magnitude, g.min_binade, g.magic_shift), bits, g, special)


@device
def nearest_bits(x, g, flush):
    """Round float32 x to nearest even by bit addition; ``flush`` says whether the lowest numbers need a comparison."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    odd = ((magnitude >> g.drop) + g.parity) & int32(1)
    rounded = int32(magnitude + g.half_place + odd) & g.keep_mask
    if flush and magnitude < g.flush_below:
        rounded = g.flush_below if magnitude > g.flush_half else g.flush_to
    return finish(float32_of(rounded), bits, g, False)


@device
def stochastic_bits(x, word, g):
    """Round float32 x stochastically with 32 random bits, on its bit pattern."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    rounded = int32(magnitude + int32(word >> uint32(int32(32) - g.drop))) & g.keep_mask
    return finish(float32_of(rounded), bits, g, True)


@device
def stochastic_shift(x, word, g):
    """Round float32 x stochastically with 32 random bits, on the integer significand; fewer than 32 bits are dropped.

    A zero passes too: it has no bits to drop.
    """
    bits = bits32(x)
    exponent, significand, drop = unpack(limited(bits, g.limit, g.limit_negative), g)
    near = min(drop, int32(31))
    steps = int32(uint32(uint32(significand) + uint32(word >> uint32(int32(32) - near))) >> uint32(near))
    return finish(place_steps(steps, exponent, drop), bits, g, True)


@device
def stochastic_deep(x, word, g):
    """Round like ``stochastic_shift`` where 32 bits and more may be dropped: there only a carry out of them counts."""
    bits = bits32(x)
    exponent, significand, drop = unpack(limited(bits, g.limit, g.limit_negative), g)
    near = min(drop, int32(31))
    steps = int32(uint32(uint32(significand) + uint32(word >> uint32(int32(32) - near))) >> uint32(near))
    far = min(max(int32(drop - int32(32)), int32(0)), int32(31))
    room = int32(~int32(word))  # significand + word reaches 2**32 when the significand exceeds ~word, unsigned
    carry = int32(int32(significand >> far) > (room if room >= int32(0) else _MAGNITUDE))
    return finish(place_steps(steps if drop < int32(32) else carry, exponent, drop), bits, g, True)


@device
def unpack(magnitude, g):
    """Split a float32 magnitude into exponent field, significand and the number of bits to drop."""
    exponent = max(int32(magnitude >> int32(23)), int32(1))
    significand = (magnitude & int32(0x7FFFFF)) | (int32(0x800000) if magnitude >= int32(0x800000) else int32(0))
    drop = int32(g.drop + max(int32(g.min_biased - exponent), int32(0)))
    return exponent, significand, drop


@device
def place_steps(steps, exponent, drop):
    """Return a number of steps of the last place as float32 (Inf where they pass its range)."""
    return float32(float32(steps) * float32_of(int32(int32(exponent + drop - int32(23)) << int32(23))))


@device
def _ask(x, base):
    """Ask for the lines of a chunk some chunks on: the memory answers while this one is rounded."""
    for i in range(base, base + _CHUNK, 16):
        prefetch(x, i + 4 * _CHUNK)


@kernel
def nearest_saturating(x, y, g):
    """Quantise float32 x into float32 y, to nearest even; one of four kernels, so that each compiles fast."""
    for base in range(0, x.size, _CHUNK):
        _ask(x, base)
        part, result = x[base : base + _CHUNK], y[base : base + _CHUNK]
        for i in range(part.size):
            result[i] = nearest_magic(part[i], g, False)


@kernel
def nearest_special(x, y, g):
    """Quantise float32 x into float32 y where overflow gives Inf or NaN."""
    for base in range(0, x.size, _CHUNK):
        _ask(x, base)
        part, result = x[base : base + _CHUNK], y[base : base + _CHUNK]
        for i in range(part.size):
            result[i] = nearest_magic(part[i], g, True)


@kernel
def nearest_linear(x, y, g):
    """Quantise float32 x into float32 y by bit addition."""
    for base in range(0, x.size, _CHUNK):
        _ask(x, base)
        part, result = x[base : base + _CHUNK], y[base : base + _CHUNK]
        for i in range(part.size):
            result[i] = nearest_bits(part[i], g, False)


@kernel
def nearest_flushed(x, y, g):
    """Quantise float32 x into float32 y by bit addition, where the lowest numbers need a comparison."""
    for base in range(0, x.size, _CHUNK):
        _ask(x, base)
        part, result = x[base : base + _CHUNK], y[base : base + _CHUNK]
        for i in range(part.size):
            result[i] = nearest_bits(part[i], g, True)


def nearest_kernel(g):  # type: ignore[no-untyped-def]
    """Return the kernel that rounds to nearest even on a grid."""
    if g.by_bits:
        return nearest_flushed if g.flush_below else nearest_linear
    return nearest_special if g.special else nearest_saturating


@kernel
def stochastic_flat(x, y, g, w, start):
    """Quantise elements ``start ...`` (a multiple of 64) of a float32 tensor, given as x, into y, stochastically."""
    words = np.empty(64, np.uint32)
    for base in range(0, x.size, 64):
        count = min(64, x.size - base)
        fill_words(start + base, count, w, words)
        part, result = x[base : base + count], y[base : base + count]
        if g.by_bits:
            for j in range(count):
                result[j] = stochastic_bits(part[j], words[j], g)
            continue
        deep = int32(0)
        for j in range(count):
            magnitude = bits32(part[j]) & _MAGNITUDE
            deep |= int32((magnitude < g.deep_below) & (magnitude != int32(0)))
        if deep:
            for j in range(count):
                result[j] = stochastic_deep(part[j], words[j], g)
        else:
            for j in range(count):
                result[j] = stochastic_shift(part[j], words[j], g)
