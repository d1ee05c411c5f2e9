# SPDX-License-Identifier: Apache-2.0
"""Batches of small products on a CPU: the bits of single ones, and which of them are left to these."""

from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import GemmPlan
from fmtsim.cpu.gemm import engine
from fmtsim.cpu.gemm.engine import gemm_batch
from fmtsim.cpu.runtime import pool
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import sum_dtype
from tests.support.bits import assert_same_bits
from tests.support.gemm_engine import EIGHT, HALF, INF, NAN, UNITS, gemm_spec, operand, product

DRAWN = replace(HALF, rounding=Rounding(mode="stochastic", random_bits=8))
SMALL = {
    "float32 sums": (EIGHT, "e4m3", "normal"),
    "float64 sums": (HALF, "bf16", "normal"),
    "codes of 16 bits": (HALF, "fp16", "normal"),
    "float32 operands": (HALF, "tf32", "normal"),
    "rounded": (replace(HALF, rounding="nearest_even"), "bf16", "narrow"),
    "nearest terms": (replace(HALF, term_rounding="nearest_even"), "bf16", "normal"),
    "half sums": (replace(HALF, accumulator="fp16"), "fp16", "narrow"),
    "stochastic": (DRAWN, "bf16", "normal"),
}
PLANS = {
    "one chain": GemmPlan(),
    "promoted": GemmPlan(promote_every=32),
    "pairs of parts": GemmPlan(k_tile=16, split=3, reduce="pairwise", partial="bf16"),
    "in place": GemmPlan(k_tile=16, split=3, reduce="in_place"),
}


def batch(fmt: str, kind: str, count: int, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return operand(fmt, count * m, k, kind, 1).view(count, m, k), operand(fmt, count * n, k, kind, 2).view(count, n, k)


def check_batch(a, b, spec, left=()) -> None:
    """Fail unless each product that is not left has the bits that it has by itself."""
    keys = torch.tensor([[3 - 5 * i, i - 1] for i in range(len(a))]) if spec.stochastic else None
    out = torch.full((len(a), a.shape[1], b.shape[1]), 7, dtype=sum_dtype(spec.datapath))
    assert gemm_batch(a, b, spec, keys, out) == list(left)
    for i in set(range(len(a))) - set(left):
        assert_same_bits(
            out[i], product(a[i], b[i], spec, random=None if keys is None else RandomKey(*keys[i].tolist()))
        )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("unit", SMALL)
def test_small_products_of_a_batch_have_their_own_bits(unit, plan):
    path, fmt, kind = SMALL[unit]
    for count, m, n, k in ((3, 5, 66, 70), (4, 1, 1, 1), (2, 8, 130, 33)):
        a, b = batch(fmt, kind, count, m, n, k)
        check_batch(a, b, gemm_spec(path, fmt, plan=PLANS[plan]))


def test_operands_of_any_strides():
    a, b = batch("bf16", "normal", 4, 12, 66, 40)
    for left, right in ((a.mT.contiguous().mT, b[:, :1].expand(b.shape)), (a[:1].expand(a.shape), b.flip(0)[:, ::2])):
        check_batch(left, right, gemm_spec(HALF, "bf16"))


@pytest.mark.parametrize("unit", ["float32 sums", "float64 sums", "codes of 16 bits", "rounded"])
@pytest.mark.parametrize("plan", ["one chain", "promoted", "pairs of parts"])
def test_products_begin_with_addends(unit, plan):
    path, fmt, kind = SMALL[unit]
    spec = gemm_spec(path, fmt, plan=PLANS[plan])
    a, b = batch(fmt, kind, 7, 6, 66, 40)
    c = operand("tf32", 7 * 6, 66, "normal", 3).view(7, 6, 66)
    c[1:5] *= torch.tensor([2.0**-30, 2.0**30, 2.0**-140, 2.0**100]).view(4, 1, 1)
    c[0, :, ::3], c[2, :, 1::2] = -0.0, 0.0
    c[5, 0, 0], c[6, 5, 65] = NAN, INF
    out = torch.full(c.shape, 7.0)
    assert gemm_batch(a, b, spec, None, out, c) == [5, 6]
    for i in range(5):
        assert_same_bits(out[i], product(a[i], b[i], spec, c=c[i]))
    assert gemm_batch(a, b, gemm_spec(path, fmt, plan=PLANS["in place"]), None, out, c) == list(range(7))


@pytest.mark.parametrize("unit", ["float64 sums", "stochastic"])
def test_threads_share_a_batch(unit):
    path, fmt, kind = SMALL[unit]
    a, b = batch(fmt, kind, 37, 16, 64, 128)
    for threads in (2, 3, 8):
        pool.set_num_threads(threads)
        check_batch(a, b.mT.contiguous().mT, gemm_spec(path, fmt))


@pytest.mark.parametrize("unit", ["float32 sums", "float64 sums", "rounded"])
def test_products_with_nan_or_inf_are_left(unit):
    path, fmt, kind = SMALL[unit]
    a, b = batch(fmt, kind, 6, 5, 66, 40)
    a[1, 4, 39], b[3, 65, 0], b[4, 0, 7] = NAN, NAN, NAN if fmt == "e4m3" else INF
    check_batch(a, b, gemm_spec(path, fmt), left=[1, 3, 4])


def test_products_whose_exponents_lie_far_apart_are_rounded():
    a, b = batch("bf16", "normal", 4, 4, 66, 40)
    a[0, 0, 0], b[2, 65, 39] = 2.0**100, 2.0**-100
    check_batch(a, b, gemm_spec(HALF, "bf16"))
    a[3, 0, 0] = NAN
    check_batch(a, b, gemm_spec(HALF, "bf16"), left=[3])
    together = fmtsim.bmm(a, b.mT, target=HALF, out_dtype=torch.float32)
    for i in range(4):
        assert_same_bits(together[i], product(a[i], b[i], gemm_spec(HALF, "bf16")))


@pytest.mark.parametrize("path", [path for path in UNITS if path not in ("floor32", "floor64", "wide")])
def test_other_units_are_left(path):
    unit, fmt, kind = UNITS[path]
    check_batch(*batch(fmt, kind, 3, 4, 5, 64), gemm_spec(unit, fmt), left=range(3))


def test_large_products_and_less_than_threads_are_left():
    spec = gemm_spec(HALF, "bf16")
    for m, n, k in ((129, 128, 256), (1, 1, 2049), (1, 1 << 16, 1)):
        check_batch(*batch("bf16", "normal", 2, m, n, k), spec, left=range(2))
    pool.set_num_threads(3)
    check_batch(*batch("bf16", "normal", 2, 4, 5, 64), spec, left=range(2))
    check_batch(*batch("bf16", "normal", 2, 4, 5, 0), spec, left=range(2))


def test_a_batch_is_one_call_of_a_kernel(monkeypatch):
    a, b = batch("bf16", "normal", 5, 6, 7, 40)
    expected = [
        fmtsim.mm(x, y.mT, target=DRAWN, generator=RandomKey(7, i)) for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    monkeypatch.setattr(engine, "run_tiles", None)
    together = fmtsim.bmm(a, b.mT, target=DRAWN, generator=7)
    assert together.dtype == torch.bfloat16
    assert_same_bits(together, torch.stack(expected))
