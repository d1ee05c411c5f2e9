"""Sums as wide integers: limbs of 24 bits, carries delayed, for what float64 does not hold exactly.

A number is ``sum_i digit_i 2**(24 i + lowest)`` with its sign apart. A sum keeps one int64 a limb: digits of 24 bits,
shifted by less than 24, leave room for ``2**15`` terms before carries have to move.
"""

from typing import NamedTuple

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.torch_engine import floats
from fmtsim.torch_engine.carry import NEAREST, jam, round_off
from fmtsim.torch_engine.gemm_round import is_plain, limit, round_value
from fmtsim.torch_engine.reals import power_of_two
from fmtsim.torch_engine.storage import FP64, bits_of, floor_log2, unpack

WIDTH = 24
ROOM = 1 << 14
"""Terms after which ``Limbs.relieve`` is due."""

_MASK = (1 << WIDTH) - 1
_INFINITE = 0x7FF0000000000000  # a float64 pattern
_NOWHERE = -10000  # where the leading bit of zero is
_FRACTION = 61  # bits read below the last place, more than stochastic rounding looks at


class Number(NamedTuple):
    """Exact numbers: sign, 24-bit digits (the lowest first), exponent of the lowest bit, ``floor(log2|x|)``.

    Zero has digits of zero and exponents far below all others. The exponent of a product is the sum of its factors'.
    """

    negative: torch.Tensor
    digits: list[torch.Tensor]
    lowest: torch.Tensor
    exponent: torch.Tensor


def number(x: torch.Tensor, mantissa_bits: int) -> Number:
    """Take apart finite float64 elements that have at most ``mantissa_bits + 1`` significant bits."""
    parts = unpack(bits_of(x), FP64, torch.int64, normalise=True)
    significand = parts.significand >> (52 - mantissa_bits)
    digits = [(significand >> place) & _MASK for place in range(0, mantissa_bits + 1, WIDTH)]
    return Number(parts.negative, digits, parts.exponent - mantissa_bits, parts.exponent)


def multiply(x: Number, y: Number) -> Number:
    """Return exact products; shapes broadcast."""
    count = len(x.digits) + len(y.digits)
    columns: list[torch.Tensor | None] = [None] * count
    for i, left in enumerate(x.digits):
        for j, right in enumerate(y.digits):
            column, piece = columns[i + j], left * right
            columns[i + j] = piece if column is None else column + piece
    digits, carry = [], torch.zeros((), dtype=torch.int64, device=x.lowest.device)
    for column in columns:
        total = carry if column is None else column + carry
        digits.append(total & _MASK)
        carry = total >> WIDTH
    return Number(x.negative ^ y.negative, digits, x.lowest + y.lowest, x.exponent + y.exponent)


def cut(x: Number, bits: torch.Tensor, mode: str) -> tuple[Number, torch.Tensor | None]:
    """Clear bits below a place and say by how many units of that place the magnitude grows.

    Args:
        x: The numbers.
        bits: How many of the lowest bits go, int64, from 0 to 24 times the digits plus 1.
        mode: "toward_zero", "nearest_even", "nearest_away", "down" or "to_odd".

    Returns:
        The numbers toward zero, and 0 or 1 each by which the mode moves them away from zero (None: nowhere).
    """
    kept = []
    for i, digit in enumerate(x.digits):
        drop = (bits - WIDTH * i).clamp(0, WIDTH)
        kept.append(digit & (-1 << drop))
    short = x._replace(digits=kept)
    if mode == "toward_zero":
        return short, None
    if mode in ("down", "to_odd"):
        moves = _any_below(x, bits)
        moves = moves & (x.negative if mode == "down" else _bit(x, bits) == 0)
    else:
        moves = _bit(x, bits - 1) == 1
        if mode == "nearest_even":
            moves = moves & ((_bit(x, bits) == 1) | _any_below(x, bits - 1))
    return short, moves.to(torch.int64)


def _bit(x: Number, place: torch.Tensor) -> torch.Tensor:
    """Return the bit at a place counted from the lowest; 0 outside the digits."""
    found = torch.zeros_like(place)
    for i, digit in enumerate(x.digits):
        inside = (place >= WIDTH * i) & (place < WIDTH * (i + 1))
        found = torch.where(inside, (digit >> (place - WIDTH * i).clamp(0, WIDTH)) & 1, found)
    return found


def _any_below(x: Number, place: torch.Tensor) -> torch.Tensor:
    """Say whether a bit below a place is set."""
    found = torch.zeros_like(place, dtype=torch.bool)
    for i, digit in enumerate(x.digits):
        found = found | ((digit & ((1 << (place - WIDTH * i).clamp(0, WIDTH)) - 1)) != 0)
    return found


