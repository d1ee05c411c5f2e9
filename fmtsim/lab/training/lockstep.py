# SPDX-License-Identifier: Apache-2.0
"""Train one model twice in lockstep, and compare the bits of every loss, gradient and weight after each step.

The two sides start from the same weights and see the same batches; they differ in how products are computed. For
``fmtsim train --check native`` one side runs every product of a linear layer on the GPU's own unit, the other emulates
it; whatever else happens in a step is the same code on the same device.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fmtsim.formats.packing import tensor_bytes
from fmtsim.gemm.layers.config import linear_config
from fmtsim.gemm.products.native import why_not_native
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.gemm.targets.doubts import collected_guesses
from fmtsim.gemm.targets.target import Target, find_target
from fmtsim.lab.analysis.bisect import bisect
from fmtsim.lab.analysis.compare import Comparison, compare
from fmtsim.lab.analysis.one_step import deterministic
from fmtsim.lab.training.corpus import Corpus, sample
from fmtsim.lab.training.decoders import LanguageModel
from fmtsim.lab.training.learner import Learner, autocast
from fmtsim.lab.training.run import keys, simulate
from fmtsim.lab.training.schemes import TrainConfig
from fmtsim.lab.training.training_models import MODELS, build_model
from fmtsim.nn.convert import set_step
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import ArgumentError
from fmtsim.support.progress import Progress

HEAD_FORMAT = "bf16"  # of the output head, which FP8 training leaves in 16 bits
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Side(NamedTuple):
    """One of the two models, with what it is called."""

    label: str
    model: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first tensor of a run whose bits differ."""

    step: int  # the step, counted from 1
    kind: str  # ``"loss"``, ``"gradient"`` or ``"weight"`` (after the optimizer's step)
    tensor: str  # name of the parameter, ``"loss"`` for that
    comparison: Comparison  # all of the tensor; ``comparison.first`` has the index and both codes
    # the first operation that differs, as far as a second run forward and backward shows (``bisect``)
    product: str = ""

    def __str__(self) -> str:
        where = f"; {self.product}" if self.product else ""
        wrong, count = self.comparison.mismatches, self.comparison.count
        return (
            f"step {self.step}, {self.kind} of {self.tensor} {self.comparison.first}; {wrong} of {count} differ{where}"
        )


@dataclass(slots=True, kw_only=True)
class Lockstep:
    """Record what a run in lockstep found."""

    labels: tuple[str, str]  # what the two sides are called
    parameters: int  # numbers in the model
    steps: int = 0  # steps after which all bits agreed
    losses: list[float] = field(default_factory=list)  # of each step
    compared: int = 0  # numbers whose bits were compared
    mismatch: Mismatch | None = None  # the first difference, None where there is none
    stopped: str | None = None  # why the run ended early other than by a mismatch
    timed_out: bool = False  # that was the time limit
    # wall time of forward and backward of both sides, and of the rest
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    products: list[tuple[GemmCall, GemmSpec]] = field(default_factory=list)  # emulated calls and their plans, each once
    guesses: list[str] = field(default_factory=list)  # warnings of plans that are guesses
    digest: tuple[str, str] = ("", "")  # SHA-256 of all weights at the end, of both sides

    @property
    def equal(self) -> bool:
        """Whether no bit differed, in all steps or in those before the time limit."""
        return self.mismatch is None and (self.stopped is None or self.timed_out)


def check_native(config: TrainConfig, corpus: Corpus, progress: Progress, minutes: float | None = None) -> Lockstep:
    """Train with the GPU's own products and with emulated ones, in lockstep.

    Args:
        config: ``config.simulated`` names formats and the target; ``config.device`` has to be that GPU.
        minutes: Time after which no step begins; None takes all steps.

    Raises:
        ArgumentError: There is no target, or the device is not its GPU; it says why.
    """
    target = None if config.simulated.target is None else find_target(config.simulated.target)
    if not isinstance(target, Target):  # a unit or a datapath has no library of its own
        raise ArgumentError("--check native compares a GPU with its emulation; pass --target, for example h200")
    with deterministic(config.device):
        reason = why_not_native(target, config.device)
        if reason is not None:
            raise ArgumentError(f"--check native is not possible: {reason}; pass --device cuda on the target's GPU")
        sides = build_side("native", config, native=True), build_side("emulated", config, native=False)
        in_this_thread = torch.autograd.set_multithreading_enabled(False)  # backward too is seen
        with collected_guesses() as guesses, in_this_thread, seen_calls() as calls:
            result = run_lockstep(sides, config, corpus, progress, minutes)
    result.products, result.guesses = [(call.facts(), spec) for call, spec in calls.items()], guesses
    return result


def emulates_head(config: TrainConfig) -> bool:
    """Return True if the output head runs on the target: in this package's models, unless their scales are fixed."""
    return config.architecture in MODELS and not config.simulated.unit_variance


