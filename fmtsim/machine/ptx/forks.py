# SPDX-License-Identifier: Apache-2.0
"""What kernels and their libraries ask of a GPU inside ``simulate``: ``kernel[grid](...)``, the driver, torch.cuda.

Kernel libraries look at ``x.is_cuda`` and ``x.device`` before they launch, and count multiprocessors to choose a grid.
Code that imports Triton sees its CPU tensors on ``cuda:0``; other code sees them where they are.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.machine.ptx import triton

_GPU = torch.device("cuda", 0)
_NAMES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
PROPERTIES = {
    "major": 9, "minor": 0, "multi_processor_count": triton.MULTIPROCESSORS, "total_memory": 85_017_493_504,
    "warp_size": 32, "shared_memory_per_block": 49_152, "shared_memory_per_block_optin": triton.SHARED_LIMIT,
    "shared_memory_per_multiprocessor": 233_472, "regs_per_multiprocessor": 65_536, "L2_cache_size": 52_428_800,
    "max_threads_per_multi_processor": 2_048, "max_threads_per_block": 1_024,
}  # fmt: skip
_OWN = ("torch", "triton", "fmtsim")  # packages that are told the truth
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def asks_for_gpu(frame: FrameType | None) -> bool:
    """Return True for code of a kernel library: a module that imports Triton, or one of its package that it calls."""
    own = str(frame.f_globals.get("__name__", "")).partition(".")[0] if frame else ""
    while frame is not None and own not in _OWN:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in (own, "importlib"):  # a library may ask while it is imported
            return False
        if "triton" in frame.f_globals:
            return True
        frame = frame.f_back
    return False


def on_gpu(
    function: Any, args: Any, kwargs: dict[str, Any], frame: FrameType | None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a call of torch as a simulation makes it: what is wanted on a GPU is made and stays on the CPU.

    Args:
        function: What was called, with its ``args`` and ``kwargs``.
        frame: Who called.
    """
    if function in (_DEVICE, _IS_CUDA) and asks_for_gpu(frame):
        answer = _GPU if function == _DEVICE else True
        return (lambda *_: answer), args, kwargs
    if function is torch.Tensor.cuda:
        return torch.Tensor.to, (args[0], "cpu"), {}
    if _is_gpu(kwargs.get("device")):
        kwargs = {**kwargs, "device": "cpu"}
    if function is torch.Tensor.to and any(_is_gpu(x) for x in args[1:]):
        args = tuple("cpu" if _is_gpu(x) else x for x in args)
    return function, args, kwargs


def _is_gpu(device: Any) -> bool:
    """Return True for ``"cuda"``, ``"cuda:0"``, or the device of that name."""
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def forks(running: Callable[[], Any]) -> Iterator[tuple[Any, str, Callable]]:
    """Yield attributes that a simulation replaces: owner, name, and a function that it calls before the host's own.

    The function gets the host's own first; it is called in threads that simulate.

    Args:
        running: Returns the simulation that the thread is in.
    """
    autocast = torch.is_autocast_enabled, torch.get_autocast_dtype
    answers = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: _NAMES[running().target],
        "get_device_properties": lambda device=None: SimpleNamespace(name=_NAMES[running().target], **PROPERTIES),
        "_DeviceGuard": lambda device: nullcontext(),  # of Inductor's graphs
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0, device=_GPU, synchronize=lambda: None),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    for name, answer in answers.items():
        yield torch.cuda, name, lambda host, *args, _answer=answer, **kwargs: _answer(*args, **kwargs)
    for name, number in (("is_available", True), ("device_count", 1)):
        yield torch.cuda, name, lambda host, _answer=number: _answer if asks_for_gpu(sys._getframe(2)) else host()
    for owner, name in ((torch.cuda.device, "__init__"), (torch.cuda.device_of, "__init__")):
        yield owner, name, lambda host, self, *_: vars(self).update(idx=0, prev_idx=0)
    for name in ("__enter__", "__exit__"):
        yield torch.cuda.device, name, lambda host, *args: None
    # a backward pass runs a library's code: with plain tensors it is no function that a mode takes, and is left
    yield (
        torch.autograd,
        "has_torch_function",
        lambda host, tensors: not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, tensors)) and host(tensors),
    )
    yield torch._C, "_cuda_getCurrentRawStream", lambda host, device: 0
    # a simulation's autocast is the CPU's
    yield torch, "is_autocast_enabled", lambda host, device="cuda": host("cpu" if device == "cuda" else device)
    yield (
        torch,
        "get_autocast_dtype",
        lambda host, device: host("cpu" if device == "cuda" and autocast[0]("cpu") else device),
    )
    yield torch, "get_autocast_gpu_dtype", lambda host: autocast[1]("cpu" if autocast[0]("cpu") else "cuda")
    if find_spec("triton") is not None:
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime import autotuner, driver
        from triton.runtime.jit import JITFunction

        def launched(host: Any, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                if warmup:
                    function, named, _ = triton.configured(kernel, None, args, named)
                    return triton.compiled(function, args, named)[0]
                return _launched(running(), triton.program(kernel, grid, args, named))

        def runner(host: Any, found: Any) -> Any:
            # compiled.run(x, y, z, stream, function, packed metadata, launch metadata, two hooks, *values)
            def run(*given: Any) -> None:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    _launched(running(), triton.bound_program(found, given[:3], given[9:]))

            return run

        yield CompiledKernel, "run", runner
        yield CompiledKernel, "_init_handles", lambda host, found: None
        yield JITFunction, "run", launched
        yield autotuner.Autotuner, "run", launched
        yield type(driver), "active", lambda host, config: triton.Driver()


def _launched(run: Any, program: triton.Program) -> Any:
    """Launch a kernel of Triton as its launcher does, and return what Triton compiled."""
    from fmtsim.machine.ptx import launching

    # the launcher starts nothing where a grid is empty
    if 0 not in (program.grid if isinstance(program.grid, tuple | list) else (program.grid,)):
        run.count(launching.run(program, run.target))
    return program.compiled
