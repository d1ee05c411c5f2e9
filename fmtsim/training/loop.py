"""Train the same model twice, from the same weights and on the same batches: in the baseline and simulated."""

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fmtsim.analysis.deterministic import deterministic
from fmtsim.analysis.observe import Observation, observe
from fmtsim.errors import ArgumentError, PlanUnknownWarning
from fmtsim.nn.convert import convert, set_step
from fmtsim.nn.report import Report, report
from fmtsim.progress import Progress
from fmtsim.training.corpus import Corpus, sample
from fmtsim.training.gpt import GPT, GPTConfig, check_size
from fmtsim.training.loss_scale import LossScaler
from fmtsim.training.schemes import Scheme

if TYPE_CHECKING:
    from fmtsim.training.checkpoint import Checkpoint

VALIDATION_BATCHES = 8
BETAS, WEIGHT_DECAY, CLIP, WARMUP_SHARE, FINAL_SHARE = (0.9, 0.95), 0.1, 1.0, 0.1, 0.1
FEWEST_WARMUP_STEPS = 20  # after fewer, AdamW overshoots at the default peak in some seeds, in float32 as well


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Say everything about a comparison but the text.

    Args:
        simulated: The scheme under test.
        baseline: What it is compared with.
        model: Sizes of the GPT.
        steps: Optimizer steps of each run.
        batch_size: Windows a step.
        lr: Peak learning rate of AdamW; it warms up over a tenth of the steps (at least 20, or half of
            a shorter run) and decays to a tenth, as a cosine.
        seed: Of weights, batches and stochastic rounding.
        device: Where models and batches are.
    """

    simulated: Scheme
    baseline: Scheme
    model: GPTConfig
    steps: int
    batch_size: int
    lr: float
    seed: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            check_size(name, getattr(self, name))
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ArgumentError(f"--lr {self.lr} is not allowed; choose a number above 0, such as 2e-3")
        if not 0 <= self.seed < 1 << 63:
            raise ArgumentError(f"--seed {self.seed} is not allowed; choose 0 to 2**63 - 1")


@dataclass(slots=True, kw_only=True)
class Run:
    """Record one training run.

    Args:
        label: The scheme's description.
        losses: Training loss of each step in nats per byte, the last one not finite where the run stopped for it.
        validation: Mean loss on held-out text after the last step, NaN where the run stopped.
        seconds: Wall time of the steps, without validation and statistics.
        stopped: Why the run ended early, None if it did not.
        stats: Statistics of every operand in the step ``observed``; None for a run that quantises nothing.
        observed: The step, counted from 1.
        report: What was converted.
        skipped: Steps that loss scaling did not take, because a gradient was not finite.
        nonfinite: Steps with gradients that were not finite, taken or not.
        loss_scale: What the loss was multiplied with in the end.
        guesses: Products whose accumulation order on the target is a guess, as its warnings say.
    """

    label: str
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    seconds: float = 0.0
    stopped: str | None = None
    stats: Observation | None = None
    observed: int = 0
    report: Report | None = None
    skipped: int = 0
    nonfinite: int = 0
    loss_scale: float = 1.0
    guesses: list[str] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps, NaN where the run stopped."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return math.nan if self.stopped or not tail else sum(tail) / len(tail)


class Parts(NamedTuple):
    """All that changes while a run goes on: its record, model and optimizer, and where batches and keys come from."""

    run: Run
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
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
    # an order that was given is no guess
    runs[1].guesses = list(dict.fromkeys(guesses)) if config.simulated.plan is None else []
    return runs[0], runs[1]


def rehearse(config: TrainConfig) -> None:
    """Let a wrong option fail before minutes of baseline; where a target or unit multiplies, by a step of one layer.

    Formats and sizes that the target does not take show there, and kernels are compiled outside the measured time.
    """
    scheme = config.simulated
    if scheme.recipe is None:
        scheme.linear_config()
        if not scheme.emulated:
            return
    # Rules of a recipe are about all layers; a target does the same in each of them.
    sizes = config.model if scheme.recipe is not None else replace(config.model, layers=1)
    model = GPT(sizes, config.seed).to(config.device)
    simulate(model, scheme, config, keys(config))
    inputs = torch.zeros(config.batch_size, config.model.context, dtype=torch.int64, device=config.device)
    backward(model, inputs, inputs, scheme, LossScaler(scheme.loss_scale))


def simulate(model: GPT, scheme: Scheme, config: TrainConfig, generator: torch.Generator, **machine: Any) -> None:
    """Convert a model as a scheme says; ``machine`` replaces some of the scheme's, as keywords of ``convert``."""
    how: dict[str, Any] = {"generator": generator, "filter_fn": GPT.without_head, **scheme.machine, **machine}
    if scheme.recipe is None:
        convert(model, config=scheme.linear_config(), **how)
    else:
        convert(model, recipe=scheme.recipe, total_steps=config.steps, **how)


