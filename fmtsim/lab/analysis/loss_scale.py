# SPDX-License-Identifier: Apache-2.0
"""Which power of two a loss should be multiplied with, from the gradients that were observed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fmtsim.lab.analysis.measure import LOWEST_EXPONENT
from fmtsim.lab.analysis.stats import OperandStats
from fmtsim.support.errors import ArgumentError
from fmtsim.support.table import Facts, Tabular


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LossScale(Tabular):
    """Say how much larger a loss may be until the first gradient saturates; ``print`` shows it.

    Args:
        scale: The largest power of two at which no observed gradient lies beyond its format's largest value: what the
            loss is to be multiplied with, on top of what it was. None where gradients have scales of their own.
        headroom: Factor that is left between the largest gradient, times scale, and the format's largest value.
        layer, operand, format: Where the gradient is that saturates first.
        amax: Its magnitude, as it was observed.
        underflow_percent: Share of the non-zero gradients, of formats without scales, that became zero.
        underflow_percent_scaled: The same at that scale, from counts of exponents; ties to zero are not counted.
        nonfinite: Gradients that were NaN or infinite: with any, the largest is not known.
    """

    scale: float | None
    headroom: float = math.nan
    layer: str = ""
    operand: str = ""
    format: str = ""
    amax: float = 0.0
    underflow_percent: float = 0.0
    underflow_percent_scaled: float = 0.0
    nonfinite: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return found | {"headroom": None if math.isnan(self.headroom) else self.headroom}

    def _content(self) -> list[Facts | str]:
        if self.scale is None:
            return ["gradients have scales of their own: they need no loss scale"]
        largest = f"{self.amax:.3g}, {self.operand} of {self.layer or '(model)'} in {self.format}"
        share = f"{self.underflow_percent:.2f} % as observed, {self.underflow_percent_scaled:.2f} % at this scale"
        facts = [
            ("loss scale", f"2^{int(math.log2(self.scale))} = {self.scale:g}"), ("largest gradient", largest),
            ("headroom", f"{self.headroom:.3g} times"), ("underflow", share),
        ]  # fmt: skip
        lost = f"{self.nonfinite} gradients were NaN or infinite: observe with a smaller loss scale first"
        return [Facts(facts), *([lost] if self.nonfinite else [])]


def loss_scale_of(layers: Mapping[str, Mapping[str, OperandStats]]) -> LossScale:
    """Return the largest loss scale that saturates no gradient, from statistics by layer and operand.

    Raises:
        ArgumentError: No gradient was observed, or all are zero or in high precision.
    """
    seen = {(layer, op): s for layer, ops in layers.items() for op, s in ops.items() if op.startswith("g")}
    formats = {key: s for key, s in seen.items() if s.window is not None and s.nonzero}
    if not formats:
        what = "only gradients that are zero or in high precision" if seen else "no gradient"
        raise ArgumentError(f"loss_scale: {what} observed; call backward inside the with, of a model with formats")
    # Where an element format sees other exponents than x has, a scale lies between.
    plain = {key: s for key, s in formats.items() if torch.equal(s.exponents, s.scaled_exponents)}
    if not plain:
        return LossScale(scale=None)
    (layer, operand), first = min(plain.items(), key=lambda item: _room(item[1]))
    room = _room(first)
    power = math.frexp(room)[1] - 1  # the largest with 2**power <= room
    nonzero = sum(s.nonzero for s in plain.values())
    return LossScale(
        scale=math.ldexp(1.0, power), headroom=math.ldexp(room, -power), layer=layer, operand=operand,
        format=first.format, amax=first.amax, nonfinite=sum(s.nonfinite for s in plain.values()),
        underflow_percent=100.0 * sum(s.underflowed for s in plain.values()) / nonzero,
        underflow_percent_scaled=100.0 * sum(_lost(s, power) for s in plain.values()) / nonzero,
    )  # fmt: skip


def _room(s: OperandStats) -> float:
    """Return how much larger the largest element may become."""
    assert s.window is not None
    return s.window[1] / s.amax


def _lost(s: OperandStats, power: int) -> int:
    """Count elements below half of the smallest value once they are 2**power times as large."""
    assert s.window is not None
    first = math.floor(math.log2(s.window[0])) - 1 - power - LOWEST_EXPONENT
    return int(s.exponents[: max(0, first)].sum())
