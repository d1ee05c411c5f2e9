# SPDX-License-Identifier: Apache-2.0
"""Exchanges of a recipe beside linear layers: attention, gated layers (Smooth-SwiGLU), whole models, activations."""

import re
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.arguments import check_features, check_flags, check_input, check_together
from fmtsim.gemm.layers.keys import Generator
from fmtsim.nn.conversion import Kind, all_settings, settings, unwrap_all, wrap
from fmtsim.nn.forward import forward_names, undisturbed
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.multihead_attention import Filter, attach, attentions, check_attentions, check_kind_of_attention
from fmtsim.nn.planning import FILTERED, Selector
from fmtsim.nn.saved_activations import Saving, attach_saving
from fmtsim.nn.scaled_model import MuResidual, ScaledLinear, ScaledModel, attach_scales
from fmtsim.recipes.recipe import Recipe, Replacement
from fmtsim.scaling.repeats import Calls
from fmtsim.scaling.scales import power_of_two as to_power_of_two
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import checked

Per = Literal["token", "channel"]
Model = TypeVar("Model", bound=nn.Module)

PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")  # names in Hugging Face's Llama
_SILU: Final = ("SiLU", "SiLUActivation")


class Smoothing(NamedTuple):
    """Describe how a gated layer is smoothed.

    Attributes:
        per: See ``smooth_scale``.
        power_of_two: See there.
        parts: Names of the projections: gate, up and down.
    """

    per: Per
    power_of_two: bool
    parts: tuple[str, ...] = PROJECTIONS

    def __str__(self) -> str:
        return f"Smooth-SwiGLU, a scale a {self.per}{', powers of two' if self.power_of_two else ''}"


def smooth_scale(v: Tensor, per: Per = "token", *, power_of_two: bool = False) -> Tensor:
    """Return the largest magnitude of every token, or of every channel, of the linear half of a gated product.

    Args:
        v: ``[..., channels]``, floating point.
        per: ``"token"`` gives ``[..., 1]``, the code's rule; ``"channel"`` gives ``[channels]``, the paper's.
        power_of_two: Round the scale up to a power of two, so that dividing by it is exact.

    Returns:
        Scales of v's dtype (of float32 where powers of two are asked for), without gradient. A token or channel of
        zeros has scale 1; the source's code divides by zero there. NaN gives NaN.

    Raises:
        ArgumentError: An unknown rule.
    """
    checked("per", per, Per)
    check_flags(power_of_two=power_of_two)
    check_input(v, "v")
    if not v.dim() or not v.shape[-1]:
        raise ArgumentError(f"v has shape {tuple(v.shape)}; pass [..., channels]")
    size = v.detach().abs()  # a scale is a constant for the gradient
    if per == "token":
        amax = size.amax(-1, keepdim=True)
    else:
        rows = size.reshape(-1, v.shape[-1])
        amax = (rows if len(rows) else rows.new_zeros(1, rows.shape[1])).amax(0)  # amax of no rows is an error
    amax = torch.where(amax == 0, torch.ones_like(amax), amax)  # the source divides by zero there
    if not power_of_two:
        return amax
    return torch.where(amax.isfinite(), to_power_of_two(amax.float().nan_to_num(), up=True), amax.float())


