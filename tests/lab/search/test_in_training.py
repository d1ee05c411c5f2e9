# SPDX-License-Identifier: Apache-2.0
"""Formats and widths found while training: what is run, what it costs, what is learned, what is refused."""

import copy
import math

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.search import Policy, in_training
from fmtsim.lab.search.find_formats import Sampler
from fmtsim.lab.search.in_training import _Search, counted, links_of, narrow, narrowed
from fmtsim.nn.modules import EmulatedModule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.support.errors import ArgumentError
from tests.support.refusals import refused
from tests.support.steps import Steps

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = Policy(steps=12, rate=0.05, penalty=1.0, entropy=0.0, sharpen=0.1)
BITS = {"int8_static": 64, "int4_channel": 64, "minifloat_e2m1": 16, "minifloat_e3m2": 36, "minifloat_e4m3": 64}
FLOATS = ("minifloat_e2m1", "minifloat_e3m2", "minifloat_e4m3")


def images_and_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()), nn.AvgPool2d(2),
        nn.Conv2d(8, 4, 3, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3),
    )  # fmt: skip
    return model, torch.randn(10, 2, 8, 8)


def hand_made(model, counts):
    """Return the narrow network, by its sizes and slices of a copy of the wide one's tensors.

    Its tensors have the shapes and strides of the narrowed model's, so that torch's kernels add in the same order: a
    BLAS may choose another for contiguous weights, and the choice differs between processors.
    """
    a, b, c = counts
    small = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU()), nn.AvgPool2d(2),
        nn.Conv2d(a, b, 3, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(4 * b, c), nn.BatchNorm1d(c),
        nn.Linear(c, 3),
    )  # fmt: skip
    state = copy.deepcopy(model.state_dict())
    for name, t in [*small.named_parameters(), *small.named_buffers()]:
        t.data = state[name][tuple(map(slice, t.shape))]
    return small


def bits_of(tensors):
    return [t.detach().contiguous().view(torch.int32) for t in tensors]


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.5), (1.0, 0.25, 1.0), (0.125, 1.0, 0.01)])
def test_a_narrowed_model_is_the_narrow_network_and_the_rest_has_no_gradient(fractions):
    model, x = images_and_model()
    before = copy.deepcopy(model.state_dict())
    links = links_of(model)
    counts = [counted(link, width) for link, width in zip(links, fractions, strict=True)]
    small = hand_made(model, counts)
    with narrowed(links, counts):
        y = model(x)
        y.square().sum().backward()
    expected = small(x)
    expected.square().sum().backward()
    assert torch.equal(*bits_of([y, expected]))
    for (name, p), (_, q) in zip(model.named_parameters(), small.named_parameters(), strict=True):
        here = tuple(map(slice, q.shape))
        assert torch.equal(*bits_of([p.grad[here], q.grad])), name
        rest = p.grad.clone()
        rest[here] = 0
        assert p.shape == before[name].shape and not rest.any()
    running = model[0][1].running_mean  # of the channels that ran
    assert torch.equal(running[: counts[0]], small[0][1].running_mean) and not running[counts[0] :].any()
    narrow(links, counts)
    for t in [*small.parameters(), *small.buffers()]:
        t.data = t.data.contiguous()
    assert str(model) == str(small) and torch.equal(*bits_of([model.eval()(x), small.eval()(x)]))
    assert [p.grad for p in model.parameters() if p.grad is not None] == []


