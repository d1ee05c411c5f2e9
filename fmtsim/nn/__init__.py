"""Models under simulated precision: modules with quantised matrix products, convert, revert and report."""

from fmtsim.nn.attention import EmulatedMultiheadAttention as EmulatedMultiheadAttention
from fmtsim.nn.convert import convert as convert
from fmtsim.nn.convert import revert as revert
from fmtsim.nn.convert import set_step as set_step
from fmtsim.nn.modules import EmulatedConv2d as EmulatedConv2d
from fmtsim.nn.modules import EmulatedLinear as EmulatedLinear
from fmtsim.nn.report import report as report
from fmtsim.nn.state import load_recipe_state as load_recipe_state
from fmtsim.nn.state import recipe_state as recipe_state
from fmtsim.nn.state import share_scales as share_scales

__all__ = [
    "EmulatedConv2d",
    "EmulatedLinear",
    "EmulatedMultiheadAttention",
    "convert",
    "load_recipe_state",
    "recipe_state",
    "report",
    "revert",
    "set_step",
    "share_scales",
]
