# SPDX-License-Identifier: Apache-2.0
"""The plan book: what is written is found, by every lookup; damaged and foreign files are named; a lookup is quick."""

import itertools
import random
import struct
import time
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtsim.gemm.targets.planfile import MAGIC, Book, Family, Run
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.support.errors import ArgumentError, DataError
from tests.support.refusals import refused
from tools.calibrate.book import sizes_of
from tools.calibrate.book_writer import book_bytes, write_book

BF16 = Kind("bf16", "bf16", torch.bfloat16)
FP16 = Kind("fp16", "fp16", torch.float16, "16f", bias=True)
FP8 = Kind("e4m3", "e5m2", torch.float32, scaling="row_block_128", fast_accum=True)
WHOLE, SPLIT, SHARED = Choice(66), Choice(21, 3, 2, 0, 7), Choice(39, -1, 2)
RUNS = ((1, SPLIT), (65, WHOLE), (129, None), (200, SHARED), (16385, None))


def family(**changes):
    return Family(BF16, 0, "m", (4096, 14336), RUNS)._replace(**changes)


def book(*families, **facts):
    return Book(book_bytes(families, library="a GPU", **facts), "a book")


def question(m, n=4096, k=14336, kind=BF16, layout=0, batch=1):
    return Question(kind, layout, m, n, k, batch)


def looked_up(families, asked):
    """The definition: the last run that has begun, of the families of the coarsest steps that have the size."""
    found = [
        each
        for each in families
        if (each.kind, each.layout, each.batch) == (asked.kind, asked.layout, asked.batch)
        and each.sizes == ((asked.n, asked.k) if each.along == "m" else (asked.m, asked.n))
        and (asked.m if each.along == "m" else asked.k) % each.step == 0
    ]
    choices = {}
    for each in sorted(found, key=lambda each: each.step):
        size = asked.m if each.along == "m" else asked.k
        choices[each.along] = next((choice for start, choice in reversed(each.runs) if start <= size), None)
    return choices.get("k") or choices.get("m")


def test_a_choice_holds_up_to_the_next_run():
    known = book(family())
    expected = {1: SPLIT, 64: SPLIT, 65: WHOLE, 128: WHOLE, 129: None, 199: None, 200: SHARED, 16384: SHARED}
    assert {m: known.find(question(m)) for m in expected} == expected
    assert known.find(question(16385)) is None and known.find(question(1 << 40)) is None
    assert known.run(question(70)) == Run(WHOLE, "m", 65, 128) and len(known) == 1


@pytest.mark.parametrize("step", [1, 4])
def test_rows_between_two_that_were_asked_are_certain_where_both_have_the_choice(step):
    """As 777 of 776 to 2496 is not: between 769 (2 parts) and 784 (3 parts) rows beyond 776 were never asked."""
    starts = (step, 68, 100, 768 + step, 776, 1040, 4200)
    runs = tuple((start, SPLIT if place % 2 else WHOLE) for place, start in enumerate(starts))
    each = family(runs=runs, step=step)
    known, (asked, _) = book(each), sizes_of(each)
    for low, high in itertools.pairwise(asked[: asked.index(8192) + 1]):
        changes = any(low < start <= high for start, _ in runs)
        for m in range(low, high, step):
            assert known.run(question(m)).certain(question(m)) == (m == low or not changes), m


def test_splits_between_values_of_k_that_lie_apart_are_not_certain():
    f32 = Kind("fp32", "fp32", torch.float32)
    for kind, choice, certain in ((BF16, SPLIT, False), (BF16, Choice(66, 3, 2), True), (f32, Choice(55, 3, 2), False),
                                  (f32, Choice(20, 3, 2), False), (f32, Choice(12), True)):  # fmt: skip
        run = Run(choice, "k", 500, 2000)
        assert [run.certain(Question(kind, 2, 64, 64, k)) for k in (512, 513)] == [True, certain], (kind, choice)


@pytest.mark.parametrize(
    "other",
    [question(70, n=4095), question(70, k=1 << 33), question(70, k=(4096 << 32) + 14336), question(70, layout=1),
     question(70, batch=2), question(70, kind=BF16._replace(out=torch.float32)), question(70, kind=FP16)],
)  # fmt: skip
def test_another_call_is_not_in_the_book(other):
    assert book(family()).find(other) is None


def test_a_size_without_a_run_before_it_is_unknown():
    assert book(family(runs=((8, WHOLE),))).find(question(7)) is None
    assert book(family(runs=((8, WHOLE),))).run(question(9)) == Run(WHOLE, "m", 8, None)


