"""One product of a verb, from its tensors to its output, and the gradient of that."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmtsim.autograd import OnceOnly
from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.gemm.products.choice import Choice, accumulate_dtype, definition, draw_keys, unit_takes
from fmtsim.gemm.products.epilogue import output_format
from fmtsim.gemm.products.native import plain_obstacle, run_plain, wanted
from fmtsim.gemm.products.operands import OperandFormat, matrix_layout, operand_format, read_operand
from fmtsim.quantize import quantize
from fmtsim.spec.call import Operation
from fmtsim.spec.cast import RandomKey

_LIBRARY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what torch.mm takes on a GPU
# Streams of the two backward products under one seed: offsets that no batch reaches.
_STREAMS = (1 << 40, 1 << 41)
_ONCE = (
    "fmtsim's products cannot be differentiated twice: the gradient of a rounded gradient is not defined; "
    "compute second derivatives with torch's own products"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Hold what a verb was asked for beside its tensors: the arguments of ``fmtsim.mm`` under their names."""

    operation: Operation
    choice: Choice
    out_dtype: torch.dtype | None = None
    allow_tf32: bool = False
    allow_fp16_accumulation: bool = False
    a_format: Any = None
    b_format: Any = None
    generator: Any = None
    native: bool | None = None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, request: Request) -> Tensor:
    """Return ``a b`` with its gradient: a [..., M, K], b [..., K, N], both of two or of three dimensions."""
    needs = [t for t in (a, b, bias) if t is not None and t.requires_grad]
    if not needs or not torch.is_grad_enabled():
        return forward(a, b, bias, request)
    plain = request.a_format is None and request.b_format is None
    if not plain or a.dtype not in _LIBRARY or b.dtype not in _LIBRARY:
        raise ArgumentError(
            f"{request.operation} has a gradient for float16, bfloat16, float32 and float64 operands only, not for "
            f"{a.dtype} x {b.dtype} with a format; pass .detach(), or use fmtsim.EmulatedGEMM"
        )
    return _Product.apply(a, b, bias, request)  # type: ignore[no-any-return]


def forward(a: Tensor, b: Tensor, bias: Tensor | None, request: Request) -> Tensor:
    """Return ``a b``; arguments as in ``multiply``."""
    columns = b.mT
    formats, tf32 = operand_formats(a, columns, request)
    dtype = output_dtype(a, b, request)
    sums = accumulation(a, dtype, request)
    m, n, k = a.shape[-2], columns.shape[-2], a.shape[-1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)
    layouts = matrix_layout(a, transposed=False), matrix_layout(b, transposed=True)
    batch = a.shape[0] if a.dim() == 3 else 1
    if bias is not None:
        bias = bias.detach()
    given = request.a_format, request.b_format
    if wanted(
        request.native, request.choice, a.device,
        lambda: plain_obstacle((a, b), formats, given, dtype, sums, bias),
    ):  # fmt: skip
        return run_plain(request.operation, a, b, bias, dtype or a.dtype, tf32=bool(tf32), sums=sums)
    asked = dtype or a.dtype
    fields = (request.operation, m, n, k, asked, sums, True, "none", bias is not None, *layouts, batch)
    choice = replace(request.choice, accumulate=sums) if request.allow_fp16_accumulation else request.choice
    text, stochastic, summed, as_asked = definition(fields, choice, *formats)
    tf32 = tf32 if as_asked else ""
    dtype = dtype or accumulate_dtype(summed)
    if summed != "int32":
        output_format(dtype)
    elif dtype != torch.int32:
        raise DtypeError(f"out_dtype={dtype} is not what integers sum to; choose torch.int32")
    key = draw_keys(stochastic, request.generator, batch if a.dim() == 3 else None, a.device)
    values = [read_operand(x, fmt, tf32=tf32) for x, fmt in zip((a, columns), formats, strict=True)]
    held = all(value is not x for value, x in zip(values, (a, columns), strict=True))  # made of codes, or rounded
    return torch.ops.fmtsim.gemm(  # type: ignore[no-any-return]
        *values, text, dtype, None, None, None, None, None, bias, None, key, held
    )


def operand_formats(a: Tensor, columns: Tensor, request: Request) -> tuple[tuple[OperandFormat, OperandFormat], str]:
    """Return the formats of both operands, and how float32 becomes TF32."""
    given = (request.a_format, request.b_format)
    if request.choice.target is not None and given == (None, None):
        if a.dtype != columns.dtype:
            raise DtypeError(
                f"a has dtype {a.dtype}, b {columns.dtype}; torch multiplies equal dtypes, cast one of them"
            )
        if a.dtype not in _LIBRARY and request.operation != "int_mm":
            raise DtypeError(
                f"torch.{request.operation} does not take {a.dtype}; call fmtsim.scaled_mm, or pass unit= for the "
                "arithmetic alone"
            )
    tf32 = ""
    if request.allow_tf32 and a.dtype == columns.dtype == torch.float32 and given == (None, None):
        request, tf32 = replace(request, a_format="tf32", b_format="tf32"), "round"
    formats = request_formats(a, columns, request)
    _hint_tf32(request, *formats)
    return formats, tf32


