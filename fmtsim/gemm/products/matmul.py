"""The verbs of plain matrix products: mm, bmm, linear and int_mm."""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.gemm.products.choice import choose
from fmtsim.gemm.products.operands import check_devices, check_tensor
from fmtsim.gemm.products.product import Request, forward, multiply
from fmtsim.spec.call import Operation
from fmtsim.spec.plan import GemmPlan


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


_NAMES = tuple(Options.__annotations__)


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
    """Multiply two matrices with the bits of a machine's torch.mm, or of a unit.

    Args:
        a: [M, K] of any strides: float16, bfloat16, float32 or float64; with ``unit=`` or ``datapath=`` also torch
            float8 and float4 tensors.
        b: [K, N], likewise.
        out_dtype: dtype of the result. None takes the operands', or the accumulator's where they are narrower. A
            target gives the operands' dtype, or float32 for 16-bit operands, as torch does.
        target: A machine with its library, by name (``"h200"``), path of a plan file, or record.
        unit: A matrix unit alone, by name (``fmtsim.list_units()``) or record; all of K is one chain.
        datapath: The arithmetic of a unit as a record (``Datapath``, ...). Pass one of the three.
        plan: Order of sums instead of the target's or the single chain.
        accumulate: ``"fp32"``, ``"fp16"``, ``"fp64"`` or ``"int32"``: which mode of the unit.
        allow_tf32: Round float32 operands to TF32, to nearest even, and multiply those
            (``torch.backends.cuda.matmul.allow_tf32``).
        allow_fp16_accumulation: Sum float16 products in float16 (the switch of that name in
            ``torch.backends.cuda.matmul``); other dtypes do not look at it.
        strict: Raise where the target's order of sums is a guess, instead of warning.
        generator: Random words of a datapath that rounds stochastically: int seed, torch.Generator, RandomKey, or
            None for torch's default generator.
        a_format: Format of a, where its dtype does not say it: float tensors must hold its values, integer tensors
            hold its codes.
        b_format: Format of b, likewise.
        native: Who multiplies where a target is given. None lets the card do it itself where the operands are on the
            card that the target describes (``explain_mm`` says so), True insists on that, False emulates.

    Returns:
        [M, N], contiguous, on the operands' device.

    NaN is 0x7FFFFFFF, or 0x7FFF in 16 bits; Inf and zeros follow docs/matmul.md, which defines every bit. The same
    bits on every device and with every number of threads. The gradients are the products that torch would call, on
    the same machine; a gradient is rounded to the operands' dtype before it is multiplied. They cannot be
    differentiated again.

    Raises:
        ArgumentError: Shapes, devices, plan or machine that do not fit; a value that its format lacks.
        DtypeError: A dtype that the machine's library does not take or give.
        FormatError: An unknown format.
        DeviceError: The card's library refuses a native call.
        FmtsimError: A second derivative.

    >>> a, b = torch.eye(2, dtype=torch.bfloat16), torch.tensor([[1.5, 2.0], [0.25, -1.0]], dtype=torch.bfloat16)
    >>> mm(a, b, unit="hopper.wgmma", out_dtype=torch.float32)
    tensor([[ 1.5000,  2.0000],
            [ 0.2500, -1.0000]])
    """
    check_tensor("a", a, "2")
    check_tensor("b", b, "2")
    check_devices(a=a, b=b)
    _check_inner("mm", a, b)
    options: Options = {
        "out_dtype": out_dtype, "target": target, "unit": unit, "datapath": datapath, "plan": plan,
        "accumulate": accumulate, "allow_tf32": allow_tf32, "allow_fp16_accumulation": allow_fp16_accumulation,
        "strict": strict, "generator": generator, "a_format": a_format, "b_format": b_format, "native": native,
    }  # fmt: skip
    return multiply(a, b, None, _request("mm", options))


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
    """
    check_tensor("a", a, "3")
    check_tensor("b", b, "3")
    check_devices(a=a, b=b)
    _check_inner("bmm", a, b)
    if a.shape[0] != b.shape[0]:
        raise ArgumentError(f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} differ in their batch")
    return multiply(a, b, None, _request("bmm", options))


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Compute ``x w^T + bias`` with the bits of a machine's torch.nn.functional.linear; options are those of ``mm``.

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
    """
    check_tensor("x", x, "1+")
    check_tensor("w", w, "2")
    if bias is not None:
        check_tensor("bias", bias, "1")
    check_devices(x=x, w=w, bias=bias)
    if x.shape[-1] != w.shape[1]:
        raise ArgumentError(
            f"x of shape {tuple(x.shape)} does not fit w of shape {tuple(w.shape)}; x is [..., K], w is [N, K]"
        )
    request = _request("linear", options)
    if bias is not None:
        _check_bias(bias, x, w, request)
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(x.shape[:-1].numel(), 0)
    return multiply(rows, w.mT, bias, request).reshape(*x.shape[:-1], w.shape[0])


