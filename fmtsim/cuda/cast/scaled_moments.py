"""Means over whole matrices, as folded sums of float64 (``fmtsim.scaling.statistics``)."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.runtime.program import Defines, device_index, kernel

_FOLDED = 32  # numbers that a thread adds up
_THREADS = 256
_LAST = 1024 * _FOLDED  # numbers that the last block of threads adds up


def mean_of(x: Tensor, statistic: str, input_type: int) -> Tensor:
    """Return the mean magnitude (``"mean_abs"``) or the root mean square (``"rms"``) of the finite elements of x.

    Args:
        x: Contiguous, not empty.
        statistic: Which of the two.
        input_type: The macro INPUT of x's dtype.

    Returns:
        Bits of a float32, int32 [1].
    """
    index, macros, squares = device_index(x), _macros(input_type), np.uint32(statistic == "rms")
    total = x.numel()
    left = max(1 << (total - 1).bit_length(), _LAST) // _FOLDED
    sums = torch.empty(left, dtype=torch.float64, device=x.device)
    counts = torch.empty(left // _THREADS, dtype=torch.int32, device=x.device)
    kernel("scaled_moments.cu", "fold_elements", index, macros)(
        left // _THREADS, _THREADS, x, sums, counts, np.uint64(total), np.uint64(left), squares
    )
    while left > _LAST:
        left //= _FOLDED
        before, sums = sums, torch.empty(left, dtype=torch.float64, device=x.device)
        kernel("scaled_moments.cu", "fold_sums", index, macros)(
            left // _THREADS, _THREADS, before, sums, np.uint64(left)
        )
    found = torch.empty(1, dtype=torch.int32, device=x.device)
    numbers = np.uint32(counts.numel()), np.uint32(left), squares
    kernel("scaled_moments.cu", "fold_last", index, macros)(1, 1024, sums, found, counts, *numbers)
    return found


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kernel."""
    for input_type in range(2):
        for name in ("fold_elements", "fold_sums", "fold_last"):
            yield "scaled_moments.cu", name, _macros(input_type)


def _macros(input_type: int) -> Defines:
    return (("INPUT", str(input_type)),)
