# SPDX-License-Identifier: Apache-2.0
"""The verdict of a comparison, and runs laid over each other: gaps, seeds, suspects, what differs, what is refused."""

import json
import math
import statistics

import pytest

from fmtsim.lab.cli.main import main
from fmtsim.lab.training import run as training_run
from fmtsim.lab.training.artifacts import (
    _T,
    LOOK,
    SEEDS,
    Step,
    overlay,
    parts_of,
    suspects,
    verdict,
    verdict_of_seeds,
)
from fmtsim.support.errors import DataError
from tests.support.refusals import refused
from tests.support.reports import data_of

BASE = [4.0 - i / 100 for i in range(200)]
BLANK = {"stopped": None, "nonfinite": 0, "costs": None, "history": None}


def moved(gap=0.0, wander=0.0):
    return [x + gap + wander * math.sin(i / 5) for i, x in enumerate(BASE)]


def record(gap=0.0, wander=0.0, **simulated):
    run = {**BLANK, "losses": moved(gap, wander), **simulated}
    return {"baseline": {**BLANK, "losses": BASE}, "simulated": run}


def row(layer, operand, loss=None, noise=None, kl=None):
    return {"layer": layer, "operand": operand, "format": "e2m1", "loss": loss, "gradient_noise": noise, "kl": kl}


def words(one):
    return dict(verdict(one))


def test_a_gap_is_held_to_its_scatter_and_called_one_seeds():
    assert words(record())["Gap"] == "none: all 200 losses are equal, bit for bit"
    clear = words(record(0.1, 0.01))
    assert ", from one seed; more than the 0.0" in clear["Gap"] and "other seeds may differ" in clear["Gap"]
    assert clear[SEEDS].startswith("not known: one seed does not tell")
    lost = words(record(0.001, 0.1))
    assert ", from one seed; no more than the 0." in lost["Gap"] and lost["What to try"].startswith("fewer")
    # half a percent of the loss is told from nothing, however steady, a tenth of it from anything, however it jumps
    assert "no more than the 0.0100" in words(record(0.009))["Gap"]
    assert "; more than the 0.2010" in words(record(0.5, 0.6))["Gap"]
    # between them: four standard deviations of nine of ten means of ten steps
    one = record(0.05)
    jumps = [0.0] * 100 + [x for block in range(10) for x in [0.01 * (block % 2) + 2.0 * (block == 3)] * 10]
    one["simulated"]["losses"] = [loss + jump for loss, jump in zip(one["simulated"]["losses"], jumps, strict=True)]
    (step,) = parts_of(one).values()
    means = [0.01 * (block % 2) for block in range(10) if block != 3]
    assert step.floor == pytest.approx(4 * statistics.stdev(means)) and step.size == pytest.approx(0.055) and step.clear
    assert words({"baseline": {**BLANK, "losses": BASE}})["Gap"] == "not known: the simulated run had not begun"
    stopped = words(record(losses=[4.0, None], stopped="the loss became nan at step 2", nonfinite=3))
    assert stopped["Gap"] == "the simulated run did not end: the loss became nan at step 2"
    assert stopped["What to try"].startswith("loss scaling")
    few = {"baseline": {**BLANK, "losses": [1.0] * 20}, "simulated": {**BLANK, "losses": [1.0] * 18 + [1.25, 1.5]}}
    assert words(few)["Gap"].startswith("+0.3750 nats per byte over the last tenth of 20 steps")
    short = {"baseline": {**BLANK, "losses": BASE[:3]}, "simulated": {**BLANK, "losses": [4.1, 4.0, 4.0]}}
    assert "over the last tenth of 3 steps, from one seed; too few steps to tell" in words(short)["Gap"]
    broken = {"baseline": {**BLANK, "losses": [4.0, None]}, "simulated": {**BLANK, "losses": [4.0, 4.0]}}
    assert words(broken)["Gap"].startswith("not known: a loss of the baseline")


