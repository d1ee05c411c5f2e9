"""Units that cut terms, on the fp64 tensor core: the kernels against the CPU engine and the oracle, bit for bit."""

import struct

import pytest
import torch

import fmtsim.cuda
from fmtsim import Datapath, GemmPlan
from fmtsim.cuda.gemm import floor as gemm_floor
from fmtsim.cuda.gemm import floor_shape as gemm_floor_shape
from fmtsim.cuda.gemm.job import Job
from fmtsim.cuda.gemm.order import order_of
from fmtsim.cuda.runtime import program as runtime
from fmtsim.gemm.units.catalogue import E8M13
from fmtsim.rounding.modes import Rounding
from tests.cuda.emulator import emulated as pretend
from tests.cuda.floor_products import (
    SLOW,
    K,
    M,
    N,
    cancelling,
    check,
    codes,
    expected,
    normals,
    product,
    sparse,
    values,
)
from tests.cuda.nvrtc import needs_nvrtc
from tests.support.bits import assert_same_bits, bits
from tests.support.gemm_oracle import definition, sums
from tests.support.operands import normal, wide

# Units and formats.

CATALOGUE = [
    ("hopper.wgmma", "e4m3"), ("hopper.wgmma", "e5m2"), ("hopper.wgmma", "bf16"), ("hopper.wgmma", "fp16"),
    ("hopper.wgmma", "tf32"), ("hopper.mma", "e4m3"), ("blackwell.tcgen05", "e4m3"), ("blackwell.tcgen05", "e2m1"),
    ("ampere.mma", "fp16"), ("ampere.mma", "tf32"), ("ada.mma", "e5m2"), ("volta.mma", "fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("unit", "fmt"), CATALOGUE[:4])
def test_hopper(unit, fmt, device):
    check(*normals(fmt), definition(fmt, unit=unit), device)


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "fmt"), CATALOGUE)
def test_catalogue(unit, fmt, device):
    spec = definition(fmt, unit=unit)
    for operands in (normals, sparse, cancelling):
        check(*operands(fmt), spec, device)
    check(*normals(fmt, k=7), spec, device)


@pytest.mark.slow
def test_sums_of_the_oracle(device):
    for fmt in ("e4m3", "bf16"):
        a, b = values(normal(5, K, seed=1), fmt), values(wide(9, K, seed=2), fmt)
        got, marks = product(a, b, definition(fmt), device)
        assert not marks.any()
        assert_same_bits(got, sums(a, b, definition(fmt)))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "fp16", "bf16"])
def test_any_codes(fmt, device):
    check(*codes(fmt), definition(fmt), device, marked=None if fmt == "bf16" else 0)


@pytest.mark.parametrize("low", [-12, -30, -60])
@pytest.mark.parametrize("fmt", ["bf16", "e5m2"])
def test_exponents_of_any_width(fmt, low, device):
    """What lies too far below its row is left to another path, never wrong."""
    a, b = wide(M, K, seed=1, low=low, high=12), wide(N, K, seed=2, low=low, high=12)
    check(values(a, fmt), values(b, fmt), definition(fmt), device, marked=0 if low == -12 else None)


@pytest.mark.parametrize(("scale", "marked"), [(1e-17, 0), (1e-20, 2), (1e18, 2), (1e19, 2)])
def test_ends_of_the_range_are_left(scale, marked, device):
    a, b = normal(M, K, seed=1) * scale, normal(N, K, seed=2) * scale
    check(values(a, "bf16"), values(b, "bf16"), definition("bf16"), device, marked=marked)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_tiles_with_specials_are_left(number, device):
    a, b = normals("bf16")
    b[130, 3] = float(number)
    check(a, b, definition("bf16"), device, marked=1)


def test_nan_among_eight_bits_is_left(device):
    a, b = normals("e4m3")
    a.view(torch.uint8)[2, 2] = 0xFF
    check(a, b, definition("e4m3"), device, marked=2)


