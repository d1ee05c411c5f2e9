"""Where the blocks of a scale rule lie in memory, and which kernel casts matrices of that kind."""

from typing import NamedTuple

from torch import Tensor

from fmtsim.formats.block import Block

WHOLE, RUNS, TILES, COLUMNS, LONG_COLUMNS = range(5)
RUN_SIZES = (16, 32, 64, 128)
WORDS_NONE, WORDS_SHARED, WORDS_EACH = range(3)
_TILE_COLUMNS = 128
_HELD = 4  # vectors of a thread of scaled_tiles.cu
_LARGEST = 1 << 34  # elements: vectors of a tile and lanes are counted in 32 bits


class Shape(NamedTuple):
    """A matrix as it lies in memory, and its blocks there.

    Attributes:
        kind: WHOLE, RUNS, TILES, COLUMNS or LONG_COLUMNS.
        rows, columns: Of memory; one row where rows follow each other without need to tell them apart.
        turned: Whether the matrix is the transpose of that.
        height, width: Rows and columns of memory that share a scale.
        words: How random words are drawn, the macro WORDS.
        vectors: What a lane of scaled_runs.cu holds: vectors of eight elements, and how far one lies from the
            next.
        counts: Blocks down and across memory.
    """

    kind: int
    rows: int
    columns: int
    turned: bool
    height: int
    width: int
    words: int
    vectors: tuple[int, int]
    counts: tuple[int, int]

    @property
    def steps(self) -> tuple[int, int]:
        """Elements of the matrix's own order from a row of memory to the next and from a column to the next."""
        return (1, self.rows) if self.turned else (self.columns, 1)

    @property
    def run(self) -> int:
        """The macro RUN of the kernels of runs and columns."""
        return {RUNS: self.width, COLUMNS: self.height}.get(self.kind, 0)

    @property
    def unit(self) -> int:
        """Elements that lie together in scaled_runs.cu."""
        return self.vectors[0] * self.vectors[1]

    @property
    def units(self) -> int:
        """Those of a row, filled up to whole blocks."""
        whole = max(self.run, self.unit)
        return -(-self.columns // whole) * whole // self.unit

    @property
    def held(self) -> int:
        """The macro HELD of scaled_tiles.cu."""
        return 0 if self.height * self.width > 512 * 8 * _HELD else _HELD

    @property
    def launch(self) -> tuple[int, int]:
        """Blocks of threads, and threads of one, of the kernel that casts."""
        if self.kind in (WHOLE, RUNS):
            return -(-self.rows * self.units * self.unit // (128 * 8 * self.vectors[0])), 128
        if self.kind == TILES:
            threads = -(-self.height * self.width // (8 * _HELD * 32)) * 32
            return self.counts[0] * self.counts[1], min(threads, 512)
        halves = 32 if self.run == 128 else 16
        return -(-self.rows // (4 * halves)) * -(-self.columns // _TILE_COLUMNS), 16 * halves


def shape_of(x: Tensor, block: Block, *, statistic: str, drawn: bool) -> Shape | None:
    """Return how a matrix lies in memory under the blocks of a rule, or None where no kernel takes it.

    Args:
        x: [rows, inner].
        block: Elements of a block, of the matrix's own order.
        statistic: Of the rule.
        drawn: Whether elements draw random words.
    """
    if x.dim() != 2 or not 0 < x.numel() < _LARGEST:
        return None
    turned = not x.is_contiguous()
    if turned and not x.mT.is_contiguous():
        return None
    rows, columns = x.shape[::-1] if turned else x.shape
    height, width = block[::-1] if turned else block
    height, width = height or rows, width or columns
    kind = None if columns % 8 else _kind(rows, columns, height, width, statistic)
    if kind is None or (
        kind == WHOLE and statistic != "amax" and (turned or statistic == "std" or block != (None, None))
    ):
        return None
    counts = -(-rows // height), -(-columns // width)
    words = _words(kind, rows, columns, turned) if drawn else WORDS_NONE
    if words != WORDS_EACH and (kind == WHOLE or (kind == RUNS and columns % width == 0)):
        width = rows * columns if kind == WHOLE else width
        rows, columns, height = 1, rows * columns, 1
    sums = kind == RUNS and statistic != "amax"
    vectors = 2 if sums and words != WORDS_SHARED else 4, 16 if sums or words == WORDS_SHARED else 256
    return Shape(kind, rows, columns, turned, height, width, words, vectors, counts)


def _kind(rows: int, columns: int, height: int, width: int, statistic: str) -> int | None:
    if height == 1 and width in RUN_SIZES:
        return RUNS
    if height >= rows and width >= columns:
        return WHOLE
    if statistic != "amax":
        return None
    if width == 1:
        return COLUMNS if height in RUN_SIZES else LONG_COLUMNS if height >= rows else None
    return TILES if width % 8 == 0 or width >= columns else None


def _words(kind: int, rows: int, columns: int, turned: bool) -> int:
    """Share words among 64 elements where these lie in one thread: along rows, or down columns."""
    down = kind in (COLUMNS, LONG_COLUMNS)
    if kind == TILES or down != turned:
        return WORDS_EACH
    whole = (rows if down else columns) % 64 == 0
    return WORDS_SHARED if whole or kind == WHOLE or (rows == 1 and not down) else WORDS_EACH
