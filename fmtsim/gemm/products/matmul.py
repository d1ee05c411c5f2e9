# SPDX-License-Identifier: Apache-2.0
"""Matrix products of plain tensors: the verbs mm, bmm, linear and int_mm, and their gradient."""

from __future__ import annotations  # help shows the names of types

from typing import Any, Never, TypedDict, Unpack

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_flags, check_saved, refuse_others, spelled
from fmtsim.casts.lanes import once_only
from fmtsim.casts.quantize import quantize
from fmtsim.gemm.products.native import check_library
from fmtsim.gemm.products.operands import (
    FLOATS,
    accumulation,
    as_pair,
    check_allowed,
    check_operands,
    inner_length,
    matrix_layout,
    operand_formats,
    output_dtype,
)
from fmtsim.gemm.products.resolver import accumulate_name, check_target, integer_sums, product_call, run_product
from fmtsim.gemm.units import unit as units
from fmtsim.spec.call import GemmCall, Operands, Operation
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.dispatch import is_bare
from fmtsim.support.errors import ArgumentError

# Offsets of the two backward products under one seed, which no batch reaches.
_OFFSETS = (1 << 40, 1 << 41)
_ONCE = (
    "fmtsim's products cannot be differentiated twice: the gradient of a rounded gradient is not defined; "
    "compute second derivatives with torch's own products"
)


class Options(TypedDict, total=False):
    """The keywords of ``mm``, which documents them."""

    out_dtype: torch.dtype | None
    target: Any
    plan: GemmPlan | None
    accumulate: str | None
    allow: str | tuple[str, ...] | None
    strict: bool
    generator: Any
    formats: Any
    native: bool | None


_DEFAULTS: dict[str, Any] = dict.fromkeys(Options.__annotations__) | {"strict": False}


@spelled
def mm(
    a: Tensor,
    b: Tensor,
    *more: Never,
    out_dtype: torch.dtype | None = None,
    target: Any = None,
    plan: GemmPlan | None = None,
    accumulate: str | None = None,
    allow: str | tuple[str, ...] | None = None,
    strict: bool = False,
    generator: Any = None,
    formats: Any = None,
    native: bool | None = None,
    **others: Never,
) -> Tensor:
    """Multiply two matrices with the bits of a target's torch.mm, or of a unit.

    Args:
        a: [M, K] of any strides: float16, bfloat16, float32 or float64; on a unit or datapath also torch float8
            and float4 tensors.
        b: [K, N], likewise.
        out_dtype: dtype of the result. None takes the operands', or the accumulator's where they are narrower. A GPU
            with its library gives the operands' dtype, or float32 for 16-bit operands, as torch does.
            A wider one holds the accumulator's values: float64 from a float32 accumulator is rounded to float32 before.
        target: What computes: a GPU with its library (``"h200"``, the path of a plan file, a ``Target``); a matrix unit
            alone (``"hopper.wgmma"``, one of ``fmtsim.list_units()``, a ``Unit``), where all of K is one chain; or a
            datapath (a ``Datapath`` record or its JSON).
        plan: Accumulation order instead of the target's or the single chain.
        accumulate: ``"fp32"``, ``"fp16"``, ``"fp64"`` or ``"int32"``: which mode of the unit.
        allow: Switches of ``torch.backends.cuda.matmul``, one or a tuple: ``"tf32"`` (``allow_tf32``) rounds float32
            operands to TF32, to nearest even, and multiplies those; ``"fp16_accumulation"``
            (``allow_fp16_accumulation``) sums float16 products in float16. Other dtypes ignore them.
        strict: Raise where the target's accumulation order is a guess, instead of warning.
        generator: Random words of a datapath that rounds stochastically: int seed, torch.Generator, RandomKey, or
            None for torch's default generator.
        formats: Format of both operands, or a pair ``(a's, b's)``, where dtypes do not say it (None: they do): float
            tensors must hold its values, integer tensors hold its codes.
        native: Whether a target runs natively. None lets the GPU do it itself where the operands are on the
            GPU that the target describes (``explain_mm`` says so), True insists on that, False emulates.

    Returns:
        [M, N], contiguous, on the operands' device.

    NaN is 0x7FFFFFFF, or 0x7FFF in 16 bits; Inf and zeros follow docs/matmul.md, which defines every bit. The same
    bits on every device and with every number of threads. The gradients are the products that torch would call, on
    the same target; a gradient is rounded to the operands' dtype before it is multiplied. They cannot be
    differentiated again.

    Raises:
        ArgumentError: Shapes, devices, plan or target that do not fit; a value that its format lacks.
        DtypeError: A dtype that the target's library does not take or give.
        FormatError: An unknown format.
        DeviceError: The GPU's library refuses a native call.
        FmtsimError: A second derivative.

    >>> a, b = torch.eye(2, dtype=torch.bfloat16), torch.tensor([[1.5, 2.0], [0.25, -1.0]], dtype=torch.bfloat16)
    >>> mm(a, b, target="hopper.wgmma", out_dtype=torch.float32)
    tensor([[ 1.5000,  2.0000],
            [ 0.2500, -1.0000]])
    """
    refuse_others(mm, more, others)
    options = {
        "out_dtype": out_dtype, "target": target, "plan": plan, "accumulate": accumulate, "allow": allow,
        "strict": strict, "formats": formats, "native": native,
    }  # fmt: skip
    return _multiply("mm", a, b, None, options, generator)


