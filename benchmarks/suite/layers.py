# SPDX-License-Identifier: Apache-2.0
"""Training steps under recipes against plain ones of the same run, and the host's time for one converted layer."""

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite import models
from benchmarks.suite.models import Sizes
from benchmarks.suite.timing import clock_of, in_turns
from fmtsim.nn.convert import convert
from fmtsim.recipes.recipe_registry import get_recipe

RECIPES = ("te_current", "te_mxfp8", "te_nvfp4", "mxfp4", "quartet", "deepseek_v3")
MODES = ("eager", "default", "reduce-overhead")  # without torch.compile, and two of its modes
RECIPES_ON_CPU = ("te_current", "te_mxfp8", "te_nvfp4_all", "quartet")  # about two minutes
_WARM_UP = 3  # steps: reduce-overhead runs, records and replays


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name a model, how it runs, and its recipe or the other software that converts it; None converts nothing."""

    model: str
    mode: str
    recipe: str | None

    @property
    def name(self) -> str:
        """What ``--only`` matches."""
        return f"{self.model} {self.mode} {self.recipe or 'plain'}"


def sizes_of(device: str) -> dict[str, Sizes]:
    """Return what a device runs by default, by the model's name."""
    return models.GPU_SIZES if _is_gpu(device) else models.CPU_SIZES


