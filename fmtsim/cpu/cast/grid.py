# SPDX-License-Identifier: Apache-2.0
"""What the fast kernels take: a format as numbers (float formats and integers are both grids), and random words.

Words are drawn from a key while elements are rounded, or laid out beforehand. Stochastic rounding with r bits is that
with 32 of a word whose upper r bits are drawn and whose others are zero.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy import int64, uint64

from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import borrowing, device, kernel, subroutine
from fmtsim.cpu.runtime.kernel_numbers import philox
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat, Overflow
from fmtsim.rounding.modes import RULES, Mode, Rounding
from fmtsim.spec.cast import Random, RandomKey


@borrowing
def fill64(words, at, block, o0, o1, k0, k1):
    """Write the words of the 64 elements ``64 * block ...`` into ``words`` from ``at`` on."""
    first, place = uint64(block) * uint64(16), uint64(at)  # unsigned: numba then does not look for negative indices
    for j in range(16):  # lane k of counter j serves element 16 k + j
        w0, w1, w2, w3 = philox(first + uint64(j), o0, o1, k0, k1)
        words[place + uint64(j)] = w0
        words[place + uint64(16 + j)] = w1
        words[place + uint64(32 + j)] = w2
        words[place + uint64(48 + j)] = w3


@device
def _reverse_byte(byte):
    byte = ((byte & 0x0F) << 4) | (byte >> 4)
    byte = ((byte & 0x33) << 2) | ((byte >> 2) & 0x33)
    return ((byte & 0x55) << 1) | ((byte >> 1) & 0x55)


@subroutine
def integer_at(index, random_bits, shared, o0, o1, k0, k1):
    """Return the random integer of one element: ``random_bits`` wide, in ``cvt.rs`` order where ``shared``."""
    # 1. the counter and the lane of the element, or of the two or four that share a word
    place = uint64(index)
    if shared:
        place = place >> uint64(2 if random_bits == 8 else 1)
    w0, w1, w2, w3 = philox((place >> uint64(6)) * uint64(16) + (place & uint64(15)), o0, o1, k0, k1)
    lane = int64((place >> uint64(4)) & uint64(3))
    word = int64(w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3)
    # 2. the element's bits of it
    if not shared:
        return word >> (32 - random_bits)
    if random_bits == 8:
        lane = index & 3
        byte = (word >> (8 if lane == 0 else 0 if lane == 1 else 24 if lane == 2 else 16)) & 0xFF
        return _reverse_byte(byte) if lane & 1 else byte
    return (word >> (16 * (index & 1))) & ((1 << random_bits) - 1)


KeyWords = tuple[np.uint32, np.uint32, np.uint32, np.uint32]
_NONE = np.zeros(0, np.uint32)
_ALL = np.uint32(0xFFFFFFFF)


class Words(NamedTuple):
    """Words of the elements of a matrix, in order: those of an array, or where ``array`` is empty those of a key.

    ``mask`` keeps the bits that are drawn; ``o0, o1`` are the key's offset, ``k0, k1`` its seed.
    """

    array: np.ndarray
    mask: np.uint32
    o0: np.uint32
    o1: np.uint32
    k0: np.uint32
    k1: np.uint32


def key_words(key: RandomKey) -> KeyWords:
    """Return offset and seed as the 32-bit words that Philox takes."""
    halves = (number >> place & 0xFFFFFFFF for number in (key.offset, key.seed) for place in (0, 32))
    return tuple(np.uint32(half) for half in halves)  # type: ignore[return-value]  # four of them


def words_of(rounding: Rounding, random: Random, shape: torch.Size, dim: int = -1) -> Words:
    """Return the words of a tensor's elements in the order of its operand matrix along ``dim``."""
    mask, drawn = np.uint32((1 << 32) - (1 << (32 - rounding.bits))), isinstance(random, RandomKey)
    if drawn and rounding.layout == "word" and (dim == -1 or len(shape) < 2):
        return Words(_NONE, mask, *key_words(random))  # type: ignore[arg-type]  # the check is in ``drawn``
    array = (integers_of(rounding, random, shape, dim) << (32 - rounding.bits)).numpy().astype(np.uint32)
    return Words(array, mask, *key_words(RandomKey(0)))


