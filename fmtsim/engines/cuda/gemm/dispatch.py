# SPDX-License-Identifier: Apache-2.0
"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md).

A product becomes a ``Job``; a fast path, where one takes it, writes what it can and marks the tiles that it cannot,
the general path does those or everything, and parts are reduced. Nothing waits for the device, but the self-test of a
fast path at its first use.
"""

from types import ModuleType

import torch
from torch import Tensor

from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.gemm import (
    aligned_fp32_fma,
    aligned_fp64_fma,
    aligned_fp64_mma,
    block_scaled,
    fma_chain,
    general,
    self_test,
)
from fmtsim.engines.cuda.gemm.job import TILE, Job, accumulation_order, gpu_of
from fmtsim.engines.cuda.gemm.problem import TYPES
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.gemm_spec import GemmSpec

# The faster first, where several take a product.
_MOST = 65535  # parts that a grid of blocks counts
FAST = (block_scaled, aligned_fp64_mma, fma_chain, aligned_fp32_fma, aligned_fp64_fma)


def supports_gemm(spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
    """Say whether the kernels cover a product on this device; the torch engine takes the rest."""
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
    fast = _fast_path(job)
    marks = None
    if fast is not None:
        marks = torch.zeros(-(-out.shape[0] // TILE), -(-out.shape[1] // TILE), dtype=torch.uint8, device=out.device)
        fast.run(job, sums, marks)
    general.run(job, sums, marks)
    if not direct:
        general.reduce(job, sums, c if in_place else None)


def _fast_path(job: Job) -> ModuleType | None:
    """Return the first module that takes a product and has shown that its kernels compute it, or None."""
    if len(job.order.parts) > _MOST:
        return None
    return self_test.chosen(FAST, job)
