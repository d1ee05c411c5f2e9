"""One step of one parameter with torch operations: decode, update, encode."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from fmtsim.formats.spec import LogFormat
from fmtsim.optim import codec
from fmtsim.optim.rules import ADAM, ADAMW, CONSTANTS, Numbers, Rule
from fmtsim.optim.state import StateFormat
from fmtsim.spec.cast import RandomKey

KINDS = ("first", "second", "weights")
PARAMETER_BITS, KIND_BITS = 20, 2
PART = {False: 1 << 17, True: 1 << 22}
"""Elements of a part of a step on a CPU and on CUDA."""

FUSED = (ADAMW.name, ADAM.name)
"""Rules whose update is a kernel on a CPU."""


@dataclass(frozen=True, slots=True)
class Job:
    """Say what one step of one parameter needs.

    Args:
        parameter: The parameter.
        gradient: Its gradient, dense, of its shape.
        state: What is remembered of it; ``done`` counts the step when all of it is written.
        step: The step's number, from 1.
        formats: How each state is kept.
        numbers: The scalars of the step.
        seed: Of stochastic rounding.
        index: The parameter's place among all of them.
    """

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]
    step: int
    formats: Mapping[str, StateFormat]
    numbers: Numbers
    seed: int
    index: int

    def key(self, kind: str) -> RandomKey:
        """Return the key of the random words of a state in this step: no generator, so no order of calls."""
        return key_of(self.seed, self.step, self.index, kind)

    def done(self) -> None:
        """Count the step."""
        self.state["step"] = self.step


def key_of(seed: int, step: int, index: int, kind: str) -> RandomKey:
    """Return the Philox key of a state: the seed, and an offset of step, parameter and kind of state."""
    place = (step << PARAMETER_BITS | index) << KIND_BITS | KINDS.index(kind)
    return RandomKey(seed, place & ((1 << 63) - 1))


def local(x: Tensor) -> Tensor:
    """Return what lies here of a distributed tensor (FSDP2), other tensors as they are; without gradients."""
    to_local = getattr(x, "to_local", None)
    if to_local is None:
        return x
    with torch.no_grad():
        shard: Tensor = to_local()
    return shard


def in_parameter(fmt: StateFormat, dtype: torch.dtype) -> bool:
    """Say whether a parameter of a dtype holds its weights itself, so that no copy of them is kept."""
    native = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return fmt.format is not None and fmt.scale == "none" and native.get(dtype) == fmt.format.name


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
    """Return what is remembered before a parameter's first step: moments of zero, and its weights as they are kept.

    The parameter itself does not change before the step.
    """
    zero = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
    state: dict[str, Any] = {"step": 0, "shape": list(p.shape)}
    for slot, fmt in formats.items():
        if slot != "weights":
            put(state, slot, _zeros(codec.encode(zero, fmt, {}, RandomKey(seed)), fmt))
        elif not in_parameter(fmt, p.dtype):
            put(state, slot, codec.encode(values_of(p), fmt, {}, key_of(seed, 0, index, "weights")))
    return state | rule.constants(values_of(p))


def _zeros(parts: codec.Parts, fmt: StateFormat) -> codec.Parts:
    """Let encoded zeros decode to zero also where the format has none: with a scale of zero."""
    if fmt.scale == "amax" and not fmt.expand:
        parts["scale"] = torch.zeros_like(parts["scale"])
    return parts


def values_of(p: Tensor) -> Tensor:
    """Return a parameter's numbers as contiguous float32."""
    return p.detach().to(torch.float32).contiguous()


def step(job: Job, rule: Rule, nonfinite: str) -> None:
    """Do one step of a parameter, a part after the other where blocks allow it: temporaries stay small."""
    for part in _parts(job, nonfinite):
        _step(part, rule, nonfinite)
    job.done()


def _parts(job: Job, nonfinite: str) -> Iterator[Job]:
    """Yield jobs of some blocks each, whose tensors are views; the job itself where its scales are of the whole."""
    p, count, size = job.parameter, job.parameter.numel(), PART[job.parameter.is_cuda]
    formats = job.formats.values()
    apart = all(fmt.scale == "none" or isinstance(fmt.block, int) for fmt in formats) and "weights" not in job.formats
    apart = apart and nonfinite != "skip" and not any(fmt.stochastic for fmt in formats)
    if count <= size or not apart or not p.is_contiguous() or any(size % fmt.block_of((1,)) for fmt in formats):
        yield job
        return
    flat, gradient = p.detach().view(-1), job.gradient.reshape(-1)
    for first in range(0, count, size):
        last = min(first + size, count)
        state = {"step": job.step} | {name: job.state[name] for name in CONSTANTS if name in job.state}
        for slot, fmt in job.formats.items():
            for name, tensor in parts_of(job.state, slot).items():
                unit = 8 / min(fmt.bits, 8) if name == "codes" else fmt.block_of((1,))
                state[slot if name == "codes" else f"{slot}_{name}"] = tensor[int(first / unit) : ceil(last / unit)]
        views = {"parameter": flat[first:last], "gradient": gradient[first:last], "state": state}
        yield replace(job, **views)  # type: ignore[arg-type]  # fields by name


