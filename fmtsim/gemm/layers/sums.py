"""Products of quantised operands that no machine is named for: sums in no particular order, then scales and a bias.

On a GPU its bfloat16 units multiply elements that bfloat16 holds: products are exact, sums the unit's float32.
"""

from typing import Any

import torch
from torch import Tensor

from fmtsim.dispatch import is_bare
from fmtsim.formats.spec import IntFormat
from fmtsim.gemm.layers.bfloat16 import on_card, served
from fmtsim.gemm.layers.operand import Operand
from fmtsim.ops import load_engine

_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define(
    "finish_sums(Tensor y, Tensor? columns, Tensor? rows, Tensor? rest, Tensor? bias, ScalarType dtype) -> Tensor"
)
_library.define(
    "multiply_groups(Tensor a, Tensor a_scale, int[2] a_sizes, Tensor b, Tensor b_scale, int[2] b_sizes, "
    "Tensor? bias, ScalarType dtype) -> Tensor"
)


def multiply_operands(
    a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, wide: torch.dtype = torch.float32
) -> Tensor:
    """Return ``a b^T + bias``, rounded once from float32 or float64 (``wide``) to a dtype.

    Where no scale lies between products, the elements are multiplied and the sums scaled: by the scales of b's rows
    first, then by those of a's. Then what ``Clamp`` cut off a, times b, is added, and the bias: each one rounding. Sums
    of integers are exact and rounded once.

    Args:
        a: [M, K].
        b: [N, K].
        bias: [N], or None.
        dtype: Of the result.
        wide: Of the steps.
    """
    rest = rest_of(a, b)
    if not (a.outer and b.outer):
        if wide == torch.float32 and _has_kernel(a, b):
            if rest is None and dtype in (torch.float32, torch.bfloat16):
                return _multiply_groups(a, b, bias, dtype)
            y = _multiply_groups(a, b, None, wide)
        else:
            y = torch.mm(a.values(wide), b.values(wide).mT)
        return _finish(y, None, None, rest, bias, dtype)
    columns, rows = b.row_scales(), a.row_scales()
    if a.elements.dtype == b.elements.dtype == torch.bfloat16:
        if columns is rows is rest is None and dtype == torch.bfloat16 and not _whole(a, b):
            product = a.elements, b.elements.mT
            return torch.mm(*product) if bias is None else torch.addmm(bias.to(dtype), *product)
        if not _whole(a, b):
            y = torch.mm(a.elements, b.elements.mT, out_dtype=torch.float32)
            return _finish(y, columns, rows, rest, bias, dtype)
    exact = torch.float64 if _whole(a, b) else wide
    y = torch.mm(a.elements.to(exact), b.elements.to(exact).mT).to(wide)
    return _finish(y, columns, rows, rest, bias, dtype)


def _has_kernel(a: Operand, b: Operand) -> bool:
    """Say whether a kernel multiplies elements and scales the sum of each group."""
    if a.scale is None or b.scale is None or a.tensor is not None or b.tensor is not None:
        return False
    if not on_card(a.elements) or not served(a.elements):
        return False
    return bool(load_engine("cuda.gemm.scaled_product").covers(_factor(a), _factor(b)))


def _multiply_groups(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if is_bare(a.elements) and is_bare(b.elements):
        return load_engine("cuda.gemm.scaled_product").multiply(_factor(a), _factor(b), bias, dtype)  # type: ignore[no-any-return]
    return torch.ops.fmtsim.multiply_groups(  # type: ignore[no-any-return]
        a.elements, a.scale, a.sizes, b.elements, b.scale, b.sizes, bias, dtype
    )


def _factor(x: Operand) -> Any:
    return load_engine("cuda.gemm.scaled_product").Factor(x.elements, x.scale, x.sizes)


def rest_of(a: Operand, b: Operand) -> Tensor | None:
    """Return the product, in float32, of what ``Clamp`` cut off the first operand with the second; None without."""
    return None if a.rest is None else torch.mm(a.rest, b.values(torch.float32).mT)


def _whole(a: Operand, b: Operand) -> bool:
    return isinstance(a.quantizer.format, IntFormat) and isinstance(b.quantizer.format, IntFormat)


def _finish(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, rest: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``((y * columns) * rows + rest) + bias`` in a dtype; what is None is left out."""
    if columns is rows is rest is bias is None:
        return y.to(dtype)
    run = _finish_sums if is_bare(y) else torch.ops.fmtsim.finish_sums  # no compiler may fuse these steps
    return run(y, columns, rows, rest, bias, dtype)  # type: ignore[no-any-return]


def _finish_sums(y, columns, rows, rest, bias, dtype):  # type: ignore[no-untyped-def]
    if y.is_cuda and rest is None and y.dtype == torch.float32:
        outputs = load_engine("cuda.cast.outputs")
        if outputs.covers(y, dtype):
            return outputs.finish_sums(y, columns, rows, bias, dtype)
    y = y if columns is None else y * columns.mT
    y = y if rows is None else y * rows
    y = y if rest is None else y + rest
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(dtype, copy=True)


def _multiply_parts(a, a_scale, a_sizes, b, b_scale, b_sizes, bias, dtype):  # type: ignore[no-untyped-def]
    products = load_engine("cuda.gemm.scaled_product")
    factors = (products.Factor(*parts) for parts in ((a, a_scale, a_sizes), (b, b_scale, b_sizes)))
    return products.multiply(*factors, bias, dtype)


_library.impl("multiply_groups", _multiply_parts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fmtsim::multiply_groups",
    lambda a, a_scale, a_sizes, b, b_scale, b_sizes, bias, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    lib=_library,
)
_library.impl("finish_sums", _finish_sums, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fmtsim::finish_sums",
    lambda y, columns, rows, rest, bias, dtype: y.new_empty(y.shape, dtype=dtype),
    lib=_library,
)
