# SPDX-License-Identifier: Apache-2.0
"""Tensors as float32 arrays: functions over elements, orders in which threads add, products of tensor cores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numpy import float32, int32, int64
from torch import Tensor

from fmtsim.cpu.runtime.jit import bits32, device, float32_of, fma32, kernel, overload
from fmtsim.cpu.runtime.kernel_numbers import number
from fmtsim.cpu.runtime.pool import run
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.products.resolver import gemm_call, resolve
from fmtsim.machine.unknown import UnknownOrder
from fmtsim.spec.call import Operands
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import ArgumentError


def chain_spec(unit: str, fmt: str | torch.dtype, instruction_k: int | None = None) -> GemmSpec:
    """Return the chain of a unit's instructions, with sums in float32, for operands of a format; or of shorter ones."""
    record = get_format(fmt)
    call = gemm_call("mm", (record, record), (0, 0, 0), torch.float32, target=unit, accumulate="fp32")  # type: ignore[arg-type]
    spec = resolve(call)
    return spec if instruction_k is None else replace(spec, plan=replace(spec.plan, instruction_k=instruction_k))


def product(a: Tensor, b: Tensor, spec: GemmSpec, c: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``a b^T + c`` of operands that lie in the spec's formats, below torch's dispatcher."""
    return run_gemm(Operands(a, b, c=c), spec, dtype, validated=True, bare=True)


NAN_BITS = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}  # the one NaN of a GPU's results

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2.0))
_SMALLEST = float32(2.0**-126)  # normal number
_INF_BITS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def check_shapes(operator: str, **tensors: tuple[torch.Tensor | None, Sequence[int]]) -> None:
    """Refuse tensors of other shapes than those given with them: a kernel counts its elements by one of them alone.

    Raises:
        ArgumentError: A tensor has another shape.
    """
    for name, (x, shape) in tensors.items():
        if x is not None and tuple(x.shape) != tuple(shape):
            raise ArgumentError(f"{operator}: {name} has shape {tuple(x.shape)}; pass it in shape {tuple(shape)}")


def to_f32(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's values as a contiguous float32 array.

    Raises:
        UnknownOrder: They are float64, which a GPU does not round to float32.
    """
    if x.dtype == torch.float64:
        raise UnknownOrder(f"{x.dtype} elements")
    return np.ascontiguousarray(x.detach().float().numpy())


def from_f32(x_f32: np.ndarray, dtype: torch.dtype, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return float32 values rounded once to a dtype; every NaN is the GPU's."""
    x = torch.from_numpy(np.ascontiguousarray(x_f32)).to(dtype)
    x = x if shape is None else x.reshape(tuple(shape))
    return canonical(x)


def _fold(a: Any, b: Any) -> torch.Tensor:
    # torch.add's kernel for meta tensors is another in 16 bits: it takes strides of 0 for those of the result
    return torch.addcmul(a, b, b) if torch.is_tensor(a) and torch.is_tensor(b) else torch.add(a, b)


_FOLDED: dict[int, Callable] = {1: torch.neg, 2: _fold, 3: torch.addcmul}


def result_of(*operands: Any) -> torch.Tensor:
    """Return an empty tensor with TensorIterator's dtype, shape and strides for tensors and numbers that broadcast.

    Raises:
        UnknownOrder: It would be of another dtype than float32, bfloat16 and float16.
    """
    shapes = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if torch.is_tensor(x) else x
        for x in operands
    ]
    result = _FOLDED[len(shapes)](*(shapes if torch.is_tensor(shapes[0]) else shapes[::-1]))
    dtype = result.dtype if result.is_floating_point() else torch.float32
    if dtype not in NAN_BITS:
        raise UnknownOrder(f"an operator on elements of {dtype}")
    return torch.empty_strided(result.shape, result.stride(), dtype=dtype)


_WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16, torch.float32: torch.float32}


