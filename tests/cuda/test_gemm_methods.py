# SPDX-License-Identifier: Apache-2.0
"""What each fast path's method rests on: ranges and ties, its roundings, specialisations that compilers get right."""

from dataclasses import replace

import pytest
import torch

from fmtsim import Datapath, GemmPlan, get_unit
from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import aligned_fp64_fma, aligned_fp64_mma, fma_chain
from fmtsim.cuda.gemm.engine import BLOCK_SCALED, FMA_CHAIN, FP64_FMA, FP64_MMA
from fmtsim.cuda.gemm.job import Gpu
from fmtsim.formats.floating import E8M0
from tests.cuda.cuda_cases import custom
from tests.cuda.nvrtc import needs_nvrtc, spilled
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import check, expected, job_of, product_of
from tests.support.gemm_engine import DTYPES, gemm_spec, operand, unit_scales
from tests.support.gemm_oracle import definition
from tests.support.operands import normal, wide

FMA = Datapath(block=1, fraction_bits=None, rounding="nearest_even")
NEAREST = Datapath(
    block=16, fraction_bits=25, min_exponent=-133, rounding="nearest_even", term_rounding="nearest_even"
)  # fmt: skip
BFLOAT_SUMS = replace(NEAREST, term_rounding="toward_zero", accumulator="bf16")
MXF4 = Datapath(block=64, fraction_bits=35, group=16, scale="e8m0", scale_block=32)
SLOW = GemmPlan(promote_every=64)


def operands(fmt, m=70, n=140, k=100):
    return operand(fmt, m, k, "normal", 1), operand(fmt, n, k, "normal", 2)


# Chains: sums that float64 would round twice, or does not hold, are left.


def test_arithmetics_of_chains():
    """Which arithmetic sums are computed in, and whether they are clamped to the accumulator's subnormals."""
    for accumulator, fmt, numbers, clamped in (
        ("fp16", "fp16", fma_chain.HALVES, False), ("bf16", "e4m3", fma_chain.BFLOATS, False),
        ("fp32", "bf16", fma_chain.FLOATS, False), ("fp64", "fp64", fma_chain.DOUBLES, False),
        (custom(6, 9), "e4m3", fma_chain.FLOATS, False), (custom(8, 10), "bf16", fma_chain.DOUBLES, False),
        ("fp16", "bf16", fma_chain.DOUBLES, True), (custom(4, 7), "e4m3", fma_chain.DOUBLES, True),
    ):  # fmt: skip
        shape = fma_chain.shape_of(gemm_spec(replace(FMA, accumulator=accumulator), fmt), 1, 45, False)
        assert (shape.numbers, shape.clamped) == (numbers, clamped)


def test_a_sum_that_doubles_would_round_twice_is_left(device):
    spec = gemm_spec(replace(FMA, accumulator=custom(8, 7)), "fp16")
    tiny, tie = 2.0**-24, 1 + 2.0**-8
    a = torch.tensor([[tiny, tie]]).half()
    for factor, left in ((1.0, 0), (tiny, 1)):  # 2^-24 breaks the tie within 53 bits, 2^-48 * 2^-7 does not
        b = torch.tensor([[factor, 1.0 if left == 0 else 2.0**7]]).half()
        assert check(FMA_CHAIN, a, b, spec, device=device) == left


def test_a_block_that_doubles_do_not_hold_is_left(device):
    spec = gemm_spec(replace(FMA, block=4), "bf16")
    a = torch.tensor([[2.0**30, 2.0**-30, -(2.0**30), 0.0]]).bfloat16()
    assert check(FMA_CHAIN, a, torch.ones(1, 4).bfloat16(), spec, device=device) == 1


def test_sums_beyond_the_accumulator_are_left(device):
    for accumulator, fmt in ((custom(5, 8), "e4m3"), ("fp16", "bf16")):
        spec = gemm_spec(replace(FMA, accumulator=accumulator), fmt)
        a, b = torch.full((1, 3), 256.0), torch.tensor([[200.0, 200.0, -200.0]])
        assert check(FMA_CHAIN, *(x.to(DTYPES[fmt]) for x in (a, b)), spec, device=device) == 1


