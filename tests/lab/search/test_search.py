# SPDX-License-Identifier: Apache-2.0
"""Formats under a budget: exact choice against all there are, losses that are measured, policies, bad budgets."""

import copy
import itertools
import math
import random
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fmtsim
from fmtsim.gemm.layers.config import Gemm
from fmtsim.lab.search import Policy, result
from fmtsim.lab.search.find_formats import _Found, _sample
from fmtsim.lab.search.result import SearchResult, front, least_loss
from fmtsim.lab.search.switching import relative_noise
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from fmtsim.support.progress import Progress
from tests.support.refusals import refused

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


def test_an_executor_finds_the_same():
    model, data = model_and_data()
    here = fmtsim.search(model, data, bits=6)
    with ThreadPoolExecutor(2) as pool:
        there = fmtsim.search(model, data, bits=6, executor=pool, loss=lambda *pair: relative_noise(*pair))
        assert there.losses == here.losses and (there.formats, there.loss) == (here.formats, here.loss)
        refused("has nothing to run beside sensitivity; leave one of them out", fmtsim.search, model, data, bits=6,
                executor=pool, sensitivity={})  # fmt: skip
    refused("executor='spark' is no cluster", fmtsim.search, model, data, bits=6, executor="spark")


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


def relative(reference):
    return lambda y: (y - reference).square().sum() / reference.square().sum()


def test_attributions_stand_in_for_runs_of_each_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False)
    data = [torch.randn(32, 64) for _ in range(2)]
    batch = torch.cat(data)
    found = {name: fmtsim.attribute(model, batch, relative(model(batch)), get_recipe(name).linear) for name in FORMATS}
    for bits in (5, 6, 7):
        own, by = fmtsim.search(model, data, bits=bits), fmtsim.search(model, data, bits=bits, sensitivity=found)
        assert by.formats == own.formats and (by.loss, by.cost, by.tried) == (own.loss, own.cost, own.tried)
        for layer, losses in by.losses.items():
            rows = {name: [row.loss for row in each.rows if row.layer == layer] for name, each in found.items()}
            assert losses == {name: sum(each) for name, each in rows.items()} and len(rows["w4a4"]) == 2
    for layer in ("0", "2"):  # the dearer layer gets the format that an attribution calls cheap, whatever it is of
        rows = {name: [replace(r, loss=1.0 if r.layer == layer else 0.0) for r in a.rows] for name, a in found.items()}
        told = {name: replace(a, rows=tuple(rows[name]) if name == "w4a4" else ()) for name, a in found.items()}
        told |= {
            name: replace(found[name], rows=tuple(replace(r, loss=0.1) for r in rows[name])) for name in FORMATS[1:]
        }
        assert fmtsim.search(model, data, bits=5.1, sensitivity=told).formats == {
            each: "minifloat_e3m2" if each == layer else "w4a4" for each in ("0", "2")
        }
    with pytest.raises(
        ArgumentError, match=r"sensitivity=.* has no Attribution of recipe 'e4m3_static'; pass a dict with"
    ):
        fmtsim.search(model, data, bits=6, sensitivity={name: found[name] for name in FORMATS[:2]})
    with pytest.raises(
        ArgumentError, match=r"sensitivity=.* has no Attribution of recipe 'w4a4'; pass a dict with one for"
    ):
        fmtsim.search(model, data, bits=6, sensitivity=found["w4a4"])
    few = found | {"w4a4": replace(found["w4a4"], rows=found["w4a4"].rows[:2])}
    with pytest.raises(
        ArgumentError, match=r"sensitivity of recipe 'w4a4' has no loss of layer '2'; attribute the same mod"
    ):
        fmtsim.search(model, data, bits=6, sensitivity=few)


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
        fmtsim.search(model, data, bits=6, loss=lambda y, r: float("nan"))
    with pytest.raises(ArgumentError, match=r"loss returned Tensor; return one number"):
        fmtsim.search(model, data, bits=6, loss=lambda y, r: y - r)
    exact = [model(x) for x in data]

    def loss(y, r):  # NaN wherever anything is quantised, which is never chosen over a number
        return 0.0 if any(torch.equal(y, e) for e in exact) else float("nan")

    assert fmtsim.search(model, data, bits=6, loss=loss).loss == math.inf
    gain = fmtsim.search(model, data, bits=6, loss=lambda y, r: -float(y.sum()), policy=Policy(steps=5))
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
    worst = fmtsim.search(model, data, bits=6, loss=lambda y, r: float((y - r).abs().max()))
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
        ({"formats": ["w4a4_quarot"]}, "recipe 'w4a4_quarot' changes more than one layer's operands"),
        ({"formats": ["int4_gptq", "w4a4"]}, "recipes 'int4_gptq' and 'w4a4' round weights differently"),
        ({"formats": ["e4m3_static", "e4m3_dynamic"]}, "mixes rules of calibration"),
        ({"formats": []}, "pass recipes of different names, at least one"),
        ({"formats": 3}, "formats=3; pass names or recipes"),
        ({"model": TIED, "calibration_data": [torch.ones(3, 16)]},
         "layers '0' and '2' share a weight, which takes one format; lea"),
        ({"calibration_data": []}, "calibration data is empty"),
        ({"model": None}, "search takes a torch.nn.Module, not NoneType"),
        ({"policy": 3}, "policy=3 is not a Policy"),
        ({"loss": 3}, "loss=3 is not a function"),
    ],
)  # fmt: skip
def test_bad_budgets_and_formats(how, said):
    model, data = model_and_data()
    how = how if how.keys() & {"bits", "budget"} or not how else {"bits": 8} | how
    refused(said, fmtsim.search, **{"model": model, "calibration_data": data} | how)


