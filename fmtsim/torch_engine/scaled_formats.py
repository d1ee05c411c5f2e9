# SPDX-License-Identifier: Apache-2.0
"""Casts to formats whose elements share a scale (docs/semantics.md, sections 4 to 8): statistic, scale, element.

Scales are those of fmtsim/scaling/scales.py; a LogFMT tile has a range of logarithms in the place of a scale.
"""

from functools import partial

import torch

from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import Blocks, blocks_of, chunk_size, largest, windows
from fmtsim.scaling.levels import block_level, errors, packed_level, two_levels
from fmtsim.scaling.scales import FLT_MAX, Scales, exponent_scales, float32, one_level, range_scales
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.float64 import float64
from fmtsim.torch_engine import element_codes, floats
from fmtsim.torch_engine.floats import NEAREST, bits_of
from fmtsim.torch_engine.reals import divide, exp, ln, narrow, product, round32, widen


def encode(x: torch.Tensor, spec: CastSpec, words: torch.Tensor | None) -> EncodedParts:
    """Return codes, scales, tensor scale and zero points of a block format.

    Args:
        x: Any shape; dim ``spec.dim`` is the inner axis.
        spec: The cast, to a BlockFormat.
        words: Random integers of x's shape, int64, for stochastic rounding.
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    # 1. the tensor as a row a block
    blocks = blocks_of(tuple(x.shape), spec.dim, fmt.block)
    folded = blocks.fold(x)
    folded_words = None if words is None else blocks.fold(words)
    # 2. scale and elements, for each candidate; the one of least error counts, block by block
    first, *others = [(times, fmt.element) for times in fmt.scaling.candidates]
    others += [] if fmt.alternative is None else [(1.0, fmt.alternative)]
    block_scales = _scales(blocks, folded, fmt, first[0])
    codes = _element_codes(folded, block_scales, spec, folded_words, fmt.element)
    least = _errors(blocks, folded, codes, block_scales, fmt, fmt.element) if others else folded.new_empty(0)
    for times, element in others:
        tried = _scales(blocks, folded, fmt, times)
        tried_codes = _element_codes(folded, tried, spec, folded_words, element)
        error = _errors(blocks, folded, tried_codes, tried, fmt, element)
        takes = error < least
        scale = -tried.scale if element is fmt.alternative else tried.scale
        block_scales = tried._replace(scale=torch.where(takes, scale, block_scales.scale))
        codes, least = torch.where(takes.reshape(-1, 1), tried_codes, codes), torch.where(takes, error, least)
    scales = block_scales.scale
    if not fmt.element.has_nan and fmt.scale.has_nan:  # a NaN that elements cannot express makes its block NaN
        scales = torch.where(blocks.per_block(largest(folded, torch.isnan)), float("nan"), scales)
    tensor = None if block_scales.tensor is None else packed_level(block_scales.tensor, fmt.scaling)
    return EncodedParts(blocks.unfold(codes), scales, tensor, block_scales.offsets)


def _element_codes(
    folded: torch.Tensor, made: Scales, spec: CastSpec, words: torch.Tensor | None, element: ElementFormat
) -> torch.Tensor:
    """Return codes of elements: of the exact x / 2**exponent, or of x * factor or x / factor, rounded once before."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    factor, exponent, offsets = (
        None if part is None else part.reshape(-1, 1) for part in (made.factor, made.exponent, made.offsets)
    )
    codes = torch.empty(folded.shape, dtype=code_dtype(fmt.bits), device=folded.device)
    working = torch.float64 if folded.dtype == torch.float64 else torch.float32
    for rows, columns in windows(folded):
        y, shift = folded[rows, columns], None if exponent is None else exponent[rows]
        if shift is None:
            assert factor is not None
            row_factor = factor[rows].to(working)
            y = torch.div(y.to(working), row_factor) if made.divides else y.to(working) * row_factor
            y = y * float32(element.max / fmt.element.max) if element is fmt.alternative else y
        drawn = None if words is None else words[rows, columns]
        if offsets is not None:
            # Round to integers, add the zero points and clamp.
            assert isinstance(fmt.element, IntFormat)
            numbers = element_codes.to_integers(y, fmt.element, spec.rounding, drawn) + offsets[rows]
            piece = numbers.clamp(0, fmt.element.max_code)
        else:
            piece = element_codes.encode(y, element, spec.rounding, spec.overflow, drawn, shift)
        codes[rows, columns] = piece.to(codes.dtype)
    return codes


