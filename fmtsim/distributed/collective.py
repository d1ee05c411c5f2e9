# SPDX-License-Identifier: Apache-2.0
"""Reductions over the processes of torch.distributed: codes travel, and the bits are those of the simulation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fmtsim.distributed.arithmetic import (
    Batch,
    Counts,
    Factors,
    Hop,
    batch_of,
    canonical,
    chunked,
    factors_of,
    finished,
    listed,
    own_counts,
    require_mu,
    result_counts,
    scaled,
)
from fmtsim.distributed.ranks import Ranks
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.distributed.simulate import require_finite, split
from fmtsim.errors import ArgumentError, shown
from fmtsim.records import checked


class Reduced(NamedTuple):
    """Hold what a reduction gives this rank.

    Attributes:
        values: The reduced tensors.
        counts: What became of the elements.
    """

    values: list[Tensor]
    counts: Counts


def all_reduce(
    tensors: Tensor | Sequence[Tensor],
    reduction: str | Reduction,
    *,
    mu: float | Tensor | None = None,
    call: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Reduced:
    """Reduce tensors over all ranks; the bits are those of ``simulate`` on the tensors of all ranks.

    Args:
        tensors: A tensor, or a list of tensors that are reduced together (one scale each): any shapes, one
            floating-point dtype, one device, the same on all ranks. They are only read.
        reduction: A name of ``REDUCTIONS`` or a record.
        mu: The automatic factor in force, the same on all ranks; None is the controller's first.
        call: Number of the reduction, for stochastic rounding; the same on all ranks.
        group: The ranks; None is the default group.

    Returns:
        New tensors of the same shapes, dtypes and device, and counts.

    NaN and Inf: as ``Reduction.nonfinite`` says.

    Raises:
        ArgumentError: There is no group; ranks disagree on shapes, dtypes or the record; mu without its factor; NaN and
            Inf under ``"raise"``.
        DtypeError: A tensor is not a floating-point one.
        CollectiveError: A rank does not answer.
    """
    given = listed(tensors)
    chosen, ranks = get_reduction(reduction), Ranks(group)
    batch = batch_of(given)
    factor = require_mu(chosen, mu, batch.x.device)
    shapes = [(tuple(x.shape), str(x.dtype)) for x in given]
    ranks.agree(("all_reduce", chosen, shapes, _settings(mu, call)), batch.x.device)
    values, counts = reduce_batch(batch, chosen, factor, call, ranks, scatter=False)
    return Reduced(split(values, batch, given), counts)


def reduce_scatter(
    x: Tensor,
    reduction: str | Reduction,
    *,
    sizes: Sequence[int] | None = None,
    mu: float | Tensor | None = None,
    call: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Reduced:
    """Reduce a matrix over all ranks and return its row of this rank's number: that row of what ``all_reduce`` gives.

    Args:
        x: [ranks, columns] (or that, flat): row r goes to rank r. The columns may hold several tensors, sharded
            by rows, one behind the other.
        reduction: A name of ``REDUCTIONS`` or a record.
        sizes: Columns of each tensor, which has a scale of its own; None is one tensor.
        mu: As for ``all_reduce``; so are the other arguments, NaN and Inf, and the errors.
        call: Number of the reduction.
        group: The ranks.

    Returns:
        One tensor [columns] of x's dtype, and counts, those of the result over all rows.
    """
    chosen, ranks = get_reduction(reduction), Ranks(group)
    flat = batch_of([x]).x
    if flat.numel() % ranks.size:
        raise ArgumentError(f"{flat.numel()} elements do not divide among {ranks.size} ranks; pad them")
    columns = flat.numel() // ranks.size
    parts = (columns,) if sizes is None else checked("sizes", sizes, tuple[int, ...])
    if sum(parts) != columns or min(parts, default=-1) < 0:
        raise ArgumentError(
            f"sizes={parts} sum to {sum(parts)}, not to the {columns} columns; name each tensor's columns, none below 0"
        )
    batch, factor = Batch(flat.reshape(ranks.size, columns), parts), require_mu(chosen, mu, x.device)
    ranks.agree(("reduce_scatter", chosen, (parts, str(x.dtype)), _settings(mu, call)), x.device)
    values, counts = reduce_batch(batch, chosen, factor, call, ranks, scatter=True)
    return Reduced([canonical(values.reshape(-1).to(x.dtype))], counts)


def reduce_batch(
    batch: Batch, reduction: Reduction, mu: Tensor | None, call: int, ranks: Ranks, *, scatter: bool
) -> tuple[Tensor, Counts]:
    """Return the reduced matrix of all ranks' batches, or this rank's row of it, float32, and the counts."""
    hop = Hop(reduction, call)
    factors = factors_of(_amaxes(batch, reduction, ranks), reduction, ranks.size, mu)
    y = scaled(batch, factors, reduction).reshape(-1)
    q = hop.round(y, hop.key(ranks.rank, 0))
    own = own_counts(batch.x.reshape(-1), y, q, hop.top)
    sums = _reduced(q, hop, ranks, scatter)
    return _finish(sums, batch, factors, hop, ranks, scatter, own)


def _settings(mu: float | Tensor | None, call: int) -> str:
    """Return in words what ranks have to agree on; a mu on a device is not looked at, as that would wait for it."""
    if isinstance(mu, Tensor):
        mu = "a tensor" if mu.device.type != "cpu" else float(mu)  # type: ignore[assignment]
    return f"mu={mu}, call={shown(call)}"


def _finish(
    sums: Tensor, batch: Batch, factors: Factors, hop: Hop, ranks: Ranks, scatter: bool, own: tuple[Tensor, ...]
) -> tuple[Tensor, Counts]:
    totals = torch.stack(result_counts(sums, hop.top))
    if scatter:
        totals = ranks.total(totals, "the counts of a reduce-scatter")
    shape = (1, batch.x.shape[1]) if scatter else batch.x.shape
    return finished(sums.reshape(shape), batch, factors), Counts(*totals.unbind(), *own)


def _amaxes(batch: Batch, reduction: Reduction, ranks: Ranks) -> Tensor:
    """Return the largest finite magnitude of each tensor on all ranks, after a look at NaN and Inf where asked for."""
    own = batch.amaxes()
    if reduction.nonfinite != "raise":
        return ranks.largest(own, "the exchange of largest magnitudes")
    wrong = (~batch.x.isfinite()).sum()
    found = ranks.largest(torch.cat([own, wrong.clamp(max=1).float().reshape(1)]), "the exchange of largest magnitudes")
    if bool(found[-1]):
        require_finite(ranks.gather_objects(int(wrong), "the count of NaN and Inf"))
    return found[:-1]


def _reduced(q: Tensor, hop: Hop, ranks: Ranks, scatter: bool) -> Tensor:
    """Return the sums of the casts [n] of all ranks, or this rank's chunk of them."""
    if ranks.size == 1 or not q.numel():
        return q
    if hop.reduction.algorithm == "tree":
        return _tree(q, hop, ranks, scatter)
    chunk = _ring_reduce(chunked(q, ranks.size), hop, ranks)
    return chunk if scatter else _ring_gather(chunk, q.numel(), hop, ranks)


