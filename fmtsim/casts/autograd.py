# SPDX-License-Identifier: Apache-2.0
"""The gradient of a cast, which passes straight through, and gradients that can be taken once only."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.support.dispatch import is_bare
from fmtsim.support.errors import FmtsimError


def quantize(x: torch.Tensor, text: str, dtype: torch.dtype, key: ops.Key, words: torch.Tensor | None) -> torch.Tensor:
    """Do what ``ops.quantize`` does, with a derivative that passes straight through in every mode of torch."""
    if words is not None or not is_bare(x):
        return _StraightThrough.apply(x, text, dtype, ops.key_tensor(key), words)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _PlainStraightThrough.apply(x, text, dtype, key)  # type: ignore[no-any-return]
    return ops.quantize_plain(x, text, dtype, key)


class _StraightThrough(torch.autograd.Function):
    """Quantise forwards, pass derivatives through: the operator's own rule, and the forward-mode one it cannot have."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, spec, dtype, key, words):  # type: ignore[no-untyped-def]
        return ops.quantize(x, spec, dtype, key, words)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.dtypes = inputs[0].dtype, output.dtype

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad.to(ctx.dtypes[0]), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):  # type: ignore[no-untyped-def]
        return tangent.to(ctx.dtypes[1])


class _PlainStraightThrough(torch.autograd.Function):
    """Do the same where no transform looks on: torch asks far less of a Function that fills its context itself."""

    @staticmethod
    def forward(ctx, x, text, dtype, key):  # type: ignore[no-untyped-def]
        ctx.dtype = x.dtype
        return ops.quantize_plain(x, text, dtype, key)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad.to(ctx.dtype), None, None, None


class OnceOnly(torch.autograd.Function):
    """Pass a gradient through, and say so clearly when someone differentiates it again.

    ``OnceOnly.apply(gradient, message, *sources)``: sources are the tensors that the gradient depends on.
    """

    @staticmethod
    def forward(grad: Tensor, message: str, *sources: Tensor | None) -> Tensor:
        """Return the gradient."""
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the message."""
        ctx.message = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Refuse."""
        raise FmtsimError(ctx.message)
