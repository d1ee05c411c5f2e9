# SPDX-License-Identifier: Apache-2.0
"""The signs that randomise a Hadamard transform: drawn from Philox, accumulated, and read as bits."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fmtsim.rounding.philox import random_word
from fmtsim.support.errors import ArgumentError, shown

Signs = int | Tensor | None


def random_signs(size: int, generator: int | Sequence[int] | torch.Generator) -> int:
    """Draw the signs of a transform as a bit mask: bit j set, element j is negated.

    Bit j is bit ``j % 32`` of the random word of element ``j // 32`` (docs/semantics.md, section 9): a function of the
    key alone, computed on the host, the same for every device and engine. A stream that also rounds should have
    another offset, ``RandomKey(seed, offset)``.

    Args:
        size: Elements of a group, 1 or more.
        generator: An int seed, a ``RandomKey`` (seed, offset), or a torch.Generator, which gives one seed.

    Raises:
        ArgumentError: The size is not positive, or the generator is none of these.

    >>> hex(random_signs(16, 5)), random_signs(64, (5, 1)) & 0xFFFF == random_signs(16, (5, 1))
    ('0x681d', True)
    """
    if type(size) is not int or size < 1:
        raise ArgumentError(f"size={shown(size)} is not a number of signs; choose an int of 1 or more")
    key = _key(generator)
    mask = 0
    for start in range(0, size, 32):
        mask |= random_word(key, start // 32) << start
    return mask & ((1 << size) - 1)


def accumulate_signs(signs: Signs, more: Signs) -> Signs:
    """Return the signs of both: those of a transform that is randomised again, ``H <- diag(s) H``.

    Args:
        signs, more: Masks (their XOR is the result), tensors [size] (+1 and -1 result), or None, which negates nothing.

    Raises:
        ArgumentError: Tensors of different shapes, or a mask beside a tensor.

    >>> hex(accumulate_signs(0b1100, 0b1010))
    '0x6'
    """
    if signs is None or more is None:
        return more if signs is None else signs
    if isinstance(signs, Tensor) and isinstance(more, Tensor) and signs.shape == more.shape:
        return torch.where(signs.signbit() ^ more.signbit(), -1.0, 1.0)
    if isinstance(signs, Tensor) or isinstance(more, Tensor):
        both = " and ".join(_shown(given) for given in (signs, more))
        raise ArgumentError(f"signs are {both}; pass two masks or two tensors of one shape")
    return signs ^ more


def sign_bits(signs: int, size: int) -> Tensor:
    """Return which elements of a group a mask gives another sign, bool [size]."""
    octets = torch.frombuffer(bytearray(signs.to_bytes(-(-size // 8), "little")), dtype=torch.uint8)
    return (octets[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).flatten()[:size].bool()


@lru_cache(maxsize=256)
def mask_bits(mask: int, size: int, device: torch.device) -> Tensor:
    """Return ``sign_bits`` of a mask on a device, kept so that a CUDA graph can capture a later call."""
    return sign_bits(mask, size).to(device)


def check_signs(signs: Signs, size: int) -> None:
    """Raise for signs that do not fit a size."""
    if isinstance(signs, Tensor):
        if signs.shape != (size,):
            raise ArgumentError(f"signs have shape {tuple(signs.shape)}; pass one for each of {size} elements")
    elif signs is not None and (type(signs) is not int or not 0 <= signs < 1 << size):
        raise ArgumentError(f"signs={shown(signs)} is not a mask of {size} bits; pass an int from 0 to 2**{size} - 1")


def _key(generator: object) -> tuple[int, int]:
    """Return seed and offset."""
    if isinstance(generator, torch.Generator):
        draw = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=generator.device)
        return int(draw), 0
    pair = (generator, 0) if type(generator) is int else generator
    if not (isinstance(pair, Sequence) and len(pair) == 2 and all(type(number) is int for number in pair)):
        raise ArgumentError(
            f"generator={shown(generator)} is not one; pass an int seed, a RandomKey or a torch.Generator"
        )
    return pair[0], pair[1]


def _shown(signs: int | Tensor) -> str:
    return f"a tensor {tuple(signs.shape)}" if isinstance(signs, Tensor) else "a mask"
