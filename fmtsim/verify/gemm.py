"""Replay recorded matrix products through the public verbs and compare every bit."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fmtsim
from fmtsim.analysis.compare import compare
from fmtsim.errors import ArgumentError, DataError
from fmtsim.verify.recordings import Call, Dots, Recording, find_recordings, read_calls, read_dots

Advance = Callable[[float], None]
"""Called with the share of a set that is done, 0 to 1."""

ROWS = 1000  # dot products in one call of the verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Say what replaying one set of recordings gave.

    Args:
        set: Name of the file, and for library calls the kind of call.
        machine: The GPU with its unit, or the target.
        cases: Instructions' rows or library calls that were replayed; ``skipped`` were left out by a limit.
        outputs: Results compared.
        mismatches: Results whose bits differ; at least 1 where replaying raised an error.
        known, guessed: Calls whose order of sums is recorded for this very shape, and those where it is inferred.
        first: The first difference in hex, or the error.
    """

    set: str
    machine: str
    cases: int
    outputs: int
    mismatches: int
    skipped: int = 0
    known: int = 0
    guessed: int = 0
    seconds: float = 0.0
    first: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {name: getattr(self, name) for name in self.__slots__}


class GemmTask(NamedTuple):
    """One set of recordings, ready to be replayed."""

    set: str
    run: Callable[[Advance], Replay]


def gemm_tasks(folders: Sequence[str | Path], limit: int | None = None) -> list[GemmTask]:
    """Return a task for each set of recordings in some folders.

    Args:
        folders: Folders with files that ``fmtsim.verify.recordings`` describes.
        limit: Compare about so many results of each set: the first dot products, the cheapest calls (at least one).

    Raises:
        ArgumentError: the limit is not positive.
        DataError: a folder holds no recording, or a file cannot be read.
    """
    if limit is not None and limit < 1:
        raise ArgumentError(f"limit={limit} is not possible; choose 1 or more, or leave it out")
    tasks = []
    for recording in (found for folder in folders for found in find_recordings(folder)):
        if recording.kind != "calls":
            tasks.append(_task(recording.name, partial(_replay_dots, recording, limit)))
            continue
        groups: dict[str, list[Call]] = {}
        for call in read_calls(recording):
            groups.setdefault(call.group, []).append(call)
        for group, calls in groups.items():
            name = f"{recording.name}: {group}"
            tasks.append(_task(name, partial(_replay_calls, recording, name, calls, limit)))
    return tasks


def _task(name: str, replay: Callable[[Advance], Replay]) -> GemmTask:
    def run(advance: Advance) -> Replay:
        start = time.perf_counter()
        try:
            found = replay(advance)
        except DataError:
            raise
        except Exception as error:  # a set that cannot be replayed has failed, and the others are still worth running
            first = f"replaying raised {type(error).__name__}: {error}"
            found = Replay(set=name, machine="", cases=0, outputs=0, mismatches=1, first=first)
        advance(1.0)
        return dataclasses.replace(found, seconds=time.perf_counter() - start)

    return GemmTask(name, run)


def _replay_dots(recording: Recording, limit: int | None, advance: Advance) -> Replay:
    dots = read_dots(recording)
    count = dots.a.shape[0]
    rows = count if limit is None else min(limit, count)
    results = []
    for start in range(0, rows, ROWS):
        results.append(_dot_products(dots, slice(start, min(start + ROWS, rows))))
        advance((start + ROWS) / rows)
    found = compare(torch.cat(results), dots.d[:rows])
    machine = f"{dots.machine}, {dots.unit}"
    return Replay(set=recording.name, machine=machine, cases=rows, outputs=rows, mismatches=found.mismatches,
                  skipped=count - rows, first="" if found.equal else str(found.first))  # fmt: skip


def _dot_products(dots: Dots, rows: slice) -> Tensor:
    a, b = (x[rows].unsqueeze(1) for x in (dots.a, dots.b))
    c = None if dots.c is None else dots.c[rows].reshape(-1, 1, 1)
    d = fmtsim.mma(
        a, b, c, unit=dots.unit, a_format=dots.format, b_format=dots.format, accumulate=dots.accumulate
    )
    return d.reshape(-1).to(dots.d.dtype)


def _replay_calls(recording: Recording, name: str, calls: list[Call], limit: int | None, advance: Advance) -> Replay:
    target = recording.name.rpartition("_")[0].lower()
    chosen = _cheapest(calls, limit)
    outputs = mismatches = known = 0
    first = ""
    for done, call in enumerate(chosen):
        found = compare(replay_call(call, target), call.out)
        outputs += found.count
        mismatches += found.mismatches
        known += plan_is_known(call, target)
        first = first or ("" if found.equal else f"{call.label}, {found.first}")
        advance((done + 1) / len(chosen))
    return Replay(set=name, machine=target, cases=len(chosen), outputs=outputs, mismatches=mismatches,
                  skipped=len(calls) - len(chosen), known=known, guessed=len(chosen) - known, first=first)  # fmt: skip


def _cheapest(calls: list[Call], limit: int | None) -> list[Call]:
    """Return the calls with the fewest products until they have ``limit`` outputs together, in recorded order."""
    if limit is None:
        return calls
    room, chosen = limit, set()
    for call in sorted(calls, key=lambda call: call.out.numel() * call.a.shape[1]):
        if room <= 0:
            break
        chosen.add(id(call))
        room -= call.out.numel()
    return [call for call in calls if id(call) in chosen]
