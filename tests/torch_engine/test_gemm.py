# SPDX-License-Identifier: Apache-2.0
"""The torch engine's matrix products: bits of the oracle, of IEEE arithmetic, and of themselves on other tiles."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding import oracle
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError
from fmtsim.torch_engine import gemm
from fmtsim.torch_engine.gemm_blocks import AlignedUnit, FusedAddUnit
from fmtsim.torch_engine.gemm_operands import _convert, assembled, round_value
from fmtsim.torch_engine.gemm_sums import unit_of
from fmtsim.torch_engine.gemm_units import integer_sums
from fmtsim.torch_engine.gemm_wide import WideUnit
from tests.support.bits import assert_same_bits, same_bits
from tests.support.casts import ROUNDINGS, adversarial, words_for
from tests.support.gemm_engine import operand
from tests.support.product_oracle import gemm_oracle

FMA = Datapath(block=1, fraction_bits=None, rounding=Rounding(), signed_zero=True)
FMA64 = replace(FMA, accumulator=get_format("fp64"))
CHAIN = GemmPlan()
EXACT = Datapath(block=None, fraction_bits=None, rounding=Rounding())


pytestmark = pytest.mark.usefixtures("one_thread")


def product(path, a, b, a_format="bf16", b_format=None, c=None, plan=CHAIN, key=None, dtype=torch.float32):
    """Return the engine's sums of two matrices."""
    spec = GemmSpec(datapath=path, plan=plan, a=get_format(a_format), b=get_format(b_format or a_format))
    out = torch.full((a.shape[0], b.shape[0]), 7, dtype=dtype, device=a.device)
    gemm(a, b, c, None, None, spec, key, out)
    return out


def test_which_arithmetic_serves_which_unit():
    def found(path, operand, k=64):
        fmt = get_format(operand)
        return type(unit_of(GemmSpec(datapath=path, plan=GemmPlan(), a=fmt, b=fmt), k))

    e4m3, e8m0 = get_format("e4m3"), get_format("e8m0")
    nvfp4 = Datapath(block=64, group=16, fraction_bits=35, scale=e4m3, scale_block=16)
    assert found(nvfp4, "e2m1") is AlignedUnit
    assert found(Datapath(block=32, scale=e8m0, scale_block=32), "e4m3") is AlignedUnit
    assert all(found(Datapath(), operand) is AlignedUnit for operand in ("bf16", "fp16", "tf32", "e5m2"))
    assert found(Datapath(), "fp64") is WideUnit
    assert found(FMA, "fp32") is FusedAddUnit
    assert found(FMA64, "fp64") is WideUnit
    assert found(EXACT, "bf16") is WideUnit
    assert found(EXACT, "fp32", k=1) is FusedAddUnit


