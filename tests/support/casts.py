# SPDX-License-Identifier: Apache-2.0
"""Casts: roundings, inputs that are hard to round, and the encodings of oracle and engines side by side."""

import itertools
import math
import random
from functools import cache

import pytest
import torch

from fmtsim.casts.ops import code_dtype
from fmtsim.formats.block import LogTileFormat, ScaledFormat
from fmtsim.formats.element import CodebookFormat, ElementFormat, LogFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.rounding.oracle import _log_thresholds, decode_value
from fmtsim.scaling.oracle import Quantized
from fmtsim.spec.cast import CastSpec, EncodedParts, RandomKey
from tests.support.bits import assert_same_bits

OUT_FORMATS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
KEY = RandomKey(0x0123456789ABCDEF, 0xFEDCBA9876543210)
DETERMINISTIC = [Rounding(mode=mode) for mode in MODES if mode != "stochastic"]
STOCHASTIC = [
    Rounding(mode="stochastic", random_bits=3, variant="a"),
    Rounding(mode="stochastic", random_bits=3, variant="b"),
    Rounding(mode="stochastic", random_bits=3, variant="c"),
    Rounding(mode="stochastic"),
]
ROUNDINGS = DETERMINISTIC + STOCHASTIC

FLT_MAX = (2.0 - 2.0**-23) * 2.0**127
SPECIALS = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1e38, -1e38, 1e-45, -1e-45, 1e-40, 2.0**-126, 2.0**-127, 2.0**-149,
    FLT_MAX, -FLT_MAX, 1.0, -1.0, 0.1, -0.1, 3.0, 65504.0, 2.0**-14, 2.0**-24, 1e300, -1e300, 1e-300, 5e-324,
]  # fmt: skip


