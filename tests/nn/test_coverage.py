# SPDX-License-Identifier: Apache-2.0
"""Coverage: every product that reads a Parameter is counted once, as simulated or as raw, and told in one line."""

import contextlib
import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.nn import convert, report, revert
from fmtsim.support.errors import ArgumentError, CoverageWarning
from tests.support.models import gpt, snapshot
from tests.support.operands import normal
from tests.support.refusals import refused

X = normal(6, 32, seed=0)
LEFT = pytest.mark.filterwarnings("ignore::fmtsim.support.errors.CoverageWarning")


class Raw(nn.Module):
    """Multiply with one Parameter, in a way of one's own, next to a linear layer of 6 x 32 x 32."""

    def __init__(self, how, *sizes):
        super().__init__()
        self.first, self.w, self.how = nn.Linear(32, 32), nn.Parameter(torch.ones(*sizes) / 32), how

    def forward(self, x):
        return self.how(self.first(x), self.w)


def cast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w)


def picked(x, w):
    return torch.bmm(x[:, None], w[torch.tensor([0, 1, 1, 2, 0, 0])])


def grouped(x, w):
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    return torch._grouped_mm(x.bfloat16(), w.bfloat16(), ends)


def stacked(x, w):
    return x @ torch.cat([w[:16], w[16:].clone()]).t().contiguous()


WAYS = {
    "linear": (F.linear, (8, 32), 6 * 32 * 8),
    "matmul": (lambda x, w: x @ w, (32, 8), 6 * 32 * 8),
    "a view": (lambda x, w: x @ w.view(8, 32).t(), (256,), 6 * 32 * 8),
    "addmm": (lambda x, w: torch.addmm(x.new_zeros(8), x, w), (32, 8), 6 * 32 * 8),
    "einsum": (lambda x, w: torch.einsum("bi,eio->ebo", x, w), (3, 32, 8), 3 * 6 * 32 * 8),
    "mv": (lambda x, w: x @ w, (32,), 6 * 32),
    "autocast": (cast, (8, 32), 6 * 32 * 8),
    "checkpoint": (lambda x, w: checkpoint(F.linear, x, w, use_reentrant=False), (8, 32), 6 * 32 * 8),
    "experts picked": (picked, (3, 32, 8), 6 * 32 * 8),
    "grouped": (grouped, (3, 32, 16), 6 * 32 * 16),
    "stacked": (stacked, (24, 32), 6 * 32 * 24),
    "copied": (lambda x, w: x @ torch.empty(32, 8).copy_(w.t()), (8, 32), 6 * 32 * 8),
    "from the left": (lambda x, w: w @ x.t(), (8, 32), 6 * 32 * 8),
    "both sides": (lambda x, w: F.linear(w, w), (8, 32), 8 * 32 * 8),
    "inside no_grad": (torch.no_grad()(F.linear), (8, 32), 6 * 32 * 8),
    "inference": (torch.inference_mode()(F.linear), (8, 32), 6 * 32 * 8),
    "conv1d": (lambda x, w: F.conv1d(x[None], w, padding=1), (8, 6, 3), 8 * 6 * 3 * 32),
    "grouped conv": (lambda x, w: F.conv1d(x[None], w, groups=2), (8, 3, 3), 8 * 3 * 3 * 30),
    "transposed conv": (lambda x, w: F.conv_transpose1d(x[None], w), (6, 4, 3), 6 * 4 * 3 * 32),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), (5, 32, 32), 6 * 5 * 32 * 32),
}


@LEFT
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_multiply_with_a_weight_is_counted_once(way):
    how, sizes, expected = WAYS[way]
    assert report(convert(Raw(how, *sizes), recipe="te_current"), X).coverage.total == 6 * 32 * 32 + expected
    model = convert(Raw(how, *sizes), recipe="te_current", filter_fn=lambda module, name: name == "first")
    found = report(model, X).coverage
    assert (found.simulated, found.total) == (6 * 32 * 32, 6 * 32 * 32 + expected) and not found.estimated
    (row,) = found.raw
    assert (row.layer, row.parameter, row.multiply_adds) == ("", "w", expected)
    assert row.share == expected / found.total and row.reason in ("filter_fn leaves it out", "no emulated form of Raw")


