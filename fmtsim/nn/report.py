# SPDX-License-Identifier: Apache-2.0
"""report: which layers of a model are converted, to what, and why the others are not; what multiplies in them."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from fmtsim.casts.arguments import check_module
from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.watch import Watcher, watching
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.nn.conversion import conversion, root, settings
from fmtsim.nn.convert import summary_line
from fmtsim.nn.coverage import (
    ADDED,
    COMPUTED,
    PLAIN,
    Coverage,
    estimated,
    is_meant,
    make_coverage,
    numbered,
    plain_products,
    together,
    why_not_simulated,
)
from fmtsim.nn.explain_layer import MOST_ROWS, model_products
from fmtsim.nn.forward import names_in_forward, running_modules, undisturbed
from fmtsim.nn.modules import EmulatedModule, emulated_class, emulated_types
from fmtsim.nn.multihead_attention import EmulatedMultiheadAttention, attends
from fmtsim.nn.operations import ATTENTIONS, COUNTS, LOOK_UPS, OperatorMode
from fmtsim.nn.planning import FILTERED, projections, why_not
from fmtsim.nn.raw_matmuls import ParameterProduct, computed_products, raw_products
from fmtsim.nn.swaps import swap_details
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.table import Result, Rows

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
    offloaded = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if offloaded is not None:
        text = (
            f"{offloaded} is on the meta device between the forwards of its layer, and its products are not known to be"
        )
        raise ArgumentError(f"{text} its own; call report(model) without a batch, or load the model without offloading")
    with undisturbed(model):
        how = settings(model, "scaled")  # a scaled model measures its branches in its first batch
        if how is not None and how.taus is None:
            call()
        with running_modules() as running:
            count = Count(model, reasons, running)
            with watching(count), recorded_calls(), count:
                call()
    names = {name: tuple(sorted(getattr(count, name))) for name in ("uncounted", "dtypes")}
    return make_coverage(count.simulated, count.backward, count.rows(), **count.activations, **names)


class Count(OperatorMode, Watcher):
    """Count the products of a forward pass that read a Parameter of a model; ``running`` are the modules that run."""

    def __init__(self, model: nn.Module, reasons: Mapping[str, str], running: list[nn.Module]) -> None:
        super().__init__()
        self.simulated = self.backward = 0
        self.activations = dict.fromkeys(("attention", "attention_simulated", "others", "keys"), 0)
        self.uncounted, self.dtypes = set[str](), set[str]()
        self._scores = 0  # columns of the last product in a module of attention
        self._reasons = reasons
        self._raw: Counter[tuple[str, str, str]] = Counter()  # multiply-adds by module name, parameter and reason
        self._attention = projections(model)  # out_proj layers: nn.MultiheadAttention multiplies with their weights
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
        at = int(t.storage_offset()) * t.element_size()  # a view's first byte lies inside its Parameter
        for (start, end), places in self._stored.get(key, {}).items():
            if start <= at < end:
                return places
        return self._made[key][1] if key in self._made else []

    def rows(self) -> list[tuple[str, str, int, str]]:
        """Return module, parameter, multiply-adds and reason of what was not simulated."""
        return [(name, parameter, count, reason) for (name, parameter, reason), count in self._raw.items()]

    def _note(self, places: list[Place], count: int, reason: str | None) -> None:
        """Add a raw product to the weight it reads: of several names the one of the module that runs."""
        inner = {module: i for i, module in enumerate(self._stack)}  # depths of running modules
        module, name, parameter = max(
            places, key=lambda place: (inner.get(place[0], -1), not isinstance(place[0], nn.Embedding))
        )
        if reason is None:
            owner, layer = self._attention.get(module, (name, module))
            # A parametrization is a module of its own, and the layer around it runs.
            outside = layer not in inner and not isinstance(layer, ParametrizationList)
            never = why_not(layer) is not None and emulated_class(type(layer)) is None  # depthwise has that reason
            outside = outside and (isinstance(layer, EmulatedModule) or never)
            meant = is_meant(self._reasons.get(owner, ""))  # the recipe or the caller chose high precision
            runs = raw_products(module).get(parameter, layer)
            computed = isinstance(runs, ParameterProduct) and runs.computed
            reason = (
                _OUTSIDE
                if outside and not meant
                else why_not_simulated(owner, runs if computed else layer, self._reasons)
            )
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
        self._scores = 0 if is_attention else out.shape[-1]  # the number of keys, if this product makes scores

    def attention(self, run: Callable[..., Tensor], call: Any, *inputs: Any) -> Tensor:
        """Count quantised attention, and run it without this mode."""
        q, k, v = inputs[:3]
        count = q[..., 0].numel() * k.shape[-2] * (k.shape[-1] + v.shape[-1])  # q k^T and p v
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
            self.backward += count * (2 - plain["dgrad"] - plain["wgrad"])  # dgrad and wgrad have fprop's size
            if plain["fprop"]:
                self._note(places, count, PLAIN)
        with _disable_current_modes():
            return run(x, w)

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Count an operator and run it."""
        products = COUNTS.get(func.overloadpacket)
        if products is None:
            with self:
                parts = func.decompose(*args, **kwargs)  # the operators that a composite one calls are counted
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
        elif func.overloadpacket not in LOOK_UPS:  # rows of an embedding are activations from here on
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember what was computed of Parameters alone."""
        operands = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else (args, kwargs)
        tensors = [t for t in tree_iter(operands) if isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 1]
        sources = [self.places(t) for t in tensors]
        whole = bool(sources) and all(sources)  # a result of Parameters alone counts as a Parameter
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
                self._made.pop(key, None)  # the storage now holds an activation


def _storage(t: Tensor) -> int | None:
    """Return what two tensors of one storage have in common, None for a tensor that has no storage of its own."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


