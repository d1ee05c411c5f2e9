# SPDX-License-Identifier: Apache-2.0
"""The recipes and the counting of the claims about whole trainings; the trainings themselves are slow claims."""

import dataclasses
import math

import pytest

from fmtsim.recipes.registry import get_recipe
from fmtsim.recipes.spec import Rule
from fmtsim.reproduce import gpts
from fmtsim.reproduce.gpts import ablations, mantissa, nvfp4

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


def test_gaps_are_means_over_seeds(monkeypatch):
    def table(recipe, lr, seed):
        worse = {"amp_bf16": 1.0, "mxfp4": 1.04}.get(recipe.name, 1.02)
        return 2.0 * worse * (1 + seed)

    monkeypatch.setattr(gpts, "trained", losses(table))
    found = nvfp4(lambda part: None, seeds=(0, 1), lr=1.0)
    assert found.numbers["all of it, gap in %"] == pytest.approx(2.0)
    assert found.numbers["gap of MXFP4 over NVFP4's"] == pytest.approx(2.0)
    assert found.numbers["stochastic forward, gap in %"] == pytest.approx(2.0)
    assert len(found.curves) == 2 and all(len(curve) == len(found.ticks) == 7 for curve in found.curves.values())


def test_failed_runs_are_counted(monkeypatch):
    def table(recipe, lr, seed):
        if recipe.name == "e8m3" and lr == 2.0:
            return math.inf if seed else 3.5
        return 2.0 if recipe.name == "amp_bf16" else 2.1

    monkeypatch.setattr(gpts, "trained", losses(table))
    found = mantissa(lambda part: None, recipes=("amp_bf16", "e8m3"), rates=(1.0, 2.0), seeds=(0, 1), failed=3.0)
    assert (found.numbers["amp_bf16, failed runs in %"], found.numbers["e8m3, failed runs in %"]) == (0, 50)
    assert found.numbers["fewer bits, no fewer failures"] == 1.0
    assert found.numbers["loss of e8m3 over amp_bf16's, %"] == pytest.approx(5.0)
    swapped = mantissa(lambda part: None, recipes=("e8m3", "amp_bf16"), rates=(1.0, 2.0), seeds=(0, 1), failed=3.0)
    assert swapped.numbers["fewer bits, no fewer failures"] == 0.0
    assert found.curves["e8m3"] == [(1.0, 2.1), (2.0, math.inf)]


def test_a_training_is_the_same_again_and_stops_where_a_loss_is_not_finite():
    how = {"steps": 3, "batch": 1, "layers": 1, "decay": 0.0, "clip": math.inf}
    first, second = (gpts.trained(get_recipe("e8m3"), 1, lr=1e-3, **how) for _ in range(2))
    assert first == second and math.isfinite(first)
    assert gpts.trained(get_recipe("e8m3"), 1, lr=1e38, **how) == math.inf
    assert first != gpts.trained(get_recipe("amp_bf16"), 1, lr=1e-3, **how)


@pytest.mark.slow
def test_without_its_parts_the_claim_fails():
    """Two-bit integers in place of NVFP4 do not train within 1 % of bfloat16."""
    coarse = dataclasses.replace(get_recipe("bitnet"), rules=())
    how = {key: value for key, value in SETTINGS["nvfp4_ablation"].items() if key != "seeds"}
    assert gpts.trained(coarse, 0, **how) > 1.01 * gpts.trained(get_recipe("amp_bf16"), 0, **how)
