# SPDX-License-Identifier: Apache-2.0
"""Whole models scaled by recipes: unit variance at initialisation, every factor by its formula, learning, and back."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.nn import mu_parameter_groups
from fmtsim.nn import unit_scaling as unit
from fmtsim.recipes import Recipe, Replacement, get_recipe
from fmtsim.support.errors import ArgumentError, CoverageWarning
from tests.support.models import gpt, hugging_face, snapshot
from tests.support.operands import float64s
from tests.support.refusals import refused

UNIT = Recipe(name="unit", replace=(Replacement(kind="operations", by="UnitScaled"),))
MU = Recipe(name="mu", replace=(Replacement(kind="operations", by="MuScaled", tau=0.3),))
TOKENS = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(0))
TEXT = torch.tensor(list(b"the quick brown fox jumps over the lazy dog; " * 40))


def loss(model):
    return model(TOKENS[:, :-1], TOKENS[:, 1:])


def results(model):
    model.zero_grad()
    y = loss(model)
    y.backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def scaled_weights(model):
    """Divide weights by their standard deviation, as the recipes do; the GPT's positions are zero and drawn."""
    for p in model.parameters():
        if p.dim() > 1:
            p.data.div_(p.data.std()) if p.data.std() else nn.init.normal_(
                p, generator=torch.Generator().manual_seed(5)
            )


def unit_gpt(model, tokens, targets):
    """Return the loss of a GPT, written with the operations of unit scaling."""

    def linear(layer, x):
        return unit.scaled_product(F.linear, x, layer.weight, layer.bias, unit.linear_factors(x, layer.weight))

    def norm(layer, x):
        return unit.layer_norm(x, layer.weight, layer.bias)

    def attention(part, x):
        q, k, v = (t.unflatten(-1, (part.heads, -1)).transpose(1, 2) for t in linear(part.qkv, x).chunk(3, -1))
        return linear(part.out, unit.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    x = unit.add(unit.embedding(tokens, model.embedding.weight), model.position[: tokens.shape[1]])
    for i, block in enumerate(model.blocks):
        count = 2 * len(model.blocks)
        branch, skip = unit.residual_split(x, (count / 2 + 2 * i) ** -0.5)
        x = unit.residual_add(attention(block.attention, norm(block.norm1, branch)), skip, (count / 2 + 2 * i) ** -0.5)
        branch, skip = unit.residual_split(x, (count / 2 + 2 * i + 1) ** -0.5)
        y = linear(block.down, unit.gelu(linear(block.up, norm(block.norm2, branch))))
        x = unit.residual_add(y, skip, (count / 2 + 2 * i + 1) ** -0.5)
    x, w = norm(model.norm, x), model.embedding.weight
    logits = unit.scaled_product(F.linear, x, w, None, unit.linear_factors(x, w, constrained=False, power=1.0))
    return unit.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mu_gpt(model, tokens, targets, tau=0.3):
    """Return the loss of a GPT as muS has it: norms behind the branches, multipliers behind the products."""

    def linear(layer, x):
        return F.linear(x, layer.weight, layer.bias) * x.shape[-1] ** -0.5

    def attention(part, x):
        q, k, v = (t.unflatten(-1, (part.heads, -1)).transpose(1, 2) for t in linear(part.qkv, x).chunk(3, -1))
        return linear(part.out, F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    x = (model.embedding(tokens) + model.position[: tokens.shape[1]]) * 0.5**0.5
    for block in model.blocks:
        x = math.sqrt(1 - tau) * x + math.sqrt(tau) * block.norm1(attention(block.attention, x))
        x = math.sqrt(1 - tau) * x + math.sqrt(tau) * block.norm2(linear(block.down, F.gelu(linear(block.up, x))))
    logits = F.linear(model.norm(x), model.embedding.weight) / x.shape[-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("recipe", "written"), [(UNIT, unit_gpt), (MU, mu_gpt)], ids=["unit", "mu"])
def test_a_model_becomes_what_one_writes_by_hand(recipe, written):
    """In float64: the loss and every gradient are those of the model written with scaled operations."""
    ours, plain = gpt().double(), gpt().double()
    scaled_weights(plain)
    fmtsim.convert(ours, recipe, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-6)
    ours.load_state_dict(plain.state_dict())
    y = written(plain, TOKENS[:, :-1], TOKENS[:, 1:])
    y.backward()
    torch.testing.assert_close(
        results(ours), [y.detach(), *(p.grad for p in plain.parameters())], rtol=1e-8, atol=1e-10
    )


def sizes(model, run):
    """Return the standard deviations of the outputs of modules, and of the gradients of these, by name."""
    values, gradients = {}, {}

    def look(name):
        def hook(module, inputs, y):
            values[name] = float(y.detach().std())
            y.register_hook(lambda g: gradients.__setitem__(name, float(g.std())))

        return hook

    for name, module in model.named_modules():
        if name and not name.startswith("fmtsim"):
            module.register_forward_hook(look(name))
    run()
    return values, gradients


def test_unit_variance_at_initialisation():
    """All values and gradients of a GPT lie within a factor of 4 of 1, those of a plain one do not.

    The formulas hold for independent normal numbers. Deep causal attention averages vectors that share a mean, which
    grows from block to block, so that the largest values are near 3; a branch's gradients shrink by its nonlinearity.
    """
    model = fmtsim.convert(GPT(GPTConfig(context=32, width=128, layers=4, heads=4), 0), "unit_scaling", generator=0)
    loss(model)
    values, gradients = sizes(model, lambda: loss(model).backward())
    assert len(values) == len(gradients) == 34
    assert min(values.values()) > 0.9 and max(values.values()) < 4
    assert min(gradients.values()) > 0.25 and max(gradients.values()) < 4
    of_weights = {name: float(p.grad.std()) for name, p in model.named_parameters() if p.dim() > 1}
    assert min(of_weights.values()) > 0.25 and max(of_weights.values()) < 4
    plain = GPT(GPTConfig(context=32, width=128, layers=4, heads=4), 0)
    _, gradients = sizes(plain, lambda: loss(plain).backward())
    assert max(gradients.values()) < 1e-2
    with fmtsim.observe(model) as stats:
        loss(model).backward()
    assert max(found.underflow_percent for layer in stats.layers.values() for found in layer.values()) < 1


def test_values_of_unit_variance_under_mus():
    """The residual stream keeps its variance, and branches are normalised; gradients are those of the function."""
    model = fmtsim.convert(GPT(GPTConfig(context=32, width=128, layers=4, heads=4), 0), "mu_s", generator=0)
    loss(model)
    values, _ = sizes(model, lambda: loss(model).backward())
    stream = [values[name] for name in values if name.count(".") == 1]
    assert len(stream) == 4 and all(0.9 < size < 1.1 for size in stream)
    assert min(values.values()) > 0.3 and max(values.values()) < 1.1


def mlp(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 16))


def test_a_perceptron():
    """Its readout has 1 / K, its loss is outside: by torch's the gradients are too small, which is told once."""
    x, targets = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)), torch.arange(512) % 16
    model = fmtsim.convert(mlp(), "unit_scaling")
    values, gradients = sizes(model, lambda: unit.cross_entropy(model(x), targets).backward())
    assert all(0.9 < size < 1.3 for name, size in values.items() if name != "4")  # ReLU's have a mean beside
    assert values["4"] == pytest.approx(256**-0.5, rel=0.4) and all(0.3 < size < 3 for size in gradients.values())
    model = fmtsim.convert(mlp(), "unit_scaling")
    with pytest.warns(CoverageWarning, match=r"gradient of the output of Sequential is of size 0.00047, .*takes it to"):
        F.cross_entropy(model(x), targets).backward()
    F.cross_entropy(model(x), targets).backward()  # once


