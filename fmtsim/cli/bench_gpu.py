"""``fmtsim bench gpu``: the CUDA engine against copies and native products of the same run, with its targets."""

import argparse
from typing import TYPE_CHECKING

from fmtsim.cli.bench import chosen, progress
from fmtsim.cli.output import format_table, print_json, version_of
from fmtsim.errors import DeviceError

if TYPE_CHECKING:
    from fmtsim.bench.gpu import Result

_UNITS = {"quantize": "of copy", "encode": "of copy", "product": "Tmac/s", "layer": "of plain", "call": "us"}


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; a missed target is shown, and is no error."""
    import torch

    import fmtsim.cuda
    from fmtsim.bench import gpu

    reason = fmtsim.cuda.why_unavailable()
    if reason is not None:
        raise DeviceError(f"the CUDA engine cannot run: {reason}")
    cases = chosen(gpu.CASES, arguments.only)
    results, failed = [], {}
    for index, case in enumerate(cases):
        progress(f"{case.name} ({index + 1} of {len(cases)})")
        try:
            results.append(gpu.measure(case, repeats=max(arguments.repeats, 3)))
        except torch.OutOfMemoryError as error:
            failed[case.name] = str(error).splitlines()[0]
        torch.cuda.empty_cache()
    progress("")
    machine = {"device": torch.cuda.get_device_name(), "torch": version_of("torch"), "cuda": torch.version.cuda}
    machine["cuda-core"] = version_of("cuda-core")
    if arguments.json:
        print_json({"machine": machine, "results": [result.to_dict() for result in results], "failed": failed})
        return 0
    print(", ".join(f"{name} {version}" for name, version in machine.items()) + "\n")
    print(table(results))
    for name, reason in failed.items():
        print(f"{name}: not measured, {reason}")
    return 0


def table(results: "list[Result]") -> str:
    """Return a line for each case: what it reached, and whether that was the target."""
    header = ("work", "reached", "unit", "target", "stretch", "met", "ms")
    return format_table(header, (_row(result) for result in results), left=(0, 2))


def _row(result: "Result") -> list[str]:
    least, stretch = result.case.goal
    met = "stretch" if result.reaches(stretch) else {True: "pass", False: "MISS", None: "-"}[result.reaches(least)]
    goals = ["-" if goal is None else f"{goal:g}" for goal in (least, stretch)]
    value = f"{result.value:.1f}" if result.value >= 10 else f"{result.value:.3f}"
    return [result.case.name, value, _UNITS[result.case.kind], *goals, met, f"{1e3 * result.seconds:.3f}"]
