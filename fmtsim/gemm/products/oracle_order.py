"""The accumulation order, written as labels: the second truth beside the schedule that engines run.

Every index k gets the numbers of its part, chain, tile, window and half (docs/matmul.md, section 4, rules 1 and 2);
sorting by these numbers is the order. Nothing here is fast, and nothing is shared with ``schedule.py``.
"""

from collections import Counter, defaultdict

from fmtsim.errors import ArgumentError
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan

Block = list[int]
Chain = list[Block]
Part = list[Chain]


def order_of_products(k: int, datapath: Arithmetic, plan: GemmPlan) -> list[Part]:
    """Return which products are added when: parts of chains of blocks of indices.

    Args:
        k: Products in a sum; 0 gives no parts.
        datapath: The unit: its block, its promotion, whether blocks are paired.
        plan: Tiles, parts, promotion, length of an instruction.

    Raises:
        ArgumentError: Unit and plan promote after different numbers of products.
    """
    promote = promotion_interval(datapath, plan)
    lengths = [n for n in (datapath.block, plan.instruction_k) if n is not None]
    length = min(lengths) if lengths else max(k, 1)
    paired = isinstance(datapath, Datapath) and datapath.paired
    seen: Counter[tuple[int, ...]] = Counter()  # products of a part, and of what a chain has of a tile, so far
    labels: dict[tuple[int, ...], Block] = defaultdict(list)
    for i in range(k):
        tile = _tile(i, k, plan)
        part = _owner(tile, k, plan) if plan.part_k is None else i // plan.part_k
        chain = seen[part,] // promote if promote else 0
        window, inside = divmod(seen[part, chain, tile], 2 * length if paired else length)
        half = inside // 2 % 2 if paired else 0
        labels[part, chain, tile, window, half].append(i)
        seen[part,] += 1
        seen[part, chain, tile] += 1
    parts: dict[int, dict[int, Chain]] = defaultdict(lambda: defaultdict(list))
    for (part, chain, *_), block in sorted(labels.items()):
        parts[part][chain].append(block)
    return [list(chains.values()) for chains in parts.values()]


def promotion_interval(datapath: Arithmetic, plan: GemmPlan) -> int | None:
    """Return after how many products a chain is promoted, by the unit or by the plan; None where neither does."""
    of_unit = datapath.promote_every if isinstance(datapath, Datapath) else None
    if of_unit and plan.promote_every and of_unit != plan.promote_every:
        raise ArgumentError(
            f"promote_every={of_unit} of the unit and promote_every={plan.promote_every} of the plan are two "
            "outer sums; leave one of them out"
        )
    return of_unit or plan.promote_every


def _tile(i: int, k: int, plan: GemmPlan) -> int:
    """Return the number of the tile in which product i lies."""
    if plan.k_tile is None:
        return 0
    if plan.part_k is not None:  # tiles are counted within the part
        start = i // plan.part_k * plan.part_k
        i, k = i - start, min(plan.part_k, k - start)
    residue = k % plan.k_tile
    if plan.residue_first and residue:
        return 0 if i < residue else 1 + (i - residue) // plan.k_tile
    return i // plan.k_tile


def _owner(tile: int, k: int, plan: GemmPlan) -> int:
    """Return the number of the part that owns a tile."""
    if plan.k_tile is None:
        return 0
    if plan.owner == "interleaved":
        return tile % plan.split
    tiles = -(-k // plan.k_tile)
    return tile // -(-tiles // plan.split)