@pytest.mark.parametrize("name", ["unit_scaling", "mu_s"])
def test_a_scaled_model_learns(name):
    model = fmtsim.convert(gpt(width=32, layers=1), name, generator=0)
    optimizer = torch.optim.AdamW(mu_parameter_groups(model, 0.03), betas=(0.9, 0.95), weight_decay=0.0)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(60):
        at = torch.randint(0, len(TEXT) - 33, (8,), generator=generator)
        batch = torch.stack([TEXT[i : i + 33] for i in at.tolist()])
        losses.append(model(batch[:, :-1], batch[:, 1:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[0].item() == pytest.approx(math.log(256), abs=0.1) and losses[-1].item() < 2.5


def test_what_is_said():
    model = gpt()
    fmtsim.convert(model, "unit_scaling")
    loss(model)
    refused("layer 'norm' is a part of a model that recipe 'unit_scaling' scales, and", model.norm, torch.ones(1, 64))
    said = fmtsim.report(model, (TOKENS[:, :-1], TOKENS[:, 1:]))
    assert said.summary.startswith(
        "unit_scaling: 100 % of weight multiply-adds simulated (forward and backward); attention products, "
    )
    assert "; weights were divided by their standard deviations and stay so after revert" in said.summary
    assert {row.name: row.detail for row in said.rows}["(model)"].startswith("operations of UnitScaled")
    assert str(model).count(", times 1 / sqrt(K))") == 5 and str(model).count(", times 1 / K)") == 1
    counted = fmtsim.report(fmtsim.convert(gpt(), "te_current"), (TOKENS[:, :-1], TOKENS[:, 1:]))
    assert counted.coverage.total == said.coverage.total  # the batch that finds branches is not counted
    own = nn.Sequential(fmtsim.nn.UnitLinear(8, 8))
    weight = own[0].weight.detach().clone()
    assert "'0' and others bring factors of their own" in fmtsim.report(fmtsim.convert(own, "unit_scaling")).summary
    assert torch.equal(own[0].weight, weight)


class Summed(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.head, self.count = nn.Linear(16, 8), count

    def forward(self, x):
        z, targets = self.head(x), torch.arange(len(x)) % 8
        return F.cross_entropy(z, targets, reduction="sum") / self.count if self.count else F.cross_entropy(z, targets)


@pytest.mark.parametrize("count", [32, torch.tensor(32)])
def test_a_sum_of_losses_that_is_divided_is_a_mean(count):
    """As Hugging Face's Trainer has it; the gradient is that of the mean."""
    found = []
    for model in (Summed(count), Summed(None)):
        model.load_state_dict({"head.weight": float64s(8, 16).float(), "head.bias": torch.zeros(8)})
        fmtsim.convert(model, UNIT)
        y = model(float64s(32, 16, seed=1).float())
        y.backward()
        found.append([y.detach(), model.head.weight.grad])
    torch.testing.assert_close(*found)


class Run(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.forward = run


class PostNorm(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(size, size) for _ in range(2)), nn.LayerNorm(size)

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)) + layer(x))
        return x


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (PostNorm, r"recipe 'unit_scaling' cannot scale PostNorm: tanh in the model \(PostNorm\), which has no scaled "
         r"form; an addition in the model \(PostNorm\), of which a norm layer read no operand. Write these with fmts"),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1)),
         r"softmax in 1 \(Softmax\), which has no scaled form"),
        (lambda: nn.Sequential(nn.Linear(16, 16), Run(lambda x: torch.inner(x, x))), r"inner in 1 \(Run\), which has"),
        (lambda: nn.Sequential(nn.Linear(16, 16), Run(lambda x: torch.addmm(x, x, x.new_ones(16, 16)))), "addmm in 1"),
    ],
)  # fmt: skip
def test_what_is_not_seen_is_named_with_the_first_batch(make, said):
    model = fmtsim.convert(make(), "unit_scaling")
    for _ in range(2):
        refused(said, model, torch.randn(4, 16))
    fmtsim.revert(model)(torch.randn(4, 16))


