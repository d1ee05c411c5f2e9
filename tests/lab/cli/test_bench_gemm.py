# SPDX-License-Identifier: Apache-2.0
"""``fmtsim bench gemm``: what it prints, as text and as JSON, and what it refuses."""

import json

import pytest

from fmtsim.lab.bench import gemm
from fmtsim.lab.bench.gemm import Result, case_named
from fmtsim.lab.cli.benchmarks import product_table
from fmtsim.lab.cli.main import BAD_INPUT, main

WORDS = ("bench", "gemm", "--only", "fp8 Hopper*", "--shape", "16", "16", "128", "--repeats", "1", "--kernels-only")


def test_json(capsys):
    assert main([*WORDS, "--threads", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = [case.name for case in gemm.CASES if case.name.startswith("fp8 Hopper")]
    assert [product["case"] for product in record["products"]] == names
    assert record["products"][0]["shape"] == [16, 16, 128]
    assert record["overheads"] == []
    assert set(record["machine"]) == {"processor", "torch", "numba", "command", "date"}


def test_text(capsys):
    assert main([*WORDS]) == 0
    text = capsys.readouterr().out
    for word in ("of sgemm", "target", "stretch", "extra cost", "2 threads", "16x16x128", "fp8 Hopper, split K in 4"):
        assert word in text


def measured(name, seconds, plain=None):
    return Result(
        case=case_named(name), shape=(512, 512, 2048), seconds={1: seconds}, base_seconds={1: 0.01},
        plain_seconds={} if plain is None else {1: plain},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "cells"),
    [
        (measured("fp8 Hopper", 0.02), ["20.0", "26.84", "0.50", "0.35", "0.70", "-", "-", "pass"]),
        (measured("fp8 Hopper", 0.04), ["40.0", "13.42", "0.25", "0.35", "0.70", "-", "-", "MISS"]),
        (measured("fp8 Hopper", 0.0125), ["12.5", "42.95", "0.80", "0.35", "0.70", "-", "-", "stretch"]),
        (measured("fp8 Hopper, split K in 4", 0.04, 0.032), ["40.0", "13.42", "0.25", "-", "-", "+25", "%", "+10", "%",
                                                             "MISS"]),
        (measured("int8", 0.2), ["200.0", "2.68", "0.05", "-", "-", "-", "-", "-"]),
    ],
)  # fmt: skip
def test_a_row_shows_the_share_the_target_and_the_verdict(result, cells):
    row = product_table([result]).splitlines()[-1]
    assert row.split("512x512x2048")[1].split() == cells


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "nothing"), "--only 'nothing' matches no case; the cases are 'fp8 Hopper', 'fp8 Blackwell'"),
        (("--shape", "0", "1", "1"), "--shape 0 is not possible; choose 1 or more"),
        (("--threads", "2", "0"), "--threads 0 is not possible; choose 1 or more"),
        (("--repeats", "0"), "--repeats 0 is not possible; choose 1 or more"),
    ],
)
def test_what_is_refused(words, message, capsys):
    assert main(["bench", "gemm", *words]) == BAD_INPUT
    assert message in capsys.readouterr().err
