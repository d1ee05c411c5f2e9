# SPDX-License-Identifier: Apache-2.0
"""Aligned sums in float32 alone: 8-bit operands and short fractions on GPUs without fp64 tensor cores.

``aligned_fp32_fma.cu`` has the method; here is when it is exact.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda.gemm.job import TILE, Job
from fmtsim.engines.cuda.gemm.packed import Side, launch, pack, panels_of
from fmtsim.engines.cuda.gemm.problem import SINGLES, TYPES, macros, promotion_of
from fmtsim.engines.cuda.runtime import Defines, Programs
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_FILE = "aligned_fp32_fma.cu"
_RESIDENT = 2  # blocks of threads on a multiprocessor
_UNROLL = 8  # places of a loop
_TINY = -100  # exponent of what stands for zero


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the kernels are specialised by.

    Args:
        block: Places of a block.
        fraction: Fraction bits of the unit.
        kept: Mantissa bits of the accumulator.
        emins: Lowest exponents of both operands.
        enlarged: The first operand is enlarged by ``2**-enlarged``, eps.
        step: Exponents are held as powers of ``2**step``.
        chain: Steps of 16 products whose powers are added, 0 for half a step.
        powers: What the exponents of the two operands' powers lose, so that they fit bfloat16.
    """

    block: int
    fraction: int
    kept: int
    emins: tuple[int, int]
    enlarged: int
    step: int
    chain: int
    powers: tuple[int, int]


def programs(job: Job) -> Programs | None:
    """Return the kernels that ``run`` launches, None where they do not take a product."""
    if job.c is not None or job.a.dtype not in SINGLES or job.b.dtype not in SINGLES:
        return None
    shape = _shape(job.spec, job.order.block, job.shape[2])
    if shape is None or 2 * _stage_bytes(shape.block) > job.gpu.shared:
        return None
    sides = (_operand_defines(shape, side, x.dtype) for side, x in enumerate((job.a, job.b)))
    product = _product_defines(shape, job.promotes)
    return (_FILE, "aligned_fp32_fma", product), *((_FILE, "pack_operand", defines) for defines in sides)


@lru_cache(maxsize=1024)
def _shape(spec: GemmSpec, block: int, k: int) -> _Shape | None:
    """Return how the kernels run blocks of a length, None where they are not exact."""
    unit, a, b = spec.datapath, spec.a, spec.b
    if not isinstance(unit, Datapath) or not isinstance(a, FloatFormat) or not isinstance(b, FloatFormat):
        return None
    if not _takes(unit) or promotion_of(spec) > 1:
        return None
    assert unit.fraction_bits is not None
    fraction, kept = unit.fraction_bits, unit.accumulator.mantissa_bits
    emins = tuple((unit.operand or fmt).min_exponent for fmt in (a, b))
    enlarged = max(a.mantissa_bits + b.mantissa_bits + 2, fraction + 2)
    if a.mantissa_bits + 1 + enlarged > 24 or kept > 23:
        return None  # a (1 + eps) leaves float32
    if fraction + 2 + math.ceil(math.log2(block + 1)) > 22 or block > 64:
        return None  # sums leave the binade of M
    lowest, top = emins[0] + emins[1] - 1, a.max_exponent + b.max_exponent
    smallest = min(lowest - fraction, a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits)
    if not _stays_normal(unit, lowest, top, k) or smallest < _TINY + max(a.max_exponent, b.max_exponent) + 2:
        return None
    return _powers(block, fraction, kept, (emins[0], emins[1]), enlarged, (a, b))


def _takes(unit: Datapath) -> bool:
    plain = unit.group == 1 and unit.scale is None and not unit.signed_zero and unit.fraction_bits is not None
    acc = unit.accumulator
    ieee = acc.nan == "ieee" and acc.infinities and acc.has_subnormals
    return plain and ieee and unit.term_rounding == "toward_zero" and unit.rounding.mode == "toward_zero"


