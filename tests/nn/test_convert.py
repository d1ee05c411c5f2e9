# SPDX-License-Identifier: Apache-2.0
"""convert, revert and report: what changes, what must not, and what wrong use is told."""

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fmtsim.gemm.layers.config import linear_config
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.gemm.targets.target import get_target
from fmtsim.nn import EmulatedLinear, convert, report, revert, set_step
from fmtsim.recipes.recipe import Recipe, Rule, Steps
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.serialization import load_rules, save_recipe, save_rules
from fmtsim.support.errors import ArgumentError, CoverageWarning, FormatError
from tests.support.models import snapshot
from tests.support.refusals import refused

CONFIG = linear_config(x="e4m3", w="e4m3", g="e5m2")


class Tower(nn.Module):
    """Hold one of each kind: tied, shared, converted, and left alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(1, 4, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(self.again(self.first(x)))).mean() + self.conv(x[:, None]).mean()


class OwnLinear(nn.Linear):
    """Keep the forward; convert takes it."""

    def shout(self):
        return "still here"


class OddLinear(nn.Linear):
    """Replace the forward; convert must not."""

    def forward(self, input):
        return super().forward(input) * 2


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return Tower()


TOKENS = torch.arange(10).view(2, 5)


def test_convert_keeps_objects_and_revert_restores_everything(tower):
    tower.first.register_forward_hook(lambda *_: None)
    tower.head.requires_grad_(False)
    tower.attention.eval()
    before = snapshot(tower)
    modules, parameters = dict(tower.named_modules()), dict(tower.named_parameters())
    keys, expected = list(tower.state_dict()), tower(TOKENS)

    assert convert(tower, recipe=CONFIG) is tower
    assert isinstance(tower.first, EmulatedLinear) and isinstance(tower.first, nn.Linear)
    assert tower.first is tower.again and tower.head.weight is tower.embedding.weight
    assert all(m is modules[name] for name, m in tower.named_modules())
    assert all(p is parameters[name] for name, p in tower.named_parameters())
    assert list(tower.state_dict()) == keys
    assert not torch.equal(tower(TOKENS), expected)

    assert revert(tower) is tower
    assert snapshot(tower) == before
    assert torch.equal(tower(TOKENS), expected)


def test_a_converted_layer_is_emulated_gemm(tower):
    convert(tower, recipe=CONFIG)
    x = torch.randn(3, 8)
    assert torch.equal(tower.first(x), EmulatedGEMM.apply(x, tower.first.weight, tower.first.bias, CONFIG))


def test_format_arguments_build_the_config(tower):
    convert(
        tower,
        recipe=linear_config(
            x="e4m3", w="e4m3", g="e5m2", scaling=None, rounding="toward_zero", grad_rounding="stochastic"
        ),
    )
    expected = linear_config(
        x="e4m3", w="e4m3", g="e5m2", scaling="tensor", rounding="toward_zero", grad_rounding="stochastic"
    )
    assert tower.first.emulation.config == expected
    revert(tower)
    for format, scaling, same in (("int8", None, "tensor"), ("bf16", None, "none"), ("int8", "none", "none")):
        convert(tower, recipe=linear_config(x=format, w=format, g=format, scaling=scaling))
        assert tower.first.emulation.config == linear_config(x=format, w=format, g=format, scaling=same)
        revert(tower)
    convert(tower, CONFIG)
    assert tower.first.emulation.config is CONFIG


def test_config_and_filter_choose_layers(tower):
    convert(tower, recipe=lambda name: None if name == "head" else CONFIG, filter_fn=lambda m, name: name != "conv")
    reasons = {row.name: row.detail for row in report(tower).left_alone}
    assert reasons["head"] == "recipe(name) returned None" and reasons["conv"] == "filter_fn leaves it out"
    assert type(tower.head) is nn.Linear and type(tower.conv) is nn.Conv2d


def test_rules_go_ahead_of_whatever_else_says_the_formats(tower):
    own = linear_config(x="e5m2", w="e5m2", g="e5m2")
    rules = (Rule(name="^first$"), Rule(use=own, name="^conv$", steps=Steps(last=3)))
    for how in ({"recipe": "amp_bf16"}, {"format": "int8"}, {"recipe": CONFIG}):
        plain, converted = convert(copy.deepcopy(tower), **how), convert(copy.deepcopy(tower), rules=rules, **how)
        assert not isinstance(converted.first, EmulatedLinear) and isinstance(plain.first, EmulatedLinear)
        assert converted.conv.emulation.config == own and converted.head.emulation.config == plain.head.emulation.config
        set_step(converted, 3)
        assert converted.conv.emulation.config == plain.conv.emulation.config
        assert "name ~ ^first$" in str(report(converted))
        assert report(converted).summary.startswith("amp_bf16+rules: ") == (how.get("recipe") == "amp_bf16")


def test_rules_of_a_file_are_those_that_were_saved(tower, tmp_path):
    own = linear_config(x="e5m2", w="e5m2", g="e5m2", rounding="stochastic")
    rules = (Rule(name="^first$"), Rule(use=own, name="^conv$", steps=Steps(last=3)), Rule(head=True, optional=True))
    save_rules(rules, tmp_path / "rules.json")
    save_recipe(Recipe(name="own", linear=CONFIG, rules=rules), tmp_path / "recipe.json")
    for name in ("rules.json", "recipe.json"):
        assert load_rules(tmp_path / name) == rules
        converted = convert(copy.deepcopy(tower), format="int8", rules=str(tmp_path / name))
        assert converted.conv.emulation.config == own and not isinstance(converted.first, EmulatedLinear)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*rules.json: No such file or directory"),
        ("[]", r"rules.json has no rules; write \{\"rules\": \[\{\"name\": \"lm_head\"\}\]\}"),
        ('{"rules": []}', "rules.json has no rules; write"),
        ('{"rules": [{"nam": "head"}]}', r"rules.json.rules\[0\]: a Rule has no field 'nam'"),
    ],
)
def test_files_without_rules_are_refused(tower, tmp_path, content, message):
    if content is not None:
        (tmp_path / "rules.json").write_text(content)
    refused(message, convert, tower, format="int8", rules=tmp_path / "rules.json")


def test_rules_run_on_the_machine_of_the_call(tower):
    own = linear_config(x="bf16", w="bf16", g="bf16")
    convert(tower, format="e4m3", target="hopper.wgmma", rules=[Rule(name="^first$", use=own)])
    assert tower.first.emulation.config == own.on(target="hopper.wgmma", plan=None, native=None)
    revert(tower)
    convert(tower, recipe="te_current", target="recipe", rules=[Rule(name="^first$", use=own)])
    assert tower.first.emulation.config.fprop.target == tower.head.emulation.config.fprop.target != None  # noqa: E711


def test_an_int_generator_reproduces_a_model(tower):
    def losses(seed):
        model = convert(
            copy.deepcopy(tower),
            recipe=linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic"),
            generator=seed,
        )
        return [float(model(TOKENS).detach()) for _ in range(2)]

    state = torch.get_rng_state()
    first = losses(1)
    assert first == losses(1) != losses(2)
    assert first[0] != first[1]
    assert torch.equal(state, torch.get_rng_state())


def test_subclasses_that_keep_the_forward_are_converted():
    model = convert(nn.Sequential(OwnLinear(4, 4), OddLinear(4, 4)), recipe=CONFIG)
    assert model[0].shout() == "still here" and isinstance(model[0], EmulatedLinear)
    assert repr(model[0]).startswith("EmulatedOwnLinear(in_features=4, out_features=4, bias=True, x e4m3")
    assert report(model).rows[1].detail.startswith("any products with its own weight, emulated: x e4m3, w e4m3, g")
    assert type(revert(model)[0]) is OwnLinear


def test_copies_of_a_model_share_its_target():
    """Also one with a book of a library's choices, once it was asked."""
    model = convert(nn.Linear(64, 64).bfloat16(), recipe="te_current", target=get_target("h200"))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_what_cannot_be_converted_says_why():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.LazyLinear(4),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Conv3d(2, 4, 1, groups=2),
        nn.GRU(4, 4),
        nn.LSTMCell(4, 4),
        nn.ReLU(),
    )
    with pytest.warns(CoverageWarning, match=r"5.weight_ih, 5.weight_hh 50.0 % \(no emulated form of LSTMCell"):
        convert(model, recipe=CONFIG)
    rows = {row.name: row for row in report(model).rows}
    assert rows["0"].converted and rows["0"].detail == "x e4m3, w e4m3, g e5m2"
    assert "run one batch" in rows["1"].detail
    assert rows["2"].converted and rows["2"].detail == "x e4m3, w e4m3, g e5m2"
    assert rows["3"].detail == "depthwise: a sum for each channel, which libraries run as no matrix product"
    assert rows["4"].converted
    fused = "one fused call multiplies with all of its weights; use nn.LSTM, or write its steps with nn.Linear"
    assert rows["5"].detail == f"no emulated form of LSTMCell: {fused}"
    assert "6" not in rows


