# SPDX-License-Identifier: Apache-2.0
"""Hard numbers for fused units on the CPU engine: every code, cancellation, wide exponents, and which kernel ran."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import fmtsim.torch_engine
from fmtsim import GemmPlan, RandomKey, get_format, get_unit
from fmtsim.cpu.cast.blockwise import FLOAT8
from fmtsim.cpu.gemm import exact_integer, tiles
from fmtsim.cpu.gemm.engine import supports_gemm
from fmtsim.cpu.gemm.operand_layouts import Source
from fmtsim.cpu.gemm.operand_reads import are_neighbours, gather_panel, gather_row, read_array
from fmtsim.cpu.gemm.scaled_groups import Groups
from fmtsim.cpu.runtime.jit import kernel
from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.spec.datapath import TERM_ROUNDINGS, Datapath, sum_dtype
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import (
    DTYPES,
    E8M13,
    EIGHT,
    HALF,
    INF,
    check,
    f32,
    gemm_spec,
    operand,
    paths,
    product,
    setting,
    unit_scales,
)

E8M30 = FloatFormat(name="e8m30", exponent_bits=8, mantissa_bits=30)
EXACT = get_unit("exact").mode("fp32", "fp32")


@pytest.fixture(autouse=True)
def slab_by_slab(monkeypatch):
    """Take small products slab by slab, as large ones are."""
    monkeypatch.setattr(tiles, "_SLAB", 0)


def against_torch(a, b, spec, **rest) -> None:
    """Compare with the other engine, where the oracle would take too long."""
    expected = torch.empty(a.shape[0], b.shape[0], dtype=sum_dtype(spec.datapath))
    arguments = [rest.get(name) for name in ("c", "scale_a", "scale_b")]
    fmtsim.torch_engine.gemm(a, b, *arguments, spec, rest.get("random"), expected)
    assert_same_bits(product(a, b, spec, **rest), expected)


# Which kernel runs.


@paths
def test_a_product_of_each_kernel(path):
    a, b, spec, scale_a, scale_b = setting(path, 3, 5, 40)
    check(a, b, spec, scale_a=scale_a, scale_b=scale_b)


def test_the_floor_kernel_leaves_what_is_beyond_its_limits():
    tiny = operand("bf16", 4, 64, "normal", 1) * 2.0**-70
    huge = f32([3e38, 3e38, -3e38, -3e38]).bfloat16(), f32([1.0, 1.0, 1.0, 1.0]).bfloat16()  # Inf half way
    check(tiny, tiny, gemm_spec(HALF, "bf16"))
    check(*huge, gemm_spec(replace(HALF, block=2), "bf16"))


@pytest.mark.parametrize(
    ("unit", "fmt", "kind"),
    [
        (HALF, "fp16", "wide"),
        (HALF, "bf16", "special"),  # what has an Inf goes one by one
        (HALF, "tf32", "narrow"),
        (replace(HALF, accumulator="fp16", rounding="nearest_even"), "fp16", "normal"),
        (EIGHT, "e5m2", "normal"),
        (replace(EIGHT, fraction_bits=25), "e4m3", "normal"),
        (replace(EIGHT, term_rounding="nearest_even"), "e4m3", "normal"),
        (replace(HALF, signed_zero=True), "bf16", "normal"),
        (replace(HALF, fraction_bits=48), "bf16", "normal"),
        (replace(HALF, block=None, fraction_bits=20), "bf16", "normal"),
        (EXACT, "bf16", "normal"),
    ],
)
def test_fused_units(unit, fmt, kind):
    check(operand(fmt, 3, 70, kind, 1), operand(fmt, 5, 70, kind, 2), gemm_spec(unit, fmt))


@pytest.mark.parametrize("accumulator", ["bf16", "fp32", E8M13], ids=str)
@pytest.mark.parametrize(
    "rounding",
    ["nearest_even", *(Rounding(mode="stochastic", random_bits=bits) for bits in (1, 8, 25, 32))],
    ids=str,
)
def test_sums_are_rounded_where_terms_are_truncated(accumulator, rounding):
    spec = gemm_spec(
        replace(HALF, accumulator=accumulator, rounding=rounding), "bf16", plan=GemmPlan(k_tile=32, split=2)
    )
    for kind, rows, columns in (("narrow", 1, 64), ("normal", 2, 70)):  # words of a row begin within a group of 64
        check(operand("bf16", rows, 100, kind, 1), operand("bf16", columns, 100, kind, 2), spec, random=RandomKey(5, 9))


MXF4 = get_unit("blackwell.tcgen05.mxf4").mode("e2m1", "e2m1")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "normal"),
        ({"scale": "e4m3"}, "special"),
        ({"fraction_bits": 4}, "normal"),
        ({"group": 8}, "normal"),
        ({"scale": "e4m3"}, "wide"),
        ({}, "wide"),  # scales too far apart for bytes
        ({"rounding": "nearest_even"}, "normal"),
        ({"min_exponent": 0}, "wide"),
    ],
)
def test_groups_are_added_as_integers_where_sums_are_truncated(fields, kind, monkeypatch):
    spec = gemm_spec(replace(MXF4, **fields), "e2m1", plan=GemmPlan(k_tile=128, split=2))
    a, b = (operand("e2m1", rows, 330, "normal", rows) for rows in (2, 70))
    scales = {f"scale_{x}": unit_scales(spec, rows, 330, kind, rows) for x, rows in (("a", 2), ("b", 70))}
    if "scale" in fields:  # e8m0 has no zero
        scales["scale_a"][1, :2] = 0
    check(a, b, spec, **scales)
    monkeypatch.setattr(Groups, "tops", lambda *_: None)
    check(a, b, spec, **scales)


# Every code, and patterns of sign, exponent and significand.


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("unit", ["hopper.wgmma", "hopper.mma", "blackwell.tcgen05"])
def test_all_codes_against_all(fmt, unit):
    codes = torch.arange(256, dtype=torch.uint8)
    a, b = codes[:, None].repeat(1, 3), codes[:, None].repeat(1, 3)
    a[:, 1], b[:, 1] = 0x38, codes.roll(77)
    a[:, 2], b[:, 2] = codes.roll(1), 0xA1
    a, b = a.view(DTYPES[fmt]), b.view(DTYPES[fmt])
    for accumulate in ("fp32", "fp16"):
        spec = gemm_spec(get_unit(unit).mode(fmt, fmt, accumulate), fmt)
        check(a[::17, :1], b[::7, :1], spec)
        check(a[5::63], b[1::15], spec)
        against_torch(a, b, spec)


def patterns(name: str) -> torch.Tensor:
    """Return values at both ends of a format's range and around 1, with significands of few and of many bits."""
    fmt = get_format(name)
    exponents = {fmt.min_exponent, fmt.min_exponent + 1, -13, -1, 0, 1, 12, fmt.max_exponent - 1, fmt.max_exponent}
    ulp = 2.0**-fmt.mantissa_bits
    significands = (1.0, 1 + ulp, 2 - ulp, 1.5, 1 + ulp * int(0.67 / ulp))
    values = [s * m * 2.0**e for e in sorted(exponents) for m in significands for s in (1, -1)]
    values = [v for v in values if abs(v) <= fmt.max]
    low = [s * fmt.min_subnormal * n for n in (0, 1, 2, 3) for s in (1.0, -1.0)]
    return torch.tensor(values + low, dtype=torch.float64).to(DTYPES.get(name, torch.float32))


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize("unit", ["half", "nearest", "short", "exact"])
def test_patterns_against_patterns(fmt, unit):
    path = {"half": HALF, "short": replace(HALF, fraction_bits=13, accumulator=E8M13), "exact": EXACT}.get(
        unit, replace(HALF, rounding="nearest_even", term_rounding="nearest_even", accumulator="fp16")
    )
    table, generator = patterns(fmt), torch.Generator().manual_seed(3)
    a, b = (table[torch.randint(0, len(table), (rows, 37), generator=generator)] for rows in (5, 7))
    check(a, b, gemm_spec(path, fmt))
    b[:, 1::2] = b[:, ::2][:, :18]  # pairs that cancel but for a few
    a[:, 1::2] = (-a[:, ::2][:, :18].float()).to(a.dtype)
    a[:, 5] = table[7]
    check(a, b, gemm_spec(path, fmt))
    check(a[:2], b[:2], gemm_spec(path, fmt), c=f32([1.0, -(2.0**-24)], [2.0**-14, 0.0]))


