# SPDX-License-Identifier: Apache-2.0
"""The one resolver: what a call comes to, what is kept, and what makes it look again."""

import json
import os
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import Datapath, GemmPlan, get_format, get_unit
from fmtsim.gemm.products.resolver import gemm_call, resolve
from fmtsim.gemm.targets.target import PLANS
from fmtsim.gemm.units import unit as units
from fmtsim.gemm.units.unit import Mode, Unit, register_unit
from fmtsim.spec.call import SCALE_KINDS, GemmCall, scale_kind
from fmtsim.spec.gemm_spec import gemm_spec_from_json
from tests.support.bits import assert_same_bits
from tests.support.gemm_oracle import definition, sums
from tests.support.operands import wide

BF16 = get_format("bf16")
CALL = GemmCall(operation="mm", m=64, n=64, k=4096, a="bf16", b="bf16", out=torch.bfloat16)


def test_a_unit_and_a_target_are_resolved_once():
    for who in ({"target": "hopper.wgmma"}, {"target": "h200"}, {"target": Datapath()}):
        call = replace(CALL, **who)
        assert resolve(call) is resolve(replace(call))
        assert resolve(call).datapath == get_unit("hopper.wgmma").mode("bf16", "bf16") or who != {"target": "h200"}


@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")
def test_sizes_matter_where_a_plan_may_depend_on_them():
    def asked(k, **who):
        return resolve(gemm_call("mm", (BF16, BF16), (64, 64, k), torch.float32, accumulate="fp32", **who))

    assert asked(64, target="hopper.wgmma") is asked(1 << 20, target="hopper.wgmma")
    assert asked(64, target="h200").plan != asked(1 << 16, target="h200").plan


def test_a_spec_says_where_it_comes_from_and_its_text_does_not():
    spec = resolve(replace(CALL, target="h200"))
    assert (spec.unit, spec.accumulate, spec.sum_dtype, spec.stochastic) == (
        "hopper.wgmma",
        "fp32",
        torch.float32,
        False,
    )
    again = gemm_spec_from_json(spec.to_json())
    assert again == spec and hash(again) == hash(spec) and again.unit is None
    assert resolve(replace(CALL, target=Datapath(rounding="stochastic"))).stochastic


def test_another_unit_under_the_name_is_seen(monkeypatch):
    monkeypatch.setattr(units, "_units", dict(units._units))
    for bits in (10, 20):
        path = Datapath(block=4, fraction_bits=bits)
        mode = Mode(inputs=("bf16",), accumulate="fp32", datapath=path, evidence="a test", strength="defined")
        register_unit(Unit(name="test.unit", modes=(mode,)), overwrite=True)
        assert resolve(replace(CALL, target="test.unit")).datapath == path


def test_an_edited_plan_file_is_read_again(tmp_path):
    record = json.loads((PLANS / "chain.json").read_text())
    path = tmp_path / "mine.json"
    for number, every in enumerate((32, 64)):
        record["kernels"]["any"] = {"promote_every": every}
        record["rules"] = [{"when": {}, "kernel": "any", "split": 1, "basis": "rule", "reason": "a test"}]
        path.write_text(json.dumps(record))
        path.touch()
        os.utime(path, ns=(number, number))
        assert resolve(replace(CALL, target=str(path))).plan.promote_every == every


def test_a_format_that_was_never_registered_is_judged():
    fmt = replace(get_format("e4m3"), name="private")
    spec = resolve(gemm_call("mm", (fmt, fmt), (1, 1, 8), torch.float32, target="exact"))
    assert spec.a is fmt
    with pytest.raises(fmtsim.errors.ArgumentError, match="unit hopper.wgmma does not take private x private"):
        resolve(gemm_call("mm", (fmt, fmt), (1, 1, 8), torch.float32, target="hopper.wgmma"))


@pytest.mark.parametrize(
    "plan",
    [
        GemmPlan(k_tile=8),
        GemmPlan(k_tile=6, split=3),
        GemmPlan(k_tile=5, split=2, residue_first=True),
        GemmPlan(promote_every=12),
        GemmPlan(instruction_k=3),
    ],
    ids=["tiles", "parts", "residue", "promoted", "instructions"],
)
def test_groups_without_scales_follow_any_plan(plan):
    """Only blocks of scales must not be cut; a unit without scales has none."""
    path = Datapath(block=8, group=2)
    a, b = wide(3, 45, seed=1).bfloat16(), wide(4, 45, seed=2).bfloat16()
    got = fmtsim.mm(a, b.mT, target=path, plan=plan, out_dtype=torch.float32)
    assert_same_bits(got, sums(a, b, definition("bf16", unit=path, plan=plan)))


def test_kinds_of_scales():
    found = {
        kind: {scale_kind(rows, extent.block, name) for rows in extent.rows for name in extent.formats or ("fp32",)}
        for kind, extent in SCALE_KINDS.items()
    }
    assert found == {kind: {kind} for kind in SCALE_KINDS} | {"row_block_128": {"block_128"}}
    assert scale_kind(1, 64, "fp32") is scale_kind(1, 32, "fp32") is scale_kind(16, 32, "e8m0") is None
