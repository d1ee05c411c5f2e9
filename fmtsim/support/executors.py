# SPDX-License-Identifier: Apache-2.0
"""Tasks of a long job, by any concurrent.futures.Executor: in this process, in others of this machine, in a cluster.

Tasks return what they find and the process that began the job writes it, so that files are those of a local run.
"""

import importlib.util
import io
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

import torch

import fmtsim
from fmtsim.support.errors import ArgumentError, DeviceError, first_line, shown
from fmtsim.support.interrupts import unheard
from fmtsim.support.progress import Progress

T = TypeVar("T")
R = TypeVar("R")
AnyExecutor = Executor | str | None  # or the URL of a cluster; None: processes of this machine

TIMEOUT: Final = 10  # seconds in which a cluster has to answer; Ray takes up to thirty where another server does
UNDER_WAY: Final = 1000  # tasks that an executor has at once, and that a cluster's scheduler has to hold
_SILENT: Final = Progress()
_VERSIONS: Final = f"fmtsim {fmtsim.__version__} with torch {torch.__version__}"
_PACKAGES: Final = {"dask": "distributed", "ray": "ray"}
_DIED: Final = "a process died, from lack of memory perhaps; pass fewer --workers"
_LOST: Final = "the executor lost a task; read the logs of its workers, which need this fmtsim, and start again"


class Tasks:
    """Run tasks; ``open_tasks`` makes one."""

    def __init__(self, send: Any, share: Callable[[bytes], Any], state: Any, threads: int, died: str) -> None:
        self._send, self._threads, self._died, self.futures = send, threads, died, WeakSet[Future[Any]]()
        self._state = state if send is None else share(_packed((_VERSIONS, state)))

    def submit(self, work: Callable[[Any, T], R], task: T) -> "Future[Any]":
        """Hand over ``work(state, task)``; ``result`` has what it returns."""
        if self._send is None:  # in this thread: Ctrl-C comes out of here
            future = Future[Any]()
            future.set_result(_run(self._state, (work, task), self._threads))
            return future
        job = _packed((work, task))
        with self._told(), unheard():
            future = self._send(self._state, job, self._threads)
        self.futures.add(future)
        return future

    def result(self, future: "Future[Any]") -> Any:
        """Wait for what a task returns; its error has the traceback of its process as a note."""
        with self._told():
            result, error = future.result()
        if error is not None:
            raise error
        return result

    def each_done(
        self, work: Callable[[Any, T], R], tasks: Iterable[T], progress: Progress = _SILENT, weight: int = 1
    ) -> Iterator[tuple[T, R]]:
        """Yield tasks and what ``work(state, task)`` returns, as they end; each is so many steps, 0: as its length."""
        waiting: dict[Future[Any], T] = {}
        remaining, most, steps = iter(tasks), 1 if self._send is None else UNDER_WAY, 0
        while True:
            for task in itertools.islice(remaining, most - len(waiting)):
                waiting[self.submit(work, task)] = task
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                task = waiting.pop(future)
                yield task, self.result(future)
                steps += weight or len(task)  # type: ignore[arg-type]
                progress.step(steps)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as lost:  # tasks return their errors: this one is the executor's
            raise DeviceError(f"{self._died} ({type(lost).__name__}: {first_line(lost)})") from lost


@contextmanager
def open_tasks(
    state: Any, executor: AnyExecutor = None, *, workers: int = 1, threads: int | None = None, died: str = _DIED
) -> Iterator[Tasks]:
    """Give what runs tasks. An error inside, and Ctrl-C, cancel those that wait and end processes of this machine.

    Args:
        state: What all tasks share; a process gets it once.
        executor: An Executor, which stays open, or a cluster's URL; Dask and Ray start tasks of lost workers again.
        workers: Processes where ``executor`` is None; they end with this one. 1: this process runs the tasks.
        threads: CPU threads of a task, None for as many as torch has here. A process runs one task at a time.
        died: What DeviceError says where a process of this machine died; it is also raised where no cluster answers.
    """
    others = set(multiprocessing.active_children())
    threads = torch.get_num_threads() if threads is None else threads
    with ExitStack() as stack:
        tasks = Tasks(*_opened(executor, workers, stack), state, threads, died if executor is None else _LOST)
        try:
            yield tasks
        except BaseException:
            for future in list(tasks.futures):
                future.cancel()
            for child in set(multiprocessing.active_children()) - others if executor is None else ():
                child.terminate()
            raise
        finally:
            _state_of.cache_clear()


