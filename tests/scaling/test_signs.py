"""Signs of Hadamard transforms: how they are drawn, joined, and what they do."""

import pytest
import torch

from fmtsim.errors import ArgumentError
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.signs import accumulate_signs, random_signs, sign_bits
from fmtsim.spec.cast import RandomKey
from fmtsim.torch_engine.philox import words
from tests.support.bits import assert_same_bits
from tests.support.operands import wide


@pytest.mark.parametrize("size", [1, 16, 31, 32, 33, 128, 5120])
def test_random_signs_are_philox_words(size):
    for key in (RandomKey(7, 3), RandomKey(-1, 1 << 63)):
        drawn = words(key, 0, -(-size // 32), "cpu")
        bits = (drawn[:, None] >> torch.arange(32) & 1).flatten()[:size].bool()
        assert torch.equal(sign_bits(random_signs(size, key), size), bits)


def test_random_signs_of_every_generator():
    assert random_signs(64, 5) == random_signs(64, RandomKey(5)) == random_signs(64, (5, 0)) != random_signs(64, (5, 1))
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    assert random_signs(64, first) == random_signs(64, second) != random_signs(64, second)
    assert 0.45 < sum(random_signs(256, seed).bit_count() for seed in range(40)) / (40 * 256) < 0.55


def test_signs_accumulate():
    a, b = random_signs(32, 1), random_signs(32, 2)
    x = wide(3, 32)
    assert accumulate_signs(a, b) == a ^ b and accumulate_signs(None, b) == b and accumulate_signs(a, None) == a
    left, right = (torch.where(sign_bits(mask, 32), -1.0, 1.0) for mask in (a, b))
    together = accumulate_signs(left, right)
    assert torch.equal(together, left * right)
    assert_same_bits(hadamard(x, 32, a ^ b), hadamard(x * right, 32, a))
    assert_same_bits(hadamard(x, 32, together), hadamard(x, 32, a ^ b))


def test_signs_after_a_transform():
    """H diag(s) of a symmetric H is the inverse with those signs."""
    x, mask = wide(3, 32), random_signs(32, 1)
    assert_same_bits(hadamard(x, 32, mask, inverse=True), hadamard(x, 32) * torch.where(sign_bits(mask, 32), -1.0, 1.0))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ArgumentError, "size=0 is not a number of signs", lambda: random_signs(0, 1)),
        (ArgumentError, "generator='a' is not one", lambda: random_signs(4, "a")),
        (ArgumentError, "generator=None is not one", lambda: random_signs(4, None)),
        (ArgumentError, "signs are a tensor .2,. and a mask", lambda: accumulate_signs(torch.ones(2), 1)),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()
