# SPDX-License-Identifier: Apache-2.0
"""Train the same model twice, from the same weights and on the same batches: in the baseline and simulated."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from fmtsim.gemm.targets.doubts import collected_guesses
from fmtsim.lab.analysis.attribute import attribute
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.analysis.one_step import deterministic
from fmtsim.lab.training.checkpoint import Checkpoint
from fmtsim.lab.training.corpus import Corpus, sample
from fmtsim.lab.training.learner import Learner, autocast
from fmtsim.lab.training.models import MODELS, OwnModel, build_model
from fmtsim.lab.training.run import Run, begin, keys, simulate, training_steps
from fmtsim.lab.training.schemes import Scheme, TrainConfig
from fmtsim.nn.report import report
from fmtsim.support.errors import FmtsimError
from fmtsim.support.progress import Progress

VALIDATION_BATCHES = 8
COST_STEPS, COST_ROWS = 100, 8  # steps from which a run measures the cost of its operands; windows of text for it


def compare_schemes(
    config: TrainConfig, corpus: Corpus, progress: Progress, checkpoint: Checkpoint | None = None
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


def train(
    scheme: Scheme, config: TrainConfig, corpus: Corpus, progress: Progress, checkpoint: Checkpoint | None = None
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
    beneath_modes = torch._C._len_torch_dispatch_stack() > 0  # as simulate is one: layers then show no operands
    looks = observed_steps(config.steps) if scheme.simulated and not beneath_modes else set()
    progress.stage(run.label, config.steps)
    watch = lambda step: observe(learner.model) if step in looks else contextlib.nullcontext()  # noqa: E731
    for step, seen in training_steps(parts, scheme, config, corpus, watch):
        if seen is not None and (run.stopped is None or run.stats is None):  # where it blows up, the looks before that
            run.stats = run.stats or Observation()
            run.stats.merge(seen, step)
        if run.stats is not None:
            run.stats.steps = step
        if run.stopped is None:
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
    elif run.stats is not None and config.steps >= COST_STEPS:
        run.costs = costs(learner.model, config, corpus)
    return run


def costs(model: torch.nn.Module, config: TrainConfig, corpus: Corpus) -> dict[str, Any] | None:
    """Return what ``attribute`` estimates of a trained model on held-out text, None where it refuses the model."""
    rows, generator = min(COST_ROWS, config.batch_size), torch.Generator().manual_seed(config.seed + 3)
    batch = sample(corpus.validation, rows, config.model.context, generator, config.device)
    try:
        return attribute(model, batch, progress=False).to_dict()
    except FmtsimError:
        return None


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


def observed_steps(steps: int) -> set[int]:
    """Return the steps whose operands are counted: the first and each twentieth; of few steps four, of many 60.

    Such a step takes about three times as long as another, so that counting adds a tenth.
    """
    looks = min(60, max(4, steps // 20))
    return {1} | {max(1, steps * look // looks) for look in range(1, looks + 1)}


@contextlib.contextmanager
def bounded_threads(count: int | None) -> Iterator[None]:
    """Bound torch's threads, which the engine follows, for a while; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
