"""The torch engine's matrix products: bits of the oracle, of IEEE arithmetic, and of themselves on other tiles."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.oracle import gemm_oracle
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath, IntegerDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.torch_engine import gemm
from fmtsim.torch_engine.gemm_blocks import AlignedUnit, FusedAddUnit
from fmtsim.torch_engine.gemm_sums import unit_of
from fmtsim.torch_engine.gemm_wide import WideUnit
from tests.support.bits import assert_same_bits, same_bits
from tests.support.gemm_cases import BITS, KINDS, NAN, ODD_ACCUMULATORS, Case, case, engine_bits, matrix, oracle_bits

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


def check(found: Case) -> None:
    expected = oracle_bits(found)
    if expected is None:  # the oracle refuses scales that a tile cuts in two
        return
    got = engine_bits(found)
    assert torch.equal(got, expected), (found, got, expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(r=st.randoms(use_true_random=False))
def test_bits_of_the_oracle(kind, r):
    check(case(r, kind))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(r=st.randoms(use_true_random=False), kind=st.sampled_from(KINDS))
def test_nan_and_inf_everywhere(r, kind):
    check(case(r, kind, special=0.08))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(r=st.randoms(use_true_random=False), kind=st.sampled_from(KINDS[:5]))
def test_accumulators_that_lack_something(r, kind):
    check(case(r, kind, ODD_ACCUMULATORS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_many_bits_of_the_oracle(kind, seed):
    r = random.Random(f"{kind} {seed}")
    for _ in range(300):
        check(case(r, kind, special=r.choice([0.0, 0.02])))


def test_the_comparison_sees_one_wrong_bit():
    found = case(random.Random(4), "fused")
    expected = oracle_bits(found)
    assert torch.equal(engine_bits(found), expected)
    expected[0, 0] ^= 1
    assert not torch.equal(engine_bits(found), expected)


@pytest.mark.parametrize(
    "change", [{"fraction_bits": 24}, {"block": 8}, {"term_rounding": "down"}, {"min_exponent": 2}]
)
def test_another_unit_gives_other_bits(change):
    r = random.Random(5)
    a, b = (torch.tensor([[r.gauss(0, 1) for _ in range(64)] for _ in range(8)]).bfloat16() for _ in range(2))
    assert not same_bits(product(Datapath(), a, b), product(replace(Datapath(), **change), a, b))


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


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).view(256, 1)


@pytest.mark.parametrize("a", ["e4m3", "e5m2"])
@pytest.mark.parametrize("b", ["e4m3", "e5m2"])
def test_all_products_of_fp8_codes(a, b):
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    left, right = all_codes(dtypes[a]), all_codes(dtypes[b])
    exact = left.double() * right.double().t()
    expected = torch.where(torch.isnan(exact), NAN[torch.float32], (exact.float() + 0.0).view(torch.int32)).int()
    for path in (Datapath(block=32), EXACT, Datapath(block=16, operand=get_format("fp16"), paired=True)):
        assert torch.equal(product(path, left, right, a, b).view(torch.int32), expected)


def test_exact_chains_are_ieee_arithmetic():
    """Products with one make every step an addition, which torch does in float32 and float64 itself."""
    r = random.Random(11)
    for dtype, path, name in ((torch.float32, FMA, "fp32"), (torch.float64, FMA64, "fp64")):
        a = matrix(r, 300, 12, get_format(name), 0.02, dtype)
        expected = torch.zeros(300, 1, dtype=dtype)
        for k in range(12):
            expected = expected + a[:, k : k + 1]
        got = product(path, a, torch.ones(1, 12, dtype=dtype), name, dtype=dtype)
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(got), nan)
        assert_same_bits(torch.where(nan, 0.0, got), torch.where(nan, 0.0, expected))


def test_single_float64_products_are_ieee_products():
    a, b = (matrix(random.Random(seed), 60, 1, get_format("fp64"), 0.02, torch.float64) for seed in (1, 2))
    c = torch.full((60, 60), -0.0, dtype=torch.float64)
    got, expected = product(FMA64, a, b, "fp64", c=c, dtype=torch.float64), a * b.t()
    nan = torch.isnan(expected)
    assert bool((got.view(torch.int64)[nan] == NAN[torch.float64]).all())
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
    r = random.Random(7)
    a, b = (matrix(r, rows, 40, get_format("bf16"), 0.001, torch.bfloat16) for rows in (9, 13))
    plan = GemmPlan(k_tile=16, split=2)
    key = RandomKey(123456789, 1 << 40)
    whole = product(path, a, b, plan=plan, key=key)
    monkeypatch.setattr(module, "_budget", lambda device: budget)
    assert_same_bits(product(path, a, b, plan=plan, key=key), whole)


def test_long_blocks_are_taken_in_pieces():
    r = random.Random(9)
    a, b = (matrix(r, 2, 300, get_format("fp16"), 0.0, torch.float16) for _ in range(2))
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


def test_strides_do_not_matter():
    r = random.Random(13)
    a, b = (matrix(r, 6, 32, get_format("e4m3"), 0.0, torch.float8_e4m3fn) for _ in range(2))
    whole = product(Datapath(), a, b, "e4m3")
    assert_same_bits(product(Datapath(), a.t().contiguous().t(), b.t().contiguous().t(), "e4m3"), whole)
    paired = Datapath(block=4, paired=True, operand=get_format("fp16"))
    turned = torch.stack([a, a]).transpose(0, 2)[:, :, 1].t()
    assert_same_bits(product(paired, turned, b, "e4m3"), product(paired, a, b, "e4m3"))


def test_no_products():
    a, b = torch.empty(2, 0).bfloat16(), torch.empty(3, 0).bfloat16()
    assert product(Datapath(), a, b).view(torch.int32).tolist() == [[0] * 3] * 2
    c = torch.tensor([[1.5, -0.0, float("nan")]] * 2)
    assert product(Datapath(), a, b, c=c).view(torch.int32).tolist() == [[0x3FC00000, -(2**31), 0x7FFFFFFF]] * 2
    none = torch.empty(0, 16).bfloat16()
    assert product(Datapath(), none, none).shape == (0, 0)


def test_nan_has_one_pattern():
    for dtype, path, name in ((torch.float32, Datapath(), "bf16"), (torch.float64, FMA64, "fp64")):
        a = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0]]).to(torch.bfloat16 if name == "bf16" else dtype)
        b = torch.tensor([[-1.0, 1.0], [0.0, 1.0]]).to(a.dtype)
        got = product(path, a, b, name, dtype=dtype).view(BITS[dtype])
        assert [got[0, 0].item(), got[0, 1].item(), got[1, 1].item()] == [NAN[dtype]] * 3


def test_flushing_processes_get_the_same_bits():
    r = random.Random(17)
    a, b = (matrix(r, 5, 32, get_format("bf16"), 0.0, torch.bfloat16) * 2.0**-70 for _ in range(2))
    kept = [product(path, a, b) for path in (Datapath(min_exponent=-133), EXACT, FMA)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        flushed = [product(path, a, b) for path in (Datapath(min_exponent=-133), EXACT, FMA)]
    finally:
        torch.set_flush_denormal(False)
    assert all(same_bits(x, y) for x, y in zip(kept, flushed, strict=True))


def int8(r: random.Random, rows: int, k: int) -> torch.Tensor:
    return torch.tensor([[r.randint(-128, 127) for _ in range(k)] for _ in range(rows)], dtype=torch.int8)


@pytest.mark.parametrize("saturate", [False, True])
def test_integer_units(saturate):
    r = random.Random(19)
    path, plan = IntegerDatapath(saturate=saturate, block=4), GemmPlan()
    for k in (0, 1, 7, 40):
        a, b = int8(r, 3, k), int8(r, 4, k)
        c = torch.tensor([[r.choice([0, 2**31 - 9000, -(2**31) + 9000]) for _ in range(4)] for _ in range(3)]).int()
        spec = GemmSpec(datapath=path, plan=plan, a=get_format("int8_full"), b=get_format("int8_full"))
        expected = c if k == 0 else torch.tensor(gemm_oracle(a.tolist(), b.tolist(), spec, c=c.tolist()))
        assert torch.equal(product(path, a, b, "int8_full", c=c, dtype=torch.int32), expected.int())


def test_a_two_stage_unit_that_does_not_fit():
    a = torch.ones(1, 8, dtype=torch.float64)
    with pytest.raises(
        ArgumentError, match="24 and 31 bits with fp64 x fp64 does not fit in float64; choose fewer bits"
    ):
        product(TwoStageDatapath(block=8), a, a, "fp64")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_gives_the_same_bits(kind):
    r = random.Random(f"cuda {kind}")
    for _ in range(60):
        found = case(r, kind, special=r.choice([0.0, 0.02]))
        assert torch.equal(engine_bits(found, "cuda"), engine_bits(found)), found
