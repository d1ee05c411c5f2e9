# SPDX-License-Identifier: Apache-2.0
"""What each subcommand prints, as text and as JSON."""

import argparse
import importlib
import io
import json
import math
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fmtsim.casts.ops import load_engine
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.lab.cli.main import COMMANDS, build_parser, main


@pytest.fixture
def run(capsys):
    """Run a command line and return its exit code and standard output; nothing may go to standard error."""

    def command(*words: str) -> tuple[int, str]:
        status = main(words)
        captured = capsys.readouterr()
        assert captured.err == ""
        return status, captured.out

    return command


@pytest.fixture
def records(run):
    """Run a command line with --json and return what it printed."""

    def command(*words: str):
        status, text = run(*words, "--json")
        assert status == 0
        return json.loads(text)

    return command


def test_info(run, records):
    status, text = run("info")
    assert status == 0
    for word in ("torch_engine", "numba", "threads of the cpu engine", "folder of compiled kernels"):
        assert word in text
    record = records("info")
    assert {engine["name"] for engine in record["engines"]} == {"torch_engine", "cpu", "cuda"}
    assert record["threads"] >= 1
    assert record["devices"][0]["name"] == "cpu"


@pytest.mark.parametrize(
    ("kind", "hip", "available", "engine", "cost"),
    [
        ("NVIDIA H200", None, None, "cuda", "on an H200, casts at 0.59 to 0.99 of a copy"),
        ("NVIDIA L4", None, None, "cuda", "encoding at 0.39 to 1.02; not measured on this GPU"),
        ("AMD Instinct MI300X", "6.4", "a reason", "torch_engine",
         "torch operations: one operation after another; not measured here"),
    ],
)  # fmt: skip
def test_info_says_what_serves_a_gpu(monkeypatch, records, kind, hip, available, engine, cost):
    properties = SimpleNamespace(name=kind, total_memory=1 << 37, major=9, minor=4)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    engines = {name: load_engine(name) for name in ("cpu", "cuda", "torch_engine")}
    engines["cuda"] = SimpleNamespace(why_unavailable=lambda device=None: available)
    monkeypatch.setattr("fmtsim.lab.cli.machine.load_engine", engines.get)
    device = records("info")["devices"][1]
    about = "ROCm 6.4" if hip else "compute capability 9.4"
    assert (
        device["description"] == f"{kind}, 128 GiB, {about}" and device["engine"] == engine and cost in device["cost"]
    )


def test_info_finds_devices_without_kernels(monkeypatch, run, records):
    """Neither computes in float64."""
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: "Arc A770")
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=False))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = {device["name"]: device for device in records("info")["devices"]}
    assert set(found) == {"cpu", "xpu:0", "mps"} and found["xpu:0"]["description"] == "Arc A770"
    slow = (
        "torch operations: one operation after another, no float64: most block formats, codebooks and products need "
        "the CPU; not measured here"
    )
    assert found["mps"]["engine"] == found["xpu:0"]["engine"] == "torch_engine" and found["mps"]["cost"] == slow
    assert "what it costs" in run("info")[1]


def test_info_says_why_an_engine_is_missing(monkeypatch, records):
    monkeypatch.setitem(sys.modules, "numba", None)
    engine = records("info")["engines"][1]
    assert engine["name"] == "cpu"
    assert not engine["available"]
    assert engine["reason"].startswith("numba cannot be imported: ")


def test_formats_lists_all(run, records):
    assert [record["name"] for record in records("formats")] == list_formats()
    _, text = run("formats")
    assert len(text.splitlines()) == len(list_formats()) + 2


def test_formats_filters(run, records):
    assert {record["name"] for record in records("formats", "mxfp*")} >= {"mxfp4", "mxfp8_e4m3"}
    assert [record["name"] for record in records("formats", "--kind", "codebook")] == list_formats("codebook")
    (e4m3,) = records("formats", "float8_e4m3fn")
    assert (e4m3["name"], e4m3["max"], e4m3["bits"]) == ("e4m3", 448.0, 8)
    (spelled,) = records("formats", "e3m3")
    assert spelled["max"] == get_format("e3m3").max
    _, text = run("formats", "nvfp4")
    assert "e2m1 in 1x16, scale e4m3 by amax x fp32 tensor scale" in text
    assert re.search(r"max  max with scales .*\n.*\nnvfp4 +block +4.5 +6 +2688 ", text)
    (nvfp4,) = records("formats", "nvfp4")
    assert (nvfp4["element_max"], nvfp4["max"], nvfp4["min"]) == (6.0, 2688.0, -2688.0)


