# SPDX-License-Identifier: Apache-2.0
"""What a search is told, how it chooses one option a layer within a budget, and what it finds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Rule
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved
from fmtsim.support.table import Column, Result, Rows, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    choice, exact = front(costs, losses, budget)
    best = min(choice, key=lambda item: (item[1], item[0], item[2]))
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
        partials = []  # of each cost the least loss, where no cheaper one loses less
        for item in sorted(grown):
            if not partials or item[1] < partials[-1][1]:
                partials.append(item)
        if len(partials) > LIMIT:
            partials, exact = partials[:: len(partials) // LIMIT + 1] + partials[-1:], False
    return partials, exact


HIGH_BITS = 16  # what an operand that stays in high precision counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Describe the search by a policy, as in FLIQS (Dotzel et al., arXiv:2308.03290; the paper's settings unverified).

    A softmax over formats for each layer; assignments are sampled from it and run, and REINFORCE follows the reward
    ``quality - penalty * |cost / budget - 1|`` with entropy regularisation along a cosine.

    Args:
        steps: Assignments that are tried; while training, the steps in which the policy learns.
        rate: Step size of the logits.
        penalty: Weight of the cost in the reward.
        entropy: Weight of the entropy at the start, from which it falls to 0.
        seed: Of the samples.
        sharpen: Weight of the entropy at the end, as a penalty that rises from 0, as in the authors' code: chances
            become sharp.
    """

    steps: int = 200
    rate: float = 0.5
    penalty: float = 0.5
    entropy: float = 0.05
    seed: int = 0
    sharpen: float = 0.0

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1 or not (self.rate > 0 and self.penalty >= 0):
            raise ArgumentError(
                f"Policy steps={shown(self.steps)}, rate={shown(self.rate)}, penalty={shown(self.penalty)}; "
                "choose 1 step or more, a rate above 0 and a penalty from 0"
            )
        if not (self.entropy >= 0 and self.sharpen >= 0):
            raise ArgumentError(
                f"Policy entropy={shown(self.entropy)}, sharpen={shown(self.sharpen)}; choose weights from 0"
            )


