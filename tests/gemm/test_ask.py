# SPDX-License-Identifier: Apache-2.0
"""Asking cuBLASLt: what it is told about a call, what comes of its answer, and on which machines it is asked at all."""

import contextlib
import random
from itertools import product

import pytest
import torch

from fmtsim.gemm.targets import ask
from fmtsim.gemm.targets.ask import Asker, normalised, open_asker
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.gemm.targets.target import get_target
from fmtsim.support.errors import DeviceError
from tests.support.cublaslt import chosen, library
from tests.support.refusals import refused

BF16 = Kind("bf16", "bf16", torch.bfloat16)
FP8 = Kind("e4m3", "e5m2", torch.bfloat16, scaling="tensor")
# Of the stand-in: attributes of the descriptor by number, 60: workspace, 61: answers wanted, 62: reductions; then the
# four matrices.
A, B, C, D = range(64, 88, 6)
TYPE, ROWS, COLUMNS, LD, BATCH, STRIDE = range(6)


def told(*questions):
    """Return what the library knows when it is asked the last of some questions."""
    lib = library()
    asker = Asker(lib)
    for question in questions:
        asker.choice(question)
    return [lib.told(place) for place in range(88)]


@pytest.mark.parametrize(
    ("kind", "compute", "alpha", "a", "b", "out", "mib"),
    [
        (BF16, 68, 0, 14, 14, 14, 32),
        (BF16._replace(out=torch.float32), 68, 0, 14, 14, 0, 32),
        (Kind("fp16", "fp16", torch.float16), 68, 0, 2, 2, 2, 32),
        (Kind("fp16", "fp16", torch.float16, "16f"), 64, 2, 2, 2, 2, 32),
        (Kind("tf32", "tf32", torch.float32, "tf32"), 77, 0, 0, 0, 0, 32),
        (BF16._replace(bias=True), 68, 0, 14, 14, 14, 1),
        (FP8, 68, 0, 28, 29, 14, 1),
        (FP8._replace(out=torch.float32), 68, 0, 28, 29, 0, 1),
    ],
)
def test_dtypes_and_workspace(kind, compute, alpha, a, b, out, mib):
    known = told(Question(kind, 0, 3, 32, 64))
    assert (known[0], known[1], known[60], known[61]) == (compute, alpha, mib << 20, 1)
    assert known[62] == 7  # any reduction
    assert (known[A], known[B], known[C], known[D]) == (b, a, out, out)  # the library's A is torch's second operand


@pytest.mark.parametrize(("reductions", "mask"), [("none", 0), ("fp32", 2), ("any", 7)])
def test_settings(reductions, mask):
    known = told(Question(BF16._replace(room=1024, reductions=reductions), 0, 3, 32, 64))
    assert (known[60], known[62]) == (1024, mask)


def test_an_fp8_result_has_a_c_and_a_bias_of_16_bits():
    known = told(Question(FP8._replace(out=torch.float8_e4m3fn, bias=True), 0, 3, 32, 64))
    assert (known[C], known[D], known[26]) == (2, 28, 2)
    assert known[C + ROWS : C + STRIDE] == known[D + ROWS : D + STRIDE] == [32, 3, 32, 1]


@pytest.mark.parametrize(
    ("layout", "transposed", "a", "b"),
    [(0, (1, 0), (64, 32), (64, 3)), (1, (0, 0), (32, 64), (64, 3)), (2, (0, 1), (32, 64), (3, 64)),
     (3, (1, 1), (64, 32), (3, 64))],
)  # fmt: skip
def test_layouts(layout, transposed, a, b):
    known = told(Question(BF16, layout, 3, 32, 64))
    assert (known[3], known[4]) == transposed
    for begin, (rows, columns) in ((A, a), (B, b), (C, (32, 3)), (D, (32, 3))):
        assert known[begin + ROWS : begin + 6] == [rows, columns, rows, 1, 0]


def test_a_batch_has_strides():
    known = told(Question(BF16, 0, 3, 32, 64, 5))
    for begin, stride in ((A, 64 * 32), (B, 64 * 3), (C, 32 * 3), (D, 32 * 3)):
        assert known[begin + BATCH : begin + 6] == [5, stride]


def test_a_bias_is_an_epilogue():
    plain, biased = told(Question(BF16, 0, 3, 32, 64)), told(Question(BF16._replace(bias=True), 0, 3, 32, 64))
    assert (plain[7], plain[8], plain[26]) == (1, 0, 0)
    assert (biased[7], biased[26]) == (4, 14) and biased[8]


@pytest.mark.parametrize(
    ("scaling", "fast", "modes"),
    [("tensor", False, (0, 0)), ("tensor", True, (0, 0)), ("row", True, (3, 3)), ("row_block_128", False, (4, 4)),
     ("block_128", False, (5, 4)), ("mx", False, (2, 2)), ("nvfp4", False, (1, 1))],
)  # fmt: skip
def test_scales(scaling, fast, modes):
    known = told(Question(FP8._replace(scaling=scaling, fast_accum=fast), 0, 3, 32, 64))
    assert (known[31], known[32], known[25]) == (*modes, fast) and known[17] and known[18]


