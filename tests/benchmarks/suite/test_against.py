# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.suite --against``: what became slower between two records."""

import copy
import json

import pytest

from benchmarks.suite import __main__ as benchmarks
from benchmarks.suite.__main__ import main
from benchmarks.suite.against import compared, figures
from fmtsim.lab.cli.main import BAD_INPUT

MACHINE = {"processor": "a CPU", "torch": "2", "date": "2026-11-23"}
CASTS = {
    "machine": MACHINE,
    "kernels": [
        {"case": "e4m3", "elements": 64, "threads": {"1": {"ratio_to_copy": 0.8}, "2": {"ratio_to_copy": 0.6}}}
    ],
    "overheads": [
        {"name": "first call", "value": 1.0, "unit": "s"}, {"name": "memory", "value": 1.0, "unit": "MB"},
        {"name": "import", "value": None, "unit": "s"},
    ],
}  # fmt: skip
PRODUCTS = {
    "machine": MACHINE, "overheads": [],
    "products": [{"case": "fp8", "shape": [1, 2, 3], "threads": {"1": {"ratio_to_sgemm": 0.4}}}],
}  # fmt: skip
GPU = {
    "machine": {"device": "a GPU"}, "compiling_seconds": 1.0,
    "results": [
        {"case": "cast", "kind": "quantize", "value": 0.9}, {"case": "fp8", "kind": "product", "value": 16.0},
        {"case": "mxfp4", "kind": "layer", "value": 1.5}, {"case": "host", "kind": "call", "value": 12.0},
    ],
}  # fmt: skip
LAYERS = {
    "machine": {"device": "a GPU"}, "sizes": {"gpt": {"width": 64}}, "target": None, "emulated": False,
    "results": [{"case": "gpt eager te_current", "model": "gpt", "ratio": 2.0}],
}  # fmt: skip
RECORDS = {"casts": CASTS, "gemm": PRODUCTS, "gpu": GPU, "layers": LAYERS}


def changed(record, *path, by=None, to=None):
    """Return a copy of a record with another value somewhere."""
    record = copy.deepcopy(record)
    part = record
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = part[path[-1]] * by if to is None else to
    return record


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_is_as_fast_as_itself(what):
    found = compared(RECORDS[what], RECORDS[what])
    assert (found.slower, found.faster, found.missing) == ((), 0, ())
    assert found.compared == {"casts": 3, "gemm": 1, "gpu": 4, "layers": 1}[what]


@pytest.mark.parametrize(
    ("record", "path", "name", "falls"),
    [
        (CASTS, ("kernels", 0, "threads", "1", "ratio_to_copy"), "e4m3, 1 thread", False),
        (CASTS, ("kernels", 0, "threads", "2", "ratio_to_copy"), "e4m3, 2 threads", False),
        (CASTS, ("overheads", 0, "value"), "first call", True),
        (PRODUCTS, ("products", 0, "threads", "1", "ratio_to_sgemm"), "fp8, 1 thread", False),
        (GPU, ("results", 0, "value"), "cast", False),
        (GPU, ("results", 1, "value"), "fp8", False),
        (GPU, ("results", 2, "value"), "mxfp4", True),
        (GPU, ("results", 3, "value"), "host", True),
        (LAYERS, ("results", 0, "ratio"), "gpt eager te_current", True),
    ],
)
def test_slower_is_what_takes_more_than_5_percent_longer(record, path, name, falls):
    up, down = (1.06, 1 / 1.06) if falls else (1 / 1.06, 1.06)
    found = compared(record, changed(record, *path, by=up))
    assert [change.name for change in found.slower] == [name] and found.faster == 0
    assert found.slower[0].slower == pytest.approx(1.06)  # quotients are rounded
    assert found.slower[0].now == pytest.approx(found.slower[0].before * up)
    faster = compared(record, changed(record, *path, by=down))
    assert (faster.slower, faster.faster) == ((), 1)
    within = compared(record, changed(record, *path, by=1.04 if falls else 1 / 1.04))
    assert (within.slower, within.faster) == ((), 0)


