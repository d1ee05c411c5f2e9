# SPDX-License-Identifier: Apache-2.0
"""Logarithmic number systems: powers of a root of two."""

import math
from dataclasses import dataclass
from functools import cache, partial

from fmtsim.formats.display import Fields, short_number
from fmtsim.formats.fields import Element, NanPolicy, require, require_code
from fmtsim.support.errors import FormatError
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat(Element):
    """Describe a logarithmic number system: ``+-2**(k / gamma)`` with ``k = 0 ... 2**(bits - 1) - 1``.

    A code is the sign bit followed by k. There is no zero, NaN or infinity: magnitudes below 1 become 1, magnitudes
    above the largest value become that, and the sign of zero is kept. Values are those reals rounded to float32.

    Args:
        name: The name under which the format is listed.
        bits: Width of a code with its sign, 2 to 16.
        gamma: Steps an octave, a power of two.
        nan_policy: What NaN becomes: the largest value, or an error.
        aliases: Other names.
        source: The document that defines the format.
    """

    name: str
    bits: int
    gamma: int
    nan_policy: NanPolicy = "max"
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        check = partial(require, self.name)
        check(2 <= self.bits <= 16, f"bits={self.bits}", "2 to 16")
        check(self.gamma >= 1 and self.gamma & (self.gamma - 1) == 0, f"gamma={self.gamma}", "a power of two")
        octaves = self.max_code / self.gamma
        check(octaves < 128, f"a largest value of 2**{octaves:g}", "values within float32: raise gamma or lower bits")

    @property
    def max_code(self) -> int:
        """Code of the largest value."""
        return (1 << (self.bits - 1)) - 1

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """The values of the positive codes, each the float32 nearest to ``2**(k / gamma)``."""
        return _log_values(self.gamma, self.max_code + 1, 2, 24)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Where rounding to nearest turns from k to k + 1: the float64 nearest to ``2**((k + 1/2) / gamma)``."""
        return _log_values(self.gamma, 2 * self.max_code, 1, 53)[1::2]

    @property
    def max(self) -> float:
        """Largest value."""
        return self.magnitudes[-1]

    @property
    def min(self) -> float:
        """Lowest value."""
        return -self.max

    def value(self, code: int) -> float:
        """Return the value of one code."""
        require_code(self.name, self.bits, code)
        magnitude = self.magnitudes[code & self.max_code]
        return -magnitude if code > self.max_code else magnitude

    @property
    def code_fields(self) -> Fields:
        """The fields of a code."""
        return ("sign", 1), ("logarithm", self.bits - 1)

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        magnitudes = f"1 to {short_number(self.max)}"
        return [("bits", str(self.bits)), ("steps an octave", str(self.gamma)), ("magnitudes", magnitudes)]

    def __repr__(self) -> str:
        steps = f"{self.gamma} steps an octave"
        return f"LogFormat({self.name!r}: {self.bits} bits, {steps}, magnitudes 1 to {self.max:g})"


@cache
def _log_values(gamma: int, count: int, step: int, precision: int) -> tuple[float, ...]:
    """Round ``2**(i * step / (2 * gamma))`` to ``precision`` bits for i below count, by exact integer roots."""
    fractions = _roots_of_two(2 * gamma, precision)
    return tuple(math.ldexp(fractions[i * step % (2 * gamma)], i * step // (2 * gamma)) for i in range(count))


def _roots_of_two(count: int, precision: int) -> list[float]:
    """Round ``2**(i / count)`` to ``precision`` bits for i below count, a power of two."""
    guard = 192  # bits below the last place; the floors below lose less than 2 * count units of the last of them
    point = precision - 1 + guard
    root = 2 << point
    for _ in range(count.bit_length() - 1):
        root = math.isqrt(root << point)
    value, roots = 1 << point, []
    for _ in range(count):
        roots.append(math.ldexp(float((value + (1 << (guard - 1))) >> guard), 1 - precision))
        value = value * root >> point
    return roots
