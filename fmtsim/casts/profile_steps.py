# SPDX-License-Identifier: Apache-2.0
"""The steps of another library's cast: a small language of operations that round once, and what each of them does.

A program has one assignment a line, in Python's grammar of expressions. ``x`` is a matrix with a block in each row.
"""

import ast
import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fmtsim.casts.quantize import decode, encode, quantize
from fmtsim.formats.element import ElementFormat, Overflow
from fmtsim.rounding.modes import RoundingName
from fmtsim.support.errors import FormatError

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_INTEGERS: Final = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_OPERATORS: Final[dict[type, Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip
RESULTS: Final = ("value", "code", "scale", "zero", "tensor_scale")


def run(
    steps: str, x: Tensor, blocks_per_row: int, fmt: ElementFormat | None, tables: dict[str, Any], trace: Any = None
) -> dict[str, Tensor]:
    """Run a program and return all of its names: the results among them are value, code, scale, zero, tensor_scale.

    Args:
        steps: The program.
        x: [blocks, elements of a block], of the caller's dtype.
        blocks_per_row: Rows of x that are one row of the tensor.
        fmt: What ``fmt`` stands for.
        tables: Lists of numbers by name.
        trace: Called with the text of each step, its name and its result.

    Raises:
        FormatError: A step has no meaning here.
    """
    names: dict[str, Any] = {name: torch.tensor(table, device=x.device) for name, table in tables.items()}
    names |= {"x": x, "fmt": fmt, "nan": math.nan, "inf": math.inf, "True": True, "False": False}
    if fmt is not None:
        names["top"] = float(fmt.max)
    for name, expression, text in _parsed(steps):
        names[name] = result = _value(expression, names, blocks_per_row)
        if trace is not None:
            trace(text, name, result)
    return {name: value for name, value in names.items() if isinstance(value, Tensor)}


@lru_cache(maxsize=256)
def _parsed(steps: str) -> tuple[tuple[str, ast.expr, str], ...]:
    """Return name, expression and text of each step."""
    lines = []
    for node in ast.parse(steps).body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            raise FormatError(f"step {ast.unparse(node)!r} is not an assignment to one name")
        lines.append((node.targets[0].id, node.value, ast.unparse(node)))
    return tuple(lines)


def _value(node: ast.expr, names: dict[str, Any], blocks_per_row: int) -> Any:
    """Return what an expression stands for: a tensor, a number, a name of a format."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, names, blocks_per_row), _value(right, names, blocks_per_row)
            return _OPERATORS[type(op)](*_promoted(a, b))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            a, b = _value(left, names, blocks_per_row), _value(right, names, blocks_per_row)
            return _OPERATORS[type(op)](*_promoted(a, b))
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_value(operand, names, blocks_per_row))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            arguments = [_value(argument, names, blocks_per_row) for argument in args]
            options = {str(keyword.arg): _value(keyword.value, names, blocks_per_row) for keyword in keywords}
            if name in _REDUCTIONS:
                return _reduced(_REDUCTIONS[name], blocks_per_row, *arguments)
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](*arguments, **options)
    raise FormatError(f"{ast.unparse(node)!r} has no meaning in the steps of a profile")


def _promoted(*values: Any) -> tuple[Any, ...]:
    """Return numbers as tensors of the dtype of the tensor beside them, rounded to it once; numbers alone stay."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or len(tensors) == len(values):
        return values
    dtype = tensors[0].dtype
    if not dtype.is_floating_point and any(isinstance(value, float) for value in values):
        dtype = torch.float32
    return tuple(value if isinstance(value, Tensor) else tensors[0].new_tensor(value, dtype=dtype) for value in values)


# Conversions, each with one rounding.


def _to(dtype: torch.dtype) -> Callable[[Any], Tensor]:
    def convert(x: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
        if x.dtype == torch.float64 and dtype in _INTEGERS:  # torch rounds float64 to bfloat16 by float32
            return quantize(x, dtype, out_dtype=dtype, overflow="ieee")
        return x.to(dtype)

    return convert


def _cast(x: Tensor, fmt: Any, rounding: RoundingName = "nearest_even", overflow: Overflow | None = None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return quantize(x, fmt, rounding, overflow=overflow, out_dtype=wide)  # type: ignore[arg-type]


def _encode(x: Tensor, fmt: Any, rounding: RoundingName = "nearest_even", overflow: Overflow | None = None) -> Tensor:
    return encode(x, fmt, rounding, overflow=overflow).unpacked().to(torch.int64)  # type: ignore[arg-type]


def _decode(codes: Tensor, fmt: Any) -> Tensor:
    return decode(codes, fmt)


def _bits(x: Tensor) -> Tensor:
    """Return bit patterns as unsigned integers."""
    width = 8 * x.element_size()
    if width == 64:
        return x.view(torch.int64)
    return x.view(_INTEGERS[x.dtype]).to(torch.int64) & ((1 << width) - 1)


def _from_bits(codes: Tensor, fmt: str) -> Tensor:
    dtype = DTYPES[fmt]
    return codes.view(dtype) if dtype == torch.float64 else codes.to(_INTEGERS[dtype]).view(dtype)


# Elementwise operations.


def _exponent(x: Tensor) -> Tensor:
    """Return floor(log2(abs(x))): of zero -1000, of Inf and NaN 1000."""
    exponents = torch.frexp(x.double()).exponent.to(torch.int64) - 1
    return torch.where(x == 0, -1000, torch.where(torch.isfinite(x), exponents, 1000))


def _pow2(e: Tensor) -> Tensor:
    """Return 2**e as float32: exact from -149 to 127, zero below, infinite above."""
    # the bits of a float64, whose exponent field holds all of these
    bits = (e.to(torch.int64).clamp(-1000, 1000) + 1023) << 52
    return bits.view(torch.float64).float()


def _round_away(x: Tensor) -> Tensor:
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.sign(x), whole)


def fma(a: Any, b: Any, c: Any) -> Tensor:
    """Return a * b + c of float32, rounded once."""
    a, b, c = (value.double() for value in _promoted(a, b, c))
    # 1. the product is exact in float64; the sum's error is known exactly
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    # 2. rounded to odd in float64, so that rounding to float32 is that of the exact sum
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    moves = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    return torch.where(moves, bits + toward, bits).view(torch.float64).float()


def _bucket(x: Tensor, table: Tensor, right: bool = True) -> Tensor:
    """Count the ascending numbers of a table that are at most x, or below it where right is False; NaN: all."""
    return torch.searchsorted(table.to(x.dtype), x.contiguous(), right=right)


def _running_sum(x: Tensor) -> Tensor:
    """Add the elements of a block one after another, each sum rounded to x's dtype."""
    total = torch.zeros_like(x[:, :1])
    for column in x.split(1, dim=-1):
        total = total + column
    return total


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *values: function(*_promoted(*values))


def _clamp(x: Tensor, low: Any, high: Any) -> Tensor:
    x, low, high = _promoted(x, low, high)
    return torch.minimum(torch.maximum(x, low), high)


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _to(dtype) for name, dtype in DTYPES.items()},
    "int": lambda x: x.to(torch.int64), "cast": _cast, "encode": _encode, "decode": _decode,
    "bits": _bits, "from_bits": _from_bits, "exponent": _exponent, "pow2": _pow2, "fma": fma,
    "abs": torch.abs, "sign": torch.sign, "signbit": torch.signbit, "sqrt": torch.sqrt, "log2": torch.log2,
    "exp2": torch.exp2, "rint": torch.round, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc,
    "round_away": _round_away, "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
    "where": lambda condition, a, b: torch.where(condition, *_promoted(a, b)), "clamp": _clamp,
    **{name: _elementwise(getattr(torch, name)) for name in ("copysign", "minimum", "maximum", "fmin", "fmax")},
    "bucket": _bucket, "lookup": lambda table, i: table[i], "gather": lambda x, i: x.gather(-1, i),
    "like": lambda x, y: _to(y.dtype)(x), "running_sum": _running_sum,
}  # fmt: skip

# Reductions over a block, a row of the tensor, or all of it; one number stays beside each block.

_REDUCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "amax": lambda x: x.amax(-1, keepdim=True), "amin": lambda x: x.amin(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True), "mean": lambda x: x.mean(-1, keepdim=True),
    "any": lambda x: x.any(-1, keepdim=True), "all": lambda x: x.all(-1, keepdim=True),
    "argmax": lambda x: x.argmax(-1, keepdim=True), "argmin": lambda x: x.argmin(-1, keepdim=True),
    "first": lambda x: x[:, :1],
}  # fmt: skip


def _reduced(function: Callable[[Tensor], Tensor], blocks_per_row: int, x: Tensor, over: str = "block") -> Tensor:
    if over == "block":
        return function(x)
    if over == "tensor":
        return function(x.reshape(1, -1)).expand(len(x), 1)
    return function(x.reshape(len(x) // blocks_per_row, -1)).repeat_interleave(blocks_per_row, 0)
