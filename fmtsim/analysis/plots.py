"""Pictures of training runs and of lost bits; matplotlib is imported only when one is drawn."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fmtsim.analysis.stats import LOWEST_EXPONENT, OperandStats
from fmtsim.errors import ArgumentError
from fmtsim.plotting import COLOURS, label_axes, new_figure, saved, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_OVER = 40  # shorter curves are drawn as they are
LEAST_GAP = 0.1  # the gap panel reaches at least this far, so that noise does not look like a difference
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.")


def plot_loss(curves: Mapping[str, Sequence[float]], path: str | Path | None = None, *, title: str = "") -> "Figure":
    """Draw loss curves, smoothed, over their faint raw values, with the gap of each to the first in a panel below.

    Args:
        curves: Losses a step by label; the first curve is the baseline. Curves may have different lengths, and end
            where a loss is not finite.
        path: Where to save a PNG; None only returns the figure.
        title: Heading.

    Raises:
        ArgumentError: there is no curve, or one is empty.
    """
    if not curves or not all(len(values) for values in curves.values()):
        raise ArgumentError(
            f"plot_loss got {len(curves)} curves, of lengths {[len(v) for v in curves.values()]}; "
            "pass at least one step each"
        )
    several = len(curves) > 1
    figure = new_figure(8.0, 6.4 if several else 4.6)
    heights = (2.6, 1) if several else (1,)
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    smooth = {label: smoothed(values) for label, values in curves.items()}
    averaged = any(len(values) >= SMOOTHED_OVER for values in curves.values())
    for i, (label, values) in enumerate(curves.items()):
        steps = range(1, len(values) + 1)
        panels[0].plot(steps, values, color=COLOURS[i % 7], alpha=0.22, linewidth=0.8)
        last = next((v for v in reversed(smooth[label]) if math.isfinite(v)), math.nan)
        style = {"color": COLOURS[i % 7], "linestyle": _DASHES[i % 4], "linewidth": 2.0}
        if len(values) == 1 or not math.isfinite(smooth[label][1]):
            style |= {"marker": "o"}  # one point is no line
        ending = "" if math.isfinite(smooth[label][-1]) else ", then not finite"
        panels[0].plot(
            steps, smooth[label], label=f"{label} ({'smoothed, ' if averaged else ''}last {last:.3f}{ending})", **style
        )
        if i:
            gap = [b - a for a, b in zip(next(iter(smooth.values())), smooth[label], strict=False)]
            panels[1].plot(range(1, len(gap) + 1), gap, label=label, **style)
    if averaged:
        panels[0].plot([], [], color="#808080", alpha=0.5, linewidth=0.8, label="single steps")
    label_axes(panels[0], "" if several else "step", "training loss (nats per byte)")
    panels[0].legend(frameon=False)
    if several:
        panels[1].axhline(0.0, color=COLOURS[0], linewidth=1.0)
        low, high = panels[1].get_ylim()
        panels[1].set_ylim(min(low, -LEAST_GAP), max(high, LEAST_GAP))
        label_axes(panels[1], "step", "gap to\nbaseline")
    set_title(figure, title)
    return saved(figure, path)


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


def smoothed(values: Sequence[float], reach: int | None = None) -> list[float]:
    """Return the centred moving average over ``reach`` values on either side, NaN from the first that is not finite.

    At the start, where losses fall fast, fewer values are averaged, as many on one side as on the other; at the end
    those that there are. ``reach`` is a fortieth of the curve unless it is given.
    """
    reach = len(values) // SMOOTHED_OVER if reach is None else reach
    end = next((i for i, value in enumerate(values) if not math.isfinite(value)), len(values))
    sums = [0.0, *itertools.accumulate(values[:end])]
    windows = [(i - min(reach, i), min(i + min(reach, i) + 1, end)) for i in range(end)]
    means = [(sums[stop] - sums[start]) / (stop - start) for start, stop in windows]
    return means + [math.nan] * (len(values) - end)


def _histogram(panel: "Axes", label: str, s: OperandStats) -> None:
    used = s.scaled_exponents.nonzero().flatten().tolist() or [-LOWEST_EXPONENT]
    low, high = used[0] + LOWEST_EXPONENT, used[-1] + LOWEST_EXPONENT
    counts = s.scaled_exponents[used[0] : used[-1] + 1].double()
    panel.bar(range(low, high + 1), (100.0 * counts / max(1, s.elements)).tolist(), width=0.9, color=COLOURS[0])
    if s.window is not None:
        bottom, top = (math.floor(math.log2(edge)) for edge in s.window)
        panel.axvspan(bottom - 0.5, top + 0.5, color=COLOURS[4], alpha=0.25, zorder=0)
        panel.set_xlim(max(min(low, bottom), bottom - 40) - 2, max(high, top) + 2)
    lost = f"{s.underflow_percent:.2f} % underflow, {s.saturation_percent:.2f} % saturation"
    panel.set_title(f"{label}  {s.format}\n{lost}", fontsize=9)
    label_axes(panel, "exponent of x / scale", "% of elements")
