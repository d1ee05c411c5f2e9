"""One operand of a product under a quantiser: transforms, a cast, scale rules, gradient rules."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.layers.bfloat16 import on_card
from fmtsim.gemm.layers.card import drawn, prepare_on_card, settled, unrotate_on_card
from fmtsim.gemm.layers.coding import code, holder
from fmtsim.gemm.layers.config import OPERANDS
from fmtsim.gemm.layers.operand import Draws
from fmtsim.gemm.layers.streams import Generator, stream_of
from fmtsim.gemm.products.operator import drawn_key
from fmtsim.quantize import quantize
from fmtsim.scaling.cast import Scaled, cast
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.history import DelayedScale, FrozenScale
from fmtsim.scaling.signs import random_signs
from fmtsim.scaling.slope import slope
from fmtsim.scaling.statistics import block_sizes, statistic
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling
from fmtsim.spec.transform import Clamp, Hadamard, Transform


def draws_of(generator: Generator, name: str, signs: Any) -> Draws:
    """Return the streams of an operand of a layer, by its name such as ``"x_f"``, with the signs of its pass."""
    index = OPERANDS.index(name) if name else 0
    return Draws(stream_of(generator, index), stream_of(generator, 12 + index), signs)


def prepare(
    x: Tensor,
    quantizer: Quantizer,
    draws: Draws,
    delayed: DelayedScale | FrozenScale | None = None,
    *,
    folded: bool = False,
    factor: Tensor | None = None,
) -> Operand:
    """Quantise a matrix ``[rows, inner]``; blocks run along the inner axis.

    Args:
        x: float16, bfloat16, float32 or float64 (which is rounded to float32 where anything but a cast is asked for).
        quantizer: What to do.
        draws: Where random numbers come from.
        delayed: State of a scale with a history.
        folded: On a GPU, multiply scales into elements where bfloat16 holds the products (``folds``).
        factor: float32, 0-d: what x, bfloat16, is multiplied with first; each product is rounded to float32.
    """
    if on_card(x):
        draws = drawn(x, quantizer, draws)
        made = prepare_on_card(x, quantizer, draws, delayed, folded, factor)
        if made is not None:
            return made
    made = _prepared(x if factor is None else x.float() * factor, quantizer, draws, delayed, folded)
    return settled(made, folded) if on_card(x) else made


def _prepared(
    x: Tensor, quantizer: Quantizer, draws: Draws, delayed: DelayedScale | FrozenScale | None, folded: bool
) -> Operand:
    rest = None
    for transform in quantizer.transforms:
        x, cut = transformed(x, transform, draws.signs)
        rest = cut if cut is not None else rest
    if quantizer.then is None:
        return _cast(x, quantizer, draws, delayed)._replace(rest=rest)
    made = prepare(x, _first(quantizer), draws, delayed, folded=folded)
    bare = made.scale is made.tensor_scale is None and made.elements.dtype == torch.bfloat16  # values already
    again = prepare(made.elements if bare else made.values(torch.float32), quantizer.then, draws, folded=folded)
    return again._replace(quantizer=quantizer, slope=made.slope, rest=rest)


@lru_cache(maxsize=256)
def _first(quantizer: Quantizer) -> Quantizer:
    """Return the first cast of a quantiser that casts twice."""
    return replace(quantizer, transforms=(), then=None)


def transformed(x: Tensor, transform: Transform, signs: Any) -> tuple[Tensor, Tensor | None]:
    """Return a matrix after a transform, and what was cut off it."""
    if isinstance(transform, Clamp):
        return _clamped(x, transform)
    y = rotated(x, transform, signs)
    if transform.rounded is not None:
        y = quantize(y, transform.rounded, out_dtype=torch.float32)
    return y, None


def rotated(x: Tensor, transform: Hadamard, signs: Any, *, inverse: bool = False) -> Tensor:
    """Rotate a matrix along the axis that a transform names, or back."""
    dim = -1 if transform.axis == "inner" else 0
    size = transform.size or x.shape[dim]
    return hadamard(x, size, _signs(transform, size, signs, x.device), dim=dim, inverse=inverse)


def unrotated(
    y: Tensor, first: Quantizer, before: Quantizer, turned: bool, slope: Tensor | None, signs: Any, dtype: torch.dtype
) -> Tensor:
    """Turn the gradient of a rounded, rotated operand into that of the tensor itself.

    Args:
        y: [rows, columns]: the product.
        first: Quantiser of the product's first operand, whose outer rotation is undone.
        before: Quantiser of the operand of the forward pass that this is the gradient of.
        turned: The product was one of that operand as it was rotated.
        slope: What the gradient is multiplied with, or None.
        signs: Key of the pass's random signs.
        dtype: Of the result.
    """
    for transform in reversed(first.transforms):
        if isinstance(transform, Hadamard) and transform.axis == "outer" and transform.undo:
            y = rotated(y, transform, signs, inverse=True)
    if turned and before.transforms:
        done = unrotate_on_card(y, before, slope, dtype)
        if done is not None:
            return done
    if slope is not None:
        y = y * slope
    for transform in reversed(before.transforms if turned else ()):
        if isinstance(transform, Hadamard) and transform.axis == "inner":
            y = rotated(y, transform, None, inverse=True)
    return y.to(dtype)


def _signs(transform: Hadamard, size: int, draws: Any, device: torch.device) -> int | None:
    if transform.signs != "random":
        return transform.signs
    return random_signs(size, drawn_key(draws, device))


def _clamped(x: Tensor, transform: Clamp) -> tuple[Tensor, Tensor | None]:
    """Clamp to quantiles, elements of the sorted magnitudes' places ``int((1 - level) n)`` and ``int(level n)``."""
    dtype, x = torch.float32 if x.dtype == torch.float64 else x.dtype, x.float()
    rows = x.reshape(1, -1) if transform.per == "tensor" else x
    n = rows.shape[1]
    places = [min(max(int(part * n), 0), n - 1) for part in (1 - transform.level, transform.level)]
    ordered = rows.sort(dim=1).values
    low, high = (ordered[:, place : place + 1] for place in places)
    y = rows.clamp(low, high).reshape(x.shape)
    return y.to(dtype), x - y if transform.compensate else None  # elements of x: the dtype holds them