def short_units(terms: str, mode: str) -> list[Datapath]:
    """Return units whose fractions and sums are so short that halfway cases are common."""
    two_bits = FloatFormat(name="e8m2", exponent_bits=8, mantissa_bits=2)
    return [
        Datapath(block=4, fraction_bits=bits, term_rounding=terms, rounding=mode, accumulator=fmt)
        for bits, fmt in ((2, E8M13), (3, two_bits))
    ]


def small_integers(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-15, 16, (rows, 12), generator=generator) * 2.0**-3 for rows in (4, 9))
    return (a * factor).bfloat16(), b.bfloat16()


@pytest.mark.parametrize("mode", MODES[:-1])
@pytest.mark.parametrize("terms", TERM_ROUNDINGS)
@pytest.mark.parametrize("factor", [1.0, 2.0**-130])  # the second with results below the normal range
def test_ties_of_terms_and_sums(factor, terms, mode):
    for unit in short_units(terms, mode):
        check(*small_integers(factor), gemm_spec(unit, "bf16"))
        check(*small_integers(factor), gemm_spec(replace(unit, signed_zero=True), "bf16"))


def test_a_subnormal_sum_has_the_exponent_of_the_smallest_normal():
    unit = Datapath(block=1, fraction_bits=2, accumulator=E8M13)
    a, b = torch.full((1, 2), 2.0**-126), f32([2.0**-2, 1.75 * 2.0**-4])  # 2^-128 has exponent -126: the grid is 2^-128
    check(a.bfloat16(), b.bfloat16(), gemm_spec(unit, "bf16"))


