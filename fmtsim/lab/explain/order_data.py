# SPDX-License-Identifier: Apache-2.0
"""Operands and other arguments of a call whose results show the order of its sums."""

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.lab.verify.operands import cancel_scattered, spread
from fmtsim.spec.call import GemmCall

STORED = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip


class Extras(NamedTuple):
    """What a call takes besides its operands: a bias [C], and scales of rows [R] and of columns [C], or [1] both.

    Blocks of 128 have one scale for each 128 of K, the same for all rows, and for all columns.
    """

    bias: Tensor | None = None
    row: Tensor | None = None
    column: Tensor | None = None


SIDE = 16  # rows and columns compared, so 256 results of a call
FEWER = 64  # where one side has less, the other gets up to this many
# Powers of two of what stays and of what cancels: so far apart that a last bit of float32 on the way is seen in results
# of 16 bits, as far as the operands' range allows.
CANCELLING = {"bf16": (-10, 6), "tf32": (-10, 6), "fp16": (-8, 4)}


class Data(NamedTuple):
    """Operands [R, K] and [C, K] as they are stored, with a bias and scales."""

    a: Tensor
    b: Tensor
    extras: Extras


def question(call: GemmCall) -> GemmCall:
    """Return what data and emulation of a call depend on, a few rows and columns: calls alike in it share both."""
    rows = min(call.m, SIDE if call.n >= SIDE else FEWER)
    columns = min(call.n, SIDE if call.m >= SIDE else FEWER)
    return dataclasses.replace(call, m=rows, n=columns, fast_accum=False, a_layout="row", b_layout="row")


@lru_cache(maxsize=32)
def make_data(call: GemmCall, seed: int) -> Data:
    """Return operands whose sums show their order.

    Every other row of the operand that has more holds large values that cancel in pairs of its own, far apart or near,
    against the constant rows of the other operand: what is left is the rounding on the way, also where the result, or
    the sum of a part, is narrow. The remaining rows are normal numbers times powers of two.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = (spread((count, call.k), (-3, 4), generator, torch.float32) for count in (call.m, call.n))
    carrier, other = (a, b) if call.m >= call.n else (b, a)
    cancel_scattered(carrier, *CANCELLING.get("sums" if call.accumulate == "fp16" else call.a, (-6, 2)), generator)
    flat = other[1::2] if len(other) > 1 else other
    flat[:] = flat[:, :1]
    if call.accumulate == "fp16":
        a, b = a / 16, b / 16
    return Data(a.to(STORED[call.a]), b.to(STORED[call.b]), _extras(call, generator))


def _extras(call: GemmCall, generator: torch.Generator) -> Extras:
    bias = torch.randn(call.n, generator=generator).to(call.out) if call.bias else None
    if call.operation != "scaled_mm":
        return Extras(bias=bias)
    groups = -(-call.k // 128)
    counts = {"row": (call.m, call.n), "tensor": (1, 1)}.get(call.scaling, (groups, groups))
    row, column = (torch.rand(count, generator=generator) + 0.3 for count in counts)
    return Extras(bias=bias, row=row, column=column)
