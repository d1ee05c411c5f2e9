# SPDX-License-Identifier: Apache-2.0
"""Aligned sums on the fp64 tensor core: units that truncate terms, or round them down, and truncate sums.

aligned_fp64_mma.cu has the method. Here is which products it takes, with which constants, and in which configuration.
Everything is decided from the formats and the order; tiles whose numbers do not fit (NaN, Inf, sums near the ends of
the accumulator's range, and far smaller than the largest of their rows and columns) are marked for the general path.
"""

import math
import struct
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import macros
from fmtsim.cuda.gemm.job import (
    SINGLES,
    THREADS,
    TYPES,
    FastPath,
    Gpu,
    Job,
    Packing,
    Plan,
    launch,
    layout_of,
    panel_count,
)
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import FloatFormat
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec

DEVICES = ((8, 0), (9, 0), (10, 0))  # with fp64 tensor cores of full width
LONGEST_BLOCK = 64
ROWS_A = 64  # of a panel of the first operand
_HIGH_WORD = 21  # bits of a significand that the high word of a double holds
_EIGHT = 8.0  # a spacing by which the kernels of short sums divide without a multiplication
_LOWEST_POWER, _HIGHEST_POWER = -126, 127  # exponents of normal bfloat16
_TINY = (1023 - 300) << 20  # high word of what stands for a zero (aligned_fp64_mma_layout.cuh)
_ROW_OF_ZEROS = -(1 << 20)  # aligned_fp64_mma_layout.cuh
_EACH = 32  # numbers that a thread of row_exponents looks at
_SLACK = 0.25  # of the spacing above log2(block): M's fraction must leave room for the sum
_PLACES = 32  # of a stage, where blocks are shorter
_SINGLE, _PROMOTED, _LONG, _MIDDLE, _SHORT, _SHORT_WIDE = range(6)  # what is fast in different shapes: ``_kind``


class OperandRange(NamedTuple):
    """An operand: smallest and largest exponent and bits of its numbers, and the powers by distance from the top."""

    emin: int
    top: int
    bits: int
    scale_emin: int


class Floor(NamedTuple):
    """How the kernels run a unit on two formats; the names are those of ``Floor`` in aligned_fp64_mma.cu."""

    a: OperandRange
    b: OperandRange
    wide: bool
    two_words: bool
    single: bool
    down: bool
    eps: int
    base: int
    factor: int
    fraction_bits: int
    least_exponent: int
    lowest: int
    highest: int
    acc_mantissa: int
    spacing: float
    offset: float

    @property
    def enlarged(self) -> float:
        """What terms are multiplied by."""
        return 1.0 if self.down else 1.0 + 2.0**-self.eps

    def numbers(self) -> bytes:
        """Return the structure ``Floor``."""
        zero_field = 127 if self.single else 1075 - self.fraction_bits
        limits = zero_field, self.least_exponent, self.lowest, self.highest
        return struct.pack("<diI4i", self.enlarged, self.base, self.factor, *limits)


class Choice(NamedTuple):
    """Warps along the columns, halves of a warp, stages, resident blocks; k positions of a stage; DOUBLE_M."""

    columns: int
    halves: int
    stages: int
    resident: int
    places: int = _PLACES
    double_m: bool = False


_USUAL = Choice(2, 2, 3, 2), Choice(2, 1, 3, 2), Choice(2, 2, 3, 1), Choice(1, 1, 3, 1)
# Fastest first (docs/performance.md). DOUBLE_M where nothing is spilled (tests/cuda/test_gemm_methods.py), but
# not for short blocks of float16: NVRTC 13.0 compiles those wrongly.
CHOICES = {
    _SINGLE: (
        Choice(1, 1, 3, 4), Choice(1, 1, 3, 3), Choice(2, 1, 3, 2), Choice(2, 1, 3, 1), Choice(1, 1, 3, 1),
    ),
    _PROMOTED: _USUAL,
    _LONG: (Choice(2, 1, 3, 2), *_USUAL),
    _MIDDLE: (Choice(1, 1, 3, 4, 16, double_m=True), *_USUAL),
    _SHORT: _USUAL,
    _SHORT_WIDE: (Choice(2, 2, 3, 2, double_m=True), *_USUAL),
}  # fmt: skip