def test_what_is_refused_by_convert():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    before = snapshot(model)
    refused("cannot scale '': TransformerEncoderLayer is one call of torch, which hi", fmtsim.convert, model, "mu_s")
    assert snapshot(model) == before
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    refused("rescales weights, and 'weight' of '0' is on the meta device; give the mo", fmtsim.convert, model, "mu_s")
    with pytest.raises(ArgumentError, match="Replacement tau=0.0 is not a part of the variance; choose one between 0 "):
        Replacement(kind="operations", by="MuScaled", tau=0.0)
    with pytest.raises(ArgumentError, match="Replacement by='UnitScaled' is unknown; choose 'SmoothSwiGLU'"):
        Replacement(kind="swiglu", by="UnitScaled")
    assert str(get_recipe("mu_s").replace[0]).endswith("weights of unit variance, residual branches of variance 0.4")


def test_parameter_groups():
    """Hidden layers by their fan-in; embeddings by their features under unit scaling; the head is not hidden."""
    for name, of_embedding in (("mu_s", 1.0), ("unit_scaling", 2.0)):
        model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 8))
        groups = list(mu_parameter_groups(fmtsim.convert(model, name), 1.0))
        assert [group["lr"] for group in groups] == [of_embedding, 2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "name"), [("llama", "unit_scaling"), ("llama", "mu_s"), ("gpt2", "mu_s")])
def test_models_of_hugging_face(kind, name):
    """Their loss begins where chance is, and a batch's gradients reach every weight."""
    model = fmtsim.convert(hugging_face(kind), name, generator=0).train()
    y = model(input_ids=TOKENS[:, :-1], labels=TOKENS[:, :-1]).loss
    y.backward()
    assert y.item() == pytest.approx(math.log(256), abs=0.1)
    assert all(p.grad is not None and p.grad.count_nonzero() for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("recipe", ["unit_scaling", "mu_s"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:.*loss")
def test_a_checkpoint_around_the_model_keeps_gradients(recipe, reentrant):
    """From the first batch on, which the model sees twice."""
    plain, again = (
        fmtsim.convert(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 80, bias=False)), recipe=recipe)
        for _ in range(2)
    )
    again.load_state_dict(plain.state_dict())
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for _ in range(2):
        plain(x).square().mean().backward()
        checkpoint(again, x, use_reentrant=reentrant).square().mean().backward()
    for one, two in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
