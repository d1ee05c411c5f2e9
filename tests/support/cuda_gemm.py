# SPDX-License-Identifier: Apache-2.0
"""Products of the CUDA engine: all of it in place of the CPU's, one fast path alone, and one with planted errors."""

import importlib
from dataclasses import dataclass, field

import torch

from fmtsim import Datapath, get_unit
from fmtsim.cpu.gemm.engine import gemm as cpu_gemm
from fmtsim.cpu.gemm.engine import supports_gemm as cpu_supports
from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import self_test
from fmtsim.cuda.gemm.job import TILE, FastPath, Gpu, Job, Plan, accumulation_order, gpu_of
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from tests.support import gemm_engine
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import addend, operand, unit_scales
from tests.support.gemm_oracle import sums as oracle

DISPATCH = importlib.import_module("fmtsim.cuda.gemm.engine")
GENERAL = importlib.import_module("fmtsim.cuda.gemm.general")
PASSED, COMPARED = self_test._passed, self_test._compared  # what tests replace
KEY = RandomKey(1 << 63, (1 << 40) + 3)
HALF = Datapath(block=16, fraction_bits=25, min_exponent=-133)
FP8 = get_unit("ada.mma").mode("e4m3", "e4m3")


@dataclass
class Engine:
    """The verb gemm on a device, for tensors on the CPU; ``launched`` has the kernels of the general path that ran."""

    device: torch.device
    launched: list[str] = field(default_factory=list)

    def supports_gemm(self, spec: GemmSpec, a: torch.Tensor, b: torch.Tensor) -> bool:
        return DISPATCH.supports_gemm(spec, a.to(self.device), b.to(self.device))

    def gemm(self, a, b, c, scale_a, scale_b, spec, random, out) -> None:
        on_device = [moved(x, self.device) for x in (a, b, c, scale_a, scale_b)]
        result = torch.full(out.shape, 7, dtype=out.dtype, device=self.device)
        DISPATCH.gemm(*on_device, spec, random, result)
        out.copy_(result)


