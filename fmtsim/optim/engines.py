"""Which engine does a step: fused kernels where they cover a scheme, torch operations elsewhere, equal bits both."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import CodebookFormat, FloatFormat
from fmtsim.optim.codebooks import LOWEST_KEY, Table, table_of
from fmtsim.optim.rules import Numbers, Rule
from fmtsim.optim.single import FUSED, Job, in_parameter, key_of
from fmtsim.optim.state import Scheme, StateFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Counter = Callable[[torch.device], Tensor]
CPU_ALIGNMENT = 64
"""The CPU's kernel takes blocks of a multiple of this."""

_PARTS = [f"{slot}{part}" for part in ("", "_scale", "_power", "_centre") for slot in ("first", "second")]
_PARTS += ["weights", "weights_scale"]
Kind = Literal["codebooks", "expanded", "floats", "float32"]
EXPANDED_GROUP = 128
CUDA_BLOCKS = (128, 256, 512, 1024, 2048)
CUDA_ALIGNMENT = 16


def run(jobs: Sequence[Job], rule: Rule, scheme: Scheme, counter: Counter) -> Sequence[Job]:
    """Do the jobs that kernels cover; return the others."""
    kind = covers(scheme) if rule.name in FUSED else None
    if kind is None:
        return jobs
    left, for_cuda = [], []
    for job in jobs:
        if job.parameter.is_cpu and takes_cpu(job, kind):
            counter(job.parameter.device).add_(step_on_cpu(job, scheme))
            written([job.parameter])
            job.done()
        elif on_device(job.parameter) and takes_cuda(job, kind):
            for_cuda.append(job)
        else:
            left.append(job)
    if for_cuda:
        steps_on_cuda(for_cuda, scheme, counter)
    return left


@lru_cache(maxsize=64)
def covers(scheme: Scheme) -> Kind | None:
    """Say which kernels know the states of a scheme.

    ``"codebooks"``: codes of codebooks whose largest value is 1, of 8 bits on a CPU, of 4 or 8 on CUDA.
    ``"expanded"``: E4M3 in expanded groups of 128, on CUDA. ``"floats"``: what ``float_states`` describes, on CUDA.
    ``"float32"``: that, on both. None: none do.
    """
    first, second = scheme.first, scheme.second
    if scheme.nonfinite == "skip":
        return None
    if scheme.weights is None and first.format is None and second.format is None:
        return "float32"
    if float_states(scheme) is not None:
        return "floats"
    if scheme.weights is not None:
        return None
    if all(fmt.expand and fmt.block == EXPANDED_GROUP and fmt.format == get_format("e4m3") for fmt in (first, second)):
        plain = all(not fmt.stochastic and not fmt.least for fmt in (first, second))
        return "expanded" if plain else None
    tables = table(first), table(second)
    if first.block != second.block or not isinstance(first.block, int) or first.bits != second.bits or None in tables:
        return None
    return "codebooks"


@lru_cache(maxsize=64)
def float_states(scheme: Scheme) -> Any:
    """Return the ``States`` of fmtsim.cuda.optim.moments_floats of a scheme, None where those kernels do not know it.

    All states are floating-point codes (or float32), with scales of tensors, of blocks of one size, or none.
    """
    formats = [scheme.first, scheme.second] + ([] if scheme.weights is None else [scheme.weights])
    if scheme.weights is not None and (scheme.minimum or scheme.whole_blocks or scheme.matrices):
        return None
    if not all(fmt.format is None or _is_float_code(fmt) for fmt in formats):
        return None
    blocks = {fmt.block for fmt in formats if fmt.scale != "none"} or {"tensor"}
    block = blocks.pop()
    if blocks or (block != "tensor" and block not in CUDA_BLOCKS):
        return None
    if scheme.first.stochastic or scheme.second.stochastic or (scheme.weights and scheme.weights.format is None):
        return None
    floats = importlib.import_module("fmtsim.cuda.optim.moments_floats")
    slots = [floats.Slot(fmt.format, fmt.scale, fmt.least, fmt.rounding.random_bits or 0) for fmt in formats]
    return floats.States(slots[0], slots[1], slots[2] if len(slots) > 2 else None, 0 if block == "tensor" else block)


