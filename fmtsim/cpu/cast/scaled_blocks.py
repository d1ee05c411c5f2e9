# SPDX-License-Identifier: Apache-2.0
"""Casts of block formats on the CPU: an element with a Scaling goes from statistic to scale to element.

The tensor becomes the operand matrix, the matrix groups of blocks, and scaled_kernels.py casts a group at a time. What
a kernel leaves (NaN, Inf, scales at float32's limits) the torch engine casts. blockwise.py and the statistics below
are the same steps one by one, for a ``Scaling`` that no format has; hadamard.py is the transform before them.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy import float32, float64, int32

from fmtsim import torch_engine
from fmtsim.cpu.cast import scaled_kernels as kernels
from fmtsim.cpu.cast.codes import coding_of, store, table_of
from fmtsim.cpu.cast.elements import grid_for
from fmtsim.cpu.cast.grid import Grid, grid_of, integers_of, words_of
from fmtsim.cpu.cast.scaled_kernels import Layout, ScaleParameters, scale_parameters, with_tensor_scale
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel, max32, subroutine
from fmtsim.cpu.runtime.pool import array_of, past_caches, scratch
from fmtsim.formats.block import E8M0, FP32, Block, BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.scaling import Statistic
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, block_counts

_MAGNITUDE, _INF = int32(0x7FFFFFFF), int32(0x7F800000)
_STD, _RMS, _MEAN_ABS = range(3)
_LONGEST = 1024  # elements of a block whose sums stay in the first-level cache


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest finite magnitude of each block, 0 where there is none: float32 [blocks, blocks].

    Args:
        x: A float32 matrix.
        block: Rows and columns of a block; those at the edges may have fewer.
    """
    if not x.is_contiguous() and x.mT.is_contiguous():
        return block_amax(x.mT, block[::-1]).mT
    x, (rows, columns) = x.detach().contiguous(), block
    if rows >= x.shape[0] and columns >= x.shape[1]:
        flat, parts = array_of(x).reshape(-1), []
        pool.run(lambda start, stop: parts.append(finite_amax(flat[start:stop])[0]), flat.size, 64)
        return x.new_full((1, 1), float(max(parts, default=0)))
    amax = x.new_empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    matrix, out = array_of(x), array_of(amax).view(np.int32)

    def part(start: int, stop: int) -> None:
        _block_amax(matrix, out, scratch("largest", x.shape[1], np.int32), rows, columns, start, stop)

    pool.run(part, len(out), 1, rows * x.shape[1])
    return amax


