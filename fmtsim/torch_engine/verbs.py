# SPDX-License-Identifier: Apache-2.0
"""The engine's three verbs: quantize, encode and decode (docs/semantics.md)."""

import torch

from fmtsim.formats.block import BlockFormat, LogTileFormat, PackedFormat, ScaledFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.scaling.blocks import chunk_size
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey, block_counts
from fmtsim.support.errors import ArgumentError
from fmtsim.torch_engine import element_codes, packed_blocks, scaled_formats
from fmtsim.torch_engine.random_words import random_integers


@torch.no_grad()
def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Write the values that x rounds to into ``out``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides.
        spec: The cast.
        random: None, a RandomKey, or int64 random integers of x's shape.
        out: x's shape, any of the four dtypes; may be x itself. A value beyond its range becomes Inf.

    Raises:
        ArgumentError: Stochastic rounding without ``random``.
    """
    if not x.numel():
        return
    if isinstance(spec.format, ScaledFormat):
        decode(encode(x, spec, random), spec, out)
        return
    source, fmt = x.detach().reshape(-1), spec.format
    direct = out.is_contiguous()
    target = out.detach().view(-1) if direct else torch.empty(source.shape, dtype=out.dtype, device=out.device)
    for piece in _pieces(source):
        words = _words(random, spec, piece, x.device)
        codes = element_codes.encode(source[piece], fmt, spec.rounding, spec.overflow, words)
        target[piece] = element_codes.decode(codes, fmt, out.dtype)
    if not direct:
        out.copy_(target.view(out.shape))


@torch.no_grad()
def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x, of its shape, with the scales that a block format needs; arguments as in ``quantize``."""
    x, fmt = x.detach(), spec.format
    if isinstance(fmt, PackedFormat):
        return packed_blocks.encode(x, spec)
    if isinstance(fmt, BlockFormat | LogTileFormat):
        if not x.numel():
            # no elements: no blocks along an axis without extent
            codes = torch.empty(x.shape, dtype=code_dtype(fmt.bits), device=x.device)
            scales = torch.zeros(block_counts(fmt, x.shape, spec.dim), dtype=torch.float32, device=x.device)
            if isinstance(fmt, LogTileFormat):
                return EncodedParts(codes, scales, None, scales.clone())
            tensor_scale = torch.ones((), dtype=torch.float32, device=x.device) if fmt.tensor_scale else None
            return EncodedParts(codes, scales, tensor_scale, scales.to(torch.int32) if fmt.zero_point else None)
        # The random integers of a whole tensor in its shape, None for the deterministic modes.
        if spec.rounding.mode != "stochastic":
            words = None
        else:
            words = torch.empty(x.numel(), dtype=torch.int64, device=x.device)
            for piece in _pieces(words):
                words_piece = _words(random, spec, piece, x.device)
                assert words_piece is not None
                words[piece] = words_piece
            words = words.view(x.shape)
        parts = (scaled_formats.encode if isinstance(fmt, BlockFormat) else scaled_formats.encode_tiles)(x, spec, words)
        # contiguous, as the operator's shapes tell compilers
        return EncodedParts(*(None if part is None else part.contiguous() for part in parts))  # type: ignore[arg-type]
    source = x.reshape(-1)
    codes = torch.empty(source.shape, dtype=code_dtype(fmt.bits), device=x.device)
    for piece in _pieces(source):
        words_piece = _words(random, spec, piece, x.device)
        piece_codes = element_codes.encode(source[piece], fmt, spec.rounding, spec.overflow, words_piece)
        codes[piece] = piece_codes.to(codes.dtype)
    return EncodedParts(codes.view(x.shape))


@torch.no_grad()
def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into ``out``, of the codes' shape and any of the four dtypes, rounded once to it."""
    if not out.numel():
        return
    fmt = spec.format
    if isinstance(fmt, ScaledFormat):
        decoder = {
            BlockFormat: scaled_formats.decode,
            LogTileFormat: scaled_formats.decode_tiles,
            PackedFormat: packed_blocks.decode,
        }[type(fmt)]
        decoder(parts, spec, out.detach())
        return
    codes = parts.codes.reshape(-1)
    values = torch.empty(codes.shape, dtype=out.dtype, device=out.device)
    for piece in _pieces(codes):
        values[piece] = element_codes.decode(codes[piece], fmt, out.dtype)
    out.copy_(values.view(out.shape))


def _pieces(flat: torch.Tensor) -> list[slice]:
    count, size = flat.numel(), chunk_size(flat.device)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _words(random: Random, spec: CastSpec, piece: slice, device: torch.device) -> torch.Tensor | None:
    """Return the random integers of consecutive elements, None for the deterministic modes."""
    if spec.rounding.mode != "stochastic":
        return None
    if random is None:
        raise ArgumentError("rounding='stochastic' needs random words; pass a RandomKey or a tensor of integers")
    if isinstance(random, RandomKey):
        return random_integers(random, spec.rounding, piece.start, piece.stop - piece.start, device)
    return random.reshape(-1)[piece].to(torch.int64)
