# SPDX-License-Identifier: Apache-2.0
"""Casts of element formats on the CPU, and the kernels that round float32 to the grid of any of them.

A *grid* is what float formats and integers share: magnitudes ``n * 2**q`` with ``q`` constant below some exponent.
Two tricks round to nearest even on all of them. The *magic addition* adds and subtracts ``2**(23 - M)`` times the
binade of ``|x|``, so that the addition itself drops the bits (float32 arithmetic rounds to nearest even):

    |x| = 1.mmm|rrrr * 2**e        magic = 2**(e + 23 - M)        |x| + magic = 2**(...) * 1.0...0mmm   (rrrr rounded)

The *bit addition* adds half a last place to the bits of ``|x|`` and truncates; it serves formats whose exponents reach
float32's own limits, where the magic number would overflow, and formats without a mantissa or subnormals. Other modes
add what their thresholds say, or random bits. Formats that are no grid go by a table (codes.py).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy import float32, int32, uint32, uint64

from fmtsim.cpu.cast.codes import (
    SHIFT,
    code_by_table,
    code_flat,
    coding_of,
    round_by_table,
    store,
    table_of,
    values_of,
)
from fmtsim.cpu.cast.grid import Grid, fill_words, grid_of, words_of
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel, max32, min32, prefetch, whole_part
from fmtsim.cpu.runtime.pool import array_of, past_caches, scratch
from fmtsim.cpu.runtime.strips import fence, put
from fmtsim.formats.element import ElementFormat, IntFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.rounding.modes import RULES
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, in_one_order

_AT_ONCE = 1 << 16  # elements that pass through a float32 scratch at once
Cast = Callable[[torch.Tensor, torch.Tensor, int, bool], None]
"""``cast(x, out, start, streams)`` writes values or codes of float32 elements, of which the first has index ``start``;
``streams`` lets values go past the caches, to where a cache line begins."""


def quantizer(spec: CastSpec) -> Callable[[torch.Tensor, CastSpec, Random, torch.Tensor], None] | None:
    """Return the function that quantises x into out (any float dtypes and strides; out may be x), or None."""
    if spec.rounding.mode == "stochastic":
        fmt: ElementFormat = spec.format  # type: ignore[assignment]
        return partial(_quantize, None) if grid_for(fmt, spec) is not None else None
    cast = caster(spec, None, torch.Size())
    return None if cast is None else partial(_quantize, cast)


def _quantize(fixed: Cast | None, x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    if x.is_contiguous() and out.is_contiguous():
        source, target = x.view(-1), out.view(-1)
    else:
        source, target = in_one_order(x, out, ordered=random is not None)
    cast = fixed or caster(spec, random, x.shape)
    assert cast is not None
    streams = past_caches(source, target)

    def part(start: int, stop: int) -> None:
        if source.dtype == target.dtype == torch.float32:
            cast(source[start:stop], target[start:stop], start, streams)
            return
        for first in range(start, stop, _AT_ONCE):
            piece = source[first : min(first + _AT_ONCE, stop)].float()
            result = torch.empty_like(piece)
            cast(piece, result, first, False)
            store(result, target[first : first + piece.numel()])

    pool.run(part, source.numel(), align=64)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def encoder(spec: CastSpec) -> Callable[[torch.Tensor, CastSpec, Random], EncodedParts] | None:
    """Return the function that encodes x, None without a kernel."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    coded = grid_for(fmt, spec) is not None and coding_of(fmt) is not None
    return _encode if coded or table_of(fmt, spec.rounding, spec.overflow) is not None else None


def _encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    source = x.contiguous().view(-1)
    codes = torch.empty(source.shape, dtype=code_dtype(spec.format.bits))
    cast = _coder(spec, random, x.shape)

    def part(start: int, stop: int) -> None:
        for first in range(start, stop, _AT_ONCE):
            piece = source[first : min(first + _AT_ONCE, stop)].float()
            cast(piece, codes[first : first + piece.numel()], first, False)

    pool.run(part, source.numel(), align=64)
    return EncodedParts(codes.view(x.shape))


