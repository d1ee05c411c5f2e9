# SPDX-License-Identifier: Apache-2.0
"""fmtsim trace and fmtsim bisect: files, functions, exit codes, and what is wrong with the words."""

import json

import pytest

from fmtsim.lab.analysis.trace import Trace
from fmtsim.lab.cli.main import main

MODELS = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).bfloat16()
    return model, torch.randn(4, 64).bfloat16()

def other():
    model, batch = build()
    with torch.no_grad():
        model[2].weight[3, 5] += 1
    return model, batch, lambda y: y.float().sum()

def fails():
    model, batch = build()
    return model, batch[:, :3]

def number():
    return 3

def language():
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "weights.pt").write_bytes(b"PK" + bytes(range(98)))
    monkeypatch.chdir(tmp_path)


def run(capsys, words):
    status = main(words.split())
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_two_files_and_a_function(capsys):
    convert = "trace --model models.py:build --format e4m3 --target"
    assert run(capsys, f"{convert} hopper.wgmma --out a.safetensors --tensors 2") == (
        0, "25 operations of Sequential on cpu; wrote a.safetensors\n",
    )  # fmt: skip
    assert run(capsys, f"{convert} ada.mma --out b.safetensors --tensors 0,2")[0] == 0
    assert {name: set(Trace.load(f"{name}.safetensors").tensors) for name in "ab"} == {"a": {2}, "b": {0, 2}}
    status, text = run(capsys, "bisect a.safetensors b.safetensors")
    assert status == 1 and text.startswith("first difference  0 forward: fprop, operation 2\n") and "values  " in text
    status, text = run(capsys, "bisect a.safetensors a.safetensors --json")
    assert status == 0 and json.loads(text)["equal"] is True
    status, text = run(capsys, "bisect models.py:build a.safetensors --json")
    assert status == 1 and json.loads(text)["a"]["operation"] == "Linear" and json.loads(text)["alone"][1] > 0


def test_two_functions(capsys):
    assert run(capsys, "bisect models.py:build models.py:build")[0] == 0
    run(capsys, "trace --model models.py:build --level aten --out aten.safetensors")
    status, text = run(capsys, "bisect models.py:build aten.safetensors")
    assert status == 2 and "models.py:build was traced at level 'modules', aten.safetensors at 'aten'" in text
    status, text = run(capsys, "bisect models.py:build models.py:other")
    assert status == 1 and text.startswith("first difference  2 forward: Linear, operation 2\n")
    assert "weight: the runs began with another parameter" in text and "at [3, 5]: a 0x" in text


def test_a_model_of_train_gets_bytes(capsys):
    status, text = run(capsys, "trace --model models.py:language")
    assert status == 0 and "Sequential on cpu, loss 5." in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace --model models.py:number",
         "models.py:number returned 3; return (model, batches), (model, batches, loss), or"),
        ("trace --model models.py:fails",
         "--model models.py:fails: RuntimeError: mat1 and mat2 shapes cannot be multi"),
        ("trace --model models.py:fails",
         "; it was called with the first batch of (model, batches), or else with random bytes"),
        ("trace --model models.py:none", "models.py has no function 'none'"),
        ("trace --model models.py:build --target ada.mma",
         "--target needs --recipe or --format, which convert the model"),
        ("trace --model models.py:build --out a.pt", "--out a.pt does not end in .safetensors; choose another name"),
        ("bisect models.py:fails models.py:build",
         "models.py:fails against models.py:build: RuntimeError: mat1 and mat2"),
        ("bisect a.safetensors models.py:build", "a.safetensors is not there; pass a file that fmtsim trace --out wr"),
        ("bisect a.st b.st", "a.st is not there; pass a file that fmtsim trace --out wrote, or a model as FILE.py"),
        ("bisect weights.pt models.py:build", "weights.pt is not a trace; pass a file that fmtsim trace --out wrote,"),
        ("bisect models.py:build models.py", "models.py is not a trace; pass"),
    ],
)  # fmt: skip
def test_words_that_are_wrong(capsys, words, message):
    status, text = run(capsys, words)
    assert status == 2 and message in text and text.count("\n") == 1
