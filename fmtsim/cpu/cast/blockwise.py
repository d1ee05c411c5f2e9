# SPDX-License-Identifier: Apache-2.0
"""The element step of scaled casts, under scales that the caller has made: a matrix times the numbers of its blocks.

For quantisers (fmtsim/scaling/scaled_cast.py), whose rules make scales that no kernel of scaled_kernels.py makes, and
for the scales of finished products.
"""

import math

import numpy as np
import torch
from numpy import float32, float64, int32

from fmtsim.cpu.cast.codes import Coding, coding_of, value_of_code
from fmtsim.cpu.cast.elements import caster
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import device, kernel
from fmtsim.cpu.runtime.pool import array_of, memory, scratch
from fmtsim.formats.registry import get_format
from fmtsim.spec.cast import CastSpec, Random

Sizes = tuple[int, int]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MULTIPLY, _DIVIDE, _TWICE = range(3)
_NO_VALUES, _NO_CODES = np.empty((1, 0), np.float32), np.empty((1, 0), np.uint8)
_PIECE = 1 << 15  # elements that are scaled and then rounded


def times_blocks(
    x: torch.Tensor, s: torch.Tensor, block: Sizes, *, divides: bool = False, tensor_scale: torch.Tensor | None = None,
    buffer: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return elements times the numbers of their blocks, or divided by them: float32, in x's layout.

    Args:
        x: A float32 matrix, or one of float8_e4m3fn or float8_e5m2.
        s: float32 [blocks, blocks].
        block: Rows and columns of a block.
        divides: Divide.
        tensor_scale: What the products, in float64, are multiplied with before they are rounded: float32, 0-d.
        buffer: The name of memory of this thread to write to, which the next call by its name reuses.
    """
    if not x.is_contiguous() and x.mT.is_contiguous():
        transposed = x.mT, s.mT, block[::-1]
        return times_blocks(*transposed, divides=divides, tensor_scale=tensor_scale, buffer=buffer).mT
    x, s = x.detach().contiguous(), s.detach().contiguous()
    out = _empty(x.shape, buffer)
    eight = x.dtype in FLOAT8
    values, codes = (_NO_VALUES, array_of(x.view(torch.uint8))) if eight else (array_of(x), _NO_CODES)
    how = _DIVIDE if divides else _MULTIPLY if tensor_scale is None else _TWICE
    rest = array_of(s), array_of(out), *block, how, 1.0 if tensor_scale is None else float(tensor_scale)
    coding = _coding(x.dtype if eight else FLOAT8[0])
    pool.run(lambda start, stop: _times(values, codes, coding, *rest, start, stop, 0), len(x), 1, x.shape[1])
    return out


def finish_(
    y: torch.Tensor, columns: torch.Tensor | None, rows: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Make y ``(y * columns^T) * rows + bias``, each step rounded; return False where no kernel does it.

    Args:
        y: [M, N], float32, contiguous.
        columns: [N, 1] or [1, 1], or None.
        rows: [M, 1] or [1, 1], or None.
        bias: [N], or None.
    """
    tensors = [t for t in (y, columns, rows, bias) if t is not None]
    if any(t.dtype != torch.float32 for t in tensors) or not y.numel() or not y.is_contiguous():
        return False
    arrays = (_row(columns), _row(rows), _row(bias), array_of(y))
    pool.run(lambda start, stop: _finish(*arrays, start, stop), len(y), 1, y.shape[1])
    return True


def round_blocks(
    x: torch.Tensor, factor: torch.Tensor, block: Sizes, spec: CastSpec, random: Random, out: torch.Tensor, *,
    divides: bool = False, scaled: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Cast a matrix times the numbers of its blocks, or divided by them; return False where no kernel does it.

    Args:
        x: float32.
        factor: float32 [blocks, blocks].
        block: Rows and columns of a block.
        spec: A cast to an element format.
        random: A key, for stochastic rounding.
        out: Where the values go, contiguous, of a dtype that holds them.
        divides: Divide.
        scaled: Where what is rounded goes, float32, contiguous; None for nowhere.
    """
    x, (rows, columns) = x.detach().contiguous(), x.shape
    cast, direct = caster(spec, random, x.shape), out.dtype == torch.float32
    if cast is None:
        return False
    arrays = array_of(x), _NO_CODES, _coding(FLOAT8[0]), array_of(factor.detach().contiguous())
    step = 64 // math.gcd(64, columns)  # rows whose random words begin with a counter's first
    some = max(_PIECE // (step * columns), 1) * step

    def part(start: int, stop: int) -> None:
        for first in range(start, stop, some):
            last = min(first + some, stop)
            size = (last - first) * columns
            y = scratch("scaled", size, np.float32) if scaled is None else array_of(scaled)[first:last].reshape(-1)
            how = *block, _DIVIDE if divides else _MULTIPLY, 1.0
            _times(*arrays, y.reshape(-1, columns), *how, first, last, first)
            target = out[first:last].view(-1)
            values = target if direct else torch.from_numpy(scratch("rounded", size, np.float32))
            cast(torch.from_numpy(y), values, first * columns, False)
            if not direct:
                target.copy_(values)

    pool.run(part, rows, step, columns)
    return True


def _empty(shape: torch.Size, buffer: str | None) -> torch.Tensor:
    if buffer is None:
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    return memory(buffer, shape, torch.float32)


def _row(t: torch.Tensor | None) -> np.ndarray:
    """Return the numbers of a vector as an array, empty for None."""
    return _NO_VALUES[0] if t is None else array_of(t.detach().reshape(-1).contiguous())


def widened(x: torch.Tensor, buffer: str | None = None) -> torch.Tensor:
    """Return float8_e4m3fn or float8_e5m2 as float32, NaN canonical but for its sign, in x's layout.

    ``buffer`` is that of ``times_blocks``.
    """
    if not x.is_contiguous() and x.dim() == 2 and x.mT.is_contiguous():
        return widened(x.mT, buffer).mT
    x = x.detach().contiguous()
    out = _empty(x.shape, buffer)
    codes, values, coding = array_of(x.view(torch.uint8)).reshape(-1), array_of(out).reshape(-1), _coding(x.dtype)
    pool.run(lambda start, stop: _from_codes(codes[start:stop], values[start:stop], coding), x.numel(), 64)
    return out


def _coding(dtype: torch.dtype) -> Coding:
    coding = coding_of(get_format(dtype))  # type: ignore[arg-type]
    assert coding is not None
    return coding._replace(nan_code=int32(0x7F))  # torch's


@kernel
def _times(x, codes, c, s, y, rows, columns, how, tensor_scale, start, stop, first_row):
    """Scale rows ``start ... stop - 1``; y begins with ``first_row``."""
    line = np.empty(y.shape[1], np.float32)
    for r in range(start, stop):
        block_scales, y_row = s[r // rows], y[r - first_row]
        # 1. the row as float32
        if codes.size:
            x_row = line
            for i in range(x_row.size):
                x_row[i] = value_of_code(codes[r, i], c)
        else:
            x_row = x[r]
        # 2. each element with the number of its column, or of its block
        if columns == 1:
            _row_times_row(x_row, block_scales, y_row, how, tensor_scale)
            continue
        for b in range(block_scales.size):
            first = b * columns
            _row_times(
                x_row[first : first + columns], block_scales[b], y_row[first : first + columns], how, tensor_scale
            )


@device
def _row_times_row(x, s, y, how, tensor_scale):
    if how == _MULTIPLY:
        for i in range(x.size):
            y[i] = x[i] * s[i]
    elif how == _DIVIDE:
        for i in range(x.size):
            y[i] = x[i] / s[i]
    else:
        for i in range(x.size):
            y[i] = float32(float64(x[i]) * float64(s[i]) * tensor_scale)


@device
def _row_times(x, s, y, how, tensor_scale):
    if how == _MULTIPLY:
        for i in range(x.size):
            y[i] = x[i] * s
    elif how == _DIVIDE:
        for i in range(x.size):
            y[i] = x[i] / s
    else:
        for i in range(x.size):
            y[i] = float32(float64(x[i]) * float64(s) * tensor_scale)


@kernel
def _finish(columns, rows, bias, y, start, stop):
    for r in range(start, stop):
        line = y[r]
        column = columns[0] if columns.size == 1 else float32(1)
        row = rows[r if rows.size > 1 else 0] if rows.size else float32(1)
        if columns.size > 1:
            for i in range(line.size):
                line[i] *= columns[i]
        for i in range(line.size):
            line[i] = line[i] * column * row
        if bias.size:
            for i in range(line.size):
                line[i] += bias[i]


@kernel
def _from_codes(codes, values, c):
    for i in range(codes.size):
        values[i] = value_of_code(codes[i], c)