class Point(NamedTuple):
    """An assignment that was not run as a whole."""

    cost: int  # bit operations of a batch
    loss: float  # sum of the losses of its layers alone, above the result's ``reference``
    formats: dict[str, str]  # recipe by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Result):
    """Hold the formats that a search chose.

    Args:
        formats: Recipe by layer.
        cost: Bit operations of a batch, summed over layers: multiply-adds x bits of w x bits of x.
        budget: What it had to stay within.
        loss: Loss of the model that runs these formats, measured.
        losses: Loss of the model where one layer alone runs one recipe, by layer and recipe, or ``sensitivity=``'s.
        costs: Bit operations, likewise.
        recipes: The records, by name.
        tried: Assignments that were run, beside those of one layer.
        left_out: Recipes that the machine does not run, the head of a language model where it took no part, and why.
        widths: Channels that each layer kept, where a search while training chose them.
        chances: What the policy of a search while training ended with, by layer and recipe.
        reference: Loss in high precision, which ``losses`` are counted from; 0 where a loss compares with it already.
    """

    formats: dict[str, str]
    cost: int
    budget: int
    loss: float
    losses: dict[str, dict[str, float]]
    costs: dict[str, dict[str, int]]
    recipes: dict[str, PtqRecipe]
    tried: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    chances: dict[str, dict[str, float]] = field(default_factory=dict)
    reference: float = 0.0

    def recipe(self, name: str = "searched") -> PtqRecipe:
        """Return the recipe that gives each layer its format, for ``fmtsim.ptq``."""
        used = [self.recipes[chosen] for chosen in self.formats.values()]
        if "" in self.formats:  # the model is the layer
            return replace(used[0], name=name, aliases=())
        rules = tuple(
            Rule(name=f"^{re.escape(layer)}$", use=recipe.linear)
            for layer, recipe in zip(self.formats, used, strict=True)
        )
        calibration = next((r.calibration for r in used if r.calibration is not None), None)
        return PtqRecipe(
            name=name, calibration=calibration, weights=used[0].weights, rules=rules, **used[0].on_machine
        )  # fmt: skip

    def front(self) -> list[Point]:
        """Return the assignments that no other beats in both cost and sum of losses, by rising cost.

        Beyond 2^18 of them at a layer it is a sample.
        """
        names = list(self.recipes)
        costs = [[self.costs[layer][name] for name in names] for layer in self.formats]
        losses = [[self.losses[layer][name] for name in names] for layer in self.formats]
        return [
            Point(cost, self.reference + loss, dict(zip(self.formats, (names[o] for o in path), strict=True)))
            for cost, loss, path in front(costs, losses)[0]
        ]

    def uniform(self) -> dict[str, Point]:
        """Return what each recipe would cost, and lose, in every layer."""
        return {
            name: Point(
                sum(self.costs[layer][name] for layer in self.formats),
                self.reference + sum(self.losses[layer][name] for layer in self.formats),
                dict.fromkeys(self.formats, name),
            )
            for name in self.recipes
        }

    def plot(self, path: str | Path | None = None, *, ax: Any = None) -> "Figure":
        """Draw the least sum of losses for each cost, each recipe in every layer, and the choice; return the figure.

        Args:
            path: Where to save a PNG.
            ax: Axes to draw into.
        """
        figure, (panel,) = new_panels(7.5, 4.6, ax)
        front = self.front()
        panel.step(
            [point.cost for point in front], [point.loss for point in front], where="post", color=COLOURS[0],
            label="least sum of the layers' losses",
        )  # fmt: skip
        for i, (name, point) in enumerate(self.uniform().items()):
            panel.plot(point.cost, point.loss, "os^Dv"[i % 5], color=COLOURS[(i + 2) % 7], label=f"{name} everywhere")
        panel.plot(self.cost, self.loss, "*", markersize=14, color=COLOURS[1], label="chosen, measured")
        panel.axvline(self.budget, color=COLOURS[6], linestyle="--", linewidth=1.0, label="budget")
        if all(value > 0 for value in (self.loss, *(point.loss for point in front))):
            panel.set_yscale("log")
        label_axes(panel, "bit operations of a batch", "loss")
        panel.legend(frameon=False, fontsize=8)
        panel.set_axisbelow(True)
        return saved(figure, path)

    def _content(self) -> tuple[Rows | str, ...]:
        columns = [Column("layer", lambda layer: layer or "(model)")]
        columns += [Column(name, lambda layer, name=name: self.losses[layer][name], ".2e") for name in self.recipes]  # type: ignore[misc]
        columns += [Column("chosen", self.formats.get)]
        columns += [Column("channels", lambda layer: self.widths.get(layer, "all"))] if self.widths else []
        share = 100 * self.cost / self.budget
        high = f", {self.reference:.3e} in high precision" if self.reference else ""
        where = f" {machine}" if (machine := next(iter(self.recipes.values())).machine) else ""
        total = f"{self.cost:.4g} bit operations, {share:.1f} % of the budget; loss {self.loss:.3e}{high}{where}"
        left_out = (f"left out: {name}: {reason}" for name, reason in self.left_out.items())
        return table_of(columns, self.formats), total, *left_out


def result_of(
    layers: Sequence[str], recipes: dict[str, PtqRecipe], picked: Sequence[int], losses: Sequence[Sequence[float]],
    costs: Sequence[Sequence[int]], **more: Any,
) -> SearchResult:  # fmt: skip
    """Return the result of one recipe for each layer, of losses and costs by layer and recipe; ``more`` are fields."""
    names = list(recipes)
    return SearchResult(
        formats={layer: names[i] for layer, i in zip(layers, picked, strict=True)},
        cost=sum(row[i] for row, i in zip(costs, picked, strict=True)),
        losses={layer: dict(zip(names, row, strict=True)) for layer, row in zip(layers, losses, strict=True)},
        costs={layer: dict(zip(names, row, strict=True)) for layer, row in zip(layers, costs, strict=True)},
        recipes=recipes, **more,
    )  # fmt: skip
