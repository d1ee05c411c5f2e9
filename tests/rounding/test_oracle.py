# SPDX-License-Identifier: Apache-2.0
"""The rounding oracle against ml_dtypes, gfloat and published constants; what must hold of every rounding."""

import math
import struct
import warnings
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtsim.formats.element import CodebookFormat, FloatFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding import oracle
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import decode_value, encode_value, floor_log2, round_value
from fmtsim.support.errors import ArgumentError, CodeError
from tests.support.bits import identical
from tests.support.casts import DETERMINISTIC, adversarial, element_formats

ML_DTYPES = {  # format: dtype, and the overflow rule that ml_dtypes follows
    "bf16": (ml_dtypes.bfloat16, "ieee"),
    "e4m3": (ml_dtypes.float8_e4m3fn, "ieee"),
    "e4m3_ieee": (ml_dtypes.float8_e4m3, "ieee"),
    "e5m2": (ml_dtypes.float8_e5m2, "ieee"),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, "ieee"),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, "ieee"),
    "e4m3b11fnuz": (ml_dtypes.float8_e4m3b11fnuz, "ieee"),
    "e3m4": (ml_dtypes.float8_e3m4, "ieee"),
    "e2m3": (ml_dtypes.float6_e2m3fn, "saturate"),
    "e3m2": (ml_dtypes.float6_e3m2fn, "saturate"),
    "e2m1": (ml_dtypes.float4_e2m1fn, "saturate"),
    "fp16": (numpy.float16, "ieee"),
    "fp32": (numpy.float32, "ieee"),
}

GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}
GFLOAT_VARIANTS = {
    "a": gfloat.RoundMode.StochasticFastest,
    "b": gfloat.RoundMode.StochasticFast,
    "c": gfloat.RoundMode.Stochastic,
}
GFLOAT_FORMATS = {
    "e4m3": gfloat.formats.format_info_ocp_e4m3, "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3, "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1, "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
}  # fmt: skip


def native(values: list[float], dtype: type) -> list[float]:
    """Cast float64 to a dtype of numpy or ml_dtypes and back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of overflow, which is what we look for
        return numpy.array(values, dtype=numpy.float64).astype(dtype).astype(numpy.float64).tolist()


def differences(values: list[float], name: str, dtype: type, overflow: str) -> list[tuple[float, float, float]]:
    """Return input, oracle and ml_dtypes where the last two differ."""
    fmt = get_format(name)
    ours = [round_value(x, fmt, "nearest_even", overflow) for x in values]
    rows = zip(values, ours, native(values, dtype), strict=True)
    return [row for row in rows if not identical(row[1], row[2])]


def float16_values(stride: int) -> list[float]:
    patterns = numpy.arange(0, 1 << 16, stride, dtype=numpy.uint16)
    return patterns.view(numpy.float16).astype(numpy.float64).tolist()


def float32_values(stride: int) -> list[float]:
    patterns = numpy.arange(12345, 1 << 32, stride, dtype=numpy.uint64).astype(numpy.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # signalling NaN patterns
        return patterns.view(numpy.float32).astype(numpy.float64).tolist()


# Against ml_dtypes.


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_agrees(name):
    dtype, overflow = ML_DTYPES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # Finite formats of ml_dtypes turn NaN into -0 and the like: there semantics.md decides. Inputs go through
        # float32, because ml_dtypes rounds float64 twice.
        points = numpy.array(adversarial(get_format(name)), dtype=numpy.float32).astype(numpy.float64).tolist()
    values = [*points, *float16_values(13), *float32_values(600011)]
    if not get_format(name).has_nan:
        values = [x for x in values if x == x]
    assert differences(values, name, dtype, overflow) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_agrees_on_all_of_float16(name):
    dtype, overflow = ML_DTYPES[name]
    values = [x for x in float16_values(1) + float32_values(4001) if x == x or get_format(name).has_nan]
    assert differences(values, name, dtype, overflow) == []


def test_ml_dtypes_agrees_on_e8m0_with_halves_up():
    """ml_dtypes sends the point half-way between powers of two up: nearest_away on this grid."""
    fmt = get_format("e8m0")
    values = [math.ldexp(m, e) for e in range(-126, 127) for m in (1.0, 1.25, 1.5, 1.75, 1 + 2.0**-23, 1.5 - 2.0**-23)]
    ours = [round_value(x, fmt, "nearest_away", "ieee") for x in values]
    assert ours == native(values, ml_dtypes.float8_e8m0fnu)


# Against gfloat.


def gfloat_info(name: str):
    """Return gfloat's record of a format, P3109 formats by their parameters."""
    if name in GFLOAT_FORMATS:
        return GFLOAT_FORMATS[name]
    fmt = get_format(name)
    domain = gfloat.Domain.Extended if fmt.infinities else gfloat.Domain.Finite
    signedness = gfloat.Signedness.Signed if fmt.signed else gfloat.Signedness.Unsigned
    precision = fmt.bits - fmt.exponent_bits - fmt.signed + 1
    return gfloat.formats.format_info_p3109(fmt.bits, precision, signedness, domain)


