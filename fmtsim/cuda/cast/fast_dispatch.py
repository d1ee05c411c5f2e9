"""Fast dispatch of the commonest casts: contiguous tensors, with everything but address and size known from before.

Small tensors cost host time alone, so what depends on the cast, the dtypes and the device is looked up in one place.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast import elements
from fmtsim.cuda.cast.block_launch import THREADS, cast_bytes
from fmtsim.cuda.cast.block_macros import amax_macros, draws_words, fast_macros, output_of, run_macros, vector_of
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.launch import Bound, Kernel
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import CastSpec, Random, RandomKey, spec_from_json

_ALIGNED = 16
_ZERO = np.int64(0)


class _Elements(NamedTuple):
    """How a cast to an element format is launched on vectors."""

    launch: Bound | None  # None where random words are drawn: they come with each call
    kernel: Kernel
    parameters: bytes
    group: int  # elements that are cast together
    together: int  # elements of a block of threads


class _Blocks(NamedTuple):
    """How a cast to a block format is launched whose blocks are runs of the last dimension."""

    launch: Bound | None  # as above
    kernel: Kernel
    extremes: Bound | None  # finds the amax of the tensor, where a scale needs it
    pieces: bytes
    run: int  # elements of a block
    together: int
    most: int  # blocks of threads of ``extremes``


def quantize_contiguous(x: Tensor, cast: CastSpec | str, out: Tensor, random: Random = None) -> bool:
    """Quantise x into out where both are contiguous and a fast kernel takes them, and say whether that is so.

    Args:
        x, out: Of one shape, on one device.
        cast: The cast, or its JSON, which is looked up faster.
        random: Where the rounding draws words, their key.

    False for float64, given random words, blocks that are no runs of the last dimension, and whatever else there is.
    """
    count = x.numel()
    if not count or (x.data_ptr() | out.data_ptr()) % _ALIGNED or not (x.is_contiguous() and out.is_contiguous()):
        return False
    plan = _plan(cast, x.dtype, out.dtype, runtime.device_index(x))
    if plan is None or (plan.launch is None) != isinstance(random, RandomKey):
        return False
    if isinstance(plan, _Blocks):
        return _cast_blocks(x, cast, out, random, plan)
    grid, last = -(-count // plan.together), count // plan.group * plan.group
    if plan.launch is not None:
        plan.launch(grid, x.data_ptr(), out.data_ptr(), 0, last, count)
    else:
        draw = draw_of(_spec(cast).rounding, random)
        bounds = _ZERO, np.int64(last), np.int64(count)
        plan.kernel(grid, elements.THREADS, x, out, *bounds, plan.parameters, draw)
    return True


def _cast_blocks(x: Tensor, cast: CastSpec | str, out: Tensor, random: Random, plan: _Blocks) -> bool:
    count = x.numel()
    if not x.dim() or x.shape[-1] % plan.run or count >= 1 << 36:
        return False
    found = None
    if plan.extremes is not None:
        found = torch.zeros(2, dtype=torch.int32, device=x.device)
        grid = min(-(-count // (64 * THREADS // x.itemsize)), plan.most)
        plan.extremes(grid, x.data_ptr(), found.data_ptr(), count * x.itemsize // 16)
    grid = -(-count // plan.together)
    if plan.launch is not None:
        plan.launch(grid, x.data_ptr(), out.data_ptr(), 0, 0, 0 if found is None else found.data_ptr(), 0, count)
    else:
        drawn = cast_bytes(_spec(cast), random, x.device)
        arguments = None, None, found, None, np.uint64(count), plan.pieces, np.uint32(found is not None), drawn
        plan.kernel(grid, THREADS, x, out, *arguments)
    return True


def _spec(cast: CastSpec | str) -> CastSpec:
    return spec_from_json(cast) if isinstance(cast, str) else cast


@lru_cache(maxsize=4096)
def _plan(cast: CastSpec | str, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Elements | _Blocks | None:
    """Return how a cast is launched on a device, None where fast dispatch does not serve it."""
    spec = _spec(cast)
    if torch.float64 in (dtype, out_dtype) or isinstance(spec.format, LogTileFormat) or not runtime.serves(index):
        return None
    element = spec.format.element if isinstance(spec.format, BlockFormat) else spec.format
    if not element.has_nan and element.nan_policy == "error":
        return None  # somebody has to look at the numbers
    if isinstance(spec.format, BlockFormat):
        return _plan_blocks(spec, dtype, out_dtype, index)
    return _plan_elements(spec, dtype, out_dtype, index)


def _plan_elements(spec: CastSpec, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Elements | None:
    grid = elements.fast_grid(spec, None)
    if grid is None or not (out_dtype == torch.float32 or is_representable(spec.format, out_dtype)):
        return None
    kernel = runtime.kernel("quantize.cu", "quantize", index, elements.quantize_macros(grid, dtype, out_dtype))
    if spec.rounding.mode == "stochastic":
        return _Elements(None, kernel, grid.parameters, elements.TILE, 4 * elements.TILE)
    launch = kernel.bound(elements.THREADS, 5, grid.parameters, draw_of(spec.rounding, None))
    width, unroll = elements.vectors_of(grid, dtype, out_dtype)
    return _Elements(launch, kernel, grid.parameters, width, elements.THREADS * unroll * width)


def _plan_blocks(spec: CastSpec, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Blocks | None:
    fmt, output = spec.format, output_of(out_dtype)
    assert isinstance(fmt, BlockFormat)
    rows, run = fmt.block
    if output is None or spec.dim != -1 or rows != 1 or not run or run % 16 or not draws_words(spec, RandomKey(0)):
        return None
    fast, vector = fast_macros(spec, dtype, output), vector_of(dtype, output, fmt.bits)
    macros = None if fast is None else run_macros(fast, dtype, vector, run)
    if macros is None or ("RUN", "0") in macros:  # no fast kernel, or a block is longer than a warp holds
        return None
    kernel = runtime.kernel("block_rows.cu", "cast_runs", index, macros)
    extremes, launch, pieces = None, None, struct.pack("<4I", run // 16, 1, 1, 0)
    if fmt.tensor_scale:
        extremes = runtime.kernel("statistic.cu", "amax_of_tensor", index, amax_macros(dtype)).bound(THREADS, 3)
    if spec.rounding.mode != "stochastic":
        constant = cast_bytes(spec, None, torch.device("cuda", index))
        launch = kernel.bound(THREADS, 7, pieces, np.uint32(fmt.tensor_scale), constant)
    most = 8 * runtime.multiprocessors(index)
    return _Blocks(launch, kernel, extremes, pieces, run, 4 * vector * THREADS, most)
