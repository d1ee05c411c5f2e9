# SPDX-License-Identifier: Apache-2.0
"""Targets with a plan book: what the library chooses, and what comes before and after it."""

import json
from dataclasses import replace

import pytest
import torch

from fmtsim.gemm.targets import ask
from fmtsim.gemm.targets.planfile import Family
from fmtsim.gemm.targets.question import Choice, Kind, Question, library_question, question_call
from fmtsim.gemm.targets.target import Target, get_target
from tests.support.refusals import refused
from tests.support.targets import mm
from tools.calibrate.book_writer import write_book

BF16 = Kind("bf16", "bf16", torch.float32)
NINE, STREAM_K = Choice(66, 9, 2), Choice(41, -1, 2, 0, 35)
FAMILIES = [
    Family(BF16, 0, "m", (48, 11528), ((1, Choice(66)), (33, NINE), (65, STREAM_K), (97, None))),
    Family(BF16, 2, "k", (64, 48), ((8, Choice(24, 4, 2)),), step=8),
    Family(Kind("tf32", "tf32", torch.float32, "tf32"), 0, "m", (100, 1000), ((1, Choice(13, custom=94)),)),
]  # fmt: skip


def with_book(folder, rules=(), **facts):
    """Return a target whose book has three families, read from files in a folder."""
    record = get_target("h200").to_dict()
    kernels = {"nvjet": {"algorithm": 66}, "any": {}}
    record |= {
        "name": "mine",
        "architecture": "sm_90",
        "book": "a.book",
        "kernels": kernels,
        "rules": list(rules),
    } | facts
    write_book(folder / "a.book", FAMILIES, library="NVIDIA H200, torch 2.11.0, cuBLASLt 13.1.0")
    (folder / "mine.json").write_text(json.dumps(record))
    return get_target(folder / "mine.json")


def test_the_librarys_own_choice(tmp_path):
    target = with_book(tmp_path)
    whole, split = target.find(mm(32, 48, 11528)), target.find(mm(33, 48, 11528))
    assert (whole.basis, whole.plan.split, whole.rule) == ("reported", 1, None)
    assert (split.basis, split.plan.split, split.plan.k_end, split.plan.verified) == ("reported", 9, 11520, False)
    assert split.plan.source == (
        "cuBLASLt 13.1.0's choice in the book a, bf16 [*, 11528] x [11528, 48], 33 <= M <= 64: "
        "algorithm 66, 9 parts, reduction scheme 2"
    )
    tokens = target.find(mm(64, 48, 4096, a_layout="column", b_layout="column"))
    assert (tokens.plan.part_k, tokens.plan.instruction_k) == (1024, 8)
    assert "bf16 [64, *] x [*, 48], 8 <= K: algorithm 24, 4 parts" in tokens.plan.source
    spec = target.resolve(mm(1, 100, 1000, "tf32"))
    assert (spec.unit, spec.a.name, spec.plan.lanes, spec.basis) == ("fp32_fma", "fp32", 2, "reported")


def test_a_choice_between_values_of_k_that_lie_apart_is_a_guess(tmp_path, monkeypatch):
    """Of CUTLASS's kernels, whose splits change in between; a GPU at hand is asked."""
    target = with_book(tmp_path)
    dense, apart = (mm(64, 48, k, a_layout="column", b_layout="column") for k in (512, 520))
    found = [target.find(call) for call in (dense, apart)]
    assert [each.basis for each in found] == ["reported", "guess"]
    assert all("algorithm 24, 4 parts" in each.plan.source for each in found)
    monkeypatch.setattr(ask, "choice", lambda question, of: Choice(24, 5, 2))
    assert target.find(apart).basis == "reported" and "asked on this machine" in target.find(apart).plan.source


def test_a_choice_between_rows_of_which_one_has_another_is_asked(monkeypatch):
    """Of 12,432 results of this very call 12 were others on an H200: rows from 777 to 783 were not asked."""
    call = replace(mm(777, 16, 4096, out=torch.bfloat16), operation="linear")
    assert [get_target("h200").find(replace(call, m=m)).basis for m in (768, 769, 777, 784, 785)] == [
        "reported", "reported", "guess", "reported", "reported"
    ]  # fmt: skip
    monkeypatch.setattr(ask, "choice", lambda question, of: Choice(66, 2, 2))
    found = get_target("h200").find(call)
    assert (found.basis, found.plan.split) == ("reported", 2) and "asked on this machine" in found.plan.source


