# SPDX-License-Identifier: Apache-2.0
"""Casts of block formats on the CPU: the operand matrix, its groups of blocks, and the kernels that run on them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fmtsim.engines import torch_engine
from fmtsim.engines.cpu.cast import blocks, columns, encoding
from fmtsim.engines.cpu.cast.codes import coding_of
from fmtsim.engines.cpu.cast.decoding import decode, narrows, store
from fmtsim.engines.cpu.cast.elements import grid_for
from fmtsim.engines.cpu.cast.grid import Grid, grid_of
from fmtsim.engines.cpu.cast.lookup import table_of
from fmtsim.engines.cpu.cast.phases import Layout, Scaling, scaling_of
from fmtsim.engines.cpu.cast.words import Words, integers_of, words_of
from fmtsim.engines.cpu.runtime import pool
from fmtsim.engines.cpu.runtime.scratch import array_of
from fmtsim.formats.block import E8M0, FP32, BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, block_counts

_NO_GRID = grid_of(E8M0, "saturate", "nearest_even")  # stands in for one that a kernel does not look at
_LOWEST_PLACE = -90  # exponent: what a product with a power of two loses below 2**-126 is far below such a last place


class Fast(NamedTuple):
    """A fast kernel: the element's grid, and ``run(x, values, codes, scales, scaling, layout, start, stop)``.

    It casts groups of blocks ``start ... stop - 1`` and returns the first that it cannot take, or stop.
    """

    grid: Grid
    run: Callable[..., int]


def quantizer(spec: CastSpec, words: Words | None = None) -> Fast | None:
    """Return the kernel for the values of a float32 tensor, None where none serves."""
    grids = _grids(spec)
    if grids is None:
        return None
    g, sg = grids
    of = columns if _format(spec).block[1] == 1 else blocks
    if words is not None:
        return Fast(g, lambda x, y, _, __, p, at, *ends: of.quantize_stochastic(x, y, g, p, sg, words, at, *ends))
    if _format(spec).power_of_two:
        return Fast(g, lambda x, y, _, __, p, at, *ends: of.quantize_binary(x, y, g, p, at, *ends))
    return Fast(g, lambda x, y, _, __, p, at, *ends: of.quantize_real(x, y, g, p, sg, at, *ends))


def encoder(spec: CastSpec, words: Words | None = None) -> Fast | None:
    """Return the kernel for the codes and scales of a float32 tensor, None where none serves."""
    grids, coding = _grids(spec), coding_of(_format(spec).element)
    if grids is None or coding is None:
        return _by_table(spec)
    g, sg = grids
    if int(g.min_biased) - 127 + int(g.drop) - 23 < _LOWEST_PLACE:
        return None
    if words is not None:
        return Fast(
            g, lambda x, _, z, s, p, at, *ends: encoding.encode_stochastic(x, z, s, g, coding, p, sg, words, at, *ends)
        )
    return Fast(g, lambda x, _, z, s, p, at, *ends: encoding.encode_nearest(x, z, s, g, coding, p, sg, at, *ends))


def _by_table(spec: CastSpec) -> Fast | None:
    """Return the kernel that looks codes up under real scales."""
    fmt = _format(spec)
    sg = _scale_grid(fmt)
    if sg is None or fmt.power_of_two or fmt.zero_point:
        return None
    table = table_of(fmt.element, spec.rounding, spec.overflow)
    if table is None:
        return None
    return Fast(sg, lambda x, _, z, s, p, at, *ends: encoding.encode_tabled(x, z, s, table, p, sg, at, *ends))


def _format(spec: CastSpec) -> BlockFormat:
    assert isinstance(spec.format, BlockFormat)
    return spec.format


@lru_cache(maxsize=1024)
def _grids(spec: CastSpec) -> tuple[Grid, Grid] | None:
    """Return the grids of element and scale for the kernels that compute, None where they do not serve."""
    fmt = _format(spec)
    if fmt.zero_point or spec.rounding.mode not in ("nearest_even", "stochastic"):
        return None
    grid, scale_grid = grid_for(fmt.element, spec), _scale_grid(fmt)
    if grid is None or grid.by_bits or grid.special or fmt.element.max_exponent < 0 or scale_grid is None:
        return None
    return grid, scale_grid


def _scale_grid(fmt: BlockFormat) -> Grid | None:
    """Return the grid to which the fast kernels round real scales, None where they do not make a format's scales."""
    if fmt.power_of_two or (fmt.scale == FP32 and fmt.arithmetic != "divide"):
        return _NO_GRID
    grid = grid_of(fmt.scale, "saturate", "nearest_even")
    return None if grid is None or grid.by_bits or fmt.arithmetic == "divide" else grid


