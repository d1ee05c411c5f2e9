"""A numerics laboratory for PyTorch: number formats, tensor-core arithmetic and low-precision training, bit for bit."""

import importlib
from typing import TYPE_CHECKING, Any

from fmtsim.analysis.observe import observe
from fmtsim.encoded import Encoded
from fmtsim.errors import ArgumentError, CodeError, DataError, DtypeError, FmtsimError, FormatError
from fmtsim.explain import explain
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.registry import get_format, list_formats, register_format
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.gemm.config import Gemm, LinearConfig, Quantizer, linear_config
from fmtsim.gemm.emulated import EmulatedGEMM
from fmtsim.nn import convert, report, revert
from fmtsim.ops import RandomKey
from fmtsim.quantize import decode, encode, quantize, quantize_
from fmtsim.rounding.modes import Rounding

if TYPE_CHECKING:
    from fmtsim.cpu.pool import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BlockFormat",
    "CodeError",
    "CodebookFormat",
    "DataError",
    "DtypeError",
    "EmulatedGEMM",
    "Encoded",
    "FloatFormat",
    "FmtsimError",
    "FormatError",
    "Gemm",
    "IntFormat",
    "LinearConfig",
    "LogFormat",
    "LogTileFormat",
    "Quantizer",
    "RandomKey",
    "Rounding",
    "convert",
    "decode",
    "encode",
    "explain",
    "get_format",
    "get_num_threads",
    "linear_config",
    "list_formats",
    "observe",
    "quantize",
    "quantize_",
    "register_format",
    "report",
    "revert",
    "set_num_threads",
]

# What would load a compiler waits until it is asked for.
_LAZY = {"get_num_threads": "fmtsim.cpu.pool", "set_num_threads": "fmtsim.cpu.pool"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fmtsim' has no attribute {name!r}")
