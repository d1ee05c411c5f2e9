# SPDX-License-Identifier: Apache-2.0
"""Float formats and integers as the parameters of the fast kernels (grid.cuh), where those serve."""

import math
import struct
from functools import lru_cache
from typing import NamedTuple

import torch

from fmtsim.engines.cuda.cast.parameters import macros
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat, Overflow
from fmtsim.rounding.modes import Rounding

MAGIC, BITS, FLUSHING, HALVES, FIXED, POWERS = range(6)
_STRUCTURE = struct.Struct("<8f 6I 3I f I 2I f 2I 4f")
_SIGN = 1 << 31
_WIDEST_INTEGER = 22  # bits of codes that the sum with 1.5 * 2**23 holds
_SHORT = 16  # bits of float codes that it holds with a number of places
_FINEST = 21  # mantissa bits that leave room for it beside a number of places


class Grid(NamedTuple):
    """What a cast asks of the fast kernels.

    Attributes:
        parameters: The bytes of ``struct Grid``.
        method: How magnitudes are rounded, a macro of grid.cuh.
        special: Whether overflow gives Inf or NaN.
        carries: Whether it gives Inf, whose code follows that of the largest number.
        asymmetric: Whether the range is not that of both signs.
        integer: Whether codes are two's complement numbers.
        encodes: Whether the kernels give codes too.
        keeps: Whether the format has -0.
        random: How random words are used, a macro of grid.cuh.
        mantissa: Mantissa bits of a float format that is rounded stochastically, else 0.
    """

    parameters: bytes
    method: int
    special: bool
    asymmetric: bool
    integer: bool
    encodes: bool
    keeps: bool
    random: int
    mantissa: int
    carries: bool = False

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Macros of grid.cuh."""
        values = {"METHOD": self.method, "SPECIAL": self.special, "ASYMMETRIC": self.asymmetric, "KEEPS": self.keeps}
        return macros(**values, CARRIES=self.carries, RANDOM=self.random)

    def pairs(self, dtype: torch.dtype) -> int:
        """Return the macro PAIRS for inputs of a dtype: it has 16 bits and holds the largest magnitude."""
        highest, lowest = struct.unpack_from("<2f", self.parameters)
        fits = dtype.itemsize == 2 and float(torch.tensor(highest).to(dtype)) == highest
        return int(fits and (lowest == 0 or not self.asymmetric))


@lru_cache(maxsize=1024)
def grid_of(fmt: ElementFormat, rounding: Rounding, overflow: Overflow) -> Grid | None:
    """Return the parameters of a cast, or None where it needs the general kernels."""
    if not _covers_rounding(rounding):
        return None
    if isinstance(fmt, IntFormat):
        return _integer_grid(fmt, rounding)
    return _float_grid(fmt, rounding, overflow) if isinstance(fmt, FloatFormat) else None


def _covers_rounding(rounding: Rounding) -> bool:
    """Nearest even; stochastic with bits and the half step of variant b within one word."""
    if rounding.mode != "stochastic":
        return rounding.mode == "nearest_even"
    return rounding.layout == "word" and (rounding.variant == "a" or (rounding.variant == "b" and rounding.bits < 32))


def _words(rounding: Rounding) -> tuple[int, int]:
    """Return which bits of a random word count, and those that are set below them."""
    bits = rounding.bits
    return (1 << 32) - (1 << (32 - bits)), 1 << (31 - bits) if rounding.variant == "b" and bits < 32 else 0


def _random(rounding: Rounding) -> int:
    """Return the macro RANDOM: whole words or not."""
    if rounding.mode != "stochastic":
        return 0
    return 1 if rounding.bits == 32 and rounding.variant == "a" else 2


def _stochastic(fmt: FloatFormat) -> tuple[float, float, float, float]:
    """Return the last fields of ``struct Grid``; zeros where none is asked for."""
    mantissa_bits, low = fmt.mantissa_bits, fmt.min_exponent
    if mantissa_bits > _FINEST or not -126 <= low <= 127:
        return 0.0, 0.0, 0.0, 0.0
    base = 3 << 22
    offset = -(low + 127 << mantissa_bits) % (1 << fmt.bits) if fmt.bits <= _SHORT else 0
    places = (math.ldexp(number, -mantissa_bits) for number in (2.0**-32, base, base + offset))
    return (math.ldexp(1.0, low), *places)  # type: ignore[return-value]


def _integer_grid(fmt: IntFormat, rounding: Rounding) -> Grid | None:
    if fmt.bits > _WIDEST_INTEGER or (fmt.half_offset and rounding.mode != "nearest_even"):
        return None
    asymmetric = fmt.half_offset or fmt.min != -fmt.max
    parameters = _STRUCTURE.pack(
        fmt.max, fmt.min, math.inf, fmt.max, fmt.max, 0.0, 0.0, 0.0,
        _SIGN if fmt.signed else 0, 0, 0, 0, 0, 0, 0, 0, 0,
        1 / fmt.eps, 1 << (32 - fmt.bits), fmt.max_code << (32 - fmt.bits), 0, fmt.eps, *_words(rounding),
        0.0, math.ldexp(fmt.eps, -32), math.ldexp(fmt.eps, 23) * 1.5, 0.0,
    )  # fmt: skip
    method = HALVES if fmt.half_offset else FIXED
    return Grid(parameters, method, False, asymmetric, True, True, False, _random(rounding), 0)


def _float_grid(fmt: FloatFormat, rounding: Rounding, overflow: Overflow) -> Grid | None:
    saturate = overflow == "saturate" or not (fmt.infinities or fmt.has_nan)
    mantissa_bits, low, high = fmt.mantissa_bits, fmt.min_exponent, fmt.max_exponent
    if low - mantissa_bits < -149 or high > 127 or mantissa_bits > 23 or not (fmt.signed or saturate):
        return None
    method = _method(fmt, rounding)
    if method is None:
        return None
    natural = method == BITS and high == 127 and fmt.infinities  # the carry into exponent 255 is Inf
    special = not saturate and not natural
    unbounded = math.ldexp(1.0, high + 1) if method == MAGIC else math.inf
    drop = 23 - mantissa_bits
    place = 1 << drop
    most = place - 1 if rounding.mode == "stochastic" else (place >> 1) - 1
    parity = (fmt.has_zero - 127 - low) & 1 if mantissa_bits == 0 else 0
    over = fmt.max if saturate else math.inf if fmt.infinities else math.nan
    shift = 32 - fmt.bits
    encodes = fmt.exponent_bits <= 8 and fmt.bits <= 32 and -149 <= fmt.has_zero - low - 127 <= 127
    codes = (
        (math.ldexp(1.0, fmt.has_zero - low - 127), 1 << (9 - fmt.signed - fmt.exponent_bits),
         (fmt.max_code if fmt.nan_code is None else fmt.nan_code) << shift, (fmt.inf_code or 0) << shift)
        if encodes else (0.0, 0, 0, 0)
    )  # fmt: skip
    parameters = _STRUCTURE.pack(
        fmt.max if saturate else unbounded, -fmt.max if fmt.signed else 0.0, math.inf if saturate else fmt.max, over,
        math.nan if fmt.has_nan else fmt.max, -0.0 if fmt.has_negative_zero else 0.0,
        math.ldexp(1.0, drop), math.ldexp(1.0, low + drop),
        _SIGN if fmt.signed else 0, drop, max(most, 0), (1 << 32) - place, parity, int(drop > 0),
        *_flush_points(fmt), *codes, 0.0, *_words(rounding), *_stochastic(fmt),
    )  # fmt: skip
    random = _random(rounding)
    mantissa = mantissa_bits if random else 0
    keeps = fmt.has_negative_zero
    carries = special and method == MAGIC and keeps and fmt.infinities and fmt.inf_code == fmt.max_code + 1
    return Grid(parameters, method, special, not fmt.signed, False, encodes, keeps, random, mantissa, carries)


def _method(fmt: FloatFormat, rounding: Rounding) -> int | None:
    """Return how magnitudes reach the grid, None where float32 arithmetic alone does not do it."""
    mantissa_bits, low = fmt.mantissa_bits, fmt.min_exponent
    finite = fmt.max_exponent + 24 - mantissa_bits <= 127  # the magic number of the binade above the largest value
    gradual = fmt.has_subnormals and fmt.has_zero
    if rounding.mode == "stochastic":
        within = low - mantissa_bits >= -117 and mantissa_bits <= _FINEST  # grid.cuh
        if low == -126 and gradual:
            return BITS
        return MAGIC if finite and gradual and within else None
    if mantissa_bits and gradual:
        if finite and mantissa_bits <= 22 and low >= -127:
            return MAGIC
        return BITS if low == -126 else None
    if low == -127 and fmt.has_zero and not mantissa_bits:
        return POWERS
    return FLUSHING if low >= (-126 if fmt.has_zero else -127) else None


def _flush_points(fmt: FloatFormat) -> tuple[int, int, int]:
    """Return the bits of the two values between which the lowest numbers are rounded: upper, midpoint, lower."""
    smallest = math.ldexp(1.0, fmt.min_exponent)
    if smallest == 2.0**-127 and fmt.has_zero:
        return 1 << 22, 1 << 21, (3 << 21) - 1  # a tie between the first two goes to the second, whose code is even
    points = (smallest, smallest / 2, 0.0) if fmt.has_zero else (2 * smallest, 1.5 * smallest, smallest)
    return struct.unpack("<3I", struct.pack("<3f", *points))  # type: ignore[return-value]
