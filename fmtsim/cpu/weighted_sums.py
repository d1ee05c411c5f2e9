"""Sums of whole numbers times others modulo 2**64, of which fingerprints of tensors are made."""

import numpy as np
import torch
from numpy import int64

from fmtsim.cpu.runtime.jit import kernel
from fmtsim.cpu.runtime.pool import run


def weighted_sums(words: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """Return the sums of each row's runs, int64 [rows, runs]: ``sum(word * multiplier)`` modulo 2**64.

    Args:
        words: [rows, width] of int8, int16 or int32, contiguous.
        multipliers: int64: as many as a run has words; the last run of a row may be shorter.
    """
    rows, width = words.shape
    size = len(multipliers)
    out = torch.empty(rows, -(-width // size), dtype=torch.int64)
    arrays = words.numpy(), multipliers.numpy(), out.numpy()
    run(lambda start, stop: _sums(*arrays, start, stop), rows, 1, width)
    return out


@kernel
def _sums(words, multipliers, out, start, stop):  # type: ignore[no-untyped-def]
    size = multipliers.size
    for row in range(start, stop):
        for part in range(out.shape[1]):
            first = part * size
            count = min(size, words.shape[1] - first)
            numbers = words[row, first : first + count]
            total = int64(0)
            for i in range(np.int64(count)):
                total += int64(numbers[i]) * multipliers[i]
            out[row, part] = total