def test_the_worst_comes_first():
    now = changed(changed(GPU, "results", 0, "value", by=0.8), "results", 3, "value", by=2.0)
    assert [change.name for change in compared(GPU, now).slower] == ["host", "cast"]


@pytest.mark.parametrize(
    ("record", "path", "to", "name"),
    [
        (CASTS, ("kernels", 0, "elements"), 128, "e4m3, 1 thread"),
        (PRODUCTS, ("products", 0, "shape"), [3, 2, 1], "fp8, 1 thread"),
        (LAYERS, ("sizes", "gpt", "width"), 128, "gpt eager te_current"),
        (LAYERS, ("target",), "h200", "gpt eager te_current"),
        (LAYERS, ("emulated",), True, "gpt eager te_current"),
        (GPU, ("results", 0, "case"), "another", "cast"),
    ],
)
def test_other_settings_are_not_compared(record, path, to, name):
    found = compared(changed(record, *path, to=to), record)
    assert name in found.missing and found.slower == () and found.compared < len(list(figures(record)))


@pytest.mark.parametrize("value", [0, "inf", "nan", -1.0])
def test_what_is_not_a_measurement_is_left_out(value):
    assert len(list(figures(changed(GPU, "results", 0, "value", to=value)))) == 3


def test_the_comparison_in_words():
    now = changed(changed(GPU, "results", 0, "value", by=0.5), "results", 1, "case", to="fp16")
    now["machine"] = {"device": "another GPU", "torch": "3"}
    assert benchmarks.against_text(compared(GPU, now), GPU, now, "old.json").splitlines() == TEXT.splitlines()
    same = benchmarks.against_text(compared(CASTS, CASTS), CASTS, CASTS, "old.json")
    assert same.splitlines() == [
        "compared with old.json, a CPU, torch 2, 2026-11-23",
        "measurements compared: 3, of which 0 slower by more than 5 %, 0 faster",
    ]


WORDS = ("--only", "e4m3 nearest", "--side", "64", "--threads", "1", "--repeats", "1", "--kernels-only")


def test_the_command(tmp_path, capsys):
    path, slow = tmp_path / "new" / "record.json", tmp_path / "slow.json"
    assert main([*WORDS, "--record", str(path)]) == 0
    assert "e4m3 nearest" in capsys.readouterr().out
    record = json.loads(path.read_text())
    slow.write_text(json.dumps(changed(record, "kernels", 0, "threads", "1", "ratio_to_copy", to=1e9)))
    assert main([*WORDS, "--against", str(slow)]) == 0
    assert "measurements compared: 1, of which 1 slower by more than 5 %, 0 faster" in capsys.readouterr().out
    assert main([*WORDS, "--against", str(slow), "--json"]) == 0
    against = json.loads(capsys.readouterr().out)["against"]
    assert [change["name"] for change in against["slower"]] == ["e4m3 nearest, 1 thread"] and against["compared"] == 1


@pytest.mark.parametrize("what", RECORDS)
@pytest.mark.parametrize("other", [*RECORDS, "[]", "{}", '{"kernels": 1}', '{"results": [{}]}', "{"])
def test_a_file_that_is_not_such_a_record_is_refused_first(what, other, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORDS[other]) if other in RECORDS else other)
    if other == what:
        assert benchmarks.read_record(path, what) == RECORDS[what]
        return
    assert main([what, "--against", str(path)]) == BAD_INPUT
    message = capsys.readouterr().err
    assert (
        f"not a record of benchmarks.suite {what}; pass what benchmarks.suite {what} --record FILE wrote" in message
        or (other == "{" and f"is not a valid record of python -m benchmarks.suite {what}" in message)
    )


TEXT = """\
compared with old.json, a GPU, torch unknown
which is another machine: this is another GPU, torch 3
measurements compared: 3, of which 1 slower by more than 5 %, 0 faster
absent there, or under other settings: 1 (fp16)

slower  before   now  times as long
------  ------  ----  -------------
cast       0.9  0.45           2.00
"""
