# SPDX-License-Identifier: Apache-2.0
"""Layers with one input quantise it once, with the bits of layers that each do, and only where nothing else counts."""

import gc
import weakref

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.layers import emulated_gemm
from fmtsim.gemm.layers import layer as layers
from fmtsim.nn.modules import EmulatedModule
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

X = normal(48, 64).bfloat16()


class Projections(nn.Module):
    """Three layers that read one activation, changed between the second and the third where that is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False).bfloat16() for _ in range(3))
        self.change = lambda h: h

    def forward(self, x):
        h = x * 3
        parts = [self.q(h), self.k(h)]
        return torch.cat([*parts, self.v(self.change(h))], 1)


@pytest.fixture
def cast(monkeypatch):
    """List the tensors that are quantised."""
    seen = []
    quantize = layers.quantize_operand

    def noted(t, *args, **kwargs):
        seen.append(tuple(t.shape))
        return quantize(t, *args, **kwargs)

    monkeypatch.setattr(layers, "quantize_operand", noted)
    emulated_gemm.forget()
    yield seen
    emulated_gemm.forget()


def forward(model, x=X):
    return model(x.clone().requires_grad_())


def inputs_cast(cast):
    return cast.count((48, 64))


@pytest.mark.parametrize("recipe", ["te_current", "te_mxfp8", "te_nvfp4_all", "deepseek_v3"])
def test_the_bits_are_those_of_layers_alone(recipe, monkeypatch, cast):
    found = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(emulated_gemm._SharedInput, "quantizer", None)  # never the same one
        cast.clear()
        model = fmtsim.convert(Projections(), recipe=recipe)
        x = X.clone().requires_grad_()
        y = model(x)
        forwards = inputs_cast(cast)
        y.float().square().mean().backward()
        found.append((forwards, y, x.grad, *(p.grad for p in model.parameters())))
    (once, *bits), (each, *wanted) = found
    assert once == 1 and each == sum(isinstance(layer, EmulatedModule) for layer in model.children()) > 1
    for one, other in zip(bits, wanted, strict=True):
        assert_same_bits(one, other)


def test_an_input_that_changed_is_quantised_again(cast):
    model = fmtsim.convert(Projections(), recipe="te_mxfp8")
    model.change = lambda h: h.mul_(2)
    y = forward(model)
    assert inputs_cast(cast) == 2
    plain = fmtsim.convert(Projections(), recipe="te_mxfp8")
    plain.change = lambda h: h * 2
    assert_same_bits(y, forward(plain))


def test_other_dtypes_and_quantisers_have_their_own(cast):
    model = Projections().float()
    for layer, recipe in ((model.q, "te_current"), (model.k, "te_mxfp8"), (model.v, "te_current")):
        fmtsim.convert(nn.Sequential(layer), recipe=recipe)
    forward(model, X.float())
    assert inputs_cast(cast) == 3
    cast.clear()
    model = fmtsim.convert(Projections().float(), recipe="te_mxfp8")
    inner = model.k.forward

    def in_bfloat16(h):
        with torch.autocast("cpu", torch.bfloat16):
            return inner(h)

    model.k.forward = in_bfloat16
    forward(model, X.float())
    assert inputs_cast(cast) == 3


def test_what_is_remembered_is_not_shared(cast):
    model = fmtsim.convert(Projections(), recipe="te_delayed")
    assert "x_f" in model.q.emulation.products[""].state
    forward(model)
    assert inputs_cast(cast) == 3


def test_another_stream_has_its_own(cast, monkeypatch):
    streams = iter((1, 2, 2, 2, 2))  # of q, which shares, of k, which asks and shares, and of v
    monkeypatch.setattr(emulated_gemm, "_stream", lambda x: next(streams))
    forward(fmtsim.convert(Projections(), recipe="te_mxfp8"))
    assert inputs_cast(cast) == 2


def test_stochastic_inputs_are_drawn_each(cast):
    model = fmtsim.convert(
        Projections(), recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic")
    )
    y = forward(model)
    assert inputs_cast(cast) == 3
    assert not torch.equal(y[:, :64], y[:, 64:128])


def test_without_a_graph_nothing_is_shared(cast):
    model = fmtsim.convert(Projections(), recipe="te_mxfp8")
    with torch.no_grad():
        model(X)
    assert inputs_cast(cast) == 3 and emulated_gemm._last is None


def test_those_who_look_on_see_every_operand(cast, monkeypatch):
    found = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(emulated_gemm._SharedInput, "quantizer", None)  # never the same one
        model = fmtsim.convert(Projections(), recipe="te_mxfp8")
        with fmtsim.observe(model) as seen:
            forward(model)
        found.append([str(seen[name]["x_f"]) for name in "qkv"])
    assert inputs_cast(cast) == 1 + 3 and found[0] == found[1]


def test_nothing_outlives_a_step():
    model = fmtsim.convert(Projections(), recipe="te_mxfp8")
    y = forward(model)
    elements = weakref.ref(emulated_gemm._last.operand.elements)
    y.sum().backward()
    del y
    gc.collect()
    assert emulated_gemm._last is None and elements() is None
