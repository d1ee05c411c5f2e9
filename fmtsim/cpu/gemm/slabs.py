# SPDX-License-Identifier: Apache-2.0
"""The order of products as arrays: slots, blocks and what follows them, in slabs that fit a cache."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain as joined
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fmtsim.cpu.gemm.accumulate import CHAIN_END, PART_END, Order
from fmtsim.cpu.gemm.operands import pitch_of
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import ZERO, combination, schedule

_NONE = np.zeros(0, np.float32)
SLOTS = 512  # of a slab, unless one block is longer: rows and a panel then stay in a second-level cache


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Some of the blocks of a product, in order.

    ``slots`` (int32) holds the index along K of every slot, -1 where a block is filled up; ``first`` is the number of
    the slab's first block.
    """

    slots: np.ndarray
    order: Order
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """A product: its slabs, all of it in one, the slots of a block, how many parts, and where chains begin along K."""

    slabs: tuple[Slab, ...]
    whole: Slab
    block: int
    parts: int
    starts: np.ndarray


def slabs_of(k: int, unit: Arithmetic, plan: GemmPlan, limit: int = SLOTS) -> Slabs:
    """Return the slabs of a product of K terms, of at most ``limit`` slots unless one block is longer.

    They are cached for all plans that differ in what follows the sums alone, and all units with the same blocks.
    """
    if isinstance(unit, Datapath):
        unit = _blocks_of(unit.block, unit.group, unit.promote_every, unit.paired)
    plain: dict[str, Any] = {"partial": None, "round_trip": False, "reduce": "serial", "bias_after_rounding": False}
    return _slabs_of(k, unit, replace(plan, **plain, epilogue="scale", source="", verified=False), limit)


@lru_cache(maxsize=64)
def _blocks_of(block: int | None, group: int, promote_every: int | None, paired: bool) -> Datapath:
    return Datapath(block=block, group=group, promote_every=promote_every, paired=paired)


@lru_cache(maxsize=64)
def _slabs_of(k: int, unit: Arithmetic, plan: GemmPlan, limit: int) -> Slabs:
    parts = schedule(k, unit, plan)
    blocks = [block for part in parts for chain in part for block in chain.blocks]
    lengths = np.fromiter(map(len, blocks), np.int64, len(blocks))
    length = int(lengths.max(initial=1))
    if isinstance(unit, Datapath):
        length = -(-length // unit.group) * unit.group  # whole groups
    pitch = pitch_of(length)
    # 1. the indices of every block, filled up
    slots = np.full((len(blocks), pitch), -1, np.int32)
    slots[np.arange(pitch) < lengths[:, None]] = np.fromiter(joined.from_iterable(blocks), np.int32, lengths.sum())
    # 2. the part and the chain of every block, and where both end
    counts = [len(chain.blocks) for part in parts for chain in part]
    owners = np.repeat(np.array([p for p, part in enumerate(parts) for _ in part], np.int32), counts)
    chains = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.array([chain.start for part in parts for chain in part], np.int64)
    ends = np.zeros(len(blocks), np.int8)
    ends[np.cumsum(counts, dtype=np.int64) - 1] = CHAIN_END
    ends[np.cumsum([sum(len(chain.blocks) for chain in part) for part in parts], dtype=np.int64) - 1] = PART_END
    step = max(limit // pitch, 1)

    def cut(start: int, stop: int) -> Slab:
        order = Order(ends[start:stop], owners[start:stop], chains[start:stop])
        return Slab(slots[start:stop].reshape(-1), order, start)

    cuts = tuple(cut(i, i + step) for i in range(0, len(blocks), step))
    return Slabs(cuts, cut(0, len(blocks)), length, len(parts), starts)


class Stacked(NamedTuple):
    """Sums of single products that are added on a stack, whose slots are the parts of ``order``.

    ``slots`` (int64) holds the index along K of every product, -1 for a sum without products; ``additions`` (int64)
    says behind each how many times the two sums on top are added.
    """

    slots: np.ndarray
    order: Order
    additions: np.ndarray
    depth: int


@lru_cache(maxsize=32)
def stacked(k: int, unit: Arithmetic, plan: GemmPlan) -> Stacked:
    """Return the products of K terms in the order in which a ``combination`` needs their sums."""
    sums, waiting, deepest = schedule(k, unit, plan), 0, 0
    slots: list[int] = []
    ends: list[int] = []
    parts: list[int] = []
    additions: list[int] = []
    for number, follow in combination(k, plan):
        chains = [[-1]] if number == ZERO else [[i for (i,) in chain.blocks] for chain in sums[number]]
        for chain in chains:
            slots += chain
            ends += [*[0] * (len(chain) - 1), CHAIN_END]
        ends[-1] = PART_END
        deepest = max(deepest, waiting)
        parts += [waiting] * (len(slots) - len(parts))
        additions += [*[0] * (len(slots) - len(additions) - 1), follow]
        waiting += 1 - follow
    order = Order(np.array(ends, np.int8), np.array(parts, np.int32), np.zeros(len(slots), np.int32))
    return Stacked(np.array(slots, np.int64), order, np.array(additions, np.int64), deepest + 1)


def chain_scales(
    scales: tuple[Tensor | None, Tensor | None], slabs: Slabs, plan: GemmPlan
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of every chain, [chains, M] and [chains, N], where a plan multiplies chains by scales.

    They are empty where it does not; scales that are absent are ones, and empty as well.
    """
    if not plan.scaled_promotion or plan.promote_every is None or scales[0] is None or scales[1] is None:
        return _NONE, _NONE
    place = slabs.starts // plan.promote_every
    return scales[0].detach().numpy().T[place], scales[1].detach().numpy().T[place]