def grid_for(fmt: ElementFormat, spec: CastSpec) -> Grid | None:
    """Return the grid of an element format, None where kernels do not round to it as a cast asks.

    Kernels have only variant ``"a"`` of stochastic rounding.
    """
    if (isinstance(fmt, IntFormat) and fmt.bits > 20) or (
        spec.rounding.mode == "stochastic" and spec.rounding.variant != "a"
    ):
        return None
    return grid_of(fmt, spec.overflow, spec.rounding.mode)


def caster(spec: CastSpec, random: Random, shape: torch.Size) -> Cast | None:
    """Return the kernel that rounds float32 to values, with its arguments; None where no kernel does."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    grid, mode = grid_for(fmt, spec), spec.rounding.mode
    if grid is None:
        table = table_of(fmt, spec.rounding, spec.overflow)
        if table is None:
            return None
        with np.errstate(over="ignore"):
            values = values_of(fmt).astype(np.float32)
        return lambda piece, result, *_: round_by_table(array_of(piece), result.numpy(), table, values)
    if mode == "stochastic":
        words = words_of(spec.rounding, random, shape)
        draws = stochastic_special if grid.special else stochastic_saturating
        draws = stochastic_linear if grid.by_bits else draws
        return lambda piece, result, *at: draws(array_of(piece), result.numpy(), grid, words, *at)
    if mode == "nearest_even":
        # The kernel that rounds to nearest even on a grid.
        if grid.by_bits:
            kernel = nearest_flushed if grid.flush_below else nearest_linear
        else:
            kernel = nearest_special if grid.special else nearest_saturating
        return lambda piece, result, _, streams: kernel(array_of(piece), result.numpy(), grid, streams)
    # the addends of the rounding mode
    rule, fields = RULES[mode], []
    for negative in (False, True):
        even, odd = rule.threshold(False, negative), rule.threshold(True, negative)
        fields += [even >> 1 | odd >> 1 << 1, even & 1 | (odd & 1) << 1]
    direction = Direction(*map(np.int32, fields))
    return lambda piece, result, *_: directed_flat(array_of(piece), result.numpy(), grid, direction)


def _coder(spec: CastSpec, random: Random, shape: torch.Size) -> Cast:
    """Return the call that writes codes: of a kernel's values, which stay in a cache, or by a table."""
    fmt: ElementFormat = spec.format  # type: ignore[assignment]
    coding = coding_of(fmt)
    if coding is None or grid_for(fmt, spec) is None:
        table = table_of(fmt, spec.rounding, spec.overflow)
        return lambda piece, codes, *_: code_by_table(array_of(piece), codes.numpy(), table)
    cast = caster(spec, random, shape)
    assert cast is not None

    def code(piece: torch.Tensor, codes: torch.Tensor, start: int, _: bool) -> None:
        values = torch.from_numpy(scratch("values", piece.numel(), np.float32))
        cast(piece, values, start, False)
        code_flat(values.numpy(), codes.numpy(), coding)

    return code


_INF = int32(0x7F800000)
_MAGNITUDE = int32(0x7FFFFFFF)
_EXPONENT = int32(0x7F800000)
_STEPS, _PLACE = int32((277 << 23) - (1 << 32)), int32(23 << 23)  # exponents of 2**(254 + 23) and 2**23, in place
_CHUNK = 128  # elements


class Direction(NamedTuple):
    """The thresholds of a mode, which are 2 bits each, for either sign; bit 0 of a field is for even, bit 1 for odd.

    The addend is ``high`` times half a place plus ``low`` times half a place less one.
    """

    high_positive: np.int32
    low_positive: np.int32
    high_negative: np.int32
    low_negative: np.int32


