# SPDX-License-Identifier: Apache-2.0
"""Coverage: the share of a model's multiply-adds with weights that is simulated, and what is left, in one line.

``fmtsim.nn.report`` counts the products of a batch; here are the record, its words, and the count without a batch, by
the shapes of weights.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.keys import is_untouched
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.multihead_attention import attentions
from fmtsim.nn.planning import FILTERED, NO_CONFIG, NO_MATRIX, projections, why_not
from fmtsim.nn.raw_matmuls import ParameterProduct, computed_products, raw_matrices, raw_products
from fmtsim.recipes.layer_plan import HIGH

PLAIN = "it runs in high precision here"  # the config has no quantiser and no target
COMPUTED = "its model computes it before the product; emulated are products with a Parameter, its views and casts"
_MEANT = (FILTERED, NO_CONFIG, HIGH, PLAIN)
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
        uncounted: What has multiply-adds that are unknown: operators of other packages that read a weight; attention,
            where no batch ran.
        attention: Those of attention's two products, of all pairs of query and key, hidden by a mask or not.
        attention_simulated: Those of quantised attention.
        others: Those of other products without a weight, none of which is simulated.
        keys: Of the longest sequence that was attended to.
        dtypes: Names of the dtypes in which products without a weight run as they are.
    """

    total: int
    simulated: int
    backward: int
    raw: tuple[RawWeight, ...] = ()
    estimated: bool = False
    uncounted: tuple[str, ...] = ()
    attention: int = 0
    attention_simulated: int = 0
    others: int = 0
    keys: int = 0
    dtypes: tuple[str, ...] = ()

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
        order = sorted(groups, key=lambda why: -sizes[why])  # the largest first
        words = []
        for why in order[:most]:
            by_name = groups[why]
            largest = sorted(by_name, key=lambda name: -sum(row.multiply_adds for row in by_name[name]))  # noqa: B023
            names = [together(list(dict.fromkeys(row.name for row in by_name[name]))) for name in largest[:most]]
            more = len(largest) - most
            others = f" and {more} other{'s' * (more > 1)}" if more > 0 else ""
            words.append(f"{', '.join(names)}{others} {percent(sizes[why], self.total)} ({why})")
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
        parts = (both, *self._activations(), f"left: {self.left()}" if self.raw else "", unknown)
        return "; ".join(filter(None, (*parts, "estimated from shapes" if self.estimated else "")))

    def _activations(self) -> Iterator[str]:
        """Yield what becomes of products without a weight."""
        everything, raw = self.total + self.attention + self.others, self.attention - self.attention_simulated
        stay = f"in {' and '.join(self.dtypes)}"
        if self.attention:
            what = f"attention products, {percent(self.attention, everything)} of all at {self.keys} tokens,"
            some = f"{percent(self.attention_simulated, self.attention)} of them simulated, the others {stay}"
            ways = "Recipe(attention=...) and fmtsim.nn.convert_attention quantise them"
            how = f"stay {stay} ({ways})" if raw == self.attention else some
            yield f"{what} {how if raw else 'are simulated'}"
        if self.others:
            yield f"other products without a weight, {percent(self.others, everything)} of all, stay {stay}"


