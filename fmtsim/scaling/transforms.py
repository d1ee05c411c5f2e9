# SPDX-License-Identifier: Apache-2.0
"""What happens to an operand before its scale is taken: rotations and clamps of a matrix."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.quantize import quantize
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.signs import random_signs
from fmtsim.spec.transform import Clamp, Hadamard, Transform


def transformed(x: Tensor, transform: Transform, signs: Any) -> tuple[Tensor, Tensor | None]:
    """Return a matrix after a transform, and what was cut off it."""
    if isinstance(transform, Clamp):
        return _clamped(x.float(), transform)
    y = rotated(x, transform, signs)
    if transform.rounded is not None:
        y = quantize(y, transform.rounded, out_dtype=torch.float32)
    return y, None


def rotated(x: Tensor, transform: Hadamard, signs: Any, *, inverse: bool = False) -> Tensor:
    """Rotate a matrix along the axis that a transform names, or back; ``signs`` is the key of random ones."""
    dim = -1 if transform.axis == "inner" else 0
    size = transform.size or x.shape[dim]
    mask = random_signs(size, signs) if transform.signs == "random" else transform.signs
    return hadamard(x, size, mask, dim=dim, inverse=inverse)


def _clamped(x: Tensor, transform: Clamp) -> tuple[Tensor, Tensor | None]:
    """Clamp to quantiles, elements of the sorted magnitudes' places ``int((1 - level) n)`` and ``int(level n)``."""
    rows = x.reshape(1, -1) if transform.per == "tensor" else x
    n = rows.shape[1]
    places = [min(max(int(part * n), 0), n - 1) for part in (1 - transform.level, transform.level)]
    ordered = rows.sort(dim=1).values
    low, high = (ordered[:, place : place + 1] for place in places)
    y = rows.clamp(low, high).reshape(x.shape)
    return y, x - y if transform.compensate else None