class Configuration(NamedTuple):
    """The specialisation of aligned_fp64_mma.cu: its macros, under their names, and what follows from them."""

    span: int
    block: int
    columns: int
    halves: int
    stages: int
    resident: int
    records: int
    promote: int
    two_words: bool
    wide: bool
    down: bool
    single: bool
    fraction: int
    acc_mantissa: int
    eight: bool
    double_m: bool

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of both operands in a tile."""
        return ROWS_A, 32 * self.columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (4 // self.halves) * self.columns

    @property
    def run(self) -> int:
        """Blocks that one thread block of pack_operand packs."""
        return max(1, 64 // self.span)

    def pitch(self, blocks: int) -> int:
        """Return the records of a panel: whole runs."""
        return -(-blocks // self.run) * self.run

    def record(self, side: int) -> int:
        """Return the bytes of a block of a panel of an operand."""
        words = -(-self.span // 32) * (2 if self.wide else 1)
        return self.rows[side] * (self.span * (4 if side or not self.two_words else 8) + self.span * 2 + words * 4)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block of threads."""
        stage = self.records * (self.record(0) + self.record(1))
        return self.stages * stage + (self.rows[0] * self.rows[1] * 4 if self.promote else 0)


class Specialisation(NamedTuple):
    """How the kernels run a product: the constants of the unit, and the configuration."""

    floor: Floor
    configuration: Configuration


