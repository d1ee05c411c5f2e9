# SPDX-License-Identifier: Apache-2.0
import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from benchmarks.attribution import spearman, tokens
from fmtsim.gemm.layers.config import OPERANDS
from fmtsim.lab.analysis.attribution import FIELDS, Attribution, AttributionRow
from fmtsim.lab.analysis.operand_probe import Probe
from fmtsim.lab.training.decoders import GPT, GPTConfig, Llama
from tests.support.refusals import refused

SIZES = GPTConfig(context=32, width=32, layers=2, heads=2, vocabulary=64)


def trained(kind):
    model, batches = kind(SIZES, seed=0), [(t[:, :-1], t[:, 1:]) for t in map(tokens, range(30))]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return model, batches[0]


@pytest.fixture(scope="module")
def gpt():
    return trained(GPT)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5))
    x = torch.randn(512, 16)
    labels = (x[:, :5] + 0.3 * torch.randn(512, 5)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model, x, lambda output: F.cross_entropy(output, labels)


def correlation(estimate, exact, by):
    pairs = [(getattr(a, FIELDS[by]), getattr(b, FIELDS[by])) for a, b in zip(estimate.rows, exact.rows, strict=True)]
    return spearman(*zip(*(pair for pair in pairs if None not in pair), strict=True))


def only(operand, layer, config):
    """Return what gives one layer one quantiser, and high precision to the rest."""
    high = fmtsim.Quantizer()
    kept = [q if name == operand else high for name, q in config.operands.items()]
    one = fmtsim.LinearConfig(**{p: fmtsim.Gemm(a=kept[2 * i], b=kept[2 * i + 1]) for i, p in enumerate(_PRODUCTS)})
    return lambda name: one if name == layer else fmtsim.LinearConfig()


_PRODUCTS = ("fprop", "dgrad", "wgrad")


@pytest.mark.parametrize(("kind", "recipe"), [(GPT, "te_nvfp4_all"), (Llama, "te_current")])
def test_estimates_rank_operands_as_switching_them_does(gpt, kind, recipe):
    model, batch = gpt if kind is GPT else trained(kind)
    estimate, exact = (fmtsim.attribute(model, batch, recipe=recipe, exact=each) for each in (False, True))
    assert estimate.passes == (4, 2)
    for by in ("loss", "gradient"):
        assert correlation(estimate, exact, by) > 0.9
    local, flowing = [], []
    for a, b in zip(estimate.rows, exact.rows, strict=True):
        if b.gradient_noise:
            (local if a.operand in ("g_w", "x_w") else flowing).append(math.log(a.gradient_noise / b.gradient_noise))
    assert local and max(map(abs, local)) < 0.01  # the same error, through gradients in float32 the second time
    assert abs(sum(flowing) / len(flowing)) < math.log(2)  # of a random direction
    wrong = copy.copy(estimate)
    object.__setattr__(wrong, "rows", estimate.rows[6:] + estimate.rows[:6])
    assert correlation(wrong, exact, "loss") < 0.9


def test_without_signs_operands_of_one_tensor_add_up(gpt, monkeypatch):
    model, batch = gpt
    exact = fmtsim.attribute(model, batch, format="e2m1", exact=True)
    assert correlation(fmtsim.attribute(model, batch, format="e2m1"), exact, "loss") > 0.97
    monkeypatch.setattr(Probe, "signs", lambda self, site, operand: torch.zeros(self._samples))
    first_order = fmtsim.attribute(model, batch, format="e2m1")
    assert correlation(first_order, exact, "loss") < 0.97


def test_exact_costs_are_those_of_a_model_converted_so(gpt):
    model, batch = gpt
    exact = fmtsim.attribute(model, batch, format="e4m3", exact=True)
    config = fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling="tensor")
    plain = fmtsim.convert(copy.deepcopy(model), recipe=lambda name: fmtsim.LinearConfig())(*batch).item()
    assert exact.plain_loss == plain
    for row in exact.rows:
        if row.operand in ("x_f", "w_f") and row.layer in ("blocks.0.up", "blocks.1.attention.qkv", "embedding"):
            alone = fmtsim.convert(copy.deepcopy(model), recipe=only(row.operand, row.layer, config))
            with torch.no_grad():
                assert row.loss == alone(*batch).item() - plain, row


