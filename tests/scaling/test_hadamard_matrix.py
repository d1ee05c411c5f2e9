# SPDX-License-Identifier: Apache-2.0
"""Hadamard matrices and signs: what they are, and which random ones a seed gives."""

import hashlib

import pytest
import torch

from fmtsim.rounding.philox import random_word
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.hadamard_matrix import (
    CONSTRUCTIONS,
    MODULI,
    accumulate_signs,
    base_matrix,
    base_of,
    hadamard_matrix,
    random_signs,
    sign_bits,
)
from fmtsim.spec.cast import RandomKey
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.operands import wide

ROTATIONS = (12, 20, 28, 36, 40, 44, 52, 60, 76, 100, 108, 140, 156, 172)  # what QuaRot, QuIP# and HALO rotate with
# Widths of layers: Llama, Qwen, Mistral, Gemma, GPT-2, Phi, DeepSeek.
WIDTHS = (768, 1600, 2880, 3584, 4864, 5120, 5376, 6656, 6912, 8960, 11008, 13824, 14336, 18944, 27648, 29568)


def orthogonal(h: torch.Tensor) -> bool:
    wide = h.double()  # sums of +-1 are exact
    entries = bool((h.abs() == 1).all())
    return entries and torch.equal(wide @ wide.T, len(h) * torch.eye(len(h), dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 24, 40, 80, 256, 312, 344, 480, 640, *CONSTRUCTIONS])
def test_rows_are_orthogonal_and_the_first_ones_are_positive(size):
    h = hadamard_matrix(size)
    assert h.dtype == torch.int8 and h.shape == (size, size)
    assert orthogonal(h) and orthogonal(h.T)
    assert (h[0] == 1).all() and (h[:, 0] == 1).all()


def test_every_order_below_256_is_here_but_two():
    assert {4 * odd for odd in range(3, 64, 2)} - set(CONSTRUCTIONS) == {188, 236}
    assert all(base_of(width) for width in (*ROTATIONS, *WIDTHS))
    assert (base_of(1), base_of(4096), base_of(40), base_of(5120), base_of(11008)) == (1, 1, 20, 20, 172)
    assert all(how.source for how in CONSTRUCTIONS.values())


def euler(a: int, p: int) -> int:
    """Return the Legendre symbol by Euler's criterion."""
    power = pow(a % p, (p - 1) // 2, p)
    return power - p if power == p - 1 else power


@pytest.mark.parametrize("base", [b for b, how in CONSTRUCTIONS.items() if how.field and how.field not in MODULI])
def test_paley_over_prime_fields_by_eulers_criterion(base):
    how = CONSTRUCTIONS[base]
    q, first = how.field, how.kind == "paley_one"
    core = [[0] + [1] * q] + [[-1 if first else 1] + [euler(i - j, q) for j in range(q)] for i in range(q)]
    wanted = torch.tensor(core)
    if first:
        wanted = wanted + torch.eye(q + 1, dtype=torch.long)
    else:
        cells = {0: ((1, -1), (-1, -1)), 1: ((1, 1), (1, -1)), -1: ((-1, -1), (-1, 1))}
        wanted = torch.tensor([[cells[c][part][k] for c in row for k in (0, 1)] for row in core for part in (0, 1)])
    wanted = wanted * wanted[:, :1]
    assert torch.equal(base_matrix(base), (wanted * wanted[:1]).to(torch.int8))


@pytest.mark.parametrize("q", MODULI)
def test_moduli_are_irreducible(q):
    """No monic polynomial of half the degree or less divides one: its remainder is never zero."""
    modulus = MODULI[q]
    p, degree = round(q ** (1 / (len(modulus) - 1))), len(modulus) - 1
    assert p**degree == q and modulus[-1] == 1
    for half in range(1, degree // 2 + 1):
        for low in range(p**half):
            divisor = [low // p**k % p for k in range(half)] + [1]
            rest = list(modulus)
            for top in range(degree, half - 1, -1):
                factor = rest[top]
                for k, coefficient in enumerate(divisor):
                    rest[top - half + k] = (rest[top - half + k] - factor * coefficient) % p
            assert any(rest), divisor


@pytest.mark.parametrize("base", [b for b, how in CONSTRUCTIONS.items() if how.kind == "williamson"])
def test_williamson_rows_are_symmetric_and_complementary(base):
    rows = [[1 if c == "+" else -1 for c in row] for row in CONSTRUCTIONS[base].circulants]
    m = base // 4
    assert all(row[k] == row[-k % m] for row in rows for k in range(m))
    for shift in range(1, m):
        assert sum(row[k] * row[(k + shift) % m] for row in rows for k in range(m)) == 0


def test_powers_of_two_are_sylvesters_and_others_double():
    h = hadamard_matrix(64)
    assert all(h[i, j] == (-1) ** (i & j).bit_count() for i in range(64) for j in range(64))
    big, base = hadamard_matrix(80), base_matrix(20)
    assert all(
        big[i, j] == base[i // 4, j // 4] * (-1) ** (i % 4 & j % 4).bit_count() for i in range(80) for j in range(80)
    )


def test_no_base_ever_changes():
    digest = hashlib.sha256(b"".join(base_matrix(base).numpy().tobytes() for base in CONSTRUCTIONS))
    assert digest.hexdigest() == "33f7b78a21746fbb752c2860e3fb0e16acb69a5215006f9d01ff603d0a64084c"


@pytest.mark.parametrize(
    ("size", "choice"),
    [
        (3, "2 or 4,"), (30, "28 or 32,"), (188, "184 or 192,"), (10, "8 or 12,"), (29567, "29184 or 29568,"),
        (0, "an int of 1 or more"), (-4, "an int of 1 or more"), (True, "an int of 1 or more"),
        (12.0, "an int of 1 or more"),
    ],
)  # fmt: skip
def test_sizes_without_a_matrix(size, choice):
    with pytest.raises(ArgumentError, match=f"size={size!r} has no Hadamard matrix here; choose {choice}"):
        hadamard_matrix(size)
    with pytest.raises(ArgumentError, match=choice):
        base_of(size)


@pytest.mark.parametrize("size", [1, 16, 31, 32, 33, 128, 5120])
def test_random_signs_are_philox_words(size):
    for key in (RandomKey(7, 3), RandomKey(-1, 1 << 63)):
        drawn = torch.tensor([random_word(key, i) for i in range(-(-size // 32))])
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
