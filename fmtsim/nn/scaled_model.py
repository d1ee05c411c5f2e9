# SPDX-License-Identifier: Apache-2.0
"""Scale a whole model by fixed factors, as unit scaling and muS do: weights of unit variance, other operations.

While the model's forward runs, ``ScaledOperations`` replaces torch's operations: under ``UnitScaled`` by those of
``fmtsim.nn.unit_scaling``; under ``MuScaled`` norms move to the end of residual branches (Res-Post-LayerNorm).
Converted layers take their factors themselves (``Emulation.factors``).

The first batch runs once more beforehand to find the residual additions: those of which a norm layer read one operand
before. The other operand is the branch.

Sources: Blake et al., arXiv:2303.11257; u-muP, arXiv:2407.17465, appendix G for tau; Narayan et al., muS,
arXiv:2502.05967; unit-scaling a7b5b3c.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fmtsim.casts.arguments import check_features
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.targets.doubts import caller_level
from fmtsim.nn import unit_scaling as unit
from fmtsim.nn.conversion import conversion, inner_forward, settings, wrap
from fmtsim.nn.forward import Substituted, running_modules, undisturbed
from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.nn.operations import ACTIVATIONS, MEANINGS, PRODUCT_NAMES, ModelMode
from fmtsim.nn.unit_scaling import Factors, scaled_product
from fmtsim.support.errors import ArgumentError, CoverageWarning
from fmtsim.support.records import checked


@dataclass(slots=True, eq=False)
class ScaledModel:
    """Describe how a model is scaled.

    Args:
        by: ``"UnitScaled"`` or ``"MuScaled"``.
        tau: Part of the variance that comes from a residual branch, under muS.
        recipe: Name of the recipe, for errors.
        names: Names of the norms.
        heads: Modules with the weights that make logits, by module.
        taus: What the branch behind each norm weighs, in the model's order; None before the first batch.
        running: The modes of the forward passes under way.
        checked: Whether the loss is known to be scaled, or a warning said that it is not.
    """

    by: str
    tau: float
    recipe: str
    names: dict[nn.Module, str]
    heads: list[nn.Module]
    taus: dict[nn.Module, float] | None = None
    running: list["ScaledOperations"] = field(default_factory=list)
    checked: bool = False

    def __str__(self) -> str:
        return f"operations of {self.by}, weights rescaled to unit variance"


_MU: Final = frozenset({"product", "embedding", "add", "multiply"})  # operations that muS replaces
_UNIT: Final = _MU | {"activation", "attention", "dropout", "cross_entropy", "divide"}


# A mode, because additions, embeddings and losses are calls inside a model's forward, not modules.
class ScaledOperations(ModelMode):
    """Run the operations of a model as its ScaledModel says.

    Args:
        root: The model.
        how: How it is scaled.
    """

    def __init__(self, root: nn.Module, how: ScaledModel) -> None:
        super().__init__()
        self._root, self._how = root, how
        self._unit = self._how.by == "UnitScaled"
        self._scaled = _UNIT if self._unit else _MU
        self._skips: dict[Tensor, nn.Module] = {}  # what norms read, with the norm
        self._summands: set[Tensor] = set()  # embeddings and their sums
        self.loss: Tensor | None = None  # the last cross entropy
        self._heads = {getattr(module, "weight", None) for module in self._how.heads}  # their factor is 1 / K

    def __enter__(self) -> Any:
        self._how.running.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._how.running.pop()
        super().__exit__(*error)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Replace an operation."""
        meaning = MEANINGS.get(func, "other")
        if meaning not in self._scaled:
            return func(*args, **kwargs)
        self.repeat(self._root, self._how)
        return getattr(self, meaning)(func, *args, **kwargs)

    def norm(self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Return what a norm layer makes of x, which may begin a residual branch."""
        assert self._how.taus is not None
        tau = self._how.taus.get(module)
        if tau is None:  # this norm begins no branch: a final norm, or one of queries
            return self._normalised(module, forward, x)
        self._skips[x] = module  # until an addition to x closes the branch
        if not self._unit:
            return x  # muS normalises the branch's output instead (_residual)
        return self._normalised(module, forward, unit.scale_backward(x, tau / (1 + tau**2) ** 0.5))

    def _normalised(self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Run a norm layer; under unit scaling the gradients of its own Parameters have their factor."""
        if not self._unit:
            return forward(x)
        with Substituted(module, partial(unit.scale_backward, factor=(x.shape[-1] / max(x.numel(), 1)) ** 0.5)):
            return forward(x)

    def add(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Add; a residual branch, and one embedding to another, by their weights."""
        kind, skip, branch = self.kind(args, kwargs)
        if kind == "residual":
            y = self._residual(self._skips.pop(skip), skip, branch)
            return args[0].copy_(y) if func is Tensor.add_ else y
        if kind == "embeddings":
            y = unit.add(*args) if self._unit else (args[0] + args[1]) * 0.5**0.5
            self._summands.add(y)
            return y
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def kind(self, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
        """Return what an addition is, and of a residual one the skip connection and the branch."""
        if kwargs or len(args) != 2 or not all(isinstance(t, Tensor) for t in args):
            return "other", None, None
        a, b = args
        for skip, branch in ((a, b), (b, a)):  # models write x + f(x) and f(x) + x
            if skip in self._skips and skip.shape == branch.shape:
                return "residual", skip, branch
        summands = all(isinstance(view_base(t), nn.Parameter) or t in self._summands for t in (a, b))
        return "embeddings" if summands and a.dim() > 1 and b.dim() > 1 else "other", a, b

    def _residual(self, norm: nn.Module, skip: Tensor, branch: Tensor) -> Tensor:
        assert self._how.taus is not None
        tau = self._how.taus[norm]
        if self._unit:
            whole = (1 + tau**2) ** 0.5
            return unit.scale_forward(branch, tau / whole) + skip * (1 / whole)
        normalised = inner_forward(conversion(norm).changes["scaled"])(branch)
        return (1 - tau) ** 0.5 * skip + tau**0.5 * normalised  # Res-Post-LayerNorm: variances add up to 1

    def multiply(self, func: Any, a: Any, b: Any) -> Tensor:
        """Multiply; a number by which a model multiplies its embeddings is left out."""
        number = not isinstance(b, Tensor) or (b.numel() == 1 and not b.requires_grad)  # a factor such as sqrt(width)
        if number and isinstance(a, Tensor) and a in self._summands:
            return a
        return func(a, b)  # type: ignore[no-any-return]

    def embedding(self, func: Any, input: Tensor, weight: Tensor, *rest: Any, **more: Any) -> Tensor:
        """Look up an embedding."""
        if self._unit:
            weight = unit.scale_backward(weight, (weight.shape[0] / max(input.numel(), 1)) ** 0.5)
        y: Tensor = func(input, weight, *rest, **more)
        self._summands.add(y)
        return y

    def product(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply by a weight that is not converted."""
        return self._linear(*args, **kwargs) if func is F.linear else func(*args, **kwargs)  # type: ignore[no-any-return]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        factors = Factors(self._how.by, head=weight in self._heads)
        return unit.scaled_product(F.linear, input, weight, bias, factors(input, weight))

    def activation(self, func: Any, input: Tensor, inplace: bool = False, **how: Any) -> Tensor:
        """Apply a scaled activation function, never in place."""
        return getattr(unit, ACTIVATIONS[func])(input, **how)  # type: ignore[no-any-return]

    def dropout(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drop out with a factor, never in place."""
        return unit.dropout(input, p, training) if p else input

    def cross_entropy(self, func: Any, input: Tensor, target: Tensor, **how: Any) -> Tensor:
        """Return the loss, whose gradient has a factor; ``_look`` refused what has no scaled form."""
        options = {name: how[name] for name in ("ignore_index", "reduction") if name in how}
        self.loss = unit.cross_entropy(input, target, **options)
        return self.loss

    def divide(self, func: Any, a: Any, b: Any, **how: Any) -> Tensor:
        """Divide; of a sum of losses, which becomes a mean, the gradient is not divided."""
        if self.loss is None or a is not self.loss or how:  # how is rounding_mode=
            return func(a, b, **how)  # type: ignore[no-any-return]
        return unit.scale_forward(a, 1 / b)

    def attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run scaled attention."""
        mult = 1.0 if scale is None else scale * query.shape[-1] ** 0.5  # 1 for the usual scale
        return unit.attention(
            query, key, value, is_causal=is_causal, mult=mult, dropout_p=dropout_p, attn_mask=attn_mask,
            enable_gqa=enable_gqa,
        )  # fmt: skip


def view_base(t: Tensor) -> Tensor:
    """Return the tensor that another one is a view of, or itself."""
    return t if t._base is None else t._base


class _Trace(ScaledOperations):
    """Find the residual branches of a model, and what cannot be scaled."""

    def __init__(self, root: nn.Module, how: ScaledModel, running: list[nn.Module]) -> None:
        super().__init__(root, how)
        self._modules = running
        self._names = {module: name for name, module in root.named_modules()}
        self._products: set[Tensor] = set()
        self.branches: list[nn.Module] = []
        self.refused: dict[tuple[str, ...], str] = {}  # by what, why and the name without numbers
        self._inside = 0  # norms whose forward runs
        self.computes_loss = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Look at a call, and run it as it is."""
        if self._inside:
            return func(*args, **kwargs)
        kind, meaning = "other", MEANINGS.get(func, "other")
        if meaning == "add" and len(args) == 2:
            kind, skip, _ = self.kind(args, kwargs)  # the same decision as while the model is scaled
            if kind == "residual":
                self.branches.append(self._skips.pop(skip))
            sums = kind == "other" and _activations(args) == 2 and not all(t in self._products for t in args)
            # an activation function is a module without Parameters, and may add
            if sums and (not self._modules or next(self._modules[-1].parameters(), None) is not None):
                self._refuse("an addition", "of which a norm layer read no operand")
        elif self._unit and _activations(args) and getattr(func, "__name__", "") in _UNSCALED:
            self._refuse(func.__name__, "which has no scaled form")
        elif meaning == "cross_entropy":
            self.computes_loss = True
            if self._unit and (why := _loss_fault(*args, **kwargs)):
                self._refuse("cross_entropy", why)
        y = func(*args, **kwargs)  # this pass scales nothing
        if meaning == "embedding" or kind == "embeddings":
            self._summands.add(y)
        elif meaning == "multiply" and all(isinstance(t, Tensor) and t.numel() > 1 for t in args[:2]):
            self._products.add(y)  # a sum of two gated products is no residual addition
        return y

    def norm(self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Remember what a norm layer read."""
        self._skips[x] = module
        self._inside += 1
        try:
            return forward(x)
        finally:
            self._inside -= 1

    def _refuse(self, what: str, why: str) -> None:
        module = self._modules[-1] if self._modules else self._root
        name = self._names.get(module)
        like = re.sub(r"\d+", "*", name or "")  # one refusal for equal layers of all blocks
        refusal = f"{what} in {name or 'the model'} ({type(module).__name__}), {why}"
        self.refused.setdefault((what, why, like), refusal)


def _activations(args: Any) -> int:
    """Return how many of the arguments are tensors with a gradient, of more than one element, and no Parameters."""
    tensors = (t for t in args if isinstance(t, Tensor) and not isinstance(view_base(t), nn.Parameter))
    return sum(t.requires_grad and t.numel() > 1 for t in tensors)


def _loss_fault(logits: Tensor, target: Tensor, **how: Any) -> str | None:
    """Return why a cross entropy is not scaled."""
    usual = {"label_smoothing": 0.0, "weight": None, "size_average": None, "reduce": None}
    other = [f"{name}={value!r}" for name, value in how.items() if name in usual and value != usual[name]]
    other += [f"reduction={how['reduction']!r}"] if how.get("reduction", "mean") not in ("mean", "sum") else []
    if other:
        return f"whose {other[0]} has no scaled form"
    return None if logits.dim() == 2 and not target.is_floating_point() else "which takes logits of [rows, classes]"


# Functions of activations whose factors are not known.
_UNSCALED: Final = (PRODUCT_NAMES - {"linear"}) | {
    "multi_head_attention_forward", "tanh", "sigmoid", "softmax", "log_softmax", "elu", "selu", "celu", "leaky_relu",
    "prelu", "rrelu", "relu6", "glu", "logsigmoid", "hardtanh", "hardswish", "hardsigmoid", "mish", "softplus",
    "softsign", "exp", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "max_pool2d",
    "avg_pool2d", "adaptive_avg_pool2d", "dropout2d", "mse_loss", "nll_loss", "kl_div",
}  # fmt: skip


def attach_scales(model: nn.Module, how: ScaledModel, generator: Generator) -> None:
    """Scale a model whose layers are converted, and give its weights unit variance."""
    # 1. divide weights by their standard deviation, draw those that are zero, and set biases to zero
    drawn = generator if isinstance(generator, torch.Generator) else None
    for name, p in model.named_parameters():
        with torch.no_grad():
            if name.endswith("bias") and p.dim() == 1:
                p.zero_()
            elif p.dim() > 1 and p.numel() > 1:
                std = p.float().std()
                nn.init.normal_(p, generator=drawn) if std == 0 else p.div_(std.to(p.dtype))
    # 2. factors of converted layers, which replace those of their operations
    for module in model.modules():
        if isinstance(module, EmulatedModule) and module.emulation is not None:
            owner = getattr(module, "owner", module)  # a ParameterProduct belongs to its owner
            module.emulation.factors = Factors(how.by, head=owner in how.heads)
    # 3. the operations of norms, and of everything else while the model runs
    for norm in how.names:
        wrap(norm, "scaled", _normalise, how)
    wrap(model, "scaled", _scaled, how)


def _scaled(how: ScaledModel, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a model's forward with its operations replaced."""
    if how.taus is None:
        if torch.compiler.is_compiling():
            raise ArgumentError(f"{how.recipe} has to see one batch before torch.compile; call the model once")
        # Run a batch to find the residual branches, and what each weighs. It has saved-tensor hooks of its own, because
        # those of activation checkpointing would count its tensors.
        own = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with undisturbed(model), torch.enable_grad(), own, running_modules() as running:
            trace = _Trace(model, how, running)
            with trace:
                forward(*args, **kwargs)
        if trace.refused:
            refusals = list(trace.refused.values())
            refusals = refusals[:4] + [f"{len(refusals) - 4} more"] * (len(refusals) > 4)
            raise ArgumentError(
                f"{how.recipe} cannot scale {type(model).__name__}: {'; '.join(refusals)}. Write these "
                "with fmtsim.nn.unit_scaling in a model of UnitLinear or MuLinear layers, or choose another recipe"
            )
        how.checked = how.by == "MuScaled" or trace.computes_loss  # muS does not scale the loss
        count = len(trace.branches)  # an attention and a feed-forward branch for each block
        how.taus = {
            norm: how.tau if how.by == "MuScaled" else (count / 2 + i) ** -0.5 for i, norm in enumerate(trace.branches)
        }
    with ScaledOperations(model, how):
        y = forward(*args, **kwargs)
    if not how.checked and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        outputs = [t for t in tree_iter(y) if isinstance(t, Tensor) and t.requires_grad and t.numel() > 1]
        how.checked = bool(outputs)  # only the first gradient is checked
        for t in outputs[:1]:
            t.register_hook(partial(_check_gradient, type(model).__name__, how.recipe))
    return y


def _check_gradient(model: str, recipe: str, g: Tensor) -> None:
    """Warn where the loss that was computed outside of a model does not scale its gradient."""
    size = float(g.detach().float().square().mean().sqrt())
    if not 1 / 64 < size < 64:
        warnings.warn(
            f"the gradient of the output of {model} is of size {size:.2g}, and {recipe} takes it to be 1: compute the "
            "loss with fmtsim.nn.unit_scaling.cross_entropy, or by cross_entropy inside the model",
            CoverageWarning,
            stacklevel=caller_level(),
        )


def _normalise(
    how: ScaledModel, norm: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not how.running:
        raise ArgumentError(
            f"layer {how.names[norm]!r} is a part of a model that {how.recipe} scales, and ran without the model; call "
            "the whole model, or fmtsim.revert it first"
        )
    return how.running[-1].norm(norm, partial(forward, *args, **kwargs) if args or kwargs else forward, x)


class ScaledLinear(nn.Linear):
    """Apply ``y = f (x w^T + bias)`` with a factor of its own for y, for the gradient of x and for that of w.

    Weights begin as standard normal numbers, biases as zeros. Converted by ``fmtsim.convert`` the operands are
    quantised before the factors, which multiply the products: no operand needs a scale. The gradient of the bias has
    w's factor.
    """

    rule: ClassVar[Factors]

    def factors(self, x: Tensor) -> tuple[float, float, float]:
        """Return the factors of the output, of x's gradient and of w's gradient."""
        return self.rule(x, self.weight)

    def reset_parameters(self) -> None:
        """Draw the weight from the standard normal distribution."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x w^T + bias``."""
        y = F.linear(x, w)
        return y if bias is None else y + bias.to(y.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out_features]`` from ``[..., in_features]``."""
        check_features(input, self.weight)
        return scaled_product(self.product, input, self.weight, self.bias, self.factors(input))


class UnitLinear(ScaledLinear):
    """Apply a unit-scaled linear layer (factors: ``fmtsim.nn.unit_scaling.linear_factors``)."""

    rule = Factors("UnitScaled", head=False)


class UnitReadout(ScaledLinear):
    """Apply the unit-scaled layer that makes logits: ``1 / K`` forwards, ``N ** -0.5`` and ``T ** -0.5`` backwards."""

    rule = Factors("UnitScaled", head=True)


class MuLinear(ScaledLinear):
    """Apply a hidden layer of muS: ``x w^T / sqrt(fan_in)``, the same factor on the products of the gradients.

    Source: Narayan et al., muS, arXiv:2502.05967.
    """

    rule = Factors("MuScaled", head=False)


class MuReadout(ScaledLinear):
    """Apply the head of muS: ``x w^T / fan_in``; recipes leave it in bfloat16."""

    rule = Factors("MuScaled", head=True)


class MuResidual(nn.Module):
    """Add a normalised branch, ``sqrt(1 - tau) x + sqrt(tau) norm(branch(x))``, as muS does (Res-Post-LayerNorm).

    Args:
        branch: The module of the branch.
        width: Features that are normalised.
        tau: Part of the variance that comes from the branch; the paper takes 0.4 for 4 layers.
    """

    def __init__(self, branch: nn.Module, width: int, tau: float = 0.4) -> None:
        super().__init__()
        if not 0 <= checked("tau", tau, float) <= 1:
            raise ArgumentError(f"tau={tau} is not a part of the variance; choose 0 to 1")
        self.branch, self.norm, self.tau = branch, nn.LayerNorm(width), tau

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to itself."""
        check_features(x, self.norm.weight)
        return math.sqrt(1 - self.tau) * x + math.sqrt(self.tau) * self.norm(self.branch(x))


def mu_parameter_groups(model: nn.Module, lr: float, base_width: int = 256) -> Iterator[dict[str, Any]]:
    """Yield parameter groups whose learning rates carry over from one width to another (muS and, for Adam, u-muP).

    Weights of hidden layers learn at ``lr * sqrt(base_width / fan_in)``, under unit scaling embeddings too (by their
    features); heads, biases, norms and, under muS, embeddings at ``lr``. Weight decay, where an optimizer has one,
    stays the same for all widths.

    Args:
        model: One of UnitLinear or MuLinear layers, or one that ``fmtsim.convert`` scaled.
        lr: The learning rate at ``base_width``.
        base_width: The width at which all rates are equal; 1 gives the numbers of u-muP's own library.

    >>> from fmtsim import convert
    >>> model = nn.Sequential(nn.Linear(1024, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    >>> [group["lr"] for group in mu_parameter_groups(convert(model, recipe="mu_s"), lr=0.5)]
    [0.25, 0.5]
    """
    hidden: dict[Tensor, int] = {}
    how: ScaledModel | None = settings(model, "scaled")
    for module in model.modules():
        if isinstance(module, ScaledLinear):
            hidden |= {} if module.rule.head else {module.weight: module.in_features}
        elif how is None or module in how.heads or getattr(module, "owner", None) in how.heads:
            continue  # heads learn at lr; without a recipe only layers with factors are hidden ones
        elif isinstance(module, EmulatedModule):
            fan_in = next(iter(module.matrices(module)))[1]
            hidden |= {p: fan_in for _, p in module.named_parameters("", False) if p.dim() > 1}
        elif isinstance(module, nn.Linear):
            hidden[module.weight] = module.in_features
        elif isinstance(module, nn.Embedding) and how.by == "UnitScaled":
            hidden[module.weight] = module.embedding_dim
    for parameter in model.parameters():
        factor = math.sqrt(base_width / hidden[parameter]) if parameter in hidden else 1.0
        yield {"params": [parameter], "lr": lr * factor}


class _EmulatedScaled(EmulatedModule, ScaledLinear):
    """Quantise the operands of a layer with factors."""

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x w^T + bias`` under the module's quantisers."""
        y = self.gemm(x, w, None)
        return y if bias is None else y + bias.to(y.dtype)


for _original in (UnitLinear, UnitReadout, MuLinear, MuReadout):
    _fields = {"original_class": _original, "__doc__": _original.__doc__, "__module__": __name__}
    register_emulated(type(f"Emulated{_original.__name__}", (_EmulatedScaled, _original), _fields))
