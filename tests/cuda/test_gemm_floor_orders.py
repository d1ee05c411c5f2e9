"""Sums on the fp64 tensor core in any order, with addends, and of operands in any layout, bit for bit."""

from dataclasses import replace

import pytest
import torch

from fmtsim import Datapath, GemmPlan
from tests.cuda.floor_products import SLOW, K, M, N, check, normals, values
from tests.support.gemm_oracle import definition
from tests.support.operands import normal


@pytest.mark.parametrize(
    "plan",
    [
        SLOW,
        GemmPlan(k_tile=32, split=2),
        GemmPlan(k_tile=32, residue_first=True),
        GemmPlan(k_tile=32, promote_every=48),
    ],
    ids=str,
)
def test_orders(plan, device):
    check(*normals("e4m3"), definition("e4m3", plan=plan), device)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SLOW, GemmPlan(k_tile=32, split=3), GemmPlan(k_tile=32, part_k=40)], ids=str)
def test_orders_of_wide_formats(plan, device):
    check(*normals("bf16"), definition("bf16", plan=plan), device)


@pytest.mark.slow
@pytest.mark.parametrize("successive", [False, True])
def test_scaled_promotion(successive, device):
    plan = replace(SLOW, scaled_promotion=True, successive_scales=successive)
    a, b = normals("e4m3")
    scales = [torch.rand((rows, 2), generator=torch.Generator().manual_seed(rows)) for rows in (M, N)]
    check(a, b, definition("e4m3", plan=plan), device, scale_a=scales[0], scale_b=scales[1])


@pytest.mark.parametrize("fmt", ["e4m3", "bf16"])
@pytest.mark.parametrize(("power", "marked"), [(0, 0), (50, 0), (-140, None)])
def test_addends(fmt, power, marked, device):
    c = values(normal(M, N, seed=3), "bf16").float() * 2.0**power
    c[0, :9], c[1, 5] = 0, -0.0
    check(*normals(fmt), definition(fmt), device, marked=marked, c=c)


@pytest.mark.parametrize(("power", "marked"), [(0, 0), (-8, 0), (-70, None)])
def test_addends_of_rows_of_zeros(power, marked, device):
    """What zeros are packed as, and the grid of blocks without products, must not cut an addend."""
    a, b = normals("bf16")
    a[2:60:2], b[:, :64] = 0, 16 * b[:, :64]
    c = values(normal(M, N, seed=3), "bf16").float() * 2.0**power
    unit = Datapath(block=32, fraction_bits=8)
    check(a, b, definition("bf16", unit=unit), device, marked=marked, c=c)


@pytest.mark.slow
def test_addends_before_promotion(device):
    check(*normals("e4m3"), definition("e4m3", plan=SLOW), device, c=normal(M, N, seed=3))


def test_strides(device):
    a, b = normals("bf16")
    turned = [x.t().contiguous().t() for x in (a, b)]
    check(*turned, definition("bf16"), device)
    check(turned[0], torch.cat([b, b], 1)[:, :K], definition("bf16"), device)


@pytest.mark.slow
def test_wider_dtypes(device):
    a, b = normals("bf16")
    check(a.double(), b, definition("bf16"), device)
