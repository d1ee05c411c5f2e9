# SPDX-License-Identifier: Apache-2.0
"""Checks spread over processes: the same checks, with the same results, in the same order."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from fmtsim.gemm.products.operator import run_gemm
from fmtsim.lab.verify.gemm import gemm_tasks
from fmtsim.lab.verify.outcome import PlantedError, Task, engines
from fmtsim.lab.verify.plan import default_tasks, exhaustive_tasks
from fmtsim.lab.verify.units import planted, unit_tasks
from fmtsim.support.errors import DeviceError
from fmtsim.support.interrupts import unheard

T = TypeVar("T")
R = TypeVar("R")
MOST = 16
PRODUCTS = 8  # of a task: units have up to 65, and the last task should not keep all others waiting
CONTEXT_BYTES = 2 << 30  # of a device's memory, for each process


class Job(NamedTuple):
    """What a process has to know to make the tasks of a command again.

    Attributes:
        parts: ``"casts"``, ``"gemm"`` or both.
        device: Under test, None for the CPU.
        formats: To check, None for all.
        exhaustive: Whether casts are checked over all float32 inputs.
        vectors, limit: Folders of recorded products, and how many results of each set to compare.
        plant_error: Whether the last engine, and the products of a device, get a bit wrong: checks must see it.
    """

    parts: tuple[str, ...]
    device: torch.device | None = None
    formats: tuple[str, ...] | None = None
    exhaustive: bool = False
    vectors: tuple[str, ...] = ()
    limit: int | None = None
    plant_error: bool = False

    def tasks(self) -> dict[str, Sequence[Task]]:
        """Return the tasks of each part, always in the same order."""
        makers = {"casts": self._casts, "gemm": self._products}
        return {part: makers[part]() for part in self.parts}

    def _casts(self) -> Sequence[Task]:
        present = engines(self.device)
        if self.plant_error:
            last = list(present)[-1]
            present[last] = PlantedError(present[last])
        plan = exhaustive_tasks if self.exhaustive else default_tasks
        return plan(present, list(self.formats) if self.formats else None)

    def _products(self) -> Sequence[Task]:
        recorded = gemm_tasks(self.vectors, self.limit, self.device) if self.vectors else []
        if self.device is None:
            return recorded
        return [*unit_tasks(self.device, planted if self.plant_error else run_gemm, PRODUCTS), *recorded]


def default_workers(device: torch.device | None) -> int:
    """Return how many processes share the checks of a device: its memory and the machine's cores allow so many."""
    if device is None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else MOST * CONTEXT_BYTES
    return max(min(cores, MOST, memory // CONTEXT_BYTES), 1)


def run(
    job: Job, parts: Mapping[str, Sequence[Task]], workers: int, show: Callable[[str, float], None]
) -> dict[str, list[Any]]:
    """Run the tasks of a job, in this process or in others.

    Args:
        job: Which tasks.
        parts: These tasks by part, as ``job.tasks()`` returned them.
        workers: Processes; 1 runs everything in this one.
        show: Called with a name and the number of tasks that are done, a whole one where there are several processes.

    Returns:
        What each task found, by parts, in the tasks' order.

    Raises:
        DataError: A recording cannot be read.
        DeviceError: A process died.
    """
    tasks = [task for part in parts.values() for task in part]
    results = iter(_alone(tasks, show) if workers == 1 else _shared(job, tasks, workers, show))
    return {part: [next(results) for _ in members] for part, members in parts.items()}


def _alone(tasks: Sequence[Task], show: Callable[[str, float], None]) -> Iterator[Any]:
    for index, task in enumerate(tasks):
        show(task.name, index)
        yield task.run(lambda share, at=index, name=task.name: show(name, at + share))  # type: ignore[misc]


def _shared(job: Job, tasks: Sequence[Task], workers: int, show: Callable[[str, float], None]) -> list[Any]:
    """Run the tasks in new processes, the last ones first: products take longest, and small tasks fill the end."""
    died = "a process of the checks died, from lack of memory perhaps; --workers 1 shows at which check"
    results: dict[int, Any] = {}
    with pool_that_ends(min(workers, len(tasks)), _begin, job, workers, died=died) as pool:
        for index, result in each_done(pool, _run, range(len(tasks))[::-1]):
            results[index] = result
            show(tasks[index].name, len(results))
    return [results[index] for index in range(len(tasks))]


def as_done(
    run: Callable[[T], R], tasks: Sequence[T], workers: int, begin: Callable[..., None], *arguments: Any
) -> Iterator[R]:
    """Yield what a function returns for tasks, in the order in which processes end them.

    Raises:
        DeviceError: A process died.
    """
    died = "a process died, from lack of memory perhaps; pass fewer --workers"
    with pool_that_ends(min(workers, len(tasks)), begin, *arguments, died=died) as pool:
        yield from (result for _, result in each_done(pool, run, tasks))


def each_done(pool: ProcessPoolExecutor, run: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
    """Yield tasks and what a function returns for them, in the order in which a pool ends them."""
    with unheard():
        waiting = {pool.submit(run, task): task for task in tasks}
    for future in as_completed(waiting):
        yield waiting.pop(future), future.result()


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


def pool_of(workers: int, begin: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Return a pool of new processes that call ``begin`` first and end with this one, even when it is killed."""
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    return ProcessPoolExecutor(workers, spawn, _follow, (begin, *arguments))


def _follow(begin: Callable[..., None], *arguments: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)  # a killed pool tells its processes nothing, and they would wait for work for ever

    threading.Thread(target=end, daemon=True).start()
    begin(*arguments)


_tasks: list[Task] = []  # of this process, where it is one of several


def _begin(job: Job, workers: int) -> None:
    torch.set_num_threads(max((os.cpu_count() or 1) // workers, 1))
    _tasks[:] = [task for part in job.tasks().values() for task in part]


def _run(index: int) -> Any:
    return _tasks[index].run(lambda share: None)
