# SPDX-License-Identifier: Apache-2.0
"""The calls that torch makes of linear layers in training; apart from models.py, which needs no torch."""

from collections.abc import Iterable
from typing import Any

import torch

from fmtsim.gemm.model_layers import DTYPES
from fmtsim.spec.call import GemmCall, Layout
from fmtsim.support.errors import ArgumentError, shown

FP8_STEP = 16  # torch._scaled_mm takes K and N that are multiples of it
OUTPUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}


def check_dtypes(dtypes: Iterable[str]) -> None:
    """Raise ArgumentError where a name is none of ``DTYPES``."""
    wrong = [name for name in dtypes if not isinstance(name, str) or name not in DTYPES]
    if wrong:
        raise ArgumentError(f"dtypes {shown(wrong[0])} is not possible; choose from {', '.join(DTYPES)}")


def layer_call(which: str, tokens: int, n: int, k: int, bias: bool, dtype: str) -> GemmCall | None:
    """Return what torch calls for ``y = x w^T``, ``dx = g w`` or ``dw = g^T x`` with row-major x, w and g.

    None where torch._scaled_mm refuses the sizes.
    """
    sizes = {"forward": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}[which]
    facts: dict[str, Any] = dict(zip("mnk", sizes, strict=True))
    if dtype.startswith("fp8"):
        if sizes[1] % FP8_STEP or sizes[2] % FP8_STEP:
            return None
        fast = dtype == "fp8_fast"  # use_fast_accum: no promotion every 128 products
        return GemmCall(operation="scaled_mm", a="e4m3", b="e4m3", out=torch.bfloat16, scaling="tensor",
                        fast_accum=fast, **facts)  # fmt: skip
    out = OUTPUTS[dtype]
    if which == "forward":
        return GemmCall(operation="linear", a=dtype, b=dtype, out=out, bias=bias, **facts)
    # dx = g w: K (outputs) runs along the rows of g and the columns of w. dw = g^T x: K (tokens) along columns of both.
    layout: Layout = "row" if which == "dgrad" else "column"
    return GemmCall(operation="mm", a=dtype, b=dtype, out=out, a_layout=layout, b_layout="column", **facts)
