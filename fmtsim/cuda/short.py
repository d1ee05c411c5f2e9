"""The short way to the commonest cast: a whole tensor to an element format, with everything but its size known.

Small tensors cost host time alone, so what depends on the cast, the dtypes and the device is looked up in one place.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fmtsim.cuda import elements, runtime
from fmtsim.cuda.launch import Kernel
from fmtsim.cuda.parameters import draw_of
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.ops import CastSpec

_ALIGNED = 16
_NONE = np.int64(0)


class _Launcher(NamedTuple):
    kernel: Kernel
    width: int  # elements of a vector
    together: int  # elements of a block of threads
    parameters: bytes
    draw: bytes


def quantize_short(x: torch.Tensor, spec: CastSpec, out: torch.Tensor) -> bool:
    """Quantise x into out where both lie whole in memory and a fast kernel takes them, and say whether that is so.

    Formats of blocks, float64, and roundings that draw random words take the long way.
    """
    launcher = _launcher(spec, x.dtype, out.dtype, runtime.device_index(x))
    if launcher is None or (x.data_ptr() | out.data_ptr()) % _ALIGNED:
        return False
    count = x.numel()
    if not count or not x.is_contiguous() or not out.is_contiguous():
        return False
    whole = count // launcher.width * launcher.width
    blocks = max(-(-whole // launcher.together), 1)
    launcher.kernel(
        blocks, elements.THREADS, x, out, _NONE, np.int64(whole), np.int64(count), launcher.parameters, launcher.draw
    )
    return True


@lru_cache(maxsize=4096)
def _launcher(spec: CastSpec, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Launcher | None:
    """Return how a cast is launched on vectors, None where the short way does not serve it."""
    if isinstance(spec.format, BlockFormat | LogTileFormat) or spec.rounding.mode == "stochastic":
        return None
    if torch.float64 in (dtype, out_dtype):
        return None
    grid = elements.fast_grid(spec, None)
    if grid is None:
        return None
    width = 8 if 2 in (dtype.itemsize, out_dtype.itemsize) else 4
    defines = elements.fast_defines(grid, dtype, out_dtype, True)
    kernel = runtime.kernel("scalar.cu", "quantize", index, defines)
    together = elements.THREADS * elements.UNROLL * width
    return _Launcher(kernel, width, together, grid.parameters, draw_of(spec.rounding, None))
