# SPDX-License-Identifier: Apache-2.0
"""The record of a quantised reduction: the format sent, its scale and factor, the order of sums, and bad numbers."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from fmtsim.formats.element import FloatFormat, IntFormat, Overflow
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.formats.scaling import Scaling, check_use
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scales import float32
from fmtsim.support.errors import ArgumentError, did_you_mean, shown
from fmtsim.support.float64 import float64
from fmtsim.support.records import check_types

Factor = Literal["pre", "post", "sqrt", "auto"]
Algorithm = Literal["ring", "tree"]
NonFinite = Literal["propagate", "saturate", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFactor:
    """Describe the controller of FP8-LM's automatic factor mu (arXiv:2310.18313, section 2.1).

    After a step mu is multiplied with ``backoff`` where more than the part ``threshold`` of the reduced elements sits
    at the format's largest value, else with ``RN32(growth ** (1 / growth_steps))``; then it is kept within the bounds.

    Args:
        initial: The first mu.
        threshold: The part of elements at the top that is let pass; 1e-5 is the paper's 0.001 %.
        backoff: Multiplier of a step with more.
        growth: What mu grows by over ``growth_steps`` steps without.
        growth_steps: Steps.
        least: Lower bound.
        largest: Upper bound; the paper names none.
    """

    initial: float = 1.0
    threshold: float = 1e-5
    backoff: float = 0.5
    growth: float = 2.0
    growth_steps: int = 1000
    least: float = 2.0**-24
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "backoff", "growth", "least", "largest"):
            value = getattr(self, name)
            good = isinstance(value, int | float) and math.isfinite(value) and value > 0
            _require(good, f"AutoFactor {name}={shown(value)}", "a finite number above 0")
        _require(0 <= self.threshold < 1, f"AutoFactor threshold={shown(self.threshold)}", "a part from 0, below 1")
        steps = type(self.growth_steps) is int and self.growth_steps >= 1
        _require(steps, f"AutoFactor growth_steps={shown(self.growth_steps)}", "a whole number from 1")
        _require(
            self.least <= self.initial <= self.largest, f"AutoFactor initial={shown(self.initial)}", "one in the bounds"
        )
        check_types(self)

    def next(self, mu: Tensor, saturated: Tensor, elements: Tensor) -> Tensor:
        """Return mu of the next step, float32, 0-d; every rank that has the same counts gets the same bits.

        Args:
            mu: float32, 0-d.
            saturated: int64, 0-d: reduced elements at the format's largest value.
            elements: int64, 0-d: all of them; the part is their float64 quotient, 0 where there are none.
        """
        part = float64(saturated) / float64(elements.clamp(min=1))
        grown = mu * float32(self.growth ** (1 / self.growth_steps))
        moved = torch.where(part > self.threshold, mu * float32(self.backoff), grown)
        return moved.clamp(min=float32(self.least), max=float32(self.largest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Describe a sum, or mean, of one tensor of every rank whose partial sums travel in a narrow format.

    Args:
        format: Format of what travels: a float or integer format whose values float32 holds.
        scaling: How the scale of a tensor follows from its largest magnitude on all ranks; one scale a tensor, in
            float32. None means 1.
        factor: What multiplies the scaled tensor besides: ``"pre"`` 1/N, so that the sum cannot overflow; ``"post"`` 1;
            ``"sqrt"`` 1/sqrt(N), as MS-AMP; ``"auto"`` mu, which a controller moves. N is the number of ranks. It is
            taken out of the result again.
        auto: The controller of ``"auto"``, else None.
        algorithm: ``"ring"`` or ``"tree"`` (docs/distributed.md draws their orders of sums).
        rounding: Of the cast before the first hop and of the sum at every hop.
        overflow: What happens beyond the largest value; None is the format's own rule.
        nonfinite: ``"propagate"``: NaN and Inf become NaN, and so do their sums; ``"saturate"``: Inf becomes the
            largest value, NaN stays NaN where the format has it (as MS-AMP's cast); ``"raise"``: all ranks raise.
        average: Whether the result is the mean, or the sum.
        seed: Of stochastic rounding.
        source: Where it is defined.
    """

    format: FloatFormat | IntFormat
    scaling: Scaling | None = Scaling(arithmetic="encode", power_of_two="ceil")
    factor: Factor = "post"
    auto: AutoFactor | None = None
    algorithm: Algorithm = "ring"
    rounding: Rounding = Rounding()
    overflow: Overflow | None = None
    nonfinite: NonFinite = "propagate"
    average: bool = True
    seed: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        called = getattr(self.format, "name", self.format)
        plain = isinstance(self.format, FloatFormat | IntFormat) and self.format.signed
        _require(plain, f"Reduction format={shown(called)}", "the record of a signed float or integer format")
        fits = result_dtype(self.format, torch.float32) == torch.float32
        _require(fits, f"Reduction format={shown(called)}", "a format whose values float32 holds")
        check_types(self)
        if self.nonfinite == "propagate" and not self.format.has_nan:
            raise ArgumentError(f"{called} has no NaN to propagate; choose nonfinite='saturate' or 'raise'")
        _require(
            type(self.seed) is int and 0 <= self.seed < 1 << 63, f"Reduction seed={shown(self.seed)}", "0 to 2**63 - 1"
        )
        _require((self.factor == "auto") == (self.auto is not None), f"Reduction auto={shown(self.auto)} with "
                 f"factor={shown(self.factor)}", "factor='auto' and auto=AutoFactor() together")  # fmt: skip
        if self.scaling is not None:
            check_use("Reduction", self.scaling, "a reduction", ArgumentError)

    @property
    def overflow_rule(self) -> Overflow:
        """The overflow rule of the format."""
        return self.overflow or self.format.default_overflow

    def __str__(self) -> str:
        words = [f"{self.algorithm} of {self.format.name}", f"factor {self.factor}"]
        words += [f"scale {self.scaling}"] if self.scaling else ["no scale"]
        words += [] if self.rounding == Rounding() else [self.rounding.mode]
        words += ["mean" if self.average else "sum", f"non-finite: {self.nonfinite}"]
        return ", ".join(words)


