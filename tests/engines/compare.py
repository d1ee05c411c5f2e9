"""Comparing tensors bit by bit, and the tables that name dtypes."""

import math

import torch

from fmtsim.formats.block import LogTileFormat, ScaledFormat
from fmtsim.ops import code_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.oracle import Quantized
from fmtsim.spec.cast import EncodedParts

ENGINES = ["fmtsim.torch_engine", "fmtsim.cpu"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
OUT_FORMATS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def identical(x: float, y: float) -> bool:
    """Return whether two floats are the same number, zeros of different sign told apart, NaN equal to NaN."""
    return (x != x and y != y) or (x == y and math.copysign(1.0, x) == math.copysign(1.0, y))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of a floating-point tensor as integers, other tensors as they are."""
    return x.contiguous().view(INTEGERS[x.element_size()]) if x.is_floating_point() else x


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Put float64 values into a dtype with canonical NaN: torch's own conversion to bfloat16 makes NaN 0xFFFF."""
    result = values.to(dtype)
    codes = bits(result)
    nan = {2: 0x7FC0 if dtype == torch.bfloat16 else 0x7E00, 4: 0x7FC00000, 8: 0x7FF8 << 48}[dtype.itemsize]
    return torch.where(values.isnan(), nan, codes).to(codes.dtype).view(dtype)


def differing(got: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """Return the row-major places where two tensors differ in a bit; their shape and dtype must be the same."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (
        got.shape,
        got.dtype,
        expected.shape,
        expected.dtype,
    )
    return torch.nonzero(bits(got).reshape(-1) != bits(expected).reshape(-1)).reshape(-1).tolist()


def report(places: list[int], got: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> str:
    """Say at most six differences: inputs, result, expectation."""
    columns = [*(t.reshape(-1) for t in inputs), got.reshape(-1), expected.reshape(-1)]
    lines = [", ".join(repr(c[i].item()) for c in columns) for i in places[:6]]
    return f"{len(places)} differ (inputs, got, expected):\n  " + "\n  ".join(lines)


def check(what: str, got: torch.Tensor | None, expected: torch.Tensor | None, *inputs: torch.Tensor) -> None:
    """Fail with the first differences unless two tensors have the same bits."""
    if got is None or expected is None:
        assert got is None and expected is None, f"{what}: got {got}, expected {expected}"
        return
    places = differing(got, expected)
    shown = [t for t in inputs if t.numel() == got.numel()]
    assert not places, f"{what}: {report(places, got, expected, *shown)}"


def words_for(rounding: Rounding, count: int) -> torch.Tensor | None:
    """Return words that sweep the range of a stochastic rounding, None for the other modes."""
    if rounding.mode != "stochastic":
        return None
    if rounding.bits <= 8:
        return torch.arange(count) * 5 % (1 << rounding.bits)
    return torch.arange(count) * 2654435761 % (1 << rounding.bits)


def as_parts(result: Quantized, fmt: ScaledFormat) -> EncodedParts:
    """Put the oracle's result into the tensors of the engines' protocol."""
    offset_dtype = torch.float32 if isinstance(fmt, LogTileFormat) else torch.int32
    return EncodedParts(
        torch.tensor(result.codes, dtype=code_dtype(fmt.bits)),
        torch.tensor(result.scales, dtype=torch.float32),
        None if result.tensor_scale is None else torch.tensor(result.tensor_scale, dtype=torch.float32),
        None if result.offsets is None else torch.tensor(result.offsets, dtype=offset_dtype),
    )


def check_parts(what: str, got: EncodedParts, expected: EncodedParts, x: torch.Tensor) -> None:
    for field in ("scales", "tensor_scale", "offsets", "codes"):
        check(f"{what}: {field}", getattr(got, field), getattr(expected, field), x)
