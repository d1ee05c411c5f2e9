"""Products of one fast path alone, and what the oracle gives for the tiles that it does not leave."""

from types import ModuleType

import torch

from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.order import order_of
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import sum_dtype
from tests.cuda.gemms import moved
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import addend, operand
from tests.support.gemm_oracle import sums as oracle

KEY = RandomKey(1 << 63, (1 << 40) + 3)


def job_of(a, b, spec, c=None) -> Job:
    out = torch.full((a.shape[0], b.shape[0]), 7, dtype=sum_dtype(spec.datapath), device=a.device)
    order = order_of(a.shape[1], spec, a.device)
    return Job(a=a, b=b, c=c, scale_a=None, scale_b=None, spec=spec, random=KEY, out=out, order=order)


def product(path: ModuleType, a, b, spec, c=None, device="cpu"):
    """Return the sums of a path that takes a product, 7 where it wrote nothing, and its marks."""
    a, b, c = (None if x is None else moved(x, torch.device(device)) for x in (a, b, c))
    job = job_of(a, b, spec, c)
    assert path.supports(job)
    m, n = job.out.shape
    sums = torch.full((len(job.order.parts), m, n), 7, dtype=job.dtype, device=a.device)
    marks = torch.zeros(-(-m // TILE), -(-n // TILE), dtype=torch.uint8, device=a.device)
    path.run(job, sums, marks)
    return sums.cpu(), marks.cpu()


def check(path: ModuleType, a, b, spec, c=None, device="cpu") -> int:
    """Fail unless all tiles that a path keeps have the oracle's bits; return how many it leaves."""
    sums, marks = product(path, a, b, spec, c, device)
    m, n = sums.shape[1:]
    given = {} if c is None else {"c": c}
    if spec.datapath.rounding.mode == "stochastic":
        given["random"] = KEY
    expected = oracle(a, b, spec, sums.dtype, **given)
    left = marks.repeat_interleave(TILE, 0)[:m].repeat_interleave(TILE, 1)[:, :n].bool()
    assert_same_bits(torch.where(left, 0, sums[0]), torch.where(left, 0, expected))
    return int(marks.sum())


def check_kinds(path: ModuleType, spec, shape, kinds, device="cpu", with_c=False) -> list[int]:
    """Check operands of several kinds of numbers; return how many tiles are left of each."""
    m, n, k = shape
    left = []
    for i, kind in enumerate(kinds):
        a, b = operand(spec.a.name, m, k, kind, i), operand(spec.b.name, n, k, "normal" if i % 2 else kind, i + 50)
        c = addend(spec, m, n, "normal", i + 9) if with_c else None
        left.append(check(path, a, b, spec, c, device))
    return left