def _cast(x: Tensor, quantizer: Quantizer, draws: Draws, delayed: DelayedScale | FrozenScale | None) -> Operand:
    fmt = quantizer.format
    if fmt is None:
        return Operand(x, quantizer)
    if quantizer.scaling is not None:
        return _scaled(x, quantizer, quantizer.scaling, draws, delayed)
    if isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat):
        made = code(x, quantizer, -1, draws.elements, check=False)
        return Operand(made.values, quantizer, made.scales, made.whole, block_sizes(fmt.block, x.shape))
    stream = draws.elements if quantizer.rounding.mode == "stochastic" else None
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = quantize(
        x, fmt, rounding=quantizer.rounding, overflow=quantizer.overflow, generator=stream, pad=True, out_dtype=wide
    )
    return Operand(values, quantizer)


def _scaled(
    x: Tensor, quantizer: Quantizer, scaling: Scaling, draws: Draws, delayed: DelayedScale | FrozenScale | None
) -> Operand:
    element = quantizer.format
    assert element is not None and not isinstance(element, BlockFormat | LogTileFormat)
    keys = (
        drawn_key(draws.elements, x.device) if quantizer.rounding.mode == "stochastic" else None,
        drawn_key(draws.scales, x.device) if scaling.scale_rounding == "stochastic" else None,
    )
    given = None
    if scaling.history is not None:
        if delayed is None:
            raise ArgumentError(
                "delayed scaling needs a state to remember in; run the layer inside a model that fmtsim.convert made"
            )
        given = delayed.advance(statistic(x, (None, None), "amax"))
    overflow = quantizer.overflow or element.default_overflow
    made: Scaled = cast(x, element, scaling, quantizer.rounding, overflow, keys, given)
    dtype = holder(element) if isinstance(element, FloatFormat) else torch.float32
    return Operand(
        made.elements.to(dtype),  # on the dtype's grid: nothing is rounded
        quantizer,
        made.scales.scale,
        made.scales.tensor,
        block_sizes(scaling.block, x.shape),
        slope(quantizer.gradient, made, element),
    )
