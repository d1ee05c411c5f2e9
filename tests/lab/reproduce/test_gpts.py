# SPDX-License-Identifier: Apache-2.0
"""The recipes and the counting of the claims about whole trainings; the trainings themselves are slow claims."""

import dataclasses
import math

import pytest

from fmtsim.lab.reproduce import gpts
from fmtsim.lab.reproduce.gpts import ablations, mantissa, nvfp4
from fmtsim.recipes.registry import get_recipe
from fmtsim.recipes.spec import Rule

SETTINGS = {claim.name: dict(claim.settings) for claim in gpts.CLAIMS}


def operands(linear):
    return {name: str(operand) for name, operand in linear.operands.items()}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("all of it", set()),
        ("no rotation", {"g_w", "x_w"}),
        ("no tiles", {"w_f", "w_d"}),
        ("no stochastic rounding", {"g_d", "g_w"}),
        ("stochastic forward", {"x_f", "w_f", "x_w"}),
        ("last block too", set()),
    ],
)
def test_an_ablation_changes_what_it_says_and_nothing_else(name, changed):
    whole, found = operands(get_recipe("te_nvfp4_all").linear), operands(ablations()[name].linear)
    assert {operand for operand in whole if whole[operand] != found[operand]} == changed
    assert ablations()[name].rules == (() if name == "last block too" else (Rule(last_blocks=1),))


def test_tiles_become_rows_in_both_products():
    linear = ablations()["no tiles"].linear
    assert linear.fprop.b == linear.dgrad.b == get_recipe("te_nvfp4_all").linear.fprop.a


def losses(table):
    """Return a stand-in for ``trained`` that looks a loss up by recipe, rate and seed."""
    return lambda recipe, seed, *, lr, **rest: table(recipe, lr, seed)


def untold(part):
    """Take what an experiment tells of its progress."""


def test_gaps_are_to_bfloat16_and_parts_cost_what_a_gap_grows_by(monkeypatch):
    def table(recipe, lr, seed):
        return 2.0 * {"amp_bf16": 1.0, "mxfp4": 1.04}.get(recipe.name, 1.02 if recipe.rules else 1.025)

    monkeypatch.setattr(gpts, "trained", losses(table))
    found = nvfp4(untold, seed=0, lr=1.0)
    assert found.numbers["gap in %"] == pytest.approx(2.0)
    assert found.numbers["MXFP4 less NVFP4, points"] == pytest.approx(2.0)
    assert found.numbers["no tiles, points lost"] == 0
    assert found.numbers["last block too, points lost"] == pytest.approx(0.5)
    assert len(found.curves["gap"]) == len(found.ticks) == 7


def test_four_bits_are_trained_with_and_without_their_parts(monkeypatch):
    def table(recipe, lr, seed):
        if recipe.name == "amp_bf16":
            return 2.0
        x, w = recipe.linear.fprop.a, recipe.linear.fprop.b
        return 2.0 + 0.02 * (not x.transforms) + 0.04 * (str(w.gradient).find("k=") < 0)

    monkeypatch.setattr(gpts, "trained", losses(table))
    found = gpts.four_bits(untold, recipe="fp4_ms", seed=0, lr=1.0).numbers
    names = ("both", "no clamp", "no estimator", "neither")
    assert [found[f"{name}, gap in %"] for name in names] == pytest.approx([0, 1, 2, 3])
    assert found["neither less both, points"] == pytest.approx(3)


def test_a_unit_scaled_model_is_compared_with_itself_in_sixteen_bits(monkeypatch):
    def table(recipe, lr, seed):
        eight = "e4m3" in str(recipe.linear.fprop.a)
        return (4.0 if lr == 0.5 else 2.0) * (1.01 if eight and recipe.replace else 1.03 if eight else 1)

    monkeypatch.setattr(gpts, "trained", losses(table))
    found = gpts.without_scales(untold, recipe="unit_scaling", seed=0, rate=0.5, lr=1.0).numbers
    assert found["unit-scaled, gap in %"] == pytest.approx(1) and found["plain, gap in %"] == pytest.approx(3)
    assert (found["unit-scaled, loss in sixteen bits"], found["plain, loss in sixteen bits"]) == (4, 2)


def test_failed_runs_are_counted(monkeypatch):
    def table(recipe, lr, seed):
        if recipe.name == "e8m3" and lr == 2.0:
            return math.inf
        return 2.0 if recipe.name == "amp_bf16" else 2.1

    monkeypatch.setattr(gpts, "trained", losses(table))
    found = mantissa(untold, recipes=("amp_bf16", "e8m3"), rates=(1.0, 2.0), seed=0, failed=3.0)
    assert (found.numbers["amp_bf16, failed runs in %"], found.numbers["e8m3, failed runs in %"]) == (0, 50)
    assert found.numbers["e8m3 less amp_bf16, failed runs, points"] == 50
    assert found.numbers["loss of e8m3 over amp_bf16's, %"] == pytest.approx(5.0)
    assert found.curves["e8m3"] == [(1.0, 2.1), (2.0, math.inf)]


def test_a_training_is_the_same_again_and_stops_where_a_loss_is_not_finite():
    how = {"steps": 3, "batch": 1, "layers": 1, "decay": 0.0, "clip": math.inf}
    first, second = (gpts.trained.__wrapped__(get_recipe("e8m3"), 1, lr=1e-3, **how) for _ in range(2))
    assert first == second and math.isfinite(first)
    assert gpts.trained(get_recipe("e8m3"), 1, lr=1e38, **how) == math.inf
    assert first != gpts.trained(get_recipe("amp_bf16"), 1, lr=1e-3, **how)


@pytest.mark.slow
def test_without_its_parts_the_claim_fails():
    """Two-bit integers in place of NVFP4 do not train within 1 % of bfloat16."""
    coarse = dataclasses.replace(get_recipe("bitnet"), rules=())
    how = {key: value for key, value in SETTINGS["nvfp4_ablation"].items() if key != "seed"}
    assert gpts.trained(coarse, 0, **how) > 1.01 * gpts.trained(get_recipe("amp_bf16"), 0, **how)
