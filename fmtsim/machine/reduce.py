# SPDX-License-Identifier: Apache-2.0
"""Sums, means, norms and variances in the order of PyTorch 2.11's reductions (Reduce.cuh) on a GPU of 132 SMs."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy import float32

from fmtsim.cpu.runtime.jit import device, fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library
from fmtsim.machine.arrays import SIXTEEN_BITS, add_strided, apply, from_f32, to_f32, tree
from fmtsim.machine.unknown import UnknownOrder

_THREADS, _WARP, _MULTIPROCESSORS, _THREADS_A_MULTIPROCESSOR = 512, 32, 132, 2048
_MOST_BYTES = (1 << 31) - 1  # of an operand; PyTorch cuts larger ones


class Plan(NamedTuple):
    """Blocks of ``width`` x ``height`` threads add, ``blocks`` of them for one result.

    A thread has accumulators, which are added in order; then threads along x by halving, along y by halving, then the
    blocks' results. Elements are dealt in turns of ``accumulators`` for each thread: one after the other by vectors
    (``loads``), or the first accumulators of all threads, then their second ones.
    """

    width: int
    height: int = 1
    blocks: int = 1
    accumulators: int = 1
    loads: bool = False


def _sorted(shape: list[int], x: list[int], y: list[int]) -> list[int]:
    """Return dimensions, innermost first, in TensorIterator's order: reduced ones (no stride in y), then by stride."""

    def compare(a: int, b: int) -> int:
        if (y[a] == 0) != (y[b] == 0):
            return 1 if y[b] == 0 else -1
        for strides in (y, x):
            if strides[a] and strides[b]:
                if strides[a] != strides[b]:
                    return 1 if strides[a] > strides[b] else -1
                if shape[a] > shape[b]:
                    return 1
        return 0  # broadcast: either order

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        moved = i
        for other in range(i - 1, -1, -1):
            comparison = compare(order[other], order[moved])
            if comparison < 0:
                break
            if comparison > 0:
                order[other], order[moved], moved = order[moved], order[other], other
    return order


def _merged(shape: list[int], x: list[int], y: list[int], order: list[int]) -> list[list[int]]:
    """Return [extent, stride in x, stride in y] of dimensions, innermost first; those that lie as one are one."""
    merged: list[list[int]] = []
    for d in order:
        inner = merged[-1] if merged else [0, 0, 0]
        one = inner[0] == 1 or shape[d] == 1
        if merged and (one or (inner[0] * inner[1] == x[d] and inner[0] * inner[2] == y[d])):
            if inner[0] == 1:
                inner[1:] = x[d], y[d]
            inner[0] *= shape[d]
        else:
            merged.append([shape[d], x[d], y[d]])
    return merged


