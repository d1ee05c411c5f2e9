# SPDX-License-Identifier: Apache-2.0
"""Compiling, keeping and launching kernels: what needs no GPU here first, then launches on a real one."""

import ctypes
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fmtsim.cuda
import fmtsim.torch_engine
from fmtsim.casts import ops
from fmtsim.cuda.runtime import launch
from fmtsim.cuda.runtime import program as runtime
from fmtsim.support import folder
from fmtsim.support.errors import DeviceError
from fmtsim.support.replay import recorder
from fmtsim.support.replay.hooks import Structure
from fmtsim.support.replay.programs import Programs
from tests.cuda.nvrtc import needs_nvrtc
from tests.support.casts import cast_spec
from tests.support.faults import largest_file
from tests.support.refusals import refused

needs_gpu = pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")

KERNELS = runtime.KERNELS  # which a fixture replaces
SOURCE = r"""
#include "common.cuh"
#ifndef STEP
#define STEP 1
#endif
struct alignas(16) Numbers { i32 first; float second; double third; };
KERNEL add(const float* x, float* y, i64 n) {
  i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + (float)(STEP);
}
KERNEL show(double* y, u8 a, i32 b, float c, const Numbers numbers, const float* nothing, u64 d) {
  y[0] = a; y[1] = b; y[2] = c; y[3] = numbers.first; y[4] = numbers.second; y[5] = numbers.third;
  y[6] = nothing == nullptr; y[7] = (double)d;
}
KERNEL much(i32* y, i32 bytes) {
  DYNAMIC_SHARED(raw);
  raw[bytes - 1 - threadIdx.x] = (unsigned char)threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = raw[bytes - 1 - threadIdx.x];
}
"""


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """Put kernels of this file where the engine's are looked for."""
    (tmp_path / "common.cuh").write_text((runtime.KERNELS / "include" / "common.cuh").read_text())
    (tmp_path / "trial.cu").write_text(SOURCE)
    monkeypatch.setattr(runtime, "KERNELS", tmp_path)
    for cached in (runtime.source_of, runtime.compiled, runtime.kernel):
        cached.cache_clear()
    yield
    for cached in (runtime.source_of, runtime.compiled, runtime.kernel):
        cached.cache_clear()


def test_includes_are_put_in_place_once(tmp_path):
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text("#pragma once\nint b;\n")
    (tmp_path / "c.cu").write_text('#include "a.cuh"\n#include "b.cuh"\nint c;\n')
    assert [line for line in runtime.source_of("c.cu").split("\n") if line] == ["int b;", "int a;", "int c;"]


def test_comments_change_no_source(tmp_path):
    (tmp_path / "c.cu").write_text("// Why.\nint c;  // this\n\n  // and that\nint d;\n")
    assert runtime.source_of("c.cu") == "int c;\nint d;\n"


def test_no_kernel_has_slashes_in_a_string():
    """``source_of`` would take the rest of the line for a comment."""
    lines = (line for path in KERNELS.rglob("*.cu*") for line in path.read_text().split("\n"))
    assert not [line for line in lines if "//" in line and line.split("//")[0].count('"') % 2]


@needs_nvrtc
def test_compiling_needs_no_gpu_and_tells_macros_apart():
    one = runtime.compiled("trial.cu", "sm_80")
    assert runtime.compiled("trial.cu", "sm_80") is one
    assert runtime.compiled("trial.cu", "sm_80", (("STEP", "2"),)).code != one.code


@needs_nvrtc
def test_threads_may_compile_first():
    program = """
import concurrent.futures
from fmtsim.cuda import runtime
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    codes = list(pool.map(lambda arch: runtime.compiled("reduce.cu", arch), ["sm_80", "sm_90"] * 8))
assert len(codes) == 16
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@needs_nvrtc
def test_errors_of_the_compiler_name_the_kernel_and_its_macros(tmp_path):
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { nothing(STEP); }')
    with pytest.raises(DeviceError, match=r"(?s)NVRTC cannot compile broken.cu for sm_90 \(-DSTEP=3\): .*nothing"):
        runtime.compiled("broken.cu", "sm_90", (("STEP", "3"),))
    refused("NVRTC cannot compile trial.cu for sm_70", runtime.compiled, "trial.cu", "sm_70", error=DeviceError)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Keep machine code in an empty folder, and warn as a new process does; calling it forgets what was compiled."""
    monkeypatch.setattr(folder, "_said", set())
    monkeypatch.setenv("FMTSIM_CACHE_DIR", str(tmp_path / "cache"))

    def anew():
        runtime.cache_folder.cache_clear(), runtime.compiled.cache_clear()
        return tmp_path / "cache" / "cuda"

    anew()
    yield anew
    monkeypatch.undo()
    anew()


