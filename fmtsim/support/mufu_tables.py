# SPDX-License-Identifier: Apache-2.0
"""Coefficients of the special-function unit of NVIDIA's GPUs (``fmtsim.machine.mufu``), and its reciprocal in torch."""

import csv
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

_INFINITY = 0x7F800000


@cache
def coefficients() -> dict[str, list[tuple[int, int, int]]]:
    """Return c0, c1 and c2 of every segment of each function."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    with files("fmtsim.support").joinpath("mufu.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            rows.setdefault(row["function"], []).append((int(row["c0"]), int(row["c1"]), int(row["c2"])))
    return rows


def approximate_reciprocal(x: Tensor) -> Tensor:
    """Return rcp.approx.ftz.f32 of non-negative float32 numbers: Inf of subnormal ones, 0 for a subnormal result."""
    bits = x.contiguous().view(torch.int32).long()
    exponent, fraction = (bits >> 23) - 127, bits & 0x7FFFFF
    # 1. the segment is the upper 7 bits; 16 bits stay, the top ones of 17
    c0, c1, c2 = torch.tensor(coefficients()["rcp"], device=x.device)[fraction >> 16].unbind(-1)
    low, square = (fraction & 0xFFFF) << 1, torch.zeros_like(bits)
    # 2. their square without the partial products of columns below 2^19
    for i in range(10, 17):
        square += (((low & (1 << i) - 1) >> 18 - i) + (1 << 2 * i - 19)) * (low >> i & 1)
    significand = (c0 << 16) + 16184 + (c1 * low << 2) + (c2 * square << 3) >> 18
    # 3. the significand's top bit adds 1 to the exponent; powers of two are exact
    power = fraction == 0
    bits_of_result = (126 - exponent - (~power).long() << 23) + torch.where(power, 0x800000, significand)
    result = torch.where(bits_of_result < 0x800000, 0, bits_of_result)
    result = torch.where(bits < 0x800000, _INFINITY, torch.where(bits == _INFINITY, 0, result))
    return torch.where(x.isnan(), torch.nan, result.int().view(torch.float32))