# Exponents too far apart for bytes, and sums at the ends of the accumulator.


def spread(k: int, *places: tuple[slice, float], rows: int = 2, seed: int = 1) -> torch.Tensor:
    x = operand("bf16", rows, k, "normal", seed)
    for where, factor in places:
        x[:, where] *= factor
    return x


@pytest.mark.parametrize("apart", [50, 62, 63, 64, 65, 120])
def test_spans_of_a_row(apart):
    a, b = spread(32, (slice(0, 8), 2.0**apart)), spread(32, rows=3, seed=2)
    check(a, b, gemm_spec(HALF, "bf16"))
    check(b, a, gemm_spec(HALF, "bf16"))


def test_spans_in_one_slab_only():
    k, end = 2048 + 64, slice(2060, 2070)
    b = spread(k, rows=1, seed=2)
    # large ones in the last slab; small ones, which the sum of the others cuts away; large ones in the first slab
    a = [spread(k, (where, factor), rows=1) for where, factor in ((end, 2.0**80), (end, 2.0**-80), (slice(9), 2.0**80))]
    for x, y in ((a[0], b), (b, a[1]), (a[2], b)):
        check(x, y, gemm_spec(HALF, "bf16"))


def test_small_products_are_one_slab(monkeypatch):
    """With the same bits: 4 rows of a padded tile and 64 columns beside the slots of K."""
    k = 2048 + 64
    a, b = spread(k, rows=3), spread(k, rows=5, seed=2)
    monkeypatch.setattr(tiles, "_SLAB", 68 * k)
    check(a, b, gemm_spec(HALF, "bf16"))
    monkeypatch.setattr(tiles, "_SLAB", 68 * k - 1)
    check(a, b, gemm_spec(HALF, "bf16"))


@pytest.mark.parametrize(("before", "after"), [(-60, 55), (55, -60), (-60, -60), (55, 55)])
def test_slabs_far_from_each_other(before, after):
    k, half = 2048 + 48, slice(0, 2048)
    for signed in (1.0, -1.0):  # sums that grow, or mixed ones
        a = spread(k, (half, 2.0**before), (slice(2048, k), 2.0**after), rows=1)
        b = spread(k, (half, 2.0**before), (slice(2048, k), 2.0**after), rows=1, seed=2)
        if signed > 0:
            a, b = a.abs(), b.abs()
        check(a, b, gemm_spec(HALF, "bf16"))


