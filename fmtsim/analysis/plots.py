# SPDX-License-Identifier: Apache-2.0
"""Pictures of lost bits; matplotlib is imported only when one is drawn."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fmtsim.analysis.measure import LOWEST_EXPONENT
from fmtsim.analysis.stats import OperandStats
from fmtsim.errors import ArgumentError
from fmtsim.plotting import COLOURS, label_axes, new_figure, saved, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_exponents(stats: Mapping[str, OperandStats], path: str | Path | None = None, *, title: str = "") -> "Figure":
    """Draw the exponents of each operand as its element format sees them, beside the range of that format.

    An exponent is ``floor(log2|x / scale|)``; zeros have none. What lies left of the range underflows.

    Args:
        stats: Statistics by label, one panel each.
        path: Where to save a PNG; None only returns the figure.
        title: Heading.

    Raises:
        ArgumentError: there is nothing to draw.
    """
    if not stats:
        raise ArgumentError("plot_exponents got no statistics; observe at least one step")
    columns = min(3, len(stats))
    rows = math.ceil(len(stats) / columns)
    figure = new_figure(3.9 * columns + 0.4, 2.7 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (label, s) in zip(axes, stats.items(), strict=False):
        _histogram(panel, label, s)
    for panel in axes[len(stats) :]:
        panel.set_axis_off()
    set_title(figure, f"{title}\nshaded: exponents of the format's own values" if title else title)
    return saved(figure, path)


def _histogram(panel: "Axes", label: str, s: OperandStats) -> None:
    used = s.scaled_exponents.nonzero().flatten().tolist() or [-LOWEST_EXPONENT]
    low, high = used[0] + LOWEST_EXPONENT, used[-1] + LOWEST_EXPONENT
    counts = s.scaled_exponents[used[0] : used[-1] + 1].double()
    panel.bar(range(low, high + 1), (100.0 * counts / max(1, s.elements)).tolist(), width=0.9, color=COLOURS[0])
    if s.window is not None:
        bottom, top = (math.floor(math.log2(edge)) for edge in s.window)
        panel.axvspan(bottom - 0.5, top + 0.5, color=COLOURS[4], alpha=0.25, zorder=0)
        panel.set_xlim(max(min(low, bottom), bottom - 40) - 2, max(high, top) + 2)
    lost = (
        f"{s.underflow_percent:.2f} % underflow, {s.saturation_percent:.2f} % saturation" if s.nonzero else "all zero"
    )
    panel.set_title(f"{label}  {s.format}\n{lost}", fontsize=9)
    label_axes(panel, "exponent of x / scale", "% of elements")
