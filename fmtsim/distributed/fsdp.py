# SPDX-License-Identifier: Apache-2.0
"""Gradients and weights of FSDP2 through quantised collectives, and the state of a reduction from step to step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.distributed.arithmetic import Batch, Counts, require_mu
from fmtsim.distributed.collective import reduce_batch
from fmtsim.distributed.gather import HALO, gather_parts, require_whole
from fmtsim.distributed.ranks import Ranks
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.formats.block import Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_items, checked


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


class _Comm:
    """The allocator that FSDP2 asks of both collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedReduceScatter(_Comm):
    """Stand in for FSDP2's reduce-scatter of the gradients of one ``fully_shard`` unit.

    Args:
        state: The reduction and what it remembers.
        sizes: Elements of each parameter's shard, padding included, in the order of the unit's parameters.
    """

    def __init__(self, state: ReductionState, sizes: tuple[int, ...]) -> None:
        self.state, self.sizes = state, sizes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` [ranks * n] into ``output_tensor`` [n]; nothing is written unless all arrived."""
        state = self.state
        _require_group(group, state.ranks)
        average = state.reduction.average
        if op != (dist.ReduceOp.AVG if average else dist.ReduceOp.SUM):
            how = "leave its divide factor alone, in float32 or bfloat16" if average else "choose average=True"
            raise ArgumentError(f"FSDP reduces by {op}, but the reduction has average={average}; {how}")
        sizes = _fitting(self.sizes, output_tensor.numel(), "trainable parameters", "gradients")
        batch = Batch(input_tensor.reshape(state.ranks.size, -1), sizes)
        facts = ("reduce-scatter", sizes, str(input_tensor.dtype))
        state.reduce(batch, facts, scatter=True, out=output_tensor)


class QuantizedAllGather(_Comm):
    """Stand in for FSDP2's all-gather of the weights of one ``fully_shard`` unit; shards stay in high precision.

    Args:
        format: The format that travels.
        scaling: The rule of the scale that all ranks share; None lets each rank encode its flat buffer by itself.
        sizes: Elements of each parameter's shard, padding included, in the order of the unit's parameters.
        ranks: The ranks.
    """

    def __init__(self, format: Format, scaling: Scaling | None, sizes: tuple[int, ...], ranks: Ranks) -> None:
        self.format, self.scaling, self.sizes, self.ranks = format, scaling, sizes, ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather ``input_tensor`` [n] of all ranks into ``output_tensor`` [ranks * n], which may hold it."""
        _require_group(group, self.ranks)
        if not input_tensor.is_floating_point():
            raise ArgumentError(
                f"FSDP sends weights as {input_tensor.dtype}, because the unit's parameters have several dtypes; give "
                "it one, for example with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )
        sizes = _fitting(self.sizes, input_tensor.numel(), "parameters", "weights")
        facts = ("all-gather", self.format, self.scaling, sizes, str(input_tensor.dtype))
        self.ranks.agree(facts, input_tensor.device)
        gathered = gather_parts(input_tensor, self.format, self.scaling, sizes, self.ranks)
        output_tensor.copy_(gathered.reshape(-1))


def hook_fsdp(
    model: nn.Module,
    state: ReductionState | None = None,
    *,
    gather: str | Format | None = None,
    scaling: Scaling | None = HALO,
    per_tensor: bool = True,
) -> None:
    """Make every ``fully_shard`` unit of a model reduce its gradients, and gather its weights, in low precision.

    Call it behind ``fully_shard``, and ``state.step()`` behind each backward pass: that ends the step whose elements
    the automatic factor counts.

    Args:
        model: A model with FSDP2 units, sharded along their first dimension.
        state: The reduction of gradients; None leaves FSDP's own.
        gather: The format in which weights travel, such as ``"int8"`` (HALO) or ``"e4m3"``; None leaves FSDP's own.
        scaling: The rule of a scale that all ranks share; None, with a format that has scales of its own.
        per_tensor: One scale a parameter; False: one scale a unit.

    Raises:
        ArgumentError: The model has no FSDP2 unit, there is nothing to hook, or the format and the scaling do not fit.
    """
    from torch.distributed.fsdp import FSDPModule

    if state is None and gather is None:
        raise ArgumentError("there is nothing to hook; pass a ReductionState, gather='int8', or both")
    if state is not None and not isinstance(state, ReductionState):
        raise ArgumentError(f"state={shown(state)} is not a ReductionState; hook_fsdp(model, ReductionState(name))")
    check_module("hook_fsdp", model)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ArgumentError(f"{type(model).__name__} has no FSDP2 unit; call torch's fully_shard on it first")
    fmt = None if gather is None else get_format(gather)
    checked("scaling", scaling, Scaling | None)
    if fmt is not None and scaling is not None:
        require_whole(fmt, scaling)
    ranks = Ranks() if state is None else state.ranks
    for unit in units:
        parameters = list(_parameters(unit))  # type: ignore[arg-type]  # an FSDPModule is an nn.Module
        if state is not None:
            sizes = tuple(_shard_size(p, ranks.size) for p in parameters if p.requires_grad)
            unit.set_custom_reduce_scatter(QuantizedReduceScatter(state, sizes if per_tensor else ()))  # type: ignore[arg-type]
        if fmt is not None:
            sizes = tuple(_shard_size(p, ranks.size) for p in parameters)
            comm = QuantizedAllGather(fmt, scaling, sizes if per_tensor else (), ranks)
            unit.set_custom_all_gather(comm)  # type: ignore[arg-type]


def _parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a unit as FSDP orders them: children first, nested units left out, each once."""
    from torch.distributed.fsdp import FSDPModule

    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen and not isinstance(child, FSDPModule):
                yield from visit(child)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    yield from visit(unit)


def _shard_size(parameter: nn.Parameter, ranks: int) -> int:
    """Return the elements of a rank's shard with its padding: rows are dealt out in equal numbers, rounded up."""
    rows = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


def _fitting(sizes: tuple[int, ...], count: int, whose: str, what: str) -> tuple[int, ...]:
    """Return the sizes of tensors in a buffer; no sizes stand for one tensor."""
    if not sizes:
        return (count,)
    if sum(sizes) != count:
        raise ArgumentError(
            f"FSDP sends {count} elements of {what} a rank, but the unit's {whose} have {sum(sizes)}: some take no "
            "part, or are sharded otherwise; call hook_fsdp(..., per_tensor=False)"
        )
    return sizes


def _require_group(group: dist.ProcessGroup, ranks: Ranks) -> None:
    theirs, ours = dist.get_process_group_ranks(group), dist.get_process_group_ranks(ranks.group)
    if theirs != ours:
        raise ArgumentError(
            f"FSDP shards over ranks {theirs}, the ReductionState over {ours}; build it with group=mesh.get_group()"
        )
