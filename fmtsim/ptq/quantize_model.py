# SPDX-License-Identifier: Apache-2.0
"""ptq: quantise a trained model from a few batches of data, without training it."""

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Never, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from fmtsim.casts.arguments import refuse_others, spelled
from fmtsim.casts.quantize import encode
from fmtsim.formats.block import PackedFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import Layer
from fmtsim.nn.conversion import root
from fmtsim.nn.convert import convert, revert
from fmtsim.nn.modules import EmulatedLinear, EmulatedModule
from fmtsim.nn.multihead_attention import convert_attention, revert_attention
from fmtsim.nn.planning import machine_options
from fmtsim.nn.raw_matmuls import raw_matrices
from fmtsim.ptq.calibrate import Part, batches_of, call, check_model, evaluating, row_major
from fmtsim.ptq.ptq_report import UNREACHED, PtqReport, PtqRow, coverage_of_weights, left_alone, report_row, tied
from fmtsim.ptq.ptq_state import Quantised, RoundedWeight, extend
from fmtsim.ptq.reshape import attach, detach, equalise, rotate, stored, unsmooth
from fmtsim.ptq.steps import (
    bias_corrects,
    collected,
    install,
    measure,
    measure_batch_norm,
    round_weights,
    scales_of,
    smooth_inputs,
    stages,
)  # fmt: skip
from fmtsim.recipes.layer_plan import HIGH
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Rule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.serialization import rules_of
from fmtsim.spec.operand import block_of
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, CoverageWarning, FmtsimError, PlanUnknownWarning, did_you_mean, shown
from fmtsim.support.progress import Progress, make_progress
from fmtsim.support.table import some

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]
HEAD: Final = "the head of a language model; ignore=[] quantises it"


