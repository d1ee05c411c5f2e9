# SPDX-License-Identifier: Apache-2.0
"""The verbs of products with scales of their own: scaled_mm, and mma for one matrix instruction."""

import math
from typing import Any, Never

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_flags, check_together, random_keys, refuse_others, spelled
from fmtsim.casts.lanes import define_operator
from fmtsim.casts.ops import quantize
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.native import check_library
from fmtsim.gemm.products.operand_scales import (
    check_scales,
    read_scales,
    recipe_names,
    swizzle_names,
    unit_scale_format,
    unit_scales,
)
from fmtsim.gemm.products.operands import (
    as_pair,
    check_tensor,
    inner_length,
    matrix_layout,
    operand_format,
    read_operand,
)
from fmtsim.gemm.products.operator import output_format, run_gemm
from fmtsim.gemm.products.resolver import (
    ACCUMULATE_DTYPES,
    accumulate_name,
    check_target,
    gemm_call,
    product_call,
    resolve,
    run_product,
)
from fmtsim.gemm.units.unit import is_unit, list_units, unit_takes
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import SCALE_KINDS, UNIT_SCALES, OperandFormat, Operands, ScaleKind
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath, LogDatapath, sum_dtype
from fmtsim.spec.gemm_spec import gemm_spec_from_json
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, shown

_HALVES = (torch.bfloat16, torch.float16)


@spelled
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_b: Tensor | list[Tensor],
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *more: Never,
    target: Any = None,
    plan: GemmPlan | None = None,
    scale_recipes: Any = None,
    swizzles: Any = None,
    formats: Any = None,
    native: bool | None = None,
    accumulate: str | None = None,
    strict: bool = False,
    generator: Any = None,
    **others: Never,
) -> Tensor:
    """Multiply scaled matrices with the bits of a target's torch._scaled_mm, or of a unit.

    Positional arguments are those of ``torch._scaled_mm``; the recipes of ``torch.nn.functional.scaled_mm`` are
    keywords here.

    Args:
        a: [M, K], torch float8 or float4 (two in a byte, [M, K / 2]); any layout, though torch takes row-major alone.
        b: [K, N], likewise; torch takes column-major alone.
        scale_a: Scales that a's values are multiplied with. Their kind follows from their shapes, as in torch:
            float32 of one element; [M, 1] with [1, N] for b; [M, K/128] with [K/128, N/128] or [K/128, N] for b (1x128
            and 128x128 blocks); float8_e8m0fnu for every 32 (MX); float8_e4m3fn for every 16 (NVFP4), alone or in a
            list with the float32 scale of the tensor.
        scale_b: Scales of b.
        bias: [N], bfloat16 or float16, of the output's dtype where that has 16 bits; not for float32 outputs.
        scale_result: float32, one element, multiplies FP8 outputs of a unit. On a target it changes nothing: torch
            takes it, but an H200's results with and without it are equal (torch 2.11).
        out_dtype: None takes a's dtype, or bfloat16 where recipes are given, as the two functions of torch do.
        use_fast_accum: Which kernel of a target: False promotes sums to float32 on the way. A unit does not look at it.
        target, plan, formats, native, accumulate, strict, generator: As in ``mm``.
        scale_recipes: ``torch.nn.functional.ScalingType`` or its name, or a list of those for two levels of scales,
            instead of the shapes; a tuple is a pair ``(a's, b's)``, anything else serves both.
        swizzles: ``torch.nn.functional.SwizzleType`` or its name, likewise: order of block scales. None is the one that
            cuBLAS takes (32x4x4); with ``"NO_SWIZZLE"`` they are [M, ceil(K / g)] and [N, ceil(K / g)].

    Returns:
        [M, N], contiguous. It has no gradient. NaN is 0x7FFFFFFF, 0x7FFF in 16 bits, 0x7F in FP8; FP8 outputs saturate.

    Raises:
        ArgumentError: Shapes, scales or a plan that do not fit; scales that are negative, NaN or Inf.
        DtypeError: Dtypes that do not go together: a target takes what cuBLAS takes (not E5M2 x E5M2).
        DeviceError: The GPU's library refuses a native call.

    >>> a = torch.full((16, 32), 2.0).to(torch.float8_e4m3fn)
    >>> y = scaled_mm(a, a.t(), torch.tensor(0.5), torch.tensor(1.0), out_dtype=torch.bfloat16, target="hopper.wgmma")
    >>> y[0, 0].item()
    64.0
    """
    refuse_others(scaled_mm, more, others)
    target = check_target("scaled_mm", target, plan, accumulate)
    library = not is_unit(target)
    check_flags(use_fast_accum=use_fast_accum, strict=strict, native=native)
    formats, dtype, scaling, operands = read_scaled(
        a, b, scale_a, scale_b, bias, out_dtype, library, scale_result=scale_result, scale_recipes=scale_recipes,
        swizzles=swizzles, formats=formats,
    )  # fmt: skip
    # a library's choice depends on layouts, a unit's result does not
    facts: dict[str, Any] = {"bias": bias is not None, "strict": strict, "fast_accum": use_fast_accum}
    if library or plan is not None:
        facts["layouts"] = matrix_layout(a), matrix_layout(b, transposed=True)
    call = product_call(
        "scaled_mm", formats, operands, dtype, native=native, target=target, plan=plan, scaling=scaling,
        accumulate=accumulate or ("fp32" if library else None), **facts,
    )  # fmt: skip
    if library:
        check_library(call, (a.shape[0], b.shape[1], inner_length(a)), dtype, operands.rows_per_scale)
    return run_product(call, operands, dtype, native=native, generator=generator)