@LEFT
def test_weights_of_one_storage_are_told_apart():
    model, flat = nn.Bilinear(32, 32, 2, bias=False), torch.ones(3, 8, 32)
    for i, name in enumerate("abc"):
        model.register_parameter(name, nn.Parameter(flat[i]))
    model.forward = lambda x: F.linear(x, model.c[4:]) @ model.a[:4]
    whole = convert(nn.Sequential(nn.Linear(32, 32), model), recipe="te_current", filter_fn=lambda m, name: name != "1")
    found = report(whole, X).coverage.raw
    assert [(row.layer, row.parameter, row.multiply_adds) for row in found] == [("1", "c", 768), ("1", "a", 768)]


class Odd(nn.Module):
    """Two layers with one weight, and experts in another layout than ``[experts, N, K]``."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.second.weight, self.w = self.first.weight, nn.Parameter(torch.ones(3, 2, 32, 16) / 32)

    def forward(self, x):
        return torch.einsum("tk,ehkn->tehn", self.second(self.first(x)), self.w)


def test_a_shared_weight_and_an_unknown_layout_of_experts_are_named():
    """A filter decides for each layer, also where two share a weight."""
    with pytest.warns(CoverageWarning, match=r"estimated from shapes: w 60.0 % \(no emulated form of Odd"):
        model = convert(Odd(), recipe="te_current")
    assert report(model, X).summary.endswith("left: w 60.0 % (no emulated form of Odd)")
    model = convert(Odd(), recipe="te_current", filter_fn=lambda module, name: name == "first")
    assert {row.layer or row.parameter: row.multiply_adds for row in report(model, X).coverage.raw} == {
        "second": 6 * 32 * 32,
        "w": 6 * 32 * 96,
    }
    assert torch.equal(model.second(X), F.linear(X, model.first.weight)) and not torch.equal(
        model.first(X), model.second(X)
    )


@LEFT
def test_a_parametrized_layer_is_converted_and_counted():
    model = nn.Sequential(nn.Linear(32, 32), nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)))
    plain, converted = copy.deepcopy(model), convert(model, recipe="te_current")
    for coverage in (report(converted).coverage, report(converted, X).coverage):
        assert coverage.raw == () and coverage.simulated == coverage.total
    layer = convert(nn.Sequential(nn.Linear(32, 32)), recipe="te_current")
    layer[0].weight.data, layer[0].bias.data = plain[1].weight.detach(), plain[1].bias.detach()
    assert torch.equal(converted[1](X), layer(X))
    converted[1](X).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in converted[1].parameters())
    assert torch.equal(copy.deepcopy(converted)(X), converted(X))
    assert type(revert(converted)[1]).__name__ == "ParametrizedLinear"
    assert torch.equal(converted(X), plain(X))


def test_layers_added_after_convert_are_named_with_what_to_do():
    class Adapted(nn.Module):  # as PEFT wraps a layer, and a model
        def __init__(self, layer):
            super().__init__()
            self.base_layer, self.lora_A, self.lora_B = layer, nn.Linear(32, 4), nn.Linear(4, 32)

        def forward(self, x):
            return self.base_layer(x) + self.lora_B(self.lora_A(x))

    model = convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipe="te_current")
    model[0] = Adapted(model[0])
    for batch in (None, X):
        found = report(nn.Sequential(model), batch)
        rows = {row.name: row for row in found.rows}
        assert rows["0.0.base_layer"].detail == "te_current" and not rows["0.0.lora_A"].converted
        assert rows["0.0.lora_A"].detail == "added after convert; fmtsim.revert(model) and convert it again"
        assert found.summary.startswith("te_current: 88.8 % of weight") and "(added after convert; " in found.summary
    again = convert(revert(model), recipe="te_current")
    assert report(again).coverage.raw == ()


NONE = {
    "embedding": (lambda x, w: x + F.embedding(torch.arange(6), w), (11, 32)),
    "looked up": (lambda x, w: x @ F.embedding(torch.arange(6), w).t(), (11, 32)),
    "a sum": (lambda x, w: (x + w) @ x.t(), (6, 32)),
    "in place": (lambda x, w: w.clone().add_(x) @ x.t(), (6, 32)),
    "scores": (lambda x, w: F.scaled_dot_product_attention(*(x[None] * w,) * 3), (32,)),
}


@LEFT
@pytest.mark.parametrize("way", NONE)
def test_what_multiplies_no_weight_is_not_counted(way):
    assert report(convert(Raw(*(NONE[way][0], *NONE[way][1])), recipe="te_current"), X).coverage.total == 6 * 32 * 32


def test_an_operator_of_another_library_is_named():
    library = torch.library.Library("fmtsim_test", "DEF")
    library.define("product(Tensor x, Tensor w) -> Tensor")
    library.impl("product", lambda x, w: x @ w.t(), "CompositeExplicitAutograd")
    line = report(convert(Raw(torch.ops.fmtsim_test.product, 8, 32), recipe="te_current", filter_fn=yes), X).summary
    assert line == (
        "te_current: 100 % of weight multiply-adds simulated (forward and backward); not counted: fmtsim_test.product"
    )


def yes(module, name):
    return True


class Many(nn.Module):
    """Hold a tied head, recurrent and attention layers, noise and statistics."""

    def __init__(self):
        super().__init__()
        self.embedding, self.noise, self.norm = nn.Embedding(11, 16), nn.Dropout(0.5), nn.BatchNorm1d(16)
        self.recurrent = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, scale=1):
        x = self.noise(self.embedding(tokens)) * scale
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.encoder(self.recurrent(x)[0]))


TOKENS = torch.arange(10).view(2, 5)
PARTS = {"recurrent": 10 * 2 * (4 * 8) * (16 + 8), "encoder": 10 * (4 * 16 * 16 + 2 * 16 * 32), "head": 10 * 16 * 11}


@LEFT
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [TOKENS, (TOKENS, 2), {"tokens": TOKENS, "scale": 3}])
def test_a_batch_is_counted_in_any_form_and_the_model_stays_as_it_was(training, batch):
    model = Many().train(training)
    plain = report(model, batch)
    assert plain.coverage.simulated == 0 and plain.coverage.total == sum(PARTS.values())
    assert plain.summary.startswith("Many is not converted: 0 % of weight multiply-adds simulated (forward and backw")
    generator = torch.Generator().manual_seed(1)
    convert(model, recipe="te_delayed", generator=generator)
    before, states = snapshot(model), (torch.get_rng_state(), generator.get_state())
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    found = report(model, batch).coverage
    assert (found.simulated, found.total) == (sum(PARTS.values()),) * 2
    assert found.raw == ()
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(generator.get_state(), states[1])
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert torch.backends.mha.get_fastpath_enabled()
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks


def test_the_estimate_of_a_transformer_is_what_a_batch_says():
    layers = nn.Sequential(nn.MultiheadAttention(32, 2), nn.Linear(32, 64), nn.Linear(64, 16))
    model = convert(Raw(lambda x, w: layers[2](layers[1](layers[0](x, x, x)[0])), 32), recipe="te_current")
    model.layers = convert(layers, recipe="te_current", filter_fn=lambda module, name: name != "2")
    guessed, counted = report(model).coverage, report(model, X).coverage
    assert guessed.estimated and guessed.share == counted.share < 0.95
    assert guessed.backward_share == counted.backward / (2 * counted.total) < 0.95
    assert {(r.layer, r.share, r.reason) for r in guessed.raw} == {(r.layer, r.share, r.reason) for r in counted.raw}


def test_a_read_outside_of_a_layers_forward_is_seen():
    model = convert(Raw(lambda x, w: torch.inner(x, model.first.weight), 1), recipe="te_current")
    (row,) = report(model, X).coverage.raw
    assert (row.layer, row.reason) == ("first", "its weight is read outside of its own forward")
    model = convert(gpt(), recipe="te_current")  # the head is a product with the embedding
    tokens = torch.zeros(2, 32, dtype=torch.long)
    assert report(model, (tokens, tokens)).coverage.share == 1.0
    convert(revert(model), recipe="te_current", filter_fn=lambda module, name: isinstance(module, nn.Linear))
    (row,) = report(model, (tokens, tokens)).coverage.raw
    assert (row.layer, row.share, row.reason) == ("embedding", 1 / 7, "filter_fn leaves it out")


@LEFT
def test_a_depthwise_convolution_that_its_model_computes_has_the_reason_of_its_row():
    model = nn.Sequential(nn.Linear(32, 32))
    model.append(Raw(lambda x, w: torch.conv1d(x[:, :, None], model[1].conv.weight, padding=1, groups=32)[..., 0], 1))
    model[1].conv = nn.Conv1d(32, 32, 3, padding=1, groups=32)
    convert(model, recipe="te_current")
    (raw,), rows = report(model, X).coverage.raw, {row.name: row.detail for row in report(model, X).rows}
    assert raw.reason == rows["1.conv"] and raw.reason.startswith("depthwise: ")


def test_what_a_parametrization_multiplies_itself_is_told_apart_from_its_layer():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 16)), nn.Linear(16, 32))
    assert {row.reason for row in report(model, X).coverage.raw} == {"not converted"}
    convert(model, recipe="te_current")
    (raw,), rows = report(model, X).coverage.raw, {row.name: row.detail for row in report(model, X).rows}
    assert (raw.name, raw.multiply_adds) == (
        "0",
        3 * 32 * 16,
    )  # spectral_norm: two steps of its power iteration, then u W v
    assert raw.reason == rows["0.parametrizations.weight"]
    assert raw.reason == "the product of a parametrization, which makes a weight of it" and rows["0"] == "te_current"


class Shared(nn.Module):
    """Share a weight between two layers, and one between an embedding and a head that is read, not called."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.table, self.head = (
            *(nn.Linear(32, 32) for _ in "ab"),
            nn.Embedding(8, 32),
            nn.Linear(32, 8),
        )
        self.b.weight, self.head.weight = self.a.weight, self.table.weight

    def forward(self, x):
        return torch.inner(self.b(self.a(x)), self.head.weight)


