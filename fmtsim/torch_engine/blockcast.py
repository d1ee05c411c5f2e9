"""Casts to formats whose elements share a scale (docs/semantics.md, sections 4 to 7)."""

import torch

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.spec import IntFormat
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.torch_engine import elements, integers
from fmtsim.torch_engine.blocks import Geometry, geometry
from fmtsim.torch_engine.reals import narrow, product, widen
from fmtsim.torch_engine.scales import Scaling, scale_blocks, scale_ranges
from fmtsim.torch_engine.storage import LAYOUTS, bits_of, from_bits, magnitudes


def encode(x: torch.Tensor, spec: CastSpec, words: torch.Tensor | None) -> EncodedParts:
    """Return codes, scales, tensor scale and zero points of a block format.

    Args:
        x: Any shape; dim ``spec.dim`` is the inner axis.
        spec: The cast, to a BlockFormat.
        words: Random integers of x's shape, int64, for stochastic rounding.
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    blocks = geometry(tuple(x.shape), spec.dim, fmt.block)
    folded = blocks.fold(x)
    folded_words = None if words is None else blocks.fold(words)
    scaling = _scaling(blocks, folded, fmt)
    exponent, multiplier, divisor = (
        None if part is None else blocks.spread(part)
        for part in (scaling.exponent, scaling.multiplier, scaling.divisor)
    )
    offsets = None if scaling.offsets is None else blocks.spread(scaling.offsets)
    codes = torch.empty(folded.shape, dtype=code_dtype(fmt.bits), device=x.device)
    for rows, columns in blocks.windows(folded):
        piece = folded[rows, columns]
        piece_words = None if folded_words is None else folded_words[rows, columns]
        if multiplier is not None:
            piece = _rounded(widen(piece) * multiplier[rows], x.dtype)
        elif divisor is not None:
            piece = _rounded(torch.div(widen(piece), divisor[rows]), x.dtype)
        if offsets is not None:
            codes[rows, columns] = _shifted(piece, fmt, spec, piece_words, offsets[rows])
        else:
            shift = None if exponent is None else exponent[rows]
            codes[rows, columns] = elements.encode(
                piece, fmt.element, spec.rounding, spec.overflow, piece_words, shift
            ).to(codes.dtype)
    scales = _with_nan(scaling.scales, blocks, folded, fmt)
    return EncodedParts(blocks.unfold(codes), scales, scaling.tensor_scale, scaling.offsets)


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of a block format's codes into ``out``, each rounded once to its dtype."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    blocks = geometry(tuple(out.shape), spec.dim, fmt.block)
    codes = blocks.fold(parts.codes)
    scales = blocks.spread(widen(parts.scales))
    offsets = None if parts.offsets is None else blocks.spread(parts.offsets)
    tensor_scale = None if parts.tensor_scale is None else widen(parts.tensor_scale)
    result = torch.empty(codes.shape, dtype=out.dtype, device=out.device)
    bits = elements.significant_bits(fmt.element)
    for rows, columns in blocks.windows(codes):
        if offsets is None:
            value = elements.decode(codes[rows, columns], fmt.element, torch.float64)
        else:
            value = (codes[rows, columns].to(torch.int64) - offsets[rows]).to(torch.float64)
        if tensor_scale is None:
            result[rows, columns] = product(value, scales[rows], bits, out.dtype)
        else:
            result[rows, columns] = narrow(value * scales[rows] * tensor_scale, out.dtype)
    out.copy_(blocks.unfold(result))


def finite_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of the magnitudes, 0 for Inf and NaN; they order as the magnitudes do."""
    layout = LAYOUTS[x.dtype]
    magnitude = magnitudes(bits_of(x), layout)
    return torch.where(magnitude > layout.max_code, 0, magnitude)


def is_nan(x: torch.Tensor) -> torch.Tensor:
    """Return 1 for NaN, else 0, as uint8."""
    layout = LAYOUTS[x.dtype]
    return (magnitudes(bits_of(x), layout) > layout.max_code + 1).to(torch.uint8)


def _scaling(blocks: Geometry, folded: torch.Tensor, fmt: BlockFormat) -> Scaling:
    """Measure the blocks and make their scales."""
    if fmt.zero_point:
        assert isinstance(fmt.element, IntFormat)
        low = blocks.largest(folded, lambda x: torch.where(bits_of(x) < 0, finite_magnitudes(x), 0))
        high = blocks.largest(folded, lambda x: torch.where(bits_of(x) < 0, 0, finite_magnitudes(x)))
        return scale_ranges(from_bits(low, folded.dtype), from_bits(high, folded.dtype), fmt.element)
    amax = blocks.largest(folded, finite_magnitudes)
    return scale_blocks(from_bits(amax, folded.dtype), fmt)


def _with_nan(scales: torch.Tensor, blocks: Geometry, folded: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Return the scales, NaN where a block holds a NaN that its elements cannot express."""
    if fmt.element.has_nan:
        return scales
    return torch.where(blocks.largest(folded, is_nan) > 0, float("nan"), scales)


def _rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round products as the operand's arithmetic does: to float32, or not at all for float64 operands."""
    return y if dtype == torch.float64 else narrow(y, torch.float32)


def _shifted(
    x: torch.Tensor, fmt: BlockFormat, spec: CastSpec, words: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    """Round to integers, add the zero points and clamp."""
    assert isinstance(fmt.element, IntFormat)
    numbers = integers.to_integers(x, fmt.element, spec.rounding, words) + offsets
    return numbers.clamp(0, fmt.element.max_code).to(code_dtype(fmt.bits))
