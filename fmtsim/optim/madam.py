# SPDX-License-Identifier: Apache-2.0
"""The multiplicative update of Madam: weights change by a factor, so a logarithm changes by an integer.

Source: Zhao et al., LNS-Madam, arXiv:2106.13914; jiaweizzhao/lns-madam-optimizer 42eba0a. In float32, one operation
at a time (``limit`` is 3 times the root mean square of the first weights):

1. ``v = beta v + (rest g) g``.
2. ``n = g / sqrt(v / correction)``, 0 where that is NaN, clamped to ``[-bound, bound]``.
3. With ``round_update``: n to the nearest even integer.
4. Weights as floats: ``x = (lr n) sign(w) + lr wd``; ``w * base**-x``, clamped to ``[-limit, limit]``. The power is
   ``exp(-x ln base)`` of ``fmtsim.rounding.elementary`` in float64, rounded to float32.
   Weights as codes of a logarithmic format with gamma steps an octave: the code of the magnitude falls by
   ``rne(((lr gamma) n) sign(w))`` and stays in the format's range. Signs never change.
"""

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from fmtsim.casts.ops import load_engine
from fmtsim.optim.codec import RMS_FACTOR
from fmtsim.optim.rules import Group, Rule, States, float32, numbers, square_root
from fmtsim.spec.optimizer import Numbers, Scheme
from fmtsim.support.float64 import float64

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
