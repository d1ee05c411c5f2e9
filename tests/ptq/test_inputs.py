# SPDX-License-Identifier: Apache-2.0
"""What fmtsim.ptq refuses: data, models and recipes that do not fit, each with the next step."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.scaling import Scaling
from fmtsim.ptq import PtqRecipe
from fmtsim.recipes import Rule
from fmtsim.recipes.ptq_catalogue import operand
from fmtsim.support.errors import ArgumentError, CoverageWarning
from tests.support.operands import normal
from tests.support.ptq_models import DATA, mlp
from tests.support.refusals import refused

BAD = [
    ("nonsense", DATA, r"recipe='nonsense' is unknown \(fmtsim.list_recipes\(kind='ptq'\)"),
    ("int8_statik", DATA, r"did you mean 'int8_static'"),
    ("int8_static", [], r"calibration data is empty; pass at least one batch"),
    ("int8_static", [torch.empty(0, 16)], r"a tensor without elements in a batch"),
    ("int8_static", DATA[0], r"calibration data is one tensor \(20, 16\); pass an iterable of batches"),
    ("int8_static", np.array(2), r"calibration data is ndarray; pass an iterable of batches"),
    ("int8_static", 3, r"calibration data is int; pass an iterable of batches"),
    (
        "int8_smooth",
        [normal(4, 15)],
        r"calibration batch 0 \(torch.float32 \(4, 15\)\) does not run through Sequential",
    ),
    ("int8_static", [DATA[0], DATA[0] * float("nan")], r"layer '0'|calibration batch 1 .* NaN or Inf"),
    ("int4_gptq", [{"x": DATA[0]}], r"calibration batch 0 \(x: torch.float32 \(20, 16\)\) does not run"),
]


@pytest.mark.parametrize(("recipe", "data", "message"), BAD)
def test_bad_input_leaves_the_model_as_it_was(recipe, data, message):
    model = mlp().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    refused(message, fmtsim.ptq, model, recipe, data)
    assert type(model[0]) is nn.Linear and model.training and not model[0]._forward_pre_hooks
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], t) for name, t in before.items())


def test_labels_and_arrays_get_a_hint():
    labelled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA[0], torch.arange(20)), batch_size=4)
    with pytest.raises(ArgumentError, match=r"several arguments: \[x for x, label in data\] leaves labels out"):
        fmtsim.ptq(mlp(), "int8_static", labelled)
    model = fmtsim.ptq(mlp(), "int8_static", (x for x, label in labelled))
    assert len(fmtsim.report(model).rows) == 2
    with pytest.raises(
        ArgumentError, match=r"\(ndarray\) does not run .*; a batch is a tensor, a tuple of arguments or"
    ):
        fmtsim.ptq(mlp(), "int8_static", [DATA[0].numpy()])

    class Fussy(nn.Linear):
        def forward(self, x):
            raise KeyError("mask")

    with pytest.raises(ArgumentError, match=r"does not run through Sequential: 'mask'"):
        fmtsim.ptq(nn.Sequential(nn.Linear(16, 4), Fussy(4, 4)), "int8_static", DATA)


def test_a_model_that_changes_its_inputs_sees_them_as_they_are():
    class Doubling(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.inplace = nn.Linear(16, 4), inplace

        def forward(self, x, nested=None):
            x = x if nested is None else nested["x"][0]
            return self.fc(x.mul_(2) if self.inplace else x * 2)

    for batch in (DATA[0], (DATA[0],), {"x": None, "nested": {"x": [DATA[0]]}}):
        before = DATA[0].clone()
        found, expected = (fmtsim.ptq(Doubling(inplace), "int8_static", [batch]) for inplace in (True, False))
        rows = [fmtsim.report(model)["fc"] for model in (found, expected)]
        assert rows[0] == rows[1] and torch.equal(DATA[0], before)


def test_attention_that_cannot_be_quantised_is_found_at_once():
    class Attending(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.attention, self.weights = nn.MultiheadAttention(8, 2), weights

        def forward(self, x):
            return self.attention(x, x, x, need_weights=self.weights)[0]

    model, x = Attending(True).requires_grad_(False), normal(5, 2, 8)
    before = model(x)
    with pytest.raises(ArgumentError, match=r"layer 'attention' ran without calling scaled_dot_product_attention"):
        fmtsim.ptq(model, "nemotron_kv8", [x])
    assert type(model.attention) is nn.MultiheadAttention and torch.equal(model(x), before)
    plain, quantised = (
        fmtsim.ptq(copy.deepcopy(m), r, [x])
        for m, r in ((model, "nemotron"), (Attending(False).requires_grad_(False), "nemotron_kv8"))
    )
    assert "attention: q high precision; k e4m3" in str(fmtsim.report(quantised))
    assert "attention:" not in str(fmtsim.report(plain))


def test_autocast_is_refused():
    model = mlp()
    before = model[0].weight.clone()
    for name in ("int8_static", "int4_gptq"):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(
                ArgumentError, match=r"layer '0': it multiplies with a copy of its weight.*outside of torch.autocast"
            ),
        ):
            fmtsim.ptq(model, name, DATA)
    assert type(model[0]) is nn.Linear and torch.equal(model[0].weight, before)


def broken(where):
    model = mlp()
    if where == "nan":
        model[2].weight.data[3, 4] = torch.nan
    elif where == "lazy":
        model = nn.Sequential(nn.Linear(16, 4), nn.LazyLinear(4))
    elif where == "inside":
        model[2] = torch.compile(model[2], backend="eager")
    elif where == "in place":
        model.compile(backend="eager")
    return {"meta": lambda: model.to("meta"), "compiled": lambda: torch.compile(model, backend="eager"),
            "dict": lambda: {}}.get(where, lambda: model)()  # fmt: skip


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nan", r"parameter '2.weight' holds NaN or Inf; load sound weights first"),
        ("lazy", r"parameter '1.weight' has no shape yet; run one batch through the model first"),
        ("meta", r"parameter '0.weight' is on the meta device; load the trained weights first"),
        ("compiled", r"the model is compiled, which hides its layers; quantise it first, then torch.compile it"),
        ("in place", r"the model is compiled"),
        ("inside", r"module '2' is compiled"),
        ("dict", r"(ptq|search) takes a torch.nn.Module, not dict"),
    ],
)
def test_models_that_are_not_ready(where, message):
    for use in (lambda m: fmtsim.ptq(m, "int8_static", DATA), lambda m: fmtsim.search(m, DATA, bits=6)):
        refused(message, use, broken(where))


class Experts(nn.Module):
    """Layers of which data reach the first of each kind: two experts, and one in a branch of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.wide, self.idle = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, other=False):
        return self.idle(x) if other else self.wide(8 * self.experts[1](self.experts[0](x)))


