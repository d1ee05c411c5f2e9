"""Operands of products that are rotated before they are cast: bfloat16 in, bfloat16 values out, in one or two passes.

The bits are those of ``fmtsim.gemm.operand.prepare``: the transform of fmtsim/scaling/hadamard.py in float32, rounded
to bfloat16 where the quantiser says so, then the cast. Values are elements times the scales of their blocks, which
bfloat16 holds exactly; a scale that all blocks share stays outside.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.ops import RandomKey
from fmtsim.scaling.quantizer import Quantizer
from fmtsim.scaling.transform import Hadamard

Keys = tuple[RandomKey | None, RandomKey | None]
Signs = RandomKey | int | None


class Rotated(NamedTuple):
    """A rotated and quantised matrix ``[rows, inner]``.

    Attributes:
        values: bfloat16, of the operand's shape and strides: element times block scale.
        scale: float32, 0-d: what all values are to be multiplied with, or None. That of the tensor of two-level formats;
            the constant ``multiplier`` of a ``Scaling``.
        mask: bool, like values: where a ``ClipMask`` lets the gradient through, or None.
    """

    values: Tensor
    scale: Tensor | None
    mask: Tensor | None


def covers(x: Tensor, quantizer: Quantizer) -> bool:
    """Say whether ``cast_rotated`` takes a matrix under a quantiser; the device is not looked at.

    It takes bfloat16 ``[rows, inner]``, contiguous or the transposed view of such a matrix, ``inner`` a multiple of 64,
    under one Hadamard transform of 16 or 32 elements along the inner axis.
    """
    raise NotImplementedError


def cast_rotated(x: Tensor, quantizer: Quantizer, keys: Keys = (None, None), signs: Signs = None) -> Rotated:
    """Rotate and quantise a matrix that ``covers`` takes.

    Args:
        x: bfloat16 ``[rows, inner]``, contiguous or a transposed view.
        quantizer: What to do.
        keys: Random words of elements and of scales; by an element's place in ``[rows, inner]``, whatever the strides.
        signs: The key of a rotation with ``signs="random"``, or its mask.
    """
    raise NotImplementedError


def covers_both(x: Tensor, first: Quantizer, second: Quantizer) -> bool:
    """Say whether ``cast_both`` takes a matrix under two quantisers; the device is not looked at."""
    raise NotImplementedError


def cast_both(
    x: Tensor,
    first: Quantizer,
    second: Quantizer,
    keys: tuple[Keys, Keys] = ((None, None), (None, None)),
    signs: Signs = None,
) -> tuple[Rotated, Rotated]:
    """Quantise a matrix along its rows and, from the same read, along its columns; either may be rotated.

    Args:
        x: bfloat16 ``[rows, inner]``, contiguous; both sizes multiples of 64.
        first: Of x; a rotation is not needed.
        second: Of ``x.mT``, with the format and the rounding of the first.
        keys: Those of the first and of the second.
        signs: The key of random signs, the same for both, or their mask.

    Returns:
        What ``cast_rotated`` returns for x under the first and for ``x.mT`` under the second.
    """
    raise NotImplementedError


def covers_finish(y: Tensor, transforms: tuple[Hadamard, ...]) -> bool:
    """Say whether ``finish_rotated`` takes a product; the device is not looked at."""
    raise NotImplementedError


def finish_rotated(
    y: Tensor,
    mask: Tensor | None,
    transforms: tuple[Hadamard, ...],
    dtype: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the gradient of a tensor from that of its rotated and rounded values.

    ``y`` is multiplied with ``RN32(a b)`` of the scales that are there, then with the mask as 1 and 0, rotated back
    along the last axis (transforms in reverse order) and rounded once to the dtype; steps are float32.

    Args:
        y: float32 ``[rows, columns]``, contiguous; columns a multiple of 64.
        mask: bool, like y; None is all true.
        transforms: Those of the forward pass, without random signs; 16 or 32 elements along the inner axis, at most one.
        dtype: float32, bfloat16 or float16.
        scales: float32 0-d, scales of the product's operands that were left outside.
    """
    raise NotImplementedError
