# SPDX-License-Identifier: Apache-2.0
"""Aligned sums on the fp64 tensor core: units that truncate terms, or round them down, and truncate sums.

aligned_fp64_mma.cu has the method. Here is which products it takes, and with which constants. Everything is decided
from the formats and the order; tiles whose numbers do not fit (NaN, Inf, sums near the ends of the accumulator's range,
and far smaller than the largest of their rows and columns) are marked for the general path.
"""

import math
import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.gemm.aligned_fp64_mma_configurations import ROWS_A, Shape, fitting
from fmtsim.engines.cuda.gemm.job import Gpu, Job, promotes
from fmtsim.engines.cuda.gemm.packed import THREADS, panels_of
from fmtsim.engines.cuda.gemm.problem import SINGLES, TYPES, layout_of, outer_format
from fmtsim.engines.cuda.runtime import Defines, Programs
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_FILE, _PACK = "aligned_fp64_mma.cu", "aligned_fp64_mma_pack.cu"
DEVICES = ((8, 0), (9, 0), (10, 0))  # with fp64 tensor cores of full width
LONGEST_BLOCK = 64
_HIGH_WORD = 21  # bits of a significand that the high word of a double holds
_EIGHT = 8.0  # a spacing by which the kernels of short sums divide without a multiplication
_LOWEST_POWER, _HIGHEST_POWER = -126, 127  # exponents of normal bfloat16
_TINY = (1023 - 300) << 20  # high word of what stands for a zero (aligned_fp64_mma_layout.cuh)
_ROW_OF_ZEROS = -(1 << 20)  # aligned_fp64_mma_layout.cuh
_EACH = 32  # numbers that a thread of row_exponents looks at
_SLACK = 0.25  # of the spacing above log2(block): M's fraction must leave room for the sum


class Side(NamedTuple):
    """An operand: smallest and largest exponent and bits of its numbers, and the powers by distance from the top."""

    emin: int
    top: int
    bits: int
    scale_emin: int


class FloorPlan(NamedTuple):
    """How the kernels run a unit on two formats; the names are those of ``Floor`` in aligned_fp64_mma.cu."""

    a: Side
    b: Side
    wide: bool
    two_words: bool
    single: bool
    down: bool
    eps: int
    base: int
    factor: int
    fraction_bits: int
    found: int
    lowest: int
    highest: int
    kept: int
    spacing: float
    offset: float

    @property
    def enlarged(self) -> float:
        """What terms are multiplied by."""
        return 1.0 if self.down else 1.0 + 2.0**-self.eps

    def numbers(self) -> bytes:
        """Return the structure ``Floor``."""
        zero_field = 127 if self.single else 1075 - self.fraction_bits
        limits = zero_field, self.found, self.lowest, self.highest
        return struct.pack("<diI4i", self.enlarged, self.base, self.factor, *limits)

    def powers(self, side: Side) -> list[int]:
        """Return the bfloat16 bits of the powers of a row, for exponents at 0, 1, ... below the largest."""
        count = 1 - self.found if self.wide else side.top - side.emin + 1
        values = torch.tensor([2.0 ** (self.offset / 2 - self.spacing * i) for i in range(count)], dtype=torch.float64)
        return values.to(torch.bfloat16).view(torch.int16).tolist()


def programs(job: Job) -> Programs | None:
    """Return the kernels that ``run`` launches, None where they do not take a product on its device."""
    if job.gpu.capability not in DEVICES or job.dtype != torch.float32:
        return None
    plan = _plan(job)
    if plan is None:
        return None
    shape, sides = _shape_of(job, plan), zip((True, False), (job.a, job.b), _scaled(job), strict=True)
    packs = [_pack_defines(shape, _readable(x.dtype), first, scaled) for first, x, scaled in sides]
    names = ("pack_operand", "row_exponents") if plan.wide else ("pack_operand",)
    return (_FILE, "aligned_fp64_mma", shape.defines), *((_PACK, name, each) for each in packs for name in names)


def _plan(job: Job) -> FloorPlan | None:
    return plan_of(job.spec, job.order.block, job.shape[2], *_scaled(job))


def _scaled(job: Job) -> tuple[bool, bool]:
    inside = isinstance(job.spec.datapath, Datapath) and job.spec.datapath.scale is not None
    return inside and job.scale_a is not None, inside and job.scale_b is not None


