# SPDX-License-Identifier: Apache-2.0
"""The engine's casts: the verbs, what they cover, and a fast dispatch of the most common ones.

Small tensors cost host time alone, so what depends on the cast, the dtypes and the device is looked up in one place.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch

from fmtsim.cuda import runtime
from fmtsim.cuda.cast import block_casts
from fmtsim.cuda.cast.any_format import cast_general, decode, encode_rows
from fmtsim.cuda.cast.parameters import BYTES_AT_ONCE, DTYPES, Grid, aligned, draw_of, grid_of, macros
from fmtsim.cuda.cast.scale_rules import draws_words, output_of
from fmtsim.cuda.cast.tables import convert
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.packing import code_dtype, packed_size
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey, in_one_order

__all__ = ["decode", "encode", "encode_packed", "quantize", "quantize_contiguous", "supports"]

_Launch = Callable[[torch.Tensor, torch.Tensor, Random], bool]  # of x and its result; True where it was done


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Return True if the kernels cover a verb on these tensors: input and output of quantize, else the one it has.

    LogFMT tiles and codebooks with NaN are left to torch ops, and so are results that must be rounded once more to a
    narrow output dtype.
    """
    fmt, dtypes = spec.format, [tensor.dtype for tensor in tensors]
    if _lists_nan(fmt):
        return False
    if isinstance(fmt, LogTileFormat | PackedFormat) or not all(dtype in FLOAT_DTYPES for dtype in dtypes):
        return False
    if not _runs(tensors[0].device):
        return False
    if isinstance(fmt, BlockFormat):
        return block_casts.covers_blocks(spec, *dtypes)
    if verb == "encode_packed":
        return packs(spec, tensors[0])
    return verb == "encode" or dtypes[-1] in (torch.float32, torch.float64) or is_representable(fmt, dtypes[-1])


def _lists_nan(fmt: Format) -> bool:
    """Return True for codebooks with NaN and blocks of them, whose rules for infinities and ranks no kernel has."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    return isinstance(element, CodebookFormat) and element.has_nan


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    if not isinstance(random, torch.Tensor) and quantize_contiguous(x, spec, out, random):
        return
    if isinstance(spec.format, BlockFormat):
        block_casts.quantize_blocks(x, spec, random, out)
    else:
        quantize_elements(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x in its shape, and the scales of a block format."""
    encode_any = block_casts.encode_blocks if isinstance(spec.format, BlockFormat) else encode_elements
    return encode_any(x, spec, random, packed)


