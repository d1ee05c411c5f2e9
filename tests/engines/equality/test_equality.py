# SPDX-License-Identifier: Apache-2.0
"""Engines against the oracles and against each other: every bit of quantize, encode and decode."""

import itertools
from functools import cache
from types import ModuleType

import pytest
import torch

from fmtsim.casts.ops import code_dtype
from fmtsim.formats.block import BlockFormat, ScaledFormat, with_block
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import block_scaling
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import decode_value, encode_value
from fmtsim.scaling.oracle import Quantized, quantize_matrix
from fmtsim.spec.cast import CastSpec, EncodedParts
from tests.support.bits import assert_same_bits, differing, stored
from tests.support.casts import (
    OUT_FORMATS,
    ROUNDINGS,
    adversarial,
    as_parts,
    check_parts,
    element_formats,
    matrices,
    scaled_formats,
    some_codes,
    words_for,
)
from tests.support.operands import DTYPES, normal

OVERFLOWS = ("saturate", "ieee")
NEAREST = Rounding()

# The 4096 roots of this format take minutes to compute; its own test says what it does.
ELEMENTS = [name for name in element_formats() if name != "lns16_g2048"]


# Element formats.


@cache
def points(name: str | ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the adversarial inputs of a format, and their roundings to the narrower dtypes, that a dtype holds."""
    x = torch.tensor(adversarial(get_format(name)), dtype=torch.float64)
    all_ = torch.cat([x, *(x.to(narrow).double() for narrow in DTYPES.values())]).view(torch.int64).unique()
    x = all_.view(torch.float64)
    return x[(x.to(dtype).double() == x) | x.isnan()]


@cache
def table(
    name: str | ElementFormat, rounding: Rounding, overflow: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's codes and float64 values for the points of a format."""
    fmt, x = get_format(name), points(name, dtype).tolist()
    words = words_for(rounding, len(x))
    drawn = [None] * len(x) if words is None else words.tolist()
    codes = [encode_value(v, fmt, rounding, overflow, w) for v, w in zip(x, drawn, strict=True)]
    known = {code: decode_value(code, fmt) for code in set(codes)}
    stored_as = code_dtype(fmt.bits)
    signed = [code - (1 << 64) if stored_as == torch.int64 and code >> 63 else code for code in codes]
    return torch.tensor(signed, dtype=stored_as), torch.tensor([known[c] for c in codes], dtype=torch.float64)


def holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Return whether a dtype represents all these values."""
    return not differing(stored(stored(values, dtype).double(), torch.float64), values)


def check_elements(
    engine: ModuleType, name: str | ElementFormat, rounding: Rounding, overflow: str, dtype_name: str
) -> None:
    """Compare quantize and encode of one format with the oracle's table, for the points that a dtype holds."""
    dtype = DTYPES[dtype_name]
    codes, values = table(name, rounding, overflow, dtype)
    x = points(name, dtype).to(dtype)
    words = words_for(rounding, len(x))
    out_dtype = next(d for d in (dtype, torch.float32, torch.float64) if holds(d, values))
    spec = CastSpec(format=get_format(name), rounding=rounding, overflow=overflow)
    what = f"{name} {rounding} {overflow} {dtype_name}"
    out = torch.empty(x.shape, dtype=out_dtype)
    engine.quantize(x, spec, words, out)
    assert_same_bits(out, stored(values, out_dtype), x, what=f"quantize {what}")
    parts = engine.encode(x, spec, words)
    assert_same_bits(parts.codes, codes, x, what=f"encode {what}")
    assert parts[1:] == (None, None, None)


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_equal_the_oracle(engine, name):
    """Every rounding, and overflow, float32 or another dtype in turn; the whole product is exhaustive.

    Of the 120 formats of P3109, which differ in four numbers, every second rounding in turn.
    """
    number = ELEMENTS.index(name)
    every = 4 if name.startswith("p3109") else 2
    for i, rounding in enumerate(ROUNDINGS):
        for j, overflow in enumerate(OVERFLOWS):
            if (i + j + number) % every:
                continue
            dtype = "float32" if (i + number // 4) % 2 else list(DTYPES)[1 + (i // 2 + number // 8) % 3]
            check_elements(engine, name, rounding, overflow, dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_equal_the_oracle_in_every_dtype(engine, name):
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            for dtype_name in DTYPES:
                check_elements(engine, name, rounding, overflow, dtype_name)


BEYOND_FLOAT32 = [
    *(get_format(f"e8m{mantissa_bits}_finite") for mantissa_bits in (1, 2, 3, 7, 10)),
    FloatFormat(name="e5m2_bias", exponent_bits=5, mantissa_bits=2, bias=-110),
    FloatFormat(name="e4m3_bias", exponent_bits=4, mantissa_bits=3, bias=-115, nan="top", infinities=False),
    FloatFormat(name="ue8m0_bias", exponent_bits=8, mantissa_bits=0, bias=120, nan="top", signed=False),
    CodebookFormat(name="book", values=(-1e39, -0.1, 0.0, 0.1, 1 / 3, 1e39)),
]
"""Formats with values that float32 does not hold: most lie above its largest number."""


@pytest.mark.parametrize("fmt", BEYOND_FLOAT32, ids=lambda fmt: fmt.name)
def test_values_beyond_float32(engine, fmt):
    """Float64 results hold the largest value that Inf saturates to; in float32 it is Inf."""
    for rounding, overflow, (dtype_name, dtype) in itertools.product(ROUNDINGS, OVERFLOWS, DTYPES.items()):
        check_elements(engine, fmt, rounding, overflow, dtype_name)
        x, (_, values) = points(fmt, dtype).to(dtype), table(fmt, rounding, overflow, dtype)
        spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow)
        for out_dtype in (torch.float64, torch.float32, torch.bfloat16):
            out = torch.empty(x.shape, dtype=out_dtype)
            engine.quantize(x, spec, words_for(rounding, len(x)), out)
            assert_same_bits(out, stored(values, out_dtype), x, what=f"{fmt.name} {rounding} {overflow} {dtype_name}")


@pytest.mark.parametrize(
    "element", [BEYOND_FLOAT32[3], BEYOND_FLOAT32[6], BEYOND_FLOAT32[-1]], ids=lambda fmt: fmt.name
)
@pytest.mark.parametrize("rule", ["floor", "rceil", "divide", "reciprocal", "encode"])
def test_elements_beyond_float32_in_blocks(engine, element, rule):
    how = {"arithmetic": rule} if rule in ("divide", "reciprocal", "encode") else {"scale_rule": rule}
    fmt = BlockFormat(name=f"{rule}_{element.name}", element=element, scaling=block_scaling((2, 8), **how))
    for matrix, rounding in itertools.product(("huge", "with_inf"), (NEAREST, Rounding(mode="stochastic"))):
        for overflow, out in itertools.product(OVERFLOWS, ("float32", "float64")):
            check_scaled(engine, matrix, fmt, rounding, overflow, "float32", out)


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
        assert_same_bits(out, stored(values, out_dtype), codes, what=f"decode {name} {out_dtype}")


# Block formats.


def small_blocks(fmt: ScaledFormat) -> ScaledFormat:
    """Give a format blocks that the small matrices fill more than once; whole extents stay whole."""
    outer = fmt.block[0] if fmt.block[0] in (None, 1) else 3
    return with_block(fmt, (outer, fmt.block[1] and 8))


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
    assert_same_bits(out, values, x, what=f"quantize {what}")
    out = torch.empty(x.shape, dtype=DTYPES[out_name])
    engine.decode(parts, spec, out)
    assert_same_bits(out, values, parts.codes, what=f"decode {what}")


def scaled_cases(number: int) -> list[tuple[str, Rounding, str, str, str]]:
    """Return matrix, rounding, overflow, dtype and output dtype, each taking its turn along the formats."""
    names = list(DTYPES)
    cases = []
    for i, matrix in enumerate(matrices()):
        turn = i + number
        dtype = names[turn // 2 % 4] if matrix != "deep" else "float64"
        cases.append((matrix, NEAREST, OVERFLOWS[turn % 2], dtype, names[turn // 3 % 4]))
        cases.append((matrix, ROUNDINGS[1 + turn % 10], OVERFLOWS[turn % 2], "float32", "float32"))
        cases.append((matrix, ROUNDINGS[1 + (turn + 5) % 10], OVERFLOWS[1 - turn % 2], names[1 + turn % 3], "float64"))
    return cases


@pytest.mark.parametrize("name", scaled_formats())
def test_scaled_formats_equal_the_oracle(engine, name):
    fmt = small_blocks(get_format(name))
    for case in scaled_cases(scaled_formats().index(name)):
        check_scaled(engine, case[0], fmt, *case[1:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", scaled_formats())
def test_scaled_formats_equal_the_oracle_in_every_way(engine, name):
    fmt = small_blocks(get_format(name))
    for matrix, rounding, overflow in itertools.product(matrices(), ROUNDINGS, OVERFLOWS):
        for dtype, out in itertools.product(DTYPES, DTYPES):
            check_scaled(engine, matrix, fmt, rounding, overflow, dtype, out)


VARIANTS = [
    *(BlockFormat(name=f"{rule}_{element}", element=get_format(element), scaling=block_scaling((2, 8), rule))
      for element in ("e4m3", "e5m2", "e2m1", "e3m2", "int8_f6", "int4")
      for rule in ("floor", "ceil", "even", "rceil")),
    *(BlockFormat(name=f"{arithmetic}_{element}_{scale}", element=get_format(element),
                  scaling=block_scaling((2, 8), scale=get_format(scale), arithmetic=arithmetic))
      for element in ("e4m3", "e2m1", "int8", "nf4") for scale in ("fp32", "bf16", "fp16", "e4m3", "e5m2", "ue4m3")
      for arithmetic in ("divide", "reciprocal", "encode")),
]  # fmt: skip


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda fmt: fmt.name)
def test_scale_rules_equal_the_oracle(engine, fmt):
    """Every scale rule and arithmetic, with scale formats that underflow and saturate; half of the matrices in turn."""
    number = VARIANTS.index(fmt)
    for i, matrix in list(enumerate(matrices()))[number % 2 :: 2]:
        dtype = "float64" if matrix == "deep" or (i + number) % 3 == 0 else "float32"
        check_scaled(engine, matrix, fmt, NEAREST, OVERFLOWS[(i + number) % 2], dtype, "float32")


@pytest.mark.parametrize("name", scaled_formats())
def test_catalogued_blocks_equal_the_oracle(engine, name):
    """Blocks of the size in the catalogue, with short last ones along both axes."""
    fmt = get_format(name)
    columns = (fmt.block[1] or 8) * 5 // 4
    x = normal(min(fmt.block[0] or 3, 16) + 1, columns, seed=5)
    expected = quantize_matrix(x.double().tolist(), fmt)
    spec = CastSpec(format=fmt, rounding=NEAREST, overflow=fmt.default_overflow)
    check_parts(name, engine.encode(x, spec, None), as_parts(expected, fmt), x)
    out = torch.empty_like(x)
    engine.quantize(x, spec, None, out)
    assert_same_bits(out, stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32), x, what=name)


@pytest.mark.slow
def test_the_finest_logarithmic_format(engine):
    """The 4096 roots of two of this format take long to compute in the format's own record."""
    for rounding in ROUNDINGS:
        check_elements(engine, "lns16_g2048", rounding, "saturate", "float32")
