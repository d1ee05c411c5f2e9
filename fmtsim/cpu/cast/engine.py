# SPDX-License-Identifier: Apache-2.0
"""The engine's three verbs and what its kernels cover; the torch engine does the rest.

What a cast and the dtypes decide is looked up in one place, which loads the kernels of a kind of formats when they are
first needed.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from fmtsim import torch_engine
from fmtsim.cpu.cast import codes, elements
from fmtsim.formats.block import BlockFormat, LogTileFormat, PackedFormat
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable
from fmtsim.spec.cast import CastSpec, EncodedParts, Random
from fmtsim.torch_engine import packed_blocks

_dtype_of = attrgetter("dtype")


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Return True if kernels cover a verb on these tensors: input and output of quantize, else the one it has."""
    return _implementation(verb, spec, *map(_dtype_of, tensors)) is not None


@lru_cache(maxsize=4096)
def _implementation(verb: str, spec: CastSpec, *dtypes: torch.dtype) -> Callable[..., Any] | None:
    """Return the function that does a verb, which takes the verb's arguments; None where kernels do not cover it.

    They decode by tables of up to 16 bits. Casts start from float32 or 16 bits; zero points, variants b and c of
    stochastic rounding and what no kernel rounds are left out, and so are values that are rounded once more to 16 bits
    where float32 does not hold those of the elements.
    """
    fmt = spec.format
    if not all(dtype in FLOAT_DTYPES for dtype in dtypes):
        return None
    if isinstance(fmt, PackedFormat):
        if verb == "decode" or fmt.encoder not in ("largest", "searched_range", "searched_signed"):
            return None
        from fmtsim.cpu.cast import ggml

        return _quantize_by_codes if verb == "quantize" else lambda x, spec, random: packed_blocks.encode(x, spec, ggml)
    if isinstance(fmt, LogTileFormat):
        from fmtsim.cpu.cast import logarithmic

        covered = verb == "decode" or (dtypes[0] != torch.float64 and logarithmic.covers(spec))
        return getattr(logarithmic, verb) if covered else None
    if isinstance(fmt, BlockFormat) and not fmt.is_direct:
        return None
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    narrow = verb != "encode" and codes.narrows(fmt, dtypes[-1])
    wide = verb == "quantize" and not isinstance(fmt, BlockFormat) and dtypes[-1] == torch.float64
    if (narrow or wide) and not is_representable(element, torch.float32):
        return None
    if verb == "decode":
        return codes.decode if element.bits <= 16 else None
    if dtypes[0] == torch.float64:
        return None
    if not isinstance(fmt, BlockFormat):
        return elements.quantizer(spec) if verb == "quantize" else elements.encoder(spec)
    from fmtsim.cpu.cast import scaled_blocks

    if verb == "encode":
        return scaled_blocks.encoder(spec)
    direct = None if narrow or dtypes[-1] == torch.float64 else scaled_blocks.quantizer(spec)
    if direct is None and (not narrow or element.bits <= 16) and scaled_blocks.encoder(spec) is not None:
        return _quantize_by_codes
    return direct


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    (_implementation("quantize", spec, x.dtype, out.dtype) or torch_engine.quantize)(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x, and the scales of a block format."""
    parts: EncodedParts = (_implementation("encode", spec, x.dtype) or torch_engine.encode)(x, spec, random)
    return parts


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out."""
    (_implementation("decode", spec, out.dtype) or torch_engine.decode)(parts, spec, out)


def _quantize_by_codes(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    decode(encode(x, spec, random), spec, out)