class Limbs:
    """Wide signed sums, one for each output.

    The lowest and the highest limb stay free: reading beyond the ends finds zeros there.
    """

    def __init__(self, count: int, shape: torch.Size, device: torch.device) -> None:
        self.count, self.shape = count, shape
        self._sums = torch.zeros(count, shape.numel(), dtype=torch.int64, device=device)
        self._columns = torch.arange(shape.numel(), device=device).view(shape)

    def add(self, x: Number, place: torch.Tensor) -> None:
        """Add numbers ``[L, *shape]`` with their lowest bit at a place, at least 24; broadcast over the shape."""
        places = place.clamp(WIDTH, WIDTH * (self.count - len(x.digits)) - 1)  # only zeros are moved by this
        limb = torch.div(places, WIDTH, rounding_mode="floor")
        shift = places - limb * WIDTH
        index = limb * self.shape.numel() + self._columns
        for i, digit in enumerate(x.digits):
            moved = digit << shift
            signed = torch.where(x.negative, -moved, moved).broadcast_to(index.shape)
            target = index if i == 0 else index + i * self.shape.numel()
            self._sums.view(-1).scatter_add_(0, target.reshape(-1), signed.reshape(-1))

    def add_units(self, units: torch.Tensor, limb: int) -> None:
        """Add integers of the outputs' shape to one limb."""
        self._sums[limb] += units.reshape(-1)

    def relieve(self) -> None:
        """Move carries up by one limb, so that ROOM more terms fit."""
        carries = self._sums[:-1] >> WIDTH
        self._sums[:-1] &= _MASK
        self._sums[1:] += carries

    def resolve(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the signs (negative) and the digits of the magnitudes, ``[count, *shape]``."""
        digits = torch.empty_like(self._sums)
        carry = torch.zeros_like(self._sums[0])
        for i in range(self.count):
            total = self._sums[i] + carry
            digits[i] = total & _MASK
            carry = total >> WIDTH
        negative = carry < 0
        some = (
            digits != 0
        )  # the complement: zeros stay, the lowest other digit is subtracted from 2**24, the rest from 2**24 - 1
        first = some & (torch.cumsum(some, 0) == 1)
        above = (torch.cumsum(some, 0) > 0) & ~first
        flipped = torch.where(first, (1 << WIDTH) - digits, torch.where(above, _MASK - digits, 0))
        digits = torch.where(negative, flipped, digits)
        return negative.view(self.shape), digits.view(self.count, *self.shape)


def round_limbs(
    negative: torch.Tensor,
    digits: torch.Tensor,
    base: torch.Tensor | int,
    fmt: FloatFormat,
    rounding: Rounding = NEAREST,
    words: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round sums to a format, once; arguments and result as in ``gemm_round.round_value``.

    Args:
        negative, digits: What ``Limbs.resolve`` returns.
        base: Exponent of the lowest bit of the lowest limb.
        fmt, rounding, words: The rounding.
    """
    order = torch.arange(digits.shape[0], device=digits.device).view(-1, *[1] * negative.dim())
    highest = torch.where(digits != 0, order, 0).amax(0)
    lowest = torch.where(digits != 0, order, digits.shape[0]).amin(0)
    leading = digits.gather(0, highest[None])[0]
    first = torch.where(leading == 0, _NOWHERE, WIDTH * highest + floor_log2(leading.clamp(min=1)))
    if not (fmt.signed and fmt.has_zero and fmt.has_subnormals and fmt.mantissa_bits):
        return _round_odd(negative, digits, base, first, lowest, fmt, rounding, words)
    exponent = (first + base).clamp(min=fmt.min_exponent)
    place = torch.minimum(exponent - fmt.mantissa_bits - base, torch.full_like(first, WIDTH * digits.shape[0] + 62))
    fraction = _read(digits, place - _FRACTION, _FRACTION) | _below(digits, lowest, place - _FRACTION)
    whole = _read(digits, place, fmt.mantissa_bits + 1)
    shift = torch.full_like(fraction, _FRACTION)
    whole = whole + round_off(fraction, shift, negative, rounding, words, whole)
    exponent = exponent.clamp(max=fmt.max_exponent + 1)
    code = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + whole
    if is_plain(fmt):
        y = whole.to(torch.float64) * power_of_two(exponent - fmt.mantissa_bits)
    else:
        y = floats.convert(code.clamp(max=fmt.max_code), fmt, FP64, NEAREST, "ieee").to(torch.int64).view(torch.float64)
    return limit(torch.where(negative, -y, y), code > fmt.max_code, fmt, rounding)


def _round_odd(
    negative: torch.Tensor,
    digits: torch.Tensor,
    base: torch.Tensor | int,
    first: torch.Tensor,
    lowest: torch.Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    words: torch.Tensor | None,
) -> torch.Tensor:
    """Round by way of float64 numbers rounded to odd: formats that lack something, and have few bits."""
    significand = _read(digits, first - 52, 53) | _below(digits, lowest, first - 52)
    exponent = first + base
    code = ((exponent.clamp(min=-1022) + 1022) << 52) + jam(significand, -1022 - exponent)
    y = torch.where(exponent > 1023, _INFINITE, code).view(torch.float64)
    return round_value(torch.where(negative, -y, y), fmt, rounding, words)


def _read(digits: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` bits, at most 61, from a place on, as int64; beyond the limbs there are zeros."""
    limb = torch.div(place, WIDTH, rounding_mode="floor")
    shift = place - limb * WIDTH
    limbs = [digits.gather(0, (limb + i).clamp(0, digits.shape[0] - 1)[None])[0] for i in range(4)]
    found = limbs[0] >> shift
    for i in (1, 2, 3):
        found = found | (limbs[i] << (WIDTH * i - shift).clamp(max=62))  # bits above 61 are masked below
    return found & ((1 << count) - 1)


def _below(digits: torch.Tensor, lowest: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return 1 where a bit below a place is set, else 0; ``lowest`` is the first limb that is not zero."""
    limb = torch.div(place, WIDTH, rounding_mode="floor")
    same = digits.gather(0, limb.clamp(0, digits.shape[0] - 1)[None])[0]
    inside = same & ((1 << (place - limb * WIDTH)) - 1)
    return ((lowest < limb) | ((lowest == limb) & (inside != 0))).to(torch.int64)
