# SPDX-License-Identifier: Apache-2.0
"""What ``convert`` decides before it touches a model: which modules it converts, to what, and why not the others."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fmtsim.casts.arguments import takes
from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig, linear_config
from fmtsim.gemm.products.resolver import target_or_unit
from fmtsim.nn.modules import EmulatedModule, emulated_class, emulated_types
from fmtsim.nn.raw_matmuls import Own, own_matrices
from fmtsim.nn.rules import Selector
from fmtsim.nn.sizes import size_fault
from fmtsim.nn.swaps import FILTERED
from fmtsim.recipes.plan import LayerPlan
from fmtsim.recipes.serialization import rules_of
from fmtsim.recipes.spec import Recipe, Rule
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, shown

Configure = Callable[[str], LinearConfig | None]
Planner = Callable[[str], LayerPlan | None]
Filter = Callable[[nn.Module, str], bool]
_MORE = {
    "scaling": None, "rounding": "nearest_even", "grad_rounding": "nearest_even", "fast_accum": False
}  # fmt: skip  # what goes with format=
NO_CONFIG = "config returned None"
NO_MATRIX = "no matrix among its parameters"
LOOKED_UP = "its rows are looked up, not multiplied"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def configure(
    recipe: LinearConfig | None,
    format: str | Format | None,
    grad_format: str | Format | None,
    more: dict[str, Any],
    config: LinearConfig | Configure | None,
) -> Configure:
    """Return what gives each layer its config, from the one argument of ``convert`` that says it.

    Raises:
        ArgumentError: None of them does, several do, or others contradict it.
    """
    given = [name for name, value in (("recipe", recipe), ("format", format), ("config", config)) if value is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "no format"
        raise ArgumentError(
            f"convert got {what}; pass exactly one of format='e4m3', config=linear_config(...) or recipe="
        )
    if format is not None:
        grads = format if grad_format is None else grad_format
        config = linear_config(x=format, w=format, g=grads, **more)
    elif grad_format is not None or any(
        type(more[name]) is not type(usual) or more[name] != usual for name, usual in _MORE.items()
    ):
        raise ArgumentError(
            f"grad_format, scaling, rounding, grad_rounding and fast_accum go with format=; set them inside {given[0]}="
        )
    chosen = config if recipe is None else recipe
    if isinstance(chosen, LinearConfig):
        return lambda name: chosen
    if not callable(chosen) or not takes(chosen, "name"):
        raise ArgumentError(
            f"{given[0]}={shown(chosen)} is not a LinearConfig; build one with linear_config(x=, w=, g=)"
        )
    return chosen


def machine_of(
    target: Any, unit: Any, datapath: Any, plan: GemmPlan | None, native: bool | None, verb: str = "convert"
) -> dict[str, Any] | None:  # fmt: skip
    """Return the machine of ``convert``, or of another verb, as keywords of Gemm, None where none is named.

    Raises:
        ArgumentError: Several are named, or plan or native without one.
    """
    if all(each is None for each in (target, unit, datapath, plan, native)):
        return None
    if target is None or not isinstance(target, str) or target != "recipe" or unit is not None or datapath is not None:
        unit = target_or_unit(verb, target, unit, datapath, plan)
    return {"target": target, "unit": unit, "plan": plan, "native": native}


def planner_of(recipe: Recipe, model: nn.Module) -> Planner:
    """Return what gives each layer its plan under a recipe, whose rules are checked against the model."""
    selector = Selector(model)
    selector.check(recipe)
    return lambda name: selector.plan(name, recipe)


def with_rules(
    planner: Planner, rules: Sequence[Rule] | str | Path, model: nn.Module, machine: dict[str, Any] | None,
    recipe: Recipe | None,
) -> Planner:  # fmt: skip
    """Return what gives each layer the plan of another planner, but where rules say otherwise, on the same machine.

    Raises:
        ArgumentError: These are not rules, or one that fits no layer.
    """
    made_for = None if recipe is None else recipe.machine
    extra, selector = Recipe(name="convert(rules=)", rules=rules_of(rules), machine=made_for), Selector(model)
    extra = extra if machine is None else extra.on(**machine)
    selector.check(extra)

    def plan(name: str) -> LayerPlan | None:
        found, own = planner(name), selector.plan(name, extra).rules
        if found is None or not own:
            return found
        if own[-1].steps is None:
            return LayerPlan(rules=own, default=None)
        return LayerPlan(rules=(*own, *found.rules), default=found.default)

    return plan


def constant_planner(configure: Configure, machine: dict[str, Any] | None) -> Planner:
    """Return what gives each layer a plan without a schedule, on a machine where one is named."""
    if machine is not None and machine["target"] == "recipe":
        raise ArgumentError("target='recipe' is the machine that a recipe names; pass recipe='te_current' or another")

    def plan(name: str) -> LayerPlan | None:
        config = configure(name)
        if config is not None and not isinstance(config, LinearConfig):
            raise ArgumentError(f"config({name!r}) returned {shown(config)}; it must return a LinearConfig or None")
        if config is None:
            return None
        return LayerPlan(rules=(), default=config if machine is None else config.on(**machine))

    return plan


def plan_layers(
    model: nn.Module, planner: Planner, filter_fn: Filter | None, total_steps: int | None
) -> tuple[list[tuple[nn.Module, str, LayerPlan]], dict[str, str]]:
    """Decide for every module without touching any: what to convert, and why not the others."""
    plan: list[tuple[nn.Module, str, LayerPlan]] = []
    reasons: dict[str, str] = {}
    inside = dict(_projections(model))
    for name, module in model.named_modules():
        if isinstance(module, EmulatedModule):
            raise ArgumentError(
                f"layer {shown(name)} is converted already; call fmtsim.revert(model) before converting again"
            )
        reason = why_not(module) or inside.get(name)
        if reason is None and filter_fn is not None and not filter_fn(module, name):
            reason = FILTERED
        layer_plan = planner(name) if reason is None else None
        if reason is None and layer_plan is None:
            reason = NO_CONFIG
        elif layer_plan is not None and not layer_plan.configs:
            reason = layer_plan.why_high
        if reason is not None or layer_plan is None:
            reasons[name] = reason or ""
            continue
        _check_layer(name, module, layer_plan, total_steps)  # before anything changes
        plan.append((module, name, layer_plan))
    return plan, reasons


def plan_products(
    model: nn.Module, planner: Planner, filter_fn: Filter | None, total_steps: int | None, reasons: dict[str, str]
) -> list[tuple[str, Own, LayerPlan]]:
    """Decide for every matrix that a model multiplies with in code of its own; what is left goes into ``reasons``."""
    plan = []
    for name, own in own_matrices(model).items():
        if filter_fn is not None and not filter_fn(own.module, own.owner):
            reasons[own.owner] = FILTERED
            continue
        layer_plan = planner(name)
        if layer_plan is None or not layer_plan.configs:
            reasons[own.owner] = NO_CONFIG if layer_plan is None else layer_plan.why_high
            continue
        _check_schedule(name, layer_plan, total_steps)
        plan.append((name, own, layer_plan))
    return plan


def _check_layer(name: str, module: nn.Module, layer_plan: LayerPlan, total_steps: int | None) -> None:
    """Refuse a schedule that contradicts itself or has no length, and sizes that do not fit."""
    _check_schedule(name, layer_plan, total_steps)
    emulated = emulated_class(type(module))
    assert emulated is not None  # why_not would have had a reason
    for outputs, inputs in emulated.matrices(module):
        for config in layer_plan.configs:
            fault = (
                None if all(q.is_cast for q in config.operands.values()) else size_fault(config, None, outputs, inputs)
            )
            if fault is not None:
                raise ArgumentError(
                    f"layer {name!r} (w is {outputs} x {inputs}): {fault}; leave the layer out with filter_fn= or a "
                    f"Rule(name=...), or choose another recipe"
                )


def _check_schedule(name: str, layer_plan: LayerPlan, total_steps: int | None) -> None:
    try:
        layer_plan.at(0, total_steps)
        layer_plan.check(total_steps)
    except ArgumentError as error:
        raise ArgumentError(f"layer {shown(name)}: {error}") from None


def why_not(module: nn.Module) -> str | None:
    """Return why a module of its kind is not converted, None where it can be."""
    cls = type(module)
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
        return "its parameters are not initialised yet; run one batch through the model first"
    if parametrize.is_parametrized(module):
        return "parametrized; convert first, or remove the parametrization"
    emulated = emulated_class(cls)
    if emulated is None:
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return (
                f"no emulated form of {cls.__name__}: one fused call multiplies with all of its weights; "
                "write its steps with nn.Linear"
            )
        base = next((base for base in emulated_types() if isinstance(module, base)), None)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return LOOKED_UP
        if base is None and all(p.dim() < 2 for p in module.parameters(recurse=False)):
            return NO_MATRIX
        if base is None:
            return f"no emulated form of {cls.__name__}"
        return f"overrides {base.__name__}.forward; call fmtsim.EmulatedGEMM in it"
    weights = [p for p in module.parameters(recurse=False) if p.dtype not in _FLOATS]
    return f"its parameters have dtype {weights[0].dtype}" if weights else emulated.why_left(module)


def _projections(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each linear layer that an attention module uses without calling it, with that reason."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield (
                f"{name}.out_proj" if name else "out_proj",
                f"belongs to the attention {name!r}, which uses its weights",
            )
