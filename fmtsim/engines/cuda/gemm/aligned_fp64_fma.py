# SPDX-License-Identifier: Apache-2.0
"""Aligned sums in float64: units that round terms toward zero, down or to nearest, and sums in any way.

aligned_fp64_fma.cu has the method, one float64 multiply-add a product. Here is which units it takes; those that
truncate both terms and sums, to many exponents, go faster in aligned_fp64_mma.py.
"""

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda.gemm.job import TILE, Job
from fmtsim.engines.cuda.gemm.packed import Side, launch, pack, panels_of
from fmtsim.engines.cuda.gemm.problem import (
    REALS,
    TYPES,
    Range,
    is_plain,
    macros,
    order_bytes,
    outer_format,
    problem_of,
    promotion_of,
    range_of,
)
from fmtsim.engines.cuda.runtime import Defines, Programs
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import CODES
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_EVEN, _AWAY, _ZERO, _DOWN, _STOCHASTIC = (
    CODES["nearest_even"], CODES["nearest_away"], CODES["toward_zero"], CODES["down"], CODES["stochastic"],
)  # fmt: skip
_BY_SUM: Final = (_EVEN, _ZERO, _STOCHASTIC)  # roundings that one or two additions do
_RECORD: Final = 32  # k positions of a record, at most
_FARTHEST: Final = 200  # exponents of accumulators and bounds of the alignment lie within
_NARROW: Final = -60  # lowest exponent above which sums are expected to become subnormal


class _Shape(NamedTuple):
    """How the kernels run a unit: macros, and the numbers of ``Limits``."""

    block: int
    records: int
    fraction: int
    kept: int
    clamped: bool
    promotes: int
    terms: int
    mode: int
    eps: int
    emins: tuple[int, int]
    emin: int
    emax: int
    bound: int | None
    bits: int = 1
    odd: bool = False
    by_rest: bool = False

    @property
    def swapped(self) -> bool:
        """Whether the kernel takes b first."""
        return self.mode == _STOCHASTIC

    def record(self, side: int) -> int:
        """Return the bytes of a record of a panel (aligned_fp64_fma.cuh)."""
        return self.block * TILE * (10 if side else 12) + TILE * 4

    @property
    def stage(self) -> int:
        """Bytes of a record of both operands."""
        return self.record(0) + self.record(1)

    def defines(self, stages: int, aligned: bool) -> Defines:
        """Return the macros of the product; ``aligned`` says that its columns are a multiple of 64."""
        return macros(
            BLOCK=self.block, RECORDS=self.records, FRACTION=self.fraction, KEPT=self.kept, CLAMPED=int(self.clamped),
            PROMOTES=self.promotes, TERMS=self.terms, ROUND=self.mode, BITS=self.bits, ODD=int(self.odd),
            BY_REST=int(self.by_rest), ALIGNED=int(aligned or not self.swapped), STAGES=stages,
        )  # fmt: skip

    def operand(self, side: int, dtype: torch.dtype, scaled: bool = False) -> Defines:
        """Return the macros that pack an operand."""
        return macros(
            BLOCK=self.block, FRACTION=self.fraction, TYPE=TYPES.index(dtype), SECOND=side, EMIN=self.emins[side],
            ENLARGED=0 if side else self.eps, TERMS=self.terms, SCALED=int(scaled),
        )  # fmt: skip

    def limits(self) -> bytes:
        """Return the structure ``Limits``."""
        least = 0 if self.bound is None else (self.bound - self.fraction + 52 + 1023) << 20 | 1 << 19
        enlarged = 1.0 + 2.0**-self.eps if self.eps else 1.0
        return struct.pack("<d4i8x", enlarged, self.emin, self.emax, least, (self.emin + 1023) << 20)


def programs(job: Job) -> Programs | None:
    """Return the kernels that ``run`` launches, None where they do not take a product."""
    shape = shape_of(job.spec, job.order.block) if job.a.dtype in REALS and job.b.dtype in REALS else None
    if shape is None or _stages(job, shape) < 2:
        return None
    sides = (shape.operand(side, x.dtype, s is not None) for side, (x, s) in enumerate(_operands(job, shape)))
    product = "aligned_fp64_fma.cu", "aligned_fp64_fma", shape.defines(_stages(job, shape), job.shape[1] % 64 == 0)
    return product, *(("aligned_fp64_fma_pack.cu", "pack_operand", defines) for defines in sides)


