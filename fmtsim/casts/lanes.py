# SPDX-License-Identifier: Apache-2.0
"""The lanes of a verb, made of what its room names: what computes it, the shapes of its results, and its gradient.

1. ``fmtsim.support.dispatch.is_direct``: plain tensors go to their engine around torch's dispatcher.
2. ``define_gradient``: other eager calls take an autograd Function, with forward-mode derivatives and a rule for vmap.
3. ``define_operator``: torch.compile, export, fake tensors and modes of users see an operator of torch.
4. ``fmtsim.support.dispatch.constant_in_graphs``: what names and records come to is a constant of a compiled graph.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fmtsim.spec.cast import RandomKey
from fmtsim.support.errors import FmtsimError

Key = RandomKey | torch.Tensor | None
"""Where random words come from, as verbs have it: numbers below 2**63, or int64 [seed, offset]; None draws none."""

_library = torch.library.Library("fmtsim", "DEF")
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
    name, _, rest = schema.partition("(")
    # a key lies on the CPU: only the overload that takes one is kept out of CUDA graphs
    for signature, more in ((name, ()), (f"{name}.keyed", READS_HOST))[: 1 + keyed]:
        _library.define(f"{signature}({rest}", tags=(*tags, *more))
        _library.impl(signature, function, dispatch)  # below autograd, for every device
        if shapes is not None:
            torch.library.register_fake(f"fmtsim::{signature}", shapes, lib=_library)
            operator = getattr(getattr(torch.ops.fmtsim, name), signature[len(name) + 1 :] or "default")
            torch.library.register_vmap(f"fmtsim::{signature}", partial(_over_batch, operator), lib=_library)


def define_gradient(
    name: str, keep: Callable[..., None], backward: Callable[..., Any], jvp: Callable[..., Any], forward: Any
) -> type[torch.autograd.Function]:  # fmt: skip
    """Give an operator its gradient, and return the autograd Function of eager calls, which has the same one.

    Only the Function has the forward-mode derivative: torch has no such rule for operators.

    Args:
        name: Of the operator; its overload with keys gets the gradient, too.
        keep: ``keep(ctx, inputs, output)`` stores in a context what derivatives need.
        backward: ``backward(ctx, gradient)`` returns the gradients of the inputs, None for those without one.
        jvp: ``jvp(ctx, *tangents)`` returns the tangent of the output.
        forward: What the Function computes, of the operator's inputs.
    """
    # 1. the operator, in graphs of compilers and under modes of users
    for overload in getattr(torch.ops.fmtsim, name).overloads():
        signature = f"fmtsim::{name}.{overload}".removesuffix(".default")
        torch.library.register_autograd(signature, backward, setup_context=keep, lib=_library)
    # 2. the Function: torch derives its rule for vmap from these steps
    steps = {"forward": forward, "setup_context": keep, "backward": backward, "jvp": jvp}
    members = {step: staticmethod(function) for step, function in steps.items()}
    return type(f"_{name.title()}", (torch.autograd.Function,), {"generate_vmap_rule": True, **members})


def keep_dtypes(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Store the dtypes of x and of the output in a context: what the gradient of a cast needs."""
    ctx.dtypes = inputs[0].dtype, output.dtype


def plain_twin(
    name: str, keep: Callable[..., None], backward: Callable[..., Any], forward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Return a Function for tensors that are plain but for a gradient, with the arguments of ``define_gradient``.

    It fills its context itself, so that torch does not ask which transforms look on: a fraction of the host's time.
    """

    def run(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        keep(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(run), "backward": staticmethod(backward)}
    return type(f"_Plain{name.title()}", (torch.autograd.Function,), members)


def once_only(message: str, gradients: Sequence[Any], *sources: torch.Tensor | None) -> list[Any]:
    """Return the gradients of a backward pass, which depend on sources: to differentiate one again is an error."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a backward pass has it on for create_graph=True
        return list(gradients)
    return [None if grad is None else OnceOnly.apply(grad, message, *sources) for grad in gradients]


class OnceOnly(torch.autograd.Function):
    """Pass a gradient through; see ``once_only``."""

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


def _over_batch(operator: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Run an operator for each tensor of a batch: blocks, and the places of random words, do not cross it."""
    # 1. the arguments of each call
    dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))  # torch leaves out arguments that have their default
    count = info.batch_size
    rows = [_unstacked(value, dim, count) for value, dim in zip(arguments, dims, strict=True)]
    # 2. one call a tensor, the results side by side in the first dimension
    results = [operator(*row) for row in zip(*rows, strict=True)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)[:count], 0
    parts = [torch.stack(part)[:count] for part in zip(*results, strict=True)]
    return type(results[0])(parts), type(results[0])(0 for _ in parts)


def _unstacked(value: Any, dim: Any, count: int) -> list[Any]:
    """Return an argument, or a list of them, for each tensor of a batch."""
    if isinstance(value, list) and isinstance(dim, list):
        return [list(values) for values in zip(*map(_unstacked, value, dim, [count] * len(value)), strict=True)]
    if not isinstance(value, torch.Tensor) or dim is None:
        return [value] * max(count, 1)
    if count:
        return list(value.movedim(dim, 0))
    return [value.new_zeros(value.movedim(dim, 0).shape[1:])]  # one of zeros tells what the result of none looks like


def with_keys(operator: Any, *keys: Any) -> Any:
    """Return the overload of an operator for a call with these random keys, which lie on the CPU, or with none."""
    for key in keys:
        if key is not None:
            return operator.keyed
    return operator.default


def key_tensor(key: Key) -> torch.Tensor | None:
    """Return a key as the operators take it: int64 [seed, offset] on the CPU."""
    return torch.tensor([signed(number) for number in key]) if isinstance(key, RandomKey) else key


def signed(number: int) -> int:
    """Return an integer of 64 bits as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def random_key(key: Key) -> RandomKey | None:
    """Return a key as engines take it: numbers, also of int64 [seed, offset] on the CPU."""
    return RandomKey(*key.tolist()) if isinstance(key, torch.Tensor) else key


def or_empty(like: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    """Return a part as operators have it, whose lists of tensors know no None: there, empty of one dimension."""
    return like.new_empty(0, dtype=torch.float32) if part is None else part


def or_none(part: torch.Tensor) -> torch.Tensor | None:
    """Undo ``or_empty``: no scale or offset has one dimension."""
    return None if part.dim() == 1 else part
