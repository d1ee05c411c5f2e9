# SPDX-License-Identifier: Apache-2.0
"""The random words of stochastic rounding, in plain Python: the reference that engines are held to.

Philox4x32-10 is from Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
section 3.3 and table 2. Which word an element gets is said in docs/semantics.md, section 9.
"""

from collections.abc import Sequence

from fmtsim.rounding.modes import Rounding
from fmtsim.support.errors import ArgumentError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""What the first and the third counter word are multiplied with in each round."""

KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""What is added to the two key words between rounds: the golden ratio and ``sqrt(3) - 1``, times 2**32."""

ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four 32-bit words of Philox4x32-10 for one counter and key."""
    x0, x1, x2, x3 = counter
    (key0, key1), (m0, m1), (step0, step1), word = key, MULTIPLIERS, KEY_STEPS, _WORD
    for _ in range(ROUNDS):
        product0, product2 = x0 * m0, x2 * m1  # 64 bits: high half and low half
        x0, x1, x2, x3 = product2 >> 32 ^ x1 ^ key0, product2 & word, product0 >> 32 ^ x3 ^ key1, product0 & word
        key0, key1 = key0 + step0 & word, key1 + step1 & word
    return x0, x1, x2, x3


def random_word(key: Sequence[int], index: int) -> int:
    """Return the 32-bit random word of an element.

    Args:
        key: Seed and offset, each taken modulo 2**64 (a RandomKey, or any pair).
        index: The element's place in row-major order of its tensor's shape.

    Raises:
        ArgumentError: The index is negative.
    """
    if index < 0:
        raise ArgumentError(f"index={index} is negative; pass an element's place in row-major order")
    seed, offset = key[0], key[1]
    block = (index >> 6) * 16 + (index & 15)  # 64 elements share 16 counters, so that 16 lanes run without a transpose
    counter = (block & _WORD, block >> 32 & _WORD, offset & _WORD, offset >> 32 & _WORD)
    return philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))[(index >> 4) & 3]


def random_integer(rounding: Rounding, key: Sequence[int], index: int) -> int:
    """Return the random integer ``w`` below ``2**r`` that decides the rounding of an element.

    Args:
        rounding: A stochastic rounding: its number of bits ``r`` and its layout.
        key: Seed and offset, as in ``random_word``.
        index: The element's place in row-major order.
    """
    bits = rounding.bits
    if rounding.layout == "word":
        return random_word(key, index) >> (32 - bits)
    if bits == 8:  # four elements share a word: byte 1, byte 0 backwards, byte 3, byte 2 backwards
        word = random_word(key, index >> 2)
        byte = word >> 8 * (1, 0, 3, 2)[index & 3] & 0xFF
        return int(f"{byte:08b}"[::-1], 2) if index & 1 else byte
    half = random_word(key, index >> 1) >> 16 * (index & 1)  # two elements share a word, a half each
    return half & ((1 << bits) - 1)
