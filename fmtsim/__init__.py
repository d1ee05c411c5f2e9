"""A numerics laboratory for PyTorch: number formats, tensor-core arithmetic and low-precision training, bit for bit."""

import importlib
from typing import TYPE_CHECKING, Any

from fmtsim import interrupts as interrupts  # first: what follows takes seconds
from fmtsim.analysis.compare import compare
from fmtsim.analysis.comparison import Comparison
from fmtsim.analysis.native import compare_native
from fmtsim.analysis.observe import observe
from fmtsim.encoded import Encoded
from fmtsim.errors import (
    ArgumentError,
    CodeError,
    CollectiveError,
    CoverageWarning,
    DataError,
    DeviceError,
    DtypeError,
    FmtsimError,
    FormatError,
    KernelWarning,
    LibraryBugWarning,
    NativeWarning,
    PlanUnknownWarning,
)
from fmtsim.explain import explain
from fmtsim.explain.product import explain_mm
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.registry import get_format, list_formats, register_format
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.gemm.layers.linear import EmulatedGEMM
from fmtsim.gemm.products.instruction import mma
from fmtsim.gemm.products.matmul import bmm, int_mm, linear, mm
from fmtsim.gemm.products.scaled import scaled_mm
from fmtsim.gemm.targets.target import get_target, list_targets
from fmtsim.gemm.units.unit import get_unit, list_units, register_unit
from fmtsim.nn import convert, load_recipe_state, recipe_state, report, revert, set_step, share_scales
from fmtsim.ptq import PtqRecipe, get_ptq_recipe, list_ptq_recipes, load_ptq, ptq, ptq_report, ptq_state
from fmtsim.quantize import decode, encode, quantize, quantize_
from fmtsim.recipes import Recipe, get_recipe, list_recipes, register_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.search import search
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer

if TYPE_CHECKING:
    from fmtsim import optim
    from fmtsim.analysis.bisect import assert_same_bits, bisect
    from fmtsim.analysis.tracing import trace, tracing
    from fmtsim.cpu import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BlockFormat",
    "CodeError",
    "CodebookFormat",
    "CollectiveError",
    "Comparison",
    "CoverageWarning",
    "DataError",
    "Datapath",
    "DeviceError",
    "DtypeError",
    "EmulatedGEMM",
    "Encoded",
    "FloatFormat",
    "FmtsimError",
    "FormatError",
    "Gemm",
    "GemmPlan",
    "IntFormat",
    "IntegerDatapath",
    "KernelWarning",
    "LibraryBugWarning",
    "LinearConfig",
    "LogFormat",
    "LogTileFormat",
    "NativeWarning",
    "PairwiseDatapath",
    "PlanUnknownWarning",
    "PtqRecipe",
    "Quantizer",
    "RandomKey",
    "Recipe",
    "Rounding",
    "Scaling",
    "TensorScale",
    "TwoStageDatapath",
    "assert_same_bits",
    "bisect",
    "bmm",
    "compare",
    "compare_native",
    "convert",
    "decode",
    "encode",
    "explain",
    "explain_mm",
    "get_format",
    "get_num_threads",
    "get_ptq_recipe",
    "get_recipe",
    "get_target",
    "get_unit",
    "int_mm",
    "linear",
    "linear_config",
    "list_formats",
    "list_ptq_recipes",
    "list_recipes",
    "list_targets",
    "list_units",
    "load_ptq",
    "load_recipe_state",
    "mm",
    "mma",
    "observe",
    "optim",
    "ptq",
    "ptq_report",
    "ptq_state",
    "quantize",
    "quantize_",
    "recipe_state",
    "register_format",
    "register_recipe",
    "register_unit",
    "report",
    "revert",
    "scaled_mm",
    "search",
    "set_num_threads",
    "set_step",
    "share_scales",
    "trace",
    "tracing",
]

# What would load a compiler waits until it is asked for.
_LAZY = {
    "get_num_threads": "fmtsim.cpu", "set_num_threads": "fmtsim.cpu",
    "assert_same_bits": "fmtsim.analysis.bisect", "bisect": "fmtsim.analysis.bisect",
    "trace": "fmtsim.analysis.tracing", "tracing": "fmtsim.analysis.tracing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("cuda", "distributed", "optim"):
        return importlib.import_module(f"fmtsim.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fmtsim' has no attribute {name!r}")
