"""Pictures of post-training quantisation: what each layer lost, and what a search could choose from."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fmtsim.errors import ArgumentError
from fmtsim.plotting import COLOURS, label_axes, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fmtsim.ptq import PtqReport
    from fmtsim.search import SearchResult

_LOSSLESS = 1.1  # of the longest bar: one without noise


def plot_layers(reports: "Sequence[PtqReport]", path: str | Path | None = None) -> "Figure":
    """Draw the signal to noise of every layer's outputs, a bar a report, layers from top to bottom.

    Args:
        reports: One or several of the same model.
        path: Where to save a PNG.

    Raises:
        ArgumentError: There is no report, or they are of different layers.
    """
    names = [row.name for row in reports[0].rows] if reports else []
    if not names or any([row.name for row in report.rows] != names for report in reports):
        raise ArgumentError("plot_layers takes one or more reports of the same layers; quantise copies of one model")
    figure = new_figure(8.0, 1.2 + 0.14 * len(names) * len(reports) + 0.06 * len(names))
    panel = figure.subplots()
    finite = [row.output_db for report in reports for row in report.rows if math.isfinite(row.output_db)]
    longest = max(finite, default=1.0) * _LOSSLESS
    thick = 0.8 / len(reports)
    for i, report in enumerate(reports):
        places = [k + thick * (i - (len(reports) - 1) / 2) for k in range(len(names))]
        bars = panel.barh(
            places, [_length(row.output_db, longest) for row in report.rows], thick,
            color=COLOURS[i % 7], label=report.recipe,
        )  # fmt: skip
        words = [_words(row.output_db) for row in report.rows]
        panel.bar_label(bars, words, padding=3, fontsize=7)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    label_axes(panel, "signal to noise of the outputs (dB, longer is better)", "")
    if len(reports) > 1:
        panel.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(reports))
    else:
        panel.set_title(reports[0].recipe, fontsize=10)
    panel.set_axisbelow(True)
    return saved(figure, path)


def plot_search(result: "SearchResult", path: str | Path | None = None) -> "Figure":
    """Draw the front of a search: the least sum of losses for each cost, one format everywhere, and the choice.

    Args:
        result: What ``fmtsim.search`` returned.
        path: Where to save a PNG.
    """
    figure = new_figure(7.5, 4.6)
    panel = figure.subplots()
    front = result.front()
    panel.step(
        [point.cost for point in front], [point.loss for point in front], where="post", color=COLOURS[0],
        label="least sum of the layers' losses",
    )  # fmt: skip
    for i, (name, point) in enumerate(result.uniform().items()):
        panel.plot(point.cost, point.loss, "os^Dv"[i % 5], color=COLOURS[(i + 2) % 7], label=f"{name} everywhere")
    panel.plot(result.cost, result.loss, "*", markersize=14, color=COLOURS[1], label="chosen, measured")
    panel.axvline(result.budget, color=COLOURS[6], linestyle="--", linewidth=1.0, label="budget")
    if all(value > 0 for value in (result.loss, *(point.loss for point in front))):
        panel.set_yscale("log")
    label_axes(panel, "bit operations of a batch", "loss")
    panel.legend(frameon=False, fontsize=8)
    panel.set_axisbelow(True)
    return saved(figure, path)


def _length(decibels: float, longest: float) -> float:
    return 0.0 if math.isnan(decibels) else longest if decibels == math.inf else max(decibels, 0.0)


def _words(decibels: float) -> str:
    return "no signal" if math.isnan(decibels) else "lossless" if decibels == math.inf else f"{decibels:.1f}"
