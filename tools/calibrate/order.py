# SPDX-License-Identifier: Apache-2.0
"""In which order a call adds: operands that show which products meet when, and plans that explain the answer.

A large product X stands at position 0, -X at position j, and small units u at some other positions; all others are
zero. A unit that is added to X before -X arrives is lost, one that meets the two after they cancelled survives. So a
result counts the units that are not accumulated with positions 0 and j before those two meet, and the counts for many j
draw the tree of additions: blocks, chains, slices. Every column of one call asks about another j.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmtsim.lab.explain.candidates import (
    PARTS,
    SLICE,
    STRIDES,
    TILES,
    LastPart,
    dealt,
    in_pairs,
    interleaved,
    promoted,
    slices,
    unsplit,
    widths,
)
from fmtsim.lab.explain.samples import STORED, Extras
from fmtsim.spec.call import GemmCall
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import ZERO, combination, schedule
from tools.calibrate.gpu import GPU

FINE = 384  # so many first products are looked at in steps of STEP
STEP = 4
COARSE = 256  # positions along all of K
UNITS = 255  # counts up to this are exact in every output format
ELEMENTS = 1 << 25  # of one operand that holds probes
# Large values of both operands, and small ones: their products X and u lie so far apart that 255 u beside X are lost in
# float32 too, and X does not overflow binary16, where it may be summed or written.
LEVELS = {
    **dict.fromkeys(("bf16", "tf32", "fp16"), ((2.0**8, 2.0**7), (2.0**-10, 2.0**-10))),
    **dict.fromkeys(("e4m3", "e5m2"), ((2.0**8, 2.0**8), (2.0**-9, 2.0**-9))),
}
SMALLEST = 8  # sums of fewer products have no order worth asking for


class Sighting(NamedTuple):
    """What a call showed: for each position in ``ends`` how many ``units`` were lost; -1 where it made no sense."""

    ends: NDArray[numpy.int64]
    units: NDArray[numpy.int64]
    lost: NDArray[numpy.int64]


def look(gpu: GPU, call: GemmCall) -> Sighting | None:
    """Ask a call for its accumulation order.

    Returns:
        The counts, or None where K is too small to show anything.
    """
    if call.k < SMALLEST:
        return None
    ends, units = _positions(call.k)
    return Sighting(ends, units, sight(gpu, call, ends, units))


def sight(gpu: GPU, call: GemmCall, ends: NDArray[numpy.int64], units: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return for each end how many units were lost, -1 where the result is not a count."""
    (x, y) = LEVELS[call.a][1]
    chunk = max(1, min(max(call.m, call.n), ELEMENTS // call.k))
    counts = []
    for first in range(0, len(ends), chunk):
        chosen = tuple(ends[first : first + chunk].tolist())
        wide = call.n >= call.m
        names = (call.b, call.a) if wide else (call.a, call.b)
        probes, others = _operands(names, call.k, chosen, tuple(ends.tolist()), tuple(units.tolist()), gpu.device)
        if wide:
            out = gpu.ask(call, others, probes, Extras(bias=_no_bias(call, len(probes))))[0]
        else:
            out = gpu.ask(call, probes, others, Extras(bias=_no_bias(call, 1)))[:, 0]
        counts.append(out.double() / (x * y))
    lost = len(units) - torch.cat(counts).numpy()
    sensible = numpy.isfinite(lost) & (lost == numpy.floor(lost)) & (lost >= 0) & (lost <= len(units))
    return numpy.where(sensible, numpy.nan_to_num(lost), -1).astype(numpy.int64)


def _no_bias(call: GemmCall, count: int) -> Tensor | None:
    return torch.zeros(count, dtype=call.out) if call.bias else None


@lru_cache(maxsize=64)
def _positions(k: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the k positions of -X, multiples of STEP, and of units, which are none."""
    fine = numpy.arange(STEP, min(k, FINE), STEP)
    step = -(-k // COARSE // STEP) * STEP or STEP
    ends = numpy.unique(numpy.concatenate([fine, numpy.arange(step, k, step)]))
    near = [x for x in range(min(k, FINE * 2 // 3)) if x % STEP in (1, 2)]
    far = numpy.linspace(0, k - 1, UNITS - len(near)).astype(numpy.int64) // STEP * STEP + 3
    units = numpy.unique(numpy.concatenate([numpy.array(near, numpy.int64), far[far < k]]))
    return ends, units


@lru_cache(maxsize=8)
def _operands(
    names: tuple[str, str], k: int, chosen: tuple[int, ...], ends: tuple[int, ...], units: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return a row for each of the chosen ends, and the one row of the other operand, in the two formats."""
    (large, factor), (small, unit) = LEVELS[names[0]]
    dtype, other = (STORED[name] for name in names)
    build = torch.float32 if dtype.itemsize == 1 else dtype
    at, targets, all_ends = (torch.tensor(x, dtype=torch.int64, device=device) for x in (units, chosen, ends))
    probes = torch.zeros(len(targets), k, dtype=build, device=device)
    probes[:, at] = small
    probes[:, 0] = large
    probes[torch.arange(len(targets), device=device), targets] = -large
    others = torch.zeros(1, k, dtype=build, device=device)
    others[0, at] = unit
    others[0, all_ends] = factor
    others[0, 0] = factor
    return probes.to(dtype), others.to(other)


@lru_cache(maxsize=256)
def expected(k: int, arithmetic: Arithmetic, plan: GemmPlan) -> NDArray[numpy.int64]:
    """Return what a plan makes of the places that ``look`` asks about: how many units are lost for each."""
    ends, units = _positions(k)
    meets = meetings(k, arithmetic, plan)
    return numpy.searchsorted(numpy.sort(meets[units]), meets[ends], side="right").astype(numpy.int64)


def explains(k: int, arithmetic: Arithmetic, plan: GemmPlan, seen: Sighting | None) -> bool:
    """Return True if a plan agrees with all probes of a call."""
    return seen is None or bool((expected(k, arithmetic, plan) == seen.lost).all())


def meetings(k: int, arithmetic: Arithmetic, plan: GemmPlan) -> NDArray[numpy.int64]:
    """Return for each k position when it meets position 0: smaller numbers first, equal ones at once."""
    when = numpy.zeros(k, numpy.int64)
    time = 0
    sums = schedule(k, arithmetic, plan)
    for number, chain in enumerate(sums[0]):
        for block in chain.blocks:
            when[list(block)] = time
            time += number == 0
        time += number > 0
    waiting: list[list[int]] = []  # on the stack: the sums in each; the one with the first is the lowest
    for number, additions in combination(k, plan):
        waiting.append([] if number == ZERO else [number])
        for _ in range(additions):
            last = waiting.pop()
            if len(waiting) > 1:
                waiting[-1] += last
                continue
            for index in (i for met in last for chain in sums[met] for block in chain.blocks for i in block):
                when[index] = time
            time += 1
    return when


SHORT = 2048  # up to this K all parts are tried where the first one has no visible end


def fits(call: GemmCall, arithmetic: Arithmetic, seen: Sighting | None) -> Iterator[Iterator[GemmPlan]]:
    """Yield plans that agree with everything a call showed, in stages: likely ones first.

    Args:
        seen: What it showed; None, for a very small K, leaves the plain chain.
    """
    if seen is None or not isinstance(arithmetic, Datapath):
        yield iter([GemmPlan()])
        if call.k > SLICE and isinstance(arithmetic, Datapath):
            yield iter([GemmPlan(k_tile=8, part_k=SLICE, split=-(-call.k // SLICE), residue_first=True)])
        return
    first = _first_run(arithmetic, seen)
    if first is None:
        yield _explaining(call, arithmetic, seen, unsplit(call.k, arithmetic))
    if first is not None or call.k <= SHORT:
        yield _explaining(call, arithmetic, seen, _split(call, arithmetic, seen, first or (0, call.k - 1)))


def _explaining(call: GemmCall, arithmetic: Datapath, seen: Sighting, plans: Iterator[GemmPlan]) -> Iterator[GemmPlan]:
    for plan in plans:
        if opens(call.k, arithmetic, plan, seen) and explains(call.k, arithmetic, plan, seen):
            yield plan


def opens(k: int, arithmetic: Datapath, plan: GemmPlan, seen: Sighting) -> bool:
    """Return True if the first blocks of a plan are the observed ones: a quick check before the full one."""
    length = min(arithmetic.block or k, plan.instruction_k or k)
    whole = k if plan.part_k is None else min(plan.part_k, k)
    tile = plan.k_tile or whole
    first = (whole % tile or tile) if plan.residue_first else tile
    stop = min(first, whole, *([] if plan.promote_every is None else [plan.promote_every]))
    inside = seen.ends < stop
    edges = numpy.minimum((seen.ends[inside] // length + 1) * length, stop)
    return bool((numpy.searchsorted(seen.units, edges) == seen.lost[inside]).all()) or arithmetic.paired


def _split(call: GemmCall, arithmetic: Datapath, seen: Sighting, first: tuple[int, int]) -> Iterator[GemmPlan]:
    """Yield plans whose first run of products ends, and whose last part begins, where that was seen."""
    at = int(numpy.argmax(seen.lost == seen.lost.max()))
    k, last = call.k, LastPart(int(seen.ends[at - 1]) if at else 0, int(seen.ends[at]), int(seen.units[-1]))
    slow = call.operation == "scaled_mm" and not call.fast_accum
    for width in widths(k, arithmetic):
        if slow:
            yield from promoted(k, first, last, width)
        yield from dealt(k, first, last, width)
        yield from slices(k, first, last, width, TILES if arithmetic.block != 1 else TILES[-1:])
        if not slow:
            yield from promoted(k, first, last, width)
        if arithmetic.block == 1:
            yield from _strided(k, seen)
        yield from in_pairs(k, first, width)
        yield from interleaved(k, first, width)


def _first_run(arithmetic: Datapath, seen: Sighting) -> tuple[int, int] | None:
    """Return an interval (low, high] that holds the end of the first run of products, None where none is seen.

    Within a run -X at position j takes with it the units up to the end of its block; in another part it takes more.
    """
    reach = numpy.searchsorted(seen.units, seen.ends + 2 * (arithmetic.block or 0), side="right")
    beyond = numpy.flatnonzero(seen.lost > reach)
    if not len(beyond):
        return None
    first = int(beyond[0])
    return (int(seen.ends[first - 1]) if first else 0), int(seen.ends[first])


def _strided(k: int, seen: Sighting) -> Iterator[GemmPlan]:
    """Yield sums of every so-manyth product, added one after another, that agree with places in other sums than X."""
    for tile in STRIDES:
        for parts in range(2, min(PARTS, -(-k // tile)) + 1):
            home, homes = (positions % (tile * parts) // tile for positions in (seen.ends, seen.units))
            lost = (homes[None, :] <= home[:, None]).sum(1)
            if (lost[home > 0] == seen.lost[home > 0]).all():
                yield GemmPlan(k_tile=tile, split=parts, owner="interleaved")