def test_the_head_of_a_language_model_takes_no_part_unless_told():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(first=nn.Linear(32, 16), lm_head=nn.Linear(16, 64))).requires_grad_(False)
    data = [torch.randn(10, 32)]
    found = fmtsim.search(model, data, bits=6)
    assert list(found.formats) == ["first"] and found.budget == 10 * 32 * 16 * 36
    assert str(found).endswith("left out: lm_head: the head of a language model; ignore=[] quantises it")
    quantised = fmtsim.ptq(copy.deepcopy(model), found.recipe(), data)
    assert [row.name for row in fmtsim.report(quantised).rows] == ["first"]
    told = fmtsim.search(model, data, bits=6, ignore=[])
    assert list(told.formats) == ["first", "lm_head"] and told.left_out == {}
    quantised = fmtsim.ptq(copy.deepcopy(model), told.recipe(), data)
    assert [row.name for row in fmtsim.report(quantised).rows] == ["first", "lm_head"]
    assert list(fmtsim.search(model, data, bits=6, ignore=["first"]).formats) == ["lm_head"]
    refused("ignore='lm_hed' is no module of the model; did you mean 'lm_head'", fmtsim.search, model, data, bits=6,
            ignore=["lm_hed"])  # fmt: skip


@pytest.mark.parametrize("fields", [{"steps": 0}, {"steps": 2.0}, {"steps": True}, {"rate": 0.0}, {"penalty": -0.1}])
def test_policies_that_there_are_not(fields):
    (name, value), *_ = fields.items()
    message = f"^Policy .*{name}={value!r}.*; choose 1 step or more, a rate above 0 and a penalty from 0$"
    refused(message, Policy, **fields)
    refused(r"^Policy entropy=0.05, sharpen=-1; choose weights from 0$", Policy, sharpen=-1)
    assert Policy(steps=1, penalty=0.0).steps == 1


