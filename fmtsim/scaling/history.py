# SPDX-License-Identifier: Apache-2.0
"""Scales that a layer remembers: those of delayed scaling, and those that a stored weight was rounded with."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from fmtsim.formats.block import ScaledFormat
from fmtsim.scaling.repeats import Calls
from fmtsim.scaling.scales import FLT_MAX, Scales, float32, power_of_two, reciprocal
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import CollectiveError, first_line
from fmtsim.support.replay.hooks import refuse


class RememberedScale(nn.Module):
    """Hold what a layer remembers of one operand, in buffers, float32 whatever becomes of the model's dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> "RememberedScale":
        """Move to another device; ``model.half()`` and the like change no dtype here.

        What leaves the meta device (``model.to_empty``) has seen nothing yet.
        """
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            now = self._buffers[name]
            if old is not None and now is not None and now.dtype != old.dtype:
                self._buffers[name] = old.to(now.device)
            elif old is not None and now is not None and old.is_meta and not now.is_meta:
                now.fill_(name == "factor")
        return self


class StoredScale(RememberedScale):
    """Hold the scales that a weight was rounded with before it was stored; without elements until they are known.

    Attributes:
        scale: [row blocks, inner blocks].
        tensor_scale: 0-d, for formats with a scale of the tensor.
    """

    scale: Tensor
    tensor_scale: Tensor

    def __init__(self, scale: Tensor | None = None, tensor_scale: Tensor | None = None) -> None:
        super().__init__()
        for name, tensor in (("scale", scale), ("tensor_scale", tensor_scale)):
            self.register_buffer(name, torch.empty(0) if tensor is None else tensor, persistent=False)


class DelayedScale(RememberedScale):
    """Hold the history of one tensor of a layer, in buffers.

    A call takes ``advance()``: the scale in force, while the largest magnitude of the tensor is recorded, which then
    counts for later calls. Buffers move with the module and are broadcast by DistributedDataParallel; they are part of
    its state_dict, but for histories that never move, and a state_dict without them loads, too.

    Args:
        quantizer: A quantiser whose scaling has a history.

    Attributes:
        amaxes: float32 [length], the latest first; zeros where nothing was recorded.
        factor: float32, 0-d: what elements are multiplied with before they are rounded; 1 at first.
        calls: int64, 0-d: calls recorded.
        group: Ranks that share the scale; None is this one alone. It is not copied or pickled.
        repeated: The scales of calls that activation checkpointing will repeat.
    """

    amaxes: Tensor
    factor: Tensor
    calls: Tensor
    group: ProcessGroup | None = None

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        scaling, element = quantizer.scaling, quantizer.format
        assert scaling is not None and scaling.history is not None
        assert element is not None and not isinstance(element, ScaledFormat)  # the record refuses it
        self.scaling, self.top = scaling, float32(float(element.max) if scaling.top is None else scaling.top)
        self.repeated: Calls[Scales] = Calls()
        self.register_buffer("amaxes", torch.zeros(scaling.history.length), persistent=self.is_saved)
        self.register_buffer("factor", torch.ones(()), persistent=self.is_saved)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=self.is_saved)

    @property
    def is_saved(self) -> bool:
        """Whether a state_dict has the history."""
        assert self.scaling.history is not None
        return not self.scaling.history.fixed

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Take the history where the state_dict has one."""
        if any(prefix + name in state_dict for name in self._buffers):
            super()._load_from_state_dict(state_dict, prefix, *more)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the process group behind."""
        return {name: value for name, value in self.__dict__.items() if name != "group"}

    def scales(self) -> Scales:
        """Return the scale in force, as ``[1, 1]``."""
        factor = self.factor.clone().reshape(1, 1)
        return Scales(reciprocal(factor), factor)

    def frozen(self) -> "FrozenScale":
        """Return what gives the same scales and remembers nothing."""
        return FrozenScale(self)

    def learning(self, *, compiled: bool) -> "LearningScale":
        """Return what gives the scales of calls of a forward pass, which activation checkpointing may repeat."""
        return LearningScale(self, compiled=compiled)

    def advance(self, amax: Tensor, *, remember: bool = True) -> Scales:
        """Record a call's largest magnitude, and return the scale of that call.

        The scale follows from earlier calls, but in the rule's first ``immediate`` ones from this call itself.
        """
        history = self.scaling.history
        assert history is not None
        before, fresh = self.scales(), self.calls < history.immediate
        if remember:
            self.record(amax)
        if not history.immediate:
            return before
        current = self.amaxes[0] if remember else amax.reshape(())  # of all ranks, or of this call
        factor = torch.where(fresh & (current > 0), self._factor(current), before.factor)
        return Scales(reciprocal(factor), factor)

    @torch.no_grad()
    def record(self, amax: Tensor) -> None:
        """Remember the largest magnitude of a call and update the scale where that is due.

        Args:
            amax: float32, one number; of all ranks in ``group`` the largest counts.

        With a history of length L the scale follows from the last L magnitudes, this one included, or from this one
        alone. Where that is zero the rule's ``empty`` counts.

        Raises:
            CollectiveError: A rank does not answer; the history is as it was.
        """
        history = self.scaling.history
        assert history is not None
        amax = amax.reshape(()).float()
        if self.group is not None:
            amax = _largest(amax, self.group)
        # 1. the history, latest first
        self.amaxes.copy_(torch.roll(self.amaxes, 1))
        self.amaxes[0] = amax
        self.calls += 1
        # 2. the scale that follows from it, where an update is due
        amax = self.amaxes.amax() if history.algorithm == "max" else self.amaxes[0]
        is_due = self.calls % history.refresh_every == 0
        of_zero = self.factor if self.scaling.empty == "previous" else torch.ones_like(self.factor)
        self.factor.copy_(torch.where(is_due, torch.where(amax > 0, self._factor(amax), of_zero), self.factor))

    def _factor(self, amax: Tensor) -> Tensor:
        top = torch.full_like(amax, float32(self.top * 2.0**-self.scaling.margin))
        factor = torch.div(top, amax).clamp(max=FLT_MAX)
        rule = self.scaling.power_of_two
        return factor if rule is None else power_of_two(factor, up=rule == "floor")


