# SPDX-License-Identifier: Apache-2.0
"""FmtsimRun for loops written with Accelerate: schedules, delayed scales, observation, logs and the report."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.integrations.run_record import RunRecord, checked_state
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import StrPath


class FmtsimRun:
    """Follow a loop written with Accelerate: ``with FmtsimRun(accelerator, model) as run:`` around it.

    In the loop ``with run.accumulate():`` takes the place of ``with accelerator.accumulate(model):``, around forward,
    ``accelerator.backward`` and ``optimizer.step``; what lies outside it, such as evaluation, is neither observed nor
    counted.

    - Before each optimizer step it tells a recipe with a schedule the step (``fmtsim.nn.set_step``).
    - It observes the first of every so many optimizer steps (``fmtsim.observe``), all batches that add their gradients
      in it together. Weights, losses and random numbers keep their bits.
    - After an observed step ``accelerator.log`` gets ``fmtsim_worst_underflow_percent``,
      ``fmtsim_worst_saturation_percent``, ``fmtsim_worst_sqnr_db``, each of the operand that loses most by it, and
      ``fmtsim_nonfinite``, the NaN and infinite elements of all, under ``run.step``. What is infinite or undefined is
      not logged. TensorBoard and W&B get histograms of exponents, too. Log your own numbers with ``step=run.step``:
      W&B drops what is logged under a number that it has left behind.
    - ``accelerator.save_state`` and ``load_state`` keep ``fmtsim.state`` of each process, steps, losses and
      statistics: the run registers itself for checkpoints.
    - The report has the loss of each step (the mean over its batches), heatmaps and coverage estimated from shapes. It
      is written at the end of the ``with``, at each checkpoint, where the ``with`` ends in an error or Ctrl-C, and at
      the first loss that is NaN or infinite; training goes on.

    Of several processes the first observes, logs and writes; losses are its own. With ``mixed_precision="fp16"``
    gradients are observed as they are, multiplied by the GradScaler's scale, which is logged as ``fmtsim_loss_scale``.

    Args:
        accelerator: The Accelerator.
        model: The model, as ``accelerator.prepare`` returned it.
        every: The first of so many optimizer steps is observed.
        report: Where the report goes; None writes none.
        title: Its heading.
        recipe: For a model that is not converted: what it is observed for, as ``fmtsim.observe`` takes it. The model
            computes as it does.
        format: Likewise a format.
        rules: Exceptions for layers, beside ``recipe`` or ``format``.
        histograms: What TensorBoard and W&B get: ``"operand"`` is a histogram of each operand over all layers,
            ``"layer"`` one of each operand of each layer, None none.

    Attributes:
        record: ``record.losses``, of each step, and ``record.seen``, the Observation; its history has optimizer steps,
            counted from 1.

    Raises:
        ArgumentError: ``accelerator`` is not an Accelerator, or follows this model already; ``every`` is not a number
            from 1; ``report`` cannot be written; recipe and format are both given; rules stand alone; or one of these
            has a schedule. At the ``with``: the model is not converted and there is no recipe, or it is and there is
            one; parts of it were converted one by one; it is observed already; or a checkpoint is of another recipe.
        FormatError: There is no such recipe; at the ``with``, no such format.
        DataError: In ``accelerator.load_state``: the checkpoint is of another object.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, *, every: int = 10, report: StrPath | None = None,
        title: str = "Where bits are lost", recipe: str | Path | Recipe | LinearConfig | None = None,
        format: str | Format | None = None, rules: Sequence[Rule] | str | Path = (), histograms: str | None = "operand",
    ) -> None:  # fmt: skip
        if not hasattr(accelerator, "register_for_checkpointing"):
            raise ArgumentError(
                f"FmtsimRun got {type(accelerator).__name__} as accelerator; pass the accelerate.Accelerator, "
                "then the model that its prepare returned"
            )
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"FmtsimRun got {type(model).__name__} as model; pass the model that accelerator.prepare returned"
            )
        self.record = RunRecord(every=every, report=report, title=title, recipe=recipe, format=format, rules=rules,
                                histograms=histograms)  # fmt: skip
        self._accelerator, self._model = accelerator, model
        self._saved: dict[str, Any] | None = None
        self._inside = False  # a batch
        if any(isinstance(other, FmtsimRun) and other._model is model for other in accelerator._custom_objects):
            raise ArgumentError("FmtsimRun follows this model already; keep the one that was made first")
        accelerator.register_for_checkpointing(self)

    @property
    def step(self) -> int:
        """Optimizer steps done, those before a checkpoint among them."""
        return self.record.step

    def __enter__(self) -> "FmtsimRun":
        if self.record.running:
            raise ArgumentError("FmtsimRun has begun already; end the with that it is in first")
        self._begin()
        return self

    def _begin(self) -> None:
        accelerator, state = self._accelerator, self._saved
        settings = ("gradient_accumulation_steps", "mixed_precision", "num_processes")
        self.record.begin(
            accelerator.unwrap_model(self._model), 0 if state is None else state["observation"]["steps"], state,
            first=accelerator.is_main_process, configuration={name: getattr(accelerator, name) for name in settings},
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.record.finish()
        else:
            self.record.interrupted(error)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Do what ``accelerator.accumulate(model)`` does, and follow the batch.

        Raises:
            ArgumentError: The run has not begun.
        """
        if not self.record.running:
            raise ArgumentError("run.accumulate() is for the inside of `with FmtsimRun(accelerator, model) as run:`")
        accelerator, backward = self._accelerator, self._accelerator.backward

        def noted(loss: Any, **kwargs: Any) -> None:
            self.record.add(loss)
            backward(loss, **kwargs)

        with accelerator.accumulate(self._model):
            self.record.enter(accelerator.scaler)
            accelerator.backward, self._inside = noted, True
            try:
                yield
            finally:
                accelerator.backward, self._inside = backward, False
            self.record.leave()
        if accelerator.sync_gradients:
            if logs := self.record.end():
                accelerator.log(logs, step=self.step)
            if accelerator.is_main_process:  # others have no trackers
                self.record.draw([tracker.tracker for tracker in accelerator.trackers], self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``accelerator.save_state`` saves, and write the report so far.

        Raises:
            ArgumentError: A batch has not ended, or no run has begun.
        """
        if self._inside or not (self.record.running or self.step):
            raise ArgumentError(
                "accelerator.save_state was called inside run.accumulate(), whose step is not counted yet; "
                "call it after that block"
                if self._inside
                else "accelerator.save_state was called before `with FmtsimRun(...) as run:`; call it inside"
            )
        self.record.write_so_far()
        return self.record.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``accelerator.load_state`` loaded."""
        self._saved = checked_state(state, "the checkpoint of FmtsimRun")
        if self.record.running:
            self._begin()