def slow_but(quick: int, *cases: object) -> list[object]:
    """Return cases of a parametrised test of which all but the first ``quick`` are slow tests."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases[quick:])
    return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.slow) for case in values)]


def element_formats(largest_bits: int = 64, smallest_bits: int = 1) -> list[str]:
    """Return the names of the catalogued element formats within a range of widths."""
    names = [name for kind in ("float", "int", "codebook", "log") for name in list_formats(kind)]
    return [name for name in names if smallest_bits <= get_format(name).bits <= largest_bits]


def scaled_formats() -> list[str]:
    """Return the names of the catalogued block formats and tiles."""
    return [name for kind in ("block", "log_tile") for name in list_formats(kind)]


def some_codes(fmt: ElementFormat) -> list[int]:
    """Return all codes of a format of 8 bits or fewer, and those at the seams of the code space of a wider one."""
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    if count <= 256:
        return list(range(count))
    seams = {
        base + delta
        for k in range(fmt.bits + 1)
        for base in (1 << k, (1 << fmt.bits) - (1 << k))
        for delta in (-2, -1, 0, 1, 2)
    }
    return sorted(code for code in seams if 0 <= code < count)


@cache
def adversarial(fmt: ElementFormat) -> tuple[float, ...]:
    """Return values of a format, what lies half-way between them, and the float32 and float64 neighbours of both."""
    values = sorted({decode_value(code, fmt) for code in some_codes(fmt)} - {math.inf, -math.inf})
    values = sorted(v for v in values if v == v)
    points = set(values)
    for low, high in zip(values, values[1:], strict=False):
        points.add(low / 2 + high / 2)
    if isinstance(fmt, LogFormat):
        points |= {float(v) for v in _log_thresholds(fmt)[:300]}
    near = {p * (1 + s * 2.0**-e) for p in points for s in (-1, 1) for e in (23,)}
    between = itertools.cycle((0.40625, 0.6875, 0.8125))  # sixteenths with and without a rest, odd and even ones
    near |= {low + (high - low) * part for low, high, part in zip(values, values[1:], between, strict=False)}
    for edge in (values[0], values[-1], min(abs(v) for v in values if v)):
        near |= {edge * f for f in (-1, 0.25, 0.5, 0.75, 1.015625, 1.03125, 1.0625, 1.125, 1.25, 1.5, 2)}
        near |= {math.nextafter(edge, side) for side in (-math.inf, math.inf)}
    near = {v for v in near if math.isfinite(v)}
    ordered = sorted(points | near | {v for v in SPECIALS if v == v and v != 0.0})
    return (0.0, -0.0, math.nan, *(p for p in ordered if p != 0.0))


WIDTH = 21
"""Columns of the matrices below: two full blocks of 8 and a short one of 5."""


@cache
def matrices() -> dict[str, tuple[tuple[float, ...], ...]]:
    """Return small matrices for block formats, each with one kind of trouble."""
    generator = random.Random(7)
    normal = [[generator.gauss(0.0, 1.0) for _ in range(WIDTH)] for _ in range(4)]
    # Largest magnitudes at and next to powers of two and the largest values of elements, with ties below them.
    tops = [4.0, 3.9999998, 448.0, 448.00003, 6.0, 7.0, 7.5, 127.0, 1.9999999, 1.75, 57344.0, 61440.0]
    ties = [[top * (i * 0.0625 - 0.625) if i else top for i in range(WIDTH)] for top in tops[:4]]
    mixed = [
        [tops[(i // 8 + 3 * j) % len(tops)] * (1.0 - (i % 8) * 0.03125 * j) for i in range(WIDTH)] for j in range(4)
    ]
    tiny = [0.0, -0.0, 1e-45, -1e-45, 2e-39, 2.0**-127, -(2.0**-127), 2.0**-126, 1e-40, -3e-38]
    small = [[tiny[(i * (j + 1)) % len(tiny)] * (i < 16 or j > 1) for i in range(WIDTH)] for j in range(4)]
    small[0][:8] = [0.0, -0.0] * 4
    huge = [[generator.uniform(-1, 1) * (FLT_MAX if i % 3 else 1e30) for i in range(WIDTH)] for _ in range(4)]
    huge[1][3], huge[2][:8], huge[3][9] = FLT_MAX, [1e38] * 8, -FLT_MAX
    spread = [[(-1) ** i * 10.0 ** (8 - i % 8 * 6 + j) for i in range(WIDTH)] for j in range(4)]
    with_nan = [list(row) for row in normal]
    with_nan[0][2], with_nan[1][8:16], with_nan[2][20] = math.nan, [math.nan] * 8, -math.nan
    with_inf = [list(row) for row in normal]
    with_inf[0][1], with_inf[1][8:16], with_inf[2][20], with_inf[3][3] = math.inf, [-math.inf] * 8, -math.inf, math.inf
    with_inf[3][:3] = [0.0] * 3
    deep = [[generator.gauss(0.0, 1.0) * 10.0 ** (75 * (j - 2)) for _ in range(WIDTH)] for j in range(4)]
    deep[0][:3], deep[3][:3] = [5e-324, -1e-300, 0.0], [1e300, -1e308, 1.0]
    named = {
        "normal": normal, "ties": ties, "mixed": mixed, "small": small, "huge": huge, "spread": spread,
        "with_nan": with_nan, "with_inf": with_inf, "deep": deep, "zeros": [[0.0, -0.0, 0.0] * 7] * 2,
    }  # fmt: skip
    return {name: tuple(tuple(row) for row in rows) for name, rows in named.items()}


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
        assert_same_bits(getattr(got, field), getattr(expected, field), x, what=f"{what}: {field}")


def cast_spec(fmt, rounding="nearest_even", dim=-1, overflow=None, **options) -> CastSpec:
    """Return the record of a cast to a format or its name; ``options`` are those of Rounding."""
    fmt = get_format(fmt) if isinstance(fmt, str) else fmt
    rounding = rounding if isinstance(rounding, Rounding) else Rounding(mode=rounding, **options)
    return CastSpec(format=fmt, rounding=rounding, overflow=overflow or fmt.default_overflow, dim=dim)
