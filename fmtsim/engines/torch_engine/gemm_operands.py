# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products: pieces of K, their exact values in float64, their exponents, and NaN and Inf apart.

Everywhere K is the leading axis and the rest broadcasts: ``[L, m, 1]`` against ``[L, 1, n]`` for a matrix product,
``[L, rows]`` against ``[L, rows]`` for dot products of paired rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from fmtsim.engines.torch_engine.gemm_round import exponent_of
from fmtsim.engines.torch_engine.reals import widen

exact = widen  # elements of any dtype of the protocol as float64

_CHUNK = 1 << 20  # elements looked at once

ZERO_EXPONENT = -8192
"""Stands for the exponent of zero: any sum of it with others stays below every exponent that is real."""


class Rows(NamedTuple):
    """Hold raw operands with K leading; ``scale_a`` and ``scale_b`` have one entry for ``scale_block`` products.

    ``finite`` says that no operand and no scale is NaN or Inf, which saves the search for them in every block.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    scale_block: int = 1
    finite: bool = True

    def take(self, indices: Sequence[int]) -> "Rows":
        """Return the products at those k indices, in their order, each with scales of its own."""
        scale_a, scale_b = self.scale_a, self.scale_b
        if scale_a is not None and scale_b is not None:
            blocks = [k // self.scale_block for k in indices]
            scale_a, scale_b = _at(scale_a, blocks), _at(scale_b, blocks)
        return Rows(_at(self.a, indices), _at(self.b, indices), scale_a, scale_b, 1, self.finite)


class Pieces(Sequence[Rows]):
    """Cut the products of one block into pieces of ``span``, so that a block may be as long as K."""

    def __init__(self, rows: Rows, indices: Sequence[int], span: int) -> None:
        self._rows, self._indices, self._span = rows, indices, span

    def __len__(self) -> int:
        return -(-len(self._indices) // self._span)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows.take(self._indices[index * self._span : (index + 1) * self._span])

    def __iter__(self) -> Iterator[Rows]:
        return (self[i] for i in range(len(self)))


class Unit(Protocol):
    """What the accumulation order needs of a unit.

    span: Most products that it takes at once.
    weight: Float64 numbers that a step keeps for each output at a time, about.
    """

    span: int
    weight: int

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum, float64, after one block."""


class Signs:
    """Remembers whether all terms of a block, or some, carry a minus sign; zeros have signs too."""

    def __init__(self, state: torch.Tensor) -> None:
        self.all_minus = self.some_minus = torch.signbit(state)

    def see(self, minus: torch.Tensor) -> None:
        """Take note of the signs of terms, ``[L, ...]``."""
        self.all_minus = self.all_minus & minus.all(0)
        self.some_minus = self.some_minus | minus.any(0)


class Factor(NamedTuple):
    """One side's factors of products: float64 values without NaN and Inf, and their exponents, int32."""

    value: torch.Tensor
    exponent: torch.Tensor


def exponents(value: torch.Tensor, lowest: int) -> torch.Tensor:
    """Return ``max(floor(log2|value|), lowest)`` of finite float64 elements, int32; zero has ZERO_EXPONENT.

    Float64 subnormals count as -1023, which is below the lowest exponent of every format.
    """
    found = exponent_of(value).clamp(min=lowest)
    return torch.where(value == 0, ZERO_EXPONENT, found).to(torch.int32)


def cleaned(value: torch.Tensor, finite: bool) -> torch.Tensor:
    """Return the elements with zeros for NaN and Inf."""
    return value if finite else torch.where(torch.isfinite(value), value, 0.0)


def specials(pieces: Sequence[Rows], state: torch.Tensor) -> torch.Tensor:
    """Return what NaN and Inf among operands, scales and the running sum make of a block: NaN, Inf, or a finite number.

    Operands stand for their class: zero, a sign, Inf or NaN. IEEE arithmetic on those does the rest; zero scales
    are left out, since an Inf operand is Inf whatever the scales.
    """
    total = torch.where(torch.isfinite(state), 0.0, state)
    for rows in pieces:
        if not rows.finite:
            total = total + (_classes(rows.a, rows.scale_a) * _classes(rows.b, rows.scale_b)).sum(0)
    return total


def all_finite(*tensors: torch.Tensor | None) -> bool:
    """Say whether no element of matrices is NaN or Inf."""
    for matrix in tensors:
        if matrix is None or not matrix.numel():
            continue
        for rows in matrix.split(max(1, _CHUNK // matrix.shape[1])):
            if not bool(torch.isfinite(exact(rows)).all()):
                return False
    return True


def _classes(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    value = exact(x)
    kind = torch.where(torch.isfinite(value), torch.sign(value), value)
    if scale is None:
        return kind
    size = exact(scale).abs()
    return kind * torch.where(torch.isfinite(size), 1.0, size)


def _at(x: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Select along the leading axis at indices that never fall: a view where they follow each other, or are all one."""
    first, count = indices[0], len(indices)
    if list(indices) == list(range(first, first + count)):
        return x[first : first + count]
    if indices[-1] == first:
        return x[first : first + 1].expand(count, *x.shape[1:])
    if x.element_size() == 1:  # not every device gathers float8
        return x.view(torch.uint8).index_select(0, torch.tensor(indices, device=x.device)).view(x.dtype)
    return x.index_select(0, torch.tensor(indices, device=x.device))
