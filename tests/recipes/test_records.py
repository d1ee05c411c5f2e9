# SPDX-License-Identifier: Apache-2.0
"""Recipes as records: names, files, tables, differences, and what wrong ones are told."""

import dataclasses
import json
import math
import re

import pytest

import fmtsim
from fmtsim.distributed import get_reduction
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import History, Scaling
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.optim import get_scheme
from fmtsim.recipes import Level, LossScale, Recipe, Replacement, Rule, Steps, diff, get_recipe, list_recipes
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.recipes.catalogue import RECIPES
from fmtsim.recipes.ptq_catalogue import RECIPES as PTQ_RECIPES
from fmtsim.recipes.recipe import HEADINGS
from fmtsim.recipes.recipe_registry import _registered, register_recipe
from fmtsim.recipes.serialization import load_recipe, recipe_from_dict, recipe_to_dict, save_recipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.refusals import refused

NAMES = [recipe.name for recipe in RECIPES]


@pytest.fixture
def own():
    """A recipe that is forgotten again."""
    recipe = Recipe(name="own", linear=get_recipe("te_block").linear, aliases=("mine",), source="a test")
    yield recipe
    for name in ("own", "mine"):
        _registered.pop(name, None)


def test_names_and_aliases_are_unique():
    names = [name for recipe in (*RECIPES, *PTQ_RECIPES) for name in (recipe.name, *recipe.aliases)]
    assert len(set(names)) == len(names)
    assert list_recipes(kind="training") == sorted(NAMES)
    assert list_recipes() == sorted((*NAMES, *(recipe.name for recipe in PTQ_RECIPES)))
    assert fmtsim.get_recipe("nvfp4_pretrain") is fmtsim.get_recipe("te_nvfp4")
    assert all(recipe.source for recipe in RECIPES)


def test_optimizers_reductions_and_levels_have_names_that_exist():
    found = [(r.name, one) for r in RECIPES for one in (r, *r.levels)]
    for _, one in found:
        assert one.optimizer is None or hasattr(fmtsim.optim, str(one.optimizer).partition("(")[0])
        assert one.optimizer is None or get_scheme(one.optimizer.state).name == one.optimizer.state
        assert one.reduction is None or get_reduction(one.reduction)
    systems = {name for name, one in found if one.optimizer}
    assert (
        systems == {"fp8lm", "intel_2t", "intel_2t_paper", "coat", "deepseek_v3", "lns"}
        and get_recipe("lns_madam").name == "lns"
    )


def test_a_recipe_at_one_of_its_levels():
    fp8lm = get_recipe("fp8lm")
    assert str(fp8lm).count("level: O") == 3 and "optimizer: AdamW(state='fp8lm')" in str(fp8lm)
    assert [fp8lm.at_level(name).optimizer.state for name in ("O1", "o2", "O3")] == ["fp8lm_o1", "fp8lm", "fp8lm"]
    high = fp8lm.at_level("O3")
    assert high.name == "fp8lm O3" and high.linear == fp8lm.linear and high.levels[0].gather == "e4m3"
    assert "level: O3: AdamW(state='fp8lm'), gradients reduced by fp8lm, weights gathered in e4m3" in str(high)
    refused("^recipe fp8lm has no level 'O4'; its levels are O1, O2, O3$", fp8lm.at_level, "O4")
    with pytest.raises(ArgumentError, match="^recipe coat has no level 'O1'; it has none$"):
        get_recipe("coat").at_level("O1")
    plain = Recipe(name="a", levels=(Level(name="1"),))
    assert plain.at_level("1").optimizer is None and str(Level(name="1")) == "1: AdamW"


def test_a_file_gives_the_same_recipe(tmp_path):
    for recipe in map(get_recipe, list_recipes()):
        path = tmp_path / f"{recipe.name}.json"
        save_recipe(recipe, path)
        assert load_recipe(path) == recipe == get_recipe(path) == get_recipe(str(path)), recipe.name
        assert hash(get_recipe(path)) == hash(recipe)
        assert recipe_from_dict(json.loads(json.dumps(recipe_to_dict(recipe)))) == recipe
        assert recipe.name in str(recipe) and recipe.source


@pytest.mark.parametrize("name", [*NAMES[::5], "fa3", "fp8lm"])
def test_a_recipe_prints_as_a_table(name):
    recipe = get_recipe(name)
    text, html = str(recipe), recipe._repr_html_()
    assert text.splitlines()[0].startswith(name)
    assert f"source: {recipe.source}" in text
    if recipe.linear is None:
        assert text.splitlines()[1] == "linear layers stay in high precision"
        assert f"attention: {recipe.attention}" in text and "<table>" not in html
        return
    assert text.splitlines()[1].split()[:2] == list(HEADINGS[:2])
    assert sum(line.startswith(("y = x w^T", "dx = g w", "dw = g^T x")) for line in text.splitlines()) == 3
    rounded = sum(getattr(recipe.linear, product).out.format is not None for product in ("fprop", "dgrad", "wgrad"))
    assert html.startswith(f"<b>{name}</b><table>") and html.count("<tr>") == 7 + rounded


def test_the_table_says_what_the_record_says():
    lines = str(get_recipe("te_nvfp4")).splitlines()
    assert "Hadamard 16, signs 0xd7e8, in bf16" in lines[6] and "stochastic (8 bits)" in lines[6]
    assert lines[5].split("  ")[-1] == "the forward codes"
    assert "rule: last 15% of the blocks: high precision" in lines
    assert "loss: times 65536, x2 after 2000 clean steps, x0.5 after an overflow" in str(get_recipe("amp_fp16"))
    assert "linear layers stay in high precision" in str(Recipe(name="nothing"))
    assert str(LossScale(hysteresis=2)).endswith("x0.5 after 2 overflows")
    assert str(LossScale(interval=None)) == "times 65536"


def test_diff_shows_each_field_once():
    assert diff("te_current", "te_current") == "te_current and te_current are the same"
    lines = diff("te_current", "te_delayed").splitlines()
    assert lines[0].split() == ["field", "te_current", "te_delayed"]
    fields = [line.split()[0] for line in lines[1:]]
    assert len(fields) == len(set(fields))
    assert "linear.fprop.a.scaling.history" in fields and "linear.dgrad.a.scaling.empty" in fields
    assert not any(field.startswith(("source", "name")) for field in fields)
    assert "rules" in diff("te_nvfp4", "te_nvfp4_all")
    assert "linear.fprop.a.rounding" in diff("fp4_ms", "fp4_ms_code")


def test_a_recipe_of_ones_own_is_listed(own):
    register_recipe(own)
    register_recipe(own)  # the same again is not a conflict
    register_recipe(get_recipe("coat"))
    assert get_recipe("mine") is own and "own" in list_recipes() and "mine" not in list_recipes()
    refused("a recipe named 'own' exists already", register_recipe, dataclasses.replace(own, source="another"))
    with pytest.raises(ArgumentError, match="a recipe named 'coat' exists already; choose another name"):
        register_recipe(dataclasses.replace(own, name="coat", aliases=()))
    refused("takes a Recipe or a PtqRecipe, not 'coat'", register_recipe, "coat")


