# SPDX-License-Identifier: Apache-2.0
"""Threads of the CPU engine and the memory they work in.

The pool is the engine's own, rebuilt after a fork, and runs kernels without the GIL. Each thread keeps buffers from
call to call, since fresh pages cost more than a product.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import distributed

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
    parts = 1 if count * weight < 2 * _GRAIN else threads_for(count * weight)
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


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array.

    Memory that ``Tensor.numpy`` has shown cannot be resized any more, as FSDP2 does to free the weights of a layer:
    where there are ranks, DLPack shows it, which takes three times as long.
    """
    ranks = distributed.is_available() and distributed.is_initialized()
    return np.from_dlpack(tensor) if ranks and tensor.numel() else tensor.numpy()


_LARGE = 32 << 20  # bytes


def past_caches(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return True where stores to ``out`` had better go past the caches: it exceeds them, and is no line that was read.

    A plain store reads its line first on many machines.
    """
    return out.nbytes >= _LARGE and out.data_ptr() % _LINE == 0 and out.data_ptr() != x.data_ptr()


_KEPT = 32 << 20  # bytes of a buffer that is kept
_LINE = 64
_local = threading.local()
_NOTHING = np.empty(0, np.uint8)


def scratch(name: str, count: int, dtype: type) -> np.ndarray:
    """Return an uninitialised array of this thread that begins at a cache line; the next call by its name reuses it."""
    buffers = _local.__dict__.setdefault("buffers", {})
    buffer, view = buffers.get(name, (_NOTHING, _NOTHING))
    if view.size == count and view.dtype.type is dtype:  # as in the last call
        return view
    size = count * np.dtype(dtype).itemsize
    if buffer.size < size:
        whole = np.empty(size + _LINE, np.uint8)
        start = -whole.ctypes.data % _LINE
        buffer = whole[start : start + size]
    view = buffer[:size].view(dtype)
    if buffer.size <= _KEPT:
        buffers[name] = buffer, view
    return view


def memory(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return ``scratch`` as a tensor."""
    return torch.from_numpy(scratch(name, math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
