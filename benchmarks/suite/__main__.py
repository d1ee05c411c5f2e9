# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.suite``: casts against a plain copy, products against torch's float32 one, overheads."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import cpu, gemm, overheads
from benchmarks.suite.against import Comparison, compared
from benchmarks.suite.device import BENCH_SIZES, gpu_machine
from benchmarks.suite.overheads import Overhead
from benchmarks.suite.timing import Timed, at_work, chosen_cases, each_shown, origin, processor
from fmtsim.lab.cli.main import run_program
from fmtsim.lab.cli.names import Files, targets
from fmtsim.lab.cli.options import add_json, check_positive, check_threads, count, flag, option
from fmtsim.lab.cli.output import answer, format_table, versions_of, write_json
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_folder
from fmtsim.support.records import read_json, shown_path
from fmtsim.support.table import jsonable

SUMMARY = (
    "Time casts relative to a copy, products (gemm), the CUDA engine (gpu), layers in training, simulate, variants."
)
Measured = tuple[dict[str, Any], Callable[[], str]]
Keep = Callable[[dict[str, Any]], None]
_VARIANTS = "benchmarks.suite.variants"


BENCH_DEFAULTS = {"side": 4096, "shape": [512, 512, 2048], "threads": [1, 2]}
KERNELS = ("side", "threads", "kernels_only")
# Which options belong to what is measured, beside those that all have.
BENCH_OPTIONS = {
    "casts": KERNELS, "gemm": (*KERNELS, "shape"), "gpu": (), "simulate": (), "variants": (),
    "layers": ("recipes", "device", *BENCH_SIZES, "target", "emulate"),
}  # fmt: skip