def test_exact_noise_is_that_of_gradients_of_a_model_converted_so(gpt):
    model, batch = (part.double() if isinstance(part, nn.Module) else part for part in copy.deepcopy(gpt))
    config = fmtsim.linear_config(x="e2m1", w="e2m1", g="e2m1", scaling="tensor")
    exact = fmtsim.attribute(model, batch, recipe=config, exact=True, filter_fn=lambda module, name: "down" in name)
    model(*batch).backward()
    size = sum(p.grad.square().sum().item() for p in model.parameters())
    found = {(row.layer, row.operand): row.gradient_noise for row in exact.rows}
    for operand in OPERANDS[2:]:
        alone = fmtsim.convert(copy.deepcopy(model), recipe=only(operand, "blocks.0.down", config))
        alone.zero_grad()
        alone(*batch).backward()
        pairs = zip(alone.parameters(), model.parameters(), strict=True)
        noise = sum((a.grad - b.grad).square().sum().item() for a, b in pairs)
        # squares are summed in float32, and errors are added to gradients that were computed apart
        assert found["blocks.0.down", operand] == pytest.approx(noise / size, rel=1e-5)


UNIT = fmtsim.Datapath(block=16, fraction_bits=3, accumulator="e8m3", rounding="toward_zero")


def test_a_loss_on_a_unit_is_operands_and_arithmetic(gpt):
    model, batch = gpt
    found = fmtsim.attribute(model, batch, format="e4m3", target=UNIT)
    losses = [fmtsim.convert(copy.deepcopy(model), format="e4m3", target=t)(*batch).item() for t in (None, UNIT)]
    assert [found.rounded_loss, found.simulated_loss] == losses
    operands, arithmetic = losses[0] - found.plain_loss, losses[1] - losses[0]
    assert f" without rounding, {losses[1] - found.plain_loss:+.3g} with all of the forward pass = " in str(found)
    assert f" = {operands:+.3g} operands {arithmetic:+.3g} arithmetic" in str(found)
    assert found.worst(1)[0].operand == "fprop" and found.worst(1, by="gradient")[0].operand in ("dgrad", "wgrad")
    # one at a time: a layer's product on the unit against the same rounded operands in float32, the rest plain
    exact, name = fmtsim.attribute(model, batch, format="e4m3", target=UNIT, exact=True), "blocks.1.down"
    config = fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling="tensor")
    losses = []
    for target in (None, UNIT):
        one = config.on(target=target)
        how = {layer: fmtsim.LinearConfig() for layer, _ in model.named_modules()} | {name: one}
        losses.append(fmtsim.convert(copy.deepcopy(model), how.get)(*batch).item())
    (row,) = (row for row in exact.rows if (row.layer, row.operand) == (name, "fprop"))
    assert row.loss == pytest.approx(
        losses[1] - losses[0], abs=1e-7
    ) and row.format == "on " + "blocks of 16, F=3, " + ("toward_zero to e8m3")
    of_units = [(a, b) for a, b in zip(found.rows, exact.rows, strict=True) if a.operand in _PRODUCTS[1:]]
    assert spearman(*zip(*((a.gradient_noise, b.gradient_noise) for a, b in of_units), strict=True)) > 0.8


