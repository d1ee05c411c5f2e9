"""Show how a quantisation comes along: a bar a stage on a terminal, lines elsewhere, or nothing."""

import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO


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

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def stage(self, label: str, total: int) -> None:
        """Remember what runs and since when."""
        self._label, self._total, self._began = label, total, time.perf_counter()

    def step(self, done: int) -> None:
        """Print the stage's last step."""
        if done == self._total:
            seconds = time.perf_counter() - self._began
            print(f"ptq: {self._label} {done}/{self._total}  {seconds:.1f} s", file=self._stream, flush=True)


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


def make_progress(progress: bool | None, stream: TextIO | None = None) -> Progress:
    """Return bars on a terminal where rich is installed, else lines; nothing if False, or off a terminal if None."""
    stream = sys.stderr if stream is None else stream
    if progress is False or (progress is None and not stream.isatty()):
        return Quiet()
    if stream.isatty():
        try:
            return Bars(stream)
        except ImportError:
            pass  # rich belongs to an extra; lines say the same
    return Lines(stream)
