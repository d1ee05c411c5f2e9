# SPDX-License-Identifier: Apache-2.0
"""nll_loss, the gradient of an embedding, and index_put that accumulates, in the order of PyTorch 2.11's kernels."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy import float32

from fmtsim.machine.arrays import add_strided, chain, from_f32, to_f32, tree
from fmtsim.machine.unknown import Nondeterministic, UnknownOrder

MEAN, SUM = 1, 2  # torch's numbers of reductions
_FEW_INDICES = 3072  # of an embedding's gradient: more are sorted
_WARP = 32
MOST_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}  # whole numbers below are exact


def _check(log_probabilities: torch.Tensor, weight: torch.Tensor | None, reduction: int) -> None:
    if weight is not None or reduction not in (MEAN, SUM) or log_probabilities.ndim != 2:
        raise UnknownOrder("nll_loss with class weights, without reduction, or of one row")


def nll_loss(
    log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, total weight) of nll_loss_forward.

    Raises:
        UnknownOrder: Class weights, or no reduction.
    """
    _check(log_probabilities, weight, reduction)
    labels = target.numpy()
    valid = labels != ignore
    rows = len(labels)
    losses = np.zeros(rows, np.float32)
    picked = torch.from_numpy(np.arange(rows)[valid]), torch.from_numpy(labels[valid])
    losses[valid] = -to_f32(log_probabilities[picked])
    # thread t adds rows t, t + T, ...; the threads by halving
    threads = min(max(1 << round(math.log2(max(rows // 16, 1))), 32), 1024)
    total = tree(add_strided(losses, threads))
    count = float32(valid.sum())
    with np.errstate(invalid="ignore"):
        loss = total / count if reduction == MEAN else total
    dtype = log_probabilities.dtype
    return from_f32(np.asarray(loss, np.float32), dtype, ()), from_f32(np.asarray(count, np.float32), dtype, ())


def nll_loss_backward(
    g: torch.Tensor, log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None,
    reduction: int, ignore: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the logarithms: -g / total at each target, rounded once."""
    _check(log_probabilities, weight, reduction)
    dx = torch.zeros_like(log_probabilities)
    valid = target != ignore
    wide = torch.promote_types(g.dtype, torch.float32)
    share = g.to(wide) / total_weight.to(wide) if reduction == MEAN else g.to(wide)
    dx[torch.arange(len(target))[valid], target[valid]] = -share.to(dx.dtype)
    return dx


def rounding(dtype: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that rounds float32 values to a dtype."""
    return lambda x_f32: torch.from_numpy(x_f32).to(dtype).float().numpy()


def add_in_turn(
    total: np.ndarray, segments: np.ndarray, rows: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray] | None = None
) -> None:
    """Add rows to ``total[segments]`` in place, those of one segment in ascending order, each sum rounded."""
    # the n-th row of every segment is added in step n
    order = np.argsort(segments, kind="stable")
    starts = np.searchsorted(segments[order], segments[order])
    rank = np.arange(len(order)) - starts
    by_rank = order[np.argsort(rank, kind="stable")]
    for step in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1]) if len(order) else []:
        sums = total[segments[step]] + rows[step]
        total[segments[step]] = rounded(sums) if rounded else sums


def embedding_backward(
    g: torch.Tensor, indices: torch.Tensor, rows: int, padding_index: int, by_frequency: bool
) -> torch.Tensor:
    """Return the gradient of an embedding's table of so many rows.

    Raises:
        UnknownOrder: Gradients that are divided by their index's frequency.
        Nondeterministic: Many indices and few rows of the table. It holds a result that is possible.
    """
    if by_frequency:
        raise UnknownOrder("the gradient of an embedding, scaled by frequency")
    dtype, width = g.dtype, g.shape[-1]
    labels = indices.reshape(-1).numpy()
    counted = labels != padding_index
    places = np.arange(len(labels))[counted]
    gradients, labels = to_f32(g).reshape(-1, width)[counted], labels[counted]
    used = np.unique(labels)
    table = np.zeros((len(used), width), np.float32)  # rows of the gradient that are not zeros
    gradient, rounded = torch.zeros(rows, width, dtype=dtype), rounding(dtype)
    if len(counted) <= _FEW_INDICES:
        # 1. chunks of 32 indices: equal ones of a chunk are a float32 chain, rounded
        chunks, part = np.unique(places // 32 * rows + labels, return_inverse=True)
        sums = np.zeros((len(chunks), width), np.float32)
        add_in_turn(sums, part, gradients)
        # 2. added to the table, which is rounded again
        add_in_turn(table, np.searchsorted(used, chunks % rows), rounded(sums), rounded)
        gradient[torch.from_numpy(used)] = from_f32(table, dtype)
        return gradient
    # 1. sorted by index: chains of 10 rows
    order = np.argsort(labels, kind="stable")
    labels = labels[order]
    place = np.arange(len(labels)) - np.searchsorted(labels, labels)
    parts, part = np.unique(labels.astype(np.int64) * len(labels) + place // 10, return_inverse=True)
    sums = np.zeros((len(parts), width), np.float32)
    add_in_turn(sums, part, gradients[order])
    # 2. a chain of those sums, rounded once
    add_in_turn(table, np.searchsorted(used, parts // len(labels)), sums)
    gradient[torch.from_numpy(used)] = from_f32(table, dtype)
    # observed: 25.6 indices a row are a chain, 30.7 are not; in 16 bits few results differ from run to run
    if len(counted) > 25.6 * rows:
        raise Nondeterministic(
            f"the gradient of an embedding of {rows} rows by {len(counted)} indices: sums are added by atomics",
            gradient,
        )
    return gradient


def index_put(
    x: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Return x with values put, or added one after the other, at indices: equal indices are sorted, not by atomics."""
    if not accumulate or not x.is_floating_point():
        return torch.index_put(x, indices, values, accumulate)
    positions = torch.ops.aten.index(torch.arange(x.numel()).reshape(x.shape), indices)
    dims = [d for d, index in enumerate(indices) if index is not None]
    after = dims[-1] + sum(index.ndim - 1 for index in indices if index is not None and index.dtype == torch.bool)
    slice_size = math.prod(x.shape[after + 1 :]) if dims == list(range(dims[0], dims[-1] + 1)) else 0
    flat = positions.reshape(-1).numpy()
    rows = to_f32(values.expand(positions.shape)).reshape(-1)
    total = to_f32(x).reshape(-1).copy()
    rounded = rounding(x.dtype)
    if slice_size == 0:
        raise UnknownOrder("index_put that accumulates at indices of dimensions that are not adjacent")
    if slice_size > _WARP:
        # every addition is rounded to x's dtype
        add_in_turn(total, flat, rows, rounded)
        return from_f32(total, x.dtype, x.shape)
    # a float32 sum of the values, then one addition to x
    labels, part = np.unique(flat, return_inverse=True)
    sums = np.zeros(len(labels), np.float32)
    if slice_size > 1:
        add_in_turn(sums, part, rows)
    else:
        # lane l adds values l, l + 32 ... of whole turns; lanes by halving; then the rest
        order = np.argsort(part, kind="stable")
        for label, group in enumerate(np.split(rows[order], np.cumsum(np.bincount(part))[:-1])):
            whole = len(group) // _WARP * _WARP
            lanes = chain(group[:whole].reshape(-1, _WARP).T) if whole else np.zeros(_WARP, np.float32)
            sums[label] = chain(np.concatenate([tree(lanes)[None], group[whole:]]))
    total[labels] = rounded(total[labels] + sums)
    return from_f32(total, x.dtype, x.shape)