def floats(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    return FloatFormat(name="x", exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


SCALED = {name: {"scale": get_format(name), "scale_block": 4} for name in ("e8m0", "e4m3")}


@pytest.mark.parametrize(
    ("path", "most"),
    [
        (Datapath(block=16), [46, 46, 46, 46, None]),
        (Datapath(block=15), [47, 47, 47, 47, None]),
        (Datapath(block=4, **SCALED["e8m0"]), [46, 46, 46, 46, None]),
        (Datapath(block=4, **SCALED["e4m3"]), [46, 46, 46, None, None]),
        (Datapath(block=16, group=4, **SCALED["e4m3"]), [None, None, 40, None, None]),
        (Datapath(block=16, group=2), [None, None, 40, None, None]),
    ],
    ids=str,
)
def test_how_many_bits_of_terms_float64_holds(path, most):
    """The largest fraction_bits by operands: a sign, two bits of a product (four with scales), carries, in 53 bits."""
    found = []
    for a, b in (("bf16", "bf16"), ("tf32", "fp32"), ("e2m1", "e2m1"), ("fp32", "fp32"), ("fp64", "bf16")):
        own = (replace(path, fraction_bits=bits) for bits in range(60))
        fits = [one.fraction_bits for one in own if AlignedUnit.fits(one, get_format(a), get_format(b), path.block)]
        found.append(max(fits, default=None))
    assert found == most


def test_which_products_and_sums_float64_holds():
    bf16, fp32, ten, eleven = get_format("bf16"), get_format("fp32"), floats(10, 3), floats(11, 3)
    short = Datapath(block=4, fraction_bits=10)
    for lowest in (-901, -900, 900, 901):
        assert AlignedUnit.fits(replace(short, min_exponent=lowest), bf16, bf16, 4) == (abs(lowest) == 900)
    assert [AlignedUnit.fits(short, x, y, 4) for x, y in ((ten, bf16), (ten, ten), (eleven, bf16))] == [
        True,
        False,
        False,
    ]
    assert AlignedUnit.fits(replace(short, accumulator=ten), bf16, bf16, 4)
    assert not AlignedUnit.fits(replace(short, accumulator=eleven), bf16, bf16, 4)
    assert FusedAddUnit.fits(FMA, fp32, floats(8, 28), 1) and not FusedAddUnit.fits(FMA, fp32, floats(8, 29), 1)
    assert FusedAddUnit.fits(replace(FMA, accumulator=floats(8, 50)), bf16, bf16, 1)
    for other, longest in (
        (FMA, 2), (replace(FMA, accumulator=floats(8, 51)), 1), (replace(FMA, rounding=Rounding(mode="stochastic")), 1),
        (replace(FMA, scale=get_format("e8m0"), scale_block=1), 1), (replace(FMA, fraction_bits=20), 1),
    ):  # fmt: skip
        assert not FusedAddUnit.fits(other, bf16, bf16, longest)


FACTS = ("span", "_fraction_bits", "_pair", "_base", "_group_base", "_group_limbs", "_digits", "_guard_limbs", "_count",
         "weight")  # fmt: skip
FAR = Datapath(block=16, fraction_bits=6010, min_exponent=11)
FP4 = Datapath(block=64, group=16, fraction_bits=60, scale=get_format("e4m3"), scale_block=16)


@pytest.mark.parametrize(("path", "operands", "longest", "expected"), [
    (EXACT, ("bf16", "bf16"), 40, (64, None, False, -280, -280, 0, 2, 4, 31, 80)),
    (EXACT, ("fp64", "fp32"), 1, (64, None, True, -1298, -1298, 0, 4, 6, 23, 23)),
    (EXACT, ("fp64", "fp64"), 700, (64, None, False, -2252, -2252, 0, 6, 8, 196, 196)),
    (replace(EXACT, accumulator=get_format("fp64")), ("e5m2", "e4m3"), 3,
     (64, None, False, -1126, -30, 0, 3, 5, 100, 100)),
    (Datapath(block=16, fraction_bits=60), ("fp32", "fp16"), 16, (64, 60, False, -206, -206, 0, 2, 4, 11, 32)),
    (FAR, ("fp64", "fp64"), 16, (64, 6010, False, -2252, -2252, 0, 6, 8, 267, 267)),
    (replace(FAR, min_exponent=9), ("fp64", "fp64"), 16, (64, None, False, -2252, -2252, 0, 6, 8, 196, 196)),
    (replace(FAR, min_exponent=10), ("fp64", "fp64"), 16, (64, 6010, False, -2252, -2252, 0, 6, 8, 267, 267)),
    (FP4, ("e2m1", "e2m1"), 64, (64, 60, False, -172, -28, 9, 9, 11, 27, 128)),
    (Datapath(block=96, group=48, fraction_bits=70), ("bf16", "tf32"), 96,
     (96, 70, False, -286, -286, 27, 27, 29, 75, 192)),
    (Datapath(block=2, fraction_bits=None, scale=get_format("e8m0"), scale_block=2), ("fp64", "fp64"), 2,
     (64, None, False, -2506, -2506, 0, 8, 10, 221, 221)),
])  # fmt: skip
def test_limbs_of_wide_units_are_those_that_were_recorded(path, operands, longest, expected):
    """Fewer would be too few for some sum, more take longer: who means to change them records them anew."""
    unit = WideUnit(path, *map(get_format, operands), longest)
    assert tuple(getattr(unit, name) for name in FACTS) == expected


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).view(256, 1)


@pytest.mark.parametrize("a", ["e4m3", "e5m2"])
@pytest.mark.parametrize("b", ["e4m3", "e5m2"])
def test_all_products_of_fp8_codes(a, b):
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    left, right = all_codes(dtypes[a]), all_codes(dtypes[b])
    exact = left.double() * right.double().t()
    expected = torch.where(torch.isnan(exact), 0x7FFFFFFF, (exact.float() + 0.0).view(torch.int32)).int()
    for path in (Datapath(block=32), EXACT, Datapath(block=16, operand=get_format("fp16"), paired=True)):
        assert torch.equal(product(path, left, right, a, b).view(torch.int32), expected)


def test_exact_chains_are_ieee_arithmetic():
    """Products with one make every step an addition, which torch does in float32 and float64 itself."""
    for dtype, path, name in ((torch.float32, FMA, "fp32"), (torch.float64, FMA64, "fp64")):
        a = operand(name, 300, 12, "special", 11)
        expected = torch.zeros(300, 1, dtype=dtype)
        for k in range(12):
            expected = expected + a[:, k : k + 1]
        got = product(path, a, torch.ones(1, 12, dtype=dtype), name, dtype=dtype)
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(got), nan)
        assert_same_bits(torch.where(nan, 0.0, got), torch.where(nan, 0.0, expected))


