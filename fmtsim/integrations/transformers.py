"""FmtsimCallback for the Trainer of Hugging Face: schedules, delayed scales, observation, logs and the report."""

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.errors import ArgumentError, FmtsimError
from fmtsim.files import StrPath
from fmtsim.integrations.run_record import FILE, RunRecord, figures

if TYPE_CHECKING:
    from torch import Tensor

    from fmtsim.analysis.observe import Observation

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError:  # FmtsimCallback says so
    TrainerCallback = object  # type: ignore[assignment, misc]


class FmtsimCallback(TrainerCallback):
    """Follow a Trainer whose model is converted: ``trainer.add_callback(FmtsimCallback(trainer, every=10))``.

    - Before each optimizer step it tells a recipe with a schedule the step (``fmtsim.set_step``).
    - It observes the first of every so many optimizer steps (``fmtsim.observe``), with gradient accumulation all
      calls of the model in it together. Evaluation is not observed. Weights, losses and random numbers keep their bits.
    - After an observed step the Trainer logs, so that TensorBoard and W&B get them: ``fmtsim_worst_underflow_percent``,
      ``fmtsim_worst_saturation_percent``, ``fmtsim_worst_sqnr_db``, each of the operand that loses most by it, and
      ``fmtsim_nonfinite``, the NaN and infinite elements of all. What is infinite or undefined is not logged.
    - Beside each checkpoint it saves ``fmtsim_state.pt``: ``fmtsim.recipe_state``, losses and statistics.
      ``train(resume_from_checkpoint=...)`` goes on from them, and refuses a model of another recipe. A checkpoint
      without that file goes on with the delayed scales that its weights have.
    - The report has the loss of each step, heatmaps, coverage estimated from shapes and the Trainer's arguments. It is
      written at the end, at each checkpoint, where ``train`` ends in an error or Ctrl-C, and at the first loss that is
      NaN or infinite, also where the Trainer's own log filters that; training goes on.

    Of several processes the first observes, logs and writes; losses are its own.

    Args:
        trainer: The Trainer; its ``train`` and ``training_step`` are wrapped.
        every: The first of so many optimizer steps is observed.
        report: Where the report goes; None writes none.
        title: Its heading.

    Attributes:
        record: ``record.losses``, of each step, and ``record.seen``, the Observation; its history has the Trainer's
            steps, counted from 1.

    Raises:
        FmtsimError: transformers is not installed.
        ArgumentError: ``trainer`` is none, ``every`` is no number from 1, or no file can be written at ``report``. In
            ``train``: the callback was not added, the model is not converted or is observed already, hyper-parameters
            are searched, or a checkpoint is of another recipe.
        DataError: In ``train``: a checkpoint's ``fmtsim_state.pt`` is damaged.
    """

    def __init__(
        self, trainer: Any, *, every: int = 10, report: StrPath | None = None, title: str = "Where bits are lost"
    ) -> None:
        if TrainerCallback is object:
            raise FmtsimError('FmtsimCallback needs transformers and accelerate; pip install "fmtsim[transformers]"')
        if not all(hasattr(trainer, name) for name in ("training_step", "callback_handler", "train")):
            raise ArgumentError(
                f"FmtsimCallback got {type(trainer).__name__} as trainer; make the transformers.Trainer first, "
                "then trainer.add_callback(FmtsimCallback(trainer))"
            )
        self.record = RunRecord(every, report)
        self._trainer, self._title = trainer, title
        self._loss: Tensor | float = 0.0
        self._part: Observation | None = None
        self._saved: Path | None = None
        self._first, self._running = True, False  # of several processes; a run has begun
        trainer.train = self._train(trainer.train)
        trainer.training_step = self._training_step(trainer.training_step)

    def _train(self, train: Any) -> Any:
        """Wrap ``Trainer.train``: know the checkpoint, and write the report if it ends in an error."""

        @functools.wraps(train)
        def run(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            trainer = self._trainer
            if self not in trainer.callback_handler.callbacks:
                raise ArgumentError("FmtsimCallback was made, but not added; call trainer.add_callback(callback)")
            folder = (
                get_last_checkpoint(trainer.args.output_dir)
                if resume_from_checkpoint is True
                else resume_from_checkpoint
            )
            self._saved, self._running = Path(folder) / FILE if folder else None, False
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            except BaseException as error:
                self._interrupted(error)
                raise

        return run

    def _training_step(self, training_step: Any) -> Any:
        """Wrap ``Trainer.training_step``, which returns what a batch adds to the loss of its optimizer step."""

        @functools.wraps(training_step)
        def run(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._loss = self._loss + loss.detach()
            return loss

        return run

    def _interrupted(self, error: BaseException) -> None:
        """Write the report of a run that ended in an error, which stays what the user sees."""
        with contextlib.suppress(FmtsimError):  # of a step in which nothing was observed
            self.record.leave()
        if self._running and self._first:
            try:
                self._write(f"Interrupted after step {self._trainer.state.global_step} by {type(error).__name__}")
            except Exception as second:
                error.add_note(f"and the report could not be written: {second}")

    def _write(self, *notes: str) -> None:
        trainer = self._trainer
        self.record.write(trainer.model, self._title, trainer.args.to_sanitized_dict(), *notes)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or go on from a checkpoint."""
        if state.is_hyper_param_search:
            raise ArgumentError("FmtsimCallback follows one run; leave it out of hyperparameter_search")
        self._first = state.is_world_process_zero
        self.record.start(self._trainer.model, state.global_step, self._saved)
        self._running = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an optimizer step, before the first of its batches."""
        self._loss = 0.0
        self.record.enter(self._trainer.model, state.global_step + 1, look=self._first)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing after the last backward pass of the step."""
        self._part = self.record.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step and log."""
        part, self._part = self._part, None
        if not self._first:
            return
        if self.record.count(state.global_step, float(self._loss), part):
            self._write()
        if part is not None and (logs := figures(part)):
            logging = control.should_log  # which a log takes away, before the Trainer logs the loss
            self._trainer.log(logs)
            control.should_log = logging

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save beside the Trainer's checkpoint, and write the report so far."""
        if self._first:
            self.record.save(
                self._trainer.model, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            )
            self._write("Training had not ended when this was written")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report."""
        self._running = False
        if self._first:
            self._write()
