# SPDX-License-Identifier: Apache-2.0
"""The operations of a scaled model: what runs in place of torch's while a model's forward does.

Under ``UnitScaled`` they are those of ``fmtsim.nn.unit_scaling``; under ``MuScaled`` norms move to the end of residual
branches (Res-Post-LayerNorm). Converted layers take their factors themselves (``Emulation.factors``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.nn import unit_scaling as unit
from fmtsim.nn.unit_scaling import Factors
from fmtsim.nn.wrapped import Substituted, forward_of
from fmtsim.scaling.repeats import repeat_under
from fmtsim.support.dispatch import OwnMode

SCALED: Final = "_fmtsim_scaled"  # on the root and on each norm: the ScaledModel
FORWARD: Final = "_fmtsim_scaled_forward"  # on each of them: a forward that the instance had of its own, or None


@dataclass(slots=True, eq=False)
class ScaledModel:
    """Say how a model is scaled.

    Args:
        by: ``"UnitScaled"`` or ``"MuScaled"``.
        tau: Part of the variance that comes from a residual branch, under muS.
        recipe: Name of the recipe, for errors.
        names: Names of the norms.
        heads: Modules with the weights that make logits, by module.
        taus: What the branch behind each norm weighs, in the model's order; None before the first batch.
        running: The modes of the forward passes under way.
        checked: Whether the loss is known to be scaled, or somebody was told otherwise.
    """

    by: str
    tau: float
    recipe: str
    names: dict[nn.Module, str]
    heads: list[nn.Module]
    taus: dict[nn.Module, float] | None = None
    running: list["Operations"] = field(default_factory=list)
    checked: bool = False

    def __str__(self) -> str:
        return f"operations of {self.by}, weights rescaled to unit variance"


class Operations(OwnMode):
    """Run the operations of a model as its ScaledModel says.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self._how: ScaledModel = root.__dict__[SCALED]
        self._unit = self._how.by == "UnitScaled"
        self._skips: dict[Tensor, nn.Module] = {}  # what norms read, with the norm
        self._summands: set[Tensor] = set()  # embeddings and their sums
        self.loss: Tensor | None = None  # the last cross entropy
        self._heads = {getattr(module, "weight", None) for module in self._how.heads}

    def __enter__(self) -> Any:
        self._how.running.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._how.running.pop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an operation."""
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.unflatten:  # torch.compile cannot trace this method under a mode around this one
            func = torch.unflatten
        replaced = (_UNIT if self._unit else _MU).get(func)
        if replaced is None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            repeat_under((SCALED, self._root), partial(Operations, self._root))
        return replaced(self, func, *args, **kwargs)

    def norm(self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Return what a norm layer makes of x, which may begin a residual branch."""
        assert self._how.taus is not None
        tau = self._how.taus.get(module)
        if tau is None:
            return self._normalised(module, forward, x)
        self._skips[x] = module
        if not self._unit:
            return x
        return self._normalised(module, forward, unit.scale_backward(x, tau / (1 + tau**2) ** 0.5))

    def _normalised(self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Run a norm layer; under unit scaling the gradients of its own Parameters have their factor."""
        if not self._unit:
            return forward(x)
        with Substituted(module, partial(unit.scale_backward, factor=(x.shape[-1] / max(x.numel(), 1)) ** 0.5)):
            return forward(x)

    def add(self, func: Any, a: Any, b: Any, **more: Any) -> Tensor:
        """Add; a residual branch, and one embedding to another, by their weights."""
        kind, skip, branch = self.kind(a, b, more)
        if kind == "residual":
            y = self._residual(self._skips.pop(skip), skip, branch)
            return a.copy_(y) if func is Tensor.add_ else y
        if kind == "embeddings":
            y = unit.add(a, b) if self._unit else (a + b) * 0.5**0.5
            self._summands.add(y)
            return y
        return func(a, b, **more)  # type: ignore[no-any-return]

    def kind(self, a: Any, b: Any, more: Any = None) -> tuple[str, Any, Any]:
        """Return what an addition is, and of a residual one the skip connection and the branch."""
        if more or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return "other", a, b
        for skip, branch in ((a, b), (b, a)):
            if skip in self._skips and skip.shape == branch.shape:
                return "residual", skip, branch
        summands = all(isinstance(base_of(t), nn.Parameter) or t in self._summands for t in (a, b))
        return "embeddings" if summands and a.dim() > 1 and b.dim() > 1 else "other", a, b

    def _residual(self, norm: nn.Module, skip: Tensor, branch: Tensor) -> Tensor:
        assert self._how.taus is not None
        tau = self._how.taus[norm]
        if self._unit:
            whole = (1 + tau**2) ** 0.5
            return unit.scale_forward(branch, tau / whole) + skip * (1 / whole)
        normalised = forward_of(norm, FORWARD)(branch)
        return (1 - tau) ** 0.5 * skip + tau**0.5 * normalised

    def multiply(self, func: Any, a: Any, b: Any) -> Tensor:
        """Multiply; a number by which a model multiplies its embeddings is left out."""
        number = not isinstance(b, Tensor) or (b.numel() == 1 and not b.requires_grad)
        if number and isinstance(a, Tensor) and a in self._summands:
            return a
        return func(a, b)  # type: ignore[no-any-return]

    def embedding(self, func: Any, tokens: Tensor, weight: Tensor, *rest: Any, **more: Any) -> Tensor:
        """Look up an embedding."""
        if self._unit:
            weight = unit.scale_backward(weight, (weight.shape[0] / max(tokens.numel(), 1)) ** 0.5)
        y: Tensor = func(tokens, weight, *rest, **more)
        self._summands.add(y)
        return y

    def linear(self, func: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by a weight that is not converted."""
        factors = Factors(self._how.by, head=w in self._heads)
        return unit.scaled_product(func, x, w, bias, factors(x, w))


def base_of(t: Tensor) -> Tensor:
    """Return the tensor that another one is a view of, or itself."""
    return t if t._base is None else t._base


def _activation(scaled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(mode: Operations, func: Any, x: Tensor, inplace: bool = False, **how: Any) -> Tensor:
        return scaled(x, **how)

    return run


def _dropout(
    mode: Operations, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return unit.dropout(x, p, training) if p else x


def _cross_entropy(mode: Operations, func: Any, logits: Tensor, target: Tensor, **how: Any) -> Tensor:
    given = {name: how[name] for name in ("ignore_index", "reduction") if name in how}
    mode.loss = unit.cross_entropy(logits, target, **given)
    return mode.loss


def _divide(mode: Operations, func: Any, a: Any, b: Any, **how: Any) -> Tensor:
    """Divide; of a sum of losses, which becomes a mean, the gradient is not divided."""
    if mode.loss is None or a is not mode.loss or how:
        return func(a, b, **how)  # type: ignore[no-any-return]
    return unit.scale_forward(a, 1 / b)


def _attention(
    mode: Operations, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    mult = 1.0 if scale is None else scale * query.shape[-1] ** 0.5  # 1 for the usual scale
    return unit.attention(
        query, key, value, is_causal=is_causal, mult=mult, dropout_p=dropout_p, attn_mask=attn_mask,
        enable_gqa=enable_gqa,
    )  # fmt: skip


ADDITIONS: Final = (torch.add, Tensor.add, Tensor.add_)
MULTIPLICATIONS: Final = (torch.mul, Tensor.mul)
_MU: Final[dict[Any, Callable[..., Tensor]]] = {
    F.linear: Operations.linear,
    F.embedding: Operations.embedding,
    **dict.fromkeys(ADDITIONS, Operations.add),
    **dict.fromkeys(MULTIPLICATIONS, Operations.multiply),
}
_UNIT: Final[dict[Any, Callable[..., Tensor]]] = _MU | {
    F.gelu: _activation(unit.gelu), F.silu: _activation(unit.silu), F.relu: _activation(unit.relu),
    torch.relu: _activation(unit.relu), Tensor.relu: _activation(unit.relu),
    F.scaled_dot_product_attention: _attention, F.dropout: _dropout, F.cross_entropy: _cross_entropy,
    torch.div: _divide, Tensor.div: _divide, Tensor.__truediv__: _divide,
}  # fmt: skip
