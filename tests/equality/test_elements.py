# SPDX-License-Identifier: Apache-2.0
"""Casts of element formats by every engine: the oracle's bits at hard inputs, and each other's at many more."""

import itertools
import math
from fractions import Fraction
from functools import cache

import pytest
import torch

from fmtsim.casts.ops import code_dtype
from fmtsim.cpu.cast import codes as cpu_codes
from fmtsim.cpu.cast import engine as cpu_cast
from fmtsim.formats import element
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding import oracle
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import decode_value, encode_value
from fmtsim.spec.cast import CastSpec, EncodedParts
from tests.equality.engines import CUDA_ENGINES, Engine, check_with_torch, with_engines
from tests.support.bits import assert_same_bits, differing, stored
from tests.support.casts import (
    DETERMINISTIC,
    KEY,
    ROUNDINGS,
    adversarial,
    cast_spec,
    element_formats,
    some_codes,
    words_for,
)
from tests.support.operands import DTYPES

OVERFLOWS = ("saturate", "ieee")
NEAREST, STOCHASTIC = Rounding(), Rounding(mode="stochastic")

# The 4096 roots of this format take minutes to compute; its own test says what it does.
ELEMENTS = [name for name in element_formats() if name != "lns16_g2048"]
# One of each kind, for kernels that are compiled first: how it rounds, where it ends, what it lacks.
SAMPLE = ["e4m3", "e8m0", "fp64", "int8", "int4_half", "nf4", "lns8_g8"]


