# SPDX-License-Identifier: Apache-2.0
"""What a scale is made of: one number a block, the same on every device.

Largest magnitudes do not depend on an order. Sums do: they are float64 sums of neighbours at a distance that is halved
until one number is left, zeros filling up to a power of two.
"""

import torch
from torch import Tensor

from fmtsim.casts.ops import cpu_engine
from fmtsim.formats.scaling import Block, Statistic
from fmtsim.scaling.scales import FLT_MAX
from fmtsim.support.float64 import float64


def block_sizes(block: Block, shape: torch.Size) -> tuple[int, int]:
    """Return the elements of a block along the outer and inner axis of a matrix, at least 1 each."""
    (outer, inner), (rows, columns) = block, shape
    return max(rows if outer is None else outer, 1), max(columns if inner is None else inner, 1)


def blocked(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return a matrix as ``[outer blocks, inner blocks, elements of a block]``, short blocks filled up with zeros."""
    below, right = (-extent % size for extent, size in zip(x.shape, sizes, strict=True))
    if below or right:
        x = torch.nn.functional.pad(x, (0, right, 0, below))
    split = x.reshape(x.shape[0] // sizes[0], sizes[0], x.shape[1] // sizes[1], sizes[1])
    return split.transpose(1, 2).flatten(2)


def statistic(x: Tensor, block: Block, kind: Statistic) -> Tensor:
    """Return a statistic of every block of a matrix.

    Args:
        x: [M, N]; float16, bfloat16, float32 or float64.
        block: Elements of a block.
        kind: ``"amax"``, ``"std"``, ``"rms"``, ``"mean_abs"`` or ``"one"``.

    Returns:
        float32 [outer blocks, inner blocks]: at most the largest float32, 0 for blocks without a finite element. NaN
        and Inf elements take no part, nor do the zeros that fill up a short block. Means are float64 quotients of
        float64 sums, the standard deviation is the root of the mean squared distance from the mean; each is rounded to
        float32 once.
    """
    sizes = block_sizes(block, x.shape)
    if kind == "one":
        counts = [-(-extent // size) for extent, size in zip(x.shape, sizes, strict=True)]
        return torch.ones(counts, device=x.device)
    engine = cpu_engine(x)
    if engine is not None and x.dtype != torch.float64 and x.numel():
        amax = kind == "amax"
        made = engine.block_amax(x.float(), sizes) if amax else engine.block_means(x.float(), sizes, kind)
        if made is not None:
            return made
    finite = x.isfinite()
    if x.device.type != "cpu" or not bool(finite.all()):  # a GPU is not waited for
        x = torch.where(finite, x, 0)
    if kind == "amax":
        found = blocked(x.abs(), sizes).amax(-1)
    else:
        found = _mean(blocked(float64(x), sizes), blocked(float64(finite), sizes), kind)
    return found.float().clamp(max=FLT_MAX)


def _mean(x: Tensor, there: Tensor, kind: Statistic) -> Tensor:
    count = there.sum(-1).clamp(min=1)  # whole numbers: exact in any order
    if kind == "mean_abs":
        return folded_sum(x.abs()) / count
    if kind == "std":
        x = torch.where(there > 0, x - (folded_sum(x) / count).unsqueeze(-1), 0)
    return (folded_sum(x * x) / count).sqrt()


def folded_sum(x: Tensor) -> Tensor:
    """Sum the last axis: element i and i + n / 2 are added until one number is left, n being a power of two."""
    n = x.shape[-1]
    if n & (n - 1):
        x = torch.nn.functional.pad(x, (0, (1 << n.bit_length()) - n))
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x.squeeze(-1)
