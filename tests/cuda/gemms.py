"""The CUDA engine in place of the CPU's, so that the tests of one are tests of the other."""

import importlib
from dataclasses import dataclass, field

import torch

from fmtsim.spec.gemm_spec import GemmSpec
from tests.support import gemm_engine

DOOR = importlib.import_module("fmtsim.cuda.gemm.engine")  # the package has a function of that name
GENERAL = importlib.import_module("fmtsim.cuda.gemm.general")


@dataclass
class Engine:
    """The verb gemm on a device, for tensors on the CPU; ``launched`` has the kernels that ran."""

    device: torch.device
    launched: list[str] = field(default_factory=list)

    def supports_gemm(self, spec: GemmSpec, a: torch.Tensor, b: torch.Tensor) -> bool:
        return DOOR.supports_gemm(spec, a.to(self.device), b.to(self.device))

    def gemm(self, a, b, c, scale_a, scale_b, spec, random, out) -> None:
        on_device = [None if x is None else moved(x, self.device) for x in (a, b, c, scale_a, scale_b)]
        result = torch.full(out.shape, 7, dtype=out.dtype, device=self.device)
        DOOR.gemm(*on_device, spec, random, result)
        out.copy_(result)


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device with the strides that it has."""
    if x.device == device:
        return x
    result = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return result.copy_(x)


def install(monkeypatch, device: torch.device, *, fast: bool) -> Engine:
    """Make the tests of the CPU engine call the CUDA engine; without ``fast`` its general path alone."""
    engine = Engine(device)
    monkeypatch.setattr(gemm_engine, "supports_gemm", engine.supports_gemm)
    monkeypatch.setattr(gemm_engine, "gemm", engine.gemm)
    if not fast:
        monkeypatch.setattr(DOOR, "_FAST", ())
    launch = GENERAL._launch

    def recorded(job, results, file, *rest, **options):
        engine.launched.append(file)
        launch(job, results, file, *rest, **options)

    monkeypatch.setattr(GENERAL, "_launch", recorded)
    return engine
