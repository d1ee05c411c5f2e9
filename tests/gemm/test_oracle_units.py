# SPDX-License-Identifier: Apache-2.0
"""One block of every kind of unit against hand-computed values, a step of docs/matmul.md at a time."""

import math
import random
from dataclasses import replace

import pytest

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.rounding.oracle import round_value
from fmtsim.spec.datapath import Datapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_identical, identical
from tests.support.product_oracle_units import Product, exact, fused_block, pairwise_block, round_exact, two_stage_block

INF, NAN = math.inf, math.nan
BF16, FP16 = get_format("bf16"), get_format("fp16")
E4M3, E5M2 = get_format("e4m3"), get_format("e5m2")
UE4M3 = FloatFormat(name="ue4m3", exponent_bits=4, mantissa_bits=3, signed=False, nan="top", infinities=False)


def block(unit, pairs, c=0.0, fmt=BF16, word=None):
    return fused_block([Product(*p) for p in pairs], c, unit, fmt, fmt, word)


# Section 1.


def test_a_subnormal_operand_keeps_the_lowest_exponent():
    # 2^-9 is the smallest e4m3: exponent -6, so with 2 bits the grid is 2^(-6-2) = 2^-8, and 2^-9 is cut to 0.
    unit = Datapath(block=4, fraction_bits=2)
    assert_identical(block(unit, [(2.0**-9, 1.0)], fmt=E4M3), 0.0)
    # 3 x 2^-9 = 1.5 x 2^-8 becomes 2^-8.
    assert_identical(block(unit, [(3 * 2.0**-9, 1.0)], fmt=E4M3), 2.0**-8)
    # As an fp16 number 2^-9 is normal: exponent -9, grid 2^-11, nothing is cut.
    assert_identical(block(replace(unit, operand=FP16), [(2.0**-9, 1.0)], fmt=E4M3), 2.0**-9)
    # A product of two subnormals has exponent -12: 2^-18 lies below the grid 2^-14, 49 x 2^-18 keeps 3 x 2^-14.
    assert_identical(block(unit, [(2.0**-9, 2.0**-9)], fmt=E4M3), 0.0)
    assert_identical(block(unit, [(7 * 2.0**-9, 7 * 2.0**-9)], fmt=E4M3), 3 * 2.0**-14)


def test_terms_become_integers_as_their_rounding_says():
    for x in (n / 8 for n in range(-48, 49)):
        size, sign = abs(x), math.copysign(1, x)
        expected = {
            "nearest_even": round(x),
            "nearest_away": sign * math.floor(size + 0.5),
            "nearest_toward_zero": sign * math.ceil(size - 0.5),
            "nearest_to_odd": sign * (math.floor(size) | 1 if size % 1 == 0.5 else round(size)),
            "toward_zero": math.trunc(x),
            "down": math.floor(x),
            "up": math.ceil(x),
            "to_odd": x if x.is_integer() else sign * (math.floor(size) | 1),
        }
        assert {*expected, "stochastic"} == set(MODES)
        for mode, n in expected.items():
            assert exact(x).to_integer(Rounding(mode=mode)) == n, (x, mode)


# Section 2, step by step.


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (Product(1.0, 1.0, NAN, 1.0), NAN),
        (Product(0.0, 1.0, 1.0, NAN), NAN),  # a NaN scale counts beside a zero too
        (Product(INF, 1.0, 0.0, 1.0), INF),  # Inf whatever the scales
        (Product(INF, -1.0, -1.0, 1.0), -INF),  # the sign of a scale is ignored
        (Product(INF, 0.0, 1.0, 1.0), NAN),
        (Product(1.0, 1.0, 0.0, 1.0), 0.0),
        (Product(3.0, 1.0, -2.0, 0.5), 3.0),
    ],
)
def test_special_scales(product, expected):
    unit = Datapath(block=2, scale=UE4M3, scale_block=2)
    assert_identical(fused_block([product], 0.0, unit, E5M2, E5M2), expected)