def _require(condition: bool, fault: str, allowed: str) -> None:
    if not condition:
        raise ArgumentError(f"{fault} is not allowed; choose {allowed}")


_E4M3: Final = get_format("e4m3")
_BF16: Final = get_format("bf16")
_FP32: Final = get_format("fp32")
_FP8LM: Final = "Peng et al., FP8-LM, arXiv:2310.18313, section 2.1"
assert isinstance(_E4M3, FloatFormat) and isinstance(_BF16, FloatFormat) and isinstance(_FP32, FloatFormat)

REDUCTIONS: Final[dict[str, Reduction]] = {
    "fp8lm": Reduction(format=_E4M3, factor="auto", auto=AutoFactor(), source=f"{_FP8LM}: automatic scaling"),
    "fp8lm_pre": Reduction(format=_E4M3, factor="pre", source=f"{_FP8LM}: pre-scaling"),
    "fp8lm_post": Reduction(format=_E4M3, factor="post", source=f"{_FP8LM}: post-scaling"),
    "msamp": Reduction(
        format=_E4M3, factor="sqrt", nonfinite="saturate", source="MS-AMP 9746ea8, msamp/nn/distributed.py"
    ),
    "fp32": Reduction(format=_FP32, scaling=None, source="IEEE 754-2019: float32 sums in the order of a ring"),
    "bf16": Reduction(
        format=_BF16, scaling=None, factor="pre", source="mean of bfloat16 gradients, each divided first"
    ),
}


def get_reduction(reduction: str | Reduction) -> Reduction:
    """Return the Reduction of a name (``REDUCTIONS`` lists them), or the record itself.

    Raises:
        ArgumentError: The name is unknown.

    >>> get_reduction("msamp").factor
    'sqrt'
    """
    if isinstance(reduction, Reduction):
        return reduction
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        hint = did_you_mean(reduction, REDUCTIONS)
        raise ArgumentError(f"unknown reduction {shown(reduction)}{hint} (choose one of {', '.join(REDUCTIONS)})")
    return REDUCTIONS[reduction]
