# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products: pieces of K, their exact values in float64, their exponents, and NaN and Inf apart.

Everywhere K is the leading axis and the rest broadcasts: ``[L, m, 1]`` against ``[L, 1, n]`` for a matrix product,
``[L, rows]`` against ``[L, rows]`` for dot products of paired rows.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import Mode, Rounding
from fmtsim.support.float64 import float64, from_bits
from fmtsim.torch_engine import floats
from fmtsim.torch_engine.floats import FP64, NEAREST, bits_of, by_threshold
from fmtsim.torch_engine.reals import power_of_two, widen

SAFE = 900
"""Exponents within plus and minus this can be scaled by each other in float64 without leaving its normal range."""

ODD_BITS = 50
"""Formats of at most this many mantissa bits are rounded right from a float64 number that was rounded to odd."""


@lru_cache(maxsize=256)
def is_scalable(fmt: FloatFormat) -> bool:
    """Return True if scaling can build a format's values: signed, with subnormals, exponents within SAFE."""
    usual = fmt.signed and fmt.has_zero and fmt.has_subnormals and fmt.mantissa_bits >= 1
    return usual and fmt.min_exponent - fmt.mantissa_bits >= -SAFE and fmt.max_exponent <= SAFE


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """Return the exponent field of float64 elements without bias, int64: ``floor(log2|x|)`` of normal numbers."""
    return ((bits_of(x) >> 52) & 0x7FF) - 1023


def integral(y: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Round float64 elements to integers by a deterministic mode; Inf and NaN stay, a zero may lose its sign."""
    if mode == "toward_zero":
        return torch.trunc(y)
    if mode == "nearest_even":
        return torch.round(y)
    if mode == "down":
        return torch.floor(y)
    if mode == "up":
        return torch.ceil(y)
    whole = torch.trunc(y)
    rest = (y - whole).abs()
    moved = (
        lambda: torch.zeros_like(rest, dtype=torch.bool),
        lambda: rest > 0.5,
        lambda: rest >= 0.5,
        lambda: rest > 0,
    )
    moves = by_threshold(
        mode, lambda threshold: moved[threshold](), lambda: whole * 0.5 != torch.trunc(whole * 0.5), y < 0
    )
    return torch.where(moves, whole + torch.copysign(torch.ones_like(y), y), whole)


def round_value(
    x: torch.Tensor, fmt: FloatFormat, rounding: Rounding = NEAREST, words: torch.Tensor | None = None
) -> torch.Tensor:
    """Round float64 elements to values of a format, once.

    Args:
        x: float64: exact numbers, or, for formats of at most ODD_BITS and without words, numbers rounded to odd.
        fmt: The format.
        rounding: The mode.
        words: The random integers of stochastic rounding, int64, of x's shape.

    Returns:
        float64; a number that rounds to zero keeps its sign; Inf and NaN stay, whatever the format has.
    """
    if not is_scalable(fmt):
        return _convert(x, fmt, rounding, words)
    position = exponent_of(x).clamp(fmt.min_exponent, SAFE + 1) - fmt.mantissa_bits  # Inf and NaN would go further
    y = x * power_of_two(-position)
    whole = integral(y, rounding.mode) if words is None else _stochastic(y, rounding, words)
    y = torch.copysign(whole * power_of_two(position), x)
    beyond = y.abs() > fmt.max
    return limit(y, beyond & torch.isfinite(y), fmt, rounding)


def assembled(
    whole: torch.Tensor, exponent: torch.Tensor, negative: torch.Tensor, fmt: FloatFormat, rounding: Rounding
) -> torch.Tensor:
    """Return rounded significands as values, after the overflow rule.

    Args:
        whole: Significands in last places, int64, up to ``2**(mantissa_bits + 1)``.
        exponent: The exponents they have, not below the lowest of the format, int64.
        negative: The signs.
        fmt: A format with a sign, subnormals and mantissa bits.
        rounding: How they were rounded.
    """
    beyond = exponent > fmt.max_exponent
    exponent = exponent.clamp(max=fmt.max_exponent)  # a code beyond Inf of float64 would not fit
    code = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + whole
    if is_scalable(fmt):
        y = float64(whole) * power_of_two(exponent - fmt.mantissa_bits)
    elif fmt.exponent_bits == 11 and fmt.mantissa_bits == 52 and fmt.exponent_bias == 1023:
        y = from_bits(code)  # Inf included; what lies above is dealt with below
    else:
        y = from_bits(floats.convert(code.clamp(max=fmt.max_code), fmt, FP64, NEAREST, "ieee").to(torch.int64))
    return limit(torch.where(negative, -y, y), beyond | (code > fmt.max_code), fmt, rounding)


def limit(y: torch.Tensor, beyond: torch.Tensor, fmt: FloatFormat, rounding: Rounding) -> torch.Tensor:
    """Apply the overflow rule where ``beyond`` says that a finite number was rounded above the largest value.

    That is Inf in a format that has it, however the unit rounds, and the largest value where the format's record says
    ``overflow="saturate"``; other formats follow docs/semantics.md, section 2.
    """
    if fmt.infinities and fmt.overflow != "saturate":
        return torch.where(beyond, torch.copysign(torch.full_like(y, torch.inf), y), y)
    largest = torch.copysign(torch.full_like(y, fmt.max), y)
    stays = torch.ones_like(beyond)  # what the mode pulls back to the largest value
    if fmt.has_nan and fmt.default_overflow == "ieee":
        stays = ~floats.leaves_range(y < 0, rounding)
    return torch.where(beyond, torch.where(stays, largest, torch.nan), y)


def _stochastic(y: torch.Tensor, rounding: Rounding, words: torch.Tensor) -> torch.Tensor:
    """Round to integers by random integers; every step is exact, as y has 53 bits."""
    whole = torch.trunc(y)
    rest, r = (y - whole).abs(), rounding.bits
    if rounding.variant == "a":
        moves = torch.floor(rest * 2.0**r) + words >= 2.0**r
    elif rounding.variant == "b":
        moves = torch.floor(rest * 2.0 ** (r + 1)) + (2 * words + 1) >= 2.0 ** (r + 1)
    else:
        moves = torch.round(rest * 2.0**r) + words >= 2.0**r
    return torch.where(moves, whole + torch.copysign(torch.ones_like(y), y), whole)


def _convert(x: torch.Tensor, fmt: FloatFormat, rounding: Rounding, words: torch.Tensor | None) -> torch.Tensor:
    """Round on bit patterns; slower, but any format will do."""
    overflow = fmt.overflow or ("ieee" if fmt.infinities else fmt.default_overflow)
    codes = floats.convert(bits_of(x), FP64, fmt, rounding, overflow, words)
    y = from_bits(floats.convert(codes, fmt, FP64, NEAREST, "ieee").to(torch.int64))
    if fmt.infinities and words is None:  # Inf also where the mode would stop at the largest value
        position = (
            exponent_of(x).clamp(fmt.max_exponent, 1022) - fmt.mantissa_bits
        )  # only numbers above the largest matter
        unbounded = integral(x * power_of_two(-position), rounding.mode) * power_of_two(position)
        y = limit(
            torch.where(torch.isfinite(x), torch.copysign(y, x), y),
            (x.abs() > fmt.max) & (unbounded.abs() > fmt.max),
            fmt,
            rounding,
        )
    return torch.where(torch.isfinite(x), y, x)


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
    exponent = exponent_of(value).clamp(min=lowest)
    return torch.where(value == 0, ZERO_EXPONENT, exponent).to(torch.int32)


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
    """Return True if no element of the matrices is NaN or Inf."""
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
