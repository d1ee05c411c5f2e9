# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face: FmtsimCallback follows a Trainer, KVCache quantises what ``generate`` caches."""

import functools
import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.integrations.run_record import FILE, RunRecord, read_state
from fmtsim.ptq import QuantisedCache
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.files import StrPath

try:
    from transformers import DynamicCache, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError:  # the classes say so
    DynamicCache = TrainerCallback = object  # type: ignore[assignment, misc]


class KVCache(DynamicCache):
    """Cache keys and values as a format has them: ``model.generate(ids, past_key_values=KVCache("int8_channel"))``.

    Each token is quantised once, when it comes, by ``fmtsim.ptq.QuantisedCache``; attention reads the rounded keys and
    values, those of the prompt and of the current token, too. They are held as numbers in the model's dtype: this
    simulates a quantised cache, and saves no memory. Cropping, beams and sliding windows are those of DynamicCache.

    Args:
        key, value: As in QuantisedCache: ``"e4m3"`` (FP8), ``"e4m3_channel"``, ``"int8_channel"``, ``"int4_channel"``
            (a scale a token and head), ``"nvfp4"``, ``"mxfp8"``; or vLLM's ``"fp8_per_token_head"``,
            ``"int8_per_token_head"``, ``"turboquant_k8v4"``, ``"turboquant_4bit_nc"``, ``"turboquant_k3v4_nc"``,
            ``"turboquant_3bit_nc"``.
        config: The model's, for layers with a sliding window; None where it has none.
        key_scale, value_scale: Static scales: one number, one a layer, or a list or tensor [layers, heads of keys].
        skip_layers: Layers whose cache is not quantised, such as the first and last two, which vLLM keeps from
            TurboQuant.

    Raises:
        FmtsimError: transformers is not installed.
        ArgumentError: A format or scale that QuantisedCache does not take, or, in use, fewer scales than layers, or
            heads that do not fit scales or blocks.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, pad_token_id=0, **sizes))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model.generate(ids, past_key_values=KVCache("nvfp4"), max_new_tokens=4, min_new_tokens=4).shape
    torch.Size([1, 7])
    """

    def __init__(
        self, key: str | Format, value: str | Format | None = None, *, config: Any = None,
        key_scale: float | Sequence[Any] | Tensor = 1.0, value_scale: float | Sequence[Any] | Tensor = 1.0,
        skip_layers: Collection[int] = (),
    ) -> None:  # fmt: skip
        if DynamicCache is object:
            raise FmtsimError('KVCache needs transformers; pip install "fmtsim[transformers]"')
        super().__init__(config=config)
        scales = [[s] if isinstance(s, int | float) else list(s) for s in (key_scale, value_scale)]
        count = max(map(len, scales))
        columns = [s * count if len(s) == 1 else s for s in scales]
        if not count or len(columns[0]) != len(columns[1]):
            raise ArgumentError(
                f"{len(scales[0])} scales of keys and {len(scales[1])} of values; pass one each a layer"
            )
        self._one_a_layer, self._skipped = count > 1, frozenset(skip_layers)
        self._rounding = [QuantisedCache(key, value, key_scale=k, value_scale=v) for k, v in zip(*columns, strict=True)]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Quantise tokens, add them to a layer, and return all of its keys and values."""
        if self._one_a_layer and layer_idx >= len(self._rounding):
            raise ArgumentError(f"layer {layer_idx} has no scale among {len(self._rounding)}; pass one a layer")
        if layer_idx not in self._skipped:
            rounding = self._rounding[layer_idx if self._one_a_layer else 0]
            key_states, value_states = rounding.rounded(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _is_trainer(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("training_step", "callback_handler", "train"))


class FmtsimCallback(TrainerCallback):
    """Follow a Trainer of Hugging Face: ``Trainer(..., callbacks=[FmtsimCallback(every=10)])``.

    - Before each optimizer step it tells a recipe with a schedule the step (``fmtsim.nn.set_step``).
    - It observes the first of every so many optimizer steps (``fmtsim.observe``), with gradient accumulation all
      calls of the model in it together. Evaluation is not observed. Weights, losses and random numbers keep their bits.
    - After an observed step the Trainer logs, to all that ``report_to`` names: ``fmtsim_worst_underflow_percent``,
      ``fmtsim_worst_saturation_percent``, ``fmtsim_worst_sqnr_db``, each of the operand that loses most by it, and
      ``fmtsim_nonfinite``, the NaN and infinite elements of all. What is infinite or undefined is not logged.
      ``fmtsim_worst_underflow``, ``_saturation`` and ``_sqnr`` name layer and operand of each.
      TensorBoard and W&B get histograms of exponents, too.
    - Beside each checkpoint it saves ``fmtsim_state.pt``: ``fmtsim.state`` of each process, losses and
      statistics. ``train(resume_from_checkpoint=...)`` goes on from them, and refuses a model of another recipe. A
      checkpoint without that file goes on with the delayed scales that its weights have.
    - The report has the loss of each step, heatmaps, coverage estimated from shapes and the Trainer's arguments. It is
      written at the end, at each checkpoint, where ``train`` ends in an error or Ctrl-C, and at the first loss that is
      NaN or infinite, also where the Trainer's own log filters that; training goes on.

    Of several processes the first observes, logs and writes; losses are its own. In float16 gradients are observed as
    they are, multiplied by the GradScaler's scale, which is logged as ``fmtsim_loss_scale``.

    Args:
        trainer: The Trainer; its ``train`` and ``training_step`` are wrapped. None for a callback that is handed to
            the Trainer as ``callbacks=``; one that is added later needs it: ``add_callback(FmtsimCallback(trainer))``.
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
        record: ``record.losses``, of each step, and ``record.seen``, the Observation; its history has the Trainer's
            steps, counted from 1.

    Raises:
        FmtsimError: transformers is not installed.
        ArgumentError: ``trainer`` is none, ``every`` is not a number from 1, no file can be written at ``report``,
            recipe and format are both given, rules stand alone, or one of these has a schedule. In ``train``: the
            callback was not added, or to another Trainer; the model is not converted and there is no recipe, or it is
            and there is one; it is observed already; hyper-parameters are searched; or a checkpoint is of another
            recipe.
        FormatError: There is no such recipe; in ``train``, no such format.
        DataError: In ``train``: a checkpoint's ``fmtsim_state.pt`` is damaged.
    """

    def __init__(
        self, trainer: Any = None, *, every: int = 10, report: StrPath | None = None,
        title: str = "Where bits are lost", recipe: str | Path | Recipe | LinearConfig | None = None,
        format: str | Format | None = None, rules: Sequence[Rule] | str | Path = (), histograms: str | None = "operand",
    ) -> None:  # fmt: skip
        if TrainerCallback is object:
            raise FmtsimError('FmtsimCallback needs transformers and accelerate; pip install "fmtsim[transformers]"')
        if trainer is not None and not _is_trainer(trainer):
            raise ArgumentError(
                f"FmtsimCallback got {type(trainer).__name__} as trainer; pass callbacks=[FmtsimCallback()] to the "
                "transformers.Trainer, or make that first, then trainer.add_callback(FmtsimCallback(trainer))"
            )
        self.record = RunRecord(every=every, report=report, title=title, recipe=recipe, format=format, rules=rules,
                                histograms=histograms)  # fmt: skip
        self._trainer: Any = None
        self._saved: Path | None = None
        if trainer is not None:
            self._follow(trainer)

    def _follow(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.train = self._train(trainer.train)
        training_step = trainer.training_step  # returns what a batch adds to the loss of its optimizer step

        @functools.wraps(training_step)
        def run(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self.record.add(loss)
            return loss

        trainer.training_step = run

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the Trainer that this was handed to, which no argument of an event names: its constructor calls."""
        frame = None if self._trainer is not None else inspect.currentframe()
        while frame is not None:
            caller: Any = frame.f_locals.get("self")
            if _is_trainer(caller) and caller.state is state:
                self._follow(caller)
                return
            frame = frame.f_back

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
            self._saved, self.record.running = Path(folder) / FILE if folder else None, False
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            except BaseException as error:
                self.record.interrupted(error)
                raise

        return run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or go on from a checkpoint."""
        trainer = self._trainer
        if trainer is None:
            raise ArgumentError(
                "FmtsimCallback was added to a Trainer that it does not know; pass callbacks=[FmtsimCallback()] to the "
                "Trainer, or call trainer.add_callback(FmtsimCallback(trainer))"
            )
        if state is not trainer.state:
            raise ArgumentError(
                "FmtsimCallback was made for another Trainer; make one for each, FmtsimCallback(trainer)"
            )
        if state.is_hyper_param_search:
            raise ArgumentError("FmtsimCallback follows one run; leave it out of hyperparameter_search")
        self.record.begin(
            trainer.model, state.global_step, read_state(self._saved) if self._saved else None,
            first=state.is_world_process_zero, configuration=trainer.args.to_sanitized_dict(),
        )  # fmt: skip

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an optimizer step, before the first of its batches."""
        self.record.enter(self._trainer.accelerator.scaler)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing after the last backward pass of the step."""
        self.record.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step and log."""
        if logs := self.record.end(mean=False):  # of a step's batches each has its share of the loss
            logging = control.should_log  # which a log takes away, before the Trainer logs the loss
            self._trainer.log(logs | self.record.places())
            control.should_log = logging
        callbacks = self._trainer.callback_handler.callbacks
        trackers = [getattr(callback, name, None) for callback in callbacks for name in ("tb_writer", "_wandb")]
        self.record.draw(trackers, state.global_step, "train/global_step")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save beside the Trainer's checkpoint, and write the report so far."""
        self.record.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report."""
        self.record.finish()
