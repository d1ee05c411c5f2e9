# SPDX-License-Identifier: Apache-2.0
"""Models under recipes: what changes and what must not, state, schedules, rules, and what wrong use is told."""

import copy
import dataclasses
import io

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.errors import ArgumentError, FormatError
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.nn import EmulatedLinear, convert, load_recipe_state, recipe_state, report, revert, set_step
from fmtsim.recipes import Recipe, Rule, Steps, get_recipe, list_recipes
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling
from tests.support.operands import normal

E4M3 = fmtsim.get_format("e4m3")
FP8, BF16 = (linear_config(x=name, w=name, g=name) for name in ("e4m3", "bf16"))


class Net(nn.Module):
    """Six blocks of two layers, and a head; 128 features, so that every recipe fits."""

    def __init__(self, width=128, blocks=6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net(seed=0, **sizes):
    torch.manual_seed(seed)
    return Net(**sizes)


def batch(seed=1, rows=128, width=128):
    return normal(rows, width, seed=seed)


def converted(model):
    return [row.name for row in report(model).converted]


@pytest.mark.filterwarnings("ignore:recipe .* leaves the last 15% of the blocks")
def test_every_recipe_changes_no_weight_and_goes_away_again():
    """Those that scale the whole model aside, which divide its weights."""
    scaling = [name for name in list_recipes() if any(one.kind == "operations" for one in get_recipe(name).replace)]
    assert scaling == ["mu_s", "unit_scaling"]
    for name in (name for name in list_recipes() if get_recipe(name).linear is not None and name not in scaling):
        model = net(blocks=2)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        parameters, text = list(model.parameters()), repr(model)
        convert(model, recipe=name, total_steps=10)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        model(batch()).sum()
        weights = without_scales(model.state_dict())
        assert list(weights) == list(before), name
        assert all(torch.equal(value, before[key]) for key, value in weights.items()), name
        assert (len(weights) < len(model.state_dict())) == bool(recipe_state(model)["layers"])
        net(seed=7, blocks=2).load_state_dict(weights, strict=True)
        revert(model)
        assert repr(model) == text and not any("fmtsim" in key for m in model.modules() for key in vars(m))
        assert list(model.state_dict()) == list(before) and not any(
            isinstance(m, EmulatedLinear) for m in model.modules()
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_weight_gradients_of_fp8lm_are_tensors_in_fp8(compiled):
    """E4M3 under the largest power of two that does not clip the gradient; biases keep theirs."""
    recipe = get_recipe("fp8lm")
    high = dataclasses.replace(recipe.linear.wgrad, out=Quantizer())
    exact = dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, wgrad=high))
    found, plain = (convert(nn.Linear(48, 32), recipe=one) for one in (recipe, exact))
    plain.load_state_dict(found.state_dict())
    call = torch.compile(found, backend="aot_eager", fullgraph=True) if compiled else found
    x = normal(16, 48, seed=1)
    for model in (call, plain):
        model(x).square().sum().backward()
    dw = plain.weight.grad
    scale = 2.0 ** torch.floor(torch.log2(448 / dw.abs().max()))
    wanted = fmtsim.quantize(dw * scale, "e4m3", out_dtype=torch.float32) / scale
    assert torch.equal(found.weight.grad, wanted) and not torch.equal(wanted, dw)
    assert torch.equal(found.bias.grad, plain.bias.grad)
    assert "dw       the product        e4m3_tensor_rceil  one block, e8m0 by rceil" in str(recipe)


def test_state_dicts_travel_between_plain_and_converted_models():
    plain, model = net(seed=1), convert(net(seed=2), recipe="te_delayed")
    model.load_state_dict(plain.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    file = io.BytesIO()
    torch.save(convert(net(seed=3), recipe="fp8lm").state_dict(), file)
    file.seek(0)
    plain.load_state_dict(without_scales(torch.load(file)), strict=True)


def without_scales(state):
    return {name: t for name, t in state.items() if "fmtsim" not in name}


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


def step(model, seed, **how):
    for p in model.parameters():
        p.grad = None
    y = model(batch(seed, **how))
    (y**2).mean().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters()]


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
        y, z = call(batch(1) * 50), call(batch(1) * 50)
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


