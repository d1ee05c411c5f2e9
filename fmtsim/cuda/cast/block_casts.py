# SPDX-License-Identifier: Apache-2.0
"""Casts of block formats on the device: the verbs, those of matrices that training multiplies, and their launches.

Blocks that are runs of memory go to ``block_rows.cu``, blocks down columns to ``block_columns.cu``, each in one pass
(two where a scale needs the whole tensor, or a block is longer than a warp holds); whatever else there is goes to
``any_format.cu``. The host decides from formats, shapes and strides alone; nothing is read back.
"""

import struct
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.any_format import THREADS, cast_bytes, cast_general, decode
from fmtsim.cuda.cast.layout import block_extent, view_of
from fmtsim.cuda.cast.parameters import NO_DRAW, aligned, draw_of
from fmtsim.cuda.cast.scale_rules import (
    BFLOAT16,
    CODES,
    PACKED,
    amax_macros,
    column_macros,
    draws_words,
    fast_macros,
    output_of,
    run_macros,
    vector_width,
)
from fmtsim.cuda.runtime import Defines, device_index, kernel, multiprocessors
from fmtsim.cuda.runtime.launch import Bound
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.packing import code_dtype, pack, packed_size
from fmtsim.formats.representable import FLOAT_DTYPES, codes_of_scales
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, block_counts
from fmtsim.support.replay.hooks import Structure

UNPACKED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # codes that are not packed
_COLUMN_RUNS = (16, 32, 64, 128, 256)
_COLUMNS_JOB = struct.Struct(f"<9q8x{len(NO_DRAW)}s")  # the first argument of block_columns.cu
_GRID_LIMIT = 65535  # of a launch's second and third dimension
MOST = 1 << 36  # elements: kernels count sixteens in 32 bits


def covers_blocks(spec: CastSpec, *dtypes: torch.dtype) -> bool:
    """Return True if the kernels cover casts of a block format: input and output dtype; they cover nearly all."""
    fmt = spec.format
    if not isinstance(fmt, BlockFormat) or any(dtype not in FLOAT_DTYPES for dtype in dtypes):
        return False
    if not fmt.is_direct:
        return False
    return not (fmt.zero_point and fmt.element.bits > 22)  # distances from the zero point are held in 24 bits


