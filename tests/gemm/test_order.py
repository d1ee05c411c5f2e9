# SPDX-License-Identifier: Apache-2.0
"""The oracle's accumulation orders by hand, and the schedule of engines beside them."""

import random

import pytest

from fmtsim.spec.datapath import Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import schedule
from fmtsim.support.errors import ArgumentError
from tests.support.product_oracle import order_of_products

FOUR = Datapath(block=4)
CHAIN = GemmPlan()


def written(k, unit=FOUR, plan=CHAIN):
    """Return an order as text: parts | chains / blocks."""
    return " | ".join(
        " / ".join(" ".join(",".join(map(str, block)) for block in chain) for chain in part)
        for part in order_of_products(k, unit, plan)
    )


@pytest.mark.parametrize(
    ("k", "unit", "plan", "expected"),
    [
        (0, FOUR, CHAIN, ""),
        (6, FOUR, CHAIN, "0,1,2,3 4,5"),
        (6, Datapath(block=None), CHAIN, "0,1,2,3,4,5"),
        (6, FOUR, GemmPlan(instruction_k=2), "0,1 2,3 4,5"),
        (6, FOUR, GemmPlan(instruction_k=8), "0,1,2,3 4,5"),
        (5, Datapath(block=None), GemmPlan(instruction_k=3), "0,1,2 3,4"),
        # Blocks start anew at each tile; the incomplete tile is the last, or the first.
        (8, FOUR, GemmPlan(k_tile=3), "0,1,2 3,4,5 6,7"),
        (8, FOUR, GemmPlan(k_tile=3, residue_first=True), "0,1 2,3,4 5,6,7"),
        (6, FOUR, GemmPlan(k_tile=3, residue_first=True), "0,1,2 3,4,5"),
        # Five tiles among three parts: ceil(5 / 3) = 2 each, so 2, 2, 1; among four: 2, 2, 1 and nothing.
        (10, FOUR, GemmPlan(k_tile=2, split=3), "0,1 2,3 | 4,5 6,7 | 8,9"),
        (10, FOUR, GemmPlan(k_tile=2, split=4), "0,1 2,3 | 4,5 6,7 | 8,9"),
        (10, FOUR, GemmPlan(k_tile=2, split=3, owner="interleaved"), "0,1 6,7 | 2,3 8,9 | 4,5"),
        (4, FOUR, GemmPlan(k_tile=2, split=3, owner="interleaved"), "0,1 | 2,3"),
        # The residue is tile 0, so the first of the five tiles 0 | 1,2 | 3,4 | 5,6 | 7,8.
        (9, FOUR, GemmPlan(k_tile=2, split=2, residue_first=True), "0 1,2 3,4 | 5,6 7,8"),
        (9, FOUR, GemmPlan(k_tile=2, split=2, residue_first=True, owner="interleaved"), "0 3,4 7,8 | 1,2 5,6"),
        # Chains of the unit or of the plan count the products of their part and may end within a tile.
        (7, Datapath(block=4, promote_every=5), CHAIN, "0,1,2,3 4 / 5,6"),
        (7, FOUR, GemmPlan(promote_every=5), "0,1,2,3 4 / 5,6"),
        (9, FOUR, GemmPlan(k_tile=3, promote_every=4), "0,1,2 3 / 4,5 6,7 / 8"),
        (
            12,
            FOUR,
            GemmPlan(k_tile=2, split=2, owner="interleaved", promote_every=4),
            "0,1 4,5 / 8,9 | 2,3 6,7 / 10,11",
        ),
        # Windows of eight: the even pairs, then the odd ones; the last window has two pairs and a half.
        (13, Datapath(block=4, paired=True), CHAIN, "0,1,4,5 2,3,6,7 8,9,12 10,11"),
        (10, Datapath(block=4, paired=True), CHAIN, "0,1,4,5 2,3,6,7 8,9"),
        (8, Datapath(block=4, paired=True), GemmPlan(instruction_k=2), "0,1 2,3 4,5 6,7"),
        (9, Datapath(block=4, paired=True), GemmPlan(k_tile=5), "0,1,4 2,3 5,6 7,8"),
        # Lanes: of each tile ceil(k_tile / lanes) neighbours; the last tile, or all, may lack some.
        (9, Datapath(block=1), GemmPlan(k_tile=2, lanes=2), "0 2 4 6 8 | 1 3 5 7"),
        (10, FOUR, GemmPlan(k_tile=8, lanes=2), "0,1,2,3 8,9 | 4,5,6,7"),
        (5, FOUR, GemmPlan(k_tile=5, lanes=4, lane_reduce="tree"), "0,1 | 2,3 | 4"),
        (9, FOUR, GemmPlan(k_tile=4, lanes=2, residue_first=True), "0 1,2 5,6 | 3,4 7,8"),
        (9, FOUR, GemmPlan(k_tile=2, lanes=2, promote_every=2), "0 2 / 4 6 / 8 | 1 3 / 5 7"),
        # Lanes of parts: of three tiles part 0 owns 0 and 2; with part_k tiles are cut anew.
        (10, FOUR, GemmPlan(k_tile=4, lanes=2, split=2, owner="interleaved"), "0,1 8,9 | 2,3 | 4,5 | 6,7"),
        (10, FOUR, GemmPlan(k_tile=4, lanes=2, split=2, part_k=6), "0,1 4,5 | 2,3 | 6,7 | 8,9"),
        (13, FOUR, GemmPlan(k_end=10, k_tile=5, split=2), "0,1,2,3 4 | 5,6,7,8 9"),
        (3, FOUR, GemmPlan(k_end=10), "0,1,2"),
        (5, IntegerDatapath(block=2), CHAIN, "0,1 2,3 4"),
        (5, TwoStageDatapath(block=4), GemmPlan(k_tile=3), "0,1,2 3,4"),
        (3, PairwiseDatapath(block=2), CHAIN, "0,1 2"),
    ],
)
def test_orders_by_hand(k, unit, plan, expected):
    assert written(k, unit, plan) == expected
    order = order_of_products(k, unit, plan)
    assert scheduled(k, unit, plan) == order
    starts = [chain.start for part in schedule(k, unit, plan) for chain in part]
    assert starts == [chain[0][0] for part in order for chain in part]