def test_a_printed_recipe_says_every_operand():
    recipe = get_recipe("deepseek_v3")
    rows = [re.split(r"  +", line.strip()) for line in str(recipe).splitlines()[2:8]]
    assert rows[1:3] == [
        ["w", "the tensor", "e4m3", "amax of 128x128", "nearest_even"],
        ["dx = g w", "g", "the tensor", "e4m3", "amax of 1x128", "nearest_even"],
    ]
    assert rows[5] == ["x", "the forward codes, again", "e4m3", "amax of 1x128", "nearest_even"]
    assert "e5m6 > e4m3" in str(dataclasses.replace(recipe, linear=recipe.rules[2].use))
    assert "g        the tensor         high precision" in str(get_recipe("bitnet"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quartett", "recipe='quartett' is unknown; did you mean 'quartet'"),
        ("TE_NVFP4 ", "recipe='TE_NVFP4 ' is unknown; did you mean 'te_nvfp4'"),
        (
            "no such thing",
            r"is unknown.*list_recipes\(\) has the names; a file ends in .json",
        ),
        (7, "recipe=7 is unknown"),
    ],
)
def test_an_unknown_name_lists_its_neighbours(name, said):
    refused(said, get_recipe, name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "is not a valid recipe file"),
        ('{"name": "a", "lines": 1}', "recipe: a Recipe has no field 'lines'; it has activations, aliases"),
        ('{"aliases": []}', "wrong.json: recipe: a Recipe needs 'name'"),
        ("[1]", r"recipe: \[1\] is not an object; write the fields of a Recipe"),
        ('{"name": "a", "linear": {"fprop": {"a": {"format": "e4m9x"}}}}', "e4m9x"),
        ('{"name": "a", "linear": {"fprop": {"a": {"scalling": 1}}}}',
         "recipe.linear.fprop.a: a Quantizer has no field 'scalling'"),
        ('{"name": "a", "linear": {"fprop": {"a": {"transforms": [{"kind": "Fourier"}]}}}}',
         r"recipe.linear.fprop.a.transforms\[0\]: kind='Fourier' is unknown; choose one of Hadamard, Clamp"),
        ('{"name": "a", "linear": 3}', "recipe: Recipe linear=3 is not a LinearConfig or None"),
        ('{"name": "a", "linear": "te_current"}',
         "recipe.linear: 'te_current' is not an object; write the fields of a LinearConfig"),
        ('{"name": "a", "rules": {"name": "x"}}', r"recipe.rules: {'name': 'x'} is not a list; write"),
        ('{"name": "a", "rules": [{}]}', r"wrong.json: recipe.rules\[0\]: a Rule that fits every layer"),
        ('{"name": "a", "linear": {"fprop": {"a": {"format": 4}}}}',
         "recipe.linear.fprop.a.format: 4 is not a format; write its name"),
        ('{"name": "a", "linear": {"fprop": {"a": {"format": "nvpf4"}}}}',
         "recipe.linear.fprop.a.format: unknown format 'nvpf4'; did you mean 'nvfp4'"),
        ('{"name": "a", "linear": {"fprop": {"target": "hoper.wgmma"}}}',
         "recipe.linear.fprop: unknown target 'hoper.wgmma'; did you mean 'hopper.wgmma'"),
        ('{"name": "a", "linear": {"fprop": {"plan": {"promote_every": 128}}}}',
         "recipe.linear.fprop.plan: kind=None is not a kind"),
        ('{"name": "a", "linear": {"fprop": {"a": {"rounding": {"mode": "stochastik"}}}}}',
         "recipe.linear.fprop.a.rounding: unknown rounding 'stochastik'; did you mean 'stochastic'"),
        ('{"name": "a", "linear": {"fprop": {"a": {"format": "e4m3", "scaling": {"block": "1x128"}}}}}',
         "recipe.linear.fprop.a.scaling: Scaling block='1x128' is not allowed; choose .outer, inner."),
        ('{"name": {}}', r"recipe: Recipe name={} is not a name; pass a word"),
        ('{"name": "a", "optimizer": {"rule": "sgd", "state": "coat"}}',
         "recipe.optimizer: OptimizerConfig rule='sgd' is not allowed; choose 'adamw', 'madam'"),
        ('{"name": "a", "optimizer": {}}', "recipe.optimizer: an OptimizerConfig needs 'state'"),
        ('{"name": "a", "optimizer": "coat"}', "recipe.optimizer: 'coat' is not an object; write the fields of a"),
        ('{"name": "a", "reduction": 5}', "recipe: Recipe reduction=5 is not allowed; pass text or None"),
        ('{"name": "a", "levels": [{"name": 1}]}', r"recipe.levels\[0\]: Level name=1 is not allowed; pass text"),
        ('{"name": "a", "notes": 5}', "recipe: Recipe notes=5 is not allowed; pass text"),
        ('{"name": "a", "name": "b"}', "wrong.json is not a valid recipe file: 'name' stands twice in one object"),
        ('{"name": "a", "loss_scale": {"initial": NaN}}', "wrong.json is not a valid recipe file: NaN is not a number"),
        ('{"name": "a", "loss_scale": {"initial": "x"}}', "recipe.loss_scale: LossScale initial='x' is not"),
        ('{"name": "a", "loss_scale": {"interval": 1e400}}', "recipe.loss_scale: LossScale interval=inf is not"),
        ('{"name": "a", "loss_scale": {"initial": true}}', "LossScale initial=True is not allowed; pass a number"),
        ('{"name": "a", "rules": [{"kind": 4}]}', r"recipe.rules\[0\]: Rule kind=4 is not allowed; pass text or None"),
        ('{"name": "a", "rules": [{"name": ["x"]}]}', r"recipe.rules\[0\]: Rule name=\['x'\] is not allowed"),
        ('{"name": "a", "rules": [{"head": 1}]}', r"recipe.rules\[0\]: Rule head=1 is not allowed; pass True"),
        ('{"name": "a", "aliases": [[]]}', "recipe: Recipe aliases=.* is not a tuple of names"),
        ("[" * 100000, "wrong.json is not a valid recipe file: more than 64 objects or lists inside each other"),
        ('{"name": "a", "linear": ' + '{"fprop": ' * 70 + "{}" + "}" * 71, "more than 64 objects or lists inside each"),
        ('{"name": "a", "replace": [{"kind": [], "by": "x"}]}', r"recipe.replace\[0\]: Replacement kind=\[\] is not"),
        ('{"name": "a", "linear": {"fprop": {"target": ["x"]}}}', "recipe.linear.fprop: "),
        ('{"name": "a", "linear": {"fprop": {"target": 5}}}', "recipe.linear.fprop: "),
        ('{"name": "a", "linear": {"fprop": {"a": {"overflow": {}}}}}', "recipe.linear.fprop.a: Quantizer overflow={}"),
        ('{"name": "a", "linear": {"fprop": {"a": {"transforms": [{"kind": {}}]}}}}',
         r"recipe.linear.fprop.a.transforms\[0\]: kind={} is unknown; choose one of Hadamard, Clamp"),
        ('{"name": "a", "linear": {"fprop": {"a": {"transforms": [{"kind": "Clamp", "level": "x"}]}}}}',
         r"recipe.linear.fprop.a.transforms\[0\]: Clamp level='x' is not allowed; pass a number"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_where(text, said, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    refused(said, get_recipe, path)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    (tmp_path / "bits.json").write_bytes(b"\xff\xfe\x00")
    refused("bits.json is not a valid recipe file: 'utf-8' codec can't decode", get_recipe, tmp_path / "bits.json")
    refused("cannot read .*absent.json: No such file", get_recipe, tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Recipe(name=""), "Recipe name='' is not a name"),
        (lambda: Recipe(name="a", linear=Gemm()), "is not a LinearConfig or None; build one with linear_config"),
        (lambda: Recipe(name="a", rules=[Rule(head=True)]), r"is not a tuple of Rule; write rules=\(Rule"),
        (lambda: Recipe(name="a", rules=("head",)), "is not a tuple of Rule"),
        (lambda: Recipe(name="a", autocast="bf16"), "autocast='bf16' is not allowed; choose None, 'bfloat16'"),
        (lambda: Recipe(name="a", variant="talk"), "variant='talk' is not allowed"),
        (lambda: Recipe(name="a", loss_scale=1024), "loss_scale=1024 is not a LossScale or None; pass LossScale()"),
        (lambda: LossScale(initial=0), "LossScale initial=0 is not allowed; pass a finite number above 0"),
        (lambda: LossScale(interval=0), "LossScale interval=0 is not allowed; pass a whole number from 1"),
        (lambda: LossScale(hysteresis=None), "LossScale hysteresis=None is not allowed"),
        (lambda: Rule(), "a Rule that fits every layer and step belongs into the recipe's linear=; narrow it"),
        (lambda: Rule(name="("), r"Rule name='\(' is not a regular expression"),
        (lambda: Rule(last_blocks=1.5), "last_blocks=1.5 is not allowed; pass a whole number from 0, or a fraction"),
        (lambda: Rule(head=True, use="e4m3"), "Rule use='e4m3' is not a LinearConfig or None"),
        (lambda: Recipe(name="a", aliases="b"), r"aliases='b' is not a tuple of names; write aliases=\(name, \.\.\.\)"),
        (lambda: Recipe(name="a", replace=("swiglu", "SmoothSwiGLU")), "is not a tuple of Replacement"),
        (lambda: Steps(first=5, last=5), "Steps first=5, last=5 hold no step; last is the step behind the last one"),
        (lambda: Steps(first=0.5, last=0.2), "Steps first=0.5, last=0.2 hold no step"),
        (lambda: Steps(first=-1), "Steps first=-1 is not allowed; pass a step from 0, or a fraction of the run"),
    ],
)
def test_wrong_records_are_refused(make, said):
    refused(said, make)


