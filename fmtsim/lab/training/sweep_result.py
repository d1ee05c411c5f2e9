# SPDX-License-Identifier: Apache-2.0
"""What a sweep shows: failed runs, best learning rates, loss spikes, answers, and what predicts a failure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fmtsim.lab.training.scaling_law import Trained
from fmtsim.lab.training.sweep import SweepRun
from fmtsim.support.errors import ArgumentError
from fmtsim.support.plotting import new_figure, saved
from fmtsim.support.table import Column, Result, Rows, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Z = 1.959963984540054  # of the normal distribution, both sides together 5 %
EARLY = 0.3  # of the steps: what is known by then is what predicts the end
_PANELS = 3  # of a picture, beside each other
SPIKE_WINDOW, SPIKE_HEIGHT = 20, 5.0  # steps before, and standard deviations of their losses above their mean


class Shape(NamedTuple):
    """Width and steps of a group of runs."""

    width: int
    steps: int


def shape_of(run: SweepRun) -> Shape:
    """Return the shape of a run."""
    return Shape(run.point.width, run.point.steps)


class Predictor(NamedTuple):
    """Say how well something known early tells how runs end."""

    name: str  # what is known
    runs: int  # runs, failed: how many runs count: those that had not stopped by then
    failed: int
    # chance that it is higher for a run that fails than for one that does not (the area under the ROC curve; 0.5 tells
    # nothing); NaN where none fails, or all do
    area: float
    correlation: float  # spearman's, with the last loss; runs that stopped count as the highest


def byte_entropy(text: Tensor) -> float:
    """Return the entropy of single bytes of a text in nats: the loss of a model that knows their frequencies alone."""
    share = text.long().bincount(minlength=256).double() / text.numel()
    return float(-(share * share.clamp(min=1e-300).log()).sum())


def interval(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a chance of which ``count`` of ``total`` trials came true.

    >>> [round(end, 3) for end in interval(1, 10)]
    [0.018, 0.404]
    """
    if not 0 <= count <= total or not total:
        raise ArgumentError(f"{count} of {total} is no share; pass 0 to total, and a total of 1 or more")
    share, spread = count / total, Z * Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return (low if count else 0.0), (high if count < total else 1.0)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1; equal ones share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            result[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return result


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN where one of them does not vary."""
    try:
        return statistics.correlation(ranks(x), ranks(y))
    except statistics.StatisticsError:
        return math.nan


def roc_area(scores: Sequence[float], failed: Sequence[bool]) -> float:
    """Return the chance that a failed run has a higher score than another, ties counting a half; NaN without a pair."""
    bad = sum(failed)
    pairs = bad * (len(failed) - bad)
    total = sum(rank for rank, one in zip(ranks(scores), failed, strict=True) if one)
    return (total - bad * (bad + 1) / 2) / pairs if pairs else math.nan


def spikes(losses: Sequence[float]) -> int:
    """Count the times that a loss rises more than 5 standard deviations above the mean of the 20 steps before it.

    Steps in a row count once.
    """
    count, within = 0, False
    for step in range(SPIKE_WINDOW, len(losses)):
        before = losses[step - SPIKE_WINDOW : step]
        high = losses[step] > statistics.fmean(before) + SPIKE_HEIGHT * statistics.pstdev(before)
        count, within = count + (high and not within), high
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult(Result):
    """Hold the runs of a sweep.

    Args:
        runs: All of them.
        entropy: Loss of a model that knows only how frequent bytes are (``byte_entropy``).
        limit: Last loss from which a run has failed, as one that stopped has; None is for each shape the middle of
            ``entropy`` and the best last loss: a failed run learnt less than half of what the best one did.

    Attributes:
        limits: Last loss from which a run of each shape has failed.
    """

    runs: tuple[SweepRun, ...]
    entropy: float
    limit: float | None = None
    limits: Mapping[Shape, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        best: dict[Shape, float] = {}
        for run in self.runs:
            best[shape_of(run)] = min(best.get(shape_of(run), self.entropy), run.final_loss)
        limits = {
            shape: (loss + self.entropy) / 2 if self.limit is None else self.limit for shape, loss in best.items()
        }
        object.__setattr__(self, "limits", limits)

    def failed(self, run: SweepRun) -> bool:
        """Return True if a run ended no better than the limit of its shape."""
        return not run.final_loss < self.limits[shape_of(run)]

    def cells(self) -> dict[tuple[str, Shape, float], list[SweepRun]]:
        """Return the runs by scheme, shape and learning rate, in the order in which they come."""
        cells: dict[tuple[str, Shape, float], list[SweepRun]] = {}
        for run in self.runs:
            cells.setdefault((run.point.scheme, shape_of(run), run.point.lr), []).append(run)
        return cells

    def best(self) -> dict[tuple[str, Shape], tuple[float, list[SweepRun]]]:
        """Return the learning rate of the lowest median last loss, and its runs, by scheme and shape."""
        best: dict[tuple[str, Shape], tuple[float, list[SweepRun]]] = {}
        for (scheme, shape, lr), runs in self.cells().items():
            earlier = best.get((scheme, shape))
            if earlier is None or _median(runs) < _median(earlier[1]):
                best[scheme, shape] = lr, runs
        return best

    def predictors(self) -> list[Predictor]:
        """Return how well sharpness, loss and learning rate, as known after ``EARLY`` of the steps, tell the end."""
        runs: list[SweepRun] = []
        columns: dict[str, list[float]] = {"sharpness": [], "training loss": [], "learning rate": []}
        for run in self.runs:
            look = next(((step, value) for step, value in run.sharpness if step >= EARLY * run.point.steps), None)
            if look is not None and look[0] < len(run.losses):  # it went on
                runs.append(run)
                values = (look[1], run.losses[look[0] - 1], run.point.lr)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
        failed, last = [self.failed(run) for run in runs], [run.final_loss for run in runs]
        return [
            Predictor(name, len(runs), sum(failed), roc_area(x, failed), spearman(x, last))
            for name, x in columns.items()
        ]

    def trained(self) -> list[Trained]:
        """Return the median held-out loss at the best rate of each scheme and shape, for ``fit_law``."""
        trained = []
        for (scheme, _), (_, runs) in self.best().items():
            forward, _, backward = scheme.partition("/")
            loss = statistics.median(run.validation for run in runs)
            trained.append(Trained(runs[0].parameters, runs[0].tokens, loss, forward, backward or forward))
        return trained

    def groups(self) -> list[dict[str, Any]]:
        """Return a record for each scheme and shape, as JSON types."""
        records = []
        for (scheme, shape), (lr, best) in self.best().items():
            runs = [run for run in self.runs if (run.point.scheme, shape_of(run)) == (scheme, shape)]
            bad = sum(map(self.failed, runs))
            records.append({
                "scheme": scheme, **shape._asdict(), "limit": self.limits[shape], "runs": len(runs), "failed": bad,
                "interval": interval(bad, len(runs)), "spikes": sum(spikes(run.losses) for run in runs),
                "best_lr": lr, "loss": _median(best),
                "validation": statistics.median(run.validation for run in best), "tasks": _answers(best),
            })  # fmt: skip
        return records

    def to_dict(self) -> dict[str, Any]:
        """Return what the table shows as JSON types."""
        predictors = [one._asdict() for one in self.predictors()]
        return {"entropy": self.entropy, "groups": self.groups(), "predictors": predictors}

    def _content(self) -> tuple[Rows | str, ...]:
        tasks = sorted({name for run in self.runs for name in run.tasks})
        answered = lambda group, task: f"{100 * group['tasks'][task]:.1f} %" if task in group["tasks"] else "-"  # noqa: E731
        answers = [Column(name, partial(answered, task=name)) for name in tasks]
        alone = f"; the frequencies of bytes alone give {self.entropy:.3f}" if self.limit is None else ""
        text = (
            f"failed: stopped, or a last loss (mean of the last tenth, nats per byte) of as much or more{alone}",
            "best lr: of the lowest median last loss of the seeds, whose held-out loss and answers follow",
            "spikes: losses 5 standard deviations above the mean of the 20 before, in all runs",
        )
        return table_of((*_GROUPS, *answers), self.groups()), *text, *self._predicted()

    def _predicted(self) -> tuple[Rows | str, ...]:
        rows = self.predictors()
        if not rows[0].runs:
            return ()
        text = (
            f"what is known after {100 * EARLY:.0f} % of the steps of {rows[0].runs} runs, {rows[0].failed} of which "
            "fail: chance that it is higher in a run that fails (0.5: tells nothing), correlation with the last loss"
        )
        return table_of(_PREDICTORS, rows), text

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw a heatmap for each shape: median last loss by scheme and learning rate, and failed runs in numbers."""
        cells = self.cells()
        shapes, schemes = list(dict.fromkeys(key[1] for key in cells)), list(dict.fromkeys(key[0] for key in cells))
        rates = sorted({key[2] for key in cells})
        rows, columns = -(-len(shapes) // _PANELS), min(len(shapes), _PANELS)
        cells_wide, cells_high = len(rates) * columns, len(schemes) * rows
        figure = new_figure(max(6.0, 2.4 + 0.85 * cells_wide), max(2.8, 0.9 * rows + 0.52 * cells_high))
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten().tolist()
        for spare in panels[len(shapes) :]:
            spare.remove()
        medians = {key: min(_median(runs), self.limits[key[1]]) for key, runs in cells.items()}
        low, high = min(medians.values()), max(self.limits.values())
        for panel, shape in zip(panels, shapes, strict=False):
            grid = [[medians.get((scheme, shape, lr), math.nan) for lr in rates] for scheme in schemes]
            image = panel.imshow(grid, cmap="viridis_r", vmin=low, vmax=max(high, low + 0.1), aspect="auto")
            panel.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates])
            panel.set_yticks(range(len(schemes)), schemes)
            panel.set_xlabel("peak learning rate")
            panel.set_title(f"width {shape.width}, {shape.steps} steps", fontsize=10, loc="left")
            _numbers(panel, image.norm, cells, schemes, shape, rates, self)
        figure.colorbar(image, ax=panels[: len(shapes)], label="median last loss, nats per byte\n(lower is better)")
        return saved(figure, path)


