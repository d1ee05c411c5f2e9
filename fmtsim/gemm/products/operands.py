# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products: check them, find their formats and layouts, and convert them to dtypes of engines."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.arguments import check_dense, check_together
from fmtsim.casts.lanes import define_operator
from fmtsim.casts.quantize import decode
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.interop import dtype_name, torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import Layout, OperandFormat, Operation
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.engine import Engine
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.dispatch import constant_in_graphs, is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, shown

_FORMAT_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8_full",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
    torch.float4_e2m1fn_x2: "e2m1",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # also what torch.mm takes on a GPU
_HALVES = FLOATS[:2]
FP4 = torch.float4_e2m1fn_x2
DIRECT = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # what engines take


def check_tensor(name: str, x: Any, dims: str) -> None:
    """Refuse what is not a dense tensor of the wanted dimensions: ``"2"``, ``"3"``, ``"2+"`` or ``"1+"``."""
    check_dense(name, x)
    wanted = int(dims[0])
    if x.dim() < wanted or (x.dim() != wanted and not dims.endswith("+")):
        more = " or more" if dims.endswith("+") else ""
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}; pass a tensor of {wanted} dimensions{more}")


def check_operands(verb: Operation, a: Tensor, b: Tensor, bias: Tensor | None, library: bool) -> None:
    """Refuse operands that are not matrices, or stacks of them, or do not fit each other or the bias.

    Args:
        verb: The verb.
        a, b: [..., M, K] and [..., K, N]; of linear x [..., K] and w [N, K].
        bias: [N], or None.
        library: Whether a GPU with its library computes, which takes only a bias of x's dtype.
    """
    if verb == "linear":
        check_tensor("x", a, "1+")
        check_tensor("w", b, "2")
        if bias is not None:
            check_tensor("bias", bias, "1")
        check_together(x=a, w=b, bias=bias)
        if inner_length(a) != inner_length(b):  # float4 has two numbers in an element
            raise ArgumentError(
                f"x of shape {tuple(a.shape)} does not fit w of shape {tuple(b.shape)}; x is [..., K], w is [N, K]"
            )
        if bias is not None and bias.shape != b.shape[:1]:
            raise ArgumentError(
                f"bias of shape {tuple(bias.shape)} does not fit w of shape {tuple(b.shape)}; pass [{b.shape[0]}]"
            )
        if bias is not None and (bias.dtype not in FLOATS or (library and bias.dtype != a.dtype)):
            allowed = a.dtype if library else "float16, bfloat16, float32 or float64"
            raise DtypeError(f"bias has dtype {bias.dtype}; pass {allowed}")
        return
    rank, shape = (3, "[B, M, K] and [B, K, N]") if verb == "bmm" else (2, "[M, K] and [K, N]")
    for name, x in (("a", a), ("b", b)):
        check_dense(name, x)
        if x.dim() != rank:
            other = {2: "fmtsim.mm multiplies two matrices", 3: "fmtsim.bmm multiplies two stacks of matrices"}
            hint = f"; {other[x.dim()]}" if x.dim() in other else ""
            raise ArgumentError(f"{verb}: {name} has shape {tuple(x.shape)}; pass a and b of shape {shape}{hint}")
    check_together(a=a, b=b)
    # K as numbers: a float4 element holds two
    a_k, b_k = inner_length(a), inner_length(b.mT)
    if a_k != b_k:
        raise ArgumentError(
            f"{verb}: a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit; a is [..., M, K], "
            f"b is [..., K, N], but K is {a_k} and {b_k}; transpose one, for example b.mT"
        )
    if verb == "bmm" and a.shape[0] != b.shape[0]:
        raise ArgumentError(f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} differ in their batch")
    for name, x in (("a", a), ("b", b)) if verb == "int_mm" else ():
        if x.dtype != torch.int8:
            raise DtypeError(f"int_mm: {name} has dtype {x.dtype}; pass torch.int8, or call mm for floats")


