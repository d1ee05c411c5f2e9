# SPDX-License-Identifier: Apache-2.0
"""What PTX instructions compute, slowly and obviously: codes in, codes out, on Python's integers.

Written from the PTX ISA 8.7 (chapter 9.7) and from what ptxas makes of an instruction for sm_90a; nothing of the engine
is used but its MUFU without tanh, held to an H200 elsewhere. ``expected(opcode)`` is a function of the operands' codes
that returns the codes of the results. A float is (sign, magnitude): an integer in units of 2^-1074, ``INF`` or ``NAN``.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmtsim.cpu.runtime.jit import kernel
from fmtsim.machine import mufu

# To be compared with a GPU: what neither the ISA nor ptxas's machine code settles; opcodes, case, what is taken here.
# Recorded on an H100 since: NaN of float64 and of conversions, which keep what they can of a payload, xorsign of NaN,
# results with .ftz just below the normal numbers, fields of 64 bits beyond their end.
OPEN = (
    ("cvt.ftz.f32.bf16", "NaN", "0x7FFFFFFF"),
    ("{fma|cvt}.*.relu.*, *.sat.*", "-0", "+0"),
    ("bmsk.*, szext.*", "beyond 32 bits", "read from the ISA's text alone"),
)

Value = tuple[int, float] | None  # sign, magnitude in units of 2^-1074 (an exact integer, or INF); None is NaN
INF, NAN = math.inf, None
UNIT = 1074


def mask(bits: int) -> int:
    return (1 << bits) - 1


class Format(NamedTuple):
    """A float format: its bits, those of its mantissa, log2 of the least number, the largest code, its NaN."""

    bits: int
    mantissa: int
    least: int
    largest: int
    nan: int


FORMATS = {
    "f16": Format(16, 10, -24, 0x7BFF, 0x7FFF), "bf16": Format(16, 7, -133, 0x7F7F, 0x7FFF),
    "f32": Format(32, 23, -149, 0x7F7FFFFF, 0x7FFFFFFF), "f64": Format(64, 52, -1074, (0x7FF0 << 48) - 1, 0xFFF8 << 48),
    "tf32": Format(19, 10, -136, 0x3FBFF, 0x3FFFF),
    "e4m3": Format(8, 3, -9, 0x7E, 0x7F), "e5m2": Format(8, 2, -16, 0x7B, 0x7F),
}  # fmt: skip
MODES = {
    "rn": "rn",
    "rz": "rz",
    "rm": "rm",
    "rp": "rp",
    "rna": "rna",
    "rni": "rn",
    "rzi": "rz",
    "rmi": "rm",
    "rpi": "rp",
}


def signed(code: int, bits: int) -> int:
    return (code & mask(bits)) - ((code >> (bits - 1) & 1) << bits)


def number(kind: str, code: int) -> int:
    """Return the integer of a code of ``s32``, ``u16`` ..."""
    return signed(code, int(kind[1:])) if kind[0] == "s" else code & mask(int(kind[1:]))


def decode(kind: str, code: int, ftz: bool = False) -> Value:
    f = FORMATS[kind]
    sign, low = code >> (f.bits - 1) & 1, code & mask(f.bits - 1)
    if low > f.largest:
        return (sign, INF) if low == f.largest + 1 and kind != "e4m3" else NAN
    exponent, fraction = low >> f.mantissa, low & mask(f.mantissa)
    if exponent == 0:
        return sign, 0 if ftz else fraction << (f.least + UNIT)
    return sign, (fraction | 1 << f.mantissa) << (exponent - 1 + f.least + UNIT)


def rounded(sign: int, magnitude: int, shift: int, mode: str, more: bool = False) -> int:
    """Return magnitude / 2^shift as an integer; ``more``: the true magnitude is above the given one, by less than 1."""
    if shift <= 0:
        return magnitude << -shift
    quotient, rest, half = magnitude >> shift, magnitude & mask(shift), 1 << (shift - 1)
    up = {
        "rn": rest > half or (rest == half and (more or quotient & 1 == 1)),
        "rna": rest >= half,
        "rz": False,
        "rm": sign == 1 and (rest > 0 or more),
        "rp": sign == 0 and (rest > 0 or more),
    }[mode]
    return quotient + up


def encode(kind: str, value: Value, mods: Any = (), unit: int = UNIT, more: bool = False) -> int:
    """Round a value, in units of 2^-unit, once; ``mods`` may hold a direction, ftz, sat, relu, satfinite."""
    f = FORMATS[kind]
    if value is NAN:
        return 0 if "sat" in mods else f.nan
    sign, magnitude = value
    mode = next((MODES[m] for m in mods if m in MODES), "rn")
    if sign and ("sat" in mods or "relu" in mods):
        sign, magnitude, more = 0, 0, False
    if "sat" in mods and magnitude >= 1 << unit:
        magnitude, more = 1 << unit, False
    top = 1 << (f.bits - 1)
    if magnitude == INF:
        return sign * top | (f.largest if "satfinite" in mods else f.largest + 1)
    magnitude = int(magnitude)
    free = (
        magnitude.bit_length() - 1 - unit - f.mantissa
    )  # exponent of the last place without and with subnormal numbers
    if (
        "ftz" in mods
        and magnitude
        and rounded(sign, magnitude << 64, free + unit + 64, mode, more).bit_length() + free <= f.least + f.mantissa
    ):
        return sign * top  # rounded as if exponents had no end, it is below the normal numbers
    last = max(free, f.least)
    code = ((last - f.least) << f.mantissa) + rounded(sign, magnitude, last + unit, mode, more)
    if code > f.largest:
        towards_zero = mode == "rz" or mode == ("rp" if sign else "rm") or "satfinite" in mods
        code = f.largest + (not towards_zero)
    return sign * top | code


def nan_as(target: str, source: str, code: int) -> int:
    """Return a NaN in another format or the same: its sign, the upper bits of its fraction, and the quiet bit."""
    f, g = FORMATS[source], FORMATS[target]
    fraction = (code & mask(f.mantissa)) << g.mantissa >> f.mantissa
    return code >> f.bits - 1 << g.bits - 1 | g.largest + 1 | 1 << g.mantissa - 1 | fraction


def first_nan(*codes: int) -> int | None:
    """Return the first NaN of float64 codes, made quiet."""
    return next((nan_as("f64", "f64", code) for code in codes if decode("f64", code) is NAN), None)


def ftz_of(kind: str, mods: Any) -> bool:
    return "ftz" in mods and kind != "f64"


def halves(function: Callable[..., int], *codes: int) -> int:
    """Apply a function of 16 bits to both halves of 32."""
    return function(*(c & 0xFFFF for c in codes)) | function(*(c >> 16 for c in codes)) << 16


# Floats: one rounding of the exact result


def total(a: Value, b: Value, mode: str) -> Value:
    """Return a + b exactly; a zero of numbers of both signs is -0 only toward -Inf."""
    if a is NAN or b is NAN or (a[1] == b[1] == INF and a[0] != b[0]):
        return NAN
    if INF in (a[1], b[1]):
        return a if a[1] == INF else b
    whole = (-a[1] if a[0] else a[1]) + (-b[1] if b[0] else b[1])
    return (int(whole < 0) if whole else a[0] if a[0] == b[0] else int(mode == "rm")), abs(whole)


def product(a: Value, b: Value) -> Value:
    """Return a b exactly, in units of 2^-2148."""
    if a is NAN or b is NAN or (INF in (a[1], b[1]) and 0 in (a[1], b[1])):
        return NAN
    return a[0] ^ b[0], INF if INF in (a[1], b[1]) else a[1] * b[1]


def arithmetic(name: str, mods: Any, kind: str, *codes: int) -> int:
    a, b, *rest = (decode(kind, code, ftz_of(kind, mods)) for code in codes)
    mode = next((m for m in mods if m in MODES), "rn")
    if kind == "f64" and (nan := first_nan(*codes[1:], codes[0])) is not None:
        return nan
    if name in ("add", "sub"):
        negated = b if name == "add" or b is NAN else (1 - b[0], b[1])
        return encode(kind, total(a, negated, mode), mods)
    result = product(a, b)
    if rest:  # fma, mad
        c = rest[0]
        c = c if c is NAN or c[1] == INF else (c[0], int(c[1]) << UNIT)
        result = total(result, c, mode)
    return encode(kind, result, mods, 2 * UNIT)


def quotient(mods: Any, kind: str, x: int, y: int) -> int:
    a, b = (decode(kind, code, ftz_of(kind, mods)) for code in (x, y))
    if kind == "f64" and (nan := first_nan(x, y)) is not None:
        return nan
    if a is NAN or b is NAN or a[1] == b[1] == INF or a[1] == b[1] == 0:
        return encode(kind, NAN)
    sign = a[0] ^ b[0]
    if INF in (a[1], b[1]) or b[1] == 0:
        return encode(kind, (sign, INF if a[1] == INF or b[1] == 0 else 0), [])
    whole, rest = divmod(int(a[1]) << 2200, int(b[1]))
    return encode(kind, (sign, whole), mods, 2200, rest > 0)


def root(mods: Any, kind: str, x: int) -> int:
    a = decode(kind, x, ftz_of(kind, mods))
    if a is NAN or (a[0] and a[1]):
        return nan_as(kind, kind, x) if kind == "f64" and a is NAN else encode(kind, NAN)
    if a[1] in (0, INF):
        return encode(kind, a)
    whole = math.isqrt(int(a[1]) << 128)
    return encode(kind, (0, whole), mods, UNIT // 2 + 64, whole * whole != int(a[1]) << 128)


def one(kind: str) -> int:
    return encode(kind, (0, 1 << UNIT))


def flushed(kind: str, code: int, mods: Any) -> int:
    """Return a code, with ftz a zero of its sign where it is subnormal."""
    f = FORMATS[kind]
    subnormal = ftz_of(kind, mods) and code & mask(f.bits - 1) < 1 << f.mantissa
    return code & 1 << (f.bits - 1) if subnormal else code


def extreme(name: str, mods: Any, kind: str, x: int, y: int) -> int:
    f = FORMATS[kind]
    top = 1 << (f.bits - 1)
    x, y = flushed(kind, x, mods), flushed(kind, y, mods)
    sign = (x ^ y) & top
    if "xorsign" in mods:
        x, y = x & ~top, y & ~top
    nans = [decode(kind, code) is NAN for code in (x, y)]
    if all(nans) or (any(nans) and "NaN" in mods):
        return y | 1 << 51 if kind == "f64" else f.nan
    below = signed_order(f, x) < signed_order(f, y)
    chosen = y if nans[0] else x if nans[1] or below == (name == "min") else y
    return chosen & ~top | sign if "xorsign" in mods else chosen


def signed_order(f: Format, code: int) -> int:
    """Return an integer that orders floats, -0 below +0."""
    low = code & mask(f.bits - 1)
    return -low - 1 if code >> (f.bits - 1) else low


def of_one_float(name: str, mods: Any, kind: str, x: int) -> int:
    """neg and abs: sums with -0, which make NaN the unit's."""
    x = flushed(kind, x, mods)
    top = 1 << (FORMATS[kind].bits - 1)
    if decode(kind, x) is NAN:
        return nan_as(kind, kind, x) if kind == "f64" else encode(kind, NAN)
    return x ^ top if name == "neg" else x & ~top


