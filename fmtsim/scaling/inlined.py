# SPDX-License-Identifier: Apache-2.0
"""Operands as a few ordinary operations each, which a compiler fuses into the kernels around them.

Bits are those of every engine, whatever the compiler does with the operations:

- x is read by its bits. What computes it may be part of the same kernel, and would hand over float32 instead.
- Magnitudes and their largest are integers: equal in any order.
- A number is rounded by adding a power of two and subtracting it again.
- Between a product and a sum that follows lies an operation of integers, so that no compiler contracts the two.
- Quotients, of scales alone, are those of float64 rounded to float32 (``quotient`` of scales.py).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fmtsim.formats.block import FP32, BlockFormat, LogTileFormat, PackedFormat
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.scaling.blocks import block_sizes
from fmtsim.scaling.levels import two_levels
from fmtsim.scaling.scales import Scales, one_level
from fmtsim.spec.operand import Operand, folds
from fmtsim.spec.quantizer import Quantizer, StraightThrough

_SIGN, _MAGNITUDE, _INFINITY = -1 << 31, (1 << 31) - 1, 0xFF << 23  # of a float32
_LEAST_SCALE: Final = 1 << 22  # the bits of 2**-127
_NAN: Final = float("nan")
_CANONICAL_NAN: Final = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}
_PLACES: Final = 23
_USUAL: Final = Scaling()


def covers(t: Tensor, quantizer: Quantizer, dim: int) -> bool:
    """Return True if ``inlined`` quantises a matrix.

    It must be bfloat16 or float32, contiguous and of whole blocks, and the quantiser a cast to nearest even under
    scales of largest magnitudes.
    """
    scaling = _scaling_of(quantizer)
    if scaling is None or t.dtype not in (torch.bfloat16, torch.float32) or not t.is_contiguous() or not t.numel():
        return False
    rows, columns = _block_of(t, scaling, dim)
    return not (t.shape[0] % rows or t.shape[1] % columns)


def _block_of(t: Tensor, scaling: Scaling, dim: int) -> tuple[int, int]:
    """Return rows and columns of a block of the matrix as it lies."""
    outer, inner = block_sizes(scaling.block, t.shape if dim == -1 else t.shape[::-1])
    return (outer, inner) if dim == -1 else (inner, outer)


def inlined(t: Tensor, quantizer: Quantizer, dim: int) -> Operand:
    """Return what a GPU's kernels make of a matrix whose scales may be folded, in operations that a compiler may fuse.

    Args:
        t: [M, N]; what ``covers`` says.
        quantizer: What to do.
        dim: The inner axis, 0 or -1, which the operand has last.

    Returns:
        The operand in bfloat16, NaN with bits of the device's own.
    """
    scaling = _scaling_of(quantizer)
    assert scaling is not None
    rows, columns = _block_of(t, scaling, dim)
    fmt = quantizer.format
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    assert isinstance(element, FloatFormat)
    # 1. float32 by its bits, [outer blocks, rows, inner blocks, columns]
    bits = t.view(torch.int16).to(torch.int32) << 16 if t.dtype == torch.bfloat16 else t.view(torch.int32)
    bits = bits.reshape(t.shape[0] // rows, rows, t.shape[1] // columns, columns)
    # 2. statistic and scale
    magnitude = bits & _MAGNITUDE
    amax = torch.where(magnitude < _INFINITY, magnitude, 0).amax((1, 3), keepdim=True)
    scales = _scales(amax, scaling, element)
    # 3. elements, with their scale where it is folded into them; NaN stays, or makes its block NaN
    x = _on_grid((magnitude.view(torch.float32) * scales.factor).view(torch.int32), element)
    largest = magnitude if element.has_nan else magnitude.amax((1, 3), keepdim=True)
    x = x * scales.scale if folds(quantizer) else x
    x = torch.where(largest > _INFINITY, _NAN, (x.view(torch.int32) | (bits & _SIGN)).view(torch.float32))
    # 4. the operand, its inner axis last
    values = x.to(torch.bfloat16).reshape(t.shape)
    scale = None if folds(quantizer) else scales.scale.squeeze((1, 3))
    if dim == 0:
        values, scale = values.mT, None if scale is None else scale.mT
    return Operand(values, quantizer, scale, scales.tensor, block=(rows, columns) if dim == -1 else (columns, rows))


def inlined_product(y: Tensor, columns: Tensor | None, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``(y * columns^T) * rows`` in a dtype, each step rounded, whatever a compiler does; None is left out.

    Args:
        y: [M, N], float32.
        columns: [N, 1] or [1, 1], float32.
        rows: [M, 1] or [1, 1], float32.
        dtype: float32, or one of 16 bits.

    Every NaN is the canonical one.
    """
    for s in (None if columns is None else columns.mT, rows):
        y = y if s is None else y * s
    # A compiler leaves out a conversion whose result the same kernel goes on with, and contracts a product with a sum
    # that follows; but not where an integer operation lies between.
    integer, nan = _CANONICAL_NAN[dtype]
    is_nan = (y.view(torch.int32) & _MAGNITUDE) > _INFINITY
    return torch.where(is_nan, nan, y.to(dtype).view(integer)).view(dtype)