def test_rules_name_layers_by_place():
    everything = {f"blocks.{i}.{j}" for i in range(6) for j in (0, 2)} | {"head"}

    def left(*rules):
        return everything - set(converted(convert(net(), recipe=Recipe(name="r", linear=FP8, rules=rules))))

    assert left(Rule(head=True)) == {"head"}
    assert left(Rule(first_blocks=1, last_blocks=2)) == {f"blocks.{i}.{j}" for i in (0, 4, 5) for j in (0, 2)}
    assert left(Rule(last_blocks=0.15)) == {"blocks.5.0", "blocks.5.2"}  # rounded up
    assert left(Rule(name=r"\.2$")) == {f"blocks.{i}.2" for i in range(6)}
    with pytest.raises(ArgumentError, match="convert found nothing to convert"):
        left(Rule(kind="Linear"))
    assert left(Rule(name=r"\.0$", last_blocks=1)) == {"blocks.5.0"}
    model = convert(net(), recipe=Recipe(name="r", linear=FP8, rules=(Rule(head=True, use=BF16), Rule(name="head"))))
    assert model.head.emulation.config == BF16


def test_the_first_rule_that_fits_counts():
    rules = (Rule(name="blocks.0", use=BF16), Rule(first_blocks=2))
    model = convert(net(), recipe=Recipe(name="r", linear=FP8, rules=rules))
    assert model.blocks[0][0].emulation.config == BF16 and not isinstance(model.blocks[1][0], EmulatedLinear)
    assert model.blocks[2][0].emulation.config == FP8


def test_a_rule_of_steps_switches_and_switches_back():
    rules = (Rule(steps=Steps(first=2, last=4), use=BF16), Rule(steps=Steps(first=0.5)))
    model = convert(net(), recipe=Recipe(name="r", linear=FP8, rules=rules), total_steps=10)
    seen = []
    for i in range(8):
        set_step(model, i)
        seen.append(model.head.emulation.config)
    assert seen == [FP8, FP8, BF16, BF16, FP8, LinearConfig(), LinearConfig(), LinearConfig()]
    assert torch.equal(model(batch()), revert(model)(batch()))
    with pytest.raises(ArgumentError, match="step=-1 is not a step; pass a whole number from 0"):
        set_step(convert(net(), recipe="te_current"), -1)


def own(*rules):
    return Recipe(name="own", linear=FP8, rules=rules)


def coded(**scaling):
    return Quantizer(format=E4M3, scaling=Scaling(**scaling))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"recipe": "nvfp4_switch"}, "layer 'blocks.0.0': the schedule says 0.82 of the run; pass total_steps="),
        ({"recipe": own(Rule(steps=Steps(first=2, last=5)), Rule(steps=Steps(first=4), use=BF16))},
         "layer 'blocks.0.0': the schedules of two rules overlap .steps 2 to 5; steps 4 to end.; give Steps"),
        ({"recipe": own(Rule(steps=Steps(first=8)), Rule(steps=Steps(first=0.5, last=0.9), use=BF16)),
          "total_steps": 10},
         "overlap .steps 8 to end; steps 50% to 90%."),
        ({"recipe": own(Rule(name="attention"))},
         r"rules\[0\] of recipe 'own' \(name ~ attention\) fits no layer of the model, which has blocks.0.0, .* "
         r"\.\.\.; correct it, or pass Rule\(optional=True\)"),
        ({"recipe": own(Rule(kind="Conv3d"))}, r"rules\[0\] of recipe 'own' \(Conv3d\) fits no layer"),
        ({"recipe": "coat", "filter_fn": lambda m, n: False},
         r"convert found nothing to convert in Net \(blocks.0.0: filter_fn leaves it out"),
        ({"recipe": "coat", "format": "e4m3"}, "recipe= says everything about formats; leave format="),
        ({"recipe": "coatt"}, "recipe='coatt' is unknown; did you mean 'coat'"),
    ],
)  # fmt: skip
def test_wrong_use_names_layer_and_remedy_and_changes_nothing(how, said):
    model = net()
    with pytest.raises(ArgumentError, match=said):
        convert(model, **how)
    assert not any(isinstance(m, EmulatedLinear) for m in model.modules())
    assert not any("fmtsim" in key for m in model.modules() for key in vars(m))


def test_rules_that_agree_or_are_optional_pass():
    convert(net(), recipe=own(Rule(steps=Steps(first=2, last=5)), Rule(steps=Steps(first=4))))
    convert(net(), recipe=own(Rule(steps=Steps(first=2, last=5)), Rule(steps=Steps(first=5), use=BF16)))
    convert(net(), recipe=own(Rule(name="attention", optional=True)))
    assert "blocks.0.0" in converted(convert(net(), recipe="deepseek_v3"))


