# SPDX-License-Identifier: Apache-2.0
"""Aligned sums in float32 alone: 8-bit operands and short fractions on GPUs without fp64 tensor cores.

``aligned_fp32_fma.cu`` has the method; here is when it is exact.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fmtsim.cuda.cast.parameters import macros
from fmtsim.cuda.gemm.job import TILE, TYPES, FastPath, Job, Packing, promotion_of
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import FloatFormat
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_TINY = -100  # exponent of what stands for zero


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the kernels are specialised by.

    Args:
        block: Places of a block.
        fraction: Fraction bits of the unit.
        acc_mantissa: Mantissa bits of the accumulator.
        emins: Lowest exponents of both operands.
        enlarged: The first operand is enlarged by ``2**-enlarged``, eps.
        step: Exponents are held as powers of ``2**step``.
        chain: Steps of 16 products whose powers are added, 0 for half a step.
        powers: What the exponents of the two operands' powers lose, so that they fit bfloat16.
    """

    block: int
    fraction: int
    acc_mantissa: int
    emins: tuple[int, int]
    enlarged: int
    step: int
    chain: int
    powers: tuple[int, int]

    @property
    def steps(self) -> int:
        """Steps of 16 products of a block."""
        return -(-self.block // 16)

    @property
    def masks(self) -> int:
        """Words of signs of a row of a block."""
        return -(-self.block // 32)

    @property
    def stage(self) -> int:
        """Bytes of both operands of one block, ``Stage`` of aligned_fp32_fma.cu."""
        return 2 * TILE * (4 * self.block + 32 * self.steps + 4 * self.masks) + 4 * TILE


class AlignedFp32Fma(FastPath):
    """Terms truncated by float32 multiply-adds."""

    name, packing, addends = "aligned_fp32_fma", "aligned_fp32_fma.cu", False

    def _shape(self, job: Job) -> _Shape | None:
        shape = shape_of(job.spec, job.order.block, job.shape[2])
        return None if shape is None or self._shared(job, shape) > job.gpu.shared else shape

    def _product_macros(self, job: Job, shape: _Shape) -> Defines:
        return macros(
            BLOCK=shape.block, FRACTION=shape.fraction, STEP=shape.step, CHAIN=shape.chain,
            OFFSET=sum(shape.emins) - 1 + 127, ACC_MANTISSA=shape.acc_mantissa, EPS=23, PROMOTE=job.promotes, STAGES=2,
            RESIDENT=2, UNROLL=8,
        )  # fmt: skip

    def _operand_macros(self, job: Job, shape: _Shape, side: int) -> Defines:
        return macros(
            BLOCK=shape.block, TYPE=TYPES.index((job.a, job.b)[side].dtype), EMIN=shape.emins[side],
            ENLARGED=0 if side else shape.enlarged, COLUMNS=side, STEP=shape.step, POWER=shape.powers[side],
        )  # fmt: skip

    def _pack(self, job: Job, shape: _Shape, side: int, panels: int) -> Packing:
        """Pack values, powers and signs in the layout of aligned_fp32_fma.cu."""
        x, order = (job.a, job.b)[side], job.order
        places = panels * order.blocks * TILE
        sizes = (shape.block, torch.float32), (shape.steps * 8, torch.int32), (shape.masks + side, torch.int32)
        packed = tuple(torch.empty(places * size, dtype=dtype, device=x.device) for size, dtype in sizes)
        source = x, *map(np.int64, x.stride()), np.int32(x.shape[0]), order.source, np.int32(order.blocks)
        return Packing((panels, order.blocks), source, packed)

    def _shared(self, job: Job, shape: _Shape) -> int:
        return 2 * shape.stage


@lru_cache(maxsize=1024)
def shape_of(spec: GemmSpec, block: int, k: int) -> _Shape | None:
    """Return the specialisation for blocks of a length, None where sums are not exact."""
    unit, a, b = spec.datapath, spec.a, spec.b
    if not isinstance(unit, Datapath) or not isinstance(a, FloatFormat) or not isinstance(b, FloatFormat):
        return None
    if not _takes(unit) or promotion_of(spec) > 1:
        return None
    assert unit.fraction_bits is not None
    fraction, acc_mantissa = unit.fraction_bits, unit.accumulator.mantissa_bits
    emins = tuple((unit.operand or fmt).min_exponent for fmt in (a, b))
    enlarged = max(a.mantissa_bits + b.mantissa_bits + 2, fraction + 2)
    if a.mantissa_bits + 1 + enlarged > 24 or acc_mantissa > 23:
        return None  # a (1 + eps) leaves float32
    if fraction + 2 + math.ceil(math.log2(block + 1)) > 22 or block > 64:
        return None  # sums leave the binade of M
    lowest, top = emins[0] + emins[1] - 1, a.max_exponent + b.max_exponent
    smallest = min(lowest - fraction, a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits)
    if smallest < _TINY + max(a.max_exponent, b.max_exponent) + 2:
        return None
    # all sums are zero or normal numbers of accumulator and float32, and below their largest: they are multiples of
    # 2**(lowest - fraction), which a block without products has as its grid
    acc = unit.accumulator
    bottom = max(acc.min_exponent, -126) + max(acc.mantissa_bits - fraction, 0)
    bounded = unit.min_exponent is not None and unit.min_exponent > lowest
    highest = min(acc.max_exponent, 127 - 24 + fraction) - 2
    if lowest - fraction < bottom or bounded or top + 2 + k.bit_length() > highest:
        return None
    # powers of two that stand for exponents: sums of as many as are added stay below the next power.
    spans = [fmt.max_exponent - emin for fmt, emin in zip((a, b), emins, strict=True)]
    step = min(8, 255 // (sum(spans) + 2))
    if step < 4 or min(spans) < 0:
        return None
    away = 127 - step
    first = min(126, max(away * spans[0] // max(sum(spans), 1), away - 126))
    if any(step * span - power > 127 for span, power in zip(spans, (first, away - first), strict=True)):
        return None
    chain = ((1 << step) - 1) // 16
    return _Shape(block, fraction, acc_mantissa, (emins[0], emins[1]), enlarged, step, chain, (first, away - first))


def _takes(unit: Datapath) -> bool:
    plain = unit.group == 1 and unit.scale is None and not unit.signed_zero and unit.fraction_bits is not None
    acc = unit.accumulator
    ieee = acc.nan == "ieee" and acc.infinities and acc.has_subnormals
    return plain and ieee and unit.term_rounding == "toward_zero" and unit.rounding.mode == "toward_zero"
