# SPDX-License-Identifier: Apache-2.0
"""Whole products of the oracle against hand-computed values: orders, promotions, parts, reduction and epilogue."""

import math
import re
from dataclasses import replace

import pytest

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.spec.datapath import Datapath, FmaDatapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import schedule
from tests.support.bits import assert_identical
from tests.support.product_oracle import epilogue_oracle, gemm_oracle
from tests.support.refusals import refused

INF, NAN = math.inf, math.nan
BF16, FP16, FP32, FP64 = (get_format(name) for name in ("bf16", "fp16", "fp32", "fp64"))
E4M3, INT8 = get_format("e4m3"), get_format("int8")
UE4M3 = FloatFormat(name="ue4m3", exponent_bits=4, mantissa_bits=3, signed=False, nan="top", infinities=False)
PLAIN = GemmPlan()
TWO = Datapath(block=2, fraction_bits=None, rounding="nearest_even")
ONE = replace(TWO, block=1)
TINY = 2.0**-24  # half of float32's last place at 1: 1 + TINY is 1, TINY + TINY + 1 is not
NEXT = 1 + 2.0**-23


def dot(row, unit=ONE, plan=PLAIN, c=None, fmt=FP32, **scales):
    """Return one output whose products are the numbers of a row (b is one everywhere)."""
    spec = GemmSpec(datapath=unit, plan=plan, a=fmt, b=fmt)
    ones = [[1 if isinstance(x, int) else 1.0 for x in row]]
    scales = {name: [scale] for name, scale in scales.items()}
    return gemm_oracle([row], ones, spec, c=None if c is None else [[c]], **scales)[0][0]


# Rules 1 to 3: a chain.


def test_blocks_follow_each_other_through_the_accumulator():
    assert_identical(dot([1.0, TINY, TINY]), 1.0)  # 1 + TINY is a tie to 1, twice
    assert_identical(dot([TINY, TINY, 1.0]), NEXT)
    assert_identical(dot([1.0, TINY, TINY], replace(ONE, block=3)), NEXT)
    assert_identical(dot([1.0, TINY, TINY, TINY], TWO), NEXT)  # (1 + TINY) -> 1, then 1 + 2 TINY


def test_a_chain_starts_at_c():
    assert_identical(dot([TINY, TINY], c=1.0), 1.0)
    assert_identical(dot([TINY, TINY], TWO, c=1.0), NEXT)  # c joins the block
    assert_identical(dot([1.0], c=NAN), NAN)
    # Of three parts only the first starts at c: (1 + TINY) + (0 + TINY) + (0 + 2).
    assert_identical(dot([TINY, TINY, 2.0], plan=GemmPlan(k_tile=1, split=3), c=1.0), 3.0)
    assert_identical(dot([-1.0, TINY, TINY], plan=GemmPlan(k_tile=1, split=2), c=1.0), 2 * TINY)


def test_without_products():
    for unit in (ONE, TwoStageDatapath(block=4), PairwiseDatapath(block=4)):
        assert_identical(dot([], unit), 0.0)
        assert_identical(dot([], unit, c=-3.0), -3.0)
    assert dot([], IntegerDatapath(), fmt=INT8) == 0
    assert gemm_oracle([], [], GemmSpec(datapath=ONE, plan=PLAIN, a=FP32, b=FP32)) == []