def tested(kind: str, what: str, x: int) -> int:
    f, value = FORMATS[kind], decode(kind, x)
    low = x & mask(f.bits - 1)
    subnormal = 0 < low < 1 << f.mantissa
    finite = value is not NAN and value[1] != INF
    return int({
        "finite": finite, "infinite": value is not NAN and not finite, "number": value is not NAN,
        "notanumber": value is NAN,
        "normal": finite and not subnormal, "subnormal": subnormal,
    }[what])  # fmt: skip


# The special-function unit and what stands around it (SASS)


@cache
def compiled(name: str) -> Callable[[np.float32], np.float32]:
    function = getattr(mufu, name)

    @kernel
    def unit_kernel(x):
        return function(x)

    return unit_kernel


@cache
def tanh_segments() -> list[list[int]]:
    lines = (Path(mufu.__file__).parents[1] / "support/mufu.csv").read_text("utf-8").splitlines()
    return [[int(c) for c in line.split(",")[2:]] for line in lines if line.startswith("tanh,")]


def tanh(code: int) -> int:
    """The argument below 2^-8, 1 from 8 on; between, 1 to 16 segments a binade, cut off to 24 bits."""
    sign, magnitude = code >> 31, code & mask(31)
    if not 119 <= magnitude >> 23 < 130 or decode("f32", code) is NAN:
        small = code if magnitude >> 23 < 119 else sign << 31 | 0x3F800000
        return FORMATS["f32"].nan if decode("f32", code) is NAN else small
    # 1. 2^23 of these places are a segment; 17 of its bits count
    segments, binade = (1, 1, 1, 2, 2, 4, 4, 4, 8, 16, 8), (magnitude >> 23) - 119
    place = (magnitude & mask(23)) * segments[binade]
    c0, c1, c2 = tanh_segments()[sum(segments[:binade]) + (place >> 23)]
    x = (place & mask(23)) >> 6
    # 2. the square's partial products, each pair of bits once, without those of columns below 19
    pairs = [(i, j, 2 * i if i == j else i + j + 1) for i in range(17) for j in range(i + 1)]
    square = sum(1 << column - 19 for i, j, column in pairs if column >= 19 and x >> i & x >> j & 1)
    return encode("f32", (sign, (c0 << 17) + c1 * x + 4 * c2 * square << UNIT - 41), ["rz"])


