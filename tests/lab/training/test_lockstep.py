# SPDX-License-Identifier: Apache-2.0
"""Training in lockstep: two models that do the same stay equal, and one planted bit is found where it was planted.

Here both sides are emulated, since there is no card; who multiplies on a card is tested in tests/cuda.
"""

import dataclasses
import json
import math
import os

import pytest
import torch

from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.lab.analysis.one_step import deterministic
from fmtsim.lab.cli.main import main
from fmtsim.lab.training import artifacts, lockstep
from fmtsim.lab.training.corpus import load_corpus
from fmtsim.lab.training.lockstep import build_side, check_native, run_lockstep
from fmtsim.lab.training.run import train
from fmtsim.lab.training.schemes import Scheme
from fmtsim.recipes import get_recipe
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError
from fmtsim.support.progress import Progress
from tests.support.refusals import refused
from tests.support.trainings import tiny, training

MODEL = tiny(32, 2)
SMALL = ["--steps", "2", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2"]
STEPS = 4


@pytest.fixture(scope="module")
def corpus(text):
    return load_corpus(text, MODEL.context)


def config(scheme=None, **changes):
    return training(scheme or Scheme(format="e4m3", target="h200"), MODEL, **{"steps": STEPS, **changes})


def sides(setting, **second):
    first = build_side("native", setting, native=False)
    return first, build_side("emulated", setting, native=False, **second)


def run(setting, corpus, pair=None):
    return run_lockstep(pair or sides(setting), setting, corpus, Progress())


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(format="e4m3", target="h200"),
        Scheme(format="e4m3", target="h200", fast_accum=True, fast_backward=True),
        Scheme(format="bf16", target="h200"),
        Scheme(format="e4m3", target="h200", rounding="stochastic", grad_rounding="stochastic"),
        Scheme(format="fp32", target="h200", recipe=get_recipe("te_delayed"), autocast="bfloat16"),
        Scheme(format="fp32", target="h200", recipe=get_recipe("amp_fp16")),
    ],
    ids=["slow", "fast", "bf16", "stochastic", "te_delayed", "amp_fp16"],
)
def test_equal_sides_stay_equal(corpus, scheme):
    setting = config(scheme)
    result = run(setting, corpus)
    assert result.equal and result.steps == STEPS and result.mismatch is None and result.stopped is None
    assert result.labels == ("native", "emulated")
    assert result.digest[0] == result.digest[1] != run(config(scheme, seed=1), corpus).digest[0]
    assert result.losses[-1] < result.losses[0]
    assert all(0 < seconds < 100 for seconds in result.seconds) and sum(result.seconds) < 200
    # Weights at the start; loss, gradients and weights of each step.
    assert result.compared == result.parameters * (1 + 2 * STEPS) + STEPS


def test_the_losses_are_those_of_the_usual_loop(corpus):
    scheme = Scheme(format="e4m3", target="hopper.wgmma")
    setting = config(scheme)
    pair = sides(setting)
    for side in pair:
        side.model.head = None  # the loop's head is in high precision
    assert run(setting, corpus, pair).losses == train(scheme, setting, corpus, Progress()).losses


def flipped(parameter, step, index, bit):
    """Flip one bit of a parameter's gradient in a step."""
    calls = iter(range(1, STEPS + 1))

    def hook(gradient):
        if next(calls) != step:
            return gradient
        changed = gradient.clone()
        changed.view(torch.int32)[index] ^= 1 << bit
        return changed

    parameter.register_hook(hook)


@pytest.mark.parametrize("bit", [0, 31])
def test_a_planted_gradient_is_found(corpus, bit):
    setting = config()
    pair = sides(setting)
    flipped(dict(pair[1].model.named_parameters())["blocks.1.up.weight"], 3, (5, 7), bit)
    result = run(setting, corpus, pair)
    found = result.mismatch
    assert not result.equal and result.steps == 2
    assert (found.step, found.kind, found.tensor) == (3, "gradient", "blocks.1.up.weight")
    first = found.comparison.first
    assert found.comparison.mismatches == 1 and first.index == (5, 7)
    assert first.actual_code ^ first.expected_code == 1 << bit
    assert found.product == "when forward and backward are repeated no bit differs"  # a hook is not an operation
    said = str(found)
    assert said.startswith("step 3, gradient of blocks.1.up.weight [5, 7]: actual 0x") and "1 of 4096 differ" in said
    assert f"0x{first.actual_code:08X}" in said and f"0x{first.expected_code:08X}" in said