def test_each_unit_has_its_rule():
    row = [1.0, TINY, TINY]
    assert_identical(dot(row, TwoStageDatapath(block=4)), NEXT)  # the exact sum of a block, rounded once
    assert_identical(dot(row, TwoStageDatapath(block=2)), 1.0)
    assert_identical(dot(row, PairwiseDatapath(block=4)), 1.0)  # (1 + TINY) + (TINY + 0): two ties
    assert_identical(dot([TINY, 0.0, TINY, 1.0], PairwiseDatapath(block=2)), 1.0)  # (TINY + 0), then TINY + (TINY + 1)
    assert_identical(dot([TINY, 1.0, 0.0, TINY], FmaDatapath()), 1.0)  # 1 first, then three ties
    assert_identical(dot([1.0, TINY, 0.0, TINY], FmaDatapath()), 1.0)  # TINY + 1, then a tie
    assert_identical(dot([1.0, TINY, 0.0, TINY], FmaDatapath(block=4, parity=True)), NEXT)  # 1 + (TINY + TINY)
    assert_identical(dot([TINY, TINY], FmaDatapath(block=4, parity=True), c=1.0), NEXT)
    assert dot([2, -3, 5], IntegerDatapath(), fmt=INT8, c=10) == 14


def test_scales_inside_the_unit():
    unit = replace(TWO, scale=UE4M3, scale_block=2)
    # (1 + 1) 2 x 4 + (1 + 1) 8 x 0.5 + 1 x 1 x 2.
    assert_identical(dot([1.0] * 5, unit, fmt=E4M3, scale_a=[2.0, 8.0, 1.0], scale_b=[4.0, 0.5, 2.0]), 26.0)
    assert_identical(dot([1.0] * 5, unit, fmt=E4M3, scale_a=[2.0, 8.0, 1.0]), 21.0)
    assert_identical(dot([1.0] * 5, unit, fmt=E4M3), 5.0)
    assert_identical(dot([0.0] * 5, unit, fmt=E4M3, scale_a=[2.0, NAN, 1.0]), NAN)
    # The scale belongs to k, wherever tiles put it: the residue k = 0 comes first and shares the scale of k = 1.
    plan = GemmPlan(k_tile=2, residue_first=True)
    assert_identical(dot([1.0] * 5, unit, plan, fmt=E4M3, scale_a=[2.0, 8.0, 1.0]), 21.0)


# Rule 4: promotion.


def test_promotion():
    row = [1.0, TINY, TINY, TINY, TINY]
    assert_identical(dot(row, plan=GemmPlan(promote_every=1)), 1.0)
    # (1 + TINY) + (TINY + TINY) + TINY: 1, NEXT, then a tie between NEXT and 1 + 2^-22, which is even.
    assert_identical(dot(row, plan=GemmPlan(promote_every=2)), 1 + 2.0**-22)
    assert_identical(dot(row, plan=GemmPlan(promote_every=3)), NEXT)  # (1 + TINY + TINY) = 1, then 1 + (TINY + TINY)
    # c is the outer sum: 1 + (TINY + TINY); without promotion it starts the chain.
    assert_identical(dot([TINY, TINY], plan=GemmPlan(promote_every=2), c=1.0), NEXT)
    assert_identical(dot([TINY, TINY], replace(ONE, promote_every=2), c=1.0), NEXT)
    assert_identical(dot([TINY, TINY], c=1.0), 1.0)


def test_the_format_of_the_outer_sum():
    # Chains of 1 and 2^-11: in binary16 a tie to 1, in float32 exact.
    half = replace(ONE, accumulator=FP16)
    assert_identical(dot([1.0, 2.0**-11], replace(half, promote_every=1)), 1.0)
    assert_identical(dot([1.0, 2.0**-11], replace(half, promote_every=1, promotion=FP32)), 1 + 2.0**-11)
    assert_identical(dot([1.0, 2.0**-11], half, GemmPlan(promote_every=1)), 1 + 2.0**-11)
    # The outer sum rounds to nearest even also where the unit truncates.
    assert_identical(dot([1.0, 3 * TINY], replace(ONE, rounding="toward_zero", promote_every=1)), 1 + 2.0**-22)
    # Other units promote to float32.
    assert_identical(dot([1.0, TINY, TINY], TwoStageDatapath(block=4), GemmPlan(promote_every=2)), 1.0)
    assert dot([3, 4, 5], IntegerDatapath(), GemmPlan(promote_every=2), fmt=INT8) == 12


