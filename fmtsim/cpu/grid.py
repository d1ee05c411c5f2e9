"""A format as the numbers that the fast kernels take: float formats and integers are both grids."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat, Overflow

_F32_BIAS = 127


class Grid(NamedTuple):
    """Parameters of a grid for float32 kernels, each of the type that the kernels compute with.

    Attributes:
        limit, limit_negative: Bits of the magnitudes at which either sign saturates; Inf where overflow is special.
        special: Whether finite numbers above ``over_above``, and Inf, become ``over_value``.
        nan_value: What NaN gives.
        zero: What is added at the end: +0 turns -0 into +0 for formats without it, -0 changes nothing.
        by_bits: Whether rounding goes by bit addition instead of magic addition.
        min_binade: Exponent field of the smallest normal value, in place.
        top: Bits of a magnitude that stands in for all above it under special overflow, so that magic stays finite.
        magic_shift: Exponent distance of the magic number, in place.
        min_biased: Exponent field of the smallest normal value.
        deep_below: Bits of the magnitude below which 32 mantissa bits and more are dropped.
        drop: float32 mantissa bits that the format lacks.
        half_place, keep_mask, parity: Half a last place less one, the kept bits, and what to add for even codes.
        flush_below, flush_half: Bits of the smallest normal and of its half where there are no subnormals, else 0.
    """

    limit: np.int32
    limit_negative: np.int32
    special: np.bool_
    over_above: np.float32
    over_value: np.float32
    nan_value: np.float32
    zero: np.float32
    by_bits: np.bool_
    min_binade: np.int32
    top: np.int32
    magic_shift: np.int32
    min_biased: np.int32
    deep_below: np.int32
    drop: np.int32
    half_place: np.int32
    keep_mask: np.int32
    parity: np.int32
    flush_below: np.int32
    flush_half: np.int32


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


def special_value(fmt: FloatFormat, overflow: Overflow) -> float:
    """Return the magnitude that Inf, and finite numbers under nearest rounding, become above the largest value."""
    if overflow == "saturate":
        return fmt.max
    return math.inf if fmt.infinities else math.nan if fmt.has_nan else fmt.max


@lru_cache(maxsize=1024)
def grid_of(fmt: ElementFormat, overflow: Overflow, stochastic: bool) -> Grid | None:
    """Return the parameters of the fast kernels, or None where a format needs the general one."""
    if not isinstance(fmt, FloatFormat | IntFormat) or (isinstance(fmt, IntFormat) and fmt.half_offset):
        return None
    mantissa_bits, min_exponent, flushed = shape_of(fmt)
    unsigned_specials = not fmt.signed and isinstance(fmt, FloatFormat) and (overflow == "ieee" or not fmt.has_zero)
    if mantissa_bits > 22 or min_exponent < -126 or unsigned_specials:
        return None
    linear = isinstance(fmt, FloatFormat) and min_exponent == -126 and not flushed and mantissa_bits > 0
    by_bits = linear or (not stochastic and (flushed or mantissa_bits == 0))
    if stochastic and not linear and (flushed or min_exponent < mantissa_bits - 126):
        return None
    if not by_bits and fmt.max_exponent + 1 + 23 - mantissa_bits > 127:
        return None
    return _build(fmt, overflow, Shape(mantissa_bits, min_exponent, flushed), by_bits, flush=by_bits and not linear)


def _build(fmt: FloatFormat | IntFormat, overflow: Overflow, shape: Shape, by_bits: bool, flush: bool) -> Grid:
    saturate = overflow == "saturate" or isinstance(fmt, IntFormat)
    drop = 23 - shape.mantissa_bits
    shift = drop << 23
    place = 1 << drop
    negative_zero = isinstance(fmt, FloatFormat) and fmt.has_negative_zero
    parity = (1 - _F32_BIAS - shape.min_exponent) & 1 if shape.mantissa_bits == 0 else 0
    smallest = (shape.min_exponent + _F32_BIAS) << 23
    return Grid(
        limit=_bits(fmt.max if saturate else math.inf),
        limit_negative=_bits(abs(fmt.min) if saturate else math.inf),
        special=np.bool_(not saturate),
        over_above=np.float32(math.inf if saturate else fmt.max),
        over_value=np.float32(fmt.max if isinstance(fmt, IntFormat) else special_value(fmt, overflow)),
        nan_value=np.float32(math.nan if fmt.has_nan else fmt.max),
        zero=np.float32(-0.0 if negative_zero else 0.0),
        by_bits=np.bool_(by_bits),
        min_binade=np.int32(smallest),
        top=np.int32((0x7F000000 - shift) | 0x7FFFFF),
        magic_shift=np.int32(shift),
        min_biased=np.int32(shape.min_exponent + _F32_BIAS),
        deep_below=np.int32(max(shape.min_exponent + _F32_BIAS + drop - 31, 1) << 23),
        drop=np.int32(drop),
        half_place=np.int32((place >> 1) - 1),
        keep_mask=np.int32(-place),
        parity=np.int32(parity),
        flush_below=np.int32(smallest if flush else 0),
        flush_half=_bits(math.ldexp(1.0, shape.min_exponent - 1) if flush else 0.0),
    )


def _bits(value: float) -> np.int32:
    return np.float32(value).view(np.int32)
