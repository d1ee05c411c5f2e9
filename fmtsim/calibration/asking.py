# SPDX-License-Identifier: Apache-2.0
"""Processes that ask cuBLASLt: each has opened the library, and takes tasks in turn."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fmtsim.errors import DeviceError
from fmtsim.gemm.targets.ask import Asker
from fmtsim.interrupts import unheard
from fmtsim.progress import Progress
from fmtsim.verify.workers import pool_of

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


@contextmanager
def pool_that_ends(workers: int, begin: Callable[..., None], *arguments: Any, died: str) -> Iterator[Any]:
    """Give processes that call ``begin`` first; any error, and Ctrl-C, ends them at once, whatever they work on.

    Raises:
        DeviceError: One died; ``died`` says so.
    """
    others, pool = multiprocessing.active_children(), pool_of(workers, begin, *arguments)
    try:
        yield pool
    except BaseException as error:
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise DeviceError(died) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def shared(
    pool: ProcessPoolExecutor | None, work: Callable[[T], R], tasks: Sequence[T], progress: Progress, weight: int = 0
) -> Iterator[tuple[T, R]]:
    """Yield tasks and what comes of them, in the order in which processes end them.

    A task counts for its length, or for ``weight``.
    """
    done = 0
    for task, found in _results(pool, work, tasks):
        yield task, found
        done += weight or len(task)  # type: ignore[arg-type]
        progress.step(done)


def _results(pool: ProcessPoolExecutor | None, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
    if pool is None:
        yield from ((task, work(task)) for task in tasks)
        return
    with unheard():
        waiting = {pool.submit(work, task): task for task in tasks}
    for future in as_completed(waiting):
        yield waiting.pop(future), future.result()


_asker: list[Any] = []  # of this process


def asker() -> Asker:
    """Return what asks in this process, of those that ``processes`` gives."""
    return _asker[0]  # type: ignore[no-any-return]


def _begin(open_library: Callable[[], Asker]) -> None:
    torch.set_num_threads(1)
    _asker[:] = [open_library()]
