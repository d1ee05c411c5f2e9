# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training: going on gives the bits of a run that was never stopped."""

import dataclasses
import json
import os
import re
import signal
import types

import pytest
import torch

import fmtsim
from fmtsim.gemm.targets import doubts
from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.training import learner
from fmtsim.lab.training import run as training_run
from fmtsim.lab.training.artifacts import make_record, settings
from fmtsim.lab.training.run import Checkpoint, compare_schemes
from fmtsim.lab.training.schemes import Scheme
from fmtsim.recipes import LossScale, OptimizerConfig, get_recipe
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, DataError
from fmtsim.support.progress import Progress
from tests.support.faults import largest_file
from tests.support.refusals import refused
from tests.support.trainings import FP32, tiny, training

SMALL = ["--steps", "3", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2"]
STOCHASTIC = Scheme(format="e4m3", rounding="stochastic", grad_rounding="stochastic")
SCALED = dataclasses.replace(
    get_recipe("te_delayed"), name="scaled", aliases=(), loss_scale=LossScale(initial=2.0**140, interval=2)
)
SCHEMES = {
    "keys": {"simulated": STOCHASTIC, "baseline": FP32},
    "delayed scales and a scaled loss": {"simulated": Scheme(format="fp32", recipe=SCALED), "baseline": FP32},
    "states, ranks and their factor": {
        "simulated": Scheme(format="fp32", recipe=get_recipe("fp8lm")),
        "baseline": FP32,
    },
    "weights of unit variance": {"simulated": Scheme(format="fp32", recipe=get_recipe("mu_s")), "baseline": FP32},
    "two optimizers": {"simulated": Scheme(format="fp32", recipe=get_recipe("lns_madam")), "baseline": FP32},
    "a target and a quantised baseline": {
        "simulated": Scheme(format="bf16", target="h200"),
        "baseline": Scheme(format="bf16"),
    },
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let every step take no time: seconds are all that differs between equal runs."""
    monkeypatch.setattr(training_run, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))


def config(simulated=STOCHASTIC, **changes):
    return training(simulated, tiny(), **changes)


class StopError(Exception):
    pass


class Watched(Checkpoint):
    """A checkpoint that keeps each file it wrote, and raises after so many."""

    stop = None

    def __init__(self, *args):
        super().__init__(*args)
        self.files = []

    def save(self, parts=None):
        before = self.path.stat().st_ino if self.path.exists() else None
        super().save(parts)
        if self.path.exists() and self.path.stat().st_ino != before:
            self.files.append(self.path.read_bytes())
        if len(self.files) == self.stop:
            raise StopError


def compared(path, config, corpus, stop=None, every=1):
    """Train with a checkpoint, going on where there is one; return what was written and the record."""
    checkpoint = Watched(path, settings(config, corpus), every)
    checkpoint.stop = stop
    if path.exists():
        checkpoint.read()
    try:
        runs = compare_schemes(config, corpus, Progress(), checkpoint)
    except StopError:
        return checkpoint.files, None
    return checkpoint.files, make_record(config, corpus, *runs)


@pytest.mark.parametrize("name", SCHEMES)
def test_going_on_from_any_step_gives_the_same_bits(name, tmp_path, corpus):
    """The files hold weights, the optimizer's state, random states, losses and statistics: all of them are equal."""
    setup = config(**SCHEMES[name])
    whole, record = compared(tmp_path / "whole", setup, corpus)
    plain = make_record(setup, corpus, *compare_schemes(setup, corpus, Progress()))
    drop_guesses = [{**r, "simulated": {**r["simulated"], "guesses": []}} for r in (record, plain)]
    assert drop_guesses[0] == drop_guesses[1]  # a checkpoint changes nothing; a guess is told once in a process
    runs = 1 + len(setup.simulated.simpler(setup.baseline))  # some are trained again without their optimizer
    assert len(whole) == len(set(whole)) == 4 * runs
    for stop in (1, 4, 5, 7):  # within a run, between the two, and before the last validation
        path = tmp_path / str(stop)
        first, _ = compared(path, setup, corpus, stop)
        second, found = compared(path, setup, corpus)
        assert first + second == whole and found == record, stop


def test_a_run_is_stopped_twice(tmp_path, corpus):
    whole, record = compared(tmp_path / "whole", config(), corpus)
    parts = [compared(tmp_path / "x", config(), corpus, stop)[0] for stop in (2, 3)]
    last, found = compared(tmp_path / "x", config(), corpus)
    assert sum(parts, []) + last == whole and found == record


def test_steps_between_files(tmp_path, corpus):
    files, record = compared(tmp_path / "x", config(), corpus, every=2)
    assert record == compared(tmp_path / "y", config(), corpus, every=0)[1]
    assert len(set(files)) == 4  # one a run, and one at its end
    assert os.listdir(tmp_path) == ["x"]
    refused("--checkpoint-every -1 is not allowed; choose 1 or more, or 0 for no", Checkpoint, tmp_path / "x", {}, -1)


def test_guesses_of_both_parts_are_told_once(tmp_path, corpus, monkeypatch):
    """A process warns of a plan once, the one that goes on too."""
    later = iter(["two", "one"])
    original = learner.backward

    def backward(*args):
        if word := next(later, None):
            doubts._collected[-1].append(word)
        return original(*args)

    monkeypatch.setattr(learner, "backward", backward)
    monkeypatch.setattr(training_run, "rehearse", lambda config: doubts._collected[-1].append("one"))
    assert compared(tmp_path / "x", config(), corpus, stop=5)[1] is None
    assert compared(tmp_path / "x", config(), corpus)[1]["simulated"]["guesses"] == ["one", "two"]
    plan = dataclasses.replace(STOCHASTIC, target="h200", plan=GemmPlan(), rounding="nearest_even")
    assert compared(tmp_path / "y", config(plan), corpus)[1]["simulated"]["guesses"] == []


def test_a_run_that_blew_up_is_not_run_again(tmp_path, corpus):
    setup = config(lr=1e30, baseline=STOCHASTIC)
    whole, record = compared(tmp_path / "whole", setup, corpus)
    assert record["baseline"]["stopped"]
    first, _ = compared(tmp_path / "x", setup, corpus, stop=[b"the loss became" in f for f in whole].index(True) + 1)
    second, found = compared(tmp_path / "x", setup, corpus)
    assert first + second == whole and found == record


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.02}, "config.lr was 0.01 and is 0.02"),
        ({"seed": 1}, "config.seed was 0 and is 1"),
        ({"baseline": Scheme(format="bf16")}, "config.baseline.format was 'fp32' and is 'bf16'"),
        ({"steps": 4}, "config.steps was 3 and is 4"),
        ({"ranks": 2}, "config.ranks was 1 and is 2"),
        ({"architecture": "llama"}, "config.architecture was 'gpt' and is 'llama'"),
        ({"simulated": dataclasses.replace(STOCHASTIC, optimizer=OptimizerConfig(state="coat"))},
         "config.simulated.optimizer.state was 'fp32' and is 'coat'"),
    ],
)  # fmt: skip
def test_other_settings_are_refused(tmp_path, corpus, changes, said):
    path = tmp_path / "checkpoint"
    compared(path, config(), corpus, stop=1)
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=f"^{path} is of another training: {said}; pass the same settings, delete"):
        compared(path, config(**changes), corpus)
    assert path.read_bytes() == before


