# SPDX-License-Identifier: Apache-2.0
"""Random words of the fast kernels: drawn from a key while elements are rounded, or laid out beforehand.

Stochastic rounding with r bits is that with 32 of a word whose upper r bits are drawn and whose others are zero.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy import int64, uint64

from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import device, kernel, subroutine
from fmtsim.cpu.runtime.numbers import philox
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import Random, RandomKey


@device
def fill64(words, at, block, o0, o1, k0, k1):
    """Write the words of the 64 elements ``64 * block ...`` into ``words`` from ``at`` on."""
    first, place = uint64(block) * uint64(16), uint64(at)  # unsigned: numba then does not look for negative indices
    for j in range(16):  # lane k of counter j serves element 16 k + j
        w0, w1, w2, w3 = philox(first + uint64(j), o0, o1, k0, k1)
        words[place + uint64(j)] = w0
        words[place + uint64(16 + j)] = w1
        words[place + uint64(32 + j)] = w2
        words[place + uint64(48 + j)] = w3


@device
def _reverse_byte(byte):
    byte = ((byte & 0x0F) << 4) | (byte >> 4)
    byte = ((byte & 0x33) << 2) | ((byte >> 2) & 0x33)
    return ((byte & 0x55) << 1) | ((byte >> 1) & 0x55)


@subroutine
def integer_at(index, random_bits, shared, o0, o1, k0, k1):
    """Return the random integer of one element: ``random_bits`` wide, in ``cvt.rs`` order where ``shared``."""
    # 1. the counter and the lane of the element, or of the two or four that share a word
    place = uint64(index)
    if shared:
        place = place >> uint64(2 if random_bits == 8 else 1)
    w0, w1, w2, w3 = philox((place >> uint64(6)) * uint64(16) + (place & uint64(15)), o0, o1, k0, k1)
    lane = int64((place >> uint64(4)) & uint64(3))
    word = int64(w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3)
    # 2. the element's bits of it
    if not shared:
        return word >> (32 - random_bits)
    if random_bits == 8:
        lane = index & 3
        byte = (word >> (8 if lane == 0 else 0 if lane == 1 else 24 if lane == 2 else 16)) & 0xFF
        return _reverse_byte(byte) if lane & 1 else byte
    return (word >> (16 * (index & 1))) & ((1 << random_bits) - 1)


KeyWords = tuple[np.uint32, np.uint32, np.uint32, np.uint32]
_NONE = np.zeros(0, np.uint32)
_ALL = np.uint32(0xFFFFFFFF)


class Words(NamedTuple):
    """Words of the elements of a matrix, in order: those of an array, or where ``array`` is empty those of a key.

    ``mask`` keeps the bits that are drawn; ``o0, o1`` are the key's offset, ``k0, k1`` its seed.
    """

    array: np.ndarray
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
    array = (integers_of(rounding, random, shape, dim) << (32 - rounding.bits)).numpy().astype(np.uint32)
    return Words(array, mask, *key_words(RandomKey(0)))


def integers_of(rounding: Rounding, random: Random, shape: torch.Size, dim: int = -1) -> torch.Tensor:
    """Return the random integers themselves, int64 in the order of the operand matrix, flat."""
    if isinstance(random, RandomKey):
        drawn = torch.empty(shape, dtype=torch.int64)
        out, how = drawn.view(-1).numpy(), (rounding.bits, rounding.layout == "cvt_rs", *key_words(random))
        pool.run(lambda start, stop: draw_integers(out, *how, start, stop), out.size, align=64)
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

    Words of an array are copied one by one, so that loops of kernels always read this buffer: with a slice of either
    array they took 12 % longer.
    """
    place = first & 63
    if w.array.size == 0:
        for block in range(first >> 6, (first + count + 63) >> 6):
            fill64(buffer, 64 * (block - (first >> 6)), block, w.o0, w.o1, w.k0, w.k1)
    else:
        for i in range(count):
            buffer[place + i] = w.array[first + i]
    if w.mask != _ALL:
        for i in range(place + count):
            buffer[i] &= w.mask
