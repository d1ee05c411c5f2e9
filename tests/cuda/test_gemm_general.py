# SPDX-License-Identifier: Apache-2.0
"""The general path of matrix products against the oracle: every unit, number, plan and layout."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan, cpu, get_unit
from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import TERM_ROUNDINGS, Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from tests.support import cuda_gemm
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import GENERAL, HALF, job_of
from tests.support.gemm_engine import (
    KINDS,
    addend,
    check,
    check_ends_of_int32,
    check_kinds,
    gemm_spec,
    operand,
    product,
)
from tests.support.gemm_oracle import sums

EXACT = Datapath(block=None, fraction_bits=None, rounding="nearest_even")
MX = get_unit("blackwell.tcgen05.mxf8f6f4").mode("e4m3", "e4m3")
NVF4 = get_unit("blackwell.tcgen05.nvf4").mode("e2m1", "e2m1")


@pytest.fixture(autouse=True)
def engine(monkeypatch, device):
    return cuda_gemm.install(monkeypatch, device, fast=False)


def kinds_of(spec, shape=(3, 5, 40), kinds=KINDS) -> None:
    for i, kind in enumerate(kinds):
        check_kinds(spec, shape, (kind, "normal"), seed=i, with_c=i % 2 == 1)


# One unit of each kernel.

KERNELS = {
    "aligned terms": (replace(HALF, term_rounding="nearest_even"), "bf16", "exact_integer.cu"),
    "exact sums": (EXACT, "e4m3", "exact_integer.cu"),
    "signed zeros": (replace(HALF, signed_zero=True), "bf16", "exact_integer.cu"),
    "limbs": (replace(EXACT, block=4), "bf16", "exact_integer.cu"),
    "groups": (NVF4, "e2m1", "exact_integer.cu"),
    "chain": (get_unit("fp32_fma").mode("fp32", "fp32"), "fp32", "exact_integer.cu"),
    "chain of doubles": (get_unit("fp64_fma").mode("fp64", "fp64"), "fp64", "exact_integer.cu"),
    "two stages": (TwoStageDatapath(block=8), "bf16", "cdna.cu"),
    "pairs": (PairwiseDatapath(block=4), "bf16", "cdna.cu"),
    "saturation": (IntegerDatapath(saturate=True), "int8", "cdna.cu"),
    "modulo": (IntegerDatapath(), "int8", None),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel(name, engine):
    unit, fmt, file = KERNELS[name]
    spec = gemm_spec(unit, fmt)
    kinds_of(spec, kinds=("normal", "huge") if fmt == "int8" else ("normal", "narrow") if fmt == "fp64" else KINDS)
    assert set(engine.launched) == ({file} if file else set())


@pytest.mark.parametrize(
    ("unit", "fmt"),
    [
        (TwoStageDatapath(block=80), "bf16"),
        (TwoStageDatapath(block=80, parity=True), "bf16"),
        (PairwiseDatapath(block=128), "bf16"),
        (IntegerDatapath(block=80, saturate=True), "int8"),
        (replace(HALF, block=80, term_rounding="nearest_even"), "bf16"),
        (replace(EXACT, block=80), "e4m3"),
    ],
    ids=["two stages", "even and odd", "pairs", "saturation", "aligned terms", "exact sums"],
)
def test_blocks_longer_than_what_shared_memory_holds_at_a_time(unit, fmt, engine):
    """Of 32 places: whole blocks of several windows, a last one that is short, products and parts shorter than one."""
    kinds = ("normal", "huge") if fmt == "int8" else ("normal", "wide", "special")
    for k in (37, 70, 290):
        kinds_of(gemm_spec(unit, fmt), (2, 3, k), kinds)
        kinds_of(gemm_spec(unit, fmt, plan=GemmPlan(k_tile=20, split=3)), (2, 3, k), kinds[:1])
    assert engine.launched


@pytest.mark.parametrize("name", ["aligned terms", "limbs", "chain", "two stages", "modulo"])
def test_plans(name):
    unit, fmt, _ = KERNELS[name]
    plans = [
        GemmPlan(k_tile=20, split=3, reduce="pairwise"),
        GemmPlan(k_tile=8, split=7, owner="even"),
        GemmPlan(k_tile=16, split=2, owner="interleaved", residue_first=True),
    ]
    if fmt != "int8":
        plans += [GemmPlan(k_tile=10, split=4, partial="bf16", round_trip=True), GemmPlan(promote_every=24),
                  GemmPlan(k_tile=10, split=4, partial="bf16", reduce="in_place"), GemmPlan(reduce="in_place"),
                  GemmPlan(k_tile=20, split=2, reduce="in_place", promote_every=24),
                  GemmPlan(promote_every=24, scaled_promotion=True, successive_scales=True),
                  GemmPlan(k_tile=40, part_k=30, partial="fp16", instruction_k=8),
                  GemmPlan(k_tile=8, lanes=4, lane_reduce="pair_tree", split=3, owner="interleaved", promote_every=5),
                  GemmPlan(k_tile=2, split=50, reduce="folded"),
                  GemmPlan(k_tile=30, lanes=3, part_k=32, split=3, reduce="folded")]  # fmt: skip
    for plan in plans:
        check_kinds(gemm_spec(unit, fmt, plan=plan), (2, 3, 85), ("normal", "normal"), seed=4, with_c=fmt != "int8")


def test_integers_at_the_ends_of_int32():
    check_ends_of_int32()


@pytest.mark.parametrize("plan", [GemmPlan(), GemmPlan(k_tile=20, split=3), GemmPlan(promote_every=24)], ids=str)
def test_accumulators_of_integers_of_every_width(plan):
    for bits in range(16, 33):
        for saturate, block in ((False, 32), (True, 1), (True, 32)):
            unit = IntegerDatapath(accumulator_bits=bits, saturate=saturate, block=block)
            end = min(unit.limits[1], 1 << 20)
            a, b = operand("int8", 2, 85, "huge", bits), operand("int8", 3, 85, "huge", bits + 1)
            check(a, b, gemm_spec(unit, "int8", plan=plan), c=torch.tensor([[end] * 3, [-end] * 3], dtype=torch.int32))


@pytest.mark.parametrize("term", TERM_ROUNDINGS)
@pytest.mark.parametrize("block", [16, 40])
def test_term_roundings(term, block):
    for bits in (0, 5, 25, 38):
        unit = replace(HALF, block=block, term_rounding=term, fraction_bits=bits, rounding="to_odd")
        kinds_of(gemm_spec(unit, "bf16", "fp16"), kinds=("normal", "wide", "codes"))


@pytest.mark.parametrize("mode", MODES)
def test_accumulators_and_their_roundings(mode):
    for bits, variant in ((None, "a"), (8, "b"), (13, "c")) if mode == "stochastic" else ((None, "a"),):
        rounding = Rounding(mode=mode, random_bits=bits, variant=variant)
        for accumulator, exact in (("fp16", False), ("bf16", True), ("fp32", False)):
            unit = replace(HALF, accumulator=accumulator, rounding=rounding, fraction_bits=None if exact else 25)
            kinds_of(gemm_spec(unit, "e4m3"), kinds=("normal", "tiny"))
            kinds_of(gemm_spec(replace(unit, signed_zero=True), "e4m3"), kinds=("sparse",))


@pytest.mark.parametrize("bits", [8, 13])
def test_random_words_shared_as_by_blackwell(bits):
    rounding = Rounding(mode="stochastic", random_bits=bits, layout="cvt_rs")
    spec = gemm_spec(replace(HALF, accumulator="bf16", rounding=rounding), "bf16")
    a, b = operand("bf16", 5, 40, "normal", 1), operand("bf16", 7, 40, "normal", 2)
    check(a, b, spec, random=RandomKey(1 << 63, (1 << 40) + 3))


# What the CPU engine leaves to torch operations.


def test_doubles_of_any_unit():
    for unit in (HALF, EXACT, replace(HALF, block=4, fraction_bits=60), replace(HALF, accumulator="fp64")):
        kinds_of(gemm_spec(unit, "fp64"), (2, 2, 20), kinds=("normal", "narrow", "special"))
        kinds_of(gemm_spec(unit, "fp64", "bf16"), (2, 2, 20), kinds=("normal",))


def test_outer_sums_narrower_than_chains():
    for outer in ("bf16", "fp16", FloatFormat(name="e11m40", exponent_bits=11, mantissa_bits=40)):
        unit = replace(HALF, promote_every=16, promotion=outer)
        kinds_of(gemm_spec(unit, "bf16"), kinds=("normal", "tiny", "huge"))


def test_wide_fractions_and_groups():
    wide = replace(HALF, fraction_bits=100)
    kinds_of(gemm_spec(wide, "bf16"), kinds=("wide", "normal"))
    kinds_of(gemm_spec(replace(NVF4, fraction_bits=60), "e5m2"), kinds=("wide", "normal", "special"))
    kinds_of(gemm_spec(replace(MX, fraction_bits=None), "e5m2"), kinds=("wide", "special"))
    low = replace(HALF, min_exponent=300, fraction_bits=3, term_rounding="down")
    kinds_of(gemm_spec(low, "bf16"), kinds=("normal",))


def test_a_record_that_no_kernel_takes():
    x = torch.zeros(1, 4)
    odd = FloatFormat(name="e8m51", exponent_bits=8, mantissa_bits=51)
    top = FloatFormat(name="e4m9", exponent_bits=4, mantissa_bits=9, nan="top", infinities=False)
    for unit in (replace(HALF, accumulator=odd), replace(HALF, accumulator=top),
                 TwoStageDatapath(block=8, sum_bits=60)):  # fmt: skip
        assert not GENERAL.covers(gemm_spec(unit, "bf16"), x.dtype, x.dtype, 4)
    assert not GENERAL.covers(gemm_spec(HALF, "bf16", plan=GemmPlan(partial=top)), x.dtype, x.dtype, 4)


# Tiles.


@pytest.mark.parametrize(
    "change", [dict(term_rounding="nearest_even"), dict(signed_zero=True)], ids=["aligned", "signed"]
)
def test_marks_choose_tiles(change, device):
    spec = gemm_spec(replace(HALF, **change), "bf16")
    a, b = (operand("bf16", 140, 8, "normal", seed).to(device) for seed in (1, 2))
    job = job_of(a, b, spec, device=device, random=None)
    sums = torch.full((1, 140, 140), 7.0, device=device)
    marks = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8, device=device)
    GENERAL.run(job, sums, marks)
    whole = torch.empty_like(sums)
    GENERAL.run(job, whole, None)
    expected = whole.clone()
    expected[0, :128, :128] = 7.0
    expected[0, 128:, 128:] = 7.0
    assert torch.equal(sums, expected) and not (whole == 7.0).any()


def test_marks_far_from_each_other(device):
    """Blocks look at as many squares as they have threads, and go on from there."""
    spec = gemm_spec(replace(HALF, signed_zero=True), "bf16")
    a, b = operand("bf16", 3, 8, "normal", 1).to(device), operand("bf16", 1, 8, "normal", 2).to(device)
    columns = 16 * (256 * 8 * (4 if device.type == "cpu" else 140) + 20)  # more than the multiprocessors look at once
    b = b.expand(columns, 8)
    job = job_of(a, b, spec, device=device, random=None)
    sums = torch.full((1, 3, columns), 7.0, device=device)
    marks = torch.zeros(1, -(-columns // 128), dtype=torch.uint8, device=device)
    marks[0, [1, -1]] = 1
    GENERAL.run(job, sums, marks)
    one = torch.empty(1, 3, 1, device=device)
    GENERAL.run(job_of(a, b[:1], spec, device=device, random=None), one, None)
    kept = marks.repeat_interleave(128, 1)[:, :columns].bool()
    assert torch.equal(sums[0], torch.where(kept, one[0].expand(3, columns), 7.0))


def test_tiles_with_infinities_are_done_again():
    a, b = operand("bf16", 70, 40, "normal", 1), operand("bf16", 66, 40, "normal", 2)
    a[65, 3], b[1, 20] = torch.inf, torch.nan
    spec = gemm_spec(replace(HALF, term_rounding="nearest_away"), "bf16")
    found, expected = product(a, b, spec), torch.empty(70, 66)
    cpu.gemm(a, b, None, None, None, spec, None, expected)
    assert_same_bits(found, expected)
    rows, columns = [0, 1, 63, 64, 65, 69], [0, 1, 2, 63, 64, 65]
    assert_same_bits(found[rows][:, columns], sums(a[rows], b[columns], spec))


def test_addends_of_every_kind():
    for unit in (replace(HALF, term_rounding="down"), replace(EXACT, block=4)):
        spec = gemm_spec(unit, "fp16")
        a, b = operand("fp16", 3, 20, "normal", 1), operand("fp16", 4, 20, "sparse", 2)
        for kind in KINDS:
            check(a, b, spec, c=addend(spec, 3, 4, kind, 3))
        check(a, b * 0, spec, c=torch.full((3, 4), -0.0))
