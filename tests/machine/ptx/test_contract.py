# SPDX-License-Identifier: Apache-2.0
"""The rule of contraction against machine code of ptxas: written down for small programs, made anew for random ones."""

import random
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from fmtsim import launch
from fmtsim.machine.ptx import contract, sass
from fmtsim.machine.ptx.contract import Contraction, constant_divisors, contracted
from fmtsim.machine.ptx.parse import Function, parse
from tests.support.recorded import GOLDEN, needs_golden

EMPTY = ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k() {\nret;\n}\n"
needs_ptxas = pytest.mark.skipif(sass.disassembled(EMPTY) is None, reason="ptxas or nvdisasm is not installed")
# Bodies of kernels with the inputs %a to %f, whose %r3, %r4, %r5 and %w4 are stored, and the sums that the machine code
# of ptxas 12.8 showed to be fused: "-%r1 +" is fma(-..., ..., +addend) with the operands of the product %r1
IF = "setp.gt.f32 %p1, %e, %f; "
MUL = "mul.f32 %r1, %a, %b; "
TWO = MUL + "mul.f32 %r2, %c, %d; "
CASES = {
    "product used once": (MUL + "add.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "subtracted": (MUL + "sub.f32 %r3, %c, %r1;", {"%r3": "-%r1 +"}),
    "subtracted from": (MUL + "sub.f32 %r3, %r1, %c;", {"%r3": "%r1 -"}),
    "negated": (MUL + "neg.f32 %r2, %r1; sub.f32 %r3, %c, %r2;", {"%r3": "%r1 +"}),
    "two sums": (MUL + "add.f32 %r3, %r1, %c; sub.f32 %r4, %d, %r1;", {"%r3": "%r1 +", "%r4": "-%r1 +"}),
    "stored, too": ("mul.f32 %r4, %a, %b; add.f32 %r3, %r4, %c;", {}),
    "read by max": (MUL + "add.f32 %r3, %r1, %c; max.f32 %r4, %r1, %c;", {}),
    "absolute": (MUL + "abs.f32 %r2, %r1; add.f32 %r3, %r2, %c;", {}),
    "first of two products": (TWO + "add.f32 %r3, %r2, %r1;", {"%r3": "%r2 +"}),
    "used once goes first": (TWO + "add.f32 %r3, %r1, %r2; add.f32 %r4, %r1, %e;", {"%r3": "%r2 +"}),
    "addend stays": (TWO + "add.f32 %r3, %r1, %r2; sub.f32 %r4, %r1, %r2;", {"%r3": "%r1 +", "%r4": "%r1 -"}),
    "fewer uses go first": (
        TWO + "add.f32 %r3, %r1, %r2; add.f32 %r4, %r1, %e; add.f32 %r5, %r2, %f; sub.f32 %r6, %r1, %f;"
        " st.global.b32 [%q+80], %r6;", {"%r3": "%r2 +", "%r5": "%r2 +"}),
    "three in a circle": (
        TWO + "mul.f32 %r6, %e, %f; add.f32 %r3, %r1, %r2; add.f32 %r4, %r2, %r6; add.f32 %r5, %r6, %r1;",
        {"%r3": "%r1 +", "%r4": "%r6 +", "%r5": "%r6 +"}),
    "rounded product": ("mul.rn.f32 %r1, %a, %b; add.f32 %r3, %r1, %c;", {}),
    "rounded sum": (MUL + "add.rn.f32 %r3, %r1, %c;", {}),
    "one flushes": (MUL + "add.ftz.f32 %r3, %r1, %c;", {}),
    "both flush": ("mul.ftz.f32 %r1, %a, %b; add.ftz.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "saturated sum": (MUL + "add.sat.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "quotient": ("div.full.f32 %r1, %a, %b; add.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "reciprocal": ("rcp.approx.f32 %r1, %a; add.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "flushing reciprocal": ("rcp.approx.ftz.f32 %r1, %a; add.ftz.f32 %r3, %r1, %c;", {}),
    "times -1": ("mul.f32 %r1, %a, 0fBF800000; mul.f32 %r2, %b, %c; add.f32 %r3, %r1, %r2;", {"%r3": "%r2 +"}),
    "double": ("mul.f64 %w1, %w2, %w3; add.f64 %w4, %w1, %w2;", {"%w4": "%w1 +"}),
    "halves": ("mul.bf16x2 %r1, %a, %b; add.bf16x2 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "barrier between": (MUL + "bar.sync 0; add.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "predicated store between": (IF + MUL + "@%p1 st.global.b32 [%q+99], %d; add.f32 %r3, %r1, %c;", {}),
    "predicated move between": (IF + MUL + "mov.b32 %r4, %d; @%p1 mov.b32 %r4, %a; add.f32 %r3, %r1, %c;",
        {"%r3": "%r1 +"}),
    "IEEE quotient between": (MUL + "div.rn.f32 %r4, %d, %e; add.f32 %r3, %r1, %c;", {}),
    "predicated sum": (IF + MUL + "mov.b32 %r3, %d; @%p1 add.f32 %r3, %r1, %c;", {"%r3": "%r1 +"}),
    "predicated product": (IF + "mov.b32 %r1, %d; @%p1 mul.f32 %r1, %a, %b; add.f32 %r3, %r1, %c;", {}),
    "loop": ("mov.b32 %r3, 0; mov.b32 %r9, 0; L: ld.volatile.global.b32 %r2, [%p]; mul.f32 %r1, %r2, %b;"
        " add.f32 %r3, %r1, %r3; add.s32 %r9, %r9, 1; setp.lt.s32 %p2, %r9, %f; @%p2 bra L;", {"%r3": "%r1 +"}),
    "behind a branch": (IF + MUL + "@%p1 bra L; bar.sync 0; L: add.f32 %r3, %r1, %c;", {}),
    "constant behind a branch": (IF + "mul.f32 %r1, %a, 0f40400000; @%p1 bra L; bar.sync 0; L: add.f32 %r3, %r1, %c;",
        {"%r3": "%r1 +"}),
    "constant divisor into a loop": (
        "mov.b32 %r2, 0f447A0000; div.full.f32 %r1, %a, %r2; mov.b32 %r3, 0; mov.b32 %r9, 0; L: sub.f32 %r3, %r3, %r1;"
        " bar.sync 0; add.s32 %r9, %r9, 1; setp.lt.s32 %p2, %r9, %f; @%p2 bra L;", {"%r3": "-%r1 +"}),
    "halved": (MUL + "mul.f32 %r3, %r1, 0f3F000000;", {"%r3": "%r1 * 0.5"}),
    "quotient by 1/8": ("div.full.f32 %r1, %a, %b; div.full.f32 %r3, %r1, 0f3E000000;", {"%r3": "%r1 * 8.0"}),
    "halved in another block": (IF + MUL + "@%p1 bra L; bar.sync 0; L: mul.f32 %r3, %r1, 0f3F000000;",
        {"%r3": "%r1 * 0.5"}),
    "halved twice": (MUL + "mul.f32 %r2, %r1, 0f3F000000; mul.f32 %r3, %r2, 0f3E800000;", {"%r2": "%r1 * 0.5"}),
    "halved, then added": (MUL + "mul.f32 %r2, %r1, 0f3F000000; add.f32 %r3, %r2, %c;", {"%r3": "%r2 +"}),
    "halved and stored": ("mul.f32 %r4, %a, %b; mul.f32 %r3, %r4, 0f3F000000;", {}),
    "times -2": (MUL + "mul.f32 %r3, %r1, 0fC0000000;", {}),
    "times 16": (MUL + "mul.f32 %r3, %r1, 0f41800000;", {}),
    "written again": (MUL + "add.f32 %r1, %r1, %c; mul.f32 %r2, %r1, %d; add.f32 %r3, %r2, %e;",
        {"%r1": "%r1 +", "%r3": "%r2 +"}),
}  # fmt: skip
LOOP_CARRIED = (
    "mov.b32 %r9, 0; mov.b32 %r3, 0; mov.b32 %r1, %f; L: add.f32 %r3, %r1, %r3; ld.volatile.global.b32 %e, [%p];"
    " mul.f32 %r1, %e, %b; add.s32 %r9, %r9, 1; setp.lt.s32 %p2, %r9, 4; @%p2 bra L;"
)


def module(*bodies: str, version: str = "8.7") -> str:
    """Return a module of the kernels k0, k1, ... around bodies."""
    text = f".version {version}\n.target sm_90a\n.address_size 64\n"
    for i, body in enumerate(bodies):
        loads = " ".join(f"ld.global.b32 %{name}, [%p+{4 * k}];" for k, name in enumerate("abcdef"))
        stores = " ".join(f"st.global.b{width} [%q+{8 * k}], {name};" for k, (name, width) in enumerate(
            [("%r3", 32), ("%r4", 32), ("%r5", 32), ("%w4", 64)]) if name + "," in body)  # fmt: skip
        text += (
            f".visible .entry k{i}(.param .u64 p, .param .u64 q)\n{{\n.reg .b64 %p, %q, %w<9>; .reg .pred %p<9>;\n"
            f".reg .b32 %a, %b, %c, %d, %e, %f, %r<60>; ld.param.u64 %p, [p]; ld.param.u64 %q, [q];\n"
            + re.sub(r"(?<=[;:]) ", "\n", f"{loads} {body} {stores} ret;")
            + "\n}\n"
        )
    return text


def described(function: Function, contraction: Contraction) -> dict[str, str]:
    """Return the fused sums by their registers, as CASES has them."""
    names = [getattr(x.operands[0], "name", "") if x.operands else "" for x in function.body]
    return {
        names[i]: f"{'-' * fusion.negates_product}{names[fusion.product]} {'-' if fusion.negates_addend else '+'}"
        for i, fusion in contraction.fusions.items()
    } | {names[i]: f"{names[product]} * {scale}" for i, (product, scale) in contraction.scaled.items()}


@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=needs_ptxas)])
def test_small_programs(listed: bool) -> None:
    text = module(*(body for body, _ in CASES.values()))
    listing = sass.disassembled(text) if listed else None
    found = {name: contracted(f, listing) for name, f in zip(CASES, parse(text).functions.values(), strict=True)}
    for (name, (_, expected)), function in zip(CASES.items(), parse(text).functions.values(), strict=True):
        assert (described(function, found[name]), found[name].doubts) == (expected, ()), name
        assert found[name].basis == ("sass" if listed or not contract.may_contract(function) else "rule")


def random_body(seed: int) -> str:
    """Return products, sums, quotients and negations of each other at random; what nothing reads is stored."""
    generator = random.Random(seed)  # noqa: S311
    values, lines = [f"%{name}" for name in "abcdef"], []
    for i in range(20, 44):
        opcode = generator.choice("mul mul mul add add sub sub neg div.full mul.rn mul.ftz add.ftz".split())  # noqa: SIM905
        lines.append(f"{opcode}.f32 %r{i}, {', '.join(generator.choices(values[-9:], k=1 + (opcode != 'neg')))};")
        values.append(f"%r{i}")
    read = set(re.findall(r"%r\d+", " ".join(line.partition(",")[2] for line in lines)))
    return " ".join(lines + [f"st.global.b32 [%q+{4 * i}], %r{i};" for i in range(20, 44) if f"%r{i}" not in read])


@needs_ptxas
@pytest.mark.parametrize(("version", "seeds"), [
    ("8.7", range(2)), *(pytest.param(version, range(30), marks=pytest.mark.slow) for version in ("8.7", "9.0")),
])  # fmt: skip
def test_rule_agrees_with_ptxas_on_random_programs(version: str, seeds: range) -> None:
    text = module(*map(random_body, seeds), version=version)
    listing = sass.disassembled(text)
    assert listing is not None
    for name, function in parse(text).functions.items():
        exact, rule = contracted(function, listing), contracted(function)
        assert (exact.basis, rule.fusions) == ("sass", exact.fusions)
        # every FFMA is a fused sum, but for the negation of a product, whose addend is -0; equal sums become one
        codes = listing.instructions[name]
        fused = {i for i in codes for code in codes[i] if code.startswith("FFMA") and not code.endswith("-RZ")}
        assert fused == {i for i in exact.fusions if i in codes}, name


def test_scaled_products_are_rounded_once() -> None:
    x, y = torch.tensor([1.7 * 2.0**-126, 1.3 * 2.0**100, 3.0]), torch.tensor([43 / 37 * 2.0**-9, 1.9 * 2.0**27, 0.1])
    a, b, halves = x.clone(), torch.zeros(40), (x.double() * y.double() * 0.5).float()
    for i in range(3):
        a[:2] = torch.stack([x[i], y[i]])
        assert launch(module(CASES["halved"][0]), 1, torch.cat([a, a]), b, block=1).exact
        assert b[0].view(torch.int32) == halves[i].view(torch.int32)
    assert (halves != x * y * 0.5).tolist() == [True, True, False]  # rounded twice, the first two are other numbers


@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=needs_ptxas)])
@pytest.mark.parametrize(("body", "said", "is_joined"), [
    ("ex2.approx.ftz.f32 %r1, %a; rcp.approx.ftz.f32 %r3, %r1;", "joins rcp.approx.ftz.f32", True),
    ("ex2.approx.ftz.f32 %r1, %a; rcp.approx.ftz.f32 %r3, %r1; max.f32 %r4, %r1, %c;", "joins", False),
    ("rcp.approx.ftz.f32 %r1, %a; div.approx.ftz.f32 %r3, %b, %r1;", "joins div.approx.ftz.f32", True),
    ("mov.b32 %r1, 0f3FC00000; ex2.approx.ftz.f32 %r3, %r1;", "computes ex2.approx.ftz.f32", True),
    ("ex2.approx.f32 %r1, %a; rcp.approx.f32 %r3, %r1;", "", False),
])  # fmt: skip
def test_what_ptxas_writes_otherwise_is_said(listed: bool, body: str, said: str, is_joined: bool) -> None:
    text = module(body)
    doubts = contracted(parse(text).functions["k0"], sass.disassembled(text) if listed else None).doubts
    assert [said in doubt for doubt in doubts] == [True] * (is_joined or (bool(said) and not listed))