def gfloat_value(name: str, x: float, mode, overflow: str, *word: int) -> float:
    """Round with gfloat; what it refuses (no Inf and no NaN to overflow to) is the largest value here."""
    info, fmt = gfloat_info(name), get_format(name)
    try:
        return float(gfloat.round_float(info, x, mode, overflow == "saturate", *word))
    except ValueError:
        return fmt.max if x != x else math.copysign(fmt.max, x)


P3109 = [name for name in element_formats(8) if name.startswith("p3109")]
SOME_P3109 = [name for name in P3109 if "k8p3" in name or "k8p1" in name or "k6p4" in name or "k4p2" in name]


def comparable(name: str) -> list[float]:
    """Return adversarial inputs that gfloat and semantics.md treat alike: not below the zero of an unsigned format."""
    fmt = get_format(name)
    return [x for x in adversarial(fmt) if fmt.signed or x != x or x >= 0]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*GFLOAT_FORMATS, *SOME_P3109])
@pytest.mark.parametrize("mode", GFLOAT_MODES)
def test_gfloat_agrees(name, mode, every):
    """Of long lists of inputs, in which four kinds repeat, every seventh; every one in the slow test."""
    fmt, inputs = get_format(name), comparable(name)
    for overflow in ("saturate", "ieee"):
        for x in inputs[:: every if len(inputs) > 200 else 1]:
            theirs = gfloat_value(name, x, GFLOAT_MODES[mode], overflow)
            assert identical(round_value(x, fmt, mode, overflow), theirs), (x, overflow, theirs)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "p3109_k8p3se", "p3109_k8p1uf"])
@pytest.mark.parametrize("variant", GFLOAT_VARIANTS)
def test_gfloat_agrees_on_stochastic_rounding(name, variant):
    fmt, bits = get_format(name), 3
    rounding = Rounding(mode="stochastic", random_bits=bits, variant=variant)
    for x in [x for x in comparable(name)[::3] if abs(x) <= fmt.max]:
        for word in range(1 << bits):
            theirs = gfloat_value(name, x, GFLOAT_VARIANTS[variant], "saturate", word, bits)
            assert identical(round_value(x, fmt, rounding, "saturate", word), theirs), (x, word, theirs)


# Facts computed by hand.


