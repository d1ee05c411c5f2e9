"""What a library is asked: the facts of one GEMM call on which its choice of kernel depends."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

Operation = Literal["mm", "bmm", "linear", "scaled_mm", "int_mm"]
Scaling = Literal["none", "tensor", "row", "block_128", "row_block_128", "mx", "nvfp4"]
LARGE_BLOCKS: tuple[Scaling, ...] = ("block_128", "row_block_128")  # scales that a plan's promotion multiplies by
Layout = Literal["row", "column"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCall:
    """Describe a call by all that a library may look at, except the numbers.

    Args:
        operation: Name of the torch function.
        m, n, k: The result is [m, n], sums have k products.
        a, b: Formats of the operands, by canonical name (``"bf16"``, ``"tf32"``, ``"e4m3"``, ``"int8"``).
        out: Dtype of the result.
        accumulate: Format in which the unit sums.
        fast_accum: use_fast_accum of scaled_mm.
        scaling: Kind of scales: ``"row_block_128"`` where both operands have a scale for 1x128 elements,
            ``"block_128"`` where one of them has 128x128 blocks.
        bias: A bias is added.
        a_layout: ``"row"`` where a [m, k] has k contiguous, else ``"column"``.
        b_layout: ``"row"`` where b, taken as [n, k], has k contiguous, else ``"column"``.
        batch: Products in one call.
    """

    operation: Operation
    m: int
    n: int
    k: int
    a: str
    b: str
    out: torch.dtype
    accumulate: str = "fp32"
    fast_accum: bool = True
    scaling: Scaling = "none"
    bias: bool = False
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    batch: int = 1


def alike(call: GemmCall) -> list[GemmCall]:
    """Return the calls that a library cannot tell from one: an operand of one row or column has either layout."""
    both: tuple[Layout, ...] = ("row", "column")
    a_layouts = both if 1 in (call.m, call.k) else (call.a_layout,)
    b_layouts = both if 1 in (call.n, call.k) else (call.b_layout,)
    return [replace(call, a_layout=a, b_layout=b) for a, b in product(a_layouts, b_layouts)]
