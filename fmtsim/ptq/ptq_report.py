# SPDX-License-Identifier: Apache-2.0
"""The report of a quantisation: what each layer lost."""

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fmtsim.nn.conversion import root
from fmtsim.nn.coverage import Coverage, estimated, percent
from fmtsim.nn.modules import EmulatedModule
from fmtsim.ptq.calibrate import Slot, limit, static_scale
from fmtsim.support.errors import ArgumentError
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved
from fmtsim.support.table import Result, Rows, decibels, some

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNREACHED = "weights are rounded to nearest by their own ranges, static inputs under the widest range of their like"
"""What happens to layers that no calibration data reaches."""
_LOSSLESS = 1.1  # of the longest bar: one without noise
_HEAD = ("layer", "shape", "x", "w", "x scale", "clipped %", "weight dB", "output dB", "with")
_WORDS = (0, 1, 2, 3, 8)  # columns; the others hold numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqRow:
    """Describe one weight and the product it enters.

    Args:
        name: The layer, with its part or group where it has several.
        shape: Outputs and inputs.
        x, w: Formats, "" where the operand stays in high precision.
        x_scale: The static scale of the activations, None where it is made from the tensor at hand.
        x_limit: The largest magnitude that scale represents.
        clipped_percent: Share of the calibration data beyond it.
        weight_db: Signal to noise of the weight, in dB: how far it moved.
        output_db: Signal to noise of the layer's outputs on the calibration data, in dB, both operands quantised, for
            the inputs of the model in high precision; what a corrected bias removes is still in it.
        methods: What was done to it.
    """

    name: str
    shape: tuple[int, int]
    x: str
    w: str
    x_scale: float | None
    x_limit: float | None
    clipped_percent: float
    weight_db: float
    output_db: float
    methods: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqReport(Result):
    """List the weights that a quantisation changed; ``print`` shows a table.

    Args:
        recipe: Its name.
        rows: The weights.
        seconds: How long it took.
        equalised: Pairs of layers whose weights were equalised.
        left_alone: Modules with weights that stay in high precision, and why.
        tied: Modules of those that share a weight with a quantised layer, and so have it quantised, and the layer.
        attention: Its quantisers, "" where it runs as it did.
        extended: Normalisations and softmaxes whose inputs are rounded, and embeddings that were.
        machine: Where the quantised layers multiply, "" where that is float32 in no particular order.
        unreached: Layers that calibration data never ran.
        coverage: Elements of the weights that products read; ``simulated`` are those of quantised layers.
    """

    recipe: str
    rows: tuple[PtqRow, ...]
    seconds: float
    equalised: tuple[str, ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    attention: str = ""
    extended: tuple[str, ...] = ()
    machine: str = ""
    unreached: tuple[str, ...] = ()
    coverage: Coverage = Coverage(total=0, simulated=0, backward=0)

    @property
    def summary(self) -> str:
        """One line: the recipe, the share of the weights that is quantised, and what is left."""
        return f"{self.recipe}: {coverage_text(self.coverage, 'quantised')}"

    def __getitem__(self, name: str) -> PtqRow:
        rows = [row for row in self.rows if row.name == name]
        if not rows:
            raise ArgumentError(f"the report has no layer {name!r}; it has {', '.join(row.name for row in self.rows)}")
        return rows[0]

    def _content(self) -> tuple[Rows | str, ...]:
        cells: list[tuple[str, ...]] = [_HEAD]
        for row in self.rows:
            scale = "-" if not row.x else "dynamic" if row.x_scale is None else f"{row.x_scale:.4g}"
            clipped = "-" if row.x_scale is None else f"{row.clipped_percent:.3f}"
            shape = "x".join(map(str, row.shape))
            numbers = (scale, clipped, decibels(row.weight_db), decibels(row.output_db), row.methods)
            cells.append((row.name, shape, row.x or "-", row.w or "-", *numbers))
        where = f" {self.machine}" if self.machine else ""
        total = f"{len(self.rows)} weights by {self.recipe}{where} in {self.seconds:.1f} s"
        lines = [total + (f"; equalised {', '.join(self.equalised)}" if self.equalised else "")]
        lines += [coverage_text(self.coverage, "quantised").partition(";")[0]] if self.coverage.raw else []
        lines += [f"attention: {self.attention}"] if self.attention else []
        lines += [f"rounded, too: {some(self.extended)}"] if self.extended else []
        lines += [f"calibration never ran {some(self.unreached)}: {UNREACHED}"] if self.unreached else []
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_alone:
            if name not in self.extended:
                reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            lines.append(f"left in high precision: {some(names)} ({reason})")
        lines += [f"{name} shares the weight of {layer}, which is quantised" for name, layer in self.tied]
        return Rows(cells, _WORDS), *lines

    def plot(self, path: str | Path | None = None, *, other: "PtqReport | None" = None, ax: Any = None) -> "Figure":
        """Draw each layer's signal to noise as a bar, and those of another report beside them; return the figure.

        It is that of the outputs, or that of the weights where one of the reports comes from no data.

        Args:
            path: Where to save a PNG.
            other: Report of another recipe on the same model; ArgumentError where it has other layers.
            ax: Axes to draw into.
        """
        reports = [self] if other is None else [self, other]
        names = [row.name for row in self.rows]
        if not names or any([row.name for row in report.rows] != names for report in reports):
            raise ArgumentError("plot takes reports of the same layers; quantise copies of one model")
        figure, (panel,) = new_panels(8.0, 1.2 + 0.14 * len(names) * len(reports) + 0.06 * len(names), ax)
        measured = all(any(not math.isnan(row.output_db) for row in report.rows) for report in reports)
        what = "output" if measured else "weight"
        decibels = [[getattr(row, f"{what}_db") for row in report.rows] for report in reports]
        longest = max((one for row in decibels for one in row if math.isfinite(one)), default=1.0) * _LOSSLESS
        thick = 0.8 / len(reports)
        for i, report in enumerate(reports):
            places = [k + thick * (i - (len(reports) - 1) / 2) for k in range(len(names))]
            bars = panel.barh(
                places, [0.0 if math.isnan(x) else min(max(x, 0.0), longest) for x in decibels[i]], thick,
                color=COLOURS[i % 7], label=report.recipe,
            )  # fmt: skip
            words = [f"{x:.1f}" if math.isfinite(x) else "no signal" if x != x else "lossless" for x in decibels[i]]
            panel.bar_label(bars, words, padding=3, fontsize=7)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        label_axes(panel, f"signal to noise of the {what}s (dB, longer is better)", "")
        if len(reports) > 1:
            panel.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(reports))
        else:
            panel.set_title(reports[0].recipe, fontsize=10)
        panel.set_axisbelow(True)
        return saved(figure, path)


