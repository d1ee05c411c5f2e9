# SPDX-License-Identifier: Apache-2.0
"""Settings of a target: what they change of a question to cuBLASLt, and of the order that a target gives a call."""

import json
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim.gemm.targets.question import (
    DEFAULT,
    NAMED,
    Choice,
    Kind,
    Settings,
    answers_question,
    book_question,
    kind_from_list,
    library_question,
)
from fmtsim.gemm.targets.target import Target, get_target
from tests.support.refusals import refused
from tests.support.targets import fp8, linear, mm
from tools.calibrate.book_writer import kind_to_list

INVARIANT = NAMED["batch_invariant"]
FLOAT32 = Settings(reductions="fp32")
BF16 = mm(64, 4096, 14336, "bf16", out=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "settings", "room", "reductions"),
    [
        (BF16, DEFAULT, 0, "any"),
        (BF16, INVARIANT, 1024, "none"),
        (replace(BF16, operation="linear", bias=True), INVARIANT, 1024, "none"),
        (replace(BF16, out=torch.float32), INVARIANT, 1024, "none"),
        (mm(64, 64, 64, "tf32"), INVARIANT, 1024, "any"),  # torch forbids reductions of 16-bit operands alone
        (fp8(64, 64, 4096), INVARIANT, 1024, "any"),
        (BF16, FLOAT32, 0, "fp32"),
        (replace(BF16, out=torch.float32), FLOAT32, 0, "any"),  # nothing is rounded to 16 bits there
        (mm(64, 64, 64, "fp16", out=torch.float16, accumulate="fp16"), FLOAT32, 0, "any"),
        (replace(linear(64, 64, 64, "fp16"), accumulate="fp16"), FLOAT32, 0, "fp32"),
        (BF16, Settings(workspace=1 << 17), 1 << 17, "any"),
        (BF16, Settings(library="cublaslt"), 1 << 20, "any"),  # the workspace is that of cublasLt then
        (replace(BF16, operation="linear", bias=True), Settings(workspace=1 << 17), 0, "any"),
    ],
)
def test_what_torch_asks(call, settings, room, reductions):
    kind = library_question(call, settings).kind
    assert (kind.room, kind.reductions) == (room, reductions)
    assert kind._replace(room=0, reductions="any") == library_question(call).kind


def test_nothing_of_16_bits_is_split_where_vllm_is_batch_invariant():
    usual, invariant = get_target("h200"), get_target("h200.batch_invariant")
    assert usual.find(BF16).plan.split == 3
    for m in (1, 64, 4096):
        found = invariant.find(replace(BF16, m=m))
        assert (found.plan.split, found.basis) == (1, "rule")
        assert "answers with the settings batch_invariant" in found.plan.source


def test_small_results_of_fp8_are_split_there_too():
    """1 KiB of workspace holds partial sums of up to 96 results: one row is added otherwise than the same row of 64."""
    for name in ("h100.batch_invariant", "h200.batch_invariant"):
        orders = [get_target(name).find(fp8(m, 16, 8592, out=torch.bfloat16)) for m in (1, 64)]
        assert [order.plan.split for order in orders] == [3, 1]


def test_sums_in_float32():
    """Kernels named nvjet add parts in float32 anyway; what CUTLASS's would be instead is not known."""
    target = get_target("h200").with_settings(reductions="fp32")
    nvjet, cutlass = target.find(BF16), target.find(replace(BF16, n=4100, k=14332))
    assert (nvjet.basis, nvjet.plan.split, cutlass.basis) == ("reported", 3, "guess")
    assert "with the settings reductions=fp32 in the book h200" in nvjet.plan.source
    assert target.find(replace(BF16, out=torch.float32)) == get_target("h200").find(replace(BF16, out=torch.float32))
    question = library_question(BF16, FLOAT32)
    assert book_question(question) == library_question(BF16)
    assert answers_question(Choice(66, 3, 2), question) and not answers_question(Choice(24, 3, 2), question)
    assert answers_question(Choice(24, 3, 2), library_question(BF16))


