# SPDX-License-Identifier: Apache-2.0
"""Claims at the size of a GPU, on a CPU: plans, trainings that are kept and shared, budgets, folders that go on."""

import json
import math
from dataclasses import replace

import pytest

from fmtsim.support.errors import ArgumentError, DataError
from fmtsim.support.progress import Progress
from studies.claims import card, gpts, sweeps
from studies.claims.card import PLAN, TRAININGS, run_on_card
from studies.claims.claim import Claim, Expected, Measured, settings
from studies.claims.experiment import trainings
from studies.claims.run import get_claims, run_claim

CALLS = []


def squared(x: float, seed: int, device: str) -> float:
    """Stand in for a training."""
    CALLS.append((x, seed, device))
    return x * x + seed if x < 9 else math.inf


def measure(tell, *, xs: tuple[float, ...], seed: int) -> Measured:
    """Add squares up, the first of which another claim has as well."""
    return Measured(numbers={"sum": sum(trainings(tell, squared, [{"x": x, "seed": seed} for x in (2.0, *xs)]))})


SUM = Claim(
    name="sum", says="squares add up", source="arithmetic", measure=measure, settings=settings(xs=(1.0,), seed=0),
    card=settings(xs=(3.0, 4.0)), expected=(Expected(name="sum", low=29.0, high=1100.0),), recorded="shown in part",
    bounds="before", seeds=2,
)  # fmt: skip
OTHER = replace(SUM, name="other", card=settings(xs=(9.0,)))


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def run(folder, *claims, **how):
    return run_on_card(claims or (SUM,), folder, Progress(), device="cpu", workers=1, **how)


def test_settings_are_the_card_s_and_equal_trainings_run_once(tmp_path):
    results = run(tmp_path, SUM, OTHER)
    assert [[row.values for row in result.rows] for result in results] == [[(29.0, 3029.0)], [(math.inf, math.inf)]]
    assert [result.verdict for result in results] == ["not shown", "not shown"]
    assert sorted(CALLS) == [(x, seed, "cpu") for x in (2.0, 3.0, 4.0, 9.0) for seed in (0, 1000)]
    assert len(list((tmp_path / TRAININGS).iterdir())) == 8
    record = json.loads(next((tmp_path / TRAININGS).iterdir()).read_text())
    assert record["training"] == "squared" and record["card"] == "cpu" and record["settings"].keys() == {"x", "seed"}


def test_the_plan_says_bounds_and_rule_before_the_first_training(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "open_tasks", None)
    with pytest.raises(TypeError):
        run(tmp_path)
    plan = json.loads((tmp_path / PLAN).read_text())
    assert plan["rule"] == card.RULE and plan["card"] == "cpu" and plan["begun"] and not CALLS
    assert plan["claims"]["sum"] == {
        "says": "squares add up", "bounds": "before", "seeds": [0, 1000],
        "expected": {"sum": ["29.0", "1100.0", "None", "0.0"]}, "settings": {"xs": "(3.0, 4.0)", "seed": "0"},
    }  # fmt: skip


def test_a_folder_goes_on_with_the_trainings_that_are_missing(tmp_path):
    first = run(tmp_path)
    CALLS.clear()
    assert run(tmp_path)[0].rows == first[0].rows and not CALLS
    lost = next(p for p in (tmp_path / TRAININGS).iterdir() if json.loads(p.read_text())["settings"]["x"] == "4.0")
    lost.unlink()
    assert run(tmp_path)[0].rows == first[0].rows and [call[0] for call in CALLS] == [4.0]


def test_nothing_begins_after_the_budget_and_seeds_that_ended_count(tmp_path):
    (result,) = run(tmp_path, budget=-1.0)
    assert not CALLS and result.runs == () and result.worse
    assert result.error == "the budget ended before 3 of 3 trainings; the same command with --out goes on"
    run(tmp_path)
    (tmp_path / TRAININGS / file_of(x=4.0, seed=1000)).unlink()
    (result,) = run(tmp_path, budget=-1.0)
    assert not result.error and [row.values for row in result.rows] == [(29.0,)]


def test_other_seeds_are_trainings_and_a_plan_of_their_own(tmp_path):
    (result,) = run(tmp_path / "other", first_seed=2)
    assert [row.values for row in result.rows] == [(6029.0, 9029.0)]
    assert json.loads((tmp_path / "other" / PLAN).read_text())["claims"]["sum"]["seeds"] == [2000, 3000]
    with pytest.raises(DataError, match="plan.json has other claims, bounds or settings"):
        run(tmp_path / "other")