def test_parts_add_up_to_the_gap_and_the_largest_is_named():
    costs = {"rows": [row("a", "x_f", 3e-4), row("b", "fprop", 0.02), row("b", "wgrad", noise=0.02)]}
    parts = {"arithmetic": moved(0.02, 0.001), "optimizer": moved(0.001), "operands": None}
    one = record(0.1, 0.001, parts=parts, costs=costs, optimizer="adamw, coat")
    steps = parts_of(one)
    assert [round(step.size, 2) for step in steps.values()] == [0.08, 0.02, 0.0]
    assert sum(step.size for step in steps.values()) == pytest.approx(statistics.fmean(moved(0.1, 0.001)[-20:]) - 2.105)
    told = words(one)
    assert told["What it is made of"].startswith("+0.0800 arithmetic (its products against float32 ones), +0.0")
    assert told[LOOK].startswith("1. arithmetic: products e2m1: +0.0800 nats of the loss are its own; 2. b, fprop (pr")
    assert "3. optimizer: adamw, coat: +0.0191 nats" in told[LOOK] and " a, x_f" not in told[LOOK]
    assert "another --target: a unit that adds with more bits" in told["What to try"]
    assert "--state fp32" in told["What to try"]
    # bits that observed products lost say what of the unit is too narrow
    layers = {"b": {"fprop": {"bits_lost": {"alignment": 0.5, "accumulator": 3.0}}}}
    told = words(record(0.1, 0.001, parts=parts, costs=costs, optimizer="", layers=layers))["What to try"]
    assert "another --target: a wider accumulator (products lose 0.5 bits in alignment, 3.0 bits in accum" in told
    # a part without which the run ends is what stopped it
    stopped = record(parts={"arithmetic": BASE, "operands": None}, losses=[4.0, None], stopped="nan")
    assert words(stopped)[LOOK].startswith("1. arithmetic: products on the target: it stopped the run")


def test_layers_are_named_by_cost_and_noise_above_the_scatter():
    costs = {"rows": [row("a", "w_f", 1e-3), row("a", "x_f", 9e-2), row("b", "x_f", 2e-2), row("b", "w_f", -1.0),
                      row("c", "g_d", noise=0.05), row("d", "g_w", noise=0.001), row("e", "x_f", 0.001)]}  # fmt: skip
    run = {**BLANK, "costs": costs}
    found = suspects(run, {"operands": Step(0.1, 0.02)})
    assert [(one.layer, one.operand) for one in found] == [("a", "x_f"), ("c", "g_d"), ("b", "x_f")]
    assert found[1].why == "its rounding adds noise of 5 % of the gradient's square" and "+0.09 nats" in found[0].why
    # below the scatter of the gap only costs above it count; the KL decides where the part is clear
    assert [one.layer for one in suspects(run, {"operands": Step(0.01, 0.05)})] == ["a"]
    assert suspects(run, {"operands": Step(0.01, 0.1)}) == [] == suspects(run, {"operands": Step(0.1, None)})
    # a single product carries all of the arithmetic; products belong to that alone
    unit = {**BLANK, "costs": {"rows": [row("a", "fprop", -0.01, kl=0.002), row("b", "wgrad", noise=0.2)]}}
    assert [one.layer for one in suspects(unit, {"arithmetic": Step(0.1, 0.02)})] == ["", "b", "a"]
    assert [one.layer for one in suspects(unit, {"arithmetic": Step(0.01, 0.02)})] == ["b"]  # a noise that is loud
    assert suspects(unit, {"arithmetic": Step(-0.01, 0.02)}) == []
    unit = {**BLANK, "costs": {"rows": [row("a", "fprop", 0.09, kl=0.09), row("b", "dgrad", noise=0.5)]}}
    assert [str(one) for one in suspects(unit, {"operands": Step(0.1, 0.02)})] == [
        "operands: all together: +0.1000 nats of the loss are its own"
    ]
    odd = {**BLANK, "costs": {"rows": [row("a", "w_f", -0.5, kl=0.3), row("b", "w_f", 0.02, kl=0.001)]}}
    assert [one.layer for one in suspects(odd, {"operands": Step(0.1, 0.02)})] == ["a"]
    told = words({**record(0.3, 0.001, costs=costs), "ran": {"command": "fmtsim train --out o"}})
    assert "stochastic rounding of gradients" in told["What to try"]
    assert told["What to try"].endswith("; c and a in high precision: fmtsim train --rules o/rules.json --out o-rules")
    assert words(record(0.3, 0.001))[LOOK].startswith("1. operands: all together: +0.3")
    assert words(record(0.001, 0.001))[LOOK].startswith("nothing: no operand, product or state stands out")


def seed(gap, loss, *rows, **run):
    costs = {**BLANK, "costs": {"rows": list(rows)}, "losses": [loss + (gap or 0.0)] * 20, **run}
    baseline = {"final_loss": loss, "losses": [loss] * 20}
    return {"gap": {"final_loss": gap}, "baseline": baseline, "simulated": costs}


