"""Fused units in float32: the kernels against the CPU engine and the oracle, bit for bit."""

import dataclasses
import importlib

import pytest
import torch

import fmtsim.cuda
from fmtsim.cuda.gemm import single as gemm_single
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.oracle import gemm_oracle
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from tests.cuda.emulator import emulated as pretend
from tests.cuda.singles import expected, job_of, product
from tests.support.bits import assert_same_bits, same_bits

door = importlib.import_module("fmtsim.cuda.gemm.engine")

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E8M13 = FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13)
HOPPER = Datapath(block=32, fraction_bits=13, accumulator=E8M13)
ADA = Datapath(block=16, fraction_bits=13, accumulator=E8M13)


@pytest.fixture
def ada():
    """Run kernels on the host as a card without fp64 tensor cores."""
    with pretend((8, 9)):
        yield


def spec_of(unit=HOPPER, a="e4m3", b="e4m3", plan=None):
    return GemmSpec(datapath=unit, plan=plan or GemmPlan(), a=get_format(a), b=get_format(b))


def operand(rows, k, name, kind, g):
    """Return operands: ``normal`` numbers, any finite ``codes``, ``tiny`` ones around the subnormals, ``sparse``."""
    if kind == "codes":
        codes = torch.randint(0, 256, (rows, k), generator=g).to(torch.uint8)
        codes[(codes & 127) >= (127 if name == "e4m3" else 124)] = 0x80
        return codes.view(DTYPES[name])
    x = torch.randn(rows, k, generator=g)
    if kind == "tiny":
        x *= 2.0 ** (-8 if name == "e4m3" else -15)
    if kind == "sparse":
        x[torch.rand(rows, k, generator=g) < 0.9] = 0
    return x.to(DTYPES[name])


def problem(m, n, k, kind="codes", a="e4m3", b="e4m3", seed=0):
    g = torch.Generator().manual_seed(seed)
    return operand(m, k, a, kind, g), operand(n, k, b, kind, g)


@pytest.mark.parametrize("kind", ["normal", "codes", "tiny", "sparse"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (33, 17, 200), (20, 40, 7)])
def test_e4m3_has_the_bits_of_the_cpu_engine(ada, m, n, k, kind):
    spec, given = spec_of(), problem(m, n, k, kind)
    sums, marks = product(*given, spec)
    assert not marks.any()
    assert_same_bits(sums[0], expected(*given, spec))


