# SPDX-License-Identifier: Apache-2.0
"""Which engine does the steps of a test."""

import pytest

from fmtsim.cpu.optim import optimizer_steps as cpu_steps
from fmtsim.cuda.optim import fused_steps as cuda_steps
from fmtsim.optim import stepping


@pytest.fixture
def only_torch(monkeypatch):
    """Return what leaves steps to torch operations from then on."""

    def switch():
        monkeypatch.setattr(cpu_steps, "RULES", {})
        monkeypatch.setattr(cuda_steps, "RULES", {})

    return switch


@pytest.fixture
def on_cuda(emulated, monkeypatch):
    """Let the CUDA kernel, emulated, take parameters that lie on the CPU."""
    monkeypatch.setattr(stepping, "on_cuda", lambda p: True)