def test_chains_that_keep_the_sign_of_zero(device):
    spec = gemm_spec(replace(FMA, accumulator="bf16", signed_zero=True), "bf16")
    a = torch.tensor([[-0.0, -0.0], [0.0, -0.0], [1.0, -1.0], [-1e-30, 0.0]]).bfloat16()
    b = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1e-30, 1.0]]).bfloat16()
    for c in (None, torch.full((4, 3), -0.0)):
        assert check(FMA_CHAIN, a, b, spec, c, device=device) == 0
    other = gemm_spec(replace(spec.datapath, accumulator="fp16"), "bf16")
    assert FMA_CHAIN.plan(job_of(a, b, other)) is None


def test_a_chain_below_zero_that_underflows_joins_a_sum_of_minus_zero(device):
    spec = gemm_spec(FMA, "fp32", plan=GemmPlan(promote_every=2))
    a, b = torch.full((2, 4), 2.0**-120), torch.full((3, 4), -(2.0**-120))
    assert check(FMA_CHAIN, a, b, spec, torch.full((2, 3), -0.0), device=device) == 0


def test_panels_of_pairs(device):
    spec = gemm_spec(replace(FMA, accumulator="bf16"), "bf16")
    assert check(FMA_CHAIN, *operands("bf16", 130, 258, 3), spec, device=device) == 0


# Aligned sums in float64.


@pytest.mark.parametrize(("block", "term"), [(16, "nearest_even"), (5, "nearest_even"), (40, "nearest_away")])
@pytest.mark.parametrize("with_c", [False, True])
def test_ties_of_terms(with_c, block, term, device):
    """All terms but the largest, and the addend, lie between two numbers of the grid; their sums are odd and even."""
    spec = gemm_spec(replace(NEAREST, block=block, term_rounding=term, fraction_bits=4, accumulator="fp32"), "bf16")
    generator = torch.Generator().manual_seed(block)
    drawn = lambda *shape: torch.randint(-16, 17, shape, generator=generator)  # noqa: E731
    a, b = (2 * drawn(33, 6 * block) + 1) / 2, torch.ones(20, 6 * block)
    a[:, ::block] = 16.0
    b[1::2] = torch.where(drawn(10, 6 * block) > 0, 1.0, -1.0)
    c = (2 * drawn(33, 20) + 1) / 2 if with_c else None
    assert check(FP64_FMA, a.bfloat16(), b.bfloat16(), spec, c, device=device) == 0
    even = a[:, 1:2] * torch.ones(1, block)  # sums to nearest of all terms at once would differ
    assert (even.sum(1) != even.round().sum(1)).any()


def test_the_longest_sums_of_terms(device):
    """As many of the largest terms as a block has, of one sign, and an addend as large: below 2^31 by one."""
    spec = gemm_spec(replace(NEAREST, min_exponent=None), "fp16")
    assert aligned_fp64_fma.shape_of(spec, 16) is not None
    largest = torch.full((2, 48), 2.0 - 2.0**-10).half()
    signs = torch.tensor([[1.0], [-1.0]]).half()
    c = torch.tensor([[3.999, -3.999], [3.9999998, 2.5]])
    for addend_of in (None, c, -c):
        assert check(FP64_FMA, largest * signs, largest, spec, addend_of, device=device) == 0
    longer = gemm_spec(replace(NEAREST, min_exponent=None, fraction_bits=26), "fp16")
    assert aligned_fp64_fma.shape_of(longer, 16) is None


def test_numbers_just_below_a_multiple_of_the_grid(device):
    """-(1 - 2^-22) u, in 22 bits, is truncated to nothing: its rest needs all bits of the sum."""
    a, b = torch.zeros(4, 16), torch.zeros(4, 16)
    a[:, 0], b[:, 0] = 1, 1
    a[:, 1], b[:, 1] = (2 - 2.0**-10) * 2.0**-13, -(2 - 2.0**-10) * 2.0**-13
    a[:, 2], b[:, 2] = 2.0**-12, -(2.0**-13)
    a[:, 3], b[:, 3] = 2.0**-12, -(2.0**-14)
    spec = gemm_spec(Datapath(block=16, fraction_bits=25, min_exponent=-133), "fp16")
    for path in (FP64_FMA, FP64_MMA):
        assert check(path, a.half(), b.half(), spec, device=device) == 0


