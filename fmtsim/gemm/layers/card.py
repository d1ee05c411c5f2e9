"""Operands on a GPU: in bfloat16 where that holds them, by the engine's fused kernels where they cover a quantiser."""

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.bfloat16 import on_card, served
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.operand import Draws
from fmtsim.gemm.products.operator import drawn_key
from fmtsim.ops import load_engine
from fmtsim.scaling.history import DelayedScale, FrozenScale, LearningScale
from fmtsim.spec.operand import Keys, Operand, folds, last_cast, spread
from fmtsim.spec.quantizer import Quantizer

_GROUP: Final = 128  # elements of the longest rotation that kernels take


def counts(layer: LinearConfig, x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Say whether kernels quantise all that a layer rounds or turns at random, its keys counted on the device.

    Args:
        layer: Its definition.
        x: One of its tensors.
        sizes: Those that its products have.
    """
    random = [q for q in layer.operands.values() if q.is_stochastic or q.has_random_signs]
    if not random or not on_card(x) or x.dtype != torch.bfloat16 or any(size % _GROUP for size in sizes):
        return False
    return served(x) and all(map(load_engine("cuda").counts_keys, random))


def prepare_on_card(
    x: Tensor,
    quantizer: Quantizer,
    draws: Draws,
    delayed: DelayedScale | FrozenScale | None,
    folded: bool,
    factor: Tensor | None,
) -> Operand | None:
    """Quantise a matrix by a fused kernel, as ``settled`` leaves it; None where none covers that."""
    if not served(x):
        return None
    state: DelayedScale | FrozenScale | None = delayed
    if isinstance(delayed, LearningScale):
        state = delayed.direct()
        if state is None:
            return None
    keys = Keys(draws.elements, draws.scales, draws.signs, draws.passes)
    return load_engine("cuda").quantize_operand(x, quantizer, keys, state, folded=folded, factor=factor)  # type: ignore[no-any-return]


def settled(made: Operand, folded: bool) -> Operand:
    """Return an operand as every way of making it leaves it on a GPU.

    Elements are bfloat16 where that holds them; ``folded``, they have the scales of their blocks in them where it holds
    the products (``folds``), and a rule's multiplier is left to ``tensor_scale``.
    """
    quantizer = made.quantizer
    last = last_cast(quantizer)
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
        scale, made = scale / constant, made._replace(tensor_scale=constant)  # a power of two times it: exact
    elements = made.elements.float() * spread(scale, made.block, made.elements.shape)
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
    return load_engine("cuda").unrotate(y, before.transforms, slope, dtype)  # type: ignore[no-any-return]


def drawn(x: Tensor, quantizer: Quantizer, draws: Draws) -> Draws:
    """Return the keys of a quantiser as numbers."""
    scales = quantizer.scaling is not None and quantizer.scaling.scale_rounding == "stochastic"
    if quantizer.then is not None:
        return draws
    return Draws(
        drawn_key(draws.elements, x.device) if quantizer.rounding.mode == "stochastic" else None,
        drawn_key(draws.scales, x.device) if scales else None,
        drawn_key(draws.signs, x.device) if quantizer.has_random_signs else None,
        draws.passes,
    )


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
