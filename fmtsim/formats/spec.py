# SPDX-License-Identifier: Apache-2.0
"""What an element format is: frozen records from which every derived quantity follows; floats are in floating.py."""

import math
from dataclasses import dataclass
from functools import cache, partial

from fmtsim.formats.display import Fields, finite_values, short_number
from fmtsim.formats.floating import OVERFLOWS as OVERFLOWS
from fmtsim.formats.floating import Element, NanPolicy, require, require_code
from fmtsim.formats.floating import FloatFormat as FloatFormat
from fmtsim.formats.floating import Overflow as Overflow
from fmtsim.support.errors import FormatError
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class IntFormat(Element):
    """Describe a fixed-point format: codes are two's complement (or unsigned) integers.

    The value of a code is ``(code + offset) * 2**-fraction_bits`` with offset 1/2 for a half-offset grid, else 0.
    There is one zero (none on a half-offset grid), no NaN and no infinity, and overflow always saturates.

    Args:
        name: The name under which the format is listed.
        bits: Width of a code, 1 to 24.
        signed: Two's complement codes; False means 0 to ``2**bits - 1``.
        symmetric: Leave the lowest signed code unused, so that the range is ``-max`` to ``max``. It still decodes.
        half_offset: Values at odd multiples of half a step, so that the grid is symmetric and has no zero.
        fraction_bits: Binary places, 6 for the elements of MXINT8.
        nan_policy: What NaN becomes: the largest value, or an error.
        aliases: Other names.
        source: The document that defines the format.
    """

    name: str
    bits: int
    signed: bool = True
    symmetric: bool = True
    half_offset: bool = False
    fraction_bits: int = 0
    nan_policy: NanPolicy = "max"
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        check = partial(require, self.name)
        check(1 + self.signed <= self.bits <= 24, f"bits={self.bits}", f"{1 + self.signed} to 24")
        check(0 <= self.fraction_bits <= 32, f"fraction_bits={self.fraction_bits}", "0 to 32")
        lopsided = self.half_offset or not self.signed
        only = "symmetric=False for an unsigned or a half-offset grid"
        check(not (self.symmetric and lopsided), "symmetric=True", only)
        check(self.signed or not self.half_offset, "half_offset=True with signed=False", "signed=True")

    @property
    def min_code(self) -> int:
        """Lowest code that rounding returns, as a signed integer."""
        return -(1 << (self.bits - 1)) + self.symmetric if self.signed else 0

    @property
    def max_code(self) -> int:
        """Highest code that rounding returns."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def eps(self) -> float:
        """The step of the grid."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def max(self) -> float:
        """Largest value."""
        return (self.max_code + 0.5 * self.half_offset) * self.eps

    @property
    def min(self) -> float:
        """Lowest value."""
        return (self.min_code + 0.5 * self.half_offset) * self.eps

    @property
    def values(self) -> tuple[float, ...]:
        """All values, ascending; FormatError above 16 bits."""
        return finite_values(self)

    @property
    def mantissa_bits(self) -> int:
        """Significant bits after the leading one of the largest value."""
        return max(self.bits - self.signed - 1, 0)

    def value(self, code: int) -> float:
        """Return the value of one code, given as the unsigned bit pattern."""
        require_code(self.name, self.bits, code)
        number = code - (1 << self.bits) if self.signed and code >> (self.bits - 1) else code
        return (number + 0.5 * self.half_offset) * self.eps

    @property
    def code_fields(self) -> Fields:
        """The fields of a code."""
        return (("integer", self.bits),)

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        return [("bits", str(self.bits)), ("range", f"{self.min:g} to {self.max:g}"), ("step", short_number(self.eps))]

    def __repr__(self) -> str:
        grid = " half-offset" if self.half_offset else ""
        extent = f"range {self.min:g} to {self.max:g}, step {self.eps:g}"
        return f"IntFormat({self.name!r}: {self.bits} bits,{grid} {extent})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookFormat(Element):
    """Describe a format by the list of its values; the code of a value is its place in the list.

    Args:
        name: The name under which the format is listed.
        values: One finite float32 value a code, in any order; repeated values encode to the first code.
        nan_policy: What NaN becomes: the largest value, or an error.
        aliases: Other names.
        source: The document that defines the values.
    """

    name: str
    values: tuple[float, ...]
    nan_policy: NanPolicy = "max"
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        check = partial(require, self.name)
        check(2 <= len(self.values) <= 1 << 16, f"{len(self.values)} values", "2 to 65536 values")
        check(all(math.isfinite(v) for v in self.values), "values with NaN or Inf", "finite values")
        check(len(set(self.values)) >= 2, "a single distinct value", "at least two")

    @property
    def bits(self) -> int:
        """Width of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        """Largest magnitude, the target of a block's scale."""
        return max(abs(v) for v in self.values)

    @property
    def min(self) -> float:
        """Lowest value."""
        return min(self.values)

    def value(self, code: int) -> float:
        """Return the value of one code."""
        if not 0 <= code < len(self.values):
            raise FormatError(f"code {code} is outside {self.name} (0 to {len(self.values) - 1})")
        return self.values[code]

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        extent = f"{self.min:g} to {max(self.values):g}"
        return [("bits", str(self.bits)), ("values", str(len(set(self.values)))), ("range", extent)]

    def __repr__(self) -> str:
        return (
            f"CodebookFormat({self.name!r}: {self.bits} bits, {len(set(self.values))} values "
            f"from {self.min:g} to {max(self.values):g})"
        )


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
    def values(self) -> tuple[float, ...]:
        """All values, ascending; FormatError above 16 bits."""
        return finite_values(self)

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


ElementFormat = FloatFormat | IntFormat | CodebookFormat | LogFormat
