# SPDX-License-Identifier: Apache-2.0
"""Processes that ask cuBLASLt: each has opened the library, and takes tasks in turn."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fmtsim.gemm.targets.ask import Asker
from fmtsim.lab.verify.workers import each_done, pool_that_ends
from fmtsim.support.progress import Progress

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def processes(open_library: Callable[[], Asker], workers: int, died: str) -> Iterator[ProcessPoolExecutor | None]:
    """Give processes that have opened the library, None where this one alone has; ``died`` says it where one dies."""
    if workers == 1:
        _begin(open_library)
        yield None
        return
    with pool_that_ends(workers, _begin, open_library, died=died) as pool:
        yield pool


def shared(
    pool: ProcessPoolExecutor | None, work: Callable[[T], R], tasks: Sequence[T], progress: Progress, weight: int = 0
) -> Iterator[tuple[T, R]]:
    """Yield tasks and what comes of them, in the order in which processes end them.

    A task counts for its length, or for ``weight``.
    """
    done = 0
    every = ((task, work(task)) for task in tasks) if pool is None else each_done(pool, work, tasks)
    for task, found in every:
        yield task, found
        done += weight or len(task)  # type: ignore[arg-type]
        progress.step(done)


_asker: list[Any] = []  # of this process


def asker() -> Asker:
    """Return what asks in this process, of those that ``processes`` gives."""
    return _asker[0]  # type: ignore[no-any-return]


def _begin(open_library: Callable[[], Asker]) -> None:
    torch.set_num_threads(1)
    _asker[:] = [open_library()]