@device
def _directed(significand, drop, positive, d):
    """Return the significand in units of the last place, ``drop`` bits (1 to 25) above its own."""
    drop &= SHIFT
    # 1. the threshold of this sign and parity: bits of the addends half a place, and half a place less one
    odd = int32(significand >> drop) & int32(1)
    high = int32((d.high_positive if positive else d.high_negative) >> odd) & int32(1)
    low = int32((d.low_positive if positive else d.low_negative) >> odd) & int32(1)
    # 2. 0, half - 1, half or 2 * half - 1 is added, and the bits below the last place are dropped
    half = int32(int32(1) << (int32(drop - int32(1)) & SHIFT))
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
            rounded = float32_of(int32(_directed(magnitude, g.drop, positive, d) << (g.drop & SHIFT)))
        else:
            exponent, significand, drop = unpack(magnitude, g)
            steps = _directed(significand, min32(drop, int32(25)), positive, d)
            rounded = place_steps(steps, exponent, drop)
        if g.special and (bits & _MAGNITUDE) == _INF:
            rounded = np.float32(np.inf)  # the limits hold finite numbers back, not Inf
        y[i] = finish(rounded, bits, g, True)


@device
def limited(bits, limit, limit_negative):
    """Return the bits of a magnitude, at most the limit of its sign; saturating before rounding loses nothing.

    The largest value is on the grid: what lies above it rounds to it or beyond, whatever the random word.
    """
    return min32(bits & _MAGNITUDE, limit if bits >= int32(0) else limit_negative)


@device
def finish(rounded, bits, g, special):
    """Apply special overflow, the sign, the rule for zeros and NaN to a rounded magnitude; return the value."""
    if special and rounded > g.over_above:
        rounded = g.over_value
    value = float32(float32_of(bits32(rounded) | (bits & g.sign)) + g.zero)
    is_nan = (bits & _MAGNITUDE) > _INF or (special and rounded != rounded)
    return g.nan_value if is_nan else value


@device
def magic_addition(magnitude, min_binade, magic_shift):
    """Round the bits of a magnitude to nearest even by magic addition; its binade plus the shift stays finite."""
    # below the smallest normal value the binade, and so the last place, is constant
    magic = float32_of(int32(max32(magnitude & _EXPONENT, min_binade) + magic_shift))
    return float32(float32(float32_of(magnitude) + magic) - magic)


@device
def nearest_magic(x, g, special):
    """Round float32 x to nearest even by magic addition; ``special`` is True where overflow does not saturate."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    return finish(magic_addition(magnitude, g.min_binade, g.magic_shift), bits, g, special)


@device
def nearest_bits(x, g, flush):
    """Round float32 x to nearest even by bit addition; ``flush`` is True where the lowest numbers need a comparison."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    # 1. half a last place less one, and one more where the code is odd; the carry runs into the exponent
    odd = int32((magnitude >> (g.drop & SHIFT)) + g.parity) & int32(1)
    rounded = int32(magnitude + g.half_place + odd) & g.keep_mask
    # 2. below the smallest normal value, or between the two smallest, the midpoint decides
    if flush and magnitude < g.flush_below:
        rounded = g.flush_below if magnitude > g.flush_half else g.flush_to
    return finish(float32_of(rounded), bits, g, False)


