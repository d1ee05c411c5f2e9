# SPDX-License-Identifier: Apache-2.0
"""Arm's and x86's dot products, held to their manuals and to bits recorded on a processor."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.spec.datapath import FmaDatapath
from tests.support import isa
from tests.support.bits import identical
from tests.support.isa import INF, read

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16,
          "fp32": torch.float32}  # fmt: skip
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ADDENDS = {  # bits of zeros, ones, the smallest and the largest numbers, ties, Inf and NaN
    "fp32": (0, 0x80000000, 0x3F800000, 1, 0x807FFFFF, 0xFF7FFFFF, 0x7F7FFFFF, 0xFF800000, 0x7FC00000, 0x4B800001),
    "fp16": (0, 0x8000, 0x3C00, 1, 0x83FF, 0xFBFF, 0x7BFF, 0xFC00, 0x7E00, 0x6801),
}  # fmt: skip
ARM = [*itertools.product(("e4m3", "e5m2"), ("e4m3", "e5m2"), ("fp32", "fp16"), (False, True))]
BLOCKS = {"arm.fdot": {"fp32": 4, "fp16": 2}, "arm.fmmla": {"fp32": 8, "fp16": 4}}


def tensor(codes: np.ndarray, fmt: str) -> torch.Tensor:
    """Return a format's codes as a tensor of its dtype."""
    dtype = DTYPES[fmt]
    return torch.from_numpy(codes.astype(f"u{dtype.itemsize}")).view(WORDS[dtype.itemsize]).view(dtype)


def numbers(codes: np.ndarray, fmt: str) -> list:
    table = {int(code): read(int(code), fmt) for code in np.unique(codes)}
    return [[table[int(code)] for code in row] for row in codes]


