"""``fmtsim verify``: engines against the oracle and each other, products against recordings, a device against both."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fmtsim.cli.output import add_json_argument, format_table, print_json
from fmtsim.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from fmtsim.verify import Outcome, Task
    from fmtsim.verify.gemm import Replay

MISMATCH = 1
SHOWN = 20

Show = Callable[[str, float], None]


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
    parser.add_argument("--plant-error", action="store_true", help=argparse.SUPPRESS)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; 0 where all bits agree, 1 where one does not."""
    parts = _parts(arguments)
    _check(arguments, parts)
    device = None
    if arguments.device:
        from fmtsim.verify.device import described, device_of

        device = device_of(arguments.device)
        if not arguments.json:
            print(f"{described(device)}\n")
    halves = {"casts": _run_casts, "gemm": _run_gemm}
    reports = {part: halves[part](arguments, device) for part in parts}
    if arguments.json:
        both = {"device": described(device), **reports} if device is not None else reports[parts[0]]
        print_json(both)
    return MISMATCH if any(report["mismatches"] for report in reports.values()) else 0


def _parts(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return which halves of the command run."""
    if arguments.what is not None:
        return (arguments.what,)
    if not arguments.device or arguments.formats or arguments.exhaustive:
        return ("casts",)
    return ("casts", "gemm")


def _check(arguments: argparse.Namespace, parts: tuple[str, ...]) -> None:
    """Refuse arguments of a half that does not run, and gemm with nothing to compare."""
    names = {"gemm": ("formats", "exhaustive"), "casts": ("vectors", "limit")}
    for name in (name for part in parts if len(parts) == 1 for name in names[part]):
        if getattr(arguments, name):
            option = "--format" if name == "formats" else f"--{name}"
            raise ArgumentError(f"{option} has no meaning for fmtsim verify {parts[0]}; leave it out")
    if "gemm" in parts and not arguments.vectors and not arguments.device:
        raise ArgumentError("fmtsim verify gemm needs recordings or a device; pass --vectors DIR, or --device cuda")


def _run_casts(arguments: argparse.Namespace, device: "torch.device | None") -> dict[str, Any]:
    """Hold every engine to the oracle and to each other, print what was found, and return it."""
    from fmtsim.verify import default_tasks, exhaustive_tasks
    from fmtsim.verify.outcome import PlantedError, engines

    present = engines(device)
    if arguments.plant_error:  # to see the checks fail
        last = list(present)[-1]
        present[last] = PlantedError(present[last])
    plan = exhaustive_tasks if arguments.exhaustive else default_tasks
    tasks = plan(present, arguments.formats)
    start = time.perf_counter()
    with _progress(len(tasks)) as show:
        outcomes = [_run_task(task, index, show) for index, task in enumerate(tasks)]
    seconds = time.perf_counter() - start
    failed = [outcome for outcome in outcomes if outcome.mismatches]
    if not arguments.json:
        print(_summary(outcomes, arguments.exhaustive))
        _print_failures(failed)
        print(f"\nengines: {', '.join(present)}; {seconds:.0f} s; {'MISMATCHES' if failed else 'all bits agree'}")
    return {
        "engines": list(present), "seconds": seconds, "cases": sum(outcome.cases for outcome in outcomes),
        "mismatches": sum(outcome.mismatches for outcome in outcomes),
        "outcomes": [outcome.to_dict() for outcome in outcomes],
    }  # fmt: skip


def _run_gemm(arguments: argparse.Namespace, device: "torch.device | None") -> dict[str, Any]:
    """Run every unit on a device, and replay recordings; print what was found, and return it."""
    from fmtsim.verify.gemm import gemm_tasks
    from fmtsim.verify.units import planted, unit_tasks

    tasks = gemm_tasks(arguments.vectors, arguments.limit, device) if arguments.vectors else []
    if device is not None:
        tasks = [*(unit_tasks(device, planted) if arguments.plant_error else unit_tasks(device)), *tasks]
    start = time.perf_counter()
    found: list[Replay] = []
    with _progress(len(tasks)) as show:
        for index, task in enumerate(tasks):
            show(task.set, index)
            found.append(task.run(lambda share, task=task, index=index: show(task.set, index + share)))  # type: ignore[misc]
    seconds = time.perf_counter() - start
    if not arguments.json:
        _print_gemm(found, seconds)
    return {
        "seconds": seconds, "outputs": sum(replay.outputs for replay in found),
        "mismatches": sum(replay.mismatches for replay in found), "sets": [replay.to_dict() for replay in found],
    }  # fmt: skip


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


def _run_task(task: "Task", index: int, show: Show) -> "Outcome":
    name = f"{task.check} {task.format}"
    show(name, index)
    return task.run(lambda share: show(name, index + share))


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


@contextmanager
def _progress(total: int) -> Iterator[Show]:
    """Show a progress bar on a terminal: by rich where it is installed, else a plain line."""
    if not sys.stderr.isatty():
        yield lambda name, done: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield lambda name, done: print(f"\r\033[K{done / total:4.0%} {name}", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr)
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda name, done: progress.update(bar, completed=done, description=name)
