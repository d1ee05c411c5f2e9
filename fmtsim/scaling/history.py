"""Delayed scaling: the state of a tensor whose scale follows from its largest magnitudes in earlier calls."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from fmtsim.scaling.scale import Scaling
from fmtsim.scaling.scales import Scales, _float32, power_of_two, reciprocal
from fmtsim.scaling.statistics import FLT_MAX


class DelayedScale(nn.Module):
    """Hold the history of one tensor of a layer, in buffers.

    A call takes ``scales()`` for its elements and ``record()`` s the largest magnitude of the tensor, which then counts
    for later calls. Buffers move with the module and are broadcast by DistributedDataParallel; they are not part of its
    state_dict (``fmtsim.recipe_state`` has them).

    Args:
        scaling: A rule with a history.
        top: The element format's largest value, for a rule that names none.

    Attributes:
        amaxes: float32 [length], the latest first; zeros where nothing was recorded.
        factor: float32, 0-d: what elements are multiplied with before they are rounded; 1 at first.
        calls: int64, 0-d: calls recorded.
    """

    amaxes: Tensor
    factor: Tensor
    calls: Tensor

    def __init__(self, scaling: Scaling, top: float) -> None:
        super().__init__()
        assert scaling.history is not None
        self.scaling, self.top = scaling, _float32(_float32(top if scaling.top is None else scaling.top))
        self.register_buffer("amaxes", torch.zeros(scaling.history.length), persistent=False)
        self.register_buffer("factor", torch.ones(()), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def scales(self) -> Scales:
        """Return the scale in force, as ``[1, 1]``."""
        factor = self.factor.clone().reshape(1, 1)
        return Scales(reciprocal(factor), factor)

    @torch.no_grad()
    def record(self, amax: Tensor, group: ProcessGroup | None = None) -> None:
        """Remember the largest magnitude of a call and update the scale where that is due.

        Args:
            amax: float32, one number; of all ranks the largest counts.
            group: Ranks that share the scale; None is this one alone.

        With a history of length L the scale follows from the last L magnitudes, this one included, or from this one
        alone. It stays what it was where that is zero.
        """
        history = self.scaling.history
        assert history is not None
        amax = amax.reshape(()).float()
        if group is not None:
            amax = amax.clone()
            all_reduce(amax, ReduceOp.MAX, group=group)
        self.amaxes.copy_(torch.roll(self.amaxes, 1))
        self.amaxes[0] = amax
        self.calls += 1
        found = self.amaxes.amax() if history.algorithm == "max" else self.amaxes[0]
        if history.immediate:
            found = torch.where(self.calls <= history.immediate, self.amaxes[0], found)
        due = (self.calls % history.refresh_every == 0) | (self.calls <= history.immediate)
        self.factor.copy_(torch.where(due & (found > 0), self._factor(found), self.factor))

    def _factor(self, amax: Tensor) -> Tensor:
        top = torch.full_like(amax, _float32(self.top * 2.0**-self.scaling.margin))
        factor = torch.div(top, amax).clamp(max=FLT_MAX)
        rule = self.scaling.power_of_two
        return factor if rule is None else power_of_two(factor, up=rule == "floor")
