# SPDX-License-Identifier: Apache-2.0
"""Medians of actions that take turns, with a bound on torch's threads; which cases run, and on what processor."""

import fnmatch
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmtsim.lab.cli import output
from fmtsim.lab.cli.machine import processor_facts, processor_name
from fmtsim.support.errors import ArgumentError

Action = Callable[[], Any]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Hold the median seconds of an action and of its baseline, run in turns, by the number of threads."""

    seconds: dict[int, float]
    base_seconds: dict[int, float]

    @property
    def fewest(self) -> int:
        """The fewest threads measured, with which targets are compared."""
        return min(self.seconds)

    def ratio(self, threads: int | None = None) -> float:
        """Return the share of the baseline's speed with that many threads, by default the fewest."""
        threads = self.fewest if threads is None else threads
        return self.base_seconds[threads] / self.seconds[threads]

    def gains(self, threads: int) -> tuple[float, float]:
        """Return how many times as fast as with the fewest threads the action and its baseline are."""
        first = self.fewest
        return self.seconds[first] / self.seconds[threads], self.base_seconds[first] / self.base_seconds[threads]

    def by_threads(self, base: str, work: str, amount: int) -> dict[str, Any]:
        """Return plain JSON types: the figures for each number of threads.

        Args:
            base: What the baseline is called.
            work: What is counted a second.
            amount: How much of that one run does.
        """
        return {
            str(threads): {
                "seconds": seconds, f"{base}_seconds": self.base_seconds[threads],
                f"ratio_to_{base}": self.ratio(threads), f"{work}_per_second": amount / seconds,
                "speedup": self.gains(threads)[0], f"{base}_speedup": self.gains(threads)[1],
            }
            for threads, seconds in self.seconds.items()
        }  # fmt: skip


def clock_of(threads: int) -> Clock:
    """Return the clock of work on that many threads: of one thread its own time, which no other process lengthens."""
    return time.thread_time if threads == 1 else time.perf_counter


def in_turns(
    actions: Sequence[Action], repeats: int, threads: int, clock: Clock = time.perf_counter
) -> tuple[float, ...]:
    """Return the median seconds of each action, run one after the other so that a busy machine slows all alike.

    The first round, which compiles kernels and touches pages, is not counted. With several threads each timed run
    follows an untimed one of its own: torch's OpenMP threads spin for some milliseconds after their work, and would be
    measured with the next action.
    """

    def seconds(action: Action) -> float:
        if threads > 1:
            action()
        start = clock()
        action()
        return clock() - start

    return _medians(actions, repeats, seconds)


def in_turns_on_device(actions: Sequence[Action], repeats: int, ahead: int = 1_000_000) -> tuple[float, ...]:
    """Return the median seconds that each action keeps the current CUDA device busy, by events, taken in turns.

    ``ahead`` is how many cycles the host may use to queue an action before the device begins.

    The first round, which compiles kernels and fills the allocator's pool, is not counted.
    """

    def seconds(action: Action) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)  # the device waits while the host queues: launches are not timed
        start.record()
        action()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    return _medians(actions, repeats, seconds)


def _medians(actions: Sequence[Action], repeats: int, seconds: Callable[[Action], float]) -> tuple[float, ...]:
    rounds = [[seconds(action) for action in actions] for _ in range(repeats + 1)]
    return tuple(statistics.median(taken) for taken in zip(*rounds[1:], strict=True))


def chosen_cases(cases: Sequence[Any], pattern: str) -> list[Any]:
    """Return the cases whose names match a pattern.

    Raises:
        ArgumentError: None does; the message lists them.
    """
    chosen = [case for case in cases if fnmatch.fnmatchcase(case.name, pattern)]
    if not chosen:
        names = ", ".join(repr(case.name) for case in cases)
        raise ArgumentError(f"--only {pattern!r} matches no case; the cases are {names}")
    return chosen


def each_shown(cases: Sequence[Any]) -> Iterator[Any]:
    """Yield cases, and show which one is at work."""
    for index, case in enumerate(cases):
        at_work(f"{case.name} ({index + 1} of {len(cases)})")
        yield case


def at_work(text: str) -> None:
    """Show what is being measured on one line of a terminal, once: a bar that is drawn anew would be measured, too."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


_VECTORS = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm")


def processor() -> dict[str, Any]:
    """Return the processor's name and, on Linux, its vector instructions and the caches of its first core."""
    flags, caches = (processor_facts().get("flags") or processor_facts().get("Features") or "").split(), {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    vectors = [flag for flag in flags if flag.startswith(_VECTORS)]
    return {"processor": processor_name(), "instructions": vectors, "caches": caches}


def origin() -> dict[str, str]:
    """Return the command that makes a record, the time, and the commit.

    ``FMTSIM_COMMIT`` names the commit where the tree is a copy without git; "unknown" goes into no page.
    """
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    threads = [f"OMP_NUM_THREADS={count}" for count in [os.environ.get("OMP_NUM_THREADS")] if count]
    command = shlex.join([*threads, "python", "-m", "benchmarks.suite", *sys.argv[1:]])
    return {**output.origin(), "command": command, "commit": os.environ.get("FMTSIM_COMMIT") or found or "unknown"}
