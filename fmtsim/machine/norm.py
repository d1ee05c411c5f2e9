# SPDX-License-Identifier: Apache-2.0
"""layer_norm and rms_norm, forward and backward, in the order of PyTorch 2.11's kernels."""

import math

import numpy as np
import torch
from numpy import float32, int64

from fmtsim.cpu.runtime.jit import device, fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library
from fmtsim.machine.arrays import add_threads, apply, check_shapes, fma, from_f32, to_f32, tree
from fmtsim.machine.reduce import Plan, moments

_THREADS, _ONE = 128, float32(1.0)
_ODD = Plan(32, 16)  # 16 warps, each by halving, then the warps: the kernel for widths that 4 does not divide


@device
def _merge(mean, m2, count, into, other):
    """Merge Welford's moments of one thread into another's."""
    total = count[into] + count[other]
    if total <= float32(0.0):
        mean[into], m2[into], count[into] = float32(0.0), float32(0.0), total
        return
    inverse = _ONE / total
    difference = mean[into] - mean[other]
    share_other, share_into = count[other] * inverse, count[into] * inverse
    square = (difference * difference) * count[other]
    m2[into] = fma32(square, share_into, m2[other] + m2[into])
    mean[into] = fma32(share_other, mean[other], share_into * mean[into])
    count[into] = total


