# SPDX-License-Identifier: Apache-2.0
"""Which checks run, that each sees a planted error, and that the engines of this machine pass."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.registry import get_format
from fmtsim.lab.verify import default_tasks, exhaustive_tasks, outcome
from fmtsim.lab.verify.check_plan import CHUNK, FORMATS, all_inputs, foreign_codes, saturated
from fmtsim.lab.verify.outcome import (
    Outcome,
    PlantedError,
    Tally,
    boundaries,
    engines,
    finite_values,
    rough_matrix,
    task_of,
    words_for,
)
from fmtsim.lab.verify.units import Replay, merged
from fmtsim.rounding.modes import MODES, Rounding
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


def test_casts_of_a_check():
    def of(name, dtype):
        found = list(outcome.casts(get_format(name), dtype))
        assert all(cast.format == get_format(name) and cast.dim == -1 for cast in found)
        assert {cast.rounding.random_bits for cast in found if cast.rounding.mode == "stochastic"} == {8}
        return [(cast.rounding.mode, cast.overflow) for cast in found]

    assert (
        of("e4m3", torch.float32) == list(itertools.product(MODES, ("saturate", "ieee"))) == of("mxfp4", torch.float32)
    )
    assert of("int4", torch.float32) == [(mode, "saturate") for mode in MODES] == of("logfmt8", torch.float32)
    assert of("e4m3", torch.float64) == [(mode, "saturate") for mode in SOME]
    assert of("bf16", torch.bfloat16) == [(mode, "ieee") for mode in SOME]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["e2m1", "int4_full", "uint4", "nf4", "lns8_g8", "uint1"])
def test_numbers_that_tell_roundings_apart(name, dtype):
    fmt = get_format(name)
    values = finite_values(fmt)
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    assert list(values) == sorted({fmt.value(code) for code in range(count)})
    step = values[-1] - values[-2]
    points = [*values, *((low + high) / 2 for low, high in zip(values, values[1:], strict=False))]
    points += [values[-1] + steps * step for steps in (0.5, 1, 1.5, 2, 3)]
    points += [values[0] - step / 2, values[0] - step] if "int" in name else []
    points += fmt.thresholds if name.startswith("lns") else ()
    info = torch.finfo(dtype)
    least = 2.0**-149 if dtype == torch.float32 else 5e-324
    exact = torch.tensor([sign * point for point in points for sign in (1, -1)], dtype=torch.float64).to(dtype)
    near = [torch.nextafter(exact, torch.full_like(exact, end)) for end in (math.inf, -math.inf)]
    ends = [sign * end for end in (info.max, info.tiny, least, math.inf, 0.0) for sign in (1, -1)]
    every = torch.cat([exact, *near, torch.tensor([*ends, math.nan], dtype=dtype)])
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    found = boundaries(fmt, dtype)
    assert found.dtype == dtype and found.view(bits).tolist() == sorted(set(every.view(bits).tolist()))


def test_rough_numbers_of_every_kind():
    for dtype, columns in ((torch.float32, 150), (torch.float64, 36), (torch.bfloat16, 150)):
        x = rough_matrix(dtype) if columns == 150 else rough_matrix(dtype, columns)
        assert x.shape == (9, columns) and x.dtype == dtype
        assert 1 < x[0].abs().max() < 6 and x[0].unique().numel() > columns / 2
        assert x[1].abs().max() / x[1].abs().min() > 2.0**40
        assert 0 < x[2].double().abs().max() < 2.0**-137 or dtype == torch.bfloat16  # which has none so small
        assert x[3].abs().double().max() > 1e38
        assert x[4].eq(0).all() and not x[4].signbit().any()
        assert x[5].isnan().nonzero().tolist() == [[3]] and x[5].isinf().sum() == 0
        assert (x[6] == math.inf).nonzero().tolist() == [[5]] and (x[6] == -math.inf).nonzero().tolist() == [
            [columns - 3]
        ]
        assert (x[7] * 2 == (x[7] * 2).round()).all() and x[7].unique().numel() > 5
        assert x[8, ::2].eq(0).all() and x[8, ::2].signbit().all() and x[8, 1::2].ne(0).all()
    words = words_for(5000, 3)
    assert (
        words.dtype == torch.int64 and set(words.tolist()) == set(range(8)) and torch.equal(words, words_for(5000, 3))
    )


def test_sets_in_parts_are_one_again():
    def replay(**fields):
        return Replay(**{"set": "x", "machine": "", "cases": 1, "outputs": 2, "mismatches": 0} | fields)

    failed, later = replay(first="replaying raised", mismatches=1), replay(machine="H200", skipped=3)
    later = replace(later, plans=(("rule", 2),), seconds=1.0)
    more = replay(first="[1]", mismatches=2, in_guesses=1, plans=(("rule", 1), ("guess", 1)), seconds=2.0)
    assert merged([failed, later, more]) == [
        replay(machine="H200", cases=3, outputs=6, mismatches=3, in_guesses=1, skipped=3, first="replaying raised",
               plans=(("rule", 3), ("guess", 1)), seconds=3.0)
    ]  # fmt: skip
    assert merged([later, replay(machine="other")])[0].machine == "H200"
    assert merged([]) == [] and merged([later, replay(set="y"), later]) == [later, replay(set="y"), later]
    assert later.to_dict() == {
        "set": "x", "machine": "H200", "cases": 1, "outputs": 2, "mismatches": 0, "in_guesses": 0, "skipped": 3,
        "plans": {"rule": 2}, "seconds": 1.0, "first": "",
    }  # fmt: skip


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
    outcome = all_inputs(get_format(name), engines(), shares.append, stride=2048)
    assert (outcome.mismatches, outcome.first) == (0, "")
    assert outcome.cases == 8 * CHUNK * 2 * 3  # two engines; values under two rules, codes under one
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
