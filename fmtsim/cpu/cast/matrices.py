"""Casts of block formats on the CPU: the operand matrix, its groups of blocks, and the kernels that run on them."""

from dataclasses import dataclass

import numpy as np
import torch

from fmtsim.cpu.cast import blocks, general
from fmtsim.cpu.cast.element import Element, Tables, element_of, tables_of
from fmtsim.cpu.cast.general import Draw, View
from fmtsim.cpu.cast.grid import Grid
from fmtsim.cpu.cast.output import store, wider
from fmtsim.cpu.cast.phases import Layout
from fmtsim.cpu.cast.scales import Scaling, scaling_of
from fmtsim.cpu.cast.selection import Fast, encoder, quantizer
from fmtsim.cpu.cast.words import draw_of, flat_words
from fmtsim.cpu.runtime import pool
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.spec import IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, block_counts

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What a cast of a matrix fills: its values, or its codes with the scales and zero points of the blocks."""

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    encode: bool

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool]:
        """Return what the general kernel takes behind its input."""
        return self.values.numpy(), self.codes.numpy(), self.scales.numpy(), self.offsets.numpy(), self.encode

    def as_row(self) -> "_Result":
        """Return the same as one long row."""
        rows = (tensor.view(1, -1) for tensor in (self.values, self.codes, self.scales, self.offsets))
        return _Result(**dict(zip(("values", "codes", "scales", "offsets"), rows, strict=True)), encode=self.encode)


def quantize_blocks(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out (dtypes of the four, any strides, out may be x)."""
    matrix = _matrix(x, spec.dim)
    last = spec.dim == -1 or x.dim() < 2
    direct = last and out.is_contiguous() and out.dtype in (torch.float32, torch.float64)
    target = torch.empty_like(matrix, dtype=wider(out.dtype)) if not direct else out.view(matrix.shape)
    if matrix.numel():
        job, strange = _job(matrix, spec, random, x)
        none = torch.empty((0, 0), dtype=torch.int32)
        codes, scales = none.to(torch.uint8), none.float()
        result = _Result(values=target, codes=codes, scales=scales, offsets=none, encode=False)
        double = torch.float64 in (matrix.dtype, target.dtype)
        _cast(matrix, result, job, None if strange or double else quantizer(spec, random, x.dim()))
    if not direct:
        store(_unfold(target, x.shape, spec.dim), out)


def encode_blocks(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x with their scales."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    matrix = _matrix(x, spec.dim)
    shape = block_counts(fmt, x.shape, spec.dim)
    codes = torch.empty(matrix.shape, dtype=code_dtype(fmt.bits))
    scales, offsets = torch.empty(shape, dtype=torch.float32), torch.zeros(shape, dtype=torch.int32)
    decode_scale = torch.ones((), dtype=torch.float32)
    if matrix.numel():
        job, strange = _job(matrix, spec, random, x)
        decode_scale.fill_(float(job.scaling.decode_scale))
        blocks_of = -(-matrix.shape[0] // job.view.outer), -(-matrix.shape[1] // job.view.inner)
        scales, offsets = torch.empty(blocks_of, dtype=torch.float32), torch.zeros(blocks_of, dtype=torch.int32)
        result = _Result(values=matrix[:0], codes=codes, scales=scales, offsets=offsets, encode=True)
        double = matrix.dtype == torch.float64
        _cast(matrix, result, job, None if strange or double else encoder(spec, random, x.dim()))
        # Where one scale covers the tensor, it is cut into spans that all found the same one.
        scales, offsets = (part[: shape[0], : shape[1]].clone() for part in (scales, offsets))
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


def _job(matrix: torch.Tensor, spec: CastSpec, random: Random, x: torch.Tensor) -> tuple[_Job, bool]:
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
        outer=1 if whole else outer or rows,
        inner=min(_SPAN, columns) if whole else inner or columns,
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


def _cast(matrix: torch.Tensor, result: _Result, job: _Job, fast: Fast | None) -> None:
    """Cast a matrix by a fast kernel, and by the general one what that leaves or where there is none."""
    view = job.view
    if fast is not None and view.outer == 1 and matrix.shape[1] % view.inner == 0:
        matrix, result = matrix.view(1, -1), result.as_row()  # rows of whole blocks are one long row
        view = view._replace(columns=matrix.shape[1])
    rows, columns = matrix.shape
    across_blocks = -(-columns // view.inner)
    group = 1 if fast is None else max(min(_GROUP // view.inner, across_blocks), 1)
    across = -(-across_blocks // group)
    total = -(-rows // view.outer) * across
    x, arrays = matrix.numpy(), result.arrays()
    layout = None if fast is None else _layout(view, group, fast.grid, job.scaling)

    def general_part(first: int, last: int) -> None:
        general.cast_blocks(
            x, *arrays, job.element, job.tables, job.scaling, job.scale_element, job.scale_tables, view, job.draw,
            job.words, first, last,
        )  # fmt: skip

    def part(start: int, stop: int) -> None:
        assert fast is not None
        while (start := fast.run(x, *arrays[:3], job.scaling, layout, start, stop)) < stop:
            first = (start // across) * across_blocks + (start % across) * group
            general_part(first, (start // across) * across_blocks + min((start % across + 1) * group, across_blocks))
            start += 1

    pool.run(general_part if fast is None else part, total, align=1, weight=view.outer * view.inner * group)


def _layout(view: View, group: int, grid: Grid, scaling: Scaling) -> Layout:
    """Return the blocks and the scale exponents under which magic numbers and limits stay normal float32 numbers."""
    reach = max(scaling.max_exponent + 1, int(grid.min_biased) - 127) + int(grid.drop)
    return Layout(
        outer=view.outer,
        inner=view.inner,
        group=group,
        lowest=np.int32(max(1 - int(grid.min_biased), -126 - scaling.max_exponent, -126)),
        highest=np.int32(min(127 - reach, 126 - scaling.max_exponent)),
        preset=np.int32(-1 if view.preset < 0 else np.float32(view.preset).view(np.int32)),
    )
