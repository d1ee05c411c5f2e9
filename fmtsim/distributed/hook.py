# SPDX-License-Identifier: Apache-2.0
"""Gradients of DistributedDataParallel through a quantised reduction."""

import torch
import torch.distributed as dist

from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.state import ReductionState
from fmtsim.support.errors import ArgumentError, shown


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