def cases(recipes: Sequence[str] | None, device: str) -> list[Case]:
    """Return the cases of some recipes and peers; CUDA graphs, which reduce-overhead is, need a GPU.

    Args:
        recipes: Names; None is a choice of recipes, and the peers that are installed.
        device: Where they run.

    Raises:
        ArgumentError: A name is neither a recipe's nor a peer's.
    """
    gpu = _is_gpu(device)
    if recipes is None:
        recipes = [*(RECIPES if gpu else RECIPES_ON_CPU), *models.installed()]
    for name in recipes:
        if name not in models.PEERS:
            get_recipe(name, kind="training")
    ways = [("layer", "eager")]
    ways += [(model, mode) for model in ("llama", "gpt") for mode in MODES[: 3 if gpu else 2]]
    return [Case(model=model, mode=mode, recipe=name) for model, mode in ways for name in recipes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the median seconds of a case and of what is not converted, in turns, and what came before."""

    case: Case  # what ran
    seconds: float  # seconds, plain_seconds: of a step; of ``layer`` the host's for one forward and backward pass
    plain_seconds: float
    first_seconds: float  # of the first steps, which compile
    loss: float | None = None  # after the last step; None of ``layer``
    gpu_ratio: float | None = None  # of the sums of kernels' times, which no host's speed changes; None elsewhere

    @property
    def ratio(self) -> float:
        """How many times as long as the plain model the converted one takes."""
        return self.seconds / self.plain_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        case = self.case
        return {
            "case": case.name, "model": case.model, "mode": case.mode, "recipe": case.recipe, "ratio": self.ratio,
            "seconds": self.seconds, "plain_seconds": self.plain_seconds, "first_seconds": self.first_seconds,
            "loss": self.loss, "gpu_ratio": self.gpu_ratio,
        }  # fmt: skip


class Bench:
    """Measure cases on a device, one after the other; those of a model and mode share its plain model.

    On a GPU models run in bfloat16 autocast, 5 steps between two looks at the clock; on a CPU in float32, one.

    Args:
        sizes: Of each model.
        repeats: Timed rounds of each case and of the plain model between.
        machine: Arguments of ``convert`` beside the recipe: ``target`` and ``native``.
    """

    def __init__(self, device: str, sizes: dict[str, Sizes], repeats: int, **machine: Any) -> None:
        self.device, self.sizes, self.repeats, self.machine = device, sizes, repeats, machine
        self._plain: tuple[tuple[str, str], Any] | None = None

    def measure(self, case: Case) -> Result:
        """Return the result of one case.

        Raises:
            FmtsimError: A package is missing, or the recipe does not fit the model.
        """
        gc.collect()  # the case before
        step = self._made(case)
        plain = self._plain_of(case)
        start = time.perf_counter()
        step.warm_up()
        first = time.perf_counter() - start
        seconds, base = step.in_turns_with(plain, self.repeats)
        on_gpu = case.model != "layer" and _is_gpu(self.device)
        return Result(
            case=case, seconds=seconds, plain_seconds=base, first_seconds=first, loss=step.loss(),
            gpu_ratio=step.kernels_seconds() / plain.kernels_seconds() if on_gpu else None,
        )  # fmt: skip

    def _plain_of(self, case: Case) -> Any:
        key = (case.model, case.mode)
        if self._plain is None or self._plain[0] != key:
            self._plain = None
            torch._dynamo.reset()
            step = self._made(replace(case, recipe=None))
            step.warm_up()
            self._plain = (key, step)
        return self._plain[1]

    def _made(self, case: Case) -> Any:
        kind = _Layers if case.model == "layer" else Step
        return kind(case, self.sizes[case.model], self.device, **self.machine)


class Step:
    """A model with its optimizer and batch, which takes training steps.

    Args:
        case: Which model, how it runs, and what converts it.
        sizes: Of the model and the batch.
        device: Where; on a GPU it runs in bfloat16 autocast, on a CPU in float32.
        machine: Arguments of ``convert`` beside the recipe.
    """

    def __init__(self, case: Case, sizes: Sizes, device: str, **machine: Any) -> None:
        self.device = device
        self.steps = 5 if _is_gpu(device) else 1
        model = (models.llama if case.model == "llama" else models.gpt)(sizes).to(device)
        generator = torch.Generator().manual_seed(0)
        size = (sizes.batch_size, sizes.context + 1)
        tokens = torch.randint(0, sizes.vocabulary, size, generator=generator).to(device)
        self.batch = models.batch_of(model, tokens)
        if case.recipe is not None:
            _convert(model, case.recipe, machine)
            with torch.no_grad(), _autocast(device):
                model(**self.batch)  # recipes that scale a model look at one batch before it is compiled
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if case.mode == "eager":
            self.model: Any = model
        else:
            torch._dynamo.config.recompile_limit = 64  # one model's code is compiled for each recipe
            self.model = torch.compile(model, mode=case.mode)

    def __call__(self) -> Tensor:
        """Take a step and return the loss, without waiting for it."""
        with _autocast(self.device):
            output = self.model(**self.batch)
            loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def round(self) -> None:
        """Take some steps and wait for the last."""
        for _ in range(self.steps):
            self()
        wait(self.device)

    def warm_up(self) -> None:
        """Compile what is compiled."""
        for _ in range(_WARM_UP):
            self()
        wait(self.device)

    def in_turns_with(self, plain: "Step", repeats: int) -> tuple[float, float]:
        """Return the seconds of a step, and of the plain model's."""
        seconds, base = in_turns((self.round, plain.round), repeats, 1)
        return seconds / self.steps, base / self.steps

    def loss(self) -> float:
        """Return the loss of one more step."""
        return float(self())

    def kernels_seconds(self) -> float:
        """Return the sum of the times of all kernels of one more step: what a GPU takes for which no host is late."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self()
            wait(self.device)
        kernels = (event for event in profile.events() if event.device_type.name == "CUDA")
        return sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e6


class _Layers:
    """Layers alone, by the time in which the host asks the device for the work of one of them.

    Several are measured together: autograd begins a backward pass once for all of them, as in a model.
    """

    def __init__(self, case: Case, sizes: Sizes, device: str, **machine: Any) -> None:
        self.device = device
        self.layers, self.count = models.layers(sizes).to(device), sizes.layers
        dtype = torch.bfloat16 if _is_gpu(device) else torch.float32
        shape = (sizes.batch_size, sizes.context, sizes.width)
        self.x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        if case.recipe is not None:
            _convert(self.layers, case.recipe, machine)

    def seconds(self) -> float:
        """Return the host's seconds for one layer, forward and backward; a CPU's are those of the work itself."""
        clock = time.perf_counter if _is_gpu(self.device) else clock_of(torch.get_num_threads())
        with _autocast(self.device, cache_enabled=False):  # in a training step a weight is cast once, too
            start = clock()
            y = self.layers(self.x)
            taken = clock() - start
        start = clock()
        torch.autograd.grad(y, (self.x, *self.layers.parameters()), self.grad)
        taken += clock() - start
        wait(self.device)
        return taken / self.count

    def warm_up(self) -> None:
        for _ in range(_WARM_UP):
            self.seconds()

    def in_turns_with(self, plain: "_Layers", repeats: int) -> tuple[float, float]:
        """Return the medians of both; a GPU's host needs many rounds, which are short."""
        rounds = [(self.seconds(), plain.seconds()) for _ in range(repeats * (10 if _is_gpu(self.device) else 1))]
        seconds, base = map(statistics.median, zip(*rounds, strict=True))
        return seconds, base

    def loss(self) -> None:
        """Return nothing: layers alone have none."""


def _convert(model: nn.Module, recipe: str, machine: dict[str, Any]) -> None:
    """Let a recipe or other software convert a model but for its head; of layers alone a recipe leaves none out."""
    if recipe in models.PEERS:
        models.PEERS[recipe].convert(model, models.without_head)
        return
    record = get_recipe(recipe, kind="training")
    if isinstance(model, nn.Sequential):
        record = replace(record, rules=())
    convert(model, recipe=record, generator=1, filter_fn=models.without_head, total_steps=1000, **machine)


def _autocast(device: str, **options: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16, **options) if _is_gpu(device) else nullcontext()


def wait(device: str) -> None:
    """Wait until a GPU has done what it was asked."""
    if _is_gpu(device):
        torch.cuda.synchronize(device)


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda")
