# SPDX-License-Identifier: Apache-2.0
"""Which checks run, that each sees a planted error, and that the engines of this machine pass."""

import math

import pytest
import torch

from fmtsim.formats.registry import get_format
from fmtsim.lab.verify import default_tasks, exhaustive_tasks, outcome
from fmtsim.lab.verify.gemm import Replay, merged
from fmtsim.lab.verify.outcome import Outcome, PlantedError, Tally, engines, task_of
from fmtsim.lab.verify.plan import CHUNK, FORMATS, all_inputs, foreign_codes, saturated
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.errors import FormatError

SOME = ["nearest_even", "up", "to_odd", "stochastic"]


def test_checks_of_each_kind_of_format():
    one, two = {"torch_engine": None}, {"torch_engine": None, "cpu": None}
    expected = {
        "e4m3": ["oracle", "codes"], "bf16": ["codes"], "tf32": [], "int8": ["oracle", "codes"], "int16": ["codes"],
        "int9": ["codes"], "e8m8": [],
        "mxfp4": ["block oracle"], "logfmt8": ["block oracle"],
    }  # fmt: skip
    for name, kinds in expected.items():
        assert [task.name for task in default_tasks(one, [name])] == [f"{kind} {name}" for kind in kinds]
        assert [task.name for task in default_tasks(two, [name])] == [f"{kind} {name}" for kind in [*kinds, "engines"]]
    assert [task.name.split()[1] for task in exhaustive_tasks(two)] == ["e4m3", "e5m2", "bf16", "fp16", "e2m1"]
    assert [task.name for task in exhaustive_tasks(two, ["fp16"])] == ["exhaustive fp16"]


def test_sets_in_parts_are_one_again():
    def replay(**fields):
        return Replay(**{"set": "x", "machine": "", "cases": 1, "outputs": 2, "mismatches": 0} | fields)

    failed, later = replay(first="replaying raised", mismatches=1), replay(machine="H200", skipped=3)
    assert merged([failed, later]) == [replay(machine="H200", cases=2, outputs=4, mismatches=1, skipped=3,
                                              first="replaying raised")]  # fmt: skip
    assert merged([later, replay(machine="other")])[0].machine == "H200"
    assert merged([]) == [] and merged([later, replay(set="y"), later]) == [later, replay(set="y"), later]
    assert later.to_dict() | {"plans": 0} == {
        "set": "x", "machine": "H200", "cases": 1, "outputs": 2, "mismatches": 0, "in_guesses": 0, "skipped": 3,
        "plans": 0, "seconds": 0.0, "first": "",
    }  # fmt: skip
    assert replay(plans=(("rule", 2),)).to_dict()["plans"] == {"rule": 2}


def test_a_task_takes_its_own_time_and_survives_errors(monkeypatch):
    clock = iter([1.0, 3.5, 10.0, 14.0])
    monkeypatch.setattr(outcome.time, "perf_counter", lambda: next(clock))
    shares: list[float] = []
    found = Outcome(check="c", format="f", cases=2, mismatches=0)
    done = task_of("name", lambda advance: advance(0.5) or found, lambda text: found)
    assert done.name == "name" and done.run(shares.append).seconds == 2.5 and shares == [0.5, 1.0]
    lost = task_of("name", lambda advance: 1 / 0, lambda text: Outcome(check=text, format="f", cases=1, mismatches=1))
    assert (lost.run(shares.append).check, shares[-1]) == ("raised ZeroDivisionError: division by zero", 1.0)
    assert found.to_dict() == {"check": "c", "format": "f", "cases": 2, "mismatches": 0, "first": "", "seconds": 0.0}


SAMPLE = ["e4m3", "e2m1", "int4", "nf4", "e8m0", "mxfp4", "nvfp4", "int4_g32"]
NOTHING = lambda share: None  # noqa: E731


@pytest.mark.parametrize("name", SAMPLE)
def test_the_engines_pass(name):
    outcomes = [task.run(NOTHING) for task in default_tasks(engines(), [name])]
    assert [(outcome.check, outcome.first) for outcome in outcomes if outcome.mismatches] == []
    assert all(outcome.cases for outcome in outcomes)