def block_means(x: torch.Tensor, block: tuple[int, int], kind: Statistic) -> torch.Tensor | None:
    """Return the root mean square, mean magnitude or standard deviation of each block, as ``statistic`` defines them.

    Args:
        x: A float32 matrix.
        block: Rows and columns of a block.
        kind: ``"std"``, ``"rms"`` or ``"mean_abs"``.

    Returns:
        float32 [rows, blocks]; None where no kernel serves: it takes whole blocks of one row and of a power of two.
    """
    rows, columns = block
    if rows != 1 or columns & (columns - 1) or columns > _LONGEST or x.shape[1] % columns:
        return None
    x = x.detach().contiguous()
    means = x.new_empty(x.shape[0], x.shape[1] // columns)
    flat, out = array_of(x).reshape(-1), array_of(means).reshape(-1)
    which = {"std": _STD, "rms": _RMS, "mean_abs": _MEAN_ABS}[kind]
    pool.run(lambda start, stop: _means(flat, out, columns, which, start, stop), out.size, 1, columns)
    return means


@kernel
def finite_amax(x):
    """Return the largest finite magnitude of float32 x, and whether it holds NaN or Inf."""
    top = int32(0)
    for i in range(x.size):
        top = max32(top, bits32(x[i]) & _MAGNITUDE)
    if top < _INF:
        return float32_of(top), False
    top = int32(0)
    for i in range(x.size):  # seldom: look again, at finite elements alone
        bits = bits32(x[i]) & _MAGNITUDE
        top = max32(top, bits if bits < _INF else int32(0))
    return float32_of(top), True


@kernel
def _block_amax(x, out, largest, rows, columns, start, stop):
    for b in range(start, stop):
        first, last = b * rows, min((b + 1) * rows, x.shape[0])
        if columns == 1:
            _raise(x, largest, first, last)
            out[b] = largest
            continue
        if rows == 1:
            line = x[b]
            for j in range(out.shape[1]):
                part, top = line[j * columns : (j + 1) * columns], int32(0)
                for i in range(part.size):
                    size = bits32(part[i]) & _MAGNITUDE
                    top = max32(top, size if size < _INF else int32(0))
                out[b, j] = top
            continue
        _raise(x, largest, first, last)
        for j in range(out.shape[1]):
            part, top = largest[j * columns : (j + 1) * columns], int32(0)
            for i in range(part.size):
                top = max32(top, part[i])
            out[b, j] = top


@device
def _raise(x, largest, first, last):
    """Write the largest finite magnitude of each column of some rows."""
    largest[:] = 0
    for row in range(first, last):
        line = x[row]
        for i in range(line.size):
            size = bits32(line[i]) & _MAGNITUDE
            largest[i] = max32(largest[i], size if size < _INF else int32(0))


@kernel
def _means(x, out, size, which, start, stop):
    y = np.empty(size, np.float64)
    for b in range(start, stop):
        # 1. how many elements are finite
        part, has_others = x[b * size : (b + 1) * size], int32(0)
        for i in range(part.size):
            has_others |= int32((bits32(part[i]) & _MAGNITUDE) >= _INF)
        count, mean = _finite(part) if has_others else size, 0.0
        n = float64(max(count, 1))
        # 2. distances from the mean, or from zero
        if which == _STD:
            _spread(part, 0.0, y)
            _clear(part, y, has_others)
            mean = _folded(y) / n
        _spread(part, mean, y)
        _clear(part, y, has_others)
        # 3. the mean of their magnitudes, or the root of that of their squares
        for i in range(y.size):
            y[i] = abs(y[i]) if which == _MEAN_ABS else y[i] * y[i]
        mean = _folded(y) / n
        out[b] = float32(mean if which == _MEAN_ABS else np.sqrt(mean))


@device
def _spread(x, mean, y):
    """Write the distances of elements from a mean."""
    for i in range(y.size):
        y[i] = float64(x[i]) - mean


@subroutine
def _finite(x):
    """Return how many elements are finite."""
    count = 0
    for value in x:
        count += (bits32(value) & _MAGNITUDE) < _INF
    return count


@device
def _clear(x, y, has_others):
    """Set y to zero where x is not finite."""
    if has_others:
        for i in range(y.size):
            y[i] = y[i] if (bits32(x[i]) & _MAGNITUDE) < _INF else 0.0


@device
def _folded(y):
    """Add elements at half the length's distance until one is left; y, of a power of two, is used up."""
    half = y.size // 2
    while half:
        for i in range(half):
            y[i] += y[i + half]
        half //= 2
    return y[0]


_NO_GRID = grid_of(E8M0, "saturate", "nearest_even")  # stands in for one that a kernel does not look at
_LOWEST_PLACE = -90  # exponent: what a product with a power of two loses below 2**-126 is far below such a last place
_GROUP = 512  # columns that go through the steps of a kernel together
_PANEL, _LEAST = 8192, 64  # elements, and columns, of blocks of one column that do
_SPAN = 4096  # columns a task when one scale covers the tensor
_NONE = torch.empty((0, 0), dtype=torch.float32)
_NO_CODES = torch.empty((0, 0), dtype=torch.uint8)


class Prepared(NamedTuple):
    """The kernel of a cast to a block format and its parameters, made once.

    Attributes:
        spec: The cast.
        fmt: Its format.
        block: Rows and columns that share a scale; None is the whole axis.
        codes: The dtype of codes.
        grid: The element's.
        scale: How kernels make a scale.
        scales_tensor: The tensor has a scale beside those of its blocks.
        whole: One scale covers the tensor.
        stochastic: Elements are rounded stochastically.
        run: ``run(x, values, codes, scales, words, scale, layout, start, stop)`` is a kernel of scaled_kernels.py.
    """

    spec: CastSpec
    fmt: BlockFormat
    block: Block
    codes: torch.dtype
    grid: Grid
    scale: ScaleParameters
    scales_tensor: bool
    whole: bool
    stochastic: bool
    run: Callable[..., int]


def quantizer(spec: CastSpec) -> Callable[[torch.Tensor, CastSpec, Random, torch.Tensor], None] | None:
    """Return the function that quantises x into out (not float64; any strides; out may be x), None without a kernel."""
    prepared = _quantizing(spec)
    return None if prepared is None else partial(_quantize, prepared)


def encoder(spec: CastSpec) -> Callable[[torch.Tensor, CastSpec, Random], EncodedParts] | None:
    """Return the function that encodes x to codes and scales, None without a kernel."""
    prepared = _encoding(spec)
    return None if prepared is None else partial(_encode, prepared)


def _quantizing(spec: CastSpec) -> Prepared | None:
    """Return the kernel of a cast to values, None where there is none."""
    grids = _grids(spec)
    if grids is None:
        return None
    g, sg = grids
    if spec.rounding.mode == "stochastic":
        return _prepared(
            spec, g, lambda x, y, _, __, w, p, at, *to: kernels.quantize_stochastic(x, y, g, p, sg, w, at, *to)
        )
    if _format(spec).power_of_two:
        return _prepared(spec, g, lambda x, y, _, __, ___, p, at, *to: kernels.quantize_binary(x, y, g, p, at, *to))
    return _prepared(spec, g, lambda x, y, _, __, ___, p, at, *to: kernels.quantize_real(x, y, g, p, sg, at, *to))


def _encoding(spec: CastSpec) -> Prepared | None:
    """Return the kernel of a cast to codes and scales, None where there is none."""
    fmt = _format(spec)
    grids, c = _grids(spec), coding_of(fmt.element)
    if grids is not None and c is not None:
        g, sg = grids
        if int(g.min_biased) - 127 + int(g.drop) - 23 < _LOWEST_PLACE:
            return None
        if spec.rounding.mode == "stochastic":
            return _prepared(
                spec, g, lambda x, _, z, s, w, p, at, *to: kernels.encode_stochastic(x, z, s, g, c, p, sg, w, at, *to)
            )
        return _prepared(
            spec, g, lambda x, _, z, s, __, p, at, *to: kernels.encode_nearest(x, z, s, (g, c), p, sg, at, *to)
        )
    # Elements without a grid: by a table of codes, under real scales.
    scale_grid = _scale_grid(fmt)
    if scale_grid is None or fmt.power_of_two or fmt.zero_point:
        return None
    table = table_of(fmt.element, spec.rounding, spec.overflow)
    if table is None:
        return None
    return _prepared(
        spec,
        scale_grid,
        lambda x, _, z, s, __, p, at, *to: kernels.encode_tabled(x, z, s, table, p, scale_grid, at, *to),
    )


def _prepared(spec: CastSpec, grid: Grid, run: Callable[..., int]) -> Prepared:
    fmt, stochastic = _format(spec), spec.rounding.mode == "stochastic"
    whole, facts = fmt.block == (None, None), (scale_parameters(fmt), fmt.tensor_scale)
    return Prepared(spec, fmt, fmt.block, code_dtype(fmt.bits), grid, *facts, whole, stochastic, run)


def _format(spec: CastSpec) -> BlockFormat:
    assert isinstance(spec.format, BlockFormat)
    return spec.format


def _grids(spec: CastSpec) -> tuple[Grid, Grid] | None:
    """Return the grids of element and scale for kernels that round by arithmetic, None where those do not apply."""
    fmt = _format(spec)
    if fmt.zero_point or spec.rounding.mode not in ("nearest_even", "stochastic"):
        return None
    grid, scale_grid = grid_for(fmt.element, spec), _scale_grid(fmt)
    if grid is None or grid.by_bits or grid.special or fmt.element.max_exponent < 0 or scale_grid is None:
        return None
    return grid, scale_grid


def _scale_grid(fmt: BlockFormat) -> Grid | None:
    """Return the grid to which kernels round real scales, None where no kernel makes a format's scales."""
    if fmt.power_of_two or (fmt.scale == FP32 and fmt.arithmetic != "divide"):
        return _NO_GRID
    grid = grid_of(fmt.scale, "saturate", "nearest_even")
    return None if grid is None or grid.by_bits or fmt.arithmetic == "divide" else grid


class _Job(NamedTuple):
    """A cast of a matrix, with its outputs: values, or codes with the scales of the blocks.

    Attributes:
        cast: The kernel and its parameters.
        x: The operand matrix, float32, contiguous.
        random, shape: The random key or words, and the shape of the tensor, whose order they have.
        amax: The largest finite magnitude of the matrix, where its scales need that.
        block: Rows and columns of a block; where one scale covers the matrix, of a span of it.
        values, codes, scales: What is written.
    """

    cast: Prepared
    x: torch.Tensor
    random: Random
    shape: torch.Size
    amax: float | None
    block: tuple[int, int]
    values: torch.Tensor = _NONE
    codes: torch.Tensor = _NO_CODES
    scales: torch.Tensor = _NONE


def _quantize(cast: Prepared, x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    if spec.dim == -2 and x.dim() == 2 and x.is_contiguous():
        cast = _across(spec)
    dim = cast.spec.dim
    matrix = _matrix(x, dim)
    direct = (dim == -1 or x.dim() < 2) and out.is_contiguous() and out.dtype == torch.float32
    target = out.view(matrix.shape) if direct else torch.empty_like(matrix)
    if matrix.numel():
        job = _job(cast, matrix, random, x.shape)
        if job is None or not _run(job._replace(values=target)):
            torch_engine.quantize(x, spec, random, out)
            return
    if not direct:
        store(_unfold(target, x.shape, dim), out)


@lru_cache(maxsize=256)
def _across(spec: CastSpec) -> Prepared:
    """Return a cast of blocks down the columns of a matrix as one of blocks along its rows: the same numbers."""
    fmt = _format(spec)
    scaling = replace(fmt.scaling, block=fmt.block[::-1])
    prepared = _quantizing(replace(spec, format=replace(fmt, scaling=scaling), dim=-1))
    assert prepared is not None  # kernels do not look at the block
    return prepared


def _encode(cast: Prepared, x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    matrix = _matrix(x, spec.dim)
    counts = block_counts(cast.fmt, x.shape, spec.dim, cast.block)
    codes, scales = torch.empty(matrix.shape, dtype=cast.codes), torch.empty(counts, dtype=torch.float32)
    decode_scale = torch.ones((), dtype=torch.float32)
    if matrix.numel():
        job = _job(cast, matrix, random, x.shape)
        if job is None:
            return torch_engine.encode(x, spec, random)
        (rows, columns), (outer, inner) = matrix.shape, job.block
        scales = torch.empty(-(-rows // outer), -(-columns // inner), dtype=torch.float32)
        if not _run(job._replace(codes=codes, scales=scales)):
            return torch_engine.encode(x, spec, random)
        scales = scales[: counts[0], : counts[1]].clone()
        decode_scale.fill_(float(_scale_of(job).decode_scale))
    codes = _unfold(codes, x.shape, spec.dim).contiguous()
    return EncodedParts(codes, scales, decode_scale if cast.scales_tensor else None)


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


def _job(cast: Prepared, matrix: torch.Tensor, random: Random, shape: torch.Size) -> _Job | None:
    """Return the cast of a matrix, not empty, without outputs; None if one scale covers it and it holds NaN or Inf."""
    (outer, inner), (rows, columns) = cast.block, matrix.shape
    if not (cast.whole or cast.scales_tensor):
        return _Job(cast, matrix, random, shape, None, (min(outer or rows, rows), min(inner or columns, columns)))
    flat, parts = matrix.view(-1), []
    pool.run(lambda start, stop: parts.append(finite_amax(array_of(flat[start:stop]))), flat.numel(), align=64)
    if cast.whole and any(has_others for _, has_others in parts):
        return None
    block = (1, min(_SPAN, columns)) if cast.whole else (min(outer or rows, rows), min(inner or columns, columns))
    return _Job(cast, matrix, random, shape, float(max(amax for amax, _ in parts)), block)


def _scale_of(job: _Job) -> ScaleParameters:
    """Return how the scales of a matrix are made, with those of the whole of it."""
    cast = job.cast
    return with_tensor_scale(cast.scale, cast.fmt, job.amax or 0.0) if cast.scales_tensor else cast.scale


def _run(job: _Job) -> bool:
    """Cast a matrix by a kernel, and the groups that it refuses by the torch engine; return False if it refuses all."""
    cast, (outer, inner), words = job.cast, job.block, None
    if cast.stochastic:
        words = words_of(cast.spec.rounding, job.random, job.shape, cast.spec.dim)
    # 1. groups of blocks: rows of whole blocks are one long row
    if outer == 1 and job.x.shape[1] % inner == 0:
        x, values = job.x.view(1, -1), job.values.view(1, -1)
        job = job._replace(x=x, values=values, codes=job.codes.view(1, -1), scales=job.scales.view(1, -1))
    rows, columns = job.x.shape
    blocks_across = -(-columns // inner)
    width = _GROUP // inner if inner > 1 else max(_PANEL // outer, _LEAST)
    group = max(min(width, blocks_across), 1)
    across = -(-blocks_across // group)
    # 2. the kernel, on the threads of the pool
    arrays = array_of(job.x), job.values.numpy(), job.codes.numpy(), job.scales.numpy(), words
    scale = _scale_of(job)
    layout = _layout(job, group, scale)
    refused: list[tuple[int, int]] = []  # row and column at which a group begins

    def part(start: int, stop: int) -> None:
        while (start := cast.run(*arrays, scale, layout, start, stop)) < stop:
            refused.append((start // across * outer, start % across * group * inner))
            start += 1

    pool.run(part, -(-rows // outer) * across, align=1, weight=outer * inner * group)
    if not refused:
        return True
    if cast.whole:
        return False
    # 3. what it refused, groups of one shape together
    shapes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, column in refused:
        shapes[min(outer, rows - row), min(group * inner, columns - column)].append((row, column))
    for shape, places in shapes.items():
        _recast(job, shape, places)
    return True


def _layout(job: _Job, group: int, scale: ScaleParameters) -> Layout:
    """Return the blocks and the scale exponents under which magic numbers and limits stay normal float32 numbers."""
    grid, top = job.cast.grid, scale.max_exponent
    lines = job.block[1] * group % 16 == job.x.shape[1] % 16 == 0
    reach = max(top + 1, int(grid.min_biased) - 127) + int(grid.drop)
    return Layout(
        outer=job.block[0],
        inner=job.block[1],
        group=group,
        lowest=np.int32(max(1 - int(grid.min_biased), -126 - top, -126)),
        highest=np.int32(min(127 - reach, 126 - top)),
        preset=np.float32(job.amax).view(np.int32) if job.cast.whole else np.int32(-1),
        streams=lines and past_caches(job.x, job.values),
    )


def _recast(job: _Job, shape: tuple[int, int], places: list[tuple[int, int]]) -> None:
    """Cast groups of one shape that a kernel refused, one below the other, by the torch engine.

    A further group holds the tensor's largest magnitude, from which the scale of the tensor follows.
    """
    cast, block, random = job.cast, job.block, None
    slices = [(slice(row, row + shape[0]), slice(column, column + shape[1])) for row, column in places]
    if cast.stochastic:
        words = integers_of(cast.spec.rounding, job.random, job.shape, cast.spec.dim).view(job.x.shape)
        random = torch.cat([words[at] for at in slices] + [torch.zeros(shape, dtype=torch.int64)])
    end = torch.zeros(shape, dtype=torch.float32)
    end[0, 0] = job.amax or 0.0
    scaling = replace(cast.fmt.scaling, block=(shape[0], min(block[1], shape[1])))
    spec = replace(cast.spec, format=replace(cast.fmt, scaling=scaling), dim=-1)
    parts = torch_engine.encode(torch.cat([*(job.x[at] for at in slices), end]), spec, random)
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
