# SPDX-License-Identifier: Apache-2.0
"""Which devices have float64, what the others are told, and leading bits of integers."""

from types import SimpleNamespace

import pytest
import torch

import fmtsim
from fmtsim import cpu, torch_engine
from fmtsim.support import float64
from fmtsim.support.errors import DtypeError
from tests.support.bits import assert_same_bits
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("one_thread")
NARROW = ("e4m3", "e2m1", "int8", "e8m0")  # casts in integer operations


def test_leading_bits():
    for dtype, top in ((torch.int32, 31), (torch.int64, 62)):
        n = torch.tensor([(1 << k) + d for k in range(1, top) for d in (-1, 0, 1)], dtype=dtype)
        found = float64.floor_log2(n)
        assert found.tolist() == [v.bit_length() - 1 for v in n.tolist()] and found.dtype == dtype


def test_which_device_has_float64(monkeypatch):
    assert float64.has_float64(torch.device("cpu")) and not float64.has_float64(torch.device("mps"))
    assert not float64.has_float64(torch.device("hpu"))  # torch has no backend for it here
    for has in (True, False):
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device, has=has: SimpleNamespace(has_fp64=has))
        assert float64.has_float64(torch.device("xpu", 0)) is has
    elsewhere = SimpleNamespace(device=torch.device("mps"), cpu=lambda: "moved")
    assert float64.capable(torch.ones(2)).is_cpu and float64.capable(elsewhere) == "moved"


@pytest.fixture
def without_float64(monkeypatch):
    """Let the CPU stand in for a device without float64 and without kernels."""
    monkeypatch.setattr(float64, "has_float64", lambda device: False)
    for name in ("quantize", "encode", "decode", "gemm"):
        monkeypatch.setattr(cpu, name, getattr(torch_engine, name))


@pytest.mark.parametrize("name", NARROW)
def test_casts_in_integer_operations_need_no_float64(name, request):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    expected = fmtsim.quantize(x, name)
    request.getfixturevalue("without_float64")
    assert_same_bits(fmtsim.quantize(x, name), expected)


@pytest.mark.parametrize("name", ["nf4", "lns8_g8", "mxfp4", "nvfp4", "logfmt8"])
def test_steps_in_float64_are_refused_where_there_is_none(name, without_float64):
    message = "^a step of this operation is float64, which cpu does not have; move the tensor to the CPU$"
    refused(message, fmtsim.quantize, torch.ones(2, 128), name, error=DtypeError)


def test_results_and_sums_in_float64_are_refused_where_there_is_none(without_float64):
    x, instead = torch.ones(2, 16), "pass out_dtype=torch.float32 where the format fits, or move the tensor to the CPU"
    codes, wide = torch.ones(3, dtype=torch.uint8), {"out_dtype": torch.float64}
    for call in (lambda: fmtsim.quantize(x, "e4m3", **wide), lambda: fmtsim.quantize(x, "fp64"),
                 lambda: fmtsim.decode(codes, "e4m3", **wide)):  # fmt: skip
        refused(f"^the result is float64, which cpu does not have; {instead}$", call, error=DtypeError)
    message = "^the result is float64, which cpu does not have; choose a unit and an output in float32, or move the"
    with pytest.raises(DtypeError, match=message):
        fmtsim.mm(x, x.t(), target="exact", accumulate="fp64", out_dtype=torch.float64)
    message = "^the sum inside the unit is float64, which cpu does not have; move the operands to the CPU$"
    half = x.bfloat16()
    refused(message, fmtsim.mm, half, half.t(), target="hopper.wgmma", error=DtypeError)
