# SPDX-License-Identifier: Apache-2.0
"""Steps of parameters: fused kernels where they cover a scheme, torch operations elsewhere, the same bits from both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.ops import load_engine
from fmtsim.formats.element import LogFormat
from fmtsim.optim import codec
from fmtsim.optim.rules import CONSTANTS, Rule, group_of
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.optimizer import FLOAT32, Counter, ParameterStep, Scheme, StateFormat, in_parameter, key_of
from fmtsim.support.errors import DeviceError
from fmtsim.support.replay.gpu import captures

_FLOAT32 = Scheme(name="fp32")
PART = {False: 1 << 17, True: 1 << 22}
"""Elements of a part of a step on a CPU and on CUDA."""


def local(x: Tensor) -> Tensor:
    """Return what lies here of a distributed tensor (FSDP2), other tensors as they are; without gradients."""
    to_local = getattr(x, "to_local", None)
    if to_local is None:
        return x
    with torch.no_grad():
        shard: Tensor = to_local()
    return shard


def parts_of(state: Mapping[str, Any], slot: str) -> codec.Parts:
    """Return the parts of a slot by their names without it."""
    return {
        "codes" if key == slot else key[len(slot) + 1 :]: value
        for key, value in state.items()
        if key == slot or key.startswith(f"{slot}_")
    }


def put(state: dict[str, Any], slot: str, parts: codec.Parts) -> None:
    """Store the parts of a slot; tensors that are there keep their memory."""
    for name, value in parts.items():
        key = slot if name == "codes" else f"{slot}_{name}"
        if key in state and state[key].shape == value.shape:
            state[key].copy_(value)
        else:
            state[key] = value.clone(memory_format=torch.contiguous_format)


def start(p: Tensor, formats: Mapping[str, StateFormat], rule: Rule, seed: int, index: int) -> dict[str, Any]:
    """Return the state before a parameter's first step: moments of zero, and encoded weights.

    The parameter itself does not change before the step.
    """
    zero = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
    state: dict[str, Any] = {"step": 0, "shape": list(p.shape)}
    for slot, fmt in formats.items():
        if slot != "weights":
            # Give encoded zeros a scale of zero, so that formats without a zero decode them to zero, too.
            parts = codec.encode(zero, fmt, {}, RandomKey(seed))
            if fmt.rule == "amax" and not fmt.expand:
                parts["scale"] = torch.zeros_like(parts["scale"])
            put(state, slot, parts)
        elif not in_parameter(fmt, p.dtype):
            put(state, slot, codec.encode(values_of(p), fmt, {}, key_of(seed, 0, index, "weights")))
    return state | rule.constants(values_of(p))


def values_of(p: Tensor) -> Tensor:
    """Return a parameter's numbers as contiguous float32."""
    return p.detach().to(torch.float32).contiguous()


def run(step: ParameterStep, rule: Rule, nonfinite: str) -> None:
    """Do one step of a parameter, a part after the other where blocks allow it: temporaries stay small."""
    for part in _parts(step, nonfinite):
        _run(part, rule, nonfinite)
    step.done()


def _parts(step: ParameterStep, nonfinite: str) -> Iterator[ParameterStep]:
    """Yield steps of some blocks each, whose tensors are views; the step itself where its scales are of the whole."""
    p, count, size = step.parameter, step.parameter.numel(), PART[step.parameter.is_cuda]
    formats = step.formats.values()
    apart = all(fmt.scaling is None or fmt.block[1] is not None for fmt in formats) and "weights" not in step.formats
    apart = apart and nonfinite != "skip" and not any(fmt.stochastic for fmt in formats)
    if count <= size or not apart or not p.is_contiguous() or any(size % fmt.block_of((1,)) for fmt in formats):
        yield step
        return
    flat, gradient = p.detach().view(-1), step.gradient.reshape(-1)
    for first in range(0, count, size):
        last = min(first + size, count)
        state = {"step": step.step} | {name: step.state[name] for name in CONSTANTS if name in step.state}
        for slot, fmt in step.formats.items():
            for name, tensor in parts_of(step.state, slot).items():
                unit = 8 / min(fmt.bits, 8) if name == "codes" else fmt.block_of((1,))
                state[slot if name == "codes" else f"{slot}_{name}"] = tensor[int(first / unit) : ceil(last / unit)]
        views = {"parameter": flat[first:last], "gradient": gradient[first:last], "state": state}
        yield replace(step, **views)  # type: ignore[arg-type]  # fields by name


