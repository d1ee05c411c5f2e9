# SPDX-License-Identifier: Apache-2.0
"""Where the engines keep what they have compiled: files that are whole or not there at all; and who hears of it."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from fmtsim.errors import DataError
from fmtsim.files import remove_stale, write_file
from fmtsim.progress import watched

PATIENCE = 1.0  # seconds of compiling in a process before a line says so
_DIGEST = 32  # bytes of SHA-256 before the content of a file
_said: set[str] = set()

compiled: list[str] = []
"""The kernels that this process has compiled."""
_spent = 0.0  # seconds that this took


@contextlib.contextmanager
def compiling(kernel: str, folder: Path | None) -> Iterator[None]:
    """Compile a kernel inside; where somebody waits for that, one line says once what is done and where it is kept.

    The line goes to standard error of a terminal or a notebook, and comes from the first process of several.
    """
    global _spent
    timer = threading.Timer(max(PATIENCE - _spent, 0.0), _say_compiling, (kernel, folder))
    timer.daemon = True
    if _first_process() and sys.stderr is not None and watched(sys.stderr):
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
    _said.add("compiling")


def _say_compiling(kernel: str, folder: Path | None) -> None:
    if "compiling" in _said:
        return
    _said.add("compiling")
    kept = f"once; they are kept in {folder}" if folder is not None else "and in every process, for want of a folder"
    print(
        f"fmtsim: compiling {kernel} and other kernels, {kept} (fmtsim warmup does it ahead)",
        file=sys.stderr,
        flush=True,
    )


def _first_process() -> bool:
    """Say whether this process is nobody's worker, and the first rank of its machine."""
    return multiprocessing.parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0"


def kernel_folder(name: str) -> Path | None:
    """Return a folder of compiled kernels, made if need be; None (with one warning) where none can be written.

    ``FMTSIM_CACHE_DIR`` names its parent; otherwise ``fmtsim`` in ``XDG_CACHE_HOME`` or ``~/.cache`` is that.
    """
    chosen = os.environ.get("FMTSIM_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # an unknown home leaves its "~"
    folder = Path(chosen or f"{base}/fmtsim") / name
    try:
        if not chosen and base.startswith("~"):
            raise OSError(errno.ENOENT, "no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        remove_stale(folder)
    except OSError as error:
        _warn_unwritable(folder, error)
        return None
    return folder


def save(path: Path, content: bytes) -> None:
    """Write a file of the cache, which appears whole or not at all; one warning says where there is no room."""
    try:
        write_file(path, hashlib.sha256(content).digest() + content)
    except DataError as error:
        _warn_unwritable(path.parent, error.__cause__)


def load(path: Path) -> bytes | None:
    """Return the content of a file of the cache; None where there is none, or (with one warning) a damaged one."""
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_damaged(path, f"cannot be read ({error.strerror})")
        return None
    if hashlib.sha256(stored[_DIGEST:]).digest() != stored[:_DIGEST]:
        _warn_damaged(path, "is truncated or was changed")
        return None
    return stored[_DIGEST:]


def _warn_unwritable(folder: Path, error: BaseException | None) -> None:
    """Say once that kernels are not kept in a folder."""
    _warn_once(
        f"fmtsim cannot write its kernel cache {folder}",
        f" ({getattr(error, 'strerror', None) or error}); kernels are compiled anew in every process. "
        "Set FMTSIM_CACHE_DIR to a folder that can be written.",
    )


def _warn_damaged(path: Path, how: str) -> None:
    _warn_once(
        f"fmtsim found a damaged file in its kernel cache {path.parent}",
        f": {path.name} {how}; its kernel is compiled again. If this comes back, delete the folder.",
    )


def _warn_once(what: str, more: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(what + more, stacklevel=4)