def test_two_promotions_contradict_each_other():
    with pytest.raises(ArgumentError, match="promote_every=8 of the unit and promote_every=16 of the plan.*leave one"):
        order_of_products(4, Datapath(block=4, promote_every=8), GemmPlan(promote_every=16))


def random_case(draw: random.Random):
    paired = draw.random() < 0.3
    block = draw.choice([2, 4, 6]) if paired else draw.choice([None, 1, 2, 3, 4, 8])
    promote = draw.choice([None, None, 4 * (block or 1), 12 * (block or 1)])
    tile = draw.choice([None, 1, 2, 3, 5, 8, 16])
    owner = draw.choice(["contiguous", "interleaved"])
    plan = GemmPlan(
        k_tile=tile,
        part_k=draw.choice([None, None, 6, 20]) if tile is not None and owner == "contiguous" else None,
        split=1 if tile is None else draw.randint(1, 6),
        owner=owner,
        residue_first=tile is not None and draw.random() < 0.4,
        instruction_k=draw.choice([None, None, 2, 3, 4]),
        promote_every=None if promote else draw.choice([None, 1, 5, 8, 16]),
        lanes=1 if tile is None else draw.choice([1, 1, 2, 3, 4, 8]),
        k_end=draw.choice([None, None, 1, 20, 55]),
    )
    return draw.randint(0, 70), Datapath(block=block, paired=paired, promote_every=promote), plan


def scheduled(k, unit, plan):
    return [[[list(block) for block in chain.blocks] for chain in part] for part in schedule(k, unit, plan)]


def test_the_schedule_of_engines_is_this_order():
    draw = random.Random(7)
    for _ in range(2000):
        k, unit, plan = random_case(draw)
        assert scheduled(k, unit, plan) == order_of_products(k, unit, plan), (k, unit, plan)