def read_scaled(
    a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, bias: Tensor | None, out_dtype: torch.dtype | None,
    library: bool, *, scale_result: Tensor | None = None, scale_recipes: Any, swizzles: Any, formats: Any,
) -> tuple[tuple[OperandFormat, OperandFormat], torch.dtype, ScaleKind, Operands]:  # fmt: skip
    """Return the formats, the dtype of the result, the kind of scales and the operands of a ``scaled_mm``, checked."""
    # 1. tensors of the right kinds, together on one device, without a gradient
    check_scales(scale_a=scale_a, scale_b=scale_b)  # first: torch's other function has recipes in their place
    check_tensor("a", a, "2")
    check_tensor("b", b, "2")
    if bias is not None:
        check_tensor("bias", bias, "1")
    if scale_result is not None:
        check_tensor("scale_result", scale_result, "0+")
        if scale_result.numel() != 1 or scale_result.dtype != torch.float32:
            raise ArgumentError(
                f"scale_result is {scale_result.dtype} of shape {tuple(scale_result.shape)}; pass one float32 element"
            )
    check_together(a=a, b=b, bias=bias, scale_result=scale_result)
    for name, t in (("a", a), ("b", b), ("bias", bias)):
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"scaled_mm has no gradient, but {name} requires one; pass {name}.detach()")
    columns = b.mT
    # 2. formats and sizes
    a_format, b_format = as_pair("formats", formats)
    operand_formats = operand_format("a", a, a_format), operand_format("b", columns, b_format)
    m, k, n = a.shape[0], inner_length(a), b.shape[1]
    if k != inner_length(columns):
        raise ArgumentError(f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit; b is [K, N]")
    check_together(a=a, b=b, **_by_name(scale_a=scale_a, scale_b=scale_b))
    # 3. the kind of scales, by recipes or by dtypes and shapes as torch infers it
    recipe_a, recipe_b = (recipe_names("scale_recipes", one) for one in as_pair("scale_recipes", scale_recipes))
    swizzle_a, swizzle_b = (swizzle_names("swizzles", one) for one in as_pair("swizzles", swizzles))
    scaling, scales = read_scales(scale_a, scale_b, (m, n, k), (recipe_a, recipe_b), (swizzle_a, swizzle_b))
    # 4. the dtype of the result: torch's two functions have different defaults
    recipes = recipe_a is not None
    dtype = out_dtype if out_dtype is not None else torch.bfloat16 if recipes else a.dtype
    if not isinstance(dtype, torch.dtype) or dtype == torch.float4_e2m1fn_x2:
        raise DtypeError(f"out_dtype={shown(dtype)} is not the dtype of a product; pass for example torch.bfloat16")
    output_format(dtype)
    _check_bias(bias, n, dtype, library)
    return operand_formats, dtype, scaling, Operands(a, columns, bias, result_scale=scale_result, **scales)


def _by_name(**scales: Any) -> dict[str, Tensor]:
    """Return scales by the names that errors call them."""
    by_name: dict[str, Any] = {}
    for name, scale in scales.items():
        levels = {f"{name}[{i}]": level for i, level in enumerate(scale)} if isinstance(scale, list | tuple) else None
        by_name |= levels or {name: scale}
    return by_name


def _check_bias(bias: Tensor | None, n: int, dtype: torch.dtype, library: bool) -> None:
    if bias is None:
        return
    if bias.shape != (n,):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; pass [{n}]")
    if dtype == torch.float32 and library:
        raise DtypeError(
            "torch._scaled_mm adds no bias to a float32 output; choose torch.bfloat16, or add it afterwards"
        )
    # cuBLAS adds a bias of the output's 16 bits, or of either to FP8
    allowed = (dtype,) if dtype in _HALVES else _HALVES
    if bias.dtype not in allowed:
        raise DtypeError(f"bias has dtype {bias.dtype}; a {dtype} output takes {' or '.join(map(str, allowed))}")


@spelled
def mma(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *more: Never,
    target: Any = None,
    formats: Any = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    accumulate: str | None = None,
    generator: Any = None,
    **others: Never,
) -> Tensor:
    """Compute ``a b^T + c`` as one matrix instruction of a unit does, for any number of matrices.

    Args:
        a: [..., M, K]: floats, torch float8 or float4 tensors, int8, or codes with ``formats``. K may be any length:
            a longer one is a chain of blocks, as when instructions follow each other. Of float32 words a unit that
            takes TF32 ignores the low 13 bits.
        b: [..., N, K], likewise; leading dimensions broadcast.
        c: [..., M, N], the addend, in the accumulator's dtype (float32, float16, float64 or int32); None is +0.
        target: A matrix unit alone, by name or record, or a datapath (a ``Datapath`` record or its JSON).
        formats: Format of both operands, or a pair, where their dtypes do not say it, as in ``mm``.
        scale_a: [..., M, ceil(K / g)] scales inside the unit, one for g products: torch float8 tensors, uint8 codes, or
            floats on the unit's scale format. None is 1. Their signs are ignored, NaN makes NaN.
        scale_b: [..., N, ceil(K / g)].
        accumulate: ``"fp32"``, ``"fp16"``, ``"fp64"`` or ``"int32"``; None takes c's dtype, or the unit's usual one.
        generator: Random words of a datapath that rounds stochastically, as in ``mm``; matrices draw in order.

    Returns:
        [..., M, N] in the accumulator's dtype. It has no gradient.

    NaN is 0x7FFFFFFF, 0x7FFF in float16. Every bit is defined in docs/matmul.md, sections 2 and 3.

    Raises:
        ArgumentError: Shapes, devices, formats or scales that the unit does not take.
        DtypeError: A dtype that says no format, or a c that is not of the accumulator's.
        FormatError: An unknown format.

    >>> a = torch.tensor([[2.0**12, 1.0, -(2.0**12)]]).to(torch.float8_e5m2)
    >>> one = torch.ones(1, 3).to(torch.float8_e5m2)
    >>> mma(a, one, target="hopper.wgmma"), mma(16 * a.float(), one.float(), target="exact")
    (tensor([[1.]]), tensor([[16.]]))
    """
    refuse_others(mma, more, others)
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, "2+")
    for name, extra in (("c", c), ("scale_a", scale_a), ("scale_b", scale_b)):
        if extra is not None:
            check_tensor(name, extra, "2+")
    check_together(a=a, b=b, c=c, scale_a=scale_a, scale_b=scale_b)
    _refuse_gradient(a=a, b=b, c=c)
    # 1. a unit or datapath, and its mode by formats, sums and scales
    unit = check_target("mma", target, accumulate=accumulate)
    if not is_unit(unit):
        raise ArgumentError(
            f"mma is one instruction of a matrix unit, and target={shown(target)} is a GPU with its library; choose a "
            f"unit ({', '.join(list_units())}) or a Datapath"
        )
    accumulate = None if isinstance(unit, Arithmetic) else _accumulate(c, accumulate)
    chosen, truncated = _formats(a, b, unit, *as_pair("formats", formats))
    # 2. operands as values, then the definition of the instruction
    a_values = read_operand(a, chosen[0], tf32="truncate" if truncated[0] else "")
    b_values = read_operand(b, chosen[1], tf32="truncate" if truncated[1] else "")
    if a_values.shape[-1] != b_values.shape[-1]:
        raise ArgumentError(
            f"mma: a of shape {tuple(a_values.shape)} and b of shape {tuple(b_values.shape)} differ in K; "
            "a is [..., M, K], b is [..., N, K]"
        )
    scale_fmt = unit_scale_format(scale_a, scale_b)
    kind: ScaleKind = next((kind for kind in UNIT_SCALES if SCALE_KINDS[kind].unit_scale == scale_fmt), "none")
    call = gemm_call("mm", chosen, (0, 0, 0), torch.float32, target=unit, accumulate=accumulate, scaling=kind)
    spec = resolve(call)
    dtype = ACCUMULATE_DTYPES[spec.accumulate]
    # 3. leading dimensions broadcast; c is a value of the accumulator
    shapes = [t.shape[:-2] for t in (a_values, b_values, c, scale_a, scale_b) if t is not None]
    try:
        batch = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ArgumentError(
            f"mma: leading dimensions {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast"
        ) from None
    m, n = a_values.shape[-2], b_values.shape[-2]
    if c is not None and c.shape[-2:] != (m, n):
        raise ArgumentError(f"mma: c has shape {tuple(c.shape)}; pass [..., {m}, {n}]")
    if c is not None and c.dtype != dtype:
        raise DtypeError(f"c has dtype {c.dtype}, but the unit sums in {dtype}; pass c.to({dtype})")
    addend = c if c is None else (_addend if is_readable(c) else torch.ops.fmtsim.addend)(c, spec.text)
    scales = unit_scales(scale_a, scale_b, a_values, b_values, spec.text)
    validated = a_values is not a and b_values is not b  # made of codes, or truncated
    # a stack of matrices; one that shares b is one product of all rows
    together = not spec.stochastic and b_values.dim() == 2 and (scales[1] is None or scales[1].dim() == 2)
    stack: Any = (a_values, b_values, addend, *scales)
    if together or not batch:
        rows = [None if t is None else t.expand(*batch, *t.shape[-2:]).flatten(0, -2) for t in (stack[0], *stack[2:4])]
        stack = (rows[0], b_values, rows[1], rows[2], scales[1])
    else:
        stack = [None if t is None else t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in stack]
    # matrices of a stack draw in their order, the rows of one product by their places
    key = random_keys(spec.stochastic, generator, math.prod(batch) if batch and not together else None, a.device)
    operands = Operands(stack[0], stack[1], c=stack[2], scale_a=stack[3], scale_b=stack[4])
    return run_gemm(operands, spec, dtype, random=key, validated=validated).reshape(*batch, m, n)