def integers_of(rounding: Rounding, random: Random, shape: torch.Size, dim: int = -1) -> torch.Tensor:
    """Return the random integers themselves, int64 in the order of the operand matrix, flat."""
    if isinstance(random, RandomKey):
        drawn = torch.empty(shape, dtype=torch.int64)
        out, how = drawn.view(-1).numpy(), (rounding.bits, rounding.layout == "cvt_rs", *key_words(random))
        pool.run(lambda start, stop: draw_integers(out, *how, start, stop), out.size, align=64)
    else:
        assert random is not None  # verbs see to it
        drawn = random.to(torch.int64)
    return (drawn.movedim(dim, -1) if shape else drawn).reshape(-1)


@kernel
def draw_integers(out, random_bits, shared, o0, o1, k0, k1, start, stop):
    """Write the random integers of elements ``start ... stop - 1``."""
    for i in range(start, stop):
        out[i] = integer_at(i, random_bits, shared, o0, o1, k0, k1)


@borrowing
def fill_words(first, count, w, buffer):
    """Write the words of ``count`` elements from ``first`` on to ``buffer`` of ``count + 128``, from ``first % 64`` on.

    Words of an array are copied one by one, so that loops of kernels always read this buffer: with a slice of either
    array they took 12 % longer.
    """
    place = first & 63
    if w.array.size == 0:
        for block in range(first >> 6, (first + count + 63) >> 6):
            fill64(buffer, 64 * (block - (first >> 6)), block, w.o0, w.o1, w.k0, w.k1)
    else:
        for i in range(count):
            buffer[place + i] = w.array[first + i]
    if w.mask != _ALL:
        for i in range(place + count):
            buffer[i] &= w.mask


_F32_BIAS = 127
FLT_MAX = 3.4028234663852886e38


class Grid(NamedTuple):
    """Parameters of a grid for float32 kernels, each of the type that the kernels compute with.

    Attributes:
        limit, limit_negative: Bits of the magnitudes at which either sign saturates, before rounding; where overflow
            is special a magnitude that rounds to something above ``over_above``.
        sign: The sign bit, 0 for an unsigned format.
        special: Whether what rounds above ``over_above`` must be turned into ``over_value``.
        nan_value: What NaN gives.
        zero: What is added at the end: +0 turns -0 into +0 for formats without it, -0 changes nothing.
        by_bits: Whether rounding goes by bit addition instead of magic addition.
        min_binade: Exponent field of the smallest normal value, in place.
        magic_shift: Exponent distance of the magic number, in place.
        min_biased: Exponent field of the smallest normal value.
        drop: float32 mantissa bits that the format lacks.
        half_place, keep_mask, parity: Half a last place less one, the kept bits, and what to add for even codes.
        flush_below, flush_half, flush_to: Magnitudes (bits) below the first become the first, or the third where they
            do not exceed the second: a zero and the smallest normal without subnormals, the two smallest values without
            a zero; else 0.
    """

    limit: np.int32
    limit_negative: np.int32
    sign: np.int32
    special: np.bool_
    over_above: np.float32
    over_value: np.float32
    nan_value: np.float32
    zero: np.float32
    by_bits: np.bool_
    min_binade: np.int32
    magic_shift: np.int32
    min_biased: np.int32
    drop: np.int32
    half_place: np.int32
    keep_mask: np.int32
    parity: np.int32
    flush_below: np.int32
    flush_half: np.int32
    flush_to: np.int32


class Shape(NamedTuple):
    """A grid's geometry: last place ``2**(max(e, min_exponent) - mantissa_bits)``."""

    mantissa_bits: int
    min_exponent: int
    flushed: bool


def shape_of(fmt: FloatFormat | IntFormat) -> Shape:
    """Return the geometry; an integer is a float whose values are all subnormal."""
    if isinstance(fmt, IntFormat):
        mantissa_bits = max(fmt.bits + 2, 22)
        return Shape(mantissa_bits, mantissa_bits - fmt.fraction_bits, False)
    return Shape(fmt.mantissa_bits, fmt.min_exponent, not fmt.has_subnormals)


