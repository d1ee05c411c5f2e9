# SPDX-License-Identifier: Apache-2.0
"""Sums of threads: lanes, folded parts and the end of K, engines against the oracle, and verbs."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fmtsim
from fmtsim import cpu, torch_engine
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operator import gemm_engine, run_gemm
from fmtsim.gemm.targets import cublaslt
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.call import Operands
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import STACK, ZERO, combination, same_order
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.gemm_oracle import sums
from tests.support.lanes import DTYPES, ONE_SUM, operands, random_plan, spec_of
from tests.support.refusals import refused

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("fmt", DTYPES)
def test_engines_have_the_bits_of_the_oracle(fmt):
    draw = random.Random(f"lanes {fmt}")
    unit, dtype = ("fp64_fma", torch.float64) if fmt == "fp64" else ("fp32_fma", torch.float32)
    for _ in range(3 if fmt == "fp64" else 25):
        plan, k = random_plan(draw)
        spec = spec_of(plan, fmt, unit)
        a, b = operands(fmt, draw.choice([1, 3]), draw.choice([1, 5]), k, draw)
        c = torch.randn(a.shape[0], b.shape[0]).to(dtype) if draw.random() < 0.3 else None
        expected = sums(a, b, spec, dtype, c=c)
        assert gemm_engine(spec, a, b) is cpu or (fmt == "fp64" and plan.promote_every)
        assert_same_bits(run_gemm(Operands(a, b, c=c), spec), expected)
        stop = plan.k_end or k
        out = torch.empty_like(expected)
        torch_engine.gemm(a[:, :stop], b[:, :stop], c, None, None, spec, None, out)
        assert_same_bits(out, expected)


def test_nothing_added_to_minus_zero():
    a, b = torch.tensor([[-(2.0**-100)]]), torch.tensor([[2.0**-100]])
    for plan in ONE_SUM:
        for engine in (cpu, torch_engine):
            out = torch.empty(1, 1)
            engine.gemm(a, b, None, None, None, spec_of(plan, "fp32"), None, out)
            assert torch.signbit(out) == (plan == GemmPlan()), (plan, engine)


def test_other_units_have_lanes_too():
    draw = random.Random("units")
    for unit, fmt in (("hopper.wgmma", "bf16"), ("cdna3.mfma", "fp16"), ("cdna2.mfma", "bf16")):
        plan = GemmPlan(k_tile=32, lanes=4, lane_reduce="tree", split=2, owner="interleaved", promote_every=12)
        a, b = operands(fmt, 2, 5, 90, draw)
        assert_same_bits(run_gemm(Operands(a, b), spec_of(plan, fmt, unit)), sums(a, b, spec_of(plan, fmt, unit)))


def test_stochastic_blocks_are_counted_through_lanes():
    unit = fmtsim.Datapath(block=4, accumulator="bf16", rounding="stochastic")
    plan = GemmPlan(k_tile=8, lanes=2, split=2, owner="interleaved", lane_reduce="tree")
    bf16 = get_format("bf16")
    spec = GemmSpec(datapath=unit, plan=plan, a=bf16, b=bf16)
    a, b = operands("bf16", 2, 3, 40, random.Random(5))
    found = run_gemm(Operands(a, b), spec, random=fmtsim.RandomKey(3, 8))
    assert_same_bits(found, sums(a, b, spec, random=(3, 8)))


def test_a_difference_is_seen():
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(rows, 200, generator=generator).half() for rows in (3, 60))
    plans = [
        GemmPlan(k_tile=8, lanes=8, lane_reduce=way, split=split, owner="interleaved", reduce=reduce)
        for way in ("serial", "tree", "pair_tree") for split, reduce in ((1, "serial"), (25, "serial"), (25, "folded"))
    ]  # fmt: skip
    found = [run_gemm(Operands(a, b), spec_of(plan, "fp16")) for plan in (GemmPlan(), *plans)]
    for i, one in enumerate(found):
        for other in found[:i]:
            refused("differ", assert_same_bits, one, other, error=AssertionError)


# Products that a library leaves out.


def test_what_lies_behind_the_end_of_k_is_not_looked_at():
    a, b = (x.bfloat16() for x in (torch.randn(4, 48), torch.randn(6, 48)))
    plan = GemmPlan(k_tile=16, split=2, k_end=32)
    expected = fmtsim.mm(a[:, :32], b[:, :32].t(), target="hopper.wgmma", plan=GemmPlan(k_tile=16, split=2))
    for x in (0.0, 1.0, NAN, INF):
        a[:, 32:] = x
        assert_same_bits(fmtsim.mm(a, b.t(), target="hopper.wgmma", plan=plan), expected)
    whole = GemmPlan(k_tile=16, split=2, k_end=48)
    assert fmtsim.mm(a, b.t(), target="hopper.wgmma", plan=whole).isnan().all()
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(fmtsim.mm(a, b.t(), target="hopper.wgmma", plan=whole), expected)


def test_the_end_of_k_and_scales():
    a, b = (torch.randn(rows, 256).to(torch.float8_e4m3fn) for rows in (3, 5))
    fmt = get_format("e4m3")
    scale_a, scale_b = torch.rand(3, 2), torch.rand(5, 2)
    for every, ends in ((128, (128, 200)), (64, (64,))):
        for end in ends:
            plan = GemmPlan(promote_every=every, scaled_promotion=True, k_end=end)
            spec = GemmSpec(datapath=get_unit("hopper.wgmma").mode("e4m3", "e4m3"), plan=plan, a=fmt, b=fmt)
            x, y = (s.repeat_interleave(128 // every, 1).contiguous() for s in (scale_a, scale_b))
            expected = sums(a[:, :end], b[:, :end], spec, scale_a=x, scale_b=y)
            assert_same_bits(run_gemm(Operands(a, b, scale_a=x, scale_b=y), spec), expected)


# What is said of them.


def test_plans_that_add_alike():
    unit = get_unit("fp32_fma").mode("fp16", "fp16")

    def alike(first: GemmPlan, second: GemmPlan) -> bool:
        return same_order(100, unit, first, second) and same_order(100, unit, second, first)

    lanes = GemmPlan(k_tile=64, lanes=32, lane_reduce="tree")
    assert alike(lanes, GemmPlan(k_tile=64, lanes=32, lane_reduce="tree", k_end=100))
    assert not alike(lanes, GemmPlan(k_tile=64, lanes=32))
    assert not alike(lanes, GemmPlan(k_tile=64, lanes=32, lane_reduce="tree", k_end=99))
    assert not alike(lanes, GemmPlan(k_tile=32, lanes=32, lane_reduce="tree"))
    assert alike(GemmPlan(k_tile=25, lanes=5, k_end=25), GemmPlan(k_tile=5, split=5, k_end=25))
    folded = GemmPlan(k_tile=10, split=10, reduce="folded")
    assert not alike(folded, GemmPlan(k_tile=10, split=10)) and not alike(folded, replace(folded, reduce="in_place"))
    assert not alike(GemmPlan(k_end=64), GemmPlan()) and alike(GemmPlan(k_end=64), GemmPlan(k_tile=64, k_end=64))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (GemmPlan(k_tile=64, lanes=32, lane_reduce="tree"),
         "8 tiles of 64; 32 lanes of 2 products of every tile, each one chain from +0, k in order; lanes are added as "
         "a tree, the halves onto each other"),
        (GemmPlan(k_tile=16, lanes=16, promote_every=16),
         "32 tiles of 16; 16 lanes of 1 products of every tile, each a fresh chain every 16 products, each added to an "
         "outer sum rounded to nearest; lanes are added one after another"),
        (GemmPlan(k_tile=128, lanes=128, lane_reduce="pair_tree", split=3, owner="interleaved", reduce="folded"),
         "4 tiles of 128 in 3 parts (every 3rd tile), each 128 lanes of 1 products of every tile, each one chain from "
         "+0, k in order; neighbouring lanes are added, then these sums as a tree, the halves onto each other; parts "
         "are added as 128 threads fold them"),
        (GemmPlan(k_tile=16, split=3, owner="even", reduce="neighbours"),
         "32 tiles of 16 in 3 parts (runs of 10 tiles, the last 2 one longer), each one chain from +0, k in order; "
         "parts are added neighbours first, down to one sum"),
        (GemmPlan(k_tile=64, k_end=448, split=7),
         "products from 448 on are left out; 7 tiles of 64 in 7 parts (runs of 1 tiles), each one chain from +0, k in "
         "order; parts are added one after another"),
        (GemmPlan(k_tile=8, part_k=200, split=3),
         "3 parts of 200 products, each cut into tiles of 8, each one chain from +0, k in order; parts are added one "
         "after another"),
    ],
)  # fmt: skip
def test_explanation(plan, told):
    x = torch.zeros(4, 500, dtype=torch.float16)
    assert fmtsim.explain_mm(x, x.t(), target="fp32_fma", plan=plan).order == told


def test_integers_have_no_lanes():
    x = torch.ones(16, 32, dtype=torch.int8)
    for plan in (GemmPlan(k_tile=8, lanes=2), GemmPlan(reduce="folded"), GemmPlan(reduce="neighbours")):
        with pytest.raises(
            ArgumentError, match="^integer sums have neither lanes nor reduce='folded' or 'neighbours'; "
        ):
            fmtsim.mm(x, x.t(), target="int8", plan=plan)


def test_few_sums_wait_for_each_other():
    worst = GemmPlan(k_tile=4096, lanes=4096, lane_reduce="pair_tree", split=2, reduce="folded")
    for plan, k in ((worst, 8192), (GemmPlan(k_tile=8, lanes=8, lane_reduce="tree", split=300, reduce="folded"), 2400)):
        waiting, most = 0, 0
        for _, additions in combination(k, plan):
            waiting += 1
            most = max(most, waiting)
            waiting -= additions
        assert waiting == 1 and most <= STACK
    assert f"#define WAITING {STACK} " in (Path(fmtsim.__file__).parent / "cuda/gemm/reduce.cu").read_text()
    numbers = [number for number, _ in combination(2400, GemmPlan(k_tile=8, lanes=8, split=300, reduce="folded"))]
    assert sorted(n for n in numbers if n != ZERO) == list(range(2400))


def test_options_of_slices_that_are_cut_anew():
    sliced = {option for option, lanes in cublaslt.GEMV["sm_90"].items() if lanes.products == -64}
    first = {36, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 66, 82, 86, 90, 98}  # every architecture has these
    assert sliced == first | {68, 72, 74, 80, 88, 92, 94, 96, 100, 102, 106, 110}
    assert all(lanes.products >= -64 for table in cublaslt.GEMV.values() for lanes in table.values())
    assert {option for option, lanes in cublaslt.GEMV["sm_100"].items() if lanes.products == -64} == first


def test_interleaved_tiles_that_are_one_a_part_are_parts_in_a_row():
    unit = get_unit("fp32_fma").mode("fp16", "fp16")
    interleaved, in_a_row = (GemmPlan(k_tile=32, split=2, owner=owner) for owner in ("interleaved", "contiguous"))
    assert same_order(64, unit, interleaved, in_a_row) and same_order(64, unit, in_a_row, interleaved)
    assert not same_order(128, unit, interleaved, in_a_row)
