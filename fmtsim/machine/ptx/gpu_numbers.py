# SPDX-License-Identifier: Apache-2.0
"""Floating point on traced vectors: one rounding to any format in any direction, and what a GPU does with NaN.

A GPU's arithmetic returns one NaN, whatever NaN came in: 0x7FFFFFFF of float32, 0x7FFF of 16 bits.
"""

from typing import NamedTuple

from fmtsim.machine.ptx.values import Vector, bits, where


class Small(NamedTuple):
    """A format of results: its fields, its largest code, and what stands for Inf and NaN."""

    exponent_bits: int
    mantissa_bits: int
    largest: int  # code
    infinity: int  # code; that of the largest number where there is no Inf
    nan: int  # code


SMALL = {
    "f16": Small(5, 10, 0x7BFF, 0x7C00, 0x7FFF), "bf16": Small(8, 7, 0x7F7F, 0x7F80, 0x7FFF),
    "tf32": Small(8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF), "f32": Small(8, 23, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
    "e4m3": Small(4, 3, 0x7E, 0x7E, 0x7F), "e5m2": Small(5, 2, 0x7B, 0x7C, 0x7F),
}  # fmt: skip


def canonical(x: Vector) -> Vector:
    """Replace every NaN by the GPU's."""
    word, top = x.view(f"u{bits(x.kind)}"), 1 << (bits(x.kind) - 1)
    infinity = (0xFF << 23) if bits(x.kind) == 32 else 0x7FF << 52
    return where((word & (top - 1)) > infinity, x.constant((1 << (bits(x.kind) - 1)) - 1), x)


def flush(x: Vector) -> Vector:
    """Replace subnormal float32 by zeros of their sign (.ftz)."""
    return where((x.view("u32") & 0x7F800000) == 0, x.view("u32") & 0x80000000, x.view("u32")).view("f32")


def is_tiny(exact: Vector, direction: str, digits: int, smallest: float) -> Vector:
    """Return where a float64, rounded to some digits with any exponent, is below the smallest normal number.

    That is what .ftz makes zero (H100: 2^-126 (1 - 2^-46) stays 2^-126, 2^-126 (1 - 2^-24) becomes 0).
    """
    magnitude = exact.call("fabs")
    if direction == "rn":  # a tie is rounded up, to an even number
        return magnitude < smallest * (1.0 - 2.0 ** -(digits + 1))
    if direction == "rz":
        return magnitude < smallest
    away = (exact < 0.0) if direction == "rm" else (exact > 0.0)
    return where(away, magnitude <= smallest * (1.0 - 2.0**-digits), magnitude < smallest)


def flush_tiny(x: Vector, exact: Vector, direction: str = "rn") -> Vector:
    """Return a float32 result with .ftz; ``exact`` is what was rounded, as float64, exact or rounded to odd."""
    zero = (x.view("u32") & 0x80000000).view("f32")
    return where(is_tiny(exact, direction, 24, 2.0**-126), zero, x)


def propagate(result: Vector, *operands: Vector) -> Vector:
    """Return a float64 result; NaN is the first of these operands that is NaN, quiet, or 0xFFF8000000000000."""
    quiet = 1 << 51
    nan = result.constant(0xFFF8000000000000).view("u64")
    for operand in operands[::-1]:
        nan = where(operand.isnan(), operand.view("u64") | quiet, nan)
    return where(result.isnan(), nan, result.view("u64")).view("f64")


def narrowed_nan(x: Vector, name: str) -> Vector:
    """Return the code (u32) of float64 NaN in a format: sign, upper bits of the fraction, quiet bit."""
    fmt, word = SMALL[name], x.view("u64")
    fraction = ((word >> (52 - fmt.mantissa_bits)) & ((1 << fmt.mantissa_bits) - 1)) | (1 << (fmt.mantissa_bits - 1))
    sign = (word >> 63) << (fmt.exponent_bits + fmt.mantissa_bits)
    return (fraction | fmt.infinity | sign).to("u32")


def saturate(x: Vector) -> Vector:
    """Clamp to [0, 1]; NaN becomes +0 (.sat)."""
    return where(x >= 1.0, 1.0, where(x > 0.0, x, 0.0))


def finish(x: Vector, opcode: tuple[str, ...]) -> Vector:
    """Return a float32 result as .ftz and .sat leave it."""
    x = flush(canonical(x)) if "ftz" in opcode else canonical(x)
    return saturate(x) if "sat" in opcode else x


def to_odd(x: Vector, lost: Vector) -> Vector:
    """Return float64 x, of which a rounding lost something of this sign, rounded to odd instead.

    A second rounding to 51 bits or fewer is then that of the exact number.
    """
    code = x.view("s64")
    odd = where(where(lost > 0.0, x > 0.0, x < 0.0), code + 1, code - 1)
    even = (code & 1) == 0
    return where(((lost > 0.0) | (lost < 0.0)) & ((x - x) == 0.0) & even, odd, code).view("f64")


def sum_odd(a: Vector, b: Vector) -> Vector:
    """Return a + b of float64 rounded to odd."""
    total = a + b
    part = total - a
    return to_odd(total, (a - (total - part)) + (b - part))


def encode(x: Vector, name: str, direction: str, *, saturates: bool = False) -> Vector:
    """Round float64 once to a format, and return its codes as u32; x is exact, or rounded to odd.

    Numbers above the largest become Inf, or the largest where the direction or ``saturates`` says so.
    """
    fmt = SMALL[name]
    word = x.view("u64")
    negative, magnitude = (word >> 63) != 0, word & 0x7FFFFFFFFFFFFFFF
    lowest = (
        1024 - (1 << (fmt.exponent_bits - 1)) + 1
    )  # float64's exponent field of the format's smallest normal number
    # 1. significand with its leading 1, and the bits that go: more of them below the normal numbers
    field = magnitude >> 52
    significand = (magnitude & ((1 << 52) - 1)) | where(field != 0, word.constant(1 << 52), 0)
    held = field.call("umax", lowest)
    dropped = (held - field.call("umax", 1) + (52 - fmt.mantissa_bits)).call("umin", 55)
    kept = significand >> dropped
    half = word.constant(1) << (dropped - 1)
    rest = significand & ((half << 1) - 1)
    # 2. one place up, as the direction says
    ups = {
        "rn": (rest > half) | ((rest == half) & ((kept & 1) != 0)),
        "rna": rest >= half,
        "rz": rest < 0,
        "rm": negative & (rest != 0),
        "rp": ~negative & (rest != 0),
    }
    kept = kept + where(ups[direction], word.constant(1), 0)
    # 3. exponent and significand in one integer: the leading 1 counts the exponent up
    code = kept + ((held - lowest) << fmt.mantissa_bits)
    # 4. what is too large, Inf and NaN
    largest, infinity = word.constant(fmt.largest), word.constant(fmt.infinity)
    if saturates:
        infinity = largest
    over = {"rz": largest, "rm": where(negative, infinity, largest), "rp": where(negative, largest, infinity)}
    code = where(code > fmt.largest, over.get(direction, infinity), code)
    code = where(magnitude == 0x7FF << 52, infinity, code)
    sign = where(negative, word.constant(1 << (fmt.exponent_bits + fmt.mantissa_bits)), 0)
    return where(magnitude > 0x7FF << 52, word.constant(fmt.nan), code | sign).to("u32")


def f16_to_f32(code: Vector, *, flushes: bool = False) -> Vector:
    """Return float16 of codes (b16); NaN becomes the GPU's."""
    wide = code.view("u16").to("u32")
    if flushes:
        wide = where((wide & 0x7C00) == 0, wide & 0x8000, wide)
    magnitude = wide & 0x7FFF
    number = (magnitude << 13).view("f32") * 2.0**112  # the exponent's new bias; subnormal numbers come out normal
    infinite = (magnitude << 13) | 0x7F800000
    number = where(magnitude >= 0x7C00, infinite, number.view("u32"))
    return canonical((number | ((wide & 0x8000) << 16)).view("f32"))


def bf16_to_f32(code: Vector) -> Vector:
    """Return bfloat16 of codes (b16), every bit of NaN kept."""
    return (code.view("u16").to("u32") << 16).view("f32")


def f32_to_bf16(x: Vector) -> Vector:
    """Return float32 rounded to nearest even, as codes (u16)."""
    word = x.view("u32")
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return where(x.isnan(), word.constant(0x7FFF), rounded).to("u16")


def small_to_f32(code: Vector, name: str) -> Vector:
    """Return the values of codes (u32) of an 8-bit or smaller format."""
    fmt = SMALL[name]
    top = fmt.exponent_bits + fmt.mantissa_bits
    magnitude = code & ((1 << top) - 1)
    bias = (1 << (fmt.exponent_bits - 1)) - 1
    number = (magnitude << (23 - fmt.mantissa_bits)).view("f32") * 2.0 ** (127 - bias)
    word = number.view("u32") | (((code >> top) & 1) << 31)
    if name == "e4m3":
        word = where(magnitude == fmt.nan, code.constant(0x7FFFFFFF), word)
    elif name == "e5m2":
        word = where(
            magnitude == 0x7C,
            (word & 0x80000000) | 0x7F800000,
            where(magnitude > 0x7C, code.constant(0x7FFFFFFF), word),
        )
    return word.view("f32")


def low(pair: Vector) -> Vector:
    """Return the lower half of b32."""
    return pair.view("u32").to("u16")


def high(pair: Vector) -> Vector:
    """Return the upper half of b32."""
    return (pair.view("u32") >> 16).to("u16")


def joined(lower: Vector, upper: Vector) -> Vector:
    """Return two u16 as one b32."""
    return lower.to("u32") | (upper.to("u32") << 16)
