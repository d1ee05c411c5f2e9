# SPDX-License-Identifier: Apache-2.0
"""Layers on the host that take the emulated device for a GPU."""

import importlib

import torch

from fmtsim.casts.ops import load_engine
from fmtsim.gemm.layers import compile, emulated_gemm, keys, layer, multiply, quantize_operand
from fmtsim.gemm.layers.compile import OperandRequest, traced_draws
from fmtsim.gemm.layers.keys import Layer
from fmtsim.recipes import get_recipe
from fmtsim.support.replay import programs
from tests.support.operands import bfloat16s

_MODULES = compile, emulated_gemm, keys, layer, multiply, quantize_operand


def take_for_gpu(device, monkeypatch):
    """Give the CPU the engine of GPUs, and the products with float32 results that they have."""
    if device.type != "cpu":
        return
    for module in _MODULES:
        monkeypatch.setattr(module, "fused_engine", lambda t: load_engine("cuda"), raising=False)
        monkeypatch.setattr(module, "is_on_gpu", lambda t: t.dtype != torch.float64, raising=False)
    monkeypatch.setattr(programs, "_is_on_gpu", lambda t: t.dtype != torch.int64)  # keys are the host's
    # torch's compiler keeps torch.mm for good as it is when the compiler loads: let it load before
    importlib.import_module("torch._inductor.kernel.mm")
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype=None: mm(x.float(), y.float()) if out_dtype else mm(x, y))


def take_for_host(monkeypatch):
    """Let layers be what they are on a CPU."""
    for module in _MODULES:
        monkeypatch.setattr(module, "fused_engine", lambda t: None, raising=False)
        monkeypatch.setattr(module, "is_on_gpu", lambda t: False, raising=False)
    monkeypatch.setattr(programs, "_is_on_gpu", lambda t: False)


def drawn(name, device):
    """What a pass draws at once of all operands of the backward products of a layer, and what it is made of."""
    drawing = Layer(get_recipe(name).linear, torch.Generator().manual_seed(9))
    x, w, g = (bfloat16s(*size, seed=i, device=device) for i, size in enumerate(((128, 128), (256, 128), (128, 256))))
    factor = torch.tensor(0.75, device=device)
    operands = ("g_d", g, -1), ("g_w", g, 0), ("w_d", w, 0, factor), ("x_w", x, 0, factor)
    asked = [OperandRequest(*fields) for fields in operands]
    asked = [operand for operand in asked if operand.name in drawing.random]
    if drawing.quantizers["x_w"].source == "original":
        asked = [operand._replace(factor=None) for operand in asked]
    return drawing, asked, lambda: traced_draws(drawing, asked)
