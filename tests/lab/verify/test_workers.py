# SPDX-License-Identifier: Apache-2.0
"""Checks in several processes, and on a device: here one whose kernels run on the host."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import fmtsim
from fmtsim import Datapath, get_format
from fmtsim.casts import ops
from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.verify import units, workers
from fmtsim.lab.verify.check_plan import default_tasks
from fmtsim.lab.verify.outcome import OnDevice, PlantedError, device_of
from fmtsim.lab.verify.workers import Job
from fmtsim.support.errors import DeviceError
from tests.support import faults
from tests.support.operands import normal

NAMES = ("int4", "uint1")


class Dies:
    """A job of checks that end their process."""

    name = "dies"

    def tasks(self):
        return {"casts": [self, self]}

    def run(self, advance):
        os._exit(3)


def found(job, count):
    shown = []
    tasks = job.tasks()
    results = workers.run(job, tasks, count, lambda name, done: shown.append((name, done)))
    assert {name for name, _ in shown} == {task.name for part in tasks.values() for task in part}
    assert shown[-1][1] == sum(map(len, tasks.values()))
    return results


def test_processes_find_what_one_finds():
    clean, planted = (Job(("casts",), formats=NAMES, plant_error=error) for error in (False, True))
    alone, shared = found(planted, 1), found(planted, 2)
    assert alone == shared and all(outcome.mismatches for outcome in shared["casts"])
    assert [outcome.format for outcome in shared["casts"]] == [
        task.name.split()[-1] for task in planted.tasks()["casts"]
    ]
    assert not any(outcome.mismatches for outcome in found(clean, 1)["casts"])


SLEEPS = """
import os, sys, time
from pathlib import Path
from fmtsim.lab.verify import workers

class Sleeps:
    name = "sleeps"

    def tasks(self):
        return {"casts": [self, self]}

    def run(self, advance):
        Path(sys.argv[1], str(os.getpid())).touch()
        time.sleep(600)

if __name__ == "__main__":
    workers.run(Sleeps(), Sleeps().tasks(), 2, lambda name, done: None)
"""


def runs(pid):
    """Return whether a process runs: the process that adopts one that has ended may leave it a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.faults
