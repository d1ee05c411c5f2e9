# SPDX-License-Identifier: Apache-2.0
"""Tables of results: aligned text, Markdown, and plots of curves."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.support import table
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved
from studies.claims.claim import Bounds, Claim, Expected
from studies.claims.run import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--", "-.", ":")  # what lies on one curve shows below the next
HEADER = ("claim", "number", "compared with", "ours", "seeds", "verdict", "seconds")
LEFT = (0, 1, 5)  # columns of text
BOUNDS: dict[Bounds, str] = {
    "source": "Bounds: the source's.",
    "before": "Bounds: ours, set before a run.",
    "after": "Bounds: ours, set after numbers were seen.",
}
WORDS = """Figures are compared with a **paper**, the source's own **code**, or a **formula**; bounds without a figure
are directions. A claim is **shown** where every number is and a figure is among them, **shown in part** where the
direction or a part of a figure is, **not shown** where it was tried and did not come out; native speed is **not ours**
to show."""


def rows_of(results: Iterable[Result]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a table: a row with the verdict and seconds of each claim, and one for each of its numbers."""
    for result in results:
        yield result.claim.name, "", "", "", "", ending(result), f"{result.seconds:.1f}"
        for row in result.rows:
            spread = f"{short(min(row.values))} to {short(max(row.values))}" if len(row.values) > 1 else ""
            ours = "-" if math.isnan(row.ours) else short(row.ours)
            judged = row.expected.bounded or row.expected.native or math.isnan(row.ours)
            yield "", row.expected.name, compared(row.expected), ours, spread, row.verdict if judged else "-", ""


def ending(result: Result) -> str:
    """Return how a claim ended, and what is recorded where that is another."""
    if result.error:
        return "BROKE OFF"
    if result.change == 0:
        return result.verdict
    return f"{result.verdict} ({'WORSE' if result.worse else 'better'} than recorded: {result.claim.recorded})"


def compared(expected: Expected) -> str:
    """Return the source's figure and whose it is, or the bounds of a direction."""
    if expected.published is not None:
        return f"{short(expected.published)} {expected.origin}"
    low, high = expected.low, expected.high
    if not expected.bounded:
        return "-"
    if low == high:
        return f"= {short(low)}"
    by = f" by {short(expected.standard_errors)} standard errors" if expected.standard_errors else ""
    return (
        f">= {short(low)}{by}"
        if high == math.inf
        else f"<= {short(high)}"
        if low == -math.inf
        else (f"{short(low)} to {short(high)}")
    )


def short(value: float) -> str:
    """Return four digits of a number."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"


def markdown(results: Sequence[Result]) -> str:
    """Return the table in Markdown, and a line on each claim below it."""
    cells = table.markdown([HEADER, *rows_of(results)], left=LEFT)
    return "\n".join([cells, "", WORDS, "", *(f"- {about(result.claim)}" for result in results)]) + "\n"


def about(claim: Claim) -> str:
    """Return a claim in a line: what it says, who, and what is different here."""
    notes = f" Here: {claim.notes}." if claim.notes else ""
    return f"**{claim.name}**: {claim.says} ({claim.source}).{notes} {BOUNDS[claim.bounds]}"


def plot_result(result: Result, path: str | Path | None = None) -> "Figure | None":
    """Draw the curves of a claim and save them as PNG where a path is given; None where it has none.

    Needs matplotlib, which belongs to the extra ``viz``.
    """
    measured = result.runs[0] if result.runs else None  # of the first seed
    if measured is None or not measured.curves:
        return None
    figure, (axes,) = new_panels(7.0, 4.4)
    for i, (label, points) in enumerate(measured.curves.items()):
        marker = "o" if len(points) < 40 else ""
        x, y = zip(*points, strict=True)
        look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        look |= {"drawstyle": "steps-post"} if measured.steps else {}
        axes.plot(x, y, label=label, marker=marker, markersize=4, linewidth=1.8, **look)
    if "x" in measured.logarithmic:
        axes.set_xscale("log", base=2)
    if "y" in measured.logarithmic:
        heights = [y for points in measured.curves.values() for _, y in points]
        low, high = axes.get_ylim()
        if min(heights) == 0 < max(heights):  # below the least other number the axis is linear, down to 0
            least = 10.0 ** math.floor(math.log10(min(y for y in heights if y > 0)))
            axes.set_yscale("symlog", linthresh=least)
            axes.set_ylim(-least / 5, 2 * max(heights))
        else:
            axes.set_yscale("log", base=2 if low > 0 and high < 1000 * low or measured.steps else 10)
    if measured.ticks:
        axes.set_xticks(range(len(measured.ticks)), measured.ticks)
    label_axes(axes, *measured.axes)
    says = result.claim.says
    axes.set_title(textwrap.fill(says[0].upper() + says[1:], 88), fontsize=10, loc="left")
    if len(measured.curves) > 5:  # no corner of the panel holds as many lines
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
    elif len(measured.curves) > 1:
        axes.legend(frameon=False)
    return saved(figure, path)
