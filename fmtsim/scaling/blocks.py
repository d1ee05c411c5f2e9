# SPDX-License-Identifier: Apache-2.0
"""A tensor cut into blocks that share a scale (docs/semantics.md, section 4), and the statistic of each block.

Largest magnitudes do not depend on an order. Sums are float64 sums of neighbours at a distance that is halved until one
number is left, with zeros up to a power of two: the same on every device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fmtsim.casts.ops import cpu_engine
from fmtsim.formats.scaling import Block, Statistic
from fmtsim.scaling.scales import FLT_MAX
from fmtsim.spec.cast import matrix_shape
from fmtsim.support.float64 import float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Describe how a tensor is cut into blocks.

    The operand is the matrix ``[outer, inner]`` with ``dim`` as its inner axis. Folded it is ``[rows * columns,
    height * width]``, a row for each block; blocks at the far edges are filled up with zeros.
    """

    shape: tuple[int, ...]
    dim: int
    outer: int
    inner: int
    height: int
    width: int

    @property
    def rows(self) -> int:
        """Blocks along the outer axis."""
        return -(-self.outer // self.height)

    @property
    def columns(self) -> int:
        """Blocks along the inner axis."""
        return -(-self.inner // self.width)

    def fold(self, x: Tensor) -> Tensor:
        """Return x with a row for each block, a view where strides allow it."""
        # 1. the operand matrix, zeros up to whole blocks
        matrix = x.movedim(self.dim, -1).reshape(self.outer, self.inner) if self.shape else x.reshape(1, 1)
        below, right = self.rows * self.height - self.outer, self.columns * self.width - self.inner
        if below or right:
            matrix = torch.nn.functional.pad(matrix, (0, right, 0, below))
        # 2. block rows and columns first, the elements of a block last
        blocks = matrix.reshape(self.rows, self.height, self.columns, self.width).transpose(1, 2)
        return blocks.reshape(self.rows * self.columns, self.height * self.width)

    def unfold(self, folded: Tensor) -> Tensor:
        """Return a folded tensor in its shape."""
        if not self.shape:
            return folded[0, 0]
        blocks = folded.reshape(self.rows, self.columns, self.height, self.width).transpose(1, 2)
        matrix = blocks.reshape(self.rows * self.height, self.columns * self.width)[: self.outer, : self.inner]
        outer = [size for axis, size in enumerate(self.shape) if axis != self.dim % len(self.shape)]
        return matrix.reshape(*outer, self.inner).movedim(-1, self.dim)

    def per_block(self, row: Tensor) -> Tensor:
        """Return one number a block, as a reduction of each row gives them, as ``[rows, columns]``."""
        return row.reshape(self.rows, self.columns)


def blocks_of(shape: tuple[int, ...], dim: int, block: Block) -> Blocks:
    """Return how a tensor of that shape, not empty, is cut along ``dim``, a negative number."""
    outer, inner = matrix_shape(shape, dim)
    height, width = min(block[0] or outer, outer), min(block[1] or inner, inner)
    return Blocks(shape=tuple(shape), dim=dim, outer=outer, inner=inner, height=height, width=width)


_MOST = {"cpu": 1 << 16}
_MOST_ELSEWHERE = 1 << 22


def chunk_size(device: torch.device) -> int:
    """Return how many elements to work on at a time, a multiple of the 64 that share counters of random words.

    On a CPU the temporaries of that many elements stay in the cache (measured: twice as fast as 2**18); an accelerator
    needs more of them to cover the cost of a launch.
    """
    return _MOST.get(device.type, _MOST_ELSEWHERE)


def windows(folded: Tensor, limit: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield rectangles that cover a matrix, each of about ``limit`` elements at most (None: ``chunk_size``)."""
    rows, columns = folded.shape
    limit = limit or chunk_size(folded.device)
    width = min(columns, limit)
    height = max(1, limit // max(width, 1))
    for top in range(0, rows, height):
        for start in range(0, columns, width):
            yield slice(top, top + height), slice(start, start + width)


def largest(folded: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest measure of each row."""
    maxima: list[Tensor] = []
    for rows, columns in windows(folded):
        piece = measure(folded[rows, columns]).amax(1)
        if columns.start:  # more of the rows that came last
            maxima[-1] = torch.maximum(maxima[-1], piece)
        else:
            maxima.append(piece)
    return torch.cat(maxima)


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
    # 1. by a kernel
    engine = cpu_engine(x)
    if engine is not None and x.dtype != torch.float64 and x.numel():
        amax = kind == "amax"
        values = engine.block_amax(x.float(), sizes) if amax else engine.block_means(x.float(), sizes, kind)
        if values is not None:
            return values
    # 2. by torch ops: zeros in the place of what is not finite
    finite = x.isfinite()
    if x.device.type != "cpu" or not bool(finite.all()):  # a GPU is not waited for
        x = torch.where(finite, x, 0)
    if kind == "amax":
        values = blocked(x.abs(), sizes).amax(-1)
    else:
        values = _mean(blocked(float64(x), sizes), blocked(float64(finite), sizes), kind)
    return values.float().clamp(max=FLT_MAX)


def _mean(x: Tensor, is_element: Tensor, kind: Statistic) -> Tensor:
    """Return a mean of the last axis; ``is_element`` is 1 for finite elements, 0 for others and for padding."""
    count = is_element.sum(-1).clamp(min=1)  # whole numbers: exact in any order
    if kind == "mean_abs":
        return folded_sum(x.abs()) / count
    if kind == "std":
        x = torch.where(is_element > 0, x - (folded_sum(x) / count).unsqueeze(-1), 0)
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
