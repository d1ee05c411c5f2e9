"""Show how a training comparison comes along: live bars on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from typing import Any, TextIO

from fmtsim.training.loop import Progress, Run

LINES = 10  # plain progress prints this many lines a run


class Quiet:
    """Show nothing."""

    def start(self, label: str, steps: int) -> None:
        """Do nothing."""

    def step(self, done: int, loss: float) -> None:
        """Do nothing."""

    def finish(self, run: Run) -> None:
        """Do nothing."""


class Lines:
    """Print a line about every tenth of a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, label: str, steps: int) -> None:
        """Remember what runs and since when."""
        self._label, self._steps, self._began = label, steps, time.perf_counter()

    def step(self, done: int, loss: float) -> None:
        """Print a line when another tenth is done."""
        if done * LINES // self._steps == (done - 1) * LINES // self._steps:
            return
        seconds = time.perf_counter() - self._began
        print(
            f"{self._label}: step {done}/{self._steps}  loss {loss:.4f}  {seconds:.1f} s", file=self._stream, flush=True
        )

    def finish(self, run: Run) -> None:
        """Print why a run ended early."""
        if run.stopped:
            print(f"{run.label}: stopped, {run.stopped}", file=self._stream, flush=True)


class Bars:
    """Draw one bar a run with its loss and the time left; a context manager, because it owns the terminal's lines."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Display

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._display = Display(*columns, console=Console(file=stream))
        self._task: Any = None

    def __enter__(self) -> "Bars":
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def start(self, label: str, steps: int) -> None:
        """Add a bar."""
        self._task = self._display.add_task(label, total=steps, loss="-")

    def step(self, done: int, loss: float) -> None:
        """Move it."""
        self._display.update(self._task, completed=done, loss=f"{loss:.4f}")

    def finish(self, run: Run) -> None:
        """Say why a run ended early."""
        if run.stopped:
            self._display.update(self._task, loss=f"[bold]{run.losses[-1]}[/bold]")
            self._display.console.print(f"{run.label}: stopped, {run.stopped}", highlight=False, markup=False)


def make_progress(quiet: bool, stream: TextIO | None = None) -> Progress:
    """Return bars on a terminal where rich is installed, else lines, or nothing if quiet; the stream is stderr."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Quiet()
    if stream.isatty():
        try:
            return Bars(stream)
        except ImportError:
            pass  # rich belongs to an extra; lines say the same
    return Lines(stream)