_BASES = {
    "recorded": "with recorded bits of the call",
    "reported": "by the library's own report",
    "rule": "by a rule",
    "guess": "guessed",
    "none": "without a machine",
    "refused": "refused",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """Describe one module.

    Args:
        name: Its name.
        type: The name of its class.
        converted: Whether ``convert`` changed it.
        detail: Its quantisers, or the reason for having none.
        multiplies: Whether it may multiply with a Parameter of its own: norms and embeddings do not.
    """

    name: str
    type: str
    converted: bool
    detail: str
    multiplies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """Describe one product of a converted layer.

    Args:
        layer: Its name, with the part where it has several weights.
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        tokens: Rows of x.
        call: What is asked, or why it is refused.
        unit: Name of the unit, empty without one.
        order: Accumulation order in words.
        basis: The evidence for the order, as in ``explain_mm``, or ``"refused"``.
    """

    layer: str
    product: str
    tokens: int
    call: str
    unit: str
    order: str
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Result):
    """List the modules of a model that hold parameters or could be converted.

    ``print`` shows a table of those with a weight matrix, numbered ones that are alike in one line.

    Args:
        rows: The modules.
        notes: What the recipe exchanged, and what of it was not done: modules that the model does not have, optimizers.
        products: Those of the converted layers, where ``report`` was given numbers of tokens.
        coverage: Multiply-adds with weights, simulated and not: of the batch that ``report`` was given, else estimated.
        summary: One line: recipe, machine, coverage, what is left and why, guesses, notes.
    """

    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...] = ()
    products: tuple[ProductRow, ...] = ()
    coverage: Coverage = Coverage(total=0, simulated=0, backward=0)
    summary: str = ""

    @property
    def converted(self) -> tuple[ReportRow, ...]:
        """The rows of converted modules."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def left_alone(self) -> tuple[ReportRow, ...]:
        """The rows of the other modules."""
        return tuple(row for row in self.rows if not row.converted)

    def _content(self) -> tuple[Rows | str, ...]:
        cells = [("layer", "type", "converted", "quantisers, or why not")]
        alike: dict[tuple[str, ...], list[str]] = {}
        rows = [row for row in self.rows if row.multiplies]
        for row in rows:
            kind = row.type, "yes" if row.converted else "no", row.detail
            alike.setdefault((numbered(row.name), *kind), []).append(row.name)  # numbered layers share a line
        cells += [(together(names), *kind) for (_, *kind), names in alike.items()]  # type: ignore[misc]
        total = f"{len(self.converted)} of {len(rows)} modules with a weight matrix converted"
        rest = len(self.rows) - len(rows)
        total += f"; {rest} without one not shown" if rest else ""
        return Rows(cells), total, self.summary, *self._product_table()

    def _product_table(self) -> tuple[Rows | str, ...]:
        """Return the products as a table, equal ones of several layers in one line, and their number by basis."""
        if not self.products:
            return ()
        layers: dict[ProductRow, list[str]] = {}
        for row in self.products:
            layers.setdefault(dataclasses.replace(row, layer=""), []).append(row.layer)
        cells = [("layers", "first", "product", "tokens", "call", "unit", "accumulation order", "basis")]
        cells += [
            (str(len(names)), names[0], row.product, str(row.tokens), row.call, row.unit or "-", row.order, row.basis)
            for row, names in layers.items()
        ]
        counts = Counter(row.basis for row in self.products)
        bases = ", ".join(f"{counts[basis]} {words}" for basis, words in _BASES.items() if counts[basis])
        return "", Rows(cells, left=(1, 2, 4, 5, 6, 7)), f"{len(self.products)} products: {bases}"


def report(model: nn.Module, batch: Any = None, *, tokens: int | Sequence[int] = ()) -> Report | Any:
    """Return what ``convert`` or ``ptq`` did to a model, or, before it, what ``convert`` could not convert and why.

    Without ``batch`` and ``tokens``, the report of a model that ``fmtsim.ptq`` quantised is its ``PtqReport``: what
    each layer lost. Otherwise a module that is used under several names has a row for each.

    Args:
        model: Any module.
        batch: A tensor, a tuple of arguments or a dict of keywords of the model. It runs once, without gradients, to
            count the multiply-adds of all products that read a Parameter, those of ``F.linear``, ``matmul`` and
            grouped products of any module among them; buffers, random states and what recipes remember are then as
            they were. Without it they are estimated: the elements of each weight matrix.
        tokens: Numbers of rows for which the three products of each converted layer are told, with unit, accumulation
            order and what stands behind that: tokens of a batch, for a convolution positions of its output in all
            images (of its input, where it is transposed), for attention tokens of one sequence. Nothing is multiplied.

    Raises:
        ArgumentError: ``model`` is not a module, ``batch`` is none of these, or ``tokens`` are not numbers from 1.

    >>> import torch, fmtsim
    >>> layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).bfloat16()
    >>> str(report(fmtsim.convert(layers, format="e4m3", target="h200"), tokens=512)).splitlines()[-1]
    "24 products: 24 by the library's own report"
    >>> print(report(fmtsim.ptq(nn.Sequential(nn.Linear(8, 8)), "int8_token", [torch.ones(4, 8)]))["0"].w)
    int8
    >>> report(layers, torch.ones(4, 256).bfloat16()).summary.partition(": ")[2]
    '100 % of weight multiply-adds simulated (forward and backward)'
    """
    check_module("report", model)
    quantised = root(model).quantised
    if quantised is not None and quantised.report is not None and batch is None and tokens == ():
        return quantised.report
    return conversion_report(model, batch, tokens)


def conversion_report(model: nn.Module, batch: Any = None, tokens: int | Sequence[int] = ()) -> Report:
    """Return the modules of a model, what multiplies in them, and why the others are not converted; see ``report``."""
    counts = [tokens] if type(tokens) is int else tokens
    if not isinstance(counts, list | tuple | range) or any(
        type(n) is not int or not 0 < n <= MOST_ROWS for n in counts
    ):
        raise ArgumentError(
            f"tokens={shown(tokens)} is not a number of rows; pass one from 1 to {MOST_ROWS}, or a list of such"
        )
    # the module that convert was given, or one that a wrapper (PEFT's) holds
    roots = ((m, name) for name, m in model.named_modules() if conversion(m).root is not None)
    converted, prefix = next(roots, (model, ""))
    facts = root(converted)
    reasons = {".".join(filter(None, (prefix, name))): why for name, why in facts.reasons.items()}
    first: dict[nn.Module, str] = {}
    attention = projections(model)
    shapes = estimated(model, reasons)  # also lists weights that the batch does not reach
    coverage = shapes if batch is None else measured(model, batch, reasons)  # first: it sees products
    raw = {weight.layer for weight in (*coverage.raw, *shapes.raw)}
    run = any(isinstance(m, ParameterProduct) and (m.seen or m.computed) for m in model.modules())
    rows = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParameterProduct):
            continue  # its owner has a row
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if (
            not (has_parameters or isinstance(module, emulated_types()))
            and not swap_details(module)
            and reasons.get(name) != FILTERED
        ):
            continue
        row = _row(name or "(model)", module, reasons.get(name) or (ADDED if reasons else "not converted"), run)
        owner, around = attention.get(module, ("", None))
        if isinstance(around, EmulatedMultiheadAttention):
            detail = f"as a part of {owner or '(model)'}"
            row = dataclasses.replace(row, converted=True, detail=detail)
        if module in first:
            row = dataclasses.replace(row, detail=f"same module as {first[module]}")
        first.setdefault(module, row.name)
        rows.append(dataclasses.replace(row, multiplies=row.converted or name in raw))
    products = []
    for count, (layer, product, explanation) in ((n, found) for n in counts for found in model_products(model, n)):
        if isinstance(explanation, str):
            columns = {"call": explanation, "unit": "", "order": "", "basis": "refused"}
        else:
            columns = {"call": explanation.rows[0][1], "unit": explanation.unit or ""}
            columns |= {"order": explanation.order, "basis": explanation.basis}
        products.append(ProductRow(layer=layer, product=product, tokens=count, **columns))
    notes = (*facts.notes, *_not_reached(model))
    line = summary_line(model, facts.recipe, coverage, notes, products)
    return Report(rows=tuple(rows), notes=notes, products=tuple(products), coverage=coverage, summary=line)


def _not_reached(model: nn.Module) -> Iterator[str]:
    """Yield the converted layers that no forward has reached yet, once one has reached others: experts, branches."""
    modules = {
        name: m for name, m in model.named_modules() if isinstance(m, EmulatedModule) and m.emulation is not None
    }
    layers = {name: m.emulation for name, m in modules.items() if not isinstance(m, ParameterProduct)}
    alike: dict[str, list[str]] = {}
    for name in (name for name, how in layers.items() if how is not None and not (how.runs or how.not_run)):
        alike.setdefault(numbered(name), []).append(name)
    count, names = sum(map(len, alike.values())), ", ".join(map(together, alike.values()))
    if 0 < count < len(layers):
        yield f"{count} of {len(layers)} converted layers not reached so far: {names}"


def _row(name: str, module: nn.Module, reason: str, run: bool) -> ReportRow:
    details = swap_details(module)
    cls = module.original_class if isinstance(module, EmulatedModule) else type(module)
    products = {p: product for p, product in raw_products(module).items() if product.seen or not run}
    by_label: dict[str, list[str]] = {}
    for parameter, product in products.items():
        assert product.emulation is not None
        by_label.setdefault(product.emulation.label, []).append(parameter)
    for label, parameters in by_label.items():
        details.append(f"{'' if run else 'any '}products with its own {', '.join(parameters)}, emulated: {label}")
    others = {p: product for p, product in raw_products(module).items() if product.not_emulated}
    raw = [f"{p} in {', '.join(product.not_emulated)}: not emulated" for p, product in others.items()]
    computed = [p for p, product in raw_products(module).items() if product in computed_products(module)]
    raw += [f"{p}: {COMPUTED}" for p in computed]
    if isinstance(module, EmulatedModule):
        ran = f"not emulated: {module.not_run}" if module.not_run else ""
        details = [*([] if module.emulation is None else filter(None, (ran, module.emulation.label))), *details]
    detail = "; ".join([*details, *raw]) or (why_not(module) if reason == ADDED else None) or reason
    return ReportRow(name=name, type=cls.__name__, converted=bool(details), detail=detail)