class AlignedFp64Mma(FastPath):
    """Terms truncated on the fp64 tensor core: tiles of other sizes, whose rows say themselves what does not fit."""

    name, packing, dtypes = "aligned_fp64_mma", "aligned_fp64_mma_pack.cu", TYPES

    def _shape(self, job: Job) -> Specialisation | None:
        if job.gpu.capability not in DEVICES or job.dtype != torch.float32:
            return None
        floor = floor_constants(job.spec, job.order.block, job.shape[2], *(scale is not None for _, scale in job.sides))
        if floor is None:
            return None
        plan = job.spec.plan
        promotion = 1 + plan.scaled_promotion + plan.successive_scales if job.promotes else 0
        return Specialisation(floor, choose_configuration(floor, job.order.block, promotion, job.gpu))

    def _product_macros(self, job: Job, shape: Specialisation) -> Defines:
        return macros(**{name.upper(): value for name, value in shape.configuration._asdict().items()})

    def _operand_macros(self, job: Job, shape: Specialisation, side: int) -> Defines:
        (x, scale), how = job.sides[side], shape.configuration
        read = x.dtype if x.dtype in SINGLES else torch.float32
        return macros(
            TYPE=TYPES.index(read), SPAN=how.span, ROWS=how.rows[side], FIRST=not side,
            TWO_WORDS=not side and how.two_words, WIDE=how.wide, SCALED=scale is not None,
        )  # fmt: skip

    def _packing_kernels(self, shape: Specialisation) -> tuple[str, ...]:
        """Return the kernels that pack an operand; ``row_exponents`` runs first where exponents are many."""
        return ("pack_operand", "row_exponents") if shape.floor.wide else ("pack_operand",)

    def _panels(self, job: Job, shape: Specialisation) -> tuple[int, int]:
        """Return the panels of both operands: of 64 rows, and of as many columns as a configuration has."""
        rows_a, rows_b = shape.configuration.rows
        return panel_count(job.shape[0], rows_a), panel_count(job.shape[1], rows_b)

    def _pack(self, job: Job, shape: Specialisation, side: int, panels: int) -> Packing:
        """Pack the bases of rows, and records (aligned_fp64_mma_layout.cuh)."""
        (floor, how), (x, scales), blocks = shape, job.sides[side], job.order.blocks
        rows, pitch, powers = panels * how.rows[side], how.pitch(blocks), _powers(floor, side, x.device)
        bases = torch.full((rows,), _ROW_OF_ZEROS if floor.wide else 0, dtype=torch.int32, device=x.device)
        records = torch.empty(panels * pitch * how.record(side), dtype=torch.uint8, device=x.device)
        source = _operand(job, floor, side, x, scales, powers.numel()), powers, job.order.source
        return Packing((pitch // how.run, rows // 32), (*source, np.int32(blocks), np.int32(pitch)), (bases, records))

    def _shared(self, job: Job, shape: Specialisation) -> int:
        return shape.configuration.shared

    def run(self, job: Job, plan: Plan, sums: Tensor, marks: Tensor) -> None:
        """Write the sums [parts, M, N] of all tiles but those that it marks: rows have bases, panels no flags."""
        (floor, how), order, panels = plan.shape, job.order, self._panels(job, plan.shape)
        job = replace(
            job,
            a=job.a if job.a.dtype in SINGLES else job.a.float(),
            b=job.b if job.b.dtype in SINGLES else job.b.float(),
        )
        (a_bases, a), (b_bases, b) = (self._packed(job, plan, side, panels[side]) for side in (0, 1))
        # the structure Sums of aligned_fp64_mma.cu
        c = (0, 0, 0) if job.c is None else (job.c.data_ptr(), *job.c.stride())
        scales = (
            [_ones(job.a.device) if x is None else x for x in (job.scale_a, job.scale_b)] if how.promote > 1 else []
        )
        pointers = [x.data_ptr() for x in scales] or [0, 0]
        strides = [s if x.numel() > 1 else 0 for x in scales for s in x.stride()] or [0] * 4
        places = job.order.scale_places.data_ptr(), sums.data_ptr()
        fields = *c, *pointers, *strides, *places, *sums.stride(), marks.data_ptr(), *job.shape[:2]
        launch(
            job, plan.programs[0], (panels[0] * panels[1], 1, len(order.parts)), a, b, a_bases, b_bases,
            np.int32(how.pitch(order.blocks)), order.part_blocks, order.ends, floor.numbers(),
            struct.pack("<QqqQQqqqqQQqqqQii", *fields), threads=how.threads, shared=how.shared,
        )  # fmt: skip

    def _packed(self, job: Job, plan: Plan, side: int, panels: int) -> tuple[Tensor, ...]:
        """Return the bases of the rows of an operand, and its records (aligned_fp64_mma_layout.cuh)."""
        names, x = self._packing_kernels(plan.shape), job.sides[side][0]
        programs = plan.programs[1 + side * len(names) :]
        grid, source, packed = self._pack(job, plan.shape, side, panels)
        if plan.shape.floor.wide:
            rows, k = packed[0].numel(), x.shape[1]
            together = 8 if x.stride(1) == 1 else 32
            wide_grid = rows // together, -(-k * together // (_EACH * THREADS))
            launch(job, programs[1], wide_grid, source[0], np.int32(k), packed[0])
        launch(job, programs[0], grid, *source, *packed)
        return packed


@lru_cache(maxsize=1024)
def floor_constants(spec: GemmSpec, block: int, k: int, scaled_a: bool = False, scaled_b: bool = False) -> Floor | None:
    """Return the constants of the kernels for a unit, None where they do not take it."""
    # 1. units that truncate terms and sums, and formats whose numbers float32 holds
    unit, sides = spec.datapath, []
    if not isinstance(unit, Datapath) or block > LONGEST_BLOCK or unit.group != 1 or unit.signed_zero:
        return None
    if unit.term_rounding not in ("toward_zero", "down") or unit.rounding.mode != "toward_zero":
        return None
    if unit.fraction_bits is None or unit.fraction_bits >= 45:
        return None
    if unit.accumulator.min_exponent > -100 or unit.accumulator.mantissa_bits > 23:
        return None
    if spec.promotes and layout_of(spec.outer) != layout_of(FP32):
        return None
    for fmt, scaled in ((spec.a, scaled_a), (spec.b, scaled_b)):
        if not isinstance(fmt, FloatFormat) or fmt.min_subnormal < 2.0**-149 or fmt.max_exponent > 127:
            return None
        sides.append(_side(fmt, unit, scaled))
    # 2. bits of what stands for a zero or a rest (eps), and of a sum (room)
    a, b = sides
    f, acc_mantissa = unit.fraction_bits, unit.accumulator.mantissa_bits
    down = unit.term_rounding == "down"
    eps = 0 if down else max(a.bits + b.bits, f + 2, acc_mantissa + 1) + 1
    two_words = a.bits + eps > _HIGH_WORD
    eps = max(eps, 28) if two_words else eps
    head = 2 if unit.scale is None else 4
    room = f + head + math.ceil(math.log2(block + 1)) + 1
    single = room <= 22 and acc_mantissa <= 20 and block >= 8  # or fields of a float32 would not do
    place, zero_field = (23, 127) if single else (20, 1075 - f)
    depth = math.log2(max(block, 2))  # or the grid of a block of zeros would lie below what stands for a zero
    factor, offset = math.floor(2 ** (place - 7) / (depth + _SLACK)), math.floor(_HIGHEST_POWER - depth - 1.1)
    spacing = 2 ** (place - 7) / factor
    if single and spacing < _EIGHT and _fits(a, b, _EIGHT, offset):
        spacing = _EIGHT
    margin = 0.5 - (depth + 0.14) / (2 * spacing)
    if max(a.bits, b.bits) > _HIGH_WORD or a.bits + eps > 53 or 2.0**room + 2.0**33 > margin * 2.0**52:
        return None
    # the exponents of products between which sums fit the accumulator's range, truncated by its bits alone.
    fmt = unit.accumulator
    lowest = max(fmt.min_exponent - fmt.mantissa_bits + f, fmt.min_exponent)
    if unit.min_exponent is not None:
        lowest = max(lowest, unit.min_exponent)
    highest = fmt.max_exponent - 2 - head - k.bit_length()
    wide = not _fits(a, b, spacing, offset) or a.emin + b.emin < lowest or a.top + b.top > highest
    top = 0 if wide else a.top + b.top
    field = zero_field + top - (127 + offset) / spacing + 0.5 - (depth - 0.1) / (2 * spacing)
    return Floor(
        a=a, b=b, wide=wide, two_words=two_words, single=single, down=down, eps=eps, base=round(field * 2**place),
        factor=factor, fraction_bits=f, least_exponent=-math.floor((offset / 2 - _LOWEST_POWER) / spacing),
        lowest=lowest, highest=highest, acc_mantissa=acc_mantissa, spacing=spacing, offset=offset,
    )  # fmt: skip


def _side(fmt: FloatFormat, unit: Datapath, scaled: bool) -> OperandRange:
    emin, top, bits = max((unit.operand or fmt).min_exponent, -126), fmt.max_exponent, fmt.mantissa_bits + 1
    if unit.scale is None or not scaled:
        return OperandRange(emin, top, bits, 0)
    scale = unit.scale
    bits += scale.mantissa_bits + (scale.mantissa_bits > 0)
    return OperandRange(emin, top + scale.max_exponent, bits, scale.min_exponent)


def _fits(a: OperandRange, b: OperandRange, spacing: float, offset: float) -> bool:
    """Return True if bfloat16 holds the powers of all exponents of two formats, and float32 those of their products."""
    spans = a.top - a.emin, b.top - b.emin
    alone = spacing * max(spans) <= offset / 2 - _LOWEST_POWER
    return alone and spacing * sum(spans) <= offset - _LOWEST_POWER and a.scale_emin == b.scale_emin == 0


@lru_cache(maxsize=1024)
def choose_configuration(floor: Floor, block: int, promote: int, gpu: Gpu) -> Configuration:
    """Choose the fastest configuration that shared memory holds, with the kilobyte that each block takes besides."""
    span, places = -(-block // 8) * 8, -(-block // 4) * 4
    two_words, eight = floor.two_words and not floor.down, floor.spacing == _EIGHT
    for choice in CHOICES[_kind(floor.single, promote, span, floor.wide)]:
        if choice.double_m and gpu.capability != (9, 0):  # for 10.0 ptxas would spill M (aligned_fp64_mma_chains.cuh)
            continue
        how = Configuration(
            span, places, *choice[:4], max(1, choice.places // span), promote, two_words, floor.wide, floor.down,
            floor.single, floor.fraction_bits, floor.acc_mantissa, eight, choice.double_m,
        )  # fmt: skip
        if (how.shared + 1024) * how.resident <= gpu.shared + 1024:
            break
    return how


def _kind(single: bool, promote: int, span: int, wide: bool) -> int:
    """Return the key of CHOICES: float32 sums, or promotion, length of blocks and exponents."""
    if single or (promote and not (wide and span == 16)):
        return _SINGLE if single else _PROMOTED
    if span < 16:
        return _SHORT_WIDE if wide else _SHORT
    return _LONG if span > 16 else _MIDDLE


@lru_cache(maxsize=256)
def _powers(floor: Floor, side: int, device: torch.device) -> Tensor:
    """Return the bfloat16 bits of the powers of an operand, for exponents at 0, 1, ... below the largest of a row."""
    of_side = (floor.a, floor.b)[side]
    count = 1 - floor.least_exponent if floor.wide else of_side.top - of_side.emin + 1
    values = torch.tensor([2.0 ** (floor.offset / 2 - floor.spacing * i) for i in range(count)], dtype=torch.float64)
    return values.to(torch.bfloat16).view(torch.int16).to(device)


def _operand(job: Job, floor: Floor, side: int, x: Tensor, scales: Tensor | None, powers: int) -> bytes:
    """Return the structure ``Operand`` of aligned_fp64_mma_pack.cu."""
    unit, of_side = job.spec.datapath, (floor.a, floor.b)[side]
    assert isinstance(unit, Datapath)
    strides = (0, 0) if scales is None else scales.stride()
    pointers = x.data_ptr(), 0 if scales is None else scales.data_ptr()
    counts = x.shape[0], job.order.block, of_side.emin, of_side.top, unit.scale_block or 1, of_side.scale_emin
    zero, addend = 0 if floor.down else _TINY, job.c is not None and not job.promotes
    return struct.pack(
        "<QQqqqqd8iII", *pointers, *x.stride(), *strides, floor.enlarged, *counts, powers, floor.eps, zero, addend
    )


@lru_cache(maxsize=16)
def _ones(device: torch.device) -> Tensor:
    return torch.ones(1, 1, device=device)
