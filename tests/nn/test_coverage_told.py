# SPDX-License-Identifier: Apache-2.0
"""What a model says of its coverage: the summary in words, the recipe in prints, and a schedule that nobody steps."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.nn import convert, report, revert, set_step
from fmtsim.nn.coverage import Coverage, RawWeight, percent
from fmtsim.nn.report import ProductRow
from fmtsim.recipes import Recipe, Rule, Steps, get_recipe
from fmtsim.support.errors import CoverageWarning
from tests.support import architectures
from tests.support.models import snapshot
from tests.support.operands import normal

X = normal(6, 32, seed=0)


def test_the_summary_names_recipe_machine_left_and_guesses():
    model = nn.Sequential(nn.Linear(48, 144, bias=False), nn.Linear(144, 48, bias=False)).bfloat16()
    convert(model, format="mxfp8_e4m3", target="b200", filter_fn=lambda module, name: name == "0")
    found = report(model, normal(80, 48, seed=1).bfloat16(), tokens=80)
    assert found.summary == (
        "x mxfp8_e4m3, w mxfp8_e4m3, g mxfp8_e4m3 on b200: 50.0 % of weight multiply-adds simulated (forward and "
        "backward); left: 1 50.0 % (filter_fn leaves it out); "
        f"{sum(row.basis == 'guess' for row in found.products)} of 3 products by a guess"
    )
    assert found.summary in str(found) and found.summary != report(model).summary
    assert report(model).summary.endswith("; estimated from shapes")


def test_a_recipe_that_quantises_the_forward_pass_alone_says_so():
    base = get_recipe("te_current").linear
    config = fmtsim.LinearConfig(fprop=base.fprop)
    line = report(convert(nn.Sequential(nn.Linear(32, 32)), recipe=config), X).summary
    assert "100 % of weight multiply-adds simulated forward, 0 % backward" in line
    line = report(convert(nn.Sequential(nn.Linear(32, 32)), recipe=fmtsim.LinearConfig()), X).summary
    assert "0 % of weight multiply-adds simulated" in line and "(it runs in high precision here)" in line


def test_shares_and_groups_in_words():
    assert [percent(n, 3000) for n in (0, 1, 3, 2999, 3000)] == ["0 %", "below 0.1 %", "0.1 %", "99.9 %", "100 %"]
    rows = [
        RawWeight(layer=f"layers.{i}.{name}", parameter="weight", multiply_adds=n, share=n / 200, reason=why)
        for n, name, why in ((30, "a", "r"), (10, "b", "r"), (5, "c", "s"), (3, "d", "r"), (1, "e", "r"), (1, "f", "t"))
        for i in range(2)
    ]
    left = Coverage(total=200, simulated=100, backward=200, raw=tuple(rows)).left
    first = "layers.0-1.a, layers.0-1.b, layers.0-1.d, layers.0-1.e 44.0 % (r)"
    assert left() == f"{first}, layers.0-1.c 5.0 % (s), layers.0-1.f 1.0 % (t)"
    assert left(2) == "layers.0-1.a, layers.0-1.b and 2 others 44.0 % (r), layers.0-1.c 5.0 % (s), others 1.0 %"
    assert report(nn.Sequential(nn.ReLU()), X).summary.endswith("no product with a weight in this batch")


def test_print_shows_the_recipe():
    model = nn.Sequential(nn.Linear(32, 32))
    assert "bias=True, te_current)" in str(convert(model, recipe="te_current"))
    assert "bias=True, x e4m3" in str(convert(revert(model), format="e4m3"))

    class Terse(nn.Linear):
        def __repr__(self):
            return "Terse()"

    assert str(convert(Terse(4, 4), recipe="te_current")) == "Terse(): te_current"


def scheduled():
    rules = (Rule(steps=Steps(first=0, last=2), use=get_recipe("coat").linear),)
    return Recipe(name="later", linear=get_recipe("te_current").linear, rules=rules)


def test_a_schedule_without_set_step_warns_once():
    model = nn.Sequential(nn.Linear(32, 32))
    before = snapshot(model)
    convert(model, recipe=scheduled())
    other = copy.deepcopy(model)
    with torch.no_grad():
        model(X), model(X), model(X)
    model(X)
    model.eval()(X), model(X)
    model.train()
    with pytest.warns(CoverageWarning, match=r"later has a schedule, and set_step was not called: every step runs"):
        model(X)
    model(X)
    set_step(other, 0)
    other(X), other(X), other(X)
    assert snapshot(revert(model)) == before and not other._forward_pre_hooks


def test_a_checkpointed_step_is_one_forward():
    model = convert(nn.Sequential(nn.Linear(32, 32)), recipe=scheduled())
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    with pytest.warns(CoverageWarning, match="schedule"):
        model(X)


def test_the_table_of_architectures_is_what_is_counted():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    assert architectures.table() == architectures.PAGE.read_text(encoding="utf-8").split(architectures.MARK)[1]


def test_products_of_layers_that_are_alike_are_one_line_with_their_unit():
    row = ProductRow(
        layer="a", product="fprop", tokens=4, call="mm", unit="hopper.mma", order="one chain", basis="rule"
    )
    told = report(nn.Sequential(nn.Linear(4, 4)))
    products = (row, dataclasses.replace(row, layer="b"), dataclasses.replace(row, layer="c", unit="", tokens=8))
    _, table, said = dataclasses.replace(told, products=products)._product_table()
    assert said.startswith("3 products: 3 ") and table.cells[1:] == [
        ("2", "a", "fprop", "4", "mm", "hopper.mma", "one chain", "rule"),
        ("1", "c", "fprop", "8", "mm", "-", "one chain", "rule"),
    ]
