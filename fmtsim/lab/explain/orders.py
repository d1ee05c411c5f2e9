# SPDX-License-Identifier: Apache-2.0
"""Orders in which libraries and kernels add the products of K: chains, tiles, splits, slices, lanes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fmtsim.spec.datapath import Datapath
from fmtsim.spec.plan import GemmPlan

SPLITS = (*range(2, 17), 18, 20, 24, 32, 48, 64, 96, 128)  # parts that libraries and kernels ask for
LANES = (32, 64, 128, 256)  # threads that share a sum
TILES = (128, 64, 32, 256, 512, 16, 8)  # widths of K tiles that libraries use, likely ones first
STRIDES = (1, 2, 4)  # consecutive products of a thread's sum, where threads share a sum
SLICE = 4  # slices of K are multiples of this many products
PARTS = 128
PROMOTIONS = (128, 64, 256, 512, 32)


def orders(k: int, arithmetic: Datapath, *, thorough: bool = False) -> Iterator[GemmPlan]:
    """Yield the orders of K products that nothing seen narrows down, one chain first; some may be equal.

    Args:
        thorough: Also yield every way to deal tiles and to cut slices in up to ``PARTS`` parts.
    """
    yield from (plan for plan in unsplit(k, arithmetic) if plan.k_tile is None or plan.k_tile < k)
    yield from (GemmPlan(promote_every=every) for every in PROMOTIONS if every < k)
    if arithmetic.block == 1:  # threads of a CUDA core kernel
        for width in (width for width in LANES if width < k):
            for stride in STRIDES:
                for how in ("tree", "serial"):
                    yield GemmPlan(k_tile=stride * width, lanes=width, lane_reduce=how)  # type: ignore[arg-type]
    runs = set()
    for parts, tile in ((parts, tile) for parts in SPLITS for tile in TILES if tile * (parts - 1) < k):
        plan = GemmPlan(k_tile=tile, split=parts, residue_first=k % tile > 0)
        if tile in TILES[:-1] and (parts <= 8 or not parts % 4):
            yield replace(plan, owner="interleaved", residue_first=False)
        run = (
            -(-(k // tile) // parts) * tile if k % tile == 0 and tile % (arithmetic.block or k) == 0 else (parts, tile)
        )
        if run in runs:
            continue
        runs.add(run)
        yield from (plan, *([replace(plan, residue_first=False)] if k % tile else []))
        yield from ([replace(plan, reduce="pairwise")] if parts > 2 else [])
    for parts in SPLITS:  # slices, whose starts are aligned
        for length in sorted({-(-k // parts // step) * step for step in (SLICE, 8, 32, 64)}):
            if 0 < length < k and length % TILES[-1]:
                yield GemmPlan(k_tile=32, part_k=length, split=-(-k // length), residue_first=True)
    if thorough:
        whole, last = (0, k), LastPart(0, k, k)
        yield from dealt(k, whole, last, None)
        yield from in_pairs(k, whole, None)
        yield from interleaved(k, whole, None)
        yield from promoted(k, whole, last, None)
        yield from (plan for plan in slices(k, whole, last, None, TILES) if plan.split <= PARTS)


def widths(k: int, arithmetic: Datapath) -> list[int | None]:
    """Return the lengths of an instruction along K that a unit may be used with; None is its own."""
    return [None, *(width for width in (8, 4) if width < (arithmetic.block or k))]


def unsplit(k: int, arithmetic: Datapath) -> Iterator[GemmPlan]:
    """Yield one chain, with each instruction length and with a shorter first tile."""
    for width in widths(k, arithmetic):
        yield GemmPlan(instruction_k=width)
        for tile in sorted(TILES):
            if k % tile and arithmetic.block != 1:  # blocks of one product are the same in all tiles
                yield GemmPlan(k_tile=tile, residue_first=True, instruction_k=width)


class LastPart(NamedTuple):
    """Where the last part begins, where parts follow each other: in (low, high], or beyond the last unit."""

    low: int
    high: int
    unit: int

    def has(self, start: int) -> bool:
        """Return True if the last part may begin at ``start``."""
        return self.low < start <= self.high or start > self.unit


def promoted(k: int, first: tuple[int, int], last: LastPart, width: int | None) -> Iterator[GemmPlan]:
    """Yield chains that are promoted every so many products, whole and dealt in parts."""
    for every in PROMOTIONS:
        if not first[0] < every <= first[1]:
            continue
        yield GemmPlan(promote_every=every, instruction_k=width)
        for tile in TILES:
            for parts, share, _ in _deals(k, tile):
                if last.has((parts - 1) * share * tile):
                    yield GemmPlan(k_tile=tile, split=parts, promote_every=every, instruction_k=width)


def dealt(k: int, first: tuple[int, int], last: LastPart, width: int | None) -> Iterator[GemmPlan]:
    """Yield runs of whole tiles that are added one after another."""
    for tile in TILES:
        for parts, share, residue in _deals(k, tile):
            missing = tile - residue if residue else 0
            end, start = share * tile - missing, (parts - 1) * share * tile - missing
            if first[0] < end <= first[1] and last.has(start):
                yield GemmPlan(k_tile=tile, split=parts, residue_first=residue > 0, instruction_k=width)


def in_pairs(k: int, first: tuple[int, int], width: int | None) -> Iterator[GemmPlan]:
    """Yield parts that are added pairwise."""
    for tile in TILES:
        for parts, share, residue in _deals(k, tile):
            if first[0] < share * tile <= first[1] and not residue and parts > 2:
                yield GemmPlan(k_tile=tile, split=parts, instruction_k=width, reduce="pairwise")


def _deals(k: int, tile: int) -> Iterator[tuple[int, int, int]]:
    """Yield (parts, tiles of a part, residue that comes first or 0) for every way to deal tiles, fewest parts first."""
    tiles = -(-k // tile)
    for share in range(-(-tiles // 2), 0, -1):
        parts = -(-tiles // share)
        if parts <= PARTS:
            yield parts, share, 0
            if k % tile:
                yield parts, share, k % tile


def slices(
    k: int, first: tuple[int, int], last: LastPart, width: int | None, tiles: tuple[int, ...]
) -> Iterator[GemmPlan]:
    """Yield slices of K, each with a residue of its own."""
    low, high = first
    for length in range(low // SLICE * SLICE + SLICE, min(high, k - 1) + 1, SLICE):
        parts = -(-k // length)
        if not last.has((parts - 1) * length):
            continue
        residues = set()
        for tile in sorted(tiles):
            key = (length % tile, (k % length) % tile)
            if key not in residues:
                residues.add(key)
                yield GemmPlan(k_tile=tile, part_k=length, split=parts, residue_first=True, instruction_k=width)


def interleaved(k: int, first: tuple[int, int], width: int | None) -> Iterator[GemmPlan]:
    """Yield parts that take tiles in turn."""
    for tile in TILES:
        if first[0] < tile <= first[1]:
            for parts in range(2, min(PARTS, -(-k // tile)) + 1):
                for reduce in ("serial", "pairwise") if parts > 2 else ("serial",):
                    yield GemmPlan(k_tile=tile, split=parts, owner="interleaved", instruction_k=width,
                                   reduce=reduce)  # type: ignore[arg-type]  # fmt: skip
