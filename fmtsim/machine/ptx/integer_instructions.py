# SPDX-License-Identifier: Apache-2.0
"""Integers, bits, comparison and selection: PTX ISA 8.7, sections 9.7.1, 9.7.2 and 9.7.6 to 9.7.8."""

from collections.abc import Callable
from typing import Any

from fmtsim.machine.ptx.gpu_numbers import bf16_to_f32, f16_to_f32, flush, high, joined, low
from fmtsim.machine.ptx.instruction_table import ANY_INT, BITS, FTZ, TABLE, Opcode, row
from fmtsim.machine.ptx.values import Vector, bits, constant, where

# Integers (9.7.1)


@row("{add|sub|mul.lo|min|max}." + ANY_INT, "t", "t t", "9.7.1")
@row("{and|or|xor}." + BITS, "t", "t t", "9.7.8")
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
@row("mad.lo." + ANY_INT, "t", "t t t", "9.7.1.4")
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


@row("{div|rem}." + ANY_INT, "t", "t t", "9.7.1.9")
def _quotient(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    # by zero: all bits set, as a GPU's routine leaves them; INT_MIN / -1 is INT_MIN
    zero, minus = y == 0, (y == -1) if x.kind[0] == "s" else (y == 0)
    by = where(zero | minus, y.constant(1), y)
    if opcode[0] == "rem":
        return where(zero, x.constant(-1), where(minus, x.constant(0), x % by))
    return where(zero, x.constant(-1), where(minus, -x, x // by))


@row("sad." + ANY_INT, "t", "t t t", "9.7.1.7")
def _distance(opcode: Opcode, x: Vector, y: Vector, z: Vector) -> Vector:
    return where(x < y, y - x, x - y) + z


@row("{abs|neg}.{s16|s32|s64}", "t", "t", "9.7.1.12")
@row("not." + BITS, "t", "t", "9.7.8.4")
@row("not.pred", "pred", "pred", "9.7.8.4")
@row("cnot." + BITS, "t", "t", "9.7.8.5")
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


@row("shl." + BITS, "t", "t u32", "9.7.8.8")
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


@row("setp.{eq|ne|lt|le|gt|ge}" + _JOINS + "." + ANY_INT, "pred pred", "t t p", "9.7.6.2")
@row("setp.{lo|ls|hi|hs}" + _JOINS + ".{u16|u32|u64}", "pred pred", "t t p", "9.7.6.2")
@row("setp.{eq|ne}" + _JOINS + "." + BITS, "pred pred", "t t p", "9.7.6.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + FTZ + ".{f32|f16}", "pred pred", "t t p", "9.7.6.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + ".{f64|bf16}", "pred pred", "t t p", "9.7.6.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + FTZ + ".f16x2", "pred pred", "t t p", "9.7.7.2")
@row("setp." + _FLOAT_RELATIONS + _JOINS + ".bf16x2", "pred pred", "t t p", "9.7.7.2")
def _set_predicates(opcode: Opcode, x: Vector, y: Vector, third: Vector | None = None) -> tuple[Vector, Vector]:
    """Return the comparison and its opposite (of pairs those of both halves), joined with a third predicate."""
    if opcode[-1].endswith("x2"):
        single = (*opcode[:-1], opcode[-1].removesuffix("x2"))
        lower, upper = (_compared(opcode[1], *(_wide(half(v), single) for v in (x, y))) for half in (low, high))
        results = lower, upper
    else:
        holds = _compared(opcode[1], _wide(x, opcode), _wide(y, opcode))
        results = holds, ~holds
    if third is not None:
        join = {"and": third.__and__, "or": third.__or__, "xor": third.__xor__}[opcode[2]]
        results = join(results[0]), join(results[1])
    return results


@row("set.{eq|ne|lt|le|gt|ge}" + _JOINS + ".{u32|s32|f32}.{u32|s32|u64|s64|u16|s16}", "d", "t t p", "9.7.6.1")
@row("set.{lo|ls|hi|hs}" + _JOINS + ".{u32|s32|f32}.{u16|u32|u64}", "d", "t t p", "9.7.6.1")
@row("set.{eq|ne}" + _JOINS + ".{u32|s32|f32}." + BITS, "d", "t t p", "9.7.6.1")
@row("set." + _FLOAT_RELATIONS + _JOINS + FTZ + ".{u32|s32}.{f32|f16}", "d", "t t p", "9.7.6.1")
@row("set." + _FLOAT_RELATIONS + _JOINS + ".{u32|s32}.{f64|bf16}", "d", "t t p", "9.7.6.1")
@row("set." + _FLOAT_RELATIONS + _JOINS + "{.f32.f64|.f32.f32|.ftz.f32.f32}", "d", "t t p", "9.7.6.1")
def _set_number(opcode: Opcode, x: Vector, y: Vector, third: Vector | None = None) -> Vector:
    """Return all bits set (1.0 of float32) where a comparison holds, else 0."""
    holds, _ = _set_predicates(opcode, x, y, third)
    return where(holds, constant(opcode[-2], 1.0 if opcode[-2] == "f32" else -1), constant(opcode[-2], 0))


@row("set." + _FLOAT_RELATIONS + FTZ + ".{f16.f16|f16x2.f16x2}", "t", "t t", "9.7.7.1")
@row("set." + _FLOAT_RELATIONS + ".{bf16.bf16|bf16x2.bf16x2}", "t", "t t", "9.7.7.1")
def _set_half(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    """Return 1.0 of 16 bits where a comparison holds, else 0; of both halves of pairs."""
    if opcode[-1].endswith("x2"):
        single = (*opcode[:-2], opcode[-2][:-2], opcode[-1][:-2])
        return joined(*(_set_half(single, part(x), part(y)) for part in (low, high)))
    holds, _ = _set_predicates(opcode, x, y)
    return where(holds, constant("u16", 0x3C00 if opcode[-1] == "f16" else 0x3F80), constant("u16", 0))


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
