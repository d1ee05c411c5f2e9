# SPDX-License-Identifier: Apache-2.0
"""convert and revert: give a model's layers emulated matrix products, and take them away again."""

from __future__ import annotations  # help shows the names of types

import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

import torch
from torch import nn

from fmtsim.casts.arguments import check_module, refuse_others, spelled, takes
from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.targets.doubts import caller_level
from fmtsim.nn.conversion import Root, change_class, conversion, record, root
from fmtsim.nn.coverage import COMPUTED, Coverage, RawWeight, estimated, is_meant, percent
from fmtsim.nn.modules import EmulatedModule, emulated_class
from fmtsim.nn.planning import (
    Configure,
    Filter,
    check_alone,
    configure,
    constant_planner,
    idle_shares,
    machine_options,
    meanings,
    plan_layers,
    plan_products,
    recipe_planner,
    with_rules,
)
from fmtsim.nn.raw_matmuls import ParameterProduct, attach_products, computed_products
from fmtsim.nn.state import attach_name, converted_modules, is_converted
from fmtsim.nn.swaps import find_swaps
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.serialization import rules_of
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, CoverageWarning, shown

Model = TypeVar("Model", bound=nn.Module)

_LOG = logging.getLogger("fmtsim")
# Inference kernels of torch that read the weights of their children and so never call them; off while converted.
_FUSED = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


