# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - kernels in strings
"""PTX text as records: what stands where, and what is refused with its line."""

import pytest
import torch

from fmtsim.machine.ptx.execute import execute
from fmtsim.machine.ptx.parse import Address, Group, Immediate, Register, Symbol, parse, width
from fmtsim.support.errors import ArgumentError

_TEXT = """//
.version 8.7
.target sm_90a, debug
.address_size 64
.file 1 "/tmp/dir/kernels.py", 12, 34
.global .align 16 .b32 table[2][3] = {1, -2, 0x10};
.visible .global .f32 one = 0f3F800000, two[2] = {-0f3F800000, -1.5};
.extern .shared .align 128 .b8 dynamic[];
.extern .func (.param .b32 r) declared(.param .b64 p);
.visible .entry kernel(
  .param .u64 .ptr .global .align 16 x,
  .param .align 8 .b8 s[24]
)
.maxntid 128, 1, 1
.reqntid 64, 2 /* over
two lines */ .minnctapersm 2
{
  .reg .pred %p<3>; .reg .b32 %r<4>, accumulator;
  .local .align 8 .b8 frame[16];
  .loc 1 7 3
  @!%p1 ld.global.L1::evict_last.v2.b32 {%r1, _}, [%rd1+-8];
$L1: { .reg .b32 %r1; mov.b32 %r1, accumulator; } mov.b32 %r2, table+8;
  .loc 1 9 1, function_name info, inlined_at 1 3 1
  setp.lt.f32 %p0|%p2, %r1, 0fBF800000; mov.b64 %r3, -0d3FF0000000000000; // a remark; with a mark
  cp.async.bulk.tensor [dynamic], [%rd1, {%r1, 4}], [%rd2]; add.u32 %r1, 0b101, 017;
}
.func second { ret; }
"""


def test_a_module_has_its_functions_and_variables() -> None:
    module = parse(_TEXT)
    assert (module.version, module.target, module.entries) == ("8.7", "sm_90a", ["kernel"])
    table, dynamic = module.variables["table"], module.variables["dynamic"]
    assert (table.count, table.align, table.nbytes, table.values) == (6, 16, 24, (1, 0xFFFFFFFE, 16))
    assert module.variables["two"].values == (0xBF800000, 0xBFC00000)
    assert module.variables["one"].values == (0x3F800000,) and dynamic.count is None and dynamic.nbytes == 0
    kernel = module.functions["kernel"]
    assert [(p.name, p.type, p.nbytes, p.align, p.is_array) for p in kernel.parameters] == [
        ("x", "u64", 8, 16, False), ("s", "b8", 24, 8, True)]  # fmt: skip
    assert kernel.required_threads == (64, 2) and kernel.variables[0].name == "frame"
    assert (
        kernel.registers["%p2"] == "pred"
        and kernel.registers["accumulator"] == "b32"
        and kernel.registers["%r1$1"] == "b32"
    )
    assert module.functions["declared"].is_declared and not module.functions["second"].is_entry


def test_instructions_have_opcode_operands_line_and_source() -> None:
    load, inner, move, compare, double, copy, add = parse(_TEXT).functions["kernel"].body
    assert load.opcode == ("ld", "global", "L1::evict_last", "v2", "b32") and load.predicate == Register("%p1", True)
    assert load.operands == (Group((Register("%r1"), Register("_"))), Address(Register("%rd1"), -8))
    assert (load.line, load.source, compare.source) == (21, "kernels.py:7", "kernels.py:9")
    assert str(load).endswith("[%rd1+-8]; in line 21 of the PTX (kernels.py:7)")
    assert inner.operands == (Register("%r1$1"), Register("accumulator")) and move.operands[1] == Address(
        Symbol("table"), 8
    )
    assert parse(_TEXT).functions["kernel"].labels == {"$L1": 1}
    assert compare.operands[0] == Group((Register("%p0"), Register("%p2"))) and compare.operands[2] == Immediate(
        0xBF800000, "f32"
    )
    assert copy.operands[1] == Address(Register("%rd1"), 0, (Register("%r1"), Immediate(4)))
    assert add.operands[1:] == (Immediate(5), Immediate(15)) and double.opcode == ("mov", "b64")


