"""Engines against the oracles and against each other: every bit of quantize, encode and decode."""

import dataclasses
import importlib
import math
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch
from tests.engines.cases import (
    DETERMINISTIC,
    ROUNDINGS,
    STOCHASTIC,
    adversarial,
    element_formats,
    matrices,
    scaled_formats,
    some_codes,
)

from fmtsim.formats.block import BlockFormat, LogTileFormat, ScaledFormat
from fmtsim.formats.registry import get_format
from fmtsim.ops import CastSpec, EncodedParts, RandomKey, code_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import decode_value, encode_value
from fmtsim.rounding.philox import random_integer
from fmtsim.scaling.oracle import Quantized, quantize_matrix

ENGINES = ["fmtsim.torch_engine", "fmtsim.cpu"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
OUT_FORMATS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
OVERFLOWS = ("saturate", "ieee")
NEAREST = Rounding()

# The 4096 roots of this format take minutes to compute; its own test says what it does.
ELEMENTS = [name for name in element_formats() if name != "lns16_g2048"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> ModuleType:
    """Return one engine after the other."""
    return importlib.import_module(request.param)


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


# Element formats.


@cache
def points(name: str) -> torch.Tensor:
    """Return the adversarial inputs of a format and their roundings to the narrower dtypes, without repetition."""
    x = torch.tensor(adversarial(get_format(name)), dtype=torch.float64)
    return (
        torch.cat([x, *(x.to(dtype).double() for dtype in DTYPES.values())])
        .view(torch.int64)
        .unique()
        .view(torch.float64)
    )


def words_for(rounding: Rounding, count: int) -> torch.Tensor | None:
    """Return words that sweep the range of a stochastic rounding, None for the other modes."""
    if rounding.mode != "stochastic":
        return None
    if rounding.bits <= 8:
        return torch.arange(count) * 5 % (1 << rounding.bits)
    return torch.arange(count) * 2654435761 % (1 << rounding.bits)


@cache
def table(name: str, rounding: Rounding, overflow: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's codes and float64 values for the points of a format."""
    fmt, x = get_format(name), points(name).tolist()
    words = words_for(rounding, len(x))
    drawn = [None] * len(x) if words is None else words.tolist()
    codes = [encode_value(v, fmt, rounding, overflow, w) for v, w in zip(x, drawn, strict=True)]
    known = {code: decode_value(code, fmt) for code in set(codes)}
    dtype = code_dtype(fmt.bits)
    signed = [code - (1 << 64) if dtype == torch.int64 and code >> 63 else code for code in codes]
    return torch.tensor(signed, dtype=dtype), torch.tensor([known[c] for c in codes], dtype=torch.float64)


def holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Return whether a dtype represents all these values."""
    return not differing(stored(stored(values, dtype).double(), torch.float64), values)


def check_elements(engine: ModuleType, name: str, rounding: Rounding, overflow: str, dtype_name: str) -> None:
    """Compare quantize and encode of one format with the oracle's table, for the points that a dtype holds."""
    dtype = DTYPES[dtype_name]
    codes, values = table(name, rounding, overflow)
    x = points(name)
    kept = (x.to(dtype).double() == x) | x.isnan()
    words = words_for(rounding, len(x))
    x, codes, values = x[kept].to(dtype), codes[kept], values[kept]
    words = None if words is None else words[kept]
    out_dtype = next(d for d in (dtype, torch.float32, torch.float64) if holds(d, values))
    spec = CastSpec(format=get_format(name), rounding=rounding, overflow=overflow)
    what = f"{name} {rounding} {overflow} {dtype_name}"
    out = torch.empty(x.shape, dtype=out_dtype)
    engine.quantize(x, spec, words, out)
    check(f"quantize {what}", out, stored(values, out_dtype), x)
    parts = engine.encode(x, spec, words)
    check(f"encode {what}", parts.codes, codes, x)
    assert parts[1:] == (None, None, None)


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_equal_the_oracle(engine, name):
    """Every rounding and overflow on float32 or another dtype in turn; the whole product is exhaustive."""
    for i, rounding in enumerate(ROUNDINGS):
        for j, overflow in enumerate(OVERFLOWS):
            check_elements(engine, name, rounding, overflow, ("float32", list(DTYPES)[1 + (i // 2) % 3])[(i + j) % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_equal_the_oracle_in_every_dtype(engine, name):
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            for dtype_name in DTYPES:
                check_elements(engine, name, rounding, overflow, dtype_name)


@pytest.mark.parametrize("name", ELEMENTS)
def test_decoding_equals_the_oracle(engine, name):
    fmt = get_format(name)
    some = some_codes(fmt)
    values = torch.tensor([decode_value(code, fmt) for code in some], dtype=torch.float64)
    dtype = code_dtype(fmt.bits)
    signed = [code - (1 << 64) if dtype == torch.int64 and code >> 63 else code for code in some]
    codes = torch.tensor(signed, dtype=dtype)
    spec = CastSpec(format=fmt, rounding=NEAREST, overflow="ieee")
    for out_dtype in [dtype for dtype in DTYPES.values() if holds(dtype, values)]:
        out = torch.empty(codes.shape, dtype=out_dtype)
        engine.decode(EncodedParts(codes), spec, out)
        check(f"decode {name} {out_dtype}", out, stored(values, out_dtype), codes)


# Block formats.


def small_blocks(fmt: ScaledFormat) -> ScaledFormat:
    """Give a format blocks that the small matrices fill more than once; whole extents stay whole."""
    outer = fmt.block[0] if fmt.block[0] in (None, 1) else 3
    return dataclasses.replace(fmt, block=(outer, fmt.block[1] and 8))


@cache
def scaled_table(
    matrix: str, fmt: ScaledFormat, rounding: Rounding, overflow: str, dtype_name: str, out_name: str
) -> Quantized:
    """Return the oracle's result for one of the named matrices."""
    rows = torch.tensor(matrices()[matrix], dtype=torch.float64).to(DTYPES[dtype_name]).double()
    words = words_for(rounding, rows.numel())
    drawn = None if words is None else words.view(rows.shape).tolist()
    out_format = get_format(OUT_FORMATS[out_name])
    return quantize_matrix(rows.tolist(), fmt, rounding, overflow, dtype_name, out_format, drawn)


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


def check_scaled(
    engine: ModuleType,
    matrix: str,
    fmt: ScaledFormat,
    rounding: Rounding,
    overflow: str,
    dtype_name: str,
    out_name: str,
) -> None:
    """Compare quantize, encode and decode of one matrix with the oracle."""
    x = torch.tensor(matrices()[matrix], dtype=torch.float64).to(DTYPES[dtype_name])
    words = words_for(rounding, x.numel())
    words = None if words is None else words.view(x.shape)
    result = scaled_table(matrix, fmt, rounding, overflow, dtype_name, out_name)
    parts = as_parts(result, fmt)
    values = stored(torch.tensor(result.values, dtype=torch.float64), DTYPES[out_name])
    spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow)
    what = f"{fmt.name} {matrix} {rounding} {overflow} {dtype_name} to {out_name}"
    check_parts(f"encode {what}", engine.encode(x, spec, words), parts, x)
    out = torch.empty(x.shape, dtype=DTYPES[out_name])
    engine.quantize(x, spec, words, out)
    check(f"quantize {what}", out, values, x)
    out = torch.empty(x.shape, dtype=DTYPES[out_name])
    engine.decode(parts, spec, out)
    check(f"decode {what}", out, values, parts.codes)


def scaled_cases(exhaustive: bool) -> list[tuple[str, Rounding, str, str, str]]:
    """Return matrix, rounding, overflow, dtype and output dtype: everything in turn, or the whole product."""
    if exhaustive:
        outs = (*DTYPES, *DTYPES)
        return [
            (m, r, o, d, outs[i + k])
            for m in matrices()
            for r in ROUNDINGS
            for o in OVERFLOWS
            for i, d in enumerate(DTYPES)
            for k in range(4)
        ]
    names = list(DTYPES)
    cases = []
    for i, matrix in enumerate(matrices()):
        for j, overflow in enumerate(OVERFLOWS):
            dtype = names[(i + j) % 4] if matrix != "deep" else "float64"
            cases.append((matrix, NEAREST, overflow, dtype, names[(i // 2 + j) % 4]))
        cases.append((matrix, ROUNDINGS[1 + i % 10], OVERFLOWS[i % 2], "float32", "float32"))
        cases.append((matrix, ROUNDINGS[1 + (i + 5) % 10], OVERFLOWS[1 - i % 2], names[1 + i % 3], "float64"))
    return cases


@pytest.mark.parametrize("name", scaled_formats())
def test_scaled_formats_equal_the_oracle(engine, name):
    fmt = small_blocks(get_format(name))
    for case in scaled_cases(exhaustive=False):
        if "lns" not in name or case[0] in ("normal", "with_inf", "zeros"):
            check_scaled(engine, case[0], fmt, *case[1:])
