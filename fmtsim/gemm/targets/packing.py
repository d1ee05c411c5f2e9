# SPDX-License-Identifier: Apache-2.0
"""Runs of choices in few bytes, and back: columns of bytes, which deflate packs well."""

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

WINDOW: Final = 1 << 15  # bytes that deflate looks back
LARGEST: Final = 1 << 24  # bytes of a decompressed piece, and the largest size in a run


def pack(families: Sequence[Sequence[tuple[int, int]]]) -> bytes:
    """Return runs as planes of bytes: how many a family has, where each begins after the one before, its choice."""
    starts = [start - before for runs in families for start, before in zip(
        (s for s, _ in runs), (0, *(s for s, _ in runs)), strict=False)]  # fmt: skip
    choices = [number for runs in families for _, number in runs]
    return planes([len(runs) for runs in families], 2) + planes(starts, 3) + planes(choices, 2)


def unpack(packed: bytes, families: int, place: int) -> tuple[list[int], list[int]]:
    """Return where the runs of one of so many families begin, and their choices.

    Raises:
        ValueError: The bytes are others.
    """
    runs, left = divmod(len(packed) - 2 * families, 5)
    if left or runs < 0:
        raise ValueError("a block has another size than its families")
    low, high = packed[:families], packed[families : 2 * families]
    begin = sum(low[:place]) + (sum(high[:place]) << 8)
    end = begin + low[place] + (high[place] << 8)
    a, b, c, d, e = (packed[2 * families + plane * runs :][begin:end] for plane in range(5))
    starts = accumulate(x | y << 8 | z << 16 for x, y, z in zip(a, b, c, strict=True))
    return list(starts), [x | y << 8 for x, y in zip(d, e, strict=True)]


def planes(numbers: Sequence[int] | np.ndarray[Any, Any], width: int) -> bytes:
    """Return the lowest bytes of all numbers, then the next ones, which compresses well."""
    return np.asarray(numbers, dtype="<u4").view(np.uint8).reshape(-1, 4).T[:width].tobytes()


def from_planes(packed: bytes, width: int) -> np.ndarray[Any, Any]:
    """Return what ``planes`` was given, as uint64."""
    wide = np.zeros((len(packed) // width, 4), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(packed, dtype=np.uint8).reshape(width, -1).T
    return wide.view("<u4")[:, 0].astype(np.uint64)


def deflate(content: bytes, dictionary: bytes = b"") -> bytes:
    """Return bytes compressed, by a dictionary of bytes like them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, dictionary[-WINDOW:])
    return packer.compress(content) + packer.flush()


def inflate(content: bytes | memoryview, dictionary: bytes = b"") -> bytes:
    """Return what ``deflate`` was given; ValueError or zlib.error where it was not."""
    packer = zlib.decompressobj(-15, dictionary[-WINDOW:])
    found = packer.decompress(content, LARGEST)
    if not packer.eof:
        raise ValueError("a block does not end")
    return found