def test_the_cost_counts_the_multiply_adds_that_remain():
    model, x = images_and_model()
    links = links_of(model)
    recipes = {name: get_recipe(name) for name in FLOATS}
    search = _Search(model, lambda step: model(x).sum(), recipes, links, (0.5, 1.0), None)
    full = {"0.0": 10 * 64 * 18 * 8, "2": 10 * 4 * 72 * 4, "5": 10 * 16 * 6, "7": 10 * 6 * 3}
    assert search.adds == full
    halves = {"0.0": full["0.0"] // 2, "2": full["2"] // 4, "5": full["5"] // 4, "7": full["7"] // 2}
    assert search.costs(search.channels([0] * 3)) == [[n * BITS[name] for name in FLOATS] for n in halves.values()]
    one = {"0.0": full["0.0"], "2": full["2"] // 2, "5": full["5"] // 2, "7": full["7"]}
    assert search.costs([8, 2, 6]) == [[n * BITS[name] for name in FLOATS] for n in one.values()]


def run(seed=0, bits=6, widths=(0.5, 1.0), **how):
    model, x = images_and_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    policy = Policy(steps=12, rate=0.05, penalty=1.0, entropy=0.0, sharpen=0.1, seed=seed)
    how = {"formats": FLOATS, "policy": policy, "warmup": 4, "widths": widths, "bits": bits} | how
    found = fmtsim.lab.search.search_while_training(
        model, lambda step: (model(x) - 1).square().mean(), optimizer, **how
    )
    return model, x, found


def test_assignments_that_were_tried_are_counted_once(monkeypatch):
    tried, step = [], _Search._step

    def noted(self, optimizer, picked, wide, number):
        tried.append((*picked, *wide))
        return step(self, optimizer, picked, wide, number)

    monkeypatch.setattr(_Search, "_step", noted)
    for how in ({"formats": FLOATS[:2], "widths": (1.0,)}, {}):
        tried.clear()
        found = run(**how)[2]
        assert found.tried == len(set(tried)) and len(tried) == 16
    assert len(set(tried)) > 8


def test_a_seed_gives_the_same_bits_and_another_does_not():
    (first, _, one), (again, _, two), (_, _, three) = run(), run(), run(seed=1)
    assert one == two and one != three and one.cost <= one.budget
    tensors = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in tensors)


def test_progress_counts_the_steps_of_a_stage(monkeypatch):
    steps = Steps()
    monkeypatch.setattr(in_training, "make_progress", lambda *_, **__: steps)
    run()
    assert steps.told["warm-up", 4] == [1, 2, 3, 4]
    assert steps.told["weights and policy", 12] == list(range(1, 13))


def test_the_model_is_what_the_result_says():
    model, x, found = run()
    assert {n for n, m in model.named_modules() if isinstance(m, EmulatedModule)} == set(found.formats)
    assert [model[0][0].out_channels, model[2].out_channels, model[5].out_features] == list(found.widths.values())
    assert model[5].in_features == 4 * found.widths["2"] and "channels" in str(found)
    model.eval().requires_grad_(False)
    assert found.loss == float((model(x) - 1).square().mean())
    again = fmtsim.convert(fmtsim.revert(copy.deepcopy(model)), found.recipe().prescribed)
    assert torch.equal(again(x), model(x))
    # Layers in high precision stay converted, as in the search: nn.Linear may add in another order.
    high, alone = LinearConfig(), get_recipe(FLOATS[0]).prescribed.linear
    losses = []
    for config in (high, lambda name: alone if name == "5" else high):
        converted = fmtsim.convert(fmtsim.revert(copy.deepcopy(model)), recipe=config)
        losses.append(float((converted(x) - 1).square().mean()))
    assert losses[0] == found.reference and losses[1] - losses[0] == found.losses["5"][FLOATS[0]]
    by_torch = fmtsim.revert(copy.deepcopy(model))(x)
    assert found.reference == pytest.approx(float((by_torch - 1).square().mean()), rel=1e-5)  # sums in another order
    assert found.uniform()[FLOATS[1]].loss == found.reference + sum(row[FLOATS[1]] for row in found.losses.values())
    assert f"loss {found.loss:.3e}, {found.reference:.3e} in high precision" in str(found)
    assert found.front()[0].loss == found.uniform()[FLOATS[0]].loss
    assert all(sum(row.values()) == pytest.approx(1) for row in found.chances.values())


def test_a_model_that_is_a_layer():
    layer, x = nn.Linear(16, 8), torch.randn(5, 16)
    adam = torch.optim.Adam(layer.parameters())
    found = fmtsim.lab.search.search_while_training(
        layer, lambda step: layer(x).square().mean(), adam, bits=8, formats=FLOATS, policy=SHORT, warmup=0
    )
    assert set(found.formats) == {""} and found.widths == {} and "channels" not in str(found)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_policy_keeps_the_layer_wide_that_needs_it(seed):
    """The loss is what the first layer's cast of x loses, once its weight has learned to be 1; the other's are exact.

    The budget is that of one layer in eight bits and one in four, and chance finds this one assignment of four.
    """
    source = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8) * 0.8)
        model[1].weight.copy_(torch.eye(8))
    model[1].weight.requires_grad_(False)
    model[1].register_forward_pre_hook(lambda module, args: (args[0].sign(),))
    kept = []
    model[0].register_forward_hook(lambda module, args, y: kept.append(y))

    def loss_of(step):
        x = torch.randint(8, 16, (32, 8), generator=source) / 8
        y = model(x)
        return (20 * (kept[-1] - x).square().mean()) + 0 * y.sum()

    optimizer = torch.optim.SGD([model[0].weight], lr=0.02)
    policy = Policy(steps=350, rate=0.1, penalty=1.0, entropy=0.0, sharpen=0.1, seed=seed)
    found = fmtsim.lab.search.search_while_training(
        model, loss_of, optimizer, bits=math.sqrt(40), formats=(FLOATS[0], FLOATS[2]), policy=policy, warmup=30
    )
    assert found.formats == {"0": FLOATS[2], "1": FLOATS[0]}
    assert found.chances["0"][FLOATS[2]] > 0.9 and found.chances["1"][FLOATS[0]] > 0.9


