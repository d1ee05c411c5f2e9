# SPDX-License-Identifier: Apache-2.0
"""What pictures share: colours, a style, an empty figure, labelled axes, a PNG; matplotlib is imported to draw one.

For pictures of your own beside them: ``matplotlib.pyplot.style.use(fmtsim.support.plotting.STYLE)``.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from fmtsim.support.errors import FmtsimError
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


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure that no window system knows of; raise FmtsimError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FmtsimError("plots need matplotlib, which is not installed; pip install 'fmtsim[viz]'") from None
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_axes(panel: "Axes", x_label: str, y_label: str) -> None:
    """Name the axes of a panel, draw a faint grid behind what it shows, and leave out the frame's top and right."""
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.grid(True, alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def set_title(figure: "Figure", title: str) -> None:
    """Write a heading as it is: a dollar sign begins no formula."""
    figure.suptitle(checked("title", title, str), fontsize=12, parse_math=False)


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
