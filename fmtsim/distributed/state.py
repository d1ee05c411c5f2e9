# SPDX-License-Identifier: Apache-2.0
"""State of a reduction from step to step: the automatic factor, counts, and the number of steps."""

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
from fmtsim.support.errors import ArgumentError, shown
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


def fp8_hook(
    state: ReductionState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch defines it in C++ and looks for this annotation
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients, as a communication hook of DistributedDataParallel.

    ``model.register_comm_hook(ReductionState("fp8lm"), fp8_hook)``. Every parameter of a bucket has a scale of its own;
    the bucket travels as one tensor of codes. The bucket is written when all of it has arrived, or not at all; the last
    bucket of a backward pass ends the state's step.

    On a GPU the reduction is queued on a stream of the state's own, so that the backward pass goes on meanwhile; the
    future carries that stream's event, which DistributedDataParallel waits for. On a CPU the hook waits: from a thread
    of its own its messages would mix with those that the backward pass sends in the same group (batch normalisation,
    shared scales) in an order that differs between ranks.

    Args:
        state: The reduction and what it remembers; one for each model.
        bucket: What DistributedDataParallel hands over.

    Returns:
        A finished future with the bucket's buffer; on a GPU its event may be ahead.

    Raises:
        ArgumentError: The state is not a ReductionState, ranks disagree, or NaN and Inf under ``"raise"``.
        CollectiveError: A rank does not answer.
    """
    if not isinstance(state, ReductionState):
        raise ArgumentError(
            f"state={shown(state)} is not a ReductionState; register_comm_hook(ReductionState(name), fp8_hook)"
        )
    buffer = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[] if buffer.device.type == "cpu" else [buffer.device]
    )
    with state.aside(buffer.device):
        _reduce(state, bucket)
        future.set_result(buffer)  # records the event, so it belongs on the stream
    return future


def _reduce(state: ReductionState, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
    if bucket.index() == 0:
        state.begin()
    gradients, buffer = bucket.gradients(), bucket.buffer()  # contiguous views of it, one behind the other
    facts = ("a bucket of gradients", [(tuple(x.shape), str(x.dtype)) for x in gradients])
    state.reduce(Batch(buffer.unsqueeze(0), tuple(x.numel() for x in gradients)), facts, out=buffer)
    if bucket.is_last():
        state.step()
