# SPDX-License-Identifier: Apache-2.0
"""The order of products that a plan and a unit give for a K: parts, chains and blocks as index lists.

Where a plan has lanes, each lane of a part is a sum like a part; ``combination`` says how these sums become one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that follow each other in one accumulator; ``start`` is the place of the chain's scales along K."""

    blocks: tuple[tuple[int, ...], ...]
    start: int


Part = tuple[Chain, ...]
"""A sum of its own: a part of K, or a lane of a part."""
Postfix = list[tuple[int, int]]
"""Sums to push on a stack, each with how many times the two on top are added afterwards, the lower to the left."""

ZERO = -1  # in a Postfix: +0, a sum without products
_NOTHING: Postfix = [(ZERO, 0)]
_LONG = 1 << 15  # products above which a schedule, 100 bytes each, is not cached


def schedule(k: int, datapath: Arithmetic, plan: GemmPlan) -> tuple[Part, ...]:
    """Return the parts of a plan for K products: each a tuple of chains, whose blocks list indices along K.

    Parts and lanes that own no product are left out. Indices that a block lacks at the end are zeros, which change
    nothing.

    Raises:
        ArgumentError: promotions of plan and unit disagree with each other.
    """
    return _cached_schedule(k, datapath, plan) if k <= _LONG else _schedule(k, datapath, plan)


def _schedule(k: int, datapath: Arithmetic, plan: GemmPlan) -> tuple[Part, ...]:
    every = datapath.promote_every if isinstance(datapath, Datapath) else None
    if every is not None and plan.promote_every is not None and every != plan.promote_every:
        raise ArgumentError(
            f"the unit promotes every {every} products, the plan every {plan.promote_every}; leave one of them None"
        )
    promote = every if plan.promote_every is None else plan.promote_every
    parts = []
    # K -> parts of tiles -> lanes of runs -> chains of pieces -> blocks of indices
    for runs in (lane for tiles in _parts(k, plan) for lane in _lanes(tiles, plan)):
        chains: list[Chain] = []
        # Cut the tiles of one part into chains of `promote` products each, counted along the part's own products.
        chains_chains: list[list[tuple[int, int]]] = [[]]
        room = promote
        for start, stop in runs:
            while start < stop:
                if room == 0:
                    chains_chains.append([])
                    room = promote
                end = stop if room is None else min(stop, start + room)
                chains_chains[-1].append((start, end))
                room = None if room is None else room - (end - start)
                start = end
        for pieces in [chain for chain in chains_chains if chain]:
            blocks = tuple(block for start, stop in pieces for block in _blocks(start, stop, datapath, plan))
            chains.append(Chain(blocks, pieces[0][0]))
        if chains:
            parts.append(tuple(chains))
    return tuple(parts)


_cached_schedule = lru_cache(maxsize=256)(_schedule)


def adds_in_order(plan: GemmPlan) -> bool:
    """Return True if ``plan.reduce`` adds the sums of ``schedule`` as parts; else ``combination`` has the order."""
    return plan.lanes == 1 and plan.reduce != "folded"