def test_a_planted_weight_is_found(corpus):
    setting = config()
    pair = sides(setting)
    steps = iter(range(STEPS))
    weight = pair[1].model.norm.weight
    original = torch.optim.AdamW.step

    def step(optimizer, *arguments, **options):
        found = original(optimizer, *arguments, **options)
        if any(weight is p for group in optimizer.param_groups for p in group["params"]) and next(steps) == 1:
            with torch.no_grad():
                weight.view(torch.int32)[4] += 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        found = run(setting, corpus, pair).mismatch
    assert (found.step, found.kind, found.tensor, found.product) == (2, "weight", "norm.weight", "")
    assert found.comparison.first.index == (4,)


def test_a_zero_of_the_other_sign_is_a_difference(corpus):
    setting = config()
    pair = sides(setting)
    for side, zero in zip(pair, (0.0, -0.0), strict=True):
        side.model.position.data[3, 2] = zero
    found = run(setting, corpus, pair).mismatch
    assert (found.step, found.kind, found.tensor, found.comparison.zero_signs) == (0, "weight", "position", 1)


def test_another_order_of_sums_is_found_and_named(corpus):
    setting = config(Scheme(format="e4m3", target="hopper.wgmma"))
    found = run(setting, corpus, sides(setting, plan=GemmPlan(promote_every=32))).mismatch
    assert found.step == 1 and found.kind in ("loss", "gradient")
    assert found.product.startswith("first in blocks.0.down forward: fprop: output [0, "), found.product


def test_a_layer_that_differs_is_named(corpus):
    setting = config()
    pair = sides(setting)
    layer = pair[1].model.blocks[1].attention.out
    layer.register_forward_hook(lambda module, inputs, y: 1.5 * y)
    found = run(setting, corpus, pair).mismatch
    assert (found.step, found.kind, found.tensor) == (1, "loss", "loss")
    assert found.product.startswith("first in blocks.1.attention.out forward: Linear: output [0, 0, 0]: actual 0x")


def test_a_product_of_gradients_that_differs_is_named(corpus):
    setting = config(Scheme(format="e4m3", target="hopper.wgmma"))
    pair = sides(setting)
    emulation = pair[1].model.blocks[1].up.emulation
    for layer in emulation.products.values():
        wgrad = dataclasses.replace(layer.config.wgrad, target="ada.mma")
        layer.config = dataclasses.replace(layer.config, wgrad=wgrad)
        layer.routes["wgrad"] = layer.config.route("wgrad")
    found = run(setting, corpus, pair).mismatch
    assert (found.step, found.kind, found.tensor) == (1, "gradient", "blocks.1.up.weight")
    assert found.product.startswith("first in blocks.1.up backward: wgrad: output [0, ")


def test_a_loss_that_is_not_finite_ends_the_run(corpus):
    setting = config(lr=1e30)
    result = run(setting, corpus)
    assert not result.equal and result.mismatch is None and "the loss became" in result.stopped
    assert not math.isfinite(result.losses[-1])


def test_a_time_limit_ends_the_run_and_is_no_failure(corpus, monkeypatch):
    clock = iter(float(seconds) for seconds in range(0, 10_000, 7))
    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: next(clock))
    setting = config(steps=50)
    result = run_lockstep(sides(setting), setting, corpus, Progress(), minutes=2)
    assert result.equal and result.timed_out and 0 < result.steps < 50
    said = artifacts.check_text(artifacts.make_check_record(setting, corpus, result))
    assert said.startswith(f"result    no bit differs after {result.steps} steps, then the time limit of 2 minutes\n")


def test_calls_and_their_plans_are_kept(corpus):
    setting = config(Scheme(format="e4m3", target="h200", fast_accum=True))
    with seen_calls() as seen:
        run(setting, corpus, sides(setting))
    calls = list(seen)
    assert {call.operation for call in calls} == {"scaled_mm", "mm"} and len(calls) == len(set(calls))
    rows = 2 * MODEL.context
    forward = [call for call in calls if call.a == call.b == "e4m3"]
    assert {(call.m, call.n, call.k, call.fast_accum) for call in forward} == {
        (rows, 96, 32, True), (rows, 32, 32, True), (rows, 128, 32, True), (rows, 32, 128, True),
    }  # fmt: skip
    backward = [call for call in calls if call.a == "e5m2"]
    layers = ((96, 32), (32, 32), (128, 32), (32, 128))
    products = {(rows, k, n) for n, k in layers} | {(n, k, rows) for n, k in layers}
    assert {(call.m, call.n, call.k) for call in backward} == products and not any(c.fast_accum for c in backward)
    assert {found.basis for found in seen.values()} <= {"rule", "recorded", "reported"}


