# SPDX-License-Identifier: Apache-2.0
"""What a sweep shows: failed runs, best learning rates, loss spikes, answers, and what predicts a failure."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.lab.training.sweep import SweepRun
from fmtsim.support.errors import ArgumentError
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved
from fmtsim.support.table import Column, Facts, Result, Rows, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CONSTANTS = ("log A", "alpha", "log B", "beta", "log E", "gamma")
DELTA = 1e-4  # of Huber's loss of log L
STEPS = 400  # of Levenberg and Marquardt's method; 100 more change no digit that is printed


class Trained(NamedTuple):
    """One trained model: its parameters, tokens, loss, and the precisions of forward and backward products."""

    parameters: float
    tokens: float
    loss: float
    forward: str
    backward: str


class Choice(NamedTuple):
    """A way to compute both passes, and how fast: products a second, as a multiple of the baseline's."""

    forward: str
    backward: str
    forward_speed: float
    backward_speed: float

    @property
    def training_speed(self) -> float:
        """Of a whole step, two thirds of whose products are backward."""
        return 3 / (1 / self.forward_speed + 2 / self.backward_speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw(Result):
    """Hold a fitted law."""

    constants: tuple[float, float, float, float, float, float]  # A, alpha, B, beta, E and gamma
    base: str  # the precision whose efficiencies are 1
    eff_n: Mapping[str, float]  # effective parameters, as a share, by forward precision
    eff_d: Mapping[str, float]  # effective tokens, as a share, by backward precision
    runs: tuple[Trained, ...] = ()  # what it was fitted to

    def loss(self, parameters: float, tokens: float, forward: str = "", backward: str = "") -> float:
        """Return the loss of a model; an empty precision is the baseline's."""
        a, alpha, b, beta, e, gamma = self.constants
        n = parameters * self.eff_n[forward or self.base]
        d = tokens * self.eff_d[backward or self.base]
        return float((a / n**alpha + b / d**beta) ** gamma + e)

    def error(self) -> float:
        """Return the largest difference of ``log L`` between the law and a run."""
        return max(abs(math.log(self.loss(*run[:2], *run[3:]) / run.loss)) for run in self.runs)

    def best(self, parameters: float, tokens: float, choices: Sequence[Choice]) -> Choice:
        """Return the choice of the lowest loss for budgets of serving and training.

        The budgets are those of a baseline of so many parameters and tokens. Products that are faster forward allow a
        larger model at equal cost of a token served, ``N s_f``; the budget of training then is for
        ``D s_t / s_f`` tokens, with ``s_t`` of ``Choice.training_speed``.
        """

        def loss(one: Choice) -> float:
            faster = one.training_speed / one.forward_speed
            return self.loss(parameters * one.forward_speed, tokens * faster, one.forward, one.backward)

        return min(choices, key=loss)

    def _content(self) -> tuple[Rows | Facts | str, ...]:
        names = ("A", "alpha", "B", "beta", "E", "gamma")
        facts = [(name, f"{value:.4g}") for name, value in zip(names, self.constants, strict=True)]
        columns = (
            Column("precision", str), Column("eff_N forward", self.eff_n.get, ".3f", absent="-"),
            Column("eff_D backward", self.eff_d.get, ".3f", absent="-"),
        )  # fmt: skip
        law = f"L = (A / (N eff_N)^alpha + B / (D eff_D)^beta)^gamma + E, fitted to {len(self.runs)} losses"
        return (
            law, Facts(facts), table_of(columns, dict.fromkeys((*self.eff_n, *self.eff_d))),
            f"largest error of the law: {100 * math.expm1(self.error()):.2f} % of a loss",
        )  # fmt: skip

    def plot(self, choices: Sequence[Choice], path: str | Path | None = None, *, ax: Any = None) -> "Figure":
        """Draw which choice is best by parameters and tokens a parameter, with the runs that the law was fitted to."""
        figure, (panel,) = new_panels(7.2, 4.6, ax)
        sizes = [run.parameters for run in self.runs]
        ratios = [run.tokens / run.parameters for run in self.runs]
        x = torch.logspace(math.log10(min(sizes)) - 0.5, math.log10(max(sizes)) + 1.5, 160).tolist()
        y = torch.logspace(math.log10(min(ratios)) - 0.5, math.log10(max(ratios)) + 1.5, 120).tolist()
        best = [[choices.index(self.best(n, n * ratio, choices)) for n in x] for ratio in y]
        for index, choice in enumerate(choices):
            inside = [[float(cell == index) for cell in row] for row in best]
            if any(map(max, inside)):
                panel.contourf(x, y, inside, levels=(0.5, 1.5), colors=[COLOURS[index % len(COLOURS)]], alpha=0.45)
                panel.plot([], [], "s", color=COLOURS[index % len(COLOURS)], alpha=0.45,
                           label=f"{choice.forward} forward, {choice.backward} backward")  # fmt: skip
        panel.plot(sizes, ratios, "k.", markersize=5, label="runs; beyond them the law extrapolates")
        panel.set_xscale("log")
        panel.set_yscale("log")
        label_axes(panel, f"parameters (of {self.base} at equal cost of serving)", "tokens a parameter, likewise")
        panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8)
        return saved(figure, path)


