# SPDX-License-Identifier: Apache-2.0
"""One product of two quantised operands: in float32 in no particular order, or as a target computes it.

Without a target, a GPU's bfloat16 units multiply elements that bfloat16 holds: products are exact, sums the unit's
float32. Scales that sums can take, what was cut off, and a bias follow, one rounding a step (``finish_sums``).
"""

from functools import lru_cache
from itertools import product as pairs
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.casts.lanes import Key, define_operator, key_tensor, random_key, with_keys
from fmtsim.casts.ops import cpu_engine, fused_engine
from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import FP32
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.compile import announce, call_directly, find_quantizer, has_known_sizes, lower, quantizer_digest
from fmtsim.gemm.layers.config import INT8, PRODUCTS, Gemm, element_format
from fmtsim.gemm.layers.keys import OUTPUTS, UNITS, Generator, Layer, rotations_to_undo
from fmtsim.gemm.layers.quantize_operand import dequantize, is_on_gpu, multiplier_apart, wide_dtype, widened
from fmtsim.gemm.products.native import FP8_DTYPES, SCALED_MULTIPLE, check_library
from fmtsim.gemm.products.operand_scales import padded_scales
from fmtsim.gemm.products.operands import matrix_layout, operand_format, own_dtype
from fmtsim.gemm.products.resolver import accumulate_name, gemm_call, integer_sums, run_product
from fmtsim.gemm.units import unit as units
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.scaling.inlined import inlined_product
from fmtsim.scaling.scaled_cast import rotated
from fmtsim.spec.call import UNIT_SCALES, GemmCall, Operands, Operation
from fmtsim.spec.operand import Operand, last_cast
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.replay.hooks import refuse

_HALVES = (torch.bfloat16, torch.float16)
_WITHIN_INT32 = 1 << 16  # products of two 8-bit integers
_HIGH = Quantizer()


