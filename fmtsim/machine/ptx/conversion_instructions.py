# SPDX-License-Identifier: Apache-2.0
"""Conversions and moves: PTX ISA 8.7, section 9.7.9."""

from fmtsim.machine.ptx.gpu_numbers import (
    bf16_to_f32,
    canonical,
    encode,
    f16_to_f32,
    f32_to_bf16,
    finish,
    flush,
    high,
    joined,
    low,
    narrowed_nan,
    propagate,
    saturate,
    small_to_f32,
    to_odd,
)
from fmtsim.machine.ptx.instruction_table import Opcode, row
from fmtsim.machine.ptx.values import Vector, bits, where

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
