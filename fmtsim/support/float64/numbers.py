# SPDX-License-Identifier: Apache-2.0
"""Float64 numbers in integers as something that code for tensors takes for one."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmtsim.support.float64 import arithmetic
from fmtsim.support.float64.arithmetic import INFINITE, MAGNITUDE, SIGN


class Float64:
    """Float64 numbers as an int64 tensor of bit patterns, for devices without the dtype.

    It has the methods of a tensor that this package uses on float64, and torch's functions take it. Results have the
    bits of IEEE 754, subnormal numbers included. Methods that write in place return a result instead.
    """

    __slots__ = ("bits",)
    __hash__ = None  # type: ignore[assignment]
    dtype = torch.float64

    def __init__(self, bits: Tensor) -> None:
        self.bits = bits

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _operation(function.__name__.strip("_"))(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "device", "is_cpu", "is_cuda", "is_meta"):
            return getattr(self.bits, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_operation(name), self)

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, index: Any) -> "Float64":
        return Float64(self.bits[index])

    def __neg__(self) -> "Float64":
        return Float64(self.bits ^ SIGN)

    def __add__(self, other: Any) -> "Float64":
        return _add(self, other)

    def __sub__(self, other: Any) -> "Float64":
        return _subtract(self, other)

    def __rsub__(self, other: Any) -> "Float64":
        return _subtract(other, self)

    def __mul__(self, other: Any) -> "Float64":
        return _multiply(self, other)

    def __truediv__(self, other: Any) -> "Float64":
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> "Float64":
        return _multiply(_divide(1.0, self), other)  # two roundings, as torch's own tensors have them

    def __lt__(self, other: Any) -> Tensor:
        return _compare(torch.lt, self, other)

    def __le__(self, other: Any) -> Tensor:
        return _compare(torch.le, self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _compare(torch.gt, self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _compare(torch.ge, self, other)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _compare(torch.eq, self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return ~_compare(torch.eq, self, other)

    __radd__, __rmul__ = __add__, __mul__


def pattern(number: float) -> int:
    """Return the bits of a number as int64 has them."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _bits(*values: Any) -> list[Tensor]:
    """Return the patterns of operands: numbers of ours and of Python, and tensors of any dtype."""
    device = next(value.device for value in values if isinstance(value, Float64 | Tensor))
    return [
        value.bits if isinstance(value, Float64) else arithmetic.widen(value) if isinstance(value, Tensor)
        else torch.full((), pattern(value), dtype=torch.int64, device=device)
        for value in values
    ]  # fmt: skip


def _binary(function: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Float64:
    return Float64(function(*_bits(a, b)))


_add = partial(_binary, arithmetic.add)
_multiply = partial(_binary, arithmetic.multiply)
_divide = partial(_binary, arithmetic.divide)
_maximum = partial(_binary, partial(arithmetic.extreme, how=torch.ge))
_minimum = partial(_binary, partial(arithmetic.extreme, how=torch.le))


def _subtract(a: Any, b: Any) -> Float64:
    x, y = _bits(a, b)
    return Float64(arithmetic.add(x, y ^ SIGN))


def _compare(how: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Tensor:
    x, y = _bits(a, b)
    return arithmetic.compare(x, y, how)


def _where(condition: Tensor, a: Any, b: Any) -> Float64:
    x, y = _bits(a, b)
    return Float64(torch.where(condition, x, y))


def _clamp(x: Float64, min: Any = None, max: Any = None) -> Float64:
    x = x if min is None else _maximum(x, min)
    return x if max is None else _minimum(x, max)


def _sign(x: Float64) -> Float64:
    return Float64(arithmetic.widen((x > 0).to(torch.int8) - (x < 0).to(torch.int8)))  # of NaN 0, as torch has it


def _copysign(x: Float64, sign: Any) -> Float64:
    return Float64((x.bits & MAGNITUDE) | (_bits(x, sign)[1] & SIGN))


def _searchsorted(values: Float64, x: Float64, *, right: bool = False) -> Tensor:
    ordered, wanted = (arithmetic.order(part.bits).contiguous() for part in (values, x))
    return torch.searchsorted(ordered, wanted, right=right)


def _to(x: Float64, dtype: torch.dtype) -> Any:
    return x if dtype == torch.float64 else arithmetic.narrow(x.bits, dtype)


def _view(x: Float64, *shape: Any) -> Any:
    return x.bits if shape == (torch.int64,) else Float64(x.bits.view(*shape))


def _moved(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function of tensors that moves elements and does not look at them."""

    def bits(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [bits(item) for item in value]
        return value.bits if isinstance(value, Float64) else value

    codes = function(*(bits(value) for value in args), **kwargs)
    return tuple(map(Float64, codes)) if isinstance(codes, list | tuple) else Float64(codes)


def _operation(name: str) -> Callable[..., Any]:
    """Return what a function or method of tensors does to these numbers; one in place has the name's ending ``_``."""
    operation = _OPERATIONS.get(name.rstrip("_"))
    if operation is None:
        raise NotImplementedError(f"float64 numbers in integers have no {name}; move the tensor to the CPU")
    return operation


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add, "sub": _subtract, "mul": _multiply, "div": _divide, "maximum": _maximum, "minimum": _minimum,
    "rsub": lambda a, b: _subtract(b, a), "neg": lambda x: -x, "abs": lambda x: Float64(x.bits & MAGNITUDE),
    "sqrt": lambda x: Float64(arithmetic.root(x.bits)), "sum": lambda x, dim: Float64(arithmetic.total(x.bits, dim)),
    "sign": _sign, "copysign": _copysign, "where": _where, "clamp": _clamp, "searchsorted": _searchsorted,
    "ne": lambda a, b: ~_compare(torch.eq, a, b),
    "isnan": lambda x: arithmetic.is_nan(x.bits), "signbit": lambda x: x.bits < 0,
    "isfinite": lambda x: (x.bits & MAGNITUDE) < INFINITE, "isinf": lambda x: (x.bits & MAGNITUDE) == INFINITE,
    "amax": lambda x, dim: Float64(arithmetic.from_order(arithmetic.order(x.bits).amax(dim))),
    "to": _to, "float": partial(_to, dtype=torch.float32), "long": partial(_to, dtype=torch.int64), "view": _view,
    "full_like": lambda x, number: Float64(torch.full_like(x.bits, pattern(number))),
    "ones_like": lambda x: Float64(torch.full_like(x.bits, pattern(1.0))),
    "zeros_like": lambda x: Float64(torch.zeros_like(x.bits)),
    "new_full": lambda x, shape, number: Float64(x.bits.new_full(shape, pattern(number))),
    "new_zeros": lambda x, *shape: Float64(x.bits.new_zeros(*shape)),
    "expand_as": lambda x, other: Float64(x.bits.expand(other.shape)), "numel": lambda x: x.bits.numel(),
    "cat": partial(_moved, torch.cat), "pad": partial(_moved, torch.nn.functional.pad),
    **{how.__name__: partial(_compare, how) for how in (torch.lt, torch.le, torch.gt, torch.ge, torch.eq)},
    **{mode: lambda x, mode=mode: Float64(arithmetic.integral(x.bits, mode))
       for mode in ("trunc", "floor", "ceil", "round")},
    **{name: partial(_moved, getattr(Tensor, name)) for name in (
        "reshape", "expand", "contiguous", "unsqueeze", "squeeze", "chunk", "transpose", "flatten", "gather")},
}  # fmt: skip
