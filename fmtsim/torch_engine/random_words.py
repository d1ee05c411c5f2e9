# SPDX-License-Identifier: Apache-2.0
"""Random words: Philox4x32-10 with 64-bit integer tensor operations (docs/semantics.md, section 9)."""

import torch

from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey

GROUP = 256
"""Streams start at multiples of this: 64 elements share 16 counters, and 4 elements a word of ``cvt_rs``."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def random_integers(
    key: RandomKey, rounding: Rounding, start: int, count: int, device: torch.device | str
) -> torch.Tensor:
    """Return w in ``[0, 2**r)`` of ``count`` elements from ``start``, a multiple of GROUP, as int64."""
    share = 1 if rounding.layout == "word" else 4 if rounding.bits == 8 else 2  # elements of a word
    word = _words(key, start // share, -(-count // share), device)
    if share == 1:
        return word >> (32 - rounding.bits)
    index = torch.arange(count, dtype=torch.int64, device=word.device)
    if share == 4:
        lane = index & 3
        byte = (word[index >> 2] >> (8 * (lane ^ 1))) & 0xFF
        return torch.where((lane & 1) == 1, _reverse_byte(byte), byte)
    return (word[index >> 1] >> (16 * (index & 1))) & ((1 << rounding.bits) - 1)


def _words(key: RandomKey, start: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Return the 32-bit words of ``count`` elements from ``start``, a multiple of 64, as non-negative int64.

    Word k of 16 counters serves elements 16k to 16k + 15 of 64.
    """
    first, groups = start // 64, -(-count // 64)
    counter = torch.arange(16 * first, 16 * (first + groups), dtype=torch.int64, device=device)
    lanes = torch.stack([lane.to(torch.int32) for lane in _philox(counter, key)])
    return lanes.view(4, -1, 16).transpose(0, 1).reshape(-1)[:count].to(torch.int64) & _MASK


def _philox(counter: torch.Tensor, key: RandomKey) -> tuple[torch.Tensor, ...]:
    """Run ten rounds over counters ``(low, high, offset low, offset high)``; return the four words of each."""
    c0, c1 = counter & _MASK, counter >> 32
    c2, c3 = (torch.full_like(c0, piece & _MASK) for piece in (key.offset, key.offset >> 32))
    k0, k1 = key.seed & _MASK, (key.seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low halves of a 32 x 32 bit product, whose 64 bits are those of int64 modulo ``2**64``."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK


def _reverse_byte(byte: torch.Tensor) -> torch.Tensor:
    for width, mask in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        byte = ((byte & mask) << width) | ((byte >> width) & mask)
    return byte
