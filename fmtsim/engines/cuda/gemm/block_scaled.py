# SPDX-License-Identifier: Apache-2.0
"""Units with block scales that add groups of products exactly before the alignment: Blackwell's 4-bit formats.

Sums of groups come from the bf16 tensor core, which any GPU has; ``block_scaled.cu`` says when a block is one
addition, and what happens otherwise.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda.gemm.job import TILE, Job
from fmtsim.engines.cuda.gemm.packed import Side, launch, pack, panels_of
from fmtsim.engines.cuda.gemm.problem import SINGLES, TYPES, is_plain, layout_of, macros, promotion_of
from fmtsim.engines.cuda.runtime import Defines, Programs
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_FILE = "block_scaled.cu"
_RESIDENT = 2  # blocks of threads on a multiprocessor
_LONGEST = 1 << 19  # products: scales reach 2^50, so longer sums might overflow


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the kernels are specialised by.

    Args:
        steps: Steps of 16 products in a block.
        groups: Groups in a block.
        lsb: Terms are multiples of ``2**(x + lsb)``, x the sum of their scales' exponents.
        spread: Sums of scale exponents in a block may be that far apart for the one addition.
        room: Sums of the tensor core stay below ``2**(x + lsb + room)`` for it.
        eps: Terms are enlarged by ``2**-eps`` where they are cut.
    """

    steps: int
    groups: int
    lsb: int
    spread: int
    room: int
    eps: int


def programs(job: Job) -> Programs | None:
    """Return the kernels that ``run`` launches, None where they do not take a product."""
    places = job.a.dtype in SINGLES and job.b.dtype in SINGLES and job.order.contiguous
    if job.c is not None or not places or job.shape[2] > _LONGEST or not _takes(job.spec):
        return None
    unit = job.spec.datapath
    assert isinstance(unit, Datapath)
    if job.order.blocks > 1 and job.order.block % unit.group:  # a group may have two scales
        return None
    shape = _specialised(job)
    if shape is None:
        return None
    product = _product_defines(shape, job.spec, job.promotes, _stages(job, shape))
    sides = (_operand_defines(shape, job.spec, job.order.block, side, x.dtype) for side, x in enumerate((job.a, job.b)))
    return (_FILE, "block_scaled", product), *((_FILE, "pack_operand", defines) for defines in sides)


@lru_cache(maxsize=256)
def _takes(spec: GemmSpec) -> bool:
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.group not in (16, 32) or unit.scale is None:
        return False
    if unit.term_rounding != "toward_zero" or unit.rounding.mode != "toward_zero" or unit.signed_zero or unit.paired:
        return False
    if unit.min_exponent is not None or unit.operand is not None or unit.fraction_bits is None:
        return False
    if layout_of(unit.accumulator) != layout_of(FP32) or not is_plain(unit.accumulator) or promotion_of(spec) > 1:
        return False
    return all(isinstance(fmt, FloatFormat) and fmt.nan == "none" and not fmt.infinities for fmt in (spec.a, spec.b))


