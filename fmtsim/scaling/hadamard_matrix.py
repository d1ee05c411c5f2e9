# SPDX-License-Identifier: Apache-2.0
"""Hadamard matrices, +1 and -1 with orthogonal rows, of every order ``base * 2**k`` whose base is known.

Four constructions make the bases; ``CONSTRUCTIONS`` says which makes which, and where it was published.

- Sylvester: ``H[i][j] = (-1)^popcount(i & j)``, any power of two. The other orders double by it:
  ``hadamard_matrix(b * 2**k) = base x Sylvester(2**k)`` (Kronecker product: the base is the outer factor).
- Paley I, q = 3 mod 4 a prime power, order q + 1: ``I + [[0, 1], [-1, Q]]`` with ``Q[i][j] = chi(a_i - a_j)``.
- Paley II, q = 1 mod 4, order 2 (q + 1): each 0 of ``[[0, 1], [1, Q]]`` becomes ``[[1, -1], [-1, -1]]``, and each
  +-1 becomes ``+-[[1, 1], [1, -1]]``.
- Williamson, order 4 m: symmetric circulants A, B, C, D with ``A^2 + B^2 + C^2 + D^2 = 4 m I`` in the array
  ``[[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]]``.

Last, rows and columns are negated so that the first row and the first column are +1: column 0 of a transform is the
plain sum, as in Sylvester's. chi is the quadratic character of GF(q), whose elements are numbered by their digits to
the base p: ``a = sum digit_k p^k`` is the polynomial ``sum digit_k z^k`` modulo the one in ``MODULI``.

Hadamard matrices of one order differ: those of a library (Sloane's tables in QuaRot, QuIP#, HALO and the fast-hadamard
packages, say) may have other rows and columns, other signs, or none in common. All spread outliers alike, but no bit
of a transform is shared; ``hadamard(x, size, matrix=...)`` takes such a matrix.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fmtsim.support.errors import ArgumentError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """Say how a base is made.

    Args:
        kind: The construction.
        field: Paley: the prime power q.
        circulants: Williamson: the first rows of A, B, C and D.
        source: Where the order was published.
    """

    kind: Literal["paley_one", "paley_two", "williamson"]
    field: int = 0
    circulants: tuple[str, ...] = ()
    source: str


_PALEY = "Paley, On Orthogonal Matrices, J. Math. Phys. 12 (1933)"
_PALEY_ONE = (12, 20, 28, 44, 60, 68, 84, 108, 132, 140, 164, 180, 212, 228, 244, 252, 284)
_PALEY_TWO = (36, 52, 76, 100, 124, 148, 196, 204, 220, 924)

# The sources are those of the orders. The rows of 92, 116 and 172 come from a search of ours among symmetric sequences
# (those of 172 do not change when their places are multiplied by 6 modulo 43), those of 156 are as SageMath lists them.
_WILLIAMSON = {
    92: Construction(
        kind="williamson",
        circulants=(
            "+--+-+-++++++++++-+-+--",
            "+--+--+++------+++--+--",
            "+--++-+-+-++++-+-+-++--",
            "+++---++--++++--++---++",
        ),
        source="Baumert, Golomb and Hall, Bull. Amer. Math. Soc. 68 (1962)",
    ),
    116: Construction(
        kind="williamson",
        circulants=(
            "+--++----+-++++++++-+----++--",
            "++--++-+-++++----++++-+-++--+",
            "+--+---+-+--++++++--+-+---+--",
            "+-+++-+++--+-++++-+--+++-+++-",
        ),
        source="Baumert, Bull. Amer. Math. Soc. 72 (1966)",
    ),
    156: Construction(
        kind="williamson",
        circulants=(
            "+++--+-+-----+--++----++--+-----+-+--++",
            "+++--++-+---+-+--+----+--+-+---+-++--++",
            "++++---+--++----+-+--+-+----++--+---+++",
            "+---++-+-+-----+++-++-+++-----+-+-++---",
        ),
        source="Baumert and Hall, Bull. Amer. Math. Soc. 71 (1965); as circulants Djokovic, Discrete Math. 115 (1993)",
    ),
    172: Construction(
        kind="williamson",
        circulants=(
            "+-+-+----++++-++++-++--++-++++-++++----+-+-",
            "+--++----+-+---+--++++++++--+---+-+----++--",
            "++-+--++-+++----+++-++++-+++----+++-++--+-+",
            "+--+++--+-+--+-+++++-++-+++++-+--+-+--+++--",
        ),
        source="Williamson, Duke Math. J. 11 (1944)",
    ),
}

CONSTRUCTIONS: dict[int, Construction] = dict(
    sorted(
        {
            **{order: Construction(kind="paley_one", field=order - 1, source=_PALEY) for order in _PALEY_ONE},
            **{order: Construction(kind="paley_two", field=order // 2 - 1, source=_PALEY) for order in _PALEY_TWO},
            **_WILLIAMSON,
        }.items()
    )
)
"""How each base larger than 1 is made. Of the orders 4 m, m odd, below 256 only 188 and 236 are missing."""

MODULI: dict[int, tuple[int, ...]] = {25: (2, 0, 1), 27: (1, 2, 0, 1), 49: (1, 0, 1), 243: (1, 2, 0, 0, 0, 1)}
"""Irreducible monic polynomials over GF(p) that make GF(p^k): coefficients of 1, z, z^2, ..."""


def hadamard_matrix(size: int) -> Tensor:
    """Return the Hadamard matrix of a size: int8 ``[size, size]`` of +1 and -1, first row and column +1.

    Args:
        size: A power of two, or a base of ``CONSTRUCTIONS`` times one.

    Raises:
        ArgumentError: No such matrix is here; the message names the next sizes below and above.

    >>> hadamard_matrix(4).tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    >>> h = hadamard_matrix(12).int()
    >>> bool((h @ h.T == 12 * torch.eye(12)).all())
    True
    """
    base = base_of(size)
    h, doubled = base_matrix(base), torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    for _ in range((size // base).bit_length() - 1):
        h = torch.kron(h, doubled)
    return h if size > base else h.clone()


def base_of(size: int) -> int:
    """Return the base of a size, which is that base times a power of two: 1, or a key of ``CONSTRUCTIONS``.

    Raises:
        ArgumentError: There is none.
    """
    base = _base_of(size) if type(size) is int else 0
    if not base:
        raise ArgumentError(f"size={shown(size)} has no Hadamard matrix here; choose {_neighbours(size)}")
    return base


@lru_cache(maxsize=64)
def base_matrix(base: int) -> Tensor:
    """Return the matrix of a base; it is shared, so leave it as it is."""
    with torch.device("cpu"):  # whatever the caller's default device is
        if base == 1:
            return torch.ones(1, 1, dtype=torch.int8)
        how = CONSTRUCTIONS[base]
        h = _paley(how) if how.kind != "williamson" else _williamson(how)
        h = h * h[:, :1]
        return h * h[:1]


def _base_of(size: int) -> int:
    """Return the base of a size, or 0."""
    if size < 1:
        return 0
    odd = size // (size & -size)
    base = 4 * odd if odd > 1 else 1
    return base if base == 1 or (base in CONSTRUCTIONS and size % base == 0) else 0


def _neighbours(size: object) -> str:
    """Name the next sizes below and above one that has no matrix."""
    if type(size) is not int or size < 1:
        return "an int of 1 or more"
    below = next(n for n in range(size - 1, 0, -1) if _base_of(n))
    above = next(n for n in range(size + 1, 2 * size + 1) if _base_of(n))
    return f"{below} or {above}, the next sizes that have one"


def _paley(how: Construction) -> Tensor:
    """Build Paley's first or second matrix."""
    q = how.field
    core = torch.ones(q + 1, q + 1, dtype=torch.int8)
    core[0, 0] = 0
    core[1:, 1:] = _character(q)
    if how.kind == "paley_one":
        core[1:, 0] = -1
        return core + torch.eye(q + 1, dtype=torch.int8)
    signs, zeros = (torch.tensor(block, dtype=torch.int8) for block in (((1, 1), (1, -1)), ((1, -1), (-1, -1))))
    return torch.kron(core, signs) + torch.kron(torch.eye(q + 1, dtype=torch.int8), zeros)


