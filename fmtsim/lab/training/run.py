# SPDX-License-Identifier: Apache-2.0
"""One training run: its record, all that changes while it goes on, and its steps."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.formats.tensor_file import StoredTensor, read_tensors, stored_tensor, tensor_content
from fmtsim.gemm.targets.doubts import collected_guesses
from fmtsim.lab.analysis.attribute import attribute
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.analysis.one_step import deterministic
from fmtsim.lab.training.corpus import Corpus, sample
from fmtsim.lab.training.learner import Learner, autocast
from fmtsim.lab.training.schemes import Scheme, TrainConfig
from fmtsim.lab.training.training_models import MODELS, OwnModel, build_model, without_head
from fmtsim.nn.conversion import root
from fmtsim.nn.convert import convert, set_step
from fmtsim.nn.planning import FILTERED
from fmtsim.nn.report import Report, report
from fmtsim.recipes.layer_plan import HIGH
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from fmtsim.support.files import write_folder
from fmtsim.support.progress import Progress
from fmtsim.support.records import parse_json, record_of
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
    # the parts of the scheme, and the losses of runs without the first, the first two ...; the last lacks them all and
    # is the baseline (``Scheme.simpler``)
    parts: dict[str, list[float] | None] = field(default_factory=dict)
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


def simulate(
    model: torch.nn.Module, scheme: Scheme, config: TrainConfig, generator: torch.Generator, **machine: Any
) -> None:
    """Convert a model as a scheme says; ``machine`` replaces some of the scheme's, as keywords of ``convert``."""
    how: dict[str, Any] = {"generator": generator, "filter_fn": without_head(model), "rules": scheme.rules}
    how |= {**scheme.machine, **machine}
    if scheme.recipe is None:
        convert(model, recipe=scheme.linear_config(), **how)
    else:  # what is left to training is done here
        done: dict[str, Any] = dict.fromkeys(("autocast", "loss_scale", "optimizer", "reduction"))
        recipe = dataclasses.replace(scheme.recipe, **done, levels=())
        convert(model, recipe=recipe, total_steps=config.steps, **how)
    root(model).reasons |= {n: f"{HIGH}: head" for n, why in root(model).reasons.items() if why == FILTERED}


def keys(config: TrainConfig) -> torch.Generator:
    """Return the source of stochastic rounding's keys, on the device of the model."""
    return torch.Generator(config.device).manual_seed(config.seed)


def finite(number: float) -> float | None:
    """Return a number as JSON holds it: NaN and infinities are None."""
    return number if math.isfinite(number) else None


_LAYOUT = "training checkpoint 4"
_TENSOR = "$tensor"  # stands in the JSON for a tensor, by its name