def test_seeds_give_an_interval():
    gaps = [0.1, 0.12, 0.11]
    (_, size), (_, made), (question, answer), *_ = verdict_of_seeds([seed(gap, 2 + gap) for gap in gaps])
    half = 4.30 * 0.01 / math.sqrt(3)
    many = [seed(0.1 + 0.02 * (i % 2), 2.0) for i in range(10)]  # from nine on: the last of Student's numbers, 2.31
    assert f"± {2.31 * 0.02 * math.sqrt(10 / 36) / math.sqrt(10):.4f} nats" in verdict_of_seeds(many)[0][1]
    assert size.startswith(f"+0.1100 ± {half:.4f} nats per byte, the mean of 3 seeds") and question == SEEDS
    assert answer.startswith("yes: the interval has no zero in it; losses of the baseline itself scatter by 0.0100")
    assert made == "operands and what else the scheme changes: the runs differ in nothing else"
    assert verdict_of_seeds([seed(gap, 2.0) for gap in (-0.1, 0.12)])[2][1].startswith(
        "no: the interval has zero in it"
    )
    stopped = dict(verdict_of_seeds([seed(0.1, 2.0), seed(None, 2.0, losses=[2.0, None])]))
    assert stopped["Gap"] == "1 of 2 runs stopped before their end" and stopped[LOOK].startswith("1. operands: ")
    alone = dict(verdict_of_seeds([seed(gap, 2.0, row("a", "x_f", 0.2)) for gap in (0.1, 9.0)]))
    assert "no: the interval has zero in it" in alone[SEEDS] and alone[LOOK].startswith("nothing: ")  # of 20 steps
    long = [seed(gap, 2.0, row("a", "x_f", 3.0)) for gap in (0.1, 9.0)]
    for one, gap in zip(long, (0.1, 9.0), strict=True):
        one["baseline"]["losses"], one["simulated"]["losses"] = BASE, moved(gap)
    alone = dict(verdict_of_seeds(long))
    assert "yes: the interval has zero in it, but each seed alone stands out" in alone[SEEDS]
    assert alone[LOOK].startswith(
        "1. a, x_f (activations, forward): in 2 of 2 seeds; its rounding moves a batch's loss"
    )
    parts = {"optimizer": [2.01] * 20, "operands": None}
    told = dict(verdict_of_seeds([seed(gap, 2.0, parts=parts, optimizer="coat") for gap in gaps]))
    assert told["What it is made of"].startswith(
        f"+0.1000 ± {half:.4f} optimizer, its states and reductions, +0.0100 ±"
    )
    assert told[LOOK].startswith("1. optimizer: in 3 of 3 seeds; coat: +0.1000 nats of the loss are its own")


def test_the_numbers_of_student_leave_out_one_in_twenty():
    """Of as many degrees of freedom as seeds less one, by the integral of the density between -t and t."""
    for free, t in enumerate(_T, 1):
        peak = math.gamma((free + 1) / 2) / math.gamma(free / 2) / math.sqrt(free * math.pi)
        places = [(i + 0.5) * t / 20_000 for i in range(20_000)]
        share = 2 * math.fsum(peak * (1 + x * x / free) ** (-(free + 1) / 2) for x in places) * t / 20_000
        assert share == pytest.approx(0.95, abs=5e-4), free


def test_seeds_name_together_what_most_of_them_name():
    rows = ((row("a", "x_f", 0.3), row("b", "w_f", 0.2)), (row("b", "w_f", 0.4), row("c", "w_f", 0.1)))
    rows += ((row("b", "x_f", 0.5), row("c", "w_f", 0.2)),)
    told = dict(verdict_of_seeds([seed(0.1 + i / 1000, 2.0, *each) for i, each in enumerate(rows)]))
    assert told["Where to look first"] == (
        "1. b, w_f (weights, forward): in 2 of 3 seeds; its rounding moves a batch's loss by +0.2 nats; "
        "2. c, w_f (weights, forward): in 2 of 3 seeds; its rounding moves a batch's loss by +0.1 nats; "
        "3. a, x_f (activations, forward): in 1 of 3 seeds; its rounding moves a batch's loss by +0.3 nats"
    )
    assert told["What to try"].startswith("finer scales (--scaling block32); b and c and a in high precision: fmtsim")
    assert dict(verdict_of_seeds([seed(gap, 2.0) for gap in (0.1, -0.1)]))["What to try"].startswith("fewer bits")


