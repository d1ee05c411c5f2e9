# SPDX-License-Identifier: Apache-2.0
"""Orders of sums: a GPU with a hidden plan is asked, and the plan, or one with the same order, comes back."""

import random
from dataclasses import replace

import numpy
import pytest
import torch

from fmtsim.casts.quantize import quantize
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.explain.samples import make_data, question
from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order as order_of
from tests.support.fake_gpu import FakeGPU, fp8, mm
from tools.calibrate import order
from tools.calibrate.campaign import calibrate, find_plan, verify
from tools.calibrate.order import LEVELS, Sighting, _positions, expected, explains, look

HOPPER, AMPERE = get_unit("hopper.wgmma"), get_unit("ampere.mma")
BF16, TF32, FP8 = (HOPPER.mode(name, name, "fp32") for name in ("bf16", "tf32", "e4m3"))
SUMS16 = HOPPER.mode("fp16", "fp16", "fp16")


def same_order(call, arithmetic, first, second):
    """Two plans may say one order in different words: tiles that are dealt alike, residues that do not exist."""
    kept = [
        (p.partial if p.split > 1 else None, p.round_trip, p.bias_after_rounding, p.reduce == "in_place")
        for p in (first, second)
    ]
    return kept[0] == kept[1] and order_of(call.k, arithmetic, first, second)


def recovered(call, arithmetic, plan):
    found = find_plan(FakeGPU(arithmetic, plan), call, arithmetic)
    assert found.status == "verified", found.note
    assert found.outputs >= 128
    return any(same_order(call, arithmetic, plan, other) for other in found.plans)