def unit(name: str, code: int) -> int:
    if name == "tanh":
        return tanh(code)
    return int(np.float32(compiled(name)(np.uint32(code).view(np.float32))).view(np.uint32))


def unit_64(name: str, x: int) -> int:
    """rcp and rsqrt of float64: of the upper word, the result's lower word is 0; below the normal numbers a zero."""
    x = x >> 32 << 32
    value, sign, field = decode("f64", x), x >> 63, x >> 52 & 0x7FF
    if value is NAN or (sign and field and name == "rsqrt"):
        return mask(31) << 32
    if field in (0, 0x7FF):
        return sign << 63 | (0 if field else 0x7FF << 52)
    exponent = field - 1023
    over = exponent & 1 if name == "rsqrt" else 0  # arguments of a root are in [1, 4)
    result = decode("f32", unit(name, (127 + over) << 23 | (x >> 32 & mask(20)) << 3))
    power = (exponent - over) // 2 if name == "rsqrt" else exponent
    assert result is not NAN
    code = encode("f64", (sign, result[1]), ["rz"], UNIT + power) >> 32 << 32
    return code & 1 << 63 if code & mask(63) < 1 << 52 else code


def approximate_64(name: str, mods: Any, x: int) -> int:
    """rsqrt without .ftz: a step of Newton behind the unit; subnormal numbers are scaled before."""
    value = decode("f64", x)
    if "ftz" in mods or (value is not NAN and value[1] == 0) or value == (0, INF):
        return unit_64(name, x)
    if value is NAN:
        return nan_as("f64", "f64", x)
    if value[0] and value[1]:
        return 0xFFF8 << 48
    fma = partial(arithmetic, "fma", ["rn"], "f64")
    times, power = partial(arithmetic, "mul", [], "f64"), lambda k: (1023 + k) << 52
    tiny = x < 1 << 52
    x = times(x, power(54)) if tiny else x
    y = unit_64(name, x)
    error = fma(x, times(y, y) | 1 << 63, power(0))
    y = fma(fma(error, 0x3FD8 << 48, power(-1)), times(y, error), y)
    return times(y, power(27)) if tiny else y