def layer_product(
    layer: Layer, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype,
    layer_dtype: torch.dtype, *, traced: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` of a product of a layer, on its machine and rounded as its Gemm says.

    Args:
        layer: The layer.
        name: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        a: [M, K].
        b: [N, K].
        bias: [N], or None.
        dtype: Of the result.
        layer_dtype: That of the layer's tensors.
        traced: The tensors are a compiler's, without values: call operators.
    """
    gemm: Gemm = getattr(layer.config, name)
    rounds = gemm.out.format is not None
    if gemm.target is None:
        wide = wide_dtype(dtype)
        y = multiply(a, b, bias, wide if rounds else dtype, wide, traced=traced)
    else:
        y = _multiply_on_machine(layer, name, a, b, bias, dtype, layer_dtype, traced=traced)
        rounds = rounds or y.dtype != dtype
    return round_output(y, gemm.out, dtype, layer.streams[OUTPUTS + PRODUCTS.index(name)]) if rounds else y


def multiply(
    a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, wide: torch.dtype = torch.float32, *,
    traced: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` without a target, rounded once from float32 or float64 (``wide``) to a dtype.

    Where no scale lies between products, the elements are multiplied and the sums scaled: by the scales of b's rows
    first, then by those of a's. Then what ``Clamp`` cut off a, times b, is added, and the bias: each one rounding.
    Where nothing is scaled or added before it, the bias is part of the product (``torch.addmm``). Sums of integers are
    exact and rounded once. Arguments are those of ``layer_product``.
    """
    rest = None if a.rest is None else torch.mm(a.rest, dequantize(b, torch.float32).mT)
    integers = isinstance(a.quantizer.format, IntFormat) and isinstance(b.quantizer.format, IntFormat)
    columns = rows = None
    plain = a.scale is a.tensor_scale is b.scale is b.tensor_scale is None  # of scales
    if not plain and not (a.scales_rows and b.scales_rows):
        # 1. scales lie between products: a kernel scales the sum of each group, or values are multiplied
        if wide == torch.float32 and (engine := fused_engine(a.elements)) is not None and engine.covers_groups(a, b):
            whole = rest is None and dtype in (torch.float32, torch.bfloat16)
            how = (bias if whole else None, dtype if whole else torch.float32)
            run = torch.ops.fmtsim.multiply_groups if traced else _multiply_groups
            y = run(a.elements, a.scale, a.block, b.elements, b.scale, b.block, *how)
            return y if whole else finish_sums(y, None, None, rest, bias, dtype, traced)  # type: ignore[no-any-return]
        lhs, rhs = dequantize(a, wide, "left"), dequantize(b, wide, "right").mT
    else:
        # 2. elements are multiplied: by units of 16 or 8 bits on a GPU, else in the dtype of the steps
        if not plain:
            columns, rows = b.row_scales(), a.row_scales()
        lhs, rhs = a.elements, b.elements.mT
        halves = lhs.dtype == rhs.dtype == torch.bfloat16 and not integers
        scaled = dtype != torch.bfloat16 or not (columns is rows is rest is None)
        if halves and scaled and is_on_gpu(lhs):  # torch on a CPU has no such product
            y = torch.mm(lhs, rhs, out_dtype=torch.float32)
            return finish_sums(y, columns, rows, rest, bias, dtype, traced)
        if integers and wide == torch.float32 and is_on_gpu(lhs):
            return finish_sums(_integer_sums(a, b), columns, rows, rest, bias, dtype, traced)
        if scaled or not halves:
            exact = torch.float64 if integers else wide
            lhs = lhs if lhs.dtype == exact else widened(lhs, exact, "left")
            rhs = rhs if rhs.dtype == exact else widened(rhs, exact, "right")
    # 3. the product; scales, rest and bias follow
    if columns is rows is rest is None and not integers:
        if bias is not None:
            return torch.addmm(bias.to(lhs.dtype), lhs, rhs).to(dtype)
        if lhs.dtype == dtype:
            return torch.mm(lhs, rhs)
    y = torch.mm(lhs, rhs)
    y = y if y.dtype == torch.bfloat16 else y.to(wide)
    return finish_sums(y, columns, rows, rest, bias, dtype, traced)


def _multiply_on_machine(
    layer: Layer, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype,
    layer_dtype: torch.dtype, *, traced: bool,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` as a target or a unit computes it: the bits of fmtsim.mm, linear, scaled_mm or int_mm.

    Arguments are those of ``layer_product``. A bias that the library does not add in such a call is added to the
    float32 result.

    Returns:
        [M, N]: the output format's own dtype where the unit writes that, else ``dtype``, or float32 where the library
        has no such output; ``round_output`` does the rest.

    Raises:
        ArgumentError, DtypeError, FormatError: These operands are not multiplied together there.
    """
    gemm: Gemm = getattr(layer.config, name)
    route, library, wide = layer.routes[name], gemm.library is not None, wide_dtype(layer_dtype)
    if a.elements.is_cuda:
        refuse()  # a replay would repeat neither the choice of a kernel nor its warnings
    # 1. empty operands: nothing is multiplied, and they have no scales
    m, n = a.elements.shape[0], b.elements.shape[0]
    if 0 in (*a.elements.shape, n):
        y = a.elements.new_zeros(m, n, dtype=wide)
        return finish_sums(y, None, None, None, bias, wide if gemm.out.format is not None else dtype, traced)
    # 2. what Clamp cut off a, times b, in float32: by a chain of multiply-adds where the unit takes no float32
    rest = None
    if a.rest is not None:
        target = gemm.target if library or unit_takes(gemm.target, "fp32") else "fp32_fma"
        rest = _run(
            gemm, Operands(a.rest, dequantize(b, torch.float32)), torch.float32, bare=not traced, operation="mm",
            formats=(FP32, FP32), target=target, accumulate="fp32",
        )  # fmt: skip
    # 3. whether sums are scaled instead of values: rows have one scale at most, and a dtype holds the elements
    after = route.how == "integers"
    if route.how == "values" and not gemm.dequantized and a.scales_rows and b.scales_rows:
        elements = [element_format(last_cast(x.quantizer).format) for x in (a, b)]
        after = all(fmt is None or is_representable(fmt, layer_dtype) for fmt in elements)
    columns, rows = (b.row_scales(), a.row_scales()) if after else (None, None)
    row_levels = a.has_row_level, b.has_row_level
    if route.how == "elements" and any(row_levels):
        # no library takes scales of rows above those of blocks: they multiply its float32 sums, as in Transformer
        # Engine, at once where the other operand has one scale, else a's rows first
        rows, columns = a.tensor_scale, b.tensor_scale
        a, b = a._replace(tensor_scale=None), b._replace(tensor_scale=None)
        if not row_levels[1]:
            rows, columns = rows if columns is None else rows * columns, None  # type: ignore[operator]
        elif not row_levels[0]:
            rows, columns = None, columns if rows is None else columns * rows  # type: ignore[operator]
    # 4. the product of integers, whose sums are exact, of elements with their scales, or of values
    if route.how == "integers":
        a_int8, b_int8 = a.elements.to(torch.int8), b.elements.to(torch.int8)
        if library:  # which takes some sizes alone; zeros add nothing
            a_int8, b_int8 = _padded(a_int8, max(m, 17), 8), _padded(b_int8, -(-n // 8) * 8, 8)
        sums = integer_sums(gemm.target)
        y = _run(
            gemm, Operands(a_int8, b_int8), sums, bare=not traced, operation="int_mm", formats=(INT8, INT8),
            target=gemm.target, plan=gemm.plan, accumulate=accumulate_name(sums),
        )[:m, :n]  # fmt: skip
    else:
        if route.how != "elements":
            value_dtype = torch.float32 if route.how == "values_fp32" else layer_dtype
            a, b = (
                Operand((x.elements if after else dequantize(x, wide_dtype(value_dtype))).to(value_dtype), _HIGH)
                for x in (a, b)
            )
        if columns is rows is rest is None:
            return _multiply_elements(layer, name, a, b, bias, dtype, last=True, bare=not traced)
        y = _multiply_elements(layer, name, a, b, None, wide, last=False, bare=not traced)
        if rows is not None and columns is not None and all(row_levels):
            y, rows = y.float() * rows, None
    # 5. scales, rest and bias
    y = y if y.dtype == torch.float64 else y.float()
    return finish_sums(y, columns, rows, rest, bias, y.dtype if gemm.out.format is not None else dtype, traced)


def _multiply_elements(
    layer: Layer, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, *, last: bool, bare: bool
) -> Tensor:
    """Return the product of elements and their scales, of which no more steps follow if it is ``last``."""
    gemm: Gemm = getattr(layer.config, name)
    route, library, elements_dtype = layer.routes[name], gemm.library is not None, a.elements.dtype
    formats = (
        route.formats[0] or operand_format("operand", a.elements),
        route.formats[1] or operand_format("operand", b.elements),
    )
    # 1. scales as products take them
    kind = route.kind if a.scale is not None or b.scale is not None else "none"
    if route.multiplies and kind in UNIT_SCALES:
        a, b = multiplier_apart(a), multiplier_apart(b)
    scaled = kind != "none" or min(formats[0].bits, formats[1].bits) <= 8
    kind = "tensor" if scaled and kind == "none" else kind
    operands = Operands(a.elements, b.elements, bias)
    if kind in ("tensor", "row") and not (a.scale is b.scale is None):
        one = torch.ones((), device=a.elements.device)
        row, column = (one if x.scale is None else x.scale for x in (a, b))
        if kind == "row":
            row, column = (s.reshape(-1).expand(x.elements.shape[0]) for s, x in ((row, a), (column, b)))
        operands = operands._replace(row=row, column=column)
    elif kind != "none" and not (a.scale is b.scale is None):
        each = a.block[0], b.block[0]
        kind = "row_block_128" if kind == "block_128" and each == (1, 1) else kind
        levels = a.tensor_scale, b.tensor_scale
        if not levels[0] is levels[1] is None:  # products take the scales of both tensors, or of none
            one = torch.ones((), device=a.elements.device)
            levels = one if levels[0] is None else levels[0], one if levels[1] is None else levels[1]
        operands = Operands(a.elements, b.elements, bias, *levels, a.scale, b.scale, rows_per_scale=each)
    # 2. the function of the library, the dtype of its result, and whether it adds the bias
    operation: Operation = "scaled_mm" if scaled else "linear" if last and name == "fprop" else "mm"
    operation, out_dtype, adds = _library_call(operation, elements_dtype, bias, gemm, dtype)
    # 3. sizes that the library takes; zeros add nothing
    sums, columns = gemm.accumulate, b.elements.shape[0]
    if library:
        sums = sums or ("fp64" if elements_dtype == torch.float64 else "fp32")
        if scaled and (columns % SCALED_MULTIPLE or b.elements.shape[1] % SCALED_MULTIPLE):
            rows = -(-columns // SCALED_MULTIPLE) * SCALED_MULTIPLE
            operands = padded_scales(operands, columns, rows)._replace(
                a=_padded(a.elements, a.elements.shape[0], SCALED_MULTIPLE),
                b=_padded(b.elements, rows, SCALED_MULTIPLE),
                bias=None if bias is None else _padded(bias[None], 1, SCALED_MULTIPLE)[0],
            )
    y = _run(
        gemm, operands, out_dtype, layer.streams[UNITS + PRODUCTS.index(name)], bare=bare, operation=operation,
        formats=formats, target=gemm.target, plan=gemm.plan, accumulate=sums, fast_accum=gemm.fast_accum, scaling=kind,
        bias=adds, layouts=("row", "row") if scaled else None,
    )  # fmt: skip
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


def _library_call(
    operation: Operation, elements_dtype: torch.dtype, bias: Tensor | None, gemm: Gemm, dtype: torch.dtype
) -> tuple[Operation, torch.dtype, bool]:
    """Return the function of a library, the dtype of its result, and whether it adds the bias.

    A unit alone gives every dtype and adds every bias.
    """
    wide = torch.float64 if torch.float64 in (elements_dtype, dtype) else torch.float32
    out_dtype = dtype if gemm.out.format is None else unit_dtype(gemm.out) or wide
    if gemm.library is None:
        return operation, out_dtype, bias is not None
    scaled, wide = operation == "scaled_mm", torch.float64 if elements_dtype == torch.float64 else torch.float32
    library_dtypes = (torch.float32, *_HALVES, *FP8_DTYPES) if scaled else (elements_dtype, wide)
    out_dtype = out_dtype if out_dtype in library_dtypes else wide
    if bias is None:
        return operation if scaled or out_dtype == elements_dtype else "mm", out_dtype, False
    if scaled:  # a bias of 16 bits, to results of its own dtype or of FP8
        adds = bias.dtype in _HALVES and out_dtype in (bias.dtype, *FP8_DTYPES)
    else:
        adds = out_dtype == bias.dtype == elements_dtype
    if adds:
        return operation, out_dtype, True
    return operation if scaled else "mm", wide, False


def _run(
    gemm: Gemm, operands: Operands, dtype: torch.dtype, generator: Generator = None, *, bare: bool, **facts: Any
) -> Tensor:
    """Run a product; ``facts`` are arguments of ``gemm_call``, and ``bare`` is that of ``run_product``."""
    a, b = operands.a, operands.b
    if facts.get("layouts") is None:
        library = gemm.library is not None or facts.get("plan") is not None
        facts["layouts"] = (matrix_layout(a), matrix_layout(b.mT, transposed=True)) if library else ("row", "row")
    facts |= {"sizes": (a.shape[0], b.shape[0], a.shape[1]), "out": dtype}
    which = operands.rows_per_scale, gemm.library is not None, units.registrations
    call = (_cached_call if bare else _checked_call)(*which, **facts)
    return run_product(call, operands, dtype, native=gemm.native, generator=generator, quantized=True, bare=bare)


def _checked_call(rows_per_scale: tuple[int, int], library: bool, registered: int, **facts: Any) -> GemmCall:
    """Return a GemmCall that the library takes; ``registered`` is how often units were registered by name."""
    call = gemm_call(**facts)
    if library:
        check_library(call, (call.m, call.n, call.k), call.out, rows_per_scale)
    return call


_cached_call = lru_cache(maxsize=4096)(_checked_call)


def _padded(x: Tensor, rows: int, multiple: int) -> Tensor:
    """Pad a matrix with zeros to ``rows`` rows and to a multiple of ``multiple`` columns."""
    if x.shape[0] == rows and not x.shape[1] % multiple:
        return x
    padded = x.new_zeros(rows, -(-x.shape[1] // multiple) * multiple)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def _integer_sums(a: Operand, b: Operand) -> Tensor:
    """Return the product of integer elements, float32, rounded once, by a GPU's int8 units: in digits of 8 bits."""
    # 1. each operand as whole numbers of steps, in signed digits of 8 bits, the lowest first
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
    # 2. the products of all pairs of digits, each with its power of 256; one rounding to float32 at the end
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
    # int32 holds 2^16 products of 8-bit integers; further pieces are added as int64
    pieces = zip(a.split(_WITHIN_INT32, 1), b.split(_WITHIN_INT32, 1), strict=True)
    sums = [torch._int_mm(x.contiguous(), y.contiguous().mT)[:m, :n] for x, y in pieces]
    if len(sums) == 1 and not shift:
        return sums[0]
    return torch.stack([y.to(torch.int64) for y in sums]).sum(0) << shift


def finish_sums(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, rest: Tensor | None, bias: Tensor | None,
    dtype: torch.dtype, traced: bool,
) -> Tensor:  # fmt: skip
    """Return ``((y * columns) * rows + rest) + bias`` in a dtype; what is None is left out. y may be used up."""
    if columns is rows is rest is bias is None:
        return y if y.dtype == dtype else y.to(dtype)
    # one pass over y where a kernel has the same steps
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
    # the order of docs/semantics.md: b's scales, a's scales, the rest, the bias, the dtype
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
    return dtype if dtype in (torch.float32, torch.float64, *_HALVES, *FP8_DTYPES) else None


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
        texts = quantizer_digest(first), quantizer_digest(before)
        run = with_keys(torch.ops.fmtsim.unrotate, signs)
        return run(y, *texts, slope, key_tensor(signs), dtype, was_rotated, *scales)  # type: ignore[no-any-return]
    # 1. rotations of the outer axis, which the product's own operand had
    outer, inner = rotations_to_undo(first, before)
    if outer:
        y, scales = _scaled(y, scales), (None, None)
    for transform in reversed(outer):
        y = rotated(y, transform, signs, inverse=True)
    # 2. the slope of the rounding, then rotations of the inner axis: in one kernel where there is one
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
    # the unit wrote the format itself where it has that dtype
    if out.format is not None and (unit_dtype(out) is None or unit_dtype(out) != y.dtype):
        random = generator if out.rounding.mode == "stochastic" else None
        y = quantize(
            y, out.format, rounding=out.rounding, overflow=out.overflow, generator=random, pad=True, out_dtype=y.dtype
        )
    if y.dtype == dtype:
        return y
    return quantize(y if y.element_size() > 1 else y.float(), dtype, overflow="ieee", out_dtype=dtype)


def _multiply_groups(a, a_scale, a_block, b, b_scale, b_block, bias, dtype):  # type: ignore[no-untyped-def]
    lhs = Operand(a, Quantizer(), a_scale, block=tuple(a_block))
    rhs = Operand(b, Quantizer(), b_scale, block=tuple(b_block))
    return fused_engine(a).multiply_groups(lhs, rhs, bias, dtype)  # type: ignore[union-attr]


def _fake_fused_finish(y, columns, rows, dtype):  # type: ignore[no-untyped-def]
    announce()
    return y.new_empty(y.shape, dtype=dtype)


def _unrotated(y, first, before, slope, signs, dtype, was_rotated, columns=None, rows=None):  # type: ignore[no-untyped-def]
    how = find_quantizer(first), find_quantizer(before), slope, random_key(signs), dtype
    result = unrotated(y, *how, was_rotated=was_rotated, traced=False, scales=(columns, rows))
    return result.contiguous()  # something is undone: never y itself


define_operator(
    "multiply_groups(Tensor a, Tensor a_scale, int[2] a_block, Tensor b, Tensor b_scale, int[2] b_block, "
    "Tensor? bias, ScalarType dtype) -> Tensor",
    _multiply_groups,
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
call_directly(torch.ops.fmtsim.finish.default, _finished)
call_directly(torch.ops.fmtsim.unrotate.default, _unrotated)
call_directly(torch.ops.fmtsim.multiply_groups.default, _multiply_groups)