def _stays_normal(unit: Datapath, lowest: int, top: int, k: int) -> bool:
    """Say whether all sums are zero or normal numbers of accumulator and float32, and below their largest.

    Sums are multiples of ``2**(lowest - fraction_bits)``, which a block without products has as its grid.
    """
    acc = unit.accumulator
    assert unit.fraction_bits is not None
    bottom = max(acc.min_exponent, -126) + max(acc.mantissa_bits - unit.fraction_bits, 0)
    bounded = unit.min_exponent is not None and unit.min_exponent > lowest
    highest = min(acc.max_exponent, 127 - 24 + unit.fraction_bits) - 2
    return lowest - unit.fraction_bits >= bottom and not bounded and top + 2 + k.bit_length() <= highest


def _powers(
    block: int,
    fraction: int,
    kept: int,
    emins: tuple[int, int],
    enlarged: int,
    formats: tuple[FloatFormat, FloatFormat],
) -> _Shape | None:
    """Choose powers of two that stand for exponents: sums of as many as are added stay below the next power."""
    spans = [fmt.max_exponent - emin for fmt, emin in zip(formats, emins, strict=True)]
    step = min(8, 255 // (sum(spans) + 2))
    if step < 4 or min(spans) < 0:
        return None
    away = 127 - step
    first = min(126, max(away * spans[0] // max(sum(spans), 1), away - 126))
    if any(step * span - power > 127 for span, power in zip(spans, (first, away - first), strict=True)):
        return None
    chain = ((1 << step) - 1) // 16
    return _Shape(block, fraction, kept, emins, enlarged, step, chain, (first, away - first))


def run(job: Job, sums: Tensor, marks: Tensor) -> None:
    """Write the sums [parts, M, N] of all tiles but those with NaN or Inf among their operands, which it marks."""
    found, (m, n, _), order = programs(job), job.shape, job.order
    assert found is not None
    panels = panels_of(m), panels_of(n)
    made = pack(job, found, panels, lambda side: _side(job, side))
    launch(
        job, found[0], (panels[0] * panels[1], 1, len(order.parts)), *made, order.ends, order.part_blocks,
        np.int32(order.blocks), sums, marks, np.int32(m), np.int32(n), shared=2 * _stage_bytes(order.block),
    )  # fmt: skip


def _side(job: Job, side: int) -> Side:
    """Return how an operand is packed: values, powers and signs in the layout of aligned_fp32_fma.cu."""
    x, order = (job.a, job.b)[side], job.order
    panels, (steps, masks) = panels_of(x.shape[0]), _steps(order.block)
    places = panels * order.blocks * TILE
    sizes = (order.block, torch.float32), (steps * 8, torch.int32), (masks + side, torch.int32)
    made = tuple(torch.empty(places * size, dtype=dtype, device=x.device) for size, dtype in sizes)
    source = x, *map(np.int64, x.stride()), np.int32(x.shape[0]), order.source, np.int32(order.blocks)
    return Side((panels, order.blocks), source, made)


def _steps(block: int) -> tuple[int, int]:
    return -(-block // 16), -(-block // 32)


def _stage_bytes(block: int) -> int:
    """Return the bytes of both operands of one block, ``Stage`` of aligned_fp32_fma.cu."""
    steps, masks = _steps(block)
    return 2 * TILE * (4 * block + 32 * steps + 4 * masks) + 4 * TILE


def _operand_defines(shape: _Shape, side: int, dtype: torch.dtype) -> Defines:
    return macros(
        BLOCK=shape.block, TYPE=TYPES.index(dtype), EMIN=shape.emins[side], ENLARGED=0 if side else shape.enlarged,
        COLUMNS=side, STEP=shape.step, POWER=shape.powers[side],
    )  # fmt: skip


def _product_defines(shape: _Shape, promotes: bool) -> Defines:
    offset = sum(shape.emins) - 1 + 127
    return macros(
        BLOCK=shape.block, FRACTION=shape.fraction, STEP=shape.step, CHAIN=shape.chain, OFFSET=offset,
        KEPT=shape.kept, EPS=23, PROMOTE=int(promotes), STAGES=2, RESIDENT=_RESIDENT,
        UNROLL=_UNROLL,
    )  # fmt: skip
