"""The engine's three verbs of casts and what they cover."""

from functools import cache

import torch

from fmtsim.cuda.cast import block
from fmtsim.cuda.cast.elements import (
    decode_elements,
    encode_elements,
    encode_packed_elements,
    packs,
    quantize_elements,
)
from fmtsim.cuda.cast.fast_dispatch import quantize_contiguous
from fmtsim.cuda.runtime import program as runtime
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.spec.cast import CastSpec, EncodedParts, Random


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Say whether the kernels cover a verb on these tensors: input and output of quantize, else the one it has.

    LogFMT tiles are left to torch ops, and so are results that must be rounded once more to a narrow output dtype.
    """
    fmt, dtypes = spec.format, [tensor.dtype for tensor in tensors]
    if isinstance(fmt, LogTileFormat) or not all(dtype in FLOAT_DTYPES for dtype in dtypes):
        return False
    if not _runs(tensors[0].device):
        return False
    if isinstance(fmt, BlockFormat):
        return block.covers_blocks(spec, *dtypes)
    if verb == "encode_packed":
        return packs(spec, tensors[0])
    return verb == "encode" or dtypes[-1] in (torch.float32, torch.float64) or is_representable(fmt, dtypes[-1])


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    if not isinstance(random, torch.Tensor) and quantize_contiguous(x, spec, out, random):
        return
    if isinstance(spec.format, BlockFormat):
        block.quantize_blocks(x, spec, random, out)
    else:
        quantize_elements(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x in its shape, and the scales of a block format."""
    if isinstance(spec.format, BlockFormat):
        return block.encode_blocks(x, spec, random)
    return encode_elements(x, spec, random)


def encode_packed(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return codes and scales as an encoded tensor keeps them: packed along ``dim`` (docs/semantics.md, section 11)."""
    if isinstance(spec.format, BlockFormat):
        return block.encode_blocks(x, spec, random, packed=True)
    return encode_packed_elements(x, spec, random)


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out (a dtype that holds them, or float32 and float64)."""
    if isinstance(spec.format, BlockFormat):
        block.decode_blocks(parts, spec, out)
    else:
        decode_elements(parts, spec, out)


@cache
def _runs(device: torch.device) -> bool:
    return runtime.available(device)
