# SPDX-License-Identifier: Apache-2.0
"""fmtsim.ptq: bits of static and dynamic products, every kind of layer, reports, saving, and what goes wrong."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.scaling import History, Scaling
from fmtsim.ptq import Calibration, PtqRecipe, QuantisedCache, Smooth
from fmtsim.recipes.ptq_catalogue import operand
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.support.errors import ArgumentError
from tests.ptq.ptq_oracle import cast
from tests.support.bits import assert_same_bits, same_bits
from tests.support.operands import normal
from tests.support.ptq_models import ANYWHERE, DATA, mlp
from tests.support.refusals import refused


@pytest.mark.parametrize(("recipe", "kind"), [("e4m3_static", "e4m3"), ("int8_static", "int8"), ("nemotron", "e4m3")])
def test_static_products_have_the_oracle_s_operands(recipe, kind):
    torch.manual_seed(7)
    model = nn.Linear(16, 8, bias=False).requires_grad_(False)
    w = model.weight.numpy().copy()
    fmtsim.ptq(model, recipe, DATA)
    axis = None if recipe == "nemotron" else 1
    q = cast(w, kind, np.abs(w).max(axis, keepdims=True))
    assert_same_bits(model.weight, torch.from_numpy(q))
    x = normal(5, 16, seed=3) * 2  # beyond the calibrated range: saturates
    amax = max(float(batch.abs().max()) for batch in DATA)
    quantised = torch.from_numpy(cast(x.numpy(), kind, np.float32(amax)))
    assert quantised.abs().max() < x.abs().max()
    y, off = model(x), quantised @ model.weight.mT
    assert (y - off).norm() < 1e-6 * off.norm()
    wrong = torch.from_numpy(cast(x.numpy(), kind, np.float32(amax * 1.01)))  # a planted error
    assert (y - wrong @ model.weight.mT).norm() > 1e-3 * off.norm()


def test_dynamic_products_follow_the_tensor_at_hand():
    model = nn.Linear(16, 8, bias=False).requires_grad_(False)
    fmtsim.ptq(model, "int8_token", DATA)
    x = normal(5, 16, seed=3) * torch.tensor([1.0, 100, 1e-3, 7, 1])[:, None]
    quantised = torch.from_numpy(cast(x.numpy(), "int8", x.abs().amax(1, keepdim=True).numpy()))
    y = quantised @ model.weight.mT
    assert ((model(x) - y).norm(dim=1) <= 1e-6 * y.norm(dim=1)).all()


def test_a_static_scale_stays():
    model = mlp().requires_grad_(True)
    fmtsim.ptq(model, "int8_static", DATA)
    first = model(DATA[0]).detach()
    model(DATA[0] * 1000).sum().backward()
    assert_same_bits(model(DATA[0]).detach(), first)
    assert fmtsim.state(model)["scales"]["layers"]["0"]["x_f"]["factor"] == 127 / torch.cat(DATA).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes_keep_them(dtype):
    model, data = mlp().to(dtype), [x.to(dtype) for x in DATA]
    exact = model(data[0])
    for recipe in ("int8_static", "int4_gptq", "mxfp4_dynamic"):
        quantised = fmtsim.ptq(copy.deepcopy(model), recipe, data)
        y = quantised(data[0])
        assert y.dtype == quantised[0].weight.dtype == dtype
        assert 0 < (y - exact).norm() < (0.4 if "4" in recipe else 0.03) * exact.norm()


def test_a_fixed_scale_is_one_until_calibration_sets_it():
    x = normal(4, 16) * 1000
    model = nn.Linear(16, 8, bias=False).requires_grad_(False)
    y = x.clamp(-448, 448).to(torch.float8_e4m3fn).float() @ model.weight.mT
    fmtsim.convert(model, get_recipe("e4m3_static").inference)
    assert torch.allclose(model(x), y, rtol=1e-5, atol=1e-3)
    with pytest.raises(
        fmtsim.errors.FormatError, match=r"fixed=True with immediate=1 is not allowed; choose immediate"
    ):
        History(fixed=True, immediate=1)


def test_state_is_restored_into_a_fresh_model():
    model, fresh = mlp(), mlp()
    fmtsim.ptq(model, "e4m3_static", DATA)
    fmtsim.convert(fresh, get_recipe("e4m3_static").inference)
    fresh.load_state_dict(model.state_dict())
    with pytest.raises(ArgumentError, match=r"is converted already; call fmtsim.revert\(model\) first, or load state"):
        fmtsim.load_state(fresh, fmtsim.state(model))
    fmtsim.load_state(fresh, fmtsim.state(model)["scales"])
    x = normal(4, 16, seed=9)
    assert_same_bits(fresh(x), model(x))
    assert_same_bits(pickle.loads(pickle.dumps(model))(x), model(x))
    assert_same_bits(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("recipe", [ANYWHERE, "int4_gptq", "e4m3_token", "nemotron"])
def test_a_saved_model_comes_back_bit_for_bit(recipe, tmp_path):
    model, fresh = mlp(), nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    model[2].bias = fresh[2].bias = None
    chosen = dataclasses.replace(get_recipe(recipe), bias_correction=True)
    fmtsim.ptq(model, chosen, DATA, filter_fn=lambda module, name: recipe != "nemotron" or name == "2")
    torch.save(fmtsim.state(model), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt")
    x = normal(4, 16, seed=9)
    assert_same_bits(fmtsim.load_state(fresh, state)(x), model(x))
    assert list(fresh.state_dict()) == list(model.state_dict()) and str(fmtsim.state(fresh)) == str(state)
    small = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 7))
    refused(r"(?s)the state does not fit Sequential: .*size mismatch", fmtsim.load_state, small, state)
    assert type(small[2]) is nn.Linear and not small[2]._forward_pre_hooks


def test_states_that_are_none():
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    state = fmtsim.state(fmtsim.ptq(mlp(), "int8_static", DATA))
    refused(r"parameter '0.weight' is on the meta device; call model.to_empty", fmtsim.load_state, empty, state)
    assert_same_bits(fmtsim.load_state(empty.to_empty(device="cpu"), state)[2].weight, state["tensors"]["2.weight"])
    model = fmtsim.ptq(mlp(), "int8_static", DATA)
    refused(r"load_state takes what fmtsim.state returned, not list", fmtsim.load_state, mlp(), [])
    with pytest.raises(ArgumentError, match=r"the model has no layer '0'; build the one that was quantised"):
        fmtsim.load_state(nn.Linear(16, 24), fmtsim.state(model))
    refused(r"state found no converted module in Sequential; convert", fmtsim.state, mlp())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(2).mT
        return self.head(self.attention(x, x, x)[0].mean(1))


@pytest.mark.parametrize("recipe", ["int8_static", "e4m3_token", "nvfp4_gptq", "int4_gptq", "int8_mse"])
def test_convolutions_groups_and_attention(recipe):
    torch.manual_seed(1)
    model = Mixed().eval().requires_grad_(False)
    data = [normal(3, 4, 5, 5, seed=s) for s in (4, 5)]
    exact = model(data[0])
    fmtsim.ptq(model, recipe, data)
    report = fmtsim.report(model)
    names = {row.name for row in report.rows}
    assert names == {"conv", "conv group 1", "attention.in_proj", "attention.out_proj", "head"}
    off = float((model(data[0]) - exact).norm() / exact.norm())
    assert 0 < off < (0.25 if "4_" in recipe else 0.05)
    assert all(row.output_db > 10 for row in report.rows)


@pytest.mark.parametrize("recipe", ["int4_gptq", "int8_static"])
def test_weights_laid_out_otherwise_are_rounded_in_place(recipe):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4))
    model, data = model.requires_grad_(False), [normal(2, 4, 8, 8)]
    turned = copy.deepcopy(model).to(memory_format=torch.channels_last)
    turned[4].weight.data = turned[4].weight.data.t().contiguous().t()
    strides = [p.stride() for p in turned.parameters()]
    assert not turned[0].weight.is_contiguous() and not turned[4].weight.is_contiguous()
    parameter = turned[0].weight
    fmtsim.ptq(model, recipe, data)
    fmtsim.ptq(turned, recipe, data)
    assert [p.stride() for p in turned.parameters()] == strides and turned[0].weight is parameter
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), turned.state_dict().values(), strict=True)
    )
    found, other = (fmtsim.search(fmtsim.revert(m), data, bits=6) for m in (model, turned))
    assert found.formats == other.formats and found.costs == other.costs


def test_attention_called_otherwise_takes_the_widest_scale():
    x, z, v = normal(6, 2, 8, seed=1), 3 * normal(4, 2, 8, seed=2), 2 * normal(4, 2, 8, seed=3)
    tops = {"x": float(x.abs().max()), "z": float(z.abs().max()), "v": float(v.abs().max())}
    assert tops["x"] < tops["v"] < tops["z"]
    for batch, expected in (((x, x, x), "xxxxx"), ((x, z, z), "xzzzz"), ((x, z, v), "xzvzz"), ((z, x, x), "zxxzz")):
        model = fmtsim.ptq(nn.MultiheadAttention(8, 2).requires_grad_(False), "int8_static", [batch])
        (scales,) = fmtsim.state(model)["scales"]["layers"].values()
        found = [scales[f"{name}_proj_x_f"] for name in ("q", "k", "v", "kv", "in")]
        assert [one["amaxes"] for one in found] == [tops[which] for which in expected]
        assert len({(float(one["amaxes"]), float(one["factor"])) for one in found}) == len(set(expected))


def test_weights_that_two_layers_share_are_rounded_once():
    model = mlp()
    model[2] = nn.Linear(24, 16).requires_grad_(False)
    model.append(nn.ReLU())
    model.append(nn.Linear(16, 24).requires_grad_(False))
    model[4].weight = model[0].weight
    fmtsim.ptq(model, "int4_gptq", [normal(20, 16)])
    assert model[4].weight is model[0].weight
    assert [row.name for row in fmtsim.report(model).rows] == ["0", "2"]
    refused(
        r"SmoothQuant and AWQ: 0 and 4 share a weight", fmtsim.ptq, fmtsim.revert(model), ANYWHERE, [normal(20, 16)]
    )


def test_bias_correction_removes_the_mean_error():
    recipe = PtqRecipe(name="b", x=operand("int4", Scaling()), w=operand("int4", Scaling()), calibration=Calibration(),
                       bias_correction=True)  # fmt: skip
    for bias in (True, False):
        exact = nn.Linear(16, 8, bias=bias).requires_grad_(False)
        model, x = copy.deepcopy(exact), torch.cat(DATA) + 1
        fmtsim.ptq(model, recipe, [x])
        assert (model(x) - exact(x)).mean(0).abs().max() < 1e-6
    plain = PtqRecipe(name="b", x=recipe.x, w=recipe.w, calibration=Calibration())
    fmtsim.ptq(exact, plain, [x])
    assert (model(x) - exact(x)).mean(0).abs().max() > 1e-3


def test_batch_norm_is_measured_anew():
    torch.manual_seed(1)
    model, data = Mixed().eval().requires_grad_(False), [normal(3, 4, 5, 5, seed=s) for s in (4, 5)]
    fmtsim.ptq(model, PtqRecipe(name="n", w=operand("int4", Scaling()), batch_norm=True), data)
    with torch.no_grad():
        y = [model.conv(x) for x in data]
    assert torch.allclose(model.norm.running_mean, torch.stack([t.mean((0, 2, 3)) for t in y]).mean(0), atol=1e-6)
    assert model.norm.momentum == 0.1 and not model.norm.training


def test_smooth_keeps_the_function_and_helps_an_outlier():
    model, x = mlp(), torch.cat(DATA)
    x[:, 3] *= 60
    exact, plain = model(x), copy.deepcopy(model)
    fmtsim.ptq(model, ANYWHERE, [x])
    fmtsim.ptq(plain, "int8_static", [x])
    off, off_plain = (float((m(x) - exact).norm() / exact.norm()) for m in (model, plain))
    assert off < off_plain / 2
    assert torch.equal(model[0].weight, fmtsim.revert(model)[0].weight)
    assert float((model(x) - exact).norm() / exact.norm()) < 0.02  # hook and weights belong together
    high = mlp()
    fmtsim.ptq(high, PtqRecipe(name="h", w=operand("fp32"), smooth=Smooth(alpha=0.7, after="any")), [x])
    assert torch.allclose(high(x), exact, rtol=1e-4, atol=1e-5)


def test_only_layers_behind_a_normalisation_are_smoothed():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4)
    )
    fmtsim.ptq(model.requires_grad_(False), "int8_smooth", DATA)
    rows = fmtsim.report(model).rows
    assert [row.name for row in rows if "SmoothQuant" in row.methods] == ["3"]
    assert [name for name, m in model.named_modules() if hasattr(m, "ptq_divisor")] == ["3"]


def test_a_cache_is_the_same_token_by_token():
    k, v = normal(2, 3, 7, 32, seed=1), normal(2, 3, 7, 16, seed=2) * 3
    for fmt, kind in (("int8_channel", "int8"), ("mxfp4", None), ("e4m3", "e4m3")):
        scales = {"key_scale": 0.01, "value_scale": 0.02} if fmt == "e4m3" else {}
        whole, steps = QuantisedCache(fmt, **scales), QuantisedCache(fmt, **scales)
        whole.append(k, v)
        for i in range(7):
            steps.append(k[..., i : i + 1, :], v[..., i : i + 1, :])
        assert len(steps) == 7 and same_bits(whole.keys(), steps.keys()) and same_bits(whole.values(), steps.values())
        assert (whole.keys() - k).abs().max() < 0.1 * k.abs().max() * (4 if fmt == "mxfp4" else 1)
        if kind == "e4m3":
            top = np.float32(448)
            q = cast(k.numpy() / np.float32(0.01), "e4m3", top) * np.float32(0.01)
            assert_same_bits(whole.keys(), torch.from_numpy(q))
            assert whole.nbytes == k.numel() + v.numel()
    refused(r"nvfp4_16x16 shares scales among tokens", QuantisedCache, "nvfp4_16x16")
    with pytest.raises(ArgumentError, match=r"the cache is empty"):
        QuantisedCache("e4m3").keys()
    refused(r"are not of the same tokens", whole.append, k, v[..., :3, :])
    refused(r"keys .* do not continue", whole.append, k[:1], v[:1])
