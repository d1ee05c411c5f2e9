"""Units with block scales that add groups of products exactly before the alignment: Blackwell's 4-bit formats.

Sums of groups come from the bf16 tensor core, which any card has; ``block_scaled.cu`` says when a block is one
addition, and what happens otherwise.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.problem import SINGLES, TYPES, is_plain, layout_of, macros, promotion_of
from fmtsim.cuda.runtime import Defines, Programs
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

_THREADS = 256
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


def supports(job: Job) -> bool:
    """Say whether the kernels take a product, from facts of the host alone."""
    places = job.a.dtype in SINGLES and job.b.dtype in SINGLES and job.order.contiguous
    if job.c is not None or not places or job.shape[2] > _LONGEST:
        return False
    if not job.out.numel() or not _takes(job.spec):
        return False
    unit = job.spec.datapath
    assert isinstance(unit, Datapath)
    whole = job.order.blocks == 1 or job.order.block % unit.group == 0  # else a group may have two scales
    return whole and _shape(job.spec, job.order.block, False) is not None


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
    index, (m, n, _) = runtime.device_index(job.a), job.shape
    shape, stages = _specialised(job)
    panels = -(-m // TILE), -(-n // TILE)
    flags = torch.zeros(sum(panels), dtype=torch.int32, device=job.a.device)
    left = _prepared(job.a, job.scale_a, 0, job, shape, flags[: panels[0]])
    right = _prepared(job.b, job.scale_b, 1, job, shape, flags[panels[0] :])
    defines = _product_defines(shape, job.spec, job.promotes, stages)
    runtime.kernel("block_scaled.cu", "block_scaled", index, defines)(
        (panels[0] * panels[1], 1, len(job.order.parts)), _THREADS, *left, *right, flags, job.order.ends,
        job.order.part_blocks, np.int32(job.order.blocks), sums, marks, np.int32(m), np.int32(n),
        shared=stages * _stage_bytes(shape),
    )  # fmt: skip


def programs(job: Job) -> Programs:
    """Return the files of kernels that ``run`` launches, with their macros."""
    shape, stages = _specialised(job)
    product = "block_scaled.cu", _product_defines(shape, job.spec, job.promotes, stages)
    sides = enumerate((job.a, job.b))
    defines = (_operand_defines(shape, job.spec, job.order.block, side, x.dtype) for side, x in sides)
    return product, *(("block_scaled.cu", each) for each in defines)


def _specialised(job: Job) -> tuple[_Shape, int]:
    """Return how kernels run a product, and how many blocks of operands shared memory holds."""
    index = runtime.device_index(job.a)
    halves = runtime.capability(index)[0] not in (9, 10)  # recorded for these to take 16 products at once
    shape = _shape(job.spec, job.order.block, halves)
    assert shape is not None
    return shape, 3 if runtime.shared_limit(index) >= 3 * _stage_bytes(shape) else 2


def _prepared(
    x: Tensor, scale: Tensor | None, side: int, job: Job, shape: _Shape, flags: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an operand's values times scales as fragments, exponents of scales and bounds (block_scaled.cu)."""
    rows, k = x.shape
    panels, blocks = -(-rows // TILE), job.order.blocks
    index = runtime.device_index(x)
    values = torch.empty(panels * blocks * shape.steps * TILE * 8, dtype=torch.int32, device=x.device)
    exponents = torch.empty(panels * blocks * TILE, dtype=torch.int32, device=x.device)
    bounds = torch.empty(panels * blocks * 4, dtype=torch.int32, device=x.device)
    strides = (0, 0) if scale is None else scale.stride()
    defines = _operand_defines(shape, job.spec, job.order.block, side, x.dtype)
    runtime.kernel("block_scaled.cu", "pack_operand", index, defines)(
        (panels, blocks), _THREADS, x, *map(np.int64, x.stride()), scale, *map(np.int64, strides),
        np.int32(rows), np.int32(k), np.int32(blocks), values, exponents, bounds, flags,
    )  # fmt: skip
    return values, exponents, bounds


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


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield a representative of every specialisation of the kernels."""
    element = _format("e2m1")
    for scale, every in (("ue4m3", 16), ("e8m0", 16), ("e8m0", 32)):
        unit = Datapath(block=64, fraction_bits=35, group=16, scale=_format(scale), scale_block=every)
        spec = GemmSpec(datapath=unit, plan=GemmPlan(), a=element, b=element)
        for block, halves in ((64, False), (64, True), (40, False)):
            shape = _shape(spec, block, halves)
            assert shape is not None
            for flag in (0, 1):
                yield "block_scaled.cu", "block_scaled", _product_defines(shape, spec, bool(flag), 2 if halves else 3)
                for dtype in SINGLES:
                    yield "block_scaled.cu", "pack_operand", _operand_defines(shape, spec, block, flag, dtype)


def _format(name: str) -> FloatFormat:
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt
