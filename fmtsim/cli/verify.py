"""``fmtsim verify``: engines against the oracle and each other, products against recordings, a device against both."""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.cli.output import add_json_argument, format_table, jsonable, print_json, version_of
from fmtsim.errors import ArgumentError
from fmtsim.progress import make_progress

if TYPE_CHECKING:
    import torch

    from fmtsim.verify import Outcome
    from fmtsim.verify.gemm import Replay
    from fmtsim.verify.workers import Done

MISMATCH = 1
PACKAGES = ("fmtsim", "torch", "numpy", "numba", "cuda-core", "cuda-bindings")
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", nargs="?", choices=("casts", "gemm"),
                        help="casts (default), or matrix products; both where --device is given")  # fmt: skip
    parser.add_argument("--device", metavar="NAME", help="check this device, cuda or cuda:1: its casts against the "
                        "oracle and the CPU's engines, its products of every unit against the CPU's")  # fmt: skip
    parser.add_argument("--vectors", action="append", metavar="DIR", default=[],
                        help="gemm: a folder of mtc_*.npz, probe_*.npz or recorded calls; may be repeated")  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="gemm: compare about N outputs of each set")
    parser.add_argument("--format", action="append", metavar="NAME", dest="formats",
                        help="check this format alone; may be repeated (default: all listed formats)")  # fmt: skip
    parser.add_argument("--exhaustive", action="store_true",
                        help="all 2**32 float32 inputs of e4m3, e5m2, bf16, fp16, e2m1: minutes for each")  # fmt: skip
    parser.add_argument("--workers", type=int, metavar="N", help="processes that share the checks (default 1; with "
                        "--device as many as cores and the device's memory allow, 16 at most)")  # fmt: skip
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was found to a JSON file as well")
    parser.add_argument("--plant-error", action="store_true", help=argparse.SUPPRESS)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; 0 where all bits agree, 1 where one does not."""
    parts = _parts(arguments)
    _check(arguments, parts)
    from fmtsim.verify import workers
    from fmtsim.verify.device import described, device_of

    device = device_of(arguments.device) if arguments.device else None
    count = workers.default_workers(device) if arguments.workers is None else arguments.workers
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
        found = workers.run(job, tasks, count, lambda name, done: progress.step(done, name))
    seconds = time.perf_counter() - start
    reports = {part: _REPORTS[part](found[part], device) for part in parts}
    record = {"device": described(device), **reports} if device is not None else reports[parts[0]]
    if arguments.json:
        print_json(record)
    else:
        _print_all(arguments, found, reports, count, seconds)
    if arguments.record is not None:
        _write(arguments.record, record, count, seconds)
    return MISMATCH if any(report["mismatches"] for report in reports.values()) else 0


def _print_all(
    arguments: argparse.Namespace, found: "dict[str, list[Done]]", reports: dict[str, Any], workers: int, seconds: float
) -> None:
    """Print the table of each part, and one of all parts where there are several."""
    if "casts" in found:
        _print_casts([done.found for done in found["casts"]], reports["casts"], arguments.exhaustive)
    if "casts" in found and "gemm" in found:
        print()
    if "gemm" in found:
        _print_gemm(_replays(found["gemm"]), reports["gemm"]["seconds"])
    if len(reports) > 1:
        print("\n" + _total(reports))
        verdict = "MISMATCHES" if any(report["mismatches"] for report in reports.values()) else "all bits agree"
        print(f"\n{seconds:.0f} s with {workers} process{'es' if workers > 1 else ''}; {verdict}")


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


def _write(path: Path, record: dict[str, Any], workers: int, seconds: float) -> None:
    """Write a record with what it takes to make it again."""
    about = {
        "command": " ".join(["fmtsim", *sys.argv[1:]]), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version_of(name) for name in PACKAGES}, "workers": workers, "wall_seconds": seconds,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jsonable(about | record), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _parts(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return which halves of the command run."""
    if arguments.what is not None:
        return (arguments.what,)
    if not arguments.device or arguments.formats or arguments.exhaustive:
        return ("casts",)
    return ("casts", "gemm")


