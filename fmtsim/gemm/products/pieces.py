# SPDX-License-Identifier: Apache-2.0
"""Operands made ready while a CPU multiplies them, in pieces: float32 rounded to TF32, FP4 unpacked."""

from functools import lru_cache

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.operands import FP4, inner_length, unpack_fp4
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.engine import Engine
from fmtsim.spec.gemm_spec import GemmSpec

_NUMBERS = 1 << 21  # of each operand that are made ready at a time: 8 MB of TF32, 2 MB of FP4


def to_tf32(x: Tensor) -> Tensor:
    """Return float32 numbers rounded."""
    return ops.quantize(x, _cast(), torch.float32, None, None)


def multiply_in_pieces(
    engine: Engine, a: Tensor, b: Tensor, c: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None,
    spec: GemmSpec, _: RandomKey | None, out: Tensor,
) -> None:  # fmt: skip
    """Do what ``engine.gemm`` does with float32 operands rounded to TF32 and FP4 unpacked; nothing is drawn."""
    m, n = out.shape
    (x_buffer, rows), (y_buffer, columns) = _buffer(a), _buffer(b)
    for first in range(0, n, columns):
        across = slice(first, min(first + columns, n))
        y, scales = _ready(b[across], y_buffer), None if scale_b is None else scale_b[across]
        for start in range(0, m, rows):
            down = slice(start, min(start + rows, m))
            x, own = _ready(a[down], x_buffer), None if c is None else c[down, across]
            engine.gemm(x, y, own, None if scale_a is None else scale_a[down], scales, spec, None, out[down, across])


def _buffer(x: Tensor) -> tuple[Tensor, int]:
    """Return memory for a piece of an operand, used again and again, and how many of its rows a piece has."""
    dtype = torch.float8_e4m3fn if x.dtype == FP4 else torch.float32
    k = inner_length(x)
    rows = min(max(_NUMBERS // max(k, 1), 64), x.shape[0])
    return torch.empty(rows, k, dtype=dtype), rows


def _ready(x: Tensor, buffer: Tensor) -> Tensor:
    """Return rows of an operand as engines take them, in the buffer."""
    out = buffer[: x.shape[0]]
    if x.dtype == FP4:
        unpack_fp4(x, out)
    elif x.dtype == torch.float32:
        ops.quantize_out(x, out, _cast(), None, None)
    else:
        return x
    return out


@lru_cache
def _cast() -> str:
    fmt = get_format("tf32")
    assert isinstance(fmt, FloatFormat)
    return CastSpec(format=fmt, rounding=Rounding(), overflow="ieee").to_json()
