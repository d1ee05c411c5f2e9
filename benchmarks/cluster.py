# SPDX-License-Identifier: Apache-2.0
"""Time a sweep on Dask workers of this machine, one thread each: several workers over one, in turns.

python benchmarks/cluster.py [--workers 2] [--runs 32] [--steps 100] [--width 64] [--repeats 3]
                             [--default] [--record FILE]

With --sleep SECONDS the tasks only sleep: what the cluster and fmtsim take for themselves, on a machine that is busy.
With --default Dask keeps its settings: a profiler and ticks, which take 5 % of two cores with a scheduler on them.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import dask
import torch
from distributed import Client, LocalCluster

from fmtsim.lab.cli.output import versions_of, write_json
from fmtsim.lab.training.corpus import load_corpus
from fmtsim.lab.training.sweep import SweepConfig, points_of, run_sweep
from fmtsim.support.executors import open_tasks
from fmtsim.support.progress import Progress

QUIET = {"distributed.worker.profile.enabled": False, "distributed.admin.tick.interval": "1s"}  # as docs/sweep.md says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"workers": 2, "runs": 32, "steps": 100, "width": 64, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sleep", type=float)
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    dask.config.set({} if given.default else QUIET)
    config = SweepConfig()
    corpus = load_corpus(None, config.context)
    points = points_of(["bf16"], [4e-3], [given.width], [given.steps], range(given.runs))
    load, counts = os.getloadavg()[0], (1, given.workers)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    losses = []
    for _ in range(given.repeats):
        for count in counts:
            with (
                LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None) as cluster,
                tempfile.TemporaryDirectory() as folder,
            ):
                url = cluster.scheduler_address.replace("tcp://", "dask://")
                warm = points_of(["bf16"], [4e-3], [given.width], [1], range(2 * count))
                with Client(cluster) as client:  # every worker imports torch and compiles before it is timed
                    client.wait_for_workers(count)
                if given.sleep:
                    with open_tasks(None, url) as tasks:
                        list(tasks.each_done(lambda _, seconds: time.sleep(seconds), [0.0] * 2 * count))
                        began = time.perf_counter()
                        list(tasks.each_done(lambda _, seconds: time.sleep(seconds), [given.sleep] * given.runs))
                        seconds[count].append(time.perf_counter() - began)
                    continue
                run_sweep(config, warm, corpus, Path(folder, "warm"), Progress(), executor=url)
                began = time.perf_counter()
                runs = run_sweep(config, points, corpus, Path(folder, "sweep"), Progress(), executor=url)
                seconds[count].append(time.perf_counter() - began)
                losses.append([run.losses for run in runs])
    medians = {count: statistics.median(times) for count, times in seconds.items()}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.2f} before, "
          f"torch {torch.__version__}")  # fmt: skip
    for count, times in seconds.items():
        print(f"{count} workers: {medians[count]:.1f} s (of {', '.join(f'{t:.1f}' for t in times)})")
    equal = "" if given.sleep else f"; losses equal: {all(x == losses[0] for x in losses)}"
    print(f"{medians[1] / medians[given.workers]:.2f} times as fast{equal}")
    if given.record:
        record = vars(given) | {"record": None, "seconds": seconds, "load": load, "cores": os.cpu_count()}
        write_json(given.record, record | {"versions": versions_of(("fmtsim", "torch", "distributed"))})


if __name__ == "__main__":
    main()
