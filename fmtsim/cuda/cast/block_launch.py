"""One cast of a block format on the device: which kernel takes it, and its launches.

Blocks that are runs of memory go to ``block_rows.cu``, blocks down columns to ``block_columns.cu``, each in one pass
(two where a scale needs the whole tensor, or a block is longer than a warp holds); whatever else there is goes to
``any_format.cu``. The host decides from formats, shapes and strides alone; nothing is read back.
"""

import struct

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.block_macros import (
    BFLOAT16,
    PACKED,
    amax_macros,
    column_macros,
    draws_words,
    fast_macros,
    run_macros,
    vector_of,
)
from fmtsim.cuda.cast.general import THREADS, block_extent, cast_bytes, cast_general, view_of
from fmtsim.cuda.cast.parameters import NO_DRAW, aligned
from fmtsim.cuda.runtime import Defines, device_index, kernel, multiprocessors
from fmtsim.formats.block import BlockFormat
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, block_counts

_COLUMN_RUNS = (16, 32, 64, 128, 256)
_GRID_LIMIT = 65535  # of a launch's second and third dimension


class BlockCast:
    """A cast of one tensor: its data, layouts and results.

    Args:
        x: The tensor; its strides fit three axes (``viewed``).
        out: Values or codes of x's shape; codes that are packed have any shape.
        spec: The cast.
        random: Its random words.
        without_tensor_scale: Leave the scale of the tensor out of values.
        packed: Whether ``out`` has an order of its own.
    """

    def __init__(
        self,
        x: Tensor,
        out: Tensor,
        spec: CastSpec,
        random: Random,
        *,
        without_tensor_scale: bool = False,
        packed: bool = False,
    ) -> None:
        view = view_of(x, spec.dim)
        out_view = view if packed else view_of(out, spec.dim)
        assert view is not None and out_view is not None and isinstance(spec.format, BlockFormat)
        self.x, self.out, self.spec = x, out, spec
        self.random = random.contiguous() if isinstance(random, Tensor) else random  # in row-major order
        self.view, self.out_view, self.format = view, out_view, spec.format
        self.index, self.without_tensor_scale = device_index(x), without_tensor_scale
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
        defines = self._macros(output)
        if defines is None:
            return False
        view, out_view = self.view, self.out_view
        if self.spec.rounding.mode != "stochastic" and not view.dense:
            view, out_view = view.rows_last, out_view.rows_last
        if not (view.dense and (output == PACKED or out_view.dense)) or not aligned(self.x, self.out):
            return False
        outer, inner = block_extent(self.format, view.sizes)
        rows = view.sizes[0] * view.sizes[2]
        if outer >= rows and inner >= view.sizes[1]:
            return self._rows(self.x.numel(), 1, output, defines)  # one scale for all
        if view.sizes[1] % inner or rows % outer:
            return False
        if view.sizes[2] == 1:
            return self._rows(inner, outer, output, defines)
        return outer == 1 and self._columns(view.sizes, inner, output, defines)

    def both_dims(self, rows: Tensor, draw: bytes) -> bool:
        """Launch the kernel that casts a matrix along both dimensions from one read, if it serves: bfloat16 values.

        ``rows`` takes those along the last dimension, whose random words come from a ``Draw`` of their own.
        """
        defines, (outer, inner) = self._macros(BFLOAT16), self.format.block
        if defines is None or outer != 1 or inner not in (16, 32) or not self.view.dense:
            return False
        if not aligned(self.x, self.out) or self.x.dim() != 2 or self.spec.dim != -2 or self.x.shape[0] % inner:
            return False
        return self._columns(self.view.sizes, inner, BFLOAT16, defines, rows, draw)

    def general(self) -> None:
        """Launch the general kernels."""
        cast_general(self.x, self.out, self.spec, self.random, self.scales, self.offsets, self.tensor_scale)

    def _macros(self, output: int) -> Defines | None:
        if not draws_words(self.spec, self.random):
            return None
        return fast_macros(self.spec, self.x.dtype, output, self.without_tensor_scale)

    def _rows(self, run: int, outer: int, output: int, defines: Defines) -> bool:
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
        macros, grid = amax_macros(self.x.dtype), -(-total // (4 * vector * THREADS))
        if run == total:
            grid = min(grid, 8 * multiprocessors(self.index))
            find, numbers = kernel("statistic.cu", "amax_of_tensor", self.index, macros), []
        else:
            find = kernel("statistic.cu", "amax_of_runs", self.index, macros)
            numbers = [np.uint32(n) for n in (run // vector, across, outer)]
        find(grid, THREADS, self.x, found, np.uint64(total // vector), *numbers)
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
        results = self.x, self.out, self.scales, rows, None, tensor, self.tensor_scale
        pointers = (0 if t is None else t.data_ptr() for t in results)
        job = struct.pack("<9q8x", *pointers, inner, trailing) + draw
        macros = column_macros(defines, run, vector, narrow, rows is not None)
        kernel("block_columns.cu", "cast_columns", self.index, macros)(
            grid, THREADS, job, cast_bytes(self.spec, self.random, self.x.device)
        )
        return True
