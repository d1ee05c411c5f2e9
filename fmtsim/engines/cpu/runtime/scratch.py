# SPDX-License-Identifier: Apache-2.0
"""Memory that kernels work in: kept by each thread from call to call, since fresh pages cost more than a product."""

import threading

import numpy as np
import torch
from torch import distributed


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array.

    Memory that ``Tensor.numpy`` has shown cannot be resized any more, as FSDP2 does to free the weights of a layer:
    where there are ranks, DLPack shows it, which takes three times as long.
    """
    ranks = distributed.is_available() and distributed.is_initialized()
    return np.from_dlpack(tensor) if ranks and tensor.numel() else tensor.numpy()


_KEPT = 32 << 20  # bytes of a buffer that is kept
_LINE = 64
_local = threading.local()


def scratch(name: str, count: int, dtype: type) -> np.ndarray:
    """Return an uninitialised array of this thread that begins at a cache line; the next call by its name reuses it."""
    size = count * np.dtype(dtype).itemsize
    buffers = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get(name)
    if buffer is None or buffer.size < size:
        whole = np.empty(size + _LINE, np.uint8)
        start = -whole.ctypes.data % _LINE
        buffer = whole[start : start + size]
        if size <= _KEPT:
            buffers[name] = buffer
    return buffer[:size].view(dtype)
