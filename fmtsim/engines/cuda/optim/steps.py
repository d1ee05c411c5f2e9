# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on CUDA: which schemes and parameters the kernels take, and what they get."""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda.optim.launch import CHUNK, Launch, launch, launches
from fmtsim.engines.cuda.optim.schemes import BLOCKS, RULES, TYPES, Kernels, kernels_of
from fmtsim.spec.optimizer import Counter, Hyperparameters, Numbers, ParameterStep, Scheme, in_parameter, key_of

_ALIGNED = 16
_MOMENTS = [f"{slot}{part}" for part in ("", "_scale") for slot in ("first", "second")]
_GROUPS = [f"{slot}{part}" for part in ("_power", "_centre") for slot in ("first", "second")]
_WEIGHTS = ["weights", "weights_scale"]
_KEPT = ("first", "second", "weights")


def supports_optimizer(rule: str, scheme: Scheme) -> bool:
    """Say whether kernels know a rule and the states of a scheme."""
    return rule in RULES and kernels_of(rule, scheme) is not None


def optimizer_steps(
    rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
) -> Sequence[ParameterStep]:
    """Do the steps that kernels cover, of parameters on devices that they run on; return the others.

    Steps with equal scalars share launches, and so do those of a group that are counted on the device.
    """
    kernels = kernels_of(rule, scheme) if rule in RULES else None
    if kernels is None:
        return steps
    left: list[ParameterStep] = []
    together: dict[tuple[torch.device, torch.dtype, Numbers | Hyperparameters, int], list[ParameterStep]] = {}
    for step in steps:
        if _takes(step, kernels):
            p = step.parameter
            together.setdefault((p.device, p.dtype, step.live or step.numbers, step.step), []).append(step)
        else:
            left.append(step)
    for (device, _, scalars, number), group in together.items():
        parts = launches([_row(step, kernels) for step in group])
        parameters = [step.parameter for step in group]
        launch(parts, parameters, rule, scheme, scalars, counter(device), group[0].seed, number)
        for step in group:
            if step.live is None:
                step.done()
    return left


def _takes(step: ParameterStep, kernels: Kernels) -> bool:
    """Say whether the kernels take a parameter; small ones of a scheme with codes have float32 moments."""
    p, g = step.parameter, step.gradient
    plain = p.dtype is g.dtype and p.dtype in TYPES and p.is_contiguous() and g.is_contiguous()
    if not plain or (p.data_ptr() | g.data_ptr()) % _ALIGNED:
        return False
    if kernels.keeps_weights and "weights" not in step.formats:
        return _is_plain(step) and kernels.logs is None
    moments = [fmt for slot, fmt in step.formats.items() if slot != "weights"]
    return not kernels.books or all(fmt.format is None or fmt.block[1] in BLOCKS for fmt in moments)


def _is_plain(step: ParameterStep) -> bool:
    return all(fmt.format is None for fmt in step.formats.values())


def _row(step: ParameterStep, kernels: Kernels) -> tuple[int, ...]:
    """Return what ``launches`` takes of a parameter."""
    p, state, weights = step.parameter, step.state, step.formats.get("weights")
    expanded = kernels.file == "optimizer_expanded.cu"
    names = _MOMENTS + (_GROUPS if expanded else _WEIGHTS)
    parts = [state[name].data_ptr() if name in state else 0 for name in names]
    row = weights.block_of(tuple(p.shape)) if weights is not None and kernels.rows else 0
    if weights is not None and in_parameter(weights, p.dtype):
        parts[-2:] = 0, 0
    parts += [] if expanded else [row, 0]
    count = 0 if step.live is None else state["step"].data_ptr()
    offset = key_of(0, 0, step.index, "weights").offset
    plain = _is_plain(step)
    return p.data_ptr(), step.gradient.data_ptr(), *parts, count, plain, offset, p.numel(), row or CHUNK


class OptimizerBatch:
    """A group of parameters that the kernels take all, with what stays between steps worked out.

    A step of many small parameters costs the host more time than the device; this is the fast path for it. It is taken
    only while parameters, states and gradients are what they were: one device and dtype, contiguous, every gradient
    there, all of one step.

    Args:
        steps: Of one step of the group, all of which the kernels took.
        rule, scheme: Theirs.
    """

    def __init__(self, steps: Sequence[ParameterStep], rule: str, scheme: Scheme) -> None:
        kernels = kernels_of(rule, scheme)
        assert kernels is not None  # they took the steps
        self._rule, self._scheme = rule, scheme
        self.live = steps[0].live is not None
        self._names = (*_KEPT, "step") if self.live else _KEPT
        self.parameters = [step.parameter for step in steps]
        self.states = [step.state for step in steps]
        self._ids = list(map(id, self.states))
        self._dtype, self._device = steps[0].parameter.dtype, steps[0].parameter.get_device()
        self._moments = [tuple(map(step.state.get, self._names)) for step in steps]
        self._shapes = [step.parameter.shape for step in steps]
        self._parts = launches([_row(step, kernels) for step in steps])

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
        if p.get_device() != self._device or not all(map(is_, map(state.get, self._names), kept)):
            return False
        return self.live or state["step"] == self.states[0]["step"]

    def step(
        self, parts: Sequence[Launch], scalars: Numbers | Hyperparameters, counter: Tensor, seed: int, number: int
    ) -> None:
        """Do the step of which ``launches`` returned the launches; number: of the step, where the host counts."""
        launch(parts, self.parameters, self._rule, self._scheme, scalars, counter, seed, number)
        for state in () if self.live else self.states:
            state["step"] = number
