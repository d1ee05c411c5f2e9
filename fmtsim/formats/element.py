# SPDX-License-Identifier: Apache-2.0
"""What an element format is: frozen records from which every derived quantity follows; floats are in floating.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Context, Decimal
from functools import cache, partial

from fmtsim.formats.display import Fields, finite_values, short_number
from fmtsim.formats.floating import OVERFLOWS as OVERFLOWS
from fmtsim.formats.floating import Element, NanPolicy, require, require_code
from fmtsim.formats.floating import FloatFormat as FloatFormat
from fmtsim.formats.floating import Overflow as Overflow
from fmtsim.support.errors import FormatError
from fmtsim.support.records import check_types, lists_fields


@lists_fields
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

    name: str = field(kw_only=False)
    bits: int = field(kw_only=False)
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


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookFormat(Element):
    """Describe a format by the list of its values; the code of a value is its place in the list.

    Args:
        name: The name under which the format is listed.
        values: One finite value a code, in any order; repeated values encode to the first code. float32 is the widest
            dtype that every engine holds.
        nan_code: The code that is NaN, whose place in ``values`` repeats the value of a lower code; None for none.
        infinities: Whether the lowest and the largest value stand for the infinities: a number that rounds to them
            overflows. Needs a ``nan_code``.
        thresholds: Where rounding to nearest turns between neighbouring values, ascending; empty for half-way.
        nan_policy: What NaN becomes where it has no code: the largest value, or an error.
        aliases: Other names.
        source: The document that defines the values.
    """

    name: str
    values: tuple[float, ...]
    nan_code: int | None = None
    infinities: bool = False
    thresholds: tuple[float, ...] = ()
    nan_policy: NanPolicy = "max"
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        check = partial(require, self.name)
        check(2 <= len(self.values) <= 1 << 16, f"{len(self.values)} values", "2 to 65536 values")
        check(all(math.isfinite(v) for v in self.values), "values with NaN or Inf", "finite values")
        check(len(set(self.values)) >= 2, "a single distinct value", "at least two")
        nan, turns, count = self.nan_code, self.thresholds, len(set(self.values))
        repeats = nan is None or (0 < nan < len(self.values) and self.values[nan] in self.values[:nan])
        check(repeats, f"nan_code={nan}", "a code whose place in values repeats the value of a lower code")
        check(not self.infinities or nan is not None, "infinities=True with nan_code=None", "a nan_code")
        ends = not self.infinities or (count >= 4 and min(self.values) < 0)
        check(ends, "infinities=True", "lists with two finite values between -Inf and Inf")
        between = not turns or (len(turns) == count - 1 and list(turns) == sorted(turns))
        check(between, f"{len(turns)} thresholds", f"{count - 1} ascending ones, or none")

    def __hash__(self) -> int:  # caches ask for it in every call, and a list of values is long
        return hash((self.name, len(self.values), self.nan_code))

    @property
    def bits(self) -> int:
        """Width of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.nan_code is not None

    @property
    def default_overflow(self) -> Overflow:
        """The overflow rule that holds unless a verb names another: ``"ieee"`` where a code is NaN."""
        return "ieee" if self.has_nan else "saturate"

    @property
    def ordered(self) -> tuple[float, ...]:
        """The distinct values, ascending, those that stand for infinities included."""
        return _ordered(self)

    @property
    def turns(self) -> tuple[float, ...]:
        """Where rounding to nearest turns between neighbours of ``ordered``: ``thresholds``, or half-way."""
        values = self.ordered
        return self.thresholds or tuple((a + b) / 2 for a, b in zip(values, values[1:], strict=False))

    @property
    def finite(self) -> tuple[float, ...]:
        """The distinct finite values, ascending."""
        return self.ordered[self.infinities : len(self.ordered) - self.infinities]

    @property
    def max(self) -> float:
        """Largest finite magnitude, the target of a block's scale."""
        return max(self.finite[-1], -self.finite[0])

    @property
    def min(self) -> float:
        """Lowest finite value."""
        return self.finite[0]

    def value(self, code: int) -> float:
        """Return the value of one code."""
        if not 0 <= code < len(self.values):
            raise FormatError(f"code {code} is outside {self.name} (0 to {len(self.values) - 1})")
        value = self.values[code]
        if code == self.nan_code:
            return math.nan
        return math.copysign(math.inf, value) if self.infinities and abs(value) > self.max else value

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        extent = f"{self.min:g} to {self.finite[-1]:g}"
        special = "infinities and NaN" if self.infinities else "NaN"
        facts = [("bits", str(self.bits)), ("values", str(len(self.finite))), ("range", extent)]
        return [*facts, ("special", special)] if self.has_nan else facts

    def __repr__(self) -> str:
        extent = f"{len(self.finite)} values from {self.min:g} to {self.finite[-1]:g}"
        return f"CodebookFormat({self.name!r}: {self.bits} bits, {extent})"


@cache
def _ordered(fmt: CodebookFormat) -> tuple[float, ...]:
    return tuple(sorted({value + 0.0 for value in fmt.values}))  # -0 + 0 = 0