def test_groups_are_aligned_by_their_scales_alone():
    unit = Datapath(block=4, fraction_bits=3, group=2, scale=UE4M3, scale_block=2)
    wide = [Product(6.0, 6.0), Product(6.0, 6.0)]  # one term of 72 with exponent 0: no reason to cut anything
    small = [Product(0.5, 0.5), Product(0.0, 0.0)]  # 0.25 is a multiple of 2^-3
    assert_identical(fused_block(wide + small, 0.0, unit, E4M3, E4M3), 72.25)
    # c = 2^4 + 2^-1 joins with exponent 4: grid 2^1. 72 stays, 0.25 and the half are cut: 72 + 16.
    assert_identical(fused_block(wide + small, 16.5, unit, E4M3, E4M3), 88.0)
    # 1.5 x 1.5 - 1.75 x 1.25 = 2.25 - 2.1875 = 2^-4 is one term below the grid 2^-3; apart they are 2.25 - 2.125.
    close = [Product(1.5, 1.5), Product(-1.75, 1.25)]
    assert_identical(fused_block(close, 0.0, unit, E4M3, E4M3), 0.0)
    assert_identical(fused_block(close, 0.0, replace(unit, group=1), E4M3, E4M3), 0.125)
    # A zero group with scales 2^3 still sets E = 3, grid 2^0: 0.75 of the other group is cut.
    zero = [Product(0.0, 1.0, 8.0, 1.0), Product(0.0, 1.0, 8.0, 1.0)]
    assert_identical(fused_block([Product(0.75, 1.0), Product(0.0, 0.0), *zero], 0.0, unit, E4M3, E4M3), 0.0)
    assert_identical(fused_block([Product(0.75, 1.0), Product(0.0, 0.0)], 0.0, unit, E4M3, E4M3), 0.75)


def test_a_group_has_one_scale():
    unit = Datapath(block=4, group=2, scale=UE4M3, scale_block=2)
    with pytest.raises(ArgumentError, match="a group of 2 products has two scales.*whole groups of scale_block=2"):
        fused_block([Product(1.0, 1.0, 1.0, 1.0), Product(1.0, 1.0, 2.0, 1.0)], 0.0, unit, E4M3, E4M3)


def test_exponent_of_alignment():
    unit = Datapath(block=4, fraction_bits=3)
    # E = 2 from 1.5 x 4 = 6 (exponents 0 + 2, although 6 = 1.5 x 2^2), grid 2^-1: 0.75 becomes 0.5.
    assert_identical(block(unit, [(1.5, 4.0), (0.75, 1.0)]), 6.5)
    # 1.5 x 1.5 = 2.25 is not normalised: E = 0, grid 2^-3, so 0.125 survives; E = 1 would cut it.
    assert_identical(block(unit, [(1.5, 1.5), (0.125, 1.0)]), 2.375)
    # A zero times 2^100 is not a term; an addend of zero neither.
    assert_identical(block(unit, [(0.0, 2.0**100), (0.75, 1.0)]), 0.75)
    # c = 8 is a term: E = 3, grid 1.
    assert_identical(block(unit, [(0.75, 1.0)], 8.0), 8.0)
    # The clamp: E = 0 at least, grid 2^-3.
    assert_identical(block(replace(unit, min_exponent=0), [(0.1875, 1.0)]), 0.125)
    assert_identical(block(replace(unit, min_exponent=-3), [(0.1875, 1.0)]), 0.1875)
    # Zeros alone: zero, clamp or not.
    assert_identical(block(replace(unit, min_exponent=0), [(0.0, -1.0)]), 0.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    # E = 0, grid 1. Terms 1, -0.5, -0.75, and 0.5 after them.
    [
        ("toward_zero", 1.0),  # 1 + 0 + 0 + 0
        ("nearest_even", 0.0),  # 1 + 0 - 1 + 0
        ("nearest_away", 0.0),  # 1 - 1 - 1 + 1
        ("down", -1.0),  # 1 - 1 - 1 + 0
    ],
)
def test_each_term_is_rounded_on_its_own(mode, expected):
    unit = Datapath(block=4, fraction_bits=0, term_rounding=mode)
    assert_identical(block(unit, [(1.0, 1.0), (-0.5, 1.0), (-0.75, 1.0), (0.5, 1.0)]), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "fp16", "bf16", "fp32", "e8m0", "e5m2fnuz"])
