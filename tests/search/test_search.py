"""Formats under a budget: exact choice against all there are, losses that are measured, policies, bad budgets."""

import copy
import itertools
import math
import random

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.errors import ArgumentError
from fmtsim.progress import Progress
from fmtsim.search import Policy
from fmtsim.search.choice import least_loss
from fmtsim.search.switching import relative_noise
from fmtsim.search.verb import _Found, _sample

FORMATS = ("w4a4", "minifloat_e3m2", "e4m3_static")
BITS = {"w4a4": 16, "minifloat_e3m2": 36, "e4m3_static": 64}


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    model[2].weight.data[:, :4] *= 8
    return model.requires_grad_(False), [torch.randn(10, 32) for _ in range(2)]


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all(seed):
    source = random.Random(seed)
    layers, options = source.randint(1, 6), source.randint(1, 4)
    costs = [[source.randint(1, 40) for _ in range(options)] for _ in range(layers)]
    losses = [[source.random() for _ in range(options)] for _ in range(layers)]
    low, high = (sum(pick(row) for row in costs) for pick in (min, max))
    budget = source.randint(low, high)
    every = [
        (sum(losses[i][o] for i, o in enumerate(path)), path)
        for path in itertools.product(range(options), repeat=layers)
        if sum(costs[i][o] for i, o in enumerate(path)) <= budget
    ]
    picked, exact = least_loss(costs, losses, budget)
    assert exact and sum(losses[i][o] for i, o in enumerate(picked)) == pytest.approx(min(every)[0])
    assert sum(costs[i][o] for i, o in enumerate(picked)) <= budget


def test_costs_and_losses_are_what_they_say():
    model, data = model_and_data()
    before = copy.deepcopy(model.state_dict())
    result = fmtsim.search(model, data, bits=7)
    adds = {"0": 10 * 32 * 16, "2": 10 * 16 * 64, "4": 10 * 64 * 8}
    assert result.costs == {name: {f: n * BITS[f] for f in FORMATS} for name, n in adds.items()}
    assert result.budget == int(sum(adds.values()) * 7**2) and result.cost <= result.budget
    assert result.cost == sum(result.costs[name][f] for name, f in result.formats.items())
    assert len(set(result.formats.values())) > 1
    quantised = fmtsim.ptq(copy.deepcopy(model), result.recipe(), data)
    assert result.loss == sum(relative_noise(quantised(x), model(x)) for x in data) / 2
    alone = fmtsim.ptq(copy.deepcopy(model), FORMATS[0], data, filter_fn=lambda module, name: name == "2")
    assert result.losses["2"]["w4a4"] == sum(relative_noise(alone(x), model(x)) for x in data) / 2
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert "% of the budget" in str(result)