def fit_law(runs: Sequence[Trained], base: str) -> ScalingLaw:
    """Fit the law: its constants to the runs of the baseline, then all efficiencies together to the others.

    Deterministic. Least squares of ``log L`` under Huber's loss, from a grid of starts.

    Args:
        runs: Losses; those with ``base`` forward and backward are the baseline's.
        base: Its precision.

    Raises:
        ArgumentError: The baseline has too few sizes or numbers of tokens, or a loss is not a positive number.
    """
    plain = [run for run in runs if run.forward == run.backward == base]
    sizes, lengths = ({run[i] for run in plain} for i in range(2))
    if len(plain) <= len(CONSTANTS) or len(sizes) < 2 or len(lengths) < 2:
        raise ArgumentError(
            f"{len(plain)} runs of {base!r} have {len(sizes)} sizes and {len(lengths)} numbers of tokens; the law has "
            "6 constants: train at least 7 runs of two or more of both, such as --widths 32,64,128 --steps 100,200,400"
        )
    bad = next((run for run in runs if not (math.isfinite(run.loss) and run.loss > 0)), None)
    if bad is not None:
        raise ArgumentError(f"the loss of {bad} is no positive number; leave that scheme or size out")
    # The constants in the order of ``CONSTANTS``; centred logarithms keep A and alpha, B and beta apart.
    n, d, target = _columns(plain)
    middle_n, middle_d = n.mean(), d.mean()
    lowest, mean = float(target.exp().min()), float(target.exp().mean())
    starts = []
    for share, alpha, beta, gamma in itertools.product((0.3, 0.6, 0.9), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0), (0.3, 1.0)):
        half = math.log(mean - share * lowest) / gamma - math.log(2)
        starts.append((half, alpha, half, beta, math.log(share * lowest), gamma))

    def residuals(t: Tensor) -> tuple[Tensor, Tensor]:
        log_loss, slopes = _log_loss(t, n - middle_n, d - middle_d)
        return log_loss - target, torch.stack(slopes, -1)

    theta = _fit(residuals, torch.tensor(starts, dtype=torch.float64))
    theta[0] += theta[1] * middle_n
    theta[2] += theta[3] * middle_d
    others = [run for run in runs if not run.forward == run.backward == base]
    names = sorted({(0, r.forward) for r in others} | {(1, r.backward) for r in others} - {(0, base), (1, base)})
    names = [name for name in names if name[1] != base]
    efficiencies = _efficiencies(theta, others, names) if names else torch.zeros(0)
    a, alpha, b, beta, e, gamma = theta.tolist()
    effs: tuple[dict[str, float], dict[str, float]] = ({base: 1.0}, {base: 1.0})
    for (side, name), value in zip(names, efficiencies.exp().tolist(), strict=True):
        effs[side][name] = value
    constants = (math.exp(a), alpha, math.exp(b), beta, math.exp(e), gamma)
    return ScalingLaw(constants=constants, base=base, eff_n=effs[0], eff_d=effs[1], runs=tuple(runs))


