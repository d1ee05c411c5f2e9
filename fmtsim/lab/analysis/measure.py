# SPDX-License-Identifier: Apache-2.0
"""Count what a format did to one tensor, on the tensor's device; on a GPU the host waits for histograms alone."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.casts.ops import encode, fused_engine, load_engine
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat, with_block
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.levels import block_level
from fmtsim.spec.cast import CastSpec
from fmtsim.support.dispatch import is_plain
from fmtsim.support.float64 import capable

LOWEST_EXPONENT, HIGHEST_EXPONENT = -160, 160  # of the histograms; what lies beyond is counted at their ends
FLOAT32_LOWEST = -149
BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
FIGURES = ("elements", "nonzero", "underflowed", "saturated", "nonfinite", "amax", "signal", "noise")


def measure(x: Tensor, q: Tensor, fmt: Format | None, dim: int = -1, scales: Tensor | None = None) -> Tensor:
    """Return the FIGURES of a tensor and its exponents, plain and as its elements' format sees them, as one tensor.

    Kernels count on the CPU and on GPUs. ``signal`` and ``noise`` are sums in float64, whose last bits depend on the
    order of elements in memory and on what counts; no number of threads changes them.

    Args:
        x: A tensor of floats.
        q: Its quantised values.
        fmt: Their format, None for high precision.
        dim: Along which its blocks lie.
        scales: What elements are divided by before they are cast, where the format itself has no such.
    """
    # 1. Under outer scales the element format sees x / scales: its saturated elements and exponents are those.
    if scales is not None:
        plain, seen = (measure(values, q, fmt, dim) for values in (x, x.detach().to(scales.dtype) / scales))
        place = FIGURES.index("saturated")
        plain[place] = seen[place]
        plain[-BINS:] = seen[len(FIGURES) : len(FIGURES) + BINS]
        return plain
    # 2. Kernels find scales, if any, from the largest magnitudes of blocks. A GPU's does all of it.
    direct = not isinstance(fmt, BlockFormat) or fmt.is_direct
    scaled = fmt if isinstance(fmt, BlockFormat) and not fmt.zero_point else None
    x, q = x.detach(), q.detach()
    gpu = fused_engine(x)
    if gpu is not None and x.numel() and x.shape == q.shape and is_plain(x) and is_plain(q) and direct:
        a, b, block = _matrices(x, q, fmt, dim)
        figures = gpu.count_cast(a, b, scaled, block, _format_limits(fmt))
        if figures is not None:
            return figures
    # 3. The CPU's counts float32 elements under scales that are given.
    x, q = (t if t.dtype == torch.float64 else capable(t.float()) for t in (x, q))
    if x.numel() == 0:
        return torch.zeros(len(FIGURES) + 2 * BINS, dtype=torch.float64, device=x.device)
    q = q.to(x.dtype)
    if not (x.is_cpu and x.dtype == torch.float32 and is_plain(x) and is_plain(q) and direct):
        return measure_by_torch(x, q, fmt, dim)
    cpu = load_engine("cpu")
    x, q, block = _matrices(x, q, fmt, dim)
    block_scale = torch.ones(1, 1) if scaled is None else _amax_scales(cpu.block_amax(x, block), scaled).float()
    counts, exponents = cpu.count_cast(x, q, block_scale, block, _format_limits(fmt))
    nonzero = exponents[0].sum()
    leading = torch.tensor([x.numel(), nonzero, _count_underflow(nonzero, counts[0])], dtype=torch.float64)
    first = FLOAT32_LOWEST - LOWEST_EXPONENT  # its bins begin there
    bins = F.pad(exponents, (first, BINS - first - exponents.shape[1])).flatten().double()
    return torch.cat([leading, counts[1:].nan_to_num(math.inf, math.inf), bins])


def measure_by_torch(x: Tensor, q: Tensor, fmt: Format | None, dim: int) -> Tensor:
    """Do what ``measure`` does for float32 or float64 tensors that are not empty, on any device."""
    # NaN and infinities count apart, and are zeros in all other figures.
    finite, zero = x.isfinite(), x.new_zeros(())
    x, q = torch.where(finite, x, zero), torch.where(finite, q, zero)
    counts = seen = _exponents(x)
    saturated = torch.zeros((), device=x.device)
    if magnitude_range(fmt) is not None:
        scaled = x
        if isinstance(fmt, BlockFormat):
            scaled = _blocks(x, fmt, dim) / block_scales(x, fmt, dim).to(x.dtype)[:, None, :, None]
            seen = _exponents(scaled)
        low, high = _limits(_element(fmt))  # type: ignore[arg-type]  # None has no window
        saturated = torch.count_nonzero(scaled > high) + torch.count_nonzero(scaled < low)
    figures = (
        _count_underflow(counts.sum(), torch.count_nonzero(q)), saturated, x.numel() - torch.count_nonzero(finite),
        x.abs().amax(), _squares(x), _squares(x - q).nan_to_num(math.inf, math.inf),
    )  # fmt: skip
    elements = torch.full((), x.numel(), dtype=torch.float64, device=x.device)
    numbers = torch.stack([figure.double() for figure in (elements, counts.sum(), *figures)])
    return torch.cat([numbers, counts.double(), seen.double()])


def _matrices(x: Tensor, q: Tensor, fmt: Format | None, dim: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return both tensors as contiguous matrices of operands, or their transposes, and rows and columns of a block."""
    # Where blocks have no scales of their own, all is one row in x's order in memory.
    if not isinstance(fmt, BlockFormat) or fmt.zero_point:
        if not (x.is_contiguous() and q.is_contiguous()):
            order = sorted(range(x.dim()), key=x.stride, reverse=True)
            x, q = (t.permute(order).contiguous() for t in (x, q))
        return x.view(1, -1), q.view(1, -1), (1, x.numel())
    x, q = _matrix(x, dim), _matrix(q, dim)
    rows, columns = (min(size or extent, extent) for size, extent in zip(fmt.block, x.shape, strict=True))
    if x.stride(0) < x.stride(1):
        x, q, rows, columns = x.mT, q.mT, columns, rows
    return x.contiguous(), q.contiguous(), (rows, columns)


