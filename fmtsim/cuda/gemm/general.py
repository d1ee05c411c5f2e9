# SPDX-License-Identifier: Apache-2.0
"""The general path of matrix products: every unit and number, on all tiles or on those that a fast path marked.

Here too are the sum of a product's parts (docs/matmul.md, section 4, step 5), and products without products.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.gemm.job import (
    LIMBS,
    TILE,
    Job,
    accumulator_of,
    format_bytes,
    is_plain,
    order_bytes,
    problem_bytes,
    sums_of,
)
from fmtsim.cuda.runtime import Defines
from fmtsim.cuda.torch_calls import row_major
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.representable import is_representable
from fmtsim.spec.datapath import FP32, Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.schedule import adds_in_order

_THREADS = 256
_SIDE = 16  # rows and columns of a block of threads with an output each
_WITHIN_INT32 = 1 << 16  # products of two 8-bit integers, and half a range to spare
_WALKING = 8  # blocks a multiprocessor where a fast path has left a few tiles, as a rule none
_REDUCTIONS = ("serial", "pairwise", "in_place")  # enum Way of reduce.cu
_UNITS = {TwoStageDatapath: 0, PairwiseDatapath: 1, IntegerDatapath: 2}  # the macro UNIT


def covers(spec: GemmSpec, a: torch.dtype, b: torch.dtype, k: int) -> bool:
    """Return True if the kernels take a unit, its plan and operands of these formats and dtypes."""
    unit, plan = spec.datapath, spec.plan
    if isinstance(unit, IntegerDatapath):
        integers = isinstance(spec.a, IntFormat) and isinstance(spec.b, IntFormat) and a == b == torch.int8
        narrow = unit.accumulator_bits <= 32 or not unit.saturate  # torch operations clamp wider sums
        return integers and narrow and min(unit.block, k) <= 1 << 36 and adds_in_order(plan)
    floats = isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    if not floats or not is_plain(plan.partial) or plan.reduce == "neighbours":  # which torch operations add
        return False
    narrow = is_representable(spec.a, torch.float32) and is_representable(spec.b, torch.float32)
    if isinstance(unit, TwoStageDatapath):
        return narrow and max(unit.fraction_bits, unit.sum_bits) + 5 + unit.block.bit_length() <= 62
    if isinstance(unit, PairwiseDatapath):
        return narrow
    if not isinstance(unit, Datapath) or not is_plain(unit.accumulator) or not is_plain(spec.outer):
        return False
    if plan.scaled_promotion and not is_representable(unit.accumulator, torch.float32):
        return False
    return sums_of(spec, k, True) is not None


def ignores_order(spec: GemmSpec) -> bool:
    """Return True if every accumulation order gives the same bits: integers that wrap, written without parts."""
    return isinstance(spec.datapath, IntegerDatapath) and not spec.datapath.saturate


def run(job: Job, sums: Tensor, marks: Tensor | None) -> None:
    """Write the sums [parts, M, N] of the tiles that are marked, of all tiles where ``marks`` is None."""
    unit = job.spec.datapath
    if isinstance(unit, IntegerDatapath) and ignores_order(job.spec):
        # Add products modulo 2^32 or 2^64 by torch's own product, so many at once that none reaches int32's ends, where
        # it clamps.
        m, n, k = job.shape
        total = sums[0].zero_() if job.c is None else sums[0].copy_(job.c)
        for start in range(0, k, _WITHIN_INT32):
            a, b = (x[:, start : start + _WITHIN_INT32] for x in (job.a, job.b))
            # cuBLASLt takes multiples of 8 columns and of 32 rows
            a, b = (row_major(F.pad(x, (0, -x.shape[1] % 8, 0, -x.shape[0] % 32))) for x in (a, b))
            total += torch._int_mm(a, b.mT)[:m, :n]
        unused = 8 * total.element_size() - unit.accumulator_bits
        if unused:  # the bits of the accumulator, with the sign of the highest
            total.bitwise_left_shift_(unused).bitwise_right_shift_(unused)
    elif not isinstance(unit, Datapath):
        _launch(job, sums, marks, "cdna.cu", "cdna_product", (("UNIT", str(_UNITS[type(unit)])),))
    else:
        how = sums_of(job.spec, job.shape[2], job.c is not None and not job.promotes)
        assert how is not None
        _launch(job, sums, marks, "exact_integer.cu", "exact_integer", how.defines, how.grid)


def _launch(
    job: Job, sums: Tensor, marks: Tensor | None, file: str, name: str, defines: Defines, grid: int = 0
) -> None:
    """Launch a kernel with one output a thread; with marks, a few blocks of threads walk over the marked tiles."""
    m, n, _ = job.shape
    order, index = job.order, runtime.device_index(job.a)
    blocks = -(-m // _SIDE) * -(-n // _SIDE)
    if marks is not None:
        blocks = min(blocks, _WALKING * runtime.multiprocessors(index))
    runtime.kernel(file, name, index, defines)(
        blocks, _THREADS, job.a, job.b, job.c, order.source, order_bytes(job), marks, sums,
        problem_bytes(job, TILE, grid),
    )  # fmt: skip


def reduce(job: Job, sums: Tensor, start: Tensor | None) -> None:
    """Write the sum of the parts [parts, M, N] to ``job.out``, as the plan says.

    Args:
        job: The product.
        sums: The parts, in the dtype of the sums.
        start: [M, N] of any strides, what the output begins with where parts are added in place, or None.
    """
    unit, plan, out = job.spec.datapath, job.spec.plan, job.out
    wide = isinstance(unit, Datapath) and not is_representable(unit.accumulator, torch.float32)
    formats = format_bytes(accumulator_of(unit) if wide else FP32) + format_bytes(plan.partial or FP32)
    blocks, strides, steps = -(-out.numel() // _THREADS), [*map(np.int64, out.stride())], job.order.combination
    if steps is not None:
        runtime.kernel("reduce.cu", "combine_sums", runtime.device_index(out), ())(
            blocks, _THREADS, sums, steps, np.int32(len(steps)), out, *strides, formats, problem_bytes(job, TILE)
        )
        return
    runtime.kernel("reduce.cu", "reduce_parts", runtime.device_index(out), ())(
        blocks, _THREADS, sums, start, out, *strides, np.int32(len(sums)),
        np.int32(_REDUCTIONS.index(plan.reduce)), np.int32(plan.partial is not None), np.int32(plan.round_trip),
        formats, problem_bytes(job if start is None else replace(job, c=start), TILE),
    )  # fmt: skip


def fill(c: Tensor | None, out: Tensor) -> None:
    """Write the product for K = 0: c, or +0; NaN as the units' one NaN."""
    if c is None:
        out.zero_()
        return
    out.copy_(c)
    if out.dtype.is_floating_point:
        one = 0x7FFFFFFF if out.dtype == torch.float32 else 0x7FFFFFFFFFFFFFFF
        out.view(torch.int32 if out.dtype == torch.float32 else torch.int64).masked_fill_(out.isnan(), one)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield every specialisation of the kernels."""
    for wide in (0, 1):
        for limbs in (0, *LIMBS):
            yield "exact_integer.cu", "exact_integer", (("WIDE", str(wide)), ("LIMBS", str(limbs)))
    for unit in _UNITS.values():
        yield "cdna.cu", "cdna_product", (("UNIT", str(unit)),)
    yield from (("reduce.cu", name, ()) for name in ("reduce_parts", "combine_sums"))