def test_a_wider_budget_is_no_worse_and_the_widest_takes_the_best():
    model, data = model_and_data()
    wide = fmtsim.search(model, data, bits=8)
    assert set(wide.formats.values()) == {"e4m3_static"}
    tight = fmtsim.search(model, data, budget=wide.cost // 4)
    assert set(tight.formats.values()) == {"w4a4"} and tight.loss > wide.loss


def test_a_policy_is_seeded_and_never_worse():
    model, data = model_and_data()
    additive = fmtsim.search(model, data, bits=6)
    first, again = (fmtsim.search(model, data, bits=6, policy=Policy(steps=40, seed=3)) for _ in range(2))
    assert first == again and first.loss <= additive.loss and first.cost <= first.budget and first.tried > 5


def test_the_front_is_what_no_assignment_beats(tmp_path):
    model, data = model_and_data()
    result = fmtsim.search(model, data, bits=6)
    every = []
    for path in itertools.product(FORMATS, repeat=3):
        layers = dict(zip(result.formats, path, strict=True))
        total = [sum(table[layer][name] for layer, name in layers.items()) for table in (result.costs, result.losses)]
        every.append((*total, layers))
    best = [
        (cost, layers)
        for cost, loss, layers in every
        if not any(c <= cost and v <= loss and (c, v) != (cost, loss) for c, v, _ in every)
    ]
    assert [(point.cost, point.formats) for point in result.front()] == sorted(best, key=lambda item: item[0])
    uniform = result.uniform()
    assert uniform["w4a4"].cost == min(cost for cost, *_ in every) == result.front()[0].cost
    assert uniform["e4m3_static"].loss == pytest.approx(sum(row["e4m3_static"] for row in result.losses.values()))
    pytest.importorskip("matplotlib")
    panel = result.plot(tmp_path / "front.png").axes[0]
    assert list(panel.lines[0].get_xdata()) == [point.cost for point in result.front()]
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert "<td style='text-align:left'>0</td>" in result._repr_html_()


def test_a_model_that_is_a_layer():
    layer, data = nn.Linear(16, 8).requires_grad_(False), [torch.randn(5, 16)]
    result = fmtsim.search(layer, data, bits=6)
    assert set(result.formats) == {""} and "(model)" in str(result)
    quantised = fmtsim.ptq(copy.deepcopy(layer), result.recipe(), data)
    assert result.loss == relative_noise(quantised(data[0]), layer(data[0]))


def test_losses_that_are_no_numbers_or_negative():
    model, data = model_and_data()
    with pytest.raises(ArgumentError, match=r"the loss of the unquantised model is inf; look for Inf in its outputs"):
        fmtsim.search(model, data, bits=6, loss_fn=lambda y, r: float("nan"))
    with pytest.raises(ArgumentError, match=r"loss_fn returned Tensor; return one number"):
        fmtsim.search(model, data, bits=6, loss_fn=lambda y, r: y - r)
    exact = [model(x) for x in data]

    def loss(y, r):  # NaN wherever anything is quantised, which is never chosen over a number
        return 0.0 if any(torch.equal(y, e) for e in exact) else float("nan")

    assert fmtsim.search(model, data, bits=6, loss_fn=loss).loss == math.inf
    gain = fmtsim.search(model, data, bits=6, loss_fn=lambda y, r: -float(y.sum()), policy=Policy(steps=5))
    assert math.isfinite(gain.loss)


class Fake:
    """Stand for a model of eight layers in which one option of three is right for each."""

    RIGHT = (2, 0, 1, 1, 2, 0, 0, 2)

    def run(self, formats):
        return sum(int(name) != self.RIGHT[int(layer)] for layer, name in formats.items()) / 8


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_learns(seed):
    """It finds one assignment in 6561 by running fewer than 400, as chance does once in sixteen times."""
    found = _Found(Fake(), list("01234567"), list("012"), [[1, 1, 1]] * 8, 8)
    _sample(found, Policy(steps=400, entropy=0.0, seed=seed), Progress())
    assert found.loss == 0 and tuple(found.best) == Fake.RIGHT and len(found.known) < 400


def test_a_loss_of_one_s_own():
    model, data = model_and_data()
    worst = fmtsim.search(model, data, bits=6, loss_fn=lambda y, r: float((y - r).abs().max()))
    assert worst.loss == max(worst.loss, 0) and worst.formats.keys() == {"0", "2", "4"}


FINITE = "is not allowed; pass a finite number above 0"
TIED = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).requires_grad_(False)
TIED[2].weight = TIED[0].weight


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"bits": 3}, r"no assignment meets a budget of 184320 bit operations; the least is 327680 \(4 bits in"),
        ({}, r"pass exactly one of budget= \(bit operations of a batch\) and bits="),
        ({"budget": "6"}, f"search budget='6' {FINITE}"),
        ({"budget": True}, f"search budget=True {FINITE}"),
        ({"budget": -5}, f"search budget=-5 {FINITE}"),
        ({"bits": -7}, f"search bits=-7 {FINITE}"),
        ({"bits": "6"}, f"search bits='6' {FINITE}"),
        ({"bits": math.nan}, f"search bits=nan {FINITE}"),
        ({"bits": math.inf}, f"search bits=inf {FINITE}"),
        ({"formats": ["int8_smooth"]}, "recipe 'int8_smooth' changes more than one layer's operands"),
        ({"formats": ["int4_gptq", "w4a4"]}, "recipes 'int4_gptq' and 'w4a4' round weights differently"),
        ({"formats": ["e4m3_static", "e4m3_dynamic"]}, "mixes rules of calibration"),
        ({"formats": []}, "pass recipes of different names, at least one"),
        ({"formats": 3}, "formats=3; pass names or recipes"),
        (
            {"model": TIED, "calibration_data": [torch.ones(3, 16)]},
            "layers '0' and '2' share a weight, which takes one format; lea",
        ),
        ({"calibration_data": []}, "calibration data is empty"),
        ({"model": None}, "search takes a torch.nn.Module, not NoneType"),
        ({"policy": 3}, "policy=3 is no Policy"),
        ({"loss_fn": 3}, "loss_fn=3 is no function"),
    ],
)
def test_bad_budgets_and_formats(how, said):
    model, data = model_and_data()
    how = how if how.keys() & {"bits", "budget"} or not how else {"bits": 8} | how
    with pytest.raises(ArgumentError, match=said):
        fmtsim.search(**{"model": model, "calibration_data": data} | how)


def test_a_policy_without_steps():
    with pytest.raises(ArgumentError, match="Policy steps=0"):
        Policy(steps=0)