@needs_ptxas
def test_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = contract._Program.fusions  # private: the rule itself is replaced by one of single uses
    monkeypatch.setattr(contract._Program, "fusions", lambda program: {
        i: fusion for i, fusion in right(program).items() if len(program.all_uses[fusion.product]) == 1})  # fmt: skip
    text = module(CASES["two sums"][0])
    function = parse(text).functions["k0"]
    assert contracted(function).fusions == {}
    assert described(function, contracted(function, sass.disassembled(text))) == CASES["two sums"][1]


@needs_ptxas
def test_copies_of_a_loop_that_disagree_are_doubtful() -> None:
    text = module(LOOP_CARRIED)
    (doubt,) = contracted(parse(text).functions["k0"], sass.disassembled(text)).doubts
    place = r"add\.f32 %r3, %r1, %r3; in line \d+ of the PTX"
    assert re.fullmatch(f"copies of {place} in an unrolled loop are fused and not fused", doubt)


@needs_ptxas
def test_lines_do_not_change_the_code(tmp_path: Path) -> None:
    text = module(random_body(3))
    listing = sass.disassembled(text)
    assert listing is not None
    (tmp_path / "k.ptx").write_text(text)
    ptxas = sass.assemblers()[tuple(int(part) for part in listing.ptxas.split("."))]  # type: ignore[index]
    subprocess.run([ptxas, "-arch=sm_90a", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin"], check=True)
    nvdisasm = next(folder / "nvdisasm" for folder in sass._folders() if (folder / "nvdisasm").is_file())
    printed = subprocess.run([nvdisasm, "-c", tmp_path / "k.cubin"], capture_output=True, text=True, check=True).stdout
    plain = [re.sub(r"\.reuse|\s", "", code) for code in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;", printed)]
    marked = [re.sub(r"\s", "", code) for codes in listing.instructions["k0"].values() for code in codes]
    assert sorted(plain) == sorted(marked)


@needs_ptxas
def test_fusion_switched_off_leaves_sums() -> None:
    text = module(CASES["two sums"][0])
    assert contracted(parse(text).functions["k0"], sass.disassembled(text, fuse=False)).fusions == {}


def test_constant_divisors() -> None:
    text = module(
        "mov.b32 %r1, 0f447A0000; div.full.f32 %r3, %a, %r1; div.approx.f32 %r4, %b, 0f40400000;"
        " div.full.f32 %r5, %a, %b; mov.b32 %r2, 0f3F800000; mov.b32 %r2, %c; div.full.f32 %r6, %a, %r2;"
    )
    assert sorted(constant_divisors(parse(text).functions["k0"]).values()) == [0x40400000, 0x447A0000]


def test_without_ptxas_there_is_no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "assemblers", dict)
    assert sass.disassembled(module(MUL + "add.f32 %r3, %a, %d;")) is None


@needs_golden
@needs_ptxas
@pytest.mark.slow
@pytest.mark.parametrize(("archive", "fused"), [("kernels_h100.zip", 3), ("inductor_h100.zip", 6)])
def test_rule_and_machine_code_agree_on_recorded_kernels(archive: str, fused: int) -> None:
    with zipfile.ZipFile(GOLDEN / "triton" / archive) as folder:
        for name in folder.namelist():
            if name.endswith(("/ptx", ".ptx")):
                text = folder.read(name).decode()
                kernel = next(f for f in parse(text).functions.values() if f.is_entry)
                exact = contracted(kernel, sass.disassembled(text))
                assert (contracted(kernel).fusions, exact.doubts, exact.basis) == (exact.fusions, (), "sass"), name
                fused -= len(exact.fusions)
    assert fused == 0