FACTORS = [1, 0.5, 1e-30, 1e30], [0, -1.0, math.inf, math.nan, "2"]


@pytest.mark.parametrize(
    ("record", "name", "good", "wrong"),
    [
        (AttentionConfig(), "columns", [1, 64], [0, -1, 0.5, True]),
        (AttentionConfig(), "offset", [-3, 0, 8, 8.807], [True, None, math.inf]),
        (AttentionConfig(), "smooth_q", [1, 128, None], [0, -1, 1.0, True]),
        *((LossScale(), name, *FACTORS) for name in ("initial", "growth", "backoff")),
        (LossScale(), "interval", [1, 2, None], [0, -1, 1.0, True]),
        (LossScale(), "hysteresis", [1, 2], [0, -1, 1.0, True, None]),
        # 1.0 and 1 are equal numbers and would be other steps; 0.0 and 1.0 say what 0 and None do.
        (Steps(), "first", [0, 1, 7, 0.01, 0.1, 0.99], [-1, -0.5, 1.1, 1.5, 0.0, True, None, "0"]),
        (Steps(), "last", [1, 2, 0.01, 0.5, None], [0, -1, 1.0, 1.5, True]),
        (Steps(first=3), "last", [4], [3]),
        (Steps(first=0.5), "last", [0.99], [0.5, 0.2]),
        (Steps(first=5), "last", [6, 0.9], [5]),
        (Rule(head=True), "first_blocks", [0, 1, 0.01, 0.99], [-1, 0.0, 1.0, True]),
        (Rule(head=True), "last_blocks", [0, 1, 0.01, 0.99], [-1, 0.0, 1.0, True]),
        (Replacement(kind="operations", by="MuScaled"), "tau", [0.01, 0.99], [0, 0.0, 1.0, 1.5]),
    ],
)  # fmt: skip
def test_fields_end_where_they_should(record, name, good, wrong):
    for value in good:
        assert getattr(dataclasses.replace(record, **{name: value}), name) == value
    for value in wrong:
        with pytest.raises(ArgumentError, match="is not allowed|is not a whole number|hold no step|is not a part"):
            dataclasses.replace(record, **{name: value})


