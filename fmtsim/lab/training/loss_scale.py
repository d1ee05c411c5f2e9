# SPDX-License-Identifier: Apache-2.0
"""Loss scaling: a factor that keeps small gradients above a format's smallest number, as torch.amp.GradScaler does."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fmtsim.recipes.spec import LossScale


class LossScaler:
    """Scale a loss, take the factor out of the gradients again, and say whether the step may be taken.

    The schedule is that of ``torch.amp.GradScaler`` for one optimizer, number for number (PyTorch, aten's
    AmpGradScalerKernels): ``interval`` clean steps in a row multiply the factor by ``growth`` where the result is
    finite; an overflow multiplies it by ``backoff`` and begins the count anew. With ``hysteresis`` above 1 (Megatron,
    apex) the factor is kept until so many overflows have happened since the last clean step.

    Args:
        rule: The record; None scales nothing, and every step is taken.

    Attributes:
        scale: The factor in force, a float32 number.
        skipped: Steps that were not taken because a gradient was not finite.
        nonfinite: Steps with such gradients, taken or not.
    """

    def __init__(self, rule: LossScale | None) -> None:
        self.rule = rule
        self.scale = 1.0 if rule is None else _float32(rule.initial)
        self.skipped = self.nonfinite = 0
        self._clean = 0
        self._left = 1 if rule is None else rule.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the same bits."""
        return {name: value for name, value in vars(self).items() if name != "rule"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict`` of the same rule."""
        vars(self).update({name: state[name] for name in self.state_dict()})

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor."""
        return loss if self.rule is None else loss * self.scale

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Multiply gradients by ``float32(1 / scale)`` (a static factor divides them), in place.

        Returns:
            Whether the optimizer may step: a rule skips gradients that are not finite, without one they count.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        self.nonfinite += not finite
        if self.rule is None:
            return True
        self.skipped += not finite
        inverse = _float32(1 / self.scale) if self.scale else math.inf
        for g in gradients:
            if self.rule.interval is None:
                g.div_(self.scale)
            elif inverse != 1:
                g.mul_(inverse)
        self._update(finite)
        return finite

    def _update(self, finite: bool) -> None:
        rule = self.rule
        if rule is None or rule.interval is None:
            return
        if not finite:
            self._clean = 0
            self._left -= 1
            if self._left <= 0:
                self.scale = _float32(self.scale * rule.backoff)
            return
        self._left = rule.hysteresis
        self._clean += 1
        if self._clean == rule.interval:
            grown = _float32(self.scale * rule.growth)
            self.scale = grown if math.isfinite(grown) else self.scale
            self._clean = 0


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float())
