# SPDX-License-Identifier: Apache-2.0
"""The random words: published vectors, the place of an element's word, the shared words of cvt.rs."""

import pytest

from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import philox4x32, random_integer, random_word
from fmtsim.support.errors import ArgumentError

ONES = 0xFFFFFFFF

# Known answers of the Random123 distribution for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_word_of_an_element():
    """Elements i, i + 16, i + 32, i + 48 of 64 take the four words of one counter."""
    seed, offset = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    for group, lane in ((0, 0), (0, 15), (1, 3), (1 << 20, 7)):
        words = philox4x32((group * 16 + lane, 0, offset & ONES, offset >> 32), (seed & ONES, seed >> 32))
        assert tuple(random_word((seed, offset), group * 64 + lane + 16 * j) for j in range(4)) == words


def test_words_of_an_aligned_group_differ():
    words = [random_word((1, 2), i) for i in range(1024)]
    assert len(set(words)) == 1024


def test_the_counter_has_64_bits():
    index = 1 << 36  # block 2**34: the counter's second word is 4
    assert random_word((5, 6), index) == philox4x32((0, 4, 6, 0), (5, 0))[0]


def test_seed_and_offset_are_64_bit():
    assert random_word((-1, -2), 3) == random_word((2**64 - 1, 2**64 - 2), 3)
    assert random_word((1, 0), 3) != random_word((1, 1), 3) != random_word((2, 1), 3)


def test_a_negative_index_is_an_error():
    with pytest.raises(ArgumentError, match="index=-1 is negative"):
        random_word((0, 0), -1)


@pytest.mark.parametrize("bits", [1, 8, 23, 32])
def test_top_bits_of_the_word(bits):
    rounding = Rounding(mode="stochastic", random_bits=bits)
    assert [random_integer(rounding, (7, 8), i) for i in range(200)] == [
        random_word((7, 8), i) >> (32 - bits) for i in range(200)
    ]


def test_four_elements_share_a_word_of_cvt_rs():
    rounding = Rounding(mode="stochastic", random_bits=8, layout="cvt_rs")
    b0, b1, b2, b3 = random_word((0, 0), 0).to_bytes(4, "little")  # the published 6627e8d5
    assert (b3, b2, b1, b0) == (0x66, 0x27, 0xE8, 0xD5)
    assert [random_integer(rounding, (0, 0), i) for i in range(4)] == [0xE8, 0b10101011, 0x66, 0b11100100]


@pytest.mark.parametrize(("bits", "mask"), [(13, 0x1FFF), (16, 0xFFFF)])
def test_two_elements_share_a_word_of_cvt_rs(bits, mask):
    rounding = Rounding(mode="stochastic", random_bits=bits, layout="cvt_rs")
    assert [random_integer(rounding, (0, 0), i) for i in range(2)] == [0xE8D5 & mask, 0x6627 & mask]
    word = random_word((9, 4), 50)
    assert [random_integer(rounding, (9, 4), 100 + i) for i in range(2)] == [word & mask, word >> 16 & mask]
