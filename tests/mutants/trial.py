"""Run the tests that can see a mutant on a copy of the tree that has it."""

import os
import shutil
import signal
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

from tests.mutants.seen import COMPILED, read_map
from tests.mutants.sites import ROOT, Mutant

LIMIT = 60.0  # seconds of tests that one mutant is worth, by the map
SLACK = 5.0  # how many times longer than the map says before a run counts as one that hangs


_running: set[subprocess.Popen] = set()
_copies: set[str] = set()


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``found``, ``survived``, ``unseen`` (no test runs its function) or ``error``."""

    mutant: Mutant
    verdict: str
    seconds: float
    by: str = ""


class Trials:
    """Run mutants in copies of the tree, several at once.

    Args:
        jobs: How many processes.
        limit: Seconds of tests that each may take, by the map.
    """

    def __init__(self, jobs: int = 2, limit: float = LIMIT) -> None:
        self._jobs, self._limit = jobs, limit
        self._seen, self._seconds = read_map()

    def run(self, mutants: list[Mutant]) -> Iterator[Outcome]:
        """Yield what became of each, as it is known."""
        with tempfile.TemporaryDirectory(prefix="fmtsim-mutants-") as place:
            _copies.add(place)
            folders: Queue[Path] = Queue()
            for i in range(self._jobs):
                folders.put(_copy(Path(place) / str(i)))

            def one(mutant: Mutant) -> Outcome:
                folder = folders.get()
                try:
                    return self._one(mutant, folder)
                finally:
                    folders.put(folder)

            with ThreadPoolExecutor(self._jobs) as pool:
                yield from pool.map(one, mutants)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that see a mutant, the likeliest first."""
        engine = next((tests for folder, tests in COMPILED.items() if mutant.file.startswith(folder)), ())
        tests = [] if engine and mutant.file.endswith(".py") else self._tests_of_place(mutant)
        chosen, spent = [], 0.0
        for test in tests:
            if not chosen or spent + self._seconds[test] < self._limit:
                chosen.append(test)
                spent += self._seconds[test]
        return [*chosen, *engine]

    def _tests_of_place(self, mutant: Mutant) -> list[str]:
        """Return the tests of the function or of those around it, then those of its name and of its room."""
        names = mutant.function.split(".") if mutant.file.endswith(".py") else []
        own: list[str] = []
        for depth in range(len(names), 0, -1):
            own = own or self._seen.get(f"{mutant.file}:{'.'.join(names[:depth])}", [])
        if not mutant.file.endswith(".py"):
            return self._seen.get(f"{mutant.file}:", [])
        path = Path(mutant.file)
        named = [test for test in self._seconds if test.split("::")[0].endswith(f"/test_{path.stem}.py")]
        room = f"tests/{mutant.area}/" if mutant.area != "top" else "tests/test_"
        nearby = [test for test in self._seconds if test.startswith(room)]
        quick = sorted(nearby, key=self._seconds.__getitem__)
        return list(dict.fromkeys([*own, *named, *quick]))

    def _one(self, mutant: Mutant, folder: Path) -> Outcome:
        tests, begun = self.tests_of(mutant), time.monotonic()
        if not tests:
            return Outcome(mutant, "unseen", 0.0)
        expected = sum(self._seconds.get(test, 60.0) for test in tests)
        with _changed(folder, mutant):
            code, text = _pytest(tests, folder, 60 + SLACK * expected)
        verdict = {0: "survived", 1: "found", 2: "found", 3: "found", 124: "found"}.get(
            code, "found" if code < 0 else "error"
        )
        by = next((line.split(" ")[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
        return Outcome(mutant, verdict, time.monotonic() - begun, by or f"exit {code}: {text[-200:]!r}")


def _copy(folder: Path) -> Path:
    """Copy what tests need, and compile it so that a changed file is noticed by its text."""
    for name in ("fmtsim", "tests", "docs", "benchmarks", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy2(path, folder)
    compiled = ["compileall", "-q", "--invalidation-mode", "checked-hash", "fmtsim", "tests"]
    subprocess.run([sys.executable, "-m", *compiled], cwd=folder, check=True)
    return folder


@contextmanager
def _changed(folder: Path, mutant: Mutant) -> Iterator[None]:
    path = folder / mutant.file
    before = path.read_bytes()
    path.write_bytes(mutant.applied())
    try:
        yield
    finally:
        path.write_bytes(before)


def _pytest(tests: list[str], folder: Path, limit: float) -> tuple[int, str]:
    """Return pytest's exit status, 124 where it took too long, and what it wrote."""
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-n0"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    _running.add(process)
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return 124, process.communicate()[0]
    finally:
        _running.discard(process)
    return process.returncode, text


def stop() -> None:
    """End what runs and remove the copies: an interrupted command leaves nothing behind."""
    for process in list(_running):
        os.killpg(process.pid, signal.SIGKILL)
    for place in _copies:
        shutil.rmtree(place, ignore_errors=True)
