# SPDX-License-Identifier: Apache-2.0
"""Threads of the CPU engine: a pool of our own, rebuilt after fork, that runs kernels without the GIL."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from fmtsim.support.errors import ArgumentError, shown

_GRAIN = 1 << 16  # elements below which a second thread costs more than it brings
_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def set_num_threads(count: int | None) -> None:
    """Bound the threads of the CPU engine; None returns to ``torch.get_num_threads()``.

    Results do not depend on it.

    Raises:
        ArgumentError: count is below 1.

    >>> import fmtsim
    >>> fmtsim.set_num_threads(1)
    >>> fmtsim.get_num_threads()
    1
    >>> fmtsim.set_num_threads(None)  # torch's number again
    """
    global _threads
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ArgumentError(
            f"count={shown(count)} threads are not possible; choose 1 or more, or None for torch's setting"
        )
    _threads = count


def get_num_threads() -> int:
    """Return how many threads the CPU engine may use.

    >>> import fmtsim
    >>> fmtsim.get_num_threads() >= 1
    True
    """
    return _threads if _threads is not None else torch.get_num_threads()


def threads_for(weight: int) -> int:
    """Return how many threads work of so many elements is worth, at most ``get_num_threads()``."""
    return min(get_num_threads(), max(weight // _GRAIN, 1))


def run(function: Callable[[int, int], None], count: int, align: int, weight: int = 1) -> None:
    """Call ``function(start, stop)`` over ``range(count)``, split among threads at multiples of ``align``.

    ``weight`` is the work of one item in elements. Errors of any part are raised after all parts have ended.
    """
    parts = threads_for(count * weight)
    step = math.ceil(math.ceil(count / parts) / align) * align if count else 1
    if step >= count:
        if count:
            function(0, count)
        return
    futures = [_executor(parts).submit(function, i, min(i + step, count)) for i in range(step, count, step)]
    try:
        function(0, step)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    if _pool is None or _pool_size < size:
        _pool = ThreadPoolExecutor(size, thread_name_prefix="fmtsim")
        _pool_size = size
    return _pool


def _forget_pool() -> None:
    """Drop the pool in a forked child: its threads did not survive the fork."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
