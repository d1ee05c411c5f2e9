# SPDX-License-Identifier: Apache-2.0
"""A model whose layers switch among quantised forms of themselves, without being converted again."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.keys import Layer
from fmtsim.lab.search.result import HIGH_BITS
from fmtsim.nn.modules import EmulatedModule
from fmtsim.ptq.calibrate import Products, call, evaluating
from fmtsim.ptq.quantize_model import excepted, prepared
from fmtsim.ptq.steps import collected, round_weights, serving_layer
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.progress import Of, Progress

Loss = Callable[[Any, Any], float]


@dataclass(slots=True, kw_only=True)
class Form:
    """Hold one layer in one recipe: the weights of its slots, what runs its products, and its cost."""

    weights: list[Tensor] = field(default_factory=list)
    products: dict[str, Layer] = field(default_factory=dict)
    cost: int = 0


class SwitchingModel:
    """Run a copy of a model under any assignment of recipes to layers.

    Args:
        model: The trained model; it is copied.
        recipes: What a layer may run.
        filter_fn, ignore: As in ``fmtsim.ptq``.
        loss: ``loss(output, reference)`` of a batch, the reference in high precision.
    """

    def __init__(
        self, model: nn.Module, recipes: Mapping[str, PtqRecipe], batches: list[Any], filter_fn: Any, loss: Loss,
        show: Progress, ignore: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.model, self._batches, self._loss = copy.deepcopy(model), batches, loss
        for p in self.model.parameters():
            p.data = p.data.contiguous()  # convolutions are matrices in place
        with evaluating(self.model), torch.no_grad():
            self._references = [call(self.model, batch, i) for i, batch in enumerate(batches)]
        self.adds = 0  # multiply-adds of a batch
        self.forms: dict[str, dict[str, Form]] = {}
        self.left_out: dict[str, str] = {}  # recipes that the machine does not run, and why
        for name, recipe in recipes.items():
            source = copy.deepcopy(self.model)
            spared, _ = excepted(source, recipe, ignore)
            try:
                configs = prepared(source, spared, filter_fn)
            except FmtsimError as error:
                if not recipe.machine:
                    raise
                self.left_out[name] = str(error)
                continue
            named = Of(show, name)
            products = collected(Products(source, configs), recipe, batches, named)
            round_weights(products, recipe, named)
            self._add(recipe, products)
        require_some(recipes.keys() - self.left_out.keys(), self.left_out)
        names = set(self.forms)
        prepared(
            self.model, next(r for name, r in recipes.items() if name not in self.left_out), lambda _, n: n in names
        )
        self._modules = {n: m for n, m in self.model.named_modules() if isinstance(m, EmulatedModule)}
        views = Products(self.model, {name: LinearConfig() for name in names})
        views.run(batches, lambda part, slot, x: None)
        self._views: dict[str, list[Tensor]] = {name: [] for name in names}
        for slot in views.slots.values():
            self._views[_owner(views, slot)].append(slot.w)
        self._high = {name: [w.clone() for w in tensors] for name, tensors in self._views.items()}
        self._runs: dict[str, str | None] = {name: "" for name in names}
        start = self.run({})
        if not math.isfinite(start):
            raise ArgumentError(f"the loss of the unquantised model is {start}; look for Inf in its outputs or loss=")

    def _add(self, recipe: PtqRecipe, products: Products) -> None:
        name = recipe.name
        if self.forms and set(products.modules) != set(self.forms):
            odd = sorted(set(products.modules) ^ set(self.forms))[0]
            raise ArgumentError(f"recipe {name!r} and another disagree about layer {odd!r}; leave rules= out of both")
        shared = [slot for slot in products.slots.values() if len({id(p.module) for p in slot.parts}) > 1]
        if shared:
            first, second = (part.name for part in shared[0].parts[:2])
            raise ArgumentError(
                f"layers {first!r} and {second!r} share a weight, which takes one format; leave one out with filter_fn="
            )
        adds_of_all = 0
        for slot in products.slots.values():
            form = self.forms.setdefault(_owner(products, slot), {}).setdefault(name, Form())
            assert slot.quantised is not None
            form.weights.append(slot.quantised)
            adds = slot.parts[0].rows * slot.w.numel() // len(self._batches)
            form.cost += adds * bits_of(slot.quantizer) * bits_of(slot.parts[0].x)
            adds_of_all += adds
            for part in slot.parts:
                layer = serving_layer(recipe, part, slot)
                form.products |= {part.part: layer, f"{part.part} frozen": layer}
        self.adds = adds_of_all

    def run(self, formats: Mapping[str, str]) -> float:
        """Return the mean loss of the batches where these layers run these recipes, the others in high precision."""
        self._assign(formats)
        with evaluating(self.model), torch.no_grad():
            losses = [
                self._number(self._loss(call(self.model, batch, i), reference))
                for i, (batch, reference) in enumerate(zip(self._batches, self._references, strict=True))
            ]
        return sum(losses) / len(losses)

    @staticmethod
    def _number(loss: Any) -> float:
        try:
            number = float(loss)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(f"loss returned {type(loss).__name__}; return one number") from None
        return math.inf if math.isnan(number) else number

    @torch.no_grad()
    def _assign(self, formats: Mapping[str, str]) -> None:
        for name, module in self._modules.items():
            chosen = formats.get(name)
            if self._runs[name] == chosen:
                continue
            form = None if chosen is None else self.forms[name][chosen]
            for view, w in zip(self._views[name], self._high[name] if form is None else form.weights, strict=True):
                view.copy_(w)
            how = module.emulation
            assert how is not None
            plain = Layer(LinearConfig())
            how.config = LinearConfig() if form is None else next(iter(form.products.values())).config
            how.products = dict.fromkeys(how.products, plain) if form is None else form.products
            self._runs[name] = chosen


def require_some(kept: Collection[str], left_out: Mapping[str, str]) -> None:
    """Raise ArgumentError where the machine runs no recipe, with the reason of the first."""
    if not kept:
        reason = next(iter(left_out.values()))
        raise ArgumentError(f"the machine runs none of formats={', '.join(left_out)} ({reason}); offer others")


def relative_noise(output: Any, reference: Any) -> float:
    """Return ``|output - reference|^2 / |reference|^2`` over all tensors of floating point of an output."""
    noise = signal = 0.0
    for y, ref in zip(_tensors(output), _tensors(reference), strict=True):
        if not is_readable(y):
            raise ArgumentError(
                f"the model returned a {type(y).__name__} on {y.device}, which holds no numbers; pass batches that do"
            )
        noise += float((y.double() - ref.double()).square().sum())
        signal += float(ref.double().square().sum())
    return noise / signal if signal else noise


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [t for part in parts for t in _tensors(part)]


def _owner(products: Products, slot: Any) -> str:
    return next(name for name, module in products.modules.items() if module is slot.parts[0].module)


def bits_of(quantizer: Quantizer) -> int:
    """Return the bits of an operand's elements, without scales; high precision counts as 16."""
    fmt = quantizer.format
    if fmt is None:
        return HIGH_BITS
    if isinstance(fmt, LogTileFormat):
        return fmt.bits
    return (fmt.element if isinstance(fmt, BlockFormat) else fmt).bits