def approximate_16(name: str, kind: str, x: int) -> int:
    """ex2 and tanh: the float32 unit's result cut off to 16 bits."""
    y = unit(name, encode("f32", decode(kind, x)))
    value = decode("f32", y)
    if kind == "bf16":
        return y >> 16
    return encode("f16", value, ["rz"]) if value is NAN or value[1] < 1 << UNIT + 16 else 0x7C00


def approximate(name: str, mods: Any, *codes: int) -> int:
    ftz = "ftz" in mods
    power = lambda k: (127 + k) << 23  # noqa: E731
    times = lambda x, k: arithmetic("mul", ["ftz"] if ftz else [], "f32", x, power(k))  # noqa: E731
    x = codes[-1]
    magnitude = x & mask(31)
    tiny, huge = not ftz and magnitude < power(-126), power(126) < magnitude <= 0x7F800000
    if name == "div":
        a, scale = codes[0], -2 if huge and "full" in mods else 24 if tiny else 0
        a, b = (times(a, scale), times(x, scale)) if scale else (a, x)
        return arithmetic("mul", ["ftz"] if ftz else [], "f32", unit("rcp", b), a)
    if name in ("sin", "cos", "tanh") or ftz:
        return unit(name, x)
    if name == "ex2":
        low = (
            x >> 31
            and power(6) - power(0)
            and signed_order(FORMATS["f32"], x) < signed_order(FORMATS["f32"], 0xC2FC0000)
        )
        if not low or magnitude > 0x7F800000:
            return unit(name, x)
        y = unit(name, times(x, -1))
        return arithmetic("mul", [], "f32", y, y)
    if name == "rcp":
        scale = -2 if huge else 24 if tiny else 0
        return times(unit(name, times(x, scale)), scale)
    if not tiny:
        return unit(name, x)
    y = unit(name, times(x, 24))
    return arithmetic("add", [], "f32", y, 0xC1C00000) if name == "lg2" else times(y, 12 if name == "rsqrt" else -12)


