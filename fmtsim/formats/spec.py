"""What an element format is: frozen records from which every derived quantity follows."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from fmtsim.errors import FormatError

Overflow = Literal["saturate", "ieee"]
NanPolicy = Literal["max", "error"]
ScaleRule = Literal["floor", "ceil", "rceil", "even", "amax"]
ScaleArithmetic = Literal["divide", "reciprocal", "encode"]

OVERFLOWS: tuple[Overflow, ...] = ("saturate", "ieee")
NAN_POLICIES: tuple[NanPolicy, ...] = ("max", "error")
SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "ceil", "rceil", "even", "amax")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
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

    name: str
    exponent_bits: int
    mantissa_bits: int
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
        check = partial(_require, self.name)
        check(1 <= self.exponent_bits <= 11, f"exponent_bits={self.exponent_bits}", "1 to 11")
        check(0 <= self.mantissa_bits <= 52, f"mantissa_bits={self.mantissa_bits}", "0 to 52")
        nans = ("ieee", "top", "negative_zero", "none")
        check(self.nan in nans, f"nan={self.nan!r}", "'ieee', 'top', 'negative_zero' or 'none'")
        ieee = self.nan == "ieee"
        check(self.infinities or not ieee, "nan='ieee' with infinities=False", "infinities=True, or nan='top'")
        check(self.mantissa_bits > 0 or not ieee, "nan='ieee' with mantissa_bits=0", "nan='top' or 'none'")
        unsigned_nan = self.nan == "negative_zero" and not self.signed
        check(not unsigned_nan, "nan='negative_zero' with signed=False", "nan='top' or 'none' for an unsigned format")
        bare = not (self.signed or self.has_subnormals or self.mantissa_bits)
        only = "has_zero=True, or signed=False, has_subnormals=False and mantissa_bits=0 with it"
        check(self.has_zero or bare, "has_zero=False", only)
        check(self.overflow in (None, *OVERFLOWS), f"overflow={self.overflow!r}", "'saturate' or 'ieee'")
        check(self.nan_policy in NAN_POLICIES, f"nan_policy={self.nan_policy!r}", "'max' or 'error'")
        check(self.max_code >= 1, "no finite value above zero", "more exponent or mantissa bits")
        lowest = self.min_exponent - self.mantissa_bits
        within = lowest >= -1074 and self.max_exponent <= 1023
        check(within, f"exponents {lowest} to {self.max_exponent}", "values within float64")

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
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: ``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

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
    def min_subnormal(self) -> float:
        """Smallest value above zero, ``min_normal`` in a format without subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits) if self.has_subnormals else self.min_normal

    @property
    def eps(self) -> float:
        """Distance from 1 to the next value above it, as in ``torch.finfo``."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def value(self, code: int) -> float:
        """Return the value of one code, NaN and infinities included."""
        _require_code(self.name, self.bits, code)
        sign, magnitude = code & self.sign_mask, code & self.magnitude_mask
        if magnitude > self.max_code or (sign and not magnitude and self.nan == "negative_zero"):
            if magnitude != self.inf_code:
                return math.nan
            return -math.inf if sign else math.inf
        return -_magnitude(self, magnitude) if sign else _magnitude(self, magnitude)

    def __repr__(self) -> str:
        specials = {"ieee": "NaN", "top": "one NaN", "negative_zero": "NaN at -0", "none": "no NaN"}[self.nan]
        return (
            f"FloatFormat({self.name!r}: {self.bits} bits, e{self.exponent_bits}m{self.mantissa_bits}, "
            f"bias {self.exponent_bias}, {'signed' if self.signed else 'unsigned'}, max {self.max:.6g}, "
            f"min_normal {self.min_normal:.6g}, min_subnormal {self.min_subnormal:.6g}, "
            f"{'Inf' if self.infinities else 'no Inf'}, {specials}, overflow {self.default_overflow})"
        )

    def _repr_html_(self) -> str:
        from fmtsim.formats.display import format_html

        return format_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntFormat:
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
        check = partial(_require, self.name)
        check(1 + self.signed <= self.bits <= 24, f"bits={self.bits}", f"{1 + self.signed} to 24")
        check(0 <= self.fraction_bits <= 32, f"fraction_bits={self.fraction_bits}", "0 to 32")
        lopsided = self.half_offset or not self.signed
        only = "symmetric=False for an unsigned or a half-offset grid"
        check(not (self.symmetric and lopsided), "symmetric=True", only)
        check(self.signed or not self.half_offset, "half_offset=True with signed=False", "signed=True")
        check(self.nan_policy in NAN_POLICIES, f"nan_policy={self.nan_policy!r}", "'max' or 'error'")

    @property
    def default_overflow(self) -> Overflow:
        """Integers always saturate."""
        return "saturate"

    @property
    def has_nan(self) -> bool:
        """Integers have no NaN."""
        return False

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

    @property
    def max_exponent(self) -> int:
        """``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

    def value(self, code: int) -> float:
        """Return the value of one code, given as the unsigned bit pattern."""
        _require_code(self.name, self.bits, code)
        number = code - (1 << self.bits) if self.signed and code >> (self.bits - 1) else code
        return (number + 0.5 * self.half_offset) * self.eps

    def __repr__(self) -> str:
        grid = " half-offset" if self.half_offset else ""
        extent = f"range {self.min:g} to {self.max:g}, step {self.eps:g}"
        return f"IntFormat({self.name!r}: {self.bits} bits,{grid} {extent})"

    def _repr_html_(self) -> str:
        from fmtsim.formats.display import format_html

        return format_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookFormat:
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
        check = partial(_require, self.name)
        check(2 <= len(self.values) <= 1 << 16, f"{len(self.values)} values", "2 to 65536 values")
        check(all(math.isfinite(v) for v in self.values), "values with NaN or Inf", "finite values")
        check(len(set(self.values)) >= 2, "a single distinct value", "at least two")
        check(self.nan_policy in NAN_POLICIES, f"nan_policy={self.nan_policy!r}", "'max' or 'error'")

    @property
    def bits(self) -> int:
        """Width of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def default_overflow(self) -> Overflow:
        """Codebooks always saturate."""
        return "saturate"

    @property
    def has_nan(self) -> bool:
        """Codebooks have no NaN."""
        return False

    @property
    def max(self) -> float:
        """Largest magnitude, the target of a block's scale."""
        return max(abs(v) for v in self.values)

    @property
    def min(self) -> float:
        """Lowest value."""
        return min(self.values)

    @property
    def max_exponent(self) -> int:
        """``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

    def value(self, code: int) -> float:
        """Return the value of one code."""
        if not 0 <= code < len(self.values):
            raise FormatError(f"code {code} is outside {self.name} (0 to {len(self.values) - 1})")
        return self.values[code]

    def __repr__(self) -> str:
        return (
            f"CodebookFormat({self.name!r}: {self.bits} bits, {len(set(self.values))} values "
            f"from {self.min:g} to {max(self.values):g})"
        )

    def _repr_html_(self) -> str:
        from fmtsim.formats.display import format_html

        return format_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
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
        check = partial(_require, self.name)
        check(2 <= self.bits <= 16, f"bits={self.bits}", "2 to 16")
        check(self.gamma >= 1 and self.gamma & (self.gamma - 1) == 0, f"gamma={self.gamma}", "a power of two")
        octaves = self.max_code / self.gamma
        check(octaves < 128, f"a largest value of 2**{octaves:g}", "values within float32: raise gamma or lower bits")
        check(self.nan_policy in NAN_POLICIES, f"nan_policy={self.nan_policy!r}", "'max' or 'error'")

    @property
    def default_overflow(self) -> Overflow:
        """Logarithmic formats always saturate."""
        return "saturate"

    @property
    def has_nan(self) -> bool:
        """Logarithmic formats have no NaN."""
        return False

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

    @property
    def max_exponent(self) -> int:
        """``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

    def value(self, code: int) -> float:
        """Return the value of one code."""
        _require_code(self.name, self.bits, code)
        magnitude = self.magnitudes[code & self.max_code]
        return -magnitude if code > self.max_code else magnitude

    def __repr__(self) -> str:
        steps = f"{self.gamma} steps an octave"
        return f"LogFormat({self.name!r}: {self.bits} bits, {steps}, magnitudes 1 to {self.max:g})"

    def _repr_html_(self) -> str:
        from fmtsim.formats.display import format_html

        return format_html(self)


ElementFormat = FloatFormat | IntFormat | CodebookFormat | LogFormat


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


def _magnitude(fmt: FloatFormat, magnitude: int) -> float:
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    if exponent == 0 and fmt.has_zero:
        if not fmt.has_subnormals:
            return 0.0
        return math.ldexp(float(mantissa), fmt.min_exponent - fmt.mantissa_bits)
    significand = mantissa + (1 << fmt.mantissa_bits)
    return math.ldexp(float(significand), exponent - fmt.exponent_bias - fmt.mantissa_bits)


def _require(name: str, condition: bool, given: str, allowed: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(f"format {name!r}: {given} is not allowed; choose {allowed}")


def _require_code(name: str, bits: int, code: int) -> None:
    if not 0 <= code < 1 << bits:
        raise FormatError(f"code {code} is outside {name} (0 to {(1 << bits) - 1})")
