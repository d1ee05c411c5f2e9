# SPDX-License-Identifier: Apache-2.0
"""Values, codes and scales of the kernels against the torch engine: every format, rounding and overflow rule."""

from functools import cache

import pytest
import torch

from fmtsim.engines import torch_engine
from fmtsim.engines.cpu.cast import codes, engine, lookup, matrices
from fmtsim.engines.cpu.cast.words import integers_of
from fmtsim.engines.cpu.runtime import pool
from fmtsim.engines.torch_engine.philox import random_integers
from fmtsim.formats.block import BlockFormat, scaled
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import CodebookFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey
from tests.support.bits import assert_same_bits, differing
from tests.support.casts import DETERMINISTIC, adversarial, element_formats, scaled_formats
from tests.support.operands import normal

# Wider tables have no kernel.
FORMATS = [name for name in element_formats(31) if get_format(name).bits <= 8 or codes.coding_of(get_format(name))]
KEY = RandomKey(3, 5)
STOCHASTIC = (
    Rounding(mode="stochastic"),
    Rounding(mode="stochastic", random_bits=5),
    Rounding(mode="stochastic", random_bits=8, layout="cvt_rs"),
    Rounding(mode="stochastic", random_bits=13, layout="cvt_rs"),
)


def bfloat16_patterns() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@cache
def numbers(name: str, every: int = 1) -> torch.Tensor:
    """Return every bfloat16 or some, the values of a format, their midpoints, and the float32 neighbours of these."""
    points = torch.tensor(adversarial(get_format(name)), dtype=torch.float64).float()
    near = [points, *(points.nextafter(torch.tensor(side)) for side in (torch.inf, -torch.inf))]
    return torch.cat([bfloat16_patterns()[::every].float(), *near])


def cases(name: str) -> list[tuple[CastSpec, Random]]:
    fmt = get_format(name)
    return [
        (CastSpec(format=fmt, rounding=rounding, overflow=overflow), random)
        for overflow in ("saturate", "ieee")
        for rounding, random in [*((r, None) for r in DETERMINISTIC), *((r, KEY) for r in STOCHASTIC)]
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_torch_engine(name: str):
    """Of P3109's formats, which differ in four numbers, a third of the cases in turn."""
    every = 3 if name.startswith("p3109") else 1
    for spec, random in cases(name)[FORMATS.index(name) % every :: every]:
        x = numbers(name, every=1 if spec.rounding == Rounding() and spec.overflow == "saturate" else 61)
        if engine.supports("encode", spec, x):
            expected = torch_engine.encode(x, spec, random).codes
            assert torch.equal(engine.encode(x, spec, random).codes, expected), spec


@pytest.mark.parametrize("name", ["e4m3", "bf16", "int8"])
def test_given_words_are_those_that_would_be_drawn(name: str):
    x = numbers(name, every=61)
    for rounding in STOCHASTIC:
        spec = CastSpec(format=get_format(name), rounding=rounding, overflow="saturate")
        words = integers_of(rounding, KEY, x.shape).view(x.shape)
        assert torch.equal(words, random_integers(KEY, rounding, 0, x.numel(), "cpu"))
        assert torch.equal(engine.encode(x, spec, words).codes, engine.encode(x, spec, KEY).codes)


@pytest.mark.parametrize("name", ["e4m3", "bf16", "int8", "nf4", "int8_half", "lns8_g8"])
def test_common_formats_have_a_kernel(name: str):
    for verb in ("quantize", "encode"):
        for rounding in DETERMINISTIC if name == "e4m3" else DETERMINISTIC[:1]:
            spec = CastSpec(format=get_format(name), rounding=rounding, overflow="saturate")
            assert engine.supports(verb, spec, torch.zeros(1)), (verb, spec)


@pytest.mark.parametrize("name", ["nf4", "bnb_dynamic8", "lns8_g8", "int4_half", "e4m3", "int8"])
def test_a_million_bit_patterns(name: str):
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1)).int()
    x[: 1 << 19] = x[: 1 << 19] & 0x07FFFFFF | 0x3C000000  # half of them between 2**-7 and 2**9
    x = x.view(torch.float32)
    spec = CastSpec(format=get_format(name), rounding=Rounding(), overflow="saturate")
    assert torch.equal(engine.encode(x, spec, None).codes, torch_engine.encode(x, spec, None).codes)


@pytest.mark.parametrize("name", ["nf4", "bnb_fp4", "lns8_g8", "int8_half", "p3109_k8p1ue"])
def test_values_are_those_of_the_torch_engine(name: str):
    x = numbers(name, every=7)
    for spec, random in cases(name):
        found, expected = torch.empty(x.shape), torch.empty(x.shape)
        if engine.supports("quantize", spec, x, found):
            engine.quantize(x, spec, random, found)
            torch_engine.quantize(x, spec, random, expected)
            assert_same_bits(found, expected, what=spec)


def test_formats_that_share_codes_within_a_bucket_have_no_table():
    crowded = CodebookFormat(name="crowded", values=(0.0, 1.0, 1.001, 1.002))
    spec = CastSpec(format=crowded, rounding=Rounding(), overflow="saturate")
    assert lookup.table_of(crowded, spec.rounding, "saturate") is None
    assert not engine.supports("encode", spec, torch.zeros(1))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8", "nf4", "bf16"])
