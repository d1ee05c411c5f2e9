"""Which engine does a step: fused kernels where they cover a scheme, torch operations elsewhere, equal bits both."""

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.formats.spec import CodebookFormat
from fmtsim.optim.codebooks import LOWEST_KEY, Table, table_of
from fmtsim.optim.rules import ADAM, ADAMW, Numbers, Rule
from fmtsim.optim.single import Job
from fmtsim.optim.state import Scheme, StateFormat

Counter = Callable[[torch.device], Tensor]
CPU_ALIGNMENT = 64
"""The CPU's kernel takes blocks of a multiple of this."""

CUDA_BLOCKS = (256, 512, 1024, 2048)
CUDA_ALIGNMENT = 16


def run(jobs: Sequence[Job], rule: Rule, scheme: Scheme, counter: Counter) -> Sequence[Job]:
    """Do the jobs that kernels cover; return the others."""
    if (rule is not ADAMW and rule is not ADAM) or not covers(scheme):
        return jobs
    left, on_cuda = [], []
    for job in jobs:
        if job.parameter.is_cpu and takes_cpu(job):
            counter(job.parameter.device).add_(step_on_cpu(job, scheme))
        elif job.parameter.is_cuda and takes_cuda(job) and _serves(job.parameter.get_device()):
            on_cuda.append(job)
        else:
            left.append(job)
    if on_cuda:
        steps_on_cuda(on_cuda, scheme, counter)
    return left


@lru_cache(maxsize=64)
def covers(scheme: Scheme) -> bool:
    """Say whether kernels know the states of a scheme: bytes of codebooks whose largest value is 1."""
    return (
        scheme.weights is None
        and scheme.nonfinite != "skip"
        and scheme.first.block == scheme.second.block
        and isinstance(scheme.first.block, int)
        and table(scheme.first) is not None
        and table(scheme.second) is not None
    )


@lru_cache(maxsize=64)
def table(fmt: StateFormat) -> Table | None:
    """Return the codebook of a state for kernels, None where they do not know its format."""
    if not isinstance(fmt.format, CodebookFormat) or fmt.scale != "amax" or fmt.expand:
        return None
    if len(fmt.format.values) != 256 or fmt.format.values[-1] != 1.0 or 0.0 not in fmt.format.values:
        return None
    try:
        return table_of(fmt.format, fmt.ties)
    except ArgumentError:
        return None


def takes_cpu(job: Job) -> bool:
    """Say whether the CPU's kernel takes a parameter that lies there."""
    block = job.formats["first"].block
    return job.formats["first"].format is not None and _is_plain(job) and int(block) % CPU_ALIGNMENT == 0


def takes_cuda(job: Job) -> bool:
    """Say whether the CUDA kernel takes a parameter that lies there; small ones with float32 moments too."""
    first = job.formats["first"]
    if not _is_plain(job) or (job.parameter.data_ptr() | job.gradient.data_ptr()) % CUDA_ALIGNMENT:
        return False
    return first.format is None or first.block in CUDA_BLOCKS


def _is_plain(job: Job) -> bool:
    p, g = job.parameter, job.gradient
    return p.dtype is g.dtype is torch.float32 and p.is_contiguous() and g.is_contiguous()


def step_on_cpu(job: Job, scheme: Scheme) -> int:
    """Do a step with the CPU's kernel; return how many elements of the gradient are not finite."""
    names = ("first", "second", "first_scale", "second_scale")
    tensors = (job.parameter, job.gradient, *(job.state[name] for name in names))
    done: int = _cpu().adam(
        tensors, _cpu_books(scheme), job.numbers, job.formats["first"].block, scheme.nonfinite == "zero"
    )
    return done


def steps_on_cuda(jobs: Sequence[Job], scheme: Scheme, counter: Counter) -> None:
    """Do the steps of many parameters with the CUDA kernel, those with equal scalars together."""
    together: dict[tuple[torch.device, Numbers], list[Job]] = {}
    for job in jobs:
        together.setdefault((job.parameter.device, job.numbers), []).append(job)
    zeroing = scheme.nonfinite == "zero"
    for (device, numbers), group in together.items():
        rows = [_row(job) for job in group]
        like = group[0].parameter
        _cuda().adam(rows, like, _cuda_books(scheme), numbers, scheme.first.block, zeroing, counter(device))


def _row(job: Job) -> tuple[int, ...]:
    state, p = job.state, job.parameter
    scales = (state[f"{slot}_scale"].data_ptr() if f"{slot}_scale" in state else 0 for slot in ("first", "second"))
    moments = state["first"].data_ptr(), state["second"].data_ptr()
    return p.data_ptr(), job.gradient.data_ptr(), *moments, *scales, p.numel()


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
    return importlib.import_module("fmtsim.cpu.moments")


def _cuda() -> Any:
    return importlib.import_module("fmtsim.cuda.moments")


def _serves(index: int) -> bool:
    return bool(importlib.import_module("fmtsim.cuda").serves(index))
