# SPDX-License-Identifier: Apache-2.0
"""Dispatch of matrix products: fast paths and the general one, orders, workspaces, recorded calls, graphs."""

import random
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import GemmPlan, get_unit
from fmtsim.cuda.gemm import self_test
from fmtsim.cuda.gemm.job import accumulation_order
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import sum_dtype
from fmtsim.spec.schedule import schedule
from fmtsim.support.errors import DeviceError
from tests.support import cuda_gemm
from tests.support.bits import assert_same_bits
from tests.support.cuda_gemm import DISPATCH, GENERAL, HALF, moved
from tests.support.gemm_engine import addend, check, check_kinds, gemm_spec, operand, unit_scales
from tests.support.gemm_oracle import sums
from tests.support.lanes import DTYPES, ONE_SUM, operands, random_plan, spec_of
from tests.support.settled import replayed, settled

EVEN = replace(HALF, term_rounding="nearest_even")
PLANS = [
    GemmPlan(), GemmPlan(k_tile=10), GemmPlan(k_tile=20, residue_first=True), GemmPlan(k_tile=16, split=3),
    GemmPlan(k_tile=16, split=3, owner="interleaved", instruction_k=8), GemmPlan(k_tile=16, part_k=40),
    GemmPlan(promote_every=24), GemmPlan(k_tile=20, promote_every=48),
    GemmPlan(k_tile=16, lanes=4, split=2, owner="interleaved", promote_every=6),
]  # fmt: skip


@pytest.fixture
def engine(monkeypatch, device):
    return cuda_gemm.install(monkeypatch, device, fast=True)


# Orders.


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("k", [1, 16, 40, 85])
def test_an_order_holds_the_schedule(plan, k):
    for unit in (HALF, replace(HALF, block=None), replace(HALF, block=8, paired=True)):
        order = accumulation_order(k, gemm_spec(unit, "bf16", plan=plan), torch.device("cpu"))
        wanted = schedule(k, unit, plan)
        blocks = [list(block) for part in wanted for chain in part for block in chain.blocks]
        found = [[i for i in row if i >= 0] for row in order.source.reshape(-1, order.block).tolist()]
        assert found == blocks and all(
            sorted(row, key=lambda i: i < 0) == row for row in order.source.reshape(-1, order.block).tolist()
        )
        ends = [2 if chain is part[-1] and i == len(chain.blocks) - 1 else int(i == len(chain.blocks) - 1)
                for part in wanted for chain in part for i in range(len(chain.blocks))]  # fmt: skip
        assert order.ends.tolist() == ends and order.blocks == len(blocks)
        counts = [sum(len(chain.blocks) for chain in part) for part in wanted]
        assert [stop - first for first, stop in order.parts] == counts
        assert order.part_blocks.tolist() == [list(part) for part in order.parts]
        if plan.promote_every:
            places = [chain.start // plan.promote_every for part in wanted for chain in part for _ in chain.blocks]
            assert order.scale_places.tolist() == places
        assert order.contiguous == ([i for block in blocks for i in block] == list(range(k)) and all(
            len(block) == order.block for block in blocks[:-1]))  # fmt: skip


def test_an_order_is_built_once():
    spec, device = gemm_spec(HALF, "bf16"), torch.device("cpu")
    assert accumulation_order(48, spec, device) is accumulation_order(48, spec, device)


def test_an_order_cannot_be_built_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match=r"K=47 .* run the product once before the capture"):
        accumulation_order(47, gemm_spec(HALF, "bf16"), torch.device("cuda", 0))


# Shapes, layouts, workspaces.


@pytest.mark.parametrize("name", ["hopper.wgmma", "fp32_fma"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (129, 3, 17), (2, 130, 33)])
def test_shapes(name, shape, engine):
    check_kinds(
        gemm_spec(get_unit(name).mode("bf16", "bf16"), "bf16"), shape, ("normal", "normal"), seed=3, with_c=True
    )


