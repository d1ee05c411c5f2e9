# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM on the command line: one line and the status that shells expect, from the first import on.

Importing this module, which comes before all that is slow, lets a signal end the command line at once. Programs that
import fmtsim keep their own handlers.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class _Interrupt(KeyboardInterrupt):
    """Leave the exit status alone: a plain KeyboardInterrupt in text that ``exec`` runs makes Python end by SIGINT."""


@contextlib.contextmanager
def raised() -> Iterator[Callable[[], tuple[str, int]]]:
    """Raise KeyboardInterrupt at the first signal inside; the second one ends the process.

    Yields:
        What says how the process was interrupted: a word, and the exit status.
    """
    received = [signal.SIGINT]

    def interrupt(number: int, frame: FrameType | None) -> None:
        received[:] = [signal.Signals(number)]
        _handle(_end)
        while frame is not None:  # a destructor and an LLVM callback lose exceptions (half a kernel remains)
            if frame.f_code.co_name == "__del__" or "llvmlite" in frame.f_code.co_filename:
                _end(number, frame)
            frame = frame.f_back
        raise _Interrupt

    before = {number: signal.getsignal(number) for number in _WORDS}
    here = threading.current_thread() is threading.main_thread()
    if here:
        _handle(interrupt)
    try:
        yield lambda: (_WORDS[received[0]], 128 + received[0])
    finally:
        for number, handler in before.items() if here else ():
            signal.signal(number, handler)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    """Set the handler of both signals, except signals that the parent process had ignored, as nohup does."""
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"\nfmtsim: {_WORDS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Start processes inside that do not hear Ctrl-C, which reaches all that a terminal runs; it comes here behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The command line, `python -m fmtsim` or `fmtsim`, ends at once from here on.
_words, _program = sys.orig_argv, getattr(sys, "argv", [""])[0]
_module = "-m" in _words and _words[_words.index("-m") + 1 :][:1] == ["fmtsim"]
if _module or (os.path.basename(_program) == "fmtsim" and _program in _words):
    _handle(_end)
