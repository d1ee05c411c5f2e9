# SPDX-License-Identifier: Apache-2.0
"""Single experiments of claims: served models, searches, sweeps, GPTs, systems, widths."""

import dataclasses
import math
import re
import shlex
import types
from pathlib import Path

import pytest
import torch

from fmtsim.casts.quantize import decode
from fmtsim.formats.registry import get_format
from fmtsim.lab.cli.main import main
from fmtsim.lab.training.sweep import SweepRun
from fmtsim.recipes.recipe import Rule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.spec.datapath import LogDatapath
from fmtsim.support.progress import Progress
from studies.claims import gpts, qat, searched, sweeps
from studies.claims.__main__ import main as claims
from studies.claims.card import run_on_card
from studies.claims.claim import settings
from studies.claims.experiment import last_of
from studies.claims.gpts import ablations, mantissa, nvfp4
from studies.claims.multipliers import gates, logarithm_gates, luts, multiplier
from studies.claims.run import CLAIMS, get_claims
from studies.claims.searched import _Run
from studies.claims.served import _front, _numbers_of, formats, images
from studies.claims.widths import _VOCABULARY, _MuGPT, text


def test_tokens_and_their_positions_enter_a_model_with_unit_variance():
    torch.manual_seed(0)
    model = _MuGPT(256, 0, 0.3)
    seen = []
    model.norm.register_forward_pre_hook(lambda norm, given: seen.append(given[0].detach()))
    assert model(text(64, 32, 1)).shape == (64, 32, _VOCABULARY)
    assert 0.95 < float(seen[0].var()) < 1.05  # of 64 + 32 vectors of 256 random numbers


def test_searches_of_the_size_for_a_gpu_share_trainings(tmp_path, monkeypatch):
    small = settings(steps=4, channels=2, batch=4, integers=(4, 8), floats=((2, 1), (4, 3)))
    pair = [dataclasses.replace(one, card=(*one.card, *small)) for one in get_claims(["fliqs", "fliqs_widths"])]
    results = run_on_card(pair, tmp_path, Progress(), device="cpu", workers=1, seeds=1)
    assert not any(result.error for result in results) and len(list((tmp_path / "trainings").iterdir())) == 2 * 6
    how = dict(pair[0].settings) | dict(pair[0].card) | {"trials": 1}
    first, second = (searched.searched(untold, **how | {"seed": seed}).numbers for seed in (100, 200))
    for row in (*results[0].rows, *results[1].rows):
        assert row.values == ((first[row.expected.name] + second[row.expected.name]) / 2,)
    assert (len(_Run(**SIZES).network()), _Run(**SIZES).network(2)[2].weight.shape) == (12, (12, 12, 3, 3))


SIZES = {"steps": 8, "lr": 0.1, "policy": 0.1, "seed": 0, "channels": 6, "convs": 2, "batch": 4, "device": "cpu"}


@pytest.mark.usefixtures("one_thread")
def test_numbers_and_budgets(monkeypatch):
    found, budgets = [], []
    right, search = _Run.right, searched.search_while_training
    monkeypatch.setattr(_Run, "right", lambda self, model: found.append(right(self, model)) or found[-1])

    def watched(*args, **how):
        result = search(*args, **how)
        budgets.append((result.budget, bool(result.widths)))
        return result

    monkeypatch.setattr(searched, "search_while_training", watched)
    searched.right_of.cache_clear()
    small = dict(searched.CLAIMS[0].settings) | {"steps": 8}
    numbers = searched.searched(lambda part: None, **small).numbers
    assert {one.name for claim in searched.CLAIMS for one in claim.expected} == set(numbers)
    high, afterwards, floats, uniform, mixed, *both, joint = found
    assert numbers["high precision, right, %"] == high and numbers["integers, uniform, right, %"] == uniform
    assert numbers["integers: in flight - uniform, points"] == mixed - uniform
    assert numbers["integers: in flight - search afterwards, points"] == mixed - afterwards
    assert numbers["floats, uniform, right, %"] == both[0]
    assert numbers["floats: in flight - search afterwards, points"] == both[1] - floats
    assert numbers["integers with widths - uniform, points"] == joint - uniform
    assert numbers["integers with widths - without, points"] == joint - mixed
    adds = 64 * (64 * 9 * 8 + 16 * 72 * 16 + 256 * 32 + 32 * 8)  # of a batch, in the network that is not wide
    assert budgets == [(adds * 16, False), (adds * 16, False), (adds * 16, True)]


def run_of(point, losses, tasks=None, sharp=0.0):
    return SweepRun(
        point=point, parameters=1, tokens=1, losses=tuple(losses), validation=losses[-1], tasks=tasks or {},
        sharpness=((3, sharp),),
    )  # fmt: skip


def test_answers_are_pooled_over_seeds_and_tasks(monkeypatch):
    def train(config, point, corpus):
        assert corpus.tasks and config.batch_size == 4
        good = 3 if point.scheme == "bf16" else 1
        spike = [9.0] if point.scheme == "te_delayed" and point.seed else [2.0]
        tasks = {"sums": (good, 10), "copies": (point.seed, 30)}
        return run_of(point, [2.0, 2.1] * 15 + spike + [2.0] * 5, tasks)

    monkeypatch.setattr(sweeps, "train_point", train)
    how = {"lr": 1e-3, "width": 16, "steps": 36, "batch": 4, "seeds": (0, 1)}
    found = sweeps.tasks(lambda part: None, schemes=("bf16", "te_delayed"), **how).numbers
    assert found["bf16, right answers, %"] == 100 * (3 + 3 + 1) / 80
    assert found["right answers less in FP8, points"] == pytest.approx(100 * 4 / 80)
    assert (found["bf16, spikes"], found["te_delayed, spikes"], found["spikes more in FP8"]) == (0, 1, 1)


def test_failed_runs_are_counted_by_scheme_and_sharpness_foretells_them(monkeypatch):
    def train(config, point, corpus):
        assert config.clip is None and config.final_rate == 1
        fails = point.scheme == "e5m7" and point.seed == 1
        return run_of(point, [5.0] * 10 if fails else [1.0] * 10, sharp=2.0 if fails else 1.0)

    monkeypatch.setattr(sweeps, "train_point", train)
    how = {"rates": (1e-3, 2e-3), "width": 16, "steps": 10, "seeds": (0, 1)}
    found = sweeps.fewer_bits(lambda part: None, schemes=("bf16", "e5m7"), **how).numbers
    assert (found["bf16, failed runs in %"], found["e5m7 less bf16, failed runs, points"]) == (0, 50)
    assert (found["area of sharpness"], found["area of learning rate"]) == (1, 0.5)
    assert found["area of sharpness less the rate's"] == 0.5


PAGE = (Path(__file__).parents[3] / "docs" / "systems.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!system |-)", line)
]
NAMED = {name for row in ROWS for name, _ in re.findall(r"`(\w+)`: ([a-z ]+)", row[3])}
COMMANDS = sorted(
    {command for row in ROWS for command in re.findall(r"`((?:fmtsim|python -m studies.claims)[^`]+)`", row[-1])}
    | {f"python -m studies.claims --only {name}" for name in NAMED}
)


def test_every_row_is_whole():
    assert len(ROWS) >= 22
    for row in ROWS:
        assert len(row) == 5 and all(row), row
        assert re.search(r"\b(shown|not tried|not ours)\b", row[3]), row
        assert row[4] == "-" or re.search("`(fmtsim|python -m studies.claims) ", row[4]), row


def test_verdicts_are_those_that_are_recorded():
    found = {name: verdict for row in ROWS for name, verdict in re.findall(r"`(\w+)`: ([a-z ]+)", row[3])}
    recorded = {claim.name: claim.recorded for claim in CLAIMS}
    assert found == {name: recorded[name] for name in found} and len(found) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command, capsys):
    """Claims are listed instead of run, and trainings describe their recipe."""
    program, *words = shlex.split(command.replace("python -m ", ""))
    if program == "studies.claims":
        words.append("--list")
    elif words[0] == "train":
        get_recipe(words[words.index("--recipe") + 1])
        words.append("--help")
    try:
        assert {"fmtsim": main, "studies.claims": claims}[program](words) == 0
    except SystemExit as end:  # --help
        assert end.code == 0


