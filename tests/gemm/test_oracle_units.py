"""One block of every kind of unit against hand-computed values, a step of docs/matmul.md at a time."""

import math
import random
import struct
import warnings
from dataclasses import replace

import numpy
import pytest

from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products import oracle_units
from fmtsim.gemm.products.oracle_units import (
    Product,
    exact,
    fma,
    fused_block,
    integer_block,
    pairwise_block,
    round_exact,
    two_stage_block,
)
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.rounding.oracle import round_value
from fmtsim.spec.datapath import Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from tests.support.bits import assert_identical, identical

INF, NAN = math.inf, math.nan
BF16, FP16, FP32, FP64 = (get_format(name) for name in ("bf16", "fp16", "fp32", "fp64"))
E4M3, E5M2 = get_format("e4m3"), get_format("e5m2")
UE4M3 = FloatFormat(name="ue4m3", exponent_bits=4, mantissa_bits=3, signed=False, nan="top", infinities=False)
EXACT = Datapath(block=None, fraction_bits=None, rounding="nearest_even")
IEEE = replace(EXACT, block=1, signed_zero=True)


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


# Section 2, step by step.


@pytest.mark.parametrize(
    ("pairs", "c", "expected"),
    [
        ([(NAN, 1.0), (1.0, 1.0)], 0.0, NAN),
        ([(1.0, 1.0)], NAN, NAN),
        ([(INF, 0.0)], 0.0, NAN),
        ([(-0.0, -INF)], 0.0, NAN),
        ([(INF, 1.0), (-1.0, INF)], 0.0, NAN),
        ([(INF, 1.0)], -INF, NAN),
        ([(INF, -1.0), (1.0, 1.0)], 0.0, -INF),
        ([(INF, -1.0)], -INF, -INF),
        ([(1.0, 1.0)], INF, INF),
        # Products never overflow: 2^254 - 2^254 + 1 has E = 254, and 1 is cut away.
        ([(2.0**127, 2.0**127), (-(2.0**127), 2.0**127), (1.0, 1.0)], 0.0, 0.0),
    ],
)
def test_specials(pairs, c, expected):
    assert_identical(block(Datapath(), pairs, c), expected)


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
    # A zero times 2^100 is no term; an addend of zero neither.
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


@pytest.mark.parametrize(
    ("mode", "up", "down"),
    # 1 + 2^-24 and 1 + 3 x 2^-24: ties between float32 numbers, the first even below, the second even above.
    [("nearest_even", 1 + 2.0**-22, 1.0), ("toward_zero", 1 + 2.0**-23, 1.0), ("up", 1 + 2.0**-22, 1 + 2.0**-23)],
)
def test_the_sum_is_rounded_once(mode, up, down):
    unit = replace(EXACT, rounding=mode)
    assert_identical(block(unit, [(1.0, 1.0), (2.0**-24, 1.0)]), down)
    assert_identical(block(unit, [(1.0, 1.0), (3 * 2.0**-24, 1.0)]), up)