# Integers


def shifted(name: str, kind: str, x: int, by: int) -> int:
    bits = int(kind[1:])
    by = min(by, bits)
    return (number(kind, x) << by if name == "shl" else number(kind, x) >> by) & mask(bits)


def funnel(mods: Any, low: int, high: int, by: int) -> int:
    by = min(by, 32) if "clamp" in mods else by & 31
    whole = high << 32 | low
    return (whole << by >> 32 if "l" in mods else whole >> by) & mask(32)


def extracted(kind: str, x: int, start: int, length: int) -> int:
    bits = int(kind[1:])
    start, length = (
        (start & 255, length & 255) if bits == 32 else (start, length)
    )  # 64 bits: instructions that read all
    fill = kind[0] == "s" and length > 0 and x >> min(start + length - 1, bits - 1) & 1
    return sum((x >> (start + i) & 1 if i < length and start + i < bits else int(fill)) << i for i in range(bits))


def inserted(kind: str, x: int, y: int, start: int, length: int) -> int:
    bits = int(kind[1:])
    start, length = (start & 255, length & 255) if bits == 32 else (start, length)
    for i in range(min(length, max(bits - start, 0))):
        y = y & ~(1 << (start + i)) | (x >> i & 1) << (start + i)
    return y


def extended(mods: Any, kind: str, x: int, count: int) -> int:
    count = count & 31 if "wrap" in mods else min(count, 32)
    return 0 if count == 0 else (signed(x, count) if kind[0] == "s" else x & mask(count)) & mask(32)


def bit_mask(mods: Any, start: int, width: int) -> int:
    start, width = (start & 31, width & 31) if "wrap" in mods else (min(start, 32), min(width, 32))
    return (mask(width) << start) & mask(32)


def found(mods: Any, kind: str, x: int) -> int:
    value = number(kind, x)
    at = (value if value >= 0 else ~value).bit_length() - 1
    return mask(32) if at < 0 else int(kind[1:]) - 1 - at if "shiftamt" in mods else at


def permuted(mods: Any, x: int, y: int, choice: int) -> int:
    parts = [(y << 32 | x) >> 8 * i & 255 for i in range(8)]
    c = choice & 3
    order = {
        "f4e": [c + i for i in range(4)], "b4e": [(c - i) % 8 for i in range(4)], "rc8": [c] * 4,
        "ecl": [max(c, i) for i in range(4)],
        "ecr": [min(c, i) for i in range(4)], "rc16": [2 * (c & 1) + (i & 1) for i in range(4)],
    }  # fmt: skip
    mode = next((m for m in mods if m in order), None)
    if mode:
        taken = [parts[i] for i in order[mode]]
    else:
        nibbles = [choice >> 4 * i & 15 for i in range(4)]
        taken = [(255 * (parts[n & 7] >> 7) if n & 8 else parts[n & 7]) for n in nibbles]
    return sum(part << 8 * i for i, part in enumerate(taken))