def encode_packed(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return codes and scales as an encoded tensor keeps them: packed along ``dim`` (docs/semantics.md, section 11)."""
    return encode(x, spec, random, packed=True)


@cache
def _runs(device: torch.device) -> bool:
    return runtime.available(device)


# Fast dispatch.


def quantize_contiguous(x: torch.Tensor, spec: CastSpec, out: torch.Tensor, random: Random = None) -> bool:
    """Quantise x into out where both are contiguous and a fast kernel takes them; return True if that is so.

    Args:
        x, out: Of one shape, on one device.
        spec: The cast.
        random: Where the rounding draws words, their key.

    False for float64, given random words, and blocks that are not runs of the last dimension.
    """
    if not x.numel() or (x.data_ptr() | out.data_ptr()) % 16 or not (x.is_contiguous() and out.is_contiguous()):
        return False
    launch = _fast_launch(spec, x.dtype, out.dtype, runtime.device_index(x))
    return launch is not None and launch(x, out, random)


@lru_cache(maxsize=4096)
def _fast_launch(spec: CastSpec, dtype: torch.dtype, out_dtype: torch.dtype, index: int) -> _Launch | None:
    """Return the launch of a cast on a device, None where fast dispatch does not serve it."""
    if (
        torch.float64 in (dtype, out_dtype)
        or isinstance(spec.format, LogTileFormat | PackedFormat)
        or not runtime.serves(index)
    ):
        return None
    element = spec.format.element if isinstance(spec.format, BlockFormat) else spec.format
    if _lists_nan(element):
        return None
    if not element.has_nan and element.nan_policy == "error":
        return None  # NaN raises an error: numbers have to be read
    if isinstance(spec.format, BlockFormat):
        return _fast_blocks(spec, spec.format, dtype, out_dtype, index)
    grid, rounding = fast_grid(spec, None), spec.rounding
    if grid is None or not (out_dtype == torch.float32 or is_representable(spec.format, out_dtype)):
        return None
    elements, stochastic = launch_of(grid, rounding, dtype, out_dtype, index), rounding.mode == "stochastic"

    def launch(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        if isinstance(random, RandomKey) != stochastic:
            return False
        elements(x, out, random, 0)
        return True

    return launch


def _fast_blocks(
    spec: CastSpec, fmt: BlockFormat, dtype: torch.dtype, out_dtype: torch.dtype, index: int
) -> _Launch | None:
    (rows, run), output, stochastic = fmt.block, output_of(out_dtype), spec.rounding.mode == "stochastic"
    if output is None or spec.dim != -1 or rows != 1 or not run or not draws_words(spec, RandomKey(0)):
        return None
    cast = block_casts.rows_of(spec, dtype, output, (run, 1, 1), True, index)
    if cast is None or not cast.one_pass:  # no fast kernel, or a block is longer than a warp holds
        return None

    def launch(x: torch.Tensor, out: torch.Tensor, random: Random) -> bool:
        whole = x.dim() > 0 and x.shape[-1] % run == 0 and x.numel() < block_casts.MOST
        if isinstance(random, RandomKey) != stochastic or not whole:
            return False
        cast(x, EncodedParts(out), random)
        return True

    return launch


# Element formats.

_THREADS = 128
TILE = 1024  # elements of a warp that share Philox counters; a block of threads has four


def quantize_elements(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    if x.numel() == 0:
        return
    source, target = in_one_order(x, out, ordered=spec.rounding.mode == "stochastic")
    narrow = torch.float64 not in (x.dtype, out.dtype)
    grid = fast_grid(spec, random) if narrow else None
    if grid is not None:
        # Cast from the first to the last element in vectors, those beside them one by one; all of them where none fits.
        index = runtime.device_index(source)
        launch = launch_of(grid, spec.rounding, source.dtype, target.dtype, index)
        first = _first_aligned(source, target, vectors_of(grid, source.dtype, target.dtype)[0])
        launch(source, target, random, None if first and spec.rounding.mode == "stochastic" else first)
    elif not (narrow and convert(source, target, spec, 0)):
        cast_general(source, EncodedParts(target), spec, random)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def encode_elements(x: torch.Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x in its shape and ``code_dtype``.

    With ``packed`` they are packed along ``dim``, as an encoded tensor keeps them (docs/semantics.md, section 11).
    """
    bits, rows = spec.format.bits, (1, x.numel())
    if packed and bits not in block_casts.UNPACKED:
        x = x.reshape(1) if x.dim() == 0 else x.movedim(spec.dim, -1)
        codes = torch.empty((*x.shape[:-1], packed_size(x.shape[-1], bits)), dtype=torch.uint8, device=x.device)
        slot = bits
        if x.shape[-1] * bits % 8:  # else rows end on bytes: one stream
            rows = (math.prod(x.shape[:-1]), x.shape[-1])
    else:
        codes = torch.empty(x.shape, dtype=block_casts.UNPACKED[bits] if packed else code_dtype(bits), device=x.device)
        slot = 8 * codes.element_size()
    if x.numel():
        # Write the codes of contiguous x, ``slot`` bits from one to the next in each row.
        x = x.contiguous()
        count = x.numel()
        grid = fast_grid(spec, random) if x.dtype != torch.float64 and slot <= 32 else None
        if grid is not None and grid.encodes and rows[0] == 1:
            defines = encode_macros(grid, x.dtype, aligned(x), spec.format.bits, slot)
            span = TILE if spec.rounding.mode == "stochastic" else 32 * _run(slot, x.dtype, grid.random)
            runtime.kernel("encode.cu", "encode", runtime.device_index(x), defines)(
                -(-count // (4 * span)),
                _THREADS,
                x,
                codes,
                np.int64(count),
                grid.parameters,
                draw_of(spec.rounding, random),
            )
        elif not (rows[0] == 1 and slot in (4, 8) and convert(x, codes, spec, slot)):
            if slot in block_casts.UNPACKED:
                cast_general(x, EncodedParts(codes), spec, random)
            else:
                encode_rows(x, codes, spec, random, rows, slot)
    return EncodedParts(codes)


def packs(spec: CastSpec, x: torch.Tensor) -> bool:
    """Return True if ``encode_elements`` packs codes: random words belong to places in the tensor's own order."""
    bits, last = spec.format.bits, spec.dim == -1 or x.dim() == 0
    return bits in block_casts.UNPACKED or (bits <= 32 and (last or spec.rounding.mode != "stochastic"))


def fast_grid(spec: CastSpec, random: Random) -> Grid | None:
    """Return the parameters of the fast kernels for a cast of narrow dtypes, None where it needs others."""
    if isinstance(random, torch.Tensor):
        return None
    return grid_of(spec.format, spec.rounding, spec.overflow)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def launch_of(
    grid: Grid, rounding: Rounding, dtype: torch.dtype, out: torch.dtype, index: int
) -> Callable[[torch.Tensor, torch.Tensor, Random, int | None], None]:
    """Return a launch of quantize.cu: of x, its result, random words and the first element at which a vector begins."""
    kernel = runtime.kernel("quantize.cu", "quantize", index, quantize_macros(grid, dtype, out))
    stochastic, (width, unroll) = rounding.mode == "stochastic", vectors_of(grid, dtype, out)
    group = TILE if stochastic else width  # elements that are cast together
    together = 4 * TILE if stochastic else _THREADS * width * unroll  # of a block of threads
    bound = kernel.bound(_THREADS, 5, grid.parameters, draw_of(rounding, None))

    def launch(x: torch.Tensor, to: torch.Tensor, random: Random, first: int | None) -> None:
        count = x.numel()
        last = 0 if first is None else first + max(count - first, 0) // group * group
        served = count if stochastic or first is None else last - first
        blocks = max(-(-served // (_THREADS if first is None else together)), 1)
        bounds = min(first or 0, count), last, count
        if stochastic:
            drawn = draw_of(rounding, random)
            kernel(blocks, _THREADS, x, to, *map(np.int64, bounds), grid.parameters, drawn)
        else:
            bound(blocks, x, to, *bounds)

    return launch


def _run(slot: int, dtype: torch.dtype, random: int) -> int:
    """Return the elements of a thread of encode.cu, whose codes fill words."""
    least = 4 if dtype.itemsize == 4 else 16 if slot <= 8 else 8
    if slot == 6 and dtype.itemsize == 2 and not random:
        least = 32
    return max(32 // math.gcd(slot, 32), least)


def _first_aligned(source: torch.Tensor, target: torch.Tensor, width: int) -> int | None:
    """Return the first element at which a vector begins in both, None where there is none."""
    for first in range(width):
        sizes = ((tensor.data_ptr(), tensor.element_size()) for tensor in (source, target))
        if not any((start + first * size) % min(BYTES_AT_ONCE, width * size) for start, size in sizes):
            return first
    return None


def vectors_of(grid: Grid, dtype: torch.dtype, out: torch.dtype) -> tuple[int, int]:
    """Return the elements of a vector of quantize.cu, and the vectors of a thread.

    With random words, which keep threads busier, both sides have whole vectors; else neighbours write side by side.
    """
    if dtype.itemsize == 2 and out.itemsize == 4 and not grid.random:
        return 4, 2
    return (8 if 2 in (dtype.itemsize, out.itemsize) else 4), 2


@lru_cache(maxsize=1024)
def quantize_macros(grid: Grid, dtype: torch.dtype, out: torch.dtype) -> runtime.Defines:
    """Return the macros of quantize.cu."""
    width, unroll = vectors_of(grid, dtype, out)
    kinds = {"INPUT": DTYPES[dtype], "OUTPUT": DTYPES[out], "PAIRS": grid.pairs(dtype)}
    return (*grid.defines, *macros(**kinds, WIDTH=width, UNROLL=unroll))


@lru_cache(maxsize=1024)
def encode_macros(grid: Grid, dtype: torch.dtype, vectors: bool, code: int, slot: int) -> runtime.Defines:
    """Return the macros of encode.cu."""
    kinds = {"INPUT": DTYPES[dtype], "VECTORS": vectors, "PAIRS": grid.pairs(dtype), "CODE": code, "SLOT": slot}
    run = _run(slot, dtype, grid.random)
    return (*grid.defines, *macros(**kinds, INTEGER=grid.integer, MANTISSA=grid.mantissa, RUN=run))
