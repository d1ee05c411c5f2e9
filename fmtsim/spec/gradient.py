# SPDX-License-Identifier: Apache-2.0
"""What the gradient of a rounding is taken to be: records of the rules that recipes name."""

from dataclasses import dataclass

from fmtsim.support.errors import FormatError
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightThrough:
    """Pass the gradient as if nothing had been rounded."""

    def __str__(self) -> str:
        return "straight through"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMask:
    """Pass the gradient where ``|x / scale|`` is below the format's largest value, zero elsewhere."""

    def __str__(self) -> str:
        return "clip mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustMask:
    """Pass the gradient where rounding moved the element by no more than a number of scales, zero elsewhere.

    Args:
        limit: That number, in units of the scale.
    """

    limit: float = 0.5

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if not self.limit > 0:
            raise FormatError(f"TrustMask limit={self.limit!r} is not allowed; choose a number above 0")

    def __str__(self) -> str:
        return f"trust mask of {self.limit:g} scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiable:
    """Multiply the gradient by the slope of a smooth step between neighbouring values (differentiable estimator, DGE).

    With ``u = 2 (x - low) / (high - low) - 1`` in the interval of the scaled element x, the slope is
    ``min(|u|^(1/k - 1) / k, cap)``, and zero outside the format's range.

    Args:
        k: Steepness of the step.
        cap: Largest slope.
    """

    k: float = 5.0
    cap: float = 3.0

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if not (self.k > 1 and self.cap > 0):
            raise FormatError(f"Differentiable k={self.k!r}, cap={self.cap!r} is not allowed; choose k > 1 and cap > 0")

    def __str__(self) -> str:
        return f"DGE k={self.k:g} cap={self.cap:g}"


GradientRule = StraightThrough | ClipMask | TrustMask | Differentiable