def _step(job: Job, rule: Rule, nonfinite: str) -> None:
    """Do one step: everything is worked out before anything is written."""
    g = job.gradient.to(torch.float32).contiguous()
    shape = tuple(job.parameter.shape)
    old = {slot: codec.decode(parts_of(job.state, slot), job.formats[slot], shape) for slot in rule.slots}
    constants = {name: job.state[name] for name in CONSTANTS if name in job.state}
    kept = job.formats.get("weights")
    if kept is not None and isinstance(kept.format, LogFormat) and rule.steps is not None:
        codes, p, new = _logarithms(job, rule, g, old, kept)
    else:
        codes, p, new = None, *_updated(job, rule, _weights(job, kept), g, old | constants)
    if nonfinite != "propagate":
        p, new = _without(g, job, kept, p, new, old, nonfinite)
    parts = {
        slot: codec.encode(value, job.formats[slot], parts_of(job.state, slot), job.key(slot))
        for slot, value in new.items()
    }
    weights = None
    if kept is not None:
        previous = parts_of(job.state, "weights")
        weights = codec.encode(p, kept, previous, job.key("weights")) if codes is None else previous | {"codes": codes}
        p = codec.decode(weights, kept, shape)
    for slot, part in parts.items():
        put(job.state, slot, part)
    if weights is not None and kept is not None and not in_parameter(kept, job.parameter.dtype):
        put(job.state, "weights", weights)
    job.parameter.copy_(p)


def _updated(job: Job, rule: Rule, p: Tensor, g: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a rule makes of a parameter and its states; on a CPU a kernel has the same bits sooner."""
    if not p.is_cpu or rule.name not in FUSED:
        return rule.update(p, g, states, job.numbers)
    p, m, v = (x.clone(memory_format=torch.contiguous_format) for x in (p, states["first"], states["second"]))
    importlib.import_module("fmtsim.cpu.optim.moments").adam_plain((p, g, m, v), job.numbers, False)
    return p, {"first": m, "second": v}


def _weights(job: Job, kept: StateFormat | None) -> Tensor:
    """Return the numbers that a step starts from: the kept ones, else the parameter's own."""
    if kept is None or in_parameter(kept, job.parameter.dtype):
        return values_of(job.parameter)
    return codec.decode(parts_of(job.state, "weights"), kept, tuple(job.parameter.shape))


def _logarithms(
    job: Job, rule: Rule, g: Tensor, old: dict[str, Tensor], kept: StateFormat
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Move the codes of weights kept as logarithms; return them packed, their values and the new states."""
    assert isinstance(kept.format, LogFormat) and rule.steps is not None
    fmt, previous = kept.format, parts_of(job.state, "weights")
    codes = codec.unpacked(previous["codes"], fmt, g.numel()).to(torch.int64).view(g.shape)
    magnitude, negative = codes & fmt.max_code, codes & ~fmt.max_code
    signs = torch.where(negative != 0, -1.0, 1.0)
    falls, new = rule.steps(g, signs, old, job.numbers, fmt.gamma)
    moved = (magnitude - falls).clamp(0, fmt.max_code) | negative
    packed = codec.packed(moved.reshape(-1), fmt)
    return packed, codec.decode(previous | {"codes": packed}, kept, tuple(g.shape)), new


def _without(
    g: Tensor, job: Job, kept: StateFormat | None, p: Tensor, new: dict[str, Tensor], old: dict[str, Tensor], rule: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Leave out what gradients that are not finite would do: those elements ("zero") or all of them ("skip")."""
    bad = ~torch.isfinite(g)
    before = _weights(job, kept)
    if rule == "skip":
        bad = bad.any()
        return torch.where(bad, before, p), {slot: torch.where(bad, old[slot], value) for slot, value in new.items()}
    return torch.where(bad, before, p), {slot: torch.where(bad, 0.0, value) for slot, value in new.items()}


def count_nonfinite(g: Tensor) -> Tensor:
    """Return how many elements of a gradient are NaN or infinite, int64, 0-d, on its device."""
    return (~torch.isfinite(g)).sum()
