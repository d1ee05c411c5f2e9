# SPDX-License-Identifier: Apache-2.0
"""Which operands lose most, their sharpness and loss scale, and how pictures of them are drawn."""

import itertools
import math
import sys
from types import SimpleNamespace

import matplotlib.style
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.lab.analysis.losses import Losses, list_losses, max_loss_scale, plot_losses, worst
from fmtsim.lab.analysis.stats import OperandStats
from fmtsim.lab.training.sweep import sharpness
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError
from fmtsim.support.plotting import COLOURS, STYLE, new_panels
from tests.support.operands import normal
from tests.support.refusals import refused

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
    refused(message, stats.worst, **ask)


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
    with fmtsim.observe(fmtsim.convert(net, recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3"))) as stats:
        for factor in (1.0, 1e-6):
            (factor * net(torch.ones(2, 4)).sum()).backward()
    grid = stats.plot(operand="g_w").axes[0].images[0].get_array()
    assert grid.mask.tolist() == [[False, True], [False, False]] and grid[1].tolist() == [0.0, 100.0]
    assert "grey: zeros or not run" in [axes.get_xlabel() for axes in stats.plot(operand="g_w").axes][-1]
    dead = stats.history[2]["0"]["g_w"]
    assert math.isnan(dead.underflow_percent) and dead.to_dict()["underflow_percent"] is None
    zeros = list_losses({"0": {"g_w": OperandStats().add(torch.zeros(4), torch.zeros(4), None)}, "1": stats["1"]})
    assert str(zeros).splitlines()[2].split() == ["0", "g_w", "high", "precision", "-", "0.000", "-", "0"]
    assert worst(zeros, 9, "underflow")[-1].layer == "0"


def test_bars_of_one_step_and_one_operand(stats):
    one = {1: stats.history[1]}
    left = plot_losses(stats.layers, one, None, by="sqnr", operand="g_w", title="").axes[0]
    assert [bar.get_width() for bar in left.patches] == [stats[str(i)]["g_w"].sqnr_db for i in range(3)] + [0.0]
    assert [text.get_text() for text in left.texts] == [" lossless"]  # of ones
    assert left.get_xlim()[0] == 0 < max(bar.get_width() for bar in left.patches) < left.get_xlim()[1]
    left = plot_losses(
        {f"layers.{i}": stats["0"] for i in range(300)}, one, None, by="underflow", operand=None, title=""
    )
    assert len(left.axes[0].get_yticklabels()) == 100 and left.get_figheight() < 25


def test_errors_of_plots(stats):
    refused("plot operand='q' was not observed; choose one of x_f, w_f, g_d, w_d, g_w, x_w", stats.plot, operand="q")
    refused("plot by='loss' is not a measure", stats.plot, by="loss")
    refused("plot has nothing to draw; observe at least one step", fmtsim.observe(nn.Linear(4, 4), format="e4m3").plot)
    assert list_losses({}) == ()


def test_a_dataframe_has_a_row_for_each_step_layer_and_operand(stats, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns)))
    rows, columns = stats.to_pandas()
    assert columns[:6] == ["step", "layer", "operand", "format", "elements", "underflow_percent"] and len(rows) == 44
    row = dict(zip(columns, rows[-1], strict=True))
    assert (row["step"], row["layer"], row["format"]) == (2, "3", "e4m3")
    assert row["amax"] == stats.history[2]["3"][row["operand"]].amax
    monkeypatch.setitem(sys.modules, "pandas", None)
    refused("to_pandas needs pandas, which is not installed; pip install pandas", stats.to_pandas, error=FmtsimError)


def observed(loss_scale, **what):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    x, y = torch.randn(4, 16, 64), torch.randn(4, 16, 8)
    with fmtsim.observe(net, **what) as stats:
        for i in range(4):
            (loss_scale * nn.functional.mse_loss(net(x[i]), y[i])).backward()
    return stats


UNSCALED = {"recipe": fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="none")}


def test_the_scale_saturates_nothing_and_twice_as_much_does():
    found = observed(2.0**-6, **UNSCALED).loss_scale()
    assert math.frexp(found.scale)[0] == 0.5 and 1.0 <= found.headroom < 2.0 and found.format == "e5m2"
    assert found.scale * found.amax * found.headroom == pytest.approx(57344.0)
    at, above = (observed(2.0**-6 * factor * found.scale, **UNSCALED) for factor in (1.0, 2.0))
    beyond = [
        max(s.amax for ops in stats.layers.values() for o, s in ops.items() if o[0] == "g") for stats in (at, above)
    ]
    assert beyond[0] <= 57344.0 < beyond[1]
    assert found.underflow_percent == pytest.approx(8.97, abs=0.01)
    assert at.loss_scale().scale == 1.0 and above.loss_scale().scale == 0.5
    assert str(found).splitlines()[0] == f"loss scale        2^{int(math.log2(found.scale))} = {found.scale:g}"
    assert found.to_dict()["scale"] == found.scale


