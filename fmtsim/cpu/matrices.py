"""Casts of block formats on the CPU: the operand matrix, its groups of blocks, and the kernels that run on them."""

from dataclasses import dataclass

import numpy as np
import torch

from fmtsim.cpu import blocks, general, pool
from fmtsim.cpu.element import Element, Tables, element_of, tables_of
from fmtsim.cpu.general import Draw, View
from fmtsim.cpu.grid import Grid, grid_of
from fmtsim.cpu.output import store, wider
from fmtsim.cpu.scales import AMAX, Scaling, scaling_of
from fmtsim.cpu.words import draw_of, flat_words, key_words, plain_key
from fmtsim.formats.block import FP32, BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.spec import IntFormat
from fmtsim.ops import CastSpec, EncodedParts, Random, RandomKey, block_counts
from fmtsim.rounding.modes import Rounding

_GROUP = 2048  # columns that go through the phases of the fast kernel together
_SPAN = 4096  # columns a task when one scale covers the tensor
_WIDE = IntFormat(name="wide", bits=24)  # what elements round to before a zero point is added


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A cast of one matrix: everything that its kernels take but the range of blocks."""

    element: Element
    tables: Tables
    scaling: Scaling
    scale_element: Element
    scale_tables: Tables
    view: View
    draw: Draw
    words: np.ndarray


def quantize_blocks(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    matrix = _matrix(x, spec.dim)
    last = spec.dim == -1 or x.dim() < 2
    direct = last and out.is_contiguous() and out.dtype in (torch.float32, torch.float64)
    target = torch.empty_like(matrix, dtype=wider(out.dtype)) if not direct else out.view(matrix.shape)
    if matrix.numel():
        job, strange = _job(matrix, spec, random, x)
        grids = None if strange or target.dtype != torch.float32 else _fast_grids(spec, random, matrix.dtype, x.dim())
        if grids is None:
            _general(matrix, target, job)
        else:
            _fast(matrix, target, job, random, *grids)
    if not direct:
        store(_unfold(target, x.shape, spec.dim), out)


def encode_blocks(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x with their scales."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    matrix = _matrix(x, spec.dim)
    shape = block_counts(fmt, x.shape, spec.dim)
    codes = torch.empty(matrix.shape, dtype=code_dtype(fmt.bits))
    scales = torch.empty(shape, dtype=torch.float32)
    offsets = torch.zeros(shape, dtype=torch.int32)
    decode_scale = torch.ones((), dtype=torch.float32)
    if matrix.numel():
        job, _ = _job(matrix, spec, random, x, spans=False)
        decode_scale.fill_(float(job.scaling.decode_scale))
        _general(matrix, matrix[:0], job, codes, scales, offsets)
    return EncodedParts(
        _unfold(codes, x.shape, spec.dim).contiguous(),
        scales,
        decode_scale if fmt.tensor_scale else None,
        offsets if fmt.zero_point else None,
    )


def _matrix(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the operand matrix, inner axis last, contiguous, in float32 or float64."""
    x = x.reshape(1) if x.dim() == 0 else x
    matrix = x.movedim(dim, -1)
    rows = matrix.numel() // matrix.shape[-1] if matrix.shape[-1] else 0
    matrix = matrix.reshape(rows, matrix.shape[-1]).contiguous()
    return matrix if matrix.dtype == torch.float64 else matrix.float()


