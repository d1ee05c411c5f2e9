# SPDX-License-Identifier: Apache-2.0
"""Fused units in float64 (docs/matmul.md, section 2): where every product and every sum of a block fits in 53 bits.

A term is an exact float64 product. It is scaled so that the last bit kept is 1, made an integer, and added to integers:
all of it exact, in any order, and Inf and NaN take part as IEEE arithmetic has it. What does not fit goes to
``gemm_limbs``.
"""

from collections.abc import Sequence

import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.spec.datapath import Datapath
from fmtsim.torch_engine.gemm_operands import (
    ODD_BITS,
    SAFE,
    Factor,
    Rows,
    Signs,
    cleaned,
    exact,
    exponent_of,
    exponents,
    integral,
    round_value,
    specials,
)
from fmtsim.torch_engine.reals import add_to_odd, power_of_two

SPAN = 64  # products taken at once where a block is longer


class AlignedUnit:
    """A fused unit whose blocks fit in float64; ``fits`` says which do."""

    def __init__(self, datapath: Datapath, a: FloatFormat, b: FloatFormat) -> None:
        self.datapath = datapath
        self.span = -(-SPAN // datapath.group) * datapath.group
        self.weight = 2 * min(datapath.block or self.span, self.span)
        self._lowest = tuple((datapath.operand or fmt).min_exponent for fmt in (a, b))

    @staticmethod
    def fits(datapath: Datapath, a: FloatFormat, b: FloatFormat, longest: int) -> bool:
        """Return True if blocks of up to ``longest`` products stay exact and within the range of float64."""
        if datapath.fraction_bits is None:
            return False
        scale_bits = 2 * (datapath.scale.mantissa_bits + 1) if datapath.scale else 0
        product_bits = a.mantissa_bits + b.mantissa_bits + 2 + scale_bits
        headroom = 4 if datapath.scale else 2
        if datapath.group > 1:
            top, bottom = product_range(a, b)
            more = (datapath.group - 1).bit_length()
            headroom = 2 + max(0, top + more)
            product_bits = top - bottom + more + scale_bits
        terms = -(-longest // datapath.group)
        sum_bits = datapath.fraction_bits + headroom + terms.bit_length()  # the running sum is one term more
        return max(product_bits, sum_bits) <= 53 and within_range(datapath, a, b)

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one block, float64."""
        path, load = self.datapath, self._load
        loaded = [load(piece) for piece in pieces] if len(pieces) == 1 else None
        top = exponents(state, path.accumulator.min_exponent)
        for a, b in loaded or map(load, pieces):
            top = torch.maximum(top, (a.exponent + b.exponent).amax(0))
        lowest = -SAFE if path.min_exponent is None else path.min_exponent
        top = top.to(torch.int64).clamp(lowest, SAFE)
        assert path.fraction_bits is not None
        unit = power_of_two(path.fraction_bits - top)  # its inverse is the weight of the last bit kept
        total = integral(state * unit, path.term_rounding)
        signs = Signs(state) if path.signed_zero else None
        for a, b in loaded or map(load, pieces):
            terms = products = a.value * b.value
            if self.datapath.group > 1:
                terms = grouped(products, self.datapath.group, 0.0).sum(1)
            if signs is not None:
                minus = torch.signbit(products)
                if self.datapath.group > 1:  # a group of -0 alone is -0
                    minus = (terms < 0) | (
                        (terms == 0) & grouped(minus & (products == 0), self.datapath.group, True).all(1)
                    )
                signs.see(minus)
            total = total + integral(terms.mul_(unit), path.term_rounding).sum(0)
        result = total * power_of_two(top - path.fraction_bits)
        rounded = round_value(result, path.accumulator, path.rounding, words)
        return settle(path, rounded, result == 0, signs, pieces, state, natural=True)

    def _load(self, rows: Rows) -> tuple[Factor, Factor]:
        """Return values, times their scales, with exponents: of each, or of a group's scale alone, one a group."""
        sides, group, fmt = [], self.datapath.group, self.datapath.scale
        for x, scale, lowest in ((rows.a, rows.scale_a, self._lowest[0]), (rows.b, rows.scale_b, self._lowest[1])):
            value = cleaned(exact(x), rows.finite)
            exponent = exponents(value, lowest) if group == 1 else torch.zeros_like(value[::group], dtype=torch.int32)
            if scale is not None and fmt is not None:
                size = cleaned(exact(scale).abs(), rows.finite)
                lifted = exponents(size, fmt.min_exponent) if group == 1 else group_exponents(size[::group], fmt)
                value, exponent = value * size, exponent + lifted
            sides.append(Factor(value, exponent))
        return sides[0], sides[1]


class FusedAddUnit:
    """A unit that adds one exact product to the running sum and rounds: a chain of fused multiply-adds."""

    span = 1
    weight = 4

    def __init__(self, datapath: Datapath) -> None:
        self.datapath = datapath

    @staticmethod
    def fits(datapath: Datapath, a: FloatFormat, b: FloatFormat, longest: int) -> bool:
        """Return True if float64 holds the product exactly, and a sum rounded to odd there may be rounded again."""
        fused = longest == 1 and datapath.fraction_bits is None and datapath.scale is None
        narrow = a.mantissa_bits + b.mantissa_bits + 2 <= 53 and datapath.accumulator.mantissa_bits <= ODD_BITS
        return fused and narrow and datapath.rounding.mode != "stochastic" and within_range(datapath, a, b)

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one product, float64."""
        rows = pieces[0]
        product = cleaned(exact(rows.a[0]), rows.finite) * cleaned(exact(rows.b[0]), rows.finite)
        total = add_to_odd(product, state)
        signs = Signs(state)
        signs.see(torch.signbit(product)[None])
        rounded = round_value(total, self.datapath.accumulator, self.datapath.rounding)
        return settle(self.datapath, rounded, total == 0, signs, pieces, state, natural=True)


def settle(
    path: Datapath,
    rounded: torch.Tensor,
    cancelled: torch.Tensor,
    signs: Signs | None,
    pieces: Sequence[Rows],
    state: torch.Tensor,
    natural: bool,
) -> torch.Tensor:
    """Put NaN, Inf and signs of zeros into a rounded sum (steps 1 and 7).

    Args:
        path: The unit.
        rounded: The sum rounded to the accumulator; signs of zeros are those of the sums.
        cancelled: Where the sum was zero before rounding.
        signs: The signs of all terms; they count with ``signed_zero``.
        pieces: The products.
        state: The running sum before.
        natural: Inf and NaN of the running sum are in ``rounded`` already.
    """
    if path.signed_zero and signs is not None:
        minus = signs.some_minus if path.rounding.mode == "down" else signs.all_minus
        rounded = torch.where(cancelled, torch.where(minus, -0.0, 0.0), rounded)
    else:
        rounded = rounded + 0.0  # -0 + 0 is +0
    if natural and pieces[0].finite:
        return rounded
    special = specials(pieces, state)
    return torch.where(torch.isfinite(special), rounded, special)


def product_range(a: FloatFormat, b: FloatFormat) -> tuple[int, int]:
    """Return exponents T and B: products are below ``2**T`` and multiples of ``2**B``."""
    top = a.max_exponent + b.max_exponent + 2
    return top, a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits


def within_range(path: Datapath, a: FloatFormat, b: FloatFormat) -> bool:
    """Return True if the exponents of products, running sum and alignment stay within +-SAFE."""
    top, bottom = product_range(a, b)
    if path.scale is not None:
        more, less = product_range(path.scale, path.scale)
        top, bottom = top + max(more, 0), bottom + min(less, 0)
    highest = [top, path.accumulator.max_exponent, path.min_exponent or 0]
    lowest = [bottom, path.accumulator.min_exponent - path.accumulator.mantissa_bits, path.min_exponent or 0]
    if path.operand is not None:
        highest.append(2 * path.operand.min_exponent + top)
    return max(highest) <= SAFE and min(lowest) >= -SAFE


def grouped(x: torch.Tensor, group: int, padding: float) -> torch.Tensor:
    """Cut the leading axis into groups ``[groups, group, ...]``, the last one padded."""
    short = -x.shape[0] % group
    if short:
        x = torch.cat([x, x.new_full((short, *x.shape[1:]), padding)])
    return x.view(-1, group, *x.shape[1:])


def group_exponents(scale: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the exponents of scales, one a group, int32; a zero scale has the lowest."""
    return exponent_of(scale).clamp(min=fmt.min_exponent).to(torch.int32)
