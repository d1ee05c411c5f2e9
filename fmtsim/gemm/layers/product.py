# SPDX-License-Identifier: Apache-2.0
"""The product of two quantised operands, on a unit or in float32 in no particular order, and what follows a product.

Without a unit, a GPU's bfloat16 units multiply elements that bfloat16 holds: products are exact, sums the unit's
float32. Scales that sums can take, what was cut off, and a bias follow, one rounding a step (``_finish``).
"""

from itertools import product as pairs

import torch
from torch import Tensor

from fmtsim.float64 import has_float64
from fmtsim.formats.block import FP32
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.gemm.layers.config import Gemm
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.layers.lowering import announce, has_known_sizes, lower
from fmtsim.gemm.layers.operand import is_on_gpu, multiplier_apart, values_of, widened
from fmtsim.gemm.layers.operator import quantizer_of, text_of
from fmtsim.gemm.layers.route import INT8, Route, element_of
from fmtsim.gemm.products.native import SCALED_MULTIPLE
from fmtsim.gemm.products.operands import operand_format, own_dtype
from fmtsim.gemm.products.resolver import run_product
from fmtsim.gemm.products.scales import Scales
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.ops import Key, cpu_engine, define_operator, fused_engine, key_tensor, random_key, with_keys
from fmtsim.quantize import quantize
from fmtsim.scaling.inlined import inlined_product
from fmtsim.scaling.transforms import rotated
from fmtsim.spec.call import UNIT_SCALES, Operation, ScaleKind
from fmtsim.spec.operand import Operand, last_cast
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.transform import Hadamard

