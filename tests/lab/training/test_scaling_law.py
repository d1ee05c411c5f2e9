# SPDX-License-Identifier: Apache-2.0
"""Quartet's scaling law: a fit finds the constants of a law, and the best precision follows from budgets."""

import dataclasses
import json
import math

import pytest

from fmtsim.lab.cli.main import main
from fmtsim.lab.training import sweep_result as scaling_law
from fmtsim.lab.training.sweep import speed_of
from fmtsim.lab.training.sweep_result import Choice, ScalingLaw, Trained, fit_law
from tests.support.refusals import refused

LAW = ScalingLaw(
    constants=(1.2e5, 0.58, 4.5e5, 0.54, 1.3, 0.28), base="bf16",
    eff_n={"bf16": 1.0, "fp4": 0.6, "fp8": 0.95}, eff_d={"bf16": 1.0, "fp4": 0.9},
)  # fmt: skip
RUNS = [
    Trained(n, d, LAW.loss(n, d, f, b), f, b)
    for n in (3e7, 1e8, 3e8) for d in (1e9, 4e9, 16e9) for f in LAW.eff_n for b in LAW.eff_d
]  # fmt: skip


def test_the_law():
    """By hand: sizes at which both terms are 1."""
    law = dataclasses.replace(LAW, constants=(4.0, 0.5, 9.0, 0.5, 1.5, 2.0))
    assert law.loss(16.0, 81.0) == 5.5
    assert law.loss(16.0 / 0.6, 90.0, "fp4", "fp4") == pytest.approx(5.5)
    assert law.loss(16.0, 90.0, "fp4", "fp4") > 5.5


def test_a_fit_finds_the_constants_of_the_law():
    """To five digits; sums are of float64, and the law is flat along some directions."""
    found = fit_law(RUNS, "bf16")
    assert found.constants == pytest.approx(LAW.constants, rel=1e-4)
    assert found.eff_n == pytest.approx(LAW.eff_n, rel=1e-5) and found.eff_d == pytest.approx(LAW.eff_d, rel=1e-5)
    assert found.error() < 1e-8 and list(found.eff_n) == ["bf16", "fp4", "fp8"]


MANY = [
    Trained(n, d, LAW.loss(n, d), "bf16", "bf16")
    for n in (1e7, 3e7, 1e8, 3e8, 1e9)
    for d in (3e8, 1e9, 4e9, 16e9, 64e9)
]
WRONG = [*MANY[:12], MANY[12]._replace(loss=MANY[12].loss * 1.02), *MANY[13:]]


def test_one_loss_that_is_wrong_moves_no_constant():
    """Huber's loss counts it by its size; the constants move by what DELTA leaves of it."""
    found = fit_law(WRONG, "bf16")
    assert found.constants == pytest.approx(LAW.constants, rel=0.01)
    assert found.error() == pytest.approx(math.log(1.02), rel=0.01)


def test_least_squares_alone_would_move_them(monkeypatch):
    monkeypatch.setattr(scaling_law, "DELTA", 1.0)
    assert fit_law(WRONG, "bf16").constants != pytest.approx(LAW.constants, rel=0.01)


def test_speeds():
    """Quartet, section 4: FP4 forward and FP8 backward train 1.2 times as fast as FP8, the reverse 1.5 times."""
    assert Choice("a", "b", 2, 1).training_speed == pytest.approx(1.2)
    assert Choice("a", "b", 1, 2).training_speed == pytest.approx(1.5)
    assert Choice("a", "b", 2, 2).training_speed == pytest.approx(2.0)
    assert [speed_of("quartet", backward=b) for b in (False, True)] == [4, 4]
    assert [speed_of(name, backward=False) for name in ("fp32", "bf16", "e4m3", "e8m3")] == [1, 1, 2, 16 / 12]


def test_the_best_precision_follows_from_the_budgets():
    """Where tokens are few, a faster forward pass would waste them; where they are many, parameters are worth more."""
    choices = [
        Choice("bf16", "bf16", 1, 1),
        Choice("fp4", "bf16", 4, 1),
        Choice("bf16", "fp4", 1, 4),
        Choice("fp4", "fp4", 4, 4),
    ]
    few, many = (LAW.best(1e8, 1e8 * ratio, choices) for ratio in (3, 3000))
    assert (few[:2], many[:2]) == (("bf16", "fp4"), ("fp4", "fp4"))
    assert LAW.best(1e8, 1e10, choices[:1]) is choices[0]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (RUNS[:12], "2 runs of 'bf16' have 1 sizes and 2 numbers of tokens; the law has 6 constants: train at least 7"),
        ([*RUNS, RUNS[0]._replace(loss=math.nan)], "is no positive number; leave that scheme or size out"),
    ],
)
def test_what_cannot_be_fitted(runs, said):
    refused(said, fit_law, runs, "bf16")


def test_the_command(tmp_path, text, capsys):
    words = ["sweep", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "2", "--widths", "8,16,24",
             "--steps", "4,8,16", "--schemes", "fp32,e2m1/fp32", "--lr", "1e-2", "--seeds", "0", "--workers", "1",
             "--data", str(text), "--out", str(tmp_path / "s"), "--quiet", "--law"]  # fmt: skip
    assert main([*words, "fp32"]) == 0
    out = capsys.readouterr().out
    assert "fitted to 18 losses" in out and "eff_N forward" in out and "e2m1" in out
    assert (tmp_path / "s" / "law.png").stat().st_size > 5000
    assert main([*words, "fp32", "--json"]) == 0
    law = json.loads(capsys.readouterr().out)["law"]
    assert law["base"] == "fp32" and set(law["eff_n"]) == {"fp32", "e2m1"} and set(law["eff_d"]) == {"fp32"}
    assert main([*words, "bf16"]) == 2
    assert "--law bf16 is none of --schemes fp32,e2m1/fp32; add it, or choose one of them" in capsys.readouterr().err
