# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: each run is written as soon as it ends, and a sweep that goes on trains the missing runs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.gemm.targets.doubts import collected_guesses
from fmtsim.lab.analysis.one_step import deterministic
from fmtsim.lab.training.corpus import Corpus
from fmtsim.lab.training.loop import rehearse
from fmtsim.lab.training.models import source_digest
from fmtsim.lab.training.sweep import Point, SweepConfig, SweepRun, scheme_of, train_point
from fmtsim.recipes.serialization import recipe_to_dict
from fmtsim.support.errors import ArgumentError, DataError
from fmtsim.support.executors import AnyExecutor, open_tasks
from fmtsim.support.files import write_file, write_folder
from fmtsim.support.progress import Progress
from fmtsim.support.records import parse_json, read_file

RUNS, SETTINGS = "runs.jsonl", "sweep.json"


def run_sweep(
    config: SweepConfig, points: Sequence[Point], corpus: Corpus, out: Path, progress: Progress, workers: int = 1,
    executor: AnyExecutor = None,
) -> list[SweepRun]:  # fmt: skip
    """Train the points whose runs a folder lacks; return the runs of all points, in the order of ``points``.

    This process writes each run as a line of ``runs.jsonl`` as soon as the run ends. A run has one CPU thread, so its
    bits do not depend on the number of processes: ``workers`` processes of this machine, or the workers of
    ``executor`` (``concurrent.futures.Executor``, ``dask://HOST:PORT``, ``ray://HOST:PORT``).

    Raises:
        ArgumentError: The folder holds a sweep of other settings; the message has the first one that differs.
        DataError: A file of the folder cannot be read or written.
        DeviceError: A process died, or no cluster answers.
    """
    _check_settings(out, config, corpus, {point.scheme for point in points})
    runs = {run.point: run for run in read_runs(out)}
    waiting = [point for point in points if point not in runs]
    if waiting:
        first = {point.scheme: point for point in reversed(waiting)}
        with open_tasks((config, corpus), executor, workers=min(workers, len(waiting)), threads=1) as tasks:
            for point in first.values():  # options that do not fit fail here, and kernels are compiled once
                with collected_guesses(), deterministic(config.device):
                    rehearse(config.train_config(point._replace(steps=1)))
            progress.stage("runs", len(waiting))
            for done, (_, run) in enumerate(tasks.each_done(_train, waiting), 1):
                runs[run.point] = run
                write_file(out / RUNS, "".join(finished.to_line() for finished in runs.values()))
                progress.step(done, f"{run.point.scheme} lr {run.point.lr:g}: {run.final_loss:.3f}")
    return [runs[point] for point in points]


def read_runs(folder: Path) -> list[SweepRun]:
    """Return the runs of a folder; a last line that was cut short does not count.

    Raises:
        DataError: A line is no run.
    """
    path = folder / RUNS
    text = read_file(path, DataError).decode("utf-8", "replace") if path.exists() else ""
    whole = text.splitlines(keepends=True)
    runs = []
    for number, line in enumerate(whole, 1):
        if not line.endswith("\n"):
            break
        try:
            runs.append(SweepRun.of_line(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path}, line {number} is no run ({error}); delete the line, or choose another --out"
            ) from None
    return runs


def _check_settings(out: Path, config: SweepConfig, corpus: Corpus, schemes: Iterable[str]) -> None:
    """Write what decides the bits of a sweep, or compare it with what the folder has."""
    path = out / SETTINGS
    now = {
        "fmtsim": fmtsim.__version__, "torch": torch.__version__, **asdict(config),
        "architecture_sha256": source_digest(config.architecture), "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
    }  # fmt: skip
    definitions = {name: _definition(name) for name in sorted(schemes)}
    try:
        before = parse_json(path.read_text(encoding="utf-8")) if path.exists() else now | {"schemes": {}}
        earlier = before.pop("schemes")
        pairs = [(f"scheme {name}", earlier[name], definitions[name]) for name in definitions if name in earlier]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} is not of a sweep ({error}); delete it, or choose another --out") from None
    for name, old, new in [*((name, before.get(name), value) for name, value in now.items()), *pairs]:
        if json.loads(json.dumps(new)) != old:
            raise ArgumentError(
                f"{out} holds a sweep of another {name} ({old!r:.60}, not {new!r:.60}); choose another --out, or "
                "pass the same options"
            )
    write_folder(out, {SETTINGS: json.dumps(now | {"schemes": earlier | definitions}, indent=1) + "\n"})


def _definition(name: str) -> Any:
    scheme = scheme_of(name)
    return name if scheme.recipe is None else recipe_to_dict(scheme.recipe)


def _train(shared: tuple[SweepConfig, Corpus], point: Point) -> SweepRun:
    return train_point(shared[0], point, shared[1])
