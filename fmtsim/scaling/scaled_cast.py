# SPDX-License-Identifier: Apache-2.0
"""A matrix in an element format under the scales of a rule: transform, statistic, scale, element, slope."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.quantize import quantize
from fmtsim.formats.element import ElementFormat, FloatFormat, Overflow
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import block_sizes, blocked, folded_sum, statistic
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.hadamard_matrix import random_signs
from fmtsim.scaling.levels import errors, two_levels
from fmtsim.scaling.scales import Scales, one_level
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.operand import spread
from fmtsim.spec.quantizer import (
    Clamp,
    ClipMask,
    Differentiable,
    GradientRule,
    Hadamard,
    Sparsity,
    StraightThrough,
    Transform,
    TrustMask,
    scaling_for,
)
from fmtsim.support.float64 import float64


def transformed(x: Tensor, transform: Transform, signs: Any) -> tuple[Tensor, Tensor | None]:
    """Return a matrix after a transform, and what clamping removed, or None."""
    if isinstance(transform, Clamp):
        # Clamp to the sorted elements at places ``int((1 - level) n)`` and ``int(level n)``, in x's dtype.
        rows = x.reshape(1, -1) if transform.per == "tensor" else x
        n = rows.shape[1]
        places = [min(max(int(part * n), 0), n - 1) for part in (1 - transform.level, transform.level)]
        ordered = rows.sort(dim=1).values
        low, high = (ordered[:, place : place + 1] for place in places)
        y = rows.clamp(low, high).reshape(x.shape)
        return y, x.float() - y.float() if transform.compensate else None
    if isinstance(transform, Sparsity):
        if not transform.tiles:
            # the two largest of four neighbours in a row, the earlier of equal ones
            fours = x.abs().reshape(x.shape[0], -1, 4)
            indices = fours.sort(dim=-1, descending=True, stable=True).indices[..., :2]
            mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, indices, True)
            return torch.where(mask.reshape(x.shape), x, 0.0), None
        # of tiles of 4 x 4: elements, largest first, while their row and column have fewer than two
        down, across = x.shape[0] // 4, x.shape[1] // 4
        tiles = x.abs().reshape(down, 4, across, 4).transpose(1, 2).reshape(-1, 16)
        mask, tile = torch.zeros_like(tiles, dtype=torch.bool), torch.arange(len(tiles), device=x.device)
        in_row, in_column = (torch.zeros(len(tiles), 4, dtype=torch.int64, device=x.device) for _ in range(2))
        for index in tiles.sort(dim=-1, descending=True, stable=True).indices.unbind(-1):
            row, column = index // 4, index % 4
            room = (in_row[tile, row] < 2) & (in_column[tile, column] < 2)
            mask[tile, index] = room
            in_row[tile, row] += room
            in_column[tile, column] += room
        mask = mask.reshape(down, across, 4, 4).transpose(1, 2)
        return torch.where(mask.reshape(x.shape), x, 0.0), None
    y = rotated(x, transform, signs)
    if transform.rounded is not None:
        y = quantize(y, transform.rounded, out_dtype=torch.float32)
    return y, None


def rotated(x: Tensor, transform: Hadamard, signs: Any, *, inverse: bool = False) -> Tensor:
    """Rotate a matrix along the axis that a transform names, or back; ``signs`` is the key of random ones."""
    dim = -1 if transform.axis == "inner" else 0
    if not x.shape[dim]:  # an empty axis has nothing to rotate
        return x.float()
    size = transform.size or x.shape[dim]
    mask = random_signs(size, signs) if transform.signs == "random" else transform.signs
    return hadamard(x, size, mask, dim=dim, inverse=inverse)


Keys = tuple[RandomKey | None, RandomKey | None]
_OF_KERNELS = (torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


class Scaled(NamedTuple):
    """A matrix as elements and scales.

    Attributes:
        elements: [M, N], values of the element format: float32, or another dtype that holds them.
        scales: What they are multiplied with, block by block.
        scaled: float32 [M, N]: what was rounded, ``x / scale``; [0, 0] without ``keeps_scaled``.
    """

    elements: Tensor
    scales: Scales
    scaled: Tensor

    def values(self, block: tuple[int, int]) -> Tensor:
        """Return element times scale, float32, rounded once."""
        return times_blocks(self.elements, self.scales.scale, block, tensor_scale=self.scales.tensor)


def cast(
    x: Tensor, element: ElementFormat, scaling: Scaling, rounding: Rounding, overflow: Overflow,
    keys: Keys = (None, None), given: Scales | None = None, dtype: torch.dtype = torch.float32,
    keeps_scaled: bool = True,
) -> Scaled:  # fmt: skip
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
    x_dtype, x = x.dtype, x.float()
    scaling = scaling_for(scaling, x_dtype)
    spec = CastSpec(format=element, rounding=rounding, overflow=overflow)
    sizes = block_sizes(scaling.block, x.shape)
    if given is not None:
        return _rounded(x, given, sizes, spec, keys[0], dtype, keeps_scaled)
    # 1. statistic
    rule = scaling if scaling.eden is None else replace(scaling, scale_rounding="nearest_even")  # before correction
    a = statistic(x, scaling.block, scaling.statistic)
    # 2. scale and element, for each candidate; comparisons and corrections need both in float32
    compares = len(scaling.candidates) > 1 or scaling.eden is not None
    results = (torch.float32, True) if compares else (dtype, keeps_scaled)
    best: Scaled | None = None
    for times in scaling.candidates:
        candidate = scales(a, rule, float(element.max), keys[1], times, x_dtype)
        tried = _rounded(x, candidate, sizes, spec, keys[0], *results)
        if best is None:
            best = tried
            continue
        # block by block the cast with the smaller error, the earlier one in a tie
        before, after = (
            errors(blocked(x, sizes), blocked(one.elements, sizes), one.scales, scaling, float(element.max), sizes[0])
            for one in (best, tried)
        )
        takes = after < before
        mixed = best.scales._replace(
            scale=torch.where(takes, tried.scales.scale, best.scales.scale),
            factor=torch.where(takes, tried.scales.factor, best.scales.factor),
        )
        chosen = spread(takes, sizes, x.shape)
        elements, scaled = (torch.where(chosen, new, old) for new, old in zip(tried[::2], best[::2], strict=True))
        best = Scaled(elements, mixed, scaled)
    assert best is not None  # a rule has a candidate
    # 3. EDEN's correction of each group's scales by <y, y> / <y, q>, y being what was rounded to q; they were rounded
    # to nearest so far, and the rule's own rounding, often stochastic, is that of the corrected ones
    if scaling.eden is not None:
        y, q = (blocked(float64(part), (1, scaling.eden)) for part in (best.scaled, best.elements))
        over = folded_sum(y * q)
        correction = torch.where(over == 0, 1.0, folded_sum(y * y) / over).float()
        correction = spread(correction, (1, scaling.eden // sizes[1]), best.scales.scale.shape)
        stored = _in_format(best.scales.scale * correction, scaling.scale, scaling.scale_rounding, keys[1])
        best = best._replace(scales=best.scales._replace(scale=stored))
    return best._replace(elements=best.elements.to(dtype))


def scales(
    a: Tensor, scaling: Scaling, top: float, key: RandomKey | None = None, times: float = 1.0,
    dtype: torch.dtype = torch.float32, *, fixed_factor: Tensor | None = None,
) -> Scales:  # fmt: skip
    """Return the scales of blocks with these statistics.

    Args:
        a: float32 [outer blocks, inner blocks], finite, from 0.
        scaling: The rule; its candidates and history are not looked at.
        top: The element format's largest value, for a rule that names none.
        key: Random words of a scale that is rounded stochastically.
        times: A candidate.
        dtype: Of the tensor, for a rule that rounds to it.
        fixed_factor: As in ``two_levels``.
    """
    scaling = scaling_for(scaling, dtype)
    store = partial(_in_format, fmt=scaling.scale, rounding=scaling.scale_rounding, key=key)
    if scaling.tensor is not None:
        return two_levels(a, scaling, top, store, times, fixed_factor=fixed_factor)
    block_scales = one_level(a, scaling, top, store, dtype)
    if times == 1:
        return block_scales
    stored = store(block_scales.scale * times)
    return Scales(stored, stored, divides=True)


def _in_format(s: Tensor, fmt: FloatFormat, rounding: str, key: RandomKey | None) -> Tensor:
    s = s if fmt.mantissa_bits else s.clamp(min=fmt.min_normal)  # powers of two do not become zero
    mode = Rounding(mode=rounding)  # type: ignore[arg-type]  # the record has checked it
    return quantize(s, fmt, rounding=mode, overflow="saturate", generator=key, out_dtype=torch.float32)


def _rounded(
    x: Tensor, scales: Scales, sizes: tuple[int, int], spec: CastSpec, key: RandomKey | None, dtype: torch.dtype,
    keeps_scaled: bool,
) -> Scaled:  # fmt: skip
    """Round the elements of a matrix under scales."""
    words = key if spec.rounding.mode == "stochastic" else None
    element: ElementFormat = spec.format  # type: ignore[assignment]
    refuses = not element.has_nan and element.nan_policy == "error"  # what ops.quantize looks at data for
    engine = None if refuses or not x.numel() else ops.cpu_engine(x)
    is_transposed = not x.is_contiguous() and x.mT.is_contiguous()
    # 1. a transposed matrix, in the order of its memory: only random words depend on the order
    if engine is not None and is_transposed and words is None:
        transposed = scales._replace(factor=scales.factor.mT) if scales.factor.numel() > 1 else scales
        cast_t = _rounded(x.mT, transposed, sizes[::-1], spec, key, dtype, keeps_scaled)
        return Scaled(cast_t.elements.mT, scales, cast_t.scaled.mT)
    # 2. in one pass of a kernel
    if engine is not None:
        q, y = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape if keeps_scaled else (0, 0))
        factor, block = _of_matrix(scales.factor, sizes, x)
        if engine.round_blocks(
            x, factor, block, spec, words, q, divides=scales.divides, scaled=y if keeps_scaled else None
        ):
            # a library's order of sums depends on the layout: it stays x's
            return Scaled(q.mT.contiguous().mT if is_transposed else q, scales, y)
    # 3. scaled, then rounded
    y = times_blocks(x, scales.factor, sizes, divides=scales.divides)
    q = ops.quantize(y, spec, torch.float32, words, None)
    return Scaled(q.to(dtype), scales, y)


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
    s = spread(s, sizes, x.shape)
    if tensor_scale is not None:
        return (float64(x.float()) * s * tensor_scale).float()  # element times scale is exact in float64
    return torch.div(x.float(), s) if divides else x.float() * s


def _of_matrix(s: Tensor, sizes: tuple[int, int], x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the numbers of blocks as a matrix, and the blocks; one number is that of the whole matrix."""
    return (s.reshape(1, 1), (x.shape[0], x.shape[1])) if s.numel() == 1 else (s, sizes)


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
        return (y - cast.elements.float()).abs() <= rule.limit
    assert isinstance(rule, Differentiable)
    low, high = (quantize(y, element, rounding=mode, overflow="saturate") for mode in ("down", "up"))
    width = high - low
    u = torch.where(width > 0, 2 * (y - low) / width - 1, 1.0).abs()
    steep = (u.pow(1 / rule.k - 1) / rule.k).clamp(max=rule.cap)
    return torch.where(y.abs() <= element.max, steep, 0.0)
