# SPDX-License-Identifier: Apache-2.0
"""sum, mean and the Euclidean norm in the order of PyTorch 2.11's reductions (Reduce.cuh) on a GPU of 132 SMs."""

import math

import numpy as np
import torch
from numpy import float32

from fmtsim.cpu.runtime.jit import fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine.arrays import add_strided, chain, from_f32, to_f32, tree
from fmtsim.machine.unknown import UnknownOrder

_THREADS, _WARP, _MULTIPROCESSORS, _THREADS_A_MULTIPROCESSOR = 512, 32, 132, 2048
_ACCUMULATORS = 4  # of a thread that loads single elements


# Blocks of `width` x `height` threads add, `blocks` of them for one result. A thread has accumulators, which are added
# in order; then threads along x by halving, along y by halving, then the blocks' results in the same way.


def _block(dim0: int, dim1: int, threads: int) -> tuple[int, int]:
    dim0, dim1 = (min(1 << (max(1, n).bit_length() - 1), threads) for n in (dim0, dim1))
    width = min(dim0, _WARP)
    height = min(dim1, threads // width)
    return min(dim0, threads // height), height


def _split(inputs: int, results: int, step: int, width: int, height: int, results_a_block: int) -> tuple[int, int]:
    """Return (rows of a block that share a result, blocks that share it): by how many elements a thread would add."""
    per_thread = math.ceil(inputs / step)
    if per_thread < min(height * 16, 256):
        return 1, 1
    per_thread = math.ceil(inputs / (step * height))
    grid = math.ceil(results / results_a_block)
    resident = _MULTIPROCESSORS * (_THREADS_A_MULTIPROCESSOR // (width * height))
    if per_thread < 256 or grid > resident:
        return height, 1
    return height, max(min(math.ceil(resident / grid), math.ceil(per_thread / 16)), math.ceil(per_thread / 256))


@kernel
def _add_last(x, starts, partial, threads, vector, loads, squares, start, stop):
    width = x.shape[1]
    for row in range(start, stop):
        # elements in front of the first vector
        head = (vector - starts[row]) % vector if loads else 0
        body = head + (width - head) // vector * vector if loads else width
        turn, done = threads * vector, 0
        if loads and head == 0:
            # whole turns of all threads, whose accumulators lie as the elements do
            sums = partial[row].reshape(turn)
            while done + turn <= body:
                for j in range(turn):
                    y = x[row, done + j]
                    sums[j] = fma32(y, y, sums[j]) if squares else sums[j] + y
                done += turn
        for j in range(done, width):
            if not loads:
                thread, accumulator = j % threads, (j // threads) % vector
            elif j < head:
                thread, accumulator = starts[row] + j, 0
            elif j < body:
                thread, accumulator = ((j - head) // vector) % threads, (j - head) % vector
            else:
                thread, accumulator = j - body, 0
            if squares:
                partial[row, thread, accumulator] = fma32(x[row, j], x[row, j], partial[row, thread, accumulator])
            else:
                partial[row, thread, accumulator] += x[row, j]


def sum_last(
    x_f32: np.ndarray, starts: np.ndarray, element_bytes: int, squares: bool = False, loads: bool = True
) -> np.ndarray:
    """Return float32 sums (of squares) of [results, inputs]; ``starts`` are the rows' first elements in memory.

    ``loads``: all elements of a sum lie one after the other.
    """
    results, inputs = x_f32.shape
    # 1. vectors of adjacent elements, up to the alignment and behind the last one by single elements
    vector = 1 if inputs < 128 or not loads else 4 if element_bytes == 4 else 8
    width, rows = _block(inputs // vector, results, _THREADS)
    height, blocks = _split(inputs, results, width, width, rows, 1)
    loads, accumulators = vector > 1, vector if vector > 1 else _ACCUMULATORS
    # 2. the accumulators of each thread
    threads = width * height * blocks
    partial = np.zeros((results, threads, accumulators), np.float32)
    shifts = starts % accumulators
    run(lambda i, j: _add_last(x_f32, shifts, partial, threads, accumulators, loads, squares, i, j), results, 1, inputs)
    # 3. accumulators, threads and blocks
    total = tree(tree(chain(partial).reshape(results, blocks, height, width)))
    if blocks == 1:
        return total[:, 0]
    return tree(tree(add_strided(total, width * height).reshape(-1, height, width)))


def sum_first(x_f32: np.ndarray) -> np.ndarray:
    """Return float32 sums of [inputs, results] over the rows."""
    inputs, results = x_f32.shape
    # 1. threads, which have a vector of adjacent results each
    vector = next(v for v in (4, 2, 1) if results % v == 0)
    width, rows_a_block = _block(results // vector, inputs, _THREADS // vector)
    height, blocks = _split(inputs, results // vector, 1, width, rows_a_block, width)
    # 2. the accumulators of each thread
    step = height * blocks
    steps = math.ceil(inputs / (_ACCUMULATORS * step))
    padded = np.zeros((steps * _ACCUMULATORS * step, results), np.float32)
    padded[:inputs] = x_f32
    turns = padded.reshape(steps, _ACCUMULATORS, blocks, height, results)
    total = turns[0].copy()
    for turn in turns[1:]:
        total += turn
    # 3. accumulators, threads and blocks
    for accumulator in total[1:]:
        total[0] += accumulator
    total = tree(np.moveaxis(total[0], 1, -1))  # [blocks, results]
    if blocks == 1:
        return total[0]
    steps = math.ceil(blocks / height)
    padded = np.zeros((steps * height, results), np.float32)
    padded[:blocks] = total
    rows = chain(np.moveaxis(padded.reshape(steps, height, results), 0, -1))
    return tree(np.moveaxis(rows, 0, -1))


def _last(x: torch.Tensor, axes: list[int], squares: bool) -> np.ndarray | None:
    """Return sums over innermost dimensions that lie one after the other in memory, None for another layout."""
    outer = x.ndim - len(axes)
    inner = 1
    for d in reversed(range(x.ndim)):
        if d in axes:
            if d < outer or (x.shape[d] > 1 and x.stride(d) != inner):
                return None
            inner *= x.shape[d]
    starts = torch.zeros(x.shape[:outer], dtype=torch.int64)
    for d in range(outer):
        positions = torch.arange(x.shape[d]).reshape([-1 if e == d else 1 for e in range(outer)])
        starts = starts + positions * x.stride(d)
    rows = to_f32(x).reshape(-1, inner)
    return sum_last(rows, starts.reshape(-1).numpy() + x.storage_offset(), x.element_size(), squares)


def reduce(x: torch.Tensor, dims: list[int] | None, keepdim: bool, mean: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum or mean of a tensor over dimensions, rounded once to a dtype.

    Raises:
        UnknownOrder: Dimensions or layout whose order of sums is not known.
    """
    axes = sorted({d % x.ndim for d in (dims or range(x.ndim))}) if x.ndim else []
    shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdim or d not in axes]
    if not x.numel():
        raise UnknownOrder("a sum of no elements")
    # dimensions of one element do not count
    axes, x = [sum(n > 1 for n in x.shape[:d]) for d in axes if x.shape[d] > 1], x.squeeze()
    count = math.prod(x.shape[d] for d in axes)
    if not axes:
        return from_f32(to_f32(x) + float32(0.0), dtype, shape)  # one element is added to a zero
    leading = list(range(len(axes)))
    total = _last(x, axes, False)
    # fewer than 16 rows: a thread has all of them, whichever it is
    regular = x.is_contiguous() or x.shape[-1] % 4 == 0 or count < 16
    if total is None and axes == leading and len(axes) < x.ndim and regular:
        # rows in the order in which they lie in memory
        strides = x.stride()
        order = sorted(leading, key=lambda d: -strides[d]) + list(range(len(axes), x.ndim))
        total = sum_first(np.ascontiguousarray(to_f32(x).transpose(order)).reshape(count, -1))
    elif total is None and count <= 4 and len(axes) == 1:
        total = chain(np.moveaxis(to_f32(x), axes[0], -1))
    if total is None and x.ndim - len(axes) == 1 and x.is_contiguous():
        # all dimensions but one, which lies between them in memory: a convolution's bias gradient
        stays = next(d for d in range(x.ndim) if d not in axes)
        rows = np.ascontiguousarray(np.moveaxis(to_f32(x), stays, 0).reshape(x.shape[stays], -1))
        total = sum_last(rows, np.zeros(len(rows), np.int64), x.element_size(), loads=False)
    if total is None:
        raise UnknownOrder(f"a sum over dimensions {axes} of {tuple(x.shape)}, strides {x.stride()}")
    total = total + float32(0.0)  # threads begin with zeros: no sum is -0
    if mean:
        total = total * (float32(1.0) / float32(count))  # a factor, no division
    return from_f32(total, dtype, shape)


def vector_norm(
    x: torch.Tensor, order: float, dims: list[int] | None, keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Return the Euclidean norm over the last dimensions.

    Raises:
        UnknownOrder: Another norm, other dimensions, or a layout that is not contiguous.
    """
    if order != 2 or not x.numel():
        raise UnknownOrder("a norm of another order")
    axes = sorted({d % x.ndim for d in (dims or range(x.ndim))}) if x.ndim else []
    if math.prod(x.shape[d] for d in axes) == 1:
        return x.abs().reshape(x.shape if keepdim else [n for d, n in enumerate(x.shape) if d not in axes]).to(dtype)
    total = _last(x, axes, True)
    if total is None or (len(axes) == x.ndim and not x.is_contiguous()):
        raise UnknownOrder(f"a norm over dimensions {axes} of {tuple(x.shape)}, strides {x.stride()}")
    shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdim or d not in axes]
    return from_f32(np.sqrt(total), dtype, shape)
