# SPDX-License-Identifier: Apache-2.0
"""Tasks by any executor: the same results, the errors of tasks, and the executor's own."""

import importlib.util
import pickle
import socket
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

import fmtsim
from fmtsim.support import executors
from fmtsim.support.errors import ArgumentError, DeviceError, FormatError
from fmtsim.support.executors import open_tasks
from fmtsim.support.progress import Progress
from tests.support.clusters import free_port, scaled, shares, wrong
from tests.support.refusals import refused


@pytest.fixture(params=["here", "threads", pytest.param("processes", marks=pytest.mark.slow)])
def executor(request):
    if request.param == "here":
        yield None
        return
    made = ThreadPoolExecutor(2) if request.param == "threads" else ProcessPoolExecutor(2, get_context("spawn"))
    with made as pool:
        yield pool


class Steps(Progress):
    def __init__(self):
        self.done = []

    def step(self, done, note=""):
        self.done.append(done)


def test_every_executor_gives_the_same(executor):
    progress, before = Steps(), torch.get_num_threads()
    with open_tasks(3, executor, threads=1) as tasks:
        assert dict(tasks.each_done(scaled, range(5), progress)) == {n: (3 * n, 1) for n in range(5)}
        assert tasks.result(tasks.submit(scaled, 7)) == (21, 1)
    assert progress.done == [1, 2, 3, 4, 5] and torch.get_num_threads() == before
    with open_tasks("x", executor) as tasks:  # another state, in the same processes
        assert [result for _, (result, _) in tasks.each_done(scaled, [2], progress, 4)] == ["xx"]
    assert progress.done[-1] == 4


def test_a_part_counts_for_its_length():
    progress = Steps()
    with open_tasks(2) as tasks:
        assert dict(tasks.each_done(scaled, [(1,), (1, 2, 3)], progress, 0))[1,][0] == (1, 1)
    assert progress.done == [1, 4]


def test_tensors_that_share_memory_share_it_on_the_other_side():
    whole = torch.ones(4)
    with ThreadPoolExecutor(1) as pool, open_tasks((whole, whole[:2]), pool) as tasks:
        assert tasks.result(tasks.submit(shares, 0)) == [0, 0, 1, 1]
    assert whole.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [ValueError, FormatError])
def test_the_error_of_a_task_has_the_traceback_of_its_process(kind, executor):
    with pytest.raises(kind) as caught, open_tasks(kind, executor) as tasks:
        list(tasks.each_done(wrong, [1]))
    assert str(caught.value) == "task 1 is wrong"
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("in process " in notes and "in wrong\n" in notes) == (executor is not None)


def test_a_function_may_name_the_package():
    pytest.importorskip("cloudpickle")
    work = lambda state, task: fmtsim.__name__ + task  # noqa: E731
    with ThreadPoolExecutor(1) as pool, open_tasks(work, pool) as tasks:
        assert tasks.result(tasks.submit(work, "!")) == "fmtsim!"
    assert pickle.loads(pickle.dumps(fmtsim)) is fmtsim


active = []


def watched(state, task):
    active.append(task)
    assert len(active) == 1
    time.sleep(0.01)
    active.remove(task)
    with open_tasks(2, threads=1) as inner:  # a job inside a task
        return inner.result(inner.submit(scaled, task))


def test_a_process_runs_one_task_at_a_time():
    with ThreadPoolExecutor(4) as pool, open_tasks(None, pool) as tasks:
        assert dict(tasks.each_done(watched, range(8))) == {n: (2 * n, 1) for n in range(8)}


def test_what_cannot_be_sent_is_told(monkeypatch):
    lock = threading.Lock()
    with ThreadPoolExecutor(1) as pool:
        refused("a task cannot be sent to another process .cannot pickle", open_tasks(lock, pool).__enter__)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        refused("define its functions in a module, or pip install cloudpickle",
                open_tasks(lambda: 1, pool).__enter__)  # fmt: skip


