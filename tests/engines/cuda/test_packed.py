# SPDX-License-Identifier: Apache-2.0
"""Packed codes of element formats by the CUDA kernels: the bytes of encoded tensors, on the host and on a GPU."""

import importlib
import itertools

import pytest
import torch

from fmtsim.casts.encoded import Encoded
from fmtsim.engines.cuda.cast import casts
from fmtsim.rounding.modes import Rounding
from tests.support.bits import assert_same_bits
from tests.support.casts import KEY, cast_spec
from tests.support.operands import wide_with_specials

cpu = importlib.import_module("fmtsim.engines.cpu")

WIDTHS = ["e2m1", "e2m3", "int5", "fp16", "nf4"]
MORE_WIDTHS = ["e4m3", "int13", "tf32", "fp32", "int7_half", "uint1"]


@pytest.mark.parametrize("name", [*WIDTHS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_WIDTHS)])
def test_packed_codes_are_those_of_encoded_tensors(device, name):
    for shape, random in itertools.product(((3, 67), (1,), (5, 64), (), (2, 3, 70), (4, 0)), (None, KEY)):
        rounding = Rounding() if random is None else Rounding(mode="stochastic")
        for dim in (-1, -2) if len(shape) > 1 else (-1,):
            x = wide_with_specials(*shape, seed=5)
            spec = cast_spec(name, rounding, dim=dim)
            if not casts.supports("encode_packed", spec, x.to(device)):
                assert random is not None and dim != -1, "only random words along another axis are left to others"
                continue
            expected = Encoded.from_parts(cpu.encode(x, spec, random), spec.format, x.shape, dim)
            assert_same_bits(
                casts.encode_packed(x.to(device), spec, random).codes.cpu(),
                expected.codes,
                what=f"{name} {shape} {dim}",
            )


TILES = [
    *itertools.product(("e2m1", "e2m3"), (torch.float32, torch.bfloat16)), ("fp16", torch.bfloat16),
    *(pytest.param(name, dtype, marks=pytest.mark.slow) for name in ("e5m6", "int4")
      for dtype in (torch.float32, torch.bfloat16)),
]  # fmt: skip


def packed(engine, x, spec, random):
    """Return packed codes, of the CPU engine or of the kernels."""
    if engine is cpu:
        return Encoded.from_parts(cpu.encode(x.cpu(), spec, random), spec.format, x.shape).codes
    return casts.encode_packed(x, spec, random).codes.cpu()


@pytest.mark.parametrize(("name", "dtype"), TILES)
def test_packed_codes_of_whole_tiles(device, name, dtype):
    """More elements than a warp takes, NaN in a few of its runs."""
    for part, random in itertools.product((slice(0, 2048), slice(2048, 5000)), (None, KEY)):
        x = wide_with_specials(5000, seed=8, dtype=dtype)[part].clone()
        spec = cast_spec(name, Rounding() if random is None else Rounding(mode="stochastic"))
        assert_same_bits(
            packed(casts, x.to(device), spec, random), packed(cpu, x, spec, random), what=f"{name} {part} {random}"
        )
