# SPDX-License-Identifier: Apache-2.0
"""What a check of matrix products found, and the tasks of such checks."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fmtsim.lab.verify.outcome import Advance, Task, task_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Say what replaying one set of recordings gave.

    Args:
        set: Name of the file, and for library calls the kind of call.
        machine: The GPU with its unit, or the target.
        cases: Instructions' rows or library calls that were replayed; ``skipped`` were left out by a limit.
        outputs: Results compared.
        mismatches: Results whose bits differ; at least 1 where replaying raised an error.
        in_guesses: Those of the mismatches that are in calls whose accumulation order is a guess.
        plans: The evidence for the accumulation orders, with the number of calls of each: ``recorded`` for this very
            shape, ``reported``, ``rule``, or ``guess``.
        first: The first difference in hex, or the error.
    """

    set: str
    machine: str
    cases: int
    outputs: int
    mismatches: int
    in_guesses: int = 0
    skipped: int = 0
    plans: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    first: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self) | {"plans": dict(self.plans)}


def merged(replays: Iterable[Replay]) -> list[Replay]:
    """Return replays with those of one set, which follow each other, as one."""
    results: list[Replay] = []
    for replay in replays:
        before = results[-1] if results and results[-1].set == replay.set else None
        if before is None:
            results.append(replay)
            continue
        summed = ("cases", "outputs", "mismatches", "in_guesses", "skipped", "seconds")
        numbers: dict[str, Any] = {name: getattr(before, name) + getattr(replay, name) for name in summed}
        plans = Counter(dict(before.plans)) + Counter(dict(replay.plans))
        results[-1] = dataclasses.replace(
            before, machine=before.machine or replay.machine, plans=tuple(plans.most_common()),
            first=before.first or replay.first, **numbers,
        )  # fmt: skip
    return results


def replay_task(name: str, replay: Callable[[Advance], Replay]) -> Task:
    """Return the task of replaying one set."""
    failed = partial(Replay, set=name, machine="", cases=0, outputs=0, mismatches=1)
    return task_of(name, replay, lambda error: failed(first=f"replaying {error}"))
