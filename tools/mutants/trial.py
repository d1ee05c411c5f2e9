# SPDX-License-Identifier: Apache-2.0
"""Run the tests that can see a mutant on a copy of the tree that has it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tools.mutants.seen import APART, COMPILED, RECORDED, collected, read_map
from tools.mutants.sites import ROOT, Mutant

LIMIT = 90.0  # seconds of tests that one mutant is worth, by the map
NEW = 0.2  # seconds of a test that the map does not name: it is new, or among the first of no function
SLACK = 5.0  # how many times longer than the map says before a run counts as one that hangs
_running: set[subprocess.Popen] = set()
_copies: set[str] = set()


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``found``, ``survived`` or ``error``."""

    mutant: Mutant
    verdict: str
    seconds: float
    by: str = ""


class Trials:
    """Run mutants in copies of the tree, ``jobs`` at once; ``limit`` is the seconds of tests of each, by the map."""

    def __init__(self, jobs: int = 2, limit: float = LIMIT) -> None:
        self._jobs, self._limit = jobs, limit
        seen, seconds = read_map()
        # Of tests that are newer than the map their file alone tells what they may see.
        self._seconds = {test: seconds.get(test, NEW) for test in collected()}
        self._seen = {place: [test for test in tests if test in self._seconds] for place, tests in seen.items()}

    def run(self, mutants: list[Mutant]) -> Iterator[Outcome]:
        with tempfile.TemporaryDirectory(prefix="fmtsim-mutants-") as place, ThreadPoolExecutor(self._jobs) as pool:
            _copies.add(place)
            free: Queue[_Copy] = Queue()
            copies = [_Copy(Path(place) / str(i)) for i in range(self._jobs)]
            for copy in copies:
                free.put(copy)

            def one(mutant: Mutant) -> Outcome:
                copy = free.get()
                try:
                    return self._one(mutant, copy)
                finally:
                    free.put(copy)

            try:
                yield from pool.map(one, mutants)
            finally:
                for copy in copies:
                    copy.close()

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that see a mutant, the likeliest first."""
        engine = next((tests for folder, tests in COMPILED.items() if mutant.file.startswith(folder)), ())
        compiled = engine and f"{mutant.file}:{mutant.function}" not in self._seen
        tests = [] if compiled else self._tests_of_place(mutant)
        apart = APART.get(mutant.area, ()) if mutant.file.endswith(".py") else ()
        chosen, spent = [], sum(self._seconds[test] for test in tests if test in apart)
        for test in tests:
            if test in apart or not chosen or spent + self._seconds[test] < self._limit:
                chosen.append(test)
                spent += self._seconds[test] * (test not in apart)
        return [*chosen, *engine]

    def _tests_of_place(self, mutant: Mutant) -> list[str]:
        """Return the tests of the function or those around it, of its file, its name, its room; or all, quick first."""
        names = mutant.function.split(".") if mutant.file.endswith(".py") else [""]
        direct: list[str] = []
        for depth in range(len(names), 0, -1):
            direct = direct or self._seen.get(f"{mutant.file}:{'.'.join(names[:depth])}", [])
        direct = sorted(direct, key=lambda test: self._seconds[test] > self._limit / 2)  # alone it would leave no room
        quick = sorted(self._seconds, key=self._seconds.__getitem__)
        of_file = {test for place, tests in self._seen.items() if place.startswith(f"{mutant.file}:") for test in tests}
        path = Path(mutant.file)
        named = [test for test in quick if test.split("::")[0].endswith(f"/test_{path.stem}.py")]
        room = f"tests/{mutant.folder}/" if mutant.folder else "tests/test_"
        nearby = [*(test for test in quick if test in of_file), *(test for test in quick if test.startswith(room))]
        apart = (*RECORDED, *APART.get(mutant.area, ())) if mutant.file.endswith(".py") else ()
        near = [test for test in named if test.startswith(room)]
        found = list(dict.fromkeys([*direct, *apart, *near, *nearby, *named])) or quick
        return sorted(found, key=lambda test: "/test_fuzz.py::" in test)  # long, and takes any result for right

    def _one(self, mutant: Mutant, copy: "_Copy") -> Outcome:
        tests, begun = self.tests_of(mutant), time.monotonic()
        expected = sum(self._seconds.get(test, 60.0) for test in tests)
        with copy.changed(mutant):
            status, text = copy.pytest(tests, 60 + SLACK * expected)
        missing = status == 5 or re.search("^ERROR: (file or directory )?not found", text, re.M)
        verdict = "survived" if status == 0 else "error" if missing else "found"
        by = next((line.split(" ")[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
        return Outcome(mutant, verdict, time.monotonic() - begun, by or f"exit {status}: {text[-200:]!r}")


class _Copy:
    """A copy of the tree, of what the engines have compiled, and a server that runs tests there."""

    def __init__(self, folder: Path) -> None:
        self._tree, self._output = folder / "tree", folder / "output"
        for name in ("fmtsim", "tests", "tools", "docs", "benchmarks", "notebooks"):
            shutil.copytree(ROOT / name, self._tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy2(path, self._tree)
        # A changed file is to be noticed by its text.
        compiled = ["compileall", "-q", "--invalidation-mode", "checked-hash", "fmtsim", "tests", "tools"]
        subprocess.run([sys.executable, "-m", *compiled], cwd=self._tree, check=True)
        places = {"FMTSIM_CACHE_DIR": folder / "cache", "TMPDIR": folder / "tmp"}
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        _link(Path(os.environ.get("FMTSIM_CACHE_DIR") or f"{cache}/fmtsim"), places["FMTSIM_CACHE_DIR"])
        emulator = f"fmtsim-emulator-{os.getuid()}"
        _link(Path(tempfile.gettempdir()) / emulator, places["TMPDIR"] / emulator)
        fixed = {"PYTHONPATH": self._tree, "PYTHONDONTWRITEBYTECODE": 1, "OMP_NUM_THREADS": 1, **places}
        self._server = subprocess.Popen(
            [sys.executable, "tools/mutants/server.py"], cwd=self._tree, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, **{name: str(value) for name, value in fixed.items()}},
        )  # fmt: skip
        _running.add(self._server)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self._tree / mutant.file
        before = path.read_bytes()
        path.write_bytes(mutant.applied(self._tree))
        try:
            yield
        finally:
            path.write_bytes(before)

    def pytest(self, tests: list[str], limit: float) -> tuple[int, str]:
        """Return pytest's exit status, 124 where it took too long, and what it wrote."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"tests": tests, "limit": limit, "output": str(self._output)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError("the server that runs the tests has ended")
        return int(answer), self._output.read_text(errors="replace")

    def close(self) -> None:
        _running.discard(self._server)
        self._server.communicate()


def _link(source: Path, target: Path) -> None:
    """Link what is compiled into a folder: tests use it and add to the copy alone."""
    target.mkdir(parents=True)
    if source.is_dir():
        at_work = shutil.ignore_patterns("tmp*", ".fmtsim-*")  # what others are writing
        shutil.copytree(source, target, ignore=at_work, copy_function=os.link, dirs_exist_ok=True)


def stop() -> None:
    """End what runs and remove the copies: an interrupted command leaves nothing behind."""
    for process in list(_running):
        process.terminate()
        process.wait()
    for place in _copies:
        shutil.rmtree(place, ignore_errors=True)