@pytest.mark.parametrize(
    ("x", "name", "rounding", "overflow", "expected"),
    [
        (464.0, "e4m3", "nearest_even", "ieee", 448.0),  # 448 is even (code 0x7E), the tie stays below
        (464.0, "e4m3", "nearest_away", "ieee", math.nan),
        (464.00003, "e4m3", "nearest_even", "ieee", math.nan),
        (464.00003, "e4m3", "nearest_even", "saturate", 448.0),
        (1e9, "e4m3", "toward_zero", "ieee", 448.0),
        (1e9, "e4m3", "to_odd", "ieee", 448.0),
        (1e9, "e5m2", "up", "ieee", math.inf),
        (-1e9, "e5m2", "up", "ieee", -57344.0),
        (1e9, "e5m2", "down", "ieee", 57344.0),
        (math.inf, "e5m2", "toward_zero", "ieee", math.inf),
        (math.inf, "e5m2", "toward_zero", "saturate", 57344.0),
        (math.inf, "e4m3", "down", "ieee", math.nan),
        (-math.inf, "e2m1", "nearest_even", "ieee", -6.0),
        (math.nan, "e2m1", "nearest_even", "ieee", 6.0),
        (2.0**-10, "e4m3", "nearest_even", "saturate", 0.0),
        (-(2.0**-10), "e4m3", "nearest_even", "saturate", -0.0),
        (-(2.0**-11), "e4m3fnuz", "nearest_even", "saturate", 0.0),
        (-0.0, "e4m3fnuz", "nearest_even", "saturate", 0.0),
        (-0.0, "e4m3", "nearest_even", "saturate", -0.0),
        (3 * 2.0**-10, "e4m3", "nearest_even", "saturate", 2.0**-8),
        (2.5, "e2m1", "nearest_even", "saturate", 2.0),
        (3.5, "e2m1", "nearest_even", "saturate", 4.0),
        (5.0, "e2m1", "nearest_even", "saturate", 4.0),
        (5.0, "e2m1", "nearest_away", "saturate", 6.0),
        (2.5, "e2m1", "nearest_to_odd", "saturate", 3.0),  # codes 4 and 5
        (-5.0, "e2m1", "nearest_to_odd", "saturate", -6.0),
        (4.9, "e2m1", "nearest_to_odd", "saturate", 4.0),
        (464.0, "e4m3", "nearest_to_odd", "ieee", math.nan),  # 448 has an even code: the tie leaves the range
        (65520.0, "fp16", "nearest_to_odd", "ieee", 65504.0),  # 65504 has an odd code
        (6.0, "e8m0", "nearest_to_odd", "saturate", 4.0),
        (2.5, "int8", "nearest_to_odd", "saturate", 3.0),
        (-0.0, "int4_half", "nearest_to_odd", "saturate", -0.5),
        (3.0, "e8m0", "nearest_even", "saturate", 2.0),  # 2 has code 128, 4 has code 129: ties go to even codes
        (6.0, "e8m0", "nearest_even", "saturate", 8.0),
        (0.0, "e8m0", "nearest_even", "saturate", 2.0**-127),
        (1e-45, "e8m0", "down", "saturate", 2.0**-127),
        (-1.0, "e8m0", "nearest_even", "saturate", 2.0**-127),
        (-1.0, "e8m0", "nearest_even", "ieee", math.nan),
        (-math.inf, "ue4m3", "nearest_even", "saturate", 0.0),
        (-0.0, "ue4m3", "nearest_even", "ieee", 0.0),
        (2.5, "int8", "nearest_even", "saturate", 2.0),
        (-2.5, "int8", "nearest_away", "saturate", -3.0),
        (-2.5, "int8", "up", "saturate", -2.0),
        (-0.4, "int8", "nearest_even", "saturate", 0.0),
        (-200.0, "int8", "nearest_even", "ieee", -127.0),
        (-200.0, "int8_full", "nearest_even", "ieee", -128.0),
        (math.nan, "int8", "nearest_even", "saturate", 127.0),
        (math.inf, "int8", "down", "ieee", 127.0),
        (-math.inf, "int8", "up", "ieee", -127.0),
        (-math.inf, "int8_full", "nearest_even", "saturate", -128.0),
        (-math.inf, "int4_half", "toward_zero", "ieee", -7.5),
        (-3.0, "uint8", "nearest_even", "saturate", 0.0),
        (1.0, "int8_f6", "nearest_even", "saturate", 1.0),
        (0.0, "int4_half", "nearest_even", "saturate", 0.5),  # candidate -1/2 has code -1, odd
        (-0.0, "int4_half", "nearest_even", "saturate", 0.5),  # candidate +1/2 has code 0, even
        (1.0, "int4_half", "nearest_even", "saturate", 0.5),
        (2.0, "int4_half", "nearest_even", "saturate", 2.5),
        (0.25, "int4_half", "toward_zero", "saturate", 0.5),
        (-0.25, "int4_half", "toward_zero", "saturate", -0.5),
        (0.0, "int4_half", "nearest_toward_zero", "saturate", 0.5),
        (-0.0, "int4_half", "nearest_away", "saturate", -0.5),
        (-0.0, "int4_half", "down", "saturate", -0.5),
        (0.25, "int4_half", "down", "saturate", -0.5),
        (0.25, "int4_half", "up", "saturate", 0.5),
        (-0.25, "int4_half", "up", "saturate", 0.5),
        (1.75, "int4_half", "down", "saturate", 1.5),
        (-1.75, "int4_half", "up", "saturate", -1.5),
        (0.3, "lns8_g8", "up", "saturate", 1.0),
        (-0.0, "lns8_g8", "nearest_even", "saturate", -1.0),
        (math.nan, "lns8_g8", "up", "saturate", get_format("lns8_g8").max),
        (-math.inf, "lns8_g8", "up", "saturate", get_format("lns8_g8").min),
        (-1.9, "lns8_g8", "up", "saturate", -float(numpy.float32(2 ** (7 / 8)))),
    ],
)
def test_facts(x, name, rounding, overflow, expected):
    assert identical(round_value(x, get_format(name), rounding, overflow), expected)