def _errors(
    blocks: Blocks, x: torch.Tensor, codes: torch.Tensor, made: Scales, fmt: BlockFormat, element: ElementFormat
) -> torch.Tensor:
    """Return the errors [rows, columns] of blocks under the scales of a candidate."""
    q = element_codes.decode(codes, element, torch.float32)
    x, q = (t.float().reshape(blocks.rows, blocks.columns, -1) for t in (x, q))
    return errors(
        x, q, made, fmt.scaling, float(fmt.element.max), blocks.height, float32(fmt.element.max / element.max)
    )


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of a block format's codes into ``out``, each rounded once to its dtype."""
    fmt = spec.format
    assert isinstance(fmt, BlockFormat) and parts.scales is not None
    blocks = blocks_of(tuple(out.shape), spec.dim, fmt.block)
    codes = blocks.fold(parts.codes)
    scales = widen(parts.scales).reshape(-1, 1)
    offsets = None if parts.offsets is None else parts.offsets.reshape(-1, 1)
    if parts.tensor_scale is not None:  # the number of the second level for each block
        level = block_level(parts.tensor_scale, fmt.scaling, parts.scales.shape)
        tensor_scale = widen(level.expand(parts.scales.shape)).reshape(-1, 1)
    result = torch.empty(codes.shape, dtype=out.dtype, device=out.device)
    bits = element_codes.significant_bits(fmt.element)
    is_other, scales = torch.signbit(scales), scales if fmt.alternative is None else scales.abs()
    for rows, columns in windows(codes):
        if offsets is None:
            value = element_codes.decode(codes[rows, columns], fmt.element, torch.float64)
            if fmt.alternative is not None:
                other = element_codes.decode(codes[rows, columns], fmt.alternative, torch.float64)
                value = torch.where(is_other[rows], other * (fmt.element.max / fmt.alternative.max), value)
        else:
            value = float64(codes[rows, columns].to(torch.int64) - offsets[rows])
        if parts.tensor_scale is None:
            result[rows, columns] = product(value, scales[rows], bits, out.dtype)
        else:
            result[rows, columns] = narrow(value * scales[rows] * tensor_scale[rows], out.dtype)
    out.copy_(blocks.unfold(result))


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return finite magnitudes, 0 for Inf and NaN."""
    return torch.where(x.isfinite(), x.abs(), 0)


def _scales(blocks: Blocks, folded: torch.Tensor, fmt: BlockFormat, times: float) -> Scales:
    """Measure the blocks and make their scales; times: the candidate, of rules with two levels."""
    if fmt.zero_point:
        assert isinstance(fmt.element, IntFormat)
        low = largest(folded, lambda x: magnitudes((-x).clamp(min=0)))
        high = largest(folded, lambda x: magnitudes(x.clamp(min=0)))
        return range_scales(blocks.per_block(low), blocks.per_block(high), fmt.element.max_code)
    amax = blocks.per_block(largest(folded, magnitudes))
    if fmt.scaling.exponent_rule is not None:
        return exponent_scales(amax, fmt)
    amax, top, store = amax.float().clamp(max=FLT_MAX), float(fmt.element.max), partial(_stored, fmt=fmt.scale)
    if fmt.scaling.tensor is None:
        return one_level(amax, fmt.scaling, top, store)
    return two_levels(amax, fmt.scaling, top, store, times)


def _stored(s: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Round scales to a scale format, nearest even and saturating."""
    return element_codes.decode(floats.encode(s, fmt, NEAREST, "saturate"), fmt, torch.float32)


# LogFMT tiles.

_OCTAVES = 32 * 0.6931471805599453  # the double nearest to 32 ln 2: a tile spans at most 2**32


