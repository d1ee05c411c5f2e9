# SPDX-License-Identifier: Apache-2.0
"""The calls that torch makes of linear layers in training; apart from models.py, which needs no torch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fmtsim.gemm.model_layers import DTYPES, PASSES, Shape
from fmtsim.spec.call import GemmCall, Layout
from fmtsim.support.errors import ArgumentError, shown

FP8_STEP = 16  # torch._scaled_mm takes K and N that are multiples of it
OUTPUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}


def check_dtypes(dtypes: Iterable[str]) -> None:
    """Raise ArgumentError where a name is none of ``DTYPES``."""
    wrong = [name for name in dtypes if not isinstance(name, str) or name not in DTYPES]
    if wrong:
        raise ArgumentError(f"dtypes {shown(wrong[0])} is not possible; choose from {', '.join(DTYPES)}")


def model_calls(
    shapes: Iterable[Shape], tokens: Iterable[int], dtypes: Sequence[str] = DTYPES, passes: Sequence[str] = PASSES
) -> list[GemmCall]:
    """Return the calls of linear layers in training, each once, those with equal K together.

    Args:
        shapes: Layers.
        tokens: Rows of the layers' input.
        dtypes: Of ``DTYPES``; FP8 calls that torch._scaled_mm refuses (K or N no multiple of 16) are left out.
        passes: Of ``PASSES``.
    """
    check_dtypes(dtypes)
    tokens = list(tokens)
    calls: dict[GemmCall, None] = {}
    for n, k, bias in shapes:  # a dict, as layers of several models have the same calls
        for m in tokens:
            for which in passes:
                for dtype in dtypes:
                    call = layer_call(which, m, n, k, bias, dtype)
                    if call is not None:
                        calls[call] = None
    return sorted(calls, key=lambda call: (call.a, call.fast_accum, call.k))  # operands of one K are made once


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
