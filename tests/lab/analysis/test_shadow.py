# SPDX-License-Identifier: Apache-2.0
"""observe of models that are not converted: their bits stay, and the operands are those that convert would make."""

import contextlib
import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.gemm.layers.config import linear_config
from fmtsim.recipes.attention_config import AttentionConfig, attention_like
from fmtsim.recipes.recipe import Recipe, Rule, Steps
from fmtsim.support.errors import ArgumentError
from tests.support.refusals import refused

OPERANDS = ["x_f", "w_f", "g_d", "w_d", "g_w", "x_w"]
VOLTA = AttentionConfig(target="volta.mma")
ATTENTION = ("q", "k", "v", "p", "dv.b", "dp.a", "dq.a", "dk.a")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 32, 64) * 0.1)
        self.router = nn.Linear(64, 3)

    def forward(self, x):
        y = torch.stack([x @ w.t() for w in self.experts], -2)
        return (y * self.router(x).softmax(-1)[..., None]).sum(-2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 64)
        self.up, self.relu = nn.Linear(64, 64), nn.ReLU(inplace=True)
        self.attention = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True)
        self.convolution, self.dropout = nn.Conv1d(64, 64, 3, padding=1), nn.Dropout(0.1)
        self.moe, self.head = Experts(), nn.Linear(32, 64)
        self.unused = nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.relu(self.up(self.embedding(tokens)))
        x = self.dropout(self.convolution((x + self.attention(x, x, x, need_weights=False)[0]).mT).mT)
        return self.head(self.moe(x)) @ self.embedding.weight.t()


def results(net):
    """Return outputs, gradients and what the generator draws next, from a fixed seed."""
    torch.manual_seed(5)
    net.zero_grad()
    y = net(torch.arange(64).reshape(2, 32) % 10)
    y.square().mean().backward()
    return [y, *(p.grad for p in net.parameters() if p.grad is not None), torch.rand(3)]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(
    "what", [{"recipe": "te_mxfp8"}, {"recipe": "te_nvfp4_all"}, {"recipe": "te_delayed"}, {"format": "e4m3"}]
)
def test_the_model_computes_as_it_does_and_is_left_as_it_was(net, what):
    before, states = results(net), {module: dict(module.__dict__) for module in net.modules()}
    with fmtsim.observe(net, **what) as stats:
        during = results(net)
    assert len(before) == len(during) and all(map(torch.equal, before, during))
    assert {module: dict(module.__dict__) for module in net.modules()} == states
    names = ("up", "attention.in_proj", "attention.out_proj", "convolution", "moe", "moe.router", "head", "embedding")
    layers = dict(stats.layers)
    attention = layers.pop("attention", {})  # recipes leave it in high precision
    assert tuple(layers) == names and tuple(attention) == (ATTENTION if "format" in what else ())
    shared = {"te_nvfp4_all": ["w_d"], "te_delayed": ["w_d", "g_w", "x_w"]}.get(what.get("recipe"), [])  # cast once
    assert {tuple(o) for o in layers.values()} == {tuple(each for each in OPERANDS if each not in shared)}
    assert str(stats).splitlines()[-1] == "not called: unused"


@pytest.mark.parametrize("what", [{"recipe": "te_mxfp8"}, {"recipe": "te_nvfp4_all"}, {"format": "e5m2"}])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(64, 32), (4, 16, 64)), (nn.Conv2d(8, 16, 3), (2, 8, 10, 10)), (Experts(), (32, 64))]
)
def test_operands_are_those_of_the_converted_model(layer, shape, what):
    if "nvfp4" in what.get("recipe", "") and not isinstance(layer, nn.Linear):
        pytest.skip("sizes that do not fit the recipe's groups")
    torch.manual_seed(1)
    x = torch.randn(shape, requires_grad=True)
    g = torch.randn_like(layer(x))

    def run(model):
        model(x).backward(g)

    with fmtsim.observe(layer, **what) as beside:
        run(layer)
    converted = fmtsim.convert(copy.deepcopy(layer), generator=0, **what)
    with fmtsim.observe(converted) as inside:
        run(converted)
    assert beside.layers.keys() == inside.layers.keys()
    for name, operands in inside.layers.items():
        for operand, stats in operands.items():
            if operand[0] == "g" and isinstance(layer, Experts):
                continue  # another router's weights, so other gradients
            assert beside[name][operand].to_dict() == stats.to_dict(), (name, operand)


def test_what_is_written_in_place_checkpointed_or_gone_back_through_twice():
    torch.manual_seed(2)
    layer = nn.Linear(8, 8)
    x, g = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    found = []
    for run in (lambda: layer(x), lambda: layer(x).mul_(1.0), lambda: checkpoint(layer, x, use_reentrant=False)):
        with fmtsim.observe(layer, format="e4m3") as stats:
            run().backward(g)
        found.append({name: s.to_dict() for name, s in stats[""].items() if not name.endswith("f")})
    assert found[0] == found[1] == found[2] and len(found[0]) == 4
    with fmtsim.observe(layer, format="e4m3") as stats:
        y = layer(x)
        y.backward(g, retain_graph=True)
        y.backward(g)
    assert stats[""]["g_d"].elements == 2 * 48 and stats.history[1][""]["g_d"].elements == 2 * 48


