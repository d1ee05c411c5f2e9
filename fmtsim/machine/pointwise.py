# SPDX-License-Identifier: Apache-2.0
"""Operators on elements: CUDA's functions in float32 with one rounding to the result's dtype, and their gradients."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy import float32

from fmtsim.cpu.runtime.jit import device, fma32
from fmtsim.machine import elementwise, library
from fmtsim.machine.arrays import NAN_BITS, SIXTEEN_BITS, apply, from_f32, mapped, to_f32, written
from fmtsim.machine.unknown import Guess, UnknownOrder

_ONE, _HALF = float32(1.0), float32(0.5)
_INVERSE_SQRT_2PI = float32(0.3989422804014327)
_KAPPA, _SQRT_2_OVER_PI = float32(0.044715), float32(0.7978845608028654)
_SQRT_HALF = float32(0.7071067811865476)


@device
def _gelu_gradient(g, x):
    cdf = _HALF * (_ONE + library.erf(x * _SQRT_HALF))
    pdf = library.exp((x * x) * -_HALF) * _INVERSE_SQRT_2PI
    return g * (cdf + x * pdf)


@device
def _gelu_tanh_gradient(g, x):
    square = x * x
    t = library.tanh(fma32(square * x, _KAPPA, x) * _SQRT_2_OVER_PI)
    slope = _SQRT_2_OVER_PI * fma32(float32(3.0) * _KAPPA, square, _ONE)
    right = ((x * _HALF) * fma32(-t, t, _ONE)) * slope
    return g * (_HALF * (_ONE + t) + right)


@device
def _silu_gradient(g, x):
    s = _ONE / (_ONE + library.exp(-x))
    return (g * s) * fma32(x, _ONE - s, _ONE)


@device
def _tanh_gradient(g, y):
    return g * fma32(-y, y, _ONE)


@device
def _add_scaled(a, b, alpha):
    return fma32(alpha, b, a)


def _elementwise(function: Callable, *tensors: torch.Tensor) -> torch.Tensor:
    if any(x.dtype not in NAN_BITS for x in tensors):
        raise UnknownOrder(f"an operator on elements of {' and '.join(str(x.dtype) for x in tensors)}")
    return mapped(function, *tensors)


def unary(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the operator of a function of ``library``."""
    function = library.UNARY[name]
    return lambda x: _elementwise(function, x)


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return torch's gelu."""
    return _elementwise(library.UNARY["gelu" if approximate == "none" else "gelu_tanh"], x)


def gelu_backward(g: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return gelu's gradient."""
    return _elementwise(_gelu_gradient if approximate == "none" else _gelu_tanh_gradient, g, x)


def silu_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return silu's gradient."""
    return _elementwise(_silu_gradient, g, x)


def tanh_backward(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return tanh's gradient: fused in float32; in 16 bits every operation is rounded."""
    dtype = torch.result_type(g, y)
    if dtype == torch.float32:
        return _elementwise(_tanh_gradient, g, y)
    g, y = g.to(dtype), y.to(dtype)
    return g * (1.0 - y * y)


def _number(x: Any, other: Any) -> Any:
    """Return a Python number that torch made a tensor as the number, and a float32 tensor beside 16 bits in these."""
    if torch.is_tensor(x) and torch.is_tensor(other) and x.ndim == 0 < other.ndim and other.dtype in SIXTEEN_BITS:
        if x.dtype == torch.float64:
            return x.item()
        if x.dtype == torch.float32:
            return x.to(other.dtype)
    return x


def _of_numbers(operation: Callable) -> Callable:
    """Let an operation take numbers that torch made tensors, and float32 tensors without dimensions beside 16 bits.

    Raises:
        Guess: Such a tensor is not a number of 16 bits. A GPU rounds it first, but one that is on the CPU it does not.
    """

    @wraps(operation)
    def call(a: Any, b: Any, **options: Any) -> torch.Tensor:
        numbers = _number(a, b), _number(b, a)
        result = operation(*numbers, **options)
        rounded = [
            (x, y.to(x.dtype)) for x, y in zip((a, b), numbers, strict=True) if torch.is_tensor(y) and y is not x
        ]
        for x, y in rounded:
            if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                raise Guess(f"a {x.dtype} tensor without dimensions, rounded as one on the GPU is", result)
        return result  # type: ignore[no-any-return]

    return call


@_of_numbers
def multiply(a: Any, b: Any) -> torch.Tensor:
    """Return a b."""
    return torch.mul(a, b)


@_of_numbers
def add(a: Any, b: Any, *, alpha: float = 1) -> torch.Tensor:
    """Return a + alpha b, fused where alpha is not 1 or -1; a number is float32, which the host rounds to 16 bits."""
    if not torch.is_tensor(a) and alpha == 1:
        a, b = b, a
    if torch.is_tensor(a) and not torch.is_tensor(b) and a.dtype in SIXTEEN_BITS:
        return (a.float() + float(float32(alpha) * float32(b))).to(a.dtype)
    if alpha in (1, -1) or not (torch.is_tensor(a) and torch.is_tensor(b)):
        return torch.add(a, b) if alpha == 1 else torch.sub(a, b) if alpha == -1 else torch.add(a, b, alpha=alpha)
    if a.dtype != b.dtype or a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnknownOrder(f"add of {a.dtype} and {b.dtype} with alpha")
    return written(apply(_add_scaled, to_f32(a), to_f32(b), float(alpha)), a, b)


def subtract_from(a: Any, b: Any, *, alpha: float = 1) -> torch.Tensor:
    """Return b - alpha a."""
    return add(b, a, alpha=-alpha) if torch.is_tensor(b) else add(-a if alpha == 1 else a * -alpha, b)


@_of_numbers
def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """Return a / b; a number in the place of b is a factor: its reciprocal, a double that is rounded to float32."""
    if rounding_mode is not None and any(torch.is_tensor(x) and x.is_floating_point() for x in (a, b)):
        return elementwise.divided(a, b, rounding_mode)
    if torch.is_tensor(b) or not torch.is_tensor(a) or not a.is_floating_point() or a.dtype == torch.float64:
        return torch.div(a, b, rounding_mode=rounding_mode)
    with np.errstate(divide="ignore"):
        return a * float(float32(np.float64(1.0) / np.float64(b)))


_POWERS: dict[float, Callable] = {
    0.5: library.UNARY["sqrt"], -0.5: library.UNARY["rsqrt"], -1: library.UNARY["reciprocal"],
}  # fmt: skip


def power(x: Any, exponent: Any) -> torch.Tensor:
    """Return x to the power of a number: products in x's dtype for 2, 3, -2; roots for halves; else powf."""
    if torch.is_tensor(exponent) or not torch.is_tensor(x):
        return elementwise.elementwise("power", x, exponent)
    if exponent in _POWERS:
        return _elementwise(_POWERS[exponent], x)
    if exponent in (2, -2):
        return x * x if exponent == 2 else reciprocal(x * x)
    if exponent == 3:
        return (x * x) * x
    if exponent == 1:
        return x.clone()
    rounded = float(torch.tensor(float(exponent)).to(x.dtype))
    return from_f32(apply(library.pow, to_f32(x), rounded), x.dtype, x.shape)


reciprocal = unary("reciprocal")