def smooth_swiglu(
    u: Tensor, v: Tensor, *, per: Per = "token", power_of_two: bool = False, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``z = silu(u) * (v / s)`` and s: z is what is quantised, ``z s`` the gated product.

    Args:
        u: ``[..., channels]``, the half behind SiLU.
        v: The other half, of the same shape.
        per: See ``smooth_scale``.
        power_of_two: See there.
        scale: Use these scales instead of v's own (delayed scaling).

    s is a constant for the gradient (the source's ``detach``). NaN and infinities pass as in the plain product.

    >>> z, s = smooth_swiglu(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -6.0]]))
    >>> s, bool(((z * s) == torch.nn.functional.silu(torch.tensor([1.0, 2.0])) * torch.tensor([3.0, -6.0])).all())
    (tensor([[6.]]), True)
    """
    tensors = {"u": u, "v": v} if scale is None else {"u": u, "v": v, "scale": scale}
    for name, t in tensors.items():
        check_input(t, name)
    check_together(**tensors)
    if u.shape != v.shape:
        raise ArgumentError(f"u has shape {tuple(u.shape)} and v {tuple(v.shape)}; pass two halves of one shape")
    if scale is not None and any(a not in (1, b) for a, b in zip(scale.shape[::-1], v.shape[::-1], strict=False)):
        raise ArgumentError(f"scale of shape {tuple(scale.shape)} does not broadcast to v of {tuple(v.shape)}")
    s = smooth_scale(v, per, power_of_two=power_of_two) if scale is None else scale.detach()  # delayed, or this call's
    return F.silu(u) * (v / s), s


class SmoothSwiGLU(nn.Module):
    """Apply a gated feed-forward layer, ``down(silu(gate(x)) * up(x))``, whose product is smoothed for quantisation.

    The function is that of the plain layer: a scale a token multiplies the result of the down projection, a scale a
    channel multiplies the columns of its weight. After ``fmtsim.convert`` its three products are emulated.

    Args:
        width: Features of input and output.
        hidden: Channels of the gated product.
        bias: Whether the projections have biases.
        per: See ``smooth_scale``.
        power_of_two: See there.
        delayed: Use the scale of the previous call with gradients, as the source's code can; the first call uses its
            own. Per channel alone, because tokens change from call to call.

    Raises:
        ArgumentError: ``delayed`` with a scale a token.
    """

    previous: Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        bias: bool = False,
        per: Per = "token",
        power_of_two: bool = False,
        delayed: bool = False,
    ) -> None:
        super().__init__()
        checked("per", per, Per)
        check_flags(bias=bias, power_of_two=power_of_two, delayed=delayed)
        if delayed and per == "token":
            raise ArgumentError("delayed=True with per='token' has no scale to keep; pass per='channel'")
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.per, self.power_of_two, self.delayed = per, power_of_two, delayed
        self._calls: Calls[Tensor] = Calls()
        self.register_buffer("previous", torch.zeros(hidden), persistent=False)  # zeros: no call yet

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to itself."""
        check_features(x, self.gate_proj.weight)
        u, v = self.gate_proj(x), self.up_proj(x)
        s = smooth_scale(v, self.per, power_of_two=self.power_of_two)
        if self.delayed:
            s = self._delayed(s) if torch.compiler.is_compiling() else self._calls.run(partial(self._delayed, s))
        z, s = smooth_swiglu(u, v, scale=s)
        return scaled_down(self.down_proj, z, s, self.per)

    def _delayed(self, now: Tensor) -> Tensor:
        """Return the scale of the call before, or this one's, which the next call takes where this one learns."""
        s = torch.where(self.previous > 0, self.previous, now.float()).to(now.dtype)
        if torch.is_grad_enabled():
            self.previous.copy_(now)
        return s

    def extra_repr(self) -> str:
        """Show the rule."""
        return f"per={self.per!r}, power_of_two={self.power_of_two}, delayed={self.delayed}"


def scaled_down(down: nn.Linear, z: Tensor, s: Tensor, per: Per) -> Tensor:
    """Return ``(z s) w^T + bias`` of a linear layer, plain or converted, z being quantised without s."""
    weight = down.weight if per == "token" else down.weight * s.to(down.weight.dtype)  # s of channels: columns
    z = z.to(weight.dtype) if weight.dtype.itemsize < z.dtype.itemsize else z  # powers of two make it float32
    y = down.gemm(z, weight, None) if isinstance(down, EmulatedModule) else F.linear(z, weight)
    y = y * s.to(y.dtype) if per == "token" else y  # scales of tokens multiply rows
    return y if down.bias is None else y + down.bias.to(y.dtype)


