# SPDX-License-Identifier: Apache-2.0
"""What a fuzz target is, and what comes of running one: results, fmtsim's own errors, and defects."""

import atexit
import contextlib
import importlib.util
import random
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from fmtsim.support.errors import FmtsimError

ROOM = Path(tempfile.mkdtemp(prefix="fmtsim-fuzz-"))
atexit.register(shutil.rmtree, ROOM, ignore_errors=True)
SECONDS = 120  # after which a call counts as one that does not end; the first calls compile kernels


SKIPPED: dict[str, str] = {}
"""Targets that are left out, and the module that they need and that is not installed."""


def installed(module: str, target: str) -> bool:
    """Return True if there is a module; if not, note the target that it is needed for."""
    there = importlib.util.find_spec(module) is not None
    if not there:
        SKIPPED[target] = module
    return there


@dataclass(frozen=True)
class Target:
    """Name something that takes anything."""

    name: str  # parser.what or verb.what, in messages
    inputs: st.SearchStrategy[Any]  # good ones and bad ones
    call: Callable[[Any], object]  # takes one input; whatever it raises, but FmtsimError, is a defect
    failed: tuple[Any, ...] = ()  # inputs that were defects once; each run begins with them
    count: int = 200  # inputs in the default tests, which have a minute for all targets of a file


@dataclass
class Report:
    """Count calls by their ends, and keep the shortest input of each defect, by where it was raised."""

    ends: Counter[str] = field(default_factory=Counter)
    defects: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return self.ends.total()

    def run(self, target: Target, count: int, seed: int) -> None:
        """Call a target with the inputs that failed once, then with so many others."""
        for value in target.failed:
            self.call(target, value)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(target.inputs)
        def generate(value: Any) -> None:
            self.call(target, value)

        generate()

    def call(self, target: Target, value: Any) -> None:
        shown = _shown(value)
        try:
            with _limited(), warnings.catch_warnings(action="ignore"):
                target.call(value)
        except FmtsimError as error:
            self.ends[f"{target.name}: own errors"] += 1
            if not str(error).strip():
                self._defect(target, error, shown)
        except (Exception, SystemExit) as error:
            self._defect(target, error, shown)
        else:
            self.ends[f"{target.name}: results"] += 1

    def _defect(self, target: Target, error: BaseException, shown: str) -> None:
        self.ends[f"{target.name}: defects"] += 1
        frames = traceback.extract_tb(error.__traceback__)
        last = next((frame for frame in reversed(frames) if "/fmtsim/" in frame.filename), frames[-1])
        key = f"{target.name}: {type(error).__name__} in {last.filename.rpartition('/fmtsim/')[2]}:{last.lineno}"
        earlier = self.defects.get(key)
        if earlier is None or len(shown) < len(earlier[0]):
            self.defects[key] = (shown, str(error), "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        lines = [f"{count:>9,} {end}" for end, count in sorted(self.ends.items())]
        for key, (shown, message, _) in self.defects.items():
            lines.append(f"{key}: {message[:300]}\n    with {shown[:2000]}")
        return "\n".join([*lines, f"{self.calls:,} calls, {len(self.defects)} defects"])


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # of an object that fails whatever it is asked, or a huge int
        return f"<{type(value).__name__}, whose repr is {error!r}>"


@contextlib.contextmanager
def _limited() -> Iterator[None]:

    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seeded(make: Callable[[random.Random], Any]) -> st.SearchStrategy[Any]:
    """Return inputs that a function makes of random numbers."""
    return st.integers(0, (1 << 64) - 1).map(lambda seed: make(random.Random(seed)))


def file_target(
    name: str, file: str, read: Callable[[Path], Any], make: Callable[[random.Random], bytes], **more: Any
) -> Target:
    """Return a target that reads files, whose errors name the file or its folder below the room of the run."""
    path = ROOM / file
    path.parent.mkdir(exist_ok=True)
    place = path if path.parent == ROOM else path.parent

    def call(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except FmtsimError as error:
            assert str(place) in str(error), f"the file is not named: {error}"
            raise

    return Target(name, seeded(make), call, **more)
