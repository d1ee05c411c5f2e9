# SPDX-License-Identifier: Apache-2.0
"""Claims about gradients on the wire: what reductions in FP8 lose below and above, by the number of ranks."""

from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.distributed.simulated_reduce import simulate
from studies.claims.claim import Claim, Expected, Measured, Tell, settings
from studies.claims.experiment import generator, told


class Lost(NamedTuple):
    """What is lost of a reduction: the part of all ranks' elements that become zero, and of sums at the largest."""

    below: float
    above: float


def reductions(
    tell: Tell, *, ranks: tuple[int, ...], schemes: tuple[tuple[str, str], ...], elements: int, spread: float,
    shared: float, warm: int, steps: int, seed: int,
) -> Measured:  # fmt: skip
    """Reduce log-normal gradients over rings of so many ranks.

    A rank's gradient is a size an element, log-normal of this spread, times the sum of a number of its own and
    ``shared`` times one that all ranks have, both normal. The first ``warm`` steps only move the automatic factor,
    ``steps`` count.
    """
    numbers: dict[str, float] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    exact = True
    for n in told(tell, ranks):
        for label, name in schemes:
            lost, agrees = _run(get_reduction(name), n, (elements, spread, shared), (warm, steps), seed)
            exact = exact and agrees
            for side, value in (("to zero", lost.below), ("at the largest", lost.above)):
                numbers[f"{label}, N = {n}: {side}"] = value
                curves.setdefault(f"{label}: {side}", []).append((float(n), value))
    first, mu = (numbers[f"{label}, N = {ranks[-1]}: to zero"] for label in ("1/N first", "mu"))
    numbers |= {"1/N first: to zero as the formula says": float(exact), "to zero: mu / 1/N first": mu / first}
    axes = ("ranks", "part of the elements")
    return Measured(numbers=numbers, curves=curves, axes=axes, logarithmic="xy")


def _run(
    reduction: Reduction, ranks: int, drawn: tuple[int, float, float], times: tuple[int, int], seed: int
) -> tuple[Lost, bool]:
    """Return what is lost in a mean step, and whether the elements that became zero are those that have to."""
    source, (elements, spread, shared), (warm, steps) = generator(seed), drawn, times
    size = (torch.randn(elements, generator=source) * spread).exp()
    mu = None if reduction.auto is None else torch.tensor(reduction.auto.initial)
    below, above, agrees = 0.0, 0.0, True
    for step in range((warm if reduction.auto else 0) + steps):
        common = shared * torch.randn(elements, generator=source)
        gradients = [size * (common + torch.randn(elements, generator=source)) for _ in range(ranks)]
        result = simulate(gradients, reduction, mu=mu)
        flushed = sum(int(counts.flushed) for counts in result.counts)
        if reduction.factor == "pre":
            agrees = agrees and flushed == _below(gradients, ranks)
        if reduction.auto is None or step >= warm:
            below += flushed / (ranks * elements * steps)
            above += int(result.counts[0].saturated) / (elements * steps)
        if mu is not None and reduction.auto is not None:
            mu = reduction.auto.next(mu, result.counts[0].saturated, result.counts[0].elements)
    return Lost(below, above), agrees


def _below(own: list[Tensor], ranks: int) -> int:
    """Count numbers whose 1/N part lies at or below half of E4M3's least, 2**-10, at the scale of the largest."""
    x = torch.stack(own).double().abs()
    scale = 2.0 ** torch.floor(torch.log2(448 / x.max()))
    return int((x * scale / ranks <= 2.0**-10).sum())


CLAIMS = (
    Claim(
        name="reductions", recorded="shown in part", bounds="after",
        says="1/N before an FP8 all-reduce flushes gradients to zero, 1/N behind it overflows; automatic mu loses less",
        source="Peng et al., FP8-LM, arXiv:2310.18313, section 2.1",
        measure=reductions,
        settings=settings(
            ranks=(1, 4, 16, 64), schemes=(("1/N first", "fp8lm_pre"), ("1/N behind", "fp8lm_post"), ("mu", "fp8lm")),
            elements=4096, spread=1.5, shared=0.1, warm=10, steps=6, seed=0,
        ),
        expected=(
            Expected(name="1/N first: to zero as the formula says", low=1.0),
            Expected(name="1/N first, N = 1: to zero", high=0.02),
            Expected(name="1/N first, N = 64: to zero", low=0.1),
            Expected(name="1/N behind, N = 64: to zero", high=0.02),
            Expected(name="1/N behind, N = 64: at the largest", low=1e-4),
            Expected(name="mu, N = 64: at the largest", high=1e-4),
            Expected(name="to zero: mu / 1/N first", high=0.5),
        ),
        notes="synthetic gradients, mostly noise of a rank's own: the more they share, the nearer mu comes to 1/N",
    ),
)  # fmt: skip
