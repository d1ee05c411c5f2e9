"""Show how a long job comes along: a bar a stage on a terminal, a few lines elsewhere, or nothing."""

import sys
import time
from types import TracebackType
from typing import Any, TextIO

PARTS = 10  # lines a stage at the most
PAUSE = 2.0  # seconds between two lines of a stage, so that quick stages leave one


class Progress:
    """Show nothing; the base of those that do. A context manager, because bars own the terminal's lines."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show nothing any more."""

    def stage(self, label: str, total: int) -> None:
        """Begin a stage of so many steps."""

    def step(self, done: float, note: str = "") -> None:
        """Say how many steps of the stage are done, and a word on the last one."""

    def say(self, text: str) -> None:
        """Tell what happened, on a line of its own."""


class Lines(Progress):
    """Print a line when a stage ends, and about every tenth of it where that takes seconds.

    Whole lines, nothing that a terminal would have to carry out: notebooks and logs show them as they are.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def stage(self, label: str, total: int) -> None:
        """Remember what runs and since when."""
        self._label, self._total, self._part = label, max(total, 1), 0
        self._began = self._printed = time.perf_counter()

    def step(self, done: float, note: str = "") -> None:
        """Print a line where the stage is done, or has come far enough since the last one."""
        now, part = time.perf_counter(), int(done * PARTS / self._total)
        if done < self._total and (part == self._part or now - self._printed < PAUSE):
            return
        self._part, self._printed = part, now
        spent = now - self._began
        left = f", {_span(spent * (self._total - done) / done)} left" if done < self._total else ""
        words = (f"{self._label}: {int(done)}/{self._total}", note, f"{_span(spent)}{left}")
        self.say("  ".join(word for word in words if word))

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)


class Bars(Progress):
    """Draw one bar a stage, with the time left.

    Args:
        stream: The terminal.
        transient: Whether the bars vanish at the end.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, stream: TextIO, transient: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Display

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self._display = Display(*columns, console=Console(file=stream), transient=transient)
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
        self._task = self._display.add_task(label, total=total, note="")

    def step(self, done: float, note: str = "") -> None:
        """Move it."""
        self._display.update(self._task, completed=done, note=note)

    def say(self, text: str) -> None:
        """Print it above the bars."""
        self._display.console.print(text, highlight=False, markup=False)


def make_progress(progress: bool | None, stream: TextIO | None = None, *, transient: bool = False) -> Progress:
    """Return bars on a terminal, else lines; nothing where ``progress`` is False, or off a terminal where it is None.

    The stream is stderr. Without rich, which belongs to an extra, a terminal gets lines, too.
    """
    stream = sys.stderr if stream is None else stream
    if progress is False or (progress is None and not stream.isatty()):
        return Progress()
    if stream.isatty():
        try:
            return Bars(stream, transient)
        except ImportError:
            pass
    return Lines(stream)


def _span(seconds: float) -> str:
    """Return ``9.3 s`` below a minute, ``1:02:03`` above."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
