# SPDX-License-Identifier: Apache-2.0
"""A library that leaves out the end of K: who is told, how often, and how a call gets around it."""

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.gemm.targets import doubts
from fmtsim.gemm.targets.doubts import padded_k, products_left_out
from fmtsim.gemm.targets.planfile import Book, Family
from fmtsim.gemm.targets.question import Choice, Kind
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis import batch_invariance
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import LibraryBugWarning, PlanUnknownWarning
from tests.support.targets import hopper, mm
from tools.calibrate.book_writer import book_bytes

K, END = 1000, 960


def library(fixed=1024):
    """A library that drops the end of K = 1000, and of others from 900 to ``fixed``."""
    rules = [
        {"when": {"k": k}, "kernel": kernel, "split": split, "basis": "rule", "reason": "a test"}
        for k, kernel, split in (
            ({"max": 899}, "adds all", 1),
            ({"max": fixed - 1}, "drops", 4),
            ({"min": fixed}, "adds all", 4),
        )
    ]
    kernels = {"drops": {"k_tile": 64, "k_end": END}, "adds all": {"k_tile": 64}}
    return hopper("drops", kernels, rules)


def operands(m, k=K):
    """Return operands that are zero but for ones in the last 40 products."""
    a, b = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(k, 3, dtype=torch.bfloat16)
    a[:, END:], b[END:] = 1, 1
    return a, b


def test_a_call_warns_once_a_process_and_says_what_is_left_out():
    target = library()
    said = (
        "the library of target drops leaves products of mm M=2 N=3 K=1000 bf16 x bf16 -> torch.bfloat16 out: "
        "the last 40 of the 1000 products of every sum are never multiplied, a bug of the library; pad K with zeros to "
        "1024, where it adds all"
    )
    with pytest.warns(LibraryBugWarning, match=said) as record:
        y = fmtsim.mm(*operands(2), target=target)
    assert record[0].filename == __file__ and not y.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmtsim.mm(*operands(2), target=target)
    with pytest.warns(LibraryBugWarning, match="mm M=4 N=3"):
        fmtsim.mm(*operands(4), target=target)


def test_the_advice_holds():
    a, b = operands(5)
    padded = torch.zeros(5, 24, dtype=a.dtype), torch.zeros(24, 3, dtype=a.dtype)
    y = fmtsim.mm(torch.cat((a, padded[0]), 1), torch.cat((b, padded[1]), 0), target=library())
    assert (y == 40).all()


def test_the_next_length_is_looked_for():
    assert [padded_k(library(fixed), mm(6, 3, K)) for fixed in (1024, 1200, 1400)] == [1024, 1216, 1408]
    assert padded_k(library(10000), mm(6, 3, K)) is None
    with pytest.warns(LibraryBugWarning, match="a bug of the library; add the last products by a second call"):
        fmtsim.mm(*operands(6), target=library(10000))


def test_nothing_is_said_of_other_calls():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmtsim.mm(*operands(7, 1024), target=library())
        fmtsim.mm(*operands(7), target=library(), plan=GemmPlan(k_end=END))  # the caller's own order
        fmtsim.mm(*operands(7), target="hopper.wgmma")
        a, b = (x[:, :END] for x in operands(7)[:1]), operands(7)[1][:END]
        fmtsim.mm(*a, b, target=library())  # K ends where the library does
        with recorded_calls() as calls:
            fmtsim.mm(*operands(7), target=library())
    assert [spec.plan.k_end for spec in calls.values()] == [END]


def test_explain_mm_says_it():
    rows = dict(fmtsim.explain_mm(*operands(8), target=library()).rows)
    assert rows["left out"] == (
        "the last 40 of the 1000 products of every sum are never multiplied, a bug of the library; "
        "pad K with zeros to 1024, where it adds all"
    )
    assert rows["order"].startswith("products from 960 on are left out; 15 tiles of 64 in 4 parts")
    own = fmtsim.explain_mm(*operands(8), target=library(), plan=GemmPlan(k_end=END)).rows
    assert "left out" not in dict(own) | dict(fmtsim.explain_mm(*operands(8, 1024), target=library()).rows)


def test_a_guess_of_the_order_is_no_certain_bug(monkeypatch):
    monkeypatch.setattr(doubts, "_guesses", Counter())
    target = library()
    guess = replace(target, rules=tuple(replace(rule, basis="guess") for rule in target.rules))
    said = "never multiplied, a bug of the library, if the guess of its order is right; pad K with zeros to 1024"
    assert said in dict(fmtsim.explain_mm(*operands(9), target=guess).rows)["left out"]
    with pytest.warns(PlanUnknownWarning), pytest.warns(LibraryBugWarning, match=said):
        fmtsim.mm(*operands(9), target=guess)


def test_products_left_out():
    assert [products_left_out(K, GemmPlan(k_end=end)) for end in (None, 1, 999, 1000, 2000)] == [0, 999, 1, 0, 0]


def test_a_gradient_warns_of_its_own_product():
    x = torch.zeros(1000, 8, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(16, 8, dtype=torch.bfloat16, requires_grad=True)
    y = fmtsim.linear(x, w, target=library(), plan=None)
    with pytest.warns(LibraryBugWarning, match="mm M=16 N=8 K=1000"):
        y.sum().backward()


@pytest.fixture(scope="module")
def booked():
    """A target whose book has 35 parts for M = 64 alone, and 34 for others; between 64 and 68 nothing was asked."""
    runs = ((1, Choice(66, 34, 2)), (64, Choice(66, 35, 2)), (65, Choice(66, 34, 2)))
    kind = Kind("bf16", "bf16", torch.bfloat16)
    book = book_bytes([Family(kind, 0, "m", (8, 44832), runs)], library="a GPU, cuBLASLt 13")
    return replace(get_target("h200"), rules=(), name="booked", architecture="sm_90", books=(Book(book, "parts"),))


@pytest.mark.parametrize(("m", "lost"), [(63, 0), (64, 32), (68, 0)])
def test_the_tail_that_cublaslt_drops(booked, m, lost):
    a, w = torch.zeros(m, 44832, dtype=torch.bfloat16), torch.zeros(8, 44832, dtype=torch.bfloat16)
    a[:, -32:], w[:, -32:] = 1, 1
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        y = fmtsim.mm(a, w.T, target=booked)
    assert (y == 32 - lost).all()
    said = [str(x.message) for x in record]
    assert [x.category for x in record] == [LibraryBugWarning] * bool(lost)
    assert not lost or said[0].endswith(
        "the last 32 of the 44832 products of every sum are never multiplied, a bug of the library; pad K with zeros "
        "to 44928, where it adds all"
    )  # 44864 products are not whole tiles of 128, and the book does not have them


def test_a_row_depends_on_a_batch_whose_tail_is_dropped(booked):
    found = batch_invariance([(8, 44832, False)], booked, [63, 64, 68], passes=["forward"]).products[0]
    assert [x.what for x in found.changes] == [
        "parts 34 -> 35, products end at none -> 44800", "parts 35 -> 34, products end at 44800 -> none"]  # fmt: skip
    assert found.same(63, 68)
