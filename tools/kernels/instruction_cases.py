# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: E501 - kernels in strings, and a case a line
"""Single PTX instructions on operands that meet every branch: pairs of 400 values each, triples, all of 2^16, all of 2^32.

A case is a kernel that loads operands, runs the instruction and stores its result. ``RANGES`` names instructions of one
32-bit operand whose results over all 2^32 are kept as 256 sums of mixed words; ``range_sum`` repeats such a sum.
"""

import concurrent.futures
import functools
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.kernels.cases import Case, integers, patterns, special, words

_BITS = {"pred": 32, "f16": 16, "bf16": 16, "e4m3x2": 16, "e5m2x2": 16, "b16": 16, "u16": 16, "s16": 16, "f32": 32, "b32": 32, "u32": 32,
         "s32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "f64": 64, "b64": 64, "u64": 64, "s64": 64, "s8": 16, "u8": 16}  # fmt: skip
_TORCH = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_SHIFT = {16: 1, 32: 2, 64: 3}
_ROWS: list[tuple[str, str, tuple[str, ...]]] = []  # (instruction or body, type of the result, types of the operands)
RANGES: list[tuple[str, str]] = []  # (instruction or body, type of the result); the operand has 32 bits


def _add(instruction: str, result: str, *operands: str) -> None:
    _ROWS.append((instruction, result, operands))


def _range(instruction: str, result: str) -> None:
    RANGES.append((instruction, result))


def _fill() -> None:
    """Name the instructions; ptxas 12.8 accepts all of them for sm_90a."""
    rounding = ("rn", "rz", "rm", "rp")
    compare = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    # 1. one operand of 32 bits: all 2^32
    for function, ftz in product(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos"), ("", ".ftz")):
        _range(f"{function}.approx{ftz}.f32", "f32")
    _range("tanh.approx.f32", "f32")
    for function, mode, ftz in product(("rcp", "sqrt"), rounding, ("", ".ftz")):
        _range(f"{function}.{mode}{ftz}.f32", "f32")
    for mode, form, ftz in product(("rn", "rz"), ("f16", "bf16"), ("", ".ftz")):
        if not (form == "bf16" and ftz):
            _range(f"cvt.{mode}{ftz}.{form}.f32", "b16")
    for form in ("f16", "bf16"):
        _range(f"cvt.rn.relu.{form}.f32", "b16")
        _range(f"cvt.rz.relu.{form}.f32", "b16")
    for mode in ("rn", "rz", "rna", "rn.relu", "rz.relu"):
        _range(f"cvt.{mode}.tf32.f32", "b32")
    _range("cvt.rn.satfinite.e4m3x2.f32 %d, %a, 0f3F800000;", "b16")
    _range("cvt.rn.satfinite.relu.e4m3x2.f32 %d, 0fC0000000, %a;", "b16")
    _range("cvt.rn.satfinite.e5m2x2.f32 %d, %a, 0f3F800000;", "b16")
    _range("cvt.rn.satfinite.relu.e5m2x2.f32 %d, %a, 0f3F800000;", "b16")
    for mode, integer in product(("rni", "rzi", "rmi", "rpi"), ("s32", "u32", "s64", "u64", "s16", "u16", "s8", "u8")):
        if mode in ("rni", "rzi") or integer in ("s32", "u32"):
            _range(f"cvt.{mode}.{integer}.f32", integer)
    for mode, ftz in product(("rni", "rzi", "rmi", "rpi"), ("", ".ftz", ".sat", ".ftz.sat")):
        _range(f"cvt.{mode}{ftz}.f32.f32", "f32")
    for rest in ("cvt.rzi.ftz.s32.f32", "cvt.rni.ftz.u32.f32"):
        _range(rest, "b32")
    for rest in (
        "cvt.sat.f32.f32",
        "cvt.ftz.f32.f32",
        "cvt.ftz.sat.f32.f32",
        "neg.f32",
        "neg.ftz.f32",
        "abs.f32",
        "abs.ftz.f32",
    ):
        _range(rest, "f32")
    _range("cvt.f64.f32", "f64")
    _range("cvt.ftz.f64.f32", "f64")
    for mode, integer in product(rounding, ("s32", "u32")):
        _range(f"cvt.{mode}.f32.{integer}", "f32")
    for form, integer in product(("f16", "bf16"), ("s32", "u32")):
        _range(f"cvt.rn.{form}.{integer}", "b16")
        _range(f"cvt.rz.{form}.{integer}", "b16")
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        _range(f"testp.{test}.f32 %p1, %a; selp.b32 %d, 1, 0, %p1;", "pred")
    for packed in ("ex2.approx.f16x2", "ex2.approx.ftz.bf16x2", "tanh.approx.f16x2", "tanh.approx.bf16x2", "neg.f16x2", "neg.ftz.f16x2",
                   "neg.bf16x2", "abs.f16x2", "abs.bf16x2"):  # fmt: skip
        _range(packed, "b32")
    for packed in (
        "cvt.rn.satfinite.e4m3x2.f16x2",
        "cvt.rn.satfinite.relu.e4m3x2.f16x2",
        "cvt.rn.satfinite.e5m2x2.f16x2",
    ):
        _range(packed, "b16")
    for integer in ("popc.b32", "clz.b32", "brev.b32", "bfind.u32", "bfind.s32", "bfind.shiftamt.u32", "bfind.shiftamt.s32", "cnot.b32", "not.b32",
                    "neg.s32", "abs.s32"):  # fmt: skip
        _range(integer, "b32")
    for integer in (
        "cvt.sat.s8.s32",
        "cvt.sat.u8.s32",
        "cvt.sat.u16.s32",
        "cvt.sat.s16.u32",
        "cvt.s8.s32",
        "cvt.u8.s32",
    ):
        _range(integer, "s16")
    # 2. one operand of 16 bits: all 2^16; of 64 bits: chosen ones
    for form in ("f16", "bf16"):
        _add(f"cvt.f32.{form}", "f32", form)
        _add(f"neg.{form}", form, form)
        _add(f"abs.{form}", form, form)
        _add(f"tanh.approx.{form}", form, form)
        for mode, integer in product(("rni", "rzi", "rmi", "rpi"), ("s32", "u32", "s16", "u8", "s64")):
            if (form, integer) != ("bf16", "u8"):
                _add(f"cvt.{mode}.{integer}.{form}", integer, form)
        for mode in ("rni", "rzi", "rmi", "rpi"):
            _add(f"cvt.{mode}.{form}.{form}", form, form)
        for mode, integer in product(("rn", "rz"), ("s16", "u16", "s8", "u8")):
            if form == "f16" or integer[1:] == "16":
                _add(f"cvt.{mode}.{form}.{integer}", form, integer)
        for mode, integer in product(("rn", "rz", "rm", "rp"), ("s64", "u64")):
            _add(f"cvt.{mode}.{form}.{integer}", form, integer)
        for mode in ("rn", "rz", "rm", "rp"):
            _add(f"cvt.{mode}.{form}.f64", form, "f64")
        _add(f"cvt.f64.{form}", "f64", form)
    _add("cvt.ftz.f32.f16", "f32", "f16")
    _add("cvt.ftz.f32.bf16", "f32", "bf16")
    _add("cvt.sat.f32.f16", "f32", "f16")
    _add("cvt.sat.f16.f16", "f16", "f16")
    _add("cvt.rn.sat.f16.f32", "f16", "f32")
    _add("cvt.rn.bf16.f16", "bf16", "f16")
    _add("cvt.rn.f16.bf16", "f16", "bf16")
    _add("neg.ftz.f16", "f16", "f16")
    _add("abs.ftz.f16", "f16", "f16")
    _add("ex2.approx.f16", "f16", "f16")
    _add("ex2.approx.ftz.bf16", "bf16", "bf16")
    for form in ("e4m3x2", "e5m2x2"):
        _add(f"cvt.rn.f16x2.{form}", "f16x2", form)
        _add(f"cvt.rn.relu.f16x2.{form}", "f16x2", form)
    for mode, ftz in product(rounding, ("", ".ftz", ".sat")):
        _add(f"cvt.{mode}{ftz}.f32.f64", "f32", "f64")
    for mode, integer in product(("rni", "rzi", "rmi", "rpi"), ("s32", "u32", "s64", "u64")):
        _add(f"cvt.{mode}.{integer}.f64", integer, "f64")
    for mode in ("rni", "rzi", "rmi", "rpi"):
        _add(f"cvt.{mode}.f64.f64", "f64", "f64")
    for mode, integer, form in product(rounding, ("s64", "u64"), ("f32", "f64")):
        _add(f"cvt.{mode}.{form}.{integer}", form, integer)
    for integer in ("s32", "u32"):
        _add(f"cvt.rn.f64.{integer}", "f64", integer)
    for function, mode in product(("rcp", "sqrt"), rounding):
        _add(f"{function}.{mode}.f64", "f64", "f64")
    for rest in ("rcp.approx.ftz.f64", "rsqrt.approx.f64", "rsqrt.approx.ftz.f64", "neg.f64", "abs.f64"):
        _add(rest, "f64", "f64")
    for integer in ("popc.b64", "clz.b64", "bfind.u64", "bfind.s64", "bfind.shiftamt.u64", "bfind.shiftamt.s64"):
        _add(integer, "u32", "u64")
    for integer in ("brev.b64", "cnot.b64", "neg.s64", "abs.s64", "not.b64"):
        _add(integer, "u64", "u64")
    for to, frm in (
        ("sat.s32.s64", "s64"),
        ("sat.u32.s64", "s64"),
        ("sat.s8.s64", "s64"),
        ("u32.u64", "u64"),
        ("s8.s64", "s64"),
    ):
        _add(f"cvt.{to}", to.split(".")[-2], frm)
    # 3. two operands: 400 by 400
    for op, mode, ftz in product(("add", "sub", "mul"), (*rounding, ""), ("", ".ftz", ".sat", ".ftz.sat")):
        _add(f"{op}{'.' * bool(mode)}{mode}{ftz}.f32", "f32", "f32", "f32")
    for op, mode in product(("add", "sub", "mul", "div"), rounding):
        _add(f"{op}.{mode}.f64", "f64", "f64", "f64")
        if op == "div":
            _add(f"{op}.{mode}.f32", "f32", "f32", "f32")
            _add(f"{op}.{mode}.ftz.f32", "f32", "f32", "f32")
    for mode, ftz in product(("approx", "full"), ("", ".ftz")):
        _add(f"div.{mode}{ftz}.f32", "f32", "f32", "f32")
    for op, form, rest in product(
        ("add", "sub", "mul"), ("f16", "bf16", "f16x2", "bf16x2"), ("", ".rn", ".ftz", ".sat", ".rn.ftz.sat")
    ):
        if form[0] == "f" or rest in ("", ".rn"):
            _add(f"{op}{rest}.{form}", form, form, form)
    for op, form, rest in product(
        ("min", "max"),
        ("f32", "f16", "bf16", "f16x2", "bf16x2"),
        ("", ".NaN", ".ftz", ".xorsign.abs", ".NaN.xorsign.abs", ".ftz.NaN"),
    ):
        if form[0] == "f" or "ftz" not in rest:
            _add(f"{op}{rest}.{form}", form, form, form)
    for op in ("min", "max"):
        _add(f"{op}.f64", "f64", "f64", "f64")
    _add("copysign.f32", "f32", "f32", "f32")
    _add("copysign.f64", "f64", "f64", "f64")
    for test, form in product(compare, ("f32", "f64", "f16", "bf16")):
        _add(f"setp.{test}.{form} %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", "pred", form, form)
    for test in ("eq", "lt", "leu", "nan"):
        _add(f"setp.{test}.ftz.f32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", "pred", "f32", "f32")
        _add(
            f"setp.{test}.f16x2 %p1|%p2, %a, %b; selp.b32 %d, 1, 0, %p1; @%p2 add.s32 %d, %d, 2;",
            "pred",
            "f16x2",
            "f16x2",
        )
        _add(
            f"setp.{test}.bf16x2 %p1|%p2, %a, %b; selp.b32 %d, 1, 0, %p1; @%p2 add.s32 %d, %d, 2;",
            "pred",
            "bf16x2",
            "bf16x2",
        )
        _add(f"set.{test}.f32.f32", "f32", "f32", "f32")
        _add(f"set.{test}.u32.f32", "u32", "f32", "f32")
        _add(f"set.{test}.f16.f16", "f16", "f16", "f16")
        _add(f"set.{test}.bf16.bf16", "bf16", "bf16", "bf16")
        _add(f"set.{test}.f16x2.f16x2", "f16x2", "f16x2", "f16x2")
    _add("setp.lt.and.f32 %p1|%p2, %a, %b, %p3; selp.b32 %d, 1, 0, %p1; @%p2 add.s32 %d, %d, 2;", "pred", "f32", "f32")
    for test, form in product(
        ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"), ("s32", "u32", "s64", "u64", "s16", "u16")
    ):
        if test in ("eq", "ne", "lt", "le", "gt", "ge") or form[0] == "u":
            _add(f"setp.{test}.{form} %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", "pred", form, form)
    for mode, form in product(("rn", "rz"), ("f16x2", "bf16x2")):
        _add(f"cvt.{mode}.{form}.f32", form, "f32", "f32")
        _add(f"cvt.{mode}.relu.{form}.f32", form, "f32", "f32")
    for form, relu in product(("e4m3x2", "e5m2x2"), ("", ".relu")):
        _add(f"cvt.rn.satfinite{relu}.{form}.f32", form, "f32", "f32")
    for op, form in product(
        ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"), ("s16", "u16", "s32", "u32", "s64", "u64")
    ):
        _add(f"{op}.{form}", form, form, form)
    for op, form in product(("mul.wide", "mul24.lo", "mul24.hi"), ("s32", "u32")):
        _add(f"{op}.{form}", form[0] + "64" if op == "mul.wide" else form, form, form)
    for op in ("mul.wide.s16", "mul.wide.u16"):
        _add(op, op[-3] + "32", op[-3:], op[-3:])
    for op in ("add.sat.s32", "sub.sat.s32", "min.relu.s32", "max.relu.s32"):
        _add(op, "s32", "s32", "s32")
    for op in ("add.s16x2", "add.u16x2", "min.s16x2", "max.u16x2", "min.relu.s16x2"):
        _add(op, "b32", "b32", "b32")
    for op in ("shl.b16", "shr.s16", "shr.u16"):
        _add(op, "u16", "u16", "u32")
    for op in ("shl.b32", "shr.s32", "shr.u32"):
        _add(op, "u32", "u32", "u32")
    for op in ("shl.b64", "shr.s64", "shr.u64"):
        _add(op, "u64", "u64", "u32")
    for op in (
        "bmsk.clamp.b32",
        "bmsk.wrap.b32",
        "szext.clamp.s32",
        "szext.wrap.s32",
        "szext.clamp.u32",
        "szext.wrap.u32",
    ):
        _add(op, "u32", "u32", "u32")
    for bits, op in product(("b16", "b32", "b64"), ("and", "or", "xor")):
        _add(f"{op}.{bits}", bits, bits, bits)
    _add("fns.b32 %d, %a, 3, %b;", "u32", "u32", "u32")
    # 4. three operands
    for mode, rest in product(rounding, ("", ".ftz", ".sat", ".ftz.sat")):
        _add(f"fma.{mode}{rest}.f32", "f32", "f32", "f32", "f32")
    for mode in rounding:
        _add(f"fma.{mode}.f64", "f64", "f64", "f64", "f64")
    for form, rest in product(
        ("f16", "f16x2", "bf16", "bf16x2"), ("", ".ftz", ".sat", ".relu", ".ftz.relu", ".ftz.sat")
    ):
        if form[0] == "f" or rest in ("", ".relu"):
            _add(f"fma.rn{rest}.{form}", form, form, form, form)
    for op, form in product(("mad.lo", "mad.hi"), ("s16", "u16", "s32", "u32", "s64", "u64")):
        _add(f"{op}.{form}", form, form, form, form)
    for form in ("s32", "u32"):
        _add(f"mad.wide.{form}", form[0] + "64", form, form, form[0] + "64")
        _add(f"mad24.lo.{form}", form, form, form, form)
        _add(f"mad24.hi.{form}", form, form, form, form)
        _add(f"sad.{form}", form, form, form, form)
        _add(f"bfe.{form}", form, form, "u32", "u32")
        _add(f"bfe.{form[0]}64", form[0] + "64", form[0] + "64", "u32", "u32")
        _add(f"slct.{form}.f32", form, form, form, "f32")
        _add(f"slct.{form}.s32", form, form, form, "s32")
        _add(f"dp4a.{form}.{form}", form, form, form, form)
        _add(f"dp2a.lo.{form}.{form}", form, form, form, form)
        _add(f"dp2a.hi.{form}.{form}", form, form, form, form)
    for op in ("sad.s16", "sad.u16"):
        _add(op, op[-3:], op[-3:], op[-3:], op[-3:])
    _add("mad.hi.sat.s32", "s32", "s32", "s32", "s32")
    _add("slct.ftz.f32.f32", "f32", "f32", "f32", "f32")
    _add("dp4a.u32.s32", "s32", "u32", "s32", "s32")
    _add("dp4a.s32.u32", "s32", "s32", "u32", "s32")
    _add("bfi.b32 %d, %a, %b, %c, 7;", "u32", "u32", "u32", "u32")
    _add("bfi.b32 %d, %a, %a, %b, %c;", "u32", "u32", "u32", "u32")
    _add("bfi.b64 %d, %a, %b, %c, 19;", "u64", "u64", "u64", "u32")
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        _add(f"prmt.b32{mode}", "u32", "u32", "u32", "u32")
    for direction, mode in product("lr", ("clamp", "wrap")):
        _add(f"shf.{direction}.{mode}.b32", "u32", "u32", "u32", "u32")
    for table in (0x1B, 0x96, 0xE8):
        _add(f"lop3.b32 %d, %a, %b, %c, {table};", "u32", "u32", "u32", "u32")
    for op in (
        "vadd4.u32.u32.u32",
        "vsub4.s32.s32.s32.sat",
        "vabsdiff4.u32.u32.u32",
        "vmax2.s32.s32.s32",
        "vabsdiff4.u32.u32.u32.add",
    ):
        _add(op, "u32", "u32", "u32", "u32")
    _add("add.cc.u32 %r1, %a, %b; addc.cc.u32 %r2, %b, %c; addc.u32 %r3, 0, 0; xor.b32 %d, %r1, %r2; shf.l.wrap.b32 %d, %d, %r3, %r3;", "u32",
         "u32", "u32", "u32")  # fmt: skip
    _add("sub.cc.u32 %r1, %a, %b; subc.cc.u32 %r2, %b, %c; subc.u32 %r3, 0, 0; xor.b32 %d, %r1, %r2; sub.u32 %d, %d, %r3;", "u32", "u32", "u32",
         "u32")  # fmt: skip
    _add("mad.lo.cc.u32 %r1, %a, %b, %c; madc.hi.cc.u32 %r2, %a, %b, %c; madc.lo.u32 %r3, %a, %c, 0; xor.b32 %d, %r1, %r2; add.u32 %d, %d, %r3;",
         "u32", "u32", "u32", "u32")  # fmt: skip
    # 5. a warp together
    for mode in (
        "ballot.sync.b32 %d, %p1",
        "any.sync.pred %p2, %p1",
        "all.sync.pred %p2, %p1",
        "uni.sync.pred %p2, !%p1",
    ):
        tail = "" if "b32" in mode else "; selp.b32 %d, 1, 0, %p2"
        _add(f"setp.lt.s32 %p1, %a, 100; vote.{mode}, -1{tail};", "u32", "s32")
    for mode in ("up", "down", "bfly", "idx"):
        _add(f"shfl.sync.{mode}.b32 %d|%p1, %a, %b, 0x1F, -1; @%p1 xor.b32 %d, %d, 0x55555555;", "u32", "u32", "u32")
        _add(f"shfl.sync.{mode}.b32 %d|%p1, %a, 1, %b, -1; @%p1 xor.b32 %d, %d, 0x55555555;", "u32", "u32", "u32")
    for mode in ("add.s32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32"):
        _add(f"redux.sync.{mode} %d, %a, -1;", "u32", "u32")
    _add("and.b32 %r1, %a, 3; match.any.sync.b32 %d, %r1, -1;", "u32", "u32")
    _add("shr.u32 %r1, %a, 31; match.all.sync.b32 %d|%p1, %r1, -1; @%p1 add.s32 %d, %d, 7;", "u32", "u32")


_HEAD = """.version 8.7
.target sm_90a
.address_size 64

"""


def _body(text: str, count: int) -> str:
    return text if text.endswith(";") else f"{text} %d, {', '.join(('%a', '%b', '%c')[:count])};"


def pairs_ptx(instruction: str, result: str, operands: tuple[str, ...]) -> str:
    """Return a kernel that stores the instruction's result for each index of its operands."""
    lines = []
    for name, kind in zip("abc", operands, strict=False):
        bits = _BITS[kind]
        lines += [
            f"shl.b64 %q2, %q1, {_SHIFT[bits]}; ld.param.u64 %q3, [{name}]; add.s64 %q3, %q3, %q2; ld.global.b{bits} %{name}, [%q3];"
        ]
    kinds = " ".join(f".reg .b{_BITS[kind]} %{name};" for name, kind in zip("abc", operands, strict=False))
    bits = _BITS[result]
    return f"""{_HEAD}.visible .entry probe(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 y, .param .u32 n)
{{
.reg .pred %p<6>; .reg .b16 %h<6>; .reg .b32 %r<8>; .reg .b64 %q<6>; {kinds} .reg .b{bits} %d;
mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mov.u32 %r6, %tid.x; mad.lo.s32 %r4, %r4, %r5, %r6;
ld.param.u32 %r5, [n]; setp.ge.u32 %p4, %r4, %r5; @%p4 bra done; cvt.u64.u32 %q1, %r4; setp.gt.u32 %p3, %r4, 1000;
{chr(10).join(lines)}
{_body(instruction, len(operands))}
shl.b64 %q2, %q1, {_SHIFT[bits]}; ld.param.u64 %q3, [y]; add.s64 %q3, %q3, %q2; st.global.b{bits} [%q3], %d;
done:
ret;
}}
"""


def range_ptx(instruction: str, result: str) -> str:
    """Return a kernel whose thread adds up the mixed results of 256 operands from 256 times its index; see range_sum."""
    bits = _BITS[result]
    widen = "mov.b64 %q1, %d;" if bits == 64 else f"cvt.u64.u{bits} %q1, %d;"
    return f"""{_HEAD}.visible .entry probe(.param .u64 sums)
{{
.reg .pred %p<6>; .reg .b16 %h<6>; .reg .b32 %r<8>; .reg .b64 %q<8>; .reg .b32 %a; .reg .b{bits} %d;
mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mov.u32 %r6, %tid.x; mad.lo.s32 %r4, %r4, %r5, %r6;
shl.b32 %a, %r4, 8; mov.b32 %r5, 0; mov.b64 %q4, 0;
next:
{_body(instruction, 1)}
{widen}
cvt.u64.u32 %q2, %a; shl.b64 %q2, %q2, 32; xor.b64 %q1, %q1, %q2;
shr.u64 %q2, %q1, 33; xor.b64 %q1, %q1, %q2; mul.lo.u64 %q1, %q1, 0xff51afd7ed558ccd;
shr.u64 %q2, %q1, 33; xor.b64 %q1, %q1, %q2; mul.lo.u64 %q1, %q1, 0xc4ceb9fe1a85ec53;
shr.u64 %q2, %q1, 33; xor.b64 %q1, %q1, %q2; add.u64 %q4, %q4, %q1;
add.u32 %a, %a, 1; add.u32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 256; @%p5 bra next;
shr.u32 %r4, %r4, 16; mul.wide.u32 %q2, %r4, 8; ld.param.u64 %q3, [sums]; add.s64 %q3, %q3, %q2; red.global.add.u64 [%q3], %q4;
ret;
}}
"""


def range_sum(operands: np.ndarray, results: np.ndarray) -> int:
    """Return the sum over a chunk: ``operands`` uint32, ``results`` unsigned of any width; one of 256 words of a record."""
    word = operands.astype(np.uint64) << np.uint64(32) ^ results.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ word >> np.uint64(33)) * np.uint64(factor)
    return int((word ^ word >> np.uint64(33)).sum(dtype=np.uint64))


@functools.cache
def _values(kind: str, seed: int, count: int) -> Tensor:
    """Return ``count`` operands of a type as integers of its width: special ones first."""
    bits = _BITS[kind]
    if kind in ("f32", "f64", "f16", "bf16"):
        dtype = dict(f32=torch.float32, f64=torch.float64, f16=torch.float16, bf16=torch.bfloat16)[kind]
        return special(seed, count, dtype).view(_TORCH[bits])
    if kind in ("f16x2", "bf16x2"):
        dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
        low, high = special(seed, count, dtype), special(seed + 50, count, dtype)
        high = high[torch.from_numpy(np.argsort(words(seed, count), kind="stable"))]
        return torch.stack([low, high], 1).view(torch.int32).reshape(-1)
    near = [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        15,
        16,
        17,
        24,
        30,
        31,
        32,
        33,
        40,
        47,
        48,
        62,
        63,
        64,
        65,
        100,
        127,
        128,
        255,
        256,
        1000,
        32767,
        32768,
        65535,
    ]
    near += [
        65536,
        (1 << 23) - 1,
        1 << 23,
        1 << 24,
        (1 << 24) + 1,
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) - 1,
        1 << 32,
        (1 << 53) + 1,
        (1 << 63) - 1,
        1 << 63,
    ]
    edges = sorted({v & (1 << bits) - 1 for base in near for v in (base, -base)})
    signed = torch.tensor([v - (1 << bits) if v >> (bits - 1) else v for v in edges], dtype=_TORCH[bits])[:count]
    rest = max(count - len(signed), 0)
    shift = integers(seed + 1, rest, high=bits, dtype=_TORCH[bits])
    return torch.cat([signed, patterns(seed, rest, dtype=_TORCH[bits]) >> shift])


