# SPDX-License-Identifier: Apache-2.0
"""Recipes on machines: every one runs on what it was made for; what a machine is handed, against calls of the verbs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import fmtsim
from fmtsim.gemm.layers import multiply as on_machine
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.gemm.products.native import is_native
from fmtsim.gemm.units.unit import describe
from fmtsim.nn.convert import convert
from fmtsim.recipes import get_recipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

pytestmark = pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")

BF16 = torch.bfloat16
HOPPER = {"te_delayed", "te_current", "te_block", "fp8lm", "coat", "deepseek_v3", "ao_tensorwise", "ao_rowwise",
          "ao_rowwise_gw_hp", "halo0_fp8", "halo1_fp8", "halo2_fp8", "mu_s", "fp4_ms", "fp4_ms_code"}  # fmt: skip

NATIVE = sorted(
    {*HOPPER, "int8_mixed", "halo0", "halo1", "halo2", "switchback", "bitnet", "ao_int4_qat", "amp_bf16", "amp_fp16"}
)


class Attention(torch.nn.Module):
    def forward(self, x):
        q = x.reshape(2, 64, 2, 64).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


def net(recipe):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128)) for _ in range(3)]
    return torch.nn.Sequential(*blocks, *([Attention()] if recipe.attention else [])).to(BF16)


def step(model, tokens=128, device="cpu"):
    x = normal(tokens, 128, seed=1).to(BF16).to(device).requires_grad_()
    y = model(x)
    y.backward(normal(tokens, y.shape[-1], seed=2).to(BF16).to(device))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


WITHOUT_MACHINE = {"sage3", "mxfp8_attention"}  # scales change inside the sums of attention, which no unit here takes


@pytest.mark.parametrize("name", fmtsim.list_recipes(kind="training"))
def test_every_recipe_runs_on_the_machine_that_it_was_made_for(name):
    recipe = get_recipe(name)
    assert (recipe.machine is None) == (name in WITHOUT_MACHINE)
    if recipe.machine is None:
        return
    model = convert(net(recipe), recipe=name, target="recipe", total_steps=10, generator=1)
    assert all(t.isfinite().all() for t in step(model))
    machine = recipe.machine if isinstance(recipe.machine, str) else describe(recipe.machine)
    assert machine in str(recipe.on(target="recipe")) and recipe.on(target="recipe").machine == recipe.machine


@pytest.mark.parametrize("name", sorted(HOPPER))
def test_every_recipe_of_e4m3_and_e5m2_runs_on_an_h200(name):
    model = convert(net(get_recipe(name)), recipe=name, target="h200", generator=1)
    assert all(t.isfinite().all() for t in step(model))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in autograd's own thread
@pytest.mark.skipif(not is_native("h200"), reason="needs an NVIDIA H200")
@pytest.mark.parametrize("tokens", [48, 1024])
@pytest.mark.parametrize("widths", [(128, 256, 128), (128, 1152, 384)])
@pytest.mark.parametrize("name", NATIVE)
def test_an_h200_itself_gives_the_bits_of_its_emulation(name, widths, tokens):
    """Three steps: every product by the GPU's own units, or every one emulated."""
    sides = []
    for native in (True, False):
        torch.manual_seed(1)
        layers = [torch.nn.Sequential(torch.nn.Linear(a, b)) for a, b in itertools.pairwise(widths)]
        model = torch.nn.Sequential(*layers).to(BF16).cuda()
        convert(model, recipe=name, target="h200", native=native, generator=3)
        found = []
        for _ in range(3):
            found += [t.clone() for t in step(model, tokens, "cuda")]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        sides.append(found)
    for mine, emulated in zip(*sides, strict=True):
        assert_same_bits(mine, emulated)


@pytest.mark.parametrize("machine", [{"target": "h200"}, {"target": "b200"}, {"target": "int8"}])
@pytest.mark.parametrize("name", ["int8_mixed", "halo0", "halo1", "halo2"])
def test_integers_are_summed_exactly_on_every_machine(name, machine):
    alone = step(convert(net(get_recipe(name)), recipe=name))
    for found, expected in zip(step(convert(net(get_recipe(name)), recipe=name, **machine)), alone, strict=True):
        assert_same_bits(found, expected)


