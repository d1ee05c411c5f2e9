# SPDX-License-Identifier: Apache-2.0
"""Hadamard transforms by Sylvester's matrices (fmtsim/scaling/hadamard.py defines every bit).

Along rows neighbours are a vector: the partner of a lane is another lane of it. Down columns a panel of 64 columns
is transformed row by row in a buffer, from which it is stored row by row or transposed.
"""

import numpy as np
import torch
from numpy import float32, int32, int64

from fmtsim.cpu.runtime import pool, simd
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.cpu.runtime.pool import array_of, scratch

_LANES, _COLUMNS = simd.LANES, simd.COLUMNS
_LARGEST = 4096  # elements of a group
_SIGN, _INF, _NAN = int32(-(1 << 31)), int32(0x7F800000), int32(0x7FC00000)
# The sign of lanes whose partner comes before them: they take the difference.
_UPPER = np.array(
    [[_SIGN if lane & h else 0 for lane in range(_LANES)] for h in (1, 2, 4, 8, 16, 32)], np.int32
).reshape(-1)


def hadamard(x: torch.Tensor, size: int, dim: int, flips: torch.Tensor | None, inverse: bool) -> torch.Tensor | None:
    """Return the transform of every group along a dimension: float32, contiguous, NaN canonical.

    Args:
        x: A matrix; of more dimensions where groups run along the last.
        size: Elements of a group; divides the dimension.
        dim: -1 or -2.
        flips: bool [size], elements that change their sign; None is none.
        inverse: Change signs behind the transform.

    Returns:
        None where no kernel serves: for sizes other than the powers of two from 2 to 4096, and other dimensions.
    """
    if not 2 <= size <= _LARGEST or size & (size - 1) or not x.numel():
        return None
    x = x.detach()
    if x.dim() != 2:
        flat = x.reshape(-1, x.shape[-1]) if dim == -1 else None
        y = None if flat is None else hadamard(flat, size, dim, flips, inverse)
        return None if y is None else y.view(x.shape)
    out = x.new_empty(x.shape, dtype=torch.float32)
    transposed = not x.is_contiguous() and x.mT.is_contiguous()
    source = (x.mT if transposed else x).float().contiguous()
    signs = np.zeros(max(size, _COLUMNS), np.int32)
    if flips is not None:
        signs[:] = np.where(np.resize(flips.numpy(), signs.size), _SIGN, 0)
    none = np.zeros_like(signs)
    before, after = (none, signs) if inverse else (signs, none)
    arrays, factor = (array_of(source), array_of(out)), np.float32(1 / np.sqrt(size))
    if (dim == -1) != transposed:  # groups are neighbours in memory
        rows = arrays[0].reshape(-1), (arrays[1] if not transposed else np.empty_like(arrays[0])).reshape(-1)
        width = max(size, _LANES)
        groups = -(-rows[0].size // width)
        pool.run(lambda *ends: _rows(*rows, size, before, after, _UPPER, factor, *ends), groups, 1, width)
        return out if not transposed else out.copy_(torch.from_numpy(rows[1].reshape(source.shape)).mT)

    height = max(size, _COLUMNS)  # of a panel: a transposed one is then stored in whole cache lines

    def part(start: int, stop: int) -> None:
        panel = scratch("panel", height * _COLUMNS, np.float32)
        _columns(*arrays, transposed, size, height, before, after, panel, factor, start, stop)

    panels = -(-source.shape[0] // height) * -(-source.shape[1] // _COLUMNS)
    pool.run(part, panels, 1, height * _COLUMNS)
    return out


@kernel
def _rows(x, y, size, before, after, upper, factor, start, stop):
    """Transform pieces of a vector, or of a group where that is longer."""
    width = max(size, _LANES)
    source, result = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for piece in range(start, stop):
        first = piece * width
        if first + width > x.size:  # groups are short: their last ones
            count = x.size - first
            source[:] = float32(0)
            source[:count] = x[first:]
            _finished(result, 0, _in_vector(source, 0, size, before, 0, upper), after, 0, factor)
            y[first:] = result[:count]
        elif size <= _LANES:
            _finished(y, first, _in_vector(x, first, size, before, 0, upper), after, 0, factor)
        else:
            for i in range(0, size, _LANES):
                simd.store(y, first + i, _in_vector(x, first + i, size, before, i, upper))
            _far(y[first : first + size], size)
            for i in range(0, size, _LANES):
                _finished(y, first + i, simd.load(y, first + i), after, i, factor)


@device
def _in_vector(x, first, size, before, place, upper):
    """Return a vector after the additions within it."""
    v = simd.as_f32(simd.xor(simd.as_i32(simd.load(x, first)), simd.load(before, place)))  # signs
    v = _pair(simd.swap1(v), v, upper, 0)
    if size > 2:
        v = _pair(simd.swap2(v), v, upper, 1)
    if size > 4:
        v = _pair(simd.swap4(v), v, upper, 2)
    if size > 8:
        v = _pair(simd.swap8(v), v, upper, 3)
    if size > 16 and _LANES > 16:
        v = _pair(simd.swap16(v), v, upper, 4)
    if size > 32 and _LANES > 32:
        v = _pair(simd.swap32(v), v, upper, 5)
    return v


@device
def _pair(partner, v, upper, step):
    """Return sums in lower lanes and differences in upper ones: a partner plus the negative."""
    return simd.fadd(partner, simd.as_f32(simd.xor(simd.as_i32(v), simd.load(upper, step * _LANES))))


@device
def _far(y, size):
    """Do the additions between vectors."""
    distance = _LANES
    while distance < size:
        for i in range(0, size, 2 * distance):
            for j in range(i, i + distance, _LANES):
                a, b = simd.load(y, j), simd.load(y, j + distance)
                simd.store(y, j, simd.fadd(a, b))
                simd.store(y, j + distance, simd.fsub(a, b))
        distance *= 2


@device
def _finished(y, first, v, after, place, factor):
    """Write a vector times the factor, with their signs; NaN is the canonical one."""
    v = simd.fmul(v, simd.splat(factor))
    bits = simd.xor(simd.as_i32(v), simd.load(after, place))
    nan = simd.splat(_NAN)
    magnitude = simd.and_(bits, simd.splat(int32(0x7FFFFFFF)))
    simd.store(y, first, simd.as_f32(simd.where_below(simd.splat(_INF), magnitude, nan, bits)))


@kernel
def _columns(x, y, transposed, size, height, before, after, panel, factor, start, stop):
    """Transform panels of 64 columns, and as many rows but for the last ones; groups are ``size`` of them."""
    across = (x.shape[1] + 63) // 64
    for item in range(start, stop):
        first_row, first_column = item // across * height, item % across * 64
        rows, width = min(height, x.shape[0] - first_row), min(64, x.shape[1] - first_column)
        # 1. load, with the signs of a forward transform
        for k in range(rows):
            line, sign = panel[64 * k : 64 * k + 64], before[k]
            row = x[first_row + k, first_column : first_column + width]
            for j in range(row.size):
                line[j] = float32_of(bits32(row[j]) ^ sign)
        # 2. butterflies: rows whose indices differ in one bit
        distance = 1
        while distance < size:
            for i in range(0, rows, 2 * distance):
                for j in range(64 * i, 64 * (i + distance), _LANES):
                    a, b = simd.load(panel, j), simd.load(panel, j + 64 * distance)
                    simd.store(panel, j, simd.fadd(a, b))
                    simd.store(panel, j + 64 * distance, simd.fsub(a, b))
            distance *= 2
        # 3. times 1 / sqrt(size), the signs of an inverse transform, canonical NaN
        for k in range(rows):
            line, sign = panel[64 * k : 64 * k + 64], after[k]
            for j in range(64):
                value = float32_of(bits32(float32(line[j] * factor)) ^ sign)
                line[j] = value if value == value else float32_of(_NAN)
        # 4. store
        if transposed:
            for j in range(int64(width)):
                row = y[first_column + j, first_row : first_row + rows]
                for k in range(row.size):
                    row[k] = panel[64 * k + j]
        else:
            for k in range(rows):
                y[first_row + k, first_column : first_column + width] = panel[64 * k : 64 * k + width]