@spelled
def ptq(
    model: Model,
    recipe: str | Path | PtqRecipe,
    calibration_data: Any = None,
    *more: Never,
    ignore: Sequence[str] | None = None,
    rules: Sequence[Rule] | str | Path = (),
    filter_fn: Filter | None = None,
    progress: bool | None = None,
    target: Any = None,
    plan: GemmPlan | None = None,
    native: bool | None = None,
    **others: Never,
) -> Model:
    """Quantise a trained model's weights and activations, in place, from a few batches of data.

    Linear layers, convolutions and attention projections keep their objects and Parameters. Weights are overwritten by
    their quantised values, in their own dtype, which rounds once more where it is narrow: ``copy.deepcopy`` the model
    before to keep them. Inputs are quantised at every call, under static scales, which are buffers
    (``fmtsim.state``), or under scales made from the tensor at hand. Products are those of the machine that
    ``target`` names, as in ``fmtsim.convert``, and the report measures them there; without
    one they are float32, in no particular order. ``fmtsim.revert`` gives the classes back, not the weights.

    The steps: rotate; equalise weights; run the data and smooth; run it again for ranges and Hessians; round
    weights; run it once more to measure; store. All runs are of the model in high precision, in evaluation mode,
    without gradients. Deterministic on one device and number of threads. A layer that no data reaches is rounded to
    nearest by its own range; a warning and the report name it.

    Args:
        model: A trained model, not converted yet.
        recipe: A name (``fmtsim.list_recipes(kind="ptq")``), a JSON file or a ``PtqRecipe``.
        calibration_data: Batches, in any iterable: each a tensor, a tuple or list of arguments or a dict of keyword
            arguments of the model. It is read once and kept until the end. Recipes that round weights to nearest, and
            inputs under scales made in each call, need none; the report then has no errors of outputs.
        ignore: Layers to leave in high precision: names, of containers too (``"lm_head"``, ``"vision"``,
            ``"layers.0"``), or regular expressions, ``"re:"`` before them, that match a name from its beginning. None
            leaves the head of a language model alone, as llm-compressor's and torchao's users do: the layer that
            ``get_output_embeddings`` returns, and one by the name ``lm_head``; ``ignore=[]`` quantises it.
        rules: Exceptions for layers, ahead of the recipe's own, as in ``fmtsim.convert``; a JSON file of them, too.
        filter_fn: ``filter_fn(module, name)`` says whether to quantise a layer.
        progress: Show bars (lines elsewhere); None shows them on a terminal and in a notebook only.
        target, plan, native: The machine that the quantised layers multiply on, as in
            ``fmtsim.convert``; None is the recipe's own, if it has one.

    Returns:
        The same model. ``fmtsim.report`` has a table of its layers, a PtqReport.

    Raises:
        ArgumentError: An unknown recipe, no layer to quantise, an ``ignore`` that is no module, a model that is
            compiled or whose weights are missing or hold NaN or Inf, data that a recipe needs and is missing, that is
            empty or that the model does not take, that holds NaN or Inf, or that reaches no layer at all, or a machine
            that does not multiply an operand or a layer's sizes, which is found before the data runs.
            The model is then as it was.
        FormatError: Operands that no machine multiplies.

    >>> import torch, fmtsim
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> batches = [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    >>> model = fmtsim.ptq(model, "int8_static", batches)
    >>> fmtsim.report(model)["2"].w
    'int8'
    >>> weights_alone = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "int4_g32", ignore=["1"])
    >>> fmtsim.report(weights_alone).left_alone[0][0]
    '1'
    """
    refuse_others(ptq, more, others)
    began = time.perf_counter()
    check_model("ptq", model)
    recipe = get_recipe(recipe, kind="ptq")
    machine = machine_options(target, plan, native, "ptq")
    recipe = recipe if machine is None else recipe.on(**machine)
    recipe, why = excepted(model, recipe, ignore, rules_of(rules))
    if calibration_data is None and recipe.needs_data:
        raise ArgumentError(
            f"recipe {recipe.name!r} needs calibration_data= for {recipe.needs_data}; pass a few batches: "
            f"fmtsim.ptq(model, {recipe.name!r}, batches)"
        )
    batches = [] if calibration_data is None else batches_of(calibration_data)
    before, untied, unreached = stored(model), False, list[str]()
    configs = prepared(model, recipe, filter_fn)
    if misfits := _ggml_fallbacks(configs, model):
        revert(model)
        recipe = replace(recipe, rules=(*misfits, *recipe.rules))
        why |= {f"{HIGH}: {rule.where}": reason for rule, reason in misfits.items()}
        configs = prepared(model, recipe, filter_fn)
    root(model).reasons = {name: why.get(reason, reason) for name, reason in root(model).reasons.items()}
    try:
        with row_major(model), make_progress(progress, verb="ptq") as show:
            if recipe.rotate is not None:
                untied = attach(model, recipe.rotate)
                rotate(model, recipe.rotate)
            equalised = () if recipe.equalise is None else tuple(equalise(model, recipe.equalise))
            smoothed = set() if recipe.smooth is None else smooth_inputs(model, recipe.smooth, configs, batches, show)
            rows: list[PtqRow] = []
            weights: dict[str, RoundedWeight] = {}
            parts: list[Part] = []
            for products in stages(model, recipe, configs, batches, show):
                collected(products, recipe, batches, show, parts)
                parts += products.parts.values()
                unreached += [p.name for p in products.parts.values() if batches and not p.rows]
                round_weights(products, recipe, show)
                measure(products, recipe, batches, show)
                for slot in products.slots.values():
                    coded = recipe.weights is not None and slot.quantizer.format is not None
                    methods = [str(recipe.smooth)] * (slot.parts[0].name in smoothed) + [str(recipe.weights)] * coded
                    methods += ["bias correction"] * (recipe.bias_correction and bias_corrects(slot))
                    rows.append(report_row(slot, ", ".join(methods)))
                # What the weights of layers with one matrix are rounded with, before they are overwritten.
                for slot in products.slots.values():
                    for part in slot.parts:
                        if not part.part and slot.quantizer.format is not None:
                            fmt, w = slot.quantizer.format, slot.w if slot.clipped is None else slot.clipped
                            blocks = encode(w, fmt, pad=True).codes if isinstance(fmt, PackedFormat) else None
                            weights[part.name] = RoundedWeight(slot.quantizer, part.x, *scales_of(slot), blocks)
                install(products, recipe.bias_correction)
            extended = () if recipe.extended is None else extend(model, recipe.extended)
            _finish(model, recipe, batches, show)
    except BaseException:
        # give the model back as it was
        stored_ids = {id(t) for t, _ in before}
        unsmooth({name: m for name, m in model.named_modules() if isinstance(m, EmulatedModule)})
        detach(model, untied)
        revert(model)
        for module in model.modules():  # biases that correction made
            bias = module._parameters.get("bias")
            if bias is not None and id(bias) not in stored_ids:
                module._parameters["bias"] = None
        with torch.no_grad():
            for t, copy in before:
                t.copy_(copy)
        raise
    report = PtqReport(
        recipe=recipe.name, machine=recipe.machine, rows=tuple(rows), seconds=time.perf_counter() - began,
        equalised=equalised, left_alone=left_alone(model), tied=tied(model), extended=extended,
        attention=str(recipe.serving_attention or ""), unreached=tuple(unreached),
        coverage=coverage_of_weights(model, configs),
    )  # fmt: skip
    root(model).quantised = Quantised(recipe, weights, report)
    if unreached:
        warnings.warn(f"calibration never ran {some(unreached)}: {UNREACHED}", CoverageWarning, stacklevel=2)
    return model


