# SPDX-License-Identifier: Apache-2.0
"""Plots: files that are pictures, axes that are labelled, and no window system."""

import subprocess
import sys

import matplotlib.style
import pytest
from matplotlib.colors import to_rgb

from fmtsim.analysis.measure import LOWEST_EXPONENT
from fmtsim.analysis.plots import plot_exponents
from fmtsim.analysis.stats import OperandStats
from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.plotting import COLOURS, STYLE
from fmtsim.quantize import quantize
from tests.support.operands import normal


def stats(name="e2m1"):
    x = normal(1000) * 0.3
    return OperandStats().add(x, quantize(x, name), get_format(name))


def test_the_style_is_one_that_matplotlib_takes():
    with matplotlib.style.context(STYLE):
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(COLOURS)


def test_exponent_picture_shades_the_format(tmp_path):
    s = stats()
    figure = plot_exponents(
        {"w_f": s, "none": OperandStats()}, tmp_path / "e.png", title="$\\frac$"
    )  # a heading is not a formula
    assert (tmp_path / "e.png").stat().st_size > 5000
    panel = figure.axes[0]
    assert panel.get_xlabel() == "exponent of x / scale"
    assert f"{s.underflow_percent:.2f} % underflow" in panel.get_title()
    shade = panel.patches[-1]
    assert [patch.get_facecolor()[:3] for patch in (panel.patches[0], shade)] == [to_rgb(COLOURS[i]) for i in (0, 4)]
    assert (shade.get_x(), shade.get_width()) == (-1.5, 4.0)  # exponents -1 to 2: 0.5 to 6
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in panel.patches[:-1]}
    counts = {i + LOWEST_EXPONENT: n / 10 for i, n in enumerate(s.scaled_exponents.tolist()) if n}
    assert sum(counts.values()) == 100 and {place: share for place, share in bars.items() if share} == counts
    assert list(bars) == list(range(min(counts), max(counts) + 1))
    assert panel.get_xlim() == (min(counts) - 2, 4) and figure.get_size_inches().tolist() == pytest.approx([8.2, 3.3])
    assert not figure.axes[1].patches[0].get_height()  # nothing was counted
    many = plot_exponents(dict.fromkeys("abcd", stats("fp16")))
    assert many.get_size_inches().tolist() == pytest.approx([12.1, 6.0])
    assert [panel.axison for panel in many.axes] == [True] * 4 + [False] * 2


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ArgumentError, match=r"observe at least one step"):
        plot_exponents({})


def test_importing_plots_does_not_import_matplotlib():
    code = "import sys, fmtsim.analysis.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Exception, match=r"pip install 'fmtsim\[viz\]'"):
        plot_exponents({"w_f": stats()})
