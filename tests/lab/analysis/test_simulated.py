# SPDX-License-Identifier: Apache-2.0
"""Traces and bisections of models that ``simulate`` computes."""

import json

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.lab.cli.main import main

MODELS = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8)).bfloat16()
    return model, torch.randn(64, 64).bfloat16()
"""


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    namespace: dict = {}
    exec(MODELS, namespace)
    with torch.random.fork_rng():
        return namespace["build"]()


def test_recording_changes_and_counts_nothing():
    model, batch = model_and_batch()
    with fmtsim.simulate(strict=True) as plain:
        expected = model(batch)
        expected.sum().backward()
    model.zero_grad()
    with fmtsim.simulate(strict=True) as run, fmtsim.trace(model, tensors=True) as recording:
        y = model(batch)
        y.sum().backward()
    assert y.equal(expected)
    assert run.exact == plain.exact
    trace = recording.trace
    assert trace.device == "simulated h200"
    assert trace.tensors[trace.operations[-1].index]


def test_bisect_names_the_first_operator_that_the_gpu_computes_otherwise():
    model, batch = model_and_batch()
    plain = fmtsim.trace(model, batch, level="aten")
    with fmtsim.simulate(strict=True):
        gpu = fmtsim.trace(model, batch, level="aten")
        again = fmtsim.trace(model, batch, level="aten")
    assert fmtsim.bisect(gpu, again).equal
    found = fmtsim.bisect(gpu, plain)
    assert found.kind == "operation"
    assert found.a.operation in ("aten::addmm", "aten::native_layer_norm")


def test_trace_and_bisect_of_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "--model", "models.py:build", "--simulate", "h200", "--out", "gpu.safetensors"]) == 0
    text = capsys.readouterr().out
    assert "on simulated h200; wrote gpu.safetensors" in text.replace("\n", " ") or "simulated h200" in text
    assert "operators exact" in text
    assert main(["bisect", "gpu.safetensors", "models.py:build", "--simulate", "h200"]) == 0
    capsys.readouterr()
    status = main(["bisect", "gpu.safetensors", "models.py:build", "--json"])
    assert status == 1 and json.loads(capsys.readouterr().out)["kind"] == "operation"
    assert main(["trace", "--model", "models.py:build", "--simulate", "h20"]) == 2
    assert "target='h20' cannot be simulated; did you mean 'h200'" in capsys.readouterr().err


def test_training_of_the_command_line(tmp_path, capsys):
    sizes = {"steps": 1, "layers": 1, "width": 32, "heads": 1, "context": 16, "batch-size": 2, "checkpoint-every": 0}
    words = ["--quiet", *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    (tmp_path / "text").write_text("a text of some length, to be read again and again. " * 200)
    words = ["train", *words, "--data", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    assert main([*words, "--simulate", "h200"]) == 0
    assert "operators exact" in capsys.readouterr().out
    assert main([*words, "--simulate", "h200", "--check", "native"]) == 2
    assert "--simulate computes on the CPU; leave --check and --device out" in capsys.readouterr().err


def test_assert_same_bits_of_tensors():
    x = torch.tensor([1.0, 0.0, float("nan")])
    fmtsim.assert_same_bits(x, x.clone())
    with pytest.raises(
        AssertionError, match=r"the tensors' bits differ(.|\n)*\[1\]: actual 0x00000000 = 0.0, expected 0x8"
    ):
        fmtsim.assert_same_bits(x, torch.tensor([1.0, -0.0, float("nan")]))
    other = x.clone()
    other.view(torch.int32)[2] += 1  # another NaN
    with pytest.raises(AssertionError, match="different           1"):
        fmtsim.assert_same_bits(x, other)
