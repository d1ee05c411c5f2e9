# SPDX-License-Identifier: Apache-2.0
"""Whether two plans add the same products in the same order, in whatever words they say so."""

from typing import Any

from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import adds_in_order, combination, schedule


def same_order(k: int, arithmetic: Arithmetic, first: GemmPlan, second: GemmPlan) -> bool:
    """Say whether two plans add K products in the same order: tiles of different widths may be dealt alike."""
    ways = {first.reduce, second.reduce}
    if len(ways) == 2 and (max(first.split, second.split) > 2 or "in_place" in ways):
        return False
    if not (adds_in_order(first) and adds_in_order(second)):
        same = schedule(k, arithmetic, first) == schedule(k, arithmetic, second)
        return same and combination(k, first) == combination(k, second)
    plain = first.promote_every is None and second.promote_every is None
    if plain and _edge(k, first) != _edge(k, second):  # a quick look, because a schedule lists all products
        return False
    return _chains(k, arithmetic, first) == _chains(k, arithmetic, second)


def _chains(k: int, arithmetic: Arithmetic, plan: GemmPlan) -> Any:
    """Return the blocks of a plan's chains; parts of one chain each are added as promoted chains of one part are."""
    parts = schedule(k, arithmetic, plan)
    chains = [[chain.blocks for chain in part] for part in parts]
    if plan.reduce == "serial" and plan.partial is None and all(len(part) == 1 for part in chains):
        return [[blocks for part in chains for blocks in part]]
    return chains


def _edge(k: int, plan: GemmPlan) -> int:
    """Return where the first part ends, or with interleaved tiles the first tile."""
    k = min(k, plan.k_end or k)
    if plan.k_tile is None:
        return k
    if plan.part_k is not None:
        return min(plan.part_k, k)
    tiles = -(-k // plan.k_tile)
    share = 1 if plan.owner == "interleaved" and plan.split > 1 else -(-tiles // plan.split)
    missing = -k % plan.k_tile if plan.residue_first else 0
    return min(share * plan.k_tile - missing, k)
