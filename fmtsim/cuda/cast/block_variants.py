"""The kinds of kernels that block formats run on, each with representative numbers."""

from collections.abc import Iterator

import torch

from fmtsim.cuda.cast.block_decode import decode_macros
from fmtsim.cuda.cast.block_fast import BFLOAT16, CODES, FLOAT32, INPUTS, PACKED, fast_defines, vector_of
from fmtsim.cuda.cast.block_jobs import amax_macros, column_macros, run_macros
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec

_COMMON = ("mxfp8_e4m3", "mxfp4", "nvfp4", "mxint8", "e4m3_1x128", "e4m3_tensor", "int8_channel", "mxfp8_e5m2_rceil")
_OUTPUTS = (FLOAT32, BFLOAT16, CODES, PACKED)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel, each with representative numbers."""
    for name in ("block_extremes", "cast_blocks", "decode_blocks"):
        yield "block_general.cu", name, ()
    for output in (FLOAT32, BFLOAT16):
        for table in (False, True):
            yield "block_decode.cu", "decode_runs", decode_macros(output, table)
    for dtype in INPUTS:
        for name in ("amax_of_tensor", "amax_of_runs"):
            yield "block_amax.cu", name, amax_macros(dtype)

    for place, name in enumerate(_COMMON):
        for mode in ("nearest_even", "stochastic") if place < 3 else ("nearest_even",):
            yield from _of_format(name, mode)


def _of_format(name: str, mode: str) -> Iterator[tuple[str, str, Defines]]:
    fmt = get_format(name)
    assert isinstance(fmt, BlockFormat)
    spec = CastSpec(format=fmt, rounding=Rounding(mode=mode), overflow="saturate")  # type: ignore[arg-type]
    for dtype in (torch.bfloat16, torch.float32):
        for output in _OUTPUTS:
            defines = fast_defines(spec, dtype, output, bare := output == BFLOAT16 and fmt.tensor_scale)
            if defines is None or (output == BFLOAT16 and dtype == torch.float32 and not bare):
                continue
            run = fmt.block[1] or 4096
            vector, packed = vector_of(dtype, output, fmt.bits), output == PACKED and fmt.bits == 4
            yield "block_rows.cu", "cast_runs", run_macros(defines, dtype, vector, run)
            if run not in (16, 32, 128):
                continue
            yield "block_columns.cu", "cast_columns", column_macros(defines, run, vector, packed, False)
            if run <= 32 and output == BFLOAT16:
                yield "block_columns.cu", "cast_columns", column_macros(defines, run, vector, packed, True)