@pytest.mark.parametrize("first", [(3e38, 3e38), (3.38e38,), (-3e38, -3e38), (3e38, 3e38, -3e38)])
def test_a_sum_at_the_end_of_its_range_is_carried_into_later_slabs(first):
    """It is Inf, or becomes so by products that would fit alone: the kernel without overflow may not take them."""
    k = 1600
    a, b = spread(k, rows=2), spread(k, rows=3, seed=2)
    a[0], b[0] = 1.0, 2.0**112
    a[0, : len(first)], b[0, : len(first)] = torch.tensor(first).bfloat16(), 1.0
    a[0, len(first) : 512], b[2, 512:] = 0.0, -(2.0**112)
    check(a, b, gemm_spec(HALF, "bf16"))
    check(b, a, gemm_spec(HALF, "bf16"))


@pytest.mark.parametrize("unit", [HALF, replace(HALF, rounding="nearest_even"), EXACT])
@pytest.mark.parametrize("exponent", [-149, -140, -126, -120, -101, 120, 126, 127])
def test_sums_at_the_ends_of_float32(unit, exponent):
    a, b = operand("bf16", 3, 40, "normal", exponent + 200), operand("bf16", 5, 40, "narrow", 2)
    down = exponent // 2
    for x, y in ((a * 2.0**down, b * 2.0 ** (exponent - down)), (a.abs() * 2.0**down, b.abs() * 2.0**-down)):
        check(x, y, gemm_spec(unit, "bf16"))
        check(x.abs(), y.abs(), gemm_spec(unit, "bf16"))  # the chain overflows on the way
    check(a * 2.0**down, b * 2.0 ** (exponent - down), gemm_spec(unit, "bf16", plan=GemmPlan(promote_every=8)))


def test_inf_on_the_way_stays():
    a, b = f32([3e38, 3e38, -3e38, -3e38]), f32([1.0, 1.0, 1.0, 1.0])
    for unit in (HALF, replace(HALF, block=1), replace(HALF, block=2), replace(HALF, block=2, rounding="down"), EXACT):
        check(a, b, gemm_spec(unit, "fp32"))
        check(a.fill_(2.0**127), b, gemm_spec(unit, "fp32"), c=f32([-INF]))


# What the engine leaves to others.


@pytest.mark.parametrize(
    ("unit", "plan"),
    [
        (replace(HALF, promote_every=4, promotion="bf16"), GemmPlan()),
        (replace(HALF, promote_every=4, promotion="fp64"), GemmPlan(k_tile=4, split=2)),
        (replace(HALF, accumulator="fp64"), GemmPlan(promote_every=4)),
        (replace(HALF, accumulator="fp64"), GemmPlan(promote_every=4, scaled_promotion=True)),
        (replace(HALF, accumulator=E8M30), GemmPlan(k_tile=4, split=2)),
        (replace(HALF, scale="e8m0", scale_block=16), GemmPlan(promote_every=16, scaled_promotion=True)),
        (replace(HALF, accumulator="e4m3"), GemmPlan()),
        (HALF, GemmPlan(partial="e4m3")),
        (replace(HALF, fraction_bits=55), GemmPlan()),
    ],
)
def test_sums_that_would_be_rounded_twice_go_elsewhere(unit, plan):
    x = operand("bf16", 1, 8, "normal", 1)
    assert not supports_gemm(gemm_spec(unit, "bf16", plan=plan), x, x)
    assert supports_gemm(gemm_spec(HALF, "bf16", plan=GemmPlan(promote_every=4, scaled_promotion=True)), x, x)


def test_doubles_go_elsewhere_unless_their_format_fits_float32():
    x = operand("bf16", 2, 20, "normal", 1)
    assert not supports_gemm(gemm_spec(HALF, "fp64"), x.double(), x.double())
    assert not supports_gemm(gemm_spec(EXACT, "fp64"), x.double(), x.double())
    for unit in (HALF, EXACT, replace(HALF, accumulator="fp64")):
        check(x.double(), x.double(), gemm_spec(unit, "bf16"))


