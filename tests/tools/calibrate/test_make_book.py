# SPDX-License-Identifier: Apache-2.0
"""Making a plan book: which sizes are asked, where choices change, what a killed run leaves, and the command."""

import itertools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmtsim.gemm.targets.ask import Asker
from fmtsim.gemm.targets.planfile import Book
from fmtsim.gemm.targets.question import Choice, Question
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.cli.output import MISMATCH
from fmtsim.support.errors import ArgumentError, DeviceError
from tests.support.cublaslt import chosen, library, library_file, open_stand_in
from tests.support.fake_gpu import mm
from tests.support.refusals import refused
from tools.calibrate import __main__ as calibration
from tools.calibrate import book as books
from tools.calibrate.__main__ import main
from tools.calibrate.book import (
    KINDS,
    MOST,
    book_target,
    choose_kinds,
    families_of,
    lattice,
    make_book,
    question,
    runs_of,
    similar_kinds,
    sizes_of,
)  # fmt: skip
from tools.calibrate.book_writer import write_book

BF16, TF32, FP8 = KINDS["bf16"], KINDS["tf32"], KINDS["fp8"]
OPEN = partial(open_stand_in, library_file())
make = partial(make_book, library="a GPU, cuBLASLt 1", workers=1, check=500)


@given(
    st.lists(st.integers(2, 400), unique=True).map(sorted),
    st.integers(1, 60),
    st.sampled_from([(1, 1), (8, 8), (1, 2)]),
)
def test_changes_are_found_where_they_are(changes, apart, steps):
    """With at most one change between two sizes that are asked, every change; with more, none that is not there."""
    first, stride = steps
    asked = []

    def ask(size):
        asked.append(size)
        return Choice(sum(change <= size for change in changes))

    grid = list(range(first, 400, apart * stride))
    runs = runs_of(ask, grid, stride)
    assert all(size % stride == first % stride for size in asked)
    *runs, (end, none) = runs
    assert (end, none) == (grid[-1] + 1, None)
    for (start, choice), (after, _) in itertools.pairwise([*runs, (end, None)]):
        assert ask(start) == choice and ask(after - 1 - (after - 1 - first) % stride) is not None
        assert start == first or ask(start - stride) != choice
    for before, size in itertools.pairwise(grid):
        if ask(before) == ask(size):
            continue
        inside = [start for start, _ in runs if before < start <= size]
        steps_inside = [x for x in range(before + stride, size + 1, stride) if ask(x) != ask(x - stride)]
        assert set(inside) <= set(steps_inside) and (len(steps_inside) > 1 or inside == steps_inside)


def test_a_library_that_refuses_all_leaves_a_run_without_a_choice():
    assert runs_of(lambda size: None, [8, 16, 24], 8) == ((8, None),)


def test_families_of_a_layer():
    """Forward, gradient of the input, and gradient of the weight, whose tokens have every residue."""
    found = [tuple(each)[1:4] + each[6:] for each in families_of([(48, 64), (48, 64)], [BF16])]
    assert found == [(0, "m", (48, 64), 1), (1, "m", (64, 48), 1)] + [(2, "k", (48, 64), step) for step in (8, 4, 2, 1)]
    assert [each.layout for each in families_of([(48, 64)], [KINDS["bf16_bias"]])] == [0]
    found = [tuple(each)[1:4] + each[6:] for each in families_of([(48, 64)], [FP8])]
    assert found == [(0, "m", (48, 64), 1), (0, "m", (64, 48), 1), (0, "k", (48, 64), 16)]
    assert families_of([(40, 64)], [FP8]) == []  # torch takes multiples of 16
    *_, wgrad = families_of([(48, 64)], [BF16])
    assert question(wgrad, 77) == Question(BF16, 2, 48, 64, 77)


