# SPDX-License-Identifier: Apache-2.0
"""Runs of ``python -m benchmarks.suite gpu`` and ``layers``: the CUDA engine, and training steps under recipes."""

import argparse
import platform
import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.suite import gpu, layers, models
from benchmarks.suite.gpu import Other
from benchmarks.suite.gpu_cases import UNITS
from benchmarks.suite.models import HEAD, Sizes
from benchmarks.suite.timing import at_work, chosen_cases, each_shown, origin
from fmtsim.lab.cli.machine import processor_name
from fmtsim.lab.cli.options import check_device, check_positive
from fmtsim.lab.cli.output import format_items, format_table, versions_of
from fmtsim.support.errors import ArgumentError, DeviceError, FmtsimError
from fmtsim.support.table import Column

_GPU_PACKAGES = ("fmtsim", "torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "triton")
BENCH_SIZES = {
    "width": "of the models; by default what fits the device", "layers": "blocks of a model",
    "batch_size": "sequences of a step", "context": "tokens of a sequence",
}  # fmt: skip


def measured_gpu(
    arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], Callable[[], str]]:
    """Return the record and how it reads; ``keep`` gets what there is after every case: a run may be cut short."""
    import fmtsim.cuda

    reason = fmtsim.cuda.why_unavailable()
    if reason is not None:
        raise DeviceError(f"the CUDA engine cannot run: {reason}")

    repeats, start = max(arguments.repeats, 3), time.perf_counter()
    record: dict[str, Any] = {"machine": gpu_machine()}

    cases = chosen_cases(gpu.CASES, arguments.only)
    at_work("compiling kernels")
    gpu.compile_ahead(cases)
    compiling = time.perf_counter() - start
    results: list[gpu.Result] = []
    failed: dict[str, str] = {}
    for case in each_shown(cases):
        _measure_gpu_case(case, repeats, results, failed)
        record.update(compiling_seconds=compiling, results=[result.to_dict() for result in results], failed=failed)
        keep(record)
    at_work("other software")
    others = list(gpu.measure_others(repeats, gpu.ELEMENTS, gpu.SIDE)) if arguments.only == "*" else []
    records = [other if isinstance(other, str) else other.to_dict() for other in others]
    record.update(others=records, rows=[row for row, *_ in rows_of(results)], seconds=time.perf_counter() - start)
    return record, lambda: _gpu_text(record, results, failed, others)