def test_single_float64_products_are_ieee_products():
    a, b = (operand("fp64", 60, 1, "special", seed) for seed in (1, 2))
    c = torch.full((60, 60), -0.0, dtype=torch.float64)
    got, expected = product(FMA64, a, b, "fp64", c=c, dtype=torch.float64), a * b.t()
    nan = torch.isnan(expected)
    assert bool((got.view(torch.int64)[nan] == 0x7FFFFFFFFFFFFFFF).all())
    assert_same_bits(torch.where(nan, 0.0, got), torch.where(nan, 0.0, expected))


def test_a_product_that_float64_does_not_hold():
    """2**-298 is the smallest product of bf16 subnormals' neighbours; Inf minus Inf does not arise from finite ones."""
    tiny = torch.tensor([[2.0**-133, 2.0**-133]]).bfloat16()
    one = product(EXACT, tiny, torch.tensor([[2.0**127, -(2.0**127)]]).bfloat16())
    assert one.view(torch.int32).tolist() == [[0]]
    huge = torch.tensor([[2.0**1000, 2.0**1000, 1.0]], dtype=torch.float64)
    other = torch.tensor([[2.0**1000, -(2.0**1000), 3.0]], dtype=torch.float64)
    for path in (replace(EXACT, accumulator=get_format("fp64")), EXACT):
        dtype = torch.float64 if path.accumulator != FP32 else torch.float32
        assert product(path, huge, other, "fp64", dtype=dtype).tolist() == [[3.0]]


TILED = [
    Datapath(),
    Datapath(rounding=Rounding(mode="stochastic")),
    Datapath(rounding=Rounding(mode="stochastic", random_bits=8, layout="cvt_rs")),
    EXACT,
    FMA,
]


@pytest.mark.parametrize("path", TILED, ids=["aligned", "stochastic", "cvt_rs", "exact", "chain"])
@pytest.mark.parametrize("budget", [1, 100, 1 << 11, 1 << 13])
def test_tiles_do_not_matter(path, budget, monkeypatch):
    import importlib

    module = importlib.import_module("fmtsim.torch_engine.gemm")
    a, b = operand("bf16", 9, 40, "normal", 1), operand("bf16", 13, 40, "normal", 2)
    a[3, 7], b[5, 2] = torch.inf, torch.nan
    plan = GemmPlan(k_tile=16, split=2)
    key = RandomKey(123456789, 1 << 40)
    whole = product(path, a, b, plan=plan, key=key)
    if path.rounding.mode == "stochastic":
        assert not same_bits(product(path, a, b, plan=plan, key=RandomKey(1, 0)), whole)
    monkeypatch.setattr(module, "_budget", lambda device: budget)
    assert_same_bits(product(path, a, b, plan=plan, key=key), whole)


