# SPDX-License-Identifier: Apache-2.0
"""``fmtsim bench gpu``: the CUDA engine against copies and native products of the same run, with its targets."""

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from fmtsim.lab.bench import gpu, gpu_others
from fmtsim.lab.bench.gpu import Result
from fmtsim.lab.bench.gpu_cases import UNITS
from fmtsim.lab.bench.gpu_others import Other
from fmtsim.lab.cli.options import chosen_cases
from fmtsim.lab.cli.output import at_work, each_shown, format_table, origin, versions_of
from fmtsim.support.errors import DeviceError

PACKAGES = ("fmtsim", "torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "triton")


def measured(
    arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], Callable[[], str]]:
    """Return the record and how it reads; ``keep`` gets what there is after every case: a run may be cut short."""
    import fmtsim.engines.cuda

    reason = fmtsim.cuda.why_unavailable()
    if reason is not None:
        raise DeviceError(f"the CUDA engine cannot run: {reason}")

    repeats, start = max(arguments.repeats, 3), time.perf_counter()
    record: dict[str, Any] = {"machine": machine()}

    cases = chosen_cases(gpu.CASES, arguments.only)
    at_work("compiling kernels")
    gpu.compile_ahead(cases)
    compiling = time.perf_counter() - start
    results: list[Result] = []
    failed: dict[str, str] = {}
    for case in each_shown(cases):
        _measured(case, repeats, results, failed)
        record.update(compiling_seconds=compiling, results=[result.to_dict() for result in results], failed=failed)
        keep(record)
    at_work("other software")
    others = list(gpu_others.measured(repeats, gpu.ELEMENTS, gpu.SIDE)) if arguments.only == "*" else []
    told = [other if isinstance(other, str) else other.to_dict() for other in others]
    record.update(others=told, rows=[row for row, *_ in rows_of(results)], seconds=time.perf_counter() - start)
    return record, lambda: _text(record, results, failed, others)


def _measured(case: Any, repeats: int, results: list[Result], failed: dict[str, str]) -> None:
    """Measure a case, or say why it could not be measured: the others are still worth it."""
    try:
        results.append(gpu.measure(case, repeats=repeats))
    except Exception as error:  # whatever it is
        failed[case.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    """Return what a measurement depends on, and how to make it again."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name, "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory, "cuda": torch.version.cuda, "python": platform.python_version(),
        "platform": platform.platform(), **versions_of(PACKAGES), **origin(),
    }  # fmt: skip


def _text(record: dict[str, Any], results: list[Result], failed: dict[str, str], others: list[Other | str]) -> str:
    about = record["machine"]
    names = ("torch", "cuda", "cuda-core", "nvidia-cuda-nvrtc", "date")
    parts = [", ".join([about["device"], *(f"{name} {about[name]}" for name in names)]) + "\n", table(results)]
    parts += [f"{name}: not measured, {reason}" for name, reason in failed.items()]
    parts += ["\n" + others_table(others)] if others else []
    seconds = f"\n{record['seconds']:.0f} s, of which {record['compiling_seconds']:.0f} s compiled kernels"
    return "\n".join([*parts, "\n" + summary(results), seconds])


def table(results: list[Result]) -> str:
    """Return a line for each case: what it reached, and whether that was the target."""
    header = ("work", "reached", "unit", "target", "stretch", "met", "ms")
    return format_table(header, (_line(result) for result in results), left=(0, 2))


def summary(results: list[Result]) -> str:
    """Return a line for each row of goals: what its worst case reached, the goal, and what is known of others."""
    header = ("row", "cases", "worst case", "reached", "unit", "target", "stretch", "met", "elsewhere")
    lines = []
    for record, result, count in rows_of(results):
        name, *rest = _line(result)
        lines.append((record["row"], str(count), name, *rest[:-1], result.case.row.elsewhere))
    return format_table(header, lines, left=(0, 2, 4, 8))


def rows_of(results: list[Result]) -> list[tuple[dict[str, Any], Result, int]]:
    """Return each row's record, its worst result and the number of its cases."""
    found = []
    for row, result in gpu.worst(results).items():
        count = sum(each.case.row == row for each in results)
        found.append((result.to_dict() | {"cases": count, "elsewhere": row.elsewhere}, result, count))
    return found


def others_table(others: list[Other | str]) -> str:
    """Return a line for each other software, and one for each that did not run."""
    header = ("row", "software", "reached", "fmtsim", "unit", "differing results")
    lines = [
        (each.row.name, each.software, _shown(each.value), _shown(each.ours), _unit(each.row.kind),
         f"{each.differing:,}")
        for each in others if not isinstance(each, str)
    ]  # fmt: skip
    said = [each for each in others if isinstance(each, str)]
    return "\n".join([format_table(header, lines, left=(0, 1, 4)), *said] if lines else said)


def _line(result: Result) -> list[str]:
    row, value = result.case.row, result.value
    met = {True: "pass", False: "MISS", None: "-"}[row.reaches(value, row.least)]
    met = "stretch" if row.reaches(value, row.stretch) else met
    goals = ["-" if goal is None else f"{goal:g}" for goal in (row.least, row.stretch)]
    return [result.case.name, _shown(value), _unit(row.kind), *goals, met, f"{1e3 * result.seconds:.3f}"]


def _shown(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _unit(kind: Any) -> str:
    return UNITS[kind]