_HIGH = Quantizer()
_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
        traced: The tensors have no numbers: a compiler wants to see operators.
    """
    rest = None if a.rest is None else torch.mm(a.rest, values_of(b, torch.float32).mT)
    integers, columns, rows = is_integer(a) and is_integer(b), None, None
    if not (a.scales_rows and b.scales_rows):
        if wide == torch.float32 and (engine := fused_engine(a.elements)) is not None and engine.covers_groups(a, b):
            return _multiply_groups(a, b, rest, bias, dtype, traced)
        left, right = values_of(a, wide, "left"), values_of(b, wide, "right").mT
    else:
        columns, rows = b.row_scales(), a.row_scales()
        left, right = a.elements, b.elements.mT
        halves = left.dtype == right.dtype == torch.bfloat16 and not integers
        scaled = dtype != torch.bfloat16 or not (columns is rows is rest is None)
        if halves and scaled and is_on_gpu(left):  # torch on a CPU has no such product
            y = torch.mm(left, right, out_dtype=torch.float32)
            return _finish(y, columns, rows, rest, bias, dtype, traced)
        if integers and not has_float64(left.device):
            return _finish(_integer_sums(a, b), columns, rows, rest, bias, dtype, traced)
        if scaled or not halves:
            exact = torch.float64 if integers else wide
            left, right = widened(left, exact, "left"), widened(right, exact, "right")
    if bias is not None and columns is rows is rest is None and not integers:
        return torch.addmm(bias.to(left.dtype), left, right).to(dtype)
    y = torch.mm(left, right)
    y = y if y.dtype == torch.bfloat16 else y.to(wide)
    return _finish(y, columns, rows, rest, bias, dtype, traced)


def is_integer(x: Operand) -> bool:
    """Say whether elements are whole numbers of an integer format."""
    return isinstance(x.quantizer.format, IntFormat)


def _integer_sums(a: Operand, b: Operand) -> Tensor:
    """Return the product of integer elements, float32, rounded once, on a device without float64.

    Elements are cut into digits of 8 bits and K into pieces of 1024, whose sums are exact in float32.
    """
    sides, unit = [], 1.0
    for x in (a, b):
        fmt = x.quantizer.format
        assert isinstance(fmt, IntFormat)
        step = fmt.eps / 2 if fmt.half_offset else fmt.eps
        whole, digits = (x.elements.float() / step).to(torch.int64), []
        for _ in range(1 if fmt.bits <= 8 and fmt.signed and not fmt.half_offset else (fmt.bits + 1) // 8 + 1):
            low = ((whole + 128) & 255) - 128
            digits.append(low.float())
            whole = (whole - low) >> 8
        sides.append(digits)
        unit *= step
    total = torch.zeros(a.elements.shape[0], b.elements.shape[0], dtype=torch.int64, device=a.elements.device)
    for (i, left), (j, right) in pairs(*map(enumerate, sides)):
        for x, y in zip(left.split(1024, 1), right.split(1024, 1), strict=True):
            total += torch.mm(x, y.mT).to(torch.int64) << 8 * (i + j)
    return total.to(torch.float32) * unit


def _multiply_groups(
    a: Operand, b: Operand, rest: Tensor | None, bias: Tensor | None, dtype: torch.dtype, traced: bool
) -> Tensor:
    """Multiply elements and scale the sum of each group, by the kernel for that."""
    whole = rest is None and dtype in (torch.float32, torch.bfloat16)
    how = (bias if whole else None, dtype if whole else torch.float32)
    run = torch.ops.fmtsim.multiply_groups if traced else _multiply_group_parts
    y = run(a.elements, a.scale, a.block, b.elements, b.scale, b.block, *how)
    return y if whole else _finish(y, None, None, rest, bias, dtype, traced)  # type: ignore[no-any-return]


def _finish(
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
    made = None if engine is None else engine.finish(y, columns, rows, bias, dtype)
    if made is not None:
        return made
    y = y if columns is None else y * columns.mT
    y = y if rows is None else y * rows
    y = y if rest is None else y + rest
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(dtype, copy=True)


def multiply_on_machine(
    operation: Operation, a: Operand, b: Operand, bias: Tensor | None, gemm: Gemm, route: Route, dtype: torch.dtype,
    own: torch.dtype, generator: Generator, *, traced: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` as a target or a unit computes it: the bits of fmtsim.mm, linear, scaled_mm or int_mm.

    Args:
        operation: ``"mm"`` or ``"linear"``: which function of torch this is where the operands have no scales.
        a: [M, K].
        b: [N, K].
        bias: [N]. Where the library does not add it in such a call it is added to the float32 result.
        gemm: The product.
        route: What the machine is handed.
        dtype: Of the result.
        own: That of the layer's tensors.
        generator: Random words of a unit that rounds stochastically.
        traced: As in ``multiply``.

    Returns:
        [M, N]: the output format's own dtype where the unit writes that, else ``dtype``, or float32 where the library
        has no such output; ``round_output`` does the rest.

    Raises:
        ArgumentError, DtypeError, FormatError: These operands are not multiplied together there.
    """
    rest = _rest_on_machine(a, b, gemm)
    after = route.how == "integers" or (route.how == "values" and _scaled_after(a, b, gemm, own))
    columns, rows = (b.row_scales(), a.row_scales()) if after else (None, None)
    if route.how == "integers":
        y = _multiply_integers(a.elements, b.elements, gemm)
    else:
        if route.how != "elements":
            wide = torch.float32 if route.how == "numbers" else own
            a, b = (Operand((x.elements if after else values_of(x, wide_dtype(wide))).to(wide), _HIGH) for x in (a, b))
        if columns is rows is rest is None:
            return _multiply_elements(operation, a, b, bias, gemm, route, dtype, generator)
        y = _multiply_elements("mm", a, b, None, gemm, route, wide_dtype(own), generator)
    y = y if y.dtype == torch.float64 else y.float()
    return _finish(y, columns, rows, rest, bias, y.dtype if gemm.out.format is not None else dtype, traced)


def _scaled_after(a: Operand, b: Operand, gemm: Gemm, dtype: torch.dtype) -> bool:
    """Say whether sums are scaled instead of values: rows have one scale at most, and a dtype holds the elements."""
    if gemm.dequantized or not (a.scales_rows and b.scales_rows):
        return False
    elements = [element_of(last_cast(x.quantizer).format) for x in (a, b)]
    return all(fmt is None or is_representable(fmt, dtype) for fmt in elements)