def autocast(scheme: Scheme, device: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which everything but products runs in the dtype that a scheme names."""
    if scheme.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, scheme.autocast))


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
    run, model, scaler = parts.run, parts.model, parts.scaler
    if checkpoint is not None:
        checkpoint.restore(parts)
    if run.report is not None:
        progress.say(run.report.summary)
    looks = observed_steps(config.steps) if scheme.simulated else set()
    progress.stage(run.label, config.steps)
    for step in range(len(run.losses) + 1, config.steps + 1):
        _step(step, parts, scheme, config, corpus, look=step in looks)
        if run.stopped is not None:
            break
        progress.step(step, f"loss {run.losses[-1]:.4f}")
        if checkpoint is not None:
            checkpoint.save(parts)
    run.skipped, run.nonfinite, run.loss_scale = scaler.skipped, scaler.nonfinite, scaler.scale
    if run.stopped is None:
        with autocast(scheme, config.device):
            run.validation = validate(model, config, corpus)
        if not math.isfinite(run.validation):
            run.stopped = f"the loss became {run.validation} after the last step"
    if run.stopped:
        progress.say(f"{run.label}: stopped, {run.stopped}")
    return run


def begin(scheme: Scheme, config: TrainConfig) -> Parts:
    """Return a run before its first step."""
    run, generator = Run(label=scheme.label), keys(config)
    model = GPT(config.model, config.seed).to(config.device)
    if scheme.simulated:
        simulate(model, scheme, config, generator)
        tokens = torch.zeros(config.batch_size, config.model.context, dtype=torch.long, device=config.device)
        run.report = report(model, (tokens, tokens))
    batches = torch.Generator().manual_seed(config.seed + 1)
    return Parts(run, model, make_optimizer(model, config), LossScaler(scheme.loss_scale), batches, generator)


def _step(step: int, parts: Parts, scheme: Scheme, config: TrainConfig, corpus: Corpus, *, look: bool) -> None:
    """Take a step, counted from 1; ``look`` counts what formats lose in it."""
    run, model, optimizer = parts.run, parts.model, parts.optimizer
    set_rate(optimizer, config, step)
    if scheme.recipe is not None:
        set_step(model, step - 1)
    batch = sample(corpus.train, config.batch_size, config.model.context, parts.batches, config.device)
    began = time.perf_counter()
    with observe(model) if look else contextlib.nullcontext() as seen:
        loss = float(backward(model, *batch, scheme, parts.scaler))
    if seen is not None and (math.isfinite(loss) or run.stats is None):  # where it blows up, the look before that
        run.stats, run.observed = seen, step
    taken = parts.scaler.unscale(model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    run.losses.append(loss)
    if not math.isfinite(loss):
        run.stopped = f"the loss became {loss} at step {step}"
        return
    if taken:
        optimizer.step()
    optimizer.zero_grad()
    if not look:
        run.seconds += time.perf_counter() - began


def validate(model: GPT, config: TrainConfig, corpus: Corpus) -> float:
    """Return the mean loss over batches of held-out text that depend on the seed alone."""
    generator = torch.Generator().manual_seed(config.seed + 2)
    with torch.no_grad():
        losses = [
            float(model(*sample(corpus.validation, config.batch_size, config.model.context, generator, config.device)))
            for _ in range(VALIDATION_BATCHES)
        ]
    return sum(losses) / len(losses)


def keys(config: TrainConfig) -> torch.Generator:
    """Return the source of stochastic rounding's keys, on the device of the model."""
    return torch.Generator(config.device).manual_seed(config.seed)


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of every training."""
    return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def set_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """Set the learning rate of a step, counted from 1."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * schedule(step, config.steps)


def schedule(step: int, steps: int) -> float:
    """Return the share of the peak learning rate at a step: linear warm-up, then a cosine down to a tenth."""
    warm = max(1, round(WARMUP_SHARE * steps), min(FEWEST_WARMUP_STEPS, steps // 2))
    if step <= warm:
        return step / warm
    done = (step - warm) / max(1, steps - warm)
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def observed_steps(steps: int) -> set[int]:
    """Return the steps whose operands are counted: the first and each quarter; the last that happened is kept."""
    return {1} | {max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)}


def backward(
    model: GPT, inputs: torch.Tensor, targets: torch.Tensor, scheme: Scheme, scaler: LossScaler
) -> torch.Tensor:
    """Add the gradients of a batch to the model's, and return the loss, float32, 0-d; the factor is still in them."""
    with autocast(scheme, str(inputs.device)):
        loss = model(inputs, targets)
    scaler.scaled(loss).backward()  # type: ignore[no-untyped-call]  # torch's own
    return loss.detach()