@pytest.mark.parametrize(
    ("pairs", "c", "plain", "signed", "down"),
    [
        ([(-0.0, 1.0)], -0.0, 0.0, -0.0, -0.0),
        ([(-0.0, -1.0)], -0.0, 0.0, 0.0, -0.0),
        ([(0.0, 1.0)], 0.0, 0.0, 0.0, 0.0),
        ([(-1.0, 1.0)], 1.0, 0.0, 0.0, -0.0),
        ([(-(2.0**-100), 2.0**-100)], 0.0, 0.0, -0.0, -(2.0**-149)),  # not zero, but rounds to it
        ([(2.0**-100, 2.0**-100)], 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_zeros(pairs, c, plain, signed, down):
    assert_identical(block(EXACT, pairs, c), plain)
    assert_identical(block(replace(EXACT, signed_zero=True), pairs, c), signed)
    assert_identical(block(replace(EXACT, signed_zero=True, rounding="down"), pairs, c), down)


# The primitives, against the processor's own arithmetic and the oracle of casts.


def test_a_block_of_one_is_a_fused_multiply_add():
    draw = random.Random(1)
    patterns = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.0**-149, -(2.0**-126), FP32.max, 1 + 2.0**-23]
    patterns += [struct.unpack("f", draw.randbytes(4))[0] for _ in range(40)]
    for _ in range(2000):
        x, y, z = draw.choices(patterns, k=3)
        assert_identical(fused_block([Product(x, y)], z, IEEE, FP32, FP32), fma(FP32, x, y, z))
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            assert_identical(oracle_units.add(FP32, x, y), float(numpy.float32(x) + numpy.float32(y)))
            assert_identical(oracle_units.multiply(FP32, x, y), float(numpy.float32(x) * numpy.float32(y)))
            # Two products of float32 are exact in float64, so adding them there rounds once.
            assert_identical(fma(FP64, x, y, z), float(numpy.float64(x) * numpy.float64(y) + numpy.float64(z)))
    # (1 + 2^-23)^2 - (1 + 2^-22) = 2^-46, which two roundings lose.
    assert_identical(fma(FP32, 1 + 2.0**-23, 1 + 2.0**-23, -(1 + 2.0**-22)), 2.0**-46)


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


def test_two_stages_of_tiny_numbers():
    unit = TwoStageDatapath(block=4)
    # A zero product has exponent -126: grid 2^-150, where -2^-151 is cut. Alone it has its own grid, and T' is a
    # multiple of 2^(-126-31): -2^-151 stays, and rounds to -0, which is +0.
    assert_identical(two_stage(unit, [(-(2.0**-76), 2.0**-75), (0.0, 1.0)]), 0.0)
    assert_identical(two_stage(unit, [(-(2.0**-76), 2.0**-75)]), 0.0)
    # 3 x 2^-151 is 0.75 x 2^-149 and rounds up; beside a zero product it is cut to 2^-150, a tie that goes to 0.
    assert_identical(two_stage(unit, [(3 * 2.0**-76, 2.0**-75)]), 2.0**-149)
    assert_identical(two_stage(unit, [(3 * 2.0**-76, 2.0**-75), (0.0, 1.0)]), 0.0)


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


def test_pairs_flush_subnormals():
    unit = PairwiseDatapath(block=2)
    assert_identical(pairwise(unit, [(-(2.0**-127), 2.0**100), (0.0, 1.0)]), 0.0)  # an operand, to +0
    assert_identical(pairwise(unit, [(0.0, 1.0)], 2.0**-127), 0.0)  # the addend
    assert_identical(pairwise(unit, [(2.0**-15, 1.0)], fmt=FP16), 0.0)  # subnormal in binary16
    # A product -2^-127 becomes -0, as do both; -0 + -0 = -0, and c = -0 keeps it.
    assert_identical(pairwise(unit, [(-(2.0**-64), 2.0**-63), (-(2.0**-64), 2.0**-63)], -0.0), -0.0)
    assert_identical(pairwise(unit, [(-(2.0**-64), 2.0**-63)], -0.0), 0.0)  # a missing product is +0
    # 1.5 x 2^-126 - 2^-126 = 2^-127 is flushed as a sum.
    assert_identical(pairwise(unit, [(1.5 * 2.0**-126, 1.0), (-(2.0**-126), 1.0)]), 0.0)
    assert_identical(pairwise(unit, [(2.0**-126, 1.0)], -1.5 * 2.0**-126), -0.0)


def test_integers():
    top = 2**31 - 1
    assert integer_block([(127, 127), (-128, 127)], 5, IntegerDatapath()) == 127 * 127 - 128 * 127 + 5
    assert integer_block([(1, 1)], top, IntegerDatapath()) == -(2**31)
    assert integer_block([(1, 1)], top, IntegerDatapath(saturate=True)) == top
    assert integer_block([(1, 1), (-1, 1)], top, IntegerDatapath(saturate=True)) == top  # clamped once a block
    assert integer_block([(-1, 1)], -(2**31), IntegerDatapath(saturate=True)) == -(2**31)