def test_nan_has_one_code():
    """Whatever the sign and the payload of x: that of NaN, or of the largest value where a format has no NaN."""
    payload = struct.unpack("<d", struct.pack("<Q", 0xFFF4_0000_0000_0001))[0]
    for fmt in map(get_format, element_formats(16)):
        largest = max(range(len(fmt.values)), key=fmt.values.__getitem__) if isinstance(fmt, CodebookFormat) else None
        expected = fmt.nan_code if fmt.has_nan else fmt.max_code if largest is None else largest
        for x in (math.nan, -math.nan, payload):
            assert {encode_value(x, fmt, "down", overflow) for overflow in ("saturate", "ieee")} == {expected}, fmt.name


def test_flushing_format():
    fmt = FloatFormat(name="flush", exponent_bits=4, mantissa_bits=3, has_subnormals=False)
    tiny = fmt.min_normal
    assert [round_value(tiny * f, fmt) for f in (0.5, 0.50001, 0.99, 1.0)] == [0.0, tiny, tiny, tiny]
    assert [round_value(tiny * f, fmt, "to_odd") for f in (0.01, 0.5)] == [tiny, tiny]
    assert [round_value(tiny * 0.3, fmt, mode) for mode in ("up", "down", "toward_zero")] == [tiny, 0.0, 0.0]
    assert identical(round_value(-tiny / 2, fmt), -0.0)
    assert decode_value(3, fmt) == 0.0


def test_codebook_rules():
    fmt = CodebookFormat(name="book", values=(1.0, -1.0, 3.0, 1.0, -0.0, 4.0))  # sorted: -1, 0, 1, 3, 4
    nearest = ("nearest_even", "nearest_away", "nearest_toward_zero")
    assert [encode_value(x, fmt) for x in (1.0, -9.0, 9.0, 0.0, math.nan, math.inf, -math.inf)] == [0, 1, 5, 4, 5, 5, 1]
    assert [round_value(2.0, fmt, mode) for mode in nearest] == [1, 3, 1]
    assert [round_value(3.5, fmt, mode) for mode in ("nearest_even", "to_odd", "up", "down")] == [4, 3, 4, 3]
    assert [round_value(-0.5, fmt, mode) for mode in ("toward_zero", "to_odd", "nearest_even")] == [0.0, 0.0, -1.0]
    assert identical(round_value(-0.0, fmt), 0.0)
    for mode in ("up", "down", "toward_zero", "to_odd", "nearest_to_odd"):
        assert [round_value(x, fmt, mode) for x in (-9.0, 9.0, math.inf, -math.inf)] == [-1, 4, 4, -1], mode
    lopsided = CodebookFormat(name="book", values=(-12.0, 3.0, 2.0))  # NaN is the largest value, not magnitude
    assert round_value(math.nan, lopsided) == round_value(math.inf, lopsided) == 3.0