def quantize_blocks(x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> None:
    """Quantise x into out: any strides and dtypes of the four; out may be x itself."""
    if not x.numel():
        return
    fits, output = view_of(out, spec.dim) is not None, output_of(out.dtype)
    target = out if fits else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    source, parts = _viewed(x, spec.dim), EncodedParts(target)
    if output is None or not _cast_fast(source, parts, spec, random, output):
        cast_general(source, parts, spec, random)
    if target is not out:
        out.copy_(target)


def encode_blocks(x: Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x with their scales.

    Codes are in x's shape and ``code_dtype``, scales float32. With ``packed`` codes of other widths than 8, 16 and 32
    bits are the bytes of docs/semantics.md, section 11 (``dim`` moved last), and scales are as ``Encoded`` keeps them.
    """
    bits, source = spec.format.bits, _viewed(x, spec.dim)
    if packed and source.numel() and (parts := _encode_packed(source, spec, random)) is not None:
        return parts
    codes = torch.empty(x.shape, dtype=code_dtype(bits), device=x.device)
    parts = with_scales(codes, x.shape, spec, torch.float32)
    if source.numel() and not (codes.dtype == torch.uint8 and _cast_fast(source, parts, spec, random, CODES)):
        cast_general(source, parts, spec, random)
    return _pack_parts(parts, spec) if packed else parts


def with_scales(codes: Tensor, shape: torch.Size, spec: CastSpec, dtype: torch.dtype) -> EncodedParts:
    """Return codes of a tensor of a shape with room for what encode returns beside them; dtype: of scales."""
    fmt, device = spec.format, codes.device
    assert isinstance(fmt, BlockFormat)
    counts = block_counts(fmt, shape, spec.dim)
    return EncodedParts(
        codes,
        torch.empty(counts, dtype=dtype, device=device),
        torch.ones((), dtype=torch.float32, device=device) if fmt.tensor_scale else None,
        torch.empty(counts, dtype=torch.int32, device=device) if fmt.zero_point else None,
    )


def quantize_both_dims(
    x: Tensor, spec: CastSpec, random: tuple[Random, Random] = (None, None), *, without_tensor_scale: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Quantise a matrix with blocks along its rows and, from the same read, with blocks along its columns.

    Args:
        x: [M, N]; float16, bfloat16, float32 or float64.
        spec: The cast, with ``dim=-2``.
        random: Random words of the result along the rows and of that along the columns.
        without_tensor_scale: Leave the scale of the tensor out of the values of a two-level format
            (``quantize_without_tensor_scale``).

    Returns:
        The values of two calls of ``quantize_blocks`` with ``dim=-1`` and ``dim=-2``, bfloat16, and the scale of the
        tensor where they were left without it. None where no kernel does that.
    """
    fmt, view = spec.format, view_of(x, spec.dim)
    assert isinstance(fmt, BlockFormat)
    outer, run = fmt.block
    if x.dim() != 2 or outer != 1 or run is None or run not in (16, 32) or not x.numel() or x.shape[0] % run:
        return None
    if view is None or not view.dense or not aligned(x):
        return None
    if not all(draws_words(spec, words) for words in random):
        return None
    rows, columns = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    scale = torch.empty((), device=x.device) if without_tensor_scale and fmt.tensor_scale else None
    both = rows, draw_of(spec.rounding, random[0])
    parts = EncodedParts(columns, None, scale)
    if not _columns(x, parts, spec, random[1], BFLOAT16, run, view.sizes, without_tensor_scale, both):
        return None
    return rows, columns, scale


def quantize_without_tensor_scale(x: Tensor, spec: CastSpec, random: Random) -> tuple[Tensor, Tensor]:
    """Return the values of a two-level format without the scale of the tensor, and that scale (float32, 0-d).

    The values are bfloat16, the products of elements and block scales, which it holds where
    ``holds_without_tensor_scale`` is true.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if not x.numel():
        return out, torch.ones((), device=x.device)
    scale = torch.empty((), device=x.device)  # the cast writes it: ones would be a launch more
    if not _cast_fast(x, EncodedParts(out, None, scale), spec, random, BFLOAT16, without_tensor_scale=True):
        parts = encode_blocks(x, spec, random)
        assert parts.tensor_scale is not None
        decode(parts._replace(tensor_scale=None), spec, out)
        return out, parts.tensor_scale
    return out, scale


def holds_without_tensor_scale(spec: CastSpec) -> bool:
    """Return True if a format has two levels, and bfloat16 holds the products of its elements and block scales."""
    two_level = isinstance(spec.format, BlockFormat) and spec.format.tensor_scale
    return two_level and fast_macros(spec, torch.float32, BFLOAT16, True) is not None


def _viewed(t: Tensor, dim: int) -> Tensor:
    """Return the tensor, or a contiguous copy where its strides do not fit three axes."""
    return t if view_of(t, dim) is not None else t.contiguous()


# Packed codes.


def _encode_packed(x: Tensor, spec: CastSpec, random: Random) -> EncodedParts | None:
    """Return packed codes and stored scales from one kernel, None where none does that."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    if not x.dim() or x.shape[spec.dim] * fmt.bits % 8:
        return None
    sizes, dim = list(x.shape), x.dim() + spec.dim
    rows = [*sizes[:dim], *sizes[dim + 1 :], packed_size(sizes[dim], fmt.bits)]
    codes = torch.empty(sizes if fmt.bits == 8 else rows, dtype=torch.uint8, device=x.device)
    parts = with_scales(codes, x.shape, spec, torch.uint8 if fmt.scale.bits <= 8 else torch.float32)
    return parts if _cast_fast(x, parts, spec, random, PACKED) else None


def _pack_parts(parts: EncodedParts, spec: CastSpec) -> EncodedParts:
    """Return parts as ``Encoded`` keeps them."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    codes, scales = parts.codes.reshape(1) if not parts.codes.dim() else parts.codes, parts.scales
    if fmt.bits in UNPACKED:
        codes = pack(codes, fmt.bits).view(UNPACKED[fmt.bits]).reshape(parts.codes.shape)
    else:
        codes = pack(codes.movedim(spec.dim, -1), fmt.bits)
    if fmt.scale.bits <= 8:
        scales = codes_of_scales(scales, fmt.scale)
    elif fmt.scale.name != "fp32":
        scales = scales.to({"bf16": torch.bfloat16, "fp16": torch.float16}[fmt.scale.name])
    return parts._replace(codes=codes, scales=scales)


# The fast kernels.


def _cast_fast(
    x: Tensor, parts: EncodedParts, spec: CastSpec, random: Random, output: int, without_tensor_scale: bool = False
) -> bool:
    """Launch a fast kernel that writes values or codes, and scales where there is room for them, if one serves."""
    fmt, view = spec.format, view_of(x, spec.dim)
    out_view = view if output == PACKED else view_of(parts.codes, spec.dim)  # packed codes have an order of their own
    assert isinstance(fmt, BlockFormat)
    if view is None or out_view is None or not draws_words(spec, random):
        return False
    if spec.rounding.mode != "stochastic" and not view.dense:
        view, out_view = view.rows_last, out_view.rows_last
    if not (view.dense and out_view.dense) or not aligned(x, parts.codes):
        return False
    outer, run = block_extent(fmt, view.sizes)
    rows, across = view.sizes[0] * view.sizes[2], view.sizes[1] // run
    if outer >= rows and run >= view.sizes[1]:
        outer, run, across = 1, x.numel(), 1  # one scale for all
    elif view.sizes[1] % run or rows % outer:
        return False
    elif view.sizes[2] != 1:
        return outer == 1 and _columns(x, parts, spec, random, output, run, view.sizes, without_tensor_scale)
    if x.numel() >= MOST:
        return False
    how = run, 1 if outer == 1 else across, outer
    launch = rows_of(spec, x.dtype, output, how, x.numel() % 32 == 0, device_index(x), without_tensor_scale)
    if launch is not None:
        launch(x, parts, random)
    return launch is not None


class Rows:
    """A kernel of block_rows.cu with all that does not depend on the tensor.

    Args:
        spec: The cast.
        macros: Of the kernel.
        how: Elements of a block in a row, blocks across a row, and rows of a block.
        together: Elements of a block of threads.
        index: Of the device.
    """

    def __init__(self, spec: CastSpec, macros: Defines, how: tuple[int, int, int], together: int, index: int) -> None:
        assert isinstance(spec.format, BlockFormat)
        self._spec, self._how, self._together = spec, how, together
        self.one_pass, self._two_level = ("RUN", "0") not in macros, spec.format.tensor_scale
        self._kernel = kernel("block_rows.cu", "cast_runs", index, macros)
        self._pieces = struct.pack("<4I", how[0] // 16, *how[1:], 0)
        self._bound: Bound | None = None

    def __call__(self, x: Tensor, parts: EncodedParts, random: Random = None) -> None:
        """Cast x into parts."""
        run, across, outer = self._how
        total, block_amaxes, tensor_amax = x.numel(), None, None
        if not self.one_pass and self._two_level and run < total:  # one memory for both: the host fills it once
            both = torch.zeros(2 + 2 * (total // run // outer), dtype=torch.int32, device=x.device)
            block_amaxes, tensor_amax = both[2:], both[:2]
            amax_of_blocks(x, run, across, outer, block_amaxes, tensor_amax)
        elif not self.one_pass:
            block_amaxes = amax_of_blocks(x, run, across, outer)
            tensor_amax = block_amaxes if run == total else None
        elif self._two_level:
            tensor_amax = amax_of_blocks(x, total)
        tensors = x, parts.codes, parts.scales, block_amaxes, tensor_amax, parts.tensor_scale
        grid, backwards = -(-total // self._together), np.uint32(tensor_amax is not None)
        if self._spec.rounding.mode == "stochastic":
            drawn = cast_bytes(self._spec, random, x.device)
            self._kernel(grid, THREADS, *tensors, np.uint64(total), self._pieces, backwards, drawn)
            return
        if self._bound is None:
            constant = cast_bytes(self._spec, None, x.device)
            self._bound = self._kernel.bound(THREADS, 7, self._pieces, backwards, constant)
        self._bound(grid, *tensors, total)


@lru_cache(maxsize=1024)
def rows_of(
    spec: CastSpec,
    dtype: torch.dtype,
    output: int,
    how: tuple[int, int, int],
    whole: bool,
    index: int,
    without_tensor_scale: bool = False,
) -> Rows | None:
    """Return the row kernel of a cast, None where it does not serve; whole: the tensor fills lanes of 32 elements."""
    fast, (run, _, outer) = fast_macros(spec, dtype, output, without_tensor_scale), how
    if fast is None or run % 16:
        return None
    vector = vector_width(dtype, output, spec.format.bits)
    macros = run_macros(fast, dtype, vector, run if outer == 1 else 0, whole)
    return Rows(spec, macros, how, 4 * vector * THREADS, index)


def amax_of_blocks(
    x: Tensor, run: int, across: int = 1, outer: int = 1, amaxes: Tensor | None = None, tensor: Tensor | None = None
) -> Tensor:
    """Return the amaxes of blocks and flags of NaN and Inf in them, int32 [2 * blocks], in memory of zeros.

    ``tensor``: zeros, int32 [2], which get those of the whole of x from the same read.
    """
    total, vector, index = x.numel(), 16 // x.element_size(), device_index(x)
    if amaxes is None:
        amaxes = torch.zeros(2 * (total // run // outer), dtype=torch.int32, device=x.device)
    grid = -(-total // (4 * vector * THREADS))
    if run == total:
        grid = min(grid, 8 * multiprocessors(index))
        _tensor_amax(x.dtype, index)(grid, x, amaxes, total // vector)
    else:
        numbers = (np.uint32(n) for n in (run // vector, across, outer))
        find = kernel("statistic.cu", "amax_of_runs", index, amax_macros(x.dtype))
        find(grid, THREADS, x, amaxes, tensor, np.uint64(total // vector), *numbers)
    return amaxes


@lru_cache(maxsize=64)
def _tensor_amax(dtype: torch.dtype, index: int) -> Bound:
    return kernel("statistic.cu", "amax_of_tensor", index, amax_macros(dtype)).bound(THREADS, 3)


def _columns(
    x: Tensor,
    parts: EncodedParts,
    spec: CastSpec,
    random: Random,
    output: int,
    run: int,
    sizes: tuple[int, int, int],
    without_tensor_scale: bool,
    both: tuple[Tensor | None, bytes] = (None, NO_DRAW),
) -> bool:
    """Launch the column kernel, if it serves; both: what takes values of blocks along the last axis, and its draw."""
    leading, inner, trailing = sizes
    fmt, fast = spec.format, fast_macros(spec, x.dtype, output, without_tensor_scale)
    assert isinstance(fmt, BlockFormat)
    if run not in _COLUMN_RUNS or fast is None:
        return False
    narrow = output == PACKED and fmt.bits < 8  # two codes of a row share a byte
    vector = vector_width(x.dtype, output, fmt.bits)
    while trailing % vector:
        vector //= 2
    down, across = max(run // 32, 1), 8 // max(run // 32, 1)
    grid = -(-trailing // (8 * vector * across)), -(-inner // (32 * down)), leading
    if max(grid[1:]) > _GRID_LIMIT or (narrow and fmt.bits != 4):
        return False
    if both[0] is not None and (trailing % run or run > 8 * vector):
        return False
    tensor = amax_of_blocks(x, x.numel()) if fmt.tensor_scale else None
    tensors = x, parts.codes, parts.scales, both[0], None, tensor, parts.tensor_scale
    job = Structure(_COLUMNS_JOB, (*tensors, inner, trailing, both[1]))
    macros, index = column_macros(fast, run, vector, narrow, both[0] is not None), device_index(x)
    kernel("block_columns.cu", "cast_columns", index, macros)(grid, THREADS, job, cast_bytes(spec, random, x.device))
    return True