def operand_format(name: str, x: Tensor, declared: Any = None) -> OperandFormat:
    """Return the format of an operand: ``declared`` (``formats=`` of a verb), else that of its dtype.

    Raises:
        DtypeError: No format has the dtype, or another than the declared one.
        FormatError: The format is unknown, or cannot be multiplied.
    """
    if declared is None:
        if x.dtype not in _FORMAT_NAMES:
            names = ", ".join(dtype_name(dtype) for dtype in _FORMAT_NAMES)
            raise DtypeError(
                f"{name} has dtype {x.dtype}; pass one of {names}, or say what its codes are with formats="
            )
        return _FORMATS[x.dtype]
    # a declared format: floats hold its values, integers its codes
    fmt = get_format(declared)
    if not isinstance(fmt, FloatFormat | IntFormat | LogFormat):
        raise FormatError(
            f"formats= of {name}, {shown(getattr(fmt, 'name', fmt))}, is not a plain number format; "
            "multiply its decoded values, or pass scales to scaled_mm or mma"
        )
    if x.dtype not in FLOATS and x.dtype in _FORMAT_NAMES and x.dtype != torch.int8 and own_dtype(fmt) != x.dtype:
        raise DtypeError(f"{name} has dtype {x.dtype}, which is not {fmt.name}; leave formats= out")
    if isinstance(fmt, IntFormat) and x.dtype not in (torch.int8, torch.uint8):
        raise DtypeError(f"{name} has dtype {x.dtype}; pass {fmt.name} as a torch.int8 tensor")
    if x.dtype == torch.int8 and not isinstance(fmt, IntFormat):
        raise DtypeError(f"{name} has dtype torch.int8; pass codes of {fmt.name} as {name}.view(torch.uint8)")
    return fmt


_FORMATS: dict[torch.dtype, OperandFormat] = {dtype: get_format(name) for dtype, name in _FORMAT_NAMES.items()}  # type: ignore[misc]


@constant_in_graphs  # torch.compile cannot see through the cache in there
def own_dtype(fmt: OperandFormat) -> torch.dtype | None:
    """Return the torch dtype whose bit patterns are the format's codes."""
    return torch_dtype(fmt)


def pair_of(name: str, value: Any) -> tuple[Any, Any]:
    """Return a keyword's values for a and for b: a tuple is a pair, anything else serves both.

    Raises:
        ArgumentError: A tuple is not a pair.
    """
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ArgumentError(f"{name}={shown(value)} is not a pair; pass one value for both operands, or (a's, b's)")
    return value


ALLOWED = ("tf32", "fp16_accumulation")  # switches of torch.backends.cuda.matmul


def check_allowed(allow: Any) -> None:
    """Refuse ``allow=`` that is not a switch, a tuple of switches, or None."""
    for switch in allow if isinstance(allow, tuple) else () if allow is None else (allow,):
        if not isinstance(switch, str) or switch not in ALLOWED:
            raise ArgumentError(
                f"allow={shown(allow)} is not possible; choose 'tf32', 'fp16_accumulation', or both as a tuple"
            )


def allows(options: dict[str, Any], switch: str) -> bool:
    """Return True if ``allow=`` names a switch."""
    allow = options["allow"]
    return switch in allow if isinstance(allow, tuple) else bool(switch == allow)


def operand_formats(
    operation: Operation, a: Tensor, columns: Tensor, options: dict[str, Any]
) -> tuple[tuple[OperandFormat, OperandFormat], bool]:
    """Return the formats of both operands, and whether float32 operands are rounded to TF32."""
    # 1. a library knows formats by dtypes alone, and multiplies equal ones
    declared = pair_of("formats", options["formats"])
    plain = all(fmt is None for fmt in declared)  # an array compares by element
    if options["library"] and plain and operation != "scaled_mm":
        if a.dtype != columns.dtype:
            raise DtypeError(
                f"a has dtype {a.dtype}, b {columns.dtype}; torch multiplies equal dtypes, cast one of them"
            )
        if a.dtype not in FLOATS and operation != "int_mm":
            step = "call fmtsim.scaled_mm, or name a unit as target="
            if not a.dtype.is_floating_point:
                step = "convert it with .float(), or multiply int8 by fmtsim.int_mm"
            raise DtypeError(f"torch.{operation} does not take {a.dtype}; {step}")
    # 2. float32 becomes TF32 only where the caller allows it, as torch does
    tf32 = allows(options, "tf32") and plain and a.dtype == columns.dtype == torch.float32
    if tf32:
        declared = ("tf32", "tf32")
    formats = operand_format("a", a, declared[0]), operand_format("b", columns, declared[1])
    # 3. a unit that has TF32 and no float32 multiplies float32 only where the caller allows the rounding
    unit = options["target"]
    single = not options["library"] and formats[0].name == formats[1].name == "fp32"
    if single and not unit_takes(unit, "fp32") and unit_takes(unit, "tf32"):
        raise ArgumentError(
            f"unit {getattr(unit, 'name', unit)} multiplies TF32, not float32; pass allow='tf32' to round the "
            "operands, or choose a unit that takes fp32 ('fp32_fma', 'exact')"
        )
    return formats, tf32


