# SPDX-License-Identifier: Apache-2.0
"""Fixed-point formats: integers and their fractions."""

import math
from dataclasses import dataclass
from functools import partial

from fmtsim.formats.display import Fields, short_number
from fmtsim.formats.fields import Element, NanPolicy, require, require_code
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