_GROUP = 2048  # columns that go through the phases of a kernel together
_PANEL, _LEAST = 8192, 64  # elements, and columns, of blocks of one column that do
_SPAN = 4096  # columns a task when one scale covers the tensor
_NONE = torch.empty((0, 0), dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A cast of a matrix: what it is, and what it fills: values, or codes with the scales of the blocks."""

    x: torch.Tensor
    spec: CastSpec
    random: Random
    shape: torch.Size
    amax: float | None  # of the whole matrix, where its scales need that
    values: torch.Tensor = _NONE
    codes: torch.Tensor = _NONE.to(torch.uint8)
    scales: torch.Tensor = _NONE

    @property
    def format(self) -> BlockFormat:
        assert isinstance(self.spec.format, BlockFormat)
        return self.spec.format

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block; one scale of the whole matrix is found again in every span of it."""
        (outer, inner), (rows, columns) = self.format.block, self.x.shape
        return (1, min(_SPAN, columns)) if self.whole else (min(outer or rows, rows), min(inner or columns, columns))

    @property
    def whole(self) -> bool:
        return self.format.block == (None, None)

    def as_row(self) -> "_Job":
        """Return the same as one long row."""
        names = ("x", "values", "codes", "scales")
        return replace(self, **{name: getattr(self, name).view(1, -1) for name in names})


def quantize_blocks(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    if quantizer(spec) is None or out.dtype == torch.float64 or narrows(spec.format, out.dtype):
        decode(encode_blocks(x, spec, random), spec, out)
        return
    if spec.dim == -2 and x.dim() == 2 and x.is_contiguous():
        spec = _across(spec)
    matrix = _matrix(x, spec.dim)
    direct = (spec.dim == -1 or x.dim() < 2) and out.is_contiguous() and out.dtype == torch.float32
    target = out.view(matrix.shape) if direct else torch.empty_like(matrix)
    if matrix.numel():
        amax, left = _amax(matrix, spec)
        fast = quantizer(spec, _words(spec, random, x))
        if (
            left
            or fast is None
            or not _cast(_Job(x=matrix, spec=spec, random=random, shape=x.shape, amax=amax, values=target), fast)
        ):
            torch_engine.quantize(x, spec, random, out)
            return
    if not direct:
        store(_unfold(target, x.shape, spec.dim), out)


@lru_cache(maxsize=256)
def _across(spec: CastSpec) -> CastSpec:
    """Return a cast of blocks down the columns of a matrix as one of blocks along its rows: the same numbers."""
    assert isinstance(spec.format, BlockFormat)
    scaling = replace(spec.format.scaling, block=spec.format.block[::-1])
    return replace(spec, format=replace(spec.format, scaling=scaling), dim=-1)


def encode_blocks(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x with their scales."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    matrix = _matrix(x, spec.dim)
    counts = block_counts(fmt, x.shape, spec.dim)
    codes, scales = torch.empty(matrix.shape, dtype=code_dtype(fmt.bits)), torch.empty(counts, dtype=torch.float32)
    decode_scale = torch.ones((), dtype=torch.float32)
    if matrix.numel():
        amax, left = _amax(matrix, spec)
        job = _Job(x=matrix, spec=spec, random=random, shape=x.shape, amax=amax, codes=codes)
        grid = [-(-size // own) for size, own in zip(matrix.shape, job.block, strict=True)]
        scales = torch.empty(grid, dtype=torch.float32)
        decode_scale.fill_(float(scaling_of(fmt, amax if fmt.tensor_scale else None).decode_scale))
        fast = encoder(spec, _words(spec, random, x))
        if left or fast is None or not _cast(replace(job, scales=scales), fast):
            return torch_engine.encode(x, spec, random)
        scales = scales[: counts[0], : counts[1]].clone()
    return EncodedParts(
        _unfold(codes, x.shape, spec.dim).contiguous(), scales, decode_scale if fmt.tensor_scale else None
    )


def _words(spec: CastSpec, random: Random, x: torch.Tensor):  # type: ignore[no-untyped-def]
    return words_of(spec.rounding, random, x.shape, spec.dim) if spec.rounding.mode == "stochastic" else None


def _matrix(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the operand matrix, inner axis last, contiguous, in float32."""
    x = x.reshape(1) if x.dim() == 0 else x
    matrix = x.movedim(dim, -1)
    rows = matrix.numel() // matrix.shape[-1] if matrix.shape[-1] else 0
    return matrix.reshape(rows, matrix.shape[-1]).contiguous().float()


def _unfold(matrix: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """Return a tensor of that shape from its operand matrix."""
    if len(shape) < 2:
        return matrix.view(shape)
    moved = [size for axis, size in enumerate(shape) if axis != len(shape) + dim] + [shape[dim]]
    return matrix.view(moved).movedim(-1, dim)


def _amax(matrix: torch.Tensor, spec: CastSpec) -> tuple[float | None, bool]:
    """Return the finite amax of a matrix whose scales need it, and whether its one scale is left for NaN or Inf."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    whole = fmt.block == (None, None)
    if not whole and not fmt.tensor_scale:
        return None, False
    flat, parts = matrix.view(-1), []
    pool.run(lambda start, stop: parts.append(blocks.finite_amax(array_of(flat[start:stop]))), flat.numel(), align=64)
    return float(max(amax for amax, _ in parts)), whole and any(strange for _, strange in parts)


def _cast(job: _Job, fast: Fast) -> bool:
    """Cast a matrix by a kernel, and by torch ops what that leaves; return False where that is all of it."""
    outer, inner = job.block
    if outer == 1 and job.x.shape[1] % inner == 0:
        job = job.as_row()  # rows of whole blocks are one long row
    rows, columns = job.x.shape
    blocks_across = -(-columns // inner)
    width = _GROUP // inner if inner > 1 else max(_PANEL // outer, _LEAST)
    group = max(min(width, blocks_across), 1)
    across = -(-blocks_across // group)
    arrays = [array_of(job.x), *(made.numpy() for made in (job.values, job.codes, job.scales))]
    scaling = scaling_of(job.format, job.amax if job.format.tensor_scale else None)
    layout = _layout(job, (outer, inner), group, fast.grid, scaling)
    left: list[tuple[int, int]] = []

    def part(start: int, stop: int) -> None:
        while (start := fast.run(*arrays, scaling, layout, start, stop)) < stop:
            left.append((start // across * outer, start % across * group * inner))
            start += 1

    pool.run(part, -(-rows // outer) * across, align=1, weight=outer * inner * group)
    if left and job.whole:
        return False
    shapes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, column in left:
        shapes[min(outer, rows - row), min(group * inner, columns - column)].append((row, column))
    for shape, places in shapes.items():
        _recast(job, shape, (outer, inner), places)
    return True


def _layout(job: _Job, block: tuple[int, int], group: int, grid: Grid, scaling: Scaling) -> Layout:
    """Return the blocks and the scale exponents under which magic numbers and limits stay normal float32 numbers."""
    reach = max(scaling.max_exponent + 1, int(grid.min_biased) - 127) + int(grid.drop)
    return Layout(
        outer=block[0],
        inner=block[1],
        group=group,
        lowest=np.int32(max(1 - int(grid.min_biased), -126 - scaling.max_exponent, -126)),
        highest=np.int32(min(127 - reach, 126 - scaling.max_exponent)),
        preset=np.float32(job.amax).view(np.int32) if job.whole else np.int32(-1),
    )


def _recast(job: _Job, shape: tuple[int, int], block: tuple[int, int], places: list[tuple[int, int]]) -> None:
    """Cast groups of one shape that a kernel left, one below the other, with torch ops.

    Where the whole tensor has a scale a group with its largest magnitude goes along, from which that scale follows.
    """
    slices = [(slice(row, row + shape[0]), slice(column, column + shape[1])) for row, column in places]
    pieces, random = [job.x[at] for at in slices], None
    if job.spec.rounding.mode == "stochastic":
        words = integers_of(job.spec.rounding, job.random, job.shape, job.spec.dim).view(job.x.shape)
        random = torch.cat([words[at] for at in slices] + [torch.zeros(shape, dtype=torch.int64)])
    end = torch.zeros(shape, dtype=torch.float32)
    end[0, 0] = job.amax or 0.0
    scaling = replace(job.format.scaling, block=(shape[0], min(block[1], shape[1])))
    spec = replace(job.spec, format=replace(job.format, scaling=scaling), dim=-1)
    parts = torch_engine.encode(torch.cat([*pieces, end]), spec, random)
    if not job.codes.numel():
        values = torch.empty(parts.codes.shape, dtype=torch.float32)
        torch_engine.decode(parts, spec, values)
        for at, piece in zip(slices, values.split(shape[0]), strict=False):
            job.values[at] = piece
        return
    assert parts.scales is not None
    for (row, column), at, codes, scales in zip(
        places, slices, parts.codes.split(shape[0]), parts.scales, strict=False
    ):
        job.codes[at] = codes
        first = column // block[1]
        job.scales[row // block[0], first : first + len(scales)] = scales
