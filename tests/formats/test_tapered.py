# SPDX-License-Identifier: Apache-2.0
"""HiFloat8, posits and takums: every code, and what numbers round to, against oracles made from their definitions."""

import dataclasses
import math
import re

import pytest
import torch

import fmtsim
from fmtsim.formats.registry import get_format
from fmtsim.support.errors import FormatError
from tests.support import tapered_oracle as oracle

NAMES = ("hif8", "posit8", "takum8", "takum_linear8", "posit16", "takum_linear16")
SLOW = (pytest.param("takum16", marks=pytest.mark.slow),)  # 65536 powers of the root of e, two seconds
PATTERNS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


def parts_of(name):
    kind, bits = re.fullmatch("(hif|posit|takum_linear|takum)([0-9]+)", name).groups()
    return "hif8" if kind == "hif" else kind, int(bits)


def rounding_of(name):
    return "nearest_away" if name == "hif8" else "nearest_even"


def check_codes(name, x):
    codes = fmtsim.encode(x, name, rounding=rounding_of(name)).codes.to(torch.int64) % (1 << parts_of(name)[1])
    expected = [oracle.encode(*parts_of(name), number) for number in x.double().tolist()]
    wrong = (codes != torch.tensor(expected)).nonzero().flatten().tolist()
    assert [(x[i].item(), int(codes[i]), expected[i]) for i in wrong[:5]] == []


@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_every_code_has_the_value_of_the_definition(name):
    fmt, bits = get_format(name), parts_of(name)[1]
    expected = torch.tensor([oracle.decode(*parts_of(name), code) for code in range(1 << bits)], dtype=torch.float64)
    values = torch.tensor([fmt.value(code) for code in range(1 << bits)], dtype=torch.float64)
    assert values.view(torch.int64).tolist() == expected.view(torch.int64).tolist()
    codes = fmtsim.encode(expected, fmt)
    assert (codes.codes.to(torch.int64) % (1 << bits)).tolist() == list(range(1 << bits))
    assert torch.equal(fmtsim.decode(codes, out_dtype=torch.float64).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_every_number_of_16_bits_rounds_as_the_definition_says(name, dtype):
    step = 7 if parts_of(name)[0] == "takum" else 3  # coprime to the patterns' powers of two
    check_codes(name, PATTERNS[::step].clone().view(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*NAMES, "takum16"])
def test_all_numbers_of_16_bits_round_as_the_definition_says(name, dtype):
    check_codes(name, PATTERNS.view(dtype))


@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_ties_and_their_neighbours(name):
    kind, bits = parts_of(name)
    step = 1 if bits == 8 else 37
    if kind == "hif8":
        values = [*(oracle.decode("hif8", 8, code) for code in range(128)), 49152.0]
        ordered = sorted(v for v in values if v < math.inf)
        ties = [(low + high) / 2 for low, high in zip(ordered, ordered[1:], strict=False)]
    else:
        ties = [oracle.decode(kind, bits + 1, code) for code in range(1, 1 << bits, 2 * step)]
    ends = [get_format(name).max * factor for factor in (1, 1.5, 4)] + [5e-324, 1e-300, 1e300, math.inf, math.nan]
    points = [*ties, *ends]
    points += [math.nextafter(point, to) for point in points for to in (0.0, math.inf)]
    if kind == "takum":  # the exact tie is no float64; on which side the nearest float64 lies is chance
        points = [point for point in points if point not in ties]
    x = torch.tensor([*points, *(-point for point in points)], dtype=torch.float64)
    check_codes(name, x)
    check_codes(name, x.float())


def test_infinity_and_nan_by_overflow_rule():
    x = torch.tensor([math.inf, -math.inf, 50000.0, -1e30, math.nan])
    quantized = lambda name, **options: fmtsim.quantize(x, name, **options).tolist()  # noqa: E731
    assert quantized("hif8")[:4] == [math.inf, -math.inf, math.inf, -math.inf]
    assert quantized("hif8", overflow="saturate")[:4] == [32768.0, -32768.0, 32768.0, -32768.0]
    assert quantized("hif8", rounding="toward_zero")[:4] == [math.inf, -math.inf, 32768.0, -32768.0]
    assert quantized("hif8", rounding="up")[2:4] == [math.inf, -32768.0]
    top = 2.0**24
    assert [math.isnan(value) for value in quantized("posit8")] == [True, True, False, False, True]
    assert quantized("posit8")[2:4] == [2.0**16, -top]
    assert quantized("posit8", overflow="saturate")[:4] == [top, -top, 2.0**16, -top]
    assert math.isnan(quantized("posit8", overflow="saturate")[4])


def test_records_say_what_they_hold():
    hif8 = get_format("HiFloat8")
    assert (hif8.max, hif8.min, hif8.has_nan, hif8.infinities) == (32768.0, -32768.0, True, True)
    assert repr(hif8) == "CodebookFormat('hif8': 8 bits, 253 values from -32768 to 32768)"
    assert ("special", "infinities and NaN") in hif8.facts() and ("special", "NaN") in get_format("posit8").facts()
    assert get_format("posit8") is get_format("posit8") == dataclasses.replace(get_format("posit8"))
    assert fmtsim.quantize(torch.ones(1), "takum8").dtype == torch.float64  # float32 ends before its values do


@pytest.mark.parametrize(("name", "text"), [
    ("posit17", "posit17 is not listed; choose posit3 to posit16"), ("posit2", "choose posit3"),
    ("takum5", "takum5 is not listed; choose takum6 to takum16"), ("takum_linear99", "choose takum_linear6 to takum_"),
])  # fmt: skip
def test_widths_that_are_not_listed(name, text):
    with pytest.raises(FormatError, match=re.escape(text)):
        get_format(name)
