"""Codes of the fast kernels against the general kernel: every format, rounding and overflow rule, hard inputs."""

import pytest
import torch

from fmtsim.cpu import elements, engine, general
from fmtsim.formats.registry import get_format
from fmtsim.ops import CastSpec, Random, RandomKey
from fmtsim.rounding.modes import Rounding
from tests.engines.cases import DETERMINISTIC, adversarial, element_formats

FORMATS = [name for name in element_formats(largest_bits=31) if name != "lns16_g2048"]
KEY = RandomKey(3, 5)


def general_codes(x: torch.Tensor, spec: CastSpec, random: Random) -> torch.Tensor:
    """Return the codes of the general kernel."""
    codes = torch.empty(x.shape, dtype=elements.code_dtype(spec.format.bits))
    elements._general(spec, random, general.encode_flat)(x.contiguous().view(-1), codes.view(-1), 0)
    return codes


def bfloat16_patterns() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def numbers(name: str) -> torch.Tensor:
    """Return every bfloat16, the values of a format, their midpoints, and the float32 neighbours of all of them."""
    points = torch.tensor(adversarial(get_format(name)), dtype=torch.float64).float()
    near = [points, *(points.nextafter(torch.tensor(side)) for side in (torch.inf, -torch.inf))]
    return torch.cat([bfloat16_patterns().float(), *near])


def cases(name: str) -> list[tuple[CastSpec, Random]]:
    fmt = get_format(name)
    return [
        (CastSpec(format=fmt, rounding=rounding, overflow=overflow), random)
        for overflow in ("saturate", "ieee")
        for rounding, random in [*((r, None) for r in DETERMINISTIC), (Rounding(mode="stochastic"), KEY)]
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_general_kernel(name: str):
    x = numbers(name)
    for spec, random in cases(name):
        expected = general_codes(x, spec, random)
        assert torch.equal(engine.encode(x, spec, random).codes, expected), spec
