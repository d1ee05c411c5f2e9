"""Products of the float32 kernels alone, and what the CPU engine gives for them."""

import torch

from fmtsim.cpu.gemm.engine import gemm as cpu_gemm
from fmtsim.cuda.gemm import single as gemm_single
from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.order import order_of


def expected(a, b, spec):
    out = torch.empty(a.shape[0], b.shape[0])
    cpu_gemm(a, b, None, None, None, spec, None, out)
    return out


def job_of(a, b, spec):
    out = torch.full((a.shape[0], b.shape[0]), 7.0, device=a.device)
    order = order_of(a.shape[1], spec, a.device)
    return Job(a=a, b=b, c=None, scale_a=None, scale_b=None, spec=spec, random=None, out=out, order=order)


def product(a, b, spec, device="cpu"):
    """Return the sums of the kernels alone, 7 where they leave a tile, and the marks."""
    job = job_of(a.to(device), b.to(device), spec)
    assert gemm_single.supports(job)
    m, n = job.out.shape
    sums = torch.full((len(job.order.parts), m, n), 7.0, device=device)
    marks = torch.zeros(-(-m // TILE), -(-n // TILE), dtype=torch.uint8, device=device)
    gemm_single.run(job, sums, marks)
    return sums.cpu(), marks.cpu()