def test_a_policy_steps_by_adam_on_reward_and_rising_entropy():
    policy, picks = Policy(steps=30, rate=0.1, entropy=0.05, sharpen=0.4, seed=2), []
    sampler = Sampler(policy, 3, 4, torch.Generator().manual_seed(2), adam=True)
    theta = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    adam, source, mean = torch.optim.Adam([theta], lr=0.1), torch.Generator().manual_seed(2), None
    for step in range(30):
        picked, reward = sampler.draw(), math.sin(3 * step)
        logs = theta.log_softmax(1)
        assert picked == torch.multinomial(logs.exp().detach(), 1, generator=source)[:, 0].tolist()
        picks.append(picked)
        mean = reward if mean is None else 0.9 * mean + 0.1 * reward
        rise = (1 - math.cos(math.pi * step / 30)) / 2
        spread = -(logs.exp() * logs).sum()
        chosen = sum(logs[row, option] for row, option in enumerate(picked))
        adam.zero_grad()
        (-(reward - mean) * chosen + (0.4 * rise - 0.05 * (1 - rise)) * spread).backward()
        adam.step()
        sampler.learn(reward, step)
        torch.testing.assert_close(sampler.logits, theta.detach(), rtol=1e-9, atol=1e-9)  # sums in another order
    assert len(set(map(tuple, picks))) > 5


def norm_between():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


