"""Units that add groups of products exactly: the kernels against the CPU engine and the oracle, bit for bit."""

import dataclasses
import importlib

import pytest
import torch

import fmtsim.cuda
from fmtsim.cpu.gemm.engine import gemm as cpu_gemm
from fmtsim.cuda.gemm import groups as gemm_groups
from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.order import order_of
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.oracle import gemm_oracle
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from tests.cuda.emulator import emulated as pretend
from tests.support.bits import assert_same_bits, same_bits

door = importlib.import_module("fmtsim.cuda.gemm.engine")

E2M1 = get_format("e2m1")
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NVF4 = Datapath(block=64, fraction_bits=35, group=16, scale="ue4m3", scale_block=16)
MXF4 = Datapath(block=64, fraction_bits=35, group=16, scale="e8m0", scale_block=32)


def spec_of(unit=NVF4, plan=None):
    return GemmSpec(datapath=unit, plan=plan or GemmPlan(), a=E2M1, b=E2M1)


def operand(rows, k, unit, kind, g):
    """Return values and scales: ``narrow`` ones lie within two octaves, ``wide`` ones take any code."""
    x = VALUES[torch.randint(0, 16, (rows, k), generator=g)]
    shape = rows, -(-k // unit.scale_block)
    if unit.scale.name == "ue4m3":
        codes = torch.randint(*((0, 127) if kind == "wide" else (52, 68)), shape, generator=g)
        return x, codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    powers = torch.randint(*((-40, 40) if kind == "wide" else (-1, 2)), shape, generator=g)
    return x, torch.ldexp(torch.ones(shape), powers)


def problem(m, n, k, unit=NVF4, kind="narrow", seed=0):
    g = torch.Generator().manual_seed(seed)
    return *operand(m, k, unit, kind, g), *operand(n, k, unit, kind, g)


def expected(a, scale_a, b, scale_b, spec):
    out = torch.empty(a.shape[0], b.shape[0])
    cpu_gemm(a.float(), b.float(), None, scale_a, scale_b, spec, None, out)
    return out


def product(a, scale_a, b, scale_b, spec, device="cpu"):
    """Return the sums of the kernels alone, 7 where they leave a tile, and the marks."""
    a, b = a.to(device), b.to(device)
    scale_a, scale_b = (None if s is None else s.to(device) for s in (scale_a, scale_b))
    out = torch.full((a.shape[0], b.shape[0]), 7.0, device=device)
    job = Job(
        a=a, b=b, c=None, scale_a=scale_a, scale_b=scale_b, spec=spec, random=None, out=out,
        order=order_of(a.shape[1], spec, a.device),
    )  # fmt: skip
    assert gemm_groups.supports(job)
    parts = len(job.order.parts)
    sums = torch.full((parts, *out.shape), 7.0, device=device)
    marks = torch.zeros(-(-out.shape[0] // TILE), -(-out.shape[1] // TILE), dtype=torch.uint8, device=device)
    gemm_groups.run(job, sums, marks)
    return sums.cpu(), marks.cpu()


@pytest.mark.parametrize("kind", ["narrow", "wide"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 64), (33, 17, 256), (40, 24, 328)])
def test_nvf4_has_the_bits_of_the_cpu_engine(emulated, m, n, k, kind):
    spec, given = spec_of(), problem(m, n, k, NVF4, kind)
    sums, marks = product(*given, spec)
    assert not marks.any()
    assert_same_bits(sums[0], expected(*given, spec))


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_mxf4_has_the_bits_of_the_cpu_engine(emulated, kind):
    spec, given = spec_of(MXF4), problem(140, 20, 192, MXF4, kind, seed=1)
    sums, marks = product(*given, spec)
    assert not marks.any()
    assert_same_bits(sums[0], expected(*given, spec))


def test_bits_of_the_oracle(emulated):
    spec, (a, scale_a, b, scale_b) = spec_of(), problem(3, 2, 160, NVF4, "wide", seed=2)
    sums, _ = product(a, scale_a, b, scale_b, spec)
    want = gemm_oracle(a.tolist(), b.tolist(), spec, scale_a=scale_a.tolist(), scale_b=scale_b.tolist())
    assert sums[0].tolist() == want


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_other_cards_and_threads_in_any_order(capability):
    spec, given = spec_of(), problem(20, 40, 200, NVF4, "wide", seed=3)
    with pretend(capability, reversed_order=True):
        sums, _ = product(*given, spec)
    assert_same_bits(sums[0], expected(*given, spec))


def test_chains_are_promoted_and_parts_kept_apart(emulated):
    given = problem(20, 24, 512, seed=4)
    promoted = spec_of(plan=GemmPlan(promote_every=128))
    assert_same_bits(product(*given, promoted)[0][0], expected(*given, promoted))
    split = spec_of(plan=GemmPlan(k_tile=128, split=2))
    sums, _ = product(*given, split)
    halves = [(given[0][:, s], given[1][:, t], given[2][:, s], given[3][:, t]) for s, t in HALVES]
    assert len(sums) == 2
    assert all(same_bits(part, expected(*half, spec_of())) for part, half in zip(sums, halves, strict=True))


HALVES = [(slice(0, 256), slice(0, 16)), (slice(256, 512), slice(16, 32))]


def test_operands_of_any_dtype_and_stride_and_no_scales(emulated):
    a, scale_a, b, scale_b = problem(18, 9, 96, seed=5)
    wide = torch.zeros(96, 36, dtype=torch.bfloat16)
    wide[:, ::2] = a.t().bfloat16()
    scales = scale_a.t().contiguous().t()
    spec = spec_of()
    sums, _ = product(wide.t()[::2], scales, b.half(), scale_b, spec)
    assert_same_bits(sums[0], expected(a, scale_a, b, scale_b, spec))
    ones = torch.ones_like(scale_a)
    sums, _ = product(a, None, b.to(torch.float8_e4m3fn), scale_b, spec)
    assert_same_bits(sums[0], expected(a, ones, b, scale_b, spec))


def test_zero_scales_zero_rows_and_zero_sums(emulated):
    a, scale_a, b, scale_b = problem(20, 12, 192, seed=6)
    a[3], scale_a[4], scale_a[5, 1] = 0, 0, 0
    a[6, :64] = 0
    a[7], b[1] = 1, torch.tensor([1.0, -1]).repeat(96)
    scale_b[1], scale_a[7] = 1, 1
    spec = spec_of()
    sums, marks = product(a, scale_a, b, scale_b, spec)
    assert not marks.any()
    assert_same_bits(sums[0], expected(a, scale_a, b, scale_b, spec))
    assert sums[0][7, 1] == 0
    assert not torch.signbit(sums[0][7, 1])


def test_blocks_of_zeros_may_have_the_smallest_scale(emulated):
    a, scale_a, b, scale_b = problem(20, 12, 192, MXF4, seed=7)
    a[3], scale_a[3] = 0, 2.0**-127
    b[5, 32:64], scale_b[5, 1] = 0, 2.0**-127
    spec = spec_of(MXF4)
    sums, marks = product(a, scale_a, b, scale_b, spec)
    assert not marks.any()
    assert_same_bits(sums[0], expected(a, scale_a, b, scale_b, spec))


def test_nan_and_far_scales_leave_their_tiles_to_the_general_path(emulated):
    a, scale_a, b, scale_b = problem(140, 130, 64, MXF4, seed=8)
    scale_a[133, 1], scale_b[2, 0] = float("nan"), 2.0**90
    spec = spec_of(MXF4)
    sums, marks = product(a, scale_a, b, scale_b, spec)
    want = expected(a, scale_a, b, scale_b, spec)
    assert marks.tolist() == [[1, 0], [1, 1]]
    assert_same_bits(sums[0][:128, 128:], want[:128, 128:])
    assert (sums[0][128:] == 7).all()
    out = torch.empty(140, 130)
    door.gemm(a, b, None, scale_a, scale_b, spec, None, out)
    assert_same_bits(out, want)


@pytest.mark.parametrize(("spread", "kind"), [(-1, "narrow"), (-1, "wide")])
def test_the_way_group_by_group_alone(emulated, monkeypatch, spread, kind):
    whole = gemm_groups._shape
    monkeypatch.setattr(gemm_groups, "_shape", lambda *args: dataclasses.replace(whole(*args), spread=spread))
    spec, given = spec_of(), problem(20, 12, 256, NVF4, kind, seed=9)
    assert_same_bits(product(*given, spec)[0][0], expected(*given, spec))


@pytest.mark.parametrize(
    ("field", "value", "kind"), [("spread", 60, "wide"), ("room", 60, "wide"), ("eps", 20, "wide")]
)
def test_a_condition_that_is_too_weak_is_seen(emulated, monkeypatch, field, value, kind):
    whole = gemm_groups._shape
    wrong = {"spread": 60, "room": 60} if field != "eps" else {}
    monkeypatch.setattr(
        gemm_groups, "_shape", lambda *args: dataclasses.replace(whole(*args), **{**wrong, field: value})
    )
    spec, given = spec_of(), problem(20, 12, 256, NVF4, kind, seed=9)
    assert not same_bits(product(*given, spec)[0][0], expected(*given, spec))


@pytest.mark.parametrize(
    "change",
    [
        {"group": 1}, {"term_rounding": "down"}, {"rounding": "nearest_even"}, {"min_exponent": -133},
        {"signed_zero": True}, {"accumulator": "bf16"}, {"fraction_bits": None}, {"fraction_bits": 45},
        {"scale": "bf16"},
    ],
)  # fmt: skip
def test_other_units_are_left_alone(emulated, change):
    a, scale_a, b, scale_b = problem(4, 4, 64)
    spec = spec_of(dataclasses.replace(NVF4, **change))
    job = Job(
        a=a, b=b, c=None, scale_a=scale_a, scale_b=scale_b, spec=spec, random=None, out=torch.empty(4, 4),
        order=order_of(64, spec, a.device),
    )  # fmt: skip
    assert not gemm_groups.supports(job)


def test_variants_are_told_apart():
    listed = list(gemm_groups.variants())
    assert len(set(listed)) > 20
    assert {name for _, name, _ in listed} == {"groups", "groups_prepare"}


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["narrow", "wide"])
@pytest.mark.parametrize("unit", [NVF4, MXF4], ids=["nvf4", "mxf4"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 260, 1000), (128, 1024, 4096), (1, 5, 16)])
def test_bits_on_the_gpu(unit, kind, m, n, k):
    spec, given = spec_of(unit), problem(m, n, k, unit, kind, seed=10)
    sums, marks = product(*given, spec, device="cuda")
    assert not marks.any()
    assert_same_bits(sums[0], expected(*given, spec))
