# SPDX-License-Identifier: Apache-2.0
"""Claims at the size of a GPU: trainings that share it, each kept as a file, bounds that are written down before them.

``DIR/plan.json`` is written before the first training: claims, bounds, settings, seeds and the rule by which the run
ends. ``DIR/trainings`` gets a file for each training that ended. The same command goes on where it was stopped.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmtsim.lab.training.sweep import SweepRun
from fmtsim.recipes.recipe import Recipe
from fmtsim.recipes.serialization import recipe_to_dict
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from fmtsim.support.executors import AnyExecutor, Tasks, open_tasks
from fmtsim.support.files import write_file
from fmtsim.support.progress import Progress
from fmtsim.support.records import parse_json, read_file
from studies.claims.claim import Claim, Tell
from studies.claims.experiment import SHARING
from studies.claims.run import Result, run_claim, seeded

PLAN, TRAININGS = "plan.json", "trainings"
RULE = "every training runs its steps to the end; none begins after the budget; a claim counts the seeds that ended"


class _Training(NamedTuple):
    """Hold a training's function and settings, and name its file."""

    train: Callable[..., Any]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The file's name: equal functions and settings have one."""
        text = repr((self.train.__qualname__, sorted(self.settings.items())))
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def run_on_card(
    claims: Sequence[Claim], folder: Path, progress: Progress, *, device: str = "cuda", budget: float | None = None,
    seeds: int | None = None, first_seed: int = 0, workers: int = 8, executor: AnyExecutor = None,
) -> list[Result]:  # fmt: skip
    """Run claims at the size of a GPU, and return their results over the seeds whose trainings have ended.

    Args:
        claims: Those that have such a size (``Claim.card``).
        folder: Where the plan and the trainings are kept; one that has them goes on.
        progress: Told of trainings.
        device: That of the trainings.
        budget: Seconds after which no training begins; None for no limit.
        seeds: How many, None for as many as each claim asks for.
        first_seed: The first of them.
        workers: Processes that share the device.
        executor: What runs the trainings instead of these.

    Raises:
        ArgumentError: A claim has no such size.
        DataError: The folder has a plan with other claims, bounds or settings, or a damaged file.
    """
    without = [claim.name for claim in claims if not claim.card]
    if without:
        raise ArgumentError(f"{', '.join(without)}: no size for a GPU; leave --device or these claims out")
    sized = [
        replace(
            claim,
            settings=tuple((dict(claim.settings) | dict(claim.card)).items()),
            recorded=claim.recorded_on_card or claim.recorded,
        )
        for claim in claims
    ]
    every = {claim.name: list(seeded(claim, seeds, first_seed)) for claim in sized}
    _begin(folder, sized, device, every)
    runs = [  # first seeds before second ones, as far as their threads are in turn
        (claim, values)
        for row in zip_longest(*every.values())
        for claim, values in zip(sized, row, strict=True)
        if values is not None
    ]  # fmt: skip
    threads = ThreadPoolExecutor(len(runs))  # they wait for trainings, which other processes run
    try:
        with open_tasks(device, executor, workers=workers, threads=1) as tasks:
            share = _Sharing(tasks, folder / TRAININGS, progress, None if budget is None else time.time() + budget)
            results = list(threads.map(lambda run: share.measured(*run), runs))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return [_together(claim, [r for (of, _), r in zip(runs, results, strict=True) if of is claim]) for claim in sized]


def _together(claim: Claim, results: Sequence[Result]) -> Result:
    """Return the result over the seeds that ended."""
    ended = [result for result in results if not result.error]
    error = "" if ended else next(result.error for result in results)
    runs = tuple(run for result in ended for run in result.runs)
    return Result(claim=claim, runs=runs, seconds=max(result.seconds for result in results), error=error)


