"""Operands on a GPU: in bfloat16 where that holds them, by the engine's fused kernels where they cover a quantiser."""

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.bfloat16 import hold, holds, on_card, served
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.operand import Draws, Operand, folds
from fmtsim.gemm.products.choice import drawn_key
from fmtsim.ops import load_engine
from fmtsim.scaling.cast import spread
from fmtsim.scaling.history import DelayedScale, FrozenScale, LearningScale
from fmtsim.scaling.statistics import block_sizes
from fmtsim.spec.quantizer import Quantizer

_GROUP: Final = 128  # elements of the longest rotation that kernels take
_folding: dict[int, tuple[Quantizer, bool]] = {}


def counts(layer: LinearConfig, x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Say whether kernels quantise all that a layer rounds or turns at random, its keys counted on the device.

    Args:
        layer: Its definition.
        x: One of its tensors.
        sizes: Those that its products have.
    """
    random = [
        quantizer for quantizer in layer.operands.values() if quantizer.is_stochastic or quantizer.has_random_signs
    ]
    if not random or not on_card(x) or x.dtype != torch.bfloat16 or any(size % _GROUP for size in sizes):
        return False
    rotations = load_engine("cuda.cast.rotated")
    return served(x) and all(rotations.counts(quantizer) for quantizer in random)


def prepare_on_card(
    x: Tensor,
    quantizer: Quantizer,
    draws: Draws,
    delayed: DelayedScale | FrozenScale | None,
    folded: bool,
    factor: Tensor | None,
) -> Operand | None:
    """Quantise a matrix by a fused kernel, as ``settled`` leaves it; None where none covers that."""
    fmt = quantizer.format
    if quantizer.then is not None or not served(x):
        return None
    if quantizer.transforms or (isinstance(fmt, BlockFormat) and folded):
        made = _rotated(x, quantizer, draws, factor) if folded else None
        if made is not None or quantizer.transforms:
            return made
    if factor is not None:
        return None
    if quantizer.scaling is not None:
        return _scaled(x, quantizer, draws, delayed, folded)
    if fmt is None or not holds(x, quantizer) or (isinstance(fmt, BlockFormat) and not folded):
        return None
    held = hold(x, quantizer, -1, draws.elements if quantizer.rounding.mode == "stochastic" else None)
    sizes = block_sizes(fmt.block, x.shape) if isinstance(fmt, BlockFormat) else (1, 1)
    return Operand(held.values, quantizer, tensor=held.scale, sizes=sizes)


def settled(made: Operand, folded: bool) -> Operand:
    """Return an operand as every way of making it leaves it on a GPU.

    Elements are bfloat16 where that holds them; ``folded``, they have the scales of their blocks in them where it holds
    the products (``folds``), and a rule's multiplier is left to ``tensor``.
    """
    quantizer = made.quantizer
    last = quantizer if quantizer.then is None else quantizer.then
    fmt = last.format
    if fmt is None:
        return made
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if is_representable(element, torch.bfloat16):
        made = made._replace(elements=made.elements.to(torch.bfloat16))  # on its grid: nothing is rounded
    if made.scale is None or not folded or not folds(quantizer):
        return made
    scale, times = made.scale, 1.0 if last.scaling is None else last.scaling.multiplier
    if times != 1:
        constant = _constant(times, scale.device)
        scale, made = scale / constant, made._replace(tensor=constant)  # a power of two times it: exact
    elements = made.elements.float() * spread(scale, made.sizes, made.elements.shape)
    return made._replace(elements=elements.to(torch.bfloat16), scale=None)


def unrotate_on_card(y: Tensor, before: Quantizer, slope: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn the gradient of a rotated operand back by a fused kernel; None where none covers it.

    Args:
        y: float32 [rows, columns].
        before: Quantiser that rotated the operand along its inner axis.
        slope: What gradients are multiplied with first, or None.
        dtype: Of the result.
    """
    if not on_card(y) or not served(y):
        return None
    rotations = load_engine("cuda.cast.rotated")
    masks = slope is None or slope.dtype == torch.bool
    if not masks or not rotations.covers_finish(y, before.transforms):
        return None
    return rotations.finish_rotated(y, slope, before.transforms, dtype)  # type: ignore[no-any-return]


def _rotated(x: Tensor, quantizer: Quantizer, draws: Draws, factor: Tensor | None) -> Operand | None:
    rotations = load_engine("cuda.cast.rotated")
    if not rotations.covers(x, quantizer):
        if draws.passes is None:
            return None
        x = x.contiguous()  # what counts on the device is covered then
    signs = drawn_key(draws.signs, x.device) if quantizer.has_random_signs else None
    made = rotations.cast_rotated(x, quantizer, _keys(x, quantizer, draws), signs, factor, draws.passes)
    return Operand(made.values, quantizer, tensor=made.scale, slope=made.mask)


def _scaled(
    x: Tensor, quantizer: Quantizer, draws: Draws, delayed: DelayedScale | FrozenScale | None, folded: bool
) -> Operand | None:
    rules = load_engine("cuda.cast.scaled")
    if not rules.covers(x, quantizer):
        return None
    if isinstance(delayed, LearningScale):
        delayed = delayed.direct()
        if delayed is None:
            return None
    assert quantizer.scaling is not None
    fold = folded and _folds(quantizer)
    made = rules.cast_scaled(x, quantizer, _keys(x, quantizer, draws), fold, delayed)
    scale, sizes = None if fold else made.scale, block_sizes(quantizer.scaling.block, x.shape)
    return Operand(made.values, quantizer, scale, made.tensor, sizes, made.mask)


def _folds(quantizer: Quantizer) -> bool:
    """Say whether values are to be folded, and the kernels fold them; remembered by identity, which costs no hash."""
    found = _folding.get(id(quantizer))
    if found is None or found[0] is not quantizer:
        if len(_folding) > 4096:
            _folding.clear()
        found = _folding[id(quantizer)] = (
            quantizer,
            folds(quantizer) and load_engine("cuda.cast.scaled").folds(quantizer),
        )
    return found[1]


def _keys(x: Tensor, quantizer: Quantizer, draws: Draws) -> tuple[Any, Any]:
    scales = quantizer.scaling is not None and quantizer.scaling.scale_rounding == "stochastic"
    return (
        drawn_key(draws.elements, x.device) if quantizer.rounding.mode == "stochastic" else None,
        drawn_key(draws.scales, x.device) if scales else None,
    )


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
