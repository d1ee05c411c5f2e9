# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of Hadamard transforms, in float32 additions whose order is fixed (docs/transforms.md)."""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fmtsim.support.errors import ArgumentError

# Elements that are transformed together: on a CPU they and their sums stay in the second-level cache.
_MOST = {"cpu": 1 << 18}
_MOST_ELSEWHERE = 1 << 26


def transform(x: Tensor, size: int, dim: int, matrix: Tensor, flips: Tensor | None, inverse: bool) -> Tensor:
    """Return the transform of every group of ``size`` neighbours along dim: float32, contiguous, NaN canonical.

    Args:
        x: Floats of any strides; size divides ``x.shape[dim]``.
        size: The order of the base matrix times a power of two.
        dim: The dimension, negative.
        matrix: The base, int8 [b, b].
        flips: bool [size] on x's device, elements that change their sign; None is none.
        inverse: Apply the transposed matrix and then the signs.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    across = math.prod(x.shape[x.dim() + dim + 1 :])
    blocks = x.contiguous().view(-1, size, across)
    target = out.view(blocks.shape)
    base = len(matrix)
    plan = sum_plan(matrix, inverse, x.device) if base > 1 else ()
    factor = root(size)
    negated = None if flips is None else flips[:, None]
    for part in _parts(len(blocks), size, across, _MOST.get(x.device.type, _MOST_ELSEWHERE)):
        chunk = blocks[part].float().transpose(0, 1).contiguous()  # a plane for each place: additions run along them
        y = chunk.view(size, -1)
        if negated is not None and not inverse:
            y = torch.where(negated, -y, y)
        y = _butterflies(y, size // base)
        if plan:
            y = _base_sums(y.view(base, -1), plan).view(size, -1)
        y = y * factor
        if negated is not None and inverse:
            y = torch.where(negated, -y, y)
        y = torch.where(y.isnan(), torch.nan, y)
        target[part].copy_(y.view(chunk.shape).transpose(0, 1))
    return out


def root(size: int) -> float:
    """Return ``RN32(1 / sqrt(size))``."""
    return float(torch.tensor(1 / math.sqrt(size), dtype=torch.float32, device="cpu"))


def checked_base(matrix: Tensor) -> Tensor:
    """Return a user's matrix as int8 on the host, or say why it is not a Hadamard matrix."""
    values = matrix.detach().cpu()
    if not bool((values.abs() == 1).all()):
        raise ArgumentError("matrix has elements other than +1 and -1; pass it as it is before it is scaled")
    base = values.to(torch.int8)
    if not _orthogonal(base.numpy().tobytes(), len(base)):
        raise ArgumentError(f"matrix {tuple(base.shape)} has rows that are not orthogonal; pass a Hadamard matrix")
    return base


@lru_cache(maxsize=64)
def _orthogonal(data: bytes, order: int) -> bool:
    """Say whether ``B B^T = b I``; sums of +-1 are exact in float32, whatever their order."""
    base = torch.frombuffer(bytearray(data), dtype=torch.int8).view(order, order).float()
    return bool((base @ base.T == order * torch.eye(order, device="cpu")).all())


def sum_plan(matrix: Tensor, inverse: bool, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return for every four terms which of eight sums each result takes, int64 [b], and its sign, float32 [b, 1]."""
    return _sum_plan(matrix.numpy().tobytes(), len(matrix), inverse, device)


@lru_cache(maxsize=64)
def _sum_plan(data: bytes, order: int, inverse: bool, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    matrix = torch.frombuffer(bytearray(data), dtype=torch.int8).view(order, order)
    weights = (matrix.T if inverse else matrix).contiguous()  # row u holds the weights of term u in every result
    plan = []
    for first, second, third, fourth in weights.view(-1, 4, order):
        index = 4 * (first != third).long() + 2 * (first != second) + (third != fourth)
        plan.append((index.to(device), first.float()[:, None].to(device)))
    return tuple(plan)


def _butterflies(y: Tensor, length: int) -> Tensor:
    """Transform the power-of-two part: places that differ in bits of ``length - 1``, from the lowest bit up."""
    distance = 1
    while distance < length:
        pairs = y.view(-1, 2, distance * y.shape[1])
        results = torch.empty_like(pairs)
        (a, b), (total, difference) = pairs.unbind(1), results.unbind(1)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        y = results.view(y.shape)
        distance *= 2
    return y


def _base_sums(z: Tensor, plan: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    """Add the terms of the base matrix, four by four; z is [b, rest].

    Of the sixteen signs that four terms can have, eight are the negated others, and +0 before the first sum makes the
    sign of a sum of zero meaningless: eight sums serve all results.
    """
    sums = torch.zeros_like(z)
    for (a, b, c, d), (index, sign) in zip(z.view(len(plan), 4, -1), plan, strict=True):
        left = torch.stack((a + b, a - b))[:, None]
        right = torch.stack((c + d, c - d))
        eight = torch.stack((left + right, left - right)).view(8, -1)
        sums.addcmul_(eight[index], sign)  # the product by +-1 is exact, fused or not
    return sums


def _parts(count: int, size: int, across: int, limit: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield indices into ``[count, size, across]`` that hold whole groups, about ``limit`` elements each."""
    width = min(across, max(16, limit // size // 16 * 16))
    height = max(1, limit // (size * width))
    for top in range(0, count, height):
        for left in range(0, across, width):
            yield slice(top, top + height), slice(None), slice(left, left + width)
