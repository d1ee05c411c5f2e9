"""Hadamard transforms in one pass, where a warp holds a group (fmtsim/scaling/hadamard.py defines every bit)."""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.block_fast import INPUTS
from fmtsim.cuda.cast.block_view import aligned
from fmtsim.cuda.runtime.program import Defines, device_index, kernel

_SIZES = (16, 32, 64, 128, 256, 512)
_THREADS = 256
_HELD = 16  # numbers a thread holds


def covers(size: int, dim: int) -> bool:
    """Say whether the kernel transforms groups of ``size`` neighbours along ``dim``, a negative number."""
    return size in _SIZES and dim == -1


def hadamard(x: Tensor, size: int, flips: Tensor | None, inverse: bool) -> Tensor:
    """Return the transform of every group along the last dimension by Sylvester's matrix: float32, NaN canonical.

    Args:
        x: [..., K], float16, bfloat16, float32, float64; size divides K.
        size: One that is covered.
        flips: bool [size] on x's device, elements that change their sign; None is none.
        inverse: Turn signs behind the transform.
    """
    source = (x.float() if x.dtype == torch.float64 else x).contiguous()
    source = source if aligned(source) else source.clone()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        before, after = (None, flips) if inverse else (flips, None)
        grid = -(-x.numel() // (_HELD * _THREADS))
        run = kernel("hadamard.cu", "hadamard", device_index(x), _defines(source.dtype, size))
        run(grid, _THREADS, source, out, before, after, np.uint64(x.numel()))
    return out


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of the sizes that published transforms have, in every dtype."""
    for dtype in INPUTS:
        for size in (16, 128):
            yield "hadamard.cu", "hadamard", _defines(dtype, size)


@lru_cache(maxsize=64)
def _defines(dtype: torch.dtype, size: int) -> Defines:
    factor = int(np.float32(1 / math.sqrt(size)).view(np.uint32))
    return (("INPUT", str(INPUTS[dtype])), ("SIZE", str(size)), ("ROOT", f"{factor}u"))
