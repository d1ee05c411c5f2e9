# SPDX-License-Identifier: Apache-2.0
"""Matrix products of plain tensors: the verbs mm, bmm, linear and int_mm, and their gradient."""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_flags, check_saved, check_together
from fmtsim.casts.autograd import OnceOnly
from fmtsim.casts.quantize import quantize
from fmtsim.gemm.products.operands import FLOATS, asked_product, check_matrices, check_tensor, inner_length
from fmtsim.gemm.products.resolver import run_product, target_or_unit
from fmtsim.spec.call import Operation
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, DtypeError, shown

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
    unit: Any
    datapath: Any
    plan: GemmPlan | None
    accumulate: str | None
    allow_tf32: bool
    allow_fp16_accumulation: bool
    strict: bool
    generator: Any
    a_format: Any
    b_format: Any
    native: bool | None


_DEFAULTS: dict[str, Any] = dict.fromkeys(Options.__annotations__) | dict.fromkeys(
    ("allow_tf32", "allow_fp16_accumulation", "strict"), False
)


def mm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    target: Any = None,
    unit: Any = None,
    datapath: Any = None,
    plan: GemmPlan | None = None,
    accumulate: str | None = None,
    allow_tf32: bool = False,
    allow_fp16_accumulation: bool = False,
    strict: bool = False,
    generator: Any = None,
    a_format: Any = None,
    b_format: Any = None,
    native: bool | None = None,
) -> Tensor:
    """Multiply two matrices with the bits of a target's torch.mm, or of a unit.

    Args:
        a: [M, K] of any strides: float16, bfloat16, float32 or float64; with ``unit=`` or ``datapath=`` also torch
            float8 and float4 tensors.
        b: [K, N], likewise.
        out_dtype: dtype of the result. None takes the operands', or the accumulator's where they are narrower. A
            target gives the operands' dtype, or float32 for 16-bit operands, as torch does.
        target: A GPU with its library, by name (``"h200"``), path of a plan file, or record.
        unit: A matrix unit alone, by name (``fmtsim.list_units()``) or record; all of K is one chain.
        datapath: The arithmetic of a unit as a record (``Datapath``, ...). Pass one of the three.
        plan: Accumulation order instead of the target's or the single chain.
        accumulate: ``"fp32"``, ``"fp16"``, ``"fp64"`` or ``"int32"``: which mode of the unit.
        allow_tf32: Round float32 operands to TF32, to nearest even, and multiply those
            (``torch.backends.cuda.matmul.allow_tf32``).
        allow_fp16_accumulation: Sum float16 products in float16 (the switch of that name in
            ``torch.backends.cuda.matmul``); other dtypes do not look at it.
        strict: Raise where the target's accumulation order is a guess, instead of warning.
        generator: Random words of a datapath that rounds stochastically: int seed, torch.Generator, RandomKey, or
            None for torch's default generator.
        a_format: Format of a, where its dtype does not say it: float tensors must hold its values, integer tensors
            hold its codes.
        b_format: Format of b, likewise.
        native: Whether a target runs natively. None lets the GPU do it itself where the operands are on the
            GPU that the target describes (``explain_mm`` says so), True insists on that, False emulates.

    Returns:
        [M, N], contiguous, on the operands' device.

    NaN is 0x7FFFFFFF, or 0x7FFF in 16 bits; Inf and zeros follow docs/matmul.md, which defines every bit. The same
    bits on every device and with every number of threads. The gradients are the products that torch would call, on
    the same target or unit; a gradient is rounded to the operands' dtype before it is multiplied. They cannot be
    differentiated again.

    Raises:
        ArgumentError: Shapes, devices, plan, target or unit that do not fit; a value that its format lacks.
        DtypeError: A dtype that the target's library does not take or give.
        FormatError: An unknown format.
        DeviceError: The GPU's library refuses a native call.
        FmtsimError: A second derivative.

    >>> a, b = torch.eye(2, dtype=torch.bfloat16), torch.tensor([[1.5, 2.0], [0.25, -1.0]], dtype=torch.bfloat16)
    >>> mm(a, b, unit="hopper.wgmma", out_dtype=torch.float32)
    tensor([[ 1.5000,  2.0000],
            [ 0.2500, -1.0000]])
    """
    given: Options = {
        "out_dtype": out_dtype, "target": target, "unit": unit, "datapath": datapath, "plan": plan,
        "accumulate": accumulate, "allow_tf32": allow_tf32, "allow_fp16_accumulation": allow_fp16_accumulation,
        "strict": strict, "generator": generator, "a_format": a_format, "b_format": b_format, "native": native,
    }  # fmt: skip
    options = checked_options("mm", given)
    check_matrices("mm", a, b, "2")
    return _multiply("mm", a, b, None, options)


