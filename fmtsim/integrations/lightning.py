# SPDX-License-Identifier: Apache-2.0
"""FmtsimCallback for the Trainer of Lightning: schedules, delayed scales, observation, logs and the report."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.integrations.run_record import RunRecord
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.files import StrPath

_KEY = "fmtsim"  # in a checkpoint


def _callback() -> Any:
    """Return Lightning's Callback under the name that is installed, ``object`` under none: FmtsimCallback says so."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    return object


Callback: Any = _callback()


class FmtsimCallback(Callback):  # type: ignore[misc]  # a class of what is installed
    """Follow a Trainer of Lightning: ``Trainer(callbacks=[FmtsimCallback(every=10, report="report.html")])``.

    ``lightning.pytorch`` and ``pytorch_lightning`` both serve. Convert the LightningModule, or the model within it, in
    its ``__init__`` or ``configure_model``, or before ``fit``.

    - Before each optimizer step it tells a recipe with a schedule the step (``fmtsim.nn.set_step``).
    - It observes the first of every so many optimizer steps (``fmtsim.observe``), all batches that add their gradients
      in it together. Validation is not observed, nor counted. Weights, losses and random numbers keep their bits.
    - After an observed step all loggers of the Trainer get ``fmtsim_worst_underflow_percent``,
      ``fmtsim_worst_saturation_percent``, ``fmtsim_worst_sqnr_db``, each of the operand that loses most by it, and
      ``fmtsim_nonfinite``, the NaN and infinite elements of all, under Lightning's number of the step, which counts
      from 0. What is infinite or undefined is not logged. TensorBoard and W&B get histograms of exponents, too.
    - Checkpoints have, as ``"fmtsim"``, ``fmtsim.state`` of each process, losses and statistics.
      ``fit(ckpt_path=...)`` goes on from them, and refuses a model of another recipe.
    - The report has the loss of each step (the mean over its batches), heatmaps, coverage estimated from shapes, the
      Trainer's settings and the module's hyper-parameters. It is written at the end, at each checkpoint, where ``fit``
      ends in an error or Ctrl-C, and at the first loss that is NaN or infinite; training goes on.

    Of several processes the first observes, logs and writes; losses are its own. With ``precision="16-mixed"``
    gradients are observed as they are, multiplied by the GradScaler's scale, which is logged as ``fmtsim_loss_scale``.
    Under manual optimization a step is a batch in which an optimizer stepped; where ``training_step`` returns no loss,
    none is drawn.

    Args:
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
        FmtsimError: Lightning is not installed.
        ArgumentError: ``every`` is not a number from 1, no file can be written at ``report``, recipe and format are
            both given, rules stand alone, or one of these has a schedule. In ``fit``: the callback follows another
            Trainer; the model is not converted and there is no recipe, or it is and there is one; parts of it were
            converted one by one; it is observed already; or a checkpoint is of another recipe.
        FormatError: There is no such recipe; in ``fit``, no such format.
        DataError: In ``fit``: what a checkpoint has as ``"fmtsim"`` is something else.
    """

    def __init__(
        self, *, every: int = 10, report: StrPath | None = None,
        title: str = "Where bits are lost", recipe: str | Path | Recipe | LinearConfig | None = None,
        format: str | Format | None = None, rules: Sequence[Rule] | str | Path = (), histograms: str | None = "operand",
    ) -> None:  # fmt: skip
        if Callback is object:
            raise FmtsimError('FmtsimCallback needs lightning; pip install "fmtsim[lightning]"')
        self.record = RunRecord(every=every, report=report, title=title, recipe=recipe, format=format, rules=rules,
                                histograms=histograms)  # fmt: skip
        self._trainer: Any = None
        self._saved: Mapping[str, Any] | None = None
        self._before = 0  # optimizer steps of the Trainer before a batch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a second Trainer, and forget a checkpoint that none has trained from."""
        if self._trainer is not None and self._trainer is not trainer:
            raise ArgumentError("FmtsimCallback follows another Trainer; make one for each, FmtsimCallback()")
        self._trainer, self._saved = trainer, None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the state to a checkpoint of a run, and write the report so far."""
        if self.record.step or self.record.running:
            checkpoint[_KEY] = self.record.state_dict()
        self.record.write_so_far()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the state until training begins."""
        self._saved = checkpoint.get(_KEY)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, or go on from a checkpoint."""
        state, self._saved = self._saved, None
        settings = ("max_steps", "max_epochs", "precision", "accumulate_grad_batches", "gradient_clip_val",
                    "world_size")  # fmt: skip
        self.record.begin(
            pl_module, trainer.global_step if state is None else state["observation"]["steps"], state,
            first=trainer.is_global_zero,
            configuration={name: getattr(trainer, name, None) for name in settings} | dict(pl_module.hparams),
        )  # fmt: skip

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin an optimizer step, or go on with one."""
        self._before = trainer.global_step
        self.record.enter(getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step if an optimizer stepped, and log."""
        self.record.leave()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # which automatic optimization has divided
            self.record.add(loss * trainer.accumulate_grad_batches if pl_module.automatic_optimization else loss)
        if trainer.global_step == self._before:
            return
        logs, step = self.record.end(), self.record.step - 1
        for logger in trainer.loggers if logs else ():
            logger.log_metrics(logs, step=step)
        if trainer.is_global_zero:
            self.record.draw([logger.experiment for logger in trainer.loggers], step, "trainer/global_step")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the report of a run that ended in an error."""
        self.record.interrupted(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the report."""
        self.record.finish()