HIDDEN = {
    "chain": (mm(64, 512, 4096), BF16, GemmPlan()),
    "chain of small blocks": (mm(64, 512, 512), AMPERE.mode("bf16", "bf16", "fp32"), GemmPlan()),
    "parts of tiles": (mm(64, 512, 4096), BF16, GemmPlan(k_tile=64, split=3)),
    "parts rounded to the output": (mm(64, 512, 4096), BF16, GemmPlan(k_tile=64, split=3, partial="bf16")),
    "parts rounded on the way": (
        mm(64, 512, 4096), BF16, GemmPlan(k_tile=64, split=3, partial="bf16", round_trip=True)),
    "parts added to the output in place": (
        mm(64, 512, 4096), BF16, GemmPlan(k_tile=64, split=3, partial="bf16", reduce="in_place")),
    "slices added in place": (
        mm(64, 501, 2057, "fp16"), HOPPER.mode("fp16", "fp16", "fp32"),
        GemmPlan(k_tile=64, part_k=688, split=3, residue_first=True, partial="fp16", reduce="in_place")),
    "every fifth tile": (mm(64, 512, 4096), BF16, GemmPlan(k_tile=64, split=5, owner="interleaved")),
    "halves onto each other": (mm(512, 64, 4096), BF16, GemmPlan(k_tile=64, split=5, reduce="pairwise")),
    "residue first": (mm(100, 60, 300, out=torch.float32), BF16, GemmPlan(k_tile=128, residue_first=True)),
    "slices and short instructions": (
        mm(33, 65, 129), BF16, GemmPlan(k_tile=32, part_k=16, split=9, residue_first=True, instruction_k=8)),
    "slices of TF32": (mm(160, 128, 680, "tf32"), TF32, GemmPlan(k_tile=16, part_k=68, split=10, residue_first=True)),
    "fp16 sums": (
        mm(128, 96, 1024, "fp16", accumulate="fp16"), SUMS16,
        GemmPlan(k_tile=64, part_k=64, split=16, residue_first=True, partial="fp16", round_trip=True)),
    "promotion": (fp8(64, 512, 4096, fast=False), FP8, GemmPlan(promote_every=128)),
    "promotion in parts": (fp8(64, 512, 8192, fast=False), FP8, GemmPlan(promote_every=128, k_tile=128, split=3)),
    "fast FP8 in parts": (fp8(64, 512, 8192), FP8, GemmPlan(k_tile=128, split=3)),
    "one row": (mm(1, 768, 3072), BF16, GemmPlan(k_tile=64, split=2)),
    "one column": (mm(768, 1, 3072), BF16, GemmPlan(k_tile=64, split=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_order_is_found(name):
    assert recovered(*HIDDEN[name])


def test_a_bias_that_is_added_after_rounding():
    call = GemmCall(operation="linear", m=64, n=1, k=512, a="bf16", b="bf16", out=torch.bfloat16, bias=True)
    assert recovered(call, BF16, GemmPlan(bias_after_rounding=True))
    assert recovered(call, BF16, GemmPlan())


@pytest.mark.parametrize("fmt", ["bf16", "tf32"])
def test_a_bias_with_which_the_output_begins(fmt):
    out, unit = (torch.bfloat16, BF16) if fmt == "bf16" else (torch.float32, TF32)
    call = GemmCall(operation="linear", m=64, n=96, k=1024, a=fmt, b=fmt, out=out, bias=True)
    plan = GemmPlan(k_tile=32, split=4, reduce="in_place", partial="bf16" if fmt == "bf16" else None)
    assert recovered(call, unit, plan)
    assert recovered(call, unit, replace(plan, reduce="serial"))
    assert recovered(call, unit, replace(plan, reduce="serial", bias_after_rounding=fmt == "bf16"))


def test_the_order_of_row_and_column_scales():
    for rule in ("row_column", "column_row"):
        found = find_plan(
            FakeGPU(FP8, GemmPlan(epilogue=rule)), fp8(64, 96, 512, out=torch.float32, scaling="row"), FP8
        )
        assert [plan.epilogue for plan in found.plans] == [rule]


def random_plan(draw, k):
    tile = draw.choice([16, 32, 64, 128])
    width = draw.choice([None, None, 8])
    kind = draw.choice(["chain", "residue", "tiles", "slices", "promoted", "interleaved", "pairs"])
    parts = draw.randint(2, max(2, min(9, k // tile // 2)))
    match kind:
        case "chain":
            return GemmPlan(instruction_k=width)
        case "residue":
            return GemmPlan(k_tile=tile, residue_first=True, instruction_k=width)
        case "tiles":
            return GemmPlan(k_tile=tile, split=parts, instruction_k=width)
        case "slices":
            length = -(-k // parts // 8) * 8
            return GemmPlan(k_tile=tile, part_k=length, split=-(-k // length), residue_first=True, instruction_k=width)
        case "promoted":
            return GemmPlan(promote_every=draw.choice([64, 128, 256]), instruction_k=width)
        case "interleaved":
            return GemmPlan(k_tile=tile, split=parts, owner="interleaved", instruction_k=width)
    return GemmPlan(k_tile=tile, split=max(3, parts), reduce="pairwise", instruction_k=width)


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 80))])
def test_random_orders_are_found(seed):
    draw = random.Random(seed)
    k = draw.choice([264, 300, 513, 768, 1024, 1600, 2304])
    call = mm(draw.choice([8, 64]), draw.choice([96, 512]), k, out=draw.choice([torch.bfloat16, torch.float32]))
    plan = random_plan(draw, k)
    assert recovered(call, BF16, plan), plan


@pytest.mark.parametrize("name", ["chain", "parts of tiles", "promotion", "slices of TF32"])
def test_a_planted_wrong_plan_is_refused(name):
    """Wrong plans that a person might believe: one part more, none, another tile, no promotion, residue last."""
    call, arithmetic, plan = HIDDEN[name]
    answer = FakeGPU(arithmetic, plan).ask(call, *make_data(question(call), 1))
    assert not verify(call, answer, 1, arithmetic, plan).mismatches
    wrong = [GemmPlan(), GemmPlan(k_tile=64, split=2), GemmPlan(k_tile=64, split=5), GemmPlan(promote_every=256),
             GemmPlan(k_tile=64, split=3, owner="interleaved"), GemmPlan(instruction_k=4)]  # fmt: skip
    for other in wrong:
        if not same_order(call, arithmetic, plan, other):
            checked = verify(call, answer, 1, arithmetic, other)
            assert checked.mismatches > 4, other
            assert "expected" in checked.first


def test_a_wrong_guess_is_not_believed():
    call, arithmetic, plan = HIDDEN["parts of tiles"]
    gpu = FakeGPU(arithmetic, plan)
    found = find_plan(gpu, call, arithmetic, guess=lambda call: GemmPlan())
    assert found.status == "verified" and all(other.split == 3 for other in found.plans)
    right = find_plan(gpu, call, arithmetic, guess=lambda call: replace(plan, source="a rule", verified=True))
    assert right.plans == (plan,)


@pytest.mark.parametrize(
    ("call", "unit"),
    [(mm(64, 512, 512), BF16), (fp8(64, 512, 512), FP8), (mm(64, 512, 512), get_unit("fp32_fma").mode("fp32", "fp32"))],
)
def test_an_order_that_changes_from_tile_to_tile_is_refused(call, unit):
    found = find_plan(FakeGPU(unit, GemmPlan(), tiles=128), call, unit)
    assert found.status == "not found"
    assert found.note == "128 of 32768 results are summed in another order than the first"


def test_an_order_that_no_plan_can_say():
    """A machine whose unit is another than believed: the sighting is told, so that a person can read it."""
    found = find_plan(FakeGPU(AMPERE.mode("bf16", "bf16", "fp32"), GemmPlan(instruction_k=2)), mm(8, 512, 4096), BF16)
    assert found.status == "not found"
    assert found.note.startswith("no plan explains what was seen: 4:")


def test_a_card_without_memory_skips_the_call():
    calls = [mm(8, 32, 64), mm(512, 512, 64)]
    told = []
    found = calibrate(FakeGPU(BF16, memory=1000), calls, lambda call: BF16, advance=lambda *news: told.append(news))
    assert [finding.status for finding in found] == ["verified", "skipped"]
    assert found[1].note == "fake has no memory left for M=512"
    assert told == [(0, "bf16 M=8 N=32 K=64"), (1, "bf16 M=512 N=512 K=64")]


def test_a_handful_of_calls_is_enough():
    gpu = FakeGPU(BF16, GemmPlan(k_tile=64, split=6))
    find_plan(gpu, mm(16, 1024, 16384), BF16)
    assert gpu.asked <= 4


@pytest.mark.parametrize("k", [8, 60, 384, 1000, 20_000])
def test_where_probes_lie(k):
    """Large values at multiples of 4; small ones beside them: two of three of the first 256 places, 255 at most."""
    ends, units = _positions(k)
    close = min(k, 256)
    assert set(units[(units < close) & (units % 4 != 3)].tolist()) == {x for x in range(close) if x % 4 in (1, 2)}
    assert (units % 4 != 0).all() and units.min() > 0 and units.max() < k and len(units) <= 255
    assert set(range(4, min(k, 384), 4)) <= set(ends.tolist())
    assert (ends % 4 == 0).all() and ends.min() > 0 and ends.max() < k and k - ends.max() <= max(4, -(-k // 256) + 4)
    assert len(set(ends.tolist())) == len(ends) and len(set(units.tolist())) == len(units)


def test_very_short_sums_are_compared_alone():
    assert look(FakeGPU(BF16), mm(16, 64, 7)) is None and look(FakeGPU(BF16), mm(16, 64, 8)) is not None
    assert find_plan(FakeGPU(BF16), mm(16, 64, 3), BF16).plans == (GemmPlan(),)


# The plans that are tried, the likely ones first.


def test_tiles_that_show_nothing_are_not_tried():
    def tiles(k, arithmetic):
        return [plan.k_tile for plan in order.unsplit(k, arithmetic) if plan.instruction_k is None]

    assert tiles(192, BF16) == [None, *(tile for tile in sorted(order.TILES) if 192 % tile)]
    assert tiles(192, replace(BF16, block=1)) == [None]
    assert None in tiles(192, replace(BF16, block=2)) and len(tiles(192, replace(BF16, block=2))) > 1


LANES = GemmPlan(k_tile=64, lanes=32, lane_reduce="tree")
THREADS = {
    "tree": LANES,
    "neighbours first": replace(LANES, lane_reduce="pair_tree"),
    "chunks": GemmPlan(k_tile=16, lanes=16, promote_every=16),
    "slices": replace(LANES, part_k=200, split=4),
    "dot product": replace(LANES, split=7, owner="interleaved", reduce="folded"),
}


@pytest.mark.parametrize("name", THREADS)
def test_what_sums_of_threads_show(name):
    """Asked as any order is: it is found among the others."""
    unit = get_unit("fp32_fma").mode("bf16", "bf16")
    seen = look(FakeGPU(unit, THREADS[name]), mm(1, 64, 700, out=torch.float32))
    assert [other for other, plan in THREADS.items() if explains(700, unit, plan, seen)] == [name]


def test_slow_scaled_products_are_promoted_first():
    promoted = {}
    for call in (fp8(64, 64, 1024, fast=False), fp8(64, 64, 1024, fast=True), mm(64, 64, 1024)):
        arithmetic = BF16 if call.operation == "mm" else FP8
        seen = Sighting(*(numpy.arange(n, dtype=numpy.int64) for n in (4, 4, 4)))
        plans = list(order._split(call, arithmetic, seen, (0, 1024)))
        assert any(plan.promote_every for plan in plans) and not all(plan.promote_every for plan in plans)
        promoted[call.operation, call.fast_accum] = plans[0].promote_every is not None
    assert promoted == {("scaled_mm", False): True, ("scaled_mm", True): False, ("mm", mm(1, 1, 1).fast_accum): False}


@pytest.mark.parametrize(("k", "most"), [(24, 24), (25, 25), (150, 128)])
def test_sums_of_every_so_manyth_product_agree_beside_the_first(k, most):
    """Those that are tried, in their order, and of them all whose sums without the first product are those seen."""
    fma, (ends, units) = replace(BF16, block=1), _positions(k)
    tried = [GemmPlan(k_tile=tile, split=parts, owner="interleaved")
             for tile in (1, 2, 4) for parts in range(2, min(most, -(-k // tile)) + 1)]  # fmt: skip
    lost = {plan: expected(k, fma, plan) for plan in tried}
    for seen in tried[:: 1 if k < 30 else 17] + tried[most - 2 : most - 1]:
        agree = [
            plan for plan in tried
            if (lost[plan] == lost[seen])[ends % (plan.k_tile * plan.split) >= plan.k_tile].all()
        ]  # fmt: skip
        assert seen in agree and list(order._strided(k, Sighting(ends, units, lost[seen]))) == agree


@pytest.mark.parametrize("name", LEVELS)
def test_large_products_hide_all_small_ones(name):
    """Beside X = 2**15 or more 255 u are nothing, in float32 as in every unit; operands are numbers of the format."""
    (large, factor), (small, unit) = LEVELS[name]
    stored = torch.tensor([large, factor, small, unit], dtype=torch.float64)
    assert torch.equal(quantize(stored, name, out_dtype=torch.float64), stored)
    x, u = large * factor, small * unit
    assert x >= 2.0**15 and u > 0 and x + 255 * u < x * (1 + 2.0**-25)
    assert name in ("e4m3", "e5m2") or x < 65504 < 2 * x