def test_another_text_is_refused(tmp_path, corpus):
    compared(tmp_path / "x", config(), corpus, stop=1)
    other = dataclasses.replace(corpus, train=corpus.train ^ 1)
    refused(r"corpus\.sha256 was '\w+' and is", compared, tmp_path / "x", config(), other)


def test_files_that_are_no_checkpoint(tmp_path, corpus):
    path = tmp_path / "x"
    compared(path, config(), corpus, stop=2)
    good = path.read_bytes()
    fmtsim.encode(torch.ones(4, 32), "mxfp4").save(path)
    with pytest.raises(DataError, match="is not a checkpoint of this version; delete it, or choose another --out"):
        compared(path, config(), corpus)
    for bad in (b"", good[:1000], good[:-1], good[:-100] + bytes([good[-100] ^ 1]) + good[-99:]):
        path.write_bytes(bad)
        refused(re.escape(str(path)), compared, path, config(), corpus, error=DataError)
    refused("cannot read .*missing", Checkpoint(tmp_path / "missing", {}, 1).read, error=DataError)


@pytest.mark.parametrize("key", ["runs", "guesses", "current", "run", "model", "moments", "scaler", "batches", "keys"])
def test_a_checkpoint_that_lacks_something(tmp_path, corpus, key, monkeypatch):
    """Its checksum holds, so another version wrote it."""
    dump = json.dumps

    def without(value, **how):
        state = dict(value) if isinstance(value, dict) and "current" in value else value
        if state is not value:
            state["current"] = {name: part for name, part in state["current"].items() if name != key}
            state.pop(key, None)
        return dump(state, **how)

    monkeypatch.setattr("fmtsim.lab.training.run.json", types.SimpleNamespace(dumps=without, loads=json.loads))
    compared(tmp_path / "x", config(), corpus, stop=1)
    with pytest.raises(DataError, match=rf"x: the checkpoint does not fit \(KeyError: '{key}'\); delete it, or choose"):
        compared(tmp_path / "x", config(), corpus)


