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

from fmtsim.cuda.cast.parameters import macros
from fmtsim.cuda.gemm.job import TILE, TYPES, FastPath, Job, Packing, is_plain, layout_of, promotion_of
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import FloatFormat
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec

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
        eps: Terms are enlarged by ``2**-eps`` where they are truncated.
        unit: The unit.
    """

    steps: int
    groups: int
    lsb: int
    spread: int
    room: int
    eps: int
    unit: Datapath

    @property
    def stage(self) -> int:
        """Bytes of both operands of one block, ``Stage`` of block_scaled.cu."""
        return 2 * (self.steps * TILE * 32 + TILE * 4 + 16)


class BlockScaled(FastPath):
    """Groups of products summed exactly."""

    name, packing, addends = "block_scaled", "block_scaled.cu", False

    def _shape(self, job: Job) -> _Shape | None:
        unit, order = job.spec.datapath, job.order
        if not order.contiguous or job.shape[2] > _LONGEST or not isinstance(unit, Datapath) or not _takes(job.spec):
            return None
        if order.blocks > 1 and order.block % unit.group:  # a group may have two scales
            return None
        return shape_of(job.spec, order.block, job.gpu.capability[0] not in (9, 10))  # recorded to take 16 at once

    def _product_macros(self, job: Job, shape: _Shape) -> Defines:
        return macros(
            STEPS=shape.steps, GROUPS=shape.groups, GROUP=shape.unit.group, FRACTION=shape.unit.fraction_bits or 0,
            LSB=shape.lsb, SPREAD=shape.spread, ROOM=shape.room, EPS=shape.eps, PROMOTE=job.promotes,
            STAGES=self._stages(job, shape), RESIDENT=2,
        )  # fmt: skip

    def _operand_macros(self, job: Job, shape: _Shape, side: int) -> Defines:
        unit, dtype = shape.unit, (job.a, job.b)[side].dtype
        assert unit.scale is not None
        return macros(
            STEPS=shape.steps, GROUPS=shape.groups, GROUP=unit.group, BLOCK=job.order.block, TYPE=TYPES.index(dtype),
            SCALE_BLOCK=unit.scale_block, SCALE_EMIN=unit.scale.min_exponent, COLUMNS=side,
        )  # fmt: skip

    def _pack(self, job: Job, shape: _Shape, side: int, panels: int) -> Packing:
        """Pack values times scales as fragments, exponents of scales, and bounds of these."""
        (x, scale), blocks = job.sides[side], job.order.blocks
        strides = (0, 0) if scale is None else scale.stride()
        source = (
            x, *map(np.int64, x.stride()), scale, *map(np.int64, strides), *map(np.int32, x.shape), np.int32(blocks),
        )  # fmt: skip
        sizes = (panels * blocks * size for size in (shape.steps * TILE * 8, TILE, 4))
        packed = tuple(torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)
        return Packing((panels, blocks), source, packed)

    def _stages(self, job: Job, shape: _Shape) -> int:
        """Return the blocks of operands that shared memory holds."""
        return 3 if job.gpu.shared >= 3 * shape.stage else 2

    def _shared(self, job: Job, shape: _Shape) -> int:
        return self._stages(job, shape) * shape.stage


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
def shape_of(spec: GemmSpec, block: int, halves: bool) -> _Shape | None:
    """Return the specialisation for blocks of a length, None where sums are not exact.

    ``halves`` says that a tensor core may take 16 products in two steps of 8, as before compute capability 9.0.
    """
    unit, a, b = spec.datapath, spec.a, spec.b
    assert isinstance(unit, Datapath) and unit.scale is not None and unit.fraction_bits is not None
    assert isinstance(a, FloatFormat) and isinstance(b, FloatFormat)
    groups = -(-block // unit.group)
    scale_significand = unit.scale.mantissa_bits + 1
    if max(a.mantissa_bits, b.mantissa_bits) + 1 + scale_significand > 8 or groups > 4:
        return None  # a value times its scale leaves bfloat16, or exponents of a block leave one word
    lsb = a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits - 2 * (scale_significand - 1)
    largest = 2 - 2.0 ** (1 - scale_significand)
    product = a.max * b.max * largest * largest
    head, half = (math.ceil(math.log2(count * product)) for count in (unit.group, 8))
    exponent = sum(math.floor(math.log2(fmt.max * largest)) for fmt in (a, b))
    if head - lsb > 24 or unit.fraction_bits + head + math.ceil(math.log2(groups + 1)) > 50:
        return None
    room = 23 if halves else 24
    spread = min(24 + lsb - exponent, unit.fraction_bits + lsb, room + lsb - half if halves else 255)
    eps = max(head - lsb, head + unit.fraction_bits, 25) + 1
    return _Shape(-(-block // 16), groups, lsb, spread, room, eps, unit) if eps <= 52 else None