def test_processes_end_with_the_one_that_was_killed(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    (tmp_path / "pids").mkdir()
    process = faults.start([sys.executable, str(tmp_path / "sleeps.py"), str(tmp_path / "pids")])
    while len(pids := [int(path.name) for path in (tmp_path / "pids").iterdir()]) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while running := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < end, f"{running} go on"
        time.sleep(0.05)


def test_a_process_that_dies_is_an_error():
    with pytest.raises(DeviceError, match="a process of the checks died.*--workers 1 shows at which check"):
        workers.run(Dies(), Dies().tasks(), 2, lambda name, done: None)


def test_a_record_says_how_to_make_it_again(tmp_path, capsys):
    path = tmp_path / "new" / "record.json"
    assert main(["verify", "--format", "int4", "--record", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["mismatches"] == 0 and record["workers"] == 1 and len(record["outcomes"]) == 3
    assert {"command", "date", "versions", "wall_seconds"} < set(record)
    assert main(["verify", "--workers", "0"]) == BAD_INPUT
    assert "--workers 0 is not possible; choose 1 or more" in capsys.readouterr().err


def test_all_parts_end_in_one_table(monkeypatch, capsys):
    from fmtsim.lab.cli import result_commands

    class Few(Job):
        def tasks(self):
            return {"casts": Job(("casts",), formats=("int4",)).tasks()["casts"], "gemm": few}

    monkeypatch.setattr(units, "SHAPE", (5, 7))
    few = [task for task in units.unit_tasks(torch.device("cpu")) if task.name in ("int8", "turing.mma")]
    monkeypatch.setattr(workers, "Job", Few)
    monkeypatch.setattr(result_commands, "device_of", torch.device)
    monkeypatch.setattr(result_commands, "_parts", lambda arguments: ("casts", "gemm"))
    assert main(["verify", "--device", "cpu", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[-5:] if line}
    assert table["casts"][0] == "3" and table["gemm"][0] == "2" and table["all"][0] == "5"
    cases = [int(table[part][1].replace(",", "")) for part in ("casts", "gemm", "all")]
    assert cases[0] + cases[1] == cases[2] and lines[-1].endswith("s with 1 process; all bits agree")


def test_tasks_of_a_unit_are_one_set_again():
    cpu = torch.device("cpu")
    whole, parts = units.unit_tasks(cpu), units.unit_tasks(cpu, most=4)
    assert list(dict.fromkeys(task.name for task in parts)) == [task.name for task in whole]
    assert len(parts) > 2 * len(whole)


CPU = torch.device("cpu")


def product(operands, spec, random=None):
    """Stand in for run_gemm on a device."""
    a, b, c = operands.a, operands.b, operands.c
    door = importlib.import_module("fmtsim.cuda.gemm.engine")
    out = torch.empty(a.shape[0], b.shape[0], dtype=units.sum_dtype(spec.datapath))
    assert door.supports_gemm(spec, a, b)
    door.gemm(a, b, c, operands.scale_a, operands.scale_b, spec, random, out)
    return out


@pytest.mark.parametrize("name", ["turing.mma", "int8"])
def test_units_agree(name, emulated, monkeypatch):
    monkeypatch.setattr(units, "SHAPE", (5, 7))
    (task,) = (task for task in units.unit_tasks(CPU, product) if task.name == name)
    found = task.run(lambda share: None)
    assert found.mismatches == 0 and found.outputs == found.cases * 35 and found.cases >= 4


def test_units_of_the_whole_catalogue_are_checked():
    assert [task.name for task in units.unit_tasks(CPU)] == fmtsim.list_units()
    assert all(
        [units._case(*how) for how in units._arguments(name)]
        for name in ("cdna1.mfma", "exact", "blackwell.tcgen05.nvf4")
    )


def test_a_planted_bit_is_seen(monkeypatch):
    monkeypatch.setattr(units, "SHAPE", (5, 7))
    (task,) = (task for task in units.unit_tasks(CPU, units.planted) if task.name == "turing.mma")
    found = task.run(lambda share: None)
    assert found.mismatches == found.cases and "[4, 0]" in found.first


def test_casts_of_a_device_are_held_to_the_oracle():
    torch_engine = importlib.import_module("fmtsim.torch_engine")
    on_device = OnDevice(CPU, lambda *_: torch_engine)
    engines = {"torch_engine": torch_engine, "cpu": on_device}
    for name in ("e4m3", "mxfp4"):
        assert not any(task.run(lambda share: None).mismatches for task in default_tasks(engines, [name]))
        engines["cpu"] = PlantedError(on_device)
        assert all(task.run(lambda share: None).mismatches for task in default_tasks(engines, [name]))
        engines["cpu"] = on_device


def test_a_device_runs_what_a_call_there_would_run():
    x = normal(4, 8, seed=1).t()
    spec = ops.CastSpec(format=get_format("e4m3"), rounding=Datapath().rounding, overflow="saturate")
    asked = []

    def choose(verb, spec, *tensors):
        asked.append((verb, tensors[0].stride()))
        return ops.engine_for(verb, spec, *tensors)

    out = torch.empty_like(x)
    OnDevice(CPU, choose).quantize(x, spec, None, out)
    assert asked == [("quantize", (1, 8))] and torch.equal(out, fmtsim.quantize(x, "e4m3", rounding="toward_zero"))


@pytest.mark.parametrize("name", ["cpu", "tpu", "cuda:x"])
def test_only_cuda_devices_have_a_name(name, capsys):
    assert main(["verify", "--device", name]) != 0
    assert f"--device {name} is not a CUDA device; choose cuda or cuda:1" in capsys.readouterr().err


@pytest.mark.skipif(fmtsim.cuda.available(), reason="needs a machine without a GPU")
def test_without_a_device_the_reason_is_said(capsys):
    assert main(["verify", "--device", "cuda"]) != 0
    assert "nothing can be checked on cuda: " in capsys.readouterr().err


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
@pytest.mark.slow
def test_the_whole_command(capsys):
    assert main(["verify", "--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["casts"]["mismatches"] == report["gemm"]["mismatches"] == 0
    assert str(device_of("cuda")) in report["casts"]["engines"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gemm",), "fmtsim verify gemm needs a device; pass --device cuda (a checkout replays recordings: "),
        (("gemm", "--format", "e4m3"), "--format has no meaning for fmtsim verify gemm; leave it"),
        (("gemm", "--exhaustive"), "--exhaustive has no meaning for fmtsim verify gemm"),
    ],
)
def test_arguments_of_the_other_half_are_refused(words, message, capsys):
    assert main(["verify", *words]) == BAD_INPUT
    assert capsys.readouterr().err.startswith(f"fmtsim: error: {message}")
