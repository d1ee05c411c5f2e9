# SPDX-License-Identifier: Apache-2.0
"""Machines with their libraries: which plan a call gets, what stands behind it, and what plan files may say."""

import itertools
import json
import sysconfig
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy
import pytest
import torch

import fmtsim
from fmtsim.gemm.targets import doubts
from fmtsim.gemm.targets.kernel import Kernel, Splits, matches
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import record_from_dict, record_to_dict
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, PlanUnknownWarning
from tests.support.recorded import GOLDEN, VECTORS, needs_golden
from tests.support.refusals import refused
from tests.support.targets import fp8, linear, mm, resolve

NAMES = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
    "int8": "int8",
}  # fmt: skip


# Measured on an H200 before this table existed (splits read off the kernels' grids).
SPLITS = [
    (fp8(64, 64, 16384), 6), (fp8(256, 256, 16384), 3), (fp8(16, 1024, 8192), 3), (fp8(512, 512, 32768), 1),
    (fp8(1024, 1024, 16384), 1), (fp8(64, 64, 65536), 25), (fp8(64, 64, 8192, fast=False), 3),
    (mm(512, 512, 16384), 4), (mm(256, 256, 16384), 6), (mm(64, 64, 16384), 12), (mm(64, 64, 4096), 3),
    (mm(1, 4096, 4096), 2), (mm(1, 4096, 4096, "fp16"), 3), (mm(8, 4096, 4096, "fp16"), 3),
    (mm(1024, 1024, 16384), 2), (mm(128, 128, 8192), 6), (mm(48, 48, 8192, "fp16"), 6), (mm(4096, 4096, 4096), 1),
]  # fmt: skip


