# SPDX-License-Identifier: Apache-2.0
"""The engine fixture: each test that asks for it runs once with every engine."""

import importlib
from types import ModuleType, SimpleNamespace

import pytest

ENGINES = ["fmtsim.engines.torch_engine", "fmtsim.engines.cpu"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> ModuleType | SimpleNamespace:
    """Return one engine after the other; what the CPU kernels do not cover goes to torch operations."""
    module = importlib.import_module(request.param)
    return served(module) if hasattr(module, "supports") else module


def served(cpu: ModuleType) -> SimpleNamespace:
    """Return the verbs of the CPU engine where it covers a cast, else those of the torch engine."""
    fallback = importlib.import_module("fmtsim.engines.torch_engine")

    def chosen(verb, spec, *tensors):
        return cpu if cpu.supports(verb, spec, *tensors) else fallback

    return SimpleNamespace(
        quantize=lambda x, spec, random, out: chosen("quantize", spec, x, out).quantize(x, spec, random, out),
        encode=lambda x, spec, random: chosen("encode", spec, x).encode(x, spec, random),
        decode=lambda parts, spec, out: chosen("decode", spec, out).decode(parts, spec, out),
    )


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Keep torch on one thread: the tensors are small, and other tests may run beside these."""