def _plan(dims: list[list[int]], offset: int, vector: int, accumulators: int) -> Plan:
    """Return the threads of a reduction over ``_merged`` dimensions; x begins at an offset of its storage."""
    reduced = sum(y == 0 for _, _, y in dims)
    inputs, results = math.prod(n for n, _, y in dims if y == 0), math.prod(n for n, _, y in dims if y)
    # 1. block.x lies along the dimension of x that moves fastest
    inner = reduced == len(dims) or dims[0][1] < dims[reduced][1]
    extent, other, fastest = (inputs, results, dims[0][1]) if inner else (results, inputs, dims[reduced][1])
    # 2. vectors of adjacent elements of a sum, or of adjacent results
    loads, outputs = inner and fastest == 1 and extent >= 128 and reduced == 1, 1
    if loads:
        extent //= vector
    elif not inner and fastest == 1:
        strides = [x for d, (_, x, _) in enumerate(dims) if d != reduced]
        outputs = next(v for v in (4, 2, 1) if all(n % v == 0 for n in (offset, dims[reduced][0], *strides)))
        extent //= outputs
    threads = _THREADS // outputs
    width, height = (min(1 << (max(1, n).bit_length() - 1), threads) for n in (extent, other))
    limit = min(width, _WARP)
    height = min(height, threads // limit)
    width = min(width, threads // height)
    # 3. rows of a block share a result if enough is left for each thread, then blocks do
    step, results_a_block, blocks = width if inner else 1, 1 if inner else width, 1
    shared = math.ceil(inputs / step) >= min(height * 16, 256)
    per_thread = math.ceil(inputs / (step * height))
    grid = math.ceil(results // outputs / results_a_block)
    resident = _MULTIPROCESSORS * (_THREADS_A_MULTIPROCESSOR // (width * height))
    if shared and per_thread >= 256 and grid <= resident:
        blocks = max(min(math.ceil(resident / grid), math.ceil(per_thread / 16)), math.ceil(per_thread / 256))
    return Plan(width if inner else 1, height if shared else 1, blocks, vector if loads else accumulators, loads)


@kernel
def _add_rows(x, z, products, starts, partial, vector, start, stop):
    width, turn = x.shape[1], partial.shape[1]
    for row in range(start, stop):
        # elements in front of the first vector are the first accumulators', those behind the last one, too
        head = (vector - starts[row]) % vector
        body = head + (width - head) // vector * vector
        sums = partial[row]
        for j in range(head):
            y = x[row, j]
            sums[(starts[row] + j) * vector] += y * z[row, j] if products else y
        for first in range(head, body, turn):
            for j in range(min(turn, body - first)):
                y = x[row, first + j]
                sums[j] = fma32(y, z[row, first + j], sums[j]) if products else sums[j] + y
        for j in range(body, width):
            y, i = x[row, j], (j - body) * vector
            sums[i] = fma32(y, z[row, j], sums[i]) if products else sums[i] + y


@kernel
def _add_columns(x, z, products, partial, start, stop):
    turn = len(partial)
    for row in range(len(x)):
        sums = partial[row % turn]
        for j in range(start, stop):
            y = x[row, j]
            sums[j] = fma32(y, z[row, j], sums[j]) if products else sums[j] + y


def sums(
    x_f32: np.ndarray, plan: Plan, factors_f32: np.ndarray | None = None, starts: np.ndarray | None = None
) -> np.ndarray:
    """Return float32 sums over the columns of [results, inputs], of products with factors if given, each fused.

    ``starts`` are the places in memory of the rows' first elements, which vectors ask for.
    """
    results, inputs = x_f32.shape
    width, height, blocks, accumulators, loads = plan
    turn, threads, products = width * height * blocks * accumulators, (blocks, height, width), factors_f32 is not None
    z_f32 = x_f32 if factors_f32 is None else factors_f32
    # 1. the accumulators of each thread
    if width == 1 and not loads:
        partial = np.zeros((turn, results), np.float32)
        x, z = (np.ascontiguousarray(a.T) for a in (x_f32, z_f32))
        run(lambda i, j: _add_columns(x, z, products, partial, i, j), results, 16, inputs)
        parts = np.moveaxis(partial.reshape(accumulators, *threads, results), -1, 1)
    else:
        partial = np.zeros((results, turn), np.float32)
        x, z, vector = np.ascontiguousarray(x_f32), np.ascontiguousarray(z_f32), accumulators if loads else 1
        shifts = np.zeros(results, np.int64) if starts is None else starts % vector
        run(lambda i, j: _add_rows(x, z, products, shifts, partial, vector, i, j), results, 1, inputs)
        shape = (results, *threads, accumulators) if loads else (results, accumulators, *threads)
        parts = np.moveaxis(partial.reshape(shape), -1 if loads else 1, 0)
    with np.errstate(all="ignore"):
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
    # 2. threads and blocks; the last block adds what all left, y first
    total = tree(tree(total))
    if blocks == 1:
        return total[:, 0]
    lanes = add_strided(total, width * height).reshape(results, height, width)
    return tree(tree(lanes.swapaxes(1, 2)))


@device
def _merge(mean, m2, count, into, other):
    """Merge Welford's moments of one thread into another's."""
    if count[into] == 0 or count[other] == 0:
        if count[into] == 0:
            mean[into], m2[into], count[into] = mean[other], m2[other], count[other]
        return
    total = count[into] + count[other]
    delta, share = mean[other] - mean[into], count[other] / total
    mean[into] = fma32(delta, share, mean[into])
    m2[into] = fma32(delta * delta * count[into], share, m2[into] + m2[other])
    count[into] = total


@device
def _halve(mean, m2, count, first, stride, n):
    """Merge n threads that lie a stride apart: thread i gets thread i + n / 2, then i + n / 4 ..."""
    while n > 1:
        n //= 2
        for i in range(n):
            _merge(mean, m2, count, first + i * stride, first + (i + n) * stride)


@kernel
def _add_moments(x, starts, width, height, blocks, accumulators, loads, means, squares, start, stop):
    inputs, block = x.shape[1], width * height
    threads, vector = block * blocks, accumulators if loads else 1
    turn = threads * accumulators
    mean, m2, count = np.empty(turn, np.float32), np.empty(turn, np.float32), np.empty(turn, np.float32)
    for row in range(start, stop):
        mean[:], m2[:], count[:] = float32(0.0), float32(0.0), float32(0.0)
        head = (vector - starts[row]) % vector
        body = head + (inputs - head) // vector * vector
        # 1. Welford's update by each accumulator: as _add_rows deals the elements
        for j in range(inputs):
            i = (j - head) % turn if head <= j < body else (starts[row] + j if j < head else j - body) * vector
            count[i] += float32(1.0)
            delta = x[row, j] - mean[i]
            mean[i] += delta / count[i]
            m2[i] = fma32(delta, x[row, j] - mean[i], m2[i])
        # 2. a thread's accumulators; its result moves to its place
        for thread in range(threads):
            for a in range(1, accumulators):
                into, other = (thread * vector, thread * vector + a) if loads else (thread, thread + a * threads)
                _merge(mean, m2, count, into, other)
            i = thread * vector
            mean[thread], m2[thread], count[thread] = mean[i], m2[i], count[i]
        # 3. threads along x, along y, then blocks
        for line in range(blocks * height):
            _halve(mean, m2, count, line * width, 1, width)
        for b in range(blocks):
            _halve(mean, m2, count, b * block, width, height)
            mean[b], m2[b], count[b] = mean[b * block], m2[b * block], count[b * block]
        if blocks > 1:
            count[blocks : max(blocks, block)] = float32(0.0)
            for b in range(block, blocks):
                _merge(mean, m2, count, b % block, b)
            for column in range(width):
                _halve(mean, m2, count, column, width, height)
            _halve(mean, m2, count, 0, 1, width)
        means[row], squares[row] = mean[0], m2[0]


def moments(x_f32: np.ndarray, plan: Plan, starts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the means and the sums of squared differences from them, over the columns of [results, inputs]."""
    x, shifts = np.ascontiguousarray(x_f32), np.zeros(len(x_f32), np.int64)
    shifts = shifts if starts is None or not plan.loads else starts % plan.accumulators
    means, squares = np.empty(len(x), np.float32), np.empty(len(x), np.float32)
    run(lambda i, j: _add_moments(x, shifts, *plan, means, squares, i, j), len(x), 1, 8 * x.shape[1])
    return means, squares


def _arranged(
    x: torch.Tensor, dims: list[int] | None, keepdim: bool, accumulators: int = 4, vector: int | None = None
) -> tuple[np.ndarray, np.ndarray, Plan, Callable[[np.ndarray, torch.dtype], torch.Tensor]]:
    """Return x as float32 [results, inputs], the rows' places in memory, how threads add, and what shapes results.

    Raises:
        UnknownOrder: No elements, or more bytes than PyTorch takes at once.
    """
    axes = {d % x.ndim for d in (dims or range(x.ndim))} if x.ndim else set()
    shape, strides = list(x.shape), list(x.stride())
    if not x.numel():
        raise UnknownOrder("a sum of no elements")
    if (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * x.element_size() > _MOST_BYTES:
        raise UnknownOrder("a sum of more than 2^31 bytes")
    # strides of a contiguous result, none where it is reduced
    y, step = [0] * x.ndim, 1
    for d in reversed(range(x.ndim)):
        if d not in axes or (keepdim and shape[d] == 1):
            y[d] = step
        step *= 1 if d in axes else shape[d]
    order = _sorted(shape, strides, y)
    vector = vector or (8 if x.dtype in SIXTEEN_BITS else 4)
    plan = _plan(_merged(shape, strides, y, order) or [[1, 1, 0]], int(x.storage_offset()), vector, accumulators)
    kept, summed = ([d for d in reversed(order) if (d in axes) is chosen] for chosen in (False, True))
    extents = [shape[d] for d in kept]
    starts = torch.full(extents, int(x.storage_offset()))
    for i, d in enumerate(kept):
        starts += (torch.arange(shape[d]) * strides[d]).reshape([-1 if e == i else 1 for e in range(len(kept))])
    result = [1 if d in axes else n for d, n in enumerate(shape) if keepdim or d not in axes]

    def tensor(total_f32: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        back = [kept.index(d) for d in sorted(kept)]
        return from_f32(total_f32.reshape(extents).transpose(back), dtype, result)

    rows = x.permute(kept + summed).reshape(starts.numel(), -1)
    x_f32 = to_f32(rows.T).T if plan.width == 1 else to_f32(rows)  # columns lie as they are added
    return x_f32, starts.reshape(-1).numpy(), plan, tensor


def reduce(x: torch.Tensor, dims: list[int] | None, keepdim: bool, mean: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum or mean of a tensor over dimensions, rounded once to a dtype.

    16 bits are added as they are into float32; to any other dtype x is converted first.

    Raises:
        UnknownOrder: float64, no elements, or more than 2^31 bytes.
    """
    x = x if x.dtype == dtype or (x.dtype in SIXTEEN_BITS and dtype == torch.float32) else x.to(dtype)
    x_f32, starts, plan, tensor = _arranged(x, dims, keepdim)
    total = sums(x_f32, plan, None, starts) + float32(0.0)  # threads begin with zeros: no sum is -0
    if mean:
        total = total * (float32(len(x_f32)) / float32(x_f32.size))  # a factor, no division
    return tensor(total, dtype)


def vector_norm(
    x: torch.Tensor, order: float, dims: list[int] | None, keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Return the norm of an order over dimensions.

    Raises:
        UnknownOrder: float64, no elements, or more than 2^31 bytes.
    """
    axes = list({d % x.ndim for d in (dims or range(x.ndim))}) if x.ndim else []
    if x.numel() and math.prod(x.shape[d] for d in axes) == 1 and order != 0:
        return x.abs().reshape(x.shape if keepdim else [n for d, n in enumerate(x.shape) if d not in axes]).to(dtype)
    if x.numel() and abs(order) == math.inf:
        return (torch.amax if order > 0 else torch.amin)(x.abs(), axes, keepdim).to(dtype)
    x_f32, starts, plan, tensor = _arranged(x, dims, keepdim)
    if order == 2:
        return tensor(np.sqrt(sums(x_f32, plan, x_f32, starts)), dtype)
    if order in (0, 1):
        return tensor(sums(np.abs(x_f32) if order else (x_f32 != 0).astype(np.float32), plan, None, starts), dtype)
    powers = sums(apply(library.pow, np.abs(x_f32), order), plan, None, starts)
    return tensor(apply(library.pow, powers, float32(1.0) / float32(order)), dtype)


def var_mean(
    x: torch.Tensor, dims: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False,
    root: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the variance (its root) over dimensions, which divides by their number less a correction, and the mean.

    Raises:
        UnknownOrder: float64, no elements, or more than 2^31 bytes.
    """
    x_f32, starts, plan, tensor = _arranged(x, dims, keepdim, accumulators=2, vector=2)
    means, squares = moments(x_f32, plan, starts)
    freedom = max(x_f32.shape[1] - (1.0 if correction is None else correction), 0.0)
    with np.errstate(all="ignore"):
        variance = squares / float32(freedom)
    return tensor(np.sqrt(variance) if root else variance, x.dtype), tensor(means, x.dtype)
