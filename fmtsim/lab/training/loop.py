# SPDX-License-Identifier: Apache-2.0
"""Train the same model twice, from the same weights and on the same batches: in the baseline and simulated."""

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fmtsim.lab.analysis.deterministic import deterministic
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.training.config import TrainConfig
from fmtsim.lab.training.corpus import Corpus, sample
from fmtsim.lab.training.learner import Learner, autocast
from fmtsim.lab.training.models import MODELS, OwnModel, build_model, without_head
from fmtsim.lab.training.schemes import Scheme
from fmtsim.nn.convert import convert, set_step
from fmtsim.nn.report import Report, report
from fmtsim.support.errors import PlanUnknownWarning
from fmtsim.support.progress import Progress

if TYPE_CHECKING:
    from fmtsim.lab.training.checkpoint import Checkpoint

VALIDATION_BATCHES = 8


@dataclass(slots=True, kw_only=True)
class Run:
    """Record one training run.

    Args:
        label: The scheme's description.
        losses: Training loss of each step in nats per byte, the last one not finite where the run stopped for it.
        validation: Mean loss on held-out text after the last step, NaN where the run stopped.
        seconds: Wall time of the steps, without validation; those that were observed count as the others do.
        stopped: Why the run ended early, None if it did not.
        stats: Statistics of every operand in the observed steps, counted from 1; None for a run that quantises nothing.
        report: What was converted.
        skipped: Steps that loss scaling did not take, because a gradient was not finite.
        nonfinite: Steps with gradients that were not finite, taken or not.
        loss_scale: What the loss was multiplied with in the end.
        optimizer: Optimizer and state scheme.
        state_bytes: Bytes of weights and of the optimizer's states a parameter.
        ranks: Simulated ranks.
        reduction: How gradients are reduced over them, empty with a single one.
        gathered: Format in which the level of a recipe gathers weights that ranks share out, else empty.
        guesses: Products whose accumulation order on the target is a guess, as its warnings say.
    """

    label: str
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    seconds: float = 0.0
    stopped: str | None = None
    stats: Observation | None = None
    report: Report | None = None
    skipped: int = 0
    nonfinite: int = 0
    loss_scale: float = 1.0
    optimizer: str = ""
    state_bytes: float = 0.0
    ranks: int = 1
    reduction: str = ""
    gathered: str = ""
    guesses: list[str] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps, NaN where the run stopped."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return math.nan if self.stopped or not tail else sum(tail) / len(tail)


class Parts(NamedTuple):
    """All that changes while a run goes on: its record, what learns, and where batches and keys come from."""

    run: Run
    learner: Learner
    batches: torch.Generator
    keys: torch.Generator


def compare_schemes(
    config: TrainConfig, corpus: Corpus, progress: Progress, checkpoint: "Checkpoint | None" = None
) -> tuple[Run, Run]:
    """Train both models; equal configs give equal losses, bit for bit, on one machine with one number of threads.

    With a checkpoint the state is written as it says, and a comparison whose file it has read goes on from there.
    """
    runs = [] if checkpoint is None else checkpoint.runs
    with collected_guesses() as guesses, deterministic(config.device):
        rehearse(config)
        if checkpoint is not None:
            guesses[:0] = checkpoint.guesses
            checkpoint.guesses = guesses
        for scheme in (config.baseline, config.simulated)[len(runs) :]:
            runs.append(train(scheme, config, corpus, progress, checkpoint))
            if checkpoint is not None:
                checkpoint.save()
    # an order that was given is not a guess
    runs[1].guesses = list(dict.fromkeys(guesses)) if config.simulated.plan is None else []
    return runs[0], runs[1]


def rehearse(config: TrainConfig) -> None:
    """Let a wrong option fail before minutes of baseline; where a target or unit multiplies, by a step of one layer.

    Formats and sizes that the target does not take show there, and kernels are compiled outside the measured time.
    """
    scheme = config.simulated
    if scheme.recipe is None:
        scheme.linear_config()
        if not scheme.emulated and config.architecture in MODELS:
            return
    # Rules of a recipe are about all layers; a target does the same in each of them.
    model = build_model(config, layers=None if scheme.recipe is not None else 1)
    simulate(model, scheme, config, keys(config))
    inputs = torch.zeros(config.batch_size, config.model.context, dtype=torch.int64, device=config.device)
    Learner(model, scheme, config).backward(inputs, inputs, 0)


def simulate(
    model: torch.nn.Module, scheme: Scheme, config: TrainConfig, generator: torch.Generator, **machine: Any
) -> None:
    """Convert a model as a scheme says; ``machine`` replaces some of the scheme's, as keywords of ``convert``."""
    how: dict[str, Any] = {"generator": generator, "filter_fn": without_head(model), **scheme.machine, **machine}
    if scheme.recipe is None:
        convert(model, config=scheme.linear_config(), **how)
    else:  # what is left to training is done here
        done: dict[str, Any] = dict.fromkeys(("autocast", "loss_scale", "optimizer", "reduction"))
        recipe = dataclasses.replace(scheme.recipe, **done, levels=())
        convert(model, recipe=recipe, total_steps=config.steps, **how)


