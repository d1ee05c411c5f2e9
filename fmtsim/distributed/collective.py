# SPDX-License-Identifier: Apache-2.0
"""Reductions over the processes of torch.distributed: codes travel, and the bits are those of the simulation."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.distributed.arithmetic import (
    Batch,
    Counts,
    Factors,
    Hop,
    batch_of,
    canonical,
    chunked,
    each,
    factors_of,
    fixed_factor,
    listed,
    own_counts,
    require_mu,
    result_counts,
    scaled,
)
from fmtsim.distributed.peers import MOST_TENSORS, Peers, peers_of
from fmtsim.distributed.ranks import Ranks
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.distributed.simulated_reduce import require_finite, ring, tree
from fmtsim.formats.packing import packed_size
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import checked

ROW = 16  # bytes: rows of wires begin at multiples


def stages_of(batch: Batch, hop: Hop, rank: int, ranks: int, out: Tensor, peers: Peers | None = None) -> Any:
    """Return the ``Stages`` of a reduction of a batch into out: the engine's kernels where they cover it.

    Both have the same bits, those of wires too, so that ranks may differ in it; through ``peers`` they may not.
    """
    engine, record = ops.fused_engine(batch.x), hop.reduction
    if engine is not None and engine.covers_reduction(hop.spec, record.scaling, batch.x, ranks, out):
        return engine.ReductionStages(
            batch.x, batch.sizes, hop.spec, record.scaling, rank, ranks, hop.key(0, 0), out,
            tree=record.algorithm == "tree", propagates=record.nonfinite == "propagate", average=record.average,
            factor=fixed_factor(record, ranks), peers=peers,
        )  # fmt: skip
    return Stages(batch, hop, rank, ranks, out)


class Stages:
    """The stages of one reduction on one rank, in their order, in torch operators: on any device and in any format.

    Wires are uint8, chunks of the elements in rows.
    """

    peers: Final = None

    def __init__(self, batch: Batch, hop: Hop, rank: int, ranks: int, out: Tensor) -> None:
        self.batch, self.hop, self.rank, self.ranks, self.out = batch.float(), hop, rank, ranks, out
        self.length = -(-batch.x.numel() // ranks)
        self.bytes = packed_size(self.length, hop.spec.format.bits)

    def amaxes(self) -> Tensor:
        """Return the largest finite magnitude of each tensor, float32 [tensors], 0 for a tensor without one."""
        return self.batch.amaxes()

    def factors(self, amaxes: Tensor, mu: Tensor | None) -> Factors:
        """Return what casts and results are multiplied with, [tensors] each, from the magnitudes of all ranks."""
        return factors_of(amaxes, self.hop.reduction, self.ranks, mu)

    def _encode(self, values: Tensor) -> Tensor:
        """Return rows of bytes; they are filled up, so that each begins where a vector may."""
        return torch.nn.functional.pad(self.hop.encode(values), (0, -self.bytes % ROW))

    def _decode(self, wires: Tensor) -> Tensor:
        return self.hop.decode(wires[:, : self.bytes], self.length)

    def cast(self, encode: Tensor) -> Tensor:
        """Return the casts of the elements times the factors [tensors], as wires [ranks, bytes], and count."""
        hop = self.hop
        y = scaled(self.batch, encode, hop.reduction).reshape(-1)
        q = hop.round(y, hop.key(self.rank, 0))
        self.own = own_counts(self.batch.x.reshape(-1), y, q, hop.top)
        return self._encode(chunked(q, self.ranks))

    def sum(self, wires: Tensor) -> Tensor:
        """Return this rank's chunk [bytes] of the sums from all ranks' casts of it [ranks, bytes]."""
        values = self._decode(wires)
        if self.hop.reduction.algorithm == "tree":
            return self._encode(tree(values, self.hop, self.rank * self.length))
        place = torch.full((1,), self.rank, device=values.device)
        return self._encode(ring(values[:, None], place, self.hop)[0])

    def finish(self, wires: Tensor, decode: Tensor) -> tuple[Tensor, ...]:
        """Write sums times the factors [tensors] to the result, and return what ``Counts`` has."""
        sums = self._decode(wires).reshape(-1)[: self.out.numel()]
        values = sums
        if sums.numel():
            values = each(torch.mul, sums.reshape(-1, self.batch.x.shape[1]), self.batch.sizes, decode)
        self.out.copy_(canonical(values.reshape(self.out.shape).to(self.out.dtype)))
        return *result_counts(sums, self.hop.top), *self.own


class Reduced(NamedTuple):
    """Hold the result of a reduction on this rank.

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
    items = listed(tensors)
    chosen, ranks = get_reduction(reduction), Ranks(group)
    batch = batch_of(items)
    factor = require_mu(chosen, mu, batch.x.device)
    shapes = [(tuple(x.shape), str(x.dtype)) for x in items]
    ranks.agree(("all_reduce", chosen, shapes), batch.x.device, _settings(mu, call))
    out = torch.empty_like(batch.x[0])
    counts = reduce_batch(batch, chosen, factor, call, ranks, out, scatter=False)
    parts = (out,) if len(items) == 1 else [part.clone() for part in out.split(batch.sizes)]
    return Reduced([part.reshape(x.shape) for part, x in zip(parts, items, strict=True)], counts)


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
    ranks.agree(("reduce_scatter", chosen, (parts, str(x.dtype))), x.device, _settings(mu, call))
    out = flat.new_empty(columns)
    return Reduced([out], reduce_batch(batch, chosen, factor, call, ranks, out, scatter=True))


