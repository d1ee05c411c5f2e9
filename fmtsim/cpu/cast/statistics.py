# SPDX-License-Identifier: Apache-2.0
"""Statistics of the blocks of a matrix: largest magnitudes, and means (fmtsim/scaling/blocks.py defines them)."""

import numpy as np
import torch
from numpy import float32, float64, int32

from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel, max32, subroutine
from fmtsim.cpu.runtime.pool import array_of, scratch
from fmtsim.formats.scaling import Statistic

_MAGNITUDE, _INF = int32(0x7FFFFFFF), int32(0x7F800000)
_STD, _RMS, _MEAN_ABS = range(3)
_LONGEST = 1024  # elements of a block whose sums stay in the first-level cache


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest finite magnitude of each block, 0 where there is none: float32 [blocks, blocks].

    Args:
        x: A float32 matrix.
        block: Rows and columns of a block; those at the edges may have fewer.
    """
    if not x.is_contiguous() and x.mT.is_contiguous():
        return block_amax(x.mT, block[::-1]).mT
    x, (rows, columns) = x.detach().contiguous(), block
    if rows >= x.shape[0] and columns >= x.shape[1]:
        flat, parts = array_of(x).reshape(-1), []
        pool.run(lambda start, stop: parts.append(finite_amax(flat[start:stop])[0]), flat.size, 64)
        return x.new_full((1, 1), float(max(parts, default=0)))
    amax = x.new_empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    matrix, out = array_of(x), array_of(amax).view(np.int32)

    def part(start: int, stop: int) -> None:
        _block_amax(matrix, out, scratch("largest", x.shape[1], np.int32), rows, columns, start, stop)

    pool.run(part, len(out), 1, rows * x.shape[1])
    return amax


def block_means(x: torch.Tensor, block: tuple[int, int], kind: Statistic) -> torch.Tensor | None:
    """Return the root mean square, mean magnitude or standard deviation of each block, as ``statistic`` defines them.

    Args:
        x: A float32 matrix.
        block: Rows and columns of a block.
        kind: ``"std"``, ``"rms"`` or ``"mean_abs"``.

    Returns:
        float32 [rows, blocks]; None where no kernel serves: it takes whole blocks of one row and of a power of two.
    """
    rows, columns = block
    if rows != 1 or columns & (columns - 1) or columns > _LONGEST or x.shape[1] % columns:
        return None
    x = x.detach().contiguous()
    means = x.new_empty(x.shape[0], x.shape[1] // columns)
    flat, out = array_of(x).reshape(-1), array_of(means).reshape(-1)
    which = {"std": _STD, "rms": _RMS, "mean_abs": _MEAN_ABS}[kind]
    pool.run(lambda start, stop: _means(flat, out, columns, which, start, stop), out.size, 1, columns)
    return means


@kernel
def finite_amax(x):
    """Return the largest finite magnitude of float32 x, and whether it holds NaN or Inf."""
    top = int32(0)
    for i in range(x.size):
        top = max32(top, bits32(x[i]) & _MAGNITUDE)
    if top < _INF:
        return float32_of(top), False
    top = int32(0)
    for i in range(x.size):  # seldom: look again, at finite elements alone
        bits = bits32(x[i]) & _MAGNITUDE
        top = max32(top, bits if bits < _INF else int32(0))
    return float32_of(top), True


@kernel
def _block_amax(x, out, largest, rows, columns, start, stop):
    for b in range(start, stop):
        first, last = b * rows, min((b + 1) * rows, x.shape[0])
        if columns == 1:
            _raise(x, largest, first, last)
            out[b] = largest
            continue
        if rows == 1:
            line = x[b]
            for j in range(out.shape[1]):
                part, top = line[j * columns : (j + 1) * columns], int32(0)
                for i in range(part.size):
                    size = bits32(part[i]) & _MAGNITUDE
                    top = max32(top, size if size < _INF else int32(0))
                out[b, j] = top
            continue
        _raise(x, largest, first, last)
        for j in range(out.shape[1]):
            part, top = largest[j * columns : (j + 1) * columns], int32(0)
            for i in range(part.size):
                top = max32(top, part[i])
            out[b, j] = top


@device
def _raise(x, largest, first, last):
    """Write the largest finite magnitude of each column of some rows."""
    largest[:] = 0
    for row in range(first, last):
        line = x[row]
        for i in range(line.size):
            size = bits32(line[i]) & _MAGNITUDE
            largest[i] = max32(largest[i], size if size < _INF else int32(0))


@kernel
def _means(x, out, size, which, start, stop):
    y = np.empty(size, np.float64)
    for b in range(start, stop):
        # 1. how many elements are finite
        part, has_others = x[b * size : (b + 1) * size], int32(0)
        for i in range(part.size):
            has_others |= int32((bits32(part[i]) & _MAGNITUDE) >= _INF)
        count, mean = _finite(part) if has_others else size, 0.0
        n = float64(max(count, 1))
        # 2. distances from the mean, or from zero
        if which == _STD:
            _spread(part, 0.0, y)
            _clear(part, y, has_others)
            mean = _folded(y) / n
        _spread(part, mean, y)
        _clear(part, y, has_others)
        # 3. the mean of their magnitudes, or the root of that of their squares
        for i in range(y.size):
            y[i] = abs(y[i]) if which == _MEAN_ABS else y[i] * y[i]
        mean = _folded(y) / n
        out[b] = float32(mean if which == _MEAN_ABS else np.sqrt(mean))


@device
def _spread(x, mean, y):
    """Write the distances of elements from a mean."""
    for i in range(y.size):
        y[i] = float64(x[i]) - mean


@subroutine
def _finite(x):
    """Return how many elements are finite."""
    count = 0
    for value in x:
        count += (bits32(value) & _MAGNITUDE) < _INF
    return count


@device
def _clear(x, y, has_others):
    """Set y to zero where x is not finite."""
    if has_others:
        for i in range(y.size):
            y[i] = y[i] if (bits32(x[i]) & _MAGNITUDE) < _INF else 0.0


@device
def _folded(y):
    """Add elements at half the length's distance until one is left; y, of a power of two, is used up."""
    half = y.size // 2
    while half:
        for i in range(half):
            y[i] += y[i + half]
        half //= 2
    return y[0]
