# SPDX-License-Identifier: Apache-2.0
"""Choose one option a layer so that the sum of losses is least and the sum of costs stays within a budget."""

from collections.abc import Sequence

LIMIT = 1 << 18  # partial sums that are kept; beyond it the choice is no longer exact and says so


Partial = tuple[int, float, tuple[int, ...]]  # cost, loss, and the option of each layer so far


def least_loss(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int
) -> tuple[list[int], bool]:
    """Return the option of every layer, and whether nothing better exists.

    In a tie the lower cost, then the lower options count.

    Args:
        costs: By layer and option, from 0.
        losses: Likewise.
        budget: Not below the sum of least costs.
    """
    found, exact = front(costs, losses, budget)
    best = min(found, key=lambda item: (item[1], item[0], item[2]))
    return list(best[2]), exact


def front(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int | None = None
) -> tuple[list[Partial], bool]:
    """Return the assignments that no other beats in both cost and loss, by rising cost, and whether these are all.

    Layers are added one by one; of the partial sums those stay that no other beats.

    Args:
        costs, losses: As above.
        budget: Of the dearest; None is any.
    """
    least = [min(layer) for layer in costs]
    rest = sum(least)
    limit = sum(map(max, costs)) if budget is None else budget
    partials: list[Partial] = [(0, 0.0, ())]
    exact = True
    for layer, (cost, loss) in enumerate(zip(costs, losses, strict=True)):
        rest -= least[layer]
        grown = [
            (c + cost[o], v + loss[o], (*path, o))
            for c, v, path in partials
            for o in range(len(cost))
            if c + cost[o] + rest <= limit
        ]
        partials = _undominated(sorted(grown))
        if len(partials) > LIMIT:
            partials, exact = partials[:: len(partials) // LIMIT + 1] + partials[-1:], False
    return partials, exact


def _undominated(ordered: list[Partial]) -> list[Partial]:
    partials: list[Partial] = []
    for item in ordered:
        if not partials or item[1] < partials[-1][1]:
            partials.append(item)
    return partials
