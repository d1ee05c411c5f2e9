"""One cast of a block format on the device: which kernel takes it, and its launches.

Blocks that are runs of memory go to ``block_rows.cu``, blocks down columns to ``block_columns.cu``, each in one pass
(two where a scale needs the whole tensor, or a block is longer than a warp holds); whatever else there is goes to
``block_general.cu``. The host decides from formats, shapes and strides alone; nothing is read back.
"""

import struct
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.block_fast import BFLOAT16, CODES, INPUTS, PACKED, fast_defines, is_drawn, vector_of
from fmtsim.cuda.cast.block_parameters import DTYPES, NO_DRAW, cast_bytes, column_bytes, layout_bytes
from fmtsim.cuda.cast.block_view import aligned, extent, turned, view_of
from fmtsim.cuda.runtime.program import Defines, device_index, kernel, multiprocessors
from fmtsim.formats.block import BlockFormat
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, block_counts

THREADS = 256
HELD = 32  # elements of a thread of the row kernel whose lanes hold whole blocks
_COLUMN_RUNS = (16, 32, 64, 128, 256)
_GRID_LIMIT = 65535  # of a launch's second and third dimension


class BlockJob:
    """A cast of one tensor: its data, views and results."""

    def __init__(
        self, x: Tensor, out: Tensor, spec: CastSpec, random: Random, *, bare: bool = False, reordered: bool = False
    ) -> None:
        view = view_of(x, spec.dim)
        out_view = view if reordered else view_of(out, spec.dim)  # packed codes have an order of their own
        assert view is not None and out_view is not None and isinstance(spec.format, BlockFormat)
        self.x, self.out, self.spec, self.random, self.bare = x, out, spec, _flat(random), bare
        self.view, self.out_view, self.format = view, out_view, spec.format
        self.index = device_index(x)
        self.scales: Tensor | None = None
        self.offsets: Tensor | None = None
        self.tensor_scale: Tensor | None = None

    def add_scales(self, dtype: torch.dtype) -> None:
        """Make room for what encode returns beside the codes."""
        counts, device = block_counts(self.format, self.x.shape, self.spec.dim), self.x.device
        self.scales = torch.empty(counts, dtype=dtype, device=device)
        if self.format.zero_point:
            self.offsets = torch.empty(counts, dtype=torch.int32, device=device)
        if self.format.tensor_scale:
            self.tensor_scale = torch.ones((), dtype=torch.float32, device=device)

    def parts(self) -> EncodedParts:
        """Return what encode returns."""
        return EncodedParts(self.out, self.scales, self.tensor_scale, self.offsets)

    def fast(self, output: int) -> bool:
        """Launch a fast kernel if one serves."""
        defines = fast_defines(self.spec, self.x.dtype, output, self.bare) if is_drawn(self.spec, self.random) else None
        if defines is None:
            return False
        view, out_view = self.view, self.out_view
        stochastic = self.spec.rounding.mode == "stochastic"
        if not stochastic and not view.dense:
            view, out_view = turned(view), turned(out_view)
        if not (view.dense and (output == PACKED or out_view.dense)) or not aligned(self.x, self.out):
            return False
        outer, inner = extent(self.format, view.sizes)
        rows = view.sizes[0] * view.sizes[2]
        if outer >= rows and inner >= view.sizes[1]:
            return self._runs(self.x.numel(), 1, output, defines)  # one scale for all
        if view.sizes[1] % inner or rows % outer:
            return False
        if view.sizes[2] == 1:
            return self._runs(inner, outer, output, defines)
        return outer == 1 and self._columns(view.sizes, inner, output, defines)

    def _runs(self, run: int, outer: int, output: int, defines: Defines) -> bool:
        """Launch the row kernel: ``run`` elements that follow each other, in each of ``outer`` rows, share a scale."""
        total, vector = self.x.numel(), vector_of(self.x.dtype, output, self.format.bits)
        if run % 16 or total // 16 >= 1 << 32:
            return False
        across = 1 if run == total else self.view.sizes[1] // run
        macros = run_macros(defines, self.x.dtype, vector, run if outer == 1 else 0, total)
        given = self._amax(run, across, outer) if ("RUN", "0") in macros else None
        tensor = given if given is not None and run == total else None
        if tensor is None and self.format.tensor_scale:
            tensor = self._amax(total)
        pieces = struct.pack("<4I", run // 16, across, outer, 0)
        kernel("block_rows.cu", "cast_runs", self.index, macros)(
            -(-total // (4 * vector * THREADS)), THREADS, self.x, self.out, self.scales, given, tensor,
            self.tensor_scale, np.uint64(total), pieces, np.uint32(tensor is not None),
            cast_bytes(self.spec, self.random, self.x.device),
        )  # fmt: skip
        return True

    def _amax(self, run: int, across: int = 1, outer: int = 1) -> Tensor:
        """Return the amaxes of blocks, and what else is in them: uint32 [blocks, 2]."""
        total, vector = self.x.numel(), 16 // self.x.element_size()
        found = torch.zeros(2 * (total // run // outer), dtype=torch.int32, device=self.x.device)
        macros = amax_macros(self.x.dtype)
        grid = -(-total // (4 * vector * THREADS))
        if run == total:
            grid = min(grid, 8 * multiprocessors(self.index))
            kernel("block_amax.cu", "amax_of_tensor", self.index, macros)(
                grid, THREADS, self.x, found, np.uint64(total // vector)
            )
        else:
            numbers = map(np.uint32, (run // vector, across, outer))
            kernel("block_amax.cu", "amax_of_runs", self.index, macros)(
                grid, THREADS, self.x, found, np.uint64(total // vector), *numbers
            )
        return found

    def _columns(
        self,
        sizes: tuple[int, int, int],
        run: int,
        output: int,
        defines: Defines,
        rows: Tensor | None = None,
        draw: bytes = NO_DRAW,
    ) -> bool:
        """Launch the column kernel; into ``rows`` it writes blocks along the last axis too, by their own ``draw``."""
        leading, inner, trailing = sizes
        if run not in _COLUMN_RUNS:
            return False
        narrow = output == PACKED and self.format.bits < 8  # two codes of a row share a byte
        vector = vector_of(self.x.dtype, output, self.format.bits)
        while trailing % vector:
            vector //= 2
        down, across = max(run // 32, 1), 8 // max(run // 32, 1)
        grid = -(-trailing // (8 * vector * across)), -(-inner // (32 * down)), leading
        if max(grid[1:]) > _GRID_LIMIT or (narrow and self.format.bits != 4):
            return False
        if rows is not None and (run > 32 or trailing % run or run > 8 * vector):
            return False
        tensor = self._amax(self.x.numel()) if self.format.tensor_scale else None
        macros = column_macros(defines, run, vector, narrow, rows is not None)
        results = (self.out, self.scales, rows, tensor, self.tensor_scale)
        job = column_bytes(self.x, results, (inner, trailing), draw)
        kernel("block_columns.cu", "cast_columns", self.index, macros)(
            grid, THREADS, job, cast_bytes(self.spec, self.random, self.x.device)
        )
        return True

    def both(self, rows: Tensor, draw: bytes) -> bool:
        """Launch the kernel that casts along both axes of a matrix from one read, if it serves: bfloat16 values.

        ``rows`` takes those along the last axis, whose random words come from a ``Draw`` of their own.
        """
        drawn = is_drawn(self.spec, self.random)
        defines = fast_defines(self.spec, self.x.dtype, BFLOAT16, self.bare) if drawn else None
        outer, inner = self.format.block
        if (
            defines is None
            or outer != 1
            or inner not in (16, 32)
            or not self.view.dense
            or not aligned(self.x, self.out)
        ):
            return False
        if self.x.dim() != 2 or self.spec.dim != -2 or self.x.shape[0] % inner:
            return False
        return self._columns(self.view.sizes, inner, BFLOAT16, defines, rows, draw)

    def general(self, target: int, writes_codes: bool) -> None:
        """Launch the general kernels."""
        x, sizes, total = self.x, self.view.sizes, self.x.numel()
        block = extent(self.format, sizes)
        shapes = (*self.view, self.out_view.strides)
        layout = layout_bytes(*shapes, block, DTYPES[x.dtype], target, writes_codes)
        count = -(-sizes[0] * sizes[2] // block[0]) * -(-sizes[1] // block[1])
        grid = -(-total // THREADS)
        blocks = torch.zeros(3 * count, dtype=torch.int64, device=x.device)
        find = kernel("block_general.cu", "block_extremes", self.index)
        find(grid, THREADS, x, blocks, np.uint64(total), layout)
        tensor = None
        if self.format.tensor_scale:
            tensor = torch.zeros(3, dtype=torch.int64, device=x.device)
            whole = layout_bytes(*shapes, (sizes[0] * sizes[2], sizes[1]), DTYPES[x.dtype], target, writes_codes)
            find(grid, THREADS, x, tensor, np.uint64(total), whole)
        kernel("block_general.cu", "cast_blocks", self.index)(
            grid, THREADS, x, self.out, self.scales, self.offsets, self.tensor_scale, blocks, tensor,
            np.uint64(total), layout, cast_bytes(self.spec, self.random, x.device),
        )  # fmt: skip


@lru_cache(maxsize=1024)
def run_macros(defines: Defines, dtype: torch.dtype, vector: int, run: int, total: int = HELD) -> Defines:
    """Return the macros of the row kernel; RUN is 0 where a block is no power of two or more than a warp holds."""
    stochastic = ("STOCHASTIC", "1") in defines
    codes = ("OUTPUT", str(CODES)) in defines or ("OUTPUT", str(PACKED)) in defines
    if codes and dtype == torch.bfloat16 and vector == 8 and run in (16, 32) and not (stochastic or total % HELD):
        return (*defines, ("RUN", str(run)), ("VECTOR", str(run)), ("LAYOUT", "2"))
    strided = vector == 4 and dtype == torch.float32 or stochastic
    longest = 512 * vector // 4 if strided else 32 * vector
    held = run if run & (run - 1) == 0 and run <= longest else 0
    return (*defines, ("RUN", str(held)), ("VECTOR", str(vector)), ("LAYOUT", str(int(strided))))


def _flat(random: Random) -> Random:
    """Return given random words in row-major order."""
    return random.contiguous() if isinstance(random, Tensor) else random


@lru_cache(maxsize=1024)
def column_macros(defines: Defines, run: int, vector: int, transposed: bool, both: bool) -> Defines:
    """Return the macros of the column kernel."""
    options = {"RUN": run, "ROW_RUN": min(run, 32), "VECTOR": vector, "TRANSPOSED": int(transposed), "BOTH": int(both)}
    return (*defines, *((name, str(value)) for name, value in options.items()))


@lru_cache(maxsize=8)
def amax_macros(dtype: torch.dtype) -> Defines:
    """Return the macros of the kernels that find amaxes."""
    return (("INPUT", str(INPUTS[dtype])), ("VECTOR", str(16 // dtype.itemsize)))
