# SPDX-License-Identifier: Apache-2.0
"""cumsum and cumprod in the order of PyTorch 2.11's scans (ScanUtils.cuh): every operation rounds to the dtype."""

import math

import torch

from fmtsim.machine.unknown import UnknownOrder

_EXACT_BELOW = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 11}


def scan(x: torch.Tensor, dim: int, dtype: torch.dtype | None, product: bool) -> torch.Tensor:
    """Return cumulative sums or products over a dimension.

    Raises:
        UnknownOrder: One dimension alone has more than one element, which CUB scans, unless sums are small integers;
            another dtype than x's or float32.
    """
    if not (dtype or x.dtype).is_floating_point:  # of what is converted first
        return torch.cumprod(x, dim, dtype=dtype) if product else torch.cumsum(x, dim, dtype=dtype)  # exact
    if x.dtype not in _EXACT_BELOW or dtype not in (None, x.dtype, torch.float32):
        raise UnknownOrder(f"a cumulative sum of {x.dtype} in {dtype}")
    x, dim = x.to(dtype or x.dtype), dim % max(x.ndim, 1)
    if x.ndim and x.numel() == x.shape[dim] > 1:
        if product or not bool((x == x.round()).all()) or float(x.double().abs().sum()) >= _EXACT_BELOW[x.dtype]:
            raise UnknownOrder("a cumulative sum in one dimension, of numbers that are no small integers")
        return torch.cumsum(x, dim)
    start = x.new_ones(()) if product else x.new_zeros(())
    combine = torch.mul if product else torch.add
    if x.ndim and dim < x.ndim - 1:
        # 1. one element after the other
        rows, total = [], start
        for row in x.unbind(dim):
            total = combine(total, row)
            rows.append(total)
        return torch.stack(rows, dim)
    # 2. threads that share a row, in the ratio of its width to the number of rows; 2 elements each at a time
    width = x.shape[-1] if x.ndim else 1
    count = x.numel() // width
    difference = (width - 1).bit_length() - (count - 1).bit_length()
    piece = 2 << (9 if difference < -9 else min(max((9 + difference) // 2, 4), 9))  # unsigned: below -9 it wraps
    buffer = start.repeat(count, math.ceil(width / piece) * piece)
    buffer[:, :width] = x.reshape(count, width)
    for first in range(0, width, piece):
        part = buffer[:, first : first + piece]
        part[:, 0] = combine(part[:, 0], buffer[:, first - 1] if first else start)
        # 3. Sklansky: the second half of every group of 2, 4, 8 ... gets the last element of the first half
        half = 1
        while half < piece:
            groups = part.unflatten(1, (-1, 2 * half))
            groups[..., half:] = combine(groups[..., half:], groups[..., half - 1 : half])
            half *= 2
    return buffer[:, :width].reshape(x.shape)
