"""Codes of the fast kernels against the general kernel: every format, rounding and overflow rule, hard inputs."""

from functools import cache

import pytest
import torch

from fmtsim.cpu.cast import codes, elements, engine, general, lookup
from fmtsim.cpu.runtime import pool
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import CodebookFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, Random, RandomKey
from tests.support.bits import assert_same_bits
from tests.support.casts import DETERMINISTIC, adversarial, element_formats
from tests.support.operands import normal

# Wider tables have no fast path: the general kernel would be compared with itself.
FORMATS = [name for name in element_formats(31) if get_format(name).bits <= 8 or codes.coding_of(get_format(name))]
KEY = RandomKey(3, 5)


def general_codes(x: torch.Tensor, spec: CastSpec, random: Random) -> torch.Tensor:
    """Return the codes of the general kernel."""
    result = torch.empty(x.shape, dtype=elements.code_dtype(spec.format.bits))
    elements._general(spec, random, general.encode_flat)(x.contiguous().view(-1), result.view(-1), 0)
    return result


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
        for rounding, random in [*((r, None) for r in DETERMINISTIC), (Rounding(mode="stochastic"), KEY)]
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_general_kernel(name: str):
    for spec, random in cases(name):
        x = numbers(name, every=1 if spec.rounding == Rounding() and spec.overflow == "saturate" else 61)
        expected = general_codes(x, spec, random)
        assert torch.equal(engine.encode(x, spec, random).codes, expected), spec


@pytest.mark.parametrize("name", ["nf4", "bnb_dynamic8", "lns8_g8", "int4_half", "e4m3", "int8"])
def test_a_million_bit_patterns(name: str):
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1)).int()
    x[: 1 << 19] = x[: 1 << 19] & 0x07FFFFFF | 0x3C000000  # half of them between 2**-7 and 2**9
    x = x.view(torch.float32)
    spec = CastSpec(format=get_format(name), rounding=Rounding(), overflow="saturate")
    assert torch.equal(engine.encode(x, spec, None).codes, general_codes(x, spec, None))


@pytest.mark.parametrize("name", ["nf4", "bnb_fp4", "lns8_g8", "int8_half", "p3109_k8p1ue"])
def test_looked_up_values_are_those_of_the_general_kernel(name: str):
    x = numbers(name, every=7)
    for spec, random in cases(name):
        found, expected = torch.empty(x.shape), torch.empty(x.shape)
        engine.quantize(x, spec, random, found)
        elements._general(spec, random, general.quantize_flat)(x, expected, 0)
        assert_same_bits(found, expected, what=spec)


def test_formats_that_share_codes_within_a_bucket_have_no_table():
    crowded = CodebookFormat(name="crowded", values=(0.0, 1.0, 1.001, 1.002))
    spec = CastSpec(format=crowded, rounding=Rounding(), overflow="saturate")
    assert lookup.table_of(crowded, spec.rounding, "saturate") is None
    x = torch.linspace(0.999, 1.003, 100)
    assert torch.equal(engine.encode(x, spec, None).codes, general_codes(x, spec, None))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8", "nf4", "bf16"])
@pytest.mark.parametrize("rounding", [Rounding(), Rounding(mode="stochastic")], ids=["nearest", "stochastic"])
def test_views_odd_lengths_and_threads(name: str, rounding: Rounding):
    whole = normal(3, 44_001, seed=2)
    spec = CastSpec(format=get_format(name), rounding=rounding, overflow="saturate")
    random = KEY if rounding.mode == "stochastic" else None
    for x in (whole, whole.t(), whole[:, 1:], whole[::2, ::3], whole[0, :1], whole[:0], whole[0, 0], whole.bfloat16()):
        expected = general_codes(x.float(), spec, random)
        for threads in (1, 2):
            pool.set_num_threads(threads)
            found = engine.encode(x, spec, random).codes
            assert found.shape == x.shape and found.is_contiguous() and torch.equal(found, expected)
