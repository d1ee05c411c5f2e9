# SPDX-License-Identifier: Apache-2.0
"""Products of logarithms: exponents are added, and a table has the integer that the unit makes of each sum of two.

docs/matmul.md, section 3. What becomes of a product depends on the sum of two exponents alone, so that one table does
for the shift, the constant and the linear part together; signs are two copies of it.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fmtsim.formats.spec import LogFormat
from fmtsim.spec.datapath import LogDatapath
from fmtsim.spec.gemm_spec import GemmSpec

_AT_ONCE = 1 << 18  # products looked up at once on a CPU: 2 MB
_ON_GPUS = 1 << 24


def logarithmic_sums(a: Tensor, b: Tensor, spec: GemmSpec, out: Tensor) -> None:
    """Write the sums of ``a b^T`` of a LogDatapath into ``out``; arguments are those of ``gemm``, without an addend."""
    path, first, second = spec.datapath, spec.a, spec.b
    assert isinstance(path, LogDatapath) and isinstance(first, LogFormat) and isinstance(second, LogFormat)
    table = torch.tensor(_integers(path, first, second), device=a.device)
    signs = torch.cat([table, -table, table])  # of 0, 1 and 2 minus signs
    left, right = _exponents(a, first, len(table)), _exponents(b, second, len(table))
    top, unit = 1 << (path.accumulator_bits - 1), 2.0 ** path.lowest_exponent(first, second)
    outputs = max(1, (_ON_GPUS if a.is_cuda else _AT_ONCE) // max(1, b.shape[0]))  # times products of each
    span = min(path.block, outputs)
    rows = outputs // span
    for start in range(0, a.shape[0], rows):
        piece = left[start : start + rows, None]
        total = torch.zeros(len(piece), b.shape[0], dtype=torch.int64, device=a.device)
        for x, y in zip(piece.split(path.block, -1), right.split(path.block, -1), strict=True):
            pieces = zip(x.split(span, -1), y.split(span, -1), strict=True)
            terms = sum((_looked_up(signs, u + v) for u, v in pieces), start=torch.zeros_like(total))
            total = (total + (terms >> path.fraction_bits)).clamp_(-top, top - 1)
        out[start : start + rows] = total.to(out.dtype) * unit  # exact


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    """Return the sums of a table's numbers at places along the last axis."""
    return table.index_select(0, places.flatten()).view(places.shape).sum(-1)


def _exponents(x: Tensor, fmt: LogFormat, count: int) -> Tensor:
    """Return the logarithm of each element, int32, plus ``count`` where there is a minus sign."""
    magnitudes = torch.tensor(fmt.magnitudes, dtype=torch.float32, device=x.device)
    places = torch.bucketize(x.abs().to(torch.float32).contiguous(), magnitudes, out_int32=True)  # each is one of them
    return places + count * x.signbit().to(torch.int32)


@lru_cache(maxsize=64)
def _integers(path: LogDatapath, a: LogFormat, b: LogFormat) -> list[int]:
    """Return what the unit makes of each sum of two exponents: a shifted term times its constant, all its bits."""
    gamma, lowest = a.gamma, path.lowest_exponent(a, b)
    share = gamma // path.entries
    found, constants = [], path.constants
    for k in range(a.max_code + b.max_code + 1):
        quotient, remainder = divmod(k, gamma)
        shift, line = quotient - lowest, gamma + remainder % share
        term = (line << shift) // gamma if shift >= 0 else line // (gamma << -shift)
        found.append(constants[remainder // share] * term)
    return found
