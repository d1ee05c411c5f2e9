# SPDX-License-Identifier: Apache-2.0
"""LogFMT tiles: codes that count equal steps of the logarithm (docs/semantics.md, section 8)."""

import torch

from fmtsim.engines.torch_engine.blockcast import magnitudes
from fmtsim.engines.torch_engine.elementary import exp, ln
from fmtsim.engines.torch_engine.elements import moves_up
from fmtsim.engines.torch_engine.floats import bits_of
from fmtsim.engines.torch_engine.reals import divide, narrow, round32, widen
from fmtsim.formats.block import LogTileFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import blocks_of, chunk_size, largest, windows
from fmtsim.scaling.scales import FLT_MAX
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.float64 import float64

_OCTAVES = 32 * 0.6931471805599453  # the double nearest to 32 ln 2: a tile spans at most 2**32


def encode(x: torch.Tensor, spec: CastSpec, words: torch.Tensor | None) -> EncodedParts:
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
    low, step, empty = _ranges(folded, fmt)
    codes = torch.empty(folded.shape, dtype=code_dtype(fmt.bits), device=x.device)
    width = folded.shape[1]
    limit = max(1, chunk_size(x.device) * width // max(width, fmt.max_code + 1))  # a row brings its table along
    for rows, columns in windows(folded, limit):
        table = tile_values(low[rows], step[rows], torch.arange(fmt.max_code + 1, device=x.device))
        piece_words = None if folded_words is None else folded_words[rows, columns]
        piece = _encode_piece(folded[rows, columns], table, empty[rows], fmt, spec.rounding, piece_words)
        codes[rows, columns] = piece.to(codes.dtype)
    low = torch.where(largest(folded, torch.isnan).unsqueeze(1), float("nan"), low)
    scales, offsets = (blocks.per_block(narrow(part, torch.float32)) for part in (step, low))
    return EncodedParts(blocks.unfold(codes), scales, None, offsets)


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
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


def _ranges(folded: torch.Tensor, fmt: LogTileFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return low and step of each tile, float32 values in float64 [tiles, 1], and which are empty."""

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
    return torch.where(empty, 0.0, low), torch.where(empty, 0.0, step), empty


def _encode_piece(
    x: torch.Tensor,
    table: torch.Tensor,
    empty: torch.Tensor,
    fmt: LogTileFormat,
    rounding: Rounding,
    words: torch.Tensor | None,
) -> torch.Tensor:
    """Round elements to the ranks of their row's table and add the sign."""
    y = widen(x)
    nan = torch.isnan(y)
    negative = (bits_of(x) < 0) & ~nan
    magnitude = torch.where(nan, float("inf"), y.abs())
    magnitude = torch.minimum(magnitude, table[:, -1:]).contiguous()
    rank = torch.searchsorted(table, magnitude, right=True) - 1
    lower = table.gather(1, rank)
    upper = table.gather(1, (rank + 1).clamp(max=fmt.max_code))
    first = torch.searchsorted(table, lower)  # of equal values: its parity is theirs
    up = moves_up(magnitude, lower, upper, first, (lower + upper) * 0.5, negative, rounding, words, flipped=negative)
    rank = torch.searchsorted(table, table.gather(1, (rank + up).clamp(max=fmt.max_code)))  # first of equal values
    code = torch.where(empty, 0, rank)
    return torch.where(negative, code | (1 << (fmt.bits - 1)), code)
