# SPDX-License-Identifier: Apache-2.0
"""What an Observation shows: the worst operands, a picture, a DataFrame."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.lab.analysis.losses import Losses, losses_of, plot_losses, worst
from fmtsim.lab.analysis.stats import OperandStats
from fmtsim.support.errors import ArgumentError, FmtsimError

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def stats():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with torch.no_grad():
        net[2].weight.mul_(1e-3)
    config = fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="none")
    with fmtsim.observe(net, recipe=config) as stats:
        for factor in (1.0, 1e3):
            net(factor * torch.randn(8, 16)).sum().backward()
    return stats


def test_the_worst_come_first_by_each_measure(stats):
    found = stats.worst(2)
    assert [(x.layer, x.operand) for x in found] == [("2", "w_f"), ("2", "w_d")]
    assert found[0].stats is stats["2"]["w_f"] and isinstance(found, Losses)
    shares = [x.stats.saturation_percent for x in stats.worst(30, by="saturation")]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0 and len(shares) == 3 * 6 + 4
    ratios = [x.stats.sqnr_db for x in stats.worst(30, by="sqnr")]
    assert ratios == sorted(ratios)
    assert str(found).splitlines()[2].split()[:3] == ["2", "w_f", "e4m3"] and found._repr_html_().count("<tr>") == 3


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"by": "amax"}, "worst by='amax' is not a measure; choose one of underflow, saturation, sqnr"),
        ({"by": None}, "worst by=None is not a measure"),
        ({"n": 0}, "n=0 is not a number of operands; pass 1 or more"),
        ({"n": 2.0}, "n=2.0 is not a number of operands"),
    ],
)
def test_errors_of_worst(stats, ask, message):
    with pytest.raises(ArgumentError, match=message):
        stats.worst(**ask)


def test_the_heatmap_has_the_worst_operand_of_each_layer_in_each_step(stats, tmp_path):
    left, right, *_ = stats.plot(tmp_path / "a.png", title="costs $5").axes
    assert (tmp_path / "a.png").read_bytes()[:4] == PNG
    (image,) = left.images
    drawn = torch.as_tensor(image.get_array().filled(math.nan))
    expected = [
        [max(s.underflow_percent for s in step[layer].values()) for step in stats.history.values()] for layer in "0123"
    ]
    assert torch.equal(drawn, torch.tensor(expected))
    names = [text.get_text() for text in left.get_yticklabels()]
    assert names[2] == "2  w_f" and len(names) == 4 and left.get_shared_y_axes().joined(left, right)
    window = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in right.patches if bar.get_height() == 1.0]
    assert window[2] == (-9.5, 8.5)  # e4m3: 2**-9 to 448


def test_a_gradient_that_is_zero_already_is_grey_and_not_spared():
    """What lies behind a layer whose gradient became zero has nothing to lose: that is not losing nothing."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with fmtsim.observe(fmtsim.convert(net, format="e4m3", scaling="none")) as stats:
        for factor in (1.0, 1e-6):
            (factor * net(torch.ones(2, 4)).sum()).backward()
    grid = stats.plot(operand="g_w").axes[0].images[0].get_array()
    assert grid.mask.tolist() == [[False, True], [False, False]] and grid[1].tolist() == [0.0, 100.0]
    assert "grey: zeros or not run" in [axes.get_xlabel() for axes in stats.plot(operand="g_w").axes][-1]
    dead = stats.history[2]["0"]["g_w"]
    assert math.isnan(dead.underflow_percent) and dead.to_dict()["underflow_percent"] is None
    zeros = losses_of({"0": {"g_w": OperandStats().add(torch.zeros(4), torch.zeros(4), None)}, "1": stats["1"]})
    assert str(zeros).splitlines()[2].split() == ["0", "g_w", "high", "precision", "-", "0.000", "-", "0"]
    assert worst(zeros, 9, "underflow")[-1].layer == "0"


def test_bars_of_one_step_and_one_operand(stats):
    one = {1: stats.history[1]}
    left = plot_losses(stats.layers, one, None, by="sqnr", operand="g_w", title="").axes[0]
    assert [bar.get_width() for bar in left.patches] == [stats[str(i)]["g_w"].sqnr_db for i in range(3)] + [0.0]
    assert [text.get_text() for text in left.texts] == [" lossless"]  # of ones
    left = plot_losses(
        {f"layers.{i}": stats["0"] for i in range(300)}, one, None, by="underflow", operand=None, title=""
    )
    assert len(left.axes[0].get_yticklabels()) == 100 and left.get_figheight() < 25


def test_errors_of_plots(stats):
    with pytest.raises(
        ArgumentError, match="plot operand='q' was not observed; choose one of x_f, w_f, g_d, w_d, g_w, x_w"
    ):
        stats.plot(operand="q")
    with pytest.raises(ArgumentError, match="plot by='loss' is not a measure"):
        stats.plot(by="loss")
    with pytest.raises(ArgumentError, match="plot has nothing to draw; observe at least one step"):
        fmtsim.observe(nn.Linear(4, 4), format="e4m3").plot()
    assert losses_of({}) == ()


def test_a_dataframe_has_a_row_for_each_step_layer_and_operand(stats, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns)))
    rows, columns = stats.to_pandas()
    assert columns[:6] == ["step", "layer", "operand", "format", "elements", "underflow_percent"] and len(rows) == 44
    row = dict(zip(columns, rows[-1], strict=True))
    assert (row["step"], row["layer"], row["format"]) == (2, "3", "e4m3")
    assert row["amax"] == stats.history[2]["3"][row["operand"]].amax
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FmtsimError, match="to_pandas needs pandas, which is not installed; pip install pandas"):
        stats.to_pandas()
