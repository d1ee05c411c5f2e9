# SPDX-License-Identifier: Apache-2.0
"""The scaling law of Quartet: the loss by parameters, tokens, and the precision of forward and backward products.

``L = (A / (N eff_N)^alpha + B / (D eff_D)^beta)^gamma + E``: a forward precision counts as fewer parameters, a backward
precision as fewer tokens.

Source: Castro et al., Quartet, arXiv:2505.14669, section 4; IST-DASLab/Quartet 5b9d74c, notebooks/plots.ipynb, which
fits the constants to the runs of the baseline first, then each efficiency, by Huber's loss of log L.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fmtsim.support.errors import ArgumentError
from fmtsim.support.plotting import COLOURS, label_axes, new_figure, saved
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

    def plot(self, choices: Sequence[Choice], path: str | Path | None = None) -> "Figure":
        """Draw which choice is best by parameters and tokens a parameter, with the runs that the law was fitted to."""
        figure = new_figure(7.2, 4.6)
        panel = figure.subplots()
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
        figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=8)
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
    theta = _constants(plain)
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


def _constants(runs: Sequence[Trained]) -> Tensor:
    """Return the constants in the order of ``CONSTANTS``; centred logarithms keep A and alpha, B and beta apart."""
    n, d, target = _columns(runs)
    middle_n, middle_d = n.mean(), d.mean()
    lowest, mean = float(target.exp().min()), float(target.exp().mean())
    starts = []
    for share, alpha, beta, gamma in itertools.product((0.3, 0.6, 0.9), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0), (0.3, 1.0)):
        half = math.log(mean - share * lowest) / gamma - math.log(2)
        starts.append((half, alpha, half, beta, math.log(share * lowest), gamma))

    def residuals(t: Tensor) -> tuple[Tensor, Tensor]:
        log_loss, slopes = _log_loss(t, n - middle_n, d - middle_d)
        return log_loss - target, torch.stack(slopes, -1)

    theta = _fitted(residuals, torch.tensor(starts, dtype=torch.float64))
    theta[0] += theta[1] * middle_n
    theta[2] += theta[3] * middle_d
    return theta


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

    return _fitted(residuals, torch.zeros(1, len(names), dtype=torch.float64))


def _fitted(residuals: Callable[[Tensor], tuple[Tensor, Tensor]], starts: Tensor) -> Tensor:
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