def make_arguments(result: str, operands: tuple[str, ...]) -> list[object]:
    """Return the arguments of a case: three operands (of which a short one is not read), results, count."""
    if len(operands) == 1:
        kind = operands[0]
        drawn = [torch.arange(-32768, 32768, dtype=torch.int16)] if _BITS[kind] == 16 else [_values(kind, 1, 4096)]
    elif len(operands) == 2:
        left, right = _values(operands[0], 1, 400), _values(operands[1], 2, 400)
        drawn = [left.repeat_interleave(400), right.repeat(400)]
    else:
        picks = [integers(10 + i, 60000, high=400, dtype=torch.int64) for i in range(3)]
        drawn = [_values(kind, i + 1, 400)[pick] for i, (kind, pick) in enumerate(zip(operands, picks, strict=True))]
    count = len(drawn[0])
    drawn += [torch.zeros(2, dtype=torch.int64) for _ in range(3 - len(drawn))]
    return [*drawn, torch.full((count,), -1, dtype=_TORCH[_BITS[result]]), count]


def name(instruction: str, kinds: tuple[str, ...] = ()) -> str:
    """Return the name of a case: the instruction without operands."""
    words_ = "".join(c if c.isalnum() or c in "._" else "_" for c in instruction.replace("%", "")).strip("_")
    return f"ptx_{words_}" + "_".join(("", *kinds)) * (not instruction.endswith(";"))


