# SPDX-License-Identifier: Apache-2.0
"""A step of an optimizer on many parameters: the few launches for all of them."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.cast.parameters import draw_of
from fmtsim.engines.cuda.optim.schemes import ENTRIES, RULES, WORDS, Kernels, kernels_of
from fmtsim.formats.spec import LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.optimizer import KIND_BITS, PARAMETER_BITS, Book, Hyperparameters, Numbers, Scheme, book_of, key_of

THREADS, CHUNK = 256, 2048
_FOUND = 6  # words of a parameter between the two kernels of scales of tensors
_SCALARS = 64  # bytes of struct Scalars
_NO_BOOKS = bytes(32)


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
    multiples of 16), of both moments' codes and scales. Then, of expanded groups, of both moments' powers and centres;
    of others, of codes and scales of weights, how many of them share a scale if those are of rows, and 0. Then the
    address of the count of steps, if it lies on the device, whether the moments are float32 whatever those of the
    others are, the place of random words (``weights`` of ``fmtsim.spec.optimizer.key_of`` without the step), the number
    of elements, and how many elements a block of threads takes at a time.
    """
    found = []
    for start in range(0, len(rows), ENTRIES):
        part = np.array(rows[start : start + ENTRIES], np.int64)
        table = np.zeros((ENTRIES, WORDS), np.int64)
        table[: len(part), : WORDS - 1] = part[:, :-1]
        chunks = -(-part[:, -2] // part[:, -1])
        ends = np.cumsum(chunks)
        table[: len(part), WORDS - 1] = ends - chunks
        found.append(Launch(table, len(part), int(ends[-1])))
    return found


def launch(
    parts: Sequence[Launch],
    parameters: Sequence[Tensor],
    rule: str,
    scheme: Scheme,
    scalars: Numbers | Hyperparameters,
    counter: Tensor,
    seed: int,
    step: int,
) -> None:
    """Start the kernels of one step of parameters on what ``launches`` made of them.

    Args:
        parts: The launches.
        parameters: Of one device and dtype.
        rule, scheme: What ``kernels_of`` knows.
        scalars: Those of the step; where steps are counted on the device, what they are worked out from.
        counter: int64, 0-d; grows by the number of elements of gradients that are not finite.
        seed, step: Of random words; the step of the host's count alone.
    """
    kernels, like = kernels_of(rule, scheme), parameters[0]
    assert kernels is not None  # by the scheme
    index, defines = runtime.device_index(like), kernels.macros(like.dtype, isinstance(scalars, Hyperparameters))
    update = runtime.kernel(kernels.file, "optimize", index, defines)
    tops = runtime.kernel(kernels.file, "tops", index, defines) if kernels.by_tensor else None
    most = kernels.resident * runtime.multiprocessors(index)
    found: list[Tensor | None] = [None] * len(parts)
    if kernels.by_tensor:
        found = list(torch.zeros((len(parts), ENTRIES * _FOUND), dtype=torch.int32, device=like.device))
    steps: Sequence[tuple[bytes, Tensor | None]]
    if isinstance(scalars, Hyperparameters):
        steps = _live(parts, rule, scheme, scalars, like)
    else:
        steps = [(_step(scalars, scheme), None)] * len(parts)
    common, shared = _common(kernels, scheme, RULES[rule][1], like.device, key_of(seed, step, 0, "first"))
    for (table, entries, chunks), (scalar, _), each in zip(parts, steps, found, strict=True):
        more = () if kernels.file == "optimizer_expanded.cu" else (*common, each)
        given = table.tobytes(), np.int32(entries), np.int64(chunks), scalar, *more, counter
        if chunks and tops is not None:
            tops(min(chunks, most), THREADS, *given)
        if chunks:
            update(min(chunks, most), THREADS, *given, shared=shared)
    torch.autograd.graph.increment_version(parameters)  # autograd may have saved them for a backward


def _common(
    kernels: Kernels, scheme: Scheme, names: tuple[str, ...], device: torch.device, key: RandomKey
) -> tuple[tuple[bytes, bytes], int]:
    """Return struct Draw and struct Books, and the bytes of shared memory that codebooks take."""
    draw = draw_of(Rounding(mode="stochastic") if kernels.draws else Rounding(), key)
    if kernels.logs is not None:
        return (draw, _octave(kernels.logs, device)[0]), 0
    if kernels.books:
        books, there = _books(scheme, names, device)
        return (draw, books), 4 * there.numel()
    return (draw, _NO_BOOKS), 0


def _step(numbers: Numbers, scheme: Scheme) -> bytes:
    """Return struct Step of scalars of the host."""
    # the correction is that of a beta below 1, or 1: never below the least that quotient() takes
    inverse = np.float32(1) / np.float32(numbers.correction)
    return struct.pack("<12fQ2i", *numbers, inverse, 0, scheme.nonfinite == "zero", 0)


def _live(
    parts: Sequence[Launch], rule: str, scheme: Scheme, group: Hyperparameters, like: Tensor
) -> list[tuple[bytes, Tensor]]:
    """Count the step on the device and work its scalars out there; return struct Step of each launch, and these."""
    kernels, index = kernels_of(rule, scheme), runtime.device_index(like)
    assert kernels is not None  # the caller asked
    count = runtime.kernel("optimizer_scalars.cu", "scalars", index, kernels.scalars(rule, scheme))
    lr = group.lr if isinstance(group.lr, Tensor) else None
    packed = struct.pack("<6d", 0.0 if lr is not None else group.lr, *group[1:])
    packed += struct.pack("<Q2i", 0 if lr is None else lr.data_ptr(), lr is not None and lr.dtype is torch.float64, 0)
    made = torch.empty((len(parts), ENTRIES * _SCALARS), dtype=torch.uint8, device=like.device)
    steps = []
    for (table, entries, _), out in zip(parts, made, strict=True):
        count(1, 32, table.tobytes(), np.int32(entries), packed, np.int32(PARAMETER_BITS + KIND_BITS), out)
        steps.append((struct.pack("<12fQ2i", *[0.0] * 12, out.data_ptr(), scheme.nonfinite == "zero", 0), out))
    return steps


@lru_cache(maxsize=64)
def _books(scheme: Scheme, names: tuple[str, ...], device: torch.device) -> tuple[bytes, Tensor]:
    """Return struct Books and what it points to: values and words of the moments' codebooks.

    A rule of one moment has its codebook twice.
    """
    known = {name: book_of(getattr(scheme, name)) for name in names}
    first, second = (known.get(name) or next(iter(known.values())) for name in ("first", "second"))
    assert isinstance(first, Book) and isinstance(second, Book)  # by the kernels
    buckets = len(first.words) // 2
    words = [np.concatenate([each.values for each in (first, second)]).view(np.int32), first.words]
    words += [second.words[:buckets], np.zeros(-3 * buckets % 4, np.int32)]
    there = torch.from_numpy(np.concatenate(words)).to(device)
    packed = struct.pack("<Q2i2f8x", there.data_ptr(), buckets, first.lowest, first.least, second.least)
    return packed, there


@lru_cache(maxsize=8)
def _octave(fmt: LogFormat, device: torch.device) -> tuple[bytes, Tensor]:
    """Return struct Books of logarithms, and what it points to."""
    there = torch.tensor(fmt.magnitudes[: fmt.gamma], dtype=torch.float32, device=device)
    return struct.pack("<Q24x", there.data_ptr()), there