class Attention(nn.Module):
    def __init__(self, how, masked=False):
        super().__init__()
        self.how, self.masked, self.qkv = how, masked, nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
        if self.how == "torch":
            return F.scaled_dot_product_attention(q, k, v, mask if self.masked else None)
        scores = q @ k.mT / 4
        if self.how == "capped":
            scores = torch.tanh(scores / 5) * 5
        elif self.masked:
            scores += mask
        return F.dropout(scores.softmax(-1, dtype=torch.float32), 0.1, self.training).to(v.dtype) @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("format", ["e4m3", "nvfp4"])
def test_attention_of_any_author_is_seen_as_that_of_converted_models(masked, format):
    x, g, found = torch.randn(2, 8, 32), torch.randn(2, 2, 8, 16), []
    config = attention_like(linear_config(x=format, w=format, g=format, scaling=None))
    for how in ("torch", "eager", "converted"):
        torch.manual_seed(0)
        layer = Attention("eager" if how == "eager" else "torch", masked).eval()
        layer = fmtsim.nn.convert_attention(layer, config) if how == "converted" else layer
        with fmtsim.observe(layer, **{} if how == "converted" else {"format": format}) as stats:
            layer(x).backward(g)
        found.append({name: s.to_dict() for name, s in stats[""].items() if name[0] in "qkvp" or name[-1] != "a"})
        assert tuple(stats[""]) == ATTENTION
    assert found[0] == found[1] == found[2] and list(found[0]) == ["q", "k", "v", "p", "dv.b"]
    assert (found[0]["p"]["elements"], found[0]["p"]["amax"]) == (2 * 2 * 8 * 8, 1.0)


def test_attention_keeps_its_bits_and_what_is_none_is_said():
    torch.manual_seed(3)
    for how in ("torch", "eager", "capped"):
        layer, x = Attention(how), torch.randn(2, 8, 32, requires_grad=True)
        runs = []
        for watch in (contextlib.nullcontext(), stats := fmtsim.observe(layer, format="e4m3")):
            torch.manual_seed(4)
            with watch:
                y = layer(x)
            runs.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), torch.rand(2)))
        assert all(map(torch.equal, *runs))
        assert (list(stats.layers) == ["qkv"]) == (how == "capped")
    assert str(stats).splitlines()[-1] == "no attention seen, not called or of another kind: (model)"


@torch.no_grad()
def test_functions_of_scores_run_again_only_without_side_effects():
    noise, kept = torch.zeros(2, 8, 8), torch.zeros(2, 8, 8)

    class NoisyAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(16, 16)

        def forward(self, x, how):
            q = self.q(x)
            s = q @ q.mT
            if how == "written elsewhere":
                s = noise.add_(s)
            elif how == "out=":
                s = torch.mul(s, 0.5, out=kept)
            elif how == "random":
                s = F.dropout(s, 0.5)
            return s.softmax(-1) @ q

    layer, x = NoisyAttention(), torch.randn(2, 8, 16)
    for how in ("nothing", "written elsewhere", "out=", "random"):
        runs = []
        for watch in (contextlib.nullcontext(), stats := fmtsim.observe(layer, format="e4m3")):
            torch.manual_seed(0)
            noise.zero_(), kept.zero_()
            with watch:
                runs.append((layer(x, how), noise.clone(), kept.clone(), torch.rand(1)))
        assert all(map(torch.equal, *runs))
        assert ("" in stats.layers) == (how == "nothing"), how


def test_rules_are_exceptions_beside_a_format_and_attention_stays(net):
    def seen(**rules):
        with fmtsim.observe(net, format="e4m3", **rules) as stats:
            results(net)
        return {layer: str(operands) for layer, operands in stats.layers.items()}

    plain, ruled = seen(), seen(rules=[Rule(name="^up$")])
    assert "up" in plain and "attention" in ruled  # quantised attention, not its projections alone
    assert ruled == {layer: stats for layer, stats in plain.items() if layer != "up"}


def test_attention_alone_is_observed_once():
    layer = Attention("torch")
    with fmtsim.observe(layer, recipe="fa3_code", every=2) as stats:
        layer(torch.randn(2, 8, 32)), layer(torch.randn(2, 8, 32))
        with pytest.raises(ArgumentError, match="Attention is observed already; leave the outer observe first"):
            fmtsim.observe(layer, recipe="fa3_code").__enter__()
    assert list(stats.history) == [1] and stats[""]["q"].elements == 2 * 8 * 32