class Checkpoint:
    """Write the state of a comparison to a safetensors file after every so many steps, and take it up again.

    The file has runs that are finished and, of the one at work, weights, the optimizer's state, what delayed scaling
    and loss scaling remember, the random generators' states, losses and statistics. It appears whole or not at all.

    Args:
        path: The file; its folder is made if need be.
        settings: What decides the bits (``settings``), as JSON types; a comparison with others is refused.
        every: Steps between files; 0 writes none.

    Attributes:
        runs: Runs that are finished.
        guesses: Warnings of plans that are guesses.
        begun: Runs that are finished, and the one at work.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], every: int) -> None:
        if every < 0:
            raise ArgumentError(f"--checkpoint-every {every} is not allowed; choose 1 or more, or 0 for no checkpoints")
        self.path, self.every = path, every
        self.settings = json.loads(json.dumps(settings))
        self.runs: list[Run] = []
        self.guesses: list[str] = []
        self._pending: dict[str, Any] | None = None
        self._current: Run | None = None

    @property
    def begun(self) -> list[Run]:
        """Runs that are finished, and the one at work."""
        at_work = self._current is not None and all(self._current is not run for run in self.runs)
        return [*self.runs, *([self._current] if at_work and self._current else [])]

    def read(self) -> str:
        """Take up what the file holds; return in words how far that is.

        Raises:
            DataError: The file is missing, corrupt or no checkpoint.
            ArgumentError: It is of other settings; the message has the first one.
        """
        stored, metadata = read_tensors(self.path)
        if metadata.get("fmtsim") != _LAYOUT:
            raise DataError(f"{self.path} is not a checkpoint of this version; delete it, or choose another --out")
        try:
            tensors = {name: part.tensor() for name, part in stored.items()}
            state = _join(parse_json(metadata["state"], nan=True), tensors)
            other = next(_differences(state["settings"], self.settings), None)
            if other is None:
                runs, self.guesses, self._pending = state["runs"], state["guesses"], state["current"]
                self.runs = [Run.of_state(run) for run in runs]
                done = [f"{run.label} is finished" for run in self.runs]
                if self._pending is not None:
                    begun = self._pending["run"]
                    done.append(f"{begun['label']} goes on after step {len(begun['losses'])}")
                return ", ".join(done)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._malformed(error) from error
        raise ArgumentError(
            f"{self.path} is of another training: {other}; pass the same settings, delete it, or choose another --out"
        )

    def restore(self, parts: Parts) -> None:
        """Begin a run, where the file left it if that is in the middle of one."""
        state, self._pending = self._pending, None
        self._current = parts.run
        if state is None:
            return
        try:
            parts.learner.model.load_state_dict(state["model"])
            parts.learner.load_state_dict(state)
            parts.batches.set_state(state["batches"])
            parts.keys.set_state(state["keys"])
            run = Run.of_state(state["run"])
            for field in fields(Run):
                setattr(parts.run, field.name, getattr(run, field.name))
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
            raise self._malformed(error) from error

    def save(self, parts: Parts | None = None) -> None:
        """Write the file where it is time: the finished runs and, unless it is between two of them, the one at work.

        Raises:
            DataError: It cannot be written; the file before it is still there.
        """
        if not self.every or (parts is not None and len(parts.run.losses) % self.every):
            return
        state = {
            "settings": self.settings, "runs": [run.state_dict() for run in self.runs],
            "guesses": list(dict.fromkeys(self.guesses)), 
            "current": None if parts is None else {
                "run": parts.run.state_dict(), "model": parts.learner.model.state_dict(), **parts.learner.state_dict(),
                "batches": parts.batches.get_state(), "keys": parts.keys.get_state(),
            },
        }  # fmt: skip
        tensors: dict[str, StoredTensor] = {}
        metadata = {"fmtsim": _LAYOUT, "state": json.dumps(_split(state, "", tensors))}
        write_folder(self.path.parent, {self.path.name: tensor_content(tensors, metadata)})

    def _malformed(self, error: Exception) -> DataError:
        return DataError(
            f"{self.path}: the checkpoint does not fit ({type(error).__name__}: {error}); delete it, or choose "
            "another --out"
        )


def _split(value: Any, name: str, tensors: dict[str, StoredTensor]) -> Any:
    """Return nested dicts and lists with names in the place of tensors, which are put aside."""
    if isinstance(value, Tensor):
        tensors[name] = stored_tensor(value)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _split(item, f"{name}/{key}".lstrip("/"), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _join(item, tensors) for key, item in value.items()}
    return [_join(item, tensors) for item in value] if isinstance(value, list) else value


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} was {before!r} and is {now!r}"


VALIDATION_BATCHES = 8
COST_STEPS, COST_ROWS = 100, 8  # steps from which a run measures the cost of its operands; windows of text for it


def compare_schemes(
    config: TrainConfig, corpus: Corpus, progress: Progress, checkpoint: Checkpoint | None = None
) -> tuple[Run, Run]:
    """Train both models; equal configs give equal losses, bit for bit, on one machine with one number of threads.

    A scheme of several parts is trained again without its arithmetic, then without its optimizer (``Scheme.simpler``):
    the steps between these losses are what the gap is made of. With a checkpoint the state is written as it says, and a
    comparison whose file it has read goes on from there.
    """
    runs = [] if checkpoint is None else checkpoint.runs
    with collected_guesses() as guesses, deterministic(config.device):
        rehearse(config)
        if checkpoint is not None:
            guesses[:0] = checkpoint.guesses
            checkpoint.guesses = guesses
        simpler = config.simulated.simpler(config.baseline)
        schemes = [config.baseline, config.simulated, *list(simpler.values())[:-1]]
        for i in range(len(runs), len(schemes)):
            runs.append(train(schemes[i], config, corpus, progress, checkpoint, looks=i < 2))
            if checkpoint is not None:
                checkpoint.save()
    # an order that was given is not a guess
    runs[1].guesses = list(dict.fromkeys(guesses)) if config.simulated.plan is None else []
    runs[1].parts = dict(zip(simpler, [*(run.losses for run in runs[2:]), None], strict=False))
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
    scheme: Scheme, config: TrainConfig, corpus: Corpus, progress: Progress, checkpoint: Checkpoint | None = None, *,
    looks: bool = True,
) -> Run:  # fmt: skip
    """Train one model under a scheme; a loss that is not finite ends the run and is recorded.

    ``looks``: observe steps, and what operands cost after the last one.
    """
    parts = begin(scheme, config)
    run, learner = parts.run, parts.learner
    if scheme.simulated:
        tokens = torch.zeros(config.batch_size, config.model.context, dtype=torch.long, device=config.device)
        run.report = report(learner.model, (tokens, tokens))
    if checkpoint is not None:
        checkpoint.restore(parts)
    if run.report is not None and looks:
        progress.say(run.report.summary)
    observed = observed_steps(config.steps) if looks and scheme.simulated else set()
    progress.stage(run.label, config.steps)
    watch = lambda step: observe(learner.model) if step in observed else contextlib.nullcontext()  # noqa: E731
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
        with _disable_current_modes():  # estimates, in the host's arithmetic under a simulated GPU, too
            run.costs = costs(learner.model, config, corpus)
    return run


def costs(model: torch.nn.Module, config: TrainConfig, corpus: Corpus) -> dict[str, Any] | None:
    """Return what ``attribute`` estimates of a trained model on held-out text, None where it refuses the model."""
    rows, generator = min(COST_ROWS, config.batch_size), torch.Generator().manual_seed(config.seed + 3)
    inputs, targets = sample(corpus.validation, rows, config.model.context, generator, config.device)
    # a model that returns logits has a KL, too; one with operations of a recipe computes its own loss
    tells = not (isinstance(model, OwnModel) and model.takes_targets) and not config.simulated.unit_variance
    loss = (lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten())) if tells else None
    batch, logits = ((inputs,), lambda logits: logits) if tells else ((inputs, targets), None)
    try:
        costs = attribute(model, batch, loss, logits=logits, progress=False).to_dict()
    except FmtsimError:
        return None
    return costs | {"notes": [note for note in costs["notes"] if not note.startswith("no KL")]}


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