def _ring_reduce(chunks: Tensor, hop: Hop, ranks: Ranks) -> Tensor:
    """Return chunk ``rank`` of the sum: at hop h a rank gets chunk ``rank - h - 1``, adds its own and passes it on."""
    n, length = ranks.size, chunks.shape[1]
    after, before = (ranks.rank + 1) % n, (ranks.rank - 1) % n
    sums = chunks[before]  # chunk c starts at rank c + 1
    into = torch.empty(hop.bytes(length), dtype=torch.uint8, device=chunks.device)
    for step in range(1, n):
        ranks.pass_on(hop.encode(sums), into, after, before, f"hop {step} of {n - 1} of a ring")
        own = chunks[(ranks.rank - step - 1) % n]
        sums = hop.round(hop.decode(into, length) + own, hop.key(ranks.rank, step))
    return sums


def _ring_gather(chunk: Tensor, count: int, hop: Hop, ranks: Ranks) -> Tensor:
    """Return all chunks [count], each from the rank that summed it; codes go around the ring as they are."""
    n, length = ranks.size, chunk.numel()
    after, before = (ranks.rank + 1) % n, (ranks.rank - 1) % n
    wires = torch.empty(n, hop.bytes(length), dtype=torch.uint8, device=chunk.device)
    wires[ranks.rank] = hop.encode(chunk)
    for step in range(n - 1):
        out, into = wires[(ranks.rank - step) % n], wires[(before - step) % n]
        ranks.pass_on(out, into, after, before, f"hop {step + 1} of {n - 1} of a ring's gathering")
    return torch.cat([hop.decode(wire, length) for wire in wires])[:count]


def _tree(q: Tensor, hop: Hop, ranks: Ranks, scatter: bool) -> Tensor:
    """Sum neighbours at distance 1, 2, 4, ... until rank 0 has all, which sends codes back the same way."""
    n, rank, into = ranks.size, ranks.rank, torch.empty(hop.bytes(q.numel()), dtype=torch.uint8, device=q.device)
    distances = [1 << i for i in range((n - 1).bit_length())]
    for step, distance in enumerate(distances, 1):
        where = f"step {step} of {len(distances)} of a tree"
        if rank % (2 * distance) == distance:
            ranks.send(hop.encode(q), rank - distance, where)
            break
        if rank + distance < n:
            ranks.receive(into, rank + distance, where)
            q = hop.round(q + hop.decode(into, q.numel()), hop.key(rank, step))
    if rank == 0:
        into = hop.encode(q)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            ranks.receive(into, rank - distance, "a tree's way back")
        elif rank % (2 * distance) == 0 and rank + distance < n:
            ranks.send(into, rank + distance, "a tree's way back")
    sums = hop.decode(into, q.numel())
    return sums.reshape(n, -1)[rank] if scatter else sums
