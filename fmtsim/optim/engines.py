# SPDX-License-Identifier: Apache-2.0
"""Which engine does a step: fused kernels where they cover a scheme, torch operations elsewhere, equal bits both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.ops import load_engine
from fmtsim.optim import torch_step
from fmtsim.optim.rules import Rule, group_of
from fmtsim.spec.optimizer import Counter, ParameterStep, Scheme
from fmtsim.support.errors import DeviceError


def run(steps: Sequence[ParameterStep], rule: Rule, scheme: Scheme, counter: Counter) -> bool:
    """Do steps; return whether the CUDA engine's kernels did all of them."""
    by_engine: dict[str, list[ParameterStep]] = {}
    for step in steps:
        p = step.parameter
        by_engine.setdefault("cuda" if on_cuda(p) else "cpu" if p.is_cpu else "", []).append(step)
    left = list(by_engine.pop("", []))
    for name, own in by_engine.items():
        engine = load_engine("cuda") if name == "cuda" else load_engine("cpu")
        left += engine.optimizer_steps(rule.name, own, scheme, counter)
    for step in left:
        if step.live is not None:
            step = _counted(step, rule, scheme)
        counter(step.gradient.device).add_(torch_step.count_nonfinite(step.gradient))
        torch_step.run(step, rule, scheme.nonfinite)
    return bool(steps) and not left and by_engine.keys() == {"cuda"}


def _counted(step: ParameterStep, rule: Rule, scheme: Scheme) -> ParameterStep:
    """Return a step that the device counts with what the host has to know of it; waits for the device."""
    refuse_capture(
        f"no kernel of {rule.name} takes parameter {step.index} under {scheme.name!r}, and its step waits for the "
        "device; capture forward and backward alone, and step after each replay"
    )
    number = int(step.state["step"]) + 1
    assert step.live is not None  # the caller asked
    return replace(step, step=number, numbers=rule.numbers(group_of(step.live), number, scheme), live=None)


def refuse_capture(reason: str) -> None:
    """Raise DeviceError, with a reason, while a CUDA graph is captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise DeviceError(f"a CUDA graph cannot capture a step: {reason}")


def batches_of(
    steps: Sequence[ParameterStep], groups: Sequence[Mapping[str, Any]], rule: Rule, scheme: Scheme
) -> list[Any] | None:
    """Return the CUDA engine's batch of each group whose parameters it took all, on one device; else None."""
    by_parameter = {step.parameter: step for step in steps}
    found = []
    for group in groups:
        chosen = [by_parameter.get(p) for p in group["params"]]
        present = [step for step in chosen if step is not None]
        kinds = {(step.parameter.device, step.parameter.dtype) for step in present}
        if len(kinds) != 1 or len(present) < len(chosen):
            return None
        found.append(load_engine("cuda").OptimizerBatch(present, rule.name, scheme))
    return found


def on_cuda(p: Tensor) -> bool:
    """Say whether a parameter lies where the CUDA engine's kernels run."""
    return p.is_cuda and bool(load_engine("cuda").serves(p.get_device()))