@contextlib.contextmanager
def collected_guesses() -> Iterator[list[str]]:
    """Collect the warnings of plans that are guesses instead of showing one for every shape."""
    guesses: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, PlanUnknownWarning):
                guesses.append(str(message))
            else:
                show(message, category, *rest, **named)

        warnings.simplefilter("always", PlanUnknownWarning)
        warnings.showwarning = collect
        yield guesses


def train(
    scheme: Scheme, config: TrainConfig, corpus: Corpus, progress: Progress, checkpoint: "Checkpoint | None" = None
) -> Run:
    """Train one model under a scheme; a loss that is not finite ends the run and is recorded."""
    parts = begin(scheme, config)
    run, learner = parts.run, parts.learner
    if scheme.simulated:
        tokens = torch.zeros(config.batch_size, config.model.context, dtype=torch.long, device=config.device)
        run.report = report(learner.model, (tokens, tokens))
    if checkpoint is not None:
        checkpoint.restore(parts)
    if run.report is not None:
        progress.say(run.report.summary)
    looks = observed_steps(config.steps) if scheme.simulated else set()
    progress.stage(run.label, config.steps)
    for step in range(len(run.losses) + 1, config.steps + 1):
        take_step(step, parts, scheme, config, corpus, look=step in looks)
        if run.stopped is not None:
            break
        progress.step(step, f"loss {run.losses[-1]:.4f}")
        if checkpoint is not None:
            checkpoint.save(parts)
    scaler = learner.scaler
    run.skipped, run.nonfinite, run.loss_scale = scaler.skipped, scaler.nonfinite, scaler.scale
    run.state_bytes = learner.state_bytes()
    if run.stopped is None:
        with autocast(scheme, config.device):
            run.validation = validate(learner.model, config, corpus)
        if not math.isfinite(run.validation):
            run.stopped = f"the loss became {run.validation} after the last step"
    if run.stopped:
        progress.say(f"{run.label}: stopped, {run.stopped}")
    return run


def begin(scheme: Scheme, config: TrainConfig) -> Parts:
    """Return a run before its first step."""
    run, generator = Run(label=scheme.label), keys(config)
    model = build_model(config)
    if scheme.simulated:
        simulate(model, scheme, config, generator)
    learner = Learner(model, scheme, config)
    run.optimizer, run.gathered = learner.optimizer, scheme.gathered
    run.ranks, run.reduction = learner.ranks, learner.reduced
    return Parts(run, learner, torch.Generator().manual_seed(config.seed + 1), generator)


def take_step(
    step: int, parts: Parts, scheme: Scheme, config: TrainConfig, corpus: Corpus, *, look: bool = False
) -> None:
    """Take a step, counted from 1; ``look`` counts what formats lose in it."""
    run, learner = parts.run, parts.learner
    learner.set_rate(step)
    if scheme.recipe is not None:
        set_step(learner.model, step - 1)
    batch = sample(corpus.train, config.batch_size, config.model.context, parts.batches, config.device)
    began = time.perf_counter()
    with observe(learner.model) if look else contextlib.nullcontext() as seen:
        loss = float(learner.backward(*batch, step))
    if seen is not None and (math.isfinite(loss) or run.stats is None):  # where it blows up, the looks before that
        run.stats = run.stats or Observation()
        run.stats.merge(seen, step)
    if run.stats is not None:
        run.stats.steps = step
    taken = learner.unscale()
    run.losses.append(loss)
    if not math.isfinite(loss):
        run.stopped = f"the loss became {loss} at step {step}"
        return
    learner.step(taken=taken)
    run.seconds += run.seconds / max(1, step - 1) if look else time.perf_counter() - began


def validate(model: torch.nn.Module, config: TrainConfig, corpus: Corpus) -> float:
    """Return the mean loss over batches of held-out text that depend on the seed alone."""
    generator = torch.Generator().manual_seed(config.seed + 2)
    if isinstance(model, OwnModel):
        model.eval()  # the package's own have no dropout
    with torch.no_grad():
        losses = [
            float(model(*sample(corpus.validation, config.batch_size, config.model.context, generator, config.device)))
            for _ in range(VALIDATION_BATCHES)
        ]
    return sum(losses) / len(losses)


def keys(config: TrainConfig) -> torch.Generator:
    """Return the source of stochastic rounding's keys, on the device of the model."""
    return torch.Generator(config.device).manual_seed(config.seed)


def observed_steps(steps: int) -> set[int]:
    """Return the steps whose operands are counted: the first and each twentieth; of few steps four, of many 60.

    Such a step takes about three times as long as another, so that counting adds a tenth.
    """
    looks = min(60, max(4, steps // 20))
    return {1} | {max(1, steps * look // looks) for look in range(1, looks + 1)}
