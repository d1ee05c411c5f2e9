"""The engine's three verbs of casts and what they cover."""

import torch

from fmtsim.ops import CastSpec, EncodedParts, Random


def supports(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> bool:
    """Say whether the kernels cover a verb on these tensors: its input (quantize, encode), its output (the others)."""
    return False


def quantize(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
    """Quantise x into out; see the engine protocol in docs/architecture.md."""
    raise NotImplementedError


def encode(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    """Return the codes of x, and the scales of a block format."""
    raise NotImplementedError


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out."""
    raise NotImplementedError