def test_attention_that_the_recipe_does_not_multiply_is_said_and_the_model_runs_on():
    layer, x = Attention("torch").bfloat16(), torch.randn(2, 8, 32).bfloat16()
    recipe = Recipe(name="own", linear=linear_config(x="e4m3", w="e4m3", g="e4m3"), attention=VOLTA)
    plain = layer(x)
    with fmtsim.observe(layer, recipe=recipe) as stats:
        assert torch.equal(layer(x), layer(x)) and torch.equal(layer(x), plain)
    assert list(stats.layers) == ["qkv"]
    said = [line for line in str(stats).splitlines() if line.startswith("not seen: attention of ")]
    assert len(said) == 1 and "(model): AttentionConfig q is in high precision, and 'volta.mma' does not" in said[0]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_of_transformers(implementation):
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=16)
    config = transformers.LlamaConfig(**size, num_hidden_layers=1, attn_implementation=implementation)
    model, tokens = transformers.LlamaForCausalLM(config), torch.arange(16).reshape(2, 8)
    padding = torch.ones(2, 8, dtype=torch.int64)
    padding[1, :2] = 0
    plain = model(tokens, attention_mask=padding).logits
    with fmtsim.observe(model, recipe="fa3_code") as stats:
        assert torch.equal(model(tokens, attention_mask=padding).logits, plain)
    assert {layer: list(operands) for layer, operands in stats.layers.items()} == {
        "model.layers.0.self_attn": [*"qkvp", *"so"]
    }


def test_projections_beside_quantised_attention_are_seen():
    config = attention_like(linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None))
    layer = fmtsim.nn.convert_attention(fmtsim.convert(Attention("torch"), format="e4m3"), config)
    with fmtsim.observe(layer) as stats:
        layer(torch.randn(2, 8, 32))
    assert {name: list(operands) for name, operands in stats.layers.items()} == {
        "qkv": ["x_f", "w_f"], "": ["q", "k", "v", "p"]
    }  # fmt: skip


def test_steps_that_are_not_observed_cast_nothing(net):
    with fmtsim.observe(net, recipe="te_mxfp8", every=2) as stats:
        for _ in range(3):
            results(net)
    with fmtsim.observe(net, recipe="te_mxfp8") as once:
        results(net)
    assert list(stats.history) == [1, 3] and stats.history[3] == once.history[1]
    assert stats["moe"]["w_f"].elements == 2 * once["moe"]["w_f"].elements


def test_a_schedule_is_told_the_step_and_the_foot_says_what_is_not_seen():
    layer, recipe = nn.Sequential(nn.Linear(64, 64)), fmtsim.get_recipe("coat")
    recipe = dataclasses.replace(recipe, name="own", rules=(Rule(steps=Steps(first=1)),))
    with fmtsim.observe(layer, recipe=recipe) as stats:
        for _ in range(2):
            layer(torch.ones(4, 64))
    lost = [step["0"]["x_f"].sqnr_db for step in stats.history.values()]
    assert lost[1] == math.inf and stats["0"]["x_f"].elements == 512
    assert str(stats).splitlines()[-2] == "not seen: the cast of activations that the recipe keeps"


def test_errors_say_what_to_do(net):
    converted = fmtsim.convert(copy.deepcopy(net), format="e4m3")
    for ask in ({"recipe": "te_mxfp8"}, {"format": "e4m3"}):
        refused(
            r"Net is converted already, and recipe= and format= are for models tha", fmtsim.observe, converted, **ask
        )
    refused("observe got recipe and format; pass one of them", fmtsim.observe, net, recipe="te_mxfp8", format="e4m3")
    with pytest.raises(ArgumentError, match="observe got rules, which are exceptions of recipe= or format=; pass one"):
        fmtsim.observe(net, rules=[Rule(name="up")])
    refused("fits no", fmtsim.observe, net, format="e4m3", rules=[Rule(name="nowhere")])
    with pytest.raises(
        ArgumentError, match=r"recipe 'unit_scaling' scales the whole model and divides its weights, .*a cop"
    ):
        fmtsim.observe(net, recipe="unit_scaling")
    refused(r"no converted layer in Net; call fmtsim.convert first, or pass recipe= or fo", fmtsim.observe, net)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128)) for _ in range(12)])
    with pytest.raises(
        ArgumentError, match=r"total_steps= so that it has a length; what fmtsim.convert does to a copy of"
    ):
        fmtsim.observe(blocks, recipe="nvfp4_switch")
    with pytest.raises(ArgumentError, match=r"nothing to convert in Linear .*; what fmtsim.convert does to a copy of"):
        fmtsim.observe(nn.Linear(64, 64), recipe="fa3")
    outer, inner = fmtsim.observe(net, format="e4m3"), fmtsim.observe(net, format="e5m2")
    with outer, pytest.raises(ArgumentError, match="Net is observed already; leave the outer observe first"):
        inner.__enter__()
    assert not any("forward" in module.__dict__ for module in net.modules())
