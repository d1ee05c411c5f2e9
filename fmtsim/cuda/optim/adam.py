# SPDX-License-Identifier: Apache-2.0
"""A step of Adam on many parameters: which schemes the kernels know, and the few launches for all parameters.

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
from fmtsim.cuda.cast.parameters import draw_of, macros
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.optimizer import FLOAT32, Numbers, Scheme, StateFormat, book_of, key_of

THREADS, CHUNK = 256, 2048
ENTRIES, WORDS = 30, 16
"""Parameters of a launch: their addresses are arguments, of which 4096 bytes fit."""

BLOCKS = (128, 256, 512, 1024, 2048)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
EXPANDED_GROUP = 128
_RULES = ("none", "amax", "inverse", "reciprocal", "power_of_two")
_FOUND = 6  # words of a parameter between the two kernels of scales of tensors
_NO_BOOKS = bytes(48)
_FP32, _ABSENT = "Slot<32,23,127,0,0,0,0,0,0>", "Slot<0,23,127,0,0,0,0,0,0>"


class Kernels(NamedTuple):
    """How kernels take the states of a scheme.

    file: Of the kernels. defines: Macros, without those of a parameter's dtype. resident: Blocks of threads that a
    multiprocessor holds, as the kernels' bounds have it (expanded groups: 92 registers a thread). books: The moments
    are codes of codebooks. by_tensor: There are scales of whole tensors. draws: Weights are rounded stochastically.
    """

    file: str
    defines: Defines
    resident: int = 4
    books: bool = False
    by_tensor: bool = False
    draws: bool = False

    def macros(self, dtype: torch.dtype) -> Defines:
        """Return all macros for parameters of a dtype."""
        return *self.defines, ("ENTRIES", str(ENTRIES)), ("TYPE", str(TYPES[dtype]))


@lru_cache(maxsize=64)
def kernels_of(scheme: Scheme) -> Kernels | None:
    """Return the kernels that know the states of a scheme, None where none do.

    Those are floating-point codes (``slot_of``) or float32, whose scales are of tensors, of blocks of one size, or
    none; E4M3 in expanded groups of 128; and codes of 4 or 8 bits of codebooks whose largest value is 1.
    """
    if scheme.nonfinite == "skip":
        return None
    first, second = scheme.first, scheme.second
    slots = [slot_of(first), slot_of(second), _ABSENT if scheme.weights is None else slot_of(scheme.weights)]
    if None not in slots:
        return _of_slots(scheme, *slots)
    if scheme.weights is not None:
        return None
    if all(fmt.expand and fmt.block == EXPANDED_GROUP and fmt.format == get_format("e4m3") for fmt in (first, second)):
        plain = all(not fmt.stochastic and not fmt.least for fmt in (first, second))
        return Kernels("adam_expanded.cu", (), resident=2) if plain else None
    if first.block != second.block or not isinstance(first.block, int) or first.bits != second.bits:
        return None
    if book_of(first) is None or book_of(second) is None:
        return None
    return Kernels("adam.cu", _books_of(first.block, first.bits), books=True)


def _of_slots(scheme: Scheme, first: str | None, second: str | None, weights: str | None) -> Kernels | None:
    kept = scheme.weights
    if scheme.first.stochastic or scheme.second.stochastic:
        return None
    if kept is not None and (kept.format is None or scheme.minimum or scheme.whole_blocks or scheme.matrices):
        return None
    blocks = {fmt.block for fmt in (scheme.first, scheme.second, kept or FLOAT32) if fmt.scale != "none"}
    block = blocks.pop() if blocks else 0
    if blocks or block not in (0, "tensor", *BLOCKS):
        return None
    draws = kept is not None and kept.stochastic
    defines = _states(block if isinstance(block, int) else 0, first, second, weights)
    return Kernels("adam.cu", defines, 3 if draws else 4, by_tensor=block == "tensor", draws=draws)


def _states(block: int, first: str | None, second: str | None, weights: str | None) -> Defines:
    return macros(BLOCK=block, FIRST=first, SECOND=second, WEIGHTS=weights)


def _books_of(block: int, bits: int) -> Defines:
    return _states(block, f"Book<{bits},false>", f"Book<{bits},true>", _ABSENT)


def slot_of(state: StateFormat) -> str | None:
    """Return the kernels' Slot of a state, None where they do not know its codes.

    They know float32, and floating-point codes with a sign, of 8 or 16 bits, with NaN, within float32.
    """
    fmt, how = state.format, state.rounding
    if fmt is None:
        return _FP32
    if not isinstance(fmt, FloatFormat) or state.expand or state.scale not in _RULES:
        return None
    usual = fmt.signed and fmt.has_subnormals and fmt.has_zero and fmt.bits in (8, 16) and fmt.nan in ("ieee", "top")
    if (
        not usual
        or not 1 <= fmt.exponent_bias <= 127
        or not 1 <= fmt.mantissa_bits <= 14
        or not 1 <= fmt.max < 2.0**128
    ):
        return None
    bits = how.random_bits or 0
    if how.mode != "nearest_even":
        drawn = 0 < bits <= 23 - fmt.mantissa_bits and fmt.exponent_bias == 127
        if not drawn or how != Rounding(mode="stochastic", random_bits=bits):
            return None
    least = struct.unpack("<I", struct.pack("<f", state.least))[0]
    fields = (fmt.bits, fmt.mantissa_bits, fmt.exponent_bias, fmt.max_code, int(fmt.infinities), fmt.nan_code)
    return f"Slot<{','.join(map(str, (*fields, _RULES.index(state.scale), f'{least}u', bits)))}>"


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
    multiples of 16), of both moments' codes, scales, powers and centres, of codes and scales of weights. Then
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


def launch(
    parts: Sequence[Launch],
    parameters: Sequence[Tensor],
    scheme: Scheme,
    numbers: Numbers,
    counter: Tensor,
    seed: int,
    step: int,
) -> None:
    """Start the kernels of one step of parameters on what ``launches`` made of them.

    Args:
        parts: The launches.
        parameters: Of one device and dtype.
        scheme: One that ``kernels_of`` knows.
        numbers: The scalars of the step.
        counter: int64, 0-d; grows by the number of elements of gradients that are not finite.
        seed, step: Of random words.
    """
    kernels, like = kernels_of(scheme), parameters[0]
    assert kernels is not None  # by the scheme
    index, defines = runtime.device_index(like), kernels.macros(like.dtype)
    update = runtime.kernel(kernels.file, "adam", index, defines)
    most = kernels.resident * runtime.multiprocessors(index)
    # the correction is sqrt(1 - beta2**step) with beta2 < 1, or 1: never below the least that quotient() takes
    inverse = np.float32(1) / np.float32(numbers.correction)
    scalars = struct.pack("<11fi", *numbers[:10], inverse, scheme.nonfinite == "zero")
    found: list[Tensor | None] = [None] * len(parts)
    if kernels.by_tensor:
        found = list(torch.zeros((len(parts), ENTRIES * _FOUND), dtype=torch.int32, device=like.device))
    rounding = Rounding(mode="stochastic") if kernels.draws else Rounding()
    draw = draw_of(rounding, key_of(seed, step, 0, "first"))
    books, shared, _ = _books(scheme, like.device) if kernels.books else (_NO_BOOKS, 0, None)
    for (table, entries, chunks), each in zip(parts, found, strict=True):
        more = () if kernels.file == "adam_expanded.cu" else (draw, books, each)
        given = table.tobytes(), np.int32(entries), np.int64(chunks), scalars, *more, counter
        if chunks and each is not None:
            runtime.kernel(kernels.file, "tops", index, defines)(min(chunks, most), THREADS, *given)
        if chunks:
            update(min(chunks, most), THREADS, *given, shared=shared)
    torch.autograd.graph.increment_version(parameters)  # autograd may have saved them for a backward


@lru_cache(maxsize=64)
def _books(scheme: Scheme, device: torch.device) -> tuple[bytes, int, tuple[Tensor, Tensor]]:
    """Return struct Books, the bytes of what it points to, and that: values and words of both codebooks."""
    first, second = book_of(scheme.first), book_of(scheme.second)
    assert first is not None and second is not None  # by the kernels
    buckets = len(first.words) // 2
    values = torch.from_numpy(np.concatenate([first.values, second.values])).to(device)
    words = torch.from_numpy(np.concatenate([first.words, second.words[:buckets]])).to(device)
    numbers = buckets, first.lowest, first.zero, second.zero, first.least, second.least
    packed = struct.pack("<2Q4i2f8x", values.data_ptr(), words.data_ptr(), *numbers)
    return packed, 4 * (values.numel() + words.numel()), (values, words)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield kernels for float32 parameters: codebooks of every block size, some schemes of floats; one of bfloat16."""
    schemes = [("adam", _books_of(block, bits)) for block, bits in ((128, 4), *((block, 8) for block in BLOCKS))]
    e4m3 = FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, nan="top", infinities=False)
    fp16 = FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10)
    bf16 = FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7)
    power = (slot_of(StateFormat(format=fmt, scale="power_of_two")) for fmt in (e4m3, fp16, fp16))
    amax = slot_of(StateFormat(format=e4m3, block=128, scale="amax"))
    by_tensor = _states(0, *power)
    schemes += [(name, by_tensor) for name in ("tops", "adam")]
    schemes += [("adam", _states(128, amax, amax, _ABSENT))]
    for name, defines in schemes:
        yield "adam.cu", name, Kernels("adam.cu", defines).macros(torch.float32)
    yield "adam_expanded.cu", "adam", Kernels("adam_expanded.cu", ()).macros(torch.float32)
    yield "adam.cu", "adam", Kernels("adam.cu", schemes[2][1]).macros(torch.bfloat16)
    drawn = slot_of(StateFormat(format=bf16, rounding=Rounding(mode="stochastic", random_bits=16)))
    yield "adam.cu", "adam", Kernels("adam.cu", _states(0, _FP32, _FP32, drawn)).macros(torch.bfloat16)