def test_a_training_is_a_file_as_soon_as_it_ends(tmp_path, monkeypatch):
    """One that ends early is kept when a later one of its experiment breaks off."""

    def stops(x: float, seed: int, device: str) -> float:
        if x == 4.0:
            raise KeyboardInterrupt
        return squared(x, seed, device)

    broken = replace(SUM, measure=lambda tell, *, xs, seed: trainings(tell, stops, [{"x": x, "seed": 0} for x in xs]))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, broken)
    assert [json.loads(path.read_text())["value"] for path in (tmp_path / TRAININGS).iterdir()] == [9.0]


def test_what_breaks_a_training_off_is_told_once(tmp_path, caplog):
    def fails(x: float, seed: int, device: str) -> float:
        raise ArgumentError("x is not allowed")

    broken = replace(SUM, measure=lambda tell, *, xs, seed: trainings(tell, fails, [{"x": x, "seed": 0} for x in xs]))
    (result,) = run(tmp_path, broken)
    assert result.error == "x is not allowed" and not caplog.records


def test_the_verdict_of_a_card_is_compared_with_that_of_a_card(tmp_path):
    better = replace(
        SUM, recorded="not shown", recorded_on_card="shown in part", expected=(Expected(name="sum", low=1e9),)
    )
    assert (
        run(tmp_path / "card", better)[0].worse
        and not run(tmp_path / "miniature", replace(better, recorded_on_card=None))[0].worse
    )


def file_of(**values):
    return card._Training(squared, values).name


def test_folders_of_other_bounds_and_damaged_files_are_refused(tmp_path):
    run(tmp_path)
    other = replace(SUM, expected=(Expected(name="sum", low=30.0),))
    for claims, how in (((other,), {}), ((SUM, OTHER), {}), ((SUM,), {"seeds": 1})):
        with pytest.raises(
            DataError, match=r"plan.json has other claims, bounds or settings than this command; choose"
        ):
            run(tmp_path, *claims, **how)
    (tmp_path / TRAININGS / file_of(x=2.0, seed=0)).write_text("{")
    assert "is damaged" in run(tmp_path, budget=-1.0)[0].error or run(tmp_path)[0].rows[0].values == (3029.0,)
    (tmp_path / PLAN).write_text("[]")
    with pytest.raises(DataError, match=r"plan.json is no record of this command; delete it, or choose another --out"):
        run(tmp_path)
    with pytest.raises(ArgumentError, match=r"eden: no size for a GPU; leave --device or these claims out"):
        run(tmp_path / "new", *get_claims(["eden"]))


SMALL = settings(layers=1, heads=2, width=16, context=16, steps=2)


def test_results_are_those_of_the_experiment_alone(tmp_path):
    how = {"schemes": ("bf16", "e8m3"), "rates": (8e-3,), "seeds": (0, 1)}
    (fewer,) = get_claims(["fewer_bits"])
    fewer = replace(fewer, card=(*SMALL, *settings(**how)))
    (bits,) = get_claims(["mantissa_bits"])
    bits = replace(
        bits, card=(*SMALL, *settings(recipes=("amp_bf16", "e8m3"), rates=(1e-3, 2e-3), batch=1, real=True, mixed=True))
    )
    results = run(tmp_path, fewer, bits, seeds=2)
    for claim, result in zip((fewer, bits), results, strict=True):
        alone = run_claim(replace(claim, settings=(*{**dict(claim.settings), **dict(claim.card)}.items(),)), seeds=2)
        assert not alone.error and not result.error
        assert repr([row.values for row in result.rows]) == repr([row.values for row in alone.rows])  # NaN is NaN
    assert {gpts.losses_of.__name__, sweeps.run_of.__name__} == {
        json.loads(path.read_text())["training"] for path in (tmp_path / TRAININGS).iterdir()
    }


def test_every_size_for_a_card_has_the_settings_of_its_experiment():
    for claim in get_claims():
        unknown = (
            dict(claim.card).keys()
            - dict(claim.settings).keys()
            - {"width", "heads", "context", "real", "mixed", "layers", "batch_size", "window"}
        )
        assert not unknown, claim.name
