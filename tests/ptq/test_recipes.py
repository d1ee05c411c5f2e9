# SPDX-License-Identifier: Apache-2.0
"""Records: JSON round trips, names, what they print, what they refuse; ranges and changes that keep a function."""

import copy
import dataclasses
import importlib
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.ptq import (
    Calibration,
    Equalise,
    Gptq,
    LearnedRounding,
    PtqRecipe,
    Smooth,
)
from fmtsim.ptq.calibrate import least_error, percentile, static_scale
from fmtsim.ptq.reshape import equalise, smoothing
from fmtsim.recipes import Rule
from fmtsim.recipes.ptq_catalogue import RECIPES, minifloat, operand
from fmtsim.recipes.recipe import Steps
from fmtsim.recipes.recipe_registry import get_recipe, list_recipes, register_recipe
from fmtsim.recipes.serialization import load_recipe, recipe_from_dict, recipe_to_dict, save_recipe
from fmtsim.scaling.scaled_cast import scales
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError
from tests.ptq.ptq_oracle import cast
from tests.support.operands import normal
from tests.support.ptq_models import DATA, mlp
from tests.support.recipe_oracle import inc_pow2
from tests.support.refusals import refused


def test_everything_a_record_holds_survives_a_file(tmp_path):
    recipe = PtqRecipe(
        name="all", x=operand("e4m3", Scaling()), w=operand(minifloat(3, 2), Scaling(block=(1, 16))),
        calibration=Calibration(rule="percentile", percentile=99.0), smooth=Smooth(alpha=0.3),
        equalise=Equalise(pairs=(("a", "b"),)), weights=LearnedRounding(steps=7), bias_correction=True, batch_norm=True,
        rules=(Rule(head=True), Rule(name="x", use=fmtsim.linear_config(x="e5m2", w="e5m2", g=None))),
    )  # fmt: skip
    assert "rule: name ~ x: x: e5m2; w: e5m2\n" in str(recipe) + "\n" and "rule: head: high precision" in str(recipe)
    save_recipe(recipe, tmp_path / "all.json")
    assert load_recipe(tmp_path / "all.json") == get_recipe(str(tmp_path / "all.json")) == recipe
    wrong = recipe_to_dict(recipe) | {"smoth": 1}
    refused(r"recipe: a PtqRecipe has no field 'smoth'", recipe_from_dict, wrong)
    assert recipe_from_dict(recipe_to_dict(recipe) | {"name": "other"}) != recipe


def test_names():
    assert len(list_recipes(kind="ptq")) == len(RECIPES) == len({r.name for r in RECIPES})
    assert get_recipe("w8a8").name == "int8_static"
    refused(r"'int8_statc' is unknown; did you mean 'int8_static'", get_recipe, "int8_statc", kind="ptq")
    with pytest.raises(ArgumentError, match=r"'te_current' is for training: call fmtsim.convert\(model, recipe='te_cu"):
        fmtsim.ptq(mlp(), "te_current", DATA)
    with pytest.raises(ArgumentError, match=r"or pass a recipe for ptq; did you mean 'mxfp4_gptq' or 'mxfp4_ggml' or"):
        fmtsim.ptq(mlp(), "mxfp4", DATA)
    refused(r"kind='PTQ' is unknown; choose 'training' or 'ptq'", list_recipes, kind="PTQ")
    refused(r"a recipe named 'w8a8' exists already", register_recipe, PtqRecipe(name="w8a8"))


def test_the_catalogue_covers_its_formats():
    names = set(list_recipes(kind="ptq"))
    assert {f"minifloat_e{e}m{b - 1 - e}" for b in range(3, 9) for e in range(1, b)} <= names
    assert minifloat(4, 3).max == 480 and minifloat(3, 4).max == 31 and minifloat(1, 2).max == 3.5
    assert {f.x.format.max for f in RECIPES if f.name in ("e4m3_static", "e3m4_static")} == {448, 30}