def test_no_products(engine):
    for unit, fmt in ((HALF, "bf16"), (get_unit("int8").mode("int8", "int8"), "int8")):
        spec = gemm_spec(unit, fmt)
        a, b, c = operand(fmt, 2, 0, "normal", 1), operand(fmt, 3, 0, "normal", 2), addend(spec, 2, 3, "normal", 3)
        for start, expected in ((None, torch.zeros_like(c)), (c, c)):
            out = torch.full_like(c, 9)
            engine.gemm(a, b, start, None, None, spec, None, out)
            assert_same_bits(out, expected)
    nan = torch.full((2, 3), torch.nan)
    spec, out = gemm_spec(HALF, "bf16"), torch.zeros(2, 3)
    engine.gemm(torch.zeros(2, 0), torch.zeros(3, 0), nan, None, None, spec, None, out)
    assert (out.view(torch.int32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize(
    "plan",
    [GemmPlan(), GemmPlan(k_tile=16, split=2, partial="bf16"), GemmPlan(k_tile=16, lanes=2)],
    ids=["one", "two", "lanes"],
)
def test_outputs_of_any_strides(plan, device):
    spec = gemm_spec(EVEN, "bf16", plan=plan)
    a, b = operand("bf16", 5, 40, "normal", 1).to(device), operand("bf16", 7, 40, "normal", 2).to(device)
    expected, wide = torch.zeros(5, 7, device=device), torch.zeros(7, 10, device=device)
    DISPATCH.gemm(a, b, None, None, None, spec, None, expected)
    DISPATCH.gemm(a, b, None, None, None, spec, None, wide.t()[2:7])
    assert torch.equal(wide.t()[2:7], expected) and not wide.t()[:2].any() and not wide.t()[7:].any()


def test_dispatch_leaves_to_torch_what_kernels_do_not_take(engine):
    x = torch.zeros(1, 4)
    assert engine.supports_gemm(gemm_spec(HALF, "bf16"), x, x)
    assert not engine.supports_gemm(gemm_spec(HALF, "bf16"), x.to(torch.int16), x)
    assert not engine.supports_gemm(gemm_spec(replace(HALF, accumulator="e4m3"), "bf16"), x, x)


@pytest.mark.parametrize("fmt", DTYPES)
def test_sums_of_threads(fmt, engine, monkeypatch):
    draw, choose, chosen = random.Random(f"threads {fmt}"), self_test.chosen, []
    monkeypatch.setattr(self_test, "chosen", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    unit, dtype = ("fp64_fma", torch.float64) if fmt == "fp64" else ("fp32_fma", torch.float32)
    for turn in range(8):
        plan, k = random_plan(draw)
        plan = replace(plan, k_end=None)  # which no engine sees
        spec = spec_of(plan, fmt, unit)
        a, b = operands(fmt, draw.choice([1, 3]), draw.choice([1, 5]), k, draw)
        c = torch.randn(a.shape[0], b.shape[0]).to(dtype) if turn % 3 == 0 else None
        out = torch.empty(a.shape[0], b.shape[0], dtype=dtype)
        monkeypatch.setattr(DISPATCH, "_MOST", 0 if turn == 5 else 65535)  # more than a grid counts: the general path
        assert engine.supports_gemm(spec, a, b)
        chosen.clear()
        engine.gemm(a, b, c, None, None, spec, None, out)
        assert_same_bits(out, sums(a, b, spec, dtype, c=c))
        assert not chosen if turn == 5 else chosen[0] is not None


def test_nothing_added_to_minus_zero(engine):
    a, b = torch.tensor([[-(2.0**-100)]]), torch.tensor([[2.0**-100]])
    for plan in ONE_SUM:
        out = torch.empty(1, 1)
        engine.gemm(a, b, None, None, None, spec_of(plan, "fp32"), None, out)
        assert torch.signbit(out) == (plan == GemmPlan()), plan


def test_lanes_of_matrix_units(engine):
    plan = GemmPlan(k_tile=32, lanes=2, lane_reduce="tree", split=2, owner="interleaved", promote_every=32)
    check_kinds(gemm_spec(HALF, "bf16", plan=plan), (3, 5, 150), ("normal", "special"), seed=3, with_c=True)


# Paths: what a fast path marks, the general path does.


def test_tiles_that_a_fast_path_leaves_are_done(monkeypatch, device):
    class Half:
        """Write sevens, and leave the tile at the lower right."""

        @staticmethod
        def run(job, plan, sums, marks):
            assert not marks.any() and sums.shape[1:] == job.out.shape
            sums.fill_(7.0)
            marks[1, 1] = 1

    monkeypatch.setattr(self_test, "chosen", lambda paths, job: (Half, None))
    spec = gemm_spec(HALF, "bf16")
    a, b = (operand("bf16", 131, 16, "normal", seed).to(device) for seed in (1, 2))
    out, expected = torch.empty(131, 131, device=device), torch.empty(131, 131, device=device)
    DISPATCH.gemm(a, b, None, None, None, spec, None, out)
    monkeypatch.setattr(self_test, "chosen", lambda paths, job: None)
    DISPATCH.gemm(a, b, None, None, None, spec, None, expected)
    assert torch.equal(out[128:, 128:], expected[128:, 128:]) and (out[:128] == 7).all() and (out[:, :128] == 7).all()


def test_random_words_belong_to_outputs(engine):
    spec = gemm_spec(
        replace(HALF, accumulator="bf16", rounding="stochastic"), "bf16", plan=GemmPlan(k_tile=16, split=2)
    )
    a, b = operand("bf16", 3, 40, "normal", 1), operand("bf16", 67, 40, "normal", 2)
    check(a, b, spec, random=RandomKey((1 << 63) + 7, 1 << 40))


def test_every_kernel_is_listed():
    listed = set(GENERAL.variants())
    for unit in (HALF, replace(HALF, fraction_bits=None)):
        how = GENERAL.sums_of(gemm_spec(unit, "bf16"), 64, True)
        assert ("exact_integer.cu", "exact_integer", how.defines) in listed
    assert {file for file, *_ in listed} == {"exact_integer.cu", "cdna.cu", "reduce.cu"}


# Public verbs, recordings, other tests.


def test_recorded_calls(monkeypatch, device, capsys):
    """Calls recorded on an H200, with the CUDA engine in place of the CPU's."""
    engine = cuda_gemm.Engine(device)
    ran = []
    import fmtsim.gemm.products.operator as operator

    class Module:
        @staticmethod
        def gemm(*arguments):
            ran.append(arguments[5])
            engine.gemm(*arguments)

    monkeypatch.setattr(operator, "gemm_engine", lambda spec, a, b: Module)
    small = [(meta, tensors) for meta, tensors in settled() if tensors["out"].numel() * tensors["a"].shape[1] < 3 << 20]
    assert small
    for meta, tensors in small:
        assert_same_bits(replayed(meta, tensors), tensors["out"], what=meta)
    assert ran


# On a real device.

gpu = pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("name", ["hopper.wgmma", "fp32_fma", "exact", "blackwell.tcgen05.mxf8f6f4"])
def test_graphs_replay_products(name):
    fmt = "bf16" if "mx" not in name else "e4m3"
    unit = get_unit(name).mode(fmt, fmt, "fp32")
    spec, cuda = gemm_spec(unit, fmt), torch.device("cuda")
    a, b = (moved(operand(fmt, 200, 160, "normal", seed), cuda) for seed in (1, 2))
    scales = [unit_scales(spec, 200, 160, "normal", seed) for seed in (3, 4)]
    scales = [None if x is None else moved(x, cuda) for x in scales]
    expected, out = (torch.empty(200, 200, dtype=sum_dtype(unit), device=cuda) for _ in range(2))
    DISPATCH.gemm(a, b, None, *scales, spec, None, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        DISPATCH.gemm(a, b, None, *scales, spec, None, out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out.cpu(), expected.cpu())
