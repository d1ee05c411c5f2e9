"""The order of products that a plan and a unit give for a K: parts, chains and blocks as index lists."""

from dataclasses import dataclass
from functools import lru_cache

from fmtsim.errors import ArgumentError
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that follow each other in one accumulator; ``start`` is the place of the chain's scales along K."""

    blocks: tuple[tuple[int, ...], ...]
    start: int


Part = tuple[Chain, ...]


@lru_cache(maxsize=256)
def schedule(k: int, datapath: Arithmetic, plan: GemmPlan) -> tuple[Part, ...]:
    """Return the parts of a plan for K products: each a tuple of chains, whose blocks list indices along K.

    Parts that own no product are left out. Indices that a block lacks at the end are zeros, which change nothing.

    Raises:
        ArgumentError: promotions of plan and unit disagree with each other.
    """
    promote = _promotion(datapath, plan)
    parts = []
    for runs in _parts(k, plan):
        chains: list[Chain] = []
        for pieces in _chains(runs, promote):
            blocks = tuple(block for start, stop in pieces for block in _blocks(start, stop, datapath, plan))
            chains.append(Chain(blocks, pieces[0][0]))
        if chains:
            parts.append(tuple(chains))
    return tuple(parts)


def _promotion(datapath: Arithmetic, plan: GemmPlan) -> int | None:
    own = datapath.promote_every if isinstance(datapath, Datapath) else None
    if own is not None and plan.promote_every is not None and own != plan.promote_every:
        raise ArgumentError(
            f"the unit promotes every {own} products, the plan every {plan.promote_every}; leave one of them None"
        )
    return own if plan.promote_every is None else plan.promote_every


def _parts(k: int, plan: GemmPlan) -> list[list[tuple[int, int]]]:
    """Return for each part the tiles it owns as ranges of K, in order, neighbours joined."""
    if plan.k_tile is None:
        return [[(0, k)]] if k else []
    if plan.part_k is not None:
        starts = range(0, k, plan.part_k)
        return [_tiles(start, min(k, start + plan.part_k), plan.k_tile, plan.residue_first) for start in starts]
    tiles = _tiles(0, k, plan.k_tile, plan.residue_first)
    if plan.owner == "interleaved":
        return [tiles[s :: plan.split] for s in range(plan.split)]
    share = -(-len(tiles) // plan.split) or 1
    return [tiles[i : i + share] for i in range(0, len(tiles), share)]


def _tiles(start: int, stop: int, width: int, residue_first: bool) -> list[tuple[int, int]]:
    """Cut a range of K into tiles."""
    first = ((stop - start) % width or width) if residue_first else width
    edges = [start, *range(min(start + first, stop), stop, width), stop]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _chains(tiles: list[tuple[int, int]], promote: int | None) -> list[list[tuple[int, int]]]:
    """Cut the tiles of one part into chains of ``promote`` products each, counted along the part's own products."""
    chains: list[list[tuple[int, int]]] = [[]]
    room = promote
    for start, stop in tiles:
        while start < stop:
            if room == 0:
                chains.append([])
                room = promote
            end = stop if room is None else min(stop, start + room)
            chains[-1].append((start, end))
            room = None if room is None else room - (end - start)
            start = end
    return [chain for chain in chains if chain]


def _blocks(start: int, stop: int, datapath: Arithmetic, plan: GemmPlan) -> list[tuple[int, ...]]:
    length = datapath.block or stop - start
    if plan.instruction_k is not None:
        length = min(length, plan.instruction_k)
    if isinstance(datapath, Datapath) and datapath.paired:
        window = [tuple(range(i, min(i + 2 * length, stop))) for i in range(start, stop, 2 * length)]
        halves = [tuple(j for j in w if (j - w[0]) // 2 % 2 == parity) for w in window for parity in (0, 1)]
        return [half for half in halves if half]
    return [tuple(range(i, min(i + length, stop))) for i in range(start, stop, length)]
