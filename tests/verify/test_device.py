"""``fmtsim verify --device``: a device against the CPU, here one whose kernels run on the host."""

import importlib
import json

import pytest
import torch

import fmtsim
from fmtsim import Datapath, get_format, ops
from fmtsim.cli.main import main
from fmtsim.verify import units
from fmtsim.verify.device import OnDevice, device_of
from fmtsim.verify.outcome import PlantedError
from fmtsim.verify.plan import default_tasks
from tests.support.operands import normal

CPU = torch.device("cpu")


def product(a, b, spec, c=None, scale_a=None, scale_b=None, random=None):
    """Stand in for run_gemm on a device."""
    door = importlib.import_module("fmtsim.cuda.gemm.dispatch")
    out = torch.empty(a.shape[0], b.shape[0], dtype=units.sum_dtype(spec.datapath))
    assert door.supports_gemm(spec, a, b)
    door.gemm(a, b, c, scale_a, scale_b, spec, random, out)
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