def _scales(bits: Tensor, scaling: Scaling, element: FloatFormat) -> Scales:
    """Return what elements are multiplied with, and the scales of their blocks, for amaxes by their bits."""
    rule, fmt = scaling.exponent_rule, scaling.scale
    if scaling.tensor is not None:
        return two_levels(
            bits.view(torch.float32), scaling, float(element.max), lambda s: _on_grid(s.view(torch.int32), fmt)
        )
    if rule is None:
        return one_level(bits.view(torch.float32), scaling, float(element.max), lambda s: s)
    # As exponent_scales of scales.py, in few steps: adding to the bits carries into the exponent where it is to grow.
    top = element.max_exponent
    if rule == "rceil":
        bits, top = (bits.view(torch.float32) * float(np.float32(1.0 / element.max))).view(torch.int32), 0
        bits = torch.where(bits > _LEAST_SCALE, bits, 0)
    carry = {"floor": 0, "even": 1 << _PLACES - 1 - element.mantissa_bits}.get(rule, (1 << _PLACES) - 1)
    code = ((bits + carry >> _PLACES) - top).clamp(0, 254)
    scale, inverse = ((e << _PLACES).clamp(min=_LEAST_SCALE).view(torch.float32) for e in (code, 254 - code))
    return Scales(scale, inverse)


def _on_grid(bits: Tensor, fmt: FloatFormat) -> Tensor:
    """Round magnitudes, float32 by their bits, to a format: nearest even, saturating; NaN becomes the largest value."""
    top, least = (int(np.float32(x).view(np.int32)) for x in (float(fmt.max), fmt.min_normal))
    bits = bits.clamp(max=top)
    # a power of two whose last place is the format's: adding and subtracting it rounds (the magic addition)
    step = (bits & _INFINITY).clamp(min=least) + (_PLACES - fmt.mantissa_bits << _PLACES)
    anchor = step.view(torch.float32)
    return (bits.view(torch.float32) + anchor) - anchor


@lru_cache(maxsize=256)
def _scaling_of(quantizer: Quantizer) -> Scaling | None:
    """Return the scale rule of a quantiser that is covered, None of others."""
    fmt, plain = quantizer.format, quantizer.rounding.mode == "nearest_even" and quantizer.then is None
    if (
        not plain
        or fmt is None
        or isinstance(fmt, LogTileFormat | PackedFormat)
        or quantizer.source in ("forward", "stored")
    ):
        return None
    if quantizer.transforms or quantizer.gradient != StraightThrough():
        return None
    blocks = isinstance(fmt, BlockFormat)
    element, scaling = (fmt.element, fmt.scaling) if isinstance(fmt, BlockFormat) else (fmt, quantizer.scaling)
    if scaling is None or not _is_usual(scaling) or (quantizer.overflow or fmt.default_overflow) != "saturate":
        return None
    if isinstance(fmt, BlockFormat) and not fmt.has_usual_scale:
        return None
    if not isinstance(element, FloatFormat) or not is_representable(element, torch.bfloat16):
        return None
    if not element.signed or not element.has_negative_zero or not _has_grid(element):
        return None
    if scaling.exponent_rule is not None and min(element.max_exponent, element.mantissa_bits) < 1:
        return None
    nan = element.has_nan or (blocks and element.nan_policy != "error" and folds(quantizer))
    return scaling if nan else None


def _is_usual(scaling: Scaling) -> bool:
    """Return True if the steps of a scale rule are those that ``_scales`` may leave to a compiler."""
    if scaling.tensor is not None:
        usual = replace(_USUAL, block=scaling.block, top=scaling.top, tensor=scaling.tensor, scale=scaling.scale)
        return scaling == usual and scaling.tensor == TensorScale(top=scaling.tensor.top) and _has_grid(scaling.scale)
    usual = replace(
        _USUAL, block=scaling.block, exponent_rule=scaling.exponent_rule, top=scaling.top, margin=scaling.margin,
        eps=scaling.eps, eps_rule=scaling.eps_rule, arithmetic=scaling.arithmetic, power_of_two=scaling.power_of_two,
        scale=FP32 if scaling.exponent_rule is None else scaling.scale,
    )  # fmt: skip
    rounds = scaling.arithmetic == "divide" or scaling.power_of_two == "log2" or scaling.eps_rule == "sum"
    return scaling == usual and not (rounds and scaling.exponent_rule is None)


def _has_grid(fmt: FloatFormat) -> bool:
    """Return True if ``_on_grid`` rounds to a format: it has subnormals, and float32 the anchors that it needs."""
    return fmt.has_zero and fmt.has_subnormals and fmt.max_exponent - fmt.mantissa_bits + _PLACES < 128