def test_recorded_rules_are_about_usual_settings():
    """16x3072x128256 in FP8 was recorded in 5 parts; with a workspace of 1 KiB it is another call."""
    call = fp8(16, 3072, 128256)
    assert (get_target("h200").find(call).basis, get_target("h200").find(call).plan.split) == ("recorded", 5)
    assert get_target("h200.batch_invariant").find(call).plan.split == 1
    int8 = get_target("h200.batch_invariant").find(mm(64, 64, 64, "int8", out=torch.int32, accumulate="int32"))
    assert int8.basis == "rule"  # which cuBLASLt is not asked about


def test_products_take_the_name():
    a, b = torch.randn(3, 4096).bfloat16(), torch.randn(256, 4096).bfloat16().t()
    invariant = fmtsim.mm(a, b, target="H200.batch_invariant")
    alone = fmtsim.mm(a[:1], b, target="h200.batch_invariant")
    assert torch.equal(invariant[:1].view(torch.int16), alone.view(torch.int16))
    assert fmtsim.explain_mm(a, b, target="h200.batch_invariant").plan.split == 1


def test_files(tmp_path):
    target = get_target("h200.batch_invariant")
    record = target.to_dict()
    assert record["settings"] == {
        "workspace": 131072, "lt_workspace": 1024, "reductions": "none", "library": "cublaslt"
    }  # fmt: skip
    assert Target.from_dict(record).settings == INVARIANT
    assert "settings" not in get_target("h200").to_dict()
    (tmp_path / "mine.json").write_text(json.dumps({"base": "h100", "settings": {"reductions": "fp32"}}))
    assert get_target(tmp_path / "mine.json").settings == FLOAT32
    assert target.with_settings(**DEFAULT._asdict()).name == "h200"
    persistent = get_target("h200.triton_persistent").with_settings("batch_invariant")
    assert (persistent.name, persistent.overrides) == ("h200.triton_persistent.batch_invariant", 5)
    for wrong, message in (
        ({"settings": "fast"}, "mine.json: plan: settings 'fast' are unknown"),
        (
            {"units": []},
            "mine.json: plan: 'units' does not go with 'base', which settings, library, architecture, source",
        ),
        ({"kernels": {"any": {}}}, "mine.json: plan: kernel 'any' is one of h100's, whose rules name it; rename it"),
        (
            {"rules": [{"when": {}, "kernel": "any", "split": 1, "basis": "rule", "reason": "r"}]},
            r"mine.json: plan: rules\[0\]: kernel='any' is not listed; kernels are",
        ),
    ):
        (tmp_path / "mine.json").write_text(json.dumps({"base": "h100"} | wrong))
        refused(message, get_target, tmp_path / "mine.json")


def test_old_files_of_kinds_are_read():
    """Seven fields, which is also how kinds under usual settings are written."""
    kind = Kind("bf16", "bf16", torch.bfloat16)
    assert (kind.room, kind.reductions) == (0, "any")
    written = kind_to_list(kind)
    assert len(written) == 7 and kind_from_list(written) == kind
    invariant = library_question(BF16, INVARIANT).kind
    assert kind_from_list(kind_to_list(invariant)) == invariant


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"settings": "batchinvariant"},
            r"settings 'batchinvariant' are unknown; did you mean 'batch_invariant'\?; known",
        ),
        ({"workspace": 5}, "no target has a record of cuBLASLt under the settings workspace=5; known settings are"),
        ({"nonsense": 3}, "nonsense is not a setting of a target; settings are workspace, lt_workspace, reductions"),
        ({"reductions": "none"}, "under the settings reductions=none; known settings are reductions=fp32; batch_inv"),
        ({"settings": 7}, "no target has a record of cuBLASLt under the settings 7; known settings are"),
    ],
)
def test_refused_settings(settings, message):
    refused(message, get_target("h200").with_settings, **settings)
