# SPDX-License-Identifier: Apache-2.0
"""What a reduction remembers from step to step: the automatic factor, counts, and how many steps there were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmtsim.distributed.arithmetic import Batch, Counts, require_mu
from fmtsim.distributed.collective import reduce_batch
from fmtsim.distributed.ranks import Ranks
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import check_items


class ReductionState:
    """Hold the state of a model's reductions, for ``fp8_hook`` and ``hook_fsdp``.

    A step is a round of buckets; counts of all its buckets decide the next mu, which is the same on every rank. A step
    that breaks off changes nothing: its counts are dropped when the next one begins.

    Args:
        reduction: A name of ``REDUCTIONS`` or a record.
        group: The ranks; None is the default group.

    Attributes:
        steps: Steps that were finished.
        mu: The automatic factor in force, float32, 0-d; None for fixed factors.

    Raises:
        ArgumentError: The reduction is unknown, or torch.distributed has no process group.
    """

    def __init__(self, reduction: str | Reduction = "fp8lm", group: dist.ProcessGroup | None = None) -> None:
        self.reduction = get_reduction(reduction)
        self.ranks = Ranks(group)
        self.steps = 0
        self.mu = require_mu(self.reduction, None, torch.device("cpu"))
        self.calls = 0
        self._origin = "a new state"
        self._pending: Counts | None = None
        self._last: Counts | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Queue on a stream of the state's own what a CUDA device does meanwhile, behind what is queued already."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def begin(self) -> None:
        """Start a step: drop counts of one that broke off."""
        self._pending = None

    def reduce(
        self, batch: Batch, facts: tuple[Any, ...], *, scatter: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Reduce a batch and keep its counts for the end of the step; facts are what the ranks have to agree on.

        Returns:
            out, written when all has arrived; where none is given a new float32 [rows, columns]. With ``scatter`` this
            rank's row of it.
        """
        self.ranks.agree((self.reduction, *facts, self._origin), batch.x.device)
        if self.mu is not None:
            self.mu = self.mu.to(batch.x.device)
        if out is None:
            out = batch.x.new_empty((1, batch.x.shape[1]) if scatter else batch.x.shape, dtype=torch.float32)
        counts = reduce_batch(batch, self.reduction, self.mu, self.calls, self.ranks, out, scatter=scatter)
        self.calls += 1
        self._pending = counts if self._pending is None else self._pending.plus(counts)
        return out

    def step(self) -> None:
        """Finish a step: move mu, keep the counts."""
        if self._pending is None:
            return
        if self.mu is not None and self.reduction.auto is not None:
            self.mu = self.reduction.auto.next(self.mu, self._pending.saturated, self._pending.elements)
        self._last, self._pending = self._pending, None
        self.steps += 1

    def report(self) -> dict[str, float]:
        """Return mu, the number of steps and the counts of the last one; counts of clipped, flushed and non-finite
        elements are this rank's own. This waits for the device.
        """
        counts: dict[str, float] = {} if self._last is None else dict(self._last.to_dict())
        return {"steps": self.steps, **({} if self.mu is None else {"mu": float(self.mu)}), **counts}

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the same bits."""
        mu = None if self.mu is None else self.mu.detach().cpu().clone()
        return {"reduction": repr(self.reduction), "mu": mu, "steps": self.steps, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``; everything is checked before anything changes.

        Raises:
            ArgumentError: It is no such state, or one of another reduction.
        """
        check_items(state, {"reduction": str, "mu": Tensor | None, "steps": int, "calls": int}, "this state")
        if state["reduction"] != repr(self.reduction):
            raise ArgumentError(
                f"the state is of another reduction, {state['reduction']}; build the ReductionState with that one"
            )
        mu = None
        if self.reduction.auto is not None:
            check_items(state, {"mu": Tensor}, "this state")
            mu = require_mu(self.reduction, state["mu"], torch.device("cpu"))
        self.mu, self.steps, self.calls = mu, state["steps"], state["calls"]
        self._pending = self._last = None
        self._origin = f"a state of {self.steps} steps and {self.calls} calls" + (
            "" if mu is None else f", mu={float(mu)!r}"
        )