def test_random_words_of_four_columns(device):
    """Columns in multiples of 64 share counters; several panels, of which both operands change places."""
    spec = gemm_spec(replace(BFLOAT_SUMS, rounding="stochastic"), "bf16")
    for m, n, k in ((3, 192, 20), (130, 64, 5)):
        assert check(FP64_FMA, *operands("bf16", m, n, k), spec, device=device) == 0


def test_sums_that_leave_the_accumulator(device):
    ones, small = torch.full((1, 16), 100.0).bfloat16(), torch.full((1, 16), 2.0**-66).bfloat16()
    narrow = gemm_spec(replace(BFLOAT_SUMS, accumulator="fp16"), "bf16")
    assert check(FP64_FMA, ones, ones, narrow, device=device) == 1
    assert check(FP64_FMA, small, small, gemm_spec(BFLOAT_SUMS, "bf16"), device=device) == 1  # sums are subnormal


def test_scales_that_lead_too_far_are_left(device):
    spec = gemm_spec(replace(BFLOAT_SUMS, fraction_bits=20, block=32, scale="e8m0", scale_block=32), "bf16")
    a, b = operands("bf16", 3, 4, 64)
    for power, left in ((40, 0), (127, 1), (-126, 0)):
        scales = torch.full((3, 2), 2.0**power), torch.full((4, 2), 2.0**-40)
        assert check(FP64_FMA, a, b, spec, None, *scales, device=device) == left
    assert check(FP64_FMA, a * 2.0**-60, b, spec, None, torch.full((3, 2), 2.0**-126), None, device=device) == 1


# Aligned sums on the fp64 tensor core.


@pytest.mark.parametrize("low", [-12, -30, -60])
@pytest.mark.parametrize("fmt", ["bf16", "e5m2"])
def test_exponents_of_any_width(fmt, low, device):
    """What lies too far below its row is left to another path, never wrong."""
    a, b = (wide(rows, 100, seed=rows, low=low, high=12).to(DTYPES[fmt]) for rows in (70, 140))
    assert check(FP64_MMA, a, b, definition(fmt), device=device) == 0 or low < -12


@pytest.mark.parametrize(("scale", "left"), [(1e-17, 0), (1e-20, 2), (1e18, 2), (1e19, 2)])
def test_ends_of_the_range_are_left(scale, left, device):
    a, b = ((normal(rows, 100, seed=rows) * scale).bfloat16() for rows in (70, 140))
    assert check(FP64_MMA, a, b, definition("bf16"), device=device) == left


@pytest.mark.parametrize(("fmt", "power"), [("e4m3", 0), ("e4m3", 50), ("bf16", 0), ("bf16", 50), ("bf16", -140)])
def test_addends_of_any_size(fmt, power, device):
    c = normal(70, 140, seed=3).bfloat16().float() * 2.0**power
    c[0, :9], c[1, 5] = 0, -0.0
    assert check(FP64_MMA, *operands(fmt), definition(fmt), c, device=device) == 0 or power < -100


@pytest.mark.parametrize("power", [0, -8, -70])
def test_addends_of_rows_of_zeros(power, device):
    """What zeros are packed as, and the grid of blocks without products, must not truncate an addend."""
    a, b = operands("bf16")
    a[2:60:2], b[:, :64] = 0, 16 * b[:, :64]
    spec = definition("bf16", unit=Datapath(block=32, fraction_bits=8))
    c = normal(70, 140, seed=3).bfloat16().float() * 2.0**power
    assert check(FP64_MMA, a, b, spec, c, device=device) == 0 or power < -8


@pytest.mark.parametrize(("kept", "terms"), [(13, "toward_zero"), (9, "toward_zero"), (13, "down")])
def test_chains_that_the_next_block_need_not_cut_again(kept, terms, device):
    """A chain keeps what is below the accumulator's last place only where the next block truncates that anyway."""
    unit = Datapath(block=32, fraction_bits=13, accumulator=custom(8, kept), term_rounding=terms)
    numbers = aligned_fp64_mma.floor_constants(definition("e4m3", unit=unit), 32, 100)
    assert numbers is not None and numbers.single and numbers.acc_mantissa == kept
    assert check(FP64_MMA, *operands("e4m3"), definition("e4m3", unit=unit), device=device) == 0