def output_dtype(operation: Operation, a: Tensor, b: Tensor, options: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of the result, None for that of the accumulator."""
    dtype: torch.dtype | None = options["out_dtype"]
    plain = a.dtype == b.dtype and a.dtype in FLOATS
    if dtype is None:
        return a.dtype if plain else None
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"out_dtype={shown(dtype)} is not a dtype; pass for example torch.float32")
    # torch's products of 16 bits may give float32; a unit gives every dtype
    widened = a.dtype in _HALVES and dtype == torch.float32
    if options["library"] and plain and dtype != a.dtype and not widened:
        raise DtypeError(
            f"torch.{operation} does not turn {a.dtype} into {dtype}; choose {a.dtype}"
            + (" or torch.float32" if a.dtype in _HALVES else "")
            + ", or name a unit as target="
        )
    return dtype


def accumulation(a: Tensor, dtype: torch.dtype | None, options: dict[str, Any]) -> str | None:
    """Return the format of the accumulator that the call asks for, None for the unit's default."""
    accumulate, half = options["accumulate"], allows(options, "fp16_accumulation")
    if not options["library"] and not half:
        return accumulate  # type: ignore[no-any-return]
    if accumulate is not None:
        if half and accumulate != "fp16":
            raise ArgumentError(
                f"accumulate={shown(accumulate)} contradicts allow='fp16_accumulation'; pass one of them"
            )
        return str(accumulate)
    if half and a.dtype == torch.float16:  # torch's switch concerns float16 alone
        if dtype not in (None, torch.float16):
            raise ArgumentError(
                f"allow='fp16_accumulation' with out_dtype={dtype} is not a product that cuBLAS has; "
                "choose torch.float16, or leave one of them out"
            )
        return "fp16"
    return "fp64" if a.dtype == torch.float64 else "fp32"


def read_operand(x: Tensor, fmt: OperandFormat, *, tf32: str = "") -> Tensor:
    """Return an operand's values [..., rows, K] in a dtype that engines take.

    Args:
        x: Floats, a torch float8 or float4 tensor, int8, or integer codes of ``fmt``; K comes last. Values in a dtype
            that engines take are returned as they are.
        fmt: Its format.
        tf32: How float32 becomes TF32: ``"truncate"`` as in a unit that ignores the low 13 bits of a word, or ``""``
            where the values lie on the format already, or ``run_gemm`` rounds them.
    """
    if tf32 == "truncate":  # sign, 8 exponent bits and 10 of 23 mantissa bits stay
        return (x.resolve_neg().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    if x.dtype in DIRECT:
        return x
    dtype = own_dtype(fmt)
    if x.dtype == torch.uint8 and dtype in DIRECT:
        return x.view(dtype)  # codes of 8 bits
    if x.dtype == FP4:
        return _fp8_of_fp4(x)
    return decode(x, fmt, out_dtype=result_dtype(fmt, torch.bfloat16))


# The E4M3 code of each E2M1 code, and for each byte of two E2M1 codes both E4M3 codes.
_FP8_OF_FP4 = torch.tensor([sign | code for sign in (0, 0x80) for code in (0, 48, 56, 60, 64, 68, 72, 76)])
_FP8_PAIRS = (_FP8_OF_FP4 | _FP8_OF_FP4[:, None] << 8).flatten().to(torch.int16)


def _fp8_of_fp4(x: Tensor) -> Tensor:
    """Unpack a float4 tensor (two codes in each byte, the even one in the low nibble) to float8_e4m3fn."""
    if not is_readable(x):
        unpacked: Tensor = torch.ops.fmtsim.fp8_of_fp4(x)
        return unpacked
    out = _fp8_of_fp4_shape(x)
    unpack_fp4(x, out)
    return out


def unpack_fp4(x: Tensor, out: Tensor) -> None:
    """Unpack a float4 tensor into a contiguous float8_e4m3fn tensor."""
    # one look-up a byte gives both numbers of it
    codes, pairs = x.view(torch.uint8).reshape(-1), out.view(-1).view(torch.int16)
    if x.is_cpu:
        ops.load_engine("cpu").look_up(codes, _FP8_PAIRS, pairs)
    else:
        torch.index_select(_fp8_pairs(x.device), 0, codes.int(), out=pairs)


def _fp8_of_fp4_shape(x):  # type: ignore[no-untyped-def]
    return torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=torch.float8_e4m3fn, device=x.device)


define_operator("fp8_of_fp4(Tensor x) -> Tensor", _fp8_of_fp4, _fp8_of_fp4_shape)


@lru_cache(maxsize=16)
def _fp8_pairs(device: torch.device) -> Tensor:
    """Return the table on a device, cached there: a copy from the host blocks, and CUDA graphs cannot capture it."""
    return _FP8_PAIRS.to(device)


def fp4_of_fp8(x: Tensor) -> Tensor:
    """Pack E2M1 values held in float8_e4m3fn to a float4 tensor, the even one of a pair in the low nibble."""
    # the inverse of the table: E4M3 codes of E2M1 values to their nibbles
    table = torch.zeros(256, dtype=torch.uint8)
    table[_FP8_OF_FP4] = torch.arange(16, dtype=torch.uint8)
    nibbles = table.to(x.device)[x.view(torch.uint8).int()]
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(FP4)


def stays_packed(x: Tensor) -> bool:
    """Return True if ``run_gemm`` unpacks an operand itself: an FP4 matrix on a CPU."""
    return x.dtype == FP4 and x.is_cpu and x.dim() == 2 and is_readable(x)


def inner_length(x: Tensor) -> int:
    """Return K of a tensor [..., K]: an element of a float4 tensor holds two values."""
    return x.shape[-1] * (2 if x.dtype == FP4 else 1)


def matrix_layout(x: Tensor, *, transposed: bool = False) -> Layout:
    """Return the layout of a matrix as a library sees it: ``"row"`` where K is contiguous.

    Args:
        x: An argument of the verb: a [..., M, K], or b [..., K, N] with ``transposed``.
        transposed: K is the first of the two dimensions.

    A contiguous tensor counts as row-major, then a transposed one as column-major; anything else is copied to
    row-major first, as torch does.
    """
    rows, columns = x.shape[-2:]
    row_major = x.is_contiguous() or not (x.stride(-2) == 1 and x.stride(-1) >= max(1, rows))
    return "column" if row_major == transposed else "row"


_SLICE_ELEMENTS = 1 << 21  # elements of an operand that are converted at a time: 8 MB of TF32, 2 MB of FP4


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Round float32 values to TF32, to nearest even."""
    return ops.quantize(x, _tf32_cast(), torch.float32, None, None)


def gemm_converting_slices(
    engine: Engine, a: Tensor, b: Tensor, c: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None,
    spec: GemmSpec, _: RandomKey | None, out: Tensor,
) -> None:  # fmt: skip
    """Call ``engine.gemm`` on slices of rows, each converted just before: float32 to TF32, FP4 unpacked to E4M3.

    For units without stochastic rounding: a slice would draw other random words than the whole product.
    """
    m, n = out.shape
    # a slice of b is converted once for all slices of a
    (a_buffer, a_rows), (b_buffer, b_rows) = _slice_buffer(a, "a slice"), _slice_buffer(b, "b slice")
    for n_start in range(0, n, b_rows):
        n_slice = slice(n_start, min(n_start + b_rows, n))
        b_ready, scale_b_slice = _converted(b[n_slice], b_buffer), None if scale_b is None else scale_b[n_slice]
        for m_start in range(0, m, a_rows):
            m_slice = slice(m_start, min(m_start + a_rows, m))
            a_ready, c_slice = _converted(a[m_slice], a_buffer), None if c is None else c[m_slice, n_slice]
            scale_a_slice = None if scale_a is None else scale_a[m_slice]
            engine.gemm(
                a_ready, b_ready, c_slice, scale_a_slice, scale_b_slice, spec, None, out[m_slice, n_slice]
            )  # fmt: skip


def _slice_buffer(x: Tensor, name: str) -> tuple[Tensor, int]:
    """Return memory for a converted slice of an operand, by its name in this thread, and the rows of a slice.

    Fresh memory would cost page faults at every call.
    """
    dtype = torch.float8_e4m3fn if x.dtype == FP4 else torch.float32
    k = inner_length(x)
    rows = min(max(_SLICE_ELEMENTS // max(k, 1), 64), x.shape[0])
    return ops.load_engine("cpu").memory(name, (rows, k), dtype), rows


def _converted(x: Tensor, buffer: Tensor) -> Tensor:
    """Return a slice of an operand in a dtype that engines take, in the buffer if it needs a conversion."""
    out = buffer[: x.shape[0]]
    if x.dtype == FP4:
        unpack_fp4(x, out)
    elif x.dtype == torch.float32:
        ops.quantize_out(x, out, _tf32_cast(), None, None)
    else:
        return x
    return out


@lru_cache
def _tf32_cast() -> CastSpec:
    fmt = get_format("tf32")
    assert isinstance(fmt, FloatFormat)
    return CastSpec(format=fmt, rounding=Rounding(), overflow="ieee")
