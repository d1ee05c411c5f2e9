# SPDX-License-Identifier: Apache-2.0
"""Show how a long job comes along: bars on a terminal, one bar in a notebook, a few lines elsewhere, or nothing."""

import sys
import time
from typing import Any, TextIO

PARTS = 10  # lines a stage at the most
WIDTH = 24  # of a notebook's bar
PAUSE = 2.0  # seconds between two lines of a stage, so that quick stages leave one


class Progress:
    """Show nothing; the base of those that do. A context manager, because bars own the terminal's lines."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        """Show nothing any more."""

    def stage(self, label: str, total: int) -> None:
        """Begin a stage of so many steps."""

    def step(self, done: float, note: str = "") -> None:
        """Say how many steps of the stage are done, and a word on the last one."""

    def say(self, text: str) -> None:
        """Tell what happened, on a line of its own."""


class _Text(Progress):
    """Keep what runs and since when, and put it into words."""

    def __init__(self, stream: TextIO, verb: str = "") -> None:
        self._stream, self._verb = stream, f"{verb}: " if verb else ""

    def stage(self, label: str, total: int) -> None:
        """Remember what runs and since when."""
        self._label, self._total = label, max(total, 1)
        self._began = self._shown = time.perf_counter()

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)

    def _words(self, done: float, note: str, bar: str, spent: float) -> str:
        seconds = (time.perf_counter() - self._began) * (self._total - done) / done if 0 < done < self._total else None
        ending = "" if seconds is None else f", {_span(seconds)} left"
        words = (f"{self._verb}{self._label}{bar} {int(done)}/{self._total}", note, f"{_span(spent)}{ending}")
        return "  ".join(word for word in words if word)


class Lines(_Text):
    """Print a line when a stage ends, and about every tenth of it where that takes seconds.

    Whole lines, nothing that a terminal would have to carry out: logs show them as they are.
    """

    def stage(self, label: str, total: int) -> None:
        """Begin to count tenths."""
        super().stage(label, total)
        self._part = 0

    def step(self, done: float, note: str = "") -> None:
        """Print a line where the stage is done, or has come far enough since the last one."""
        now, part = time.perf_counter(), int(done * PARTS / self._total)
        if done < self._total and (part == self._part or now - self._shown < PAUSE):
            return
        self._part, self._shown = part, now
        self.say(self._words(done, note, ":", now - self._began))


class OneLine(_Text):
    """Draw one bar for all stages and write over it, as notebooks allow."""

    def __init__(self, stream: TextIO, verb: str = "") -> None:
        super().__init__(stream, verb)
        self._first = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        end = "failed after" if any(error) else "done in"
        self.say(f"{self._verb}{end} {_span(time.perf_counter() - self._first)}")

    def stage(self, label: str, total: int) -> None:
        """Draw an empty bar."""
        super().stage(label, total)
        self.step(0)

    def step(self, done: float, note: str = "") -> None:
        """Fill it, at most ten times a second."""
        now = time.perf_counter()
        if 0 < done < self._total and now - self._shown < 0.1:
            return
        self._shown = now
        full = min(int(WIDTH * done / self._total), WIDTH)
        self._write(self._words(done, note, f" [{'#' * full}{'.' * (WIDTH - full)}]", now - self._first))

    def say(self, text: str) -> None:
        """Leave a line behind in place of the bar."""
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        print(f"\r{'':100}\r{text}", end="", file=self._stream, flush=True)


class Of(Progress):
    """Name the part of a whole that stages belong to."""

    def __init__(self, whole: Progress, part: str) -> None:
        self._whole, self._part = whole, part
        self.step = whole.step  # type: ignore[method-assign]

    def stage(self, label: str, total: int) -> None:
        """Begin a stage of the whole."""
        self._whole.stage(f"{self._part}: {label}", total)

    def say(self, text: str) -> None:
        """Pass it on, with the part's name."""
        self._whole.say(f"{self._part}: {text}")


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

    def __exit__(self, *error: object) -> None:
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


def make_progress(
    progress: bool | None, stream: TextIO | None = None, *, verb: str = "", transient: bool = False
) -> Progress:
    """Return what shows the progress of a job.

    Args:
        progress: False shows nothing; None shows bars on a terminal or in a notebook, nothing elsewhere; True also
            lines elsewhere. Without rich, which belongs to an extra, a terminal gets lines.
        stream: Where; None is the standard error.
        verb: Said in front of lines and of a notebook's bar.
        transient: Whether the bars of a terminal vanish at the end.
    """
    stream = sys.stderr if stream is None else stream
    if progress is False or (progress is None and not watched(stream)):
        return Progress()
    if _in_notebook(stream):
        return OneLine(stream, verb)
    if stream.isatty():
        try:
            return Bars(stream, transient)
        except ImportError:
            pass
    return Lines(stream, verb)


def watched(stream: TextIO) -> bool:
    """Return True if a stream is a terminal or a notebook's."""
    return _in_notebook(stream) or stream.isatty()


def _in_notebook(stream: TextIO) -> bool:
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def _span(seconds: float) -> str:
    """Return ``9.3 s``, above a minute ``1 min 6 s``, above an hour ``1 h 2 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