def _is_float_code(fmt: StateFormat) -> bool:
    floats = importlib.import_module("fmtsim.cuda.optim.moments_floats")
    known = isinstance(fmt.format, FloatFormat) and floats.takes(fmt.format, fmt.rounding)
    return known and not fmt.expand and fmt.scale in floats.RULES


@lru_cache(maxsize=64)
def table(fmt: StateFormat) -> Table | None:
    """Return the codebook of a state for kernels, None where they do not know its format."""
    if not isinstance(fmt.format, CodebookFormat) or fmt.scale != "amax" or fmt.expand:
        return None
    if len(fmt.format.values) not in (16, 256) or fmt.format.values[-1] != 1.0:
        return None
    try:
        return table_of(fmt.format, fmt.ties)
    except ArgumentError:
        return None


def takes_cpu(job: Job, kind: Kind) -> bool:
    """Say whether the CPU's kernels take a parameter that lies there; small ones with float32 moments too."""
    formats = [job.formats["first"], job.formats["second"]]
    if not _is_plain(job, (torch.float32,)) or "weights" in job.formats:
        return False
    if all(fmt.format is None for fmt in formats):
        return True
    known = all(isinstance(fmt.format, CodebookFormat) and 0.0 in fmt.format.values for fmt in formats)
    first = formats[0]
    return kind == "codebooks" and known and first.bits == 8 and int(first.block) % CPU_ALIGNMENT == 0


def takes_cuda(job: Job, kind: Kind) -> bool:
    """Say whether the CUDA kernels take a parameter that lies there; small ones with float32 moments too."""
    first = job.formats["first"]
    if not _is_plain(job, FLOATS) or (job.parameter.data_ptr() | job.gradient.data_ptr()) % CUDA_ALIGNMENT:
        return False
    return kind != "codebooks" or first.format is None or first.block in CUDA_BLOCKS


def _is_plain(job: Job, dtypes: Sequence[torch.dtype]) -> bool:
    p, g = job.parameter, job.gradient
    return p.dtype is g.dtype and p.dtype in dtypes and p.is_contiguous() and g.is_contiguous()


def step_on_cpu(job: Job, scheme: Scheme) -> int:
    """Do a step with the CPU's kernel; return how many elements of the gradient are not finite."""
    zeroing = scheme.nonfinite == "zero"
    tensors = [job.parameter, job.gradient, job.state["first"], job.state["second"]]
    done: int
    if job.formats["first"].format is None:
        done = _cpu().adam_plain(tensors, job.numbers, zeroing)
    else:
        tensors += [job.state["first_scale"], job.state["second_scale"]]
        done = _cpu().adam(tensors, _cpu_books(scheme), job.numbers, job.formats["first"].block, zeroing)
    return done


def steps_on_cuda(jobs: Sequence[Job], scheme: Scheme, counter: Counter) -> None:
    """Do the steps of many parameters with the CUDA kernels, those with equal scalars together."""
    together: dict[tuple[torch.device, torch.dtype, Numbers, int], list[Job]] = {}
    for job in jobs:
        together.setdefault((job.parameter.device, job.parameter.dtype, job.numbers, job.step), []).append(job)
    for (device, _, numbers, step), group in together.items():
        parts = _cuda().launches([_row(job) for job in group])
        launch(parts, group[0].parameter, scheme, numbers, counter(device), group[0].seed, step)
        written([job.parameter for job in group])
        for job in group:
            job.done()


def written(parameters: Sequence[Tensor]) -> None:
    """Tell autograd that kernels wrote parameters, which it may have saved for a backward."""
    torch.autograd.graph.increment_version(parameters)


def launch(parts: Any, like: Tensor, scheme: Scheme, numbers: Numbers, counter: Tensor, seed: int, step: int) -> None:
    """Start the CUDA kernels on what their ``launches`` made of parameters of one step."""
    zeroing = scheme.nonfinite == "zero"
    kind = covers(scheme)
    if kind in ("floats", "float32"):
        states = float_states(scheme)
        floats = importlib.import_module("fmtsim.cuda.optim.moments_floats")
        floats.adam(parts, like, states, numbers, zeroing, counter, key_of(seed, step, 0, "first"))
        return
    books = _cuda_books(scheme) if kind == "codebooks" else None
    _cuda().adam(parts, like, books, numbers, scheme.first.block, zeroing, counter)


