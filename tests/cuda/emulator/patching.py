# SPDX-License-Identifier: Apache-2.0
"""A pretended device: what ``fmtsim.cuda.runtime`` says while kernels run on the host."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import fmtsim.cuda
from fmtsim.cuda import runtime
from tests.cuda.emulator.kernels import HostKernel

FIRST = 1000  # numbers of pretended devices: what engines cache for them never meets a real device
SHARED = {(8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376}


@contextmanager
def emulated(
    capability: tuple[int, int] = (9, 0),
    *,
    multiprocessors: int = 4,
    reversed_order: bool = False,
    self_tests: bool = False,
) -> Iterator[None]:
    """Let the engine run on CPU tensors as if they were on a device of a compute capability.

    ``multiprocessors`` is small, so that persistent kernels run several waves; ``reversed_order`` runs threads and
    blocks backwards. With ``self_tests`` fast paths of products are tested before they serve, as on a device; nothing
    is remembered on disk.
    """
    major, minor = capability
    device = FIRST + 2 * (10 * major + minor) + reversed_order
    kernels: dict[Any, HostKernel] = {}

    def kernel(file: str, name: str, index: int, defines: runtime.Defines = ()) -> HostKernel:
        key = (file, name, tuple(defines))
        if key not in kernels:
            kernels[key] = HostKernel(file, name, defines, capability, reversed_order=reversed_order)
        return kernels[key]

    pretended = {
        "kernel": kernel, "device_index": lambda tensor: device, "capability": lambda index: capability,
        "architecture": lambda index: f"sm_{major}{minor}", "multiprocessors": lambda index: multiprocessors,
        "shared_limit": lambda index: SHARED.get(capability, 232448), "available": lambda device=None: True,
        "why_unavailable": lambda device=None: None,
    }  # fmt: skip
    with replaced(pretended), _self_tests(self_tests):
        yield


@contextmanager
def _self_tests(enabled: bool) -> Iterator[None]:
    """Forget which fast paths were chosen, and trust them all unless self-tests are enabled."""
    self_test = importlib.import_module("fmtsim.cuda.gemm.self_test")
    stand_ins: dict[str, Any] = {"_chosen": {}, "_verdicts": {}, "_passed": lambda index: None}
    stand_ins |= {"_versions": lambda: "NVRTC none"} if enabled else {"passes": lambda path, job, plan: True}
    capturing = mock.patch("torch.cuda.is_current_stream_capturing", lambda: False)
    with mock.patch.multiple(self_test, **stand_ins), capturing:
        yield


@contextmanager
def replaced(stand_ins: dict[str, Any]) -> Iterator[None]:
    """Replace functions of the engine's runtime there and in every module of the engine that holds them by name."""
    for module in pkgutil.walk_packages(fmtsim.cuda.__path__, "fmtsim.cuda."):
        importlib.import_module(module.name)  # one imported later would keep a stand-in for good
    with ExitStack() as stack:
        originals = {name: getattr(runtime, name) for name in stand_ins}
        for module in [module for name, module in sys.modules.items() if name.startswith("fmtsim.cuda")]:
            for name, stand_in in stand_ins.items():
                if getattr(module, name, None) is originals[name]:
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        yield
