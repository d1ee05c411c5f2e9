# SPDX-License-Identifier: Apache-2.0
"""Which products of a model a target leaves out or guesses the order of; fmtsim doctor and fmtsim invariance."""

import json
import re

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.lab.analysis import scan_gemm
from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.cli.output import MISMATCH, version_of
from tests.support.refusals import refused
from tests.support.targets import hopper

SHAPE = (64, 1000, True)


@pytest.fixture(scope="module")
def target():
    """A library that drops the end of K = 1000 where M is above 4, and of which other K up to 48 are not known."""
    rules = [
        {"when": {"k": 1000, "m": {"min": 5}}, "kernel": "drops", "split": 4, "basis": "rule", "reason": "a test"},
        {"when": {"k": {"min": 49}}, "kernel": "adds all", "split": 1, "basis": "reported", "reason": "a test"},
    ]
    kernels = {"drops": {"k_tile": 64, "k_end": 960}, "adds all": {"k_tile": 64}}
    return hopper("drops", kernels, rules)


@pytest.fixture
def files(target, tmp_path, monkeypatch):
    """A plan file and a file of shapes in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drops.json").write_text(json.dumps(target.to_dict()))
    (tmp_path / "shapes.txt").write_text("64 1000 bias\n")
    (tmp_path / "model.py").write_text("import torch\n\n\ndef small():\n    return torch.nn.Linear(1000, 64)\n")


def test_what_is_found(target):
    found = scan_gemm([SHAPE], target, [1, 2, 4, 8, 16])
    assert [(x.product, x.tokens, x.call.m, x.left_out, x.padded_k) for x in found.left_out] == [
        ("forward", 8, 8, 40, 1024), ("forward", 16, 16, 40, 1024)]  # fmt: skip
    assert {(x.product, x.call.k) for x in found.guesses} == {("wgrad", k) for k in (1, 2, 4, 8, 16)}
    assert str(found).splitlines()[-1] == (
        "15 calls, orders: 8 by the library's own choice for this call, 2 by a rule, 5 by a guess; 2 leave products out"
    )
    assert [line.split("  ")[-1].strip() for line in str(found).splitlines()[2:-1]] == [
        "leaves out 40 of 1000 products; pad K to 1024", "the order is a guess"]  # fmt: skip
    assert "8, 16" in str(found) and repr(found) == str(found) and found._repr_html_().count("<tr>") == 3
    record = json.loads(json.dumps(found.to_dict()))
    assert (record["calls"], record["bases"]) == (15, {"reported": 8, "rule": 2, "guess": 5})
    assert record["left_out"][0] == {
        "layer": "64x1000 + bias", "product": "forward", "tokens": 8, "basis": "rule", "left_out": 40, "padded_k": 1024,
        "source": "a test", "operation": "linear", "m": 8, "n": 64, "k": 1000, "batch": 1, "bias": True,
        "operands": "bf16"}  # fmt: skip


def test_nothing_wrong_is_a_line_alone(target):
    found = scan_gemm([SHAPE], target, range(1, 5), passes=["forward", "dgrad"])
    assert str(found) == ("8 calls, orders: 8 by the library's own choice for this call; 0 leave products out")
    assert not found.left_out and not found.guesses


def test_many_tokens_are_counted(target):
    line = str(scan_gemm([SHAPE], target, range(1, 11), passes=["wgrad"])).splitlines()[2]
    assert "1, 2, 3, 4, 5, 6 ... 10 (10)" in line


def test_what_layers_pad_is_asked_as_it_is_called():
    layer = fmtsim.convert(nn.Linear(256, 64).bfloat16(), format="e4m3", target="h200")
    calls = scan_gemm(layer, tokens=[5, 40]).calls
    assert [(x.product, x.call.m, x.call.k) for x in calls] == [
        ("forward", 5, 256), ("forward", 40, 256), ("dgrad", 5, 64), ("dgrad", 40, 64), ("wgrad", 64, 16),
        ("wgrad", 64, 48)]  # fmt: skip
    refused("scan_gemm got tokens=0; pass numbers of rows from 1", scan_gemm, layer, tokens=[4, 0])


def test_doctor_gemm(files, capsys):
    words = ["doctor", "--gemm", "--shapes", "shapes.txt", "--target", "drops.json"]
    assert main([*words, "--tokens", "1..16"]) == MISMATCH
    assert re.search("  8, 16 +leaves out 40 of 1000 products; pad K to 1024\n", capsys.readouterr().out)
    assert main([*words, "--tokens", "4", "--no-gradients", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == []
    own = ["doctor", "--gemm", "--model", "model.py:small", "--target", "drops.json"]
    assert main([*own, "--tokens", "8", "--no-gradients"]) == MISMATCH
    assert capsys.readouterr().out.splitlines()[2].startswith("(model)  forward  bf16      8       leaves out 40")


def test_doctor_alone_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"fmtsim {version_of('fmtsim')}, torch ") and "\ncpu: " in said
    assert main(["doctor", "--json"]) == 0 and "engines" in json.loads(capsys.readouterr().out)


def test_invariance(files, capsys):
    words = ["invariance", "--shapes", "shapes.txt", "--target", "drops.json", "--sizes", "1..8", "--no-gradients"]
    pytest.importorskip("matplotlib")
    assert main([*words, "--plot", "bands.png"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "64x1000 + bias  forward  bf16      2        1        M=5           parts 1 -> 4, products end at none -> 960",
        "1 products, 8 batch sizes from 1 to 8: 1 change with the batch"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["products"][0]["changes"][0]["size"] == 5
    with open("bands.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctor --model gpt2", "--model goes with --gemm; add it"),
        ("doctor --no-gradients", "--no-gradients goes with --gemm; add it"),
        ("doctor --gemm", "--target is missing: name a GPU with its library, such as h200, or a plan file"),
        (
            f"doctor --gemm --target h200 --model {__file__}:b --shapes {__file__}",
            ":b is asked about alone; leave other",
        ),
        ("doctor --gemm --target h200 --model a.py:b", "--model a.py:b: there is no file a.py"),
        ("doctor --gemm --target h200 --model gpt3", "--model 'gpt3' is unknown; did you mean 'gpt2'"),
        ("doctor --gemm --target h200 --shapes a\0b", "--shapes a\0b: there is no file a\0b; pass"),
        (f"doctor --gemm --target h200 --tokens {'9' * 5000}", "is not possible; write counts such as 1,77,512"),
        ("doctor --gemm --target h200 --tokens x", "--tokens 'x' is not possible"),
        ("invariance --target h200 --sizes 1..99999", "--sizes '1..99999' is too long a range; choose 65536 or less"),
        ("invariance --target h200 --sizes 0", "--sizes '0' is not possible"),
        ("invariance --target h200 --plot x.txt", "--plot x.txt does not end in .png"),
        ("invariance --target h200 --plot nowhere/x.png", "there is no folder nowhere"),
    ],
)
def test_bad_input(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_layers_of_transformers_have_their_weight_the_other_way_round():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(24, 16)), nn.Parameter(torch.ones(16))

    calls = [x.call for x in scan_gemm(Conv1D(), "h200", [8]).calls]
    assert [(x.m, x.n, x.k, x.a_layout, x.b_layout) for x in calls] == [
        (8, 16, 24, "row", "column"), (8, 24, 16, "row", "row"), (24, 16, 8, "column", "column")]  # fmt: skip
