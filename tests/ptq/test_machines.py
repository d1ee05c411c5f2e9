# SPDX-License-Identifier: Apache-2.0
"""fmtsim.ptq and fmtsim.search on a machine: products by hand, what is measured, saved and refused there."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.gemm.products.native import is_native
from fmtsim.lab.search.switching import relative_noise
from fmtsim.ptq import Gptq, PtqRecipe
from fmtsim.recipes.attention_config import flash_attention_3
from fmtsim.recipes.ptq_catalogue import operand
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.serialization import load_recipe, save_recipe
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")

DATA = [normal(20, 64, seed=s) for s in (1, 2)]
X = normal(32, 64, seed=3) * 2
COARSE = fmtsim.Datapath(block=8, fraction_bits=4)


def linear(outputs=32, dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Linear(64, outputs, bias=False).requires_grad_(False).to(dtype)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)


def factors(top, w):
    """Return what static inputs and rows of a weight are multiplied with, and the scales: quotients of float32."""
    one = torch.ones(())
    found = [one * top / torch.cat(DATA).abs().max(), one * top / w.abs().amax(1, keepdim=True)]
    return *found, *(one / factor for factor in found)


def quantised(recipe, model=None, **machine):
    return fmtsim.ptq(linear() if model is None else model, recipe, DATA, **machine)


def test_static_fp8_is_scaled_mm_of_codes_and_scales():
    w, model = linear().weight.clone(), quantised("e4m3_static", target="h200")
    factor, tops, scale, rows = factors(448, w)
    codes = [t.clamp(-448, 448).to(torch.float8_e4m3fn) for t in (X * factor, w * tops)]
    scales = scale.expand(32, 1).contiguous(), rows.mT.contiguous()
    by_hand = fmtsim.scaled_mm(codes[0], codes[1].mT, *scales, out_dtype=torch.float32, target="h200")
    assert_same_bits(model(X), by_hand)
    assert (by_hand - quantised("e4m3_static")(X)).abs().max() > 0  # sums of 14 bits are others


def test_static_int8_is_int_mm_with_its_scales_after_it():
    w = linear().weight.clone()
    factor, tops, scale, rows = factors(127, w)
    codes = [t.round().clamp(-127, 127).to(torch.int8) for t in (X * factor, w * tops)]
    sums = fmtsim.int_mm(codes[0], codes[1].mT, target="h200").float()
    for machine in ({"target": "h200"}, {"target": "int8"}):
        assert_same_bits(quantised("int8_static", **machine)(X), sums * rows.mT * scale)


def test_nvfp4_is_multiplied_inside_the_unit():
    w = linear().weight.clone()
    a, b = (fmtsim.encode(t, "nvfp4") for t in (X, w))
    codes = [t.codes.view(torch.float4_e2m1fn_x2) for t in (a, b)]
    scales = [[t.scales.view(torch.float8_e4m3fn), t.tensor_scale] for t in (a, b)]
    kinds = {"scale_recipes": ["BlockWise1x16", "TensorWise"]}
    flat = {"swizzles": ["NO_SWIZZLE", "NO_SWIZZLE"]}
    for machine in ({"target": "blackwell.tcgen05.nvf4"}, {"target": "b200"}):
        found = fmtsim.scaled_mm(
            codes[0], codes[1].mT, *scales, out_dtype=torch.float32, **machine, **kinds, **flat
        )  # fmt: skip
        assert_same_bits(quantised("nvfp4_dynamic", **machine)(X), found)


def test_static_nvfp4_is_dynamic_nvfp4_of_a_tensor_with_the_calibrated_amax():
    unit, x, largest = "blackwell.tcgen05.nvf4", X[:5] / 4, torch.cat(DATA).abs().max()
    row = torch.zeros(1, 64).index_fill_(1, torch.tensor([3]), largest)
    static, dynamic = (quantised(f"nvfp4_{kind}", target=unit) for kind in ("static", "dynamic"))
    assert x.abs().max() < largest
    assert_same_bits(static(x), dynamic(torch.cat([x, row]))[:5])
    assert not torch.equal(static(x), dynamic(x))
    layer = fmtsim.report(static).rows[0]
    assert math.isclose(layer.x_limit, largest, rel_tol=1e-6) and layer.clipped_percent == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_alone_are_products_of_the_tensors_dtype(dtype):
    for recipe in ("int4_g32", "int4_gptq", "int4_gptq_dynamic", "nvfp4_weights"):
        model = fmtsim.ptq(linear(dtype=dtype), recipe, [x.to(dtype) for x in DATA], target="h200")
        x = X.to(dtype)
        assert_same_bits(model(x), fmtsim.linear(x, model.weight, target="h200"))


def test_weights_with_scales_of_rows_above_those_of_blocks_are_stored_as_values(tmp_path):
    w = fmtsim.Quantizer("nvfp4_row")
    recipe = PtqRecipe(name="rows", w=w, target="b200")
    model = fmtsim.ptq(nn.Sequential(linear()), recipe, DATA)
    assert_same_bits(model[0].weight, fmtsim.quantize(linear().weight, "nvfp4_row"))
    assert_same_bits(model(X), fmtsim.linear(X, model[0].weight, target="b200"))
    with pytest.raises(ArgumentError, match="weights are nvfp4_row, whose scales are not kept apart"):
        fmtsim.export(model, tmp_path / "w.safetensors", "torchao")
    with pytest.raises(ArgumentError, match="weights = nvfp4_row have no scales apart from their elements"):
        fmtsim.ptq(linear(), dataclasses.replace(recipe, weights=Gptq()), DATA)


@pytest.mark.skipif(not is_native("h200"), reason="needs an NVIDIA H200")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["e4m3_static", "nemotron", "e4m3_token", "int8_static", "int4_g32", "int4_channel"])
def test_an_h200_itself_gives_the_bits_of_its_emulation(recipe, dtype):
    data, x = [t.to(dtype) for t in DATA], X.to(dtype)
    found = [
        fmtsim.ptq(linear(dtype=dtype).to(device), recipe, [t.to(device) for t in data], target="h200", native=native)
        for device, native in (("cuda", True), ("cuda", False), ("cpu", False))
    ]
    native, emulated, host = (model(x.to(model.weight.device)).cpu() for model in found)
    if dtype == torch.bfloat16 or recipe[:4] != "int4":  # the order of float32 products is a guess
        assert_same_bits(native, emulated)
    assert_same_bits(emulated, host)
    assert_same_bits(found[0].weight.cpu(), found[2].weight)


STORED = [
    "e4m3_static", "nemotron", "int8_mse", "int4_learned", "mxfp4_gptq", "nvfp4_gptq", "gaudi3_hw", "mxfp6_dynamic",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", STORED)
def test_a_stored_weight_has_the_elements_and_scales_that_it_was_rounded_with(recipe, dtype):
    machine = {"target": "h200" if get_recipe(recipe).w.format.name[:2] in ("e4", "in") else "b200"}
    model = fmtsim.ptq(linear(dtype=dtype), recipe, [x.to(dtype) for x in DATA], **machine)
    plain = fmtsim.ptq(linear(dtype=dtype), recipe, [x.to(dtype) for x in DATA])
    assert_same_bits(model.weight, plain.weight)
    config, state = model.emulation.config.fprop.b, model.emulation.products[""].state
    assert config.source == "stored" and "stored" in str(config)
    found = quantize_operand(model.weight, config, state=state["w_f"])
    assert_same_bits(found.values(torch.float32).to(dtype), model.weight)
    original = quantize_operand(linear(dtype=dtype).weight, get_recipe(recipe).w)
    assert_same_bits(found.scale, original.scale)


def test_scales_made_anew_would_be_others():
    """Clipping takes a row its largest element: what is stored has to say its scales."""
    w, model = operand("int4", get_recipe("int8_mse").w.scaling), linear()
    model.weight.copy_(normal(32, 64, seed=4))
    quantised(PtqRecipe(name="c", x=get_recipe("int8_token").x, w=w), model, target="int8")
    fresh = quantize_operand(model.weight, w)
    kept = model.emulation.products[""].state["w_f"].scale
    assert not torch.equal(fresh.scale, kept)


@pytest.mark.parametrize("recipe", ["e4m3_static", "int8_token", "int4_g32"])
def test_the_report_measures_products_of_the_machine(recipe):
    machine = {"target": COARSE} if recipe == "e4m3_static" else {"target": "h200"}
    exact, model = linear(), fmtsim.ptq(linear(), recipe, DATA[:1], **machine)
    row, y = fmtsim.report(model).rows[0], exact(DATA[0])
    noise = float((y - model(DATA[0])).square().sum(dtype=torch.float64))
    assert row.output_db == 10 * math.log10(float(y.square().sum(dtype=torch.float64)) / noise)
    alone = fmtsim.report(fmtsim.ptq(linear(), recipe, DATA[:1])).rows[0].output_db
    assert row.output_db < alone - 3 if recipe == "e4m3_static" else abs(row.output_db - alone) < 0.1


def test_texts_name_the_machine():
    report = fmtsim.report(quantised("int8_static", target="h200"))
    assert report.machine == "on h200" and "1 weights by int8_static on h200 in " in str(report)
    assert "by int8_static in " in str(fmtsim.report(quantised("int8_static")))
    recipe = get_recipe("int8_static").on(target="int8")
    assert "\non int8\n" in f"{recipe}\n" and recipe.on() == get_recipe("int8_static")


def test_bias_correction_removes_the_machine_s_mean_error():
    recipe = dataclasses.replace(get_recipe("e4m3_static"), bias_correction=True)
    exact, x = linear(), torch.cat(DATA)
    model = fmtsim.ptq(linear(), recipe, [x], target=COARSE)
    off = (model(x) - exact(x)).mean(0).abs().max()
    assert off < 1e-6 < (fmtsim.ptq(linear(), "e4m3_static", [x], target=COARSE)(x) - exact(x)).mean(0).abs().max()


@pytest.mark.parametrize(
    ("recipe", "machine"),
    [("e4m3_static", {"target": "h200"}), ("int8_token", {"target": "int8"}), ("nvfp4_gptq", {"target": "b200"}),
     ("e4m3_token", {"target": COARSE, "plan": fmtsim.GemmPlan(split=2, k_tile=16)})],
)  # fmt: skip
def test_a_saved_model_comes_back_on_its_machine(recipe, machine, tmp_path):
    model, fresh = quantised(recipe, mlp(), **machine), mlp()
    torch.save(fmtsim.state(model), tmp_path / "model.pt")
    fmtsim.load_state(fresh, torch.load(tmp_path / "model.pt"))
    y = model(X)
    assert_same_bits(fresh(X), y)
    assert_same_bits(pickle.loads(pickle.dumps(model))(X), y)
    assert_same_bits(copy.deepcopy(model)(X), y)
    assert_same_bits(torch.compile(model, backend="aot_eager")(X), y)
    again = fmtsim.convert(mlp(), vars(model)["_fmtsim"].root.quantised.recipe.inference)
    again.load_state_dict(model.state_dict())
    refused(r"layer '0': the weight has no stored scales; fmtsim.ptq and", again, X)
    fmtsim.load_state(again, fmtsim.state(model)["scales"])
    assert_same_bits(again(X), y)
    assert_same_bits(copy.deepcopy(model).half().float()[0].fmtsim_state.w_f.scale, model[0].fmtsim_state.w_f.scale)


def test_recipes_with_machines_are_files_too(tmp_path):
    path, plan = tmp_path / "mine.json", fmtsim.GemmPlan(split=2, k_tile=64)
    for machine in ({"target": "h200", "native": False}, {"target": COARSE}, {"target": "hopper.wgmma", "plan": plan}):
        recipe = dataclasses.replace(get_recipe("e4m3_static").on(**machine), name="mine", aliases=())
        save_recipe(recipe, path)
        assert load_recipe(path) == recipe
    assert_same_bits(quantised(path)(X), quantised("e4m3_static", target="hopper.wgmma", plan=plan)(X))
    for field, value, said in [
        ("target", 3, "mine.json: recipe.*target=3 is neither a name, nor a path"),
        ("target", "wgmma", "mine.json: recipe.*unknown target 'wgmma'"),
        ("plan", "fast", "plan"), ("native", 2, "mine.json: recipe.*native=2 is not allowed"),
    ]:  # fmt: skip
        path.write_text(f'{{"name": "mine", "w": {{"format": "e4m3"}}, "{field}": {value!r}}}'.replace("'", '"'))
        refused(said, load_recipe, path, error=(ArgumentError, FormatError))


class Counted(nn.Linear):
    calls = 0

    def __call__(self, x):
        Counted.calls += 1
        return super().__call__(x)


BOTH = Gptq(groups="dynamic")


@pytest.mark.parametrize(
    ("recipe", "machine", "error", "said"),
    [
        ("mxfp8_dynamic", {"target": "h200"}, ArgumentError,
         "PtqRecipe 'mxfp8_dynamic': target h200 has no unit for e4m3 x e4m3 .*'mx'; .*targets that do: b200"),
        ("int4_token", {"target": "h200"}, FormatError, r"no unit multiplies int4 in blocks of \(1, 32\)"),
        ("mxint8_dynamic", {"target": "exact"}, FormatError, r"no unit multiplies mxint8; pass target=Datapath"),
        ("e4m3_static", {"target": "volta.mma"}, ArgumentError, "unit volta.mma does not take e4m3 x e4m3"),
        ("e5m2_dynamic", {"target": "h200"}, DtypeError,
         r"layer '': cuBLAS does not multiply e5m2 by e5m2; .*; leave it out with filter_fn= or a Rule\(name=...\)"),
        ("int4_g32", {"target": "hopper.wgmma"}, ArgumentError, "layer '': unit hopper.wgmma does not take fp32"),
        ("e4m3_static", {"target": "recipe"}, ArgumentError, "ptq recipe 'e4m3_static' names no machine; pass target="),
        ("e4m3_static", {"native": True}, ArgumentError, "ptq needs target=: a GPU"),
        ("e4m3_static", {"target": "h200", "native": True}, ArgumentError, "layer '': native=True is not possible"),
        (PtqRecipe(name="g", x=operand("mxfp4"), w=operand("mxfp4"), weights=BOTH), {"target": "b200"}, ArgumentError,
         "PtqRecipe 'g': weights=GPTQ .*: a machine is not handed scales or zero points that the method makes itself"),
    ],
)  # fmt: skip
def test_what_a_machine_does_not_multiply_is_refused_before_the_data_runs(recipe, machine, error, said):
    model, Counted.calls = Counted(64, 32).requires_grad_(False), 0
    before = model.weight.clone()
    refused(said, quantised, recipe, model, error=error, **machine)
    assert type(model) is Counted and not Counted.calls and torch.equal(model.weight, before)


def test_sizes_that_a_library_refuses_are_padded():
    small, whole = (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, n)).requires_grad_(False) for n in (10, 16))
    whole[0] = copy.deepcopy(small[0])
    whole[1].weight.zero_()
    whole[1].weight[:10], whole[1].bias[:10] = small[1].weight, small[1].bias
    for model in (small, whole):
        quantised("e4m3_static", model, target="h200")
    x = normal(7, 64, seed=1)
    assert_same_bits(small(x), whole(x)[:, :10])


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.grouped = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

    def forward(self, x):
        x = self.grouped(self.conv(x)).relu().flatten(2).mT
        return self.head(self.attention(x, x, x)[0].mean(1))


@pytest.mark.parametrize("recipe", ["int8_static", "e4m3_token"])
def test_convolutions_and_attention(recipe):
    model, data = Mixed().eval().requires_grad_(False), [normal(3, 4, 5, 5, seed=4)]
    exact = model(data[0])
    machine = {"target": "int8"} if recipe == "int8_static" else {"target": "hopper.wgmma"}
    with pytest.raises(
        ArgumentError, match=r"layer 'grouped': convolutions in groups keep no scales of their weights "
    ):
        fmtsim.ptq(model, recipe, data, **machine)
    fmtsim.ptq(model, recipe, data, filter_fn=lambda module, name: name != "grouped", **machine)
    assert 0 < (model(data[0]) - exact).norm() < 0.05 * exact.norm()


class Attention(nn.Module):
    """Attention over a tensor and another: as one, as two or as three."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x, how):
        key, value = {"one": (x, x), "two": (z := x * 0.7, z), "three": (x * 0.7, x * 0.9)}[how]
        return self.inner(x, key, value)[0]


