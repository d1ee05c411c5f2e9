# SPDX-License-Identifier: Apache-2.0
"""state and load_state: what convert or ptq gave a model, for torch.save; operators that a PTQ recipe quantises."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.nn.conversion import Change, record, root, settings
from fmtsim.nn.convert import convert, revert
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.multihead_attention import convert_attention
from fmtsim.nn.state import converted_state, is_converted, load_converted_state
from fmtsim.ptq.calibrate import check_loaded
from fmtsim.ptq.ptq_report import PtqReport
from fmtsim.ptq.reshape import DIVISOR, attach, detach, divide_input, unsmooth
from fmtsim.ptq.weight_grid import nearest
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.serialization import recipe_from_dict, recipe_to_dict
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import check_items, record_of


def extend(model: nn.Module, quantizer: Quantizer, *, weights: bool = True) -> tuple[str, ...]:
    """Round the inputs of normalisation and softmax modules at every call, and embeddings once; return their names.

    Normalisations are modules with "norm" in the name of their class. An embedding that shares its weight with a
    quantised layer has that layer's. ``weights=False`` leaves embeddings as they are: they were loaded.
    """
    taken = {id(p) for module in model.modules() if isinstance(module, EmulatedModule) for p in module.parameters()}
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in taken:
            if weights:
                with torch.no_grad():
                    module.weight.copy_(nearest(module.weight, quantizer))
        elif isinstance(module, nn.Softmax | nn.LogSoftmax) or "norm" in type(module).__name__.lower():
            hook = module.register_forward_pre_hook(_round_input)
            record(module).changes["input"] = Change(settings=quantizer, hook=hook)
        else:
            continue
        names.append(name)
    return tuple(names)


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the first argument of a module, as a matrix of rows along its last axis."""
    if not (args and isinstance(args[0], Tensor) and args[0].is_floating_point()):
        return args
    x = args[0]
    rounded = nearest(x.reshape(-1, x.shape[-1] if x.dim() else 1), settings(module, "input"))
    return (rounded.to(x.dtype).reshape(x.shape), *args[1:])


Model = TypeVar("Model", bound=nn.Module)
_KEYS = {"recipe", "layers", "tensors", "scales"}  # and "weights", which older files lack
_SCALES = ("scale", "tensor_scale", "blocks")


class RoundedWeight(NamedTuple):
    """Quantisers of a stored weight and of the inputs, and what it was rounded with, for exports.

    That is a scale of its blocks, and of the tensor, or the bytes of ggml's blocks.
    """

    w: Quantizer
    x: Quantizer
    scale: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    blocks: torch.Tensor | None = None


class Quantised(NamedTuple):
    """Hold the quantisation of a model, in the ``Root`` of its record.

    Args:
        recipe: The recipe, with its machine.
        weights: What the weight of each layer with one matrix was rounded with, by layer.
        report: What each layer lost; None in a model that ``load_state`` restored.
    """

    recipe: PtqRecipe
    weights: dict[str, RoundedWeight]
    report: PtqReport | None


def state(model: nn.Module) -> dict[str, Any]:
    """Return what ``convert`` or ``ptq`` gave a model, as tensors on the CPU, for ``torch.save``.

    Of a converted model: the recipe's name and what delayed scaling remembers, by layer and operand. The model's
    state_dict has delayed scales, too; this is for files apart from it. Of a quantised model: its recipe, layers,
    tensors, and, as ``"scales"``, what it would be of a converted model: the static and stored scales alone.

    Raises:
        ArgumentError: The model is neither converted nor quantised, or quantised and offloaded by Accelerate.

    >>> import torch, fmtsim
    >>> model = fmtsim.convert(nn.Sequential(nn.Linear(64, 64)), recipe="te_delayed")
    >>> fmtsim.state(model)["recipe"]
    'te_delayed'
    >>> model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64)), "int8_static", [torch.ones(8, 64)])
    >>> sorted(fmtsim.state(model))
    ['layers', 'recipe', 'scales', 'tensors', 'weights']
    """
    scales = converted_state(model)
    quantised: Quantised | None = root(model).quantised
    if quantised is None:
        return scales
    check_loaded(model)
    return {
        "recipe": recipe_to_dict(quantised.recipe),
        "layers": [name for name, module in model.named_modules() if isinstance(module, EmulatedModule)],
        "tensors": {name: t.detach().cpu().clone() for name, t in model.state_dict().items()},
        "scales": scales,
        "weights": {name: _plain(rounded) for name, rounded in quantised.weights.items()},
    }


