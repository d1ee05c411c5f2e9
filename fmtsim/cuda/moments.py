"""A step of Adam on many parameters whose moments are bytes, or float32: a few launches for all of them.

The definition is fmtsim/optim: rules.py (the update), codec.py (scales and codes); the bits are the same.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.runtime import Defines

THREADS, CHUNK = 256, 2048
ENTRIES, WORDS = 36, 12
"""Parameters of a launch: their addresses are arguments, of which 4096 bytes fit."""

BLOCKS = (256, 512, 1024, 2048)
RESIDENT, RESIDENT_EXPANDED = 4, 3  # blocks of threads that a multiprocessor holds: 51 and 72 registers a thread
ALIGNED = 16


class Book(NamedTuple):
    """A codebook as the kernel has it.

    values: float32 [256]. words: int32 of ``fmtsim.optim.codebooks.Table``, both signs. lowest: The key of the first
    bucket. zero: The code from which negative numbers move one down, -1 for none. least: What amax is raised to.
    signed: Whether numbers may be negative.
    """

    values: np.ndarray
    words: np.ndarray
    lowest: int
    zero: int
    least: float
    signed: bool


class Books:
    """The codebooks of both moments, with their tables on every device that asked."""

    def __init__(self, first: Book, second: Book) -> None:
        self.pair = first, second
        self.parameters = tuple(_book_bytes(book) for book in self.pair)
        self._held: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of both and the words of both."""
        if device not in self._held:
            values = np.concatenate([book.values for book in self.pair])
            words = np.concatenate([_words(book) for book in self.pair])
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

    A row has addresses and then the number of elements. Addresses: of parameter and gradient (both float32, contiguous,
    multiples of ALIGNED), then of both moments' codes (uint8, or float32 numbers where the scales' addresses are 0),
    scales, powers and centres (0 where there are none).
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
        like: Any of the parameters, which says the device.
        books: Of the moments; None for E4M3 in expanded groups of 128.
        numbers: The first ten fields of ``fmtsim.optim.rules.Numbers``, in order.
        block: Numbers that share a scale, one of BLOCKS.
        zeroing: Elements whose gradient is not finite lose their moments and keep their parameter.
        counter: int64, 0-d; grows by the number of elements of gradients that are not finite.
    """
    index = runtime.device_index(like)
    scalars = struct.pack("<10f2i", *numbers[:10], zeroing, 0)
    shared, resident = 0, RESIDENT_EXPANDED
    more: tuple[object, ...] = ()
    if books is None:
        kernel = runtime.kernel("moments_expanded.cu", "adam", index, _ENTRIES)
    else:
        kernel = runtime.kernel("moments.cu", "adam", index, _defines(block))
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


def _words(book: Book) -> np.ndarray:
    return book.words if book.signed else book.words[: len(book.words) // 2]


def _book_bytes(book: Book) -> bytes:
    buckets = len(book.words) // 2
    integers = np.array([buckets, book.lowest, book.zero, 1 + book.signed], np.int32).tobytes()
    return integers + np.float32(book.least).tobytes() + bytes(12)


_ENTRIES: Defines = (("ENTRIES", str(ENTRIES)),)


@lru_cache(maxsize=8)
def _defines(block: int) -> Defines:
    return (("BLOCK", str(block)), *_ENTRIES)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield the kernels, that of codebooks for every size of blocks."""
    for block in BLOCKS:
        yield "moments.cu", "adam", _defines(block)
    yield "moments_expanded.cu", "adam", _ENTRIES
