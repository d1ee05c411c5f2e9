# SPDX-License-Identifier: Apache-2.0
"""``fmtsim train --recipe``: names and files, schedules, loss scaling, and every recipe of the catalogue."""

import json
import math

import pytest
import torch

from fmtsim.lab.cli.main import main
from fmtsim.lab.training.corpus import load_corpus
from fmtsim.lab.training.decoders import GPT
from fmtsim.lab.training.learner import LossScaler, backward
from fmtsim.lab.training.run import rehearse, simulate, train
from fmtsim.lab.training.schemes import Scheme
from fmtsim.nn import convert
from fmtsim.recipes import LossScale, Recipe, get_recipe, list_recipes, save_recipe
from fmtsim.support.progress import Progress
from tests.support.trainings import tiny, training

SMALL = ["--steps", "3", "--batch-size", "2", "--context", "16", "--width", "32", "--layers", "2", "--heads", "2"]


def config(recipe, width=32, **changes):
    return training(Scheme(format="fp32", recipe=get_recipe(recipe)), tiny(width, 2), **changes)


def test_a_recipe_by_name_and_by_file(tmp_path, text, capsys):
    save_recipe(get_recipe("te_current"), tmp_path / "mine.json")
    records = []
    for name in ("te_current", str(tmp_path / "mine.json")):
        out = tmp_path / "out"
        assert main(["train", *SMALL, "--recipe", name, "--data", str(text), "--out", str(out), "--quiet"]) == 0
        records.append(json.loads((out / "record.json").read_text()))
        assert "simulated  te_current" in capsys.readouterr().out
    assert records[0]["simulated"]["losses"] == records[1]["simulated"]["losses"] != records[0]["baseline"]["losses"]
    assert records[0]["config"]["simulated"]["recipe"]["name"] == "te_current"
    assert records[0]["simulated"]["loss_scale"] == 1.0 and records[0]["simulated"]["nonfinite"] == 0


