# SPDX-License-Identifier: Apache-2.0
"""``benchmarks.suite gpu``: what it measures and says. Speed itself is not tested; without a GPU the CPU stands in."""

import itertools
import json

import pytest
import torch

import fmtsim.cuda
from benchmarks.suite import device as device_benchmarks
from benchmarks.suite import gpu, gpu_cases
from benchmarks.suite.__main__ import main
from benchmarks.suite.gpu import CASES, Result, measure, worst
from fmtsim.formats.registry import get_format

# The goals on an H200: least, stretch.
GOALS = {
    "NEAREST": (0.95, 0.99), "TABLES": (0.95, 0.99), "STOCHASTIC": (0.90, 0.95), "SCALED": (0.90, 0.97),
    "TWO_LEVEL": (0.58, 0.64), "CODES": (0.85, 0.95), "CODES_STOCHASTIC": (0.85, 0.95), "CODES_TABLES": (0.85, 0.95),
    "FP8_FAST": (16, 27), "FP8_SLOW": (15, 27), "HALF": (10, 20), "BLACKWELL": (12, 25), "TF32": (5, 12),
    "USER": (5, 12), "CALL": (15, 8), "LAYER": (1.5, 1.25),
}  # fmt: skip
QUICK = ("exact fp8 Hopper", "exact int8")
named = {case.name: case for case in CASES}


def test_cases_have_names_formats_and_rows():
    assert len(named) == len(CASES)
    for case in CASES:
        assert (case.product is None) == (case.row.kind != "product") == bool(case.format)
        if case.format:
            get_format(case.format)
    rows = {case.row for case in CASES}
    for name, goal in GOALS.items():
        row = getattr(gpu_cases, name)
        assert row in rows and (row.least, row.stretch) == goal
    assert all(row.least is None for row in rows - {getattr(gpu_cases, name) for name in GOALS})


