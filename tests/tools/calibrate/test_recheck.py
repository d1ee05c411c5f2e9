# SPDX-License-Identifier: Apache-2.0
"""A GPU is held to the plan file that describes it: which calls run, on what data, and what a difference does."""

import dataclasses
import json
import math
import warnings

import pytest
import torch

import fmtsim
from fmtsim.gemm.targets.planfile import Family
from fmtsim.gemm.targets.question import Choice, Kind
from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.lab.analysis.compare_native import compare_native
from fmtsim.lab.cli.main import BAD_INPUT
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DeviceError
from tools.calibrate import __main__ as calibration
from tools.calibrate import recheck as module
from tools.calibrate.__main__ import main
from tools.calibrate.book_writer import write_book
from tools.calibrate.recheck import KINDS, chosen_calls, recheck, shown

CPU, WORK, H200 = torch.device("cpu"), 1 << 22, dataclasses.replace(get_target("h200"), books=())


def few(*numbers):
    """Return the H200 with some of its rules alone."""
    record = H200.to_dict()
    return Target.from_dict({**record, "rules": [record["rules"][number] for number in numbers]})


def number_of(bases=("rule", "recorded"), **facts):
    return next(
        i for i, rule in enumerate(H200.rules)
        if rule.basis in bases and all(rule.when.get(name) == value for name, value in facts.items())
    )  # fmt: skip


def alike(verb, *arguments, **options):
    """Stand in for a GPU that does what its plan file says."""
    y = verb(*arguments, native=False, **options)
    return fmtsim.compare(y, y.clone())


def sizes_of(rule):
    return (math.prod((*map(int, outer.split("x")), int(k))) for outer, row in rule.split.items() for k in row)


def test_every_rule_has_calls_that_fall_under_it():
    idle = []
    for number, rule in enumerate(H200.rules):
        if rule.basis == "guess":
            continue
        calls = chosen_calls(H200, number, 3, 1 << 35)
        assert len(calls) <= 3 and len(set(calls)) == len(calls)
        for call in calls:
            found = H200.find(call)
            assert found.rule == number and found.basis != "guess"
        work = [call.m * call.n * call.k for call in calls]
        assert max(work, default=0) <= 1 << 35 or min(sizes_of(rule)) > 1 << 35
        idle += [] if calls else [(number, rule.when)]
    assert not idle


def test_rules_without_a_table_are_tried_in_sizes_of_all_kinds():
    """Tiles of a library, none of its tiles, odd, deep, small and large; one row and one column as the rule says."""
    rule = dataclasses.replace(H200.rules[number_of(scaling="row")], split=1, when={"n": 48})
    given = [(64, 512), (128, 1024), (100, 304), (33, 129), (16, 8192), (1, 1024), (768, 1024), (17, 40), (48, 640),
             (256, 2048)]  # fmt: skip
    assert list(module._sizes(rule)) == [(m, 48, k) for m, k in given]
    columns = [n for _, n, _ in module._sizes(dataclasses.replace(rule, when={}))]
    assert columns == [96, 64, 60, 65, 64, 768, 1, 24, 48, 512]