def test_report_prints_a_table(tower):
    before = report(tower)
    assert not before.converted and {row.detail for row in before.rows if row.name == "first"} == {"not converted"}
    convert(tower, recipe=CONFIG)
    text = str(report(tower))
    lines = [line.split(maxsplit=3) for line in text.splitlines()]
    assert lines[0] == ["layer", "type", "converted", "quantisers, or why not"]
    assert ["conv", "Conv2d", "yes", "x e4m3, w e4m3, g e5m2"] in lines
    assert ["again", "Linear", "yes", "same module as first"] in lines
    assert not any(line[0] in ("embedding", "norm") for line in lines[1:])
    assert ["attention.out_proj", "NonDynamicallyQuantizableLinear", "yes", "as a part of attention"] in lines
    total = "6 of 6 modules with a weight matrix converted; 2 without one not shown"
    assert text.endswith(f"{total}\n{report(tower).summary}")


def test_fused_inference_kernels_are_off_while_converted():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    before = snapshot(model)
    convert(model, format="e2m1", filter_fn=lambda m, name: "linear" in name)
    seen = []
    for module in (model.layers[0].linear1, model.layers[1].linear2):
        module.emulation.observer = lambda part: lambda operand, *_: seen.append(operand)
    with torch.no_grad():
        model(x, src_key_padding_mask=padding)
    assert seen == ["x_f", "w_f"] * 2
    revert(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ArgumentError, r"no format; pass recipe='te_mxfp8', recipe=linear_config"),
        ({"format": "e4m3", "recipe": CONFIG}, ArgumentError, r"recipe= and format='e4m3' both name formats; leave "),
        ({"format": "e4m3", "recipe": "te_current"}, ArgumentError, r"or write recipe=linear_config\(x=, w="),
        ({"recipe": "e4m3_static"}, ArgumentError, r"'e4m3_static' quantises a trained model: call fmt"),
        ({"recipe": "mxfp4_dynamic"}, ArgumentError, r"or pass a recipe for training; did you mean 'mxfp4_rne' or"),
        ({"recipe": get_recipe("w8a8")}, ArgumentError, r"recipe 'int8_static' quantises a trained model"),
        ({"recipe": CONFIG, "target": numpy.ones(3)}, ArgumentError, r"target=.* is neither a name, nor a path"),
        ({"recipe": "te_nvfp4", "target": numpy.ones(3)}, ArgumentError, r"target=.* is neither a name, nor a path"),
        ({"recipe": "te_nvfp4", "fast_accum": True}, ArgumentError, r"write recipe=linear_config\(..., fast_accum=T"),
        ({"recipe": CONFIG, "fast_accum": True}, ArgumentError, r"fast_accum= goes with format=; recipes have their"),
        ({"recipe": CONFIG, "target": "recipe"}, ArgumentError, r"target='recipe' is the machine that a recipe"),
        ({"recipe": "te_nvfp4", "target": "h200"}, ArgumentError, r"te_nvfp4: fprop: target h200 has no unit"),
        ({"recipe": "te_current", "target": 3}, ArgumentError, r"target=3 is neither a name, nor a path, nor a rec"),
        ({"format": "e4m3", "native": True}, ArgumentError, r"convert needs target=: a GPU with its library"),
        ({"recipe": "lns", "target": "h200"}, FormatError, r"recipe lns: fprop: no unit multiplies lns8_channel; pass"),
        ({"recipe": "te_nvfp5"}, ArgumentError, r"recipe='te_nvfp5' is unknown; did you mean 'te_nvfp4'"),
        ({"recipe": 3}, ArgumentError, r"recipe=3 is not a recipe's name, file or record, a Li"),
        ({"recipe": lambda name: "e4m3"}, ArgumentError, r"recipe\('embedding'\)|recipe\('conv'\) returned 'e4m3'"),
        ({"format": "e4m33"}, FormatError, r"e4m33"),
        ({"format": "int8", "rules": [Rule(name="lm")]}, ArgumentError,
         r"rules\[0\] of recipe 'convert\(rules=\)' \(name ~ lm\) fits no layer of the model, whi"),
        ({"format": "int8", "rules": ["head"]}, ArgumentError,
         r"rules=\['head'\] is not a list of Rules; write rules=\[Rule\(name='lm_head'\)\]"),
        ({"format": "int8", "rules": Rule(name="first")}, ArgumentError, r"rules=Rule\(.*is not a list of Rules"),
        ({"recipe": CONFIG, "filter_fn": lambda m, n: False}, ArgumentError,
         r"nothing to convert in Tower \(embedding: its rows are looked up, not multiplied; conv: filter_fn leaves"),
    ],
)  # fmt: skip
def test_wrong_use_is_named_and_changes_nothing(tower, arguments, error, message):
    before = snapshot(tower)
    refused(message, convert, tower, error=error, **arguments)
    assert snapshot(tower) == before


