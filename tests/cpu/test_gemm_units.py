# SPDX-License-Identifier: Apache-2.0
"""Products of integer units, IEEE chains and AMD's units on the CPU engine, against the oracle."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fmtsim.torch_engine
from fmtsim import GemmPlan
from fmtsim.cpu.gemm.engine import supports_gemm
from fmtsim.formats.element import FloatFormat
from fmtsim.spec.datapath import FmaDatapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import FMA32, FMA64, INF, NAN, addend, check, f32, gemm_spec, operand, product


def f64(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def i8(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8)


# IEEE chains.


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ([-0.0], [1.0], -0.0, -0.0),
        ([-0.0], [1.0], 0.0, 0.0),
        ([-0.0], [1.0], None, 0.0),
        ([1.0, -1.0], [1.0, 1.0], -0.0, 0.0),
        ([-(2.0**-80)], [2.0**-80], -0.0, -0.0),  # rounds to zero and keeps its sign
        ([INF, -INF], [1.0, 1.0], None, NAN),
        ([INF, 1.0], [-1.0, 1.0], None, -INF),
        ([INF], [0.0], None, NAN),
        ([NAN], [0.0], None, NAN),
        ([1.0], [1.0], NAN, NAN),
        ([2.0**127, -(2.0**127)], [2.0, 2.0], None, INF),  # the first sum is Inf, the second product is not
        ([2.0**127, INF], [2.0, -1.0], None, NAN),
        ([2.0**127, 2.0**127], [-2.0, 1.0], 2.0**127, 0.0),  # a product beyond float32 that a sum brings back
        ([2.0**-75, 2.0**-75], [2.0**-75, 2.0**-74], None, 2.0**-149),  # a tie, to even, is lost
    ],
)
def test_chains_follow_ieee_754(a, b, c, expected):
    spec, given_c = gemm_spec(FMA32, "fp32"), None if c is None else f32([c])
    got = product(f32(a), f32(b), spec, c=given_c)
    assert got.isnan().item() if expected != expected else got.item() == expected
    check(f32(a), f32(b), spec, **({} if c is None else {"c": given_c}))


def test_chains_of_doubles_beyond_float32():
    spec = gemm_spec(FMA64, "fp64")
    a, b = operand("fp64", 4, 70, "wide", 1), operand("fp64", 65, 70, "wide", 2)
    a[:, :40] *= 2.0**-600  # underflow and overflow of float64
    check(a[:, :24], b[:3, :24], spec)
    check(a, b[:3], spec, c=addend(spec, 4, 3, "wide", 3))
    tie = f64([1.0, 2.0**-53, 2.0**-106]), f64([1.0, 1.0, 1.0])
    check(*tie, spec)
    assert_same_bits(product(*tie, spec), f64([1.0]))


def test_partial_sums_of_doubles_beyond_their_format():
    spec = gemm_spec(FMA64, "fp64", plan=GemmPlan(k_tile=16, partial="bf16"))
    check(f64([2.0**979]), f64([1.0]), spec)


def test_what_chains_cover():
    a = torch.zeros(1, 4, dtype=torch.float64)
    fp64 = FMA64.accumulator
    assert supports_gemm(gemm_spec(FMA64, "fp64"), a, a)
    assert not supports_gemm(gemm_spec(FMA32, "fp64"), a, a)  # products of doubles are not rounded to float32 first
    odd = FloatFormat(name="odd", exponent_bits=8, mantissa_bits=23, bias=100)
    for unit in (replace(FMA32, accumulator=odd), replace(FMA32, paired=True), replace(FMA32, signed_zero=False),
                 replace(FMA32, rounding="up"), replace(FMA32, block=2), replace(FMA32, operand="fp16")):  # fmt: skip
        x, y = operand("fp16", 2, 40, "narrow", 1), operand("fp16", 3, 40, "narrow", 2)
        check(x, y, gemm_spec(unit, "fp16"))
    every = GemmPlan(promote_every=2)
    assert not supports_gemm(gemm_spec(FMA64, "fp64", plan=every), a, a)  # float32 sums of doubles
    assert not supports_gemm(gemm_spec(replace(FMA64, promote_every=2, promotion="fp32"), "fp64"), a, a)
    assert supports_gemm(gemm_spec(replace(FMA64, promote_every=2, promotion=fp64), "fp64"), a, a)


@pytest.mark.parametrize("successive", [False, True])
@pytest.mark.parametrize("unit", [FMA32, PairwiseDatapath(block=4), TwoStageDatapath(block=8)])
def test_scaled_promotion_with_scales_and_without(unit, successive):
    plan = GemmPlan(promote_every=8, scaled_promotion=True, successive_scales=successive)
    spec = gemm_spec(unit, "bf16", plan=plan)
    a, b = operand("bf16", 2, 24, "normal", 1), operand("bf16", 3, 24, "normal", 2)
    check(a, b, spec)
    check(a, b, spec, scale_a=torch.linspace(0.3, 4, 6).reshape(2, 3), scale_b=torch.linspace(-7, 0.1, 9).reshape(3, 3))


# Integers.


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("k", [1, 31, 127, 128, 129, 300])
def test_integers_at_their_limits(saturate, k):
    a, b = i8([-128] * k, [127] * k, [-128] * k), i8([-128] * k, [127] * k, [-128, 127] * (k // 2) + [1] * (k % 2))
    for block in (32, 128, 200):
        spec = gemm_spec(IntegerDatapath(saturate=saturate, block=block), "int8")
        check(a, b, spec)
        top = torch.full((3, 3), (1 << 31) - 1, dtype=torch.int32)
        check(a, b, spec, c=top)
        check(a, b, spec, c=-top - 1)


def test_integers_wrap_as_torch_does_and_saturate_in_order():
    k = (1 << 17) + 40  # 2^31 and more
    a = torch.full((1, k), -128, dtype=torch.int8)
    spec = gemm_spec(IntegerDatapath(), "int8")
    assert_same_bits(product(a, a, spec), torch.tensor([[k * 128 * 128 - (1 << 32)]], dtype=torch.int32))
    falling = a.clone()
    falling[0, -40:] = 127
    clamped = gemm_spec(IntegerDatapath(saturate=True), "int8")
    assert_same_bits(product(a, falling, clamped), torch.tensor([[(1 << 31) - 1 - 40 * 128 * 127]], dtype=torch.int32))


def test_integers_of_parts_and_promotions():
    a, b = operand("int8", 6, 90, "huge", 1), operand("int8", 66, 90, "huge", 2)
    for reduce in ("serial", "pairwise"):
        for promote in (None, 16):
            plan = GemmPlan(k_tile=8, split=5, reduce=reduce, owner="interleaved", promote_every=promote)
            spec = gemm_spec(IntegerDatapath(saturate=True, block=4), "int8", plan=plan)
            check(a, b, spec, c=torch.full((6, 66), (1 << 31) - 30000, dtype=torch.int32))


def test_blocks_that_an_int32_does_not_hold_go_elsewhere():
    a = torch.zeros(1, 1 << 17, dtype=torch.int8)
    assert not supports_gemm(gemm_spec(IntegerDatapath(saturate=True, block=1 << 17), "int8"), a, a)
    assert supports_gemm(gemm_spec(IntegerDatapath(saturate=True, block=1 << 17), "int8"), a[:, :9], a[:, :9])
    assert supports_gemm(gemm_spec(IntegerDatapath(block=1 << 17), "int8"), a, a)


# AMD's units.


@pytest.mark.parametrize("fmt", ["e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("unit", [TwoStageDatapath(block=16, parity=True), PairwiseDatapath(block=4)])
def test_all_codes_of_fnuz(fmt, unit):
    spec = gemm_spec(unit, fmt)
    codes = torch.tensor([spec.a.value(code) for code in range(256)], dtype=torch.float32)
    a, b = codes[:, None].repeat(1, 3), codes[:, None].repeat(1, 3)
    a[:, 1], b[:, 1] = 1.0, codes.roll(1)  # a second even and an odd product
    a[:, 2], b[:, 2] = codes.flip(0), 0.125
    check(a[::7], b[::3], spec)
    expected = torch.empty(256, 256)
    fmtsim.torch_engine.gemm(a, b, None, None, None, spec, None, expected)
    assert_same_bits(product(a, b, spec), expected)


@pytest.mark.parametrize("parity", [False, True])
def test_two_stages_step_by_step(parity):
    spec = gemm_spec(TwoStageDatapath(block=8, parity=parity), "fp32")
    big, small = 2.0**127, 2.0**-149
    rows = [
        [big, 0, 0, 0],  # times 2: beyond 2^128 is Inf, not with parity
        [big, -big, 1.0, 0],
        [small, small, small, 0],  # exponents of subnormals; products far below 2^-126
        [1.0, -(2.0**-24), 2.0**-25, -(2.0**-26)],  # cut toward zero
        [-(2.0**-24), 1.0, 2.0**-30, 0],
        [INF, 1.0, -INF, 0],
        [INF, 0, 0, 0],
        [NAN, 0, 0, 0],
        [2.0**-63, 2.0**-70, -(2.0**-75), 2.0**-76],  # subnormal results
        [-0.0, -0.0, -0.0, -0.0],
    ]
    a, b = f32(*rows), f32([2.0] * 4, [2.0**-70] * 4, [1.0, -1.0, 1.5, 0.0], [-(2.0**-149)] * 4, [0.0] * 4)
    addends = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-24), 2.0**127, -INF, NAN, 3 * 2.0**-26]
    for k in (1, 2, 3, 4):  # with one product there is no odd half
        check(a[:, :k], b[:, :k], spec)
        for c in addends:
            check(a[:, :k], b[:, :k], spec, c=torch.full((len(a), len(b)), c))


def test_what_stages_cover():
    x = torch.zeros(1, 4)
    assert not supports_gemm(gemm_spec(TwoStageDatapath(block=8, sum_bits=46), "fp32"), x, x)
    assert supports_gemm(gemm_spec(TwoStageDatapath(block=8, sum_bits=45), "fp32"), x, x)
    assert not supports_gemm(gemm_spec(PairwiseDatapath(block=4), "fp64"), x.double(), x.double())
    wide = FloatFormat(name="wide", exponent_bits=4, mantissa_bits=3, nan="top", infinities=False)
    assert not supports_gemm(gemm_spec(PairwiseDatapath(block=4), "fp32", plan=GemmPlan(partial=wide)), x, x)
    a, b = operand("fp32", 2, 9, "narrow", 1), operand("fp32", 3, 9, "narrow", 2)
    check(a, b, gemm_spec(TwoStageDatapath(block=8, sum_bits=45), "fp32"))


ON_ANY_MACHINE = """
import hashlib, torch, fmtsim
from fmtsim.scaling.hadamard import hadamard
codes = torch.arange(256, dtype=torch.uint8).repeat(6).roll(1).view(12, 128)
a, b = codes.view(torch.float4_e2m1fn_x2), codes.roll(5, 1).view(torch.float4_e2m1fn_x2)
scales = torch.full((12, 16), 56, dtype=torch.uint8).view(torch.float8_e4m3fn)
found = [fmtsim.scaled_mm(a, b.t(), scales, scales, target="blackwell.tcgen05.nvf4", scale_recipes="BlockWise1x16",
                          swizzles="NO_SWIZZLE")]