def _measure_gpu_case(case: Any, repeats: int, results: list[gpu.Result], failed: dict[str, str]) -> None:
    """Measure a case, or say why it could not be measured: the others are still worth it."""
    try:
        results.append(gpu.measure(case, repeats=repeats))
    except Exception as error:  # whatever it is
        failed[case.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    torch.cuda.empty_cache()


def gpu_machine() -> dict[str, Any]:
    """Return what a measurement depends on, and how to make it again."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name, "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory, "cuda": torch.version.cuda, "python": platform.python_version(),
        "platform": platform.platform(), **versions_of(_GPU_PACKAGES), **origin(),
    }  # fmt: skip


def _gpu_text(
    record: dict[str, Any], results: list[gpu.Result], failed: dict[str, str], others: list[Other | str]
) -> str:
    about = record["machine"]
    names = ("torch", "cuda", "cuda-core", "nvidia-cuda-nvrtc", "date")
    parts = [", ".join([about["device"], *(f"{name} {about[name]}" for name in names)]) + "\n", gpu_table(results)]
    parts += [f"{name}: not measured, {reason}" for name, reason in failed.items()]
    parts += ["\n" + others_table(others)] if others else []
    seconds = f"\n{record['seconds']:.0f} s, of which {record['compiling_seconds']:.0f} s compiled kernels"
    return "\n".join([*parts, "\n" + gpu_summary(results), seconds])


def gpu_table(results: list[gpu.Result]) -> str:
    """Return a line for each case: what it reached, and whether that was the target."""
    header = ("work", "reached", "unit", "target", "stretch", "met", "ms")
    return format_table(header, (_gpu_line(result) for result in results), left=(0, 2))


def gpu_summary(results: list[gpu.Result]) -> str:
    """Return a line for each row of goals: what its worst case reached, the goal, and what is known of others."""
    header = ("row", "cases", "worst case", "reached", "unit", "target", "stretch", "met", "elsewhere")
    lines = []
    for record, result, count in rows_of(results):
        name, *rest = _gpu_line(result)
        lines.append((record["row"], str(count), name, *rest[:-1], result.case.row.elsewhere))
    return format_table(header, lines, left=(0, 2, 4, 8))


def rows_of(results: list[gpu.Result]) -> list[tuple[dict[str, Any], gpu.Result, int]]:
    """Return each row's record, its worst result and the number of its cases."""
    rows = []
    for row, result in gpu.worst(results).items():
        count = sum(r.case.row == row for r in results)
        rows.append((result.to_dict() | {"cases": count, "elsewhere": row.elsewhere}, result, count))
    return rows


def others_table(others: list[Other | str]) -> str:
    """Return a line for each other software, and one for each that did not run."""
    header = ("row", "software", "reached", "fmtsim", "unit", "differing results")
    lines = [
        (other.row.name, other.software, _shown(other.value), _shown(other.ours), UNITS[other.row.kind],
         f"{other.differing:,}")
        for other in others if not isinstance(other, str)
    ]  # fmt: skip
    said = [other for other in others if isinstance(other, str)]
    return "\n".join([format_table(header, lines, left=(0, 1, 4)), *said] if lines else said)


def _gpu_line(result: gpu.Result) -> list[str]:
    row, value = result.case.row, result.value
    met = {True: "pass", False: "MISS", None: "-"}[row.reaches(value, row.least)]
    met = "stretch" if row.reaches(value, row.stretch) else met
    goals = ["-" if goal is None else f"{goal:g}" for goal in (row.least, row.stretch)]
    return [result.case.name, _shown(value), UNITS[row.kind], *goals, met, f"{1e3 * result.seconds:.3f}"]


def _shown(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


_LAYER_PACKAGES = ("fmtsim", "torch", "transformers", "triton", "torchao")


def measured_layers(
    arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], Callable[[], str]]:
    """Return the record and how it reads; ``keep`` gets what there is after every case: a run may be cut short.

    A case that fails says why, and the others go on.
    """
    _check_layers(arguments)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    machine = {"target": arguments.target, "native": False if arguments.emulate else None} if arguments.target else {}
    options = {name: getattr(arguments, name) for name in BENCH_SIZES}
    sizes = {name: size.resized(**options) for name, size in layers.sizes_of(device).items()}
    cases = chosen_cases(layers.cases(arguments.recipes, device), arguments.only)
    absent = [] if arguments.recipes else [name for name in models.PEERS if name not in models.installed()]
    bench = layers.Bench(device, sizes, arguments.repeats, **machine)
    record: dict[str, Any] = {
        "machine": layers_machine(device), "sizes": {name: size.to_dict() for name, size in sizes.items()},
        "target": arguments.target, "emulated": arguments.emulate, "not_installed": absent,
    }  # fmt: skip
    results: list[layers.Result] = []
    failed: dict[str, str] = {}
    for case in each_shown(cases):
        try:
            results.append(bench.measure(case))
        except Exception as error:  # of compilers and other software, whatever it is
            said = str(error) if isinstance(error, FmtsimError) else f"{type(error).__name__}: {error}"
            failed[case.name] = textwrap.shorten(said, 300)
        record.update(results=[result.to_dict() for result in results], failed=failed)
        keep(record)
    return record, lambda: _layers_text(record, results, failed)


def _check_layers(arguments: argparse.Namespace) -> None:
    check_positive(arguments, *BENCH_SIZES)
    if arguments.emulate and arguments.target is None:
        raise ArgumentError("--emulate without --target emulates nothing; pass --target h200, too")
    if arguments.width is not None and arguments.width % HEAD:
        near = max(HEAD, arguments.width // HEAD * HEAD)
        raise ArgumentError(
            f"--width {arguments.width} is not a multiple of {HEAD}, the features of an attention head; choose {near}"
        )


def layers_machine(device: str) -> dict[str, Any]:
    """Return what a measurement depends on, and how to make it again."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()
    return {"device": name, "threads": torch.get_num_threads(), **versions_of(_LAYER_PACKAGES), **origin()}


def _layers_text(record: dict[str, Any], results: list[layers.Result], failed: dict[str, str]) -> str:
    machine = record["machine"]
    parts = [", ".join([machine["device"], *(f"{name} {machine[name]}" for name in ("torch", "transformers", "date"))])]
    for name in dict.fromkeys(result.case.model for result in results):
        size = Sizes(**record["sizes"][name])
        tokens = f"{size.batch_size} x {size.context} tokens"
        parts.append(f"{name}: {size.layers} layers of width {size.width}, {tokens}")
    parts += ["", layers_table(results), "", layers_summary(results), ""] if results else []
    absent = record["not_installed"]
    parts += [f"not measured, because not installed: {', '.join(absent)}"] if absent else []
    parts += [f"{name}: not measured, {reason}" for name, reason in failed.items()]
    return "\n".join(parts).rstrip()


def layers_table(results: list[layers.Result]) -> str:
    """Return a line for each case: a step's time over the plain model's."""
    return format_items(
        [
            Column("case", lambda x: x.case.name), Column("ms", lambda x: 1e3 * x.seconds, ">.3f"),
            Column("plain, ms", lambda x: 1e3 * x.plain_seconds, ">.3f"), Column("ratio", "ratio", ">.3f"),
            Column("of kernels", "gpu_ratio", ">.3f", absent="-"), Column("first, s", "first_seconds", ">.1f"),
            Column("loss", "loss", ">.4f", absent="-"),
        ], results,
    )  # fmt: skip


def layers_summary(results: list[layers.Result]) -> str:
    """Return the ratios: a line for each recipe, a column for each model and mode."""
    ratios = {(str(r.case.recipe), f"{r.case.model} {r.case.mode}"): f"{r.ratio:.2f}" for r in results}
    recipes, ways = dict.fromkeys(recipe for recipe, _ in ratios), dict.fromkeys(way for _, way in ratios)
    rows = [(recipe, *(ratios.get((recipe, way), "-") for way in ways)) for recipe in recipes]
    return format_table(("over plain", *ways), rows)
