# SPDX-License-Identifier: Apache-2.0
"""Numbers in a LogFMT tile: its values, and the rule that chose one of them."""

import dataclasses
import math
from bisect import bisect_right
from fractions import Fraction

from fmtsim.formats.block import FP32, LogTileFormat
from fmtsim.lab.explain.element import Decision, between
from fmtsim.rounding.elementary import exp
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import is_negative, round_value


def tile_values(low: float, step: float, fmt: LogTileFormat) -> list[float]:
    """Return the magnitudes of a tile: 0, then ``RN32(exp(low + step * k))`` (docs/semantics.md, section 8)."""
    logarithms = (low + step * k for k in range(fmt.max_code))
    return [0.0, *(round_value(exp(logarithm), FP32, "nearest_even", "ieee") for logarithm in logarithms)]


def decide_in_tile(
    x: float, code: int, values: list[float], fmt: LogTileFormat, rounding: Rounding, word: int | None
) -> Decision:
    """Explain a number by the code that the oracle gave it and the magnitudes of its tile."""
    sign = -1.0 if code > fmt.max_code else 1.0
    value = sign * values[code & fmt.max_code]
    decision = Decision(x=x, code=code, value=value, below=None, above=None, rule="nan", reason="NaN in the tile")
    if math.isnan(x):
        return decision
    magnitude = abs(x)
    ranks = sorted(set(values))
    upper = bisect_right(ranks, magnitude)
    lower = upper - 1 - (ranks[upper - 1] == magnitude)  # -1 where zero itself is given
    around = [sign * ranks[lower] if lower >= 0 else None, sign * ranks[upper] if upper < len(ranks) else None]
    below, above = around if not is_negative(x) else around[::-1]
    decision = dataclasses.replace(decision, below=below, above=above)
    if magnitude == abs(value):
        return dataclasses.replace(decision, rule="exact", reason="the tile holds the number exactly")
    if upper == len(ranks):
        reason = "the number lies beyond the largest value of the tile and becomes that value"
        return dataclasses.replace(decision, rule="saturated", reason=reason)
    neighbours = ranks[upper - 1], ranks[upper]
    if math.isinf(neighbours[1]):
        reason = "the next larger value of the tile is infinite: its logarithm lies beyond float32"
        return dataclasses.replace(decision, rule="overflow", reason=reason)
    middle = Fraction(float((Fraction(neighbours[0]) + Fraction(neighbours[1])) / 2))
    swapped = {"up": "down", "down": "up"}.get(rounding.mode) if is_negative(x) else None  # of the magnitudes
    how = rounding if swapped is None else Rounding(mode=swapped)  # type: ignore[arg-type]
    rule, reason = between(Fraction(magnitude), abs(value), neighbours, middle, how, word)
    rule = rounding.mode if rule == how.mode else rule
    return dataclasses.replace(decision, rule=rule, reason=f"{reason} (of the magnitudes)")