def declare_bench(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    choices = (
        "casts relative to a copy, matrix products relative to torch's float32 product, the CUDA engine, models "
        "under simulate, training steps under recipes, both relative to plain ones, or variants that cost lines"
    )
    parser.add_argument("what", nargs="?", choices=tuple(BENCH_OPTIONS), default="casts", help=choices)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    option(parser, "--repeats", "timed runs of each case", 9)
    option(parser, "--record", "also write the measurements to a JSON file", metavar="FILE", type=Path)
    option(parser, "--against", "say what became slower by more than 5 %% since this record", metavar="FILE", type=Path,
           names=Files("pass a file that --record wrote"))  # fmt: skip
    add_json(parser)
    _add_kernels(parser.add_argument_group("casts and gemm"))
    _add_layers(parser.add_argument_group("layers"))


def check_bench(arguments: argparse.Namespace) -> None:
    """Refuse an option of another job than the one that is asked for."""
    for name in dict.fromkeys(name for options in BENCH_OPTIONS.values() for name in options):
        is_set = getattr(arguments, name) not in (BENCH_DEFAULTS.get(name), False)
        if is_set and name not in BENCH_OPTIONS[arguments.what]:
            jobs = " and ".join(what for what, options in BENCH_OPTIONS.items() if name in options)
            raise ArgumentError(
                f"--{name.replace('_', '-')} belongs to benchmarks.suite {jobs}, not to {arguments.what}; leave it out"
            )


def _add_kernels(group: argparse._ArgumentGroup) -> None:
    side = "N: casts take float32 [N, N], and the memory of a product is measured for N"
    option(group, "--side", side, BENCH_DEFAULTS["side"])
    shape = "of products: [M, K] times [K, N]"
    option(group, "--shape", shape, BENCH_DEFAULTS["shape"], ("M", "N", "K"), type=int, nargs=3)
    option(group, "--threads", "thread counts", BENCH_DEFAULTS["threads"], type=int, nargs="+")
    flag(group, "--kernels-only", "leave out import time, first calls and memory")


def _add_layers(group: argparse._ArgumentGroup) -> None:
    text = "recipes, torchao_float8 or microxcaling_mxfp4; by default some recipes, and what is installed"
    option(group, "--recipes", text, metavar="NAME", nargs="+")
    option(group, "--device", "cpu, cuda or cuda:1 (default cuda where there is one)", metavar="DEVICE")
    for name, text in BENCH_SIZES.items():
        count(group, f"--{name.replace('_', '-')}", text)
    option(group, "--target", "what multiplies under the recipes, such as h200", metavar="NAME", names=targets)
    flag(group, "--emulate", "emulate the target, also on a GPU that is one")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and print; a missed target, or what became slower, is shown and is not an error."""
    check_positive(arguments, "side", "shape", "threads", "repeats")
    for threads in arguments.threads:
        check_threads(threads)
    if arguments.record is not None:
        check_folder(arguments.record.parent, "--record")
    before = None if arguments.against is None else read_record(arguments.against, arguments.what)

    def keep(record: dict[str, Any]) -> None:
        if arguments.record is not None:
            write_json(arguments.record, record)

    record, text = _measure(arguments, keep)
    at_work("")
    keep(record)
    parts = [text]
    if before is not None:
        rows = compared(before, jsonable(record))
        record = record | {"against": rows.to_dict()}
        parts.append(lambda: "\n" + against_text(rows, before, record, arguments.against))
    answer(arguments, record, lambda: "\n".join(part() for part in parts))
    return 0


def _measure(arguments: argparse.Namespace, keep: Keep) -> Measured:
    """Return the record of what is asked for, and how it reads."""
    if arguments.what == "gpu":
        from benchmarks.suite.device import measured_gpu

        return measured_gpu(arguments, keep)
    if arguments.what == "layers":
        from benchmarks.suite.device import measured_layers

        return measured_layers(arguments, keep)
    if arguments.what in ("simulate", "variants"):
        return _measured_beside(arguments, keep)
    results = list(_results(arguments))
    others = [] if arguments.kernels_only else list(_overheads(arguments))
    machine = {**processor(), **versions_of(("torch", "numba")), **origin()}
    key, table = ("kernels", cast_table) if arguments.what == "casts" else ("products", product_table)
    record = {"machine": machine, key: [r.to_dict() for r in results], "overheads": [o.to_dict() for o in others]}
    about = f"{machine['processor']}, torch {machine['torch']}, numba {machine['numba']}\n"
    parts = [about, table(results), *(["", overhead_table(others)] if others else [])]
    return record, lambda: "\n".join(parts)


def _measured_beside(arguments: argparse.Namespace, keep: Keep) -> Measured:
    """Return the record of models under ``simulate``, or of variants, beside what is plain, and how it reads."""
    bench: Any = importlib.import_module({"simulate": "benchmarks.suite.simulated"}.get(arguments.what, _VARIANTS))
    on_gpu = getattr(bench, "DEVICE", "cpu") == "cuda"
    machine = (
        gpu_machine() if on_gpu else {**processor(), **versions_of(("torch", "numba", "transformers")), **origin()}
    )
    record: dict[str, Any] = {"machine": machine, "results": []}
    for case in each_shown(chosen_cases(bench.CASES, arguments.only)):
        record["results"].append(bench.measure(case, arguments.repeats).to_dict())
        keep(record)
    rows = [[name, *(f"{x:.4g}" for x in numbers)] for name, *numbers in map(dict.values, record["results"])]
    return record, lambda: format_table([*record["results"][0]], rows)


def _results(arguments: argparse.Namespace) -> Iterator[Any]:
    how: dict[str, Any] = {"threads": arguments.threads, "repeats": arguments.repeats}
    bench: Any = cpu if arguments.what == "casts" else gemm
    how |= {"side": arguments.side} if arguments.what == "casts" else {"shape": tuple(arguments.shape)}
    for case in each_shown(chosen_cases(bench.CASES, arguments.only)):
        yield bench.measure(case, **how)


def _overheads(arguments: argparse.Namespace) -> Iterator[Overhead]:
    if arguments.what == "casts":
        at_work("import time")
        yield overheads.import_time()
    work: overheads.Work = "casts" if arguments.what == "casts" else "products"
    at_work("first calls")
    yield from overheads.first_calls(work)
    at_work("extra memory")
    yield from overheads.extra_memory(work, arguments.side)


def cast_table(results: Sequence[cpu.Result]) -> str:
    """Return a line for each cast: its speed, its share of a copy's, and whether that was the target."""
    header = ["cast", f"copy, {results[0].fewest} thread", "Gelem/s", "of copy", "target", "met"]
    rows = []
    for result in results:
        first = result.fewest
        gigabytes = 8 * result.elements / result.base_seconds[first] / 1e9
        rows.append([
            result.case.name, f"{gigabytes:.1f} GB/s", f"{result.elements / result.seconds[first] / 1e9:.2f}",
            f"{result.ratio():.2f}", f"{result.case.target:.2f}", "yes" if result.met else "NO", *_threads(result),
        ])  # fmt: skip
    return format_table(header + _thread_header(results[0], "copy"), rows)


def product_table(results: Sequence[gemm.Result]) -> str:
    """Return a line for each case: its speed, its share of torch's float32 product, and whether that was the target."""
    header = ["product", "shape", "ms", "GMAC/s", "of sgemm", "target", "stretch", "extra cost", "limit", "met"]
    return format_table(header + _thread_header(results[0], "sgemm"), map(_product_row, results), left=(0, 1))


def _product_row(result: gemm.Result) -> list[str]:
    case, seconds, (m, n, k) = result.case, result.seconds[result.fewest], result.shape
    verdict = "stretch" if result.stretched else {True: "pass", False: "MISS", None: "-"}[result.met]
    shares = ["-" if value is None else f"{value:.2f}" for value in (case.target, case.stretch)]
    costs = ["-" if value is None else f"{100 * value:+.0f} %" for value in (result.extra, case.extra)]
    shape, work = f"{m}x{n}x{k}", case.products * m * n * k
    return [
        case.name, shape if case.side is None else f"{case.products} of {shape}", f"{1e3 * seconds:.1f}",
        f"{work / seconds / 1e9:.2f}",
        f"{result.ratio():.3g}" if result.ratio() < 0.1 else f"{result.ratio():.2f}", *shares, *costs, verdict,
        *_threads(result),
    ]  # fmt: skip


def _thread_header(result: Timed, base: str) -> list[str]:
    counts = [threads for threads in result.seconds if threads != result.fewest]
    return [word for threads in counts for word in (f"{threads} threads", f"of {base}", f"{base} gains")]


def _threads(result: Timed) -> list[str]:
    cells = []
    for threads in result.seconds:
        if threads != result.fewest:
            gain, base_gain = result.gains(threads)
            cells += [f"{gain:.2f}x", f"{result.ratio(threads):.2f}", f"{base_gain:.2f}x"]
    return cells


def overhead_table(overheads: Sequence[Overhead]) -> str:
    """Return a line for each figure with its limit."""
    rows = []
    for item in overheads:
        value = "not measurable here" if item.value is None else f"{item.value:.3f} {item.unit}"
        rows.append((item.name, value, f"{item.limit:g} {item.unit}", {True: "yes", False: "NO", None: "-"}[item.met]))
    return format_table(("what", "measured", "limit", "met"), rows)


KEYS = {
    "casts": {"kernels"}, "gemm": {"products"}, "gpu": {"results", "compiling_seconds"}, "layers": {"results", "sizes"},
    "simulate": {"results"}, "variants": {"results"},
}  # fmt: skip


def read_record(path: Path, what: str) -> dict[str, Any]:
    """Return an earlier record.

    Raises:
        ArgumentError: The file is not there, or holds something else.
    """
    record = read_json(path, ArgumentError, f"record of python -m benchmarks.suite {what}")
    try:
        compared(record, record)
        fits = KEYS[what] <= record.keys() and isinstance(record["machine"], dict)
    except (KeyError, TypeError, AttributeError, OverflowError):
        fits = False
    if not fits:
        raise ArgumentError(
            f"--against {shown_path(path)} is not a record of benchmarks.suite {what}; pass what "
            f"benchmarks.suite {what} --record FILE wrote"
        )
    return record  # type: ignore[no-any-return]


def against_text(found: Comparison, before: dict[str, Any], now: dict[str, Any], path: Path) -> str:
    """Return the comparison in words and a table."""
    about = (_machine(before), before["machine"].get("date"))
    lines = [f"compared with {shown_path(path)}, {', '.join(str(part) for part in about if part)}"]
    if _machine(before) != _machine(now):
        lines.append(f"which is another machine: this is {_machine(now)}")
    counts = f"{len(found.slower)} slower by more than 5 %, {found.faster} faster"
    lines.append(f"measurements compared: {found.compared}, of which {counts}")
    if found.missing:
        named = ", ".join(found.missing[:3]) + (" ..." if len(found.missing) > 3 else "")
        lines.append(f"absent there, or under other settings: {len(found.missing)} ({named})")
    if found.slower:
        rows = [(c.name, f"{c.before:.4g}", f"{c.now:.4g}", f"{c.slower:.2f}") for c in found.slower]
        lines += ["", format_table(("slower", "before", "now", "times as long"), rows)]
    return "\n".join(lines)


def _machine(record: dict[str, Any]) -> str:
    about = record["machine"]
    name = about.get("device", about.get("processor", "an unknown machine"))
    return f"{name}, torch {about.get('torch', 'unknown')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("python -m benchmarks.suite", SUMMARY, declare_bench, run_bench, check_bench, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
