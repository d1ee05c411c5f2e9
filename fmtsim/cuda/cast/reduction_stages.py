# SPDX-License-Identifier: Apache-2.0
"""Stages of a reduction over ranks whose sums travel as byte codes, one launch each (reduction.cu)."""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import (
    DTYPES,
    NARROW,
    NO_DRAW,
    Grid,
    aligned,
    draw_of,
    grid_of,
    macros,
    values_of,
)
from fmtsim.cuda.cast.scale_rules import NO_RULE, rule_of
from fmtsim.cuda.runtime import Defines, device_index, kernel
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.replay.gpu import captures

MOST_RANKS = 64  # a thread holds the casts of all
_OUTPUTS = (torch.float32, torch.bfloat16)
_THREADS, _RUN, _RUNS = 256, 4, 4
_STEP = 16  # bytes: rows of codes begin at multiples
_PARTS = struct.Struct("<Qqq8x")
_ROWS = struct.Struct("<QQq8x")  # a table of ranks' memories or 0, where rows begin there or at all, and their stride


def covers_reduction(spec: CastSpec, scaling: Scaling | None, x: Tensor, ranks: int, out: Tensor) -> bool:
    """Return True if ``ReductionStages`` reduces contiguous x by a cast and a rule of scales into contiguous out."""
    element = spec.format
    if not isinstance(element, FloatFormat | IntFormat) or element.bits != 8 or not 1 <= ranks <= MOST_RANKS:
        return False
    grid = grid_of(element, spec.rounding, spec.overflow)
    refuses = not element.has_nan and element.nan_policy == "error"  # NaN raises an error: numbers have to be read
    fits = x.dtype in NARROW and out.dtype in _OUTPUTS and x.is_contiguous() and out.is_contiguous()
    covered = grid is not None and grid.encodes and not refuses and _rule(element, scaling) is not None
    return covered and fits and x.numel() > 0 and not captures(x.device)