def convert_swiglu(model: Model, *, per: Per = "token", power_of_two: bool = False) -> Model:
    """Smooth the gated layers of a model, in place: same objects, Parameters and state_dict, another forward.

    A gated layer has linear ``gate_proj``, ``up_proj`` and ``down_proj`` and SiLU as ``act_fn``, as in Hugging Face's
    Llama; or three linear layers of other names and SiLU as a module or function, with which it computes
    ``down(silu(gate(x)) * up(x))``, as a trial on random numbers shows. It goes with ``fmtsim.convert``, in any order.

    Args:
        model: Any module.
        per: See ``smooth_scale``.
        power_of_two: See there.

    Raises:
        ArgumentError: There is no such layer, or an unknown rule. The model is then unchanged.
    """
    smooth_scale(torch.zeros(1, 1), per)  # refuses an unknown rule
    layers = {module: parts for module in model.modules() if (parts := gated_parts(module)) is not None}
    if not layers:
        raise ArgumentError(
            f"convert_swiglu found no gated layer in {type(model).__name__}; "
            f"it looks for linear {', '.join(PROJECTIONS)} and act_fn=SiLU, or three linear layers that compute "
            "down(silu(gate(x)) * up(x)); or build the model with SmoothSwiGLU"
        )
    for module, parts in layers.items():
        wrap(module, "swiglu", _smooth_forward, Smoothing(per, power_of_two, parts), recipe=False)
    return model


def revert_swiglu(model: Model) -> Model:
    """Give gated layers their own forward back, in place; raise ArgumentError where none is converted."""
    if not unwrap_all(model, "swiglu"):
        raise ArgumentError(f"{type(model).__name__} has no converted gated layer; call convert_swiglu first")
    return model


def _smooth_forward(how: Smoothing, module: nn.Module, forward: Any, x: Tensor) -> Tensor:
    gate, up, down = (getattr(module, name) for name in how.parts)
    z, s = smooth_swiglu(gate(x), up(x), per=how.per, power_of_two=how.power_of_two)
    return scaled_down(down, z, s, how.per)


