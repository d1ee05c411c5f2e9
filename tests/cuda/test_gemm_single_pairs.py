"""Fused units in pairs of float32 sums: the kernels against the CPU engine and the oracle, bit for bit."""

import dataclasses
import importlib

import pytest
import torch

import fmtsim.cuda
from fmtsim.cuda.gemm import single as gemm_single
from fmtsim.cuda.gemm import single_pairs as gemm_single_pairs
from fmtsim.cuda.gemm.job import TILE
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.oracle import gemm_oracle
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from tests.cuda.emulator import emulated as pretend
from tests.cuda.singles import expected, job_of, product
from tests.support.bits import assert_same_bits, same_bits

door = importlib.import_module("fmtsim.cuda.gemm.engine")

HOPPER = Datapath(block=16, fraction_bits=25, min_exponent=-133)
AMPERE = Datapath(block=8, fraction_bits=24, min_exponent=-132)
UNITS = {"hopper": HOPPER, "ampere": AMPERE}


@pytest.fixture
def ada():
    """Run kernels on the host as a card without fp64 tensor cores."""
    with pretend((8, 9)):
        yield


def spec_of(name, unit=HOPPER, plan=None):
    return GemmSpec(datapath=unit, plan=plan or GemmPlan(), a=get_format(name), b=get_format(name))


def operand(rows, k, name, kind, g):
    """Return operands: ``normal`` numbers, ``wide`` exponents, ``tiny`` ones around fp16's subnormals, ``sparse``."""
    x = torch.randn(rows, k, generator=g)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-12, 10, x.shape, generator=g).float())
    if kind == "tiny":
        x *= 2.0**-16
    if kind == "sparse":
        x[torch.rand(rows, k, generator=g) < 0.9] = 0
    if name == "tf32":
        return (x.view(torch.int32) & -8192).view(torch.float32)
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[name])


def problem(m, n, k, name, kind="wide", seed=0):
    g = torch.Generator().manual_seed(seed)
    return operand(m, k, name, kind, g), operand(n, k, name, kind, g)


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "sparse"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bits_have_the_bits_of_the_cpu_engine(ada, name, kind):
    spec, given = spec_of(name), problem(33, 17, 100, name, kind)
    sums, marks = product(*given, spec)
    assert not marks.any()
    assert_same_bits(sums[0], expected(*given, spec))


@pytest.mark.parametrize(("name", "unit"), [("tf32", dataclasses.replace(HOPPER, block=8)), ("fp16", AMPERE)])
def test_shorter_blocks(ada, name, unit):
    spec, given = spec_of(name, unit), problem(20, 24, 70, name, seed=1)
    assert_same_bits(product(*given, spec)[0][0], expected(*given, spec))


def test_other_accumulators(ada):
    unit = dataclasses.replace(HOPPER, accumulator="bf16", fraction_bits=20, block=20)
    spec, given = spec_of("bf16", unit), problem(20, 24, 70, "bf16", seed=2)
    assert_same_bits(product(*given, spec)[0][0], expected(*given, spec))


def test_several_panels_in_any_order_of_threads():
    spec, given = spec_of("fp16"), problem(140, 131, 32, "fp16", seed=3)
    with pretend((12, 0), reversed_order=True):
        sums, marks = product(*given, spec)
    assert marks.shape == (2, 2)
    assert_same_bits(sums[0], expected(*given, spec))


def test_bits_of_the_oracle(ada):
    spec, (a, b) = spec_of("fp16"), problem(3, 2, 50, "fp16", seed=4)
    want = gemm_oracle(a.float().tolist(), b.float().tolist(), spec)
    assert product(a, b, spec)[0][0].tolist() == want


