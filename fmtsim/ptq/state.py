# SPDX-License-Identifier: Apache-2.0
"""Save a quantised model and put it into a fresh one; operators beside products that a recipe quantises."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.nn.attention import convert_attention
from fmtsim.nn.convert import convert, revert
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.state import load_recipe_state, recipe_state
from fmtsim.ptq.calibrate import Products
from fmtsim.ptq.catalogue import ptq_recipe_from_dict, ptq_recipe_to_dict
from fmtsim.ptq.grid import nearest
from fmtsim.ptq.report import ptq_report
from fmtsim.ptq.reshape import DIVISOR, divide_input, unsmooth
from fmtsim.ptq.steps import scales_of
from fmtsim.recipes.serialization import recipe_to_dict
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import check_items, record_of

_QUANTIZER = "_fmtsim_ptq_input"  # of a module whose input is rounded


def extend(model: nn.Module, quantizer: Quantizer, *, weights: bool = True) -> tuple[str, ...]:
    """Round the inputs of normalisation and softmax modules at every call, and embeddings once; return their names.

    Normalisations are modules with "norm" in the name of their class. An embedding that shares its weight with a
    quantised layer has that layer's. ``weights=False`` leaves embeddings as they are: they were loaded.
    """
    contract(model)  # an earlier quantisation, reverted
    taken = {id(p) for module in model.modules() if isinstance(module, EmulatedModule) for p in module.parameters()}
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in taken:
            if weights:
                with torch.no_grad():
                    module.weight.copy_(nearest(module.weight, quantizer))
        elif isinstance(module, nn.Softmax | nn.LogSoftmax) or "norm" in type(module).__name__.lower():
            module.__dict__[_QUANTIZER] = quantizer
            module.register_forward_pre_hook(_round_input)
        else:
            continue
        names.append(name)
    return tuple(names)


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the first argument of a module, as a matrix of rows along its last axis."""
    if not (args and isinstance(args[0], Tensor) and args[0].is_floating_point()):
        return args
    x = args[0]
    rounded = nearest(x.reshape(-1, x.shape[-1] if x.dim() else 1), module.__dict__[_QUANTIZER])
    return (rounded.to(x.dtype).reshape(x.shape), *args[1:])


def contract(model: nn.Module) -> None:
    """Let inputs be as they are again; embeddings are put back by the caller."""
    for module in model.modules():
        if module.__dict__.pop(_QUANTIZER, None) is not None:
            for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _round_input]:
                del module._forward_pre_hooks[key]


Model = TypeVar("Model", bound=nn.Module)
RECIPE = "_fmtsim_ptq_recipe"  # on the root: the record
WEIGHTS = "_fmtsim_ptq_weights"  # on the root: a RoundedWeight of each layer with one matrix, by its name
_KEYS = {"recipe", "layers", "tensors", "scales"}  # and "weights", which older files lack
_SCALES = ("scale", "tensor_scale")


class RoundedWeight(NamedTuple):
    """What a stored weight was rounded with, for exports: its quantiser, that of the inputs, and its scales."""

    w: Quantizer
    x: Quantizer
    scale: torch.Tensor | None
    tensor_scale: torch.Tensor | None


def rounded_weights(products: Products) -> dict[str, RoundedWeight]:
    """Return what the weights of layers with one matrix are rounded with, before they are overwritten."""
    found = {}
    for slot in products.slots.values():
        for part in slot.parts:
            if not part.part and slot.quantizer.format is not None:
                found[part.name] = RoundedWeight(slot.quantizer, part.x, *scales_of(slot))
    return found


def ptq_state(model: nn.Module) -> dict[str, Any]:
    """Return what a quantised model is, for ``torch.save``: its recipe, layers, tensors and static scales.

    Raises:
        ArgumentError: ``fmtsim.ptq`` did not make it.

    >>> import torch, fmtsim
    >>> model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64)), "int8_static", [torch.ones(8, 64)])
    >>> sorted(fmtsim.ptq_state(model))
    ['layers', 'recipe', 'scales', 'tensors', 'weights']
    """
    ptq_report(model)
    layers = [name for name, module in model.named_modules() if isinstance(module, EmulatedModule)]
    tensors = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    recipe = ptq_recipe_to_dict(model.__dict__[RECIPE])
    return {
        "recipe": recipe, "layers": layers, "tensors": tensors, "scales": recipe_state(model),
        "weights": {name: _plain(rounded) for name, rounded in model.__dict__[WEIGHTS].items()},
    }  # fmt: skip


