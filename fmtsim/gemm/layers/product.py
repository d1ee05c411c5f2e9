# SPDX-License-Identifier: Apache-2.0
"""The product of two quantised operands in float32 in no particular order, and what follows a product.

Without a unit, a GPU's bfloat16 units multiply elements that bfloat16 holds: products are exact, sums the unit's
float32. Scales that sums can take, what was cut off, and a bias follow, one rounding a step (``finish``).
"""

from itertools import product as pairs

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.casts.ops import Key, cpu_engine, define_operator, fused_engine, key_tensor, random_key, with_keys
from fmtsim.casts.quantize import quantize
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.gemm.layers.keys import Generator, rotations_to_undo
from fmtsim.gemm.layers.operand import is_on_gpu, values_of, widened
from fmtsim.gemm.layers.operator import announce, call, has_known_sizes, lower, quantizer_of, text_of
from fmtsim.gemm.products.native import FP8_DTYPES
from fmtsim.gemm.products.operands import own_dtype
from fmtsim.scaling.inlined import inlined_product
from fmtsim.scaling.scaled_cast import rotated
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer

HALVES = (torch.bfloat16, torch.float16)
_WITHIN_INT32 = 1 << 16  # products of two 8-bit integers


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the steps behind a sum."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
        traced: The tensors are a compiler's, without values: call operators.
    """
    rest = None if a.rest is None else torch.mm(a.rest, values_of(b, torch.float32).mT)
    integers = is_integer(a) and is_integer(b)
    columns = rows = None
    plain = a.scale is a.tensor_scale is b.scale is b.tensor_scale is None  # of scales
    if not plain and not (a.scales_rows and b.scales_rows):
        if wide == torch.float32 and (engine := fused_engine(a.elements)) is not None and engine.covers_groups(a, b):
            return _multiply_groups(a, b, rest, bias, dtype, traced)
        lhs, rhs = values_of(a, wide, "left"), values_of(b, wide, "right").mT
    else:
        if not plain:
            columns, rows = b.row_scales(), a.row_scales()
        lhs, rhs = a.elements, b.elements.mT
        halves = lhs.dtype == rhs.dtype == torch.bfloat16 and not integers
        scaled = dtype != torch.bfloat16 or not (columns is rows is rest is None)
        if halves and scaled and is_on_gpu(lhs):  # torch on a CPU has no such product
            y = torch.mm(lhs, rhs, out_dtype=torch.float32)
            return finish(y, columns, rows, rest, bias, dtype, traced)
        if integers and wide == torch.float32 and is_on_gpu(lhs):
            return finish(_integer_sums(a, b), columns, rows, rest, bias, dtype, traced)
        if scaled or not halves:
            exact = torch.float64 if integers else wide
            lhs = lhs if lhs.dtype == exact else widened(lhs, exact, "left")
            rhs = rhs if rhs.dtype == exact else widened(rhs, exact, "right")
    if columns is rows is rest is None and not integers:
        if bias is not None:
            return torch.addmm(bias.to(lhs.dtype), lhs, rhs).to(dtype)
        if lhs.dtype == dtype:
            return torch.mm(lhs, rhs)
    y = torch.mm(lhs, rhs)
    y = y if y.dtype == torch.bfloat16 else y.to(wide)
    return finish(y, columns, rows, rest, bias, dtype, traced)


def is_integer(x: Operand) -> bool:
    """Return True if elements are whole numbers of an integer format."""
    return isinstance(x.quantizer.format, IntFormat)


def _integer_sums(a: Operand, b: Operand) -> Tensor:
    """Return the product of integer elements, float32, rounded once, by a GPU's int8 units: in digits of 8 bits."""
    sides, unit = [], 1.0
    for x in (a, b):
        fmt = x.quantizer.format
        assert isinstance(fmt, IntFormat)
        step = fmt.eps / 2 if fmt.half_offset else fmt.eps
        unit *= step
        numbers = x.elements if step == 1 else x.elements.float() / step
        if fmt.bits <= 8 and fmt.signed and not fmt.half_offset:
            sides.append([_digit(numbers)])
            continue
        whole, digits = numbers.to(torch.int64), []
        for _ in range((fmt.bits + 1) // 8 + 1):
            low = ((whole + 128) & 255) - 128
            digits.append(_digit(low))
            whole = (whole - low) >> 8
        sides.append(digits)
    parts = [_digit_sums(x, y, 8 * (i + j)) for (i, x), (j, y) in pairs(*map(enumerate, sides))]
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    sums = total.to(torch.float32)
    return sums if unit == 1 else sums * unit


def _digit(numbers: Tensor) -> Tensor:
    return numbers.to(torch.int8, memory_format=torch.contiguous_format)


def _digit_sums(a: Tensor, b: Tensor, shift: int) -> Tensor:
    """Return ``a b^T << shift`` of int8 [M, K] and [N, K], exact, by a GPU's int8 units.

    K is cut into pieces whose sums an int32 holds; the result is int64 unless one int32 is all.
    """
    (m, k), n = a.shape, b.shape[0]
    # what cuBLASLt takes: rows of 8 numbers, and more than 16 of them
    a, b = (x if not k % 8 | len(x) % 32 else F.pad(x, (0, -k % 8, 0, -len(x) % 32)) for x in (a, b))
    pieces = zip(a.split(_WITHIN_INT32, 1), b.split(_WITHIN_INT32, 1), strict=True)
    sums = [torch._int_mm(x.contiguous(), y.contiguous().mT)[:m, :n] for x, y in pieces]
    if len(sums) == 1 and not shift:
        return sums[0]
    return torch.stack([y.to(torch.int64) for y in sums]).sum(0) << shift


def _multiply_groups(
    a: Operand, b: Operand, rest: Tensor | None, bias: Tensor | None, dtype: torch.dtype, traced: bool
) -> Tensor:
    """Multiply elements and scale the sum of each group, by the kernel for that."""
    whole = rest is None and dtype in (torch.float32, torch.bfloat16)
    how = (bias if whole else None, dtype if whole else torch.float32)
    run = torch.ops.fmtsim.multiply_groups if traced else _multiply_group_parts
    y = run(a.elements, a.scale, a.block, b.elements, b.scale, b.block, *how)
    return y if whole else finish(y, None, None, rest, bias, dtype, traced)  # type: ignore[no-any-return]


def finish(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, rest: Tensor | None, bias: Tensor | None,
    dtype: torch.dtype, traced: bool,
) -> Tensor:  # fmt: skip
    """Return ``((y * columns) * rows + rest) + bias`` in a dtype; what is None is left out. y may be used up."""
    if columns is rows is rest is bias is None:
        return y if y.dtype == dtype else y.to(dtype)
    engine = cpu_engine(y) if y.is_cpu and rest is None and dtype == torch.float32 and not traced else None
    if engine is not None and engine.finish_(y, columns, rows, bias):
        return y
    if traced and rest is bias is None and is_on_gpu(y) and has_known_sizes(y):
        return torch.ops.fmtsim.fused_finish(y, columns, rows, dtype)  # type: ignore[no-any-return]
    run = torch.ops.fmtsim.finish if traced else _finished  # no compiler may fuse sums
    return run(y, columns, rows, rest, bias, dtype)  # type: ignore[no-any-return]


def _finished(y, columns, rows, rest, bias, dtype):  # type: ignore[no-untyped-def]
    engine = fused_engine(y) if rest is None else None
    fused = None if engine is None else engine.finish(y, columns, rows, bias, dtype)
    if fused is not None:
        return fused
    y = y if columns is None else y * columns.mT
    y = y if rows is None else y * rows
    y = y if rest is None else y + rest
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(dtype, copy=True)


def unit_dtype(out: Quantizer) -> torch.dtype | None:
    """Return the dtype of an output format that units round to themselves, to nearest, FP8 saturating."""
    if not isinstance(out.format, FloatFormat) or out.rounding.mode != "nearest_even" or out.overflow is not None:
        return None
    dtype = own_dtype(out.format)
    return dtype if dtype in (torch.float32, torch.float64, *HALVES, *FP8_DTYPES) else None


def unrotated(
    y: Tensor, first: Quantizer, before: Quantizer, slope: Tensor | None, signs: Key, dtype: torch.dtype, *,
    was_rotated: bool, traced: bool, scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Turn the gradient of a rounded, rotated operand into that of the tensor itself.

    Args:
        y: [rows, columns]: the product.
        first: Quantiser of the product's first operand, whose outer rotation is undone.
        before: Quantiser of the operand of the forward pass that this is the gradient of.
        slope: What the gradient is multiplied with, or None.
        signs: Key of the pass's random signs.
        was_rotated: The product took that operand as the forward pass rotated it.
        traced: As in ``multiply``.
        scales: What y is multiplied with first, [1, 1] each: the scales that ``_finish`` calls columns and rows.
    """
    if traced:
        texts = text_of(first), text_of(before)
        run = with_keys(torch.ops.fmtsim.unrotate, signs)
        return run(y, *texts, slope, key_tensor(signs), dtype, was_rotated, *scales)  # type: ignore[no-any-return]
    outer, inner = rotations_to_undo(first, before)
    if outer:
        y, scales = _scaled(y, scales), (None, None)
    for transform in reversed(outer):
        y = rotated(y, transform, signs, inverse=True)
    if was_rotated and before.transforms:
        engine = fused_engine(y) if is_on_gpu(y) else None
        fused = None if engine is None else engine.unrotate(y, before.transforms, slope, dtype, scales)
        if fused is not None:
            return fused  # type: ignore[no-any-return]
    y = _scaled(y, scales)
    y = y if slope is None else y * slope
    for transform in reversed(inner if was_rotated else []):
        y = rotated(y, transform, None, inverse=True)
    return y.to(dtype)


def _scaled(y: Tensor, scales: tuple[Tensor | None, Tensor | None]) -> Tensor:
    if scales[0] is scales[1] is None:
        return y
    return _finished(y, *scales, None, None, y.dtype)  # type: ignore[no-any-return]


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
    lhs = Operand(a, Quantizer(), a_scale, block=tuple(a_block))
    rhs = Operand(b, Quantizer(), b_scale, block=tuple(b_block))
    return fused_engine(a).multiply_groups(lhs, rhs, bias, dtype)  # type: ignore[union-attr]


def _fake_fused_finish(y, columns, rows, dtype):  # type: ignore[no-untyped-def]
    announce()
    return y.new_empty(y.shape, dtype=dtype)


def _unrotated(y, first, before, slope, signs, dtype, was_rotated, columns=None, rows=None):  # type: ignore[no-untyped-def]
    how = quantizer_of(first), quantizer_of(before), slope, random_key(signs), dtype
    result = unrotated(y, *how, was_rotated=was_rotated, traced=False, scales=(columns, rows))
    return result.contiguous()  # something is undone: never y itself


define_operator(
    "multiply_groups(Tensor a, Tensor a_scale, int[2] a_block, Tensor b, Tensor b_scale, int[2] b_block, "
    "Tensor? bias, ScalarType dtype) -> Tensor",
    _multiply_group_parts,
    lambda a, a_scale, a_block, b, b_scale, b_block, bias, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
)
define_operator(
    "finish(Tensor y, Tensor? columns, Tensor? rows, Tensor? rest, Tensor? bias, ScalarType dtype) -> Tensor",
    _finished,
    lambda y, columns, rows, rest, bias, dtype: y.new_empty(y.shape, dtype=dtype),
)
define_operator(
    "fused_finish(Tensor y, Tensor? columns, Tensor? rows, ScalarType dtype) -> Tensor",
    lambda y, columns, rows, dtype: _finished(y, columns, rows, None, None, dtype),
    _fake_fused_finish,
)
lower(
    torch.ops.fmtsim.fused_finish.default,
    lambda dtype: lambda y, columns, rows: inlined_product(y, columns, rows, dtype),
)
define_operator(
    "unrotate(Tensor y, str first, str before, Tensor? slope, Tensor? signs, ScalarType dtype, bool was_rotated, "
    "Tensor? columns=None, Tensor? rows=None) -> Tensor",
    _unrotated,
    lambda y, first, before, slope, signs, dtype, was_rotated, *_: y.new_empty(y.shape, dtype=dtype),
    keyed=True,
)
call(torch.ops.fmtsim.finish.default, _finished)
call(torch.ops.fmtsim.unrotate.default, _unrotated)
call(torch.ops.fmtsim.multiply_groups.default, _multiply_group_parts)
