# SPDX-License-Identifier: Apache-2.0
"""Faults for child processes and writers: signals at chosen or random moments, disks that are full."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

POLL = 0.005  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child process ended: ``status`` is that of subprocess, the negative number of a signal that ended it."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def start(command: Sequence[str] | str, file_limit: int | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start a command, or Python code, in a session of its own.

    SIGINT gets its handler back, because what a shell or nohup started in the background ignores it and hands that on.
    ``file_limit`` is the largest file in bytes that the child may write: past it any writer gets EFBIG.
    """

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    arguments = [sys.executable, "-c", command] if isinstance(command, str) else list(command)
    return subprocess.Popen(
        arguments,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
    )


def run(
    command: Sequence[str] | str,
    *,
    kill: float | Callable[[], bool] | None = None,
    number: int = signal.SIGKILL,
    timeout: float = 200,
    file_limit: int | None = None,
    **environment: str,
) -> Ended:
    """Run a command, or Python code, and send it a signal after ``kill`` seconds or as soon as ``kill()`` is true.

    Without ``kill``, or where the child ends before, no signal is sent. What the child leaves running is killed.
    """
    began = time.monotonic()
    process = start(command, file_limit, **environment)
    try:
        if kill is not None:
            due = kill if callable(kill) else lambda: time.monotonic() - began >= kill
            while process.poll() is None and not due() and time.monotonic() - began < timeout:
                time.sleep(POLL)
            if process.poll() is None:
                process.send_signal(number)
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(status=process.returncode, stdout=stdout, stderr=stderr, seconds=time.monotonic() - began)


def moments(count: int, longest: float, seed: int) -> list[float]:
    """Return random moments of a command that takes ``longest`` seconds."""
    draw = random.Random(seed)
    return [draw.uniform(0, longest) for _ in range(count)]


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write files of at most ``size`` bytes: past that any writer, in C too, gets EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a disk of ``size`` bytes on a folder, past which writers get ENOSPC; skip the test without the right."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root; largest_file() serves everyone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
