# SPDX-License-Identifier: Apache-2.0
"""Sums as wide integers: limbs of 24 bits, carries delayed, for what float64 does not hold exactly.

A number is ``sum_i digit_i 2**(24 i + lowest)`` with its sign apart. A sum keeps one int64 a limb: digits of 24 bits,
shifted by less than 24, leave room for ``2**15`` terms before carries have to move.
"""

from typing import NamedTuple

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Mode, Rounding
from fmtsim.support.float64 import floor_log2, from_bits
from fmtsim.torch_engine.floats import FP64, Parts, bits_of, by_threshold, jam, round_off, unpack
from fmtsim.torch_engine.gemm_operands import assembled, round_value

WIDTH = 24
ROOM = 1 << 14
"""Terms after which ``Limbs.relieve`` is due."""

_MASK = (1 << WIDTH) - 1
_INFINITE = 0x7FF0000000000000  # a float64 pattern
_NOWHERE = -10000  # where the leading bit of zero is
_FRACTION = 61  # bits read below the last place, more than stochastic rounding looks at


class Number(NamedTuple):
    """Exact numbers: signs, 24-bit digits (the lowest first), the exponent of the lowest bit, significant bits.

    Without ``negative`` the digits have signs: the highest digit its own, the others count up from below. Zero has
    digits of zero and an exponent far below all others.
    """

    negative: torch.Tensor | None
    digits: list[torch.Tensor]
    lowest: torch.Tensor
    bits: int


def parts_of(x: torch.Tensor) -> Parts:
    """Take apart finite float64 elements; significands have 53 bits, zero has an exponent far below all others."""
    return unpack(bits_of(x), FP64, torch.int64, normalise=True)


def number(parts: Parts, mantissa_bits: int) -> Number:
    """Return as exact numbers what ``parts_of`` took apart, of at most ``mantissa_bits + 1`` significant bits."""
    significand = parts.significand >> (52 - mantissa_bits)
    digits = [(significand >> position) & _MASK for position in range(0, mantissa_bits + 1, WIDTH)]
    return Number(parts.negative, digits, parts.exponent - mantissa_bits, mantissa_bits + 1)


def with_signs(x: Number) -> Number:
    """Move the signs into the digits, for numbers that are only added."""
    assert x.negative is not None
    return x._replace(negative=None, digits=[torch.where(x.negative, -digit, digit) for digit in x.digits])


