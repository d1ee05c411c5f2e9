# SPDX-License-Identifier: Apache-2.0
"""Random words of the fast kernels: drawn from a key while elements are rounded, or laid out beforehand.

Stochastic rounding with r bits is that with 32 of a word whose upper r bits are drawn and whose others are zero.
"""

from typing import NamedTuple

import numpy as np
import torch

from fmtsim.engines.cpu.cast.philox import fill64, integer_at
from fmtsim.engines.cpu.runtime import pool
from fmtsim.engines.cpu.runtime.jit import device, kernel
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import Random, RandomKey

KeyWords = tuple[np.uint32, np.uint32, np.uint32, np.uint32]
_NONE = np.zeros(0, np.uint32)
_ALL = np.uint32(0xFFFFFFFF)


class Words(NamedTuple):
    """Words of the elements of a matrix, in order: ``given`` ones, or where that is empty those of a key.

    ``mask`` keeps the bits that are drawn; ``o0, o1`` are the key's offset, ``k0, k1`` its seed.
    """

    given: np.ndarray
    mask: np.uint32
    o0: np.uint32
    o1: np.uint32
    k0: np.uint32
    k1: np.uint32


def key_words(key: RandomKey) -> KeyWords:
    """Return offset and seed as the 32-bit words that Philox takes."""
    halves = (number >> place & 0xFFFFFFFF for number in (key.offset, key.seed) for place in (0, 32))
    return tuple(np.uint32(half) for half in halves)  # type: ignore[return-value]  # four of them


def words_of(rounding: Rounding, random: Random, shape: torch.Size, dim: int = -1) -> Words:
    """Return the words of a tensor's elements in the order of its operand matrix along ``dim``."""
    mask, drawn = np.uint32((1 << 32) - (1 << (32 - rounding.bits))), isinstance(random, RandomKey)
    if drawn and rounding.layout == "word" and (dim == -1 or len(shape) < 2):
        return Words(_NONE, mask, *key_words(random))  # type: ignore[arg-type]  # the check is in ``drawn``
    given = (integers_of(rounding, random, shape, dim) << (32 - rounding.bits)).numpy().astype(np.uint32)
    return Words(given, mask, *key_words(RandomKey(0)))


def integers_of(rounding: Rounding, random: Random, shape: torch.Size, dim: int = -1) -> torch.Tensor:
    """Return the random integers themselves, int64 in the order of the operand matrix, flat."""
    if isinstance(random, RandomKey):
        drawn = torch.empty(shape, dtype=torch.int64)
        out, rest = drawn.view(-1).numpy(), (rounding.bits, rounding.layout == "cvt_rs", *key_words(random))
        pool.run(lambda start, stop: draw_integers(out, *rest, start, stop), out.size, align=64)
    else:
        assert random is not None  # verbs see to it
        drawn = random.to(torch.int64)
    return (drawn.movedim(dim, -1) if shape else drawn).reshape(-1)


@kernel
def draw_integers(out, random_bits, shared, o0, o1, k0, k1, start, stop):
    """Write the random integers of elements ``start ... stop - 1``."""
    for i in range(start, stop):
        out[i] = integer_at(i, random_bits, shared, o0, o1, k0, k1)


@device
def fill_words(first, count, w, buffer):
    """Write the words of ``count`` elements from ``first`` on to ``buffer`` of ``count + 128``, from ``first % 64`` on.

    Given words are copied one by one, and loops of kernels always read this buffer: with a slice of either array they
    took 12 % longer.
    """
    place = first & 63
    if w.given.size == 0:
        for block in range(first >> 6, (first + count + 63) >> 6):
            fill64(buffer, 64 * (block - (first >> 6)), block, w.o0, w.o1, w.k0, w.k1)
    else:
        for i in range(count):
            buffer[place + i] = w.given[first + i]
    if w.mask != _ALL:
        for i in range(place + count):
            buffer[i] &= w.mask