@pytest.mark.parametrize("name", ["int4", "int8", "e2m1", "e3m2", "e4m3", "e5m2_finite", "e2m5_finite"])
def test_a_sum_holds_256_products_exactly_and_in_no_fewer_bits(name):
    fmt = get_format(name)
    codes = torch.arange(1 << fmt.bits)
    values = decode(codes, fmt, out_dtype=torch.float64)
    values = values[values.isfinite()].abs().unique()
    step = float(values[values > 0].min()) ** 2
    products = torch.outer(values, values) / step
    assert torch.equal(products, products.round())
    top = int(products.max()) * 256
    assert top.bit_length() <= multiplier(fmt).accumulator <= top.bit_length() + 2  # a sign, and a carry


def test_costs_by_hand():
    # INT4: 16 ANDs, 12 full adders, a sum of 16 bits; E2M1: 4 ANDs, 2 + 2 + 16 adders, 3 levels of choices
    assert gates(get_format("int4")) == 16 + 5 * (12 + 16) and luts(get_format("int4")) == 12 + 16
    assert gates(get_format("e2m1")) == 4 + 5 * (2 + 2 + 16) + 3 * 3 * 16
    assert luts(get_format("e2m1")) == 2 + 2 + 16 * (1 + 2)
    # a product of 4 bits grows to 5, 7 and 8 bits: 3, 3 and 6 choices, and 2, 4 and 2 bits that have one source
    assert gates(get_format("e2m1"), least=True) == 4 + 5 * (2 + 2 + 16) + 3 * (3 + 3 + 6) + 2 + 4 + 2
    # with choices of four: to 7 and 8 bits
    assert luts(get_format("e2m1"), least=True) == 2 + 2 + 16 + 7 + 8
    # Logarithms of 7 bits, 31 octaves of products, a sum of 24 bits; one constant is 256, of four 256, 304, 362 and 431
    lns8 = get_format("lns8_g8")
    assert logarithm_gates(lns8, LogDatapath(entries=1)) == 5 * (7 + 24) + 3 * 24 * 5 + 5 * 24 / 32
    # one bit grows to 2, 4, 8, 16 and 24: 8 choices in the last level, else bits that have one source
    assert (
        logarithm_gates(lns8, LogDatapath(entries=1), least=True) == 5 * 31 + 2 + 4 + 8 + 16 + 16 + 3 * 8 + 5 * 24 / 32
    )
    ones = 1 + 3 + 5 + 7
    assert logarithm_gates(lns8, LogDatapath(entries=4)) == 5 * 31 + 360 + 4 * 24 + 5 * 24 * ones / 32


def test_images_differ_by_seed_and_kinds_can_be_told_apart():
    (x, kinds), (again, _), (other, _) = images(64, 1), images(64, 1), images(64, 2)
    assert torch.equal(x, again) and not torch.equal(x, other) and kinds.unique().numel() == 8
    assert set(formats((4,))) == {"int4", "e2m1", "e3m0"}


def test_the_front_is_what_nothing_beats():
    points = {"int3": (1.0, 9.0), "int4": (2.0, 5.0), "e2m1": (2.0, 6.0), "e3m2": (3.0, 5.0), "e4m3": (4.0, 1.0)}
    assert _front(points) == ["int3", "int4", "e4m3"]


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
    """Return a stand-in for ``losses_of`` that looks a loss up by recipe, rate and seed."""
    return lambda recipe, seed, *, lr, **rest: [table(recipe, lr, seed)]


def untold(part):
    """Take what an experiment tells of its progress."""


