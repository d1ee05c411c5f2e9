# SPDX-License-Identifier: Apache-2.0
"""Tensors as float32 arrays: functions over all elements, and the orders in which a GPU's threads add them."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy import float32, int64

from fmtsim.engines.cpu.runtime.jit import device, fma32, kernel
from fmtsim.engines.cpu.runtime.pool import run

NAN_BITS = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}  # the one NaN of a GPU's results


def to_f32(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's values as a contiguous float32 array."""
    return np.ascontiguousarray(x.detach().float().numpy())


def from_f32(x_f32: np.ndarray, dtype: torch.dtype, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return float32 values rounded once to a dtype; every NaN is the GPU's."""
    x = torch.from_numpy(np.ascontiguousarray(x_f32)).to(dtype)
    x = x if shape is None else x.reshape(tuple(shape))
    return canonical(x)


def canonical(x: torch.Tensor) -> torch.Tensor:
    """Replace every NaN of a result by the GPU's, in place."""
    bits = NAN_BITS.get(x.dtype)
    if bits is not None:
        nan = x.isnan()
        if bool(nan.any()):
            x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).masked_fill_(nan, bits)
    return x


@cache
def _map(function: Callable) -> Callable:
    """Return a kernel that applies a function of one float32 to a range of elements."""

    @kernel
    def over(x, y, start, stop):  # type: ignore[no-untyped-def]
        for i in range(start, stop):
            y[i] = function(x[i])

    return over


@cache
def _map2(function: Callable) -> Callable:
    @kernel
    def over(a, b, y, start, stop):  # type: ignore[no-untyped-def]
        for i in range(start, stop):
            y[i] = function(a[i], b[i])

    return over


@cache
def _map3(function: Callable) -> Callable:
    @kernel
    def over(a, b, c, y, start, stop):  # type: ignore[no-untyped-def]
        for i in range(start, stop):
            y[i] = function(a[i], b[i], c[i])

    return over


@device
def _fma(a, b, c):
    return fma32(a, b, c)


_MAPS = {1: _map, 2: _map2, 3: _map3}


def apply(function: Callable, *operands: np.ndarray | np.float32 | float) -> np.ndarray:
    """Return a compiled function of one to three float32 numbers over broadcast operands."""
    arrays = [np.asarray(operand, np.float32) for operand in operands]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    # kernels are compiled for contiguous arrays that can be written
    usable = [array.shape == shape and array.flags.c_contiguous and array.flags.writeable for array in arrays]
    flat = [(a if ok else np.broadcast_to(a, shape).copy()).reshape(-1) for a, ok in zip(arrays, usable, strict=True)]
    y = np.empty_like(flat[0])
    compiled = _MAPS[len(flat)](function)
    run(lambda start, stop: compiled(*flat, y, start, stop), y.size, 16, weight=8)
    return y.reshape(shape)


def fma(a: np.ndarray | float, b: np.ndarray | np.float32, c: np.ndarray | float) -> np.ndarray:
    """Return a b + c, rounded once."""
    return apply(_fma, a, b, c)


def chain(x_f32: np.ndarray) -> np.ndarray:
    """Return sums along the last axis, one element after the other."""
    total = x_f32[..., 0].copy()
    for i in range(1, x_f32.shape[-1]):
        total += x_f32[..., i]
    return total


def add_strided(x_f32: np.ndarray, threads: int) -> np.ndarray:
    """Return the sums of T threads, of which thread t adds elements t, t + T ... of the last axis."""
    missing = -x_f32.shape[-1] % threads
    padded = np.pad(x_f32, [*[(0, 0)] * (x_f32.ndim - 1), (0, missing)])
    return chain(np.moveaxis(padded.reshape(*x_f32.shape[:-1], -1, threads), -2, -1))


def tree(x_f32: np.ndarray) -> np.ndarray:
    """Return sums along the last axis, a power of two long: element i gets element i + n / 2, then i + n / 4 ..."""
    while x_f32.shape[-1] > 1:
        half = x_f32.shape[-1] // 2
        x_f32 = x_f32[..., :half] + x_f32[..., half:]
    return x_f32[..., 0]


# What a thread adds: elements of a row in ascending order. The modes say which thread takes which element.
STRIDED, VECTORS, SHIFTED = 0, 1, 2


@device
def slot_of(j, width, mode, threads, vector, shift):
    """Return the accumulator of element j of a row.

    STRIDED: thread j mod T. VECTORS: thread (j / V) mod T. SHIFTED: a first step of T - shift single elements up to the
    alignment, vectors while whole steps of V T last, then single elements.
    """
    if mode == STRIDED:
        return j % threads
    if mode == VECTORS:
        return (j // vector) % threads
    if shift > 0:
        if j < threads - shift:
            return j + shift
        j -= threads - shift
        width -= threads - shift
    last = width % (vector * threads)
    if j < width - last:
        return (j // vector) % threads
    return (j - (width - last)) % threads


@device
def add_in_order(partial, threads):
    """Return the sum of T partial sums: within warps of 32 one after the other, then the warps."""
    total = float32(0.0)
    for first in range(0, threads, 32):
        warp = float32(0.0)
        for i in range(first, min(first + 32, threads)):
            warp += partial[i]
        total += warp
    return total


@device
def add_threads(partial, threads):
    """Return the sum of T partial sums: halving within warps of 32, then over the warps, filled with zeros to 32."""
    for first in range(0, threads, 32):
        n = min(int64(32), threads - first) // 2
        while n > 0:
            for i in range(n):
                partial[first + i] += partial[first + i + n]
            n //= 2
    if threads <= 32:
        return partial[0]
    for warp in range(32):
        partial[warp] = partial[warp * 32] if warp * 32 < threads else float32(0.0)
    n = 16
    while n > 0:
        for i in range(n):
            partial[i] += partial[i + n]
        n //= 2
    return partial[0]
