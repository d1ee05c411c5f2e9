# SPDX-License-Identifier: Apache-2.0
"""A case is a kernel with its launch and operands; operands are drawn from seeds, alike on every machine.

Numbers come from the raw words of numpy's PCG64 (a stream that numpy never changes) by operations that are exact, or
that round once to nearest even; so a record holds results alone, and a digest of its operands.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# bits of 32-bit floats that meet every branch of a conversion or a special function
_SPECIAL = (
    *(0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x33800000, 0x387FC000, 0x38800000, 0x3B000000),
    *(0x3D000000, 0x3DCCCCCD, 0x3EAAAAAB, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000, 0x40000000),
    *(0x40200000, 0x40490FDB, 0x42AEAC50, 0x42B17218, 0x42FC0000, 0x43000000, 0x43800000, 0x43E00000, 0x43E80000),
    *(0x43E80001, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x4B000000, 0x4B7FFFFF, 0x4F000000, 0x4F7FFFFF),
    *(0x5F000000, 0x7E800000, 0x7E800001, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FA00000, 0x7FC00000),
    *(0x7FC12345, 0x7FFFFFFF, 0x7FBFE000),
)


def words(seed: int, count: int) -> np.ndarray:
    """Return uniform 64-bit words."""
    return np.random.PCG64(seed).random_raw(count)


def integers(seed: int, *shape: int, low: int = 0, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return integers of [low, high): the high halves of 32-bit words times the range."""
    found = (words(seed, int(np.prod(shape))) >> np.uint64(32)) * np.uint64(high - low) >> np.uint64(32)
    return torch.from_numpy(found.astype(np.int64) + low).reshape(shape).to(dtype)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Return sums of four uniform numbers, of deviation 1.15 times ``scale`` (a power of two), all bits in use."""
    drawn = words(seed, int(np.prod(shape)))
    sums = sum((drawn >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) - 32768 for i in range(4))
    last = (drawn * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(48)).astype(np.int64)
    value = torch.from_numpy((sums * 65536 + last).astype(np.float64) * 2.0**-31 * scale).reshape(shape)
    return value if dtype == torch.float64 else value.float().to(dtype)


def patterns(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of random bits: every exponent, subnormal numbers, infinities and NaN among them."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(words(seed, -(-nbytes // 8)).view(np.uint8)[:nbytes].copy()).view(dtype).reshape(shape)


def special(seed: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return special numbers of both signs, numbers near 1, of a wide range, and of random bits, ``count`` in all."""
    edges = torch.tensor(np.array(_SPECIAL, np.uint32).view(np.float32))
    if dtype == torch.float64:
        edges = edges.double()
    elif dtype != torch.float32:  # the high bits; conversions of NaN are not the same everywhere
        bits = edges.view(torch.int32) >> 16
        half = torch.tensor([0, 1, 0x3FF, 0x400, 0x401, 0x3C00, 0x3C01, 0x3555, 0x5BFF, 0x7BFF, 0x7C00, 0x7C01, 0x7E01])
        edges = (bits if dtype == torch.bfloat16 else half).to(torch.int16).view(dtype)
    both = torch.cat([edges, edges.view(_INTEGER[dtype.itemsize]).bitwise_xor(_sign(dtype)).view(dtype)])
    rest = count - len(both)
    if rest <= 0:
        return both[:count]
    wide = torch.from_numpy(np.ldexp(1.0, integers(seed + 1, rest, low=-20, high=20).numpy()))
    ordinary = normal(seed, rest, dtype=torch.float64) * wide
    ordinary = ordinary if dtype == torch.float64 else ordinary.float().to(dtype)
    choice = integers(seed + 2, rest, high=3)
    drawn = torch.where(choice == 0, patterns(seed + 3, rest, dtype=dtype).view(_INTEGER[dtype.itemsize]), 0)
    plain = torch.where(choice == 1, normal(seed + 4, rest, dtype=dtype), ordinary).view(_INTEGER[dtype.itemsize])
    return torch.cat([both, torch.where(choice == 0, drawn, plain).view(dtype)])


def _sign(dtype: torch.dtype) -> int:
    return -(1 << (8 * dtype.itemsize - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel, how it is launched and with what; ``kernel`` is a Triton function, CUDA C++ or PTX text."""

    name: str
    kernel: object
    grid: tuple[int, ...]
    make_arguments: Callable[[], Sequence[object]]  # CPU tensors, numbers, Triton's host descriptors
    constexprs: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)  # num_warps ...; of CUDA and PTX: block, shared, flags
    kind: str = "triton"  # "triton", "cuda" or "ptx"
    entry: str = ""  # of CUDA and PTX


def tensors(arguments: Sequence[object]) -> list[Tensor]:
    """Return the tensors among the arguments, those of descriptors too, in order."""
    found = [getattr(argument, "base", argument) for argument in arguments]
    return [item for item in found if isinstance(item, Tensor)]


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(arguments: Sequence[object]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of every argument: a record says which operands it had."""
    hashed = hashlib.sha256()
    for argument in arguments:
        base = getattr(argument, "base", argument)
        hashed.update(raw(base) if isinstance(base, Tensor) else repr(base).encode())
    return hashed.hexdigest()[:16]


def compile_triton(case: Case) -> object:
    """Compile a Triton case for compute capability 9.0 without a GPU, specialised as Triton's launcher does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as compiled
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend, kernel = make_backend(target), case.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = {**case.constexprs, **case.options, "debug": False}
    bound, specialization, options = binder(*case.make_arguments(), **keywords)
    options, signature, constexprs, attrs = kernel._pack_args(backend, keywords, bound, specialization, options)
    return compiled(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options.__dict__)