@lists_fields
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
        power = 1 <= self.gamma <= 1 << 24 and self.gamma & (self.gamma - 1) == 0  # finer steps are no float32
        check(power, f"gamma={self.gamma}", "a power of two up to 2**24")
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
    fractions = _roots_of_two(2 * gamma, min(2 * gamma, count * step), precision)
    return tuple(math.ldexp(fractions[i * step % (2 * gamma)], i * step // (2 * gamma)) for i in range(count))


def _roots_of_two(steps: int, count: int, precision: int) -> list[float]:
    """Round ``2**(i / steps)`` to ``precision`` bits for i below count; ``steps`` is a power of two."""
    guard = 192  # bits below the last place; the floors below lose less than 2 * steps units of the last of them
    point = precision - 1 + guard
    root = 2 << point
    for _ in range(steps.bit_length() - 1):
        root = math.isqrt(root << point)
    value, roots = 1 << point, []
    for _ in range(count):
        roots.append(math.ldexp(float((value + (1 << (guard - 1))) >> guard), 1 - precision))
        value = value * root >> point
    return roots


ElementFormat = FloatFormat | IntFormat | CodebookFormat | LogFormat


_EXP = Context(prec=40)  # float64 has 17 digits


def hif8() -> CodebookFormat:
    """Build HiFloat8: sign, a prefix code that gives the width of the exponent field, exponent, mantissa.

    The exponent is a sign and a magnitude whose leading one is implicit. Codes 1 to 7 are powers of two; the largest
    magnitude is an infinity, which numbers reach from ``1.25 * 2**15`` on.
    """
    magnitudes = [0.0, *(2.0 ** (code - 23) for code in range(1, 8))]
    for code in range(8, 128):
        # 1. the prefix 0001, 001, 01, 10 or 11: an exponent of 0 to 4 bits, and mantissa bits behind it
        width = max(code.bit_length() - 4, 0) if code < 64 else 3 + code // 32 % 2
        mantissa_bits = min(3, 5 - width)
        field, mantissa = (code >> mantissa_bits) % (1 << width), code % (1 << mantissa_bits)
        # 2. the exponent: its sign first, then the bits below the implicit one
        half = 1 << width >> 1
        exponent = (half + field % half) * (-1 if field >= half else 1) if width else 0
        magnitudes.append(2.0**exponent * (1 + mantissa / 2**mantissa_bits))
    return CodebookFormat(
        name="hif8",
        values=(*magnitudes, 0.0, *(-value for value in magnitudes[1:])),
        nan_code=0x80,
        infinities=True,
        aliases=("hifloat8",),
        source="Luo et al., arXiv:2409.16626; its ties go away from zero (rounding='nearest_away')",
    )


def tapered(kind: str, bits: int) -> CodebookFormat:
    """Build a posit (two exponent bits), a takum (logarithmic) or a takum_linear of up to 16 bits.

    Negative codes are two's complements of positive ones, the lowest code is NaN. Rounding to nearest is that of bit
    strings: the code with one bit more between two codes is where it turns. Only zero rounds to zero.

    Raises:
        FormatError: The width is not one of 3 (takums: 6) to 16.
    """
    value, source, least = _TWO_SIDED[kind]
    if not least <= bits <= 16:
        raise FormatError(f"{kind}{bits} is not listed; choose {kind}{least} to {kind}16")
    top = 1 << (bits - 1)
    magnitudes = [value(code, bits) for code in range(1, top)]
    turns = [0.0, *(value(2 * code + 1, bits + 1) for code in range(1, top - 1))]
    return CodebookFormat(
        name=f"{kind}{bits}",
        values=(0.0, *magnitudes, 0.0, *(-magnitude for magnitude in reversed(magnitudes))),
        nan_code=top,
        thresholds=(*(-turn for turn in reversed(turns)), *turns),
        source=source,
    )


def _posit_value(code: int, bits: int) -> float:
    """Return the value of a positive code."""
    # 1. the regime: a run of equal bits behind the sign, ended by another bit
    width = bits - 1
    ones = code >> (width - 1)
    run = width - ((code ^ ((1 << width) - 1)) if ones else code).bit_length()
    # 2. exponent and fraction behind it, zeros where the code has ended
    exponent_and_fraction = 4 * ((code << (run + 1)) % (1 << width)) / (1 << width)
    exponent = 4 * (run - 1 if ones else -run) + int(exponent_and_fraction)
    return 2.0**exponent * (1 + exponent_and_fraction % 1)


def _takum_value(code: int, bits: int, *, linear: bool = False) -> float:
    """Return the value of a positive code."""
    # 1. direction and regime: how many bits the characteristic has, and its least value
    width = bits - 1
    direction, regime = divmod(code >> (width - 4), 8)
    length = regime if direction else 7 - regime
    least = (1 << length) - 1 if direction else 1 - (2 << length)
    # 2. characteristic and mantissa, zeros where the code has ended
    exponent_and_fraction = ((code << 4) % (1 << width)) / (1 << (width - length))
    if linear:
        return 2.0 ** (least + int(exponent_and_fraction)) * (1 + exponent_and_fraction % 1)
    return float(_EXP.exp(Decimal((least + exponent_and_fraction) / 2)))


_TWO_SIDED: dict[str, tuple[Callable[[int, int], float], str, int]] = {  # value of a positive code, source, least width
    "posit": (_posit_value, "Posit Working Group, Standard for Posit Arithmetic (2022)", 3),
    "takum": (_takum_value, "Hunhold, arXiv:2404.18603; logarithmic, values the nearest float64; libtakum 1.0.1", 6),
    "takum_linear": (partial(_takum_value, linear=True), "Hunhold, arXiv:2408.10594; libtakum 1.0.1", 6),
}
