# SPDX-License-Identifier: Apache-2.0
"""The command: shapes, bad input, a machine without a usable GPU, and a whole run against a stand-in for a GPU."""

import json

import pytest
import torch

from fmtsim.gemm.model_layers import layer_shapes, list_models, models, parse_tokens, read_shapes
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.cli.main import BAD_INPUT
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DataError, DeviceError
from tests.support.fake_gpu import FakeGPU, mm
from tests.support.refusals import refused
from tools.calibrate import __main__ as calibration
from tools.calibrate import gpu as gpus
from tools.calibrate.__main__ import main
from tools.calibrate.gpu import TorchGPU, open_gpu
from tools.calibrate.layers import model_calls, parallel_layers

HOPPER = get_unit("hopper.wgmma")

# Outputs and inputs of each model's linear layers, + for a bias, as their configurations make them.
SHAPES = {
    "gpt2": "2304x768+ 768x768+ 3072x768+ 768x3072+ 50257x768",
    "gpt2-medium": "3072x1024+ 1024x1024+ 4096x1024+ 1024x4096+ 50257x1024",
    "gpt2-large": "3840x1280+ 1280x1280+ 5120x1280+ 1280x5120+ 50257x1280",
    "gpt2-xl": "4800x1600+ 1600x1600+ 6400x1600+ 1600x6400+ 50257x1600",
    "llama-1b": "2048x2048 512x2048 8192x2048 2048x8192 128256x2048",
    "llama-3b": "3072x3072 1024x3072 8192x3072 3072x8192 128256x3072",
    "llama-8b": "4096x4096 1024x4096 14336x4096 4096x14336 128256x4096",
    "llama-70b": "8192x8192 1024x8192 28672x8192 8192x28672 128256x8192",
    "bert-base": "768x768+ 3072x768+ 768x3072+ 30522x768+",
    "bert-large": "1024x1024+ 4096x1024+ 1024x4096+ 30522x1024+",
    "vit-l": "3072x1024+ 1024x1024+ 4096x1024+ 1024x4096+ 1000x1024+",
    "qwen2.5-7b": "3584x3584+ 512x3584+ 3584x3584 18944x3584 3584x18944 152064x3584",
    "mixtral-8x7b": "4096x4096 1024x4096 14336x4096 4096x14336 8x4096 32000x4096",
    "phi3-mini": "9216x3072 3072x3072 16384x3072 3072x8192 32064x3072",
    "gpt-j-6b": "4096x4096 16384x4096+ 4096x16384+ 50400x4096+",
    "deepseek-v2-lite": "2048x2048 1408x2048 2048x1408 64x2048 3072x2048 576x2048 4096x512 10944x2048 2048x10944 "
    "2816x2048 2048x2816 102400x2048",
}