@lru_cache(maxsize=256)
def _shape(spec: GemmSpec, block: int, halves: bool) -> _Shape | None:
    """Return how kernels run blocks of a length, None where their sums are not exact.

    ``halves`` says that a tensor core may take 16 products in two steps of 8, as before compute capability 9.0.
    """
    unit, a, b = spec.datapath, spec.a, spec.b
    assert isinstance(unit, Datapath) and unit.scale is not None and unit.fraction_bits is not None
    assert isinstance(a, FloatFormat) and isinstance(b, FloatFormat)
    groups = -(-block // unit.group)
    own = unit.scale.mantissa_bits + 1
    if max(a.mantissa_bits, b.mantissa_bits) + 1 + own > 8 or groups > 4:
        return None  # a value times its scale leaves bfloat16, or exponents of a block leave one word
    lsb = a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits - 2 * (own - 1)
    largest = 2 - 2.0 ** (1 - own)
    product = a.max * b.max * largest * largest
    head, half = (math.ceil(math.log2(count * product)) for count in (unit.group, 8))
    exponent = sum(math.floor(math.log2(fmt.max * largest)) for fmt in (a, b))
    if head - lsb > 24 or unit.fraction_bits + head + math.ceil(math.log2(groups + 1)) > 50:
        return None
    room = 23 if halves else 24
    spread = min(24 + lsb - exponent, unit.fraction_bits + lsb, room + lsb - half if halves else 255)
    eps = max(head - lsb, head + unit.fraction_bits, 25) + 1
    return _Shape(-(-block // 16), groups, lsb, spread, room, eps) if eps <= 52 else None


def run(job: Job, sums: Tensor, marks: Tensor) -> None:
    """Write the sums [parts, M, N]; tiles with a scale that is NaN, Inf or far from 1 are marked instead."""
    found, shape, order = programs(job), _specialised(job), job.order
    assert found is not None and shape is not None
    m, n, _ = job.shape
    panels = panels_of(m), panels_of(n)
    made = pack(job, found, panels, lambda side: _side(job, shape, side))
    launch(
        job, found[0], (panels[0] * panels[1], 1, len(order.parts)), *made, order.ends, order.part_blocks,
        np.int32(order.blocks), sums, marks, np.int32(m), np.int32(n),
        shared=_stages(job, shape) * _stage_bytes(shape),
    )  # fmt: skip


def _specialised(job: Job) -> _Shape | None:
    return _shape(job.spec, job.order.block, job.gpu.capability[0] not in (9, 10))  # recorded to take 16 at once


def _stages(job: Job, shape: _Shape) -> int:
    """Return how many blocks of operands shared memory holds."""
    return 3 if job.gpu.shared >= 3 * _stage_bytes(shape) else 2


def _side(job: Job, shape: _Shape, side: int) -> Side:
    """Return how an operand is packed: values times scales as fragments, exponents of scales and bounds."""
    x, scale = (job.a, job.scale_a) if side == 0 else (job.b, job.scale_b)
    (rows, k), blocks = x.shape, job.order.blocks
    panels, strides = panels_of(rows), (0, 0) if scale is None else scale.stride()
    sizes = (panels * blocks * size for size in (shape.steps * TILE * 8, TILE, 4))
    source = (
        x, *map(np.int64, x.stride()), scale, *map(np.int64, strides), np.int32(rows), np.int32(k), np.int32(blocks),
    )  # fmt: skip
    made = tuple(torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)
    return Side((panels, blocks), source, made)


def _stage_bytes(shape: _Shape) -> int:
    """Return the bytes of both operands of one block, ``Stage`` of block_scaled.cu."""
    return 2 * (shape.steps * TILE * 32 + TILE * 4 + 16)


def _operand_defines(shape: _Shape, spec: GemmSpec, block: int, side: int, dtype: torch.dtype) -> Defines:
    unit = spec.datapath
    assert isinstance(unit, Datapath) and unit.scale is not None
    return macros(
        STEPS=shape.steps, GROUPS=shape.groups, GROUP=unit.group, BLOCK=block, TYPE=TYPES.index(dtype),
        SCALE_BLOCK=unit.scale_block, SCALE_EMIN=unit.scale.min_exponent, COLUMNS=side,
    )  # fmt: skip


def _product_defines(shape: _Shape, spec: GemmSpec, promotes: bool, stages: int) -> Defines:
    unit = spec.datapath
    assert isinstance(unit, Datapath) and unit.fraction_bits is not None
    return macros(
        STEPS=shape.steps, GROUPS=shape.groups, GROUP=unit.group, FRACTION=unit.fraction_bits, LSB=shape.lsb,
        SPREAD=shape.spread, ROOM=shape.room, EPS=shape.eps, PROMOTE=int(promotes), STAGES=stages, RESIDENT=_RESIDENT,
    )  # fmt: skip