@needs_nvrtc
def test_machine_code_is_kept_and_damage_is_compiled_again_with_one_warning(disk, monkeypatch):
    code = runtime.compiled("trial.cu", "sm_80").code
    (path,) = disk().iterdir()
    assert re.fullmatch(r"trial-[0-9a-f]{64}\.cubin", path.name)
    with monkeypatch.context() as patch:
        patch.setattr("cuda.core.Program", None)  # nothing compiles
        assert runtime.compiled("trial.cu", "sm_80").code == code
    disk()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=rf"damaged file in its kernel cache .*: {path.name} is truncated") as said:
        assert runtime.compiled("trial.cu", "sm_80").code == code
    assert len(said) == 1
    disk()
    assert runtime.compiled("trial.cu", "sm_80").code == code


@needs_nvrtc
@pytest.mark.parametrize("fault", ["file", "room"])
def test_a_cache_that_cannot_be_written_costs_one_warning(disk, fault):
    if fault == "file":
        disk().parent.write_text("in the way")
    message = r"cannot write its kernel cache .*cuda \(.*\); kernels are compiled anew"
    with pytest.warns(UserWarning, match=message) as said, largest_file(1000 if fault == "room" else 1 << 40):
        runtime.compiled("trial.cu", "sm_80"), runtime.compiled("trial.cu", "sm_90")
    assert len(said) == 1
    assert fault == "file" or list(disk().iterdir()) == []


def test_why_unavailable_names_the_next_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    assert runtime.why_unavailable() == "cuda-core is missing: pip install 'fmtsim[cuda]'"
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None if name == "cuda.bindings" else object())
    assert runtime.why_unavailable() == "cuda-bindings is missing: pip install cuda-bindings"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # no package would help
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runtime.why_unavailable() == f"torch {torch.__version__} was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "sees no CUDA device; look at nvidia-smi" in runtime.why_unavailable()


@pytest.fixture
def capabilities(monkeypatch):
    """Let torch see devices called T4 of the capabilities in the returned list; nothing of them is remembered."""
    devices = []
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_capability", devices.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "T4")
    cached = (runtime.capability, runtime._why_not, runtime.serves)
    for function in cached:
        function.cache_clear()
    yield devices
    for function in cached:
        function.cache_clear()


def test_old_devices_are_refused(capabilities):
    capabilities += [(7, 5), (8, 9)]
    assert runtime.why_unavailable(0) == "T4 has compute capability 7.5; kernels need 8.0 or later"
    assert runtime.why_unavailable(torch.device("cuda:1")) is None and runtime.available()
    assert not runtime.available(0)


@pytest.mark.parametrize(
    ("build", "capability", "reason"),
    [
        ("6.4.43482", (9, 4), "is built for ROCm 6.4.43482; kernels are CUDA C\\+\\+ for NVIDIA GPUs"),
        (None, (7, 5), "T4 has compute capability 7.5; kernels need 8.0 or later"),
    ],
)
def test_torch_operations_serve_other_devices_with_one_warning(capabilities, monkeypatch, build, capability, reason):
    """ROCm's devices are called cuda, too, and an MI300X has compute capability 9.4."""
    monkeypatch.setattr(torch.version, "hip", build)
    capabilities.append(capability)
    x = SimpleNamespace(is_cuda=True, is_cpu=False, get_device=lambda: 0, dtype=torch.float32)
    spec = cast_spec("e4m3")
    message = f"^tensors on cuda:0 are served by torch operations, not by kernels: .*{reason}$"
    with pytest.warns(UserWarning, match=message):
        assert ops.engine_for("quantize", spec, x, x) is fmtsim.torch_engine
    assert ops.engine_for("quantize", spec, x, x) is fmtsim.torch_engine and ops.fused_engine(x) is None
    assert re.search(reason, runtime.why_unavailable())


def test_arguments_lie_as_c_has_them():
    values = (None, np.int32(-2), np.float32(1.5), b"abc", np.uint8(7), np.float64(2.5), np.bool_(True), np.int16(-1))
    layout = launch._Layout(values)
    assert layout.sizes == [8, 4, 4, 3, 1, 8, 1, 2]
    memory = layout.fill(values)
    held = [bytes(memory.bytes)[16 * i : 16 * i + size] for i, size in enumerate(layout.sizes)]
    wanted = [bytes(8), *(value if isinstance(value, bytes) else value.tobytes() for value in values[1:])]
    assert held == wanted
    start = memory.pointers[0]
    assert start % 16 == 0 and list(memory.pointers) == [start + 16 * i for i in range(8)]


