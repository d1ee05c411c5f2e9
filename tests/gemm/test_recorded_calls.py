# SPDX-License-Identifier: Apache-2.0
"""Library calls recorded on an H200, replayed through the public verbs."""

import shutil
from pathlib import Path

import numpy
import pytest
import torch

import fmtsim.torch_engine
from fmtsim.gemm.products import operator
from fmtsim.spec.plan import GemmPlan
from tests.support.bits import assert_same_bits, bits
from tests.support.recorded import GOLDEN, VECTORS, needs_golden, needs_vectors
from tests.support.settled import replayed, settled
from tools.calibrate.replay import gemm_tasks

DATA = Path(__file__).with_name("data") / "h200"


def replays(folder, limit=None):
    return {task.name: task.run(lambda share: None) for task in gemm_tasks([folder], limit)}


def test_every_recorded_call_has_the_recorded_bits():
    found = replays(DATA)
    assert len(found) > 3 and {name: r.first for name, r in found.items() if r.mismatches} == {}


def test_settled_calls_give_their_bits():
    """What earlier recordings lack: slices of TF32, partial sums in 16 bits, small splits, scales of 128 products.

    None of them is a guess.
    """
    seen = 0
    for meta, tensors in settled():
        assert_same_bits(replayed(meta, tensors), tensors["out"], what=meta)
        seen += 1
    assert seen == 9


@pytest.mark.parametrize(
    ("what", "planted"),
    [
        ({"call": "linear"}, GemmPlan()),  # one column with a bias: rounded before the bias and after
        ({"scaling": "block_1x128_1x128"}, GemmPlan(promote_every=128, scaled_promotion=True)),
        (
            {"scaling": "block_1x128_128x128"},
            GemmPlan(promote_every=128, scaled_promotion=True, successive_scales=True),
        ),
    ],
    ids=["linear", "row blocks", "blocks"],
)
def test_another_order_of_roundings_is_seen(what, planted):
    meta, tensors = next((m, t) for m, t in settled() if m | what == m)
    assert not torch.equal(bits(replayed(meta, tensors, plan=planted)), bits(tensors["out"]))


@pytest.fixture(params=["cpu", "torch"])
def engine(request, monkeypatch):
    """Multiply by the CPU engine where it can, then by torch operations alone."""
    if request.param == "torch":
        monkeypatch.setattr(operator, "gemm_engine", lambda spec, a, b: fmtsim.torch_engine)


@needs_vectors
@pytest.mark.parametrize(("limit", "outputs"), [(200, 9_600), pytest.param(None, 240_000, marks=pytest.mark.slow)])
def test_recorded_dot_products(engine, limit, outputs):
    found = replays(VECTORS, limit=limit)
    assert len(found) == 48 and sum(r.outputs for r in found.values()) == outputs
    assert {name: r.first for name, r in found.items() if r.mismatches} == {}


@needs_vectors
def test_a_corrupted_copy_of_a_recording_is_caught(tmp_path):
    path = Path(shutil.copy(VECTORS / "mtc_B200_E4M3_fp16.npz", tmp_path))
    path.chmod(0o600)
    assert replays(tmp_path, limit=100)["mtc_B200_E4M3_fp16"].mismatches == 0
    with numpy.load(path) as file:
        arrays = dict(file)
    arrays["d"][41] ^= 1
    numpy.savez(path, **arrays)
    wrong = replays(tmp_path, limit=100)["mtc_B200_E4M3_fp16"]
    assert wrong.mismatches == 1 and wrong.first.startswith("[41]: actual 0x")


@needs_golden
@pytest.mark.parametrize("engine", ["torch"], indirect=True)
def test_some_recorded_calls(engine):
    found = replays(GOLDEN, limit=3000)
    assert {name: r.first for name, r in found.items() if r.mismatches > r.in_guesses} == {}
    assert sum(r.outputs for r in found.values()) > 20_000


@needs_golden
@pytest.mark.parametrize("engine", ["cpu", pytest.param("torch", marks=pytest.mark.slow)], indirect=True)
def test_all_recorded_calls(engine):
    found = replays(GOLDEN)
    assert {name: r.first for name, r in found.items() if r.mismatches > r.in_guesses} == {}
    assert sum(r.cases for name, r in found.items() if name.startswith("h200")) == 117
    assert sum(dict(r.plans).get("guess", 0) for r in found.values()) <= 1
