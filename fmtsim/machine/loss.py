# SPDX-License-Identifier: Apache-2.0
"""nll_loss and the gradient of an embedding, in the order of PyTorch 2.11's kernels."""

import math

import numpy as np
import torch
from numpy import float32

from fmtsim.machine.arrays import add_strided, chain, from_f32, to_f32, tree
from fmtsim.machine.unknown import UnknownOrder

MEAN, SUM = 1, 2  # torch's numbers of reductions


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
    losses[valid] = -to_f32(log_probabilities)[np.arange(rows)[valid], labels[valid]]
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
    share = g.float() / total_weight.float() if reduction == MEAN else g.float()
    dx[torch.arange(len(target))[valid], target[valid]] = -share.to(dx.dtype)
    return dx


def embedding_backward(g: torch.Tensor, indices: torch.Tensor, rows: int, padding_index: int) -> torch.Tensor:
    """Return the gradient of an embedding's table of so many rows, of up to 3,072 indices.

    Chunks of 32 indices: equal ones of a chunk are a float32 chain, rounded to g's type, then added to the table, which
    is rounded again.

    Raises:
        UnknownOrder: More indices: they are sorted first.
    """
    if indices.numel() > 3072:
        raise UnknownOrder(f"the gradient of an embedding for {indices.numel()} indices, more than 3,072")
    dtype, width = g.dtype, g.shape[-1]
    gradients, labels = to_f32(g).reshape(-1, width), indices.reshape(-1).numpy()
    table = np.zeros((rows, width), np.float32)
    rounded = lambda x: torch.from_numpy(x).to(dtype).float().numpy()  # noqa: E731
    for start in range(0, len(labels), 32):
        chunk = labels[start : start + 32]
        for label in dict.fromkeys(chunk.tolist()):
            if label != padding_index:
                total = chain(np.ascontiguousarray(gradients[start : start + 32][chunk == label].T))
                table[label] = rounded(table[label] + rounded(total))
    return from_f32(table, dtype)
