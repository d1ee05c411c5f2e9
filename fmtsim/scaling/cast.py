# SPDX-License-Identifier: Apache-2.0
"""A matrix in an element format under the scales that a rule makes of it."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim import ops
from fmtsim.float64 import float64
from fmtsim.formats.spec import ElementFormat, FloatFormat, Overflow
from fmtsim.quantize import quantize
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scales import Scales, one_level, two_levels
from fmtsim.scaling.statistics import block_sizes, blocked, folded_sum, statistic
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.operand import spread
from fmtsim.spec.quantizer import scaling_for
from fmtsim.spec.scaling import Scaling

Keys = tuple[RandomKey | None, RandomKey | None]


class Scaled(NamedTuple):
    """A matrix as elements and scales.

    Attributes:
        elements: float32 [M, N], values of the element format.
        scales: What they are multiplied with, block by block.
        scaled: float32 [M, N]: what was rounded, ``x / scale``.
    """

    elements: Tensor
    scales: Scales
    scaled: Tensor

    def values(self, block: tuple[int, int]) -> Tensor:
        """Return element times scale, float32, rounded once."""
        s = spread(self.scales.scale, block, self.elements.shape)
        if self.scales.tensor is None:
            return self.elements * s
        return (float64(self.elements) * s * self.scales.tensor).float()  # element times scale is exact in float64


def cast(
    x: Tensor,
    element: ElementFormat,
    scaling: Scaling,
    rounding: Rounding,
    overflow: Overflow,
    keys: Keys = (None, None),
    given: Scales | None = None,
) -> Scaled:
    """Round a matrix to an element format under the scales that a rule gives it.

    Args:
        x: [M, N], blocks along N: float16, bfloat16, float32 or float64 (which is rounded to float32 first).
            Some rules look at its dtype.
        element: The format of the elements.
        scaling: The rule.
        rounding: Rounding of the elements.
        overflow: What happens beyond the format's largest value.
        keys: Random words of the elements and of the scales.
        given: Scales that are known already (delayed scaling); None makes them from x.
    """
    dtype, x = x.dtype, x.float()
    scaling = scaling_for(scaling, dtype)
    sizes = block_sizes(scaling.block, x.shape)
    if given is not None:
        return _rounded(x, given, sizes, element, rounding, overflow, keys[0])
    rule = scaling if scaling.eden is None else replace(scaling, scale_rounding="nearest_even")  # before correction
    a = statistic(x, scaling.block, scaling.statistic)
    top = float(element.max)
    best: Scaled | None = None
    for times in scaling.candidates:
        found = scales(a, rule, top, keys[1], times, dtype)
        tried = _rounded(x, found, sizes, element, rounding, overflow, keys[0])
        best = tried if best is None else _better(x, best, tried, scaling.metric, sizes)
    assert best is not None  # a rule has a candidate
    return best if scaling.eden is None else _corrected(best, scaling, sizes, keys[1])


def scales(
    a: Tensor,
    scaling: Scaling,
    top: float,
    key: RandomKey | None = None,
    times: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Scales:
    """Return the scales of blocks with these statistics.

    Args:
        a: float32 [outer blocks, inner blocks], finite, from 0.
        scaling: The rule; its candidates and history are not looked at.
        top: The element format's largest value, for a rule that names none.
        key: Random words of a scale that is rounded stochastically.
        times: A candidate.
        dtype: Of the tensor, for a rule that rounds to it.
    """
    scaling = scaling_for(scaling, dtype)
    store = partial(_in_format, fmt=scaling.scale, rounding=scaling.scale_rounding, key=key)
    if scaling.tensor is not None:
        return two_levels(a, scaling, top, store, times)
    found = one_level(a, scaling, top, store, dtype)
    if times == 1:
        return found
    stored = store(found.scale * times)
    return Scales(stored, stored, divides=True)


def _in_format(s: Tensor, fmt: FloatFormat, rounding: str, key: RandomKey | None) -> Tensor:
    mode = Rounding(mode=rounding)  # type: ignore[arg-type]  # the record has checked it
    return quantize(s, fmt, rounding=mode, overflow="saturate", generator=key, out_dtype=torch.float32)


def _rounded(
    x: Tensor,
    found: Scales,
    sizes: tuple[int, int],
    element: ElementFormat,
    rounding: Rounding,
    overflow: Overflow,
    key: RandomKey | None,
) -> Scaled:
    factor = spread(found.factor, sizes, x.shape)
    y = torch.div(x, factor) if found.divides else x * factor
    words = key if rounding.mode == "stochastic" else None
    q = ops.quantize(y, _text(element, rounding, overflow), torch.float32, words, None)
    return Scaled(q, found, y)


@lru_cache(maxsize=256)
def _text(element: ElementFormat, rounding: Rounding, overflow: Overflow) -> str:
    return CastSpec(format=element, rounding=rounding, overflow=overflow).to_json()


def _better(x: Tensor, old: Scaled, new: Scaled, metric: str, sizes: tuple[int, int]) -> Scaled:
    """Take, block by block, the cast with the smaller error, the old one in a tie."""
    errors = []
    for tried in (old, new):
        off = blocked((float64(tried.values(sizes)) - float64(x)), sizes)
        errors.append(folded_sum(off.abs() if metric == "mae" else off * off))
    takes = errors[1] < errors[0]
    mixed = Scales(
        torch.where(takes, new.scales.scale, old.scales.scale),
        torch.where(takes, new.scales.factor, old.scales.factor),
        old.scales.divides,
        old.scales.tensor,
    )
    chosen = spread(takes, sizes, x.shape)
    return Scaled(torch.where(chosen, new.elements, old.elements), mixed, torch.where(chosen, new.scaled, old.scaled))


def _corrected(found: Scaled, scaling: Scaling, sizes: tuple[int, int], key: RandomKey | None) -> Scaled:
    """Multiply each group's scales by ``<y, y> / <y, q>``, y being what was rounded to q, and round them again.

    Scales were rounded to nearest before; the rule's own rounding, often stochastic, is that of the corrected ones.
    """
    assert scaling.eden is not None
    group = (1, scaling.eden)
    y, q = (blocked(float64(part), group) for part in (found.scaled, found.elements))
    over = folded_sum(y * q)
    c = torch.where(over == 0, 1.0, folded_sum(y * y) / over).float()
    each = spread(c, (1, scaling.eden // sizes[1]), found.scales.scale.shape)
    stored = _in_format(found.scales.scale * each, scaling.scale, scaling.scale_rounding, key)
    return found._replace(scales=found.scales._replace(scale=stored))
