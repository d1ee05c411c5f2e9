# SPDX-License-Identifier: Apache-2.0
"""What a rank computes in a reduction: before, between and behind the messages."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.distributed.arithmetic import (
    Batch,
    Factors,
    Hop,
    canonical,
    chunked,
    each,
    factors_of,
    fixed_factor,
    own_counts,
    result_counts,
    scaled,
)
from fmtsim.distributed.simulate import ring, tree
from fmtsim.formats.packing import packed_size

ROW = 16  # bytes: rows of wires begin at multiples


class Stages(Protocol):
    """The stages of one reduction on one rank, in their order. Wires are uint8, chunks of the elements in rows."""

    def amaxes(self) -> Tensor:
        """Return the largest finite magnitude of each tensor, float32 [tensors], 0 for a tensor without one."""

    def factors(self, amaxes: Tensor, mu: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what casts and results are multiplied with, [tensors] each, from the magnitudes of all ranks."""

    def cast(self, encode: Tensor) -> Tensor:
        """Return the casts of the elements times the factors [tensors], as wires [ranks, bytes]."""

    def sum(self, wires: Tensor) -> Tensor:
        """Return this rank's chunk [bytes] of the sums from all ranks' casts of it [ranks, bytes]."""

    def finish(self, wires: Tensor, decode: Tensor) -> Iterable[Tensor]:
        """Write sums times the factors [tensors] to the result, and return what ``Counts`` has."""


def stages_of(batch: Batch, hop: Hop, rank: int, ranks: int, out: Tensor) -> Stages:
    """Return the stages of a reduction of a batch into out: kernels where they cover it, else operators.

    Both have the same bits, those of wires too, so that ranks may differ in it.
    """
    engine, record = ops.fused_engine(batch.x), hop.reduction
    if engine is not None and engine.covers_reduction(hop.spec, record.scaling, batch.x, ranks, out):
        made: Stages = engine.ReductionStages(
            batch.x, batch.sizes, hop.spec, record.scaling, rank, ranks, hop.key(0, 0), out,
            tree=record.algorithm == "tree", propagates=record.nonfinite == "propagate", average=record.average,
            factor=fixed_factor(record, ranks),
        )  # fmt: skip
        return made
    return Operators(batch, hop, rank, ranks, out)


class Operators:
    """The stages in torch operators, on any device and in any format; see ``stages_of``."""

    def __init__(self, batch: Batch, hop: Hop, rank: int, ranks: int, out: Tensor) -> None:
        self.batch, self.hop, self.rank, self.ranks, self.out = batch.float(), hop, rank, ranks, out
        self.length = -(-batch.x.numel() // ranks)
        self.bytes = packed_size(self.length, hop.spec.format.bits)

    def amaxes(self) -> Tensor:
        """Return the largest finite magnitude of each tensor."""
        return self.batch.amaxes()

    def factors(self, amaxes: Tensor, mu: Tensor | None) -> Factors:
        """Return the factors of tensors."""
        return factors_of(amaxes, self.hop.reduction, self.ranks, mu)

    def _encode(self, values: Tensor) -> Tensor:
        """Return rows of bytes; they are filled up, so that each begins where a vector may."""
        return torch.nn.functional.pad(self.hop.encode(values), (0, -self.bytes % ROW))

    def _decode(self, wires: Tensor) -> Tensor:
        return self.hop.decode(wires[:, : self.bytes], self.length)

    def cast(self, encode: Tensor) -> Tensor:
        """Return the casts of the elements, and count what becomes of them."""
        hop = self.hop
        y = scaled(self.batch, encode, hop.reduction).reshape(-1)
        q = hop.round(y, hop.key(self.rank, 0))
        self.own = own_counts(self.batch.x.reshape(-1), y, q, hop.top)
        return self._encode(chunked(q, self.ranks))

    def sum(self, wires: Tensor) -> Tensor:
        """Return this rank's chunk of the sums."""
        values = self._decode(wires)
        if self.hop.reduction.algorithm == "tree":
            return self._encode(tree(values, self.hop, self.rank * self.length))
        place = torch.full((1,), self.rank, device=values.device)
        return self._encode(ring(values[:, None], place, self.hop)[0])

    def finish(self, wires: Tensor, decode: Tensor) -> tuple[Tensor, ...]:
        """Write the result, and count."""
        sums = self._decode(wires).reshape(-1)[: self.out.numel()]
        values = sums
        if sums.numel():
            values = each(torch.mul, sums.reshape(-1, self.batch.x.shape[1]), self.batch.sizes, decode)
        self.out.copy_(canonical(values.reshape(self.out.shape).to(self.out.dtype)))
        return *result_counts(sums, self.hop.top), *self.own