def test_scaled_promotion_is_one_multiply_add():
    plan = GemmPlan(promote_every=1, scaled_promotion=True)
    # 1.5 x RN(2 x 3) + 1.
    assert_identical(dot([1.5], ONE, plan, c=1.0, scale_a=[2.0], scale_b=[3.0]), 10.0)
    # s = RN(NEXT x NEXT) = 1 + 2^-22 (2^-46 is lost). NEXT s - (1 + 3 x 2^-23) = 2^-45: nothing rounds before the sum.
    row = [-(1 + 3 * 2.0**-23), NEXT]
    assert_identical(dot(row, ONE, plan, scale_a=[1.0, NEXT], scale_b=[1.0, NEXT]), 2.0**-45)
    # Chains of 2 of 5 products and their three scales.
    two = GemmPlan(promote_every=2, scaled_promotion=True)
    assert_identical(dot([1.0] * 5, ONE, two, scale_a=[1.0, 2.0, 4.0], scale_b=[1.0, 1.0, 0.5]), 8.0)
    assert_identical(dot([1.0] * 5, ONE, two, scale_a=[1.0, INF, 4.0], scale_b=[1.0, 0.0, 0.5]), NAN)


@pytest.mark.parametrize("successive", [False, True])
def test_a_unit_with_scales_of_its_own_promotes_without_any(successive):
    unit = replace(ONE, scale=UE4M3, scale_block=2)
    scales = {"scale_a": [2.0, 8.0], "scale_b": [4.0, 0.5]}
    scaled = GemmPlan(promote_every=2, scaled_promotion=True, successive_scales=successive)
    for path, plan in ((unit, scaled), (unit, GemmPlan(promote_every=2)), (replace(unit, promote_every=2), PLAIN)):
        assert_identical(dot([1.0, 2.0, 3.0, 4.0], path, plan, c=0.5, fmt=E4M3, **scales), 52.5)  # 3 x 8 + 7 x 4 + 0.5
    assert_identical(dot([1.0] * 4, unit, scaled, c=0.5, fmt=E4M3), 4.5)


def test_successive_scales_round_once_more():
    plan = GemmPlan(promote_every=1, scaled_promotion=True, successive_scales=True)
    assert_identical(dot([1.5], ONE, plan, c=1.0, scale_a=[2.0], scale_b=[3.0]), 10.0)
    # RN(NEXT x NEXT) = 1 + 2^-22, and that times NEXT less 1 + 3 x 2^-23 is 2^-45: only the first product is rounded.
    row = [-(1 + 3 * 2.0**-23), NEXT]
    assert_identical(dot(row, ONE, plan, scale_a=[1.0, NEXT], scale_b=[1.0, NEXT]), 2.0**-45)
    # 2^-80 2^-80 2^100: the product of both scales keeps it, that with a's alone is zero; and Inf the other way round.
    once = replace(plan, successive_scales=False)
    tiny, large = {"scale_a": [2.0**-80], "scale_b": [2.0**100]}, {"scale_a": [2.0**80], "scale_b": [2.0**-100]}
    for order, expected in ((plan, 0.0), (once, 2.0**-60)):
        assert_identical(dot([2.0**-80], ONE, order, **tiny), expected)
    for order, expected in ((plan, INF), (once, 2.0**60)):
        assert_identical(dot([2.0**80], ONE, order, **large), expected)
    # A sum wider than float32 is rounded also where it has no scales.
    for order, expected in ((plan, 1.0), (once, NEXT)):
        assert_identical(
            dot([TINY, 0.0, 1.0, TINY], replace(ONE, accumulator=FP64), replace(order, promote_every=2)), expected
        )


# Rule 5: reduction.