@pytest.mark.parametrize("rounding", [Rounding(), Rounding(mode="stochastic")], ids=["nearest", "stochastic"])
def test_views_odd_lengths_and_threads(name: str, rounding: Rounding):
    whole = normal(3, 44_001, seed=2)
    spec = CastSpec(format=get_format(name), rounding=rounding, overflow="saturate")
    random = KEY if rounding.mode == "stochastic" else None
    for x in (whole, whole.t(), whole[:, 1:], whole[::2, ::3], whole[0, :1], whole[:0], whole[0, 0], whole.bfloat16()):
        if not engine.supports("encode", spec, x):
            continue
        expected = torch_engine.encode(x, spec, random).codes
        for threads in (1, 2):
            pool.set_num_threads(threads)
            found = engine.encode(x, spec, random).codes
            assert found.shape == x.shape and found.is_contiguous() and torch.equal(found, expected)


BLOCK_FORMATS = [name for name in scaled_formats() if isinstance(get_format(name), BlockFormat)]
BLOCK_KEY = RandomKey(11, 2)
ROUNDINGS = [
    (Rounding(), None),
    (Rounding(mode="stochastic"), BLOCK_KEY),
    (Rounding(mode="stochastic", random_bits=13, layout="cvt_rs"), BLOCK_KEY),
    (Rounding(mode="up"), None),
]
MORE = [
    scaled(get_format("nf4"), (1, 64)),
    scaled(get_format("bnb_dynamic8"), (1, 256)),
    scaled(get_format("lns8_g8"), (1, None)),
    scaled(get_format("e4m3"), (2, 24)),
    scaled(get_format("e5m2"), (None, None)),
    scaled(get_format("int8"), (None, None)),
    scaled(get_format("e2m1"), (3, 7), "rceil"),
    scaled(get_format("e3m2"), (1, 48), "ceil"),
    scaled(get_format("e2m3"), (1, None), "even"),
    scaled(get_format("fp16"), (1, 128)),
]


def blocks_of_numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return blocks of every magnitude, with ties, zeros and, in some blocks, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (rows, -(-columns // 8)), generator=generator).repeat_interleave(8, 1)[:, :columns]
    x[0] = (x[0] * 4).round() / 8
    x[1] = x[1].bfloat16().float()
    x[2, : columns // 2] *= 2.0 ** torch.randint(-140, 115, (columns // 2,), generator=generator)
    x[3, : columns // 2] = torch.where(x[3, : columns // 2] < 0, 0.0, -0.0)
    for place, value in ((5, torch.nan), (columns // 2, torch.inf), (columns - 1, -torch.inf)):
        x[4, place] = value
    return x


def same_parts(found: EncodedParts, expected: EncodedParts) -> bool:
    pairs = list(zip(found, expected, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs)
    return not any(differing(a, b) for a, b in pairs if a is not None and b is not None)


def check(fmt: BlockFormat, x: torch.Tensor, dim: int = -1) -> None:
    for overflow in ("saturate", "ieee"):
        for rounding, random in ROUNDINGS:
            spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow, dim=dim)
            if engine.supports("encode", spec, x):
                check_codes(x, spec, random)
            if engine.supports("quantize", spec, x, torch.empty(0)):
                check_values(x, spec, random)


def check_codes(x: torch.Tensor, spec: CastSpec, random: Random) -> None:
    expected = torch_engine.encode(x, spec, random)
    for threads in (1, 2):
        pool.set_num_threads(threads)
        assert same_parts(engine.encode(x, spec, random), expected), (spec, threads)


def check_values(x: torch.Tensor, spec: CastSpec, random: Random) -> None:
    found, expected = (x.float().clone() for _ in range(2))  # in place where that is x's dtype
    engine.quantize(found if x.dtype == torch.float32 else x, spec, random, found)
    torch_engine.quantize(x, spec, random, expected)
    assert_same_bits(found, expected, what=spec)


@pytest.mark.parametrize("fmt", [*map(get_format, BLOCK_FORMATS), *MORE], ids=lambda fmt: fmt.name)
def test_parts_and_values_are_those_of_the_torch_engine(fmt: BlockFormat):
    check(fmt, blocks_of_numbers(7, 2304 + 13))
    check(fmt, blocks_of_numbers(6, 130).t(), dim=-2)
    check(fmt, blocks_of_numbers(5, 96).nan_to_num(0.0, 0.0, 0.0))  # one scale for a tensor, without NaN and Inf
    for x in (torch.zeros(0, 32), torch.zeros(3, 0), torch.tensor(-1.5), torch.full((5,), -0.0)):
        check(fmt, x)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_channel"])
def test_threads_and_views(name: str):
    x = blocks_of_numbers(40, 4128)
    fmt = get_format(name)
    assert isinstance(fmt, BlockFormat)
    check(fmt, x)
    check(fmt, x[::2, 1:])
    check(fmt, x.view(4, 10, 4128), dim=-3)
    check(fmt, x.bfloat16())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4", "int8_channel", "int4_g128"])
def test_common_formats_have_a_fast_kernel(name: str):
    for rounding, _ in ROUNDINGS[:2]:
        spec = CastSpec(format=get_format(name), rounding=rounding, overflow="saturate")
        assert matrices.encoder(spec) is not None
