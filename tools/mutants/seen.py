# SPDX-License-Identifier: Apache-2.0
"""Which tests see which functions: recorded by a run of all tests under coverage.py, kept in ``seen.txt``.

As a pytest plugin (``-p tools.mutants.seen``) it notes how long each test takes, and which CUDA kernels it runs on the
host, where coverage.py does not look.
"""

import ast
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.mutants.sites import ROOT

MAP = Path(__file__).with_name("seen.txt")
MOST_TESTS = 8  # of one function
MOST_OF_KERNELS = 24  # of one file of kernels, all of whose functions share them
# No trace sees functions that numba compiles: the tests of their engine run instead, the quickest first.
COMPILED = {
    "fmtsim/cpu/cast/": (
        "tests/equality/test_blocks.py",
        "tests/equality/test_elements.py", "tests/equality/test_layouts.py",
        "tests/cpu/test_operands.py",
    ),
    "fmtsim/cpu/gemm/": (
        "tests/cpu/test_gemm_bits.py", "tests/cpu/test_gemm_units.py", "tests/cpu/test_gemm.py",
        "tests/gemm/test_lanes.py", "tests/equality/test_products.py",
        "tests/cpu/test_gemm_batch.py",
    ),
    "fmtsim/cpu/optim/": ("tests/optim/test_codec.py", "tests/optim/test_engines.py"),
    "fmtsim/cpu/counting.py": ("tests/lab/analysis/test_stats.py",),
    "fmtsim/cpu/runtime/": ("tests/cpu", "tests/optim/test_engines.py", "tests/equality"),
}  # fmt: skip
# Nor is what a test runs in a process of its own, and what numbers tell of all experiments: for the Python of these
# rooms it comes behind the tests that see a function.
APART = {
    "reproduce": (
        "tests/studies/claims/test_claims.py::test_claim",
        "tests/studies/claims/test_claims.py::test_a_slow_claim_in_short",
    ),
    "distributed": ("tests/distributed/test_ranks.py::test_processes_and_the_simulation_give_the_same_bits",),
}
# Records and their defaults are worked out where they are imported, before any test runs.
RECORDED = ("tests/spec/test_defaults.py::test_defaults",)

_notes: dict[str, Any] = {"seconds": defaultdict(float), "kernels": defaultdict(set)}
_running = ""


