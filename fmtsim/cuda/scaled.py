"""Operands under a scale rule (``fmtsim.scaling.scale.Scaling``) in one or two launches: scales, elements, masks.

The bits are those of ``fmtsim.scaling.cast.cast``: the same float32 operations in the same order, the same random
words. What depends on quantiser, dtype, shape and layout alone is worked out once and kept.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from fmtsim.ops import RandomKey
from fmtsim.scaling.quantizer import Quantizer
from fmtsim.scaling.scale import Scaling

Keys = tuple[RandomKey | None, RandomKey | None]


class Made(NamedTuple):
    """A quantised matrix ``[rows, inner]``.

    Attributes:
        values: bfloat16, with the strides of x: elements; with ``fold`` element times block scale, rounded to nearest
            even where it needs bits below 2**-133, else exact. A scale that has a multiplier leaves it to ``tensor``.
        scale: float32 [row blocks, inner blocks]: what an element is multiplied with, all of it, also with ``fold``.
        tensor: float32, 0-d: what folded values are still multiplied with, or None for one.
        mask: bool, with the shape and strides of x: where the gradient passes (ClipMask, TrustMask), or None.
    """

    values: Tensor
    scale: Tensor
    tensor: Tensor | None
    mask: Tensor | None


class Memory(Protocol):
    """What delayed scaling remembers (``fmtsim.scaling.history.DelayedScale``); its buffers are updated in place."""

    amaxes: Tensor
    factor: Tensor
    calls: Tensor
    scaling: Scaling
    top: float


def covers(x: Tensor, quantizer: Quantizer) -> bool:
    """Say whether ``cast_scaled`` takes a matrix under a quantiser; looks at no data.

    x is on a CUDA device with 16-byte addresses, contiguous or the transpose of a contiguous matrix, whose rows in
    memory have a multiple of eight elements. Transforms and ``then`` of the quantiser are not looked at.
    """
    return False


def folds(quantizer: Quantizer) -> bool:
    """Say whether bfloat16 holds element times block scale (without the rule's multiplier), so that ``fold`` may be."""
    return False


def cast_scaled(
    x: Tensor, quantizer: Quantizer, keys: Keys = (None, None), fold: bool = False, delayed: Memory | None = None
) -> Made:
    """Quantise a matrix that ``covers``, blocks along its last axis.

    Args:
        x: [rows, inner]; float32, bfloat16 or float16.
        quantizer: Its format, rounding, overflow, scaling and gradient count.
        keys: Random words of elements and of scales; those of scales are never drawn here.
        fold: Return element times block scale; ``folds(quantizer)`` has to be true.
        delayed: DelayedScale or FrozenScale of a scaling with a history: gives the scale of the call, and a
            DelayedScale records the largest magnitude of x.

    Returns:
        Values, scales and masks; nothing waits for the device, and results do not depend on the run.
    """
    raise NotImplementedError
