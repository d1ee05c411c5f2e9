# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on CUDA: which schemes and parameters the kernels take, and what they get."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.optim.adam import BLOCKS, TYPES, Launch, kernels_of, launch, launches
from fmtsim.spec.optimizer import Counter, Numbers, ParameterStep, Scheme, in_parameter, key_of

RULES = ("adamw", "adam")
_ALIGNED = 16
_PARTS = [f"{slot}{part}" for part in ("", "_scale", "_power", "_centre") for slot in ("first", "second")]
_PARTS += ["weights", "weights_scale"]


def supports_optimizer(rule: str, scheme: Scheme) -> bool:
    """Say whether kernels know a rule and the states of a scheme."""
    return rule in RULES and kernels_of(scheme) is not None


def optimizer_steps(
    rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
) -> Sequence[ParameterStep]:
    """Do the steps that kernels cover, of parameters on devices that they run on; return the others.

    Steps with equal scalars share launches.
    """
    kernels = kernels_of(scheme) if rule in RULES else None
    if kernels is None:
        return steps
    left: list[ParameterStep] = []
    together: dict[tuple[torch.device, torch.dtype, Numbers, int], list[ParameterStep]] = {}
    for step in steps:
        if _takes(step, kernels.books):
            p = step.parameter
            together.setdefault((p.device, p.dtype, step.numbers, step.step), []).append(step)
        else:
            left.append(step)
    for (device, _, numbers, number), group in together.items():
        parts = launches([_row(step) for step in group])
        launch(parts, [step.parameter for step in group], scheme, numbers, counter(device), group[0].seed, number)
        for step in group:
            step.done()
    return left


def _takes(step: ParameterStep, books: bool) -> bool:
    """Say whether the kernels take a parameter; small ones of a scheme with codes have float32 moments."""
    p, g, first = step.parameter, step.gradient, step.formats["first"]
    plain = p.dtype is g.dtype and p.dtype in TYPES and p.is_contiguous() and g.is_contiguous()
    if not plain or (p.data_ptr() | g.data_ptr()) % _ALIGNED:
        return False
    return not books or first.format is None or first.block in BLOCKS


def _row(step: ParameterStep) -> tuple[int, ...]:
    """Return what ``launches`` takes of a parameter."""
    p, state = step.parameter, step.state
    parts = [state[name].data_ptr() if name in state else 0 for name in _PARTS]
    if "weights" in step.formats and in_parameter(step.formats["weights"], p.dtype):
        parts[-2:] = 0, 0
    plain = all(step.formats[slot].format is None for slot in ("first", "second")) and "weights" not in step.formats
    offset = key_of(0, 0, step.index, "weights").offset
    return p.data_ptr(), step.gradient.data_ptr(), *parts, plain, offset, p.numel()


class OptimizerBatch:
    """A group of parameters that the kernels take all, with what stays between steps worked out.

    A step of many small parameters costs the host more time than the device; this is the fast path for it. It is taken
    only while parameters, states and gradients are what they were: one device and dtype, contiguous, every gradient
    there, all of one step.

    Args:
        steps: Of one step of the group, all of which the kernels took.
    """

    def __init__(self, steps: Sequence[ParameterStep]) -> None:
        self.parameters = [step.parameter for step in steps]
        self.states = [step.state for step in steps]
        self._ids = list(map(id, self.states))
        self._dtype, self._device = steps[0].parameter.dtype, steps[0].parameter.get_device()
        self._moments = [(step.state["first"], step.state["second"], step.state.get("weights")) for step in steps]
        self._shapes = [step.parameter.shape for step in steps]
        self._parts = launches([_row(step) for step in steps])

    def launches(self, present: set[int]) -> Sequence[Launch] | None:
        """Return the launches of a step with the gradients that are there now, None where ``optimizer_steps`` has to.

        Args:
            present: The ``id`` of each state that the optimizer has now.
        """
        if not present.issuperset(self._ids):
            return None
        addresses = []
        for p, shape, state, kept in zip(self.parameters, self._shapes, self.states, self._moments, strict=True):
            if not self._is_as_before(p, shape, state, kept):
                return None
            assert p.grad is not None
            addresses.append((p.data_ptr(), p.grad.data_ptr()))
        table = np.array(addresses, np.int64)
        if (table % _ALIGNED).any():
            return None
        for i, part in enumerate(self._parts):
            start = i * len(part.table)
            part.table[: part.entries, :2] = table[start : start + part.entries]
        return self._parts

    def _is_as_before(self, p: Tensor, shape: torch.Size, state: Mapping[str, Any], kept: tuple[Any, ...]) -> bool:
        g, dtype = p.grad, self._dtype
        if g is None or g.dtype is not dtype or g.layout is not torch.strided or not g.is_contiguous():
            return False
        if p.dtype is not dtype or p.shape != shape or g.shape != shape or not p.is_contiguous():
            return False
        if state["step"] != self.states[0]["step"] or p.get_device() != self._device:
            return False
        return state["first"] is kept[0] and state["second"] is kept[1] and state.get("weights") is kept[2]

    def step(
        self, parts: Sequence[Launch], scheme: Scheme, numbers: Numbers, counter: Tensor, seed: int, number: int
    ) -> None:
        """Do the step of which ``launches`` returned the launches."""
        launch(parts, self.parameters, scheme, numbers, counter, seed, number)
        for state in self.states:
            state["step"] = number
