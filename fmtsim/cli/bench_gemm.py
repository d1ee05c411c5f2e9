"""``fmtsim bench gemm``: matrix products against torch's float32 product, with targets, first calls and memory."""

import argparse
from typing import TYPE_CHECKING

from fmtsim.cli.bench_common import chosen, progress, show
from fmtsim.cli.output import format_table

if TYPE_CHECKING:
    from fmtsim.bench.gemm import Result
    from fmtsim.bench.overheads import Overhead


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; a missed target is shown, and is no error."""
    from fmtsim.bench import gemm, gemm_overheads

    cases = chosen(gemm.CASES, arguments.only)
    shape = (arguments.shape[0], arguments.shape[1], arguments.shape[2])
    results = []
    for index, case in enumerate(cases):
        progress(f"{case.name} ({index + 1} of {len(cases)})")
        results.append(gemm.measure(case, shape=shape, threads=arguments.threads, repeats=arguments.repeats))
    others: list[Overhead] = []
    if not arguments.kernels_only:
        progress("first calls")
        others += gemm_overheads.first_calls()
        progress("extra memory")
        others += gemm_overheads.extra_memory(arguments.side)
    progress("")
    show(arguments, "products", results, others, product_table)
    return 0


def product_table(results: "list[Result]") -> str:
    """Return a line for each case: its speed, its share of torch's float32 product, and whether that was the target."""
    threads = list(results[0].seconds)
    first = min(threads)
    header = ["product", "shape", "ms", "Gmac/s", "of sgemm", "target", "stretch", "extra cost", "limit", "met"]
    for count in threads:
        if count != first:
            header += [f"{count} threads", "of sgemm", "sgemm gains"]
    return format_table(header, (_row(result, first) for result in results), left=(0, 1))


def _row(result: "Result", first: int) -> list[str]:
    case, seconds = result.case, result.seconds[first]
    m, n, k = result.shape
    row = [
        case.name, f"{m}x{n}x{k}", f"{1e3 * seconds:.1f}", f"{m * n * k / seconds / 1e9:.2f}",
        f"{result.ratio(first):.3g}" if result.ratio(first) < 0.1 else f"{result.ratio(first):.2f}",
        _share(case.target), _share(case.stretch), _percent(result.extra), _percent(case.extra), _verdict(result),
    ]  # fmt: skip
    for count, taken in result.seconds.items():
        if count != first:
            gain = result.sgemm_seconds[first] / result.sgemm_seconds[count]
            row += [f"{seconds / taken:.2f}x", f"{result.ratio(count):.2f}", f"{gain:.2f}x"]
    return row


def _verdict(result: "Result") -> str:
    return "stretch" if result.stretched else {True: "pass", False: "MISS", None: "-"}[result.met]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.0f} %"