@spelled
def convert(
    model: Model,
    recipe: str | Path | Recipe | LinearConfig | Configure | Format | None = None,
    *more: Never,
    format: str | Format | Quantizer | None = None,
    target: Any = None,
    plan: GemmPlan | None = None,
    fast_accum: bool = False,
    native: bool | None = None,
    rules: Sequence[Rule] | str | Path = (),
    generator: Generator = None,
    filter_fn: Filter | None = None,
    total_steps: int | None = None,
    attention: str | AttentionConfig | None = None,
    **others: Never,
) -> Model:
    """Give linear layers, convolutions (transposed, too) and nn.MultiheadAttention emulated matrix products, in place.

    Modules stay the same objects with the same Parameters, hooks, flags and state_dict keys, so optimizers, tied
    weights and checkpoints go on working; only their class changes until ``revert``. Delayed scales are added to the
    state_dict, with the recipe's name; one without them loads as before. Products that a model writes
    itself with a Parameter (``F.linear(x, self.weight)``, ``x @ self.experts[e]``, bmm, einsum, grouped_mm, a head that
    multiplies by the embedding) are emulated while the module that writes them runs, under the name of the module
    or, where that holds several matrices, ``module.parameter`` (docs/recipes.md, "Products in a model's own code").
    Products of two activations stay in high precision; a recipe with ``Recipe.attention`` quantises those of modules
    that call ``scaled_dot_product_attention``. A recipe may also exchange gated layers or scale the whole model, which
    divides its weights (``Recipe.replace``: ``unit_scaling``, ``mu_s``), and save activations in low precision
    (``Recipe.activations``). Formats come from either ``recipe`` or ``format``; ``target`` goes with both.

    Args:
        model: Any module; it may itself be a layer.
        recipe: A recipe for training: its name (``fmtsim.list_recipes(kind="training")``), its JSON file or its record;
            or a LinearConfig for all layers (``linear_config`` has formats, scaling and rounding of each operand), or a
            function from a layer's name to its LinearConfig, None to leave the layer alone. A format's name or record
            that is no recipe's is ``format``.
        format: Format of activations, weights and gradients, a name, record or Quantizer, in place of a recipe: as
            ``recipe=linear_config(x=format, w=format, g=format, scaling=None)``.
        target: What multiplies, as in ``fmtsim.mm``: a GPU with its library (``"h200"``, a plan file), a matrix unit
            alone (``"hopper.wgmma"``), a datapath; or ``"recipe"``: the machine that the recipe was made for.
        plan: Accumulation order of every product instead of the target's, or of the unit's single chain.
        fast_accum: use_fast_accum of the target's forward products, with ``format``; recipes have their own.
        native: Whether a target runs natively: None lets the GPU do it itself where the model is on the GPU that the
            target describes, True insists on that, False emulates.
        rules: Exceptions for layers or steps (``fmtsim.Rule``), ahead of the recipe's own: the first that fits
            counts, and one that fits no layer is an error. ``attribute`` suggests some. Or a JSON file of rules, which
            ``fmtsim attribute`` and ``fmtsim search`` write.
        generator: Keys of stochastic rounding: None draws from torch's default generator, an int makes one
            torch.Generator for the whole model, a torch.Generator is used as it is.
        filter_fn: ``filter_fn(module, name)`` says whether to convert a layer, a module that writes products, or one
            that a recipe exchanges.
        total_steps: Optimizer steps of the run, for recipes whose schedules are fractions of it. A model under a
            schedule has to be told the step (``fmtsim.nn.set_step``).
        attention: How attention runs, in place of what the recipe says: a record, or the name of a recipe that has
            one, such as ``"sage3"``. Without a recipe all layers stay in high precision.

    Returns:
        The same model. ``fmtsim.report`` says what was converted and why the rest was not; its one line
        (``report(model).summary``) goes to the logger ``"fmtsim"`` as INFO. Where more than 1 % of the weights'
        multiply-adds, estimated from shapes, stay as they are although no recipe, config or filter says so, a
        CoverageWarning names the layers.

    Raises:
        ArgumentError: nothing to convert, a layer converted already, no unambiguous format, a recipe whose attention
            or replacement finds nothing, or a machine that does not multiply an operand (the message says which, and
            which machines do). The model is then unchanged.
        FormatError: an unknown format or rounding, or operands that no machine multiplies.

    >>> from fmtsim.nn.report import report
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), recipe="te_current")
    >>> model(torch.ones(32, 64)).sum().backward()
    >>> print(report(model).summary)
    te_current: 100 % of weight multiply-adds simulated (forward and backward); estimated from shapes
    """
    refuse_others(convert, more, others)
    check_module("convert", model)
    if filter_fn is not None and not takes(filter_fn, model, ""):
        raise ArgumentError(
            f"convert filter_fn={shown(filter_fn)} is not a function of a module and its name; "
            "write filter_fn=lambda module, name: 'mlp' in name"
        )
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise ArgumentError(f"total_steps={shown(total_steps)} is not a number of optimizer steps; pass 1 or more")
    keywords = meanings(recipe)
    if format is None and keywords[:1] == ["format"]:
        recipe, format = None, recipe  # type: ignore[assignment]
    elif keywords == ["target"]:
        raise ArgumentError(f"recipe={shown(recipe)} is a target; write target= beside recipe= or format=")
    # 1. the machine, the recipe, and what gives each layer its plan
    machine = machine_options(target, plan, native)
    recipe, named = recipe if attention is None else _with_attention(recipe, attention, format), None
    if recipe is not None:
        check_alone(format, fast_accum)
    both: tuple[str, ...] = ()
    if isinstance(recipe, str) and "format" in keywords:
        both = (f"{recipe!r} is the recipe of that name, not the format (format={recipe!r})",)
    if isinstance(recipe, str | Path | Recipe | PtqRecipe):
        named = get_recipe(recipe, kind="training")  # type: ignore[call-overload]  # which refuses a PtqRecipe
        named = named if machine is None else named.on(**machine)
        planner = recipe_planner(named, model)
    else:
        planner = constant_planner(configure(recipe, format, fast_accum), machine)
    rules = () if rules is None else rules_of(rules)
    planner = with_rules(planner, rules, model, machine, named) if rules else planner  # rules of this call come first
    # 2. what to convert and why not the rest: an error until here leaves the model unchanged
    layers, reasons = plan_layers(model, planner, filter_fn, total_steps)
    products = plan_products(model, planner, filter_fn, total_steps, reasons)
    swaps = None if named is None else find_swaps(model, named, filter_fn)
    if not layers and not swaps and not products:
        modules = dict(model.named_modules())
        leaves = [name for name in reasons if next(modules[name].children(), None) is None][:4]  # four say enough
        named_reasons = "; ".join(f"{name or type(model).__name__}: {reasons[name]}" for name in leaves)
        text = f"convert found nothing to convert in {type(model).__name__}"
        also = f"; format={recipe!r} converts all with that format" if both else ""
        raise ArgumentError((f"{text} ({named_reasons})" if named_reasons else text) + also)
    # 3. classes of layers, products that modules write, and what the recipe exchanges
    keys = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator  # of the whole model
    for module, name, layer_plan in layers:
        changed = emulated_class(type(module))
        assert changed is not None  # plan_layers only lists modules that have one
        change_class(module, changed)
        assert isinstance(module, EmulatedModule)
        module.emulate(name, layer_plan, keys, total_steps)  # quantisers, and memory for delayed scales
    attach_products(model, products, keys, total_steps)
    if swaps is not None:
        swaps.apply(model, keys)
    if named is not None and rules:
        named = dataclasses.replace(named, name=f"{named.name}+rules")
    # 4. the record of the root: under which recipe, and what was left alone
    for module in model.modules():
        if named is not None and isinstance(module, EmulatedModule) and module.emulation is not None:
            module.emulation.recipe = named.name
    notes = () if swaps is None else (*swaps.notes, *swaps.recipe.left_to_training)
    if named is not None and named.multiple > 1:
        notes = (f"its source refuses rows and features that {named.multiple} does not divide, fmtsim not", *notes)
    for hook in root(model).hooks.values():  # of an earlier convert, which exchanged attention alone
        hook.remove()
    facts = record(model).root = Root(
        recipe=None if named is None else named.name, total_steps=total_steps,
        reasons=reasons if swaps is None else reasons | swaps.reasons,
        notes=(*both, *(() if named is None else idle_shares(named, model)), *notes),
    )  # fmt: skip
    attach_name(model)
    # 5. inference kernels off that would read converted layers' weights without calling the layers
    for module in model.modules():
        for cls, attribute, off in _FUSED:
            if isinstance(module, cls) and is_converted(module):
                record(module).attributes.setdefault(attribute, module.__dict__[attribute])
                module.__dict__[attribute] = off
    # 6. hooks that warn later, the line that report has, and a warning where the caller chose nothing of what stays
    if any(layer_plan.scheduled for _, _, layer_plan in (*layers, *products)):
        facts.hooks["schedule"] = model.register_forward_pre_hook(_remind)
    if products:
        facts.hooks["computed"] = model.register_forward_hook(_warn_computed)
    coverage = estimated(model, facts.reasons)
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s", summary_line(model, facts.recipe, coverage, facts.notes))
    if (layers or products) and filter_fn is None and not callable(recipe):
        text = (
            f"convert leaves {{share}} of the weight multiply-adds of {type(model).__name__} as they are, estimated "
            "from shapes: {left}; fmtsim.report(model, batch) counts them, and filter_fn= says what is meant"
        )
        _warn_not_simulated(coverage, [row for row in coverage.raw if not is_meant(row.reason)], text)
    return model