def test_sizes_that_a_library_pads():
    config = get_recipe("int8_mixed").linear
    x, w, bias = normal(5, 43, seed=1).to(BF16), normal(9, 43, seed=2).to(BF16), normal(9, seed=3).to(BF16)
    for machine in ({"target": "h200"}, {"target": "int8"}):
        assert_same_bits(EmulatedGEMM.apply(x, w, bias, config.on(**machine)), EmulatedGEMM.apply(x, w, bias, config))


def observed(name, bias=None, **machine):
    """Return what a layer of a recipe on an H200 gives, and the values of its operands by name."""
    seen = {}
    config = get_recipe(name).linear.on(**({"target": "h200"} | machine))
    x, w = (normal(*shape, seed=i).to(BF16).requires_grad_() for i, shape in enumerate([(48, 64), (32, 64)]))
    y = EmulatedGEMM.apply(x, w, bias, config, None, lambda name, t, q, quantizer, dim: seen.update({name: q}))
    g = normal(48, 32, seed=4).to(BF16)
    y.backward(g)
    return (y.detach(), x.grad, w.grad), seen, g


def test_values_of_fake_quantisation_are_products_of_the_tensors_dtype():
    bias = normal(32, seed=3).to(BF16)
    (y, dx, dw), seen, g = observed("ao_int4_qat", bias)
    x, w = seen["x_f"].to(BF16), seen["w_f"].to(BF16)
    assert_same_bits(y, fmtsim.linear(x, w, bias, target="h200"))
    assert_same_bits(dx, fmtsim.mm(g, w, target="h200"))
    assert_same_bits(dw, fmtsim.mm(g.mT, x, target="h200"))


def test_integers_beside_high_precision_are_multiplied_in_its_dtype_and_scaled_afterwards():
    (y, dx, dw), seen, g = observed("bitnet")
    x, w = seen["x_f"], seen["w_f"]
    rows, scale = x.abs().amax(1, keepdim=True) / 127, w.abs().max()
    codes = (x / rows).round().to(torch.int8), (w / scale).round().to(torch.int8)
    sums = fmtsim.int_mm(codes[0], codes[1].mT, target="h200").float()
    assert_same_bits(y, (sums * scale * rows).to(BF16))
    wide = fmtsim.mm(g, codes[1].to(BF16), target="h200", out_dtype=torch.float32)
    assert_same_bits(dx, (wide * scale).to(BF16))
    assert_same_bits(dw, fmtsim.mm(g.mT, x.to(BF16), target="h200"))  # tokens have scales: values, rounded once


def test_operands_that_are_cast_twice_are_those_of_the_second_cast():
    (y, dx, dw), seen, g = observed("fp4_ms_code")
    scales = {name: torch.exp2((t.abs().amax() / 448).log2().ceil()) for name, t in seen.items() if name[-1] == "f"}
    e4m3 = {name: (seen[name] / s).to(torch.float8_e4m3fn) for name, s in scales.items()}
    assert all(torch.equal(e4m3[name].float() * scales[name], seen[name]) for name in scales)
    found = fmtsim.scaled_mm(
        e4m3["x_f"], e4m3["w_f"].mT, scales["x_f"], scales["w_f"], out_dtype=BF16, use_fast_accum=True, target="h200"
    )
    assert_same_bits(y, found)


def test_what_was_clamped_off_is_multiplied_on_the_machine_too(monkeypatch):
    x = normal(48, 64, seed=1).to(BF16) * 30 ** (torch.arange(48) == 3)[:, None]
    w, recipe = normal(32, 64, seed=2).to(BF16), get_recipe("fp4_ms")
    whole = EmulatedGEMM.apply(x, w, None, recipe.linear.on(target="h200"))
    plain = EmulatedGEMM.apply(x, w, None, recipe.linear)
    assert (whole - plain).abs().max() <= 0.02 * plain.abs().max()  # FP8 sums of few bits on one side
    seen, run_product = [], on_machine.run_product
    monkeypatch.setattr(on_machine, "run_product", lambda call, *given, **how: (
        seen.append((call.a, call.target)), run_product(call, *given, **how))[1])  # fmt: skip
    for unit, chain in (("hopper.wgmma", "fp32_fma"), ("ada.mma", "fp32_fma"), ("exact", "exact")):
        assert EmulatedGEMM.apply(x, w, None, recipe.linear.on(target=unit)).isfinite().all()
        assert seen[0] == ("fp32", chain) and seen[1][1] == unit  # a unit that takes no float32 leaves it to a chain
        seen.clear()