def _run(step: ParameterStep, rule: Rule, nonfinite: str) -> None:
    """Do one step: everything is worked out before anything is written."""
    g = step.gradient.to(torch.float32).contiguous()
    shape = tuple(step.parameter.shape)
    old = {slot: codec.decode(parts_of(step.state, slot), step.formats[slot], shape) for slot in rule.slots}
    constants = {name: step.state[name] for name in CONSTANTS if name in step.state}
    weight_format = step.formats.get("weights")
    if weight_format is not None and isinstance(weight_format.format, LogFormat) and rule.steps is not None:
        # The codes of weights that are logarithms move by whole steps.
        fmt, previous = weight_format.format, parts_of(step.state, "weights")
        whole = codec.unpacked(previous["codes"], fmt, g.numel()).to(torch.int64).view(g.shape)
        magnitude, negative = whole & fmt.max_code, whole & ~fmt.max_code
        signs = torch.where(negative != 0, -1.0, 1.0)
        falls, new = rule.steps(g, signs, old, step.numbers, fmt.gamma)
        moved = (magnitude - falls).clamp(0, fmt.max_code) | negative
        codes = codec.packed(moved.reshape(-1), fmt)
        p = codec.decode(previous | {"codes": codes}, weight_format, tuple(g.shape))
    else:
        codes, p, new = None, *_updated(step, rule, _weights(step, weight_format), g, old | constants)
    if nonfinite != "propagate":  # leave out what gradients that are not finite would do: to their elements, or to all
        bad, skip = ~torch.isfinite(g), nonfinite == "skip"
        bad = bad.any() if skip else bad
        p = torch.where(bad, _weights(step, weight_format), p)
        new = {slot: torch.where(bad, old[slot] if skip else 0.0, value) for slot, value in new.items()}
    parts = {
        slot: codec.encode(value, step.formats[slot], parts_of(step.state, slot), step.key(slot))
        for slot, value in new.items()
    }
    weights = None
    if weight_format is not None:
        previous = parts_of(step.state, "weights")
        weights = (
            codec.encode(p, weight_format, previous, step.key("weights"))
            if codes is None
            else previous | {"codes": codes}
        )
        p = codec.decode(weights, weight_format, shape)
    for slot, part in parts.items():
        put(step.state, slot, part)
    if weights is not None and weight_format is not None and not in_parameter(weight_format, step.parameter.dtype):
        put(step.state, "weights", weights)
    step.parameter.copy_(p)


def _updated(
    step: ParameterStep, rule: Rule, p: Tensor, g: Tensor, states: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a rule makes of a parameter and its states; on a CPU a kernel has the same bits sooner."""
    if p.is_cpu and load_engine("cpu").supports_optimizer(rule.name, _FLOAT32):
        new = {name: x.clone(memory_format=torch.contiguous_format) for name, x in states.items()}
        fused = replace(step, parameter=p.clone(), gradient=g, state=new, formats=dict.fromkeys(rule.slots, FLOAT32))
        uncounted = torch.zeros((), dtype=torch.int64)
        unsupported = load_engine("cpu").optimizer_steps(rule.name, [fused], _FLOAT32, lambda _: uncounted)
        assert not unsupported  # float32, contiguous
        return fused.parameter, {slot: new[slot] for slot in rule.slots}
    return rule.update(p, g, states, step.numbers)


def _weights(step: ParameterStep, weight_format: StateFormat | None) -> Tensor:
    """Return the numbers that a step starts from: those of the stored weights, else the parameter's own."""
    if weight_format is None or in_parameter(weight_format, step.parameter.dtype):
        return values_of(step.parameter)
    return codec.decode(parts_of(step.state, "weights"), weight_format, tuple(step.parameter.shape))


def run_steps(steps: Sequence[ParameterStep], rule: Rule, scheme: Scheme, counter: Counter) -> bool:
    """Do steps; return whether the CUDA engine's kernels did all of them."""
    by_engine: dict[str, list[ParameterStep]] = {}
    for step in steps:
        p = step.parameter
        by_engine.setdefault("cuda" if on_cuda(p) else "cpu" if p.is_cpu else "", []).append(step)
    unsupported = list(by_engine.pop("", []))
    for name, engine_steps in by_engine.items():
        engine = load_engine("cuda") if name == "cuda" else load_engine("cpu")
        unsupported += engine.optimizer_steps(rule.name, engine_steps, scheme, counter)
    for step in unsupported:
        if step.live is not None:
            step = _counted(step, rule, scheme)
        # count the gradient's NaN and infinities on its device
        counter(step.gradient.device).add_((~torch.isfinite(step.gradient)).sum())
        run(step, rule, scheme.nonfinite)
    return bool(steps) and not unsupported and by_engine.keys() == {"cuda"}


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
    if torch.cuda.is_initialized() and captures():
        raise DeviceError(f"a CUDA graph cannot capture a step: {reason}")


def batches_of(
    steps: Sequence[ParameterStep], groups: Sequence[Mapping[str, Any]], rule: Rule, scheme: Scheme
) -> list[Any] | None:
    """Return the CUDA engine's batch of each group whose parameters it took all, on one device; else None."""
    by_parameter = {step.parameter: step for step in steps}
    batches = []
    for group in groups:
        chosen = [by_parameter.get(p) for p in group["params"]]
        present = [step for step in chosen if step is not None]
        kinds = {(step.parameter.device, step.parameter.dtype) for step in present}
        if len(kinds) != 1 or len(present) < len(chosen):
            return None
        batches.append(load_engine("cuda").OptimizerBatch(present, rule.name, scheme))
    return batches


def on_cuda(p: Tensor) -> bool:
    """Return True if a parameter lies where the CUDA engine's kernels run."""
    return p.is_cuda and bool(load_engine("cuda").serves(p.get_device()))
