# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors (fmtsim/lab/analysis/fingerprint.py) in one launch each; nothing waits for the device."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import BYTES_AT_ONCE, NARROW, macros
from fmtsim.cuda.runtime import Defines, device_index, kernel

_FILE, _THREADS, _WARP = "fingerprint.cu", 256, 32
_ROWS, _RUN = 4, 1 << 16  # of a team of threads; words of a sum
_LONG = 1024  # words of a row that a whole block of threads shares
_WORD = 4  # bytes


Launch = Callable[[int, int, int], None]


def fingerprint(x: Tensor, width: int, members: int, address: int) -> Launch | None:
    """Return the launch that adds a tensor's fingerprint to numbers on its device, None where no kernel serves.

    Args:
        x: A plain contiguous tensor of real numbers that is not empty.
        width: Elements of a row.
        members: Into how many equal shares its rows are divided.
        address: Of x.

    Returns:
        A function of three addresses on the device: of x; of zeros, int64, for the hash, the bits of the largest
        magnitude of float32, bfloat16 and float16 in their own dtype, and the hashes of the shares; and of the
        multipliers of the words of a run, int64 [65536].
    """
    return _prepared(x.numel(), width, x.dtype, members, address % BYTES_AT_ONCE, device_index(x))


@lru_cache(maxsize=4096)
def _prepared(numel: int, width: int, dtype: torch.dtype, members: int, offset: int, index: int) -> Launch | None:
    """Return a launch; None where words begin between others."""
    size, rows = dtype.itemsize, numel // width
    word = _WORD if width * size % _WORD == 0 else size
    if offset % word:
        return None
    words = width * size // word
    vector = 4 if word == _WORD and offset == 0 and words % 4 == 0 else 1
    team = _THREADS if min(words, _RUN) >= _LONG else _WARP
    runs = -(-words // _RUN)
    grid = -(-(-(-rows // _ROWS) * runs * team) // _THREADS)
    numbers = (np.uint64(n) for n in (rows, words, runs, rows * runs // members))
    start = kernel(_FILE, "fingerprint", index, _defines(dtype, word, vector))
    return partial(start.bound(_THREADS, 3, *numbers, np.uint32(team)), grid)


@lru_cache(maxsize=64)
def _defines(dtype: torch.dtype, word: int, vector: int) -> Defines:
    return macros(WORD=8 * word, VECTOR=vector, LARGEST=8 * dtype.itemsize if dtype in NARROW else 0)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of the usual kinds of kernel."""
    for dtype in (*NARROW, torch.int64):
        for vector in (4, 1):
            yield _FILE, "fingerprint", _defines(dtype, _WORD, vector)
