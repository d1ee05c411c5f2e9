"""Fused units of any width (docs/matmul.md, section 2): exact sums, wide alignments, float64 operands.

Where the sum of a block begins, in the limbs of ``gemm_limbs``:

- aligned blocks at the last bit kept, ``2**(E - fraction_bits)``, below which the terms were cut;
- exact sums of one product and the running sum at a place so far below the larger of the two that the smaller may be
  rounded to odd there;
- all other exact sums at the lowest bit that the formats have.
"""

from collections.abc import Sequence

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.datapath import Datapath
from fmtsim.torch_engine.gemm_blocks import SPAN, group_exponents, grouped, product_range, settle
from fmtsim.torch_engine.gemm_limbs import ROOM, WIDTH, Limbs, Number, cut, multiply, number, round_limbs
from fmtsim.torch_engine.gemm_operands import ZERO_EXPONENT, Rows, Signs, cleaned, exact

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
        self._formats, self._scaled = (a, b), datapath.scale is not None
        self._pair = datapath.fraction_bits is None and longest == 1
        top, bottom = self._range()
        more = longest.bit_length() + 2
        accumulator = addend or datapath.accumulator
        self._addend_bits = accumulator.mantissa_bits
        self._base = min(bottom, accumulator.min_exponent - 2 * accumulator.mantissa_bits)
        self._group_base, self._group_limbs = bottom, 0
        if datapath.group > 1:
            self._group_limbs = (top - bottom + datapath.group.bit_length()) // WIDTH + self._product_digits() + 3
        self._digits = max(self._product_digits(), accumulator.mantissa_bits // WIDTH + 1, self._group_limbs)
        self._floor = self._digits + 2  # limbs below the place where the sum begins
        if datapath.fraction_bits is not None:
            bits = datapath.fraction_bits + 4 + more + (max(0, top) + datapath.group if datapath.group > 1 else 0)
        elif self._pair:
            bits = _APART + WIDTH * self._digits
        else:
            bits = max(top, accumulator.max_exponent + 1) - self._base + more
        self.weight = self._floor + bits // WIDTH + self._digits + 3
        self._count = self.weight

    def _range(self) -> tuple[int, int]:
        """Return exponents between which all bits of products lie, scales included."""
        top, bottom = product_range(*self._formats)
        bottom -= sum(fmt.mantissa_bits for fmt in self._formats)  # subnormals are kept with all their zeros
        if self.datapath.scale is not None:
            more, less = product_range(self.datapath.scale, self.datapath.scale)
            top, bottom = top + more, bottom + less - 2 * self.datapath.scale.mantissa_bits
        return top, bottom

    def _product_digits(self) -> int:
        scale = self.datapath.scale
        return sum(fmt.mantissa_bits // WIDTH + 1 for fmt in self._formats) + (
            2 * (scale.mantissa_bits // WIDTH + 1) if scale else 0
        )

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one block, float64."""
        path = self.datapath
        addend = number(cleaned(state, False)[None], self._addend_bits)
        base, mode = self._begin(pieces, addend)
        sums = Limbs(self._count, state.shape, state.device)
        self._add(sums, addend, base, mode)
        signs, since = Signs(state), 1
        for piece in pieces:
            terms = self._terms(piece)
            signs.see(terms.negative)
            since += terms.lowest.shape[0]
            if since > ROOM:
                sums.relieve()
                since = terms.lowest.shape[0]
            self._add(sums, terms, base, mode)
        negative, digits = sums.resolve()
        first = base - WIDTH * self._floor
        rounded = round_limbs(negative, digits, first, path.accumulator, path.rounding, words)
        return settle(path, rounded, (digits == 0).all(0), signs, pieces, state)

    def _begin(self, pieces: Sequence[Rows], addend: Number) -> tuple[torch.Tensor | int, str | None]:
        """Return the exponent at which the sum begins, and how terms are rounded there (None: they need not be)."""
        path = self.datapath
        if path.fraction_bits is None and not self._pair:
            return self._base, None
        if self._pair:
            top = torch.maximum(addend.exponent, self._terms(pieces[0]).exponent).amax(0)
            return top - _APART, "to_odd"
        lowest = path.accumulator.min_exponent
        top = torch.where(addend.exponent < ZERO_EXPONENT // 4, ZERO_EXPONENT, addend.exponent.clamp(min=lowest))[0]
        for piece in pieces:
            sides = [self._alignment(piece, side) for side in (0, 1)]
            top = torch.maximum(top, (sides[0] + sides[1]).amax(0))
        if path.min_exponent is not None:
            top = top.clamp(min=path.min_exponent)
        assert path.fraction_bits is not None
        return top - path.fraction_bits, path.term_rounding

    def _add(self, sums: Limbs, terms: Number, base: torch.Tensor | int, mode: str | None) -> None:
        place = terms.lowest - base
        if mode is not None:
            gone = (-place).clamp(0, WIDTH * len(terms.digits) + 1)
            terms, units = cut(terms, gone, mode)
            place = torch.maximum(place, -gone)
            if units is not None:
                sums.add_units(torch.where(terms.negative, -units, units).sum(0), self._floor)
        sums.add(terms, place + WIDTH * self._floor)

    def _number(self, rows: Rows, side: int) -> Number:
        """Return one side's factors as exact numbers, times their scales."""
        x, scale = (rows.a, rows.scale_a) if side == 0 else (rows.b, rows.scale_b)
        factor = number(cleaned(exact(x), rows.finite), self._formats[side].mantissa_bits)
        if scale is None or self.datapath.scale is None:
            return factor
        size = cleaned(exact(scale).abs(), rows.finite)
        return multiply(factor, number(size, self.datapath.scale.mantissa_bits))

    def _terms(self, rows: Rows) -> Number:
        products = multiply(self._number(rows, 0), self._number(rows, 1))
        return products if self.datapath.group == 1 else self._grouped(products)

    def _grouped(self, products: Number) -> Number:
        """Add the products of each group exactly."""
        group = self.datapath.group
        shape = products.lowest.shape

        def folded(x: torch.Tensor, padding: int) -> torch.Tensor:
            return grouped(x.broadcast_to(shape), group, padding).transpose(0, 1)

        digits = [folded(digit, 0) for digit in products.digits]
        minus, places = folded(products.negative, 1), folded(products.lowest - self._group_base + WIDTH, 0)
        sums = Limbs(self._group_limbs, minus.shape[1:], minus.device)
        sums.add(Number(minus, digits, places, places), places)
        negative, limbs = sums.resolve()
        nothing = torch.stack(digits).amax(0) == 0
        negative = negative | (nothing & minus).all(0)  # a group of -0 alone is -0
        lowest = torch.full_like(limbs[0], self._group_base - WIDTH)
        return Number(negative, list(limbs), lowest, lowest)

    def _alignment(self, rows: Rows, side: int) -> torch.Tensor:
        """Return one side's share of the exponents of terms, int64."""
        path, fmt = self.datapath, self._formats[side]
        x, scale = (rows.a, rows.scale_a) if side == 0 else (rows.b, rows.scale_b)
        value = cleaned(exact(x), rows.finite)
        share = torch.zeros((), dtype=torch.int64, device=value.device)
        if scale is not None and path.scale is not None:
            size = cleaned(exact(scale).abs(), rows.finite)
            if path.group > 1:
                return group_exponents(size[:: path.group], path.scale).to(torch.int64)
            share = _exponents(size, path.scale.mantissa_bits, path.scale.min_exponent)
        if path.group > 1:
            return torch.zeros_like(value[:: path.group], dtype=torch.int64)
        return share + _exponents(value, fmt.mantissa_bits, (path.operand or fmt).min_exponent)


def _exponents(value: torch.Tensor, mantissa_bits: int, lowest: int) -> torch.Tensor:
    found = number(value, mantissa_bits)
    return torch.where(value == 0, ZERO_EXPONENT, found.exponent.clamp(min=lowest))