def bmm(a: Tensor, b: Tensor, *more: Never, **options: Unpack[Options]) -> Tensor:
    """Multiply two stacks of matrices; options are those of ``mm``.

    Args:
        a: [B, M, K].
        b: [B, K, N].
        options: The keywords of ``mm``.

    Returns:
        [B, M, N]: each matrix has the bits of its ``mm`` (a target may order the sums of a batch in its own way).
        With a seed, product i draws as ``mm(generator=RandomKey(seed, i))``.

    Raises:
        ArgumentError, DtypeError, FormatError: As ``mm``.

    >>> import torch, fmtsim
    >>> a, b = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(2, 4, 5, dtype=torch.bfloat16)
    >>> y = fmtsim.bmm(a, b, target="hopper.wgmma", out_dtype=torch.float32)
    >>> y.shape, y[0, 0, 0].item()
    (torch.Size([2, 3, 5]), 4.0)
    """
    return _multiply("bmm", a, b, None, *_options(bmm, options, more))


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *more: Never, **options: Unpack[Options]) -> Tensor:
    """Compute ``x w^T + bias`` with the bits of a target's torch.nn.functional.linear; options are those of ``mm``.

    Args:
        x: [..., K]; the leading dimensions together are the rows of one product.
        w: [N, K] of x's dtype.
        bias: [N] of x's dtype, added in float32 before the one rounding to the output (an H200 rounds twice where N is
            1 and K is not split); or None.
        options: The keywords of ``mm``; a pair of ``formats`` is x's and w's.

    Returns:
        [..., N] in x's dtype, or ``out_dtype``.

    Raises:
        ArgumentError, DtypeError, FormatError: As ``mm``.

    >>> import torch, fmtsim
    >>> x, w = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(5, 4, dtype=torch.bfloat16)
    >>> fmtsim.linear(x, w, torch.ones(5, dtype=torch.bfloat16), target="h200")[0]
    tensor([5., 5., 5., 5., 5.], dtype=torch.bfloat16)
    """
    return _multiply("linear", x, w, bias, *_options(linear, options, more))


@spelled
def int_mm(
    a: Tensor, b: Tensor, *more: Never, target: Any = "int8", native: bool | None = None, **others: Never
) -> Tensor:
    """Multiply two int8 matrices as torch._int_mm does.

    Args:
        a: [M, K], int8.
        b: [K, N], int8.
        target: A unit with an int8 mode (``"int8"`` has sums that wrap), an IntegerDatapath of any width, or a GPU with
            its library, whose limits on shapes then hold too.
        native: As in ``mm``.

    Returns:
        [M, N], int32, or int64 for an accumulator of more bits. Sums that leave int32 wrap in unit ``"int8"`` and are
        clamped in ``"int8.satfinite"``, which is what cuBLASLt runs on an H200 (``target="h200"``). It has no gradient.

    Raises:
        ArgumentError: Shapes that do not fit each other or the target.
        DtypeError: An operand is not int8.

    >>> int_mm(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8))
    tensor([[-5]], dtype=torch.int32)
    """
    refuse_others(int_mm, more, others)
    dtype = integer_sums(target)
    options: Options = {"target": target, "accumulate": accumulate_name(dtype), "out_dtype": dtype, "native": native}
    return _multiply("int_mm", a, b, None, *_options(int_mm, options))


