# SPDX-License-Identifier: Apache-2.0
"""Rounding, encoding and decoding of single numbers in exact integers: slow, obvious, and what engines are held to.

Every function follows docs/semantics.md, sections 1 to 3. No floating-point operation decides anything here: numbers
are fractions of Python integers, and ``float`` appears only as a container of values that it holds exactly.
"""

import math
from bisect import bisect_left, bisect_right
from fractions import Fraction
from functools import cache

from fmtsim.formats.block import FP32
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.rounding.modes import Rounding, get_rounding
from fmtsim.support.errors import ArgumentError, CodeError

FP64 = FloatFormat(name="fp64", exponent_bits=11, mantissa_bits=52)

Real = float | int | Fraction

_GUARD = 256  # binary places of the powers of two from which logarithmic values are rounded


def round_value(
    x: Real, fmt: ElementFormat, rounding: str | Rounding = "nearest_even", overflow: Overflow | None = None,
    word: int | None = None,
) -> float:  # fmt: skip
    """Return the value of an element format to which a real number is rounded.

    Args:
        x: The number; NaN, Inf and -0 come as floats. A Fraction is rounded once, whatever its size.
        fmt: An element format.
        rounding: How to round.
        overflow: ``"saturate"``, ``"ieee"``, or None for the format's default.
        word: The random integer of stochastic rounding, in ``[0, 2**r)``.

    Raises:
        ArgumentError: The word is missing or out of range, or x is NaN and the format's ``nan_policy`` is ``"error"``.
    """
    return decode_value(encode_value(x, fmt, rounding, overflow, word), fmt)


def encode_value(
    x: Real, fmt: ElementFormat, rounding: str | Rounding = "nearest_even", overflow: Overflow | None = None,
    word: int | None = None,
) -> int:  # fmt: skip
    """Return the code of the value to which ``round_value`` rounds, as an unsigned bit pattern."""
    how = get_rounding(rounding)
    check_word(how, word)
    if x != x and not fmt.has_nan and fmt.nan_policy == "error":
        raise ArgumentError(f"NaN has no code in {fmt.name}; choose a format with NaN, or nan_policy='max'")
    if isinstance(fmt, FloatFormat):
        return _encode_float(x, fmt, how, overflow or fmt.default_overflow, word)
    if isinstance(fmt, IntFormat):
        number = fmt.max_code
        if x == -math.inf:
            number = fmt.min_code
        elif x == x and x != math.inf:
            number = round_to_integer(
                Fraction(x) * power_of_two(fmt.fraction_bits) if x else x, how, word, fmt.half_offset
            )
            number = min(max(number, fmt.min_code), fmt.max_code)
        return number % (1 << fmt.bits)
    if isinstance(fmt, CodebookFormat):
        overflow = overflow or fmt.default_overflow
        values, middles, codes = _codebook(fmt)
        infinite, last = x in (math.inf, -math.inf), len(values) - 1
        # 1. NaN, and Inf that has no code, under overflow "ieee"
        lost = x != x or (infinite and overflow == "ieee" and not fmt.infinities)
        if lost and fmt.nan_code is not None:
            return fmt.nan_code
        if x != x:
            return codes[-1]
        # 2. the rank to which x rounds; NaN counts as the rank below the lowest value
        rank = max(bisect_right(values, x) - 1, 0)
        if rank < last and x > values[0]:
            neighbours = (Fraction(values[rank]), Fraction(values[rank + 1]), middles[rank])
            odd = (rank + fmt.has_nan) % 2 == 1
            rank += takes_upper(Fraction(x), *neighbours, odd, is_negative(x), how, word)
        # 3. the outermost values stand for infinities, which finite numbers reach where the rounding leaves the range
        leaves = overflow == "ieee" and (infinite or how.rule.leaves_range(is_negative(x)))
        return codes[min(max(rank, 1), last - 1) if fmt.infinities and not leaves else rank]
    magnitudes, thresholds = _log_magnitudes(fmt), _log_thresholds(fmt)
    top = len(magnitudes) - 1
    negative = x == x and is_negative(x)
    sign = int(negative) << (fmt.bits - 1)
    if x != x or x in (math.inf, -math.inf) or abs(Fraction(x)) >= magnitudes[top]:
        return sign | bisect_left(magnitudes, magnitudes[top])  # the first of equal magnitudes
    magnitude = max(abs(Fraction(x)), Fraction(1))
    k = bisect_right(magnitudes, magnitude) - 1
    odd = bisect_left(magnitudes, magnitudes[k]) % 2 == 1
    k += takes_upper(magnitude, magnitudes[k], magnitudes[k + 1], thresholds[k], odd, negative, how, word)
    return sign | bisect_left(magnitudes, magnitudes[k])


