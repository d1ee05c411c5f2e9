# SPDX-License-Identifier: Apache-2.0
"""Which kernel records of a plan file give an accumulation order, and few kernels that give those of many calls."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fmtsim.formats.registry import get_format
from fmtsim.gemm.targets.kernel import Kernel
from fmtsim.lab.calibration.campaign import Finding, Units, scalar_unit
from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import same_order

TILES = (64, 128, 32, 16, 256, 512, 8)
SLICES = ((8, 64), (4, 32), (8, 0), (4, 0))  # align and line of Kernel


class Entry(NamedTuple):
    """A verified call, every (kernel, parts) that gives its order, and its unit where that is not the usual one."""

    call: GemmCall
    choices: tuple[tuple[Kernel, int], ...]
    unit: str | None = None


def kernels_of(call: GemmCall, plan: GemmPlan, units: Units) -> Iterator[tuple[Kernel, int]]:
    """Yield kernels of a plan file that give a plan's order for a call, each with the number of parts."""
    common = _common(call, plan)
    if plan.k_tile is None:
        for tile in TILES:
            yield Kernel.from_dict({"k_tile": tile, **common}), 1
        return
    arithmetic = units(call)
    for kernel in _shapes(common, plan):
        made = kernel.plan_of(call, plan.split)  # more parts are shorter ones
        kept = (made.partial, made.bias_after_rounding) == (plan.partial, plan.bias_after_rounding)
        if kept and same_order(call.k, arithmetic, made, plan):
            yield kernel, plan.split


def _common(call: GemmCall, plan: GemmPlan) -> dict[str, Any]:
    """Return the fields of a kernel that do not depend on how it cuts K."""
    names = ("instruction_k", "promote_every", "scaled_promotion", "successive_scales", "round_trip", "epilogue",
             "owner", "reduce", "bias_after_rounding")  # fmt: skip
    fields = {name: getattr(plan, name) for name in names}
    if plan.partial is not None:
        fields["partial"] = "out" if plan.partial == get_format(call.out) else plan.partial.name
    return fields


def _shapes(fields: dict[str, Any], plan: GemmPlan) -> Iterator[Kernel]:
    for tile in dict.fromkeys((*TILES, plan.k_tile)):
        if not plan.residue_first or plan.part_k is not None:
            yield Kernel.from_dict({"k_tile": tile, **fields})
        if plan.owner == "contiguous":
            for align, line in SLICES:
                yield Kernel.from_dict({"k_tile": tile, "slices": True, "align": align, "line": line, **fields})


def entries_of(found: Iterable[Finding], units: Units) -> tuple[list[Entry], list[GemmCall]]:
    """Return the verified calls that a plan file can say, and those that it cannot."""
    entries, beyond = [], []
    for finding in found:
        if finding.status != "verified":
            continue
        own = units if finding.unit is None else scalar_unit
        choices = dict.fromkeys(choice for plan in finding.plans for choice in kernels_of(finding.call, plan, own))
        if choices:
            entries.append(Entry(finding.call, tuple(choices), finding.unit))
        else:
            beyond.append(finding.call)
    return entries, beyond


def cover(
    entries: Sequence[Entry], preferred: Container[Kernel] = ()
) -> list[tuple[Kernel, list[tuple[GemmCall, int]]]]:
    """Return few kernels that together give all entries' orders, the one with most entries first.

    A sum of one part says little about its kernel's tile: among equals a preferred kernel is taken.
    """
    left, chosen = list(entries), []
    while left:
        votes: Counter[Kernel] = Counter()
        for entry in left:
            votes.update(dict.fromkeys((kernel for kernel, _ in entry.choices), 1))
        best = max(votes, key=lambda kernel: (votes[kernel], kernel in preferred))
        mine = [(entry.call, dict(entry.choices)[best]) for entry in left if best in dict(entry.choices)]
        chosen.append((best, mine))
        left = [entry for entry in left if best not in dict(entry.choices)]
    return chosen