def moved(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return a tensor on a device with the strides that it has."""
    if x is None or x.device.type == torch.device(device).type:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def install(monkeypatch, device: torch.device, *, fast: bool | tuple[FastPath, ...]) -> Engine:
    """Make the helpers of products call the CUDA engine, with all its fast paths, none, or some."""
    engine = Engine(device)
    monkeypatch.setattr(gemm_engine, "supports_gemm", engine.supports_gemm)
    monkeypatch.setattr(gemm_engine, "gemm", engine.gemm)
    if fast is not True:
        monkeypatch.setattr(DISPATCH, "FAST", fast or ())
    launch = GENERAL._launch

    def recorded(job, sums, marks, file, *rest):
        engine.launched.append(file)
        launch(job, sums, marks, file, *rest)

    monkeypatch.setattr(GENERAL, "_launch", recorded)
    return engine


# One fast path alone.


def job_of(a, b, spec, c=None, scale_a=None, scale_b=None, *, device="cpu", random=KEY) -> Job:
    a, b, c, scale_a, scale_b = (moved(x, torch.device(device)) for x in (a, b, c, scale_a, scale_b))
    out = torch.full((a.shape[0], b.shape[0]), 7, dtype=sum_dtype(spec.datapath), device=a.device)
    order = accumulation_order(a.shape[1], spec, a.device)
    operands = dict(a=a, b=b, c=c, scale_a=scale_a, scale_b=scale_b)
    gpu = gpu_of(a) if runtime.device_index(a) >= 0 else Gpu((9, 0), 227 << 10)  # nothing runs: an H200's
    return Job(**operands, spec=spec, random=random, out=out, order=order, gpu=gpu)


def product_of(path: FastPath, a, b, spec, *rest, device="cpu"):
    """Return the sums [parts, M, N] of a path that takes a product, 7 where it wrote nothing, and its marks."""
    job = job_of(a, b, spec, *rest, device=device)
    plan = path.plan(job)
    assert plan is not None
    m, n = job.out.shape
    sums = torch.full((len(job.order.parts), m, n), 7, dtype=job.dtype, device=job.a.device)
    marks = torch.zeros(-(-m // TILE), -(-n // TILE), dtype=torch.uint8, device=job.a.device)
    path.run(job, plan, sums, marks)
    return sums.cpu(), marks.cpu()


def expected(a, b, spec, c=None, scale_a=None, scale_b=None) -> torch.Tensor:
    """Return what the CPU engine gives, or where it does not take the unit, the oracle."""
    if cpu_supports(spec, a, b):
        out = torch.empty(a.shape[0], b.shape[0], dtype=sum_dtype(spec.datapath))
        cpu_gemm(a, b, c, scale_a, scale_b, spec, KEY, out)
        return out
    options = {"c": c, "scale_a": scale_a, "scale_b": scale_b}
    if spec.datapath.rounding.mode == "stochastic":
        options["random"] = KEY
    return oracle(a, b, spec, sum_dtype(spec.datapath), **{name: x for name, x in options.items() if x is not None})


def check(path: FastPath, a, b, spec, *rest, device="cpu") -> int:
    """Fail unless all tiles that a path keeps have the right bits; return how many it leaves."""
    sums, marks = product_of(path, a, b, spec, *rest, device=device)
    m, n = sums.shape[1:]
    marked = marks.bool().repeat_interleave(TILE, 0)[:m].repeat_interleave(TILE, 1)[:, :n]
    assert_same_bits(torch.where(marked, 0, sums[0]), torch.where(marked, 0, expected(a, b, spec, *rest)))
    return int(marks.sum())


def check_kinds(path: FastPath, spec, shape, kinds, device="cpu", with_c=False) -> list[int]:
    """Check operands of several kinds of numbers; return how many tiles are left of each."""
    m, n, k = shape
    unchecked = []
    for i, kind in enumerate(kinds):
        a, b = operand(spec.a.name, m, k, kind, i), operand(spec.b.name, n, k, "normal" if i % 2 else kind, i + 50)
        c = addend(spec, m, n, "normal", i + 9) if with_c else None
        scales = [unit_scales(spec, rows, k, kind if kind == "wide" else "normal", i + rows) for rows in (m, n)]
        unchecked.append(check(path, a, b, spec, c, *scales, device=device))
    return unchecked


# Self-tests.


def made(spec, shape=(5, 6, 40), device="cpu", c=False, scales=True):
    """Return operands of a product and the tensor for its result."""
    m, n, k = shape
    a, b = operand(spec.a.name, m, k, "normal", 1), operand(spec.b.name, n, k, "normal", 2)
    scale_tensors = [unit_scales(spec, rows, k, "normal", 3) if scales else None for rows in (m, n)]
    operands = a, b, addend(spec, m, n, "normal", 4) if c else None, *scale_tensors
    operands = tuple(moved(x, torch.device(device)) for x in operands)
    return operands, torch.full((m, n), 7, dtype=sum_dtype(spec.datapath), device=device)


def made_job(spec, shape=(5, 6, 40), device="cpu", **options) -> Job:
    operands, _ = made(spec, shape, **options)
    a, b, c, scale_a, scale_b = operands
    return job_of(a, b, spec, c, scale_a, scale_b, device=device, random=None)


def dispatched(spec, shape=(5, 6, 40), **options) -> torch.Tensor:
    operands, out = made(spec, shape, **options)
    DISPATCH.gemm(*operands, spec, None, out)
    return out.cpu()


class Path:
    """A fast path that is the general one, with an error planted behind it."""

    def __init__(self, spoil=None, name: str = "fake") -> None:
        self.name, self.spoil, self.ran, self.asked = name, spoil, 0, 0

    def plan(self, job):
        self.asked += 1
        return Plan(None, (("fake.cu", "fake", (("BLOCK", str(job.order.block)), ("KEPT", "23"))),))

    def run(self, job, plan, sums, marks) -> None:
        self.ran += 1
        GENERAL.run(job, sums, None)
        if self.spoil is not None:
            self.spoil(job, sums, marks)


def flip(job, sums, marks):
    sums.view(torch.int32)[-1, -1, -1] ^= 1
