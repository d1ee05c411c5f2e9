# SPDX-License-Identifier: Apache-2.0
"""Models under recipes: what changes and what must not, schedules, rules, and what wrong use is told."""

import dataclasses

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.nn import EmulatedLinear, convert, report, revert, set_step
from fmtsim.recipes import Recipe, Rule, Steps, get_recipe, list_recipes
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.bits import assert_same_bits
from tests.support.models import net, step, without_scales
from tests.support.operands import normal
from tests.support.refusals import refused

E4M3 = fmtsim.get_format("e4m3")
FP8, BF16 = (linear_config(x=name, w=name, g=name) for name in ("e4m3", "bf16"))


def converted(model):
    return [row.name for row in report(model).converted]


# torchao 0.18: Float8Linear.from_float(layer, rowwise with emulate=True)(x) on a CPU, torch 2.13.
FLOAT8_LINEAR = [
    [-0.2578125, -0.72265625, -0.1787109375, -3.796875, 0.5, -3.875, -0.314453125, -1.3828125],
    [2.078125, -0.46875, -0.91796875, -0.9609375, 1.25, -1.9296875, 1.8828125, -2.09375],
]


def biased(config, bias=True):
    layer = nn.Linear(48, 8, bias=bias)
    layer.load_state_dict({"weight": normal(8, 48, seed=2) / 4} | ({"bias": normal(8, seed=3)} if bias else {}))
    return convert(layer, config)


