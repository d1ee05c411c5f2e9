# SPDX-License-Identifier: Apache-2.0
"""Plan a conversion before the model is touched: which modules to convert, to what, and why not the others.

Rules of a recipe choose layers by name, kind, block (``find_blocks``) and step of training (``Selector``).
"""

import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fmtsim.casts.arguments import takes
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import LinearConfig, linear_config, size_fault
from fmtsim.gemm.products.resolver import check_target
from fmtsim.gemm.targets.doubts import caller_level
from fmtsim.nn.conversion import hidden_by
from fmtsim.nn.modules import EmulatedModule, emulated_class, emulated_types
from fmtsim.nn.raw_matmuls import RawMatrix, raw_matrices, raw_parameters
from fmtsim.recipes.layer_plan import LayerPlan
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, CoverageWarning, FmtsimError, shown

Configure = Callable[[str], LinearConfig | None]
Planner = Callable[[str], LayerPlan | None]
Filter = Callable[[nn.Module, str], bool]
FILTERED = "filter_fn leaves it out"
NO_CONFIG = "recipe(name) returned None"
NO_MATRIX = "no matrix among its parameters"
LOOKED_UP = "its rows are looked up, not multiplied"  # of nn.Embedding
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_alone(format: Any, fast_accum: bool) -> None:
    """Refuse arguments of ``convert`` beside a recipe, which has formats and use_fast_accum of its own."""
    if format is not None:
        raise ArgumentError(
            f"recipe= and format={shown(format)} both name formats; leave format= out, or write "
            "recipe=linear_config(x=, w=, g=, scaling=, rounding=, grad_rounding=)"
        )
    if fast_accum:
        raise ArgumentError(
            "fast_accum= goes with format=; recipes have their own: write recipe=linear_config(..., fast_accum=True)"
        )


def meanings(recipe: Any) -> list[str]:
    """Return the keywords of ``convert`` that take a value: of ``"recipe"``, ``"format"``, ``"target"``."""
    readers = {"recipe": partial(get_recipe, kind="training"), "format": get_format,
               "target": partial(check_target, "convert")}  # fmt: skip
    keywords = ["format"] if isinstance(recipe, Quantizer) else []
    for keyword, read in readers.items():
        with suppress(FmtsimError):
            read(recipe)  # type: ignore[operator]
            keywords.append(keyword)
    return keywords


def configure(config: Any, format: Any, fast_accum: bool) -> Configure:
    """Return what gives each layer its config, from the argument of ``convert`` that names formats.

    Raises:
        ArgumentError: There is none, or it is not one.
    """
    if config is None and format is None:
        raise ArgumentError("convert got no format; pass recipe='te_mxfp8', recipe=linear_config(...) or format='e4m3'")
    if format is not None:
        config = linear_config(x=format, w=format, g=format, scaling=None, fast_accum=fast_accum)
    if isinstance(config, LinearConfig):
        return lambda name: config
    if not callable(config) or not takes(config, "name"):
        raise ArgumentError(
            f"recipe={shown(config)} is not a recipe's name, file or record, a LinearConfig or a function of a layer's "
            "name; build a LinearConfig with linear_config(x=, w=, g=)"
        )
    return config


def machine_options(
    target: Any, plan: GemmPlan | None, native: bool | None, verb: str = "convert"
) -> dict[str, Any] | None:  # fmt: skip
    """Return the machine of ``convert``, or of another verb, as keywords of Gemm, None where none is named.

    Raises:
        ArgumentError: An unknown target, or plan or native without one.
    """
    if target is None and plan is None and native is None:
        return None
    if not isinstance(target, str) or target != "recipe":
        target = check_target(verb, target, plan)
    return {"target": target, "plan": plan, "native": native}  # Recipe.on resolves target="recipe"


def recipe_planner(recipe: Recipe, model: nn.Module) -> Planner:
    """Return what gives each layer its plan under a recipe, whose rules are checked against the model."""
    selector = Selector(model)
    selector.check(recipe)
    return lambda name: selector.plan(name, recipe)


