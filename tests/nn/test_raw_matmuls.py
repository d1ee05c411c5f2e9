# SPDX-License-Identifier: Apache-2.0
"""Products that models write themselves have the bits of the same models written with layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.gemm.layers.config import linear_config
from fmtsim.nn import convert, report, revert
from fmtsim.nn.multihead_attention import convert_attention, revert_attention
from fmtsim.recipes import Recipe, Rule, get_recipe
from fmtsim.recipes.attention_config import flash_attention_3
from fmtsim.support.errors import ArgumentError
from tests.support.bits import all_same_bits
from tests.support.models import Experts, FalconLinear, MatrixLayers, Written, train
from tests.support.operands import normal

CURRENT = get_recipe("te_current").linear


class Super(nn.Linear):
    def forward(self, input):
        return super().forward(input)


def test_an_attention_module_with_a_forward_of_its_own():
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    plain, x = nn.MultiheadAttention(16, 2, batch_first=True), normal(2, 8, 16)
    own = Own(16, 2, batch_first=True)
    own.load_state_dict(plain.state_dict())
    assert torch.equal(convert(own, recipe=CURRENT)(x), convert(plain, recipe=CURRENT)(x, x, x, need_weights=False)[0])


def test_a_product_is_emulated_once():
    """A weight in high precision inside converted layers and products is not a product of the model around them."""
    config = linear_config(x="e4m3", w=None, g=None, scaling="tensor")

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.own = nn.Linear(16, 16, bias=False), FalconLinear(16, 16, bias=False)

        def forward(self, x):
            return F.linear(self.own(self.layer(x)), self.layer.weight) + F.linear(x, self.own.weight)

    model, x = Around(), normal(8, 16)
    first, second = (copy.deepcopy(layer.weight) for layer in (model.layer, model.own))
    found = train(convert(model, recipe=config), x)

    def linear(x, w):
        return fmtsim.EmulatedGEMM.apply(x, w, None, config)

    x = x.requires_grad_()
    y = linear(linear(linear(x, first), second), first) + linear(x, second)
    (y * normal(*y.shape, seed=9)).sum().backward()
    assert torch.equal(y, found[0]) and torch.equal(first.grad, found[2]) and torch.equal(second.grad, found[3])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj, self.experts = nn.LayerNorm(16), FalconLinear(16, 16, bias=False), Experts()

    def forward(self, x):
        return x + self.experts(self.proj(self.norm(x)))


class Model(nn.Module):
    """Two blocks with experts and a head that is the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.offset = nn.Parameter(torch.randn(8, 16))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


TOKENS = torch.arange(8)


def step(model):
    model(TOKENS).square().sum().backward()


def test_a_stretch_inside_the_forward_is_repeated():
    class Stretch(Written):
        def forward(self, x):
            return checkpoint(lambda x: F.linear(F.linear(x, self.w), self.w.T), x, use_reentrant=False)

    class Plain(Written):
        def forward(self, x):
            return F.linear(F.linear(x, self.w), self.w.T)

    w, x = normal(32, 16, seed=1), normal(8, 16)
    assert all_same_bits(*(train(convert(cls(None, w), "te_delayed"), x) for cls in (Stretch, Plain)))


def test_grouped_products_stay_out_of_graphs():
    torch._dynamo.reset()

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(normal(3, 16, 32).bfloat16())

        def forward(self, x):
            return F.grouped_mm(x, self.w, offs=torch.tensor([8, 8, 24], dtype=torch.int32)) * 2

    model, x = convert(nn.Sequential(Grouped(), nn.GELU()), recipe=CURRENT), normal(24, 16).bfloat16()
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def details(model):
    return {row.name: (row.converted, row.detail) for row in report(model).rows}


def test_the_report_names_them():
    model = convert(Model(), recipe=CURRENT)
    assert details(model)["(model)"] == (True, f"any products with its own offset, emulated: {CURRENT}")
    model(TOKENS)
    found = details(model)
    assert found["(model)"] == (False, "no emulated form of Model")  # it adds its Parameter
    assert found["embedding"] == (True, f"products with its own weight, emulated: {CURRENT}")
    assert found["blocks.0.experts"] == (True, f"products with its own gate_up, down, emulated: {CURRENT}")
    assert not any("fmtsim" in name for name in found)
    assert [row.layer for row in report(model, tokens=8).products][3:9] == ["blocks.0.proj.weight"] * 3 + [
        "blocks.0.experts.gate_up"
    ] * 3
    with fmtsim.observe(model) as stats:
        step(model)
    assert {"embedding", "blocks.1.experts.down"} <= set(stats.layers)
    assert {"x_f", "w_f", "g_d"} <= set(stats["blocks.0.proj"])


def test_what_stays_is_said():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            named = torch.matmul(input=x, other=self.w.detach(), out=torch.empty(4, 4))
            return torch.tensordot(x, self.w, 1) + self.w.mm(self.w) + x @ self.w + named

    model = convert(Odd(), recipe=CURRENT)
    model(torch.ones(4, 4))
    assert details(model)["(model)"][1].endswith("; w in matmul, tensordot, mm: not emulated")


