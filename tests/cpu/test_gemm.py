# SPDX-License-Identifier: Apache-2.0
"""Products of the CPU engine against the oracle: layouts, threads, random words and special numbers."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan, get_unit
from fmtsim.cpu.runtime import pool
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import (
    HALF,
    INF,
    NAN,
    UNITS,
    check,
    check_ends_of_int32,
    f32,
    gemm_spec,
    operand,
    paths,
    product,
    setting,
    unit_scales,
)


def test_integers_at_the_ends_of_int32():
    check_ends_of_int32()


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


@pytest.mark.parametrize("path", [name for name in UNITS if name not in ("integers", "grouped")])
def test_rows_and_columns_of_nan_and_inf(path):
    a, b, spec, _, _ = setting(path, 6, 67, 33)
    if spec.a.infinities:
        a[1, 3], a[2, 30], b[4, 3], b[5, 30] = INF, -INF, -INF, INF
        a[2, 3], b[66, 0], b[6, 3] = 0, INF, 0
    clean = product(a, b, spec)
    a[4, 7], b[65, 32] = NAN, NAN
    check(a, b, spec)
    got = product(a, b, spec)
    assert (
        (got.view(torch.int32)[got.isnan()] == 0x7FFFFFFF).all() and got[4].isnan().all() and got[:, 65].isnan().all()
    )
    others = [row for row in range(6) if row != 4]
    assert_same_bits(got[others][:, :65], clean[others][:, :65])


@pytest.mark.parametrize("c", [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
@pytest.mark.parametrize("signed_zero", [False, True])
@pytest.mark.parametrize("unit", [HALF, replace(HALF, rounding="down"), replace(HALF, promote_every=4)])
def test_zeros_and_special_addends(unit, signed_zero, c):
    unit = replace(unit, signed_zero=signed_zero)
    rows = [[0.0, -0.0], [-0.0, -0.0], [1.0, -1.0], [-1.0, 1.0], [2.0**-100, 0.0], [INF, 0.0], [NAN, 1.0]]
    a, b = f32(*rows), f32([1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [-0.0, 0.0], [2.0**-100, 2.0**-60])
    given = torch.full((len(a), len(b)), c)
    check(a, b, gemm_spec(unit, "fp32"), c=given)
    given[0, 0] = 0.5
    check(a, b, gemm_spec(unit, "fp32", plan=GemmPlan(k_tile=1, split=2, partial="fp16")), c=given)


NVF4 = replace(get_unit("blackwell.tcgen05.nvf4").mode("e2m1", "e2m1"), fraction_bits=4)


@pytest.mark.parametrize(
    ("unit", "name"), [(get_unit("ampere.mma").mode("tf32", "tf32"), "tf32"), (HALF, "bf16"), (NVF4, "e2m1")]
)
def test_an_addend_of_minus_zero_is_no_negative_term(unit, name):
    """A count of negative terms that took it for one would be off by a last place wherever terms are cut."""
    spec = gemm_spec(unit, name)
    a, b = (operand(name, rows, 64, "normal", rows) for rows in (5, 70))
    scales = [unit_scales(spec, rows, 64, "normal", rows) for rows in (5, 70)]
    check(a, b, spec, c=torch.full((5, 70), -0.0), scale_a=scales[0], scale_b=scales[1])