draw = torch.Generator().manual_seed(0)
x, y = (torch.randn(rows, 300, generator=draw) * 2.0 ** torch.randint(-9, 9, (rows, 300), generator=draw)
        for rows in (13, 70))
x[3, 7], y[5, 9], x[:, 50] = torch.nan, torch.inf, 0
stochastic = fmtsim.Datapath(accumulator=fmtsim.get_format("bf16"), rounding="stochastic")
for target, dtype in (("hopper.wgmma", torch.bfloat16), ("hopper.wgmma", torch.float8_e4m3fn),
                      ("fp32_fma", torch.float32), (fmtsim.Datapath(block=64, fraction_bits=20), torch.bfloat16)):
    found.append(fmtsim.mm(x.to(dtype), y.to(dtype).t(), target=target, out_dtype=torch.float32))
found.append(fmtsim.mm(x.half(), y.half().t(), target=stochastic, generator=3, out_dtype=torch.float32))
found.append(fmtsim.mm(x, y.t(), target="hopper.wgmma", allow="tf32"))
found.append(fmtsim.int_mm(*(t.nan_to_num().clamp(-99, 99).to(torch.int8) for t in (x, y.t())), target="int8"))
found.append(hadamard(y[:, :256], 128))
for t in found:
    print(hashlib.sha256(t.float().nan_to_num(7e30).numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["generic", "haswell"])
def test_results_are_those_of_machines_with_other_vectors(machine, tmp_path):
    found = []
    for settings in (
        {},
        {"NUMBA_CPU_NAME": machine, "NUMBA_CPU_FEATURES": "+avx2,+fma" if machine == "haswell" else ""},
    ):
        environment = {**os.environ, **settings, "FMTSIM_CACHE_DIR": str(tmp_path / str(len(settings)))}
        run = [sys.executable, "-c", ON_ANY_MACHINE]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert len(found[0]) == 9 and found[0] == found[1]


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("exponent", [-64, -62, -38])
def test_dot_products_at_the_edge_of_normal_numbers(parity, exponent):
    """Sums of a few times 2^-126, of terms near it or far larger ones that cancel; what is below it becomes zero."""
    draw = torch.Generator().manual_seed(exponent)
    shape = (2, 24, 4)
    x = torch.randint(128, 256, shape, generator=draw) * torch.randint(0, 2, shape, generator=draw).mul(2).sub(1)
    x[:, :, 2:] = -x[:, :, :2]  # pairs that cancel but for an addend and what is added to one of them
    x[0, ::2, 3] += 1
    a, b = (part.float().bfloat16() * 2.0 ** (exponent - 7) for part in x)
    b[:, 2:] = -b[:, 2:] if exponent == -38 else b[:, 2:]
    c = torch.randint(-(1 << 24), 1 << 24, (24, 24), generator=draw) * 2.0**-149
    spec = gemm_spec(FmaDatapath(block=2, parity=parity), "bf16")
    check(a, b, spec)
    check(a, b, spec, c=c * 2)
    got = product(a, b, spec, c=c)
    assert bool((got == 0).any()) and bool((got.abs() < 2.0**-124).any())
    assert not bool(((got != 0) & (got.abs() < 2.0**-126)).any())