def _numbers(
    panel: Any, norm: Any, cells: Mapping[tuple[str, Shape, float], list[SweepRun]], schemes: Sequence[str],
    shape: Shape, rates: Sequence[float], result: SweepResult,
) -> None:  # fmt: skip
    for y, scheme in enumerate(schemes):
        for x, lr in enumerate(rates):
            if runs := cells.get((scheme, shape, lr)):
                bad = sum(map(result.failed, runs))
                text = _loss(_median(runs)) + (f"\n{bad}/{len(runs)} failed" if bad else "")
                dark = norm(min(_median(runs), result.limits[shape])) > 0.5
                panel.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _answers(runs: Sequence[SweepRun]) -> dict[str, float]:
    total: dict[str, tuple[int, int]] = {}
    for run in runs:
        for name, (right, asked) in run.tasks.items():
            before = total.get(name, (0, 0))
            total[name] = before[0] + right, before[1] + asked
    return {name: right / asked for name, (right, asked) in total.items() if asked}


def _median(runs: Sequence[SweepRun]) -> float:
    return statistics.median(run.final_loss for run in runs)


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


_GROUPS = (
    *(Column(name, itemgetter(name)) for name in ("scheme", "width", "steps")),
    Column("fails from", lambda group: _loss(group["limit"])),
    Column("failed", lambda group: f"{group['failed']} of {group['runs']}"),
    Column("95 % interval", lambda group: "{:.0f} to {:.0f} %".format(*(100 * end for end in group["interval"]))),
    Column("spikes", itemgetter("spikes")),
    Column("best lr", itemgetter("best_lr"), "g"),
    Column("its loss", lambda group: _loss(group["loss"])),
    Column("held out", lambda group: _loss(group["validation"])),
)
_PREDICTORS = (
    Column("known early", "name"), Column("ROC area", lambda one: _loss(one.area)),
    Column("rank correlation", lambda one: _loss(one.correlation)),
)  # fmt: skip
