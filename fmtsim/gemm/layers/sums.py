"""Products of quantised operands that no machine is named for: sums in no particular order, then scales and a bias.

On a GPU its bfloat16 units multiply elements that bfloat16 holds: products are exact, sums the unit's float32.
"""

import torch
from torch import Tensor

from fmtsim.dispatch import is_bare
from fmtsim.formats.spec import IntFormat
from fmtsim.gemm.layers.bfloat16 import on_card, served
from fmtsim.gemm.layers.finish import finish_sums
from fmtsim.ops import load_engine
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer

_library = torch.library.Library("fmtsim", "FRAGMENT")
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
    if not (a.scales_rows and b.scales_rows):
        if wide == torch.float32 and _has_kernel(a, b):
            if rest is None and dtype in (torch.float32, torch.bfloat16):
                return _multiply_groups(a, b, bias, dtype)
            y = _multiply_groups(a, b, None, wide)
        else:
            y = torch.mm(a.values(wide), b.values(wide).mT)
        return finish_sums(y, None, None, rest, bias, dtype)
    columns, rows = b.row_scales(), a.row_scales()
    if a.elements.dtype == b.elements.dtype == torch.bfloat16:
        if columns is rows is rest is None and dtype == torch.bfloat16 and not _whole(a, b):
            product = a.elements, b.elements.mT
            return torch.mm(*product) if bias is None else torch.addmm(bias.to(dtype), *product)
        if not _whole(a, b):
            y = torch.mm(a.elements, b.elements.mT, out_dtype=torch.float32)
            return finish_sums(y, columns, rows, rest, bias, dtype)
    exact = torch.float64 if _whole(a, b) else wide
    y = torch.mm(a.elements.to(exact), b.elements.to(exact).mT).to(wide)
    return finish_sums(y, columns, rows, rest, bias, dtype)


def _has_kernel(a: Operand, b: Operand) -> bool:
    """Say whether a kernel multiplies elements and scales the sum of each group."""
    if a.scale is None or b.scale is None or not on_card(a.elements) or not served(a.elements):
        return False
    return bool(load_engine("cuda").covers_groups(a, b))


def _multiply_groups(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if is_bare(a.elements) and is_bare(b.elements):
        return load_engine("cuda").multiply_groups(a, b, bias, dtype)  # type: ignore[no-any-return]
    return torch.ops.fmtsim.multiply_groups(  # type: ignore[no-any-return]
        a.elements, a.scale, a.block, b.elements, b.scale, b.block, bias, dtype
    )


def rest_of(a: Operand, b: Operand) -> Tensor | None:
    """Return the product, in float32, of what ``Clamp`` cut off the first operand with the second; None without."""
    return None if a.rest is None else torch.mm(a.rest, b.values(torch.float32).mT)


def _whole(a: Operand, b: Operand) -> bool:
    return isinstance(a.quantizer.format, IntFormat) and isinstance(b.quantizer.format, IntFormat)


def _multiply_parts(a, a_scale, a_sizes, b, b_scale, b_sizes, bias, dtype):  # type: ignore[no-untyped-def]
    sides = ((a, a_scale, a_sizes), (b, b_scale, b_sizes))
    left, right = (Operand(x, Quantizer(), scale, block=tuple(sizes)) for x, scale, sizes in sides)
    return load_engine("cuda").multiply_groups(left, right, bias, dtype)


_library.impl("multiply_groups", _multiply_parts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fmtsim::multiply_groups",
    lambda a, a_scale, a_sizes, b, b_scale, b_sizes, bias, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    lib=_library,
)