def trained(run, layer, x, autocast=False):
    """Return y, and the gradients of x, the weight and the bias."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = run(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), normal(2, 8, seed=4).to(y.dtype))]


def test_torchao_adds_the_bias_to_the_rounded_product():
    x, late = normal(2, 48, seed=1), get_recipe("ao_rowwise").linear
    once = dataclasses.replace(late, bias_after_rounding=False)
    for target, backend in ((None, "inductor"), ("h200", "aot_eager")):
        configs = late.on(target=target), once.on(target=target)
        layer, other = (biased(config).bfloat16() for config in configs)
        (y, *grads), (y_once, *grads_once) = (trained(m, m, x.bfloat16()) for m in (layer, other))
        assert y.tolist() == FLOAT8_LINEAR and not torch.equal(y_once, y)
        for one, two in zip(grads, grads_once, strict=True):
            assert_same_bits(one, two)
        # a compiler must not fuse the two roundings
        compiled = trained(torch.compile(layer, fullgraph=True, backend=backend), layer, x.bfloat16())
        for one, two in zip(compiled, (y, *grads), strict=True):
            assert_same_bits(one, two)
    # under autocast the product is rounded to its dtype, and so is the bias
    layer, bare = biased(late), biased(late, bias=False)
    y, y_bare = (trained(m, m, x, autocast=True)[0] for m in (layer, bare))
    assert y.dtype == torch.bfloat16
    assert_same_bits(y, y_bare + layer.bias.detach().bfloat16())
    recipes = [get_recipe(name) for name in list_recipes(kind="training")]
    assert [recipe.name for recipe in recipes if recipe.linear and recipe.linear.bias_after_rounding] == [
        "ao_mxfp8_ceil", "ao_mxfp8_even", "ao_mxfp8_floor", "ao_mxfp8_rceil", "ao_rowwise", "ao_rowwise_gw_hp",
        "ao_tensorwise", "deepseek_v3",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:recipe .* leaves the last 1.% of the blocks")
def test_every_recipe_changes_no_weight_and_goes_away_again():
    """Those that scale the whole model aside, which divide its weights."""
    scaling = [
        name
        for name in list_recipes(kind="training")
        if any(one.kind == "operations" for one in get_recipe(name).replace)
    ]
    assert scaling == ["mu_s", "unit_scaling"]
    for name in (
        name
        for name in list_recipes(kind="training")
        if get_recipe(name).linear is not None and get_recipe(name).attention is None and name not in scaling
    ):
        model = net(blocks=2)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        parameters, text = list(model.parameters()), repr(model)
        convert(model, recipe=name, total_steps=10)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        model(normal(128, 128, seed=1)).sum()
        weights = without_scales(model.state_dict())
        assert list(weights) == list(before), name
        assert all(torch.equal(value, before[key]) for key, value in weights.items()), name
        assert (len(weights) < len(model.state_dict())) == bool(fmtsim.state(model)["layers"])
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


def test_rules_name_layers_by_place():
    everything = {f"blocks.{i}.{j}" for i in range(6) for j in (0, 2)} | {"head"}

    def left(*rules):
        return everything - set(converted(convert(net(), recipe=Recipe(name="r", linear=FP8, rules=rules))))

    assert left(Rule(head=True)) == {"head"}
    assert left(Rule(first_blocks=1, last_blocks=2)) == {f"blocks.{i}.{j}" for i in (0, 4, 5) for j in (0, 2)}
    assert left(Rule(last_blocks=0.15)) == {"blocks.5.0", "blocks.5.2"}  # rounded up
    assert left(Rule(name=r"\.2$")) == {f"blocks.{i}.2" for i in range(6)}
    refused("convert found nothing to convert", left, Rule(kind="Linear"))
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
    assert torch.equal(model(normal(128, 128, seed=1)), revert(model)(normal(128, 128, seed=1)))
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
        ({"recipe": "coat", "format": "e4m3"}, "recipe= and format='e4m3' both name formats; leave format= out"),
        ({"recipe": "coatt"}, "recipe='coatt' is unknown; did you mean 'coat'"),
    ],
)  # fmt: skip
def test_wrong_use_names_layer_and_remedy_and_changes_nothing(how, said):
    model = net()
    refused(said, convert, model, **how)
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
    refused(said, convert, net(width=width, blocks=1), recipe=recipe)


def learned(model, x, call=None):
    """Return the result, cropped to 24 rows, and all gradients."""
    x = x.clone().requires_grad_()
    y = (model if call is None else call)(x)[:24]
    y.square().sum().backward()
    return [y.detach(), x.grad[:24], *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("name", "rows"), [("te_nvfp4_all", 32), ("mxfp4", 32), ("quartet", 32), ("quartet2", 128)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:recipe .* leaves the last 1.% of the blocks")
def test_tokens_that_do_not_fill_a_rotation_are_padded_with_zeros(name, rows, compiled):
    torch._dynamo.reset()
    padded, model = (convert(net(blocks=1).blocks[0], get_recipe(name).linear, generator=3) for _ in range(2))
    x = normal(24, 128, seed=1)
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
    refused(said, model, normal(51, 128, seed=1))
    with torch.no_grad():
        assert model(normal(51, 128, seed=1)).isfinite().all()  # no gradient, no product over tokens


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (coded(block=(1, 48)), r"no unit multiplies e4m3 in blocks of \(1, 48\) with fp32 scales; units and libraries"),
        (coded(block=(None, 1)), r"no unit multiplies e4m3 in blocks of \(None, 1\) with fp32"),
        (dataclasses.replace(coded(), then=coded(block=(1, 48))), r"no unit multiplies e4m3 in blocks of \(1, 48\)"),
        (
            Quantizer(format=fmtsim.get_format("int8"), scaling=Scaling()),
            "no unit multiplies int8 by e4m3: integers and floating point; pass target=",
        ),
    ],
)
def test_a_field_that_no_engine_supports_is_named(quantizer, said):
    refused(said, Gemm, a=quantizer, b=coded(), target="hopper.wgmma", error=FormatError)


def test_a_layer_on_a_unit_and_an_error_inside_it_are_named():
    tensor = coded()
    linear = LinearConfig(
        **{name: Gemm(a=tensor, b=tensor, target="hopper.wgmma") for name in ("fprop", "dgrad", "wgrad")}
    )
    model = convert(net(blocks=1), recipe=Recipe(name="u", linear=linear))
    assert model(normal(16, 128, seed=1)).isfinite().all()
    refused("layer 'blocks.0.0': EmulatedGEMM: x of shape", model, normal(16, 64, seed=1))


def test_a_recipe_from_a_file_runs_the_same_bits(tmp_path):
    path = tmp_path / "mine.json"
    fmtsim.recipes.save_recipe(get_recipe("quartet"), path)
    results = []
    for recipe in ("quartet", path, str(path), get_recipe(path)):
        results.append(step(convert(net(blocks=1), recipe=recipe, generator=4), 0))
    for y, grads in results[1:]:
        assert torch.equal(y, results[0][0]) and all(map(torch.equal, grads, results[0][1]))


@pytest.mark.parametrize("recipe", ["e4m3", fmtsim.get_format("e4m3")])
def test_what_is_no_recipe_is_not_saved(recipe, tmp_path):
    with pytest.raises(ArgumentError, match=r"recipe is .*e4m3.*; pass a Recipe, a PtqRecipe, or fmtsim.Quant"):
        fmtsim.recipes.save_recipe(recipe, tmp_path / "q.json")
    assert not list(tmp_path.iterdir())
