# SPDX-License-Identifier: Apache-2.0
"""What a verb is given, made into what an engine takes: values, their format, and how they lie in memory."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.arguments import check_dense, check_together
from fmtsim.casts.ops import define_operator
from fmtsim.casts.quantize import decode
from fmtsim.formats.interop import dtype_name, torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.formats.spec import FloatFormat, IntFormat, LogFormat
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.spec.call import Layout, OperandFormat, Operation
from fmtsim.support.dispatch import constant_in_graphs, is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, shown

_PLAIN = {
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


def check_matrices(verb: str, a: Tensor, b: Tensor, dims: str) -> None:
    """Refuse operands a [..., M, K] and b [..., K, N] that are not matrices, or do not fit each other."""
    for name, x in (("a", a), ("b", b)):
        check_dense(name, x)
        if x.dim() != int(dims):
            other = {2: "fmtsim.mm multiplies two matrices", 3: "fmtsim.bmm multiplies two stacks of matrices"}
            hint = f"; {other[x.dim()]}" if x.dim() in other else ""
            shape = "[M, K] and [K, N]" if dims == "2" else "[B, M, K] and [B, K, N]"
            raise ArgumentError(f"{verb}: {name} has shape {tuple(x.shape)}; pass a and b of shape {shape}{hint}")
    check_together(a=a, b=b)
    mine, k = inner_length(a), inner_length(b.mT)
    if mine != k:
        raise ArgumentError(
            f"{verb}: a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit; a is [..., M, K], "
            f"b is [..., K, N], but K is {mine} and {k}; transpose one, for example b.mT"
        )


def operand_format(name: str, x: Tensor, given: Any = None) -> OperandFormat:
    """Return the format of an operand: the one given, else that of its dtype.

    Raises:
        DtypeError: The dtype does not say a format, or says another than the one given.
        FormatError: The format is unknown, or cannot be multiplied.
    """
    if given is None:
        if x.dtype not in _PLAIN:
            names = ", ".join(dtype_name(dtype) for dtype in _PLAIN)
            raise DtypeError(
                f"{name} has dtype {x.dtype}; pass one of {names}, or say what its codes are with {name}_format="
            )
        return _FORMATS[x.dtype]
    fmt = _known(name, get_format(given))
    if x.dtype not in FLOATS and x.dtype in _PLAIN and x.dtype != torch.int8 and own_dtype(fmt) != x.dtype:
        raise DtypeError(f"{name} has dtype {x.dtype}, which is not {fmt.name}; leave {name}_format out")
    if isinstance(fmt, IntFormat) and x.dtype not in (torch.int8, torch.uint8):
        raise DtypeError(f"{name} has dtype {x.dtype}; pass {fmt.name} as a torch.int8 tensor")
    if x.dtype == torch.int8 and not isinstance(fmt, IntFormat):
        raise DtypeError(f"{name} has dtype torch.int8; pass codes of {fmt.name} as {name}.view(torch.uint8)")
    return fmt


_FORMATS: dict[torch.dtype, OperandFormat] = {dtype: get_format(name) for dtype, name in _PLAIN.items()}  # type: ignore[misc]


def _known(name: str, fmt: Any) -> OperandFormat:
    if not isinstance(fmt, FloatFormat | IntFormat | LogFormat):
        raise FormatError(
            f"{name}_format={shown(getattr(fmt, 'name', fmt))} is not a plain number format; "
            "multiply its decoded values, or pass scales to scaled_mm or mma"
        )
    return fmt


@constant_in_graphs  # torch.compile cannot see through the cache in there
def own_dtype(fmt: OperandFormat) -> torch.dtype | None:
    """Return the torch dtype whose bit patterns are the format's codes."""
    return torch_dtype(fmt)


def operand_formats(
    operation: Operation, a: Tensor, columns: Tensor, options: dict[str, Any]
) -> tuple[tuple[OperandFormat, OperandFormat], str]:
    """Return the formats of both operands, and how float32 becomes TF32."""
    given = options["a_format"], options["b_format"]
    plain = all(each is None for each in given)  # an array compares by element
    if options["target"] is not None and plain and operation != "scaled_mm":
        if a.dtype != columns.dtype:
            raise DtypeError(
                f"a has dtype {a.dtype}, b {columns.dtype}; torch multiplies equal dtypes, cast one of them"
            )
        if a.dtype not in FLOATS and operation != "int_mm":
            raise DtypeError(
                f"torch.{operation} does not take {a.dtype}; call fmtsim.scaled_mm, or pass unit= for the "
                "arithmetic alone"
            )
    tf32 = options["allow_tf32"] and plain and a.dtype == columns.dtype == torch.float32
    if tf32:
        given = ("tf32", "tf32")
    formats = operand_format("a", a, given[0]), operand_format("b", columns, given[1])
    unit = options["unit"]
    single = unit is not None and formats[0].name == formats[1].name == "fp32"
    if single and not unit_takes(unit, "fp32") and unit_takes(unit, "tf32"):
        raise ArgumentError(
            f"unit {getattr(unit, 'name', unit)} multiplies TF32, not float32; pass allow_tf32=True to round the "
            "operands, or choose a unit that takes fp32 ('fp32_fma', 'exact')"
        )
    return formats, "round" if tf32 else ""