# Units that users make.


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 2, 4, 5, 8, 12, 16, 20, 24, 32, 40, 48, 64])
@pytest.mark.parametrize("fraction_bits", [9, 25, 33])
@pytest.mark.parametrize("term_rounding", ["toward_zero", "down"])
def test_blocks_of_any_length(block, fraction_bits, term_rounding, device):
    unit = Datapath(block=block, fraction_bits=fraction_bits, term_rounding=term_rounding)
    a, b = normals("bf16", "e4m3")
    a[4], a[5, ::2] = 0, -0.0
    check(a, b, definition("bf16", "e4m3", unit=unit), device)


@pytest.mark.parametrize(
    ("block", "term_rounding"), [(1, "toward_zero"), (7, "down"), (8, "toward_zero"), (12, "down")]
)
def test_short_sums(block, term_rounding, device):
    unit = Datapath(block=block, fraction_bits=9, term_rounding=term_rounding, accumulator=E8M13)
    check(*sparse("bf16"), definition("bf16", unit=unit), device)


def test_scales_inside_the_unit(device):
    def powers(rows, seed):
        return torch.exp2(torch.randint(-8, 8, (rows, 4), generator=torch.Generator().manual_seed(seed)).float())

    spec = definition("e4m3", unit="blackwell.tcgen05.mxf8f6f4")
    a, b = normals("e4m3")
    check(a, b, spec, device, scale_a=powers(M, 1), scale_b=powers(N, 2))
    check(a, b, spec, device, scale_a=powers(M, 1))


@pytest.mark.slow
def test_scales_with_fractions(device):
    unit = Datapath(block=16, fraction_bits=20, scale="ue4m3", scale_block=16)
    a, b = normals("e2m1")
    scales = [values(torch.rand((rows, 7)), "ue4m3") for rows in (M, N)]
    check(a, b, definition("e2m1", unit=unit), device, scale_a=scales[0], scale_b=scales[1])


# Specialisations.

