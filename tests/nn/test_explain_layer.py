# SPDX-License-Identifier: Apache-2.0
"""The products of converted layers in words: those that a real step asks for, and nothing else changes."""

import copy
import re
from collections import Counter
from html import escape

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.gemm.targets import doubts
from fmtsim.nn import convert, modules, report
from fmtsim.nn.explain_layer import explain_layer
from fmtsim.nn.modules import EmulatedTransposed
from fmtsim.recipes import get_recipe
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError, PlanUnknownWarning
from tests.support.operands import normal
from tests.support.refusals import refused

BF16 = torch.bfloat16
RECIPES = {
    "te_current": "h200", "te_delayed": "h200", "te_block": "h200", "deepseek_v3": "h200", "int8_mixed": "h200",
    "bitnet": "h200", "ao_int4_qat": "h200", "amp_fp16": "h200", "te_nvfp4": "b200", "quartet": "b200",
}  # fmt: skip


def asked_in_a_step(make, recipe, target, x):
    """Return a converted layer, and the calls that a target is really asked about in a step."""
    module = convert(make().to(BF16), recipe=linear_on(target, recipe), generator=1)
    with seen_calls() as calls:
        y = module(*x)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.backward(torch.ones_like(y))
    return module, [call.facts() for call in calls]


def linear_on(target, recipe):
    return get_recipe(recipe).on(target=target).linear


def told(found):
    return [each.call.facts() for part in found.parts.values() for each in part.values()]


