# SPDX-License-Identifier: Apache-2.0
"""Sums to nearest even in order: fused multiply-adds one after another, and blocks of exact sums.

fma_chain.cu explains the method; this file says which units it takes, and in which arithmetic. Sums in float16,
bfloat16, float32 and float64 are what the device's own instructions compute; other accumulators take float32 where the
formats alone prove that right, else float64, with marks for the tiles whose numbers do not fit.
"""

import math
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
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
    layout_of,
    order_bytes,
    panel_count,
    problem_bytes,
    promotion_of,
)
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

HALVES, BFLOATS, FLOATS, DOUBLES = range(4)  # the macro NUMBERS
_PLACES: Final = 32  # of a panel that one block of threads prepares
_WORDS = {HALVES: torch.int32, BFLOATS: torch.int32, FLOATS: torch.float32, DOUBLES: torch.float64}
_STAGES: Final = 4
_UNROLL: Final = 4  # k positions of a loop; two where sums are promoted, of which four would spill
_NARROW: Final = -60  # lowest exponent above which sums are expected to become subnormal


class _Shape(NamedTuple):
    """The specialisation for a unit: the macros of fma_chain.cu that decide bits, and the fields of ``Limits``."""

    numbers: int
    acc_mantissa: int
    block: int
    clamped: bool
    bounded: bool
    promotes: int
    signed: bool
    emin: int
    emax: int

    @property
    def native(self) -> bool:
        """Whether the instruction's result is the accumulator's."""
        return self.numbers <= BFLOATS or (self.numbers, self.acc_mantissa) in ((FLOATS, 23), (DOUBLES, 52))

    @property
    def has_spans(self) -> bool:
        """Whether the exponents of panels decide which tiles are right."""
        return self.numbers == DOUBLES and not self.native

    @property
    def depth(self) -> int:
        """Places of a stage."""
        return 8 if self.numbers == DOUBLES else 16

    @property
    def padded(self) -> int:
        """Places of a block."""
        return self.block if self.depth % self.block == 0 else -(-self.block // self.depth) * self.depth

    def limits(self, k: int) -> bytes:
        """Return the structure ``Limits``."""
        logs = math.ceil(math.log2(k)), math.ceil(math.log2(self.block))
        return struct.pack("<6i", self.emin, self.emax, *logs, self.padded, (self.emin + 1023) << 20)


class FmaChain(FastPath):
    """Multiply-adds in order."""

    name, packing, dtypes = "fma_chain", "fma_chain_pack.cu", REALS

    def _shape(self, job: Job) -> _Shape | None:
        return shape_of(job.spec, job.order.block, job.shape[2], job.c is not None)

    def _product_macros(self, job: Job, shape: _Shape) -> Defines:
        return macros(
            NUMBERS=shape.numbers, ACC_MANTISSA=shape.acc_mantissa,
            BLOCK=shape.block if shape.depth % shape.block == 0 else 0, CLAMPED=shape.clamped, BOUNDED=shape.bounded,
            PROMOTES=shape.promotes, SIGNED=shape.signed, STAGES=_STAGES, RESIDENT=1 if shape.numbers == DOUBLES else 2,
            UNROLL=1 if shape.clamped else 2 if shape.promotes == 1 else _UNROLL,
        )  # fmt: skip

    def _operand_macros(self, job: Job, shape: _Shape, side: int) -> Defines:
        dtype = TYPES.index((job.a, job.b)[side].dtype)
        return macros(NUMBERS=shape.numbers, TYPE=dtype, SECOND=side, SPANS=shape.has_spans)

    def _panels(self, job: Job, shape: _Shape) -> tuple[int, int]:
        """Return the panels of both operands: two columns of the second share a word of 16-bit numbers."""
        return panel_count(job.shape[0]), panel_count(job.shape[1], 2 * TILE if shape.numbers <= BFLOATS else TILE)

    def _pack(self, job: Job, shape: _Shape, side: int, panels: int) -> Packing:
        """Pack words, and the spans of their exponents, in the layout of fma_chain.cuh."""
        x, order = (job.a, job.b)[side], job.order
        places = order.blocks * shape.padded
        # a stage is copied whole, so the last one may read behind the last place
        words = torch.empty((panels * places + shape.depth) * TILE, dtype=_WORDS[shape.numbers], device=x.device)
        spans = torch.empty(panels * places if shape.has_spans else 1, dtype=torch.int32, device=x.device)
        source = (
            x, *map(np.int64, x.stride()), np.int32(x.shape[0]), order.source, np.int32(order.block),
            np.int32(shape.padded), np.int32(order.blocks), np.int64(places),
        )  # fmt: skip
        return Packing((panels, -(-places // _PLACES)), source, (words, spans))

    def _arguments(
        self, job: Job, shape: _Shape, packed: list[Tensor], flags: Tensor, marks: Tensor, sums: Tensor
    ) -> tuple[Any, ...]:
        """Return the arguments of the product: words of both operands before spans, places in place of blocks."""
        places, limits = np.int64(job.order.blocks * shape.padded), shape.limits(job.shape[2])
        operands = *packed[::2], *packed[1::2], flags, job.c
        return *operands, order_bytes(job), places, marks, sums, limits, problem_bytes(job, TILE)

    def _shared(self, job: Job, shape: _Shape) -> int:
        return _STAGES * 2 * TILE * shape.depth * _WORDS[shape.numbers].itemsize


@lru_cache(maxsize=1024)
def shape_of(spec: GemmSpec, block: int, k: int, with_c: bool) -> _Shape | None:
    """Return the specialisation for blocks of a length, None where the kernels do not take them."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.fraction_bits is not None or unit.scale is not None or unit.group > 1:
        return None
    acc, promotion = unit.accumulator, promotion_of(spec)
    if unit.rounding.mode != "nearest_even" or not is_plain(acc) or not is_plain(spec.outer):
        return None
    if not all(isinstance(fmt, FloatFormat) for fmt in (spec.a, spec.b)):
        return None
    a, b = exponent_range(spec.a), exponent_range(spec.b)
    numbers = _instruction(spec) if block == 1 else None
    bounded = clamped = False
    if numbers is None and not all(is_representable(fmt, torch.float32) for fmt in (spec.a, spec.b)):
        return None
    native = numbers is not None
    if numbers is None and block == 1 and _short(a, b, acc):
        highest = a.top + b.top + math.ceil(math.log2(k)) + 1  # a sum gains at most twice a product
        numbers = FLOATS
        bounded = (with_c and not promotion) or highest > min(acc.max_exponent, 126 - 23 + acc.mantissa_bits)
    elif numbers is None:
        numbers = DOUBLES
        clamped = a.lsb + b.lsb < acc.min_exponent - acc.mantissa_bits and acc.min_exponent > _NARROW
        bounded = block > 1 or (with_c and not promotion) or acc.max_exponent < -_NARROW
        if acc.mantissa_bits > 25 or (block == 1 and a.bits + b.bits + acc.mantissa_bits > 49):
            return None
    if unit.signed_zero and not native:
        return None
    acc_mantissa, ends = acc.mantissa_bits, (acc.min_exponent, acc.max_exponent)
    return _Shape(numbers, acc_mantissa, block, clamped, bounded, promotion, unit.signed_zero, *ends)


def _instruction(spec: GemmSpec) -> int | None:
    """Return the arithmetic in which the device's fused multiply-add is the unit's, None where there is none."""
    unit = spec.datapath
    assert isinstance(unit, Datapath)
    of_layout = {(5, 10, 15): (HALVES, torch.float16), (8, 7, 127): (BFLOATS, torch.bfloat16),
                 (8, 23, 127): (FLOATS, torch.float32), (11, 52, 1023): (DOUBLES, torch.float64)}  # fmt: skip
    numbers, dtype = of_layout.get(layout_of(unit.accumulator), (None, torch.float32))
    return numbers if all(is_representable(fmt, dtype) for fmt in (spec.a, spec.b)) else None


def _short(a: Range, b: Range, acc: FloatFormat) -> bool:
    """Return True if float32, rounded once more, gives the accumulator's sums: the accumulator holds every product."""
    fits = a.bits + b.bits <= acc.mantissa_bits + 1 <= 11
    return fits and a.lsb + b.lsb >= max(acc.min_exponent - acc.mantissa_bits, -126) and a.top + b.top <= 126
