"""What a report says and draws."""

import copy

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.errors import ArgumentError
from fmtsim.ptq import Calibration, PtqRecipe
from fmtsim.ptq.catalogue import operand
from fmtsim.recipes import Rule
from fmtsim.spec.scaling import Scaling
from tests.support.operands import normal
from tests.support.ptq_models import DATA, mlp


def test_the_report_measures_what_happens():
    model = nn.Linear(16, 8).requires_grad_(False)
    exact = copy.deepcopy(model)
    recipe = PtqRecipe(
        name="p", x=operand("int8", Scaling()), w=operand("int8", Scaling()),
        calibration=Calibration(rule="percentile", percentile=90),
    )  # fmt: skip
    fmtsim.ptq(model, recipe, DATA)
    row = fmtsim.ptq_report(model)["(model)"]
    x = torch.cat(DATA)
    place = -(-90 * x.numel() // 100)
    top = x.abs().flatten().sort().values[place - 1]
    assert row.x_limit == pytest.approx(float(top), rel=1e-6) and row.x_scale == pytest.approx(float(top) / 127)
    assert row.clipped_percent == pytest.approx(100 * float((x.abs() > top).double().mean()))
    y = (exact(x) - exact.bias).double()
    noise = (exact(x) - model(x)).double().square().sum()
    assert row.output_db == pytest.approx(10 * float(torch.log10(y.square().sum() / noise)), abs=0.01)
    assert "1 weights by p" in str(fmtsim.ptq_report(model))
    with pytest.raises(ArgumentError, match=r"no layer 'fc'; it has \(model\)"):
        fmtsim.ptq_report(model)["fc"]
    with pytest.raises(ArgumentError, match=r"Linear has no report of ptq"):
        fmtsim.ptq_report(exact)


def test_the_report_says_what_stayed_and_what_came_along():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(20, 16), nn.Embedding(9, 16)
            self.up, self.back = nn.Linear(16, 16), nn.ConvTranspose1d(16, 16, 1)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, i):
            x = self.words(i) + self.places(torch.arange(len(i)))
            return self.head(self.back(self.up(x).mT).mT)

    model = Tied().requires_grad_(False)
    fmtsim.ptq(model, PtqRecipe(name="w", w=operand("int8", Scaling()), rules=(Rule(name="up"),)), [torch.arange(9)])
    report = fmtsim.ptq_report(model)
    assert [row.name for row in report.rows] == ["head"] and report.tied == (("words", "head"),)
    assert dict(report.left) == {
        "places": "no emulated form of Embedding",
        "up": "the recipe leaves it in high precision",
        "back": "no emulated form of ConvTranspose1d",
    }
    text = str(report)
    assert "left in high precision: places (no emulated form of Embedding)" in text
    assert "words shares the weight of head, which is quantised" in text
    assert "<td style='text-align:left'>head</td>" in report._repr_html_()
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 4))
    left = dict(fmtsim.ptq_report(fmtsim.ptq(normed, "int8_static", DATA)).left)
    assert left == {"0": "parametrized; convert first, or remove the parametrization"}
    attention = fmtsim.ptq(nn.MultiheadAttention(8, 2), "int8_token", [(normal(3, 2, 8),) * 3])
    assert fmtsim.ptq_report(attention).left == ()


def test_the_report_draws_layers(tmp_path):
    pytest.importorskip("matplotlib")
    reports = [fmtsim.ptq_report(fmtsim.ptq(mlp(), name, DATA)) for name in ("int8_static", "e4m3_static")]
    figure = reports[0].plot(tmp_path / "layers.png", other=reports[1])
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0", "2"]
    lengths = [[bar.get_width() for bar in group] for group in panel.containers]
    assert lengths == [[row.output_db for row in report.rows] for report in reports]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    silent = fmtsim.ptq_report(fmtsim.ptq(mlp(), "int8_static", [torch.zeros(4, 16)]))
    assert "no signal" in [text.get_text() for text in silent.plot().axes[0].texts]
    other = fmtsim.ptq_report(fmtsim.ptq(nn.Linear(16, 8), "int8_static", DATA))
    with pytest.raises(ArgumentError, match=r"reports of the same layers; quantise copies of one model"):
        reports[0].plot(other=other)