def test_codebooks_turn_at_points_that_are_rounded():
    """Float64 has no number between 1 and 1 + 2**-52: the point half-way is 1 (a tie to even)."""
    last = 2.0**-52
    fmt = CodebookFormat(name="book", values=(1.0, 1.0 + last, 3.0 + 2 * last))
    inside = Fraction(1) + Fraction(last) / 4
    assert [round_value(inside, fmt, mode) for mode in ("nearest_even", "nearest_toward_zero")] == [1.0 + last] * 2
    exact, rounded = 2 + 3 * Fraction(last) / 2, 2 + 2 * Fraction(last)  # the second middle, a tie of RN64
    assert [round_value(x, fmt, "nearest_away") for x in (exact, rounded)] == [1.0 + last, 3.0 + 2 * last]


def test_the_fraction_of_a_codebook_is_a_quotient_of_rounded_differences():
    """Beside multiples of 1/16 the bits of RN64(RN64(x - v) / RN64(w - v)) decide, not those of the real quotient."""
    fmt = CodebookFormat(name="book", values=(-0.7, 0.6))
    rounding = Rounding(mode="stochastic", random_bits=32)
    for x in (-0.5375, -0.45625, -0.375, -0.21250000000000005, 0.0, 0.1):
        t = (x + 0.7) / (0.6 + 0.7)  # by the machine's float64
        least = (1 << 32) - math.floor(t * 2**32)  # the smallest word that goes up
        assert [round_value(x, fmt, rounding, word=w) for w in (least - 1, least)] == [-0.7, 0.6], x


def test_up_and_down_go_by_the_real_line_across_zero():
    fmt = CodebookFormat(name="book", values=(-4.0, 1.0, 8.0))
    assert [round_value(x, fmt, "up") for x in (-3.9, -0.5, 0.0, -0.0, 0.5)] == [1.0] * 5
    assert [round_value(x, fmt, "down") for x in (-3.9, -0.5, 0.0, -0.0, 0.5)] == [-4.0] * 5


def test_codebook_without_zero_follows_the_sign():
    fmt = CodebookFormat(name="book", values=(-1.0, 1.0))
    for mode in ("nearest_away", "nearest_toward_zero", "toward_zero"):
        assert [round_value(x, fmt, mode) for x in (0.0, -0.0)] == [1.0, -1.0]
    assert [round_value(x, fmt, "toward_zero") for x in (0.5, -0.5)] == [1.0, -1.0]


def test_values_of_opposite_signs_and_different_size():
    fmt = CodebookFormat(name="book", values=(-1.0, 3.0, 4.0, -8.0, -12.0))
    answers = {  # at the points half-way, then beside zero
        "nearest_away": (-12.0, -8.0, 3.0, 4.0, -1.0, -1.0),
        "nearest_toward_zero": (-8.0, -1.0, -1.0, 3.0, -1.0, -1.0),
        "nearest_to_odd": (-8.0, -8.0, 3.0, 3.0, -1.0, -1.0),
        "toward_zero": (-8.0, -1.0, 3.0, 3.0, 3.0, -1.0),
        "nearest_even": (-12.0, -1.0, -1.0, 4.0, -1.0, -1.0),
        "to_odd": (-8.0, -8.0, 3.0, 3.0, 3.0, 3.0),
    }
    for mode, expected in answers.items():
        assert tuple(round_value(x, fmt, mode) for x in (-10.0, -4.5, 1.0, 3.5, 0.25, -0.25)) == expected, mode


def test_logarithmic_values_are_the_nearest():
    for name in ("lns8_g8", "lns6_g4"):
        fmt = get_format(name)
        for k in range(fmt.max_code + 1):
            value, q = Fraction(decode_value(k, fmt)), fmt.gamma
            place = (
                Fraction(1, 1 << (23 - floor_log2(value)))
                if floor_log2(value) <= 23
                else Fraction(1 << (floor_log2(value) - 23))
            )
            assert (value - place / 2) ** q < 2**k < (value + place / 2) ** q
        assert oracle._log_magnitudes(fmt) == [Fraction(v) for v in fmt.magnitudes]
        assert oracle._log_thresholds(fmt) == [Fraction(v) for v in fmt.thresholds]
        for k, middle in enumerate(fmt.thresholds):
            odd, even = (k, k + 1) if k % 2 else (k + 1, k)
            ways = {"nearest_even": even, "nearest_to_odd": odd, "to_odd": odd}
            ways |= {"nearest_away": k + 1, "nearest_toward_zero": k}
            for mode, code in ways.items():
                assert encode_value(middle, fmt, mode) == encode_value(-middle, fmt, mode) - fmt.max_code - 1 == code


