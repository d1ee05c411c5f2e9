# SPDX-License-Identifier: Apache-2.0
"""Element formats of every kind behind two verbs: round to codes, and codes to values."""

from functools import lru_cache

import torch

from fmtsim.engines.torch_engine import floats, integers
from fmtsim.engines.torch_engine.floats import BIT_DTYPES, LAYOUTS, NEAREST, bits_of, by_threshold, from_bits
from fmtsim.engines.torch_engine.reals import narrow, tiny_kept, widen
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.rounding.modes import Rounding
from fmtsim.support.float64 import constants
from fmtsim.support.float64 import from_bits as float64_of


def encode_codebook(
    y: torch.Tensor, fmt: CodebookFormat, rounding: Rounding, words: torch.Tensor | None
) -> torch.Tensor:
    """Round float64 elements to the codes of a codebook, int64; Inf saturates, NaN is the largest value."""
    patterns, codes = _codebook(fmt, y.device)
    values = float64_of(patterns)
    nan = torch.isnan(y)
    y = torch.where(nan, values[-1], y)
    last = values.numel() - 1
    rank = (torch.searchsorted(values, y.contiguous(), right=True) - 1).clamp(0, last)
    lower, upper = values[rank], values[(rank + 1).clamp(max=last)]
    y = torch.minimum(torch.maximum(y, values[0]), values[-1])
    up = moves_up(y, lower, upper, rank, (lower + upper) / 2, bits_of(y) < 0, rounding, words)
    return codes[(rank + up).clamp(max=last)]


def encode_log(y: torch.Tensor, fmt: LogFormat, rounding: Rounding, words: torch.Tensor | None) -> torch.Tensor:
    """Round float64 elements to the codes of a logarithmic system, int64; Inf saturates, NaN is the largest value."""
    *patterns, first = _log_table(fmt, y.device)
    values, thresholds = map(float64_of, patterns)
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


def decode_codebook(codes: torch.Tensor, fmt: CodebookFormat) -> torch.Tensor:
    """Return the values of codes in float64; zero is +0, codes beyond the list are NaN."""
    values = [value + 0.0 for value in fmt.values]
    values += [float("nan")] * ((1 << fmt.bits) - len(values))
    return constants(values, codes.device)[_patterns(codes, fmt.bits)]


def decode_log(codes: torch.Tensor, fmt: LogFormat) -> torch.Tensor:
    """Return the values of codes in float64."""
    values = [*fmt.magnitudes, *(-value for value in fmt.magnitudes)]
    return constants(values, codes.device)[_patterns(codes, fmt.bits)]


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
    inexact = y != lower
    odd = (rank & 1) == 1
    if rounding.mode == "stochastic":
        assert words is not None
        up = _stochastic((y - lower) / (upper - lower), rounding, words)
    elif rounding.mode == "nearest_even":
        up = (y > middle) | ((y == middle) & odd)
    else:
        up = _by_magnitude(y, lower, upper, odd, middle, negative, rounding, flipped)
    return (up & inexact).to(torch.int64)


def _by_magnitude(
    y: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    odd: torch.Tensor,
    middle: torch.Tensor,
    negative: torch.Tensor,
    rounding: Rounding,
    flipped: torch.Tensor | None,
) -> torch.Tensor:
    """Decide by the table of modes: a magnitude moves from the inner value, the candidate, to the outer one."""
    below, above = lower.abs(), upper.abs()
    same, crosses = below == above, (lower < 0) & (upper > 0)
    outward = torch.where(same, ~negative, above > below)  # the outer value is the upper one
    beyond = torch.where(outward, y > middle, y < middle)
    moved = (lambda: torch.zeros_like(beyond), lambda: beyond, lambda: beyond | (y == middle), lambda: y != lower)
    sign = ~outward if flipped is None else ~outward ^ flipped  # up and down go by the real line
    moves = by_threshold(rounding.mode, lambda threshold: moved[threshold](), lambda: odd == outward, sign)
    up = moves == outward
    if rounding.rule.ties_toward_zero:  # where no value lies toward zero, the one of the number's sign
        up = torch.where(crosses & same & (y == middle) if rounding.rule.is_nearest else crosses, ~negative, up)
    return up


def _stochastic(t: torch.Tensor, rounding: Rounding, words: torch.Tensor) -> torch.Tensor:
    """Decide by the fraction t in [0, 1]; scaling by a power of two and cutting to an integer are exact."""
    t = torch.where(torch.isfinite(t), t, 0.0)
    bits = rounding.bits + (rounding.variant == "b")
    if rounding.variant == "b":
        words = 2 * words + 1
    scaled = t * float(1 << bits)
    fraction = torch.round(scaled) if rounding.variant == "c" else torch.floor(scaled)  # torch rounds ties to even
    return fraction.to(torch.int64) + words >= (1 << bits)


def _patterns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes.to(torch.int64) & ((1 << bits) - 1)


@lru_cache(maxsize=64)
def _codebook(fmt: CodebookFormat, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of the sorted distinct values in float64 and the first code of each."""
    firsts: dict[float, int] = {}
    for code, value in enumerate(fmt.values):
        firsts.setdefault(value + 0.0, code)  # -0 and +0 are one value, +0
    ordered = sorted(firsts)
    codes = [firsts[value] for value in ordered]
    return bits_of(constants(ordered, device)), torch.tensor(codes, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _log_table(fmt: LogFormat, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits of magnitudes and turning points (the last repeated), and the first code of each magnitude."""
    values = constants(fmt.magnitudes, device)
    thresholds = constants([*fmt.thresholds, fmt.magnitudes[-1]], device)
    return bits_of(values), bits_of(thresholds), torch.searchsorted(values, values)


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
        return integers.encode(x, fmt, rounding, words, exponent)
    y = widen(x) if exponent is None else tiny_kept(x, exponent)
    if isinstance(fmt, CodebookFormat):
        return encode_codebook(y, fmt, rounding, words)
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
        exact = (integers.to_numbers(codes, fmt).to(torch.float32) + 0.5 * fmt.half_offset) * fmt.eps
        return bits_of(exact) if dtype == torch.float32 else floats.encode(exact, LAYOUTS[dtype], NEAREST, "ieee")
    if isinstance(fmt, IntFormat):
        return bits_of(narrow(integers.decode(codes, fmt), dtype))
    if isinstance(fmt, CodebookFormat):
        return bits_of(narrow(decode_codebook(codes, fmt), dtype))
    return bits_of(narrow(decode_log(codes, fmt), dtype))


@lru_cache(maxsize=256)
def _value_table(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits of the values of all codes."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32, device=device)
    return value_bits(codes, fmt, dtype).to(BIT_DTYPES[dtype])
