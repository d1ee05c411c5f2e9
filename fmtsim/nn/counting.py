# SPDX-License-Identifier: Apache-2.0
"""Count the products of a forward pass that read a Parameter: those of ``run_layer``, and operators of torch.

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

from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.gemm.layers.keys import Layer, is_untouched
from fmtsim.gemm.layers.watch import Watcher
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.operations import COUNTS, LOOK_UPS, OperatorMode
from fmtsim.nn.planning import FILTERED, NO_CONFIG, NO_MATRIX, why_not
from fmtsim.recipes.plan import HIGH
from fmtsim.spec.quantizer import Quantizer

PLAIN = "it runs in high precision here"
_MEANT = (FILTERED, NO_CONFIG, HIGH, PLAIN)
_OUTSIDE = "its weight is read outside of its own forward"
Place = tuple[nn.Module, str, str]  # a module, its name, and the name of a parameter there


def is_meant(reason: str) -> bool:
    """Return True if a recipe, config or filter left a module in high precision, not a limit of fmtsim."""
    return reason.startswith(_MEANT)


class Count(OperatorMode, Watcher):
    """Count the products of a forward pass that read a Parameter of a model; ``running`` are the modules that run."""

    def __init__(self, model: nn.Module, reasons: Mapping[str, str], running: list[nn.Module]) -> None:
        super().__init__()
        self.simulated = self.backward = 0
        self.uncounted: set[str] = set()
        self._reasons = reasons
        self._raw: Counter[tuple[str, str, str]] = Counter()
        self._attention = projections(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._stack = running
        self._stored: dict[int, list[tuple[int, int, list[Place]]]] = {}
        self._made: dict[int, tuple[StorageWeakRef, list[Place]]] = {}  # what was computed of Parameters alone
        for module, name in self._names.items():
            for parameter, p in module.named_parameters(recurse=False):
                self._store(p, (module, name, parameter))

    def _store(self, p: Tensor, place: Place) -> None:
        key, start = _storage(p), int(p.storage_offset()) * p.element_size()
        if key is None:
            return
        known = self._stored.setdefault(key, [])
        end = start + int(p.numel()) * p.element_size()
        same = next((places for a, b, places in known if (a, b) == (start, end)), None)
        if same is None:
            known.append((start, end, [place]))
        else:
            same.append(place)

    def places(self, t: Tensor) -> list[Place]:
        """Return where the Parameter lies that a tensor is, views or was made of; nothing for other tensors."""
        key = _storage(t)
        if key is None:
            return []
        at = int(t.storage_offset()) * t.element_size()
        for start, end, places in self._stored.get(key, ()):
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
            owner, how = self._attention.get(module, (name, module))
            made = isinstance(how, ParametrizationList)  # of the weight of the layer around it, which runs
            aside = how not in inner and not made and (isinstance(how, EmulatedModule) or why_not(how) is not None)
            reason = (
                _OUTSIDE
                if aside and not is_meant(self._reasons.get(owner, ""))
                else reason_of(owner, how, self._reasons)
            )
        self._raw[name, parameter, reason] += count

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
            for a, b, count in products(args, out):
                if places := self.places(b) or self.places(a):
                    self._note(places, count, None)
        elif func.overloadpacket not in LOOK_UPS:
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember what was computed of Parameters alone."""
        given = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else (args, kwargs)
        tensors = [t for t in tree_iter(given) if isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 1]
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


def plain_products(config: LinearConfig) -> dict[str, int]:
    """Return 1 for each product of a layer that is neither quantised nor on a target, else 0."""
    first = {"fprop": (None, None), "dgrad": (None, config.fprop.b), "wgrad": (config.dgrad.a, config.fprop.a)}
    return {name: int(not _changes(getattr(config, name), before)) for name, before in first.items()}


def _changes(gemm: Gemm, before: tuple[Quantizer | None, ...]) -> bool:
    """Return True if a product is quantised or on a target.

    ``before`` has the quantisers of the operands that its own may be made from.
    """
    operands = [(gemm.a, before[0]), (gemm.b, before[1])]
    reused = [q for own, q in operands if own.source in ("forward", "requantised") and q is not None]
    return gemm.emulated or gemm.out.format is not None or not all(map(is_untouched, (gemm.a, gemm.b, *reused)))


def projections(model: nn.Module) -> dict[nn.Module, tuple[str, nn.Module]]:
    """Return the layers whose weights an attention module multiplies with itself, with that module and its name."""
    return {m.out_proj: (name, m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}


def reason_of(name: str, module: nn.Module, reasons: Mapping[str, str]) -> str:
    """Return why a module's weights are not simulated, to the best of what is known."""
    if isinstance(module, EmulatedModule):
        return PLAIN
    owner = name.partition(".parametrizations")[0].removeprefix("parametrizations.weight")
    why = reasons.get(owner) or reasons.get(name) or why_not(module) or "not converted"
    return f"no emulated form of {type(module).__name__}" if why == NO_MATRIX else why