def test_all_kinds_of_calls_run():
    kinds = [number_of(operation="linear", bias=True, n=1), number_of(scaling="row"), number_of(scaling="block_128"),
             number_of(scaling="row_block_128"), number_of(operation="bmm"), number_of(a="int8"),
             number_of(("rule",), scaling="tensor")]  # fmt: skip
    target, asked = few(*kinds), []

    def compare(verb, *arguments, **options):
        asked.append((verb.__name__, [x for x in arguments if x is not None], options))
        return alike(verb, *arguments, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(recheck(target, CPU, calls=1, work=WORK, compare=compare))
    assert [x.number for x in found] == list(range(len(kinds)))
    assert all(x.calls == 1 and x.outputs and not x.mismatches and not x.note for x in found)
    assert {name for name, *_ in asked} == {"linear", "scaled_mm", "bmm", "int_mm"}
    recipes = {options.get("scale_recipes") for _, _, options in asked}
    assert recipes == {None, ("BlockWise1x128", "BlockWise1x128"), ("BlockWise1x128", "BlockWise128x128")}
    wide = next(x for _, (x, *_), _ in asked if x.dtype == torch.bfloat16)
    assert wide.isfinite().all()
    special = [x for name, (x, *_), _ in asked if name == "linear"][1].float()
    assert special.isnan().any() and special.isinf().any() and (special.abs() < 2.0**-126).any()
    assert len(asked) == len(KINDS) * len(kinds) - 1  # integers have no special values


def test_data_show_the_order_of_sums():
    number = number_of(("rule",), scaling="tensor")
    other = GemmPlan(k_tile=128, split=2)

    def compare(verb, *arguments, **options):
        first, second = (verb(*arguments, native=False, plan=plan, **options) for plan in (None, other))
        return fmtsim.compare(first, second)

    (found,) = recheck(few(number), CPU, calls=1, work=WORK, compare=compare)
    assert found.mismatches > 0 and found.note.startswith("scaled_mm ") and "wide data" in found.note


def test_every_algorithm_in_the_book_is_tried_where_its_runs_begin_and_end(tmp_path):
    kind = Kind("bf16", "bf16", torch.bfloat16)
    runs = (
        (1, Choice(66)), (33, Choice(66, 3, 2)), (65, Choice(41, -1, 2, 0, 35)), (97, Choice(24, 2, 2)), (129, None),
    )  # fmt: skip
    families = [Family(kind, 0, "m", (48, 512), runs), Family(kind, 1, "m", (1 << 16, 1 << 16), runs),
                Family(kind._replace(bias=True), 0, "m", (64, 64), ((1, Choice(66)),))]  # fmt: skip
    write_book(tmp_path / "a.book", families, library="NVIDIA H200, cuBLASLt 13.1.0")
    record = get_target("h200").to_dict() | {"architecture": "sm_90", "book": "a.book", "rules": []}
    target = Target.from_dict(record, folder=tmp_path)
    found = {(name, when["layout"], when["bias"]): [call.m for call in calls]
             for name, when, calls in module.book_calls(target, 3, WORK, 0)}  # fmt: skip
    assert {key: set(sizes) for key, sizes in found.items()} == {
        ("algorithm 66", 0, False): {1, 32}, ("algorithm 66", 0, True): {1},
        ("algorithm 66, split", 0, False): {33, 64}, ("algorithm 24, split", 0, False): {97, 128},
    }  # fmt: skip
    ran = list(recheck(target, CPU, calls=1, work=WORK, compare=alike))
    assert [x.note for x in ran] == [""] * 4
    assert {(x.number, x.basis, x.calls, x.mismatches) for x in ran} == {(None, "reported", 1, 0)} and len(ran) == 4
    assert "book  reported  algorithm 66" in calibration.check_table(ran)


def test_what_a_card_refuses_is_told_and_guesses_are_left_out():
    guess = next(i for i, rule in enumerate(H200.rules) if rule.basis == "guess")

    def refuse(verb, *arguments, **options):
        raise DeviceError("no memory\nmore")

    (found,) = recheck(few(guess, number_of(scaling="row")), CPU, calls=2, work=WORK, compare=refuse)
    assert (found.number, found.calls, found.outputs) == (1, 0, 0) and found.note.endswith("no memory")
    number = number_of(scaling="row")
    found, second = recheck(few(number, number), CPU, calls=1, work=WORK, compare=alike)
    assert found.calls == 1 and second.note == "no call falls under this rule"


def test_one_call_in_words():
    call = dataclasses.replace(chosen_calls(H200, number_of(scaling="row"), 1, WORK)[0], m=16, n=32, k=64)
    assert shown(call) == "scaled_mm 16x32x64 e4m3 e4m3 bfloat16 row row"
    assert math.prod((call.m, call.n, call.k)) < WORK


def test_the_command(monkeypatch, tmp_path, capsys):
    path = tmp_path / "GPU.json"
    path.write_text(json.dumps(few(number_of(scaling="row"), number_of(a="int8")).to_dict()))
    monkeypatch.setattr(calibration, "open_gpu", lambda device: None)
    own = module.recheck
    words = ["--check", str(path), "--calls", "1", "--device", "cpu"]
    for compare, status, text in (
        (alike, 0, " 0 differ"),
        (
            lambda verb, *a, **o: fmtsim.compare(torch.zeros(2), torch.ones(2)),
            1,
            "2 rules, 2 calls, 6 numbers compared, 6",
        ),
    ):
        monkeypatch.setattr(calibration, "recheck", lambda *a, c=compare, **o: own(*a, work=WORK, compare=c, **o))
        assert main(words) == status
        assert text in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["mismatches"] == 4
    assert main([*words, "--calls", "0"]) == BAD_INPUT
    assert "--calls 0 is not possible; choose 1 or more" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.slow
def test_an_h200_is_what_its_plan_file_says():
    for found in recheck(H200, torch.device("cuda"), calls=1, compare=compare_native):
        assert found.calls and not found.mismatches, found