def build_side(label: str, config: TrainConfig, **machine: Any) -> Side:
    """Return a model from the config's seed whose layers, and head by ``emulates_head``, run on the scheme's machine.

    Args:
        machine: What to replace of the machine, as keywords of ``convert``.
    """
    model = build_model(config)
    simulate(model, config.simulated, config, keys(config), **machine)
    if emulates_head(config):
        assert isinstance(model, LanguageModel)
        head = linear_config(x=HEAD_FORMAT, w=HEAD_FORMAT, g=HEAD_FORMAT)
        model.head = head.on(**{"target": config.simulated.target} | machine)
    return Side(label, model)


def run_lockstep(
    sides: tuple[Side, Side], config: TrainConfig, corpus: Corpus, progress: Progress, minutes: float | None = None
) -> Lockstep:
    """Train two models with equal weights on the same batches, and stop at the first bit that differs.

    Compared are the loss and every gradient before, and every weight after each step of the optimizer.
    """
    end = math.inf if minutes is None else time.perf_counter() + 60 * minutes
    first, second = (side.model for side in sides)
    learners = [Learner(side.model, config.simulated, config) for side in sides]
    result = Lockstep(labels=(sides[0].label, sides[1].label), parameters=sum(p.numel() for p in first.parameters()))
    batches = torch.Generator().manual_seed(config.seed + 1)
    label = f"{sides[0].label} and {sides[1].label}"
    progress.stage(label, config.steps)
    result.mismatch = _compare_all(result, 0, "weight", _weights(first), _weights(second))
    while result.mismatch is None and result.stopped is None and result.steps < config.steps:
        if time.perf_counter() >= end:
            result.stopped, result.timed_out = f"the time limit of {minutes:g} minutes", True
            break
        step = result.steps + 1
        batch = sample(corpus.train, config.batch_size, config.model.context, batches, config.device)
        result.mismatch = _step(result, step, sides, learners, batch, config)
        if result.mismatch is None and result.stopped is None:
            result.steps = step
            progress.step(step, f"loss {result.losses[-1]:.4f}")
    result.digest = digest(_weights(first)), digest(_weights(second))
    if result.stopped or result.mismatch:
        progress.say(f"{label}: stopped, {result.stopped or result.mismatch}")
    return result


def _step(
    result: Lockstep, step: int, sides: tuple[Side, Side], learners: Sequence[Learner],
    batch: tuple[Tensor, Tensor], config: TrainConfig,
) -> Mismatch | None:  # fmt: skip
    losses = []
    for index, learner in enumerate(learners):
        began = time.perf_counter()
        set_step(learner.model, step - 1)
        losses.append(learner.backward(*batch, step))
        _wait(config.device)
        result.seconds[index] += time.perf_counter() - began
    began = time.perf_counter()
    a, b = (side.model for side in sides)
    mismatch = _compare_all(result, step, "loss", [("loss", losses[0])], [("loss", losses[1])])
    mismatch = mismatch or _compare_all(result, step, "gradient", _gradients(a), _gradients(b))
    if mismatch is not None:
        # The first operation that differs where copies of both models run forward and backward again.
        with autocast(config.simulated, config.device):
            divergence = bisect((a, batch), (b, batch))
        first = "" if divergence.comparison is None else f": {divergence.tensor} {divergence.comparison.first}"
        product = f"first in {divergence.a}{first}"
        if divergence.equal:
            product = "when forward and backward are repeated no bit differs"
        return dataclasses.replace(mismatch, product=product)
    result.losses.append(float(losses[0]))
    if not math.isfinite(result.losses[-1]):
        result.stopped = f"the loss became {result.losses[-1]} at step {step}"
        return None
    for learner in learners:
        learner.set_rate(step)
        learner.step(taken=learner.unscale())
    mismatch = _compare_all(result, step, "weight", _weights(a), _weights(b))
    _wait(config.device)
    result.seconds[2] += time.perf_counter() - began
    return mismatch


def _compare_all(
    result: Lockstep, step: int, kind: str, first: Iterable[tuple[str, Tensor]], second: Iterable[tuple[str, Tensor]]
) -> Mismatch | None:
    """Compare tensors by name in order; one answer comes from the device however many there are."""
    pairs = [(name, a, b) for (name, a), (_, b) in zip(first, second, strict=True)]
    bits = lambda x: x.detach().view(_CODES[x.element_size()])  # noqa: E731
    different = torch.stack([(bits(a) != bits(b)).any() for _, a, b in pairs]).tolist()
    result.compared += sum(a.numel() for _, a, _ in pairs)
    if not any(different):
        return None
    name, a, b = pairs[different.index(True)]
    return Mismatch(step=step, kind=kind, tensor=name, comparison=compare(a, b))


def _weights(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, p.detach()) for name, p in model.named_parameters())


def _gradients(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of the bits of tensors, in order."""
    total = hashlib.sha256()
    for _, x in tensors:
        total.update(tensor_bytes(x))
    return total.hexdigest()


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
