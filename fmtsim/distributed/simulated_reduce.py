# SPDX-License-Identifier: Apache-2.0
"""Reductions over any number of ranks in one process: the definition of the bits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_together
from fmtsim.distributed.arithmetic import (
    Batch,
    Counts,
    Hop,
    batch_of,
    canonical,
    chunked,
    each,
    factors_of,
    listed,
    own_counts,
    require_mu,
    require_ranks,
    result_counts,
    scaled,
)
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.support.errors import ArgumentError


class Simulated(NamedTuple):
    """Hold the result of a simulated reduction.

    Attributes:
        values: The reduced tensors, of the shapes and dtype of one rank's; every rank gets these.
        counts: One record for each rank.
    """

    values: list[Tensor]
    counts: tuple[Counts, ...]


def simulate(
    ranks: Sequence[Tensor | Sequence[Tensor]],
    reduction: str | Reduction,
    *,
    mu: float | Tensor | None = None,
    call: int = 0,
) -> Simulated:
    """Reduce one tensor, or list of tensors, of each rank as ``all_reduce`` does on processes, bit for bit.

    Args:
        ranks: For each rank its tensor, or its list of tensors that are reduced together; shapes and dtypes agree.
        reduction: A name of ``REDUCTIONS`` or a record.
        mu: The automatic factor in force; None is the controller's first.
        call: Number of the reduction, for stochastic rounding.

    NaN and Inf: as ``Reduction.nonfinite`` says. -0 stays where the format has it. Deterministic. docs/distributed.md
    defines every bit.

    Raises:
        ArgumentError: No ranks, ranks that disagree, mu without its factor, or NaN and Inf under ``"raise"``.
        DtypeError: A tensor is not a floating-point one.

    >>> simulate([torch.tensor([1.0]), torch.tensor([3.0])], "fp8lm_pre").values
    [tensor([2.])]
    """
    chosen = get_reduction(reduction)
    rank_tensors: Any = ranks
    if not isinstance(rank_tensors, Tensor | Sequence) or (isinstance(rank_tensors, Tensor) and not rank_tensors.dim()):
        kind = "a tensor without dimensions" if isinstance(rank_tensors, Tensor) else type(rank_tensors).__name__
        raise ArgumentError(f"ranks is {kind}; pass a list with the tensor, or tensors, of each rank")
    lists = [listed(one) for one in ranks]
    require_ranks(len(lists))
    batches = [batch_of(one) for one in lists]
    first = [(tuple(x.shape), x.dtype, str(x.device)) for x in lists[0]]
    for rank, one in enumerate(lists):
        other = [(tuple(x.shape), x.dtype, str(x.device)) for x in one]
        if other != first:
            raise ArgumentError(
                f"ranks disagree: rank 0 reduces {first}, rank {rank} {other}; pass equal shapes, dtypes and devices"
            )
    check_together(**{f"rank {rank}": batch.x for rank, batch in enumerate(batches)})
    values, counts = simulate_batches(batches, chosen, require_mu(chosen, mu, batches[0].x.device), call)
    return Simulated(split(values, batches[0], lists[0]), counts)


def simulate_batches(
    batches: Sequence[Batch], reduction: Reduction, mu: Tensor | None, call: int = 0
) -> tuple[Tensor, tuple[Counts, ...]]:
    """Return the reduced matrix, float32 [rows, columns], and each rank's counts."""
    batches = [batch.float() for batch in batches]
    if reduction.nonfinite == "raise":
        require_finite([int((~batch.x.isfinite()).sum()) for batch in batches])
    hop = Hop(reduction, call)
    amaxes = torch.stack([batch.amaxes() for batch in batches]).amax(0)
    factors = factors_of(amaxes, reduction, len(batches), mu)
    flat, sizes = [], []
    for rank, batch in enumerate(batches):
        y = scaled(batch, factors.encode, reduction).reshape(-1)
        q = hop.round(y, hop.key(rank, 0))
        sizes.append(own_counts(batch.x.reshape(-1), y, q, hop.top))
        flat.append(q)
    sums = reduced(torch.stack(flat), hop)
    totals = result_counts(sums, hop.top)
    values = each(torch.mul, sums.reshape(batches[0].x.shape), batches[0].sizes, factors.decode)
    return values, tuple(Counts(*totals, *counts) for counts in sizes)


def reduced(q: Tensor, hop: Hop) -> Tensor:
    """Return the sums [n] of the casts [ranks, n] of all ranks, rounded at every hop."""
    if len(q) == 1:
        return q[0]
    if hop.reduction.algorithm == "tree":
        return tree(q, hop)
    chunks = torch.stack([chunked(row, len(q)) for row in q])
    return ring(chunks, torch.arange(len(q), device=q.device), hop).reshape(-1)[: q.shape[1]]


def split(values: Tensor, batch: Batch, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a row of values as tensors of the shapes and dtype of others, rounded to it once."""
    parts = values.reshape(-1).split(batch.sizes)
    return [canonical(part.reshape(x.shape).to(x.dtype)) for part, x in zip(parts, like, strict=True)]


def require_finite(counts: Sequence[int]) -> None:
    """Raise where ranks hold NaN or Inf, naming each, as a rule of ``nonfinite="raise"`` says."""
    if any(counts):
        listed = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts) if count)
        raise ArgumentError(
            f"gradients hold NaN or Inf elements ({listed}) and nonfinite='raise'; nothing was reduced: "
            "skip the step, lower the loss scale, or choose nonfinite='propagate'"
        )


def ring(chunks: Tensor, places: Tensor, hop: Hop) -> Tensor:
    """Sum chunk c from rank c + 1 on around the ring to rank c; every rank adds its own chunk to what it received.

    Args:
        chunks: The casts of all ranks, [ranks, chunks, elements].
        places: c of each of these chunks, int64.
        hop: What rounds.

    Returns:
        [chunks, elements].
    """
    ranks, index = len(chunks), torch.arange(chunks.shape[1], device=chunks.device)
    sums = chunks[(places + 1) % ranks, index]
    for step in range(1, ranks):
        adding = (places + 1 + step) % ranks
        sums = hop.round_each(sums + chunks[adding, index], adding.tolist() if hop.draws else (), step)
    return sums


def tree(q: Tensor, hop: Hop, start: int = 0) -> Tensor:
    """Sum neighbours at distance 1, 2, 4, ...: rank r, a multiple of twice the distance, adds what rank r + d sends.

    Args:
        q: The casts of all ranks, [ranks, n].
        hop: What rounds.
        start: Place of the first element in the whole tensor.
    """
    sums, distance, step = q, 1, 1
    while distance < len(q):
        receivers = torch.arange(0, len(q) - distance, 2 * distance, device=q.device)
        added = hop.round_each(
            sums[receivers] + sums[receivers + distance], receivers.tolist() if hop.draws else (), step, start
        )
        sums = sums.index_copy(0, receivers, added)
        distance, step = 2 * distance, step + 1
    return sums[0]
