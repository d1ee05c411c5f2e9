# SPDX-License-Identifier: Apache-2.0
"""Sweeps on clusters of this machine: the runs of a local sweep, a folder that any executor goes on with."""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fmtsim.lab.cli.main import main
from fmtsim.lab.training.sweep import RUNS, SweepConfig, points_of, read_runs, run_sweep
from fmtsim.support import executors
from fmtsim.support.errors import DeviceError
from fmtsim.support.executors import open_tasks
from fmtsim.support.progress import Progress
from tests.support import faults
from tests.support.clusters import dask_cluster, ray_cluster, slept, wait_for, wrong
from tests.support.refusals import refused

CONFIG = SweepConfig(layers=1, heads=2, context=16, batch_size=2)
POINTS = points_of(["fp32", "e8m3"], [1e-3, 1e-2], [16], [4], [0, 1])


def bits(runs):
    return [(run.point, run.losses, run.validation, run.sharpness) for run in runs]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    return run_sweep(CONFIG, POINTS, corpus, tmp_path_factory.mktemp("sweep"), Progress())


def test_an_executor_trains_the_same_and_goes_on_with_any_folder(tmp_path, corpus, whole):
    run_sweep(CONFIG, POINTS[:3], corpus, tmp_path, Progress())
    lines = (tmp_path / RUNS).read_text()
    with ThreadPoolExecutor(2) as pool:
        assert bits(run_sweep(CONFIG, POINTS[:6], corpus, tmp_path, Progress(), executor=pool)) == bits(whole)[:6]
        assert pool.submit(int).result() == 0  # whoever made it ends it
    assert (tmp_path / RUNS).read_text().startswith(lines)
    assert bits(run_sweep(CONFIG, POINTS, corpus, tmp_path, Progress())) == bits(whole)
    assert len(read_runs(tmp_path)) == len(POINTS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--executor", "spark://a:1"], "--executor spark://a:1 is no cluster; pass dask://HOST:PORT or ray://HOST:PORT"),
        (["--executor", "dask://a:1", "--workers", "2"], "--workers 2 are of this machine; leave it or --executor out"),
    ],
)  # fmt: skip
def test_mistakes(words, said, text, tmp_path, capsys):
    small = ["--schemes", "fp32", "--steps", "2", "--widths", "16", "--data", str(text), "--quiet"]
    assert main(["sweep", *small, "--out", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / RUNS).exists()


def kill_when(process, condition):
    """Kill a process as soon as a condition holds."""

    def kill():
        wait_for(condition, [process])
        process.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow  # processes import torch
def test_a_killed_dask_worker_costs_no_run(tmp_path, corpus):
    pytest.importorskip("distributed")
    points = [point._replace(steps=60) for point in POINTS]
    local = run_sweep(CONFIG, points, corpus, tmp_path / "local", Progress())
    folder, done_at_death = tmp_path / "runs", []

    def is_under_way():
        done_at_death[:] = read_runs(folder) if folder.exists() else []
        return len(done_at_death) >= 2

    with dask_cluster(tmp_path) as (url, workers):
        thread = kill_when(workers[0], is_under_way)
        runs = run_sweep(CONFIG, points, corpus, folder, Progress(), executor=url)
        thread.join()
        assert bits(runs) == bits(local) and len(read_runs(folder)) == 8
        # Both workers had runs then, and one alone is left.
        assert len(done_at_death) <= 6 and (workers[0].wait(), workers[1].poll()) == (-signal.SIGKILL, None)


@pytest.mark.slow  # processes import torch
def test_dask_says_what_is_wrong(tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(executors, "TIMEOUT", 2)
    with dask_cluster(tmp_path, 0) as (url, _):
        refused(
            "no cluster with workers answers .Only 0/1 workers arrived after 2",
            open_tasks(None, url).__enter__,
            error=DeviceError,
        )
    monkeypatch.undo()
    with dask_cluster(tmp_path / "one", 1) as (url, workers):
        with pytest.raises(ValueError, match="task 3 is wrong") as caught, open_tasks(ValueError, url) as tasks:
            list(tasks.each_done(wrong, [3]))
        assert "in wrong\n" in caught.value.__notes__[0]
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt), open_tasks(None, url) as tasks:
            tasks.submit(slept, 600)
            raise KeyboardInterrupt
        assert time.monotonic() - begin < 60


COMMAND = ["sweep", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "2", "--widths", "16",
           "--schemes", "fp32,e8m3", "--lr", "1e-3,1e-2", "--steps", "4", "--seeds", "0..1", "--quiet"]  # fmt: skip


@pytest.mark.slow  # processes import torch
def test_ctrl_c_of_the_command_on_dask_leaves_what_is_done(tmp_path, text):
    pytest.importorskip("distributed")
    out = tmp_path / "out"
    words = [sys.executable, "-m", "fmtsim", *COMMAND, "--steps", "400", "--data", str(text), "--out", str(out)]
    with dask_cluster(tmp_path, 1) as (url, workers):
        process = faults.start([*words, "--executor", url])
        wait_for(lambda: (out / RUNS).exists(), [process, *workers])
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130 and "the same command goes on" in str(said)
        assert 1 <= len(read_runs(out)) < 8 and workers[0].poll() is None


@pytest.mark.slow  # processes import torch
def test_a_killed_ray_worker_costs_no_run(tmp_path, corpus, whole):
    pytest.importorskip("ray")
    pids = tmp_path / "pids"
    pids.mkdir()
    with ray_cluster(tmp_path) as url:
        assert bits(run_sweep(CONFIG, POINTS, corpus, tmp_path / "runs", Progress(), executor=url)) == bits(whole)

        def kill():
            while not (seen := [int(path.stem) for path in pids.iterdir()]):
                time.sleep(0.05)
            os.kill(seen[0], signal.SIGKILL)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        with open_tasks(str(pids), url) as tasks:
            assert sorted(task for task, _ in tasks.each_done(slept, [2.0, 2.1, 2.2, 2.3])) == [2.0, 2.1, 2.2, 2.3]
        thread.join()
        assert len(list(pids.iterdir())) >= 3  # the killed process, and those that did the work
        with pytest.raises(ValueError, match="task 3 is wrong") as caught, open_tasks(ValueError, url) as tasks:
            list(tasks.each_done(wrong, [3]))
        assert "in wrong\n" in caught.value.__notes__[0]


@pytest.mark.slow  # processes import torch
def test_the_command_on_dask(tmp_path, text, capsys):
    pytest.importorskip("distributed")
    words = [*COMMAND, "--data", str(text), "--json"]
    with dask_cluster(tmp_path) as (url, _):
        assert main([*words, "--out", str(tmp_path / "a"), "--executor", url]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main([*words, "--out", str(tmp_path / "b"), "--workers", "1"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert there["groups"] == here["groups"] and there["runs"] == 8