BAD = [
    (lambda: Calibration(rule="max"), r"Calibration rule='max' is not allowed; choose 'absmax', 'percentile', 'mse'"),
    (lambda: Calibration(percentile=0), r"percentile=0 is not one; choose above 0"),
    (lambda: Calibration(steps=1), r"steps=1 is not allowed; choose a whole number from 2"),
    (lambda: Smooth(alpha=2), r"alpha=2 is not allowed; choose a number from 0 to 1"),
    (lambda: Gptq(damping=-1), r"damping=-1 is not allowed"),
    (lambda: LearnedRounding(steps=0), r"steps=0 is not allowed"),
    (lambda: Equalise(pairs=("fc1", "fc2")), r"are not pairs; write \(\('fc1', 'fc2'\),\)"),
    (lambda: PtqRecipe(name=""), r"is not a name"),
    (lambda: PtqRecipe(name="r", x="e4m3"), r"x='e4m3' is not a Quantizer"),
    (lambda: PtqRecipe(name="r", x=operand("e4m3", Scaling(block=(1, None))), calibration=Calibration()),
     r"calibration= with x = e4m3, \[amax of each row\], which has no scale of a tensor"),
    (lambda: PtqRecipe(name="r", w=Quantizer(format=get_format("e4m3"), transforms=(Hadamard(),))),
     r"weights are stored as they are rounded; leave then= out, and transforms= but Sparsity\(\)"),
    (lambda: PtqRecipe(name="r", w=Quantizer(format="int8_channel", transforms=(Sparsity(),)), weights=Gptq()),
     r"weights=GPTQ damping 0.01 would fill what 2:4 sparse made zero; choose weights=None, or leave the"),
    (lambda: PtqRecipe(name="r", rules=(Rule(name="fc", steps=Steps(first=3)),)),
     r"a Rule with steps= is one of training; leave steps= out"),
    (lambda: PtqRecipe(name="r", extended=Quantizer()),
     r"extended=high precision: choose a format, rounded to nearest"),
    (lambda: PtqRecipe(name="r", extended=Quantizer(format=get_format("e4m3"), rounding="stochastic")),
     r"extended=e4m3 stochastic: choose a format, rounded to nearest"),
    (lambda: Gptq(groups="fresh"), r"Gptq groups='fresh' is not allowed; choose 'static', 'dynamic', 'lazy'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD)
def test_records_refuse(make, message):
    refused(message, make)


def test_percentiles_are_numpy_s():
    x = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    for percent in (0.01, 50, 90, 99.9, 99.99, 100):
        assert percentile(x, percent) == np.percentile(x.numpy(), percent, method="inverted_cdf")
    assert percentile(torch.tensor([0.0, 0, 0, 2]), 50) == 2


def test_the_clip_of_least_error_is_that_of_a_search_by_hand():
    x = normal(4000).abs()
    x[0] = 30.0
    amax = float(x.max())
    tops = [amax * i / 40 for i in range(1, 41)]
    errors = [float(((cast(x.numpy(), "int8", np.float32(t)) - x.numpy()).astype(np.float64) ** 2).sum()) for t in tops]
    found = least_error(x, amax, operand("int8", Scaling()), 40)
    assert found == tops[int(np.argmin(errors))] and 2 < found < amax


def test_static_scales_follow_the_rule_of_the_recipe():
    gaudi = get_recipe("gaudi2_hw")
    for top, scale in ((1.0, 2.0**-4), (60.0, 1.0), (61.0, 16.0), (0.01, 2.0**-8), (1e6, 16.0)):
        assert float(static_scale(gaudi.x, top).scales().scale) == scale
    assert float(static_scale(get_recipe("gaudi_pow2").x, 1.0).scales().scale) == 2.0**-5
    assert float(static_scale(get_recipe("e4m3_static").x, 0.0).scales().scale) == 1.0


GAUDI = {  # by scale method: backoff of x, whether x is dynamic, fullscale, and the set of the hardware or None
    "gaudi2_hw": (0.25, False, 240, (4, -8, 4)),
    "gaudi2_hw_channel": (0.25, False, 240, (4, -8, 4)),
    "gaudi2_hw_opt": (0.25, False, 240, (4, -8, 4)),
    "gaudi3_hw": (0.25, False, 448, (1, -55, 7)),
    "gaudi3_240": (0.25, False, 240, (1, -55, 7)),
    "gaudi_pow2": (0.25, False, 240, None),
    "gaudi_dynamic": (0.5, True, 240, None),
    "gaudi_dynamic_token": (0.5, True, 240, None),
}


def toolkit_s(x, rows, fullscale, backoff, hardware):
    """Return the scales of Intel's toolkit, whose hp_dtype is bfloat16: that of a tensor, or those of its rows."""
    amax = x.abs().amax(1) if rows else x.abs().max().to(torch.bfloat16)
    return inc_pow2(amax, fullscale, backoff, hardware).flatten().tolist()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GAUDI)
def test_scales_of_gaudi_are_the_toolkit_s(name, dtype, every):
    backoff, dynamic, fullscale, hardware = GAUDI[name]
    recipe = get_recipe(name)
    assert recipe.x.format.max == fullscale and (recipe.calibration is None) == dynamic
    source = torch.Generator().manual_seed(1)
    for power in range(-70, 20, every):
        x = torch.randn(4, 8, generator=source) * 2.0**power
        x[:, 0] = 60.0 * (1 + power % 7 / 100) * 2.0**power  # next to powers of two, where logarithms carry
        x = x.to(dtype)
        found = quantize_operand(x, recipe.x, Keys()).scale.flatten().tolist()
        assert found == toolkit_s(x, name.endswith("token"), fullscale, backoff, hardware)
        if not dynamic:
            assert [float(static_scale(recipe.x, float(x.abs().max())).scales().scale)] == found
        if not name.endswith("opt"):
            rule = (4, -8, 4) if dynamic else None if name.endswith("channel") else hardware
            w = quantize_operand(x, recipe.w, Keys()).scale.flatten().tolist()
            assert w == toolkit_s(x, name.endswith("channel"), fullscale, 0.5, rule)


def test_gaudis_logarithms_carry_in_bfloat16_as_often_as_the_toolkit_s():
    """Of 10,239 bfloat16 amaxes 687 get half the scale that an exact logarithm gives."""
    amaxes = (torch.arange(10239) + (87 << 7)).to(torch.int16).view(torch.bfloat16)
    scaling = get_recipe("gaudi_pow2").x.scaling
    found = torch.stack([scales(a.float().reshape(1, 1), scaling, 240.0).scale for a in amaxes[::13]]).flatten()
    assert torch.equal(found, inc_pow2(amaxes[::13], 240.0, 0.25))
    exact = torch.exp2(torch.ceil(torch.log2(amaxes.double() / 60)))
    assert int((inc_pow2(amaxes, 240.0, 0.25) != exact).sum()) > 600


@pytest.mark.parametrize("name", ["gaudi_opt", "gaudi2_hw_opt", "gaudi_opt_channel"])
def test_best_scales_of_gaudi_are_those_of_a_search_by_hand(name):
    choices = {"gaudi_opt": range(-10, 10), "gaudi2_hw_opt": (4, 0, -4, -8), "gaudi_opt_channel": range(-3, 5)}[name]
    recipe = get_recipe(name)
    for seed in range(12):
        w = normal(3, 40, seed=seed) * 2.0 ** (3 * seed - 20)
        rows = list(w) if name.endswith("channel") else [w]
        expected = []
        for row in rows:
            base = float(inc_pow2(row.abs().max(), 240, 0.5)) if name.endswith("channel") else 1.0
            least, kept = math.inf, None
            for power in choices:
                scale = np.float32(base * 2.0**power)
                q = np.clip(row.numpy() / scale, -240, 240).astype(ml_dtypes.float8_e4m3).astype(np.float32) * scale
                error = float(((q.astype(np.float64) - row.numpy()) ** 2).sum())
                if error < least or (error == least and not name.endswith("channel")):  # its two loops differ
                    least, kept = error, float(scale)
            expected.append(kept)
        assert quantize_operand(w, recipe.w, Keys()).scale.flatten().tolist() == expected


def test_the_fixed_scales_of_gaudi_are_the_first_of_their_sets():
    for name, scale, top in (("gaudi2_fixed", 16, 240), ("gaudi3_fixed", 128, 448), ("gaudi_unit", 1, 240)):
        recipe = get_recipe(name)
        for quantizer in (recipe.x, recipe.w):
            made = quantize_operand(torch.full((2, 3), 1e6), quantizer, Keys())
            assert float(made.scale) == scale and float(made.elements.float().max()) == top


def test_smoothing_is_the_paper_s_formula():
    x, w = torch.tensor([4.0, 100, 0, 9]), torch.tensor([1.0, 4, 2, 0])
    assert torch.allclose(smoothing(x, w, 0.5), torch.tensor([2.0, 5, 1, 1], dtype=torch.float64))
    assert torch.allclose(smoothing(x, w, 1.0)[:2], x[:2].double())
    assert Smooth() == Smooth(alpha=0.5, after="norm")  # its alpha of most models


def test_equalised_weights_keep_the_function_and_match_ranges():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.LeakyReLU(), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight[2] *= 50
    x = torch.randn(7, 6)
    exact = model(x).detach()
    assert equalise(model, Equalise(rounds=60)) == ["0 > 2", "2 > 4"]
    assert torch.allclose(model(x), exact, rtol=1e-4, atol=1e-5)
    for a, b in ((0, 2), (2, 4)):
        assert torch.allclose(model[a].weight.abs().amax(1), model[b].weight.abs().amax(0), rtol=1e-2)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 6, 6)
    exact = conv(x).detach()
    equalise(conv, Equalise())
    assert torch.allclose(conv(x), exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"Sequential has no layers to equalise"):
        equalise(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)), Equalise())
    refused(r"'0' are not the inputs of '4'", equalise, model, Equalise(pairs=(("0", "4"),)))
    refused(r"'x' is not a linear layer or convolution", equalise, model, Equalise(pairs=(("x", "4"),)))


