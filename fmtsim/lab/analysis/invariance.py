# SPDX-License-Identifier: Apache-2.0
"""For which batch sizes a row's result changes, because the library adds its products in another order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fmtsim.gemm.model_calls import check_dtypes, layer_call
from fmtsim.gemm.model_layers import PASSES, Shape, layer_shapes
from fmtsim.gemm.products.explanation import explained
from fmtsim.gemm.products.native import SCALED_MULTIPLE
from fmtsim.gemm.products.resolver import resolve
from fmtsim.gemm.targets.doubts import without_doubts
from fmtsim.gemm.targets.target import get_target
from fmtsim.nn.coverage import numbered, together
from fmtsim.nn.explain_layer import model_products
from fmtsim.nn.modules import EmulatedModule
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Model = str | nn.Module | Sequence[str | Shape]  # a name of list_models(), a module, or names and shapes

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


def list_products(
    verb: str, model: Any, target: Any, dtypes: Sequence[str], passes: Sequence[str] = PASSES
) -> list[LayerProduct]:
    """Return the products of a model's linear layers, those of layers that are alike once.

    Args:
        verb: Name of the function that asks, for errors.
        model: A ``Model``. A module that ``convert`` changed has its own machine and formats.
        target: A target; None for a converted module.
        dtypes: Of ``fmtsim.gemm.model_layers.DTYPES``, for all but converted modules.
        passes: Of ``PASSES``.

    Raises:
        ArgumentError: No such model, target, dtype or pass; or nothing multiplies.
    """
    # 1. Check passes and target: a converted module names its own.
    wrong = next((name for name in passes if name not in PASSES), None)
    if wrong is not None or not passes:
        raise ArgumentError(f"{verb} got passes={shown(wrong)}; choose from {', '.join(PASSES)}")
    converted = isinstance(model, nn.Module) and any(isinstance(x, EmulatedModule) for x in model.modules())
    if converted != (target is None):
        step = "leave target out: a converted model names its machine" if converted else "pass target= ('h200')"
        raise ArgumentError(f"{verb} got target={shown(target)} for {_what(model)}; {step}")
    if converted:
        # 2. The products on the machines that convert gave the layers; others have no order to speak of.
        groups: dict[tuple[str, str, GemmCall], list[str]] = {}
        for layer, product, like in model_products(model, _ROWS):
            which = product.replace("fprop", "forward")
            if not isinstance(like, str) and like.call is not None and which in passes:
                groups.setdefault((numbered(layer), which, like.call), []).append(layer)
        asked = [
            LayerProduct(layer=together(names), product=which, like=call) for (_, which, call), names in groups.items()
        ]
    else:
        # 2. The shapes of linear layers, those that are alike once.
        get_target(target)
        check_dtypes(dtypes)
        if isinstance(model, nn.Module):
            shapes = {layer: shape for layer, (shape, _) in _group_layers(model).items()}
        else:
            models = [model] if isinstance(model, str) else model
            shape_types = (int, int, bool)
            if not isinstance(models, Sequence) or not all(
                isinstance(x, str)
                or (isinstance(x, tuple | list) and tuple(map(type, x)) == shape_types and min(x[:2]) > 0)
                for x in models
            ):
                raise ArgumentError(
                    f"{verb} got model={shown(model)}; pass a name (fmtsim.gemm.model_layers.list_models()), a module, "
                    "or a list of (outputs, inputs, bias)"
                )
            each = [shape for x in models for shape in (layer_shapes([x]) if isinstance(x, str) else [tuple(x)])]
            shapes = {f"{n}x{k}{' + bias' if bias else ''}": (n, k, bias) for n, k, bias in dict.fromkeys(each)}
        if not shapes:
            raise ArgumentError(f"{verb} found no linear layer in {_what(model)}; pass a model with nn.Linear layers")
        # 3. The calls of each of them, in each dtype and pass.
        calls = [
            (layer, which, layer_call(which, _ROWS, n, k, bias, dtype))
            for layer, (n, k, bias) in shapes.items()
            for dtype in dtypes
            for which in passes
        ]
        alike = equal_layers(model) if isinstance(model, nn.Module) else {}
        conv1d = {layer for layer, names in alike.items() if not isinstance(model.get_submodule(names[0]), nn.Linear)}
        asked = []
        for layer, which, call in calls:
            if call is None:
                continue
            # A weight that is [inputs, outputs] lies the other way; FP8 layers copy it to the usual layout.
            if layer in conv1d and call.operation != "scaled_mm" and which == "wgrad":
                call = replace(call, m=call.n, n=call.m)
            elif layer in conv1d and call.operation != "scaled_mm":
                call = replace(call, b_layout="column" if which == "forward" else "row")
            asked.append(LayerProduct(layer=layer, product=which, like=replace(call, target=target)))
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


def operand_formats(call: GemmCall) -> str:
    """Return the format of a call's operands in a word, and how FP8 is summed."""
    name = call.a if call.a == call.b else f"{call.a} x {call.b}"
    return f"{name} {'fast' if call.fast_accum else 'slow'}" if call.operation == "scaled_mm" else name