def test_formats_without_a_unit_are_multiplied_as_float32_values_on_a_datapath():
    """Also in a layer of bfloat16, which does not hold the values of NF4."""
    x, w = normal(16, 64, seed=1).to(BF16), normal(8, 64, seed=2).to(BF16)
    path = fmtsim.Datapath(block=16, fraction_bits=20, accumulator="fp32", rounding="toward_zero")
    y = EmulatedGEMM.apply(x, w, None, fmtsim.linear_config(x="nf4", w="nf4", g=None, target=path))
    values = [fmtsim.quantize(t, "nf4", out_dtype=torch.float32) for t in (x, w)]
    assert_same_bits(y, fmtsim.mm(values[0], values[1].T, target=path, out_dtype=torch.float32).to(BF16))


def test_a_multiplier_of_scales_goes_to_the_result():
    """Quartet's gradients have scales of powers of two times 4/3: the unit takes the powers, alpha is 16/9."""
    q, plain = get_recipe("quartet").linear.dgrad.a, get_recipe("mxfp4").linear.fprop.a
    assert q.scaling.multiplier == 4 / 3
    power = Quantizer(format=q.format, scaling=q.scaling, rounding=plain.rounding)
    g, w = normal(64, 128, seed=1), normal(32, 128, seed=2)
    found = EmulatedGEMM.apply(g, w, None, LinearConfig(fprop=Gemm(a=power, b=power, target="b200")))
    scales = [torch.exp2(t.unflatten(1, (-1, 32)).abs().amax(2).log2().floor() - 2) for t in (g, w)]
    third = torch.tensor(4 / 3)
    codes = [
        fmtsim.encode(t / (s * third).repeat_interleave(32, 1), "e2m1").codes
        for t, s in zip((g, w), scales, strict=True)
    ]
    packed = [c.view(torch.float4_e2m1fn_x2) for c in codes]
    e8m0 = [s.to(torch.float8_e8m0fnu) for s in scales]
    sums = fmtsim.scaled_mm(
        packed[0], packed[1].mT, e8m0[0], e8m0[1], out_dtype=torch.float32, target="b200",
        scale_recipes="BlockWise1x32",
        swizzles="NO_SWIZZLE",
    )  # fmt: skip
    assert_same_bits(found, sums * (third * third))  # one alpha


@pytest.mark.filterwarnings("ignore:recipe .* leaves the last 1.% of the blocks")
def test_layers_in_high_precision_are_products_of_a_target():
    model = convert(net(get_recipe("te_nvfp4")), recipe="te_nvfp4", target="b200")
    assert all(model[i][0].emulation.config.fprop.target == "b200" for i in range(3))
    assert model[2][0].emulation.config.fprop.a.format is None  # the head
    alone = convert(net(get_recipe("te_nvfp4")), recipe="te_nvfp4", target="blackwell.tcgen05.nvf4")
    assert "emulation" not in alone[2][0].__dict__


def test_machines_go_with_configs_and_formats_as_well():
    linear = fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2")
    for how in ({"recipe": linear}, {"recipe": lambda name: linear}, {"format": "e4m3"}):
        model = convert(net(get_recipe("fp32")), target=fmtsim.Datapath(), plan=fmtsim.GemmPlan(), **how)
        config = model[0][0].emulation.config
        assert config.wgrad.target == fmtsim.Datapath() and config.dgrad.plan == fmtsim.GemmPlan()
    with pytest.raises(ArgumentError, match="recipe mine names no machine; pass target="):
        fmtsim.Recipe(name="mine", linear=linear).on(target="recipe")
    with pytest.raises(FormatError, match="recipe lns: fprop: no unit multiplies lns8_channel; pass target=Datapath"):
        get_recipe("lns").on(target="h200")
    with pytest.raises(ArgumentError, match="recipe gaudi: fprop: target h200 .*; units that do: exact"):
        get_recipe("gaudi").on(target="h200")
    with pytest.raises(ArgumentError, match=r"te_mxfp8: fprop: target h200 has no unit .*; targets that do: b200"):
        get_recipe("te_mxfp8").on(target="h200")
    both, recipe = {"target": "h200", "native": True}, get_recipe("te_current")
    assert recipe.on(**both).linear.dgrad.native and recipe.linear.dgrad.native is None