class FrozenScale:
    """Give the scales of a DelayedScale and record nothing, for calls that are not part of training."""

    def __init__(self, memory: DelayedScale) -> None:
        self.memory = memory

    def advance(self, amax: Tensor) -> Scales:
        """Return the scale of a call."""
        return self.memory.advance(amax, remember=False)


class LearningScale(FrozenScale):
    """Give the scales of a DelayedScale to calls of a forward pass and record each call once.

    A call that activation checkpointing repeats gets the scales of its first run and is not recorded again.
    """

    def __init__(self, memory: DelayedScale, *, compiled: bool) -> None:
        super().__init__(memory)
        self._compiled = compiled

    def direct(self) -> DelayedScale | FrozenScale | None:
        """Return what a kernel may work on that reads and updates the memory itself, None where ``advance`` has to.

        In compiled code a CUDA graph may hold the call, and Python cannot remember its scale: a call that the backward
        pass computes again then takes the scale in force there, and records nothing.
        """
        if self._compiled:
            return FrozenScale(self.memory) if self.memory.repeated.in_backward() else self.memory
        return None if self.memory.repeated.checkpointed() else self.memory

    def advance(self, amax: Tensor) -> Scales:
        """Return the scale of a call."""
        refuse()
        return self.memory.repeated.run(lambda: self.memory.advance(amax), compiled=self._compiled)


def _largest(amax: Tensor, group: ProcessGroup) -> Tensor:
    """Return the largest magnitude of all ranks."""
    largest = amax.clone()
    try:
        all_reduce(largest, ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise CollectiveError(
            "a rank did not answer in the exchange of a delayed scale's largest magnitude; it has ended, hangs, or "
            "runs other layers. The scale is as it was; restart the ranks from a checkpoint. "
            f"torch says: {first_line(error)}"
        ) from error
    return largest
