# SPDX-License-Identifier: Apache-2.0
"""Delayed scales under activation checkpointing: a repeated forward pass uses the scales of its first run."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmtsim.nn import SmoothSwiGLU, convert, flash_attention_3, recipe_state
from fmtsim.recipes import Recipe, get_recipe
from fmtsim.scaling import repeats
from fmtsim.scaling.history import DelayedScale, FrozenScale
from fmtsim.scaling.repeats import Calls
from tests.support.bits import all_same_bits
from tests.support.operands import normal

ATTENTION = Recipe(name="attention", attention=flash_attention_3(unit=None))


class SelfAttention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]


class Stack(nn.Module):
    """Blocks of two layers, each behind a checkpoint of its own kind: None, reentrant or not, nested, twice, all."""

    def __init__(self, how=None, attention=False):
        super().__init__()
        torch.manual_seed(0)
        middle = SelfAttention if attention else nn.GELU
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), middle(), nn.Linear(32, 32)) for _ in range(3))
        self.how = how

    def forward(self, x):
        def whole(x):
            for block in self.blocks:
                x = block(x)
            return x

        if self.how is None:
            return whole(x)
        if self.how == "all":
            return checkpoint(whole, x, use_reentrant=False)
        if self.how == "nested":

            def outer(x):
                return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False) * 1.0

            return self.blocks[2](checkpoint(outer, x, use_reentrant=False))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def batch(seed):
    return normal(16, 32, seed=seed) * (1 + seed)


def run(model, steps=4, calls=1, compiled=None):
    """Train, scales moving a lot from step to step; return losses, gradients and what is remembered."""
    seen, call = [], model if compiled is None else compiled
    for step in range(steps):
        model.zero_grad()
        loss = sum(call(batch(step + i).requires_grad_()).square().mean() for i in range(calls))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    state = recipe_state(model)["layers"]
    return [*seen, *(t for layer in state.values() for operand in layer.values() for t in operand.values())]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "all", "nested"])
@pytest.mark.parametrize("name", ["te_delayed", "fp8lm", "intel_2t"])
def test_bits_and_memory_are_those_without_checkpointing(name, how):
    plain, other = (convert(Stack(kind), recipe=name, generator=None) for kind in (None, how))
    torch.manual_seed(0)
    expected = run(plain)
    torch.manual_seed(0)
    found = run(other)
    assert all_same_bits(expected, found)


@pytest.mark.parametrize("how", ["not reentrant", "all"])
def test_a_model_that_is_called_twice_a_step(how):
    """Both calls of a layer get their own scales again, whichever is repeated first."""
    plain, other = (convert(Stack(kind), recipe="te_delayed") for kind in (None, how))
    assert all_same_bits(run(plain, calls=3), run(other, calls=3))


def test_a_shared_layer_within_one_stretch():
    results = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(0)
        layer = convert(nn.Linear(32, 32), recipe="te_delayed")

        def thrice(x, layer=layer):
            return layer(layer(layer(x)) * 7)

        for step in range(3):
            layer.zero_grad()
            x = batch(step).requires_grad_()
            wrap(thrice, x).square().mean().backward()
        results.append((x.grad, layer.weight.grad, *(b.clone() for b in layer.get_submodule("fmtsim_state").buffers())))
    assert all_same_bits(*results)


DRAWING = {"attention": {"recipe": ATTENTION}, "roundings": {"format": "e4m3", "rounding": "stochastic"}}


def drawn(name, how):
    return run(convert(Stack(how, attention=name == "attention"), generator=3, **DRAWING[name]))


@pytest.mark.parametrize("how", ["not reentrant", "all", "nested"])
@pytest.mark.parametrize("name", DRAWING)
def test_a_generator_of_ones_own_draws_the_same_again(name, how, monkeypatch):
    """Random signs and stochastic roundings of a repeated forward pass are those of its first run."""
    expected = drawn(name, None)
    assert all_same_bits(expected, drawn(name, how))
    monkeypatch.setattr(repeats, "_place", lambda: repeats._Place())
    assert not all_same_bits(expected, drawn(name, how))


def test_graphs_that_are_gone_leave_nothing_behind():
    model = convert(Stack("not reentrant"), recipe="te_delayed")
    loss = model(batch(0).requires_grad_()).sum()
    calls = model.blocks[0][0].fmtsim_state.x_f.repeated
    assert len(calls._made) == 1
    loss.backward()
    del loss
    gc.collect()
    assert len(calls._made) == len(calls._done) == 0


def test_a_graph_that_is_run_back_twice():
    """Each run back repeats the stretch from its first call."""
    results = []
    for how in (None, "not reentrant"):
        model = convert(Stack(how), recipe="te_delayed")
        run(model, steps=2)
        loss = model(batch(5).requires_grad_()).square().mean()
        for retain in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=retain)
            results.append([p.grad.clone() for p in model.parameters()])
        results[-1].extend(model.blocks[0][0].fmtsim_state.buffers())
    assert (
        all_same_bits(results[0], results[2])
        and all_same_bits(results[1], results[3])
        and not all_same_bits(results[0], results[1][:12])
    )


def test_copies_remember_nothing():
    calls = Calls()
    calls.run(lambda: 1, compiled=True)
    assert calls._last == 1
    assert copy.deepcopy(calls)._last is None and pickle.loads(pickle.dumps(calls))._last is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
def test_compiled_stretches_are_recorded_once():
    torch._dynamo.reset()
    expected = run(convert(Stack("not reentrant"), recipe="te_delayed"))
    model = convert(Stack("not reentrant"), recipe="te_delayed")
    assert all_same_bits(expected, run(model, compiled=torch.compile(model, fullgraph=True, backend="aot_eager")))


@pytest.mark.parametrize("reentrant", [True, False])
def test_delayed_smooth_scales(reentrant):
    """The scale of the call before stays that of the call before when the layer is run again."""
    results = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        layer = convert(SmoothSwiGLU(32, 64, per="channel", delayed=True), recipe="te_current")
        for step in range(3):
            layer.zero_grad()
            x = batch(step).requires_grad_()
            wrap(layer, x).square().mean().backward()
        results.append((layer.previous.clone(), x.grad, *(p.grad for p in layer.parameters())))
    assert all_same_bits(*results)
    before = layer.previous.clone()
    with torch.no_grad():
        layer(batch(9) * 100)
    assert torch.equal(layer.previous, before)


def test_kernels_work_on_the_memory_itself_where_no_checkpoint_is():
    quantizer = get_recipe("te_delayed").linear.operands["x_f"]
    memory = DelayedScale(quantizer)
    learning, compiled = memory.learning(compiled=False), memory.learning(compiled=True)
    seen = []

    def stretch(x):
        seen.append((learning.direct(), compiled.direct()))
        return x.sin().cos()

    x = torch.ones(4, requires_grad=True)
    stretch(x)
    checkpoint(stretch, x, use_reentrant=False).sum().backward()
    assert seen[0] == (memory, memory) and seen[1] == (None, memory)
    assert seen[2][0] is None and type(seen[2][1]) is FrozenScale  # run again in the backward pass
