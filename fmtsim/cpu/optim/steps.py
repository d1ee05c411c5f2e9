# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on the CPU: which schemes and parameters the kernels take, and what they get."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from fmtsim.cpu.optim.moments import (
    ALIGNMENT,
    BITS,
    decode_bytes,
    encode_bytes,
    step_codes,
    step_floats,
    step_logarithms,
    takes_bytes,
)
from fmtsim.formats.spec import CodebookFormat, LogFormat
from fmtsim.spec.optimizer import Book, Counter, ParameterStep, Scheme, StateFormat, book_of

RULES = {
    "adamw": ("adam", ("first", "second")),
    "adam": ("adam", ("first", "second")),
    "lion": ("lion", ("first",)),
    "sgd": ("sgd", ("first",)),
    "nesterov": ("nesterov", ("first",)),
    "madam(base=2, round_update=True)": ("rounded", ("second",)),
    "madam(base=2, round_update=False)": ("free", ("second",)),
}
"""The kernels' name of a rule, and the states that it has."""


def supports_optimizer(rule: str, scheme: Scheme) -> bool:
    """Return True if kernels know a rule and the states of a scheme: float32, or codes of codebooks of 8 bits.

    With float32 they know weights that are integers with scales of rows, and under Madam logarithms.
    """
    if rule not in RULES or scheme.nonfinite == "skip":
        return False
    kind, names = RULES[rule]
    moments = [getattr(scheme, name) for name in names]
    if scheme.weights is not None:
        logs = isinstance(scheme.weights.format, LogFormat)
        covered = logs if kind in ("rounded", "free") else takes_bytes(scheme.weights)
        return covered and all(fmt.format is None for fmt in moments)
    if kind in ("rounded", "free"):
        return False
    if all(fmt.format is None for fmt in moments):
        return True
    (block, bits), *others = {(fmt.block, fmt.bits) for fmt in moments}
    return not others and block[1] is not None and None not in map(book, moments)


def optimizer_steps(
    rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
) -> Sequence[ParameterStep]:
    """Do the steps that kernels cover, of parameters on the CPU; return the others."""
    if not supports_optimizer(rule, scheme):
        return steps
    refused = []
    for step in steps:
        if not _takes(rule, step):
            refused.append(step)
            continue
        bad = _step(rule, step, scheme.nonfinite == "zero")
        counter(step.parameter.device).add_(bad)
        torch.autograd.graph.increment_version([step.parameter])  # autograd may have saved it for a backward
        step.done()
    return refused


def _step(rule: str, step: ParameterStep, zeroing: bool) -> int:
    """Do the step of a parameter that the kernels take; return how many elements of its gradient are not finite."""
    kind, names = RULES[rule]
    p, g, formats, state, numbers = step.parameter, step.gradient, step.formats, step.state, step.numbers
    moments, weights = [state[name] for name in names], formats.get("weights")
    if weights is not None and isinstance(weights.format, LogFormat):
        tensors = state["second"], state["weights"], state["weights_scale"]
        return step_logarithms(kind == "rounded", p, g, *tensors, weights.format, numbers, zeroing)
    if weights is not None:
        codes, scales, row = state["weights"], state["weights_scale"], weights.block_of(tuple(p.shape))
        values = decode_bytes(codes, scales, row)
        bad = step_floats(kind, values, g, moments, numbers, zeroing)
        encode_bytes(values, weights, row, step.key("weights"), codes, scales, p)
        return bad
    if formats[names[0]].format is None:
        return step_floats(kind, p, g, moments, numbers, zeroing)
    books, block = [book(formats[name]) for name in names], formats[names[0]].block[1]
    assert block is not None  # supports_optimizer asked
    scaled = [(state[name], state[f"{name}_scale"], codes) for name, codes in zip(names, books, strict=True) if codes]
    return step_codes(kind, p, g, scaled, numbers, block, zeroing)


def _takes(rule: str, step: ParameterStep) -> bool:
    """Return True if kernels take a parameter; small ones of a scheme with codes have float32 moments."""
    p, g = step.parameter, step.gradient
    formats = list(step.formats.values())
    if not (p.dtype is g.dtype is torch.float32 and p.is_contiguous() and g.is_contiguous()):
        return False
    weights = step.formats.get("weights")
    if rule.startswith("madam"):
        logs = weights is not None and isinstance(weights.format, LogFormat) and weights.format.bits == BITS
        return logs and weights is not None and weights.rule == "fixed" and weights.block == (None, None)
    if weights is not None:
        return takes_bytes(weights) and all(fmt.format is None for fmt in formats if fmt is not weights)
    if all(fmt.format is None for fmt in formats):
        return True
    books = all(isinstance(fmt.format, CodebookFormat) and 0.0 in fmt.format.values for fmt in formats)
    bits, block = formats[0].bits, formats[0].block[1]
    return books and bits == 8 and block is not None and block % ALIGNMENT == 0


@lru_cache(maxsize=64)
def book(fmt: StateFormat) -> Book | None:
    """Return the codebook of a state, None where kernels do not know it."""
    return book_of(fmt)
