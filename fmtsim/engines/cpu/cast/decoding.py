# SPDX-License-Identifier: Apache-2.0
"""Codes back to values on the CPU: one table lookup an element, and its block's scale."""

from functools import lru_cache

import numpy as np
import torch
from numpy import float32, float64, int32

from fmtsim.engines.cpu.runtime import pool
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import CodebookFormat, ElementFormat
from fmtsim.spec.cast import CastSpec, EncodedParts


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute for a tensor of that dtype."""
    return dtype if dtype == torch.float64 else torch.float32


def narrows(fmt: Format, dtype: torch.dtype) -> bool:
    """Say whether a dtype of 16 bits does not hold every value of a format, so that values are rounded to it."""
    return dtype.itemsize == 2 and not is_representable(fmt, dtype)


def store(result: torch.Tensor, out: torch.Tensor) -> None:
    """Write values into a tensor of any of the four dtypes, rounded to nearest even where they do not fit exactly.

    torch's vectorised conversion to bfloat16 gives NaN all ones; every NaN here is the canonical one.
    """
    out.copy_(result)
    if out.dtype != result.dtype:
        out.masked_fill_(result.isnan(), torch.nan)


@lru_cache(maxsize=256)
def values_of(fmt: ElementFormat) -> np.ndarray:
    """Return the values of all codes, float64."""
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    return np.array([fmt.value(code) for code in range(count)], np.float64)


@kernel
def decode_flat(codes, values, y):
    """Look up the values of codes."""
    for i in range(codes.size):
        y[i] = values[codes[i]]


@kernel
def decode_rows(codes, values, scales, offsets, shifted, decode_scale, odd, y, outer, inner, first, last):
    """Decode rows ``first ... last - 1`` of a matrix of blocks; ``decode_scale`` is 1 without a tensor scale.

    ``odd`` asks for float32 rounded to odd: who rounds that to 16 bits gets what one rounding gives.
    """
    for r in range(first, last):
        for k in range(codes.shape[1]):
            scale = float64(scales[r // outer, k // inner])
            value = values[codes[r, k]]
            if shifted:
                value -= offsets[r // outer, k // inner]
            result = value * scale * decode_scale
            result = float64(_odd(result)) if odd else result
            y[r, k] = result if result == result else np.nan


@device
def _odd(value):
    """Round a float64 to float32 toward zero, with the lowest bit set where that loses something."""
    near = float32(value)
    bits = bits32(near) - int32(abs(float64(near)) > abs(value))
    return near if float64(near) == value or value != value else float32_of(int32(bits | int32(1)))


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out, of any of the four dtypes."""
    fmt = spec.format
    target = torch.empty(out.shape, dtype=wider(out.dtype))
    if out.is_contiguous() and out.dtype == target.dtype:
        target = out
    if isinstance(fmt, BlockFormat):
        target = _decode_blocks(parts, fmt, spec.dim, target, odd=narrows(fmt, out.dtype))
    else:
        values = torch.from_numpy(values_of(fmt))  # type: ignore[arg-type]
        look_up(parts.codes.contiguous().view(-1), values, target.view(-1))
    if target is not out:
        store(target, out)


def look_up(codes: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of integer codes to out; all are contiguous and have one dimension."""
    table = values.numpy()
    pool.run(
        lambda start, stop: decode_flat(codes[start:stop].numpy(), table, out[start:stop].numpy()),
        codes.numel(),
        align=64,
    )


def _decode_blocks(parts: EncodedParts, fmt: BlockFormat, dim: int, target: torch.Tensor, *, odd: bool) -> torch.Tensor:
    """Return the values, in ``target`` where its layout is the operand matrix's."""
    codes = parts.codes.reshape(1) if parts.codes.dim() == 0 else parts.codes
    moved = codes.movedim(dim, -1)
    if not codes.numel():
        return target
    matrix = moved.reshape(-1, moved.shape[-1]).contiguous()
    y = target.view(matrix.shape) if dim == -1 else torch.empty(matrix.shape, dtype=target.dtype)
    rows, columns = matrix.shape
    outer, inner = fmt.block[0] or rows, fmt.block[1] or columns
    assert parts.scales is not None
    offsets = parts.offsets if parts.offsets is not None else torch.zeros((1, 1), dtype=torch.int32)
    tensor_scale = 1.0 if parts.tensor_scale is None else float(parts.tensor_scale)
    arrays = matrix.numpy(), values_of(fmt.element), parts.scales.contiguous().numpy(), offsets.contiguous().numpy()
    how = fmt.zero_point, tensor_scale, odd, y.numpy(), outer, inner
    pool.run(lambda first, last: decode_rows(*arrays, *how, first, last), rows, align=1, weight=columns)
    return target if dim == -1 else y.view(moved.shape).movedim(-1, dim)
