# SPDX-License-Identifier: Apache-2.0
"""``fmtsim train`` on a machine: it reaches the model, the summary and the record; guesses are told once."""

import json

import pytest

from fmtsim.gemm.targets import doubts
from fmtsim.lab.cli.main import main
from fmtsim.lab.cli.training_commands import summary
from fmtsim.lab.training.artifacts import make_record
from fmtsim.lab.training.corpus import load_corpus
from fmtsim.lab.training.run import Run, compare_schemes
from fmtsim.lab.training.schemes import Scheme
from fmtsim.recipes import get_recipe
from fmtsim.spec.datapath import Datapath
from fmtsim.support.progress import Progress
from tests.support.trainings import tiny, training

SMALL = ["--steps", "2", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2"]


@pytest.fixture
def fresh(monkeypatch):
    """Let every guess warn, whatever ran before in this process."""
    monkeypatch.setattr(doubts, "_warned", set())


def command(text, tmp_path, *words):
    return main(["train", *SMALL, "--data", str(text), "--out", str(tmp_path / "run"), "--quiet", *words])


def compared(text, scheme, steps=3):
    config = training(scheme, tiny(), steps=steps)
    corpus = load_corpus(text, 16)
    return config, corpus, *compare_schemes(config, corpus, Progress())


@pytest.mark.parametrize(
    ("words", "label", "target"),
    [
        (["--target", "hopper.wgmma"], "on hopper.wgmma", "hopper.wgmma"),
        (["--target", "h200", "--fast-accum"], "on h200, fast accumulation", "h200"),
        (["--target", "block=32,fraction_bits=4", "--plan", "promote_every=32"],
         "on blocks of 32, F=4, toward_zero to fp32, own plan", {"kind": "fused", "block": 32, "fraction_bits": 4}),
    ],
)  # fmt: skip
def test_the_machine_is_named_and_recorded(text, tmp_path, capsys, words, label, target):
    assert command(text, tmp_path, *words, "--json") == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert printed.err == "" and record["simulated"]["label"] == f"e4m3/e5m2, scaled by tensor, {label}"
    scheme = record["config"]["simulated"]
    assert scheme["target"] == target
    assert scheme["fast_accum"] == ("--fast-accum" in words) and record["simulated"]["guesses"] == []
    assert label in (tmp_path / "run" / "layers.txt").read_text()
    assert record["simulated"]["losses"][1] != record["baseline"]["losses"][1]


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["--recipe", "te_current", "--target", "recipe", "--autocast", "bfloat16"], "te_current, on h200"),
        (["--recipe", "te_mxfp8", "--target", "blackwell.tcgen05.mxf8f6f4", "--width", "32"],
         "te_mxfp8, on blackwell.tcgen05.mxf8f6f4"),
        (["--recipe", "lns", "--target", "recipe"],
         "lns, on blocks of 1, exact, nearest_even to fp32, Madam(state='lns_madam')"),
    ],
)  # fmt: skip
def test_a_recipe_on_a_machine(text, tmp_path, capsys, words, label):
    """It is in the legend, the record and every layer; its losses are not those of the recipe alone."""
    assert command(text, tmp_path, *words, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["simulated"]["label"] == label
    assert label.partition(", ")[2] in (tmp_path / "run" / "layers.txt").read_text()
    scheme = record["config"]["simulated"]
    assert scheme["autocast"] == ("bfloat16" if "--autocast" in words else None)


def test_autocast_and_machine_reach_the_losses(text):
    recipe = get_recipe("te_current")
    schemes = [
        Scheme(format="fp32", recipe=recipe, **how)
        for how in ({}, {"autocast": "bfloat16"}, {"target": Datapath(block=32, fraction_bits=4)})
    ]
    assert len({tuple(compared(text, scheme)[3].losses) for scheme in schemes}) == 3


def test_fewer_bits_are_seen_in_the_losses(text):
    few = Datapath(block=32, fraction_bits=4)  # a Hopper unit's 13 bits may leave every loss of so short a run as it is
    losses = {unit: compared(text, Scheme(format="e4m3", target=unit))[3].losses for unit in (None, few, "exact")}
    assert losses[few] != losses["exact"]
    assert losses["exact"] == pytest.approx(losses[None], abs=1e-4)
    assert compared(text, Scheme(format="e4m3", target=few))[3].losses == losses[few]


def test_guesses_are_summed_up_at_the_end(text, fresh, capsys):
    config, corpus, base, simulated = compared(text, Scheme(format="bf16", target="a100"), steps=1)
    assert len(simulated.guesses) == 9 and base.guesses == []  # of four layers' twelve products, six differ by layout
    assert all("a100 has no recorded accumulation order" in guess for guess in simulated.guesses)
    record = make_record(config, corpus, base, simulated)
    assert record["simulated"]["guesses"] == simulated.guesses
    said = summary(record, base, simulated)
    assert said.count("no recorded accumulation order") == 1 and "(and 8 other products, in record.json)" in said
    assert "--plan" in said and "take a unit as --target" in said
    assert capsys.readouterr().err == ""


def test_an_order_that_was_given_is_no_guess(text, fresh, tmp_path, capsys):
    assert command(text, tmp_path, "--format", "bf16", "--target", "a100", "--plan", "promote_every=8") == 0
    printed = capsys.readouterr()
    assert "no recorded order" not in printed.out and printed.err == ""


def test_one_guess_is_no_list():
    simulated = Run(
        label="x", losses=[1.0], guesses=["target t has no recorded accumulation order for mm M=1; guessing"]
    )
    record = {"corpus": {"name": "n", "bytes": 1, "files": 1, "truncated": False}}
    said = summary(record, Run(label="fp32", losses=[1.0]), simulated)
    assert "for mm M=1: their order" not in said and "for mm M=1: its accumulation order was guessed." in said
