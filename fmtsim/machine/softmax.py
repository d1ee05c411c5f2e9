# SPDX-License-Identifier: Apache-2.0
"""softmax and log_softmax, forward and backward, in the order of PyTorch 2.11's kernels."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy import float32, int64

from fmtsim.cpu.runtime.jit import device, fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library
from fmtsim.machine.arrays import (
    SHIFTED,
    STRIDED,
    VECTORS,
    add_halves,
    add_in_order,
    add_threads,
    from_f32,
    slot_of,
    to_f32,
)

_PIECE = 1 << 20  # elements of rows that are float32 at once
_REGISTERS, _SHARED_BYTES = 9216, 49152  # widths of the kernel in registers; of a block's shared memory
WARPS, IN_ORDER, HALVES = 0, 1, 2  # how partial sums of threads are added: add_threads, add_in_order, add_halves


class RowPlan(NamedTuple):
    """Which thread adds which element of a row: see ``arrays.slot_of``; and how threads are added."""

    mode: int
    threads: int
    vector: int
    element_bytes: int  # a row's misalignment to 16 bytes is what SHIFTED starts with
    combine: int = WARPS


def forward_plan(width: int, element_bytes: int, converts: bool = False) -> RowPlan:
    """Return the order of a forward sum: a warp a row to 2048, registers of 1024 threads, then shifted vectors.

    ``converts``: float16 to float32 in the kernel, which has a warp a row to 1024, and no form in registers.
    """
    vector = 16 // element_bytes
    if width <= (1024 if converts else 2048):
        return RowPlan(STRIDED, 32, 1, element_bytes)
    if width <= _REGISTERS and not converts:
        return RowPlan(STRIDED, 1024, 1, element_bytes)
    if width % vector == 0 and width < (_SHARED_BYTES - 32 * 4) // element_bytes:
        return RowPlan(VECTORS, 1024, vector, element_bytes)
    return RowPlan(SHIFTED, 1024, vector, element_bytes)


def backward_plan(width: int, element_bytes: int) -> RowPlan:
    """Return the order of a backward sum: a warp a row to 1024, then vectors of a block."""
    if width <= 1024:
        return RowPlan(STRIDED, 32, 1, element_bytes)
    vector = 16 // element_bytes
    threads, half = 1, min(width // vector, 1024) // 2
    while threads < half:
        threads *= 2
    threads = max(threads, 32)
    if width % vector == 0 and width < (_SHARED_BYTES - threads // 32 * 4) // element_bytes:
        return RowPlan(VECTORS, threads, vector, element_bytes)
    return RowPlan(SHIFTED, threads, vector, element_bytes, IN_ORDER)


def spatial_plan(width: int, inner: int, element_bytes: int) -> RowPlan:
    """Return the order of sums over a dimension in front of an inner size above 1: up to 1024 threads share a block."""
    threads = 1
    while inner <= 64 <= width and inner * threads * 2 <= 1024 and threads * 2 <= width:
        threads *= 2
    return RowPlan(STRIDED, threads, 1, element_bytes, HALVES)


@device
def _add(partial, threads, combine):
    if combine == WARPS:
        return add_threads(partial, int64(threads))
    return add_in_order(partial, threads) if combine == IN_ORDER else add_halves(partial, int64(threads))


@kernel
def _forward(x, y, log, mode, threads, vector, element_bytes, combine, start, stop):
    width = x.shape[1]
    partial = np.empty(1024, np.float32)
    for row in range(start, stop):
        # 1. the largest element: the kernels start at -FLT_MAX; a NaN is not larger
        largest = float32(-np.inf)
        for j in range(width):
            largest = x[row, j] if x[row, j] > largest else largest
        # 2. the sum of exp(x - largest), a thread after the other
        shift = (row * width * element_bytes % 16) // element_bytes
        partial[:threads] = float32(0.0)
        for j in range(width):
            term = library.exp(x[row, j] - largest)
            y[row, j] = term
            partial[slot_of(j, width, mode, threads, vector, shift)] += term
        total = _add(partial, threads, combine)
        # 3. exp(x - largest) / total, or (x - largest) - log(total)
        if log:
            logarithm = library.log(total)
            for j in range(width):
                y[row, j] = (x[row, j] - largest) - logarithm
        else:
            for j in range(width):
                y[row, j] = y[row, j] / total


@kernel
def _backward(g, y, dx, log, mode, threads, vector, element_bytes, combine, start, stop):
    width = g.shape[1]
    partial = np.empty(1024, np.float32)
    for row in range(start, stop):
        shift = (row * width * element_bytes % 16) // element_bytes
        partial[:threads] = float32(0.0)
        for j in range(width):
            partial[slot_of(j, width, mode, threads, vector, shift)] += g[row, j]
        total = _add(partial, threads, combine)
        for j in range(width):
            if log:
                dx[row, j] = fma32(-library.exp(y[row, j]), total, g[row, j])
            else:
                dx[row, j] = fma32(-y[row, j], total, g[row, j])


def forward(x: torch.Tensor, log: bool, dtype: torch.dtype, plan: RowPlan | None = None) -> torch.Tensor:
    """Return softmax (log_softmax) of a contiguous tensor's last dimension, rounded once to a dtype."""
    order = plan or forward_plan(x.shape[-1], x.element_size(), x.dtype != dtype)
    rows, y = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=dtype)
    for piece in _pieces(rows):
        x_f32 = to_f32(rows[piece])
        y_f32 = np.empty_like(x_f32)
        run(lambda i, j: _forward(x_f32, y_f32, log, *order, i, j), len(x_f32), 1, 8 * x_f32.shape[1])  # noqa: B023
        y.view(rows.shape)[piece] = from_f32(y_f32, dtype)
    return y


def _pieces(rows: torch.Tensor) -> Iterator[slice]:
    """Yield rows whose float32 values take some 4 MB, a multiple of 16 of them: as many are aligned as the first is."""
    step = max(_PIECE // rows.shape[1] // 16, 1) * 16
    yield from (slice(start, start + step) for start in range(0, len(rows), step))


def backward(
    g: torch.Tensor, y: torch.Tensor, log: bool, dtype: torch.dtype, plan: RowPlan | None = None
) -> torch.Tensor:
    """Return the gradient of softmax's (log_softmax's) input from that of its result y."""
    order = plan or backward_plan(y.shape[-1], g.element_size())
    gradients, results = g.reshape(-1, y.shape[-1]), y.reshape(-1, y.shape[-1])
    dx = torch.empty(y.shape, dtype=dtype)
    for piece in _pieces(results):
        # softmax: torch first multiplies g by y, rounded to their dtype
        g_f32 = to_f32(gradients[piece] if log else gradients[piece] * results[piece])
        y_f32, dx_f32 = to_f32(results[piece]), np.empty_like(g_f32)
        call = lambda i, j: _backward(g_f32, y_f32, dx_f32, log, *order, i, j)  # noqa: B023, E731
        run(call, len(y_f32), 1, 8 * y_f32.shape[1])
        dx.view(results.shape)[piece] = from_f32(dx_f32, dtype)
    return dx