def combination(k: int, plan: GemmPlan) -> tuple[tuple[int, int], ...]:
    """Return how the sums of ``schedule`` are added, for any plan but one whose parts are added in place.

    Returns:
        A Postfix: numbers of sums, the first one's at first, or ``ZERO``, each with the additions that follow it. At
        most ``STACK`` sums are on the stack at a time.
    """
    parts: list[Postfix] = []
    number = 0
    for tiles in _parts(k, plan):
        count = sum(1 for _ in _lanes(tiles, plan))
        lanes: list[Postfix] = [[(number + i if i < count else ZERO, 0)] for i in range(plan.lanes)]
        number += count
        if not count:
            continue
        # 1. the lanes of a part
        if plan.lane_reduce == "pair_tree":
            lanes = [_serial(lanes[i : i + 2]) for i in range(0, len(lanes), 2)]
        while plan.lane_reduce != "serial" and len(lanes) > 1:  # a tree: the two halves onto each other, down to one
            half = len(lanes) // 2
            lanes = [_serial([lanes[i], lanes[i + half]]) for i in range(half)]
        parts.append(_serial(lanes))
    if not parts:
        return ()
    # 2. the parts
    if plan.reduce == "folded":
        # as a block of 128 threads takes them: each its own share, 64 and 32 apart, then four
        threads = [_serial(parts[t::128] or [_NOTHING]) for t in range(128)]
        threads = [_serial([threads[t], threads[t + 64]]) for t in range(64)]
        threads = [_serial([threads[t], threads[t + 32]]) for t in range(32)]
        parts = [_serial(threads[j::4]) for j in range(4)]
    elif plan.reduce == "pairwise" and len(parts) > 1:
        half, last = -(-len(parts) // 2), len(parts) - 1
        pairs = [_serial([parts[i], *parts[i + half : last][:1]]) for i in range(half)]
        parts = [pairs[0], parts[last], *pairs[1:]]  # a sum has no order of two
    while plan.reduce == "neighbours" and len(parts) > 1:
        odd = len(parts) % 2
        parts = parts[:odd] + [_serial(parts[i : i + 2]) for i in range(odd, len(parts), 2)]
    return tuple(_serial(parts))


STACK = 24
"""At most so many sums wait for each other in a ``combination``: log2 of 4096 lanes, and what folding adds."""


def _serial(sums: list[Postfix]) -> Postfix:
    """Return the sum of sums, one after another; +0 counts once, since it takes the sign of -0, which never returns."""
    first, *rest = sums
    joined, without = [*first], first == _NOTHING
    for term in rest:
        if term != _NOTHING or not without:
            *before, (last, additions) = term
            joined += [*before, (last, additions + 1)]
        without |= term == _NOTHING
    return joined


def _parts(k: int, plan: GemmPlan) -> list[list[tuple[int, int]]]:
    """Return for each part the tiles it owns as ranges of K, in order."""
    k = k if plan.k_end is None else min(k, plan.k_end)
    if plan.k_tile is None:
        return [[(0, k)]] if k else []
    if plan.part_k is not None:
        starts = range(0, k, plan.part_k)
        return [_tiles(start, min(k, start + plan.part_k), plan.k_tile, plan.residue_first) for start in starts]
    tiles = _tiles(0, k, plan.k_tile, plan.residue_first)
    if plan.owner == "interleaved":
        return [tiles[s :: plan.split] for s in range(plan.split)]
    if plan.owner == "even":
        share, longer = divmod(len(tiles), plan.split)
        edges = [s * share + max(s - plan.split + longer, 0) for s in range(plan.split + 1)]
        return [tiles[i:j] for i, j in pairwise(edges) if i < j]
    share = -(-len(tiles) // plan.split) or 1
    return [tiles[i : i + share] for i in range(0, len(tiles), share)]


def _lanes(tiles: list[tuple[int, int]], plan: GemmPlan) -> Iterator[list[tuple[int, int]]]:
    """Yield what each lane of a part owns of its tiles; lanes without products are the last ones, and left out."""
    if plan.lanes == 1 or plan.k_tile is None:
        yield from [tiles] if tiles else []
        return
    share = -(-plan.k_tile // plan.lanes)
    for first in range(0, share * plan.lanes, share):
        runs = [(a + first, min(a + first + share, b)) for a, b in tiles if a + first < b]
        if runs:
            yield runs


def _tiles(start: int, stop: int, width: int, residue_first: bool) -> list[tuple[int, int]]:
    """Cut a range of K into tiles."""
    first = ((stop - start) % width or width) if residue_first else width
    edges = [start, *range(min(start + first, stop), stop, width), stop]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _blocks(start: int, stop: int, datapath: Arithmetic, plan: GemmPlan) -> list[tuple[int, ...]]:
    length = datapath.block or stop - start
    if plan.instruction_k is not None:
        length = min(length, plan.instruction_k)
    if isinstance(datapath, Datapath) and datapath.paired:
        window = [tuple(range(i, min(i + 2 * length, stop))) for i in range(start, stop, 2 * length)]
        halves = [tuple(j for j in w if (j - w[0]) // 2 % 2 == parity) for w in window for parity in (0, 1)]
        return [half for half in halves if half]
    whole = stop - (stop - start) % length
    return [
        *(tuple(range(i, i + length)) for i in range(start, whole, length)),
        *filter(None, [tuple(range(whole, stop))]),
    ]


def same_order(k: int, arithmetic: Arithmetic, first: GemmPlan, second: GemmPlan) -> bool:
    """Return True if two plans add K products in the same order; plans with different tile widths may."""
    reductions = {first.reduce, second.reduce}
    if len(reductions) == 2 and (max(first.split, second.split) > 2 or "in_place" in reductions):
        return False
    if not (adds_in_order(first) and adds_in_order(second)):
        same = schedule(k, arithmetic, first) == schedule(k, arithmetic, second)
        return same and combination(k, first) == combination(k, second)
    plain = first.promote_every is None and second.promote_every is None
    if plain and _edge(k, first) != _edge(k, second):  # a quick look, because a schedule lists all products
        return False
    return _chain_blocks(k, arithmetic, first) == _chain_blocks(k, arithmetic, second)


def _chain_blocks(k: int, arithmetic: Arithmetic, plan: GemmPlan) -> Any:
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
    share = max(tiles // plan.split, 1) if plan.owner == "even" else share
    missing = -k % plan.k_tile if plan.residue_first else 0
    return min(share * plan.k_tile - missing, k)
