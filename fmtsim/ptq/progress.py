"""Show how a quantisation comes along: bars on a terminal, one bar in a notebook, lines elsewhere, or nothing."""

import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

WIDTH = 24  # of a notebook's bar


class Progress(Protocol):
    """Be told about stages; a context manager, because bars own the terminal's lines."""

    def __enter__(self) -> "Progress": ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

    def stage(self, label: str, total: int) -> None:
        """Begin a stage of so many steps."""

    def step(self, done: int) -> None:
        """Say how many steps of the stage are done."""


class Quiet:
    """Show nothing."""

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def stage(self, label: str, total: int) -> None:
        """Do nothing."""

    def step(self, done: int) -> None:
        """Do nothing."""


class Lines(Quiet):
    """Print a line when a stage ends."""

    def __init__(self, stream: TextIO, verb: str = "ptq") -> None:
        self._stream, self._verb = stream, verb

    def stage(self, label: str, total: int) -> None:
        """Remember what runs and since when."""
        self._label, self._total, self._began = label, total, time.perf_counter()

    def step(self, done: int) -> None:
        """Print the stage's last step."""
        if done == self._total:
            seconds = time.perf_counter() - self._began
            print(f"{self._verb}: {self._label} {done}/{self._total}  {seconds:.1f} s", file=self._stream, flush=True)


class OneLine(Quiet):
    """Draw one bar for all stages and write over it, as notebooks allow."""

    def __init__(self, stream: TextIO, verb: str = "ptq") -> None:
        self._stream, self._verb = stream, verb
        self._began, self._drawn = time.perf_counter(), 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = "failed after" if kind is not None else "done in"
        self._write(f"{self._verb}: {end} {time.perf_counter() - self._began:.1f} s")
        print(file=self._stream, flush=True)

    def stage(self, label: str, total: int) -> None:
        """Draw an empty bar."""
        self._label, self._total = label, total
        self._draw(0)

    def step(self, done: int) -> None:
        """Fill it, at most ten times a second."""
        if done == self._total or time.perf_counter() - self._drawn > 0.1:
            self._draw(done)

    def _draw(self, done: int) -> None:
        self._drawn = time.perf_counter()
        full = WIDTH * done // max(1, self._total)
        bar = "#" * full + "." * (WIDTH - full)
        self._write(f"{self._verb}: {self._label} [{bar}] {done}/{self._total}  {self._drawn - self._began:.1f} s")

    def _write(self, text: str) -> None:
        print(f"\r{text:78}", end="", file=self._stream, flush=True)


class Of(Quiet):
    """Name the part of a whole that stages belong to."""

    def __init__(self, whole: Progress, part: str) -> None:
        self._whole, self._part = whole, part

    def stage(self, label: str, total: int) -> None:
        """Begin a stage of the whole."""
        self._whole.stage(f"{self._part}: {label}", total)

    def step(self, done: int) -> None:
        """Pass it on."""
        self._whole.step(done)


class Bars(Quiet):
    """Draw one bar a stage, with the time left."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Display

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._display = Display(*columns, console=Console(file=stream))
        self._task: Any = None

    def __enter__(self) -> "Bars":
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()

    def stage(self, label: str, total: int) -> None:
        """Add a bar."""
        self._task = self._display.add_task(label, total=total)

    def step(self, done: int) -> None:
        """Move it."""
        self._display.update(self._task, completed=done)


def make_progress(progress: bool | None, stream: TextIO | None = None, verb: str = "ptq") -> Progress:
    """Return what shows the progress of a verb.

    Args:
        progress: False shows nothing; None shows bars on a terminal or in a notebook, nothing elsewhere; True also
            lines elsewhere, and where rich, which draws the terminal's bars, is not installed.
        stream: Where; None is the standard error.
        verb: Said in front of lines.
    """
    stream = sys.stderr if stream is None else stream
    notebook = type(stream).__module__.partition(".")[0] == "ipykernel"
    if progress is False or (progress is None and not notebook and not stream.isatty()):
        return Quiet()
    if notebook:
        return OneLine(stream, verb)
    if stream.isatty():
        try:
            return Bars(stream)
        except ImportError:
            pass  # rich belongs to an extra; lines say the same
    return Lines(stream, verb)
