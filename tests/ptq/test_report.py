# SPDX-License-Identifier: Apache-2.0
"""Reports of ptq, and a small trained GPT, quantised."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.formats.scaling import Scaling
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.nn import quantised_attention
from fmtsim.ptq import Calibration, PtqRecipe, QuantisedCache, quantize_model
from fmtsim.ptq.ptq_report import ratio
from fmtsim.recipes import Rule
from fmtsim.recipes.ptq_catalogue import operand, quantised_cache
from fmtsim.support.errors import ArgumentError
from tests.support.operands import normal
from tests.support.ptq_models import DATA, mlp
from tests.support.refusals import refused
from tests.support.steps import Steps


def test_the_report_measures_what_happens():
    model = nn.Linear(16, 8).requires_grad_(False)
    exact = copy.deepcopy(model)
    recipe = PtqRecipe(
        name="p", x=operand("int8", Scaling()), w=operand("int8", Scaling()),
        calibration=Calibration(rule="percentile", percentile=90),
    )  # fmt: skip
    fmtsim.ptq(model, recipe, DATA)
    row = fmtsim.report(model)["(model)"]
    x = torch.cat(DATA)
    place = -(-90 * x.numel() // 100)
    top = x.abs().flatten().sort().values[place - 1]
    assert row.x_limit == pytest.approx(float(top), rel=1e-6) and row.x_scale == pytest.approx(float(top) / 127)
    assert row.clipped_percent == pytest.approx(100 * float((x.abs() > top).double().mean()))
    y = (exact(x) - exact.bias).double()
    noise = (exact(x) - model(x)).double().square().sum()
    assert row.output_db == pytest.approx(10 * float(torch.log10(y.square().sum() / noise)), abs=0.01)
    assert "1 weights by p" in str(fmtsim.report(model))
    with pytest.raises(ArgumentError, match=r"no layer 'fc'; it has \(model\)"):
        fmtsim.report(model)["fc"]
    assert fmtsim.report(model, DATA[0]).summary.startswith("p: 100 %") and not fmtsim.report(exact).converted
    assert not fmtsim.report(fmtsim.revert(model)).converted


def test_the_report_says_what_stayed_and_what_came_along():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(20, 16), nn.Embedding(9, 16)
            self.up, self.back = nn.Linear(16, 16), nn.Conv1d(16, 16, 1, groups=16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, i):
            x = self.words(i) + self.places(torch.arange(len(i)))
            return self.head(self.back(self.up(x).mT).mT)

    model = Tied().requires_grad_(False)
    fmtsim.ptq(model, PtqRecipe(name="w", w=operand("int8", Scaling()), rules=(Rule(name="up"),)), [torch.arange(9)])
    report = fmtsim.report(model)
    assert [row.name for row in report.rows] == ["head"] and report.tied == (("words", "head"),)
    assert dict(report.left_alone) == {
        "places": "its rows are looked up, not multiplied",
        "up": "the recipe leaves it in high precision: name ~ up",
        "back": "depthwise: a sum for each channel, which libraries run as no matrix product",
    }
    text = str(report)
    assert "left in high precision: places (its rows are looked up, not multiplied)" in text
    assert "words shares the weight of head, which is quantised" in text
    assert "<td style='text-align:left'>head</td>" in report._repr_html_()
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 4))
    left = dict(fmtsim.report(fmtsim.ptq(normed, "int8_static", DATA)).left_alone)
    reason = "its weight is computed in every call; call torch.nn.utils.parametrize.remove_parametrizations first"
    assert left == {"0": reason}
    attention = fmtsim.ptq(nn.MultiheadAttention(8, 2), "int8_token", [(normal(3, 2, 8),) * 3])
    assert fmtsim.report(attention).left_alone == ()


def test_the_report_draws_layers(tmp_path):
    pytest.importorskip("matplotlib")
    reports = [fmtsim.report(fmtsim.ptq(mlp(), name, DATA)) for name in ("int8_static", "e4m3_static")]
    figure = reports[0].plot(tmp_path / "layers.png", other=reports[1])
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0", "2"]
    lengths = [[bar.get_width() for bar in group] for group in panel.containers]
    assert lengths == [[row.output_db for row in report.rows] for report in reports]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    silent = mlp()
    silent[2].weight.data.zero_()
    silent[2].bias.data.zero_()
    silent = fmtsim.report(fmtsim.ptq(silent, "int8_static", DATA))
    assert "no signal" in [text.get_text() for text in silent.plot().axes[0].texts]
    without_data = fmtsim.report(fmtsim.ptq(mlp(), "int4_channel"))
    panel = without_data.plot(other=reports[0]).axes[0]
    assert panel.get_xlabel().startswith("signal to noise of the weights")
    lengths = [[bar.get_width() for bar in group] for group in panel.containers]
    assert lengths == [[row.weight_db for row in report.rows] for report in (without_data, reports[0])]
    other = fmtsim.report(fmtsim.ptq(nn.Linear(16, 8), "int8_static", DATA))
    refused(r"reports of the same layers; quantise copies of one model", reports[0].plot, other=other)


def tokens(seed):
    """Return text of a little grammar: every byte is the one before plus its row's step."""
    source = torch.Generator().manual_seed(seed)
    first, step = (torch.randint(0, 32, (8, 1), generator=source) for _ in range(2))
    return (first + (step % 5) * torch.arange(17)) % 32