def test_long_blocks_are_taken_in_pieces():
    a, b = operand("fp16", 2, 300, "wide", 1), operand("fp16", 2, 300, "wide", 2)
    for path in (EXACT, Datapath(block=None, fraction_bits=30), Datapath(block=256, group=4, scale=None)):
        spec = GemmSpec(datapath=path, plan=GemmPlan(), a=get_format("fp16"), b=get_format("fp16"))
        expected = torch.tensor(gemm_oracle(a.tolist(), b.tolist(), spec))
        assert_same_bits(product(path, a, b, "fp16"), expected)


def test_carries_move_up_in_long_sums():
    k = 40000  # more terms than a limb has room for
    a, b = torch.full((1, k), 1 - 2.0**-24), torch.full((2, k), 1 - 2.0**-24)
    b[1] = -b[1]
    wide = get_format("fp64")
    got = product(replace(EXACT, accumulator=wide), a, b, "fp32", dtype=torch.float64)
    expected = k * (1 - 2.0**-24) ** 2  # 48 bits times 40000: rounded once here, too
    exact = int((1 - 2.0**-24) * 2**24) ** 2 * k
    assert got.tolist() == [[exact / 2**48, -exact / 2**48]]
    assert abs(expected - exact / 2**48) < 1e-9


def test_flushing_processes_get_the_same_bits():
    a, b = (operand("bf16", 5, 32, "normal", seed) * 2.0**-70 for seed in (1, 2))
    kept = [product(path, a, b) for path in (Datapath(min_exponent=-133), EXACT, FMA)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        flushed = [product(path, a, b) for path in (Datapath(min_exponent=-133), EXACT, FMA)]
    finally:
        torch.set_flush_denormal(False)
    assert all(same_bits(x, y) for x, y in zip(kept, flushed, strict=True))


def test_a_two_stage_unit_that_does_not_fit():
    a = torch.ones(1, 8, dtype=torch.float64)
    with pytest.raises(
        ArgumentError, match="24 and 31 bits with fp64 x fp64 does not fit in float64; choose fewer bits"
    ):
        product(TwoStageDatapath(block=8), a, a, "fp64")


SMALL = [
    Datapath(block=4, fraction_bits=5),
    Datapath(block=4, fraction_bits=5, term_rounding="nearest_even", rounding=Rounding()),
    Datapath(block=4, fraction_bits=60),
    Datapath(block=4, group=2, fraction_bits=5, scale=get_format("e8m0"), scale_block=4),
    Datapath(block=4, group=2, fraction_bits=60, scale=get_format("e8m0"), scale_block=4),
    Datapath(block=4, fraction_bits=5, scale=get_format("e8m0"), scale_block=2),
]


@pytest.mark.parametrize("accumulator", ["fp32", "fp16"])
@pytest.mark.parametrize("path", SMALL, ids=range(len(SMALL)))
def test_running_sums_below_the_smallest_normal_number(path, accumulator):
    """Their exponent is the smallest normal one, which decides how many bits of all terms are kept."""
    path, scaled = replace(path, accumulator=get_format(accumulator)), path.scale is not None
    spec = GemmSpec(datapath=path, plan=CHAIN, a=get_format("bf16"), b=get_format("bf16"))
    low, dtype = path.accumulator.min_exponent, torch.float32 if accumulator == "fp32" else torch.float16
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(rows, 6, generator=generator) for rows in (4, 5))
    c = torch.randn(4, 5, generator=generator) * 2.0 ** torch.randint(-12, 4, (4, 5), generator=generator)
    c = (c.double() * 2.0**low).to(dtype).float()
    for down in (2, 6, 10, 14):
        sizes = 2.0 ** ((low - down) // 2), 2.0 ** (low - down - (low - down) // 2)
        operands = [(x if scaled else x * size).bfloat16() for x, size in zip((a, b), sizes, strict=True)]
        counts = -(-6 // path.scale_block) if scaled else 0
        scales = [torch.full((len(x), counts), size) if scaled else None for x, size in zip((a, b), sizes, strict=True)]
        out = torch.empty(4, 5)
        gemm(*operands, c, *scales, spec, None, out)
        left, right = (s if s is None else s.tolist() for s in scales)
        expected = gemm_oracle(*(x.tolist() for x in operands), spec, c=c.tolist(), scale_a=left, scale_b=right)
        assert_same_bits(out, torch.tensor(expected), c)


@pytest.mark.parametrize("mode", ["nearest_even", "down"])
@pytest.mark.parametrize("bits", [20, 60])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_signs_of_sums_of_zeros(group, bits, mode):
    """A group of -0 alone is -0, and so is a sum of these; rounded down all that cancels is."""
    path = Datapath(block=6, group=group, fraction_bits=bits, signed_zero=True, rounding=Rounding(mode=mode))
    spec = GemmSpec(datapath=path, plan=CHAIN, a=get_format("bf16"), b=get_format("bf16"))
    generator = torch.Generator().manual_seed(1)
    few = torch.tensor([-0.0, -0.0, -0.0, 0.0, -1.0, 1.0])
    a = few[torch.randint(0, 6, (40, 8), generator=generator)]
    a[:6] = -0.0
    b = torch.stack([torch.ones(8), torch.tensor([0.0, 1, 1, 1, 1, 1, -1, -0.0])])
    for c in (None, torch.full((40, 2), -0.0), torch.zeros(40, 2)):
        expected = gemm_oracle(a.tolist(), b.tolist(), spec, c=None if c is None else c.tolist())
        assert_same_bits(product(path, a.bfloat16(), b.bfloat16(), c=c), torch.tensor(expected), a.sum(1))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_groups_are_summed_before_terms_are_cut(group):
    path, fmt = Datapath(block=6, group=group, fraction_bits=2), get_format("e2m1")
    spec = GemmSpec(datapath=path, plan=CHAIN, a=fmt, b=fmt)
    assert AlignedUnit.fits(path, fmt, fmt, 6)
    generator = torch.Generator().manual_seed(2)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1.5, -6])
    a, b = (values[torch.randint(0, 11, (rows, 14), generator=generator)] for rows in (9, 7))
    expected = torch.tensor(gemm_oracle(a.tolist(), b.tolist(), spec))
    assert_same_bits(product(path, a, b, "e2m1"), expected)