def test_arguments_without_a_width_are_refused():
    for value in (3, 1.5, "text", np.complex64(1)):
        refused("has no width in C; wrap it in a numpy scalar", launch._Layout, (value,), error=TypeError)
    with pytest.raises(TypeError, match="a structure of 3 bytes was given 2"):
        launch._Layout((b"abc",)).fill((b"ab",))


def test_memory_of_a_launch_is_not_shared_until_it_is_put_back():
    layout = launch._Layout((np.int32(1),))
    first, second = layout.fill((np.int32(1),)), layout.fill((np.int32(2),))
    assert first is not second and bytes(first.bytes)[0] == 1
    layout.free.append(first)
    assert layout.fill((np.int32(3),)) is first


@pytest.fixture
def trial(request, monkeypatch):
    """Return a kernel on a device that does not exist, of parameters of these sizes, and the list of its launches."""
    monkeypatch.setattr(launch, "current_gpu", lambda: 0)
    for module in (launch, recorder):
        monkeypatch.setattr(module, "current_stream", lambda index: 99)
    kernel, sizes, launches = launch.Kernel.__new__(launch.Kernel), request.param, []
    kernel._name, kernel._index, kernel._function, kernel._sizes = "trial", 0, "function", sizes
    kernel._layouts, kernel._shared = {}, launch.USUAL_SHARED

    def start(function, *rest):
        words = (ctypes.c_uint64 * 2).from_address(rest[8])
        launches.append((rest[:8], [ctypes.string_at(word, size) for word, size in zip(words, sizes, strict=True)]))
        return (0,)

    kernel._launch = start
    return kernel, launches


@pytest.mark.parametrize("trial", [[8, 4]], indirect=True)
def test_bound_launches_are_whole_ones(trial):
    kernel, launches = trial
    kernel((3, 2), 64, np.uint64(5), np.int32(-7), shared=8)
    bound = kernel.bound((64, 2), 1, np.int32(-7))
    for grid, word in ((3, 5), (1, 2**64 - 1), (3, 6)):
        bound(grid, word)
    number = np.int32(-7).tobytes()
    assert launches == [
        ((3, 2, 1, 64, 1, 1, 8, 99), [np.uint64(5).tobytes(), number]),
        ((3, 1, 1, 64, 2, 1, 0, 99), [np.uint64(5).tobytes(), number]),
        ((1, 1, 1, 64, 2, 1, 0, 99), [bytes([255]) * 8, number]),
        ((3, 1, 1, 64, 2, 1, 0, 99), [np.uint64(6).tobytes(), number]),
    ]
    refused(r"trial takes arguments of \[8, 4\] bytes, not of \[8, 8\]", kernel.bound, 64, 2, error=TypeError)
    refused(r"trial takes arguments of \[8, 4\] bytes, not of \[8, 12\]", kernel.bound, 64, (8, 12), error=TypeError)


@pytest.mark.parametrize("trial", [[8, 20]], indirect=True)
def test_bound_launches_take_structures(trial):
    kernel, launches = trial
    bound = kernel.bound(64, (8, 20))
    first, second = bytes(range(8)), bytes(range(20))
    bound((3, 2, 1), first, second)
    bound(4, second[:8], second[::-1])
    assert launches == [
        ((3, 2, 1, 64, 1, 1, 0, 99), [first, second]),
        ((4, 1, 1, 64, 1, 1, 0, 99), [second[:8], second[::-1]]),
    ]


@pytest.mark.parametrize("trial", [[8, 24]], indirect=True)
def test_launches_that_are_written_down_are_packed_by_the_program(trial):
    kernel, launches = trial
    programs, pair = Programs(), struct.Struct("<qQd")

    def function(x):
        y = torch.empty_like(x)
        kernel((3, 2), (32, 4), y, Structure(pair, (7, x, 0.5)), shared=16)
        return y

    for i in range(4):
        x = torch.full((4, 6), float(i))
        y, _ = programs.run("key", [x], lambda x=x: function(x))
        data = [np.uint64(y.data_ptr()).tobytes(), pair.pack(7, x.data_ptr(), 0.5)]
        assert launches[i] == ((3, 2, 1, 32, 4, 1, 16, 99), data)
    assert len(launches) == 4 and len(next(iter(kernel._layouts.values())).free) == 1


