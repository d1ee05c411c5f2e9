# SPDX-License-Identifier: Apache-2.0
"""One training run: its record, all that changes while it goes on, and its steps."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.training.corpus import Corpus, sample
from fmtsim.lab.training.learner import Learner
from fmtsim.lab.training.models import build_model, without_head
from fmtsim.lab.training.schemes import Scheme, TrainConfig
from fmtsim.nn.convert import REASONS, convert, set_step
from fmtsim.nn.planning import FILTERED
from fmtsim.nn.report import Report
from fmtsim.recipes.plan import HIGH
from fmtsim.support.records import record_of
from fmtsim.support.table import jsonable


@dataclass(slots=True, kw_only=True)
class Run:
    """Record one training run."""

    label: str  # the scheme's description
    # training loss of each step in nats per byte, the last one not finite where the run stopped for it
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan  # mean loss on held-out text after the last step, NaN where the run stopped
    seconds: float = 0.0  # wall time of the steps, without validation; those that were observed count as the others do
    stopped: str | None = None  # why the run ended early, None if it did not
    # statistics of every operand in the observed steps, counted from 1; None for a run that quantises nothing
    stats: Observation | None = None
    report: Report | None = None  # what was converted
    skipped: int = 0  # steps that loss scaling did not take, because a gradient was not finite
    nonfinite: int = 0  # steps with gradients that were not finite, taken or not
    loss_scale: float = 1.0  # what the loss was multiplied with in the end
    optimizer: str = ""  # optimizer and state scheme
    state_bytes: float = 0.0  # bytes of weights and of the optimizer's states a parameter
    ranks: int = 1  # simulated ranks
    reduction: str = ""  # how gradients are reduced over them, empty with a single one
    parameters: int = 0  # numbers in the model's Parameters, those of a shared one once
    costs: dict[str, Any] | None = None  # what operands cost in loss after the last step, as ``Attribution.to_dict``
    gathered: str = ""  # format in which the level of a recipe gathers weights that ranks share out, else empty
    # products whose accumulation order on the target is a guess, as its warnings say
    guesses: list[str] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps, NaN where the run stopped."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return math.nan if self.stopped or not tail else sum(tail) / len(tail)

    def state_dict(self) -> dict[str, Any]:
        """Return the run as JSON types and tensors."""
        state = {field.name: getattr(self, field.name) for field in fields(Run)}
        return state | {
            "stats": None if self.stats is None else self.stats.state_dict(),
            "report": None if self.report is None else asdict(self.report),
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Run":
        """Return the run that ``state_dict`` described."""
        stats, report = state["stats"], state["report"]
        stats = None if stats is None else Observation.of_state(stats)
        report = None if report is None else record_of(Report, jsonable(report), "report")
        return cls(**{**state, "stats": stats, "report": report})


class Parts(NamedTuple):
    """All that changes while a run goes on: its record, what learns, and where batches and keys come from."""

    run: Run
    learner: Learner
    batches: torch.Generator
    keys: torch.Generator


def begin(scheme: Scheme, config: TrainConfig) -> Parts:
    """Return a run before its first step."""
    run, generator = Run(label=scheme.label), keys(config)
    model = build_model(config)
    if scheme.simulated:
        simulate(model, scheme, config, generator)
    learner = Learner(model, scheme, config)
    run.parameters = sum(p.numel() for p in model.parameters())
    run.optimizer, run.gathered = learner.optimizer, scheme.gathered
    run.ranks, run.reduction = learner.ranks, learner.reduced
    return Parts(run, learner, torch.Generator().manual_seed(config.seed + 1), generator)


def training_steps(
    parts: Parts, scheme: Scheme, config: TrainConfig, corpus: Corpus,
    watch: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext(),
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Take the steps of a run that are left; a loss that is not finite ends the run and is recorded.

    Args:
        watch: ``watch(step)`` returns the context in which forward and backward of a step run.

    Yields:
        The step, counted from 1, and what its context gave (None where nothing watches).
    """
    run, learner = parts.run, parts.learner
    for step in range(len(run.losses) + 1, config.steps + 1):
        learner.set_rate(step)
        if scheme.recipe is not None:
            set_step(learner.model, step - 1)
        batch = sample(corpus.train, config.batch_size, config.model.context, parts.batches, config.device)
        began = time.perf_counter()
        with watch(step) as seen:
            loss = float(learner.backward(*batch, step))
        taken = learner.unscale()
        run.losses.append(loss)
        if math.isfinite(loss):
            learner.step(taken=taken)
            # A watched step counts as the others do.
            watched = run.seconds / max(1, step - 1)
            run.seconds += time.perf_counter() - began if seen is None else watched
        else:
            run.stopped = f"the loss became {loss} at step {step}"
        yield step, seen
        if run.stopped is not None:
            return


def descend(
    steps: Iterable[int], loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer | Callable[[int], None],
    prepare: Callable[[int], None] = lambda step: None,
) -> Iterator[tuple[int, float]]:  # fmt: skip
    """Take a training step for each number, and yield it with its loss; a loss that is not finite ends the training.

    Args:
        steps: Numbers of the steps.
        loss_of: The loss of a step.
        optimizer: Steps after the backward pass; or a function of the step that does, and clears the gradients.
        prepare: Runs before the optimizer, to set its rate or to clip gradients.
    """
    for step in steps:
        loss = loss_of(step)
        number = loss.item()
        if not math.isfinite(number):
            yield step, number
            return
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        prepare(step)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer(step)
        yield step, number


def simulate(
    model: torch.nn.Module, scheme: Scheme, config: TrainConfig, generator: torch.Generator, **machine: Any
) -> None:
    """Convert a model as a scheme says; ``machine`` replaces some of the scheme's, as keywords of ``convert``."""
    how: dict[str, Any] = {"generator": generator, "filter_fn": without_head(model), **scheme.machine, **machine}
    if scheme.recipe is None:
        convert(model, recipe=scheme.linear_config(), **how)
    else:  # what is left to training is done here
        done: dict[str, Any] = dict.fromkeys(("autocast", "loss_scale", "optimizer", "reduction"))
        recipe = dataclasses.replace(scheme.recipe, **done, levels=())
        convert(model, recipe=recipe, total_steps=config.steps, **how)
    reasons = model.__dict__[REASONS]  # nobody passed filter_fn=
    reasons |= {name: f"{HIGH}: head" for name, why in reasons.items() if why == FILTERED}


def keys(config: TrainConfig) -> torch.Generator:
    """Return the source of stochastic rounding's keys, on the device of the model."""
    return torch.Generator(config.device).manual_seed(config.seed)


def finite(number: float) -> float | None:
    """Return a number as JSON holds it: NaN and infinities are None."""
    return number if math.isfinite(number) else None
