# SPDX-License-Identifier: Apache-2.0
"""Observation: statistics of a model's operands, by layer and by step, and what is shown of them."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.lab.analysis.losses import Losses, LossScale, Measure, list_losses, max_loss_scale, plot_losses, worst
from fmtsim.lab.analysis.stats import Counts, OperandStats, Sample, in_order
from fmtsim.support.errors import FmtsimError, did_you_mean
from fmtsim.support.files import StrPath
from fmtsim.support.records import checked
from fmtsim.support.table import Result, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Layers = dict[str, dict[str, OperandStats]]
StepCounts = dict[int, dict[str, dict[str, Counts]]]
History = dict[int, dict[str, dict[str, Sample]]]


class Observation(Result):
    """Statistics per layer and operand: ``stats["layers.0.fc"]["g_w"].underflow_percent``; ``print`` shows a table.

    Operands are named by tensor and product: ``x_f w_f`` enter fprop, ``g_d w_d`` dgrad, ``g_w x_w`` wgrad; those of
    quantised attention are ``q k v p``, and ``dv.a`` ... ``dk.b`` where gradients have quantisers. They come in this
    order, and layers in that of their first calls, on every device. Several calls inside the ``with`` add up. Use
    ``fmtsim.observe`` to make one.

    Attributes:
        layers: Layer -> operand -> statistics over all observed steps.
        history: Step -> layer -> operand -> what that step lost. A step is a call of the model, counted from 1; what
            a backward pass loses belongs to the step whose forward it is of, and what layers lose outside a call of
            the model to the step before.
        counts: What ``history`` is computed from.
        steps: Calls of the model, observed or not.
        every: The first of so many steps is observed.
    """

    def __init__(
        self, layers: Layers | None = None, counts: StepCounts | None = None, *, steps: int = 0, every: int = 1
    ) -> None:  # fmt: skip
        self._layers: Layers = {} if layers is None else layers
        self._counts: StepCounts = {} if counts is None else counts
        self.steps, self.every = steps, every

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics as numbers, strings and tensors, for a checkpoint."""
        counts = {step: _map_operands(asdict, layers) for step, layers in self.counts.items()}
        return {"layers": _map_operands(asdict, self.layers), "steps": self.steps, "counts": counts}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Observation":
        """Return the statistics of a ``state_dict``."""
        counts = {int(step): _map_operands(lambda c: Counts(**c), x) for step, x in state["counts"].items()}
        whole = lambda s: OperandStats(**s | {"window": s["window"] and tuple(s["window"])})  # noqa: E731
        return Observation(_map_operands(whole, state["layers"]), counts, steps=state["steps"])

    def merge(self, other: "Observation", step: int) -> None:
        """Add all statistics of another observation as those of one step."""
        for layer, operands in other.layers.items():
            for operand, seen in operands.items():
                self.count(step, layer, operand, seen)

    def count(self, step: int, layer: str, operand: str, seen: OperandStats) -> None:
        """Add statistics of one operand as those of one step."""
        totals, of_step = self._layers.setdefault(layer, {}), self._counts.setdefault(step, {}).setdefault(layer, {})
        if operand not in totals:
            totals[operand] = OperandStats()
            _sort(totals)
        if operand not in of_step:
            of_step[operand] = Counts()
            _sort(of_step)
        totals[operand].merge(seen)
        of_step[operand].count(seen)

    @property
    def layers(self) -> Layers:
        """Layer -> operand -> statistics over all observed steps."""
        return self._layers

    @property
    def counts(self) -> StepCounts:
        """Step -> layer -> operand -> what ``history`` has the figures of."""
        return self._counts

    @property
    def history(self) -> History:
        """Step -> layer -> operand -> figures of that step."""
        return {step: _map_operands(Sample.of, layers) for step, layers in self.counts.items()}

    def __getitem__(self, layer: str) -> dict[str, OperandStats]:
        if layer not in self.layers:
            raise KeyError(f"no layer {layer!r} was observed{did_you_mean(layer, self.layers)}; .layers has all")
        return self.layers[layer]

    def _content(self) -> tuple[Rows | str, ...]:
        if not self.layers:
            return ("nothing is observed yet; call the model inside `with observe(model) as stats:`",)
        return (*list_losses(self.layers)._content(), *self.notes)

    @property
    def notes(self) -> list[str]:
        """What of a model that is not converted is simulated and what is not seen, in words."""
        return []

    def worst(self, n: int = 5, by: Measure = "underflow") -> Losses:
        """Return the operands that lose most over all observed steps, the worst first.

        Args:
            n: How many.
            by: ``"underflow"``, ``"saturation"`` (shares of elements) or ``"sqnr"`` (least signal to noise).

        Returns:
            A tuple of ``(layer, operand, stats)``; ``print`` shows a table.

        Raises:
            ArgumentError: No such measure, or n below 1.
        """
        return worst(list_losses(self.layers), n, by)

    def loss_scale(self) -> LossScale:
        """Return the largest power of two that the loss may be multiplied with until a gradient saturates.

        Of all observed steps, for formats without scales of their own; beside it how far the largest gradient then is
        from the format's largest value, and how much underflows. ``print`` shows it.

        Raises:
            ArgumentError: No gradient was observed, or all are zero or in high precision.
        """
        return max_loss_scale(self.layers)

    def plot(
        self, path: str | Path | None = None, *, by: Measure = "underflow", operand: str | None = None,
        title: str = "", ax: Any = None,
    ) -> "Figure":  # fmt: skip
        """Draw a row for each layer, in the model's order: what it lost and where its exponents lie; return the figure.

        The left panel has a column for each observed step, or bars where there was one; the right panel the exponents
        of x / scale over all of them, with those of the format's own values behind: what lies left of them underflows.

        Args:
            path: Where to save a PNG.
            by: As in ``worst``.
            operand: One operand of every layer that has it, such as ``"g_w"``; None draws of each layer the one that
                loses most.
            title: Heading.
            ax: Two axes to draw into.

        Raises:
            ArgumentError: Nothing was observed, no layer has the operand, or there is no such measure.
            FmtsimError: matplotlib is not installed.
        """
        return plot_losses(self.layers, self.history, path, by=by, operand=operand, title=title, ax=ax)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for each observed step, layer and operand: the figures of ``history``.

        Raises:
            FmtsimError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise FmtsimError("to_pandas needs pandas, which is not installed; pip install pandas") from None
        # Columns are those of Sample; the format is the one that all steps have.
        columns = ("step", "layer", "operand", "format", *(field.name for field in fields(Sample)))
        rows = [
            (step, layer, operand, self.layers[layer][operand].format, *astuple(sample))
            for step, layers in self.history.items() for layer, operands in layers.items()
            for operand, sample in operands.items()
        ]  # fmt: skip
        return pandas.DataFrame(rows, columns=list(columns))

    def to_dict(self) -> dict[str, Any]:
        """Return layers, history, steps and every as JSON types."""
        record: Callable[[Any], Any] = lambda s: s.to_dict()  # noqa: E731
        history = {step: _map_operands(record, layers) for step, layers in self.history.items()}
        layers = _map_operands(record, self.layers)
        return {"layers": layers, "history": history, "steps": self.steps, "every": self.every}

    def save_report(
        self, path: StrPath, *, title: str = "Where bits are lost", notes: Sequence[str] = (), **parts: Any
    ) -> None:
        """Write one self-contained HTML file with heatmaps, exponents and all figures, for a browser without a network.

        Args:
            path: The file; it appears whole or not at all.
            title: Heading.
            notes: What a reader has to know first; what of the model is not seen is added.
            parts: What else it shows: ``curves``, ``coverage``, ``attribution``, ``configuration``, as
                ``fmtsim.lab.analysis.page.write_page`` takes them.

        Raises:
            ArgumentError: An argument is not of its type.
            DataError: The file cannot be written.
        """
        from fmtsim.lab.analysis.page import write_page

        write_page(
            path, title=title, observation=self, notes=[*checked("notes", notes, tuple[str, ...]), *self.notes],
            **parts,
        )  # fmt: skip


def _sort(operands: dict[str, Any]) -> None:
    """Bring the operands of a layer into their order, for devices differ in what they cast first."""
    ordered = {operand: operands[operand] for operand in in_order(operands)}
    operands.clear()
    operands |= ordered


def _map_operands(function: Callable[[Any], Any], layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a function makes of each operand of each layer."""
    return {layer: {name: function(s) for name, s in operands.items()} for layer, operands in layers.items()}
