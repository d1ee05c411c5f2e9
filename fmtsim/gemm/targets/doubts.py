# SPDX-License-Identifier: Apache-2.0
"""How targets warn of a call: once a process, at the user's line, and not at all while calls are only looked at."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from fmtsim.spec.call import GemmCall

_silent = ContextVar("silent", default=False)
_warned: set[tuple[type[Warning], str, GemmCall]] = set()
_lock = threading.Lock()
# Files that lie between a user's line and a warning: modules, autograd and torch.compile call fmtsim out of torch.
_INNER = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))


@contextmanager
def without_doubts() -> Iterator[None]:
    """Warn of no guess and no bug of a library in this thread, and count none as warned of."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def warn_once(category: type[Warning], target: str, call: GemmCall, text: Callable[[], str]) -> None:
    """Warn of a call on a target, once a process.

    Args:
        category: What the warning is about.
        target: Name of the target.
        call: The facts of the call.
        text: Returns what is said; it is asked only where it is.
    """
    if _silent.get():
        return
    with _lock:
        key = category, target, call
        known = key in _warned
        _warned.add(key)
    if not known:
        warnings.warn(text(), category, stacklevel=caller_level())


def caller_level() -> int:
    """Return the stacklevel at which a warning of the calling function names the line of the user's that led to it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    return level