def test_a_shared_weight_is_told_by_who_reads_it():
    model = convert(Shared(), recipe="te_current", filter_fn=lambda module, name: name == "head")
    assert {row.layer: row.reason for row in report(model, X).coverage.raw} == {
        "a": "filter_fn leaves it out", "b": "filter_fn leaves it out",
        "head": "its weight is read outside of its own forward",
    }  # fmt: skip


def test_an_attention_that_was_left_gives_its_reason_for_both_projections():
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 2, 32))
    convert(model, recipe="te_current", filter_fn=lambda module, name: isinstance(module, nn.Linear))
    for found in (report(model, X[None]), report(model)):
        names = [(row.name, row.reason) for row in found.coverage.raw]
        parts = ("self_attn.in_proj_weight", "self_attn.out_proj")
        assert names == [(f"1.{part}", "filter_fn leaves it out") for part in parts]


class Careful(Raw):
    """Call a layer that fails, and go on."""

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.first(x[:, :3])
        return super().forward(x)


def test_a_layer_that_fails_runs_no_more():
    model = Careful(F.linear, 8, 32)
    other = nn.Sequential(model)
    model.first.register_parameter("tied", model.w)
    refused("missing 1 required positional", report, other, (), error=TypeError)
    assert [row.layer for row in report(other, X).coverage.raw] == ["0.first", "0"]