@pytest.mark.parametrize(
    ("parts", "serial", "pairwise"),
    [
        ([5.0], 5.0, 5.0),
        ([TINY, 1.0], 1.0, 1.0),
        # h = 2: q = p0, p1; then p2 + p0 + p1.
        ([1.0, TINY, TINY], 1.0, 1.0),
        ([TINY, TINY, 1.0], NEXT, 1.0),
        # h = 2: q0 = p0 + p2, q1 = p1 (p3 is the last); then p3 + q0 + q1.
        ([TINY, 1.0, TINY, 0.0], 1.0, NEXT),
        # h = 3: q0 = p0 + p3, q1 = p1, q2 = p2; p4 + q0 + q1 + q2 = TINY + (1 + TINY) + ...: 1, and 1 again.
        ([1.0, 0.0, 0.0, TINY, TINY], 1.0, 1.0),
        # q0 = 2 TINY before it meets 1; serially 1 + TINY twice.
        ([TINY, 1.0, 0.0, TINY, 0.0], 1.0, NEXT),
        # h = 3, six parts: q0 = p0 + p3, q1 = p1 + p4, q2 = p2.
        ([1.0, TINY, 0.0, 0.0, TINY, 0.0], 1.0, NEXT),
        ([INF, 1.0, -INF], NAN, NAN),
        ([-1.0, 1.0], 0.0, 0.0),
    ],
)
def test_reduction(parts, serial, pairwise):
    plan = GemmPlan(k_tile=1, split=len(parts))
    assert_identical(dot(parts, plan=plan), serial)
    assert_identical(dot(parts, plan=replace(plan, reduce="pairwise")), pairwise)


def test_neighbours():
    def total(*parts):
        return dot(list(parts), plan=GemmPlan(k_tile=1, split=len(parts), reduce="neighbours"))

    assert_identical(total(1.0, TINY, TINY), NEXT)  # p0 + (p1 + p2)
    assert_identical(total(1.0, TINY, TINY, 0.0), 1.0)  # (p0 + p1) + (p2 + p3)
    assert_identical(total(1.0, 0.0, TINY, TINY, 0.0), NEXT)  # p0 + ((p1 + p2) + (p3 + p4))
    assert_identical(total(1.0, 0.0, TINY, 0.0, TINY, 0.0), NEXT)  # (p0 + p1) + ((p2 + p3) + (p4 + p5))
    assert_identical(total(1.0, TINY, 0.0, TINY, 0.0, 0.0, 0.0), 1.0)  # (p0 + (p1 + p2)) + ((p3 + p4) + (p5 + p6))
    assert_identical(total(1.0, TINY, TINY, 0.0, 0.0, 0.0, 0.0), NEXT)


def test_even_parts_differ_by_a_tile_at_most_and_the_longer_ones_come_last():
    plan = GemmPlan(k_tile=2, split=3, owner="even")
    for k, ends in ((10, [2, 6, 10]), (15, [4, 10, 15]), (12, [4, 8, 12]), (3, [2, 3])):
        parts = schedule(k, ONE, plan)
        assert [part[-1].blocks[-1][-1] + 1 for part in parts] == ends


def test_parts_are_added_in_float32_where_the_accumulator_is_no_wider():
    """A wider one is where it has more bits, larger values or smaller ones; then parts are added in its format."""

    def added(*parts, **fields):
        unit = replace(ONE, accumulator=FloatFormat(name="sums", nan="ieee", **fields))
        return dot(list(parts), unit, GemmPlan(k_tile=1, split=len(parts)))

    exact, coarse = 1 + 2.0**-20, 1.0
    assert_identical(added(1.0, 2.0**-20, exponent_bits=8, mantissa_bits=10), exact)
    # float32's smallest value in fewer bits is no smaller: e8m20 with the bias that gives 2^-149.
    assert_identical(added(1.0, 2.0**-22, exponent_bits=8, mantissa_bits=20, bias=130), 1 + 2.0**-22)
    assert_identical(added(1.0, 2.0**-22, exponent_bits=8, mantissa_bits=20, bias=131), coarse)
    # Twenty-three bits are no more: float32 holds a sum that is too large for e5m23.
    assert_identical(added(65504.0, 65504.0, exponent_bits=5, mantissa_bits=23), 131008.0)
    assert_identical(added(1.0, 2.0**-24, 2.0**-24, exponent_bits=5, mantissa_bits=24), NEXT)
    assert_identical(added(1.0, 2.0**-22, exponent_bits=9, mantissa_bits=20), coarse)


