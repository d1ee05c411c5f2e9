# SPDX-License-Identifier: Apache-2.0
"""Plots: one style, and no window system or matplotlib before one is drawn."""

import subprocess
import sys

import matplotlib.style
import pytest

from fmtsim.support.errors import FmtsimError
from fmtsim.support.plotting import COLOURS, STYLE, new_figure


def test_the_style_is_one_that_matplotlib_takes():
    with matplotlib.style.context(STYLE):
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(COLOURS)


def test_importing_plots_does_not_import_matplotlib():
    code = "import sys, fmtsim.lab.analysis.compare, fmtsim.lab.analysis.losses; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FmtsimError, match=r"pip install 'fmtsim\[viz\]'"):
        new_figure(1, 1)