def _plain(rounded: RoundedWeight) -> dict[str, Any]:
    scales = {name: t.cpu().clone() for name, t in zip(_SCALES, rounded[2:], strict=True) if t is not None}
    return {"w": recipe_to_dict(rounded.w), "x": recipe_to_dict(rounded.x), "scales": scales}


def _rounded(value: dict[str, Any], path: str) -> RoundedWeight:
    check_items(value, {"w": dict[str, Any], "x": dict[str, Any], "scales": dict[str, torch.Tensor]}, path)
    quantizers = [record_of(Quantizer, value[name], f"{path}.{name}") for name in "wx"]
    return RoundedWeight(*quantizers, *(value["scales"].get(name) for name in _SCALES))


def load_ptq(model: Model, state: dict[str, Any]) -> Model:
    """Make a fresh model of the same architecture the quantised one of a state, in place, and return it.

    It computes the same bits on the same device; there is no report.

    Raises:
        ArgumentError: The state is another thing, or does not fit the model, which then has its own classes, but may
            hold some of the state's tensors.

    >>> import torch, fmtsim
    >>> model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64)), "int8_static", [torch.ones(8, 64)])
    >>> fresh = fmtsim.load_ptq(nn.Sequential(nn.Linear(64, 64)), fmtsim.ptq_state(model))
    >>> torch.equal(fresh(torch.ones(8, 64)), model(torch.ones(8, 64)))
    True
    """
    if not isinstance(state, dict) or set(state) - {"weights"} != _KEYS:
        raise ArgumentError(f"load_ptq takes what fmtsim.ptq_state returned, not {type(state).__name__}")
    check_items(state, {"layers": list[str], "tensors": dict[str, torch.Tensor], "scales": dict[str, Any]}, "the state")
    check_items({"weights": {}, **state}, {"weights": dict[str, dict[str, Any]]}, "the state")
    check_module("load_ptq", model)
    recipe, layers, tensors = ptq_recipe_from_dict(state["recipe"]), set(state["layers"]), state["tensors"]
    weights = {name: _rounded(value, f"the state's weights.{name}") for name, value in state.get("weights", {}).items()}
    absent = sorted(layers - {name for name, _ in model.named_modules()})
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ArgumentError(f"parameter {empty!r} is on the meta device; call model.to_empty(device=...) first")
    if absent:
        raise ArgumentError(f"the model has no layer {absent[0]!r}; build the one that was quantised")
    convert(model, recipe.inference, filter_fn=lambda module, name: name in layers)
    try:
        for name in layers:
            _grow(model.get_submodule(name), name, tensors)
        model.load_state_dict(tensors)
        load_recipe_state(model, state["scales"])
    except (RuntimeError, ArgumentError) as error:
        unsmooth({name: model.get_submodule(name) for name in layers})
        revert(model)
        raise ArgumentError(f"the state does not fit {type(model).__name__}: {error}") from None
    model.__dict__[WEIGHTS] = weights
    if recipe.extended is not None:
        extend(model, recipe.extended, weights=False)
    if (attention := recipe.serving_attention) is not None:
        convert_attention(model, attention)
    return model


def _grow(module: Any, name: str, tensors: dict[str, Any]) -> None:
    """Give a layer the divisor and the bias that quantisation gave it."""
    prefix = f"{name}." if name else ""
    divisor = tensors.get(f"{prefix}{DIVISOR}")
    if divisor is not None and DIVISOR not in module._buffers:
        module.register_buffer(DIVISOR, divisor.to(module.weight))
        module.register_forward_pre_hook(divide_input)
    bias = tensors.get(f"{prefix}bias")
    if bias is not None and module._parameters.get("bias", bias) is None:
        module.bias = nn.Parameter(torch.zeros_like(bias).to(module.weight), requires_grad=False)
