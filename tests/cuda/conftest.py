"""Fixtures of the CUDA engine's tests: kernels on the host, and one device after the other."""

import pytest
import torch

import fmtsim.cuda
from tests.cuda import emulator


@pytest.fixture
def emulated(monkeypatch):
    """Run the engine's kernels on the host, on CPU tensors, as a device of compute capability 9.0."""
    if emulator.COMPILER is None:
        pytest.skip("kernels run on the host only where there is a C++ compiler (g++)")
    with emulator.emulated():
        yield
        monkeypatch.undo()  # or what a test replaced in here would outlive it


@pytest.fixture(params=["host", "gpu"])
def device(request):
    """Yield the CPU with kernels emulated on it, then a real GPU where there is one."""
    if request.param == "gpu":
        if not fmtsim.cuda.available():
            pytest.skip("needs a GPU")
        yield torch.device("cuda")
    else:
        request.getfixturevalue("emulated")
        yield torch.device("cpu")