def test_a_number_that_no_float_holds_is_named(tmp_path, corpus, monkeypatch):
    dump = json.dumps

    def beyond(value, **how):
        if isinstance(value, dict) and "current" in value:
            value["current"]["moments"][0]["0"]["step"] = 10**400
        return dump(value, **how)

    monkeypatch.setattr("fmtsim.lab.training.run.json", types.SimpleNamespace(dumps=beyond, loads=json.loads))
    compared(tmp_path / "x", config(), corpus, stop=1)
    with pytest.raises(DataError, match=r"does not fit \(OverflowError: int too large .*\); delete it, or choose"):
        compared(tmp_path / "x", config(), corpus)


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path, corpus):
    path = tmp_path / "checkpoint"
    compared(path, config(), corpus, stop=2)
    before = path.read_bytes()
    with pytest.raises(DataError, match=f"^cannot write {path}: File too large"), largest_file(1000):
        compared(path, config(), corpus)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["checkpoint"]


def train(text, out, *words):
    return main(["train", *SMALL, "--data", str(text), "--out", str(out), "--quiet", *words])


def test_the_command_goes_on(tmp_path, text, capsys, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert train(text, whole) == 0
    save = Checkpoint.save
    saved = []

    def interrupted(self, parts=None):
        save(self, parts)
        saved.append(parts)
        if len(saved) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpoint, "save", interrupted)
    assert train(text, out, "--checkpoint-every", "1") == 143
    assert capsys.readouterr().err == (
        f"\nfmtsim: terminated; {out}/report.html shows what there is, after step 1 of 3 of the simulated run; "
        f"a checkpoint is in {out}, go on with --resume\n"
    )
    assert sorted(os.listdir(out)) == ["checkpoint.safetensors", "report.html"]
    assert train(text, out) == BAD_INPUT
    assert capsys.readouterr().err == (
        f"fmtsim: error: {out}/checkpoint.safetensors is of a training that was cut short; pass --resume to go on, "
        "delete it, or choose another --out\n"
    )
    assert train(text, out, "--resume") == 0
    said = "resume: fp32 is finished, e4m3/e5m2, scaled by tensor goes on after step 1\n"
    assert capsys.readouterr().err == said
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole))
    for name in os.listdir(whole):
        # but for the command and the minute it began
        a, b = (
            re.sub(rb"fmtsim train [^\"<]*|[0-9-]+ [0-9:]+ UTC", b"", (run / name).read_bytes()) for run in (out, whole)
        )
        assert a == b, name


@pytest.mark.parametrize(("every", "file"), [("1", "checkpoint.safetensors"), ("0", "report.html")])
def test_a_full_disk_is_one_line(tmp_path, text, capsys, every, file):
    with largest_file(1000):
        assert train(text, tmp_path / "out", "--checkpoint-every", every) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(
        f"fmtsim: error: cannot write {tmp_path}/out/{file}: File too large; name a file in a folder"
    )
    assert len(error.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_resume_without_a_checkpoint_begins(tmp_path, text, capsys):
    assert train(text, tmp_path / "out", "--resume", "--checkpoint-every", "0") == 0
    assert capsys.readouterr().err == f"resume: no checkpoint in {tmp_path / 'out'}, training begins\n"
    assert len(os.listdir(tmp_path / "out")) == 3
