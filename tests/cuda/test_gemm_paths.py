"""Every fast path of products alone, against the CPU engine and the oracle: units, numbers, layouts, planted errors."""

from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from fmtsim import Datapath, GemmPlan, get_unit
from fmtsim.cuda.gemm import block_scaled, fma_chain, fp32_aligned, fp64_aligned, fp64_tensor_core
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from tests.cuda.emulator import emulated as pretend
from tests.support import cuda_gemm, gemm_engine
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import DISPATCH, check, check_kinds, expected, job_of, product_of
from tests.support.gemm_engine import KINDS, addend, gemm_spec, operand, unit_scales
from tests.support.gemm_oracle import sums as oracle

SHAPE = (5, 9, 45)


def custom(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    name = f"e{exponent_bits}m{mantissa_bits}"
    return FloatFormat(name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


class Case(NamedTuple):
    """A unit that a path takes; left: tiles of SHAPE that it leaves of normal, sparse and special numbers."""

    path: ModuleType
    unit: Datapath
    a: str
    b: str | None = None
    left: tuple[int, int, int] = (0, 0, 1)

    @property
    def spec(self):
        return gemm_spec(self.unit, self.a, self.b)


def unit(name: str, a: str, b: str | None = None) -> Datapath:
    return get_unit(name).mode(a, b or a, "fp32")


E8M13 = custom(8, 13)
FMA = Datapath(block=1, fraction_bits=None, rounding="nearest_even")
HALF = Datapath(block=16, fraction_bits=25, min_exponent=-133, rounding="nearest_even")
NEAREST = replace(HALF, term_rounding="nearest_even")
EIGHT = Datapath(block=32, fraction_bits=13, accumulator=E8M13)
NVF4 = Datapath(block=64, fraction_bits=35, group=16, scale="ue4m3", scale_block=16)
MXF4 = replace(NVF4, scale="e8m0", scale_block=32)
ALL = (0, 0, 0)


def chain(acc, fmt: str, *left, **fields) -> Case:
    return Case(fma_chain, replace(FMA, accumulator=acc, **fields), fmt, None, left or (0, 0, 1))


def drawn(bits: int, **options) -> Rounding:
    return Rounding(mode="stochastic", random_bits=bits, **options)


CASES = {
    "chain fp16": chain("fp16", "fp16", *ALL),
    "chain bf16": chain("bf16", "bf16", *ALL),
    "chain fp32": chain("fp32", "bf16", *ALL),
    "chain fp64": chain("fp64", "fp64", *ALL),
    "chain e6m9 in float32": chain(custom(6, 9), "e4m3"),
    "chain e8m10 in float64": chain(custom(8, 10), "bf16"),
    "chain fp16 of bf16": chain("fp16", "bf16"),
    "chain of blocks of 4": chain("fp32", "e4m3", block=4),
    "chain of blocks of 16": chain("fp32", "e4m3", block=16),
    "fp64 bfloat16 sums": Case(fp64_aligned, replace(HALF, accumulator="bf16"), "bf16"),
    "fp64 float16 sums": Case(fp64_aligned, replace(HALF, accumulator="fp16"), "fp16"),
    "fp64 truncated": Case(
        fp64_aligned, replace(HALF, accumulator="fp16", fraction_bits=13, rounding="toward_zero"), "bf16"
    ),
    "fp64 stochastic": Case(fp64_aligned, replace(HALF, accumulator="bf16", rounding="stochastic"), "bf16"),
    "fp64 down": Case(
        fp64_aligned, replace(HALF, term_rounding="down", block=32, fraction_bits=13, accumulator=E8M13), "e4m3"
    ),
    "fp64 terms to nearest": Case(fp64_aligned, replace(NEAREST, min_exponent=None), "bf16"),
    "fp64 terms to nearest, few bits": Case(
        fp64_aligned, replace(NEAREST, fraction_bits=3, accumulator="fp16"), "fp16"
    ),
    "fp64 terms away from zero": Case(fp64_aligned, replace(HALF, term_rounding="nearest_away", rounding="up"), "bf16"),
    "fp64 several records": Case(fp64_aligned, replace(HALF, block=40, fraction_bits=13), "bf16"),
    "fp64 scales": Case(fp64_aligned, replace(HALF, block=32, fraction_bits=20, scale="ue4m3", scale_block=16), "e4m3"),
    "tensor core e4m3": Case(fp64_tensor_core, unit("hopper.wgmma", "e4m3"), "e4m3"),
    "tensor core e5m2": Case(fp64_tensor_core, unit("hopper.wgmma", "e5m2"), "e5m2"),
    "tensor core bf16": Case(fp64_tensor_core, unit("hopper.wgmma", "bf16"), "bf16"),
    "tensor core fp16": Case(fp64_tensor_core, unit("hopper.wgmma", "fp16"), "fp16"),
    "tensor core mx": Case(fp64_tensor_core, get_unit("blackwell.tcgen05.mxf8f6f4").mode("e4m3", "e4m3"), "e4m3"),
    "fp32 e4m3": Case(fp32_aligned, EIGHT, "e4m3"),
    "fp32 e4m3 e5m2": Case(fp32_aligned, EIGHT, "e4m3", "e5m2"),
    "fp32 e5m2": Case(fp32_aligned, EIGHT, "e5m2", "e5m2"),
    "fp32 blocks of 16": Case(fp32_aligned, replace(EIGHT, block=16), "e4m3"),
    "fp32 blocks of 5": Case(fp32_aligned, replace(EIGHT, block=5, fraction_bits=10), "e4m3"),
    "block scaled nvf4": Case(block_scaled, NVF4, "e2m1", None, ALL),
    "block scaled mxf4": Case(block_scaled, MXF4, "e2m1", None, ALL),
}
RARER = {
    "chain fp16 of e5m2": chain("fp16", "e5m2", *ALL),
    "chain bf16 of e4m3": chain("bf16", "e4m3", *ALL),
    "chain fp32 of fp32": chain("fp32", "fp32", *ALL),
    "chain e5m8": chain(custom(5, 8), "e4m3"),
    "chain e8m13": chain(E8M13, "fp16"),
    "chain e4m7": chain(custom(4, 7), "e4m3"),
    **{
        f"chain of blocks of {block}, {fmt}, {acc}": chain(acc, fmt, block=block)
        for block in (2, 3, 24, None)
        for fmt in ("e4m3", "bf16", "fp16")
        for acc in ("fp32", "bf16", "fp16", E8M13)
    },
    "fp64 terms to nearest, longest integers": Case(fp64_aligned, replace(NEAREST, block=32, fraction_bits=24), "fp16"),
    "fp64 terms to nearest, truncated": Case(
        fp64_aligned, replace(NEAREST, block=5, fraction_bits=0, rounding="toward_zero"), "e4m3"
    ),
    "fp64 terms to nearest, high alignment": Case(
        fp64_aligned, replace(NEAREST, min_exponent=10, fraction_bits=8, block=4), "e5m2"
    ),
    "fp64 terms to nearest, stochastic": Case(
        fp64_aligned, replace(NEAREST, fraction_bits=6, accumulator="bf16", rounding="stochastic"), "bf16"
    ),
    "fp64 terms to nearest, another format": Case(
        fp64_aligned, replace(NEAREST, operand="fp16", fraction_bits=10), "bf16"
    ),
    "fp64 terms away from zero, several records": Case(
        fp64_aligned, replace(NEAREST, term_rounding="nearest_away", block=64, fraction_bits=9), "fp16"
    ),
    "fp64 to odd": Case(fp64_aligned, replace(HALF, accumulator="bf16", rounding="to_odd"), "fp16"),
    "fp64 sums away from zero": Case(
        fp64_aligned, replace(HALF, accumulator="fp16", rounding="nearest_away", block=1), "e5m2"
    ),
    "fp64 sums down": Case(fp64_aligned, replace(HALF, rounding="down", block=3), "tf32"),
    "fp64 ties toward zero": Case(
        fp64_aligned, replace(HALF, accumulator="bf16", rounding="nearest_toward_zero"), "e4m3"
    ),
    "fp64 float32 sums": Case(fp64_aligned, HALF, "tf32"),
    "fp64 truncated float32 sums": Case(fp64_aligned, replace(HALF, rounding="toward_zero"), "bf16"),
    "fp64 any alignment": Case(fp64_aligned, replace(HALF, min_exponent=None, block=5), "fp16"),
    "fp64 high alignment": Case(fp64_aligned, replace(HALF, min_exponent=10, fraction_bits=13), "bf16"),
    "fp64 few exponents": Case(
        fp64_aligned, replace(HALF, block=4, accumulator=custom(5, 9), rounding="toward_zero"), "e5m2"
    ),
    "fp64 operands of another format": Case(fp64_aligned, replace(HALF, operand="fp16"), "bf16"),
    "fp64 power-of-two scales": Case(
        fp64_aligned, replace(HALF, block=32, fraction_bits=20, scale="e8m0", scale_block=32), "bf16"
    ),
    "fp64 13 bits": Case(fp64_aligned, replace(HALF, rounding=drawn(13)), "bf16"),
    "fp64 variant b": Case(fp64_aligned, replace(HALF, accumulator="fp16", rounding=drawn(8, variant="b")), "fp16"),
    "fp64 variant c": Case(fp64_aligned, replace(HALF, rounding=drawn(8, variant="c")), "bf16"),
    "fp64 shared words": Case(fp64_aligned, replace(HALF, rounding=drawn(8, layout="cvt_rs")), "bf16"),
    **{
        f"tensor core {name} {fmt}": Case(fp64_tensor_core, unit(name, fmt), fmt)
        for name, fmt in (
            ("hopper.wgmma", "tf32"), ("hopper.mma", "e4m3"), ("blackwell.tcgen05", "e4m3"), ("ampere.mma", "fp16"),
            ("blackwell.tcgen05", "e2m1"), ("ampere.mma", "tf32"), ("ada.mma", "e5m2"), ("volta.mma", "fp16"),
        )
    },
    **{
        f"tensor core, blocks of {block}, {bits} bits, {term}": Case(
            fp64_tensor_core, Datapath(block=block, fraction_bits=bits, term_rounding=term), "bf16", "e4m3"
        )
        for block in (1, 2, 4, 5, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64)
        for bits, accumulator in ((9, E8M13), (25, "fp32"), (33, "fp32"))
        for term in ("toward_zero", "down")
    },
    "tensor core, fractional scales": Case(
        fp64_tensor_core, Datapath(block=16, fraction_bits=20, scale="ue4m3", scale_block=16), "e2m1"
    ),
    "fp32 e5m2 e4m3": Case(fp32_aligned, EIGHT, "e5m2", "e4m3"),
    "fp32 blocks of 40": Case(fp32_aligned, Datapath(block=40, fraction_bits=9, accumulator=custom(8, 7)), "e4m3"),
    "fp32 float32 sums": Case(fp32_aligned, Datapath(block=32, fraction_bits=13), "e4m3"),
}  # fmt: skip
PATHS = {  # a case of each path
    name: CASES[case]
    for name, case in (
        ("chain", "chain e8m10 in float64"), ("fp64", "fp64 bfloat16 sums"), ("tensor core", "tensor core e4m3"),
        ("fp32", "fp32 e4m3"), ("block scaled", "block scaled nvf4"),
    )
}  # fmt: skip
paths = pytest.mark.parametrize("case", PATHS.values(), ids=PATHS)


def operands(case: Case, m: int, n: int, k: int, kind="normal", seed=1):
    """Return a, b, no addend and scales of a case."""
    spec = case.spec
    scales = [unit_scales(spec, rows, k, kind, seed + rows) for rows in (m, n)]
    return operand(spec.a.name, m, k, kind, seed), operand(spec.b.name, n, k, kind, seed + 1), None, *scales


# Units, and numbers of every kind.


@pytest.mark.parametrize("name", CASES)
def test_units(name, device):
    case = CASES[name]
    found = check_kinds(case.path, case.spec, SHAPE, ("normal", "sparse", "special"), device)
    assert tuple(found) == case.left


@pytest.mark.slow
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("name", [*CASES, *RARER])
def test_units_on_every_kind(name, with_c, device):
    case = (CASES | RARER)[name]
    if with_c and case.path in (fp32_aligned, block_scaled):
        pytest.skip("the path takes no addend")
    for shape in (SHAPE, (3, 64, 40)) if case.unit.rounding.mode == "stochastic" else (SHAPE,):
        assert check_kinds(case.path, case.spec, shape, KINDS, device, with_c)[0] == 0


@paths
def test_bits_of_the_oracle(case, device):
    kind = "normal" if case.path in (fma_chain, fp64_aligned) else "wide"  # of which these leave tiles
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
    if case.path is block_scaled and plan.residue_first:
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
        assert fma_chain.promotion_of(spec) == 2
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
    assert (sums[0][128:, 128:] == 7).all() or case.path is fp64_tensor_core
    out = torch.empty(140, 131, device=device)
    DISPATCH.gemm(*(cuda_gemm.moved(x, device) for x in (a, b, None, *scales)), case.spec, None, out)
    assert_same_bits(out.cpu(), want)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
@paths
def test_other_devices_and_threads_in_any_order(case, capability):
    with pretend(capability, reversed_order=True):
        if case.path is not fp64_tensor_core or capability == (8, 0):
            assert check_kinds(case.path, case.spec, (20, 40, 100), ("normal",)) == [0]
        else:
            assert not case.path.supports(job_of(*operands(case, 4, 4, 64)[:2], case.spec))


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
    "fp32": (EIGHT, "e4m3", [
        dict(fraction_bits=25), dict(fraction_bits=None), dict(group=16, scale="ue4m3", scale_block=16),
        dict(term_rounding="down"), dict(rounding="nearest_even"), dict(signed_zero=True), dict(block=128),
        dict(accumulator="fp16"), dict(min_exponent=0),
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
        assert path.supports(job_of(a, b, case.spec, None, *scales)) == (not change), change


def test_operands_for_other_paths(emulated):
    for path, unit_of, fmt in (
        (fma_chain, FMA, "fp64"), (fma_chain, replace(FMA, accumulator=custom(8, 10)), "fp32"),
        (fp64_tensor_core, Datapath(), "fp32"), (fp32_aligned, EIGHT, "bf16"), (fp64_aligned, HALF, "fp32"),
    ):  # fmt: skip
        case = Case(path, unit_of, fmt)
        assert not path.supports(job_of(*operands(case, 4, 4, 64)[:2], case.spec)), (path, fmt)
    with pretend((8, 9)):  # blocks that leave shared memory
        case = RARER["fp32 blocks of 40"]
        assert not case.path.supports(job_of(*operands(case, 4, 4, 256)[:2], case.spec))


@pytest.mark.parametrize(("name", "change"), [
    ("chain e6m9 in float32", dict(kept=8)), ("fp64 bfloat16 sums", dict(fraction=12)),
    ("fp64 terms to nearest", dict(terms=5)), ("fp32 e4m3", dict(enlarged=8)), ("fp32 e4m3", dict(fraction=12)),
    ("fp32 e4m3", dict(kept=12)), ("fp32 e4m3", dict(step=4, chain=15)), ("block scaled nvf4", dict(eps=20, spread=-1)),
    ("block scaled nvf4", dict(spread=60, room=60)), ("tensor core e4m3", dict(eps=60)),
    ("tensor core e4m3", dict(spacing=4.0)), ("tensor core e4m3", dict(base=1 << 23)),
], ids=str)  # fmt: skip
def test_a_wrong_constant_is_noticed(name, change, emulated, monkeypatch):
    case = CASES[name]
    attribute = {fp64_tensor_core: "plan_of", fma_chain: "shape_of", fp64_aligned: "shape_of"}.get(case.path, "_shape")
    real = getattr(case.path, attribute)

    def wrong(*given):
        shape = real(*given)
        return shape._replace(**change) if hasattr(shape, "_replace") else replace(shape, **change)

    fp64_tensor_core._table.cache_clear()
    monkeypatch.setattr(case.path, attribute, wrong)
    kinds = ("wide", "codes", "normal")
    with pytest.raises(AssertionError, match="differ"):
        check_kinds(case.path, case.spec, (20, 24, 256), kinds)
    fp64_tensor_core._table.cache_clear()


@paths
def test_variants_are_told_apart(case):
    listed = list(case.path.variants())
    files = {file.removesuffix("_pack.cu").removesuffix(".cu") for file, *_ in listed}
    assert files == {case.path.__name__.rpartition(".")[2]} and len(set(listed)) > 20


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