def pytest_runtest_logstart(nodeid: str) -> None:
    global _running
    _running = _function(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _notes["seconds"][_function(report.nodeid)] += report.duration


def pytest_configure() -> None:
    from tests.cuda.emulator import kernels

    real = kernels.HostKernel.__init__

    def noted(self: Any, file: str, *rest: Any, **named: Any) -> None:
        real(self, file, *rest, **named)
        self._file = file

    call = kernels.HostKernel.__call__

    def seen(self: Any, *given: Any, **named: Any) -> None:
        _notes["kernels"][_running].add(self._file)
        call(self, *given, **named)

    kernels.HostKernel.__init__, kernels.HostKernel.__call__ = noted, seen  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run only the tests that a file names: given as arguments, those of a module that skips itself are an error."""
    if "FMTSIM_ONLY" in os.environ:
        only = set(Path(os.environ["FMTSIM_ONLY"]).read_text().split("\n"))
        items[:] = [item for item in items if _function(item.nodeid) in only]


def pytest_sessionfinish() -> None:
    folder = os.environ.get("FMTSIM_SEEN")
    if folder:
        kernels = {test: sorted(files) for test, files in _notes["kernels"].items()}
        text = json.dumps({"seconds": _notes["seconds"], "kernels": kernels})
        (Path(folder) / f"{os.getpid()}.json").write_text(text)


def _function(nodeid: str) -> str:
    return nodeid.split("[")[0]


def functions_of(file: str) -> dict[int, str]:
    """Return the function of each line of a Python file, ``Class.method``; empty at the top level."""
    functions: dict[int, str] = {}

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
                functions.update(dict.fromkeys(range(child.lineno, (child.end_lineno or child.lineno) + 1), inner))
            walk(child, inner)

    walk(ast.parse((ROOT / file).read_text()), "")
    return functions


def collected() -> list[str]:
    """Return the functions of tests that a default run collects, those of this command aside."""
    marked, tests = r"pytest\.mark\.(?:slow|exhaustive|faults)\b", []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if path.name != "test_mutants.py" and not re.search(f"^pytestmark = .*{marked}", text, re.M):
            for decorators, name in re.findall(r"^((?:@.*\n(?:[ )\]].*\n)*)*)def (test_\w+)\(", text, re.M):
                if not re.search(f"^@{marked}", decorators, re.M):
                    tests.append(f"{path.relative_to(ROOT)}::{name}")
    return tests


def write_map(coverage_file: str, notes: str, joined: bool = False) -> int:
    """Write ``seen.txt`` from coverage.py's data with contexts and what the plugin noted; return its functions.

    With ``joined`` the tests that ran join those of the file: they take up to half of a function's places.
    """
    import coverage

    seconds: dict[str, float] = defaultdict(float)
    seen: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))  # lines of a function
    for path in Path(notes).glob("*.json"):
        note = json.loads(path.read_text())
        for test, spent in note["seconds"].items():
            seconds[test] = max(seconds[test], spent)  # the controller has the sums, workers their shares
        for test, files in note["kernels"].items():
            for file in files:
                for part in _with_headers(f"fmtsim/cuda/{file}"):
                    seen[part, ""][test] += 1
    data = coverage.CoverageData(coverage_file)
    data.read()
    for measured in data.measured_files():
        file = os.path.relpath(measured, ROOT)
        functions = functions_of(file)
        for line, contexts in data.contexts_by_lineno(measured).items():
            for test in {_function(context.split("|")[0]) for context in contexts if context}:
                seen[file, functions.get(line, "")][test] += 1
    old, old_seconds = read_map() if joined else ({}, {})
    there = set(collected())  # tests that are gone go from the map
    old = {place: [test for test in tests if test in there] for place, tests in old.items()}
    return _write(seen, seconds, old, {test: spent for test, spent in old_seconds.items() if test in there})


def _write(
    seen: dict[tuple[str, str], dict[str, int]], seconds: dict[str, float], old: dict[str, list[str]],
    old_seconds: dict[str, float],
) -> int:  # fmt: skip
    def rank(tests: dict[str, int]) -> list[str]:
        """Those that run most of the function's lines first, of these the quickest, and one a file."""
        order = sorted(tests, key=lambda test: (-tests[test], seconds[test], test))
        first = {test.split("::")[0]: test for test in reversed(order)}
        return [*(test for test in order if first[test.split("::")[0]] == test), *order]

    most = {place: MOST_TESTS if place[0].endswith(".py") else MOST_OF_KERNELS for place in seen}
    chosen = {place: list(dict.fromkeys(rank(tests)))[: most[place]] for place, tests in sorted(seen.items())}
    for place, tests in old.items():
        file, function = place.split(":")
        limit = MOST_TESTS if file.endswith(".py") else MOST_OF_KERNELS
        new = chosen.get((file, function), [])
        chosen[file, function] = list(dict.fromkeys([*new[: limit // 2], *tests, *new]))[:limit]
    skipped = {test: spent for test, spent in old_seconds.items() if seconds.get(test, 0.0) < 0.05}
    chosen = {place: tests for place, tests in sorted(chosen.items()) if tests}  # of some all tests are gone
    MAP.write_text(_text(chosen, {**seconds, **skipped}))
    return len(chosen)


def _text(chosen: dict[tuple[str, str], list[str]], seconds: dict[str, float]) -> str:
    """Return the tests, a line each, and below the places by file: functions that the same tests see share a line."""
    names = sorted({*seconds, *(test for tests in chosen.values() for test in tests)})
    numbers = {test: str(i) for i, test in enumerate(names)}
    functions: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (file, function), tests in chosen.items():
        functions[file, *(numbers[test] for test in tests)].append(function)
    rows = [f"{file}:{','.join(named)} {' '.join(tests)}" for (file, *tests), named in functions.items()]
    return "\n".join([*(f"{test} {seconds[test]:.1f}" for test in names), "", *rows]) + "\n"


def read_map() -> tuple[dict[str, list[str]], dict[str, float]]:
    """Return the tests of each ``file:function``, and how many seconds each takes."""
    tests, _, places = MAP.read_text().partition("\n\n")
    named = [line.rsplit(" ", 1) for line in tests.splitlines()]
    tests_of = {}
    for line in places.splitlines():
        place, *numbers = line.split(" ")
        file, functions = place.split(":")
        tests_of |= {f"{file}:{function}": [named[int(i)][0] for i in numbers] for function in functions.split(",")}
    return tests_of, {name: float(spent) for name, spent in named}


def _with_headers(file: str, found: frozenset[str] = frozenset()) -> set[str]:
    """Return a kernel file and the headers that it includes, as paths below the root."""
    path = next((ROOT / "fmtsim/cuda").rglob(Path(file).name), None)
    if path is None:
        return set()
    name = os.path.relpath(path, ROOT)
    reached = {name}
    for header in re.findall(r'#include "([^"]+)"', path.read_text()):
        if header not in found:
            reached |= _with_headers(header, found | {Path(name).name, header})
    return reached
