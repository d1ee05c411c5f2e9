"""Plan files: their names, what may stand in them, and what their conditions and rules of splits mean."""

import json
from dataclasses import replace

import pytest

from fmtsim.errors import ArgumentError
from fmtsim.gemm.targets.kernel import Kernel, Splits, matches
from fmtsim.gemm.targets.target import PLANS, get_target, list_targets, target_from_dict, target_to_dict
from fmtsim.spec.gemm_spec import record_from_dict, record_to_dict
from fmtsim.spec.plan import GemmPlan
from tests.support.targets import mm


def test_names_and_files(tmp_path):
    assert list_targets() == ["a100", "b200", "chain", "h100", "h200"]
    assert get_target("H200") is get_target("h200") is get_target(get_target("h200"))
    assert repr(get_target("h200")).startswith("Target('h200': NVIDIA H200")
    own = tmp_path / "mine.json"
    own.write_text((PLANS / "chain.json").read_text().replace('"name": "chain"', '"name": "mine"'))
    assert get_target(own).name == get_target(str(own)).name == "mine"
    with pytest.raises(ArgumentError, match="unknown target 'h20'; did you mean 'h200'"):
        get_target("h20")
    with pytest.raises(ArgumentError, match="cannot be read: No such file"):
        get_target(tmp_path / "none.json")
    own.write_text("[]")
    with pytest.raises(ArgumentError, match="is not a plan file"):
        get_target(own)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_plan_files_round_trip(path):
    record = json.loads(path.read_text())
    target = get_target(path.stem)
    assert record["name"] == path.stem
    assert target_to_dict(target) == record
    assert target_to_dict(target_from_dict(record)) == record
    for rule in target.rules:
        assert rule.reason
        tables = rule.split.values() if isinstance(rule.split, dict) else []
        assert all(count >= 1 and int(k) >= 1 for table in tables for k, count in table.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rules": [{"when": {"k_": 1}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]}, "'k_' is not"),
        ({"rules": [{"when": {"k": {"least": 1}}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
         "a dict has min, max and multiple_of"),
        ({"rules": [{"when": {}, "kernel": "x", "split": 1, "basis": "rule", "reason": "r"}]}, "kernel='x' is not"),
        ({"rules": [{"when": {}, "kernel": "any", "split": "x", "basis": "rule", "reason": "r"}]}, "split='x' is not"),
        ({"rules": [{"when": {}, "kernel": "any", "split": 1, "basis": "hope", "reason": "r"}]}, "basis='hope' is not"),
        ({"units": [[["e4m3"], "fp32", "ampere.mma"]]}, "unit ampere.mma does not take e4m3 x e4m3"),
        ({"kernels": {"any": {"tile": 3}}}, "unexpected keyword argument 'tile'"),
    ],
)  # fmt: skip
def test_bad_plan_files(change, message, tmp_path):
    record = target_to_dict(get_target("chain")) | change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ArgumentError, match=message):
        get_target(path)


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
    assert replace(rule, workspace=None, largest=1000).count(mm(64, 64, 1 << 16), 64) == (1, True)


def test_ragged_tiles_with_an_empty_part_are_a_guess():
    kernel = Kernel(plan=GemmPlan(k_tile=64))
    assert kernel.plan_of(mm(88, 16, 44832), 35)[1] is False
    assert kernel.plan_of(mm(88, 16, 44800), 34)[1] is True


def test_plans_of_promotions_and_a_bias():
    with pytest.raises(ArgumentError, match="successive_scales=True needs scaled_promotion=True, which multiplies"):
        GemmPlan(promote_every=128, successive_scales=True)
    record = {"k_tile": 64, "promote_every": 128, "scaled_promotion": True, "successive_scales": True}
    for split, after in ((1, True), (2, True), (1, "unsplit"), (2, "unsplit")):
        kernel = Kernel.from_dict(record | {"bias_after_rounding": after})
        assert kernel.to_dict() == record | {"bias_after_rounding": after}
        plan, _ = kernel.plan_of(mm(64, 64, 512), split)
        assert (plan.successive_scales, plan.bias_after_rounding) == (True, split == 1 or after is True)
        assert record_from_dict(json.loads(json.dumps(record_to_dict(plan)))) == plan
    with pytest.raises(ArgumentError, match="bias_after_rounding='split' is not possible; choose false, true or"):
        Kernel.from_dict({"bias_after_rounding": "split"})


def test_an_older_word_for_what_the_library_reported_still_reads():
    rule = {"when": {}, "kernel": "any", "split": 1, "basis": "logged", "reason": "a test"}
    record = target_to_dict(get_target("chain")) | {"kernels": {"any": {}}, "rules": [rule]}
    assert target_from_dict(record).rules[0].basis == "reported"