def dot(name: str, mods: Any, kinds: list[str], x: int, y: int, c: int) -> int:
    wide = 8 if name == "dp4a" else 16
    first = 2 if "hi" in mods else 0
    pairs = [(x >> wide * i & mask(wide), y >> 8 * (first + i) & 255) for i in range(32 // wide)]
    return sum(number(f"{kinds[0][0]}{wide}", a) * number(f"{kinds[1][0]}8", b) for a, b in pairs) + c & mask(32)


def integer(name: str, mods: Any, kind: str, *codes: int) -> int:
    bits = int(kind[1:])
    x, *rest = (number(kind, code) for code in codes)
    y, z = (*rest, 0, 0)[:2]
    if name in ("mul", "mad"):
        whole = x * y
        if "wide" in mods:
            return whole + codes[2] if name == "mad" else whole
        return (whole >> bits if "hi" in mods else whole) + z
    if name in ("mul24", "mad24"):
        whole = number(f"{kind[0]}24", x) * number(f"{kind[0]}24", y)
        return (whole >> 16 if "hi" in mods else whole) + z
    if name in ("div", "rem"):
        if y == 0:
            return mask(bits)
        whole = abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)
        return whole if name == "div" else x - whole * y
    if name in ("add", "sub") and "sat" in mods:
        return max(-(1 << 31), min(mask(31), x + y if name == "add" else x - y))
    return int({
        "add": x + y, "sub": x - y, "min": min(x, y), "max": max(x, y), "sad": z + abs(x - y), "abs": abs(x),
        "neg": -x, "and": x & y,
        "or": x | y, "xor": x ^ y, "not": ~x, "cnot": x == 0, "popc": x.bit_count(), "clz": bits - x.bit_length(),
        "brev": int(f"{x:0{bits}b}"[::-1], 2) if kind[0] == "b" else 0,
    }[name])  # fmt: skip


def with_carry(name: str, mods: Any, kind: str, *codes: int) -> tuple[int, int]:
    """add.cc, addc, sub.cc, subc, mad.cc and madc: the result and the carry (of differences the borrow)."""
    bits, codes = int(kind[1:]), (*codes, 0)
    carry = codes[3] if name == "madc" else codes[2] if name in ("addc", "subc") else 0
    x, y = codes[:2]
    if name in ("mad", "madc"):
        whole = number(kind, x) * number(kind, y)
        x, y = (whole >> bits if "hi" in mods else whole) & mask(bits), codes[2]
    whole = x - y - carry if name.startswith("sub") else x + y + carry
    return whole & mask(bits), whole >> bits & 1


# Comparisons

_RELATIONS = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}  # fmt: skip
_RELATIONS |= {name: _RELATIONS[same] for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge"))}


def compared(relation: str, mods: Any, kind: str, x: int, y: int) -> bool:
    if kind not in FORMATS:
        return bool(_RELATIONS[relation](number(kind, x), number(kind, y)))
    a, b = decode(kind, x, ftz_of(kind, mods)), decode(kind, y, ftz_of(kind, mods))
    if a is NAN or b is NAN:
        return relation == "nan" or relation in ("equ", "neu", "ltu", "leu", "gtu", "geu")
    left, right = (-v[1] if v[0] else v[1] for v in (a, b))
    return relation == "num" or (relation != "nan" and bool(_RELATIONS[relation[:2]](left, right)))


def joined(mods: Any, holds: bool, third: tuple[int, ...]) -> int:
    if not third:
        return int(holds)
    return int(holds and third[0] if "and" in mods else holds or third[0] if "or" in mods else holds != third[0])


# Conversions


def converted(mods: Any, target: str, source: str, *codes: int) -> int:
    x = codes[0]
    if target == source == "f32" and not mods or target == source == "f64" and not mods:
        return x
    if target in ("f16x2", "bf16x2") and source == "f32":
        return encode(target[:-2], decode("f32", x), mods) << 16 | encode(target[:-2], decode("f32", codes[1]), mods)
    if target in ("e4m3x2", "e5m2x2"):
        high, low = (x >> 16, x & 0xFFFF) if source == "f16x2" else codes
        small = [encode(target[:-2], decode(source.removesuffix("x2"), code), mods) for code in (high, low)]
        return small[0] << 8 | small[1]
    if source in ("e4m3x2", "e5m2x2"):
        wide = [encode("f16", decode(source[:-2], code), mods) for code in (x >> 8, x & 255)]
        return wide[0] << 16 | wide[1]
    ints = [kind not in FORMATS for kind in (target, source)]
    if ints[0]:
        bits = int(target[1:])
        least, most = (-(1 << (bits - 1)), mask(bits - 1)) if target[0] == "s" else (0, mask(bits))
        if ints[1]:
            value = number(source, x)
            return max(least, min(most, value)) if "sat" in mods else value
        a = decode(source, x, "ftz" in mods and source == "f32")
        if a is NAN:
            return 1 << (bits - 1) if bits == 64 or (source == "f64" and bits == 32) else 0
        mode = next(MODES[m] for m in mods if m in MODES)
        magnitude = 1 << 64 if a[1] == INF else rounded(a[0], int(a[1]), UNIT, mode)
        return max(least, min(most, -magnitude if a[0] else magnitude))
    if ints[1]:
        value = number(source, x)
        return encode(target, (int(value < 0), abs(value) << UNIT), mods)
    a = decode(source, x, "ftz" in mods and source == "f32")
    integral = next((m for m in mods if m in ("rni", "rzi", "rmi", "rpi")), None)
    if integral and a is not NAN and a[1] != INF:
        a = a[0], rounded(a[0], int(a[1]), UNIT, MODES[integral]) << UNIT
    if target == "tf32":
        if a is NAN:  # rna looks at bits: a NaN loses the lower ones, or comes down to a number
            cut = x & 0xFFFFE000
            return cut - 0x2000 if "satfinite" in mods else cut if "rna" in mods else 0x7FFFE000
        return encode("tf32", a, mods) << 13
    if (target, source) == ("f32", "bf16") and not mods:
        return x << 16
    if a is NAN and "f64" in (target, source) and "sat" not in mods:
        return nan_as(target, source, mask(31) if "ftz" in mods and source == "f32" else x)
    return encode(target, a, [m for m in mods if m != "ftz" or target == "f32"])


@cache
def expected(opcode: str) -> Callable[..., tuple[int, ...]]:
    """Return a function of the codes of an opcode's operands: those of its results, not yet cut to registers."""
    name, *parts = opcode.split(".")
    kind, mods = parts[-1], parts[:-1]

    def single(function: Callable[..., int], *fixed: Any) -> Callable[..., tuple[int, ...]]:
        return lambda *codes: (int(function(*fixed, *codes)),)

    if name == "cvt":
        if parts[0] == "pack":
            return lambda a, b: (
                sum((converted(["sat"], parts[-2], "s32", v) & 0xFFFF) << s for v, s in ((a, 16), (b, 0))),
            )
        return single(converted, parts[:-2], parts[-2], parts[-1])
    if name in ("setp", "set"):
        relation, mods = parts[0], parts[1:]

        def relate(x: int, y: int, *third: int) -> tuple[int, ...]:
            if kind.endswith("x2"):
                pairs = ((x & 0xFFFF, y & 0xFFFF), (x >> 16, y >> 16))
                lower, upper = (joined(mods, compared(relation, mods, kind[:-2], *pair), third) for pair in pairs)
                if name == "set":  # 1.0 of each half
                    return ((lower | upper << 16) * {"f16": 0x3C00, "bf16": 0x3F80}[kind[:-2]],)
                return lower, upper
            holds = compared(relation, mods, kind, x, y)
            if name == "setp":
                return joined(mods, holds, third), joined(mods, not holds, third)
            ones = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(parts[-2], mask(32))
            return (joined(mods, holds, third) * ones,)

        return relate
    if name == "selp":
        return lambda x, y, p: (x if p else y,)
    if name == "slct":
        return lambda x, y, c: (
            x if (compared("ge", mods, "f32", c, 0) if kind == "f32" else signed(c, 32) >= 0) else y,
        )
    if name == "mov":
        return lambda x: (x,)
    if kind == "pred":
        return single(
            {"and": lambda p, q: p & q, "or": lambda p, q: p | q, "xor": lambda p, q: p ^ q, "not": lambda p: 1 - p}[
                name
            ]
        )
    if name == "prmt":
        return single(permuted, mods + [kind])
    if name in ("addc", "subc", "madc") or "cc" in mods:
        return partial(with_carry, name, mods, kind)
    if name in ("dp4a", "dp2a"):
        return single(dot, name, mods, parts[-2:])
    if name in ("shl", "shr"):
        return single(shifted, name, kind.replace("b", "u"))
    named = {"shf": (funnel, mods), "bfe": (extracted, kind), "bfi": (inserted, kind), "szext": (extended, mods, kind),
             "bmsk": (bit_mask, mods), "bfind": (found, mods, kind)}  # fmt: skip
    if name in named:
        return single(*named[name])
    # floats and integers of one type; pairs of 16 bits by halves
    base = kind.removesuffix("x2")
    is_float = base in FORMATS
    function: Callable[..., int]
    if is_float and ("approx" in mods or "full" in mods):
        function = {"f32": partial(approximate, name, mods), "f64": partial(approximate_64, name, mods)}.get(
            kind, partial(approximate_16, name, base))  # fmt: skip
    elif is_float and name in ("add", "sub", "mul", "fma", "mad"):
        function = partial(arithmetic, name, mods, base)
    elif is_float and name in ("min", "max"):
        function = partial(extreme, name, mods, base)
    elif is_float and name in ("neg", "abs"):
        function = partial(of_one_float, name, mods, base)
    elif name == "copysign":
        top = 1 << (FORMATS[kind].bits - 1)
        function = lambda x, y: y & ~top | x & top  # noqa: E731
    elif name == "testp":
        function = partial(tested, kind, mods[0])
    elif is_float:
        divides = {"div": lambda *c: quotient(mods, kind, *c), "rcp": lambda x: quotient(mods, kind, one(kind), x)}
        function = {**divides, "sqrt": lambda x: root(mods, kind, x)}[name]
    else:
        function = partial(integer, name, mods, base)
    if base == kind:
        return single(function)
    return single(halves, lambda *codes: function(*codes) & 0xFFFF)


# What the 32 threads of a warp do together (9.7.9.6, 9.7.13)


def shuffled(kind: str, values: list[int], lanes: list[int], clamps: list[int]) -> tuple[list[int], list[int]]:
    """shfl.sync: what each lane gets, and its predicate."""
    results, inside = [], []
    for lane in range(32):
        by, clamp, segment = lanes[lane] & 31, clamps[lane] & 31, clamps[lane] >> 8 & 31
        end = lane & segment | clamp & ~segment & 31
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": lane & segment | by & ~segment & 31}[
            kind
        ]
        holds = source >= end if kind == "up" else source <= end
        results.append(values[source if holds else lane])
        inside.append(int(holds))
    return results, inside


