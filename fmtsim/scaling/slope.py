# SPDX-License-Identifier: Apache-2.0
"""What gradients are multiplied with where the elements of an operand were rounded (fmtsim/spec/gradient.py)."""

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.spec import ElementFormat
from fmtsim.scaling.cast import Scaled
from fmtsim.spec.gradient import ClipMask, Differentiable, GradientRule, StraightThrough, TrustMask


def slope(rule: GradientRule, cast: Scaled, element: ElementFormat) -> Tensor | None:
    """Return the slope of every element, [M, N]: float32, or bool for 1 and 0 under masks; None where all are 1.

    Masks are exact; the slopes of ``Differentiable`` are float32 results of torch.pow, whose last bit depends on the
    device. NaN elements have slope 0 under masks.
    """
    y = cast.scaled
    if isinstance(rule, StraightThrough):
        return None
    if isinstance(rule, ClipMask):
        return y.abs() < element.max
    if isinstance(rule, TrustMask):
        return (y - cast.elements).abs() <= rule.limit
    assert isinstance(rule, Differentiable)
    low, high = (quantize(y, element, rounding=way, overflow="saturate") for way in ("down", "up"))
    width = high - low
    u = torch.where(width > 0, 2 * (y - low) / width - 1, 1.0).abs()
    steep = (u.pow(1 / rule.k - 1) / rule.k).clamp(max=rule.cap)
    return torch.where(y.abs() <= element.max, steep, 0.0)