def test_the_coarsest_step_that_has_a_size_answers():
    fine = Family(BF16, 3, "k", (64, 48), ((1, SPLIT), (100, WHOLE)))
    coarse = fine._replace(runs=((8, SHARED), (104, None)), step=8)
    known = book(fine, coarse)
    sizes = {1: SPLIT, 7: SPLIT, 8: SHARED, 96: SHARED, 97: SPLIT, 101: WHOLE, 104: None}
    assert {k: known.find(Question(BF16, 3, 64, 48, k)) for k in sizes} == sizes
    assert known.run(Question(BF16, 3, 64, 48, 96)) == Run(SHARED, "k", 8, 103, 8)


def test_another_family_answers_where_one_has_no_run():
    rows = family(sizes=(4096, 20000), step=4)
    tokens = family(along="k", sizes=(64, 4096), runs=((8, SPLIT), (16385, None)), step=8)
    assert book(rows, tokens).find(question(64, k=20000)) == SPLIT


def test_many_runs():
    many = tuple((start, Choice(21, start)) for start in range(1, 700))
    known = book(family(sizes=(1, 1), runs=many), family())
    assert [known.find(question(m, 1, 1)).split for m in (1, 256, 699)] == [1, 256, 699]
    assert known.find(question(70)) == WHOLE


def test_a_kind_that_is_answered_as_another():
    known = book(family(), aliases={FP16: BF16})
    assert known.find(question(70, kind=FP16)) == WHOLE and known.aliases == {FP16: BF16}
    assert known.find(question(70, kind=FP8)) is None


def made(count, rng):
    """Families of every kind, some of them alike, as many as there are sizes."""
    heads = [(BF16, 0, "m", 1, 1), (BF16, 2, "k", 1, 8), (FP16, 1, "m", 7, 1), (FP8, 3, "k", 1, 1), (FP8, 3, "k", 1, 4)]
    for (kind, layout, along, batch, step), number in itertools.product(heads, range(count)):
        starts = sorted({step * rng.randrange(1, 1 << 20 >> rng.randrange(20)) for _ in range(rng.randrange(1, 40))})
        choices = [None if rng.random() < 0.1 else Choice(rng.randrange(70), rng.randrange(-1, 300), 2, 0, number % 7)
                   for _ in starts]  # fmt: skip
        runs = tuple(zip(starts, choices, strict=True))
        yield Family(kind, layout, along, (rng.randrange(1, 1 << 17), number + 1), runs, batch, step)


@pytest.mark.parametrize("count", [1, 70, 500])
def test_what_is_written_is_found(count):
    rng = random.Random(count)
    families = list(made(count, rng))
    known = book(*families, source="a test")
    assert len(known) == len(families) and (known.library, known.source) == ("a GPU", "a test")
    alike = [each._replace(runs=tuple(next(run) for _, run in itertools.groupby(each.runs, lambda run: run[1])))
             for each in families]  # fmt: skip
    assert set(known.families()) == set(alike)
    for each in rng.sample(families, min(len(families), 100)):
        for size in (each.step * rng.randrange(1, 1 << 20), *(start for start, _ in each.runs)):
            m, n, k = (size, *each.sizes) if each.along == "m" else (*each.sizes, size)
            asked = Question(each.kind, each.layout, m, n, k, each.batch)
            assert known.find(asked) == looked_up([each], asked)


def test_the_same_families_give_the_same_bytes():
    families = list(made(200, random.Random(1)))
    content = book_bytes(families, library="a GPU")
    random.Random(2).shuffle(families)
    assert book_bytes(families, library="a GPU") == content
    assert book_bytes(Book(content, "again").families(), library="a GPU") == content


def test_families_that_are_alike_take_no_room():
    families = [each for each in made(300, random.Random(3)) if each.kind == BF16]
    other = [each._replace(kind=FP16) for each in families]
    size = len(book_bytes(families, library="a GPU"))
    assert len(book_bytes(families + other, library="a GPU")) < size + 200


@given(data=st.binary(max_size=60))
def test_what_is_no_book(data):
    with pytest.raises(DataError, match="is not a plan book|damaged"):
        Book(data, "a book").find(question(1))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_damaged_byte_and_every_missing_end_is_found(data):
    content = book_bytes([family(), family(kind=FP8)], library="a GPU")
    place = data.draw(st.integers(0, len(content) - 1))
    changed = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    for wrong in (changed, content[:place], content + b"\0"):
        with pytest.raises(DataError, match="not a plan book|damaged|version"):
            Book(wrong, "a book").find(question(1))