def test_draws_of_a_batch_are_given_back():
    generator = torch.Generator().manual_seed(1)
    model = convert(
        nn.Sequential(nn.Linear(32, 32)),
        recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic"),
        generator=generator,
    )
    state = generator.get_state()
    report(model, X)
    assert torch.equal(generator.get_state(), state) and not torch.equal(model(X), model(X))


@pytest.mark.parametrize("batch", [[X], 4, "x", {X}])
def test_what_is_no_batch(batch):
    with pytest.raises(ArgumentError, match=r"is not a batch; pass a tensor, a tuple of arguments or a dict of keywor"):
        report(nn.Linear(32, 32), batch)


def test_convert_logs_the_summary_and_warns_of_products_without_an_emulated_form(caplog):
    with caplog.at_level(logging.INFO, "fmtsim"):
        model = convert(gpt(), recipe="te_current")
    assert caplog.messages == [report(model).summary]
    with pytest.warns(
        CoverageWarning, match=r"convert leaves 66.6 % of .* Sequential as they are, .* 1.weight_ih, 1.weight_hh 66.6"
    ):
        convert(nn.Sequential(nn.Linear(32, 32), nn.RNNCell(32, 32)), recipe="te_current")
    convert(
        nn.Sequential(nn.Linear(32, 32), nn.RNNCell(32, 32)), recipe="te_current", filter_fn=yes
    )  # who chooses needs no warning
    convert(Raw(lambda x, w: x + w, 1, 32), recipe="te_current")