def test_scales_whose_product_is_beyond_float32():
    unit = replace(HALF, scale="e8m0", scale_block=16, signed_zero=True)
    check(f32([2.0**-9, 0.0]), f32([2.0**-9, -1.0]), gemm_spec(unit, "e4m3"), scale_a=f32([2.0**70]),
          scale_b=f32([2.0**64]))  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "widest"),  # 62 less 4, the block's count, and of scales their significand, twice, and a carry
    [
        ({"block": 7}, 62 - 4 - 3),
        ({"block": 8}, 62 - 4 - 4),
        ({"block": 8, "scale": "e4m3", "scale_block": 4}, 62 - 4 - 4 - 2),
        ({"block": 8, "scale": "e4m3", "scale_block": 4, "group": 4}, 62 - 4 - 4 - 2 - 8 - 3),
    ],
)
def test_sums_as_wide_as_62_bits_hold_are_exact(fields, widest):
    spec, wider = (gemm_spec(Datapath(fraction_bits=bits, **fields), "e4m3") for bits in (widest, widest + 1))
    assert exact_integer.covers(spec, fields["block"]) and not exact_integer.covers(wider, fields["block"])
    largest = f32([448.0] * fields["block"])
    scales = {f"scale_{x}": f32([448.0, 448.0]) for x in "ab"} if "scale" in fields else {}
    check(largest, largest, spec, c=f32([2.0**17 if scales == {} else 2.0**35]), **scales)


@pytest.mark.parametrize("missing", [{"scale_a"}, {"scale_b"}, {"scale_a", "scale_b"}])
def test_scaled_promotion_needs_the_scales_of_both_operands(missing):
    spec = gemm_spec(HALF, "bf16", plan=GemmPlan(promote_every=4, scaled_promotion=True))
    x, scales = operand("bf16", 1, 8, "normal", 1), {name: torch.ones(1, 2) for name in ("scale_a", "scale_b")}
    assert supports_gemm(spec, x, x) and product(x, x, spec, **scales).isfinite().all()
    with pytest.raises(ArgumentError, match="a plan with scaled_promotion needs scales; call scaled_mm, or pass anoth"):
        product(x, x, spec, **{name: scale for name, scale in scales.items() if name not in missing})


# How operands are read.


@kernel
def gather_both(source, first, order, panel, row):
    gather_panel(source.array, source.table, first, order, 1, panel)
    gather_row(source.array, source.table, first, order, are_neighbours(source.array, order), 1, row, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FLOAT8])
def test_operands_are_read_as_they_lie(dtype):
    """Every code, in rows of more and of fewer than a cache line, along and across, in order and not."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-(1 << 15), 1 << 15, (220, 300), generator=generator, dtype=torch.int32) << 16
    codes |= torch.arange(220 * 300).view(220, 300) & 0xFFFF
    whole = codes.view(torch.uint8).view(220, 300, 4)[..., : dtype.itemsize].contiguous().view(dtype).view(220, 300)
    orders = [np.arange(k, k + count) for k, count in ((0, 300), (5, 128), (3, 31), (299, 1))]
    orders += [np.arange(130)[::-1], np.where(np.arange(48) % 5, np.arange(48), -1)]
    for x, order in itertools.product((whole, whole.mT.contiguous().mT, whole[:, :280:2], whole[:, 7:]), orders):
        order = order[order < x.shape[1]].astype(np.int32)
        wanted = torch.where(torch.tensor(order < 0), 0, x.float()[:, np.maximum(order, 0)])
        source = Source(*read_array(x), 0, 0, 0, np.zeros((0, 0), np.float32), 1, 0)
        for first in (0, 64, 131, 173, 219):
            panel, row = np.full(64 * order.size, 7, np.float32), np.full(order.size, 7, np.float32)
            gather_both(source, first, order, panel, row)
            columns = torch.zeros(64, order.size)
            columns[: 220 - first] = wanted[first : first + 64]
            for found, right in ((torch.tensor(panel).view(-1, 64).T, columns), (torch.tensor(row), wanted[first])):
                assert_same_bits(found.nan_to_num(7, 8, 9), right.nan_to_num(7, 8, 9))
