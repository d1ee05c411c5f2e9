# SPDX-License-Identifier: Apache-2.0
"""The accumulation order of a product (docs/matmul.md, section 4): chains, promotions, parts and their reduction."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TypeVar

import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import FP32, Arithmetic, Datapath, FmaDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.schedule import ZERO, Chain, combination, schedule
from fmtsim.support.float64 import from_bits
from fmtsim.torch_engine.floats import FP64
from fmtsim.torch_engine.gemm_blocks import AlignedUnit, FusedAddUnit
from fmtsim.torch_engine.gemm_operands import ODD_BITS, Pieces, Rows, Unit, is_scalable, round_value
from fmtsim.torch_engine.gemm_units import FmaUnit, PairwiseUnit, TwoStageUnit
from fmtsim.torch_engine.gemm_wide import WideUnit
from fmtsim.torch_engine.reals import add_to_odd

T = TypeVar("T")
Draw = Callable[[int], torch.Tensor | None]
"""Returns the random integers of block number t for the outputs at hand, None without stochastic rounding."""


def unit_of(spec: GemmSpec, k: int) -> Unit:
    """Return what computes the blocks of a product of K terms: in float64 if it holds them, else in wide integers."""
    path, a, b = spec.datapath, spec.a, spec.b
    assert isinstance(a, FloatFormat) and isinstance(b, FloatFormat)
    if isinstance(path, TwoStageDatapath):
        return TwoStageUnit(path, a, b)
    if isinstance(path, PairwiseDatapath):
        return PairwiseUnit(path, a, b)
    if isinstance(path, FmaDatapath):
        return FmaUnit(path, a, b)
    assert isinstance(path, Datapath)
    parts = schedule(k, path, spec.plan)
    longest = max((len(block) for part in parts for chain in part for block in chain.blocks), default=1)
    if AlignedUnit.fits(path, a, b, longest):
        return AlignedUnit(path, a, b)
    if FusedAddUnit.fits(path, a, b, longest):
        return FusedAddUnit(path)
    return WideUnit(path, a, b, longest)


def accumulator_of(path: Arithmetic) -> FloatFormat:
    """Return the format of a unit's running sum."""
    return path.accumulator if isinstance(path, Datapath) else FP32


class Summation:
    """Sums the blocks of a product in the order of its plan.

    Args:
        spec: The product.
        unit: What computes a block.
        k: Products of an output.
    """

    def __init__(self, spec: GemmSpec, unit: Unit, k: int) -> None:
        path, plan = spec.datapath, spec.plan
        self._unit, self._plan = unit, plan
        self._parts = schedule(k, path, plan)
        self._combination = combination(k, plan)
        accumulator = accumulator_of(path)
        self._promotion = spec.outer if spec.promotes else None
        wide = FP32 if is_representable(accumulator, torch.float32) else accumulator
        formats = [f for f in (accumulator, self._promotion, plan.partial) if f is not None]
        self._add = Adder(wide, formats)
        self._promote = Adder(self._promotion, [accumulator, self._promotion]) if self._promotion else None

    def __call__(
        self, rows: Rows, c: torch.Tensor | None, draw: Draw, scales: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the reduced sums, float64, of the shape that ``rows.a[0]`` and ``rows.b[0]`` broadcast to.

        Args:
            rows: Operands with K leading.
            c: float64 values of the accumulator, or None. Where parts are added in place the output begins with it.
            draw: Random integers by block.
            scales: Those of a scaled promotion, with the chain's index leading, float32, or None.
        """
        shape = torch.broadcast_shapes(rows.a.shape[1:], rows.b.shape[1:])
        zero = from_bits(torch.zeros(shape, dtype=torch.int64, device=rows.a.device))
        if not self._parts:
            return zero if c is None else c
        in_place = self._plan.reduce == "in_place"
        firsts = accumulate((sum(len(chain.blocks) for chain in part) for part in self._parts), initial=0)
        blocks = list(firsts)

        def of_part(i: int) -> torch.Tensor:
            start = c if c is not None and i == 0 and not in_place else zero
            part = self._parts[i]
            block = blocks[i]
            if self._promote is None:
                (chain,) = part  # only promotions divide a slice into chains
                return self._chain(chain, rows, start, draw, block)
            total = start
            for chain in part:
                result = self._chain(chain, rows, zero, draw, block)
                block += len(chain.blocks)
                total = self._promoted(self._promote, result, total, self._scales(chain, scales))
            return total

        if in_place:
            return self._in_place([of_part(i) for i in range(len(self._parts))], c)
        return combined(self._combination, lambda i: zero if i == ZERO else self._rounded(of_part(i)), self._sum)

    def _chain(self, chain: Chain, rows: Rows, state: torch.Tensor, draw: Draw, block: int) -> torch.Tensor:
        for i, indices in enumerate(chain.blocks):
            pieces = Pieces(rows, indices, self._unit.span)
            state = self._unit.step([pieces[0]] if len(pieces) == 1 else pieces, state, draw(block + i))
        return state

    def _promoted(
        self, add: "Adder", result: torch.Tensor, total: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Add a chain to the outer sum."""
        if self._plan.successive_scales:
            nothing = torch.full_like(result, -0.0)  # adding it changes nothing, so that the product is rounded alone
            row, column = scales or (None, None)
            return add(add(result, nothing, row), total, column)
        return add(result, total, None if scales is None else round_value(scales[0] * scales[1], FP32))

    def _scales(
        self, chain: Chain, scales: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if scales is None or not self._plan.scaled_promotion or self._plan.promote_every is None:
            return None
        place = chain.start // self._plan.promote_every
        return scales[0][place], scales[1][place]

    def _rounded(self, part: torch.Tensor) -> torch.Tensor:
        return part if self._plan.partial is None else round_value(part, self._plan.partial)

    def _in_place(self, sums: list[torch.Tensor], total: torch.Tensor | None) -> torch.Tensor:
        """Add the parts to what an output holds, which is rounded to its format after each."""
        partial = self._plan.partial
        for term in sums:
            total = term if total is None else self._add(total, term)
            total = total if partial is None else round_value(total, partial)
        assert total is not None  # there are parts
        return total

    def _sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = self._add(x, y)
        return self._rounded(total) if self._plan.round_trip else total


class Adder:
    """Adds values of several formats with one rounding to nearest even, zeros and Inf as IEEE 754 has them."""

    def __init__(self, fmt: FloatFormat, terms: list[FloatFormat]) -> None:
        self._fmt = fmt
        self._narrow = all(is_scalable(f) and f.mantissa_bits <= ODD_BITS for f in (fmt, *terms))
        self._short = all(f.mantissa_bits <= 28 for f in terms)  # times a float32 number they fit in float64
        path = Datapath(block=1, fraction_bits=None, rounding=Rounding(), accumulator=fmt, signed_zero=True)
        self._wide = WideUnit(path, FP64, FP32, 1, addend=FP64)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x + y``, or ``x * scale + y`` with a float32 scale; all float64."""
        if self._narrow and (scale is None or self._short):
            return round_value(add_to_odd(x if scale is None else x * scale, y), self._fmt)
        one = torch.ones_like(x) if scale is None else scale.expand_as(x)
        return self._wide.step([Rows(x[None], one[None], finite=False)], y, None)


def combined(steps: Iterable[tuple[int, int]], sum_of: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """Add sums as a ``combination`` says; ``sum_of`` is asked for each when it is needed."""
    stack: list[T] = []
    for number, additions in steps:
        stack.append(sum_of(number))
        for _ in range(additions):
            last = stack.pop()
            stack.append(add(stack.pop(), last))
    return stack[0]