def encode_tiles(x: torch.Tensor, spec: CastSpec, words: torch.Tensor | None) -> EncodedParts:
    """Return codes, steps (as scales) and lowest logarithms (as offsets) of LogFMT tiles.

    Args:
        x: Any shape; dim ``spec.dim`` is the inner axis.
        spec: The cast, to a LogTileFormat.
        words: Random integers of x's shape, int64, for stochastic rounding.
    """
    fmt = spec.format
    assert isinstance(fmt, LogTileFormat)
    blocks = blocks_of(tuple(x.shape), spec.dim, fmt.block)
    folded = blocks.fold(x)
    folded_words = None if words is None else blocks.fold(words)

    # Low and step of each tile, float32 values in float64 [tiles, 1], and which are empty.
    def measured(x: torch.Tensor) -> torch.Tensor:
        return magnitudes(x).float().clamp(max=FLT_MAX)

    def closeness(x: torch.Tensor) -> torch.Tensor:
        magnitude = measured(x)
        return torch.where(magnitude > 0, -magnitude, -torch.inf)

    high, near = (largest(folded, measure).unsqueeze(1) for measure in (measured, closeness))
    empty = high == 0
    top, smallest = (ln(torch.where(empty, 1.0, float64(part))) for part in (high, -near))
    low = round32(torch.maximum(smallest, top - _OCTAVES))
    step = round32(divide((top - low).clamp(min=0), float(fmt.max_code - 1)))
    low, step = torch.where(empty, 0.0, low), torch.where(empty, 0.0, step)
    codes = torch.empty(folded.shape, dtype=code_dtype(fmt.bits), device=x.device)
    width = folded.shape[1]
    limit = max(1, chunk_size(x.device) * width // max(width, fmt.max_code + 1))  # a row brings its table along
    for rows, columns in windows(folded, limit):
        table = tile_values(low[rows], step[rows], torch.arange(fmt.max_code + 1, device=x.device))
        piece_words = None if folded_words is None else folded_words[rows, columns]
        piece = _ranks(folded[rows, columns], table, empty[rows], fmt, spec.rounding, piece_words)
        codes[rows, columns] = piece.to(codes.dtype)
    low = torch.where(largest(folded, torch.isnan).unsqueeze(1), float("nan"), low)
    scales, offsets = (blocks.per_block(narrow(part, torch.float32)) for part in (step, low))
    return EncodedParts(blocks.unfold(codes), scales, None, offsets)


def decode_tiles(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of LogFMT codes into ``out``, each rounded once to its dtype."""
    fmt = spec.format
    assert isinstance(fmt, LogTileFormat) and parts.scales is not None and parts.offsets is not None
    blocks = blocks_of(tuple(out.shape), spec.dim, fmt.block)
    codes = blocks.fold(parts.codes)
    lows, steps = widen(parts.offsets).reshape(-1, 1), widen(parts.scales).reshape(-1, 1)
    result = torch.empty(codes.shape, dtype=out.dtype, device=out.device)
    for rows, columns in windows(codes):
        piece = codes[rows, columns].to(torch.int64)
        value = tile_values(lows[rows], steps[rows], piece & fmt.max_code)
        value = torch.where((piece >> (fmt.bits - 1)) & 1 == 1, -value, value)
        result[rows, columns] = narrow(value, out.dtype)
    out.copy_(blocks.unfold(result))


def tile_values(low: torch.Tensor, step: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of ranks in float64: 0 for rank 0, else ``RN32(exp(low + step (rank - 1)))``."""
    value = round32(exp(low + step * float64(rank - 1)))
    return torch.where((rank == 0) & ~torch.isnan(low), 0.0, value)


def _ranks(
    x: torch.Tensor,
    table: torch.Tensor,
    empty: torch.Tensor,
    fmt: LogTileFormat,
    rounding: Rounding,
    words: torch.Tensor | None,
) -> torch.Tensor:
    """Round elements to the ranks of their row's table and add the sign."""
    y = widen(x)
    # 1. magnitudes, those beyond the tile's range at its end
    nan = torch.isnan(y)
    negative = (bits_of(x) < 0) & ~nan
    magnitude = torch.where(nan, float("inf"), y.abs())
    magnitude = torch.minimum(magnitude, table[:, -1:]).contiguous()
    # 2. the values around each, and which of them it takes
    rank = torch.searchsorted(table, magnitude, right=True) - 1
    lower = table.gather(1, rank)
    upper = table.gather(1, (rank + 1).clamp(max=fmt.max_code))
    first = torch.searchsorted(table, lower)  # of equal values: its parity is theirs
    up = element_codes.moves_up(
        magnitude, lower, upper, first, (lower + upper) * 0.5, negative, rounding, words, flipped=negative
    )
    # 3. the first of equal values, and the sign
    rank = torch.searchsorted(table, table.gather(1, (rank + up).clamp(max=fmt.max_code)))
    code = torch.where(empty, 0, rank)
    return torch.where(negative, code | (1 << (fmt.bits - 1)), code)
