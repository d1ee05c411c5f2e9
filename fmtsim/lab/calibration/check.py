# SPDX-License-Identifier: Apache-2.0
"""Is a plan the order of a call? Rounding tells: results of data made for it are compared bit for bit."""

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.gemm.products.matmul import int_mm, linear, mm
from fmtsim.gemm.products.scaled import scaled_mm
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.calibration.gpu import STORED, Extras
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath
from fmtsim.spec.plan import GemmPlan

SIDE = 16  # rows and columns compared, so 256 results of a call
FEW = 64  # where one side has less, the other gets up to this many
# Powers of two of what stays and of what cancels: so far apart that a last bit of float32 on the way is seen in results
# of 16 bits, as far as the operands' range allows.
NEAR = ((2, 64), (0, 64), (1, 48))  # products between near pairs, before the first, and within one
CANCELLING = {"bf16": (-10, 6), "tf32": (-10, 6), "fp16": (-8, 4)}


class Data(NamedTuple):
    """Operands [R, K] and [C, K] as they are stored, with a bias and scales."""

    a: Tensor
    b: Tensor
    extras: Extras


def question(call: GemmCall) -> GemmCall:
    """Return what data and emulation of a call depend on, a few rows and columns: calls alike in it share both."""
    rows = min(call.m, SIDE if call.n >= SIDE else FEW)
    columns = min(call.n, SIDE if call.m >= SIDE else FEW)
    return dataclasses.replace(call, m=rows, n=columns, fast_accum=False, a_layout="row", b_layout="row")


class Checked(NamedTuple):
    """How a plan compares: results, how many differ, and the first difference."""

    outputs: int
    mismatches: int
    first: str


@lru_cache(maxsize=32)
def make_data(call: GemmCall, seed: int) -> Data:
    """Return operands whose sums show their order.

    Every other row of the operand that has more holds large values that cancel in pairs of its own, far apart or near,
    against the constant rows of the other operand: what is left is the rounding on the way, also where the result, or
    the sum of a part, is narrow. The remaining rows are normal numbers times powers of two.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = (_wide(count, call.k, generator) for count in (call.m, call.n))
    carrier, other = (a, b) if call.m >= call.n else (b, a)
    _cancel(carrier, *CANCELLING.get("sums" if call.accumulate == "fp16" else call.a, (-6, 2)), generator)
    flat = other[1::2] if len(other) > 1 else other
    flat[:] = flat[:, :1]
    if call.accumulate == "fp16":
        a, b = a / 16, b / 16
    return Data(a.to(STORED[call.a]), b.to(STORED[call.b]), _extras(call, generator))


def _cancel(x: Tensor, small: int, large: int, generator: torch.Generator) -> None:
    """Make every other row of x small except for large values that cancel in pairs."""
    x[1::2] *= 2.0**small
    for number, row in enumerate(x[1::2]):
        positions = torch.randperm(len(row), generator=generator)
        first, second = positions[: len(row) // 4 * 2].reshape(2, -1)
        stride, offset, apart = (int(torch.randint(*ends, (), generator=generator)) for ends in NEAR)
        apart = min(apart, len(row) // 2)
        if number % 2 and apart:
            first = torch.arange(offset % (len(row) - apart), len(row) - apart, stride + apart)
            second = first + apart
        row[first] *= 2.0 ** (large - small)
        row[second] = -row[first]


def _wide(rows: int, k: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, k, generator=generator)
    return x * torch.exp2(torch.randint(-3, 4, (rows, k), generator=generator).float())


def _extras(call: GemmCall, generator: torch.Generator) -> Extras:
    bias = torch.randn(call.n, generator=generator).to(call.out) if call.bias else None
    if call.operation != "scaled_mm":
        return Extras(bias=bias)
    groups = -(-call.k // 128)
    counts = {"row": (call.m, call.n), "tensor": (1, 1)}.get(call.scaling, (groups, groups))
    row, column = (torch.rand(count, generator=generator) + 0.3 for count in counts)
    return Extras(bias=bias, row=row, column=column)


@lru_cache(maxsize=256)
def emulate(question: GemmCall, seed: int, arithmetic: Arithmetic, plan: GemmPlan) -> Tensor:
    """Return the results that a unit and a plan give for ``make_data``."""
    return multiply(question, make_data(question, seed), arithmetic, plan)


def is_scalar(arithmetic: Arithmetic) -> bool:
    """Say whether a unit is one fused multiply-add after another, which takes float32 as it is."""
    return isinstance(arithmetic, Datapath) and arithmetic.block == 1 and arithmetic.fraction_bits is None


def multiply(call: GemmCall, data: Data, arithmetic: Arithmetic, plan: GemmPlan) -> Tensor:
    """Return some rows and columns of a call, as a unit and a plan give them."""
    a, b, extras = data
    if call.operation == "scaled_mm":
        one = torch.ones(1)
        row, column = one if extras.row is None else extras.row, one if extras.column is None else extras.column
        recipes: dict[str, Any] = {}
        if call.scaling == "row":
            row, column = row[:, None], column[None, :]
        elif call.scaling in LARGE_BLOCKS:
            wide = call.scaling == "block_128"
            row = row.expand(call.m, -1)
            column = column.expand(-(-call.n // 128) if wide else call.n, -1)
            recipes = {
                "scale_recipe_a": "BlockWise1x128",
                "scale_recipe_b": "BlockWise128x128" if wide else "BlockWise1x128",
            }
        return scaled_mm(
            a, b.t(), row, column, bias=extras.bias, out_dtype=call.out, datapath=arithmetic, plan=plan, **recipes
        )
    if isinstance(arithmetic, IntegerDatapath):
        return int_mm(a, b.t(), datapath=arithmetic)
    tf32 = call.a == "tf32" and not is_scalar(arithmetic)
    options = {"datapath": arithmetic, "plan": plan, "out_dtype": call.out, "allow_tf32": tf32}
    return linear(a, b, extras.bias, **options) if call.bias else mm(a, b.t(), **options)  # type: ignore[arg-type]


def verify(call: GemmCall, answer: Tensor, seed: int, arithmetic: Arithmetic, plan: GemmPlan) -> Checked:
    """Compare the bits that a GPU gave for ``make_data(question(call), seed)`` with those of a plan."""
    found = compare(emulate(question(call), seed, arithmetic, plan), answer)
    return Checked(found.count, found.mismatches, "" if found.equal else str(found.first))
