# SPDX-License-Identifier: Apache-2.0
"""Sums of whole numbers times others modulo 2**64, of which fingerprints of tensors are made."""

import numpy as np
import torch
from numpy import int32, int64

from fmtsim.engines.cpu.runtime.jit import kernel
from fmtsim.engines.cpu.runtime.pool import run, threads_for


def weighted_sums(
    words: torch.Tensor, multipliers: torch.Tensor, masks: tuple[int, int] = (0, 0)
) -> tuple[torch.Tensor, int]:
    """Return the sums of each row's runs, int64 [rows, runs], ``sum(word * multiplier)`` modulo 2**64, and a largest.

    Args:
        words: [rows, width] of int8, int16 or int32, contiguous.
        multipliers: int64: as many as a run has words; the last run of a row may be shorter.
        masks: The largest is that of all ``word & masks[0]`` and ``(word >> 16) & masks[1]``: the bits of the largest
            magnitude where words hold floats. It costs no second read.
    """
    rows, width = words.shape
    out = np.empty((rows, -(-width // multipliers.shape[0])), np.int64)
    arrays = words.numpy(), multipliers.numpy(), out
    if threads_for(words.numel()) == 1:
        return torch.from_numpy(out), _sums(*arrays, *masks, 0, rows)
    found: list[int] = []
    run(lambda start, stop: found.append(_sums(*arrays, *masks, start, stop)), rows, 1, width)
    return torch.from_numpy(out), max(found)


@kernel
def _sums(words, multipliers, out, low, high, start, stop):  # type: ignore[no-untyped-def]
    size = multipliers.size
    low, high, largest = int32(low), int32(high), int32(0)
    for row in range(start, stop):
        for part in range(out.shape[1]):
            first = part * size
            count = min(size, words.shape[1] - first)
            numbers = words[row, first : first + count]
            total = int64(0)
            for i in range(np.int64(count)):
                word = int32(numbers[i])
                total += int64(word) * multipliers[i]
                largest = max(largest, max(word & low, (word >> int32(16)) & high))
            out[row, part] = total
    return largest
