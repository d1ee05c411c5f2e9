# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - kernels in strings
"""Every instruction of one thread against the oracle, bit for bit: one kernel a family, on special and random operands."""

import itertools
import zlib
from collections import defaultdict

import numpy as np
import pytest
import torch

from fmtsim.machine.ptx.execute import execute
from fmtsim.machine.ptx.instructions import TABLE
from fmtsim.machine.ptx.parse import parse
from tests.machine.ptx.oracle import FORMATS, expected

_REGISTERS = {1: ("pred", "%p"), 8: ("b16", "%h"), 16: ("b16", "%h"), 32: ("b32", "%r"), 64: ("b64", "%d")}
_THREADS = 256
_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
_INTS = [
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    24,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    0x0F1E,
    0x3210,
    0x7FFF,
    0x8000,
    0xFFFF,
]


def bits(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def floats(kind: str) -> list[int]:
    """Return codes of a format: zeros, subnormals, ones and their neighbours, halves of last places, the largest, Inf, NaN."""
    f = FORMATS[kind]
    one, last = ((1 << f.bits - 2 - f.mantissa) - 1) << f.mantissa, 1 << f.mantissa
    halves = [
        one + (k << f.mantissa) + j
        for k, j in ((-1, 0), (1, last // 2), (7, 3), (f.mantissa - 1, 1), (f.mantissa, 1), (31, 0), (63, 1))
    ]
    if kind == "bf16":
        halves[-1] = one + 1
    small = [1, last // 2, last - 1, last, last + 1, one - (f.mantissa + 1 << f.mantissa), one // 2, one // 2 + 1]
    large = [f.largest, f.largest - last, f.largest + 1, f.largest + 2, f.largest + 1 + last // 2 + 5]
    codes = [0, *small, *halves, one, one - 1, one + 1, *large]
    return [code | sign << f.bits - 1 for code in codes for sign in (0, 1)]


def pool(kind: str, opcode: str) -> list[int]:
    """Return the special codes of an operand."""
    width, parts = bits(kind), opcode.split(".")
    if width == 1:
        return [0, 1]
    for name in ("f16", "bf16", "f32", "f64"):
        if FORMATS[name].bits == width and name in parts and kind[0] in "fb":
            return floats(name)
        if f"{name}x2" in parts and width == 32 and kind == "b32":
            codes = floats(name)
            return [code | codes[(11 * i + 5) % len(codes)] << 16 for i, code in enumerate(codes)]
    top = 1 << width - 1
    ties = (
        [top | top >> k | j for k in (11, 24) for j in (0, 1)] if opcode.startswith("cvt") else []
    )  # of conversions to floats
    wide = [
        *_INTS,
        *ties,
        top - 1,
        top,
        top + 1,
        2 * top - 1,
        2 * top - 2,
        top // 2,
        0x5555555555555555,
        0xFEDCBA9876543210,
    ]
    return sorted({code & 2 * top - 1 for code in wide})


def patterns(opcode: str, kinds: tuple[str, ...]) -> np.ndarray:
    """Return operands as uint64 [operands, N]: all pairs of special codes, or all codes of 16 bits, and random ones."""
    rng = np.random.default_rng(zlib.crc32(opcode.encode()))
    pools = [pool(kind, opcode) for kind in kinds]
    if len(kinds) == 1 and 1 < bits(kinds[0]) <= 16:
        return np.arange(1 << 16, dtype=np.uint64)[None]
    numbers = [kind for kind in kinds if kind != "pred"]
    grid = list(itertools.product(*pools[:2]))
    if opcode.startswith("set"):  # many opcodes of one comparison
        grid = [grid[i] for i in rng.permutation(len(grid))[:200]]
    rows = [(*pair, *(p[rng.integers(len(p))] for p in pools[2:])) for pair in grid]
    whole = np.array(rows, np.uint64).T
    # random ones: any bits, and numbers of near exponents, the last of which nearly cancels the others
    count = 160 if not opcode.startswith("set") else 40
    rest = rng.integers(0, 1 << 63, (len(kinds), 2 * count), np.uint64) * 2 + rng.integers(
        0, 2, (len(kinds), 2 * count), np.uint64
    )
    kind = next((name for name in ("f16", "bf16", "f32", "f64") if name in opcode.replace("x2", "").split(".")), None)
    if kind is not None and len(numbers) > 1:
        f = FORMATS[kind]
        half = (1 << f.bits - 2 - f.mantissa) - 1
        near = np.uint64(half) + rng.integers(0, 3, (len(kinds), count), np.uint64)
        codes = near << np.uint64(f.mantissa) | rest[:, :count] & np.uint64((1 << f.mantissa) - 1)
        if len(numbers) == 3 and kind in ("f32", "f64"):
            dtype = {32: np.float32, 64: np.float64}[f.bits]
            x, y = (codes[i].astype(f"u{f.bits // 8}").view(dtype) for i in (0, 1))
            codes[2] = (-(x * y)).view(f"u{f.bits // 8}") + rng.integers(0, 3, count, np.uint64).astype(
                f"u{f.bits // 8}"
            )
        rest[:, :count] = codes if kinds[0] != "b32" else codes | codes << np.uint64(16)
    whole = np.concatenate([whole, rest], axis=1)
    return whole & np.array([(1 << bits(k)) - 1 for k in kinds], np.uint64)[:, None]


def families() -> dict[str, list[str]]:
    """Return the opcodes of each kernel: of one name and one kind of operands and results."""
    found = defaultdict(list)
    for opcode, row in TABLE.items():
        kinds = [*row.results, "from", *row.operands]
        name = opcode.partition(".")[0]
        types = [part for part in opcode.split(".") if part in _FLOATS] if name != "cvt" else []
        found[
            f"{'-'.join([name, *types])}-{'-'.join(k if k == 'from' or name == 'cvt' else str(bits(k)) for k in kinds)}"
        ].append(opcode)
    return dict(found)


_FAMILIES = families()


def code_of(i: int, opcode: str, n: int) -> list[str]:
    """Return the lines that compute an opcode and store its results, at 2 i and 2 i + 1 times n numbers."""
    row = TABLE[opcode]
    sources = [
        f"%{'prhd'[(1, 32, 16, 64).index(max(bits(k), 16) if k != 'pred' else 1)]}{j}"
        for j, k in enumerate(row.operands)
    ]
    lines, results = [], list(row.results)
    if "%p" in sources[-1] and opcode.startswith(("addc", "subc", "madc")):
        name = "sub" if opcode.startswith("subc") else "add"  # the flag: 0 - p borrows, p + ~0 carries
        lines += [
            f"selp.u32 %r30, 1, 0, {sources.pop()};",
            f"{name}.cc.u32 %r30, {'0, %r30' if name == 'sub' else '%r30, -1'};",
        ]
    carries = ".cc." in opcode or opcode.startswith(("addc", "subc", "madc"))
    wide = opcode.startswith("cvt") and bits(results[0]) <= 16 and results[0][0] in "us"  # extended in a wider register
    widths = [32 if wide else max(bits(k), 16) if k != "pred" else 1 for k in results[: 1 if carries else 2]]
    if opcode.startswith("setp") and opcode.endswith("f16"):  # with one result only
        widths = widths[:1]
    targets = [f"{_REGISTERS[w][1]}{40 + j}" for j, w in enumerate(widths)]
    lines.append(f"{opcode} {'|'.join(targets)}, {', '.join(sources)};")
    if ".cc." in opcode:
        lines.append(f"{'subc' if opcode.startswith('sub') else 'addc'}.u32 %r41, 0, 0;")
        targets, widths = [*targets, "%r41"], [*widths, 32]
    for j, (target, w) in enumerate(zip(targets, widths, strict=True)):
        if w == 1:
            lines.append(f"selp.u32 %r42, 1, 0, {target};")
        lines.append(f"st.global.b{32 if w == 1 else w} [%d31+{8 * n * (2 * i + j)}], {'%r42' if w == 1 else target};")
    return lines


def kernel(opcodes: list[str], kinds: tuple[str, ...], n: int) -> str:
    """Return a module whose kernel computes all opcodes of one kind of operands, for n numbers."""
    lines = [".version 8.7", ".target sm_90a", ".address_size 64", ".visible .entry k(.param .u64 x, .param .u64 y) {"]
    lines += [f".reg .{kind} {name}<48>;" for kind, name in sorted(set(_REGISTERS.values()))]
    lines += ["ld.param.u64 %d30, [x];", "ld.param.u64 %d31, [y];", "mov.u32 %r31, %tid.x;", "mov.u32 %r32, %ctaid.x;",
              f"mad.lo.u32 %r31, %r32, {_THREADS}, %r31;", "mul.wide.u32 %d32, %r31, 8;", "add.u64 %d30, %d30, %d32;",
              "add.u64 %d31, %d31, %d32;"]  # fmt: skip
    for j, kind in enumerate(kinds):
        _, name = _REGISTERS[bits(kind)]
        target = f"%h{j}" if kind == "pred" else f"{name}{j}"
        lines.append(f"ld.global.b{max(bits(kind), 16)} {target}, [%d30+{8 * n * j}];")
        if kind == "pred":
            lines.append(f"setp.ne.b16 %p{j}, {target}, 0;")
    for i, opcode in enumerate(opcodes):
        lines += code_of(i, opcode, n)
    return "\n".join([*lines, "ret;", "}"])


def wanted(opcode: str, columns: list[list[int]]) -> list[list[int]]:
    """Return what the oracle has for each column of operands, as the kernel stores it."""
    row, function = TABLE[opcode], expected(opcode)
    cut = [(1 << max(bits(k), 1)) - 1 for k in row.results]
    results = [[code & most for code, most in zip(function(*column), cut, strict=False)] for column in columns]
    if opcode.startswith("cvt") and bits(row.results[0]) <= 16 and row.results[0][0] == "s":
        size = bits(row.results[0])
        results = [[code | (-(code >> size - 1) << size) & 0xFFFFFFFF] for [code] in results]
    if ".cc." in opcode and opcode.startswith("sub"):
        results = [[code, -borrow & 0xFFFFFFFF] for code, borrow in results]
    single = (
        ".cc." not in opcode
        and opcode.startswith(("addc", "subc", "madc"))
        or opcode.startswith("setp")
        and opcode.endswith("f16")
    )
    return [result[:1] for result in results] if single else results


def differing(opcodes: list[str], count: int) -> list[str]:
    """Return a line for each opcode that differs, on about ``count`` operands, others for each opcode."""
    kinds = TABLE[opcodes[0]].operands
    whole = patterns(opcodes[0], kinds)  # opcodes share them: a kernel reads its operands once
    whole = np.concatenate([whole, whole[:, : -whole.shape[1] % _THREADS]], axis=1)
    n = whole.shape[1]
    outputs = torch.zeros(2 * len(opcodes), n, dtype=torch.int64)
    inputs = torch.from_numpy(whole.view(np.int64).copy())
    execute(parse(kernel(opcodes, kinds, n)), "k", (n // _THREADS, 1, 1), (_THREADS, 1, 1), [inputs, outputs])
    found, lines = outputs.numpy().view(np.uint64), []
    for i, opcode in enumerate(opcodes):
        step = max(1, n // count)
        taken = range(zlib.crc32(opcode.encode()) % step, n, step)
        columns = [[int(v) for v in whole[:, k]] for k in taken]
        bad = [(column, result, [int(v) for v in found[2 * i : 2 * i + len(result), k]])
               for k, column, result in zip(taken, columns, wanted(opcode, columns), strict=True)
               if [int(v) for v in found[2 * i : 2 * i + len(result), k]] != result]  # fmt: skip
        if bad:
            operands, result, engine = ([f"{v:x}" for v in part] for part in bad[0])
            lines.append(
                f"{opcode}: {len(bad)} of {len(columns)}, operands {operands}: oracle {result}, engine {engine}"
            )
    return lines


@pytest.mark.parametrize(("family", "count"), [
    *(pytest.param(family, 128, id=family) for family in [*_FAMILIES][::3]),
    *(pytest.param(family, 2816, id=f"{family}-more", marks=pytest.mark.slow) for family in _FAMILIES),
])  # fmt: skip
def test_instructions_have_the_bits_of_the_oracle(family: str, count: int) -> None:
    opcodes = _FAMILIES[family]
    if family.startswith("set"):  # 2,000 opcodes: one in six of those that differ in the comparison alone
        opcodes = [opcode for i, opcode in enumerate(opcodes) if (i + i // 12) % 6 == zlib.crc32(family.encode()) % 6]
    if count < 2816:  # of many opcodes at most 16: compiling them takes the time
        opcodes = opcodes[:: len(opcodes) // 16 * 2 + 1]
    assert not differing(opcodes, count)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", _FAMILIES)
def test_all_opcodes_and_all_codes_of_16_bits(family: str) -> None:
    assert not differing(_FAMILIES[family], 1 << 16)
