# SPDX-License-Identifier: Apache-2.0
"""The engine's three verbs and what its kernels cover; the torch engine does the rest."""

from functools import lru_cache
from operator import attrgetter

import torch

from fmtsim.engines import torch_engine
from fmtsim.engines.cpu.cast import decoding, elements, logarithmic, matrices
from fmtsim.engines.cpu.cast.decoding import narrows
from fmtsim.engines.cpu.cast.matrices import encoder, quantizer
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.spec.cast import CastSpec, EncodedParts, Random

_dtype_of = attrgetter("dtype")


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Say whether the kernels cover a verb on these tensors: input and output of quantize, else the one it has."""
    return _covers(verb, spec, *map(_dtype_of, tensors))


@lru_cache(maxsize=4096)
def _covers(verb: str, spec: CastSpec, *dtypes: torch.dtype) -> bool:
    """Say whether kernels cover a verb.

    They decode by tables of up to 16 bits. Casts start from float32 or 16 bits; zero points, variants b and c of
    stochastic rounding and what no kernel rounds are left out, and so are values that are rounded once more to 16 bits
    where float32 does not hold those of the elements.
    """
    fmt = spec.format
    if not all(dtype in FLOAT_DTYPES for dtype in dtypes):
        return False
    if isinstance(fmt, LogTileFormat):
        return verb == "decode" or (dtypes[0] != torch.float64 and logarithmic.covers(spec))
    element, narrow = (
        fmt.element if isinstance(fmt, BlockFormat) else fmt,
        verb != "encode" and narrows(fmt, dtypes[-1]),
    )
    wide = verb == "quantize" and not isinstance(fmt, BlockFormat) and dtypes[-1] == torch.float64
    if (narrow or wide) and not is_representable(element, torch.float32):
        return False
    if verb == "decode":
        return element.bits <= 16
    if dtypes[0] == torch.float64:
        return False
    if not isinstance(fmt, BlockFormat):
        return elements.covers(verb, spec)
    rounds = verb == "quantize" and dtypes[-1] != torch.float64 and not narrow and quantizer(spec) is not None
    return rounds or encoder(spec) is not None and (not narrow or element.bits <= 16)


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    if not _covers("quantize", spec, x.dtype, out.dtype):
        torch_engine.quantize(x, spec, random, out)
    elif isinstance(spec.format, LogTileFormat):
        decode(encode(x, spec, random), spec, out)
    elif isinstance(spec.format, BlockFormat):
        matrices.quantize_blocks(x, spec, random, out)
    else:
        elements.quantize_elements(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x, and the scales of a block format."""
    if not supports("encode", spec, x):
        return torch_engine.encode(x, spec, random)
    if isinstance(spec.format, LogTileFormat):
        return logarithmic.encode(x, spec, random) if x.numel() else torch_engine.encode(x, spec, random)
    if isinstance(spec.format, BlockFormat):
        return matrices.encode_blocks(x, spec, random)
    return elements.encode_elements(x, spec, random)


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out."""
    if not supports("decode", spec, out):
        torch_engine.decode(parts, spec, out)
    elif not isinstance(spec.format, LogTileFormat):
        decoding.decode(parts, spec, out)
    elif out.numel():
        logarithmic.decode(parts, spec, out)
