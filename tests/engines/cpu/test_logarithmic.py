# SPDX-License-Identifier: Apache-2.0
"""Kernels for LogFMT tiles against the torch engine, bit by bit: codes, steps, lowest logarithms and values."""

import pytest
import torch

from fmtsim.engines import cpu, torch_engine
from fmtsim.engines.cpu.runtime import pool
from fmtsim.formats.block import LogTileFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.support.bits import assert_same_bits

ROUNDINGS = (Rounding(), Rounding(mode="stochastic"), Rounding(mode="stochastic", random_bits=8))


def tensors(*shape: int) -> list[torch.Tensor]:
    """Return numbers of all sizes, special ones among them, and tiles of zeros, of one magnitude and of NaN."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    strange = x.clone()
    for start, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan)):
        strange.view(-1)[start :: 7 + 9 * start] = value
    near = 1 + 1e-6 * torch.rand(shape, generator=generator)
    alike = [torch.full(shape, value) for value in (0.0, 3.0, torch.nan, -1e-45)]
    return [x, strange, x * 1e-42, near, *alike]


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("bits", [3, 8, 11])
@pytest.mark.parametrize("block", [(1, 128), (3, 5), (None, None)])
def test_bits(block, bits, rounding, monkeypatch):
    monkeypatch.setattr(pool, "_GRAIN", 64)
    monkeypatch.setattr(pool, "_threads", 3)
    key = RandomKey(3, 4) if rounding.mode == "stochastic" else None
    fmt = LogTileFormat(name="tile", bits=bits, block=block)
    for shape, dim in (((4, 150), -1), ((7,), -1), ((2, 3, 20), -2)):
        spec = CastSpec(format=fmt, rounding=rounding, overflow="saturate", dim=dim)
        for x in (each.to(dtype) for each in tensors(*shape) for dtype in (torch.float32, torch.bfloat16)):
            assert cpu.supports("quantize", spec, x, x)
            found, wanted = cpu.encode(x, spec, key), torch_engine.encode(x, spec, key)
            for one, other in zip(found, wanted, strict=True):
                assert_same_bits(one, other)
            for dtype in (torch.float32, torch.float64, torch.float16):
                values, expected = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
                cpu.decode(found, spec, values)
                torch_engine.decode(wanted, spec, expected)
                assert_same_bits(values, expected)


def test_a_process_that_flushes_subnormals():
    spec = CastSpec(format=LogTileFormat(name="tile", bits=8), rounding=Rounding(), overflow="saturate")
    x = torch.arange(1, 129).to(torch.int32).view(torch.float32)  # subnormal numbers
    wanted, values = cpu.encode(x, spec, None), torch.empty(128)
    cpu.decode(wanted, spec, values)
    assert torch.set_flush_denormal(True)
    try:
        found, flushed = cpu.encode(x, spec, None), torch.empty(128)
        cpu.decode(found, spec, flushed)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip((*found, flushed), (*wanted, values), strict=True):
        assert_same_bits(one, other)