def int_mm(
    a: Tensor, b: Tensor, *, target: Any = None, unit: Any = None, datapath: Any = None, native: bool | None = None
) -> Tensor:
    """Multiply two int8 matrices as torch._int_mm does.

    Args:
        a: [M, K], int8.
        b: [K, N], int8.
        target: A machine, whose limits on shapes then hold too.
        unit: A unit with an int8 mode. Without any of the three the unit is ``"int8"``, whose sums wrap.
        datapath: An IntegerDatapath.
        native: As in ``mm``.

    Returns:
        [M, N], int32. Sums that leave int32 wrap in unit ``"int8"`` and are clamped in ``"int8.satfinite"``, which is
        what cuBLASLt runs on an H200 (``target="h200"``). It has no gradient.

    Raises:
        ArgumentError: Shapes that do not fit each other or the machine.
        DtypeError: An operand is not int8.

    >>> int_mm(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8))
    tensor([[-5]], dtype=torch.int32)
    """
    check_tensor("a", a, "2")
    check_tensor("b", b, "2")
    check_devices(a=a, b=b)
    for name, x in (("a", a), ("b", b)):
        if x.dtype != torch.int8:
            raise DtypeError(f"int_mm: {name} has dtype {x.dtype}; pass torch.int8, or call mm for floats")
    _check_inner("int_mm", a, b)
    if target is not None:
        _check_cublas_int8(a, b)
    alone = target is None and unit is None and datapath is None
    choice = choose("int_mm", target, "int8" if alone else unit, datapath, accumulate="int32")
    return forward(a, b, None, Request(operation="int_mm", choice=choice, out_dtype=torch.int32, native=native))


def _request(operation: Operation, options: Options) -> Request:
    """Sort the keywords of mm into a request."""
    unknown = [name for name in options if name not in _NAMES]
    if unknown:
        raise ArgumentError(f"{operation} has no argument {unknown[0]!r}; it takes {', '.join(_NAMES)}")
    machine = {name: options.get(name) for name in ("target", "unit", "datapath", "plan", "accumulate")}
    choice = choose(operation, strict=options.get("strict", False), **machine)
    return Request(
        operation=operation,
        choice=choice,
        out_dtype=options.get("out_dtype"),
        allow_tf32=options.get("allow_tf32", False),
        allow_fp16_accumulation=options.get("allow_fp16_accumulation", False),
        a_format=options.get("a_format"),
        b_format=options.get("b_format"),
        generator=options.get("generator"),
        native=options.get("native"),
    )


def _check_inner(verb: str, a: Tensor, b: Tensor) -> None:
    k = b.shape[-2] * (2 if b.dtype == torch.float4_e2m1fn_x2 else 1)
    mine = a.shape[-1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)
    if mine != k:
        raise ArgumentError(
            f"{verb}: a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit; a is [..., M, K], "
            f"b is [..., K, N], but K is {mine} and {k}"
        )


def _check_bias(bias: Tensor, x: Tensor, w: Tensor, request: Request) -> None:
    if bias.shape != w.shape[:1]:
        raise ArgumentError(
            f"bias of shape {tuple(bias.shape)} does not fit w of shape {tuple(w.shape)}; pass [{w.shape[0]}]"
        )
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if bias.dtype not in floats or (request.choice.target is not None and bias.dtype != x.dtype):
        wanted = x.dtype if request.choice.target is not None else "float16, bfloat16, float32 or float64"
        raise DtypeError(f"bias has dtype {bias.dtype}; pass {wanted}")


def _check_cublas_int8(a: Tensor, b: Tensor) -> None:
    """Refuse the shapes that torch._int_mm refuses on CUDA."""
    m, k, n = *a.shape, b.shape[1]
    if m <= 16 or k % 8 or n % 8 or not k or not n:
        raise ArgumentError(
            f"torch._int_mm on CUDA takes M above 16 and K and N that are multiples of 8, not M={m}, K={k}, N={n}; "
            "pad the operands, or leave target= out"
        )
