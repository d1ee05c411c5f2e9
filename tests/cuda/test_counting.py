# SPDX-License-Identifier: Apache-2.0
"""What casts did, counted by a kernel: the figures and exponents that torch operations count."""

import importlib
import math

import pytest
import torch

import fmtsim
from fmtsim.casts.ops import load_engine
from fmtsim.formats.block import BlockFormat
from fmtsim.lab.analysis.measure import BINS, FIGURES, measure_by_torch
from tests.cuda import emulator

MODULE = importlib.import_module("fmtsim.lab.analysis.measure")
FORMATS = (
    "mxfp8_e4m3", "mxfp4", "nvfp4", "nvfp4_16x16", "e4m3_1x128", "int8", "e4m3", "uint4_g32_zp", "nf4_g64", None,
)  # fmt: skip
SUMS = [FIGURES.index(name) for name in ("signal", "noise")]


@pytest.fixture
def by_kernel(device, monkeypatch):
    """Let the device's kernel count; return what it could not."""
    left = []
    monkeypatch.setattr(MODULE, "fused_engine", lambda x: load_engine("cuda"))
    for name in ("measure_by_torch", "load_engine"):
        real = getattr(MODULE, name)
        monkeypatch.setattr(MODULE, name, lambda *given, real=real: left.append(1) or real(*given))
    return left


def tensors(shape, dtype, fmt, dim):
    """Return numbers over many binades with zeros, subnormals, NaN and infinities, and their quantised values."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-20, 12, shape, generator=g).float())
    flat = x.view(-1)
    flat[::37] = 0
    flat[5::501] = torch.tensor(
        [math.nan, math.inf, -math.inf, 1e-40, -3e-45, -0.0, 3e-38, 1e30, 464.0, -464.0]
    ).repeat(99)[: len(flat[5::501])]
    x = x.to(dtype)
    if fmt is None:
        return x, x
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    blocks = {"dim": dim, "pad": True} if isinstance(fmtsim.get_format(fmt), BlockFormat) else {}
    return x, fmtsim.quantize(finite.float(), fmt, **blocks)


def assert_counted(found, wanted):
    exact = [i for i in range(len(wanted)) if i not in SUMS]
    assert torch.equal(found[exact], wanted[exact])
    for i in SUMS:  # sums in another order: a last bit of float64 for each of some thousand additions
        assert found[i] == wanted[i] or abs(found[i] - wanted[i]) <= 1e-12 * wanted[i]


@pytest.mark.parametrize("dim", (-1, 0))
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_counts_what_torch_counts(name, dim, device, by_kernel):
    fmt = None if name is None else fmtsim.get_format(name)
    for shape, dtypes in (((160, 1160), (torch.bfloat16,)), ((256, 128), (torch.float32, torch.float16))):
        for dtype in dtypes:
            x, q = tensors(shape, dtype, name, dim)
            wanted = measure_by_torch(x.float(), q.float(), fmt, dim)
            by_kernel.clear()
            found = MODULE.measure(x.to(device), q.to(device), fmt, dim).cpu()
            assert len(found) == len(FIGURES) + 2 * BINS and not by_kernel
            assert_counted(found, wanted)


def test_what_does_not_fit_tiles_is_counted_by_torch(device, by_kernel):
    """Rows that no vectors fill, blocks of a whole tensor or of few elements, float64."""
    cases = [
        ("e4m3", (5, 7), torch.float32),
        ("e4m3_tensor", (16, 4096), torch.float32),
        ("e4m3", (8, 64), torch.float64),
    ]
    cases += [("e4m3_1x8", (8, 64), torch.float32)]
    for name, shape, dtype in cases:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        q = fmtsim.quantize(x, name)
        by_kernel.clear()
        found = MODULE.measure(x.to(device), q.to(device), fmtsim.get_format(name)).cpu()
        assert by_kernel, name
        assert_counted(found, measure_by_torch(x, q, fmtsim.get_format(name), -1))


def test_a_value_that_is_not_finite_is_kept_and_its_error_infinite(device, by_kernel):
    x = torch.ones(8, 64, device=device)
    for value in (math.nan, math.inf):
        q = torch.where(torch.arange(64, device=device) == 7, torch.full_like(x, value), x)
        found = dict(zip(FIGURES, MODULE.measure(x, q, None).tolist(), strict=False))
        assert found["noise"] == math.inf and found["underflowed"] == 0
    assert not by_kernel


def test_the_order_of_threads_changes_nothing():
    """On the host threads run one after the other, and backwards: a missing barrier would show."""
    if emulator.COMPILER is None:
        pytest.skip("needs a C++ compiler (g++)")
    x, _ = tensors((192, 1160), torch.bfloat16, None, -1)
    found = []
    for backwards in (False, True):
        with emulator.emulated(reversed_order=backwards):
            for name, block in ((None, (1, 1)), ("nvfp4", (1, 16)), ("mxfp4", (32, 1)), ("nvfp4_16x16", (16, 16))):
                fmt = None if name is None else fmtsim.get_format(name)
                found.append(load_engine("cuda").count_cast(x, x.float(), fmt, block, (-448.0, 448.0)))
            multipliers, prints = torch.arange(1 << 16) | 1, torch.zeros(10, dtype=torch.int64)
            launch = load_engine("cuda").fingerprint(x, 24 * 1160, 8, x.data_ptr())
            launch(x.data_ptr(), prints.data_ptr(), multipliers.data_ptr())
            found.append(prints)
    for forwards, backwards in zip(found[:5], found[5:], strict=True):
        assert torch.equal(forwards, backwards)
