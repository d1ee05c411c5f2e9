# SPDX-License-Identifier: Apache-2.0
"""Fused AdamW, foreach operators, and the norms of clip_grad_norm_, in the order of PyTorch 2.11's kernels."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy import float32

from fmtsim.cpu.runtime.jit import device, fma32, kernel
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import library, pointwise
from fmtsim.machine.arrays import add_strided, apply, canonical, chain, check_shapes, fma, to_f32, tree, written
from fmtsim.machine.unknown import UnknownOrder

_ONE, _HALF = float32(1.0), float32(0.5)


@device
def _correction(beta, step):
    """Return 1 - beta^step."""
    return _ONE - library.pow(beta, step)


@kernel
def _adamw(p, g, m, v, lr, beta1, beta2, decay, eps, correction1, correction2, start, stop):
    for i in range(start, stop):
        weight, gradient = p[i], g[i]
        # 1. decoupled weight decay
        if decay != float32(0.0):
            weight = fma32(-(lr * decay), weight, weight)
        # 2. moments; 3. p - (lr / c1) m / (sqrt v / sqrt c2 + eps)
        m[i] = fma32(beta1, m[i], (_ONE - beta1) * gradient)
        v[i] = fma32(beta2, v[i], (_ONE - beta2) * (gradient * gradient))
        p[i] = weight - ((lr / correction1) * m[i]) / (np.sqrt(v[i]) / np.sqrt(correction2) + eps)


def fused_adamw_(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], first: list[torch.Tensor],
    second: list[torch.Tensor], maxima: list[torch.Tensor], steps: list[torch.Tensor], *, lr: float | torch.Tensor,
    beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
    grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Do a step of fused AdamW in place: float32 throughout, each of p, m and v rounded once where it is stored.

    ``grad_scale`` divides the gradients, which are stored; nothing changes where ``found_inf`` is 1 (GradScaler).

    Raises:
        UnknownOrder: amsgrad or maximize.
    """
    if amsgrad or maximize:
        raise UnknownOrder("fused AdamW with amsgrad or maximize")
    if found_inf is not None and float(found_inf) == 1:
        return
    numbers = [float32(float(n)) for n in (lr, beta1, beta2, weight_decay, eps)]
    for p, g, m, v, step in zip(parameters, gradients, first, second, steps, strict=True):
        moments = {"first moment": (m, p.shape), "second moment": (v, p.shape)}
        check_shapes("fused AdamW", gradient=(g, p.shape), **moments)
        corrections = [float32(apply(_correction, float(beta), float(step))) for beta in (beta1, beta2)]
        arrays = [to_f32(t).reshape(-1).copy() for t in (p, g, m, v)]
        if grad_scale is not None:
            arrays[1] /= float32(float(grad_scale))
            g.copy_(torch.from_numpy(arrays[1]).reshape(g.shape))
        run(lambda i, j: _adamw(*arrays, *numbers, *corrections, i, j), p.numel(), 16, 4)  # noqa: B023
        for tensor, array in zip((p, m, v), (arrays[0], arrays[2], arrays[3]), strict=True):
            canonical(tensor.copy_(torch.from_numpy(array).reshape(tensor.shape)))


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Return start + weight (end - start), fused, from the nearer end."""
    a, b, difference, w = to_f32(start), to_f32(end), to_f32(end.float() - start.float()), float32(weight)
    total = fma(difference, w, a) if abs(w) < _HALF else fma(-difference, _ONE - w, b)
    return written(total, start, end)


def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: float = 1) -> torch.Tensor:
    """Return x + value (a b): the product rounded, then fused; fused itself where value is 1."""
    if value == 1:
        return written(fma(to_f32(a), to_f32(b), to_f32(x)), x, a, b)
    return written(fma(value, to_f32(a.float() * b.float()), to_f32(x)), x, a, b)


def addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: float = 1) -> torch.Tensor:
    """Return x + value (a / b): the quotient rounded, then fused."""
    return written(fma(value, to_f32(a.float() / b.float()), to_f32(x)), x, a, b)


def foreach(function: Callable, in_place: bool = True) -> Callable:
    """Return the foreach operator of a function of one tensor and operands that are shared or one for each tensor."""

    def call(tensors: list[torch.Tensor], *operands: Any, **factors: Any) -> list[torch.Tensor] | None:
        results = []
        for i, tensor in enumerate(tensors):
            result = function(tensor, *(o[i] if isinstance(o, list | tuple) else o for o in operands), **factors)
            results.append(canonical(tensor.copy_(result)) if in_place else result)
        return None if in_place else results

    return call


def foreach_divide_(tensors: list[torch.Tensor], divisors: Any) -> None:
    """Divide by a number for each tensor, or by tensors; one number for all is a factor, as in ``pointwise.divide``."""
    shared = isinstance(divisors, int | float)
    foreach(pointwise.divide if shared else torch.div)(tensors, divisors)


_CHUNK, _THREADS, _UNROLL = 65536, 512, 4


def _add_block(partial: np.ndarray) -> np.ndarray:
    """Return the sums of [.., 512] threads: by halving in warps of 32, then over the warps, filled to 32."""
    warps = tree(partial.reshape(*partial.shape[:-1], -1, 32))
    return tree(np.pad(warps, [*[(0, 0)] * (warps.ndim - 1), (0, 32 - warps.shape[-1])]))


@kernel
def _squares(x, partial, start, stop):
    for chunk in range(start, stop):
        for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, x.size)):
            j = i - chunk * _CHUNK
            # vectors of 4 where 4 divides the tensor's elements; else thread t takes t + 512 n
            if x.size % _UNROLL == 0:
                thread, accumulator = (j // _UNROLL) % _THREADS, j % _UNROLL
            else:
                thread, accumulator = j % _THREADS, (j // _THREADS) % _UNROLL
            partial[chunk, thread, accumulator] = fma32(x[i], x[i], partial[chunk, thread, accumulator])


def foreach_norm(tensors: list[torch.Tensor], order: float = 2.0) -> list[torch.Tensor]:
    """Return the Euclidean norm of each tensor, as _foreach_norm does: chunks of 65,536 elements.

    Raises:
        UnknownOrder: Another norm.
    """
    if order != 2:
        raise UnknownOrder(f"_foreach_norm of order {order}")
    norms = []
    for tensor in tensors:
        x_f32 = to_f32(tensor).reshape(-1)
        chunks = max(math.ceil(x_f32.size / _CHUNK), 1)
        partial = np.zeros((chunks, _THREADS, _UNROLL), np.float32)
        run(lambda i, j: _squares(x_f32, partial, i, j), chunks, 1, _CHUNK)  # noqa: B023
        sums = _add_block(chain(partial))
        if chunks > 1:
            # the chunks' sums are added in the same way, by one block
            sums = _add_block(add_strided(sums, _THREADS)[None])
        norms.append(canonical(torch.tensor(float(np.sqrt(sums[0]))).to(tensor.dtype)))
    return norms