@pytest.mark.parametrize(
    ("recipe", "width", "said"),
    [
        (
            "quartet2",
            96,
            r"layer 'blocks.0.0' \(w is 96 x 96\): dgrad g_d: Hadamard size=128 does not divide 96; leave",
        ),
        ("quartet", 48, "fprop x_f: Hadamard size=32 does not divide 48"),
        ("ao_sparse24", 22, "fprop w_f: 2:4 sparsity needs groups of 4, which do not divide 22"),
        ("halo1", 22, "fprop x_f: a Hadamard matrix of the whole axis does not fit: "),
    ],
)
def test_a_block_that_does_not_divide_a_layer_is_refused_by_convert(recipe, width, said):
    with pytest.raises(ArgumentError, match=said):
        convert(net(width=width, blocks=1), recipe=recipe)


def learned(model, x, call=None):
    """Return the result, cropped to 24 rows, and all gradients."""
    x = x.clone().requires_grad_()
    y = (model if call is None else call)(x)[:24]
    y.square().sum().backward()
    return [y.detach(), x.grad[:24], *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("name", "rows"), [("te_nvfp4_all", 32), ("mxfp4", 32), ("quartet", 32), ("quartet2", 128)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
@pytest.mark.filterwarnings("ignore:recipe .* leaves the last 15% of the blocks")
def test_tokens_that_do_not_fill_a_rotation_are_padded_with_zeros(name, rows, compiled):
    torch._dynamo.reset()
    padded, model = (convert(net(blocks=1).blocks[0], get_recipe(name).linear, generator=3) for _ in range(2))
    x = batch(rows=24)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else None
    expected = torch.zeros(rows, 128)
    expected[:24] = x
    model[0].bias.data.zero_(), padded[0].bias.data.zero_()  # else the second layer's padding is not a zeros here
    assert all(map(torch.equal, learned(padded, expected), learned(model, x, call)))
    assert model(x[None]).shape == (1, 24, 128) and model(x[:0]).shape == (0, 128)
    with torch.no_grad():
        assert torch.equal(model(x), model(expected)[:24])


def test_a_rotation_of_all_tokens_is_refused_before_the_step():
    model = convert(net(blocks=1), recipe="halo2")
    said = (
        r"'blocks.0.0': dgrad g_d: a Hadamard matrix of the whole axis does not fit: size=51 .* \(x is \(51, 128\), w "
        r"\(128, 128\)\); choose another batch size or context, pass drop_last=True to the DataLoader where"
    )
    with pytest.raises(ArgumentError, match=said):
        model(batch(rows=51))
    with torch.no_grad():
        assert model(batch(rows=51)).isfinite().all()  # no gradient, no product over tokens


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (coded(block=(1, 48)), r"no unit multiplies e4m3 in blocks of \(1, 48\) with fp32 scales; units and libraries"),
        (coded(block=(None, 1)), r"no unit multiplies e4m3 in blocks of \(None, 1\) with fp32"),
        (dataclasses.replace(coded(), then=coded(block=(1, 48))), r"no unit multiplies e4m3 in blocks of \(1, 48\)"),
        (
            Quantizer(format=fmtsim.get_format("int8"), scaling=Scaling()),
            "no unit multiplies int8 by e4m3: integers and floating point; pass datapath=",
        ),
    ],
)
def test_a_field_that_no_engine_supports_is_named(quantizer, said):
    with pytest.raises(FormatError, match=said):
        Gemm(a=quantizer, b=coded(), unit="hopper.wgmma")


def test_a_layer_on_a_unit_and_an_error_inside_it_are_named():
    tensor = coded()
    linear = LinearConfig(
        **{name: Gemm(a=tensor, b=tensor, unit="hopper.wgmma") for name in ("fprop", "dgrad", "wgrad")}
    )
    model = convert(net(blocks=1), recipe=Recipe(name="u", linear=linear))
    assert model(batch(rows=16)).isfinite().all()
    with pytest.raises(ArgumentError, match="layer 'blocks.0.0': EmulatedGEMM: x of shape"):
        model(batch(rows=16, width=64))


def test_a_recipe_from_a_file_runs_the_same_bits(tmp_path):
    path = tmp_path / "mine.json"
    fmtsim.recipes.save_recipe(get_recipe("quartet"), path)
    results = []
    for recipe in ("quartet", path, str(path), get_recipe(path)):
        results.append(step(convert(net(blocks=1), recipe=recipe, generator=4), 0))
    for y, grads in results[1:]:
        assert torch.equal(y, results[0][0]) and all(map(torch.equal, grads, results[0][1]))


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