@lru_cache(maxsize=1024)
def plan_of(spec: GemmSpec, block: int, k: int, scaled_a: bool = False, scaled_b: bool = False) -> FloorPlan | None:
    """Return how the kernels run a unit, None where they cannot."""
    unit, sides = spec.datapath, []
    if not isinstance(unit, Datapath) or not _is_floor(unit) or block > LONGEST_BLOCK:
        return None
    if promotes(unit, spec.plan) and layout_of(outer_format(spec)) != layout_of(FP32):
        return None
    for fmt, scaled in ((spec.a, scaled_a), (spec.b, scaled_b)):
        if not isinstance(fmt, FloatFormat) or fmt.min_subnormal < 2.0**-149 or fmt.max_exponent > 127:
            return None
        sides.append(_side(fmt, unit, scaled))
    a, b = sides
    f, kept = unit.fraction_bits or 0, unit.accumulator.mantissa_bits
    down = unit.term_rounding == "down"
    eps = 0 if down else max(a.bits + b.bits, f + 2, kept + 1) + 1
    two_words = a.bits + eps > _HIGH_WORD
    eps = max(eps, 28) if two_words else eps
    head = 2 if unit.scale is None else 4
    room = f + head + math.ceil(math.log2(block + 1)) + 1
    single = room <= 22 and kept <= 20 and block >= 8  # or fields of a float32 would not do
    place, zero_field = (23, 127) if single else (20, 1075 - f)
    depth = math.log2(max(block, 2))  # or the grid of a block of zeros would lie below what stands for a zero
    factor, offset = math.floor(2 ** (place - 7) / (depth + _SLACK)), math.floor(_HIGHEST_POWER - depth - 1.1)
    spacing = 2 ** (place - 7) / factor
    if single and spacing < _EIGHT and _fits(a, b, _EIGHT, offset):
        spacing = _EIGHT
    margin = 0.5 - (depth + 0.14) / (2 * spacing)
    if max(a.bits, b.bits) > _HIGH_WORD or a.bits + eps > 53 or 2.0**room + 2.0**33 > margin * 2.0**52:
        return None
    lowest, highest = _limits(unit, head, k)
    wide = not _fits(a, b, spacing, offset) or a.emin + b.emin < lowest or a.top + b.top > highest
    top = 0 if wide else a.top + b.top
    field = zero_field + top - (127 + offset) / spacing + 0.5 - (depth - 0.1) / (2 * spacing)
    return FloorPlan(
        a=a, b=b, wide=wide, two_words=two_words, single=single, down=down, eps=eps, base=round(field * 2**place),
        factor=factor, fraction_bits=f, found=-math.floor((offset / 2 - _LOWEST_POWER) / spacing), lowest=lowest,
        highest=highest, kept=kept, spacing=spacing, offset=offset,
    )  # fmt: skip


def _is_floor(unit: Datapath) -> bool:
    cut = unit.term_rounding in ("toward_zero", "down") and unit.rounding.mode == "toward_zero"
    plain = unit.group == 1 and not unit.signed_zero and unit.fraction_bits is not None and unit.fraction_bits < 45
    return cut and plain and unit.accumulator.min_exponent <= -100 and unit.accumulator.mantissa_bits <= 23


def _side(fmt: FloatFormat, unit: Datapath, scaled: bool) -> Side:
    emin, top, bits = max((unit.operand or fmt).min_exponent, -126), fmt.max_exponent, fmt.mantissa_bits + 1
    if unit.scale is None or not scaled:
        return Side(emin, top, bits, 0)
    scale = unit.scale
    bits += scale.mantissa_bits + (scale.mantissa_bits > 0)
    return Side(emin, top + scale.max_exponent, bits, scale.min_exponent)


def _limits(unit: Datapath, head: int, k: int) -> tuple[int, int]:
    """Return between which exponents of products every sum is in the accumulator's range and cut by its bits alone."""
    fmt = unit.accumulator
    lowest = max(fmt.min_exponent - fmt.mantissa_bits + (unit.fraction_bits or 0), fmt.min_exponent)
    if unit.min_exponent is not None:
        lowest = max(lowest, unit.min_exponent)
    return lowest, fmt.max_exponent - 2 - head - k.bit_length()


def _fits(a: Side, b: Side, spacing: float, offset: float) -> bool:
    """Say whether bfloat16 holds the powers of all exponents of two formats, and float32 those of their products."""
    spans = a.top - a.emin, b.top - b.emin
    alone = spacing * max(spans) <= offset / 2 - _LOWEST_POWER
    return alone and spacing * sum(spans) <= offset - _LOWEST_POWER and a.scale_emin == b.scale_emin == 0