def test_a_book_as_the_difference_to_another(tmp_path):
    """Lookups and families are those of the whole book; groups of sizes are answered by one of the two alone."""
    steps = [family(along="k", sizes=(64, 48), step=step, runs=((step, WHOLE), (640, SPLIT))) for step in (8, 1)]
    there = [family(), family(kind=FP16), *steps]
    here = [
        there[0], family(kind=FP16, runs=((1, WHOLE), (33, SPLIT))), steps[0], steps[1]._replace(runs=((1, SPLIT),)),
    ]  # fmt: skip
    write_book(tmp_path / "base.book", there, library="another GPU")
    base = Book.open(tmp_path / "base.book")
    write_book(tmp_path / "a.book", here, library="a GPU", base=base)
    read, whole = Book.open(tmp_path / "a.book"), book(*here)
    assert len(read) == 3  # the family of step 8 is there again, beside that of step 1
    assert {each._replace(runs=()): each.runs for each in read.families()} == {
        each._replace(runs=()): each.runs for each in whole.families()
    }
    asked = [question(m, kind=kind) for m in (1, 33, 70, 150, 300) for kind in (BF16, FP16)]
    asked += [question(64, 48, k) for k in (1, 8, 9, 639, 640, 641)]
    assert [read.find(each) for each in asked] == [whole.find(each) for each in asked]
    assert read.library == "a GPU"
    write_book(tmp_path / "base.book", there[:1], library="another GPU")
    with pytest.raises(DataError, match=r"a\.book is the difference to another base\.book than .*; make it anew with"):
        Book.open(tmp_path / "a.book").find(question(1))
    (tmp_path / "base.book").unlink()
    with pytest.raises(DataError, match=r"base\.book: No such file; a plan book lies there"):
        Book.open(tmp_path / "a.book").find(question(1))


def test_messages(tmp_path):
    content, path = book_bytes([family()], library="a GPU"), tmp_path / "a.book"
    refused(r"a\.book: No such file; a plan book lies there", Book.open, path, error=DataError)
    for wrong, message in (
        (b"GIF89a", r"a\.book is not a plan book; python -m tools.calibrate --book makes one"),
        (content[:-1], r"a\.book is damaged as a plan book \(it has \d+ bytes instead of \d+\); make it anew"),
        (content[:20], "it ends after 20 bytes"),
        (content[:-1] + b"!", "its checksum is wrong"),
        (MAGIC + struct.pack("<H", 7) + content[18:], "is a plan book of version 7, and this fmtsim reads 2"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            Book.open(path).find(question(1))
    assert write_book(path, [family()], library="a GPU") == len(content) == path.stat().st_size
    assert Book.open(path).find(question(1)) == SPLIT
    with pytest.raises(ArgumentError, match=r"family \('bf16'.* layout=0 batch=1 n=4096, k=14336 is in the book twice"):
        write_book(path, [family(), family()], library="a GPU")
    assert Book.open(path).find(question(1)) == SPLIT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"along": "n"}, "along='n' is not possible; choose 'm' or 'k'"),
        ({"runs": ()}, r"has runs that begin at \[\]; sizes ascend from 1"),
        ({"runs": ((0, WHOLE),)}, r"begin at \[0\]"),
        ({"runs": ((2, WHOLE), (2, SPLIT))}, r"begin at \[2, 2\]"),
        ({"runs": ((1 << 24, WHOLE),)}, "begin at"),
        ({"sizes": (0, 4)}, "n=0, k=4 has sizes that no product has"),
        ({"step": 0}, "has sizes that no product has; sizes, batch and step are 1 or more"),
    ],
)
def test_families_that_are_not_possible(changes, message):
    refused(message, book_bytes, [family(**changes)], library="a GPU")


def test_a_book_that_was_sealed_with_a_wrong_choice_is_damaged():
    content = book_bytes([family()], library="a GPU")
    size = struct.calcsize("<16sHIII")
    _, _, header, body, _ = struct.unpack_from("<16sHIII", content)
    record = zlib.decompress(content[size : size + header])
    for old, new in ((b'"choices":[[', b'"choices":[],"x":[['), (b'"bfloat16"', b'"bfloat17"'), (b'"m"', b'"n"')):
        wrong = zlib.compress(record.replace(old, new))
        rest = wrong + content[size + header :]
        sealed = struct.pack("<16sHIII", MAGIC, 2, len(wrong), body, zlib.crc32(rest)) + rest
        with pytest.raises(DataError, match="is damaged as a plan book"):
            Book(sealed, "a book").find(question(1))


def test_a_lookup_is_quick():
    families = list(made(300, random.Random(4)))
    known = book(*families)
    asked = [Question(x.kind, x.layout, 5, *x.sizes, x.batch) for x in families if x.along == "m"]
    known.find(asked[0])
    start = time.perf_counter()
    for each in asked:
        known.find(each)
    assert (time.perf_counter() - start) / len(asked) < 500e-6  # about 30 us on an idle core


def test_sections_are_views_of_one_file_in_memory(tmp_path):
    families = [
        Family(Kind(name, name, torch.float32), 0, "m", (8, 8), ((1, Choice(66)),)) for name in ("bf16", "fp16")
    ]
    write_book(tmp_path / "a.book", families, library="a")
    contents = Book.open(tmp_path / "a.book")._contents
    packed = [piece for sections in contents.sections.values() for section in sections for piece in section._packed]
    assert len(packed) == 6 and len({id(piece.obj) for piece in packed}) == 1