NOT_WIDTHS = r"are not allowed; pass different fractions of the channels, above 0 and at most 1, such as \(0.5, 1.0\)"
WIDE = {"widths": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("make", "how", "said"),
    [
        (plain, {"loss_of": 3}, "loss_of=3 is not a function of a step; write loss_of=lambda step: ..."),
        (plain, {"loss_of": lambda: 0}, "loss_of=.* is not a function of a step"),
        (plain, {"loss_of": lambda step: torch.ones(())},
         "loss_of never ran layer '0'; return the loss of a batch that runs it"),
        (plain, {"optimizer": "adam"},
         r"optimizer='adam' is not a torch.optim.Optimizer; pass torch.optim.Adam\(model"),
        (plain, {"policy": None}, "policy=None: a search while training follows a policy; leave policy= out"),
        (plain, {"policy": 3}, "policy=3 is not a Policy"),
        (plain, {"warmup": -1}, "warmup=-1 is not a number of steps; pass 0 or more"),
        (plain, {"warmup": 0.25}, "warmup=0.25 is not a number of steps"),
        (plain, {"widths": 0.5}, f"widths=0.5 {NOT_WIDTHS}"),
        (plain, {"widths": ()}, rf"widths=\(\) {NOT_WIDTHS}"),
        (plain, {"widths": (0.5, 1.5)}, f"widths=.* {NOT_WIDTHS}"),
        (plain, {"widths": (0.5, 0.5)}, f"widths=.* {NOT_WIDTHS}"),
        (plain, {"widths": "half"}, f"widths='half' {NOT_WIDTHS}"),
        (norm_between, WIDE, "widths= cannot follow channels through '1', a LayerNorm; use linear layers"),
        (tied, WIDE, "widths= need a weight for each layer, and two layers share one; leave widths= out"),
        (lambda: nn.Linear(8, 8), WIDE, "through an nn.Sequential, and the model is a Linear; leave widths= out"),
        (plain, {"formats": ["int4_gptq"]},
         "recipe 'int4_gptq' rounds trained weights by GPTQ.*choose recipes without we"),
        (plain, {"bits": 1}, "no assignment meets a budget of 1280 bit operations; the least is 20480"),
        (plain, {"bits": 2.8} | WIDE, "no assignment meets a budget of 10035 bit operations; the least is 10240"),
        (lambda: None, {}, "search_while_training takes a torch.nn.Module, not NoneType"),
    ],
)  # fmt: skip
def test_what_is_refused(make, how, said):
    model, x = make(), torch.randn(10, 8)
    before = None if model is None else copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([torch.zeros(1)] if model is None else model.parameters(), lr=0.1)
    given = {"loss_of": lambda step: model(x).sum(), "optimizer": optimizer, "bits": 6, "formats": FLOATS} | how
    refused(said, fmtsim.lab.search.search_while_training, model, **given)
    if model is not None:
        assert not any(isinstance(module, EmulatedModule) for module in model.modules())
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_head_of_a_language_model_takes_no_part_unless_told():
    x, options = torch.randn(10, 8), {"bits": 5, "formats": FLOATS, "policy": SHORT, "warmup": 2, "widths": (0.5, 1.0)}
    for ignore, names in ((None, ["0"]), ([], ["0", "lm_head"])):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        model.add_module("lm_head", nn.Linear(16, 4))
        adam = torch.optim.Adam(model.parameters())
        loss_of = lambda step, model=model: model(x).square().mean()  # noqa: E731
        found = fmtsim.lab.search.search_while_training(model, loss_of, adam, ignore=ignore, **options)
        assert list(found.formats) == names and list(found.left_out) == ([] if ignore == [] else ["lm_head"])
        assert [n for n, m in model.named_modules() if isinstance(m, EmulatedModule)] == names


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda y: y, r"loss_of\(0\) returned .*; return the loss of a batch, a tensor of one element with a gradient"),
        (lambda y: y.sum().detach(), "return the loss of a batch, a tensor of one element with a gradient"),
        (lambda y: y.sum() * math.nan, "the loss of step 0 is nan; lower the learning rate, clip gradients, or offer"),
    ],
)
def test_losses_that_are_none(loss, said):
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=said):
        fmtsim.lab.search.search_while_training(model, lambda step: loss(model(torch.ones(2, 8))), optimizer, bits=6)
    assert str(model) == str(plain())


def test_a_machine_multiplies_and_what_it_does_not_run_is_left_out():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    x, adam = torch.randn(16, 32), torch.optim.Adam(model.parameters())
    found = fmtsim.lab.search.search_while_training(
        model, lambda step: model(x).square().mean(), adam, bits=8, formats=("e4m3_token", "w4a4"), policy=SHORT,
        warmup=2, target="h200",
    )  # fmt: skip
    assert set(found.formats.values()) == {"e4m3_token"} and set(found.left_out) == {"w4a4"}
    model.eval().requires_grad_(False)
    again = fmtsim.convert(fmtsim.revert(copy.deepcopy(model)), get_recipe("e4m3_token").on(target="h200").prescribed)
    assert torch.equal(model(x), again(x)) and found.loss == float(model(x).square().mean())


def test_the_link_goes_narrower_that_likes_it_best_until_the_budget_holds():
    model, x = plain(), torch.randn(1, 8)
    model = nn.Sequential(*model, nn.ReLU(), nn.Linear(8, 8))
    recipes = {name: get_recipe(name) for name in FLOATS}
    search = _Search(model, lambda step: model(x).sum(), recipes, links_of(model), (1.0, 0.25, 0.5), None)
    source = torch.Generator()
    search._formats, search._widths = Sampler(SHORT, 3, 3, source, True), Sampler(SHORT, 2, 3, source, True)
    search._formats.logits += torch.tensor([[0.0, 1.0, 3.0], [0.0, 0.0, 2.5], [5.0, 0.0, 0.0]])
    search._widths.logits += torch.tensor([[3.0, 1.0, 0.0], [3.0, 0.0, 1.5]])
    most = 64 * (64 + 64 + 16)
    assert search.likeliest(most) == ([2, 2, 0], [8, 8])
    assert search.likeliest(most - 1) == ([1, 2, 0], [8, 8])  # recipes that fit, the likeliest
    assert search.likeliest(16 * 3 * 64 - 1) == ([0, 0, 0], [8, 4])  # four bits everywhere are one too many
