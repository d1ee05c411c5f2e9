# SPDX-License-Identifier: Apache-2.0
"""Hadamard transforms in one pass, where a warp holds a group (fmtsim/scaling/hadamard.py defines every bit)."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import DTYPES, aligned, macros
from fmtsim.cuda.cast.rotated import inner_rotation
from fmtsim.cuda.runtime import Defines, device_index, kernel
from fmtsim.cuda.runtime.launch import Bound
from fmtsim.spec.quantizer import Transform

Scales = tuple[Tensor | None, Tensor | None]

_SIZES = (16, 32, 64, 128, 256, 512)
_THREADS = 256
_ELEMENTS = 16 * _THREADS  # of a block of threads


def covers_hadamard(size: int, dim: int) -> bool:
    """Return True if the kernel transforms groups of ``size`` neighbours along ``dim``, a negative number."""
    return size in _SIZES and dim == -1


def hadamard(x: Tensor, size: int, flips: Tensor | None, inverse: bool) -> Tensor:
    """Return the transform of every group along the last dimension by Sylvester's matrix: float32, NaN canonical.

    Args:
        x: [..., K], float16, bfloat16, float32, float64; size divides K.
        size: One that is covered.
        flips: bool [size] on x's device, elements that change their sign; None is none.
        inverse: Change signs behind the transform.
    """
    source = (x.float() if x.dtype == torch.float64 else x).contiguous()
    before, after = (None, flips) if inverse else (flips, None)
    return _launch(source, None, torch.float32, size, before, after, (None, None), 0)


def covers_finish(y: Tensor, transforms: tuple[Transform, ...]) -> bool:
    """Return True if ``finish_rotated`` takes a gradient; the device is not looked at."""
    rotation = inner_rotation(transforms)
    fits = not transforms or (rotation is not None and rotation.signs != "random")
    return fits and y.dim() == 2 and y.dtype == torch.float32 and y.is_contiguous() and not y.shape[1] % 64


def finish_rotated(
    y: Tensor, mask: Tensor | None, transforms: tuple[Transform, ...], dtype: torch.dtype, scales: Scales = (None, None)
) -> Tensor:
    """Return the gradient of a tensor from that of its rotated and rounded values.

    ``y`` is multiplied with the scales, one after the other, and with the mask as 1 and 0, rotated back along the last
    axis and rounded once to the dtype; all steps are float32. NaN becomes the canonical one.

    Args:
        y: float32 ``[rows, columns]``, contiguous; columns a multiple of 64.
        mask: bool, like y; None is all true.
        transforms: Those of the forward pass: none, or one of 16 or 32 elements along the inner axis whose signs are
            not random.
        dtype: float32, bfloat16 or float16.
        scales: float32 tensors of one number, or None.
    """
    rotation = inner_rotation(transforms)
    signs = rotation.signs if rotation is not None and isinstance(rotation.signs, int) else 0
    return _launch(y, mask, dtype, 1 if rotation is None else rotation.size or 1, None, None, scales, signs)


def _launch(
    x: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
    size: int,
    before: Tensor | None,
    after: Tensor | None,
    scales: Scales,
    signs: int,
) -> Tensor:
    """Transform a contiguous tensor; the arguments are those of the kernel."""
    out, x = torch.empty_like(x, dtype=dtype), x if aligned(x) else x.clone()
    if x.numel():
        launch = _prepared(x.numel(), x.dtype, dtype, size, signs, device_index(x))
        launch(-(-x.numel() // _ELEMENTS), x, mask, out, before, after, *scales)
    return out


@lru_cache(maxsize=4096)
def _prepared(numel: int, dtype: torch.dtype, out: torch.dtype, size: int, signs: int, index: int) -> Bound:
    """Return a launch for tensors of a size that takes the grid and the addresses."""
    compiled = kernel("hadamard.cu", "hadamard", index, transform_macros(dtype, out, size))
    return compiled.bound(_THREADS, 7, np.uint32(signs), np.uint64(numel))


@lru_cache(maxsize=64)
def transform_macros(dtype: torch.dtype, out: torch.dtype, size: int) -> Defines:
    """Return the macros of hadamard.cu."""
    return macros(INPUT=DTYPES[dtype], OUTPUT=DTYPES[out], SIZE=size)
