# SPDX-License-Identifier: Apache-2.0
"""Sums as wide integers, step by step against Python's."""

import math
import random
from fractions import Fraction

import pytest
import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding import oracle
from fmtsim.rounding.modes import Rounding
from fmtsim.torch_engine import gemm_wide as limbs
from tests.support.casts import ROUNDINGS, words_for

pytestmark = pytest.mark.usefixtures("one_thread")


def integers(bits: int, count: int = 60, seed: int = 1) -> list[int]:
    """Return integers of at most so many bits, among them zeros, ends, few bits far apart and runs of ones."""
    draw, ends = random.Random(seed), [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << bits) - 2]
    far = [1 << draw.randrange(bits) | 1 << draw.randrange(bits) for _ in range(count)]
    runs = [((1 << draw.randrange(1, bits + 1)) - 1) >> draw.randrange(bits) for _ in range(count)]
    return [*ends, *far, *runs, *(draw.getrandbits(bits) for _ in range(count))]


def split(values: list[int], bits: int) -> list[torch.Tensor]:
    return [torch.tensor([v >> at & 0xFFFFFF for v in values]) for at in range(0, bits, 24)]


def value_of(x: limbs.Number, i: int) -> int:
    digits = sum(int(digit[i]) << 24 * at for at, digit in enumerate(x.digits))
    return -digits if x.negative is not None and x.negative[i] else digits


def made(values: list[int], bits: int, lowest: int = 0) -> limbs.Number:
    negative, magnitudes = torch.tensor([v < 0 for v in values]), [abs(v) for v in values]
    return limbs.Number(negative, split(magnitudes, bits), torch.full((len(values),), lowest), bits)


def signed(values: list[int]) -> list[int]:
    return [v if i % 2 else -v for i, v in enumerate(values)]


@pytest.mark.parametrize(("left", "right"), [(8, 8), (24, 24), (24, 3), (53, 24), (53, 53), (11, 53)])
@pytest.mark.parametrize("apart", [True, False])
def test_products(left, right, apart):
    x, y = signed(integers(left)), signed(integers(right, seed=2)[::-1])
    factors = made(x, left, -7), made(y, right, 20)
    got = limbs.multiply(*(factors if apart else map(limbs.with_signs, factors)))
    assert [value_of(got, i) for i in range(len(x))] == [a * b for a, b in zip(x, y, strict=True)]
    assert got.bits == left + right and bool((got.lowest == 13).all()) and (got.negative is None) == (not apart)
    assert all(bool((digit >> 24 == 0).all()) for digit in got.digits[: -1 if not apart else None])


@pytest.mark.parametrize("mode", ["toward_zero", "nearest_even", "nearest_away", "down", "to_odd"])
@pytest.mark.parametrize("bits", [8, 24, 53])
def test_bits_that_are_dropped(bits, mode):
    values = signed(integers(bits, 20))
    x = made(values, bits)
    for gone in range(24 * len(x.digits) + 2):
        short, moves = limbs.drop_bits(x, torch.full((len(values),), gone), mode)
        for i, value in enumerate(values):
            whole, rest = divmod(abs(value), 1 << gone)
            assert abs(value_of(short, i)) == whole << gone
            away = oracle.rounds_away(rest, 1 << gone, whole % 2 == 1, value < 0, Rounding(mode=mode), None)
            assert (0 if moves is None else int(moves[i])) == away


def test_numbers_are_taken_apart():
    for bits in (0, 7, 23, 24, 52):
        values = [v * 2.0**e for v in signed(integers(bits + 1, 20)) for e in (-1074, -1040, -30, 0, 700) if v]
        parts = limbs.parts_of(torch.tensor(values, dtype=torch.float64))
        got = limbs.number(parts, bits)
        assert [value_of(got, i) * Fraction(2) ** int(got.lowest[i]) for i in range(len(values))] == values
        assert got.bits == bits + 1 and len(got.digits) == bits // 24 + 1
        assert all(abs(value_of(got, i)) >> bits == 1 for i in range(len(values)))