def test_a_worker_with_another_version_is_refused(monkeypatch):
    with ThreadPoolExecutor(1) as pool, open_tasks(1, pool) as tasks:
        monkeypatch.setattr(executors, "_VERSIONS", "fmtsim 9")
        with pytest.raises(DeviceError, match="a worker has fmtsim 9, and this process fmtsim .*; install equal"):
            list(tasks.each_done(scaled, [1]))


class Fake(Executor):
    """Hands out futures that nobody fulfils."""

    def __init__(self):
        self.futures = []

    def submit(self, fn, /, *args, **kwargs):
        self.futures.append(Future())
        return self.futures[-1]


def test_a_lost_task_is_told_and_the_others_are_cancelled():
    fake = Fake()
    with (
        pytest.raises(DeviceError, match=r"the executor lost a task; read the logs .* \(BrokenExecutor: gone\)"),
        open_tasks(None, fake) as tasks,
    ):
        first, _ = tasks.submit(scaled, 1), tasks.submit(scaled, 2)
        fake.futures[0].set_exception(BrokenExecutor("gone"))
        tasks.result(first)
    assert not fake.futures[0].cancelled() and fake.futures[1].cancelled()


def test_few_tasks_are_under_way_at_once(monkeypatch):
    monkeypatch.setattr(executors, "UNDER_WAY", 3)
    fake, most = Fake(), []

    def fulfil():
        for n in range(9):
            while len(fake.futures) <= n:
                time.sleep(0.001)
            most.append(sum(not future.done() for future in fake.futures))
            fake.futures[n].set_result((n, None))

    thread = threading.Thread(target=fulfil)
    thread.start()
    with open_tasks(None, fake) as tasks:
        assert sorted(result for _, result in tasks.each_done(scaled, range(9))) == list(range(9))
    thread.join()
    assert max(most) == 3


@pytest.mark.parametrize(
    "url", ["dask", "spark://host:1", "dask://host", "ray://:10001", "dask://host:x", 3, "", print]
)
def test_what_is_no_executor(url):
    refused("is no cluster; pass dask://HOST:PORT or ray://HOST:PORT, or in Python an Executor",
            open_tasks(1, url).__enter__)  # fmt: skip


@pytest.mark.parametrize(("scheme", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_package_that_is_missing(scheme, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=rf"needs {package}, which is not installed; pip install 'fmtsim\[{scheme}"):
        open_tasks(1, f"{scheme}://localhost:1").__enter__()


@pytest.mark.parametrize("scheme", ["dask", "ray"])
@pytest.mark.parametrize("port", [None, 99999])
def test_a_cluster_that_does_not_answer(scheme, port, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    url = f"{scheme}://127.0.0.1:{port or free_port()}"
    with pytest.raises(DeviceError, match=rf"executor='{url}': no cluster with workers answers .*; start it, or look"):
        open_tasks(1, url).__enter__()


@pytest.fixture
def ray_calls(monkeypatch):
    """Let a stand-in be imported as Ray, and its server be reached; give the list of its calls."""
    calls = []
    ray = SimpleNamespace(
        is_initialized=lambda: "init" in calls, init=lambda *_, **__: calls.append("init"), remote=lambda work: work,
        shutdown=lambda: calls.append("shutdown"), put=bytes,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(socket, "create_connection", lambda *_: SimpleNamespace(close=lambda: None))
    return calls


def test_a_session_of_ray_ends_with_the_job_that_began_it(ray_calls):
    with open_tasks(1, "ray://host:1"):
        assert ray_calls == ["init"]
    assert ray_calls == ["init", "shutdown"]


def test_a_session_of_ray_that_was_there_is_not_ended(ray_calls):
    ray_calls.append("init")
    refused("executor='ray://host:1': this process has a Ray session, and Ray has one at a time; end it",
            open_tasks(1, "ray://host:1").__enter__)  # fmt: skip
    assert ray_calls == ["init"]