def test_kl_is_estimated_from_logits(classifier):
    model, x, loss = classifier
    given = {"format": "e4m3", "logits": lambda output: output}
    estimate, exact = (fmtsim.attribute(model, x, loss, exact=each, **given) for each in (False, True))
    assert estimate.passes == (4, 4)
    both = [(a.kl, b.kl) for a, b in zip(estimate.rows, exact.rows, strict=True) if a.kl is not None]
    assert all(a == pytest.approx(b, rel=0.3) for a, b in both)  # to second order, from two random directions
    with torch.no_grad():
        converted = fmtsim.convert(copy.deepcopy(model), format="e4m3")
        p, q = (F.log_softmax(each(x), 1) for each in (model, converted))
    assert exact.rounded_kl == pytest.approx((p.exp() * (p - q)).sum(1).mean().item(), rel=1e-4)  # sums in float32
    silent = fmtsim.attribute(model, x, loss, format="e4m3")
    assert {row.kl for row in silent.rows} == {None} and silent.rounded_kl is None
    assert silent.notes == (
        "no KL: the model returns a tensor (512, 5), and whether that holds logits cannot be told; pass "
        "logits=lambda output: ...",
    )


class Times(nn.Module):
    def forward(self, x):
        return 4096.0 * x


@pytest.mark.parametrize("exact", [False, True])
def test_a_layer_that_was_made_to_underflow_is_named_first(classifier, exact):
    model, x, loss = classifier
    small = copy.deepcopy(model)
    with torch.no_grad():
        small[2].weight /= 4096
        small[2].bias /= 4096
    small.insert(3, Times())
    found = fmtsim.attribute(small, x, loss, fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3"), exact=exact)
    assert (found.worst(1)[0].layer, found.worst(1)[0].operand) == ("2", "w_f")
    assert found.rules() == (fmtsim.recipes.Rule(name="^2$"),)
    before, after = (
        fmtsim.convert(copy.deepcopy(small), recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3"), rules=rules)
        for rules in ((), found.rules())
    )
    plain = loss(small(x)).item()
    assert loss(after(x)).item() - plain < 0.1 * (loss(before(x)).item() - plain)


def test_a_model_stays_as_it_is_and_so_do_random_states(gpt):
    model, batch = copy.deepcopy(gpt)
    fmtsim.convert(model, recipe="te_delayed").train()
    model(*batch).backward()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads, state = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    def nan(output):
        raise ValueError("no loss")

    fmtsim.attribute(model, batch)
    fmtsim.attribute(model, batch, exact=True)
    refused("no loss", fmtsim.attribute, model, batch, nan, error=ValueError)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(p.requires_grad for p in model.parameters())


ROUNDED = fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic")


def test_a_seed_fixes_stochastic_rounding(gpt):
    model, batch = gpt
    first, again, other = (fmtsim.attribute(model, batch, recipe=ROUNDED, generator=seed).rows for seed in (1, 1, 2))
    assert first == again and first != other


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant=None):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x, y):
        h = self.inner.embedding(x)
        for block in self.inner.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return F.cross_entropy((h @ self.inner.embedding.weight.T).flatten(0, 1), y.flatten())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_cost_the_same(gpt, reentrant):
    model, batch = gpt
    plain = fmtsim.attribute(Checkpointed(model), batch, format="e4m3")
    assert fmtsim.attribute(Checkpointed(model, reentrant), batch, format="e4m3").rows == plain.rows


def test_attention_has_rows_and_no_rules(gpt):
    model, batch = gpt
    estimate, exact = (fmtsim.attribute(model, batch, recipe="fa3", exact=each) for each in (False, True))
    assert [row.operand for row in estimate.rows] == ["q", "k", "v", "p"] * 2
    assert correlation(estimate, exact, "loss") > 0.9
    refused("no layer with rules has a cost by='loss'; no operand of", estimate.rules)