def run(job: Job, sums: Tensor, marks: Tensor) -> None:
    """Write the sums of all parts, float32 [parts, M, N], for every tile of 128 x 128 that stays unmarked.

    ``marks`` uint8 [ceil(M / 128), ceil(N / 128)] becomes 1 where a tile is left to another path.
    """
    (m, n, _), order, plan = job.shape, job.order, _plan(job)
    assert plan is not None
    shape = _shape_of(job, plan)
    pitch = -(-order.blocks // shape.run) * shape.run
    (a, a_bases), (b, b_bases) = (_packed(job, plan, shape, pitch, first) for first in (True, False))
    kernel = runtime.kernel(_FILE, "aligned_fp64_mma", runtime.device_index(job.a), shape.defines)
    kernel(
        (panels_of(m, ROWS_A) * panels_of(n, shape.rows_b), 1, len(order.parts)), shape.threads, a, b, a_bases, b_bases,
        np.int32(pitch), order.part_blocks, order.ends, plan.numbers(), _sums(job, sums, marks, shape.promote),
        shared=shape.shared,
    )  # fmt: skip


def _shape_of(job: Job, plan: FloorPlan) -> Shape:
    return _shape(plan, job.order.block, _promotion(job), job.gpu)


@lru_cache(maxsize=1024)
def _shape(plan: FloorPlan, block: int, promote: int, gpu: Gpu) -> Shape:
    flags = plan.two_words and not plan.down, plan.wide, plan.down, plan.single
    facts = promote, *flags, plan.fraction_bits, plan.kept, plan.spacing == _EIGHT
    holds = gpu.capability == (9, 0)  # for 10.0 ptxas would spill M (aligned_fp64_mma_chains.cuh)
    return fitting(-(-block // 8) * 8, -(-block // 4) * 4, *facts, limit=gpu.shared, holds=holds)


def _promotion(job: Job) -> int:
    if not job.promotes:
        return 0
    return 1 + job.spec.plan.scaled_promotion + job.spec.plan.successive_scales


def _readable(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in SINGLES else torch.float32


def _pack_defines(shape: Shape, dtype: torch.dtype, first: bool, scaled: bool) -> Defines:
    """Return the macros of aligned_fp64_mma_pack.cu for an operand."""
    named = {"TYPE": TYPES.index(dtype), "SPAN": shape.span, "ROWS": ROWS_A if first else shape.rows_b}
    named |= {"FIRST": first, "TWO_WORDS": first and shape.two_words, "WIDE": shape.wide, "SCALED": scaled}
    return tuple((name, str(int(value))) for name, value in named.items())


def _packed(job: Job, plan: FloorPlan, shape: Shape, pitch: int, first: bool) -> tuple[Tensor, Tensor]:
    """Return an operand's records and the bases of its rows (aligned_fp64_mma_layout.cuh)."""
    side, x, scales = (plan.a, job.a, job.scale_a) if first else (plan.b, job.b, job.scale_b)
    x, scaled = x.to(_readable(x.dtype)), _scaled(job)[not first]
    defines, index = _pack_defines(shape, x.dtype, first, scaled), runtime.device_index(x)
    rows = ROWS_A if first else shape.rows_b
    panels = panels_of(x.shape[0], rows)
    records = torch.empty(panels * pitch * shape.record(rows, first), dtype=torch.uint8, device=x.device)
    bases = torch.full((panels * rows,), _ROW_OF_ZEROS if plan.wide else 0, dtype=torch.int32, device=x.device)
    powers = _table(plan, side, x.device)
    operand = _operand(job, plan, side, x, scales if scaled else None, powers.numel())
    if plan.wide:
        together = 8 if x.stride(1) == 1 else 32
        grid = panels * rows // together, -(-x.shape[1] * together // (_EACH * THREADS))
        runtime.kernel(_PACK, "row_exponents", index, defines)(grid, THREADS, operand, np.int32(x.shape[1]), bases)
    runtime.kernel(_PACK, "pack_operand", index, defines)(
        (pitch // shape.run, panels * rows // 32), THREADS, operand, powers, job.order.source,
        np.int32(job.order.blocks), np.int32(pitch), bases, records,
    )  # fmt: skip
    return records, bases


@lru_cache(maxsize=256)
def _table(plan: FloorPlan, side: Side, device: torch.device) -> Tensor:
    return torch.tensor(plan.powers(side), dtype=torch.int16, device=device)


def _operand(job: Job, plan: FloorPlan, side: Side, x: Tensor, scales: Tensor | None, powers: int) -> bytes:
    """Return the structure ``Operand`` of aligned_fp64_mma_pack.cu."""
    unit = job.spec.datapath
    assert isinstance(unit, Datapath)
    strides = (0, 0) if scales is None else scales.stride()
    pointers = x.data_ptr(), 0 if scales is None else scales.data_ptr()
    counts = x.shape[0], job.order.block, side.emin, side.top, unit.scale_block or 1, side.scale_emin, powers, plan.eps
    zero, addend = 0 if plan.down else _TINY, job.c is not None and not job.promotes
    return struct.pack("<QQqqqqd8iII", *pointers, *x.stride(), *strides, plan.enlarged, *counts, zero, addend)


def _sums(job: Job, sums: Tensor, marks: Tensor, promote: int) -> bytes:
    """Return the structure ``Sums`` of aligned_fp64_mma.cu."""
    c = (0, 0, 0) if job.c is None else (job.c.data_ptr(), *job.c.stride())
    scales = [_ones(job.a.device) if x is None else x for x in (job.scale_a, job.scale_b)] if promote > 1 else []
    pointers = [x.data_ptr() for x in scales] or [0, 0]
    strides = [s if x.numel() > 1 else 0 for x in scales for s in x.stride()] or [0] * 4
    places = job.order.scale_places.data_ptr(), sums.data_ptr()
    fields = *c, *pointers, *strides, *places, *sums.stride(), marks.data_ptr(), *job.shape[:2]
    return struct.pack("<QqqQQqqqqQQqqqQii", *fields)


@lru_cache(maxsize=16)
def _ones(device: torch.device) -> Tensor:
    return torch.ones(1, 1, device=device)
