"""RunRecord: what a callback keeps of a run: losses, observed steps, delayed scales, the report."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmtsim.analysis.losses import losses_of, worst
from fmtsim.analysis.observe import Observation, observe
from fmtsim.errors import ArgumentError, DataError, shown
from fmtsim.files import StrPath, check_file, write_file
from fmtsim.nn.convert import is_converted, set_step
from fmtsim.nn.report import report
from fmtsim.nn.state import load_recipe_state, recipe_state

FILE = "fmtsim_state.pt"
"""The file beside those of a trainer's checkpoint."""
_KEYS = {"recipe_state", "first", "losses", "observation"}


class RunRecord:
    """Follow the optimizer steps of a run; steps are counted from 1, as losses in reports are.

    Args:
        every: The first of so many optimizer steps is observed, all calls of the model in it together.
        report: Where the report goes; None writes none.

    Attributes:
        losses: Of each step since ``first``, without those before the record began.
        seen: Statistics of the observed steps.
        notes: What a reader of the report has to know first.

    Raises:
        ArgumentError: ``every`` is no number from 1, or no file can be written there.
    """

    def __init__(self, every: int, report: StrPath | None) -> None:
        if type(every) is not int or every < 1:
            raise ArgumentError(
                f"every={shown(every)} is no number of steps; pass 1 to observe all, 10 for every tenth"
            )
        if report is not None and not isinstance(report, str | Path):
            raise ArgumentError(f"report={shown(report)} is no path; pass a str or a pathlib.Path")
        self.every, self.path = every, None if report is None else Path(report)
        if self.path is not None:
            check_file("report", self.path)
        self._part: Observation | None = None
        self._clear()

    def _clear(self) -> None:
        self.leave()
        self.losses: list[float] = []
        self.first = 1
        self.notes: list[str] = []
        self.seen = Observation.of({})

    def start(self, model: nn.Module, step: int, saved: Path | None) -> None:
        """Begin a run, or go on after so many steps with what a checkpoint's file holds.

        Raises:
            ArgumentError: The model is not converted, or the file is of another recipe or model.
            DataError: The file is damaged.
        """
        if not is_converted(model):
            raise ArgumentError(
                f"FmtsimCallback found no converted layer in {type(model).__name__}; "
                'hand the trainer fmtsim.convert(model, recipe="te_current"), or another recipe'
            )
        self._clear()
        self.first = step + 1
        if saved is not None and saved.exists():
            state = _read(saved)
            load_recipe_state(model, state["recipe_state"])
            self.first, self.losses, self.seen = (
                state["first"], state["losses"], Observation.of_state(state["observation"])
            )  # fmt: skip
        if self.first > 1:
            self.notes.append(f"Steps 1 to {self.first - 1} ran without the callback: their losses are not drawn")

    def enter(self, model: nn.Module, step: int, *, look: bool) -> None:
        """Begin a step: tell a recipe's schedule, and observe the step if its turn has come."""
        self.leave()
        set_step(model, step - 1)
        if look and (step - 1) % self.every == 0:
            self._part = observe(model).__enter__()

    def leave(self) -> Observation | None:
        """Stop observing; return what was observed since ``enter``, if anything."""
        part, self._part = self._part, None
        if part is not None:
            part.__exit__(None, None, None)
        return part

    def count(self, step: int, loss: float, part: Observation | None) -> bool:
        """Add a step; say whether its loss is the first that is not finite."""
        ended = not math.isfinite(loss) and all(map(math.isfinite, self.losses))
        self.losses.append(loss)
        if part is not None and (math.isfinite(loss) or not self.seen.layers):  # where it blows up, the looks before
            self.seen.merge(part, step)
        self.seen.steps = step
        if ended:
            self.notes.append(f"The loss became {loss} at step {step}; heatmaps are of the steps before it")
        return ended

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what ``start`` reads, beside a trainer's checkpoint."""
        content = io.BytesIO()
        state = {"recipe_state": recipe_state(model), "first": self.first, "losses": self.losses}
        torch.save(state | {"observation": self.seen.state_dict()}, content)
        write_file(folder / FILE, content.getvalue())

    def write(self, model: nn.Module, title: str, configuration: Mapping[str, Any], *notes: str) -> None:
        """Write the report of what there is by now."""
        if self.path is None:
            return
        found = report(model)
        self.seen.save_report(
            self.path,
            title=title,
            curves={"loss": self.losses} if self.losses and self.first == 1 else None,
            coverage=found.coverage,
            configuration=configuration,
            notes=[*notes, *self.notes, found.summary, *found.notes],
        )


def figures(part: Observation) -> dict[str, float]:
    """Return a few numbers of a step, each of the operand that loses most by it, for a trainer's log.

    What is infinite or undefined (nothing lost, all zeros) is left out: not all loggers take it.
    """
    losses = losses_of(part.layers)
    if not losses:
        return {}
    found = {
        "fmtsim_worst_underflow_percent": worst(losses, 1, "underflow")[0].stats.underflow_percent,
        "fmtsim_worst_saturation_percent": worst(losses, 1, "saturation")[0].stats.saturation_percent,
        "fmtsim_worst_sqnr_db": worst(losses, 1, "sqnr")[0].stats.sqnr_db,
        "fmtsim_nonfinite": float(sum(loss.stats.nonfinite for loss in losses)),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _read(path: Path) -> dict[str, Any]:
    """Return the state in a file, checked as far as that it is one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or set(state) != _KEYS:
            raise ValueError("it holds something else")
        Observation.of_state(state["observation"])
    except Exception as e:  # of damaged bytes torch's reader raises anything
        why = (str(e).splitlines() or [type(e).__name__])[0]
        raise DataError(
            f"{path} cannot be read: {why}; go on from another checkpoint, or remove this file: the weights' own files "
            "have delayed scales, too, but for those of PEFT"
        ) from e
    return state
