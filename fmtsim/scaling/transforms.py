# SPDX-License-Identifier: Apache-2.0
"""What happens to an operand before its scale is taken: rotations, clamps and sparsity of a matrix."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.signs import random_signs
from fmtsim.spec.transform import Clamp, Hadamard, Sparsity, Transform


def transformed(x: Tensor, transform: Transform, signs: Any) -> tuple[Tensor, Tensor | None]:
    """Return a matrix after a transform, and what was cut off it."""
    if isinstance(transform, Clamp):
        return _clamped(x.float(), transform)
    if isinstance(transform, Sparsity):
        return torch.where(_in_tiles(x) if transform.tiles else _in_rows(x), x, 0.0), None
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


def _in_rows(x: Tensor) -> Tensor:
    """Say which elements are the two largest of four neighbours in a row, the earlier of equal ones."""
    fours = x.abs().reshape(x.shape[0], -1, 4)
    places = fours.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, places, True).reshape(x.shape)


def _in_tiles(x: Tensor) -> Tensor:
    """Say which elements of tiles of 4 x 4 are kept, largest first, while their row and column have fewer than two."""
    rows, columns = x.shape[0] // 4, x.shape[1] // 4
    tiles = x.abs().reshape(rows, 4, columns, 4).transpose(1, 2).reshape(-1, 16)
    kept, each = torch.zeros_like(tiles, dtype=torch.bool), torch.arange(len(tiles), device=x.device)
    in_row, in_column = (torch.zeros(len(tiles), 4, dtype=torch.int64, device=x.device) for _ in range(2))
    for place in tiles.sort(dim=-1, descending=True, stable=True).indices.unbind(-1):
        row, column = place // 4, place % 4
        room = (in_row[each, row] < 2) & (in_column[each, column] < 2)
        kept[each, place] = room
        in_row[each, row] += room
        in_column[each, column] += room
    return kept.reshape(rows, columns, 4, 4).transpose(1, 2).reshape(x.shape)
