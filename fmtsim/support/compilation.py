# SPDX-License-Identifier: Apache-2.0
"""The kernels that this process compiled, and the line that explains the wait for the first ones."""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fmtsim.support.progress import watched

PATIENCE = 1.0  # seconds of compiling in a process before a line says so
compiled: list[str] = []
"""The kernels that this process has compiled."""
_spent = 0.0  # seconds that this took
_said = False


@contextlib.contextmanager
def compiling(kernel: str, folder: Path | None) -> Iterator[None]:
    """Compile a kernel inside; after a second of compiling, one line says once what is compiled and where it is stored.

    The line goes to standard error of a terminal or a notebook, and comes from the first process of several.
    """
    global _spent
    timer = threading.Timer(max(PATIENCE - _spent, 0.0), _say_compiling, (kernel, folder))
    timer.daemon = True
    # of several processes the first of the machine alone, and no worker of another
    if (
        multiprocessing.parent_process() is None
        and os.environ.get("LOCAL_RANK", "0") == "0"
        and sys.stderr is not None
        and watched(sys.stderr)
    ):
        timer.start()
    start = time.perf_counter()
    try:
        yield
    finally:
        timer.cancel()
        _spent += time.perf_counter() - start
    compiled.append(kernel)


def expect_compiling() -> None:
    """Leave the line of ``compiling`` out: what runs says itself that it compiles."""
    global _said
    _said = True


def _say_compiling(kernel: str, folder: Path | None) -> None:
    global _said
    if _said:
        return
    _said = True
    storage = f"once; they are kept in {folder}" if folder is not None else "and in every process, for want of a folder"
    print(
        f"fmtsim: compiling {kernel} and other kernels, {storage} (fmtsim warmup does it ahead)",
        file=sys.stderr,
        flush=True,
    )
