# SPDX-License-Identifier: Apache-2.0
"""Plan files and the names of targets: what they may say, and what is told where they are wrong."""

import json
import os

import pytest

from fmtsim.gemm.targets.target import PLANS, Target, get_target, list_targets
from tests.support.refusals import refused

VARIANTS = ("", ".batch_invariant", ".sglang", ".triton_persistent")


def test_names_and_files(tmp_path):
    hopper = [f"{gpu}{variant}" for gpu in ("h100", "h200") for variant in VARIANTS]
    assert list_targets() == ["a100", "a100.triton_persistent", "b200", "chain", "gb200", "gb300", *hopper, "l40s"]
    assert get_target("H200") is get_target("h200") is get_target(get_target("h200"))
    assert repr(get_target("h200")).startswith("Target('h200': NVIDIA H200")
    assert repr(get_target("l40s")) == "Target('l40s': NVIDIA L40S, cuBLAS; rules: 1 rule, 2 guess)"
    own = tmp_path / "mine.json"
    own.write_text((PLANS / "chain.json").read_text().replace('"name": "chain"', '"name": "mine"'))
    assert get_target(own).name == get_target(str(own)).name == "mine"
    refused("unknown target 'h2000'; did you mean 'h200'", get_target, "h2000")
    refused("cannot read .*none.json: No such file", get_target, tmp_path / "none.json")
    own.write_text("[]")
    refused("mine.json: plan: .. is not an object", get_target, own)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_plan_files_round_trip(path):
    record, target = json.loads(path.read_text()), get_target(path.stem)
    if "base" in record:
        base, rules = get_target(record["base"]), record.get("rules", [])
        changed = {name: record[name] for name in ("library", "architecture", "source") if name in record}
        whole = base.to_dict() | changed | {"name": path.stem}
        whole["kernels"] = whole["kernels"] | record.get("kernels", {})
        whole["rules"] = rules + whole["rules"]
        for name in ("settings", "overrides"):
            whole[name] = target.to_dict().get(name)
        assert target.to_dict() | {"settings": whole["settings"], "overrides": whole["overrides"]} == whole
        assert target.overrides == len(rules) + base.overrides
        assert Target.from_dict(target.to_dict()).to_dict() == target.to_dict()
        return
    assert record["name"] == path.stem
    assert target.to_dict() == record
    assert Target.from_dict(record).to_dict() == record
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
        ({"kernels": {"any": {"tile": 3}}}, "bad.json: plan.kernels.any: a GemmPlan has no field 'tile'"),
        ({"kernels": {"any": {"k_tile": "3"}}}, "bad.json: plan.kernels.any: GemmPlan k_tile='3' is not"),
        ({"kernels": {"any": {"align": 0}}}, "plan.kernels.any: align=0, line=0 is not possible; choose an align"),
        ({"kernels": {"any": {"slices": 1}}}, "plan.kernels.any: Kernel slices=1 is not allowed; pass True or False"),
        ({"kernels": {"any": []}}, r"plan.kernels.any: \[\] is not an object; write the fields of a Kernel"),
        ({"kernels": []}, r"plan: Target kernels=\[\] is not allowed; pass a dict"),
        ({"overrides": 99}, "overrides=99 is not possible; choose from 0 to [24] rules"),
        ({"overrides": -1}, "overrides=-1 is not"),
        ({"name": {}}, "bad.json: plan: Target name={} is not allowed; pass text"),
        ({"units": [["e4m3"]]}, "plan: Target units="), ({"units": 3}, "plan: Target units=3 is not allowed"),
        ({"units": [[["e4m3"], "fp32", {}]]}, "plan: Target units="), ({"rules": {}}, "plan.rules: {} is not a list"),
        ({"rules": [{"when": {"k": {"multiple_of": 0}}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
         r"plan.rules\[0\]: k={'multiple_of': 0} is not a condition; multiple_of is 1 or more"),
        ({"rules": [{"when": {"k": "64"}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
         r"plan.rules\[0\]: k='64' is not a condition; it compares whole numbers of 64 bits"),
        ({"rules": [{"when": {"n": {"min": 1 << 64}}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
         r"plan.rules\[0\]: n={'min': 18446744073709551616} is not a condition; it compares whole numbers of 64 bits"),
        ({"kernels": {"any": {"bias_after_rounding": []}}},
         r"plan.kernels.any: bias_after_rounding=\[\] is not possible"),
        ({"rules": [{"when": {"out": {"max": 1}}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
         r"plan.rules\[0\]: out={'max': 1} is not a condition; a dict has min, max and multiple_of"),
        ({"rules": [{"when": {"target": "h200"}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
         r"plan.rules\[0\]: 'target' is not a condition; choose one of operation, m, n, k"),
        ({"rules": [{"when": {}, "kernel": "any", "split": {"1x1": {"8": 0}}, "basis": "rule", "reason": "r"}]},
         r"plan.rules\[0\]: split=0 is not possible; choose 1 or more parts"),
        ({"rules": [{"when": {}, "kernel": "any", "split": 2.0, "basis": "rule", "reason": "r"}]}, "Rule split=2.0 is"),
        ({"rules": [{"when": {}, "kernel": {}, "split": 1, "basis": "rule", "reason": "r"}]}, "Rule kernel={} is not"),
        ({"splits": {"x": {"whole": 1, "tiles_per_part": 0, "certain": []}}},
         "plan.splits.x: tiles_per_part=0, room=1 is not possible; choose tiles_per_part from 1"),
        ({"splits": {"x": {"whole": 1, "tiles_per_part": 2, "certain": [[1]]}}}, r"plan.splits.x: Splits certain=\(\("),
    ],
)  # fmt: skip
def test_bad_plan_files(change, message, tmp_path):
    record = get_target("chain").to_dict() | change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(record))
    refused(message, get_target, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "bad.json is not a valid plan file: 'utf-8' codec can't decode"),
        (b"[" * 100000, "bad.json is not a valid plan file: more than 64 objects or lists inside each other"),
        (b"[1]", r"bad.json: plan: \[1\] is not an object; write the fields of a Target"),
        (b"{}", "bad.json: plan: a Target needs 'name' and 'library'"),
        (b"", "bad.json is not a valid plan file: "),
    ],
)
def test_files_that_are_no_plans(content, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    refused(message, get_target, path)


@pytest.mark.parametrize("name", [None, 5, b"h200", ["h200"], {"h200"}, "a\0.json", "/dev/zero/x.json", "\ud800"])
def test_what_is_no_name_of_a_target(name):
    refused("target|cannot read", get_target, name)
    refused(r"target=int is neither a name, nor a path, .* \(a100", get_target, 10**5000)


def test_a_folder_or_a_pipe_is_no_plan_file(tmp_path):
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("folder", "pipe"):
        refused(f"cannot read .*{name}.json: it is not a file; name one", get_target, tmp_path / f"{name}.json")


def test_an_older_word_for_what_the_library_reported_still_reads():
    rule = {"when": {}, "kernel": "any", "split": 1, "basis": "logged", "reason": "a test"}
    record = get_target("chain").to_dict() | {"kernels": {"any": {}}, "rules": [rule]}
    assert Target.from_dict(record).rules[0].basis == "reported"