def _plain(rounded: RoundedWeight) -> dict[str, Any]:
    scales = {name: t.cpu().clone() for name, t in zip(_SCALES, rounded[2:], strict=True) if t is not None}
    return {"w": recipe_to_dict(rounded.w), "x": recipe_to_dict(rounded.x), "scales": scales}


def _rounded(value: dict[str, Any], path: str) -> RoundedWeight:
    check_items(value, {"w": dict[str, Any], "x": dict[str, Any], "scales": dict[str, torch.Tensor]}, path)
    quantizers = [record_of(Quantizer, value[name], f"{path}.{name}") for name in "wx"]
    return RoundedWeight(*quantizers, *(value["scales"].get(name) for name in _SCALES))


def load_state(model: Model, state: dict[str, Any]) -> Model:
    """Put what ``state`` returned into a model, in place, and return the model.

    The state of a converted model goes into a model converted with the same recipe: all of it or nothing. The state of
    a quantised model goes into a fresh one of the same architecture, without calibration: the model then computes the
    same bits on the same device; ``report`` no longer has what each layer lost.

    Raises:
        ArgumentError: The state is another thing, is of another recipe, or does not fit the model. A model that was to
            become a quantised one then has its own classes, but may hold some of the state's tensors.

    >>> import torch, fmtsim
    >>> model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64)), "int8_static", [torch.ones(8, 64)])
    >>> fresh = fmtsim.load_state(nn.Sequential(nn.Linear(64, 64)), fmtsim.state(model))
    >>> torch.equal(fresh(torch.ones(8, 64)), model(torch.ones(8, 64)))
    True
    """
    check_module("load_state", model)
    if not isinstance(state, dict) or set(state) - {"weights"} != _KEYS:
        load_converted_state(model, state)
        return model
    if is_converted(model):
        raise ArgumentError(
            f"the state is of a model that fmtsim.ptq quantised, and {type(model).__name__} is converted already; "
            "call fmtsim.revert(model) first, or load state['scales'] alone"
        )
    check_items(state, {"layers": list[str], "tensors": dict[str, torch.Tensor], "scales": dict[str, Any]}, "the state")
    check_items({"weights": {}, **state}, {"weights": dict[str, dict[str, Any]]}, "the state")
    recipe, layers, tensors = recipe_from_dict(state["recipe"]), set(state["layers"]), state["tensors"]
    if not isinstance(recipe, PtqRecipe):
        raise ArgumentError("the state's recipe is not a PtqRecipe; pass what fmtsim.state returned")
    weights = {name: _rounded(value, f"the state's weights.{name}") for name, value in state.get("weights", {}).items()}
    absent = sorted(layers - {name for name, _ in model.named_modules()})
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ArgumentError(f"parameter {empty!r} is on the meta device; call model.to_empty(device=...) first")
    if absent:
        raise ArgumentError(f"the model has no layer {absent[0]!r}; build the one that was quantised")
    convert(model, recipe.inference, filter_fn=lambda module, name: name in layers)
    untied = recipe.rotate is not None and attach(model, recipe.rotate)
    try:
        for name in layers:
            # the divisor and the bias that quantisation gave the layer
            module: Any = model.get_submodule(name)
            prefix = f"{name}." if name else ""
            divisor = tensors.get(f"{prefix}{DIVISOR}")
            if divisor is not None and DIVISOR not in module._buffers:
                module.register_buffer(DIVISOR, divisor.to(module.weight))
                module.register_forward_pre_hook(divide_input)
            bias = tensors.get(f"{prefix}bias")
            if bias is not None and module._parameters.get("bias", bias) is None:
                module.bias = nn.Parameter(torch.zeros_like(bias).to(module.weight), requires_grad=False)
        model.load_state_dict(tensors)
        load_converted_state(model, state["scales"])
    except (RuntimeError, ArgumentError) as error:
        unsmooth({name: model.get_submodule(name) for name in layers})
        detach(model, untied)
        revert(model)
        raise ArgumentError(f"the state does not fit {type(model).__name__}: {error}") from None
    root(model).quantised = Quantised(recipe, weights, None)
    if recipe.extended is not None:
        extend(model, recipe.extended, weights=False)
    if (attention := recipe.serving_attention) is not None:
        convert_attention(model, attention)
    return model