def units(call):
    return HOPPER.mode(call.a, call.b, call.accumulate)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt3"], "--model 'gpt3' is unknown; did you mean 'gpt2'"),
        (["--dtypes", "fp4"], "dtypes 'fp4' is not possible"),
        (["--tokens", "0"], "--tokens '0' is not possible"),
        (["--out", "plan.txt"], "does not end in .json"),
        (["--out", "nowhere/plan.json"], "there is no folder nowhere"),
        (["--base", "h300"], "--base 'h300' is unknown"),
        (["--shapes", "missing.txt"], "--shapes missing.txt: there is no file missing.txt"),
        (["--book", "x.json"], "--book x.json is the name of the plan file, which is written beside it"),
        (["--book", "nowhere/x.book"], "there is no folder nowhere"),
        (["--book", "--kinds", "fp4"], "--kinds 'fp4' is not possible; choose from bf16"),
        (["--book", "--lattice", "-1"], "--lattice -1 is not possible; choose 0 or more sizes"),
        (["--book", "--workers", "0"], "--workers 0 is not allowed; choose 1 or more"),
        (["--executor", "dask://a:1"], "--executor shares the work of --book, --learn and --evidence; leave it out"),
        (["--book", "--executor", "dask://a:1", "--workers", "2"], "--workers 2 are of this machine; leave it or"),
        (["--book", "--model", "gpt9"], "--model 'gpt9' is unknown"),
        (["--book", "--check", "h200"], "--book and --check are different jobs; give one of them"),
    ],
)
def test_bad_input(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_an_empty_file_of_shapes(capsys, tmp_path):
    (tmp_path / "shapes.txt").write_text("")
    assert main(["--shapes", str(tmp_path / "shapes.txt")]) == BAD_INPUT
    assert "has no shapes" in capsys.readouterr().err


def test_shapes_that_fp8_refuses(capsys, tmp_path):
    (tmp_path / "shapes.txt").write_text("10 10\n")
    assert main(["--shapes", str(tmp_path / "shapes.txt"), "--dtypes", "fp8_fast"]) == BAD_INPUT
    assert "leaves no call: FP8 takes K and N that are multiples of 16" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--quick"]) == BAD_INPUT
    assert "calibrate asks an NVIDIA GPU, and torch sees none here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gpu_of_rocm_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    refused("^calibrate asks an NVIDIA GPU, and torch is built for ROCm 6.4 here;", open_gpu, error=DeviceError)


def test_a_gpu_that_is_busy(monkeypatch):
    def busy(*args):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    refused(r"cuda cannot be used: CUDA error: .*unavailable; see with nvidia-smi", open_gpu, error=DeviceError)


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
    monkeypatch.setattr(calibration, "open_gpu", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (tmp_path / "shapes.txt").write_text("64 512\n")
    out = tmp_path / "mine.json"
    words = ["--shapes", str(tmp_path / "shapes.txt"), "--tokens", "32,64", "--dtypes", "bf16"]
    assert main([*words, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "bf16: hopper.wgmma; blocks of 16, F=25" in text
    assert f"use it: fmtsim.mm(a, b, target='{out}')" in text
    assert get_target(out).resolve(mm(32, 64, 512), strict=True).plan.split == 2
    assert main([*words, "--out", str(out), "--base", str(out), "--quick", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {call["status"] for call in record["calls"]} == {"verified"}
    assert record["units"][0]["unit"] == "hopper.wgmma"


def test_models_have_sources_and_shapes():
    assert {"gpt2", "gpt2-xl", "llama-8b", "llama-70b", "bert-large", "vit-l"} <= set(list_models())
    assert len(models()) >= 100 and list(models()) == list_models()
    for name, model in models().items():
        assert model.name == name and model.source and set(model.style) <= set("gfualqmht"), name
        assert all(n > 0 and k > 0 for n, k, _ in model.layers) and len(set(model.layers)) == len(model.layers)
        assert {(n, k) for n, k, _ in model.layers} <= set(parallel_layers(model))
    for name, shapes in SHAPES.items():
        facts = [tuple(map(int, shape.rstrip("+").split("x"))) + (shape.endswith("+"),) for shape in shapes.split()]
        assert layer_shapes([name]) == facts
    assert len(layer_shapes(["gpt2", "gpt2"])) == 5


def test_shapes_of_servers():
    """Llama 8B: projections together and apart, and slices of 2, 4 and 8 GPUs: fewer outputs, or fewer inputs."""
    shapes = parallel_layers(models()["llama-8b"])
    assert {(6144, 4096), (28672, 4096), (3072, 4096), (768, 4096), (3584, 4096), (16032, 4096)} <= set(shapes)
    assert {(4096, 2048), (4096, 512), (4096, 1792)} <= set(shapes)
    assert (4096, 14336 // 16) not in shapes and len(shapes) == len(set(shapes)) == 22


def test_unknown_models():
    refused(r"unknown model 'lama-8b'; did you mean 'llama-8b'", layer_shapes, ["lama-8b"])


def test_calls_of_a_layer():
    forward, dgrad, wgrad = sorted(
        model_calls([(3072, 768, True)], [512], ["bf16"]), key=lambda call: (call.operation, call.m)
    )
    assert (forward.operation, forward.m, forward.n, forward.k, forward.bias) == ("linear", 512, 3072, 768, True)
    assert (forward.a_layout, forward.b_layout) == ("row", "row")
    assert (dgrad.m, dgrad.n, dgrad.k, dgrad.a_layout, dgrad.b_layout) == (512, 768, 3072, "row", "column")
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.a_layout, wgrad.b_layout) == (3072, 768, 512, "column", "column")


def test_calls_are_those_of_autograd():
    """What torch multiplies in forward and backward, by its own words."""
    x = torch.randn(512, 768, requires_grad=True)
    w = torch.randn(3072, 768, requires_grad=True)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                a, b = args[-2:]
                layouts = "column" if a.stride(0) == 1 else "row", "column" if b.stride(1) == 1 else "row"
                seen.append((a.shape[0], b.shape[1], a.shape[1], *layouts))
            return function(*args, **(kwargs or {}))

    with Watch():
        torch.nn.functional.linear(x, w).square().sum().backward()
        x.grad = w.grad = None
    calls = [(c.m, c.n, c.k, c.a_layout, c.b_layout) for c in model_calls([(3072, 768, False)], [512], ["bf16"])]
    assert sorted(calls) == sorted(seen)


def test_fp8_leaves_out_what_torch_refuses():
    assert not model_calls([(50257, 768, False)], [512], ["fp8_fast"], ["forward"])
    assert (
        len(model_calls([(768, 768, False)], [512, 77], ["fp8_fast", "fp8_slow"])) == 6
    )  # no wgrad of 77 tokens; dgrad of a square is forward


def test_tokens():
    assert parse_tokens("1,77, 512") == [1, 77, 512]
    assert parse_tokens("1..8192") == [1 << i for i in range(14)]
    assert parse_tokens("3..20,5") == [3, 4, 5, 8, 16, 20]
    for text in ("", "0", "a", "8..4", "1,,2"):
        refused("is not possible; write counts such as", parse_tokens, text)


def test_unknown_dtypes():
    refused(r"dtypes 'fp4' is not possible; choose from bf16, fp16, tf32", model_calls, [(8, 8, False)], [1], ["fp4"])


def test_files_of_shapes(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("# outputs inputs\n768 3072 bias\n\n3072x768\n768, 768 # square\n")
    assert read_shapes(path) == [(768, 3072, True), (3072, 768, False), (768, 768, False)]
    path.write_text("# nothing\n")
    refused("has no shapes; write a line for each linear layer", read_shapes, path, error=DataError)
    path.write_text("768 3072\n768\n")
    refused("line 2: '768' is not a shape; write 'outputs inputs \\[bias\\]'", read_shapes, path, error=DataError)