def test_two_stage_units_that_float64_does_not_hold():
    def unit(name="bf16", **fields):
        fmt = get_format(name) if isinstance(name, str) else name
        return unit_of(GemmSpec(datapath=TwoStageDatapath(block=4, **fields), plan=CHAIN, a=fmt, b=fmt), 4)

    wide = [FloatFormat(name="w", exponent_bits=8, mantissa_bits=bits) for bits in (25, 26)]
    assert all((unit(fraction_bits=46), unit(sum_bits=46), unit(wide[0])))
    for fields in ({"fraction_bits": 47}, {"sum_bits": 47}, {"name": wide[1]}, {"name": "fp64"}):
        with pytest.raises(ArgumentError, match="^a two-stage unit of .* bits with .* does not fit in float64; choose"):
            unit(**fields)


# Rounding of running sums.

SUMS = [
    *map(get_format, ("e4m3", "e5m2", "fp16", "e2m3", "tf32", "fp32", "fp64", "e5m2fnuz")),
    FloatFormat(name="far", exponent_bits=11, mantissa_bits=5),
    FloatFormat(name="high", exponent_bits=8, mantissa_bits=3, bias=-700),
    FloatFormat(name="wide", exponent_bits=5, mantissa_bits=50),
]


def rounded_sum(x, fmt, how, word):
    """Return what a sum becomes: where there is Inf, all that is rounded above the largest value."""
    if not math.isfinite(x) or not fmt.infinities or abs(x) <= fmt.max:
        return x if not math.isfinite(x) else oracle.round_value(x, fmt, how, fmt.default_overflow, word)
    last = Fraction(2) ** (max(oracle.floor_log2(abs(Fraction(x))), fmt.max_exponent) - fmt.mantissa_bits)
    beyond = abs(oracle.round_to_integer(Fraction(x) / last, how, word)) * last > fmt.max
    return math.copysign(math.inf if beyond else fmt.max, x)