def test_constants_have_the_codes_of_their_operands() -> None:
    # what a constant is in an operand of each kind: an integer, hex bits, a decimal number, each also negative
    cases = {
        "mov.u16 %h1, -2; st.global.u16 [%d0], %h1;": 0xFFFE, "add.s64 %d1, 5, -7; st.global.u64 [%d0], %d1;": (1 << 64) - 2,
        "mov.f32 %r1, 0f40490FDB; st.global.b32 [%d0], %r1;": 0x40490FDB, "mov.f64 %d1, 1.5; st.global.b64 [%d0], %d1;": 0x3FF8 << 48,
        "mov.f32 %r1, -1.5; st.global.b32 [%d0], %r1;": 0xBFC00000, "mov.f32 %r1, -0f3F800000; st.global.b32 [%d0], %r1;": 0xBF800000,
        "mov.f64 %d1, -0d3FF0000000000000; st.global.b64 [%d0], %d1;": 0xBFF0 << 48, "mov.f64 %d1, -2.0; st.global.b64 [%d0], %d1;": 1 << 63 | 1 << 62,
        "mul.wide.s32 %d1, %r0, -4; st.global.b64 [%d0], %d1;": (1 << 64) - 12, "mov.b64 %d1, {%r0, 9}; st.global.b64 [%d0], %d1;": 9 << 32 | 3,
        "mov.b32 {%h1, %h2}, 0x12345678; st.global.v2.b16 [%d0], {%h2, %h1};": 0x56781234, "shl.b32 %r1, 1, %r0; st.global.b32 [%d0], %r1;": 8,
        "mov.u32 %r1, 0xFFFFFFFFU; st.global.b32 [%d0], %r1;": 0xFFFFFFFF, "mov.b32 %r1, 1e3; st.global.b32 [%d0], %r1;": 0x447A0000,
    }  # fmt: skip
    for body, code in cases.items():
        out = torch.zeros(1, dtype=torch.int64)
        head = ".version 8.7\n.target sm_90a\n.visible .entry k(.param .u64 x) { .reg .b16 %h<3>; .reg .b32 %r<3>; .reg .b64 %d<3>;"
        execute(
            parse(f"{head} ld.param.u64 %d0, [x]; mov.u32 %r0, 3; {body} ret; }}"), "k", (1, 1, 1), (1, 1, 1), [out]
        )
        assert out.item() & (1 << 64) - 1 == code, body


@pytest.mark.parametrize(("text", "message"), [
    (".version 8.7\n?", "line 2 of the PTX cannot be read at '\\?'"),
    (".version 8.7\nadd.u32 %r1;", "begins with 'add.u32', which no module holds"),
    (".entry k(.global .u64 x) { }", "line 1 of the PTX has a parameter in .global; expected .param"),
    (".entry k() { add.u32 %r1 %r2; }", "line 1 of the PTX has '%r2' after an operand of add.u32"),
    (".entry k() { ret;", "line 1 of the PTX has 'its end'"),
    (".entry k() { .reg .v2 .b32 %r; }", "declares vector registers"),
    (".global .v4 .f32 x;", "declares a vector variable"),
    (".entry k() { mov.u32 %r1, 09; }", "has '09'; expected an integer"),
    (".entry k() { p: .callprototype _ (); }", "calls through a pointer"),
])  # fmt: skip
def test_refusals_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse(text)


def test_widths_of_types() -> None:
    assert [width(kind) for kind in ("pred", "b8", "bf16", "f16x2", "u64", "b128")] == [1, 8, 16, 32, 64, 128]
