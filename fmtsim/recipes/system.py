# SPDX-License-Identifier: Apache-2.0
"""Parts of a recipe outside of the model: its optimizer, the reduction of gradients, and levels of both.

Names are those of ``fmtsim.optim`` and ``fmtsim.distributed``, which look them up where they are used.
"""

from dataclasses import dataclass
from typing import Final, Literal

from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import check_types

OPTIMIZERS: Final = {"adamw": "AdamW", "madam": "Madam"}
"""Optimizers that recipes name, and their classes in ``fmtsim.optim``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Name the optimizer of a recipe and how its states are kept.

    Args:
        rule: ``"adamw"`` or ``"madam"``.
        state: A scheme of ``fmtsim.optim.list_schemes()``.
    """

    rule: Literal["adamw", "madam"] = "adamw"
    state: str

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        return f"{OPTIMIZERS[self.rule]}(state={self.state!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Describe one of several stages in which a system goes to low precision.

    Args:
        name: What its source calls it, such as ``"O1"``.
        optimizer: The optimizer at this level; None is AdamW in float32.
        reduction: The reduction of gradients by its name in ``fmtsim.distributed``; None is a mean in float32.
        gather: Format in which ranks that share out the weights (ZeRO) send each other the whole ones, or None.
    """

    name: str
    optimizer: OptimizerConfig | None = None
    reduction: str | None = None
    gather: str | None = None

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        words = [f"{self.name}: {self.optimizer or 'AdamW'}"]
        words += [f"gradients reduced by {self.reduction}"] if self.reduction else []
        return ", ".join([*words, *([f"weights gathered in {self.gather}"] if self.gather else [])])


def find_level(recipe: str, levels: tuple[Level, ...], name: str) -> Level:
    """Return the level of a name, upper or lower case; raise ArgumentError where the recipe has none."""
    for level in levels:
        if level.name.lower() == name.lower():
            return level
    has = f"its levels are {', '.join(level.name for level in levels)}" if levels else "it has none"
    raise ArgumentError(f"recipe {recipe} has no level {name!r}; {has}")