@lru_cache(maxsize=1024)
def grid_of(fmt: ElementFormat, overflow: Overflow, mode: Mode) -> Grid | None:
    """Return the parameters of the fast kernels, or None where a cast needs the general one."""
    if not isinstance(fmt, FloatFormat | IntFormat) or (isinstance(fmt, IntFormat) and fmt.half_offset):
        return None
    shape = shape_of(fmt)
    mantissa_bits, min_exponent, flushed = shape
    nearest, is_float = mode == "nearest_even", isinstance(fmt, FloatFormat)
    saturate = overflow == "saturate" or not is_float
    bare = isinstance(fmt, FloatFormat) and not fmt.has_zero
    if mantissa_bits > 22 or min_exponent < -126 - bare or (not fmt.signed and not saturate):
        return None
    if fmt.max > FLT_MAX:  # in float32 its largest value would be Inf
        return None
    linear = is_float and min_exponent == -126 and not flushed and mantissa_bits > 0
    flush = flushed or (mantissa_bits == 0 and nearest)
    natural = saturate or (linear and nearest and fmt.infinities)  # type: ignore[union-attr]
    if flush and not (nearest and saturate) or (linear and nearest and not natural):
        return None
    if not nearest and not linear and min_exponent < mantissa_bits - 126:
        return None
    if mode == "stochastic" and not linear and fmt.max_exponent > 125:  # steps are counted by normal factors
        return None
    rule = RULES[mode]
    if mantissa_bits == 0 and not nearest and rule.looks_at_parity:  # the kernels see that of the significand
        return None
    if nearest and not (linear or flush) and fmt.max_exponent + 1 + 23 - mantissa_bits > 127:
        return None
    by_bits = linear or flush
    saturate = overflow == "saturate" or isinstance(fmt, IntFormat)
    drop = 23 - shape.mantissa_bits
    shift = drop << 23
    place = 1 << drop
    negative_zero = isinstance(fmt, FloatFormat) and fmt.has_negative_zero
    has_zero = not isinstance(fmt, FloatFormat) or fmt.has_zero
    parity = (has_zero - _F32_BIAS - shape.min_exponent) & 1 if shape.mantissa_bits == 0 else 0
    if mode == "stochastic" and not by_bits:
        beyond = _bits(math.ldexp(1.0, fmt.max_exponent + 1))  # stays there, whatever the word
    else:
        beyond = _bits(math.inf) if by_bits or mode != "nearest_even" else np.int32((0x7F000000 - shift) | 0x7FFFFF)
    rule = RULES[mode]
    # the magnitude that Inf, and finite numbers under nearest rounding, become above the largest value
    over = fmt.max
    if isinstance(fmt, FloatFormat) and overflow != "saturate":
        over = math.inf if fmt.infinities else math.nan if fmt.has_nan else fmt.max
    smallest, tie, low = _flush_points(shape.min_exponent, has_zero) if flush else (0.0, 0.0, 0.0)
    return Grid(
        limit=_bits(fmt.max) if saturate or not rule.leaves_range(False) else beyond,
        limit_negative=_bits(abs(fmt.min) if has_zero else 0.0) if saturate or not rule.leaves_range(True) else beyond,
        sign=np.int32(-(1 << 31) if fmt.signed else 0),
        special=np.bool_(not natural),
        over_above=np.float32(math.inf if saturate else fmt.max),
        over_value=np.float32(over),
        nan_value=np.float32(math.nan if fmt.has_nan else fmt.max),
        zero=np.float32(-0.0 if negative_zero else 0.0),
        by_bits=np.bool_(by_bits),
        min_binade=np.int32(max(shape.min_exponent + _F32_BIAS, 0) << 23),
        magic_shift=np.int32(shift),
        min_biased=np.int32(shape.min_exponent + _F32_BIAS),
        drop=np.int32(drop),
        half_place=np.int32((place >> 1) - 1),
        keep_mask=np.int32(-place),
        parity=np.int32(parity),
        flush_below=_bits(smallest),
        flush_half=_bits(tie),
        flush_to=_bits(low),
    )


def _flush_points(min_exponent: int, has_zero: bool) -> tuple[float, float, float]:
    """Return the values between which the lowest numbers are rounded, and their midpoint: upper, midpoint, lower."""
    smallest = math.ldexp(1.0, min_exponent)
    return (smallest, smallest / 2, 0.0) if has_zero else (2 * smallest, 1.5 * smallest, smallest)


def _bits(value: float) -> np.int32:
    return np.float32(value).view(np.int32)