def _character(q: int) -> Tensor:
    """Return ``chi(a_i - a_j)`` for all elements of GF(q), int8 [q, q]: 1 for squares, -1 for others, 0 for 0."""
    p, degree, modulus = _field(q)
    digits = torch.tensor([[a // p**k % p for k in range(degree)] for a in range(q)])
    weights = torch.tensor([p**k for k in range(degree)])
    chi = torch.full((q,), -1, dtype=torch.int8)
    chi[[_square(row, p, modulus) for row in digits.tolist()]] = 1
    chi[0] = 0
    differences = (digits[:, None] - digits) % p @ weights
    return chi[differences]


def _field(q: int) -> tuple[int, int, tuple[int, ...]]:
    """Return the prime p, the degree and the modulus of GF(q); ``z`` serves for prime fields."""
    p = next(d for d in range(2, q + 1) if q % d == 0)
    modulus = (0, 1) if p == q else MODULI[q]
    return p, len(modulus) - 1, modulus


def _square(a: list[int], p: int, modulus: tuple[int, ...]) -> int:
    """Return the number of the square of a polynomial."""
    degree = len(modulus) - 1
    product = [0] * (2 * degree - 1)
    for i, left in enumerate(a):
        for j, right in enumerate(a):
            product[i + j] += left * right
    for top in range(len(product) - 1, degree - 1, -1):  # subtract multiples of the modulus from the top down
        for k, coefficient in enumerate(modulus[:degree]):
            product[top - degree + k] -= product[top] * coefficient
    return sum(product[k] % p * p**k for k in range(degree))


def _williamson(how: Construction) -> Tensor:
    """Build Williamson's array of four symmetric circulants."""
    rows = [torch.tensor([1 if sign == "+" else -1 for sign in row], dtype=torch.int8) for row in how.circulants]
    a, b, c, d = (torch.stack([row.roll(shift) for shift in range(len(row))]) for row in rows)
    array = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(blocks, dim=1) for blocks in array])
