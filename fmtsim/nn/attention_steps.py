# SPDX-License-Identifier: Apache-2.0
"""What attention does around its products: means that are removed, rows that threads share, 2^x by a polynomial."""

from typing import Final

import torch
from torch import Tensor

from fmtsim.recipes.attention import AttentionConfig, Exp2, Tile

_CUBIC: Final = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)


def without_means(
    config: AttentionConfig, q: Tensor, k: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return q and k without the means that a config removes, q's means by row, and their products with k.

    q is float32 ``[heads, L, d]``, k ``[heads, S, d]``; all of this is computed in ``dtype`` where it has 16 bits.
    """
    q, k = (x.to(dtype) if dtype.itemsize == 2 else x for x in (q, k))
    k = k - k.mean(-2, keepdim=True) if config.smooth_k else k
    if config.smooth_q is None:
        return q.float(), k.float(), None, None
    rows, size = q.shape[1], config.smooth_q
    groups = torch.nn.functional.pad(q, (0, 0, 0, -rows % size)).unflatten(1, (-1, size))  # a last group has zeros
    mean = groups.mean(2, keepdim=True)
    means, delta = (x.float().repeat_interleave(size, 1)[:, :rows] for x in (mean[:, :, 0], mean[:, :, 0] @ k.mT))
    return (groups - mean).flatten(1, 2)[:, :rows].float(), k.float(), means, delta


def to_tiles(x: Tensor, tile: Tile) -> Tensor:
    """Return rows ``[heads, L, d]``, padded by zeros to whole tiles, those of one scale next to each other."""
    rows, stride, run = tile
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % rows))
    return x.unflatten(1, (-1, rows // stride, stride // run, run)).transpose(2, 3).flatten(1, 4)


def from_tiles(x: Tensor, tile: Tile, rows: int) -> Tensor:
    """Return what ``to_tiles`` took, in its own order, as so many rows."""
    size, stride, run = tile
    return x.unflatten(1, (-1, stride // run, size // stride, run)).transpose(2, 3).flatten(1, 4)[:, :rows]


def exp2(x: Tensor, config: Exp2 | None, columns: int) -> Tensor:
    """Return 2^x of a block of keys, float32: torch's, and FlashAttention-4's polynomial where a config has it."""
    y = torch.exp2(x)
    if config is None:
        return y
    (frequency, count, start), column = config, torch.arange(x.shape[-1], device=x.device)
    fragment, place = column // 32, column % 32 // 2 * 2  # pairs of neighbours go together
    chosen = (place % frequency >= frequency - count) & (fragment >= start)
    # 2^x for x up to 127 as a polynomial, by Cody and Waite's split and a cubic; NaN stays NaN
    # 1. x = n + f
    clamped = x.clamp(min=-127.0)
    whole = clamped.floor()
    fraction, r = clamped - whole, torch.full_like(x, _CUBIC[3])
    # 2. a polynomial of f, by fused multiply-adds
    for c in _CUBIC[2::-1]:
        r = _fma(r, fraction, c)
    # 3. n is added to the exponent field, also where results are subnormal
    bits = r.view(torch.int32) + (whole.nan_to_num().to(torch.int32) << 23)
    polynomial = torch.where(x.isnan(), x, bits.view(torch.float32))
    return torch.where(chosen & (fragment < columns // 32 - 1), polynomial, y)


def _fma(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Return ``RN32(a b + c)``: float64 rounded to odd, which a second rounding does not see."""
    product = a.double() * b.double()  # exact
    total = product + c
    rest = (product - (total - (total - product))) + (c - (total - product))  # what the sum lost, exactly
    bits = total.view(torch.int64)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    return torch.where((rest != 0) & (bits % 2 == 0), bits + away, bits).view(torch.float64).float()