def test_numbers_just_below_a_multiple_of_the_grid(ada):
    """-(1 - 2^-22) u, in 22 bits, is cut to nothing: its rest needs all bits of the low sum."""
    a, b = torch.zeros(4, 16), torch.zeros(4, 16)
    a[:, 0], b[:, 0] = 1, 1
    a[:, 1], b[:, 1] = (2 - 2.0**-10) * 2.0**-13, -(2 - 2.0**-10) * 2.0**-13
    a[:, 2], b[:, 2] = 2.0**-12, -(2.0**-13)
    a[:, 3], b[:, 3] = 2.0**-12, -(2.0**-14)
    spec = spec_of("fp16")
    a, b = a.half(), b.half()
    assert_same_bits(product(a, b, spec)[0][0], expected(a, b, spec))


def test_chains_are_promoted_and_parts_kept_apart(ada):
    a, b = problem(20, 24, 256, "bf16", seed=5)
    promoted = spec_of("bf16", plan=GemmPlan(promote_every=64))
    assert_same_bits(product(a, b, promoted)[0][0], expected(a, b, promoted))
    sums, _ = product(a, b, spec_of("bf16", plan=GemmPlan(k_tile=64, split=2)))
    halves = [expected(a[:, s], b[:, s], spec_of("bf16")) for s in (slice(0, 128), slice(128, 256))]
    assert len(sums) == 2
    assert all(map(same_bits, sums, halves))


def test_far_numbers_leave_their_tiles_to_the_general_path(ada):
    a, b = problem(140, 131, 32, "bf16", "normal", seed=6)
    a[133, 4], b[2, 7] = float("nan"), 2.0**-100
    spec = spec_of("bf16")
    sums, marks = product(a, b, spec)
    want = expected(a, b, spec)
    assert marks.tolist() == [[1, 0], [1, 1]]
    assert_same_bits(sums[0][:128, 128:], want[:128, 128:])
    assert (sums[0][128:] == 7).all()
    out = torch.empty(140, 131)
    door.gemm(a, b, None, None, None, spec, None, out)
    assert_same_bits(out, want)


@pytest.mark.parametrize("change", [{"fraction": 24}, {"head": 1}, {"kept": 20}])
def test_a_constant_that_is_wrong_is_seen(ada, monkeypatch, change):
    whole = gemm_single_pairs._shape
    monkeypatch.setattr(gemm_single_pairs, "_shape", lambda *args: dataclasses.replace(whole(*args), **change))
    spec, given = spec_of("fp16"), problem(20, 24, 96, "fp16", seed=7)
    assert not same_bits(product(*given, spec)[0][0], expected(*given, spec))


@pytest.mark.parametrize(
    "change",
    [
        {"fraction_bits": 10}, {"fraction_bits": 28}, {"fraction_bits": None}, {"term_rounding": "nearest_even"},
        {"rounding": "nearest_even"}, {"signed_zero": True}, {"block": 64}, {"accumulator": "fp16"},
        {"min_exponent": -20},
    ],
)  # fmt: skip
def test_other_units_are_left_alone(ada, change):
    spec = spec_of("bf16", dataclasses.replace(HOPPER, **change))
    assert not gemm_single.supports(job_of(*problem(4, 4, 128, "bf16"), spec))


def test_variants_are_told_apart():
    listed = list(gemm_single_pairs.variants())
    assert {name for _, name, _ in listed} == {"single_pairs", "single_pairs_prepare"}
    assert set(listed) <= set(gemm_single.variants())


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
@pytest.mark.parametrize("unit", ["hopper", "ampere"])
@pytest.mark.parametrize("kind", ["normal", "wide", "sparse"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 260, 1000), (1, 5, 16)])
def test_bits_on_the_gpu(unit, kind, name, m, n, k):
    spec, (a, b) = spec_of(name, UNITS[unit]), problem(m, n, k, name, kind, seed=8)
    job = job_of(a.cuda(), b.cuda(), spec)
    marks = torch.zeros(-(-m // TILE), -(-n // TILE), dtype=torch.uint8, device="cuda")
    gemm_single_pairs.run(job, job.out.unsqueeze(0), marks)
    assert not marks.any()
    assert_same_bits(job.out.cpu(), expected(a, b, spec))
