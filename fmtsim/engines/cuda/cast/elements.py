# SPDX-License-Identifier: Apache-2.0
"""Casts of element formats on a GPU: which kernel runs, on which layout, with which random words."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.cast.general import cast_general, encode_rows
from fmtsim.engines.cuda.cast.grid import Grid, grid_of
from fmtsim.engines.cuda.cast.parameters import BYTES_AT_ONCE, DTYPES, aligned, draw_of, macros
from fmtsim.engines.cuda.cast.tables import convert
from fmtsim.formats.packing import code_dtype, packed_size
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, in_one_order

_UNPACKED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # packed codes of whole words
THREADS = 128
TILE = 1024  # elements of a warp that share Philox counters; a block of THREADS has four

Defines = runtime.Defines


def quantize_elements(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    if x.numel() == 0:
        return
    source, target = in_one_order(x, out, ordered=spec.rounding.mode == "stochastic")
    narrow = torch.float64 not in (x.dtype, out.dtype)
    grid = fast_grid(spec, random) if narrow else None
    if grid is not None:
        _quantize_fast(source, spec, random, target, grid)
    elif not (narrow and convert(source, target, spec, 0)):
        cast_general(source, EncodedParts(target), spec, random)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def encode_elements(x: torch.Tensor, spec: CastSpec, random: Random, packed: bool = False) -> EncodedParts:
    """Return the codes of x in its shape and ``code_dtype``.

    With ``packed`` they are packed along ``dim``, as an encoded tensor keeps them (docs/semantics.md, section 11).
    """
    bits, rows = spec.format.bits, (1, x.numel())
    if packed and bits not in _UNPACKED:
        x = x.reshape(1) if x.dim() == 0 else x.movedim(spec.dim, -1)
        codes = torch.empty((*x.shape[:-1], packed_size(x.shape[-1], bits)), dtype=torch.uint8, device=x.device)
        slot = bits
        if x.shape[-1] * bits % 8:  # else rows end on bytes: one stream
            rows = (math.prod(x.shape[:-1]), x.shape[-1])
    else:
        codes = torch.empty(x.shape, dtype=_UNPACKED[bits] if packed else code_dtype(bits), device=x.device)
        slot = 8 * codes.element_size()
    if x.numel():
        _encode(x.contiguous(), spec, random, codes, rows, slot)
    return EncodedParts(codes)


def packs(spec: CastSpec, x: torch.Tensor) -> bool:
    """Say whether ``encode_elements`` packs codes: random words belong to places in the tensor's own order."""
    bits, last = spec.format.bits, spec.dim == -1 or x.dim() == 0
    return bits in _UNPACKED or (bits <= 32 and (last or spec.rounding.mode != "stochastic"))


def fast_grid(spec: CastSpec, random: Random) -> Grid | None:
    """Return the parameters of the fast kernels for a cast of narrow dtypes, None where it needs others."""
    if isinstance(random, torch.Tensor):
        return None
    return grid_of(spec.format, spec.rounding, spec.overflow)  # type: ignore[arg-type]


def _quantize_fast(source: torch.Tensor, spec: CastSpec, random: Random, target: torch.Tensor, grid: Grid) -> None:
    """Cast from the first to the last element in vectors, those beside them one by one; all of them where none fits."""
    index = runtime.device_index(source)
    launch = launch_of(grid, spec.rounding, source.dtype, target.dtype, index)
    first = _first_aligned(source, target, vectors_of(grid, source.dtype, target.dtype)[0])
    launch(source, target, random, None if first and spec.rounding.mode == "stochastic" else first)


@lru_cache(maxsize=1024)
def launch_of(
    grid: Grid, rounding: Rounding, dtype: torch.dtype, out: torch.dtype, index: int
) -> Callable[[torch.Tensor, torch.Tensor, Random, int | None], None]:
    """Return a launch of quantize.cu: of x, its result, random words and the first element at which a vector begins."""
    kernel = runtime.kernel("quantize.cu", "quantize", index, quantize_macros(grid, dtype, out))
    stochastic, (width, unroll) = rounding.mode == "stochastic", vectors_of(grid, dtype, out)
    group = TILE if stochastic else width  # elements that are cast together
    together = 4 * TILE if stochastic else THREADS * width * unroll  # of a block of threads
    bound = kernel.bound(THREADS, 5, grid.parameters, draw_of(rounding, None))

    def launch(x: torch.Tensor, to: torch.Tensor, random: Random, first: int | None) -> None:
        count = x.numel()
        last = 0 if first is None else first + max(count - first, 0) // group * group
        served = count if stochastic or first is None else last - first
        blocks = max(-(-served // (THREADS if first is None else together)), 1)
        bounds = min(first or 0, count), last, count
        if stochastic:
            drawn = draw_of(rounding, random)
            kernel(blocks, THREADS, x, to, *map(np.int64, bounds), grid.parameters, drawn)
        else:
            bound(blocks, x, to, *bounds)

    return launch


def _encode(
    x: torch.Tensor, spec: CastSpec, random: Random, codes: torch.Tensor, rows: tuple[int, int], slot: int
) -> None:
    """Write the codes of contiguous x, ``slot`` bits from one to the next in each row."""
    count = x.numel()
    grid = fast_grid(spec, random) if x.dtype != torch.float64 and slot <= 32 else None
    if grid is not None and grid.encodes and rows[0] == 1:
        defines = encode_macros(grid, x.dtype, aligned(x), spec.format.bits, slot)
        span = TILE if spec.rounding.mode == "stochastic" else 32 * _run(slot, x.dtype, grid.random)
        runtime.kernel("encode.cu", "encode", runtime.device_index(x), defines)(
            -(-count // (4 * span)), THREADS, x, codes, np.int64(count), grid.parameters, draw_of(spec.rounding, random)
        )
    elif not (rows[0] == 1 and slot in (4, 8) and convert(x, codes, spec, slot)):
        if slot in _UNPACKED:
            cast_general(x, EncodedParts(codes), spec, random)
        else:
            encode_rows(x, codes, spec, random, rows, slot)


def _run(slot: int, dtype: torch.dtype, random: int) -> int:
    """Return how many elements a thread of encode.cu takes; their codes fill words."""
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
    """Return how many elements a vector of quantize.cu has, and how many of them a thread takes.

    With random words, which keep threads busier, both sides have whole vectors; else neighbours write side by side.
    """
    if dtype.itemsize == 2 and out.itemsize == 4 and not grid.random:
        return 4, 2
    return (8 if 2 in (dtype.itemsize, out.itemsize) else 4), 2


@lru_cache(maxsize=1024)
def quantize_macros(grid: Grid, dtype: torch.dtype, out: torch.dtype) -> Defines:
    """Return the macros of quantize.cu."""
    width, unroll = vectors_of(grid, dtype, out)
    kinds = {"INPUT": DTYPES[dtype], "OUTPUT": DTYPES[out], "PAIRS": grid.pairs(dtype)}
    return (*grid.defines, *macros(**kinds, WIDTH=width, UNROLL=unroll))


@lru_cache(maxsize=1024)
def encode_macros(grid: Grid, dtype: torch.dtype, vectors: bool, code: int, slot: int) -> Defines:
    """Return the macros of encode.cu."""
    kinds = {"INPUT": DTYPES[dtype], "VECTORS": vectors, "PAIRS": grid.pairs(dtype), "CODE": code, "SLOT": slot}
    run = _run(slot, dtype, grid.random)
    return (*grid.defines, *macros(**kinds, INTEGER=grid.integer, MANTISSA=grid.mantissa, RUN=run))
