# SPDX-License-Identifier: Apache-2.0
"""The update rules, each written once: float32 numbers in, float32 numbers out, one IEEE operation at a time.

Every line of an ``update`` is one float32 operation or several in the order of the parentheses; nothing is fused, and
nothing divides by a Python number (torch would multiply by a reciprocal on some devices). ``Numbers`` are worked out in
double precision and rounded to float32 once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.spec.optimizer import Hyperparameters, Numbers, Scheme
from fmtsim.support.float64 import float64

CONSTANTS = ("limit",)
"""What rules may work out from a parameter before its first step, by name; float32 [1]."""

Group = Mapping[str, Any]
States = dict[str, Tensor]


def square_root(x: Tensor) -> Tensor:
    """Return the root of float32 numbers, correctly rounded.

    torch's own float32 root is not, on a CPU (the last bit is off for 0.6 % of numbers); the float64 root of a float32
    number is never close enough to the middle of two of them for a second rounding to go wrong.
    """
    return float64(x).sqrt().to(torch.float32)


def float32(x: float) -> float:
    """Round a double to float32."""
    return float(np.float32(x))


def numbers(**named: float) -> Numbers:
    """Return Numbers, each rounded to float32."""
    return Numbers(**{name: float32(value) for name, value in named.items()})


def _nothing(p: Tensor) -> States:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Describe an update rule.

    Args:
        name: What checkpoints and errors call it.
        slots: The states that it keeps.
        numbers: The scalars of a step, from a parameter group, the step's number (from 1) and the scheme.
        update: New parameter and new states from parameter, gradient, states and scalars, all float32.
        constants: What is worked out from a parameter before its first step and kept: some of CONSTANTS.
        steps: For weights kept as logarithms: how many codes each magnitude moves down (int64), and new states, from
            gradient, signs of the weights, states, scalars and codes an octave.
    """

    name: str
    slots: tuple[str, ...]
    numbers: Callable[[Group, int, Scheme], Numbers]
    update: Callable[[Tensor, Tensor, States, Numbers], tuple[Tensor, States]]
    constants: Callable[[Tensor], States] = _nothing
    steps: Callable[[Tensor, Tensor, States, Numbers, int], tuple[Tensor, States]] | None = None


def hyperparameters(group: Group, device: torch.device) -> Hyperparameters:
    """Return what a device works the scalars of steps out from; learning rates on it are read by each step."""
    lr = group["lr"]
    here = isinstance(lr, Tensor) and lr.device == device and lr.dtype in (torch.float32, torch.float64)
    beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), group.get("beta", 0.0)))
    rest = group.get("eps", 0.0), group["weight_decay"], group.get("bound", math.inf)
    return Hyperparameters(lr if here else float(lr), beta1, beta2, *rest)


def group_of(given: Hyperparameters) -> Group:
    """Return the hyperparameters again under the names that any rule has for them."""
    names = {"lr": float(given.lr), "betas": given[1:3], "momentum": given.beta1, "beta": given.beta2}
    return names | {"eps": given.eps, "weight_decay": given.decay, "bound": given.bound}


def decays(group: Group, scheme: Scheme) -> dict[str, float]:
    """Return the factors of decoupled weight decay."""
    factor = 1.0 - group["lr"] * group["weight_decay"]
    return {f"decay_{scheme.decay}": factor}


def _adam_numbers(group: Group, step: int, scheme: Scheme, *, decoupled: bool) -> Numbers:
    beta1, beta2 = group["betas"]
    first, second = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
    if scheme.folded:
        shape = {"correction": 1.0, "eps": group["eps"] * second, "size": group["lr"] * second / first}
    else:
        shape = {"correction": second, "eps": group["eps"], "size": group["lr"] / first}
    decay = decays(group, scheme) if decoupled else {"penalty": group["weight_decay"]}
    return numbers(beta1=beta1, rest1=1.0 - beta1, beta2=beta2, rest2=1.0 - beta2, **shape, **decay)


def _adam(p: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Tensor, States]:
    g = _penalised(p, g, n)
    m = states["first"] * n.beta1 + g * n.rest1
    v = states["second"] * n.beta2 + (g * n.rest2) * g
    root = square_root(v)
    if n.correction != 1.0:
        root = root / torch.full_like(root, n.correction)
    direction = m / (root + n.eps)
    p = p * n.decay_before
    p = p - direction * n.size
    return p * n.decay_after, {"first": m, "second": v}


def _lion_numbers(group: Group, step: int, scheme: Scheme) -> Numbers:
    beta1, beta2 = group["betas"]
    return numbers(
        beta1=beta1, rest1=1.0 - beta1, beta2=beta2, rest2=1.0 - beta2, size=group["lr"], **decays(group, scheme)
    )


def _lion(p: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Tensor, States]:
    direction = (states["first"] * n.beta1 + g * n.rest1).sign()
    m = states["first"] * n.beta2 + g * n.rest2
    p = p * n.decay_before
    p = p - direction * n.size
    return p * n.decay_after, {"first": m}


def _sgd_numbers(group: Group, step: int, scheme: Scheme) -> Numbers:
    return numbers(penalty=group["weight_decay"], beta1=group["momentum"], size=group["lr"])


def _sgd(p: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Tensor, States]:
    g = _penalised(p, g, n)
    m = states["first"] * n.beta1 + g
    return p - m * n.size, {"first": m}


def _nesterov(p: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Tensor, States]:
    g = _penalised(p, g, n)
    m = states["first"] * n.beta1 + g
    return p - (g + m * n.beta1) * n.size, {"first": m}


def _penalised(p: Tensor, g: Tensor, n: Numbers) -> Tensor:
    """Add weight decay to a gradient."""
    return g + p * n.penalty if n.penalty else g


_MOMENTS = ("first", "second")
ADAMW = Rule(name="adamw", slots=_MOMENTS, update=_adam, numbers=partial(_adam_numbers, decoupled=True))
ADAM = Rule(name="adam", slots=_MOMENTS, update=_adam, numbers=partial(_adam_numbers, decoupled=False))
LION = Rule(name="lion", slots=("first",), update=_lion, numbers=_lion_numbers)
SGD = Rule(name="sgd", slots=("first",), update=_sgd, numbers=_sgd_numbers)
NESTEROV = Rule(name="nesterov", slots=("first",), update=_nesterov, numbers=_sgd_numbers)