def excepted(
    model: nn.Module, recipe: PtqRecipe, ignore: Sequence[str] | None, rules: Sequence[Rule] = ()
) -> tuple[PtqRecipe, dict[str, str]]:
    """Return a recipe with the exceptions of a call, and what to say of these instead of a layer plan's ``why_high``.

    The order is what to ignore, then rules, the recipe's own, and a head.

    Raises:
        ArgumentError: ``ignore`` is no list of names, or one of them is no module or regular expression.
    """
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore or ()):
        raise ArgumentError(f"ignore={shown(ignore)} is not a list of names; write ignore=['lm_head', 're:.*gate']")
    names = [name for name, _ in model.named_modules()]
    first = {}
    for entry in ignore or ():
        word = entry.removeprefix("re:")
        pattern = f"^(?:{word})" if word != entry else rf"(^|\.){re.escape(entry)}($|\.)"
        try:
            matches = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise ArgumentError(f"ignore={entry!r} is not a regular expression: {error}") from None
        if not matches:
            raise ArgumentError(f"ignore={entry!r} is no module of the model{did_you_mean(entry, names)}")
        first[Rule(name=pattern, optional=True)] = f"ignore={entry!r}"
    heads = {Rule(name=f"^{re.escape(name)}$", optional=True): HEAD for name in output_heads(model) if ignore is None}
    every = (*first, *rules, *recipe.rules, *heads)
    why = {f"{HIGH}: {rule.where}": reason for rule, reason in (first | heads).items()}
    return recipe if every == recipe.rules else replace(recipe, rules=every), why


# What llama-quantize takes where rows are no whole blocks: tensor_type_fallback in llama-quant.cpp, llama.cpp 007dbbf.
_GGML_FALLBACKS = {
    "q2_0": "q4_0", "q2_k": "q4_0", "q3_k": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1",
    "q6_k": "q8_0", "iq4_xs": "iq4_nl",
}  # fmt: skip


