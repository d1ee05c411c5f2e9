"""``fmtsim bench``: kernels against a plain copy, start-up times and extra memory, with their targets."""

import argparse
import fnmatch
import sys
from typing import TYPE_CHECKING, Any

from fmtsim.cli.info import processor_name
from fmtsim.cli.output import add_json_argument, format_table, print_json, version_of
from fmtsim.errors import ArgumentError

if TYPE_CHECKING:
    from fmtsim.bench.cpu import Result
    from fmtsim.bench.overheads import Overhead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    parser.add_argument("--side", type=int, default=4096, metavar="N",
                        help="tensors are float32 [N, N] (default 4096: 16M elements)")  # fmt: skip
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="thread counts (default 1 2)"
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="timed runs of each case (default 9)")
    parser.add_argument("--kernels-only", action="store_true", help="leave out import time, first calls and memory")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; a missed target is shown, and is no error."""
    from fmtsim.bench import cpu, overheads

    for name in ("side", "repeats", *(f"threads {index}" for index in range(len(arguments.threads)))):
        value = arguments.threads[int(name[8:])] if name.startswith("threads") else getattr(arguments, name)
        if value < 1:
            raise ArgumentError(f"--{name.split()[0]} {value} is not possible; choose 1 or more")
    cases = [case for case in cpu.CASES if fnmatch.fnmatchcase(case.name, arguments.only)]
    if not cases:
        names = ", ".join(case.name for case in cpu.CASES)
        raise ArgumentError(f"--only {arguments.only!r} matches no case; the cases are {names}")
    results = []
    for index, case in enumerate(cases):
        _progress(f"{case.name} ({index + 1} of {len(cases)})")
        options = {"side": arguments.side, "threads": arguments.threads, "repeats": arguments.repeats}
        results.append(cpu.measure(case, **options))
    others: list[Overhead] = []
    if not arguments.kernels_only:
        _progress("import time")
        others.append(overheads.import_time())
        _progress("first calls")
        others += overheads.first_calls()
        _progress("extra memory")
        others += overheads.extra_memory(arguments.side)
    _progress("")
    machine = {"processor": processor_name(), "torch": version_of("torch"), "numba": version_of("numba")}
    if arguments.json:
        print_json({
            "machine": machine, "kernels": [r.to_dict() for r in results], "overheads": [o.to_dict() for o in others]
        })  # fmt: skip
        return 0
    print(f"{machine['processor']}, torch {machine['torch']}, numba {machine['numba']}\n")
    print(_kernel_table(results))
    if others:
        print("\n" + _overhead_table(others))
    return 0


def _progress(text: str) -> None:
    """Show what is being measured on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _kernel_table(results: "list[Result]") -> str:
    threads = list(results[0].seconds)
    first = min(threads)
    header = ["cast", f"copy, {first} thread", "Gelem/s", "of copy", "target", "met"]
    for count in threads:
        if count != first:
            header += [f"{count} threads", "of copy", "copy gains"]
    rows = []
    for result in results:
        gigabytes = 8 * result.elements / result.copy_seconds[first] / 1e9
        row: list[Any] = [
            result.case.name, f"{gigabytes:.1f} GB/s", f"{result.elements / result.seconds[first] / 1e9:.2f}",
            f"{result.ratio(first):.2f}", f"{result.case.target:.2f}", "yes" if result.met else "NO",
        ]  # fmt: skip
        for count in threads:
            if count != first:
                gain = result.seconds[first] / result.seconds[count]
                copy_gain = result.copy_seconds[first] / result.copy_seconds[count]
                row += [f"{gain:.2f}x", f"{result.ratio(count):.2f}", f"{copy_gain:.2f}x"]
        rows.append(row)
    return format_table(header, rows)


def _overhead_table(overheads: "list[Overhead]") -> str:
    rows = []
    for item in overheads:
        value = "not measurable here" if item.value is None else f"{item.value:.3f} {item.unit}"
        rows.append((item.name, value, f"{item.limit:g} {item.unit}", {True: "yes", False: "NO", None: "-"}[item.met]))
    return format_table(("what", "measured", "limit", "met"), rows)
