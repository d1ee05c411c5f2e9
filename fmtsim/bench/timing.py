"""Medians of actions that take turns, with a bound on torch's threads."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def in_turns(actions: Sequence[Callable[[], Any]], repeats: int, threads: int) -> tuple[float, ...]:
    """Return the median seconds of each action, run one after the other so that a busy machine slows all alike.

    The first round, which compiles kernels and touches pages, is not counted. With several threads each timed run
    follows an untimed one of its own: torch's OpenMP threads spin for some milliseconds after their work, and would be
    measured with the next action.
    """
    times: list[list[float]] = [[] for _ in actions]
    for repeat in range(repeats + 1):
        for action, taken in zip(actions, times, strict=True):
            if threads > 1:
                action()
            start = time.perf_counter()
            action()
            if repeat:
                taken.append(time.perf_counter() - start)
    return tuple(statistics.median(taken) for taken in times)


def in_turns_on_device(actions: Sequence[Callable[[], Any]], repeats: int, ahead: int = 1_000_000) -> tuple[float, ...]:
    """Return the median seconds that each action keeps the current CUDA device busy, by events, taken in turns.

    ``ahead`` is how many cycles the host may use to queue an action before the device begins.

    The first round, which compiles kernels and fills the allocator's pool, is not counted.
    """
    times: list[list[float]] = [[] for _ in actions]
    for repeat in range(repeats + 1):
        for action, taken in zip(actions, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(ahead)  # the device waits while the host queues: launches are not timed
            start.record()
            action()
            stop.record()
            stop.synchronize()
            if repeat:
                taken.append(start.elapsed_time(stop) / 1e3)
    return tuple(statistics.median(taken) for taken in times)


@contextmanager
def bounded_threads(count: int) -> Iterator[None]:
    """Bound torch's threads, which the engine follows, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