@pytest.mark.parametrize(("call", "split"), SPLITS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_measured_splits(call, split):
    found = resolve(call)
    assert found.plan.split == split
    assert found.basis != "guess"
    assert found.plan.k_tile == (None if split == 1 else 128 if call.a == "e4m3" else 64)
    assert (found.plan.partial, found.plan.owner, found.plan.reduce) == (None, "contiguous", "serial")


@pytest.mark.parametrize(("width", "make"), [(64, mm), (128, fp8)])
def test_small_results_get_a_part_for_every_twenty_tiles(width, make):
    for tiles in range(1, 70):
        spec = resolve(make(16, 16, width * tiles))
        assert spec.plan.split == (1 if tiles <= 40 else 2 if tiles <= 60 else 3), tiles
        assert spec.basis != "guess"


def test_promotion_and_scales():
    assert resolve(fp8(64, 96, 512)).plan.promote_every is None
    assert resolve(fp8(64, 96, 512, fast=False)).plan.promote_every == 128
    assert resolve(fp8(64, 96, 512, scaling="row")).plan.epilogue == "column_row"
    assert resolve(fp8(64, 96, 512, scaling="tensor")).plan.epilogue == "scale"
    blocks = resolve(fp8(128, 256, 512, scaling="block_128"))
    assert (blocks.plan.promote_every, blocks.plan.scaled_promotion, blocks.plan.split) == (128, True, 1)
    assert (blocks.plan.successive_scales, blocks.basis) == (False, "rule")


def test_scales_of_rows_of_128():
    for name in ("h100", "h200", "b200", "chain"):
        plan = resolve(fp8(128, 256, 512, scaling="row_block_128"), name).plan
        assert (plan.promote_every, plan.scaled_promotion, plan.successive_scales) == (128, True, True)
    known = resolve(fp8(64, 128, 8192, scaling="row_block_128"))
    assert (known.plan.k_tile, known.plan.split, known.basis != "guess") == (128, 3, True)
    tiles = {kind: resolve(fp8(64, 128, 7168, scaling=kind)) for kind in ("block_128", "row_block_128")}
    assert {kind: (found.plan.k_tile, found.plan.split, found.basis) for kind, found in tiles.items()} == {
        "block_128": (512, 2, "guess"), "row_block_128": (128, 2, "guess")
    }  # fmt: skip
    assert resolve(fp8(64, 128, 5120, scaling="row_block_128")).basis != "guess"


@pytest.mark.parametrize("name", fmtsim.list_targets())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_an_empty_product_is_zeros_or_the_bias(name, dtype):
    """Nothing is asked of the library's choices: their orders are learned from sizes that are divided by."""
    options = {torch.float16: {"allow": "fp16_accumulation"}, torch.float32: {"allow": "tf32"}}.get(dtype, {})
    for m, n, k, batch in itertools.product((0, 1, 16), (0, 1, 16), (0, 1, 16), (0, 2)):
        if m and n and k and batch:
            continue
        a, b, bias = torch.zeros(batch, m, k), torch.zeros(batch, k, n), torch.arange(float(n)).to(dtype)
        if dtype == torch.float8_e4m3fn:
            if name[:4] not in ("a100", "l40s") and 1 not in (n, k):  # which torch refuses, or that are guesses
                one = torch.ones(())
                y = fmtsim.scaled_mm(torch.zeros(m, k).to(dtype), torch.zeros(n, k).to(dtype).t(), one, one,
                                     bias.bfloat16(), out_dtype=torch.bfloat16, target=name)  # fmt: skip
                assert torch.equal(y, bias.bfloat16().expand(m, n))
            continue
        a, b = a.to(dtype), b.to(dtype)
        assert torch.equal(fmtsim.bmm(a, b, target=name, **options), torch.zeros(batch, m, n, dtype=dtype))
        if batch:
            y = fmtsim.linear(a[0], b[0].mT, bias, target=name, strict=True)
            assert torch.equal(y, bias.expand(m, n))
            assert torch.equal(fmtsim.mm(a[0], b[0], target=name, **options), torch.zeros(m, n, dtype=dtype))
            assert fmtsim.explain_mm(a[0], b[0], target=name, **options).basis == "rule"


def test_a_bias_with_one_column():
    """The sum of one part is rounded before its bias is added, that of several parts is not."""
    known = [(64, 256, 1), (64, 4096, 3), (128, 12288, 9), (8192, 3072, 1), (72, 2560, 1)]
    for m, k, split in known:
        found = resolve(linear(m, 1, k))
        assert (found.plan.split, found.plan.bias_after_rounding, found.basis != "guess") == (split, split == 1, True)
        assert not resolve(linear(m, 1, k, bias=False)).plan.bias_after_rounding
        assert not resolve(linear(m, 8, k)).plan.bias_after_rounding
    assert not resolve(linear(72, 1, 8192)).plan.bias_after_rounding


def test_half_accumulators():
    call = mm(64, 64, 256, "fp16", torch.float16, accumulate="fp16")
    found = resolve(call)
    assert (found.plan.k_tile, found.plan.split, found.plan.round_trip) == (64, 4, True)
    assert (found.plan.partial.name, found.accumulate, found.basis != "guess") == ("fp16", "fp16", True)
    assert found.datapath == get_unit("hopper.mma").mode("fp16", "fp16", "fp16")
    tiny = resolve(replace(call, k=16)).plan
    assert tiny.split == 2 and 8 in (tiny.k_tile, getattr(tiny, "part_k", None))


def test_unaligned_rows():
    plan = resolve(mm(100, 60, 300), strict=True).plan
    assert (plan.k_tile, plan.residue_first, plan.split) == (128, True, 1)
    plan = resolve(mm(33, 65, 129, "fp16")).plan
    assert (plan.k_tile, plan.residue_first, plan.split) == (64, True, 1)
    plan = resolve(mm(33, 65, 129)).plan
    assert (plan.split, plan.instruction_k) == (9, 8)
    assert resolve(mm(33, 65, 129, out=torch.bfloat16)).plan.split == 9
    assert resolve(mm(100, 60, 2050, out=torch.bfloat16)).plan.partial.name == "bf16"  # rounded before they are added


def test_tf32():
    assert resolve(mm(256, 256, 256, "tf32")).plan.split == 1
    half = resolve(mm(64, 64, 64, "tf32"))
    assert half.plan.split == 2 and half.basis != "guess"
    parts = {360: 5, 416: 5, 512: 8, 672: 7, 796: 12}
    for k, count in parts.items():
        assert resolve(mm(160, 128, k, "tf32")).plan.split == count


def test_slices_with_residues_of_their_own():
    plan = resolve(mm(160, 128, 680, "tf32"), strict=True).plan
    assert (plan.k_tile, plan.part_k, plan.split, plan.residue_first) == (16, 68, 10, True)


def golden_calls():
    for path in sorted(GOLDEN.glob("h200_*.npz")):
        for meta in json.loads(str(numpy.load(path)["meta"])):
            half, integer = meta.get("fp16_accumulation"), meta["call"] == "int_mm"
            fmt = "tf32" if meta.get("tf32") else NAMES[meta["a"]]
            scaling = "none" if meta["call"] != "scaled_mm" else "row" if meta["kind"] == "rowwise" else "tensor"
            layouts = {f"{x}_layout": "column" if meta.get(f"{x}_layout") == "col" else "row" for x in "ab"}
            yield GemmCall(
                operation=meta["call"], m=meta["M"], n=meta["N"], k=meta["K"], a=fmt,
                b="tf32" if meta.get("tf32") else NAMES[meta["b"]], out=getattr(torch, meta["out"]),
                accumulate="int32" if integer else "fp16" if half else "fp32", scaling=scaling,
                fast_accum=meta.get("use_fast_accum", True), bias="bias_dtype" in meta, **layouts,
            )  # fmt: skip


@needs_golden
def test_no_golden_call_is_a_guess():
    calls = list(golden_calls())
    assert len(calls) >= 117
    assert {(call.m, call.n, call.k) for call in calls if resolve(call).basis == "guess"} == set()


@cache
def answers():
    path = VECTORS / "heur_h100pcie_lt12.8.3.14.npz"
    if not path.exists():
        pytest.skip("no table of cuBLASLt answers beside this checkout")
    stored = numpy.load(path)
    one_mib = stored["ws"] == 1
    return {name: stored[name][one_mib].astype(numpy.int64) for name in ("M", "N", "K", "fast", "splitK")}


def test_the_fp8_split_rule_on_an_h100():
    """An H100 PCIe with cuBLASLt 12.8: every one of the answers that the rule calls certain."""
    table = answers()
    keys, places = numpy.unique(numpy.stack([table["M"], table["N"], table["K"]]), axis=1, return_inverse=True)
    rule = get_target("h100").splits["fp8"]
    predicted = numpy.array([rule.count(fp8(*map(int, key)), 128) for key in keys.T])[places.reshape(-1)]
    right = predicted[:, 0] == table["splitK"]
    certain = predicted[:, 1].astype(bool)
    assert (len(right), certain.sum()) == (784504, 767592)
    assert right[certain].all()
    assert right.mean() > 0.9915


def test_guesses_warn_once_and_strict_refuses(monkeypatch):
    monkeypatch.setattr(doubts, "_warned", set())
    monkeypatch.setattr(doubts, "_guesses", Counter())
    call = mm(777, 8, 30000, "fp16")
    target = get_target("h200")
    with pytest.warns(PlanUnknownWarning, match=r"no recorded accumulation order for mm M=777 N=8 K=30000 fp16 x fp16"):
        found = target.resolve(call)
    assert (found.basis, found.plan.verified) == ("guess", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target.resolve(call) == found
    refused(r"pass plan=GemmPlan\(...\), or record the call", target.resolve, call, strict=True)
    with pytest.warns(PlanUnknownWarning) as seen:
        for k in range(30008, 30008 + 8 * 12, 8):
            target.resolve(replace(call, k=k))
    (warning,) = seen
    assert str(warning.message).startswith("10 calls by now have guessed plans, the last: target h200 has no recorded")
    assert str(warning.message).endswith("; guesses of more calls are counted, not named") and "K=30072" in str(
        warning.message
    )
    with pytest.warns(PlanUnknownWarning, match="^target b200"):  # every target has a count of its own
        get_target("b200").resolve(mm(777, 8, 30000, "fp16"))


def test_guesses_of_a_run_are_collected_and_do_not_count(monkeypatch):
    monkeypatch.setattr(doubts, "_warned", set())
    monkeypatch.setattr(doubts, "_guesses", Counter())
    with doubts.collected_guesses() as guesses:
        for m in (777, 778, 778):
            get_target("h200").resolve(mm(m, 8, 30000, "fp16"))
    assert [text.split()[9:11] for text in guesses] == [["M=777", "N=8"], ["M=778", "N=8"]]
    with pytest.warns(PlanUnknownWarning, match="^target h200 .* M=779"):
        get_target("h200").resolve(mm(779, 8, 30000, "fp16"))


def test_a_warning_names_no_line_of_an_installed_package(monkeypatch, tmp_path):
    """A model's file in site-packages calls the product: the line is that of who called the model."""
    monkeypatch.setattr(doubts, "_warned", set())
    monkeypatch.setattr(doubts, "_guesses", Counter())
    installed = f"{sysconfig.get_path('purelib')}/somebodys/model.py"
    space: dict = {"fmtsim": fmtsim}
    exec(compile("def forward(a):\n    return fmtsim.mm(a, a.t(), target='a100')\n", installed, "exec"), space)
    with pytest.warns(PlanUnknownWarning) as seen:
        space["forward"](torch.zeros(4, 10, dtype=torch.bfloat16))
    assert seen[0].filename == __file__


def test_a_warning_names_the_line_that_led_to_it(monkeypatch):
    monkeypatch.setattr(doubts, "_warned", set())
    monkeypatch.setattr(doubts, "_guesses", Counter())
    here, first = __file__, test_a_warning_names_the_line_that_led_to_it.__code__.co_firstlineno
    a = torch.zeros(4, 10, dtype=torch.bfloat16, requires_grad=True)
    config = fmtsim.linear_config(x="bf16", w="bf16", g="bf16", target="a100")
    layer = fmtsim.convert(torch.nn.Sequential(torch.nn.Linear(10, 4, dtype=torch.bfloat16)), config)
    with pytest.warns(PlanUnknownWarning) as seen:
        y = fmtsim.mm(a, a.detach().t(), target="a100")
        doubts._guesses.clear()
        y.sum().backward()
        doubts._guesses.clear()
        layer(torch.zeros(7, 10, dtype=torch.bfloat16))
    assert [(w.filename, w.lineno - first) for w in seen] == [(here, 8), (here, 10), (here, 12)]


def test_rules_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_target("h200").resolve(mm(4096, 4096, 2048), strict=True).basis != "guess"
        assert get_target("h200").resolve(fp8(4096, 4096, 28672), strict=True).basis != "guess"


@pytest.mark.parametrize("name", ["a100", "b200"])
def test_machines_without_recordings_guess(name):
    for fmt in ("bf16", "fp16", "tf32"):
        found = resolve(mm(256, 256, 256, fmt), name)
        assert (found.basis, found.plan.split, found.plan.verified) == ("guess", 1, False)


def test_orders_that_others_measured():
    """Blackwell's FP8 promotes in neither mode; parts are guesses there, and the dropped end follows them."""
    for fast in (True, False):
        assert resolve(fp8(64, 64, 128, fast), "b200").basis == "reported"
        flat = resolve(fp8(64, 64, 4096, fast), "b200")
        assert (flat.plan.promote_every, flat.basis) == (None, "guess")
        assert resolve(fp8(64, 64, 4096, fast), "h100").plan.promote_every == (None if fast else 128)
    for name, k, end in (("b200", 8648, 8640), ("h100", 11528, 11520)):
        lossy = resolve(mm(32, 32, k, "fp16"), name)
        assert (lossy.plan.split, lossy.plan.k_end, lossy.basis) == (9, end, "guess")


def test_chain_never_splits():
    calls = [mm(64, 64, 65536), fp8(64, 64, 65536), fp8(64, 64, 65536, scaling="block_128"), mm(8, 8, 99, "tf32"),
             mm(8, 8, 64, "e2m1", scaling="nvfp4"), mm(8, 8, 64, "e2m1", scaling="mx"), mm(8, 8, 8, "e4m3fnuz"),
             mm(8, 8, 64, "e4m3", scaling="mx"), mm(8, 8, 64, "fp64", torch.float64, accumulate="fp64")]  # fmt: skip
    for call in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = get_target("chain").resolve(call, strict=True)
        assert (found.plan.split, found.plan.k_tile, found.basis) == (1, None, "rule")
    assert get_target("chain").resolve(calls[4]).unit == "blackwell.tcgen05.nvf4"
    assert get_target("chain").resolve(calls[5]).unit == "blackwell.tcgen05.mxf4"
    assert get_target("chain").resolve(calls[7]).unit == "blackwell.tcgen05.mxf8f6f4"


def test_a_unit_that_the_machine_lacks():
    with pytest.raises(
        ArgumentError, match="target a100 has no unit for e4m3 x e4m3 -> fp32 with scaling 'tensor'; it"
    ):
        get_target("a100").resolve(fp8(16, 16, 32))
    with pytest.raises(ArgumentError, match="target h200 has no unit for bf16 x fp16"):
        get_target("h200").resolve(replace(mm(16, 16, 32), b="fp16"))
    with pytest.raises(ArgumentError, match="no unit for e2m1 x e2m1 -> fp32 with scaling 'nvfp4'"):
        get_target("h200").resolve(mm(16, 16, 64, "e2m1", scaling="nvfp4"))


def test_conditions():
    call = mm(64, 48, 4096, a_layout="column")
    for when in ({}, {"m": 64}, {"k": {"min": 4096, "max": 4096, "multiple_of": 64}}, {"out": ["fp32", "bf16"]},
                 {"aligned": True}, {"a_layout": "column"}):  # fmt: skip
        assert matches(when, call)
    for when in ({"m": 65}, {"k": {"max": 4095}}, {"k": {"multiple_of": 60}}, {"out": "bf16"}, {"aligned": False}):
        assert not matches(when, call)
    assert not matches({"aligned": True}, replace(call, m=63))
    assert matches({"aligned": True}, replace(call, m=63, a_layout="row"))
    assert matches({"aligned": True}, mm(8, 1, 64)) and not matches({"aligned": True}, mm(7, 1, 64))
    assert matches({"aligned": True}, mm(1, 8, 64)) and not matches({"aligned": True}, mm(1, 1, 64))


def test_split_rules_say_when_they_are_certain():
    rule = Splits(
        whole=40, tiles_per_part=20, certain=((2, 64000), (None, 4000)), workspace=1 << 20, largest=None, room=213000
    )
    assert rule.count(mm(4096, 4096, 2560), 64) == (1, True)
    assert rule.count(mm(512, 512, 1 << 16), 64) == (1, True)
    assert rule.count(mm(8, 8, 64 * 60), 64) == (2, True)
    assert rule.count(mm(256, 256, 64 * 60), 64) == (2, False)
    assert rule.count(mm(256, 256, 64 * 200), 64) == (3, False)
    assert rule.count(mm(248, 128, 64 * 60), 64) == (2, True)  # areas of 31,744 and 32,000 elements
    assert rule.count(mm(160, 200, 64 * 60), 64) == (2, False)
    assert replace(rule, workspace=None, largest=1000).count(mm(64, 64, 1 << 16), 64) == (1, True)


def test_plans_of_promotions_and_a_bias():
    with pytest.raises(ArgumentError, match="successive_scales=True needs scaled_promotion=True, which multiplies"):
        GemmPlan(promote_every=128, successive_scales=True)
    record = {"k_tile": 64, "promote_every": 128, "scaled_promotion": True, "successive_scales": True}
    for split, after in ((1, True), (2, True), (1, "unsplit"), (2, "unsplit")):
        kernel = Kernel.from_dict(record | {"bias_after_rounding": after})
        assert kernel.to_dict() == record | {"bias_after_rounding": after}
        plan = kernel.split_plan(mm(64, 64, 512), split)
        assert (plan.successive_scales, plan.bias_after_rounding) == (True, split == 1 or after is True)
        assert record_from_dict(json.loads(json.dumps(record_to_dict(plan)))) == plan
    with pytest.raises(ArgumentError, match="bias_after_rounding='split' is not possible; choose false, true or"):
        Kernel.from_dict({"bias_after_rounding": "split"})
