# SPDX-License-Identifier: Apache-2.0
"""Exchanges of a recipe beside linear layers: attention, gated layers, whole models, saved activations."""

import re
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from fmtsim.gemm.layers.keys import Generator
from fmtsim.nn.attention import Filter, attach, attentions, check_attentions, check_kind_of_attention, detach
from fmtsim.nn.forward import ATTENTION
from fmtsim.nn.planning import FILTERED, Selector
from fmtsim.nn.saved_activations import SAVING, Saving, attach_saving, detach_saving
from fmtsim.nn.scaled_linear import MuResidual, ScaledLinear
from fmtsim.nn.scaled_model import SCALED, ScaledModel, attach_scales, detach_scales
from fmtsim.nn.smooth import (
    PROJECTIONS,
    SMOOTH,
    Smoothing,
    gated_layers,
    gated_parts,
    other_silus,
    smoothen,
    unsmooth,
)
from fmtsim.recipes.spec import Recipe, Replacement
from fmtsim.support.errors import ArgumentError

_NORM: Final = re.compile(r"(RMS|Layer)_?Norm", re.IGNORECASE)
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
        for module, rule in self.gated:
            smoothen(module, rule)
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
        chosen = _filtered(attentions(model), filter_fn, swaps)
        if not chosen:
            raise ArgumentError(
                f"attention= of recipe {recipe.name!r} finds nothing to replace in {type(model).__name__}"
                f"{_refused(swaps)}: it looks for modules whose class is named like attention or whose forward calls "
                "torch.nn.functional.scaled_dot_product_attention; convert with dataclasses.replace(recipe, "
                "attention=None), and name others to fmtsim.nn.convert_attention(model, recipe.attention, filter_fn=)"
            )
        check_attentions(chosen)
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
    loss = swaps.recipe.loss_scale
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


def undo_swaps(model: nn.Module) -> int:
    """Undo what recipes exchanged in a model; return how many modules that was."""
    return detach_saving(model) + detach_scales(model) + unsmooth(model, recipe=True) + detach(model, recipe=True)


def swapped(model: nn.Module) -> bool:
    """Return True if a recipe exchanged something in a model."""
    rules = (module.__dict__.get(mark) for module in model.modules() for mark in (ATTENTION, SMOOTH))
    marked = any(mark in module.__dict__ for module in model.modules() for mark in (SCALED, SAVING))
    return marked or any(rule is not None and rule.recipe for rule in rules)


def swap_details(module: nn.Module) -> list[str]:
    """Return what a module has in place of its own attention, gated product or operations, for tables."""
    attended, smoothed, scaled, saving = (module.__dict__.get(mark) for mark in (ATTENTION, SMOOTH, SCALED, SAVING))
    texts = [f"attention: {attended.call.config}"] if attended is not None else []
    texts += [str(scaled)] if scaled is not None and module not in scaled.names else []
    texts += [saving.told(module)] if saving is not None else []
    return texts + ([str(smoothed)] if smoothed is not None else [])


def _find_gated(model: nn.Module, where: str, replacement: Replacement, filter_fn: Filter | None, swaps: Swaps) -> None:
    there = gated_layers(model)
    rule = Smoothing(replacement.per, replacement.power_of_two, recipe=True)
    chosen = _filtered(there, filter_fn, swaps)
    swaps.gated += [(module, rule._replace(parts=gated_parts(module) or PROJECTIONS)) for _, module in chosen]
    others = other_silus(model)
    swaps.notes += [f"{', '.join(others[:4])}: SiLU among linear layers, and no gated layer"] if others else []
    swaps.notes += [f"{len(chosen)} gated layers became {rule}"] if chosen else []
    if chosen or any(SMOOTH in module.__dict__ for module in model.modules()):
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


def one_generator(generator: Generator) -> Generator:
    """Return the source of random numbers of a whole model: an int makes one torch.Generator."""
    return torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
