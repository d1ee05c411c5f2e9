"""The Hadamard transform that spreads outliers over a group before it is quantised, defined to the last bit."""

import math

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError

SIZES = (16, 32, 64, 128)


def hadamard(x: Tensor, size: int, signs: int | Tensor | None = None) -> Tensor:
    """Return ``(s x) H / sqrt(size)`` of every group of ``size`` neighbours along the last dimension, in float32.

    H is the Sylvester matrix, ``H[i][j] = (-1)^popcount(i & j)``. The order of operations defines every bit, and the
    CUDA engine's fused kernels follow it:

    1. x becomes float32 (float64 is rounded to nearest even), and elements whose sign is turned are negated.
    2. For the distances h = 1, 2, 4, ..., size / 2: each pair of places i and i + h (bit h of i is 0) takes
       ``RN32(a + b)`` and ``RN32(a - b)``.
    3. Each number is multiplied by ``RN32(1 / sqrt(size))``.

    Args:
        x: ``[..., K]``, float16, bfloat16, float32 or float64; size divides K.
        size: 16, 32, 64 or 128.
        signs: What the elements of each group are multiplied with first: a bit mask (bit j set: element j is
            negated), or a tensor [size] whose negative elements negate. None negates nothing.

    Returns:
        float32 of x's shape. NaN and Inf spread over their group as IEEE arithmetic says; NaN is canonical. The same
        on every device.

    Raises:
        ArgumentError: The size is another, does not divide K, or the signs do not fit it.
        DtypeError: x is no floating-point tensor of those.
    """
    check_hadamard(x, size, signs)
    y = x.float().reshape(*x.shape[:-1], x.shape[-1] // size, size)
    if signs is not None:
        y = torch.where(sign_bits(signs, size).to(x.device), -y, y)
    distance = 1
    while distance < size:
        a, b = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        distance *= 2
    y = (y * root(size)).reshape(x.shape)
    return torch.where(y.isnan(), torch.nan, y)


def root(size: int) -> float:
    """Return ``RN32(1 / sqrt(size))``."""
    return float(torch.tensor(1 / math.sqrt(size), dtype=torch.float64).float())


def sign_bits(signs: int | Tensor, size: int) -> Tensor:
    """Return which elements of a group change their sign, bool [size]."""
    if isinstance(signs, Tensor):
        return signs.signbit()
    return torch.tensor([bool(signs >> place & 1) for place in range(size)])


def check_hadamard(x: Tensor, size: int, signs: int | Tensor | None) -> None:
    """Raise for a transform that is not defined."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise DtypeError(f"x has dtype {x.dtype}; pass float16, bfloat16, float32 or float64")
    if size not in SIZES:
        raise ArgumentError(f"size={size!r} is not one of a Hadamard transform here; choose 16, 32, 64 or 128")
    if x.dim() == 0 or x.shape[-1] % size:
        raise ArgumentError(
            f"size={size} does not divide the last dimension of x {tuple(x.shape)}; pad x or choose less"
        )
    if isinstance(signs, Tensor):
        if signs.shape != (size,):
            raise ArgumentError(f"signs have shape {tuple(signs.shape)}; pass one for each of {size} elements")
    elif signs is not None and (type(signs) is not int or not 0 <= signs < 1 << size):
        raise ArgumentError(f"signs={signs!r} is not a mask of {size} bits; pass an int from 0 to 2**{size} - 1")
