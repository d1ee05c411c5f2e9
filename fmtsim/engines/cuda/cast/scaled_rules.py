# SPDX-License-Identifier: Apache-2.0
"""Quantisers with a scale rule as what kernels take: macros, structures as bytes, and where blocks lie in memory."""

import math
import struct
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from fmtsim.engines.cuda.cast.grid import BITS, FIXED, FLUSHING, MAGIC, Grid, grid_of
from fmtsim.engines.cuda.cast.parameters import macros
from fmtsim.engines.cuda.runtime import Defines
from fmtsim.formats.block import FP32, Block
from fmtsim.formats.scaling import Scaling
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.quantizer import ClipMask, Differentiable, Quantizer, StraightThrough, TrustMask

MOMENTS: Final = ("std", "rms", "mean_abs")
_STATISTICS = ("amax", *MOMENTS)
_EPS_RULES = ("statistic", "sum", "scale", "inverse")
_POWERS = (None, "floor", "ceil")
_TIES = {"nearest_even": 0, "stochastic": 0, "nearest_toward_zero": 1, "nearest_away": 2}
_RULE = struct.Struct("<8f 8f 8i")
NO_RULE: Final = bytes(_RULE.size)
_HISTORY = struct.Struct("<f3i4I")
_STEPS = 8
_FLT_MIN = 2.0**-126
_DIGITS = 8  # significant bits of bfloat16
_NO_GRID = bytes(112)

TENSOR, RUNS, TILES, COLUMNS, LONG_COLUMNS = range(5)
RUN_SIZES = (16, 32, 64, 128)
WORDS_NONE, WORDS_SHARED, WORDS_EACH = range(3)
_TILE_COLUMNS = 128
_CACHED = 4  # vectors of a thread of scaled_tiles.cu
_LARGEST = 1 << 34  # elements: vectors of a tile and lanes are counted in 32 bits


class KernelRule(NamedTuple):
    """What a quantiser is to the kernels.

    Attributes:
        rule: The bytes of ``struct Rule``.
        grid: Of the elements.
        scale_grid: The bytes of ``struct Grid`` of the scales.
        ties: The macro TIES.
        masks: Whether the gradient has a mask.
        folds: Whether bfloat16 holds element times block scale, the multiplier aside.
        divides: The macro DIVIDES.
    """

    rule: bytes
    grid: Grid
    scale_grid: bytes
    ties: int
    masks: bool
    folds: bool
    divides: bool

    def defines(self, input_type: int, words: int, fold: bool) -> Defines:
        """Return the macros of scaled.cuh."""
        own = macros(INPUT=input_type, PAIRS=0, TIES=self.ties, FOLDS=fold, MASKS=self.masks, WORDS=words)
        return (*self.grid.defines, *own, *macros(DIVIDES=self.divides))


def rule_of(quantizer: Quantizer) -> KernelRule | None:
    """Return what a quantiser is to the kernels, or None where they do not cover it."""
    scaling, element = quantizer.scaling, quantizer.format
    if scaling is None or not isinstance(element, FloatFormat | IntFormat) or _digits(element) > _DIGITS:
        return None
    if scaling.tensor or scaling.eden or scaling.candidates != (1.0,) or scaling.scale_rounding != "nearest_even":
        return None
    if scaling.input_scale or scaling.power_of_two == "log2":
        return None
    if scaling.statistic not in _STATISTICS or len(scaling.allowed) > _STEPS:
        return None
    if isinstance(quantizer.gradient, Differentiable) or quantizer.rounding.mode not in _TIES:
        return None
    ties = _TIES[quantizer.rounding.mode]
    rounding = Rounding() if ties else quantizer.rounding
    grid = grid_of(element, rounding, quantizer.overflow or element.default_overflow)
    stored = _stored(scaling.scale)
    if grid is None or stored is None or (ties and grid.method not in (MAGIC, FIXED)):
        return None
    masks = not isinstance(quantizer.gradient, StraightThrough)
    divides = (scaling.arithmetic == "divide" and scaling.history is None) * (2 if _inverts(scaling) else 1)
    rule = _rule(quantizer, scaling, stored[0], divides)
    return KernelRule(rule, grid, stored[1], ties, masks, _folds(element, scaling), divides == 1)


def history_bytes(scaling: Scaling, top: float, remembers: bool) -> bytes:
    """Return the bytes of ``struct History`` of a rule with a history; top: as in ``DelayedScale``."""
    history = scaling.history
    assert history is not None
    return _HISTORY.pack(
        np.float32(top * 2.0**-scaling.margin), _POWERS.index(scaling.power_of_two),
        history.algorithm == "most_recent", scaling.empty == "previous",
        history.length, history.refresh_every, history.immediate, remembers,
    )  # fmt: skip


