# SPDX-License-Identifier: Apache-2.0
"""The update rules, each written once: float32 numbers in, float32 numbers out, one IEEE operation at a time.

Every line of an ``update`` is one float32 operation or several in the order of the parentheses; nothing is fused, and
nothing divides by a Python number (torch would multiply by a reciprocal on some devices). ``Numbers`` are worked out in
double precision and rounded to float32 once.

Madam multiplies weights by a factor, so a logarithm changes by an integer. Source: Zhao et al., LNS-Madam,
arXiv:2106.13914; jiaweizzhao/lns-madam-optimizer 42eba0a. In float32, one operation at a time (``limit`` is 3 times the
root mean square of the first weights):

1. ``v = beta v + (rest g) g``.
2. ``n = g / sqrt(v / correction)``, 0 where that is NaN, clamped to ``[-bound, bound]``.
3. With ``round_update``: n to the nearest even integer.
4. Weights as floats: ``x = (lr n) sign(w) + lr wd``; ``w * base**-x``, clamped to ``[-limit, limit]``. The power is
   ``exp(-x ln base)`` of ``fmtsim.rounding.elementary`` in float64, rounded to float32.
   Weights as codes of a logarithmic format with gamma steps an octave: the code of the magnitude falls by
   ``rne(((lr gamma) n) sign(w))`` and stays in the format's range. Signs never change.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.casts.ops import load_engine
from fmtsim.spec.optimizer import RMS_FACTOR, Hyperparameters, Numbers, Scheme
from fmtsim.support.float64 import float64

CONSTANTS = ("limit",)
"""Constants that rules derive from a parameter before its first step, by name; float32 [1]."""

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


def group_of(hyperparameters: Hyperparameters) -> Group:
    """Return the hyperparameters again under the names that any rule has for them."""
    names = {
        "lr": float(hyperparameters.lr),
        "betas": hyperparameters[1:3],
        "momentum": hyperparameters.beta1,
        "beta": hyperparameters.beta2,
    }
    return names | {"eps": hyperparameters.eps, "weight_decay": hyperparameters.decay, "bound": hyperparameters.bound}


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


BASES = (2, "e")


@lru_cache(maxsize=8)
def madam(base: int | str, round_update: bool) -> Rule:
    """Return the rule with factors that are powers of 2 or of e, and directions rounded to integers or not."""

    return Rule(
        name=f"madam(base={base}, round_update={round_update})",
        slots=("second",),
        numbers=_numbers,
        update=partial(_update, base, round_update),
        constants=_limit,
        steps=partial(_steps, base, round_update),
    )


def _update(base: int | str, rounded: bool, p: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Tensor, States]:
    direction, v = _direction(g, states, n, rounded)
    x = (direction * n.size) * p.sign() + n.penalty
    exponent = float64(x) * (-math.log(2.0) if base == 2 else -1.0)
    factor = load_engine("torch_engine").exp(exponent).to(torch.float32)
    limit = states["limit"]
    return torch.minimum(torch.maximum(p * factor, -limit), limit), {"second": v}


def _steps(
    base: int | str, rounded: bool, g: Tensor, signs: Tensor, states: States, n: Numbers, gamma: int
) -> tuple[Tensor, States]:
    assert base == 2  # Madam refuses others for weights kept as logarithms
    direction, v = _direction(g, states, n, rounded)
    return ((direction * float32(n.size * gamma)) * signs).round().to(torch.int64), {"second": v}


def _numbers(group: Group, step: int, scheme: Scheme) -> Numbers:
    beta = group["beta"]
    return numbers(
        beta2=beta,
        rest2=1.0 - beta,
        correction=1.0 - beta**step,
        size=group["lr"],
        bound=group["bound"],
        penalty=group["lr"] * group["weight_decay"],
    )


def _direction(g: Tensor, states: States, n: Numbers, rounded: bool) -> tuple[Tensor, Tensor]:
    v = states["second"] * n.beta2 + (g * n.rest2) * g
    direction = g / square_root(v / torch.full_like(v, n.correction))
    direction = torch.where(direction == direction, direction, 0.0).clamp(-n.bound, n.bound)
    return direction.round() if rounded else direction, v


def _limit(p: Tensor) -> States:
    """Return the largest magnitude that weights may have, worked out on the CPU in float64."""
    squares = float(p.cpu().to(torch.float64).square().sum())
    limit = RMS_FACTOR * math.sqrt(squares / max(p.numel(), 1))
    return {"limit": torch.tensor([limit], dtype=torch.float32, device=p.device)}
