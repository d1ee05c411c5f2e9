"""What must hold of every rounding: idempotent, monotone, a neighbour, symmetric, exact in expectation."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import decode_value, encode_value, round_value
from tests.support.bits import identical
from tests.support.casts import DETERMINISTIC, adversarial, element_formats, some_codes

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


def is_symmetric(fmt) -> bool:
    return getattr(fmt, "signed", True) and fmt.min == -fmt.max and not isinstance(fmt, CodebookFormat)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(numbers, formats, roundings, overflows)
def test_idempotent(x, fmt, rounding, overflow):
    once = round_value(x, fmt, rounding, overflow)
    assert identical(round_value(once, fmt, rounding, overflow), once)
    assert identical(decode_value(encode_value(once, fmt, rounding, overflow), fmt), once)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(numbers, numbers, formats, roundings)
def test_monotone(x, y, fmt, rounding):
    low, high = sorted((x, y))
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


@settings(max_examples=500, deadline=None, derandomize=True)
@given(numbers, formats.filter(is_symmetric), roundings, overflows)
def test_sign_symmetric(x, fmt, rounding, overflow):
    if isinstance(fmt, IntFormat) and fmt.half_offset and rounding.mode in ("nearest_even", "to_odd"):
        return  # the even code of +1/2 is 0, that of -1/2 is -1
    mirror = Rounding(mode={"up": "down", "down": "up"}.get(rounding.mode, rounding.mode))
    ours, theirs = round_value(x, fmt, rounding, overflow), round_value(-x, fmt, mirror, overflow)
    assert ours == -theirs or (ours != ours and theirs != theirs)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(numbers, st.sampled_from([f for f in FORMATS if isinstance(f, FloatFormat)]))
def test_nearest_is_nearest(x, fmt):
    """No code's value is nearer than the result (formats of 8 bits and fewer: all codes looked at)."""
    if fmt.bits > 8 or abs(x) > fmt.max or (x < 0 and not fmt.signed):
        return
    result = abs(Fraction(round_value(x, fmt, "nearest_even", "saturate")) - Fraction(x))
    values = (decode_value(code, fmt) for code in some_codes(fmt))
    assert result == min(abs(Fraction(v) - Fraction(x)) for v in values if math.isfinite(v))


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e5m2", "int4", "p3109_k6p1se"])
@pytest.mark.parametrize("bits", [1, 2, 5])
def test_expectation_over_all_words(name, bits):
    """Variant a moves away for floor(d 2**r) words of 2**r, variants b and c for that number rounded to nearest."""
    fmt = get_format(name)
    for x in [x for x in adversarial(fmt)[3::7] if 0 < x < fmt.max]:
        low, high = (Fraction(round_value(x, fmt, mode)) for mode in ("toward_zero", "up"))
        d = (Fraction(x) - low) / (high - low) if high > low else Fraction(0)
        for variant, expected in (
            ("a", d * 2**bits // 1),
            ("b", (d * 2**bits + Fraction(1, 2)) // 1),
            ("c", round(d * 2**bits)),
        ):
            rounding = Rounding(mode="stochastic", random_bits=bits, variant=variant)
            results = [round_value(x, fmt, rounding, word=word) for word in range(1 << bits)]
            assert results.count(float(high)) == expected or high == low
            assert set(results) <= {float(low), float(high)}
            assert results == sorted(results)  # larger words move away


def test_exact_expectation_when_all_discarded_bits_take_part():
    fmt = get_format("e4m3")
    rounding = Rounding(mode="stochastic", random_bits=6)
    for n in range(64):  # 16 + 2 n / 64 lies between 16 and 18, six bits below the last place
        x = 16 + 2 * n / 64
        assert sum(round_value(x, fmt, rounding, word=word) for word in range(64)) == 64 * x
