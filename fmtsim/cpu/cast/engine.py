"""The engine's three verbs and what it covers."""

import torch

from fmtsim.cpu.cast import decoding
from fmtsim.cpu.cast.elements import encode_elements, quantize_elements
from fmtsim.cpu.cast.matrices import encode_blocks, quantize_blocks
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.spec.cast import CastSpec, EncodedParts, Random


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Say whether the kernels cover a verb on these tensors: input and output of quantize, else the one it has.

    LogFMT tiles and tables of more than 16 bits are left to torch ops, and so are results that must be rounded once
    more to a narrow output dtype.
    """
    fmt, dtypes = spec.format, [tensor.dtype for tensor in tensors]
    if isinstance(fmt, LogTileFormat) or not all(dtype in FLOAT_DTYPES for dtype in dtypes):
        return False
    if verb == "decode" and (fmt.element if isinstance(fmt, BlockFormat) else fmt).bits > 16:
        return False
    out = dtypes[-1]
    return verb == "encode" or out in (torch.float32, torch.float64) or is_representable(fmt, out)


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    if isinstance(spec.format, BlockFormat):
        quantize_blocks(x, spec, random, out)
    else:
        quantize_elements(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x, and the scales of a block format."""
    if isinstance(spec.format, BlockFormat):
        return encode_blocks(x, spec, random)
    return encode_elements(x, spec, random)


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out."""
    decoding.decode(parts, spec, out)
