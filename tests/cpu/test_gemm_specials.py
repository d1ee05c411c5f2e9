"""Products with NaN, Inf and zeros on every path of the CPU engine, bit for bit."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan, get_unit
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import (
    HALF,
    INF,
    NAN,
    UNITS,
    check,
    f32,
    gemm_spec,
    operand,
    product,
    setting,
    unit_scales,
)


@pytest.mark.parametrize("path", [name for name in UNITS if name not in ("integers", "grouped")])
def test_rows_and_columns_of_nan_and_inf(path):
    a, b, spec, _, _ = setting(path, 6, 67, 33)
    if spec.a.infinities:
        a[1, 3], a[2, 30], b[4, 3], b[5, 30] = INF, -INF, -INF, INF
        a[2, 3], b[66, 0], b[6, 3] = 0, INF, 0
    clean = product(a, b, spec)
    a[4, 7], b[65, 32] = NAN, NAN
    check(a, b, spec)
    got = product(a, b, spec)
    assert (
        (got.view(torch.int32)[got.isnan()] == 0x7FFFFFFF).all() and got[4].isnan().all() and got[:, 65].isnan().all()
    )
    others = [row for row in range(6) if row != 4]
    assert_same_bits(got[others][:, :65], clean[others][:, :65])


@pytest.mark.parametrize("c", [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
@pytest.mark.parametrize("signed_zero", [False, True])
@pytest.mark.parametrize("unit", [HALF, replace(HALF, rounding="down"), replace(HALF, promote_every=4)])
def test_zeros_and_special_addends(unit, signed_zero, c):
    unit = replace(unit, signed_zero=signed_zero)
    rows = [[0.0, -0.0], [-0.0, -0.0], [1.0, -1.0], [-1.0, 1.0], [2.0**-100, 0.0], [INF, 0.0], [NAN, 1.0]]
    a, b = f32(*rows), f32([1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [-0.0, 0.0], [2.0**-100, 2.0**-60])
    given = torch.full((len(a), len(b)), c)
    check(a, b, gemm_spec(unit, "fp32"), c=given)
    given[0, 0] = 0.5
    check(a, b, gemm_spec(unit, "fp32", plan=GemmPlan(k_tile=1, split=2, partial="fp16")), c=given)


NVF4 = replace(get_unit("blackwell.tcgen05.nvf4").mode("e2m1", "e2m1"), fraction_bits=4)


@pytest.mark.parametrize(
    ("unit", "name"), [(get_unit("ampere.mma").mode("tf32", "tf32"), "tf32"), (HALF, "bf16"), (NVF4, "e2m1")]
)
def test_an_addend_of_minus_zero_is_no_negative_term(unit, name):
    """A count of negative terms that took it for one would be off by a last place wherever terms are cut."""
    spec = gemm_spec(unit, name)
    a, b = (operand(name, rows, 64, "normal", rows) for rows in (5, 70))
    scales = [unit_scales(spec, rows, 64, "normal", rows) for rows in (5, 70)]
    check(a, b, spec, c=torch.full((5, 70), -0.0), scale_a=scales[0], scale_b=scales[1])
