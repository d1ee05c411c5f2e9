# SPDX-License-Identifier: Apache-2.0
"""Layers that fmtsim.ptq leaves alone, by default and by name, and quantisation without data."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.support.errors import PlanUnknownWarning
from tests.support.refusals import refused


class Tiny(nn.Module):
    """A language model of one block: an embedding, a gate, a layer and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gate = nn.Embedding(16, 64), nn.Linear(64, 64)
        self.block, self.lm_head = nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 16)

    def forward(self, ids):
        h = self.embed(ids)
        return self.lm_head(self.block(h * self.gate(h)))


IDS = [torch.arange(16).reshape(2, 8)]
CHANNEL = fmtsim.get_recipe("int4_channel", kind="ptq").linear


@pytest.mark.parametrize(("options", "quantised"), [
    ({}, {"gate": "int4", "block.0": "int4"}),
    ({"ignore": []}, {"gate": "int4", "block.0": "int4", "lm_head": "int4"}),
    ({"ignore": ["lm_head", "re:ga.e"]}, {"block.0": "int4"}),
    ({"ignore": ["block"]}, {"gate": "int4", "lm_head": "int4"}),
    ({"rules": [fmtsim.Rule(name="lm_head", use=CHANNEL)]}, {"gate": "int4", "block.0": "int4", "lm_head": "int4"}),
    ({"rules": [fmtsim.Rule(name="gate")]}, {"block.0": "int4"}),
])  # fmt: skip
def test_the_head_stays_unless_told_and_layers_are_ignored_by_name(options, quantised):
    model = fmtsim.ptq(Tiny(), "int4_g32", IDS, **options)
    report = fmtsim.report(model)
    assert {row.name: row.w for row in report.rows} == quantised
    untouched = [name for name in ("gate", "block.0", "lm_head") if name not in quantised]
    assert all(torch.equal(model.get_submodule(name).weight, Tiny().get_submodule(name).weight) for name in untouched)
    if not options:
        assert dict(report.left_alone)["lm_head"] == "the head of a language model; ignore=[] quantises it"
    for entry, name in {"block": "block.0", "lm_head": "lm_head", "re:ga.e": "gate"}.items():
        assert (dict(report.left_alone).get(name) == f"ignore={entry!r}") == (entry in options.get("ignore", ()))
    if "rules" in options and name not in quantised:
        assert dict(report.left_alone)["gate"] == "the recipe leaves it in high precision: name ~ gate"
    loaded = fmtsim.load_state(Tiny(), fmtsim.state(model))
    assert torch.equal(loaded(IDS[0]), model(IDS[0]))


def test_the_head_of_transformers_is_what_it_says():
    model = Tiny()
    model.get_output_embeddings = lambda: model.gate
    assert [row.name for row in fmtsim.report(fmtsim.ptq(model, "int4_g32")).rows] == ["block.0"]


@pytest.mark.parametrize("target", [None, "h200"])
@pytest.mark.parametrize("scheme", ["int4_g32", "nvfp4_weights", "int8_token", "mxfp8_dynamic"])
def test_rounding_to_nearest_needs_no_data(scheme, target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanUnknownWarning)
        if scheme == "mxfp8_dynamic" and target:
            target = "b200"
        alone, seen = (fmtsim.ptq(Tiny(), scheme, *data, ignore=[], target=target) for data in ((), (IDS,)))
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), seen.parameters(), strict=True))
        assert torch.equal(alone(IDS[0]), seen(IDS[0]))
    assert all(row.output_db != row.output_db for row in fmtsim.report(alone).rows)  # NaN: nothing was measured


def test_every_kind_of_layer_is_found_without_data():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose1d(8, 4, 3), nn.Bilinear(4, 6, 5),
                           nn.MultiheadAttention(64, 4), nn.MultiheadAttention(64, 4, kdim=32, vdim=32)])  # fmt: skip
    names = [row.name for row in fmtsim.report(fmtsim.ptq(model, "int4_channel")).rows]
    assert names == ["0", "0 group 1", "1", "2", "3.in_proj", "3.out_proj", "4.q_proj", "4.k_proj", "4.v_proj",
                     "4.out_proj"]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("int8_static",), {}, r"needs calibration_data= for the static scales of its inputs; pass a few batches: f"),
    (("int4_gptq",), {}, r"needs calibration_data= for GPTQ damping 0.01, act-order; pass"),
    (("int4_g32",), {"ignore": ["lm_haed"]}, r"ignore='lm_haed' is no module of the model; did you mean 'lm_head'"),
    (("int4_g32",), {"ignore": ["re:mlp("]}, r"ignore='re:mlp\(' is not a regular expression: missing \)"),
    (("int4_g32",), {"ignore": "lm_head"}, r"ignore='lm_head' is not a list of names; write ignore=\['lm_head', "),
    (("int4_g32",), {"rules": "lm_head"}, r"lm_head"),
])  # fmt: skip
def test_what_ptq_lacks_is_said(arguments, options, message):
    refused(message, fmtsim.ptq, Tiny(), *arguments, **options)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_a_model_that_accelerate_offloads_is_refused_with_the_way_out(offload, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    folder = () if offload == "cpu_offload" else (tmp_path,)
    message = (
        r"'0.weight' is on the meta device, because Accelerate offloads it; load .*, or call accelerate.hooks.remove_"
    )
    model = nn.Sequential(nn.Linear(32, 32))
    plain, quantised = copy.deepcopy(model), fmtsim.ptq(copy.deepcopy(model), "int4_g32")
    for each in (model, quantised):
        getattr(accelerate, offload)(each, *folder, execution_device=torch.device("cpu"))
    refused(message, fmtsim.ptq, model, "int4_g32")
    refused(message, fmtsim.state, quantised)
    refused(message, fmtsim.export, quantised, tmp_path / "never", "compressed-tensors")
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(*(fmtsim.ptq(each, "int4_g32")[0].weight for each in (model, plain)))