def multiply(x: Number, y: Number) -> Number:
    """Return exact products; shapes broadcast. Both factors have their signs apart, or both in their digits."""
    bits = x.bits + y.bits
    columns: list[torch.Tensor | None] = [None] * (len(x.digits) + len(y.digits))
    for i, x_digit in enumerate(x.digits):
        for j, y_digit in enumerate(y.digits):
            column, piece = columns[i + j], x_digit * y_digit
            columns[i + j] = piece if column is None else column + piece
    digits: list[torch.Tensor] = []
    carry: torch.Tensor | None = None
    for position in range(0, bits, WIDTH):
        column = columns[position // WIDTH]
        total = column if carry is None else carry if column is None else column + carry
        assert total is not None  # the lowest column always is a product
        if position + WIDTH < bits:
            total, carry = total & _MASK, total >> WIDTH
        digits.append(total)
    if x.negative is None or y.negative is None:
        return Number(None, digits, x.lowest + y.lowest, bits)
    return Number(x.negative ^ y.negative, digits, x.lowest + y.lowest, bits)


def drop_bits(x: Number, bits: torch.Tensor, mode: Mode) -> tuple[Number, torch.Tensor | None]:
    """Clear the lowest bits; return by how many units of the lowest remaining bit the magnitude grows.

    Args:
        x: The numbers.
        bits: How many of the lowest bits go, int64, from 0 to 24 times the digits plus 1.
        mode: A deterministic rounding mode; one that looks at signs takes numbers that have them.

    Returns:
        The numbers toward zero, and 0 or 1 each by which the mode moves them away from zero (None: nowhere).
    """
    high_digits = []
    for i, digit in enumerate(x.digits):
        drop = (bits - WIDTH * i).clamp(0, WIDTH)
        high_digits.append(digit & (-1 << drop))
    short = x._replace(digits=high_digits)
    if mode == "toward_zero":
        return short, None
    half = _bit(x, bits - 1) == 1
    moved = (
        lambda: torch.zeros_like(half),
        lambda: half & _any_below(x, bits - 1),
        lambda: half,
        lambda: _any_below(x, bits),
    )
    moves = by_threshold(mode, lambda threshold: moved[threshold](), lambda: _bit(x, bits) == 1, x.negative)
    return short, moves.to(torch.int64)


def _bit(x: Number, position: torch.Tensor) -> torch.Tensor:
    """Return the bit at a position counted from the lowest; 0 outside the digits."""
    bit = torch.zeros_like(position)
    for i, digit in enumerate(x.digits):
        inside = (position >= WIDTH * i) & (position < WIDTH * (i + 1))
        bit = torch.where(inside, (digit >> (position - WIDTH * i).clamp(0, WIDTH)) & 1, bit)
    return bit


def _any_below(x: Number, position: torch.Tensor) -> torch.Tensor:
    """Return True where a bit below a position is set."""
    any_set = torch.zeros_like(position, dtype=torch.bool)
    for i, digit in enumerate(x.digits):
        any_set = any_set | ((digit & ((1 << (position - WIDTH * i).clamp(0, WIDTH)) - 1)) != 0)
    return any_set


class Limbs:
    """Wide signed sums, one for each output.

    The lowest and the highest limb stay free: reading beyond the ends finds zeros there.
    """

    def __init__(self, count: int, shape: torch.Size, device: torch.device) -> None:
        self.count, self.shape = count, shape
        self._sums = torch.zeros(count, shape.numel(), dtype=torch.int64, device=device)
        self._columns = torch.arange(shape.numel(), device=device).view(shape)

    def add(self, x: Number, position: torch.Tensor) -> None:
        """Add numbers ``[L, *shape]`` with their lowest bit at a position, at least 24; broadcast over the shape."""
        positions = position.clamp(WIDTH, WIDTH * (self.count - len(x.digits)) - 1)  # only zeros are moved by this
        limb = (positions * 43691) >> 20  # divided by 24: right below 2**17
        shift = positions - limb * WIDTH
        index = limb * self.shape.numel() + self._columns
        for i, digit in enumerate(x.digits):
            moved = digit << shift
            signed = moved if x.negative is None else torch.where(x.negative, -moved, moved)
            target = index if i == 0 else index + i * self.shape.numel()
            self._sums.view(-1).scatter_add_(0, target.reshape(-1), signed.broadcast_to(index.shape).reshape(-1))

    def add_units(self, units: torch.Tensor, limb: int) -> None:
        """Add integers of the outputs' shape to one limb."""
        self._sums[limb] += units.reshape(-1)

    def relieve(self) -> None:
        """Move carries up by one limb, so that ROOM more terms fit."""
        carries = self._sums[:-1] >> WIDTH
        self._sums[:-1] &= _MASK
        self._sums[1:] += carries

    def resolve(self) -> "Magnitude":
        """Return the sums with all carries moved, as signs and magnitudes."""
        digits = torch.empty_like(self._sums)
        carry = torch.zeros_like(self._sums[0])
        for i in range(self.count):
            total = self._sums[i] + carry
            torch.bitwise_and(total, _MASK, out=digits[i])
            carry = total >> WIDTH
        order = torch.arange(self.count, device=digits.device)[:, None]
        lowest = self.count - torch.where(digits != 0, self.count - order, 0).amax(0)
        negative = carry < 0
        # the complement: the lowest digit that is not zero is taken from 2**24, those above it from 2**24 - 1
        flipped = torch.where(order < lowest, 0, _MASK - digits + (order == lowest))
        digits = torch.where(negative, flipped, digits)
        shape = self.shape
        return Magnitude(negative.view(shape), digits.view(self.count, *shape), lowest.view(shape))


class Magnitude(NamedTuple):
    """Signs, digits ``[count, *shape]`` and the first limb that is not zero (``count`` where all are)."""

    negative: torch.Tensor
    digits: torch.Tensor
    lowest: torch.Tensor

    def is_zero(self) -> torch.Tensor:
        """Return True where a sum is zero."""
        return self.lowest == self.digits.shape[0]


def round_limbs(
    x: Magnitude, base: torch.Tensor | int, fmt: FloatFormat, rounding: Rounding, words: torch.Tensor | None = None
) -> torch.Tensor:
    """Round sums to a format, once; result as in ``gemm_round.round_value``.

    Args:
        x: The sums.
        base: Exponent of the lowest bit of the lowest limb.
        fmt, rounding, words: The rounding.
    """
    digits = x.digits
    order = torch.arange(digits.shape[0], device=digits.device).view(-1, *[1] * x.negative.dim())
    highest = torch.where(digits != 0, order, 0).amax(0)
    leading = digits.gather(0, highest[None])[0]
    first = torch.where(leading == 0, _NOWHERE, WIDTH * highest + floor_log2(leading.clamp(min=1)))
    if not (fmt.signed and fmt.has_zero and fmt.has_subnormals and fmt.mantissa_bits):
        # The sums in float64, rounded to odd, for formats that lack something and have few bits.
        significand = _read(x.digits, first - 52, 53) | _below(x, first - 52)
        exponent = first + base
        code = ((exponent.clamp(min=-1022) + 1022) << 52) + jam(significand, -1022 - exponent)
        y = from_bits(torch.where(exponent > 1023, _INFINITE, code))
        return round_value(torch.where(x.negative, -y, y), fmt, rounding, words)
    exponent = (first + base).clamp(min=fmt.min_exponent)
    position = (exponent - fmt.mantissa_bits - base).clamp(max=WIDTH * digits.shape[0] + 62)
    fraction = _read(digits, position - _FRACTION, _FRACTION) | _below(x, position - _FRACTION)
    whole = _read(digits, position, fmt.mantissa_bits + 1)
    whole = whole + round_off(fraction, torch.full_like(fraction, _FRACTION), x.negative, rounding, words, whole)
    return assembled(whole, exponent, x.negative, fmt, rounding)


def _read(digits: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` bits, at most 61, from a position on, as int64; beyond the limbs there are zeros."""
    limb = torch.div(position, WIDTH, rounding_mode="floor")
    shift = position - limb * WIDTH
    limbs = [digits.gather(0, (limb + i).clamp(0, digits.shape[0] - 1)[None])[0] for i in range(4)]
    bits = limbs[0] >> shift
    for i in (1, 2, 3):
        bits = bits | (limbs[i] << (WIDTH * i - shift).clamp(max=62))  # bits above 61 are masked below
    return bits & ((1 << count) - 1)


def _below(x: Magnitude, position: torch.Tensor) -> torch.Tensor:
    """Return 1 where a bit below a position is set, else 0."""
    limb = torch.div(position, WIDTH, rounding_mode="floor")
    same = x.digits.gather(0, limb.clamp(0, x.digits.shape[0] - 1)[None])[0]
    inside = same & ((1 << (position - limb * WIDTH)) - 1)
    return ((x.lowest < limb) | ((x.lowest == limb) & (inside != 0))).to(torch.int64)