def _with_attention(recipe: Any, attention: Any, format: Any) -> Recipe:
    base = Recipe(name="attention") if recipe is None and format is None else recipe
    if not isinstance(base, str | Path | Recipe):
        raise ArgumentError("attention= goes with a recipe or alone; for layers by format= call convert_attention, too")
    how = get_recipe(attention, kind="training").attention if isinstance(attention, str) else attention
    if not isinstance(how, AttentionConfig):
        raise ArgumentError(f"attention={shown(attention)} is not attention; pass 'fa3', 'sage3' or an AttentionConfig")
    return dataclasses.replace(get_recipe(base, kind="training"), attention=how)


def _warn_not_simulated(coverage: Coverage, rows: list[RawWeight], text: str) -> None:
    """Warn of weights with more than 1 % of the multiply-adds; ``text`` has places for their share and their names."""
    count = sum(row.multiply_adds for row in rows)
    if count * 100 > coverage.total:
        share, left = percent(count, coverage.total), dataclasses.replace(coverage, raw=tuple(rows)).left()
        warnings.warn(text.format(share=share, left=left), CoverageWarning, stacklevel=caller_level())


def summary_line(
    model: nn.Module, recipe: str | None, coverage: Coverage, notes: Sequence[str] = (), products: Sequence[Any] = ()
) -> str:
    """Return one line: what a model was converted with, on which machine, its coverage, guesses, and what was not done.

    Args:
        model: The model.
        recipe: The name of its recipe; None names the formats.
        coverage: What ``measured`` or ``estimated`` returned.
        notes: What of the recipe was not done.
        products: Rows with the basis of their accumulation order.
    """
    running = [m.emulation.config for m in model.modules() if isinstance(m, EmulatedModule) and m.emulation is not None]
    if not running and not coverage.simulated:
        return f"{type(model).__name__} is not converted: {coverage}"
    formats = list(Counter(str(config.on()) for config in running))  # without their machines, which the line names once
    name = recipe or (formats[0] + (f" and {len(formats) - 1} other configs" if formats[1:] else "") if formats else "")
    machines = list(dict.fromkeys(machine for config in running for machine in config.machines))
    where = f" on {' and '.join(machines)}" if machines else ""
    guesses = sum(row.basis == "guess" for row in products)
    more = [f"{guesses} of {len(products)} products by a guess"] if guesses else []
    return "; ".join([f"{name}{where}: {coverage}", *more, *notes])


