# SPDX-License-Identifier: Apache-2.0
"""State of models under recipes: what checkpoints hold, what is saved and loaded, and what is refused."""

import copy
import io

import pytest
import torch
from torch import nn

from fmtsim.nn import convert, load_recipe_state, recipe_state, revert, set_step
from fmtsim.recipes import get_recipe
from fmtsim.support.errors import ArgumentError
from tests.support.models import Net, net, step, without_scales
from tests.support.operands import normal


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
    fresh = str(recipe_state(other))
    for seed in range(3):
        step(model, seed)
    saved = copy.deepcopy(model.state_dict())
    with caplog.at_level("INFO", "fmtsim"):
        other.load_state_dict(without_scales(saved), strict=True)
    assert caplog.messages == ["the checkpoint has no delayed scales; Net goes on with its own"]
    assert str(recipe_state(other)) == fresh
    nn.Sequential(other).load_state_dict({f"0.{key}": t for key, t in saved.items()}, strict=True)
    assert str(recipe_state(other)) == str(recipe_state(model)) != fresh
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
    assert str(recipe_state(model)) == str(recipe_state(plain))
    assert all(map(torch.equal, step(model, 0)[1], step(plain, 0)[1]))
    plain.load_state_dict(model.state_dict(), strict=True)  # which names the recipe
    assert str(recipe_state(model)) == str(recipe_state(plain))


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
        convert(net(), recipe="te_delayed").load_state_dict(convert(net(), config=config).state_dict())


def test_delayed_scales_are_saved_and_loaded():
    model = convert(net(blocks=1), recipe="te_delayed")
    for seed in range(3):
        step(model, seed)
    state = recipe_state(model)
    assert state["recipe"] == "te_delayed" and set(state["layers"]) == {"blocks.0.0", "blocks.0.2", "head"}
    assert set(state["layers"]["head"]) == {"x_f", "w_f", "g_d"}
    assert int(state["layers"]["head"]["x_f"]["calls"]) == 3
    other = convert(net(blocks=1), recipe="te_delayed")
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    load_recipe_state(other, torch.load(file))
    (y, grads), (z, others), (fresh, _) = (
        step(m, 9) for m in (model, other, convert(net(blocks=1), recipe="te_delayed"))
    )
    assert torch.equal(y, z) and all(map(torch.equal, grads, others)) and not torch.equal(y, fresh)


@pytest.mark.parametrize("name", ["te_delayed", "fp8lm"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
def test_calls_without_gradients_are_not_remembered(name, compiled):
    torch._dynamo.reset()
    model = convert(net(blocks=1), recipe=name)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    step(call, 0)
    before = str(recipe_state(model))
    with torch.no_grad():
        y, z = call(normal(128, 128, seed=1) * 50), call(normal(128, 128, seed=1) * 50)
    assert torch.equal(y, z) and str(recipe_state(model)) == before
    step(call, 1)
    assert str(recipe_state(model)) != before


def test_state_of_another_recipe_or_model_is_refused():
    model = convert(net(blocks=1), recipe="te_delayed")
    state = recipe_state(model)
    other = convert(net(blocks=1), recipe="fp8lm")
    with pytest.raises(
        ArgumentError, match="state is of recipe 'te_delayed', the model runs 'fp8lm'; convert the plain"
    ):
        load_recipe_state(other, state)
    with pytest.raises(ArgumentError, match="layer 'blocks.1.0' has delayed scales, but the model has none of it"):
        load_recipe_state(model, recipe_state(convert(net(blocks=2), recipe="te_delayed")))
    with pytest.raises(ArgumentError, match="layer 'blocks.0.0' has delayed scales, but the state has none of it"):
        load_recipe_state(model, {"recipe": "te_delayed", "layers": {}})
    short = copy.deepcopy(state)
    short["layers"]["head"]["x_f"]["amaxes"] = torch.zeros(16)
    before = recipe_state(model)
    with pytest.raises(
        ArgumentError, match=r"layer 'head': x_f.amaxes is \(16,\) in the state and \(1024,\) in the model"
    ):
        load_recipe_state(model, short)
    assert str(before) == str(recipe_state(model))
    with pytest.raises(ArgumentError, match="takes what fmtsim.recipe_state returned, not list"):
        load_recipe_state(model, [])
    for verb in (lambda m: recipe_state(m), lambda m: load_recipe_state(m, state), lambda m: set_step(m, 0)):
        with pytest.raises(ArgumentError, match="found no converted module in Net; convert it first"):
            verb(net(blocks=1))


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