class ReductionStages:
    """The stages of one reduction on one rank (fmtsim/distributed/collective.py says what each does); none waits.

    Args:
        x: [rows, columns], contiguous.
        sizes: Columns of each tensor.
        spec: What casts and sums are rounded to.
        scaling: The rule of a tensor's scale, None for 1; with the cast one that ``covers_reduction`` takes.
        rank, ranks: This rank, and how many there are.
        key: Random key of rank 0's cast; another rank's, and its sums, have rank and hop added to its offset.
        out: float32 or bfloat16, contiguous: the reduced elements, or those of this rank's row.
        tree: Whether sums have the order of a tree, not of a ring.
        propagates: Whether Inf becomes NaN.
        average: Whether the result is a mean.
        factor: What multiplies the scaled tensor where no mu does.
        peers: Memory that all ranks read (fmtsim/distributed/peers.py); its owner is told where a reduction begins and
            ends. None has rows of codes brought here.
    """

    def __init__(
        self, x: Tensor, sizes: tuple[int, ...], spec: CastSpec, scaling: Scaling | None, rank: int, ranks: int,
        key: RandomKey | None, out: Tensor, *, tree: bool, propagates: bool, average: bool, factor: float,
        peers: Any = None,
    ) -> None:  # fmt: skip
        element, grid = spec.format, grid_of(spec.format, spec.rounding, spec.overflow)  # type: ignore[arg-type]
        assert grid is not None and isinstance(element, FloatFormat | IntFormat)
        self._x, self._out, self._rank, self._ranks, self._tree = x, out, rank, ranks, tree
        self._length = -(-x.numel() // ranks)
        self._stride = -(-self._length // _STEP) * _STEP
        vectors = aligned(x, out) and self._length % _RUN == 0
        defines = reduction_macros(grid, x.dtype, out.dtype, vectors, ranks, tree, propagates)
        self._kernel: Callable[[str], Callable[..., None]] = partial(_kernel, device_index(x), defines)
        self._grid, self._draw = grid.parameters, partial(_draw, spec.rounding, key)
        self._largest = np.float32(element.max)
        self._scaled, self._rule = np.int32(scaling is not None), _rule(element, scaling)
        self._factor, self._mean_of = np.float32(factor), np.float32(ranks if average else 0)
        self._values = values_of(element, x.device)
        self._ends = _ends_of(sizes, x.device)
        self._parts = _PARTS.pack(self._ends.data_ptr(), x.shape[1], len(sizes))
        self._counts = torch.zeros(6, dtype=torch.int64, device=x.device)
        self.peers = peers
        if peers is not None:
            peers.begin(self._stride)

    def amaxes(self) -> Tensor:
        """Return the largest finite magnitude of each tensor."""
        tensors, count = len(self._ends), self._x.numel()
        tops = self.peers.tops(tensors) if self.peers is not None else torch.zeros(tensors, device=self._x.device)
        self._kernel("largest_magnitudes")(_blocks(count), _THREADS, self._x, tops, np.int64(count), self._parts)
        return tops

    def factors(self, amaxes: Tensor | int, mu: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the factors of elements before the cast and after the sums, float32 [tensors] each.

        amaxes: The largest magnitudes on all ranks, or the table of the memories that begin with those of a rank.
        """
        count = len(self._ends)
        both = torch.empty(2, count, device=self._x.device)
        tables = (None, np.uint64(amaxes)) if isinstance(amaxes, int) else (amaxes, np.uint64(0))
        kernel("statistic.cu", "factors_of_tensors", device_index(both))(
            -(-count // _THREADS), _THREADS, *tables, mu, both, np.int64(count), np.int32(self._ranks), self._factor,
            self._mean_of, self._scaled, self._rule,
        )  # fmt: skip
        encode, decode = both.unbind()
        return encode, decode

    def cast(self, encode: Tensor) -> Tensor:
        """Return the casts of the elements, and count what becomes of them."""
        shape = self._ranks, self._stride
        codes = self._x.new_empty(shape, dtype=torch.uint8) if self.peers is None else self.peers.codes(self._stride)
        sizes = np.int64(self._x.numel()), np.int64(self._length), np.int64(self._stride)
        self._kernel("cast_chunks")(
            (_blocks(self._stride), self._ranks), _THREADS, self._x, codes, encode, self._counts[3:], *sizes,
            self._largest, self._parts, self._grid, self._draw(self._rank),
        )  # fmt: skip
        return codes

    def sum(self, wires: Tensor | tuple[int, int]) -> Tensor:
        """Return this rank's chunk of the sums."""
        new = self._x.new_empty
        sums = new(self._stride, dtype=torch.uint8) if self.peers is None else self.peers.sums(self._stride)
        base, first = (self._rank * self._length, 0) if self._tree else (0, (self._rank + 1) % self._ranks)
        self._kernel("sum_chunks")(
            -(-self._stride // (_THREADS * _RUN * _sum_runs(self._ranks))), _THREADS, _rows(wires), sums, self._values,
            np.int64(self._stride), np.int64(base), np.int32(first), self._grid, self._draw(0),
        )  # fmt: skip
        return sums

    def finish(self, wires: Tensor | tuple[int, int], decode: Tensor) -> Sequence[Tensor]:
        """Write the result, and count."""
        count, length = self._out.numel(), self._length
        self._kernel("finish_sums")(
            (_blocks(self._stride), -(-count // length)), _THREADS, _rows(wires), self._out, self._values, decode,
            self._counts, np.int64(count), np.int64(length), self._largest, self._parts,
        )  # fmt: skip
        if not self._out.is_inference():
            torch.autograd.graph.increment_version(self._out)  # autograd must notice where it was saved for a backward
        return self._counts.unbind()


def _rows(wires: Tensor | tuple[int, int]) -> bytes:
    """Return the bytes of ``struct Rows``: of a matrix, or of a place in each rank's memory."""
    if isinstance(wires, Tensor):
        return _ROWS.pack(0, wires.data_ptr(), wires.stride(0))
    return _ROWS.pack(*wires, 0)


@lru_cache(maxsize=1024)
def reduction_macros(
    grid: Grid, dtype: torch.dtype, out: torch.dtype, vectors: bool, ranks: int, tree: bool, propagates: bool
) -> Defines:
    """Return the macros of reduction.cu."""
    kinds = {"INPUT": DTYPES[dtype], "OUTPUT": DTYPES[out], "PAIRS": 0, "INTEGER": grid.integer}
    rest = {"VECTORS": vectors, "RANKS": ranks, "TREE": tree, "PROPAGATES": propagates, "SUM_RUNS": _sum_runs(ranks)}
    return (*grid.defines, *macros(**kinds, **rest))


def _sum_runs(ranks: int) -> int:
    """Return the runs of codes of a thread of ``sum_chunks``, which holds their words of all ranks."""
    return min(8, max(1, 32 // ranks))


@lru_cache(maxsize=1024)
def _rule(element: FloatFormat | IntFormat, scaling: Scaling | None) -> bytes | None:
    """Return the bytes of ``struct Rule``, or None where no kernel computes such scales."""
    if scaling is None:
        return NO_RULE
    if scaling.statistic != "amax" or scaling.arithmetic == "divide":
        return None
    kernel_rule = rule_of(Quantizer(format=element, scaling=scaling))
    return None if kernel_rule is None else kernel_rule.rule


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel, between two ranks and among eight."""
    for name, rounding, ranks, tree in (
        ("e4m3", Rounding(), 2, False), ("e4m3", Rounding(), 8, True), ("e5m2", Rounding(mode="stochastic"), 8, False),
    ):  # fmt: skip
        grid = grid_of(get_format(name), rounding, "saturate")  # type: ignore[arg-type]
        assert grid is not None
        for kind in ("largest_magnitudes", "cast_chunks", "sum_chunks", "finish_sums"):
            for dtype in _OUTPUTS if ranks == 2 else _OUTPUTS[:1]:
                yield "reduction.cu", kind, reduction_macros(grid, dtype, dtype, True, ranks, tree, True)
    yield "statistic.cu", "factors_of_tensors", ()


def _kernel(index: int, defines: Defines, name: str) -> Callable[..., None]:
    return kernel("reduction.cu", name, index, defines)


def _blocks(elements: int) -> int:
    return -(-elements // (_THREADS * _RUN * _RUNS))


def _draw(rounding: Rounding, key: RandomKey | None, rank: int) -> bytes:
    """Return the Draw of a rank's cast; sums add rank and hop to that of rank 0."""
    return NO_DRAW if key is None else draw_of(rounding, RandomKey(key.seed, key.offset + (rank << 16)))


@lru_cache(maxsize=1024)
def _ends_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the end of each tensor's columns, int64 [tensors] on a device."""
    ends = torch.tensor([*accumulate(sizes)])
    return ends.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ends
