# SPDX-License-Identifier: Apache-2.0
"""``benchmarks.suite layers``: what it runs and says, on sizes that take no time. Speed itself is not tested."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fmtsim
from benchmarks.suite import device as device_benchmarks
from benchmarks.suite import layers, models
from benchmarks.suite.__main__ import main
from benchmarks.suite.layers import Bench, Case, Result, Step
from benchmarks.suite.models import Sizes, without_head
from fmtsim.lab.cli.main import BAD_INPUT

SMALL = Sizes(width=64, layers=2, batch_size=2, context=16, vocabulary=64)
WORDS = ("--width", "64", "--layers", "2", "--batch-size", "2", "--context", "16", "--repeats", "1")
transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def test_cases_name_model_mode_and_recipe():
    names = [case.name for case in layers.cases(["te_current"], "cpu")]
    assert names == ["layer eager te_current", "llama eager te_current", "llama default te_current",
                     "gpt eager te_current", "gpt default te_current"]  # fmt: skip
    assert "gpt reduce-overhead te_current" in [case.name for case in layers.cases(["te_current"], "cuda:0")]


def test_peers_run_where_they_are_installed(monkeypatch):
    monkeypatch.setattr(models, "installed", lambda: ["torchao_float8"])
    for device, recipes in (("cpu", layers.RECIPES_ON_CPU), ("cuda", layers.RECIPES)):
        assert list(dict.fromkeys(c.recipe for c in layers.cases(None, device))) == [*recipes, "torchao_float8"]


@pytest.mark.parametrize("model", [pytest.param("llama", marks=transformers), "gpt"])
def test_a_recipe_converts_the_model_but_for_its_head(model):
    plain, own = (Step(Case(model=model, mode="eager", recipe=name), SMALL, "cpu") for name in (None, "te_current"))
    assert not [m for m in plain.model.modules() if isinstance(m, fmtsim.nn.modules.EmulatedModule)]
    converted = {n for n, m in own.model.named_modules() if isinstance(m, fmtsim.nn.modules.EmulatedModule)}
    linear = {n for n, m in plain.model.named_modules() if isinstance(m, nn.Linear)}
    assert converted == linear - {"lm_head"}
    weights = [p.detach().clone() for p in own.model.parameters()]
    first, second = own(), own()
    assert second < first  # the same batch again
    assert not all(map(torch.equal, weights, own.model.parameters()))


def test_layers_alone_follow_no_rules_for_blocks():
    layer = layers._Layers(Case(model="layer", mode="eager", recipe="te_nvfp4"), SMALL, "cpu")
    assert sum(isinstance(m, fmtsim.nn.modules.EmulatedModule) for m in layer.layers.modules()) == SMALL.layers
    assert layer.loss() is None


def test_the_time_of_a_layer_is_its_share_of_both_passes(monkeypatch):
    layer = layers._Layers(Case(model="layer", mode="eager", recipe=None), SMALL, "cpu")
    clock = iter([0.0, 3.0, 10.0, 15.0])  # forward 3, backward 5
    monkeypatch.setattr(layers, "clock_of", lambda threads: lambda: next(clock))
    assert layer.seconds() == 4.0  # of two


def test_a_model_and_mode_share_one_plain_model(monkeypatch):
    bench, made = Bench("cpu", {"gpt": SMALL, "layer": SMALL}, 1), []
    monkeypatch.setattr(bench, "_made", lambda case, made_by=bench._made: made.append(case.name) or made_by(case))
    cases = layers.cases(["te_current", "te_mxfp8"], "cpu")
    results = [bench.measure(case) for case in cases if case.mode == "eager" and case.model != "llama"]
    assert made == ["layer eager te_current", "layer eager plain", "layer eager te_mxfp8", "gpt eager te_current",
                    "gpt eager plain", "gpt eager te_mxfp8"]  # fmt: skip
    assert [result.case.name for result in results] == [name for name in made if not name.endswith("plain")]
    assert all(result.ratio == result.seconds / result.plain_seconds for result in results)
    assert results[0].loss is None and 0 < results[-1].loss < 10


def test_peers_that_are_absent_are_said_once(capsys, monkeypatch):
    monkeypatch.setattr(models, "installed", lambda: ["torchao_float8"])
    monkeypatch.setattr(layers, "RECIPES_ON_CPU", ("te_current",))
    assert "not measured, because not installed: microxcaling_mxfp4\n" in run(capsys, "--only", "layer * te_current")


def test_a_missing_peer_names_the_next_step():
    assert main(["layers", "--recipes", "nope"]) == BAD_INPUT
    with pytest.raises(fmtsim.FmtsimError, match="no_such is not installed; pip install it, or leave it out"):
        models.Peer(module="no_such", install="pip install it", apply=print).convert(nn.Linear(1, 1), lambda m, n: True)


class TheirLinear(nn.Linear):
    def __init__(self, inputs, outputs, bias, mx_specs):
        super().__init__(inputs, outputs, bias)
        self.specs = mx_specs


def test_microxcaling_exchanges_the_chosen_layers_and_keeps_their_parameters(monkeypatch):
    mx = SimpleNamespace(finalize_mx_specs=lambda specs: specs, Linear=TheirLinear, __spec__=object())
    monkeypatch.setitem(sys.modules, "mx", mx)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4)), "lm_head": nn.Linear(4, 4, bias=False)})
    weights = dict(model.named_parameters())
    layers._convert(model, "microxcaling_mxfp4", {})
    assert type(model["a"][0]) is TheirLinear and type(model["lm_head"]) is nn.Linear
    assert model["a"][0].specs["w_elem_format"] == "fp4_e2m1" and model["a"][0].specs["custom_cuda"] is False
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())


def test_torchao_gets_the_filter_and_emulates_on_a_cpu(monkeypatch):
    given = {}
    float8 = SimpleNamespace(
        Float8LinearConfig=lambda emulate: ("config", emulate),
        convert_to_float8_training=lambda model, **options: given.update(options),
    )
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(__spec__=object()))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    model = nn.Linear(4, 4)
    layers._convert(model, "torchao_float8", {})
    assert given == {"module_filter_fn": without_head, "config": ("config", True)}
    assert [without_head(model, name) for name in ("blocks.0.up", "lm_head")] == [True, False]


def run(capsys, *words):
    assert main(["layers", "--device", "cpu", *WORDS, *words]) == 0
    return capsys.readouterr().out


def test_the_record_is_what_is_printed_as_json_and_kept_after_every_case(tmp_path, capsys):
    path = tmp_path / "record.json"
    out = run(capsys, "--only", "layer *", "--recipes", "te_current", "--json", "--record", str(path))
    record = json.loads(out)
    assert record == json.loads(path.read_text())
    assert [result["case"] for result in record["results"]] == ["layer eager te_current"]
    assert record["sizes"]["layer"] == {"width": 64, "layers": 2, "batch_size": 2, "context": 16, "vocabulary": 1}
    assert record["failed"] == {} and record["machine"]["torch"] == torch.__version__
    assert record["not_installed"] == []  # nothing else was asked for


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
def test_a_compiled_case_takes_the_steps_of_an_eager_one(capsys, monkeypatch):
    modes = []

    def traced(model, mode, compiled=torch.compile):  # without a compiler of C++
        modes.append(mode)
        return compiled(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    record = json.loads(run(capsys, "--only", "gpt * *", "--recipes", "te_current", "--json"))
    eager, compiled = record["results"]
    assert (eager["mode"], compiled["mode"], modes) == ("eager", "default", ["default", "default"])
    assert compiled["loss"] == eager["loss"]


def test_what_fails_is_said_and_the_others_go_on(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = run(capsys, "--only", "* eager *", "--recipes", "te_current")
    assert "layer eager te_current" in text and "gpt eager te_current" in text
    assert text.splitlines()[-1].startswith(
        "llama eager te_current: not measured, transformers is not installed; pip install"
    )


def test_the_tables_to_the_letter():
    results = [
        Result(case=Case(model="layer", mode="eager", recipe="te_current"), seconds=6e-5, plain_seconds=3e-5,
               first_seconds=1.25),
        Result(case=Case(model="llama", mode="default", recipe="te_nvfp4"), seconds=0.03, plain_seconds=0.02,
               first_seconds=40.0, loss=10.25, gpu_ratio=1.25),
    ]  # fmt: skip
    text = f"{device_benchmarks.layers_table(results)}\n{device_benchmarks.layers_summary(results)}"
    assert [line.rstrip() for line in text.splitlines()] == TABLES.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipes", "te_curent"), "te_current"),
        (("--device", "cuda:77"), "--device cuda:77 is not there"),
        (("--emulate",), "--emulate without --target emulates nothing; pass --target h200, too"),
        (("--only", "nothing"), "--only 'nothing' matches no case; the cases are 'layer eager te_current'"),
        (
            ("--threads", "1"),
            "--threads belongs to benchmarks.suite casts and gemm, not to layers; leave it out",
        ),
        (
            ("--kernels-only",),
            "--kernels-only belongs to benchmarks.suite casts and gemm, not to layers; leave it out",
        ),
        (("--width", "200"), "--width 200 is not a multiple of 64, the features of an attention head; choose 192"),
        (("--width", "0"), "--width 0 is not possible; choose 1 or more"),
    ],
)
def test_errors_name_the_argument(words, message, capsys):
    assert main(["layers", *words]) == BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("what", ["casts", "gemm", "gpu"])
def test_other_jobs_refuse_options_of_layers(what, capsys):
    for words in (("--width", "8"), ("--recipes", "te_current"), ("--emulate",), ("--device", "cpu")):
        assert main([what, *words]) == BAD_INPUT
        assert f"{words[0]} belongs to benchmarks.suite layers, not to {what}; leave it out" in capsys.readouterr().err


TABLES = """\
case                        ms  plain, ms  ratio  of kernels  first, s     loss
----------------------  ------  ---------  -----  ----------  --------  -------
layer eager te_current   0.060      0.030  2.000           -       1.2        -
llama default te_nvfp4  30.000     20.000  1.500       1.250      40.0  10.2500
over plain  layer eager  llama default
----------  -----------  -------------
te_current         2.00              -
te_nvfp4              -           1.50
"""