def reparametrized():
    model = convert(nn.Sequential(nn.Linear(4, 4)), recipe=CONFIG)
    parametrizations.weight_norm(model[0])
    return model


REFUSED = {
    "nothing to revert": (lambda: revert(Tower()), "revert found no converted module in Tower"),
    "converted twice": (lambda: convert(convert(Tower(), recipe=CONFIG), recipe=CONFIG),
                        r"'(conv|head)' is converted already; call fmtsim.revert"),
    "no module": (lambda: convert([Tower()], recipe=CONFIG), "takes a torch.nn.Module, not list"),
    "nothing": (lambda: revert(None), "revert takes a torch.nn.Module, not NoneType"),
    "a report of nothing": (lambda: report(None), "report takes a torch.nn.Module, not NoneType"),
    "another class": (lambda: revert(reparametrized()), "'0' became a ParametrizedEmulatedLinear after convert"),
    "no config": (lambda: EmulatedLinear(4, 4)(torch.ones(1, 4)),
                  "EmulatedLinear has no LinearConfig; make it from Linear with fmtsim.con"),
    "a filter that is text": (lambda: convert(nn.Linear(4, 4), format="e4m3", filter_fn="mlp"),
                              "filter_fn='mlp' is not a function of a module and its name; write filter"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    refused(message, call)


def test_layers_on_meta_have_results_without_numbers():
    model = convert(nn.Sequential(nn.Linear(4, 3)), recipe=CONFIG)
    refused("x is on meta, w on cpu; move them to one device", model, torch.ones(2, 4, device="meta"))
    y = model.to("meta")(torch.ones(2, 4, device="meta"))
    assert y.is_meta and y.shape == (2, 3)


def test_a_recipe_that_leaves_all_layers_names_the_format_of_its_name():
    with pytest.raises(ArgumentError, match="found nothing to convert in Linear .*; format='mxfp4' converts all"):
        convert(torch.nn.Linear(32, 32), "mxfp4")
