# SPDX-License-Identifier: Apache-2.0
"""The catalogue of matrix units: facts, look-up, errors, and how a unit looks."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from fmtsim import mma
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.resolver import gemm_call, resolve
from fmtsim.gemm.units import unit as units_module
from fmtsim.gemm.units.unit import Mode, Unit, describe, get_unit, list_units, register_unit
from fmtsim.spec.datapath import Datapath, FmaDatapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.refusals import refused

NAMES = {
    "volta.mma", "turing.mma", "ampere.mma", "ada.mma", "hopper.mma", "hopper.wgmma", "blackwell.mma",
    "blackwell.tcgen05", "blackwell.tcgen05.mxf8f6f4", "blackwell.tcgen05.mxf4", "blackwell.tcgen05.nvf4",
    "rtx_blackwell.mma", "cdna1.mfma", "cdna2.mfma", "cdna2.mfma.bf16", "cdna3.mfma", "exact", "fp32_fma", "fp64_fma",
    "int8", "int8.satfinite", "arm.fdot", "arm.fdot.osm", "arm.fmmla", "arm.fmmla.osm", "x86.vdp", "x86.amx",
}  # fmt: skip

# unit, format, sum: block, fraction bits, accumulator, lower bound of E. Typed from the published tables.
FUSED = [
    ("volta.mma", "fp16", "fp32", 4, 23, "fp32", None), ("volta.mma", "fp16", "fp16", 4, 23, "fp16", -19),
    ("turing.mma", "fp16", "fp32", 8, 24, "fp32", None), ("turing.mma", "fp16", "fp16", 8, 24, "fp16", -20),
    ("ampere.mma", "fp16", "fp32", 8, 24, "fp32", -132), ("ampere.mma", "bf16", "fp32", 8, 24, "fp32", -132),
    ("ampere.mma", "tf32", "fp32", 4, 24, "fp32", -132), ("ampere.mma", "fp16", "fp16", 8, 24, "fp16", -20),
    ("ada.mma", "bf16", "fp32", 8, 24, "fp32", -132), ("ada.mma", "e4m3", "fp32", 16, 13, "e8m13", None),
    ("ada.mma", "e5m2", "fp16", 16, 13, "fp16", None), ("hopper.mma", "bf16", "fp32", 16, 25, "fp32", -133),
    ("hopper.mma", "e4m3", "fp32", 16, 25, "fp32", -133), ("hopper.mma", "e5m2", "fp16", 16, 25, "fp16", -21),
    ("hopper.wgmma", "fp16", "fp32", 16, 25, "fp32", -133), ("hopper.wgmma", "tf32", "fp32", 8, 25, "fp32", -133),
    ("hopper.wgmma", "fp16", "fp16", 16, 25, "fp16", -21), ("hopper.wgmma", "e4m3", "fp32", 32, 13, "e8m13", None),
    ("hopper.wgmma", "e5m2", "fp16", 32, 13, "fp16", None), ("blackwell.mma", "e4m3", "fp32", 16, 25, "fp32", -133),
    ("blackwell.tcgen05", "bf16", "fp32", 16, 25, "fp32", -133),
    ("blackwell.tcgen05", "tf32", "fp32", 8, 25, "fp32", -133),
    ("blackwell.tcgen05", "e2m1", "fp32", 32, 25, "fp32", None),
    ("blackwell.tcgen05", "e3m2", "fp16", 32, 25, "fp16", None),
    ("blackwell.tcgen05.mxf8f6f4", "e2m3", "fp32", 32, 25, "fp32", -133),
    ("blackwell.tcgen05.mxf4", "e2m1", "fp32", 64, 35, "fp32", None),
    ("blackwell.tcgen05.nvf4", "e2m1", "fp32", 64, 35, "fp32", None),
    ("rtx_blackwell.mma", "e4m3", "fp32", 32, 25, "fp32", None),
    ("cdna1.mfma", "fp16", "fp32", 4, None, "fp32", None), ("cdna1.mfma", "bf16", "fp32", 2, None, "fp32", None),
    ("arm.fdot", "e4m3", "fp32", 4, None, "fp32", None), ("arm.fdot", "e5m2", "fp16", 2, None, "fp16", None),
    ("arm.fdot.osm", "e5m2", "fp16", 2, None, "e5m10_saturate", None),
    ("arm.fmmla", "e5m2", "fp32", 8, None, "fp32", None),
    ("arm.fmmla.osm", "e4m3", "fp32", 8, None, "e8m23_saturate", None),
    ("arm.fmmla.osm", "e4m3", "fp16", 4, None, "e5m10_saturate", None),
    ("exact", "e4m3", "fp32", None, None, "fp32", None), ("exact", "bf16", "fp64", None, None, "fp64", None),
    ("fp32_fma", "fp32", "fp32", 1, None, "fp32", None), ("fp64_fma", "fp64", "fp64", 1, None, "fp64", None),
]  # fmt: skip


@pytest.mark.parametrize("row", FUSED, ids=lambda row: "-".join(map(str, row[:3])))
def test_fused_units_have_the_published_constants(row):
    name, fmt, sums, block, bits, accumulator, bound = row
    path = get_unit(name).mode(fmt, fmt, sums)
    assert isinstance(path, Datapath)
    assert (path.block, path.fraction_bits, path.min_exponent) == (block, bits, bound)
    assert path.accumulator.name == accumulator
    nearest = sums == "fp16" or bits is None
    assert path.rounding.mode == ("nearest_even" if nearest else "toward_zero")


def test_every_name_exists_once():
    assert set(list_units()) >= NAMES
    assert len(list_units()) == len(set(list_units()))
    for name in list_units():
        assert get_unit(name).name == name
        assert get_unit(get_unit(name)) is get_unit(name)


def test_other_arithmetic():
    assert get_unit("cdna2.mfma").mode("bf16", "bf16") == PairwiseDatapath(block=4)
    assert get_unit("cdna2.mfma.bf16").mode("bf16", "bf16") == PairwiseDatapath(block=2)
    assert get_unit("cdna3.mfma").mode("fp16", "fp16") == TwoStageDatapath(block=8, fraction_bits=24, sum_bits=31)
    assert get_unit("cdna3.mfma").mode("tf32", "tf32") == TwoStageDatapath(block=4)
    assert get_unit("cdna3.mfma").mode("e4m3fnuz", "e5m2fnuz") == TwoStageDatapath(block=16, parity=True)
    assert get_unit("x86.vdp").mode("bf16", "bf16") == get_unit("x86.vdp").mode("fp16", "fp16") == FmaDatapath()
    assert get_unit("x86.amx").mode("bf16", "bf16") == FmaDatapath(block=32, parity=True)
    assert describe(FmaDatapath()) == "fused multiply-adds, odd k of pairs first, each sum rounded and flushed"
    assert "even and odd k of blocks of 32 apart" in str(get_unit("x86.amx"))
    assert get_unit("int8").mode("int8", "int8") == IntegerDatapath()
    assert get_unit("int8.satfinite").mode("int8_full", "int8_full") == IntegerDatapath(saturate=True)


def test_fp8_through_a_16_bit_unit():
    for name in ("hopper.mma", "blackwell.mma"):
        path = get_unit(name).mode("e4m3", "e5m2")
        assert (path.paired, path.promote_every, path.promotion) == (True, 32, None)
        assert path.operand == get_format("fp16")


def test_scales_inside_the_unit():
    lscale = get_unit("arm.fdot").mode("e4m3", "e5m2", "fp16", scale="e8m0")
    assert (lscale.scale, lscale.scale_block, lscale.block) == (get_format("e8m0"), 32, 2)
    mx = get_unit("blackwell.tcgen05.mxf8f6f4").mode("e4m3", "e2m1")
    assert (mx.scale, mx.scale_block, mx.group) == (get_format("e8m0"), 32, 1)
    four = get_unit("blackwell.tcgen05.mxf4").mode("e2m1", "e2m1")
    assert (four.scale, four.scale_block, four.group) == (get_format("e8m0"), 32, 16)
    nv = get_unit("blackwell.tcgen05.nvf4")
    assert (nv.mode("e2m1", "e2m1").scale, nv.mode("e2m1", "e2m1").scale_block) == (get_format("ue4m3"), 16)
    assert nv.mode("e2m1", "e2m1", scale="e8m0").scale == get_format("e8m0")


def test_mixing():
    wgmma = get_unit("hopper.wgmma")
    assert wgmma.mode("e4m3", "e5m2") == wgmma.mode("e5m2", "e4m3") == wgmma.mode("float8_e4m3fn", "e4m3")
    refused("unit hopper.wgmma does not take fp16 x bf16; it takes fp16 -> fp32; bf16", wgmma.mode, "fp16", "bf16")


def test_the_sum_is_fp32_unless_the_unit_has_none():
    assert get_unit("hopper.wgmma").find("fp16", "fp16").accumulate == "fp32"
    assert get_unit("int8").find("int8", "int8").accumulate == "int32"
    assert get_unit("hopper.mma").find("fp64", "fp64").accumulate == "fp64"


def test_any_float_format_is_taken_by_what_is_defined():
    mine = FloatFormat(name="mine_e3m5", exponent_bits=3, mantissa_bits=5)
    assert get_unit("exact").mode(mine, "e4m3") == get_unit("exact").mode("bf16", "bf16")
    with pytest.raises(ArgumentError, match="unit exact does not take int8 x int8"):
        get_unit("exact").mode("int8", "int8")


def resolved(unit, a, b):
    return resolve(gemm_call("mm", (get_format(a), get_format(b)), (1, 1, 1), torch.float32, target=unit)).datapath


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: get_unit("hoper.wgmma"), ArgumentError, "unknown unit 'hoper.wgmma'; did you mean 'hopper.wgmma'"),
        (lambda: get_unit(7), ArgumentError, "unknown unit 7"),
        (lambda: get_unit("ampere.mma").mode("e4m3", "e4m3"), ArgumentError, "units that do: ada.mma, hopper.mma"),
        (lambda: get_unit("hopper.wgmma").mode("bf16", "fp32"), ArgumentError, "units that do: exact, fp32_fma"),
        (lambda: get_unit("ada.mma").mode("bf16", "bf16", "fp16"), ArgumentError, "does not take bf16 x bf16 -> fp16"),
        (lambda: get_unit("hopper.wgmma").mode("e4m3", "e4m3", scale="e8m0"), ArgumentError,
         "does not take e4m3 x e4m3 with e8m0 scales; .*; units that do: blackwell.tcgen05.mxf8f6f4"),
        (lambda: get_unit("exact").mode("nonsense", "e4m3"), FormatError, "unknown format 'nonsense'"),
        (lambda: resolved(Datapath(), "int8", "int8"), FormatError, "Datapath does not multiply int8 x int8"),
        (lambda: resolved(IntegerDatapath(), "e4m3", "e4m3"), FormatError, "choose integer formats"),
        (lambda: register_unit(replace(get_unit("exact"), name="h200")), ArgumentError, "'h200' is that of a GPU"),
        (lambda: register_unit("x"), ArgumentError, "unit='x' is not a unit; pass register_unit"),
        (lambda: register_unit(replace(get_unit("exact"), description="other")), ArgumentError, "'exact' is taken"),
        (lambda: Unit(name="Upper", modes=get_unit("exact").modes), ArgumentError, "unit name 'Upper' is not allowed"),
        (lambda: Unit(name="none", modes=()), ArgumentError, "pass one Mode or more"),
        (lambda: replace(get_unit("exact").modes[0], accumulate="fp8"), ArgumentError, "accumulate='fp8' is not poss"),
        (lambda: replace(get_unit("exact").modes[0], strength="sure"), ArgumentError, "strength='sure' is not possib"),
        (lambda: replace(get_unit("exact").modes[0], inputs=()), ArgumentError, "takes nothing"),
        (lambda: replace(get_unit("exact").modes[0], datapath="x"), ArgumentError, "datapath='x' is not a unit's"),
    ],
)  # fmt: skip
def test_errors(act, error, message):
    refused(message, act, error=error)


def test_products_take_names_units_and_records():
    path = Datapath(block=64, fraction_bits=10)
    assert resolved(path, "e4m3", "bf16") is path
    wanted = get_unit("hopper.wgmma").mode("bf16", "bf16")
    assert resolved("hopper.wgmma", "bf16", "bf16") == resolved(get_unit("hopper.wgmma"), "bf16", "bf16") == wanted


def test_a_unit_of_ones_own(monkeypatch):
    monkeypatch.setattr(units_module, "_units", dict(units_module._units))
    mode = Mode(
        inputs=("bf16", "float16"),
        accumulate="fp32",
        datapath=Datapath(block=64),
        evidence="a wish",
        strength="defined",
    )
    mine = Unit(name="mine.v1", modes=(mode,))
    assert register_unit(mine) is mine
    assert register_unit(Unit(name="mine.v1", modes=(mode,))) == mine
    assert mode.inputs == ("bf16", "fp16")
    assert get_unit("mine.v1").mode("fp16", "bf16").block == 64
    other = replace(mine, description="second")
    assert register_unit(other, overwrite=True) is get_unit("mine.v1")


def test_every_mode_says_what_stands_behind_it():
    for name in list_units():
        for mode in get_unit(name).modes:
            assert mode.evidence
            assert describe(mode.datapath)


@pytest.mark.parametrize(("unit", "expected"), [("cdna3.mfma", 2.0), ("cdna2.mfma", 2 + 2.0**-22)])
def test_a_vector_that_decides_how_mi300_adds(unit, expected):
    """A sum that 31 fraction bits, rounded down, leave below the tie: from TC-EFT's model (arXiv 2609.14845)."""
    a, b = torch.zeros(1, 8, dtype=torch.float16), torch.zeros(1, 8, dtype=torch.float16)
    a[0, :2], b[0, :2] = torch.tensor([2.0**-11, (1 + 2.0**-9) * 2.0**-12]), 2.0**-11
    assert mma(a, b, torch.tensor([[2 - 2.0**-22]]), target=unit).item() == expected


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.open = 0, []

    def handle_starttag(self, tag, attrs):
        self.rows += tag == "tr"
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


