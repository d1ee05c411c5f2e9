"""A step of Adam on many parameters: a few launches for all of them.

Moments are codes of codebooks or of expanded groups, or states, weights among them, are floating-point codes, with
scales of blocks, of tensors, or none. The definition is fmtsim/optim: rules.py (the update), codec.py (scales and
codes); the bits are the same.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.optimizer import Book

THREADS, CHUNK = 256, 2048
ENTRIES, WORDS = 30, 16
"""Parameters of a launch: their addresses are arguments, of which 4096 bytes fit."""

BLOCKS = (128, 256, 512, 1024, 2048)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RESIDENT, RESIDENT_EXPANDED = 4, 2  # blocks of threads that a multiprocessor holds: 50 and 92 registers a thread
ALIGNED = 16

RULES = ("none", "amax", "inverse", "reciprocal", "power_of_two")
FOUND = 6  # words of a parameter between the two kernels of scales of tensors
RESIDENT_RANDOM = 3  # the same where weights are rounded stochastically, as the kernels' bounds have it


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
        kernel = runtime.kernel("adam_expanded.cu", "adam", index, common_defines(like.dtype))
    else:
        kernel = runtime.kernel("adam_codebooks.cu", "adam", index, _defines(block, books.bits, like.dtype))
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


class Slot(NamedTuple):
    """How one state is kept.

    format: Of codes, one that ``takes`` lets pass; None for float32. rule: Of scales, one of RULES. least: What amax is
    raised to. random_bits: Of stochastic rounding, 0 for nearest even.
    """

    format: FloatFormat | None = None
    rule: str = "none"
    least: float = 0.0
    random_bits: int = 0

    def macro(self) -> str:
        """Return the parameters of the kernels' Slot."""
        fmt = self.format
        if fmt is None:
            return "32,23,127,0,0,0,0,0,0"
        least = struct.unpack("<I", struct.pack("<f", self.least))[0]
        fields = (fmt.bits, fmt.mantissa_bits, fmt.exponent_bias, fmt.max_code, int(fmt.infinities), fmt.nan_code)
        return ",".join(map(str, (*fields, RULES.index(self.rule), f"{least}u", self.random_bits)))


NO_WEIGHTS = "0,23,127,0,0,0,0,0,0"


def takes(fmt: FloatFormat, rounding: Rounding) -> bool:
    """Say whether the kernels know a format under a rounding: signed, of 8 or 16 bits, with NaN, within float32."""
    usual = fmt.signed and fmt.has_subnormals and fmt.has_zero and fmt.bits in (8, 16) and fmt.nan in ("ieee", "top")
    if not usual or not 1 <= fmt.exponent_bias <= 127 or not 1 <= fmt.mantissa_bits <= 14:
        return False
    if not 1 <= fmt.max < 2.0**128:
        return False
    if rounding.mode == "nearest_even":
        return True
    bits = rounding.random_bits
    drawn = bits is not None and bits <= 23 - fmt.mantissa_bits and fmt.exponent_bias == 127
    return drawn and rounding == Rounding(mode="stochastic", random_bits=bits)


class States(NamedTuple):
    """How all states are kept. block: Numbers that share a scale, 0 where these are of tensors or there are none."""

    first: Slot
    second: Slot
    weights: Slot | None
    block: int

    @property
    def by_tensor(self) -> bool:
        """Whether there are scales of whole tensors."""
        return not self.block and any(slot is not None and slot.rule != "none" for slot in self[:3])


def adam_floats(
    parts: Sequence[Launch],
    like: Tensor,
    states: States,
    numbers: tuple[float, ...],
    zeroing: bool,
    counter: Tensor,
    key: RandomKey,
) -> None:
    """Do a step of many parameters whose states are floating-point codes, in place.

    Args:
        parts, like, numbers, zeroing, counter: As of ``adam``.
        states: How they are kept; a block is one of BLOCKS.
        key: Of random words; what rows have for a place is added to the offset.
    """
    index, defines = runtime.device_index(like), _float_defines(states, like.dtype)
    update = runtime.kernel("adam_floats.cu", "adam", index, defines)
    stochastic = states.weights is not None and states.weights.random_bits
    most = (RESIDENT_RANDOM if stochastic else RESIDENT) * runtime.multiprocessors(index)
    scalars = packed_numbers(numbers, zeroing)
    draw = draw_of(Rounding(mode="stochastic") if stochastic else Rounding(), key)
    found: list[Tensor | None] = [None] * len(parts)
    if states.by_tensor:
        tops = runtime.kernel("adam_floats.cu", "tops", index, defines)
        found = list(torch.zeros((len(parts), ENTRIES * FOUND), dtype=torch.int32, device=like.device))
    for (table, entries, chunks), each in zip(parts, found, strict=True):
        rows = table.tobytes(), np.int32(entries), np.int64(chunks), scalars
        if each is not None:
            tops(min(chunks, most), THREADS, *rows, each)
        update(min(chunks, most), THREADS, *rows, draw, each, counter)


@lru_cache(maxsize=32)
def _float_defines(states: States, dtype: torch.dtype) -> Defines:
    weights = NO_WEIGHTS if states.weights is None else states.weights.macro()
    macros = ("FIRST", states.first.macro()), ("SECOND", states.second.macro()), ("WEIGHTS", weights)
    return (("BLOCK", str(states.block)), *macros, *common_defines(dtype))


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield kernels for float32 parameters: codebooks of every block size, some schemes of floats; one of bfloat16."""
    for block in BLOCKS:
        for bits in (4, 8) if block == 128 else (8,):
            yield "adam_codebooks.cu", "adam", _defines(block, bits, torch.float32)
    yield "adam_codebooks.cu", "adam", _defines(256, 8, torch.bfloat16)
    yield "adam_expanded.cu", "adam", common_defines(torch.float32)
    e4m3 = FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, nan="top", infinities=False)
    fp16 = FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10)
    bf16 = FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7)
    by_tensor = _float_defines(
        States(Slot(e4m3, "power_of_two"), Slot(fp16, "power_of_two"), Slot(fp16, "power_of_two"), 0), torch.float32
    )
    yield "adam_floats.cu", "tops", by_tensor
    yield "adam_floats.cu", "adam", by_tensor
    yield (
        "adam_floats.cu",
        "adam",
        _float_defines(States(Slot(e4m3, "amax"), Slot(e4m3, "amax"), None, 128), torch.float32),
    )
    yield (
        "adam_floats.cu",
        "adam",
        _float_defines(States(Slot(), Slot(), Slot(bf16, random_bits=16), 0), torch.bfloat16),
    )