def test_descriptors_that_are_changed_say_what_new_ones_say():
    rng = random.Random(1)
    kinds = (BF16, BF16._replace(bias=True), FP8, Kind("tf32", "tf32", torch.float32, "tf32"))
    questions = [
        Question(rng.choice(kinds), rng.randrange(4), *(rng.randrange(1, 50) for _ in "mnk"), rng.choice((1, 1, 3)))
        for _ in range(60)
    ]
    for last, question in enumerate(questions, 1):
        changed, new = told(*questions[:last]), told(question)
        same = [i for i in range(88) if i not in (8, 17, 18)]  # pointers
        assert [changed[i] for i in same] == [new[i] for i in same]


def test_answers():
    asker = Asker(library())
    for layout, m, n, k in product(range(4), (1, 64, 65), (8, 13, 48), (8, 100, 4096, 4100)):
        question = Question(BF16, layout, m, n, k)
        assert asker.choice(question) == chosen(question)
    assert asker.choice(Question(Kind("fp4", "fp4", torch.bfloat16), 0, 64, 48, 4096)) is None  # no type of the library
    assert asker.choice(Question(BF16._replace(out=torch.float64), 0, 64, 48, 4096)) is None


@pytest.mark.parametrize(
    ("attributes", "choice"),
    [
        ((66, 9, 0, 2, 3, 36), Choice(66)),
        ((66, 9, 7, 2, 3, 36), Choice(66, 7, 2)),
        ((39, 20, -1, 2, 0, 35), Choice(39, -1, 0, 20, 35)),
        ((39, 20, 1, 2, 0, 35), Choice(39)),
        ((63, 20, 6, 2, 0, 15), Choice(63, 6, 2, 2, 15)),
        ((63, 20, 6, 2, 1, 15), Choice(63, 6, 2, 1, 15)),
        ((63, 20, 1, 0, 1, 15), Choice(63, 1, 0, 0, 15)),
        ((21, 9, 1, 4, 3, 20), Choice(21, 1, 0, 0, 20)),
        ((13, 9, 4, 2, 94, 0), Choice(13, 4, 2, 94)),
    ],  # fmt: skip
)
def test_what_decides_no_order_is_left_out(attributes, choice):
    assert normalised(*attributes) == choice


@pytest.mark.parametrize(("status", "refuses"), [(7, True), (15, True), (1, False), (14, False)])
def test_a_library_that_refuses_or_fails(status, refuses):
    lib = library()
    asker = Asker(lib)
    lib.fail_with(status)
    try:
        if refuses:
            assert asker.choice(Question(BF16, 0, 64, 48, 4096)) is None
            return
        with pytest.raises(DeviceError, match=f"AlgoGetHeuristic fails with status {status} for Question"):
            asker.choice(Question(BF16, 0, 64, 48, 4096))
        refused(f"cublasLtCreate fails with status {status}; see with nvidia-smi", Asker, lib, error=DeviceError)
    finally:
        lib.fail_with(0)


class Engine:
    """The CUDA engine of a machine with an H200, second of two GPUs."""

    def __init__(self, versions=(), setting=None):
        self.versions, self.setting = list(versions), setting
        self.cublaslt = library

    def other_gpu(self, text, families, index):
        assert "H200" in text and "hopper" in families
        return None if index == 1 else "another card"

    def other_versions(self, text):
        return self.versions

    def other_settings(self, index, *, workspaces):
        assert not workspaces  # which a question names
        return self.setting


@pytest.mark.parametrize(
    ("engine", "asked"),
    [(Engine(), True), (Engine(versions=["torch 3"]), False), (Engine(setting="NVIDIA_TF32_OVERRIDE=1"), False)],
)
def test_only_the_very_card_and_library_are_asked(engine, asked, monkeypatch):
    ask._gpu_index.cache_clear()
    ask._asker.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(ask, "load_engine", lambda name: engine)
    question, target = Question(BF16, 0, 64, 48, 4096), get_target("h200")
    try:
        assert ask.choice(question, target) == (chosen(question) if asked else None)
        library().fail_with(14)
        assert ask.choice(question, target) is None  # which ends in a guess, and that warns
        library().fail_with(0)
        monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("in a forked process")))
        refused("cuBLASLt cannot be asked here: in a forked process", open_asker, error=DeviceError)
    finally:
        library().fail_with(0)
        ask._gpu_index.cache_clear()
        ask._asker.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    assert ask.choice(Question(BF16, 0, 64, 48, 4096), get_target("h200")) is None
    refused("torch has no GPU with cuBLASLt here; ask on a machine with an NVIDIA GPU", open_asker, error=DeviceError)
