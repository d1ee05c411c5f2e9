# SPDX-License-Identifier: Apache-2.0
"""``fmtsim verify``: engines against the oracle and each other, products against recordings, a device against both."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fmtsim.lab.cli.options import check_positive
from fmtsim.lab.cli.output import MISMATCH, answer, format_table, origin, versions_of, write_json
from fmtsim.lab.verify import Outcome, workers
from fmtsim.lab.verify.device import described, device_of
from fmtsim.lab.verify.gemm import Replay, merged
from fmtsim.lab.verify.outcome import engines
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_folder
from fmtsim.support.progress import make_progress

PACKAGES = ("fmtsim", "torch", "numpy", "numba", "cuda-core", "cuda-bindings")
SHOWN = 20


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; 0 where all bits agree, 1 where one does not."""
    parts = _parts(arguments)
    _check(arguments, parts)
    if arguments.record is not None:
        check_folder(arguments.record.parent, "--record")

    device = device_of(arguments.device) if arguments.device else None
    number = workers.default_workers(device) if arguments.workers is None else arguments.workers
    if device is not None and not arguments.json:
        print(f"{described(device)}\n")
    names = tuple(arguments.formats) if arguments.formats else None
    job = workers.Job(
        parts, device, names, arguments.exhaustive, tuple(arguments.vectors), arguments.limit, arguments.plant_error
    )
    start = time.perf_counter()
    tasks = job.tasks()
    with make_progress(None, transient=True) as progress:
        progress.stage("checks", sum(map(len, tasks.values())))
        found = workers.run(job, tasks, number, lambda name, done: progress.step(done, name))
    found |= {"gemm": merged(found["gemm"])} if "gemm" in found else {}
    seconds = time.perf_counter() - start
    reports = {part: _REPORTS[part](found[part], device) for part in parts}
    record = {"device": described(device), **reports} if device is not None else reports[parts[0]]
    answer(arguments, record, lambda: _text(arguments, found, reports, number, seconds))
    if arguments.record is not None:
        about = {**origin(), "versions": versions_of(PACKAGES), "workers": number, "wall_seconds": seconds}
        write_json(arguments.record, about | record)
    return MISMATCH if any(report["mismatches"] for report in reports.values()) else 0


def _text(
    arguments: argparse.Namespace, found: dict[str, list[Any]], reports: dict[str, Any], workers: int, seconds: float
) -> str:
    """Return the table of each part, and one of all parts where there are several."""
    parts = []
    if "casts" in found:
        parts.append(_casts_text(found["casts"], reports["casts"], arguments.exhaustive))
    if "gemm" in found:
        parts.append(_gemm_text(found["gemm"], reports["gemm"]["seconds"]))
    if len(reports) > 1:
        ending = f"{seconds:.0f} s with {workers} process{'es' if workers > 1 else ''}"
        parts += [_total(reports), f"{ending}; {_verdict(any(report['mismatches'] for report in reports.values()))}"]
    return "\n\n".join(parts)


def _verdict(failed: object) -> str:
    return "MISMATCHES" if failed else "all bits agree"


def _total(reports: dict[str, Any]) -> str:
    """Return a table with a line for each part and one for all."""
    names = {"casts": ("outcomes", "cases"), "gemm": ("sets", "outputs")}
    rows = []
    for part, report in reports.items():
        checks, results = (report[name] for name in names[part])
        rows.append((part, len(checks), results, report["mismatches"], report["seconds"]))
    rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))))  # type: ignore[arg-type]
    lines = [(name, *(f"{number:,.0f}" for number in numbers)) for name, *numbers in rows]
    return format_table(("part", "checks", "results compared", "mismatches", "seconds of work"), lines)


