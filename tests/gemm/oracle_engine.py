"""An engine that asks the oracle for every output: small products alone, but nothing else can be wrong with them."""

import math

import torch

from fmtsim.gemm.oracle import gemm_oracle


def gemm(a, b, c, scale_a, scale_b, spec, random, out):
    """Follow the engine protocol with the oracle."""
    lists = [None if t is None else numbers(t) for t in (a, b, c, scale_a, scale_b)]
    left, right = lists[0], lists[1]
    if a.shape[1] == 0:
        out.copy_(torch.zeros_like(out) if c is None else c)
        return
    result = gemm_oracle(left, right, spec, c=lists[2], scale_a=lists[3], scale_b=lists[4], random=random)
    values = torch.tensor(result, dtype=out.dtype).reshape(out.shape)
    if out.is_floating_point():
        code = {4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[out.element_size()]
        integers = {4: torch.int32, 8: torch.int64}[out.element_size()]
        nan = torch.tensor([[math.isnan(x) for x in row] for row in result]).reshape(out.shape)
        values = values.view(integers).masked_fill(nan, code).view(out.dtype)
    out.copy_(values)


def numbers(t: torch.Tensor) -> list:
    """Return a matrix as Python floats, or integers."""
    if not t.dtype.is_floating_point:
        return t.tolist()
    return t.to(torch.float64).tolist()
