"""Gradients that can be taken once only."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import FmtsimError


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