def bmm(a: Tensor, b: Tensor, **options: Unpack[Options]) -> Tensor:
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
    >>> y = fmtsim.bmm(a, b, unit="hopper.wgmma", out_dtype=torch.float32)
    >>> y.shape, y[0, 0, 0].item()
    (torch.Size([2, 3, 5]), 4.0)
    """
    given = checked_options("bmm", options)
    check_matrices("bmm", a, b, "3")
    if a.shape[0] != b.shape[0]:
        raise ArgumentError(f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} differ in their batch")
    return _multiply("bmm", a, b, None, given)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Compute ``x w^T + bias`` with the bits of a target's torch.nn.functional.linear; options are those of ``mm``.

    Args:
        x: [..., K]; the leading dimensions together are the rows of one product.
        w: [N, K] of x's dtype.
        bias: [N] of x's dtype, added in float32 before the one rounding to the output (an H200 rounds twice where N is
            1 and K is not split); or None.
        options: The keywords of ``mm``; ``a_format`` is x's, ``b_format`` is w's.

    Returns:
        [..., N] in x's dtype, or ``out_dtype``.

    Raises:
        ArgumentError, DtypeError, FormatError: As ``mm``.

    >>> import torch, fmtsim
    >>> x, w = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(5, 4, dtype=torch.bfloat16)
    >>> fmtsim.linear(x, w, torch.ones(5, dtype=torch.bfloat16), target="h200")[0]
    tensor([5., 5., 5., 5., 5.], dtype=torch.bfloat16)
    """
    given = checked_options("linear", options)
    check_tensor("x", x, "1+")
    check_tensor("w", w, "2")
    if bias is not None:
        check_tensor("bias", bias, "1")
    check_together(x=x, w=w, bias=bias)
    if inner_length(x) != inner_length(w):  # float4 has two numbers in an element
        raise ArgumentError(
            f"x of shape {tuple(x.shape)} does not fit w of shape {tuple(w.shape)}; x is [..., K], w is [N, K]"
        )
    if bias is not None:
        _check_bias(bias, x, w, given["target"] is not None)
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(x.shape[:-1].numel(), 0)
    return _multiply("linear", rows, w.mT, bias, given).reshape(*x.shape[:-1], w.shape[0])


def int_mm(
    a: Tensor, b: Tensor, *, target: Any = None, unit: Any = None, datapath: Any = None, native: bool | None = None
) -> Tensor:
    """Multiply two int8 matrices as torch._int_mm does.

    Args:
        a: [M, K], int8.
        b: [K, N], int8.
        target: A target, whose limits on shapes then hold too.
        unit: A unit with an int8 mode. Without any of the three the unit is ``"int8"``, whose sums wrap.
        datapath: An IntegerDatapath.
        native: As in ``mm``.

    Returns:
        [M, N], int32. Sums that leave int32 wrap in unit ``"int8"`` and are clamped in ``"int8.satfinite"``, which is
        what cuBLASLt runs on an H200 (``target="h200"``). It has no gradient.

    Raises:
        ArgumentError: Shapes that do not fit each other or the target.
        DtypeError: An operand is not int8.

    >>> int_mm(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8))
    tensor([[-5]], dtype=torch.int32)
    """
    alone = target is None and unit is None and datapath is None
    given: Options = {"target": target, "unit": "int8" if alone else unit, "datapath": datapath, "native": native}
    options = checked_options("int_mm", {**given, "accumulate": "int32", "out_dtype": torch.int32})
    check_matrices("int_mm", a, b, "2")
    for name, x in (("a", a), ("b", b)):
        if x.dtype != torch.int8:
            raise DtypeError(f"int_mm: {name} has dtype {x.dtype}; pass torch.int8, or call mm for floats")
    return _product("int_mm", a, b, None, options)