@pytest.mark.parametrize("kind", ["codes", "tiny"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_pairs_of_formats(ada, a, b, kind):
    spec, given = spec_of(a=a, b=b), problem(33, 17, 200, kind, a, b, seed=1)
    assert_same_bits(product(*given, spec)[0][0], expected(*given, spec))


def test_several_panels_and_the_last_columns(ada):
    spec, given = spec_of(), problem(140, 131, 64, seed=2)
    sums, marks = product(*given, spec)
    assert marks.shape == (2, 2)
    assert_same_bits(sums[0], expected(*given, spec))


def test_bits_of_the_oracle(ada):
    spec, (a, b) = spec_of(), problem(3, 2, 70, seed=3)
    want = gemm_oracle(a.float().tolist(), b.float().tolist(), spec)
    assert product(a, b, spec)[0][0].tolist() == want


@pytest.mark.parametrize(
    "unit",
    [
        ADA,
        Datapath(block=5, fraction_bits=10, accumulator=E8M13),
        Datapath(block=40, fraction_bits=9, accumulator=FloatFormat(name="e8m7", exponent_bits=8, mantissa_bits=7)),
        Datapath(block=32, fraction_bits=13),
    ],
)
def test_other_units(emulated, unit):
    spec, given = spec_of(unit), problem(20, 24, 100, seed=4)
    assert_same_bits(product(*given, spec)[0][0], expected(*given, spec))


def test_threads_in_any_order():
    spec, given = spec_of(), problem(20, 40, 200, seed=5)
    with pretend((12, 0), reversed_order=True):
        sums, _ = product(*given, spec)
    assert_same_bits(sums[0], expected(*given, spec))


def test_chains_are_promoted_and_parts_kept_apart(ada):
    a, b = problem(20, 24, 512, "normal", seed=6)
    promoted = spec_of(plan=GemmPlan(promote_every=128))
    assert_same_bits(product(a, b, promoted)[0][0], expected(a, b, promoted))
    sums, _ = product(a, b, spec_of(plan=GemmPlan(k_tile=128, split=2)))
    halves = [expected(a[:, s], b[:, s], spec_of()) for s in (slice(0, 256), slice(256, 512))]
    assert len(sums) == 2
    assert all(map(same_bits, sums, halves))


def test_operands_of_any_dtype_and_stride_and_a_ragged_first_tile(ada):
    a, b = problem(18, 9, 100, seed=7)
    wide = torch.zeros(100, 36, dtype=torch.bfloat16)
    wide[:, ::2] = a.t().bfloat16()
    spec = spec_of(plan=GemmPlan(k_tile=64, residue_first=True))
    assert_same_bits(product(wide.t()[::2], b.float(), spec)[0][0], expected(a, b, spec))


def test_zeros_of_both_signs(ada):
    a, b = problem(16, 16, 64, seed=8)
    a = a.float()
    a[:, ::3], a[3], b = 0, -0.0, b.float()
    b[:, 1::3] = -0.0
    b[4] = -0.0
    spec = spec_of()
    assert_same_bits(product(a, b, spec)[0][0], expected(a, b, spec))


def test_nan_and_inf_leave_their_tiles_to_the_general_path(ada):
    a, b = problem(140, 131, 32, "normal", "e4m3", "e5m2", seed=9)
    a, b = a.float(), b.float()
    a[133, 4], b[2, 7] = float("nan"), float("inf")
    spec = spec_of(b="e5m2")
    sums, marks = product(a, b, spec)
    want = expected(a, b, spec)
    assert marks.tolist() == [[1, 0], [1, 1]]
    assert_same_bits(sums[0][:128, 128:], want[:128, 128:])
    assert (sums[0][128:] == 7).all()
    out = torch.empty(140, 131)
    door.gemm(a, b, None, None, None, spec, None, out)
    assert_same_bits(out, want)


@pytest.mark.parametrize("change", [{"enlarged": 8}, {"fraction": 12}, {"kept": 12}, {"step": 4, "chain": 15}])
def test_a_constant_that_is_wrong_is_seen(ada, monkeypatch, change):
    whole = gemm_single._shape
    monkeypatch.setattr(gemm_single, "_shape", lambda *args: dataclasses.replace(whole(*args), **change))
    spec, given = spec_of(), problem(20, 24, 96, seed=10)
    assert not same_bits(product(*given, spec)[0][0], expected(*given, spec))


@pytest.mark.parametrize(
    "change",
    [
        {"fraction_bits": 25}, {"fraction_bits": None}, {"group": 16, "scale": "ue4m3", "scale_block": 16},
        {"term_rounding": "down"}, {"rounding": "nearest_even"}, {"signed_zero": True}, {"block": 128},
        {"accumulator": "fp16"}, {"min_exponent": 0},
    ],
)  # fmt: skip
def test_other_units_are_left_alone(ada, change):
    spec = spec_of(dataclasses.replace(HOPPER, **change))
    assert not gemm_single.supports(job_of(*problem(4, 4, 256), spec))


def test_blocks_that_leave_shared_memory_are_left_alone(ada):
    spec = spec_of(Datapath(block=40, fraction_bits=9, accumulator=E8M13))
    assert not gemm_single.supports(job_of(*problem(4, 4, 256), spec))


def test_wide_operands_are_left_alone(ada):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert not gemm_single.supports(job_of(x, x, spec_of(a="bf16", b="bf16")))


def test_variants_are_told_apart():
    listed = list(gemm_single.variants())
    assert len(set(listed)) > 40
    assert {name for _, name, _ in listed} == {"single", "single_prepare", "single_pairs", "single_pairs_prepare"}


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
@pytest.mark.parametrize("unit", [HOPPER, ADA], ids=["hopper", "ada"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("kind", ["normal", "codes", "tiny"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 260, 1000), (128, 1024, 4096), (1, 5, 16)])
def test_bits_on_the_gpu(unit, a, b, kind, m, n, k):
    spec, given = spec_of(unit, a, b), problem(m, n, k, kind, a, b, seed=11)
    sums, marks = product(*given, spec, device="cuda")
    assert not marks.any()
    assert_same_bits(sums[0], expected(*given, spec))
