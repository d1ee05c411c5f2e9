# SPDX-License-Identifier: Apache-2.0
"""Which layers the rules of a recipe find by place: stacks, stages, towers, heads, and models that have none."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.nn import convert, report
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.planning import block_number, find_blocks
from fmtsim.recipes import Recipe, Rule, get_recipe, list_recipes
from fmtsim.recipes.layer_plan import HIGH
from fmtsim.support.errors import CoverageWarning
from tests.support.refusals import refused

LINEAR = get_recipe("te_current").linear


def left(model, **rule):
    """Layers that a rule leaves in high precision."""
    convert(model, recipe=Recipe(name="r", linear=LINEAR, rules=(Rule(**rule),)))
    return [row.name for row in report(model).left_alone if row.detail.startswith(HIGH)]


class Bottleneck(nn.Module):
    def __init__(self, width, down=False):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) if down else None


class ResNet(nn.Module):
    """Stages of 2, 4 and 3 blocks behind a stem and before a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        for i, count in enumerate((2, 4, 3)):
            stage = nn.Sequential(*(Bottleneck(8, down=j == 0) for j in range(count)))
            self.add_module(f"layer{i + 1}", stage)
        self.fc = nn.Linear(8, 4)


class Plain(nn.Module):
    """Layers as attributes."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(32, 32) for _ in range(3))


class Tower(nn.Module):
    """Blocks with longer stacks inside, and a head that is a stack of layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(32, 32) for _ in range(5))) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def test_the_stages_of_a_cnn_are_one_row_of_blocks():
    blocks = find_blocks(ResNet())
    assert len(blocks) == 9 and blocks[0] == "layer1.0" and blocks[-1] == "layer3.2"
    assert left(ResNet(), last_blocks=0.15) == ["layer3.1.conv", "layer3.2.conv"]  # 2 of 9
    assert left(ResNet(), first_blocks=3) == [
        "layer1.0.conv", "layer1.0.downsample.0", "layer1.1.conv", "layer2.0.conv", "layer2.0.downsample.0"
    ]  # fmt: skip
    assert left(ResNet(), head=True) == ["fc"]


def test_inner_stacks_are_parts_of_a_block():
    assert find_blocks(Tower()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert left(Tower(), last_blocks=1) == [f"blocks.2.{i}" for i in range(5)]
    assert left(Tower(), head=True) == ["head.1"]


def test_a_list_of_different_things_around_a_stack_is_none():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(*(Bottleneck(8) for _ in range(4))), nn.Linear(8, 8))
    assert find_blocks(model) == [f"1.{i}" for i in range(4)]
    mixed = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 8))
    assert find_blocks(mixed) == ["0", "1", "2"] and left(mixed, last_blocks=1) == ["2"]
    assert find_blocks(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == []


def test_an_encoder_and_its_decoder_follow_each_other():
    model = nn.Transformer(32, 2, num_encoder_layers=3, num_decoder_layers=2, dim_feedforward=32, batch_first=True)
    assert find_blocks(model) == [f"encoder.layers.{i}" for i in range(3)] + [f"decoder.layers.{i}" for i in range(2)]
    names = left(model, last_blocks=0.2)
    assert names and all(name.startswith("decoder.layers.1.") for name in names)


def test_bert():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        hf = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 5}
        model = hf.BertForMaskedLM(hf.BertConfig(**sizes, vocab_size=64))
    assert find_blocks(model) == [f"bert.encoder.layer.{i}" for i in range(5)]
    convert(model, recipe="te_nvfp4")
    alone = {row.name for row in report(model).left_alone if row.detail.startswith(HIGH)}
    assert {name for name in alone if ".layer." in name} == {
        f"bert.encoder.layer.4.{part}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                     "intermediate.dense", "output.dense")
    }  # fmt: skip
    assert "cls.predictions.decoder" in alone and "bert.encoder.layer.3.output.dense" not in alone


def test_places():
    assert block_number("blocks.1.up", {"blocks.1": 0, "blocks.10": 1}) == 0
    assert block_number("blocks.10.up", {"blocks.1": 0, "blocks.10": 1}) == 1
    assert block_number("head", {"blocks.1": 0}) is None


