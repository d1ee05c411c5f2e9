# SPDX-License-Identifier: Apache-2.0
"""Rounding to integer and half-offset grids (docs/semantics.md, section 3)."""

import torch

from fmtsim.engines.torch_engine.floats import LAYOUTS, bits_of, jam, round_off, unpack
from fmtsim.formats.spec import IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.support.float64 import float64

_FRACTION = 36  # binary places kept, the lowest of them sticky: more than the 33 that stochastic rounding reads
_BEYOND = 25  # numbers of this exponent and above saturate every format


def encode(
    x: torch.Tensor,
    fmt: IntFormat,
    rounding: Rounding,
    words: torch.Tensor | None = None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round ``x / 2**exponent`` to codes, as unsigned bit patterns in int64; arguments as in ``floats.convert``."""
    return to_patterns(to_integers(x, fmt, rounding, words, exponent).clamp(fmt.min_code, fmt.max_code), fmt)


def to_integers(
    x: torch.Tensor,
    fmt: IntFormat,
    rounding: Rounding,
    words: torch.Tensor | None = None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round as ``encode`` does, but return signed integers that are not yet clamped to the format's range.

    Inf is beyond every format; NaN is ``max_code``.
    """
    parts = unpack(bits_of(x), LAYOUTS[x.dtype], torch.int64, normalise=True)
    power = parts.exponent + fmt.fraction_bits
    if exponent is not None:
        power = power - exponent
    power = torch.where(parts.infinite, _BEYOND, power.clamp(max=_BEYOND))
    left = power + (_FRACTION - parts.precision)
    fixed = jam(parts.significand, -left) << left.clamp(min=0)
    offset = torch.zeros_like(fixed)
    if fmt.half_offset:
        fixed = fixed + (1 << (_FRACTION - 1))
        offset = 1 - parts.negative.to(torch.int64)  # codes n - 1 of positive and -n of negative numbers
    shift = torch.full((), _FRACTION, dtype=torch.int64, device=x.device)
    quotient = round_off(fixed, shift, parts.negative, rounding, words, offset)
    if fmt.half_offset and rounding.rule.ties_toward_zero:
        quotient = quotient.clamp(min=1)  # around zero no neighbour lies toward zero: keep the sign of x
    return torch.where(parts.nan, fmt.max_code, torch.where(parts.negative, -quotient, quotient - offset))


def to_patterns(numbers: torch.Tensor, fmt: IntFormat) -> torch.Tensor:
    """Return signed codes as the unsigned numbers with the same low bits."""
    return numbers & ((1 << fmt.bits) - 1)


def to_numbers(codes: torch.Tensor, fmt: IntFormat) -> torch.Tensor:
    """Return unsigned bit patterns as the signed codes that they stand for, int64."""
    codes = codes.to(torch.int64) & ((1 << fmt.bits) - 1)
    if not fmt.signed:
        return codes
    top = 1 << (fmt.bits - 1)
    return (codes ^ top) - top


def decode(codes: torch.Tensor, fmt: IntFormat) -> torch.Tensor:
    """Return the values of codes in float64, exact."""
    return (float64(to_numbers(codes, fmt)) + 0.5 * fmt.half_offset) * fmt.eps
