# SPDX-License-Identifier: Apache-2.0
"""Layouts of blocks in memory: three axes for block formats, a matrix for operands of products."""

from typing import NamedTuple

from torch import Tensor

from fmtsim.formats.block import Block, BlockFormat

TENSOR, RUNS, TILES, COLUMNS, LONG_COLUMNS = range(5)
RUN_SIZES = (16, 32, 64, 128)
WORDS_NONE, WORDS_SHARED, WORDS_EACH = range(3)
_TILE_COLUMNS = 128
_CACHED = 4  # vectors of a thread of scaled_tiles.cu
_LARGEST = 1 << 34  # elements: vectors of a tile and lanes are counted in 32 bits


class View(NamedTuple):
    """A tensor as [leading, inner, trailing], ``inner`` the blocks' inner axis, and the strides of the three."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def dense(self) -> bool:
        """Whether memory holds the three axes in order and without gaps."""
        expected = self.sizes[1] * self.sizes[2], self.sizes[2], 1
        return all(n == 1 or have == want for n, have, want in zip(self.sizes, self.strides, expected, strict=True))

    @property
    def rows_last(self) -> "View":
        """The leading axis as the trailing one where that has one element: rows keep their order."""
        (leading, inner, trailing), (first, middle, last) = self
        return View((1, inner, leading), (last, middle, first)) if trailing == 1 else self


ONE = View((1, 1, 1), (1, 1, 1))


def view_of(t: Tensor, dim: int) -> View | None:
    """Return a tensor as [leading, inner, trailing], None where its strides do not allow it."""
    if t.dim() == 0:
        return ONE
    axis = t.dim() + dim
    leading, trailing = _merged(t.shape[:axis], t.stride()[:axis]), _merged(t.shape[axis + 1 :], t.stride()[axis + 1 :])
    if leading is None or trailing is None:
        return None
    return View((leading[0], t.shape[axis], trailing[0]), (leading[1], t.stride(axis), trailing[1]))


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Return neighbouring dimensions as one size and one stride."""
    size, stride = 1, 1
    for extent, step in zip(reversed(sizes), reversed(strides), strict=True):
        if extent == 1:
            continue
        if size > 1 and step != size * stride:
            return None
        size, stride = (size * extent, stride) if size > 1 else (extent, step)
    return size, stride


def block_extent(fmt: BlockFormat, sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Return the rows and columns of a format's block in a view of these sizes; None extents reach to the end."""
    return fmt.block[0] or max(sizes[0] * sizes[2], 1), fmt.block[1] or max(sizes[1], 1)


class MatrixLayout(NamedTuple):
    """A matrix as it lies in memory, and its blocks there.

    Attributes:
        kind: TENSOR, RUNS, TILES, COLUMNS or LONG_COLUMNS.
        rows, columns: Of memory; one row where rows follow each other without need to tell them apart.
        transposed: Whether the matrix is the transpose of that.
        height, width: Rows and columns of memory that share a scale.
        words: How random words are drawn, the macro WORDS.
        vectors: What a lane of scaled_rows.cu holds: vectors of eight elements, and how far one lies from the
            next.
        counts: Blocks down and across memory.
    """

    kind: int
    rows: int
    columns: int
    transposed: bool
    height: int
    width: int
    words: int
    vectors: tuple[int, int]
    counts: tuple[int, int]

    @property
    def steps(self) -> tuple[int, int]:
        """Elements of the matrix's own order from a row of memory to the next and from a column to the next."""
        return (1, self.rows) if self.transposed else (self.columns, 1)

    @property
    def run(self) -> int:
        """The macro RUN of the kernels of runs and columns."""
        return {RUNS: self.width, COLUMNS: self.height}.get(self.kind, 0)

    @property
    def unit(self) -> int:
        """Elements of a unit: neighbours that the same lanes of scaled_rows.cu hold."""
        return self.vectors[0] * self.vectors[1]

    @property
    def units(self) -> int:
        """Units of a row, which is filled up to whole blocks."""
        whole = max(self.run, self.unit)
        return -(-self.columns // whole) * whole // self.unit

    @property
    def cached(self) -> int:
        """The macro CACHED of scaled_tiles.cu."""
        return 0 if self.height * self.width > 512 * 8 * _CACHED else _CACHED

    @property
    def launch(self) -> tuple[int, int]:
        """Blocks of threads, and threads of one, of the kernel that casts."""
        if self.kind in (TENSOR, RUNS):
            return -(-self.rows * self.units * self.unit // (128 * 8 * self.vectors[0])), 128
        if self.kind == TILES:
            threads = -(-self.height * self.width // (8 * _CACHED * 32)) * 32
            return self.counts[0] * self.counts[1], min(threads, 512)
        halves = 32 if self.run == 128 else 16
        return -(-self.rows // (4 * halves)) * -(-self.columns // _TILE_COLUMNS), 16 * halves


def matrix_layout(x: Tensor, block: Block, *, statistic: str, stochastic: bool) -> MatrixLayout | None:
    """Return the layout of a matrix under the blocks of a rule, None where no kernel takes it.

    Args:
        x: [rows, inner].
        block: Elements of a block, of the matrix's own order.
        statistic: Of the rule.
        stochastic: Whether elements draw random words.
    """
    if x.dim() != 2 or not 0 < x.numel() < _LARGEST:
        return None
    transposed = not x.is_contiguous()
    if transposed and not x.mT.is_contiguous():
        return None
    rows, columns = x.shape[::-1] if transposed else x.shape
    height, width = block[::-1] if transposed else block
    height, width = height or rows, width or columns
    kind = None if columns % 8 else _kind(rows, columns, height, width, statistic)
    if kind is None or (
        kind == TENSOR and statistic != "amax" and (transposed or statistic == "std" or block != (None, None))
    ):
        return None
    counts = -(-rows // height), -(-columns // width)
    words = _words(kind, rows, columns, transposed) if stochastic else WORDS_NONE
    if words != WORDS_EACH and (kind == TENSOR or (kind == RUNS and columns % width == 0)):
        width = rows * columns if kind == TENSOR else width
        rows, columns, height = 1, rows * columns, 1
    sums = kind == RUNS and statistic != "amax"
    vectors = 2 if sums and words != WORDS_SHARED else 4, 16 if sums or words == WORDS_SHARED else 256
    return MatrixLayout(kind, rows, columns, transposed, height, width, words, vectors, counts)


def _kind(rows: int, columns: int, height: int, width: int, statistic: str) -> int | None:
    if height == 1 and width in RUN_SIZES:
        return RUNS
    if height >= rows and width >= columns:
        return TENSOR
    if statistic != "amax":
        return None
    if width == 1:
        return COLUMNS if height in RUN_SIZES else LONG_COLUMNS if height >= rows else None
    return TILES if width % 8 == 0 or width >= columns else None


def _words(kind: int, rows: int, columns: int, transposed: bool) -> int:
    """Return how words are drawn: shared by 64 elements where one thread holds these, along rows or down columns."""
    down = kind in (COLUMNS, LONG_COLUMNS)
    if kind == TILES or down != transposed:
        return WORDS_EACH
    whole = (rows if down else columns) % 64 == 0
    return WORDS_SHARED if whole or kind == TENSOR or (rows == 1 and not down) else WORDS_EACH
