# SPDX-License-Identifier: Apache-2.0
"""The values of a tensor under a quantiser that is more than a cast to a format: what a product would be given."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.arguments import Generator, check_blocks, drawn_key, inner_dim
from fmtsim.casts.lanes import random_key
from fmtsim.gemm.layers.quantize_operand import quantize_operand, wide_dtype
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys, block_of
from fmtsim.spec.quantizer import Hadamard, Quantizer
from fmtsim.support.errors import FormatError

_SCALES = 1 << 40  # how far the keys of scales lie from those of elements


def quantize_tensor(x: Tensor, quantizer: Quantizer, *, dim: int, generator: Generator, pad: bool) -> Tensor:
    """Return the quantised values of a tensor, float32 (float64 for float64), with the quantiser's gradient.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        quantizer: Transforms, scale rule and second cast are those of an operand whose inner axis is ``dim``.
        dim: The axis that blocks run along.
        generator: Random words, as in ``fmtsim.quantize``.
        pad: As in ``fmtsim.quantize``.

    Raises:
        FormatError: The quantiser rotates, which two operands of a product undo together, or needs a training step.
    """
    rotates = any(isinstance(transform, Hadamard) for transform in quantizer.transforms)
    scaling, then = quantizer.scaling, quantizer.then
    remembers = any(q.scaling is not None and q.scaling.history is not None for q in (quantizer, then or quantizer))
    if rotates or remembers or quantizer.source in ("forward", "stored"):
        why = "a rotation that its product undoes" if rotates else "what an earlier pass or step left"
        raise FormatError(f"Quantizer [{quantizer}] has {why}, so a tensor alone has no values; leave that field out")
    # 1. the tensor as a matrix, its blocks along the last axis
    inner = inner_dim(x, dim)
    check_blocks(x, ("Quantizer", *block_of(quantizer)) if scaling or then else None, inner, pad)
    # 2. random keys of elements and of scales
    keys = Keys()
    if quantizer.is_stochastic:
        key = random_key(drawn_key(generator, x.device))
        assert key is not None
        keys = Keys(key, RandomKey(key.seed, key.offset + _SCALES))
    return _Values.apply(x, quantizer, inner, keys)  # type: ignore[no-any-return]


class _Values(torch.autograd.Function):
    """Quantise forwards; gradients pass by the quantiser's rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, inner: int, keys: Keys) -> Tensor:  # type: ignore[override]
        moved = x.movedim(inner, -1) if x.dim() else x.reshape(1)
        back = (lambda m: m.reshape(moved.shape).movedim(-1, inner)) if x.dim() else (lambda m: m.reshape(()))
        operand = quantize_operand(moved.flatten(0, -2) if moved.dim() > 1 else moved[None], quantizer, keys)
        ctx.slope = None if operand.slope is None else back(operand.slope)
        return back(operand.values(wide_dtype(x.dtype)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return g if ctx.slope is None else g * ctx.slope, None, None, None