def _unfold(matrix: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """Return a tensor of that shape from its operand matrix."""
    if len(shape) < 2:
        return matrix.view(shape)
    moved = [size for axis, size in enumerate(shape) if axis != len(shape) + dim] + [shape[dim]]
    return matrix.view(moved).movedim(-1, dim)


def _amax(matrix: torch.Tensor) -> tuple[float, bool, bool]:
    """Return the finite amax of a matrix, and whether it holds NaN, and NaN or Inf."""
    flat = matrix.view(-1)
    kernel = blocks.finite_amax_double if flat.dtype == torch.float64 else blocks.finite_amax
    parts: list[tuple[float, bool, bool]] = []
    pool.run(lambda start, stop: parts.append(kernel(flat[start:stop].numpy())), flat.numel(), align=64)
    return max(p[0] for p in parts), any(p[1] for p in parts), any(p[2] for p in parts)


def _job(
    matrix: torch.Tensor, spec: CastSpec, random: Random, x: torch.Tensor, spans: bool = True
) -> tuple[_Job, bool]:
    """Gather what the kernels take, and say whether a tensor under one scale holds NaN or Inf."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    rows, columns = matrix.shape
    whole = fmt.block == (None, None) and not fmt.zero_point
    amax, has_nan, strange = _amax(matrix) if whole or fmt.tensor_scale else (-1.0, False, False)
    trailing = 1
    for size in x.shape[x.dim() + spec.dim + 1 :] if x.dim() else ():
        trailing *= size
    outer, inner = fmt.block
    view = View(
        outer=1 if whole and spans else outer or rows,
        inner=min(_SPAN, columns) if whole and spans else inner or columns,
        columns=columns,
        trailing=trailing,
        zero_point=fmt.zero_point,
        levels=fmt.element.max_code if isinstance(fmt.element, IntFormat) else 0,
        preset=amax if whole else -1.0,
        preset_nan=has_nan,
    )
    element = element_of(_WIDE if fmt.zero_point else fmt.element, spec.rounding, spec.overflow)
    job = _Job(
        element=element,
        tables=tables_of(fmt.element),
        scaling=scaling_of(fmt, amax if fmt.tensor_scale else None),
        scale_element=element_of(fmt.scale, Rounding(), "saturate"),
        scale_tables=tables_of(fmt.scale),
        view=view,
        draw=draw_of(spec.rounding, random),
        words=flat_words(random),
    )
    return job, strange and whole


def _fast_grids(spec: CastSpec, random: Random, dtype: torch.dtype, rank: int) -> tuple[Grid, Grid] | None:
    """Return the grids of element and scale for the fast kernel, None where it does not serve."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    drawn = plain_key(spec.rounding, random) and (spec.dim == -1 or rank < 2)
    if dtype != torch.float32 or fmt.zero_point or not (drawn or spec.rounding.mode == "nearest_even"):
        return None
    if isinstance(fmt.element, IntFormat) and fmt.element.bits > 20:
        return None
    grid = grid_of(fmt.element, spec.overflow, spec.rounding.mode)
    if grid is None or grid.by_bits or grid.special or fmt.element.max_exponent < 0:
        return None
    if fmt.power_of_two or (fmt.scale == FP32 and fmt.arithmetic != "divide"):
        return grid, grid
    scale_grid = grid_of(fmt.scale, "saturate", "nearest_even")
    if scale_grid is None or scale_grid.by_bits or fmt.arithmetic == "divide":
        return None
    return grid, scale_grid


def _fast(matrix: torch.Tensor, target: torch.Tensor, job: _Job, random: Random, grid: Grid, scale_grid: Grid) -> None:
    view = job.view
    if view.outer == 1 and matrix.shape[1] % view.inner == 0:  # rows of whole blocks are one long row
        matrix, target = matrix.view(1, -1), target.view(1, -1)
        view = view._replace(columns=matrix.shape[1])
    rows, columns = matrix.shape
    group = max(min(_GROUP // view.inner, -(-columns // view.inner)), 1)
    across_blocks = -(-columns // view.inner)
    across = -(-across_blocks // group)
    total = -(-rows // view.outer) * across
    layout = _layout(view, group, grid, job.scaling)
    x, y = matrix.numpy(), target.numpy()
    no_codes, no_scales, no_offsets = (
        np.empty((0, 0), np.uint8),
        np.empty((0, 0), np.float32),
        np.empty((0, 0), np.int32),
    )

    def quantize(start: int, stop: int) -> int:
        if isinstance(random, RandomKey):
            words = key_words(random)
            return blocks.quantize_stochastic(x, y, grid, job.scaling, scale_grid, layout, *words, start, stop)
        if job.scaling.rule == AMAX:
            return blocks.quantize_real(x, y, grid, job.scaling, scale_grid, layout, start, stop)
        return blocks.quantize_binary(x, y, grid, job.scaling, layout, start, stop)

    def part(start: int, stop: int) -> None:
        while (start := quantize(start, stop)) < stop:
            first = (start // across) * across_blocks + (start % across) * group
            last = (start // across) * across_blocks + min((start % across + 1) * group, across_blocks)
            general.cast_blocks(
                x, y, no_codes, no_scales, no_offsets, False, job.element, job.tables, job.scaling, job.scale_element,
                job.scale_tables, view, job.draw, job.words, first, last,
            )  # fmt: skip
            start += 1

    pool.run(part, total, align=1, weight=view.outer * view.inner * group)


def _layout(view: View, group: int, grid: Grid, scaling: Scaling) -> blocks.Layout:
    """Return the blocks and the scale exponents under which magic numbers and limits stay normal float32 numbers."""
    reach = max(scaling.max_exponent + 1, int(grid.min_biased) - 127) + int(grid.drop)
    return blocks.Layout(
        outer=view.outer,
        inner=view.inner,
        group=group,
        lowest=np.int32(max(1 - int(grid.min_biased), -126 - scaling.max_exponent, -126)),
        highest=np.int32(min(127 - reach, 126 - scaling.max_exponent)),
        preset=np.int32(-1 if view.preset < 0 else np.float32(view.preset).view(np.int32)),
    )


def _general(
    matrix: torch.Tensor,
    target: torch.Tensor,
    job: _Job,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> None:
    view = job.view
    encode = codes is not None
    arrays = (
        matrix.numpy(),
        target.numpy(),
        np.empty((0, 0), np.uint8) if codes is None else codes.numpy(),
        np.empty((0, 0), np.float32) if scales is None else scales.numpy(),
        np.empty((0, 0), np.int32) if offsets is None else offsets.numpy(),
    )
    total = -(-matrix.shape[0] // view.outer) * -(-matrix.shape[1] // view.inner)

    def part(start: int, stop: int) -> None:
        general.cast_blocks(
            *arrays, encode, job.element, job.tables, job.scaling, job.scale_element, job.scale_tables, view,
            job.draw, job.words, start, stop,
        )  # fmt: skip

    pool.run(part, total, align=1, weight=view.outer * view.inner)