def batch(seed):
    t = tokens(seed)
    return t[:, :-1], t[:, 1:]


@pytest.fixture(scope="module")
def gpt():
    model = GPT(GPTConfig(context=16, width=32, layers=2, heads=2, vocabulary=32), seed=0)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(60):
        adam.zero_grad()
        model(*batch(i)).backward()
        adam.step()
    return model.requires_grad_(False)


def logits(model, seed):
    kept = []
    hook = model.norm.register_forward_hook(lambda module, args, output: kept.append(output))
    model(*batch(seed))
    hook.remove()
    return F.linear(kept[0], model.embedding.weight)


def divergence(exact, found):
    return float(
        F.kl_div(F.log_softmax(found, -1), F.log_softmax(exact, -1), reduction="none", log_target=True).sum(-1).mean()
    )


def test_logits_of_fp8_stay_close(gpt):
    exact, data, found = logits(gpt, 999), [batch(i) for i in (100, 101)], {}
    for name in ("nemotron", "nemotron_kv8", "int8_token", "minifloat_e3m2", "minifloat_e2m1"):
        found[name] = divergence(exact, logits(fmtsim.ptq(copy.deepcopy(gpt), name, data), 999))
    assert 0 < found["int8_token"] < found["nemotron"] < found["minifloat_e3m2"] < found["minifloat_e2m1"]
    assert found["nemotron"] < 0.02 and found["nemotron_kv8"] < 0.03 and found["nemotron_kv8"] != found["nemotron"]


def test_a_cache_is_what_attention_sees():
    q, k, v = (normal(2, 3, 9, 16, seed=i) for i in range(3))
    cache = QuantisedCache("e4m3_channel")
    cache.append(k, v)
    y = quantised_attention(q, k, v, is_causal=True, config=quantised_cache("e4m3"))
    kept = F.scaled_dot_product_attention(q, cache.keys(), cache.values(), is_causal=True)
    assert torch.allclose(y, kept, atol=1e-5)
    assert not torch.allclose(y, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-3)
    swapped = F.scaled_dot_product_attention(q, cache.keys(), cache.keys(), is_causal=True)  # a planted error
    assert not torch.allclose(y, swapped, atol=1e-3)


def test_ratios_of_powers():
    assert [ratio(*pair) for pair in ((100.0, 1.0), (1.0, 1.0), (1.0, 10.0), (5.0, 0.0))] == [
        20.0,
        0.0,
        -10.0,
        math.inf,
    ]
    assert math.isnan(ratio(0.0, 0.0)) and math.isnan(ratio(0.0, 1.0))


def test_progress_counts_the_batches(monkeypatch):
    steps = Steps()
    monkeypatch.setattr(quantize_model, "make_progress", lambda *_, **__: steps)
    fmtsim.ptq(mlp(), "int8_static", DATA)
    assert steps.told["calibration", len(DATA)] == list(range(1, len(DATA) + 1))