def test_equalisation_helps_weights_of_a_tensor_s_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).requires_grad_(False)
    model[0].weight[3] *= 100
    model[2].weight[:, 3] /= 100
    x, base = torch.randn(50, 16), PtqRecipe(name="b", w=operand("int8", Scaling()))
    exact, errors = model(x), []
    for method in (None, Equalise()):
        copied = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).requires_grad_(False)
        copied.load_state_dict(model.state_dict())
        fmtsim.ptq(copied, dataclasses.replace(base, equalise=method), [x])
        errors.append(float((copied(x) - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] / 10


@pytest.mark.parametrize("name", ["int8_token_24", "e4m3_token_24"])
@pytest.mark.parametrize("target", [None, "h200"])
def test_sparse_weights_have_two_of_four_and_the_scales_of_dense_ones(name, target):
    exact, x = nn.Linear(64, 32), torch.randn(16, 64)
    dense, sparse = (fmtsim.ptq(copy.deepcopy(exact), each, [x], target=target) for each in (name[:-3], name))
    fours = exact.weight.abs().reshape(-1, 4)
    kept = fours >= fours.sort(1).values[:, 2:3]
    assert torch.equal(sparse.weight, torch.where(kept.reshape(32, 64), dense.weight, 0.0))
    assert torch.isfinite(sparse(x)).all()


class Tokens(nn.Module):
    """An embedding, a norm, a layer, a softmax, and a head that shares the weight of another embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.other, self.norm = nn.Embedding(11, 32), nn.Embedding(7, 32), nn.LayerNorm(32)
        self.layer, self.softmax, self.head = nn.Linear(32, 32), nn.Softmax(-1), nn.Linear(32, 7, bias=False)
        self.head.weight = self.other.weight

    def forward(self, x):
        return self.head(self.softmax(self.layer(self.norm(self.embedding(x)))))


def test_extended_operators_round_their_inputs_and_embeddings():
    torch.manual_seed(0)
    exact, x = Tokens(), torch.randint(11, (4, 5))
    model = fmtsim.ptq(copy.deepcopy(exact), "e4m3_extended", [x])
    report, e4m3 = fmtsim.report(model), get_recipe("e4m3_extended").extended
    assert report.extended == ("embedding", "norm", "softmax")
    assert "rounded, too: embedding, norm, softmax" in str(report) and "left in high precision" not in str(report)

    def rounded(t):
        return quantize_operand(t.reshape(-1, t.shape[-1]), e4m3, Keys()).values(torch.float32).reshape(t.shape)

    assert torch.equal(model.embedding.weight, rounded(exact.embedding.weight))
    seen = {}
    for name in ("norm", "softmax"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, args, y, name=name: seen.update({name: (args[0], y)}))
    y = model(x)
    assert torch.equal(seen["norm"][0], rounded(model.embedding(x)))
    assert torch.equal(seen["norm"][1], exact.norm(seen["norm"][0]))
    assert torch.equal(seen["softmax"][0], rounded(model.layer(seen["norm"][1])))
    fresh = fmtsim.load_state(Tokens(), fmtsim.state(model))
    assert torch.equal(fresh(x), y)
    for reverted in (fmtsim.revert(copy.deepcopy(fresh)), fmtsim.revert(fresh)):
        assert not any("_fmtsim" in vars(m) or m._forward_pre_hooks for m in reverted.modules())
    again = fmtsim.ptq(fresh, "e4m3_extended", [x])
    assert len(again.norm._forward_pre_hooks) == 1


def test_a_failure_leaves_extended_operators_as_they_were(monkeypatch):
    exact, x = Tokens(), torch.randint(11, (4, 5))
    model = copy.deepcopy(exact)
    monkeypatch.setattr(importlib.import_module("fmtsim.ptq.quantize_model"), "_finish", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fmtsim.ptq(model, "e4m3_extended", [x])
    assert torch.equal(model(x), exact(x)) and not model.norm._forward_pre_hooks