def coverage_of_weights(model: nn.Module, done: Container[str]) -> Coverage:
    """Return how much of the weights that products read is in layers of these names."""
    found = estimated(model, root(model).reasons)
    raw = tuple(row for row in found.raw if row.layer not in done and row.layer.rpartition(".")[0] not in done)
    return replace(found, simulated=found.total - sum(row.multiply_adds for row in raw), raw=raw)


def coverage_text(coverage: Coverage, done: str) -> str:
    """Return in words which share of the weights that products read is quantised, or coded, and what is not."""
    rest = f"; left: {coverage.left()}" if coverage.raw else ""
    return f"{percent(coverage.simulated, coverage.total)} of the weights that products read {done}{rest}"


def left_alone(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the modules with weights of their own that a conversion left alone, and why."""
    reasons, shared = root(model).reasons, dict(tied(model))
    modules = {}
    for name, module in model.named_modules():
        owner = name.split(".parametrizations.")[0]  # which keeps the weights of the module that is parametrized
        heavy = any(p.dim() > 1 for p in module.parameters(recurse=False))
        if heavy and owner in reasons and owner not in shared and not _inside(owner, model):
            modules[owner or "(model)"] = reasons[owner]
    return tuple(modules.items())


def tied(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the modules that are not quantised but share a weight with a layer that is, and the layer."""
    modules = list(model.named_modules())
    owners = {
        id(p): name for name, m in modules if isinstance(m, EmulatedModule) for p in m.parameters() if p.dim() > 1
    }
    return tuple(
        (name, owners[id(p)])
        for name, m in modules
        if not isinstance(m, EmulatedModule) and not _inside(name, model)
        for p in m.parameters(recurse=False)
        if id(p) in owners
    )


def _inside(name: str, model: nn.Module) -> bool:
    """Return True if a module belongs to a converted one, which multiplies with its weights."""
    return bool(name) and isinstance(model.get_submodule(name.rpartition(".")[0]), EmulatedModule)


def report_row(slot: Slot, methods: str) -> PtqRow:
    """Return the row of a weight that was measured."""
    part = slot.parts[0]
    assert slot.quantised is not None
    w, q = slot.w.double(), slot.quantised.double()
    scale = None if part.top is None else float(static_scale(part.x, part.top).scales().scale)
    return PtqRow(
        name=slot.name,
        shape=(slot.w.shape[0], slot.w.shape[1]),
        x="" if part.x.format is None else part.x.format.name,
        w="" if slot.quantizer.format is None else slot.quantizer.format.name,
        x_scale=scale,
        x_limit=limit(part),
        clipped_percent=100 * part.clipped,
        weight_db=ratio(float(w.square().sum()), float((w - q).square().sum())),
        output_db=ratio(slot.signal, slot.noise),
        methods=methods,
    )


def ratio(signal: float, noise: float) -> float:
    """Return a ratio of powers in dB: inf without noise, NaN without a signal."""
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)