def _refuse_gradient(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"mma has no gradient, but {name} requires one; pass {name}.detach(), or call mm")


def _accumulate(c: Tensor | None, accumulate: str | None) -> str | None:
    if c is None:
        return accumulate
    # c says the sums; a contradiction is an error
    of_c = accumulate_name(c.dtype)
    if accumulate not in (None, of_c):
        raise DtypeError(f"c has dtype {c.dtype}, but accumulate={shown(accumulate)}; leave one of them out")
    return of_c


def _formats(
    a: Tensor, b: Tensor, unit: Any, a_format: Any, b_format: Any
) -> tuple[tuple[OperandFormat, OperandFormat], tuple[bool, bool]]:
    """Return both formats, and which operands are float32 words whose low bits a TF32 unit ignores."""
    formats, truncated = [], []
    # float32 words in a unit without float32 are TF32 with ignored low bits
    only_tf32 = not unit_takes(unit, "fp32") and unit_takes(unit, "tf32")
    for name, x, declared in (("a", a, a_format), ("b", b, b_format)):
        is_fp32 = x.dtype == torch.float32
        declared = "tf32" if declared is None and is_fp32 and only_tf32 else declared
        formats.append(operand_format(name, x, declared))
        truncated.append(is_fp32 and formats[-1].name == "tf32")
    return (formats[0], formats[1]), (truncated[0], truncated[1])


