# SPDX-License-Identifier: Apache-2.0
"""Operators on elements whose functions are kept as the PTX that nvcc makes of their C (``elementwise.cu``)."""

import math
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmtsim.machine import reduce
from fmtsim.machine.arrays import from_f32, result_of, to_f32, words_of
from fmtsim.machine.ptx.execute import execute
from fmtsim.machine.ptx.parse import Module, parse
from fmtsim.machine.unknown import UnknownOrder

_BLOCK = 1024  # threads


@cache
def _module(name: str, dtype: torch.dtype) -> Module:
    """Return a function's PTX; one that rounds between its steps has another for each dtype."""
    with zipfile.ZipFile(Path(__file__).with_suffix(".zip")) as archive:
        member = name if name in archive.namelist() else f"{name}.{str(dtype).removeprefix('torch.')}"
        return parse(archive.read(member).decode())


def computed(name: str, dtype: torch.dtype, arrays: list[np.ndarray], numbers: tuple[float, ...] = ()) -> np.ndarray:
    """Return a function of flat float32 arrays and numbers, as float32 that is not rounded to the dtype yet."""
    tensors = [torch.from_numpy(array) for array in arrays]
    y = torch.empty_like(tensors[0])
    operands: list[Any] = [*tensors, *[tensors[0]] * (3 - len(tensors)), y]
    given = [*operands, *numbers, *[0.0] * (3 - len(numbers)), y.numel()]
    if y.numel():
        execute(_module(name, dtype), "kernel", (-(-y.numel() // _BLOCK), 1, 1), (_BLOCK, 1, 1), given)
    return y.numpy()


@cache
def _table(name: str, dtype: torch.dtype, numbers: tuple[float, ...]) -> torch.Tensor:
    """Return a function's results for all 2^16 words of a dtype."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return from_f32(computed(name, dtype, [to_f32(x)], numbers), dtype)


def elementwise(name: str, *operands: Any, numbers: tuple[float, ...] = ()) -> torch.Tensor:
    """Return a function of ``elementwise.cu``, rounded once, with TensorIterator's dtype, shape and strides.

    Args:
        name: of the function.
        operands: Tensors, or numbers that are rounded to their dtype.
        numbers: What the kernel gets as float32.

    Raises:
        UnknownOrder: Tensors of another dtype than float32, bfloat16 and float16.
    """
    # 1. the result as a kernel of the library would have it
    tensors = [x if torch.is_tensor(x) else torch.tensor(x, dtype=torch.float64) for x in operands]
    y = result_of(*operands)
    dtype = y.dtype
    # 2. elements in the order in which they are counted
    if len(tensors) == 1 and dtype != torch.float32:
        words = torch.from_numpy(words_of(tensors[0].contiguous()).view(np.uint16).astype(np.int64))
        return y.copy_(_table(name, dtype, numbers)[words])
    flat = [to_f32(x.to(dtype).expand(y.shape)).reshape(-1) for x in tensors]
    return y.copy_(from_f32(computed(name, dtype, flat, numbers), dtype, y.shape))


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return a loss's elements, their mean or their sum."""
    return loss if reduction == 0 else reduce.reduce(loss, None, False, reduction == 1, loss.dtype)


def _weighted(loss: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return loss if weight is None else loss * weight


def _share(reduction: int, x: torch.Tensor) -> float:
    return 1.0 / x.numel() if reduction == 1 else 1.0


def _check_entropy(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Raise UnknownOrder where the result of binary_cross_entropy would be larger than x: torch does not fill it."""
    if any(t is not None and torch.broadcast_shapes(x.shape, t.shape) != x.shape for t in others):
        raise UnknownOrder("binary_cross_entropy of tensors that are larger than the first")


def _bce(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1) -> torch.Tensor:
    _check_entropy(x, y, weight)
    return _reduced(_weighted(elementwise("binary_cross_entropy", x, y), weight), reduction)


def _bce_gradient(g: Any, x: Any, target: Any, weight: Any = None, reduction: int = 1) -> torch.Tensor:
    _check_entropy(x, target, g, weight)
    gradient = _weighted(elementwise("binary_cross_entropy_backward", g, x, target), weight)
    return gradient * float(np.float32(1.0) / np.float32(x.numel())) if reduction == 1 else gradient


def _glu_halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x.chunk(2, dim)
    return a, b


def _glu_gradient(g: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    a, b = _glu_halves(x, dim)
    return torch.cat([elementwise(f"glu_backward_of_{part}", g, a, b) for part in ("first", "second")], dim)


def divided(x: Any, y: Any, rounding_mode: str) -> torch.Tensor:
    """Return x / y, rounded to an integer: a number in the place of y is a factor of float32."""
    if torch.is_tensor(y):
        return elementwise(f"{rounding_mode}_divide", x, y)
    inverse = float(np.float32(1.0) / np.float32(y))
    numbers = (inverse,) if rounding_mode == "trunc" else (float(y), inverse)
    return elementwise(f"{rounding_mode}_divide_by_number", x, numbers=numbers)


def _logit(suffix: str) -> Callable:
    def call(*tensors: Any, eps: float | None = None) -> torch.Tensor:
        bound = eps if torch.is_tensor(tensors[-1]) else tensors[-1]
        tensors = tensors if torch.is_tensor(tensors[-1]) else tensors[:-1]
        if bound is None:
            return elementwise(f"logit{suffix}", *tensors)
        return elementwise(
            f"logit_clamped{suffix}", *tensors, numbers=(bound, float(np.float32(1) - np.float32(bound)))
        )

    return call


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None, **named: Any) -> torch.Tensor:
    """Return clamp by numbers or tensors; of two zeros a GPU takes the positive one as the larger."""
    low, high = named.get("min", low), named.get("max", high)
    if torch.is_tensor(low) or torch.is_tensor(high):
        bounds = (-torch.inf if low is None else low, torch.inf if high is None else high)
        return elementwise("clamp", x, *(b if torch.is_tensor(b) else torch.full_like(x, b) for b in bounds))
    y = torch.clamp(x, low, high)
    return y + 0.0 if low == 0 else y


def _extreme(largest: bool) -> Callable:
    """Return maximum or minimum; of two zeros a GPU takes the positive one as the larger."""

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.maximum(x, y) if largest else torch.minimum(x, y)
        zeros = (x == 0) & (y == 0)
        return torch.where(zeros, x + y if largest else -(-x - y), z) if bool(zeros.any()) else z

    return call


def _threshold(name: str) -> Callable:
    """Return an operator of the host whose bound is rounded to the dtype."""
    packet = getattr(torch.ops.aten, name)

    def call(*arguments: Any) -> torch.Tensor:
        tensors = [x for x in arguments if torch.is_tensor(x)]
        bound, *rest = arguments[len(tensors) :]
        return packet(*tensors, float(torch.tensor(bound).to(tensors[0].dtype)), *rest)  # type: ignore[no-any-return]

    return call


_PLAIN = """
tan asin acos atan sinh cosh asinh acosh atanh erfc erfinv lgamma atan2 hypot fmod mish mish_backward hardswish
hardswish_backward hardsigmoid hardsigmoid_backward remainder logaddexp logaddexp2 xlogy sinc fmax fmin
"""
OPERATORS: dict[str, Callable] = {
    **{name: lambda *tensors, _name=name: elementwise(_name, *tensors) for name in _PLAIN.split()},
    "special_xlog1py": lambda x, y: elementwise("xlog1py", x, y),
    **dict.fromkeys(("clamp", "clamp_min"), _clamp),
    "hardtanh": lambda x, low=-1, high=1: _clamp(x, low, high),
    "relu": lambda x: torch.relu(x) + 0.0,  # no -0
    "maximum": _extreme(True),
    "minimum": _extreme(False),
    "threshold": _threshold("threshold"),
    "threshold_backward": _threshold("threshold_backward"),
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "special_entr": lambda x: elementwise("entr", x),
    "floor_divide": lambda x, y: divided(x, y, "floor"),
    "hardtanh_backward": lambda g, x, low, high: elementwise("hardtanh_backward", g, x, numbers=(low, high)),
    "elu": lambda x, alpha=1, scale=1, inner=1: elementwise("elu", x, numbers=(alpha, scale, inner)),
    "celu": lambda x, alpha=1: elementwise("elu", x, numbers=(alpha, 1, 1.0 / alpha)),
    "selu": lambda x: elementwise("elu", x, numbers=(1.6732632423543772, 1.0507009873554805, 1)),
    "elu_backward": lambda g, alpha, scale, inner, of_result, y: elementwise(
        "elu_backward_of_result" if of_result else "elu_backward", g, y, numbers=(alpha, scale, inner)
    ),
    "softshrink": lambda x, bound=0.5: elementwise("softshrink", x, numbers=(bound,)),
    "softshrink_backward": lambda g, x, bound: elementwise("shrink_backward", g, x, numbers=(bound,)),
    "hardshrink_backward": lambda g, x, bound: elementwise("shrink_backward", g, x, numbers=(bound,)),
    "softplus": lambda x, beta=1, threshold=20: elementwise("softplus", x, numbers=(beta, threshold)),
    "softplus_backward": lambda g, x, beta, threshold: elementwise(
        "softplus_backward", g, x, numbers=(beta, threshold)
    ),
    "log_sigmoid": lambda x: elementwise("log_sigmoid", x),
    "log_sigmoid_forward": lambda x: (elementwise("log_sigmoid", x), x.new_empty(0)),
    "log_sigmoid_backward": lambda g, x, buffer: elementwise("log_sigmoid_backward", g, x),
    "glu": lambda x, dim=-1: elementwise("glu", *_glu_halves(x, dim)),
    "glu_backward": _glu_gradient,
    "_prelu_kernel": lambda x, weight: elementwise("prelu", x, weight),
    "_prelu_kernel_backward": lambda g, x, weight: tuple(
        elementwise(f"prelu_backward_of_{part}", g, x, weight) for part in ("input", "weight")
    ),
    "sigmoid_backward": lambda g, y: elementwise("sigmoid_backward", g, y),
    "logit": _logit(""),
    "logit_backward": _logit("_backward"),
    "mse_loss": lambda x, y, reduction=1: _reduced(elementwise("mse_loss", x, y), reduction),
    "mse_loss_backward": lambda g, x, y, reduction: elementwise(
        "mse_loss_backward", g, x, y, numbers=(2 * _share(reduction, x),)
    ),
    "smooth_l1_loss": lambda x, y, reduction=1, beta=1.0: _reduced(
        elementwise("smooth_l1_loss", x, y, numbers=(beta,)), reduction
    ),
    "smooth_l1_loss_backward": lambda g, x, y, reduction, beta: elementwise(
        "smooth_l1_loss_backward", g, x, y, numbers=(_share(reduction, x), beta)
    ),
    "huber_loss": lambda x, y, reduction=1, delta=1.0: _reduced(
        elementwise("huber_loss", x, y, numbers=(delta,)), reduction
    ),
    "huber_loss_backward": lambda g, x, y, reduction, delta: elementwise(
        "huber_loss_backward", g, x, y, numbers=(_share(reduction, x), delta)
    ),
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_backward": _bce_gradient,
}
"""Operators of ATen by name, each with the operator's arguments."""
