"""The sum of a product's parts (docs/matmul.md, section 4, step 5)."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.gemm.job import Job
from fmtsim.cuda.gemm.unit import KINDS, accumulator_of, format_bytes
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.representable import is_representable
from fmtsim.spec.datapath import FP32, Datapath, IntegerDatapath

_THREADS = 256


_WAYS = {"serial": 0, "pairwise": 1, "in_place": 2}


def reduce(job: Job, sums: Tensor, held: Tensor | None) -> None:
    """Write the sum of the parts [parts, M, N] to ``job.out``, in the way of the plan.

    Args:
        job: The product.
        sums: The parts, in the dtype of the sums.
        held: [M, N] of any strides, what the output begins with where parts are added in place, or None.
    """
    unit, plan, out = job.spec.datapath, job.spec.plan, job.out
    saturates = isinstance(unit, IntegerDatapath) and unit.saturate
    wide = isinstance(unit, Datapath) and not is_representable(unit.accumulator, torch.float32)
    formats = format_bytes(accumulator_of(unit) if wide else FP32) + format_bytes(plan.partial or FP32)
    kernel = runtime.kernel("reduce.cu", "reduce_parts", runtime.device_index(out), ())
    kernel(
        -(-out.numel() // _THREADS), _THREADS, sums, out, np.int64(out.numel()), np.int64(out.shape[1]),
        np.int64(out.stride(0)), np.int64(out.stride(1)), np.int32(sums.shape[0]), np.int32(KINDS[out.dtype]),
        np.int32(_WAYS[plan.reduce]), np.int32(plan.partial is not None), np.int32(plan.round_trip),
        np.int32(saturates), held, *(np.int64(0 if held is None else held.stride(i)) for i in (0, 1)), formats,
    )  # fmt: skip


def fill(c: Tensor | None, out: Tensor) -> None:
    """Write what a product without products is: c, or +0; NaN as the units' one NaN."""
    if c is None:
        out.zero_()
        return
    out.copy_(c)
    if out.dtype.is_floating_point:
        one = 0x7FFFFFFF if out.dtype == torch.float32 else 0x7FFFFFFFFFFFFFFF
        out.view(torch.int32 if out.dtype == torch.float32 else torch.int64).masked_fill_(out.isnan(), one)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield the kernel."""
    yield "reduce.cu", "reduce_parts", ()
