# SPDX-License-Identifier: Apache-2.0
"""Fused units of any width (docs/matmul.md, section 2): exact sums, wide alignments, float64 operands.

Sums are wide integers: limbs of 24 bits, carries delayed, for what float64 does not hold exactly. A number is
``sum_i digit_i 2**(24 i + lowest)`` with its sign apart. A sum keeps one int64 a limb: digits of 24 bits, shifted by
less than 24, leave room for ``2**15`` terms before carries have to move.

Where the sum of a block begins, in limbs:

- aligned blocks at the last bit kept, ``2**(E - fraction_bits)``, below which the terms were truncated;
- exact sums of one product and the running sum at a position so far below the larger of the two that the smaller may be
  rounded to odd there;
- all other exact sums at the lowest bit that the formats have.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import Mode, Rounding
from fmtsim.spec.datapath import Datapath
from fmtsim.support.float64 import floor_log2, from_bits
from fmtsim.torch_engine.floats import FP64, Parts, bits_of, by_threshold, jam, round_off, unpack
from fmtsim.torch_engine.gemm_blocks import SPAN, group_exponents, grouped, product_range, settle
from fmtsim.torch_engine.gemm_operands import ZERO_EXPONENT, Rows, Signs, assembled, cleaned, exact, round_value

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


_ZERO = -3000  # exponents below this are those of zeros, see parts_of
_WIDEST = 6000  # more bits than lie between the largest and the smallest products of float64 numbers, times scales
_APART = 160  # more than twice the bits of a float64 significand and the random bits below it


class WideUnit:
    """A fused unit in wide integers: any Datapath.

    The running sum that it is given lies on the accumulator, or on ``addend``.
    """

    def __init__(
        self, datapath: Datapath, a: FloatFormat, b: FloatFormat, longest: int, addend: FloatFormat | None = None
    ) -> None:
        self.datapath = datapath
        self.span = -(-SPAN // datapath.group) * datapath.group
        self._formats = a, b
        bits = datapath.fraction_bits
        keeps_all = bits is None or bits - max(datapath.min_exponent or 0, 0) > _WIDEST
        self._fraction_bits = None if keeps_all else bits
        self._pair = keeps_all and longest == 1 and datapath.group == 1
        # Exponents between which all bits of products lie, scales included.
        top, bottom = product_range(*self._formats)
        bottom -= sum(fmt.mantissa_bits for fmt in self._formats)  # subnormals are kept with all their zeros
        if self.datapath.scale is not None:
            more, less = product_range(self.datapath.scale, self.datapath.scale)
            top, bottom = top + more, bottom + less - 2 * self.datapath.scale.mantissa_bits
        more = longest.bit_length() + 2
        accumulator = addend or datapath.accumulator
        self._addend_bits = accumulator.mantissa_bits
        self._base = min(bottom, accumulator.min_exponent - 2 * accumulator.mantissa_bits)
        self._group_base, self._group_limbs = bottom, 0
        if datapath.group > 1:
            self._group_limbs = (top - bottom + datapath.group.bit_length()) // WIDTH + self._product_digits() + 3
        self._digits = max(self._product_digits(), accumulator.mantissa_bits // WIDTH + 1, self._group_limbs)
        self._guard_limbs = self._digits + 2  # limbs below the position where the sum begins
        if self._fraction_bits is not None:
            bits = self._fraction_bits + 4 + more + (max(0, top) + datapath.group if datapath.group > 1 else 0)
        elif self._pair:
            bits = _APART + WIDTH * self._digits
        else:
            bits = max(top, accumulator.max_exponent + 1) - self._base + more
        self._count = self._guard_limbs + bits // WIDTH + self._digits + 3
        self.weight = max(self._count, 2 * min(longest, self.span))

    def _product_digits(self) -> int:
        scale = self.datapath.scale
        return sum(fmt.mantissa_bits // WIDTH + 1 for fmt in self._formats) + (
            2 * (scale.mantissa_bits // WIDTH + 1) if scale else 0
        )

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one block, float64."""
        path = self.datapath
        parts = parts_of(cleaned(state, False)[None])
        base, mode = self._begin(pieces, parts.exponent)
        addend = number(parts, self._addend_bits)
        sums = Limbs(self._count, state.shape, state.device)
        self._add(sums, addend, base, mode)
        signs, since = Signs(state) if path.signed_zero else None, 1
        for piece in pieces:
            signed = mode is None and signs is None
            a_number, b_number = self._number(piece, 0), self._number(piece, 1)
            if signed and self.datapath.group == 1:
                a_number, b_number = with_signs(a_number), with_signs(b_number)
            products = multiply(a_number, b_number)
            terms = products if self.datapath.group == 1 else self._grouped(products)
            if signs is not None and terms.negative is not None:
                signs.see(terms.negative)
            since += terms.lowest.shape[0]
            if since > ROOM:
                sums.relieve()
                since = terms.lowest.shape[0]
            self._add(sums, terms, base, mode)
        total = sums.resolve()
        rounded = round_limbs(total, base - WIDTH * self._guard_limbs, path.accumulator, path.rounding, words)
        return settle(path, rounded, total.is_zero(), signs, pieces, state, natural=False)

    def _begin(self, pieces: Sequence[Rows], addend: torch.Tensor) -> tuple[torch.Tensor | int, Mode | None]:
        """Return the exponent at which the sum begins, and how terms are rounded there (None: they need not be)."""
        path = self.datapath
        if self._pair:
            return torch.maximum(addend[0], self._largest(pieces[0], bounded=False)) - _APART, "to_odd"
        if self._fraction_bits is None:
            return self._base, None
        top = _bounded(addend[0], path.accumulator.min_exponent)
        for piece in pieces:
            top = torch.maximum(top, self._largest(piece, bounded=True))
        if path.min_exponent is not None:
            top = top.clamp(min=path.min_exponent)
        return top - self._fraction_bits, path.term_rounding

    def _add(self, sums: Limbs, terms: Number, base: torch.Tensor | int, mode: Mode | None) -> None:
        position = terms.lowest - base
        if mode is not None:
            gone = (-position).clamp(0, WIDTH * len(terms.digits) + 1)
            terms, units = drop_bits(terms, gone, mode)
            position = torch.maximum(position, -gone)
            if units is not None and terms.negative is not None:
                sums.add_units(torch.where(terms.negative, -units, units).sum(0), self._guard_limbs)
        sums.add(terms, position + WIDTH * self._guard_limbs)

    def _number(self, rows: Rows, side: int) -> Number:
        """Return one side's factors as exact numbers, times their scales."""
        x, scale = (rows.a, rows.scale_a) if side == 0 else (rows.b, rows.scale_b)
        factor = number(parts_of(cleaned(exact(x), rows.finite)), self._formats[side].mantissa_bits)
        if scale is None or self.datapath.scale is None:
            return factor
        size = cleaned(exact(scale).abs(), rows.finite)
        return multiply(factor, number(parts_of(size), self.datapath.scale.mantissa_bits))

    def _grouped(self, products: Number) -> Number:
        """Add the products of each group exactly."""
        group = self.datapath.group
        shape = products.lowest.shape

        def folded(x: torch.Tensor, padding: int) -> torch.Tensor:
            return grouped(x.broadcast_to(shape), group, padding).transpose(0, 1)

        assert products.negative is not None
        digits = [folded(digit, 0) for digit in products.digits]
        minus, positions = folded(products.negative, 1), folded(products.lowest - self._group_base + WIDTH, 0)
        sums = Limbs(self._group_limbs, minus.shape[1:], minus.device)
        sums.add(Number(minus, digits, positions, products.bits), positions)
        total = sums.resolve()
        nothing = torch.stack(digits).amax(0) == 0
        negative = total.negative | (nothing & minus).all(0)  # a group of -0 alone is -0
        lowest = torch.full_like(total.lowest, self._group_base - WIDTH)
        return Number(negative, list(total.digits), lowest, WIDTH * self._group_limbs)

    def _largest(self, rows: Rows, bounded: bool) -> torch.Tensor:
        """Return the largest exponent of the terms; not ``bounded``, subnormals count with their own."""
        a_exponent, b_exponent = self._alignment(rows, 0, bounded), self._alignment(rows, 1, bounded)
        return (a_exponent + b_exponent).amax(0)

    def _alignment(self, rows: Rows, side: int, bounded: bool) -> torch.Tensor:
        """Return one side's share of the exponents of terms, int64."""
        path = self.datapath
        x, scale = (rows.a, rows.scale_a) if side == 0 else (rows.b, rows.scale_b)
        scaled = scale is not None and path.scale is not None
        if path.group > 1:
            if not scaled:
                return torch.zeros(x[:: path.group].shape, dtype=torch.int64, device=x.device)
            assert scale is not None and path.scale is not None
            sizes = cleaned(exact(scale[:: path.group]).abs(), rows.finite)
            return group_exponents(sizes, path.scale).to(torch.int64)
        share = _exponents(x, path.operand or self._formats[side], rows.finite, bounded)
        return share + _exponents(scale, path.scale, rows.finite, bounded) if scaled else share


def _exponents(x: torch.Tensor | None, fmt: FloatFormat | None, finite: bool, bounded: bool) -> torch.Tensor:
    assert x is not None and fmt is not None
    return _bounded(parts_of(cleaned(exact(x), finite)).exponent, fmt.min_exponent if bounded else ZERO_EXPONENT)


def _bounded(exponent: torch.Tensor, lowest: int) -> torch.Tensor:
    """Return exponents of at least ``lowest``, zeros excepted."""
    return torch.where(exponent < _ZERO, ZERO_EXPONENT, exponent.clamp(min=lowest))
