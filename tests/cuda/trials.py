"""Products for the trials of fast paths, and a path into which errors can be planted."""

from types import ModuleType

import torch

from fmtsim import Datapath, get_unit
from fmtsim.cuda.gemm import trial as gemm_trial
from fmtsim.cuda.gemm.job import Job
from fmtsim.cuda.gemm.order import order_of
from fmtsim.spec.datapath import sum_dtype
from tests.cuda.gemms import DOOR, GENERAL, moved
from tests.support.gemm_engine import addend, operand, unit_scales

PASSED, COMPARED = gemm_trial._passed, gemm_trial._compared  # what tests replace
HALF = Datapath(block=16, fraction_bits=25, min_exponent=-133)
FP8 = get_unit("ada.mma").mode("e4m3", "e4m3")


def made(spec, shape=(5, 6, 40), device="cpu", c=False, scales=True):
    """Return operands of a product and the tensor for its result."""
    m, n, k = shape
    a, b = operand(spec.a.name, m, k, "normal", 1), operand(spec.b.name, n, k, "normal", 2)
    given = [unit_scales(spec, rows, k, "normal", 3) if scales else None for rows in (m, n)]
    operands = a, b, addend(spec, m, n, "normal", 4) if c else None, *given
    operands = tuple(None if x is None else moved(x, torch.device(device)) for x in operands)
    return operands, torch.full((m, n), 7, dtype=sum_dtype(spec.datapath), device=device)


def job_of(spec, shape=(5, 6, 40), **options) -> Job:
    (a, b, c, scale_a, scale_b), out = made(spec, shape, **options)
    order = order_of(shape[2], spec, a.device)
    return Job(a=a, b=b, c=c, scale_a=scale_a, scale_b=scale_b, spec=spec, random=None, out=out, order=order)


def product(spec, shape=(5, 6, 40), **options) -> torch.Tensor:
    operands, out = made(spec, shape, **options)
    DOOR.gemm(*operands, spec, None, out)
    return out.cpu()


class Path(ModuleType):
    """A fast path that is the general one, with an error planted behind it."""

    def __init__(self, spoil=None, name: str = "fake") -> None:
        super().__init__(name)
        self.spoil, self.ran, self.asked = spoil, 0, 0

    def supports(self, job) -> bool:
        self.asked += 1
        return True

    def programs(self, job):
        return (("fake.cu", (("BLOCK", str(job.order.block)), ("KEPT", "23"))),)

    def run(self, job, sums, marks) -> None:
        self.ran += 1
        GENERAL.run(job, sums, None)
        if self.spoil is not None:
            self.spoil(job, sums, marks)


def flip(job, sums, marks):
    sums.view(torch.int32)[-1, -1, -1] ^= 1
