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
    if scales is not None:
        plain, seen = (measure(values, q, fmt, dim) for values in (x, x.detach().to(scales.dtype) / scales))
        place = FIGURES.index("saturated")
        plain[place] = seen[place]
        plain[-BINS:] = seen[len(FIGURES) : len(FIGURES) + BINS]
        return plain
    figures = _measure_by_kernel(x.detach(), q.detach(), fmt, dim)
    if figures is not None:
        return figures
    x, q = _plain(x), _plain(q)
    if x.numel() == 0:
        return torch.zeros(len(FIGURES) + 2 * BINS, dtype=torch.float64, device=x.device)
    by_engine = x.is_cpu and x.dtype == torch.float32 and is_plain(x) and is_plain(q) and _is_direct(fmt)
    return (_measure_by_engine if by_engine else measure_by_torch)(x, q.to(x.dtype), fmt, dim)


def _is_direct(fmt: Format | None) -> bool:
    """Return True if scales, if any, follow from the largest magnitudes of blocks."""
    return not isinstance(fmt, BlockFormat) or fmt.is_direct


def _measure_by_kernel(x: Tensor, q: Tensor, fmt: Format | None, dim: int) -> Tensor | None:
    """Do what ``measure`` does by one kernel of a GPU, None where none does it."""
    engine = fused_engine(x)
    if engine is None or not x.numel() or x.shape != q.shape or not (is_plain(x) and is_plain(q) and _is_direct(fmt)):
        return None
    x, q, block = _matrices(x, q, fmt, dim)
    scaled = fmt if isinstance(fmt, BlockFormat) and not fmt.zero_point else None
    return engine.count_cast(x, q, scaled, block, _limits_of(fmt))


def measure_by_torch(x: Tensor, q: Tensor, fmt: Format | None, dim: int) -> Tensor:
    """Do what ``measure`` does for float32 or float64 tensors that are not empty, on any device."""
    finite, zero = x.isfinite(), x.new_zeros(())
    x, q = torch.where(finite, x, zero), torch.where(finite, q, zero)
    counts = seen = _exponents(x)
    saturated = torch.zeros((), device=x.device)
    if window_of(fmt) is not None:
        scaled = x
        if isinstance(fmt, BlockFormat):
            scaled = _blocks(x, fmt, dim) / block_scales(x, fmt, dim).to(x.dtype)[:, None, :, None]
            seen = _exponents(scaled)
        low, high = _limits(_element(fmt))  # type: ignore[arg-type]  # None has no window
        saturated = torch.count_nonzero(scaled > high) + torch.count_nonzero(scaled < low)
    figures = (
        _underflowed(counts.sum(), torch.count_nonzero(q)), saturated, x.numel() - torch.count_nonzero(finite),
        x.abs().amax(), _squares(x), _squares(x - q).nan_to_num(math.inf, math.inf),
    )  # fmt: skip
    elements = torch.full((), x.numel(), dtype=torch.float64, device=x.device)
    numbers = torch.stack([figure.double() for figure in (elements, counts.sum(), *figures)])
    return torch.cat([numbers, counts.double(), seen.double()])


def _measure_by_engine(x: Tensor, q: Tensor, fmt: Format | None, dim: int) -> Tensor:
    """Do what ``measure_by_torch`` does for float32 tensors on the CPU."""
    engine = load_engine("cpu")
    x, q, block = _matrices(x, q, fmt, dim)
    scaled = isinstance(fmt, BlockFormat) and not fmt.zero_point
    scales = _scales_of(engine.block_amax(x, block), fmt).float() if scaled else torch.ones(1, 1)  # type: ignore[arg-type]
    limits = _limits_of(fmt)
    counts, exponents = engine.count_cast(x, q, scales, block, limits)
    nonzero = exponents[0].sum()
    leading = torch.tensor([x.numel(), nonzero, _underflowed(nonzero, counts[0])], dtype=torch.float64)
    first = FLOAT32_LOWEST - LOWEST_EXPONENT
    bins = F.pad(exponents, (first, BINS - first - exponents.shape[1])).flatten().double()
    return torch.cat([leading, counts[1:].nan_to_num(math.inf, math.inf), bins])


def _matrices(x: Tensor, q: Tensor, fmt: Format | None, dim: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return both tensors as contiguous operand matrices, or transposed as x lies, and the rows and columns of a block.

    Where blocks have no scales of their own, all is one row in x's order in memory. What lies in no order of the two is
    copied.
    """
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


def _underflowed(nonzero: Tensor, kept: Tensor) -> Tensor:
    # Zero stays zero wherever a format has one, and where it has none no result is zero.
    return (nonzero - kept).clamp_min(0)


@lru_cache(maxsize=256)
def window_of(fmt: Format | None) -> tuple[float, float] | None:
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
    """Return the scale of each block of x, float64 ``[outer_blocks, inner_blocks]``, zero points left aside.

    Scales follow from the largest magnitudes alone, so those are encoded in the place of whole blocks, unless the rule
    compares candidates or has a second level of rows or windows.
    """
    if not fmt.is_direct:
        parts = encode(x, CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow, dim=dim))
        assert parts.scales is not None and parts.tensor_scale is not None
        return parts.scales.double() * block_level(parts.tensor_scale, fmt.scaling, parts.scales.shape).double()
    blocks = _blocks(x.abs(), fmt, dim)
    order = sorted(range(4), key=blocks.stride, reverse=True)  # as memory lies, which is many times faster
    amax = blocks.permute(order).amax((order.index(1), order.index(3)))
    return _scales_of(amax if order.index(0) < order.index(2) else amax.mT, fmt)


@lru_cache(maxsize=256)
def _scale_cast(fmt: BlockFormat) -> CastSpec:
    """Return the cast to a format with a scale for each element."""
    return CastSpec(format=with_block(fmt, (1, 1)), rounding=Rounding(), overflow=fmt.default_overflow)


def _scales_of(largest: Tensor, fmt: BlockFormat) -> Tensor:
    parts = encode(largest, _scale_cast(fmt))
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


def _plain(x: Tensor) -> Tensor:
    return x.detach() if x.dtype == torch.float64 else capable(x.detach().float())


def _squares(x: Tensor) -> Tensor:
    return torch.square(torch.linalg.vector_norm(_in_memory_order(x), dtype=torch.float64))


def _in_memory_order(x: Tensor) -> Tensor:
    """Return the elements of a tensor that an operation has just made, which is dense whatever its strides are."""
    return x.as_strided((x.numel(),), (1,))


@lru_cache(maxsize=256)
def _limits_of(fmt: Format | None) -> tuple[float, float]:
    return (-math.inf, math.inf) if window_of(fmt) is None else _limits(_element(fmt))  # type: ignore[arg-type]


def _limits(element: ElementFormat) -> tuple[float, float]:
    """Return the magnitudes beyond which rounding to nearest leaves the format's range."""
    if isinstance(element, FloatFormat):
        margin = math.ldexp(0.5, element.max_exponent - element.mantissa_bits)
        return (-element.max - margin if element.signed else element.min - _smallest(element) / 2, element.max + margin)
    if isinstance(element, IntFormat):
        return element.min - element.eps / 2, element.max + element.eps / 2
    margin = (
        element.max * 2.0**-20
    )  # of a table nothing lies halfway to the next value; leave room for the scale's rounding
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