KINDS = {  # of floor.cu, by unit, format and plan
    "short": ("hopper.wgmma", "e4m3", GemmPlan()),
    "short-promoted": ("hopper.wgmma", "e4m3", SLOW),
    "long": ("blackwell.tcgen05", "e4m3", GemmPlan()),
    "wide": ("hopper.wgmma", "bf16", GemmPlan()),
    "wide-promoted": ("hopper.wgmma", "bf16", SLOW),
    "narrow": ("hopper.wgmma", "fp16", GemmPlan()),
    "blocks-of-8": ("hopper.wgmma", "tf32", GemmPlan()),
}
MORE = [(4, 1, 3, 1), (2, 2, 3, 2, 8), (2, 2, 3, 2, 32, True), (1, 1, 3, 4, 8, True)]
ALL_CHOICES = sorted(
    {choice for choices in gemm_floor_shape.CHOICES.values() for choice in choices}
    | {gemm_floor_shape.Choice(*more) for more in MORE}
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", ALL_CHOICES, ids=str)
def test_every_choice(choice, kind, device, monkeypatch):
    """What ptxas makes of a specialisation has been wrong where the same source, as another one, was right."""
    unit, fmt, plan = KINDS[kind]
    monkeypatch.setattr(gemm_floor_shape, "CHOICES", dict.fromkeys(gemm_floor_shape.CHOICES, (choice,)))
    gemm_floor._shape.cache_clear()
    try:
        check(*normals(fmt, k=300), definition(fmt, unit=unit, plan=plan), device)
    finally:
        gemm_floor._shape.cache_clear()


def spilled(code):
    """Return the bytes of local memory that a cubin's functions take: EIATTR_FRAME_SIZE in ELF's .nv.info."""
    table, size, count, names = *struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    found = []
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if code[start : code.index(0, start)] != b".nv.info":
            continue
        place, end = offset, offset + length
        while place < end:
            form, attribute, payload = struct.unpack_from("<BBH", code, place)
            if (form, attribute) == (4, 17):
                found.append(struct.unpack_from("<I", code, place + 8)[0])
            place += 4 + (payload if form == 4 else 0)
    assert found
    return sum(found)


def chosen(kind, **change):
    unit, fmt, plan = KINDS[kind]
    spec = definition(fmt, unit=unit, plan=plan)
    block = {"tf32": 8, "bf16": 16, "fp16": 16, "e4m3": 32}[fmt]
    numbers = gemm_floor.plan_of(spec, block, 4096)
    rest = int(plan != GemmPlan()), numbers.whole, numbers.wide, numbers.down, numbers.single
    shape = gemm_floor_shape.fitting(
        block, block, *rest, numbers.fraction_bits, numbers.kept, limit=gemm_floor._USUAL_LIMIT
    )
    return shape._replace(**change)


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
def test_usual_kernels_do_not_spill(kind):
    """Spills are slow, and one has cost the low word of a float64 (floor_double.cuh)."""
    assert spilled(runtime.compiled("floor.cu", "sm_90", chosen(kind).defines).code) == 0


@needs_nvrtc
def test_spills_are_noticed():
    crowded = chosen("long", columns=4, halves=2, resident=2)
    assert spilled(runtime.compiled("floor.cu", "sm_90", crowded.defines).code) > 0


# What is left to other paths, and whether these tests would notice mistakes.


@pytest.mark.parametrize(
    "unit",
    [
        Datapath(term_rounding="nearest_even"),
        Datapath(rounding=Rounding(mode="nearest_even")),
        Datapath(fraction_bits=None),
        Datapath(block=128),
        Datapath(accumulator="fp16"),
        Datapath(signed_zero=True),
        Datapath(promote_every=32, promotion="bf16"),
        Datapath(block=32, group=16, scale="e8m0", scale_block=16),
    ],
)
def test_units_for_other_paths(unit):
    assert gemm_floor.plan_of(definition("bf16", unit=unit), unit.block or 16, K) is None


def test_operands_for_other_paths():
    fp32 = definition("fp32", unit=Datapath())
    assert gemm_floor.plan_of(fp32, 16, K) is None


def test_devices_for_other_paths(emulated, monkeypatch):
    a, b = normals("bf16")
    job = Job(a=a, b=b, c=None, scale_a=None, scale_b=None, spec=definition("bf16"), random=None,
              out=torch.empty(M, N), order=order_of(K, definition("bf16"), a.device))  # fmt: skip
    assert gemm_floor.supports(job)
    monkeypatch.setattr(gemm_floor.runtime, "capability", lambda index: (8, 9))
    assert not gemm_floor.supports(job)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["e4m3", "fp16"])
def test_ampere(fmt):
    """The smaller fp64 tensor core of compute capability 8.0."""
    with pretend((8, 0)):
        check(*normals(fmt), definition(fmt))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["e4m3", "bf16"])
def test_threads_in_any_order(fmt):
    with pretend(reversed_order=True):
        check(*normals(fmt), definition(fmt, plan=SLOW))


@pytest.mark.parametrize("field", ["enlarged", "base", "powers"])
def test_a_wrong_constant_is_noticed(field, emulated, monkeypatch):
    a, b = normals("e4m3")
    spec = definition("e4m3")
    plan = gemm_floor.plan_of(spec, 32, K)
    change = {"enlarged": {"eps": 60}, "base": {"base": plan.base + (1 << 23)}, "powers": {"spacing": 4.0}}[field]
    gemm_floor._table.cache_clear()
    monkeypatch.setattr(gemm_floor, "plan_of", lambda *rest: plan._replace(**change))
    got, _ = product(a, b, spec)
    assert (bits(got) != bits(expected(a, b, spec))).any()


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "bf16", "fp16", "tf32"])
@pytest.mark.parametrize("plan", [GemmPlan(), GemmPlan(promote_every=128)], ids=["fast", "slow"])
def test_large_products(fmt, plan):
    a, b = values(normal(517, 1000, seed=1), fmt), values(wide(901, 1000, seed=2), fmt)
    check(a, b, definition(fmt, plan=plan), "cuda", marked=None)