def _ggml_fallbacks(configs: Mapping[str, LinearConfig], model: nn.Module) -> dict[Rule, str]:
    """Return rules for layers whose rows are no whole blocks of ggml's; name those of other blocks in one warning."""
    rules, short = {}, []
    for name, config in configs.items():
        module: Any = model.get_submodule(name)
        fmt, columns = config.fprop.b.format, max(k for _, k in module.matrices(module))
        width = fmt.elements if isinstance(fmt, PackedFormat) else block_of(config.fprop.b)[1]
        if fmt is None or width is None or columns % width == 0:
            continue
        if not isinstance(fmt, PackedFormat):
            exported = columns > width and isinstance(module, EmulatedLinear)
            short += [f"{name} ({columns} inputs, blocks of {width})"] if exported else []
            continue
        other: Any = get_format(_GGML_FALLBACKS.get(fmt.name, fmt.name))
        use = LinearConfig(fprop=replace(config.fprop, b=Quantizer(format=other)))
        reason = f"its {columns} inputs fill no blocks of {other.name}; llama-quantize stores F16"
        rules[Rule(name=f"^{re.escape(name)}$", use=None if columns % other.elements else use)] = reason
    if short:
        text = "the last one is filled with zeros, which export refuses; leave layers out with ignore="
        warnings.warn(f"blocks do not divide {some(short)}: {text}", CoverageWarning, stacklevel=3)
    return rules


def output_heads(model: nn.Module) -> list[str]:
    """Return the names of the layers that make a language model's logits."""
    output = getattr(model, "get_output_embeddings", lambda: None)()  # of transformers
    modules = [(name, module) for name, module in model.named_modules() if name]
    return [name for name, module in modules if module is output or name.rpartition(".")[2] == "lm_head"]


def prepared(model: nn.Module, recipe: PtqRecipe, filter_fn: Filter | None = None) -> dict[str, LinearConfig]:
    """Convert a model to what it runs once it is quantised, and return the quantisers of each layer by its name."""
    written = {matrix.owner: "its model writes the product itself" for matrix in raw_matrices(model).values()}
    computed = "its weight is computed in every call; call torch.nn.utils.parametrize.remove_parametrizations first"
    written |= {name: computed for name, module in model.named_modules() if parametrize.is_parametrized(module)}
    chosen = filter_fn
    if written:
        chosen = lambda module, name: name not in written and (filter_fn is None or filter_fn(module, name))  # noqa: E731
    convert(model, recipe.prescribed, filter_fn=chosen)  # its checks are about weights, too
    reasons = root(model).reasons | written
    try:
        modules = {name: module for name, module in model.named_modules() if isinstance(module, EmulatedModule)}
        configs = {name: module.emulation.config for name, module in modules.items() if module.emulation is not None}
        if recipe.machine:
            for name, module in modules.items():
                _try_products(name, module, recipe)
    finally:
        revert(model)
    convert(model, recipe.inference, filter_fn=lambda module, name: name in configs)
    root(model).reasons = reasons
    return configs


@torch.no_grad()
def _try_products(name: str, module: EmulatedModule, recipe: PtqRecipe) -> None:
    """Refuse a layer that the machine does not multiply, by one row of zeros of its sizes and dtype."""
    assert module.emulation is not None
    config, like = module.emulation.config, next(module.parameters())
    hint = "leave it out with filter_fn= or a Rule(name=...)"
    try:
        if getattr(module, "groups", 1) > 1 and recipe.served(config.fprop.a, config.fprop.b).b.source == "stored":
            raise ArgumentError("convolutions in groups keep no scales of their weights apart")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanUnknownWarning)  # about the row of zeros
            for outputs, inputs in module.matrices(module):
                run_layer(like.new_zeros(1, inputs), like.new_zeros(outputs, inputs), None, Layer(config))
    except FmtsimError as error:
        raise type(error)(f"layer {name!r}: {error}; {hint}") from None


def _finish(model: nn.Module, recipe: PtqRecipe, batches: list[Any], show: Progress) -> None:
    """Do what is about the whole quantised model."""
    attention = recipe.serving_attention
    if attention is not None:
        convert_attention(model, attention)
    try:
        if attention is not None:
            with evaluating(model), torch.no_grad():
                call(model, batches[0])  # attention that never reaches the function is found here, not in use
        if recipe.batch_norm:
            measure_batch_norm(model, batches, show)
    except BaseException:
        if attention is not None:
            revert_attention(model)
        raise
