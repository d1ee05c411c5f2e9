# SPDX-License-Identifier: Apache-2.0
"""The engines of casts behind one interface: torch operations, CPU kernels, CUDA kernels on the host and on a GPU."""

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from fmtsim import cpu, torch_engine
from fmtsim.casts.encoded import Encoded
from fmtsim.cuda.cast import casts as cuda_casts
from fmtsim.spec.cast import CastSpec, EncodedParts, Random
from tests.support.bits import assert_same_bits
from tests.support.casts import check_parts

HOST_ENGINES = ("torch", "cpu")
CUDA_ENGINES = ("emulated", "gpu")


class Engine:
    """An engine's verbs for tensors on the CPU; what its kernels do not cover goes to torch operations."""

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name, self.device = name, device or torch.device("cpu")
        modules = {"torch": "torch_engine", "cpu": "cpu"}
        self.module = importlib.import_module(f"fmtsim.{modules.get(name, 'cuda.cast.casts')}")

    def _serving(self, verb: str, spec: CastSpec, *tensors: torch.Tensor) -> ModuleType:
        covers = getattr(self.module, "supports", lambda *_: True)
        return self.module if covers(verb, spec, *tensors) else torch_engine

    def quantize(self, x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> None:
        source, random = self.moved(x), self.moved(random)
        target = source if out is x else self.moved(out)
        self._serving("quantize", spec, source, target).quantize(source, spec, random, target)
        if target is not out:
            out.copy_(target)

    def encode(self, x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        source = self.moved(x)
        parts = self._serving("encode", spec, source).encode(source, spec, self.moved(random))
        return EncodedParts(*(None if part is None else part.cpu() for part in parts))

    def decode(self, parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
        target = self.moved(out)
        self._serving("decode", spec, target).decode(EncodedParts(*map(self.moved, parts)), spec, target)
        if target is not out:
            out.copy_(target)

    def moved(self, x):
        """Return a tensor on the engine's device, with its strides and its place in memory; others as they are."""
        if not isinstance(x, torch.Tensor) or x.device.type == self.device.type:
            return x
        storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(self.device)
        return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def with_engines(
    names: Iterable[Any], on_cuda: Sequence[str] | None = None, engines: Sequence[str] = HOST_ENGINES + CUDA_ENGINES
) -> pytest.MarkDecorator:
    """Run a test with every engine and format; with CUDA kernels, those outside ``on_cuda`` are slow: they compile."""
    cases = []
    for engine in engines:
        for fmt in names:
            name = getattr(fmt, "name", fmt)
            slow = engine in CUDA_ENGINES and on_cuda is not None and name not in on_cuda
            cases.append(pytest.param(engine, fmt, marks=pytest.mark.slow if slow else (), id=f"{name}-{engine}"))
    return pytest.mark.parametrize(("engine", "fmt"), cases, indirect=["engine"])


def check_with_torch(
    engine: Engine, x: torch.Tensor, spec: CastSpec, random: Random, *out_dtypes: torch.dtype, in_place: bool = False
) -> None:
    """Compare codes and scales with those of torch operations, and values in each of some dtypes."""
    check_parts(f"encode {spec}", engine.encode(x, spec, random), torch_engine.encode(x, spec, random), x)
    for out_dtype in out_dtypes:
        expected = torch.empty(x.shape, dtype=out_dtype)
        torch_engine.quantize(x, spec, random, expected)
        out = x.clone() if in_place and x.dtype == out_dtype else torch.empty(x.shape, dtype=out_dtype)
        engine.quantize(out if in_place and x.dtype == out_dtype else x, spec, random, out)
        assert_same_bits(out, expected, x, what=f"quantize {spec} to {out_dtype}")


def check_packed(engine: Engine, x: torch.Tensor, spec: CastSpec, random: Random) -> None:
    """Compare codes and scales that CUDA kernels pack with those of an encoded tensor."""
    expected = Encoded.from_parts(cpu.encode(x, spec, random), spec.format, x.shape, spec.dim)
    found = cuda_casts.encode_packed(engine.moved(x), spec, engine.moved(random))
    for name in ("codes", "scales", "tensor_scale", "offsets"):
        assert_same_bits(getattr(found, name), getattr(expected, name), what=f"{name} of {spec.format.name}, packed")
