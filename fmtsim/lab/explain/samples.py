# SPDX-License-Identifier: Apache-2.0
"""Which results of a product decide between explanations, and operands that tell explanations apart.

Where an exact sum lies beside the middle of two values of the output's dtype, sums that were added in another order
round to the other one. So few results decide most.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operands import operand_format
from fmtsim.gemm.products.resolver import call_name
from fmtsim.lab.explain.candidates import Accumulation, Observed, cost
from fmtsim.lab.verify.probe_operands import cancel_scattered, spread
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
    extras = Extras(bias=torch.randn(call.n, generator=generator).to(call.out) if call.bias else None)
    if call.operation == "scaled_mm":
        groups = -(-call.k // 128)
        counts = {"row": (call.m, call.n), "tensor": (1, 1)}.get(call.scaling, (groups, groups))
        row, column = (torch.rand(count, generator=generator) + 0.3 for count in counts)
        extras = extras._replace(row=row, column=column)
    return Data(a.to(STORED[call.a]), b.to(STORED[call.b]), extras)


ROWS, COLUMNS = 4, 64  # of the first comparison: the engine's smallest tile
FEW = ROWS * COLUMNS
SURVEYED = 1 << 30  # products of the exact sums that say which results decide
RANKED = 1 << 14
TINY = -68  # a power of two of both operands: products lie about the lowest exponents of alignment

Places = tuple[Tensor, Tensor]
"""All rows and columns of a result, those that decide first."""


def deciding(product: Observed) -> Places:
    """Order rows and columns so that the first ones meet where the exact result lies beside a rounding boundary."""
    m, n, k = product.sizes
    side = max(1, int((SURVEYED / k) ** 0.5))
    rows, columns = (torch.linspace(0, x - 1, min(x, side), dtype=torch.float64).long() for x in (m, n))
    few = product.part(rows, columns)
    a, b = few.a.double(), few.b.double()
    exact = a @ b.t()
    if few.row is not None and few.column is not None:
        exact = exact * few.row.double().reshape(-1, 1) * few.column.double().reshape(1, -1)
    exact = exact if few.bias is None else exact + few.bias.double()
    # 1. the distance from the middle of the two neighbours, in steps of the output's dtype
    fmt = get_format(few.y.dtype) if few.y.dtype.is_floating_point else None
    bits = fmt.mantissa_bits if isinstance(fmt, FloatFormat) else 23
    step = torch.exp2(torch.frexp(exact)[1].double() - 1 - bits)
    distance = ((exact / step).frac().abs() - 0.5).abs() * step
    # 2. as a part of the operands' size, which the errors on the way grow with
    distance = distance / (a.norm(dim=1)[:, None] * b.norm(dim=1))
    distance = torch.where(distance.isfinite() & (exact != 0), distance, torch.inf)
    ranked = distance.flatten().topk(min(RANKED, distance.numel()), largest=False).indices.tolist()
    # 3. first few rows with columns that decide in one of them, then the other rows and columns that decide
    first_rows: dict[int, int] = {}
    first_columns: dict[int, None] = {}
    others: list[tuple[int, int]] = []
    for place in ranked:
        i, j = divmod(place, len(columns))
        first = i in first_rows or len(first_rows) < ROWS
        if first and first_rows.get(i, 0) < COLUMNS // ROWS and j not in first_columns:
            first_rows[i] = first_rows.get(i, 0) + 1
            first_columns[j] = None
        else:
            others.append((i, j))
    ranked_rows = dict.fromkeys([*first_rows, *(i for i, _ in others)])
    ranked_columns = dict.fromkeys([*first_columns, *(j for _, j in others)])
    return _ordered(rows[list(ranked_rows)], m), _ordered(columns[list(ranked_columns)], n)


def _ordered(first: Tensor, size: int) -> Tensor:
    others = torch.ones(size, dtype=torch.bool)
    others[first] = False
    return torch.cat([first, others.nonzero().flatten()])


def affordable(product: Observed, options: Sequence[Accumulation], macs: int) -> int:
    """Return how many results of every explanation may be computed for so many products of operands."""
    return max(FEW // 8, macs // (product.sizes[2] * max(1, sum(cost(option.spec.datapath) for option in options))))


def part_of(product: Observed, places: Places, elements: int) -> tuple[Observed, Places]:
    """Return about so many results, of which the first rows and columns decide, and where they lie."""
    m, n, _ = product.sizes
    if elements >= m * n:
        return product, (torch.arange(m), torch.arange(n))
    height = min(m, max(ROWS, int(elements**0.5)) if elements > FEW else ROWS)
    width = min(n, max(1, elements // height))
    rows, columns = places[0][: min(m, max(1, elements // width))], places[1][:width]
    return product.part(rows, columns), (rows, columns)


def probe_of(product: Observed, seed: int) -> tuple[Tensor, Tensor] | None:
    """Return few rows of both operands: large values that cancel, and some so small that a lower bound is seen."""
    names = [call_name(operand_format(name, x)) for name, x in (("a", product.a), ("b", product.b))]
    names = ["tf32" if name == "fp32" else name for name in names]
    m, n, k = product.sizes
    if "int8" in names:
        return None  # sums are exact
    if not set(names) <= set(STORED):
        generator = torch.Generator().manual_seed(seed)
        formats = operand_format("a", product.a), operand_format("b", product.b)
        drawn = (spread((SIDE, k), (-3, 4), generator) for _ in formats)
        dtypes = product.a.dtype, product.b.dtype
        return tuple(  # type: ignore[return-value]
            quantize(x, fmt, overflow="saturate", out_dtype=torch.float64).to(dtype)
            for x, fmt, dtype in zip(drawn, formats, dtypes, strict=True)
        )
    half = product.y.dtype == torch.float16
    asked = question(GemmCall(operation="mm", m=m, n=n, k=k, a=names[0], b=names[1], out=product.y.dtype,
                              accumulate="fp16" if half else "fp32"))  # fmt: skip
    a, b, _ = make_data(asked, seed)
    if names[0] in ("bf16", "tf32"):
        a, b = (torch.where(torch.arange(len(x))[:, None] % 8 == 7, x * 2.0**TINY, x) for x in (a, b))
    return a, b
