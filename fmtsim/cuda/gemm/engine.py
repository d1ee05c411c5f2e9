# SPDX-License-Identifier: Apache-2.0
"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md).

A product becomes a ``Job``; a fast path, where one takes it, writes what it can and marks the tiles that it cannot,
the general path does those or everything, and parts are reduced. Nothing waits for the device, but the self-test of a
fast path at its first use.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import general, self_test
from fmtsim.cuda.gemm.aligned_fp64_fma import AlignedFp64Fma
from fmtsim.cuda.gemm.aligned_fp64_mma import AlignedFp64Mma
from fmtsim.cuda.gemm.block_scaled import BlockScaled
from fmtsim.cuda.gemm.fma_chain import FmaChain
from fmtsim.cuda.gemm.job import TILE, TYPES, Gpu, Job, accumulation_order, gpu_of
from fmtsim.cuda.runtime import Program
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.registry import get_format
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

_MOST: Final = 65535  # parts that a grid of blocks counts
# the faster first, where several take a product
FAST = BLOCK_SCALED, FP64_MMA, FMA_CHAIN, FP64_FMA = BlockScaled(), AlignedFp64Mma(), FmaChain(), AlignedFp64Fma()


def supports_gemm(spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
    """Return True if the kernels cover a product on this device; the torch engine takes the rest."""
    if a.dtype not in TYPES or b.dtype not in TYPES or not runtime.serves(runtime.device_index(a)):
        return False
    return general.covers(spec, a.dtype, b.dtype, max(a.shape[1], 1))


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    spec: GemmSpec,
    random: RandomKey | None,
    out: Tensor,
) -> None:
    """Write the reduced sums of ``a b^T`` to out [M, N], before the epilogue.

    Shapes and dtypes are those of the engine protocol (docs/architecture.md). NaN has all bits set but the sign. The
    workspace holds the parts of a split product, [parts, M, N], and is freed with torch's allocator.

    Raises:
        DeviceError: A CUDA graph is being captured before this unit, plan and K have run once.

    A KernelWarning says that a fast path failed its self-test.
    """
    if out.numel() == 0:
        return
    k = a.shape[1]
    if k == 0:
        general.fill(c, out)
        return
    in_place = spec.plan.reduce == "in_place"  # the output begins with c, not the first chain
    job = Job(
        a=a, b=b, c=None if in_place else c, scale_a=scale_a, scale_b=scale_b, spec=spec, random=random, out=out,
        order=accumulation_order(k, spec, a.device), gpu=gpu_of(a),
    )  # fmt: skip
    parts = 1 if general.ignores_order(spec) else len(job.order.parts)
    alone = parts == 1 and job.order.combination is None
    direct = alone and spec.plan.partial is None and out.is_contiguous() and not (in_place and c is not None)
    sums = out.unsqueeze(0) if direct else torch.empty(parts, *out.shape, dtype=out.dtype, device=out.device)
    fast = self_test.chosen(FAST, job) if len(job.order.parts) <= _MOST else None
    marks = None
    if fast is not None:
        path, plan = fast
        marks = torch.zeros(-(-out.shape[0] // TILE), -(-out.shape[1] // TILE), dtype=torch.uint8, device=out.device)
        path.run(job, plan, sums, marks)
    general.run(job, sums, marks)
    if not direct:
        general.reduce(job, sums, c if in_place else None)


# Usual products, whose kernels are compiled before the first call (fmtsim.cuda.warmup).

_unit: Any = Datapath  # names stand for formats and roundings; no kernel is specialised by min_exponent
_NEAREST = partial(_unit, block=16, fraction_bits=25, rounding="nearest_even")
_CHAIN = partial(_unit, fraction_bits=None, rounding="nearest_even")
_GROUPS = partial(_unit, block=64, fraction_bits=35, group=16)
_E8M13, _E8M10, _E6M9 = (
    FloatFormat(name=f"e{exponent}m{mantissa}", exponent_bits=exponent, mantissa_bits=mantissa)
    for exponent, mantissa in ((8, 13), (8, 10), (6, 9))
)
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = (
    (_unit(block=32, fraction_bits=13, accumulator=_E8M13), _FP8),
    (_unit(block=16, fraction_bits=13, accumulator=_E8M13), _FP8),
    (_unit(block=32, fraction_bits=25), _FP8),
    (_unit(block=32, fraction_bits=25, scale="e8m0", scale_block=32), _FP8),
    (_unit(block=16, fraction_bits=25), _HALVES),
    (_unit(block=8, fraction_bits=24), _HALVES),
    (_unit(block=4, fraction_bits=23), {"fp16": torch.float16}),
    (_unit(block=8, fraction_bits=25), {"tf32": torch.float32}),
    (_unit(block=4, fraction_bits=24), {"tf32": torch.float32}),
    (_GROUPS(scale="ue4m3", scale_block=16), {"e2m1": torch.float8_e4m3fn}),
    (_GROUPS(scale="e8m0", scale_block=32), {"e2m1": torch.float8_e4m3fn}),
    (_NEAREST(accumulator="fp16"), {"fp16": torch.float16}),
    (_NEAREST(accumulator="bf16"), {"bf16": torch.bfloat16}),
    (_NEAREST(accumulator="bf16", rounding="stochastic"), {"bf16": torch.bfloat16}),
    (_NEAREST(term_rounding="nearest_even"), {"bf16": torch.bfloat16}),
    (_unit(block=32, fraction_bits=13, accumulator="fp16", rounding="nearest_even"), _FP8),
    (_CHAIN(block=1), {"fp32": torch.float32, **_HALVES}),
    (_CHAIN(block=1, accumulator="fp64"), {"fp64": torch.float64}),
    (_CHAIN(block=1, accumulator="fp16"), {"fp16": torch.float16}),
    (_CHAIN(block=1, accumulator="bf16"), {"bf16": torch.bfloat16}),
    (_CHAIN(block=1, accumulator=_E6M9), _FP8),
    (_CHAIN(block=1, accumulator=_E8M10), _HALVES),
    (_CHAIN(block=4), {"fp16": torch.float16}),
    (_CHAIN(block=16), _FP8),
)
_PLANS = GemmPlan(), GemmPlan(promote_every=128), GemmPlan(promote_every=128, scaled_promotion=True)
_LESS_SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}  # KB of a block


def variants(capability: tuple[int, int]) -> Iterator[Program]:
    """Yield the kernels of the fast path that takes each product, if any."""
    gpu = Gpu(capability, _LESS_SHARED.get(capability, 227) << 10)
    for unit, operands in _UNITS:
        for name, dtype in operands.items():
            for plan in _PLANS if operands is _FP8 else _PLANS[:2]:
                plans = (path.plan(_job(unit, name, dtype, plan, gpu)) for path in FAST)
                yield from next((path_plan.programs for path_plan in plans if path_plan is not None), ())


def _job(unit: Datapath, name: str, dtype: torch.dtype, plan: GemmPlan, gpu: Gpu) -> Job:
    """Return a product of tiles without memory."""
    fmt, k, device = get_format(name), 16 * TILE, torch.device("meta")
    assert isinstance(fmt, FloatFormat | IntFormat)
    a, b = (torch.empty(TILE, k, dtype=dtype, device=device) for _ in range(2))
    spec = GemmSpec(datapath=unit, plan=plan, a=fmt, b=fmt)
    scale = None if unit.scale is None else torch.empty(TILE, k // unit.scale_block, device=device)
    return Job(
        a=a, b=b, c=None, scale_a=scale, scale_b=scale, spec=spec, random=None,
        out=torch.empty(TILE, TILE, dtype=sum_dtype(unit), device=device),
        order=accumulation_order(k, spec, device), gpu=gpu,
    )  # fmt: skip
