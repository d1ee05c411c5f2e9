"""A numerics laboratory for PyTorch: number formats, tensor-core arithmetic and low-precision training, bit for bit."""

from fmtsim.encoded import Encoded
from fmtsim.errors import ArgumentError, CodeError, DataError, DtypeError, FmtsimError, FormatError
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.registry import get_format, list_formats, register_format
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.ops import RandomKey
from fmtsim.quantize import decode, encode, quantize, quantize_
from fmtsim.rounding.modes import Rounding

__version__ = "0.1.0"
