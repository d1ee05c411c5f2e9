"""The command: bad input, a machine without a usable GPU, and a whole run against a GPU that is none."""

import json

import pytest
import torch

from fmtsim.calibration import gpu as gpus
from fmtsim.calibration.gpu import TorchGPU, open_gpu
from fmtsim.cli import calibrate
from fmtsim.cli.main import BAD_INPUT, main
from fmtsim.errors import DeviceError
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.plan import GemmPlan
from tests.support.fake_gpu import FakeGPU, mm

HOPPER = get_unit("hopper.wgmma")


def units(call):
    return HOPPER.mode(call.a, call.b, call.accumulate)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt3"], "unknown model 'gpt3'; did you mean 'gpt2'"),
        (["--dtypes", "fp4"], "--dtypes 'fp4' is not possible"),
        (["--tokens", "0"], "--tokens '0' is not possible"),
        (["--out", "plan.txt"], "does not end in .json"),
        (["--out", "nowhere/plan.json"], "there is no folder nowhere"),
        (["--base", "h300"], "unknown target 'h300'"),
        (["--shapes", "missing.txt"], "missing.txt: No such file"),
    ],
)
def test_bad_input(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_an_empty_file_of_shapes(capsys, tmp_path):
    (tmp_path / "shapes.txt").write_text("")
    assert main(["calibrate", "--shapes", str(tmp_path / "shapes.txt")]) == BAD_INPUT
    assert "has no shapes" in capsys.readouterr().err


def test_shapes_that_fp8_refuses(capsys, tmp_path):
    (tmp_path / "shapes.txt").write_text("10 10\n")
    assert main(["calibrate", "--shapes", str(tmp_path / "shapes.txt"), "--dtypes", "fp8_fast"]) == BAD_INPUT
    assert "leaves no call: FP8 takes K and N that are multiples of 16" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--quick"]) == BAD_INPUT
    assert "calibrate asks an NVIDIA GPU, and torch sees none here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_busy(monkeypatch):
    def busy(*args):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    with pytest.raises(DeviceError, match=r"cuda cannot be used: CUDA error: .*unavailable; see with nvidia-smi"):
        open_gpu()


def test_a_gpu_without_memory(monkeypatch):
    def full(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(gpus.NATIVE, "mm", full)
    a = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(DeviceError, match=r"has no memory left for M=8 N=16 K=64 in bf16; choose fewer --tokens"):
        host_gpu().ask(mm(8, 16, 64), a, a)


def test_a_call_that_the_library_refuses(monkeypatch):
    def refuse(*args):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

    monkeypatch.setitem(gpus.NATIVE, "mm", refuse)
    a = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(DeviceError, match=r"refuses M=8 N=16 K=64 in bf16: CUBLAS_STATUS_NOT_SUPPORTED$"):
        host_gpu().differing(mm(8, 16, 64), a, a)


def host_gpu():
    """Return the GPU of torch with its tensors on the CPU, whose torch.mm then answers."""
    gpu = TorchGPU.__new__(TorchGPU)
    gpu.device, gpu.name, gpu.library, gpu._room = torch.device("cpu"), "host", "no GPU", {}
    return gpu


@pytest.mark.parametrize("a_layout", ["row", "column"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
def test_rows_are_spread_over_the_whole_call(a_layout, b_layout):
    """Whole numbers have one sum in every order, so that torch's CPU product is the truth here."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (rows, 96), generator=generator).float() for rows in (3, 5))
    call = mm(50, 70, 96, "tf32", a_layout=a_layout, b_layout=b_layout)
    gpu = host_gpu()
    assert torch.equal(gpu.ask(call, a, b), a @ b.t())
    assert torch.equal(gpu.ask(mm(3, 5, 96, "tf32"), a, b), a @ b.t())
    assert gpu.differing(call, a[:1], b[:1]) == 0
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_whole_run(monkeypatch, tmp_path, capsys):
    gpu = FakeGPU(units, lambda call: GemmPlan(k_tile=64, split=2) if call.k == 512 else GemmPlan())
    monkeypatch.setattr(gpus, "open_gpu", lambda device: gpu)
    monkeypatch.setattr(calibrate, "_family", lambda device: "hopper")
    (tmp_path / "shapes.txt").write_text("64 512\n")
    out = tmp_path / "mine.json"
    words = ["calibrate", "--shapes", str(tmp_path / "shapes.txt"), "--tokens", "32,64", "--dtypes", "bf16"]
    assert main([*words, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "bf16: hopper.wgmma; blocks of 16, F=25" in text
    assert f"use it: fmtsim.mm(a, b, target='{out}')" in text
    assert get_target(out).resolve(mm(32, 64, 512), strict=True).plan.split == 2
    assert main([*words, "--out", str(out), "--base", str(out), "--quick", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {call["status"] for call in record["calls"]} == {"verified"}
    assert record["units"][0]["unit"] == "hopper.wgmma"
