# SPDX-License-Identifier: Apache-2.0
"""Floats of 32 and 64 bits and the special-function unit: PTX ISA 8.7, section 9.7.3."""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types

from fmtsim.machine import mufu as mufu_unit
from fmtsim.machine.ptx.block_memory import c_address, lanes_of
from fmtsim.machine.ptx.gpu_numbers import canonical, encode, finish, flush, flush_tiny, propagate, sum_odd, to_odd
from fmtsim.machine.ptx.instruction_table import FTZ, Opcode, row
from fmtsim.machine.ptx.values import Vector, apply, bits, where

# Floats of 32 and 64 bits (9.7.3)


@row("{add|sub|mul}{|.rn|.rz|.rm|.rp}" + FTZ + "{|.sat}.f32", "t", "t t", "9.7.3.3")
@row("{fma|mad}.{rn|rz|rm|rp}" + FTZ + "{|.sat}.f32", "t", "t t t", "9.7.3.6")
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


@row("div.rn" + FTZ + ".f32", "t", "t t", "9.7.3.8")
@row("{rcp|sqrt}.rn" + FTZ + ".f32", "t", "t", "9.7.3.13")
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


@row("div.{rz|rm|rp}" + FTZ + ".f32", "t", "t t", "9.7.3.8")
@row("{rcp|sqrt}.{rz|rm|rp}" + FTZ + ".f32", "t", "t", "9.7.3.13")
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


@row("div.approx" + FTZ + ".f32", "t", "t t", "9.7.3.8")
@row("div.full" + FTZ + ".f32", "t", "t t", "9.7.3.8")
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


@row("{abs|neg}" + FTZ + ".f32", "t", "t", "9.7.3.9")
@row("{abs|neg}.f64", "t", "t", "9.7.3.9")
def _sign(opcode: Opcode, x: Vector) -> Vector:
    x = flush(x) if "ftz" in opcode else x
    word, top = x.view(f"u{bits(x.kind)}"), 1 << (bits(x.kind) - 1)
    result = (word ^ top if opcode[0] == "neg" else word & (top - 1)).view(x.kind)
    return propagate(where(x.isnan(), x, result), x) if x.kind == "f64" else canonical(result)


@row("{min|max}" + FTZ + "{|.NaN}{|.xorsign.abs}.f32", "t", "t t", "9.7.3.11")
@row("{min|max}.f64", "t", "t t", "9.7.3.11")
def extremum(opcode: Opcode, x: Vector, y: Vector) -> Vector:
    """Return min or max of floats, also of magnitudes with the product of signs (.xorsign.abs)."""
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
        "finite": magnitude < infinity,
        "infinite": magnitude == infinity,
        "number": magnitude <= infinity,
        "notanumber": magnitude > infinity,
        "normal": ((magnitude >= normal) & (magnitude < infinity)) | (magnitude == 0),
        "subnormal": (magnitude != 0) & (magnitude < normal),
    }[opcode[1]]


# The special-function unit (9.7.3.14 to 9.7.3.21)


@cache
def _over_lanes(name: str) -> int:
    """Return the address of a function of the unit over 16 numbers: int64(pointer, pointer)."""
    return c_address(lanes_of(getattr(mufu_unit, name)), (types.int64, types.int64))


def mufu(name: str, x: Vector) -> Vector:
    """Return a result of the special-function unit."""
    return apply(_over_lanes(name), x)


@row("{rcp|rsqrt|sqrt|ex2|lg2|sin|cos}.approx" + FTZ + ".f32", "t", "t", "9.7.3.14")
@row("tanh.approx.f32", "t", "t", "9.7.3.22")
def _approximate(opcode: Opcode, x: Vector) -> Vector:
    """Return MUFU's result; without .ftz the argument is scaled where the unit would flush."""
    name = opcode[0]
    if "ftz" in opcode or name in ("sin", "cos", "tanh"):  # of sin and cos .ftz changes nothing
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
    # 2. a NaN whose upper word is that of Inf is one, too
    return propagate(where(x.isnan(), x, where(special | (x == 0.0), y, better)), x)


@row("{rcp|rsqrt}.approx.ftz.f64", "t", "t", "9.7.3.14")
def _approximate_64(opcode: Opcode, x: Vector) -> Vector:
    """Return the unit's result for the upper 32 bits of a number, with 20 bits of fraction; the lower 32 are 0."""
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
