# SPDX-License-Identifier: Apache-2.0
"""What experiments share: seeded data, quantised matrices, trainings, progress, and measures of error."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.scaling.scaled_cast import transformed
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown
from studies.claims.claim import Tell

T = TypeVar("T")
SHARING: ContextVar[Callable[[Tell, Callable[..., Any], Sequence[Mapping[str, Any]]], list[Any]] | None] = ContextVar(
    "SHARING", default=None
)
"""What runs the trainings of the experiments of this thread; None: the experiment itself."""
DISTRIBUTIONS = ("uniform", "gauss", "laplace", "t5", "t3", "rare")


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


def generator(seed: int) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(rows: int, columns: int, seed: int) -> Tensor:
    """Return standard normal numbers, float32."""
    return torch.randn(rows, columns, generator=generator(seed))


def draw(distribution: str, count: int, seed: int) -> Tensor:
    """Return independent numbers of a distribution, float32; ``t3`` and ``t5`` are Student's of so many degrees.

    ``rare`` is normal, with one number in a thousand fifty times as large.
    """
    source = generator(seed)
    if distribution == "uniform":
        return torch.rand(count, generator=source) * 2 - 1
    if distribution == "gauss":
        return torch.randn(count, generator=source)
    if distribution == "laplace":
        u = torch.rand(count, generator=source, dtype=torch.float64) - 0.5
        return (-u.sign() * torch.log1p(-2 * u.abs())).float()
    if distribution == "rare":
        x = torch.randn(count, generator=source)
        return torch.where(torch.rand(count, generator=source) < 1e-3, 50 * x, x)
    if distribution in ("t3", "t5"):
        degrees = int(distribution[1:])
        z = torch.randn(degrees + 1, count, generator=source, dtype=torch.float64)
        return (z[0] / (z[1:].square().sum(0) / degrees).sqrt()).float()
    raise ArgumentError(f"distribution {shown(distribution)} is unknown; choose one of {', '.join(DISTRIBUTIONS)}")


def through(x: Tensor, quantizer: Quantizer, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a matrix after a quantiser's transforms, and after all of it; blocks run along the last axis."""
    draws = Keys(RandomKey(seed, 0), RandomKey(seed, 1), RandomKey(seed, 2))
    q = quantize_operand(x, quantizer, draws).values(torch.float32)
    for transform in quantizer.transforms:
        x, _ = transformed(x, transform, draws.signs)
    return x, q


def last_loss(steps: int, part: int, *how: Any) -> float:
    """Return ``last_of`` the losses of ``descend(range(steps), *how)``."""
    return last_of([loss for _, loss in descend(range(steps), *how)], steps, part)


def last_of(losses: Sequence[float], steps: int, part: int) -> float:
    """Return the mean loss over the last ``1/part`` of the steps, infinite where one is not finite."""
    last = losses[-max(1, steps // part) :]
    return sum(last) / len(last) if math.isfinite(losses[-1]) else math.inf


def trainings(tell: Tell, train: Callable[..., T], tasks: Sequence[Mapping[str, Any]]) -> list[T]:
    """Return what a training gives for each of several settings: one after another, or shared as card.py says."""
    share = SHARING.get()
    return [train(**task) for task in told(tell, tasks)] if share is None else share(tell, train, tasks)


def told(tell: Tell, items: Sequence[T]) -> Iterator[T]:
    """Yield items, and tell after each which part of them is done."""
    for done, item in enumerate(items, 1):
        yield item
        tell(done / len(items))


def relative_error(x: Tensor, q: Tensor) -> float:
    """Return ``|q - x|^2 / |x|^2``, summed in float64."""
    x, q = x.double(), q.double()
    return float((q - x).square().sum() / x.square().sum())


def decibels(error: float) -> float:
    """Return a relative error as a ratio of signal to noise in dB."""
    return math.inf if error == 0 else -10 * math.log10(error)


def slope_of(x: Tensor, q: Tensor) -> float:
    """Return ``<x, q> / <x, x>``, 1 for a rounding that is unbiased."""
    x, q = x.double(), q.double()
    return float((x * q).sum() / x.square().sum())