@device
def stochastic_bits(x, word, g, special):
    """Round float32 x stochastically with 32 random bits, on its bit pattern."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    rounded = int32(magnitude + int32(word >> uint32(-g.drop & SHIFT))) & g.keep_mask
    return finish(float32_of(rounded), bits, g, special)


@device
def stochastic_steps(x, word, g, special):
    """Round float32 x stochastically with 32 random bits, as a number of steps of the last place."""
    bits = bits32(x)
    magnitude = limited(bits, g.limit, g.limit_negative)
    # 1. the magnitude in steps: both products with powers of two are exact, but for what is far below 2**-32 of a step
    binade = max32(magnitude & _EXPONENT, g.min_binade)
    steps = float32(float32_of(magnitude) * float32_of(int32(_STEPS - g.magic_shift - binade)))
    whole = np.floor(steps)
    # 2. one more where the first 32 bits of the fraction and the word carry
    fraction = whole_part(float32(float32(steps - whole) * float32(4294967296.0)))
    whole = float32(whole + float32(1)) if fraction > ~word else whole
    rounded = float32(whole * float32_of(int32(binade + g.magic_shift - _PLACE)))
    return finish(rounded, bits, g, special)


@device
def unpack(magnitude, g):
    """Split a float32 magnitude into exponent field, significand and the number of bits to drop."""
    # subnormal numbers have the field of the smallest normal ones, and no leading one
    exponent = max32(int32(magnitude >> int32(23)), int32(1))
    significand = (magnitude & int32(0x7FFFFF)) | (int32(0x800000) if magnitude >= int32(0x800000) else int32(0))
    drop = int32(g.drop + max32(int32(g.min_biased - exponent), int32(0)))
    return exponent, significand, drop


@device
def place_steps(steps, exponent, drop):
    """Return a number of steps of the last place as float32 (Inf where they pass its range)."""
    return float32(float32(steps) * float32_of(int32(int32(exponent + drop - int32(23)) << int32(23))))


@device
def _prefetch(x, base):
    """Prefetch the cache lines of a later chunk while this one is rounded."""
    for i in range(base, base + _CHUNK, 16):
        prefetch(x, i + 8 * _CHUNK)


@device
def _aligned():
    """Return room for a chunk from a cache line on: with vectors across lines, kernels take a sixth longer on AMD."""
    whole = np.empty(_CHUNK + 16, np.float32)
    return whole[(-whole.ctypes.data % 64) // 4 :]


def _nearest(rounded, option):  # type: ignore[no-untyped-def]
    """Return a kernel that quantises float32 x into float32 y to nearest even; one for each option compiles fast."""

    @kernel
    def flat(x, y, g, streams):  # type: ignore[no-untyped-def]
        buffer = _aligned()
        for base in range(0, x.size, _CHUNK):
            _prefetch(x, base)
            first, count = uint64(base), min(_CHUNK, x.size - base)
            if count == _CHUNK:
                for i in range(_CHUNK):
                    buffer[i] = rounded(x[first + uint64(i)], g, option)
                for i in range(0, _CHUNK, 16):
                    put(buffer, i, y, base + i, streams)
            else:
                for i in range(count):
                    y[first + uint64(i)] = rounded(x[first + uint64(i)], g, option)
        fence()

    return flat


nearest_saturating, nearest_special = _nearest(nearest_magic, False), _nearest(nearest_magic, True)
nearest_linear, nearest_flushed = _nearest(nearest_bits, False), _nearest(nearest_bits, True)


def _stochastic(rounded, special):  # type: ignore[no-untyped-def]
    """Return a kernel that rounds elements ``start ...`` (a multiple of 64) of a tensor, as float32 x, into y."""

    @kernel
    def flat(x, y, g, w, start, streams):  # type: ignore[no-untyped-def]
        buffer, words = _aligned(), np.empty(_CHUNK, np.uint32)
        for base in range(0, x.size, _CHUNK):
            _prefetch(x, base)
            first, count = uint64(base), min(_CHUNK, x.size - base)
            fill_words(start + base, count, w, words)
            if count == _CHUNK:
                for i in range(_CHUNK):
                    buffer[i] = rounded(x[first + uint64(i)], words[i], g, special)
                for i in range(0, _CHUNK, 16):
                    put(buffer, i, y, base + i, streams)
            else:
                for i in range(count):
                    y[first + uint64(i)] = rounded(x[first + uint64(i)], words[i], g, special)
        fence()

    return flat


stochastic_saturating, stochastic_special = _stochastic(stochastic_steps, False), _stochastic(stochastic_steps, True)
stochastic_linear = _stochastic(stochastic_bits, True)
