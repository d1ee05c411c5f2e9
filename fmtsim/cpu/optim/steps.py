# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on the CPU: which schemes and parameters the kernels take, and what they get."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from fmtsim.cpu.optim.moments import ALIGNMENT, adam, adam_plain
from fmtsim.formats.spec import CodebookFormat
from fmtsim.spec.optimizer import Book, Counter, ParameterStep, Scheme, book_of

RULES = ("adamw", "adam")


def supports_optimizer(rule: str, scheme: Scheme) -> bool:
    """Say whether kernels know a rule and the states of a scheme: float32, or codes of codebooks of 8 bits."""
    if rule not in RULES or scheme.nonfinite == "skip" or scheme.weights is not None:
        return False
    first, second = scheme.first, scheme.second
    if first.format is None and second.format is None:
        return True
    blocks = first.block == second.block and isinstance(first.block, int)
    return blocks and first.bits == second.bits and books(scheme) is not None


def optimizer_steps(
    rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
) -> Sequence[ParameterStep]:
    """Do the steps that kernels cover, of parameters on the CPU; return the others."""
    if not supports_optimizer(rule, scheme):
        return steps
    left, zeroing = [], scheme.nonfinite == "zero"
    for step in steps:
        if not _takes(step):
            left.append(step)
            continue
        tensors = [step.parameter, step.gradient, step.state["first"], step.state["second"]]
        if step.formats["first"].format is None:
            bad = adam_plain(tensors, step.numbers, zeroing)
        else:
            tensors += [step.state["first_scale"], step.state["second_scale"]]
            known, block = books(scheme), step.formats["first"].block
            assert known is not None and isinstance(block, int)  # supports_optimizer asked
            bad = adam(tensors, known, step.numbers, block, zeroing)
        counter(step.parameter.device).add_(bad)
        torch.autograd.graph.increment_version([step.parameter])  # autograd may have saved it for a backward
        step.done()
    return left


def _takes(step: ParameterStep) -> bool:
    """Say whether the kernels take a parameter; small ones of a scheme with codes have float32 moments."""
    p, g = step.parameter, step.gradient
    formats = [step.formats["first"], step.formats["second"]]
    if not (p.dtype is g.dtype is torch.float32 and p.is_contiguous() and g.is_contiguous()):
        return False
    if all(fmt.format is None for fmt in formats):
        return True
    known = all(isinstance(fmt.format, CodebookFormat) and 0.0 in fmt.format.values for fmt in formats)
    first = formats[0]
    return known and first.bits == 8 and isinstance(first.block, int) and first.block % ALIGNMENT == 0


@lru_cache(maxsize=64)
def books(scheme: Scheme) -> tuple[Book, Book] | None:
    """Return the codebooks of both moments, None where kernels do not know one."""
    first, second = book_of(scheme.first), book_of(scheme.second)
    return None if first is None or second is None else (first, second)