def on(device=0):
    x = torch.arange(1000.0, device=f"cuda:{device}")
    return SimpleNamespace(x=x, y=torch.zeros_like(x))


def add(device=0, defines=()):
    return runtime.kernel("trial.cu", "add", device, defines)


@needs_gpu
def test_launches_run_on_the_current_stream():
    t = on()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        t.x += 1  # on the side stream, late: a launch on another stream would miss it
        add()(4, 256, t.x, t.y, np.int64(1000))
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(t.y, t.x + 1)


@needs_gpu
def test_every_kind_of_argument_arrives():
    y = torch.zeros(8, device="cuda", dtype=torch.float64)
    structure = np.array([(-3, 0.5, 0.25)], dtype="i4,f4,f8").tobytes()
    arguments = (np.uint8(200), np.int32(-5), np.float32(1.5), structure, None, np.uint64(2**63))
    runtime.kernel("trial.cu", "show", 0)((1, 1, 1), (1,), y, *arguments)
    assert y.tolist() == [200, -5, 1.5, -3, 0.5, 0.25, 1, 2.0**63]
    with pytest.raises(TypeError, match=r"show takes arguments of \[8, 1, 4, .*\] bytes, not of \[8, 4"):
        runtime.kernel("trial.cu", "show", 0)(1, 1, y, np.int32(200), *arguments[1:])


@needs_gpu
def test_shared_memory_beyond_48_kib_is_announced_and_too_much_is_an_error():
    y = torch.zeros(32, device="cuda", dtype=torch.int32)
    limit = runtime.shared_limit(0)
    assert limit > 64 * 1024
    kernel = runtime.kernel("trial.cu", "much", 0)
    for size in (1024, limit, 60 * 1024):
        kernel(1, 32, y.zero_(), np.int32(size), shared=size)
        assert y.tolist() == list(range(32))
    with pytest.raises(DeviceError, match=f"much cannot be launched on cuda:0 with shared={limit + 1}.*INVALID_VALUE"):
        kernel(1, 32, y, np.int32(8), shared=limit + 1)
    with pytest.raises(DeviceError, match=r"with grid=1, block=2048, shared=0: CUDA_ERROR_INVALID_VALUE .*; the grid"):
        kernel(1, 2048, y, np.int32(8))
    kernel(1, 32, y.zero_(), np.int32(64), shared=64)  # an error that was refused leaves the device in order
    assert y.tolist() == list(range(32))


@needs_gpu
def test_a_kernel_that_is_not_there_is_an_error():
    with pytest.raises(DeviceError, match=r"nothing \(trial.cu\) cannot be loaded on cuda:0 \(sm_\d+\): "):
        runtime.kernel("trial.cu", "nothing", 0)


@needs_gpu
def test_graphs_capture_launches_but_no_loading():
    t = on()
    add()(4, 256, t.x, t.y, np.int64(1000))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add()(4, 256, t.x, t.y, np.int64(1000))
        with pytest.raises(DeviceError, match=r"run the call once, or fmtsim.cuda.warmup\(\), before the capture"):
            add(defines=(("STEP", "9"),))
    t.x += 5
    t.y.zero_()
    graph.replay()
    assert torch.equal(t.y, t.x + 1)


@needs_gpu
def test_threads_may_launch_at_once():
    kernels = [add(defines=(("STEP", str(step)),)) for step in range(4)]
    wrong = []

    def work(step):
        for size in range(1, 400):
            x = torch.full((size,), float(size), device="cuda")
            y = torch.zeros_like(x)
            kernels[step](2, 256, x, y, np.int64(size))
            if size % 20 == 0 and not bool((y == size + step).all()):
                wrong.append((step, size))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [0, 1, 2, 3] * 2))
    assert not wrong


@needs_gpu
def test_a_thread_that_has_not_used_cuda_launches():
    t = on()
    kernel = add()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(kernel, 4, 256, t.x, t.y, np.int64(1000)).result()
    torch.cuda.synchronize()
    assert torch.equal(t.y, t.x + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@needs_gpu
def test_launches_go_to_the_device_of_the_tensor():
    t = on(1)
    assert runtime.device_index(t.x) == 1
    add(1)(4, 256, t.x, t.y, np.int64(1000))
    assert torch.equal(t.y, t.x + 1) and torch.cuda.current_device() == 0
