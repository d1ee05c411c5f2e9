# SPDX-License-Identifier: Apache-2.0
"""Clusters of this machine, of processes with one thread each, which may be killed; and tasks for them.

Tasks stand here because workers import this module, and no test module.
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

SECONDS = 120


def scaled(state, task):
    """Return a product and the number of CPU threads."""
    return state * task, torch.get_num_threads()


def shares(state, task):
    """Change one tensor and return another that shares its memory."""
    whole, part = state
    part.zero_()
    return whole.tolist()


def wrong(state, task):
    """Raise an error."""
    raise state(f"task {task} is wrong")


def slept(state, task):
    """Sleep for so many seconds, and say in a folder by which process."""
    if state is not None:
        Path(state, f"{os.getpid()}.pid").touch()
    time.sleep(task)
    return task


@contextlib.contextmanager
def dask_cluster(folder: Path, workers: int = 2) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """Give the URL of a Dask cluster and its workers, which nobody starts again; ``folder`` has their logs."""
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
    """Give the URL of a Ray cluster of one node with so many workers."""
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
    log = stack.enter_context((folder / f"{len(list(folder.glob('*.log')))}.log").open("wb"))
    process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen) -> None:
    """End a process with all that it began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition, processes: list[subprocess.Popen]) -> None:
    """Wait for a condition, as long as processes run."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(port: int) -> bool:
    """Return True if somebody listens at a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