@cache
def points(fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the adversarial inputs of a format, and their roundings to the narrower dtypes, that a dtype holds."""
    x = torch.tensor(adversarial(fmt), dtype=torch.float64)
    all_ = torch.cat([x, *(x.to(narrow).double() for narrow in DTYPES.values())]).view(torch.int64).unique()
    x = all_.view(torch.float64)
    return x[(x.to(dtype).double() == x) | x.isnan()]


def as_codes(codes: list[int], fmt: ElementFormat) -> torch.Tensor:
    dtype = code_dtype(fmt.bits)
    return torch.tensor([c - (1 << 64) if dtype == torch.int64 and c >> 63 else c for c in codes], dtype=dtype)


@cache
def table(
    fmt: ElementFormat, rounding: Rounding, overflow: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's codes and float64 values for the points of a format."""
    x = points(fmt, dtype).tolist()
    words = words_for(rounding, len(x))
    drawn = [None] * len(x) if words is None else words.tolist()
    codes = [encode_value(v, fmt, rounding, overflow, w) for v, w in zip(x, drawn, strict=True)]
    value_of = {code: decode_value(code, fmt) for code in set(codes)}
    return as_codes(codes, fmt), torch.tensor([value_of[c] for c in codes], dtype=torch.float64)


def holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Return whether a dtype represents all these values."""
    return not differing(stored(stored(values, dtype).double(), torch.float64), values)


def check_elements(
    engine: Engine, fmt: ElementFormat, rounding: Rounding, overflow: str, dtype_name: str, out_dtypes=()
) -> None:
    """Compare quantize and encode of one format with the oracle's table, for the points that a dtype holds.

    Where words are random, compare also what the engine draws of a key with what torch operations draw of it.
    """
    dtype = DTYPES[dtype_name]
    codes, values = table(fmt, rounding, overflow, dtype)
    x = points(fmt, dtype).to(dtype)
    words = words_for(rounding, len(x))
    holding = next(d for d in (dtype, torch.float32, torch.float64) if holds(d, values))
    spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow)
    what = f"{fmt.name} {rounding} {overflow} {dtype_name}"
    for out_dtype in (holding, *out_dtypes):
        out = torch.empty(x.shape, dtype=out_dtype)
        engine.quantize(x, spec, words, out)
        assert_same_bits(out, stored(values, out_dtype), x, what=f"quantize {what} to {out_dtype}")
    parts = engine.encode(x, spec, words)
    assert_same_bits(parts.codes, codes, x, what=f"encode {what}")
    assert parts[1:] == (None, None, None)
    if words is not None and engine.name != "torch":
        check_with_torch(engine, x, spec, KEY, holding)


@with_engines(ELEMENTS, on_cuda=SAMPLE)
def test_elements_equal_the_oracle(engine, fmt):
    """Every rounding, and overflow, float32 or another dtype in turn; the whole product is exhaustive.

    Of the 120 formats of P3109, which differ in four numbers, every second rounding in turn.
    """
    number = ELEMENTS.index(fmt)
    every = 4 if fmt.startswith("p3109") else 2
    compiles = engine.name in CUDA_ENGINES and fmt != "e4m3"  # a kernel for each pair of dtypes
    for i, rounding in enumerate(ROUNDINGS):
        for j, overflow in enumerate(OVERFLOWS):
            if (i + j + number) % every:
                continue
            float32 = compiles or (i + number // 4) % 2
            dtype = "float32" if float32 else list(DTYPES)[1 + (i // 2 + number // 8) % 3]
            check_elements(engine, get_format(fmt), rounding, overflow, dtype)


@pytest.mark.exhaustive
@with_engines(ELEMENTS)
def test_elements_equal_the_oracle_in_every_dtype(engine, fmt):
    for rounding, overflow, dtype_name in itertools.product(ROUNDINGS, OVERFLOWS, DTYPES):
        check_elements(engine, get_format(fmt), rounding, overflow, dtype_name)


BEYOND_FLOAT32 = [
    *(get_format(f"e8m{mantissa_bits}_finite") for mantissa_bits in (1, 2, 3, 7, 10)),
    FloatFormat(name="e5m2_bias", exponent_bits=5, mantissa_bits=2, bias=-110),
    FloatFormat(name="e4m3_bias", exponent_bits=4, mantissa_bits=3, bias=-115, nan="top", infinities=False),
    FloatFormat(name="ue8m0_bias", exponent_bits=8, mantissa_bits=0, bias=120, nan="top", signed=False),
    CodebookFormat(name="book", values=(-1e39, -0.1, 0.0, 0.1, 1 / 3, 1e39)),
]
"""Formats with values that float32 does not hold: most lie above its largest number."""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@with_engines(BEYOND_FLOAT32, on_cuda=["e8m7_finite", "e5m2_bias"])
def test_values_beyond_float32(engine, fmt, every):
    """Float64 results hold the largest value that Inf saturates to; in float32 it is Inf.

    Every rounding and overflow, with one dtype of x in turn; with all of them in the slow test.
    """
    compiles = engine.name in CUDA_ENGINES
    roundings = [NEAREST, STOCHASTIC, Rounding(mode="up")] if compiles else ROUNDINGS
    dtypes = ["float32", "bfloat16"] if compiles else DTYPES
    outs = (torch.float64, torch.float32, torch.bfloat16)
    for i, (rounding, overflow) in enumerate(itertools.product(roundings, OVERFLOWS)):
        turn = i + i // len(dtypes) + BEYOND_FLOAT32.index(fmt)  # which meets both overflows with every dtype
        for dtype_name in [*dtypes][turn % min(every, len(dtypes)) :: every]:
            check_elements(engine, fmt, rounding, overflow, dtype_name, outs)


OWN = [
    FloatFormat(name="flushed", exponent_bits=4, mantissa_bits=3, has_subnormals=False),
    FloatFormat(name="flushed_unsigned", exponent_bits=4, mantissa_bits=2, signed=False, has_subnormals=False),
    CodebookFormat(name="no_zero", values=(-1.0, 1.0)),
    CodebookFormat(name="lopsided", values=(-1.0, 3.0, 4.0, -8.0, -12.0)),
]
"""Records of a kind that the catalogue lacks."""


@with_engines(OWN, on_cuda=["flushed"])
def test_records_that_the_catalogue_lacks_equal_the_oracle(engine, fmt):
    for rounding, overflow in itertools.product([NEAREST] if engine.name in CUDA_ENGINES else ROUNDINGS, OVERFLOWS):
        check_elements(engine, fmt, rounding, overflow, "float32")


@with_engines(ELEMENTS, on_cuda=[*SAMPLE, "e2m1", "fp16", "int8_full", "int13"])
def test_decoding_equals_the_oracle(engine, fmt):
    fmt = get_format(fmt)
    some = some_codes(fmt)
    values = torch.tensor([decode_value(code, fmt) for code in some], dtype=torch.float64)
    for out_dtype in [dtype for dtype in DTYPES.values() if holds(dtype, values)]:
        codes, out = as_codes(some, fmt), torch.empty(len(some), dtype=out_dtype)
        engine.decode(EncodedParts(codes), cast_spec(fmt, overflow="ieee"), out)
        assert_same_bits(out, stored(values, out_dtype), codes, what=f"decode {fmt.name} {out_dtype}")


@pytest.mark.slow
def test_the_finest_logarithmic_format(engine):
    """The 4096 roots of two of this format take long to compute in the format's own record."""
    for rounding in ROUNDINGS:
        check_elements(engine, get_format("lns16_g2048"), rounding, "saturate", "float32")


def test_logarithmic_values_that_share_a_float32_share_the_first_code(monkeypatch):
    """2**(k / 2**23) has the same float32 for k = 1 and 2, and for 4 and 5; its roots take long to compute."""
    values = [1 + n * 2.0**-23 for n in (0, 1, 1, 2, 3, 3, 4, 5)]
    middles = [1 + (k + 0.5) * math.log(2) * 2.0**-23 for k in range(7)]
    monkeypatch.setattr(element, "_log_values", lambda gamma, count, step, bits: tuple(
        values if bits == 24 else [middle for middle in middles for _ in range(2)]))  # fmt: skip
    monkeypatch.setattr(oracle, "_log_magnitudes", lambda fmt: [Fraction(value) for value in values])
    monkeypatch.setattr(oracle, "_log_thresholds", lambda fmt: [Fraction(middle) for middle in middles])
    fmt = LogFormat(name="close", bits=4, gamma=1 << 23)
    x = [1 + n * 2.0**-24 for n in range(11)]
    by_hand = {"nearest_even": [0, 1, 1, 1, 3, 4, 4, 4, 6, 6, 7], "to_odd": [0, 1, 1, 1, 3, 3, 4, 6, 6, 7, 7]}
    for rounding in DETERMINISTIC:
        codes = [encode_value(v, fmt, rounding) for v in x]
        assert codes == by_hand.get(rounding.mode, codes), rounding
        cast = CastSpec(format=fmt, rounding=rounding, overflow="saturate")
        for engine in map(Engine, ("torch", "cpu")):
            found = engine.encode(torch.tensor(x, dtype=torch.float64), cast, None)
            assert found.codes.tolist() == codes, (engine.name, rounding)


# Many numbers: the CPU's kernels against torch operations.

MANY_ROUNDINGS = [
    *DETERMINISTIC,
    STOCHASTIC,
    Rounding(mode="stochastic", random_bits=5),
    Rounding(mode="stochastic", random_bits=8, layout="cvt_rs"),
    Rounding(mode="stochastic", random_bits=13, layout="cvt_rs"),
]
MILLION = ("nf4", "bnb_dynamic8", "lns8_g8", "int4_half", "e4m3", "int8")
VALUES = ("nf4", "bnb_fp4", "lns8_g8", "int8_half", "p3109_k8p1ue")
TWICE_ROUNDED = ("fp16", "bf16", "tf32", "e8m13", "int8", "nf4")


@cache
def many_numbers(name: str, every: int = 1) -> torch.Tensor:
    """Return every bfloat16 or some, the values of a format, their midpoints, and the float32 neighbours of these."""
    hard = torch.tensor(adversarial(get_format(name)), dtype=torch.float64).float()
    near = [hard, *(hard.nextafter(torch.tensor(side)) for side in (torch.inf, -torch.inf))]
    bfloat16s = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.cat([bfloat16s[::every].float(), *near])


def bit_patterns() -> torch.Tensor:
    """Return a million float32 numbers of any bits, half of them between 2**-7 and 2**9."""
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1)).int()
    x[: 1 << 19] = x[: 1 << 19] & 0x07FFFFFF | 0x3C000000
    return x.view(torch.float32)


