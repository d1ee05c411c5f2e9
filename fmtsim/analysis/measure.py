"""Count what a format did to one tensor, on the tensor's device; on a GPU the host waits for histograms alone."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.float64 import capable
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, with_block
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat
from fmtsim.quantize import encode

LOWEST_EXPONENT, HIGHEST_EXPONENT = -160, 160  # of the histograms; what lies beyond is counted at their ends
BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
FIGURES = ("elements", "nonzero", "underflowed", "saturated", "nonfinite", "amax", "signal", "noise")


def measure(x: Tensor, q: Tensor, fmt: Format | None, dim: int = -1) -> Tensor:
    """Return the FIGURES of a tensor and its exponents, plain and as its elements' format sees them, as one tensor.

    Args:
        x: A tensor of floats.
        q: Its quantised values.
        fmt: Their format, None for high precision.
        dim: Along which its blocks lie.
    """
    x, q = _plain(x), _plain(q)
    if x.numel() == 0:
        return torch.zeros(len(FIGURES) + 2 * BINS, dtype=torch.float64, device=x.device)
    x, q, amax, strange = _finite(x, q)
    counts = seen = _exponents(x)
    saturated = torch.zeros((), device=x.device)
    # A grid over its block's range has nothing beyond.
    if not (fmt is None or isinstance(fmt, LogTileFormat) or (isinstance(fmt, BlockFormat) and fmt.zero_point)):
        scaled, largest = x, amax
        if isinstance(fmt, BlockFormat):
            magnitudes = _largest(x, fmt, dim)
            scales = _scales_of(magnitudes, fmt).to(x.dtype)
            scaled, largest = _blocks(x, fmt, dim) / scales[:, None, :, None], (magnitudes / scales).amax()
            seen = _exponents(scaled)
        saturated = _beyond(scaled, largest, *_limits(_element(fmt)))
    nonzero = counts.sum()
    # Zero stays zero wherever a format has one, and where it has none no result is zero.
    underflowed = (nonzero - torch.count_nonzero(q)).clamp_min(0)
    elements = torch.full((), x.numel(), dtype=torch.float64, device=x.device)
    figures = (
        elements,
        nonzero,
        underflowed,
        saturated,
        strange,
        amax,
        _squares(x.abs()),
        _squares(x - q).nan_to_num(math.inf, math.inf),
    )
    return torch.cat([torch.stack([figure.double() for figure in figures]), counts.double(), seen.double()])


def window_of(fmt: Format | None) -> tuple[float, float] | None:
    """Return the smallest and largest magnitude of a format's elements, None where they are laid over a range."""
    if fmt is None or isinstance(fmt, LogTileFormat) or (isinstance(fmt, BlockFormat) and fmt.zero_point):
        return None
    element = _element(fmt)
    return _smallest(element), element.max


def _element(fmt: Format) -> ElementFormat:
    return fmt.element if isinstance(fmt, BlockFormat) else fmt  # type: ignore[return-value]


def _beyond(x: Tensor, largest: Tensor, low: float, high: float) -> Tensor:
    """Count elements beyond limits; ``largest`` is the largest magnitude."""
    if x.device.type == "cpu" and float(largest) <= min(-low, high):
        return torch.zeros(())
    return torch.count_nonzero(x > high) + torch.count_nonzero(x < low)


def block_scales(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the scale of each block of x, float64 ``[outer_blocks, inner_blocks]``, zero points left aside.

    Scales follow from the largest magnitudes alone, so those are encoded in the place of whole blocks.
    """
    return _scales_of(_largest(x, fmt, dim), fmt)


def _largest(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the largest magnitude of each block."""
    blocks = _blocks(x.abs(), fmt, dim)
    order = sorted(range(4), key=blocks.stride, reverse=True)  # as memory lies, which is many times faster
    found = blocks.permute(order).amax((order.index(1), order.index(3)))
    return found if order.index(0) < order.index(2) else found.mT


@lru_cache(maxsize=256)
def _single(fmt: BlockFormat) -> BlockFormat:
    """Return a format with a scale for each element."""
    return with_block(fmt, (1, 1))  # type: ignore[return-value]  # of a block format it is one


def _scales_of(largest: Tensor, fmt: BlockFormat) -> Tensor:
    parts = encode(largest, _single(fmt), dim=-1).parts()
    scales = torch.ones_like(largest) if parts.scales is None else parts.scales
    scales = scales.double()
    return scales if parts.tensor_scale is None else scales * parts.tensor_scale.double()


def _blocks(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the operand matrix (docs/semantics.md, section 4), padded with zeros: [blocks, rows, blocks, columns]."""
    moved = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    matrix = moved.reshape(-1, moved.shape[-1])
    rows, columns = (size or extent for size, extent in zip(fmt.block, matrix.shape, strict=True))
    if matrix.shape[0] % rows or matrix.shape[1] % columns:
        matrix = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
    return matrix.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _plain(x: Tensor) -> Tensor:
    return x.detach() if x.dtype == torch.float64 else capable(x.detach().float())


def _finite(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both tensors with zeros where x is not finite, the largest magnitude left, and how many such."""
    if x.device.type == "cpu":
        least, most = torch.aminmax(x)
        amax = torch.maximum(-least, most)
        if math.isfinite(amax):
            return x, q.to(x.dtype), amax, torch.zeros(())
    kept, zero = x.isfinite(), x.new_zeros(())
    x, q = torch.where(kept, x, zero), torch.where(kept, q.to(x.dtype), zero)
    return x, q, x.abs().amax(), x.numel() - torch.count_nonzero(kept)


def _squares(x: Tensor) -> Tensor:
    return torch.square(torch.linalg.vector_norm(_in_memory_order(x), dtype=torch.float64))


def _in_memory_order(x: Tensor) -> Tensor:
    """Return the elements of a tensor that an operation has just made, which is dense whatever its strides are."""
    return x.as_strided((x.numel(),), (1,))


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
    if x.device.type == "cpu" and (not fields[0] or int(fields[0]) == x.numel() - int(torch.count_nonzero(x))):
        return counts  # no subnormal
    small = torch.where(x.abs() < torch.finfo(torch.float32).smallest_normal, x, x.new_zeros(()))
    counts[first - 23 : first] += _fields(small * 2.0**64)[42:65]  # 2**-149 to 2**-127 became 2**-85 to 2**-63
    return counts


def _fields(x: Tensor) -> Tensor:
    """Count the exponent fields of a float32 tensor; field e stands for exponent e - 127, 0 for zero and subnormals."""
    # bits: s eeeeeeee mmm...
    return torch.bincount(_in_memory_order((x.view(torch.int32) >> 23).bitwise_and_(0xFF)), minlength=256)
