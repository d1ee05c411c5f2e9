# SPDX-License-Identifier: Apache-2.0
"""For which batch sizes a row's result changes, because the library adds its products in another order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.gemm.products.explanation import explained
from fmtsim.gemm.products.resolver import resolve
from fmtsim.gemm.targets.doubts import without_doubts
from fmtsim.lab.analysis.layer_products import LayerProduct, Model, check_rows, dtype_of, products_of
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.plotting import COLOURS, label_axes, new_figure, saved, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = range(1, 513)
_LEFT_OUT = ("source", "verified")  # of a plan: they change no bit
_PLAN = tuple(field.name for field in fields(GemmPlan) if field.name not in _LEFT_OUT)
_EPILOGUE = ("partial", "round_trip", "epilogue", "scaled_promotion", "successive_scales", "bias_after_rounding")
_WORDS = {"split": "parts", "k_tile": "tile", "instruction_k": "products of an instruction",
          "residue_first": "incomplete tile first", "part_k": "products of a part",
          "k_end": "products end at"}  # fmt: skip
_GUESS = "not known"
_BANDS = (
    table.Column("sizes", str), table.Column("result", "group", absent="?"),
    table.Column("basis", lambda band: band.found.basis),
    table.Column("accumulation order", lambda band: explained(band.call, band.found).order),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Describe neighbouring batch sizes whose products are added in one order."""

    first: int  # first, last: smallest and largest size
    last: int
    sizes: int  # how many sizes were asked between them
    # number of the result, from 0: bands with one number give a row the same bits. None where the order is a guess.
    group: int | None
    call: GemmCall  # the call of the smallest size
    found: GemmSpec  # what it comes to

    def __str__(self) -> str:
        return f"M={self.first}" if self.first == self.last else f"M={self.first}..{self.last}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "first": self.first, "last": self.last, "sizes": self.sizes, "result": self.group,
            "basis": self.found.basis, "unit": self.found.unit, "parts": self.found.plan.split,
            "tile": self.found.plan.k_tile, "source": self.found.plan.source,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Say that a row's result in a batch of ``size`` is another than in one of ``before``, the last known size."""

    before: int  # before, size: batch sizes
    size: int
    what: str  # what differs in the accumulation order

    def __str__(self) -> str:
        return f"M={self.size}" if self.size == self.before + 1 else f"M={self.before + 1}..{self.size}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProductInvariance(table.Result):
    """Say for one product of a layer which batch sizes give a row the same bits; ``print`` shows their orders."""

    layer: str  # name of the layers, or their outputs and inputs
    product: str  # ``"forward"`` or ``"dgrad"``
    operands: str  # format of the operands
    bands: tuple[Band, ...]  # in order of sizes

    @property
    def results(self) -> int:
        """How many different results a row can have, as far as orders are known."""
        return len({band.group for band in self.bands} - {None})

    @property
    def unknown(self) -> int:
        """For how many sizes the order is a guess."""
        return sum(band.sizes for band in self.bands if band.group is None)

    @property
    def invariant(self) -> bool | None:
        """Whether a row has the same bits in a batch of any size; None where that is not known."""
        return False if self.results > 1 else None if self.unknown else True

    @property
    def changes(self) -> tuple["Change", ...]:
        """Where the result changes from one known size to the next."""
        bands = [band for band in self.bands if band.group is not None]
        steps = zip(bands, bands[1:], strict=False)
        return tuple(
            Change(before=a.last, size=b.first, what=differences(a, b)) for a, b in steps if a.group != b.group
        )

    def same(self, first: int, second: int) -> bool | None:
        """Return True if a row has the same bits in batches of two sizes; None where that is unknown.

        Raises:
            ArgumentError: A size was not asked.
        """
        groups = [self._band(size).group for size in (first, second)]
        return True if first == second else None if None in groups else groups[0] == groups[1]

    def _band(self, size: int) -> Band:
        answer = next((band for band in self.bands if band.first <= size <= band.last), None)
        if answer is None:
            raise ArgumentError(f"batch size {shown(size)} was not asked; pass it among sizes=")
        return answer

    def _content(self) -> tuple[str, table.Rows]:
        return f"{self.layer} {self.product} {self.operands}", table.table_of(_BANDS, self.bands)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        bands = [x.to_dict() for x in self.bands]
        return {
            "layer": self.layer, "product": self.product, "operands": self.operands, "invariant": self.invariant,
            "results": self.results, "unknown": self.unknown, "bands": bands,
            "changes": [{"before": x.before, "size": x.size, "what": x.what} for x in self.changes],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BatchInvariance(table.Result):
    """Hold what ``batch_invariance`` found; ``print`` shows a table, notebooks one in HTML."""

    products: tuple[ProductInvariance, ...]  # of every layer
    sizes: tuple[int, ...]  # batch sizes that were asked, in order

    @property
    def invariant(self) -> bool | None:
        """Whether no product's rows depend on the size of their batch; None where that is not known."""
        answers = {product.invariant for product in self.products}
        return False if False in answers else None if None in answers else True

    def _content(self) -> tuple[table.Rows, str]:
        asked = f"{len(self.sizes)} batch sizes from {self.sizes[0]} to {self.sizes[-1]}"
        counts = [(sum(x.invariant is value for x in self.products), word) for value, word in _VERDICTS]
        total = ", ".join(f"{count} {word}" for count, word in counts if count)
        return table.table_of(self._columns(), self.products, filled=True), (
            f"{len(self.products)} products, {asked}: {total}"
        )

    def _columns(self) -> tuple[table.Column, ...]:
        return (
            table.Column("layer", "layer"), table.Column("product", "product"), table.Column("operands", "operands"),
            table.Column("results", "results"), table.Column("changes", lambda x: len(x.changes)),
            table.Column("first change", lambda x: (*x.changes, "none" if x.invariant else _GUESS)[0]),
            table.Column("what changes", lambda x: x.changes[0].what if x.changes else ""),
            table.Column(_GUESS, lambda x: f"{x.unknown} of {len(self.sizes)}" if x.unknown else ""),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "sizes": list(self.sizes), "invariant": self.invariant,
            "products": [product.to_dict() for product in self.products],
        }  # fmt: skip

    def plot(self, path: str | Path | None = None, *, title: str = "") -> "Figure":
        """Draw a line of bands over the batch size for every product: one colour is one result of a row.

        Args:
            path: Where to save a PNG; None only returns the figure.
            title: Heading.
        """
        figure = new_figure(9.0, 1.4 + 0.34 * len(self.products))
        panel = figure.subplots()
        for place, product in enumerate(self.products):
            for band in product.bands:
                colour = "white" if band.group is None else COLOURS[band.group % len(COLOURS)]
                hatch = "////" if band.group is None else None
                panel.broken_barh(
                    [(band.first, band.last + 1 - band.first)], (place - 0.36, 0.72), facecolors=colour, hatch=hatch,
                    edgecolor="#999999" if hatch else "none", linewidth=0.4,  # an edge would cover a band of one size
                )  # fmt: skip
        label_axes(panel, "batch size M (rows); a colour is a result, hatched is not known", "")
        panel.set_yticks(range(len(self.products)), [f"{x.layer} {x.product} {x.operands}" for x in self.products])
        panel.set_ylim(len(self.products) - 0.4, -0.6)
        panel.set_axisbelow(True)
        panel.set_xlim(self.sizes[0], self.sizes[-1] + 1)
        if self.sizes[-1] > 64 * self.sizes[0]:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
        set_title(figure, title)
        return saved(figure, path)


_VERDICTS = ((True, "invariant"), (False, "change with the batch"), (None, _GUESS))


def batch_invariance(
    model: Model, target: Any = None, sizes: Iterable[int] = SIZES, *, dtypes: Sequence[str] = ("bf16",),
    passes: Sequence[str] = ("forward", "dgrad"),
) -> BatchInvariance:  # fmt: skip
    """Say for which batch sizes a row's result changes, layer by layer; nothing is multiplied.

    A library chooses its accumulation order by the sizes of the whole call, so that a row (a token) may get other bits
    among more rows. Sizes whose orders are the same in other words (tiles of another width, dealt alike) count as one.
    Where orders differ, so do the bits of some rows; a given row may still round alike.

    Args:
        model: A model's name (``fmtsim.gemm.models.list_models()``), a list of names and ``(outputs, inputs,
            bias)``, or a module, whose linear layers count. A module that ``convert`` changed has its own formats and
            machine.
        target: A GPU with its library, or a plan file; to be left out for a converted module.
        sizes: Rows M of the layers' input.
        dtypes: Operands: some of ``"bf16"``, ``"fp16"``, ``"tf32"``, ``"fp8_fast"``, ``"fp8_slow"``.
        passes: ``"forward"``, ``"dgrad"`` or both. The rows of ``wgrad`` are not tokens.

    Raises:
        ArgumentError: No such model, target, dtype or pass, or sizes below 1.

    >>> found = batch_invariance([(4096, 14336, False)], "h200", [1, 8, 512], dtypes=["fp8_fast"], passes=["forward"])
    >>> found.products[0].same(8, 8)
    True
    """
    asked = check_rows("batch_invariance", "sizes", sizes)
    if "wgrad" in passes:
        raise ArgumentError("batch_invariance got passes='wgrad', whose sums run over the batch; choose forward, dgrad")
    layer_products = products_of("batch_invariance", model, target, dtypes, passes)
    products = tuple(
        ProductInvariance(
            layer=x.layer, product=x.product, operands=dtype_of(x.like), bands=tuple(joined(bands_of(x, asked)))
        )
        for x in layer_products
    )
    return BatchInvariance(products=products, sizes=tuple(asked))


def bands_of(product: LayerProduct, sizes: Sequence[int]) -> Iterator[Band]:
    """Yield a band for each size; those with one order have one group."""
    groups: list[Band] = []
    group_of: dict[tuple[Any, ...], int] = {}
    for size in sizes:
        call = product.call(size)
        with without_doubts():
            spec = resolve(call)
        group = None
        if spec.basis != "guess":
            key = (spec.datapath, spec.a, spec.b, *(getattr(spec.plan, name) for name in _PLAN))
            if key not in group_of:
                group_of[key] = next((i for i, x in enumerate(groups) if same_bits(call, x.found, spec)), len(groups))
            group = group_of[key]
        band = Band(first=size, last=size, sizes=1, group=group, call=call, found=spec)
        if group == len(groups):
            groups.append(band)
        yield band


def joined(bands: Iterable[Band]) -> Iterator[Band]:
    """Yield neighbours of one group as one band."""
    for _, run in groupby(bands, key=lambda band: band.group):
        alike = list(run)
        yield replace(alike[0], last=alike[-1].last, sizes=len(alike))


def same_bits(call: GemmCall, first: GemmSpec, second: GemmSpec) -> bool:
    """Return True if two specs of a product give every row the same bits."""
    if (first.datapath, first.a, first.b) != (second.datapath, second.a, second.b):
        return False
    a, b = (_serial(call, spec.plan) for spec in (first, second))
    needs = {"bias_after_rounding": call.bias and call.out.itemsize == 2, "epilogue": call.scaling != "none"}
    fields = [name for name in _EPILOGUE if needs.get(name, True)]
    return all(getattr(a, x) == getattr(b, x) for x in fields) and same_order(call.k, first.datapath, a, b)


def _serial(call: GemmCall, plan: GemmPlan) -> GemmPlan:
    """Return a plan whose parts are added one after another, where adding them in place to float32 is nothing else."""
    return replace(plan, reduce="serial") if plan.reduce == "in_place" and not (plan.partial or call.bias) else plan


def differences(before: Band, after: Band) -> str:
    """Return in words what differs between the orders of two bands."""
    words = [(before.found.unit, after.found.unit, "unit")] if before.found.unit != after.found.unit else []
    a, b = before.found.plan, after.found.plan
    for name in _PLAN:
        pair = getattr(a, name), getattr(b, name)
        follows = (name == "part_k" and a.split != b.split) or (name == "k_tile" and None in pair)
        if pair[0] != pair[1] and not follows:
            words.append((*(getattr(x, "name", x) for x in pair), _WORDS.get(name, name)))  # type: ignore[arg-type]
    return ", ".join(f"{what} {_word(a)} -> {_word(b)}" for a, b, what in words)


def _word(value: Any) -> str:
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)