def test_table_of_every_code(run, records):
    status, text = run("formats", "e2m1", "--codes")
    assert status == 0
    assert "max            6" in text
    codes = records("formats", "e2m1", "--codes")["codes"]
    assert [code["value"] for code in codes][:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert (codes[9]["hex"], codes[9]["bits"], codes[9]["is"]) == ("0x9", "1 00 1", "subnormal")
    assert len(records("formats", "e4m3", "--codes")["codes"]) == 256


def test_table_of_landmarks(run, records):
    shown = {code["is"]: code for code in records("formats", "fp16", "--codes")["codes"]}
    assert shown["largest"]["value"] == 65504.0
    assert shown["smallest subnormal"]["value"] == 2.0**-24
    assert shown["largest subnormal"]["value"] == 2.0**-14 - 2.0**-24
    assert shown["next after one"]["bits"] == "0 01111 0000000001"
    assert shown["infinity"]["value"] == "inf"
    assert "65536 codes in all; --all prints each of them." in run("formats", "fp16", "--codes")[1]
    assert len(records("formats", "fp16", "--codes", "--all")["codes"]) == 65536
    assert "codes in all" not in run("formats", "fp32", "--codes")[1]


@pytest.mark.parametrize("name", [*list_formats("float"), *list_formats("int"), *list_formats("codebook"), "lns8_g8"])
def test_every_table_prints(name, run):
    status, text = run("formats", name, "--codes")
    assert status == 0
    assert len(text.splitlines()) > 5


def test_table_of_named_codes(records):
    codes = records("formats", "fp32", "--codes", "--code", "0x3f800000", "--code", "0b1")["codes"]
    assert [code["value"] for code in codes] == [1.0, 2.0**-149]


def test_cast(run, records):
    (record,) = records("cast", "0.1", "--to", "e4m3")
    assert (record["value"], record["hex"], record["bits"]) == (0.1015625, "0x1D", "0 0011 101")
    assert (record["below"], record["above"]) == (0.09375, 0.1015625)
    assert record["relative_error"] == pytest.approx(0.015625, rel=1e-12)  # a quotient of exact numbers, printed
    _, text = run("cast", "0.1", "--to", "e4m3")
    assert text.splitlines()[-1].split() == [
        "0.1", "e4m3", "nearest_even", "0.1015625", "0x1D", "0", "0011", "101", "+0.001562", "+1.562%",
        "0.09375", "0.1015625",
    ]  # fmt: skip


def test_numbers_from_standard_input(run, records, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("0.1 -3e-5\n\n0x1.8p-3\n"))
    found = records("cast", "7", "-", "--to", "e4m3")
    assert [record["input"] for record in found] == [7.0, 0.1, -3e-5, 0.1875]
    monkeypatch.setattr("sys.stdin", io.StringIO("1 2 3"))
    assert run("explain", "-", "--format", "mxfp4", "--block-size", "3") == run(
        "explain", "1", "2", "3", "--format", "mxfp4", "--block-size", "3"
    )
    for text, said in (
        (" \n", "standard input, which - stands for, has no numbers; pipe some"),
        ("1 x", "'x' is not a"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["cast", "-", "--to", "e4m3"]) == 2
        assert said in capsys.readouterr().err


def test_cast_of_special_numbers(records):
    found = records("cast", "nan", "-inf", "-0.0", "0x1.8p-3", "--to", "e5m2", "--overflow", "ieee")
    assert [record["value"] for record in found] == ["nan", "-inf", -0.0, 0.1875]
    assert math.copysign(1, found[2]["value"]) == -1
    assert [record["error"] for record in found] == [None, None, "0", "0"]


def test_cast_by_every_rounding(records):
    found = {
        record["rounding"]: record["value"] for record in records("cast", "0.3", "--to", "e4m3", "--rounding", "all")
    }
    assert len(found) == 9
    assert (found["down"], found["up"], found["to_odd"]) == (0.28125, 0.3125, 0.28125)
    assert found["stochastic"] in (0.28125, 0.3125)


def test_cast_to_several_formats_puts_one_number_together(run):
    _, text = run("cast", "1", "2", "--to", "e4m3", "--to", "bf16")
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["1", "1", "2", "2"]


def test_cast_is_seeded(records):
    words = ("cast", *(["1.03"] * 20), "--to", "e4m3", "--rounding", "stochastic", "--seed")
    assert records(*words, "1") == records(*words, "1")
    assert records(*words, "1") != records(*words, "2")


def test_cast_of_64_bit_codes(records):
    (record,) = records("cast", "-0.1", "--to", "fp64")
    assert record["hex"] == "0xBFB999999999999A"


def test_explain(run, records):
    status, text = run("explain", "957", "--format", "mxfp8_e4m3")
    assert status == 0
    assert "code    0x7E = 0 1111 110 (sign 0, exponent 1111, mantissa 110)" in text
    record = records("explain", "957", "--format", "mxfp8_e4m3")
    assert record["engine_agrees"] is True
    assert record["elements"][0]["rounded_number"] == "957/2"
    assert record["elements"][0]["below_distance"] == "61/2"


def test_explain_options(records):
    record = records("explain", "1", "2", "3", "--format", "e2m1", "--block-size", "2", "--scale-rule", "ceil")
    assert [element["block"] for element in record["elements"]] == [0, 0, 1]
    assert len(record["scales"]) == 2
    narrow = records("explain", "0.1", "--format", "e4m3", "--dtype", "bfloat16", "--rounding", "up")
    assert narrow["elements"][0]["input"] == 0.10009765625


def test_explain_reports_a_defect(run, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("fmtsim.lab.explain.explain_cast"), "_engine_agrees", lambda *arguments: False
    )
    status, text = run("explain", "1", "--format", "e4m3")
    assert status == 1
    assert "THE ENGINE GIVES OTHER BITS" in text


def test_verify(run, records):
    status, text = run("verify", "--format", "int4")
    assert status == 0
    assert "all bits agree" in text
    record = records("verify", "--format", "int4")
    assert record["mismatches"] == 0
    assert record["cases"] > 10_000
    assert {outcome["check"] for outcome in record["outcomes"]} == {"oracle", "codes", "engines"}


def test_verify_sees_a_planted_error(run):
    status, text = run("verify", "--format", "int4", "--plant-error")
    assert status == 1
    assert "MISMATCHES" in text
    assert "expected" in text


TEXTS = Path(__file__).with_name("commands.txt").read_text().split("$ fmtsim ")[1:]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.split("\n")[0])
def test_every_line_of_a_text(text, run):
    """What commands print: each was read, and a change of one is meant."""
    command, _, expected = text.partition("\n")
    assert run(*shlex.split(command)) == (0, expected.rstrip("\n") + "\n")


MODEL = {"seed": 0, "device": "cpu", "batch_size": 8, "context": 128}
DEFAULTS = {
    "cast": {"rounding": "nearest_even", "seed": 0},
    "explain": {"dtype": "float64", "rounding": "nearest_even", "seed": 0},
    "vectors": {"rounding": "nearest_even", "seed": 0},
    "convert-checkpoint": {"layout": "compressed-tensors", "scales": "best"},
    "mm": {"device": "cpu", "dtype": "e4m3", "data": "normal", "seed": 0},
    "doctor": {"tokens": "1..8192", "dtypes": "bf16"},
    "invariance": {"sizes": "1..512", "dtypes": "bf16"},
    "observe": {"by": "underflow", "every": 1, "steps": 8, "worst": 10, **MODEL},
    "attribute": {"by": "loss", "share": 0.5, **MODEL},
    "mismatch": {"trainer_tokens": 8192, "prefill": 512, "decode": "1..256", **MODEL},
    "ptq": {"batches": 8, **MODEL},
    "search": {"batches": 8, "lr": 1e-3, **MODEL},
    "trace": {"level": "modules", **MODEL},
    "bisect": MODEL,
    "audit": {"rows": 32, "seed": 0},
    "report": {"out": "fmtsim-report.html"},
    "train": {"baseline": "fp32", "steps": 600, "batch_size": 16, "context": 64, "width": 128, "heads": 4,
              "lr": 0.004, "seed": 0, "device": "cpu", "out": "fmtsim-train", "model": "gpt"},
    "sweep": {"schemes": "bf16,e8m5,e8m4,e8m3,e7m7,e6m7,e5m7", "lr": "2e-3,4e-3,8e-3,1.6e-2", "widths": "64",
              "steps": "200", "seeds": "0..3", "model": "gpt", "layers": 2, "heads": 4, "context": 32, "batch_size": 8,
              "clip": 1.0, "final_rate": 0.1, "device": "cpu", "out": "fmtsim-sweep"},
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_of_options(command):
    (commands,) = (a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    given = {a.dest: a.default for a in commands.choices[command]._actions}
    told = {name: v for name, v in given.items() if v is not None and v is not False and v not in ([], "==SUPPRESS==")}
    assert told == DEFAULTS.get(command, {})
