# SPDX-License-Identifier: Apache-2.0
"""The facts of one call of a matrix product, and the kinds of scales that a call may have."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.spec.plan import GemmPlan

Operation = Literal["mm", "bmm", "linear", "scaled_mm", "int_mm"]
ScaleKind = Literal["none", "tensor", "row", "block_128", "row_block_128", "mx", "nvfp4"]
Layout = Literal["row", "column"]
OperandFormat = FloatFormat | IntFormat | LogFormat


class ScaleExtent(NamedTuple):
    """The elements that share a scale of a kind, and the formats of such scales.

    rows: Rows that may share a scale; None is all of them.
    block: Products of a row that share a scale; None is all of K.
    formats: Names of the formats of scales; empty where any will do, because float32 holds their values.
    recipes: Names in torch.nn.functional.ScalingType, by rows.
    unit_scale: Format of the scales that the matrix unit itself multiplies with; None where the epilogue or the
        promotion of a plan does.
    dtype: Dtype in which torch takes them.
    """

    rows: tuple[int | None, ...]
    block: int | None
    formats: tuple[str, ...]
    recipes: tuple[str, ...]
    unit_scale: str | None = None
    dtype: torch.dtype = torch.float32


SCALE_KINDS: dict[ScaleKind, ScaleExtent] = {
    "tensor": ScaleExtent((None,), None, (), ("TensorWise",)),
    "row": ScaleExtent((1,), None, (), ("RowWise",)),
    "mx": ScaleExtent((1,), 32, ("e8m0",), ("BlockWise1x32",), "e8m0", torch.float8_e8m0fnu),
    "nvfp4": ScaleExtent((1, 16), 16, ("e4m3", "ue4m3"), ("BlockWise1x16",), "ue4m3", torch.float8_e4m3fn),
    "block_128": ScaleExtent((1, 128), 128, ("fp32", "e8m0"), ("BlockWise1x128", "BlockWise128x128")),
    "row_block_128": ScaleExtent((1,), 128, ("fp32", "e8m0"), ("BlockWise1x128",)),
}
UNIT_SCALES: tuple[ScaleKind, ...] = tuple(kind for kind, extent in SCALE_KINDS.items() if extent.unit_scale)
LARGE_BLOCKS: tuple[ScaleKind, ...] = ("block_128", "row_block_128")  # scales that a plan's promotion multiplies by


def scale_kind(rows: int | None, block: int | None, scale: str) -> ScaleKind | None:
    """Return the kind of scales in a format, of blocks of rows by products; None where no library has them.

    An operand with one scale for 1x128 products is of kind ``"block_128"``; ``"row_block_128"`` says that both are.
    """
    for kind, extent in SCALE_KINDS.items():
        if rows in extent.rows and block == extent.block and (not extent.formats or scale in extent.formats):
            return kind
    return None


class Operands(NamedTuple):
    """The tensors of a product ``a b^T``: the numbers that a GemmCall does not say.

    a: [..., M, K].
    b: [..., N, K].
    bias: [N], or None.
    row, column: Scales of the epilogue: one element, or one for each row of a and of b.
    scale_a, scale_b: float32 [row blocks, blocks along K]: scales inside a unit (codes as well), or of a promotion.
    result_scale: One element, which multiplies FP8 results.
    c: [..., M, N] in the dtype of the sums, the addend.
    rows_per_scale: Rows of a block of a and of b.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    row: Tensor | None = None
    column: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    result_scale: Tensor | None = None
    c: Tensor | None = None
    rows_per_scale: tuple[int, int] = (1, 1)

    def scales_of_rows(self, m: int, n: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the block scales with one row for each row of a [m, K] and of b [n, K]."""
        scale_a, scale_b = (
            scale if scale is None or rows == 1 else scale.repeat_interleave(rows, 0)[:size]
            for scale, rows, size in zip((self.scale_a, self.scale_b), self.rows_per_scale, (m, n), strict=True)
        )
        return scale_a, scale_b


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCall:
    """Describe a call by all that its result may depend on, except the numbers.

    The fields up to ``batch`` are what a library sees; the others say what computes the call, and how.

    Args:
        operation: Name of the torch function.
        m, n, k: The result is [m, n], sums have k products.
        a, b: Formats of the operands, by canonical name (``"bf16"``, ``"tf32"``, ``"e4m3"``, ``"int8"``).
        out: Dtype of the result.
        accumulate: Format in which the unit sums; ``""`` is the unit's usual one.
        fast_accum: use_fast_accum of scaled_mm.
        scaling: Kind of scales: ``"row_block_128"`` where both operands have a scale for 1x128 elements,
            ``"block_128"`` where one of them has 128x128 blocks.
        bias: A bias is added.
        a_layout: ``"row"`` where a [m, k] has k contiguous, else ``"column"``.
        b_layout: ``"row"`` where b, taken as [n, k], has k contiguous, else ``"column"``.
        batch: Products in one call.
        formats: Records of a and b, where no registered name stands for them.
        target: What computes it: a GPU with its library, a unit or a datapath, by name, path or record.
        plan: Accumulation order instead of the target's, or of a unit's one chain.
        strict: Refuse a plan that is a guess.
        spec: The GemmSpec that it comes to, where torch.compile traces the caller: a constant cannot be asked further.
        native: Whether the GPU computes it itself, where that was decided with the call; None decides with the tensors.
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
    scaling: ScaleKind = "none"
    bias: bool = False
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    batch: int = 1
    formats: tuple[OperandFormat, OperandFormat] | None = None
    target: Any = None
    plan: GemmPlan | None = None
    strict: bool = False
    spec: Any = field(default=None, compare=False, repr=False)
    native: bool | None = field(default=None, compare=False, repr=False)

    def facts(self) -> "GemmCall":
        """Return the call as a library sees it: without formats, target, plan and strict."""
        return replace(self, formats=None, target=None, plan=None, strict=False, spec=None, native=None)

    def same_calls(self) -> list["GemmCall"]:
        """Return the calls that a library cannot tell from this one: one row or column has either layout."""
        both: tuple[Layout, ...] = ("row", "column")
        a_layouts = both if 1 in (self.m, self.k) else (self.a_layout,)
        b_layouts = both if 1 in (self.n, self.k) else (self.b_layout,)
        return [replace(self, a_layout=a, b_layout=b) for a, b in product(a_layouts, b_layouts)]