def gated_parts(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of a gated layer's projections, gate, up and down; None for other and for smoothed modules."""
    if settings(module, "swiglu") is not None:
        return None
    linears = _linears(module)  # keys are attribute names
    if linears.keys() >= set(PROJECTIONS) and type(getattr(module, "act_fn", None)).__name__ in _SILU:
        return PROJECTIONS
    if len(linears) != 3 or not _names_silu(module):  # only such modules are tried on random numbers
        return None
    return next(
        (parts for parts in permutations(linears) if _computes(module, *(linears[part] for part in parts))), None
    )


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _names_silu(module: nn.Module) -> bool:
    """Return True if a module has SiLU as a part, or its forward names the function."""
    return "silu" in forward_names(module) or any(type(child).__name__ in _SILU for child in module.children())


def _computes(module: nn.Module, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> bool:
    """Try whether a module computes ``down(silu(gate(x)) * up(x))``."""
    w = gate.weight  # [hidden, width], as up's; down's is [width, hidden]
    if w.is_meta or w.shape != up.weight.shape or w.shape != down.weight.shape[::-1]:
        return False
    x = torch.randn(4, w.shape[1], generator=torch.Generator().manual_seed(0)).to(w)
    with undisturbed(module):
        z = down(F.silu(gate(x)) * up(x))
        try:
            y = module.forward(x)
        except Exception:  # it takes other arguments, or other shapes
            return False
    tolerance = 4 * torch.finfo(w.dtype).eps ** 0.75 * float(z.abs().max())  # the module may add in another order
    return isinstance(y, Tensor) and y.shape == z.shape and float((y - z).abs().max()) <= tolerance


_NORM: Final = re.compile(r"(RMS|Layer)_?Norm", re.IGNORECASE)  # names of norm classes that models define
_FUSED_CALLS: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


@dataclass(slots=True, kw_only=True)
class Swaps:
    """List what a recipe exchanges in a model.

    Args:
        recipe: The recipe.
        attention: Modules whose attention is quantised, by name.
        gated: Gated layers that are smoothed, with the rule.
        scaled: How the whole model is scaled, or None.
        saving: Which of its activations are saved in low precision, or None.
        filtered: Whether a ``filter_fn`` was given: one that leaves out all layers and norms leaves nothing to do.
        reasons: Why others are not, by name.
        notes: What is exchanged, and what the recipe would exchange and the model does not have.
    """

    recipe: Recipe
    attention: list[tuple[str, nn.Module]] = field(default_factory=list)
    gated: list[tuple[nn.Module, Smoothing]] = field(default_factory=list)
    scaled: ScaledModel | None = None
    saving: Saving | None = None
    filtered: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        saves = self.saving is not None and (bool(self.saving.norms) or not self.filtered)
        return bool(self.attention or self.gated or self.scaled or saves)

    def apply(self, model: nn.Module, generator: Generator) -> None:
        """Exchange them in the model, whose layers are converted."""
        if self.recipe.attention is not None:
            attach(self.attention, self.recipe.attention, generator, recipe=True, strict=True)
        for module, smoothing in self.gated:
            wrap(module, "swiglu", _smooth_forward, smoothing)
        if self.scaled is not None:
            attach_scales(model, self.scaled, generator)
        if self.saving is not None:
            attach_saving(model, self.saving)


def find_swaps(model: nn.Module, recipe: Recipe, filter_fn: Filter | None) -> Swaps:
    """Decide what a recipe exchanges in a model, without touching it.

    Raises:
        ArgumentError: There is nothing of a kind, and the recipe does not say that it may be missing.
    """
    swaps = Swaps(recipe=recipe, filtered=filter_fn is not None)
    if recipe.attention is not None:
        chosen = _filtered(attentions(model), filter_fn, swaps)  # what filter_fn leaves out gets a reason
        if not chosen:
            raise ArgumentError(
                f"attention= of recipe {recipe.name!r} finds nothing to replace in {type(model).__name__}"
                f"{_refused(swaps)}: it looks for modules whose class is named like attention or whose forward calls "
                "torch.nn.functional.scaled_dot_product_attention; convert with dataclasses.replace(recipe, "
                "attention=None), and name others to fmtsim.nn.convert_attention(model, recipe.attention, filter_fn=)"
            )
        check_attentions(chosen)  # converted already, or of a kind that calls another function
        swaps.attention = chosen
    for i, replacement in enumerate(recipe.replace):
        where = f"replace[{i}] of recipe {recipe.name!r} ({replacement})"
        if replacement.kind == "swiglu":
            _find_gated(model, where, replacement, filter_fn, swaps)
        else:
            _find_operations(model, where, replacement, swaps)
    if recipe.activations is not None and next(model.children(), None) is not None:
        norms = _filtered([(name, norm) for norm, name in _find_norms(model).items()], filter_fn, swaps)
        swaps.saving = Saving(recipe.activations, [norm for _, norm in norms])
        swaps.notes.append(str(recipe.activations))
    return swaps


def _find_norms(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that normalise features, by module: those of torch, and those that are called so."""
    named = lambda m: _NORM.search(type(m).__name__) and not m._modules  # noqa: E731
    candidates = (
        (m, name) for name, m in model.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) or named(m)
    )
    return {module: name for module, name in candidates if module is not model}


def _find_operations(model: nn.Module, where: str, replacement: Replacement, swaps: Swaps) -> None:
    scaled_modules = [name for name, module in model.named_modules() if isinstance(module, ScaledLinear | MuResidual)]
    if scaled_modules:
        swaps.notes.append(
            f"{where} leaves the model as it is: {scaled_modules[0]!r} and others bring factors of their own"
        )
        return
    for name, module in model.named_modules():
        if isinstance(module, _FUSED_CALLS):
            raise ArgumentError(
                f"{where} cannot scale {name!r}: {type(module).__name__} is one call of torch, which hides its parts"
                "; write it with nn.Linear and scaled_dot_product_attention, or choose another recipe"
            )
        check_kind_of_attention(name, module)
        meta = next((parameter for parameter, p in module.named_parameters(recurse=False) if p.is_meta), None)
        if meta is not None:
            raise ArgumentError(
                f"{where} rescales weights, and {meta!r} of {name!r} is on the meta device; "
                "give the model weights first"
            )
    loss = swaps.recipe.loss_scale  # fmtsim does not scale the loss: a note says so
    more = ["a loss outside of the model: fmtsim.nn.unit_scaling.cross_entropy"] * (replacement.by == "UnitScaled")
    more += [] if loss is None else [f"the loss is to be scaled: {loss}"]
    swaps.notes += [
        "weights were divided by their standard deviations and stay so after revert",
        "; ".join(["rates of an optimizer: fmtsim.nn.mu_parameter_groups", *more]),
    ]
    swaps.scaled = ScaledModel(
        by=replacement.by, tau=replacement.tau, recipe=f"recipe {swaps.recipe.name!r}", names=_find_norms(model),
        heads=Selector(model).heads,
    )  # fmt: skip


def swap_details(module: nn.Module) -> list[str]:
    """Return what a module has in place of its own attention, gated product or operations, for tables."""
    kinds: tuple[Kind, ...] = ("attention", "swiglu", "scaled", "saving")
    attended, smoothed, scaled, saving = (settings(module, kind) for kind in kinds)
    texts = [f"attention: {attended.call.config}"] if attended is not None else []
    texts += [str(scaled)] if scaled is not None and module not in scaled.names else []
    texts += [saving.told(module)] if saving is not None else []
    return texts + ([str(smoothed)] if smoothed is not None else [])


def _find_gated(model: nn.Module, where: str, replacement: Replacement, filter_fn: Filter | None, swaps: Swaps) -> None:
    parts = {module: gated_parts(module) for module in model.modules()}  # each is tried once
    smoothing = Smoothing(replacement.per, replacement.power_of_two)
    chosen = _filtered([(n, m) for n, m in model.named_modules() if parts[m] is not None], filter_fn, swaps)
    swaps.gated += [(m, smoothing._replace(parts=names)) for _, m in chosen if (names := parts[m]) is not None]
    # the notes name modules with SiLU that compute something else, because a user may take them for gated layers
    others = [
        name for name, m in model.named_modules()
        if settings(m, "swiglu") is None and len(_linears(m)) > 1 and _names_silu(m) and parts[m] is None
    ]  # fmt: skip
    swaps.notes += [f"{', '.join(others[:4])}: SiLU among linear layers, and no gated layer"] if others else []
    swaps.notes += [f"{len(chosen)} gated layers became {smoothing}"] if chosen else []
    if chosen or all_settings(model, "swiglu"):
        return
    if not replacement.optional:
        raise ArgumentError(
            f"{where} finds nothing to replace in {type(model).__name__}{_refused(swaps)}: it looks for modules with "
            f"linear {', '.join(PROJECTIONS)} and act_fn=SiLU, or three linear layers that "
            "compute down(silu(gate(x)) * up(x)); build the model with fmtsim.nn.SmoothSwiGLU and leave "
            "the replacement out, or pass Replacement(optional=True)"
        )
    if not any(type(module).__name__ == replacement.by for module in model.modules()):
        swaps.notes.append(f"{where} found none in this model")


def _filtered(
    modules: list[tuple[str, nn.Module]], filter_fn: Filter | None, swaps: Swaps
) -> list[tuple[str, nn.Module]]:
    chosen = [(name, module) for name, module in modules if filter_fn is None or filter_fn(module, name)]
    swaps.reasons |= {name: FILTERED for name, module in modules if (name, module) not in chosen}
    return chosen


def _refused(swaps: Swaps) -> str:
    names = list(swaps.reasons)
    return f" ({', '.join(names[:3])}: {FILTERED})" if names else ""