def _what(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else shown(model)


def equal_layers(model: nn.Module) -> dict[str, list[str]]:
    """Return names of linear layers, empty for the model itself, by what those that are alike are called."""
    return {layer: [x.removeprefix("(model)") for x in names] for layer, (_, names) in _group_layers(model).items()}


def _group_layers(model: nn.Module) -> dict[str, tuple[Shape, list[str]]]:
    alike: dict[tuple[str, Shape], list[str]] = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            n, k = weight.shape
        elif type(module).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2:
            k, n = weight.shape  # of transformers, [inputs, outputs]
        else:
            continue
        name = name or "(model)"
        alike.setdefault((numbered(name), (n, k, module.bias is not None)), []).append(name)
    return {together(names): (shape, names) for (_, shape), names in alike.items()}


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
        groups = []
        for size in (first, second):
            band = next((band for band in self.bands if band.first <= size <= band.last), None)
            if band is None:
                raise ArgumentError(f"batch size {shown(size)} was not asked; pass it among sizes=")
            groups.append(band.group)
        return True if first == second else None if None in groups else groups[0] == groups[1]

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
        columns = (
            table.Column("layer", "layer"), table.Column("product", "product"), table.Column("operands", "operands"),
            table.Column("results", "results"), table.Column("changes", lambda x: len(x.changes)),
            table.Column("first change", lambda x: (*x.changes, "none" if x.invariant else _GUESS)[0]),
            table.Column("what changes", lambda x: x.changes[0].what if x.changes else ""),
            table.Column(_GUESS, lambda x: f"{x.unknown} of {len(self.sizes)}" if x.unknown else ""),
        )  # fmt: skip
        rows = table.table_of(columns, self.products, filled=True)
        return rows, f"{len(self.products)} products, {asked}: {total}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "sizes": list(self.sizes), "invariant": self.invariant,
            "products": [product.to_dict() for product in self.products],
        }  # fmt: skip

    def plot(self, path: str | Path | None = None, *, title: str = "", ax: Any = None) -> "Figure":
        """Draw a line of bands over the batch size for every product: one colour is one result of a row.

        Args:
            path: Where to save a PNG; None only returns the figure.
            title: Heading.
            ax: Axes to draw into.
        """
        figure, (panel,) = new_panels(9.0, 1.4 + 0.34 * len(self.products), ax)
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
        set_title(panel, title)
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
        model: A model's name (``fmtsim.gemm.model_layers.list_models()``), a list of names and ``(outputs, inputs,
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
    layer_products = list_products("batch_invariance", model, target, dtypes, passes)
    products = tuple(
        ProductInvariance(
            layer=x.layer,
            product=x.product,
            operands=operand_formats(x.like),
            bands=tuple(join_bands(size_bands(x, asked))),
        )
        for x in layer_products
    )
    return BatchInvariance(products=products, sizes=tuple(asked))


def size_bands(product: LayerProduct, sizes: Sequence[int]) -> Iterator[Band]:
    """Yield a band for each size; those with one order have one group."""
    groups: list[Band] = []
    group_of: dict[tuple[Any, ...], int] = {}
    for size in sizes:
        call = product.call(size)
        with without_doubts():
            spec = resolve(call)
        group = None
        if spec.basis != "guess":
            # Equal plans have equal orders; of others the schedules are compared, with each group's first.
            key = (spec.datapath, spec.a, spec.b, *(getattr(spec.plan, name) for name in _PLAN))
            if key not in group_of:
                group_of[key] = next((i for i, x in enumerate(groups) if same_bits(call, x.found, spec)), len(groups))
            group = group_of[key]
        band = Band(first=size, last=size, sizes=1, group=group, call=call, found=spec)
        if group == len(groups):
            groups.append(band)
        yield band


def join_bands(bands: Iterable[Band]) -> Iterator[Band]:
    """Yield neighbours of one group as one band."""
    for _, run in groupby(bands, key=lambda band: band.group):
        alike = list(run)
        yield replace(alike[0], last=alike[-1].last, sizes=len(alike))


def same_bits(call: GemmCall, first: GemmSpec, second: GemmSpec) -> bool:
    """Return True if two specs of a product give every row the same bits."""
    if (first.datapath, first.a, first.b) != (second.datapath, second.a, second.b):
        return False
    # Parts that are added in place to float32 are added one after another, unless they are rounded or meet a bias.
    a, b = (
        replace(spec.plan, reduce="serial")
        if spec.plan.reduce == "in_place" and not (spec.plan.partial or call.bias) else spec.plan
        for spec in (first, second)
    )  # fmt: skip
    needs = {"bias_after_rounding": call.bias and call.out.itemsize == 2, "epilogue": call.scaling != "none"}
    fields = [name for name in _EPILOGUE if needs.get(name, True)]
    return all(getattr(a, x) == getattr(b, x) for x in fields) and same_order(call.k, first.datapath, a, b)


def differences(before: Band, after: Band) -> str:
    """Return in words what differs between the orders of two bands."""
    a, b = before.found.plan, after.found.plan
    words = [] if before.found.unit == after.found.unit else [f"unit {before.found.unit} -> {after.found.unit}"]
    texts = {None: "none", True: "yes", False: "no"}
    for name in _PLAN:
        pair = getattr(a, name), getattr(b, name)
        follows = (name == "part_k" and a.split != b.split) or (name == "k_tile" and None in pair)  # from another field
        if pair[0] != pair[1] and not follows:
            x, y = (texts[x] if x is None or isinstance(x, bool) else getattr(x, "name", str(x)) for x in pair)
            words.append(f"{_WORDS.get(name, name)} {x} -> {y}")
    return ", ".join(words)
