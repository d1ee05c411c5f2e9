# SPDX-License-Identifier: Apache-2.0
"""Scales, bias and output rounding against the oracle, and within bounded memory."""

import itertools
import subprocess
import sys

import pytest
import torch

from fmtsim.gemm.products import operator
from fmtsim.gemm.products.operator import finish
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DtypeError
from tests.support.bits import assert_same_bits, bits
from tests.support.gemm_oracle import finished
from tests.support.operands import wide

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, *FP8)
LATE = GemmPlan(bias_after_rounding=True)
RULES = ("scale", "row_column", "column_row")
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38, 65520.0,
           -65519.0, 464.0, 465.0, 2.0**-10, 2.0**-9 * 1.5, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-17,
           2.0**-133, 1e-40]  # fmt: skip


def reduced(m=7, n=20, seed=0):
    """Return sums of all kinds, NaN in the units' bits."""
    x = wide(m, n, seed=seed, low=-20, high=20)
    x[0] = torch.tensor((SPECIAL * n)[:n])
    return torch.where(x.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), x)


def scales(kind, m, n):
    if kind == "tensor":
        return torch.tensor(0.7), torch.tensor(1.3)
    return wide(m, 1, seed=1, low=-3, high=3).abs(), wide(1, n, seed=2, low=-3, high=3).abs()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "rule"), [("none", "scale"), *itertools.product(("tensor", "row"), RULES)])
def test_every_step_has_the_bits_of_the_oracle(dtype, kind, rule):
    x = reduced()
    row, column = (None, None) if kind == "none" else scales(kind, *x.shape)
    for bias in (None, wide(x.shape[1], seed=3).bfloat16()):
        for result_scale in (None, torch.tensor(3.0)):
            options = {"row": row, "column": column, "bias": bias, "result_scale": result_scale}
            got = finish(x.clone(), dtype, GemmPlan(epilogue=rule), **options)
            assert_same_bits(got, finished(x, dtype, rule=rule, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wider", [torch.float32, torch.float64], ids=str)
def test_a_bias_after_rounding(dtype, wider):
    x = reduced(40, 20).to(wider)
    row, column = scales("row", *x.shape)
    for bias in (None, wide(20, seed=3).bfloat16(), torch.full((20,), -torch.inf)):
        options = {"bias": bias, "row": row, "column": column}
        got = finish(x.clone(), dtype, LATE, **options)
        assert_same_bits(got, finished(x, dtype, bias_after_rounding=True, **options))
        assert_same_bits(finish(x.clone(), dtype, LATE), finish(x.clone(), dtype))
        seen = dtype.itemsize == 2 and bias is not None and bias.isfinite().all()
        assert not seen or not torch.equal(bits(got), bits(finish(x.clone(), dtype, **options)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_float64(dtype):
    x = reduced().double() * (1 + 2.0**-40)
    x = torch.where(x.isnan(), torch.tensor(0x7FFFFFFFFFFFFFFF).view(torch.float64), x)
    for bias in (None, wide(x.shape[1], seed=3)):
        assert_same_bits(finish(x.clone(), dtype, bias=bias), finished(x, dtype, bias=bias))


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.float32, 0x7FFFFFFF),
        (torch.float64, 0x7FFFFFFFFFFFFFFF),
        (torch.bfloat16, 0x7FFF),
        (torch.float16, 0x7FFF),
        (torch.float8_e4m3fn, 0x7F),
        (torch.float8_e5m2, 0x7F),
        (torch.float8_e4m3fnuz, 0x80),
        (torch.float8_e5m2fnuz, 0x80),
    ],  # fmt: skip
    ids=str,
)
def test_nan_has_the_bits_of_the_units(dtype, code):
    x = torch.tensor([[torch.nan, -torch.nan, torch.inf, 1.0]])
    y = finish(x, dtype, row=torch.tensor(0.0), column=torch.tensor(1.0))  # Inf times 0 is NaN too
    assert bits(y)[0].tolist()[:3] == [code] * 3
    assert y[0, 3].item() == 0


def test_products_that_are_zero_are_positive():
    x = torch.tensor([[-0.0, -1.0, -(2.0**-149)]])
    scaled = finish(x.clone(), torch.float32, row=torch.tensor(0.0), column=torch.tensor(1.0))
    assert bits(scaled).tolist() == [[0, 0, 0]]
    assert bits(finish(x.clone(), torch.float32))[0, 0].item() == -(1 << 31)  # nothing is multiplied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_pieces_change_nothing(monkeypatch, dtype):
    x, (row, column) = reduced(9, 20), scales("row", 9, 20)
    plan, options = GemmPlan(epilogue="row_column"), {"row": row, "column": column, "bias": wide(20, seed=5)}
    whole = finish(x.clone(), dtype, plan, **options)
    for size in (1, 40, 45):
        monkeypatch.setattr(operator, "_PIECE", size)
        assert_same_bits(finish(x.clone(), dtype, plan, **options), whole)


def test_a_row_longer_than_a_piece():
    n = operator._PIECE + 5
    x, (row, column) = torch.cat([reduced(3, 20), wide(3, n - 20, seed=6)], 1), scales("row", 3, n)
    got = finish(x.clone(), torch.float16, row=row, column=column)
    for part in (slice(0, 600_000), slice(600_000, n)):
        assert_same_bits(got[:, part], finish(x[:, part].clone(), torch.float16, row=row, column=column[:, part]))


def test_the_result_is_the_input_where_it_can_be():
    x = reduced()
    assert finish(x, torch.float32) is x
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    assert finish(x, torch.bfloat16, out=out) is out


def test_other_dtypes_are_refused():
    with pytest.raises(DtypeError, match=r"out_dtype=torch.int8 is not the dtype of a product; choose one of float32"):
        operator.output_format(torch.int8)


@pytest.mark.slow
def test_memory_stays_bounded():
    code = (
        "import resource, torch; torch.set_num_threads(1); from fmtsim.gemm.products.operator import finish\n"
        "x = torch.ones(64, 8192); b = torch.ones(8192).bfloat16(); s = torch.rand(64, 1), torch.rand(1, 8192)\n"
        "finish(x, torch.bfloat16, row=s[0], column=s[1], bias=b)\n"
        "x = torch.ones(8192, 8192); out = torch.ones(8192, 8192, dtype=torch.bfloat16)\n"
        "s = torch.rand(8192, 1), torch.rand(1, 8192)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "finish(x, torch.bfloat16, row=s[0], column=s[1], bias=b, out=out)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(grown) < 64