def numbered(name: str) -> str:
    """Return a module's name with a star for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def together(names: Sequence[str]) -> str:
    """Return the names of modules that differ in numbers alone as one.

    >>> together(["layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up"]), together(["0.a.1", "1.a.2"])
    ('layers.0-2,5.up', '*.a.*')
    """
    parts = list(zip(*(name.split(".") for name in names), strict=True))  # by depth: ("layers", "layers"), ("0", "1")
    places = [i for i, part in enumerate(parts) if len(set(part)) > 1]
    if not places:
        return names[0]
    if len(places) > 1:
        return numbered(names[0])  # they differ at several depths
    numbers = sorted({int(part) for part in parts[places[0]]})
    ends = [i for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]  # ends of runs
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
    tenths = part * 1000 // whole  # rounded down: 99.96 % is not 100 %
    return f"{tenths / 10} %" if tenths else "below 0.1 %"


def estimated(model: nn.Module, reasons: Mapping[str, str]) -> Coverage:
    """Return the coverage of a model by the shapes of its weights, each at one position; embeddings are looked up.

    Args:
        model: Any module.
        reasons: Why modules were left alone, by name.
    """
    simulated, backward, raw, computed = 0, 0, list[tuple[str, str, int, str]](), computed_products(model)
    attention, modules = projections(model), dict(model.named_modules())
    written = {(matrix.module, matrix.parameter) for matrix in raw_matrices(model).values()}
    for name, module in modules.items():
        owner, how = attention.get(module, (name, module))
        if isinstance(module, ParametrizationList):  # what it holds makes a weight of the layer around it
            how = modules[name.rpartition("parametrizations.")[0].rstrip(".")]
        for parameter, p in _matrices(module, written):
            runs: nn.Module = raw_products(module).get(parameter) or how  # what multiplies by the Parameter
            plain = {"fprop": 1, "dgrad": 1, "wgrad": 1}  # 1 for each product in high precision
            if (
                isinstance(runs, EmulatedModule)
                and runs.emulation is not None
                and not (runs in computed or runs.not_run)
            ):
                plain = plain_products(runs.emulation.config)
                simulated += p.numel() * (1 - plain["fprop"])
                backward += p.numel() * (2 - plain["dgrad"] - plain["wgrad"])  # dgrad and wgrad have fprop's size
            if plain["fprop"]:
                raw.append((name, parameter, p.numel(), why_not_simulated(owner, runs, reasons)))
    return make_coverage(simulated, backward, raw, estimated=True, uncounted=("attention",) * bool(attentions(model)))


def make_coverage(simulated: int, backward: int, raw: list[tuple[str, str, int, str]], **more: Any) -> Coverage:
    """Return the record of counts; ``raw`` has layer, parameter, multiply-adds and reason of each weight."""
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
        wide = p.dim() >= 2 and (can_be_emulated or sum(size > 1 for size in p.shape) >= 2)  # a [1, 1, C] is a bias
        if ((module, name) in written or (wide and not looked_up)) and not _ADDED.search(name):
            yield name, p


ADDED = "added after convert; fmtsim.revert(model) and convert it again"


def is_meant(reason: str) -> bool:
    """Return True if a recipe, config or filter left a module in high precision, not a limit of fmtsim."""
    return reason.startswith(_MEANT)


def plain_products(config: LinearConfig) -> dict[str, int]:
    """Return 1 for each product of a layer that is neither quantised nor on a target, else 0."""
    # of each product, the quantisers whose results its own operands may be made from
    sources = {"fprop": (None, None), "dgrad": (None, config.fprop.b), "wgrad": (config.dgrad.a, config.fprop.a)}
    plain = {}
    for name, before in sources.items():
        gemm = getattr(config, name)
        pairs = zip((gemm.a, gemm.b), before, strict=True)
        reused = [source for by, source in pairs if source is not None and by.source in ("forward", "requantised")]
        untouched = all(map(is_untouched, (gemm.a, gemm.b, *reused)))
        plain[name] = int(untouched and not gemm.emulated and gemm.out.format is None)
    return plain


def why_not_simulated(name: str, module: nn.Module, reasons: Mapping[str, str]) -> str:
    """Return why a module's weights are not simulated, to the best of what is known."""
    if isinstance(module, EmulatedModule):
        computed = isinstance(module, ParameterProduct) and module.computed and not module.seen
        return module.not_run or (COMPUTED if computed else PLAIN)
    if not reasons and isinstance(module, ParametrizationList):
        return "not converted"  # the layer whose weight it makes
    owner = name.partition(".parametrizations")[0].removeprefix("parametrizations.weight")
    why = reasons.get(owner) or reasons.get(name) or why_not(module) or (ADDED if reasons else "not converted")
    return f"no emulated form of {type(module).__name__}" if why == NO_MATRIX else why