def _parts(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return which halves of the command run."""
    if arguments.what is not None:
        return (arguments.what,)
    if not arguments.device or arguments.formats or arguments.exhaustive:
        return ("casts",)
    return ("casts", "gemm")


def _check(arguments: argparse.Namespace, parts: tuple[str, ...]) -> None:
    """Refuse arguments of a half that does not run, and gemm with nothing to compare."""
    check_positive(arguments, "workers")
    names = {"gemm": ("formats", "exhaustive"), "casts": ("vectors", "limit")}
    for name in (name for part in parts if len(parts) == 1 for name in names[part]):
        if getattr(arguments, name):
            option = "--format" if name == "formats" else f"--{name}"
            raise ArgumentError(f"{option} has no meaning for fmtsim verify {parts[0]}; leave it out")
    if "gemm" in parts and not arguments.vectors and not arguments.device:
        raise ArgumentError("fmtsim verify gemm needs recordings or a device; pass --vectors DIR, or --device cuda")


def _report_casts(outcomes: list[Outcome], device: torch.device | None) -> dict[str, Any]:
    return {
        "engines": list(engines(device)),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in ("seconds", "cases", "mismatches")},
        "outcomes": [outcome.to_dict() for outcome in outcomes],
    }  # fmt: skip


def _report_gemm(found: list[Replay], device: torch.device | None) -> dict[str, Any]:
    names = ("seconds", "outputs", "mismatches")
    totals = {name: sum(getattr(replay, name) for replay in found) for name in names}
    return {**totals, "sets": [replay.to_dict() for replay in found]}


_REPORTS: dict[str, Callable[..., dict[str, Any]]] = {"casts": _report_casts, "gemm": _report_gemm}


def _casts_text(outcomes: list[Outcome], report: dict[str, Any], exhaustive: bool) -> str:
    failed = [outcome for outcome in outcomes if outcome.mismatches]
    parts = [_summary(outcomes, exhaustive)]
    parts += [
        f"{each.check} {each.format}: {each.mismatches:,} of {each.cases:,} differ; {each.first}"
        for each in failed[:SHOWN]
    ]
    if len(failed) > SHOWN:
        parts.append(f"... and {len(failed) - SHOWN} more formats; --json has all of them")
    parts.append(f"engines: {', '.join(report['engines'])}; {report['seconds']:.0f} s; {_verdict(failed)}")
    return "\n\n".join(parts)


def _gemm_text(found: list[Replay], seconds: float) -> str:
    failed = [replay for replay in found if replay.mismatches]
    parts = [_gemm_table(found)]
    for replay in failed[:SHOWN]:
        number = f"{replay.mismatches:,} of {replay.outputs:,} differ; " if replay.outputs else ""
        guesses = (
            f" ({replay.in_guesses:,} of these where the accumulation order is a guess)" if replay.in_guesses else ""
        )
        parts.append(f"{replay.set}: {number}{replay.first}{guesses}")
    outputs = sum(replay.outputs for replay in found)
    parts.append(f"{len(found)} sets, {outputs:,} outputs; {seconds:.0f} s; {_verdict(failed)}")
    return "\n\n".join(parts)


def _gemm_table(found: list[Replay]) -> str:
    rows = []
    for replay in found:
        cases = f"{replay.cases:,}" + (f" of {replay.cases + replay.skipped:,}" if replay.skipped else "")
        plan = ", ".join(f"{count} {basis}" for basis, count in replay.plans) or "-"
        rows.append(
            (replay.set, replay.machine, cases, f"{replay.outputs:,}", f"{replay.mismatches:,}", plan,
             f"{replay.seconds:.1f}")
        )  # fmt: skip
    return format_table(("set", "machine", "cases", "outputs", "mismatches", "plan", "seconds"), rows, left=(0, 1, 5))


def _summary(outcomes: list[Outcome], each: bool) -> str:
    """Return a table with a line for each check, or for each check and format."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for outcome in outcomes:
        key = (outcome.check, outcome.format) if each else (outcome.check,)
        row = rows.setdefault(key, [0, 0, 0])
        for place, number in enumerate((1, outcome.cases, outcome.mismatches)):
            row[place] += number
    header = ("check", "format", "cases", "mismatches") if each else ("check", "formats", "cases", "mismatches")
    lines = [
        (*key, *(() if each else (str(count),)), f"{cases:,}", f"{mismatches:,}")
        for key, (count, cases, mismatches) in rows.items()
    ]
    return format_table(header, lines, left=(0, 1) if each else (0,))
