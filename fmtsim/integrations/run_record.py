# SPDX-License-Identifier: Apache-2.0
"""RunRecord: what a callback does with a run: steps, observation, losses, checkpoints, the report."""

import contextlib
import importlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.analysis.losses import MEASURES, badness, list_losses, worst
from fmtsim.lab.analysis.measure import LOWEST_EXPONENT
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.observe import ModelObservation, check_observation, observe
from fmtsim.nn.convert import set_step
from fmtsim.nn.report import report
from fmtsim.nn.state import converted_root, converted_state, is_converted, load_converted_state
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.serialization import rules_of
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, first_line, shown
from fmtsim.support.files import StrPath, check_file, write_file

KINDS: Final = ("operand", "layer", None)


def figures(part: Observation) -> dict[str, float]:
    """Return a few numbers of a step, each of the operand that loses most by it, for a trainer's log.

    What is infinite or undefined (nothing lost, all zeros) is left out: not all loggers take it.
    """
    losses = list_losses(part.layers)
    if not losses:
        return {}
    numbers = {
        "fmtsim_worst_underflow_percent": worst(losses, 1, "underflow")[0].stats.underflow_percent,
        "fmtsim_worst_saturation_percent": worst(losses, 1, "saturation")[0].stats.saturation_percent,
        "fmtsim_worst_sqnr_db": worst(losses, 1, "sqnr")[0].stats.sqnr_db,
        "fmtsim_nonfinite": float(sum(loss.stats.nonfinite for loss in losses)),
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def worst_places(part: Observation) -> dict[str, str]:
    """Return the layer and operand of each of ``figures``, for logs that take text; those that lose nothing are out."""
    losses = list_losses(part.layers)
    firsts = {by: worst(losses, 1, by)[0] for by in MEASURES} if losses else {}
    places = {f"fmtsim_worst_{by}": f"{one.layer or '(model)'} {one.operand}" for by, one in firsts.items()}
    nothing = {
        f"fmtsim_worst_{by}" for by in ("underflow", "saturation") if losses and not badness(firsts[by].stats, by)
    }
    return {name: place for name, place in places.items() if name not in nothing}


def exponents(part: Observation, by: str | None) -> dict[str, Tensor]:
    """Return histograms of ``floor(log2|x / scale|)`` over the finite elements that are not zero, by their names.

    Args:
        part: Statistics of a step.
        by: ``"operand"``, ``"layer"`` or None, as callbacks take it.
    """
    totals: dict[str, Tensor] = {}
    for layer, operand, stats in list_losses(part.layers) if by is not None else ():
        parts = ("fmtsim_exponents", *([layer or "(model)"] if by == "layer" else []), operand)
        name = "/".join(parts)
        totals[name] = totals.get(name, 0) + stats.scaled_exponents
    return {name: counts for name, counts in totals.items() if counts.any()}


def send(histograms: dict[str, Tensor], trackers: Iterable[Any], step: int, axis: str | None = None) -> None:
    """Send histograms to those trackers that take some.

    Args:
        histograms: What ``exponents`` returned.
        trackers: Writers of TensorBoard, runs of W&B or its module; all else is passed over.
        step: The number under which the trainer logs the step.
        axis: The key by which a trainer tells W&B its step; None tells it as W&B's own.
    """
    for tracker in trackers if histograms else ():
        if hasattr(tracker, "add_histogram_raw"):
            for name, counts in histograms.items():
                tracker.add_histogram_raw(name, **_of_tensorboard(counts), global_step=step)
        elif _is_wandb(tracker):
            histogram = importlib.import_module("wandb").Histogram
            values = {name: histogram(np_histogram=_used(counts)) for name, counts in histograms.items()}
            tracker.log(values | {axis: step}) if axis else tracker.log(values, step=step)


def _is_wandb(tracker: Any) -> bool:
    name = getattr(tracker, "__name__", "") or type(tracker).__module__
    return name.partition(".")[0] == "wandb" and callable(getattr(tracker, "log", None))


def _used(counts: Tensor) -> tuple[list[int], list[int]]:
    """Return the bins from the first to the last that has elements, and their edges, one more."""
    used = counts.nonzero().flatten()
    first, last = int(used[0]), int(used[-1])
    return counts[first : last + 1].tolist(), list(range(first + LOWEST_EXPONENT, last + LOWEST_EXPONENT + 2))


def _of_tensorboard(counts: Tensor) -> dict[str, Any]:
    """Return what ``SummaryWriter.add_histogram_raw`` takes; sums count elements at the middles of their bins."""
    numbers, edges = _used(counts)
    many, middles = torch.tensor(numbers).double(), torch.tensor(edges[:-1]) + 0.5
    return {
        "min": edges[0], "max": edges[-1], "num": sum(numbers), "sum": float((many * middles).sum()),
        "sum_squares": float((many * middles * middles).sum()), "bucket_limits": edges[1:], "bucket_counts": numbers,
    }  # fmt: skip


FILE: Final = "fmtsim_state.pt"
"""The file beside those of a checkpoint, where a trainer keeps no states of others itself."""
_KEYS: Final = {"recipe_states", "observed", "first", "losses", "observation", "loss_scales"}


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the state in a file, or None where there is no file.

    Raises:
        DataError: The file is damaged or holds something else.
    """
    if not path.exists():
        return None
    try:
        return checked_state(torch.load(path, map_location="cpu", weights_only=True), "it")
    except Exception as e:  # of damaged bytes torch's reader raises anything
        raise DataError(
            f"{path} cannot be read: {first_line(e)}; go on from another checkpoint, or remove this file: "
            "the weights' own files have delayed scales, too, but for those of PEFT"
        ) from e


def checked_state(state: Any, what: str) -> dict[str, Any]:
    """Return a state, checked as far as that it is one.

    Raises:
        DataError: It is none.
    """
    try:
        if not isinstance(state, Mapping) or set(state) != _KEYS or not state["recipe_states"]:
            raise ValueError
        Observation.of_state(state["observation"])
        return dict(state)
    except Exception as e:
        raise DataError(f"{what} holds something else than the state of a run") from e


def gathered(own: dict[str, Any] | None) -> list[Any]:
    """Return what ``fmtsim.state`` is on each process, or one of them where nothing is remembered; all have to call."""
    ranks = _ranks()
    if own is None or not own["layers"] or ranks == 1:
        return [own]
    states: list[Any] = [None] * ranks
    dist.all_gather_object(states, own)
    return states


def of_this_process(states: list[Any]) -> tuple[Any, str]:
    """Return what ``gathered`` has of this process, and a note where that is another's."""
    ranks = _ranks()
    if len(states) == ranks:
        return states[dist.get_rank() if ranks > 1 else 0], ""
    note = f"{len(states)} processes saved delayed scales; {ranks} went on, with those of the first"
    return states[0], note if len(states) > 1 else ""


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class RunRecord:
    """Follow the optimizer steps of a run; steps are counted from 1, as losses in reports are.

    A callback calls ``begin``; for each optimizer step ``enter`` and ``leave`` around each of its batches, or around
    all of them, ``add`` with each loss, and ``end``; at last ``finish``.

    Args:
        every: The first of so many optimizer steps is observed, all calls of the model in it together.
        report: Where the report goes; None writes none.
        title: Its heading.
        recipe, format, rules: What a model that is not converted is observed for, as ``fmtsim.observe`` takes them.
        histograms: What goes to TensorBoard and W&B: ``"operand"``, ``"layer"`` or None.

    Attributes:
        losses: Of each step since ``first``, without those before the record began.
        seen: Statistics of the observed steps.
        step: Optimizer steps done.
        notes: What a reader of the report has to know first.
        running: Whether a run has begun and not ended.

    Raises:
        ArgumentError: ``every`` is not a number from 1, no file can be written at ``report``, ``recipe`` and ``format``
            are both given, there are rules alone, ``recipe`` or a rule has a schedule, or ``histograms`` is not a
            choice.
        FormatError: There is no such recipe.
    """

    def __init__(
        self, *, every: int = 10, report: StrPath | None = None, title: str = "Where bits are lost",
        recipe: str | Path | Recipe | LinearConfig | None = None, format: str | Format | None = None,
        rules: Sequence[Rule] | str | Path = (), histograms: str | None = "operand",
    ) -> None:  # fmt: skip
        check_observation("the callback", every, recipe, format, rules)
        if report is not None and not isinstance(report, str | Path):
            raise ArgumentError(f"report={shown(report)} is not a path; pass a str or a pathlib.Path")
        if histograms not in KINDS:
            raise ArgumentError(
                f"histograms={shown(histograms)} is not a choice; pass 'operand' for one of each operand over all "
                "layers, 'layer' for one of each operand of each layer, or None"
            )
        self.every, self.path, self.title = every, None if report is None else Path(report), title
        if self.path is not None:
            check_file("report", self.path)
        # What to observe for, unless it has a schedule: what observes knows calls of the model, not steps.
        named = recipe if recipe is None or isinstance(recipe, LinearConfig) else get_recipe(recipe, kind="training")
        given_rules = rules_of(rules)
        recipe_rules = named.rules if isinstance(named, Recipe) else ()
        for who, rules_found in (
            ("one of rules=", given_rules),
            (f"recipe {getattr(named, 'name', None)!r}", recipe_rules),
        ):
            if any(rule.steps is not None for rule in rules_found):
                raise ArgumentError(
                    f"{who} has a schedule, which a model that is not converted is not observed for; "
                    "hand the trainer fmtsim.convert(model, recipe=..., total_steps=...), and leave recipe= out here"
                )
        self._asked: dict[str, Any] = {"format": format, "recipe": named, "rules": given_rules}
        self._histograms = histograms
        self.running, self._inside = False, False
        self._part: ModelObservation | None = None  # of the step that is open
        self._last: ModelObservation | None = None  # of the step that ended last
        self._clear()

    def _clear(self) -> None:
        self.leave()
        self.losses: list[float] = []
        self.first, self.step = 1, 0
        self.notes: list[str] = []
        self.seen = Observation()
        self._open = False  # a step has begun
        self._part = self._last = None
        self._added: list[Tensor] = []
        self._scales: dict[int, float] = {}  # of the loss, by observed step
        self._unseen: list[str] = []  # what of a model that is not converted was not observed

    @property
    def _observed(self) -> str | None:
        """Recipe or format that an unconverted model is observed for; None for a converted one."""
        asked = self._asked["format"] if self._asked["recipe"] is None else self._asked["recipe"]
        more = "+rules" if self._asked["rules"] else ""
        return None if asked is None else f"{getattr(asked, 'name', asked)}{more}"

    def begin(
        self, model: nn.Module, step: int, state: Mapping[str, Any] | None = None, *, first: bool = True,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Begin a run, or go on after so many steps with what ``state_dict`` returned; ``first``: of several processes.

        Raises:
            ArgumentError: The model is not converted and there is no recipe to observe it for, it is and there is one,
                or the state is of another recipe or model.
            DataError: The state is something else.
        """
        self.running = False
        self._clear()
        self._first, self._configuration = first, configuration or {}
        if self._observed is None:
            if not is_converted(model):
                raise ArgumentError(
                    f"the callback found no converted layer in {type(model).__name__}; hand the trainer "
                    'fmtsim.convert(model, recipe="te_current"), or another recipe, or pass recipe= or format= to the '
                    "callback, which then shows what they would do to the model"
                )
            model = converted_root(model, "the callback")
        else:
            observe(model, **self._asked)  # says what it refuses before the first step
        self._model = model
        self.first, self.step = step + 1, step
        if state is not None:
            state = checked_state(state, "the checkpoint")
            if state["observed"] != self._observed:
                was, now = (
                    "a converted model" if of is None else f"one observed for {shown(of)}"
                    for of in (state["observed"], self._observed)
                )
                raise ArgumentError(f"the checkpoint is of {was}, this run is of {now}; go on as it began")
            if self._observed is None:
                local_state, note = of_this_process(state["recipe_states"])
                load_converted_state(self._model, local_state)
                self.notes += [note] if note else []
            if self._first:
                self.first, self.losses = state["first"], list(state["losses"])
                self.seen, self._scales = Observation.of_state(state["observation"]), dict(state["loss_scales"])
        if self.first > 1:
            self.notes.append(f"Steps 1 to {self.first - 1} ran without the callback: their losses are not drawn")
        self.running = True

    def enter(self, scaler: Any = None) -> None:
        """Go into a batch; before the first of a step tell a recipe's schedule, and observe if its turn has come.

        Args:
            scaler: The GradScaler of training in float16, which multiplies the loss.
        """
        self.leave()  # a batch that ended in an error
        if not self._open:
            self._open, self._part, self._added = True, None, []
            if self._observed is None:
                set_step(self._model, self.step)
            if self._first and self.step % self.every == 0:
                self._part = observe(self._model, **self._asked)
                if scaler is not None and scaler.is_enabled():
                    self._scales[self.step + 1] = scaler.get_scale()
        if self._part is not None:
            self._part.__enter__()
            self._inside = True

    def leave(self) -> None:
        """Come out of a batch: stop observing."""
        inside, self._inside = self._inside, False
        if inside and self._part is not None:
            self._part.__exit__(None, None, None)

    def add(self, loss: Tensor) -> None:
        """Note the loss of a batch."""
        self._added.append(loss.detach())

    def end(self, *, mean: bool = True) -> dict[str, float]:
        """Count a step and return what a trainer logs of it; its loss is the mean, or the sum, over its batches."""
        self.leave()
        part, added = self._part, self._added
        self._open, self._part, self._added = False, None, []
        self.step += 1
        if not self._first:
            return {}
        self.seen.steps = self.step
        loss = sum(map(float, added)) / (len(added) if mean else 1) if added else None
        ended = loss is not None and not math.isfinite(loss) and all(map(math.isfinite, self.losses))
        if loss is not None:
            self.losses.append(loss)
        blown = loss is not None and not math.isfinite(loss) and bool(self.seen.layers)
        if part is not None and not blown:  # where it blows up, the looks before
            self.seen.merge(part, self.step)
        if ended:
            self.notes.append(f"The loss became {loss} at step {self.step}; heatmaps are of the steps before it")
            self.write()
        self._last = part
        if part is None:
            return {}
        self._unseen = part.notes
        scale = self._scales.get(self.step)
        return figures(part) | ({} if scale is None else {"fmtsim_loss_scale": scale})

    def places(self) -> dict[str, str]:
        """Return the layers and operands that lost most in the step that ended last, if it was observed."""
        return {} if self._last is None else worst_places(self._last)

    def draw(self, trackers: Iterable[Any], step: int, axis: str | None = None) -> None:
        """Send histograms of the step that ended last, if it was observed, to those trackers that take some."""
        if self._last is not None:
            send(exponents(self._last, self._histograms), trackers, step, axis)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``begin`` goes on from; call it on all processes, for it gathers their delayed scales."""
        local_state = converted_state(self._model) if self._observed is None else None
        return {
            "recipe_states": gathered(local_state), "observed": self._observed, "first": self.first,
            "losses": list(self.losses), "observation": self.seen.state_dict(), "loss_scales": dict(self._scales),
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write the state beside a trainer's checkpoint, and the report so far; call it on all processes."""
        content, state = io.BytesIO(), self.state_dict()
        if self._first:
            torch.save(state, content)
            write_file(folder / FILE, content.getvalue())
        self.write_so_far()

    def write_so_far(self) -> None:
        """Write the report beside a checkpoint."""
        if self.running:
            self.write("Training had not ended when this was written")

    def finish(self) -> None:
        """End the run and write the report."""
        self.running = False
        self.write()

    def interrupted(self, error: BaseException) -> None:
        """Write the report of a run that ended in an error, which stays what the user sees."""
        with contextlib.suppress(FmtsimError):  # of a step in which nothing was observed
            self.leave()
        if self.running:
            self.running = False
            try:
                self.write(f"Interrupted after step {self.step} by {type(error).__name__}")
            except Exception as second:
                error.add_note(f"and the report could not be written: {second}")

    def write(self, *notes: str) -> None:
        """Write the report of what there is by now, on the first of several processes."""
        if self.path is None or not self._first:
            return
        coverage = None
        lines = [*notes, *self.notes, *self._about_scales()]
        if self._observed is None:
            model_report = report(self._model)
            lines += [model_report.summary, *model_report.notes]
            coverage = model_report.coverage
        else:
            lines.append(f"The model computed as it is; its operands were cast beside it for {self._observed}")
            lines += self._unseen
        self.seen.save_report(
            self.path, title=self.title, coverage=coverage, configuration=self._configuration, notes=lines,
            curves={"loss": self.losses} if self.losses and len(self.losses) == self.seen.steps else None,
        )  # fmt: skip

    def _about_scales(self) -> list[str]:
        if not self._scales:
            return []
        low, high = (f"{choice(self._scales.values()):g}" for choice in (min, max))
        return [
            f"Gradients are those of the loss times {low if low == high else f'{low} to {high}'}, as the GradScaler "
            "had it when they were observed: amax and exponents have that factor"
        ]
