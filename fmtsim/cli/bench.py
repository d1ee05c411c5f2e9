"""``fmtsim bench``: casts against a plain copy, start-up times and extra memory, with their targets.

``fmtsim bench gemm`` is in bench_gemm.py, ``fmtsim bench gpu`` in bench_gpu.py.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.cli.bench_common import chosen, progress, show
from fmtsim.cli.checks import check_threads
from fmtsim.cli.output import add_json_argument, format_table
from fmtsim.errors import ArgumentError

if TYPE_CHECKING:
    from fmtsim.bench.cpu import Result
    from fmtsim.bench.overheads import Overhead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    choices = "casts against a copy, matrix products against torch's float32 one, or the CUDA engine"
    parser.add_argument("what", nargs="?", choices=("casts", "gemm", "gpu"), default="casts", help=choices)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    parser.add_argument("--side", type=int, default=4096, metavar="N",
                        help="casts take float32 [N, N], the memory of a product is measured for this side "
                             "(default 4096)")  # fmt: skip
    parser.add_argument("--shape", type=int, nargs=3, default=[512, 512, 2048], metavar=("M", "N", "K"),
                        help="of products: [M, K] times [K, N] (default 512 512 2048)")  # fmt: skip
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="thread counts (default 1 2)"
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="timed runs of each case (default 9)")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="gpu: write what was measured to a JSON file as well"
    )
    parser.add_argument("--kernels-only", action="store_true", help="leave out import time, first calls and memory")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; a missed target is shown, and is no error."""
    for name in ("side", "shape", "threads", "repeats"):
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value < 1:
                raise ArgumentError(f"--{name} {value} is not possible; choose 1 or more")
    for count in arguments.threads:
        check_threads(count)
    if arguments.record is not None and arguments.what != "gpu":
        raise ArgumentError(
            f"--record has no meaning for fmtsim bench {arguments.what}; pass --json and keep its output"
        )
    if arguments.what == "gemm":
        from fmtsim.cli import bench_gemm

        return bench_gemm.run(arguments)
    if arguments.what == "gpu":
        from fmtsim.cli import bench_gpu

        return bench_gpu.run(arguments)
    return _run_casts(arguments)


def _run_casts(arguments: argparse.Namespace) -> int:
    from fmtsim.bench import cpu, overheads

    cases = chosen(cpu.CASES, arguments.only)
    results = []
    for index, case in enumerate(cases):
        progress(f"{case.name} ({index + 1} of {len(cases)})")
        options = {"side": arguments.side, "threads": arguments.threads, "repeats": arguments.repeats}
        results.append(cpu.measure(case, **options))
    others: list[Overhead] = []
    if not arguments.kernels_only:
        progress("import time")
        others.append(overheads.import_time())
        progress("first calls")
        others += overheads.first_calls()
        progress("extra memory")
        others += overheads.extra_memory(arguments.side)
    progress("")
    show(arguments, "kernels", results, others, _kernel_table)
    return 0


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
