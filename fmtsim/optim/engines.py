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
from fmtsim.optim.rules import ADAM, ADAMW, Rule
from fmtsim.optim.single import Job
from fmtsim.optim.state import FLOAT32, Scheme, StateFormat

ALIGNMENT = 64
"""Kernels take blocks of a multiple of this."""

Counter = Callable[[torch.device], Tensor]


def run(jobs: Sequence[Job], rule: Rule, scheme: Scheme, counter: Counter) -> Sequence[Job]:
    """Do the jobs that kernels cover; return the others."""
    if rule not in (ADAMW, ADAM) or not covers(scheme):
        return jobs
    left = []
    for job in jobs:
        if job.parameter.is_cpu and _is_plain(job) and job.formats["first"] is not FLOAT32:
            counter(job.parameter.device).add_(_step_on_cpu(job, scheme))
        else:
            left.append(job)
    return left


@lru_cache(maxsize=64)
def covers(scheme: Scheme) -> bool:
    """Say whether kernels know the states of a scheme: bytes of codebooks whose largest value is 1."""
    return (
        scheme.weights is None
        and scheme.nonfinite != "skip"
        and scheme.first.block == scheme.second.block
        and isinstance(scheme.first.block, int)
        and scheme.first.block % ALIGNMENT == 0
        and table(scheme.first) is not None
        and table(scheme.second) is not None
    )


@lru_cache(maxsize=64)
def table(fmt: StateFormat) -> Table | None:
    """Return the codebook of a state for kernels, None where they do not know its format."""
    if not isinstance(fmt.format, CodebookFormat) or fmt.scale != "amax" or fmt.expand:
        return None
    if len(fmt.format.values) != 256 or fmt.format.values[-1] != 1.0:
        return None
    try:
        return table_of(fmt.format, fmt.ties)
    except ArgumentError:
        return None


def zero_of(fmt: StateFormat) -> int:
    """Return the code below which negative numbers that round to zero go, -1 where none do."""
    return fmt.format.values.index(0.0) if fmt.keep_sign and isinstance(fmt.format, CodebookFormat) else -1


def _is_plain(job: Job) -> bool:
    p, g = job.parameter, job.gradient
    return p.dtype == g.dtype == torch.float32 and p.is_contiguous() and g.is_contiguous()


def _step_on_cpu(job: Job, scheme: Scheme) -> int:
    names = ("first", "second", "first_scale", "second_scale")
    block = job.formats["first"].block
    tensors = (job.parameter, job.gradient, *(job.state[name] for name in names))
    zeroing = scheme.nonfinite == "zero"
    done: int = _cpu().adam(tensors, _books(scheme), job.numbers, block, zeroing)
    return done


@lru_cache(maxsize=64)
def _books(scheme: Scheme) -> tuple[Any, Any]:
    return _book(scheme.first), _book(scheme.second)


def _book(fmt: StateFormat) -> Any:
    found = table(fmt)
    assert found is not None  # covers() asked
    return _cpu().Book(*found, LOWEST_KEY, zero_of(fmt), fmt.least)


def _cpu() -> Any:
    return importlib.import_module("fmtsim.cpu.moments")


def forget(optimizer: Any) -> None:
    """Drop what engines remember of an optimizer whose state tensors were replaced."""
