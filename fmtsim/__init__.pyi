# SPDX-License-Identifier: Apache-2.0
"""The public names by task, each from the module that defines it; ``__init__.py`` and type checkers read this."""

# Numbers: what a tensor becomes in a format, under a rounding and a scale rule.
from fmtsim.casts.quantize import quantize as quantize
from fmtsim.casts.quantize import quantize_ as quantize_
from fmtsim.casts.quantize import cast as cast
from fmtsim.casts.quantize import encode as encode
from fmtsim.casts.quantize import decode as decode
from fmtsim.casts.encoded import Encoded as Encoded
from fmtsim.formats.registry import get_format as get_format
from fmtsim.formats.registry import list_formats as list_formats
from fmtsim.formats.registry import register_format as register_format
from fmtsim.casts.profile import list_profiles as list_profiles
from fmtsim.lab.explain import explain as explain
from fmtsim.lab.verify.vectors import vectors as vectors

# Products: what a matrix product returns on a GPU, a matrix unit or a datapath of one's own.
from fmtsim.gemm.products.matmul import mm as mm
from fmtsim.gemm.products.matmul import bmm as bmm
from fmtsim.gemm.products.matmul import linear as linear
from fmtsim.gemm.products.matmul import int_mm as int_mm
from fmtsim.gemm.products.scaled_mm import scaled_mm as scaled_mm
from fmtsim.gemm.products.scaled_mm import mma as mma
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM as EmulatedGEMM
from fmtsim.lab.explain.product import explain_mm as explain_mm
from fmtsim.lab.explain.identify import identify as identify
from fmtsim.lab.explain.identify_cast import identify_cast as identify_cast
from fmtsim.gemm.targets.target import get_target as get_target
from fmtsim.gemm.targets.target import list_targets as list_targets
from fmtsim.gemm.units.unit import get_unit as get_unit
from fmtsim.gemm.units.unit import list_units as list_units
from fmtsim.gemm.units.unit import register_unit as register_unit

# Kernels: any Triton or CUDA kernel with a GPU's bits.
from fmtsim.machine.ptx.launching import launch as launch

# Models: training under a recipe, quantisation after training, checkpoints, optimizer states.
from fmtsim.machine.simulate import simulate as simulate
from fmtsim.nn import convert as convert
from fmtsim.ptq import ptq as ptq
from fmtsim.nn import report as report
from fmtsim.nn import revert as revert
from fmtsim.ptq.ptq_state import state as state
from fmtsim.ptq.ptq_state import load_state as load_state
from fmtsim.ptq.export import export as export
from fmtsim.ptq.export import read_export as read_export
from fmtsim.ptq.export import open_checkpoint as open_checkpoint
from fmtsim.recipes import get_recipe as get_recipe
from fmtsim.recipes import list_recipes as list_recipes
from fmtsim.recipes import register_recipe as register_recipe
from fmtsim.gemm.layers.config import linear_config as linear_config
from fmtsim import optim as optim
from fmtsim.lab.search import search as search

# Analysis: where a model loses precision, and where two computations differ.
from fmtsim.lab.analysis.observe import observe as observe
from fmtsim.lab.analysis.attribute import attribute as attribute
from fmtsim.lab.analysis.tracing import trace as trace
from fmtsim.lab.analysis.bisect import bisect as bisect
from fmtsim.lab.analysis.compare import compare as compare

# Records: what arguments above take besides names.
from fmtsim.formats.element import FloatFormat as FloatFormat
from fmtsim.formats.element import IntFormat as IntFormat
from fmtsim.formats.block import BlockFormat as BlockFormat
from fmtsim.formats.scaling import Scaling as Scaling
from fmtsim.formats.scaling import TensorScale as TensorScale
from fmtsim.rounding.modes import Rounding as Rounding
from fmtsim.spec.cast import RandomKey as RandomKey
from fmtsim.spec.quantizer import Quantizer as Quantizer
from fmtsim.spec.datapath import Datapath as Datapath
from fmtsim.spec.datapath import IntegerDatapath as IntegerDatapath
from fmtsim.spec.plan import GemmPlan as GemmPlan
from fmtsim.gemm.layers.config import Gemm as Gemm
from fmtsim.gemm.layers.config import LinearConfig as LinearConfig
from fmtsim.recipes import Recipe as Recipe
from fmtsim.recipes import Rule as Rule
from fmtsim.recipes import PtqRecipe as PtqRecipe

# Engines and errors.
from fmtsim import cuda as cuda
from fmtsim.cpu import get_num_threads as get_num_threads
from fmtsim.cpu import set_num_threads as set_num_threads
from fmtsim.support import errors as errors
from fmtsim.support.errors import FmtsimError as FmtsimError

__version__: str