# Sums of 16 products of bfloat16, subnormal as float32: codes of a and b, bits on an H100 (torch.mm, 2026-11-27).
SUBNORMAL = [
    ("9b23 17c3 1b6a 999d 9a2c 9b05 1aab 9af3 9a4d 1a7c 9a42 19dc 99d3 1ac5 9b36 1ab9",
     "1884 1923 1af9 9b09 9b52 9a4a 1afe 9a82 9ac9 9b75 9abc 18ed 9acf 9a50 9b4a 1b0f", 0x34),
    ("9b94 19f3 9a2e 1a67 9a25 9b4e 9b29 9a33 99e0 1a14 9914 99d1 9ae9 1b1a 9a9c 1b3a",
     "9aaf 99f3 9acc 1b7c 19ed 1b25 9a1b 9a20 9af7 9a48 1ae1 1b32 1b12 1b0e 9a68 1735", 0x0B),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), SUBNORMAL, ids=["issue 2", "issue 7"])
def test_subnormal_sums_that_others_saw_differ_on_an_h100(a, b, expected):
    """From issues of MATLAB-tensor-core, of which the second decides the lower bound of the exponent."""
    x, y = (torch.tensor([[int(code, 16)] for code in codes.split()]).to(torch.int16).view(torch.bfloat16).mT
            for codes in (a, b))  # fmt: skip
    for unit in ("hopper.wgmma", "hopper.mma"):
        assert mma(x, y, target=unit).view(torch.int32).item() == expected
    if expected == 0x0B:
        path = get_unit("hopper.wgmma").find("bf16", "bf16", "fp32").datapath
        for bound in (-126, -132, -134, None):
            assert mma(x, y, target=replace(path, min_exponent=bound)).view(torch.int32).item() == 0x0A


def test_how_a_unit_looks():
    unit = get_unit("hopper.wgmma")
    assert repr(unit).startswith("Unit('hopper.wgmma': fp16 -> fp32; bf16 -> fp32; tf32 -> fp32;")
    assert str(unit).startswith("hopper.wgmma\nNVIDIA Hopper (sm_90a)")
    assert "blocks of 32, F=13, toward_zero to e8m13" in str(unit)
    assert "equal to recorded hardware bits: H200: torch._scaled_mm" in str(unit)
    assert "ue4m3 every 16" in str(get_unit("blackwell.tcgen05.nvf4"))
    cells = Cells()
    cells.feed(unit._repr_html_())
    assert cells.open == [] and cells.rows == 1 + len(unit.modes)
    assert "E&gt;=-133" in unit._repr_html_()