def idle_shares(recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """Return what to say of rules about a share of the blocks, where a model has none."""
    shares = [r for r in recipe.rules if isinstance(r.first_blocks, float) or isinstance(r.last_blocks, float)]
    if not shares or find_blocks(model):
        return ()
    return tuple(f"rule {rule.where!r} found no blocks and leaves no layer out" for rule in shares)


def with_rules(
    planner: Planner, rules: Sequence[Rule], model: nn.Module, machine: dict[str, Any] | None,
    recipe: Recipe | None,
) -> Planner:  # fmt: skip
    """Return what gives each layer the plan of another planner, but where rules say otherwise, on the same machine.

    Raises:
        ArgumentError: A rule fits no layer.
    """
    made_for = None if recipe is None else recipe.machine
    extra, selector = Recipe(name="convert(rules=)", rules=tuple(rules), machine=made_for), Selector(model)
    extra = extra if machine is None else extra.on(**machine)
    selector.check(extra)  # a rule that fits no layer is an error

    def plan(name: str) -> LayerPlan | None:
        layer_plan, rules = planner(name), selector.plan(name, extra).rules  # up to a rule without steps
        if layer_plan is None or not rules:
            return layer_plan
        if rules[-1].steps is None:
            return LayerPlan(rules=rules, default=None)  # a rule without steps decides every step
        return LayerPlan(rules=(*rules, *layer_plan.rules), default=layer_plan.default)

    return plan


def constant_planner(configure: Configure, machine: dict[str, Any] | None) -> Planner:
    """Return what gives each layer a plan without a schedule, on a machine where one is named."""
    if machine is not None and machine["target"] == "recipe":
        raise ArgumentError("target='recipe' is the machine that a recipe names; pass recipe='te_current' or another")

    def plan(name: str) -> LayerPlan | None:
        config = configure(name)
        if config is not None and not isinstance(config, LinearConfig):
            raise ArgumentError(f"recipe({name!r}) returned {shown(config)}; it must return a LinearConfig or None")
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
    attention = projections(model)
    for name, module in model.named_modules():
        # 1. why it cannot be converted, or is not meant to be; filter_fn is asked about what could be
        if isinstance(module, EmulatedModule):
            raise ArgumentError(
                f"layer {shown(name)} is converted already; call fmtsim.revert(model) before converting again"
            )
        reason = why_not(module)
        if reason is None and module in attention:
            reason = f"belongs to the attention {attention[module][0]!r}, which uses its weights"
        if reason is None and filter_fn is not None and not filter_fn(module, name):
            reason = FILTERED
        # 2. what it runs at which step: no config, or none at any step, is high precision
        layer_plan = planner(name) if reason is None else None
        if reason is None and layer_plan is None:
            reason = NO_CONFIG
        elif layer_plan is not None and not layer_plan.configs:
            reason = layer_plan.why_high  # high precision at every step
        if reason is not None or layer_plan is None:
            reasons[name] = reason or ""
            continue
        # 3. what is to be converted is checked before anything changes
        _check_layer(name, module, layer_plan, total_steps)
        plan.append((module, name, layer_plan))
    return plan, reasons


def plan_products(
    model: nn.Module, planner: Planner, filter_fn: Filter | None, total_steps: int | None, reasons: dict[str, str]
) -> list[tuple[str, RawMatrix, LayerPlan]]:
    """Decide for every matrix that a model multiplies with in code of its own; what is left goes into ``reasons``."""
    plan = []
    for name, matrix in raw_matrices(model).items():
        if filter_fn is not None and not filter_fn(matrix.module, matrix.owner):
            reasons[matrix.owner] = FILTERED
            continue
        layer_plan = planner(name)
        if layer_plan is None or not layer_plan.configs:
            reasons[matrix.owner] = NO_CONFIG if layer_plan is None else layer_plan.why_high
            continue
        _check_schedule(name, layer_plan, total_steps)
        plan.append((name, matrix, layer_plan))
    return plan


def _check_layer(name: str, module: nn.Module, layer_plan: LayerPlan, total_steps: int | None) -> None:
    """Refuse a schedule that contradicts itself or has no length, sizes that do not fit, and a hidden forward."""
    _check_schedule(name, layer_plan, total_steps)
    hiding = hidden_by(module)  # such a forward would run in place of the emulated one
    if hiding is not None:
        text = (
            f"layer {name!r} ({type(module).__name__}) has a forward of its own on the instance, {hiding}, which would"
        )
        step = "take it off (del layer.forward), convert, and put it around the converted layer's forward, or leave"
        raise ArgumentError(f"{text} hide the emulated one; {step} the layer out with filter_fn= or a Rule(name=...)")
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
    emulated = emulated_class(cls)  # None for unknown classes, and for subclasses with another forward
    if emulated is None:
        if isinstance(module, nn.RNNCellBase):
            return (
                f"no emulated form of {cls.__name__}: one fused call multiplies with all of its weights; "
                f"use nn.{cls.__name__.removesuffix('Cell')}, or write its steps with nn.Linear"
            )
        base = next((base for base in emulated_types() if isinstance(module, base)), None)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return LOOKED_UP
        if base is None and all(p.dim() < 2 for p in module.parameters(recurse=False)):
            return NO_MATRIX
        if isinstance(module, parametrize.ParametrizationList):
            return "the product of a parametrization, which makes a weight of it"
        if base is None:
            return f"no emulated form of {cls.__name__}"
        return f"overrides {base.__name__}.forward; call fmtsim.EmulatedGEMM in it"
    weights = [p for p in module.parameters(recurse=False) if p.dtype not in _FLOATS]
    if weights and hasattr(module, "quantization_scheme"):
        return "compressed by compressed-tensors; load it with CompressedTensorsConfig(dequantize=True)"
    return f"its parameters have dtype {weights[0].dtype}" if weights else emulated.why_left(module)


def projections(model: nn.Module) -> dict[nn.Module, tuple[str, nn.Module]]:
    """Return the layers whose weights an attention module multiplies with itself, with that module and its name."""
    return {m.out_proj: (name, m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}


class Selector:
    """Select layers of a model by the rules of a recipe.

    Args:
        model: Any module.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._raw = raw_matrices(model)  # keys are the names that rules match
        first: dict[str, list[str]] = {}
        for name, matrix in self._raw.items():
            first.setdefault(matrix.owner, []).append(name)
        self._layers = {
            layer: module
            for name, module in modules.items()
            for layer in first.get(name, [name] if emulated_class(type(module)) else [])
        }
        self._blocks = find_blocks(model)  # names of blocks in the model's order
        numbers = {name: i for i, name in enumerate(self._blocks)}  # the number of each block
        self._places = {name: block_number(name, numbers) for name in self._layers}
        # Heads: the last linear layer and those that share its weight, unless it is in a block, and products that the
        # model writes with the weight of an embedding.
        tied = {name for name, matrix in self._raw.items() if matrix.head}
        weights = {
            name: m.weight for name, m in self._layers.items() if isinstance(m, nn.Linear) and hasattr(m, "weight")
        }
        weights |= {name: getattr(matrix.module, matrix.parameter) for name, matrix in self._raw.items()}
        linear = [name for name in self._layers if name in weights and weights[name].dim() == 2 and name not in tied]
        if not linear or self._places[linear[-1]] is not None:
            self._heads = tied  # the last linear layer is inside a block, or there is none
        else:
            self._heads = tied | {name for name in linear if weights[name] is weights[linear[-1]]}
        self._model = type(model).__name__

    def check(self, recipe: Recipe) -> None:
        """Refuse a rule whose name or kind fits no layer, or that counts blocks where there are none.

        Rules that are optional pass. One whose share of the blocks is more than doubled by rounding up to whole blocks
        warns, if it leaves them in high precision.

        Raises:
            ArgumentError: There is such a rule.
        """
        for i, rule in enumerate(recipe.rules):
            counts = type(rule.first_blocks or rule.last_blocks or 0.5) is int  # a share of no blocks is none of them
            if not self._blocks and counts and not rule.optional:
                field = "first_blocks" if rule.first_blocks else "last_blocks"
                raise ArgumentError(
                    f"rules[{i}] of recipe {recipe.name!r} has {field}={getattr(rule, field)!r}, and {self._model} has "
                    "no blocks to count: no nn.ModuleList or nn.Sequential whose elements all hold layers; name the "
                    "layers instead, with Rule(name='fc3|head') in dataclasses.replace(recipe, rules=...), or pass "
                    "Rule(optional=True)"
                )
            named = rule.name is not None or rule.kind is not None
            if named and not rule.optional and not any(self.fits(name, rule) for name in self._layers):
                some = ", ".join(list(self._layers)[:4])
                raise ArgumentError(
                    f"rules[{i}] of recipe {recipe.name!r} ({rule.where}) fits no layer of the model, which has {some}"
                    f"{' ...' if len(self._layers) > 4 else ''}; correct it, or pass Rule(optional=True)"
                )

        count = len(self._blocks)
        for rule, which in itertools.product(recipe.rules, ("first", "last")):
            share = getattr(rule, f"{which}_blocks")
            if not isinstance(share, float) or rule.use is not None or not count:
                continue
            number = _number(share, count)
            if number > 2 * share * count:  # a share of 0.2 of two blocks is one block, half of them
                warnings.warn(
                    f"recipe {recipe.name} leaves the {which} {share:.0%} of the blocks in high precision, which is "
                    f"{number} of {count} in {self._model}; where that is not meant, give rules= of your own by "
                    "dataclasses.replace",
                    CoverageWarning,
                    stacklevel=caller_level(),
                )

    def plan(self, name: str, recipe: Recipe) -> LayerPlan:
        """Return what a layer of the model runs under a recipe."""
        fitting: list[Rule] = []
        for rule in recipe.rules:
            if self.fits(name, rule):
                fitting.append(rule)
                if rule.steps is None:  # a rule without steps decides every step
                    break
        return LayerPlan(rules=tuple(fitting), default=recipe.linear)

    def fits(self, name: str, rule: Rule) -> bool:
        """Return True if a rule applies to a layer."""
        names = {name, self._raw[name].owner} if name in self._raw else {name}
        if rule.name is not None and not any(re.search(rule.name, layer_name) for layer_name in names):
            return False
        if rule.kind is not None and rule.kind not in (cls.__name__ for cls in type(self._layers[name]).__mro__):
            return False
        if rule.head and name not in self._heads:
            return False
        if not (rule.first_blocks or rule.last_blocks):
            return True
        place, count = self._places[name], len(self._blocks)
        if place is None:
            return False
        return place < _number(rule.first_blocks, count) or place >= count - _number(rule.last_blocks, count)

    @property
    def heads(self) -> list[nn.Module]:
        """The layers that make logits."""
        return [self._raw[name].module if name in self._raw else self._layers[name] for name in self._heads]


def _number(blocks: int | float, count: int) -> int:
    return math.ceil(blocks * count) if isinstance(blocks, float) else blocks


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks, in the model's order; none where it has no stack of them.

    A stack is an ``nn.ModuleList`` or ``nn.Sequential`` whose elements all hold convertible layers. Where stacks are
    nested, one whose elements are of one class has the blocks and the stacks inside them are parts of a block; one
    of different classes around such a stack is not one. Several stacks follow each other: the stages of a ResNet, or
    an encoder and a decoder; those whose elements are layers themselves count only where there are no others.
    """
    stacks = {name: list(module) for name, module in model.named_modules() if _is_stack(module)}  # with their elements
    even = {name for name, blocks in stacks.items() if len({type(block) for block in blocks}) == 1}  # of one class
    outer = {name for name in even if not any(is_inside(name, other) for other in even)}  # others lie in a block
    if not outer:  # no stack of equals: whatever is outermost
        outer = {name for name in stacks if not any(is_inside(name, other) for other in stacks)}
    outer = {name for name in outer if emulated_class(type(stacks[name][0])) is None} or outer  # layers only if alone
    return [f"{name}.{i}" if name else str(i) for name in stacks if name in outer for i in range(len(stacks[name]))]


def block_number(layer: str, blocks: dict[str, int]) -> int | None:
    """Return the number of the block that a layer belongs to, None for one outside; blocks are numbered by name."""
    parts = layer.split(".")
    names = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((blocks[name] for name in names if name in blocks), None)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        return False
    return all(any(emulated_class(type(part)) or raw_parameters(part) for part in block.modules()) for block in module)


def is_inside(name: str, other: str) -> bool:
    """Return True if a module lies inside another, by their names; the model's is empty."""
    return name != other and (not other or name.startswith(f"{other}."))
