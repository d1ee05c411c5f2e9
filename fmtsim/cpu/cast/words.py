"""What kernels need to know about random words: given ones, or the key of a stream."""

import numpy as np

from fmtsim.cpu.cast.general import Draw
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import Random, RandomKey

_NO_WORDS = np.zeros(1, np.int64)


def key_words(key: RandomKey) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """Return offset and seed as the 32-bit words that Philox takes."""
    return _low(key.offset), _high(key.offset), _low(key.seed), _high(key.seed)


def plain_key(rounding: Rounding, random: Random) -> bool:
    """Say whether a cast draws whole words from a key, which is what the fast kernels do."""
    plain = rounding.mode == "stochastic" and rounding.bits == 32 and rounding.variant == "a"
    return plain and isinstance(random, RandomKey)


def draw_of(rounding: Rounding, random: Random) -> Draw:
    """Return where the general kernels take their random integers from."""
    needed = rounding.mode == "stochastic"
    key = random if isinstance(random, RandomKey) else RandomKey(0)
    return Draw(needed and not isinstance(random, RandomKey), needed, rounding.layout == "cvt_rs", *key_words(key))


def flat_words(random: Random) -> np.ndarray:
    """Return given random integers in row-major order, or a stand-in."""
    if random is None or isinstance(random, RandomKey):
        return _NO_WORDS
    return random.contiguous().view(-1).numpy()


def _low(number: int) -> np.uint32:
    return np.uint32(number & 0xFFFFFFFF)


def _high(number: int) -> np.uint32:
    return np.uint32((number >> 32) & 0xFFFFFFFF)
