# SPDX-License-Identifier: Apache-2.0
"""Plan files: what was found is written, read back by target=, and gives the GPU's bits."""

import json
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim.gemm.targets import doubts
from fmtsim.gemm.targets.kernel import Kernel
from fmtsim.gemm.targets.target import Target, get_target, list_targets
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order
from fmtsim.support.errors import ArgumentError, PlanUnknownWarning
from tests.support.fake_gpu import FakeGPU, fp8, mm
from tests.support.refusals import refused
from tools.calibrate.arithmetic import Measured, measure
from tools.calibrate.campaign import Finding, calibrate, scalar_unit
from tools.calibrate.planfile import cover, entries_of, kernels_of, merged, plan_file, plan_text, write_plan

HOPPER = get_unit("hopper.wgmma")
BF16 = HOPPER.mode("bf16", "bf16", "fp32")


def units(call):
    return HOPPER.mode(call.a, call.b, call.accumulate)


def hidden(call):
    """A library of the test's: FP8 promotes, ragged K goes to slices, long K is split."""
    promote = 128 if call.a == "e4m3" and not call.fast_accum else None
    if call.k % 8:
        length = -(-call.k // 4 // 8) * 8
        return GemmPlan(k_tile=32, part_k=length, split=-(-call.k // length), residue_first=True, partial="bf16")
    tile = 128 if call.a == "e4m3" else 64
    if call.k >= 2048 and call.m < 64:
        return GemmPlan(k_tile=tile, split=3, promote_every=promote)
    return GemmPlan(promote_every=promote)


CALLS = [
    *(mm(m, n, k) for m in (8, 64) for n in (32, 96) for k in (64, 512, 2048, 2304)),
    *(mm(m, 40, k) for m in (8, 24) for k in (300, 513)),
    *(fp8(m, 64, k, fast) for m in (16, 64) for k in (256, 2048) for fast in (True, False)),
]


@pytest.fixture(scope="module")
def found():
    return calibrate(FakeGPU(units, hidden), CALLS, units)


@pytest.fixture(scope="module")
def measured():
    modes = ("bf16", "e4m3")
    return [measure(FakeGPU(units(fp8(1, 1, 1) if mode == "e4m3" else mm(1, 1, 1))), mode, "hopper") for mode in modes]


@pytest.mark.parametrize("name", list_targets())
def test_texts_of_plans_hold_all_of_a_target(name):
    """Trees as well as the book."""
    target = get_target(name)
    assert json.loads(plan_text(target)) == target.to_dict()


def test_a_plan_file_gives_the_bits_of_the_card(found, measured, tmp_path):
    path = tmp_path / "my_plan.json"
    write_plan(plan_file("my_plan", "a test", found, units, measured=measured, date="2026-11-21"), path)
    target = get_target(path)
    assert target.units[:2] == ((("bf16",), "fp32", "hopper.wgmma"), (("e4m3",), "fp32", "hopper.wgmma"))
    gpu = FakeGPU(units, hidden)
    generator = torch.Generator().manual_seed(3)
    for call in CALLS:
        resolution = target.resolve(call, strict=True)
        assert resolution.basis in ("recorded", "rule")
        assert same_order(call.k, units(call), resolution.plan, hidden(call))
        a, b = (torch.randn(rows, call.k, generator=generator) for rows in (call.m, call.n))
        if call.a == "e4m3":
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
            one = torch.ones(1)
            y = fmtsim.scaled_mm(a, b.t(), one, one, out_dtype=call.out, use_fast_accum=call.fast_accum, target=path)
        else:
            a, b = a.bfloat16(), b.bfloat16()
            y = fmtsim.mm(a, b.t(), target=str(path))
        assert torch.equal(y.view(torch.int16), gpu.ask(call, a, b).view(torch.int16)), call


def test_calls_that_were_not_asked_warn(found, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(doubts, "_guesses", Counter())
    write_plan(plan_file("my_plan", "a test", found, units, measured=measured), tmp_path / "p.json")
    a = torch.zeros(7, 4096, dtype=torch.bfloat16)
    with pytest.warns(PlanUnknownWarning, match="no recorded accumulation order for mm M=7 N=7 K=4096"):
        fmtsim.mm(a, a.t(), target=str(tmp_path / "p.json"))


def test_one_rule_replaces_many_entries():
    calls = [mm(m, n, k) for m in (8, 16, 24, 32) for n in (32, 64, 96, 128) for k in (64, 128, 256, 512)]
    calls += [mm(8, n, 4096) for n in (32, 64)]
    some = calibrate(FakeGPU(units, hidden), calls, units, seeds=(1,))
    target = plan_file("t", "a test", some, units, measured=[known_unit()])
    assert [rule.basis for rule in target.rules] == ["recorded", "rule", "rule"]
    assert target.rules[0].split == {"8x32": {"4096": 3}, "8x64": {"4096": 3}}
    assert target.rules[1].when["k"] == {"max": 512}
    assert target.rules[1].reason == "No call with K up to 512 is split: 64 calls of other sizes were recorded."
    assert target.resolve(mm(100, 200, 384)).basis == "rule"


def known_unit():
    return Measured(mode="bf16", arithmetic=BF16, unit="hopper.wgmma", facts=(), outputs=10)


def test_what_was_not_found_stays_a_guess():
    call = mm(16, 64, 512)
    lost = Finding(call=call, status="not found", note="tiles differ")
    kept = Finding(call=replace(call, k=64), status="verified", plans=(GemmPlan(),), outputs=256)
    target = plan_file("t", "a test", [lost, kept], units, measured=[known_unit()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert target.resolve(call).basis == "guess"
    assert target.resolve(kept.call).basis == "recorded"
    assert "no accumulation order was found" in target.rules[0].reason


def test_a_base_keeps_its_rules_and_is_not_listed_again():
    base = replace(get_target("h200"), books=())
    calls = [mm(64, 64, 3840), mm(64, 1024, 7168)]  # known; a guess
    found = [
        Finding(call=call, status="verified", plans=(GemmPlan(k_tile=64, split=split),), outputs=256)
        for call, split in zip(calls, (2, 3), strict=True)
    ]
    target = plan_file("h200", base.library, found, units, base=base, date="2026-11-21")
    assert len(target.rules) == len(base.rules) + 1
    assert target.rules[0].split == {"64x1024": {"7168": 3}}
    assert target.kernels[target.rules[0].kernel] == Kernel(plan=GemmPlan(k_tile=64))
    assert target.resolve(calls[1]).basis == "recorded"
    assert target.source.startswith(base.source)


def test_few_kernels_cover_all_calls():
    first = Finding(call=mm(8, 8, 4096), status="verified", plans=(GemmPlan(k_tile=64, split=4),), outputs=1)
    second = Finding(call=mm(8, 8, 960), status="verified", plans=(GemmPlan(k_tile=64, split=3),), outputs=1)
    third = Finding(call=mm(8, 8, 64), status="verified", plans=(GemmPlan(),), outputs=1)
    entries, beyond = entries_of([first, second, third], units)
    assert not beyond
    ((kernel, calls),) = cover(entries)
    assert kernel == Kernel(plan=GemmPlan(k_tile=64)) and [parts for _, parts in calls] == [4, 3, 1]


def test_orders_that_a_plan_file_cannot_say_stay_guesses():
    plan = GemmPlan(k_tile=24, residue_first=True, split=2)  # a residue first belongs to slices
    found = [Finding(call=mm(8, 64, 650), status="verified", plans=(plan,), outputs=1)]
    entries, beyond = entries_of(found, units)
    assert not entries and beyond == [found[0].call]


@pytest.mark.parametrize("plan", [GemmPlan(k_tile=64, split=5, owner="interleaved"),
                                  GemmPlan(k_tile=64, split=5, reduce="pairwise"),
                                  GemmPlan(k_tile=64, split=5, reduce="in_place", partial="bf16")])  # fmt: skip
def test_interleaved_and_pairwise_orders_and_sums_in_place(plan):
    found = [Finding(call=mm(8, 64, 640), status="verified", plans=(plan,), outputs=1)]
    target = plan_file("t", "a test", found, units, measured=[known_unit()])
    got = target.resolve(found[0].call).plan
    assert same_order(640, BF16, got, plan) and (got.reduce, got.partial) == (plan.reduce, plan.partial)


def test_a_bias_added_after_a_rounded_split():
    call = GemmCall(operation="linear", m=64, n=65, k=640, a="bf16", b="bf16", out=torch.bfloat16, bias=True)
    plan = GemmPlan(k_tile=64, split=2, partial="bf16", bias_after_rounding=True)
    found = [Finding(call=call, status="verified", plans=(plan,), outputs=1)]
    got = plan_file("t", "a test", found, units, measured=[known_unit()]).resolve(call).plan
    assert same_order(640, BF16, got, plan) and got.bias_after_rounding and got.partial == plan.partial


def test_calls_that_run_without_the_matrix_unit():
    strided = GemmPlan(k_tile=1, split=16, owner="interleaved")
    calls = [mm(1, 768, 1280, "tf32"), mm(1, 768, 1280), mm(64, 64, 512)]
    gpu = FakeGPU(lambda call: scalar_unit(call) if call.m == 1 else units(call),
                    lambda call: strided if call.m == 1 else GemmPlan())  # fmt: skip
    found = calibrate(gpu, calls, units)
    assert [x.unit for x in found] == ["fp32_fma", "fp32_fma", None]
    modes = [
        Measured(mode=mode, arithmetic=BF16, unit="hopper.wgmma", facts=(), outputs=1) for mode in ("bf16", "tf32")
    ]
    target = Target.from_dict(json.loads(plan_text(plan_file("t", "a test", found, units, measured=modes))))
    resolved = [target.resolve(call, strict=True) for call in calls]
    assert [(x.unit, x.a.name) for x in resolved] == [
        ("fp32_fma", "fp32"),
        ("fp32_fma", "bf16"),
        ("hopper.wgmma", "bf16"),
    ]
    assert [x.plan.owner for x in resolved] == ["interleaved", "interleaved", "contiguous"]
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(1, 1280, generator=generator), torch.randn(768, 1280, generator=generator)
    y = fmtsim.mm(a, b.t(), target=target, allow="tf32")
    assert torch.equal(y, gpu.ask(calls[0], a, b))  # float32, though TF32 is allowed
    rounded = fmtsim.mm(a, b.t(), target=scalar_unit(calls[0]), plan=resolved[0].plan, allow="tf32")
    assert not torch.equal(y, rounded)
    rows = dict(fmtsim.explain_mm(a, b.t(), target=target, allow="tf32").rows)
    assert rows["operands"] == "float32 not rounded to TF32" and rows["unit"].startswith("fp32_fma")


def test_all_kernels_that_give_an_order_are_named_the_likely_ones_first():
    plain = list(kernels_of(mm(8, 8, 1024), GemmPlan(), units))
    assert [(kernel.plan.k_tile, parts) for kernel, parts in plain] == [
        (tile, 1) for tile in (64, 128, 32, 16, 256, 512, 8)
    ]  # fmt: skip
    slices = GemmPlan(k_tile=64, part_k=512, split=2, residue_first=True)
    found = list(kernels_of(mm(8, 8, 1024), slices, units))
    assert {(kernel.align, kernel.line) for kernel, _ in found if kernel.slices} == {(8, 64), (4, 32), (8, 0), (4, 0)}
    odd = [kernel for kernel, _ in kernels_of(mm(8, 8, 648), replace(slices, part_k=328), units)]
    assert {(kernel.align, kernel.line) for kernel in odd} == {(8, 64), (8, 0)}  # 324 in steps of 4
    every = list(kernels_of(mm(8, 8, 1000), GemmPlan(k_tile=24, split=2), units))
    assert [(kernel.plan.k_tile, parts) for kernel, parts in every if not kernel.slices] == [(24, 2)]


def test_same_order():
    assert not same_order(512, BF16, GemmPlan(k_tile=128, split=4, partial="bf16"), GemmPlan(promote_every=128))
    assert not same_order(512, BF16, GemmPlan(k_tile=128, split=2, promote_every=64), GemmPlan(promote_every=64))
    assert same_order(512, BF16, GemmPlan(k_tile=64, split=4), GemmPlan(k_tile=128, split=4))
    assert same_order(512, BF16, GemmPlan(promote_every=128), GemmPlan(k_tile=128, split=4))
    assert same_order(512, BF16, GemmPlan(), GemmPlan(k_tile=64, residue_first=True))
    assert not same_order(512, BF16, GemmPlan(k_tile=64, split=4), GemmPlan(k_tile=64, split=4, owner="interleaved"))
    assert not same_order(512, BF16, GemmPlan(k_tile=64, split=4), GemmPlan(k_tile=64, split=4, reduce="pairwise"))
    assert not same_order(500, BF16, GemmPlan(), GemmPlan(k_tile=64, residue_first=True))


def test_rules_that_say_the_same_are_joined():
    rules = [{"when": {"a": a, "out": out}, "kernel": "x", "split": 1, "basis": "rule", "reason": ""}
             for a in ("bf16", "fp16") for out in ("fp32", "bf16")]  # fmt: skip
    (rule,) = merged(rules)
    assert rule["when"] == {"a": ["bf16", "fp16"], "out": ["bf16", "fp32"]}


def test_the_text_is_json_with_a_line_for_each_size(found, measured):
    text = plan_text(plan_file("my_plan", "a test", found, units, measured=measured))
    assert json.loads(text)["name"] == "my_plan"
    assert '   "8x32": {"64":1,"512":1,"2048":3,"2304":3}' in text


def test_nothing_to_write():
    with pytest.raises(ArgumentError, match="no accumulation order was verified"):
        plan_file("t", "a test", [Finding(call=mm(1, 1, 1), status="skipped")], units)
    kept = Finding(call=mm(8, 8, 64), status="verified", plans=(GemmPlan(),), outputs=1)
    refused("no measured unit has a name in the catalogue", plan_file, "t", "a test", [kept], units)