def test_rounding_is_that_of_casts_below_the_largest_value(name):
    fmt = get_format(name)
    draw = random.Random(2)
    for mode in MODES:
        how = Rounding(mode=mode)
        for _ in range(300):
            x = math.ldexp(draw.getrandbits(30) + 1, draw.randint(fmt.min_exponent - 40, fmt.max_exponent - 31))
            x = -x if fmt.signed and draw.random() < 0.5 else x
            if not fmt.has_zero and x < fmt.min_normal:
                continue
            word = draw.getrandbits(32) if mode == "stochastic" else None
            got, expected = round_exact(exact(x), fmt, how, word), round_value(x, fmt, how, "ieee", word)
            assert identical(got, expected) or got == expected == 0, (x, how)


# Section 3.


def two_stage(unit, pairs, c=0.0, fmt=BF16):
    return two_stage_block([Product(*p) for p in pairs], c, unit, fmt, fmt)


def test_two_stages():
    unit = TwoStageDatapath(block=4, fraction_bits=3, sum_bits=5)
    # E1 = 0, grid 2^-3: 1 + trunc(-0.1875) = 1 - 0.125.
    assert_identical(two_stage(unit, [(1.0, 1.0), (-0.1875, 1.0)]), 0.875)
    # c = -8.25 has E = 3. T = 7 x 2^-3 is a multiple of 2^(3-5) only as 3 x 2^-2: floored. c: grid 2^0, floor -9.
    assert_identical(two_stage(unit, [(1.0, 1.0), (-0.1875, 1.0)], -8.25), -8.25)
    # A negative T is floored too: -7 x 2^-3 -> -4 x 2^-2; c = 8.25 -> 8.
    assert_identical(two_stage(unit, [(-1.0, 1.0), (0.1875, 1.0)], 8.25), 7.0)
    # With the larger product exponent, c = -0.0625 is floored to -2^-3: 1 - 0.125; 0.0625 becomes 0.
    assert_identical(two_stage(unit, [(1.0, 1.0)], -0.0625), 0.875)
    assert_identical(two_stage(unit, [(1.0, 1.0)], 0.0625), 1.0)


def test_even_and_odd_products_apart():
    unit = TwoStageDatapath(block=4, fraction_bits=3, sum_bits=5, parity=True)
    # Even: 1 (E0 = 0). Odd: -0.1875 alone has exponent -3, grid 2^-6: nothing is cut. Floored to 2^-3: -0.25.
    assert_identical(two_stage(unit, [(1.0, 1.0), (-0.1875, 1.0)]), 0.75)
    # Both even: truncated at 2^-3 first, 1 - 0.125.
    assert_identical(two_stage(unit, [(1.0, 1.0), (0.0, 1.0), (-0.1875, 1.0)]), 0.875)
    # c of exponent -4 = E - 3 - 1 is floored to -2^-3; one below is dropped.
    assert_identical(two_stage(unit, [(1.0, 1.0)], -(2.0**-4)), 0.875)
    assert_identical(two_stage(unit, [(1.0, 1.0)], -(2.0**-5)), 1.0)


def pairwise(unit, pairs, c=0.0, fmt=BF16):
    return pairwise_block([Product(*p) for p in pairs], c, unit, fmt, fmt)


def test_pairs():
    unit = PairwiseDatapath(block=4)
    # (1 + 2^-24) + (2^-24 + 0): each 1 + 2^-24 is a tie to 1. In another order 2^-24 + 2^-24 would count.
    assert_identical(pairwise(unit, [(1.0, 1.0), (2.0**-24, 1.0), (2.0**-24, 1.0), (0.0, 0.0)]), 1.0)
    assert_identical(pairwise(unit, [(1.0, 1.0), (0.0, 0.0), (2.0**-24, 1.0), (2.0**-24, 1.0)]), 1 + 2.0**-23)
    # c comes last: 1 + (2^-24 + 2^-24).
    assert_identical(pairwise(unit, [(2.0**-24, 1.0), (2.0**-24, 1.0)], 1.0), 1 + 2.0**-23)
    # Products are rounded first: 2^64 x 2^64 is Inf.
    assert_identical(pairwise(unit, [(2.0**64, 2.0**64), (-(2.0**64), 2.0**64)]), NAN)
    assert_identical(pairwise(unit, [(0.0, INF)]), NAN)