for _verb in (bmm, linear):
    spelled(_verb, mm)

Checked = tuple[GemmCall, torch.dtype | None, bool]
"""What the checks of a verb return: the call, the dtype of the result (None: of the accumulator), and whether float32
operands are rounded to TF32."""
_checked: dict[Any, Checked] = {}  # by dtypes, shapes, strides and devices of the tensors, and the keywords
_MOST = 4096


def _options(verb: Any, keywords: Any, more: tuple[Any, ...] = ()) -> tuple[dict[str, Any], Any]:
    """Return all keywords of mm but the generator, with their defaults, and the generator."""
    # TypedDict keywords are not checked by Python
    refuse_others(verb, more, {name: value for name, value in keywords.items() if name not in _DEFAULTS})
    options = {**_DEFAULTS, **keywords}
    return options, options.pop("generator")


def checked_options(verb: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of mm but the generator; ``"library"`` is True for a target that is a GPU with its library.

    Raises:
        ArgumentError: No target, or a keyword that is not what it has to be.
    """
    target = check_target(verb, *(options[name] for name in ("target", "plan", "accumulate")))
    options = {**options, "target": target, "library": not units.is_unit(target)}
    check_allowed(options["allow"])
    check_flags(**{name: options[name] for name in ("strict", "native")})
    return options


def check_call(
    verb: Operation, a: Tensor, columns: Tensor, bias: Tensor | None, options: dict[str, Any], **facts: Any
) -> Checked:  # fmt: skip
    """Check the formats and dtypes of a product ``a b^T`` against its target, and make its GemmCall.

    Args:
        verb: The torch function whose bits the product has.
        a: [..., M, K].
        columns: b as [..., N, K].
        bias: [N], or None.
        options: The result of ``checked_options``.
        facts: Further fields of the GemmCall.

    Raises:
        ArgumentError, DtypeError, FormatError: As ``mm``.
    """
    # the formats decide the result's dtype, and both decide the format of the sums
    formats, to_tf32 = operand_formats(verb, a, columns, options)
    dtype = output_dtype(verb, a, columns, options)
    if options["library"] or options["plan"] is not None:
        facts["layouts"] = matrix_layout(a), matrix_layout(columns.mT, transposed=True)
    call = product_call(
        verb, formats, Operands(a, columns, bias), dtype, native=options["native"], to_tf32=to_tf32,
        target=options["target"], plan=options["plan"], strict=options["strict"], bias=bias is not None,
        accumulate=accumulation(a, dtype, options), **facts,
    )  # fmt: skip
    return call, dtype, to_tf32


def _multiply(
    verb: Operation, a: Tensor, b: Tensor, bias: Tensor | None, options: dict[str, Any], generator: Any = None
) -> Tensor:  # fmt: skip
    """Return the differentiable product of a verb, whose tensors a and b are: for linear x [..., K] and w [N, K]."""
    # 1. a call of the same dtypes, shapes, strides and keywords was checked before
    key = checked = None
    bare = not torch.compiler.is_compiling() and (is_bare(a, b) if bias is None else is_bare(a, b, bias))
    if bare:
        added = None if bias is None else (bias.dtype, bias.shape, bias.device)
        key = (verb, a.dtype, a.shape, a.stride(), a.device, b.dtype, b.shape, b.stride(), b.device, added,
               units.registrations, *options.values(), *map(type, options.values()))  # fmt: skip  # 0 is not False
        try:
            checked = _checked.get(key)
        except TypeError:  # a keyword that cannot be hashed, which the checks will name
            key = None
    # 2. check the operands as the caller passed them, then as matrices
    if checked is None:
        how = checked_options(verb, options)
        check_operands(verb, a, b, bias, how["library"])
    if verb == "linear":
        shape, b = (*a.shape[:-1], b.shape[0]), b.mT
        a = a if a.dim() == 2 else a.reshape(-1, a.shape[-1]) if a.shape[-1] else a.new_empty(a.shape[:-1].numel(), 0)
    if checked is None:
        checked = check_call(verb, a, b.mT, bias, how)
        if how["library"]:
            check_library(checked[0], (a.shape[-2], b.shape[-1], inner_length(a)), checked[1])
        # A name is not cached: register_format may give it another format later.
        if key is not None and not any(isinstance(fmt, str) for fmt in as_pair("formats", options["formats"])):
            if len(_checked) >= _MOST:
                _checked.clear()
            _checked[key] = checked
    # 3. multiply
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        plain = all(fmt is None for fmt in as_pair("formats", options["formats"]))
        if not plain or a.dtype not in FLOATS or b.dtype not in FLOATS:
            raise ArgumentError(
                f"{verb} has a gradient for float16, bfloat16, float32 and float64 operands only, not for "
                f"{a.dtype} x {b.dtype} with a format; pass .detach(), or use fmtsim.EmulatedGEMM"
            )
        check_saved(verb, a, b)
        y = _Product.apply(a, b, bias, checked, options, generator)
    else:
        call, dtype, to_tf32 = checked
        y = run_product(
            call, Operands(a, b.mT, None if bias is None else bias.detach()), dtype, native=options["native"],
            generator=generator, to_tf32=to_tf32, bare=bare,
        )  # fmt: skip
    return y.reshape(shape) if verb == "linear" and len(shape) != 2 else y


class _Product(torch.autograd.Function):
    """Multiply, and differentiate with the products that torch would call."""

    # A Function of its own: a gradient is a call of the verb, planned anew from the options and the generator, and the
    # operator takes neither.
    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, checked: Checked, options: dict[str, Any], generator: Any
    ) -> Tensor:
        call, dtype, to_tf32 = checked
        operands = Operands(a, b.mT, None if bias is None else bias.detach())
        return run_product(call, operands, dtype, native=options["native"], generator=generator, to_tf32=to_tf32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, _, ctx.options, ctx.generator = inputs
        ctx.save_for_backward(a, b)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        # da = g b^T and db = a^T g on the same target; the bias has the sum of g over rows
        grads: list[Tensor | None] = [None, None, None]
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                grads[0] = _gradient(g, b, ctx, 0, a)
            if ctx.needs_input_grad[1]:
                grads[1] = _gradient(g, a, ctx, 1, b)
            if ctx.needs_input_grad[2]:
                grads[2] = _cast(g.sum(0, dtype=torch.promote_types(g.dtype, torch.float32)), ctx.bias)
        return (*once_only(_ONCE, grads, g, a, b), None, None, None)


def _gradient(g: Tensor, other: Tensor, ctx: Any, index: int, like: Tensor) -> Tensor:
    """Return the gradient of one operand: ``g b^T`` or ``a^T g``, in the orientation that torch chooses."""
    verb: Operation = "bmm" if g.dim() == 3 else "mm"
    # the gradient draws words that neither the product nor the other gradient draws
    generator, options = _at_offset(ctx.generator, _OFFSETS[index]), {**ctx.options, "out_dtype": like.dtype}
    g = _cast(g, other.dtype)
    # torch multiplies the other way round for a column-major operand, so that its gradient is column-major as well.
    flipped = g.dim() == 2 and like.stride(0) == 1 and like.stride(1) == like.shape[0]
    lhs, rhs = (g, other.mT) if index == 0 else (other.mT, g)
    if flipped:
        return _multiply(verb, rhs.mT, lhs.mT, None, options, generator).mT
    return _multiply(verb, lhs, rhs, None, options, generator)


def _at_offset(generator: Any, offset: int) -> Any:
    if isinstance(generator, RandomKey):
        return RandomKey(generator.seed, generator.offset + offset)
    return RandomKey(generator, offset) if isinstance(generator, int) else generator


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to another dtype, to nearest even; never torch's cast."""
    return x if x.dtype == dtype else quantize(x, dtype, overflow="ieee", out_dtype=dtype)
