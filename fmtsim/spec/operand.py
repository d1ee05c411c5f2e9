# SPDX-License-Identifier: Apache-2.0
"""A quantised operand of a product: elements, and the scales that multiply them."""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.formats.block import FP32, Block, BlockFormat
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.float64 import float64

_BFLOAT16_BITS: Final = 8  # significant bits of bfloat16


class Keys(NamedTuple):
    """Random keys of an operand: of its elements, of its scales, and of the signs of its rotations.

    ``passes``, int64, 0-d, on a GPU, is what the offsets of all keys are larger by; only that GPU's kernels look at it.
    """

    elements: RandomKey | None = None
    scales: RandomKey | None = None
    signs: RandomKey | None = None
    passes: Tensor | None = None


class Operand(NamedTuple):
    """A quantised matrix ``[rows, inner]``: elements, and scales of its blocks.

    Attributes:
        elements: Values of the element format, in a dtype that holds them; without ``scale`` they may have the scales
            of blocks in them.
        quantizer: What made them.
        scale: float32 [row blocks, inner blocks], or None.
        tensor_scale: float32, 0-d: the scale of the whole matrix, or [rows, 1]: those of its rows; or None.
        block: Rows and columns of a block.
        slope: float32, or bool for 1 and 0: what the gradient of an element is multiplied with; or None.
        rest: float32: what ``Clamp(compensate=True)`` cut off, or None.
    """

    elements: Tensor
    quantizer: Quantizer
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    slope: Tensor | None = None
    rest: Tensor | None = None

    def transposed(self) -> "Operand":
        """Return the transposed matrix, with the same elements and scales."""
        scale, second = None if self.scale is None else self.scale.mT, self.tensor_scale
        second = second.mT if second is not None and self.has_row_level else second
        return Operand(self.elements.mT, self.quantizer, scale, second, self.block[::-1])

    def head(self, rows: int) -> "Operand":
        """Return the first rows, whole blocks of them: as many as asked for, or a block more."""
        if self.scale is None or self.scale.shape[0] == 1:
            return self._replace(elements=self.elements[:rows])
        blocks, second = -(-rows // self.block[0]), self.tensor_scale
        second = second[:rows] if second is not None and self.has_row_level else second  # blocks are of one row then
        elements = self.elements[: blocks * self.block[0]]
        return self._replace(elements=elements, scale=self.scale[:blocks], tensor_scale=second)

    @property
    def has_row_level(self) -> bool:
        """Whether each row has a scale of its own above those of its blocks (``nvfp4_row``)."""
        return self.tensor_scale is not None and self.tensor_scale.dim() > 0

    @property
    def scales_rows(self) -> bool:
        """Whether each row has one scale at most, so that sums along it may be scaled instead of elements."""
        return self.scale is None or (self.tensor_scale is None and self.scale.shape[1] == 1)

    def row_scales(self) -> Tensor | None:
        """Return the scale of every row, [rows, 1] or [1, 1], of an operand that ``scales_rows``."""
        rows = self.elements.shape[0]
        if self.scale is None:
            return None if self.tensor_scale is None else self.tensor_scale.reshape(1, 1)
        if self.scale.shape[0] in (1, rows):
            return self.scale
        return self.scale.repeat_interleave(self.block[0], 0)[:rows]

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return what the elements stand for, rounded once to float32 or float64."""
        x = self.elements.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if self.scale is None:
            return x if self.tensor_scale is None else x * self.tensor_scale
        s = spread(self.scale, self.block, x.shape)
        if self.tensor_scale is None:
            return x * s
        return (float64(x) * s * self.tensor_scale).to(x.dtype)  # element times scale is exact in float64


def spread(s: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Repeat the number of each block for all its elements."""
    if s.numel() == 1:
        return s.expand(shape)
    s = s if block[0] == 1 else s.repeat_interleave(block[0], 0)[: shape[0]]
    return s if block[1] == 1 else s.repeat_interleave(block[1], 1)[:, : shape[1]]


def multiplied(t: Tensor, factor: Tensor | None) -> Tensor:
    """Return a matrix times a factor, each product rounded to float32; None leaves it as it is.

    Args:
        t: float32, bfloat16 or float16.
        factor: float32: a number, 0-d, or a matrix with one for each of t's blocks, all of the same size.
    """
    if factor is None:
        return t
    if factor.dim():
        factor = spread(factor, (t.shape[0] // factor.shape[0], t.shape[1] // factor.shape[1]), t.shape)
    return t.float() * factor


def last_cast(quantizer: Quantizer) -> Quantizer:
    """Return the quantiser that makes the elements, of those that values go through one after the other."""
    while quantizer.then is not None:
        quantizer = quantizer.then
    return quantizer


def block_of(quantizer: Quantizer) -> Block:
    """Return the elements that share a scale, (1, 1) where there are none."""
    last = last_cast(quantizer)
    if last.scaling is not None:
        return last.scaling.block
    return last.format.block if isinstance(last.format, BlockFormat) else (1, 1)


def folds(quantizer: Quantizer) -> bool:
    """Return True if bfloat16 holds elements times their block scales, without a rule's ``multiplier``.

    Products below 2**-133 are rounded to bfloat16's grid.
    """
    last = last_cast(quantizer)
    fmt, scaling = last.format, last.scaling
    if isinstance(fmt, BlockFormat):
        fits = _bits(fmt.element) + fmt.scale.mantissa_bits + 1 <= _BFLOAT16_BITS
        return is_representable(fmt, torch.bfloat16) or fits
    if scaling is None or fmt is None or not is_representable(fmt, torch.bfloat16):
        return False
    # the significant bits of a scale beyond those of a power of two; infinite for any float32
    if scaling.scale != FP32:
        scale_bits: float = scaling.scale.mantissa_bits and scaling.scale.mantissa_bits + 1
    else:
        powers = scaling.power_of_two is not None and scaling.candidates == (1.0,)
        scale_bits = 0 if powers and all(math.frexp(s)[0] == 0.5 for s in scaling.allowed) else math.inf
    return _bits(fmt) + scale_bits <= _BFLOAT16_BITS


def _bits(element: Any) -> float:
    """Return the significant bits of a number of a format, infinite where none bounds them (codebooks, logarithms)."""
    if isinstance(element, FloatFormat):
        return element.mantissa_bits + 1
    return element.bits - element.signed if isinstance(element, IntFormat) else math.inf
