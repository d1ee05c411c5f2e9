# SPDX-License-Identifier: Apache-2.0
"""Scale a whole model by fixed factors, as unit scaling and muS do: weights of unit variance, other operations.

Which additions are residual the first batch says, which runs once more beforehand: those of one operand that a norm
layer read before. The other operand is the branch.

Sources: Blake et al., arXiv:2303.11257; u-muP, arXiv:2407.17465, appendix G for tau; Narayan et al., muS,
arXiv:2502.05967; unit-scaling a7b5b3c.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.targets.doubts import caller_level
from fmtsim.nn.dry_run import running_modules, undisturbed
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.scaled_operations import ADDITIONS, FORWARD, MULTIPLICATIONS, SCALED, Operations, ScaledModel, base_of
from fmtsim.nn.unit_scaling import Factors
from fmtsim.nn.wrapped import unwrap_parts, wrap_parts
from fmtsim.support.errors import ArgumentError, CoverageWarning

_NORM: Final = re.compile(r"(RMS|Layer)_?Norm", re.IGNORECASE)


class _Trace(Operations):
    """Find the residual branches of a model, and what cannot be scaled."""

    def __init__(self, root: nn.Module, running: list[nn.Module]) -> None:
        super().__init__(root)
        self._modules = running
        self._names = {module: name for name, module in root.named_modules()}
        self._products: set[Tensor] = set()
        self.branches: list[nn.Module] = []
        self.refused: dict[tuple[str, ...], str] = {}  # by what, why and the name without numbers
        self._inside = 0  # norms whose forward runs
        self.computes_loss = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a call, and run it as it is."""
        kwargs = {} if kwargs is None else kwargs
        if self._inside:
            return func(*args, **kwargs)
        kind = "other"
        if func in ADDITIONS and len(args) == 2:
            kind, skip, _ = self.kind(args[0], args[1], kwargs)
            if kind == "residual":
                self.branches.append(self._skips.pop(skip))
            elif kind == "other" and _activations(args) == 2 and not all(t in self._products for t in args):
                self._refuse_sum()
        elif self._unit and _activations(args) and getattr(func, "__name__", "") in _UNSCALED:
            self._refuse(func.__name__, "which has no scaled form")
        elif func is F.cross_entropy:
            self.computes_loss = True
            if self._unit and (why := _loss_fault(*args, **kwargs)):
                self._refuse("cross_entropy", why)
        y = func(*args, **kwargs)
        if func is F.embedding or kind == "embeddings":
            self._summands.add(y)
        elif func in MULTIPLICATIONS and all(isinstance(t, Tensor) and t.numel() > 1 for t in args[:2]):
            self._products.add(y)
        return y

    def norm(self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Remember what a norm layer read."""
        self._skips[x] = module
        self._inside += 1
        try:
            return forward(x)
        finally:
            self._inside -= 1

    def _refuse_sum(self) -> None:
        """Refuse an addition, but for those that an activation function consists of."""
        if not self._modules or next(self._modules[-1].parameters(), None) is not None:
            self._refuse("an addition", "of which a norm layer read no operand")

    def _refuse(self, what: str, why: str) -> None:
        module = self._modules[-1] if self._modules else self._root
        name = self._names.get(module)
        like = re.sub(r"\d+", "*", name or "")
        told = f"{what} in {name or 'the model'} ({type(module).__name__}), {why}"
        self.refused.setdefault((what, why, like), told)


def _activations(args: Any) -> int:
    """Return how many of the arguments are tensors with a gradient, of more than one element, and no Parameters."""
    tensors = (t for t in args if isinstance(t, Tensor) and not isinstance(base_of(t), nn.Parameter))
    return sum(t.requires_grad and t.numel() > 1 for t in tensors)


def _loss_fault(logits: Tensor, target: Tensor, **how: Any) -> str | None:
    """Return why a cross entropy is not scaled."""
    usual = {"label_smoothing": 0.0, "weight": None, "size_average": None, "reduce": None}
    other = [f"{name}={value!r}" for name, value in how.items() if name in usual and value != usual[name]]
    other += [f"reduction={how['reduction']!r}"] if how.get("reduction", "mean") not in ("mean", "sum") else []
    if other:
        return f"whose {other[0]} has no scaled form"
    return None if logits.dim() == 2 and not target.is_floating_point() else "which takes logits of [rows, classes]"


_UNSCALED: Final = frozenset(
    ("tanh", "sigmoid", "softmax", "log_softmax", "elu", "selu", "celu", "leaky_relu", "prelu", "rrelu", "relu6", "glu")
    + ("logsigmoid", "hardtanh", "hardswish", "hardsigmoid", "mish", "softplus", "softsign", "exp", "matmul", "mm")
    + ("bmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "layer_norm")
    + (
        "conv_transpose3d",
        "rms_norm",
        "group_norm",
        "batch_norm",
        "instance_norm",
        "max_pool2d",
        "avg_pool2d",
        "dropout2d",
    )
    + ("adaptive_avg_pool2d", "multi_head_attention_forward", "mse_loss", "nll_loss", "kl_div")
)  # functions of activations whose factors are not known


def find_norms(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that normalise features, by module: those of torch, and those that are called so."""
    return {
        module: name
        for name, module in model.named_modules()
        if module is not model and (isinstance(module, nn.LayerNorm | nn.RMSNorm) or _is_named_norm(module))
    }


def _is_named_norm(module: nn.Module) -> bool:
    return _NORM.search(type(module).__name__) is not None and next(module.children(), None) is None


def attach_scales(model: nn.Module, how: ScaledModel, generator: Generator) -> None:
    """Scale a model whose layers are converted, and give its weights unit variance."""
    _rescale(model, generator)
    for module in model.modules():
        if isinstance(module, EmulatedModule) and module.emulation is not None:
            owner = getattr(module, "owner", module)
            module.emulation.factors = Factors(how.by, head=owner in how.heads)
    wrap_parts(model, how.names, how, (SCALED, FORWARD), _normalise, _scaled)


def detach_scales(model: nn.Module) -> bool:
    """Undo ``attach_scales`` but for the weights; say whether there was something to undo."""
    return unwrap_parts(model, (SCALED, FORWARD))


def is_untraced(model: nn.Module) -> bool:
    """Whether the first batch of a scaled model is still to come."""
    how = model.__dict__.get(SCALED)
    return how is not None and how.taus is None


@torch.no_grad()
def _rescale(model: nn.Module, generator: Generator) -> None:
    """Divide weights by their standard deviation, draw those that are zero, and set biases to zero."""
    for name, p in model.named_parameters():
        if name.endswith("bias") and p.dim() == 1:
            p.zero_()
        elif p.dim() > 1 and p.numel() > 1:
            std = p.float().std()
            if std == 0:
                nn.init.normal_(p, generator=generator if isinstance(generator, torch.Generator) else None)
            else:
                p.div_(std.to(p.dtype))


def _scaled(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a model's forward with its operations replaced."""
    how: ScaledModel | None = model.__dict__.get(SCALED)
    if how is None:  # reverted
        return forward(*args, **kwargs)
    if how.taus is None:
        if torch.compiler.is_compiling():
            raise ArgumentError(f"{how.recipe} has to see one batch before torch.compile; call the model once")
        _look(model, how, partial(forward, *args, **kwargs))
    with Operations(model):
        y = forward(*args, **kwargs)
    if not how.checked and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        outputs = [t for t in tree_iter(y) if isinstance(t, Tensor) and t.requires_grad and t.numel() > 1]
        how.checked = bool(outputs)
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


def _normalise(norm: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    how: ScaledModel | None = norm.__dict__.get(SCALED)
    if how is None:
        return forward(x, *args, **kwargs)
    if not how.running:
        raise ArgumentError(
            f"layer {how.names[norm]!r} is a part of a model that {how.recipe} scales, and ran without the model; call "
            "the whole model, or fmtsim.revert it first"
        )
    return how.running[-1].norm(norm, partial(forward, *args, **kwargs) if args or kwargs else forward, x)


def _look(model: nn.Module, how: ScaledModel, call: Callable[[], Any]) -> None:
    """Run a batch to find the residual branches, and what each weighs.

    Raises:
        ArgumentError: The model does what cannot be scaled.
    """
    with undisturbed(model), torch.enable_grad(), running_modules() as running:
        trace = _Trace(model, running)
        with trace:
            call()
    if trace.refused:
        told = list(trace.refused.values())
        told = told[:4] + [f"{len(told) - 4} more"] * (len(told) > 4)
        raise ArgumentError(
            f"{how.recipe} cannot scale {type(model).__name__}: {'; '.join(told)}. Write these "
            "with fmtsim.nn.unit_scaling in a model of UnitLinear or MuLinear layers, or choose another recipe"
        )
    how.checked = how.by == "MuScaled" or trace.computes_loss
    count = len(trace.branches)
    how.taus = {
        norm: how.tau if how.by == "MuScaled" else (count / 2 + i) ** -0.5 for i, norm in enumerate(trace.branches)
    }
