# SPDX-License-Identifier: Apache-2.0
"""Values that are rounded once more, to 16 bits that do not hold them: the CPU's kernels against the torch engine."""

import pytest
import torch

import fmtsim
from fmtsim.engines import cpu, torch_engine
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, RandomKey
from tests.support.bits import assert_same_bits

NAMES = ("fp16", "bf16", "tf32", "e8m13", "int8", "nf4", "mxint8", "mxfp8_e5m2", "nvfp4", "int8_channel", "e4m3_tensor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_bits(name, dtype):
    fmt = fmtsim.get_format(name)
    for mode in ("nearest_even", "stochastic"):
        if name == "nf4" and mode == "stochastic":
            continue
        spec = CastSpec(format=fmt, rounding=Rounding(mode=mode), overflow=fmt.default_overflow)
        key = RandomKey(1, 2) if mode == "stochastic" else None
        for scale in (1.0, 1e-39, 1e-6, 3e4, 1e38):
            x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * scale
            x[3, 5], x[40, 7], x[20, 9], x[5] = torch.inf, -0.0, torch.nan, 0
            found, wanted = torch.empty(64, 96, dtype=dtype), torch.empty(64, 96, dtype=dtype)
            assert cpu.supports("quantize", spec, x, found)
            cpu.quantize(x, spec, key, found)
            torch_engine.quantize(x, spec, key, wanted)
            assert_same_bits(found, wanted, x)


def test_products_that_float32_would_round_to_the_middle():
    """A product lies beside the middle of two bfloat16 numbers; float32 rounds it there, and then it goes to even."""
    codes = torch.arange(1, 128, dtype=torch.int8)
    middle = 1 + (2 * torch.arange(127, dtype=torch.float64) + 1) / 256
    scales = (middle / codes).float()
    spec = CastSpec(format=fmtsim.get_format("int8_channel"), rounding=Rounding(), overflow="saturate")
    parts = EncodedParts(codes.view(-1, 1), scales.view(-1, 1))
    found, wanted, wide = (
        torch.empty(127, 1, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    )
    cpu.decode(parts, spec, found)
    torch_engine.decode(parts, spec, wanted)
    cpu.decode(parts, spec, wide)
    assert_same_bits(found, wanted)
    assert not torch.equal(found, wide.bfloat16())
