# SPDX-License-Identifier: Apache-2.0
"""Every fast path of products alone, against the CPU engine and the oracle: units, numbers, layouts, planted errors."""

from dataclasses import replace

import pytest
import torch

from fmtsim import Datapath, GemmPlan
from fmtsim.cuda.gemm.engine import BLOCK_SCALED, FMA_CHAIN, FP64_FMA, FP64_MMA, variants
from fmtsim.cuda.gemm.job import promotion_of
from fmtsim.rounding.modes import RULES
from tests.cuda.cuda_cases import CASES, FMA, HALF, NVF4, PATHS, RARER, Case, custom
from tests.cuda.emulator import emulated as pretend
from tests.support import cuda_gemm, gemm_engine
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import DISPATCH, check, check_kinds, expected, job_of, product_of
from tests.support.gemm_engine import KINDS, addend, operand, unit_scales
from tests.support.gemm_oracle import sums as oracle

SHAPE = (5, 9, 45)


paths = pytest.mark.parametrize("case", PATHS.values(), ids=PATHS)


def operands(case: Case, m: int, n: int, k: int, kind="normal", seed=1):
    """Return a, b, no addend and scales of a case."""
    spec = case.spec
    scales = [unit_scales(spec, rows, k, kind, seed + rows) for rows in (m, n)]
    return operand(spec.a.name, m, k, kind, seed), operand(spec.b.name, n, k, kind, seed + 1), None, *scales


# Units, and numbers of every kind.


# These compile for ten seconds and more; others of their paths run by default.
LONG = ("fp64 bfloat16 sums", "fp64 float16 sums", "fp64 truncated", "fp64 down", "chain fp16", "tensor core e4m3",
        "tensor core e5m2", "fp64 terms to nearest, few bits")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CASES])
def test_units(name, device):
    case = CASES[name]
    found = check_kinds(case.path, case.spec, SHAPE, ("normal", "sparse", "special"), device)
    assert tuple(found) == case.left


@pytest.mark.slow
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("name", [*CASES, *RARER])
def test_units_on_every_kind(name, with_c, device):
    case = (CASES | RARER)[name]
    if with_c and case.path is BLOCK_SCALED:
        pytest.skip("the path takes no addend")
    for shape in (SHAPE, (3, 64, 40)) if case.unit.rounding.mode == "stochastic" else (SHAPE,):
        assert check_kinds(case.path, case.spec, shape, KINDS, device, with_c)[0] == 0


@paths
def test_bits_of_the_oracle(case, device):
    kind = "normal" if case.path in (FMA_CHAIN, FP64_FMA) else "wide"  # of which these leave tiles
    a, b, _, scale_a, scale_b = operands(case, 3, 2, 70, kind)
    given = {} if scale_a is None else {"scale_a": scale_a, "scale_b": scale_b}
    sums, marks = product_of(case.path, a, b, case.spec, None, scale_a, scale_b, device=device)
    assert not marks.any()
    assert_same_bits(sums[0], oracle(a, b, case.spec, sums.dtype, **given))


@pytest.mark.parametrize("name", ["chain bf16", "chain e8m10 in float64", "fp64 bfloat16 sums", "tensor core bf16"])
def test_addends(name, device):
    path, spec = CASES[name].path, CASES[name].spec
    check_kinds(path, spec, SHAPE, ("normal", "sparse"), device, with_c=True)
    a, b = operand(spec.a.name, 3, 40, "normal", 1), operand(spec.b.name, 4, 40, "sparse", 2)
    for kind in ("special", "codes", "tiny"):
        check(path, a, b, spec, addend(spec, 3, 4, kind, 3), device=device)
    a[:, 8:30], b[1] = 0.0, -0.0  # blocks without products
    for c in (None, addend(spec, 3, 4, "normal", 3), torch.full((3, 4), -0.0)):
        assert check(path, a, b, spec, c, device=device) == 0
    check(path, a, b * 0, spec, torch.full((3, 4), -0.0), device=device)


@paths
def test_zeros_of_both_signs(case, device):
    a, b, _, *scales = operands(case, 20, 18, 64)
    a, b = a.float(), b.float()
    a[:, ::3], a[3], b[:, 1::3], b[4] = 0, -0.0, -0.0, -0.0
    a[7], b[1] = 1, torch.tensor([1.0, -1]).repeat(32)
    if scales[0] is not None:
        scales[0][5], scales[1][2, 1] = 0, 0
    assert check(case.path, a, b, case.spec, None, *scales, device=device) == 0


# Layouts, panels, plans.


@paths
@pytest.mark.parametrize("plan", [
    GemmPlan(k_tile=64, promote_every=64), GemmPlan(k_tile=64, residue_first=True), GemmPlan(k_tile=64, part_k=128),
], ids=str)  # fmt: skip
def test_plans_alone(case, plan, device):
    spec = replace(case.spec, plan=plan)
    a, b, _, *scales = operands(case, 20, 24, 100)
    if case.path is BLOCK_SCALED and plan.residue_first:
        pytest.skip("groups would have two scales")
    sums, marks = product_of(case.path, a, b, spec, None, *scales, device=device)
    assert not marks.any()
    assert_same_bits(sums[0], expected(a, b, spec, None, *scales))