def test_steps_are_numbers_or_fractions_of_a_run():
    steps = Steps(first=0.82)
    assert [steps.holds(step, 100) for step in (0, 81, 82, 99)] == [False, False, True, True]
    assert [Steps(first=2, last=4).holds(step, None) for step in range(5)] == [False, False, True, True, False]
    refused("the schedule says 0.82 of the run; pass total_steps=", steps.holds, 0, None)
    assert LinearConfig() == get_recipe("fp32").linear


def test_steps_overlap_where_they_hold_one_step():
    """Every pair of stretches among steps 0 to 4 of five, their ends as numbers, as fractions, or left open."""
    ends = [None, *range(1, 6), 0.4, 0.8]
    found = [
        Steps(first=first, last=last)
        for first in (*range(5), 0.2, 0.6) for last in ends
        if last is None or (5 * last if type(last) is float else last) > (5 * first if type(first) is float else first)
    ]  # fmt: skip
    held = [{step for step in range(9) if steps.holds(step, 5)} for steps in found]
    for one, mine in zip(found, held, strict=True):
        for other, others in zip(found, held, strict=True):
            assert one.overlaps(other, 5) == bool(mine & others), (one, other)
    with pytest.raises(ArgumentError, match="the schedule says 0.2 of the run; pass total_steps="):
        Steps().overlaps(Steps(first=0.2), None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eps_rule": "inverse"}, "eps_rule='inverse' of this rule is not allowed; choose arithmetic='reciprocal'"),
        ({"power_of_two": "log2", "arithmetic": "multiply"}, "power_of_two='log2' of this rule is not allowed; choose"),
        (
            {"input_scale": True, "history": History()},
            "'inverse' with tensor= or history= is not allowed; choose a rule",
        ),
    ],
)
def test_rules_of_the_tensors_dtype_say_what_they_need(fields, message):
    refused(re.escape(message), Scaling, error=FormatError, **fields)


def test_a_quantizer_saved_is_a_recipe_of_all_operands(tmp_path):
    quantizer = Quantizer("e2m1", scaling=Scaling(block=(1, 8), scale=get_format("e5m3")), rounding="nearest_away")
    save_recipe(quantizer, tmp_path / "q.json")
    recipe = load_recipe(tmp_path / "q.json")
    assert recipe.linear == linear_config(quantizer) and recipe.name == str(quantizer)
    (tmp_path / "bad.json").write_text('{"format": "e2m1", "scalings": 3}')
    refused(r"bad.json: recipe: a Quantizer has no field 'scalings'", load_recipe, tmp_path / "bad.json")
    with pytest.raises(FormatError, match=r"'q.json'; a Quantizer's JSON file is a recipe: recipe=, --recipe"):
        get_format("q.json")