def test_what_underflows_at_the_scale_by_hand():
    x = torch.tensor([57344.0 * 2.0**-10, 1.5 * 2.0**-27, 1.5 * 2.0**-28, 2.0**-40, 0.0])
    stats = OperandStats().add(x, fmtsim.quantize(x, "e5m2"), fmtsim.get_format("e5m2"))
    found = max_loss_scale({"a": {"g_w": stats}, "b": {"x_f": stats}})
    assert (found.scale, found.headroom, found.layer, found.operand) == (1024.0, 1.0, "a", "g_w")
    assert (found.underflow_percent, found.underflow_percent_scaled) == (75.0, 50.0)  # 1.5 * 2**-17 becomes 2**-16


@pytest.mark.parametrize("recipe", ["te_mxfp8", "te_current", "te_delayed", "deepseek_v3"])
def test_gradients_with_scales_of_their_own_need_none(recipe):
    found = observed(1.0, recipe=recipe).loss_scale()
    assert found.scale is None and str(found) == "gradients have scales of their own: they need no loss scale"
    assert found.to_dict()["headroom"] is None


def test_gradients_that_are_not_finite_are_told():
    stats = OperandStats()
    stats.add(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), fmtsim.get_format("e5m2"))
    found = max_loss_scale({"a": {"g_w": stats}})
    assert str(found).splitlines()[-1].startswith("1 gradients were NaN or infinite: observe with a smaller loss scale")


def test_without_gradients_there_is_an_error():
    net = nn.Linear(4, 4)
    with fmtsim.observe(net, format="e4m3") as stats:
        net(torch.ones(2, 4))
    refused("loss_scale: no gradient observed; call backward inside the with", stats.loss_scale)
    with fmtsim.observe(net, format="e4m3") as stats:
        (0.0 * net(torch.ones(2, 4)).sum()).backward()
    refused("only gradients that are zero or in high precision observed", stats.loss_scale)


def rise(z, target, moves):
    after = F.cross_entropy(z + moves, target.expand(len(moves)), reduction="none")
    before = F.cross_entropy(z, target)
    return (after - before) / (1 + before) * 100


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("eps", [5e-4, 0.1, 2.0])
def test_closed_form_is_the_best_corner(seed, eps):
    source = torch.Generator().manual_seed(seed)
    z = torch.randn(9, generator=source, dtype=torch.float64) * 4
    target = torch.randint(9, (), generator=source)
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=9)), dtype=torch.float64)
    moves = corners * eps * (z.abs() + 1)
    assert sharpness(z, target) == sharpness(z, target, 5e-4)
    assert float(sharpness(z, target, eps)) == pytest.approx(float(rise(z, target, moves).max()), rel=1e-12)


def test_no_ascent_climbs_higher():
    """Projected gradient ascent inside the box ends at the closed form, from the middle of the box."""
    source = torch.Generator().manual_seed(1)
    z, target = torch.randn(6, generator=source, dtype=torch.float64), torch.tensor(2)
    room = 0.3 * (z.abs() + 1)
    move = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(500):
        (slope,) = torch.autograd.grad(rise(z, target, move).sum(), move)
        move = (move.detach() + 0.1 * slope).clamp(-room, room).requires_grad_()
    assert float(rise(z, target, move.detach())) == pytest.approx(float(sharpness(z, target, 0.3)), rel=1e-12)


def test_shapes_and_wider_boxes():
    z = normal(3, 4, 7)
    targets = torch.zeros(3, 4, dtype=torch.int64)
    small, large = sharpness(z, targets), sharpness(z, targets, 1e-2)
    assert small.shape == (3, 4) and small.dtype == torch.float64
    assert bool((large > small).all()) and bool((small > 0).all())
    assert float(small[1, 2]) == float(sharpness(z[1, 2], targets[1, 2]))
    assert sharpness(torch.tensor([float("nan"), 0.0]), torch.tensor(0)).isnan()


def test_errors():
    with pytest.raises(DtypeError, match=r"logits have dtype torch.int64; pass float32 or float64"):
        sharpness(torch.tensor([1, 2]), torch.tensor(0))
    with pytest.raises(ArgumentError, match=r"targets of shape \(2,\) do not fit logits of shape \(3, 4\); pass one"):
        sharpness(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"eps=0 is not a width of a box; pass a number above 0, such as 5e-4"):
        sharpness(torch.zeros(4), torch.tensor(0), 0)


def test_the_style_is_one_that_matplotlib_takes():
    with matplotlib.style.context(STYLE):
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(COLOURS)


def test_missing_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(r"pip install 'fmtsim\[viz\]'", new_panels, 1, 1, error=FmtsimError)
