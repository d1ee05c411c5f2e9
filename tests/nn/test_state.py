# SPDX-License-Identifier: Apache-2.0
"""State of models under recipes: checkpoints, what is saved and loaded, and scales under activation checkpointing."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.nn import SmoothSwiGLU, convert, flash_attention_3, revert, set_step
from fmtsim.recipes import Recipe, get_recipe
from fmtsim.scaling import repeats
from fmtsim.scaling.history import DelayedScale, FrozenScale
from fmtsim.support.errors import ArgumentError
from tests.support.bits import all_same_bits
from tests.support.models import Net, net, step, without_scales
from tests.support.operands import normal
from tests.support.refusals import refused


def test_state_dicts_travel_between_plain_and_converted_models():
    plain, model = net(seed=1), convert(net(seed=2), recipe="te_delayed")
    model.load_state_dict(plain.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    file = io.BytesIO()
    torch.save(convert(net(seed=3), recipe="fp8lm").state_dict(), file)
    file.seek(0)
    plain.load_state_dict(without_scales(torch.load(file)), strict=True)


@pytest.mark.parametrize("name", ["te_delayed", "fp8lm", "intel_2t"])
def test_delayed_scales_are_part_of_the_state_dict(name, caplog):
    model, other = (convert(net(seed=seed, blocks=1), recipe=name) for seed in (1, 2))
    fresh = str(fmtsim.state(other))
    for seed in range(3):
        step(model, seed)
    saved = copy.deepcopy(model.state_dict())
    with caplog.at_level("INFO", "fmtsim"):
        other.load_state_dict(without_scales(saved), strict=True)
    assert caplog.messages == ["the checkpoint has no delayed scales; Net goes on with its own"]
    assert str(fmtsim.state(other)) == fresh
    nn.Sequential(other).load_state_dict({f"0.{key}": t for key, t in saved.items()}, strict=True)
    assert str(fmtsim.state(other)) == str(fmtsim.state(model)) != fresh
    runs = []
    for each in (model, other):
        torch.manual_seed(0)  # of stochastic rounding
        runs.append(step(each, 9))
    assert all(map(torch.equal, [runs[0][0], *runs[0][1]], [runs[1][0], *runs[1][1]]))
    assert list(revert(model).state_dict()) == list(without_scales(saved))
    del saved["head.fmtsim_state.x_f.amaxes"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "head.fmtsim_state.x_f.amaxes"'):
        other.load_state_dict(saved, strict=True)


def test_a_model_from_the_meta_device_has_seen_nothing():
    plain = net(seed=1, blocks=1)
    with torch.device("meta"):
        model = convert(Net(blocks=1), recipe="te_delayed")
    model.to_empty(device="cpu").load_state_dict(plain.state_dict(), strict=True)
    convert(plain, recipe="te_delayed")
    assert str(fmtsim.state(model)) == str(fmtsim.state(plain))
    assert all(map(torch.equal, step(model, 0)[1], step(plain, 0)[1]))
    plain.load_state_dict(model.state_dict(), strict=True)  # which names the recipe
    assert str(fmtsim.state(model)) == str(fmtsim.state(plain))


@pytest.mark.parametrize("own", ["fp8lm", "te_current", None])
def test_a_checkpoint_of_another_recipe_is_refused_before_anything_is_loaded(own):
    saved = convert(net(seed=1), recipe="te_delayed").state_dict()
    model = convert(net(seed=2), **({"recipe": own} if own else {"format": "e4m3"}))
    before = {key: t.clone() for key, t in model.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(
            ArgumentError,
            match=rf"has delayed scales of recipe 'te_delayed', the model runs {own!r}; convert the plain model with "
            "recipe='te_delayed', or load the weights alone",
        ):
            model.load_state_dict(saved, strict=strict)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    model.load_state_dict(without_scales(saved), strict=True)
    config = get_recipe("te_delayed").linear
    with pytest.raises(ArgumentError, match="scales of recipe None, the model runs 'te_delayed'"):
        convert(net(), recipe="te_delayed").load_state_dict(convert(net(), recipe=config).state_dict())


def test_delayed_scales_are_saved_and_loaded():
    model = convert(net(blocks=1), recipe="te_delayed")
    for seed in range(3):
        step(model, seed)
    state = fmtsim.state(model)
    assert state["recipe"] == "te_delayed" and set(state["layers"]) == {"blocks.0.0", "blocks.0.2", "head"}
    assert set(state["layers"]["head"]) == {"x_f", "w_f", "g_d"}
    assert int(state["layers"]["head"]["x_f"]["calls"]) == 3
    other = convert(net(blocks=1), recipe="te_delayed")
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fmtsim.load_state(other, torch.load(file))
    (y, grads), (z, others), (fresh, _) = (
        step(m, 9) for m in (model, other, convert(net(blocks=1), recipe="te_delayed"))
    )
    assert torch.equal(y, z) and all(map(torch.equal, grads, others)) and not torch.equal(y, fresh)


@pytest.mark.parametrize("name", ["te_delayed", "fp8lm"])
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_without_gradients_are_not_remembered(name, compiled):
    torch._dynamo.reset()
    model = convert(net(blocks=1), recipe=name)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    step(call, 0)
    before = str(fmtsim.state(model))
    with torch.no_grad():
        y, z = call(normal(128, 128, seed=1) * 50), call(normal(128, 128, seed=1) * 50)
    assert torch.equal(y, z) and str(fmtsim.state(model)) == before
    step(call, 1)
    assert str(fmtsim.state(model)) != before


def test_state_of_another_recipe_or_model_is_refused():
    model = convert(net(blocks=1), recipe="te_delayed")
    state = fmtsim.state(model)
    other = convert(net(blocks=1), recipe="fp8lm")
    refused("state is of recipe 'te_delayed', the model runs 'fp8lm'; convert the pla", fmtsim.load_state, other, state)
    with pytest.raises(ArgumentError, match="layer 'blocks.1.0' has delayed scales, but the model has none of it"):
        fmtsim.load_state(model, fmtsim.state(convert(net(blocks=2), recipe="te_delayed")))
    with pytest.raises(ArgumentError, match="layer 'blocks.0.0' has delayed scales, but the state has none of it"):
        fmtsim.load_state(model, {"recipe": "te_delayed", "layers": {}})
    short = copy.deepcopy(state)
    short["layers"]["head"]["x_f"]["amaxes"] = torch.zeros(16)
    before = fmtsim.state(model)
    refused(r"layer 'head': x_f.amaxes is \(16,\) in the state and \(1024,\) in the m", fmtsim.load_state, model, short)
    assert str(before) == str(fmtsim.state(model))
    refused("takes what fmtsim.state returned, not list", fmtsim.load_state, model, [])
    for verb in (lambda m: fmtsim.state(m), lambda m: fmtsim.load_state(m, state), lambda m: set_step(m, 0)):
        refused("found no converted module in Net; convert it first", verb, net(blocks=1))


@pytest.mark.parametrize("name", ["te_delayed", "fp8lm", "intel_2t"])
def test_delayed_scaling_of_an_empty_batch(name):
    """It counts as a batch of zeros: shapes and gradients are there, and the next batch has a scale."""
    empty, zeros = (convert(net(blocks=1), name) for _ in range(2))
    x = normal(4, 128)
    for model, rows in ((empty, 0), (zeros, 4)):
        model(x).sum().backward()
        y = model(torch.zeros(rows, 128, requires_grad=True))
        y.sum().backward()
        assert y.shape == (rows, 128)
    assert torch.equal(empty(x), zeros(x))


ATTENTION = Recipe(name="attention", attention=flash_attention_3(target=None))


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
    for turn in range(steps):
        model.zero_grad()
        loss = sum(call(batch(turn + i).requires_grad_()).square().mean() for i in range(calls))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    state = fmtsim.state(model)["layers"]
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

        for turn in range(3):
            layer.zero_grad()
            x = batch(turn).requires_grad_()
            wrap(thrice, x).square().mean().backward()
        results.append((x.grad, layer.weight.grad, *(b.clone() for b in layer.get_submodule("fmtsim_state").buffers())))
    assert all_same_bits(*results)


ROUNDED = fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic")
DRAWING = {"attention": {"recipe": ATTENTION}, "roundings": {"recipe": ROUNDED}}


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
    assert len(calls._results) == 1
    loss.backward()
    del loss
    gc.collect()
    assert len(calls._results) == len(calls._done) == 0


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
        for turn in range(3):
            layer.zero_grad()
            x = batch(turn).requires_grad_()
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
