"""What a cast lost, counted while it runs (the definitions are those of fmtsim/analysis/stats.py)."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import elements, runtime
from fmtsim.cuda.block_fast import output_of
from fmtsim.cuda.block_jobs import BlockJob
from fmtsim.cuda.parameters import draw_of
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.ops import CastSpec, Random

_SLOTS, _FIELDS = 256, 6  # struct Slot of kernels/block_counts.cuh, padded to whole 16 bytes


class Counts(NamedTuple):
    """Counts of one cast, on its device: int64, and float32 for amax, all 0-d.

    Attributes:
        nonzero: Finite elements that are not zero.
        underflowed: Those that became zero.
        saturated: Finite elements whose nearest value lies beyond the format's largest, under their block's scale.
        nonfinite: NaN and infinite elements, which enter no other count.
        amax: Largest finite magnitude.
    """

    nonzero: Tensor
    underflowed: Tensor
    saturated: Tensor
    nonfinite: Tensor
    amax: Tensor


def quantize_counted(x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> Counts | None:
    """Quantise x into out like the engine's ``quantize`` and count what was lost, from the same read.

    Returns None, with out as it was, where no kernel does that: formats and roundings of the general kernels, float64,
    tensors that do not lie whole in memory, results over their own input; of block formats also blocks that are no
    runs of memory, and results in float16. Nothing waits for the device.
    """
    if not x.numel() or x.data_ptr() == out.data_ptr() or not (x.is_contiguous() and out.is_contiguous()):
        return None
    return (_count_blocks if isinstance(spec.format, BlockFormat) else _count_elements)(x, spec, random, out)


def _count_blocks(x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> Counts | None:
    output = output_of(out.dtype)
    if output is None:
        return None
    job = BlockJob(x, out, spec, random)
    job.slots = torch.zeros(_SLOTS, _FIELDS, dtype=torch.int64, device=x.device)
    if not job.fast(output):
        return None
    nonzero, kept, saturated, nonfinite = job.slots[:, :4].sum(0).unbind()
    return Counts(nonzero, (nonzero - kept).clamp(min=0), saturated, nonfinite, _amax(job.slots[:, 4].amax()))


def _count_elements(x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> Counts | None:
    grid = None if torch.float64 in (x.dtype, out.dtype) else elements.fast_grid(spec, random)
    if grid is None:
        return None
    index = runtime.device_index(x)
    totals = torch.zeros(5, dtype=torch.int64, device=x.device)
    defines = elements.fast_defines(grid, x.dtype, out.dtype, elements.whole_vectors(x, out))
    low, high = map(np.float32, _limits(spec.format))
    blocks = min(-(-x.numel() // (4 * elements.THREADS)), 8 * runtime.multiprocessors(index))
    kernel = runtime.kernel("statistics.cu", "quantize", index, defines)
    draw = draw_of(spec.rounding, random)
    kernel(blocks, elements.THREADS, x, out, np.int64(x.numel()), grid.parameters, draw, low, high, totals)
    nonzero, underflowed, saturated, nonfinite, bits = totals.unbind()
    return Counts(nonzero, underflowed, saturated, nonfinite, _amax(bits))


def _amax(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _limits(fmt: Format) -> tuple[float, float]:
    """Return the numbers below and above which rounding to nearest leaves the range of a float format or an integer."""
    if isinstance(fmt, IntFormat):
        return fmt.min - fmt.eps / 2, fmt.max + fmt.eps / 2
    assert isinstance(fmt, FloatFormat)  # a grid is one of the two
    margin = math.ldexp(0.5, fmt.max_exponent - fmt.mantissa_bits)
    return -fmt.max - margin if fmt.signed else fmt.min - fmt.min_subnormal / 2, fmt.max + margin
