"""Products of the CPU engine against the oracle: units of the catalogue, plans, layouts, threads and random words."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan
from fmtsim.cpu.runtime import pool
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import HALF, check, gemm_spec, operand, paths, product, setting

# Every unit of the catalogue.


# Any datapath, plan, format and kind of numbers.


def test_pairs_of_parts_make_a_round_trip_too():
    plan = GemmPlan(k_tile=1, split=4, partial="bf16", reduce="pairwise", round_trip=True)
    # RN(1 + 1.5 x 2^-8) = 1 + 2^-7, and with -2^-9 that is again 1 + 2^-7; without the first rounding it is 1
    a = torch.tensor([[1.0, 0.0, 1.5 * 2.0**-8, -(2.0**-9)]])
    check(a, torch.ones(1, 4), gemm_spec(Datapath(), "fp32", plan=plan))


# Shapes, layouts, slabs, threads.


@paths
@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_column_panels(path, n):
    a, b, spec, scale_a, scale_b = setting(path, 1, n, 8)
    check(a, b, spec, scale_a=scale_a, scale_b=scale_b)


@paths
@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_rows_beside_whole_fours(path, m):
    a, b, spec, scale_a, scale_b = setting(path, m, 2, 40)
    check(a, b, spec, scale_a=scale_a, scale_b=scale_b)


@paths
def test_slabs_and_long_sums(path):
    a, b, spec, scale_a, scale_b = setting(path, 1, 1, 2 * 2048 + 37)
    check(a, b, spec, scale_a=scale_a, scale_b=scale_b)


@paths
def test_threads_rows_and_panels_give_equal_bits(path):
    m, n, k = (150, 66, 200) if path in ("precise", "two_stage", "pairwise") else (700, 150, 200)
    a, b, spec, scale_a, scale_b = setting(path, m, n, k)
    expected = product(a, b, spec, scale_a=scale_a, scale_b=scale_b)
    for threads in (2, 3, 8):
        pool.set_num_threads(threads)
        assert_same_bits(product(a, b, spec, scale_a=scale_a, scale_b=scale_b), expected)
    few = slice(3, m, 31)  # rows of later chunks
    part = None if scale_a is None else scale_a[few]
    assert_same_bits(product(a[few], b[65:], spec, scale_a=part, scale_b=None if scale_b is None else scale_b[65:]),
         expected[few, 65:])  # fmt: skip
    check(a[m - 1 :], b[n - 1 :], spec, scale_a=None if scale_a is None else scale_a[m - 1 :],
          scale_b=None if scale_b is None else scale_b[n - 1 :])  # fmt: skip
    assert_same_bits(product(a[m - 1 :], b[n - 1 :], spec, scale_a=None if scale_a is None else scale_a[m - 1 :],
                 scale_b=None if scale_b is None else scale_b[n - 1 :]), expected[m - 1 :, n - 1 :])  # fmt: skip


# Random words.


def test_random_words_depend_on_neither_threads_nor_panels():
    spec = gemm_spec(replace(HALF, accumulator="bf16", rounding="stochastic"), "bf16")
    a, b = operand("bf16", 530, 64, "normal", 1), operand("bf16", 150, 64, "normal", 2)
    expected = product(a, b, spec, random=RandomKey(7, 1))
    pool.set_num_threads(3)
    assert_same_bits(product(a, b, spec, random=RandomKey(7, 1)), expected)
    assert not torch.equal(product(a, b, spec, random=RandomKey(8, 1)), expected)
    special = a.clone()
    special[5, 0] = torch.inf  # this row goes one by one, with the same words
    got = product(special, b, spec, random=RandomKey(7, 1))
    assert_same_bits(got[6:], expected[6:])
    a[5] = special[5]
    a[5, 0] = a[5, 1]
    one_by_one = replace(spec, datapath=replace(spec.datapath, signed_zero=True))  # as do all of these
    assert_same_bits(product(a, b, one_by_one, random=RandomKey(7, 1)), product(a, b, spec, random=RandomKey(7, 1)))
