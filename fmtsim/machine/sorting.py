# SPDX-License-Identifier: Apache-2.0
"""sort and topk as PyTorch 2.11 makes them on a GPU: which of equal elements comes first."""

from typing import Any

import numpy as np
import torch

_BITONIC, _MERGED = 32, 128  # elements of a row, at most: beyond, a radix sort


def _ordered(x: torch.Tensor) -> np.ndarray:
    """Return integers in the order of a tensor's elements by their bits: -0 is below 0, NaN above Inf."""
    if not x.is_floating_point():
        return x.numpy().astype(np.int64)
    codes = torch.where(x.isnan(), torch.nan, x.double()).numpy().view(np.int64)
    return np.where(codes < 0, np.int64(-(2**63)) - codes - 1, codes)  # type: ignore[no-any-return]


def _ranked(x: torch.Tensor) -> np.ndarray:
    """Return integers in the order of a tensor's elements by value: -0 equals 0."""
    return _ordered(x + 0 if x.is_floating_point() else x)


def _bitonic(keys: np.ndarray, indices: np.ndarray, descending: bool) -> np.ndarray:
    """Return a row's indices, at most 32, as a bitonic network leaves them: it swaps some equal elements."""
    rows, count = keys.shape
    k, v, valid = np.zeros((rows, _BITONIC), np.int64), np.zeros((rows, _BITONIC), np.int64), np.zeros(_BITONIC, bool)
    k[:, :count], v[:, :count] = keys, indices
    valid = np.broadcast_to(np.arange(_BITONIC) < count, k.shape).copy()
    thread = np.arange(_BITONIC // 2)
    for size in (2, 4, 8, 16, 32):
        # the last turn sorts all elements in one direction
        direction = (thread & (size // 2)) != 0 if size < _BITONIC else np.zeros_like(thread, bool)
        stride = size // 2
        while stride > 0:
            a = 2 * thread - (thread & (stride - 1))
            b = a + stride
            later = k[:, a] > k[:, b] if descending else k[:, a] < k[:, b]
            swaps = ((later & valid[:, a]) | ~valid[:, b]) == direction
            for array in (k, v, valid):
                array[:, a], array[:, b] = (
                    np.where(swaps, array[:, b], array[:, a]), np.where(swaps, array[:, a], array[:, b])
                )  # fmt: skip
            stride //= 2
    return v[:, :count]


def _taken(x: torch.Tensor, indices: np.ndarray, shape: torch.Size, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements by their indices along a dimension, and the indices."""
    rows = torch.from_numpy(np.ascontiguousarray(indices))
    places = rows.reshape(*shape[:dim], *shape[dim + 1 :], -1).movedim(-1, dim).contiguous()
    return x.gather(dim, places), places


def sort(x: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """Return torch.sort: rows of up to 32 by a bitonic network, of 128 by merging, longer ones by their bits."""
    if not x.ndim:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    dim %= x.ndim
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    if stable or x.shape[dim] > _BITONIC:
        keys = _ordered(rows) if x.shape[dim] > _MERGED else _ranked(rows)
        indices = np.argsort(~keys if descending else keys, axis=-1, kind="stable")
    else:
        places = np.broadcast_to(np.arange(x.shape[dim]), rows.shape)
        indices = _bitonic(_ranked(rows), places, descending)
    return _taken(x, indices, x.shape, dim)


def topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return torch.topk: those beyond the k-th element in their order, then its equals; at last they are sorted."""
    if not x.ndim:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    dim %= x.ndim
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    keys = _ordered(rows)
    keys = keys if largest else ~keys
    # 1. the k-th element by bits; 2. those above it, and as many equal ones as are missing
    at = max(keys.shape[-1] - k, 0)
    kth = np.partition(keys, min(at, keys.shape[-1] - 1), axis=-1)[:, at : at + 1]
    above, equal = keys > kth, keys == kth
    missing = k - above.sum(-1, keepdims=True)
    order = np.where(above, 0, np.where(equal & (np.cumsum(equal, -1) <= missing), 1, 2))
    indices = np.argsort(order.astype(np.int8), axis=-1, kind="stable")[:, :k]
    # 3. in order: at most 32 by a network
    if sorted and k > 1:
        chosen = np.take_along_axis(_ranked(rows), indices, -1)
        if k <= _BITONIC:
            indices = _bitonic(chosen, indices, largest)
        else:
            places = np.argsort(~chosen if largest else chosen, axis=-1, kind="stable")
            indices = np.take_along_axis(indices, places, -1)
    return _taken(x, indices, x.shape, dim)
