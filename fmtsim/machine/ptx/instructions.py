# SPDX-License-Identifier: Apache-2.0
"""What PTX instructions compute, one row each: the opcode with every modifier and type, its semantics, its section of the ISA.

An opcode that no row spells is refused: a modifier or a type that is not known is never taken for another. Rows are
instructions of one thread, from registers to registers; ``block`` has memory, control and what threads do together.

Source: PTX ISA 8.7, chapter 9.7; what the approximations are made of was read from SASS and compared with an H100
(``tests/machine/ptx/test_instructions.py``).
"""

import itertools
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import types

from fmtsim.machine import mufu as mufu_unit
from fmtsim.machine.ptx.block import c_address, lanes_of
from fmtsim.machine.ptx.numbers import (
    bf16_to_f32,
    canonical,
    encode,
    f16_to_f32,
    f32_to_bf16,
    finish,
    flush,
    flush_tiny,
    high,
    is_tiny,
    joined,
    low,
    narrowed_nan,
    propagate,
    saturate,
    small_to_f32,
    sum_odd,
    to_odd,
)
from fmtsim.machine.ptx.values import Vector, apply, bits, constant, where

Opcode = tuple[str, ...]


class Row(NamedTuple):
    """The semantics of one spelled opcode."""

    semantics: Callable[..., Any]  # of the operands' vectors
    results: tuple[str, ...]  # kinds
    operands: tuple[str, ...]
    section: str  # of the PTX ISA


TABLE: dict[str, Row] = {}
_KINDS = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "tf32": "b32", "u16x2": "b32", "s16x2": "b32"}