def _log_loss(theta: Tensor, n: Tensor, d: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return ``log L`` of logarithms of parameters and tokens ``[..., runs]``, and its slopes along the constants."""
    a, alpha, b, beta, e, gamma = (one.unsqueeze(-1) for one in theta.unbind(-1))
    inner = torch.logaddexp(a - alpha * n, b - beta * d)
    log_loss = torch.logaddexp(gamma * inner, e.expand_as(inner))
    share = (gamma * inner - log_loss).exp()
    of_n = share * gamma * (a - alpha * n - inner).exp()
    of_d = share * gamma - of_n
    return log_loss, [of_n, -n * of_n, of_d, -d * of_d, 1 - share, share * inner]


def _columns(runs: Sequence[Trained]) -> Tensor:
    return torch.tensor([run[:3] for run in runs], dtype=torch.float64).log().T


def _efficiencies(theta: Tensor, runs: Sequence[Trained], names: Sequence[tuple[int, str]]) -> Tensor:
    """Return the logarithm of each efficiency: of parameters (0) or tokens (1), by precision."""
    n, d, target = _columns(runs)
    of_n, of_d = (
        torch.tensor([[float(name == (side, run[3 + side])) for name in names] for run in runs], dtype=torch.float64)
        for side in range(2)
    )

    def residuals(t: Tensor) -> tuple[Tensor, Tensor]:
        log_loss, (along_a, _, along_b, *_) = _log_loss(theta, n + t @ of_n.T, d + t @ of_d.T)
        slopes = -theta[1] * along_a.unsqueeze(-1) * of_n - theta[3] * along_b.unsqueeze(-1) * of_d
        return log_loss - target, slopes

    return _fit(residuals, torch.zeros(1, len(names), dtype=torch.float64))


def _fit(residuals: Callable[[Tensor], tuple[Tensor, Tensor]], starts: Tensor) -> Tensor:
    """Return the least point of Huber's loss by Levenberg and Marquardt's method, the best of many starts.

    Residuals beyond DELTA are weighted down in each step, so that they count by their size and not by its square.

    Args:
        residuals: Of points ``[starts, constants]``: differences ``[starts, runs]``, and their slopes, a constant each.
        starts: Where to begin.
    """
    theta, damping = starts, torch.full(starts.shape[:1], 1e-2, dtype=torch.float64)
    r, slopes = residuals(theta)
    cost = _huber(r)
    for _ in range(STEPS):
        weighted = slopes * (DELTA / r.abs()).clamp(max=1).unsqueeze(-1)
        hessian = weighted.mT @ slopes
        room = damping.unsqueeze(-1) * hessian.diagonal(dim1=-2, dim2=-1) + 1e-12
        move, _ = torch.linalg.solve_ex(hessian + torch.diag_embed(room), weighted.mT @ r.unsqueeze(-1))
        new = theta - move.squeeze(-1)
        loss = _huber(residuals(new)[0])
        better = loss < cost
        theta, cost = torch.where(better.unsqueeze(-1), new, theta), torch.where(better, loss, cost)
        damping = torch.where(better, damping / 3, damping * 4).clamp(1e-12, 1e12)
        r, slopes = residuals(theta)
    return theta[cost.nan_to_num(math.inf).argmin()].clone()


def _huber(r: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(r, torch.zeros_like(r), reduction="none", delta=DELTA).sum(-1)


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
            total: dict[str, tuple[int, int]] = {}
            for run in best:
                for name, (right, asked) in run.tasks.items():
                    before = total.get(name, (0, 0))
                    total[name] = before[0] + right, before[1] + asked
            records.append({
                "scheme": scheme, **shape._asdict(), "limit": self.limits[shape], "runs": len(runs), "failed": bad,
                "interval": interval(bad, len(runs)), "spikes": sum(spikes(run.losses) for run in runs),
                "best_lr": lr, "loss": _median(best),
                "validation": statistics.median(run.validation for run in best),
                "tasks": {name: right / asked for name, (right, asked) in total.items() if asked},
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
        content = table_of((*_GROUPS, *answers), self.groups()), *text
        rows = self.predictors()
        if rows[0].runs < 4:  # of three runs chance gives a correlation of 1 in every third sweep
            return content
        early = (
            f"what is known after {100 * EARLY:.0f} % of the steps of {rows[0].runs} runs, {rows[0].failed} of which "
            "fail: chance that it is higher in a run that fails (0.5: tells nothing), correlation with the last loss"
        )
        return *content, table_of(_PREDICTORS, rows), early

    def plot(self, path: str | Path | None = None, *, ax: Any = None) -> "Figure":
        """Draw a heatmap for each shape: median last loss by scheme and learning rate, and failed runs in numbers."""
        cells = self.cells()
        shapes, schemes = list(dict.fromkeys(key[1] for key in cells)), list(dict.fromkeys(key[0] for key in cells))
        rates = sorted({key[2] for key in cells})
        rows, columns = -(-len(shapes) // _PANELS), min(len(shapes), _PANELS)
        cells_wide, cells_high = len(rates) * columns, len(schemes) * rows
        width, height = max(6.0, 2.4 + 0.85 * cells_wide), max(2.8, 0.9 * rows + 0.52 * cells_high)
        figure, panels = new_panels(width, height, ax, rows, columns, sharey=True)
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
            for y, scheme in enumerate(schemes):
                for x, lr in enumerate(rates):
                    if runs := cells.get((scheme, shape, lr)):
                        bad = sum(map(self.failed, runs))
                        text = _loss(_median(runs)) + (f"\n{bad}/{len(runs)} failed" if bad else "")
                        dark = image.norm(min(_median(runs), self.limits[shape])) > 0.5
                        panel.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        figure.colorbar(image, ax=panels[: len(shapes)], label="median last loss, nats per byte\n(lower is better)")
        return saved(figure, path)

    def plot_over(self, path: str | Path | None = None, *, ax: Any = None) -> "Figure":
        """Draw a field of a datapath that was swept: median last losses by its values, and SQNR of products by layer.

        Losses are those at the best rate of each scheme and shape; rows of products those of the first scheme and
        shape. Small dots are single runs.

        Raises:
            ArgumentError: No scheme has a value of a field behind ``@``.
        """
        best: dict[tuple[str, str, Shape], list[SweepRun]] = {}
        for (scheme, shape), (_, runs) in self.best().items():
            if "@" in scheme:
                best[scheme.partition("@")[0], scheme.partition("@")[2], shape] = runs
        if not best:
            raise ArgumentError(
                "no run is of a field of a datapath; pass --target and --over, such as fraction_bits=2..8"
            )
        lines, changes = (
            list(dict.fromkeys((w, shape) for w, _, shape in best)),
            list(dict.fromkeys(c for _, c, _ in best)),
        )
        field, values = changes[0].partition("=")[0], [change.partition("=")[2] for change in changes]
        first = {change: best[lines[0][0], change, lines[0][1]] for change in changes}
        rows = list(dict.fromkeys(name for runs in first.values() for run in runs for name in run.products))
        figure, panels = new_panels(11.0, max(3.4, 1.0 + 0.2 * len(rows)), ax, 1, 2)
        # 1. losses by value, a line for each scheme and shape
        for (word, shape), colour in zip(lines, itertools.cycle(COLOURS)):
            losses = [_median(best[word, change, shape]) for change in changes]
            label = word if len({s for _, s in lines}) == 1 else f"{word}, width {shape.width}, {shape.steps} steps"
            panels[0].plot(range(len(values)), losses, "o-", color=colour, label=label)
            for x, change in enumerate(changes):
                panels[0].plot(x, [[run.final_loss for run in best[word, change, shape]]], ".", color=colour, alpha=0.4)
        panels[0].set_xticks(range(len(values)), values)
        label_axes(panels[0], field, "median last loss, nats per byte")
        panels[0].legend(frameon=False, fontsize=8)
        # 2. SQNR of each product by value, a row for each layer and product
        sqnr = lambda runs, name: statistics.median([run.products.get(name, math.nan) for run in runs])  # noqa: E731
        grid = [[sqnr(first[change], name) for change in changes] for name in rows] or [[math.nan] * len(changes)]
        image = panels[1].imshow(grid, cmap="viridis", aspect="auto")
        panels[1].set_xticks(range(len(values)), values)
        panels[1].set_yticks(range(len(rows)), rows, fontsize=7)
        panels[1].set_xlabel(field)
        panels[1].set_title(f"products of {lines[0][0]} against exact sums", fontsize=10, loc="left")
        figure.colorbar(image, ax=panels[1], label="SQNR, dB (higher is better)")
        return saved(figure, path)


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