@pytest.mark.parametrize("name", ["e4m3", "int4", "mxfp4", "logfmt8"])
@pytest.mark.parametrize("engine", ["torch_engine", "cpu"])
def test_a_planted_error_is_seen_by_every_check(name, engine):
    broken = engines()
    broken[engine] = PlantedError(broken[engine])
    for task in default_tasks(broken, [name]):
        outcome = task.run(NOTHING)
        assert outcome.mismatches, task.name
        assert "expected" in outcome.first


def test_a_check_that_raises_has_failed():
    class Broken:
        def quantize(self, x, spec, random, out):
            raise RuntimeError("no such kernel")

    (outcome, *_) = (task.run(NOTHING) for task in default_tasks({"cpu": Broken()}, ["int4"]))
    assert (outcome.mismatches, outcome.first) == (1, "the check raised RuntimeError: no such kernel")


def test_every_format_has_a_check():
    tasks = default_tasks(engines())
    assert {"fp64", "e4m3", "nvfp4", "logfmt8", "lns16_g2048"} <= {task.name.split()[-1] for task in tasks}
    assert {task.name.rpartition(" ")[0] for task in tasks} == {"oracle", "block oracle", "codes", "engines"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_stride_of_all_inputs_passes(name):
    shares = []
    outcome = all_inputs(get_format(name), engines(), shares.append, stride=1024)
    assert (outcome.mismatches, outcome.first) == (0, "")
    assert outcome.cases == 16 * CHUNK * 2 * 3  # two engines; values under two rules, codes under one
    assert shares[-1] == 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_all_inputs_pass(name):
    outcome = all_inputs(get_format(name), engines(), NOTHING)
    assert (outcome.mismatches, outcome.first) == (0, "")


def test_a_planted_error_is_seen_among_all_inputs():
    broken = {"cpu": PlantedError(engines()["cpu"])}
    assert all_inputs(get_format("e4m3"), broken, NOTHING, stride=8192).mismatches == 6  # two chunks, three results


def test_the_other_libraries_saturate_by_our_rule():
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e9, -1e9, 465.0, 448.0])
    e4m3, e2m1 = get_format("e4m3"), get_format("e2m1")
    ieee = foreign_codes(x, e4m3)
    assert ieee.tolist() == [0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF, 0x7F, 0x7E]
    assert saturated(ieee, x, e4m3).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0xFE, 0x7E, 0x7E]
    assert foreign_codes(x, e2m1).tolist() == [7, 7, 7, 15, 7, 15, 7, 7]


def test_a_tally_counts_and_remembers_the_first():
    tally = Tally("check", "e4m3")
    x = torch.tensor([1.0, 2.0, 3.0])
    tally.compare(x, x.clone(), x, "same")
    tally.compare(torch.tensor([1.0, -0.0, 3.5]), torch.tensor([1.0, 0.0, 3.0]), x, "other")
    tally.compare(x[:2], x, x, "short")
    outcome = tally.outcome()
    assert (outcome.cases, outcome.mismatches) == (9, 5)
    assert outcome.first == "other: element 1 of 2.0 is -0.0 (0x80000000), expected 0.0 (0x00000000)"


def test_formats_without_another_library_are_refused():
    with pytest.raises(FormatError, match="e3m2 has no exhaustive check; choose e4m3, e5m2, bf16, fp16, e2m1"):
        exhaustive_tasks(engines(), ["e3m2"])


def test_the_planted_error_spares_what_it_wraps():
    engine = engines()["torch_engine"]
    spec = CastSpec(format=get_format("e4m3"), rounding=Rounding(), overflow="saturate")
    codes = torch.tensor([1, 2], dtype=torch.uint8)
    out = torch.empty(2)
    PlantedError(engine).decode(EncodedParts(codes), spec, out)
    assert codes.tolist() == [1, 2]
    assert out[0] == get_format("e4m3").value(1)
    assert out[1] != get_format("e4m3").value(2)
