# SPDX-License-Identifier: Apache-2.0
"""Rounding thresholds of codebooks, which give the bits of the libraries that the schemes come from."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fmtsim.formats.element import CodebookFormat
from fmtsim.support.errors import ArgumentError

KEY_SHIFT = 16
"""Bits that a bucket's key leaves out of a float32 number: sign, exponent and 7 mantissa bits stay."""

LOWEST_KEY = (127 - 23) << 7
"""Key of 2**-23; magnitudes below it share the first bucket of their sign."""

BUCKETS = ((127 << 7) - LOWEST_KEY) + 1
"""Buckets of a sign: the last one holds 1 and whatever lies above it."""


NO_THRESHOLD = 1 << KEY_SHIFT
"""Stands for a threshold above every number of a bucket."""


class Table(NamedTuple):
    """Hold a codebook for kernels.

    values: float32 [codes]. words: int32 [2 * BUCKETS], a bucket's lowest code and its threshold, negative numbers
    behind the others. The bucket of y is given by the key ``|bits(y)| >> KEY_SHIFT``, its offset by the bits below,
    complemented where y is negative; the code is ``(word >> 17) + (offset >= (word & 0x1FFFF))``.
    """

    values: np.ndarray
    words: np.ndarray


@lru_cache(maxsize=32)
def codebook_thresholds(fmt: CodebookFormat, ties: str) -> np.ndarray:
    """Return the least float32 number that rounds above each code but the last, in order.

    Half-way is ``fl(fl(a + b) / 2)`` for neighbours a < b with ties to even codes, as bitsandbytes' search has it;
    with ties up it is the least x with ``fl(x - a) >= fl(fl(b - a) / 2)``, as torchao's has it.
    """
    values = np.array(fmt.values, np.float32)
    low, high = values[:-1], values[1:]
    if ties == "even":
        middle = (low + high) * np.float32(0.5)
        above = np.nextafter(middle, np.float32(np.inf), dtype=np.float32)
        return np.where(np.arange(low.size) % 2 == 1, middle, above).astype(np.float32)
    thresholds, down, up = [], np.float32(-np.inf), np.float32(np.inf)
    for a, b in zip(low, high, strict=True):
        # of the float32 numbers near the middle the first whose distance from a is half a step or more
        half = np.float32(b - a) * np.float32(0.5)
        x = np.float32(a + half)
        while np.float32(x - a) >= half:
            x = np.nextafter(x, down, dtype=np.float32)
        while np.float32(x - a) < half:
            x = np.nextafter(x, up, dtype=np.float32)
        thresholds.append(x)
    return np.array(thresholds, np.float32)


@lru_cache(maxsize=32)
def table_of(fmt: CodebookFormat, ties: str) -> Table:
    """Return a codebook of magnitudes up to 1 for kernels.

    Raises:
        ArgumentError: The codebook has more than 256 values, or several thresholds in one bucket.
    """
    thresholds = codebook_thresholds(fmt, ties)
    if len(fmt.values) > 256 or fmt.max > 1:
        raise ArgumentError(f"{fmt.name} has {len(fmt.values)} values up to {fmt.max:g}; kernels take 256 up to 1")
    keys = np.arange(BUCKETS, dtype=np.int64) + LOWEST_KEY
    first = np.where(keys == LOWEST_KEY, 0, keys << KEY_SHIFT).astype(np.uint32).view(np.float32)
    last = (((keys + 1) << KEY_SHIFT) - 1).astype(np.uint32).view(np.float32)
    low, high = np.concatenate([first, -last]), np.concatenate([last, -first])
    codes, ends = (np.searchsorted(thresholds, x, side="right") for x in (low, high))
    inside = ends - codes
    if inside.max() > 1 or inside[0] or inside[BUCKETS]:
        raise ArgumentError(f"{fmt.name} has values closer than kernels tell apart; its state has no fast path")
    offsets = thresholds[np.minimum(codes, len(thresholds) - 1)].view(np.int32) & (NO_THRESHOLD - 1)
    offsets = np.where(np.arange(2 * BUCKETS) < BUCKETS, offsets, NO_THRESHOLD - 1 - offsets)
    words = (codes << (KEY_SHIFT + 1)) | np.where(inside == 1, offsets, NO_THRESHOLD)
    return Table(np.array(fmt.values, np.float32), words.astype(np.int32))
