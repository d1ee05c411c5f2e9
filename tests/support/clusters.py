# SPDX-License-Identifier: Apache-2.0
"""Dask and Ray clusters on this machine, whose workers are processes of one thread, and tasks to run on them.

Tests may kill the workers. The tasks are defined here because a worker imports a task's module, and workers do not
import test modules.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

SECONDS = 120  # that a cluster has to start


def scaled(state, task):
    """Return ``state * task`` and the number of CPU threads that torch uses."""
    return state * task, torch.get_num_threads()


def shares(state, task):
    """Set one tensor to zero and return the elements of another, which shows whether both share memory."""
    whole, part = state
    part.zero_()
    return whole.tolist()


def wrong(state, task):
    """Raise an error of the class ``state``."""
    raise state(f"task {task} is wrong")


def slept(state, task):
    """Sleep for ``task`` seconds and return them; the folder ``state``, if any, gets a file named after the process."""
    if state is not None:
        Path(state, f"{os.getpid()}.pid").touch()
    time.sleep(task)
    return task


@contextlib.contextmanager
def dask_cluster(folder: Path, workers: int = 2) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """Start a Dask cluster and yield its URL and its workers, which are not restarted; logs go to ``folder``."""
    folder.mkdir(exist_ok=True)
    file, dask = folder / "scheduler.json", [sys.executable, "-m", "dask"]
    quiet = ["--scheduler-file", str(file), "--no-dashboard"]
    port = free_port()
    with contextlib.ExitStack() as stack:
        scheduler = [*dask, "scheduler", *quiet, "--host", "127.0.0.1", "--port", str(port)]
        started = [_start(scheduler, folder, stack)]
        wait_for(file.exists, started)
        worker = [*dask, "worker", *quiet, "--nthreads", "1", "--no-nanny", "--local-directory", str(folder)]
        started += [_start(worker, folder, stack) for _ in range(workers)]
        yield f"dask://127.0.0.1:{port}", started[1:]


@contextlib.contextmanager
def ray_cluster(folder: Path, workers: int = 2) -> Iterator[str]:
    """Start a Ray cluster of one node with ``workers`` workers and yield its URL; logs go to ``folder``."""
    port, client = free_port(), free_port()
    head = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", str(workers),
        "--port", str(port), "--ray-client-server-port", str(client), "--include-dashboard", "false",
        "--disable-usage-stats", "--node-ip-address", "127.0.0.1",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        started = [_start(head, folder, stack)]
        wait_for(lambda: answers(client), started)
        yield f"ray://127.0.0.1:{client}"


def _start(words: list[str], folder: Path, stack: contextlib.ExitStack) -> subprocess.Popen:
    """Start a process that ends with ``stack``; its log is a file of ``folder``."""
    log = stack.enter_context((folder / f"{len(list(folder.glob('*.log')))}.log").open("wb"))
    process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen) -> None:
    """End a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition, processes: list[subprocess.Popen]) -> None:
    """Wait until ``condition`` returns True; fail after ``SECONDS``, or where one of the processes has ended."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def free_port() -> int:
    """Return a TCP port of this machine that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(port: int) -> bool:
    """Return True if a process of this machine listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