@pytest.mark.parametrize("how", ROUNDINGS, ids=str)
@pytest.mark.parametrize("fmt", SUMS, ids=lambda fmt: fmt.name)
def test_running_sums_are_rounded_by_the_table(fmt, how):
    x = [*adversarial(fmt)[:: 1 if fmt.bits <= 8 else 7], math.inf, -math.inf, fmt.max, -fmt.max, fmt.min_subnormal / 3]
    words = words_for(how, len(x))
    drawn = [None] * len(x) if words is None else words.tolist()
    expected = [rounded_sum(v, fmt, how, w) for v, w in zip(x, drawn, strict=True)]
    got = round_value(torch.tensor(x, dtype=torch.float64), fmt, how, words)
    expected = torch.tensor(expected, dtype=torch.float64)
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert_same_bits(got[~nan], torch.copysign(expected, torch.tensor(x, dtype=torch.float64))[~nan])


@pytest.mark.parametrize("mode", ["nearest_even", "toward_zero", "up", "down", "to_odd"])
@pytest.mark.parametrize("fmt", SUMS, ids=lambda fmt: fmt.name)
def test_significands_become_values_or_overflow(fmt, mode):
    one, how = 1 << fmt.mantissa_bits, Rounding(mode=mode)
    ends = {fmt.min_exponent, fmt.min_exponent + 1, fmt.max_exponent - 1, fmt.max_exponent, fmt.max_exponent + 1}
    cases = [(n, e, minus) for e in sorted(ends) for n in (0, 1, one, one + 1, 2 * one - 2, 2 * one - 1, 2 * one)
             for minus in (False, True) if n >= one or e == fmt.min_exponent]  # fmt: skip
    whole, exponent, negative = (torch.tensor(column) for column in zip(*cases, strict=True))
    got = assembled(whole, exponent, negative, fmt, how)
    for (n, e, minus), found in zip(cases, got.tolist(), strict=True):
        exact = n * Fraction(2) ** (e - fmt.mantissa_bits) * (-1 if minus else 1)
        above = abs(exact) > fmt.max
        expected = float(exact) if not above else math.inf * (-1 if minus else 1) if fmt.infinities else None
        if expected is None:
            expected = oracle.round_value(exact, fmt, how, fmt.default_overflow)
        assert found == expected or (math.isnan(found) and math.isnan(expected)), (n, e, minus)
        assert n or math.copysign(1, found) == (-1 if minus else 1)


def test_sums_of_integers_beyond_float32():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(100, 128, (3, 4001), generator=generator).to(torch.int8) for _ in "ab")
    exact = (a.long()[:, None] * b.long()).sum(-1)
    assert exact.min() > 1 << 24 and torch.equal(integer_sums(a, b), exact)
    assert torch.equal(integer_sums(a[:, :0], b[:, :0]), torch.zeros(3, 3, dtype=torch.int64))


def test_infinities_where_a_mode_would_stop_at_the_largest_value():
    """Numbers whose rounding without a largest exponent lies above the largest value become Inf in every mode."""
    x = torch.tensor(
        [57344.0, 61439.0, 61440.0, 65535.0, 65536.0, 1e6, 2.0**1023, -65536.0, -1e300], dtype=torch.float64
    )
    top, inf = 57344.0, math.inf
    expected = {
        "toward_zero": [top, top, top, top, inf, inf, inf, -inf, -inf],
        "nearest_even": [top, top, inf, inf, inf, inf, inf, -inf, -inf],
        "up": [top, inf, inf, inf, inf, inf, inf, -inf, -inf],
    }
    for mode, values in expected.items():
        assert _convert(x, get_format("e5m2"), Rounding(mode=mode), None).tolist() == values, mode