def test_ties_go_to_the_lower_cost_and_then_to_the_lower_option():
    assert least_loss([[2, 1], [1, 2]], [[0.0, 0.0], [1.0, 1.0]], 10) == ([1, 0], True)
    assert least_loss([[1, 1], [3, 3]], [[0.5, 0.5], [0.0, 0.0]], 4) == ([0, 0], True)
    assert least_loss([[1, 5]], [[1.0, 0.0]], 5) == ([1], True) and least_loss([[1, 5]], [[1.0, 0.0]], 4) == ([0], True)
    assert front([[1, 2], [1, 3]], [[2.0, 1.0], [2.0, 0.0]]) == (
        [(2, 4.0, (0, 0)), (3, 3.0, (1, 0)), (4, 2.0, (0, 1)), (5, 1.0, (1, 1))], True,
    )  # fmt: skip


def test_beyond_a_limit_a_choice_is_a_sample_and_says_so(monkeypatch):
    costs, losses = [[2**i, 0] for i in range(5)], [[0.0, 2.0**i] for i in range(5)]
    assert len(front(costs, losses)[0]) == 32
    monkeypatch.setattr(result, "LIMIT", 32)
    assert front(costs, losses)[1]  # as many as may be kept
    monkeypatch.setattr(result, "LIMIT", 7)
    found, exact = front(costs, losses)
    assert not exact and 7 <= len(found) <= 16
    assert (found[0][0], found[-1][0]) == (0, 31)  # the cheapest and the best stay
    assert all(cost + loss == 31 for cost, loss, _ in found)


class Priced(Fake):
    """Its losses are of either sign, and some are not numbers."""

    def run(self, formats):
        loss = super().run(formats) - 0.5
        return math.inf if formats["0"] == "1" and formats["1"] == "1" else loss


def test_a_policy_follows_its_formula():
    """REINFORCE from equal chances: every assignment that is run, in the order in which it is."""
    policy, costs, budget = Policy(steps=60, rate=0.7, penalty=0.4, entropy=0.3, seed=5), [[1, 2, 4]] * 8, 16
    found = _Found(Priced(), list("01234567"), list("012"), costs, budget)
    _sample(found, policy, Progress())
    source, theta, mean, runs = torch.Generator().manual_seed(5), torch.zeros(8, 3, dtype=torch.float64), 0.0, []
    for step in range(60):
        chances = torch.softmax(theta, 1)
        picked = torch.multinomial(chances, 1, generator=source)[:, 0].tolist()
        runs.append(tuple(picked))
        loss = Priced().run({str(layer): str(option) for layer, option in enumerate(picked)})
        over = abs(sum(costs[0][option] for option in picked) / budget - 1)
        reward = 1 - math.copysign(abs(loss) ** 0.5, loss) - 0.4 * over if math.isfinite(loss) else -1.0
        mean = 0.9 * mean + 0.1 * reward if step else reward
        weight = 0.3 * (1 + math.cos(math.pi * step / 60)) / 2
        for row, option in enumerate(picked):
            p = chances[row].clone()
            entropy = -float((p * p.log()).sum())
            for o in range(3):
                slope = (reward - mean) * ((o == option) - float(p[o])) - weight * float(p[o]) * (
                    float(p[o].log()) + entropy
                )
                theta[row, o] += 0.7 * slope
    runs.append(tuple(theta.argmax(1).tolist()))
    assert list(found.known) == list(dict.fromkeys(runs))
    within = [(loss, path) for path, loss in found.known.items() if sum(costs[0][o] for o in path) <= budget]
    assert found.loss == min(loss for loss, _ in within) and tuple(found.best) in [path for _, path in within]


def test_noise_relative_to_the_signal():
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0])
    assert relative_noise(two, one) == 4 / 25
    assert relative_noise({"a": two, "b": (torch.tensor([1]), [one, "text"])}, {"a": one, "b": [one, 3]}) == 4 / 50
    assert relative_noise(one, one * 0) == 25.0 and relative_noise([], ()) == 0.0
    refused("zip", relative_noise, [one, one], [one], error=ValueError)


