# SPDX-License-Identifier: Apache-2.0
"""Rounding float64 numbers to the values of a format, and sums of two with one rounding (docs/matmul.md).

A running sum is kept as a float64 tensor of values of its format, so every step below takes and returns float64. The
number is scaled until the last place of the format is 1, made an integer, and scaled back: both scalings are exact
while exponents stay within +-1000. Formats that reach further, or lack something, are rounded on bit patterns.
"""

from functools import lru_cache

import torch

from fmtsim.engines.torch_engine import floats
from fmtsim.engines.torch_engine.carry import NEAREST, by_threshold
from fmtsim.engines.torch_engine.reals import power_of_two
from fmtsim.engines.torch_engine.storage import FP64, bits_of
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Mode, Rounding
from fmtsim.support.float64 import float64, from_bits

SAFE = 900
"""Exponents within plus and minus this can be scaled by each other in float64 without leaving its normal range."""

ODD_BITS = 50
"""Formats of at most this many mantissa bits are rounded right from a float64 number that was rounded to odd."""


@lru_cache(maxsize=256)
def is_scalable(fmt: FloatFormat) -> bool:
    """Say whether values of a format can be made by scaling: signed, with subnormals, exponents within SAFE."""
    usual = fmt.signed and fmt.has_zero and fmt.has_subnormals and fmt.mantissa_bits >= 1
    return usual and fmt.min_exponent - fmt.mantissa_bits >= -SAFE and fmt.max_exponent <= SAFE


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """Return the exponent field of float64 elements without bias, int64: ``floor(log2|x|)`` of normal numbers."""
    return ((bits_of(x) >> 52) & 0x7FF) - 1023


def integral(y: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Round float64 elements to integers by a deterministic mode; Inf and NaN stay, a zero may lose its sign."""
    if mode == "toward_zero":
        return torch.trunc(y)
    if mode == "nearest_even":
        return torch.round(y)
    if mode == "down":
        return torch.floor(y)
    if mode == "up":
        return torch.ceil(y)
    whole = torch.trunc(y)
    rest = (y - whole).abs()
    moved = (
        lambda: torch.zeros_like(rest, dtype=torch.bool),
        lambda: rest > 0.5,
        lambda: rest >= 0.5,
        lambda: rest > 0,
    )
    moves = by_threshold(
        mode, lambda threshold: moved[threshold](), lambda: whole * 0.5 != torch.trunc(whole * 0.5), y < 0
    )
    return torch.where(moves, whole + torch.copysign(torch.ones_like(y), y), whole)


def round_value(
    x: torch.Tensor, fmt: FloatFormat, rounding: Rounding = NEAREST, words: torch.Tensor | None = None
) -> torch.Tensor:
    """Round float64 elements to values of a format, once.

    Args:
        x: float64: exact numbers, or, for formats of at most ODD_BITS and without words, numbers rounded to odd.
        fmt: The format.
        rounding: The mode.
        words: The random integers of stochastic rounding, int64, of x's shape.

    Returns:
        float64; a number that rounds to zero keeps its sign; Inf and NaN stay, whatever the format has.
    """
    if not is_scalable(fmt):
        return _convert(x, fmt, rounding, words)
    position = exponent_of(x).clamp(fmt.min_exponent, SAFE + 1) - fmt.mantissa_bits  # Inf and NaN would go further
    y = x * power_of_two(-position)
    whole = integral(y, rounding.mode) if words is None else _stochastic(y, rounding, words)
    y = torch.copysign(whole * power_of_two(position), x)
    beyond = y.abs() > fmt.max
    return limit(y, beyond if fmt.infinities else beyond & torch.isfinite(y), fmt, rounding)


def assembled(
    whole: torch.Tensor, exponent: torch.Tensor, negative: torch.Tensor, fmt: FloatFormat, rounding: Rounding
) -> torch.Tensor:
    """Return rounded significands as values, after the overflow rule.

    Args:
        whole: Significands in last places, int64, up to ``2**(mantissa_bits + 1)``.
        exponent: The exponents they have, not below the lowest of the format, int64.
        negative: The signs.
        fmt: A format with a sign, subnormals and mantissa bits.
        rounding: How they were rounded.
    """
    beyond = exponent > fmt.max_exponent
    exponent = exponent.clamp(max=fmt.max_exponent)  # a code beyond Inf of float64 would not fit
    code = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + whole
    if is_scalable(fmt):
        y = float64(whole) * power_of_two(exponent - fmt.mantissa_bits)
    elif fmt.exponent_bits == 11 and fmt.mantissa_bits == 52 and fmt.exponent_bias == 1023:
        y = from_bits(code)  # Inf included; what lies above is dealt with below
    else:
        y = from_bits(floats.convert(code.clamp(max=fmt.max_code), fmt, FP64, NEAREST, "ieee").to(torch.int64))
    return limit(torch.where(negative, -y, y), beyond | (code > fmt.max_code), fmt, rounding)


def limit(y: torch.Tensor, beyond: torch.Tensor, fmt: FloatFormat, rounding: Rounding) -> torch.Tensor:
    """Apply the overflow rule where ``beyond`` says that a finite number was rounded above the largest value.

    That is Inf in a format that has it, however the unit rounds; other formats follow docs/semantics.md, section 2.
    """
    if fmt.infinities:
        return torch.where(beyond, torch.copysign(torch.full_like(y, torch.inf), y), y)
    largest = torch.copysign(torch.full_like(y, fmt.max), y)
    stays = torch.ones_like(beyond)  # what the mode pulls back to the largest value
    if fmt.has_nan and fmt.default_overflow == "ieee":
        stays = ~floats.leaves_range(y < 0, rounding)
    return torch.where(beyond, torch.where(stays, largest, torch.nan), y)


def _stochastic(y: torch.Tensor, rounding: Rounding, words: torch.Tensor) -> torch.Tensor:
    """Round to integers by random integers; every step is exact, as y has 53 bits."""
    whole = torch.trunc(y)
    rest, r = (y - whole).abs(), rounding.bits
    if rounding.variant == "a":
        moves = torch.floor(rest * 2.0**r) + words >= 2.0**r
    elif rounding.variant == "b":
        moves = torch.floor(rest * 2.0 ** (r + 1)) + (2 * words + 1) >= 2.0 ** (r + 1)
    else:
        moves = torch.round(rest * 2.0**r) + words >= 2.0**r
    return torch.where(moves, whole + torch.copysign(torch.ones_like(y), y), whole)


def _convert(x: torch.Tensor, fmt: FloatFormat, rounding: Rounding, words: torch.Tensor | None) -> torch.Tensor:
    """Round on bit patterns; slower, but any format will do."""
    codes = floats.convert(bits_of(x), FP64, fmt, rounding, "ieee" if fmt.infinities else fmt.default_overflow, words)
    y = from_bits(floats.convert(codes, fmt, FP64, NEAREST, "ieee").to(torch.int64))
    if fmt.infinities and words is None:  # Inf also where the mode would stop at the largest value
        position = (
            exponent_of(x).clamp(fmt.max_exponent, 1022) - fmt.mantissa_bits
        )  # only numbers above the largest matter
        unbounded = integral(x * power_of_two(-position), rounding.mode) * power_of_two(position)
        y = limit(
            torch.where(torch.isfinite(x), torch.copysign(y, x), y),
            (x.abs() > fmt.max) & (unbounded.abs() > fmt.max),
            fmt,
            rounding,
        )
    return torch.where(torch.isfinite(x), y, x)
