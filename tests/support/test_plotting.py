# SPDX-License-Identifier: Apache-2.0
"""Pictures of every kind in a notebook, which is run, and in axes of others."""

import nbclient
import nbformat
import pytest
import torch
from matplotlib.figure import Figure

import fmtsim
from fmtsim.support.errors import ArgumentError


def test_a_notebook_shows_each_figure_once_whether_or_not_pyplot_is_there():
    cells = [
        "import fmtsim, torch\nfound = fmtsim.compare(torch.ones(3), torch.tensor([1.0, 2.0, 4.0]))",
        "found.plot()",
        "import matplotlib.pyplot as plt\nfound.plot()",
        "%matplotlib inline\nfound.plot()",
        "figure, ax = plt.subplots()\nfound.plot(ax=ax);",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=300).execute()
    pictures = [[out for out in cell.outputs if "image/png" in out.get("data", {})] for cell in book.cells]
    assert [len(shown) for shown in pictures] == [0, 1, 1, 1, 1]


def test_pictures_are_drawn_into_axes_of_others():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, panels = pyplot.subplots(2, 2)
    found = fmtsim.compare(torch.ones(3), torch.tensor([1.0, 2.0, 4.0]))
    linear = fmtsim.ptq(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8_token")
    for plot, axes in (
        (found.plot, panels[0, 0]), (fmtsim.get_format("e2m1").plot, panels[:, 0]),
        (fmtsim.observe(torch.randn(64, 64), "e4m3").plot, panels[1, 1]), (fmtsim.report(linear).plot, [panels[0, 1]]),
    ):  # fmt: skip
        assert plot(ax=axes) is figure
    assert panels[0, 0].get_title("left") == "e2m1" and panels[1, 1].get_title("left").startswith("e4m3: SQNR")
    assert isinstance(found.plot(title="no $ formula"), Figure) and all(panel.has_data() for panel in panels.flat)
    pyplot.close(figure)


@pytest.mark.parametrize("ax", ["a", 3, []])
def test_other_axes_are_refused(ax):
    with pytest.raises(ArgumentError, match=r"is not what this picture has; pass the axes of plt.subplots\(2, 1\)"):
        fmtsim.get_format("e2m1").plot(ax=ax)