def _digits(element: FloatFormat | IntFormat) -> int:
    """Return the significant bits that hold every value; more than bfloat16 has where its range is wider."""
    if isinstance(element, IntFormat):
        steps = max(abs(element.min), abs(element.max)) / element.eps * (2 if element.half_offset else 1)
        return max(int(steps).bit_length(), 1)
    within = element.min_exponent - element.mantissa_bits >= -133 and element.max_exponent <= 127
    return element.mantissa_bits + 1 if within else _DIGITS + 1


def _stored(scale: FloatFormat) -> tuple[int, bytes] | None:
    """Return how scales are rounded to their format: a method and the bytes of a ``struct Grid``."""
    if scale == FP32:
        return -1, _NO_GRID
    grid = grid_of(scale, Rounding(), "saturate")
    return (grid.method, grid.parameters) if grid and grid.method in (MAGIC, BITS, FLUSHING) else None


def _powers(scaling: Scaling) -> bool:
    """Say whether scales are powers of two before they are stored, the multiplier aside."""
    steps = scaling.allowed
    return all(math.frexp(step)[0] == 0.5 for step in steps) if steps else scaling.power_of_two is not None


def _inverts(scaling: Scaling) -> bool:
    """Say whether float32 holds 1 / scale exactly, so that dividing by a scale is multiplying with it."""
    within = all(2.0**-127 <= step <= 2.0**127 for step in scaling.allowed)
    kept = scaling.scale == FP32 or (scaling.scale.mantissa_bits == 0 and scaling.scale.min_exponent >= -127)
    return _powers(scaling) and within and kept and scaling.multiplier == 1


def _folds(element: FloatFormat | IntFormat, scaling: Scaling) -> bool:
    scale, powers = scaling.scale, _powers(scaling)
    if scaling.multiplier != 1:
        return powers and scale == FP32 and not scaling.allowed and scaling.multiplier < 2
    if scale.mantissa_bits == 0 or (powers and scale == FP32):
        return True
    low = element.min_exponent - element.mantissa_bits if isinstance(element, FloatFormat) else -element.fraction_bits
    fits = low + scale.min_exponent - scale.mantissa_bits >= -133
    return fits and _digits(element) + scale.mantissa_bits + 1 <= _DIGITS


def _rule(quantizer: Quantizer, scaling: Scaling, stored: int, divides: int) -> bytes:
    element, gradient = quantizer.format, quantizer.gradient
    assert isinstance(element, FloatFormat | IntFormat)
    top = np.float32(np.float32(element.max if scaling.top is None else scaling.top) * 2.0**-scaling.margin)
    limit, mask = 0.0, 0
    if isinstance(gradient, ClipMask):
        limit, mask = element.max, 1
    elif isinstance(gradient, TrustMask):
        limit, mask = gradient.limit, 2
    order = {"encode": 0, "double": 1, "multiply": 3}.get(scaling.arithmetic, 2)
    steps = scaling.allowed or (1.0,)
    return _RULE.pack(
        top, np.float32(1.0 / float(top)), np.float32(scaling.factor or 0.0), np.float32(scaling.offset),
        np.float32(scaling.eps), max(_FLT_MIN, np.float32(scaling.eps) if scaling.eps_rule == "scale" else 0.0),
        np.float32(scaling.multiplier), np.float32(limit),
        *(np.float32(steps[min(i, len(steps) - 1)]) for i in range(_STEPS)),
        _STATISTICS.index(scaling.statistic), _EPS_RULES.index(scaling.eps_rule), order,
        divides, _POWERS.index(scaling.power_of_two), stored, bool(scaling.allowed), mask,
    )  # fmt: skip


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
        """Elements that lie together in scaled_rows.cu."""
        return self.vectors[0] * self.vectors[1]

    @property
    def units(self) -> int:
        """Those of a row, filled up to whole blocks."""
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
    """Return how a matrix lies in memory under the blocks of a rule, or None where no kernel takes it.

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
    """Share words among 64 elements where these lie in one thread: along rows, or down columns."""
    down = kind in (COLUMNS, LONG_COLUMNS)
    if kind == TILES or down != transposed:
        return WORDS_EACH
    whole = (rows if down else columns) % 64 == 0
    return WORDS_SHARED if whole or kind == TENSOR or (rows == 1 and not down) else WORDS_EACH
