# SPDX-License-Identifier: Apache-2.0
"""The matrix products of a model's linear layers as calls of a target, for any number of rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fmtsim.gemm.model_calls import check_dtypes, layer_call
from fmtsim.gemm.models import PASSES, Shape, layer_shapes
from fmtsim.gemm.products.native import SCALED_MULTIPLE
from fmtsim.gemm.targets.target import get_target
from fmtsim.nn.coverage import numbered, together
from fmtsim.nn.explain_layer import model_products
from fmtsim.nn.modules import EmulatedModule
from fmtsim.spec.call import GemmCall
from fmtsim.support.errors import ArgumentError, shown

Model = str | nn.Module | Sequence[str | Shape]
"""A name of ``fmtsim.gemm.models.list_models``, a module, or names and shapes ``(outputs, inputs, bias)``."""

MOST_ROWS = 1 << 24
_ROWS = 64  # for which a converted layer is asked once


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProduct:
    """Name one product of a layer, or of layers that are alike."""

    layer: str  # name of the layers, or their outputs and inputs
    product: str  # ``"forward"``, ``"dgrad"`` or ``"wgrad"``
    like: GemmCall  # the call for some number of rows

    def call(self, rows: int) -> GemmCall:
        """Return the call for so many rows of the layer's input."""
        if self.product != "wgrad":
            return replace(self.like, m=rows)
        step = SCALED_MULTIPLE if self.like.operation == "scaled_mm" else 1
        return replace(self.like, k=-(-rows // step) * step)  # layers pad


def products_of(
    verb: str, model: Any, target: Any, dtypes: Sequence[str], passes: Sequence[str] = PASSES
) -> list[LayerProduct]:
    """Return the products of a model's linear layers, those of layers that are alike once.

    Args:
        verb: Name of the function that asks, for errors.
        model: A ``Model``. A module that ``convert`` changed has its own machine and formats.
        target: A target; None for a converted module.
        dtypes: Of ``fmtsim.gemm.models.DTYPES``, for all but converted modules.
        passes: Of ``PASSES``.

    Raises:
        ArgumentError: No such model, target, dtype or pass; or nothing multiplies.
    """
    wrong = next((name for name in passes if name not in PASSES), None)
    if wrong is not None or not passes:
        raise ArgumentError(f"{verb} got passes={shown(wrong)}; choose from {', '.join(PASSES)}")
    converted = isinstance(model, nn.Module) and any(isinstance(x, EmulatedModule) for x in model.modules())
    if converted != (target is None):
        step = "leave target out: a converted model names its machine" if converted else "pass target= ('h200')"
        raise ArgumentError(f"{verb} got target={shown(target)} for {_what(model)}; {step}")
    if converted:
        asked = list(_of_converted(model, passes))
    else:
        get_target(target)
        check_dtypes(dtypes)
        shapes = _shapes(verb, model)
        if not shapes:
            raise ArgumentError(f"{verb} found no linear layer in {_what(model)}; pass a model with nn.Linear layers")
        calls = [
            (layer, which, layer_call(which, _ROWS, n, k, bias, dtype))
            for layer, (n, k, bias) in shapes.items()
            for dtype in dtypes
            for which in passes
        ]
        alike = layers_alike(model) if isinstance(model, nn.Module) else {}
        conv1d = {layer for layer, names in alike.items() if not isinstance(model.get_submodule(names[0]), nn.Linear)}
        calls = [(x, y, _of_conv1d(y, z) if x in conv1d and z is not None else z) for x, y, z in calls]
        asked = [LayerProduct(layer=x, product=y, like=replace(z, target=target)) for x, y, z in calls if z is not None]
    if not asked:
        raise ArgumentError(
            f"{verb} found no product in {_what(model)}; FP8 takes outputs and inputs that are multiples of 16"
        )
    return asked


def check_rows(verb: str, name: str, rows: Iterable[int]) -> list[int]:
    """Return numbers of rows in order, each once; refuse what is none."""
    try:
        sizes: list[Any] = list(rows)
    except TypeError:  # one number, or an array of none
        sizes = [rows]
    wrong = [n for n in sizes if type(n) is not int or not 0 < n <= MOST_ROWS]
    if wrong or not sizes:
        raise ArgumentError(
            f"{verb} got {name}={shown(wrong[0] if wrong else sizes)}; pass numbers of rows from 1 to {MOST_ROWS}"
        )
    return sorted(set(sizes))


def dtype_of(call: GemmCall) -> str:
    """Return the format of a call's operands in a word, and how FP8 is summed."""
    name = call.a if call.a == call.b else f"{call.a} x {call.b}"
    return f"{name} {'fast' if call.fast_accum else 'slow'}" if call.operation == "scaled_mm" else name


def _what(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else shown(model)


def _shapes(verb: str, model: Any) -> dict[str, Shape]:
    """Return shapes of linear layers by what the layers are called."""
    if isinstance(model, nn.Module):
        return {layer: shape for layer, (shape, _) in _of_module(model).items()}
    models = [model] if isinstance(model, str) else model
    if not isinstance(models, Sequence) or not all(isinstance(x, str) or _is_shape(x) for x in models):
        raise ArgumentError(
            f"{verb} got model={shown(model)}; pass a name (fmtsim.gemm.models.list_models()), a module, or a list "
            "of (outputs, inputs, bias)"
        )
    shapes = dict.fromkeys(shape for x in models for shape in (layer_shapes([x]) if isinstance(x, str) else [tuple(x)]))
    return {f"{n}x{k}{' + bias' if bias else ''}": (n, k, bias) for n, k, bias in shapes}


def _is_shape(x: Any) -> bool:
    return (
        isinstance(x, tuple | list) and len(x) == 3 and all(type(n) is int and n > 0 for n in x[:2])
        and isinstance(x[2], bool)
    )  # fmt: skip


def _of_conv1d(which: str, call: GemmCall) -> GemmCall:
    """Return the call of a layer whose weight is [inputs, outputs]; FP8 layers copy it to the other layout."""
    if call.operation == "scaled_mm":
        return call
    if which == "wgrad":
        return replace(call, m=call.n, n=call.m)
    return replace(call, b_layout="column" if which == "forward" else "row")


def layers_alike(model: nn.Module) -> dict[str, list[str]]:
    """Return names of linear layers, empty for the model itself, by what those that are alike are called."""
    return {layer: [x.removeprefix("(model)") for x in names] for layer, (_, names) in _of_module(model).items()}


def _of_module(model: nn.Module) -> dict[str, tuple[Shape, list[str]]]:
    alike: dict[tuple[str, Shape], list[str]] = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            n, k = weight.shape
        elif (
            type(module).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2
        ):  # of transformers, [inputs, outputs]
            k, n = weight.shape
        else:
            continue
        name = name or "(model)"
        alike.setdefault((numbered(name), (n, k, module.bias is not None)), []).append(name)
    return {together(names): (shape, names) for (_, shape), names in alike.items()}


def _of_converted(model: nn.Module, passes: Sequence[str]) -> Iterator[LayerProduct]:
    """Yield the products on the machines that ``convert`` gave a model's layers; others have no order to speak of."""
    alike: dict[tuple[str, str, GemmCall], list[str]] = {}
    for layer, product, like in model_products(model, _ROWS):
        which = product.replace("fprop", "forward")
        if not isinstance(like, str) and like.call is not None and which in passes:
            alike.setdefault((numbered(layer), which, like.call), []).append(layer)
    for (_, which, call), names in alike.items():
        yield LayerProduct(layer=together(names), product=which, like=call)
