# SPDX-License-Identifier: Apache-2.0
"""group_norm, forward and backward, in the order of PyTorch 2.11's kernels (group_norm_kernel.cu)."""

import numpy as np
import torch
from numpy import float32

from fmtsim.machine import library
from fmtsim.machine.arrays import apply, check_shapes, fma, from_f32, to_f32
from fmtsim.machine.reduce import Plan, moments, sums
from fmtsim.machine.unknown import UnknownOrder


def threads_of_a_row(count: int) -> Plan:
    """Return how a block adds a row: a warp below 512 elements, else 16 warps, each by halving, then the warps."""
    return Plan(32) if count < 512 else Plan(32, 16)


def _affine(x: torch.Tensor | None, channels: int, missing: float) -> np.ndarray:
    return np.full(channels, missing, np.float32) if x is None else to_f32(x)


def group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, count: int, channels: int, inner: int,
    groups: int, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (y, mean, rstd) of native_group_norm for x of [count, channels, inner ...]; all in x's dtype.

    Raises:
        UnknownOrder: A bias without a weight, or parameters of another dtype than x.
    """
    if (weight is None and bias is not None) or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        raise UnknownOrder("group_norm with a bias alone, or with parameters of another dtype")
    whole = (count, channels, *x.shape[2:])
    check_shapes("group_norm", x=(x, whole), weight=(weight, [channels]), bias=(bias, [channels]))
    rows, size = to_f32(x).reshape(count * groups, -1), channels // groups
    # 1. Welford's moments; eps is rounded to x's dtype
    mean, squares = moments(rows, threads_of_a_row(rows.shape[1]))
    least = float32(torch.tensor(eps, dtype=x.dtype).item())
    rstd = apply(library.rsqrt, squares / float32(rows.shape[1]) + least)
    statistics = [from_f32(t, x.dtype, [count, groups]) for t in (mean, rstd)]
    # 2. (x - mean) rstd w + b of the rounded moments; with an inner size as a x + b of each channel
    centre, scale = (to_f32(t).reshape(count, groups, 1, 1) for t in statistics)
    elements = rows.reshape(count, groups, size, inner)
    w, b = (
        _affine(t, channels, missing).reshape(1, groups, size, 1) for t, missing in ((weight, 1.0), (bias, 0.0))
    )  # fmt: skip
    with np.errstate(all="ignore"):
        if inner == 1 or (weight is None and bias is None):
            y = (elements - centre) * scale
            # without a bias a zero keeps its sign
            y = fma(y, w, b) if bias is not None else y if weight is None else y * w
        else:
            slope = scale * w
            y = fma(slope, elements, b - slope * centre)
    return from_f32(y, x.dtype, x.shape), statistics[0], statistics[1]


def group_norm_backward(
    g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, count: int,
    channels: int, inner: int, groups: int, mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of (x, weight, bias) of native_group_norm."""
    size = channels // groups
    check_shapes("the gradient of group_norm", g=(g, x.shape), weight=(weight, [channels]))
    g_f32, x_f32 = (to_f32(t.contiguous()).reshape(count * channels, inner) for t in (g, x))
    w = np.broadcast_to(_affine(weight, channels, 1.0).reshape(1, groups, size), (count, groups, size))
    centre, scale = to_f32(mean).reshape(count, groups, 1), to_f32(rstd).reshape(count, groups, 1)
    with np.errstate(all="ignore"):
        # 1. sums of g x and of g, over a channel's inner size, then times the weight over a group
        if inner == 1:
            products, gradients = to_f32((g * x).reshape(-1)), g_f32[:, 0]  # products are rounded to their dtype
        else:
            products, gradients = sums(g_f32, threads_of_a_row(inner), x_f32), sums(g_f32, threads_of_a_row(inner))
        w_rows = np.ascontiguousarray(w).reshape(-1, size)
        product, gradient = (
            sums(t.reshape(-1, size), threads_of_a_row(size), w_rows).reshape(count, groups, 1)
            for t in (products, gradients)
        )
        # 2. dx = c1 g + c2 x + c3
        share = float32(1.0) / float32(size * inner)
        c2 = fma(gradient, centre, -product) * scale * scale * scale * share
        c3 = fma(-c2, centre, -((gradient * scale) * share))
        g_all, x_all = (t.reshape(count, groups, size, inner) for t in (g_f32, x_f32))
        dx = fma((scale * w)[..., None], g_all, c2[..., None] * x_all) + c3[..., None]
        # 3. weights: a chain over the count, from 129 on 32 of them by halving
        plan = Plan(1) if count <= 128 else Plan(32)
        per_channel = [np.broadcast_to(t, (count, groups, size)).reshape(count, channels).T for t in (centre, scale)]
        products, gradients = (t.reshape(count, channels).T for t in (products, gradients))
        if inner == 1:
            g_rows, x_rows = (t.reshape(count, channels).T for t in (g_f32, x_f32))
            centred = fma(g_rows, x_rows, -(g_rows * per_channel[0]))
        else:
            centred = fma(-gradients, per_channel[0], products)
        dweight, dbias = sums(centred, plan, per_channel[1]), sums(gradients, plan)
    dtype = x.dtype if weight is None else weight.dtype
    return (
        from_f32(dx, x.dtype, x.shape) if mask[0] else None,
        from_f32(dweight, dtype) if mask[1] else None,
        from_f32(dbias, dtype) if mask[2] else None,
    )