def test_partial_sums_may_be_rounded():
    # 1 + 2^-8 is a tie of bfloat16 that goes to 1; the sum is float32: 1 + 2^-8 + 2^-8 with p0 = 1, p1 = p2 = 2^-8.
    plan = GemmPlan(k_tile=2, split=2, partial=BF16)
    assert_identical(dot([1.0, 2.0**-8, 2.0**-8, 0.0], plan=plan), 1 + 2.0**-8)
    assert_identical(dot([1.0, 2.0**-8, 2.0**-8, 0.0], plan=replace(plan, round_trip=True)), 1.0)
    assert_identical(dot([1.0, 2.0**-8, 2.0**-8, 0.0], plan=replace(plan, partial=None)), 1 + 2.0**-7)
    # The largest float32 is Inf as bfloat16.
    assert_identical(dot([FP32.max, 0.0, 1.0], plan=plan), INF)
    assert_identical(dot([1.0, 2.0**-8], plan=GemmPlan(k_tile=2, partial=BF16)), 1.0)  # one part is rounded as well
    pairs = GemmPlan(k_tile=1, split=3, partial=BF16, round_trip=True, reduce="pairwise")
    assert_identical(dot([2.0**-8, 2.0**-8, 1.0], plan=pairs), 1.0)  # 1 + 2^-8 -> 1, twice


# Random words.


@pytest.mark.parametrize("plan", [PLAIN, GemmPlan(promote_every=2), GemmPlan(k_tile=1, split=3, owner="interleaved")])
def test_each_block_and_output_draws_its_own_word(plan):
    """Block t of output (m, n) draws for element (t M + m) N + n, counted through parts and chains."""
    how, key, rows, columns = Rounding(mode="stochastic"), (11, 5), 2, 3
    spec = GemmSpec(datapath=replace(ONE, rounding=how), plan=plan, a=FP64, b=FP64)
    # Parts of the last plan own k = 0, 3; 1; 2: its blocks come in the order 0, 3, 1, 2.
    order = [0, 3, 1, 2] if plan.split == 3 else [0, 1, 2, 3]
    seen = set()
    for t, k in enumerate(order):
        row = [0.0] * 4
        row[k] = 1 + TINY  # half a place above 1: up where the word is 2^31 or more; everything else is exact
        got = gemm_oracle([row] * rows, [[1.0] * 4] * columns, spec, random=key)
        for m in range(rows):
            for n in range(columns):
                word = random_integer(how, key, (t * rows + m) * columns + n)
                assert_identical(got[m][n], NEXT if word >= 2**31 else 1.0)
                seen.add(got[m][n])
    assert seen == {1.0, NEXT}


# Rule 7: the epilogue.


def test_the_three_rules_of_scales():
    # RN(NEXT x NEXT) = 1 + 2^-22; 3 (1 + 2^-22) = 3 + 3 x 2^-22 exactly on a grid of 2^-22.
    # 3 NEXT = 3 + 3 x 2^-23 is a tie between 3 + 2^-22 and 3 + 2 x 2^-22 (even); times NEXT: 3 + 3.5 x 2^-22 + ...
    # = nearest 3 + 4 x 2^-22 as 2^-45 tips the tie.
    assert_identical(epilogue_oracle(3.0, FP32, rule="scale", scales=(NEXT, NEXT)), 3 + 3 * 2.0**-22)
    assert_identical(epilogue_oracle(3.0, FP32, rule="row_column", scales=(NEXT, NEXT)), 3 + 4 * 2.0**-22)
    # 2^100 x 2^100 overflows, unless 2^-120 comes between.
    wide = (2.0**100, 2.0**-120)
    assert_identical(epilogue_oracle(2.0**100, FP32, rule="row_column", scales=wide), INF)
    assert_identical(epilogue_oracle(2.0**100, FP32, rule="column_row", scales=wide), 2.0**80)
    assert_identical(epilogue_oracle(2.0**100, FP32, rule="scale", scales=wide), 2.0**80)


