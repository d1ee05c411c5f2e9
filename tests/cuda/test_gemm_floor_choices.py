"""Specialisations of the kernels on the fp64 tensor core: all have the same bits, and the usual ones do not spill."""

import struct

import pytest

from fmtsim import GemmPlan
from fmtsim.cuda import gemm_floor, gemm_floor_shape, runtime
from tests.cuda.test_gemm_floor import SLOW, check, normals
from tests.gemm.products import definition

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


@pytest.mark.skipif(runtime.why_not_compiling() is not None, reason=str(runtime.why_not_compiling()))
@pytest.mark.parametrize("kind", KINDS)
def test_usual_kernels_do_not_spill(kind):
    """Spills are slow, and one has cost the low word of a float64 (floor_double.cuh)."""
    assert spilled(runtime.compiled("floor.cu", "sm_90", chosen(kind).defines).code) == 0


@pytest.mark.skipif(runtime.why_not_compiling() is not None, reason=str(runtime.why_not_compiling()))
def test_spills_are_noticed():
    crowded = chosen("long", columns=4, halves=2, resident=2)
    assert spilled(runtime.compiled("floor.cu", "sm_90", crowded.defines).code) > 0
