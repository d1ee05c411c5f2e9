# SPDX-License-Identifier: Apache-2.0
"""Why a product has the bits it has: the unit, the accumulation order, and what stands behind both."""

from dataclasses import replace
from typing import Any, Never, overload

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_together, refuse_others, spelled
from fmtsim.gemm.products.explanation import MmExplanation, explained, runs
from fmtsim.gemm.products.matmul import Options, check_call, checked_options
from fmtsim.gemm.products.operands import check_tensor, inner_length, matrix_layout
from fmtsim.gemm.products.resolver import gemm_call, recorded_calls, resolve
from fmtsim.gemm.products.scaled_mm import read_scaled
from fmtsim.nn.explain_layer import Inputs, LayerExplanation, explain_layer
from fmtsim.spec.call import Operation
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError


@overload
def explain_mm(a: nn.Module, b: Inputs) -> LayerExplanation: ...
@overload
def explain_mm(a: Tensor, b: Tensor, *, out_dtype: Any = ..., target: Any = ...,
               plan: Any = ..., accumulate: Any = ..., allow: Any = ...,
               use_fast_accum: bool = ..., formats: Any = ..., native: bool | None = ...,
               scale_a: Any = ..., scale_b: Any = ..., bias: Tensor | None = ...,
               scale_recipes: Any = ..., swizzles: Any = ...,
) -> MmExplanation: ...  # fmt: skip
@spelled
def explain_mm(
    a: Any,
    b: Any,
    *more: Never,
    out_dtype: torch.dtype | None = None,
    target: Any = None,
    plan: GemmPlan | None = None,
    accumulate: str | None = None,
    allow: str | tuple[str, ...] | None = None,
    use_fast_accum: bool = False,
    formats: Any = None,
    native: bool | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    bias: Tensor | None = None,
    scale_recipes: Any = None,
    swizzles: Any = None,
    **others: Never,
) -> MmExplanation | LayerExplanation:
    """Explain what ``mm`` would compute, or the three products of a converted layer; nothing is multiplied.

    Args:
        a: [M, K], or [B, M, K] for ``bmm``. On a target, FP8 operands stand for ``scaled_mm`` with a scale for each
            tensor unless scales are passed, and int8 operands for ``int_mm``. Or a layer that ``convert`` changed.
        b: [K, N], or [B, K, N]. For a layer its input (or a list of its inputs), of which shape, strides and dtype
            count, on any device; or the number of rows of its products: tokens, positions of a convolution. The result
            then has ``fprop``, ``dgrad`` and ``wgrad``, by part (``["out_proj"]``) where a layer has several weights,
            as if every tensor required a gradient. The layer names its machine: no keyword goes with it.
        use_fast_accum, scale_a, scale_b, bias, scale_recipes, swizzles: As in ``scaled_mm``; the product with these
            scales is explained.
        out_dtype, target, plan, accumulate, allow, formats, native: As in
            ``mm``. Where the operands are on a GPU, or native is given, a row ``runs`` says whether the GPU multiplies
            or is emulated, and why.

    Raises:
        ArgumentError, DtypeError, FormatError: As the verb.

    >>> a = torch.zeros(64, 4096, dtype=torch.bfloat16)
    >>> print(explain_mm(a, a.mT, target="hopper.wgmma"))
    call       mm: [64, 4096] bf16 x [4096, 64] bf16 -> bfloat16
    unit       hopper.wgmma: blocks of 16, F=25, E>=-133, toward_zero to fp32
    evidence   equal to recorded hardware bits: H200: torch.mm; probes on H200 give the lower bound of E
    order      one chain from +0, k in order
    epilogue   rounded to bfloat16, to nearest even
    source     one chain, k in order: a unit alone names no library
    >>> import fmtsim
    >>> layer = fmtsim.convert(nn.Linear(4096, 64).bfloat16(), format="e4m3", target="h200")
    >>> explain_mm(layer, 512).wgrad.order
    'a fresh chain every 128 products, each added to an outer sum rounded to nearest'
    """
    refuse_others(explain_mm, more, others)
    scaled = {
        "scale_a": scale_a, "scale_b": scale_b, "bias": bias, "scale_recipes": scale_recipes, "swizzles": swizzles
    }  # fmt: skip
    arguments: Options = {
        "out_dtype": out_dtype, "target": target, "plan": plan, "accumulate": accumulate, "allow": allow,
        "formats": formats, "native": native,
    }  # fmt: skip
    if isinstance(a, nn.Module):
        named = [name for name, value in (arguments | {"use_fast_accum": use_fast_accum}).items() if value]
        named += [name for name, value in scaled.items() if value is not None]
        if named or native is not None:
            raise ArgumentError(
                f"explain_mm of a layer takes no {named[0] if named else 'native'}=: convert gave the layer its machine"
            )
        return explain_layer(a, b)
    check_tensor("a", a, "2+")
    check_tensor("b", b, "2+")
    check_together(a=a, b=b)
    if a.dim() != b.dim() or a.dim() > 3:
        raise ArgumentError(f"a has {a.dim()} dimensions, b {b.dim()}; pass two matrices, or two stacks of them")
    options = checked_options("explain_mm", {**arguments, "strict": False})
    if any(value is not None for value in scaled.values()):
        if scale_a is None or scale_b is None:
            raise ArgumentError(
                "bias, scale_recipes and swizzles of explain_mm are those of scaled_mm; pass both scales"
            )
        # The call of a scaled_mm; a unit's scales are not looked at beyond their kind.
        names = {"out_dtype": options["out_dtype"], "library": options["library"], "formats": options["formats"]}
        operand_formats, dtype, scaling, _ = read_scaled(a, b, **scaled, **names)
        call, to_tf32 = gemm_call(
            "scaled_mm", operand_formats, (0, 0, 0), dtype, target=options["target"], plan=options["plan"],
            accumulate=options["accumulate"] or ("fp32" if options["library"] else None), fast_accum=use_fast_accum,
            scaling=scaling, layouts=(matrix_layout(a), matrix_layout(b, transposed=True)), bias=bias is not None,
        ), False  # fmt: skip
    else:
        # The call of a product without scales; FP8 operands on a target have one each.
        operation: Operation = "bmm" if a.dim() == 3 else "mm"
        if a.dtype == b.dtype == torch.int8:
            operation = "int_mm"
            options |= {"out_dtype": torch.int32, "accumulate": "int32"}
        elif options["library"] and all(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in (a, b)):
            operation = "scaled_mm"
        scaling = "tensor" if operation == "scaled_mm" else "none"
        call, _, to_tf32 = check_call(operation, a, b.mT, None, options, fast_accum=use_fast_accum, scaling=scaling)
    batch = a.shape[0] if a.dim() == 3 else 1
    call = replace(call, m=a.shape[-2], n=b.shape[-1], k=inner_length(a), batch=batch)
    with recorded_calls():  # a guess is said in words here
        spec = resolve(call)
    shown = explained(call, spec, to_tf32)
    if not options["library"] or (native is None and a.device.type != "cuda"):
        return shown
    how = runs(call, (a.dtype, b.dtype), a.device, native, converted=to_tf32)
    return replace(shown, rows=(*shown.rows, ("runs", how)))