def _row(job: Job) -> tuple[int, ...]:
    p, state = job.parameter, job.state
    parts = [state[name].data_ptr() if name in state else 0 for name in _PARTS]
    if "weights" in job.formats and in_parameter(job.formats["weights"], p.dtype):
        parts[-2:] = 0, 0
    plain = (
        job.formats["first"].format is None and job.formats["second"].format is None and "weights" not in job.formats
    )
    place = key_of(0, 0, job.index, "weights").offset
    return p.data_ptr(), job.gradient.data_ptr(), *parts, plain, place, p.numel()


class Batch:
    """A group of parameters that the CUDA kernel takes all, with what stays between steps worked out.

    A step of many small parameters costs the host more time than the device; this is the short way for it. It is taken
    only while parameters, states and gradients are what they were: one device and dtype, plain, every gradient there,
    all of one step.

    Args:
        jobs: Of one step of the group, all of which the kernel took.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.parameters = [job.parameter for job in jobs]
        self.states = [job.state for job in jobs]
        self._ids = list(map(id, self.states))
        self._dtype, self._device = jobs[0].parameter.dtype, jobs[0].parameter.get_device()
        self._moments = [(job.state["first"], job.state["second"], job.state.get("weights")) for job in jobs]
        self._shapes = [job.parameter.shape for job in jobs]
        self._parts = _cuda().launches([_row(job) for job in jobs])

    def gathered(self, held: set[int]) -> Any:
        """Return the launches of a step with the gradients that are there now, None where the long way has to do it.

        Args:
            held: The ``id`` of each state that the optimizer has now.
        """
        if not held.issuperset(self._ids):
            return None
        first, dtype, device = self.states[0]["step"], self._dtype, self._device
        addresses = []
        for p, shape, state, moments in zip(self.parameters, self._shapes, self.states, self._moments, strict=True):
            g = p.grad
            if g is None or g.dtype is not dtype or g.layout is not torch.strided or not g.is_contiguous():
                return None
            if (
                p.dtype is not dtype
                or p.shape != shape
                or g.shape != shape
                or not p.is_contiguous()
                or state["step"] != first
            ):
                return None
            if state["first"] is not moments[0] or state["second"] is not moments[1]:
                return None
            if state.get("weights") is not moments[2] or p.get_device() != device:
                return None
            addresses.append((p.data_ptr(), g.data_ptr()))
        table = np.array(addresses, np.int64)
        if (table % CUDA_ALIGNMENT).any():
            return None
        for i, part in enumerate(self._parts):
            start = i * len(part.table)
            part.table[: part.entries, :2] = table[start : start + part.entries]
        return self._parts


def batches_of(jobs: Sequence[Job], groups: Sequence[Mapping[str, Any]]) -> list[Batch] | None:
    """Return a batch a group where the kernels took all parameters, those of a group on one device; else None."""
    by_parameter = {job.parameter: job for job in jobs}
    found = []
    for group in groups:
        chosen = [by_parameter.get(p) for p in group["params"]]
        present = [job for job in chosen if job is not None]
        kinds = {(job.parameter.device, job.parameter.dtype) for job in present}
        if len(kinds) != 1 or len(present) < len(chosen):
            return None
        found.append(Batch(present))
    return found


def on_device(p: Tensor) -> bool:
    """Say whether a parameter lies where the CUDA engine's kernels run."""
    return p.is_cuda and bool(importlib.import_module("fmtsim.cuda").serves(p.get_device()))


def _book(fmt: StateFormat, *more: Any) -> tuple[Any, ...]:
    found = table(fmt)
    assert found is not None and isinstance(fmt.format, CodebookFormat)  # covers() asked
    return *found, LOWEST_KEY, fmt.format.values.index(0.0) if fmt.keep_sign else -1, fmt.least, *more


@lru_cache(maxsize=64)
def _cpu_books(scheme: Scheme) -> tuple[Any, Any]:
    return _cpu().Book(*_book(scheme.first)), _cpu().Book(*_book(scheme.second))


@lru_cache(maxsize=64)
def _cuda_books(scheme: Scheme) -> Any:
    book = _cuda().Book
    return _cuda().Books(book(*_book(scheme.first, True)), book(*_book(scheme.second, False)))


def _cpu() -> Any:
    return importlib.import_module("fmtsim.cpu.optim.moments")


def _cuda() -> Any:
    return importlib.import_module("fmtsim.cuda.optim.moments")