def test_what_is_not_finite_is_named(gpt, classifier):
    model, batch = copy.deepcopy(gpt)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output * math.nan)
    with pytest.raises(fmtsim.errors.ArgumentError) as caught:
        fmtsim.attribute(model, batch, format="e4m3")
    assert str(caught.value) == (
        "the loss is nan without any rounding: the input of blocks.1.attention.qkv is the first that is NaN or Inf; "
        "look for it in the batch, the weights and loss="
    )
    model, x, loss = classifier
    config = fmtsim.linear_config(x="e5m2", w=None, g=None, overflow="ieee")
    for exact in (False, True):
        found = fmtsim.attribute(model, x * 1e6, loss, recipe=config, exact=exact)
        assert found.worst(1)[0].loss == math.inf and found.rules()[0].name == "^0$"
        assert "rounding gives NaN or Inf: 0 x_f" in found.notes[-1] and found.to_dict()["rows"][0]["loss"] == "inf"


def test_what_a_batch_does_not_run_has_no_rows_and_a_note():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.used(x).square().mean()

    found = fmtsim.attribute(Half(), torch.randn(8, 8), format="e4m3")
    assert {row.layer for row in found.rows} == {"used"} and "not run by this batch: idle" in found.notes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "GPT is not converted; pass recipe= or format=, or call fmtsim.convert"),
        ({"loss": 3}, "loss=3 is not a function; write loss=lambda output: ..."),
        ({"generator": -1}, "attribute generator=-1 is not a seed; pass a whole number from 0"),
        ({"batch": 3}, "batch=3 is not a batch; pass a tensor, a tuple of arguments or a dict of keywords"),
        ({"loss": lambda output: 1.0}, "loss= returned a float; return a tensor with one number that gradients go"),
        ({"loss": torch.detach}, "loss= returned a tensor (); return a tensor with one number that gradie"),
        ({"logits": lambda output: output}, "logits= returned a tensor (); return [..., classes], two or more, tha"),
        ({"recipe": "fp32"}, "no operand of GPT is rounded; choose another recipe"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(gpt, given, message):
    model, batch = gpt
    recipe = {} if not given or "recipe" in given else {"format": "e4m3"}
    with pytest.raises(fmtsim.errors.ArgumentError) as caught:
        fmtsim.attribute(model, **{"batch": batch, **recipe, **given})
    assert str(caught.value).startswith(message)


def test_a_converted_model_takes_no_recipe_and_a_model_without_loss_is_told(gpt, classifier):
    model, batch = gpt
    converted = fmtsim.convert(copy.deepcopy(model), format="e4m3")
    with pytest.raises(fmtsim.errors.ArgumentError, match="GPT is converted already; leave recipe= and other formats"):
        fmtsim.attribute(converted, batch, format="e4m3")
    message = r"the model returned a tensor \(512, 5\), in which there is no loss; pass loss=lambda output"
    refused(message, fmtsim.attribute, classifier[0], classifier[1], format="e4m3")


def made(**layers):
    rows = [
        AttributionRow(layer=name, operand=operand, format="e4m3", loss=loss, module=name)
        for name, losses in layers.items()
        for operand, loss in zip(("x_f", "w_f"), losses, strict=True)
    ]
    rows.append(AttributionRow(layer="a", operand="g_w", format="e5m2", gradient_noise=0.25, module="a"))
    return Attribution(
        rows=tuple(rows),
        exact=True,
        plain_loss=2.0,
        rounded_loss=2.5,
        simulated_loss=2.5,
        passes=(7, 2),
        notes=("a note",),
    )


def test_rules_take_the_dearest_layers_until_they_carry_the_share():
    found = made(a=(0.1, 0.2), b=(0.5, 0.1), c=(-0.3, 0.1), d=(0.1, 0.0))
    assert found.layers() == pytest.approx({"b": 0.6, "a": 0.3, "d": 0.1, "c": -0.2})
    assert [rule.name for rule in found.rules(0.6)] == ["^b$"]
    assert [rule.name for rule in found.rules(0.61)] == ["^b$", "^a$"]
    assert [rule.name for rule in found.rules(1.0)] == ["^b$", "^a$", "^d$"]
    assert [rule.name for rule in found.rules(by="gradient")] == ["^a$"]
    assert found.advice() == "keep b in high precision: 60 % of the loss that rounding costs"
    assert [row.operand for row in found.worst(2)] == ["x_f", "w_f"]
    assert found.worst(9, by="gradient")[0].gradient_noise == 0.25 and len(found.worst(9, by="gradient")) == 1
    assert made(a=(-0.1, 0.0)).advice() == "no layer adds to the loss that rounding costs"
    for call, message in (
        (lambda: found.rules(0), "share=0 is not a part of the cost; pass a number above 0, at most 1"),
        (lambda: found.rules(by="kl"), "no layer with rules has a cost by='kl'; the model's logits are not known"),
        (lambda: found.worst(0), "worst n=0 is not allowed; pass a whole number from 1"),
        (lambda: found.worst(by="losses"), "by='losses' is unknown; choose 'loss', 'kl' or 'gradient'"),
        (lambda: found.plot(by="kl"), "there is no cost by='kl' to draw; the model's logits are not known"),
    ):
        with pytest.raises(fmtsim.errors.ArgumentError) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_an_attribution_is_text_html_json_and_a_picture(tmp_path):
    found = made(a=(0.1, 0.25), b=(0.5, -0.125))
    assert str(found).splitlines() == [
        "layer  operand  format       loss  gradient noise",
        "-------------------------------------------------",
        "b      x_f      e4m3    +5.00e-01",
        "a      w_f      e4m3    +2.50e-01",
        "a      x_f      e4m3    +1.00e-01",
        "b      w_f      e4m3    -1.25e-01",
        "a      g_w      e5m2                     2.50e-01",
        "loss 2 without rounding, +0.5 with all operands of the forward pass",
        "operands switched one at a time, from 7 forward and 2 backward passes",
        "a note",
    ]
    assert "+5.00e-01" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["rows"][1] == {
        "layer": "a", "operand": "w_f", "format": "e4m3", "loss": 0.25, "kl": None, "gradient_noise": None,
        "module": "a",
    }  # fmt: skip
    found.plot(tmp_path / "a.png", title="what costs")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_counts_layers_whose_bars_nobody_would_see():
    pytest.importorskip("matplotlib")
    panel = made(a=(1.0, 0.0), b=(0.001, 0.0), c=(-0.04, 0.0), d=(0.002, 0.0), e=(0.0, 0.0)).plot().axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["c", "b", "d", "a"]
    assert panel.get_xlabel().endswith("\nnot drawn, with shorter bars: 1 of 5 layers")
    panel = made(a=(0.1, 0.2), b=(0.5, -0.5), c=(0.3, 0.0), d=(0.2, 0.0)).plot().axes[0]  # b's bars cancel and are long
    assert len(panel.get_yticklabels()) == 4 and "not drawn" not in panel.get_xlabel()


def test_a_layer_that_runs_twice_costs_what_two_layers_of_its_weights_do():
    class Two(nn.Module):
        def __init__(self, shared):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(16, 16)
            self.b = self.a if shared else copy.deepcopy(self.a)

        def forward(self, x):
            return self.b(F.gelu(self.a(x))).square().mean()

    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    once, both = (fmtsim.attribute(Two(shared), x, format="e4m3").rows for shared in (True, False))
    assert {row.layer for row in once} == {"a"} and {row.layer for row in both} == {"a", "b"}
    losses = [sum(row.loss for row in rows if row.operand == "w_f") for rows in (once, both)]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)  # of first order, each with random signs of its own
    noise = {row.operand: row.gradient_noise for row in once if row.gradient_noise is not None}
    for operand, value in noise.items():  # errors of both calls meet in one gradient, and are independent
        each = [row.gradient_noise for row in both if row.operand == operand]
        assert math.hypot(*each) / 2 < value < 2 * sum(each), operand
