# SPDX-License-Identifier: Apache-2.0
"""Save activations of norms, activation functions and gated products in low precision for the backward pass (COAT).

Each such operator saves the codes of its inputs, and its backward pass runs it again on what they decode to. A norm is
a module; GELU, SiLU and the product of one of them with a tensor of its shape are seen by a torch function mode while
the model's forward runs. Layers keep their own codes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.lanes import OnceOnly
from fmtsim.nn.conversion import wrap
from fmtsim.nn.forward import Substituted
from fmtsim.nn.operations import ModelMode
from fmtsim.recipes.build import SavedActivations
from fmtsim.support.dispatch import without_own_modes

_ACTIVATIONS: Final = (F.silu, F.gelu)  # gated products multiply their outputs
_ONCE: Final = (
    "activations saved in low precision cannot be differentiated twice: the gradient of a rounded tensor is not "
    "defined; compute second derivatives on the unconverted model (fmtsim.revert)"
)


@dataclass(slots=True, eq=False)
class Saving:
    """List the activations of a model that are saved in low precision.

    Args:
        how: The format.
        norms: Norm layers.
        seen: The functions that were, by name.
    """

    how: SavedActivations
    norms: list[nn.Module]
    seen: dict[str, None] = field(default_factory=dict)

    def told(self, module: nn.Module) -> str:
        """Return what a norm, or the model, keeps, for tables."""
        if module in self.norms:
            return f"input kept in {self.how.words}"
        count = len(self.norms)
        return f"{self.how}: {', '.join([f'{count} norm' + 's' * (count != 1), *self.seen])}"


# A mode, because activation functions and gated products are calls inside a model's forward, not modules.
class SavingMode(ModelMode):
    """Save the inputs of activation functions and gated products inside a ``with`` in low precision.

    Args:
        root: The model.
        how: Which they are.
    """

    def __init__(self, root: nn.Module, how: Saving) -> None:
        super().__init__()
        self._root, self._how = root, how
        self._activated: Tensor | None = None  # the last output of an activation function

    def activation(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the input of SiLU or GELU."""
        if func not in _ACTIVATIONS or not args:
            return func(*args, **kwargs)
        how = {name: value for name, value in kwargs.items() if name != "inplace"}  # backward needs the input
        y = self._activated = self._saved(func.__name__, partial(func, **how) if how else func, args[:1])
        return y

    def multiply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Save both factors of a gated product."""
        a, b = args if len(args) == 2 else (None, None)
        activated = self._activated is not None and (a is self._activated or b is self._activated)
        gated = activated and isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape
        if kwargs or not gated:
            return func(*args, **kwargs)
        self._activated = None  # one output of an activation has one gate
        return self._saved("gated products", torch.mul, args)

    def _saved(self, name: str, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        self.repeat(self._root, self._how)
        if not torch.compiler.is_compiling():
            self._how.seen.setdefault(name)
        return saved(self._how.how, run, inputs)


def saved(
    how: SavedActivations, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...] = ()
) -> Tensor:
    """Return ``run(*inputs)`` in the dtype of the first input, of which autograd keeps the codes of the inputs.

    Args:
        how: The format; with ``flows`` the function sees the decoded values, in float32.
        run: A function of tensors, called again in the backward pass.
        inputs: Tensors with a last axis.
        parameters: Tensors that ``run`` reads beside them and that want gradients.
    """
    if torch.compiler.is_compiling() and how.flows:  # the compiler decides what it keeps
        return run(*(_Through.apply(x, how.decode(*how.encode(x))) for x in inputs)).to(inputs[0].dtype)
    if torch.compiler.is_compiling():
        return torch._dynamo.disable(_Saved.apply)(run, how, parameters, *inputs, *parameters)
    return _Saved.apply(run, how, parameters, *inputs, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Saved(torch.autograd.Function):
    """Keep codes; the backward pass runs the function on what they decode to."""

    @staticmethod
    def forward(ctx: Any, run: Any, how: SavedActivations, parameters: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        """Return the function's value."""
        inputs = tensors[: len(tensors) - len(parameters)]  # Parameters come last, for their gradients
        ctx.run, ctx.how, ctx.parameters, ctx.dtypes = run, how, parameters, [x.dtype for x in inputs]
        with without_own_modes():
            saved = [how.encode(x) for x in inputs] if how.flows or any(ctx.needs_input_grad) else []
            ctx.save_for_backward(*(part for parts in saved for part in parts))
            y = run(*(how.decode(*parts) for parts in saved)) if how.flows else run(*inputs)
        return y.to(inputs[0].dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of inputs and parameters."""
        needs, parts = ctx.needs_input_grad[3:], ctx.saved_tensors  # codes and scales of each input
        with torch.enable_grad(), without_own_modes():
            inputs = [ctx.how.decode(*parts[i : i + 2]).requires_grad_() for i in range(0, len(parts), 2)]
            if not ctx.how.flows:
                inputs = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, ctx.dtypes, strict=True)]
            y = ctx.run(*inputs)  # runs again on the decoded inputs
        wanted = [t for t, needed in zip((*inputs, *ctx.parameters), needs, strict=True) if needed]
        grads = iter(torch.autograd.grad(y, wanted, g.to(y.dtype)))
        dtypes = [*ctx.dtypes, *(p.dtype for p in ctx.parameters)]
        gradients = [next(grads).to(dtype) if needed else None for needed, dtype in zip(needs, dtypes, strict=True)]
        if torch.is_grad_enabled():  # create_graph=True: only then on
            end = torch.zeros((), device=g.device, requires_grad=True)
            gradients = [None if d is None else OnceOnly.apply(d, _ONCE, end) for d in gradients]  # type: ignore[no-untyped-call]
        return None, None, None, *gradients


class _Through(torch.autograd.Function):
    """Put other values in place of x; the gradient is x's."""

    @staticmethod
    def forward(x: Tensor, values: Tensor) -> Tensor:
        """Return the values."""
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the dtype."""
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient."""
        return g.to(ctx.dtype), None


def _normalised(
    how: Saving, module: nn.Module, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a norm layer, which saves its input in low precision; only in training, as in the source."""
    if not module.training or args or kwargs:
        return forward(x, *args, **kwargs)
    parameters = tuple(module.parameters(recurse=False))
    wide = how.how.flows and any(p.dtype != torch.float32 for p in parameters)  # decoded inputs are float32
    return saved(how.how, partial(_in_float32, module, forward) if wide else forward, (x,), parameters)


def _in_float32(module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    with Substituted(module, Tensor.float):
        return forward(x)


def _saving(how: Saving, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not model.training:
        return forward(*args, **kwargs)
    with SavingMode(model, how):
        return forward(*args, **kwargs)


def attach_saving(model: nn.Module, how: Saving) -> None:
    """Make a model save its activations in low precision while it trains."""
    for norm in how.norms:
        wrap(norm, "saving", _normalised, how)
    wrap(model, "saving", _saving, how)
