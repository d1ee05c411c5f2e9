"""Outputs that are computed one by one: the products, or rows and columns of one, that vector kernels leave out."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fmtsim.cpu.gemm.accumulate import MODES, Promotion, Reduction
from fmtsim.cpu.gemm.aligned_rounding import Draw
from fmtsim.cpu.gemm.exact_integer import NO_FRACTION, Terms, add_exactly
from fmtsim.cpu.gemm.slabs import Slabs
from fmtsim.cpu.runtime import pool
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_TILE = 64
_WEIGHT = 64  # the cost of a product here, in elements of a cast


@dataclass(frozen=True, slots=True, eq=False)
class ExactOutputs:
    """A product of a fused unit, of which ``run`` computes some rows and columns."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    scales: tuple[Tensor | None, Tensor | None]
    chains: tuple[np.ndarray, np.ndarray]
    spec: GemmSpec
    slabs: Slabs
    promotion: Promotion
    reduction: Reduction
    draw: Draw
    out: Tensor

    def run(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Compute the outputs where these rows and columns meet."""
        if not rows.size or not columns.size:
            return
        terms = terms_of(self.spec, self.slabs.block)
        for at in range(0, columns.size, _TILE):
            chosen = columns[at : at + _TILE]
            b = self.b[chosen].float() if self.b.element_size() == 1 else self.b[chosen]
            tile = b.double().numpy()

            def part(start: int, stop: int, tile: np.ndarray = tile, chosen: np.ndarray = chosen) -> None:
                for first in range(start, stop, _TILE):
                    self._tile(rows[first : min(first + _TILE, stop)], chosen, tile, terms)

            pool.run(part, rows.size, 1, chosen.size * max(self.a.shape[1], 1) * _WEIGHT)

    def _tile(self, rows: np.ndarray, columns: np.ndarray, b: np.ndarray, terms: Terms) -> None:
        a = self.a[rows].float() if self.a.element_size() == 1 else self.a[rows]
        none = np.zeros((0, 0), np.float32)
        inside = [none if s is None or not terms.scale_block else np.ascontiguousarray(s.numpy()[i])
                  for s, i in zip(self.scales, (rows, columns), strict=True)]  # fmt: skip
        chains = [np.ascontiguousarray(s[:, i]) if s.size else none
                  for s, i in zip(self.chains, (rows, columns), strict=True)]  # fmt: skip
        c = np.zeros((0, 0)) if self.c is None else self.c.numpy()[np.ix_(rows, columns)].astype(np.float64)
        out = np.empty((rows.size, columns.size))
        whole = self.slabs.whole
        add_exactly(
            a.double().numpy(), b, (*inside, *chains), c, whole.slots, whole.order, terms, self.promotion,
            self.reduction, self.slabs.parts, self.draw, (rows, columns), out,
        )  # fmt: skip
        self.out.numpy()[np.ix_(rows, columns)] = out


def terms_of(spec: GemmSpec, block: int) -> Terms:
    """Return a fused unit and its operands as numbers."""
    unit = spec.datapath
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    lowest = unit.operand or spec.a, unit.operand or spec.b
    acc = unit.accumulator
    return Terms(
        block=block,
        fraction_bits=NO_FRACTION if unit.fraction_bits is None else unit.fraction_bits,
        mode=MODES[unit.term_rounding],
        lowest=-(1 << 20) if unit.min_exponent is None else unit.min_exponent,
        group=unit.group,
        emin_a=lowest[0].min_exponent,
        emin_b=lowest[1].min_exponent,
        lsb=sum(fmt.min_exponent - fmt.mantissa_bits for fmt in (spec.a, spec.b)),
        scale_block=unit.scale_block,
        scale_emin=0 if unit.scale is None else unit.scale.min_exponent,
        signed_zero=unit.signed_zero,
        rounding=MODES[unit.rounding.mode],
        random_bits=unit.rounding.bits,
        bits=acc.mantissa_bits,
        emin=acc.min_exponent,
        largest=acc.max,
    )


def covers(spec: GemmSpec, block: int) -> bool:
    """Say whether 62-bit integers hold the terms and sums of a fused unit."""
    unit = spec.datapath
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    acc, rounding = unit.accumulator, unit.rounding
    if spec.plan.scaled_promotion and (acc.mantissa_bits > 23 or acc.exponent_bits > 8):
        return False
    if unit.fraction_bits is None and rounding.mode == "stochastic" and acc.mantissa_bits + rounding.bits > 56:
        return False  # an exact sum keeps 60 bits
    scale = 0 if unit.scale is None else 2 * (unit.scale.mantissa_bits + 1)
    bits = spec.a.mantissa_bits + spec.b.mantissa_bits + 2 + scale
    if unit.group > 1:
        span = sum(fmt.max_exponent - fmt.min_exponent for fmt in (spec.a, spec.b))
        bits += span + unit.group.bit_length()
    if unit.fraction_bits is None:
        return bits <= 62 or (unit.scale is None and unit.group == 1)
    return (
        bits <= 62
        and unit.fraction_bits
        + 4
        + (2 if scale else 0)
        + block.bit_length()
        + (scale + unit.group.bit_length() if unit.group > 1 else 0)
        <= 62
    )