def voted(kind: str, predicates: list[int], members: int) -> int:
    votes = [p for lane, p in enumerate(predicates) if members >> lane & 1]
    if kind == "ballot":
        return sum(p << lane for lane, p in enumerate(predicates) if members >> lane & 1)
    return int({"all": all(votes), "any": any(votes), "uni": len(set(votes)) == 1}[kind])


def matched(kind: str, values: list[int], members: int) -> tuple[list[int], int]:
    """match.sync: the mask of each lane, and the predicate of match.all."""
    masks = [sum(1 << i for i in range(32) if members >> i & 1 and values[i] == value) for value in values]
    same = len({values[i] for i in range(32) if members >> i & 1}) == 1
    return (masks if kind == "any" else [members if same else 0] * 32), int(same)


def reduced(name: str, kind: str, values: list[int], members: int) -> int:
    taken = [number(kind.replace("b", "u"), value) for lane, value in enumerate(values) if members >> lane & 1]
    whole = {"add": sum(taken), "min": min(taken), "max": max(taken)}.get(name, taken[0])
    for value in taken[1:]:
        whole = {"and": whole & value, "or": whole | value, "xor": whole ^ value}.get(name, whole)
    return whole & mask(32)


def logic(table: int, x: int, y: int, z: int) -> int:
    """lop3: bit 4 x + 2 y + z of the table for each bit."""
    return sum((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))