@pytest.mark.parametrize("recipe", ["int4_g32", "int8_token", "q8_0", "int8_static", "int4_gptq", "nvfp4_static"])
def test_layers_that_calibration_never_ran_are_rounded_by_their_own_ranges(recipe):
    model, alone = Experts(), Experts()
    said = (
        "calibration never ran experts.2, idle: weights are rounded to nearest by their own ranges, static inputs under"
    )
    with pytest.warns(CoverageWarning, match=said):
        report = fmtsim.report(fmtsim.ptq(model, recipe, [normal(20, 32, seed=1)]))
    assert report.unreached == ("experts.2", "idle") and said in str(report)
    assert [math.isnan(report[name].output_db) for name in ("experts.1", "experts.2", "idle")] == [False, True, True]
    fmtsim.ptq(alone, PtqRecipe(name="alone", w=fmtsim.get_recipe(recipe).w))
    for name in ("experts.2", "idle"):
        assert torch.equal(model.get_submodule(name).weight, alone.get_submodule(name).weight)
    if "static" in recipe:  # experts.2 has the range of the widest expert, idle that of all layers
        limits = {row.name: row.x_limit for row in report.rows}
        assert limits["experts.2"] == max(limits["experts.0"], limits["experts.1"]) < limits["wide"] == limits["idle"]


def test_data_that_reach_no_layer_are_refused():
    message = r"calibration never ran idle; pass calibration data that reaches a layer"
    refused(message, fmtsim.ptq, Experts(), "int8_static", [normal(20, 32)], ignore=["experts", "wide"])
    model = fmtsim.ptq(Experts(), "int8_static", [normal(20, 32)], ignore=["experts.2", "idle"])
    assert type(model.idle) is nn.Linear and not fmtsim.report(model).unreached


def test_nothing_to_quantise():
    refused(r"convert found nothing to convert in ReLU", fmtsim.ptq, nn.ReLU(), "int8_static", DATA)
    with pytest.raises(ArgumentError, match=r"fits no layer of the model"):
        fmtsim.ptq(mlp(), PtqRecipe(name="r", w=operand("int8", Scaling()), rules=(Rule(name="absent"),)), DATA)
    refused(r"ptq takes a torch.nn.Module, not int", fmtsim.ptq, 3, "int8_static", DATA)
