# SPDX-License-Identifier: Apache-2.0
"""Count the multiply-adds of a forward pass: products with a Parameter, and those of two activations.

A product runs in a layer that is converted (a ``Watcher`` is told), or in an operator of torch (``OperatorMode``).
Parameters are known by their storage, also through views, and what is computed of nothing but Parameters (a cast, a
stack, experts that were picked) counts as the Parameter.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.watch import Watcher, watching
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.nn.attention import attends
from fmtsim.nn.coverage import PLAIN, Coverage, coverage_of, is_meant, plain_products, reason_of
from fmtsim.nn.forward import names_in_forward, running_modules, undisturbed
from fmtsim.nn.modules import EmulatedModule, emulated_class
from fmtsim.nn.operations import ATTENTIONS, COUNTS, LOOK_UPS, OperatorMode
from fmtsim.nn.planning import projections, why_not
from fmtsim.nn.raw_matmuls import ParameterProduct, raw_products
from fmtsim.nn.scaled_model import is_untraced
from fmtsim.support.errors import ArgumentError, shown

_OUTSIDE = "its weight is read outside of its own forward"
Place = tuple[nn.Module, str, str]  # a module, its name, and the name of a parameter there


def measured(model: nn.Module, batch: Any, reasons: Mapping[str, str]) -> Coverage:
    """Return the coverage of a model in one batch, which runs without gradients and leaves the model as it was.

    Args:
        model: Any module.
        batch: A tensor, a tuple of arguments or a mapping of keywords.
        reasons: Why modules were left alone, by name.

    Raises:
        ArgumentError: ``batch`` is none of these.
    """
    if isinstance(batch, Tensor):
        call: Callable[[], Any] = lambda: model(batch)  # noqa: E731
    elif isinstance(batch, Mapping):
        call = lambda: model(**batch)  # noqa: E731
    elif isinstance(batch, tuple):
        call = lambda: model(*batch)  # noqa: E731
    else:
        raise ArgumentError(
            f"batch={shown(batch)} is not a batch; pass a tensor, a tuple of arguments or a dict of keywords of the "
            "model, and numbers of rows as tokens="
        )
    with undisturbed(model):
        if is_untraced(model):
            call()
        with running_modules() as running:
            count = Count(model, reasons, running)
            with watching(count), recorded_calls(), count:
                call()
    names = {name: tuple(sorted(getattr(count, name))) for name in ("uncounted", "dtypes")}
    return coverage_of(count.simulated, count.backward, count.rows(), **count.activations, **names)


class Count(OperatorMode, Watcher):
    """Count the products of a forward pass that read a Parameter of a model; ``running`` are the modules that run."""

    def __init__(self, model: nn.Module, reasons: Mapping[str, str], running: list[nn.Module]) -> None:
        super().__init__()
        self.simulated = self.backward = 0
        self.activations = dict.fromkeys(("attention", "attention_simulated", "others", "keys"), 0)
        self.uncounted, self.dtypes = set[str](), set[str]()
        self._scores = 0  # columns of the last product in a module of attention
        self._reasons = reasons
        self._raw: Counter[tuple[str, str, str]] = Counter()
        self._attention = projections(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._stack = running
        self._stored: dict[int, dict[tuple[int, int], list[Place]]] = {}  # by storage and bytes there
        self._made: dict[int, tuple[StorageWeakRef, list[Place]]] = {}  # what was computed of Parameters alone
        for module, name in self._names.items():
            for parameter, p in module.named_parameters(recurse=False):
                place = (module, name, parameter)
                key, start = _storage(p), int(p.storage_offset()) * p.element_size()
                if key is not None:
                    end = start + int(p.numel()) * p.element_size()
                    self._stored.setdefault(key, {}).setdefault((start, end), []).append(place)

    def places(self, t: Tensor) -> list[Place]:
        """Return where the Parameter lies that a tensor is, views or was made of; nothing for other tensors."""
        key = _storage(t)
        if key is None:
            return []
        at = int(t.storage_offset()) * t.element_size()
        for (start, end), places in self._stored.get(key, {}).items():
            if start <= at < end:
                return places
        return self._made[key][1] if key in self._made else []

    def rows(self) -> list[tuple[str, str, int, str]]:
        """Return module, parameter, multiply-adds and reason of what was not simulated."""
        return [(name, parameter, count, reason) for (name, parameter, reason), count in self._raw.items()]

    def _note(self, places: list[Place], count: int, reason: str | None) -> None:
        """Add a raw product to the weight it reads: of several names the one of the module that runs."""
        inner = {module: i for i, module in enumerate(self._stack)}
        module, name, parameter = max(
            places, key=lambda place: (inner.get(place[0], -1), not isinstance(place[0], nn.Embedding))
        )
        if reason is None:
            owner, layer = self._attention.get(module, (name, module))
            # A parametrization is a module of its own, and the layer around it runs.
            outside = layer not in inner and not isinstance(layer, ParametrizationList)
            never = why_not(layer) is not None and emulated_class(type(layer)) is None  # depthwise has that reason
            outside = outside and (isinstance(layer, EmulatedModule) or never)
            meant = is_meant(self._reasons.get(owner, ""))
            runs = raw_products(module).get(parameter, layer)
            computed = isinstance(runs, ParameterProduct) and runs.computed
            reason = _OUTSIDE if outside and not meant else reason_of(owner, runs if computed else layer, self._reasons)
        self._raw[name, parameter, reason] += count

    def _note_activations(self, a: Tensor, b: Tensor, out: Any, count: int, is_attention: bool) -> None:
        """Add a product without a weight: attention's as its operator says, or the module that runs."""
        module = self._stack[-1] if self._stack else None
        self.dtypes.add(str(a.dtype).removeprefix("torch."))
        # products that a module's code writes are attention's where it attends or takes a softmax
        attended = module is not None and (attends(module) or "softmax" in names_in_forward(type(module)))
        if not (is_attention or attended):
            self.activations["others"] += count
            return
        self.activations["attention"] += count
        if is_attention or a.shape[-1] == self._scores:  # the second product sums over the keys
            self.activations["keys"] = max(self.activations["keys"], b.shape[-2])
        self._scores = 0 if is_attention else out.shape[-1]

    def attention(self, run: Callable[..., Tensor], call: Any, *inputs: Any) -> Tensor:
        """Count quantised attention, and run it without this mode."""
        q, k, v = inputs[:3]
        count = q[..., 0].numel() * k.shape[-2] * (k.shape[-1] + v.shape[-1])
        self.activations["attention"] += count
        self.activations["attention_simulated"] += count
        self.activations["keys"] = max(self.activations["keys"], k.shape[-2])
        with _disable_current_modes():
            return run(*inputs)

    def layer(self, run: Callable[[Tensor, Tensor], Tensor], layer: Layer, x: Tensor, w: Tensor) -> Tensor:
        """Count a layer's product, and run it without this mode."""
        places = self.places(w) or self.places(x)
        if places:
            plain, count = plain_products(layer.config), x.numel() * w.shape[0]
            self.simulated += count * (1 - plain["fprop"])
            self.backward += count * (2 - plain["dgrad"] - plain["wgrad"])
            if plain["fprop"]:
                self._note(places, count, PLAIN)
        with _disable_current_modes():
            return run(x, w)

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Count an operator and run it."""
        products = COUNTS.get(func.overloadpacket)
        if products is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if products is not None:
            is_attention = func.overloadpacket in ATTENTIONS
            for a, b, count in products(args, out):
                places = [] if is_attention else self.places(b) or self.places(a)
                if places:
                    self._note(places, count, None)
                elif a.is_floating_point() and (is_attention or a.shape[-1] > 1):  # rotary angles are sums of one term
                    self._note_activations(a, b, out, count, is_attention)
        elif func.overloadpacket not in LOOK_UPS:
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember what was computed of Parameters alone."""
        operands = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else (args, kwargs)
        tensors = [t for t in tree_iter(operands) if isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 1]
        sources = [self.places(t) for t in tensors]
        whole = bool(sources) and all(sources)
        if not whole and any(sources) and func.namespace not in ("aten", "prims", "fmtsim"):
            self.uncounted.add(str(func.overloadpacket))
        places = sources[max(range(len(tensors)), key=lambda i: tensors[i].numel())] if whole else []
        for t in tree_iter(out):
            key = _storage(t) if isinstance(t, Tensor) else None
            if key is None or key in self._stored:
                continue
            if whole:
                # A weak reference keeps torch from giving the key to another storage.
                self._made[key] = StorageWeakRef(t.untyped_storage()), places
            elif tensors:
                self._made.pop(key, None)


def _storage(t: Tensor) -> int | None:
    """Return what two tensors of one storage have in common, None for a tensor that has no storage of its own."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