@paths
def test_parts_are_kept_apart(case, device):
    a, b, _, *scales = operands(case, 20, 24, 256)
    spec, halves = replace(case.spec, plan=GemmPlan(k_tile=64, split=2)), (slice(0, 128), slice(128, 256))
    sums, _ = product_of(case.path, a, b, spec, None, *scales, device=device)
    assert len(sums) == 2
    for part, half in zip(sums, halves, strict=True):
        of_scales = [None if s is None else s.chunk(2, 1)[half.start // 128] for s in scales]
        assert_same_bits(part, expected(a[:, half], b[:, half], case.spec, None, *of_scales))


@pytest.mark.parametrize("name", ["chain bf16", "fp64 bfloat16 sums"])
def test_plans_through_dispatch(name, monkeypatch, device):
    case = CASES[name]
    cuda_gemm.install(monkeypatch, device, fast=(case.path,))
    for plan in (
        GemmPlan(k_tile=10, split=3, reduce="pairwise"), GemmPlan(promote_every=32),
        GemmPlan(k_tile=16, split=2, owner="interleaved", residue_first=True, partial="bf16"),
    ):  # fmt: skip
        gemm_engine.check_kinds(replace(case.spec, plan=plan), (2, 3, 85), ("normal", "normal"), seed=4, with_c=True)


@pytest.mark.parametrize("name", ["chain fp32", "chain fp64", "fp64 float32 sums"])
def test_other_outer_sums(name, device):
    """Chains that join a sum in other ways than float32's: scaled, or in a narrow format."""
    case = (CASES | RARER)[name]
    scaled = replace(case.spec, plan=GemmPlan(promote_every=16, scaled_promotion=True))
    narrow = replace(case.spec, datapath=replace(case.unit, promote_every=16, promotion="fp16"))
    for spec in (scaled, narrow) if case.a != "fp64" else (narrow,):
        assert promotion_of(spec) == 2
        assert check_kinds(case.path, spec, SHAPE, ("normal", "sparse"), device) == [0, 0]


@paths
def test_operands_of_any_dtype_and_stride(case, device):
    a, b, _, *scales = operands(case, 18, 9, 100)
    wide = torch.zeros(100, 36)
    wide[:, ::2] = a.t().float()
    scales = [None if s is None else s.t().contiguous().t() for s in scales]
    want = expected(a, b, case.spec, None, *scales)
    for x in (wide.t()[::2], wide.bfloat16().t()[::2] if a.itemsize < 4 or case.a == "e2m1" else wide.t()[::2]):
        sums, marks = product_of(case.path, x, b.float(), case.spec, None, *scales, device=device)
        assert not marks.any()
        assert_same_bits(sums[0], want)


@pytest.mark.parametrize("turned", [False, True])
def test_exponents_of_long_rows(turned, device):
    """The largest exponent of a row of bfloat16, or what stands for zeros and for NaN, wherever it lies."""
    spec, k = CASES["tensor core bf16"].spec, 2500
    a = torch.full((70, k), 2.0**-20)
    for row, (place, value) in enumerate(
        [(k - 1, 8.0), (0, 2.0**60), (1030, -3.0), (256, 2.0**-126), (k - 2, torch.nan)]
    ):
        a[row, place] = value
    a[5], a[6, ::2] = 0, 0
    a = a.bfloat16().mT.contiguous().mT if turned else a.bfloat16()
    job = job_of(a, a, spec, device=device)
    bases, _ = FP64_MMA._packed(job, plan := FP64_MMA.plan(job), 0, FP64_MMA._panels(job, plan.shape)[0])
    nothing, special = -(1 << 20), 1 << 21
    assert bases.tolist() == [3, 60, 1, -20, special, nothing, *[-20] * 64, *[nothing] * 58]


@paths
def test_tiles_with_specials_are_left(case, device):
    """A NaN in the last row and an Inf, or scales that are NaN and far from 1, leave three tiles of four."""
    a, b, _, *scales = operands(case, 140, 131, 64)
    a, b = a.float(), b.float()
    if scales[0] is None:
        a[133, 4], b[2, 7] = torch.nan, torch.inf if case.spec.b.infinities else torch.nan
    else:
        scales[0][133, 1], scales[1][2, 0] = torch.nan, torch.nan
    sums, marks = product_of(case.path, a, b, case.spec, None, *scales, device=device)
    want = expected(a, b, case.spec, None, *scales)
    assert marks.tolist() == [[1, 0], [1, 1]]
    assert_same_bits(sums[0][:128, 128:], want[:128, 128:])
    assert (sums[0][128:, 128:] == 7).all() or case.path is FP64_MMA
    out = torch.empty(140, 131, device=device)
    DISPATCH.gemm(*(cuda_gemm.moved(x, device) for x in (a, b, None, *scales)), case.spec, None, out)
    assert_same_bits(out.cpu(), want)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
@paths
def test_other_devices_and_threads_in_any_order(case, capability):
    with pretend(capability, reversed_order=True):
        if case.path is not FP64_MMA or capability == (8, 0):
            assert check_kinds(case.path, case.spec, (20, 40, 100), ("normal",)) == [0]
        else:
            assert case.path.plan(job_of(*operands(case, 4, 4, 64)[:2], case.spec)) is None


# What paths do not take, and whether these tests would notice mistakes.

OTHERS = {
    "chain": (FMA, "bf16", [
        dict(rounding="toward_zero"), dict(fraction_bits=25), dict(block=4, signed_zero=True),
        dict(block=4, accumulator="fp64"), dict(group=2, block=4, scale="e8m0", scale_block=4),
    ]),
    "fp64": (HALF, "bf16", [
        dict(accumulator="fp64"), dict(fraction_bits=41), dict(fraction_bits=None), dict(signed_zero=True),
        dict(term_rounding="nearest_even", block=32), dict(min_exponent=-201),
    ]),
    "tensor core": (Datapath(), "bf16", [
        dict(term_rounding="nearest_even"), dict(rounding="nearest_even"), dict(fraction_bits=None), dict(block=128),
        dict(accumulator="fp16"), dict(signed_zero=True), dict(promote_every=32, promotion="bf16"),
        dict(block=32, group=16, scale="e8m0", scale_block=16),
    ]),
    "block scaled": (NVF4, "e2m1", [
        dict(group=1), dict(term_rounding="down"), dict(rounding="nearest_even"), dict(min_exponent=-133),
        dict(signed_zero=True), dict(accumulator="bf16"), dict(fraction_bits=None), dict(fraction_bits=45),
        dict(scale="bf16"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_units_for_other_paths(name, emulated):
    path, (taken, fmt, changes) = PATHS[name].path, OTHERS[name]
    for change in ({}, *changes):
        case = Case(path, replace(taken, **change), fmt)
        a, b, _, *scales = operands(case, 4, 4, 256)
        assert (path.plan(job_of(a, b, case.spec, None, *scales)) is None) == bool(change), change


@paths
def test_addends_for_other_paths(case, emulated):
    a, b, _, *scales = operands(case, 4, 4, 64)
    job = job_of(a, b, case.spec, torch.zeros(4, 4), *scales)
    assert (case.path.plan(job) is None) == (case.path is BLOCK_SCALED)


def test_operands_for_other_paths(emulated):
    for path, unit_of, fmt in (
        (FMA_CHAIN, FMA, "fp64"), (FMA_CHAIN, replace(FMA, accumulator=custom(8, 10)), "fp32"),
        (FP64_MMA, Datapath(), "fp32"), (FP64_FMA, HALF, "fp32"),
    ):  # fmt: skip
        case = Case(path, unit_of, fmt)
        assert path.plan(job_of(*operands(case, 4, 4, 64)[:2], case.spec)) is None, (path, fmt)


@pytest.mark.parametrize(("name", "change"), [
    ("chain e6m9 in float32", dict(acc_mantissa=8)), ("fp64 bfloat16 sums", dict(fraction=12)),
    ("fp64 terms to nearest", dict(terms=RULES["down"].code)), ("block scaled nvf4", dict(eps=20, spread=-1)),
    ("block scaled nvf4", dict(spread=60, room=60)), ("tensor core e4m3", dict(eps=60)),
    ("tensor core e4m3", dict(spacing=4.0)), ("tensor core e4m3", dict(base=1 << 23)),
], ids=str)  # fmt: skip
def test_a_wrong_constant_is_noticed(name, change, emulated, monkeypatch):
    case = CASES[name]
    real = case.path._shape

    def wrong(job):
        shape = real(job)
        if case.path is FP64_MMA:
            return shape._replace(floor=shape.floor._replace(**change))
        return shape._replace(**change) if hasattr(shape, "_replace") else replace(shape, **change)

    monkeypatch.setattr(case.path, "_shape", wrong)
    kinds = ("wide", "codes", "normal")
    with pytest.raises(AssertionError, match="differ"):
        check_kinds(case.path, case.spec, (20, 24, 256), kinds)


def test_kernels_of_usual_products_are_compiled_ahead():
    """The first path that takes a product is the one whose kernels are listed."""
    for capability, paths in (((9, 0), {"aligned_fp64_mma"}), ((12, 0), set())):
        listed = list(variants(capability))
        files = {file.removesuffix("_pack.cu").removesuffix(".cu") for file, *_ in listed}
        assert files == {"block_scaled", "fma_chain", "aligned_fp64_fma", *paths} and len(set(listed)) > 90


@pytest.mark.parametrize("name", [*CASES, *(name for name in RARER if "chain of" not in name)])
@pytest.mark.parametrize("shape", [(300, 260, 1000), (1, 5, 16)])
def test_large_products(name, shape, gpu_device):
    case = (CASES | RARER)[name]
    for kind in ("normal", "wide"):
        check(
            case.path,
            *operands(case, *shape, kind)[:2],
            case.spec,
            *operands(case, *shape, kind)[2:],
            device=gpu_device,
        )