@pytest.mark.parametrize("calls", ["one", "two", "three"])
@pytest.mark.parametrize("recipe", ["int8_static", "e4m3_token", "mxfp8_dynamic", "nvfp4_dynamic", "nemotron"])
def test_attention_that_is_called_otherwise_takes_its_part_of_the_packed_weight(recipe, calls):
    x, units = normal(1, 6, 32, seed=5), {"int8_static": "int8", "mxfp8_dynamic": "blackwell.tcgen05.mxf8f6f4"}
    unit = units.get(recipe, "blackwell.tcgen05.nvf4" if recipe == "nvfp4_dynamic" else "hopper.wgmma")
    there, here = (
        fmtsim.ptq(Attention().requires_grad_(False), recipe, [(x, calls)], **how) for how in ({"target": unit}, {})
    )
    ways = ["one", "two", "three"]
    for i, how in enumerate(ways):
        if recipe in ("nvfp4_dynamic", "nemotron") and i < ways.index(calls):  # each part has a scale of its own
            refused(r"layer 'inner': the weight has no stored scales; .* of what", there, x, how)
        else:
            assert (there(x, how) - here(x, how)).norm() < 2e-3 * here(x, how).norm()


class Fused(nn.Module):
    """Attention as a function, of what a layer makes."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        q = self.layer(x).reshape(2, 10, 2, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)


def test_quantised_attention_goes_to_the_machine_and_a_cache_alone_does_not():
    whole = dataclasses.replace(
        get_recipe("nemotron"), name="a", attention=flash_attention_3(rotate=False, target=None)
    )
    model, fresh = (Fused() for _ in range(2))
    fmtsim.ptq(model, whole, DATA, target="h200")
    assert "on hopper.wgmma" in fmtsim.report(model).attention
    fmtsim.load_state(fresh, fmtsim.state(model))
    assert_same_bits(fresh(DATA[0]), model(DATA[0]))
    cache = fmtsim.ptq(Fused(), "nemotron_kv8", DATA, target="h200")
    assert "hopper" not in fmtsim.report(cache).attention and "on h200" in str(fmtsim.report(cache))


FORMATS = ("w4a4", "int8_token", "e4m3_token", "mxfp8_dynamic")


def test_search_weighs_the_machine_and_leaves_out_what_it_lacks():
    model = mlp()
    result = fmtsim.search(model, DATA, bits=8, formats=FORMATS, target="h200")
    assert list(result.recipes) == ["int8_token", "e4m3_token"] and list(result.left_out) == ["w4a4", "mxfp8_dynamic"]
    assert "; loss" in str(result) and " on h200\nleft out: w4a4: PtqRecipe 'w4a4': no unit multiplies int4" in str(
        result
    )
    assert "left out: mxfp8_dynamic" in result._repr_html_()
    for name in result.recipes:
        alone = fmtsim.ptq(copy.deepcopy(model), name, DATA, filter_fn=lambda m, n: n == "2", target="h200")
        assert result.losses["2"][name] == sum(relative_noise(alone(x), model(x)) for x in DATA) / 2
    whole = fmtsim.ptq(copy.deepcopy(model), result.recipe(), DATA)
    assert result.recipe().target == "h200" and fmtsim.report(whole).machine == "on h200"
    assert result.loss == sum(relative_noise(whole(x), model(x)) for x in DATA) / 2
    coarse = fmtsim.search(model, DATA, bits=8, formats=("e4m3_token",), target=COARSE)
    assert coarse.loss > 2 * result.losses["2"]["e4m3_token"]


def test_searches_that_a_machine_cannot_run():
    with pytest.raises(
        ArgumentError,
        match=r"the machine runs none of formats=mxfp8_dynamic, w4a4 \(PtqRecipe 'mxfp8_dynamic': target ",
    ):
        fmtsim.search(mlp(), DATA, bits=8, formats=("mxfp8_dynamic", "w4a4"), target="h200")
    found = fmtsim.search(mlp(), DATA, bits=8, formats=("mxfp8_dynamic", "int8_token"), target="h200")
    assert found.left_out["mxfp8_dynamic"].startswith("PtqRecipe 'mxfp8_dynamic': target h200 has no unit")
    there = get_recipe("int8_token").on(target="h200")
    with pytest.raises(ArgumentError, match=r"formats= are on different machines, and a model has one; pass target="):
        fmtsim.search(mlp(), DATA, bits=8, formats=(there, "e4m3_token"))
    assert fmtsim.search(mlp(), DATA, bits=8, formats=(there,)).recipe().target == "h200"