def _count_underflow(nonzero: Tensor, kept: Tensor) -> Tensor:
    # Zero stays zero wherever a format has one, and where it has none no result is zero.
    return (nonzero - kept).clamp_min(0)


@lru_cache(maxsize=256)
def magnitude_range(fmt: Format | None) -> tuple[float, float] | None:
    """Return the smallest and largest magnitude of a format's elements, None where they are laid over a range."""
    if (
        fmt is None
        or isinstance(fmt, LogTileFormat | PackedFormat)
        or (isinstance(fmt, BlockFormat) and fmt.zero_point)
    ):
        return None
    element = _element(fmt)
    return _smallest(element), element.max


def _element(fmt: Format) -> ElementFormat:
    return fmt.element if isinstance(fmt, BlockFormat) else fmt  # type: ignore[return-value]


def block_scales(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the scale of each block of x, float64 ``[outer_blocks, inner_blocks]``, zero points left aside."""
    # Scales follow from the largest magnitudes alone, so those are encoded in the place of whole blocks, unless the
    # rule compares candidates or has a second level of rows or windows.
    if not fmt.is_direct:
        parts = encode(x, CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow, dim=dim))
        assert parts.scales is not None
        level = parts.tensor_scale
        of_blocks = 1.0 if level is None else block_level(level, fmt.scaling, parts.scales.shape).double()
        return parts.scales.double() * of_blocks
    blocks = _blocks(x.abs(), fmt, dim)
    order = sorted(range(4), key=blocks.stride, reverse=True)  # as memory lies, which is many times faster
    amax = blocks.permute(order).amax((order.index(1), order.index(3)))
    return _amax_scales(amax if order.index(0) < order.index(2) else amax.mT, fmt)


@lru_cache(maxsize=256)
def _scale_cast(fmt: BlockFormat) -> CastSpec:
    """Return the cast to a format with a scale for each element."""
    return CastSpec(format=with_block(fmt, (1, 1)), rounding=Rounding(), overflow=fmt.default_overflow)


def _amax_scales(amax: Tensor, fmt: BlockFormat) -> Tensor:
    parts = encode(amax, _scale_cast(fmt))
    assert parts.scales is not None  # of block formats
    scales = parts.scales.double()
    return scales if parts.tensor_scale is None else scales * parts.tensor_scale.double()


def _blocks(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the operand matrix, padded with zeros: [blocks, rows, blocks, columns]."""
    matrix = _matrix(x, dim)
    rows, columns = (size or extent for size, extent in zip(fmt.block, matrix.shape, strict=True))
    if matrix.shape[0] % rows or matrix.shape[1] % columns:
        matrix = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
    return matrix.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _matrix(x: Tensor, dim: int) -> Tensor:
    """Return the operand matrix (docs/semantics.md, section 4)."""
    moved = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    return moved.reshape(-1, moved.shape[-1])


def _squares(x: Tensor) -> Tensor:
    return torch.square(torch.linalg.vector_norm(_in_memory_order(x), dtype=torch.float64))


def _in_memory_order(x: Tensor) -> Tensor:
    """Return the elements of a tensor that an operation has just made, which is dense whatever its strides are."""
    return x.as_strided((x.numel(),), (1,))


@lru_cache(maxsize=256)
def _format_limits(fmt: Format | None) -> tuple[float, float]:
    return (-math.inf, math.inf) if magnitude_range(fmt) is None else _limits(_element(fmt))  # type: ignore[arg-type]


def _limits(element: ElementFormat) -> tuple[float, float]:
    """Return the magnitudes beyond which rounding to nearest leaves the format's range."""
    if isinstance(element, FloatFormat):
        margin = math.ldexp(0.5, element.max_exponent - element.mantissa_bits)
        return (-element.max - margin if element.signed else element.min - _smallest(element) / 2, element.max + margin)
    if isinstance(element, IntFormat):
        return element.min - element.eps / 2, element.max + element.eps / 2
    # Of a table nothing lies halfway to the next value; leave room for the scale's rounding.
    margin = element.max * 2.0**-20
    return element.min - margin, max(getattr(element, "values", (element.max,))) + margin


def _smallest(element: ElementFormat) -> float:
    if isinstance(element, FloatFormat):
        return element.min_subnormal
    if isinstance(element, IntFormat):
        return element.eps / 2 if element.half_offset else element.eps
    values = getattr(element, "values", None) or element.magnitudes  # type: ignore[union-attr]
    return min(abs(v) for v in values if v)


def _exponents(x: Tensor) -> Tensor:
    """Count the exponents of a float32 or float64 tensor without NaN; zeros and infinities have none."""
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    if x.dtype != torch.float32:
        powers = torch.frexp(x[(x != 0) & x.isfinite()]).exponent.long() - 1
        bins = powers.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
        return counts + torch.bincount(bins, minlength=BINS)
    fields = _fields(x)
    first = -126 - LOWEST_EXPONENT
    counts[first : first + 254] += fields[1:255]
    small = torch.where(x.abs() < torch.finfo(torch.float32).smallest_normal, x, x.new_zeros(()))
    counts[first - 23 : first] += _fields(small * 2.0**64)[42:65]  # 2**-149 to 2**-127 became 2**-85 to 2**-63
    return counts


def _fields(x: Tensor) -> Tensor:
    """Count the exponent fields of a float32 tensor; field e stands for exponent e - 127, 0 for zero and subnormals."""
    # bits: s eeeeeeee mmm...
    return torch.bincount(_in_memory_order((x.view(torch.int32) >> 23).bitwise_and_(0xFF)), minlength=256)