def test_a_call_that_the_book_lacks_is_asked_on_the_very_machine(tmp_path, monkeypatch):
    target = with_book(tmp_path)
    asked = []
    monkeypatch.setattr(ask, "choice", lambda question, of: asked.append((question, of)) or Choice(66, 4, 2))
    assert target.find(mm(33, 48, 11528)).plan.split == 9 and not asked
    found = target.find(mm(97, 48, 11528))
    assert (found.basis, found.plan.split, found.rule) == ("reported", 4, None)
    assert found.plan.source == (
        "cuBLASLt 13.1.0's choice, asked on this machine: algorithm 66, 4 parts, reduction scheme 2"
    )
    assert asked == [(library_question(mm(97, 48, 11528)), target)]
    assert get_target("chain").find(mm(97, 48, 11528)).basis == "rule" and len(asked) == 1  # no GPU's


def test_a_choice_without_a_known_order_is_a_guess(tmp_path):
    """Rules do not speak for it: the library runs another kernel than they think."""
    rule = {"when": {}, "kernel": "nvjet", "split": 1, "basis": "rule", "reason": "no call is split"}
    target = with_book(tmp_path, [rule])
    found = target.find(mm(65, 48, 11528))
    assert (found.basis, found.plan.split) == ("guess", 1)
    assert found.plan.source.startswith("one chain, k in order; cuBLASLt 13.1.0's choice in the book a")
    assert found.plan.source.endswith(
        ": algorithm 41, stream-K, reduction scheme 2, stages 35, whose order is not known"
    )
    assert target.find(mm(97, 48, 11528))[1:3] == ("rule", 0)  # beyond what the library was asked
    assert target.find(mm(33, 48, 11536))[1:3] == ("rule", 0)


def test_tables_and_recorded_calls_come_before_the_book(tmp_path):
    table = {"when": {}, "kernel": "nvjet", "split": {"33x48": {"11528": 2}}, "basis": "guess", "reason": "asked"}
    recorded = {"when": {"m": 34}, "kernel": "nvjet", "split": 3, "basis": "recorded", "reason": "bits"}
    general = {"when": {}, "kernel": "nvjet", "split": 4, "basis": "rule", "reason": "rule"}
    target = with_book(tmp_path, [table, recorded, general])
    found = [target.find(mm(m, 48, 11528)) for m in (33, 34, 35, 200)]
    assert [(f.plan.split, f.basis, f.rule) for f in found] == [
        (2, "guess", 0), (3, "recorded", 1), (9, "reported", None), (4, "rule", 2)
    ]  # fmt: skip
    assert [f.plan.verified for f in found] == [False, True, False, False]


def test_books_of_plan_files(tmp_path):
    target = with_book(tmp_path)
    record = target.to_dict()
    assert (record["architecture"], record["book"]) == ("sm_90", "a.book")
    assert Target.from_dict(record, folder=tmp_path).to_dict() == record
    path = tmp_path / "mine.json"
    for change, message in (
        (
            {"book": "b.book"},
            "mine.json: plan: .*b.book: No such file; a plan book lies there, which python -m tools.calibrate",
        ),
        ({"book": "../a.book"}, "plan: book='../a.book' is not the name of a file beside the plan file"),
        ({"book": 3}, "plan: book=3 is not the name of a file beside the plan file"),
        ({"architecture": "sm_89"}, "architecture='sm_89' is not allowed; choose None, 'sm_90', 'sm_100', 'sm_103'"),
        (
            {"architecture": None},
            "plan: a book and trees name algorithms, whose orders depend on the GPU; give the architecture",
        ),
        (
            {"kernels": {"nvjet": {"algorithm": 66, "k_tile": 64}}},
            "algorithm=66 says how K is cut; leave all fields but",
        ),
    ):
        path.write_text(json.dumps(record | change))
        refused(message, get_target, path)


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize(
    "kind",
    [
        BF16, Kind("fp16", "fp16", torch.float16, "16f"), Kind("tf32", "tf32", torch.float32, "tf32", bias=True),
        Kind("e4m3", "e5m2", torch.bfloat16, scaling="row"),
        Kind("e4m3", "e4m3", torch.float16, "32f", True, "tensor", True),
    ],
)  # fmt: skip
def test_a_call_about_which_a_question_is_asked(kind, layout):
    for batch in (1, 3):
        question = Question(kind, layout, 16, 32, 64, batch)
        assert library_question(question_call(question)) == question