def checked_options(verb: str, given: Options) -> dict[str, Any]:
    """Return all keywords of mm with their defaults; ``"unit"`` is the unit or the datapath.

    Raises:
        ArgumentError: An argument that mm does not have, or not one of target, unit and datapath.
    """
    unknown = [name for name in given if name not in _DEFAULTS]
    if unknown:
        raise ArgumentError(f"{verb} has no argument {shown(unknown[0])}; it takes {', '.join(_DEFAULTS)}")
    options = {**_DEFAULTS, **given}
    machine = (options[name] for name in ("target", "unit", "datapath", "plan", "accumulate"))
    options["unit"] = target_or_unit(verb, *machine)
    check_flags(**{name: options[name] for name in ("allow_tf32", "allow_fp16_accumulation", "strict", "native")})
    del options["datapath"]
    return options


def _check_bias(bias: Tensor, x: Tensor, w: Tensor, library: bool) -> None:
    if bias.shape != w.shape[:1]:
        raise ArgumentError(
            f"bias of shape {tuple(bias.shape)} does not fit w of shape {tuple(w.shape)}; pass [{w.shape[0]}]"
        )
    if bias.dtype not in FLOATS or (library and bias.dtype != x.dtype):
        allowed = x.dtype if library else "float16, bfloat16, float32 or float64"
        raise DtypeError(f"bias has dtype {bias.dtype}; pass {allowed}")


def _multiply(operation: Operation, a: Tensor, b: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return ``a b`` with its gradient: a [..., M, K], b [..., K, N], both of two or of three dimensions."""
    needs = a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    if not needs or not torch.is_grad_enabled():
        return _product(operation, a, b, bias, options)
    plain = options["a_format"] is None and options["b_format"] is None
    if not plain or a.dtype not in FLOATS or b.dtype not in FLOATS:
        raise ArgumentError(
            f"{operation} has a gradient for float16, bfloat16, float32 and float64 operands only, not for "
            f"{a.dtype} x {b.dtype} with a format; pass .detach(), or use fmtsim.EmulatedGEMM"
        )
    check_saved(operation, a, b)
    return _Product.apply(a, b, bias, operation, options)  # type: ignore[no-any-return]


def _product(operation: Operation, a: Tensor, b: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return ``a b``; arguments as in ``_multiply``."""
    columns = b.mT
    formats, tf32, dtype, accumulate = asked_product(operation, a, columns, options)
    return run_product(
        operation, a, columns, formats, dtype, bias=None if bias is None else bias.detach(), target=options["target"],
        unit=options["unit"], plan=options["plan"], accumulate=accumulate, native=options["native"],
        strict=options["strict"], generator=options["generator"], tf32=tf32,
    )  # fmt: skip


class _Product(torch.autograd.Function):
    """Multiply, and differentiate with the products that torch would call."""

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, operation: Operation, options: dict[str, Any]
    ) -> Tensor:  # fmt: skip
        return _product(operation, a, b, bias, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, _, ctx.options = inputs
        ctx.save_for_backward(a, b)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        grads: list[Tensor | None] = [None, None, None]
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                grads[0] = _gradient(g, b, ctx.options, 0, a)
            if ctx.needs_input_grad[1]:
                grads[1] = _gradient(g, a, ctx.options, 1, b)
            if ctx.needs_input_grad[2]:
                grads[2] = _cast(g.sum(0, dtype=_wide(g.dtype)), ctx.bias)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: only then on
            grads = [None if d is None else OnceOnly.apply(d, _ONCE, g, a, b) for d in grads]
        return (*grads, None, None)


def _gradient(g: Tensor, other: Tensor, options: dict[str, Any], index: int, like: Tensor) -> Tensor:
    """Return the gradient of one operand: ``g b^T`` or ``a^T g``, in the orientation that torch chooses."""
    operation: Operation = "bmm" if g.dim() == 3 else "mm"
    generator = _at_offset(options["generator"], _OFFSETS[index])
    options = {**options, "out_dtype": like.dtype, "generator": generator}
    g = _cast(g, other.dtype)
    # torch multiplies the other way round for a column-major operand, so that its gradient is column-major as well.
    flipped = g.dim() == 2 and like.stride(0) == 1 and like.stride(1) == like.shape[0]
    left, right = (g, other.mT) if index == 0 else (other.mT, g)
    if flipped:
        return _product(operation, right.mT, left.mT, None, options).mT
    return _product(operation, left, right, None, options)


def _at_offset(generator: Any, offset: int) -> Any:
    if isinstance(generator, RandomKey):
        return RandomKey(generator.seed, generator.offset + offset)
    return RandomKey(generator, offset) if isinstance(generator, int) else generator


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to another dtype, to nearest even; never torch's cast."""
    return x if x.dtype == dtype else quantize(x, dtype, overflow="ieee", out_dtype=dtype)