def test_records_say_what_was_found(corpus, tmp_path):
    setting = config()
    pair = sides(setting)
    flipped(dict(pair[1].model.named_parameters())["embedding.weight"], 2, (0, 0), 3)
    with seen_calls() as calls:
        result = run(setting, corpus, pair)
    result.products = list(calls.items())
    record = artifacts.make_check_record(setting, corpus, result)
    assert json.loads(json.dumps(record))["mismatch"]["tensor"] == "embedding.weight"
    assert record["mismatch"]["first"]["index"] == [0, 0] and record["mismatch"]["step"] == 2
    assert not record["equal"] and record["steps"] == 1 and len(record["losses"]) == 1
    assert record["products"][0]["basis"] == "rule" and record["target"]["name"] == "h200"
    said = artifacts.check_text(record)
    assert said.startswith("result    DIFFERENT at step 2, gradient of embedding.weight [0, 0]: actual 0x")
    assert "scaled_mm [32, 32] e4m3 x [32, 96] e4m3 -> float32, fast_accum=False" in said
    paths = artifacts.write_check(tmp_path / "a" / "b", record, said, json.dumps)
    assert (
        [path.name for path in paths]
        == ["check.json", "check.txt"]
        == sorted(p.name for p in paths[0].parent.iterdir())
    )
    assert paths[1].read_text() == f"{said}\n" and json.loads(paths[0].read_text())["equal"] is False


def test_the_text_of_a_run_without_a_difference(corpus):
    setting = config(Scheme(format="bf16", target="h200"))
    record = artifacts.make_check_record(setting, corpus, run(setting, corpus))
    said = artifacts.check_text(record)
    assert said.startswith(f"result    no bit differs after {STEPS} steps\n")
    assert f"{record['parameters']:,} parameters" in said and "plans     none asked" in said
    stopped = artifacts.check_text({**record, "equal": False, "stopped": "the loss became nan at step 2"})
    assert stopped.startswith("result    stopped: the loss became nan at step 2\n")


def test_the_command_runs_where_the_card_is(text, tmp_path, capsys, monkeypatch):
    """With a card that is made up, native calls are emulated ones: the command, its files and its exit code."""
    monkeypatch.setattr(lockstep, "why_not_native", lambda target, device: None)
    build = lockstep.build_side
    emulated = lambda label, config, native, **rest: build(label, config, native=False, **rest)  # noqa: E731
    monkeypatch.setattr(lockstep, "build_side", emulated)
    words = ["train", *SMALL, "--data", str(text), "--target", "h200", "--check", "native", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "no bit differs after 2 steps" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["check.json", "check.txt"]

    def planted(label, *arguments, **machine):
        side = emulated(label, *arguments, **machine)
        if label == "emulated":
            flipped(side.model.norm.weight, 1, 0, 0)
        return side

    monkeypatch.setattr(lockstep, "build_side", planted)
    assert main([*words, "--json", "--out", str(tmp_path / "run")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["mismatch"]["tensor"] == "norm.weight" and found["mismatch"]["step"] == 1


def test_fast_sums_reach_the_products():
    scheme = Scheme(format="e4m3", target="h200", fast_accum=True)
    assert [g.fast_accum for g in _gemms(scheme)] == [True, False, False]
    assert [g.fast_accum for g in _gemms(dataclasses.replace(scheme, fast_backward=True))] == [True] * 3
    assert dataclasses.replace(scheme, fast_backward=True).label.endswith("fast accumulation, also of gradients")
    refused("--fast-backward extends --fast-accum", Scheme, format="e4m3", target="h200", fast_backward=True)


def _gemms(scheme):
    linear = scheme.linear_config()
    return linear.fprop, linear.dgrad, linear.wgrad


def test_the_cpu_keeps_its_settings(corpus):
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic("cpu"):
        assert torch.are_deterministic_algorithms_enabled() == before
    with pytest.raises(ArgumentError, match="--check native compares a GPU"):
        check_native(config(Scheme(format="e4m3", target="hopper.wgmma")), corpus, Progress())


@pytest.mark.parametrize("unset", [True, False])
def test_settings_of_a_card_are_restored(monkeypatch, unset):
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    if not unset:
        monkeypatch.setenv(name, ":16:8")
    memory, matmul = torch.utils.deterministic, torch.backends.cuda.matmul
    with pytest.raises(KeyError), deterministic("cuda"):
        assert os.environ[name] == (":4096:8" if unset else ":16:8")
        assert torch.are_deterministic_algorithms_enabled() and not memory.fill_uninitialized_memory
        raise KeyError
    assert os.environ.get(name) == (None if unset else ":16:8")
    assert not torch.are_deterministic_algorithms_enabled() and memory.fill_uninitialized_memory
    assert matmul.fp32_precision in ("none", "ieee")
