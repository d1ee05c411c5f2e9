# SPDX-License-Identifier: Apache-2.0
"""The configs that one layer runs under a recipe, by step."""

from dataclasses import dataclass
from typing import Final

from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.recipes.recipe import Rule
from fmtsim.support.errors import ArgumentError

HIGH: Final = "the recipe leaves it in high precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Hold the config of a layer at each step of training.

    Args:
        rules: The rules that fit the layer, in order; the first whose steps fit counts.
        default: What it runs where none does.
    """

    rules: tuple[Rule, ...]
    default: LinearConfig | None

    def at(self, step: int, total: int | None) -> LinearConfig | None:
        """Return the config of a step, by the steps done before it; None is high precision."""
        for rule in self.rules:
            if rule.steps is None or rule.steps.holds(step, total):
                return rule.use
        return self.default

    @property
    def configs(self) -> tuple[LinearConfig, ...]:
        """All configs that the layer may run."""
        configs = [rule.use for rule in self.rules if rule.use is not None]
        always = any(rule.steps is None for rule in self.rules)
        return tuple(configs if always or self.default is None else [*configs, self.default])

    def check(self, total: int | None) -> None:
        """Refuse rules that say different things about one step.

        Raises:
            ArgumentError: Two rules overlap, or one is a fraction of the run and ``total`` is None.
        """
        timed = [rule for rule in self.rules if rule.steps is not None]
        for i, first in enumerate(timed):
            for second in timed[i + 1 :]:
                assert first.steps is not None and second.steps is not None
                if first.use != second.use and first.steps.overlaps(second.steps, total):
                    raise ArgumentError(
                        f"the schedules of two rules overlap ({first.where}; {second.where}); "
                        "give Steps(first=, last=) that do not, last being the step behind the last one"
                    )

    @property
    def why_high(self) -> str:
        """Why the layer never runs another config than high precision, in words."""
        return ": ".join([HIGH, *(rule.where for rule in self.rules[:1])])

    @property
    def scheduled(self) -> bool:
        """Whether the config depends on the step."""
        return any(rule.steps is not None for rule in self.rules)