def decode_value(code: int, fmt: ElementFormat) -> float:
    """Return the value of a code, NaN and infinities included; raise CodeError for a number that is not a code."""
    if not 0 <= code < (len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits):
        raise CodeError(f"code {code} is outside {fmt.name}; pass 0 to 2**{fmt.bits} - 1")
    if isinstance(fmt, FloatFormat):
        negative = bool(fmt.signed and code >> (fmt.exponent_bits + fmt.mantissa_bits))
        magnitude = code % (1 << (fmt.exponent_bits + fmt.mantissa_bits))
        if negative and magnitude == 0 and fmt.nan == "negative_zero":
            return math.nan
        if magnitude > _max_code(fmt):
            if fmt.infinities and magnitude == _max_code(fmt) + 1:
                return -math.inf if negative else math.inf
            return math.nan
        field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
        if field == 0 and fmt.has_zero:
            value = (
                mantissa * power_of_two(1 - fmt.exponent_bias - fmt.mantissa_bits)
                if fmt.has_subnormals
                else Fraction(0)
            )
        else:
            value = (mantissa + (1 << fmt.mantissa_bits)) * power_of_two(field - fmt.exponent_bias - fmt.mantissa_bits)
        return -_exact(value) if negative else _exact(value)
    if isinstance(fmt, IntFormat):
        number = code - (1 << fmt.bits) if fmt.signed and code >> (fmt.bits - 1) else code
        return _exact(Fraction(2 * number + fmt.half_offset, 2 << fmt.fraction_bits))
    if isinstance(fmt, CodebookFormat):
        return fmt.value(code) + 0.0  # -0 + 0 is +0
    sign, k = code >> (fmt.bits - 1), code % (1 << (fmt.bits - 1))
    return _exact(-_log_magnitudes(fmt)[k] if sign else _log_magnitudes(fmt)[k])


def check_word(how: Rounding, word: int | None) -> None:
    """Raise ArgumentError where stochastic rounding has no random integer of its bits."""
    if how.mode == "stochastic" and (word is None or not 0 <= word < 1 << how.bits):
        raise ArgumentError(
            f"word={word} does not fit stochastic rounding with {how.bits} bits; pass 0 to 2**{how.bits} - 1"
        )


def is_negative(x: Real) -> bool:
    """Return whether the sign bit is set, that of -0 included."""
    return math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0


def floor_log2(x: Fraction) -> int:
    """Return ``floor(log2(x))`` of a positive fraction."""
    e = x.numerator.bit_length() - x.denominator.bit_length()  # 2**(e - 1) < x < 2**(e + 1)
    return e if x.numerator << max(-e, 0) >= x.denominator << max(e, 0) else e - 1


def power_of_two(exponent: int) -> Fraction:
    """Return ``2**exponent``."""
    return Fraction(2) ** exponent


def rounds_away(rest: int, whole: int, odd: bool, negative: bool, how: Rounding, word: int | None) -> bool:
    """Return whether a magnitude goes to its next candidate: the table of section 1, with ``d = rest / whole``.

    Args:
        rest: Numerator of the discarded fraction, ``0 <= rest < whole``; 0 is exact and never moves.
        whole: Its denominator.
        odd: Whether the candidate below is odd.
        negative: Whether x is negative.
        how: The rounding.
        word: The random integer of stochastic rounding.
    """
    if rest == 0:
        return False
    if how.mode == "stochastic":
        return _random_away(rest, whole, how, word)
    return how.rule.condition(2 * rest >= whole, 2 * rest != whole, odd, negative)