@with_engines([name for name in element_formats(31) if name != "lns16_g2048"], engines=["cpu"])
def test_many_numbers_have_the_codes_of_torch_operations(engine, fmt):
    """Of P3109's formats, which differ in four numbers, a third of the cases in turn."""
    every = 3 if fmt.startswith("p3109") else 1
    cases = list(itertools.product(OVERFLOWS, MANY_ROUNDINGS))
    for overflow, rounding in cases[ELEMENTS.index(fmt) % every :: every]:
        spec = cast_spec(fmt, rounding, overflow=overflow)
        usual = rounding == NEAREST and overflow == "saturate"
        if cpu_cast.supports("encode", spec, torch.zeros(1)):
            x = many_numbers(fmt, every=1 if usual else 61)
            random = KEY if rounding.mode == "stochastic" else None
            check_with_torch(engine, x, spec, random, *[torch.float32] * (fmt in VALUES))
            if usual and fmt in MILLION:
                check_with_torch(engine, bit_patterns(), spec, random)


@with_engines(TWICE_ROUNDED, engines=["cpu"])
def test_values_are_rounded_once_more_to_16_bits(engine, fmt):
    """Results in a dtype that does not hold them."""
    for mode, scale, dtype in itertools.product(
        ("nearest_even", "stochastic"), (1.0, 1e-39, 1e-6, 3e4, 1e38), (torch.bfloat16, torch.float16)
    ):
        if (fmt, mode) == ("nf4", "stochastic"):
            continue
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * scale
        x[3, 5], x[40, 7], x[20, 9], x[5] = torch.inf, -0.0, torch.nan, 0
        spec = cast_spec(fmt, mode)
        assert cpu_cast.supports("quantize", spec, x, x.to(dtype))
        check_with_torch(engine, x, spec, KEY if mode == "stochastic" else None, dtype)


def test_formats_that_share_codes_within_a_bucket_have_no_table():
    crowded = CodebookFormat(name="crowded", values=(0.0, 1.0, 1.001, 1.002))
    assert cpu_codes.table_of(crowded, NEAREST, "saturate") is None
    assert not cpu_cast.supports("encode", cast_spec(crowded), torch.zeros(1))