def test_zero_products_are_positive():
    for rule in ("scale", "row_column", "column_row"):
        assert_identical(epilogue_oracle(0.0, FP32, rule=rule, scales=(-1.0, 1.0)), 0.0)
        assert_identical(epilogue_oracle(-(2.0**-149), FP32, rule=rule, scales=(0.25, 1.0)), 0.0)
        assert_identical(epilogue_oracle(0.0, FP32, rule=rule, scales=(INF, 1.0)), NAN)
    assert_identical(epilogue_oracle(-0.0, FP32), -0.0)  # no scales, no product
    assert_identical(epilogue_oracle(-0.0, FP32, bias=0.0), 0.0)


def test_bias_and_output():
    # 1 + 2^-8 in bfloat16 is a tie to 1; with a bias of 2^-24 the float32 sum is 1 + 2^-8 again: two roundings.
    assert_identical(epilogue_oracle(1 + 2.0**-8, BF16), 1.0)
    assert_identical(epilogue_oracle(1 + 2.0**-8, BF16, bias=2.0**-25), 1.0)
    assert_identical(epilogue_oracle(1 + 2.0**-8, BF16, bias=2.0**-23), 1 + 2.0**-7)
    # The product is rounded before the bias is added: 3 NEXT -> 3 + 2^-21, less 3.
    assert_identical(epilogue_oracle(3.0, FP32, scales=(NEXT, 1.0), bias=-3.0), 2.0**-21)
    assert_identical(epilogue_oracle(NAN, FP16, scales=(1.0, 1.0), bias=1.0), NAN)
    assert_identical(epilogue_oracle(70000.0, FP16), INF)
    assert_identical(epilogue_oracle(-INF, BF16), -INF)
    assert_identical(epilogue_oracle(FP32.max, BF16), INF)
    assert_identical(epilogue_oracle(-(2.0**-140), BF16), -0.0)


# Lanes, and what threads fold.

B1 = Datapath(block=1, fraction_bits=None, rounding="nearest_even")
LANE_SUMS = {  # the sum of four lanes of one product each that tells this order from the others
    "serial": ([1.0, TINY, TINY, -1.0], 0.0),  # two ties to 1
    "tree": ([1.0, TINY, 0.0, TINY], NEXT),  # (1 + 0) + (TINY + TINY)
    "pair_tree": ([1.0, 0.0, TINY, TINY], NEXT),  # likewise, of neighbours
}


@pytest.mark.parametrize("way", LANE_SUMS)
def test_lanes_are_added_in_their_order(way):
    row, total = LANE_SUMS[way]
    assert_identical(dot(row, B1, GemmPlan(k_tile=4, lanes=4, lane_reduce=way)), total)
    others = [dot(row, B1, GemmPlan(k_tile=4, lanes=4, lane_reduce=other)) for other in LANE_SUMS if other != way]
    assert total not in others


