# SPDX-License-Identifier: Apache-2.0
"""The lanes of a verb that torch needs: an operator with its shapes and its vmap rule, overloads for random keys.

A verb has four ways to its engine. Plain tensors in eager code go there directly (``is_plain`` of support/dispatch.py);
tensors that want a gradient take an autograd Function; traced, batched, fake and functional tensors an operator, which
``define_operator`` registers; and what torch.compile takes for a constant of a graph is a function that
``constant_in_graphs`` marks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fmtsim.spec.cast import RandomKey
from fmtsim.support.errors import FmtsimError

Key = RandomKey | torch.Tensor | None
"""Where random words come from, as verbs have it: numbers below 2**63, or int64 [seed, offset]; None draws none."""

LIBRARY = torch.library.Library("fmtsim", "DEF")
READS_HOST: Sequence[torch.Tag] = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))  # newer torch
"""Tags of operators that read numbers from the CPU: a CUDA graph would keep those of its recording."""


def define_operator(
    schema: str, function: Callable[..., Any], shapes: Callable[..., Any] | None,
    dispatch: str = "CompositeExplicitAutograd", tags: Sequence[torch.Tag] = (), *, keyed: bool = False,
) -> None:  # fmt: skip
    """Register an operator of torch: what computes it, and what it gives for tensors without numbers.

    Args:
        schema: Name, arguments and results.
        function: What computes it; autograd sees nothing of it.
        shapes: Returns empty tensors like the results; None for one that is made of other operators.
        dispatch: Key of the dispatcher.
        tags: Of the operator.
        keyed: It takes random keys: register an overload for calls with one as well (``with_keys``).
    """
    # the keyed overload reads a key from the CPU, which torch must know before it captures a CUDA graph
    name, _, rest = schema.partition("(")
    for signature, more in ((name, ()), (f"{name}.keyed", READS_HOST))[: 1 + keyed]:
        LIBRARY.define(f"{signature}({rest}", tags=(*tags, *more))
        LIBRARY.impl(signature, function, dispatch)
        if shapes is not None:
            torch.library.register_fake(f"fmtsim::{signature}", shapes, lib=LIBRARY)
            operator = getattr(getattr(torch.ops.fmtsim, name), signature[len(name) + 1 :] or "default")
            torch.library.register_vmap(f"fmtsim::{signature}", partial(_over_batch, operator), lib=LIBRARY)


def _over_batch(operator: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Run an operator for each tensor of a batch: blocks, and the places of random words, do not cross it."""
    # 1. the arguments of each call: batched ones unbound, others repeated
    dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))  # torch leaves out arguments that have their default
    count = info.batch_size
    rows = [_unbind(value, dim, count) for value, dim in zip(arguments, dims, strict=True)]
    # 2. one call for each; results are stacked again
    results = [operator(*row) for row in zip(*rows, strict=True)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)[:count], 0
    parts = [torch.stack(part)[:count] for part in zip(*results, strict=True)]
    return type(results[0])(parts), type(results[0])(0 for _ in parts)


def _unbind(value: Any, dim: Any, count: int) -> list[Any]:
    """Return an argument, or a list of them, for each tensor of a batch."""
    if isinstance(value, list) and isinstance(dim, list):
        return [list(values) for values in zip(*map(_unbind, value, dim, [count] * len(value)), strict=True)]
    # an argument that all calls share
    if not isinstance(value, torch.Tensor) or dim is None:
        return [value] * max(count, 1)
    if count:
        return list(value.movedim(dim, 0))
    return [value.new_zeros(value.movedim(dim, 0).shape[1:])]  # one of zeros tells what the result of none looks like


def with_keys(operator: Any, *keys: Any) -> Any:
    """Return the overload of an operator for a call with these random keys, which lie on the CPU, or with none."""
    return operator.default if all(key is None for key in keys) else operator.keyed


def key_tensor(key: Key) -> torch.Tensor | None:
    """Return a key as the operators take it: int64 [seed, offset] on the CPU."""
    return torch.tensor([signed(number) for number in key]) if isinstance(key, RandomKey) else key


def signed(number: int) -> int:
    """Return an integer of 64 bits as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def random_key(key: torch.Tensor | None) -> RandomKey | None:
    """Return a key that an operator got, int64 [seed, offset] on the CPU, as numbers."""
    return None if key is None else RandomKey(*key.tolist())


class OnceOnly(torch.autograd.Function):
    """Pass a gradient through, and raise an error that explains itself when it is differentiated again.

    ``OnceOnly.apply(gradient, message, *sources)``: sources are the tensors that the gradient depends on.
    """

    @staticmethod
    def forward(grad: torch.Tensor, message: str, *sources: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient."""
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep the message."""
        ctx.message = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Refuse."""
        raise FmtsimError(ctx.message)