def test_a_recipe_of_attention_alone(tmp_path, text, capsys):
    """Its operands are counted, named and drawn as those of layers are."""
    out = tmp_path / "out"
    assert main(["train", *SMALL, "--recipe", "fa3", "--data", str(text), "--out", str(out), "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "softmax weights, attention" in said and "queries, attention" in said
    record = json.loads((out / "record.json").read_text())["simulated"]
    assert list(record["layers"]["blocks.1.attention"]) == [*"qkvp", *"so"]
    assert "attention: q and k Hadamard all, random signs, e4m3" in (out / "layers.txt").read_text()


def test_names_are_listed(capsys):
    assert main(["train", "--recipe", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == list_recipes(kind="training")


@pytest.mark.filterwarnings("ignore:recipe .* leaves the last 1.% of the blocks")
def test_a_schedule_switches_in_the_last_steps(text):
    """Of 10 steps the last two run in high precision: equal losses before."""
    corpus = load_corpus(text, 16)
    run = train(config("nvfp4_switch", steps=10).simulated, config("nvfp4_switch", steps=10), corpus, Progress())
    assert list(run.stats.history) == [1, 2, 5, 7, 10] and {
        s.format for o in run.stats.layers.values() for s in o.values()
    } == {"high precision", "nvfp4, high precision", "nvfp4_16x16, high precision"}
    always = train(config("te_nvfp4", steps=10).simulated, config("te_nvfp4", steps=10), corpus, Progress())
    assert run.losses[:8] == always.losses[:8] and run.losses[8] != always.losses[8]


def reference(rule, overflows):
    """The factors that torch's scaler goes through."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=rule.initial, growth_factor=rule.growth,
                                  backoff_factor=rule.backoff, growth_interval=rule.interval)  # fmt: skip
    factors, gradients = [], []
    for overflow in overflows:
        scaler.scale(parameter.sum() * (math.inf if overflow else 0.3)).backward()
        scaler.unscale_(optimizer)
        gradients.append(parameter.grad.clone())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        factors.append(scaler.get_scale())
    return factors, gradients


@pytest.mark.parametrize("rule", [LossScale(interval=3), LossScale(initial=3e38, interval=2),
                                  LossScale(initial=7.0, growth=1.7, backoff=0.3, interval=1)])  # fmt: skip
def test_the_schedule_is_torchs(rule):
    g = torch.Generator().manual_seed(0)
    overflows = (torch.rand(200, generator=g) < 0.2).tolist()
    scaler, parameter = LossScaler(rule), torch.nn.Parameter(torch.ones(2))
    factors, gradients = reference(rule, overflows)
    for i, overflow in enumerate(overflows):
        parameter.grad = None
        scaler.scaled(parameter.sum() * (math.inf if overflow else 0.3)).backward()
        assert scaler.unscale([parameter]) is not overflow
        assert overflow or torch.equal(parameter.grad, gradients[i])
        assert scaler.scale == factors[i]
    assert scaler.skipped == scaler.nonfinite == sum(overflows)


def test_the_defaults_are_torchs():
    scaler, parameter = LossScaler(LossScale()), torch.nn.Parameter(torch.ones(1))
    for step in range(2000):
        assert scaler.scale == 65536 or step > 1999
        parameter.grad = torch.ones(1)
        scaler.unscale([parameter])
    assert scaler.scale == 131072
    parameter.grad = torch.full((1,), math.inf)
    assert scaler.unscale([parameter]) is False and scaler.scale == 65536


def test_a_static_scale_stays_and_hysteresis_waits():
    static, parameter = LossScaler(LossScale(initial=1024.0, interval=None)), torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 3.0)
    assert static.unscale([parameter]) and parameter.grad == 3 / 1024 and static.scale == 1024
    patient = LossScaler(LossScale(hysteresis=3, interval=10))
    scales = []
    for number in (math.inf, math.inf, 1.0, math.inf, math.inf, math.inf, math.nan):
        parameter.grad = torch.full((1,), number)
        patient.unscale([parameter])
        scales.append(patient.scale / 65536)
    assert scales == [1, 1, 1, 1, 1, 0.5, 0.25]


def test_gradients_that_are_not_finite_are_counted_without_a_rule():
    scaler, parameter = LossScaler(None), torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), math.nan)
    assert scaler.unscale([parameter]) is True and (scaler.nonfinite, scaler.skipped) == (1, 0)


def test_small_gradients_learn_only_under_a_scale():
    """Gradients near 1e-9 vanish in fp16; with a scale of 2^16 they are those of float32."""
    x = torch.full((4, 8), 1.0)
    grads = {}
    for name, rule in (("none", None), ("scaled", LossScale())):
        model = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.constant_(model.weight, 0.5)
        convert(model, recipe="amp_fp16")
        scaler = LossScaler(rule)
        scaler.scaled(model(x).sum() * 2.0**-30).backward()
        scaler.unscale(model.parameters())
        grads[name] = model.weight.grad
    assert not grads["none"].any() and torch.equal(grads["scaled"], torch.full((8, 8), 4 * 2.0**-30))


def test_a_run_under_loss_scaling_skips_counts_and_says_so(tmp_path, text, capsys):
    recipe = Recipe(name="wild", linear=get_recipe("amp_fp16").linear, autocast="float16",
                    loss_scale=LossScale(initial=2.0**40))  # fmt: skip
    save_recipe(recipe, tmp_path / "wild.json")
    out = tmp_path / "out"
    words = ["--recipe", str(tmp_path / "wild.json"), "--data", str(text), "--out", str(out), "--quiet"]
    assert main(["train", *SMALL, *words]) == 0
    record = json.loads((out / "record.json").read_text())["simulated"]
    assert record["skipped"] == record["nonfinite"] == 3 and record["loss_scale"] == 2.0**37
    assert record["stopped"] is None
    said = "steps with gradients that were not finite: 3, 3 of them skipped; the loss ended at a scale of 1.37439e+11"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", ["amp_bf16", "amp_fp16"])
def test_the_rest_runs_under_autocast(name, text):
    seen = []
    model = GPT(config(name).model, 0)
    simulate(model, config(name).simulated, config(name), torch.Generator())
    model.blocks[0].up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    backward(model, tokens, tokens, config(name).simulated, LossScaler(None))
    assert seen == [torch.bfloat16 if name == "amp_bf16" else torch.float16]


@pytest.mark.parametrize("name", ["te_delayed", "quartet", "intel_2t"])
def test_a_rehearsal_leaves_nothing_behind(name, text):
    rehearse(config(name, width=64))
    corpus = load_corpus(text, 16)
    runs = [train(config(name).simulated, config(name), corpus, Progress()).losses for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:recipe .* leaves the last:fmtsim.support.errors.CoverageWarning")  # one of two
@pytest.mark.parametrize("name", list_recipes(kind="training"))
def test_every_recipe_trains(name, text):
    """50 steps on the CPU end with a finite loss, well below the first."""
    options = config(name, width=128, steps=50, batch_size=8)
    run = train(options.simulated, options, load_corpus(text, 16), Progress())
    assert run.stopped is None and len(run.losses) == 50 and math.isfinite(run.final_loss + run.validation)
    assert run.final_loss < run.losses[0] - 1
    if get_recipe(name).loss_scale is None:
        assert run.nonfinite == run.skipped == 0
