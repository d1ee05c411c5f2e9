# SPDX-License-Identifier: Apache-2.0
"""Activations outside of layers that a recipe saves in low precision for the backward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fmtsim.casts.quantize import decode, encode
from fmtsim.formats.floating import FloatFormat
from fmtsim.recipes.build import BF16, E4M3
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Save the inputs of norms, activation functions and gated products in low precision, in groups along the last dim.

    A group's scale is ``s = (amax + eps) / max`` in float32, its codes are x / s rounded to nearest even, and s is kept
    in ``scale``: codes are made with the scale before it was rounded, and decoded with the one after. A last group may
    be short. NaN or Inf make their group NaN.

    Args:
        format: Format of the elements.
        block: Elements that share a scale.
        scale: Format in which scales are kept.
        eps: Added to the largest magnitude.
        flows: The operator computes with the decoded values, in float32, as in the source; False computes with the
            original ones, and only gradients see the decoded.

    Source: Xi et al., COAT, arXiv:2410.19313; NVlabs/COAT 80ec99f, ``_quantize.py`` and ``coat_llama.py``.

    >>> codes, scales = SavedActivations().encode(torch.tensor([[1.0, 2.0, 448.0]]))
    >>> SavedActivations().decode(codes, scales), codes.dtype, scales.shape
    (tensor([[  1.,   2., 448.]]), torch.uint8, torch.Size([1, 1]))
    """

    format: FloatFormat = E4M3
    block: int = 16
    scale: FloatFormat = BF16
    eps: float = 1e-10
    flows: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("block", "eps"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"SavedActivations {name}={shown(getattr(self, name))} is not above 0")

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes of x's shape, and codes of the scales, ``[..., groups]``."""
        wide, size = x.detach().float(), x.shape[-1]
        groups = torch.nn.functional.pad(wide, (0, -size % self.block)).unflatten(-1, (-1, self.block))
        scales = (groups.abs().amax(-1, keepdim=True) + self.eps) / self.format.max
        codes = encode(groups / scales, self.format).codes.flatten(-2)
        return codes[..., :size].contiguous(), encode(scales.squeeze(-1), self.scale).codes

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values in float32."""
        values, size = decode(codes, self.format, out_dtype=torch.float32), codes.shape[-1]
        each = decode(scales, self.scale, out_dtype=torch.float32).repeat_interleave(self.block, -1)
        return values * each[..., :size]

    @property
    def words(self) -> str:
        """The format in a few words."""
        return f"{self.format.name} in groups of {self.block}, scales in {self.scale.name}"

    def __str__(self) -> str:
        unseen = "" if self.flows else ", unseen by the forward pass"
        return f"inputs of norms, activation functions and gated products kept in {self.words}{unseen}"
