# SPDX-License-Identifier: Apache-2.0
"""Models under simulated precision: modules with quantised matrix products, convert, revert and report."""

from fmtsim.nn.convert import convert, revert, set_step
from fmtsim.nn.convolutions import EmulatedConv2d
from fmtsim.nn.modules import EmulatedLinear, EmulatedRecurrent
from fmtsim.nn.multihead_attention import (
    EmulatedMultiheadAttention,
    QuantisedAttention,
    convert_attention,
    revert_attention,
)
from fmtsim.nn.report import report
from fmtsim.nn.scaled_model import (
    MuLinear,
    MuReadout,
    MuResidual,
    ScaledLinear,
    UnitLinear,
    UnitReadout,
    mu_parameter_groups,
)
from fmtsim.nn.sdpa import flash_attention_3, quantised_attention
from fmtsim.nn.state import share_scales
from fmtsim.nn.swaps import SmoothSwiGLU, convert_swiglu, revert_swiglu, smooth_swiglu

__all__ = [
    "EmulatedConv2d", "EmulatedLinear", "EmulatedMultiheadAttention", "EmulatedRecurrent", "MuLinear", "MuReadout",
    "MuResidual", "QuantisedAttention", "ScaledLinear", "SmoothSwiGLU", "UnitLinear", "UnitReadout", "convert",
    "convert_attention", "convert_swiglu", "flash_attention_3", "mu_parameter_groups",
    "quantised_attention", "report", "revert", "revert_attention", "revert_swiglu", "set_step",
    "share_scales", "smooth_swiglu",
]  # fmt: skip
