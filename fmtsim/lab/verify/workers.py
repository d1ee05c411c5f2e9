# SPDX-License-Identifier: Apache-2.0
"""Checks spread over processes: the same checks, with the same results, in the same order."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fmtsim.gemm.products.operator import run_gemm
from fmtsim.lab.verify.check_plan import default_tasks, exhaustive_tasks
from fmtsim.lab.verify.outcome import PlantedError, Task, engines
from fmtsim.lab.verify.units import planted, unit_tasks
from fmtsim.support.executors import open_tasks

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
        plant_error: Whether the last engine, and the products of a device, get a bit wrong: checks must see it.
    """

    parts: tuple[str, ...]
    device: torch.device | None = None
    formats: tuple[str, ...] | None = None
    exhaustive: bool = False
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
        assert self.device is not None  # the CPU is what products of a device are compared with
        return unit_tasks(self.device, planted if self.plant_error else run_gemm, PRODUCTS)


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
        DeviceError: A process died.
    """
    tasks = [task for part in parts.values() for task in part]
    results = iter(_alone(tasks, show) if min(workers, len(tasks)) < 2 else _shared(job, tasks, workers, show))
    return {part: [next(results) for _ in members] for part, members in parts.items()}


def _alone(tasks: Sequence[Task], show: Callable[[str, float], None]) -> Iterator[Any]:
    for index, task in enumerate(tasks):
        show(task.name, index)
        yield task.run(lambda share, at=index, name=task.name: show(name, at + share))  # type: ignore[misc]


def _shared(job: Job, tasks: Sequence[Task], workers: int, show: Callable[[str, float], None]) -> list[Any]:
    """Run the tasks in new processes, the last ones first: products take longest, and small tasks fill the end."""
    died = "a process of the checks died, from lack of memory perhaps; --workers 1 shows at which check"
    results: dict[int, Any] = {}
    threads = max((os.cpu_count() or 1) // workers, 1)
    with open_tasks(job, workers=min(workers, len(tasks)), threads=threads, died=died) as shared:
        for index, result in shared.each_done(_run, range(len(tasks))[::-1]):
            results[index] = result
            show(tasks[index].name, len(results))
    return [results[index] for index in range(len(tasks))]


@lru_cache(maxsize=1)
def _tasks(job: Job) -> list[Task]:
    return [task for part in job.tasks().values() for task in part]


def _run(job: Job, index: int) -> Any:
    return _tasks(job)[index].run(lambda share: None)
