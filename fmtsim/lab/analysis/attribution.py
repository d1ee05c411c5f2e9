# SPDX-License-Identifier: Apache-2.0
"""What ``fmtsim.attribute`` finds: the cost of each operand, the worst of them, and rules that leave layers out."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from fmtsim.recipes.recipe import Rule
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved, set_title
from fmtsim.support.table import Column, Result, Rows, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["loss", "kl", "gradient"]
FIELDS: Final[dict[str, str]] = {"loss": "loss", "kl": "kl", "gradient": "gradient_noise"}
_WHAT: Final = {"loss": "the loss that rounding costs", "kl": "the KL", "gradient": "the noise of gradients"}
_SHOWN: Final = 20  # rows of a table, of either pass
_COLUMNS: Final = (
    Column("layer", "layer"), Column("operand", "operand"), Column("format", "format"),
    Column("loss", "loss", ">+.2e"), Column("KL", "kl", ">.2e"), Column("gradient noise", "gradient_noise", ">.2e"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionRow:
    """Say what one operand of one layer costs, or one product that a machine multiplies.

    Args:
        layer: Its name, as in statistics.
        operand: ``x_f w_f g_d w_d g_w x_w``, or one of attention's; of products ``fprop dgrad wgrad``.
        format: What it is rounded to; of products what multiplies.
        loss: Change of the batch's loss; None for operands of the backward pass, which do not change it.
        kl: ``KL(without || with rounding)`` of the predicted distributions, nats, the mean over positions; None for
            operands of the backward pass, and where the model's logits are not known.
        gradient_noise: ``|G' - G|^2 / |G|^2`` of the gradient G of all Parameters; None for operands of the forward
            pass.
        module: The name that a Rule finds the layer by; None in attention without weights, which has no rules.
    """

    layer: str
    operand: str
    format: str
    loss: float | None = None
    kl: float | None = None
    gradient_noise: float | None = None
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Attribution(Result):
    """Hold what each operand of a model costs; ``print`` shows a table, the dearest first.

    Args:
        rows: One for each operand, in the order of the model.
        exact: Whether operands were switched one at a time; else these are estimates.
        plain_loss: Loss of the batch where nothing is rounded.
        rounded_loss: Loss where all operands of the forward pass are.
        simulated_loss: Loss where its products run on their machines, too.
        rounded_kl: KL of the first and the last, None where logits are not known.
        passes: Forward and backward passes of the model that it took.
        notes: What was left out or could not be told.
    """

    rows: tuple[AttributionRow, ...]
    exact: bool
    plain_loss: float
    rounded_loss: float
    simulated_loss: float
    rounded_kl: float | None = None
    passes: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()

    def worst(self, n: int = 10, *, by: By = "loss") -> list[AttributionRow]:
        """Return the n rows of the highest cost, the highest first; those without that cost are left out.

        Args:
            n: How many.
            by: ``"loss"``, ``"kl"`` or ``"gradient"``.

        Raises:
            ArgumentError: n is not a whole number from 1, or ``by`` is unknown.
        """
        if type(n) is not int or n < 1:
            raise ArgumentError(f"worst n={shown(n)} is not allowed; pass a whole number from 1")
        cost = self._cost(by)
        return sorted((row for row in self.rows if cost(row) is not None), key=lambda row: -(cost(row) or 0.0))[:n]

    def layers(self, *, by: By = "loss") -> dict[str, float]:
        """Return the sum of the costs of each layer's operands, the highest first."""
        cost, sums = self._cost(by), dict[str, float]()
        for row in self.rows:
            value = cost(row)
            if value is not None:
                sums[row.layer] = sums.get(row.layer, 0.0) + value
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def rules(self, share: float = 0.5, *, by: By = "loss") -> tuple[Rule, ...]:
        """Return rules that leave the dearest layers in high precision, for ``convert(rules=)`` or a Recipe.

        Layers are taken from the dearest on until they carry ``share`` of the cost of those that have rules; layers
        that rounding happens to help count as 0. A module whose several products cost something has one rule.
        ``advice`` says the same in words.

        Args:
            share: Above 0, at most 1.
            by: ``"loss"``, ``"kl"`` or ``"gradient"``.

        Raises:
            ArgumentError: The share is none, ``by`` is unknown, or nothing is known of that cost.
        """
        return tuple(Rule(name=f"^{re.escape(name)}$") for name, _ in self._chosen(share, by))

    def advice(self, share: float = 0.5, *, by: By = "loss") -> str:
        """Return what ``rules`` suggests, a line for each layer with its part of the cost."""
        chosen = self._chosen(share, by)
        if not chosen:
            return f"no layer adds to {_WHAT[by]}"
        return "\n".join(f"keep {name} in high precision: {100 * part:.0f} % of {_WHAT[by]}" for name, part in chosen)

    def plot(self, path: str | Path | None = None, *, by: By = "loss", title: str = "", ax: Any = None) -> "Figure":
        """Draw the costs of the dearest 20 layers as bars, a colour for each operand; return the figure.

        Layers whose bars would be shorter than 1/100 of the longest are counted under the axis; three are always drawn.

        Args:
            path: Where to save a PNG.
            by: ``"loss"``, ``"kl"`` or ``"gradient"``.
            title: Heading.
            ax: Axes to draw into.
        """
        # 1. Choose layers by their longest bar.
        cost, costs, reach = self._cost(by), self.layers(by=by), dict[str, float]()
        for row in self.rows:
            reach[row.layer] = max(reach.get(row.layer, 0.0), abs(cost(row) or 0.0))
        widest = max((value for value in reach.values() if math.isfinite(value)), default=0.0)
        names = [name for i, name in enumerate(costs) if i < 3 or not reach[name] < widest / 100][:20][::-1]
        rows = [row for row in self.rows if row.layer in names and cost(row) is not None]
        if not rows:
            raise ArgumentError(f"there is no cost by={by!r} to draw; {_NONE[by]}")
        # 2. Bars of a layer follow each other, costs to the right of zero and gains to the left.
        figure, (panel,) = new_panels(7.5, 1.6 + 0.26 * len(names), ax)
        ends = {(name, sign): 0.0 for name in names for sign in (True, False)}
        for i, operand in enumerate(dict.fromkeys(row.operand for row in rows)):
            for row in (row for row in rows if row.operand == operand):
                value = cost(row) or 0.0
                if math.isfinite(value):
                    at, sign = names.index(row.layer), value >= 0
                    panel.barh(at, value, left=ends[row.layer, sign], color=COLOURS[i % 7], edgecolor="white")
                    ends[row.layer, sign] += value
            panel.barh(0, 0, color=COLOURS[i % 7], label=operand)  # for the legend
        panel.axvline(0.0, color=COLOURS[6], linewidth=0.8)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        kind = "switched one at a time" if self.exact else "estimated"
        label_axes(panel, f"{_LABELS[by]} ({kind})", "")
        if hidden := len(costs) - len(names):
            panel.set_xlabel(f"{panel.get_xlabel()}\nnot drawn, with shorter bars: {hidden} of {len(costs)} layers")
        panel.set_axisbelow(True)
        panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        set_title(panel, title)
        return saved(figure, path)

    def _cost(self, by: Any) -> Callable[[AttributionRow], float | None]:
        if not isinstance(by, str) or by not in FIELDS:
            raise ArgumentError(f"by={shown(by)} is unknown; choose 'loss', 'kl' or 'gradient'")
        return lambda row: getattr(row, FIELDS[by])  # type: ignore[no-any-return]

    def _chosen(self, share: Any, by: By) -> list[tuple[str, float]]:
        """Return the dearest modules that together carry a share of the cost, with the part of each."""
        # 1. The cost of each module that a rule can name.
        if not (isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1):
            raise ArgumentError(f"share={shown(share)} is not a part of the cost; pass a number above 0, at most 1")
        cost, sums = self._cost(by), dict[str, float]()
        for row in self.rows:
            value = cost(row)
            if value is not None and row.module is not None:
                sums[row.module] = sums.get(row.module, 0.0) + value
        if not sums:
            raise ArgumentError(f"no layer with rules has a cost by={by!r}; {_NONE[by]}")
        # 2. Infinite costs are equal shares of all; modules that rounding helps carry nothing.
        infinite = [name for name, value in sums.items() if not math.isfinite(value)]
        if infinite:
            return [(name, 1 / len(infinite)) for name in infinite]
        order = sorted((name for name in sums if sums[name] > 0), key=lambda name: -sums[name])
        total, chosen, carried = sum(sums[name] for name in order), list[tuple[str, float]](), 0.0
        # 3. From the dearest on, until the share is reached but for a rounding.
        for name in order:
            if carried >= share * total * (1 - 1e-12):
                break
            chosen.append((name, sums[name] / total))
            carried += sums[name]
        return chosen

    def _content(self) -> Iterator[Rows | str]:
        order = sorted(self.rows, key=lambda row: (row.loss is None, -(row.loss or 0.0), -(row.gradient_noise or 0.0)))
        # Some of either pass: operands of the backward pass have no loss to be ordered by.
        shown = [row for row in order if row.loss is not None][:_SHOWN]
        shown += [row for row in order if row.loss is None][:_SHOWN]
        yield table_of(_COLUMNS, shown, filled=True)
        if len(shown) < len(self.rows):
            yield f"and {len(self.rows) - len(shown)} more rows"
        kl = "" if self.rounded_kl is None else f", KL {self.rounded_kl:.3g} nats"
        change, operands = self.simulated_loss - self.plain_loss, self.rounded_loss - self.plain_loss
        machine = any(row.operand == "fprop" for row in self.rows)
        more = f" = {operands:+.3g} operands {change - operands:+.3g} arithmetic" if machine else ""
        whole = "all of the forward pass" if machine else "all operands of the forward pass"
        yield f"loss {self.plain_loss:.6g} without rounding, {change:+.3g} with {whole}{more}{kl}"
        kind = "operands switched one at a time" if self.exact else "estimates"
        yield f"{kind}, from {self.passes[0]} forward and {self.passes[1]} backward passes"
        yield from self.notes


_NONE: Final = {
    "loss": "no operand of the forward pass is rounded",
    "kl": "the model's logits are not known; pass logits=",
    "gradient": "no operand of the backward pass is rounded",
}
_LABELS: Final = {"loss": "change of the loss", "kl": "KL, nats", "gradient": "squared error of the gradient, relative"}
