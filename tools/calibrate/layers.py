# SPDX-License-Identifier: Apache-2.0
"""The calls of published models' linear layers, in training and as servers slice them."""

from collections.abc import Iterable, Sequence

from fmtsim.gemm.model_calls import check_dtypes, layer_call
from fmtsim.gemm.model_layers import DTYPES, PASSES, Model, Shape
from fmtsim.spec.call import GemmCall

SLICES = (2, 4, 8)  # of tensor-parallel layers


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


def parallel_layers(model: Model) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs as servers have them: projections in one layer, and slices of 2, 4 and 8 GPUs."""
    h, i, q, kv = model.hidden, model.intermediate, model.heads * model.head_dim, model.kv_heads * model.head_dim
    columns = [
        i,
        model.vocabulary,
        *([] if "a" in model.style else [q + 2 * kv]),
        *([2 * i] if "g" in model.style else []),
    ]
    shapes = [(n, k) for n, k, _ in model.layers] + [(n, h) for n in columns]
    for parts in SLICES:
        shapes += [(n // parts, h) for n in columns if n % parts == 0]  # column-parallel: outputs are sliced
        shapes += [(h, k // parts) for k in (q, i) if k % parts == 0]  # row-parallel: inputs are
    return tuple(dict.fromkeys(shapes))