def words_of(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as ``read`` and ``put`` take it: float32, bfloat16 as int16, float16 as uint16."""
    return x.detach().view(_WORDS[x.dtype]).numpy()


@device
def read(word):
    """Return the float32 of an element of ``words_of``."""
    return number(word, float32(0.0))


@overload
def put(y, i, value):  # type: ignore[no-untyped-def]
    """Round a float32 once and write it to y[i], an array of ``words_of``; every NaN is the GPU's."""
    if y.dtype == types.float32:

        def put_single(y, i, value):  # type: ignore[no-untyped-def]
            y[i] = value if value == value else float32_of(int32(0x7FFFFFFF))

        return put_single
    if y.dtype == types.int16:

        def put_bfloat16(y, i, value):  # type: ignore[no-untyped-def]
            bits = bits32(value)
            rounded = (bits + int32(0x7FFF) + ((bits >> int32(16)) & int32(1))) >> int32(16)
            y[i] = np.int16(rounded if value == value else int32(0x7FFF))

        return put_bfloat16

    def put_half(y, i, value):  # type: ignore[no-untyped-def]
        bits = bits32(value)
        magnitude = abs(value)
        # 1. normal numbers: 13 bits less, to nearest even; 2. subnormal ones are multiples of 2^-24
        code = (
            (bits & int32(0x7FFFFFFF)) + int32(0xFFF) + ((bits >> int32(13)) & int32(1)) - int32(112 << 23)
        ) >> int32(13)
        if magnitude < float32(2.0**-14):
            code = int32(np.rint(magnitude * float32(2.0**24)))
        elif magnitude >= float32(65520.0):
            code = int32(0x7C00)
        code |= (bits >> int32(16)) & int32(0x8000)
        y[i] = np.uint16(code if value == value else int32(0x7FFF))

    return put_half


@kernel
def _has_nan(words, infinity, start, stop):
    """Return whether integers hold a NaN: a magnitude above that of Inf."""
    mask = np.int32(0x7FFFFFFF if words.itemsize == 4 else 0x7FFF)
    count = 0
    for i in range(start, stop):
        count += (np.int32(words[i]) & mask) > np.int32(infinity)
    return count > 0


def canonical(x: torch.Tensor) -> torch.Tensor:
    """Replace every NaN of a result by the GPU's, in place."""
    bits = NAN_BITS.get(x.dtype)
    if bits is None or not x.numel():
        return x
    integers = x.detach().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    if x.is_contiguous():
        flat, found = integers.reshape(-1).numpy(), []
        run(lambda i, j: found.append(_has_nan(flat, _INF_BITS[x.dtype], i, j)), flat.size, 64)
        if not any(found):
            return x
    integers.masked_fill_(x.isnan(), bits)
    return x


@cache
def _map(function: Callable) -> Callable:
    """Return a kernel that applies a function of one float32 to a range of elements."""

    @kernel
    def over(x, y, start, stop):  # type: ignore[no-untyped-def]
        for i in range(start, stop):
            put(y, i, function(read(x[i])))

    return over


@cache
def _map2(function: Callable) -> Callable:
    @kernel
    def over(a, b, y, start, stop):  # type: ignore[no-untyped-def]
        for i in range(start, stop):
            put(y, i, function(read(a[i]), read(b[i])))

    return over


@cache
def _map3(function: Callable) -> Callable:
    @kernel
    def over(a, b, c, y, start, stop):  # type: ignore[no-untyped-def]
        for i in range(start, stop):
            put(y, i, function(read(a[i]), read(b[i]), read(c[i])))

    return over


@kernel
def _look_up(codes, table, y, start, stop):
    for i in range(start, stop):
        y[i] = table[codes[i]]


@cache
def _table(function: Callable, dtype: torch.dtype) -> np.ndarray:
    """Return a function's results, as words, for all 2^16 words of a dtype."""
    words = np.arange(1 << 16, dtype=np.uint16).view(words_of(torch.empty(0, dtype=dtype)).dtype)
    return _run_over(function, [words], np.empty_like(words)).view(np.uint16)


def _run_over(function: Callable, words: list[np.ndarray], y: np.ndarray) -> np.ndarray:
    compiled = _MAPS[len(words)](function)
    run(lambda start, stop: compiled(*words, y, start, stop), y.size, 16, weight=8)
    return y


def mapped(function: Callable, *tensors: torch.Tensor) -> torch.Tensor:
    """Return a compiled float32 function of tensors that broadcast, rounded once, as ``result_of`` lays it out."""
    first = tensors[0]
    equal = all((x.shape, x.stride(), x.dtype) == (first.shape, first.stride(), first.dtype) for x in tensors)
    result = torch.empty_like(first) if equal else result_of(*tensors)
    y = torch.empty(result.shape, dtype=result.dtype)
    # the kernels read as many elements of each tensor as the result has
    words = [words_of(x.to(y.dtype).expand(y.shape).contiguous()).reshape(-1) for x in tensors]
    target = words_of(y).reshape(-1)
    if len(tensors) == 1 and first.dtype != torch.float32:
        table, codes, results = _table(function, first.dtype), words[0].view(np.uint16), target.view(np.uint16)
        run(lambda start, stop: _look_up(codes, table, results, start, stop), y.numel(), 64)
    else:
        _run_over(function, words, target)
    return y if result.is_contiguous() else result.copy_(y)


@device
def flush(x):
    """Return a zero of x's sign for a subnormal x, as kernels that are compiled to flush do."""
    return x * float32(0.0) if abs(x) < _SMALLEST else x


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
    return _run_over(function, flat, np.empty_like(flat[0])).reshape(shape)


def written(y_f32: np.ndarray, *operands: torch.Tensor) -> torch.Tensor:
    """Return float32 results of operands that broadcast, rounded once, as ``result_of`` lays them out."""
    first = operands[0]
    if all(x.is_contiguous() and (x.shape, x.dtype) == (first.shape, first.dtype) for x in operands):
        return from_f32(y_f32, first.dtype, first.shape)
    y = result_of(*operands)
    if any(x.ndim == 0 < y.ndim and x.dtype != y.dtype for x in operands):
        raise UnknownOrder("a tensor without dimensions, of another dtype than the result")
    return y.copy_(from_f32(y_f32, y.dtype, y.shape))


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
    with np.errstate(all="ignore"):  # Inf - Inf is NaN, as on a GPU
        while (half := x_f32.shape[-1] // 2) > 0:
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
def add_halves(partial, threads):
    """Return the sum of T partial sums: thread i gets thread i + T / 2, then i + T / 4 ..."""
    while threads > 1:
        threads //= 2
        for i in range(threads):
            partial[i] += partial[i + threads]
    return partial[0]


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