def test_sizes_that_are_asked():
    forward, _, coarse, fours, _, fine = families_of([(48, 64)], [BF16])
    for family, rest in (
        (forward, (0, 1)),
        (coarse, (0, 8)),
        (fours, (4, 8)),
        (fine, (1, 2)),
        (families_of([(48, 64)], [FP8])[2], (0, 16)),
    ):
        sizes, stride = sizes_of(family)
        assert sizes[0] == family.step and sizes[-1] == MOST - (MOST - rest[0]) % stride and sizes == sorted(set(sizes))
        assert {size % stride for size in sizes} == {rest[0]} and stride == rest[1]
        assert len(sizes) < 1000
    blocks = families_of([(48, 64)], [KINDS["fp8_blocks"]])[0]
    sizes, stride = sizes_of(blocks)
    assert stride == 4 and not any(size % 4 for size in sizes)  # a size between them would be asked for ever
    assert len(runs_of(lambda size: Choice(size // 4 % 5), sizes, stride)) > 100
    assert sizes_of(forward)[0][:68] == [*range(1, 65), 68, 69, 72, 73]
    assert MOST == 16384  # the books beside the targets were asked up to it


def test_lattice_and_kinds():
    assert lattice(0) == lattice(1) == []
    sizes = {n for n, _ in lattice(9)}
    assert sizes == {64, 128, 320, 640, 1472, 3072, 6912, 15040, 32768} or len(sizes) == 9
    assert len(lattice(9)) == 81 and all(n % 64 == 0 for n in sizes) and {min(sizes), max(sizes)} == {64, 32768}
    assert choose_kinds("bf16, tf32") == [BF16, TF32] and choose_kinds(None) == list(KINDS.values())
    assert len(set(KINDS.values())) == len(KINDS)
    for wrong in ("bf17", "bf16,fp4", ""):
        refused(r"--kinds .* is not possible; choose from bf16, fp16, bf16_fp32", choose_kinds, wrong)


FAMILIES = families_of([(48, 64), (100, 4096), (64, 9000)], [BF16, TF32, FP8])


def test_a_book_has_the_library_s_answers(tmp_path):
    path = tmp_path / "a.book"
    made = make(path, FAMILIES, OPEN)
    assert (made.families, made.asked, made.size) == (len(FAMILIES), len(FAMILIES), path.stat().st_size)
    assert (made.checked, made.different) == (500, [])
    known, rng = Book.open(path), random.Random(1)
    for family in FAMILIES:
        for _ in range(30):
            asked = question(family, family.step * rng.randrange(1, 2000 // family.step))
            assert known.find(asked) == chosen(asked)
    before, content = library().asked(), path.read_bytes()
    made = make(path, FAMILIES, OPEN, check=0)
    assert made.asked == 0 and library().asked() == before and path.read_bytes() == content


def test_a_book_is_the_difference_to_that_of_another_gpu(tmp_path):
    """The same content as the whole book, of which the file has the families that a base has otherwise."""
    there, whole, path = tmp_path / "there.book", tmp_path / "whole.book", tmp_path / "a.book"
    make(whole, FAMILIES, OPEN)
    known = list(Book.open(whole).families())
    other = [known[0]._replace(runs=((known[0].step, Choice(66, 9, 2)),)), *known[1:]]
    write_book(there, other, library="another GPU")
    made = make(path, FAMILIES, OPEN, base=Book.open(there))
    assert made.size == path.stat().st_size < whole.stat().st_size
    group = [family for family in known if family.group == known[0].group]
    assert len(Book.open(path)) == len(group)
    assert set(Book.open(path).families()) == set(known)
    with pytest.raises(ArgumentError, match=r"there\.book has [\d,]+ families of sizes that would not be asked here"):
        make(tmp_path / "few.book", FAMILIES[:3], OPEN, base=Book.open(there))
    assert not (tmp_path / "few.book").exists()  # nothing was asked


class Interrupted:
    """A library at which Ctrl-C arrives after so many questions."""

    def __init__(self, left):
        self.left, self.asker = left, OPEN()

    def choice(self, asked):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.asker.choice(asked)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.book", tmp_path / "a.book"
    make(whole, FAMILIES, OPEN)
    monkeypatch.setattr(books, "CHUNK", 2)
    for questions in (3000, 5000):
        with pytest.raises(KeyboardInterrupt):
            make(path, FAMILIES, lambda left=questions: Interrupted(left))
        assert 0 < len(Book.open(path)) < len(FAMILIES)
    had = len(Book.open(path))
    assert make(path, FAMILIES, OPEN).asked == len(FAMILIES) - had
    assert path.read_bytes() == whole.read_bytes() and len(os.listdir(tmp_path)) == 2


def test_the_file_grows_while_it_is_made(tmp_path, monkeypatch):
    path, sizes, clock = tmp_path / "a.book", [], itertools.count(0, 1000)
    monkeypatch.setattr(books, "CHUNK", 3)
    monkeypatch.setattr(books, "_SAVED", 0)
    monkeypatch.setattr(books, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    class Watched(Interrupted):
        def choice(self, asked):
            if self.left % 50 == 0:
                sizes.append(len(Book.open(path)) if path.exists() else 0)
            return super().choice(asked)

    make(path, FAMILIES[:9], lambda: Watched(0), check=0)
    assert sorted(set(sizes)) == [0, 3, 6]


@pytest.mark.slow  # processes import torch
def test_processes_make_the_same_book(tmp_path):
    one, two = tmp_path / "one.book", tmp_path / "two.book"
    make(one, FAMILIES, OPEN)
    made = make(two, FAMILIES, OPEN, workers=2, check=1000)
    assert one.read_bytes() == two.read_bytes() and (made.checked, made.different) == (1000, [])
    with pytest.raises(DeviceError, match="a process that asks the library died; the file has what was asked"):
        make(two, families_of([(48, 80), (48, 96)], KINDS.values()), partial(os._exit, 3), workers=2)
    assert one.read_bytes() == two.read_bytes()


def test_an_executor_makes_the_same_book(tmp_path):
    one, two = tmp_path / "one.book", tmp_path / "two.book"
    make(one, FAMILIES, OPEN)
    with ThreadPoolExecutor(2) as pool:
        make(two, FAMILIES, OPEN, executor=pool)
        assert one.read_bytes() == two.read_bytes()
        other = partial(calibration.open_library, "cuda", "another GPU")
        refused("here; run it on the machine that has the GPU", make, two, families_of([(48, 80)], [BF16]), other,
                executor=pool, error=DeviceError)  # fmt: skip
    assert one.read_bytes() == two.read_bytes()


def test_another_library_on_a_worker_is_refused(card):
    assert isinstance(calibration.open_library("cuda", card.library), Asker)
    refused("a worker has .*cuBLASLt 1.2.3, not a GPU; give the cluster workers with that one alone",
            calibration.open_library, "cuda", "a GPU", error=DeviceError)  # fmt: skip


class OddPairs:
    """A library that answers calls with E5M2 behind E4M3 otherwise, but rarely."""

    def __init__(self):
        self.asker = OPEN()

    def choice(self, asked):
        if asked.kind.b == "e5m2" and asked.m % 16 == 0 and asked.m < 2000:
            return Choice(99)
        return self.asker.choice(asked)


def test_kinds_that_are_answered_alike_are_aliases(tmp_path):
    path = tmp_path / "a.book"
    rows = FP8._replace(scaling="row")
    families = [each._replace(kind=rows) for each in FAMILIES if each.kind == FP8]
    similar = similar_kinds([BF16, FP8, rows])
    slow, first, second = rows._replace(fast_accum=False, bias=True), rows._replace(a="e5m2"), rows._replace(b="e5m2")
    assert similar[slow] == similar[first] == similar[second] == rows and len(similar) == 29 + 3
    assert rows._replace(out=torch.float32, bias=True) not in similar and similar[FP8._replace(bias=True)] == FP8
    similar = {other: kind for other, kind in similar.items() if kind == rows}
    made = make(path, families, OddPairs, similar=similar)
    aliases = Book.open(path).aliases
    assert set(aliases) == {kind for kind in similar if kind.b == "e4m3"} and set(aliases.values()) == {rows}
    assert (made.checked, made.different) == (500, [])
    asked = question(families[0], 70)
    assert Book.open(path).find(asked._replace(kind=first)) == chosen(asked)
    assert Book.open(path).find(asked._replace(kind=second)) is None
    make(path, FAMILIES, OPEN, check=0)
    assert Book.open(path).aliases == aliases


def test_aliases_are_asked_again_in_the_end(tmp_path):
    path, families = tmp_path / "a.book", [each for each in FAMILIES if each.kind == FP8]
    second = FP8._replace(b="e5m2")
    known = [
        family._replace(runs=runs_of(lambda x, f=family: chosen(question(f, x)), *sizes_of(family)))
        for family in families
    ]
    write_book(path, known, library="a GPU, cuBLASLt 1", aliases={second: FP8})
    made = make(path, families, OddPairs)
    assert made.asked == 0 and made.different and {asked.kind for asked in made.different} == {second}


def test_another_library_s_book_is_left_alone(tmp_path):
    path = tmp_path / "a.book"
    make(path, FAMILIES[:3], OPEN)
    content = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"--book .*a\.book is of a GPU, cuBLASLt 1, and this is a GPU, cuBLASLt 2"):
        make(path, FAMILIES, OPEN, library="a GPU, cuBLASLt 2")
    assert path.read_bytes() == content


def test_a_wrong_book_is_found_by_questions_at_random(tmp_path):
    path = tmp_path / "a.book"
    wrong = [family._replace(runs=((family.step, Choice(66)),)) for family in FAMILIES]
    write_book(path, wrong, library="a GPU, cuBLASLt 1")
    made = make(path, FAMILIES, OPEN)
    right = sum(chosen(asked) == Choice(66) for asked in made.different)
    assert made.asked == 0 and len(made.different) > 50 and right == 0


@pytest.fixture
def card(monkeypatch):
    """A machine with a GPU of compute capability 9.0 and the stand-in."""

    class GPU:
        name, library, device = (
            "NVIDIA H250",
            "NVIDIA H250 (99 multiprocessors), torch 3, cuBLASLt 1.2.3",
            torch.device("cuda", 0),
        )

    monkeypatch.setattr(calibration, "make_book", partial(make_book, check=2000))
    monkeypatch.setattr(calibration, "open_gpu", lambda device: GPU)
    monkeypatch.setattr(calibration, "open_asker", lambda index, cached: OPEN())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return GPU


WORDS = ["--shapes", "shapes.txt", "--kinds", "bf16,bf16_bias", "--workers", "1"]


def test_the_command_writes_a_book_and_a_target(card, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.txt").write_text("48 4096\n")
    assert main([*WORDS, "--book", "mine.book"]) == 0
    text = capsys.readouterr().out
    assert (
        "7 families asked; mine.book has 7 in " in text and "2,000 questions at random, 0 with another answer" in text
    )
    assert "written: mine.json; use it: fmtsim.mm(a, b, target='mine.json')" in text
    target = get_target("mine.json")
    found = target.find(mm(8, 48, 4096))
    assert found.basis == "reported" and found.plan.split == 8 and target.library == card.library
    assert "cuBLASLt 1.2.3's choice in the book mine, bf16 [*, 4096] x [4096, 48], 1 <= M <= 128" in found.plan.source
    assert {rule.basis for rule in target.rules} <= {"guess", "rule"} and target.architecture == "sm_90"
    assert target.trees == ()  # those of another GPU say nothing about this one
    assert main([*WORDS, "--book", "mine.book", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["asked"], record["families"], record["different"], record["target"]) == (0, 7, [], "mine.json")


def test_the_command_says_where_book_and_library_differ(card, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.txt").write_text("48 4096\n")
    families = families_of([(48, 4096)], choose_kinds("bf16,bf16_bias"))
    write_book("mine.book", [x._replace(runs=((x.step, Choice(1)),)) for x in families], library=card.library)
    assert main([*WORDS, "--book", "mine.book"]) == MISMATCH
    text = capsys.readouterr().out
    assert "2,000 questions at random, 2,000 with another answer than the book\n  Question(kind=" in text


def test_an_interrupted_command_says_how_to_go_on(card, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.txt").write_text("48 4096\n")
    monkeypatch.setattr(calibration, "open_asker", lambda index, cached: Interrupted(1200))
    monkeypatch.setattr(books, "CHUNK", 1)
    assert main([*WORDS, "--book"]) == 130
    assert "interrupted; fmtsim.book has what was asked; the same command goes on" in capsys.readouterr().err
    assert len(Book.open("fmtsim.book")) == 1 and not os.path.exists("fmtsim.json")


def test_a_gpu_of_unknown_orders_gets_a_book_alone(card, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    (tmp_path / "shapes.txt").write_text("48 80\n")
    assert main([*WORDS, "--book", "mine.book"]) == 0
    assert "no plan file: the orders behind cuBLASLt's choices are known on sm_90" in capsys.readouterr().out
    assert os.path.exists("mine.book") and not os.path.exists("mine.json")


def test_the_same_gpu_keeps_its_rules(tmp_path):
    write_book(tmp_path / "b.book", FAMILIES_WITH_RUNS, library="NVIDIA H200 (132 multiprocessors), cuBLASLt 9")
    same = book_target(tmp_path / "b.book", "NVIDIA H200", "sm_90", "hopper")
    assert same.rules == get_target("h200").rules and same.books[0].library == same.library
    other = book_target(tmp_path / "b.book", "NVIDIA H20", "sm_90", "hopper")
    assert {rule.basis for rule in other.rules if rule.when != {"a": "int8"}} <= {"guess"}
    assert book_target(tmp_path / "b.book", "NVIDIA A100", "sm_80", "ampere") is None


FAMILIES_WITH_RUNS = [FAMILIES[0]._replace(runs=((1, Choice(66)),))]
