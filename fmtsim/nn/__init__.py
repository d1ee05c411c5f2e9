"""Models under simulated precision: modules with quantised matrix products, convert, revert and report."""

from fmtsim.nn.attention import EmulatedMultiheadAttention as EmulatedMultiheadAttention
from fmtsim.nn.attention_mode import QuantisedAttention as QuantisedAttention
from fmtsim.nn.attention_mode import convert_attention as convert_attention
from fmtsim.nn.attention_mode import revert_attention as revert_attention
from fmtsim.nn.convert import convert as convert
from fmtsim.nn.convert import revert as revert
from fmtsim.nn.convert import set_step as set_step
from fmtsim.nn.modules import EmulatedConv2d as EmulatedConv2d
from fmtsim.nn.modules import EmulatedLinear as EmulatedLinear
from fmtsim.nn.report import report as report
from fmtsim.nn.scaled_linear import MuLinear as MuLinear
from fmtsim.nn.scaled_linear import MuReadout as MuReadout
from fmtsim.nn.scaled_linear import MuResidual as MuResidual
from fmtsim.nn.scaled_linear import ScaledLinear as ScaledLinear
from fmtsim.nn.scaled_linear import UnitLinear as UnitLinear
from fmtsim.nn.scaled_linear import UnitReadout as UnitReadout
from fmtsim.nn.scaled_linear import mu_parameter_groups as mu_parameter_groups
from fmtsim.nn.sdpa import flash_attention_3 as flash_attention_3
from fmtsim.nn.sdpa import quantised_attention as quantised_attention
from fmtsim.nn.smooth import SmoothSwiGLU as SmoothSwiGLU
from fmtsim.nn.smooth import convert_swiglu as convert_swiglu
from fmtsim.nn.smooth import revert_swiglu as revert_swiglu
from fmtsim.nn.smooth import smooth_swiglu as smooth_swiglu
from fmtsim.nn.state import load_recipe_state as load_recipe_state
from fmtsim.nn.state import recipe_state as recipe_state
from fmtsim.nn.state import share_scales as share_scales

__all__ = [
    "EmulatedConv2d",
    "EmulatedLinear",
    "EmulatedMultiheadAttention",
    "MuLinear",
    "MuReadout",
    "MuResidual",
    "QuantisedAttention",
    "ScaledLinear",
    "SmoothSwiGLU",
    "UnitLinear",
    "UnitReadout",
    "convert",
    "convert_attention",
    "convert_swiglu",
    "flash_attention_3",
    "load_recipe_state",
    "mu_parameter_groups",
    "quantised_attention",
    "recipe_state",
    "report",
    "revert",
    "revert_attention",
    "revert_swiglu",
    "set_step",
    "share_scales",
    "smooth_swiglu",
]