SMALL = ["--steps", "3", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2"]


def test_runs_are_laid_over_each_other(tmp_path, text, capsys, monkeypatch):
    """A second seed, and another format of the first one, whose baselines are equal."""
    monkeypatch.setattr(training_run, "COST_STEPS", 3)
    monkeypatch.chdir(tmp_path)
    for name, how in (("a", ["--seed", "0"]), ("b", ["--seed", "1"]), ("c", ["--seed", "0", "--format", "e5m2"])):
        assert main(["train", *SMALL, *how, "--data", str(text), "--out", name, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "gap: " in printed and "from one seed" in printed and "where to look first: nothing: " in printed
    page = data_of((tmp_path / "a" / "report.html").read_text())
    configuration = dict(map(tuple, page["configuration"]))
    assert configuration["ran.command"].startswith("fmtsim train --steps 3 ") and page["attribution"]["rows"]
    assert configuration["ran.simulated.formats"] == "x e4m3_tensor_amax, w e4m3_tensor_amax, g e5m2_tensor_amax"
    assert [configuration[f"ran.{run}.scaling"] for run in ("baseline", "simulated")] == ["none", "tensor"]
    assert "config.simulated.scaling" not in configuration  # left at its default
    assert configuration["ran.simulated.target"] == "none: products of float32"
    assert configuration["ran.parameters"] == "7,664" and configuration["ran.date"].endswith(" UTC")
    assert main(["report", "a", "b", "c", "--out", "all.html"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("a, b: ") and told[1].startswith("c: ") and told[-1] == "written: all.html"
    page = data_of((tmp_path / "all.html").read_text())
    labels = [curve["label"] for curve in page["curves"]]
    assert labels[0] == "a baseline = c baseline" and len(labels) == 5
    assert [curve["against"] for curve in page["curves"]] == [0, 1, 0, 1, 0]
    assert labels[2:] == ["a", "b", "c"]
    head, both, single = (row for row in page["verdict"] if len(row) == 4)
    assert head == ["run", "simulated", "gap", "verdict"] and single[:2] == ["c", "e5m2, scaled by tensor"]
    assert both[0] == "a, b" and both[2].endswith("the mean of 2 seeds and its 95 % interval (Student)")
    assert single[3].startswith("not known: one seed does not tell")
    told = dict(map(tuple, (row for row in page["verdict"] if len(row) == 2)))
    assert told["Where to look first"].startswith("nothing: ")
    rows = dict(map(tuple, page["configuration"]))
    assert rows["differs.config.seed.b"] == "1" and rows["differs.ran.simulated.formats.c"].startswith("x e5m2")
    assert rows["in all.config.steps"] == "3"


def test_what_is_no_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        (tmp_path / name).mkdir()
    (tmp_path / "y" / "record.json").write_text(json.dumps({"baseline": {}}))
    for given, message in (
        ("x", "report lays two or more different runs over each other, not x; the report of a single one is x/repo"),
        ("x x", "two or more different runs"), ("x y", "x has no record.json; pass folders that fmtsim train --out w"),
        ("y x", "record.json is not the record of a run ("),
    ):  # fmt: skip
        assert main(["report", *given.split()]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "fmtsim-report.html").exists()


@pytest.mark.parametrize(
    "change", [{"config": 4}, {"simulated": {"losses": [1.0], "label": "e4m3"}}, {"ran": [1]}], ids=str
)
def test_a_damaged_record_is_refused_with_the_files(tmp_path, change):
    run = {"losses": [1.0, 0.5], "label": "fp32", "final_loss": 0.5, "validation": 0.6}
    about = {"config": {"seed": 1}, "corpus": {}, "machine": {}, "fmtsim": "0", "torch": "2", "ran": {"date": "x"}}
    for name, record in (("x", {}), ("y", change)):
        (tmp_path / name).mkdir()
        content = {"baseline": run, "simulated": run} | about | record
        (tmp_path / name / "record.json").write_text(json.dumps(content))
    refused(rf"one of {tmp_path}/x/record.json, {tmp_path}/y/record.json is damaged .*; train it again", overlay,
            [tmp_path / "x", tmp_path / "y"], error=DataError)  # fmt: skip
    (tmp_path / "y" / "record.json").write_text("[" * 100_000)
    refused("y/record.json is not the record of a run .more than 64 objects or lists inside each", overlay,
            [tmp_path / "x", tmp_path / "y"], error=DataError)  # fmt: skip


@pytest.mark.parametrize(("recipe", "layers"), [("te_nvfp4", 6), ("te_current", 2)])
def test_a_recipe_of_shares_gets_blocks_to_show_in(recipe, layers, tmp_path, monkeypatch):
    from fmtsim.lab.cli import training_commands
    from fmtsim.lab.training import artifacts

    class Stop(Exception):
        pass

    def stop(config, *rest):
        raise Stop(config.model.layers)

    monkeypatch.setattr(training_commands, "load_corpus", lambda *given: None)
    monkeypatch.setattr(artifacts, "settings", stop)
    with pytest.raises(Stop, match=str(layers)):
        main(["train", "--recipe", recipe, "--out", str(tmp_path / "out"), "--quiet"])
