# SPDX-License-Identifier: Apache-2.0
"""Short forms that the catalogue is written in, and the record of activations that are saved in low precision."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import decode, encode
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.rounding.modes import Rounding, RoundingName
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types


def scale_format(name: str) -> FloatFormat:
    """Return a format that scales are stored in."""
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt


BF16, E4M3, E8M0 = (scale_format(name) for name in ("bf16", "e4m3", "e8m0"))
FORWARD = Quantizer(source="forward")  # the codes of the forward pass, or of the gradient's first use
HIGH = Quantizer()
HOPPER, BLACKWELL = "h200", "b200"  # machines that recipes were made for
# Declared, not measured: float32 multiply-adds one after another, for what no catalogued unit multiplies.
CHAIN = Datapath(block=1, fraction_bits=None, rounding=Rounding(), signed_zero=True)
STOCHASTIC = Rounding(mode="stochastic")


def cast(
    name: str | None, scaling: Scaling | None = None, rounding: RoundingName | Rounding = "nearest_even", **fields: Any
) -> Quantizer:
    """Return the quantiser of a format by its name."""
    mode = Rounding(mode=rounding) if isinstance(rounding, str) else rounding  # type: ignore[arg-type]
    return Quantizer(format=None if name is None else get_format(name), scaling=scaling, rounding=mode, **fields)


def layer(
    x: Quantizer,
    w: Quantizer,
    g: Quantizer,
    *,
    w_back: Quantizer | None = None,
    g_back: Quantizer | None = None,
    x_back: Quantizer | None = None,
    fast: bool = False,
    dequantized: bool = False,
    **flags: bool,
) -> LinearConfig:
    """Return a layer with operands x and w forward, g and w_back for dx, g_back and x_back for dw (None: as before).

    ``fast`` is use_fast_accum of the forward product on a machine, ``dequantized`` as in Gemm, ``flags`` are those of
    LinearConfig.
    """
    return LinearConfig(
        fprop=Gemm(a=x, b=w, fast_accum=fast, dequantized=dequantized),
        dgrad=Gemm(a=g, b=w if w_back is None else w_back, dequantized=dequantized),
        wgrad=Gemm(a=g if g_back is None else g_back, b=x if x_back is None else x_back, dequantized=dequantized),
        **flags,
    )


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
        element_scale = decode(scales, self.scale, out_dtype=torch.float32).repeat_interleave(self.block, -1)
        return values * element_scale[..., :size]

    @property
    def words(self) -> str:
        """The format in a few words."""
        return f"{self.format.name} in groups of {self.block}, scales in {self.scale.name}"

    def __str__(self) -> str:
        unseen = "" if self.flows else ", unseen by the forward pass"
        return f"inputs of norms, activation functions and gated products kept in {self.words}{unseen}"
