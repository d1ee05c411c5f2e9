"""Codes and scales of the fast kernels for block formats against those of the general kernel."""

import pytest
import torch

from fmtsim.cpu.cast import engine, matrices, selection
from fmtsim.cpu.runtime import pool
from fmtsim.formats.block import BlockFormat, scaled
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey
from tests.support.bits import differing
from tests.support.casts import scaled_formats

FORMATS = [name for name in scaled_formats() if isinstance(get_format(name), BlockFormat)]
KEY = RandomKey(11, 2)
ROUNDINGS = [(Rounding(), None), (Rounding(mode="stochastic"), KEY), (Rounding(mode="up"), None)]
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


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
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


def general_parts(x: torch.Tensor, spec: CastSpec, random: Random) -> EncodedParts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "encoder", lambda *_: None)
        return engine.encode(x, spec, random)


def same_parts(found: EncodedParts, expected: EncodedParts) -> bool:
    pairs = list(zip(found, expected, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs)
    return not any(differing(a, b) for a, b in pairs if a is not None and b is not None)


def check(fmt: BlockFormat, x: torch.Tensor, dim: int = -1) -> None:
    for overflow in ("saturate", "ieee"):
        for rounding, random in ROUNDINGS:
            spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow, dim=dim)
            expected = general_parts(x, spec, random)
            for threads in (1, 2):
                pool.set_num_threads(threads)
                assert same_parts(engine.encode(x, spec, random), expected), (spec, threads)


@pytest.mark.parametrize("fmt", [*map(get_format, FORMATS), *MORE], ids=lambda fmt: fmt.name)
def test_parts_are_those_of_the_general_kernel(fmt: BlockFormat):
    check(fmt, numbers(7, 2304 + 13))
    check(fmt, numbers(6, 130).t(), dim=-2)
    check(fmt, numbers(5, 96).nan_to_num(0.0, 0.0, 0.0))  # one scale for a tensor, without NaN and Inf
    for x in (torch.zeros(0, 32), torch.zeros(3, 0), torch.tensor(-1.5), torch.full((5,), -0.0)):
        check(fmt, x)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_channel"])
def test_threads_and_views(name: str):
    x = numbers(40, 4128)
    fmt = get_format(name)
    assert isinstance(fmt, BlockFormat)
    check(fmt, x)
    check(fmt, x[::2, 1:])
    check(fmt, x.view(4, 10, 4128), dim=-3)
    check(fmt, x.bfloat16())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4", "int8_channel", "int4_g128"])
def test_common_formats_have_a_fast_kernel(name: str):
    for rounding, random in ROUNDINGS[:2]:
        spec = CastSpec(format=get_format(name), rounding=rounding, overflow="saturate")
        assert selection.encoder(spec, random, 2) is not None