def test_a_lane_is_a_sum_of_its_own():
    # Lane 0 has 1 - 1, lane 1 TINY + TINY; in one chain the TINYs are lost in 1.
    row = [1.0, TINY, -1.0, TINY]
    assert_identical(dot(row, B1, GemmPlan(k_tile=2, lanes=2)), 2 * TINY)
    assert_identical(dot(row, B1), TINY)
    # c begins lane 0 of the first part alone; promoted, it is that lane's outer sum.
    assert_identical(dot(row, B1, GemmPlan(k_tile=2, lanes=2), c=1.0), NEXT)
    assert_identical(dot([TINY, 0.0, TINY, 0.0], B1, GemmPlan(k_tile=2, lanes=2, promote_every=2), c=1.0), NEXT)
    # Every second of its own products is promoted: (1 + TINY) + (TINY + TINY).
    row = [x for own in (1.0, TINY, TINY, TINY) for x in (own, 0.0)]
    assert_identical(dot(row, B1, GemmPlan(k_tile=2, lanes=2, promote_every=2)), NEXT)
    assert_identical(dot(row, B1, GemmPlan(k_tile=2, lanes=2)), 1.0)
    # A lane without products is +0, so that the -0 of the other is lost.
    tiny = [[-(2.0**-100)]], [[2.0**-100]]
    for plan, total in ((PLAIN, -0.0), (GemmPlan(k_tile=2, lanes=2), 0.0), (GemmPlan(reduce="folded"), 0.0)):
        ((found,),) = gemm_oracle(*tiny, GemmSpec(datapath=replace(B1, signed_zero=True), plan=plan, a=FP32, b=FP32))
        assert_identical(found, total)


def test_folded_parts():
    def folded(**parts):
        row = [0.0] * 260
        for place, value in parts.items():
            row[int(place[1:])] = value
        return dot(row, B1, GemmPlan(k_tile=1, split=260, reduce="folded"))

    assert_identical(folded(p0=1.0, p4=TINY, p8=TINY), 1.0)  # u_0 = (1 + TINY) + TINY
    assert_identical(folded(p0=1.0, p4=TINY, p36=TINY), NEXT)  # q_4 = p_4 + p_36
    assert_identical(folded(p0=1.0, p4=TINY, p68=TINY), NEXT)  # and p_68
    assert_identical(folded(p0=1.0, p4=TINY, p132=TINY), NEXT)  # and p_132
    assert_identical(folded(p0=1.0, p128=TINY, p256=TINY), 1.0)  # one after another
    assert_identical(folded(p0=1.0, p5=TINY, p9=TINY), NEXT)  # u_1
    assert_identical(folded(p0=1.0, p5=TINY, p10=TINY), 1.0)  # (u_0 + u_1) + u_2


def test_the_end_of_k():
    for row in ([1.0, TINY, TINY, 5.0], [1.0, TINY, TINY, NAN], [1.0, TINY, TINY, INF]):
        assert_identical(dot(row, plan=GemmPlan(k_end=3, promote_every=1)), 1.0)
        assert_identical(dot(row, replace(ONE, block=4), GemmPlan(k_end=3)), NEXT)


# What a call must not ask.


@pytest.mark.parametrize(
    ("unit", "plan", "arguments", "message"),
    [
        (ONE, PLAIN, {"scale_a": [1.0]}, "neither unit nor plan has scales; leave scale_a and scale_b to the epilogue"),
        (replace(ONE, rounding="stochastic"), PLAIN, {}, "rounds stochastically and random=None; pass seed and offset"),
        (
            ONE,
            GemmPlan(k_tile=1, split=2, owner="interleaved", promote_every=2, scaled_promotion=True),
            {"scale_a": [1.0, 2.0]},
            "a chain of promote_every=2 products has two scales; choose a k_tile that holds whole chains",
        ),
        (IntegerDatapath(), GemmPlan(partial=FP16), {}, "integer sums have neither scaled_promotion nor partial"),
    ],
)
def test_errors(unit, plan, arguments, message):
    refused(re.escape(message), dot, [1.0, 1.0, 1.0, 1.0], unit, plan, **arguments)


def test_a_unit_of_floats_takes_float_formats():
    refused("a unit of floats does not multiply int8 by int8", dot, [1.0], ONE, fmt=INT8)
