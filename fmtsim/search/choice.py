"""Choose one option a layer so that the sum of losses is least and the sum of costs stays within a budget."""

from collections.abc import Sequence

LIMIT = 1 << 18  # partial sums that are kept; beyond it the choice is no longer exact and says so


def least_loss(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int
) -> tuple[list[int], bool]:
    """Return the option of every layer, and whether nothing better exists.

    Layers are added one by one; of the partial sums those stay that no other beats in both cost and loss. In a tie the
    lower cost, then the lower options count.

    Args:
        costs: By layer and option, from 0.
        losses: Likewise.
        budget: Not below the sum of least costs.
    """
    least = [min(layer) for layer in costs]
    rest = sum(least)
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    exact = True
    for layer, (cost, loss) in enumerate(zip(costs, losses, strict=True)):
        rest -= least[layer]
        grown = [
            (c + cost[o], v + loss[o], (*path, o))
            for c, v, path in front
            for o in range(len(cost))
            if c + cost[o] + rest <= budget
        ]
        front = _front(sorted(grown))
        if len(front) > LIMIT:
            front, exact = front[:: len(front) // LIMIT + 1] + front[-1:], False
    best = min(front, key=lambda item: (item[1], item[0], item[2]))
    return list(best[2]), exact


def _front(ordered: list[tuple[int, float, tuple[int, ...]]]) -> list[tuple[int, float, tuple[int, ...]]]:
    kept: list[tuple[int, float, tuple[int, ...]]] = []
    for item in ordered:
        if not kept or item[1] < kept[-1][1]:
            kept.append(item)
    return kept
