# SPDX-License-Identifier: Apache-2.0
"""The verb of scaled matrix products: scaled_mm."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_flags, check_together
from fmtsim.gemm.products.operands import check_tensor, inner_length, operand_format
from fmtsim.gemm.products.operator import output_format
from fmtsim.gemm.products.resolver import run_product, target_or_unit
from fmtsim.gemm.products.scales import check_scales, read_scales, recipe_names, swizzle_names
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, DtypeError, shown

_HALVES = (torch.bfloat16, torch.float16)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_b: Tensor | list[Tensor],
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    target: Any = None,
    unit: Any = None,
    datapath: Any = None,
    plan: GemmPlan | None = None,
    accumulate: str | None = None,
    scale_recipe_a: Any = None,
    scale_recipe_b: Any = None,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    strict: bool = False,
    generator: Any = None,
    a_format: Any = None,
    b_format: Any = None,
    native: bool | None = None,
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
        target, unit, datapath, plan, accumulate, strict, generator, a_format, b_format, native: As in ``mm``.
        scale_recipe_a: ``torch.nn.functional.ScalingType`` or its name, or a list of those, instead of the shapes.
        scale_recipe_b: Likewise.
        swizzle_a: ``torch.nn.functional.SwizzleType`` or its name: order of block scales. None is the one that cuBLAS
            takes (32x4x4); with ``"NO_SWIZZLE"`` they are [M, ceil(K / g)].
        swizzle_b: Likewise, [N, ceil(K / g)].

    Returns:
        [M, N], contiguous. It has no gradient. NaN is 0x7FFFFFFF, 0x7FFF in 16 bits, 0x7F in FP8; FP8 outputs saturate.

    Raises:
        ArgumentError: Shapes, scales or a plan that do not fit; scales that are negative, NaN or Inf.
        DtypeError: Dtypes that do not go together: a target takes what cuBLAS takes (not E5M2 x E5M2).
        DeviceError: The GPU's library refuses a native call.

    >>> a = torch.full((16, 32), 2.0).to(torch.float8_e4m3fn)
    >>> y = scaled_mm(a, a.t(), torch.tensor(0.5), torch.tensor(1.0), out_dtype=torch.bfloat16, unit="hopper.wgmma")
    >>> y[0, 0].item()
    64.0
    """
    unit = target_or_unit("scaled_mm", target, unit, datapath, plan, accumulate)
    check_flags(use_fast_accum=use_fast_accum, strict=strict, native=native)
    check_scales(scale_a=scale_a, scale_b=scale_b)  # first: torch's other function has recipes in their place
    _check_tensors(a, b, bias, scale_result)
    columns = b.mT
    formats = operand_format("a", a, a_format), operand_format("b", columns, b_format)
    m, k, n = a.shape[0], inner_length(a), b.shape[1]
    if k != inner_length(columns):
        raise ArgumentError(f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit; b is [K, N]")
    check_together(a=a, **_by_name(scale_a=scale_a, scale_b=scale_b))
    recipes = recipe_names("scale_recipe_a", scale_recipe_a), recipe_names("scale_recipe_b", scale_recipe_b)
    swizzles = swizzle_names("swizzle_a", swizzle_a), swizzle_names("swizzle_b", swizzle_b)
    scales = read_scales(scale_a, scale_b, (m, n, k), recipes, swizzles)
    dtype = _output(a, recipes[0] is not None, out_dtype)
    _check_bias(bias, n, dtype, target is not None)
    return run_product(
        "scaled_mm", a, columns, formats, dtype, scales, bias=bias, scale_result=scale_result, target=target, unit=unit,
        plan=plan, accumulate=accumulate or ("fp32" if unit is None else None), fast_accum=use_fast_accum,
        native=native, strict=strict, generator=generator,
    )  # fmt: skip


def _check_tensors(a: Any, b: Any, bias: Any, scale_result: Any) -> None:
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


def _by_name(**scales: Any) -> dict[str, Tensor]:
    """Return scales by the names that errors call them."""
    found: dict[str, Any] = {}
    for name, given in scales.items():
        several = isinstance(given, list | tuple)
        found |= {f"{name}[{i}]": member for i, member in enumerate(given)} if several else {name: given}
    return found


def _output(a: Tensor, recipes: bool, given: torch.dtype | None) -> torch.dtype:
    dtype = given if given is not None else torch.bfloat16 if recipes else a.dtype
    if not isinstance(dtype, torch.dtype) or dtype == torch.float4_e2m1fn_x2:
        raise DtypeError(f"out_dtype={shown(dtype)} is not the dtype of a product; pass for example torch.bfloat16")
    output_format(dtype)
    return dtype


def _check_bias(bias: Tensor | None, n: int, dtype: torch.dtype, library: bool) -> None:
    if bias is None:
        return
    if bias.shape != (n,):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; pass [{n}]")
    if dtype == torch.float32 and library:
        raise DtypeError(
            "torch._scaled_mm adds no bias to a float32 output; choose torch.bfloat16, or add it afterwards"
        )
    allowed = (dtype,) if dtype in _HALVES else _HALVES
    if bias.dtype not in allowed:
        raise DtypeError(f"bias has dtype {bias.dtype}; a {dtype} output takes {' or '.join(map(str, allowed))}")
