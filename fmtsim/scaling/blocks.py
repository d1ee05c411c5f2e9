# SPDX-License-Identifier: Apache-2.0
"""A tensor cut into blocks that share a scale (docs/semantics.md, section 4)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fmtsim.formats.scaling import Block
from fmtsim.spec.cast import matrix_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Say how a tensor is cut into blocks.

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
        matrix = x.movedim(self.dim, -1).reshape(self.outer, self.inner) if self.shape else x.reshape(1, 1)
        below, right = self.rows * self.height - self.outer, self.columns * self.width - self.inner
        if below or right:
            matrix = torch.nn.functional.pad(matrix, (0, right, 0, below))
        blocks = matrix.reshape(self.rows, self.height, self.columns, self.width).transpose(1, 2)
        return blocks.reshape(self.rows * self.columns, self.height * self.width)

    def unfold(self, folded: Tensor) -> Tensor:
        """Return a folded tensor in its shape."""
        if not self.shape:
            return folded[0, 0]
        blocks = folded.reshape(self.rows, self.columns, self.height, self.width).transpose(1, 2)
        matrix = blocks.reshape(self.rows * self.height, self.columns * self.width)[: self.outer, : self.inner]
        rest = [size for axis, size in enumerate(self.shape) if axis != len(self.shape) + self.dim]
        return matrix.reshape(*rest, self.inner).movedim(-1, self.dim)

    def per_block(self, row: Tensor) -> Tensor:
        """Return what a reduction of each row left, one number a block, as ``[rows, columns]``."""
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
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, left + width)


def largest(folded: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest measure of each row."""
    found: list[Tensor] = []
    for rows, columns in windows(folded):
        piece = measure(folded[rows, columns]).amax(1)
        if columns.start:
            found[-1] = torch.maximum(found[-1], piece)
        else:
            found.append(piece)
    return torch.cat(found)
