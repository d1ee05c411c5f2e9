# SPDX-License-Identifier: Apache-2.0
"""The product of two quantised operands on a target: which torch call it is, padded as the library needs it."""

import torch
from torch import Tensor

from fmtsim.formats.block import FP32
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.config import Gemm
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.layers.operand import multiplier_apart, values_of
from fmtsim.gemm.layers.product import HALVES, finish, unit_dtype, wide_dtype
from fmtsim.gemm.layers.route import INT8, Route, element_of
from fmtsim.gemm.products.native import FP8_DTYPES, SCALED_MULTIPLE
from fmtsim.gemm.products.operands import operand_format
from fmtsim.gemm.products.resolver import run_product
from fmtsim.gemm.products.scales import Scales
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.spec.call import UNIT_SCALES, Operation
from fmtsim.spec.operand import Operand, last_cast
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.replay.hooks import refuse

_HIGH = Quantizer()


def multiply_on_machine(
    operation: Operation, a: Operand, b: Operand, bias: Tensor | None, gemm: Gemm, route: Route, dtype: torch.dtype,
    layer_dtype: torch.dtype, generator: Generator, *, traced: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` as a target or a unit computes it: the bits of fmtsim.mm, linear, scaled_mm or int_mm.

    Args:
        operation: ``"mm"`` or ``"linear"``: which function of torch this is where the operands have no scales.
        a: [M, K].
        b: [N, K].
        bias: [N]. Where the library does not add it in such a call it is added to the float32 result.
        gemm: The product.
        route: What the target multiplies.
        dtype: Of the result.
        layer_dtype: That of the layer's tensors.
        generator: Random words of a unit that rounds stochastically.
        traced: The tensors are a compiler's, without values: call operators.

    Returns:
        [M, N]: the output format's own dtype where the unit writes that, else ``dtype``, or float32 where the library
        has no such output; ``round_output`` does the rest.

    Raises:
        ArgumentError, DtypeError, FormatError: These operands are not multiplied together there.
    """
    if a.elements.is_cuda:
        refuse()
    if 0 in (*a.elements.shape, b.elements.shape[0]):  # nothing is multiplied, and empty operands have no scales
        y = a.elements.new_zeros(a.elements.shape[0], b.elements.shape[0], dtype=wide_dtype(layer_dtype))
        return finish(y, None, None, None, bias, y.dtype if gemm.out.format is not None else dtype, traced)
    rest = None if a.rest is None else _rest_on_machine(a.rest, b, gemm)
    after = route.how == "integers" or (route.how == "values" and _scaled_after(a, b, gemm, layer_dtype))
    columns, rows = (b.row_scales(), a.row_scales()) if after else (None, None)
    if route.how == "integers":
        y = _multiply_integers(a.elements, b.elements, gemm)
    else:
        if route.how != "elements":
            wide = torch.float32 if route.how == "numbers" else layer_dtype
            a, b = (Operand((x.elements if after else values_of(x, wide_dtype(wide))).to(wide), _HIGH) for x in (a, b))
        if columns is rows is rest is None:
            return _multiply_elements(operation, a, b, bias, gemm, route, dtype, generator, not traced)
        y = _multiply_elements("mm", a, b, None, gemm, route, wide_dtype(layer_dtype), generator, not traced)
    y = y if y.dtype == torch.float64 else y.float()
    return finish(y, columns, rows, rest, bias, y.dtype if gemm.out.format is not None else dtype, traced)


def _scaled_after(a: Operand, b: Operand, gemm: Gemm, dtype: torch.dtype) -> bool:
    """Return True if sums are scaled instead of values: rows have one scale at most, and a dtype holds the elements."""
    if gemm.dequantized or not (a.scales_rows and b.scales_rows):
        return False
    elements = [element_of(last_cast(x.quantizer).format) for x in (a, b)]
    return all(fmt is None or is_representable(fmt, dtype) for fmt in elements)


def _rest_on_machine(rest: Tensor, b: Operand, gemm: Gemm) -> Tensor:
    """Return what ``Clamp`` cut off the first operand, times the second, in float32.

    A unit that takes no float32 leaves it to a chain of float32 multiply-adds.
    """
    target = gemm.target if gemm.library is not None or unit_takes(gemm.target, "fp32") else "fp32_fma"
    values = values_of(b, torch.float32)
    return run_product(
        "mm", rest, values, (FP32, FP32), torch.float32, target=target, library=gemm.library is not None,
        native=gemm.native, accumulate="fp32", quantized=True,
    )  # fmt: skip


def _multiply_integers(a: Tensor, b: Tensor, gemm: Gemm) -> Tensor:
    """Return the exact product of integer elements [M, K] and [N, K]: int32 [M, N]."""
    rows, columns = a.shape[0], b.shape[0]
    a, b = a.to(torch.int8), b.to(torch.int8)
    if gemm.library is not None:  # libraries take such sizes alone; zeros add nothing
        a, b = _padded(a, max(rows, 17), 8), _padded(b, -(-columns // 8) * 8, 8)
    y = run_product(
        "int_mm", a, b, (INT8, INT8), torch.int32, target=gemm.target, library=gemm.library is not None,
        plan=gemm.plan, accumulate="int32", native=gemm.native, quantized=True,
    )  # fmt: skip
    return y[:rows, :columns]


def _padded(x: Tensor, rows: int, multiple: int) -> Tensor:
    """Pad a matrix with zeros to ``rows`` rows and to a multiple of ``multiple`` columns."""
    if x.shape[0] == rows and not x.shape[1] % multiple:
        return x
    padded = x.new_zeros(rows, -(-x.shape[1] // multiple) * multiple)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def _multiply_elements(
    operation: Operation, a: Operand, b: Operand, bias: Tensor | None, gemm: Gemm, route: Route, dtype: torch.dtype,
    generator: Generator, bare: bool,
) -> Tensor:  # fmt: skip
    """Return the product of elements and their scales; ``bare`` as in ``run_product``."""
    first = route.formats[0] or operand_format("operand", a.elements)
    second = route.formats[1] or operand_format("operand", b.elements)
    kind = route.kind if a.scale is not None or b.scale is not None else "none"
    if route.multiplies and kind in UNIT_SCALES:
        a, b = multiplier_apart(a), multiplier_apart(b)
    scaled, elements_dtype = kind != "none" or min(first.bits, second.bits) <= 8, a.elements.dtype
    operation, y_dtype, adds = _library_call("scaled_mm" if scaled else operation, elements_dtype, bias, gemm, dtype)
    # scales as products take them
    kind = "tensor" if scaled and kind == "none" else kind
    if kind == "none" or a.scale is b.scale is None:
        scales = Scales(kind)
    elif kind in ("tensor", "row"):
        one = torch.ones((), device=a.elements.device)
        row, column = (one if x.scale is None else x.scale for x in (a, b))
        if kind == "row":
            row, column = (s.reshape(-1).expand(x.elements.shape[0]) for s, x in ((row, a), (column, b)))
        scales = Scales(kind, row, column)
    else:
        rows_per_scale = a.block[0], b.block[0]
        kind = "row_block_128" if kind == "block_128" and rows_per_scale == (1, 1) else kind
        scales = Scales(kind, a.tensor_scale, b.tensor_scale, a.scale, b.scale, rows_per_scale)
    # sizes that the library takes; zeros add nothing
    sums = gemm.accumulate
    lhs, rhs, columns = a.elements, b.elements, b.elements.shape[0]
    if gemm.library is not None:
        sums = sums or ("fp64" if elements_dtype == torch.float64 else "fp32")
        if scaled and (columns % SCALED_MULTIPLE or rhs.shape[1] % SCALED_MULTIPLE):
            rows = -(-columns // SCALED_MULTIPLE) * SCALED_MULTIPLE
            lhs, rhs = _padded(lhs, lhs.shape[0], SCALED_MULTIPLE), _padded(rhs, rows, SCALED_MULTIPLE)
            scales, bias = (
                scales.padded(columns, rows),
                None if bias is None else _padded(bias[None], 1, SCALED_MULTIPLE)[0],
            )
    y = run_product(
        operation, lhs, rhs, (first, second), y_dtype, scales, bias=bias, adds_bias=adds,
        target=gemm.target, library=gemm.library is not None, plan=gemm.plan, accumulate=sums,
        fast_accum=gemm.fast_accum, native=gemm.native, generator=generator,
        layouts=("row", "row") if scaled else None, quantized=True, bare=bare,
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
    wide = torch.float64 if elements_dtype == torch.float64 else torch.float32
    library_dtypes = (torch.float32, *HALVES, *FP8_DTYPES) if operation == "scaled_mm" else (elements_dtype, wide)
    out_dtype = out_dtype if out_dtype in library_dtypes else wide
    if bias is None:
        return operation if operation == "scaled_mm" or out_dtype == elements_dtype else "mm", out_dtype, False
    if operation == "scaled_mm":
        adds = bias.dtype in HALVES and out_dtype in (bias.dtype, *FP8_DTYPES)
    else:
        adds = out_dtype == bias.dtype == elements_dtype
    if adds:
        return operation, out_dtype, True
    return operation if operation == "scaled_mm" else "mm", wide, False
