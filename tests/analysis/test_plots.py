"""Plots: files that are pictures, axes that are labelled, and no window system."""

import math
import subprocess
import sys

import pytest

from fmtsim.analysis.plots import plot_exponents, plot_loss, smoothed
from fmtsim.analysis.stats import LOWEST_EXPONENT, OperandStats
from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.plotting import COLOURS
from fmtsim.quantize import quantize
from tests.support.operands import normal

CURVES = {"fp32": [3.0, 2.5, 2.2, 2.0], "e2m1": [3.0, 2.9, 2.8]}


def stats(name="e2m1"):
    x = normal(1000) * 0.3
    return OperandStats().add(x, quantize(x, name), get_format(name))


def test_loss_picture_has_labels_and_a_gap(tmp_path):
    figure = plot_loss(CURVES, tmp_path / "loss.png", title="$\\frac$")  # a heading is no formula
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    top, bottom = figure.axes
    assert top.get_ylabel() == "training loss (nats per byte)" and bottom.get_xlabel() == "step"
    assert [t.get_text() for t in top.get_legend().get_texts()] == ["fp32 (last 2.000)", "e2m1 (last 2.800)"]
    assert bottom.lines[0].get_ydata().tolist() == pytest.approx([0.0, 0.4, 0.6])
    drawn = [
        [(line.get_color(), line.get_linewidth(), line.get_alpha()) for line in panel.lines] for panel in (top, bottom)
    ]
    bold = [(color, 2.0, None) for color in COLOURS[:2]]
    assert drawn[0] == [(COLOURS[0], 0.8, 0.22), bold[0], (COLOURS[1], 0.8, 0.22), bold[1]]
    assert drawn[1] == [bold[1], (COLOURS[0], 1.0, None)] and bottom.lines[1].get_ydata() == [0.0, 0.0]
    assert (
        [line.get_xdata().tolist() for line in top.lines[2:]]
        == [[1, 2, 3]] * 2
        == [bottom.lines[0].get_xdata().tolist()] * 2
    )
    assert [line.get_linestyle() for line in top.lines] == ["-", "-", "-", "--"]
    assert [name for name, spine in top.spines.items() if spine.get_visible()] == ["left", "bottom"]
    assert bottom.get_ylim()[0] == -0.1 and bottom.get_ylim()[1] > 0.6
    assert figure.get_size_inches().tolist() == [8.0, 6.4] and top.get_xlabel() == ""


def test_a_long_curve_says_that_it_is_smoothed():
    """Its last value is not the last loss, and the faint line behind it is."""
    top = plot_loss({"fp32": [2.0] * 60, "e2m1": [3.0] * 60}).axes[0]
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    assert labels == ["fp32 (smoothed, last 2.000)", "e2m1 (smoothed, last 3.000)", "single steps"]


def test_one_curve_needs_no_gap_and_nan_ends_a_curve():
    assert len(plot_loss({"only": [1.0]}).axes) == 1
    figure = plot_loss({"a": [1.0, 2.0, 3.0], "b": [1.0, math.nan, 5.0]})
    assert figure.axes[0].get_legend().get_texts()[1].get_text() == "b (last 1.000, then not finite)"
    a, b = (line for line in figure.axes[0].lines if line.get_label()[:2] in ("a ", "b "))
    assert (a.get_marker(), b.get_marker()) == ("None", "o")  # a single point would not show as a line
    assert plot_loss({"only": [1.0]}).axes[0].lines[1].get_marker() == "o"


def test_smoothing_keeps_constants_and_ends_at_nan():
    assert smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    assert smoothed([1.0, 3.0, 8.0, 1.0], reach=1) == pytest.approx([1.0, 4.0, 4.0, 4.5])
    line = list(range(400))
    assert smoothed(line)[:390] == pytest.approx(line[:390])  # a straight line does not lag
    assert [math.isnan(v) for v in smoothed([1.0, math.inf, 1.0])] == [False, True, True]


def test_exponent_picture_shades_the_format(tmp_path):
    s = stats()
    figure = plot_exponents({"w_f": s, "none": OperandStats()}, tmp_path / "e.png", title="t")
    assert (tmp_path / "e.png").stat().st_size > 5000
    panel = figure.axes[0]
    assert panel.get_xlabel() == "exponent of x / scale"
    assert f"{s.underflow_percent:.2f} % underflow" in panel.get_title()
    shade = panel.patches[-1]
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
    with pytest.raises(ArgumentError, match=r"0 curves"):
        plot_loss({})
    with pytest.raises(ArgumentError, match=r"lengths \[0\]; pass at least one step"):
        plot_loss({"a": []})
    with pytest.raises(ArgumentError, match=r"observe at least one step"):
        plot_exponents({})


def test_importing_plots_does_not_import_matplotlib():
    code = "import sys, fmtsim.analysis.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Exception, match=r"pip install 'fmtsim\[viz\]'"):
        plot_loss(CURVES)
