# SPDX-License-Identifier: Apache-2.0
"""nll_loss, the gradient of an embedding, and index_put that accumulates, in the order of PyTorch 2.11's kernels."""

import math
from collections.abc import Callable

import numpy as np
import torch

from fmtsim.machine.arrays import chain, check_shapes, fma, from_f32, to_f32, tree
from fmtsim.machine.unknown import BySource, Nondeterministic, UnknownOrder

_FEW_INDICES = 3072  # of an embedding's gradient: more are sorted
_WARP = 32
MOST_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}  # whole numbers below are exact


NONE, MEAN, SUM = range(3)  # torch's numbers of reductions


def _picked(
    log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Return each target's logarithm and weight, zeros where it is ignored, and where it is not."""
    *images, classes = log_probabilities.movedim(min(log_probabilities.ndim - 1, 1), -1).shape
    check_shapes("nll_loss", target=(target if images else target.reshape(-1)[0], images), weight=(weight, [classes]))
    valid = target != ignore
    places = target.masked_fill(~valid, 0)
    # classes are the second dimension; of a vector the first
    chosen = log_probabilities.gather(min(target.ndim, 1), places.unsqueeze(min(target.ndim, 1))).reshape(target.shape)
    weights = torch.ones_like(chosen) if weight is None else weight[places]
    return to_f32(chosen.masked_fill(~valid, 0)), to_f32(weights.masked_fill(~valid, 0)), valid


def _minus(products: tuple[np.ndarray, np.ndarray], threads: int, dtype: torch.dtype) -> np.ndarray:
    """Return minus the sums of products along the last axis by thread: a chain each, fused in float32."""
    steps = [np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % threads)]) for x in products]
    a, b = (x.reshape(*x.shape[:-1], -1, threads) for x in steps)
    total = np.zeros((*a.shape[:-2], threads), np.float32)
    for i in range(a.shape[-2]):
        x, y = a[..., i, :], b[..., i, :]
        total = fma(-x, y, total) if dtype == torch.float32 else total - rounding(dtype)(x * y)
    return total


def nll_loss(
    log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, total weight) of nll_loss_forward, and of nll_loss2d_forward.

    Raises:
        UnknownOrder: Class weights of one row.
        Nondeterministic: More than two images, or blocks of 131,072 pixels or more, whose sums are added by atomics.
            It holds a result that is possible.
        BySource: Images of more than 1,024 pixels, or class weights of images, none of which was recorded.
    """
    if log_probabilities.ndim == 1 and weight is not None:
        raise UnknownOrder("nll_loss with class weights of one row")
    dtype = log_probabilities.dtype
    values, weights, valid = _picked(log_probabilities, target, weight, ignore)
    if reduction == NONE and log_probabilities.ndim > 1:
        return from_f32(np.where(valid, -(values * weights), np.float32(0.0)), dtype), torch.zeros((), dtype=dtype)
    values, weights = (x.reshape(len(x) if log_probabilities.ndim == 4 else 1, -1) for x in (values, weights))  # noqa: PLR2004
    rows = values.shape[-1]
    # thread t adds rows t, t + T, ...
    threads = min(max(1 << round(math.log2(max(rows // 16, 1))), 32), 1024)
    if log_probabilities.ndim == 4:  # noqa: PLR2004
        threads = 1024 * max(-(-rows // 1024) // 128, 1)
    totals = _minus((values, weights), threads, dtype)
    counts = np.float32(0.0) - _minus((weights, np.ones_like(weights)), threads, dtype)
    if log_probabilities.ndim == 4:  # noqa: PLR2004
        # blocks of 32 warps, each warp by halving, then the warps' sums; sums of blocks in the results' dtype
        totals, counts = (tree(tree(x.reshape(-1, 32, 32))) for x in (totals, counts))
        blocks = len(totals)
        total, count = (rounding(dtype)(chain(rounding(dtype)(x))[None])[0] for x in (totals, counts))
    else:
        (total,), (count,), blocks = tree(totals), tree(counts), 1
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = total / count if reduction == MEAN else total
    result = from_f32(np.asarray(loss, np.float32), dtype, ()), from_f32(np.asarray(count, np.float32), dtype, ())
    if blocks > 2:  # noqa: PLR2004
        raise Nondeterministic("nll_loss2d of more than two images or blocks, whose sums are added by atomics", result)
    if log_probabilities.ndim == 4 and (rows > 1024 or weight is not None):  # noqa: PLR2004
        raise BySource("nll_loss2d of more than 1,024 pixels, or with class weights", result)
    return result


def nll_loss_backward(
    g: torch.Tensor, log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None,
    reduction: int, ignore: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the logarithms: -g / total at each target, times its weight, each step rounded."""
    each = reduction == NONE and log_probabilities.ndim > 1
    check_shapes("the gradient of nll_loss", g=(g, target.shape) if each else (g.reshape(-1), [1]))
    dx = torch.zeros_like(log_probabilities, memory_format=torch.contiguous_format)
    _, weights, valid = _picked(log_probabilities, target, weight, ignore)
    wide = torch.promote_types(g.dtype, torch.float32)
    share = g.to(wide) / total_weight.to(wide) if reduction == MEAN else g.to(wide)
    rows = torch.from_numpy(weights).to(wide) * share.to(dx.dtype).to(wide)
    dim = min(target.ndim, 1)
    places = target.masked_fill(~valid, 0).unsqueeze(dim)
    return dx.scatter_(dim, places, torch.where(valid, -rows, 0.0).to(dx.dtype).unsqueeze(dim))


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
    check_shapes("the gradient of an embedding", g=(g, [*indices.shape, width]))
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
