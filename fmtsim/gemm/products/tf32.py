# SPDX-License-Identifier: Apache-2.0
"""Float32 operands rounded to TF32, to nearest even: whole, or in pieces while a CPU multiplies them."""

from functools import lru_cache

import torch
from torch import Tensor

from fmtsim import ops
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.engine import Engine
from fmtsim.spec.gemm_spec import GemmSpec

_ROUNDED = 1 << 21  # numbers of each operand that are rounded at a time: 8 MB


def to_tf32(x: Tensor) -> Tensor:
    """Return float32 numbers rounded."""
    return ops.quantize(x, _cast(), torch.float32, None, None)


def rounded_product(
    engine: Engine, a: Tensor, b: Tensor, c: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None,
    spec: GemmSpec, _: RandomKey | None, out: Tensor,
) -> None:  # fmt: skip
    """Do what ``engine.gemm`` does with operands rounded to TF32, pieces of them at a time; nothing is drawn."""
    (m, n), k = out.shape, a.shape[1]
    step = max(_ROUNDED // max(k, 1), 64)
    left, right = a.new_empty(min(step, m), k), b.new_empty(min(step, n), k)  # both are used again and again
    for first in range(0, n, step):
        columns = slice(first, min(first + step, n))
        y, scales = right[: columns.stop - first], None if scale_b is None else scale_b[columns]
        ops.quantize_out(b[columns], y, _cast(), None, None)
        for start in range(0, m, step):
            rows = slice(start, min(start + step, m))
            x, own = left[: rows.stop - start], None if c is None else c[rows, columns]
            ops.quantize_out(a[rows], x, _cast(), None, None)
            own_scales = None if scale_a is None else scale_a[rows]
            engine.gemm(x, y, own, own_scales, scales, spec, None, out[rows, columns])


@lru_cache
def _cast() -> str:
    fmt = get_format("tf32")
    assert isinstance(fmt, FloatFormat)
    return CastSpec(format=fmt, rounding=Rounding(), overflow="ieee").to_json()
