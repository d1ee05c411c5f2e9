"""Products of fused units in pairs of float32 sums: 16-bit inputs and TF32 on cards without fp64 tensor cores.

``single_pairs.cu`` has the method; here is when it is exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.unit import SINGLES, TYPES, macros, outer_format
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Defines, Programs
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import FP32, Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

_THREADS = 512
# Exponents of operands beyond these leave a panel to the general path: u and the constants stay normal numbers.
_LOWEST, _HIGHEST = -50, 40
_LONGEST = 1 << 20  # products


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the kernels are specialised by.

    Args:
        block: Places of a block.
        fraction: Fraction bits of the unit.
        head: The high sums lie on a constant of exponent E + head.
        kept: Mantissa bits of the accumulator.
        emins: Lowest exponents of both operands.
    """

    block: int
    fraction: int
    head: int
    kept: int
    emins: tuple[int, int]


def supports(job: Job) -> bool:
    """Say whether the kernels take a product, from facts of the host alone."""
    if job.c is not None or job.a.dtype not in SINGLES or job.b.dtype not in SINGLES or not job.out.numel():
        return False
    shape = _shape(job.spec, job.order.block)
    if shape is None or job.shape[2] > _LONGEST:
        return False
    return 2 * _stage_bytes(shape.block) <= runtime.shared_limit(runtime.device_index(job.a))


@lru_cache(maxsize=256)
def _shape(spec: GemmSpec, block: int) -> _Shape | None:
    """Return how the kernels run blocks of a length, None where they are not exact."""
    unit, a, b = spec.datapath, spec.a, spec.b
    if not isinstance(unit, Datapath) or not isinstance(a, FloatFormat) or not isinstance(b, FloatFormat):
        return None
    if not _takes(unit) or spec.plan.scaled_promotion or block > 32:
        return None
    acc, outer = unit.accumulator, outer_format(spec)
    if not all(_is_ieee(fmt) and fmt.exponent_bits == FP32.exponent_bits for fmt in (acc, outer)):
        return None
    promotes = spec.plan.promote_every is not None or unit.promote_every is not None
    if acc.mantissa_bits > 23 or (promotes and outer.mantissa_bits != 23):
        return None
    fraction = unit.fraction_bits
    assert fraction is not None
    head = math.ceil(math.log2(4 * (block + 1))) + 1
    # The rest r needs as many bits as a product; eps = 2^-30 is below 2^-bits of a product and 2^-(fraction + 2); low
    # sums, block + 1 rests of at most g / 2, stay in their binade; the grid of the high sums is not the finer one.
    if a.mantissa_bits + b.mantissa_bits + 2 > 24 or not 23 - head <= fraction <= 27:
        return None
    if (block + 1) * (2.0 ** (head + fraction - 24) + 1) >= 2**22:
        return None
    emins = tuple((unit.operand or fmt).min_exponent for fmt in (a, b))
    return _Shape(block, fraction, head, acc.mantissa_bits, (emins[0], emins[1]))


def _takes(unit: Datapath) -> bool:
    plain = unit.group == 1 and unit.scale is None and not unit.signed_zero and unit.fraction_bits is not None
    bounded = unit.min_exponent is not None and unit.min_exponent > 2 * _LOWEST
    zero = unit.term_rounding == "toward_zero" and unit.rounding.mode == "toward_zero"
    return plain and not bounded and zero


def _is_ieee(fmt: FloatFormat) -> bool:
    same = fmt.exponent_bias == 2 ** (fmt.exponent_bits - 1) - 1
    return same and fmt.nan == "ieee" and fmt.infinities and fmt.has_subnormals


def run(job: Job, sums: Tensor, marks: Tensor) -> None:
    """Write the sums [parts, M, N]; tiles with numbers that are NaN, Inf or far from 1 are marked instead."""
    index = runtime.device_index(job.a)
    m, n, _ = job.shape
    shape = _shape(job.spec, job.order.block)
    assert shape is not None
    panels = -(-m // TILE), -(-n // TILE)
    flags = torch.zeros(sum(panels), dtype=torch.int32, device=job.a.device)
    left = _prepared(job.a, 0, job, shape, flags[: panels[0]])
    right = _prepared(job.b, 1, job, shape, flags[panels[0] :])
    runtime.kernel("single_pairs.cu", "single_pairs", index, _product_defines(shape, job.promotes))(
        (panels[0] * panels[1], 1, len(job.order.parts)), _THREADS, *left, *right, flags, job.order.ends,
        job.order.part_blocks, np.int32(job.order.blocks), sums, marks, np.int32(m), np.int32(n),
        shared=2 * _stage_bytes(shape.block),
    )  # fmt: skip


def programs(job: Job) -> Programs:
    """Return the files of kernels that ``run`` launches, with their macros."""
    shape = _shape(job.spec, job.order.block)
    assert shape is not None
    product = "single_pairs.cu", _product_defines(shape, job.promotes)
    sides = (_operand_defines(shape, side, x.dtype) for side, x in enumerate((job.a, job.b)))
    return product, *(("single_pairs_prepare.cu", each) for each in sides)


def _prepared(x: Tensor, side: int, job: Job, shape: _Shape, flags: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return an operand's values, exponents and signs, place by place."""
    rows, device = x.shape[0], x.device
    places = -(-rows // TILE) * job.order.blocks
    values = torch.empty(places * shape.block * TILE, dtype=torch.float32, device=device)
    exponents = torch.empty(places * shape.block * TILE, dtype=torch.int32, device=device)
    signs = torch.empty(places * 2 * TILE, dtype=torch.int32, device=device)
    defines = _operand_defines(shape, side, x.dtype)
    runtime.kernel("single_pairs_prepare.cu", "single_pairs_prepare", runtime.device_index(x), defines)(
        (places // job.order.blocks, job.order.blocks), 2 * TILE, x, *map(np.int64, x.stride()), np.int32(rows),
        job.order.source, np.int32(job.order.blocks), values, exponents, signs, flags,
    )  # fmt: skip
    return values, exponents, signs


def _stage_bytes(block: int) -> int:
    """Return the bytes of both operands of one block, ``Stage`` of single_pairs.cu."""
    return 2 * TILE * (8 * block + 8)


def _operand_defines(shape: _Shape, side: int, dtype: torch.dtype) -> Defines:
    return macros(
        BLOCK=shape.block, TYPE=TYPES.index(dtype), EMIN=shape.emins[side], LOWEST=_LOWEST, HIGHEST=_HIGHEST,
        COLUMNS=side,
    )  # fmt: skip


def _product_defines(shape: _Shape, promotes: bool) -> Defines:
    return macros(
        BLOCK=shape.block, FRACTION=shape.fraction, HEAD=shape.head, KEPT=shape.kept, LOWEST=_LOWEST,
        PROMOTE=int(promotes),
    )  # fmt: skip


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield a representative of every specialisation of the kernels."""
    for block, fraction in ((16, 25), (8, 24), (4, 24), (32, 25)):
        unit = Datapath(block=block, fraction_bits=fraction)
        for name, dtypes in (("bf16", (torch.bfloat16, torch.float32)), ("fp16", (torch.float16,))):
            fmt = get_format(name)
            assert isinstance(fmt, FloatFormat)
            shape = _shape(GemmSpec(datapath=unit, plan=GemmPlan(), a=fmt, b=fmt), block)
            assert shape is not None
            for promotes in (False, True):
                yield "single_pairs.cu", "single_pairs", _product_defines(shape, promotes)
            for dtype in dtypes:
                for side in (0, 1):
                    yield "single_pairs_prepare.cu", "single_pairs_prepare", _operand_defines(shape, side, dtype)