@pytest.mark.parametrize("name", ["te_nvfp4", "mxfp4"])
def test_a_share_of_no_blocks_is_none_and_is_said(name):
    model = convert(Plain(), recipe=name)
    found = fmtsim.report(model)
    both = ("'mxfp4' is the recipe of that name, not the format (format='mxfp4')",) * (name == "mxfp4")
    assert found.notes == (*both, "rule 'last 15% of the blocks' found no blocks and leaves no layer out")
    assert found.summary.endswith("; rule 'last 15% of the blocks' found no blocks and leaves no layer out")
    left = [row.name for row in found.rows if row.multiplies and not row.converted]
    assert len(left) == 1 and next(row for row in found.rows if row.name == left[0]).detail.endswith(": head")


@pytest.mark.parametrize(
    ("make", "rules", "said"),
    [
        (Plain, (Rule(first_blocks=2),), r"rules\[0\] of recipe 'r' has first_blocks=2, and Plain has no blocks"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8)), (Rule(last_blocks=1),),
         r"has last_blocks=1, and Sequential has no blocks to count: .* or pass Rule\(optional=True\)"),
    ],
)  # fmt: skip
def test_a_model_without_blocks_is_told(make, rules, said):
    recipe = "te_nvfp4" if rules is None else Recipe(name="r", linear=LINEAR, rules=rules)
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    refused(said, convert, model, recipe=recipe)
    assert {name: type(module) for name, module in model.named_modules()} == before
    if rules is not None:
        optional = tuple(dataclasses.replace(rule, optional=True) for rule in rules)
        convert(model, recipe=dataclasses.replace(recipe, rules=optional))
        assert not any(row.detail.startswith("the recipe leaves") for row in report(model).rows)


def test_the_remedy_works():
    """What the message says to write leaves the named layers in high precision."""
    rules = (Rule(head=True), Rule(name="fc2"))
    model = convert(Plain(), recipe=dataclasses.replace(get_recipe("te_nvfp4"), rules=rules))
    assert [row.name for row in report(model).converted] == ["fc1"]
    assert model.fc1(torch.ones(16, 32)).isfinite().all()


class Headed(nn.Module):
    def __init__(self, tied=False, head=True):
        super().__init__()
        self.embedding = nn.Embedding(32, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
        if head:
            self.head = nn.Linear(128, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, EmulatedModule)]


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_stays_in_high_precision(tied):
    model = fmtsim.convert(Headed(tied), "mu_s")
    assert converted(model) == [f"blocks.{i}.0" for i in range(4)]
    assert f"{HIGH}: head" in str(fmtsim.report(model))
    assert not tied or model.head.weight is model.embedding.weight


def test_a_model_without_head_keeps_its_last_block():
    """The last linear layer is not a head where it belongs to a block."""
    assert converted(fmtsim.convert(Headed(head=False), "mu_s")) == [f"blocks.{i}.0" for i in range(4)]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in list_recipes(kind="training")
        if get_recipe(name).linear is not None and get_recipe(name).attention is None
    ],
)
def test_no_recipe_touches_an_embedding(name):
    model = Headed()
    before = model.embedding.weight.detach().clone()
    fmtsim.convert(model, name, generator=0, total_steps=10)
    assert type(model.embedding) is nn.Embedding
    rescaled = any(one.kind == "operations" for one in get_recipe(name).replace)
    assert torch.equal(model.embedding.weight, before / before.std() if rescaled else before)


def test_a_share_that_rounding_up_doubles_is_said_before_anything_changes():
    def tower(blocks):
        return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(blocks)])

    small = tower(2)
    with pytest.raises(
        CoverageWarning, match=r"te_nvfp4 leaves the last 15% of the blocks in high precision, which is 1 of 2 in Sequ"
    ):
        convert(small, recipe="te_nvfp4")
    assert type(small[0][0]) is nn.Linear
    convert(tower(4), recipe="te_nvfp4")  # a quarter
    whole = get_recipe("te_nvfp4_all").linear
    convert(small, recipe=Recipe(name="r", linear=whole, rules=(Rule(last_blocks=0.15, use=LINEAR),)))


@pytest.mark.parametrize(
    ("name", "high"),
    [("gate", True), ("router", True), ("shared_expert_gate", True), ("gate_proj", False), ("navigate", False)],
)
def test_deepseek_leaves_gating_in_high_precision(name, high):
    mlp = nn.ModuleDict({name: nn.Linear(128, 128), "other": nn.Linear(128, 128)})
    model = convert(nn.ModuleDict({"mlp": mlp, "head": nn.Linear(128, 128)}), recipe="deepseek_v3")
    assert (type(mlp[name]) is nn.Linear) == high and type(model["head"]) is nn.Linear
    assert isinstance(mlp["other"], EmulatedModule)
