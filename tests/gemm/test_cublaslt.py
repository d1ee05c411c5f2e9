# SPDX-License-Identifier: Apache-2.0
"""The accumulation orders behind cuBLASLt's choices: recorded predictions, dropped tails, and what has no order."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

import fmtsim
from fmtsim.gemm.targets.cublaslt import GEMV, GEMV_FLOAT32, TILES, choice_order, same_order, shared
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.gemm.units.unit import get_unit
from fmtsim.spec.schedule import schedule
from tests.support.recorded import SHARED
from tests.support.targets import fp8, linear, mm
from tools.calibrate.grow import plainest

CASES = SHARED / "spec" / "cublas_orders_cases.json"
MERGES = {
    "partials": (None, "serial"), "running": ("out", "in_place"), "each": ("out", "serial"), "one": (None, "serial"),
}  # fmt: skip
WGMMA, F32 = get_unit("hopper.wgmma"), torch.float32
ROWS, COLUMNS = ({"a_layout": layout, "b_layout": layout} for layout in ("row", "column"))


@cache
def cases():
    if not CASES.is_file():
        pytest.skip("no calls of cuBLASLt beside the project")
    return json.loads(CASES.read_text())["cases"]


def ordered(case):
    """Return the call of a case, and the order that its configuration comes to."""
    m, n, k, config = case["M"], case["N"], case["K"], case["config"]
    fmt = case["kind"]
    if fmt == "fp8":
        call = fp8(m, n, k, fast=False, out=torch.float16)
    else:  # both operands lie row after row, so K is contiguous in the first alone
        call = mm(m, n, k, fmt, linear(1, 1, 1, fmt).out, b_layout="column")
    choice = Choice(
        config["algo_id"],
        config["splitk_num"],
        config["reduction_scheme"],
        config["custom_option"],
        config["stages_id"],
    )
    return call, choice_order(choice, call, case["profile"].partition("/")[0])


def edges(k, call, plan):
    """Return for each part where its blocks begin, and where it ends."""
    path = WGMMA.find(call.a, call.b, "fp32", None).datapath
    blocks = [[block for chain in part for block in chain.blocks] for part in schedule(k, path, plan)]
    return [[*(block[0] for block in part), part[-1][-1] + 1] for part in blocks]


def test_tiles_of_nvjet():
    seen = 0
    for case in cases():
        if case["config"]["algo_id"] != 66 or "declined" in case:
            continue
        call, order = ordered(case)
        lost = case.get("floor_rule", {}).get("lost", 0)
        expected = case["floor_rule"] if lost else case
        parts = edges(call.k, call, order.plan)
        chunk, count = expected["chunk"], expected["parts"]
        ends = [*range(chunk, chunk * count, chunk), call.k - lost]
        assert [part[-1] for part in parts] == ends, case["id"]
        assert [part[0] for part in parts] == [0, *ends[:-1]]
        assert order.plan.promote_every == case["fresh_sum_every"]
        assert order.plan.k_end == (call.k - lost if lost else None)
        assert (order.plan.partial, order.plan.reduce, order.unit) == (None, "serial", None)
        seen += 1
    assert seen == 27


def test_slices_of_cutlass():
    seen = 0
    for case in cases():
        if case.get("mode") not in ("k_per_dot", "splitk_groups"):
            continue
        call, order = ordered(case)
        parts = edges(call.k, call, order.plan)
        for part in case.get("slices", [case]):
            found = next(each for each in parts if each[0] == part.get("start", 0))
            head = part["edges_head"]
            assert found[: len(head)] == head and found[-1] == part.get("stop", call.k), case["id"]
            assert len(found) - 1 == part["updates"]
        assert len(parts) == case.get("parts", 1)
        partial, reduce = MERGES[case.get("merge", "one part").split()[0]]
        name = order.plan.partial and order.plan.partial.name
        assert (name, order.plan.reduce) == (case["kind"] if partial else None, reduce), case["id"]
        seen += 1
    assert seen == 14


def hashed(k, seed):
    """Return the operands' numbers: a hash of k, with a sign, 11 bits and one of eight exponents."""
    z = (k * 0x9E3779B9 + seed * 0x85EBCA6B) & 0xFFFFFFFF
    z = ((z ^ z >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    z = ((z ^ z >> 15) * 0x846CA68B) & 0xFFFFFFFF
    z = z ^ z >> 16
    return torch.ldexp(((z & 2047) - 1024).double(), (z >> 11) % 8 - 14).half()


def test_kernels_without_tensor_cores_have_the_bits_of_their_description():
    """Sums of threads that others computed from what each kernel, option and number of parts does with K."""
    threads = [case for case in cases() if "fp32_bits" in case]
    assert len(threads) == 35
    for case in threads:
        order = ordered(case)[1]
        assert (order.unit, order.operands) == ("fp32_fma", None)
        a, b = (hashed(torch.arange(case["K"]), seed) for seed in (1, 2))
        for dtype, integer, bits in (
            (torch.float32, torch.int32, case["fp32_bits"]), (torch.float16, torch.int16, case["fp16_bits"])
        ):  # fmt: skip
            y = fmtsim.mm(a[None], b[:, None], target=order.unit, plan=order.plan, out_dtype=dtype)
            assert y.view(integer).item() & (2 ** (8 * dtype.itemsize) - 1) == int(bits, 16), (case["id"], case["note"])


def test_kernels_that_were_not_measured_have_no_order():
    """Of what their planner declines, algorithm 56 was measured since: a chain of multiply-adds."""
    declined = [case for case in cases() if "declined" in case and case["config"]["algo_id"] != 56]
    assert [case["id"] for case in declined if ordered(case)[1] is not None] == []
    assert len(declined) == 7


@pytest.mark.parametrize(
    ("k", "split", "end"),
    [(44832, 35, 44800), (44832, 34, None), (11528, 9, 11520), (11528, 8, None), (11520, 9, None), (2104, 16, None)],
)
def test_both_sides_of_the_dropped_tail(k, split, end):
    plan = choice_order(Choice(66, split, 2), mm(64, 64, k), "sm_90").plan
    assert (plan.k_end, plan.split, plan.k_tile) == (end, split, 64)
    parts = edges(k, mm(64, 64, k), plan)
    assert parts[-1][-1] == (end or k)
    if end is not None:  # every part has the same number of whole tiles, where all of K would leave one without
        assert {part[-1] - part[0] for part in parts} == {end // split} and len(parts) == split


def test_a_dropped_tail_adds_nothing():
    """Ones in the last 32 of 44832 places give 0 in 35 parts and 32 in 34, NaN there vanishes likewise."""
    a = torch.zeros(1, 44832, dtype=torch.bfloat16)
    a[:, -32:] = 1
    b = torch.ones(44832, 1, dtype=torch.bfloat16)
    for split, expected in ((35, 0.0), (34, 32.0)):
        plan = choice_order(Choice(66, split, 2), mm(64, 64, 44832), "sm_90").plan
        assert fmtsim.mm(a, b, target="hopper.wgmma", plan=plan).item() == expected
    b[-1] = torch.nan
    plan = choice_order(Choice(66, 35, 2), mm(64, 64, 44832), "sm_90").plan
    assert fmtsim.mm(a, b, target="hopper.wgmma", plan=plan).item() == 0


def test_scales_promotions_and_epilogues_of_nvjet():
    def plan(call, split=1, architecture="sm_90"):
        return choice_order(Choice(66, split, 2 if split > 1 else 0), call, architecture).plan

    assert plan(fp8(64, 64, 4096, fast=True)).promote_every is None
    assert [plan(fp8(64, 64, 4096, fast=False), 1, each).promote_every for each in GEMV] == [128, None, None]
    assert plan(fp8(64, 64, 4096, scaling="row")).epilogue == "column_row"
    blocks, rows = (plan(fp8(64, 64, 8192, scaling=kind), 3) for kind in ("block_128", "row_block_128"))
    assert [(p.k_tile, p.promote_every, p.scaled_promotion, p.successive_scales) for p in (blocks, rows)] == [
        (512, 128, True, False), (128, 128, True, True)
    ]  # fmt: skip
    assert choice_order(Choice(66), fp8(64, 64, 8192, scaling="block_128"), "sm_100") is None
    assert plan(linear(64, 1, 4096)).bias_after_rounding and not plan(linear(64, 1, 4096), 3).bias_after_rounding
    assert not plan(linear(64, 8, 4096)).bias_after_rounding
    assert choice_order(Choice(66, 3, 4), mm(64, 64, 4096), "sm_90") is None


def test_cutlass_reductions_grains_and_bias():
    def plan(choice, call):
        return choice_order(choice, call, "sm_90").plan

    tf32 = plan(Choice(21, 10, 2, 0, 6), mm(160, 128, 680, "tf32"))
    assert (tf32.k_tile, tf32.part_k, tf32.split, tf32.instruction_k) == (16, 68, 10, None)
    assert plan(Choice(21, 24, 2, 0, 10), mm(64, 64, 64, "tf32")).split == 2  # slices of a whole line of 32
    columns = mm(64, 64, 4096, a_layout="column", b_layout="column")
    assert plan(Choice(23, 3, 2, 0, 13), columns).part_k == 1368  # K along no row: whole lines are of no use
    assert plan(Choice(23, 3, 2, 0, 13), replace(columns, a_layout="row")).part_k == 1408
    half = mm(64, 64, 256, "fp16", torch.float16, accumulate="fp16")
    assert (plan(Choice(21, 4, 2, 0, 18), half).partial.name, plan(Choice(21, 4, 2, 0, 18), half).round_trip) == (
        "fp16", True
    )  # fmt: skip
    rounded = plan(Choice(24, 4, 4, 0, 0), linear(64, 64, 4100))
    assert (rounded.partial.name, rounded.bias_after_rounding, rounded.instruction_k) == ("bf16", True, 8)
    single = plan(Choice(24, 4, 1, 0, 0), mm(64, 64, 4100))
    assert (single.partial, single.reduce) == (None, "serial")  # float32 results lose nothing in the output
    assert plan(Choice(24, 4, 1, 0, 0), linear(64, 64, 4100)).reduce == "in_place"
    assert not plan(Choice(24), linear(64, 1, 4100)).bias_after_rounding
    assert choice_order(Choice(24, 4, 2), linear(64, 1, 4100), "sm_90") is None
    assert plan(Choice(24, 4, 2, 0, 13), linear(64, 64, 4100)).bias_after_rounding
    vector = mm(7, 1, 832, "fp16", torch.float16, accumulate="fp16", a_layout="column", b_layout="column")
    assert plan(Choice(24, 8, 2, 0, 7), vector).part_k == 128  # of a vector K always lies along a row


def test_kernels_without_tensor_cores_on_hopper():
    def order(choice, *call, **more):
        return choice_order(choice, mm(*call, **more), "sm_90")

    rows = {"a_layout": "row", "b_layout": "row"}
    turns = order(Choice(11), 4, 8675, 480, **rows).plan
    assert (turns.lanes, turns.k_tile, turns.promote_every, turns.lane_reduce) == (16, 16, 16, "serial")
    assert order(Choice(11), 4, 8675, 480, b_layout="column").plan.part_k == 240
    chains = [order(Choice(13 if o else 14, 2, 2, o), 1, 64, 3000, b_layout=b).plan.lanes
              for o in (0, 75) for b in ("row", "column")]  # fmt: skip
    assert chains == [256, 128, 32, 32]
    assert order(Choice(14, 31, 2), 11, 1, 9024, "tf32", a_layout="column").plan.lanes == 128
    assert order(Choice(14, 31, 2), 1, 1, 9024).plan.lanes == 256
    plain, ended = fmtsim.GemmPlan(), fmtsim.GemmPlan(promote_every=40)
    for algorithm, plan in ((12, plain), (20, plain), (55, ended), (56, ended)):
        assert order(Choice(algorithm), 64, 64, 40, "tf32") == (plan, "fp32_fma", "fp32", True)
    bias = [choice_order(Choice(13, split, 2 * (split > 1), 75), linear(1, 64, 3000), "sm_90").plan for split in (1, 2)]
    assert [plan.bias_after_rounding for plan in bias] == [False, True]
    assert not choice_order(Choice(13, 2, 2, 11), linear(64, 1, 3000), "sm_90").plan.bias_after_rounding
    in_place = [choice_order(Choice(a, 8, 1, 0, 18), linear(32, 64, 4096), "sm_90") for a in (21, 23)]
    assert [order is None for order in in_place] == [True, False]
    parts = order(Choice(63, 4, 2, 0, 9), 6743, 16, 1944, "tf32").plan
    assert (parts.k_tile, parts.split, parts.owner, parts.residue_first) == (32, 4, "interleaved", False)


def test_zeros_behind_the_products_of_small_kernels_make_minus_zero_plus_zero():
    """As recorded on an H100: of products of -2^-149 and 1e-30, 20 keeps -0 where the last tile of 8 is whole."""
    for algorithm, k, sign in ((20, 1, 0), (20, 7, 0), (20, 8, 1), (20, 10, 1), (55, 1, 0), (55, 40, 0), (56, 16, 0)):
        found = choice_order(Choice(algorithm), mm(4, 4, k, "tf32", F32), "sm_90")
        a, b = torch.zeros(1, k), torch.zeros(k, 1)
        a[0, -1], b[-1] = -(2.0**-149), 1e-30
        result = fmtsim.mm(a, b, target="fp32_fma", plan=found.plan)
        assert found.certain and (result.item(), result.signbit().item()) == (0, sign), (algorithm, k)
    assert [choice_order(Choice(12), mm(4, 4, k, "tf32", F32), "sm_90").certain for k in (1, 2)] == [False, True]


def test_stream_k_kernels_that_share_all_tiles_alike():
    """197x704x4608 by 4 parts of 36 tiles; 123x2560x6144 by 3 of 32; 49 tiles of 331 steps by 165 and 166."""
    call, fp16 = mm(197, 704, 4608, "tf32", F32), torch.float16
    plan = choice_order(Choice(43, 4, 2, 0, 34), call, "sm_90").plan
    assert (plan.k_tile, plan.split, plan.owner, plan.reduce) == (32, 4, "even", "neighbours")
    assert [part[0] for part in edges(4608, call, plan)] == [0, 1152, 2304, 3456]
    half = choice_order(Choice(39, 3, 2, 0, 35), mm(123, 2560, 6144, "fp16", fp16, accumulate="fp16"), "sm_90").plan
    assert (half.k_tile, half.partial.name, half.round_trip, half.reduce) == (64, "fp16", True, "neighbours")
    odd = replace(call, k=10576)
    parts = edges(10576, odd, choice_order(Choice(43, 2, 2, 0, 34), odd, "sm_90").plan)
    assert [part[0] for part in parts] == [0, 165 * 32]
    unknown = [Choice(43, 9, 2, 0, 34), Choice(43, 4, 0, 0, 34), Choice(43, 4, 2, 0, 33)]
    assert [choice_order(choice, call, "sm_90") for choice in unknown] == [None] * 3
    assert choice_order(Choice(43, 4, 2, 0, 34), replace(call, operation="linear", bias=True), "sm_90") is None


TF32, SUMS16 = Kind("tf32", "tf32", F32, "tf32"), Kind("fp16", "fp16", torch.float16, "16f")


@pytest.mark.parametrize(
    ("kind", "size", "tile", "workspace", "expected"),
    [
        (TF32, (197, 11008, 2048), 18, 131, Choice(43)),
        (TF32, (2, 4096, 3584), 15, 0, Choice(43)),
        (TF32, (197, 704, 4608), 17, 3146175, Choice(43, 4, 2, 0, 34)),
        (TF32, (33, 2560, 3584), 15, 1311039, Choice(43, 2, 2, 0, 34)),
        (SUMS16, (64, 3072, 15872), 18, 1966815, Choice(39, 5, 2, 0, 35)),
        (SUMS16, (384, 6912, 9216), 20, 3146079, None),  # the last 46 of 162 tiles are shared
        (SUMS16, (64, 1024, 5376), 15, 96 * 8192 + 159 + 4 * 96, None),  # 3 parts or 6
        (TF32, (64, 1024, 5376), 99, 0, None),  # no tile that was measured
    ],
)
def test_workspace_tells_how_stream_k_kernels_share_tiles(kind, size, tile, workspace, expected):
    """Answers of an H100 and what its results show; of some the sizes are made up."""
    m, n, k = size
    choice = Choice(43 if kind is TF32 else 39, -1, 0, tile, 34 if kind is TF32 else 35)
    assert shared(choice, Question(kind, 0, m, n, k), workspace) == (expected or choice)


def test_tiles_have_the_numbers_of_the_library():
    """cublasLt.h counts its tiles by area, from CUBLASLT_MATMUL_TILE_32x32 = 11 on."""
    areas = {tile: rows * columns for tile, (rows, columns) in TILES.items()}
    groups = {11: 10, 12: 11, 13: 11, 14: 12, 15: 12, 16: 12, 17: 13, 18: 13, 19: 14, 20: 14, 21: 14, 23: 15, 24: 15}
    assert areas == {tile: 1 << power for tile, power in groups.items()}
    assert all(size & (size - 1) == 0 for tile in TILES.values() for size in tile)


def test_lanes_have_at_most_64_products_of_a_slice():
    """Lanes with an upper limit, at a K beyond it: the least multiple of lanes * 64 whose chains show."""
    for formats, table in (("bf16", GEMV), ("fp32", GEMV_FLOAT32)):
        for option, lanes in table["sm_90"].items():
            if lanes.products < 0:
                order = choice_order(Choice(13, 1, 0, option), mm(1, 8, 4096, formats, F32), "sm_90")
                assert order.plan.k_tile == 64 * lanes.lanes, (formats, option)


def test_interleaved_parts_are_known_with_the_option_that_says_how_they_are_added():
    """F.linear of 9x149x5016 in TF32 adds its 6 parts in pairs; a Choice without the option cannot tell."""
    call = replace(mm(9, 149, 5016, "tf32", F32), operation="linear", bias=True)
    orders = [choice_order(Choice(63, 6, 2, option, 15), call, "sm_90") for option in (0, 1, 2)]
    assert [(order.plan.reduce, order.certain) for order in orders] == [
        ("serial", False), ("pairwise", True), ("serial", True),
    ]  # fmt: skip
    assert choice_order(Choice(63, 2, 2, 0, 15), call, "sm_90").certain  # two parts have one order


def test_float32_kernels_on_hopper():
    def order(algorithm, split, k, reduction=2, custom=0, **more):
        found = choice_order(Choice(algorithm, split, reduction, custom), mm(64, 96, k, "fp32", F32, **more), "sm_90")
        return None if found is None else found.plan

    # slices start at whole lines where K lies along rows, else at multiples of 4 products; largek's at 8
    assert (order(20, 3, 2048).part_k, order(20, 3, 2044).part_k, order(20, 3, 2048, **COLUMNS).part_k) == (
        704,
        684,
        684,
    )
    assert (order(10, 3, 2044).part_k, order(10, 3, 2044).split, order(10, 600, 768).split) == (688, 3, 96)
    # parts own tiles of 8 products in turn
    turns = order(55, 4, 100)
    assert (turns.k_tile, turns.split, turns.owner, turns.part_k) == (8, 4, "interleaved", None)
    assert order(55, 264, 100).split == 13 and order(20, 1, 100) == fmtsim.GemmPlan()
    # with option 1 more than two parts of more than one tile meet in an order that depends on the place in the result
    assert [order(55, split, 100, 2, 1) is None for split in (2, 4, 12, 13)] == [False, True, True, False]
    # a reduction in place begins with the bias
    assert [order(20, 3, 2048, r, bias=True).reduce for r in (1, 2)] == ["in_place", "serial"]
    assert order(20, 3, 2048, 1).reduce == "serial" and order(20, 3, 2048, 4) is not None
    # split -1 of the small kernels changes nothing; TF32 has no splits of these kernels
    small = [choice_order(Choice(11, split), mm(2, 96, 64, "fp32", F32, **ROWS), "sm_90") for split in (1, -1)]
    assert small[0] == small[1] and small[0].plan.lanes == 16
    assert [choice_order(Choice(a, 3, 2), mm(64, 96, 768, "tf32"), "sm_90") for a in (10, 20, 55)] == [None] * 3
    for algorithm, split, k in (
        (20, 3, 2044),
        (55, 4, 2044),
        (10, 5, 2044),
    ):  # each order shows in sums of random numbers
        a, b = torch.randn(8, k), torch.randn(k, 8)
        plans = [order(algorithm, split, k), order(algorithm, 1, k), order(55 if algorithm == 20 else 20, split, k)]
        bits = [fmtsim.mm(a, b, target="fp32_fma", plan=plan).view(torch.int32) for plan in plans]
        assert all((bits[0] != other).any() for other in bits[1:])


def test_representative_choices_of_float32_keep_the_order():
    for bias in (False, True):
        kind = Kind("fp32", "fp32", F32, bias=bias)
        for question in (Question(kind, layout, 40, 96, 2044) for layout in range(4)):
            for choice in (Choice(20, 1), Choice(55, 1, stages=31), Choice(20, 3, 1, 0, 26), Choice(20, 3, 2, 0, 28),
                           Choice(55, 3, 2, 2, 31), Choice(11, -1), Choice(10, 3, 1)):  # fmt: skip
                assert same_order(choice, plainest(choice, question), question, "sm_90"), (choice, question)
    assert not same_order(Choice(20, 3, 1), Choice(20, 3, 2), question, "sm_90")  # with a bias


def test_tables_hold_what_was_measured_alone():
    assert {len(table) for table in GEMV.values()} == {51, 70}
    vector, matrix = mm(1, 64, 100), mm(8, 64, 100)
    assert choice_order(Choice(13, custom=10), matrix, "sm_90") is None
    single = [choice_order(Choice(13, custom=10), mm(1, n, 200, "tf32", F32), "sm_90") for n in (100, 101)]
    assert single[0].plan.lanes == 32 and single[0].plan.k_tile == 128 and single[1] is None
    assert choice_order(Choice(13, custom=115), mm(1, 12288, 4096, "tf32", F32), "sm_90").plan.lanes == 4
    assert choice_order(Choice(13, custom=94), replace(vector, a="tf32", b="tf32"), "sm_90")[1:3] == (
        "fp32_fma",
        "fp32",
    )
    dots = replace(mm(1, 1, 96, "tf32"), operation="bmm", batch=256)
    assert choice_order(Choice(13, custom=96), dots, "sm_90") is None
    assert choice_order(Choice(13, custom=96), replace(dots, m=2), "sm_90") is not None
    half = replace(matrix, a="fp16", b="fp16", out=torch.float16, accumulate="fp16")
    assert choice_order(Choice(11), half, "sm_90") is None
    assert [choice_order(Choice(a, -1, 2), matrix, "sm_90") for a in (39, 41, 42, 63)] == [None] * 4
    assert choice_order(Choice(15), matrix, "sm_90") is None