# A layer, its inputs, the rows of its products (positions: of the output, transposed of the input), and its groups.
LAYERS = {
    "linear": (lambda: nn.Linear(128, 256), [normal(2, 64, 128, seed=1)], 128, 1),
    "linear of columns": (lambda: nn.Linear(128, 256), [normal(128, 64, seed=1).mT], None, 1),
    "Conv1d": (lambda: nn.Conv1d(32, 64, 4, stride=2, padding=1, groups=2), [normal(3, 32, 32, seed=1)], 48, 2),
    "Conv2d, one image": (lambda: nn.Conv2d(32, 64, 3, padding=1, groups=2), [normal(1, 32, 8, 8, seed=1)], None, 2),
    "Conv2d, channels last": (lambda: nn.Conv2d(32, 64, 3, padding=1, groups=2),
                              [normal(2, 32, 8, 8, seed=1).contiguous(memory_format=torch.channels_last)], 128, 2),
    "Conv3d": (lambda: nn.Conv3d(16, 32, 2, bias=False), [normal(3, 16, 3, 3, 5, seed=1)], 48, 1),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(32, 16, 4, stride=2, padding=2, groups=2),
                        [normal(3, 32, 4, 4, seed=1)], 48, 2),
    "Bilinear": (lambda: nn.Bilinear(16, 32, 2), [normal(3, 16, 16, seed=1), normal(3, 16, 32, seed=1)], 48, 1),
}  # fmt: skip
CASES = [
    *(("linear", recipe, target) for recipe, target in RECIPES.items()),
    *((name, recipe, "h200") for name in list(LAYERS)[1:] for recipe in ("te_current", "amp_fp16", "bitnet")),
    *((name, "ao_int4_qat", "h200") for name in LAYERS if name.startswith("Conv2d")),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")
@pytest.mark.parametrize(("name", "recipe", "target"), CASES)
def test_what_is_told_of_a_layer_is_what_a_step_asks_for(name, recipe, target):
    make, inputs, rows, groups = LAYERS[name]
    inputs = [t.to(BF16).requires_grad_() for t in inputs]
    module, asked = asked_in_a_step(make, recipe, target, inputs)
    found = explain_layer(module, inputs)
    assert told(found) == asked and len(asked) == 3
    assert groups == 1 or ("groups", "2, a product each") in found.wgrad.rows
    if rows is not None:
        assert told(explain_layer(module, rows)) == asked
        assert [row.tokens for row in report(module, tokens=rows).products] == [rows] * 3
    if name == "linear of columns":
        assert recipe != "amp_fp16" or [call.a_layout for call in asked] == ["column", "row", "column"]
        other = inputs[0].detach().clone(memory_format=torch.contiguous_format)
        assert recipe != "amp_fp16" or told(explain_layer(module, other)) != asked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")
@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize(
    "recipe",
    [
        name
        for name in fmtsim.list_recipes(kind="training")
        if get_recipe(name).linear is not None and get_recipe(name).attention is None
    ],
)
def test_what_is_told_under_every_recipe_is_what_a_step_asks_for(recipe, target):
    x = normal(128, 128, seed=1).to(BF16).requires_grad_()
    try:
        module, asked = asked_in_a_step(lambda: nn.Linear(128, 256), recipe, target, (x,))
    except FmtsimError:
        return  # a machine without the format
    rest = [call for call in asked if (call.a, recipe[:6]) == ("fp32", "fp4_ms")]  # told of in words
    assert told(explain_layer(module, x)) == [call for call in asked if call not in rest]


@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning", "ignore:Attempting to run cuBLAS")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("recipe", "target"), RECIPES.items())
def test_what_is_told_on_a_gpu_is_what_a_step_asks_for_there(recipe, target):
    config = get_recipe(recipe).on(target=target, native=False).linear
    module = convert(nn.Linear(128, 256).to(BF16).cuda(), recipe=config, generator=1)
    x = normal(2, 64, 128, seed=1).to(BF16).cuda().requires_grad_()
    with torch.autograd.set_multithreading_enabled(False), seen_calls() as calls:
        y = module(x)
        y.backward(torch.ones_like(y))
    asked = [call.facts() for call in calls]
    found = explain_layer(module, x)
    assert told(found) == asked and len(asked) == 3
    assert dict(found.dgrad.rows)["runs"] == "emulated: native=False"


def test_who_runs_a_product():
    layer = convert(nn.Linear(128, 256).to(BF16), format="e4m3", target="h200", native=True)
    assert dict(fmtsim.explain_mm(layer, 64).wgrad.rows)["runs"] == (
        "not at all (native=True): the tensors are on cpu, not on a CUDA GPU; move them there with .cuda()"
    )
    layer = convert(fmtsim.revert(layer), recipe="te_mxfp8", target="b200", native=False)
    assert dict(fmtsim.explain_mm(layer, 64).fprop.rows)["runs"] == "emulated: native=False"
    plan = convert(fmtsim.revert(layer), format="e4m3", target="h200", plan=fmtsim.GemmPlan())
    assert "runs" not in dict(fmtsim.explain_mm(plan, 64).fprop.rows)


class Transposed(nn.Module):
    """As transformers' Conv1D."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(128, 64, seed=1)), nn.Parameter(normal(64, seed=2))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_what_is_told_of_an_attention_is_what_a_step_asks_for():
    x, other = (normal(48, 64, seed=i).to(BF16).requires_grad_() for i in (3, 4))
    for inputs, parts in (([x, x, x], ["in_proj", "out_proj"]), ([x, other, other], ["q_proj", "kv_proj", "out_proj"])):
        module, asked = asked_in_a_step(lambda: nn.MultiheadAttention(64, 4), "amp_bf16", "h200", inputs)
        found = explain_layer(module, inputs)
        assert list(found.parts) == parts and set(told(found)) == set(asked)
        with pytest.raises(ArgumentError, match=r"has several products with weights; write \['.*'out_proj'\] before "):
            found.dgrad  # noqa: B018
        assert found["out_proj"].dgrad is found.parts["out_proj"]["dgrad"]
    assert told(explain_layer(module, 48)) == told(explain_layer(module, [x, x, x])) == told(explain_layer(module, x))


def test_what_is_told_of_a_transposed_weight_is_what_a_step_asks_for(monkeypatch):
    monkeypatch.setitem(modules._FOREIGN, (Transposed.__module__, "Transposed"), EmulatedTransposed)
    x = normal(48, 128, seed=1).to(BF16).requires_grad_()
    module, asked = asked_in_a_step(Transposed, "amp_bf16", "h200", (x,))
    assert told(explain_layer(module, x)) == asked and asked[0].b_layout == "column"
    compiled = torch.compile(convert(Transposed().to(BF16), recipe=linear_on("h200", "amp_bf16")), backend="aot_eager")
    with seen_calls() as calls:
        compiled(x).sum().backward()
    assert {call.facts() for call in calls} == set(asked)


def test_products_of_a_unit_of_integers_and_of_no_machine():
    layer = nn.Linear(64, 32).to(BF16)
    alone = fmtsim.explain_mm(convert(layer, recipe="te_current"), 48)
    assert alone.wgrad.call is alone.wgrad.plan is alone.wgrad.unit is None and alone.wgrad.basis == "none"
    assert str(alone.wgrad) == (
        "call      [32, 48] g x [48, 64] x -> bfloat16\n"
        "operands  g the forward codes; x the forward codes\n"
        "unit      none: float32 in no particular order; convert with target= for a machine\n"
        "order     no particular one"
    )
    indented = "\n".join(f"  {line}" for line in str(alone.wgrad).splitlines())
    assert str(alone).startswith("(model) (Linear)\nfprop  y = x w^T\n  call      [48, 64] x")
    assert str(alone).endswith(f"wgrad  dw = g^T x\n{indented}") and repr(alone) == str(alone)
    assert alone._repr_html_().startswith("<h3>(model) (Linear)</h3><h4>fprop  y = x w^T</h4><table>")
    on_unit = fmtsim.explain_mm(convert(fmtsim.revert(layer), recipe="te_current", target="hopper.wgmma"), 48)
    assert on_unit.dgrad.rows[0] == ("call", "scaled_mm: [48, 32] e5m2 x [32, 64] e4m3 -> bfloat16")
    integers = fmtsim.explain_mm(convert(fmtsim.revert(layer), recipe="int8_mixed", target="int8"), 48).fprop
    assert integers.order.startswith("of no consequence") and integers.rows[-1] == (
        "then", "times the scales of w, times the scales of x, plus the bias, one rounding each; to bfloat16"
    )  # fmt: skip
    padded = fmtsim.explain_mm(convert(fmtsim.revert(layer), recipe="int8_mixed", target="h200"), 9).fprop
    assert padded.call.m == 17  # with the zeros that the library needs


def test_words_at_their_limits():
    layer = convert(nn.Linear(128, 64).to(BF16), format="e4m3", target="h200")
    found = fmtsim.explain_mm(layer, 144)  # promoted every 128: dgrad has 64 products, wgrad 144
    assert [each.order.split()[:2] for each in (found.dgrad, found.wgrad)] == [["one", "chain"], ["a", "fresh"]]
    assert fmtsim.explain_mm(layer, 128).wgrad.order == "one chain from +0, k in order"
    begins = "the bias is what parts are added to"
    for plan, epilogue in (
        (fmtsim.GemmPlan(k_tile=32, split=2, reduce="in_place"), begins),
        (fmtsim.GemmPlan(k_tile=32, split=2), "plus the bias"),
    ):
        convert(fmtsim.revert(layer), format="bf16", target="hopper.wgmma", plan=plan)
        found = fmtsim.explain_mm(layer, 128)
        assert dict(found.fprop.rows)["epilogue"].split(", ")[0] == epilogue
        assert begins not in dict(found.wgrad.rows)["epilogue"]


def test_what_follows_a_product_and_what_goes_before():
    model = convert(
        nn.Sequential(nn.Sequential(nn.Linear(128, 128)), nn.Linear(8, 8)).to(BF16), recipe="fp4_ms", target="h200"
    )
    found = fmtsim.explain_mm(model[0][0], 64)
    rows = dict(found.fprop.rows)
    assert rows["first"].startswith(
        "what was clamped off x, times w: mm: [64, 128] fp32 x [128, 128] fp32 -> float32; fp32_fma"
    )
    assert rows["then"] == "plus the first, plus the bias, one rounding each; to bfloat16"
    assert dict(found.wgrad.rows)["then"] == "times the slope of the rounding; to bfloat16"
    halves = fmtsim.explain_mm(convert(nn.Linear(16, 16), recipe="amp_fp16", target="h200"), 32)
    assert dict(halves.fprop.rows)["then"] == "rounded to fp16; to float32"
    bias_follows = fmtsim.explain_mm(convert(nn.Linear(32, 32).to(BF16), recipe="ao_rowwise", target="h200"), 32)
    assert dict(bias_follows.fprop.rows)["then"] == "plus the bias, rounded again"
    turned = convert(
        nn.Sequential(nn.Sequential(nn.Linear(128, 128)), nn.Linear(8, 8)).to(BF16), recipe="quartet", target="b200"
    )
    assert dict(fmtsim.explain_mm(turned[0][0], 128).dgrad.rows)["then"].startswith("times the slope")


def test_explaining_and_reporting_change_nothing():
    generator = torch.Generator().manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(128, 128)) for _ in range(3)]
    model = convert(nn.Sequential(*blocks).to(BF16), recipe="te_delayed", target="h200", generator=generator)
    called = []
    model[0][0].register_forward_hook(lambda *_: called.append("hook"))
    state, random = copy.deepcopy(model.state_dict()), (generator.get_state(), torch.random.get_rng_state())
    with fmtsim.observe(model) as stats, torch.no_grad():
        fmtsim.explain_mm(model[0][0], 32)
        report(model, tokens=[32, 64])
    assert not called and not stats.layers
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random[0], generator.get_state()) and torch.equal(random[1], torch.random.get_rng_state())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert all(not isinstance(p, torch._subclasses.FakeTensor) for p in model.parameters())


def test_a_report_tells_products_and_counts_them_by_what_stands_behind():
    blocks = [nn.Sequential(nn.Linear(128, 128)) for _ in range(30)]
    model = convert(nn.Sequential(*blocks, nn.Conv2d(16, 16, 1)).to(BF16), recipe="te_current", target="h200")
    found = report(model, tokens=[64, 72])
    shown = found._repr_html_()
    assert shown.count("<table>") == 2 and shown.endswith(f"</table>{escape(str(found).splitlines()[-1])}")
    assert len(found.products) == 2 * 3 * 31 and found.rows == report(model).rows and report(model).products == ()
    one = [row for row in found.products if row.layer == "7.0"]
    alone = fmtsim.explain_mm(model[7][0], 64)
    for row, each in zip(one, (alone.fprop, alone.dgrad, alone.wgrad), strict=False):
        assert (row.call, row.unit, row.order, row.basis) == (
            dict(each.rows)["call"],
            each.unit,
            each.order,
            each.basis,
        )
    lines = str(found).splitlines()
    assert re.fullmatch(r"186 products: (\d+ by the library's own report, )?\d+ by a rule", lines[-1])
    assert sum(line.split()[0] in ("30", "31", "1") for line in lines[-15:-1] if line.split()) == 12
    padded = convert(nn.Linear(64, 64).to(BF16), recipe="te_nvfp4_all", target="recipe")
    assert "scaled_mm: [64, 80] e2m1 x [80, 64] e2m1" in str(report(padded, tokens=72))  # groups of 16 tokens
    rotated = convert(nn.Linear(64, 64).to(BF16), recipe="halo2", target="recipe")
    assert str(report(rotated, tokens=51)).splitlines()[-1] == "3 products: 3 refused"
    assert "a Hadamard matrix of the whole axis does not fit: size=51" in str(report(rotated, tokens=51))
    assert report(convert(nn.Linear(8, 8), format="e4m3"), tokens=4).products[0].basis == "none"


@pytest.mark.filterwarnings("error::fmtsim.support.errors.PlanUnknownWarning")
def test_telling_of_a_guess_leaves_the_warning_to_the_product(monkeypatch):
    monkeypatch.setattr(doubts, "_guesses", Counter())
    model = convert(nn.Linear(48, 144, bias=False).to(BF16), format="mxfp8_e4m3", target="b200")
    assert fmtsim.explain_mm(model, 80).fprop.basis == report(model, tokens=80).products[0].basis == "guess"
    with pytest.raises(PlanUnknownWarning):
        model(normal(80, 48, seed=1).to(BF16))


def test_errors_of_layers_to_explain():
    layer = nn.Linear(64, 32).to(BF16)
    refused(r"Linear is not a converted layer; convert the model, and pass one of its", fmtsim.explain_mm, layer, 4)
    convert(layer, format="e4m3", target="h200")
    with pytest.raises(ArgumentError, match="explain_mm of a layer takes no target=: convert gave the layer its machi"):
        fmtsim.explain_mm(layer, 4, target="h200")
    refused("explain_mm of a layer takes no native=", fmtsim.explain_mm, layer, 4, native=False)
    for x in (0, -1, 1 << 27, True, 1.5, None, [], [1], "x", [torch.ones(4, 64)] * 2):
        refused(r"x=.* is not an input of a layer; pass the tensor it is called with,", fmtsim.explain_mm, layer, x)
    with pytest.raises(ArgumentError, match=r"x of shape \(4, 65\) does not fit w of shape \(32, 64\)"):
        fmtsim.explain_mm(layer, torch.empty(4, 65, dtype=BF16))
    assert dict(fmtsim.explain_mm(layer, 17).wgrad.rows)["padded"] == "with zeros, from [32, 17] g x [17, 64] x"
    assert "padded" not in dict(fmtsim.explain_mm(layer, 17).fprop.rows)
    with pytest.raises(ArgumentError, match=r"\(model\) \(Linear\) has no part 'k'; choose one of "):
        fmtsim.explain_mm(layer, 16)["k"]
    with pytest.raises(ArgumentError, match="pass the 3 tensors it is called with, or the number of rows of its"):
        fmtsim.explain_mm(convert(nn.MultiheadAttention(64, 4), format="e4m3"), [torch.ones(4, 64)])
    with pytest.raises(DtypeError, match=r"x has dtype torch.int64; pass what the layer takes, for example a torch.bf"):
        fmtsim.explain_mm(layer, torch.ones(4, 64, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="x has layout torch.sparse_coo; pass a dense tensor"):
        fmtsim.explain_mm(layer, torch.ones(4, 64).to_sparse())
    for tokens in (0, -1, 1 << 27, True, 1.5, "4", [0], [1.0]):
        refused("is not a number of rows; pass one from 1 to 67108864, or a list of s", report, layer, tokens=tokens)
