# SPDX-License-Identifier: Apache-2.0
"""Gradients of several ranks in one process: each rank's part of a batch, reduced as ``fmtsim.distributed`` does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmtsim.distributed.arithmetic import require_mu
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.distributed.simulate import simulate


class RankReduction:
    """Reduce the gradients of simulated ranks, step for step; the automatic factor moves as on processes.

    Args:
        reduction: A name of ``REDUCTIONS`` or a record.

    Attributes:
        mu: The automatic factor in force, float32, 0-d; None for fixed factors.
        calls: Reductions so far.
    """

    def __init__(self, reduction: str | Reduction) -> None:
        self.reduction = get_reduction(reduction)
        self.mu = require_mu(self.reduction, None, torch.device("cpu"))
        self.calls = 0

    def reduce(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Return one gradient a parameter of those of each rank; None where no rank has one, else zeros stand in."""
        columns = list(zip(*gradients, strict=True))
        present = {i: g for i, column in enumerate(columns) for g in column if g is not None}
        found: list[Tensor | None] = [None] * len(columns)
        if not present:
            return found
        ranks = [
            [torch.zeros_like(like) if (g := own[i]) is None else g for i, like in present.items()] for own in gradients
        ]
        result = simulate(ranks, self.reduction, mu=self.mu, call=self.calls)
        self.calls += 1
        if self.mu is not None and self.reduction.auto is not None:
            counts = result.counts[0]  # of reduced elements, which are the same on all ranks
            self.mu = self.reduction.auto.next(self.mu.to(counts.saturated.device), counts.saturated, counts.elements)
        for i, value in zip(present, result.values, strict=True):
            found[i] = value
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the same bits."""
        return {"mu": self.mu, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict`` of the same reduction."""
        self.mu, self.calls = state["mu"], state["calls"]
