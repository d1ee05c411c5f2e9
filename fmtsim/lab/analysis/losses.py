# SPDX-License-Identifier: Apache-2.0
"""Which operands lose most, as a table and as a picture, and which loss scale their gradients allow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from fmtsim.lab.analysis.measure import LOWEST_EXPONENT
from fmtsim.lab.analysis.stats import OperandStats, Sample, in_order
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved, set_title
from fmtsim.support.table import Column, Facts, Result, Rows, decibels, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Layers = Mapping[str, Mapping[str, OperandStats]]
History = Mapping[int, Mapping[str, Mapping[str, Sample]]]
Measure = Literal["underflow", "saturation", "sqnr"]
MEASURES: dict[Measure, str] = {"underflow": "underflow_percent", "saturation": "saturation_percent", "sqnr": "sqnr_db"}
_WORDS = {"underflow": "underflow, %", "saturation": "saturation, %", "sqnr": "SQNR, dB"}
_MOST_ROWS = 120  # of labels in a picture; of more layers every second, third ... has its name
_TAIL = 0.001  # share of elements on either side that the thick part of an exponent range leaves out


class Loss(NamedTuple):
    """What a format lost of one operand."""

    layer: str
    operand: str
    stats: OperandStats


class Losses(Result, tuple[Loss, ...]):
    """Operands with what they lost; ``print`` shows a table."""

    __slots__ = ()

    def _content(self) -> tuple[Rows]:
        return (table_of(_COLUMNS, self, filled=True),)


_COLUMNS = (
    Column("layer", lambda loss: loss.layer or "(model)"),
    Column("operand", "operand"),
    Column("format", lambda loss: loss.stats.format),
    Column(
        "underflow %", lambda loss: None if math.isnan(x := loss.stats.underflow_percent) else x, ">.2f", absent="-"
    ),
    Column("saturation %", lambda loss: loss.stats.saturation_percent, ">.3f"),
    Column("SQNR dB", lambda loss: decibels(loss.stats.sqnr_db), ">"),
    Column("amax", lambda loss: loss.stats.amax, ">.3g"),
    Column("bits lost in", lambda loss: ", ".join(f"{k} {x:z.1f}" for k, x in loss.stats.bits_lost.items()) or None),
)


def list_losses(layers: Layers) -> Losses:
    """Return all operands in the order of layers."""
    return Losses(Loss(layer, operand, s) for layer, operands in layers.items() for operand, s in operands.items())


def worst(losses: Losses, n: int, by: Measure) -> Losses:
    """Return the n operands that lose most, the worst first; of equal ones that with more noise, then the earlier.

    Raises:
        ArgumentError: No such measure, or n below 1.
    """
    check_measure("worst", by)
    if type(n) is not int or n < 1:
        raise ArgumentError(f"n={shown(n)} is not a number of operands; pass 1 or more")
    return Losses(sorted(losses, key=lambda loss: (-badness(loss.stats, by), -badness(loss.stats, "sqnr")))[:n])


def check_measure(verb: str, by: Measure) -> None:
    """Raise ArgumentError for a measure that there is not."""
    if not isinstance(by, str) or by not in MEASURES:
        raise ArgumentError(f"{verb} by={shown(by)} is not a measure; choose one of {', '.join(MEASURES)}")


def badness(s: OperandStats | Sample, by: Measure) -> float:
    """Return how much was lost by a measure, so that more is worse; -inf for a tensor of zeros."""
    value: float = getattr(s, MEASURES[by])
    return -math.inf if math.isnan(value) else value if by != "sqnr" else -value


def plot_losses(
    layers: Layers,
    history: History,
    path: str | Path | None,
    *,
    by: Measure,
    operand: str | None,
    title: str,
    ax: Any = None,
) -> "Figure":
    """Draw a row for each layer: what it lost, over the steps where there are several, and where its exponents lie.

    As ``Observation.plot``.

    Raises:
        ArgumentError: Nothing was observed, no layer has the operand, or there is no such measure.
    """
    check_measure("plot", by)
    chosen = [
        worst(list_losses({layer: {name: s for name, s in operands.items() if operand in (None, name)}}), 1, by)
        for layer, operands in layers.items()
    ]
    rows = [losses[0] for losses in chosen if losses]
    if not rows:
        operands_seen = ", ".join(in_order(op for operands in layers.values() for op in operands))
        raise ArgumentError(
            f"plot operand={shown(operand)} was not observed; choose one of {operands_seen}, or None"
            if operands_seen
            else "plot has nothing to draw; observe at least one step"
        )
    # 1. On the left what each step lost, a column for each, or bars where there was one.
    height = 1.7 + 0.17 * max(6, min(len(rows), _MOST_ROWS))
    figure, (heatmap, right) = new_panels(11.0, height, ax, 1, 2, sharey=True, width_ratios=(1.25, 1))
    if len(history) > 1:
        import matplotlib

        grid = torch.full((len(rows), len(history)), math.nan)
        for column, samples in enumerate(history.values()):
            for row, loss in enumerate(rows):
                seen = [s for op, s in samples.get(loss.layer, {}).items() if operand in (None, op)]
                values = [getattr(s, MEASURES[by]) for s in seen if not math.isnan(getattr(s, MEASURES[by]))]
                if values:
                    grid[row, column] = min(values) if by == "sqnr" else max(values)
        finite = grid[grid.isfinite()].tolist() or [0.0]
        low = min(finite) if by == "sqnr" else 0.0
        colours = matplotlib.colormaps["YlOrRd_r" if by == "sqnr" else "YlOrRd"].with_extremes(
            bad="#d9d9d9", over="#ffffff"
        )
        drawn = heatmap.imshow(
            grid.numpy(), aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=max(*finite, low + 1.0)
        )
        steps = list(history)
        ticks = range(0, len(steps), math.ceil(len(steps) / 10))
        heatmap.set_xticks(ticks, [str(steps[i]) for i in ticks])
        label_axes(heatmap, "step", "")
        heatmap.grid(False)
        lossless = ", white: nothing lost" if grid.isposinf().any() else ""
        inch = 1.0 / figure.get_figheight()
        bar = figure.colorbar(
            drawn, ax=heatmap, location="bottom", fraction=0.12 * inch, pad=0.1 * inch, aspect=60, shrink=0.7
        )
        bar.set_label(_WORDS[by] + lossless + (", grey: zeros or not run" if grid.isnan().any() else ""))
    else:
        values = [getattr(loss.stats, MEASURES[by]) for loss in rows]
        finite = [v if math.isfinite(v) else 0.0 for v in values]
        heatmap.barh(range(len(rows)), finite, height=0.8, color=COLOURS[0])
        for place, value in enumerate(values):
            if not math.isfinite(value):
                word = "lossless" if value == math.inf else "zeros" if math.isnan(value) else "infinite noise"
                heatmap.annotate(f" {word}", (0, place), fontsize=6, va="center")
        label_axes(heatmap, _WORDS[by], "")
        heatmap.set_xlim(min(0.0, *finite), max(*finite, 1.0) * 1.02)
    # 2. On the right the exponents that an element format sees, and behind them those of its own values.
    for place, (_, _, s) in enumerate(rows):
        if s.window is not None:
            bottom, top = (math.floor(math.log2(edge)) for edge in s.window)
            right.barh(place, top + 1 - bottom, left=bottom - 0.5, height=1.0, color=COLOURS[4], alpha=0.3, linewidth=0)
        counts = s.scaled_exponents.double()
        if not counts.any():
            continue
        used = counts.nonzero().flatten()
        shares = counts.cumsum(0) / counts.sum()
        inner = [int((shares > _TAIL).nonzero()[0]), int((shares >= 1 - _TAIL).nonzero()[0])]
        for (low, high), height in (((int(used[0]), int(used[-1])), 0.15), (inner, 0.5)):
            right.barh(
                place, high + 1 - low, left=low + LOWEST_EXPONENT - 0.5, height=height, color=COLOURS[0], linewidth=0
            )
    right.barh(0, 0, color=COLOURS[0], label=f"elements (thick: all but {200 * _TAIL:g} %)")
    right.barh(0, 0, color=COLOURS[4], alpha=0.3, label="the format's own values")
    right.locator_params(axis="x", integer=True)
    label_axes(right, "exponent of x / scale", "")
    right.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    # 3. Names of layers on the left, every second, third ... where there are too many.
    every = math.ceil(len(rows) / _MOST_ROWS)
    names = [f"{loss.layer or '(model)'}  {loss.operand}" for loss in rows]
    heatmap.set_yticks(range(0, len(rows), every), names[::every], fontsize=7, parse_math=False)
    for panel in (heatmap, right):  # which share their rows, and where they are given do not know it
        panel.set_ylim(len(rows) - 0.5, -0.5)
    right.tick_params(labelleft=False)
    if operand is None:
        heatmap.set_title("of each layer the operand that loses most", fontsize=9, loc="left")
    set_title(heatmap, title)
    return saved(figure, path)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LossScale(Result):
    """Say how much larger a loss may be until the first gradient saturates; ``print`` shows it."""

    # the largest power of two at which no observed gradient lies beyond its format's largest value: what the loss is to
    # be multiplied with, on top of what it was. None where gradients have scales of their own.
    scale: float | None
    # factor that is left between the largest gradient, times scale, and the format's largest value
    headroom: float = math.nan
    layer: str = ""  # layer, operand, format: where the gradient is that saturates first
    operand: str = ""
    format: str = ""
    amax: float = 0.0  # its magnitude, as it was observed
    underflow_percent: float = 0.0  # share of the non-zero gradients, of formats without scales, that became zero
    # the same at that scale, from counts of exponents; ties to zero are not counted
    underflow_percent_scaled: float = 0.0
    nonfinite: int = 0  # gradients that were NaN or infinite: with any, the largest is not known

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return record | {"headroom": None if math.isnan(self.headroom) else self.headroom}

    def _content(self) -> list[Facts | str]:
        if self.scale is None:
            return ["gradients have scales of their own: they need no loss scale"]
        largest = f"{self.amax:.3g}, {self.operand} of {self.layer or '(model)'} in {self.format}"
        share = f"{self.underflow_percent:.2f} % as observed, {self.underflow_percent_scaled:.2f} % at this scale"
        facts = [
            ("loss scale", f"2^{int(math.log2(self.scale))} = {self.scale:g}"), ("largest gradient", largest),
            ("headroom", f"{self.headroom:.3g} times"), ("underflow", share),
        ]  # fmt: skip
        lost = f"{self.nonfinite} gradients were NaN or infinite: observe with a smaller loss scale first"
        return [Facts(facts), *([lost] if self.nonfinite else [])]


def max_loss_scale(layers: Mapping[str, Mapping[str, OperandStats]]) -> LossScale:
    """Return the largest loss scale that saturates no gradient, from statistics by layer and operand.

    Raises:
        ArgumentError: No gradient was observed, or all are zero or in high precision.
    """
    seen = {(layer, op): s for layer, ops in layers.items() for op, s in ops.items() if op.startswith("g")}
    formats = {key: s for key, s in seen.items() if s.window is not None and s.nonzero}
    if not formats:
        what = "only gradients that are zero or in high precision" if seen else "no gradient"
        raise ArgumentError(f"loss_scale: {what} observed; call backward inside the with, of a model with formats")
    # Where an element format sees other exponents than x has, a scale lies between.
    plain = {key: s for key, s in formats.items() if torch.equal(s.exponents, s.scaled_exponents)}
    if not plain:
        return LossScale(scale=None)
    (layer, operand), first = min(plain.items(), key=lambda item: _room(item[1]))
    room = _room(first)
    power = math.frexp(room)[1] - 1  # the largest with 2**power <= room
    nonzero = sum(s.nonzero for s in plain.values())
    lost = 0  # elements below half of the smallest value once they are 2**power times as large
    for s in plain.values():
        lowest = math.floor(math.log2(s.window[0])) - 1 - power - LOWEST_EXPONENT  # type: ignore[index]
        lost += int(s.exponents[: max(0, lowest)].sum())
    return LossScale(
        scale=math.ldexp(1.0, power), headroom=math.ldexp(room, -power), layer=layer, operand=operand,
        format=first.format, amax=first.amax, nonfinite=sum(s.nonfinite for s in plain.values()),
        underflow_percent=100.0 * sum(s.underflowed for s in plain.values()) / nonzero,
        underflow_percent_scaled=100.0 * lost / nonzero,
    )  # fmt: skip


def _room(s: OperandStats) -> float:
    """Return how much larger the largest element may become."""
    assert s.window is not None
    return s.window[1] / s.amax