@pytest.mark.parametrize("zero", [0, Fraction(0), 0.0])
def test_exact_zeros_have_no_sign(zero):
    assert identical(round_value(zero, get_format("bf16")), 0.0) and encode_value(zero, get_format("e4m3")) == 0
    assert identical(round_value(-0.0, get_format("bf16")), -0.0)


def test_float64_is_rounded_once():
    """Through float32 this number would become the tie 1 + 2**-4 and then 1."""
    assert round_value(1 + 2.0**-4 + 2.0**-40, get_format("e4m3")) == 1.125
    assert round_value(Fraction(1) + Fraction(1, 16) + Fraction(1, 1 << 200), get_format("e4m3")) == 1.125


# Errors.


def test_errors():
    e4m3, e2m1 = get_format("e4m3"), get_format("e2m1")
    with pytest.raises(ArgumentError, match=r"word=None does not fit stochastic rounding with 32 bits"):
        round_value(1.0, e4m3, "stochastic")
    for word in (8, -1):
        with pytest.raises(ArgumentError, match=rf"word={word} .* pass 0 to 2\*\*3 - 1"):
            round_value(1.0, e4m3, Rounding(mode="stochastic", random_bits=3), word=word)
    with pytest.raises(CodeError, match="code 16 is outside e2m1"):
        decode_value(16, e2m1)
    strict = FloatFormat(
        name="strict", exponent_bits=2, mantissa_bits=1, nan="none", infinities=False, nan_policy="error"
    )
    with pytest.raises(ArgumentError, match="NaN has no code in strict"):
        round_value(math.nan, strict)


FORMATS = [
    get_format(name)
    for name in element_formats(16)
    if get_format(name).bits in (3, 4, 6, 8, 12, 16) and name != "lns16_g2048"
]
numbers = st.one_of(
    st.floats(allow_nan=False),
    st.floats(allow_nan=False, width=32),
    st.floats(min_value=-600, max_value=600, allow_nan=False),
    st.floats(min_value=-1, max_value=1, allow_nan=False, width=16),
)
roundings = st.sampled_from(DETERMINISTIC)
overflows = st.sampled_from(["saturate", "ieee"])
formats = st.sampled_from(FORMATS)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(numbers, formats, roundings, overflows)
def test_idempotent(x, fmt, rounding, overflow):
    once = round_value(x, fmt, rounding, overflow)
    assert identical(round_value(once, fmt, rounding, overflow), once)
    assert identical(decode_value(encode_value(once, fmt, rounding, overflow), fmt), once)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(numbers, numbers, formats, roundings)
def test_monotone(x, y, fmt, rounding):
    low, high = sorted((x, y), key=lambda x: (x, math.copysign(1, x)))  # -0 below +0: some formats have no zero
    assert round_value(low, fmt, rounding, "saturate") <= round_value(high, fmt, rounding, "saturate")


@settings(max_examples=500, deadline=None, derandomize=True)
@given(numbers, formats, roundings, st.integers(0, 2**32 - 1))
def test_result_is_a_neighbour(x, fmt, rounding, word):
    stochastic = Rounding(mode="stochastic")
    below, above = (round_value(x, fmt, mode, "saturate") for mode in ("down", "up"))
    assert (
        below == above or not math.isfinite(x) or fmt.max < abs(x) or isinstance(fmt, LogFormat) or below <= x <= above
    )
    assert round_value(x, fmt, rounding, "saturate") in (below, above)
    assert round_value(x, fmt, stochastic, "saturate", word) in (below, above)
