# SPDX-License-Identifier: Apache-2.0
"""Fused units of any width (docs/matmul.md, section 2): exact sums, wide alignments, float64 operands.

Where the sum of a block begins, in the limbs of ``gemm_limbs``:

- aligned blocks at the last bit kept, ``2**(E - fraction_bits)``, below which the terms were truncated;
- exact sums of one product and the running sum at a position so far below the larger of the two that the smaller may be
  rounded to odd there;
- all other exact sums at the lowest bit that the formats have.
"""

from collections.abc import Sequence

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Mode
from fmtsim.spec.datapath import Datapath
from fmtsim.torch_engine.gemm_blocks import SPAN, group_exponents, grouped, product_range, settle
from fmtsim.torch_engine.gemm_limbs import (
    ROOM,
    WIDTH,
    Limbs,
    Number,
    drop_bits,
    multiply,
    number,
    parts_of,
    round_limbs,
    with_signs,
)
from fmtsim.torch_engine.gemm_operands import ZERO_EXPONENT, Rows, Signs, cleaned, exact

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