def _check(arguments: argparse.Namespace, parts: tuple[str, ...]) -> None:
    """Refuse arguments of a half that does not run, and gemm with nothing to compare."""
    if arguments.workers is not None and arguments.workers < 1:
        raise ArgumentError(f"--workers {arguments.workers} is not possible; choose 1 or more")
    names = {"gemm": ("formats", "exhaustive"), "casts": ("vectors", "limit")}
    for name in (name for part in parts if len(parts) == 1 for name in names[part]):
        if getattr(arguments, name):
            option = "--format" if name == "formats" else f"--{name}"
            raise ArgumentError(f"{option} has no meaning for fmtsim verify {parts[0]}; leave it out")
    if "gemm" in parts and not arguments.vectors and not arguments.device:
        raise ArgumentError("fmtsim verify gemm needs recordings or a device; pass --vectors DIR, or --device cuda")


def _report_casts(found: "list[Done]", device: "torch.device | None") -> dict[str, Any]:
    from fmtsim.verify.outcome import engines

    outcomes = [done.found for done in found]
    return {
        "engines": list(engines(device)), "seconds": sum(done.seconds for done in found),
        "cases": sum(outcome.cases for outcome in outcomes),
        "mismatches": sum(outcome.mismatches for outcome in outcomes),
        "outcomes": [outcome.to_dict() for outcome in outcomes],
    }  # fmt: skip


def _replays(found: "list[Done]") -> "list[Replay]":
    from fmtsim.verify.gemm import merged

    return merged(done.found for done in found)


def _report_gemm(found: "list[Done]", device: "torch.device | None") -> dict[str, Any]:
    replays = _replays(found)
    return {
        "seconds": sum(done.seconds for done in found), "outputs": sum(replay.outputs for replay in replays),
        "mismatches": sum(replay.mismatches for replay in replays), "sets": [replay.to_dict() for replay in replays],
    }  # fmt: skip


_REPORTS = {"casts": _report_casts, "gemm": _report_gemm}


def _print_casts(outcomes: "list[Outcome]", report: dict[str, Any], exhaustive: bool) -> None:
    failed = [outcome for outcome in outcomes if outcome.mismatches]
    print(_summary(outcomes, exhaustive))
    _print_failures(failed)
    verdict = "MISMATCHES" if failed else "all bits agree"
    print(f"\nengines: {', '.join(report['engines'])}; {report['seconds']:.0f} s; {verdict}")


def _print_gemm(found: "list[Replay]", seconds: float) -> None:
    failed = [replay for replay in found if replay.mismatches]
    print(_gemm_table(found))
    for replay in failed[:SHOWN]:
        count = f"{replay.mismatches:,} of {replay.outputs:,} differ; " if replay.outputs else ""
        guesses = f" ({replay.in_guesses:,} of these where the order of sums is a guess)" if replay.in_guesses else ""
        print(f"\n{replay.set}: {count}{replay.first}{guesses}")
    outputs = sum(replay.outputs for replay in found)
    verdict = "MISMATCHES" if failed else "all bits agree"
    print(f"\n{len(found)} sets, {outputs:,} outputs; {seconds:.0f} s; {verdict}")


def _gemm_table(found: "list[Replay]") -> str:
    rows = []
    for replay in found:
        cases = f"{replay.cases:,}" + (f" of {replay.cases + replay.skipped:,}" if replay.skipped else "")
        plan = ", ".join(f"{count} {basis}" for basis, count in replay.plans) or "-"
        rows.append(
            (replay.set, replay.machine, cases, f"{replay.outputs:,}", f"{replay.mismatches:,}", plan,
             f"{replay.seconds:.1f}")
        )  # fmt: skip
    return format_table(("set", "machine", "cases", "outputs", "mismatches", "plan", "seconds"), rows, left=(0, 1, 5))


def _summary(outcomes: "list[Outcome]", each: bool) -> str:
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


def _print_failures(failed: "list[Outcome]") -> None:
    for outcome in failed[:SHOWN]:
        print(
            f"\n{outcome.check} {outcome.format}: {outcome.mismatches:,} of {outcome.cases:,} differ; {outcome.first}"
        )
    if len(failed) > SHOWN:
        print(f"\n... and {len(failed) - SHOWN} more formats; --json has all of them")