def takes_upper(
    x: Fraction, lower: Fraction, upper: Fraction, middle: Fraction, odd: bool, negative: bool, how: Rounding,
    word: int | None,
) -> bool:  # fmt: skip
    """Return whether x, with ``lower < x < upper`` or x zero in between, goes up in a list of values (section 3).

    Args:
        x: The number.
        lower: The largest value of the list that is not above x.
        upper: The next value.
        middle: Where nearest modes turn over.
        odd: Whether the rank of ``lower`` is odd.
        negative: The sign of x, that of zero included, or of the number whose magnitude x is.
        how: The rounding.
        word: The random integer of stochastic rounding.
    """
    if x == lower:
        return False
    if how.mode == "stochastic":
        t = _rn64(_rn64(x - lower) / _rn64(upper - lower))
        return _random_away(t.numerator, t.denominator, how, word)
    # A magnitude moves from the inner value to the outer one; of two equal magnitudes the one of x's sign is the outer.
    same, crosses = lower == -upper, lower < 0 < upper  # of one magnitude; on both sides of zero
    outward = not negative if same else abs(upper) > abs(lower)  # the outer value is the upper one
    if crosses and how.rule.ties_toward_zero and (not how.rule.is_nearest or (same and x == middle)):
        return not negative  # none of the two lies toward zero from x
    if crosses:
        negative = not outward  # up and down go by the real line
    half = x >= middle if outward else x <= middle
    return how.rule.condition(half, x != middle, odd == outward, negative) == outward


def _random_away(rest: int, whole: int, how: Rounding, word: int | None) -> bool:
    assert word is not None  # check_word saw to it
    one = 1 << how.bits
    if how.variant == "a":
        return rest * one // whole + word >= one
    if how.variant == "b":
        return rest * 2 * one // whole + 2 * word + 1 >= 2 * one
    fraction, remainder = divmod(rest * one, whole)
    fraction += 2 * remainder > whole or (2 * remainder == whole and fraction % 2 == 1)  # to nearest even
    return fraction + word >= one


# Floating-point formats: sections 1 and 2.


def _encode_float(x: Real, fmt: FloatFormat, how: Rounding, overflow: Overflow, word: int | None) -> int:
    if x != x:
        return _special_code(fmt, "nan", False)
    negative = is_negative(x)
    if x == 0:
        return _signed_code(fmt, 0, negative) if fmt.has_zero else 0
    if negative and not fmt.signed:  # decided before rounding, -Inf included
        return _special_code(fmt, "nan", False) if overflow == "ieee" and fmt.nan != "none" else 0
    if x in (math.inf, -math.inf):
        return _special_code(fmt, "max" if overflow == "saturate" else "inf", negative)
    magnitude = abs(Fraction(x))
    if not fmt.has_zero:
        magnitude = max(magnitude, power_of_two(fmt.min_exponent))
    # a code without sign, in a format whose exponent field has no upper end:
    # 1. the last place 2**u, and the magnitude as n of them and a rest
    e = floor_log2(magnitude)
    flushed = e < fmt.min_exponent and not fmt.has_subnormals
    u = fmt.min_exponent if flushed else max(e, fmt.min_exponent) - fmt.mantissa_bits
    whole = magnitude.denominator << max(u, 0)
    n, rest = divmod(magnitude.numerator << max(-u, 0), whole)

    def code(n: int) -> int:
        """Return the code of ``n * 2**u``: codes count up with the values, through carries and subnormals."""
        first = 1 << fmt.mantissa_bits  # the smallest normal number has exponent field 1, or 0 without a zero
        return n * first if flushed else (u + fmt.mantissa_bits + fmt.exponent_bias) * first + n - first

    # 2. n, or one more
    rounded_code = code(n + rounds_away(rest, whole, code(n) % 2 == 1, negative, how, word))
    if rounded_code <= _max_code(fmt):
        return _signed_code(fmt, rounded_code, negative)
    leaves = overflow == "ieee" and how.rule.leaves_range(negative)
    return _special_code(fmt, "inf" if leaves else "max", negative)