_fill()


def cases() -> list[Case]:
    """Return a case for each instruction with chosen operands, those of ``RANGES`` among them."""
    rows = _ROWS + [(instruction, result, (_operand(instruction),)) for instruction, result in RANGES]
    found = []
    for instruction, result, operands in rows:
        arguments = functools.partial(make_arguments, result, operands)
        count = 65536 if _BITS[operands[0]] == 16 and len(operands) == 1 else (4096, 160000, 60000)[len(operands) - 1]
        found.append(
            Case(name=name(instruction, operands), kernel=pairs_ptx(instruction, result, operands), grid=(-(-count // 128),),
                 make_arguments=arguments, kind="ptx", entry="probe")
        )  # fmt: skip
    return found


def _operand(instruction: str) -> str:
    last = instruction.split()[0].split(".")[-1]
    return {"b32": "u32"}.get(last, last)


def record_ranges(path: Path, have: set[str], match: str, seconds: float) -> int:
    """Record the sums of every instruction of one 32-bit operand over all 2^32 operands, one file of 256 words each."""
    import time

    from tools.kernels.record import _launch, assemble, write

    rows = [
        (name(i) + "_range", i, range_ptx(i, r))
        for i, r in RANGES
        if match in i and f"{name(i)}_range.json" not in have
    ]
    failed, began = 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        cubins = [(label, instruction, pool.submit(assemble, ptx)) for label, instruction, ptx in rows]
        for label, instruction, cubin in cubins:
            if time.monotonic() - began > seconds:
                print(f"time is over before {label}", flush=True)
                return 1
            try:
                sums = torch.zeros(256, dtype=torch.int64, device="cuda")
                case = Case(
                    name=label,
                    kernel="",
                    grid=(1 << 16,),
                    make_arguments=list,
                    options=dict(block=(256,)),
                    kind="ptx",
                    entry="probe",
                )
                _launch(cubin.result(), case, [sums])
                body = sums.cpu().numpy().tobytes()
                write(path, (label, dict(kind="range", instruction=instruction), "", body))
            except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
                failed += 1
                print(f"{label}: FAILED {str(error)[:300]}", flush=True)
    print(f"{len(rows)} ranges, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return int(failed > 0)


def known(records: object) -> dict[str, np.ndarray]:
    """Return the sums of every range of a record by instruction: 256 uint64 each."""
    have = set(records.names)
    found = ((instruction, f"{name(instruction)}_range") for instruction, _ in RANGES)
    return {instruction: np.frombuffer(records.kept(label), np.uint64) for instruction, label in found if label in have}