def _stages(job: Job, shape: _Shape) -> int:
    return min(4, (job.gpu.shared - 1024) // shape.stage)


@lru_cache(maxsize=1024)
def shape_of(spec: GemmSpec, block: int) -> _Shape | None:
    """Return how the kernels run blocks of a length, None where they do not."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.group > 1 or unit.signed_zero or unit.fraction_bits is None:
        return None
    formats = [fmt for fmt in (spec.a, spec.b) if isinstance(fmt, FloatFormat)]
    if len(formats) < 2 or not all(is_representable(fmt, torch.float32) for fmt in formats):
        return None
    acc, fraction, how = unit.accumulator, unit.fraction_bits, unit.rounding
    if fraction > 40 or acc.mantissa_bits > 25 or not is_plain(acc) or not is_plain(outer_format(spec)):
        return None
    if max(-acc.min_exponent, acc.max_exponent, abs(unit.min_exponent or 0)) > _FARTHEST:
        return None
    mode, terms, odd = CODES[how.mode], CODES[unit.term_rounding], how.variant == "b"
    by_rest = mode not in _BY_SUM
    if mode == _STOCHASTIC:
        formats.reverse()
        by_rest = how.variant == "c" or how.layout != "word" or how.bits + odd > min(32, 51 - acc.mantissa_bits)
    scale, sides = range_of(unit.scale), [range_of(fmt) for fmt in formats]
    bits = sum(side.bits for side in sides) + 2 * scale.bits
    eps = max(bits, fraction + 4, acc.mantissa_bits + 1) + 1 if terms in (_ZERO, _AWAY) else 0
    if sides[0].bits + scale.bits + eps > 53 or not _fits(sides, scale, fraction, block, terms):
        return None
    records = -(-block // _RECORD)
    return _Shape(
        block=block if records == 1 else _RECORD,
        records=records,
        fraction=fraction,
        kept=acc.mantissa_bits,
        clamped=acc.min_exponent > _NARROW,
        promotes=promotion_of(spec),
        terms=terms,
        mode=mode,
        eps=eps,
        emins=((unit.operand or formats[0]).min_exponent, (unit.operand or formats[1]).min_exponent),
        emin=acc.min_exponent,
        emax=acc.max_exponent,
        bound=unit.min_exponent,
        bits=how.bits if mode == _STOCHASTIC else 1,
        odd=mode == _STOCHASTIC and odd,
        by_rest=by_rest,
    )


def _fits(sides: list[Range], scale: Range, fraction: int, block: int, terms: int) -> bool:
    """Say whether a block's terms and one more are less than 2^31, truncated 2^50, of the grid's last places.

    Two significands of a and b bits multiply to at most (2^a - 1) (2^b - 1) / 2^(a + b - 2), below which the grid has
    ``fraction`` bits; half of one is what rounding adds. Scales count as operands.
    """
    largest, shift = 1 << fraction, 0
    for bits in [side.bits for side in sides] + [scale.bits] * (2 * (scale.bits > 0)):
        largest, shift = largest * ((1 << bits) - 1), shift + bits - 1
    return block * ((largest >> shift) + 1) + 1 < 1 << (31 if terms in (_EVEN, _AWAY) else 50)


def run(job: Job, sums: Tensor, marks: Tensor) -> None:
    """Write the sums [parts, M, N] of all tiles but those that it marks."""
    found, shape, order = programs(job), shape_of(job.spec, job.order.block), job.order
    assert found is not None and shape is not None
    first, second = (panels_of(x.shape[0]) for x, _ in _operands(job, shape))
    made = pack(job, found, (first, second), lambda side: _side(job, shape, side))
    launch(
        job, found[0], (first * second, 1, len(order.parts)), *made, job.c, order_bytes(job), np.int32(order.blocks),
        marks, sums, shape.limits(), problem_of(job, TILE), shared=_stages(job, shape) * shape.stage,
    )  # fmt: skip


def _operands(job: Job, shape: _Shape) -> list[tuple[Tensor, Tensor | None]]:
    """Return the operands with the unit's own scales, in the order in which the kernel takes them."""
    inside = isinstance(job.spec.datapath, Datapath) and job.spec.datapath.scale is not None
    sides = [(job.a, job.scale_a if inside else None), (job.b, job.scale_b if inside else None)]
    return sides[::-1] if shape.swapped else sides


def _side(job: Job, shape: _Shape, side: int) -> Side:
    """Return how an operand is packed: its records (aligned_fp64_fma.cuh)."""
    x, scale = _operands(job, shape)[side]
    order, panels, unit = job.order, panels_of(x.shape[0]), job.spec.datapath
    assert isinstance(unit, Datapath)
    count = order.blocks * shape.records
    source = struct.pack(
        "<2Q4qQ6i", x.data_ptr(), 0 if scale is None else scale.data_ptr(), *x.stride(),
        *((0, 0) if scale is None else scale.stride()), order.source.data_ptr(), x.shape[0], order.block, order.blocks,
        shape.records, unit.scale_block or 1, 0 if unit.scale is None else unit.scale.min_exponent,
    )  # fmt: skip
    records = torch.empty(panels * count * shape.record(side), dtype=torch.uint8, device=x.device)
    return Side((count, panels), (source,), (records,))
