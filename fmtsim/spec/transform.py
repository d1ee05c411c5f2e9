# SPDX-License-Identifier: Apache-2.0
"""What happens to an operand before its scale is taken: records of the transforms that recipes name."""

from dataclasses import dataclass
from typing import Literal

from fmtsim.formats.spec import FloatFormat
from fmtsim.support.errors import FormatError
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Hadamard:
    """Rotate groups of neighbours by a Hadamard matrix.

    Args:
        size: Elements of a group; None rotates the whole axis.
        axis: ``"inner"``, the axis of the product's sums, where two rotations cancel; or ``"outer"``.
        signs: What each element of a group is multiplied with first: nothing, a bit mask (bit j set: element j changes
            its sign), or ``"random"`` signs, new in every forward and in every backward pass and the same for all
            operands in it. (Schemes that multiply the signs of the last pass by random ones draw from the same
            distribution.)
        rounded: Format in which the result is kept, None for float32.
        undo: Rotate the product back along the outer axis; along the inner one the rotations of two operands cancel.
    """

    size: int | None = 16
    axis: Literal["inner", "outer"] = "inner"
    signs: int | Literal["random"] | None = None
    rounded: FloatFormat | None = None
    undo: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if self.size is not None and self.size < 2:
            raise FormatError(
                f"Hadamard size={self.size!r} is not allowed; choose 2 or more, or None for the whole axis"
            )
        mask = type(self.signs) is int and self.size is not None and 0 <= self.signs < 1 << self.size
        if not mask and self.signs not in (None, "random"):
            raise FormatError(
                f"Hadamard signs={self.signs!r} is not allowed; choose None, 'random' or a mask of size bits"
            )

    def __str__(self) -> str:
        words = [f"Hadamard {self.size or 'all'}"]
        words += ["of the outer axis"] if self.axis == "outer" else []
        words += ["random signs" if self.signs == "random" else f"signs {self.signs:#x}"] if self.signs else []
        words += [f"in {self.rounded.name}"] if self.rounded else []
        return ", ".join([*words, *(["undone"] if self.undo else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """Clamp a tensor to its own quantiles.

    Args:
        level: The upper quantile, 0.5 to 1; the lower one is ``1 - level``.
        per: ``"tensor"``, or ``"row"`` for a quantile of each row.
        compensate: Add the product of what was cut off, in high precision, to the result (outlier compensation).
    """

    level: float
    per: Literal["tensor", "row"] = "tensor"
    compensate: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if not 0.5 < self.level <= 1:
            raise FormatError(f"Clamp level={self.level!r} is not allowed; choose a quantile above 0.5, such as 0.99")

    def __str__(self) -> str:
        return f"clamp to {self.level:g} of each {self.per}{', compensated' if self.compensate else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Keep two of every four neighbours, those of largest magnitude, and make the others zero (2:4 sparsity).

    Of equal magnitudes the earlier is kept; NaN counts as larger than any number. The gradient goes to all elements.

    Args:
        tiles: Keep two of four along both axes, so that the matrix and its transpose are sparse in one way: in a
            tile of 4 x 4, largest magnitude first, an element is kept where its row and its column have room (the rule
            of torch's ``_sparse_semi_structured_tile``, of magnitudes). A tile may then keep fewer than eight.
    """

    tiles: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)

    def __str__(self) -> str:
        return "2:4 sparse" + (" both ways" if self.tiles else "")


Transform = Hadamard | Clamp | Sparsity