TEXT = [
    "layer  w4a4      e4m3_static  chosen",
    "-----------------------------------------",
    "a      1.00e-02  2.00e-03     w4a4",
    "b      5.00e-01  2.50e-01     e4m3_static",
    "48 bit operations, 75.0 % of the budget; loss 1.250e-02",
]


def test_what_a_result_shows():
    recipes = {name: get_recipe(name) for name in ("w4a4", "e4m3_static")}
    result = SearchResult(
        formats={"a": "w4a4", "b": "e4m3_static"}, cost=48, budget=64, loss=0.0125, recipes=recipes, tried=3,
        losses={"a": {"w4a4": 0.01, "e4m3_static": 0.002}, "b": {"w4a4": 0.5, "e4m3_static": 0.25}},
        costs={"a": {"w4a4": 16, "e4m3_static": 64}, "b": {"w4a4": 8, "e4m3_static": 32}},
    )  # fmt: skip
    assert str(result).splitlines() == TEXT
    assert result._repr_html_().endswith("</table>48 bit operations, 75.0 % of the budget; loss 1.250e-02")
    assert [(p.cost, round(p.loss, 9), tuple(p.formats.values())) for p in result.front()] == [
        (24, 0.51, ("w4a4", "w4a4")), (48, 0.26, ("w4a4", "e4m3_static")), (96, 0.252, ("e4m3_static", "e4m3_static")),
    ]  # fmt: skip
    uniform = {name: (point.cost, point.loss, point.formats) for name, point in result.uniform().items()}
    assert uniform == {"w4a4": (24, 0.51, {"a": "w4a4", "b": "w4a4"}),
                       "e4m3_static": (96, 0.252, {"a": "e4m3_static", "b": "e4m3_static"})}  # fmt: skip
    assert replace(result, formats={"a": "w4a4"}).recipe().weights == recipes["w4a4"].weights
    recipe = result.recipe("mine")
    assert recipe.name == "mine" and [rule.name for rule in recipe.rules] == ["^a$", "^b$"]
    assert [rule.use.fprop for rule in recipe.rules] == [Gemm(a=r.x, b=r.w) for r in recipes.values()]
    assert recipe.calibration == recipes["e4m3_static"].calibration and recipe.weights == recipes["w4a4"].weights


def test_costs_count_the_bits_of_what_is_stored():
    model, data = model_and_data()
    e4m3, block, tile = (Quantizer(format=fmtsim.get_format(name)) for name in ("e4m3", "mxfp4", "logfmt8"))
    made = {"plain": PtqRecipe(name="plain", x=e4m3, w=e4m3), "blocks": PtqRecipe(name="blocks", x=e4m3, w=block),
            "tiles": PtqRecipe(name="tiles", x=tile, w=e4m3), "weights": PtqRecipe(name="weights", w=e4m3)}  # fmt: skip
    result = fmtsim.search(model, data, bits=16, formats=list(made.values()))
    adds = {"0": 10 * 32 * 16, "2": 10 * 16 * 64, "4": 10 * 64 * 8}
    bits = {"plain": 64, "blocks": 32, "tiles": 64, "weights": 8 * 16}
    assert result.costs == {layer: {name: n * bits[name] for name in made} for layer, n in adds.items()}


def test_a_layer_that_only_a_later_batch_reaches_takes_part():
    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = self.first(x)
            return self.second(y) if len(x) > 2 else y

    torch.manual_seed(0)
    result = fmtsim.search(Second(), [torch.randn(2, 16), torch.randn(4, 16)], bits=8.5)
    assert set(result.formats) == {"first", "second"}


def test_outputs_without_numbers_are_refused():
    output = FakeTensorMode().from_tensor(torch.ones(2, 32))
    with pytest.raises(
        ArgumentError, match="returned a FakeTensor on cpu, which holds no numbers; pass batches that do"
    ):
        relative_noise(output, torch.ones(2, 32))