def arm_unit(name: str, a, b, c: torch.Tensor, lscale: int, osm: bool) -> torch.Tensor:
    """Return the unit's sums, with LSCALE as a scale inside it."""
    scales = {}
    if lscale:
        shape = [(len(x), -(-x.shape[1] // 32)) for x in (a, b)]
        scales = {"scale_a": torch.full(shape[0], 127 - lscale, dtype=torch.uint8).view(torch.float8_e8m0fnu),
                  "scale_b": torch.full(shape[1], 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)}  # fmt: skip
    return fmtsim.mma(a, b, c, target=f"{name}{'.osm' * osm}", **scales)


def differing(y: torch.Tensor, wanted: list) -> int:
    """Return how many results differ; NaN of any bits is NaN."""
    return sum(not identical(x, isa.value(n)) for x, n in zip(y.double().flatten().tolist(), wanted, strict=True))


def check_all_pairs(case, lscale: int, addend: int) -> None:
    """Check one product of all 2^16 pairs of codes with an addend."""
    first, second, sums, osm = case
    codes = np.arange(256).reshape(256, 1)
    c = np.full((256, 256), addend)
    y = arm_unit("arm.fdot", tensor(codes, first), tensor(codes, second), tensor(c, sums), lscale, osm)
    a, b, start = numbers(codes, first), numbers(codes, second), read(addend, sums)
    assert differing(y, [isa.arm_dot(start, x, z, sums, lscale, osm) for x in a for z in b]) == 0


@pytest.mark.parametrize("case", ARM, ids=str)
def test_arm_products_of_all_pairs_of_codes(case):
    i = ARM.index(case)
    check_all_pairs(case, lscale=(0, 3, 15)[i % 3], addend=ADDENDS[case[2]][i % 10])


@pytest.mark.slow
@pytest.mark.parametrize("case", ARM, ids=str)
def test_arm_products_of_all_pairs_of_codes_with_all_addends(case):
    for lscale, addend in itertools.product((0, 1, 15, *([127] if case[2] == "fp32" else [])), ADDENDS[case[2]]):
        check_all_pairs(case, lscale, addend)


def drawn(rng, shape, fmt: str, kind: str) -> np.ndarray:
    """Return random codes: of any bits, of finite numbers, or of few exponents so that sums cancel and round."""
    exponent_bits, mantissa_bits = isa.FIELDS[fmt]
    if kind == "bits":
        codes = rng.integers(0, 1 << (1 + exponent_bits + mantissa_bits), shape)
        top = ((1 << exponent_bits) - 1) << mantissa_bits
        return np.where((codes & top) == top, codes | 1 << (mantissa_bits - 1), codes)  # NaN, quiet where it can be
    middle = 1 << (exponent_bits - 1)
    low, high = {"finite": (0, 2 * middle - 1), "near": (middle - 3, middle + 3), "tiny": (0, 3)}[kind]
    fields = rng.integers(low, high, shape)
    return (
        rng.integers(0, 2, shape) << (exponent_bits + mantissa_bits)
        | fields << mantissa_bits
        | rng.integers(0, 1 << mantissa_bits, shape)
    )


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("case", ARM, ids=str)
def test_arm_dots(case, name):
    first, second, sums, osm = case
    rng = np.random.default_rng(ARM.index(case))
    length = BLOCKS[name][sums]
    for kind, lscale in zip(("bits", "finite", "near", "tiny"), (0, 15, 2, 7), strict=True):
        k = 2 * length + 1
        a, b = drawn(rng, (12, k), first, kind), drawn(rng, (12, k), second, kind)
        c = drawn(rng, (12, 12), sums, kind)
        y = arm_unit(name, tensor(a, first), tensor(b, second), tensor(c, sums), lscale, osm)
        wanted = []
        for (x, z), start in zip(itertools.product(numbers(a, first), numbers(b, second)), c.flatten(), strict=True):
            total = read(int(start), sums)
            for i in range(0, k, length):
                total = isa.arm_dot(total, x[i : i + length], z[i : i + length], sums, lscale, osm)
            wanted.append(total)
        assert differing(y, wanted) == 0


def test_what_the_settings_of_arm_do():
    a = torch.tensor([[57344.0, 57344.0]]).to(torch.float8_e5m2)
    half = torch.tensor([[1.0, 1.0]]).to(torch.float8_e5m2)
    zero = torch.zeros(1, 1, dtype=torch.float16)
    assert arm_unit("arm.fdot", a, half, zero, 0, osm=False).item() == INF
    assert arm_unit("arm.fdot", a, half, zero, 0, osm=True).item() == 65504
    assert arm_unit("arm.fdot", a, half, zero, 1, osm=False).item() == 57344
    infinite = torch.tensor([[INF, 1.0]]).to(torch.float8_e5m2)
    assert arm_unit("arm.fdot", infinite, half, zero, 0, osm=True).item() == INF  # only finite sums saturate
    # 2^11 + 1 needs 12 bits; together with the next product it is 2^11 + 2.
    ones, c = torch.ones(1, 2).to(torch.float8_e4m3fn), torch.full((1, 1), 2048.0, dtype=torch.float16)
    assert arm_unit("arm.fdot", ones, ones, c, 0, osm=False).item() == 2050
    assert fmtsim.mma(ones[:, :1], ones[:, :1], c, target="arm.fdot").item() == 2048


def x86_unit(name: str, fmt: str, rng, kind: str, k: int, size: int = 12, path=None):
    """Return operands as numbers, and the unit's sums."""
    a, b, c = drawn(rng, (size, k), fmt, kind), drawn(rng, (size, k), fmt, kind), drawn(rng, (size, size), "fp32", kind)
    if kind == "tiny" and fmt == "bf16":  # products near 2^-126
        a, b = ((x & 0x807F) | rng.integers(55, 72, x.shape) << 7 for x in (a, b))
    y = fmtsim.mma(tensor(a, fmt), tensor(b, fmt), tensor(c, "fp32"), target=path or name)
    rows = itertools.product(numbers(a, fmt), numbers(b, fmt))
    return y, [(read(int(start), "fp32"), x, z) for (x, z), start in zip(rows, c.flatten(), strict=True)]


@pytest.mark.parametrize("kind", ["bits", "finite", "near", "tiny"])
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["x86.vdp", "x86.amx"])
def test_x86_dots(name, fmt, kind):
    rng = np.random.default_rng(len(name + fmt + kind))
    for k in (1, 2, 3, 12, 32, 65):
        y, rows = x86_unit(name, fmt, rng, kind, k)
        assert differing(y, [(isa.vdp if name == "x86.vdp" else isa.tdp)(*row) for row in rows]) == 0


def test_x86_products_of_all_codes():
    every, few = np.arange(1 << 16).reshape(-1, 1), np.array([[0], [0x8000], [0x3F80], [0xBF81], [0x0080], [0x7F80]])
    for fmt in ("bf16", "fp16"):
        for addend in (0x80000000, 0x00800000, 0xBF800001):
            c = np.full((1 << 16, 6), addend)
            y = fmtsim.mma(tensor(every, fmt), tensor(few, fmt), tensor(c, "fp32"), target="x86.vdp")
            rows = itertools.product(numbers(every[::37], fmt), numbers(few, fmt))
            assert differing(y[::37], [isa.vdp(read(addend, "fp32"), x, z) for x, z in rows]) == 0


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("near", {"odd_first": False}), ("tiny", {"odd_first": False}), ("edge", {"subnormal_first": True})],
    ids=str,
)
def test_planted_errors_are_seen(kind, wrong):
    rng = np.random.default_rng(5)
    if kind == "edge":  # 2^-126 less three quarters of a last place of the numbers below it
        rows = [(read(0x00800000, "fp32"), [read(0x8D40, "bf16")], [read(0x2680, "bf16")])]
        y = fmtsim.mma(*(tensor(np.array([[code]]), "bf16") for code in (0x8D40, 0x2680)),
                       tensor(np.array([[0x00800000]]), "fp32"), target="x86.vdp")  # fmt: skip
    else:
        y, rows = x86_unit("x86.vdp", "bf16", rng, kind, 12)
    assert differing(y, [isa.vdp(*row) for row in rows]) == 0
    assert differing(y, [isa.vdp(*row, **wrong) for row in rows]) > 0


