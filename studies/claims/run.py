# SPDX-License-Identifier: Apache-2.0
"""Run claims: measure with each seed, compare with what is expected, and take the time."""

import importlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from fmtsim.support.errors import ArgumentError, FmtsimError, did_you_mean, shown
from fmtsim.support.executors import AnyExecutor, open_tasks
from studies.claims.claim import Claim, Expected, Measured, Tell, Verdict

_MODULES = (
    "ratios estimators outliers attention accumulation training widths gpts wire quantised multipliers served searched "
    "optimizers qat sweeps"
)
_PARTS = (importlib.import_module(f"studies.claims.{name}") for name in _MODULES.split())
CLAIMS: tuple[Claim, ...] = tuple(claim for part in _PARTS for claim in part.CLAIMS)


def get_claims(names: Sequence[str] = ()) -> tuple[Claim, ...]:
    """Return the claims of these names, in the order of the list; all of them where none is given.

    Raises:
        ArgumentError: There is no claim of a name.
    """
    by_name = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in by_name:
            hint = did_you_mean(name, by_name)
            raise ArgumentError(f"unknown claim {shown(name)}{hint} (python -m studies.claims --list shows all)")
    return tuple(claim for claim in CLAIMS if not names or claim.name in names)


_APART = 1000  # seeds lie so far apart: experiments that count up from a seed share no numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Set one number beside what it should be: its value with each seed, NaN where the experiment does not give it."""

    expected: Expected
    values: tuple[float, ...]

    @property
    def ours(self) -> float:
        """Mean of the seeds, infinite or NaN where one of them is."""
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def judged(self) -> float:
        """Mean less the standard errors that are expected of it; with a single seed nothing is sure."""
        if not self.expected.standard_errors:
            return self.ours
        mean, count = self.ours, len(self.values)
        variance = sum((value - mean) ** 2 for value in self.values) / (count - 1) if count > 1 else math.inf
        return mean - self.expected.standard_errors * (variance / max(1, count)) ** 0.5

    @property
    def verdict(self) -> Verdict:
        """What the mean shows."""
        return self.expected.verdict(self.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Say how a claim came out."""

    claim: Claim  # which
    runs: tuple[Measured, ...]  # what was measured, by seed; empty where the experiment broke off
    seconds: float  # how long it took
    error: str = ""  # why it broke off, empty where it did not

    @property
    def rows(self) -> tuple[Row, ...]:
        """The numbers, in the order of the claim."""
        return tuple(
            Row(expected=one, values=tuple(run.numbers.get(one.name, math.nan) for run in self.runs))
            for one in self.claim.expected
        )

    @property
    def verdict(self) -> Verdict:
        """What the means over the seeds show of the claim."""
        return self.claim.verdict({row.expected.name: row.judged for row in self.rows})

    @property
    def change(self) -> int:
        """Steps from the recorded verdict to this one: positive where it got worse, 0 where it is the same."""
        order = get_args(Verdict)
        return order.index(self.verdict) - order.index(self.claim.recorded)

    @property
    def worse(self) -> bool:
        """Whether less is shown than is recorded, or the experiment broke off."""
        return bool(self.error) or self.change > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types (NaN and infinities as floats)."""
        rows = [
            {
                "number": row.expected.name,
                "published": row.expected.published,
                "origin": row.expected.origin,
                "ours": row.ours,
                "seeds": list(row.values),
                "low": row.expected.low,
                "high": row.expected.high,
                "part": row.expected.part,
                "standard_errors": row.expected.standard_errors,
                "judged": row.expected.bounded or row.expected.native,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]
        names = ("says", "source", "notes", "bounds", "recorded")
        about = {"claim": self.claim.name} | {name: getattr(self.claim, name) for name in names}
        ending = {"verdict": self.verdict, "worse": self.worse, "seconds": self.seconds, "error": self.error}
        return about | ending | {"numbers": rows}


def run_claim(claim: Claim, tell: Tell = lambda part: None, *, seeds: int | None = None, first_seed: int = 0) -> Result:
    """Run a claim's experiment.

    Args:
        tell: Called with the part that is done, 0 to 1.
        seeds: How many seeds; None: as many as it asks for. Without effect where an experiment draws nothing.
        first_seed: The first of them, 0 for those of the table in the documentation.

    Returns:
        The result; an error of fmtsim in the experiment ends it and is quoted there. The caller's random generators are
        left as they were.
    """
    start, error = time.perf_counter(), ""
    measured: list[Measured] = []
    with torch.random.fork_rng(devices=[]):
        try:
            every = list(seeded(claim, seeds, first_seed))
            for done, values in enumerate(every):
                measured.append(claim.measure(lambda part, done=done: tell((done + part) / len(every)), **values))
        except FmtsimError as problem:
            measured, error = [], str(problem)
    return Result(claim=claim, runs=tuple(measured), seconds=time.perf_counter() - start, error=error)


def run_claims(
    claims: Sequence[Claim], workers: int = 1, *, seeds: int | None = None, first_seed: int = 0,
    executor: AnyExecutor = None,
) -> Iterator[Result]:  # fmt: skip
    """Run claims in processes, or on an executor, a CPU thread each, slow ones first; yield results as they are there.

    Claims that read the same runs share a process. Other arguments are those of ``run_claim`` and ``run_sweep``.
    """
    alike: dict[Any, list[Claim]] = {}
    for claim in claims:
        alike.setdefault((claim.measure, claim.settings), []).append(claim)
    groups = sorted(alike.values(), key=lambda group: not any(claim.slow for claim in group))
    by_name = {claim.name: claim for claim in claims}
    with open_tasks((seeds, first_seed), executor, workers=min(workers, len(groups)), threads=1) as tasks:
        for _, finished in tasks.each_done(_run_group, [[claim.name for claim in group] for group in groups]):
            for name, runs, seconds, error in finished:
                yield Result(claim=by_name[name], runs=runs, seconds=seconds, error=error)


def _run_group(how: tuple[int | None, int], names: Sequence[str]) -> list[tuple[str, tuple[Measured, ...], float, str]]:
    """Run claims, by names; return names, and of results what another process may be sent."""
    seeds, first_seed = how
    done = [run_claim(claim, seeds=seeds, first_seed=first_seed) for claim in get_claims(names)]
    return [(result.claim.name, result.runs, result.seconds, result.error) for result in done]


def seeded(claim: Claim, seeds: int | None, first_seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the settings of each run of a claim's experiment, which takes no seed, one, or all of them."""
    values = dict(claim.settings)
    if "seeds" in values:
        those = values["seeds"] if seeds is None else range(seeds)
        yield values | {"seeds": tuple(first_seed + seed for seed in those)}
    elif "seed" in values:
        for run in range(first_seed, first_seed + (seeds or claim.seeds)):
            yield values | {"seed": values["seed"] + run * _APART}
    else:
        yield values