def request_formats(a: Tensor, columns: Tensor, request: Request) -> tuple[OperandFormat, OperandFormat]:
    """Return the formats that dtypes and arguments name."""
    return operand_format("a", a, request.a_format), operand_format("b", columns, request.b_format)


def _hint_tf32(request: Request, a: OperandFormat, b: OperandFormat) -> None:
    unit = request.choice.unit
    if unit is None or {a.name, b.name} != {"fp32"} or unit_takes(unit, "fp32") or not unit_takes(unit, "tf32"):
        return
    name = getattr(unit, "name", unit)
    raise ArgumentError(
        f"unit {name} multiplies TF32, not float32; pass allow_tf32=True to round the operands, or choose a unit that "
        "takes fp32 ('fp32_fma', 'exact')"
    )


def output_dtype(a: Tensor, b: Tensor, request: Request) -> torch.dtype | None:
    """Return the dtype of the result, None for that of the accumulator."""
    dtype = request.out_dtype
    plain = a.dtype == b.dtype and a.dtype in _LIBRARY
    if dtype is None:
        return a.dtype if plain else None
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"out_dtype={dtype!r} is not a dtype; pass for example torch.float32")
    halves = a.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32
    if request.choice.target is not None and plain and dtype != a.dtype and not halves:
        raise DtypeError(
            f"torch.{request.operation} does not turn {a.dtype} into {dtype}; choose {a.dtype}"
            + (" or torch.float32" if a.dtype in (torch.float16, torch.bfloat16) else "")
            + ", or pass unit= instead of target="
        )
    return dtype


def accumulation(a: Tensor, dtype: torch.dtype | None, request: Request) -> str:
    """Return the format in which a library is asked to sum."""
    if request.choice.accumulate is not None:
        if request.allow_fp16_accumulation and request.choice.accumulate != "fp16":
            raise ArgumentError(
                f"accumulate={request.choice.accumulate!r} contradicts allow_fp16_accumulation=True; pass one of them"
            )
        return request.choice.accumulate
    if request.allow_fp16_accumulation and a.dtype == torch.float16:  # torch's switch concerns float16 alone
        if dtype not in (None, torch.float16):
            raise ArgumentError(
                f"allow_fp16_accumulation with out_dtype={dtype} is not a product that cuBLAS has; "
                "choose torch.float16, or leave one of them out"
            )
        return "fp16"
    return "fp64" if a.dtype == torch.float64 else "fp32"


class _Product(torch.autograd.Function):
    """Multiply, and differentiate with the products that torch would call."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, request: Request) -> Tensor:
        return forward(a, b, bias, request)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, ctx.request = inputs
        ctx.save_for_backward(a, b)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        grads: list[Tensor | None] = [None, None, None]
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                grads[0] = _gradient(g, b, ctx.request, 0, a)
            if ctx.needs_input_grad[1]:
                grads[1] = _gradient(g, a, ctx.request, 1, b)
            if ctx.needs_input_grad[2]:
                grads[2] = _cast(g.sum(0, dtype=_wide(g.dtype)), ctx.bias)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: only then on
            grads = [None if d is None else OnceOnly.apply(d, _ONCE, g, a, b) for d in grads]
        return (*grads, None)


def _gradient(g: Tensor, other: Tensor, request: Request, index: int, like: Tensor) -> Tensor:
    """Return the gradient of one operand: ``g b^T`` or ``a^T g``, in the orientation that torch chooses."""
    operation: Operation = "bmm" if g.dim() == 3 else "mm"
    stream = _stream(request.generator, _STREAMS[index])
    request = replace(request, operation=operation, out_dtype=like.dtype, generator=stream)
    g = _cast(g, other.dtype)
    # torch multiplies the other way round for a column-major operand, so that its gradient is column-major as well.
    flipped = g.dim() == 2 and like.stride(0) == 1 and like.stride(1) == like.shape[0]
    if index == 0:
        return forward(other, g.mT, None, request).mT if flipped else forward(g, other.mT, None, request)
    return forward(g.mT, other, None, request).mT if flipped else forward(other.mT, g, None, request)


def _stream(generator: Any, offset: int) -> Any:
    if isinstance(generator, RandomKey):
        return RandomKey(generator.seed, generator.offset + offset)
    return RandomKey(generator, offset) if isinstance(generator, int) else generator


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to another dtype, to nearest even; never torch's cast."""
    return x if x.dtype == dtype else quantize(x, dtype, overflow="ieee", out_dtype=dtype)