def _begin(folder: Path, claims: Sequence[Claim], device: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the plan, or compare it with the one that is there."""
    record = {
        claim.name: {
            "says": claim.says, "bounds": claim.bounds,
            "seeds": [seed for values in runs[claim.name] for seed in values.get("seeds", [values.get("seed")])],
            "settings": {name: repr(value) for name, value in claim.settings},
            "expected": {
                one.name: [repr(bound) for bound in (one.low, one.high, one.part, one.standard_errors)]
                for one in claim.expected
            },
        }
        for claim in claims
    }  # fmt: skip
    path = folder / PLAN
    if path.exists():
        if _read(path).get("claims") != record:
            raise DataError(f"{path} has other claims, bounds or settings than this command; choose another --out")
        return
    (folder / TRAININGS).mkdir(parents=True, exist_ok=True)
    plan = {"claims": record, "rule": RULE, "begun": _now(), **_machine(device)}
    write_file(path, json.dumps(plan, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(read_file(path, DataError).decode("utf-8", "replace"), nan=True)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); delete it, or choose another --out") from None
    if not isinstance(record, dict):
        raise DataError(f"{path} is no record of this command; delete it, or choose another --out")
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _machine(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return {"card": name, "torch": torch.__version__}


def _train(device: str, task: tuple[_Training, float | None]) -> dict[str, Any] | None:
    """Run a training in any process, and return its record; None after the time at which none begins."""
    training, deadline = task
    if deadline is not None and time.time() > deadline:
        return None
    began = time.perf_counter()
    value = training.train(**training.settings, device=device)
    settings = {
        name: recipe_to_dict(x) if isinstance(x, Recipe) else repr(x) for name, x in training.settings.items()
    }  # ablations share a recipe's name
    return {
        "training": training.train.__qualname__, "settings": settings, "ended": _now(), **_machine(device),
        "seconds": round(time.perf_counter() - began, 1),
        "value": value.to_line() if isinstance(value, SweepRun) else value,
    }  # fmt: skip


class _Sharing:
    """Run the trainings of experiments that wait for them in threads; equal trainings run once.

    Args:
        tasks: What runs them.
        folder: Of their files.
        progress: Told of them.
        deadline: Time (of ``time.time``) after which none begins, None for no limit.
    """

    def __init__(self, tasks: Tasks, folder: Path, progress: Progress, deadline: float | None) -> None:
        self._tasks, self._folder, self._progress, self._deadline = tasks, folder, progress, deadline
        self._lock, self._written = threading.RLock(), 0
        self._begun: dict[str, Future[Any] | dict[str, Any]] = {}  # by file; a record where there is one

    def measured(self, claim: Claim, values: Mapping[str, Any]) -> Result:
        """Return the result of an experiment with one seed."""
        token = SHARING.set(self.run)
        try:
            return run_claim(replace(claim, settings=tuple(values.items()), seeds=1))
        finally:
            SHARING.reset(token)

    def run(self, tell: Tell, train: Callable[..., Any], tasks: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return what a training gives for each of several settings (``trainings`` of experiment.py)."""
        every = [_Training(train, dict(task)) for task in tasks]
        with self._lock:
            for training in every:
                if training.name not in self._begun:
                    self._begin(training)
            self._progress.stage("trainings", len(self._begun))
            self._progress.step(self._written)
        records = [self._record_of(training) for training in every]
        missing = sum(record is None for record in records)
        if missing:
            raise FmtsimError(
                f"the budget ended before {missing} of {len(every)} trainings; the same command with --out goes on"
            )
        return [_value_of(record["value"]) for record in records if record is not None]

    def _begin(self, training: _Training) -> None:
        """Read a training's file, or hand it to a process, and write the file as soon as it ends."""
        path = self._folder / training.name
        if path.exists():
            self._begun[training.name] = _read(path)
            self._written += 1
            return
        future = self._tasks.submit(_train, (training, self._deadline))
        self._begun[training.name] = future
        future.add_done_callback(lambda _: self._keep(training))

    def _keep(self, training: _Training) -> None:
        """Write a training's file at once; what broke it off, or the writing, is raised where its experiment waits."""
        with suppress(Exception):
            self._record_of(training)

    def _record_of(self, training: _Training) -> dict[str, Any] | None:
        """Wait for a training, write its file where there is none, and return what is in it."""
        begun = self._begun[training.name]
        record = begun if isinstance(begun, dict) else self._tasks.result(begun)
        with self._lock:
            path = self._folder / training.name
            if record is not None and not path.exists():
                write_file(path, json.dumps(record) + "\n")
                self._written += 1
                self._progress.step(self._written, f"{record['training']} {record['seconds']} s")
        return record  # type: ignore[no-any-return]


def _value_of(value: Any) -> Any:
    return SweepRun.of_line(value) if isinstance(value, str) else value
