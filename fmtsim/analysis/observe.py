# SPDX-License-Identifier: Apache-2.0
"""observe: collect statistics of every operand of a converted model while it runs."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fmtsim.analysis.loss_scale import LossScale, loss_scale_of
from fmtsim.analysis.losses import Losses, Measure, losses_of, plot_losses, worst
from fmtsim.analysis.measure import measure
from fmtsim.analysis.shadow import Shadow
from fmtsim.analysis.stats import Counts, OperandStats, Sample
from fmtsim.arguments import check_module
from fmtsim.errors import ArgumentError, FmtsimError, shown
from fmtsim.files import StrPath
from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.watch import Observer
from fmtsim.nn.attention_call import AttentionCall
from fmtsim.nn.attention_mode import ATTENTION
from fmtsim.nn.modules import EmulatedModule, Emulation
from fmtsim.recipes.spec import Recipe, Rule
from fmtsim.records import checked
from fmtsim.spec.quantizer import Quantizer
from fmtsim.table import Rows, Tabular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Layers = dict[str, dict[str, OperandStats]]
StepCounts = dict[int, dict[str, dict[str, Counts]]]
History = dict[int, dict[str, dict[str, Sample]]]


class Observation(Tabular):
    """Statistics per layer and operand: ``stats["layers.0.fc"]["g_w"].underflow_percent``; ``print`` shows a table.

    Operands are named by tensor and product: ``x_f w_f`` enter fprop, ``g_d w_d`` dgrad, ``g_w x_w`` wgrad; those of
    quantised attention are ``q k v p``, and ``dv.a`` ... ``dk.b`` where gradients have quantisers. Several
    calls inside the ``with`` add up. Use ``fmtsim.observe`` to make one.

    Attributes:
        layers: Layer -> operand -> statistics over all observed steps.
        history: Step -> layer -> operand -> what that step lost. A step is a call of the model, counted from 0; what
            a backward pass loses belongs to the step whose forward it is of, and what layers lose outside a call of
            the model to the step before.
        counts: What ``history`` is computed from.
        steps: Calls of the model, observed or not.
        every: The first of so many steps is observed.
    """

    def __init__(
        self, model: nn.Module, *, recipe: str | Path | Recipe | LinearConfig | None = None,
        format: str | Format | None = None, rules: Sequence[Rule] | str | Path = (), every: int = 1,
    ) -> None:  # fmt: skip
        check_module("observe", model)
        check_asked("observe", every, recipe, format)
        model = getattr(model, "_orig_mod", model)  # of what torch.compile returned
        self._model: nn.Module | None = model
        plain = recipe is not None or format is not None
        if rules and not plain:
            raise ArgumentError(
                "observe got rules, which are exceptions of recipe= or format=; pass one of these as well"
            )
        self._shadow = Shadow(model, recipe, format, rules) if plain else None
        model = model if self._shadow is None else self._shadow.model
        self._modules = [module for module in model.modules() if isinstance(module, EmulatedModule)]
        self._attention = [m.__dict__[ATTENTION] for m in model.modules() if ATTENTION in m.__dict__]
        self._active = False
        self._stance: Any = None  # of compilers, before the with
        self._hooks: list[RemovableHandle] = []
        self._counts: StepCounts = {}
        self._layers: Layers = {}
        self._unread: list[tuple[int, str, str, Format | None, Tensor]] = []
        self.steps, self.every = 0, every
        if not self._modules and not self._attention:
            raise ArgumentError(
                f"observe found no converted layer in {type(model).__name__}; call fmtsim.convert first, "
                "or pass recipe= or format= to see what that would do to this model"
            )

    @classmethod
    def of(cls, layers: Layers, counts: StepCounts | None = None, steps: int = 0) -> "Observation":
        """Return finished statistics, of no model; ``counts`` are what ``history`` has the figures of."""
        found = cls.__new__(cls)
        found._shadow, found._stance = None, None
        found._model, found._modules, found._attention, found._active, found._hooks = None, [], [], False, []
        found._counts, found._layers, found._unread, found.steps, found.every = counts or {}, layers, [], steps, 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics as numbers, strings and tensors, for a checkpoint."""
        counts = {step: _each(asdict, layers) for step, layers in self.counts.items()}
        return {"layers": _each(asdict, self.layers), "steps": self.steps, "counts": counts}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Observation":
        """Return the statistics of a ``state_dict``, of no model."""
        counts = {int(step): _each(lambda c: Counts(**c), layers) for step, layers in state["counts"].items()}
        return cls.of(_each(_stats_of, state["layers"]), counts, state["steps"])

    def merge(self, other: "Observation", step: int) -> None:
        """Add all statistics of another observation as those of one step."""
        for layer, operands in other.layers.items():
            for operand, seen in operands.items():
                self._count(step, layer, operand, seen)

    @property
    def layers(self) -> Layers:
        """Layer -> operand -> statistics over all observed steps."""
        self._read()
        return self._layers

    @property
    def counts(self) -> StepCounts:
        """Step -> layer -> operand -> what ``history`` has the figures of."""
        self._read()
        return self._counts

    @property
    def history(self) -> History:
        """Step -> layer -> operand -> figures of that step."""
        return {
            step: {layer: {op: Sample.of(c) for op, c in operands.items()} for layer, operands in layers.items()}
            for step, layers in self.counts.items()
        }

    def __enter__(self) -> "Observation":
        for name, place in self._places():
            if place.observer is not None:
                raise ArgumentError(f"layer {name!r} is observed already; leave the outer observe first")
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            self._stance = torch.compiler.set_stance("force_eager")
        if self._shadow is not None:
            self._shadow.attach()
        if self._model is not None:
            self._hooks.append(self._model.register_forward_pre_hook(self._begin, prepend=True))
        self._active = True
        self._watch(max(0, self.steps - 1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False  # graphs made inside may still run backward; they are no longer counted
        while self._hooks:
            self._hooks.pop().remove()
        self._watch(None)
        if self._shadow is not None:
            self._shadow.detach()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if kind is None and self.steps and not self.layers:
            raise ArgumentError(
                f"observe saw {self.steps} calls of the model and no product in them: it was compiled inside the with, "
                "or no layer that is observed ran; compile before the with, where compiled models run eagerly"
            )

    def _begin(self, *_: Any) -> None:
        """Begin a step, before the model's forward."""
        self._read()
        if self._shadow is not None:
            self._shadow.begin(self.steps)
        self._watch(None if self.steps % self.every else self.steps)
        self.steps += 1

    def _watch(self, step: int | None) -> None:
        """Observe layers from now on, as parts of a step; None stops it."""
        for name, place in self._places():
            place.observer = None if step is None else partial(self._observer, step, name)

    def _places(self) -> Iterator[tuple[str, Emulation | AttentionCall]]:
        """Yield what is observed, by name; a module that was reverted meanwhile is none."""
        for module in self._modules:
            if module.emulation is not None:
                yield module.emulation.name, module.emulation
        for attended in self._attention:
            yield attended.name, attended.call

    def __getitem__(self, layer: str) -> dict[str, OperandStats]:
        return self.layers[layer]

    def _content(self) -> tuple[Rows | str, ...]:
        if not self.layers:
            return ("nothing is observed yet; call the model inside `with observe(model) as stats:`",)
        return (*losses_of(self.layers)._content(), *self.notes)

    @property
    def notes(self) -> list[str]:
        """What of a model that is not converted is simulated and what is not seen, in words."""
        if self._shadow is None:
            return []
        known = {how.name: {_named(how.name, part) for part in m.parts} for m in self._modules if (how := m.emulation)}
        absent = [layer or "(model)" for layer, parts in known.items() if parts.isdisjoint(self.layers)]
        unseen = [each.name or "(model)" for each in self._attention if each.name not in self.layers]
        notes = [f"not called: {_some(absent)}"] if absent else []
        notes += [f"no attention seen, not called or of another kind: {_some(unseen)}"] if unseen else []
        return [*self._shadow.notes, *notes]

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
        return worst(losses_of(self.layers), n, by)

    def loss_scale(self) -> LossScale:
        """Return the largest power of two that the loss may be multiplied with until a gradient saturates.

        Of all observed steps, for formats without scales of their own; beside it how far the largest gradient then is
        from the format's largest value, and how much underflows. ``print`` shows it.

        Raises:
            ArgumentError: No gradient was observed, or all are zero or in high precision.
        """
        return loss_scale_of(self.layers)

    def plot(
        self, path: str | Path | None = None, *, by: Measure = "underflow", operand: str | None = None, title: str = ""
    ) -> "Figure":
        """Draw a row for each layer, in the model's order: what it lost and where its exponents lie; return the figure.

        The left panel has a column for each observed step, or bars where there was one; the right panel the exponents
        of x / scale over all of them, with those of the format's own values behind: what lies left of them underflows.

        Args:
            path: Where to save a PNG.
            by: As in ``worst``.
            operand: One operand of every layer that has it, such as ``"g_w"``; None draws of each layer the one that
                loses most.
            title: Heading.

        Raises:
            ArgumentError: Nothing was observed, no layer has the operand, or there is no such measure.
            FmtsimError: matplotlib is not installed.
        """
        return plot_losses(self.layers, self.history, path, by=by, operand=operand, title=title)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for each observed step, layer and operand: the figures of ``history``.

        Raises:
            FmtsimError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise FmtsimError("to_pandas needs pandas, which is not installed; pip install pandas") from None
        columns = ("step", "layer", "operand", "format", *(field.name for field in fields(Sample)))
        rows = [
            (step, layer, operand, self.layers[layer][operand].format, *astuple(sample))
            for step, layers in self.history.items() for layer, operands in layers.items()
            for operand, sample in operands.items()
        ]  # fmt: skip
        return pandas.DataFrame(rows, columns=list(columns))

    def to_dict(self) -> dict[str, Any]:
        """Return layers, history, steps and every as JSON types."""
        history = self.history.items()
        return {
            "layers": _nested(self.layers), "history": {step: _nested(layers) for step, layers in history},
            "steps": self.steps, "every": self.every,
        }  # fmt: skip

    def save_report(
        self, path: StrPath, *, title: str = "Where bits are lost", notes: Sequence[str] = (), **parts: Any
    ) -> None:
        """Write one self-contained HTML file with heatmaps, exponents and all figures, for a browser without a network.

        Args:
            path: The file; it appears whole or not at all.
            title: Heading.
            notes: What a reader has to know first; what of the model is not seen is added.
            parts: What else it shows: ``curves``, ``coverage``, ``attribution``, ``configuration``, as
                ``fmtsim.analysis.page.write_page`` takes them.

        Raises:
            ArgumentError: An argument is not of its type.
            DataError: The file cannot be written.
        """
        from fmtsim.analysis.page import write_page

        write_page(
            path,
            title=title,
            observation=self,
            notes=[*checked("notes", notes, tuple[str, ...]), *self.notes],
            **parts,
        )

    def _observer(self, step: int, module: str, part: str) -> Observer:
        layer = _named(module, part)

        def record(operand: str, x: Tensor, q: Tensor, quantizer: Quantizer, dim: int) -> None:
            if self._active:
                self._unread.append((step, layer, operand, quantizer.format, measure(x, q, quantizer.format, dim)))

        return record

    def _read(self) -> None:
        """Take what was counted from its devices, each asked once."""
        unread, self._unread = self._unread, []
        numbers: dict[int, Tensor] = {}
        for device in {measured.device for *_, measured in unread}:
            places = [i for i, (*_, measured) in enumerate(unread) if measured.device == device]
            numbers |= zip(places, torch.stack([unread[i][-1] for i in places]).cpu(), strict=True)
        for i, (step, layer, operand, fmt, _) in enumerate(unread):
            self._count(step, layer, operand, OperandStats().read(numbers[i], fmt))

    def _count(self, step: int, layer: str, operand: str, seen: OperandStats) -> None:
        self._layers.setdefault(layer, {}).setdefault(operand, OperandStats()).merge(seen)
        self._counts.setdefault(step, {}).setdefault(layer, {}).setdefault(operand, Counts()).count(seen)


def observe(
    model: nn.Module, *, recipe: str | Path | Recipe | LinearConfig | None = None, format: str | Format | None = None,
    rules: Sequence[Rule] | str | Path = (), every: int = 1,
) -> Observation:  # fmt: skip
    """Collect statistics of every operand of a model's products: ``with observe(model) as stats: ...``.

    Forward and backward inside the ``with`` are counted; outside it a model pays nothing. Under activation
    checkpointing the recomputed forward counts again. What torch.compile made runs eagerly inside the ``with``, also in
    steps that are not observed. Elements of any float dtype; NaN and infinities are counted
    apart (``nonfinite``). Outputs, gradients and random numbers of the model keep their bits.

    Args:
        model: A converted model; or one that is not, with ``recipe`` or ``format``.
        recipe: What ``fmtsim.convert`` takes. The model computes as it does, and the operands of its products (those
            that ``convert`` would find, with the gradients that come) are cast beside it: memory and time of a
            step about double. Random rounding draws from a generator of its own. The table's foot says what of the
            model, or of the recipe, is not seen.
        format: Likewise: a format of activations, weights and gradients, scaled as ``fmtsim.convert`` does, and of
            attention's operands, which ``convert`` leaves alone.
        rules: Exceptions for layers, beside ``recipe`` or ``format``, or a file of them: as ``fmtsim.convert`` takes
            them.
        every: Observe the first of so many calls of the model; the others pay nothing.

    Raises:
        ArgumentError: No layer is converted and neither recipe nor format given, or one is given and the model is
            converted; both are given; there are rules alone, or one that fits no layer; the model is observed already;
            ``every`` is not a number from 1. At the end of the ``with``: the model was called, and no layer ran in
            eager code.
        FormatError: No such recipe or format.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> with observe(model, format="mxfp8_e4m3") as stats:
    ...     model(torch.ones(32, 64)).sum().backward()
    >>> stats["2"]["g_d"].amax
    1.0
    """
    return Observation(model, recipe=recipe, format=format, rules=rules, every=every)


def check_asked(who: str, every: int, recipe: Any, format: Any) -> None:
    """Refuse an ``every`` that is no number from 1, and a recipe beside a format."""
    if type(every) is not int or every < 1:
        raise ArgumentError(f"every={shown(every)} is not a number of steps; pass 1 to observe all, 10 for every tenth")
    if recipe is not None and format is not None:
        raise ArgumentError(f"{who} got recipe and format; pass one of them")


def _named(layer: str, part: str) -> str:
    return ".".join(filter(None, (layer, part)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _nested(layers: Mapping[str, Mapping[str, OperandStats | Sample]]) -> dict[str, dict[str, Any]]:
    return {name: {op: s.to_dict() for op, s in operands.items()} for name, operands in layers.items()}


def _each(function: Callable[[Any], Any], layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a function makes of each operand of each layer."""
    return {layer: {name: function(s) for name, s in operands.items()} for layer, operands in layers.items()}


def _stats_of(state: dict[str, Any]) -> OperandStats:
    window = state["window"]
    return OperandStats(**{**state, "window": None if window is None else tuple(window)})