def _opened(executor: AnyExecutor, workers: int, stack: ExitStack) -> tuple[Any, Callable[[bytes], Any]]:
    """Return what sends a task, None where this process runs it, and what sends the bytes that all tasks share."""
    if executor is None and workers > 1:
        spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        executor = ProcessPoolExecutor(workers, spawn, _follow)
        stack.callback(executor.shutdown, cancel_futures=True)
    if executor is None or isinstance(executor, Executor):
        return executor and partial(executor.submit, _run), lambda data: data  # type: ignore[call-arg]  # job follows
    (scheme, _, address), url = str(executor).partition("://"), f"executor={shown(executor)}"
    host, _, port = address.rpartition(":")
    if scheme not in _PACKAGES or not host or not port.isdecimal():
        raise ArgumentError(f"{url} is no cluster; pass dask://HOST:PORT or ray://HOST:PORT, or in Python an Executor")
    if importlib.util.find_spec(_PACKAGES[scheme]) is None:
        raise ArgumentError(f"{url} needs {_PACKAGES[scheme]}, which is not installed; pip install 'fmtsim[{scheme}]'")
    if scheme == "ray" and "ray" in sys.modules and sys.modules["ray"].is_initialized():  # shutdown would end that, too
        raise ArgumentError(
            f"{url}: this process has a Ray session, and Ray has one at a time; end it (ray.shutdown())"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), TIMEOUT).close()  # Ray itself tries for minutes
        if scheme == "ray":
            import ray

            stack.callback(ray.shutdown)
            ray.init(executor, logging_level=40)  # errors
            remote = ray.remote(_run)
            return lambda *job: remote.remote(*job).future(), ray.put
        import dask
        from distributed import Client

        client = stack.enter_context(Client(f"tcp://{address}", timeout=TIMEOUT, set_as_default=False))
        client.wait_for_workers(1, TIMEOUT)
    except Exception as error:  # also of a server that is no cluster's
        reason = f"no cluster with workers answers ({first_line(error)})"
        raise DeviceError(f"{url}: {reason}; start it, or look at its port") from error
    stack.enter_context(dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}))
    # A task's result, which Dask makes again where the worker that had it is lost; it loses what was scattered.
    return partial(client.get_executor(pure=False).submit, _run), lambda data: client.submit(bytes, data, pure=False)


def _follow() -> None:
    """End this process with the one that began it: a killed pool tells its processes nothing, and they would wait."""

    def end() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has a parent
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


_one_task = threading.RLock()  # threads and random state are the process's; a job inside a task is of its thread


def _run(state: Any, job: Any, threads: int) -> tuple[Any, Exception | None]:
    """Run a task in any process; return what it returns, or its error, which executors would change."""
    with _one_task:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            work, task = _unpacked(job) if isinstance(job, bytes) else job
            return work(_state_of(state) if isinstance(job, bytes) else state, task), None
        except Exception as error:
            if isinstance(job, bytes):
                error.add_note(f"in process {os.getpid()} of {socket.gethostname()}:\n{traceback.format_exc()}")
            return None, error
        finally:
            torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _state_of(data: bytes) -> Any:
    versions, state = _unpacked(data)
    if versions != _VERSIONS:
        raise DeviceError(f"a worker has {_VERSIONS}, and this process {versions}; install equal versions")
    return state


def _packed(content: Any) -> bytes:
    """Return bytes for another process; tensors that share memory share it there, which pickle alone would end."""
    pickler = importlib.import_module("cloudpickle") if importlib.util.find_spec("cloudpickle") else pickle
    file = io.BytesIO()
    try:
        torch.save(content, file, pickle_module=pickler)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:  # pickle raises all of these
        advice = "define its functions in a module, or pip install cloudpickle, which sends lambdas"
        raise ArgumentError(f"a task cannot be sent to another process ({first_line(error)}); {advice}") from error
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