def asked_product(
    operation: Operation, a: Tensor, b: Tensor, options: dict[str, Any]
) -> tuple[tuple[OperandFormat, OperandFormat], str, torch.dtype | None, str | None]:
    """Return what the keywords of ``mm`` ask of a product ``a b^T``.

    That is the formats of both operands, how float32 becomes TF32, the dtype of the result (None is that of the
    accumulator) and the format of the sums (None is the unit's usual one).
    """
    formats, tf32 = operand_formats(operation, a, b, options)
    dtype = output_dtype(operation, a, b, options)
    sums = accumulation(a, dtype, options)
    decides = options["target"] is not None or options["allow_fp16_accumulation"]
    return formats, tf32, dtype, sums if decides else options["accumulate"]


def output_dtype(operation: Operation, a: Tensor, b: Tensor, options: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of the result, None for that of the accumulator."""
    dtype: torch.dtype | None = options["out_dtype"]
    plain = a.dtype == b.dtype and a.dtype in FLOATS
    if dtype is None:
        return a.dtype if plain else None
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"out_dtype={shown(dtype)} is not a dtype; pass for example torch.float32")
    widened = a.dtype in _HALVES and dtype == torch.float32
    if options["target"] is not None and plain and dtype != a.dtype and not widened:
        raise DtypeError(
            f"torch.{operation} does not turn {a.dtype} into {dtype}; choose {a.dtype}"
            + (" or torch.float32" if a.dtype in _HALVES else "")
            + ", or pass unit= instead of target="
        )
    return dtype


def accumulation(a: Tensor, dtype: torch.dtype | None, options: dict[str, Any]) -> str:
    """Return the format in which a library is asked to sum."""
    given, half = options["accumulate"], options["allow_fp16_accumulation"]
    if given is not None:
        if half and given != "fp16":
            raise ArgumentError(f"accumulate={shown(given)} contradicts allow_fp16_accumulation=True; pass one of them")
        return str(given)
    if half and a.dtype == torch.float16:  # torch's switch concerns float16 alone
        if dtype not in (None, torch.float16):
            raise ArgumentError(
                f"allow_fp16_accumulation with out_dtype={dtype} is not a product that cuBLAS has; "
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
    if tf32 == "truncate":
        return (x.resolve_neg().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    if x.dtype in DIRECT:
        return x
    dtype = own_dtype(fmt)
    if x.dtype == torch.uint8 and dtype in DIRECT:
        return x.view(dtype)  # codes of 8 bits
    if x.dtype == FP4:
        return _fp8_of_fp4(x)
    return decode(x, fmt, out_dtype=result_dtype(fmt, torch.bfloat16))


# E4M3 codes of the values of the 16 E2M1 codes, and for every byte of two such codes those of both.
_FP8_OF_FP4 = torch.tensor([sign | code for sign in (0, 0x80) for code in (0, 48, 56, 60, 64, 68, 72, 76)])
_FP8_PAIRS = (_FP8_OF_FP4 | _FP8_OF_FP4[:, None] << 8).flatten().to(torch.int16)


def _fp8_of_fp4(x: Tensor) -> Tensor:
    """Return the numbers of a tensor with two in each byte, the even one in the low nibble, as float8_e4m3fn."""
    if not is_readable(x):
        unpacked: Tensor = torch.ops.fmtsim.fp8_of_fp4(x)
        return unpacked
    out = _fp8_of_fp4_shape(x)
    unpack_fp4(x, out)
    return out


def unpack_fp4(x: Tensor, out: Tensor) -> None:
    """Write the numbers of an FP4 tensor to a contiguous float8_e4m3fn one."""
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
    """Return the table on a device, where it stays: a copy would wait, and a graph could not capture it."""
    return _FP8_PAIRS.to(device)


def fp4_of_fp8(x: Tensor) -> Tensor:
    """Return E2M1 numbers that float8_e4m3fn holds as a tensor with two in each byte, the even in the low nibble."""
    table = torch.zeros(256, dtype=torch.uint8)
    table[_FP8_OF_FP4] = torch.arange(16, dtype=torch.uint8)
    nibbles = table.to(x.device)[x.view(torch.uint8).int()]
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(FP4)


def stays_packed(x: Tensor) -> bool:
    """Say whether ``run_gemm`` unpacks an operand itself: an FP4 matrix on a CPU."""
    return x.dtype == FP4 and x.is_cpu and x.dim() == 2 and is_readable(x)


def inner_length(x: Tensor) -> int:
    """Return how many numbers a row [..., K] has: float4 tensors hold two in an element."""
    return x.shape[-1] * (2 if x.dtype == FP4 else 1)


def matrix_layout(x: Tensor, *, transposed: bool = False) -> Layout:
    """Return how a library sees a matrix: ``"row"`` where K is contiguous.

    Args:
        x: As the verb was given it: a [..., M, K], or b [..., K, N] with ``transposed``.
        transposed: K is the first of the two dimensions.

    A contiguous tensor counts as row-major, then a transposed one as column-major; anything else is copied to
    row-major first, as torch does.
    """
    rows, columns = x.shape[-2:]
    row_major = x.is_contiguous() or not (x.stride(-2) == 1 and x.stride(-1) >= max(1, rows))
    return "column" if row_major == transposed else "row"