def _max_code(fmt: FloatFormat) -> int:
    """Return the code of the largest finite value: below it the codes count up without a hole."""
    ones = (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1
    if fmt.nan == "ieee":
        return ones - (1 << fmt.mantissa_bits)
    return ones - (1 if fmt.nan == "top" else 0) - (1 if fmt.infinities else 0)


def _signed_code(fmt: FloatFormat, magnitude_code: int, negative: bool) -> int:
    """Put the sign in front of a code; zero is positive where -0 has no code."""
    if not fmt.signed or not negative or (magnitude_code == 0 and fmt.nan == "negative_zero"):
        return magnitude_code
    return magnitude_code | 1 << (fmt.exponent_bits + fmt.mantissa_bits)


def _special_code(fmt: FloatFormat, kind: str, negative: bool) -> int:
    """Return the code of NaN, Inf or max: Inf becomes NaN where there is none, NaN becomes max where there is none."""
    if kind == "inf" and fmt.infinities:
        return _signed_code(fmt, _max_code(fmt) + 1, negative)
    if kind == "max" or fmt.nan == "none":
        return _signed_code(fmt, _max_code(fmt), negative)
    ones = (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1
    if fmt.nan == "ieee":
        return ones - (1 << fmt.mantissa_bits) + 1 + (1 << (fmt.mantissa_bits - 1))
    return ones if fmt.nan == "top" else ones + 1


# Integers, codebooks and logarithmic formats: section 3.


def round_to_integer(x: Real, how: Rounding, word: int | None, half_offset: bool = False) -> int:
    """Round a finite number to an integer without bounds (section 3); on a half-offset grid n stands for n + 1/2.

    A Fraction zero counts as positive, a float zero has its sign.
    """
    negative = is_negative(x)
    magnitude = abs(Fraction(x)) + Fraction(int(half_offset), 2)
    n, rest = divmod(magnitude.numerator, magnitude.denominator)
    number = (lambda n: -n if negative else n - 1) if half_offset else (lambda n: -n if negative else n)
    if half_offset and n == 0 and how.rule.ties_toward_zero:
        return number(1)  # no neighbour lies toward zero: the value of x's sign
    return number(n + rounds_away(rest, magnitude.denominator, number(n) % 2 == 1, negative, how, word))


@cache
def _codebook(fmt: CodebookFormat) -> tuple[list[float], list[Fraction], list[int]]:
    """Return the distinct values in order, the points between them, and the first code of each value."""
    values = sorted(set(fmt.values))
    middles = [_rn64((Fraction(low) + Fraction(high)) / 2) for low, high in zip(values, values[1:], strict=False)]
    middles = list(map(Fraction, fmt.thresholds)) or middles
    return values, middles, [fmt.values.index(v) for v in values]


@cache
def _log_magnitudes(fmt: LogFormat) -> list[Fraction]:
    """Return the float32 nearest to ``2**(k / gamma)`` for every k."""
    return [_power_of_root(k, fmt.gamma, FP32.mantissa_bits) for k in range(1 << (fmt.bits - 1))]


@cache
def _log_thresholds(fmt: LogFormat) -> list[Fraction]:
    """Return the float64 nearest to ``2**((k + 1/2) / gamma)`` for every k but the last."""
    return [_power_of_root(2 * k + 1, 2 * fmt.gamma, FP64.mantissa_bits) for k in range((1 << (fmt.bits - 1)) - 1)]


def _power_of_root(numerator: int, denominator: int, mantissa_bits: int) -> Fraction:
    """Round ``2**(numerator / denominator)`` to nearest; the denominator is a power of two."""
    whole, part = divmod(numerator, denominator)
    last_place = 1 << (_GUARD - mantissa_bits)
    return Fraction((_roots_of_two(denominator)[part] + last_place // 2) // last_place) * power_of_two(
        whole - mantissa_bits
    )


@cache
def _roots_of_two(denominator: int) -> list[int]:
    """Return ``2**(i / denominator)`` for i below the denominator in fixed point, wrong by less than 2**-200."""
    root = 1 << (_GUARD * denominator + 1)
    for _ in range(denominator.bit_length() - 1):
        root = math.isqrt(root)
    power, powers = 1 << _GUARD, []
    for _ in range(denominator):
        powers.append(power)
        power = power * root >> _GUARD
    return powers


def _rn64(x: Fraction) -> Fraction:
    return Fraction(round_value(x, FP64, "nearest_even", "ieee"))


def _exact(x: Fraction) -> float:
    """Put a fraction into a float that holds it exactly."""
    return math.ldexp(x.numerator, -(x.denominator.bit_length() - 1))
