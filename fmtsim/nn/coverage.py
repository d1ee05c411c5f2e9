# SPDX-License-Identifier: Apache-2.0
"""Coverage: the share of a model's multiply-adds with weights that is simulated, and what is left, in one line.

Products that read a Parameter are counted in a forward pass: those of ``run_layer``, and operators of torch. Parameters
are known by their storage, also through views, and what is computed of nothing but Parameters (a cast, a stack, experts
that were picked) counts as the Parameter. Without a batch the shapes of weights are counted.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.gemm.layers.keys import Layer, is_untouched
from fmtsim.gemm.layers.watch import Watcher, watching
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.nn.forward import running_modules, undisturbed
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.operations import COUNTS, LOOK_UPS, OperatorMode
from fmtsim.nn.planning import FILTERED, NO_CONFIG, NO_MATRIX, projections, why_not
from fmtsim.nn.raw_matmuls import ParameterProduct, raw_matrices, raw_products
from fmtsim.nn.scaled_model import is_untraced
from fmtsim.recipes.plan import HIGH
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown

PLAIN = "it runs in high precision here"
_MEANT = (FILTERED, NO_CONFIG, HIGH, PLAIN)
_OUTSIDE = "its weight is read outside of its own forward"
Place = tuple[nn.Module, str, str]  # a module, its name, and the name of a parameter there
_ADDED = re.compile("embed|position|token|^pos_|_pos$")  # names of Parameters that are added, not multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class RawWeight:
    """Name a weight whose products are not simulated.

    Args:
        layer: Name of the module that holds it.
        parameter: Its name there.
        multiply_adds: Those of its forward products.
        share: Of all multiply-adds with weights, 0 to 1.
        reason: Why they are not simulated.
    """

    layer: str
    parameter: str
    multiply_adds: int
    share: float
    reason: str

    @property
    def name(self) -> str:
        """Name of the module, with that of the parameter where that is not its weight."""
        names = [self.layer] if self.layer and self.parameter == "weight" else [self.layer, self.parameter]
        return ".".join(filter(None, names)).partition(".parametrizations.")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Count multiply-adds of products with a Parameter: of the forward pass, which has half as many as the backward.

    Args:
        total: All of them.
        simulated: Those that fmtsim multiplies, quantised or on a machine.
        backward: Those of the two backward products that would be simulated, of twice ``total``.
        raw: The weights of the others, the largest share first.
        estimated: No batch ran: shapes were counted, each weight as one position of input.
        uncounted: Operators of other packages that read a weight, whose multiply-adds are unknown.
    """

    total: int
    simulated: int
    backward: int
    raw: tuple[RawWeight, ...] = ()
    estimated: bool = False
    uncounted: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the forward multiply-adds that is simulated, 0 to 1; 1 where there are none."""
        return self.simulated / self.total if self.total else 1.0

    @property
    def backward_share(self) -> float:
        """Share of the backward ones."""
        return self.backward / (2 * self.total) if self.total else 1.0

    def left(self, most: int = 4) -> str:
        """Return in words what is not simulated: weights by their reasons, the largest first, at most so many each."""
        groups: dict[str, dict[str, list[RawWeight]]] = {}
        for row in self.raw:
            groups.setdefault(row.reason, {}).setdefault(numbered(row.name), []).append(row)
        sizes = {
            why: sum(row.multiply_adds for rows in weights_by_name.values() for row in rows)
            for why, weights_by_name in groups.items()
        }
        order = sorted(groups, key=lambda why: -sizes[why])
        words = [f"{_named(groups[why], most)} {percent(sizes[why], self.total)} ({why})" for why in order[:most]]
        rest = sum(sizes[why] for why in order[most:])
        return ", ".join([*words, *([f"others {percent(rest, self.total)}"] if rest else [])])

    def __str__(self) -> str:
        forward, backward = percent(self.simulated, self.total), percent(self.backward, 2 * self.total)
        if not self.total:
            return "no product with a weight" + (" in any module" if self.estimated else " in this batch")
        both = f"{forward} of weight multiply-adds simulated (forward and backward)"
        if backward != forward:
            both = f"{forward} of weight multiply-adds simulated forward, {backward} backward"
        unknown = f"not counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        parts = (both, f"left: {self.left()}" if self.raw else "", unknown)
        return "; ".join(filter(None, (*parts, "estimated from shapes" if self.estimated else "")))


def _named(groups: dict[str, list[RawWeight]], most: int) -> str:
    """Return the names of weights, those of numbered layers as one, the largest first."""
    order = sorted(groups, key=lambda pattern: -sum(row.multiply_adds for row in groups[pattern]))
    names = [together(list(dict.fromkeys(row.name for row in groups[pattern]))) for pattern in order[:most]]
    rest = len(order) - most
    return ", ".join(names) + (f" and {rest} other{'s' * (rest > 1)}" if rest > 0 else "")


def numbered(name: str) -> str:
    """Return a module's name with a star for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def together(names: Sequence[str]) -> str:
    """Return the names of modules that differ in numbers alone as one.

    >>> together(["layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up"]), together(["0.a.1", "1.a.2"])
    ('layers.0-2,5.up', '*.a.*')
    """
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    places = [i for i, part in enumerate(parts) if len(set(part)) > 1]
    if not places:
        return names[0]
    if len(places) > 1:
        return numbered(names[0])
    numbers = sorted({int(part) for part in parts[places[0]]})
    ends = [i for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    runs = [(numbers[a], numbers[b]) for a, b in zip([0, *(i + 1 for i in ends)], ends, strict=False)]
    which = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return ".".join(which if i == places[0] else part[0] for i, part in enumerate(parts))


def percent(part: int, whole: int) -> str:
    """Return a share to a tenth of a percent: 100 % and 0 % only where it is all or nothing.

    >>> percent(9999, 10000), percent(1, 10000), percent(3, 3)
    ('99.9 %', 'below 0.1 %', '100 %')
    """
    if part in (0, whole):
        return "0 %" if not part else "100 %"
    tenths = part * 1000 // whole
    return f"{tenths / 10} %" if tenths else "below 0.1 %"


def estimated(model: nn.Module, reasons: Mapping[str, str]) -> Coverage:
    """Return the coverage of a model by the shapes of its weights, each at one position; embeddings are looked up.

    Args:
        model: Any module.
        reasons: Why modules were left alone, by name.
    """
    simulated, backward, raw = 0, 0, list[tuple[str, str, int, str]]()
    attention = projections(model)
    written = {(matrix.module, matrix.parameter) for matrix in raw_matrices(model).values()}
    for name, module in model.named_modules():
        owner, how = attention.get(module, (name, module))
        for parameter, p in _matrices(module, written):
            runs: nn.Module = raw_products(module).get(parameter) or how
            plain = {"fprop": 1, "dgrad": 1, "wgrad": 1}
            if isinstance(runs, EmulatedModule) and runs.emulation is not None:
                plain = plain_products(runs.emulation.config)
                simulated += p.numel() * (1 - plain["fprop"])
                backward += p.numel() * (2 - plain["dgrad"] - plain["wgrad"])
            if plain["fprop"]:
                raw.append((name, parameter, p.numel(), reason_of(owner, runs, reasons)))
    return _coverage(simulated, backward, raw, estimated=True)


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
    return _coverage(count.simulated, count.backward, count.rows(), uncounted=tuple(sorted(count.uncounted)))


def _coverage(simulated: int, backward: int, raw: list[tuple[str, str, int, str]], **more: Any) -> Coverage:
    total = simulated + sum(count for _, _, count, _ in raw)
    rows = [
        RawWeight(layer=layer, parameter=parameter, multiply_adds=count, share=count / total, reason=reason)
        for layer, parameter, count, reason in sorted(raw, key=lambda row: -row[2])
        if count
    ]
    return Coverage(total=total, simulated=simulated, backward=backward, raw=tuple(rows), **more)


def _matrices(module: nn.Module, written: set[tuple[nn.Module, str]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the Parameters of a module that products read, as its model's code or their shape says."""
    if isinstance(module, ParameterProduct):  # whose Parameter is its owner's
        return
    can_be_emulated = isinstance(module, EmulatedModule) or why_not(module) is None
    looked_up = "Embedding" in type(module).__name__ or isinstance(module, nn.Embedding | nn.EmbeddingBag)
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, UninitializedParameter):
            continue
        wide = p.dim() >= 2 and (can_be_emulated or sum(size > 1 for size in p.shape) >= 2)
        if ((module, name) in written or (wide and not looked_up)) and not _ADDED.search(name):
            yield name, p


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
        self._stored: dict[int, dict[tuple[int, int], list[Place]]] = {}  # by storage and bytes there
        self._made: dict[int, tuple[StorageWeakRef, list[Place]]] = {}  # what was computed of Parameters alone
        for module, name in self._names.items():
            for parameter, p in module.named_parameters(recurse=False):
                self._store(p, (module, name, parameter))

    def _store(self, p: Tensor, place: Place) -> None:
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
            outside = outside and (isinstance(layer, EmulatedModule) or why_not(layer) is not None)
            meant = is_meant(self._reasons.get(owner, ""))
            reason = _OUTSIDE if outside and not meant else reason_of(owner, layer, self._reasons)
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


def plain_products(config: LinearConfig) -> dict[str, int]:
    """Return 1 for each product of a layer that is neither quantised nor on a target, else 0."""
    first = {"fprop": (None, None), "dgrad": (None, config.fprop.b), "wgrad": (config.dgrad.a, config.fprop.a)}
    return {name: int(not _changes(getattr(config, name), before)) for name, before in first.items()}


def _changes(gemm: Gemm, before: tuple[Quantizer | None, ...]) -> bool:
    """Return True if a product is quantised or on a target.

    ``before`` has the quantisers of the operands that its own may be made from.
    """
    operands = [(gemm.a, before[0]), (gemm.b, before[1])]
    sources = [source for quantizer, source in operands if quantizer.source in ("forward", "requantised")]
    reused = [source for source in sources if source is not None]
    return gemm.emulated or gemm.out.format is not None or not all(map(is_untouched, (gemm.a, gemm.b, *reused)))


def reason_of(name: str, module: nn.Module, reasons: Mapping[str, str]) -> str:
    """Return why a module's weights are not simulated, to the best of what is known."""
    if isinstance(module, EmulatedModule):
        return PLAIN
    owner = name.partition(".parametrizations")[0].removeprefix("parametrizations.weight")
    why = reasons.get(owner) or reasons.get(name) or why_not(module) or "not converted"
    return f"no emulated form of {type(module).__name__}" if why == NO_MATRIX else why
