# SPDX-License-Identifier: Apache-2.0
"""Aligned sums in float64: units that round terms toward zero, down or to nearest, and sums in any mode.

aligned_fp64_fma.cu has the method, one float64 multiply-add a product. Here is which units it takes; those that
truncate both terms and sums, to many exponents, go faster in aligned_fp64_mma.py.
"""

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import macros
from fmtsim.cuda.gemm.job import (
    REALS,
    TILE,
    TYPES,
    FastPath,
    Job,
    Packing,
    Range,
    exponent_range,
    is_plain,
    panel_count,
    promotion_of,
)
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
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
    acc_mantissa: int
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

    def record(self, side: int) -> int:
        """Return the bytes of a record of a panel (aligned_fp64_fma.cuh)."""
        return self.block * TILE * (10 if side else 12) + TILE * 4

    @property
    def stage(self) -> int:
        """Bytes of a record of both operands."""
        return self.record(0) + self.record(1)

    def limits(self, k: int) -> bytes:
        """Return the structure ``Limits``."""
        least = 0 if self.bound is None else (self.bound - self.fraction + 52 + 1023) << 20 | 1 << 19
        enlarged = 1.0 + 2.0**-self.eps if self.eps else 1.0
        return struct.pack("<d4i8x", enlarged, self.emin, self.emax, least, (self.emin + 1023) << 20)


class AlignedFp64Fma(FastPath):
    """Terms rounded by float64 multiply-adds."""

    name, packing, dtypes = "aligned_fp64_fma", "aligned_fp64_fma_pack.cu", REALS

    def _shape(self, job: Job) -> _Shape | None:
        shape = shape_of(job.spec, job.order.block)
        return None if shape is None or self._stages(job, shape) < 2 else shape

    def _sides(self, job: Job, shape: _Shape) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Return operands and scales in the kernel's order: b first where four outputs of a row share random words."""
        return job.sides[::-1] if shape.mode == _STOCHASTIC else job.sides

    def _product_macros(self, job: Job, shape: _Shape) -> Defines:
        aligned = job.shape[1] % 64 == 0 or shape.mode != _STOCHASTIC  # its columns are a multiple of 64
        return macros(
            BLOCK=shape.block, RECORDS=shape.records, FRACTION=shape.fraction, ACC_MANTISSA=shape.acc_mantissa,
            CLAMPED=shape.clamped, PROMOTES=shape.promotes, TERMS=shape.terms, ROUND=shape.mode, BITS=shape.bits,
            ODD=shape.odd, BY_REST=shape.by_rest, ALIGNED=aligned, STAGES=self._stages(job, shape),
        )  # fmt: skip

    def _operand_macros(self, job: Job, shape: _Shape, side: int) -> Defines:
        x, scale = self._sides(job, shape)[side]
        return macros(
            BLOCK=shape.block, FRACTION=shape.fraction, TYPE=TYPES.index(x.dtype), SECOND=side, EMIN=shape.emins[side],
            ENLARGED=0 if side else shape.eps, TERMS=shape.terms, SCALED=scale is not None,
        )  # fmt: skip

    def _panels(self, job: Job, shape: _Shape) -> tuple[int, int]:
        """Return the panels of both operands, in the kernel's order."""
        first, second = (panel_count(x.shape[0]) for x, _ in self._sides(job, shape))
        return first, second

    def _pack(self, job: Job, shape: _Shape, side: int, panels: int) -> Packing:
        """Pack records (aligned_fp64_fma.cuh)."""
        (x, scale), order, unit = self._sides(job, shape)[side], job.order, job.spec.datapath
        assert isinstance(unit, Datapath)
        count = order.blocks * shape.records
        source = struct.pack(
            "<2Q4qQ6i", x.data_ptr(), 0 if scale is None else scale.data_ptr(), *x.stride(),
            *((0, 0) if scale is None else scale.stride()), order.source.data_ptr(), x.shape[0], order.block,
            order.blocks, shape.records, unit.scale_block or 1, 0 if unit.scale is None else unit.scale.min_exponent,
        )  # fmt: skip
        records = torch.empty(panels * count * shape.record(side), dtype=torch.uint8, device=x.device)
        return Packing((count, panels), (source,), (records,))

    def _stages(self, job: Job, shape: _Shape) -> int:
        """Return the records of both operands that shared memory holds."""
        return min(4, (job.gpu.shared - 1024) // shape.stage)

    def _shared(self, job: Job, shape: _Shape) -> int:
        return self._stages(job, shape) * shape.stage


@lru_cache(maxsize=1024)
def shape_of(spec: GemmSpec, block: int) -> _Shape | None:
    """Return the specialisation for blocks of a length, None where the kernels do not take them."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.group > 1 or unit.signed_zero or unit.fraction_bits is None:
        return None
    formats = [fmt for fmt in (spec.a, spec.b) if isinstance(fmt, FloatFormat)]
    if len(formats) < 2 or not all(is_representable(fmt, torch.float32) for fmt in formats):
        return None
    acc, fraction, how = unit.accumulator, unit.fraction_bits, unit.rounding
    if fraction > 40 or acc.mantissa_bits > 25 or not is_plain(acc) or not is_plain(spec.outer):
        return None
    if max(-acc.min_exponent, acc.max_exponent, abs(unit.min_exponent or 0)) > _FARTHEST:
        return None
    mode, terms, odd = CODES[how.mode], CODES[unit.term_rounding], how.variant == "b"
    by_rest = mode not in _BY_SUM
    if mode == _STOCHASTIC:
        formats.reverse()
        by_rest = how.variant == "c" or how.layout != "word" or how.bits + odd > min(32, 51 - acc.mantissa_bits)
    scale, sides = exponent_range(unit.scale), [exponent_range(fmt) for fmt in formats]
    bits = sum(side.bits for side in sides) + 2 * scale.bits
    eps = max(bits, fraction + 4, acc.mantissa_bits + 1) + 1 if terms in (_ZERO, _AWAY) else 0
    if sides[0].bits + scale.bits + eps > 53 or not _fits(sides, scale, fraction, block, terms):
        return None
    records = -(-block // _RECORD)
    return _Shape(
        block=block if records == 1 else _RECORD,
        records=records,
        fraction=fraction,
        acc_mantissa=acc.mantissa_bits,
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
    """Return True if a block's terms and one more are less than 2^31, truncated 2^50, of the grid's last places.

    Two significands of a and b bits multiply to at most (2^a - 1) (2^b - 1) / 2^(a + b - 2), below which the grid has
    ``fraction`` bits; half of one is what rounding adds. Scales count as operands.
    """
    largest, shift = 1 << fraction, 0
    for bits in [side.bits for side in sides] + [scale.bits] * (2 * (scale.bits > 0)):
        largest, shift = largest * ((1 << bits) - 1), shift + bits - 1
    return block * ((largest >> shift) + 1) + 1 < 1 << (31 if terms in (_EVEN, _AWAY) else 50)
