# SPDX-License-Identifier: Apache-2.0
"""Configurations of the kernels on the fp64 tensor core: warps, stages, blocks at once, and which is fastest."""

from typing import NamedTuple

from fmtsim.engines.cuda.runtime import Defines

ROWS_A = 64
_PLACES = 32  # of a stage, where blocks are shorter
_SINGLE, _PROMOTED, _LONG, _MIDDLE, _SHORT, _SHORT_WIDE = range(6)  # what is fast in different shapes: ``_kind``


class Choice(NamedTuple):
    """Warps along the columns, halves of a warp, stages, resident blocks; k positions of a stage; DOUBLE_M."""

    columns: int
    halves: int
    stages: int
    resident: int
    places: int = _PLACES
    double_m: bool = False


_USUAL = Choice(2, 2, 3, 2), Choice(2, 1, 3, 2), Choice(2, 2, 3, 1), Choice(1, 1, 3, 1)
# Fastest first (docs/performance.md). DOUBLE_M where nothing is spilled (tests/engines/cuda/test_gemm_methods.py), but
# not for short blocks of float16: NVRTC 13.0 compiles those wrongly.
CHOICES = {
    _SINGLE: (
        Choice(1, 1, 3, 4), Choice(1, 1, 3, 3), Choice(2, 1, 3, 2), Choice(2, 1, 3, 1), Choice(1, 1, 3, 1),
    ),
    _PROMOTED: _USUAL,
    _LONG: (Choice(2, 1, 3, 2), *_USUAL),
    _MIDDLE: (Choice(1, 1, 3, 4, 16, double_m=True), *_USUAL),
    _SHORT: _USUAL,
    _SHORT_WIDE: (Choice(2, 2, 3, 2, double_m=True), *_USUAL),
}  # fmt: skip


class Shape(NamedTuple):
    """The specialisation of aligned_fp64_mma.cu: macros, and what follows from them."""

    span: int
    block: int
    columns: int
    halves: int
    stages: int
    resident: int
    records: int
    promote: int
    two_words: bool
    wide: bool
    down: bool
    single: bool
    fraction: int
    kept: int
    eight: bool
    double_m: bool

    @property
    def rows_b(self) -> int:
        """Rows of the second operand in a tile."""
        return 32 * self.columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (4 // self.halves) * self.columns

    @property
    def run(self) -> int:
        """Blocks that one thread block of pack_operand packs."""
        return max(1, 64 // self.span)

    def record(self, rows: int, first: bool) -> int:
        """Return the bytes of a block of a panel of an operand."""
        words = -(-self.span // 32) * (2 if self.wide else 1)
        return rows * (self.span * (8 if first and self.two_words else 4) + self.span * 2 + words * 4)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block of threads."""
        stage = self.records * (self.record(ROWS_A, True) + self.record(self.rows_b, False))
        return self.stages * stage + (self.rows_b * ROWS_A * 4 if self.promote else 0)

    @property
    def defines(self) -> Defines:
        """The macros."""
        names = (
            "SPAN", "BLOCK", "COLUMNS", "HALVES", "STAGES", "RESIDENT", "RECORDS", "PROMOTE",
            "TWO_WORDS", "WIDE", "DOWN", "SINGLE", "FRACTION", "KEPT", "EIGHT", "DOUBLE_M",
        )  # fmt: skip
        return tuple((name, str(int(value))) for name, value in zip(names, self, strict=True))


def fitting(
    span: int, block: int, promote: int, two_words: bool, wide: bool, down: bool, single: bool, fraction: int,
    kept: int, eight: bool, *, limit: int, holds: bool = True,
) -> Shape:  # fmt: skip
    """Choose the fastest specialisation that shared memory holds, with the kilobyte that each block takes besides.

    ``holds`` allows those with DOUBLE_M.
    """
    for choice in CHOICES[_kind(single, promote, span, wide)]:
        if choice.double_m and not holds:
            continue
        records, double_m = max(1, choice.places // span), choice.double_m
        shape = Shape(
            span, block, *choice[:4], records, promote, two_words, wide, down, single, fraction, kept, eight, double_m
        )  # fmt: skip
        if (shape.shared + 1024) * shape.resident <= limit + 1024:
            break
    return shape


def _kind(single: bool, promote: int, span: int, wide: bool) -> int:
    """Say which shapes are fast: those of float32 sums, or by promotion, the length of blocks and exponents."""
    if single or (promote and not (wide and span == 16)):
        return _SINGLE if single else _PROMOTED
    if span < 16:
        return _SHORT_WIDE if wide else _SHORT
    return _LONG if span > 16 else _MIDDLE