def spelled(pattern: str) -> list[str]:
    """Return the opcodes of a pattern: ``add{|.sat}.{s32|u32}`` is four."""
    parts = [part.split("|") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def row(pattern: str, results: str, operands: str, section: str) -> Callable[[Callable], Callable]:
    """Add the rows of a pattern; kinds are names, or ``t`` for the opcode's last type, ``w`` for one of twice its width,
    ``d`` for the last but one, ``p`` for a predicate where the opcode joins one (``setp.lt.and.s32``).

    The semantics takes the opcode, then the operands.
    """

    def add(semantics: Callable) -> Callable:
        for name in spelled(pattern):
            opcode = tuple(name.split("."))
            last = _KINDS.get(opcode[-1], opcode[-1])
            wide = f"{last[0]}{2 * bits(last)}" if "w" in results.split() else ""
            named = {"t": last, "w": wide, "d": _KINDS.get(opcode[-2], opcode[-2])}
            named |= {"p": "pred"} if {"and", "or", "xor"} & set(opcode[1:]) else {"p": ""}
            kinds = [tuple(k for kind in text.split() if (k := named.get(kind, kind))) for text in (results, operands)]
            assert name not in TABLE, name
            TABLE[name] = Row(partial(semantics, opcode), kinds[0], kinds[1], section)
        return semantics

    return add


_ANY_INT = "{u16|s16|u32|s32|u64|s64}"
_BITS = "{b16|b32|b64}"
_FTZ = "{|.ftz}"


# Integers (9.7.1)


@row("{add|sub|mul.lo|min|max}." + _ANY_INT, "t", "t t", "9.7.1")
@row("{and|or|xor}." + _BITS, "t", "t t", "9.7.8")
@row("{and|or|xor}.pred", "pred", "pred pred", "9.7.8")
def _two_integers(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    match opcode[0]:
        case "add":
            return x + y
        case "sub":
            return x - y
        case "mul":
            return x * y
        case "and":
            return x & y
        case "or":
            return x | y
        case "xor":
            return x ^ y
    return x.call(f"{'s' if x.kind[0] == 's' else 'u'}{opcode[0]}", y)


@row("{add|sub}.sat.s32", "t", "t t", "9.7.1.1")
def _saturated_sum(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    return x.call(f"s{opcode[0]}.sat", y)


@row("{add|min|max}.{u16x2|s16x2}", "t", "t t", "9.7.1")
def _pair_of_integers(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    kind = opcode[1][:3]
    halves = [_two_integers(opcode, part(x).view(kind), part(y).view(kind)).view("u16") for part in (low, high)]
    return joined(*halves)


@row("mul.hi.{u16|s16|u32|s32}", "t", "t t", "9.7.1.3")
@row("mul.wide.{u16|s16|u32|s32}", "w", "t t", "9.7.1.3")
@row("mad.wide.{u16|s16|u32|s32}", "w", "t t w", "9.7.1.4")
@row("mad.hi.{u16|s16|u32|s32}", "t", "t t t", "9.7.1.4")
@row("mad.lo." + _ANY_INT, "t", "t t t", "9.7.1.4")
def _product(opcode: Opcode, x: Vector, y: Vector, z: Vector | None = None) -> Vector:
    kind, wide = x.kind, f"{x.kind[0]}{2 * bits(x.kind)}"
    product = x * y if opcode[1] == "lo" else x.to(wide) * y.to(wide)
    if opcode[1] == "hi":
        product = (product >> bits(kind)).to(kind)
    return product if z is None else product + z


@row("mul.hi.{u64|s64}", "t", "t t", "9.7.1.3")
@row("mad.hi.{u64|s64}", "t", "t t t", "9.7.1.4")
def _high_of_64(opcode: Opcode, x: Vector, y: Vector, z: Vector | None = None) -> Vector:
    mask = 0xFFFFFFFF
    a, b = x.view("u64"), y.view("u64")
    # 1. four products of halves; 2. the carry of the middle ones
    ll, lh, hl, hh = (a & mask) * (b & mask), (a & mask) * (b >> 32), (a >> 32) * (b & mask), (a >> 32) * (b >> 32)
    middle = (ll >> 32) + (lh & mask) + (hl & mask)
    product = hh + (lh >> 32) + (hl >> 32) + (middle >> 32)
    if x.kind == "s64":  # a negative factor counts 2^64 too much
        product = product - where(x < 0, b, 0) - where(y < 0, a, 0)
    product = product.view(x.kind)
    return product if z is None else product + z


@row("mul24.{lo|hi}.{u32|s32}", "t", "t t", "9.7.1.5")
@row("mad24.{lo|hi}.{u32|s32}", "t", "t t t", "9.7.1.6")
def _product_24(opcode: Opcode, x: Vector, y: Vector, z: Vector | None = None) -> Vector:
    wide = f"{x.kind[0]}64"
    product = ((x << 8) >> 8).to(wide) * ((y << 8) >> 8).to(wide)
    result = (product >> (0 if opcode[1] == "lo" else 16)).to(x.kind)
    return result if z is None else result + z


@row("{add|sub}.cc.{u32|s32|u64|s64}", "t pred", "t t", "9.7.2")
@row("{addc|subc}{|.cc}.{u32|s32|u64|s64}", "t pred", "t t pred", "9.7.2")
def _with_carry(opcode: Opcode, x: Vector, y: Vector, carry: Vector | None = None) -> tuple[Vector, Vector]:
    kind = f"u{bits(x.kind)}"
    a, b = x.view(kind), y.view(kind)
    if opcode[0].startswith("sub"):  # the flag is the borrow
        borrow = a.constant(0) if carry is None else where(carry, a.constant(1), 0)
        out = (a < b) if carry is None else (a < b) | ((a == b) & carry)
        return (a - b - borrow).view(x.kind), out
    total = a + b
    out = total < a
    if carry is not None:
        total = total + where(carry, a.constant(1), 0)
        out = out | ((total == 0) & carry)
    return total.view(x.kind), out


@row("mad.{lo|hi}.cc.{u32|s32|u64|s64}", "t pred", "t t t", "9.7.2")
@row("madc.{lo|hi}{|.cc}.{u32|s32|u64|s64}", "t pred", "t t t pred", "9.7.2")
def _product_with_carry(opcode: Opcode, x: Vector, y: Vector, z: Vector, carry: Vector | None = None) -> Any:
    product = TABLE[f"mul.{opcode[1]}.{opcode[-1]}"].semantics(x, y)
    return _with_carry(("add",), product, z) if carry is None else _with_carry(("addc",), product, z, carry)


@row("{div|rem}." + _ANY_INT, "t", "t t", "9.7.1.9")
def _quotient(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    # by zero: all bits set, as a GPU's routine leaves them; INT_MIN / -1 is INT_MIN
    zero, minus = y == 0, (y == -1) if x.kind[0] == "s" else (y == 0)
    by = where(zero | minus, y.constant(1), y)
    if opcode[0] == "rem":
        return where(zero, x.constant(-1), where(minus, x.constant(0), x % by))
    return where(zero, x.constant(-1), where(minus, -x, x // by))


@row("sad." + _ANY_INT, "t", "t t t", "9.7.1.7")
def _distance(opcode: Opcode, x: Vector, y: Vector, z: Vector) -> Vector:
    return where(x < y, y - x, x - y) + z


@row("{abs|neg}.{s16|s32|s64}", "t", "t", "9.7.1.12")
@row("not." + _BITS, "t", "t", "9.7.8.4")
@row("not.pred", "pred", "pred", "9.7.8.4")
@row("cnot." + _BITS, "t", "t", "9.7.8.5")
@row("brev.{b32|b64}", "t", "t", "9.7.1.21")
@row("{popc|clz}.{b32|b64}", "u32", "t", "9.7.1.15")
def _one_integer(opcode: Opcode, x: Vector) -> Vector:
    match opcode[0]:
        case "abs":
            return where(x < 0, -x, x)
        case "neg":
            return -x
        case "not":
            return ~x
        case "cnot":
            return where(x == 0, x.constant(1), 0)
        case "brev":
            return x.call("bitreverse")
        case "popc":
            return x.call("ctpop").to("u32")
    return x.view(f"u{bits(x.kind)}").call("ctlz").to("u32")


@row("bfind{|.shiftamt}.{u32|s32|u64|s64}", "u32", "t", "9.7.1.17")
def _first_bit(opcode: Opcode, x: Vector) -> Vector:
    word = where(x < 0, ~x, x) if x.kind[0] == "s" else x  # the first bit that is not the sign
    word = word.view(f"u{bits(x.kind)}")
    zeros = word.call("ctlz").to("u32")
    place = zeros if "shiftamt" in opcode else zeros.constant(bits(x.kind) - 1) - zeros
    return where(word == 0, place.constant(-1), place)


@row("bfe.{u32|s32|u64|s64}", "t", "t u32 u32", "9.7.1.19")
def _bit_field(opcode: Opcode, x: Vector, start: Vector, length: Vector) -> Vector:
    size = bits(x.kind)
    if size == 32:  # the unit reads 8 bits; of 64 bits instructions make the field, which read all
        start, length = start & 0xFF, length & 0xFF
    start, length = start.call("umin", size), length.call("umin", size)
    # 1. shift the field down (twice, where a shift by all bits is none); signed fields begin with their own top bit
    wide = (lambda v: v.to(x.kind)) if size == 64 else (lambda v: v.view(x.kind))
    ends = (start + length).call("umin", size)
    at_top = (start.constant(size) - ends).call("umin", size - 1)
    up = x << wide(at_top)
    down = start.constant(size) - (ends - start.call("umin", size))
    clipped = down.call("umin", size - 1)
    field = up >> wide(clipped)
    # 2. no bits of an unsigned field are 0; behind the end stands the sign
    if x.kind[0] == "u":
        return where((length == 0) | (start >= size), x.constant(0), field)
    sign = x >> (size - 1)
    return where(length == 0, x.constant(0), where(start >= size, sign, field))


@row("bfi.{b32|b64}", "t", "t t u32 u32", "9.7.1.20")
def _insert_bits(opcode: Opcode, x: Vector, y: Vector, start: Vector, length: Vector) -> Vector:
    size = bits(x.kind)
    if size == 32:
        start, length = start & 0xFF, length & 0xFF
    length = length.call("umin", size)
    wide = (lambda v: v.to(x.kind)) if size == 64 else (lambda v: v.view(x.kind))
    ones = x.constant(-1).view(f"u{size}") >> wide(start.constant(size - 1) - (length.call("umax", 1) - 1)).view(
        f"u{size}"
    )
    mask = (ones << wide(start.call("umin", size - 1)).view(f"u{size}")).view(x.kind)
    moved = x << wide(start.call("umin", size - 1))
    return where((length == 0) | (start >= size), y, (moved & mask) | (y & ~mask))


@row("szext.{clamp|wrap}.{u32|s32}", "t", "t u32", "9.7.1.18")
def _extend(opcode: Opcode, x: Vector, n: Vector) -> Vector:
    n = n & 31 if opcode[1] == "wrap" else n.call("umin", 32)
    shift = (n.constant(32) - n).call("umin", 31).view(x.kind)
    return where(n == 0, x.constant(0), where(n >= 32, x, (x << shift) >> shift))


@row("bmsk.{clamp|wrap}.b32", "t", "u32 u32", "9.7.1.22")
def _bit_mask(opcode: Opcode, a: Vector, b: Vector) -> Vector:
    wrap = opcode[1] == "wrap"
    a, b = (a & 31, b & 31) if wrap else (a, b.call("umin", 32))
    ones = where(b >= 32, b.constant(-1), (b.constant(1) << b.call("umin", 31)) - 1)
    return where(a >= 32, a.constant(0), ones << a.call("umin", 31)).view("b32")


@row("dp4a.{u32|s32}.{u32|s32}", "s32", "u32 u32 s32", "9.7.1.23")
@row("dp2a.{lo|hi}.{u32|s32}.{u32|s32}", "s32", "u32 u32 s32", "9.7.1.24")
def _dot(opcode: Opcode, x: Vector, y: Vector, z: Vector) -> Vector:
    """Add 4 products of bytes, or 2 of 16 bits with bytes, without a saturation."""
    kinds = ["s" if kind == "s32" else "u" for kind in opcode[-2:]]

    def part(word: Vector, signed: str, at: int, size: int) -> Vector:
        return (word << (32 - size - at)).view(f"{signed}32") >> (32 - size)

    for i in range(4 if opcode[0] == "dp4a" else 2):
        wide = 8 if opcode[0] == "dp4a" else 16
        skip = 16 if opcode[1] == "hi" else 0
        z = z + part(x, kinds[0], wide * i, wide).view("s32") * part(y, kinds[1], skip + 8 * i, 8).view("s32")
    return z


@row("shl." + _BITS, "t", "t u32", "9.7.8.8")
@row("shr.{b16|b32|b64|u16|u32|u64|s16|s32|s64}", "t", "t u32", "9.7.8.9")
def _shift(opcode: Opcode, x: Vector, n: Vector) -> Vector:
    size = bits(x.kind)
    clipped = n.call("umin", size - 1)
    by = clipped.to(x.kind) if size != 32 else clipped.view(x.kind)
    if opcode[0] == "shl":
        return where(n >= size, x.constant(0), x << by)
    return x >> by if x.kind[0] == "s" else where(n >= size, x.constant(0), x >> by)


def logic_of_three(table: int) -> Callable[..., Vector]:
    """Return lop3.b32 (9.7.8.6) of a truth table: bit 4 a + 2 b + c of it is the result of bits a, b, c."""

    def traced(x: Vector, y: Vector, z: Vector) -> Vector:
        result = x.constant(0)
        for case in range(8):
            if table >> case & 1:
                result = result | ((x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z))
        return result

    return traced


@row("shf.{l|r}.{clamp|wrap}.b32", "t", "t t u32", "9.7.8.7")
def _funnel(opcode: Opcode, lower: Vector, upper: Vector, n: Vector) -> Vector:
    by = n & 31 if opcode[2] == "wrap" else n.call("umin", 32)
    whole = lower.view("u32").to("u64") | (upper.view("u32").to("u64") << 32)
    moved = whole << by.to("u64") if opcode[1] == "l" else whole >> by.to("u64")
    return (moved >> 32 if opcode[1] == "l" else moved).to("u32").view("b32")


@row("prmt.b32{|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16}", "b32", "u32 u32 u32", "9.7.9.7")
def _permute(opcode: Opcode, a: Vector, b: Vector, c: Vector) -> Vector:
    mode = opcode[2] if len(opcode) > 2 else ""
    whole = a.to("u64") | (b.to("u64") << 32)
    result = a.constant(0)
    for i in range(4):
        k = c & 3
        selector = {
            "": (c >> (4 * i)) & 15,
            "f4e": k + i,
            "b4e": (k - i) & 7,
            "rc8": k,
            "ecl": k.call("umax", i),
            "ecr": k.call("umin", i),
            "rc16": ((c & 1) << 1) + (i & 1),
        }[mode]
        byte = (whole >> ((selector & 7) << 3).to("u64")).to("u32") & 0xFF
        if not mode:  # bit 3: eight copies of the sign
            byte = where((selector & 8) != 0, where((byte & 0x80) != 0, byte.constant(0xFF), 0), byte)
        result = result | (byte << (8 * i))
    return result


# Comparison and selection (9.7.6, 9.7.7)

_RELATIONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


def _compared(relation: str, x: Vector, y: Vector) -> Vector:
    """Return a comparison; of NaN only ``nan`` and the unordered ones (``ltu``) hold."""
    if x.kind[0] != "f":
        return x._compared(_RELATIONS[relation], y)
    unordered = x.isnan() | y.isnan()
    if relation in ("nan", "num"):
        return unordered if relation == "nan" else ~unordered
    holds = x._compared(_RELATIONS[relation[:2]], y)
    return holds | unordered if relation.endswith("u") else holds & ~unordered


_FLOAT_RELATIONS = "{eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan}"


_JOINS = "{|.and|.or|.xor}"  # with a third predicate


@row("setp.{eq|ne|lt|le|gt|ge}" + _JOINS + "." + _ANY_INT, "pred pred", "t t p", "9.7.6.2")
@row("setp.{lo|ls|hi|hs}" + _JOINS + ".{u16|u32|u64}", "pred pred", "t t p", "9.7.6.2")
@row("setp.{eq|ne}" + _JOINS + "." + _BITS, "pred pred", "t t p", "9.7.6.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + _FTZ + ".{f32|f16}", "pred pred", "t t p", "9.7.6.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + ".{f64|bf16}", "pred pred", "t t p", "9.7.6.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + _FTZ + ".f16x2", "pred pred", "t t p", "9.7.7.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + ".bf16x2", "pred pred", "t t p", "9.7.7.2")
def _set_predicates(opcode: Opcode, x: Vector, y: Vector, third: Vector | None = None) -> tuple[Vector, Vector]:
    """Return the comparison and its opposite, of pairs that of both halves, joined with a third predicate if there is one."""
    if opcode[-1].endswith("x2"):
        single = (*opcode[:-1], opcode[-1].removesuffix("x2"))
        halves = [_compared(opcode[1], *(_wide(half(v), single) for v in (x, y))) for half in (low, high)]
        results = halves[0], halves[1]
    else:
        holds = _compared(opcode[1], _wide(x, opcode), _wide(y, opcode))
        results = holds, ~holds
    if third is not None:
        join = {"and": third.__and__, "or": third.__or__, "xor": third.__xor__}[opcode[2]]
        results = join(results[0]), join(results[1])
    return results


@row("set.{eq|ne|lt|le|gt|ge}" + _JOINS + ".{u32|s32|f32}.{u32|s32|u64|s64|u16|s16}", "d", "t t p", "9.7.6.1")
@row("set.{lo|ls|hi|hs}" + _JOINS + ".{u32|s32|f32}.{u16|u32|u64}", "d", "t t p", "9.7.6.1")
@row("set.{eq|ne}" + _JOINS + ".{u32|s32|f32}." + _BITS, "d", "t t p", "9.7.6.1")
@row("set." + _FLOAT_RELATIONS + _JOINS + _FTZ + ".{u32|s32}.{f32|f16}", "d", "t t p", "9.7.6.1")
@row("set." + _FLOAT_RELATIONS + _JOINS + ".{u32|s32}.{f64|bf16}", "d", "t t p", "9.7.6.1")
@row("set." + _FLOAT_RELATIONS + _JOINS + "{.f32.f64|.f32.f32|.ftz.f32.f32}", "d", "t t p", "9.7.6.1")
def _set_number(opcode: Opcode, x: Vector, y: Vector, third: Vector | None = None) -> Vector:
    """Return all bits set (1.0 of float32) where a comparison holds, else 0."""
    holds, _ = _set_predicates(opcode, x, y, third)
    return where(holds, constant(opcode[-2], 1.0 if opcode[-2] == "f32" else -1), constant(opcode[-2], 0))


def _wide(x: Vector, opcode: Opcode) -> Vector:
    """Return an operand of a comparison as float32 where it has 16 bits, and flushed where .ftz says so."""
    if opcode[-1] in ("f16", "bf16"):
        x = f16_to_f32(x, flushes="ftz" in opcode) if opcode[-1] == "f16" else bf16_to_f32(x)
        return x
    return flush(x) if "ftz" in opcode else x


@row("selp.{b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64}", "t", "t t pred", "9.7.6.3")
def _select(opcode: Opcode, x: Vector, y: Vector, condition: Vector) -> Vector:
    return where(condition, x, y)


@row("slct.{b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64}{.s32|.f32}", "d", "d d t", "9.7.6.4")
@row("slct.ftz.{b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64}.f32", "d", "d d t", "9.7.6.4")
def _select_by_sign(opcode: Opcode, x: Vector, y: Vector, z: Vector) -> Vector:
    return where((flush(z) if "ftz" in opcode else z) >= 0, x, y)


# Floats of 32 and 64 bits (9.7.3)


@row("{add|sub|mul}{|.rn|.rz|.rm|.rp}" + _FTZ + "{|.sat}.f32", "t", "t t", "9.7.3.3")
@row("{fma|mad}.{rn|rz|rm|rp}" + _FTZ + "{|.sat}.f32", "t", "t t t", "9.7.3.6")
def _arithmetic(opcode: Opcode, x: Vector, y: Vector, z: Vector | None = None) -> Vector:
    if "ftz" in opcode:
        x, y, z = flush(x), flush(y), None if z is None else flush(z)
    y = -y if opcode[0] == "sub" else y
    direction = next((m for m in opcode if m in ("rz", "rm", "rp")), "rn")
    if direction == "rn":
        result = x.call("fma", y, z) if z is not None else x * y if opcode[0] == "mul" else x + y
        if "ftz" in opcode and opcode[0] not in ("add", "sub"):
            product = x.to("f64") * y.to("f64")
            result = flush_tiny(result, product if z is None else sum_odd(product, z.to("f64")))
        return finish(result, opcode)
    # float64 holds products exactly, and sums rounded to odd: one rounding follows
    a, b = x.to("f64"), y.to("f64")
    if opcode[0] != "mul":
        a, b = (a, b) if z is None else (a * b, z.to("f64"))
    wide = a * b if opcode[0] == "mul" else sum_odd(a, b)
    if direction == "rm" and opcode[0] != "mul":  # downwards, x - x is -0
        opposite = (a.view("s64") ^ b.view("s64")) < 0
        wide = where((wide == 0.0) & opposite, wide.constant(-0.0), wide)
    result = encode(wide, "f32", direction).view("f32")
    return finish(flush_tiny(result, wide, direction) if "ftz" in opcode else result, opcode)


@row("{add|sub|mul}{|.rn}.f64", "t", "t t", "9.7.3.3")
@row("{fma|mad}.rn.f64", "t", "t t t", "9.7.3.6")
def _arithmetic_64(opcode: Opcode, x: Vector, y: Vector, z: Vector | None = None) -> Vector:
    if z is not None:
        return propagate(x.call("fma", y, z), y, z, x)  # of several NaN in this order (H100)
    order = (x, y) if opcode[0] == "div" else (y, x)
    return propagate({"add": x + y, "sub": x - y, "mul": x * y, "div": x / y}[opcode[0]], *order)


@row("div.rn" + _FTZ + ".f32", "t", "t t", "9.7.3.8")
@row("{rcp|sqrt}.rn" + _FTZ + ".f32", "t", "t", "9.7.3.13")
@row("div.rn.f64", "t", "t t", "9.7.3.8")
@row("{rcp|sqrt}.rn.f64", "t", "t", "9.7.3.13")
def _ieee(opcode: Opcode, x: Vector, y: Vector | None = None) -> Vector:
    if "ftz" in opcode:
        x, y = flush(x), None if y is None else flush(y)
    result = x.call("sqrt") if opcode[0] == "sqrt" else x.constant(1.0) / x if y is None else x / y
    if x.kind == "f64":
        return propagate(result, *((x,) if y is None else (x, y)))
    if "ftz" in opcode and y is not None:
        quotient = x.to("f64") / y.to("f64")
        result = flush_tiny(result, to_odd(quotient, _remainder(quotient, x.to("f64"), y.to("f64"))))
    return finish(result, opcode)


@row("div.{rz|rm|rp}" + _FTZ + ".f32", "t", "t t", "9.7.3.8")
@row("{rcp|sqrt}.{rz|rm|rp}" + _FTZ + ".f32", "t", "t", "9.7.3.13")
def _directed_quotient(opcode: Opcode, x: Vector, y: Vector | None = None) -> Vector:
    if "ftz" in opcode:
        x, y = flush(x), None if y is None else flush(y)
    # 1. the float64 result, and by its remainder on which side of it the exact one lies
    wide = x.to("f64")
    if opcode[0] == "sqrt":
        result = wide.call("sqrt")
        lost = (-result).call("fma", result, wide)
    else:
        top, bottom = (wide, y.to("f64")) if y is not None else (wide.constant(1.0), wide)
        result = top / bottom
        lost = _remainder(result, top, bottom)
    # 2. rounded to odd, then once to float32
    odd = to_odd(result, lost)
    rounded = encode(odd, "f32", opcode[1]).view("f32")
    return finish(flush_tiny(rounded, odd, opcode[1]) if "ftz" in opcode else rounded, opcode)


def _remainder(quotient: Vector, top: Vector, bottom: Vector) -> Vector:
    """Return what has the sign of top / bottom minus its rounded quotient."""
    lost = (-quotient).call("fma", bottom, top)
    return where(bottom < 0.0, -lost, lost)


@row("div.approx" + _FTZ + ".f32", "t", "t t", "9.7.3.8")
@row("div.full" + _FTZ + ".f32", "t", "t t", "9.7.3.8")
def _divide(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    return _arithmetic(("mul", *(part for part in opcode[2:])), *quotient_factors(opcode, x, y))


def quotient_factors(opcode: Opcode, x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """Return the factors of a fast quotient: x, and MUFU.RCP of y, both scaled where y is at an end of its range."""
    if "ftz" in opcode:
        x, y = flush(x), flush(y)
    magnitude, scale = y.view("u32") & 0x7FFFFFFF, y.constant(1.0)
    if opcode[1] == "full":
        scale = where(magnitude > 0x7E800000, y.constant(0.25), scale)  # |y| > 2^126
    if "ftz" not in opcode:
        scale = where(magnitude < 0x00800000, y.constant(2.0**24), scale)
    return x * scale, mufu("rcp", y * scale)


def divided_by(opcode: Opcode, divisor: int) -> tuple[Callable, Callable]:
    """Return the semantics of a fast quotient by a constant (its bits), and those that yield its factors, too.

    ptxas writes a product with the constant's reciprocal, rounded to nearest.
    """
    number = np.uint32(divisor).view(np.float32)
    scale = np.float32(1.0)
    if opcode[1] == "full" and abs(number) > 2.0**126:
        scale = np.float32(0.25)
    elif "ftz" not in opcode and abs(number) < 2.0**-126:
        scale = np.float32(2.0**24)
    with np.errstate(all="ignore"):
        reciprocal = int((np.float32(1.0) / (number * scale)).view(np.uint32))

    def factors(x: Vector, y: Vector) -> tuple[Vector, Vector, Vector]:
        x = flush(x) if "ftz" in opcode else x
        a, r = x * float(scale), y.constant(reciprocal)
        whole = x if number == 1.0 and "ftz" not in opcode else finish(a * r, opcode)  # by 1 not even NaN changes
        return whole, a, r

    return lambda x, y: factors(x, y)[0], factors


@row("{abs|neg}" + _FTZ + ".f32", "t", "t", "9.7.3.9")
@row("{abs|neg}.f64", "t", "t", "9.7.3.9")
def _sign(opcode: Opcode, x: Vector) -> Vector:
    x = flush(x) if "ftz" in opcode else x
    word, top = x.view(f"u{bits(x.kind)}"), 1 << (bits(x.kind) - 1)
    result = (word ^ top if opcode[0] == "neg" else word & (top - 1)).view(x.kind)
    return propagate(where(x.isnan(), x, result), x) if x.kind == "f64" else canonical(result)


@row("{min|max}" + _FTZ + "{|.NaN}{|.xorsign.abs}.f32", "t", "t t", "9.7.3.11")
@row("{min|max}.f64", "t", "t t", "9.7.3.11")
def _extremum(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    if "ftz" in opcode:
        x, y = flush(x), flush(y)
    sign = 1 << (bits(x.kind) - 1)
    word = f"u{bits(x.kind)}"
    signs = (x.view(word) ^ y.view(word)) & sign
    if "xorsign" in opcode:
        x, y = x.call("fabs"), y.call("fabs")
    # 1. the smaller or larger; -0 is smaller than 0; 2. of a number and NaN the number, or NaN
    largest = opcode[0] == "max"
    a, b = x.view(word), y.view(word)
    result = where(x == y, a & b if largest else a | b, where(x > y if largest else x < y, a, b))
    if "NaN" in opcode:
        result = where(x.isnan() | y.isnan(), result.constant(-1), result)
    else:
        result = where(x.isnan(), b, where(y.isnan(), a, result))
    if x.kind == "f64":  # of two NaN the second
        return propagate(result.view("f64"), y, x)
    whole = canonical(result.view(x.kind))
    signed = where(whole.isnan(), whole.view(word), whole.view(word) | signs)
    return signed.view(x.kind) if "xorsign" in opcode else whole


@row("copysign.{f32|f64}", "t", "t t", "9.7.3.5")
def _copy_sign(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    word, sign = f"u{bits(x.kind)}", 1 << (bits(x.kind) - 1)
    return ((y.view(word) & (sign - 1)) | (x.view(word) & sign)).view(x.kind)


@row("testp.{finite|infinite|number|notanumber|normal|subnormal}.{f32|f64}", "pred", "t", "9.7.3.4")
def _test(opcode: Opcode, x: Vector) -> Vector:
    fraction = {32: 23, 64: 52}[bits(x.kind)]
    magnitude = x.view(f"u{bits(x.kind)}") & ((1 << (bits(x.kind) - 1)) - 1)
    infinity, normal = ((1 << (bits(x.kind) - 1 - fraction)) - 1) << fraction, 1 << fraction
    return {
        "finite": magnitude < infinity, "infinite": magnitude == infinity, "number": magnitude <= infinity,
        "notanumber": magnitude > infinity, "normal": ((magnitude >= normal) & (magnitude < infinity)) | (magnitude == 0),
        "subnormal": (magnitude != 0) & (magnitude < normal),
    }[opcode[1]]  # fmt: skip


# The special-function unit (9.7.3.14 to 9.7.3.21)


@cache
def _over_lanes(name: str) -> int:
    """Return the address of a function of the unit over 16 numbers: int64(pointer, pointer)."""
    return c_address(lanes_of(getattr(mufu_unit, name)), (types.int64, types.int64))


def mufu(name: str, x: Vector) -> Vector:
    """Return a result of the special-function unit."""
    return apply(_over_lanes(name), x)


@row("{rcp|rsqrt|sqrt|ex2|lg2|sin|cos}.approx" + _FTZ + ".f32", "t", "t", "9.7.3.14")
def _approximate(opcode: Opcode, x: Vector) -> Vector:
    """Return MUFU's result; without .ftz the argument is scaled where the unit would flush."""
    name = opcode[0]
    if "ftz" in opcode or name in ("sin", "cos"):  # of these two .ftz changes nothing
        return mufu(name, x)
    tiny = (x.view("u32") & 0x7FFFFFFF) < 0x00800000
    match name:
        case "ex2":  # half of the argument, and the square of the result
            small = x < -126.0
            y = mufu("ex2", where(small, x * 0.5, x))
            return finish(where(small, y * y, y), opcode)
        case "lg2":
            y = mufu("lg2", where(tiny, x * 2.0**24, x))
            return finish(where(tiny, y + -24.0, y), opcode)
        case "rcp":
            scale, reciprocal = reciprocal_factors(opcode, x)
            return finish(reciprocal * scale, opcode)
        case "rsqrt":
            y = mufu("rsqrt", where(tiny, x * 2.0**24, x))
            return finish(where(tiny, y * 2.0**12, y), opcode)
    y = mufu("sqrt", where(tiny, x * 2.0**24, x))
    return finish(where(tiny, y * 2.0**-12, y), opcode)


def reciprocal_factors(opcode: Opcode, x: Vector) -> tuple[Vector, Vector]:
    """Return the factors of rcp.approx without .ftz: a power of two, and MUFU.RCP of x scaled by it."""
    magnitude = x.view("u32") & 0x7FFFFFFF
    tiny, large = magnitude < 0x00800000, magnitude > 0x7E800000
    scale = where(large, x.constant(0.25), where(tiny, x.constant(2.0**24), 1.0))
    return scale, mufu("rcp", x * scale)


@row("rsqrt.approx.f64", "t", "t", "9.7.3.16")
def _root_64(opcode: Opcode, x: Vector) -> Vector:
    """Return two steps of Newton from the unit's result; subnormal numbers are scaled."""
    word = (x.view("u64") >> 32).to("u32")
    tiny = ((word & 0x7FF00000) == 0) & ((x.view("u64") << 1) != 0)
    scaled = where(tiny, x * 2.0**54, x)
    y = _approximate_64(("rsqrt", "approx", "ftz", "f64"), scaled)
    error = scaled.call("fma", -(y * y), 1.0)
    step = error.call("fma", 0.375, 0.5)
    better = step.call("fma", y * error, y)
    better = where(tiny, better * 2.0**27, better)
    special = ((word & 0x7FF00000) == 0x7FF00000) | (x < 0.0)
    return propagate(where(special | (x == 0.0), y, better), x)


@row("{rcp|rsqrt}.approx.ftz.f64", "t", "t", "9.7.3.14")
def _approximate_64(opcode: Opcode, x: Vector) -> Vector:
    """Return the unit's result for the upper 32 bits of a number, whose lower 32 bits are 0: 20 bits of its fraction."""
    word = (x.view("u64") >> 32).to("u32")
    sign, field, fraction = word & 0x80000000, (word >> 20) & 0x7FF, word & 0xFFFFF
    # 1. the float32 unit on a number of [1, 2), or [1, 4) of a root, cut off to 20 bits
    odd = ((field + 1) & 1) if opcode[0] == "rsqrt" else field & 0
    result = mufu(opcode[0], (((odd + 127) << 23) | (fraction << 3)).view("f32")).view("u32")
    below = where(result < 0x3F800000, word.constant(1), 0)  # results are of (1/2, 1]
    # 2. the exponent's field; a root halves it
    exponent = word.constant(2046) - field if opcode[0] == "rcp" else (word.constant(3069) - field + odd) >> 1
    exponent = exponent - below
    whole = (exponent << 20) | ((result & 0x7FFFFF) >> 3)
    # 3. reciprocals below the normal numbers, arguments that are 0 or subnormal, Inf and NaN
    whole = where((exponent.view("s32") <= 0) | (field == 0x7FF), word.constant(0), whole)
    whole = sign | where(field == 0, word.constant(0x7FF00000), whole)
    invalid = (field == 0x7FF) & (fraction != 0)
    if opcode[0] == "rsqrt":
        invalid = invalid | ((sign != 0) & (field != 0))
    return (where(invalid, word.constant(0x7FFFFFFF), whole).to("u64") << 32).view("f64")


# Floats of 16 bits, alone and in pairs (9.7.4)


def _halves(semantics: Callable, opcode: Opcode, *operands: Vector) -> Vector:
    """Apply the semantics of one float of 16 bits to both halves of pairs."""
    single = (*opcode[:-1], opcode[-1].removesuffix("x2"))
    return joined(*(semantics(single, *(half(x) for x in operands)).view("u16") for half in (low, high)))


@row("ex2.approx.{f16|f16x2}", "t", "t", "9.7.4.11")
@row("ex2.approx.ftz.{bf16|bf16x2}", "t", "t", "9.7.4.11")
def _approximate_16(opcode: Opcode, x: Vector) -> Vector:
    """Return the float32 unit's result cut off to 16 bits (all 2^16 arguments, H100)."""
    if opcode[-1].endswith("x2"):
        return _halves(_approximate_16, opcode, x)
    if opcode[-1] == "bf16":
        return (mufu("ex2", bf16_to_f32(x)).view("u32") >> 16).to("u16")
    result = mufu("ex2", f16_to_f32(x))
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
    result = _extremum(tuple(m for m in opcode if m not in ("ftz", "xorsign", "abs")), a, b)
    code = encode(result.to("f64"), opcode[-1], "rn").to("u16")
    signs = (x.view("u16") ^ y.view("u16")) & 0x8000
    return where(result.isnan(), code, code | signs) if "xorsign" in opcode else code


# Conversions (9.7.9.21)

_WHOLE = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@row("cvt{|.sat}.{u8|s8|u16|s16|u32|s32|u64|s64}.{u8|s8|u16|s16|u32|s32|u64|s64}", "d", "t", "9.7.9.21")
def _resize(opcode: Opcode, x: Vector) -> Vector:
    target, source = opcode[-2:]
    if "sat" in opcode:
        signed, size = target[0] == "s", bits(target)
        least, most = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if signed else (0, (1 << size) - 1)
        if source[0] == "s":
            wide = x.to("s64")
            if size < 64:
                wide = wide.call("smin", most)
            x = wide.call("smax", least) if size < 64 or least == 0 else wide
        else:
            x = x.to("u64").call("umin", min(most, (1 << 64) - 1))
    return x.to(target)


@row("cvt{.rn|.rz|.rm|.rp}{|.ftz}{|.sat}.f32.{u8|s8|u16|s16|u32|s32|u64|s64}", "d", "t", "9.7.9.21")
@row("cvt{.rn|.rz|.rm|.rp}.f16.{u8|s8|u16|s16|u32|s32|u64|s64}", "d", "t", "9.7.9.21")
@row("cvt.rn.bf16.{u16|s16|u32|s32|u64|s64}", "d", "t", "9.7.9.21")
@row("cvt.rn.f64.{u8|s8|u16|s16|u32|s32|u64|s64}", "d", "t", "9.7.9.21")
def _integer_to_float(opcode: Opcode, x: Vector) -> Vector:
    target, direction = opcode[-2], opcode[1]
    if target == "f64" or (target == "f32" and direction == "rn"):
        result = x.to(target)
        return saturate(result) if "sat" in opcode else result
    wide = x.to("f64")
    if bits(x.kind) == 64:  # to odd: what float64 lost decides
        back = wide.to("f64")
        limit = 2.0**63 if x.kind == "s64" else 2.0**64
        over = back >= limit
        rest = x - where(over, back.constant(0.0), back).to(x.kind)
        lost = where(over, back.constant(-1.0), rest.view("s64").to("f64"))
        wide = to_odd(wide, lost)
    code = encode(wide, target, direction)
    if target == "f32":
        result = code.view("f32")
        return saturate(result) if "sat" in opcode else result
    return code.to("u16")


@row("cvt.{rni|rzi|rmi|rpi}{|.ftz}{|.sat}.{u8|s8|u16|s16|u32|s32|u64|s64}.f32", "d", "t", "9.7.9.21")
@row("cvt.{rni|rzi|rmi|rpi}{|.sat}.{u8|s8|u16|s16|u32|s32|u64|s64}.{f64|f16}", "d", "t", "9.7.9.21")
@row("cvt.{rni|rzi|rmi|rpi}.{u32|s32|u64|s64}.bf16", "d", "t", "9.7.9.21")
def _float_to_integer(opcode: Opcode, x: Vector) -> Vector:
    target, source = opcode[-2:]
    wide = x if source == "f64" else _float_32(x, opcode).to("f64")
    whole = wide.call(_WHOLE[opcode[1]])
    size, signed = bits(target), target[0] == "s"
    least, most = (-(2.0 ** (size - 1)), 2.0 ** (size - 1)) if signed else (0.0, 2.0**size)
    # 1. in range; 2. too large or too small: the ends; 3. NaN
    number = where((whole >= least) & (whole < most), whole, 0.0).to(f"{target[0]}64")
    limits = [((1 << (size - 1)) - 1, -(1 << (size - 1))), ((1 << size) - 1, 0)][not signed]
    number = where(whole >= most, number.constant(limits[0]), number)
    number = where(whole < least, number.constant(limits[1]), number)
    nan = number.constant(0 if size < (32 if source == "f64" else 64) else 1 << (size - 1))
    return where(wide.isnan(), nan, number).to(target)


def _float_32(x: Vector, opcode: Opcode) -> Vector:
    """Return the source of a conversion as float32."""
    source = opcode[-1]
    if source in ("f16", "bf16"):
        return f16_to_f32(x) if source == "f16" else bf16_to_f32(x)
    return flush(x) if "ftz" in opcode else x


@row("cvt.{rni|rzi|rmi|rpi}{|.ftz}{|.sat}.f32.f32", "d", "t", "9.7.9.21")
@row("cvt.{rni|rzi|rmi|rpi}{|.sat}.f64.f64", "d", "t", "9.7.9.21")
@row("cvt.{rni|rzi|rmi|rpi}{|.sat}.f16.f16", "d", "t", "9.7.9.21")
@row("cvt.{rni|rzi|rmi|rpi}.bf16.bf16", "d", "t", "9.7.9.21")
def _to_whole(opcode: Opcode, x: Vector) -> Vector:
    if opcode[-1] in ("f16", "bf16"):
        whole = _float_32(x, opcode).call(_WHOLE[opcode[1]])
        whole = saturate(whole) if "sat" in opcode else whole
        return encode(whole.to("f64"), opcode[-1], "rn").to("u16")
    x = flush(x) if "ftz" in opcode else x
    whole = x.call(_WHOLE[opcode[1]])
    if x.kind == "f64":
        return saturate(whole) if "sat" in opcode else propagate(whole, x)
    return finish(whole, opcode)


@row("cvt{|.ftz}{|.sat}.f32.f32", "d", "t", "9.7.9.21")
@row("cvt{|.sat}.f64.f64", "d", "t", "9.7.9.21")
@row("cvt{|.ftz}{|.sat}.f32.f16", "d", "t", "9.7.9.21")
@row("cvt{|.sat}.f64.f16", "d", "t", "9.7.9.21")
@row("cvt{|.ftz}{|.sat}.f64.f32", "d", "t", "9.7.9.21")
@row("cvt{|.ftz}.f32.bf16", "d", "t", "9.7.9.21")
@row("cvt.f64.bf16", "d", "t", "9.7.9.21")
def _widen(opcode: Opcode, x: Vector) -> Vector:
    target, source = opcode[-2:]
    if target == source and len(opcode) == 3:
        return x  # a copy, which keeps NaN
    if source == "f64":
        return saturate(x) if "sat" in opcode else propagate(x, x)
    number = _float_32(x, opcode)
    if source == "bf16" and target == "f32" and len(opcode) == 3:
        return number  # a shift, which keeps NaN
    if target == "f32":
        return finish(number, opcode)
    number = canonical(number) if "ftz" in opcode else number
    wide = number.to("f64")
    if source == "f16":  # every bit of NaN is kept
        bits_16 = x.view("u16").to("u64")
        nan = ((bits_16 & 0x8000) << 48) | ((bits_16 & 0x3FF) << 42) | 0x7FF8000000000000
        wide = where(number.isnan(), nan, wide.view("u64")).view("f64")
    wide = propagate(wide, wide)
    return saturate(wide) if "sat" in opcode else wide


@row("cvt{.rn|.rz|.rm|.rp}{|.ftz}{|.sat}.f32.f64", "d", "t", "9.7.9.21")
@row("cvt{.rn|.rz|.rm|.rp}{.f16|.sat.f16|.bf16}.f64", "d", "t", "9.7.9.21")
@row("cvt{|.rn|.rz|.rm|.rp}.{bf16.f16|f16.bf16}", "d", "t", "9.7.9.21")
@row("cvt{.rn|.rz|.rm|.rp}{|.ftz}{.f16|.sat.f16|.bf16}.f32", "d", "t", "9.7.9.21")
@row("cvt{.rn|.rz}{.relu|.satfinite|.relu.satfinite}.{f16|bf16}.f32", "d", "t", "9.7.9.21")
@row("cvt.{rna|rna.satfinite|rn|rn.relu|rz|rz.relu}.tf32.f32", "d", "t", "9.7.9.21")
def _narrow(opcode: Opcode, x: Vector) -> Vector:
    target, source, direction = opcode[-2], opcode[-1], opcode[1] if opcode[1][0] == "r" else "rn"
    x = flush(x) if "ftz" in opcode and source == "f32" else x
    x = _float_32(x, opcode) if source in ("f16", "bf16") else x
    if opcode == ("cvt", "rn", "bf16", "f32"):
        return f32_to_bf16(x)
    if "sat" in opcode:
        x = saturate(x)
    if "relu" in opcode:
        x = where(x < 0.0, x.constant(0.0), x)
        x = where(x == 0.0, x.constant(0.0), x)
    wide = x if source == "f64" else x.to("f64")
    code = encode(wide, target, direction, saturates="satfinite" in opcode)
    if target == "tf32" and direction == "rna":  # half of the last place is added to the bits, those of NaN too
        word = x.view("u32")
        rounded = where((word & 0x7FFFFFFF) < 0x7F800000, word + 0x1000, word) & 0xFFFFE000
        if "satfinite" in opcode:
            rounded = where((rounded & 0x7FFFFFFF) >= 0x7F800000, rounded - 0x2000, rounded)
        return rounded.view("b32")
    if target == "tf32":
        return (code << 13).view("b32")
    if source == "f64":
        code = where(x.isnan(), narrowed_nan(x, target), code)
        if target == "f32":
            result = code.view("f32")
            result = flush(result) if "ftz" in opcode else result
            return saturate(result) if "sat" in opcode else result
    if target == "f32":
        return finish(code.view("f32"), tuple(m for m in opcode if m != "sat"))
    return code.to("u16")


@row("cvt.{rn|rz}{|.relu}{|.satfinite}.{f16x2|bf16x2}.f32", "b32", "t t", "9.7.9.21")
def _narrow_pair(opcode: Opcode, upper: Vector, lower: Vector) -> Vector:
    single = (*opcode[:-2], opcode[-2].removesuffix("x2"), "f32")
    return joined(_narrow(single, lower), _narrow(single, upper))


@row("cvt.rn.satfinite{|.relu}.{e4m3x2|e5m2x2}.f32", "b16", "t t", "9.7.9.21")
def _to_fp8(opcode: Opcode, upper: Vector, lower: Vector) -> Vector:
    codes = []
    for x in (lower, upper):
        if "relu" in opcode:
            x = where(x <= 0.0, x.constant(0.0), x)
        codes.append(encode(x.to("f64"), opcode[-2].removesuffix("x2"), "rn", saturates=True))
    return (codes[0] | (codes[1] << 8)).to("u16")


@row("cvt.rn.satfinite{|.relu}.{e4m3x2|e5m2x2}.f16x2", "b16", "b32", "9.7.9.21")
def _half_to_fp8(opcode: Opcode, pair: Vector) -> Vector:
    return _to_fp8(opcode, f16_to_f32(high(pair)), f16_to_f32(low(pair)))


@row("cvt.rn{|.relu}.f16x2.{e4m3x2|e5m2x2}", "b32", "b16", "9.7.9.21")
def _fp8_to_half(opcode: Opcode, pair: Vector) -> Vector:
    word, halves = pair.view("u16").to("u32"), []
    for shift in (0, 8):
        x = small_to_f32((word >> shift) & 0xFF, opcode[-1].removesuffix("x2"))
        if "relu" in opcode:
            x = where(x <= 0.0, x.constant(0.0), x)
        halves.append(encode(x.to("f64"), "f16", "rn").to("u16"))
    return joined(*halves)


@row("cvt.pack.sat.{u16|s16}.s32", "b32", "s32 s32", "9.7.9.22")
def _pack(opcode: Opcode, upper: Vector, lower: Vector) -> Vector:
    least, most = (0, 0xFFFF) if opcode[-2] == "u16" else (-0x8000, 0x7FFF)
    return joined(*(x.call("smax", least).call("smin", most).to("u16") for x in (lower, upper)))


# Moves (9.7.9.1)


@row("mov.{b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64}", "t", "t", "9.7.9.1")
@row("mov.pred", "pred", "pred", "9.7.9.1")
def _move(opcode: Opcode, x: Vector) -> Vector:
    return x


# Products that ptxas fuses into sums (``contract``)


def fused_factors(opcode: Opcode, row: Row) -> Callable[..., Any]:
    """Return the semantics of a product that also yields the two factors of its last multiplication."""

    def traced(*operands: Vector) -> tuple[Vector, ...]:
        factors: tuple[Vector, ...]
        if opcode[0] == "div":
            factors = quotient_factors(opcode, *operands)
        elif opcode[0] == "rcp":
            factors = reciprocal_factors(opcode, operands[0])
        else:
            factors = operands
            if opcode[-1] == "f32" and "ftz" in opcode:
                factors = tuple(flush(x) for x in operands)
        return row.semantics(*operands), *factors

    return traced


def fused_sum(opcode: Opcode, negates_product: bool, negates_addend: bool) -> Callable[..., Any]:
    """Return the semantics of an addition with a product in one rounding, of the factors and the other operand."""
    fma = ("fma", "rn", *(part for part in opcode[1:] if part != "rn"))

    def traced(x: Vector, y: Vector, z: Vector) -> Vector:
        x = _negated(x, opcode) if negates_product else x
        z = _negated(z, opcode) if negates_addend else z
        return TABLE[".".join(fma)].semantics(x, y, z)

    return traced


def _negated(x: Vector, opcode: Opcode) -> Vector:
    if x.kind[0] == "f":
        return -x
    return x ^ (0x80008000 if opcode[-1].endswith("x2") else 0x8000)


# What ptxas writes otherwise than the PTX says

SIGN_ONLY: dict[str, Callable[[Vector], Vector]] = {  # of NaN, too
    "neg": lambda x: -x,
    "abs": lambda x: (x.view("u32") & 0x7FFFFFFF).view("f32"),
}


def with_operand(semantics: Callable) -> Callable[..., tuple[Vector, Vector]]:
    """Return semantics that also yield the first operand."""
    return lambda x, *others: (semantics(x, *others), x)


def clamped(opcode: Opcode) -> Callable[[Vector], Vector]:
    """Return max(min(x, 1), 0), which ptxas makes the .sat of x: of NaN it is 0."""

    def traced(x: Vector) -> Vector:
        if opcode[-1] != "f16":
            return saturate(flush(x) if "ftz" in opcode else x)
        value = f16_to_f32(x, flushes="ftz" in opcode)
        return encode(saturate(value).to("f64"), "f16", "rn").to("u16")

    return traced
