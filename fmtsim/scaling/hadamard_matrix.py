# SPDX-License-Identifier: Apache-2.0
"""Hadamard matrices of every order ``base * 2**k`` whose base is known, and the signs that randomise a transform.

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fmtsim.formats.packing import tensor_of_bytes
from fmtsim.rounding.philox import random_word
from fmtsim.support.errors import ArgumentError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """Describe how a base is constructed.

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
        if how.kind == "williamson":  # his array of four symmetric circulants
            signs = [[1 if sign == "+" else -1 for sign in row] for row in how.circulants]
            rows = [torch.tensor(row, dtype=torch.int8) for row in signs]
            a, b, c, d = (torch.stack([row.roll(shift) for shift in range(len(row))]) for row in rows)
            array = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
            h = torch.cat([torch.cat(blocks, dim=1) for blocks in array])
        else:
            h = _paley(how)
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
    # 1. the prime p, the modulus and the degree of GF(q); ``z`` serves for prime fields
    p = next(d for d in range(2, q + 1) if q % d == 0)
    modulus: tuple[int, ...] = (0, 1) if p == q else MODULI[q]
    degree = len(modulus) - 1
    # 2. ``chi(a_i - a_j)`` for all elements of GF(q), int8 [q, q]: 1 for squares, -1 for others, 0 for 0
    digits = torch.tensor([[a // p**k % p for k in range(degree)] for a in range(q)])
    weights = torch.tensor([p**k for k in range(degree)])
    chi = torch.full((q,), -1, dtype=torch.int8)
    chi[[_square(row, p, modulus) for row in digits.tolist()]] = 1
    chi[0] = 0
    differences = (digits[:, None] - digits) % p @ weights
    core[1:, 1:] = chi[differences]
    if how.kind == "paley_one":
        core[1:, 0] = -1
        return core + torch.eye(q + 1, dtype=torch.int8)
    signs, zeros = (torch.tensor(block, dtype=torch.int8) for block in (((1, 1), (1, -1)), ((1, -1), (-1, -1))))
    return torch.kron(core, signs) + torch.kron(torch.eye(q + 1, dtype=torch.int8), zeros)


def _square(a: list[int], p: int, modulus: tuple[int, ...]) -> int:
    """Return the number of the square of a polynomial."""
    degree = len(modulus) - 1
    product = [0] * (2 * degree - 1)
    for i, first in enumerate(a):
        for j, second in enumerate(a):
            product[i + j] += first * second
    for top in range(len(product) - 1, degree - 1, -1):  # subtract multiples of the modulus from the top down
        for k, coefficient in enumerate(modulus[:degree]):
            product[top - degree + k] -= product[top] * coefficient
    return sum(product[k] % p * p**k for k in range(degree))


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
    # seed and offset
    if isinstance(generator, torch.Generator):
        draw = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=generator.device)
        key = int(draw), 0
    else:
        pair = (generator, 0) if type(generator) is int else generator
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(type(number) is int for number in pair)):
            raise ArgumentError(
                f"generator={shown(generator)} is not one; pass an int seed, a RandomKey or a torch.Generator"
            )
        key = pair[0], pair[1]
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
        both = " and ".join(map(_shown, (signs, more)))
        raise ArgumentError(f"signs are {both}; pass two masks or two tensors of one shape")
    return signs ^ more


def sign_bits(signs: int, size: int) -> Tensor:
    """Return which elements of a group a mask gives another sign, bool [size]."""
    octets = tensor_of_bytes(signs.to_bytes(-(-size // 8), "little"))
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


def _shown(signs: int | Tensor) -> str:
    return f"a tensor {tuple(signs.shape)}" if isinstance(signs, Tensor) else "a mask"
