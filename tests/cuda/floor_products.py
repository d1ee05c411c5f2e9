"""Products of the fp64 tensor core kernels alone, and what the CPU engine gives for them."""

import torch

from fmtsim import GemmPlan
from fmtsim.cpu.gemm.engine import gemm as cpu_gemm
from fmtsim.cuda.gemm import floor as gemm_floor
from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.order import order_of
from fmtsim.quantize import quantize
from fmtsim.spec.datapath import sum_dtype
from tests.cuda.gemms import moved
from tests.support.bits import assert_same_bits
from tests.support.operands import normal, wide

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW = GemmPlan(promote_every=64)
M, N, K = 70, 140, 100


def values(x, fmt):
    return quantize(x, fmt).to(DTYPES.get(fmt, torch.float32))


def normals(fmt, other=None, k=K):
    return values(normal(M, k, seed=1), fmt), values(normal(N, k, seed=2), other or fmt)


def sparse(fmt):
    a, b = normals(fmt)
    a, b = a * (wide(M, K, seed=3) > 0).to(a.dtype) if a.itemsize > 1 else a, b
    a[3], b[7], a[5, :60], a[6, 7] = 0, 0, 0, -0.0
    return a, b


def cancelling(fmt):
    a, b = normal(M, K, seed=1), normal(N, K, seed=2)
    a[:, 1::2], b[:, 1::2] = -a[:, ::2], b[:, ::2] * (1 + 2.0**-7)
    return values(a, fmt), values(b, fmt)


def codes(fmt):
    """Return numbers of any bits but NaN and Inf."""
    dtype = DTYPES[fmt]
    integers = torch.uint8 if dtype.itemsize == 1 else torch.int16
    found = []
    for rows, seed in ((M, 1), (N, 2)):
        raw = torch.randint(0, 256**dtype.itemsize, (rows, K), generator=torch.Generator().manual_seed(seed))
        x = raw.to(integers).view(dtype).float()
        found.append(torch.where(x.isfinite(), x, 0.0).to(dtype))
    return found


def product(a, b, spec, device="cpu", c=None, scale_a=None, scale_b=None):
    """Return the sums of the kernels alone, 7 where they leave a tile, and the marks."""
    a, b, c, scale_a, scale_b = (
        None if x is None else moved(x, torch.device(device)) for x in (a, b, c, scale_a, scale_b)
    )
    out = torch.full((a.shape[0], b.shape[0]), 7.0, device=device, dtype=sum_dtype(spec.datapath))
    order = order_of(a.shape[1], spec, a.device)
    job = Job(a=a, b=b, c=c, scale_a=scale_a, scale_b=scale_b, spec=spec, random=None, out=out, order=order)
    assert gemm_floor.supports(job)
    parts = torch.full((len(order.parts), *out.shape), 7.0, device=device)
    marks = torch.zeros(-(-out.shape[0] // TILE), -(-out.shape[1] // TILE), dtype=torch.uint8, device=device)
    gemm_floor.run(job, parts, marks)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.cpu(), marks.cpu()


def expected(a, b, spec, c=None, scale_a=None, scale_b=None):
    out = torch.empty(a.shape[0], b.shape[0])
    cpu_gemm(a, b, c, scale_a, scale_b, spec, None, out)
    return out


def spread(marks, shape):
    return marks.bool().repeat_interleave(TILE, 0)[: shape[0]].repeat_interleave(TILE, 1)[:, : shape[1]]


def check(a, b, spec, device="cpu", marked=0, **rest):
    """Fail unless every tile but ``marked`` ones (None: any number) is computed, with the bits of the CPU engine."""
    got, marks = product(a, b, spec, device, **rest)
    wanted = expected(a, b, spec, **rest)
    assert_same_bits(torch.where(spread(marks, got.shape), wanted, got), wanted)
    assert marked is None or marks.sum() == marked
