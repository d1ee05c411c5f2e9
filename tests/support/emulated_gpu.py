# SPDX-License-Identifier: Apache-2.0
"""Layers on the host that take the emulated device for a GPU."""

import torch

from fmtsim import replay
from fmtsim.gemm.layers import keys, linear, operand, operator, product
from fmtsim.ops import load_engine

_MODULES = keys, linear, operand, operator, product


def take_for_gpu(device, monkeypatch):
    """Give the CPU the engine of GPUs, and the products with float32 results that they have."""
    if device.type != "cpu":
        return
    for module in _MODULES:
        monkeypatch.setattr(module, "fused_engine", lambda t: load_engine("cuda"), raising=False)
        monkeypatch.setattr(module, "is_on_gpu", lambda t: t.dtype != torch.float64, raising=False)
    monkeypatch.setattr(replay, "_is_on_gpu", lambda t: t.dtype != torch.int64)  # keys are the host's
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype=None: mm(x.float(), y.float()) if out_dtype else mm(x, y))


def take_for_host(monkeypatch):
    """Let layers be what they are on a CPU."""
    for module in _MODULES:
        monkeypatch.setattr(module, "fused_engine", lambda t: None, raising=False)
        monkeypatch.setattr(module, "is_on_gpu", lambda t: False, raising=False)