def _remind(model: nn.Module, inputs: Any) -> None:
    """Warn at the second training forward if ``set_step`` was not called before it; a forward pre-hook of the root."""
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    if torch._C._current_graph_task_id() != -1:  # activation checkpointing runs it again
        return
    facts = root(model)
    facts.forwards += 1
    if facts.forwards < 2:
        return
    hook = facts.hooks.pop("schedule", None)
    if hook is None:  # another replica of nn.DataParallel warned
        return
    hook.remove()
    scheduled = [
        how for m in model.modules() if (how := m.__dict__.get("emulation")) is not None and how.plan is not None
    ]
    if scheduled and not any(how.stepped for how in scheduled):
        warnings.warn(
            f"{scheduled[0].recipe or 'the config'} has a schedule, and set_step was not called: every step runs "
            "as the first one; call fmtsim.nn.set_step(model, step) before each step",
            CoverageWarning,
            stacklevel=caller_level(),
        )


def _warn_computed(model: nn.Module, inputs: Any, out: Any) -> None:
    """Warn after the first forward of weights that the model's code computes before their product; a forward hook."""
    if torch.compiler.is_compiling():
        return
    facts = root(model)
    hook = facts.hooks.pop("computed", None)
    if hook is not None:
        hook.remove()  # one forward pass shows every product
    if hook is None or not computed_products(model):
        return
    text = (
        f"{{share}} of the weight multiply-adds of {type(model).__name__}, estimated from shapes, are not simulated: "
        "{left}; write such a product with fmtsim.EmulatedGEMM, and fmtsim.report(model, batch) counts it"
    )
    coverage = estimated(model, facts.reasons)
    _warn_not_simulated(coverage, [row for row in coverage.raw if row.reason == COMPUTED], text)


def revert(model: Model) -> Model:
    """Give every converted module its own class back and undo what a recipe exchanged, in place; return the model.

    What ``convert_attention`` and ``convert_swiglu`` did on their own stays.

    Raises:
        ArgumentError: the model holds no converted module, or one whose class was changed since.

    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), format="mxfp8_e4m3")
    >>> type(revert(model)[0]) is nn.Linear
    True
    """
    converted = [(n, m) for n, m in converted_modules(model, "revert") if not isinstance(m, ParameterProduct)]
    for name, module in converted:
        if "original_class" not in vars(type(module)):  # a class that was made of the emulated one since
            raise ArgumentError(
                f"layer {name!r} became a {type(module).__name__} after convert; "
                "undo that change (for example its parametrization) first"
            )
    for part in list(model.modules()):
        conversion(part).undo(part)
    return model


def set_step(model: nn.Module, step: int) -> None:
    """Tell a converted model which optimizer step comes next, for recipes with a schedule.

    Args:
        model: A model that ``convert`` was given.
        step: How many steps were done before it; 0 for the first.

    Raises:
        ArgumentError: The step is negative, or the model is not converted.

    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), recipe="te_delayed")
    >>> for step in range(2):
    ...     set_step(model, step)
    ...     model(torch.ones(32, 64)).sum().backward()
    """
    if type(step) is not int or step < 0:
        raise ArgumentError(f"step={shown(step)} is not a step; pass a whole number from 0")
    for _, module in converted_modules(model, "set_step"):
        how = module.emulation
        if how is not None and how.plan is not None:
            how.stepped = True
            how.run(how.plan.at(step, root(model).total_steps) or LinearConfig())
