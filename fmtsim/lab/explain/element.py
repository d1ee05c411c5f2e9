# SPDX-License-Identifier: Apache-2.0
"""How one number became one code of an element format: its neighbours, exactly, and the rule that chose among them."""

import dataclasses
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from fmtsim.formats.display import count_of
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import encode_value, round_value

Number = float | Fraction

# Smaller than the distance between any two values of any format (float64's last place is 2**-1074).
_NUDGE = Fraction(1, 1 << 1200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Say how a number was rounded to an element format.

    ``below`` and ``above`` are the values of the format next to ``x``, which is neither; None where the format ends.
    """

    x: Number
    code: int
    value: float
    below: float | None
    above: float | None
    rule: str
    reason: str

    @property
    def below_distance(self) -> Fraction | None:
        """Exact distance from the neighbour below."""
        return self._distance(self.below)

    @property
    def above_distance(self) -> Fraction | None:
        """Exact distance to the neighbour above."""
        return self._distance(self.above)

    def _distance(self, value: float | None) -> Fraction | None:
        if value is None or not (math.isfinite(self.x) and math.isfinite(value)):
            return None
        return abs(Fraction(self.x) - Fraction(value))


def decide(x: Number, fmt: ElementFormat, rounding: Rounding, overflow: Overflow, word: int | None) -> Decision:
    """Round a number by the oracle and find out why it got its code."""
    code = encode_value(x, fmt, rounding, overflow, word)
    value = fmt.value(code)
    below, above = neighbours(x, fmt)
    if not isinstance(x, Fraction) and not math.isfinite(x):
        rule, reason = _special(x, value, fmt)
    elif math.isfinite(value) and Fraction(value) == Fraction(x):
        rule, reason = "exact", f"{fmt.name} holds the number exactly"
    else:
        rule, reason = _finite(Fraction(x), value, fmt, rounding, word)
    return Decision(x=x, code=code, value=value, below=below, above=above, rule=rule, reason=reason)


def neighbours(x: Number, fmt: ElementFormat) -> tuple[float | None, float | None]:
    """Return the values of the format just below and just above x; x itself is neither. None where there is none."""
    if not isinstance(x, Fraction) and math.isnan(x):
        return None, None
    if not isinstance(x, Fraction) and math.isinf(x):
        return (fmt.max, None) if x > 0 else (None, fmt.min)
    exact = Fraction(x)
    if isinstance(fmt, CodebookFormat | LogFormat):
        values = _values(fmt)
        low, high = bisect_left(values, exact), bisect_right(values, exact)
        return (values[low - 1] if low else None), (values[high] if high < len(values) else None)
    below = round_value(exact - _NUDGE, fmt, "down", "saturate")
    above = round_value(exact + _NUDGE, fmt, "up", "saturate")
    # + 0.0 drops the sign of zero, which says nothing about a place on the line.
    return (below + 0.0 if below < exact else None), (above + 0.0 if above > exact else None)


@cache
def _values(fmt: CodebookFormat | LogFormat) -> tuple[float, ...]:
    """Return the distinct values of a format that is a list, in order."""
    values = {fmt.value(code) for code in range(count_of(fmt))}
    return tuple(sorted(value for value in values if value == value))


def _special(x: float, value: float, fmt: ElementFormat) -> tuple[str, str]:
    """Explain NaN and infinities."""
    if math.isnan(x):
        if math.isnan(value):
            return "nan", "NaN stays NaN"
        return "nan", f"{fmt.name} has no NaN, which becomes its largest value"
    if math.isnan(value):
        return "nan", f"{fmt.name} has no infinity, which becomes NaN under overflow='ieee'"
    if math.isinf(value):
        return "infinity", "infinity stays infinity"
    return "saturated", "infinity becomes the outermost value"


def _finite(x: Fraction, value: float, fmt: ElementFormat, rounding: Rounding, word: int | None) -> tuple[str, str]:
    """Explain a finite number that is not a value of the format."""
    if x < 0 <= fmt.min:
        what = "becomes NaN under overflow='ieee'" if math.isnan(value) else "becomes the smallest value"
        return "unsigned", f"{fmt.name} has no negative numbers: {what}"
    if isinstance(fmt, LogFormat) and abs(x) < 1:
        return "smallest", f"magnitudes below 1 become 1 in {fmt.name}"
    if isinstance(fmt, FloatFormat) and not fmt.has_zero and x < Fraction(fmt.min):
        return "smallest", f"below the smallest value of {fmt.name}, which has no zero"
    wide = _widened(fmt)
    unbounded = round_value(x, wide, rounding, "saturate", word)
    if wide is fmt and not fmt.min <= x <= max(fmt.max, fmt.min):
        return _beyond(value, "the number lies", fmt)
    if not fmt.min <= unbounded <= fmt.max:
        return _beyond(value, f"the number rounds to {unbounded:g},", fmt)
    rule, reason = _between(x, value, fmt, wide, rounding, word)
    if value == 0:
        reason += "; the number is lost to zero (underflow)"
    return rule, reason


def _widened(fmt: ElementFormat) -> ElementFormat:
    """Return the same grid with a larger range, to see where a number would go; the format itself where it has none."""
    if isinstance(fmt, FloatFormat) and (2 << fmt.exponent_bits) - 1 - fmt.exponent_bias <= 1023:  # within float64
        wider = fmt.exponent_bits + 1
        return dataclasses.replace(fmt, exponent_bits=wider, bias=fmt.exponent_bias, nan="none", infinities=False)
    if isinstance(fmt, IntFormat) and fmt.bits < 24:
        return dataclasses.replace(fmt, bits=fmt.bits + 1)
    return fmt


def _beyond(value: float, start: str, fmt: ElementFormat) -> tuple[str, str]:
    if math.isfinite(value):
        return "saturated", f"{start} beyond the outermost value, and stays at {value:g}"
    return (
        "overflow",
        f"{start} beyond the largest value {fmt.max:g}, and becomes {'NaN' if value != value else 'infinity'}",
    )


def _between(
    x: Fraction, value: float, fmt: ElementFormat, wide: ElementFormat, rounding: Rounding, word: int | None
) -> tuple[str, str]:
    """Explain a number strictly between two values of the grid."""
    low, high = neighbours(x, wide)
    if low is None or high is None:
        return "saturated", f"the number lies beyond the outermost value, and stays at {value:g}"
    middle = turning_point(x, Fraction(low), Fraction(high), fmt)
    rule, reason = between(x, value, (low, high), middle, rounding, word)
    listed = isinstance(fmt, CodebookFormat) and bool(fmt.thresholds)
    measure = " in the logarithm" if isinstance(fmt, LogFormat) else " by the format's thresholds" if listed else ""
    return rule, reason + (measure if rule == "nearest" else "")


def between(
    x: Fraction, value: float, around: tuple[float, float], middle: Fraction, rounding: Rounding, word: int | None
) -> tuple[str, str]:
    """Name the rule that chose one of two neighbours, and say it in a sentence.

    Args:
        x: The number, strictly between the two.
        value: The one that was chosen.
        around: The neighbours below and above.
        middle: Where rounding to nearest turns over.
        rounding: The rounding.
        word: The random integer of stochastic rounding.
    """
    below, above = (Fraction(neighbour) for neighbour in around)
    side = "above" if value == above else "below"
    if rounding.mode == "stochastic":
        share = float((x - below) / (above - below))
        odds = f"the number lies {share:.6g} of the way up, the chance of the neighbour above"
        return "stochastic", f"{odds}; random word {word} of {rounding.bits} bits chose the one {side}"
    if not rounding.rule.is_nearest:
        return rounding.mode, f"rounding {rounding.mode} takes {rounding.rule.takes}"
    if x == middle:
        return f"tie_{rounding.mode.removeprefix('nearest_')}", f"half-way: the tie goes to {rounding.rule.takes}"
    return "nearest", f"the neighbour {side} is nearer"


def turning_point(x: Fraction, below: Fraction, above: Fraction, fmt: ElementFormat) -> Fraction:
    """Return where rounding to nearest turns over (docs/semantics.md, sections 1 and 3)."""
    if isinstance(fmt, LogFormat) and below != -above:
        rank = fmt.magnitudes.index(float(min(abs(below), abs(above))))
        return Fraction(math.copysign(fmt.thresholds[rank], x))
    if isinstance(fmt, CodebookFormat):
        return Fraction(fmt.turns[fmt.ordered.index(float(below))])
    return (below + above) / 2