@pytest.mark.parametrize("block", [4, 8, 16, 32, 64])
def test_float32_takes_sums_that_it_holds_with_a_bit_to_spare(block):
    """Products below 4, with scales below 16, in steps of 2^-f: a block of 8 or more is less than 2^21 of them."""
    for fraction_bits in range(2, 24):
        for kept, scale, head in ((13, None, 2), (20, None, 2), (21, None, 2), (13, E8M0, 4)):
            scaled = {"scale": scale, "scale_block": block} if scale else {}
            unit = Datapath(block=block, fraction_bits=fraction_bits, accumulator=custom(8, kept), **scaled)
            single = (block << head + fraction_bits) < 1 << 21 and kept <= 20 and block >= 8
            floor = aligned_fp64_mma.floor_constants(definition("e4m3", unit=unit), block, 100)
            assert floor is not None and floor.single is single, (fraction_bits, kept)


@pytest.mark.parametrize(("fmt", "eight"), [("e4m3", True), ("fp16", False)])
def test_spacings_of_powers(fmt, eight):
    """A spacing of 8 takes a shift; formats of many exponents have no room for it."""
    assert (aligned_fp64_mma.floor_constants(definition(fmt), 32, 100).spacing == 8) is eight


@pytest.mark.slow
@pytest.mark.parametrize("successive", [False, True])
def test_scaled_promotion(successive, device):
    plan = replace(SLOW, scaled_promotion=True, successive_scales=successive)
    scales = [torch.rand((rows, 2), generator=torch.Generator().manual_seed(rows)) for rows in (70, 140)]
    assert check(FP64_MMA, *operands("e4m3"), definition("e4m3", plan=plan), None, *scales, device=device) == 0
    c = normal(70, 140, seed=3)
    assert check(FP64_MMA, *operands("e4m3"), definition("e4m3", plan=SLOW), c, device=device) == 0


def test_one_operand_with_scales(device):
    spec = definition("e4m3", unit="blackwell.tcgen05.mxf8f6f4")
    scale = unit_scales(spec, 70, 100, "normal", 1)
    assert check(FP64_MMA, *operands("e4m3"), spec, None, scale, None, device=device) == 0