def test_rules_filters_and_heads():
    half = get_recipe("te_block").linear
    rules = (Rule(head=True), Rule(name=r"experts\.down$", use=half), Rule(name="proj$"), Rule(first_blocks=1))
    model = convert(Model(), Recipe(name="r", linear=CURRENT, rules=rules))
    found = details(model)
    assert found["embedding"] == (False, "the recipe leaves it in high precision: head")
    assert found["blocks.1.proj"] == (False, "the recipe leaves it in high precision: name ~ proj$")
    assert found["blocks.0.experts"] == (True, f"any products with its own down, emulated: r: {half}")
    assert found["blocks.1.experts"][1].split("; any ") == [
        "any products with its own gate_up, emulated: r", f"products with its own down, emulated: r: {half}"
    ]  # fmt: skip
    chosen = convert(Model(), recipe=CURRENT, filter_fn=lambda module, name: name == "blocks.1.experts")
    assert [row.name for row in report(chosen).converted] == ["blocks.1.experts"]
    assert details(chosen)["blocks.0.proj"] == (False, "filter_fn leaves it out")
    named = convert(Model(), recipe=lambda name: CURRENT if name == "blocks.0.experts.gate_up" else None)
    assert [row.name for row in report(named).converted] == ["blocks.0.experts"]
    with pytest.raises(ArgumentError, match=r"'blocks.0.experts.fmtsim_products.down' is converted already"):
        convert(model, recipe=CURRENT, filter_fn=lambda module, name: False)


def test_a_rule_fits_the_module_or_the_parameter():
    recipe = Recipe(name="r", linear=CURRENT, rules=(Rule(name="experts$"), Rule(name="proj$", kind="Linear")))
    assert [row.name for row in report(convert(Model(), recipe)).converted] == ["(model)", "embedding"]


def test_models_without_such_products_are_left_as_they_are():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(4, 4), nn.Linear(4, 4)
            self.position = nn.Parameter(torch.zeros(2, 4))

        def forward(self, x):
            return F.relu(self.layer(self.embedding(x) + self.position))

    model = convert(Plain(), recipe=CURRENT)
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_of_converted_layers_that_others_read():
    class Absorbed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.extra = nn.Linear(16, 32, bias=False), Super(32, 16, bias=False)

        def forward(self, x):
            return self.extra(F.linear(x, self.layer.weight)) + F.linear(self.layer(x), self.extra.weight)

    torch.manual_seed(0)
    model, x = Absorbed(), normal(8, 16)
    first, second = copy.deepcopy(model.layer), nn.Linear(32, 16, bias=False)
    second.weight.data = model.extra.weight.data.clone()
    convert(model, recipe=CURRENT)
    layers = convert(nn.Sequential(first, second), recipe=CURRENT)
    assert torch.equal(model(x), layers(x) + layers(x))


def test_lists_of_parameters_and_autocast():
    class Listed(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.matrices = nn.ParameterList(w)

        def forward(self, x):
            return torch.stack([F.linear(each, w) for each, w in zip(x, self.matrices, strict=True)])

    w, x = normal(3, 32, 16, seed=1), normal(3, 8, 16)
    results = []
    for model in (
        MatrixLayers(w),
        Listed(list(w)),
        Written(lambda x, w: torch.bmm(x, w.mT), w),
        Written(lambda x, w: torch.stack([F.linear(x[e], w[e]) for e in range(3)]), w),
    ):
        convert(model, recipe=CURRENT)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(x))
    assert results[0].dtype == torch.bfloat16 and all(torch.equal(results[0], y) for y in results)


def test_attention_converted_beside():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Parameter(torch.randn(3, 16, 16) / 4)

        def forward(self, x):
            return F.scaled_dot_product_attention(*(x @ self.qkv))

    x = normal(8, 16)
    model = convert(Attention(), recipe=CURRENT)
    products = model(x)
    convert_attention(model, flash_attention_3(target=None), generator=0)
    both = model(x)
    attended = convert_attention(Attention(), flash_attention_3(target=None), generator=0)
    attended(x)  # draws signs, as the one before did
    assert not torch.equal(both, products)
    assert torch.equal(revert(model)(x), attended(x))
    assert torch.equal(revert_attention(model)(x), Attention()(x))
    around = convert(convert_attention(Attention(), flash_attention_3(target=None), generator=0), recipe=CURRENT)
    for _ in range(2):  # the inner forward goes first, and comes back outermost
        assert torch.equal(revert_attention(around)(x), products)
        convert_attention(around, flash_attention_3(target=None), generator=0)
    assert torch.equal(around(x), both)


def test_an_error_names_the_parameter():
    model = convert(Written(F.linear, normal(32, 16)), "te_current")
    with pytest.raises(fmtsim.support.errors.DtypeError, match=r"EmulatedGEMM: x has dtype torch.float16, w or bias t"):
        model(normal(8, 16).half())
