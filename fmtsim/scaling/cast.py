# SPDX-License-Identifier: Apache-2.0
"""A matrix in an element format under the scales that a rule makes of it."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.quantize import quantize
from fmtsim.formats.spec import ElementFormat, FloatFormat, Overflow
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scales import Scales, one_level, two_levels
from fmtsim.scaling.statistics import block_sizes, blocked, folded_sum, statistic
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.operand import spread
from fmtsim.spec.quantizer import scaling_for
from fmtsim.spec.scaling import Scaling
from fmtsim.support.float64 import float64

Keys = tuple[RandomKey | None, RandomKey | None]
_OF_KERNELS = (torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


class Scaled(NamedTuple):
    """A matrix as elements and scales.

    Attributes:
        elements: [M, N], values of the element format: float32, or another dtype that holds them.
        scales: What they are multiplied with, block by block.
        scaled: float32 [M, N]: what was rounded, ``x / scale``; [0, 0] where nobody asked for it.
    """

    elements: Tensor
    scales: Scales
    scaled: Tensor

    def values(self, block: tuple[int, int]) -> Tensor:
        """Return element times scale, float32, rounded once."""
        return times_blocks(self.elements, self.scales.scale, block, tensor_scale=self.scales.tensor)


def cast(
    x: Tensor,
    element: ElementFormat,
    scaling: Scaling,
    rounding: Rounding,
    overflow: Overflow,
    keys: Keys = (None, None),
    given: Scales | None = None,
    dtype: torch.dtype = torch.float32,
    keeps_scaled: bool = True,
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
        dtype: Of the elements, one that holds them.
        keeps_scaled: ``Scaled.scaled`` is asked for.
    """
    own, x = x.dtype, x.float()
    scaling = scaling_for(scaling, own)
    spec = CastSpec(format=element, rounding=rounding, overflow=overflow)
    sizes = block_sizes(scaling.block, x.shape)
    if given is not None:
        return _rounded(x, given, sizes, spec, keys[0], dtype, keeps_scaled)
    rule = scaling if scaling.eden is None else replace(scaling, scale_rounding="nearest_even")  # before correction
    a = statistic(x, scaling.block, scaling.statistic)
    top = float(element.max)
    compares, kept = len(scaling.candidates) > 1 or scaling.eden is not None, (torch.float32, True)
    best: Scaled | None = None
    for times in scaling.candidates:
        found = scales(a, rule, top, keys[1], times, own)
        tried = _rounded(x, found, sizes, spec, keys[0], *(kept if compares else (dtype, keeps_scaled)))
        best = tried if best is None else _better(x, best, tried, scaling.metric, sizes)
    assert best is not None  # a rule has a candidate
    best = best if scaling.eden is None else _corrected(best, scaling, sizes, keys[1])
    return best._replace(elements=best.elements.to(dtype))


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
    x: Tensor, found: Scales, sizes: tuple[int, int], spec: CastSpec, key: RandomKey | None, dtype: torch.dtype,
    keeps_scaled: bool,
) -> Scaled:  # fmt: skip
    words = key if spec.rounding.mode == "stochastic" else None
    element: ElementFormat = spec.format  # type: ignore[assignment]
    refuses = not element.has_nan and element.nan_policy == "error"  # what ops.quantize looks at data for
    engine = None if refuses or not x.numel() else ops.cpu_engine(x)
    turns = not x.is_contiguous() and x.mT.is_contiguous()
    if engine is not None and turns and words is None:  # any order will do
        turned = found._replace(factor=found.factor.mT) if found.factor.numel() > 1 else found
        made = _rounded(x.mT, turned, sizes[::-1], spec, key, dtype, keeps_scaled)
        return Scaled(made.elements.mT, found, made.scaled.mT)
    if engine is not None:
        q, y = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape if keeps_scaled else (0, 0))
        factor, of = _of_matrix(found.factor, sizes, x)
        if engine.round_blocks(
            x, factor, of, spec, words, q, divides=found.divides, scaled=y if keeps_scaled else None
        ):
            return Scaled(q.mT.contiguous().mT if turns else q, found, y)  # on layouts a library's order depends
    y = times_blocks(x, found.factor, sizes, divides=found.divides)
    q = ops.quantize(y, spec.to_json(), torch.float32, words, None)
    return Scaled(q.to(dtype), found, y)


def times_blocks(
    x: Tensor, s: Tensor, sizes: tuple[int, int], *, divides: bool = False, tensor_scale: Tensor | None = None,
    buffer: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the elements of a matrix times the numbers of their blocks, or divided by them: float32, one rounding.

    With the scale of a tensor products are float64, and rounded to float32 at the end. ``buffer`` names memory of this
    thread that kernels may write to, and that the next call by its name reuses.
    """
    engine = ops.cpu_engine(x)
    if engine is not None and x.dtype in _OF_KERNELS and x.numel():
        s, sizes = _of_matrix(s, sizes, x)
        return engine.times_blocks(x, s, sizes, divides=divides, tensor_scale=tensor_scale, buffer=buffer)
    each = spread(s, sizes, x.shape)
    if tensor_scale is not None:
        return (float64(x.float()) * each * tensor_scale).float()  # element times scale is exact in float64
    return torch.div(x.float(), each) if divides else x.float() * each


def _of_matrix(s: Tensor, sizes: tuple[int, int], x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the numbers of blocks as a matrix, and the blocks; one number is that of the whole matrix."""
    return (s.reshape(1, 1), (x.shape[0], x.shape[1])) if s.numel() == 1 else (s, sizes)


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
