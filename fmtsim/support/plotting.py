# SPDX-License-Identifier: Apache-2.0
"""What pictures share: colours, a style, empty panels, labelled axes, a PNG; matplotlib is imported to draw one.

For pictures of your own beside them: ``matplotlib.pyplot.style.use(fmtsim.support.plotting.STYLE)``.
"""

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.support.errors import ArgumentError, FmtsimError, shown
from fmtsim.support.files import write_file
from fmtsim.support.records import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with any colour vision; lines also differ in dash.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = COLOURS

# What matplotlib.pyplot.style.use takes, for pictures that pyplot draws: the look of the library's own.
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.dpi": 90,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def new_panels(
    width: float, height: float, ax: Any = None, rows: int = 1, columns: int = 1, **layout: Any
) -> tuple[Any, list[Any]]:
    """Return a figure and its empty panels, row by row: those of ``ax``, or of a figure unknown to any window system.

    Notebooks show a figure that ends a cell. One that pyplot made for ``ax`` is shown by pyplot as well: end that cell
    with a semicolon. ``layout`` is as ``Figure.subplots`` takes it. ArgumentError refuses another number of axes,
    FmtsimError says that matplotlib is missing.
    """
    try:
        from matplotlib.axes import Axes
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FmtsimError("plots need matplotlib, which is not installed; pip install 'fmtsim[viz]'") from None
    if ax is not None:
        panels = [ax] if isinstance(ax, Axes) else list(getattr(ax, "flat", ax if isinstance(ax, Sequence) else ()))
        if len(panels) != rows * columns or not all(isinstance(panel, Axes) for panel in panels):
            asked = f"plt.subplots({rows}, {columns})" if rows * columns > 1 else "plt.subplots()"
            raise ArgumentError(f"ax={shown(ax)} is not what this picture has; pass the axes of {asked}")
        return panels[0].figure, panels
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    # IPython asks any object for this method; its own way to show figures begins with the first of pyplot's.
    figure._repr_png_ = partial(png, figure)  # type: ignore[attr-defined]
    return figure, list(figure.subplots(rows, columns, squeeze=False, **layout).flat)


def label_axes(panel: "Axes", x_label: str, y_label: str) -> None:
    """Name the axes of a panel, draw a faint grid behind what it shows, and leave out the frame's top and right."""
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.grid(True, alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def set_title(panel: "Axes", title: str) -> None:
    """Write a heading above a picture, or above its panel in a figure of others; a dollar sign begins no formula."""
    if hasattr(panel.figure, "_repr_png_"):
        panel.figure.suptitle(checked("title", title, str), fontsize=12, parse_math=False)
    elif checked("title", title, str):
        panel.set_title(title, loc="left", fontsize=10, parse_math=False)


def saved(figure: "Figure", path: str | Path | None) -> "Figure":
    """Return a figure, saved as PNG where a path is given; equal figures give equal files."""
    if path is not None:
        write_file(path, png(figure))
    return figure


def png(figure: "Figure") -> bytes:
    """Return a figure as PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": "fmtsim"})
    return file.getvalue()
