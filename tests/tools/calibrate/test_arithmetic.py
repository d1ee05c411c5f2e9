# SPDX-License-Identifier: Apache-2.0
"""Units: a GPU with a hidden arithmetic is probed, and the arithmetic and its name come back."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fmtsim.casts.quantize import quantize
from fmtsim.formats.element import FloatFormat
from fmtsim.gemm.units.unit import get_unit
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.plan import GemmPlan
from tests.support.fake_gpu import FakeGPU
from tests.support.refusals import refused
from tools.calibrate import probes
from tools.calibrate.arithmetic import MODES, bench_call, family_of, measure, measure_all

UNITS = ("volta.mma", "turing.mma", "ampere.mma", "ada.mma", "hopper.wgmma", "blackwell.tcgen05")


def modes_of(unit):
    for mode in MODES:
        call = bench_call(mode)
        for record in get_unit(unit).modes:
            if record.takes(call.a, call.b) and record.accumulate == call.accumulate and record.scale is None:
                yield mode, record.datapath
                break


@pytest.mark.parametrize("unit", UNITS)
def test_catalogued_units_are_recognised(unit):
    seen = 0
    for mode, hidden in modes_of(unit):
        found = measure(FakeGPU(hidden), mode, unit.partition(".")[0])
        assert (found.unit, found.arithmetic, found.mismatches) == (unit, hidden, 0), found
        assert found.known and found.outputs >= 2048
        assert str(found).startswith(f"{mode}: {unit}; ")
        assert dict(found.facts).get("running sum", "aligned with the products") == "aligned with the products"
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("bound", [-126, -130, -133])
@pytest.mark.parametrize("mode", ["bf16", "tf32"])
@pytest.mark.parametrize("sums", ["toward_zero", "nearest_even"])
def test_lower_bounds_are_measured(bound, mode, sums):
    hidden = Datapath(block=8, fraction_bits=24, rounding=Rounding(mode=sums), min_exponent=bound)
    assert measure(FakeGPU(hidden), mode).arithmetic == hidden


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 60))])
def test_random_units_are_described(seed):
    """Units that no catalogue has: every field that a probe can see comes back."""
    draw = random.Random(seed)
    mode = draw.choice(["bf16", "fp16", "tf32", "e4m3"])
    kept = draw.choice([13, 16, 23])
    bits = draw.randint(kept, 28)
    hidden = Datapath(
        block=draw.choice([4, 8, 16, 32]),
        fraction_bits=bits,
        term_rounding=draw.choice(["toward_zero", "nearest_even", "nearest_away", "down"]),
        rounding=Rounding(mode=draw.choice(["toward_zero", "nearest_even", "nearest_away"])),
        accumulator=FloatFormat(name=f"e8m{kept}", exponent_bits=8, mantissa_bits=kept),
        min_exponent=draw.randint(-132, -126) if mode in ("bf16", "tf32") else None,
    )
    found = measure(FakeGPU(hidden), mode)
    assert found.unit is None and not found.mismatches
    fields = ("block", "fraction_bits", "term_rounding", "rounding")
    got = found.arithmetic
    assert [getattr(got, name) for name in fields] == [getattr(hidden, name) for name in fields], found.facts
    assert got.accumulator.mantissa_bits == kept
    if dict(found.facts)["bound seen"] == "1":
        assert got.min_exponent == hidden.min_exponent or (got.min_exponent is None and bits > kept + 2), found.facts


@pytest.mark.parametrize("mode", probes.ROUNDINGS)
def test_quarters_are_rounded_as_everywhere(mode):
    quarters = torch.tensor([sign * n / 4 for sign in (1, -1) for n in (1, 2, 3, 5, 6, 7)])
    assert probes.ROUNDINGS[mode] == tuple(quantize(quarters, "int8", rounding=mode).tolist())


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16, 32, 64])
def test_how_many_products_are_added_at_once(length):
    unit = Datapath(block=length, fraction_bits=24)
    assert probes.block_length(FakeGPU(unit), replace(bench_call("bf16"), m=32, n=64, k=128)) == length


@pytest.mark.parametrize(("mode", "most"), [("bf16", 38), ("fp16", 38), ("e4m3", 32), ("e5m2", 32)])
def test_fraction_bits_beyond_which_nothing_is_told(mode, most):
    for bits in (most, most + 1):
        call = replace(bench_call(mode), m=64, n=64, k=64)
        bench = probes.Bench(FakeGPU(Datapath(block=4, fraction_bits=bits)), call, 4)
        assert probes.fraction_bits(bench) == (bits if bits == most else None)


def test_a_lower_bound_without_clamp():
    hidden = replace(get_unit("hopper.wgmma").mode("bf16", "bf16", "fp32"), min_exponent=None)
    found = measure(FakeGPU(hidden), "bf16")
    assert found.arithmetic == hidden and found.unit is None
    assert "not in the catalogue" in str(found)


def test_an_addend_that_comes_late_is_told():
    hidden = Datapath(block=16, fraction_bits=25, promote_every=16)
    found = measure(FakeGPU(hidden), "bf16")
    assert not found.known
    assert found.arithmetic is None
    assert "no arithmetic explains the probes" in str(found)


def test_a_chain_of_fused_multiply_adds():
    hidden = get_unit("fp32_fma").mode("fp32", "fp32", "fp32")
    found = measure(FakeGPU(hidden), "bf16")
    assert found.known and found.arithmetic.block == 1


def test_integers_wrap_or_clamp():
    assert measure(FakeGPU(IntegerDatapath()), "int8", "hopper").unit.startswith("hopper")
    clamped = measure(FakeGPU(IntegerDatapath(saturate=True)), "int8")
    assert clamped.arithmetic.saturate and dict(clamped.facts)["2^18 times 127^2"] == str(2**31 - 1)


def test_special_values_are_told():
    facts = dict(measure(FakeGPU(get_unit("hopper.wgmma").mode("bf16", "bf16", "fp32")), "bf16").facts)
    assert facts["bits of NaN times 1"] == facts["bits of Inf times 0"] == "0x7FFFFFFF"
    assert facts["bits of Inf times 1"] == "0x7F800000"
    assert facts["bits of sum of -0 and -0"] == facts["bits of negative, rounded to zero"] == "0x00000000"
    facts = dict(measure(FakeGPU(get_unit("hopper.wgmma").mode("tf32", "tf32", "fp32")), "tf32").facts)
    assert facts["operands rounded to TF32"] == "nearest_even"


PROBES = ("NaN times 1", "sum of -0 and -0", "X - X", "negative, rounded to zero", "Inf times 0", "Inf - Inf",
          "Inf times 1")  # fmt: skip
SPECIAL = {  # by mode and rounding of sums: the bits of each probe's result, - where none is asked
    ("bf16", "nearest_even"): "7FFFFFFF 00000000 00000000 00000000 7FFFFFFF 7FFFFFFF 7F800000",
    ("bf16", "nearest_away"): "7FFFFFFF 00000000 00000000 80000001 7FFFFFFF 7FFFFFFF 7F800000",
    ("fp16", "nearest_even"): "7FFFFFFF 00000000 00000000 - 7FFFFFFF 7FFFFFFF 7F800000",
    ("fp16 sums", "nearest_away"): "7FFF 0000 0000 0000 7FFF 7FFF 7C00",
    ("fp16 sums", "down"): "7FFF 0000 0000 8001 7FFF 7FFF 7C00",
    ("e4m3", "down"): "7FFFFFFF 00000000 00000000 - - - -",
}


@pytest.mark.parametrize(("mode", "sums"), SPECIAL)
def test_each_special_value_by_its_bits(mode, sums):
    call, rounding = bench_call(mode), Rounding(mode=sums)
    hidden = Datapath(block=4, fraction_bits=None, rounding=rounding, accumulator=call.accumulate)
    found = probes.special_values(probes.Bench(FakeGPU(hidden), call, 4))
    bits = SPECIAL[mode, sums].split()
    assert found == {name: f"0x{x}" for name, x in zip(PROBES, bits, strict=True) if x != "-"}


def test_the_probe_of_negative_zeros_has_negative_zeros():
    asked = []
    bench = SimpleNamespace(
        call=bench_call("bf16"), at=lambda *_: [], ask=lambda found: asked.extend(found) or torch.zeros(len(found))
    )
    probes.special_values(bench)
    assert [math.copysign(1.0, x) * y for _, x, y in asked[1]] == [-1.0, -1.0] and asked[1][0][0] != asked[1][1][0]


def test_a_library_that_splits_the_probes_differently_does_not_confuse():
    hidden = get_unit("hopper.wgmma").mode("tf32", "tf32", "fp32")
    found = measure(FakeGPU(hidden, GemmPlan(k_tile=32, split=4)), "tf32", "hopper")
    assert found.known and found.unit == "hopper.wgmma"


def test_what_a_card_refuses_is_told():
    gpu = FakeGPU(get_unit("hopper.wgmma").mode("bf16", "bf16", "fp32"), memory=1)
    (found,) = measure_all(gpu, ["bf16"])
    assert not found.known and "no memory" in str(found)


def test_unknown_modes_and_families():
    refused("mode='fp4' is not possible; choose one of bf16, fp16", bench_call, "fp4")
    names = [family_of(x) for x in [(7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)]]
    assert names == ["volta", "turing", "ampere", "ada", "hopper", "blackwell", "rtx_blackwell", ""]
