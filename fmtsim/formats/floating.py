# SPDX-License-Identifier: Apache-2.0
"""Binary floating-point formats: sign, exponent and mantissa fields; and what all element formats have in common."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fmtsim.formats.display import Displayed, Fields, finite_values, short_number
from fmtsim.support.errors import FormatError, shown
from fmtsim.support.records import check_types, lists_fields

Overflow = Literal["saturate", "ieee"]
NanPolicy = Literal["max", "error"]

OVERFLOWS: tuple[Overflow, ...] = ("saturate", "ieee")


class Element(Displayed):
    """An element format: a grid of values that saturates and has no NaN, unless the record says otherwise."""

    __slots__ = ()

    @property
    def default_overflow(self) -> Overflow:
        """The overflow rule that holds unless a verb names another."""
        return "saturate"

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return False

    @property
    @abstractmethod
    def max(self) -> float:
        """Largest finite value."""

    @property
    @abstractmethod
    def min(self) -> float:
        """Lowest finite value."""

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: ``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1


def require(name: str, condition: bool, given: str, allowed: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(f"format {shown(name)}: {given} is not allowed; choose {allowed}")


def require_code(name: str, bits: int, code: int) -> None:
    """Raise FormatError unless a code of so many bits is one."""
    if not 0 <= code < 1 << bits:
        raise FormatError(f"code {code} is outside {name} (0 to {(1 << bits) - 1})")


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat(Element):
    """Describe a binary floating-point format of sign, exponent and mantissa fields.

    A code is laid out as ``[sign] exponent mantissa`` from its most significant bit. With exponent field ``E``,
    mantissa field ``T`` and ``M = mantissa_bits``, the value of a finite code is ``2**(E - bias) * (1 + T / 2**M)``
    for ``E > 0`` and ``2**(1 - bias) * T / 2**M`` for ``E == 0``.

    Args:
        name: The name under which the format is listed.
        exponent_bits: Width of the exponent field, 1 to 11.
        mantissa_bits: Width of the mantissa field, 0 to 52; the implicit bit is not counted.
        bias: Exponent bias; None means ``2**(exponent_bits - 1) - 1``.
        signed: Whether there is a sign bit.
        nan: Where NaN lives: ``"ieee"`` (exponent all ones, mantissa not zero), ``"top"`` (the magnitude whose bits
            are all ones), ``"negative_zero"`` (the code of -0), or ``"none"``.
        infinities: Whether the largest magnitude that is not NaN is an infinity.
        has_zero: Whether code 0 is zero. Without it (E8M0) the smallest value stands in for zero.
        has_subnormals: Whether exponent field 0 holds subnormals. Without them the codes below the smallest normal
            decode to zero and rounding flushes to zero or to the smallest normal; without a zero either, exponent
            field 0 is an ordinary binade.
        overflow: What happens beyond the largest value unless a verb says otherwise; None means ``"saturate"`` for
            8 bits and fewer and ``"ieee"`` above.
        nan_policy: What NaN becomes in a format that has none: the largest value, as PTX ``cvt`` does, or an error.
        aliases: Other names, among them those of torch and ml_dtypes.
        source: The document that defines the constants.
    """

    name: str = field(kw_only=False)
    exponent_bits: int = field(kw_only=False)
    mantissa_bits: int = field(kw_only=False)
    bias: int | None = None
    signed: bool = True
    nan: Literal["ieee", "top", "negative_zero", "none"] = "ieee"
    infinities: bool = True
    has_zero: bool = True
    has_subnormals: bool = True
    overflow: Overflow | None = None
    nan_policy: NanPolicy = "max"
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        check = partial(require, self.name)
        check(1 <= self.exponent_bits <= 11, f"exponent_bits={self.exponent_bits}", "1 to 11")
        check(0 <= self.mantissa_bits <= 52, f"mantissa_bits={self.mantissa_bits}", "0 to 52")
        ieee = self.nan == "ieee"
        check(
            self.infinities or not ieee, "nan='ieee' with infinities=False", "infinities=True, nan='top' or nan='none'"
        )
        check(self.mantissa_bits > 0 or not ieee, "nan='ieee' with mantissa_bits=0", "nan='top' or 'none'")
        unsigned_nan = self.nan == "negative_zero" and not self.signed
        check(not unsigned_nan, "nan='negative_zero' with signed=False", "nan='top' or 'none' for an unsigned format")
        alone = not (self.signed or self.has_subnormals or self.mantissa_bits)
        only = "has_zero=True, or signed=False, has_subnormals=False and mantissa_bits=0 with it"
        check(self.has_zero or alone, "has_zero=False", only)
        check(self.max_code >= 1, "no finite value above zero", "more exponent or mantissa bits")
        lowest = self.min_exponent - self.mantissa_bits
        highest = max(self.max_code >> self.mantissa_bits, self.has_zero) - self.exponent_bias
        check(lowest >= -1074 and highest <= 1023, f"exponents {lowest} to {highest}", "values within float64")

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def exponent_bias(self) -> int:
        """The bias in force: the field, or ``2**(exponent_bits - 1) - 1``."""
        return (1 << (self.exponent_bits - 1)) - 1 if self.bias is None else self.bias

    @property
    def default_overflow(self) -> Overflow:
        """The overflow rule that holds unless a verb names another."""
        return self.overflow or ("saturate" if self.bits <= 8 else "ieee")

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.nan != "none"

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0 has a code of its own."""
        return self.signed and self.nan != "negative_zero"

    @property
    def magnitude_mask(self) -> int:
        """All code bits but the sign."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code, 0 for an unsigned format."""
        return (self.magnitude_mask + 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        if self.nan == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return self.magnitude_mask - (self.nan == "top") - self.infinities

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, None where there is none."""
        return self.max_code + 1 if self.infinities else None

    @property
    def nan_code(self) -> int | None:
        """Code that encode gives to every NaN, None where there is none."""
        if self.nan == "ieee":  # the quiet NaN: exponent all ones, top mantissa bit set
            return self.max_code + 1 + (1 << max(self.mantissa_bits - 1, 0)) if self.mantissa_bits else None
        return {"top": self.magnitude_mask, "negative_zero": self.sign_mask, "none": None}[self.nan]

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return (1 if self.has_zero else 0) - self.exponent_bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        return _magnitude(self, self.max_code)

    @property
    def min(self) -> float:
        """Lowest finite value: ``-max``, or the smallest value of an unsigned format."""
        return -self.max if self.signed else (0.0 if self.has_zero else self.min_normal)

    @property
    def min_normal(self) -> float:
        """Smallest normal value."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_normal(self) -> float:
        """Smallest normal value, by the name that ``torch.finfo`` has for it."""
        return self.min_normal

    @property
    def tiny(self) -> float:
        """Smallest normal value, by another name of ``torch.finfo``."""
        return self.min_normal

    @property
    def resolution(self) -> float:
        """``10**-digits``, the decimal digits that the format always keeps, as in ``torch.finfo``."""
        return float(f"1e-{math.floor(self.mantissa_bits * math.log10(2))}")

    @property
    def values(self) -> tuple[float, ...]:
        """All finite values, ascending, zero once; FormatError above 16 bits."""
        return finite_values(self)

    @property
    def min_subnormal(self) -> float:
        """Smallest value above zero, ``min_normal`` in a format without subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits) if self.has_subnormals else self.min_normal

    @property
    def eps(self) -> float:
        """Distance from 1 to the next value above it, as in ``torch.finfo``."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def value(self, code: int) -> float:
        """Return the value of one code, NaN and infinities included."""
        require_code(self.name, self.bits, code)
        sign, magnitude = code & self.sign_mask, code & self.magnitude_mask
        if magnitude > self.max_code or (sign and not magnitude and self.nan == "negative_zero"):
            if magnitude != self.inf_code:
                return math.nan
            return -math.inf if sign else math.inf
        return -_magnitude(self, magnitude) if sign else _magnitude(self, magnitude)

    @property
    def code_fields(self) -> Fields:
        """The fields of a code."""
        return ("sign", int(self.signed)), ("exponent", self.exponent_bits), ("mantissa", self.mantissa_bits)

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        specials = {
            "ieee": "NaN where the exponent is all ones and the mantissa is not zero",
            "top": "NaN where all bits but the sign are ones",
            "negative_zero": "NaN in place of -0",
            "none": "no NaN",
        }[self.nan]
        layout = f"{'1 sign, ' if self.signed else ''}{self.exponent_bits} exponent, {self.mantissa_bits} mantissa"
        return [
            ("bits", f"{self.bits} ({layout})"),
            ("bias", str(self.exponent_bias)),
            ("max", short_number(self.max)),
            ("min normal", short_number(self.min_normal)),
            ("min subnormal", short_number(self.min_subnormal) if self.has_subnormals else "none"),
            ("specials", f"{'Inf, ' if self.infinities else 'no Inf, '}{specials}"),
            ("overflow", self.default_overflow),
        ]

    def __repr__(self) -> str:
        specials = {"ieee": "NaN", "top": "one NaN", "negative_zero": "NaN at -0", "none": "no NaN"}[self.nan]
        return (
            f"FloatFormat({self.name!r}: {self.bits} bits, e{self.exponent_bits}m{self.mantissa_bits}, "
            f"bias {self.exponent_bias}, {'signed' if self.signed else 'unsigned'}, max {self.max:.6g}, "
            f"min_normal {self.min_normal:.6g}, min_subnormal {self.min_subnormal:.6g}, "
            f"{'Inf' if self.infinities else 'no Inf'}, {specials}, overflow {self.default_overflow})"
        )


def _magnitude(fmt: FloatFormat, magnitude: int) -> float:
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    if exponent == 0 and fmt.has_zero:
        if not fmt.has_subnormals:
            return 0.0
        return math.ldexp(float(mantissa), fmt.min_exponent - fmt.mantissa_bits)
    significand = mantissa + (1 << fmt.mantissa_bits)
    return math.ldexp(float(significand), exponent - fmt.exponent_bias - fmt.mantissa_bits)


# Codes are those of torch.float8_e8m0fnu; torch's cast to it rounds otherwise (docs/semantics.md, section 2).
E8M0 = FloatFormat(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    signed=False,
    nan="top",
    infinities=False,
    has_zero=False,
    has_subnormals=False,
    aliases=("float8_e8m0fnu", "ue8m0"),
    source="OCP Microscaling Formats (MX) v1.0, section 5.4.1",
)
FP32 = FloatFormat(
    name="fp32", exponent_bits=8, mantissa_bits=23, aliases=("float32", "float", "e8m23"), source="IEEE 754-2019, 3.6"
)
