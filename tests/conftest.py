# SPDX-License-Identifier: Apache-2.0
"""Make helpers of the tests importable as ``tests.*`` wherever pytest is started; fixtures that folders share."""

import gc
import importlib
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from _pytest.doctest import DoctestModule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
gc.disable()  # until all tests are collected

# Workers, and processes that tests start, share the cores: where threads are more, they wait for each other, and some
# tests take four times as long.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if WORKERS > 1 and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORKERS))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())

if torch.cuda.is_available():  # torch's compiler warns, and keeps torch.mm as it finds it: load it before tests
    with warnings.catch_warnings(action="ignore"):
        for name in ("compile_fx", "kernel.mm"):
            importlib.import_module(f"torch._inductor.{name}")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for no examples in tests: it takes seconds, and what tests share would be imported a second time."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


CHECKOUT = tuple(Path(__file__).parent / name for name in ("studies", "benchmarks", "tools"))


def pytest_ignore_collect(collection_path, config):
    """Import none of the tests of what the wheel does not have where none of them would run, unless they are named."""
    named = any(str(folder) in str(Path(word).resolve()) for word in config.args for folder in CHECKOUT)
    return True if "not checkout" in config.option.markexpr and collection_path in CHECKOUT and not named else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests of what the wheel does not have."""
    for item in items:
        if any(folder in item.path.parents for folder in CHECKOUT):
            item.add_marker(pytest.mark.checkout)


def pytest_collection_finish():
    """Let no garbage collection look at modules and tests again and again: they stay until the end."""
    gc.enable()
    gc.freeze()


@pytest.fixture
def one_thread():
    """Keep torch on one thread, and give it back the number that it had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def emulated(monkeypatch):
    """Run the CUDA engine's kernels on the host, on CPU tensors, as a device of compute capability 9.0."""
    from tests.cuda import emulator

    if emulator.COMPILER is None:
        pytest.skip("kernels run on the host only where there is a C++ compiler (g++)")
    with emulator.emulated():
        yield
        monkeypatch.undo()  # or what a test replaced in here would outlive it


@pytest.fixture
def emulated_device(emulated):
    """Return the device of emulated kernels."""
    return torch.device("cpu")


@pytest.fixture
def gpu_device():
    """Return a GPU where the CUDA engine has one."""
    import fmtsim.cuda

    if not fmtsim.cuda.available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture(params=["emulated", "gpu"])
def device(request):
    """Return the CPU with kernels emulated on it, then a GPU."""
    return request.getfixturevalue(f"{request.param}_device")


@pytest.fixture
def scratch(monkeypatch):
    """Let a test register formats that are gone after it."""
    registry = importlib.import_module("fmtsim.formats.registry")
    monkeypatch.setattr(registry, "_formats", dict(registry._formats))
    monkeypatch.setattr(registry, "_lookup", dict(registry._lookup))
