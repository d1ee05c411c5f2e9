"""The product of two quantised operands in float32, in no particular order, and what follows a product.

A GPU's bfloat16 units multiply elements that bfloat16 holds: products are exact, sums the unit's
float32. Scales that sums can take, what was cut off, and a bias follow, one rounding a step (``_finish``).
"""

import torch
from torch import Tensor

from fmtsim.formats.spec import IntFormat
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.layers.operand import is_on_gpu
from fmtsim.gemm.layers.operator import quantizer_of, text_of
from fmtsim.gemm.layers.unit import unit_dtype
from fmtsim.ops import Key, fused_engine, key_tensor, random_key
from fmtsim.quantize import quantize
from fmtsim.scaling.transforms import rotated
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.transform import Hadamard


def multiply(
    a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, wide: torch.dtype = torch.float32, *,
    traced: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` without a unit, rounded once from float32 or float64 (``wide``) to a dtype.

    Where no scale lies between products, the elements are multiplied and the sums scaled: by the scales of b's rows
    first, then by those of a's. Then what ``Clamp`` cut off a, times b, is added, and the bias: each one rounding.
    Where nothing is scaled or added before it, the bias is part of the product (``torch.addmm``). Sums of integers are
    exact and rounded once.

    Args:
        a: [M, K].
        b: [N, K].
        bias: [N], or None.
        dtype: Of the result.
        wide: Of the steps.
        traced: The tensors have no numbers: a compiler wants to see operators.
    """
    rest, integers = rest_of(a, b), is_integer(a) and is_integer(b)
    columns = rows = None
    if not (a.scales_rows and b.scales_rows):
        if wide == torch.float32 and (engine := fused_engine(a.elements)) is not None and engine.covers_groups(a, b):
            return _multiply_groups(a, b, rest, bias, dtype, traced)
        left, right = a.values(wide), b.values(wide).mT
    else:
        columns, rows = b.row_scales(), a.row_scales()
        left, right = a.elements, b.elements.mT
        halves = left.dtype == right.dtype == torch.bfloat16 and not integers
        scaled = dtype != torch.bfloat16 or not (columns is rows is rest is None)
        if halves and scaled and is_on_gpu(left):  # torch on a CPU has no such product
            y = torch.mm(left, right, out_dtype=torch.float32)
            return _finish(y, columns, rows, rest, bias, dtype, traced)
        if scaled or not halves:
            exact = torch.float64 if integers else wide
            left, right = left.to(exact), right.to(exact)
    if bias is not None and columns is rows is rest is None and not integers:
        return torch.addmm(bias.to(left.dtype), left, right).to(dtype)
    y = torch.mm(left, right)
    y = y if y.dtype == torch.bfloat16 else y.to(wide)
    return _finish(y, columns, rows, rest, bias, dtype, traced)


def is_integer(x: Operand) -> bool:
    """Say whether elements are whole numbers of an integer format."""
    return isinstance(x.quantizer.format, IntFormat)


def rest_of(a: Operand, b: Operand) -> Tensor | None:
    """Return the product, in float32, of what ``Clamp`` cut off the first operand with the second; None without."""
    return None if a.rest is None else torch.mm(a.rest, b.values(torch.float32).mT)


def _multiply_groups(
    a: Operand, b: Operand, rest: Tensor | None, bias: Tensor | None, dtype: torch.dtype, traced: bool
) -> Tensor:
    """Multiply elements and scale the sum of each group, by the kernel for that."""
    whole = rest is None and dtype in (torch.float32, torch.bfloat16)
    how = (bias if whole else None, dtype if whole else torch.float32)
    if traced:
        y = torch.ops.fmtsim.multiply_groups(a.elements, a.scale, a.block, b.elements, b.scale, b.block, *how)
    else:
        engine = fused_engine(a.elements)
        assert engine is not None
        y = engine.multiply_groups(a, b, *how)
    return y if whole else _finish(y, None, None, rest, bias, dtype, traced)  # type: ignore[no-any-return]


def _finish(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, rest: Tensor | None, bias: Tensor | None,
    dtype: torch.dtype, traced: bool,
) -> Tensor:  # fmt: skip
    """Return ``((y * columns) * rows + rest) + bias`` in a dtype; what is None is left out."""
    if columns is rows is rest is bias is None:
        return y.to(dtype)
    run = torch.ops.fmtsim.finish if traced else _finished  # no compiler may fuse these steps
    return run(y, columns, rows, rest, bias, dtype)  # type: ignore[no-any-return]


def _finished(y, columns, rows, rest, bias, dtype):  # type: ignore[no-untyped-def]
    engine = fused_engine(y) if rest is None else None
    made = None if engine is None else engine.finish(y, columns, rows, bias, dtype)
    if made is not None:
        return made
    y = y if columns is None else y * columns.mT
    y = y if rows is None else y * rows
    y = y if rest is None else y + rest
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(dtype, copy=True)


def unrotated(
    y: Tensor, first: Quantizer, before: Quantizer, slope: Tensor | None, signs: Key, dtype: torch.dtype, *,
    turned: bool, traced: bool,
) -> Tensor:  # fmt: skip
    """Turn the gradient of a rounded, rotated operand into that of the tensor itself.

    Args:
        y: [rows, columns]: the product.
        first: Quantiser of the product's first operand, whose outer rotation is undone.
        before: Quantiser of the operand of the forward pass that this is the gradient of.
        slope: What the gradient is multiplied with, or None.
        signs: Key of the pass's random signs.
        dtype: Of the result.
        turned: The product was one of that operand as it was rotated.
        traced: As in ``multiply``.
    """
    if traced:
        texts = text_of(first), text_of(before)
        return torch.ops.fmtsim.unrotate(y, *texts, slope, key_tensor(signs), dtype, turned)  # type: ignore[no-any-return]
    for transform in reversed(first.transforms):
        if isinstance(transform, Hadamard) and transform.axis == "outer" and transform.undo:
            y = rotated(y, transform, signs, inverse=True)
    if turned and before.transforms:
        engine = fused_engine(y) if is_on_gpu(y) else None
        made = None if engine is None else engine.unrotate(y, before.transforms, slope, dtype)
        if made is not None:
            return made  # type: ignore[no-any-return]
    y = y if slope is None else y * slope
    for transform in reversed(before.transforms if turned else ()):
        if isinstance(transform, Hadamard) and transform.axis == "inner":
            y = rotated(y, transform, None, inverse=True)
    return y.to(dtype)


def round_output(y: Tensor, out: Quantizer, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Round a product to its output format, unless it lies there already, then to the dtype that it becomes."""
    if out.format is not None and (unit_dtype(out) is None or unit_dtype(out) != y.dtype):
        random = generator if out.rounding.mode == "stochastic" else None
        y = quantize(
            y, out.format, rounding=out.rounding, overflow=out.overflow, generator=random, pad=True, out_dtype=y.dtype
        )
    if y.dtype == dtype:
        return y
    return quantize(y if y.element_size() > 1 else y.float(), dtype, overflow="ieee", out_dtype=dtype)


def _multiply_group_parts(a, a_scale, a_block, b, b_scale, b_block, bias, dtype):  # type: ignore[no-untyped-def]
    left = Operand(a, Quantizer(), a_scale, block=tuple(a_block))
    right = Operand(b, Quantizer(), b_scale, block=tuple(b_block))
    return fused_engine(a).multiply_groups(left, right, bias, dtype)  # type: ignore[union-attr]


def _unrotated(y, first, before, slope, signs, dtype, turned):  # type: ignore[no-untyped-def]
    how = quantizer_of(first), quantizer_of(before), slope, random_key(signs), dtype
    done = unrotated(y, *how, turned=turned, traced=False)
    return (done.clone() if done is y else done).contiguous()


_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define(
    "multiply_groups(Tensor a, Tensor a_scale, int[2] a_block, Tensor b, Tensor b_scale, int[2] b_block, "
    "Tensor? bias, ScalarType dtype) -> Tensor"
)
_library.define(
    "finish(Tensor y, Tensor? columns, Tensor? rows, Tensor? rest, Tensor? bias, ScalarType dtype) -> Tensor"
)
_library.define(
    "unrotate(Tensor y, str first, str before, Tensor? slope, Tensor? signs, ScalarType dtype, bool turned) -> Tensor"
)
_library.impl("multiply_groups", _multiply_group_parts, "CompositeExplicitAutograd")
_library.impl("finish", _finished, "CompositeExplicitAutograd")
_library.impl("unrotate", _unrotated, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fmtsim::multiply_groups",
    lambda a, a_scale, a_block, b, b_scale, b_block, bias, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    lib=_library,
)
torch.library.register_fake(
    "fmtsim::finish", lambda y, columns, rows, rest, bias, dtype: y.new_empty(y.shape, dtype=dtype), lib=_library
)
torch.library.register_fake(
    "fmtsim::unrotate",
    lambda y, first, before, slope, signs, dtype, turned: y.new_empty(y.shape, dtype=dtype),
    lib=_library,
)
