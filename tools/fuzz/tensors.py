# SPDX-License-Identifier: Apache-2.0
"""Tensors of every kind that torch has, and values that no caller should pass: what the targets of verbs draw from."""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHERS = tuple(
    getattr(torch, name)
    for name in (
        "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool", "complex32", "complex64",
        "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
)  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 6e-8, 3.4e38, -448.0, 57344.0, 1.0)


class Subclass(torch.Tensor):
    """A tensor by another name."""


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no torch function")


def junk(r: Random) -> Any:
    """Return a value of a wrong type, or out of every range."""
    return r.choice(
        (
            None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, -(1 << 64), 10**400, 0.0,
            -0.5, 1.5, 2.0, math.nan, math.inf, 1e308, 1j, "", " ", "e4m3", "E4M3 ", "no", "\ud800", "\0", "x" * 5000,
            "nearest_even", "hopper.wgmma", "h200", b"e4m3", (), [], {}, set(), (1, 2), [1, 2], (None, None), [None],
            ("a", 1), {"a": 1}, [[1.0], [2.0]], object(), Hostile(), Hostile, int, float, len, torch.float32,
            torch.int8, torch.float8_e4m3fn, torch.device("cpu"), torch.strided, numpy.float32(1), numpy.int64(3),
            numpy.ones(3), numpy.array(2), numpy.array(["a"]), torch.tensor(1), torch.ones(2, 2), torch.ones(0),
            torch.Generator(), torch.nn.Linear(2, 2), Path("no/file"), iter(()), Ellipsis, slice(3), ValueError("x"),
        )
    )  # fmt: skip


def numbers(r: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor with some special numbers in it."""
    generator = torch.Generator().manual_seed(r.getrandbits(32))
    if dtype not in (*FLOATS, *OTHERS):  # one of torch's quantised dtypes
        dtype = torch.float32
    if dtype in FLOATS:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** r.randint(-3, 3)
        if x.numel() and r.random() < 0.3:
            x.view(-1)[r.randrange(x.numel())] = r.choice(_SPECIAL)
        return x.to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex64).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    top = r.choice((2, 16, 100, 1 << 7))
    raw = torch.randint(0, top, shape, generator=generator)
    if dtype.is_floating_point:
        return raw.to(torch.uint8).view(dtype)
    return raw.to(dtype)


def shape(r: Random) -> tuple[int, ...]:
    """Return a small shape, now and then one of many dimensions, or an empty one."""
    kind = r.random()
    if kind < 0.05:
        return tuple(r.randint(1, 2) for _ in range(r.randint(5, 14)))
    sizes = (0, 1, 2, 3, 5, 8, 16, 32, 33, 64, 128)
    return tuple(r.choice(sizes[:-2] if rank > 2 else sizes) for rank in [r.randint(0, 4)] for _ in range(rank))


def _permuted(r: Random, x: Tensor) -> Tensor:
    order = list(range(x.dim()))
    r.shuffle(order)
    back = [order.index(i) for i in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def _expanded(r: Random, x: Tensor) -> Tensor:
    if not x.dim():
        return x
    dim = r.randrange(x.dim())
    return x.narrow(dim, 0, min(1, x.shape[dim])).expand(x.shape) if x.shape[dim] else x


def _misaligned(r: Random, x: Tensor) -> Tensor:
    memory = numpy.zeros(x.numel() * x.element_size() + 1, numpy.uint8)[1:]
    if not x.numel() or x.dtype.is_complex or x.dtype not in (torch.float32, torch.float64, torch.float16, torch.int32):
        return x
    memory[:] = x.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


Layout = Callable[[Random, Tensor], Tensor]
_PLAIN: tuple[Layout, ...] = (
    lambda r, x: torch.stack([x, x], -1)[..., 0] if x.dim() < 12 else x, _permuted, _expanded,
    lambda r, x: x.reshape(-1).as_strided((max(x.numel() - 2, 1) // 2, 3), (1, 1)) if x.numel() > 6 else x,  # overlaps
    lambda r, x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape) if x.numel() else x, _misaligned,
    lambda r, x: torch.complex(x, -x).conj().imag if x.dtype in (torch.float32, torch.float64) else x,
    lambda r, x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    lambda r, x: torch.inference_mode()(x.clone)(),
    lambda r, x: torch._neg_view(x) if not x.dtype.is_complex and x.dtype in FLOATS else x,
    lambda r, x: x.mT.contiguous().mT if x.dim() > 1 else x,
    lambda r, x: x.flip(0) if x.dim() and x.dtype in FLOATS else x,
    lambda r, x: x.as_subclass(Subclass), lambda r, x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    lambda r, x: x.clone().requires_grad_() if x.dtype in FLOATS else x,
    lambda r, x: x.clone().requires_grad_() * 1 if x.dtype in FLOATS else x,
)  # fmt: skip
_STRANGE: tuple[Layout, ...] = (
    lambda r, x: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x),
    lambda r, x: torch.quantize_per_tensor(x.float().nan_to_num(0, 1, -1), 0.1, 0, torch.qint8),
    lambda r, x: x.to("meta"), lambda r, x: x.to_sparse(),
    lambda r, x: x.to_sparse_csr() if x.dim() == 2 else x, lambda r, x: torch.nested.nested_tensor([x, x]),
    lambda r, x: torch.nested.nested_tensor([x, x], layout=torch.jagged) if x.dim() else x,
    lambda r, x: x.conj() if x.dtype.is_complex else x, lambda r, x: x.to_mkldnn(),
)  # fmt: skip


def layout(r: Random, x: Tensor, strange: float = 0.06) -> Tensor:
    """Return the numbers of a tensor as another kind of tensor, where torch has that kind for them."""
    kind = r.random()
    change = r.choice(_STRANGE if kind < strange else _PLAIN) if kind < 0.6 else (lambda r, x: x)
    try:
        return change(r, x)
    except (RuntimeError, TypeError, IndexError):  # torch has none of that kind
        return x


def tensor(r: Random, *, dtypes: Any = None, of: Any = None) -> Tensor:
    usual = FLOATS if dtypes is None else dtypes
    dtype = r.choice(usual) if r.random() < 0.85 else r.choice((*FLOATS, *OTHERS))
    sizes = shape(r) if of is None or r.random() < 0.05 else of
    return layout(r, numbers(r, sizes, dtype))


def plain(x: Any) -> Any:
    """Return the same numbers in a tensor of its own that is contiguous; anything else as it is."""
    if isinstance(x, (list, tuple)) and any(isinstance(item, Tensor) for item in x):
        return type(x)(map(plain, x))
    if isinstance(x, torch.Generator):
        return x.clone_state()
    odd = not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided or x.is_quantized or x.is_meta
    if odd or type(x).__name__ == "FakeTensor":
        return x
    bare = x.detach()
    if type(bare) is not torch.Tensor:
        bare = bare.as_subclass(torch.Tensor)
    try:
        return bare.resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)
    except NotImplementedError:  # torch copies few tensors of four bits
        return x


def bits(x: Any) -> Any:
    """Return a result as what can be compared: bits of tensors, representations of the rest."""
    if isinstance(x, Tensor):
        x = plain(x)
        odd = x.is_meta or type(x).__name__ == "FakeTensor" or x.is_nested or x.layout != torch.strided
        if odd or x.dtype.is_complex or not x.numel():
            return (tuple(x.shape), x.dtype)
        return (tuple(x.shape), x.dtype, x.contiguous().view(-1).view(_INTEGERS[x.element_size()]).tolist())
    if isinstance(x, (tuple, list)):
        return [bits(item) for item in x]
    return None