def summed(count: int, relieved: bool) -> tuple[limbs.Magnitude, list[int]]:
    """Return sums of numbers at several positions, some of which cancel, and what they are."""
    columns, total = 120, [0] * 120
    sums = limbs.Limbs(count, torch.Size((columns,)), torch.device("cpu"))
    for turn, (bits, apart) in enumerate([(53, True), (53, False), (24, True), (48, False), (8, True)]):
        draw = random.Random(turn)
        values = [v * draw.choice((1, -1)) for v in integers(bits, 40, turn)[:columns]]
        x = made(values, bits)
        places = [draw.randrange(24, 24 * (count - len(x.digits))) for _ in values]
        places = [place if i % 3 else 24 + 5 * (i % 12) for i, place in enumerate(places)]
        for sign in (1, -1) if turn == 1 else (1,):  # once it goes in and out again
            signs = x._replace(negative=x.negative if sign > 0 else ~x.negative)
            for whole, again in ((False, 1), (True, 2)):
                term = signs if apart else limbs.with_signs(signs)
                # a leading dimension of terms, all at places of their own or at one
                stacked = limbs.Number(
                    None if term.negative is None else term.negative.expand(again, -1),
                    [digit.expand(again, -1) for digit in term.digits], term.lowest, bits,
                )  # fmt: skip
                sums.add(stacked, torch.tensor([places] * again) if whole else torch.tensor([places]))
                total = [t + again * sign * v * (1 << p) for t, v, p in zip(total, values, places, strict=True)]
        sums.add_units(torch.tensor(values), 2)
        total = [t + (v << 48) for t, v in zip(total, values, strict=True)]
        if relieved:
            sums.relieve()
    return sums.resolve(), total


@pytest.mark.parametrize("relieved", [False, True])
def test_sums(relieved):
    got, total = summed(9, relieved)
    assert any(t < 0 for t in total)
    for i, exact in enumerate(total):
        assert sum(int(digit[i]) << 24 * at for at, digit in enumerate(got.digits)) == abs(exact)
        assert exact == 0 or bool(got.negative[i]) == (exact < 0)
        lowest = 9 if exact == 0 else next(at for at in range(9) if exact >> 24 * at & 0xFFFFFF)
        assert int(got.lowest[i]) == lowest and bool(got.is_zero()[i]) == (exact == 0)


def magnitudes(values: list[int], count: int = 6) -> limbs.Magnitude:
    """Return sums whose outer limbs are free; values have 24 zeros below them."""
    digits = torch.stack(split([abs(v) << 24 for v in values], 24 * count))
    lowest = [next((i for i in range(count) if abs(v) << 24 >> 24 * i & 0xFFFFFF), count) for v in values]
    return limbs.Magnitude(torch.tensor([v < 0 for v in values]), digits, torch.tensor(lowest))


def test_what_is_read_of_a_sum():
    values = integers(96, 20)
    x = magnitudes(values)
    for position in range(-80, 24 * 6 + 62):
        place = torch.full((len(values),), position)
        for count in (1, 24, 53, 61):
            exact = [(v << 24 + 80) >> (position + 80) & ((1 << count) - 1) for v in values]
            assert limbs._read(x.digits, place, count).tolist() == exact, position
        if position < 24 * 7:  # further up zero has no digits either
            below = [int((v << 24) & ((1 << max(position, 0)) - 1) != 0) for v in values]
            assert limbs._below(x, place).tolist() == below, position


FORMATS = [
    *map(get_format, ("fp16", "fp32", "fp64", "e4m3", "e5m2fnuz")),
    FloatFormat(name="normals", exponent_bits=8, mantissa_bits=4, has_subnormals=False),
]


@pytest.mark.parametrize("how", ROUNDINGS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_sums_are_rounded_once(fmt, how):
    """Of all sizes that a format has and some that it has not; exact halves, and a single bit far beside them."""
    if how.mode == "stochastic" and not fmt.has_subnormals:
        return  # such formats are rounded from numbers that were rounded to odd
    bits, draw = fmt.mantissa_bits + 2, random.Random(3)
    odd = [v << 94 - bits | draw.choice((0, 0, 1, 1 << 30)) for v in integers(bits, 12)]
    values = signed([*odd, *integers(96, 10, 4)])
    words = words_for(how, len(values))
    drawn = [None] * len(values) if words is None else words.tolist()
    for top in {fmt.min_exponent - fmt.mantissa_bits - 2, fmt.min_exponent, 0, fmt.max_exponent}:
        base = top - 118
        got = limbs.round_limbs(magnitudes(values), base, fmt, how, words).tolist()
        for found, value, word in zip(got, values, drawn, strict=True):
            exact = value * Fraction(2) ** (base + 24)
            expected = oracle.round_value(exact, fmt, how, fmt.default_overflow, word)
            if fmt.infinities and abs(exact) > fmt.max:  # Inf however a unit rounds
                last = Fraction(2) ** (fmt.max_exponent - fmt.mantissa_bits)
                beyond = abs(oracle.round_to_integer(exact / last, how, word)) * last > fmt.max
                expected = math.copysign(math.inf if beyond else fmt.max, value)
            assert found == expected or (math.isnan(found) and math.isnan(expected)), (value, top)
