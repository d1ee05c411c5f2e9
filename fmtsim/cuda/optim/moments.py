"""A step of Adam on many parameters whose moments are codes of codebooks or expanded groups: a few launches for all.

The definition is fmtsim/optim: rules.py (the update), codec.py (scales and codes); the bits are the same.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Defines
from fmtsim.spec.optimizer import Book

THREADS, CHUNK = 256, 2048
ENTRIES, WORDS = 30, 16
"""Parameters of a launch: their addresses are arguments, of which 4096 bytes fit."""

BLOCKS = (128, 256, 512, 1024, 2048)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RESIDENT, RESIDENT_EXPANDED = 4, 2  # blocks of threads that a multiprocessor holds: 50 and 92 registers a thread
ALIGNED = 16


class Books:
    """The codebooks of both moments, the second never negative, with their tables on every device that asked."""

    def __init__(self, first: Book, second: Book) -> None:
        self.pair, self.bits = (first, second), len(first.values).bit_length() - 1
        self.parameters = _book_bytes(first, signed=True), _book_bytes(second, signed=False)
        self._held: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of both and the words of both."""
        if device not in self._held:
            values = np.concatenate([book.values for book in self.pair])
            positive = self.pair[1].words[: len(self.pair[1].words) // 2]
            words = np.concatenate([self.pair[0].words, positive])
            self._held[device] = torch.from_numpy(values).to(device), torch.from_numpy(words).to(device)
        return self._held[device]


class Launch(NamedTuple):
    """The parameters of one launch.

    table: int64 [ENTRIES, WORDS], struct Entry of the kernels. entries: Of parameters. chunks: Of all of them.
    """

    table: np.ndarray
    entries: int
    chunks: int


def launches(rows: Sequence[tuple[int, ...]]) -> list[Launch]:
    """Return the launches for parameters, a row each.

    A row has addresses, 0 where there is nothing: of parameter and gradient (of one dtype of TYPES, contiguous,
    multiples of ALIGNED), of both moments' codes, scales, powers and centres, of codes and scales of weights. Then
    whether the moments are float32 whatever those of the others are, the place of random words (``weights`` of
    ``fmtsim.spec.optimizer.key_of`` without the step), and the number of elements.
    """
    found = []
    for start in range(0, len(rows), ENTRIES):
        part = np.array(rows[start : start + ENTRIES], np.int64)
        table = np.zeros((ENTRIES, WORDS), np.int64)
        table[: len(part), : WORDS - 1] = part
        chunks = -(-part[:, -1] // CHUNK)
        ends = np.cumsum(chunks)
        table[: len(part), WORDS - 1] = ends - chunks
        found.append(Launch(table, len(part), int(ends[-1])))
    return found


def adam(
    parts: Sequence[Launch],
    like: Tensor,
    books: Books | None,
    numbers: tuple[float, ...],
    block: int,
    zeroing: bool,
    counter: Tensor,
) -> None:
    """Do a step of many parameters in place.

    Args:
        parts: What ``launches`` made of them.
        like: Any of the parameters, which says device and dtype.
        books: Of the moments; None for E4M3 in expanded groups of 128.
        numbers: The first ten fields of ``fmtsim.spec.optimizer.Numbers``, in order.
        block: Numbers that share a scale, one of BLOCKS.
        zeroing: Elements whose gradient is not finite lose their moments and keep their parameter.
        counter: int64, 0-d; grows by the number of elements of gradients that are not finite.
    """
    index = runtime.device_index(like)
    scalars = packed_numbers(numbers, zeroing)
    shared, resident = 0, RESIDENT_EXPANDED
    more: tuple[object, ...] = ()
    if books is None:
        kernel = runtime.kernel("moments_expanded.cu", "adam", index, common_defines(like.dtype))
    else:
        kernel = runtime.kernel("moments.cu", "adam", index, _defines(block, books.bits, like.dtype))
        values, words = books.tables(like.device)
        resident = RESIDENT
        shared, more = 4 * (values.numel() + words.numel()), (*books.parameters, values, words)
    most = resident * runtime.multiprocessors(index)
    for table, entries, chunks in parts:
        if chunks:
            kernel(
                min(chunks, most), THREADS, table.tobytes(), np.int32(entries), np.int64(chunks), scalars, *more,
                counter, shared=shared,
            )  # fmt: skip


def packed_numbers(numbers: tuple[float, ...], zeroing: bool) -> bytes:
    """Return struct Numbers of the kernels.

    The correction is ``sqrt(1 - beta2**step)`` with beta2 < 1, or 1: never below the least that quotient() takes.
    """
    return struct.pack("<11fi", *numbers[:10], np.float32(1) / np.float32(numbers[7]), zeroing)


def common_defines(dtype: torch.dtype) -> Defines:
    """Return the macros that all kernels of moments take."""
    return ("ENTRIES", str(ENTRIES)), ("TYPE", str(TYPES[dtype]))


def _book_bytes(book: Book, *, signed: bool) -> bytes:
    buckets = len(book.words) // 2
    integers = np.array([buckets, book.lowest, book.zero, 1 + signed], np.int32).tobytes()
    return integers + np.float32(book.least).tobytes() + bytes(12)


@lru_cache(maxsize=32)
def _defines(block: int, bits: int, dtype: torch.dtype) -> Defines:
    return (("BLOCK", str(block)), ("BITS", str(bits)), *common_defines(dtype))


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield the kernels for float32 parameters, that of codebooks for every size of blocks; one of bfloat16."""
    for block in BLOCKS:
        for bits in (4, 8) if block == 128 else (8,):
            yield "moments.cu", "adam", _defines(block, bits, torch.float32)
    yield "moments.cu", "adam", _defines(256, 8, torch.bfloat16)
    yield "moments_expanded.cu", "adam", common_defines(torch.float32)