def test_rows_hold_both_dtypes_where_the_cast_is_none():
    for case in CASES:
        if case.name.endswith(" float32") and case.format not in ("bf16", "tf32"):
            assert named[case.name.removesuffix("float32") + "bfloat16"].row == case.row


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the CPU stand in: actions run once, and take 1, 2, ... seconds."""

    def turns(actions, repeats, ahead=0):
        for action in actions:
            action()
        return tuple(float(1 + index) for index in range(len(actions)))

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "TOKENS", 64)
    monkeypatch.setattr(gpu, "WIDTH", 128)
    monkeypatch.setattr(gpu, "_CALLS", 2)
    monkeypatch.setattr(gpu, "in_turns_on_device", turns)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(
    "name",
    [name if case.row.kind != "product" or name in QUICK else pytest.param(name, marks=pytest.mark.slow)
     for name, case in named.items()],
)  # fmt: skip
def test_every_case_is_measured(name, on_cpu):
    case = named[name]
    found = measure(case, repeats=3, elements=8192, side=128)
    record = found.to_dict()
    assert record["case"] == name and record["row"] == case.row.name and record["value"] == found.value > 0
    if case.row.kind in ("quantize", "encode"):
        assert found.value == record["bytes"] / (2 * 8192 * case.dtype.itemsize) / 2
    if case.row.kind == "layer":
        assert found.value == 2


def test_bytes_are_those_that_a_cast_moves(on_cpu):
    bits = {"encode mxfp4 float32": 32 + 4.25, "encode e2m1 stochastic bfloat16": 16 + 4, "nvfp4 bfloat16": 16 + 32,
            "e4m3 float32": 64, "fp16 bfloat16": 16 + 32}  # fmt: skip
    for name, each in bits.items():
        assert measure(named[name], repeats=3, elements=8192).details["bytes"] == each * 1024


def result(name, value):
    return Result(case=named[name], value=value, seconds=0.25)


def test_a_row_is_as_good_as_its_worst_case():
    results = [result("e4m3 float32", 0.97), result("e5m2 float32", 0.94), result("linear layer nvfp4", 1.6),
               result("linear layer mxfp4", 1.1), result("call e4m3", 7.9)]  # fmt: skip
    for order in itertools.permutations(results):
        found = worst(order)
        assert [found[row].value for row in (gpu_cases.NEAREST, gpu_cases.LAYER, gpu_cases.CALL)] == [0.94, 1.6, 7.9]
    lines = device_benchmarks.gpu_summary(results).splitlines()[2:]
    assert [line.split("  ")[0] for line in lines] == ["quantize to nearest even", gpu_cases.LAYER.name,
                                                       gpu_cases.CALL.name]  # fmt: skip
    assert ["MISS" in line for line in lines] == [True, True, False] and "stretch" in lines[2]
    assert "microxcaling mxfp4 3.2" in lines[1]


@pytest.mark.parametrize(
    ("name", "value", "cells"),
    [
        ("e4m3 float32", 0.96, ["0.960", "of", "a", "copy", "0.95", "0.99", "pass", "250.000"]),
        ("exact fp8 Hopper", 27.0, ["27.0", "TMAC/s", "16", "27", "stretch", "250.000"]),
        ("exact int8", 61.0, ["61.0", "TMAC/s", "-", "-", "-", "250.000"]),
        ("call e4m3", 15.1, ["15.1", "us", "15", "8", "MISS", "250.000"]),
        ("linear layer mxfp4", 1.25, ["1.250", "of", "bf16", "1.5", "1.25", "stretch", "250.000"]),
    ],
)
def test_a_line_shows_the_goal_and_the_verdict(name, value, cells):
    line = device_benchmarks.gpu_table([result(name, value)]).splitlines()[-1]
    assert line.removeprefix(name).split() == cells


def test_other_software_that_is_missing_or_fails_is_said(monkeypatch):
    def fails(repeats, size):
        raise ValueError("no such card\nat all")
        yield

    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "mmaemu" else object())
    monkeypatch.setattr(gpu, "_compiled", fails)
    found = list(gpu.measure_others(3, 4096, 64))
    assert found == ["mmaemu is not installed", "triton did not run: ValueError: no such card"]
    other = gpu.Other(row=gpu_cases.FP8_FAST, software="mmaemu 1", value=6.2, ours=17.0, differing=0)
    assert other.to_dict()["row"] == gpu_cases.FP8_FAST.name
    text = device_benchmarks.others_table([other, *found])
    assert "mmaemu 1" in text and text.endswith(found[1])


@pytest.mark.skipif(fmtsim.cuda.available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_reason_is_said(capsys):
    assert main(["gpu"]) != 0
    assert "the CUDA engine cannot run: " in capsys.readouterr().err


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ELEMENTS", 1 << 20)
    path = tmp_path / "new" / "record.json"
    words = ["gpu", "--only", "mxfp4*", "--repeats", "3", "--record", str(path)]
    assert main(words) == 0
    assert "mxfp4 stochastic bfloat16" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert len(record["results"]) == 4 and not record["failed"] and record["machine"]["device"]
    assert {row["row"] for row in record["rows"]} == {gpu_cases.SCALED.name, gpu_cases.SCALED_STOCHASTIC.name}


def test_tables_to_the_letter():
    results = [result("e4m3 float32", 0.97), result("e5m2 float32", 0.94), result("linear layer mxfp4", 1.6),
               result("exact int8", 61.0)]  # fmt: skip
    other = gpu.Other(row=gpu_cases.FP8_FAST, software="mmaemu 1", value=6.2, ours=17.0, differing=1234)
    text = "\n".join(
        [
            device_benchmarks.gpu_table(results),
            device_benchmarks.gpu_summary(results),
            device_benchmarks.others_table([other, "no x"]),
        ]
    )
    assert [line.rstrip() for line in text.splitlines()] == TABLES.splitlines()
    assert device_benchmarks.others_table(["no x", "no y"]) == "no x\nno y"
    assert [record["cases"] for record, _, _ in device_benchmarks.rows_of(results)] == [2, 1, 1]


TABLES = """\
work                reached  unit       target  stretch   met       ms
------------------  -------  ---------  ------  -------  ----  -------
e4m3 float32          0.970  of a copy    0.95     0.99  pass  250.000
e5m2 float32          0.940  of a copy    0.95     0.99  MISS  250.000
linear layer mxfp4    1.600  of bf16       1.5     1.25  MISS  250.000
exact int8             61.0  TMAC/s          -        -     -  250.000
row                                            cases  worst case          reached  unit       target  stretch   met  elsewhere
---------------------------------------------  -----  ------------------  -------  ---------  ------  -------  ----  -------------------------------------------
quantize to nearest even                           2  e5m2 float32          0.940  of a copy    0.95     0.99  MISS  torch compiled e4m3 1.00, microxcaling 0.54
linear layer, forward and backward, over bf16      1  linear layer mxfp4    1.600  of bf16       1.5     1.25  MISS  microxcaling mxfp4 3.2
other products                                     1  exact int8             61.0  TMAC/s          -        -     -
row               software  reached  fmtsim  unit    differing results
----------------  --------  -------  ------  ------  -----------------
exact Hopper FP8  mmaemu 1    6.200    17.0  TMAC/s              1,234
no x
"""  # noqa: E501