@kernel
def _forward(x, weight, bias, eps, y, means, rstds, start, stop):
    width = x.shape[1]
    mean, m2, count = (np.empty(_THREADS, np.float32), np.empty(_THREADS, np.float32), np.empty(_THREADS, np.float32))
    for row in range(start, stop):
        mean[:], m2[:], count[:] = float32(0.0), float32(0.0), float32(0.0)
        # 1. Welford's update, element 4 (t + 128 i) + j by thread t
        for j in range(width):
            thread = (j // 4) % _THREADS
            difference = x[row, j] - mean[thread]
            count[thread] += _ONE
            mean[thread] = fma32(difference, _ONE / count[thread], mean[thread])
            m2[thread] = fma32(difference, x[row, j] - mean[thread], m2[thread])
        # 2. merge lanes by halving, then the 4 warps
        for warp in range(0, _THREADS, 32):
            n = 16
            while n > 0:
                for lane in range(n):
                    _merge(mean, m2, count, warp + lane, warp + lane + n)
                n //= 2
        for step in (64, 32):
            for warp in range(0, step, 32):
                _merge(mean, m2, count, warp, warp + step)
        # 3. y = w (rstd (x - mean)) + b
        rstd = library.rsqrt(m2[0] / float32(width) + eps)
        means[row], rstds[row] = mean[0], rstd
        for j in range(width):
            y[row, j] = fma32(weight[j], rstd * (x[row, j] - mean[0]), bias[j])


@kernel
def _rms_forward(x, weight, eps, y, rstds, start, stop):
    width = x.shape[1]
    squares = np.empty(_THREADS, np.float32)
    for row in range(start, stop):
        # 1. sums of squares, element 4 (t + 128 i) + j by thread t; the threads by halving
        squares[:] = float32(0.0)
        for j in range(width):
            squares[(j // 4) % _THREADS] = fma32(x[row, j], x[row, j], squares[(j // 4) % _THREADS])
        # 2. y = w (rstd x)
        rstd = library.rsqrt(add_threads(squares, int64(_THREADS)) / float32(width) + eps)
        rstds[row] = rstd
        for j in range(width):
            y[row, j] = weight[j] * (rstd * x[row, j])


@kernel
def _backward_input(g, x, mean, rstd, weight, centre, dx, start, stop):
    width = x.shape[1]
    sums, products = np.empty(_THREADS, np.float32), np.empty(_THREADS, np.float32)
    for row in range(start, stop):
        sums[:], products[:] = float32(0.0), float32(0.0)
        # 1. sums of g w and of g w (x - mean) rstd
        for j in range(width):
            thread = (j // 4) % _THREADS
            weighted = g[row, j] * weight[j]
            sums[thread] += weighted
            products[thread] = fma32(weighted * (x[row, j] - mean[row]), rstd[row], products[thread])
        total, product = add_threads(sums, int64(_THREADS)), add_threads(products, int64(_THREADS))
        # 2. dx = (n w g - (x - mean) rstd product - total) (rstd / n); rms_norm has no mean, and no total
        total = total if centre else float32(0.0)
        factor = (_ONE / float32(width)) * rstd[row]
        for j in range(width):
            centred = -(((x[row, j] - mean[row]) * rstd[row]) * product)
            dx[row, j] = (fma32(float32(width) * weight[j], g[row, j], centred) - total) * factor


@kernel
def _backward_weight(g, x, mean, rstd, height, dweight, dbias, start, stop):
    rows = g.shape[0]
    for column in range(start, stop):
        # thread t of a column takes 8 consecutive rows a turn
        for row in range(rows):
            thread = (row // 8) % height
            product = g[row, column] * (x[row, column] - mean[row])
            dweight[column, thread] = fma32(product, rstd[row], dweight[column, thread])
            dbias[column, thread] += g[row, column]


def _flat(x: torch.Tensor, shape: list[int]) -> np.ndarray:
    return to_f32(x).reshape(-1, math.prod(shape))


def layer_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd) of native_layer_norm; a width that 4 does not divide has another kernel."""
    whole = [*x.shape[: max(x.ndim - len(shape), 0)], *shape]
    check_shapes("layer_norm", x=(x, whole), weight=(weight, shape), bias=(bias, shape))
    rows = _flat(x, shape)
    width = rows.shape[1]
    w = np.ones(width, np.float32) if weight is None else to_f32(weight).reshape(-1)
    # what is added to an element without a bias keeps its sign of zero; the other kernel adds a zero
    b = np.full(width, 0.0 if width % 4 else -0.0, np.float32) if bias is None else to_f32(bias).reshape(-1)
    if width % 4:
        mean, squares = moments(rows, _ODD)
        rstd = apply(library.rsqrt, squares / float32(width) + float32(eps))
        with np.errstate(all="ignore"):
            y = fma((rows - mean[:, None]) * rstd[:, None], w, b)
    else:
        y, mean, rstd = np.empty_like(rows), np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
        run(lambda i, j: _forward(rows, w, b, float32(eps), y, mean, rstd, i, j), len(rows), 1, 8 * width)
    statistics = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    return (
        from_f32(y, x.dtype, x.shape),
        from_f32(mean, torch.float32, statistics),
        from_f32(rstd, torch.float32, statistics),
    )


def rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, rstd) of _fused_rms_norm; a width that 4 does not divide has another kernel, of Welford's moments."""
    whole = [*x.shape[: max(x.ndim - len(shape), 0)], *shape]
    check_shapes("rms_norm", x=(x, whole), weight=(weight, shape))
    rows = _flat(x, shape)
    width = rows.shape[1]
    w = np.ones(width, np.float32) if weight is None else to_f32(weight).reshape(-1)
    least = float32(torch.finfo(torch.float32).eps if eps is None else eps)
    if width % 4:
        mean, squares = moments(rows, _ODD)
        rstd = apply(library.rsqrt, fma(mean, mean, squares / float32(width)) + least)
        with np.errstate(all="ignore"):
            y = rows * rstd[:, None] * w
    else:
        y, rstd = np.empty_like(rows), np.empty(len(rows), np.float32)
        run(lambda i, j: _rms_forward(rows, w, least, y, rstd, i, j), len(rows), 1, 8 * width)
    statistics = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    return from_f32(y, x.dtype, x.shape), from_f32(rstd, torch.float32, statistics)


def layer_norm_backward(
    g: torch.Tensor, x: torch.Tensor, shape: list[int], mean: torch.Tensor | None, rstd: torch.Tensor,
    weight: torch.Tensor | None, mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of (x, weight, bias) of native_layer_norm; without a mean, of rms_norm."""
    rows = _flat(x, shape)
    count, width = rows.shape
    statistics = {name: (t if t is None else t.reshape(-1), [count]) for name, t in (("mean", mean), ("rstd", rstd))}
    check_shapes("the gradient of a norm", g=(g, x.shape), weight=(weight, shape), **statistics)
    gradients = _flat(g, shape)
    rstds = to_f32(rstd).reshape(-1)
    means = np.zeros_like(rstds) if mean is None else to_f32(mean).reshape(-1)
    w = np.ones(width, np.float32) if weight is None else to_f32(weight).reshape(-1)
    dx = np.empty_like(rows)
    run(lambda i, j: _backward_input(gradients, rows, means, rstds, w, mean is not None, dx, i, j), count, 1, 8 * width)
    height = 1 if count < 64 else 8 if count < 128 else 16 if count < 256 else 32
    dweight, dbias = np.zeros((width, height), np.float32), np.zeros((width, height), np.float32)
    run(
        lambda i, j: _backward_weight(gradients, rows, means, rstds, height, dweight, dbias, i, j),
        width, 1, 8 * count,
    )  # fmt: skip
    dtype = x.dtype if weight is None else weight.dtype
    return (
        from_f32(dx, x.dtype, x.shape) if mask[0] else None,
        from_f32(tree(dweight), dtype, shape) if mask[1] else None,
        from_f32(tree(dbias), dtype, shape) if mask[2] else None,
    )
