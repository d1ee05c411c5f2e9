# SPDX-License-Identifier: Apache-2.0
"""Floats of 16 bits, alone and in pairs: PTX ISA 8.7, section 9.7.4."""

from collections.abc import Callable

from fmtsim.machine.ptx.float_instructions import extremum, mufu
from fmtsim.machine.ptx.gpu_numbers import bf16_to_f32, encode, f16_to_f32, high, is_tiny, joined, low, sum_odd
from fmtsim.machine.ptx.instruction_table import Opcode, row
from fmtsim.machine.ptx.values import Vector, where

# Floats of 16 bits, alone and in pairs (9.7.4)


def _halves(semantics: Callable, opcode: Opcode, *operands: Vector) -> Vector:
    """Apply the semantics of one float of 16 bits to both halves of pairs."""
    single = (*opcode[:-1], opcode[-1].removesuffix("x2"))
    return joined(*(semantics(single, *(half(x) for x in operands)).view("u16") for half in (low, high)))


@row("ex2.approx.{f16|f16x2}", "t", "t", "9.7.4.10")
@row("ex2.approx.ftz.{bf16|bf16x2}", "t", "t", "9.7.4.10")
@row("tanh.approx.{f16|f16x2|bf16|bf16x2}", "t", "t", "9.7.4.9")
def _approximate_16(opcode: Opcode, x: Vector) -> Vector:
    """Return the float32 unit's result cut off to 16 bits (all 2^16 arguments, H100)."""
    if opcode[-1].endswith("x2"):
        return _halves(_approximate_16, opcode, x)
    if opcode[-1] == "bf16":
        return (mufu(opcode[0], bf16_to_f32(x)).view("u32") >> 16).to("u16")
    result = mufu(opcode[0], f16_to_f32(x))
    code = encode(result.to("f64"), "f16", "rz")
    return where(result >= 65536.0, code.constant(0x7C00), code).to("u16")


@row("{add|sub|mul}{|.rn}{|.ftz}{|.sat}.{f16|f16x2}", "t", "t t", "9.7.4.1")
@row("{add|sub|mul}{|.rn}.{bf16|bf16x2}", "t", "t t", "9.7.4.1")
@row("fma.rn{|.ftz}{|.sat|.relu}.{f16|f16x2}", "t", "t t t", "9.7.4.4")
@row("fma.rn{|.relu}.{bf16|bf16x2}", "t", "t t t", "9.7.4.4")
def _arithmetic_16(opcode: Opcode, *operands: Vector) -> Vector:
    if opcode[-1].endswith("x2"):
        return _halves(_arithmetic_16, opcode, *operands)
    name, values = opcode[-1], [_value_16(x, opcode) for x in operands]
    if opcode[0] == "sub":
        values[1] = -values[1]
    # float64 holds a product exactly, and a sum rounded to odd: one rounding follows
    wide = values[0] * values[1] if opcode[0] in ("mul", "fma") else sum_odd(values[0], values[1])
    wide = sum_odd(wide, values[2]) if opcode[0] == "fma" else wide
    code = encode(wide, name, "rn")
    if "ftz" in opcode:
        code = where(is_tiny(wide, "rn", 11, 2.0**-14), code & 0x8000, code)
    if "sat" in opcode:
        one = code.constant(0x3C00)
        code = where(wide.isnan() | (code >= 0x8000), code.constant(0), where(code > 0x3C00, one, code))
    if "relu" in opcode:
        code = where((code >= 0x8000) & ~wide.isnan(), code.constant(0), code)
    return code.to("u16")


def _value_16(code: Vector, opcode: Opcode) -> Vector:
    """Return a code of 16 bits as float64."""
    x = f16_to_f32(code, flushes="ftz" in opcode) if opcode[-1].startswith("f16") else bf16_to_f32(code)
    return x.to("f64")


@row("{abs|neg}{|.ftz}.{f16|f16x2}", "t", "t", "9.7.4.6")
@row("{abs|neg}.{bf16|bf16x2}", "t", "t", "9.7.4.6")
def _sign_16(opcode: Opcode, x: Vector) -> Vector:
    if opcode[-1].endswith("x2"):
        return _halves(_sign_16, opcode, x)
    word = x.view("u16")
    if "ftz" in opcode:
        word = where((word & 0x7C00) == 0, word & 0x8000, word)
    result = word ^ 0x8000 if opcode[0] == "neg" else word & 0x7FFF
    infinity = 0x7C00 if opcode[-1] == "f16" else 0x7F80
    return where((word & 0x7FFF) > infinity, word.constant(0x7FFF), result)


@row("{min|max}{|.ftz}{|.NaN}{|.xorsign.abs}.{f16|f16x2}", "t", "t t", "9.7.4.9")
@row("{min|max}{|.NaN}{|.xorsign.abs}.{bf16|bf16x2}", "t", "t t", "9.7.4.9")
def _extremum_16(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    if opcode[-1].endswith("x2"):
        return _halves(_extremum_16, opcode, x, y)
    a, b = (_value_16(v, opcode).to("f32") for v in (x, y))
    if "xorsign" in opcode:  # of magnitudes; signs are those of the codes, NaN's too
        a, b = a.call("fabs"), b.call("fabs")
    result = extremum(tuple(m for m in opcode if m not in ("ftz", "xorsign", "abs")), a, b)
    code = encode(result.to("f64"), opcode[-1], "rn").to("u16")
    signs = (x.view("u16") ^ y.view("u16")) & 0x8000
    return where(result.isnan(), code, code | signs) if "xorsign" in opcode else code
