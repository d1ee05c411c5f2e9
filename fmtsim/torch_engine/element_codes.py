# SPDX-License-Identifier: Apache-2.0
"""Element formats of every kind behind two verbs, encode and decode; integers, codebooks and logarithms themselves.

Floating-point formats are conversions of bit patterns (floats.py); docs/semantics.md, section 3 has the others.
"""

from functools import lru_cache

import torch

from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.formats.representable import is_representable
from fmtsim.rounding.modes import Rounding
from fmtsim.support.float64 import constants, float64
from fmtsim.torch_engine import floats
from fmtsim.torch_engine.floats import (
    BIT_DTYPES,
    LAYOUTS,
    NEAREST,
    bits_of,
    by_threshold,
    from_bits,
    jam,
    round_off,
    unpack,
)
from fmtsim.torch_engine.reals import narrow, tiny_kept, widen

# Integer and half-offset grids.

_FRACTION = 36  # binary places kept, the lowest of them sticky: more than the 33 that stochastic rounding reads
_BEYOND = 25  # numbers of this exponent and above saturate every format


def to_integers(
    x: torch.Tensor,
    fmt: IntFormat,
    rounding: Rounding,
    words: torch.Tensor | None = None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round as ``encode_integer`` does, but return signed integers that are not yet clamped to the format's range.

    Inf is beyond every format; NaN is ``max_code``.
    """
    # 1. the significand in fixed point, _FRACTION places behind the binary point
    parts = unpack(bits_of(x), LAYOUTS[x.dtype], torch.int64, normalise=True)
    power = parts.exponent + fmt.fraction_bits
    if exponent is not None:
        power = power - exponent
    power = torch.where(parts.infinite, _BEYOND, power.clamp(max=_BEYOND))
    shift_left = power + (_FRACTION - parts.precision)
    fixed = jam(parts.significand, -shift_left) << shift_left.clamp(min=0)
    # 2. a half-offset grid is that of integers moved by a half
    offset = torch.zeros_like(fixed)
    if fmt.half_offset:
        fixed = fixed + (1 << (_FRACTION - 1))
        offset = 1 - parts.negative.to(torch.int64)  # codes n - 1 of positive and -n of negative numbers
    # 3. rounded to an integer, then the sign
    shift = torch.full((), _FRACTION, dtype=torch.int64, device=x.device)
    quotient = round_off(fixed, shift, parts.negative, rounding, words, offset)
    if fmt.half_offset and rounding.rule.ties_toward_zero:
        quotient = quotient.clamp(min=1)  # around zero no neighbour lies toward zero: keep the sign of x
    return torch.where(parts.nan, fmt.max_code, torch.where(parts.negative, -quotient, quotient - offset))


def to_numbers(codes: torch.Tensor, fmt: IntFormat) -> torch.Tensor:
    """Return unsigned bit patterns as the signed codes that they stand for, int64."""
    codes = codes.to(torch.int64) & ((1 << fmt.bits) - 1)
    if not fmt.signed:
        return codes
    top = 1 << (fmt.bits - 1)
    return (codes ^ top) - top


# Codebooks and logarithmic systems.


def encode_codebook(
    y: torch.Tensor, fmt: CodebookFormat, rounding: Rounding, overflow: Overflow, words: torch.Tensor | None
) -> torch.Tensor:
    """Round float64 elements to the codes of a codebook, int64; what has no code is the outermost or largest value."""
    values, turns, codes = _codebook(fmt, y.device)
    nan = torch.isnan(y)
    infinite = torch.isinf(y)
    y = torch.where(nan, values[-1], y)
    last = values.numel() - 1
    rank = (torch.searchsorted(values, y.contiguous(), right=True) - 1).clamp(0, last)
    lower, upper = values[rank], values[(rank + 1).clamp(max=last)]
    y = torch.minimum(torch.maximum(y, values[0]), values[-1])
    negative = bits_of(y) < 0
    # ranks count from NaN's, which lies below all values
    rank = (rank + moves_up(y, lower, upper, rank + fmt.has_nan, turns[rank], negative, rounding, words)).clamp(
        max=last
    )
    if fmt.infinities:  # the outermost values
        leaves = overflow == "ieee"
        stays = rank.clamp(1, last - 1)
        rank = torch.where(infinite | floats.leaves_range(negative, rounding), rank, stays) if leaves else stays
    elif overflow == "ieee":
        nan = nan | infinite
    return codes[rank] if fmt.nan_code is None else torch.where(nan, fmt.nan_code, codes[rank])


def encode_log(y: torch.Tensor, fmt: LogFormat, rounding: Rounding, words: torch.Tensor | None) -> torch.Tensor:
    """Round float64 elements to the codes of a logarithmic system, int64; Inf saturates, NaN is the largest value."""
    values, thresholds, first = _log_table(fmt, y.device)
    nan = torch.isnan(y)
    negative = (bits_of(y) < 0) & ~nan
    magnitude = torch.where(nan, values[-1], y.abs()).clamp(fmt.magnitudes[0], fmt.magnitudes[-1])
    rank = torch.searchsorted(values, magnitude.contiguous(), right=True) - 1
    last = values.numel() - 1
    upper = values[(rank + 1).clamp(max=last)]
    parity = first[rank]
    up = moves_up(magnitude, values[rank], upper, parity, thresholds[rank], negative, rounding, words, flipped=negative)
    magnitude_code = first[(rank + up).clamp(max=last)]
    return torch.where(negative, magnitude_code | (1 << (fmt.bits - 1)), magnitude_code)


def moves_up(
    y: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    rank: torch.Tensor,
    middle: torch.Tensor,
    negative: torch.Tensor,
    rounding: Rounding,
    words: torch.Tensor | None,
    flipped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decide between two neighbouring values, as int64 zeros and ones.

    Args:
        y: The numbers, float64, ``lower <= y``, and ``y < upper`` except above the last value.
        lower: The value of rank ``rank``.
        upper: The value of the next rank.
        rank: Ranks of the lower values, whose parity counts.
        middle: Where the nearest modes turn.
        negative: The sign of the number, which decides between values of equal magnitude.
        rounding: The mode.
        words: Random integers of stochastic rounding.
        flipped: Where y, lower and upper are magnitudes of negative numbers: up and down swap.
    """
    inexact = y != lower  # an exact number never moves
    odd = (rank & 1) == 1
    if rounding.mode == "stochastic":
        assert words is not None
        # Decide by the fraction t in [0, 1]; scaling by a power of two and truncating to an integer are exact.
        t = (y - lower) / (upper - lower)
        t = torch.where(torch.isfinite(t), t, 0.0)
        bits = rounding.bits + (rounding.variant == "b")
        if rounding.variant == "b":
            words = 2 * words + 1
        scaled = t * float(1 << bits)
        fraction = torch.round(scaled) if rounding.variant == "c" else torch.floor(scaled)  # torch rounds ties to even
        up = fraction.to(torch.int64) + words >= (1 << bits)
    elif rounding.mode == "nearest_even":
        up = (y > middle) | ((y == middle) & odd)
    else:
        # Decide by the table of modes: a magnitude moves from the inner value, the candidate, to the outer one.
        # 1. which of the two values has the larger magnitude
        below, above = lower.abs(), upper.abs()
        same, crosses = below == above, (lower < 0) & (upper > 0)
        outward = torch.where(same, ~negative, above > below)  # the outer value is the upper one
        # 2. whether the magnitude moves, by its threshold
        beyond = torch.where(outward, y > middle, y < middle)
        moved = (lambda: torch.zeros_like(beyond), lambda: beyond, lambda: beyond | (y == middle), lambda: y != lower)
        sign = ~outward if flipped is None else ~outward ^ flipped  # up and down go by the real line
        moves = by_threshold(rounding.mode, lambda threshold: moved[threshold](), lambda: odd == outward, sign)
        # 3. moving outward is up on the positive side and down on the negative one
        up = moves == outward
        if rounding.rule.ties_toward_zero:  # where no value lies toward zero, the one of the number's sign
            up = torch.where(crosses & same & (y == middle) if rounding.rule.is_nearest else crosses, ~negative, up)
    return (up & inexact).to(torch.int64)


def _patterns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes.to(torch.int64) & ((1 << bits) - 1)


@lru_cache(maxsize=64)
def _codebook(fmt: CodebookFormat, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sorted distinct values and the turning points (the last repeated), float64, and first codes."""
    firsts: dict[float, int] = {}
    for code, value in enumerate(fmt.values):
        firsts.setdefault(value, code)  # -0 and +0 are one value
    values, turns = constants(fmt.ordered, device), constants([*fmt.turns, fmt.turns[-1]], device)
    codes = torch.tensor([firsts[value] for value in fmt.ordered], dtype=torch.int64, device=device)
    return values, turns, codes


@lru_cache(maxsize=64)
def _log_table(fmt: LogFormat, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return magnitudes and turning points (the last repeated), float64, and the first code of each magnitude."""
    values = constants(fmt.magnitudes, device)
    thresholds = constants([*fmt.thresholds, fmt.magnitudes[-1]], device)
    return values, thresholds, torch.searchsorted(values, values)


_TABLE_BITS = 16  # formats up to here decode by a table of all their codes


def encode(
    x: torch.Tensor,
    fmt: ElementFormat,
    rounding: Rounding,
    overflow: Overflow,
    words: torch.Tensor | None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round ``x``, or the exact ``x / 2**exponent``, to codes in int32 or int64.

    Args:
        x: float16, bfloat16, float32 or float64.
        fmt: The element format.
        rounding: How values are rounded.
        overflow: What happens beyond the largest value of a floating-point format.
        words: Random integers of x's shape, int64, for stochastic rounding.
        exponent: Integers between -127 and 127, broadcastable, or None.
    """
    if isinstance(fmt, FloatFormat):
        return floats.encode(x, fmt, rounding, overflow, words, exponent)
    if isinstance(fmt, IntFormat):
        # codes of x / 2**exponent as unsigned bit patterns in int64
        numbers = to_integers(x, fmt, rounding, words, exponent).clamp(fmt.min_code, fmt.max_code)
        return numbers & ((1 << fmt.bits) - 1)
    y = widen(x) if exponent is None else tiny_kept(x, exponent)
    if isinstance(fmt, CodebookFormat):
        return encode_codebook(y, fmt, rounding, overflow, words)
    return encode_log(y, fmt, rounding, words)


def decode(codes: torch.Tensor, fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of codes, rounded once to a floating-point dtype; every NaN is the canonical one."""
    if fmt.bits <= _TABLE_BITS:
        patterns = codes.to(torch.int64) & ((1 << fmt.bits) - 1)
        return from_bits(_value_table(fmt, dtype, codes.device)[patterns], dtype)
    return from_bits(value_bits(codes, fmt, dtype), dtype)


def significant_bits(fmt: ElementFormat) -> int:
    """Return an upper bound of the significant bits of a format's values."""
    if isinstance(fmt, FloatFormat):
        return fmt.mantissa_bits + 1
    return fmt.bits + 1 if isinstance(fmt, IntFormat) else 24


def value_bits(codes: torch.Tensor, fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of what ``decode`` returns, in int32 or int64, without a table."""
    if isinstance(fmt, FloatFormat):
        return floats.convert(codes, fmt, LAYOUTS[dtype], NEAREST, "ieee")
    if isinstance(fmt, IntFormat) and is_representable(fmt, torch.float32):
        exact = (to_numbers(codes, fmt).to(torch.float32) + 0.5 * fmt.half_offset) * fmt.eps
        return bits_of(exact) if dtype == torch.float32 else floats.encode(exact, LAYOUTS[dtype], NEAREST, "ieee")
    if isinstance(fmt, IntFormat):
        return bits_of(narrow((float64(to_numbers(codes, fmt)) + 0.5 * fmt.half_offset) * fmt.eps, dtype))
    if isinstance(fmt, CodebookFormat):
        # zero is +0, codes beyond the list are NaN
        values = [fmt.value(code) + 0.0 for code in range(len(fmt.values))]
        values += [float("nan")] * ((1 << fmt.bits) - len(values))
        return bits_of(narrow(constants(values, codes.device)[_patterns(codes, fmt.bits)], dtype))
    values = [*fmt.magnitudes, *(-value for value in fmt.magnitudes)]
    return bits_of(narrow(constants(values, codes.device)[_patterns(codes, fmt.bits)], dtype))


@lru_cache(maxsize=256)
def _value_table(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits of the values of all codes."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32, device=device)
    return value_bits(codes, fmt, dtype).to(BIT_DTYPES[dtype])
