"""The geometry of blocks: a tensor as rows that each lie in one block (docs/semantics.md, section 4)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fmtsim.formats.block import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Say how a tensor is cut into blocks.

    The operand is the matrix ``[outer, inner]``. Folding cuts each of its rows into pieces of ``width`` elements, the
    last one padded with zeros: the folded matrix ``[outer * columns, width]`` has one block for each row, and
    ``height`` consecutive rows of the operand share the blocks of a block row.
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
        return -(-self.outer // self.height) if self.outer else 0

    @property
    def columns(self) -> int:
        """Blocks along the inner axis."""
        return -(-self.inner // self.width) if self.inner else 0

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as ``[outer * columns, width]``, a view where strides allow it."""
        matrix = x.reshape(1, 1) if not self.shape else x.movedim(self.dim, -1).reshape(self.outer, self.inner)
        padding = self.columns * self.width - self.inner
        if padding:
            matrix = torch.cat([matrix, matrix.new_zeros(self.outer, padding)], dim=1)
        return matrix.reshape(self.outer * self.columns, self.width)

    def unfold(self, folded: torch.Tensor) -> torch.Tensor:
        """Return a folded matrix in the tensor's shape."""
        if not self.shape:
            return folded[0, 0]
        matrix = folded.reshape(self.outer, self.columns * self.width)[:, : self.inner]
        rest = list(self.shape)
        inner = rest.pop(self.dim)
        return matrix.reshape(*rest, inner).movedim(-1, self.dim)

    def spread(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return one number a block, ``[rows, columns]``, as one a folded row, ``[outer * columns, 1]``."""
        return blocks.repeat_interleave(self.height, dim=0)[: self.outer].reshape(-1, 1)

    def windows(self, folded: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield rectangles that cover a folded tensor, each small enough to work on at a time."""
        return windows(folded.shape[0], folded.shape[1], chunk_size(folded.device))

    def largest(self, folded: torch.Tensor, measure: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the largest measure in each block, ``[rows, columns]`` int64, at least 0.

        Args:
            folded: The folded tensor.
            measure: Maps a piece of it to non-negative integers of its shape; zero elements must measure 0.
        """
        by_row = torch.zeros(folded.shape[0], dtype=torch.int64, device=folded.device)
        for rows, columns in self.windows(folded):
            piece = measure(folded[rows, columns]).amax(dim=1).to(torch.int64)
            by_row[rows] = torch.maximum(by_row[rows], piece)
        matrix = by_row.reshape(self.outer, self.columns)
        if self.height == 1:
            return matrix
        padding = matrix.new_zeros(self.rows * self.height - self.outer, self.columns)
        return torch.cat([matrix, padding]).reshape(self.rows, self.height, self.columns).amax(dim=1)


def geometry(shape: tuple[int, ...], dim: int, block: Block) -> Geometry:
    """Return how a tensor of that shape, not empty, is cut along ``dim``, a negative number."""
    inner = shape[dim] if shape else 1
    outer = 1
    for axis, size in enumerate(shape):
        outer *= 1 if axis == len(shape) + dim else size
    height, width = block
    return Geometry(
        shape=tuple(shape),
        dim=dim,
        outer=outer,
        inner=inner,
        height=min(height or outer, outer),
        width=min(width or inner, inner),
    )


def chunk_size(device: torch.device) -> int:
    """Return how many elements to work on at a time, a multiple of ``philox.GROUP``.

    On a CPU the temporaries of that many elements stay in the cache (measured: twice as fast as 2**18); an accelerator
    needs more of them to cover the cost of a launch.
    """
    return 1 << 16 if device.type == "cpu" else 1 << 22


def windows(rows: int, columns: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield rectangles that cover a matrix, each of about ``limit`` elements at most."""
    width = min(columns, limit)
    height = max(1, limit // max(width, 1))
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, left + width)