KINDS = {  # of aligned_fp64_mma.cu, by unit, format and plan
    "short": ("hopper.wgmma", "e4m3", GemmPlan()),
    "short-promoted": ("hopper.wgmma", "e4m3", SLOW),
    "long": ("blackwell.tcgen05", "e4m3", GemmPlan()),
    "wide": ("hopper.wgmma", "bf16", GemmPlan()),
    "wide-promoted": ("hopper.wgmma", "bf16", SLOW),
    "narrow": ("hopper.wgmma", "fp16", GemmPlan()),
    "blocks-of-8": ("hopper.wgmma", "tf32", GemmPlan()),
}
MORE = [(4, 1, 3, 1), (2, 2, 3, 2, 8), (2, 2, 3, 2, 32, True), (1, 1, 3, 4, 8, True)]
CHOICES = aligned_fp64_mma.CHOICES
ALL_CHOICES = sorted(
    {choice for choices in CHOICES.values() for choice in choices} | {aligned_fp64_mma.Choice(*more) for more in MORE}
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", ALL_CHOICES, ids=str)
def test_every_choice(choice, kind, device, monkeypatch):
    """What ptxas makes of a specialisation has been wrong where the same source, as another one, was right."""
    unit, fmt, plan = KINDS[kind]
    monkeypatch.setattr(aligned_fp64_mma, "CHOICES", dict.fromkeys(CHOICES, (choice,)))
    aligned_fp64_mma.choose_configuration.cache_clear()
    try:
        spec = definition(fmt, unit=unit, plan=plan)
        assert check(FP64_MMA, *operands(fmt, k=300), spec, device=device) == 0
    finally:
        aligned_fp64_mma.choose_configuration.cache_clear()


def chosen(kind, **change):
    """Return the macros of a kind of product on an H200."""
    unit, fmt, plan = KINDS[kind]
    block = {"tf32": 8, "bf16": 16, "fp16": 16, "e4m3": 32}[fmt]
    floor = aligned_fp64_mma.floor_constants(definition(fmt, unit=unit, plan=plan), block, 4096)
    gpu = Gpu((9, 0), 227 << 10)
    how = aligned_fp64_mma.choose_configuration(floor, block, int(plan != GemmPlan()), gpu)._replace(**change)
    return FP64_MMA._product_macros(None, aligned_fp64_mma.Specialisation(floor, how))


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
def test_usual_kernels_do_not_spill(kind):
    """Spills are slow, and one has cost the low word of a float64 (aligned_fp64_mma_chains.cuh)."""
    from cuda.bindings import nvrtc

    of_13_0 = kind == "long" and nvrtc.nvrtcVersion()[1:] == (13, 0)  # so it was measured for docs/performance.md
    assert spilled(runtime.compiled("aligned_fp64_mma.cu", "sm_90", chosen(kind)).code) == (8 if of_13_0 else 0)


@needs_nvrtc
def test_spills_are_noticed():
    crowded = chosen("long", columns=4, halves=2, resident=2)
    assert spilled(runtime.compiled("aligned_fp64_mma.cu", "sm_90", crowded).code) > 0


# Block scales.


def test_blocks_of_zeros_may_have_the_smallest_scale(device):
    spec = gemm_spec(MXF4, "e2m1")
    a, b = operands("e2m1", 20, 12, 192)
    scales = [unit_scales(spec, rows, 192, "normal", rows) for rows in (20, 12)]
    a[3], scales[0][3] = 0, 2.0**-127
    b[5, 32:64], scales[1][5, 1] = 0, 2.0**-127
    assert check(BLOCK_SCALED, a, b, spec, None, *scales, device=device) == 0


@pytest.mark.parametrize("by", [{0: 1}, {64: 1, 65: -1}], ids=["the sum so far", "products that cancel"])
def test_groups_far_below_the_alignment(by, device):
    """Whatever aligns them, products are cut after 35 bits."""
    spec = gemm_spec(MXF4, "e2m1")
    a, b = torch.zeros(2, 128), torch.ones(17, 128)
    a[:, list(by)], a[:, 96] = torch.tensor(list(by.values())).float(), torch.tensor([1.5, -1.5])
    scales = torch.ones(2, 4), torch.ones(17, 4)
    scales[1][:, 3 - (len(by) == 1) :] = torch.exp2(-torch.arange(28.0, 45))[:, None]
    assert check(BLOCK_SCALED, a, b, spec, None, *scales, device=device) == 0


@pytest.mark.parametrize(("power", "left"), [(50, 0), (51, 1), (-50, 0), (-51, 1)])
def test_scales_far_from_one_are_left(power, left, device):
    a, b = operands("e2m1", 3, 4, 64)
    for side in (0, 1):
        scales = [torch.ones(3, 2), torch.ones(4, 2)]
        scales[side][2, 1] = 2.0**power
        assert check(BLOCK_SCALED, a, b, gemm_spec(MXF4, "e2m1"), None, *scales, device=device) == left


@pytest.mark.parametrize("kind", ["normal", "wide"])
def test_group_by_group_alone(kind, emulated, monkeypatch):
    real = BLOCK_SCALED._shape
    monkeypatch.setattr(BLOCK_SCALED, "_shape", lambda job: replace(real(job), spread=-1))
    spec = gemm_spec(replace(MXF4, scale="ue4m3", scale_block=16), "e2m1")
    a, b = operands("e2m1", 20, 12, 256)
    scales = [unit_scales(spec, rows, 256, kind, rows) for rows in (20, 12)]
    assert_same_bits(product_of(BLOCK_SCALED, a, b, spec, None, *scales)[0][0], expected(a, b, spec, None, *scales))


def test_devices_without_fp64_tensor_cores(emulated):
    job = job_of(*operands("bf16"), gemm_spec(get_unit("hopper.wgmma").mode("bf16", "bf16"), "bf16"))
    assert FP64_MMA.plan(job) is not None and FP64_FMA.plan(job) is not None
    assert FP64_MMA.plan(replace(job, gpu=job.gpu._replace(capability=(8, 9)))) is None