def _rest_on_machine(a: Operand, b: Operand, gemm: Gemm) -> Tensor | None:
    """Return what ``Clamp`` cut off the first operand, times the second, in float32; None without.

    A unit that takes no float32 leaves it to a chain of float32 multiply-adds.
    """
    if a.rest is None:
        return None
    unit = gemm.unit if gemm.unit is None or unit_takes(gemm.unit, "fp32") else "fp32_fma"
    values = values_of(b, torch.float32)
    return run_product(
        "mm", a.rest, values, (FP32, FP32), torch.float32, target=gemm.target, unit=unit, native=gemm.native,
        accumulate="fp32", quantized=True,
    )  # fmt: skip


def _multiply_integers(a: Tensor, b: Tensor, gemm: Gemm) -> Tensor:
    """Return the exact sums of products of integers, int32 [M, N], of elements [M, K] and [N, K]."""
    rows, columns = a.shape[0], b.shape[0]
    a, b = a.to(torch.int8), b.to(torch.int8)
    if gemm.target is not None:  # libraries take such sizes alone; zeros add nothing
        a, b = _padded(a, max(rows, 17), 8), _padded(b, -(-columns // 8) * 8, 8)
    y = run_product(
        "int_mm", a, b, (INT8, INT8), torch.int32, target=gemm.target, unit=gemm.unit, plan=gemm.plan,
        accumulate="int32", native=gemm.native, quantized=True,
    )  # fmt: skip
    return y[:rows, :columns]


def _padded(x: Tensor, rows: int, multiple: int) -> Tensor:
    """Return a matrix with rows of zeros up to so many, and columns of zeros up to a multiple."""
    if x.shape[0] == rows and not x.shape[1] % multiple:
        return x
    made = x.new_zeros(rows, -(-x.shape[1] // multiple) * multiple)
    made[: x.shape[0], : x.shape[1]] = x
    return made


def _multiply_elements(
    operation: Operation, a: Operand, b: Operand, bias: Tensor | None, gemm: Gemm, route: Route, dtype: torch.dtype,
    generator: Generator,
) -> Tensor:  # fmt: skip
    """Return the product of elements and their scales."""
    first, second = (fmt or operand_format("operand", x.elements)
                     for fmt, x in zip(route.formats, (a, b), strict=True))  # fmt: skip
    kind = route.kind if a.scale is not None or b.scale is not None else "none"
    scaled, own = kind != "none" or min(first.bits, second.bits) <= 8, a.elements.dtype
    operation, asked, adds = _asked("scaled_mm" if scaled else operation, own, bias, gemm, dtype)
    scales, sums = _scales(a, b, "tensor" if scaled and kind == "none" else kind), gemm.accumulate
    left, right, columns = a.elements, b.elements, b.elements.shape[0]
    if gemm.target is not None:
        sums = sums or ("fp64" if own == torch.float64 else "fp32")
        if scaled and (columns % SCALED_MULTIPLE or right.shape[1] % SCALED_MULTIPLE):
            rows = -(-columns // SCALED_MULTIPLE) * SCALED_MULTIPLE
            left, right = _padded(left, left.shape[0], SCALED_MULTIPLE), _padded(right, rows, SCALED_MULTIPLE)
            scales, bias = (
                scales.padded(columns, rows),
                None if bias is None else _padded(bias[None], 1, SCALED_MULTIPLE)[0],
            )
    y = run_product(
        operation, left, right, (first, second), asked, scales, bias=bias, adds_bias=adds,
        target=gemm.target, unit=gemm.unit, plan=gemm.plan, accumulate=sums, fast_accum=gemm.fast_accum,
        native=gemm.native, generator=generator, layouts=("row", "row") if scaled else None, quantized=True,
    )  # fmt: skip
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


def _scales(a: Operand, b: Operand, kind: ScaleKind) -> Scales:
    """Return the scales of two operands as products take them."""
    if kind == "none" or a.scale is b.scale is None:
        return Scales(kind)
    if kind in ("tensor", "row"):
        one = torch.ones((), device=a.elements.device)
        row, column = (one if x.scale is None else x.scale for x in (a, b))
        if kind == "row":
            row, column = (s.reshape(-1).expand(x.elements.shape[0]) for s, x in ((row, a), (column, b)))
        return Scales(kind, row, column)
    rows = a.block[0], b.block[0]
    kind = "row_block_128" if kind == "block_128" and rows == (1, 1) else kind
    if kind in UNIT_SCALES:
        a, b = multiplier_apart(a), multiplier_apart(b)
    return Scales(kind, a.tensor_scale, b.tensor_scale, a.scale, b.scale, rows)


def unit_dtype(out: Quantizer) -> torch.dtype | None:
    """Return the dtype of an output format that units round to themselves, to nearest, FP8 saturating."""
    if not isinstance(out.format, FloatFormat) or out.rounding.mode != "nearest_even" or out.overflow is not None:
        return None
    dtype = own_dtype(out.format)
    return dtype if dtype in (torch.float32, torch.float64, *_HALVES, *_FP8) else None


def _asked(
    operation: Operation, own: torch.dtype, bias: Tensor | None, gemm: "Gemm", dtype: torch.dtype
) -> tuple[Operation, torch.dtype, bool]:
    """Return the function of a library, the dtype of its result, and whether it adds the bias.

    A unit alone gives every dtype and adds every bias.
    """
    wide = torch.float64 if torch.float64 in (own, dtype) else torch.float32
    asked = dtype if gemm.out.format is None else unit_dtype(gemm.out) or wide
    if gemm.target is None:
        return operation, asked, bias is not None
    wide = torch.float64 if own == torch.float64 else torch.float32
    given = (torch.float32, *_HALVES, *_FP8) if operation == "scaled_mm" else (own, wide)
    asked = asked if asked in given else wide
    if bias is None:
        return operation if operation == "scaled_mm" or asked == own else "mm", asked, False
    if operation == "scaled_mm":
        adds = bias.dtype in _HALVES and asked in (bias.dtype, *_FP8)
    else:
        adds = asked == bias.dtype == own
    if adds:
        return operation, asked, True
    return operation if operation == "scaled_mm" else "mm", wide, False


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
        turned: The product was one of that operand as it was rotated.
        traced: As in ``multiply``.
    """
    if traced:
        texts = text_of(first), text_of(before)
        run = with_keys(torch.ops.fmtsim.unrotate, signs)
        return run(y, *texts, slope, key_tensor(signs), dtype, turned)  # type: ignore[no-any-return]
    outer, inner = rotations_to_undo(first, before, turned)
    for transform in reversed(outer):
        y = rotated(y, transform, signs, inverse=True)
    if turned and before.transforms:
        engine = fused_engine(y) if is_on_gpu(y) else None
        made = None if engine is None else engine.unrotate(y, before.transforms, slope, dtype)
        if made is not None:
            return made  # type: ignore[no-any-return]
    y = y if slope is None else y * slope
    for transform in reversed(inner):
        y = rotated(y, transform, None, inverse=True)
    return y.to(dtype)


def rotations_to_undo(first: Quantizer, before: Quantizer, turned: bool) -> tuple[list[Hadamard], list[Hadamard]]:
    """Return which rotations of the outer and of the inner axis ``unrotated`` undoes, in the order of their doing."""
    outer = [t for t in first.transforms if isinstance(t, Hadamard) and t.axis == "outer" and t.undo]
    inner = [t for t in before.transforms if isinstance(t, Hadamard) and t.axis == "inner"]
    return outer, inner if turned else []


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


def _fake_fused_finish(y, columns, rows, dtype):  # type: ignore[no-untyped-def]
    announce()
    return y.new_empty(y.shape, dtype=dtype)


def _unrotated(y, first, before, slope, signs, dtype, turned):  # type: ignore[no-untyped-def]
    how = quantizer_of(first), quantizer_of(before), slope, random_key(signs), dtype
    return unrotated(y, *how, turned=turned, traced=False).contiguous()  # something is undone: never y itself


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
    "unrotate(Tensor y, str first, str before, Tensor? slope, Tensor? signs, ScalarType dtype, bool turned) -> Tensor",
    _unrotated,
    lambda y, first, before, slope, signs, dtype, turned: y.new_empty(y.shape, dtype=dtype),
    keyed=True,
)