def test_planted_errors_of_units_are_seen():
    rng = np.random.default_rng(6)
    for path in (FmaDatapath(block=16, parity=True), FmaDatapath(block=32)):
        y, rows = x86_unit("x86.amx", "bf16", rng, "near", 64, path=path)
        assert differing(y, [isa.tdp(*row) for row in rows]) > 0
    a, b, c = (
        drawn(rng, (12, 8), "e4m3", "near"),
        drawn(rng, (12, 8), "e4m3", "near"),
        drawn(rng, (12, 12), "fp16", "near"),
    )
    rows = [*zip(itertools.product(numbers(a, "e4m3"), numbers(b, "e4m3")), c.flatten(), strict=True)]
    wanted = [isa.arm_dot(isa.arm_dot(read(int(s), "fp16"), x[:4], z[:4], "fp16"), x[4:], z[4:], "fp16")
              for (x, z), s in rows]  # fmt: skip
    mode = fmtsim.get_unit("arm.fmmla").mode("e4m3", "e4m3", "fp16")
    operands = tensor(a, "e4m3"), tensor(b, "e4m3"), tensor(c, "fp16").float()
    assert differing(fmtsim.mma(*operands[:2], operands[2].half(), target="arm.fmmla"), wanted) == 0
    for path in (replace(mode, block=2), replace(mode, fraction_bits=12), replace(mode, accumulator="fp32")):
        y = fmtsim.mma(
            *operands[:2],
            operands[2].to(torch.float16 if path.accumulator == mode.accumulator else torch.float32),
            target=path,
        )
        assert differing(y, wanted) > 0


def test_vdpbf16ps_has_the_bits_of_a_zen_4():
    with np.load(Path(__file__).parent / "data" / "vdpbf16ps_zen4.npz") as file:
        a, b, c, d = (file[name] for name in "abcd")
    rows = [*zip((read(int(code), "fp32") for code in c), numbers(a, "bf16"), numbers(b, "bf16"), strict=True)]
    recorded = [read(int(code), "fp32") for code in d]
    operands = tensor(a, "bf16")[:, None], tensor(b, "bf16")[:, None], tensor(c, "fp32")[:, None, None]
    assert differing(fmtsim.mma(*operands, target="x86.vdp"), recorded) == 0
    as_recorded = tensor(d, "fp32")
    assert differing(as_recorded, [isa.vdp(*row) for row in rows]) == 0
    for wrong in ({"odd_first": False}, {"subnormal_first": True}):  # the recording tells both apart
        assert differing(as_recorded, [isa.vdp(*row, **wrong) for row in rows]) > 20
    assert sum(n[1] != n[1] for n in recorded) > 5 and sum(n[1] == INF for n in recorded) > 5
