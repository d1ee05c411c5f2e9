# SPDX-License-Identifier: Apache-2.0
"""Coverage: the share of a model's multiply-adds with weights that is simulated, and what is left, in one line."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fmtsim.gemm.layers.config import PRODUCTS
from fmtsim.gemm.layers.watch import watching
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.nn.counting import Count, plain_products, projections, reason_of
from fmtsim.nn.forward import running_modules, undisturbed
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.planning import why_not
from fmtsim.nn.raw_matmuls import ParameterProduct, own_matrices, own_products
from fmtsim.nn.scaled_model import is_untraced
from fmtsim.support.errors import ArgumentError, shown

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
            why: sum(row.multiply_adds for rows in found.values() for row in rows) for why, found in groups.items()
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


def summary_of(
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
    formats = list(Counter(str(config.on()) for config in running))
    name = recipe or (formats[0] + (f" and {len(formats) - 1} other configs" if formats[1:] else "") if formats else "")
    gemms = (getattr(config, product) for config in running for product in PRODUCTS)
    machines = list(dict.fromkeys(gemm.machine_name for gemm in gemms if gemm.emulated))
    where = f" on {' and '.join(machines)}" if machines else ""
    guesses = sum(row.basis == "guess" for row in products)
    more = [f"{guesses} of {len(products)} products by a guess"] if guesses else []
    return "; ".join([f"{name}{where}: {coverage}", *more, *notes])


def estimated(model: nn.Module, reasons: Mapping[str, str]) -> Coverage:
    """Return the coverage of a model by the shapes of its weights, each at one position; embeddings are looked up.

    Args:
        model: Any module.
        reasons: Why modules were left alone, by name.
    """
    simulated, backward, raw = 0, 0, list[tuple[str, str, int, str]]()
    attention = projections(model)
    written = {(own.module, own.parameter) for own in own_matrices(model).values()}
    for name, module in model.named_modules():
        owner, how = attention.get(module, (name, module))
        for parameter, p in _matrices(module, written):
            runs: nn.Module = own_products(module).get(parameter) or how
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
    known = isinstance(module, EmulatedModule) or why_not(module) is None
    looked_up = "Embedding" in type(module).__name__ or isinstance(module, nn.Embedding | nn.EmbeddingBag)
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, UninitializedParameter):
            continue
        wide = p.dim() >= 2 and (known or sum(size > 1 for size in p.shape) >= 2)
        if ((module, name) in written or (wide and not looked_up)) and not _ADDED.search(name):
            yield name, p