def _addend(c: Tensor, text: str) -> Tensor:
    """Return c as values of the accumulator of a product's definition, in the dtype of the sums."""
    path = gemm_spec_from_json(text).datapath
    if isinstance(path, IntegerDatapath):
        if bool((c != c.clamp(*path.limits)).any()):
            raise ArgumentError(f"c holds numbers beyond {path.accumulator_bits} bits; clamp it to {path.limits}")
        return c
    if isinstance(path, LogDatapath):
        raise ArgumentError("a LogDatapath starts its sums at zero; leave c out, and add it to the result")
    # the dtype of the sums holds every number of c's
    wide = c.to(sum_dtype(path))  # exact
    if not isinstance(path, Datapath) or is_exactly(path.accumulator, c.dtype):
        return wide
    # Registers are wider than the accumulator. Alignment drops the same low bits of c, whatever the exponent is.
    dropped = path.fraction_bits is not None and path.fraction_bits <= path.accumulator.mantissa_bits
    rounding = Rounding(mode="toward_zero") if dropped and path.term_rounding == "toward_zero" else Rounding()
    spec = CastSpec(format=path.accumulator, rounding=rounding, overflow="ieee")
    # a c that the accumulator lacks is refused, unless the unit would drop the same bits
    rounded = quantize(wide, spec, wide.dtype, None, None)
    if rounding.mode != "toward_zero" and bool(((rounded != wide) & ~(rounded.isnan() & wide.isnan())).any()):
        raise ArgumentError(
            f"c holds numbers that the accumulator {path.accumulator.name} lacks; round it first with fmtsim.quantize"
        )
    return rounded


def is_exactly(fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Return True if every number of a dtype is a value of a format."""
    dtype_fmt = get_format(dtype)
    assert isinstance(dtype_fmt, FloatFormat)
    # range and precision of the dtype within those of the format
    in_range = dtype_fmt.max <= fmt.max and dtype_fmt.min_subnormal >= fmt.min_subnormal
    return in_range and dtype_fmt.mantissa_bits <= fmt.mantissa_bits


def _addend_shape(c, text):  # type: ignore[no-untyped-def]
    return torch.empty_like(c, dtype=sum_dtype(gemm_spec_from_json(text).datapath))


define_operator("addend(Tensor c, str spec) -> Tensor", lambda c, spec: _addend(c.clone(), spec), _addend_shape)