def reduce_batch(
    batch: Batch, reduction: Reduction, mu: Tensor | None, call: int, ranks: Ranks, out: Tensor, *, scatter: bool
) -> Counts:
    """Write the reduced matrix of all ranks' batches, or this rank's row of it, to out, and return the counts.

    Every rank gets its chunk of all ranks' casts, forms the sums of the chunk in the order that the reduction names,
    and sends them to all: twice the bytes of a part ``(ranks - 1) / ranks`` of the elements, as much as around a ring.
    """
    peers = peers_of(ranks, batch.x.device) if len(batch.sizes) < MOST_TENSORS else None
    stages = stages_of(batch, Hop(reduction, call), ranks.rank, ranks.size, out, peers)
    messages: Any = ranks if stages.peers is None else stages.peers
    encode, decode = stages.factors(_amaxes(stages, batch, reduction, ranks, messages), mu)
    wires = stages.cast(encode)
    if ranks.size > 1 and batch.x.numel():
        sums = stages.sum(messages.exchange(wires, "the exchange of casts"))
        wires = sums[None] if scatter else messages.gather(sums, "the exchange of sums")
    counts = Counts._make(stages.finish(wires, decode))
    if not scatter:
        return counts
    totals = ranks.total(torch.stack(counts[:3]), "the counts of a reduce-scatter")
    return Counts._make((*totals.unbind(), *counts[3:]))


def _settings(mu: float | Tensor | None, call: int) -> str:
    """Return in words what ranks have to agree on; a mu on a device is not looked at, as that would wait for it."""
    if isinstance(mu, Tensor):
        mu = "a tensor" if mu.device.type != "cpu" else float(mu)  # type: ignore[assignment]
    return f"mu={mu}, call={shown(call)}"


def _amaxes(stages: Any, batch: Batch, reduction: Reduction, ranks: Ranks, messages: Any) -> Any:
    """Return the largest finite magnitude of each tensor on all ranks, after a look at NaN and Inf where asked for."""
    local_amaxes = stages.amaxes()
    if reduction.nonfinite != "raise":  # a tensor, or for peers where those of all ranks are
        return messages.largest(local_amaxes, "the exchange of largest magnitudes")
    wrong = (~batch.x.isfinite()).sum()
    amaxes = ranks.largest(
        torch.cat([local_amaxes, wrong.clamp(max=1).float().reshape(1)]), "the exchange of largest magnitudes"
    )
    if bool(amaxes[-1]):
        require_finite(ranks.gather_objects(int(wrong), "the count of NaN and Inf"))
    return amaxes[:-1]
