# SPDX-License-Identifier: Apache-2.0
"""Casts to formats whose elements share a scale (docs/semantics.md, sections 4 to 7)."""

from functools import partial

import torch

from fmtsim.engines.torch_engine import elements, floats, integers
from fmtsim.engines.torch_engine.floats import NEAREST
from fmtsim.engines.torch_engine.reals import narrow, product, widen
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.scaling.blocks import Blocks, blocks_of, largest, windows
from fmtsim.scaling.scales import FLT_MAX, Scales, exponent_scales, one_level, range_scales, two_levels
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.float64 import float64


def encode(x: torch.Tensor, spec: CastSpec, words: torch.Tensor | None) -> EncodedParts:
    """Return codes, scales, tensor scale and zero points of a block format.

    Args:
        x: Any shape; dim ``spec.dim`` is the inner axis.
        spec: The cast, to a BlockFormat.
        words: Random integers of x's shape, int64, for stochastic rounding.
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    blocks = blocks_of(tuple(x.shape), spec.dim, fmt.block)
    folded = blocks.fold(x)
    folded_words = None if words is None else blocks.fold(words)
    found = _scales(blocks, folded, fmt)
    factor, exponent, offsets = (
        None if part is None else part.reshape(-1, 1) for part in (found.factor, found.exponent, found.offsets)
    )
    codes = torch.empty(folded.shape, dtype=code_dtype(fmt.bits), device=x.device)
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    for rows, columns in windows(folded):
        y, shift = folded[rows, columns], None if exponent is None else exponent[rows]
        if shift is None:
            assert factor is not None
            met = factor[rows].to(working)
            y = torch.div(y.to(working), met) if found.divides else y.to(working) * met
        drawn = None if folded_words is None else folded_words[rows, columns]
        if offsets is not None:
            piece = _shifted(y, fmt, spec, drawn, offsets[rows])
        else:
            piece = elements.encode(y, fmt.element, spec.rounding, spec.overflow, drawn, shift)
        codes[rows, columns] = piece.to(codes.dtype)
    scales = found.scale
    if not fmt.element.has_nan:  # a NaN that elements cannot express makes its block NaN
        scales = torch.where(blocks.per_block(largest(folded, torch.isnan)), float("nan"), scales)
    return EncodedParts(blocks.unfold(codes), scales, found.tensor, found.offsets)


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of a block format's codes into ``out``, each rounded once to its dtype."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    blocks = blocks_of(tuple(out.shape), spec.dim, fmt.block)
    codes = blocks.fold(parts.codes)
    scales = widen(parts.scales).reshape(-1, 1)
    offsets = None if parts.offsets is None else parts.offsets.reshape(-1, 1)
    result = torch.empty(codes.shape, dtype=out.dtype, device=out.device)
    bits = elements.significant_bits(fmt.element)
    for rows, columns in windows(codes):
        if offsets is None:
            value = elements.decode(codes[rows, columns], fmt.element, torch.float64)
        else:
            value = float64(codes[rows, columns].to(torch.int64) - offsets[rows])
        if parts.tensor_scale is None:
            result[rows, columns] = product(value, scales[rows], bits, out.dtype)
        else:
            result[rows, columns] = narrow(value * scales[rows] * widen(parts.tensor_scale), out.dtype)
    out.copy_(blocks.unfold(result))


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return the finite magnitudes, 0 for Inf and NaN."""
    return torch.where(x.isfinite(), x.abs(), 0)


def _scales(blocks: Blocks, folded: torch.Tensor, fmt: BlockFormat) -> Scales:
    """Measure the blocks and make their scales."""
    if fmt.zero_point:
        assert isinstance(fmt.element, IntFormat)
        low = largest(folded, lambda x: magnitudes((-x).clamp(min=0)))
        high = largest(folded, lambda x: magnitudes(x.clamp(min=0)))
        return range_scales(blocks.per_block(low), blocks.per_block(high), fmt.element.max_code)
    amax = blocks.per_block(largest(folded, magnitudes))
    if fmt.scaling.exponent_rule is not None:
        return exponent_scales(amax, fmt.scaling.exponent_rule, fmt.element)
    make = one_level if fmt.scaling.tensor is None else two_levels
    store = partial(_stored, fmt=fmt.scale)
    return make(amax.float().clamp(max=FLT_MAX), fmt.scaling, float(fmt.element.max), store)


def _stored(s: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Round scales to a scale format, nearest even and saturating."""
    return elements.decode(floats.encode(s, fmt, NEAREST, "saturate"), fmt, torch.float32)


def _shifted(
    x: torch.Tensor, fmt: BlockFormat, spec: CastSpec, words: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    """Round to integers, add the zero points and clamp."""
    assert isinstance(fmt.element, IntFormat)
    numbers = integers.to_integers(x, fmt.element, spec.rounding, words) + offsets
    return numbers.clamp(0, fmt.element.max_code)