def test_gaps_are_to_bfloat16_and_parts_cost_what_a_gap_grows_by(monkeypatch):
    def table(recipe, lr, seed):
        return 2.0 * {"amp_bf16": 1.0, "mxfp4": 1.04}.get(recipe.name, 1.02 if recipe.rules else 1.025)

    monkeypatch.setattr(gpts, "losses_of", losses(table))
    found = nvfp4(untold, seed=0, lr=1.0, steps=1)
    assert found.numbers["gap in %"] == pytest.approx(2.0)
    assert found.numbers["MXFP4 less NVFP4, points"] == pytest.approx(2.0)
    assert found.numbers["no tiles, points lost"] == 0
    assert found.numbers["last block too, points lost"] == pytest.approx(0.5)
    assert found.curves["MXFP4"] == [(0.5, pytest.approx(4.0))] and len(found.curves) == 7
    assert gpts.means_of([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [(1.0, 2.0), (3.0, 6.0)] and gpts.means_of([]) == []


def test_delayed_scales_of_a_gap_remember_as_many_calls_as_a_size_says(monkeypatch):
    lengths = []

    def table(recipe, lr, seed):
        history = recipe.linear.fprop.a.scaling and recipe.linear.fprop.a.scaling.history
        lengths.append(history and (history.length, history.refresh_every))
        return 2.0

    monkeypatch.setattr(gpts, "losses_of", losses(table))
    for window in (0, 16):
        gpts.losses(untold, recipes=("intel_2t", "te_current"), seed=0, window=window, lr=1.0, steps=1)
    assert lengths == [None, (1024, 1024), None, None, (16, 16), None]


def test_four_bits_are_trained_with_and_without_their_parts(monkeypatch):
    def table(recipe, lr, seed):
        if recipe.name == "amp_bf16":
            return 2.0
        x, w = recipe.linear.fprop.a, recipe.linear.fprop.b
        return 2.0 + 0.02 * (not x.transforms) + 0.04 * (str(w.gradient).find("k=") < 0)

    monkeypatch.setattr(gpts, "losses_of", losses(table))
    found = gpts.four_bits(untold, recipe="fp4_ms", seed=0, lr=1.0, steps=1).numbers
    names = ("both", "no clamp", "no estimator", "neither")
    assert [found[f"{name}, gap in %"] for name in names] == pytest.approx([0, 1, 2, 3])
    assert found["neither less both, points"] == pytest.approx(3)


def test_a_unit_scaled_model_is_compared_with_itself_in_sixteen_bits(monkeypatch):
    def table(recipe, lr, seed):
        eight = "e4m3" in str(recipe.linear.fprop.a)
        return (4.0 if lr == 0.5 else 2.0) * (1.01 if eight and recipe.replace else 1.03 if eight else 1)

    monkeypatch.setattr(gpts, "losses_of", losses(table))
    found = gpts.without_scales(untold, recipe="unit_scaling", seed=0, rate=0.5, lr=1.0, steps=1).numbers
    assert found["unit-scaled, gap in %"] == pytest.approx(1) and found["plain, gap in %"] == pytest.approx(3)
    assert (found["unit-scaled, loss in sixteen bits"], found["plain, loss in sixteen bits"]) == (4, 2)


def test_failed_runs_are_counted(monkeypatch):
    def table(recipe, lr, seed):
        if recipe.name == "e8m3" and lr == 2.0:
            return math.inf
        return 2.0 if recipe.name == "amp_bf16" else 2.1

    monkeypatch.setattr(gpts, "losses_of", losses(table))
    found = mantissa(untold, recipes=("amp_bf16", "e8m3"), rates=(1.0, 2.0), seed=0, failed=3.0, steps=1)
    assert (found.numbers["amp_bf16, failed runs in %"], found.numbers["e8m3, failed runs in %"]) == (0, 50)
    assert found.numbers["e8m3 less amp_bf16, failed runs, points"] == 50
    assert found.numbers["loss of e8m3 over amp_bf16's, %"] == pytest.approx(5.0)
    assert found.curves["e8m3"] == [(1.0, 2.1), (2.0, math.inf)]


def test_a_training_is_the_same_again_and_stops_where_a_loss_is_not_finite():
    how = {"steps": 3, "batch": 1, "layers": 1, "decay": 0.0, "clip": math.inf}
    first, second = (gpts.losses_of.__wrapped__(get_recipe("e8m3"), 1, lr=1e-3, **how) for _ in range(2))
    assert first == second and len(first) == 3 and math.isfinite(first[-1])
    stopped = gpts.losses_of(get_recipe("e8m3"), 1, lr=1e38, **how)
    assert len(stopped) == 2 and last_of(stopped, 3, 5) == math.inf
    assert first != gpts.losses_of(get_recipe("amp_bf16"), 1, lr=1e-3, **how)
    real = gpts.losses_of(get_recipe("e8m3"), 1, lr=1e-3, **how, width=32, heads=2, context=16, real=True)
    assert len(real) == 3 and real[0] == pytest.approx(math.log(256), rel=0.05) and real[0] != first[0]


def test_the_norm_of_aligned_weights_makes_an_outlier_and_leaves_the_function_as_it_is():
    model = gpts.Llama(gpts.GPTConfig(context=8, width=16, layers=2, heads=2), 0)
    mlp, x = model.blocks[1].mlp, torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    products, outputs, tokens = [], [], torch.arange(8).unsqueeze(0)
    gpts.align(model, 3, 512.0, 9)
    for calls in (8, 2):  # norms are then 512**(7/9) = 128 and 512
        for _ in range(calls):
            model(tokens, tokens)
        handle = mlp.down_proj.register_forward_pre_hook(lambda layer, args: products.append(args[0].detach()))
        outputs.append(mlp(x).detach())
        handle.remove()
    assert torch.equal(mlp.gate_proj.weight[0], mlp.up_proj.weight[0])
    assert mlp.up_proj.weight[0].norm().item() == pytest.approx(512, rel=1e-5)
    assert float(products[1][:, 0].max() / products[0][:, 0].max()) == pytest.approx(16, rel=1e-3)
    assert torch.equal(products[0][:, 1:], products[1][:, 1:])
    assert torch.allclose(*outputs, rtol=0.01, atol=1e-5)


def test_aligned_weights_are_not_learned_and_others_are(monkeypatch):
    models, convert = [], gpts.convert
    monkeypatch.setattr(gpts, "convert", lambda model, *args, **how: models.append(convert(model, *args, **how)))
    how = {"steps": 4, "batch": 1, "layers": 1, "decay": 0.0, "width": 16, "heads": 2, "clip": 1.0, "lr": 1e-2}
    assert len(gpts.losses_of(get_recipe("amp_bf16"), 1, **how, outlier=16.0)) == 4
    assert len(gpts.losses_of(get_recipe("amp_bf16"), 1, **how)) == 4
    llama, plain = models
    assert isinstance(llama, gpts.Llama) and isinstance(plain, gpts.GPT)
    mlp, fresh = llama.blocks[0].mlp, gpts.Llama(llama.config, 1).blocks[0].mlp
    assert torch.equal(mlp.gate_proj.weight[0], mlp.up_proj.weight[0])
    assert mlp.gate_proj.weight[0].norm().item() == pytest.approx(16 ** (3 / 4), rel=0.002)  # but for decay
    for layer, start in ((mlp.gate_proj, fresh.gate_proj), (mlp.down_proj, fresh.down_proj)):
        assert ((layer.weight - start.weight).abs().amax(1) > 5e-4).all()


def test_a_divergence_is_a_loss_that_rises_above_its_least(monkeypatch):
    def losses_of(recipe, seed, *, steps, **rest):
        falling = [3.0 - 0.1 * k for k in range(steps)]
        if recipe.name == "amp_bf16":
            return falling
        smooth = {one.per for one in recipe.replace}
        scaling = recipe.linear.fprop.a.scaling.history
        assert (scaling.length, scaling.refresh_every) == (8, 8)
        return {"": falling[:10] + [4.0] * 10, "channel": falling, "token": [*falling[:10], math.nan]}["".join(smooth)]

    monkeypatch.setattr(gpts, "losses_of", losses_of)
    found = gpts.outgrown(untold, window=8, seed=0, steps=20).numbers
    assert found == {
        "bfloat16, last loss over its least": 1.0,
        "FP8, last loss over its least": pytest.approx(4.0 / 2.15),
        "FP8 over bfloat16": pytest.approx(4.0 / 1.15),
        "Smooth-SwiGLU, a scale a channel over bfloat16": 1.0,
        "Smooth-SwiGLU, a scale a token over bfloat16": math.inf,
    }


@pytest.mark.slow
def test_without_its_parts_the_claim_fails():
    """Two-bit integers in place of NVFP4 do not train within 1 % of bfloat16."""
    coarse = dataclasses.replace(get_recipe("bitnet"), rules=())
    how = {key: value for key, value in SETTINGS["nvfp4_ablation"].items() if key != "seed"}
    two_bits, bf16 = gpts.trained(untold, (coarse, get_recipe("amp_bf16")), 0, how)
    assert two_bits > 1.01 * bf16


def test_points_of_served_formats_become_numbers():
    points = {"int4": (1.0, 8.0), "e2m1": (1.5, 6.0), "int8": (4.0, 1.0), "e4m3": (4.5, 3.0)}
    numbers = _numbers_of(points, (4, 8))
    assert numbers["int4: changed, %"] == 8 and numbers["on the front"] == 3
    assert numbers["integers on the front, %"] == pytest.approx(200 / 3) and numbers["integers of all, %"] == 50
    assert numbers["4 bits: least changed by minifloats - by integers, points"] == -2
    assert numbers["8 bits: least changed by minifloats - by integers, points"] == 2


def test_a_model_that_is_tuned_with_its_quantisers_is_trained_first(monkeypatch):
    trained = []

    def train(model, seed, **how):
        trained.append((model, any("emulation" in m.__dict__ for m in model.modules()), seed, how))

    monkeypatch.setattr(qat, "train_text", train)
    monkeypatch.setattr(qat, "_perplexity", lambda model, *rest: float(id(model)))
    (claim,) = (claim for claim in qat.CLAIMS if claim.name == "qat")
    small = {"width": 16, "layers": 1, "heads": 1, "steps": 7, "tuned": 3, "lr": 0.5, "batch": 2, "seed": 4}
    full, after, during = qat.perplexities_of(**dict(claim.settings) | small | {"decay": 0.9, "warmup": 2})
    (model, *first), (again, *second), (aware, *third) = trained
    text_of = {"batch": 2, "clip": math.inf, "context": 32, "real": False, "mixed": False}
    assert first == [False, 4000, {"lr": 0.5, "steps": 7, "decay": 0.9, "warmup": 2} | text_of]
    assert second[1:] == third[1:] == [5000, {"lr": 0.05, "steps": 3, "decay": 0.0, "warmup": 0} | text_of]
    assert again is model and (second[0], third[0]) == (False, True)
    assert full == id(model) and during == id(aware) and after not in (full, during)


def test_seeds_and_steps_of_a_tuned_model_have_texts_of_their_own(monkeypatch):
    starts = []

    def text(batch, length, start):
        starts.append(start)
        return torch.zeros(batch, length, dtype=torch.long)

    monkeypatch.setattr(gpts, "text", text)
    model = qat.GPT(qat.GPTConfig(context=qat._LENGTH, width=16, layers=1, heads=1), 0)
    gpts.train_text(model, 3000, lr=1e-3, steps=2, batch=1, decay=0.0, clip=1.0, context=qat._LENGTH, real=False)
    assert starts == [3_000_000, 3_000_001]


def test_a_rate_without_warmup_and_decay_stays(monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    how = {"lr": 0.5, "steps": 3, "batch": 1, "clip": 1.0, "context": 8, "real": False}
    for decay, warmup in ((0.0, 0), (0.9, 2)):
        model = qat.GPT(qat.GPTConfig(context=8, width=16, layers=1, heads=1), 0)
        gpts.train_text(model, 3, decay=decay, warmup=warmup, **how)
    assert rates == [0.5, 0.5, 0.5, 0.25, pytest.approx(0.35), pytest.approx(0.2)]


def test_the_size_of_quantisation_aware_training_for_a_gpu_runs(tmp_path):
    (claim,) = get_claims(["qat"])
    small = settings(width=16, layers=1, heads=2, context=16, steps=2, tuned=2, batch=1)
    result = run_on_card(
        [dataclasses.replace(claim, card=(*claim.card, *small))], tmp_path, Progress(), device="cpu", workers=1, seeds=2
    )[0]
    assert not result.error and len(list((tmp_path / "trainings").iterdir())) == 2
    assert all(math.isfinite(value) and value > 0 for row in result.rows[2:] for value in row.values)


def test_perplexities_of_sources_are_those_of_the_held_out_tenth(monkeypatch):
    corpus = types.SimpleNamespace(train=torch.zeros(100, dtype=torch.uint8), validation=torch.full((100,), 7).byte())
    monkeypatch.setattr(qat, "load_corpus", lambda path, context: corpus)
    model = qat.GPT(qat.GPTConfig(context=8, width=16, layers=1, heads=1), 0)
    sevens = torch.full((64, 8), 7)
    with torch.no_grad():
        once = model(sevens, sevens)
    assert qat._perplexity(model, 0, 8, real=True) == pytest.approx(float(once.exp()), rel=1e-5)
