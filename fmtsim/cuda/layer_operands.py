# SPDX-License-Identifier: Apache-2.0
"""Operands of layers on a GPU: the fused kernel that quantises one, and the one that finishes a gradient.

Elements are bfloat16, for the GPU's 16-bit units. What no kernel here covers is None: torch operations over the casts
of any engine do it then (fmtsim/gemm/layers/quantize_operand.py).
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.cuda.cast import block_casts, casts, rotated, scaled_operands, warp_hadamard
from fmtsim.cuda.cast.warp_hadamard import Scales
from fmtsim.formats.block import BlockFormat, LogTileFormat, PackedFormat
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.operand import Keys, Operand, folds
from fmtsim.spec.quantizer import Quantizer, Transform

_MOST: Final = 4096  # quantisers that are remembered


class _Facts(NamedTuple):
    """Facts about a quantiser that kernels need; a reference to it keeps its identity from other objects.

    Attributes:
        across, down: The cast along the last and the last but one dimension, where a plain cast is all there is to it
            and bfloat16 holds what it makes.
        two_level: That cast leaves the scale of the tensor outside.
        folds: Kernels multiply the scales of a rule's blocks into the elements.
    """

    quantizer: Quantizer
    across: CastSpec | None
    down: CastSpec | None
    two_level: bool
    folds: bool


_known: dict[int, _Facts] = {}


def quantize_operand(
    t: Tensor,
    quantizer: Quantizer,
    keys: Keys,
    state: Any = None,
    dim: int = -1,
    folded: bool = False,
    factor: Tensor | None = None,
    narrow: bool = False,
) -> Operand | None:
    """Quantise a matrix by a fused kernel, None where none covers that; nothing waits for the device.

    Args:
        t: A matrix whose products sum over ``dim``, which the operand has last.
        quantizer: What to do.
        keys: Random words, by places in t where a cast is all there is to it, else in the operand.
        state: DelayedScale or FrozenScale of a scale with a history.
        dim: The inner axis, 0 or -1.
        folded: Multiply the scales of blocks into the elements where bfloat16 holds the products.
        factor: What t, bfloat16, is multiplied with first (``fmtsim.spec.operand.multiplied``).
        narrow: t is float32, and rounded to bfloat16 as it is read; without a factor and random words.
    """
    if quantizer.then is not None or (narrow and not narrows(t, quantizer, dim, folded)):
        return None
    x, has_blocks = t if dim == -1 else t.mT, isinstance(quantizer.format, BlockFormat)
    if quantizer.is_cast and keys.elements is not None and keys.passes is None and dim == 0:
        return _cast(t, quantizer, keys.elements, dim) if folded else None  # the other kernels draw by places of x
    if factor is not None and factor.dim():
        return None if quantizer.transforms or dim == -1 else _scaled(x, quantizer, keys, state, folded, factor)
    if quantizer.transforms or (has_blocks and folded):
        operand = _rotated(x, quantizer, keys, factor, narrow) if folded else None
        if operand is not None or quantizer.transforms:
            return operand
    if factor is not None:
        return None
    if quantizer.scaling is not None:
        operand = _scaled(x, quantizer, keys, state, folded, None, narrow)
        return _rotated(x, quantizer, keys, None, narrow) if operand is None and folded else operand
    return _cast(t, quantizer, keys.elements, dim) if folded else None


def narrows(t: Tensor, quantizer: Quantizer, dim: int, folded: bool) -> bool:
    """Return True if ``quantize_operand`` takes a float32 matrix as what it becomes in bfloat16; looks at no data."""
    x = t if dim == -1 else t.mT
    if quantizer.then is not None or quantizer.source == "stored" or quantizer.is_stochastic:
        return False
    if quantizer.scaling is not None and not quantizer.transforms and scaled_operands.covers(x, quantizer, narrow=True):
        return True
    return folded and rotated.covers(x, quantizer, narrow=True)


def quantize_both(
    x: Tensor, quantizer: Quantizer, keys: tuple[RandomKey | None, RandomKey | None]
) -> tuple[Operand, Operand] | None:
    """Quantise a matrix along its rows and, from the same read, along its columns; None where that has no kernel.

    The second operand is the transposed matrix. ``keys`` are those of the elements of the two.
    """
    facts = _facts(quantizer)
    if quantizer.scaling is not None:
        return scaled_operands.cast_both(x, quantizer, facts.folds) if has_both(x, quantizer) else None
    if facts.down is None or not isinstance(quantizer.format, BlockFormat):
        return None
    both = block_casts.quantize_both_dims(x, facts.down, keys, without_tensor_scale=facts.two_level)
    if both is None:
        return None
    rows, columns, scale = both
    return Operand(rows, quantizer, tensor_scale=scale), Operand(columns.mT, quantizer, tensor_scale=scale)


def has_both(x: Tensor, quantizer: Quantizer) -> bool:
    """Return True if ``quantize_both`` takes a matrix under a quantiser with a scale rule; looks at no data."""
    plain = not quantizer.transforms and quantizer.then is None and quantizer.source == "original"
    return plain and scaled_operands.covers_both(x, quantizer)


def counts_keys(quantizer: Quantizer) -> bool:
    """Return True if kernels add a counter on the device to the keys of a quantiser (``Keys.passes``).

    They do for bfloat16 matrices whose sizes are multiples of 128.
    """
    return rotated.counts_keys(quantizer)


def unrotate(
    y: Tensor, transforms: tuple[Transform, ...], slope: Tensor | None, dtype: torch.dtype, scales: Scales
) -> Tensor | None:
    """Return ``y``, times scales and a mask where there are any, rotated back along its last axis.

    None where no kernel does it.
    """
    masks = slope is None or slope.dtype == torch.bool
    if (
        not masks
        or not warp_hadamard.covers_finish(y, transforms)
        or any(s is not None and s.numel() > 1 for s in scales)
    ):
        return None
    return warp_hadamard.finish_rotated(y, slope, transforms, dtype, scales)


def _rotated(
    x: Tensor, quantizer: Quantizer, keys: Keys, factor: Tensor | None, narrow: bool = False
) -> Operand | None:
    operand = rotated.cast_rotated(x, quantizer, keys[:2], keys.signs, factor, keys.passes, narrow)
    if operand is None and keys.passes is not None:  # what counts on the device is covered then
        operand = rotated.cast_rotated(x.contiguous(), quantizer, keys[:2], keys.signs, factor, keys.passes)
    return operand


def _scaled(
    x: Tensor, quantizer: Quantizer, keys: Keys, state: Any, folded: bool, factor: Tensor | None = None,
    narrow: bool = False,
) -> Operand | None:  # fmt: skip
    return scaled_operands.cast_scaled(
        x, quantizer, keys[:2], folded and _facts(quantizer).folds, state, factor, narrow
    )


def _cast(t: Tensor, quantizer: Quantizer, key: RandomKey | None, dim: int) -> Operand | None:
    """Quantise by a plain cast, the scale of a tensor left outside."""
    facts = _facts(quantizer)
    spec = facts.across if dim == -1 else facts.down
    if spec is None:
        return None
    scale = None
    if facts.two_level:
        values, scale = block_casts.quantize_without_tensor_scale(t, spec, key)
    else:
        values = torch.empty_like(t, dtype=torch.bfloat16)
        casts.quantize(t, spec, key, values)
    return Operand(values if dim == -1 else values.mT, quantizer, tensor_scale=scale)


def _facts(quantizer: Quantizer) -> _Facts:
    """Return the facts about a quantiser, looked up by identity, which costs no hash."""
    facts = _known.get(id(quantizer))
    if facts is None:
        if len(_known) >= _MOST:
            _known.clear()
        across, two_level = _plain_cast(quantizer)
        down = None if across is None else replace(across, dim=-2)
        scales = quantizer.scaling is not None and folds(quantizer) and scaled_operands.folds(quantizer)
        facts = _known[id(quantizer)] = _Facts(quantizer, across, down, two_level, scales)
    return facts


def _plain_cast(quantizer: Quantizer) -> tuple[CastSpec | None, bool]:
    """Return the cast along the last dimension whose results bfloat16 holds, and whether it has two levels."""
    fmt = quantizer.format
    if fmt is None or quantizer.scaling is not None or isinstance(fmt, LogTileFormat | PackedFormat):
        return None, False
    overflow = quantizer.overflow or fmt.default_overflow
    spec = CastSpec(format=fmt, rounding=quantizer.rounding, overflow=overflow, dim=-1)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if not element.has_nan and element.nan_policy == "error":
        return None, False  # NaN raises an error: numbers have to be read
    if isinstance(fmt, BlockFormat) and not block_casts.covers_blocks(spec):
        return None, False
    two_level = isinstance(fmt, BlockFormat) and fmt.tensor_scale
    holds = block_casts.holds_without_tensor_scale(spec) if two_level else is_representable(fmt, torch.bfloat16)
    return (spec, two_level) if holds else (None, False)
