# SPDX-License-Identifier: Apache-2.0
"""LSTM, GRU and RNN by their steps: torch's bits without quantisers, products with them, what is refused."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.nn.modules import EmulatedModule
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

PLAIN = fmtsim.linear_config(x="fp32", w="fp32", g="fp32", scaling=None)
E4M3 = fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="none")
SHAPES = ({}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "batch_first": True, "bias": False},
          {"num_layers": 3, "dropout": 0.5})  # fmt: skip
LAYERS = [(kind, shape) for kind in (nn.LSTM, nn.GRU, nn.RNN) for shape in SHAPES]
LAYERS += [(nn.LSTM, {"proj_size": 8, "num_layers": 2, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})]


def layer(kind, shape):
    torch.manual_seed(0)
    return kind(16, 24, **shape)


def results(module, x, states=None):
    """Return outputs, states and gradients, by torch's own loop: oneDNN's call rounds otherwise."""
    torch.manual_seed(5)  # of dropout
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # about GPUs that this machine has not
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        y, last = module(x, states)
        parts = [y, *(last if isinstance(last, tuple) else (last,))]
        return parts, torch.autograd.grad(sum(t.square().sum() for t in parts), [x, *module.parameters()])


@pytest.mark.parametrize(("kind", "shape"), LAYERS)
def test_without_quantisers_every_bit_is_torchs(kind, shape):
    module, x = layer(kind, shape), normal(5, 3, 16, seed=1).requires_grad_()
    expected = results(module, x)
    assert isinstance(fmtsim.convert(module, recipe=PLAIN), EmulatedModule)
    for found, right in zip(results(module, x), expected, strict=True):
        for one, other in zip(found, right, strict=True):
            assert_same_bits(one, other)
    assert type(fmtsim.revert(module)) is kind


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_that_are_passed_and_sequences_without_a_batch(kind):
    module = layer(kind, {"num_layers": 2})
    for x, width in ((normal(5, 3, 16, seed=1), (2, 3, 24)), (normal(5, 16, seed=1), (2, 24))):
        x = x.requires_grad_()
        states = [normal(*width, seed=seed) for seed in (2, 3)]
        states = tuple(states) if kind is nn.LSTM else states[0]
        expected = results(module, x, states)
        fmtsim.convert(module, recipe=PLAIN)
        for found, right in zip(results(module, x, states), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
        fmtsim.revert(module)


def test_products_are_those_of_operands_that_were_cast():
    module, x = layer(nn.GRU, {}), normal(1, 3, 16, seed=1)
    h = fmtsim.quantize(normal(1, 3, 24, seed=2), "e4m3")
    plain = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(fmtsim.quantize(p, "e4m3") if name.startswith("weight") else p)
    expected = plain(fmtsim.quantize(x, "e4m3"), h)[0]
    assert_same_bits(fmtsim.convert(module, recipe=E4M3)(x, h)[0], expected)
    assert not torch.equal(fmtsim.revert(module)(x, h)[0], expected)


def test_a_model_with_one_is_counted_observed_trained_and_quantised():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    x, model = normal(2, 6, 16, seed=1), fmtsim.convert(Tagger(), recipe="te_current")
    assert fmtsim.report(model, x).coverage.raw == () and fmtsim.report(model).coverage.raw == ()
    assert "te_current" in repr(model.lstm) and "amax" not in repr(model)
    with fmtsim.observe(model) as stats:
        model(x).square().sum().backward()
    assert {"lstm.ih_l0", "lstm.hh_l0"} <= {row.layer for row in stats.rows} if hasattr(stats, "rows") else stats
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    quantised = fmtsim.ptq(Tagger(), "int8_static", [x])
    assert [row.name for row in fmtsim.report(quantised).rows] == ["lstm.ih_l0", "lstm.hh_l0", "head"]
    loaded = fmtsim.load_state(Tagger(), fmtsim.state(quantised))
    assert torch.equal(loaded(x), quantised(x))


def test_packed_sequences_and_wrong_inputs_are_refused():
    model = fmtsim.convert(nn.Sequential(layer(nn.GRU, {})), recipe=E4M3)
    packed = nn.utils.rnn.pack_padded_sequence(normal(5, 2, 16, seed=1), [5, 3])
    refused(r"layer '0': an emulated GRU takes no packed sequences; pass padded ones", model[0], packed)
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
        model[0](normal(5, 2, 15, seed=1))
